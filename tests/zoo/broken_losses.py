"Broken trainings: the loss is wrong, or the loss is the first to show the fault"
import torch
import torch.nn.functional as F
from torch import nn

from . import is_broken
from .data import digits
from .parts import (Auto, Convolutions, Graph, Letters, Recurrent, Transformer, batches, echoes, ends, fit, letters, mlp, of_tokens, passages, pictures, ring,
    squared, table)


# ---- Broken trainings: the loss grows

@is_broken('diverging', 'update_too_large', 'loss_rises', 'exploding_gradient', paths=('', '*'), steps=(0, 60))
def regression_diverges(arm):
    "Linear regression with a learning rate slightly above the largest stable rate"
    torch.manual_seed(0)
    x,y = table('diabetes', regression=True)
    model = nn.Linear(10, 1)
    opt = torch.optim.SGD(model.parameters(), lr=.3) # 2 over the largest eigenvalue of 2X'X/n is .25
    losses = fit(arm, model, opt, ((x, y) for _ in range(60)), squared)
    assert losses[-1]>100*losses[0] and losses[20]<losses[40]<losses[59]<1e30, losses


@is_broken('diverging', 'update_too_large', 'loss_rises', 'exploding_gradient', paths=('predict', ''), steps=(0, 80))
def prediction_diverges(arm):
    "A convolution predicts the next value of a series. Neighbouring inputs are nearly equal, so the learning rate is too large"
    torch.manual_seed(1)
    model = nn.Sequential()
    model.add_module('smooth', nn.AvgPool1d(3, 1))
    model.add_module('predict', nn.Conv1d(1, 1, 8))
    def series():
        for _ in range(80):
            x = (.1*torch.arange(40)+6*torch.rand(16, 1)).sin()[:, None]+.1*torch.randn(16, 1, 40)
            yield x[..., :-1],x[..., 10:]
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.3), series(), F.mse_loss)
    assert losses[-1]>100*losses[0] and losses[40]<losses[60]<losses[79]<1e30, losses


@is_broken('diverging', 'update_too_large', 'loss_rises', 'attention', 'loss_spike', paths=('', '*'), steps=(20, 60))
def rate_that_grows(arm):
    "The schedule multiplies the learning rate by 1.1 instead of 0.999 in each step: the model loses all it learned"
    torch.manual_seed(2)
    model = Transformer(32, blocks=1)
    opt = torch.optim.SGD(model.parameters(), lr=.03)
    schedule,losses = torch.optim.lr_scheduler.ExponentialLR(opt, 1.1),[]
    te = arm(model, optimizer=opt)
    for x,y in passages(60, 8):
        loss = of_tokens(model(x), y)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
    te.close()
    assert min(losses[:50])<losses[0]-.8 and losses[-1]>1000


# ---- Broken trainings: the loss does not fall

@is_broken('loss_stalls', paths='', steps=(0, 120))
def labels_shuffled(arm):
    "Images and labels are shuffled separately, so the labels belong to other images"
    torch.manual_seed(3)
    x,y = digits(images=True)
    x,y = x[torch.randperm(len(x))],y[torch.randperm(len(y))]
    model = Convolutions()
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), batches(120, 64, x, y))
    assert ends(losses)[1]>2.25


@is_broken('loss_stalls', paths='', steps=(0, 120))
def targets_of_another_text(arm):
    "Inputs and targets are drawn independently from the text, so they do not belong together"
    torch.manual_seed(4)
    model = Letters()
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), ((x, y) for (x,_),(_,y) in zip(passages(120, 16), passages(120, 16), strict=True)),
        of_tokens)
    assert ends(losses)[1]>2.6


@is_broken('loss_input', 'loss_stalls', 'dead_units', paths=('out*', ''), steps=(0, 120))
def logits_above_zero(arm):
    "A loop over layers also puts a ReLU after the last layer: classes with logits below 0 get no gradient"
    torch.manual_seed(4)
    x,y = digits()
    model = nn.Sequential()
    model.add_module('body', nn.Sequential(nn.Linear(64, 32), nn.ReLU()))
    model.add_module('out', nn.Sequential(nn.Linear(32, 10), nn.ReLU()))
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.5), batches(120, 32, x, y))
    assert not model(x).any(0).all() and ends(losses)[1]>.9, (model(x).any(0), ends(losses))


@is_broken('target_range', 'loss_stalls', 'dead_units', 'collapse', 'not_trained', 'vanishing_gradient', paths=('read*', ''), steps=(0, 100))
def output_of_relu(arm):
    "The targets of a recurrent network have both signs, but its last layer is a ReLU, whose input is soon always below 0"
    torch.manual_seed(6)
    model = Recurrent(16, nn.GRU)
    model.read = nn.Sequential(nn.Linear(16, 1), nn.ReLU())
    nn.init.constant_(model.read[0].bias, -1.)
    nn.init.constant_(model.read[0].weight, .01)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), echoes(100, 32, 5), squared)
    assert ends(losses)[1]>.7


@is_broken('loss_input', 'loss_stalls', paths=('', '3'), steps=(0, 200))
def softmax_twice(arm):
    "Cross-entropy of probabilities, because the model ends with a softmax: the loss cannot fall below 1.46"
    torch.manual_seed(7)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10), nn.Softmax(1))
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), batches(200, 64, x, y))
    assert 1.45<min(losses) and losses[-1]<1.7


@is_broken('broadcast', 'loss_stalls', 'collapse', 'vanishing_gradient', 'poor_scale', paths='*', steps=(0, 120))
def broadcast_of_targets(arm):
    "Outputs of shape (32, 1) minus targets of shape (32,) have the shape (32, 32): the best output is one number for all samples"
    torch.manual_seed(8)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 32, 1)
    def loss_of(out, y): return (out-y).square().mean()
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), batches(120, 32, x, y), loss_of)
    assert ends(losses)[1]>.8 and model(x).std()<.25


