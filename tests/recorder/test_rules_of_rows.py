"Random sequences of passes, evaluations, steps, logged numbers, marks and reads: the rows are compared with torch hooks and a list."
from tensor_rows import df, lines
import math
import warnings
from types import SimpleNamespace
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from looped import heard
from oracle import says
from torch import nn

from torchember import EmberWarning, emberTracker, torchEmber
from torchember.capture.module_state import ModuleState as Heard
from torchember.measure.elements import Unmeasurable
from torchember.recorder.buffers import Buffers
from torchember.recorder.calls import Calls
from torchember.recorder.cost import Cost
from torchember.recorder.row_writer import RowWriter
from torchember.recorder.notices import ChangingMarks, Notices
from torchember.recorder.step_buffer import StepBuffer
from torchember.recorder.parameters import ZeroGradHint
from torchember.recorder.row import ComputedRow, FirstNonfinite, RowKey, describe_nonfinite
from torchember.recorder.steps import Decision, Phases, Steps


class Block(nn.Module):
    def __init__(self): super().__init__(); self.l,self.t = nn.Linear(3, 3),nn.Tanh()
    def forward(self, x): return self.t(self.l(x))


class Twice(nn.Module):
    def __init__(self): super().__init__(); self.f = Block()
    # `self.f.l` is called three times, the last time from outside of its parent module `f`
    def forward(self, x): return self.f(self.f(x))+self.f.l(x)


class Net(nn.Module):
    "A model of nested modules that run several times, with a tied weight."
    def __init__(self):
        super().__init__()
        self.a,self.b = Twice(),Block()
        self.b.l.weight = self.a.f.l.weight

    def forward(self, x): return self.b(self.a(self.a(x)))


class ByHand:
    "Collects the expected rows with torch hooks: (step, path, ttype, tname, call, phase, epoch) -> tensors to merge."
    def __init__(self, model):
        self.model,self.want,self.step,self.epoch,self.began = model,defaultdict(list),0,None,False
        self.phase,self.calls,self.seen = None,Counter(),set()
        self.hooks = [m.register_forward_hook(lambda m, i, o, path=path: self.out(path, i[0], o)) for path,m in model.named_modules()]

    def put(self, x, path, ttype, tname, call, phase): self.want[self.step, path, ttype, tname, call, phase, self.epoch].append(x.detach().clone())

    def out(self, path, x, o):
        call,self.calls[path] = self.calls[path],self.calls[path]+1
        self.put(x, path, 'input', type(self.model.get_submodule(path)).forward.__code__.co_varnames[1], call, self.phase)
        self.put(o, path, 'output', 'output_0', call, self.phase)
        if o.requires_grad: o.register_hook(lambda g, where=(path, 'output_grad', 'output_0', call, self.phase): self.put(g, *where))

    def own(self):
        "Yield path, position and parameter of each parameter. A tied parameter is yielded once."
        seen = set()
        for path,m in self.model.named_modules():
            for i,p in enumerate(m._parameters.values()):
                if p is not None and id(p) not in seen: seen.add(id(p)); yield path, i, p

    def forward(self, x, phase=None):
        self.phase,self.calls = phase,Counter()
        y = self.model(x)
        if phase is None and not self.began:
            self.began = True
            for path,i,p in self.own(): self.put(p, path, 'weight', f'weight_{i}', 0, None)
        return y

    def stepped(self, before):
        for path,i,p in self.own():
            if p.grad is None: continue
            self.put(p.grad, path, 'weight_grad', f'grad_{i}', 0, None)
            self.put(p-before[id(p)], path, 'update', f'update_{i}', 0, None)
        self.step,self.began = self.step+1,False


def agree(te, hand, logged=()):
    "Check that a closed run has exactly the expected rows and the logged numbers `logged`."
    rows = df(te).to_dict('records')
    def epoch(r): return None if math.isnan(e := r.get('epoch', math.nan)) else int(e)
    def phase(r): return r['phase'] if isinstance(r.get('phase'), str) else None
    assert [(r['step'], r['call'], epoch(r), r['loss']) for r in rows if r['ttype']=='scalar']==list(logged)
    tensors = [r for r in rows if r['ttype']!='scalar']
    where = [(r['step'], r['path'], r['ttype'], r['tname'], r['call'], phase(r), epoch(r)) for r in tensors]
    assert sorted(map(str, where))==sorted(map(str, hand.want)) # the expected rows exist, each of them once
    for k,r in zip(where, tensors, strict=True):
        some = hand.want[k]
        says({**r, 'shape': torch.cat(some).shape}, torch.cat(some))
        assert list(r['shape'])==list(some[-1].shape)


