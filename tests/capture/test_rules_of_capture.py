"Listeners get the events of a model in the right order: with nested modules, several listeners, optimizers and passes."
from types import SimpleNamespace as Some

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchember.capture.backward import hook_gradients
from torchember.capture.events import Listener, always
from torchember.capture.forward import arm, find_exclusive_listener, disarm
from torchember.capture.hidden_attributes import ArmedDict, install, uninstall
from torchember.capture.module_state import KEY, ModuleState, PendingCalls, parameters_and_children
from torchember.capture.optimizer import (OptimizerWatch, evenly_spaced, gradient_scale, is_optimizer, parameters_of, state_tensors,
    sum_version_counters, trained_parameters)
from torchember.capture.optimizer import wrap_closure, innermost_optimizers
from torchember.capture.patch import with_gradient
from torchember.capture.tree import moduleTrack, tracks, tree_dict, unwrap


class Add(nn.Module):
    def __init__(self, n, fails=()): super().__init__(); self.n,self.fails = n,list(fails)
    def forward(self, x, *, more=0):
        if self.fails and self.fails.pop(0): raise ZeroDivisionError
        return x+self.n+more


class Net(nn.Module):
    "A model that calls part `a` twice, and catches exceptions of part `b`."
    def __init__(self, *fails): super().__init__(); self.a,self.b = Add(1),nn.Sequential(Add(10, fails))
    def forward(self, x):
        x = self.a(self.a(x), more=torch.full((1,), 100.))
        try: return self.b(x)
        except ZeroDivisionError: return x


class Spy(Listener):
    "A listener that keeps all events."
    exclusive,wants = True,always(input_grad=True, output_grad=True)
    def __init__(self, records=True): self.heard,self.recording,self.depth = [],records,0
    def pass_begins(self, st, grad=None): self.say(st, 'pass'); self.running += 1; self.depth += 1; return True
    def pass_ends(self, st, compiled): self.say(st, 'over', compiled); self.running -= 1; self.depth -= 1
    def pass_fails(self, st): self.say(st, 'raised')
    def inside(self): return self.depth>0
    def records(self): return self.recording
    def call_begins(self, st, inputs): self.say(st, 'in', *((n, x.item()) for n,x in inputs))
    def call_ends(self, st, outputs): self.say(st, 'out', *((n, x.item()) for n,x in outputs))
    def call_fails(self, st): self.say(st, 'fails')
    def recomputed(self, st, inputs, outputs): self.say(st, 'again', *(n for n,_ in inputs), *(n for n,_ in outputs))
    def failed(self, st, ttype, tname, error): self.say(st, 'lost', ttype, type(error).__name__)
    def say(self, st, *what): self.heard.append((st.track.path, *what))
    def told(self): got,self.heard = self.heard,[]; return got


one = torch.ones(1)
whole = [('', 'pass', ), ('', 'in', ('x', 1)), ('a', 'in', ('x', 1)), ('a', 'out', ('output_0', 2)), ('a', 'in', ('x', 2), ('more', 100)),
    ('a', 'out', ('output_0', 103))]
well = [('b', 'in', ('input', 103)), ('b.0', 'in', ('x', 103)), ('b.0', 'out', ('output_0', 113)), ('b', 'out', ('output_0', 113)),
    ('', 'out', ('output_0', 113)), ('', 'over', False)]
failed = [('b', 'in', ('input', 103)), ('b.0', 'in', ('x', 103)), ('b.0', 'fails'), ('b', 'fails'), ('', 'out', ('output_0', 103)), ('', 'over', False)]


def armed(model, *paths, spy=None):
    spy,ts = spy or Spy(),tracks(model)
    return spy, ts, arm(ts, spy, {t.id for t in ts if t.path in paths} if paths else None)


def test_all_events_of_a_pass():
    "Tested are nested calls, two calls of one module, and caught and uncaught exceptions."
    model = Net(False, True, False, True)
    spy,ts,_ = armed(model)
    for want in (well, failed, well):
        model(one)
        assert spy.told()==whole+want
    with pytest.raises(ZeroDivisionError): model.b[0](one)
    assert spy.told()==[('b.0', 'pass'), ('b.0', 'in', ('x', 1)), ('b.0', 'fails'), ('b.0', 'raised'), ('b.0', 'over', False)] and spy.running==0
    disarm(ts, spy)
    model.a(one)
    assert spy.heard==[]


