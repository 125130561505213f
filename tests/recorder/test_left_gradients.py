"Steps whose parameters still have gradients of an earlier step are counted, also in compiled and sharded models."
import sys

import pytest
import torch
from torch import distributed as dist
from torch import nn

from torchember import torchEmber
from torchember.health.diagnose import load_history


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8, 16),nn.Linear(16, 1)

    def forward(self, x): return self.b(self.a(x).relu())


class Weighted(Net):
    "A model with a parameter that weights the loss. The loss uses this parameter, and `forward` does not (Kendall et al. 2018)."
    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(1))


def train(clear=True, make=Net, wrap=lambda m: m, zeros=False, late=False, micro=1, logged=True, steps=8, **armed):
    """Train a model. Return the counts of left-over gradients: path and name -> (checked steps, steps with a left-over gradient).

    `late`: True to set gradients to zero between forward and backward; `micro`: number of backwards of a step"""
    torch.manual_seed(0)
    model = make()
    called = wrap(model)
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    te = torchEmber(model, opt, **armed)
    for i in range(steps*micro):
        def zero_grad(now, i=i):
            if clear and now==late and i%micro==0: opt.zero_grad(set_to_none=not zeros)
        x = torch.randn(32, 8)
        zero_grad(False)
        loss = (called(x).squeeze(-1)-x.sum(1)).square().mean()/micro
        if make is Weighted: loss = loss*torch.exp(-model.log_variance).sum()+model.log_variance.sum()
        te.log(**{'loss': loss if logged else loss.item(), 'half': loss/2})
        zero_grad(True)
        loss.backward()
        if i%micro==micro-1: opt.step()
    te.close()
    return {'.'.join(c[:2]): tuple(c[2:4]) for c in load_history(te.fname).facts.get('left_gradients', [])}


def compiled(model): return torch.compile(model, backend='eager')


names = 'a.weight','a.bias','b.weight','b.bias'
ways = [dict(), dict(zeros=True), dict(late=True), dict(zeros=True, late=True, micro=2)]


@pytest.mark.parametrize('way', ways, ids=str)
@pytest.mark.parametrize('make', [Net, Weighted])
def test_cleared_gradients(way, make):
    "The parameter `log_variance` of the loss gets its gradient before the backward reaches the model, so it is not checked."
    for logged in (True, False): assert train(make=make, logged=logged, **way)==dict.fromkeys(names, (6, 0))


def test_left_gradients(): assert train(False)==train(False, make=Weighted)==train(False, micro=2)==dict.fromkeys(names, (6, 6))


def test_gradients_from_before_the_run_are_left():
    def with_gradients():
        model = Net()
        model(torch.ones(1, 8)).sum().backward()
        return model
    assert train(False, make=with_gradients)==dict.fromkeys(names, (6, 6))


@pytest.mark.slow
@pytest.mark.parametrize('way', ways, ids=str)
def test_compiled_models(way):
    "te.log puts a hook on the loss tensor, which reports the backward. Without a logged loss tensor, nothing is counted."
    assert train(wrap=compiled, **way)==dict.fromkeys(names, (6, 0))
    assert train(False, wrap=compiled, **way)==dict.fromkeys(names, (6, 6))


def test_compiled_models_without_a_logged_loss():
    assert train(False, wrap=compiled, logged=False, steps=4)=={}


@pytest.fixture
def group(tmp_path, monkeypatch):
    # restore sys.excepthook after the test, because torch replaces it
    monkeypatch.setattr('sys.excepthook', sys.excepthook)
    dist.init_process_group('gloo', store=dist.FileStore(str(tmp_path/'store'), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason='torch without distributed')
@pytest.mark.parametrize('way', ways, ids=str)
def test_sharded_models(way, group):
    from torch.distributed.fsdp import fully_shard
    def shard(model):
        for m in (model.a, model.b, model): fully_shard(m)
        return model
    assert train(wrap=shard, **way)==dict.fromkeys(names, (6, 0))
    assert train(False, wrap=shard, **way)==dict.fromkeys(names, (6, 6))


def test_models_of_opacus_are_not_checked():
    "Opacus stores gradients in the attribute `grad_sample`, and sets `grad` only in its optimizer."
    class Private(Net):
        def __init__(self):
            super().__init__()
            self.a.weight.grad_sample = None
    assert train(False, make=Private)=={}