todo = st.lists(st.sampled_from(['pass', 'pass', 'eval', 'step', 'read', 'epoch', 'log']), min_size=3, max_size=14)


@settings(max_examples=25, deadline=None)
@given(todo, st.integers(0, 9))
def test_any_order_of_events(todo, seed):
    torch.manual_seed(seed)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, optimizer=opt, ttypes=('input', 'output', 'output_grad', 'weight', 'weight_grad', 'update'))
    hand,logged,n,passes = ByHand(model),[],Counter(),0
    for i,what in enumerate(todo):
        if what=='pass': hand.forward(torch.randn(2, 3)).square().sum().backward(); passes += 1
        elif what=='eval' and passes:
            model.eval()
            with torch.no_grad(): hand.forward(torch.randn(4, 3), 'eval')
            model.train()
        elif what=='step' and passes:
            before = {id(p): p.detach().clone() for p in model.parameters()}
            opt.step()
            hand.stepped(before)
            opt.zero_grad()
            passes = 0
        elif what=='read': assert len(lines(te))==len(df(te))
        elif what=='epoch' and not passes: hand.epoch = i; te.mark(epoch=i)
        elif what=='log' and passes:
            te.log(loss=i)
            logged.append((hand.step, n[hand.step], hand.epoch, i))
            n[hand.step] += 1
    te.close()
    agree(te, hand, logged)


# ---- single parts of the recorder

class Spy:
    "Replacement of a run: keeps the arguments of each `put`."
    def __init__(self): self.file,self.step,self.got,self.marked = self,None,[],{}
    def put(self, *args, **kwargs): self.got.append((args, kwargs))
    def note(self, what, **kwargs): self.got.append(what)


def test_what_the_journal_says_of_each_step():
    "Each step gets its own marks, the rank, the time of its first row, and the mark 'skipped'."
    t = Spy()
    j,buffer,steps = RowWriter(t, rank=3),StepBuffer({}),Steps(5)
    buffer.add(('m', 'output', 'x', None, None, 0), 0, None, 'float32', {'mean': 1.})
    j.note_time()
    began = j.ts
    j.note_time()
    assert j.ts is began
    j.skipped,t.marked = True,{'epoch': 1}
    steps.begin('')
    j.write(buffer, steps, True)
    j.handle_step_end(5, True)
    assert j.ts is None and not j.skipped and j.log.was_on and buffer.rows.size==0
    t.marked = {'epoch': 2}
    steps.close()
    steps.begin('')
    steps.begin('')
    buffer.add(('m', 'output', 'x', None, None, 0), 0, 1, 'float32', {'mean': 2.})
    j.write(buffer, steps, False)
    (one,*_),(two,*_) = (args for args,_ in t.got)
    assert (one.step, one.ts, one.marks, one.many_passes)==(5, began, {'skipped': True, 'rank': 3, 'epoch': 1}, {None: False})
    assert (two.step, two.marks, two.many_passes)==(6, {'rank': 3, 'epoch': 2}, {None: True})
    assert [args[1] for args,_ in t.got]==[True, False] and [r[5] for m in (one, two) for r in m.custom]==[{'mean': 1.}, {'mean': 2.}]
    j.write(buffer, steps, False)
    assert len(t.got)==2 # an empty buffer is not handed to the writer thread


def test_where_the_journal_puts_rows_that_come_late():
    "A number goes into a recorded open step, or joins the last step if it was recorded. Otherwise it is written alone."
    for was_on,on,joins in ((True, True, True), (True, False, True), (False, True, None)):
        t = Spy()
        j,buffer,steps = RowWriter(t),StepBuffer({}),Steps(3)
        steps.begin('')
        j.extra.note({'loss': 1.}, buffer, steps, was_on)
        assert (buffer.rows.size, len(t.got))==((1, 0) if was_on else (0, 1))
        buffer.rows.custom.rows.clear(); t.got.clear()
        steps.close()
        j.handle_step_end(3, was_on)
        j.extra.note({'loss': 2.}, buffer, steps, on)
        j.extra.add(3, [ComputedRow(RowKey('m', 'quantity', 'q'), 0, None, {'q': 1.})], buffer, steps, on)
        assert buffer.rows.size==0 and [kwargs['joins'] for _,kwargs in t.got]==[joins, joins]
        rows = [r for args,_ in t.got for r in args[0]()]
        assert [(r['step'], r['ttype'], r['call']) for r in rows]==[(3, 'scalar', 1), (3, 'quantity', 0)]
        steps.begin('')
        j.extra.note({'loss': 3.}, buffer, steps, True)
        assert [r[2] for r in buffer.rows.custom.rows]==[0] # calls are counted from 0 again in the new step


