"""Measuring and plotting keep the storage of a tensor resizable. `Tensor.numpy`, `np.asarray` and DLPack would make it unresizable:
`fully_shard` frees weights by resizing their storage, and a recorded training would fail there"""
import ast
import pathlib
import textwrap

import numpy as np
import programs
import pytest
import torch
from torch import nn

import torchember
from torchember import Monitor, StateDict, emberTracker, get_stats, overview, summarize, torchEmber
from torchember.measure import kernels
from torchember.measure.columns import sets
from torchember.measure.summary import Summary, groups
from torchember.recorder.recorder import recorded


def resized(*tensors):
    "Return True if the storages of all tensors can be resized."
    for x in tensors:
        s = x.untyped_storage()
        n = s.nbytes()
        try: s.resize_(0)
        except RuntimeError: return False
        s.resize_(n)
    return True


def test_functions_that_forbid_resizing():
    "The function `resized` detects calls that make a storage unresizable."
    for look in (torch.Tensor.numpy, np.asarray, lambda x: x.double().numpy(), lambda x: np.asarray([*x])):
        x = torch.ones(3, dtype=torch.float64)
        assert resized(x)
        look(x)
        assert not resized(x)


kinds = ['float32', 'float64', 'float16', 'bfloat16', 'float8_e5m2', 'int64', 'int32', 'int8', 'uint8', 'bool', 'complex64', 'complex128']


@pytest.mark.parametrize('threads', [1, 2])
@pytest.mark.parametrize('by', ['loops', 'torch'])
@pytest.mark.parametrize('kind', kinds)
def test_readers(kind, by, threads, monkeypatch):
    if by=='torch': monkeypatch.setattr(kernels, 'loops', lambda: None)
    dtype = getattr(torch, kind)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for n in (0, 1, 7, 5000, 9000, 300_000):
            # torchember makes its own copy of a large converted tensor
            if n==300_000 and kind not in ('float32', 'float64', 'complex128'): continue
            whole = (torch.randn(n, dtype=dtype if dtype.is_complex else None)*5).to(dtype)
            for x in (whole, whole[::2], whole[:n-n%2].view(2, -1).T, whole[:1].expand(3, min(n, 1)), whole.conj() if dtype.is_complex else whole):
                for stats in sets: get_stats(x, stats)
                summarize(x, tuple(groups))
                assert resized(whole), (n, x.shape, x.stride())
            if n==5000:
                bad = whole.clone()
                if dtype.is_floating_point: bad[3],bad[4] = torch.nan,-3e4
                for stats in sets: get_stats(bad, stats)
                assert resized(bad)
    finally: torch.set_num_threads(before)


def test_summary_of_a_tensor():
    "`Summary.of` is meant for arrays, but it also accepts a tensor. The storage of the tensor stays resizable."
    x = torch.randn(9)
    assert Summary.of(x).numel==9 and resized(x)


def mixed(dtype): return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 3)).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize('dtype,stats,compiled', [*((d, s, False) for d in (torch.float32, torch.float64, torch.bfloat16) for s in (*sets, 'own')),
    (torch.float32, 'full', True), (torch.float64, 'own', True)])
def test_an_armed_training(dtype, stats, compiled):
    m,own = mixed(dtype),lambda x: {'total': x.sum(), 'first': x.flatten()[:3]}
    o = torch.optim.Adam(m.parameters(), .01)
    te = torchEmber(m, optimizer=o, stats=own if stats=='own' else stats, ttypes=recorded, on_error='raise')
    run,seen = torch.compile(m, backend='aot_eager') if compiled else m,[]
    for h in (m[0], m[3]): h.register_forward_hook(lambda m, a, y: seen.append(y))
    for _ in range(3):
        x = torch.randn(64, 40, dtype=dtype)
        loss = run(x).float().square().mean()
        te.probe('x', x)
        te.log(loss=loss, mine=loss.detach())
        loss.backward()
        seen += [x, loss, *(p.grad for p in m.parameters())]
        o.step()
        o.zero_grad()
    te.log_model()
    te.close()
    tensors = [*seen, *m.parameters(), *m.buffers(), *(v for s in o.state.values() for v in s.values())]
    assert resized(*(t.detach() for t in tensors))
    assert len(te.t.df) and not te.recorder.notices.errors


