"Tests with Opacus, which computes the final gradients inside `step`, and whose memory manager makes most steps virtual"
import warnings

import pytest
import torch
import torch.nn.functional as F
from looped import ALL, Net, grads, heard, said_of_parameters, same, seeded, steps, table, training, weights
from oracle import says

from torchember import EmberWarning, torchEmber


@pytest.fixture
def private():
    "Return a function: model -> model, optimizer and loader for differentially private training."
    opacus = pytest.importorskip('opacus')
    def make(model, size=4):
        g = torch.Generator().manual_seed(2)
        data = torch.utils.data.TensorDataset(torch.randn(12, 4, generator=g), torch.randint(3, (12,), generator=g))
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return opacus.PrivacyEngine().make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), .1, momentum=.9), noise_multiplier=1.,
                data_loader=torch.utils.data.DataLoader(data, batch_size=size), max_grad_norm=.5, poisson_sampling=False,
                noise_generator=torch.Generator().manual_seed(3))
    return make


def train(model, opt, loader):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for x,y in loader:
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()


def virtual(opt, loader, size):
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    return BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=opt)


class Inner:
    "Stores the gradients that the inner optimizer uses, and the updates"
    def __init__(self, model, opt):
        self.grad,self.before,self.after = [],[],[]
        opt.register_step_pre_hook(lambda *a: (self.grad.append(grads(model)), self.before.append(weights(model)))[:0] or None)
        opt.register_step_post_hook(lambda *a: self.after.append(weights(model)))

    def told_by(self, te):
        said_of_parameters(te, 'weight_grad', self.grad)
        said_of_parameters(te, 'weight', self.before)
        said_of_parameters(te, 'update', [{n: b[n]-a[n] for n in a} for a,b in zip(self.before, self.after, strict=True)])
        assert steps(te)==list(range(len(self.grad)))


@pytest.mark.parametrize('given', ['outer', 'inner'])
@pytest.mark.parametrize('armed', ['wrapped', 'inside'])
def test_private_training(private, given, armed):
    "The rows have the gradients after clipping and noise."
    net = seeded()
    model,opt,loader = private(net)
    watched = model if armed=='wrapped' else net
    inner = Inner(watched, opt.original_optimizer)
    with heard() as said, torchEmber(watched, optimizer=opt if given=='outer' else opt.original_optimizer, ttypes=ALL) as te: train(model, opt, loader)
    inner.told_by(te)
    assert not said and len(inner.grad)==3
    assert len([k for k in table(te, 'optimizer') if k[3].startswith('momentum_buffer')])==12


@pytest.mark.parametrize('given', ['outer', 'inner'])
def test_virtual_steps(private, given):
    "A virtual step of the memory manager only accumulates gradients and is no step of the run. Rows belong to the whole batch."
    net = seeded()
    model,opt,loader = private(net, 6)
    inner = Inner(model, opt.original_optimizer)
    with torchEmber(model, optimizer=opt if given=='outer' else opt.original_optimizer, ttypes=ALL) as te:
        with virtual(opt, loader, 2) as physical: train(model, opt, physical)
    inner.told_by(te)
    assert steps(te)==[0, 1]
    for s,(x,_) in enumerate(loader):
        [r] = table(te, 'input', step=s, tname='x', module='model(GradSampleModule)._module(Net)').values()
        says({**r, 'shape': x.shape}, x)


@pytest.mark.parametrize('given', ['outer', 'inner'])
def test_validation_in_between(private, given):
    net = seeded()
    model,opt,loader = private(net)
    with torchEmber(model, optimizer=opt if given=='outer' else opt.original_optimizer, ttypes=('input', 'weight_grad')) as te:
        for _ in range(2):
            train(model, opt, loader)
            model.eval()
            with torch.no_grad(): model(torch.full((2, 4), 100.))
            model.train()
    other = seeded()
    model,opt,loader = private(other)
    with torchEmber(model, optimizer=opt, ttypes=('input', 'weight_grad')) as plain: [train(model, opt, loader) for _ in range(2)]
    same(training(te), table(plain))
    assert {r['step'] for r in table(te, phase='eval').values()}=={2, 5}


def test_the_training_is_the_same(private):
    "The training equals a training without recording bit for bit, and all patches are removed at the end."
    ends = []
    for armed in (False, True):
        net = seeded()
        model,opt,loader = private(net)
        te = torchEmber(model, optimizer=opt, ttypes=ALL) if armed else None
        train(model, opt, loader)
        if te: te.close()
        ends.append((weights(net), [set(x.__dict__) for x in (*model.modules(), opt, opt.original_optimizer)]))
    assert all(torch.equal(ends[0][0][n], w) for n,w in ends[1][0].items()) and ends[0][1]==ends[1][1]
    assert not any(opt.original_optimizer.__dict__[k] for k in ('_optimizer_step_pre_hooks', '_optimizer_step_post_hooks'))


def test_an_optimizer_of_another_model(private):
    _,opt,_ = private(seeded())
    with pytest.warns(EmberWarning, match='trains none of the'): torchEmber(Net(), optimizer=opt).close()
