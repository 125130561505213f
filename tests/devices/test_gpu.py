"""Tests on a real GPU: rows equal numpy, the program waits no more than without recording, memory does not grow, training is unchanged.

`make gpu` runs this. Without an accelerator all of it is skipped, and tests/devices/test_late_device.py rehearses it."""
import copy
import gc
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
import warnings
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from armed import cases as armed_cases
from compared import GPT
from models import AlexNet, tensors, zoo
from oracle import Answer
from tensor_rows import df, lines
from torch import nn
from trainings import ALL, adam, cases, data, in_halves, model, plain, recorded, same, settings

from torchember import summarize, torchEmber
from torchember.capture.private_torch import hooks_in_graphs
from torchember.ground.messages import EmberWarning
from torchember.measure.summary import derive, index, width

there = torch.accelerator.is_available() if hasattr(torch, 'accelerator') else False
device = torch.accelerator.current_accelerator() if there else torch.device('cpu')
cuda = device.type=='cuda'
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not there and not os.environ.get('TORCHEMBER_REHEARSAL'), reason='there is no accelerator here')]
only_cuda = pytest.mark.skipif(not cuda, reason='only CUDA and ROCm have this')


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    "Use matrix products in full precision, and deterministic sums."
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    yield
    if there: torch.accelerator.synchronize()


def moved(x): return x.to(device)
def on(nest): return torch.utils._pytree.tree_map_only(torch.Tensor, moved, nest)
def path_of(row): return re.sub(r'\([^)]*\)', '', row['module']).partition('.')[2]


@contextmanager
def nothing_said():
    "Turn warnings of torchember into errors, except warnings about the data."
    with warnings.catch_warnings():
        warnings.simplefilter('error', EmberWarning)
        warnings.filterwarnings('ignore', '.*first value of this run', EmberWarning)
        yield


def says(row, x, rel=1e-6):
    "Check that the statistics of a row equal the statistics of a tensor."
    x = x.detach().to('cpu')
    x = x.to_dense() if x.layout is not torch.strided else x
    x = x.to(torch.float64 if not x.is_complex() else torch.complex128).numpy().ravel()
    answer = Answer(x)
    want = {k: float(v) for k,v in derive(answer.vector[:width]).items()}
    for k,v in want.items():
        if k not in row or isinstance(row[k], dict) or not answer.tolerance.knows(k): continue
        got = row[k] if row[k] is not None else (row.get('nonfinite') or {}).get(k, math.nan)
        got = float(got)
        assert got==v or (math.isnan(got) and math.isnan(v)) or abs(got-v)<=max(answer.tolerance.of(k, v), rel*abs(v)), (k, got, v, row)


# ---- rows equal the values of numpy

@pytest.mark.parametrize('train,options,kind', cases, ids=lambda v: getattr(v, '__name__', v))
def test_the_numbers_of_a_training_are_those_of_the_cpu(tmp_path, train, options, kind):
    halves = train is in_halves
    net = model().bfloat16() if halves else model().double()
    other = copy.deepcopy(net).to(device)
    as_is = (lambda x: x) if halves else lambda x: x.double()
    want = recorded(train, net, as_is, tmp_path/'cpu', settings[options], kind)
    with nothing_said(): got = recorded(train, other, lambda x: as_is(x).to(device), tmp_path/'gpu', settings[options], kind)
    if halves: assert len(got.t.df)==len(want.t.df)
    else: same(got.t.df, want.t.df, 1e-6)