def test_events_of_chosen_modules():
    "If the listener is switched off, only the begin and the end of a pass are reported."
    model = Net()
    def some(paths, **more):
        spy,ts,states = armed(model, *paths)
        for k,v in more.items(): setattr(spy, k, v)
        model(one); model.b(one)
        disarm(ts, spy)
        return [s.track.path for s in states if s.watched], [h[:2] for h in spy.told()]
    root,part = [('', 'pass'), ('', 'over')],[('b', 'pass'), ('b', 'over')]
    # `b` is not watched, so its own call begins no pass
    assert some(['a'])==(['a'], [('', 'pass'), *[('a', 'in'), ('a', 'out')]*2, ('', 'over')])
    assert some(['b'])==(['b'], [('', 'pass'), ('b', 'in'), ('b', 'out'), ('', 'over'), ('b', 'pass'), ('b', 'in'), ('b', 'out'), ('b', 'over')])
    assert some(['', 'b'], on=False)==(['', 'b'], root+part) and some(['', 'b'], recording=False)==(['', 'b'], root+part)
    # another thread is in a pass of this listener
    assert [h[1] for h in some(['b'], running=1)[1]]==['pass', 'in', 'out', 'over']*2
    assert some(['b'], running=1, on=False)[1]==root
    assert some(['b'], pass_begins=lambda st: False)[1]==[('b', 'in'), ('b', 'out')]*2 # the end of a pass is reported only if its begin was accepted


def test_an_attribute_of_the_root_is_not_replaced():
    model = Net()
    model.mine = 1
    spy,ts = Spy(),tracks(model)
    arm(ts, spy, None, {'mine': 2, 'new': 3})
    assert (model.mine, model.new, hasattr(model.a, 'new'))==(1, 3, False)
    for m in (model, model.b, nn.Sequential(nn.Identity(), model.b)): assert find_exclusive_listener(m) is spy
    assert find_exclusive_listener(nn.Identity()) is None
    disarm(ts, Spy()) # a listener that was never armed changes nothing
    assert find_exclusive_listener(model) is spy
    disarm(ts, spy)
    assert find_exclusive_listener(model) is None and model.mine==1 and not hasattr(model, 'new') and all(KEY not in m.__dict__ for m in model.modules())


def test_arming_that_fails_leaves_nothing():
    class Bad(nn.Module):
        forward = property(lambda self: 1/0)
    model = nn.Sequential(nn.Identity(), Bad())
    before = [dict(m.__dict__) for m in model.modules()]
    with pytest.raises(ZeroDivisionError): armed(model)
    assert [m.__dict__ for m in model.modules()]==before and all(type(m.__dict__) is dict for m in model.modules())


def test_a_recomputation_is_not_a_call():
    "Recomputed tensors are reported only for their gradients, in recorded steps and for watched modules."
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
    x = torch.ones(1, 1, requires_grad=True)
    def told(reentrant=True, **more):
        spy,ts,_ = armed(model, '0', '1')
        y = checkpoint(model, x, use_reentrant=reentrant)
        for k,v in more.items(): setattr(spy, k, v)
        spy.told()
        y.sum().backward()
        disarm(ts, spy)
        return spy.told()
    again = [(p, 'again', n) for p in '01' for n in ('input', 'output_0')]
    # a checkpoint without reentrant stops as soon as all needed tensors are recomputed
    assert told()==again and told(False)==again[:3]
    assert told(on=False)==[]


def test_arguments_that_cannot_be_searched_are_reported_and_skipped():
    class Odd(dict):
        def items(self): raise KeyError('x')
    model = nn.Identity()
    spy,ts,_ = armed(model)
    assert isinstance(model(Odd()), Odd) and spy.told()==[('', 'pass'), ('', 'lost', 'input', 'KeyError'), ('', 'in'), ('', 'lost', 'output', 'KeyError'),
        ('', 'out'), ('', 'over', False)]
    disarm(ts, spy)


