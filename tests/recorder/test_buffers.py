"The buffers of a model are measured at the end of each step, however the step ends, with and without torch.compile."
from tensor_rows import df
import pytest
import torch
from torch import nn

from torchember import torchEmber


def steps_of(te, ttype): return df(te).query(f'ttype=={ttype!r}').step.tolist()


def test_buffers_of_a_step_that_nobody_closes():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    te = torchEmber(model, ttypes=('output', 'buffer'))
    for _ in range(3): model(torch.randn(4, 3))
    te.disarm()
    assert steps_of(te, 'buffer')==[0]*3+[1]*3+[2]*3
    last = df(te).query('step==2 and tname=="running_mean"')['mean'].item()
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
    assert df(te)['mean'].tolist()==pytest.approx(want, rel=1e-6)
    assert df(te).step.unique().tolist()==[0, 2, 4]


def test_lazy_buffers():
    "Buffers of a lazy module have no values before the first pass of this module."
    model = nn.ModuleDict({'a': nn.Linear(3, 3), 'b': nn.LazyBatchNorm1d()})
    te = torchEmber(model, ttypes=('buffer',), on_error='raise')
    te.plan()
    for _ in range(2): model['a'](torch.randn(2, 3))
    model['b'](torch.randn(4, 3))
    te.close()
    assert set(df(te).tname)=={'running_mean', 'running_var', 'num_batches_tracked'}
