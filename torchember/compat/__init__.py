"""Functions and classes of the older tools Track & Visualize, nnstat and Taiyi, so that programs written for them still run"""
from ..ground.lazy import lazy_attributes

__getattr__,__dir__ = lazy_attributes(__name__, {
    'tandv': 'track stash_scalar_stats stash_hist stash_all_stats_and_hist stash_full_tensor',
    'nnstat': 'NetDict get_weight get_grad get_optimizer_state compute_stats utils',
    'taiyi': 'Visualization',
    '..frames.logframe': 'to_logframe from_logframe validate LogFrame TrainingStats SchemaException',
    '..frames.files': 'read_pickle read_csv read_parquet write_parquet',
    '..show.lines': 'FacetException'})
