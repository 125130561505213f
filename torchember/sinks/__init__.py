"""Sinks: objects that send statistics of a run to experiment trackers such as W&B"""
from typing import TYPE_CHECKING

from ..ground.lazy import lazy_attributes

if TYPE_CHECKING:
    from .feed import replay as replay
    from .mlflow import MLflow as MLflow
    from .sink import Sink as Sink
    from .tensorboard import TensorBoard as TensorBoard
    from .trackio import Trackio as Trackio
    from .wandb import Wandb as Wandb

__getattr__,__dir__ = lazy_attributes(__name__, {'feed': 'replay', 'mlflow': 'MLflow', 'sink': 'Sink', 'tensorboard': 'TensorBoard', 'trackio': 'Trackio',
    'wandb': 'Wandb'})
