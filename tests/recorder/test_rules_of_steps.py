"Each part of a recorder keeps the state of different steps, modules, optimizers, passes and parameters apart."
import random
import threading
from types import SimpleNamespace as Some

import numpy as np
import pytest
import torch
from looped import heard
from torch import nn

from torchember.capture.events import Listener
from torchember.capture.module_state import ModuleState
from torchember.capture.tree import tracks
from torchember.recorder.buffers import Buffers
from torchember.recorder.calls import Calls
from torchember.recorder.gradients import Gradients
from torchember.recorder.row_writer import RowWriter
from torchember.recorder.notices import Notices
from torchember.recorder.optimizer import Updates
from torchember.recorder.step_buffer import Generators, StepBuffer
from torchember.recorder.parameters import ParameterFacts, Parameters, ZeroGradHint, below, is_new, with_changed_children
from torchember.recorder.process import release_run, open_recorders
from torchember.recorder.row import ComputedRow, RowKey, one_row
from torchember.recorder.steps import Decision, SteppedOptimizers, StepState, Steps, stall_reason

BOTH = ('weight', 'weight_grad')


def copied(o): return {k: v.copy() if hasattr(v, 'copy') else v for k,v in vars(o).items()}


# ---- the state of steps

def busy(manual=True):
    "Return `Steps` with an open step that has training passes, an evaluation, a failure and one optimizer step."
    s = Steps(5, manual, {1, 2})
    for i in range(3): s.begin('', None, i)
    s.begin('head', 'eval', 9)
    s.state.note_content(training=True, eval_grads=True, measured=True)
    s.state.failed = True
    s.optimizers.note_step(1)
    return s


@pytest.mark.parametrize('manual', [False, True])
def test_a_step_that_is_over_leaves_nothing_but_what_was_known_before(manual):
    s,fresh = busy(manual),Steps(6, manual, {1, 2})
    passes = s.pass_
    for _ in range(2):
        s.close()
        want = copied(fresh) | dict(closed=s.number-1, pass_=passes+1, trained=True, evaluated=5, number=s.number, state=vars(StepState()),
            optimizers={**vars(fresh.optimizers), 'waits': {1: 0}})
        got = vars(s) | {'optimizers': vars(s.optimizers), 'state': vars(s.state)}
        assert {**got, 'phases': 0}=={**want, 'phases': 0}
        s.begin('', None, 1)
        passes = s.pass_
    s.close()
    assert (s.number, s.closed)==(8, 7)
    s.close()
    assert not s.trained


def test_an_evaluation_that_is_over_leaves_the_step_open_that_it_came_before():
    s = Steps(5, True)
    s.begin('', None, 1)
    s.close()
    before = copied(s)
    s.begin('head', 'eval', 7)
    s.state.failed = s.state.eval_grads = True
    assert s.is_evaluation and (s.shown, s.number)==(5, 6)
    s.end_evaluation()
    assert vars(s) | {'state': vars(s.state)}==before | dict(pass_=before['pass_']+2, evaluated=5, state=vars(StepState()))
    s.begin('', None, 8)
    assert not s.is_evaluation and s.shown==6 and s.state.weights==8 and s.state.changes==0


def test_what_makes_of_an_evaluation_a_step():
    "A pass in eval mode is a step of its own if it trains, is measured, ends with an optimizer step, or if nothing trained before."
    def of(trained=True, **more):
        s = Steps(1, True)
        s.trained = trained
        s.begin('', 'eval')
        s.phases.trains_in_eval = more.pop('trains_in_eval', False)
        for k,v in more.items(): setattr(s.state if k in vars(s.state) else s, k, v)
        return s
    def stepped(optimizer):
        optimizers = SteppedOptimizers()
        optimizers.note_step(optimizer)
        return optimizers
    assert of().is_evaluation and not of(False).is_evaluation and not of(manual=False).is_evaluation
    assert not of(measured=True).is_evaluation and not of(optimizers=stepped(1)).is_evaluation
    assert of(False, trains_in_eval=True).is_evaluation and not of(False, trains_in_eval=True, eval_grads=True).is_evaluation
    s = of()
    s.begin('', None)
    assert not s.is_evaluation and not Steps(1, True).is_evaluation
    told = [(phase, grad) for phase in (None, 'eval') for grad in (False, True) if of().ends_evaluation(phase, grad)]
    assert told==[(None, False), (None, True)] and of(False, trains_in_eval=True).ends_evaluation('eval', True) and not of(False).ends_evaluation(None, True)


