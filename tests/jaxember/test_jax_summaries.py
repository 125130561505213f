"Tests that summaries of JAX arrays equal those of numpy and torch, for any values, by compiled loops and by JAX operations"
import os, subprocess, sys
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings, strategies as st

from torchember import EmberWarning, summarize
from torchember.measure import kernels
from torchember.measure.summary import derive, index, merge, empty_summary, read_array, width

jax = pytest.importorskip('jax')
import jax.numpy as jnp  # noqa: E402

from torchember.jaxember.measure import summaries  # noqa: E402

pytestmark = pytest.mark.usefixtures('optimized') # Sums must be rounded as in programs of users

every = 'basic', 'absolute', 'higher', 'powers', 'exponents'
kinds = ('float32', 'bfloat16', 'float16', 'float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz', 'int4', 'uint4', 'int8', 'uint8', 'int16', 'uint16', 'int32',
    'uint32', 'bool', 'complex64')
compiled = kernels.loops() is not None
forms = dict(loops=summaries.read_on_cpu if compiled else summaries.row_by_jax, chunks=summaries.row_by_jax, operations=summaries.row_by_operations)

@cache
def reader(form, wanted):
    f = partial(forms[form], wanted=wanted)
    p = summaries.primitive(f'{form}{len(wanted)}', lambda x: (summaries.row_length(wanted),), f, f)
    return lambda x: summaries.row_vectors(np.asarray(p.bind(x)), wanted)

def in_float64(x): return np.asarray(x).astype(complex if jnp.iscomplexobj(x) else float)

def compare(got, want, exact):
    "Compare two summaries: counts, minimum and maximum must be equal, sums within rounding"
    p = {k: want[i] for k,i in index.items()}
    n = max(p['count'], 1)
    big = max(abs(p['min']), abs(p['max'])) if np.isfinite(p['min']) else 0
    for k,i in index.items():
        if k in ('count', 'nan', 'posinf', 'neginf', 'zeros') or k in ('min', 'max', 'min_abs') and exact!=1e-9: assert got[i]==want[i], k
        else:
            loose = {'mean': min(big, np.sqrt(p['m2']/n)+abs(p['mean'])), 'm3': p['m4']**.75*n**.25 if np.isfinite(p['m4']) else 0}.get(k, 0)
            np.testing.assert_allclose(got[i], want[i], rtol=exact, atol=max(exact, 1e-9 if k=='m3' else 0)*loose+1e-300, err_msg=k)
    np.testing.assert_array_equal(got[width:], want[width:])

