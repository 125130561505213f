"""Cases for the GPU kernels, compared with numpy in float64. test_triton.py interprets them; on a GPU, run this file directly."""
import math

import numpy as np
import pytest
import torch

from torchember.measure.readers import triton as gpu
from torchember.measure.summary import groups, index, parts, read_array

device = torch.device('cuda' if torch.cuda.is_available() and not gpu.interpreted else 'cpu')
pytestmark = pytest.mark.skipif(not gpu.available(device), reason='neither a GPU nor TRITON_INTERPRET=1')

if device.type=='cpu':
    from triton.runtime import interpreter
    once = set()
    def call(f, *args, **kwargs):
        "Call a function of a kernel in Triton's interpreter. Triton's language is patched once per Python module, not at each call."
        if f.fn.__module__ not in once: interpreter._patch_lang(f.fn); once.add(f.fn.__module__)
        return f.rewrite()(*args, **kwargs)
    if hasattr(interpreter, '_LangPatchScope'): interpreter.InterpretedFunction.__call__ = call

full = tuple(groups)
dtypes = list(gpu.blocks)
rel = 1e-6


def numbers(x): return x.detach().cpu().double().numpy().ravel()


def bins(x):
    "Return the number of elements for each exponent, computed with numpy's frexp."
    x = numbers(x)
    x = x[np.isfinite(x)&(x!=0)]
    return np.bincount(np.clip(np.frexp(x)[1]-1+127, 0, 255), minlength=256)


def check(x, v, wanted=full, rel=rel):
    "Compare each result with numpy within `rel`. Sums of positive and negative terms are compared relative to their absolute values."
    x,v = numbers(x),v.cpu().numpy()
    want = read_array(x, wanted=tuple(g for g in wanted if g!='exponents'))
    if 'exponents' in wanted: want[index['zeros']] = (x==0).sum()
    ok = x[np.isfinite(x)]
    size = max(ok.size, 1)
    d = np.abs(ok-ok.mean()) if ok.size else ok
    scale = dict(zip(parts, np.abs(want), strict=False)) | dict(mean=d.sum()/size+np.abs(ok).max(initial=0)*2**-50/rel, m3=(d**3).sum())
    for p in ('count', 'min', 'max', 'min_abs', 'zeros', 'nan', 'posinf', 'neginf'): scale[p] = 0
    for i,p in enumerate(parts):
        got,true = v[i],want[i]
        assert got==true or (math.isnan(got) and math.isnan(true)) or abs(got-true)<=rel*scale[p], (p, got, true)
    assert math.isnan(v[15])


def row(wanted): return torch.full((272 if 'exponents' in wanted else 16,), math.nan, dtype=torch.float64, device=device)


def one(x, wanted=full, rel=rel):
    x,v = x.to(device),row(wanted)
    gpu.read_one(x, wanted, v)
    check(x, v, wanted, rel)
    if 'exponents' in wanted: np.testing.assert_array_equal(v[16:].cpu(), bins(x))
    return v


def later(value): return pytest.param(value, marks=pytest.mark.release)


@pytest.mark.parametrize('dtype', dtypes, ids=str)
@pytest.mark.parametrize('n', [0, 1, 4097, 30_003 if device.type=='cpu' else 100_003, *map(later, (31, 2048, 4096))])
def test_normal(n, dtype): one(torch.randn(n).to(dtype), rel=1e-12 if dtype is torch.float64 else rel)


@pytest.mark.parametrize('wanted', [('basic',), *(('basic', g) for g in full[1:]), tuple(groups)], ids=str)
@pytest.mark.parametrize('n', [later(100), 5000])
def test_sums_that_are_not_requested_are_nan(n, wanted): one(torch.randn(n).relu(), wanted)


bad = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize('dtype', dtypes, ids=str)
@pytest.mark.parametrize('values', [*map(later, ([math.nan], [math.inf], [-math.inf])), bad, [*bad, 1., -2., 0.], later([math.nan, 3.])], ids=str)
def test_not_finite(values, dtype):
    one(torch.tensor(values, dtype=dtype))
    x = torch.randn(9000).to(dtype)
    x[torch.arange(0, 9000, 7)] = torch.tensor(values, dtype=dtype).repeat(9000)[:1286]
    one(x)
    one(torch.tensor(values, dtype=dtype).repeat(2000))


