"Several listeners of a model are armed and disarmed in any order. Each gets the same events as alone, and the model is restored."
import threading
import types
from functools import cache

import numpy as np
import pytest
import torch
from compared import ALL
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from torchember import BackwardInputExtension, Monitor, SingleStepQuantity, from_activation, from_activation_grad, torchEmber
from torchember.capture import private_torch
from torchember.capture.events import Listener, WantedTypes
from torchember.capture.forward import KEY, arm, disarm, notify_only, states_of
from torchember.capture.tree import tracks

graphs_bring_gradients = pytest.mark.skipif(not private_torch.hooks_in_graphs, reason='this torch has no hooks in compiled code')


class Block(nn.Module):
    "A block with a keyword argument. With this argument it returns several outputs."
    def __init__(self): super().__init__(); self.l,self.t = nn.Linear(3, 3),nn.Tanh()
    def forward(self, x, *, by=None):
        y = self.t(self.l(x))
        return y if by is None else y*by, {'more': x+y}


class Net(nn.Module):
    "A model that calls its first block twice."
    def __init__(self): super().__init__(); self.blocks,self.head = nn.ModuleList([Block(), Block()]),nn.Linear(3, 2)
    def forward(self, x):
        x,_ = self.blocks[0](x)
        x,_ = self.blocks[0](x, by=x.square())
        x,more = self.blocks[1](x)
        return self.head(x+more['more'])


def model(): torch.manual_seed(0); return Net()
def batch(i): return torch.randn(4, 3, generator=torch.Generator().manual_seed(i))


def run_as(how, m, backend='aot_eager'):
    "Return the model as a function, compiled as `how` says, and the counter of its graphs."
    torch._dynamo.reset()
    count = CompileCounterWithBackend(backend)
    if how=='whole': return torch.compile(m, backend=count, fullgraph=True), count
    if how=='blocks': [b.compile(backend=count, fullgraph=True) for b in m.blocks]
    return m, count


# ---- listeners: embers, activations, monitors, and a simple listener

class Ember:
    def __init__(self, m): self.te = torchEmber(m, ttypes=ALL, on_error='raise')
    def told(self, i):
        self.te.step()
        rows = [{k:v for k,v in r.items() if k not in ('ts', 'step')} for r in self.te.t.lines() if r['step']==self.te.recorder.step-1]
        # sort the rows, because compiled code reports gradients in another order
        return sorted(rows, key=lambda r: [str(r.get(k)) for k in ('module', 'ttype', 'tname', 'call')])
    def go(self): self.te.close()


class Snapshot:
    def __init__(self, make, m): self.acts = make(m, clone=True)
    def told(self, i): return {k: x.tolist() for k,x in self.acts.state_dict.items()}
    def go(self): self.acts.remove()


class Watch:
    def __init__(self, m): self.monitor = Monitor(m, {k: ['InputMean', 'OutputGradSndNorm'] for k in ('blocks.0', 'head')})
    def told(self, i):
        self.monitor.track(i)
        return {p: {n: np.asarray(v).tolist() for n,v in vs.items()} for p,vs in self.monitor.of_step(i).items()}
    def go(self): self.monitor.close()


class Ear(Listener):
    "A listener that keeps all events with their values. `wants`: the kinds of tensors to be reported."
    exclusive = False
    def __init__(self, m, *paths, **wants):
        self.heard,self.depth,self.wants = [],0,WantedTypes(**wants)
        self.tracks = tracks(m)
        self.states = arm(self.tracks, self, {t.id for t in self.tracks if t.path in paths} if paths else None)
    def say(self, st, *what): self.heard.append((st.track.path, *what))
    def values(self, named): return [(n, x.tolist()) for n,x in named]
    def pass_begins(self, st, grad=None):
        self.running += 1; self.depth += 1
        self.say(st, 'begins', torch.is_grad_enabled() if grad is None else grad)
        return True
    def pass_ends(self, st, compiled): self.running -= 1; self.depth -= 1; self.say(st, 'ends')
    def pass_fails(self, st): self.say(st, 'raised')
    def inside(self): return self.depth>0
    def call_begins(self, st, named, compiled=False): self.say(st, 'in', *self.values(named)); return 0, None
    def call_ends(self, st, named, compiled=False): self.say(st, 'out', *self.values(named)); return 0, None
    def call_fails(self, st): self.say(st, 'fails')
    def gradient(self, st, ttype, n, g, call, phase=None, backward=0): self.say(st, ttype, n, g.tolist())
    def told(self, i): got,self.heard = self.heard,[]; return got
    def go(self): disarm(self.tracks, self)


WHO = {'ember': Ember, 'activations': lambda m: Snapshot(from_activation, m), 'their gradients': lambda m: Snapshot(from_activation_grad, m), 'monitor': Watch,
    'everything': Ear, 'outputs': lambda m: Ear(m, 'blocks.0', 'head', inputs=False), 'passes': lambda m: Ear(m, inputs=False, outputs=False)}
