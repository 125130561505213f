"An armed model under torch.compile has the same rows as in eager mode, and as many graphs as an unarmed model."
import copy
import io
import itertools
import pickle
import re
import sys
import threading
from collections import Counter
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from compared import ALL, FORWARD, GPT, Few, compiled, ids, loss_of, needs_hooks, places, plain, same_rows, same_training, train
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from torchember import torchEmber
from torchember.capture import compiled as compiled_module

TOL = {'eager': 0, 'aot_eager': 1e-6, 'inductor': 2e-5}
BACKENDS = [pytest.param(b, marks=[pytest.mark.slow]*(b=='inductor')) for b in TOL]
OPTIONS = dict(ttypes=ALL, stats='full')


@cache
def eager(blocks=2, loops=1, checkpoint=None): return train(lambda: GPT(blocks, loops, checkpoint), ids, **OPTIONS)


@cache
def bare(blocks, how, **kwargs): return train(lambda: GPT(blocks, **kwargs), ids, how, armed=False).graphs


@pytest.fixture(autouse=True)
def from_scratch():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# a subclass with its own forward, because Dynamo does not compile a forward of torch's modules
class Mlp(nn.Sequential):
    def forward(self, x): return super().forward(x)


def mlp():
    torch.manual_seed(0)
    return Mlp(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))


def twelve():
    "Return a model of twelve equal blocks."
    net = nn.Sequential(*(Mlp(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)) for _ in range(12)))
    net.blocks = list(net)
    return net


def mlp_and_input(): return mlp(), (torch.randn(5, 4),), {}


def run(f, te, *inputs):
    "Train on each input. Return the rows."
    for i in inputs:
        f(i).square().sum().backward()
        te.step()
    return plain(te)


# ---- a whole model, its blocks, or a training step is compiled

@pytest.mark.parametrize('backend', BACKENDS)
def test_whole(backend):
    "A whole model is compiled into one graph. Inductor gets a small model, because it takes a second for each kernel."
    make,options = (GPT, OPTIONS) if backend!='inductor' else (Few, dict(ttypes=ALL))
    got = train(make, ids, 'whole', backend, **options)
    want = eager() if backend!='inductor' else train(make, ids, **options)
    assert got.graphs==1
    same_training(want, got, TOL[backend])


def test_block_by_block():
    "All twelve blocks share one graph, as in an unarmed model. With one graph each, Dynamo's limit would be exceeded."
    got = train(lambda: GPT(12), ids, 'blocks', **OPTIONS)
    assert got.graphs==bare(12, 'blocks')==1
    same_training(eager(12), got)


@pytest.mark.release
def test_blocks_under_inductor():
    want,got = (train(twelve, lambda: torch.randn(5, 4, requires_grad=True), how, 'inductor', ttypes=ALL) for how in ('eager', 'blocks'))
    assert got.graphs==1
    same_training(want, got, 2e-5)


@pytest.mark.slow
def test_reduce_overhead():
    "A CPU has no CUDA graphs. On a GPU, torchember's operators prevent CUDA graphs, because one argument is on the CPU."
    model,x,kinds = mlp(),torch.randn(5, 4),('input', 'output', 'weight', 'output_grad', 'input_grad')
    rows = []
    for f in (model, torch.compile(model, mode='reduce-overhead', fullgraph=True)):
        with torchEmber(model, ttypes=kinds, on_error='raise') as te:
            for _ in range(3): loss_of(f(x)).backward()
            rows.append(plain(te))
    same_rows(*rows, 2e-5)


@pytest.mark.release # slow test, run only before a release
@pytest.mark.slow
@pytest.mark.parametrize('how,times', [('whole', 3), ('blocks', 10)])
def test_a_looped_block(how, times):
    "A block called in a loop uses one graph, even if it is called more often than Dynamo's limit of graphs."
    got = train(lambda: GPT(1, times), ids, how, **OPTIONS)
    assert got.graphs==bare(1, how, loops=times)==1
    assert {r['call'] for r in got.rows if 'blocks' in r['module'] and r['ttype']!='weight' and r['ttype']!='weight_grad'}==set(range(times))
    same_training(eager(1, times), got)


@pytest.mark.slow
@pytest.mark.parametrize('how', ['whole', 'blocks'])
@pytest.mark.parametrize('reentrant', [False, True])
def test_checkpointing(how, reentrant):
    "The recomputation of a checkpoint in the backward is not recorded, and uses the same compiled graph."
    blocks = 2 if how=='blocks' else 1 # equal blocks share one graph, so use two
    got = train(lambda: GPT(blocks, 1, reentrant), ids, how, **OPTIONS)
    assert got.graphs==bare(blocks, how, checkpoint=reentrant)
    same_training(eager(blocks, 1, reentrant), got)


