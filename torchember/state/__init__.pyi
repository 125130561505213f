from .algebra import StateDict as StateDict
from .factories import (from_weight as from_weight, from_grad as from_grad, from_state_dict as from_state_dict,
    from_optimizer_state as from_optimizer_state, from_together as from_together, from_activation as from_activation,
    from_activation_grad as from_activation_grad, load as load)
from .ratios import trust_ratio as trust_ratio
from .noise import noise_scale as noise_scale, NoiseScale as NoiseScale
from .coordinates import coord_check as coord_check
