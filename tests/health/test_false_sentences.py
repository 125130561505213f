"Regression tests for findings with a false sentence: each training here once produced such a sentence"
import math

import pytest
import torch
from torch import nn

from torchember import diagnose, torchEmber

pytestmark = pytest.mark.filterwarnings('error:The rule')


def data(seed=0, n=256):
    "Return samples of eight features, and targets that depend on two of them."
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return x,x[:, :1]-2*x[:, 1:2]


def net(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1), *more)


def train(m, step, n=100, x=None, loss_of=None, optimizer=None, log=True, scheduler=None, **options):
    "Train a model, and return the findings. `step(model, i)` changes the weights in step i."
    te = torchEmber(m, optimizer=optimizer, **options)
    xs,ys = data()
    for i in range(n):
        at = torch.arange(i*32, i*32+32)%len(xs)
        loss = (loss_of or nn.functional.mse_loss)(m(xs[at] if x is None else x(xs[at], i)), ys[at])
        m.zero_grad()
        loss.backward()
        if log: te.log(loss=loss.detach())
        step(m, i)
        if optimizer is None: te.step()
    te.close()
    return diagnose(te)


def descend(m, rate=.05):
    with torch.no_grad():
        for p in m.parameters():
            if p.grad is not None: p -= rate*p.grad


def sentences(found, *rules): return ' '.join(found[found['rule'].isin(rules)]['text'] if rules else found['text'])


# ---- false sentences about the schedule of the learning rate

def test_no_schedule_is_named_without_a_learning_rate():
    "The training stops changing the weights, and no learning rate was recorded."
    found = train(net(), lambda m, i: i<30 and descend(m, .005))
    print(found)
    assert 'update_too_small' in set(found['rule'])
    text = sentences(found, 'update_too_small')
    assert 'the schedule of the learning rate ended' not in text and 'was not recorded' in text


def test_weights_that_are_nan_are_not_the_end_of_a_schedule():
    def step(m, i):
        descend(m, .005)
        if i==30: m[0].weight.data.fill_(math.nan)
    found = train(net(), step)
    print(found)
    assert found.iloc[0]['rule']=='not_finite' and 'update_too_small' not in set(found['rule'])


def test_an_optimizer_that_does_nothing_has_no_schedule():
    m = net()
    opt = torch.optim.SGD(m.parameters(), lr=.005)
    found = train(m, lambda m, i: i<30 and opt.step() or i>=30 and [p.grad.zero_() for p in m.parameters()] and opt.step(), optimizer=opt)
    print(found)
    assert 'schedule of the learning rate' not in sentences(found)


def test_a_learning_rate_of_nan_is_not_unchanged():
    m = net()
    opt = torch.optim.SGD(m.parameters(), lr=.005)
    def step(m, i):
        if i==30: opt.param_groups[0]['lr'] = math.nan
        opt.step()
    found = train(m, step, optimizer=opt)
    print(found)
    assert 'unchanged' not in sentences(found)


def test_a_frozen_part_is_not_the_end_of_a_schedule():
    m = net()
    opt = torch.optim.SGD(m.parameters(), lr=.005)
    def step(m, i):
        opt.step()
        if i==30:
            for p in m[0].parameters(): p.requires_grad_(False)
            for p in m[2].parameters(): p.requires_grad_(False)
    found = train(m, step, optimizer=opt)
    print(found)
    assert 'schedule of the learning rate' not in sentences(found)


def test_a_schedule_that_ends_the_training_is_named_with_its_numbers():
    m = net()
    opt = torch.optim.SGD(m.parameters(), lr=.005)
    s = torch.optim.lr_scheduler.StepLR(opt, 20, .01)
    found = train(m, lambda m, i: (opt.step(), s.step()), optimizer=opt)
    print(found)
    text = sentences(found, 'update_too_small')
    assert 'The schedule lowered the learning rate too early' in text and '0.005' in text


# ---- false sentences with meaningless numbers

def test_no_update_is_1e29_times_as_large_as_its_weight():
    m = net()
    def step(m, i): descend(m, 1e30 if i<20 else 0)
    found = train(m, step, n=40)
    print(found)
    assert 'e+' not in sentences(found, 'update_too_large')


def test_advice_about_the_learning_rate_has_a_usable_number():
    m = net()
    opt = torch.optim.Adam(m.parameters(), lr=1e12)
    found = train(m, lambda m, i: opt.step(), n=40, optimizer=opt)
    print(found)
    assert '000,000,000' not in ' '.join(found['advice'])


def test_a_spike_of_one_layer_has_a_readable_size():
    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, i): ctx.i = i; return w.clone()
        @staticmethod
        def backward(ctx, g): return (torch.full_like(g, 1e27) if ctx.i==25 else g), None
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b,self.c,self.i = nn.Linear(8, 16),nn.Linear(16, 16),nn.Linear(16, 1),0
        def forward(self, x):
            i,self.i = self.i,self.i+1
            h = torch.tanh(self.a(x))
            h = torch.tanh(nn.functional.linear(h, Spike.apply(self.b.weight, i)))
            y = self.c(h)
            return y*0 if i==25 else y
    torch.manual_seed(0)
    m = One()
    opt = torch.optim.SGD([*m.a.parameters(), *m.c.parameters()], lr=.01)
    found = train(m, lambda m, i: opt.step(), n=60, optimizer=opt)
    print(found)
    text = sentences(found, 'gradient_spike')
    assert 'more than 1,000,000 times' in text and ' 0 times' not in text


# ---- false sentences about zeros before a softmax

class Choice(nn.Module):
    "A softmax over values that are all zero."
    def __init__(self):
        super().__init__()
        self.first,self.act,self.soft,self.last = nn.Linear(8, 16),nn.ReLU(),nn.Softmax(-1),nn.Linear(16, 1)

    def forward(self, x): return self.last(self.soft(self.act(self.first(x))))


def test_a_softmax_of_zeros_is_not_zero():
    torch.manual_seed(0)
    m = Choice()
    nn.init.constant_(m.first.bias, -30)
    found = train(m, lambda m, i: descend(m, .01))
    print(found)
    text = sentences(found, 'dead_units')
    assert text and 'nothing but zeros' not in text and 'zeros, whatever' not in text


# ---- false sentences about NaN in gradients

class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()

    @staticmethod
    def backward(ctx, g): return g*math.nan


def test_nan_in_the_gradient_of_an_output_says_nothing_of_unrecorded_values():
    n = [0]
    def loss_of(y, t):
        n[0] += 1
        if n[0]==20: y = Breaks.apply(y)
        return nn.functional.mse_loss(y, t)
    for types in (['output_grad'], ['output', 'output_grad', 'weight_grad']):
        n[0] = 0
        found = train(net(), lambda m, i: None, n=30, loss_of=loss_of, ttypes=types)
        print(found)
        text = sentences(found, 'not_finite')
        assert text and 'all values of the forward pass were finite' not in text


def test_a_loss_that_is_not_recorded_may_be_what_is_nan():
    def loss_of(y, t): return (y-t).square().mean()*(math.nan if n.append(0) or len(n)==20 else 1)
    n = []
    found = train(net(), lambda m, i: None, n=30, loss_of=loss_of, log=False)
    print(found)
    text = sentences(found, 'not_finite')
    assert 'loss was not recorded' in text