def test_model_compile():
    "`model.compile()` compiles the model in place and gives the same rows."
    want = run(m := mlp(), torchEmber(m, ttypes=ALL), *torch.randn(3, 5, 4))
    torch.manual_seed(0)
    model = mlp()
    te,count = torchEmber(model, ttypes=ALL),CompileCounterWithBackend('aot_eager')
    model.compile(backend=count, fullgraph=True)
    got = run(model, te, *torch.randn(3, 5, 4))
    assert count.frame_count==1
    same_rows(want, got)


@needs_hooks
def test_a_whole_training_step():
    "Forward, backward and optimizer step run in one compiled function."
    def rows(how):
        torch.manual_seed(0)
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), .1)
        te = torchEmber(model, optimizer=opt, ttypes=('input', 'output', 'output_grad', 'weight', 'weight_grad', 'update'))
        def step(x):
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()
        f = compiled(step, 'aot_eager') if how else step
        losses = [f(x).item() for x in torch.randn(4, 5, 4)]
        te.close()
        return losses, plain(te)
    (a,want),(b,got) = rows(False),rows(True)
    assert a==b
    same_rows(want, got)


def test_a_memory_budget_for_activations():
    "Tensors that the compiler recomputes in the backward to save memory are recorded only once."
    import torch._functorch.config as config
    with config.patch(activation_memory_budget=.3): got = train(lambda: GPT(1), ids, 'whole', **OPTIONS)
    same_training(eager(1), got)


# ---- Inductor: one operator call reports many tensors

def operators_in(f):
    "Run `f`. Return for each graph the names of torchember's operators that the code generated by Inductor calls."
    from torch._inductor.utils import fresh_cache, run_and_get_code
    with fresh_cache(): _,codes = run_and_get_code(f)
    return [re.findall(r'torch\.ops\.torchember\.([a-z]+(?:_[a-z]+)*)(?:_\d+)?\.default\(', code) for code in codes]


@pytest.mark.slow
@needs_hooks
@pytest.mark.parametrize('merges', [True, pytest.param(False, marks=pytest.mark.release)])
def test_one_operator_reports_all_tensors_of_a_graph(merges, monkeypatch):
    "Inductor merges all operator calls of a graph, except the begin of a pass. Without merging, each module has two calls."
    if not merges: monkeypatch.setattr(compiled_module, 'merge_operator_calls', lambda *args: None)
    torch._dynamo.reset()
    model = Few()
    with torchEmber(model, ttypes=ALL): calls = operators_in(lambda: loss_of(torch.compile(model, fullgraph=True)(ids())).backward())
    if merges: assert calls==[['began', 'pending', 'reported'], ['reported_grads']]
    else:
        forward,backward = calls
        assert Counter(forward)=={'began': 1, 'entered': 7, 'exited': 7, 'ended': 1} and set(backward)=={'grads_arrived'} and len(backward)>7


@pytest.mark.slow
@pytest.mark.release # the documentation page about merged calls also checks this memory limit
def test_large_tensors_are_not_kept_for_a_merged_call():
    "In an evaluation, a merged call keeps at most 1 MB of tensors that the graph itself no longer needs."
    layers = [nn.Linear(512, 512) for _ in range(4)]
    for rows,least,most in ((4, 1, 1), (1024, 4, 9)):
        torch._dynamo.reset()
        model = Mlp(*layers)
        with torchEmber(model), torch.no_grad(): names, = operators_in(lambda: torch.compile(model, fullgraph=True)(torch.ones(rows, 512))) # noqa: B023
        assert least<=sum(k not in ('began', 'pending', 'ended') for k in names)<=most


class Writes(nn.Module):
    "A model that writes into its own input before and after other modules read this input."
    def __init__(self): super().__init__(); self.a,self.b,self.head = nn.Tanh(),nn.Tanh(),nn.Linear(4, 2)
    def forward(self, x):
        y = self.a(x)
        x.add_(1)
        z = self.b(x)
        x.mul_(2)
        return self.head(y*z)


@pytest.mark.parametrize('backend', BACKENDS)
def test_a_model_that_writes_into_its_input(backend):
    "A tensor is measured with its value at the call of the module, even if the graph reports the call later."
    want,got = (train(Writes, lambda: torch.randn(3, 4), how, backend, ttypes=ALL) for how in ('eager', 'whole'))
    assert got.graphs==1 and len({r['mean'] for r in got.rows if r['ttype']=='input' and 'Linear' not in r['module']})==4
    same_training(want, got, TOL[backend])


# ---- versions of torch in which private names have changed