def test_the_last_call_gets_the_first_gradient():
    "Gradients arrive in reverse order of the calls. The order starts again with each backward and each new call."
    d = PendingCalls()
    for c in range(3): d.expect(c, 'eval' if c else None)
    assert [d.next_call() for _ in range(4)]==[(2, 'eval', 0), (1, 'eval', 0), (0, None, 0), (2, 'eval', 1)]
    assert [d.next_call() for _ in range(3)]==[(1, 'eval', 1), (0, None, 1), (2, 'eval', 2)]
    d = PendingCalls()
    d.expect(0, None); d.next_call(); d.expect(5, None)
    assert [d.next_call() for _ in range(2)]==[(5, None, 0), (5, None, 1)]
    d = PendingCalls()
    for c in (0, 1): d.expect(c, None)
    d.next_call(); d.expect(2, None) # a call happens in the middle of a backward
    assert [d.next_call() for _ in range(3)]==[(2, None, 0), (0, None, 0), (1, None, 1)]


class Hears(Listener):
    "A listener that keeps gradients and passes."
    wants = always(input_grad=True, output_grad=True)
    def __init__(self): self.heard = []
    def gradient(self, st, *what): self.heard.append(what)
    def pass_begins(self, st, grad=None): self.heard.append(('begins', grad)); return self.on
    def pass_ends(self, st, compiled): self.heard.append(('ends', compiled))
    def pass_fails(self, st): self.heard.append(('fails',))


def test_pending_gradients_are_kept_for_each_tensor_and_step():
    who = Hears()
    st = ModuleState(tracks(nn.Identity())[0], who)
    st.expect('output_grad', ['x', 'y'], (0, None)); st.expect('output_grad', ['x'], (1, 'eval')); st.expect('input_grad', ['x'], (7, None))
    st.expect('input_grad', ['x'], None) # a call whose tensors get no gradient
    for t,n in (('output_grad', 'x'), ('output_grad', 'x'), ('output_grad', 'y'), ('input_grad', 'x')): st.grads_arrived(t, [(n, 'g')])
    assert who.heard==[('output_grad', 'x', 'g', 1, 'eval', 0), ('output_grad', 'x', 'g', 0, None, 0), ('output_grad', 'y', 'g', 0, None, 0),
        ('input_grad', 'x', 'g', 7, None, 0)]
    who.heard.clear()
    who.step = 1
    st.expect('output_grad', ['x'], (3, None))
    st.grads_arrived('output_grad', [('x', 'g')])
    assert st.pending.calls.keys()=={('output_grad', 'x')} and who.heard==[('output_grad', 'x', 'g', 3, None, 0)]
    who.heard.clear()
    st.calls = 2 # after the recomputation of an eager pass, only the number of its calls is known
    for _ in range(3): st.grads_arrived('output_grad', [('z', 'g')])
    assert [h[3:] for h in who.heard]==[(1, None, 0), (0, None, 0), (1, None, 1)]


def test_gradients_stay_pending_for_the_number_of_steps_in_lasting():
    "Calls wait for their gradients for `lasting` steps, in case a step is joined to an earlier step."
    who = Hears()
    who.lasting = 2
    st = ModuleState(tracks(nn.Identity())[0], who)
    def waiting(step, call):
        who.step = step
        st.expect('output_grad', ['x'], (call, None))
        return [c[0] for c in st.pending.calls['output_grad', 'x'].waiting]
    assert [waiting(i, i) for i in range(4)]==[[0], [0, 1], [0, 1, 2], [1, 2, 3]] and waiting(2, 9)==[1, 2, 9] and waiting(7, 8)==[8]


def test_the_next_compiled_pass_ends_one_that_raised():
    who = Hears()
    st = ModuleState(tracks(nn.Identity())[0], who)
    st.ended()
    st.began(True); st.began(); st.ended(); st.ended()
    assert who.heard==[('begins', True), ('fails',), ('ends', True), ('begins', False), ('ends', True)]
    who.on,who.heard = False,[]
    st.began(); st.ended()
    assert who.heard==[('begins', False)] and not st.passes.begun