class Kept:
    "Stores the tensors that pass through modules, by hooks of torch, to compare them later with the rows"
    def __init__(self, net):
        self.seen,names = {},Counter()
        self.hooks = [m.register_forward_hook(self.hook(n), with_kwargs=True) for n,m in net.named_modules()]
        self.calls = names

    def hook(self, name):
        def f(m, args, kwargs, out):
            call = self.calls[name]
            self.calls[name] += 1
            self.seen[name, call] = [t.detach().clone() for t in tensors(out)]
        return f

    def remove(self): [h.remove() for h in self.hooks]


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('name', zoo)
def test_rows_are_of_the_tensors_that_went_through(tmp_path, name, dtype):
    torch.manual_seed(0)
    net,args,kwargs = zoo[name]()
    net,args,kwargs = net.to(device, dtype),on(args),on(kwargs)
    cast = lambda x: x.to(dtype) if x.is_floating_point() else x
    args,kwargs = (torch.utils._pytree.tree_map_only(torch.Tensor, cast, a) for a in (args, kwargs))
    bare = copy.deepcopy(net)
    kept = Kept(net)
    results = []
    with torchEmber(net, home=tmp_path, stats='full', ttypes=ALL[:6], on_error='raise') as te:
        for n in (bare, net):
            torch.manual_seed(1)
            out = n(*args, **kwargs)
            loss = sum(t.float().square().mean() for t in tensors(out) if t.requires_grad)
            if isinstance(loss, torch.Tensor): loss.backward()
            results.append([out, {k: p.grad for k,p in n.named_parameters()}])
        te.step()
    for a,b in zip(tensors(results[0][0]), tensors(results[1][0]), strict=True): assert torch.equal(a, b) or a.isnan().any()
    rows,seen = te.t.lines(),0
    for r in rows:
        path = path_of(r)
        if r['ttype']=='output':
            those = kept.seen[path, r.get('call') or 0]
            same_shape = [t for t in those if list(t.shape)==r['shape']]
            if len(same_shape)==1: says(r, same_shape[0]); seen += 1
        elif r['ttype'] in ('weight', 'weight_grad'):
            p = dict(net.named_parameters()).get('.'.join(filter(None, (path, r.get('pname') or r['tname']))))
            if p is not None and not hasattr(net, 'parametrizations'): says(r, p if r['ttype']=='weight' else p.grad); seen += 1
    assert seen or not rows


def wave(n): return 3*torch.arange(n).mul(1.7).sin()+.25


wholes = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
floats = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
values = {
    **{str(d)[6:]: wave(n).to(d) for n,d in zip((333, 77, 4096, 4995, 64, 64), floats, strict=True)}, **{str(d)[6:]: torch.arange(99).to(d) for d in wholes},
    'bool': wave(99)>.3, 'complex64': torch.complex(wave(50), wave(50).flip(0)), 'conjugate': torch.complex(wave(9), wave(9).flip(0)).conj(),
    'no elements': torch.zeros(0, 3), 'a scalar': torch.tensor(2.5), 'infinite': torch.tensor([1., math.inf, -2.]), 'nan': torch.tensor([math.nan, 1., 2.]),
    'only nan': torch.full((9,), math.nan), 'subnormal': torch.tensor([1e-40, 3e-42, 1.]), 'transposed': wave(2000).view(40, 50).t(),
    'every second': wave(400)[::2], 'expanded': wave(7)[:, None].expand(7, 60), 'from the middle': wave(100)[33:],
    'channels last': wave(1296).view(2, 8, 9, 9).to(memory_format=torch.channels_last), 'other order': wave(360).view(3, 4, 5, 6).permute(3, 1, 0, 2),
    'sparse': torch.eye(9).to_sparse()}


@pytest.mark.parametrize('name', values)
@pytest.mark.parametrize('stats', ['basic', 'full', 'numerics'])
def test_every_kind_of_tensor(tmp_path, name, stats):
    x = values[name]
    try: there = x.to(device)
    except (TypeError, RuntimeError): pytest.skip('not on this device')
    with nothing_said(), torchEmber(nn.Identity(), home=tmp_path, stats=stats, ttypes=('input', 'output'), on_error='raise') as te: te.model(there)
    a,b = te.t.lines()
    assert a['shape']==b['shape']==list(x.shape)
    says(a, x)
    says(b, x)