def changed_inductor(which):
    "Return a fake Inductor module in which some private attributes are missing, as in another version of torch."
    from torch._inductor import lowering as real
    if which=='nothing': return None
    if which=='another module': return SimpleNamespace()
    if which=='no fallback': return SimpleNamespace(lowerings=real.lowerings, V=real.V)
    return SimpleNamespace(lowerings=real.lowerings, fallback_handler=real.fallback_handler, V=SimpleNamespace(graph=SimpleNamespace()))


@pytest.mark.parametrize('which', ['nothing', 'another module', 'no fallback', 'no notes'])
def test_lowering_where_torch_has_changed(which, monkeypatch):
    "With any set of private names in Inductor, the model compiles and no row is lost."
    from torch._inductor import lowering as real

    from torchember.capture import private_torch as ours
    ops = [op for op in list(real.lowerings) if getattr(op, 'namespace', None)=='torchember']
    for op in ops: monkeypatch.delitem(real.lowerings, op)
    monkeypatch.setattr(ours, 'sys', SimpleNamespace(modules={'torch._inductor.lowering': changed_inductor(which)}, _getframe=sys._getframe))
    monkeypatch.setattr(ours, 'missing', {})
    # switch off the caches, because a cached graph is not lowered again
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        got = train(mlp_and_input, None, 'whole', 'inductor', ttypes=ALL)
    # older versions of torch need no lowering by torchember
    if ours.hooks_in_graphs: assert any('_inductor' in k for k in ours.missing)==(which!='nothing')
    monkeypatch.undo()
    want = train(mlp_and_input, None, ttypes=ALL)
    assert got.graphs==1 and Counter(places(got.rows))==Counter(places(want.rows))
    for op in [op for op in list(real.lowerings) if getattr(op, 'namespace', None)=='torchember']: del real.lowerings[op]


@needs_hooks
def test_operators_where_torch_has_no_effects(monkeypatch):
    "Without torch's support for operators with side effects, an operator still stays in the graph and is called."
    from torchember.capture.compiled import define_operator, make_key_tensor
    import torch._higher_order_ops.effects as effects
    monkeypatch.delattr(torch.library, '_register_effectful_op', raising=False)
    monkeypatch.delattr(effects, '_register_effectful_op')
    heard = []
    op = define_operator('without_effects', ', str what', lambda holder, xs, what: heard.append((what, xs[0].sum().item())))
    key = make_key_tensor(holder := type('Holder', (), {'memory_reused': lambda self: None})())
    def f(x):
        op([x.detach()], key, 'in')
        y = x.relu()*2
        y.register_hook(lambda g: op([g.detach()], key, 'grad') or g)
        return y.sum()
    for backend in TOL:
        heard.clear()
        compiled(f, backend, fullgraph=True)(torch.ones(3, requires_grad=True)).backward()
        assert heard==[('in', 3), ('grad', 3)], backend
    del holder


@pytest.mark.parametrize('grad', [False, pytest.param(True, marks=needs_hooks)])
def test_inductor_captures_no_cuda_graph_with_our_operators(tmp_path, grad):
    "A CUDA graph would not run Python code. Inductor's own check must reject all torchember operators."
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor import lowering # noqa: F401
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node
    ours,others = [],[]
    def noted(gm, inputs):
        for n in gm.graph.nodes: (ours if 'torchember' in f'{n.target} {n.args}' else others).append(is_cudagraph_unsafe_fx_node(n))
        return gm
    model,(x,),_ = mlp_and_input()
    torch._dynamo.reset()
    with torchEmber(model, home=tmp_path, ttypes=ALL if grad else ('output',)):
        torch.compile(model, backend=aot_autograd(fw_compiler=noted))(x).sum().backward()
    assert len(ours)>3 and all(ours) and not any(others)


# ---- compiled autograd

def backward_compiled(model, te, forward, around, backend):
    "Train three steps with compiled backwards, including hooks. Return the number of graphs."
    from torch._dynamo.compiled_autograd import _enable
    f = compiled(model, backend, fullgraph=True) if forward=='compiled' else model
    opt,count = torch.optim.SGD(model.parameters(), .1),CompileCounterWithBackend(backend)
    for i in range(3):
        torch.manual_seed(i)
        x = torch.randn(5, 4, requires_grad=True)
        if around is None: f(x).square().mean().backward()
        elif around=='all':
            with _enable(torch.compile(backend=count, fullgraph=True)): f(x).square().mean().backward()
        else:
            loss = f(x).square().mean()
            with _enable(torch.compile(backend=count, fullgraph=True)): loss.backward()
        if te: te.step()
        opt.step()
        opt.zero_grad()
    return count.frame_count