@pytest.mark.parametrize('dtype', dtypes, ids=str)
@pytest.mark.parametrize('value', [.1, -0., *map(later, (-3.7, 0., 1e-7))])
def test_equal_elements_have_exactly_that_mean(value, dtype):
    for n in (1, 7, 9001):
        x = torch.full((n,), value, dtype=dtype)
        v = one(x)
        assert v[1]==x[0].double() and (v[2:5]==0).all()


def test_a_huge_offset_and_a_tiny_spread():
    for offset,spread in ((10_000, .01), (-1e6, 1.), (1e30, 1e24)): one(offset+spread*torch.randn(20_000))
    # with a smaller spread, the reference `read_array` itself loses the third moment
    one(1e9+torch.randn(20_000, dtype=torch.float64))
    # the blocks have very different values
    one(torch.cat([torch.zeros(4096), torch.full((4096,), 1e4), 1e4+.01*torch.randn(9000)]))
    one(torch.arange(50_000.))


def test_numbers_that_float32_cannot_square():
    for scale in (1e-25, 1e-37, 1e-40, 1e-44, 1e18, 1e30, 1e38): one(scale*torch.randn(6000).clamp(-3, 3))
    v = one(torch.full((5000,), 60000., dtype=torch.float16))
    assert v[1]==60000
    one(60000+32*torch.randint(0, 2, (5000,)).half())
    one(torch.tensor([3.4e38, -3.4e38, 1e-45, 1e-38]))
    one(torch.cat([1e-20*torch.randn(5000), 1e20*torch.randn(5000)]))
    one(torch.tensor([2.**-24, -2.**-14, 2.**-15], dtype=torch.float16))
    # Triton's interpreter reads subnormal bfloat16 numbers wrong
    if device.type=='cuda': one(torch.tensor([1e-40, -1e-39, 2e-38], dtype=torch.bfloat16))


def test_float64_beyond_float32():
    one(torch.tensor([1e-300, 1e-39, 1e-310, -1e-50, 0., 2.**-126, 2.**-127]))
    one(torch.tensor([2.**127, 2.**128, -1e60, 1e-60], dtype=torch.float64))
    one(1e-60*torch.randn(5000, dtype=torch.float64))


def test_powers_of_two_and_their_neighbours():
    x = torch.tensor([2.**e for e in range(-149, 128)])
    one(torch.cat([x, -x, torch.nextafter(x, torch.tensor(math.inf)), torch.nextafter(x, torch.tensor(0.))]))


def test_any_strides():
    x = torch.randn(6, 7, 8, 9).to(device)
    last = x.to(memory_format=torch.channels_last)
    for y in (x.transpose(0, 3), last, x[:, ::2], x[..., 1:], x[:, :1].expand(6, 5, 8, 9), x[0, 0, 0, 0], x.view(-1)[1:]): one(y)


def test_a_model_parameter_is_left_as_it_is():
    p = torch.nn.Parameter(torch.randn(5000).to(device))
    before,version,v = p.detach().clone(),p._version,row(full)
    gpu.read_one(p, full, v)
    check(p, v)
    # the version counter is unchanged, because compiled code would notice a change
    assert p._version==version and torch.equal(p, before) and v._version==0


mixed = [(5, torch.float32), (0, torch.float32), (20_000, torch.float32), (3, torch.float64), (9000, torch.bfloat16), (4096, torch.float16), (0, torch.float64)]


@pytest.mark.parametrize('wanted', [('basic',), full], ids=str)
def test_a_list(wanted):
    xs = [(k+torch.randn(n)).to(t).to(device) for k,(n,t) in enumerate(mixed)]
    xs[2][77] = math.nan
    for _ in range(2): # the second pass uses the tables of the first
        out = torch.stack([row(wanted)]*len(xs))
        gpu.read_list(xs, wanted, out)
        for x,v in zip(xs, out, strict=True):
            check(x, v, wanted)
            if 'exponents' in wanted: np.testing.assert_array_equal(v[16:].cpu(), bins(x))


