"Tests with skorch, which steps with a closure and validates after each epoch: rows equal those of a plain loop"
import functools

import numpy as np
import pytest
import torch
from looped import ALL, Net, batches, by_hand, grads, heard, loss_of, momentum, said_of_parameters, same, seeded, steps, table, training
from torch import nn

from torchember import torchEmber


@functools.cache
def kinds():
    "Import the classes in the fixture, because the import takes seconds."
    skorch = pytest.importorskip('skorch')
    class Arm(skorch.callbacks.Callback):
        def __init__(self, **options): self.options = options
        def get_params(self, deep=True): return self.options
        def on_train_begin(self, net, **more): self.te,self.seen = torchEmber(net.module_, optimizer=net.optimizer_, **self.options),{}
        # If called several times for a batch, the last gradients stay
        def on_grad_computed(self, net, **more): self.seen[len(net.history[-1, 'batches'])] = grads(net.module_)
        def on_train_end(self, net, **more): self.te.close()
    return skorch, Arm


def fit(arm, callbacks=(), data=None, max_epochs=1, **options):
    "Train with a callback that arms the model, and return the ember."
    skorch,_ = kinds()
    data = batches() if data is None else data
    xs,ys = (np.concatenate([b[i].numpy() for b in data]) for i in (0, 1))
    options = {**dict(optimizer=torch.optim.SGD, optimizer__momentum=.9, train_split=None), **options}
    if options['optimizer'] is not torch.optim.SGD: del options['optimizer__momentum']
    torch.manual_seed(0)
    with heard() as said:
        skorch.NeuralNetClassifier(Net, criterion=nn.CrossEntropyLoss, lr=.1, batch_size=5, max_epochs=max_epochs, iterator_train__shuffle=False, verbose=0,
            callbacks=[('arm', arm), *callbacks], **options).fit(xs, ys)
    assert not said, said
    return arm.te


def plain(data, clip=None):
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        for x,y in data:
            loss_of(model, x, y).backward()
            if clip: nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
    return te


def test_a_callback_that_arms():
    arm = kinds()[1](ttypes=ALL)
    te = fit(arm)
    same(table(te), table(plain(batches())))
    said_of_parameters(te, 'weight_grad', arm.seen.values())


def test_validation_in_between():
    "Rows of a validation belong to the step before it. The training has two epochs."
    Arm = kinds()[1]
    from skorch.helper import predefined_split
    x,y = torch.full((2, 4), 100.),torch.tensor([0, 1])
    te = fit(Arm(ttypes=ALL), max_epochs=2, train_split=predefined_split(torch.utils.data.TensorDataset(x, y)))
    same(training(te), table(plain(batches()*2)))
    rows = [r for r in table(te, 'input', phase='eval').values() if r['module']=='model(Net)']
    assert [(r['step'], r['min'], r['max']) for r in rows]==[(3, 100, 100), (7, 100, 100)]


def test_gradients_are_clipped_in_the_closure():
    skorch,Arm = kinds()
    te = fit(Arm(ttypes=ALL), [('clip', skorch.callbacks.GradientNormClipping(.01))])
    same(table(te), table(plain(batches(), .01)))


def test_lbfgs():
    "If an optimizer calls its closure several times, the gradients of the last call are recorded."
    arm = kinds()[1](ttypes=('weight', 'weight_grad'))
    te = fit(arm, data=batches(3), optimizer=torch.optim.LBFGS, optimizer__max_iter=3)
    assert steps(te)==[0, 1, 2]
    said_of_parameters(te, 'weight_grad', arm.seen.values())


def test_the_ember_of_an_earlier_fit():
    "A second fit creates a new model with a new run, and the earlier model is no longer armed."
    Arm = kinds()[1]
    arm = Arm(ttypes=ALL)
    first = fit(arm)
    second = fit(arm)
    assert first is not second and first.fname!=second.fname
    same(table(first), table(second))
    model = first.model
    assert not any(k in model.__dict__ for k in ('forward', 'disarm'))
    by_hand(model, momentum(model), batches(1))
    assert steps(first)==[0, 1, 2, 3]
