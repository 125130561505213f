"""Snapshots of a model: arithmetic, reductions, tables, plots, the gradient noise scale, and the coordinate check"""
from typing import TYPE_CHECKING

from ..ground.lazy import lazy_attributes

if TYPE_CHECKING:
    from .algebra import StateDict as StateDict
    from .factories import from_weight as from_weight
    from .factories import from_grad as from_grad
    from .factories import from_state_dict as from_state_dict
    from .factories import from_optimizer_state as from_optimizer_state
    from .factories import from_together as from_together
    from .factories import from_activation as from_activation
    from .factories import from_activation_grad as from_activation_grad
    from .factories import load as load
    from .ratios import trust_ratio as trust_ratio
    from .noise import noise_scale as noise_scale
    from .noise import NoiseScale as NoiseScale
    from .coordinates import coord_check as coord_check

__getattr__,__dir__ = lazy_attributes(__name__, {
    'algebra': 'StateDict',
    'factories': 'from_weight from_grad from_state_dict from_optimizer_state from_together from_activation from_activation_grad load',
    'ratios': 'trust_ratio',
    'noise': 'noise_scale NoiseScale',
    'coordinates': 'coord_check'})