def test_installed_attributes_that_cover_each_other():
    "Attributes are uninstalled in any order. Values that the user set in the meantime stay."
    class Thing: pass
    t = Thing()
    t.a,t.own = 1,0
    first,second = {'a': 2, 'b': 2},{'c': 3}
    install(t, first); install(t, second)
    d = vars(t)
    assert isinstance(d, ArmedDict) and (t.a, t.b, t.c, d.unarmed())==(2, 2, 3, {'a': 1, 'own': 0})
    d.update({'a': 1, 'own': 5, 'new': 6}) # the user sets the attributes of the object itself, and a new one
    assert (t.a, t.own, t.new)==(2, 5, 6)
    uninstall(t, {'a': 4}); uninstall(t, second) # the first dict was never installed, the second one was
    assert (t.a, t.b)==(2, 2) and isinstance(vars(t), ArmedDict) and not hasattr(t, 'c')
    t.b = 9
    uninstall(t, first)
    assert vars(t)=={'a': 1, 'own': 5, 'new': 6, 'b': 9} and type(vars(t)) is dict
    uninstall(t, first) # uninstalling a second time changes nothing
    install(t, first)
    vars(t).clear()
    assert (t.a, t.b)==(2, 2) and vars(t).unarmed()=={'a': 1, 'b': 9}


def test_parts_of_a_module():
    m = nn.Linear(1, 1)
    m.add_module('c', nn.Tanh())
    was = parameters_and_children(m)
    assert was==('weight', 'bias', id(m.c)) and parameters_and_children(m)==was
    m.c = nn.Tanh()
    assert parameters_and_children(m)!=was


def test_hooks_are_registered_on_tensors_with_a_gradient():
    x,y,z = (torch.ones(1, requires_grad=r) for r in (True, False, True))
    heard,w = [],x*2
    def tell(n, g): heard.append((n, g.item()))
    handles = hook_gradients([('x', x), ('y', y), ('w', w)], tell, 'a')
    assert len(handles)==1 and hook_gradients([('w', w)], tell, 'a', True)==[]
    # the same tensor under another name, and for another module
    hook_gradients([('v', w)], tell, 'a', True); hook_gradients([('w', w)], tell, 'b', True)
    (w*3+z).sum().backward()
    assert sorted(heard)==[('v', 3), ('w', 3), ('w', 3), ('x', 6)]
    heard.clear()
    w = x*2
    for _ in range(2): hook_gradients([('w', w)], tell, 'a') # two calls with the same tensor
    w.sum().backward()
    assert heard.count(('w', 1))==2
    with torch.no_grad(): assert hook_gradients([('z', z)], tell)==[] and with_gradient([('z', z)], True)==[]
    assert not z._backward_hooks and with_gradient([('z', z), ('y', y)], False)==[]


# ---- the tree of modules

def test_names_of_modules_in_modules():
    "Each module is listed once under its first path, as in `named_modules`. Its other paths are aliases."
    shared = nn.Sequential(nn.Tanh())
    model = nn.ModuleDict({'x': nn.Sequential(shared, nn.Linear(1, 1)), 'y': shared, 'z': nn.Sequential(nn.Identity(), shared)})
    model.register_module('none', None)
    ts = tracks(model)
    assert [(t.path, t.module) for t in ts]==list(model.named_modules())
    by = {t.path: t for t in ts}
    assert by['x.0'].aliases==['y', 'z.1'] and not any(t.aliases for p,t in by.items() if p!='x.0')
    for p,t in by.items():
        assert (t.root_module, t.base_module)==(p=='', not list(t.module.children())) and t.id==id(t.module)
        assert t.parent is (by[p.rpartition('.')[0]] if p else None) and (not p or t in t.parent.children)
        if p: assert (t.name, t.short)==(f'{t.parent.name}.{t.short}', f"{p.rpartition('.')[2]}({type(t.module).__name__})")
    assert ts[0].name=='model(ModuleDict)'
    assert [c.path for c in ts[0].children]==['x', 'z'] and [c.path for c in by['x'].children]==['x.0', 'x.1']
    x = tree_dict(by['x'])
    assert x=={'name': by['x'].name, 'short': 'x(Sequential)', 'path': 'x', 'children': [
        {'name': by['x.0'].name, 'short': '0(Sequential)', 'path': 'x.0', 'aliases': ['y', 'z.1'], 'children': [
            {'name': by['x.0.0'].name, 'short': '0(Tanh)', 'path': 'x.0.0'}]},
        {'name': by['x.1'].name, 'short': '1(Linear)', 'path': 'x.1'}]}
    assert x['children'][0]['aliases'] is not by['x.0'].aliases
    t = moduleTrack(shared)
    t.input_dt,t.output_dt = {'x': (1, 2)},{'y': (3,)}
    assert (t.name, t.short)==('Sequential', 'Sequential') and repr(t).split('\n\t')[1:]==['[Inputs]x [1, 2]', '[Outputs]y [3]']


