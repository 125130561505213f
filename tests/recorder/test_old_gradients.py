"A frozen parameter has gradient rows only for gradients that arrived during this run."
import pytest
import torch
from torch import nn

from torchember import torchEmber


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(model, steps, opt, te=None, before=lambda i: None, after=lambda i: None):
    for i in range(steps):
        before(i)
        model(torch.randn(5, 3)).square().mean().backward()
        after(i)
        opt.step()
        if te and te.recorder.watch is None: te.step()


def with_gradients(te, ttype='weight_grad'):
    "Return a dict: layer -> the steps in which it has gradient rows."
    got = {}
    for r in te.t.lines():
        if r['ttype']==ttype: got.setdefault(r['module'].split('.')[-1][0], set()).add(r['step'])
    return {k: sorted(v) for k,v in got.items()}


def arrived(te):
    "Return a dict: path of a layer -> True if a gradient of its weight arrived during the run."
    te.recorder.sources.note_parameters()
    return {p['path']: p['gradient'] for p in te.recorder.sources.parameters.known.entries if p['name']=='weight'}


@pytest.mark.parametrize('given', [True, False], ids=['optimizer given', 'te.step'])
@pytest.mark.parametrize('by_hand', [True, False], ids=['set by hand', 'from a backward'])
def test_a_frozen_parameter_with_a_gradient_from_before_the_run(given, by_hand):
    model = layers()
    if not by_hand: model(torch.randn(5, 3)).sum().backward()
    model[0].requires_grad_(False)
    if by_hand:
        for p in model[0].parameters(): p.grad = torch.ones_like(p)
    opt = torch.optim.SGD(model[1].parameters(), .1)
    with torchEmber(model, optimizer=opt if given else None, ttypes=('weight', 'weight_grad', 'unclipped_grad')) as te:
        train(model, 3, opt, te, after=lambda i: nn.utils.clip_grad_norm_(model.parameters(), 1.))
        assert with_gradients(te)==with_gradients(te, 'unclipped_grad')=={'1': [0, 1, 2]}
        assert arrived(te)=={'0': False, '1': True}


@pytest.mark.parametrize('to_none', [True, False, None], ids=['zero_grad', 'set_to_none=False', 'no zero_grad'])
@pytest.mark.parametrize('given', [True, False], ids=['optimizer given', 'te.step'])
def test_a_parameter_that_is_frozen_in_the_middle(given, to_none):
    "Gradients before the freezing have rows. The gradient that stays in .grad afterwards has none."
    model = layers()
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt if given else None, ttypes=('weight', 'weight_grad')) as te:
        def before(i):
            if i==2: model[0].requires_grad_(False)
            if i==4: model[0].requires_grad_(True)
            if to_none is not None: opt.zero_grad(set_to_none=to_none)
        train(model, 6, opt, te, before)
        assert with_gradients(te)=={'0': [0, 1, 4, 5], '1': [0, 1, 2, 3, 4, 5]}
        assert arrived(te)=={'0': True, '1': True}


def test_frozen_trained_and_frozen_again():
    model = layers()
    model[0].requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt, ttypes=('weight_grad',)) as te:
        train(model, 6, opt, before=lambda i: model[0].requires_grad_(i in (2, 3)))
        assert with_gradients(te)=={'0': [2, 3], '1': [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize('frozen', [True, False])
@pytest.mark.parametrize('old', [True, False], ids=['with a gradient before', 'without'])
def test_gradients_that_the_user_computes_have_rows(frozen, old):
    "Gradients assigned to .grad by the user have rows, also for frozen parameters, for which autograd computes none."
    model = layers().requires_grad_(not frozen)
    if old:
        for p in model.parameters(): p.grad = torch.full_like(p, 7)
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt, ttypes=('weight', 'weight_grad')) as te:
        for i in range(3):
            x = torch.randn(5, 3)
            if frozen:
                model(x)
                gs = [torch.full_like(p, i+1.) for p in model.parameters()]
            else: gs = torch.autograd.grad(model(x).sum(), list(model.parameters()))
            for p,g in zip(model.parameters(), gs, strict=True): p.grad = g
            want = [p.grad.mean().item() for p in model.parameters()]
            opt.step()
            rows = [r['mean'] for r in te.t.lines() if r['step']==i and r['ttype']=='weight_grad']
            assert sorted(rows)==pytest.approx(sorted(want), rel=1e-5, abs=1e-7)
        assert arrived(te)=={'0': True, '1': True}


def test_an_assigned_gradient_that_is_written_in_place_later_has_rows():
    model = layers().requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt, ttypes=('weight', 'weight_grad')) as te:
        for i in range(3):
            model(torch.randn(5, 3))
            for p in model.parameters():
                if p.grad is None: p.grad = torch.ones_like(p)
                else: p.grad.fill_(i)
            opt.step()
        assert with_gradients(te)=={'0': [0, 1, 2], '1': [0, 1, 2]}


def test_a_trained_parameter_that_the_loss_does_not_reach_has_no_arrived_gradient():
    "The optimizer uses the gradient from before the run, so it has rows, but it did not arrive in this run."
    class TwoHeads(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = nn.Linear(3, 2),nn.Linear(3, 2)
        def forward(self, x): return self.a(x)
    model = TwoHeads()
    for p in model.parameters(): p.grad = torch.ones_like(p)
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt, ttypes=('weight', 'weight_grad')) as te:
        train(model, 2, opt)
        assert with_gradients(te)=={'a': [0, 1], 'b': [0, 1]}
        assert arrived(te)=={'a': True, 'b': False}


def test_a_frozen_variable_with_an_old_gradient_has_no_row_for_it():
    model,x,y = layers(),torch.ones(3),torch.ones(2)
    x.grad,opt = torch.ones(3),torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt, ttypes=('weight_grad',)) as te:
        te.watch_tensor('x', x)
        te.watch_tensor('y', y)
        def after(i):
            if i: y.grad = torch.full((2,), float(i))
        train(model, 3, opt, after=after)
        assert [(r['tname'], r['step'], r['mean']) for r in te.t.lines() if r['tname'] in 'xy']==[('y', 1, 1), ('y', 2, 2)]


def test_armed_again_with_a_new_leftover():
    model = layers()
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt, ttypes=('weight_grad',)) as te:
        train(model, 1, opt)
        te.disarm()
        model[0].requires_grad_(False)
        te.arm()
        train(model, 1, opt)
        assert with_gradients(te)=={'0': [0], '1': [0, 1]}