def test_what_begins_a_pass_and_what_ends_a_step():
    "A pass begins with the root, its first module, a module around it, or a new phase. A repeated call after a weight change ends a step."
    s = Steps()
    s.begin('net.enc', None, 1)
    s.begin('head', None, 1)
    calls = [(p, phase, j) for p in ('', 'net.enc', 'net', 'net.en', 'head', 'ne') for phase in (None, 'eval') for j in (False, True)]
    starts = [c for c in calls if s.state.begins_pass(*c)]
    assert starts==[('', None, False), ('', 'eval', False), ('', 'eval', True), ('net.enc', None, False), ('net.enc', 'eval', False), ('net.enc', 'eval', True),
        ('net', None, False), ('net', 'eval', False), ('net', 'eval', True), *((p, 'eval', j) for p in ('net.en', 'head', 'ne') for j in (False, True))]
    ends = [(p, w) for p in ('head', 'other') for w in (1, 2) if s.is_over_before(p, None, w)]
    assert ends==[('head', 2)] and s.is_over_before('', None, 1) and not s.is_over_before('', None, 1, True)
    s.manual = True
    assert not s.is_over_before('', None, 1) and not s.is_over_before('head', None, 2)
    assert (s.state.leader, s.phase, s.state.seen, s.passes)==('net.enc', None, {'net.enc', 'head'}, {None: 1})
    assert s.begin('net.enc', None, 1) and not s.begin('head', None, 1) and s.begin('head', 'eval', 1)
    assert (s.state.leader, s.phase, s.pass_, s.passes, s.micro)==('head', 'eval', 3, {None: 2, 'eval': 1}, 0)
    # the weights differ in an evaluation (for example averaged weights); this is no training change
    s.begin('', 'eval', 7)
    assert (s.state.weights, s.state.changes)==(1, 0)
    s.begin('', None, 1); s.begin('', None, 2)
    assert (s.state.weights, s.state.changes)==(2, 1)


@pytest.mark.parametrize('manual', [False, True])
def test_a_pass_that_is_taken_back(manual):
    s = Steps(0, manual)
    s.begin('', 'eval')
    for i in range(2): s.begin('', None, i)
    s.state.failed = True
    assert s.remove_failed()==2 and s.passes=={'eval': 1, None: 1} and (s.state.leader, s.phase, s.state.failed, s.opened)==(None, None, False, manual)
    assert s.begin('head', None) and s.passes[None]==2 and s.micro==1


def test_which_step_a_number_is_noted_for():
    "A logged number belongs to the open step if it has a training pass. Otherwise it belongs to the last finished step."
    s = Steps(3, True)
    assert s.noted==3
    s.begin('', None)
    assert s.noted==3
    s.close()
    assert s.noted==3
    s.begin('', 'eval')
    assert s.noted==3
    s.begin('', None)
    assert s.noted==4
    s.close()
    s.trained = False # suppose that the finished step was only an evaluation
    s.begin('', 'eval')
    assert s.noted==5
    s = Steps(3)
    s.begin('', None); s.close(); s.begin('', 'eval')
    assert s.noted==4 # without te.step(), each pass is a step


def test_passes_that_were_taken_for_steps_are_counted_in_the_open_one():
    for closed,number,n,want in ((4, 5, 2, (3, 2)), (1, 2, 2, (0, None)), (2, 3, 2, (1, 0)), (None, 2, 2, (0, None))):
        s = Steps(number)
        s.closed = closed
        s.begin('', None, 1)
        s.merge_previous_steps(n)
        assert (s.number, s.closed, s.micro, s.passes)==(*want, n, {None: n+1})


def test_why_a_step_seems_never_to_be_over():
    def of(awaited=(1,), stepped=(), changes=0, passes=0, turns=()):
        s = Steps(0, True, awaited)
        s.state.changes,s.state.training_passes = changes,passes
        s.optimizers.stepped |= set(stepped); s.optimizers.counts.update(dict(turns))
        return stall_reason(s, 10, 5)
    assert of() is None and of(changes=1) is None and of(passes=9) is None
    assert of(passes=10)=='10 training passes have run' and of(changes=2)=='the weights change nevertheless'
    assert of((1, 2), changes=2) is None # with two optimizers, the other optimizer may have changed the weights
    assert of((1, 2), [1], turns={1: 4}) is None and of((1, 2), [1], turns={1: 5})=='another optimizer has stepped 5 times'
    assert of((1, 2), [1, 2], passes=10, turns={1: 9, 2: 1}) is None and of((), changes=9, passes=99) is None
    assert of((1, 2), changes=11) is None and of((1, 2), changes=12)=='the weights change nevertheless'
    assert of((1, 2), [1], 12, turns={1: 1}) is None and of((1, 2), [1], 13, turns={1: 1})=='the weights change nevertheless'
    assert of((1, 2), [1], 2, 10, {1: 5, 2: 4})=='another optimizer has stepped 5 times' and of((1, 2), [1], 2, 10, {1: 4})=='10 training passes have run'


def test_a_step_waits_longer_for_an_optimizer_that_always_steps_rarely():
    s = Steps(0, True, (1, 2))
    def turns(first, second):
        "Step one optimizer `first` times, the other `second` times. Return the steps after which the open step seems endless, or None."
        for o in [1]*first+[2]*second:
            if s.optimizers.note_step(o): s.close()
            if stall_reason(s): return s.optimizers.max_count
    # the limit is 20 steps of one optimizer if the other one never stepped
    assert turns(19, 1) is None and turns(19, 1) is None
    assert turns(56, 1) is None and turns(200, 0)==168 # the limit is three times the longest wait so far
    s = Steps(0, True, (1, 2))
    assert turns(1, 1) is None and turns(11, 1) is None and turns(40, 0)==33
    s = Steps(0, True, (1, 2))
    assert turns(15, 15)==12
    s = Steps(0, True, (1, 2))
    assert turns(4, 4) is None and turns(4, 0)==1 # each optimizer steps four times in a row while the other one waits
    s = Steps(0, True, (1, 2))
    assert turns(20, 0)==20


