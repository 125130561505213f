"te.plan() lists the rows that a recorded step will have, and leaves the model unchanged."
from tensor_rows import df, is_computed, lines
import copy
import inspect
import random
import sys
from types import SimpleNamespace as Some

import numpy as np
import pytest
import torch
from models import zoo
from torch import nn

from torchember import torchEmber
from torchember.recorder import plan
from torchember.recorder.plan import PlannedTensor, Plan, ReadingTime, ExamplePass, expected_states
from torchember.recorder.process import open_recorders

ALL = ('input', 'output', 'weight', 'weight_grad', 'input_grad', 'output_grad')


def places(rows): return sorted((r['module'], r['ttype'], r['tname'], r['call'], tuple(r['shape'])) for r in rows)
def planned(plan): return sorted((p.track.name, p.ttype, p.tname, p.call, p.shape) for p in plan.places)


@pytest.mark.parametrize('name', zoo)
def test_planned_rows_are_those_that_are_written(name):
    model,args,kwargs = zoo[name]()
    te = torchEmber(model, ttypes=('input', 'output', 'weight'))
    plan = te.plan(*args, **kwargs)
    assert not te.t.log_path.exists() and te.recorder.tally.steps==0 and te.mt_log==[]
    model(*args, **kwargs)
    te.t.barrier()
    assert planned(plan)==places(lines(te))
    assert abs(plan.bytes/te.t.log_path.stat().st_size-1)<.2
    again = te.plan()
    assert again.rows==plan.rows and 'last recorded pass' in again.notes[0]
    te.close()


@pytest.mark.parametrize('name', ['mlp', 'residual', 'lstm', 'encoder'])
@pytest.mark.parametrize('how', [torch.optim.Adam, torch.optim.SGD])
def test_gradients_states_and_updates(name, how):
    model,args,kwargs = zoo[name]()
    opt = how(model.parameters(), lr=.01)
    te = torchEmber(model, optimizer=opt, ttypes=(*ALL, 'optimizer', 'update'))
    plan = te.plan(*args, **kwargs)
    for _ in range(2):
        out = model(*args, **kwargs)
        (out if isinstance(out, torch.Tensor) else out[0]).square().sum().backward()
        opt.step()
        opt.zero_grad()
    last = [r for r in te.t.latest_line_list() if not is_computed(r)]
    unused = {r for r in planned(plan) if r[1].endswith('put_grad')}-set(places(last)) # an output that the loss does not use has no gradient
    assert set(places(last))<=set(planned(plan)) and len(unused)<=(3 if name=='lstm' else 0), unused
    te.close()


