"""Recording of JAX trainings: `track`, `probe`, and the statistics of Track & Visualize.

Each name is imported on first use. Nothing here imports torch."""
from typing import TYPE_CHECKING

from ..ground.needs import needs
from ..ground.lazy import lazy_attributes

if TYPE_CHECKING:
    from .tracker import JaxTracker as JaxTracker
    from .tracker import probe as probe
    from .tracker import stash_all_stats_and_hist as stash_all_stats_and_hist
    from .tracker import stash_full_tensor as stash_full_tensor
    from .tracker import stash_hist as stash_hist
    from .tracker import stash_scalar_stats as stash_scalar_stats
    from .tracker import track as track

__getattr__,__dir__ = lazy_attributes(__name__, {
    'tracker': 'JaxTracker probe stash_all_stats_and_hist stash_full_tensor stash_hist stash_scalar_stats track'},
    lambda: needs('jax', for_='torchember.jaxember'))
__all__ = __dir__()
