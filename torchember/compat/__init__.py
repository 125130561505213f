"""Functions and classes of the older tools: Track & Visualize, nnstat, Taiyi"""
from typing import TYPE_CHECKING

from ..ground.lazy import lazy_attributes

if TYPE_CHECKING:
    from .tandv import track as track
    from .tandv import stash_scalar_stats as stash_scalar_stats
    from .tandv import stash_hist as stash_hist
    from .tandv import stash_all_stats_and_hist as stash_all_stats_and_hist
    from .tandv import stash_full_tensor as stash_full_tensor
    from .nnstat import NetDict as NetDict
    from .nnstat import get_weight as get_weight
    from .nnstat import get_grad as get_grad
    from .nnstat import get_optimizer_state as get_optimizer_state
    from .nnstat import compute_stats as compute_stats
    from .nnstat import utils as utils
    from .taiyi import Visualization as Visualization
    from ..frames.logframe import to_logframe as to_logframe
    from ..frames.logframe import from_logframe as from_logframe
    from ..frames.logframe import validate as validate
    from ..frames.logframe import LogFrame as LogFrame
    from ..frames.logframe import TrainingStats as TrainingStats
    from ..frames.logframe import SchemaException as SchemaException
    from ..frames.files import read_pickle as read_pickle
    from ..frames.files import read_csv as read_csv
    from ..frames.files import read_parquet as read_parquet
    from ..frames.files import write_parquet as write_parquet
    from ..show.lines import FacetException as FacetException

__getattr__,__dir__ = lazy_attributes(__name__, {
    'tandv': 'track stash_scalar_stats stash_hist stash_all_stats_and_hist stash_full_tensor',
    'nnstat': 'NetDict get_weight get_grad get_optimizer_state compute_stats utils',
    'taiyi': 'Visualization',
    '..frames.logframe': 'to_logframe from_logframe validate LogFrame TrainingStats SchemaException',
    '..frames.files': 'read_pickle read_csv read_parquet write_parquet',
    '..show.lines': 'FacetException'})
