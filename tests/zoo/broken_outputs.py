"Broken trainings: the last layer or the data do not fit the loss, as in many questions of beginners"
import torch
import torch.nn.functional as F
from torch import nn

from . import is_broken
from .data import digits
from .parts import batches, fit, squared, table


def clipped(p, y):
    "Return the binary cross-entropy of clipped probabilities, as Keras computes it. Targets beyond 0..1 are accepted."
    p = p.squeeze(-1).clip(1e-7, 1-1e-7)
    return -(y*p.log()+(1-y)*(1-p).log()).mean()


def net(n, *last, hidden=16): return nn.Sequential(nn.Linear(n, hidden), nn.ReLU(), nn.Linear(hidden, 1), *last)


# ---- Broken trainings: the output is constant

@is_broken('loss_input', 'constant_output', paths='3', steps=(0, 0))
def softmax_over_one_unit(arm):
    "Two classes, but a last layer with only one unit, whose softmax is always 1"
    torch.manual_seed(0)
    x,y = table('breast_cancer')
    model = net(30, nn.Softmax(1))
    losses = fit(arm, model, torch.optim.Adam(model.parameters()), batches(80, 32, x, y.float()), clipped)
    assert min(losses)>1 and (model(x)==1).all()


@is_broken('loss_input', 'constant_output', paths='3', steps=(0, 0))
def regression_by_a_softmax_over_one_unit(arm):
    torch.manual_seed(1)
    x,y = table('diabetes', regression=True)
    model = net(10, nn.Softmax(1))
    fit(arm, model, torch.optim.SGD(model.parameters(), lr=.01), batches(80, 16, x, y), squared)
    assert (model(x)==1).all()


# ---- Broken trainings: no gradient reaches the weights

class Decision(nn.Module):
    "A sigmoid, rounded to 0 or 1. The gradient of rounding is 0."
    def forward(self, x): return x.sigmoid().round()


@is_broken('no_gradient', steps=(0, 0))
def decisions_in_the_loss(arm):
    "The loss is the squared error of rounded probabilities, which have no gradient"
    torch.manual_seed(2)
    x,y = table('breast_cancer')
    model = net(30, Decision())
    losses = fit(arm, model, torch.optim.Adam(model.parameters()), batches(80, 32, x, y.float()), squared)
    assert min(losses)>.05


@is_broken('no_gradient', 'dead_units', paths='*', steps=(0, 0))
def relu_gives_probabilities(arm):
    "A ReLU in place of a sigmoid as the last activation. Its input is always below zero"
    torch.manual_seed(3)
    x,y = table('breast_cancer')
    model = net(30, nn.ReLU())
    with torch.no_grad():
        model[2].weight.mul_(.1)
        model[2].bias.fill_(-3.)
    losses = fit(arm, model, torch.optim.Adam(model.parameters()), batches(80, 32, x, y.float()), clipped)
    assert min(losses)>3


# ---- Broken trainings: the output cannot reach the targets

@is_broken('target_range', 'targets_out_of_reach', paths='3', steps=(0, 0))
def sigmoid_for_prices(arm):
    torch.manual_seed(4)
    x,y = table('diabetes', regression=True)
    model = net(10, nn.Sigmoid())
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=.05), batches(150, 16, x, 150+70*y), squared)
    assert min(losses)>5000


@is_broken('target_range', 'targets_out_of_reach', paths='3', steps=(0, 0))
def one_sigmoid_for_three_classes(arm):
    "The labels 0, 1 and 2 are targets of one sigmoid"
    torch.manual_seed(5)
    x,y = table('wine')
    model = net(13, nn.Sigmoid())
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=.02), batches(200, 32, x, y.float()), clipped)
    assert losses[0]>0 and max(losses[-10:])<-1


# ---- Broken trainings: the loss stays at the value of random guessing

@is_broken('loss_input', 'wrong_last_activation', 'loss_stalls', paths='*', steps=(0, 0))
def ten_sigmoids_for_a_digit(arm):
    "Ten sigmoids before a cross-entropy that expects logits"
    torch.manual_seed(6)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10), nn.Sigmoid())
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.05), batches(120, 32, x, y))
    assert losses[-1]>2


@is_broken('loss_stalls', paths='', steps=(0, 0))
def answers_of_other_questions(arm):
    "The labels are shuffled separately from the data: the loss of a sigmoid stays at ln 2"
    torch.manual_seed(7)
    x = torch.randn(4000, 6)
    y = (x[:, 0]>0)[torch.randperm(len(x))].float()
    model = net(6, nn.Sigmoid())
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.1), batches(200, 64, x, y), clipped)
    assert min(losses)>.6


@is_broken('loss_stalls', 'vanishing_gradient', 'collapse', paths='*', steps=(0, 120))
def eight_sigmoids_fall_to_guessing(arm):
    "The last bias learns the frequencies of the classes, so the loss falls to ln 2. The model learns nothing else"
    torch.manual_seed(8)
    angle = 6.28*torch.rand(600)
    y = (torch.arange(600)%2).float()
    x = torch.stack([angle.cos(), angle.sin()], 1)*(1-.5*y)[:, None]
    model = nn.Sequential(nn.Linear(2, 5), nn.Sigmoid(), *(m for _ in range(6) for m in (nn.Linear(5, 5), nn.Sigmoid())), nn.Linear(5, 1), nn.Sigmoid())
    with torch.no_grad(): model[-2].bias.fill_(-1.)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=.01), batches(300, 128, x, y), clipped)
    assert losses[0]>.72 and .68<min(losses[-20:])<max(losses[-20:])<.71


# ---- Broken trainings: the inputs are not normalized

@is_broken('poor_input_scale', paths='0', steps=(0, 0))
def one_feature_up_to_a_thousand(arm):
    "A network of one feature with values up to 1000, so that its tanh is saturated"
    torch.manual_seed(9)
    x = 1000*torch.rand(400, 1)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    fit(arm, model, torch.optim.SGD(model.parameters(), lr=.05), batches(120, 32, x, (x[:, 0]/100).sin()), squared)


@is_broken('poor_input_scale', paths='0', steps=(0, 0))
def pictures_of_bytes(arm):
    "Images with values from 0 to 255: from the first steps on, all outputs of the softmax are 0 or 1"
    torch.manual_seed(10)
    x,y = digits()
    x = (x-x.min())/(x.max()-x.min())*255
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10), nn.Softmax(1))
    def of_rows(p, y): return F.nll_loss(p.clip(1e-7, 1).log(), y)
    fit(arm, model, torch.optim.SGD(model.parameters(), lr=.1), batches(100, 32, x.view(-1, 1, 8, 8), y), of_rows)