gradients = 'their gradients', 'monitor', 'ember'


def step(f, m, i):
    m.zero_grad()
    f(batch(i)).square().sum().backward()
    return [p.grad.tolist() for p in m.parameters()]


@cache
def alone(kind, how):
    "Return the events of each batch for a listener that is the only one on the model."
    m = model()
    f,_ = run_as(how, m)
    who = WHO[kind](m)
    out = [(step(f, m, i), who.told(i))[1] for i in range(6)]
    who.go()
    return out


PAIRS = [(a, b) for a in WHO for b in WHO if (a!='ember' or b!='ember') and not {a, b}<={'everything', 'outputs', 'passes'}]
few = [('ember', 'their gradients'), ('their gradients', 'ember'), ('monitor', 'activations'), ('their gradients', 'their gradients'), ('passes', 'everything')]
# the first two pairs are always tested in one graph; other cases are slow or release tests
also = [pytest.mark.slow, pytest.mark.release]
compiled = [pytest.param(how, *p, marks=also[:(i>1) if how=='whole' else 1+(i>2)]) for how in ('whole', 'blocks') for i,p in enumerate(few)]


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(('how', 'a', 'b'), [*(('eager', a, b) for a,b in PAIRS), *compiled])
@torch._dynamo.config.patch(**{'recompile_limit' if hasattr(torch._dynamo.config, 'recompile_limit') else 'cache_size_limit': 64})
def test_each_listener_gets_the_same_events_as_alone(how, a, b):
    "Two listeners are armed and disarmed in turns. Each pass has complete events, and training is bit-identical."
    if how!='eager' and not private_torch.hooks_in_graphs and {a, b} & {*gradients}: pytest.skip('this torch has no hooks in compiled code')
    want = {k: alone(k, how) for k in (a, b)}
    m,bare = model(),model()
    before = {n: dict(o.__dict__) for n,o in m.named_modules()}
    f,count = run_as(how, m)
    here = {}
    for i,(who,comes) in enumerate([('a', True), ('b', True), ('a', False), ('a', True), ('b', False), ('a', False)]):
        kind = {'a': a, 'b': b}[who]
        if comes: here[who] = kind,WHO[kind](m)
        else: here.pop(who)[1].go()
        assert step(f, m, i)==step(bare, bare, i)
        for kind,w in here.values(): assert w.told(i)==want[kind][i], (kind, i)
    assert count.frame_count<=4*(1 if how=='whole' else 3) # each combination of wanted tensors needs its own graph
    ours = {'_compiled_call_impl', '_is_torch_compile', '_compile_kwargs'}
    for n,o in m.named_modules():
        assert type(o.__dict__) is dict and {k:v for k,v in o.__dict__.items() if k not in ours}=={k:v for k,v in before[n].items() if k not in ours}, n


@pytest.mark.release # slow test, run only before a release
@pytest.mark.slow
@graphs_bring_gradients
@pytest.mark.parametrize('how', ['whole', 'blocks'])
def test_a_graph_depends_on_wanted_tensors_and_not_on_listeners(how):
    m,n = model(),[]
    f,count = run_as(how, m)
    def go(): step(f, m, 0); n.append(count.frame_count)
    te = torchEmber(m, ttypes=ALL)
    go()
    acts = from_activation(m)
    go()
    grads = from_activation_grad(m)
    go()
    ear = Ear(m)
    go()
    acts.remove(); te.close()
    go()
    one = n[0]
    # two tensors have no gradient, so 12 to 14 gradients are caught
    assert n==[one, one, one, one, 2*one] and len(acts.state_dict)==14 and 12<=len(grads.state_dict)<=14
    for on in (False, True, False) if how=='whole' else (): # steps without recording use a graph with fewer operators
        ear.wants.switch(on)
        go()
    assert set(n[5:])<={3*one}
    ear.go(); grads.remove()


def test_bound_forwards_of_many_modules_share_a_graph():
    m = nn.Module()
    m.blocks = nn.ModuleList(Block() for _ in range(9))
    def doubled(self, x): return Block.forward(self, 2*x)
    for b in m.blocks: b.forward = types.MethodType(doubled, b)
    ear = [Ear(m), Ear(m, inputs=False)]
    _,count = run_as('blocks', m)
    for b in m.blocks: b(torch.ones(2, 3))
    assert count.frame_count==1 and [sum(h[1]=='out' for h in e.heard) for e in ear]==[27, 27]
    for e in ear: e.go()
    assert all(b.forward.__func__ is doubled for b in m.blocks)


# ---- arming, exceptions and threads during a pass