def test_lists_of_few_and_of_odd_addresses():
    gpu.read_list([], full, torch.empty(0, 272, dtype=torch.float64, device=device))
    base = torch.randn(10_000).to(device)
    xs = [base[1:], base[3:3], base[::3], base[:9999].view(99, 101).t()]
    # a row may have more columns than the kernel writes
    out = torch.full((4, 300), math.nan, dtype=torch.float64, device=device)
    gpu.read_list(xs, full, out[:, :272])
    for x,v in zip(xs, out, strict=True): check(x, v)
    assert out[:, 272:].isnan().all()


@pytest.fixture
def small(monkeypatch):
    "Return a function that sets the sizes of kernels, so that small tensors need many programs."
    def clear(): gpu.reading.cache_clear(); gpu.plan.cache_clear()
    def cut(**sizes):
        for k,v in sizes.items(): monkeypatch.setattr(gpu, k, v)
        clear()
    yield cut
    clear()


@pytest.mark.parametrize('tile,programs', [(4, 3), *(pytest.param(*v, marks=pytest.mark.release) for v in ((32, 2048), (128, 2048)))])
def test_rows_that_are_merged_more_than_once(small, tile, programs):
    "This happens with millions of elements. On a GPU, 32 rows are one warp, and 128 rows are several."
    small(tile=tile, programs=programs, blocks=dict.fromkeys(gpu.blocks, 4096 if tile==4 else 512 if device.type=='cpu' else 128))
    x,y = 3+torch.randn(100_003),torch.randn(30_000).cumsum(0)
    one(x)
    xs,out = [y.to(device), x[:5].to(device), x.to(device)],torch.stack([row(full)]*3)
    for per in (1, 2):
        v = row(full)
        gpu.read_one(xs[2], full, v, per)
        check(x, v)
    gpu.read_list(xs, full, out)
    for x,v in zip(xs, out, strict=True):
        check(x, v)
        np.testing.assert_array_equal(v[16:].cpu(), bins(x))


def test_memory_after_a_tensor_is_not_read():
    "This also holds if the last block lacks only one element."
    for dtype in dtypes:
        B = gpu.blocks[dtype]
        base = torch.full((2*B+9,), 3., dtype=dtype)
        for n in (1, B-1, B+7, 2*B-1): one(base[:n])


@pytest.mark.release # slow test, run only before a release
def test_programs_may_come_in_any_order(monkeypatch, small):
    "The program that ends last merges the results. Each tensor has its own counters."
    small(tile=4, programs=3, blocks=dict.fromkeys(gpu.blocks, 512))
    planned,g = gpu.plan,torch.Generator().manual_seed(0)
    def mixed_up(*args):
        jobs,*rest = planned(*args)
        return jobs[torch.randperm(len(jobs), generator=g).to(jobs.device)].contiguous(), *rest
    mixed_up.cache_clear = planned.cache_clear
    monkeypatch.setattr(gpu, 'plan', mixed_up)
    xs = [k+torch.randn(n).to(device) for k,n in enumerate((9000, 3, 20_000, 5000))]
    for _ in range(3):
        out = torch.stack([row(full)]*len(xs))
        gpu.read_list(xs, full, out)
        for x,v in zip(xs, out, strict=True):
            check(x, v)
            np.testing.assert_array_equal(v[16:].cpu(), bins(x))


def test_blocks_of_a_program_with_different_exponents(small):
    "The window of counted exponents moves up and down from block to block."
    small(programs=1, blocks=dict.fromkeys(gpu.blocks, 512))
    x = torch.randn(6000)
    for at,far in ((512, 2.**-40), (1024, 2.**30), (1536, 2.**-90), (3000, 2.**9)): x[at:at+600] *= far
    for wanted in (('basic', 'exponents'), full): one(x, wanted)
    one(x.double())


@pytest.mark.parametrize('dtype', dtypes, ids=str)
def test_equal_elements_do_not_vary(dtype):
    "For equal elements, the mean is exact and the higher moments are 0, also over several blocks."
    for c in (.1, -1/3, 1e-30, 7e4/3, 1e-40):
        # Triton's interpreter rounds this number to zero
        if gpu.interpreted and c==1e-40 and dtype is torch.bfloat16: continue
        c = torch.tensor(c).to(dtype)
        for n in (1, 3, 1000, 10_001):
            v = one(c.expand(n).contiguous(), ('basic', 'absolute', 'higher'))
            assert v[index['mean']]==c.double() and v[index['m2']]==v[index['m3']]==v[index['m4']]==0