def test_a_wrapper_in_a_wrapper():
    class OptimizedModule(nn.Module): # a wrapper class of torch.compile, recognized by its name
        def __init__(self, m): super().__init__(); self._orig_mod = m
    class Mine(nn.Module):
        def __init__(self, m): super().__init__(); self.module = m
    net = Mine(OptimizedModule(nn.Tanh()))
    assert unwrap(OptimizedModule(OptimizedModule(net))) is net and [t.path for t in tracks(OptimizedModule(net))]==['', 'module']
    assert tracks(net)[1].module is net.module._orig_mod


# ---- two listeners of one module

class Ear(Listener):
    "A listener of passes and calls. `wants`: the kinds of tensors to be reported."
    running = 1
    def __init__(self, name, heard, **wants): self.name,self.heard,self.wants = name,heard,always(**wants)
    def pass_begins(self, st, grad=None): self.say('begins', grad); return True
    def pass_ends(self, st, compiled): self.say('ends', compiled)
    def pass_fails(self, st): self.say('raised')
    def call_begins(self, st, named, compiled=False): self.say('in', st.track.path, *((n, x.item()) for n,x in named))
    def call_ends(self, st, named, compiled=False): self.say('out', st.track.path, *((n, x.item()) for n,x in named))
    def call_fails(self, st): self.say('fails', st.track.path)
    def gradient(self, st, ttype, n, g, call, phase, backward): self.say(ttype, st.track.path, n, g)
    def say(self, *what): self.heard.append((self.name, *what))


def test_each_listener_gets_the_wanted_events():
    heard,model = [],Net(False, True, False)
    before = [dict(m.__dict__) for m in model.modules()]
    root,a,b,last = ts = tracks(model)
    def told(): got = heard[:]; heard.clear(); return got
    p,q = Ear('p', heard, inputs=False),Ear('q', heard, outputs=False)
    def ids(*ts): return {t.id for t in ts}
    arm(ts, p, ids(a, last)); arm(tracks(model.b), q, ids(last))
    begins,of_a = ('p', 'begins', None),[('p', 'out', 'a', ('output_0', v)) for v in (2, 103)]
    for raises in (False, True, False):
        model(one)
        end = [('q', 'fails', '0'), ('p', 'fails', 'b.0'), ('q', 'raised')] if raises else [('p', 'out', 'b.0', ('output_0', 113))]
        assert told()==[begins, *of_a, ('q', 'begins', None), ('q', 'in', '0', ('x', 103)), *end, ('q', 'ends', False), ('p', 'ends', False)]
    p.on = False
    model(one)
    assert [h[:2] for h in told()]==[('p', 'begins'), ('q', 'begins'), ('q', 'in'), ('q', 'ends'), ('p', 'ends')]
    p.on = True
    disarm(ts, q)
    model(one)
    assert {h[0] for h in told()}=={'p'} and KEY not in vars(model.b) and KEY in vars(model.b[0])
    disarm(ts, p)
    model(one)
    assert told()==[] and [m.__dict__ for m in model.modules()]==before


def test_gradients_go_to_listeners_that_want_their_type():
    heard,model = [],nn.Sequential(nn.Tanh())
    _,t = tracks(model)
    who = {n: Ear(n, heard, output_grad='g' in n, input_grad='i' in n, inputs=False) for n in ('g', 'i', 'gi', '-')}
    for w in who.values(): arm([t], w)
    patch = vars(model[0])[KEY]
    assert (patch.passes, patch.wants.inputs, patch.wants.outputs, patch.wants.output_grad, patch.wants.input_grad)==(False, True, True, True, True)
    patch.grads_arrived('output_grad', [('', 1), ('y', 2)]); patch.grads_arrived('input_grad', [('x', 3)])
    of_outputs = [(w, 'output_grad', '0', *ng) for w in ('g', 'gi') for ng in (('output_0', 1), ('y', 2))]
    assert heard==of_outputs+[(w, 'input_grad', '0', 'x', 3) for w in ('i', 'gi')]
    disarm([t], who.pop('g'))
    who['i'].on = False
    heard.clear()
    patch.grads_arrived('output_grad', [('x', 1)]); patch.grads_arrived('input_grad', [('x', 1)])
    assert [h[0] for h in heard]==['gi']*2
    for w in [*who.values()]: disarm([t], w)
    assert KEY not in vars(model[0])