def test_a_schedule_that_fails_and_one_that_wants_nothing():
    "The budget is asked only about selected steps, once per step. With on_error='raise', an exception of the schedule is raised."
    asked = []
    class Budget:
        def allows(self, pending): asked.append(pending); return True
    d = Decision(lambda s: asked.append(f'step {s}') or s>0, Budget())
    assert [d(s) for s in (0, 0, 1, 1, 0)]==[False, False, True, True, False] and asked==['step 0', 'step 1', 0., 'step 0'] and not d.denied
    with pytest.raises(ZeroDivisionError): Decision(lambda s: 1/s, None, Notices('raise'))(0)


# ---- the log of calls in each thread

def test_each_thread_has_a_log_and_a_stack_of_its_own():
    "A new log begins if the old log is too long, or if another pass begins."
    c,track = Calls(),Some(name='m')
    c.most_events = 3
    logs = []
    for pass_ in (1, 1, 1, 2):
        log = c.start_log(pass_)
        c.enter(track, 0)
        logs.append((any(log is l for l in logs[:-1]), len(log)))
        c.exit()
        logs[-1] = len(log)
    assert logs==[2, 4, 2, 2]
    c.enter(track, 3)
    c.here.skipped = True
    seen = []
    t = threading.Thread(target=lambda: seen.append((c.innermost(), c.here.skipped, c.here.log, c.here.pass_)))
    t.start(); t.join()
    assert seen==[(None, False, [], None)] and c.innermost() is track
    c.begin(Some(track=track), False)
    assert c.innermost() is None and not c.here.skipped


# ---- the buffer of a step's rows

def layer(name='a'): return Some(track=Some(name=name, id=name), taps={}, watched=True)
def vectors(buffer, over=True): return [(r['key'], r['call'], r['stats']) for r in buffer.take(over)[0].rows()]


def test_a_row_says_all_that_it_was_measured_with():
    "Rows of built-in statistics and of functions have module, type, names, phase, backward, call and pass, and statistics without the scale."
    asked = []
    def own(x): asked.append((buffer.calls.current.name, buffer.calls.here.measuring)); return {'mean': x.mean()}
    buffer = StepBuffer({'output': ('mean',), 'weight': own})
    x = torch.tensor([2., 4.])
    for micro in (0, 1):
        buffer.begin_pass(micro)
        buffer.micro = micro
        for m in 'ab':
            for t in ('output', 'weight'): buffer.measure(layer(m), t, 'x', x+micro, 'p', 3, 'eval', 2, torch.tensor(2.))
    snapshot,rows = buffer.take(True)
    want = [((m, t, 'x', 'p', 'eval', 2), 3, mean) for m in 'ab' for t,mean in (('output', 1.5), ('output', 2.), ('weight', 1.5), ('weight', 2.))]
    got = [(r['key'], r['call'], r['stats']['mean']) for r in snapshot.rows()]+[(r[1], r[2], r[5]['mean']) for r in rows]
    assert sorted(got)==want and [r[3] for r in rows]==[0, 0, 1, 1] and {r[4] for r in rows}=={'float32'} and not buffer.calls.here.measuring
    assert asked==[(m, True) for _ in range(2) for m in 'ab']


def test_a_function_that_fails_leaves_no_trace_of_itself():
    def own(x): raise KeyError('x')
    buffer = StepBuffer({'output': own}, Some(failed=lambda *a: said.append((*a[:2], a[3]))))
    said = []
    buffer.measure(layer(), 'output', 'x', torch.ones(1))
    buffer.measure(layer(), 'output', 'y', torch.ones(1, device='meta'))
    assert not buffer.calls.here.measuring and [r[5] for r in buffer.take(True)[1]]==[{'error': "KeyError: 'x'"}]
    assert said==[('a', 'x', own), ('a', 'y', own)]


def test_what_is_replaced_is_the_same_tensor_of_the_same_module_alone():
    "A later measurement replaces only the row of the same tensor and module, also if that row is already in the log."
    buffer,a,b = StepBuffer({'weight': ('mean',)}),layer('a'),layer('b')
    ws = torch.ones(2),torch.full((2,), 5.)
    for st in (a, b):
        for n,w in zip('wv', ws, strict=True): buffer.measure(st, 'weight', n, w, n, once=True)
    ws[0].data.fill_(7.)
    buffer.rows.forget_cached_summaries()
    buffer.measure(a, 'weight', 'w', ws[0], 'w', once=True, replace=True)
    def of(rows): return [(k[0], k[2], s['mean'], 'supersedes' in s) for k,_,s in rows]
    assert sorted(of(vectors(buffer, False)))==[('a', 'v', 5, False), ('a', 'w', 7, False), ('b', 'v', 5, False), ('b', 'w', 1, False)]
    buffer.measure(a, 'weight', 'w', ws[1], 'w', once=True, replace=True)
    buffer.measure(a, 'weight', 'w', ws[1]+1, 'w', once=True, replace=True)
    assert buffer.rows.is_partly_logged and of(vectors(buffer))==[('a', 'w', 6, True)]
    buffer.handle_step_end()
    buffer.measure(a, 'weight', 'w', ws[1]+2, 'w', once=True, replace=True)
    assert of(vectors(buffer))==[('a', 'w', 7, False)]


