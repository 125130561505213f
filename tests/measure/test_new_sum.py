"""A new statistic with its own sums needs two lines in `measure.summary`. All other parts then measure, merge and read it.

The lines are written into a copy of the Python module, as a developer would add them, in a process of its own. With them a row has more than 16 entries.
Their names begin with `planted_`, so that the package may have the documented example, too.
"""
import importlib.util
from pathlib import Path

import programs
import pytest

added = '''
import importlib.util, math, sys, warnings
import numpy as np, torch
import torchember.measure
spec = importlib.util.find_spec('torchember.measure.summary')
source = open(spec.origin).read()
for table,lines in (('sums', """
    planted_tiny=Sum('planted_tiny', lambda x, xp: abs(x)<1e-7),
    planted_logs=Sum('planted_logs', lambda x, xp: xp.log(abs(x))),
    planted_roots=Sum('planted_roots', lambda x, xp: xp.sqrt(abs(x)), degree=.5),
    planted_nearest=Sum('planted_roots', lambda x, xp: xp.where(x==0, np.inf, abs(x)), 'min', 1),"""), ('derived', """
    planted_tiny_frac=lambda p: p.sized(p.planted_tiny/np.maximum(p.n, 1)),
    planted_geometric_mean=lambda p: p.sized(np.exp(p.planted_logs/np.maximum(p.n, 1))),
    planted_root_mean=lambda p: p.sized(p.planted_roots/np.maximum(p.n, 1)),
    planted_least_nonzero=lambda p: p.sized(p.planted_nearest),""")):
    assert source.count(f'\\n{table} = dict(')==1
    source = source.replace(f'\\n{table} = dict(', f'\\n{table} = dict({lines}')
summary = sys.modules[spec.name] = torchember.measure.summary = importlib.util.module_from_spec(spec)
exec(compile(source, spec.origin, 'exec'), summary.__dict__)

names = ['planted_tiny_frac', 'planted_geometric_mean', 'planted_root_mean', 'planted_least_nonzero']
old = ['mean', 'std', 'min', 'max', 'abs_mean', 'skew', 'rm4', 'rm8', 'zero_frac', 'numel']
more = [*names, *old]
exponents = ('basic', 'planted_tiny', 'planted_logs', 'planted_roots', 'exponents')

def want(x):
    "Return the statistics of finite numbers, by numpy."
    a = np.abs(np.asarray(x, np.float64)).ravel()
    with np.errstate(all='ignore'): logs = np.log(a).mean()
    return {'planted_tiny_frac': (a<1e-7).mean(), 'planted_geometric_mean': np.exp(logs), 'planted_root_mean': np.sqrt(a).mean(),
        'planted_least_nonzero': a[a>0].min()}

def check(got, x, rel=1e-9):
    "Compare new statistics with numpy. The other statistics must not change."
    for k,v in want(x).items(): np.testing.assert_allclose(float(got[k]), v, rtol=rel, err_msg=k)
    before = summary.derive(summary.read_array(x), old)
    for k in old:
        if k in got: np.testing.assert_allclose(float(got[k]), before[k], rtol=1e-6, atol=1e-6 if k in ('mean', 'skew') else 0, err_msg=k)

def arrays(sizes=(1, 5, 1000, 40_000, 300_001)):
    rng = np.random.default_rng(0)
    for n in sizes: yield 1e-3+rng.standard_normal(n).astype(np.float32)**3
    yield np.array([1e-9, -3, 1e-8, 4, -1e-20, 7], np.float32)

assert summary.width==len(summary.parts)+1>16 and summary.parts[:15]==summary.fast
'''

