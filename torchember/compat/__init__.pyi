from .tandv import (track as track, stash_scalar_stats as stash_scalar_stats, stash_hist as stash_hist,
    stash_all_stats_and_hist as stash_all_stats_and_hist, stash_full_tensor as stash_full_tensor)
from .nnstat import (NetDict as NetDict, get_weight as get_weight, get_grad as get_grad,
    get_optimizer_state as get_optimizer_state, compute_stats as compute_stats, utils as utils)
from .taiyi import Visualization as Visualization
from ..frames.logframe import (to_logframe as to_logframe, from_logframe as from_logframe, validate as validate,
    LogFrame as LogFrame, TrainingStats as TrainingStats, SchemaException as SchemaException)
from ..frames.files import (read_pickle as read_pickle, read_csv as read_csv, read_parquet as read_parquet,
    write_parquet as write_parquet)
from ..show.lines import FacetException as FacetException
