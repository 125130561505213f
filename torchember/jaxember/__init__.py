"""Recording of JAX trainings: `track`, `probe`, and the statistics of Track & Visualize.

Each name is imported on first use. Nothing here imports torch."""
from ..ground.needs import needs
from ..ground.lazy import lazy_attributes

__getattr__,__dir__ = lazy_attributes(__name__, {
    'tracker': 'JaxTracker probe stash_all_stats_and_hist stash_full_tensor stash_hist stash_scalar_stats track'},
    lambda: needs('jax', for_='torchember.jaxember'))
__all__ = __dir__()