@pytest.mark.slow
@pytest.mark.parametrize('backend,forward,around', [('eager', 'eager', 'the backward'), ('eager', 'compiled', 'all'), ('aot_eager', 'eager', 'all'),
    ('aot_eager', 'compiled', 'the backward'), *(pytest.param('inductor', *p, marks=[pytest.mark.slow, pytest.mark.release])
    for p in itertools.product(('eager', 'compiled'), ('all', 'the backward')))])
def test_compiled_autograd(backend, forward, around):
    "Under fullgraph, there are as many graphs as unarmed, the gradients are equal, and training is bit-identical."
    def make(): return nn.Sequential(mlp(), nn.Tanh())
    want,got,bare = make(),make(),make()
    te = torchEmber(want, ttypes=ALL)
    backward_compiled(want, te, forward, None, backend)
    rows = plain(te)
    te.close()
    graphs = backward_compiled(bare, None, forward, around, backend)
    torch._dynamo.reset()
    te = torchEmber(got, ttypes=ALL, on_error='raise')
    assert backward_compiled(got, te, forward, around, backend)==graphs
    assert all(map(torch.equal, bare.parameters(), got.parameters()))
    same_rows(rows, plain(te), 2e-6 if backend=='inductor' else 0)
    assert te.close()['errors']==0


def test_compiled_autograd_by_config():
    "The backward runs in compiled code, as in torch's tutorial. Each of three calls of a layer gets its own gradient."
    class Loop(nn.Module):
        def __init__(self): super().__init__(); self.l = nn.Linear(3, 3)
        def forward(self, x):
            for _ in range(3): x = self.l(x).tanh()
            return x
    def rows(how):
        torch._dynamo.reset()
        torch.manual_seed(0)
        m = Loop()
        te = torchEmber(m, ttypes=('output', 'output_grad', 'weight_grad'), on_error='raise')
        def step(x): m(x).square().mean().backward()
        f = compiled(step, 'aot_eager') if how else step
        with torch._dynamo.config.patch(compiled_autograd=bool(how)):
            for x in torch.randn(3, 5, 3):
                f(x)
                te.step()
                m.zero_grad()
        return plain(te)
    same_rows(rows(False), rows(True))


# ---- models that are armed after they were compiled

@pytest.mark.parametrize('root', ['compiled', 'eager'])
def test_armed_after_compiling(root):
    "Dynamo's guards notice that the model was armed, and compile one more graph. After disarm, the first graph is used again."
    model,count,x = mlp(),CompileCounterWithBackend('aot_eager'),torch.randn(5, 4)
    want = run(m := mlp(), torchEmber(m, ttypes=ALL), x, x)
    f = compiled(model, count, fullgraph=True)
    f(x).square().sum().backward()
    model.zero_grad()
    assert count.frame_count==1
    te = torchEmber(f if root=='compiled' else model, ttypes=ALL)
    got = run(f, te, x, x)
    assert count.frame_count==2
    same_rows(want, got)
    te.disarm()
    f(x).sum().backward()
    assert count.frame_count==2 and len(te.t.lines())==len(got)
    te.arm()
    run(f, te, x)
    assert count.frame_count<=3 and len(te.t.lines())==len(got)*3/2
    te.close()
    f(x)
    assert count.frame_count<=3


def test_blocks_armed_after_compiling():
    torch.manual_seed(0)
    model,x = GPT(12),ids()
    count = CompileCounterWithBackend('aot_eager')
    for b in model.blocks: b.compile(backend=count, fullgraph=True)
    model(x)
    te = torchEmber(model)
    model(x)
    assert count.frame_count==2
    want = plain(te)
    te.close()
    model(x)
    assert count.frame_count==2
    torch.manual_seed(0)
    fresh = GPT(12)
    with torchEmber(fresh) as te: fresh(ids())
    same_rows(plain(te), want)


# ---- training and evaluation modes, changing shapes, and several passes

@pytest.mark.parametrize('mode', ['train', 'eval', 'no_grad', 'inference_mode'])
def test_modes(mode):
    class Net(nn.Sequential):
        def forward(self, x): return super().forward(x)
    def make():
        m = Net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten(), nn.Linear(36, 2))
        return m.train(mode=='train')
    context = {'no_grad': torch.no_grad, 'inference_mode': torch.inference_mode}.get(mode)
    inputs = lambda: torch.randn(4, 3, 5, 5)
    want,got = (train(make, inputs, how, context=context, **OPTIONS) for how in ('eager', 'whole'))
    assert got.graphs==1
    same_training(want, got)


