"Healthy trainings that look like the broken trainings of `broken_outputs`"
import torch
import torch.nn.functional as F
from torch import nn

from . import is_healthy
from .data import batch, digits, fell
from .parts import batches, fit, squared, table


def net(n, *last, hidden=16, out=1): return nn.Sequential(nn.Linear(n, hidden), nn.ReLU(), nn.Linear(hidden, out), *last)


def binary(p, y): return F.binary_cross_entropy(p.squeeze(-1), y)


@is_healthy
def sigmoid_for_two_classes(arm):
    torch.manual_seed(0)
    x,y = table('breast_cancer')
    model = net(30, nn.Sigmoid())
    fell(fit(arm, model, torch.optim.Adam(model.parameters(), lr=.01), batches(120, 32, x, y.float()), binary), .4)


@is_healthy
def sigmoids_of_many_labels(arm):
    "Each sample can have several of eight labels, so eight sigmoids are right"
    torch.manual_seed(1)
    x = torch.randn(2000, 8)
    y = (x+.3*torch.randn(2000, 8)>0).float()
    model = net(8, nn.Sigmoid(), out=8, hidden=32)
    fell(fit(arm, model, torch.optim.Adam(model.parameters(), lr=.02), batches(150, 64, x, y), F.binary_cross_entropy), .6)


@is_healthy
def sigmoids_of_one_hot_classes(arm):
    "A binary cross-entropy for each of ten exclusive classes"
    torch.manual_seed(2)
    x,y = digits()
    model = net(64, nn.Sigmoid(), out=10, hidden=32)
    loss = lambda p, y: F.binary_cross_entropy(p, F.one_hot(y, 10).float())
    fell(fit(arm, model, torch.optim.Adam(model.parameters(), lr=.01), batches(150, 32, x, y), loss), .4)


@is_healthy
def sums_of_pixel_losses(arm):
    "An autoencoder with sigmoids whose loss is a sum over the pixels, and so far above 20"
    torch.manual_seed(3)
    x,_ = digits()
    x = (x-x.min())/(x.max()-x.min())
    model = net(64, nn.Sigmoid(), out=64, hidden=24)
    loss = lambda p, y: F.binary_cross_entropy(p, y, reduction='sum')/len(y)
    fell(fit(arm, model, torch.optim.Adam(model.parameters(), lr=.02), ((b, b) for b in (batch(64, x)[0] for _ in range(150))), loss), .8)


@is_healthy
def overlap_as_a_negative_loss(arm):
    "The loss is minus the Dice coefficient of a sigmoid, and so below zero"
    torch.manual_seed(4)
    x,y = table('breast_cancer')
    model = net(30, nn.Sigmoid())
    def dice(p, y): return -2*(p.squeeze(-1)*y).sum()/(p.sum()+y.sum()+1)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=.01), batches(120, 32, x, y.float()), dice)
    assert losses[-1]<-.85


@is_healthy
def hinge_is_satisfied(arm):
    "A hinge loss: after 30 steps, most batches have no error, and all gradients are exactly zero"
    torch.manual_seed(5)
    x = torch.randn(800, 4)
    y = (x[:, 0]>0).float()*2-1
    x[:, 0] += 3*y
    model = net(4)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=.02), batches(300, 32, x, y), lambda o, y: (1-o.squeeze(-1)*y).clamp(min=0).mean())
    assert losses[0]>.5 and sum(l==0 for l in losses)>200


class GatedByOne(nn.Module):
    "Attention over a single position, whose softmax is always 1."
    def __init__(self):
        super().__init__()
        self.score,self.softmax,self.head = nn.Linear(6, 1),nn.Softmax(1),nn.Linear(6, 1)

    def forward(self, x): return (self.softmax(self.score(x))*x).sum(1, keepdim=True)*0+self.head(x)


@is_healthy
def attention_over_one_place(arm):
    torch.manual_seed(6)
    x = torch.randn(800, 6)
    model = GatedByOne()
    fell(fit(arm, model, torch.optim.Adam(model.parameters(), lr=.05), batches(150, 32, x, x[:, 0]-x[:, 1]), squared), .2)


@is_healthy
def large_targets_of_a_linear_layer(arm):
    "A regression with targets of hundreds, and a last layer without activation"
    torch.manual_seed(7)
    x,y = table('diabetes', regression=True)
    model = net(10, hidden=32)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=.1), batches(300, 32, x, 150+70*y), squared)
    assert losses[-1]<.3*losses[0]


@is_healthy
def counts_after_a_relu(arm):
    "Three targets are counts, which are never below zero, so the last activation is a ReLU"
    torch.manual_seed(8)
    x = torch.rand(1000, 3)
    y = torch.stack([x.sum(1), 2*x[:, 0], x[:, 1]*x[:, 2]*3], 1)
    model = net(3, nn.ReLU(), out=3, hidden=32)
    with torch.no_grad(): model[2].bias.fill_(.5)
    fell(fit(arm, model, torch.optim.Adam(model.parameters(), lr=.01), batches(200, 32, x, y), F.mse_loss), .2)


@is_healthy
def exclusive_or_waits_at_a_quarter(arm):
    "XOR: the squared error of a sigmoid stays near 0.25 for many steps before it falls"
    torch.manual_seed(9)
    x = torch.tensor([[0., 0], [0, 1], [1, 0], [1, 1]])
    y = torch.tensor([0., 1, 1, 0])
    model = nn.Sequential(nn.Linear(2, 4), nn.Sigmoid(), nn.Linear(4, 1), nn.Sigmoid())
    fell(fit(arm, model, torch.optim.Adam(model.parameters(), lr=.05), ((x, y) for _ in range(600)), squared), .3)


@is_healthy
def one_scaled_feature(arm):
    torch.manual_seed(10)
    x = 3.4*torch.rand(400, 1)-1.7
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    fell(fit(arm, model, torch.optim.Adam(model.parameters(), lr=.02), batches(300, 32, x, (2*x[:, 0]).sin()), squared), .3)


@is_healthy
def ages_in_years(arm):
    "A feature with values up to 90 is not normalized, but the network learns well"
    torch.manual_seed(11)
    x = 90*torch.rand(600, 1)
    y = (x[:, 0]>45).float()
    model = net(1, hidden=32)
    loss = lambda o, y: F.binary_cross_entropy_with_logits(o.squeeze(-1), y)
    fell(fit(arm, model, torch.optim.Adam(model.parameters(), lr=.01), batches(300, 64, x, y), loss), .6)
