"""See what every tensor of a network does while it trains.

Each public name is imported on first use, so importing torchember loads nothing else."""
from importlib import import_module
from sys import _getframe

names = { # Python module -> public names, separated by spaces
    'ember': 'torchEmber', 'store.jsonl': 'emberTracker',
    'frames.logs': 'read wide', 'frames.listing': 'runs compact', 'frames.scan': 'scan query', 'frames.moving': 'sync',
    'ground.choose': 'select every at until between log_spaced', 'ground.messages': 'EmberWarning',
    'measure.stats': 'get_stats',
    'show.first_look': 'overview', 'show.run_summary': 'summary', 'show.lines': 'scalar_line', 'show.trees': 'tree', 'show.update_ratios': 'updates',
    'show.comparison': 'compare', 'show.pointing': 'interactive', 'show.live.live_view': 'live', 'show.page.document': 'report',
    'health.diagnose': 'diagnose', 'health.brief': 'brief', 'health.diff': 'diff assert_same_run', 'health.kept': 'keep_run', 'health.locate': 'locate',
    'health.rules': 'rule', 'health.finding': 'finding', 'health.watch': 'TrainingStopped',
    'sinks.feed': 'replay', 'sinks.sink': 'Sink',
    'state.algebra': 'StateDict',
    'monitor.monitor': 'Monitor', 'monitor.quantities': 'quantity'}
# names for special purposes and of older tools: `from torchember import ridge` works, but `dir(torchember)` does not list them
other_names = {
    'capture.tree': 'moduleTrack', 'store.jsonl': 'tracker', 'ground.choose': 'linear', 'ground.record': 'ttypes',
    'measure.kernels': 'summarize', 'measure.summary': 'Summary', 'measure.exponents': 'exponents_for headroom',
    'measure.spectrum': 'covariance cal_cov_matrix cal_eig rankme effective_rank SpectrumError',
    'frames.belongings': 'du mv rm', 'frames.unit_tables': 'dead_units',
    'frames.logframe': 'to_logframe from_logframe validate LogFrame TrainingStats SchemaException',
    'frames.files': 'read_pickle read_csv read_parquet write_parquet',
    'show.lines': 'FacetException', 'show.histograms': 'exp_hist ridge', 'show.heatmaps': 'scalar_global_heatmap', 'show.ranges': 'out_of_range',
    'show.attention_map': 'attention_map', 'show.surfaces': 'surface Surface3d', 'show.differences': 'differences',
    'state.factories': 'from_weight from_grad from_state_dict from_optimizer_state from_together from_activation from_activation_grad load',
    'state.ratios': 'trust_ratio', 'state.noise': 'noise_scale NoiseScale', 'state.coordinates': 'coord_check',
    'monitor.quantities': 'MultiStepQuantity SingleStepQuantity',
    'monitor.views': 'Extension ForwardInputExtension ForwardOutputExtension ForwardInputEigOfCovExtension BackwardInputExtension BackwardOutputExtension '
        'BackwardOutputEigOfCovExtension',
    'compat.tandv': 'track stash_scalar_stats stash_hist stash_all_stats_and_hist stash_full_tensor',
    'compat.nnstat': 'NetDict get_weight get_grad get_optimizer_state compute_stats utils',
    'compat.taiyi': 'Visualization'}
module_of = {name: module for listed in (names, other_names) for module,found in listed.items() for name in found.split()}
# Packages that are imported on first use, such as `torchember.state`
packages = 'compat', 'jaxember', 'monitor', 'sinks', 'state'
__all__ = ['__version__', *(n for found in names.values() for n in found.split())]


def __getattr__(name):
    if name=='__version__':
        from importlib.metadata import PackageNotFoundError, version
        try: return version('torchember')
        except PackageNotFoundError: return '0+unknown' # for a source folder that is not installed
    if name in packages: return import_module(f'.{name}', __name__)
    if name not in module_of: raise missing(name)
    try: value = getattr(import_module(f'.{module_of[name]}', __name__), name)
    except ModuleNotFoundError as e:
        if e.name!='torch': raise
        raise ModuleNotFoundError(f"torchember.{name} needs torch, which is not installed. Run: pip install torch. "
            "Logs can be read without torch: torchember.emberTracker('<run>').df", name='torch') from None
    globals()[name] = value
    return value


def load_ipython_extension(shell):
    "Add the magic command `%%ember` to a notebook, after `%load_ext torchember`."
    import_module('.magics', __name__).load_ipython_extension(shell)


def missing(name):
    "Return the exception for a name that torchember does not have. The message names the replacement of an older tool's name, or similar names."
    if name.startswith('_'): return AttributeError(f"module 'torchember' has no attribute {name!r}", name=name)
    if message := import_module('.compat.gone', __name__).sentence(name):
        # True if the name is imported by `from torchember import name`
        imported = _getframe(2).f_globals.get('__name__', '').startswith('importlib.')
        return (ImportError if imported else AttributeError)(message, name=name)
    close = ' or '.join(map(repr, import_module('.ground.messages', __name__).closest(name, list(module_of))))
    return AttributeError(f"module 'torchember' has no attribute {name!r}." + (f" Did you mean {close}?" if close else ''), name=name)


def __dir__(): return sorted({*__all__, *packages, *(n for n in globals() if n[:2]==n[-2:]=='__')})