def test_one_model_in_all_modes():
    "Training, evaluation and inference of a model need one graph each, as in an unarmed model."
    def go(model, f, te):
        for _ in range(2):
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with mode(): y = f(torch.ones(3, 4))
                if y.requires_grad: y.sum().backward()
                if te: te.step()
    counts = []
    for armed in (False, True):
        torch._dynamo.reset()
        m,count = mlp(),CompileCounterWithBackend('aot_eager')
        te = torchEmber(m) if armed else None
        go(m, compiled(m, count, fullgraph=True), te)
        counts.append(count.frame_count)
    m = mlp()
    go(m, m, want := torchEmber(m))
    same_rows(plain(want), plain(te))
    assert counts[0]==counts[1]<=3


def test_dynamic_shapes():
    "With dynamic shapes, there are as many graphs as unarmed, and each row has the actual shape."
    counts = []
    for armed in (False, True):
        torch._dynamo.reset()
        m,count = mlp(),CompileCounterWithBackend('aot_eager')
        te = torchEmber(m, ttypes=ALL) if armed else None
        f = compiled(m, count, fullgraph=True)
        for n in (3, 5, 7, 9):
            f(torch.ones(n, 4)*torch.arange(n)[:, None]).sum().backward()
            if te: te.step()
        counts.append(count.frame_count)
    m = mlp()
    want = torchEmber(m, ttypes=ALL)
    for n in (3, 5, 7, 9):
        m(torch.ones(n, 4)*torch.arange(n)[:, None]).sum().backward()
        want.step()
    assert counts[0]==counts[1]
    assert {r['shape'][0] for r in plain(te) if r['ttype']=='output'}=={3, 5, 7, 9}
    same_rows(plain(want), plain(te))


@pytest.mark.slow
def test_autocast():
    context = lambda: torch.autocast('cpu', dtype=torch.bfloat16)
    want,got = (train(GPT, ids, how, context=context, **OPTIONS) for how in ('eager', 'whole'))
    assert got.graphs==1 and {'bfloat16', 'float32'}<={r['dtype'] for r in got.rows}
    same_training(want, got)


class Views(nn.Module):
    "A model that writes in place to views of an input and of an output, with a module that returns its input."
    def __init__(self): super().__init__(); self.a,self.b,self.same,self.act = nn.Linear(4, 6),nn.Linear(3, 3),nn.Identity(),nn.ReLU(inplace=True)
    def forward(self, x):
        y = self.same(self.a(x))
        left,right = y.chunk(2, -1)
        z = self.b(self.act(left.clone())).transpose(0, 1)
        z = z*2
        z += right.transpose(0, 1)
        z[0] = 0
        return self.act(z.t()+1), y


@pytest.mark.slow
@pytest.mark.parametrize('backend', TOL)
def test_in_place_and_views(backend):
    want,got = (train(Views, lambda: torch.randn(5, 4), how, backend, ttypes=ALL) for how in ('eager', 'whole'))
    assert got.graphs==1
    same_training(want, got, TOL[backend])


def test_two_passes_before_a_backward():
    "Two passes before one backward, as in siamese networks and GANs, are recorded as two steps."
    def go(f, te):
        torch.manual_seed(1)
        a,b = torch.randn(3, 4),torch.randn(3, 4)
        for _ in range(2):
            (f(a).square().sum()+f(b).square().sum()).backward()
            te.step()
        loss = f(a).sum()
        te.step() # the step ends between a pass and its backward
        (loss+f(b).sum()).backward()
        te.step()
        return [p.grad for p in te.model.parameters()], plain(te)
    m = mlp()
    grads,want = go(m, torchEmber(m, ttypes=FORWARD[:4]))
    m = mlp()
    count = CompileCounterWithBackend('aot_eager')
    got_grads,got = go(compiled(m, count, fullgraph=True), torchEmber(m, ttypes=FORWARD[:4]))
    assert count.frame_count==1 and all(map(torch.allclose, grads, got_grads))
    same_rows(want, got)


@needs_hooks
def test_a_gradient_finds_its_call():
    "The second of three calls of a layer has no gradient. The other gradients keep their numbers of calls."
    class Loop(nn.Module):
        def __init__(self): super().__init__(); self.l = nn.Linear(3, 3)
        def forward(self, x):
            x = self.l(x).tanh()
            with torch.no_grad(): y = self.l(x)
            return self.l(x+y).tanh()
    want,got = (train(Loop, lambda: torch.randn(2, 3), how, **OPTIONS) for how in ('eager', 'whole'))
    assert got.graphs==1 and {r['call'] for r in got.rows if r['ttype']=='output_grad'}=={0, 2}
    same_training(want, got)