def test_a_page_whose_step_is_over():
    buffer = StepBuffer({'output': ('mean',), 'weight': lambda x: {'n': 1}})
    for over in (False, True):
        buffer.micro = 2
        buffer.measure(layer(), 'output', 'x', torch.ones(1))
        buffer.measure(layer(), 'weight', 'x', torch.ones(1), 'x')
        buffer.rows.custom.discarded = {'something'}
        buffer.take(over)
        assert buffer.rows.custom.taken
    assert len(buffer.rows.snapshots.taken)==1
    buffer.handle_step_end()
    assert (buffer.rows.snapshots.taken, buffer.rows.custom.taken, buffer.rows.custom.discarded)==([], set(), set())
    assert (buffer.micro, buffer.rows.is_partly_logged, buffer.on_device, buffer.rows.size)==(0, False, False, 0)
    buffer.rows.arena.blocks.append(Some(device=Some(type='cuda')))
    buffer.handle_step_end()
    assert buffer.on_device
    buffer.rows.snapshots.taken,buffer.rows.custom.taken,buffer.rows.custom.discarded = [1],{1},{1}
    arena = buffer.rows.arena
    buffer.rows.renew_arena()
    assert (buffer.rows.snapshots.taken, buffer.rows.custom.taken, buffer.rows.custom.discarded)==([], set(), set()) and buffer.rows.arena is not arena


def test_functions_rows_of_a_pass_that_raised():
    "Rows of earlier passes and of parameters stay. A row that was already handed over is replaced when the pass is repeated."
    buffer = StepBuffer({})
    def give(micro, *names):
        buffer.micro = micro
        for n in names: buffer.add(('m', 'output', n, 'p' if n=='w' else None, None, 0), 0, micro, 'float32', {'at': micro})
    give(0, 'x'); give(1, 'x', 'w')
    buffer.drop_failed_pass(1)
    assert [(r[1][2], r[3]) for r in buffer.rows.custom.rows]==[('x', 0), ('w', 1)]
    buffer.take(False)
    give(1, 'x')
    buffer.take(False)
    buffer.drop_failed_pass(1)
    give(1, 'x', 'y')
    assert [(r[1][2], r[5]) for r in buffer.take(True)[1]]==[('x', {'at': 1, 'supersedes': True}), ('y', {'at': 1})]


class Part(torch.Tensor):
    "A tensor like a DTensor: half of a tensor of two ranks, or, if `whole` is True, a whole tensor."
    whole = False
    placements = property(lambda self: (Some(is_replicate=lambda: self.whole),))
    def to_local(self): return self.as_subclass(torch.Tensor)[:1]


def test_parts_of_tensors_are_known_by_place_and_call():
    buffer,st = StepBuffer({'output': ('shape',), 'weight': ('shape',)}),layer()
    x = torch.zeros(2, 3).as_subclass(Part)
    # not x.as_subclass(Part): if fastai is imported, both tensors would share attributes
    whole = torch.zeros(2, 3).as_subclass(Part)
    whole.whole = True
    def at(call, ttype='output'): return 'a', ttype, 'x', None, 0, call
    for call in (0, 1): buffer.measure(st, 'output', 'x', x, call=call)
    buffer.measure(st, 'weight', 'x', x, 'p')
    assert buffer.shards.columns.keys()=={at(0), at(1), ('a', 'weight', 'x', None, 0, 0)} and buffer.shards.columns[at(0)]['global_shape']==[2, 3]
    buffer.measure(st, 'output', 'x', torch.zeros(2, 3), call=0)
    buffer.measure(st, 'weight', 'x', whole, 'p')
    assert buffer.shards.columns.keys()=={at(1)}
    assert [s['shape'] for *_,s in vectors(buffer)]==[[1, 3]]*3+[[2, 3], [1, 3]]


def test_functions_that_draw_do_so_apart_from_the_training_and_from_each_other(monkeypatch):
    "Each function has its own state of a generator from its first draw on, also if it has been called often."
    g,want = Generators(),{}
    g.tries = 2
    draws = {'python': (lambda x: random.random()), 'numpy': (lambda x: np.random.rand()), 'torch': (lambda x: torch.rand(1).item()), 'none': (lambda x: 0)}
    def seed(): random.seed(3); np.random.seed(3); torch.manual_seed(3)
    def theirs(): return random.random(), np.random.rand(), torch.rand(1).item()
    seed()
    training = [theirs() for _ in range(5)]
    for n,f in draws.items(): seed(); want[n] = [f(0) for _ in range(5)]
    seed()
    got,rows = [],{n: [] for n in draws}
    for _ in range(5):
        for n,f in draws.items(): rows[n].append(g.call(f, torch.ones(1)))
        got.append(theirs())
    assert got==training and rows==want
    assert {k for _,k in g.drawn}=={'random', 'numpy'} and len(g.drawn)==2
    state = random.getstate()
    with pytest.raises(ZeroDivisionError): g.call(lambda x: random.random()/0, torch.ones(1))
    assert random.getstate()==state


# ---- parameters, gradients and updates

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = nn.Sequential(nn.Linear(2, 2)),nn.Linear(2, 2, bias=False),nn.Linear(1, 1)
        self.b.weight = self.a[0].weight


class Nobody(Listener): pass