def made(kind, size, scale, offset, spoiled, seed):
    g = np.random.default_rng(seed)
    x = g.standard_normal(size)
    if kind=='complex64': x = x+1j*g.standard_normal(size)
    x = x*scale+offset
    for value in spoiled:
        if size: x[g.integers(0, size, 1+size//50)] = value
    if 'int' in kind or kind=='bool':
        info = (0, 1) if kind=='bool' else (jnp.iinfo(kind).min, jnp.iinfo(kind).max)
        x = np.clip(np.nan_to_num(x), *info).astype(np.int64)
    with np.errstate(all='ignore'): x = x.astype('complex64' if kind=='complex64' else jnp.dtype(kind))
    return jnp.asarray(x.reshape(2, -1) if size%2==0 and seed%2 else x)

some_array = given(st.sampled_from(kinds), st.sampled_from((0, 1, 6, 257, 33_001, 70_000)), st.sampled_from((1, 1e25, 1e-25, 1e-41, 1e4)),
    st.sampled_from((0, 0, 1000)), st.lists(st.sampled_from((np.nan, np.inf, -np.inf, 0., 1e-40)), max_size=3), st.integers(0, 99))

@pytest.mark.slow
@settings(phases=[Phase.explicit], deadline=None)
@some_array
@example('float32', 70_000, 1, 1e6, [], 1)
@example('float32', 70_000, 0, 1e-25, [], 1)
@example('float16', 70_000, 0, 60_000, [], 1)
@example('float32', 70_000, 1e25, 0, [0.], 1)
@example('float32', 70_000, 1, 0, [0., 1e-40], 1)
@example('uint32', 257, 1e9, 2e9, [], 1)
def test_arrays(kind, size, scale, offset, spoiled, seed): same_summaries(kind, size, scale, offset, spoiled, seed)

@pytest.mark.release
@pytest.mark.slow # JAX compiles again for each kind and size of array
@settings(max_examples=4, deadline=None)
@some_array
def test_any_arrays(kind, size, scale, offset, spoiled, seed): same_summaries(kind, size, scale, offset, spoiled, seed)

@pytest.mark.release
@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@some_array
def test_more_arrays(kind, size, scale, offset, spoiled, seed): same_summaries(kind, size, scale, offset, spoiled, seed)

def same_summaries(kind, size, scale, offset, spoiled, seed):
    x = made(kind, size, scale, offset, spoiled, seed)
    want = read_array(in_float64(x), every)
    exact = 1e-9 if kind=='complex64' else 1e-11
    compare(reader('loops', every)(x), want, exact if compiled else 1e-6)
    compare(reader('chunks', every)(x), want, 1e-9 if kind=='complex64' else 1e-6)
    compare(reader('operations', every)(x), want, exact)

@pytest.mark.skipif(not compiled, reason='numba is missing or switched off')
@pytest.mark.parametrize('kind', ('float32', 'bfloat16', 'float16', 'int8', 'int32', 'float8_e5m2', 'bool'))
def test_summaries_equal_those_of_torch(kind):
    "Summaries equal those of torch to the last bit, because both use the same compiled loops."
    for scale,spoiled in ((1, ()), (1e4, (np.nan, np.inf, 0.)), (1e-41, ())):
        x = made(kind, 200_000, scale, 0, spoiled, 1)
        bits = np.asarray(x)
        if kind in ('bfloat16', 'float8_e5m2'): t = torch.from_numpy(bits.view(f'int{8*bits.itemsize}').copy()).view(getattr(torch, kind))
        else: t = torch.from_numpy(bits.copy())
        np.testing.assert_array_equal(summaries.row_vectors(summaries.summary_row(x, every), every), summarize(t, every).vector)

@pytest.mark.slow
@pytest.mark.parametrize('by_parts', (False, True))
def test_rows_inside_of_transformations_equal_those_outside(by_parts):
    "The transformations are scan, cond, while_loop, remat and vmap."
    x = np.random.default_rng(0).standard_normal((4, 500)).astype(np.float32)
    want = np.stack([read_array(y) for y in x])
    read = partial(summaries.summary_row, by_parts=by_parts)
    def same(rows, want): np.testing.assert_allclose(summaries.row_vectors(np.asarray(rows)), want, rtol=1e-6)
    same(jax.jit(lambda x: jax.lax.scan(lambda c, y: (c, read(y)), 0, x)[1])(x), want)
    same(jax.jit(jax.vmap(read))(x), want)
    same(jax.jit(lambda x: jax.lax.cond(x[0]>9, lambda: read(x), summaries.empty_rows))(x[0]), empty_summary())
    def turn(s): return s[0]+1, summaries.merged_row(jnp.stack([s[1], read(x[s[0]])]))
    x = jnp.asarray(x)
    same(jax.jit(lambda: jax.lax.while_loop(lambda s: s[0]<4, turn, (0, summaries.empty_rows()))[1])(), merge(want))
    same(summaries.merged_row(jnp.stack([read(y) for y in x], 0)[:, None], axis=0)[0], merge(want))
    f = jax.checkpoint(lambda w: jax.lax.scan(jax.checkpoint(lambda c, y: (c+(w*y).sum(), read(y))), 0., x))
    (_,rows),_ = jax.jit(jax.value_and_grad(lambda w: f(w), has_aux=True))(2.)
    same(rows, want)

elsewhere = '''
import sys, numpy as np, jax, jax.numpy as jnp
from torchember.jaxember.measure import summaries
from torchember.measure.summary import read_array
every = 'basic', 'absolute', 'powers', 'exponents'
assert summaries.is_compiled()==(sys.argv[1]=='1'), sys.argv
big = np.random.default_rng(0).standard_normal(70_000)
for x64 in (False, True):
    jax.config.update('jax_enable_x64', x64)
    for x in (big, big*1e150, big+1e9, np.arange(-5, 5)+2**40, np.arange(9, dtype=np.uint64)+np.uint64(2**63),
            big[:99]+1j, np.float64(3), np.float32(big), np.float16(big[:99]), np.where(big>3, np.nan, big)):
        x = jnp.asarray(x)
        for by_parts in (False, True):
            got = summaries.row_vectors(np.asarray(summaries.summary_row(x, every, by_parts)), every)
            want = read_array(np.asarray(x), every)
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6*want[5]/max(want[0], 1))
    empty = np.asarray(jax.jit(lambda: summaries.empty_rows(every, (2,)))())
    np.testing.assert_array_equal(summaries.row_vectors(empty, every), np.stack(2*[read_array([], every)]))
assert 'torch' not in sys.modules
'''

@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize('loops', '01' if compiled else '0')
def test_summaries_do_not_depend_on_the_installation(loops, tmp_path):
    "Summaries are equal with and without jax_enable_x64, numba and torch, and in programs from the disk cache of JAX."
    kept = {'JAX_COMPILATION_CACHE_DIR': str(tmp_path), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0', 'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1'}
    env = os.environ | {'NUMBA_DISABLE_JIT': str(1-int(loops)), 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'} | kept
    for _ in range(1+int(loops)): subprocess.run([sys.executable, '-c', elsewhere, loops], check=True, env=env)
    assert any(tmp_path.iterdir())


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.skipif(not compiled, reason='numba is missing or switched off')
def test_operations_replace_broken_loops_and_one_warning_says_so(monkeypatch):
    "numba is installed but fails, so JAX operations compute the summaries, with one warning."
    from torchember.jaxember.measure import kernel
    def fails(*args): raise RuntimeError('no such processor')
    monkeypatch.setattr(kernel, 'custom_call_name', fails)
    monkeypatch.setattr(kernel, 'row_by_kernel', fails)
    monkeypatch.setattr(summaries, 'broken', [])
    x = jnp.arange(1237.)
    with pytest.warns(EmberWarning, match='no such processor') as said:
        rows = [jax.jit(lambda x, k=k: summaries.summary_row(x*k, every))(x) for k in (1, 2)]
    assert len([w for w in said if w.category is EmberWarning])==1 and not summaries.is_compiled()
    for k,row in zip((1, 2), rows, strict=True): compare(summaries.row_vectors(np.asarray(row), every), read_array(np.arange(1237.)*k, every), 1e-6)


@pytest.mark.parametrize('form', forms)
def test_norms_of_an_empty_array_are_zero(form):
    "Norms of an empty array are 0 as in torch and numpy, and its other moments are NaN."
    got = {k: float(v) for k,v in derive(reader(form, every)(jnp.zeros((0, 3)))).items()}
    assert (got.pop('l1'), got.pop('l2'), got.pop('numel'))==(0, 0, 0) and all(np.isnan(v) for v in got.values())