def test_rows_of_functions_that_are_read_several_times_in_a_step():
    "A later row of a parameter replaces the earlier row. Each call of a module has its own row."
    buffer = StepBuffer({})
    def give(pname, mean):
        buffer.add(('m', 'weight' if pname else 'output', 'x', pname, None, 0), 0, 0, 'float32', {'mean': mean})
        return [r[5] for r in buffer.take(False)[1]]
    for i in range(3): assert give('weight', i)==[{'mean': i, **({'supersedes': True} if i else {})}]
    for i in range(2): assert give(None, i)==[{'mean': i}]
    assert give('bias', 0)==[{'mean': 0}]
    buffer.handle_step_end()
    assert give('weight', 7)==[{'mean': 7}]
    buffer.rows.forget_logged_rows()
    assert give('weight', 8)==[{'mean': 8}]


def test_only_rows_of_the_same_module_type_and_name_are_dropped():
    buffer = StepBuffer({})
    for m in 'ab':
        for t in ('weight', 'update'):
            for n in 'xy': buffer.add((m, t, n, None, None, 0), 0, 0, 'float32', {})
    buffer.rows.custom.drop('a', 'weight', 'x')
    assert [r[1][:3] for r in buffer.rows.custom.rows]==[(m, t, n) for m in 'ab' for t in ('weight', 'update') for n in 'xy' if (m, t, n)!=('a', 'weight', 'x')]


def test_calls_inside_of_calls():
    "Each module counts its calls from 0 in each pass. The innermost call ends first and has its own number."
    class State:
        pass_ = calls = None
        number = Heard.number
        def __init__(self, name): self.name,self.track,self.pending = name,self,SimpleNamespace(counts={})
    c,a,b = Calls(),State('a'),State('b')
    for pass_ in (1, 2):
        c.begin(a, False)
        log = c.start_log(pass_)
        assert c.innermost() is None
        if a.pass_!=pass_: a.pending.counts = {'old': 1}
        c.enter(a, n := a.number(pass_))
        assert n==0 and a.pending.counts=={}
        for i in range(2):
            c.enter(b, n := b.number(pass_))
            assert (n, c.here.call, c.innermost())==(i, i, b)
            assert c.exit()==i and c.current is b and c.innermost() is a
        c.enter(a, a.number(pass_))
        assert c.here.call==1 and c.exit()==1
        assert c.exit()==0 and c.here.call==0 and c.innermost() is None
        assert log==['enter a', 'enter b', 'exit b', 'enter b', 'exit b', 'enter a', 'exit a', 'exit a'] and c.start_log(pass_) is log
        assert c.start_log(pass_, again=True)==[]


def test_each_buffer_once_at_the_first_module_that_has_it_and_is_watched():
    class Holds(nn.Module):
        def __init__(self, **buffers):
            super().__init__()
            for n,b in buffers.items(): self.register_buffer(n, b)
    shared = torch.ones(2)
    modules = Holds(x=None, y=shared),Holds(y=torch.zeros(2), z=shared),Holds(w=shared, v=torch.ones(1))
    class State:
        def __init__(self, m, watched=True): self.track,self.module,self.watched,self.buffers = self,m,watched,m._buffers
    def found(*watched): return [(s.module, n) for s,n,_ in Buffers(None).each([State(m, w) for m,w in zip(modules, watched, strict=True)])]
    a,b,c = modules
    assert found(True, True, True)==[(a, 'y'), (b, 'y'), (c, 'v')]
    assert found(False, True, True)==[(b, 'y'), (b, 'z'), (c, 'v')] and found(False, False, True)==[(c, 'w'), (c, 'v')]


def test_a_mark_that_changes_with_every_step():
    "The mark is found if it is a float that changes in four consecutive steps. Integers are ignored."
    def said(*seen): m = ChangingMarks(); return [m.find({'loss': v, 'epoch': int(s)}, s) for s,v in seen]
    assert said(*((s, s/2) for s in range(5)))==[None, None, None, ('loss', 1.5), ('loss', 2.)]
    assert not any(said(*((2*s, s/2) for s in range(9))))
    assert not any(said(*((s, v) for s,v in enumerate([.1, .2, .3, .3, .4, .5, .5]))))
    assert not any(said(*((3, s/2) for s in range(9))))
    assert said((0, .1), (1, .2), (2, .3), (4, .4), (5, .5), (6, .6), (7, .7))==[None]*6+[('loss', .7)]