cpu = '''
from torchember import get_stats, summarize
from torchember.measure import kernels
assert (kernels.loops() is None)==NONE
for x in arrays():
    check(get_stats(torch.from_numpy(x), more), x)
    check(get_stats(torch.from_numpy(x).double(), more), x)
    check(get_stats(torch.from_numpy(x).expand(3, -1), more), np.tile(x, 3))
    v = kernels.read_device(torch.from_numpy(x), (*summary.scalars, 'exponents')).numpy()
    check(summary.derive(v, more), x)
    for wanted in (summary.scalars, exponents):
        v = summarize(torch.from_numpy(x), wanted).vector
        assert len(v)==summary.length(wanted) and math.isnan(v[summary.width-1])
        if 'exponents' in wanted: np.testing.assert_array_equal(v[summary.width:], summary.read_array(x, wanted)[summary.width:])
    pieces = [summarize(torch.from_numpy(p)) for p in np.array_split(x, 3)]
    check(sum(pieces).dict(more), x)
half = torch.tensor([4., 9, 0, 16], dtype=torch.float16)
halves = dict(planted_root_mean=2.25, planted_tiny_frac=.25, planted_geometric_mean=0., planted_least_nonzero=4.)
assert get_stats(half, names)=={k: halves[k] for k in names}
bad = torch.tensor([4., float('nan'), 9.])
assert math.isnan(get_stats(bad, ['planted_root_mean'])['planted_root_mean']) and summarize(bad).planted_roots==5 and summarize(bad[:0]).numel==0
sparse = torch.sparse_coo_tensor([[0, 3]], [4., 9.], (5,))
assert get_stats(sparse, ['planted_root_mean', 'planted_tiny_frac'])=={'planted_root_mean': 1., 'planted_tiny_frac': .6}
z = torch.tensor([3+4j, 0])
assert abs(get_stats(z, ['planted_root_mean'])['planted_root_mean']-5**.5/2)<1e-12
got = get_stats(torch.ones(3), 'full')
assert not {*names} & {*got} and 'skew' in got # who does not ask pays nothing
'''

armed = '''
from torch import nn
from torchember import read, torchEmber
from torchember.measure import kernels
assert (kernels.loops() is None)==NONE
torch.manual_seed(0)
for compiled in (False, True):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x,xs = torch.randn(16, 6),[]
    te = torchEmber(model, stats=more, name=f'new_{compiled}')
    te.how_record('weight_grad')([*names, 'exponents'])
    te.how_record('input')('basic')
    run = torch.compile(model, backend='eager', fullgraph=True) if compiled else model
    for _ in range(3): # accumulated: rows of three passes merge
        batch = torch.randn(16, 6)
        xs.append(nn.functional.linear(batch, model[0].weight, model[0].bias).detach())
        run(batch).square().sum().backward()
    g = model[0].weight.grad.clone()
    te.step()
    rows = te.t.df
    te.close()
    for df in (rows, read(f'new_{compiled}')):
        first = df[(df.path=='0')&(df.ttype=='output')&(df.step==0)]
        assert len(first)==1, len(first)
        check(first.iloc[0], torch.cat(xs).numpy(), 1e-6)
        grad = df[(df.path=='0')&(df.ttype=='weight_grad')&(df.tname=='grad_0')].iloc[0]
        for k,v in want(g.numpy()).items(): np.testing.assert_allclose(grad[k], v, rtol=1e-6)
        assert sum(grad['exponents'])==48
        assert df[(df.path=='0')&(df.ttype=='input')]['planted_tiny_frac'].isna().all()
'''

scaled = '''
from torchember.measure.arena import Arena
from torchember.measure.tap import observe
x = torch.randn(500)
for stats in (names, ['planted_root_mean', 'planted_least_nonzero', 'mean'], [*names, 'exponents']):
    for scale in (1024., 1000., torch.tensor(1024.)):
        arena = Arena()
        observe(x*scale, arena.tap('a', stats), scale=scale)
        row, = arena.take().rows()
        for k,v in want(x.numpy()).items():
            if k in stats: np.testing.assert_allclose(row['stats'][k], v, rtol=1e-5)
'''

by_triton = '''
from torchember.measure.readers import triton as gpu
assert gpu.available('cpu')
wanted = (*summary.scalars, 'exponents')
xs = list(arrays((1, 5, 9000)))
out = torch.full((len(xs), summary.wide), math.nan, dtype=torch.float64)
gpu.read_list([torch.from_numpy(x) for x in xs], wanted, out)
one = torch.full((summary.wide,), math.nan, dtype=torch.float64)
for x,v in zip(xs, out):
    gpu.read_one(torch.from_numpy(x), wanted, one)
    for row in (v.numpy(), one.numpy()):
        check(summary.derive(row, more), x)
        np.testing.assert_array_equal(row[summary.width:], summary.read_array(x, wanted)[summary.width:])
x = torch.from_numpy(xs[-2]).half() # whose roots and logarithms are none of its own format
gpu.read_one(x, wanted, one)
for k,v in want(x).items(): np.testing.assert_allclose(float(summary.derive(one.numpy(), names)[k]), v, rtol=1e-9, err_msg=k)
for x in ([4, np.inf, -1e-9, np.nan, -np.inf, 5], [np.nan], []): # those that are not finite are in no sum
    x = np.array(x, np.float32)
    gpu.read_one(torch.from_numpy(x), wanted, one)
    gpu.read_list([torch.from_numpy(x)], wanted, out)
    for row in (one, out[0]): np.testing.assert_allclose(row[:summary.width], summary.read_array(x, wanted)[:summary.width], rtol=1e-6)
'''

