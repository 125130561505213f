"""The same rows from JAX: `track`, `probe`, and the functions that Track & Visualize has for what is kept of an array

Each name is fetched from its room when it is touched. Nothing here imports torch."""
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tracker import JaxTracker as JaxTracker
    from .tracker import probe as probe
    from .tracker import stash_all_stats_and_hist as stash_all_stats_and_hist
    from .tracker import stash_full_tensor as stash_full_tensor
    from .tracker import stash_hist as stash_hist
    from .tracker import stash_scalar_stats as stash_scalar_stats
    from .tracker import track as track

__all__ = ['JaxTracker', 'probe', 'stash_all_stats_and_hist', 'stash_full_tensor', 'stash_hist', 'stash_scalar_stats', 'track'] # noqa: F822


def __getattr__(name):
    if name not in __all__: raise AttributeError(f"module 'torchember.jaxember' has no attribute {name!r}")
    import_module('..needs', __name__).needs('jax', for_='torchember.jaxember')
    return getattr(import_module('.tracker', __name__), name)


def __dir__(): return sorted([*globals(), *__all__])