class Spy:
    "Replacement of a `StepBuffer`: keeps the arguments of each measurement."
    def __init__(self):
        self.got,self.stats,self.forgotten,self.shards,self.uses,self.is_simple = [],{'weight': ('mean',)},0,Some(columns={}),0,False
        self.rows = Some(is_partly_logged=False, forget_cached_summaries=self.forget_cached_summaries)

    def forget_cached_summaries(self): self.forgotten += 1
    def measure(self, state, ttype, tname, x, pname=None, **more): self.got.append((state.track.path, ttype, tname, pname, x, more))

    def measure_together(self, some, scale=None, replace=False):
        for state,ttype,tname,pname,x in some: self.measure(state, ttype, tname, x, pname, scale=scale, once=True, replace=replace)

    def places(self):
        out = [g[:4] for g in self.got]
        self.got.clear()
        return out


def of(model, ttypes=BOTH, buffer=None):
    ps = Parameters(Spy() if buffer is None else buffer, ttypes)
    ps.states = [ModuleState(t, Nobody()) for t in tracks(model)]
    return ps


def test_a_parameter_is_new_once_a_step_by_itself_and_by_its_place():
    "A sharded parameter is a new tensor at a known place, a tied one a known tensor at a new place. Both are not new."
    ps,(p,q) = of(Model()),(torch.ones(1), torch.ones(1))
    a,b = ps.states[2:4]
    for _ in range(2):
        def new(*parameter): return is_new(ps.seen, *parameter)
        assert new(a, 'w', p) and not new(a, 'w', p) and not new(a, 'w', q) and not new(b, 'w', p)
        assert new(a, 'v', q) and new(b, 'w', torch.ones(1))
        ps.handle_step_end()


def test_each_parameter_is_measured_once_at_the_first_that_returns_and_then_again_when_it_is_asked():
    m = Model()
    ps = of(m)
    root,seq,lin,b,c = ps.states
    for p in (m.b.weight, m.c.weight): p.grad = torch.ones_like(p)
    ps.after_call(b, False, BOTH)
    assert ps.buffer.places()==[('b', 'weight', 'weight_0', 'weight'), ('b', 'weight_grad', 'grad_0', 'weight')]
    ps.after_call(seq, False, BOTH)
    assert ps.buffer.places()==[]
    ps.after_call(seq, True, BOTH)
    assert ps.buffer.places()==[('a.0', 'weight', 'weight_1', 'bias')]
    c.watched = False
    ps.after_call(root, True, BOTH)
    assert ps.buffer.places()==[]
    c.watched = True
    ps.after_call(root, True, ('weight_grad',))
    assert ps.buffer.places()==[('c', 'weight_grad', 'grad_0', 'weight')]
    assert ps.hint.found and ps.hint.in_step and ps.known.with_gradient=={('b', 'weight'), ('c', 'weight')}
    ps.measure_complete({id(m.c.weight), id(m.b.weight)}, 4.)
    assert [(*g[:3], g[5]) for g in ps.buffer.got]==[(p, 'weight_grad', 'grad_0', dict(scale=4., once=True, replace=True)) for p in ('a.0', 'c')]
    assert ps.buffer.forgotten==1
    ps.buffer.got.clear()
    ps.handle_step_end()
    ps.measure_complete({id(m.c.bias)})
    assert ps.buffer.places()==[('c', 'weight', 'weight_0', 'weight'), ('c', 'weight', 'weight_1', 'bias')]
    ps.measure_again(('weight',))
    assert ps.buffer.places()==[('a.0', 'weight', 'weight_0', 'weight'), ('a.0', 'weight', 'weight_1', 'bias'), ('c', 'weight', 'weight_0', 'weight'),
        ('c', 'weight', 'weight_1', 'bias')]
    ps.after_call(root, True, BOTH)
    assert ps.buffer.places()==[] # all parameters were measured before
    found = [[s.track.path for s in below(st, ps.states)] for st in (root, seq, c)]
    assert found==[['a', 'b', 'c', 'a.0'], ['a.0'], []]
    assert [(st.track.path, n) for st,_,n,_ in ps.each(states=[b, c])]==[('b', 'weight'), ('c', 'weight'), ('c', 'bias')]
    lin.watched = False
    assert [(st.track.path, i, n) for st,i,n,_ in ps.each({id(m.b.weight), id(m.c.bias)})]==[('b', 0, 'weight'), ('c', 1, 'bias')]


def test_when_a_lack_of_gradients_is_said():
    "The hint is given once, and only if the model trains, gradients are recorded, no optimizer ends the steps, and weights change."
    def said(steps=3, boundary=False, manual=False, trains=True, ttypes=('weight_grad',), move=True, **more):
        lin = nn.Linear(1, 1)
        states,h = of(lin).states,ZeroGradHint()
        if trains: h.training(states)
        for k,v in more.items(): setattr(h, k, v)
        with heard('gradients') as got:
            for _ in range(steps):
                if move: lin.weight.data = lin.weight.data; lin.weight.detach().add_(1)
                h.handle_step_end(True, states, manual, ttypes, boundary)
        assert h.given==(len(got)==1 or bool(more.get('given'))) # the hint is given only once
        return len(got), h.steps_without
    assert said()==(1, 3) and said(1)==(0, 1) and said(2)==(1, 2) and said(1, True)==(1, 1) and said(9, True, True)==(1, 9)
    for no in (dict(trains=False), dict(silent=True), dict(ttypes=('weight',)), dict(manual=True), dict(move=False), dict(given=True), dict(found=True)):
        assert said(**no)==(0, 3), no
    assert said(in_step=True)==(1, 2)