@needs_hooks
@pytest.mark.parametrize('backend', BACKENDS)
def test_two_calls_with_one_tensor(backend):
    "Two calls with the same tensor have two gradients, although the operators of both calls have equal arguments."
    class Twice(nn.Module):
        def __init__(self): super().__init__(); self.l,self.head = nn.Linear(3, 3),nn.Linear(3, 2)
        def forward(self, x):
            x = self.l(x).tanh()
            return self.head(x)+self.head(x).sin()
    want,got = (train(Twice, lambda: torch.randn(4, 3), how, backend, ttypes=ALL) for how in ('eager', 'whole'))
    assert sum(r['ttype']=='input_grad' and 'head' in r['module'] and r['step']==0 for r in got.rows)==2
    same_training(want, got, TOL[backend])


def test_two_threads():
    "Two threads call one compiled model. No row is lost, and no new graph is compiled."
    m,count = mlp(),CompileCounterWithBackend('aot_eager')
    te,f = torchEmber(m, ttypes='output', stats=['numel', 'mean']),compiled(m, count, fullgraph=True)
    xs = torch.randn(2, 20, 3, 4)
    with torch.no_grad():
        f(xs[0, 0])
        te.step()
        def go(k): # set no_grad in each thread, because each thread has its own grad mode
            with torch.no_grad(): [f(x) for x in xs[k]]
        threads = [threading.Thread(target=go, args=(k,)) for k in range(2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        te.step()
        want = mlp()(xs.flatten(0, 2)).double().mean().item()
    # the passes of both threads in a step are merged, so the numbers are summed up
    got = [r for r in plain(te) if r['module']=='model(Mlp)' and r['step']]
    assert count.frame_count==1 and sum(r['numel'] for r in got)==240
    assert sum(r['numel']*r['mean'] for r in got)/240==pytest.approx(want, rel=1e-5)
    te.close()


# ---- copies of compiled and armed models

@pytest.mark.parametrize('how', ['deepcopy', 'pickle', 'save'])
def test_copies(how):
    "A copy of a compiled and armed model is neither compiled nor armed. It has its own weights and no rows."
    model = mlp()
    te = torchEmber(model)
    f = compiled(model, 'aot_eager', fullgraph=True)
    run(f, te, torch.ones(2, 4))
    n = len(te.t.lines())
    for m in (model, f):
        if how=='deepcopy': c = copy.deepcopy(m)
        elif how=='pickle': c = pickle.loads(pickle.dumps(m))
        else:
            file = io.BytesIO()
            torch.save(m, file)
            file.seek(0)
            c = torch.load(file, weights_only=False)
        inner = getattr(c, '_orig_mod', c)
        assert not any(k.startswith('_torchember') or k in ('forward', 'disarm') for p in inner.modules() if p is not c or c is inner for k in p.__dict__)
        with torch.no_grad(): [p.zero_() for p in c.parameters()]
        assert not c(torch.ones(2, 4)).any()
    assert len(te.t.lines())==n and f(torch.ones(2, 4)).any()
    te.close()


# ---- schedules: only some steps are recorded

@pytest.mark.slow
@pytest.mark.parametrize('how,ends', [('whole', 'by itself'), ('whole', 'optimizer'), ('blocks', 'by itself'), ('blocks', 'te.step')])
def test_schedules(how, ends):
    "With a schedule, one more graph is compiled: for the steps that are not recorded."
    torch.manual_seed(0)
    model,count = GPT(2 if how=='blocks' else 1),CompileCounterWithBackend('aot_eager')
    opt = torch.optim.SGD(model.parameters(), .01)
    te = torchEmber(model, every=2, optimizer=opt if ends=='optimizer' else None)
    f = compiled(model, count, fullgraph=True) if how=='whole' else model
    if how=='blocks': [b.compile(backend=count, fullgraph=True) for b in model.blocks]
    seen = []
    for _ in range(8):
        f(ids()).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if ends=='te.step': te.step()
        seen.append(count.frame_count)
    assert seen==[1]+[2]*7
    report = te.close()
    assert report['steps']==8 and report['recorded']==4 and report['errors']==0
    df = te.t.df
    assert df.step.unique().tolist()==[0, 2, 4, 6] and df[df.ttype=='output'].groupby('step').size().nunique()==1


# ---- statistics of users, probes, and selected modules

@needs_hooks
@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
def test_custom_statistics(backend):
    "Users' functions run in order under fullgraph. A function that raises an exception gives a row with the error."
    def go(f, te):
        @te.how_record('output', 'output_grad')
        def own(t): return {'n': t.numel(), 'first': t.flatten()[:3].tolist(), 'rows': [r.sum() for r in t], 'kind': 'wide' if t.shape[-1]>2 else 'narrow'}
        @te.how_record_in
        def fails(t): return {'x': 1/(t.shape[-1]-8)}
        with pytest.warns(UserWarning, match='division'): got = run(f, te, *torch.randn(2, 3, 4))
        return got
    torch.manual_seed(1)
    m = mlp()
    want = go(m, torchEmber(m, ttypes=ALL))
    torch.manual_seed(0)
    m = mlp()
    count = CompileCounterWithBackend(backend)
    te = torchEmber(m, ttypes=ALL)
    f = compiled(m, count, fullgraph=True)
    got = go(f, te)
    assert count.frame_count==1 and sum('error' in r for r in got)==4 and [r for r in got if 'rows' in r]
    same_rows(want, got)
    te.how_record_out(lambda t: {'other': 1}) # a statistic can be changed at any time, without a new graph
    f(torch.randn(3, 4))
    assert count.frame_count==1 and te.t.lines()[-1]['other']==1
    te.close()


def test_probe_and_watch_tensor():
    class Probed(nn.Module):
        def __init__(self): super().__init__(); self.l,self.te = nn.Linear(3, 2),None
        def forward(self, x):
            scores = self.l(x)*2
            return box['te'].probe('scores', scores).softmax(-1)
    box = {}
    def go(how):
        torch.manual_seed(0)
        m = Probed()
        te = box['te'] = torchEmber(m, ttypes=FORWARD[:4], every=2)
        v = te.watch_tensor('temperature', torch.full((3,), 2., requires_grad=True))
        count = CompileCounterWithBackend('aot_eager')
        f = compiled(m, count, fullgraph=True) if how else m
        for x in torch.randn(6, 4, 3):
            (f(x)*v.sum()).square().sum().backward()
            te.step()
        rows = plain(te)
        te.close()
        return rows, count.frame_count
    (want,_),(got,graphs) = go(False),go(True)
    assert graphs==2 and [r['step'] for r in got if r['tname']=='scores']==[0, 2, 4]
    same_rows(want, got)


def test_some_modules():
    "With `include`, the graph contains operators only for the included modules."
    want,got = (train(GPT, ids, how, include='blocks.*.act', ttypes=ALL) for how in ('eager', 'whole'))
    assert got.graphs==1 and {r['module'].split('.')[-1] for r in got.rows}=={'act(GELU)'}
    same_training(want, got)


@needs_hooks
@pytest.mark.parametrize('backend', BACKENDS)
def test_leaves_keep_no_hooks(backend):
    "An input that requires a gradient, and a parameter passed to another module, have one gradient row per step and keep no hooks."
    def make():
        m = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), nn.Softplus())
        return m, (torch.randn(3, 4, requires_grad=True),), {}
    want,got = (train(make, None, how, backend, steps=4, ttypes=('input_grad', 'output_grad')) for how in ('eager', 'whole'))
    same_training(want, got, TOL[backend])
    assert got.graphs==1 and not any(p._backward_hooks for p in got.model.parameters())