def test_a_row_is_written_to_its_end():
    "All columns of a row are overwritten, and memory after the row is not changed."
    for wanted in (('basic',), full):
        n = gpu.length(wanted)
        out = torch.full((4, n+3), 7., dtype=torch.float64, device=device)
        gpu.read_one(torch.randn(9000).to(device), wanted, out[1, :n])
        gpu.read_list([torch.randn(5000).to(device)], wanted, out[:, :n], [2])
        assert out[1:3, 15].isnan().all() and (out[:, n:]==7).all() and (out[[0, 3]]==7).all()
        if n>16: assert (out[1:3, 16:n].sum(1).cpu()==torch.tensor([9000., 5000.])).all()


@pytest.mark.release # slow test, run only before a release
def test_work_memory_is_clean_for_the_next_launch():
    "Counters and bins are zero after a launch. Replaced memory is kept, because another thread may still launch with it."
    from torchember.measure.devices import stream_of
    there = torch.zeros(1, device=device).device # the device with its index, such as cuda:0
    gpu.memories.clear()
    for n in (100, 300_000, 20_000): one(torch.randn(n))
    memory, = gpu.memories.values()
    assert not memory.tensors['counters'].any() and not memory.tensors['bins'].any()
    before = gpu.memory_version.number,len(memory.old)
    for n in (100, 300_000): one(torch.randn(n))
    assert (gpu.memory_version.number, len(memory.old))==before and before[1]>0
    assert gpu.memory_of(there, gpu.chosen_stream(there)) is memory or stream_of(there)!=0


def test_few_and_far_exponents():
    "Most elements are counted in 31 bins below the largest exponent. Elements far below are counted as well."
    x = torch.randn(20_000)
    for far in (2.**-20, 2.**-30, 2.**-31, 2.**-32, 2.**-40, 2.**-90):
        y = x.clone()
        y[::7] *= far
        one(y, ('basic', 'exponents'))
        one(torch.cat([x[:4096]*far, x[4096:8192], x[:5000]*far]), ('basic', 'exponents'))
    one(torch.cat([torch.zeros(5000), x[:9000]*1e-38, torch.tensor([math.inf, math.nan])]), ('basic', 'exponents'))
    one(torch.full((9000,), 2.**-126), ('basic', 'exponents'))
    one(torch.full((9000,), 2.**-149), ('basic', 'exponents'))


def test_unreadable_dtypes_are_named_in_the_error():
    with pytest.raises(TypeError, match='only tensors of float32, bfloat16, float16, float64, got torch.int64'):
        gpu.read_one(torch.tensor([1], device=device), full, row(full))


def test_a_model_whose_parameters_are_read_in_lists(tmp_path, monkeypatch):
    "Weights, gradients, states and updates of a step need few launches. The statistics equal those of torch operations."
    from torchember import torchEmber
    from torchember.measure import kernels
    ttypes = ('input', 'output', 'weight', 'weight_grad', 'optimizer', 'update')
    def train(name):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(device)
        opt = torch.optim.Adam(model.parameters())
        with torchEmber(model, optimizer=opt, ttypes=ttypes, stats='numerics', home=tmp_path, name=name) as te:
            for i in range(2):
                # two micro-batches per step
                for _ in range(2): model(torch.ones(4, 5, device=device)*(i+1)).square().sum().backward()
                opt.step()
                opt.zero_grad()
        return te.t.df
    want = train('one')
    launches = []
    monkeypatch.setattr(kernels, 'gpu_kernels', lambda device: gpu)
    monkeypatch.setattr(gpu, 'reads', lambda *args: True)
    many = gpu.read_list
    monkeypatch.setattr(gpu, 'read_list', lambda xs, *a, **k: (launches.append(len(xs)), many(xs, *a, **k)))
    got = train('two')
    # numbers of tensors: 4 weights in the first pass, 4 gradients, then 12 states and updates
    assert launches==[4, 4, 12]*2, launches
    assert len(got)==len(want)
    for c in want.columns:
        if c in ('ts',): continue
        if want[c].dtype.kind=='f': np.testing.assert_allclose(got[c], want[c], rtol=1e-5, atol=1e-7, err_msg=c)
        else: assert list(map(str, got[c]))==list(map(str, want[c])), c
