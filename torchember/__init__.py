"""See what every tensor of a network does while it trains

Each public name is fetched from its room when it is first touched, so that importing torchember loads nothing else."""
from importlib import import_module
from sys import _getframe
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .capture.tree import moduleTrack as moduleTrack
    from .choose import at as at
    from .choose import between as between
    from .choose import every as every
    from .choose import log_spaced as log_spaced
    from .choose import select as select
    from .choose import until as until
    from .core import torchEmber as torchEmber
    from .frames.logs import query as query
    from .frames.logs import read as read
    from .frames.logs import runs as runs
    from .frames.logs import wide as wide
    from .frames.files import read_csv as read_csv
    from .frames.files import read_parquet as read_parquet
    from .frames.files import read_pickle as read_pickle
    from .frames.files import write_parquet as write_parquet
    from .frames.logframe import LogFrame as LogFrame
    from .frames.logframe import SchemaException as SchemaException
    from .frames.logframe import TrainingStats as TrainingStats
    from .frames.logframe import from_logframe as from_logframe
    from .frames.logframe import to_logframe as to_logframe
    from .frames.logframe import validate as validate
    from .frames.unit_tables import dead_units as dead_units
    from .frames.tracking import stash_all_stats_and_hist as stash_all_stats_and_hist
    from .frames.tracking import stash_full_tensor as stash_full_tensor
    from .frames.tracking import stash_hist as stash_hist
    from .frames.tracking import stash_scalar_stats as stash_scalar_stats
    from .frames.tracking import track as track
    from .measure.exponents import exponents_for as exponents_for
    from .measure.exponents import headroom as headroom
    from .measure.kernels import summarize as summarize
    from .measure.spectrum import SpectrumError as SpectrumError
    from .measure.spectrum import cal_cov_matrix as cal_cov_matrix
    from .measure.spectrum import cal_eig as cal_eig
    from .measure.spectrum import covariance as covariance
    from .measure.spectrum import effective_rank as effective_rank
    from .measure.spectrum import rankme as rankme
    from .measure.stats import get_stats as get_stats
    from .measure.summary import Summary as Summary
    from .monitor.monitor import Monitor as Monitor
    from .monitor.quantities import MultiStepQuantity as MultiStepQuantity
    from .monitor.quantities import SingleStepQuantity as SingleStepQuantity
    from .monitor.quantities import quantity as quantity
    from .monitor.views import BackwardInputExtension as BackwardInputExtension
    from .monitor.views import BackwardOutputEigOfCovExtension as BackwardOutputEigOfCovExtension
    from .monitor.views import BackwardOutputExtension as BackwardOutputExtension
    from .monitor.views import Extension as Extension
    from .monitor.views import ForwardInputEigOfCovExtension as ForwardInputEigOfCovExtension
    from .monitor.views import ForwardInputExtension as ForwardInputExtension
    from .monitor.views import ForwardOutputExtension as ForwardOutputExtension
    from .show.visualization import Visualization as Visualization
    from .choose import linear as linear
    from .record import EmberWarning as EmberWarning
    from .record import ttypes as ttypes
    from .show.comparison import compare as compare
    from .show.heatmaps import scalar_global_heatmap as scalar_global_heatmap
    from .show.histograms import exp_hist as exp_hist
    from .show.histograms import ridge as ridge
    from .show.lines import FacetException as FacetException
    from .show.lines import scalar_line as scalar_line
    from .show.first_look import overview as overview
    from .show.first_look import summary as summary
    from .show.page import report as report
    from .show.live_view import live as live
    from .show.pointing import interactive as interactive
    from .show.ranges import out_of_range as out_of_range
    from .show.surfaces import Surface3d as Surface3d
    from .show.surfaces import surface as surface
    from .show.trees import tree as tree
    from .show.update_ratios import updates as updates
    from .state.algebra import StateDict as StateDict
    from .state.earlier import NetDict as NetDict
    from .state.earlier import compute_stats as compute_stats
    from .state.earlier import get_grad as get_grad
    from .state.earlier import get_optimizer_state as get_optimizer_state
    from .state.earlier import get_weight as get_weight
    from .state.earlier import utils as utils
    from .state.factories import from_activation as from_activation
    from .state.factories import from_activation_grad as from_activation_grad
    from .state.factories import from_grad as from_grad
    from .state.factories import from_optimizer_state as from_optimizer_state
    from .state.factories import from_state_dict as from_state_dict
    from .state.factories import from_together as from_together
    from .state.factories import from_weight as from_weight
    from .state.factories import load as load
    from .state.noise import NoiseScale as NoiseScale
    from .state.noise import noise_scale as noise_scale
    from .state.ratios import trust_ratio as trust_ratio
    from .store.jsonl import emberTracker as emberTracker
    from .store.jsonl import tracker as tracker