@pytest.mark.slow
@pytest.mark.parametrize('how', ['eager', 'whole', 'blocks'])
def test_a_listener_armed_inside_a_pass_gets_the_next_pass_completely(how):
    "A listener may be armed inside a pass. It gets no end of a call without its begin."
    m = model()
    f,_ = run_as(how, m)
    class Brings(Ear):
        def call_ends(self, st, named, compiled=False):
            super().call_ends(st, named)
            if st.track.path=='blocks.0.l' and not late: late.append(Ear(m))
    late = []
    first = Brings(m, inputs=False)
    for i in range(2):
        step(f, m, i)
        told = first.told(i)
        assert told==[h for h in alone('everything', how)[i] if h[1]!='in']
    came = late[0].told(0)
    assert came[-len(alone('everything', how)[1]):]==alone('everything', how)[1] and late[0].depth==late[0].running==0
    begun = [h[0] for h in came if h[1]=='in']
    assert sorted(begun)==sorted(h[0] for h in came if h[1]=='out')
    for w in (first, *late): w.go()
    assert all(type(o.__dict__) is dict for o in m.modules())


@pytest.mark.parametrize('first', [True, False])
def test_an_exception_of_a_listener_is_a_failed_call_to_the_other(first):
    m = model()
    class Raises(Ear):
        def call_ends(self, st, named, compiled=False):
            super().call_ends(st, named)
            if self.heard[-1][0]=='blocks.0.l' and self.angry: raise ZeroDivisionError
    ears = {}
    for n in ('raises', 'hears') if first else ('hears', 'raises'): ears[n] = Raises(m) if n=='raises' else Ear(m)
    ears['raises'].angry = True
    with pytest.raises(ZeroDivisionError): m(batch(0))
    want = [('blocks.0.l', 'out' if first else 'fails'), ('blocks.0', 'fails'), ('', 'fails'), ('', 'raised'), ('', 'ends')]
    assert [h[:2] for h in ears['hears'].told(0)][-len(want):]==want and ears['hears'].depth==ears['raises'].depth==0
    ears['raises'].angry = False
    ears['raises'].told(0)
    step(m, m, 1)
    assert ears['raises'].told(1)==ears['hears'].told(1)==alone('everything', 'eager')[1]
    for e in ears.values(): e.go()


def test_each_thread_has_its_own_passes():
    "Two threads run a model with two listeners. Both listeners get all events of each pass, in the thread of the pass."
    m,n = model(),40
    class Threads(Ear):
        def say(self, st, *what): self.heard.append((threading.get_ident(), st.track.path, *what))
        def inside(self): return threading.get_ident() in self.open
        def pass_begins(self, st, grad=None):
            self.open.add(threading.get_ident())
            self.say(st, 'begins')
            return True
        def pass_ends(self, st, compiled): self.open.discard(threading.get_ident()); self.say(st, 'ends')
        open,running = set(),1
    ears = Threads(m),Threads(m, inputs=False)
    def work():
        with torch.no_grad():
            for _ in range(n): m(batch(0))
    ts = [threading.Thread(target=work) for _ in range(2)]
    for t in ts: t.start()
    for t in ts: t.join()
    for e,silent in zip(ears, ((), ('in',)), strict=True):
        once = [(h[0], 'begins') if h[1]=='begins' else h for h in alone('everything', 'eager')[0] if h[1] not in silent]
        by = {}
        for who,*h in e.heard: by.setdefault(who, []).append(tuple(h))
        assert len(by)==2 and all(got==once*n for got in by.values())
    for e in ears: e.go()


# ---- users set `forward` of an armed module

def test_a_forward_set_while_armed_is_reported_after_the_next_arming():
    "A `forward` that the user sets on an armed module is reported after the next arming, and stays after disarming."
    m = nn.Sequential(nn.Identity(), nn.Identity())
    a = Ear(m)
    inner = m[0].forward
    m[0].forward = w = lambda x: 2*inner(x)
    b = Ear(m)
    assert m(torch.ones(1))==2 and [e.told(0)[1:-1] for e in (a, b)]==[[('', 'in', ('input', [1])), ('0', 'in', ('x', [1])), ('0', 'out', ('output_0', [2])),
        ('1', 'in', ('input', [2])), ('1', 'out', ('output_0', [2])), ('', 'out', ('output_0', [2]))]]*2
    b.go()
    assert m[0].forward is not w
    a.go()
    assert m[0].forward is w and m(torch.ones(1))==2 and a.heard==b.heard==[] and type(vars(m[0])) is dict
    del m[0].forward
    assert inner(torch.ones(1))==1 # the forward from before the user's change still works