def test_zeros_are_looked_for_once_where_te_step_ends_the_steps():
    lin = nn.Linear(1, 1)
    states = of(lin).states
    def said(*grads, boundary=True, manual=True):
        h = ZeroGradHint()
        h.training(states)
        with heard('gradients') as got:
            for g in grads:
                for p,v in zip(lin.parameters(), g, strict=True): p.grad = None if v is None else torch.full_like(p, v); p.detach().add_(1)
                if any(v is not None for v in g): h.found = h.in_step = True
                h.handle_step_end(True, states, manual, BOTH, boundary)
        return len(got)
    assert said((0, 0))==said((0, None))==said((None, None), (0, 0))==1
    assert said((0, 1))==said((1, 1), (0, 0))==said((0, 0), boundary=False)==0
    # each pass is a step: gradients exist, even if they are zero
    assert said(*[(0, 0)]*4, boundary=False, manual=False)==0
    assert said((None, None), (0, 0), boundary=False, manual=False)==0


def test_modules_with_other_children_are_found_once():
    "A module is found if its child modules changed. Changed parameters do not count."
    def found(change):
        m = Model()
        states = of(m).states
        change(m)
        return [[st.track.path for st in with_changed_children(states)] for _ in range(2)]
    assert found(lambda m: None)==[[], []]
    assert found(lambda m: m.c.register_parameter('new', nn.Parameter(torch.ones(1))))==[[], []]
    assert found(lambda m: setattr(m, 'c', nn.Linear(1, 1)))==[[''], []]
    assert found(lambda m: m.add_module('d', m.b))==[[''], []]
    assert found(lambda m: delattr(m, 'a'))==[[''], []]


def test_the_gradient_of_a_leaf_is_that_of_the_pass_that_it_was_given_in():
    "Backwards are counted for each name and call. Hooks on leaf tensors are removed at the end of the step."
    steps,came = Some(pass_=1),[]
    def tell(state, ttype, tname, g, call, phase, backward): came.append((state.n, ttype, tname, call, phase, backward, g.tolist()))
    g,one,two = Gradients(('input_grad', 'output_grad'), steps, tell),Some(key=None, n=1),Some(key=None, n=2)
    x,z = torch.ones(1, requires_grad=True),torch.ones(1, requires_grad=True)
    y = x*2+z*3
    g.hook_tensors(one, 'input_grad', [('x', x), ('z', z)], 0, None)
    g.hook_tensors(two, 'output_grad', [('y', y)], 4, 'eval')
    for _ in range(2): y.sum().backward(retain_graph=True)
    leaves = [(1, 'input_grad', n, 0, None, b, [v]) for n,v in (('x', 2), ('z', 3)) for b in (0, 1)]
    assert sorted(came)==leaves+[(2, 'output_grad', 'y', 4, 'eval', b, [1]) for b in (0, 1)]
    came.clear()
    steps.pass_ = 2
    g.hook_tensors(one, 'input_grad', [('x', x)], 0, None)
    (x*5).sum().backward()
    # only the hook of the new pass reports, not the hook of the earlier pass
    assert came==[(1, 'input_grad', 'x', 0, None, 0, [5])]
    came.clear()
    y.sum().backward() # y is no leaf, so its hook still reports a backward after its pass
    assert [c[:6] for c in came if c[2]=='y']==[(2, 'output_grad', 'y', 4, 'eval', 2)]
    g.handle_step_end()
    came.clear()
    (x*5+z).sum().backward()
    assert came==[] and g.handles==[] and not x._backward_hooks and not z._backward_hooks
    g.hook_tensors(one, 'input_grad', [('x', x)], 6, None)
    y,steps.pass_ = x*7,3
    y.sum().backward() # the backward of an earlier pass runs after another pass has begun
    assert [c[3:] for c in came]==[(6, None, 0, [7])]
    assert Gradients(('output_grad', 'weight', 'input_grad'), steps, tell).ttypes==('input_grad', 'output_grad')


@pytest.mark.parametrize('ttypes', [(), ('input_grad',), ('output_grad',), ('output_grad', 'input_grad')])
def test_what_is_computed_again_brings_the_gradients_that_are_asked_for(ttypes):
    came = []
    g = Gradients(ttypes, Some(pass_=1), None)
    state = Some(key=None, grads_arrived=lambda ttype, named: came.append((ttype, [(n, x.item()) for n,x in named])))
    x = torch.ones(1, requires_grad=True)
    y = x*2
    for _ in range(2): g.recomputed(state, [('x', x)], [('y', y)]) # the second call adds no second hook
    (y*3).backward()
    assert came==[c for c in (('output_grad', [('y', 3)]), ('input_grad', [('x', 6)])) if c[0] in ttypes]


def test_buffers_are_measured_as_they_are_in_place_of_what_they_were():
    buffer,m = Spy(),nn.ModuleList(nn.BatchNorm1d(1, track_running_stats=t) for t in (True, False, True))
    Buffers(buffer).measure_all(of(m).states)
    names = [n for n,_ in m[0].named_buffers()]
    assert buffer.got==[(p, 'buffer', n, n, m[int(p)]._buffers[n], dict(once=True, replace=True)) for p in '02' for n in names]