def test_what_could_not_be_measured_is_counted_apart_and_said_once_for_each_place():
    def f(x): "A user's statistic."
    n = Notices()
    with heard() as said:
        for module,tname,error,how in (('a', 'x', Unmeasurable('gone'), None), ('a', 'x', Unmeasurable('gone'), None), ('a', 'y', Unmeasurable('gone'), None),
            ('b', 'x', Unmeasurable('gone'), None), ('a', 'x', ValueError('1'), f), ('b', 'x', ValueError('2'), f), ('b', 'x', TypeError('3'), f),
            ('b', 'x', ValueError('4'), None)): n.failed(module, tname, error, how)
    assert (n.errors, n.unmeasurable)==(4, 4)
    assert [s.split(' is not')[0].split(' could')[0] for s in said]==['x of a', 'y of a', 'x of b', 'x of a', 'x of b', 'x of b']
    with pytest.raises(ValueError, match='5'): Notices('raise').failed('a', 'x', ValueError('5'))


def test_the_first_value_that_is_not_finite_is_found_once():
    t = Spy()
    bad = FirstNonfinite(t)
    def row(path, **more): return {'step': 2, 'module': f'model(N).{path}(L)', 'ttype': 'output', 'tname': 'output_0', **more}
    rows = [b'a line', row('a', neginf=3), row('b', nan=2, posinf=1), row('c', nan=9)]
    bad.add(rows)
    bad.add([row('d', nan=1)])
    assert bad.found=='step 2, output_0 of b (L) has 2 NaN and 1 inf' and len(t.got)==1 and t.got[0].startswith(bad.found)
    assert describe_nonfinite({**row('a', neginf=3), 'ttype': 'weight', 'tname': 'weight_0', 'pname': 'w'})=='step 2, weight_0 (w) of a (L) has 3 -inf'
    assert describe_nonfinite(row('a', nan=3, skipped=True)) is None
    assert describe_nonfinite({'step': 1, 'ttype': 'scalar', 'rate': .1, 'loss': math.inf, 'norm': math.nan})=='step 1, loss is inf'


def test_evaluation_is_what_the_root_or_a_part_that_was_trained_does_in_eval_mode():
    p = Phases()
    assert p.find('part', False, True) is None # a part that was never trained, in a root in train mode
    assert p.find('part', True, True) is None and p.find('part', False, True)=='eval' and p.find('other', False, True) is None
    assert p.find('other', True, False)=='eval' and p.find('', False, False)=='eval'


def test_a_step_waits_for_all_of_its_optimizers_anew():
    s = Steps(0, True, {1, 2})
    for _ in range(2):
        s.begin('')
        assert not s.optimizers.note_step(1) and s.optimizers.missing=={2} and not s.optimizers.note_step(1) and s.optimizers.counts[1]==2
        assert s.optimizers.note_step(2) and s.optimizers.missing==set()
        s.close()
        assert not s.optimizers.counts and s.optimizers.missing=={1, 2}


def test_a_decision_is_made_once_for_a_step():
    "The decision is stored. `denied` is True only if the budget refused a step that the schedule selected."
    class Budget:
        asked,pending = 0,[]
        def allows(self, pending): self.asked += 1; self.pending.append(pending); return self.asked%2==0
    b = Budget()
    d = Decision(lambda s: s!=1, b)
    got = [(d(s, lambda s=s: 10.*s), d(s), d.denied) for s in range(4)]
    assert got==[(False, False, True), (False, False, False), (True, True, False), (False, False, True)]
    assert b.asked==3 and b.pending==[0., 20., 30.]


def test_time_is_counted_from_the_first_pass_to_the_last_end(monkeypatch):
    from torchember.recorder import cost
    now = [0.]
    monkeypatch.setattr(cost, 'clock', lambda: now[0])
    monkeypatch.setattr(cost, 'call_overhead', lambda told: 1. if told else .25)
    c = Cost()
    assert c.elapsed==0
    for at,modules,told in ((5., 2, True), (7., 4, False), (11., 3, True)):
        now[0] = at
        c.begin_pass()
        now[0] += 1
        c.end_pass(modules, told)
    assert c.elapsed==7 and c.calls=={False: 4, True: 5} and c.total()==5*1+4*.25
    c.spent = 3.
    assert c.total()==9
    c.local.entered = 10.
    assert c.total()==11 # a timed call that began at 10 is still running