@only_cuda
def test_more_elements_than_32_bits_can_count():
    if torch.cuda.mem_get_info()[0]<24e9: pytest.skip('needs 24 GB')
    n = 2**31+12345
    x = torch.ones(n, dtype=torch.bfloat16, device=device)
    x[-3:] = torch.tensor([5., -7., math.nan])
    x[5] = 0
    s = summarize(x, ('basic', 'absolute', 'exponents'))
    v = s.vector
    assert (v[index['count']], v[index['min']], v[index['max']], v[index['nan']], v[index['zeros']])==(n, -7, 5, 1, 1)
    assert abs(v[index['l1']]-(n-4+12))<1 and v[width:].sum()==n-2


def test_functions_of_the_users(tmp_path):
    net = model().to(device)
    with torchEmber(net, home=tmp_path) as te:
        @te.how_record_out
        def out(x): return {'above': (x>0).float().mean(), 'first': x.flatten()[0], 'device': x.device.type}
        plain(net, adam(net), moved)
    rows = [r for r in te.t.lines() if r['ttype']=='output']
    assert len(rows)==24 and {r['device'] for r in rows}=={device.type} and all(0<=r['above']<=1 for r in rows)


def test_noted_numbers(tmp_path):
    net = model().to(device)
    want = []
    opt = adam(net)
    with torchEmber(net, opt, home=tmp_path) as te:
        for x in data():
            loss = net(moved(x)).square().mean()
            te.log(loss=loss, half=loss.detach().bfloat16())
            want.append(loss.detach())
            loss.backward()
            opt.step()
    got = te.t.df.dropna(subset='loss')['loss'].tolist()
    assert got==[w.item() for w in want]


# ---- recording does not change the training

def weights_after(train, net, armed, home, to=moved, opt=adam, **options):
    opt = opt(net)
    if not armed: train(net, opt, to)
    else:
        with torchEmber(net, opt, home=home, **options): train(net, opt, to)
    return {k: v.detach().cpu() for k,v in net.state_dict().items()}


@pytest.mark.parametrize('kind', [dict(foreach=True), dict(fused=True), dict(foreach=False)]+[dict(foreach=True, capturable=True)]*cuda, ids=str)
def test_weights_are_the_same_to_the_last_bit(tmp_path, kind):
    net = model().to(device)
    got = [weights_after(plain, copy.deepcopy(net), armed, tmp_path, opt=lambda n: adam(n, **kind), ttypes=ALL, stats='numerics') for armed in (False, True)]
    for k in got[0]: assert torch.equal(got[0][k], got[1][k]), k


def scaled(net, opt, to, dtype=torch.float16, bad=2):
    scaler = torch.amp.GradScaler(device.type, init_scale=8.)
    for i,x in enumerate(data(6)):
        x = to(x*torch.inf if i==bad else x)
        with torch.autocast(device.type, dtype=dtype): loss = net(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), .1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


@pytest.mark.parametrize('kind', [dict(foreach=True), dict(fused=True)], ids=str)
@pytest.mark.parametrize('bad', [None, 2])
def test_under_autocast_with_a_scaler(tmp_path, kind, bad):
    net = model().to(device)
    train = lambda n, opt, to: scaled(n, opt, to, bad=bad)
    got = [weights_after(train, copy.deepcopy(net), armed, tmp_path, opt=lambda n: adam(n, **kind), ttypes=ALL, stats='numerics') for armed in (False, True)]
    for k in got[0]: assert torch.equal(got[0][k], got[1][k]), k


# ---- the program does not wait, and memory does not grow

def loop(net, opt, steps, batch=64, each=lambda i: None, clip=False, inp=5):
    xs = [torch.randn(batch, inp, device=device) for _ in range(3)]
    for i in range(steps):
        net(xs[i%3]).square().mean().backward()
        if clip: nn.utils.clip_grad_norm_(net.parameters(), 1.)
        opt.step()
        opt.zero_grad()
        each(i)


