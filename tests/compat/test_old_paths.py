"What a script imported from 0.3.0.dev0, from whichever room, it still imports"
import pickle
from importlib import import_module
from importlib.util import find_spec

import programs
import pytest

import torchember
from torchember.compat.moved import moved

if find_spec('jax'): import jax # noqa: F401 (what it does to the process is not these tests')

public = { # room -> what was public in it
    'core': 'torchEmber',
    'capture.tree': 'moduleTrack',
    'store.jsonl': 'emberTracker tracker',
    'frames.logs': 'read runs query wide',
    'frames.unit_tables': 'dead_units',
    'show.surfaces': 'surface Surface3d',
    'measure.stats': 'get_stats',
    'measure.kernels': 'summarize',
    'measure.summary': 'Summary',
    'measure.exponents': 'exponents_for headroom',
    'measure.spectrum': 'covariance cal_cov_matrix cal_eig rankme effective_rank SpectrumError',
    'show.first_look': 'overview summary',
    'show.lines': 'scalar_line FacetException',
    'show.histograms': 'exp_hist ridge',
    'show.heatmaps': 'scalar_global_heatmap',
    'show.trees': 'tree',
    'show.ranges': 'out_of_range',
    'show.update_ratios': 'updates',
    'show.comparison': 'compare',
    'show.page': 'report',
    'show.live_view': 'live',
    'show.pointing': 'interactive',
    'state.noise': 'noise_scale NoiseScale',
    'choose': 'select every at until between log_spaced linear',
    'state.algebra': 'StateDict',
    'state.factories': 'from_weight from_grad from_state_dict from_optimizer_state from_together from_activation from_activation_grad load',
    'state.ratios': 'trust_ratio',
    'state.earlier': 'NetDict get_weight get_grad get_optimizer_state compute_stats utils',
    'frames.logframe': 'to_logframe from_logframe validate LogFrame TrainingStats SchemaException',
    'frames.files': 'read_pickle read_csv read_parquet write_parquet',
    'frames.tracking': 'track stash_scalar_stats stash_hist stash_all_stats_and_hist stash_full_tensor',
    'monitor.monitor': 'Monitor',
    'monitor.quantities': 'MultiStepQuantity SingleStepQuantity quantity',
    'monitor.views': 'BackwardInputExtension BackwardOutputEigOfCovExtension BackwardOutputExtension Extension ForwardInputEigOfCovExtension '
        'ForwardInputExtension ForwardOutputExtension',
    'show.visualization': 'Visualization',
    'record': 'ttypes EmberWarning',
    'monitor.single_step': 'InputCovMaxEig InputCovStableRank InputCovCondition InputCovCondition20 InputCovCondition50 InputCovCondition80 '
        'OutputGradCovMaxEig OutputGradCovStableRank OutputGradCovCondition OutputGradCovCondition20 OutputGradCovCondition50 '
        'OutputGradCovCondition80 WeightNorm WeightGradNorm InputMean InputStd InputSndNorm OutputGradSndNorm RankMe WeightEffectiveRank '
        'LinearDeadNeuronNum SaturatedUnits',
    'monitor.multi_step': 'MeanTID VarTID WeightParamJump UpdateEffectiveRank GradSNR UnitActivity',
    'jaxember.tracker': 'JaxTracker probe stash_all_stats_and_hist stash_full_tensor stash_hist stash_scalar_stats track',
    'jaxember': 'JaxTracker probe stash_all_stats_and_hist stash_full_tensor stash_hist stash_scalar_stats track',
    'monitor': 'InputCovMaxEig InputCovStableRank InputCovCondition InputCovCondition20 InputCovCondition50 InputCovCondition80 '
        'OutputGradCovMaxEig OutputGradCovStableRank OutputGradCovCondition OutputGradCovCondition20 OutputGradCovCondition50 '
        'OutputGradCovCondition80 WeightNorm WeightGradNorm InputMean InputStd InputSndNorm OutputGradSndNorm RankMe WeightEffectiveRank '
        'LinearDeadNeuronNum SaturatedUnits MeanTID VarTID WeightParamJump UpdateEffectiveRank GradSNR UnitActivity'}


@pytest.mark.parametrize('room', public)
def test_names_are_found_in_the_rooms_where_they_were(room):
    if room.startswith('jaxember'): pytest.importorskip('jax')
    was = import_module(f'torchember.{room}')
    for name in public[room].split():
        found = getattr(was, name)
        if name in torchember.rooms and not room.startswith('jaxember'): assert found is getattr(torchember, name)
        if room in moved: assert found is getattr(import_module(f'torchember.{moved[room]}'), name)


def test_a_room_is_imported_once_under_both_names():
    for was,now in moved.items():
        if was.startswith('jaxember'): pytest.importorskip('jax')
        if now=='measure.readers.triton': pytest.importorskip('triton')
        room = import_module(f'torchember.{was}')
        assert room is import_module(f'torchember.{now}') and room.__name__==room.__spec__.name==f'torchember.{now}'


def test_in_a_fresh_process_in_either_order():
    code = "import torchember.{0} as a, torchember.{1} as b; assert a is b, (a, b); from torchember import {0}; assert {0} is a"
    for names in (('core', 'ember'), ('record', 'ground.record')): # the first asks for the old name first, too
        got = programs.run(code.format(*names))
        assert got.returncode==0, got.stderr
    got = programs.run('import torchember.cores')
    assert "ModuleNotFoundError: No module named 'torchember.cores'" in got.stderr


def test_pickles_of_classes_that_have_moved():
    from torchember.compat.nnstat import NetDict
    assert pickle.loads(b'ctorchember.state.earlier\nNetDict\n.') is NetDict