def test_updates_are_of_the_step_that_was_taken():
    "Each optimizer reports its own updates. There is no update if `after` is called twice, too late, or after a skipped step."
    m = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1, bias=False)])
    ps = of(m)
    u = Updates(ps.buffer, ps, ('weight', 'update', 'optimizer'))
    one,two = torch.optim.SGD(m[0].parameters(), 1., momentum=.9),torch.optim.SGD(m[1].parameters(), 1.)
    for p in m.parameters(): p.grad = torch.ones_like(p)
    ps.seen |= {(st.track.id, n) for st,_,n,_ in ps.each()}
    def rows(): out = [(*g[:4], g[4].item(), g[5]) for g in ps.buffer.got]; ps.buffer.got.clear(); return out
    again = dict(once=True, replace=True)
    for o in (one, two): u.before(o)
    one.step()
    u.after(one)
    assert rows()==[r for i,n in enumerate(('weight', 'bias')) for r in
        (('0', 'update', f'update_{i}', n, -1, again), ('0', 'optimizer', f'momentum_buffer_{i}', n, 1, again))]
    m[0].weight.data += 7
    u.after(one)
    assert [r[1] for r in rows()]==['optimizer']*2
    two.step()
    u.after(two)
    assert rows()==[('1', 'update', 'update_0', 'weight', -1, again)] and not u.copies
    u.before(two)
    u.handle_step_end()
    two.step()
    u.after(two)
    assert rows()==[]
    def befores(ttypes=('weight', 'update'), seen=True, stats=('mean',), is_partly_logged=False):
        v = Updates(ps.buffer, ps, ttypes)
        if not seen: ps.handle_step_end()
        ps.buffer.stats,ps.buffer.rows.is_partly_logged,old = {'weight': stats},is_partly_logged,m[1].weight.item()
        v.before(two); two.step(); v.after(two)
        got = rows()
        assert got[-1][1]=='update' and all(r==('1', 'before', 'weight_0', 'weight', old, again) for r in got[:-1])
        return len(got)-1
    assert befores()==0 and [befores(**k) for k in (dict(ttypes=('update',)), dict(stats=lambda x: {}), dict(is_partly_logged=True), dict(seen=False))]==[1]*4
    assert Updates(ps.buffer, ps, ('weight',)).before(one) is None
    v = Updates(ps.buffer, ps, ('weight', 'optimizer'))
    v.before(one)
    assert not v.copies


def test_what_is_known_of_parameters_is_told_when_it_changes():
    m,told = Model(),[]
    k = ParameterFacts(BOTH, told.append)
    states = of(m).states
    opt = torch.optim.SGD(m.c.parameters(), .1)
    for _ in range(2): k.note(states, None, False)
    assert len(told)==1 and [(p['path'], p['name'], p['optimizer']) for p in told[0]['parameters']]==[('a.0', 'weight', None), ('a.0', 'bias', None),
        ('c', 'weight', None), ('c', 'bias', None)]
    assert [p.get('also') for p in k.entries]==[['b.weight'], None, None, None] and not k.trained
    for _ in range(2): k.note(states, [opt], True)
    assert len(told)==2 and [p['optimizer'] for p in k.entries]==[False, False, True, True] and k.trained
    k.note(states, [opt], False)
    assert k.trained # `trained` stays True
    k.with_gradient.add(('b', 'weight')) # the gradient is noted under the other name of the tied weight
    states[4].pass_ = 3
    k.note(states, [], False)
    facts = [(p['optimizer'], p['gradient'], p['called']) for p in k.entries]
    assert facts==[(False, True, False), (False, False, False), (True, False, True), (True, False, True)]
    assert k.trained and len(told)==3 and [i for i in range(9) if k.is_due(i)]==[1, 2, 4, 8]


# ---- the writer of rows

class Run:
    "Replacement of a run: keeps the rows of each `put`, and whether they join an earlier step."
    def __init__(self): self.file,self.step,self.got,self.marked = self,None,[],{}
    def put(self, what, *args, **more): self.got.append((what, args, more))
    def note(self, what): "Do nothing: no test reads these notes."


def journal():
    t = Run()
    return t, RowWriter(t), StepBuffer({}), Steps(0, True)


def measured(buffer, mean=1.): buffer.add(('m', 'output', 'x', None, None, 0), 0, 0, 'float32', {'mean': mean})


def test_steps_that_wait_go_to_the_log_before_what_comes_next():
    t,j,buffer,steps = journal()
    for s in range(3):
        steps.begin('')
        measured(buffer, s)
        j.write(buffer, steps, True, wait=s<2)
        steps.close(); j.handle_step_end(s, True)
        assert len(t.got)==(0 if s<2 else 3) and len(j.waiting)==(s+1 if s<2 else 0)
    assert [(m.step, [r[5]['mean'] for r in m.custom], over) for m,(over,*_),_ in t.got]==[(s, [s], True) for s in range(3)] and j.last.step==2
    j.write(buffer, steps, False)
    assert len(t.got)==3
    steps.begin('')
    measured(buffer)
    j.write(buffer, steps, True, wait=True)
    j.write(buffer, steps, False) # the buffer is empty, but the waiting steps are written
    assert len(t.got)==4 and j.waiting==[]


def test_functions_rows_of_the_open_step_and_of_the_one_before_are_kept():
    t,j,buffer,steps = journal()
    for s in range(3):
        steps.begin('')
        for i in range(2):
            measured(buffer, 10*s+i)
            j.write(buffer, steps, i==1)
        assert [r[5]['mean'] for r in j.custom]==[10*s, 10*s+1]
        steps.close(); j.handle_step_end(s, True)
        assert j.custom==[] and [r[5]['mean'] for r in j.ended]==[10*s, 10*s+1]


