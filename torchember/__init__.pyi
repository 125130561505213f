from .ember import torchEmber as torchEmber
from .store.jsonl import emberTracker as emberTracker
from .frames.logs import read as read, wide as wide
from .frames.listing import runs as runs, compact as compact
from .frames.scan import scan as scan, query as query
from .frames.moving import sync as sync
from .ground.choose import (select as select, every as every, at as at, until as until, between as between,
    log_spaced as log_spaced)
from .ground.messages import EmberWarning as EmberWarning
from .measure.stats import get_stats as get_stats
from .show.first_look import overview as overview
from .show.run_summary import summary as summary
from .show.lines import scalar_line as scalar_line
from .show.trees import tree as tree
from .show.update_ratios import updates as updates
from .show.comparison import compare as compare
from .show.pointing import interactive as interactive
from .show.live.live_view import live as live
from .show.page.document import report as report
from .health.diagnose import diagnose as diagnose
from .health.brief import brief as brief
from .health.diff import diff as diff, assert_same_run as assert_same_run
from .health.kept import keep_run as keep_run
from .health.locate import locate as locate
from .health.rules import rule as rule
from .health.finding import finding as finding
from .health.watch import TrainingStopped as TrainingStopped
from .sinks.feed import replay as replay
from .sinks.sink import Sink as Sink
from .state.algebra import StateDict as StateDict
from .monitor.monitor import Monitor as Monitor
from .monitor.quantities import quantity as quantity
from .capture.tree import moduleTrack as moduleTrack
from .store.jsonl import tracker as tracker
from .ground.choose import linear as linear
from .ground.record import ttypes as ttypes
from .measure.kernels import summarize as summarize
from .measure.summary import Summary as Summary
from .measure.exponents import exponents_for as exponents_for, headroom as headroom
from .measure.spectrum import (covariance as covariance, cal_cov_matrix as cal_cov_matrix, cal_eig as cal_eig,
    rankme as rankme, effective_rank as effective_rank, SpectrumError as SpectrumError)
from .frames.belongings import du as du, mv as mv, rm as rm
from .frames.unit_tables import dead_units as dead_units
from .frames.logframe import (to_logframe as to_logframe, from_logframe as from_logframe, validate as validate,
    LogFrame as LogFrame, TrainingStats as TrainingStats, SchemaException as SchemaException)
from .frames.files import (read_pickle as read_pickle, read_csv as read_csv, read_parquet as read_parquet,
    write_parquet as write_parquet)
from .show.lines import FacetException as FacetException
from .show.histograms import exp_hist as exp_hist, ridge as ridge
from .show.heatmaps import scalar_global_heatmap as scalar_global_heatmap
from .show.ranges import out_of_range as out_of_range
from .show.attention_map import attention_map as attention_map
from .show.surfaces import surface as surface, Surface3d as Surface3d
from .show.differences import differences as differences
from .state.factories import (from_weight as from_weight, from_grad as from_grad, from_state_dict as from_state_dict,
    from_optimizer_state as from_optimizer_state, from_together as from_together, from_activation as from_activation,
    from_activation_grad as from_activation_grad, load as load)
from .state.ratios import trust_ratio as trust_ratio
from .state.noise import noise_scale as noise_scale, NoiseScale as NoiseScale
from .state.coordinates import coord_check as coord_check
from .monitor.quantities import MultiStepQuantity as MultiStepQuantity, SingleStepQuantity as SingleStepQuantity
from .monitor.views import (Extension as Extension, ForwardInputExtension as ForwardInputExtension,
    ForwardOutputExtension as ForwardOutputExtension, ForwardInputEigOfCovExtension as ForwardInputEigOfCovExtension,
    BackwardInputExtension as BackwardInputExtension, BackwardOutputExtension as BackwardOutputExtension,
    BackwardOutputEigOfCovExtension as BackwardOutputEigOfCovExtension)
from .compat.tandv import (track as track, stash_scalar_stats as stash_scalar_stats, stash_hist as stash_hist,
    stash_all_stats_and_hist as stash_all_stats_and_hist, stash_full_tensor as stash_full_tensor)
from .compat.nnstat import (NetDict as NetDict, get_weight as get_weight, get_grad as get_grad,
    get_optimizer_state as get_optimizer_state, compute_stats as compute_stats, utils as utils)
from .compat.taiyi import Visualization as Visualization
from . import compat as compat, jaxember as jaxember, monitor as monitor, sinks as sinks, state as state
__version__: str