kinds_of_runs = {'as it comes': {}, 'all': dict(ttypes=ALL, stats='numerics'), 'full': dict(stats='full', ttypes=ALL), 'every third': dict(every=3),
    'ratios': dict(ttypes=('weight', 'update', 'optimizer')), 'rules': dict(rules='default')}


@only_cuda
@pytest.mark.parametrize('options', kinds_of_runs)
@pytest.mark.parametrize('clip', [False, True])
def test_nobody_waits(tmp_path, options, clip):
    net = nn.Sequential(nn.Linear(5, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 3)).to(device)
    opt = adam(net)
    with torchEmber(net, opt, home=tmp_path, **kinds_of_runs[options]) as te:
        loop(net, opt, 4, clip=clip)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode('error')
        try: loop_without_new_data(net, opt, 6, clip)
        finally: torch.cuda.set_sync_debug_mode('default')
    assert te.t.df['step'].nunique()==(4 if options=='every third' else 10)


def loop_without_new_data(net, opt, steps, clip):
    x = torch.empty(64, 5, device=device).normal_()
    for _ in range(steps):
        net(x).square().mean().backward()
        if clip: nn.utils.clip_grad_norm_(net.parameters(), 1.)
        opt.step()
        opt.zero_grad()


@only_cuda
@pytest.mark.parametrize('options', kinds_of_runs)
def test_memory_does_not_grow(tmp_path, options):
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(10)]).to(device)
    opt,used = adam(net),[]
    with torchEmber(net, opt, home=tmp_path, **kinds_of_runs[options]):
        loop(net, opt, 160, inp=64, each=lambda i: used.append(torch.cuda.memory_allocated()))
    assert max(used[100:])<=max(used[:100])+2**16, used # The tolerance of 64 KiB covers cached tables of addresses


