"Broken trainings: what is wrong lies between the last layer, the loss and the targets"
import torch
import torch.nn.functional as F
from torch import nn

from . import is_broken
from .data import digits
from .parts import Convolutions, batches, fit, mlp, squared, table


def classifier(*after, sizes=(64, 32, 10)): return nn.Sequential(*mlp(*sizes), *after)


def adam(model, lr=3e-3): return torch.optim.Adam(model.parameters(), lr=lr)


# ---- what the loss gets

@is_broken('loss_input', paths='3')
def softmax_and_cross_entropy(arm):
    "A model that ends with a softmax, and cross_entropy"
    torch.manual_seed(0)
    model = classifier(nn.Softmax(1))
    fit(arm, model, adam(model), batches(60, 32, *digits()))


@is_broken('loss_input', paths=('4', '3'))
def relu_before_cross_entropy(arm):
    "A ReLU after each layer, the last one included"
    torch.manual_seed(1)
    model = classifier(nn.ReLU())
    fit(arm, model, adam(model), batches(60, 32, *digits()))


@is_broken('loss_input', paths='3')
def sigmoid_and_logits(arm):
    "Two classes: a sigmoid in the model, and another in the loss"
    torch.manual_seed(2)
    x,y = table('breast_cancer')
    model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
    fit(arm, model, adam(model), batches(60, 32, x, y.float()[:, None]), F.binary_cross_entropy_with_logits)


@is_broken('loss_input', paths='3')
def probabilities_for_nll(arm):
    "nll_loss of a softmax: the logarithm is missing"
    torch.manual_seed(3)
    model = classifier(nn.Softmax(1))
    fit(arm, model, adam(model), batches(60, 32, *digits()), F.nll_loss)


@is_broken('loss_input', paths='2')
def logits_for_nll(arm):
    "nll_loss of the logits: the log_softmax is missing"
    torch.manual_seed(4)
    model = classifier()
    fit(arm, model, adam(model), batches(60, 32, *digits()), F.nll_loss)


@is_broken('loss_input', paths='3')
def probabilities_for_kl_div(arm):
    "A student learns from soft labels, but hands its probabilities to kl_div"
    torch.manual_seed(5)
    x,y = digits()
    model,soft = classifier(nn.Softmax(1)),F.one_hot(y, 10)*.9+.01
    fit(arm, model, adam(model), batches(60, 32, x, soft), lambda p, t: F.kl_div(p, t, reduction='batchmean'))


@is_broken('loss_input', 'not_trained', paths='3')
def softmax_of_one(arm):
    "One output for two classes, with a softmax"
    torch.manual_seed(6)
    x,y = table('breast_cancer')
    model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Softmax(1))
    fit(arm, model, adam(model), batches(60, 32, x, y.float()[:, None]), F.binary_cross_entropy)


@is_broken('loss_input', paths='3')
def softmax_over_batch(arm):
    "The softmax is taken over dimension 0"
    torch.manual_seed(7)
    model = classifier(nn.LogSoftmax(0))
    fit(arm, model, adam(model), batches(60, 32, *digits()), F.nll_loss)


@is_broken('loss_input', paths='2')
def logits_in_own_cross_entropy(arm):
    "A binary cross-entropy that is written by hand clips the logits to probabilities"
    torch.manual_seed(8)
    x,y = table('breast_cancer')
    model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1))
    def loss(out, y):
        p = out.clamp(1e-6, 1-1e-6)
        return -(y*p.log()+(1-y)*(1-p).log()).mean()
    fit(arm, model, adam(model), batches(60, 32, x, y.float()[:, None]), loss)


@is_broken('loss_input', paths='3')
def sigmoid_of_classes(arm):
    "Ten sigmoids, whose logarithm is taken as that of one distribution"
    torch.manual_seed(9)
    model = classifier(nn.Sigmoid())
    fit(arm, model, adam(model), batches(60, 32, *digits()), lambda p, y: F.nll_loss(p.clamp(min=1e-6).log(), y))


# ---- shapes

@is_broken('broadcast', paths='2')
def column_against_row(arm):
    "Predictions of shape (N, 1), targets of shape (N,)"
    torch.manual_seed(10)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 32, 1)
    fit(arm, model, adam(model), batches(80, 32, x, y), lambda out, y: ((out-y)**2).mean())


@is_broken('broadcast', paths='2')
def row_against_column(arm):
    "Predictions are squeezed, and the targets are not"
    torch.manual_seed(11)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 32, 1)
    fit(arm, model, adam(model), batches(80, 32, x, y[:, None]), lambda out, y: F.smooth_l1_loss(out.squeeze(1), y))


# ---- ranges

@is_broken('target_range', paths='3')
def sigmoid_for_standardized_targets(arm):
    "A sigmoid after the last layer of a regression"
    torch.manual_seed(12)
    x,y = table('diabetes', regression=True)
    model = nn.Sequential(*mlp(10, 32, 1), nn.Sigmoid())
    fit(arm, model, adam(model), batches(80, 32, x, y), squared)


@is_broken('target_range', paths='3')
def tanh_for_large_targets(arm):
    "Targets from 25 to 346, and a tanh"
    torch.manual_seed(13)
    x,_ = table('diabetes')
    y = table('diabetes', raw=True)[1].float()
    model = nn.Sequential(*mlp(10, 32, 1), nn.Tanh())
    fit(arm, model, adam(model), batches(80, 32, x, y), lambda out, y: (out[:, 0]-y).abs().mean())


@is_broken('target_range', paths='3')
def relu_for_both_signs(arm):
    "A ReLU after the last layer of a regression of standardized targets"
    torch.manual_seed(14)
    x,y = table('diabetes', regression=True)
    model = nn.Sequential(*mlp(10, 32, 1), nn.ReLU())
    fit(arm, model, adam(model, 1e-3), batches(80, 32, x, y), squared)


@is_broken('target_range', paths=('', '2'))
def labels_of_minus_one(arm):
    "Labels of -1 and 1, for a binary cross-entropy"
    torch.manual_seed(15)
    x,y = table('breast_cancer')
    model = mlp(30, 16, 1)
    fit(arm, model, adam(model), batches(60, 32, x, 2*y.float()[:, None]-1), F.binary_cross_entropy_with_logits)


# ---- labels

@is_broken('one_class', paths='classifier')
def labels_scaled_to_zero(arm):
    "Labels are divided by 255 like the pixels, so that all become 0"
    torch.manual_seed(16)
    x,y = digits(images=True)
    model = Convolutions(norm=False)
    fit(arm, model, adam(model), batches(60, 32, x, (y/255).long()))


@is_broken('one_class', paths='2')
def sorted_by_class(arm):
    "The data are sorted by class, and the loader does not shuffle"
    torch.manual_seed(17)
    x,y = digits()
    at = y.argsort()
    def ordered():
        for _ in range(2):
            for i in at.split(16): yield x[i],y[i]
    model = classifier()
    fit(arm, model, adam(model, 1e-3), ordered())
