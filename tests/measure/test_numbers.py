"""Measured statistics are equal to those of numpy in float64: for random tensors of all kinds, and for difficult tensors by name.

`NUMBERS=100000 pytest tests/measure/test_numbers.py -k fuzz` tries that many; a failure prints a line that makes its tensor again.
"""
import math
import os

import numpy as np
import pytest
import torch
from oracle import Answer, everything, judge, rel

from torchember import get_stats, summarize, torchEmber
from torchember.measure import kernels
from torchember.measure.elements import Unmeasurable, flat
from torchember.measure.kernels import read, read_device
from torchember.measure.readers import torch as without_loops
from torchember.measure.columns import sets
from torchember.measure.summary import Summary, derive, merge, parts, read_array, scalars

small_floats = [getattr(torch, n) for n in dir(torch) if n.startswith('float8') and isinstance(getattr(torch, n), torch.dtype)]
floats = [torch.float32, torch.float64, torch.bfloat16, torch.float16, *small_floats]
integers = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
complexes = [torch.complex64, torch.complex128]


@pytest.fixture(autouse=True, params=['loops', 'torch'])
def engine(request, monkeypatch):
    "Run each test twice: with compiled loops, and with torch operations. Return the name of the engine."
    if request.param=='torch': monkeypatch.setattr(kernels, 'loops', lambda: None)
    else: assert kernels.loops(), 'numba is part of the dev extra'
    return request.param


@pytest.fixture(autouse=True)
def one_thread():
    "Set the number of threads to one, because several threads run other code. Restore it after the test."
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)



def plain(t):
    "Return the elements of a tensor as a numpy array in double precision."
    t = t.detach()
    return t.to(torch.complex128).resolve_conj().resolve_neg().numpy() if t.is_complex() else t.to(torch.float64).resolve_neg().numpy()


# ---- statistics of random tensors

def contents(r, n):
    "Draw `n` float64 numbers of a random kind. Return the kind and the numbers."
    kind = r.choice(list(kinds))
    return kind, np.asarray(kinds[kind](r, n), dtype=np.float64)


def spoil(r, x, *bad):
    "Replace some random elements of `x` by one of the values `bad`."
    x = x.copy()
    if x.size: x[r.random(x.size)<r.choice([.01, .3])] = r.choice(bad)
    return x