@pytest.mark.parametrize('open_,on,was_on', [(a, b, c) for a in (False, True) for b in (False, True) for c in (False, True)])
def test_rows_of_somebody_else_go_into_the_open_step_or_beside_it(open_, on, was_on):
    t,j,buffer,steps = journal()
    steps.begin(''); steps.close(); j.handle_step_end(0, was_on)
    if open_: steps.begin('')
    t.marked = {'epoch': 4}
    rows = [ComputedRow(RowKey('m', 'quantity', n), c, 'float64', {'v': c}) for c,n in enumerate('qr')]
    for step in (0, 1): j.extra.add(step, rows, buffer, steps, on)
    t.marked = {}
    inside = open_ and on
    assert [r[1:] for r in buffer.rows.custom.rows]==([(k, c, None, d, s) for k,c,d,s in rows] if inside else [])
    got = [([(r['step'], r['tname'], r['call'], r['dtype'], r['v'], r['epoch']) for r in f()], args, more['joins']) for f,args,more in t.got]
    want = [([(s, n, c, 'float64', c, 4) for c,n in enumerate('qr')], (), True if s==0 and was_on else None) for s in (0, 1)]
    assert got==want[:1 if inside else 2]


def test_numbers_of_an_evaluation_and_of_two_steps():
    "Numbers have the phase and step of their time. `call` goes on after the end of a step, and begins at 0 in the next step."
    t,j,buffer,steps = journal()
    j.extra.root_name = 'model(Net)'
    def note(v): j.extra.note({'v': v}, buffer, steps, True)
    steps.begin('')
    note(0); note(1)
    assert [(r[1], r[2], r[5]) for r in buffer.rows.custom.rows]==[(('model(Net)', 'scalar', 'log', None, None, 0), c, {'v': c}) for c in (0, 1)]
    j.write(buffer, steps, True)
    steps.close(); j.handle_step_end(0, True)
    note(2)
    steps.begin('', 'eval')
    note(3)
    steps.begin('')
    note(4)
    rows = [r for f,_,_ in t.got[1:] for r in f()]
    assert [(r['step'], r['call'], r.get('phase'), r['v']) for r in rows]==[(0, 2, None, 2), (0, 3, 'eval', 3)] and [m['joins'] for *_,m in t.got[1:]]==[True]*2
    assert [(r[1][4], r[2], r[5]) for r in buffer.rows.custom.rows]==[(None, 0, {'v': 4})] and j.extra.noted=={0: 4, 1: 1}
    j.handle_step_end(1, False)
    assert j.extra.noted=={1: 1} and not j.log.was_on
    buffer,steps = StepBuffer({}),Steps(0)
    steps.begin('', 'eval')
    note(5)
    assert [r[1][4] for r in buffer.rows.custom.rows]==[None] # if each pass is a step, the rows have no phase


def test_an_evaluation_joins_the_step_before_and_a_later_one_supersedes():
    t,j,buffer,steps = journal()
    steps.begin('')
    measured(buffer); j.write(buffer, steps, True)
    steps.close(); j.handle_step_end(0, True)
    for _ in range(2):
        steps.begin('', 'eval'); steps.begin('', 'eval')
        measured(buffer); j.write(buffer, steps, True)
        steps.end_evaluation()
    j.log.was_on = False
    steps.begin('', 'eval')
    measured(buffer); j.write(buffer, steps, True)
    got = [(m.step, m.marks, m.many_passes, more.get('joins')) for m,_,more in t.got[1:]]
    assert got==[(0, {}, {'eval': True}, True), (0, {'supersedes': True}, {'eval': True}, True), (0, {'supersedes': True}, {'eval': False}, None)]
    assert t.got[0][1][0] is True and all(more['by'] is j.lines for *_,more in t.got[1:])


def test_a_row_has_its_pass_phase_and_backward_where_there_are_several():
    key = 'm', 'output', 'x', 'p', 'eval', 2
    for several,micro,shown in (({'eval': True}, 0, True), ({'eval': False, None: True}, 0, False), ({'eval': True}, None, False)):
        row = one_row(key, 3, micro, 'float16', {'mean': 1.}, 7, 'now', {'epoch': 1, 'phase': 'mine'}, several)
        assert row==dict(mean=1., module='m', ts='now', ttype='output', tname='x', step=7, call=3, dtype='float16', pname='p', phase='eval', backward=2,
            epoch=1, **({'micro': 0} if shown else {}))
    row = one_row(('m', 'output', 'x', None, None, 0), 0, 1, 'float32', {}, 0, '', {}, {None: False})
    assert list(row)==['module', 'ts', 'ttype', 'tname', 'step', 'call', 'dtype']


def test_only_the_runs_of_that_name_are_handed_over():
    done = []
    def run(name, owner):
        r = Holds()
        r.t,r.fname,r.name = r,name,name
        r.owner = (lambda: Some(disarm=lambda: done.append(f'{name} disarmed'))) if owner else None
        r.barrier = lambda: done.append(f'{name} written')
        return r
    class Holds: pass
    mine = [run('one', True), run('two', True), run('two', False)]
    open_recorders.update(mine)
    try:
        release_run('one')
        assert done==['one disarmed', 'one written']
        done.clear()
        release_run('two')
        assert sorted(done)==['two disarmed', 'two written', 'two written']
    finally:
        for r in mine: open_recorders.discard(r)