rooms = {
    'torchEmber': 'core', 'moduleTrack': 'capture.tree',
    'emberTracker': 'store.jsonl', 'tracker': 'store.jsonl',
    'read': 'frames.logs', 'runs': 'frames.logs', 'query': 'frames.logs', 'wide': 'frames.logs',
    'dead_units': 'frames.unit_tables', 'surface': 'show.surfaces', 'Surface3d': 'show.surfaces',
    'get_stats': 'measure.stats', 'summarize': 'measure.kernels', 'Summary': 'measure.summary',
    'exponents_for': 'measure.exponents', 'headroom': 'measure.exponents',
    'covariance': 'measure.spectrum', 'cal_cov_matrix': 'measure.spectrum', 'cal_eig': 'measure.spectrum',
    'rankme': 'measure.spectrum', 'effective_rank': 'measure.spectrum', 'SpectrumError': 'measure.spectrum',
    'overview': 'show.first_look', 'summary': 'show.first_look', 'scalar_line': 'show.lines', 'exp_hist': 'show.histograms', 'ridge': 'show.histograms',
    'scalar_global_heatmap': 'show.heatmaps', 'tree': 'show.trees',
    'out_of_range': 'show.ranges', 'updates': 'show.update_ratios', 'compare': 'show.comparison', 'report': 'show.page',
    'live': 'show.live_view',
    'FacetException': 'show.lines', 'interactive': 'show.pointing',
    'noise_scale': 'state.noise', 'NoiseScale': 'state.noise',
    'select': 'choose', 'every': 'choose', 'at': 'choose', 'until': 'choose', 'between': 'choose', 'log_spaced': 'choose',
    'StateDict': 'state.algebra', 'from_weight': 'state.factories', 'from_grad': 'state.factories', 'from_state_dict': 'state.factories',
    'from_optimizer_state': 'state.factories', 'from_together': 'state.factories', 'from_activation': 'state.factories',
    'from_activation_grad': 'state.factories', 'load': 'state.factories', 'trust_ratio': 'state.ratios',
    'NetDict': 'state.earlier', 'get_weight': 'state.earlier', 'get_grad': 'state.earlier', 'get_optimizer_state': 'state.earlier',
    'compute_stats': 'state.earlier', 'utils': 'state.earlier',
    'to_logframe': 'frames.logframe', 'from_logframe': 'frames.logframe', 'validate': 'frames.logframe', 'LogFrame': 'frames.logframe',
    'TrainingStats': 'frames.logframe', 'SchemaException': 'frames.logframe',
    'read_pickle': 'frames.files', 'read_csv': 'frames.files', 'read_parquet': 'frames.files', 'write_parquet': 'frames.files',
    'track': 'frames.tracking', 'stash_scalar_stats': 'frames.tracking', 'stash_hist': 'frames.tracking',
    'stash_all_stats_and_hist': 'frames.tracking', 'stash_full_tensor': 'frames.tracking',
    'Monitor': 'monitor.monitor',
    'MultiStepQuantity': 'monitor.quantities', 'SingleStepQuantity': 'monitor.quantities', 'quantity': 'monitor.quantities',
    'BackwardInputExtension': 'monitor.views', 'BackwardOutputEigOfCovExtension': 'monitor.views', 'BackwardOutputExtension': 'monitor.views',
    'Extension': 'monitor.views', 'ForwardInputEigOfCovExtension': 'monitor.views',
    'ForwardInputExtension': 'monitor.views', 'ForwardOutputExtension': 'monitor.views',
    'Visualization': 'show.visualization',
    'linear': 'choose',
    'ttypes': 'record', 'EmberWarning': 'record'}
__all__ = ['__version__', *(n for n in rooms if n!='utils')] # which a star import must not put over yours


def __getattr__(name):
    if name=='__version__':
        from importlib.metadata import PackageNotFoundError, version
        try: return version('torchember')
        except PackageNotFoundError: return '0+unknown' # a checkout that is not installed
    if name not in rooms: raise missing(name)
    try: value = getattr(import_module(f'.{rooms[name]}', __name__), name)
    except ModuleNotFoundError as e:
        if e.name!='torch': raise
        raise ModuleNotFoundError(f"torchember.{name} needs torch, which is not installed. Run: pip install torch. "
            "Reading logs works without it: torchember.emberTracker('<run>').df", name='torch') from None
    globals()[name] = value
    return value


def missing(name):
    "The error for a name that is not there: what took the place of an older tool's, which an import would lose the words of, or what is called nearly so"
    if name.startswith('_'): return AttributeError(f"module 'torchember' has no attribute {name!r}", name=name)
    if said := import_module('.gone', __name__).sentence(name):
        imported = _getframe(2).f_globals.get('__name__', '').startswith('importlib.') # which asks for the names in `from torchember import ...`
        return (ImportError if imported else AttributeError)(said, name=name)
    close = ' or '.join(map(repr, import_module('.record', __name__).closest(name, list(rooms))))
    return AttributeError(f"module 'torchember' has no attribute {name!r}." + (f" Did you mean {close}?" if close else ''), name=name)


def __dir__(): return sorted({*__all__, *(n for n in globals() if n[:2]==n[-2:]=='__')}) # what a person types, and what every module has