by_jax = '''
import jax, jax.numpy as jnp
from torchember.jaxember.measure import summaries as js
assert js.is_compiled()!=NONE
every = (*summary.scalars, 'exponents')
def row(x, **kw): return summary.derive(js.row_vectors(np.asarray(jax.jit(lambda x: js.summary_row(x, every, **kw))(x)), every), more)
for x in arrays((1, 69_999) if NONE else (1, 1000, 70_000)): # each size is compiled anew, and three parts of one size once
    check(row(x), x)
    check(row(x, by_parts=True), x)
    v = js.row_vectors(np.asarray(js.summary_row(x, every)), every)
    np.testing.assert_array_equal(v[summary.width:], summary.read_array(x, every)[summary.width:])
    rows = jnp.stack([js.summary_row(p, every) for p in np.array_split(x, 3) if len(p)])
    check(summary.derive(js.row_vectors(np.asarray(js.merged_row(rows, every)), every), more), x)
assert math.isnan(row(np.array([4, np.nan], np.float32))['planted_root_mean']) and row(np.zeros(0, np.float32))['numel']==0
'''


def run(code, none=False, after=added, **env):
    env = env | ({'NUMBA_DISABLE_JIT': '1'} if none else {})
    done = programs.run(code.replace('NONE', repr(none)), after=after, cwd=Path(__file__).parents[2], **env)
    assert done.returncode==0, done.stdout+done.stderr


@pytest.mark.release # slow test, run only before a release
@pytest.mark.slow
@pytest.mark.parametrize('none', [False, True], ids=['loops', 'no loops'])
@pytest.mark.parametrize('code', [cpu, armed], ids=['read', 'armed'])
def test_cpu(code, none):
    "A new sum is measured, merged, recorded, compiled and read back from the log."
    run(code, none)


@pytest.mark.release # slow test, run only before a release
def test_an_expression_that_leaves_its_range_gives_no_warning():
    "The example of the documentation takes the logarithm of 0 for the output of a ReLU."
    run("""
from torchember import get_stats, torchEmber
warnings.simplefilter('error')
x = torch.tensor([0., 2, 0, 8])
assert get_stats(x, ['planted_geometric_mean', 'planted_root_mean'])['planted_geometric_mean']==0
assert get_stats(torch.ones(2, 1_000_000)*torch.tensor([[0.], [1.]]), ['planted_geometric_mean'])['planted_geometric_mean']==0 # in several pieces
model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU())
te = torchEmber(model, stats=['planted_geometric_mean', 'mean'])
model(torch.randn(4, 2)).sum().backward()
assert len(te.t.df)>4
te.close()
""")


def test_scaled():
    "The scale of a GradScaler is removed from the new sum."
    run(scaled)


@pytest.mark.skipif(not importlib.util.find_spec('triton'), reason='Triton is not installed')
def test_triton(): run(by_triton, TRITON_INTERPRET='1')


@pytest.mark.release # slow test, run only before a release
@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec('jax'), reason='JAX is not installed')
@pytest.mark.parametrize('none', [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.release])], ids=['loops', 'no loops'])
def test_jax(none):
    "Without compiled loops, JAX operations measure. The test is slow, because XLA compiles each tensor size for seconds."
    run(by_jax, none)


def test_loops_kept_for_shorter_rows():
    "All programs share numba's cache. Cached loops for shorter rows must not be used for longer rows."
    few = """
import torch
from torchember import get_stats
x = torch.arange(4.)
def has(names, **want): assert {k: v for k,v in get_stats(x, names).items() if k!='exponent_min'}==want, want
has(['mean', 'exponents(0, 1)'], mean=1.5, exponents=[1, 1, 2, 0])
"""
    run(few, after='')
    run(few+"has(['planted_tiny_frac', 'mean', 'exponents(0, 1)'], planted_tiny_frac=.25, mean=1.5, exponents=[1, 1, 2, 0])")