def test_steps_without_gradients_are_counted_when_they_trained():
    h = ZeroGradHint()
    for trained,there in ((True, False), (True, True), (True, False), (False, False)):
        h.in_step = there
        h.handle_step_end(trained, [], True, ('weight_grad',))
    assert h.steps_without==2 and not h.in_step


# ---- complete embers

class Around(nn.Module):
    "A model that calls another model, which is not one of its submodules."
    def __init__(self, call): super().__init__(); self.l,self.call = Block(),[call]
    def forward(self, x): return self.l(self.call[0](x))


each = ('input', 'output', 'output_grad', 'weight', 'weight_grad', 'update')


def stepped(opt, *hands):
    before = {id(p): p.detach().clone() for h in hands for p in h.model.parameters()}
    opt.step()
    for h in hands: h.stepped(before)
    opt.zero_grad()


def test_two_models_of_which_one_runs_inside_of_the_other():
    "Each model has its own steps, logged numbers and passes. One of them steps twice as often."
    torch.manual_seed(0)
    inner = ByHand(Net())
    outer = ByHand(Around(inner.forward))
    opts = [torch.optim.SGD(h.model.parameters(), .1) for h in (inner, outer)]
    embers = [torchEmber(h.model, optimizer=o, ttypes=each) for h,o in zip((inner, outer), opts, strict=True)]
    logged,n = ([], []),Counter()
    for s in range(4):
        for _ in range(2): outer.forward(torch.randn(2, 3)).square().sum().backward()
        if s%2: inner.forward(torch.randn(1, 3)).sum().backward()
        for i,(te,h) in enumerate(zip(embers, (inner, outer), strict=True)):
            te.log(loss=10*s+i)
            logged[i].append((h.step, n[i, h.step], None, 10*s+i))
            n[i, h.step] += 1
        if s%2: stepped(opts[0], inner)
        stepped(opts[1], outer)
    for te,h,l,steps in zip(embers, (inner, outer), logged, (2, 4), strict=True):
        report = te.close()
        agree(te, h, l)
        assert (report['steps'], report['recorded'], report['skipped'], report['remarks'])==(steps, steps, 0, [])


def test_runs_of_one_model_after_each_other():
    "A new run begins at step 0, a resumed run after its last step. A model that is armed again continues its step."
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), .1)
    def train(n=2, passes=2):
        for _ in range(n):
            for _ in range(passes): hand.forward(torch.randn(2, 3)).square().sum().backward()
            stepped(opt, hand)
    for name,resume in (('one', False), ('two', False), ('one', True)):
        hand = ByHand(model)
        te = torchEmber(model, optimizer=opt, ttypes=each, name=name, resume=resume)
        if name=='one' and not resume: first = hand
        if resume: hand.step,hand.want = first.step,first.want
        train()
        te.disarm()
        at,want = hand.step,{k: list(v) for k,v in hand.want.items()}
        train(1, 1) # the ember is disarmed, so this step is not recorded
        hand.step,hand.want = at,defaultdict(list, want)
        te.arm()
        train(1, 3)
        te.close()
        agree(te, hand)
        for h in hand.hooks: h.remove()


def test_statistics_that_are_chosen_anew_in_the_middle():
    "New statistics apply from the next pass on, only to the given tensor type, and to all modules."
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torchEmber(model, ttypes=('input', 'output'), stats=['mean']) as te:
        model(torch.ones(1, 2))
        te.how_record('output')(lambda x: {'own': 1.})
        model(torch.ones(1, 2))
        te.how_record('output')(['max'])
        model(torch.ones(1, 2))
    got = {(r['step'], r['ttype']): {k for k in ('mean', 'own', 'max') if k in r} for r in lines(te)}
    assert got=={(s, 'input'): {'mean'} for s in range(3)} | {(0, 'output'): {'mean'}, (1, 'output'): {'own'}, (2, 'output'): {'max'}}
    assert Counter((r['step'], r['ttype']) for r in lines(te))==Counter({(s, t): 3 for s in range(3) for t in ('input', 'output')})


def test_variables_that_are_followed_replaced_and_let_go():
    model = nn.Linear(2, 1)
    v,w = (torch.full((2,), x, requires_grad=True) for x in (1., 2.))
    with torchEmber(model, ttypes=('weight', 'weight_grad')) as te:
        for now in (v, w, None, v):
            te.watch_tensor('v', now)
            loss = model(torch.ones(1, 2)).sum()
            (loss if now is None else loss+(3*now).sum()).backward()
            te.step()
    rows = [(r['step'], r['ttype'], r['mean']) for r in lines(te) if r['tname']=='v']
    assert rows==[(0, 'weight', 1.), (0, 'weight_grad', 3.), (1, 'weight', 2.), (1, 'weight_grad', 3.), (3, 'weight', 1.), (3, 'weight_grad', 6.)]


