"A plan says what a recorded step then writes, and leaves the model as it was"
import copy
import inspect
import random
import sys

import numpy as np
import pytest
import torch
from models import zoo
from torch import nn

from torchember import torchEmber

ALL = ('input', 'output', 'weight', 'weight_grad', 'input_grad', 'output_grad')


def places(rows): return sorted((r['module'], r['ttype'], r['tname'], r['call'], tuple(r['shape'])) for r in rows)
def planned(plan): return sorted((p.track.name, p.ttype, p.tname, p.call, p.shape) for p in plan.places)


@pytest.mark.parametrize('name', zoo)
def test_planned_rows_are_those_that_are_written(name):
    model,args,kwargs = zoo[name]()
    te = torchEmber(model, ttypes=('input', 'output', 'weight'))
    plan = te.plan(*args, **kwargs)
    assert not te.t.log_path.exists() and te.recorder.seen_steps==0 and te.mt_log==[]
    model(*args, **kwargs)
    te.t.barrier()
    assert planned(plan)==places(te.t.lines())
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
    last = te.t.latest_line_list()
    unused = {r for r in planned(plan) if r[1].endswith('put_grad')}-set(places(last)) # an output that the loss does not use has no gradient
    assert set(places(last))<=set(planned(plan)) and len(unused)<=(3 if name=='lstm' else 0), unused
    te.close()


def test_a_part_without_gradients_is_planned_without_them():
    "Though what goes into it requires one, for others"
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
    assert planned(plan)==places(te.t.lines())
    assert [(r['ttype'], r['tname']) for r in te.t.lines()]==[('output_grad', 'output_0')]*2
    assert set(te.t.df.path)=={'', 'a'}


def test_a_weight_of_two_modules_is_planned_where_it_is_written():
    "Its value at the module that returns first, its gradient at the one that is first in the model"
    class Tied(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = nn.Linear(3, 3, bias=False),nn.Linear(3, 3, bias=False); self.b.weight = self.a.weight
        def forward(self, x): return self.a(self.b(x)) # b returns first
    model,x = Tied(),torch.randn(2, 3)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    with torchEmber(model, optimizer=opt, ttypes=('weight', 'weight_grad')) as te:
        plan = te.plan(x)
        model(x).sum().backward(); opt.step()
    assert planned(plan)==places(te.t.lines())
    assert set(zip(te.t.df.path, te.t.df.ttype, strict=True))=={('a', 'weight_grad'), ('b', 'weight')}


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
    "Everything that a pass may change"
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
    assert len(te.t.lines()) and te.close()['steps']==1


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
    assert plan.rows==len(te.t.lines()) and [p.tname for p in plan.places if p.ttype=='probe']==['scores']
    assert any('functions of yours' in n for n in plan.notes)
    te.close()


def test_deeply_nested_modules():
    "The pass has the room that a recorded one has: a limit that suffices for the plain model is enough"
    model = nn.Linear(2, 2)
    for _ in range(250): model = nn.Sequential(model)
    x,limit = torch.randn(1, 2),sys.getrecursionlimit()
    enough = len(inspect.stack(0))+3*250
    try:
        while True: # the least that the plain model needs
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
    assert any('Lazy' in n for n in te.plan().notes)
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