@only_cuda
def test_steps_that_are_not_recorded_launch_nothing(tmp_path):
    counts = {}
    for options in (None, dict(every=1000), {}, dict(ttypes=ALL, stats='numerics')):
        net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(10)]).to(device)
        opt = adam(net)
        te = torchEmber(net, opt, home=tmp_path, **options) if options is not None else None
        loop(net, opt, 4, inp=64)
        torch.cuda.synchronize()
        x = torch.randn(64, 64, device=device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as prof:
            for _ in range(3):
                net(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
            torch.cuda.synchronize()
        events = Counter(e.name for e in prof.events())
        def of(word): return sum(n for k,n in events.items() if word in k) # noqa: B023
        counts[str(options)] = of('LaunchKernel'), of('cudaMemcpyAsync'), of('Synchronize')
        if te: te.close()
    bare,off,on,all_types = counts.values() # Each value: numbers of launches, copies and waits in three steps
    assert off==bare, counts
    # The docs state the number of launches, and it must not grow
    assert on[0]<=2*bare[0] and all_types[0]<=5*bare[0], counts


# ---- several streams

class Branches(nn.Module):
    def __init__(self, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b,self.head = nn.Linear(64, 64),nn.Linear(64, 64),nn.Linear(128, 3)
        if shared: self.b = self.a
        self.sides = None

    def forward(self, x):
        if self.sides is None: return self.head(torch.cat([self.a(x), self.b(x)], 1))
        main,out = torch.accelerator.current_stream(),[]
        for side,part in zip(self.sides, (self.a, self.b), strict=True):
            side.wait_stream(main)
            with torch.cuda.stream(side): out.append(part(x))
        for side,y in zip(self.sides, out, strict=True):
            main.wait_stream(side)
            y.record_stream(main)
            x.record_stream(side)
        return self.head(torch.cat(out, 1))


@only_cuda
@pytest.mark.parametrize('shared', [False, True])
@pytest.mark.parametrize('busy', [False, True])
def test_branches_side_by_side(tmp_path, shared, busy):
    "Two branches on two streams have the right rows, also while one stream is far behind."
    tables = {}
    for where in ('cpu', 'gpu'):
        net = Branches(shared).double()
        if where=='gpu':
            net = net.to(device)
            net.sides = torch.cuda.Stream(),torch.cuda.Stream()
        opt = adam(net)
        with torchEmber(net, opt, home=tmp_path/where, ttypes=ALL, stats='full') as te:
            g = torch.Generator().manual_seed(1)
            for _ in range(5):
                x = torch.randn(500, 64, generator=g, dtype=torch.float64)
                if where=='gpu':
                    x = x.to(device)
                    if busy:
                        with torch.cuda.stream(net.sides[0]): torch.cuda._sleep(20_000_000)
                net(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
        tables[where] = te.t.df
    same(tables['gpu'], tables['cpu'], 1e-6)


@only_cuda
def test_a_training_on_a_stream_of_its_own(tmp_path):
    tables = {}
    for where in ('cpu', 'gpu'):
        net = model().double().to(device if where=='gpu' else 'cpu')
        opt,side = adam(net),torch.cuda.Stream()
        with torchEmber(net, opt, home=tmp_path/where, ttypes=ALL) as te, torch.cuda.stream(side):
            if where=='gpu':
                side.wait_stream(torch.cuda.default_stream())
                torch.cuda._sleep(50_000_000)
            plain(net, opt, lambda x: x.double().to(net.body.weight.device)) # noqa: B023
        tables[where] = te.t.df
    same(tables['gpu'], tables['cpu'], 1e-6)


def test_two_models_in_two_threads(tmp_path):
    tes,nets = [],[model().to(device) for _ in range(4)]
    def run(i):
        net = nets[i]
        opt = adam(net)
        with torchEmber(net, opt, home=tmp_path, name=f't{i}') as te:
            for _ in range(5): plain(net, opt, moved)
        tes.append(te)
    ts = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    [t.start() for t in ts]; [t.join() for t in ts]
    assert len(tes)==4
    for te in tes[1:]: same(te.t.df.drop(columns=['model'], errors='ignore'), tes[0].t.df.drop(columns=['model'], errors='ignore'), 1e-4)


# ---- compiled models

def trained_text(net, compile=lambda n: n, steps=3, home=None, **options):
    torch.manual_seed(3)
    ids = [torch.randint(0, 29, (2, 7)).to(device) for _ in range(steps)]
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    te = torchEmber(net, opt, home=home, **options) if home else None
    f,losses = compile(net),[]
    for x in ids:
        loss = nn.functional.cross_entropy(f(x).flatten(0, 1), x.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach().clone())
    if te: te.close()
    return te, [x.item() for x in losses]


def by_blocks(net, **how):
    for b in net.blocks: b.compile(**how)
    return net


ways = {'aot_eager': lambda n: torch.compile(n, backend='aot_eager', fullgraph=True), 'inductor': lambda n: torch.compile(n, fullgraph=True),
    'block by block': lambda n: by_blocks(n, fullgraph=True), 'no cudagraphs, tuned': lambda n: torch.compile(n, mode='max-autotune-no-cudagraphs')}


@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('checkpoint', [None, False], ids=['plain', 'checkpointed'])
def test_compiled(tmp_path, way, checkpoint):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = GPT(2, checkpoint=checkpoint).to(device)
    te,want = trained_text(copy.deepcopy(net), home=tmp_path/'eager', ttypes=ALL[:6] if hooks_in_graphs else ALL[:4])
    types = ALL[:6] if hooks_in_graphs else ALL[:4]
    with nothing_said(): cte,got = trained_text(net, ways[way], home=tmp_path/'compiled', ttypes=types)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    key = lambda r: (r['module'], r['ttype'], r['tname'], r.get('pname'), r['step'], r.get('call'))
    a,b = ({key(r): r for r in lines(t)} for t in (te, cte))
    assert a.keys()==b.keys(), (a.keys()^b.keys())
    for k in a:
        size = max(abs(a[k]['min']), abs(a[k]['max']), 1e-6)
        for s in ('mean', 'std', 'min', 'max'): assert abs(a[k][s]-b[k][s])<=2e-3*size, (k, s, a[k], b[k])


# ---- CUDA graphs

@only_cuda
@pytest.mark.parametrize('mode', ['reduce-overhead', 'max-autotune'])
def test_compiled_into_a_graph(tmp_path, mode):
    "Inductor captures no graph that contains operators of torchember. All rows exist, and equal those of eager mode."
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = GPT(2).to(device)
    te,want = trained_text(copy.deepcopy(net), steps=8, home=tmp_path/'eager')
    with nothing_said(): gte,got = trained_text(net, lambda n: torch.compile(n, mode=mode), steps=8, home=tmp_path/'graph')
    np.testing.assert_allclose(got, want, rtol=1e-3)
    key = lambda r: (r['module'], r['ttype'], r['tname'], r.get('pname'), r['step'], r.get('call'))
    a,b = ({key(r): r for r in lines(t)} for t in (te, gte))
    assert b.keys()==a.keys(), b.keys()^a.keys()
    for k in b:
        size = max(abs(a[k]['min']), abs(a[k]['max']), 1e-6)
        for s in ('mean', 'std', 'min', 'max'): assert abs(a[k][s]-b[k][s])<=5e-3*size, (k, s, a[k], b[k])


@only_cuda
def test_captured_by_hand(tmp_path):
    net = model().to(device)
    x = torch.randn(4, 5, device=device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with torchEmber(net, home=tmp_path) as te:
            s = torch.cuda.Stream()
            s.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(s), torch.no_grad():
                for _ in range(3): net(x)
            torch.cuda.current_stream().wait_stream(s)
            before = len(te.t.lines())
            g = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(g): y = net(x)
            x.copy_(torch.ones_like(x))
            g.replay()
            torch.cuda.synchronize()
            got = y.clone()
            te.disarm()
            with torch.no_grad(): want = net(x)
            te.arm()
            with torch.no_grad(): net(x)
    torch.testing.assert_close(got, want)
    assert sum('graph is being captured' in str(w.message) for w in said)==1
    rows = [r for r in te.t.lines() if r['ttype']!='finding'] # Exclude the row of the warning about the capture
    assert len(rows)==before+before//3 # Three passes were recorded before the capture, and one after it


@only_cuda
def test_graphed_callables(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    x = torch.randn(4, 8, device=device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with torchEmber(net, home=tmp_path) as te:
            net[0] = torch.cuda.make_graphed_callables(net[0], (x.clone(),))
            for _ in range(3): net(x).sum().backward()
    assert sum('graph is being captured' in str(w.message) for w in said)==1
    assert te.t.df['step'].nunique()>=3


@only_cuda
@pytest.mark.parametrize('options', [dict(ttypes=ALL, stats='numerics'), {}, dict(ttypes=ALL, every=3)], ids=['all', 'as it comes', 'every third'])
@pytest.mark.parametrize('passes', [1, 2])
@pytest.mark.parametrize('whole', [False, True], ids=['forward and backward', 'the whole step'])
def test_recorded_from_a_graph(tmp_path, options, passes, whole):
    "With `cuda_graphs=True`, the rows equal those of the same training without a graph."
    if whole and passes>1: pytest.skip('a whole step is one pass')
    runs = []
    for graph in (False, True):
        net,xs = model().to(device),[x.to(device) for x in data(8*passes)]
        opt = torch.optim.AdamW(net.parameters(), lr=.01, capturable=True)
        def step(x, net=net): net(x).square().mean().backward()
        with nothing_said(), torchEmber(net, opt, home=tmp_path/str(graph), cuda_graphs=graph, **options) as te:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            first = 2*passes if graph else len(xs)
            with torch.cuda.stream(side if graph else torch.cuda.current_stream()):
                for i,x in enumerate(xs[:first]):
                    step(x)
                    if i%passes==passes-1:
                        opt.step()
                        opt.zero_grad(set_to_none=passes==1 or not graph)
            torch.cuda.current_stream().wait_stream(side)
            if graph:
                x,g = torch.zeros_like(xs[0]),torch.cuda.CUDAGraph()
                with torch.cuda.graph(g):
                    step(x)
                    if whole: opt.step()
            for i,new in enumerate(xs[first:]):
                x.copy_(new)
                g.replay()
                if i%passes==passes-1 and not whole: opt.step()
                if i%passes==passes-1 and passes>1: opt.zero_grad(set_to_none=False)
        runs.append(te)
    same(runs[1].t.df, runs[0].t.df, 1e-4)


@only_cuda
def test_graphed_callables_are_recorded(tmp_path):
    runs = []
    for graph in (False, True):
        net,xs = model().to(device),[x.to(device) for x in data(6)]
        opt = torch.optim.SGD(net.parameters(), lr=.05)
        with nothing_said(), torchEmber(net, opt, home=tmp_path/str(graph), ttypes=ALL[:6], cuda_graphs=True) as te:
            for i,x in enumerate(xs):
                if graph and i==1: net = torch.cuda.make_graphed_callables(net, (xs[0].clone(),))
                net(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
        runs.append(te)
    # Exclude the first steps, because torch warms up in step 1
    a,b = (df(t)[lambda d: d['step']>1].reset_index(drop=True).dropna(axis=1, how='all') for t in runs)
    counts = lambda d: d.groupby(['step', 'ttype']).size().unstack()
    assert len(a)==len(b), (counts(a), counts(b))
    same(b, a, 1e-4)


# ---- failures of the device

@only_cuda
def test_no_memory_for_us(tmp_path):
    "A tensor that is not contiguous must be copied to be read. If there is no memory for the copy, the training continues."
    free = torch.cuda.mem_get_info()[1]
    class Gaps(nn.Module):
        def forward(self, x): return x.t()[::2]
    gc.collect()
    torch.cuda.empty_cache()
    x = torch.zeros(20_000, 20_000, device=device)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved()+3e8)/free)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            with torchEmber(Gaps(), home=tmp_path, ttypes=('output',)) as te: y = te.model(x)
        assert y.shape==(10_000, 20_000)
        assert any('OutOfMemoryError' in str(w.message) for w in said)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.)
        del x


prelude = '''
import os, sys, warnings, torch
from torch import nn
from torchember import torchEmber
device = torch.accelerator.current_accelerator() or torch.device('cpu')
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
opt = torch.optim.AdamW(net.parameters())
def train(n):
    for _ in range(n):
        net(torch.randn(4, 8, device=device)).square().mean().backward()
        opt.step()
        opt.zero_grad()
'''


def program(tmp_path, text, **env):
    # A new process, not a fork, because a forked process cannot use the GPU
    env = {**os.environ, 'TORCHEMBER_HOME': str(tmp_path), 'PYTHONPATH': os.pathsep.join(sys.path), **env}
    return subprocess.run([sys.executable, '-c', prelude+textwrap.dedent(text)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)


def table(tmp_path, name):
    from torchember import emberTracker
    return emberTracker(name, home=tmp_path).df


ends = {'pass': 0, 'raise SystemExit(3)': 3, 'os.kill(os.getpid(), 9)': -9, 'os.kill(os.getpid(), 15)': -15, 'os._exit(0)': 0}


@pytest.mark.parametrize('end', ends)
def test_a_process_that_ends_without_closing(tmp_path, end):
    done = program(tmp_path, f'''
        te = torchEmber(net, opt, name='ends')
        train(10)
        {'device.type=="cpu" or torch.accelerator.synchronize(); import time; time.sleep(1)' if 'kill' in end or '_exit' in end else ''}
        {end}
        ''')
    steps = table(tmp_path, 'ends')['step'].nunique()
    assert done.returncode==ends[end] and 'Error' not in done.stderr, done.stderr
    assert steps==10 if end in ('pass', 'raise SystemExit(3)') else steps>=9


@only_cuda
def test_a_device_that_fails(tmp_path):
    "An index out of range makes the device unusable. The user sees the same error as without torchember, and recorded rows stay."
    done = program(tmp_path, '''
        te = torchEmber(net, opt, name='fails')
        train(5)
        table = torch.zeros(10, device=device)
        table[torch.tensor([99], device=device)]
        train(5)
        torch.accelerator.synchronize()
        ''')
    assert done.returncode and 'device-side assert' in done.stderr
    assert table(tmp_path, 'fails')['step'].nunique()>=4, done.stderr


def test_workers_that_are_forked(tmp_path):
    done = program(tmp_path, '''
        data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4, num_workers=2, pin_memory=True)
        with torchEmber(net, opt, name='loads') as te:
            for epoch in range(2):
                for x in data:
                    net(x.to(device, non_blocking=True)).square().mean().backward()
                    opt.step()
                    opt.zero_grad()
        print(te.t.df.step.nunique())
        ''')
    assert done.stdout.split()==['32'], done.stderr


sharded = '''from torch.distributed.fsdp import fully_shard
fully_shard(net[0])
fully_shard(net)
opt = torch.optim.AdamW(net.parameters())'''
distributed = '''
import torch.distributed as dist
os.environ |= dict(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', RANK='0', WORLD_SIZE='1', LOCAL_RANK='0')
from torch.distributed import TCPStore
store = dist.HashStore()
dist.init_process_group('nccl', store=store, rank=0, world_size=1, device_id=torch.device('cuda', 0))
'''


@only_cuda
@pytest.mark.parametrize('kind', ['ddp', 'fsdp2', 'fsdp2 compiled'])
def test_over_nccl(tmp_path, kind):
    wrap = {'ddp': 'net = nn.parallel.DistributedDataParallel(net, device_ids=[0])',
        'fsdp2': sharded, 'fsdp2 compiled': 'for m in net: m.compile()\n'+sharded}
    done = program(tmp_path, textwrap.dedent(distributed)+f'''
{wrap[kind]}
te = torchEmber(net, opt, name='spread', ttypes={ALL!r}, on_error='raise')
train(4)
te.close()
print(len(te.t.df), te.t.df.step.nunique())
dist.destroy_process_group()
''')
    assert done.returncode==0 and done.stdout.split()[-1]=='4', done.stderr[-3000:]


# ---- the cases of `armed.py` on the GPU

# Cases that set the device of their tensors themselves, or
by_hand = {'DistributedDataParallel', 'nn.DataParallel', 'autocast', 'two models in two threads', 'one model in two threads'}
# create tensors in threads, where the default device does not apply


@pytest.mark.parametrize('what', [c for c in armed_cases if c not in by_hand])
def test_what_stays_true_while_a_model_is_armed(what):
    if what=='300 nested modules' or what=='nothing left behind': torch.zeros(1, device=device)
    with device: armed_cases[what][1]()


# ---- large models and tensors

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_alexnet(tmp_path, dtype):
    torch.manual_seed(0)
    net = AlexNet().to(device, dtype)
    kept = Kept(net)
    opt = torch.optim.SGD(net.parameters(), lr=.01, momentum=.9)
    with nothing_said(), torchEmber(net, opt, home=tmp_path, stats='full', ttypes=ALL, on_error='raise') as te:
        kept.calls.clear()
        net(torch.randn(8, 3, 224, 224, device=device, dtype=dtype)).float().square().mean().backward()
        opt.step()
    n = 0
    for r in te.t.lines():
        if r['ttype']!='output': continue
        says(r, kept.seen[path_of(r), 0][0], 1e-5)
        n += 1
    assert n==24