def test_two_probes_in_a_module_that_is_called_twice():
    class Probed(nn.Module):
        def forward(self, x):
            te.probe('in', x)
            te.probe('out', x+1)
            return x+1
    class Root(nn.Module):
        def __init__(self): super().__init__(); self.p,self.q = Probed(),Probed()
        def forward(self, x): return self.q(te.probe('between', self.p(self.p(x))))
    model = Root()
    with torchEmber(model, ttypes='output') as te:
        for s in (0., 10.): model(torch.full((1,), s))
    rows = df(te).query('ttype=="probe"')
    assert list(zip(rows.step, rows.path, rows.tname, rows.call, rows['mean'], strict=True))==[(s, *r[:3], 10*s+r[3]) for s in (0, 1) for r in
        (('p', 'in', 0, 0.), ('p', 'out', 0, 1.), ('p', 'in', 1, 1.), ('p', 'out', 1, 2.), ('', 'between', 0, 2.), ('q', 'in', 0, 2.), ('q', 'out', 0, 3.))]


def test_probes_around_a_call_of_the_module_by_itself():
    "The module calls itself. A probe belongs to the running call, not to an outer call or to the last call."
    class Down(nn.Module):
        def __init__(self): super().__init__(); self.t = nn.Tanh()
        def forward(self, x, n=2):
            te.probe('before', x)
            y = self(x+1, n-1) if n else self.t(x)
            te.probe('after', x+10)
            return y
    model = Down()
    with torchEmber(model, ttypes='output') as te:
        for s in (0., 100.): model(torch.full((1,), s))
    rows = df(te).query('ttype=="probe"')
    assert list(zip(rows.step, rows.path, rows.tname, rows.call, rows['mean'], strict=True))==[(s, '', n, c, 100*s+c+d) for s in (0, 1)
        for n,c,d in (*(('before', c, 0) for c in (0, 1, 2)), *(('after', c, 10) for c in (2, 1, 0)))]


def test_marks_end_one_by_one_and_the_later_one_counts(tmp_path):
    t = emberTracker('r', tmp_path)
    for do in (lambda: t.mark(a=1, b=1), lambda: t.mark(b=2), lambda: t.unmark('a'), lambda: t.mark(c=3), t.unmark):
        do()
        t({'x': 0})
    t({'x': 0, 'a': 9})
    assert [{k: v for k,v in r.items() if k!='x'} for r in t.lines()]==[{'a': 1, 'b': 1}, {'a': 1, 'b': 2}, {'b': 2}, {'b': 2, 'c': 3}, {}, {'a': 9}]
    t.mark(a=1)
    t({'x': 0, 'a': 5})
    assert t.lines()[-1]=={'x': 0, 'a': 5} # a value in the row takes precedence over a mark


def test_the_closing_report_names_who_did_not_step():
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    one,two = torch.optim.SGD(model[0].parameters(), .1),torch.optim.Adam(model[1].parameters(), .1)
    te = torchEmber(model, optimizer=[one, two])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for _ in range(3): model[0](torch.ones(1, 2)).sum().backward(); one.step()
        report = te.close()
    assert [r for r in report['remarks'] if 'never stepped' in r]==['The optimizer Adam never stepped.']


def told(te, *columns, **where):
    rows = [r for r in lines(te) if all(r[k]==v for k,v in where.items())]
    return [tuple(r.get(c) for c in columns) for r in rows]


def test_a_probe_outside_of_all_passes_and_in_a_module_that_is_not_recorded():
    "The probe belongs to the root, or to the recorded module around it. In an unselected step it has no row."
    class Probes(nn.Module):
        def forward(self, x): return te.probe('inside', x)
    model = nn.Sequential(nn.Sequential(Probes()), nn.Tanh())
    with torchEmber(model, ttypes='output', exclude='0.0', every=2, stats=['mean']) as te:
        for i in range(3):
            te.probe('before', torch.full((1,), i+.5))
            model(torch.full((1,), float(i)))
    root,part = 'model(Sequential)','model(Sequential).0(Sequential)'
    assert told(te, 'step', 'module', 'tname', 'call', 'mean', ttype='probe')==[(0, root, 'before', 0, .5), (0, part, 'inside', 0, 0),
        # step 0 is still open at the second 'before' probe: step 1 begins with the next pass
        (0, root, 'before', 0, 1.5), (2, part, 'inside', 0, 2)]


