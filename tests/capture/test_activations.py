"Under torch.compile, `Activations` catches the same activations and gradients as in eager mode, without a graph break."
import copy
import io
import itertools
import pickle
import types
from contextlib import nullcontext

import pytest
import torch
from compared import ALL, GPT, Few, ids, loss_of, plain, same_rows
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from torchember import from_activation, from_activation_grad, torchEmber

TOL = {'aot_eager': 0, 'inductor': 1e-5}


@pytest.fixture(autouse=True)
def from_scratch():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def blocks_of(how): return 2 if how=='blocks' else 1 # equal blocks share one graph, so use two


def of(backend): return Few if backend=='inductor' else GPT


def model(blocks=1, kind=GPT, **kwargs):
    torch.manual_seed(0)
    return kind(blocks, **kwargs)


def batch(seed=0):
    torch.manual_seed(seed)
    return ids()


def compiled(m, how, backend='aot_eager'):
    "Return the compiled model and the counter of its graphs."
    count = CompileCounterWithBackend(backend)
    if how=='whole': return torch.compile(m, backend=count, fullgraph=True), count
    for part in (m,) if how=='in place' else m.blocks: part.compile(backend=count, fullgraph=True)
    return m, count


def catch(m, **kwargs): return from_activation(m, clone=True, **kwargs), from_activation_grad(m, clone=True, **kwargs)
def taken(*caught): return [{k: x.clone() for k,x in a.state_dict.items()} for a in caught]


def wanted(steps=1, **kwargs):
    "Return the activations of the last step in eager mode, and the gradients of the parameters."
    m = model(**kwargs)
    caught = catch(m)
    for i in range(steps): loss_of(m(batch(i))).backward()
    return taken(*caught), [p.grad for p in m.parameters()]


def same(want, got, tol=0.):
    for a,b in zip(want, got, strict=True):
        assert list(a)==list(b) and len(a)>1
        # a relative tolerance would fail for gradients that are zero except for rounding
        least = max(x.abs().max().item() for x in a.values())
        for k in a: assert torch.equal(a[k], b[k]) if not tol else torch.allclose(a[k], b[k], rtol=0, atol=tol*least), k


# ---- a whole model, in place, or its blocks are compiled

@pytest.mark.parametrize('backend,how,when', [*itertools.product(['aot_eager'], ['whole', 'in place', 'blocks'], ['before', 'after']),
    # compiling in place is tested with one backend only: the backend makes no difference
    *(pytest.param('inductor', *p, marks=pytest.mark.slow) for p in [('whole', 'before'), ('blocks', 'after')])])
def test_compiled(backend, how, when):
    "The model is armed before or after compiling. One graph reports all activations and gradients; `remove` restores the first graph."
    want,grads = wanted(blocks=blocks_of(how), kind=of(backend))
    m = model(blocks_of(how), of(backend))
    caught = catch(m) if when=='before' else ()
    f,count = compiled(m, how, backend)
    if when=='after':
        for _ in range(2): f(batch())
        assert count.frame_count==1
        caught = catch(m)
    loss_of(f(batch())).backward()
    assert count.frame_count==(1 if when=='before' else 2) and not counters['graph_break']
    same(want, taken(*caught), TOL[backend])
    if not TOL[backend]: assert all(map(torch.equal, grads, (p.grad for p in m.parameters())))
    for a in caught: a.remove()
    n = count.frame_count
    f(batch(1))
    assert count.frame_count==(n if when=='after' else 2)
    same(want, taken(*caught), TOL[backend])


def test_blocks_share_a_graph():
    "Equal blocks share one graph: an armed model has as many graphs as an unarmed model"
    m = model(12)
    caught = catch(m)
    f,count = compiled(m, 'blocks')
    loss_of(f(batch())).backward()
    assert count.frame_count==1
    same(wanted(blocks=12)[0], taken(*caught))


def test_twelve_kinds_of_blocks():
    "Dynamo compiles at most eight graphs of one code object. Each kind of block has its own code object, so all are compiled."
    def kind(i):
        def forward(self, x): return self.l(x).tanh()
        forward.__code__ = forward.__code__.replace(co_firstlineno=i+1)
        return type(f'Kind{i}', (nn.Module,), {'forward': forward})
    m = nn.Sequential(*(kind(i)() for i in range(12)))
    for i,b in enumerate(m): b.l = nn.Linear(2+i, 3+i)
    m.blocks = list(m)
    with torch.no_grad(), from_activation(m) as acts:
        m(torch.ones(3, 2))
        want = taken(acts)
        f,count = compiled(m, 'blocks')
        f(torch.ones(3, 2))
        assert count.frame_count==12
        same(want, taken(acts))