@pytest.mark.release # slow test, run only before a release
@pytest.mark.slow
def test_twelve_kinds_of_blocks():
    "Dynamo compiles at most eight graphs of one code object. Each kind of block has its own code object, as unarmed."
    def kind(i):
        def forward(self, x): return self.l(x).tanh()
        forward.__code__ = forward.__code__.replace(co_firstlineno=i+1)
        return type(f'Kind{i}', (nn.Module,), {'forward': forward})
    kinds = [kind(i) for i in range(12)]
    def make():
        net = nn.Sequential(*(k() for k in kinds))
        for i,b in enumerate(net): b.l = nn.Linear(2+i, 3+i)
        net.blocks = list(net)
        return net
    want,got = (train(make, lambda: torch.randn(3, 2), how, **OPTIONS) for how in ('eager', 'blocks'))
    assert got.graphs==12
    same_training(want, got)


# ---- compiled models inside torch.vmap

def over_samples(model): return torch.vmap(model)
def over_columns(model): return torch.vmap(model, in_dims=1, out_dims=1)
def nested(model): return torch.vmap(torch.vmap(model))


def beside_a_plain_tensor(model):
    f = torch.vmap(lambda x, y: model(x)+y, (0, None))
    return lambda x: f(x, torch.ones(2))


def gradient_of_each_sample(model):
    params = {n: p.detach() for n,p in model.named_parameters()}
    f = torch.vmap(torch.func.grad(lambda p, x: torch.func.functional_call(model, p, (x,)).sum()), (None, 0))
    return lambda x: sum(g.sum() for g in f(params, x).values())