def test_a_part_without_gradients_is_planned_without_them():
    "Part `b` runs under no_grad, so no gradient rows are planned for it, although its input requires a gradient."
    class Partly(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = nn.Linear(3, 3),nn.Linear(3, 3)
        def forward(self, x):
            h = self.a(x)
            with torch.no_grad(): g = self.b(h)
            return h+g
    model,x = Partly(),torch.randn(2, 3)
    with torchEmber(model, ttypes=('input_grad', 'output_grad')) as te:
        plan = te.plan(x)
        model(x).sum().backward()
    assert planned(plan)==places(lines(te))
    assert [(r['ttype'], r['tname']) for r in lines(te)]==[('output_grad', 'output_0')]*2
    assert set(df(te).path)=={'', 'a'}


def test_a_weight_of_two_modules_is_planned_where_it_is_written():
    "The row of a tied weight belongs to the module that returns first, and its gradient row to the first module of the model."
    class Tied(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = nn.Linear(3, 3, bias=False),nn.Linear(3, 3, bias=False); self.b.weight = self.a.weight
        def forward(self, x): return self.a(self.b(x)) # b is called first, so b returns first
    model,x = Tied(),torch.randn(2, 3)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    with torchEmber(model, optimizer=opt, ttypes=('weight', 'weight_grad')) as te:
        plan = te.plan(x)
        model(x).sum().backward(); opt.step()
    assert planned(plan)==places(lines(te))
    assert set(zip(df(te).path, df(te).ttype, strict=True))=={('a', 'weight_grad'), ('b', 'weight')}


def test_without_a_pass_weights_are_exact_and_the_rest_is_assumed():
    model,args,_ = zoo['mlp']()
    te = torchEmber(model, ttypes=ALL[:4])
    plan = te.plan()
    assert any('assumed' in n for n in plan.notes)
    for p in plan.places: assert (p.shape is None)==(p.ttype in ('input', 'output'))
    exact = te.plan(*args)
    assert plan.rows==exact.rows
    assert abs(plan.bytes/exact.bytes-1)<.1


class Keeps(nn.Module):
    "A module whose pass changes buffers, attributes, a cache, and the states of random generators."
    def __init__(self):
        super().__init__()
        self.norm,self.drop,self.calls,self.cache = nn.BatchNorm1d(4),nn.Dropout(),0,None
        self.register_buffer('seen', torch.zeros(()))
        self.linear = nn.utils.spectral_norm(nn.Linear(4, 4))

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        self.cache = x+random.random()+np.random.rand()
        if x.sum().item()>1e9: raise ValueError
        return self.drop(self.linear(self.norm(x)))


@pytest.mark.parametrize('fails', [False, True])
@pytest.mark.parametrize('ttypes', [ALL[:4], ALL])
def test_the_model_is_as_before(fails, ttypes):
    model = Keeps()
    te = torchEmber(model, ttypes=ttypes)
    model.norm.eval()
    sd,states = copy.deepcopy(model.state_dict()),(torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    held = {n: dict(m.__dict__) for n,m in model.named_modules()}
    x = torch.full((3, 4), 1e12) if fails else torch.randn(3, 4)
    states = (torch.get_rng_state(), *states[1:])
    if fails:
        with pytest.raises(ValueError): te.plan(x)
    else: te.plan(x)
    assert all(torch.equal(v, sd[k]) for k,v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate()==states[1] and np.random.get_state()[1].tolist()==states[2]
    for n,m in model.named_modules():
        assert m.__dict__.keys()==held[n].keys() and all(m.__dict__[k] is v for k,v in held[n].items()), n
    assert all(p.grad is None for p in model.parameters())
    assert not model.norm.training and model.calls==0 and model.cache is None
    model(torch.randn(3, 4))
    assert len(lines(te)) and te.close()['steps']==1


def test_a_compiled_model_is_not_compiled_for_a_plan():
    from torch._dynamo.testing import CompileCounter
    torch._dynamo.reset()
    count = CompileCounter()
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend=count))
    te = torchEmber(torch.compile(model, backend=count))
    assert te.plan(torch.randn(3, 2)).rows==6+4+4 and count.frame_count==0
    te.model(torch.randn(3, 2))
    assert count.frame_count>0
    te.close()


def test_probes_variables_and_functions_of_ones_own():
    class Scores(nn.Module):
        def __init__(self): super().__init__(); self.q = nn.Linear(4, 4)
        def forward(self, x): return te.probe('scores', self.q(x))
    model = Scores()
    te = torchEmber(model)
    te.watch_tensor('temperature', torch.tensor(2.))
    te.how_record('input')(lambda x: {'n': x.numel()})
    plan = te.plan(torch.randn(3, 4))
    model(torch.randn(3, 4)).sum().backward()
    te.step()
    assert plan.rows==len(lines(te)) and [p.tname for p in plan.places if p.ttype=='probe']==['scores']
    assert any('your own functions' in n for n in plan.notes)
    te.close()


def test_deeply_nested_modules():
    "te.plan() needs no higher recursion limit than the model itself."
    model = nn.Linear(2, 2)
    for _ in range(250): model = nn.Sequential(model)
    x,limit = torch.randn(1, 2),sys.getrecursionlimit()
    enough = len(inspect.stack(0))+3*250
    try:
        while True: # find the smallest recursion limit that the plain model needs
            sys.setrecursionlimit(enough)
            try: model(x); break
            except RecursionError: enough += 20
        te = torchEmber(model)
        assert te.plan(x).rows==2*251+4
        assert sys.getrecursionlimit()==enough
    finally: sys.setrecursionlimit(limit)
    te.disarm()


def test_disarmed_and_lazy_models():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    te = torchEmber(model)
    with pytest.raises(ValueError, match='lazy'): te.plan(torch.randn(2, 2))
    assert any('lazy parameters' in n for n in te.plan().notes)
    model(torch.randn(2, 2))
    te.disarm()
    before = [dict(m.__dict__) for m in model.modules()]
    assert te.plan(torch.randn(2, 2)).rows==3+3+4+4
    assert [m.__dict__.keys() for m in model.modules()]==[b.keys() for b in before]


def test_it_shows_itself():
    te = torchEmber(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    plan = te.plan(torch.randn(3, 2))
    assert repr(plan).startswith('Plan for Sequential: 10 rows, ') and 'weight_grad' in repr(plan) and '<table' in plan._repr_html_()
    assert len(plan.df)==10 and {'path', 'ttype', 'tname', 'shape', 'dtype', 'row_bytes', 'seconds'}<=set(plan.df.columns)
    assert plan.seconds>0


def test_a_rehearsal_notes_calls_inside_of_calls_and_what_is_read_anew():
    "Calls are counted per module, also if a nested call fails. A tensor is read again only if it was written to."
    class At:
        def __init__(self, track): self.track = track
    root,a,b = map(At, ('root', 'a', 'b'))
    h = ExamplePass(('input', 'output', 'input_grad'), [root])
    x,y = torch.ones(2),torch.ones(3, requires_grad=True)
    h.probe_here('p', x)
    h.call_begins(a, [('x', x), ('y', y)])
    h.call_begins(a, [('x', x)])
    h.call_begins(b, [('x', x.add_(1))])
    h.probe_here('q', y)
    h.call_fails(b)
    h.call_ends(a, [('o', x)])
    h.probe_here('r', torch.ones(2))
    with torch.no_grad(): h.call_ends(a, [('o', y)])
    h.call_begins(b, [('y', y.detach())])
    h.call_ends(b, [])
    assert [(p.track, p.ttype, p.tname, p.call, p.read) for p in h.places]==[('root', 'probe', 'p', 0, True), ('a', 'input', 'x', 0, False),
        ('a', 'input', 'y', 0, True), ('a', 'input_grad', 'y', 0, True), ('a', 'input', 'x', 1, False), ('b', 'input', 'x', 0, True),
        ('b', 'probe', 'q', 0, False), ('a', 'output', 'o', 1, False), ('a', 'probe', 'r', 0, True), ('a', 'output', 'o', 0, False),
        ('b', 'input', 'y', 1, True)]
    assert h.ended==[a, a, b] and h.states==[root]


def test_what_is_known_of_the_last_pass_is_planned_call_by_call():
    "After a pass, its calls are planned. Before the first pass, one call of each recorded module is assumed."
    class Twice(nn.Module):
        def __init__(self): super().__init__(); self.l,self.idle,self.list = nn.Linear(3, 3),nn.Tanh(),nn.ModuleList([nn.Identity()])
        def forward(self, x): return self.l(self.l(x)), x
    model,x = Twice(),torch.randn(2, 3)
    te = torchEmber(model, ttypes=('input', 'output', 'output_grad'), exclude='list.0')
    def flow(plan): return [(p.track.path, p.ttype, p.tname, p.call, p.shape, p.read) for p in plan.places]
    def of(path, t, n, c, shape, read=True): return path, t, n, c, shape, read
    assert flow(te.plan())==[of(p, t, 'input' if t=='input' else 'output_0', 0, None, t=='output_grad' or (t=='input')==(p=='')) for p in ('', 'l', 'idle')
        for t in ('input', 'output', 'output_grad')]
    model(x)
    s = (2, 3)
    assert flow(te.plan())==[of('', 'input', 'x', 0, s), of('', 'output', 'output_0', 0, s, False), of('', 'output', 'output_1', 0, s, False),
        of('', 'output_grad', 'output_0', 0, s), of('', 'output_grad', 'output_1', 0, s), *(of('l', 'input', 'input', c, s, False) for c in (0, 1)),
        *(of('l', 'output', 'output_0', c, s) for c in (0, 1)), *(of('l', 'output_grad', 'output_0', c, s) for c in (0, 1))]
    te.close()


def test_states_of_two_optimizers_before_and_after_their_first_step():
    "Each optimizer has its own parameters and options. States that already exist are used as they are."
    model = nn.ModuleList([nn.Linear(2, 3, bias=False), nn.Linear(4, 1)])
    one,two = torch.optim.Adam(model[0].parameters(), amsgrad=True),torch.optim.SGD(model[1].parameters(), .1, momentum=.9)
    w = model[0].weight
    assert expected_states(one, w)==dict.fromkeys(('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'), (3, 2))
    assert expected_states(torch.optim.SGD([w], .1), w)=={} and expected_states(torch.optim.Adagrad([w]), w)=={'sum': (3, 2)}
    te = torchEmber(model, optimizer=[one, two], ttypes=('optimizer', 'update'))
    want = sorted([('0', 'update', 'update_0', 'weight', (3, 2)), *(('0', 'optimizer', f'{s}_0', 'weight', (3, 2)) for s in expected_states(one, w)),
        *(r for i,(n,s) in enumerate((('weight', (1, 4)), ('bias', (1,)))) for r in
            (('1', 'update', f'update_{i}', n, s), ('1', 'optimizer', f'momentum_buffer_{i}', n, s)))])
    for _ in range(2):
        plan = te.plan()
        assert sorted((p.track.path, p.ttype, p.tname, p.pname, p.shape) for p in plan.places)==want and plan.notes==[]
        model[0](torch.ones(1, 2)).sum().backward(); model[1](torch.ones(1, 4)).sum().backward()
        one.step(); two.step()
    one.state[w]['odd'] = torch.ones(7)
    assert expected_states(one, w)['odd']==(7,)
    class Mine(torch.optim.SGD): pass
    assert expected_states(Mine([w], .1), w) is None
    te.close()


def test_time_to_read_is_measured_once_for_each_kind(monkeypatch):
    asked = []
    def curve(stats, dtype, device, most):
        asked.append((stats, dtype, device, most))
        if dtype is torch.int8: raise NotImplementedError
        return [16, 100], [1., 3.]
    monkeypatch.setattr(plan, 'time_reading', curve)
    r = ReadingTime(50)
    assert [r(*k, n) for k in ((('a',), torch.float32, 'cpu'), (('b',), torch.float32, 'cpu'), (('a',), torch.float64, 'cpu'), (('a',), torch.int8, 'cpu'))
        for n in (4, 16, 58, 100, 184)]==[0., 0., 1., 2., 4.]*3+[0.]*5
    assert asked==[((s,), d, 'cpu', 50) for s,d in (('a', torch.float32), ('b', torch.float32), ('a', torch.float64), ('a', torch.int8))]
    # a larger tensor never has a shorter estimated time
    assert plan.interpolate([16], [2.], 999)==2. and plan.interpolate([16, 100], [3., 1.], 200)==1.


def test_totals_of_a_plan_by_hand():
    here,there = (Some(name=n, path=n) for n in 'ab')
    places = [PlannedTensor(here, 'input', 'x', None, 0, (4, 2), torch.float32, True),
        PlannedTensor(there, 'weight', 'weight_0', 'w', 0, (3,), torch.float64, True),
        PlannedTensor(there, 'input', 'y', None, 1, None, None, True), PlannedTensor(here, 'weight', 'weight_0', 'w', 0, (), torch.bfloat16, True)]
    p = Plan('N', places, [10, 20, 30, 40], [1., 4., 2., 3.])
    assert (p.rows, p.bytes, p.seconds, p.notes)==(4, 100, 10., [])
    assert p.kinds()==[('input', 2, None, 40, 3.), ('weight', 2, 26, 60, 7.)]
    assert p.largest()==[(4., places[1]), (3., places[3]), (1., places[0])] and p.largest(1)==[(4., places[1])]
    assert p.df.to_dict('records')[1]==dict(module='b', path='b', ttype='weight', tname='weight_0', pname='w', call=0, shape=[3], dtype='float64',
        tensor_bytes=24, row_bytes=20, seconds=4.)
    assert p.df.call.tolist()==[0, 0, 1, 0] and p.df.row_bytes.tolist()==[10, 20, 30, 40] and p.df.seconds.tolist()==[1., 4., 2., 3.]
    assert p.table()==[('ttype', 'rows', 'tensors', 'written', 'time'), ('input', '2', '?', '40 bytes', '3 s'), ('weight', '2', '26 bytes', '60 bytes', '7 s')]


def test_a_plan_knows_marks_and_takes_nothing_away():
    "Marks make the planned rows longer. te.plan() records nothing, leaves no recorder open, and does not arm a disarmed ember."
    model,x = nn.Linear(2, 2),torch.ones(1, 2)
    te = torchEmber(model, ttypes=('input', 'output'))
    te.plan(x) # the first plan also runs measurements that are made only once, with their own recorder
    open_before = set(open_recorders)
    one = te.plan(x)
    te.mark(epoch=3)
    two = te.plan(x)
    assert [b-a for a,b in zip(one.lines, two.lines, strict=True)]==[len(',"epoch":3')]*2 and set(open_recorders)==open_before
    te.disarm()
    assert te.plan(x).rows==2 and not te.armed and '_torchember' not in vars(model)
    other = torchEmber(model)
    with pytest.raises(RuntimeError, match='another torchEmber'): te.plan(x)
    assert other.armed
    model(x)
    te.close(); other.close()
    assert len(lines(te))==0 and len(lines(other))==4
