"What surprised a reader of the recorder: each was wrong once"
import os
import signal
import warnings

import pytest
import torch
from torch import nn

from torchember import torchEmber
from torchember.measure.kernels import Unmeasurable
from torchember.measure.tap import Arena, observe


def steps_of(te, ttype): return te.t.df.query(f'ttype=={ttype!r}').step.tolist()


@pytest.mark.parametrize('n', [64, 1<<21])
def test_a_tensor_without_memory_is_not_read(n):
    "Its storage was freed, as sharding does: there is nothing at its address"
    arena,x = Arena(),torch.randn(n)
    tap = arena.tap('x')
    observe(x, tap)
    x.untyped_storage().resize_(0)
    for lost in (x, torch._efficientzerotensor(n)):
        with pytest.raises(Unmeasurable, match='no memory'): observe(lost, tap)
    assert len(arena.take())==1


def test_memory_that_is_put_under_a_tensor():
    "`x.data = y` makes it another tensor, without moving its version"
    arena,x = Arena(),torch.zeros(3)
    tap = arena.tap('x', ['mean', 'shape'])
    observe(x, tap)
    x.data = torch.full((7,), 5.)
    observe(x, tap)
    assert [r['stats'] for r in arena.take().rows()]==[{'mean': 0., 'shape': [3]}, {'mean': 5., 'shape': [7]}]


class Swaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.swap,self.w = nn.Identity(),nn.Identity(),False,nn.Parameter(torch.ones(1))

    def forward(self, x):
        for m,y in ((self.b, x*100), (self.a, x)) if self.swap else ((self.a, x), (self.b, x*100)): m(y)
        return x*self.w


def test_armed_anew_in_an_open_step():
    "What was measured before merges with nothing: the taps are others"
    model = Swaps()
    opt = torch.optim.SGD(model.parameters(), lr=0.)
    te = torchEmber(model, optimizer=opt, ttypes=('input',))
    model(torch.ones(2)).sum().backward()
    te.rearm()
    model.swap = True
    model(torch.ones(2)).sum().backward()
    opt.step()
    te.close()
    assert te.t.df.groupby('module')['mean'].unique().to_dict()=={'model(Swaps)': [1], 'model(Swaps).a(Identity)': [1], 'model(Swaps).b(Identity)': [100]}


def test_ctrl_c_at_the_end_of_a_step():
    "What the step has is written under its number"
    model = nn.Linear(1, 1)
    model.register_buffer('b', torch.ones(1))
    te,calls = torchEmber(model, ttypes=('input', 'buffer')),[]
    @te.how_record('buffer')
    def interrupted(x):
        calls.append(1)
        if len(calls)==1: os.kill(os.getpid(), signal.SIGINT); sum(range(10**6))
        return {'n': 1}
    for i in range(4):
        try: model(torch.full((1, 1), float(i)))
        except KeyboardInterrupt: assert i==1
    te.close()
    got = te.t.df.query('ttype=="input"')[['step', 'mean']].values.tolist()
    assert got[0]==[0, 0] and [m for _,m in got] in ([0, 2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize('read', [False, True])
def test_a_probe_that_is_asked_several_times(read):
    "Each has its row, whether somebody reads in between or not"
    class Probes(nn.Module):
        def __init__(self): super().__init__(); self.fc = nn.Linear(1, 1)
        def forward(self, x):
            for i in range(3): te.probe('h', torch.full((2,), float(i)))
            if read: assert len(te.t.df)
            te.probe('h', torch.full((2,), 9.))
            return self.fc(x)
    te = torchEmber(Probes(), ttypes=('output',))
    te.model(torch.ones(1, 1))
    te.close()
    assert te.t.df.query('ttype=="probe"')['mean'].tolist()==[0, 1, 2, 9]


def test_buffers_of_a_step_that_nobody_closes():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    te = torchEmber(model, ttypes=('output', 'buffer'))
    for _ in range(3): model(torch.randn(4, 3))
    te.disarm()
    assert steps_of(te, 'buffer')==[0]*3+[1]*3+[2]*3
    last = te.t.df.query('step==2 and tname=="running_mean"')['mean'].item()
    assert last==pytest.approx(model[1].running_mean.double().mean().item(), rel=1e-6)


@pytest.mark.parametrize('backend', ['eager', 'aot_eager', None])
def test_buffers_are_those_at_the_end_of_the_step(backend):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    f = torch.compile(model, backend=backend) if backend else model
    te,want = torchEmber(model, optimizer=opt, ttypes=('buffer',), every=2, stats=['mean']),[]
    for i in range(5):
        for _ in range(2): f(torch.randn(4, 3)).sum().backward()
        opt.step(); opt.zero_grad()
        if i%2==0: want += [b.double().mean().item() for b in model.buffers()]
    model.eval()(torch.randn(4, 3))
    te.close()
    assert te.t.df['mean'].tolist()==pytest.approx(want, rel=1e-6)
    assert te.t.df.step.unique().tolist()==[0, 2, 4]


def test_lazy_buffers():
    "They have no values before their first pass"
    model = nn.ModuleDict({'a': nn.Linear(3, 3), 'b': nn.LazyBatchNorm1d()})
    te = torchEmber(model, ttypes=('buffer',), on_error='raise')
    te.plan()
    for _ in range(2): model['a'](torch.randn(2, 3))
    model['b'](torch.randn(4, 3))
    te.close()
    assert set(te.t.df.tname)=={'running_mean', 'running_var', 'num_batches_tracked'}


@pytest.mark.parametrize('read', [False, True])
def test_ratio_of_an_update(read):
    "Reading in between takes nothing from it"
    model = nn.Linear(2, 1, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te,want = torchEmber(model, optimizer=opt, ttypes=('weight', 'update')),[]
    for _ in range(3):
        w = model.weight.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        if read: assert len(te.t.df)
        opt.step(); opt.zero_grad()
        want.append(((model.weight-w).norm()/w.norm()).item())
    te.close()
    assert te.t.df.ratio.dropna().tolist()==pytest.approx(want, rel=1e-5)


def test_a_custom_row_is_replaced_by_the_next():
    model = nn.Linear(2, 1, bias=False)
    opt = torch.optim.Adam(model.parameters())
    te = torchEmber(model, optimizer=opt, ttypes=('optimizer',))
    te.how_record('optimizer')(lambda t: {'s': float(t.sum())})
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for k in range(2):
            model(torch.ones(1, 2)).sum().backward()
            if k: te.log_model()
            opt.step()
    te.close()
    assert te.t.df.query('ttype=="optimizer"')[['step', 'tname']].values.tolist()==[[s, n] for s in (0, 1) for n in ('exp_avg_0', 'exp_avg_sq_0')]