def vmapped(wrap, backend, ttypes):
    "Wrap an armed model with vmap, and run two steps. Return the last output and the rows."
    torch._dynamo.reset()
    torch.manual_seed(0)
    model,x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),torch.randn(3, 4)
    x = torch.randn(2, 3, 4) if wrap in (over_columns, nested) else x
    with torchEmber(model, ttypes=ttypes, on_error='raise') as te:
        f = wrap(model) if backend is None else compiled(wrap(model), backend, fullgraph=True)
        for _ in range(2):
            out = f(x)
            if out.requires_grad: out.square().sum().backward()
            te.step()
        return out.detach(), plain(te)


@needs_hooks
@pytest.mark.parametrize('wrap,backend', [*((w, b) for w in (over_samples, over_columns, nested, beside_a_plain_tensor) for b in ('eager', 'aot_eager')),
    pytest.param(over_samples, 'inductor', marks=pytest.mark.slow)])
def test_vmap_of_an_armed_model(wrap, backend):
    "Compiled vmap gives the same rows as eager vmap: each row measures all samples together."
    (a,want),(b,got) = vmapped(wrap, None, ALL),vmapped(wrap, backend, ALL)
    assert torch.allclose(a, b, rtol=1e-5)
    same_rows(want, got, TOL[backend] or 1e-6)
    assert {r['ttype'] for r in got}=={'input', 'output', 'weight', 'weight_grad', 'scalar'}


@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
def test_vmap_of_the_gradient_of_an_armed_model(backend):
    (a,want),(b,got) = (vmapped(gradient_of_each_sample, how, ('input', 'output', 'weight')) for how in (None, backend))
    assert torch.allclose(a, b, rtol=1e-5)
    same_rows(want, got, 1e-6)


def test_a_probe_inside_vmap():
    "A probe inside vmap measures the values of all samples together."
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.l = nn.Linear(3, 2)
        def forward(self, x): return self.ember[0].probe('twice', 2*x).sum()+self.l(x).sum()
    model,x = Net(),torch.randn(5, 3)
    with torchEmber(model, on_error='raise') as te:
        model.ember = [te]
        compiled(torch.vmap(model), 'aot_eager')(x)
        row, = (r for r in plain(te) if r['ttype']=='probe')
    assert row['shape']==[5, 3] and row['mean']==pytest.approx(2*x.mean().item(), rel=1e-5)


# ---- several passes before te.step()

def accumulated(how, order, kind=twelve, steps=2, passes=2, backend='aot_eager'):
    "Train steps of several passes that end with `te.step()`. `order`: each, sum or after, the way the backwards run. Return the rows."
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*list(kind())[:2])
    with torchEmber(model, ttypes=ALL, stats='full', on_error='raise') as te:
        f = compiled(model, backend) if how=='whole' else model
        for b in model if how=='blocks' else (): b.compile(backend=backend)
        for _ in range(steps):
            losses = []
            for _ in range(passes):
                losses.append(f(torch.randn(5, 4, requires_grad=True)).square().sum())
                if order=='each': losses[-1].backward()
            if order=='sum': sum(losses).backward()
            if order=='after': [loss.backward() for loss in losses]
            te.step()
            with torch.no_grad():
                for p in model.parameters(): p -= .01*p.grad
            model.zero_grad()
        return plain(te)


@needs_hooks
@pytest.mark.parametrize('how', ['whole', 'blocks'])
@pytest.mark.parametrize('order', ['each', 'sum', 'after'])
def test_passes_before_the_first_te_step(how, order):
    "Gradients of all passes of a step are merged as in eager mode, also in the first step. Both steps have the same set of rows."
    want,got = accumulated('eager', order),accumulated(how, order)
    same_rows(want, got)
    of = [[(r['module'], r['ttype'], r['tname'], r['call'], r.get('shape'), r.get('numel')) for r in got if r['step']==i] for i in range(2)]
    assert sorted(of[0], key=str)==sorted(of[1], key=str) and all('backward' not in r for r in got)


def test_the_gradient_of_an_input_in_a_pass_before_the_first_te_step():
    "The inputs are leaf tensors with hooks until the end of the step. The row merges the gradients of both passes."
    model = nn.Linear(3, 2)
    with torchEmber(model, ttypes=('input_grad',), stats='full') as te:
        for _ in range(2):
            xs = [torch.randn(5, 3, requires_grad=True) for _ in range(2)]
            sum(model(x).square().sum() for x in xs).backward()
            te.step()
            with torch.no_grad(): model.weight -= .01
        rows = plain(te)
    assert [(r['step'], r['numel']) for r in rows]==[(0, 30), (1, 30)]
    assert rows[1]['l1']==pytest.approx(sum(x.grad.abs().sum().item() for x in xs), rel=1e-5)
    assert not any(x._backward_hooks for x in xs)