def test_gradients_that_no_optimizer_has_told_of_are_read_where_te_step_is():
    "Gradients of an optimizer are read when it steps. Without its step, they are read in te.step()."
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    opts = [torch.optim.SGD(m.parameters(), 0.) for m in model]
    with torchEmber(model, optimizer=opts, ttypes='weight_grad', stats=['mean'], ends='step') as te:
        for s,who in enumerate((0, 1, 1, None)):
            for i,m in enumerate(model): m(torch.full((1, 1), 10.*s+i+1)).sum().backward()
            if who is not None: opts[who].step()
            for p in model.parameters(): p.grad.add_(.5) # change the gradients after the optimizer step
            te.step()
            for o in opts: o.zero_grad()
    want = [(s, i, 10*s+i+1+(.5 if i!=who else 0)) for s,who in enumerate((0, 1, 1, None)) for i in (0, 1)]
    assert sorted((s, int(m.split('.')[1][0]), v) for s,m,v in told(te, 'step', 'module', 'mean'))==want


def test_what_was_copied_for_an_update_that_did_not_come():
    "If an optimizer step is skipped or does not end, its copied weights are not used for a later update."
    model = nn.Linear(1, 1, bias=False)
    opt,s = torch.optim.SGD(model.parameters(), 1.),torch.amp.GradScaler('cpu', init_scale=2.)
    nn.init.ones_(model.weight)
    with torchEmber(model, optimizer=opt, scaler=s, ttypes=('update', 'output'), stats=['mean']) as te:
        for i,bad in enumerate((1, float('inf'), 1)):
            opt.zero_grad()
            s.scale(model(torch.ones(1, 1)).sum()*bad).backward()
            s.step(opt)
            s.update()
            with torch.no_grad(): model.weight.add_(10)
            if i: te.log_model() # measures the weights for the next step
        te.recorder.sources.updates.before(opt) # begins an optimizer step that never ends
    assert told(te, 'step', 'mean', ttype='update')==[(0, -1), (2, -1)]
    assert told(te, 'step', 'skipped', ttype='output')==[(0, None), (1, True), (2, None)]
    assert te.recorder.tally.skipped==1 and not te.recorder.sources.updates.copies


def test_the_closing_report_tells_how_long_a_step_waited():
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    one,two = torch.optim.SGD(model[0].parameters(), .1),torch.optim.Adam(model[1].parameters(), .1)
    def remarks(*turns):
        te = torchEmber(model, optimizer=[one, two], ttypes='input')
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            for a,b in turns:
                for n,m,o in ((a, model[0], one), (b, model[1], two)):
                    for _ in range(n): m(torch.ones(1, 1)).sum().backward(); o.step(); o.zero_grad()
            report = te.close()
        return report['steps'], [r for r in report['remarks'] if 'waited' in r]
    assert remarks((1, 1), (1, 1), (20, 0))==(3, ['Step 2 waited for Adam: it contains 20 steps of another optimizer.'])
    assert remarks((1, 1), (19, 0))==(2, []) and remarks((25, 1), (1, 1))==(2, [])


def test_steps_that_hold_more_rows_than_memory_should():
    "Rows that are written before the end of a step are merged with later rows, which replace them."
    model = nn.Sequential(nn.Linear(1, 1))
    opt = torch.optim.SGD(model.parameters(), 0.)
    te = torchEmber(model, optimizer=opt, ttypes='input', stats=['mean', 'numel'])
    te.recorder.pipe.most_rows = 3
    for s in range(2):
        for i in range(5): model(torch.full((1, 1), 10.*s+i))
        opt.step()
    te.close()
    assert [tuple(r) for r in df(te)[df(te).path==''][['step', 'call', 'mean', 'numel']].values]==[(0, 0, 2, 5), (1, 0, 12, 5)]
    assert len(te.t.log_path.read_text().splitlines())>4


def test_a_process_that_the_run_does_not_belong_to():
    "After a fork, the child process records nothing more, and its report says so."
    model = nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, optimizer=opt, overhead=.9)
    model(torch.ones(1, 1)).sum().backward(); opt.step()
    te.t.barrier()
    n = len(lines(te))
    te.recorder.leave()
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward(); opt.step()
        te.probe('x', torch.ones(1))
    assert not te.recorder.pipe.gate.on and not te.recorder.events.wants.compiled and te.recorder.buffer.rows.size==0
    assert te.close()['remarks']==['This process was forked from the process that records the run, so it records nothing.']
    assert len(lines(te))==n>0