def test_a_schedule_of_modes():
    "A compiled model may switch between training, evaluation and inference mode."
    m = model()
    f,count = compiled(m, 'whole')
    acts = from_activation(m)
    for mode,train in itertools.product((torch.enable_grad, torch.no_grad, torch.inference_mode), (True, False)):
        m.train(train)
        with mode():
            f(batch())
            got = taken(acts)
            model_of_eager = model().train(train)
            with from_activation(model_of_eager) as eager: model_of_eager(batch())
        same(taken(eager), got)
    assert count.frame_count<=6


# ---- `Activations` together with an ember

@pytest.mark.release # slow test, run only before a release
@pytest.mark.parametrize('backend,how,order,leaves', [('aot_eager', 'whole', 'ember first', 'ember'), ('aot_eager', 'whole', 'ember last', 'activations'),
    ('aot_eager', 'blocks', 'ember first', 'activations'), ('aot_eager', 'blocks', 'ember last', 'ember'),
    *(pytest.param('inductor', *p, marks=pytest.mark.slow) for p in [('whole', 'ember first', 'activations'), ('blocks', 'ember last', 'ember')])])
def test_beside_an_ember(backend, how, order, leaves):
    "`Activations` and an ember on the same model get the same values as each of them alone. Either may be removed first."
    want,_ = wanted(3, blocks=blocks_of(how), kind=of(backend))
    alone = model(blocks_of(how), of(backend))
    te = torchEmber(alone, ttypes=ALL)
    for i in range(3):
        loss_of(alone(batch(i))).backward()
        te.step()
    rows = plain(te)
    m = model(blocks_of(how), of(backend))
    before = {n: dict(o.__dict__) for n,o in m.named_modules()}
    te = torchEmber(m, ttypes=ALL, on_error='raise') if order=='ember first' else None
    caught = catch(m)
    if te is None: te = torchEmber(m, ttypes=ALL, on_error='raise')
    f,count = compiled(m, how, backend)
    for i in range(3):
        loss_of(f(batch(i))).backward()
        te.step()
    assert count.frame_count==1 and not counters['graph_break']
    same_rows(rows, plain(te), 2*TOL[backend])
    same(want, taken(*caught), TOL[backend])
    if leaves=='ember': te.disarm()
    else: [a.remove() for a in caught]
    f(batch(5))
    if leaves=='ember':
        got, = taken(caught[0])
        assert list(got)==list(want[0]) and not torch.equal(got['head'], want[0]['head'])
        [a.remove() for a in caught]
    else:
        assert len(te.t.lines())>len(rows)
        te.disarm()
    for n,o in m.named_modules():
        assert set(o.__dict__)-{'_compiled_call_impl', '_is_torch_compile'}==set(before[n]), n


@pytest.mark.release # slow test, run only before a release
def test_an_ember_and_blocks_share_a_graph():
    m = model(12)
    acts = from_activation(m)
    te = torchEmber(m)
    f,count = compiled(m, 'blocks')
    f(batch())
    assert count.frame_count==1 and len(acts.state_dict)==len(wanted(blocks=12)[0][0])
    te.close()


# ---- repeated calls, and several passes and backwards in any order

@pytest.mark.parametrize('how', ['whole', 'blocks'])
def test_calls_and_checkpointing(how):
    "A block is called three times and recomputed in the backward. Each call is caught exactly once."
    kwargs = dict(blocks=1, loops=3, checkpoint=False)
    want,_ = wanted(**kwargs)
    assert 'blocks.0.up@2' in want[0] and 'blocks.0.up@2' in want[1]
    m = model(**kwargs)
    caught = catch(m)
    f,count = compiled(m, how)
    loss_of(f(batch())).backward()
    assert count.frame_count==1
    same(want, taken(*caught))


def test_memory_that_is_used_again():
    "Inductor reuses the memory of tensors in a graph. Caught tensors keep their values, even without clone=True."
    class Deep(nn.Module):
        def __init__(self): super().__init__(); self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        def forward(self, x):
            for l in self.layers: x = l(x).relu()
            return x
    m,x = Deep(),torch.randn(128, 64)
    f = torch.compile(m, fullgraph=True)
    with torch.no_grad(), from_activation(m) as acts:
        m(x)
        want = taken(acts)
        f(x)
        got = dict(acts.state_dict)
        assert len({t.data_ptr() for t in got.values()})==9
        f(2*x)
        same(want, [got], 1e-6)


def test_passes_and_backwards_in_any_order():
    "After several passes and backwards, the values of the last one are kept, as in eager mode."
    def last(how):
        m = model()
        f,_ = compiled(m, how) if how else (m, None)
        grads,got = from_activation_grad(m, clone=True),[]
        for order in ([0, 1, 'b0', 'b1'], [0, 1, 'sum'], [0, 'no', 1, 'b1'], [0, 'b0']):
            loss = {}
            for o in order:
                if isinstance(o, int): loss[o] = loss_of(f(batch(o)))
                elif o=='no':
                    with torch.no_grad(): f(batch(3))
                else: (sum(loss.values()) if o=='sum' else loss[int(o[1])]).backward()
            got += taken(grads)
        return got
    same(last(None), last('whole'))