@pytest.mark.release # slow test, run only before a release
@pytest.mark.slow
def test_while_loops_are_loaded_and_without_numba():
    "The readers that are used while compiled code loads, and without numba, are tested in new processes."
    code = textwrap.dedent('''
        import sys, torch
        if sys.argv[1]=='without': sys.modules['numba'] = None
        torch.set_num_threads(int(sys.argv[2]))
        from torch import nn
        from torchember import torchEmber
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for stats in ('basic', 'full', 'numerics'):
                m = nn.Sequential(nn.Linear(4000, 300), nn.Linear(300, 1)).to(dtype)
                te = torchEmber(m, stats=stats, ttypes=('input', 'output', 'weight'), on_error='raise')
                x = torch.randn(64, 4000, dtype=dtype)
                m(x); te.step()
                for t in (x, *m.parameters()): t.data.untyped_storage().resize_(0)
                te.disarm()
        print('resized')''')
    for numba,threads in (('with', '1'), ('without', '1'), ('without', '2')):
        r = programs.run(code, numba, threads, TORCHEMBER_WAIT=0, PYTHONWARNINGS='ignore')
        assert r.stdout.strip()=='resized', (numba, threads, r.stdout+r.stderr)


def test_snapshots(tmp_path):
    m = mixed(torch.float64)
    sd = StateDict(dict(m.named_parameters()))
    sd.describe(lw=True, group='all', display=False)
    sd.describe(display=False)
    for what in (sd.hist, sd.ecdf, sd.heatmap): what(to=tmp_path/'x.png') if 'to' in what.__code__.co_varnames else what()
    for f in (sd.norm, sd.sum, sd.mean, sd.std, sd.skew, sd.max, sd.abs_min): f(lw=True)
    repr(sd), str(sd), list(sd.rows())
    sd.save(tmp_path/'sd.pt')
    assert resized(*(p.detach() for p in m.parameters()))


def test_quantities():
    m = mixed(torch.float64)
    seen = []
    m.register_forward_hook(lambda m, a, y: seen.append(a[0]))
    single = ['InputCovMaxEig', 'InputCovStableRank', 'InputCovCondition', 'WeightNorm', 'WeightGradNorm', 'InputMean', 'InputStd', 'InputSndNorm',
        'OutputGradSndNorm', 'RankMe', 'LinearDeadNeuronNum']
    weight = lambda module: module.weight.detach() # a user's quantity that returns the weight itself (detached)
    mon = Monitor(m, {'0': [*single, 'WeightParamJump'], nn.BatchNorm1d: ['MeanTID', 'VarTID']})
    for i in range(3):
        m(torch.randn(64, 40, dtype=torch.float64)).square().mean().backward()
        mon.track(i)
    mon.get_output()
    from torchember.monitor.quantities import stored_value
    got = stored_value(weight(m[0]))
    assert got.dtype==np.float64 and got.shape==(30, 40)
    assert resized(*seen, *(p.detach() for p in m.parameters()))


def test_plots():
    from torchember import TrainingStats
    from torchember.show.pointing import read_losses
    from torchember.show.surfaces import Surface3d
    m = mixed(torch.float32)
    te = torchEmber(m)
    for _ in range(2): m(torch.randn(8, 40)).sum().backward(); te.step()
    te.close()
    loss,each = torch.tensor([.5, .25]),[torch.tensor(.5), torch.tensor(.25)]
    overview(te, loss=loss)
    overview(te, loss=each)
    got = read_losses(TrainingStats(torch.tensor([0, 1]), loss, each), None)
    assert [y.tolist() for y in got.lines.values()]==[[.5, .25], [.5, .25]] and got.steps.tolist()==[0, 1]
    Surface3d({0: loss, 1: loss})
    assert resized(loss, *each) and emberTracker(te.fname).df.step.nunique()==2


def test_where_numpy_looks_into_tensors():
    "All calls of `numpy()` in torchember are on its own tensors. A new call must be checked and added to this list."
    # own tensors: a clone, and computed results
    own = {'measure/elements.py': ['as_array'], 'measure/readers/torch.py': ['with_exponents'],
        'measure/arena.py': ['rows_to_host'], 'measure/blocks.py': ['Block'], 'measure/devices.py': ['Pending'],
        'measure/self_check.py': ['find_reader_mistake'],
        'measure/spectrum.py': ['from_gram', 'lanczos', 'lanczos', 'singular_values', 'singular_values'],
        'measure/units.py': ['Sketch'], 'recorder/losses.py': ['ArrivingCopies', 'ArrivingCopies'], 'recorder/output_facts.py': ['OutputRanks'],
        'monitor/quantities.py': ['stored_value'], 'state/layers.py': ['gather_rows', 'summarize_local'],
        'state/noise.py': ['squared_norms'], 'state/plots.py': ['sample_evenly', 'sample_values', 'subsample_matrix']}
    looks = 'numpy', '__array__', '__dlpack__', 'from_dlpack', 'to_dlpack'
    root,found = pathlib.Path(torchember.__file__).parent,{}
    for path in root.rglob('*.py'):
        for top in ast.parse(path.read_text()).body:
            for n in ast.walk(top):
                if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in looks:
                    found.setdefault(path.relative_to(root).as_posix(), []).append(getattr(top, 'name', '?'))
    assert {k: sorted(v) for k,v in found.items()}=={k: sorted(v) for k,v in own.items()}