@pytest.mark.parametrize('ends', ['optimizer', 'te.step'])
def test_the_model_is_logged_twice_in_a_step_and_after_an_evaluation(ends):
    "The last te.log_model() of a step counts. Its rows belong to the open step, and each parameter has one row."
    model = nn.Linear(1, 1, bias=False)
    opt = torch.optim.SGD(model.parameters(), 0.)
    te = torchEmber(model, ttypes=('input', 'weight', 'weight_grad'), stats=['mean'], **({'optimizer': opt} if ends=='optimizer' else {}))
    def now(v):
        with torch.no_grad(): model.weight.fill_(v)
    for s in range(2):
        now(10*s+1)
        model(torch.ones(1, 1)).sum().backward()
        for k in (2, 3): now(10*s+k); te.log_model()
        opt.step()
        if ends=='te.step': te.step()
        opt.zero_grad()
        model.eval()
        with torch.no_grad(): model(torch.full((1, 1), 5.))
        model.train()
    now(77)
    te.log_model()
    te.close()
    latest = {(r['step'], r['ttype'], r.get('phase')): r['mean'] for r in lines(te) if r['ttype']!='input'}
    assert {k: v for k,v in latest.items() if k[1]=='weight'}=={(0, 'weight', None): 3, (1, 'weight', None): 13, (2, 'weight', None): 77}
    assert [k for k in latest if k[1]=='weight_grad']==[(0, 'weight_grad', None), (1, 'weight_grad', None)]
    assert told(te, 'step', 'phase', 'mean', ttype='input')==[(s, *p) for s in (0, 1) for p in ((None, 1), ('eval', 5))]


def test_steps_without_gradients_are_counted_whoever_ends_them():
    "Passes that are joined to one step count as one step. A gradient in any of them counts for this step."
    def remark(passes, grads, known=False):
        model = nn.Linear(1, 1)
        te = torchEmber(model, ttypes=('weight_grad',))
        if known: te.step()
        for g in grads:
            for _ in range(passes): y = model(torch.ones(1, 1)).sum()
            if g: y.backward()
            te.step()
            model.zero_grad()
        report = te.close()
        return report['steps'], report['recorded'], [r for r in report['remarks'] if 'weight gradients' in r]
    for passes in (1, 3):
        for known in (False, True):
            assert remark(passes, (0, 1, 0), known)==(3, 3, ['2 of 3 recorded steps have no weight gradients.'])
            assert remark(passes, (1, 1), known)==(2, 2, [])


def test_what_comes_between_steps():
    "A backward after te.step() belongs to the next step. A probe outside of all passes sees values written through .data."
    model,x = nn.Linear(1, 1, bias=False),torch.ones(2)
    te = torchEmber(model, ttypes='output_grad', stats=['mean'])
    ys = [model(torch.ones(1, 1)) for _ in range(2)]
    ys[0].backward()
    te.step()
    (ys[1]*3).backward()
    te.step()
    te.probe('a', x)
    x.data.fill_(5.)
    te.probe('b', x)
    (model(torch.ones(1, 1))*4).backward()
    te.step()
    assert te.close()['steps']==3
    assert told(te, 'step', 'tname', 'mean')==[(0, 'output_0', 1), (1, 'output_0', 3), (2, 'a', 1), (2, 'b', 5), (2, 'output_0', 4)]


def test_the_first_value_that_is_not_finite_is_said_of_whatever_leaves(tmp_path):
    "One warning and the last remark name it, for a row or a logged number. Lines written by the user are not checked."
    for early in (False, True):
        model = nn.Linear(1, 1)
        with torch.no_grad(): model.weight.fill_(1.)
        te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), ttypes='output', stats=['mean'], home=tmp_path)
        te.t + {'step': 0, 'loss': math.nan}
        def one(x, model=model, te=te): model(torch.full((1, 1), x)).sum().backward(); te.recorder.watch.optimizers[0].step()
        with pytest.warns(EmberWarning) as said:
            one(math.inf if early else 1.)
            te.log(loss=math.nan)
            one(1.)
            te.recorder.add_rows(0, [ComputedRow(RowKey('model(Linear)', 'weight', 'weight_0', 'weight'), 0, 'float32', {'mean': math.nan, 'nan': 1})])
            remarks = te.close()['remarks']
        first = f"step 0, {'output_0 of the model (Linear) has 1 inf' if early else 'loss is nan'}"
        assert [str(w.message) for w in said if 'finite' in str(w.message)]==[
            f'torchember: {first}: the first value of this run that is not finite. Training continues. This warning is given once.']
        assert remarks[-1]==f'First value that is not finite: {first}.'