@pytest.mark.slow
def test_compiled_autograd():
    "Compiled autograd compiles the backward, after an eager or a compiled pass. Gradients are still caught."
    from torch._dynamo.compiled_autograd import _enable
    class Small(nn.Sequential):
        def forward(self, x): return super().forward(x)
    def caught(how, around):
        torch.manual_seed(0)
        m,x = Small(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),torch.randn(5, 4)
        both = catch(m)
        loss = loss_of((compiled(m, how)[0] if how else m)(x))
        with around: loss.backward()
        return taken(*both)
    want = caught(None, nullcontext())
    for how in (None, 'whole'):
        torch._dynamo.reset()
        same(want, caught(how, _enable(torch.compile(backend='aot_eager', fullgraph=True))))


def test_tuples_and_dicts():
    class Parts(nn.Module):
        def __init__(self): super().__init__(); self.l = nn.LSTMCell(4, 3)
        def forward(self, x):
            h,c = self.l(x)
            h,c = self.l(x, (h, c))
            return {'h': h, 'more': [c*2, None]}
    torch.manual_seed(0)
    m,x = Parts(),torch.randn(2, 4)
    def caught(f):
        with from_activation(m, clone=True) as acts, from_activation_grad(m, clone=True) as grads:
            out = f(x)
            (out['h']+out['more'][0]).sum().backward()
            return taken(acts, grads)
    want = caught(m)
    assert list(want[0])==['l.output_0', 'l.output_1', 'l.output_0@1', 'l.output_1@1', 'output_h', 'output_more.0']
    same(want, caught(compiled(m, 'whole')[0]))


# ---- copies of the module, and unusual forwards

class Instance(nn.Module):
    def forward(self, x): return x
class Static(nn.Module):
    @staticmethod
    def forward(x): return x+1


@pytest.mark.parametrize('armed', [False, True])
def test_copies(armed):
    "A copy of an armed model is not armed, and its outputs are not caught."
    m = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    te = torchEmber(m) if armed else None
    acts = from_activation(m)
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    for c in (copy.deepcopy(m), copy.copy(m), pickle.loads(pickle.dumps(m)), torch.load(file, weights_only=False)):
        assert not any(k.startswith('_torchember') or k=='forward' for k in c.__dict__)
        c(torch.ones(1, 2))
        if c[0] is not m[0]: assert not len(acts.state_dict) and 'forward' not in c[0].__dict__
        acts.state.clear()
    m(torch.ones(1, 2))
    assert list(acts.state_dict)==['0', '1', 'output_0']
    if te: te.close()


@pytest.mark.parametrize('armed', ['no', 'before', 'after'])
def test_a_forward_of_the_instance(armed):
    "`forward` may be an instance attribute, static or written in C. Results, names and signature stay, and it is restored."
    import inspect
    class Builtin(nn.Module): forward = torch.relu
    own,method = Instance(),Instance()
    own.forward = lambda a, b=1: a*b
    def doubled(self, x): "Return two times x."; return 2*x
    method.forward = types.MethodType(doubled, method)
    for part in (own, method, Static(), Builtin(), torch.jit.trace(nn.Tanh(), torch.ones(1))):
        m = nn.Sequential(part)
        want,before = m(torch.ones(2)),dict(part.__dict__)
        def looks(f):
            try: return inspect.signature(f), f.__doc__
            except ValueError: return None
        face = looks(part.forward)
        te = torchEmber(m) if armed=='before' else None
        with from_activation(m) as acts:
            if armed=='after': te = torchEmber(m)
            assert torch.equal(m(torch.ones(2)), want) and torch.equal(acts.state_dict['0'], want)
            assert face is None or looks(part.forward)==face
        assert torch.equal(m(torch.ones(2)), want)
        if te: te.close()
        assert part.__dict__==before


def test_tracing_and_export():
    "An exported or traced program contains no operator of torchember."
    m,x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval(),torch.ones(1, 2)
    makers = (lambda: torch.export.export(m, (x,)).module().code, lambda: torch.fx.symbolic_trace(m).code, lambda: torch.jit.trace(m, x).code)
    want = [f() for f in makers]
    with from_activation(m): assert [f() for f in makers]==want


def test_a_dropped_model_is_freed():
    import gc
    import weakref
    m = nn.Sequential(nn.Linear(2, 2))
    acts = from_activation(m)
    m(torch.ones(1, 2))
    ref = weakref.ref(m)
    del m
    gc.collect()
    assert ref() is None and len(acts.state_dict)==2
    acts.remove()