kinds = dict(
    normal=lambda r,n: r.normal(0, 1, n),
    shifted=lambda r,n: r.normal(3, 1, n),
    uniform=lambda r,n: r.random(n),
    ids=lambda r,n: r.integers(0, 50257, n),
    constant=lambda r,n: np.full(n, r.choice([.1, -3, 1e-3, 7e4])),
    zeros=lambda r,n: np.zeros(n),
    negzero=lambda r,n: np.where(r.random(n)<.5, 0., -0.),
    offset=lambda r,n: 1e4+.01*r.normal(0, 1, n),
    faroff=lambda r,n: -1e6+r.normal(0, 1, n),
    near=lambda r,n: r.choice([-1, 1])*r.uniform(2, 12)+r.normal(0, 1, n),
    tiny=lambda r,n: 1e-25*r.normal(0, 1, n),
    subnormal=lambda r,n: 1e-41*r.normal(0, 1, n),
    huge=lambda r,n: 1e30*r.normal(0, 1, n),
    edge=lambda r,n: 3e38*r.uniform(-1, 1, n),
    half=lambda r,n: np.full(n, 60000.),
    lognormal=lambda r,n: np.exp(r.normal(0, 3, n)),
    tails=lambda r,n: r.standard_t(2, n),
    relu=lambda r,n: np.maximum(r.normal(0, 1, n), 0),
    negative=lambda r,n: -r.random(n),
    spike=lambda r,n: np.where(np.arange(n)==n//2, 1e6, 1e-3),
    steps=lambda r,n: np.floor(np.arange(n)/max(n/5, 1))*1e3,
    nan=lambda r,n: spoil(r, r.normal(0, 1, n), np.nan),
    inf=lambda r,n: spoil(r, r.normal(0, 1, n), np.inf),
    neginf=lambda r,n: spoil(r, r.normal(0, 1, n), -np.inf),
    bad=lambda r,n: spoil(r, spoil(r, spoil(r, r.normal(0, 1, n), np.nan), np.inf), -np.inf),
    allnan=lambda r,n: np.full(n, np.nan),
    allinf=lambda r,n: np.full(n, np.inf),
    bothinf=lambda r,n: r.choice([np.inf, -np.inf], n),
    lastnan=lambda r,n: np.where(np.arange(n)==n-1, np.nan, r.normal(0, 1, n)))


def as_tensor(r, x, dtype):
    "Convert the array `x` to a tensor of `dtype`, clipped to its range."
    if dtype is torch.bool: return torch.from_numpy(x>.5)
    if dtype in integers:
        i = torch.iinfo(dtype)
        return torch.from_numpy(np.clip(np.nan_to_num(x), max(i.min, -2.**62), min(i.max, 2.**62)).astype(np.int64)).to(dtype)
    if dtype.is_complex: return torch.complex(torch.from_numpy(x), torch.from_numpy(r.permutation(x))).to(dtype)
    return torch.from_numpy(x).to(dtype)


def size(r, large):
    "Draw a number of elements: mostly small, and often close to a size limit of the kernels."
    if large: return int(large*r.integers(1, 4)+r.integers(-2, 3))
    if (u:=r.random())<.06: return int(r.integers(0, 2))
    if u<.6: return int(r.integers(1, 80))
    if u<.9: return int(r.choice([1, 2, 4, 8])*1024+r.integers(-2, 3))
    return int(r.integers(100, 6000))


def shaped(r, t):
    "Return a view of `t` with a random shape, of all its elements or a few less."
    dims,n = r.integers(1, 5),len(t)
    shape = [int(r.integers(1, 9)) for _ in range(dims-1)]
    rest = n//math.prod(shape)
    return t if not rest or not shape else t[:rest*math.prod(shape)].view(*shape, rest)


def scalar(r, t): return t[0] if len(t) else t
def transposed(r, t): return (s:=shaped(r, t)).permute(*r.permutation(s.dim()).tolist())
def holes(r, t): return t[::int(r.integers(2, 5))]
def block(r, t):
    s = shaped(r, t)
    for d in range(s.dim()): s = s.narrow(d, (a:=int(r.integers(0, s.size(d)))), int(r.integers(1, s.size(d)-a+1))) if s.size(d) else s
    return s
def expanded(r, t):
    s = shaped(r, t)
    d = int(r.integers(0, s.dim()))
    if r.random()<.5: return s.unsqueeze(d).expand(*s.shape[:d], int(r.integers(0, 6)), *s.shape[d:])
    s = s.narrow(d, 0, min(1, s.size(d)))
    return s.expand(*s.shape[:d], int(r.integers(1, 6)) if s.size(d) else 0, *s.shape[d+1:])
def channels_last(r, t): return t[:len(t)//24*24].view(2, 3, 4, -1).to(memory_format=torch.channels_last) if len(t)>=24 else t
def flipped(r, t): return t.flip(0)
def overlapping(r, t): return t.as_strided((len(t)//3, 3), (int(r.integers(1, 3)), 1)) if len(t)>6 else t
def windows(r, t): return t.unfold(0, 4, int(r.integers(1, 6))) if len(t)>4 else t
def offset(r, t): return t[int(r.integers(0, len(t)+1)):]
def diagonal(r, t): return t[:(k:=math.isqrt(len(t)))*k].view(k, k).diagonal()
layouts = [shaped, scalar, transposed, holes, block, expanded, channels_last, flipped, overlapping, windows, offset, diagonal]


def sample(seed, large=0):
    "Draw a random tensor. Return it with a description."
    r = np.random.default_rng(seed)
    dtype = r.choice(np.array([*floats, *floats[:4], *floats[:1]*6, *integers, *complexes], dtype=object))
    kind,x = contents(r, size(r, large))
    t = as_tensor(r, x, dtype)
    layout = layouts[r.integers(len(layouts))]
    try: t = layout(r, t)
    except (RuntimeError, NotImplementedError) as e: # torch does not support this operation for an 8-bit dtype
        if dtype not in small_floats: raise
        layout = e
    if dtype.is_complex and r.random()<.5: t = r.choice([torch.conj, lambda t: t.conj().imag, torch.real, lambda t: torch.view_as_real(t.resolve_conj())])(t)
    return t, f'(sample({seed}, {large}): {kind} {str(dtype)[6:]} {tuple(t.shape)} {getattr(layout, "__name__", layout)})'


answers = {} # expected results, because both engines read the same tensors


def answer(of, x):
    if of not in answers: answers[of] = Answer(x)
    return answers[of]


def fuzz(seeds, large=0, worst=None):
    "Read random tensors with all groups of statistics, with the basic group, and with torch operations. Check the results."
    with np.errstate(all='ignore'):
        for seed in seeds:
            t,what = sample(seed, large)
            x = answer((seed, large), plain(t))
            judge(read(t, everything), x, worst=worst, where=what)
            judge(read(t), x, ('basic',), worst, what)
            if seed%3==0: judge(read(t, ('basic', 'exponents')), x, ('basic', 'exponents'), worst, what)
            if seed%4==0: judge(read_device(t.reshape(-1).resolve_neg(), everything).numpy(), x, worst=worst, where=f'{what} read_device')


tries = int(os.environ.get('NUMBERS', 4000))
batches = 8


# each batch has the same tensors in every test run
@pytest.mark.parametrize('batch', [pytest.param(b, marks=[pytest.mark.release]*(b>=batches//2)) for b in range(batches)])
def test_fuzz(batch): fuzz(range(batch, tries, batches))


@pytest.mark.parametrize('piece', [1024, 1500, 4096])
def test_fuzz_many_pieces(piece, monkeypatch):
    "Small tensors are divided into several pieces, because the size of a piece is reduced."
    for room in (kernels, without_loops): monkeypatch.setattr(room, 'piece', piece)
    monkeypatch.setattr(without_loops, 'cached', piece)
    monkeypatch.setattr(without_loops, 'stretch', 2048)
    fuzz(range(10**9, 10**9+tries//40), piece)


def test_fuzz_large():
    "The tensors have sizes close to the real size of a stretch (the elements that torch operations read at once)."
    fuzz(range(2*10**9, 2*10**9+tries//400), without_loops.stretch)


def test_fuzz_threads(engine, monkeypatch):
    "The loops give the same statistics with two threads as with one."
    torch.set_num_threads(2)
    if engine=='loops': monkeypatch.setattr(kernels.loops(), 'long', 5000)
    fuzz(range(3*10**9, 3*10**9+tries//200), 20000)


# ---- difficult tensors, selected by name

def r(seed=0): return torch.Generator().manual_seed(seed)
def normal(*shape, dtype=torch.float32): return torch.randn(*shape, generator=r(), dtype=torch.float64).to(dtype)
def changed(x, at, value): x = x.clone(); x.view(-1)[at] = value; return x # noqa: E702


def leaf():
    w = torch.nn.Parameter(normal(40, 50))
    (w*w).sum().backward()
    return w


def inferred():
    with torch.inference_mode(): return normal(30, 30)*2


hostile = dict(
    offset=lambda: 1e4+.01*normal(300_000),
    offset_of_one_ulp=lambda: torch.tensor([1e7, 1e7+1]*5000),
    offset_in_double=lambda: 1e8+normal(5000, dtype=torch.float64),
    tiny=lambda: 1e-25*normal(20_000),
    tiny_constant=lambda: torch.full((20_000,), 1e-25),
    tiny_spread=lambda: 1e-14+1e-21*normal(20_000),
    subnormal=lambda: torch.full((9000,), 1e-45),
    huge=lambda: torch.tensor([3e38, -3e38, 1e38]*4000),
    fp16_60000=lambda: torch.full((100_000,), 60000., dtype=torch.float16),
    fp16=lambda: normal(50_000, dtype=torch.float16),
    bf16=lambda: normal(50_000, dtype=torch.bfloat16),
    bf16_of_ones=lambda: torch.ones(100_000, dtype=torch.bfloat16),
    int64_ids=lambda: torch.randint(0, 50257, (8, 128), generator=r()),
    int8=lambda: torch.arange(-128, 128, dtype=torch.int8).repeat(100),
    uint8=lambda: torch.randint(0, 256, (3, 200, 200), generator=r(), dtype=torch.uint8),
    boolean=lambda: normal(20_000)>0,
    boolean_view=lambda: (normal(200, 200)>0).T[3:, ::2],
    complex64=lambda: normal(5000, dtype=torch.complex64),
    complex128=lambda: normal(50, dtype=torch.complex128),
    conj_view=lambda: torch.complex(normal(9000), normal(9000)+1).conj(),
    neg_view=lambda: torch.complex(normal(9000), normal(9000)+1).conj().imag,
    nan=lambda: changed(normal(300_000), 299_999, math.nan),
    inf=lambda: changed(normal(300_000), 0, math.inf),
    neginf=lambda: changed(normal(300_000), 7, -math.inf),
    negative_nan=lambda: changed(normal(300_000), 5, -math.nan),
    nan_in_relu=lambda: changed(normal(300_000).relu(), 5, math.nan),
    inf_in_negative=lambda: changed(-normal(300_000).abs(), 5, math.inf),
    nan_in_bf16=lambda: changed(normal(30_000, dtype=torch.bfloat16), 5, math.nan),
    all_nan=lambda: torch.full((20_000,), math.nan),
    all_inf=lambda: torch.full((20_000,), math.inf),
    both_inf=lambda: torch.tensor([math.inf, -math.inf]*5000),
    empty=lambda: torch.empty(0, 3),
    empty_int=lambda: torch.empty(0, dtype=torch.int64),
    one=lambda: torch.tensor([5.]),
    one_nan=lambda: torch.tensor(math.nan),
    scalar=lambda: torch.tensor(7.),
    scalar_int=lambda: torch.tensor(7),
    expanded=lambda: normal(3, 1).expand(3, 4000),
    expanded_scalar=lambda: torch.tensor(3.).expand(100, 100),
    expanded_to_nothing=lambda: torch.ones(1, 0).expand(5, 0),
    transposed=lambda: normal(300, 200).T,
    channels_last=lambda: normal(2, 3, 80, 80).to(memory_format=torch.channels_last),
    holes=lambda: normal(1000, 70)[:, ::3],
    overlapping=lambda: normal(1000).as_strided((500, 500), (1, 1)),
    storage_offset=lambda: normal(300_000)[1234:],
    unaligned=lambda: torch.from_numpy(np.frombuffer(b'x'+normal(20_000).numpy().tobytes(), dtype=np.float32, offset=1)),
    from_numpy=lambda: torch.from_numpy(np.arange(20_000, dtype=np.float32)),
    constant=lambda: torch.full((400_000,), .1),
    constant_double=lambda: torch.full((20_000,), .1, dtype=torch.float64),
    zeros=lambda: torch.zeros(30_000),
    negative_zeros=lambda: torch.full((30_000,), -0.),
    all_negative=lambda: -normal(300_000).abs()-1,
    all_positive=lambda: normal(300_000).abs()+1,
    halves_apart=lambda: torch.cat([torch.zeros(200_000), torch.full((200_000,), 1e4)]),
    heavy=lambda: (4*normal(300_000)).exp(),
    leaf=leaf,
    leaf_grad=lambda: leaf().grad, inferred=inferred,
    **{f'fp8_{str(d)[12:]}': lambda d=d: normal(20_000).abs().to(d) for d in small_floats})


@pytest.mark.filterwarnings('ignore:The given NumPy array is not writable')
@pytest.mark.parametrize('name', hostile)
def test_difficult_tensors(name):
    x = hostile[name]()
    before,version = plain(x).copy(),None if x.is_inference() else x._version
    right = answer(name, before)
    with np.errstate(all='ignore'):
        for some in ((), ('absolute',), ('higher',), ('powers',), everything[1:]):
            judge(read(x, ('basic', *some)), right, ('basic', *some), where=f'{name} {some}')
        judge(read_device(x.detach().reshape(-1).resolve_neg(), everything).numpy(), right, where=f'{name} read_device')
        judge(summarize(x).vector, right, scalars, where=f'{name} summarize')
    np.testing.assert_array_equal(plain(x), before) # reading does not change the tensor
    assert version is None or x._version==version


def sparse_coo(): return torch.sparse_coo_tensor(torch.tensor([[0, 2, 5]]), torch.tensor([3., -4, 0]), (1000,), check_invariants=True)
def uncoalesced(): return torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), torch.tensor([3., -4, 5]), (1000,), check_invariants=True)
def hybrid(): return torch.sparse_coo_tensor(torch.tensor([[0, 7]]), normal(2, 30), (1000, 30), check_invariants=True)
def csr(): return normal(50, 60).relu().to_sparse_csr()
def csc(): return normal(50, 60).relu().to_sparse_csc()
def bsr(): return torch.kron(torch.eye(10), torch.ones(2, 2)).to_sparse_bsr((2, 2))
def none_stored(): return torch.sparse_coo_tensor(size=(5, 5))
def with_nan(): return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([math.nan, math.inf]), (1000,), check_invariants=True)


@pytest.mark.filterwarnings('ignore:Sparse')
@pytest.mark.parametrize('make', [sparse_coo, uncoalesced, hybrid, csr, csc, bsr, none_stored, with_nan])
def test_sparse_is_the_dense_tensor_it_stands_for(make):
    x = make()
    for wanted in (everything, ('basic',)): judge(read(x, wanted), plain(x.to_dense()), wanted)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('channels', [False, True])
def test_quantized(channels):
    x = normal(30, 40)
    if channels: q = torch.quantize_per_channel(x, torch.full((30,), .1), torch.zeros(30, dtype=torch.int64), 0, torch.qint8)
    else: q = torch.quantize_per_tensor(x, .1, 3, torch.quint8)
    judge(read(q, everything), plain(q.dequantize()))


def test_refused_with_a_reason():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(): fake = torch.empty(3)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for x,why in ((torch.empty(3, device='meta'), 'meta'), (nested, 'nested'), (fake, 'fake')):
        with pytest.raises(Unmeasurable, match=why): summarize(x)
    def inside(x):
        with pytest.raises(Unmeasurable, match='vmap'): read(x)
        return x
    torch.vmap(inside)(torch.ones(2, 3))


def test_repeats_are_read_once():
    x = normal(50, 1).expand(50, 10**12) # an expanded tensor: as a dense tensor, it would have 4 * 10^14 bytes
    f,times = flat(x)
    assert f.numel()==50 and times==10**12
    judge(read(x)/[*[10**12 if p in ('count', 'm2') else 1 for p in parts], 1], plain(normal(50)), ('basic',))


def test_wide_unsigned():
    for d in (torch.uint16, torch.uint32, torch.uint64):
        x = torch.from_numpy(np.arange(9000)).to(d)
        judge(read(x, everything), np.arange(9000.))


def test_under_autocast_and_grad():
    x = normal(300, 300).requires_grad_()
    with torch.autocast('cpu', dtype=torch.bfloat16): s = summarize(x*1)
    judge(s.vector, plain(x), scalars)


def test_get_stats_is_derived_from_the_same():
    x = normal(200, 100)
    want = Summary.of(plain(x))
    for name,value in get_stats(x, 'full').items():
        if name!='shape': assert value==pytest.approx(getattr(want, name), rel=rel, abs=rel), name
    assert set(get_stats(x, 'full'))==set(sets['full'])


def test_norms_of_an_empty_tensor_are_zero():
    "l1 and l2 are 0 as in torch, from all readers and after merging. Other statistics such as the mean are NaN."
    x,full = torch.empty(0, 3),torch.tensor([3., -4])
    vectors = dict(read=read(x, everything), device=read_device(x.reshape(-1), everything).numpy(), summarize=summarize(x).vector, numpy=read_array(x.numpy()))
    for name,v in vectors.items():
        got = {k: float(n) for k,n in derive(v).items()}
        assert (got['l1'], got['l2'], got['numel'])==(torch.norm(x, 1).item(), torch.norm(x).item(), 0)==(0, 0, 0), name
        assert all(math.isnan(n) for k,n in got.items() if k not in ('l1', 'l2', 'numel')), name
        with_more = derive(merge(np.stack([v, read_array(full.numpy(), everything if len(v)>50 else scalars)])), ('l1', 'l2', 'mean', 'numel'))
        assert {k: float(n) for k,n in with_more.items()}==dict(l1=7, l2=pytest.approx(5), mean=-.5, numel=2), name


def test_the_row_of_an_empty_tensor_has_norms_of_zero():
    model = torch.nn.Linear(3, 2)
    with torchEmber(model, stats='full', ttypes=('input', 'output', 'output_grad')) as te:
        model(torch.empty(0, 3)).sum().backward()
        rows = list(te.t.lines())
    assert {(r['ttype'], r['l1'], r['l2'], tuple(r['shape'])) for r in rows}=={('input', 0, 0, (0, 3)), ('output', 0, 0, (0, 2)), ('output_grad', 0, 0, (0, 2))}
    assert all(math.isnan(r['mean']) and math.isnan(r['rms']) for r in rows)
