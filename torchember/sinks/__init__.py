"""Sinks: objects that send statistics of a run to experiment trackers such as W&B"""
from ..ground.lazy import lazy_attributes

__getattr__,__dir__ = lazy_attributes(__name__, {'feed': 'replay', 'mlflow': 'MLflow', 'sink': 'Sink', 'tensorboard': 'TensorBoard', 'trackio': 'Trackio',
    'wandb': 'Wandb'})
