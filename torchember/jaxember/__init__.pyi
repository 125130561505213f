from .tracker import (JaxTracker as JaxTracker, probe as probe, stash_all_stats_and_hist as stash_all_stats_and_hist,
    stash_full_tensor as stash_full_tensor, stash_hist as stash_hist, stash_scalar_stats as stash_scalar_stats,
    track as track)
