"""Snapshots of a model: arithmetic, reductions, tables, plots, the gradient noise scale, and the coordinate check"""
from ..ground.lazy import lazy_attributes

__getattr__,__dir__ = lazy_attributes(__name__, {
    'algebra': 'StateDict',
    'factories': 'from_weight from_grad from_state_dict from_optimizer_state from_together from_activation from_activation_grad load',
    'ratios': 'trust_ratio',
    'noise': 'noise_scale NoiseScale',
    'coordinates': 'coord_check'})