# ---- watching the steps of optimizers

class Steps:
    def __init__(self): self.heard = []
    def step_begins(self, o): self.heard.append(('begins', o))
    def gradients_ready(self, o, scale, unchanged): self.heard.append(('ready', o, None if scale is None else float(scale), unchanged))
    def step_ends(self, o): self.heard.append(('ends', o))
    def step_skipped(self, o): self.heard.append(('skipped', o))
    def told(self): got,self.heard = self.heard,[]; return got


def linear(**kw): m = nn.Linear(1, 1); m(one).backward(); return m, torch.optim.SGD(m.parameters(), .1, **kw)


def test_steps_of_two_optimizers_are_distinguished():
    "With a closure, a step inside of another optimizer's closure, an exception, and after detaching."
    (_,o),(_,p),spy = linear(),linear(),Steps()
    w = OptimizerWatch([o, p], None, spy)
    w.attach()
    def inner(): assert w.busy; p.step(); return one
    for _ in range(2):
        o.step()
        assert spy.told()==[('ready', o, None, True), ('ends', o)] and not w.busy
        o.step(inner)
        assert spy.told()==[('begins', o), ('ready', p, None, True), ('ends', p), ('ready', o, None, False), ('ends', o)]
        with pytest.raises(ZeroDivisionError): o.step(lambda: 1/0)
        spy.told()
    assert w.stepped=={id(o), id(p)}
    w.detach()
    o.step(); p.step(lambda: one)
    assert spy.told()==[] and not w.busy and not w.handles
    w.attach()
    p.step()
    assert spy.told()==[('ready', p, None, True), ('ends', p)]
    w.detach()
    class Above(torch.optim.SGD):
        # torch runs its step hooks for this method and for the parent's method
        def step(self, closure=None): return super().step(closure)
    o = Above(p.param_groups[0]['params'], .1)
    w = OptimizerWatch([o], None, spy)
    w.attach()
    for _ in range(2):
        o.step()
        assert spy.told()==[('ready', o, None, True), ('ends', o)]
    w.detach()


class Plain:
    "An optimizer class that does not support torch's step hooks."
    def __init__(self, params): self.param_groups,self.state,self.calls = [{'params': list(params)}],{},[]
    def step(self, closure=None, *, again=False):
        self.calls.append((closure and closure(), again))
        return 'stepped'


@pytest.mark.parametrize('kw', [False, True])
def test_an_optimizer_without_hooks(kw):
    "Arguments and results are passed through. The closure and the step are reported, and the method `step` is restored."
    spy,o = Steps(),Plain(nn.Linear(1, 1).parameters())
    w = OptimizerWatch([o], None, spy)
    w.attach()
    assert o.step()=='stepped' and spy.told()==[('ready', o, None, True), ('ends', o)]
    assert (o.step(closure=lambda: 5, again=True) if kw else o.step(lambda: 5, again=True))=='stepped'
    assert spy.told()==[('begins', o), ('ready', o, None, False), ('ends', o)] and o.calls==[(None, False), (5, True)]
    with pytest.raises(ZeroDivisionError): o.step(lambda: 1/0)
    assert not w.busy
    spy.told()
    step = o.step
    w.detach()
    assert 'step' not in vars(o) and step()=='stepped' and spy.told()==[]


def test_a_scaler_skips_one_of_two_optimizers():
    "The optimizer is passed by position or keyword. `gradient_scale` is None for unscaled gradients or a disabled scaler."
    (m,o),(n,p),spy = linear(),linear(),Steps()
    s = torch.amp.GradScaler('cpu', init_scale=8.)
    w = OptimizerWatch([o, p], s, spy)
    w.attach()
    for bad,kw in ((None, False), (n, False), (n, True), (None, True)):
        for k in (m, n): k.zero_grad(); s.scale(k(one).sum()*(float('inf') if k is bad else 1)).backward()
        assert gradient_scale(w.scaler, o)==s.get_scale()
        for k in (o, p): s.step(optimizer=k) if kw else s.step(k)
        assert spy.told()==[('ready', o, None, True), ('ends', o), ('ready', p, None, True), ('skipped', p) if bad else ('ends', p)]
        assert gradient_scale(w.scaler, o) is None # the gradients are already unscaled
        s.update()
    o.grad_scale = torch.tensor(3.)
    assert gradient_scale(w.scaler, o)==3 and gradient_scale(w.scaler, p)==s.get_scale()
    s._enabled = False
    assert gradient_scale(w.scaler, o) is None
    w.detach()
    assert 'step' not in vars(s)
    o.found_inf = torch.tensor(1.) # a fused optimizer notes in `found_inf` that it skipped the step
    w.note_end(o); w.note_end(p)
    o.found_inf = torch.tensor(0.)
    w.note_end(o)
    assert spy.told()==[('skipped', o), ('ends', p), ('ends', o)]