@is_broken('loss_stalls', 'update_too_small', 'not_trained', paths=('', '*'), steps=(1, 60))
def rate_of_zero(arm):
    "A cosine schedule whose period is one step: the learning rate is 0 from the second step on"
    torch.manual_seed(9)
    x,a,y = ring()
    model = Graph()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 1. if epoch<1 else 0.)
    te,losses = arm(model, optimizer=opt),[]
    for _ in range(80):
        loss = F.cross_entropy(model((x, a)), y)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
    te.close()
    assert losses[1]==losses[-1]


# ---- Broken trainings: the loss of one step is far from the losses before and after it

@is_broken('loss_spike', 'gradient_spike', 'update_too_large', paths=('', '*'), steps=(40, 41))
def targets_in_other_units(arm):
    "The targets of one batch are in grams, and all others are in kilograms"
    torch.manual_seed(10)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 32, 16, 1)
    xys = ((x, y*1000 if i==40 else y) for i,(x,y) in enumerate(batches(90, 32, x, y)))
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=3e-3), xys, squared)
    assert losses[40]>1e4*max(losses[:40]) and max(losses[41:])<5


@is_broken('loss_spike', 'gradient_spike', paths=('', '*'), steps=(65, 66))
def batch_of_garbage(arm):
    "All texts of one batch are repetitions of one rare letter"
    torch.manual_seed(11)
    model = Letters()
    rare = letters.index('k')
    xys = ((torch.full_like(x, rare), torch.full_like(y, rare)) if i==65 else (x, y) for i,(x,y) in enumerate(passages(110, 16)))
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=2e-2), xys, of_tokens)
    assert losses[65]>2*max(losses[40:65]) and losses[70]<losses[65]/2, losses[60:72]


@is_broken('loss_spike', 'gradient_spike', paths=('', '*'), steps=(50, 51))
def labels_off_by_one(arm):
    "In one batch, the class labels are counted from 1 instead of 0"
    torch.manual_seed(12)
    x,y = digits(images=True)
    model = Convolutions()
    xys = ((x, (y+1)%10 if i==50 else y) for i,(x,y) in enumerate(batches(80, 64, x, y)))
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=2e-2), xys)
    assert losses[50]>4*max(losses[40:50]), losses[40:]


# ---- Broken trainings: the loss falls below its smallest meaningful value

@is_broken('loss_below', paths='', steps=(0, 60))
def likelihood_without_minus(arm):
    "The loss is the mean log-likelihood without a minus sign: the training makes wrong answers likely"
    torch.manual_seed(13)
    x,y = digits()
    model = mlp(64, 32, 10)
    def loss_of(out, y): return out.log_softmax(1).gather(1, y[:, None]).mean()
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.05), batches(80, 32, x, y), loss_of)
    assert losses[0]<0 and losses[-1]<-10


@is_broken('loss_below', paths='', steps=(0, 60))
def error_without_square(arm):
    "The loss is a mean of signed differences, where absolute differences were meant: outputs of -1000 are better than right ones"
    torch.manual_seed(14)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 32, 1)
    def loss_of(out, y): return (out.squeeze(1)-y).mean()
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), batches(80, 32, x, y), loss_of)
    assert losses[-1]<-5


@is_broken('loss_below', paths='', steps=(0, 80))
def negative_error(arm):
    "An autoencoder that minimizes the negative squared error, which is a score to maximize"
    torch.manual_seed(15)
    model = Auto(64, 32, 8, act=nn.Tanh)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), pictures(80), lambda out, x: -F.mse_loss(out, x))
    assert losses[-1]<-5


@is_broken('target_range', 'loss_below', 'loss_stalls', paths=('', '2'), steps=(0, 80))
def labels_of_both_signs(arm):
    "Labels are -1 and 1, but the binary cross-entropy expects 0 and 1: the loss falls below 0 without a limit"
    torch.manual_seed(16)
    x,y = table('breast_cancer')
    model = mlp(30, 16, 1)
    def loss_of(out, y): return F.binary_cross_entropy_with_logits(out.squeeze(1), 2.*y-1)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), batches(80, 32, x, y), loss_of)
    assert losses[-1]<-2


# ---- Broken trainings: the loss rises

@is_broken('loss_rises', 'diverging', paths='', steps=(0, 80))
def ascent(arm):
    "The optimizer has maximize=True, which is for rewards, but it gets a loss"
    torch.manual_seed(17)
    x,y = digits()
    model = mlp(64, 32, 32, 10)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=3e-3, maximize=True), batches(80, 32, x, y))
    assert losses[-1]>3*losses[0]


@is_broken('loss_rises', 'diverging', paths='', steps=(0, 80))
def reversed_gradient(arm):
    "A gradient reversal, as in domain adaptation, stands before a head that should learn"
    torch.manual_seed(18)
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.view_as(x)
        @staticmethod
        def backward(ctx, g): return -g
    model = Letters()
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=2e-3), passages(80, 16), lambda out, y: of_tokens(Reverse.apply(out), y))
    assert ends(losses)[1]>1.5*losses[0]


@is_broken('loss_rises', 'diverging', paths='', steps=(0, 100))
def another_loss_is_logged(arm):
    "The training minimizes the negative loss, but logs the loss itself"
    torch.manual_seed(19)
    x,a,y = ring()
    model = Graph()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    te,losses = arm(model, optimizer=opt),[]
    for _ in range(100):
        gain = F.cross_entropy(model((x, a)), y)
        opt.zero_grad()
        (-gain).backward()
        opt.step()
        te.log(loss=gain)
        losses.append(gain.item())
    te.close()
    assert losses[-1]>2*losses[0]