def test_names_come_from_each_modules_own_forward():
    class Same(nn.Module):
        def forward(self, x): return x
    m = nn.Sequential(Same(), Same(), Same())
    m[0].forward = lambda p, q=1: p
    m[2].forward = types.MethodType(lambda self, r: r, m[2])
    ear = Ear(m)
    m(torch.ones(1))
    assert [h[2][0] for h in ear.heard if h[1]=='in']==['input', 'p', 'x', 'r']
    ear.go()


# ---- passes that are reported to one listener only

def test_only_one_listener_is_notified():
    m = model()
    a,b = Ear(m, 'head'),Ear(m)
    before = {n: states_of(o) for n,o in m.named_modules()}
    with notify_only(m, a): m(batch(0))
    assert not b.heard and [h[:2] for h in a.told(0)]==[('', 'begins'), ('head', 'in'), ('head', 'out'), ('', 'ends')]
    with pytest.raises(ZeroDivisionError), notify_only(m, b): m(batch(0)); 1/0 # noqa: B018
    assert not a.heard and before=={n: states_of(o) for n,o in m.named_modules()} and KEY in vars(m.blocks[0])
    b.told(0)
    m(batch(0))
    assert len(a.told(0))==4 and b.told(0)==alone('everything', 'eager')[0]
    for e in (a, b): e.go()


def test_a_plan_runs_a_pass_without_other_listeners():
    m = model()
    te,acts,monitor,ear = torchEmber(m),from_activation(m),Monitor(m, {'head': ['InputMean']}),Ear(m)
    assert te.plan(batch(0)).rows>0
    monitor.track(0)
    assert not acts.state_dict and not ear.heard and not monitor.of_step(0) and monitor.passes.predictor.pass_==0 and not te.t.lines()
    for o in (te, monitor): o.close()
    acts.remove(); ear.go()


# ---- gradients

@graphs_bring_gradients
def test_a_compiled_backward_reports_each_gradient_once_to_each_listener():
    from torch._dynamo.compiled_autograd import _enable
    m = model()
    for n in (1, 2):
        torch._dynamo.reset()
        who = [from_activation_grad(m, clone=True) for _ in range(n)]
        m(batch(0)).sum().backward()
        want = [{k: x.clone() for k,x in a.state_dict.items()} for a in who]
        y = m(batch(0)).sum()
        with _enable(torch.compile(backend='aot_eager', fullgraph=True)): y.backward()
        for w,a in zip(want, who, strict=True):
            got = a.state_dict
            assert got.keys()<=w.keys() and len(got)>=9 and all(torch.allclose(w[k], got[k]) for k in got)
            a.remove()


@graphs_bring_gradients
def test_a_second_backward_replaces_the_first_compiled_as_eager():
    for how in ('eager', 'whole'):
        m = model()
        f,_ = run_as(how, m)
        acts = from_activation_grad(m, clone=True)
        y = f(batch(0))
        for k in (1., 3., 2.):
            (y*k).sum().backward(retain_graph=True)
            assert torch.equal(acts.state_dict['output_0'], torch.full((4, 2), k)), (how, k)
        acts.remove()


class Given(SingleStepQuantity):
    def _compute(self, global_step): return self._module.input_grad.abs().sum()
    def backward_extensions(self): return [BackwardInputExtension()]


@pytest.mark.parametrize('listener', ['ember', 'monitor'])
def test_the_gradient_of_an_input_that_the_module_overwrites(listener):
    "A recomputed module overwrites its input, so inputs are reported before the module runs."
    def of(run):
        m = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
        with torch.no_grad(): m[0].weight.copy_(torch.tensor([[1., 0.], [0., -1.]])); m[0].bias.zero_(); m[2].weight.fill_(3.)
        te = torchEmber(m, ttypes=('input_grad',), stats=['l1']) if listener=='ember' else Monitor(m, {'1': [Given]})
        run(m, torch.ones(1, 2, requires_grad=True)).sum().backward()
        te.step() if listener=='ember' else te.track(0)
        got = [r['l1'] for r in te.t.lines() if r['module'].endswith('1(ReLU)')] if listener=='ember' else te.of_step(0)['1']
        te.close()
        return got
    want = of(lambda m, x: m(x))
    # the gradient of the input is [6, 0]; the gradient of the overwritten tensor is [6, 6]
    assert want==([6] if listener=='ember' else {'Given': 6})
    assert of(lambda m, x: checkpoint(m, x, use_reentrant=True))==want


def test_wants_of_several_listeners():
    "Modules with the same wanted tensors share one object `wants`."
    m = model()
    a,b = from_activation(m),from_activation(m, 'head')
    patches = [vars(o)[KEY] for o in m.modules()]
    assert len({id(p.wants) for p in patches})==1 and len(patches[0].wants.parts)==1
    a.remove()
    assert KEY in vars(m) and KEY in vars(m.head) and KEY not in vars(m.blocks[0]) and not vars(m)[KEY].wants.outputs and vars(m.head)[KEY].wants.outputs
    b.remove()