class Wrapper:
    "An optimizer that wraps other optimizers, and steps all of them."
    def __init__(self, *inner): self.inner,self.state = inner,{}
    param_groups = property(lambda self: [g for o in self.inner for g in o.param_groups])
    def step(self, closure=None):
        for o in self.inner[:closure]: o.step()


def test_a_wrapper_of_two_optimizers_and_a_third_optimizer():
    (_,o),(_,p),(_,q),spy = linear(),linear(),linear(),Steps()
    outer = Wrapper(o, p)
    outer.other = q # an optimizer for other parameters, which `outer` does not step
    assert innermost_optimizers(outer)==[o, p] and innermost_optimizers(q)==[q]
    w = OptimizerWatch([outer, q], None, spy)
    assert w.optimizers==[o, p, q] and OptimizerWatch([o, outer], None, spy).optimizers==[o, p]
    w.attach()
    for _ in range(2):
        outer.step()
        assert spy.told()==[('begins', o), ('begins', p), ('ready', o, None, True), ('ready', p, None, True), ('ends', o), ('ends', p)]
        q.step()
        assert spy.told()==[('ready', q, None, True), ('ends', q)]
    outer.step(1) # the argument 1 is a number and not a closure
    assert spy.told()==[('begins', o), ('begins', p), ('ready', o, None, True), ('ends', o)]
    w.detach()
    assert 'step' not in vars(outer)


def test_parameters_and_states_of_an_optimizer():
    m,o = linear(momentum=.9)
    n = nn.Linear(1, 1)
    o.add_param_group({'params': [n.weight]})
    o.step()
    p = torch.optim.Adam([n.weight, n.bias])
    n(one).backward(); p.step()
    assert [id(x) for x in parameters_of(o)]==[id(x) for x in (m.weight, m.bias, n.weight)]
    assert [id(x) for x in trained_parameters([o, p])]==[id(x) for x in (m.weight, m.bias, n.weight, n.bias)]
    assert state_tensors(o, m.weight).keys()=={'momentum_buffer'} and state_tensors(p, n.weight).keys()=={'exp_avg', 'exp_avg_sq'}
    assert state_tensors(o, n.bias)=={}
    assert is_optimizer(o) and is_optimizer(Plain([])) and not is_optimizer(m) and not is_optimizer(Some(param_groups=[], state={}, step=1))
    assert [evenly_spaced(list(range(k))) for k in (3, 16, 17, 33)]==[list(range(3)), list(range(16)), list(range(16)), list(range(0, 32, 2))]
    before = sum_version_counters(m.parameters())
    with torch.no_grad(): m.bias.add_(1)
    with torch.inference_mode(): z = torch.ones(1)
    assert sum_version_counters([m.weight, m.bias, z])==before+1


def test_the_closure_is_found_among_the_arguments():
    told = []
    def f(): told.append('f'); return 4
    def g(): told.append('g')
    def tell(): told.append('told')
    assert [wrap_closure(a, k, tell) for a,k in ((('o',), {}), ((f,), {}), ((f, 1), {}), (('o', 1), {'loss': f}))]==[None]*4
    args,kw = wrap_closure(('o', 1, f, g), {'x': 2}, tell)
    assert (args[:2], args[3], kw)==(('o', 1), g, {'x': 2}) and args[2]()==4 and told==['f', 'told']
    args,kw = wrap_closure(('o', g), {'closure': f, 'x': 2}, tell)
    assert args==('o', g) and kw['x']==2 and kw['closure']()==4 and told==['f', 'told']*2
