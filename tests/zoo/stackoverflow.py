"""Trainings of public benchmarks, broken and corrected, in plain PyTorch: DeepLocalize (ICSE 2021), DeepFD (ICSE 2022), AUTOTRAINER (ICSE 2021)

The first two collect questions of StackOverflow; a name holds the number of the question. Layers, initial weights, losses and optimizers are those of Keras.
Data are digits, or random numbers of the same size, and the trainings are shorter.

Left out, because nothing is wrong with the network, or the correction is unsound, too:
- 41372874: the labels are all 1, both in the broken and in the corrected program.
- 50481178, broken: its accuracy is 0.99, because nearly all labels are 1.
- 48385830, corrected: the initial weights stay 28 times too large, and saturate the sigmoids.
- 39217567, corrected: its loss stays at that of guessing, ln 2, for 500 steps.
- 33969059, corrected: the data stay as large as 10000, and saturate the tanh."""
import numpy as np
import torch
from sklearn import datasets
from torch import nn
from torch.nn import functional as F

from . import is_broken, is_healthy
from .data import digits as small_digits
from .data import standard

activations = {'relu': nn.ReLU, 'sigmoid': nn.Sigmoid, 'tanh': nn.Tanh, 'softmax': lambda: nn.Softmax(-1), 'pool': lambda: nn.MaxPool2d(2), 'flat': nn.Flatten}
glorot = nn.init.xavier_uniform_

def normal(std): return lambda w: nn.init.normal_(w, std=std)

def uniform(w): return nn.init.uniform_(w, -.05, .05)

def he_normal(w): return nn.init.kaiming_normal_(w, nonlinearity='relu')

def he_uniform(w): return nn.init.kaiming_uniform_(w, nonlinearity='relu')


def network(x, *layers, init=glorot, bias=nn.init.zeros_):
    """Return a network for data `x`. A layer is the units of a Linear, (channels, kernel, padding) of a Conv2d, the rate of a Dropout, or a name in
    `activations`. Weights begin as in Keras."""
    modules,h = [],x[:1]
    for l in layers:
        if isinstance(l, str): m = activations[l]()
        elif isinstance(l, float): m = nn.Dropout(l)
        else:
            m = nn.Linear(h.shape[-1], l) if isinstance(l, int) else nn.Conv2d(h.shape[1], *l[:2], padding=l[2])
            init(m.weight)
            bias(m.bias)
        with torch.no_grad(): h = m(h)
        modules.append(m)
    return nn.Sequential(*modules)


def logs(p): return (p/p.sum(-1, keepdim=True)).clip(1e-7, 1-1e-7).log()

def binary(p, t):
    p = p.clip(1e-7, 1-1e-7)
    return -(t*p.log()+(1-t)*(1-p).log()).mean()

losses = { # Losses of probabilities with the formulas of Keras
    'mse': lambda p, t: (p-t.view_as(p)).square().mean(), 'mae': lambda p, t: (p-t.view_as(p)).abs().mean(), 'bce': lambda p, t: binary(p, t.view_as(p)),
    'cce': lambda p, t: -(t*logs(p)).sum(-1).mean(), 'scce': lambda p, t: F.nll_loss(logs(p), t.flatten().long())}


def adam(lr=1e-3): return lambda ps: torch.optim.Adam(ps, lr, eps=1e-7)

def sgd(lr=.01, **kwargs): return lambda ps: torch.optim.SGD(ps, lr, **kwargs)

def rmsprop(ps): return torch.optim.RMSprop(ps, 1e-3, alpha=.9, eps=1e-7)


def train(arm, model, loss, opt, x, y, size, n, held=None):
    "Run epochs of shuffled batches until `n` steps are done. `held`: data to evaluate after each epoch."
    opt,loss,done = opt(model.parameters()),losses[loss],0
    te = arm(model, optimizer=opt)
    while done<n:
        model.train()
        for i in torch.randperm(len(x)).split(size):
            value = loss(model(x[i]), y[i])
            te.log(loss=value)
            opt.zero_grad()
            value.backward()
            opt.step()
            done += 1
        if held:
            model.eval()
            with torch.no_grad(): te.log(val_loss=loss(model(held[0]), held[1]))
    te.close()


def case(*rules, corrected=True):
    "Add a training twice: broken, with the rules that may report its fault, and corrected. The function gets `broken`, returns arguments of `train`."
    def add(f):
        def version(broken):
            def training(arm): train(arm, *f(broken))
            training.__name__,training.__module__,training.__doc__ = f.__name__+('' if broken else '_corrected'),f.__module__,f.__doc__
            return training
        is_broken(*rules, steps=(0, 500))(version(True))
        if corrected: is_healthy(version(False))
        return f
    return add


def digits(n=1797, top=1., flat=True):
    "Return images of 28 by 28 pixels from 0 to `top`, with a black border as in MNIST, and their digits."
    x,y = small_digits(images=True)
    x = F.pad(x.repeat_interleave(3, -1).repeat_interleave(3, -2), (2, 2, 2, 2))[:n]*top
    return (x.flatten(1) if flat else x),y[:n]

def colors(n, size, classes, top=1.):
    "Return images with three channels from 0 to `top`: digits on a colored background."
    x,y = small_digits(images=True, classes=range(classes))
    x,y = x[:n].repeat_interleave(size//8, -1).repeat_interleave(size//8, -2),y[:n]
    x = .7*x*(.5+.5*torch.rand(len(x), 3, 1, 1))+.4*torch.rand(len(x), 3, 1, 1)
    return (x+.05*torch.randn(x.shape)).clip(0, 1)*top,y

def onehot(y): return F.one_hot(y).float()

def floats(x, y): return torch.tensor(x, dtype=torch.float32),torch.tensor(y, dtype=torch.float32)


@case('update_too_large', 'exploding_gradient', 'diverging', 'gradient_spike', 'loss_spike', 'not_finite', corrected=False)
def so_48385830(broken):
    "Question 48385830: no activations, squared error, learning rate of 3, initial weights of size 1"
    x,y = digits()
    return network(x, 30, 10, init=normal(1.), bias=normal(1.)),'mse',sgd(3.),x,onehot(y),10,300


@case('loss_stalls', 'update_too_small')
def so_31556268(broken):
    "Question 31556268: absolute error of a sigmoid, low learning rate, few epochs; corrected: squared error and Adam"
    x,y = torch.tensor([[1., 1], [1, 0], [0, 0], [0, 1]]),torch.tensor([[0.], [1], [0], [1]])
    opt = sgd(.05, momentum=.11, nesterov=True) if broken else adam()
    return network(x, 4, 'sigmoid', 1, 'sigmoid'),'mae' if broken else 'mse',opt,x,y,4,400


@case('loss_input', 'constant_output', 'target_range', 'no_gradient', 'collapse', 'saturated', 'poor_input_scale', corrected=False)
def so_33969059(broken):
    "Question 33969059: softmax over one unit, for a regression whose data reach 10000"
    x = torch.rand(3200, 3)*10000
    y = x@torch.tensor([2., 1, .5])+2.2
    return network(x, 3, 'tanh', .5, 2, 'tanh', .5, 1, 'softmax', init=uniform),'mse',sgd(.1, momentum=.9, nesterov=True),x,y,32,300


@case('poor_input_scale', 'loss_input', 'wrong_last_activation')
def so_55328966(broken):
    "Question 55328966: data of 0 to 255, and a sigmoid before the cross-entropy of ten classes; corrected: data of 0 to 1, softmax, Adam"
    x,y = digits(top=255. if broken else 1.)
    opt = sgd(1e-4) if broken else adam(1e-4)
    return network(x, 784, 50, 'relu', 10, 'sigmoid' if broken else 'softmax'),'cce',opt,x,onehot(y),32,150


@case('loss_input', 'constant_output', 'collapse', 'no_gradient')
def so_31880720(broken):
    "Question 31880720: softmax over one unit; corrected: sigmoid"
    x,y = torch.tensor([[1.], [0.]]).repeat_interleave(100, 0).expand(-1, 128).clone(),torch.tensor([1., 0.]).repeat_interleave(100)
    model = network(x, 50, 'relu', 'relu', .2, 50, 'relu', .2, 1, 'softmax' if broken else 'sigmoid')
    return model,'bce',rmsprop,x,y,1,400,(x[::50], y[::50])


@case('vanishing_gradient', 'loss_stalls', 'update_too_small', corrected=False)
def so_39217567(broken, dim=8):
    "Question 39217567: sigmoids that hardly learn, squared error, and targets shuffled independently of the inputs"
    x = (torch.arange(2**dim)[:, None]>>torch.arange(dim)&1).float()
    model = network(x, *(dim, 'sigmoid')*3, init=normal(.05))
    return model,'mse',sgd(),x,x[torch.randperm(len(x))],50,400


@case('poor_input_scale')
def so_47724077(broken, n=2000):
    "Question 47724077: columns of a census up to a million, not normalized; corrected: normalized"
    x = torch.randint(2, (n, 14)).float()
    x[:, 0],x[:, 2],x[:, 4],x[:, 12] = 39+13.5*torch.randn(n),(12+.5*torch.randn(n)).exp(),10+2.5*torch.randn(n),40+12*torch.randn(n)
    for i,share in ((10, .08), (11, .05)): x[:, i] = (torch.rand(n)<share)*(8.5+torch.randn(n)).exp()
    z = standard(x)
    y = z[:, 4]+.7*z[:, 0]+z[:, 10]+.8*torch.randn(n)>.9
    x = x if broken else z
    return network(x, 21, 'relu', 2, 'softmax'),'cce',adam() if broken else adam(.01),x,onehot(y.long()),100,400


@case('one_class', 'same_data', 'collapse')
def so_59325381(broken):
    "Question 59325381: labels divided by 255, so that all become class 0"
    x,y = digits(1200, flat=False)
    model = network(x, (64, 3, 1), 'pool', (32, 3, 1), 'pool', 'flat', 128, 'relu', 10, 'softmax')
    return model,'scce' if broken else 'cce',adam(),x,y/255 if broken else onehot(y),32,38


@case('loss_input', 'wrong_last_activation', 'poor_input_scale')
def so_59278771(broken):
    "Question 59278771: a sigmoid before the cross-entropy of three classes, data not normalized; corrected: softmax, one more layer, data of 0 to 1"
    x,y = floats(*datasets.load_iris(return_X_y=True))
    y = onehot(y.long())
    if broken: return network(x, 4, 'relu', 3, 'sigmoid', init=normal(.05)),'cce',adam(),x,y,5,400
    x = (x-x.amin(0))/(x.amax(0)-x.amin(0))
    return network(x, 4, 'relu', 8, 'relu', 3, 'softmax', init=normal(.05)),'cce',adam(),x,y,32,500


@case('target_range', 'targets_out_of_reach', 'saturated')
def so_48221692(broken):
    "Question 48221692: sigmoid as the last activation, but targets of a parabola up to 103; corrected: linear"
    x = torch.arange(-10, 10.01, .1)[:, None]
    model = network(x, 5, 'sigmoid', 1, *['sigmoid']*broken)
    return model,'mse',sgd(),x,x**2+3,150,400


@case('target_range', 'targets_out_of_reach', 'loss_below')
def so_50079585(broken):
    "Question 50079585: one sigmoid for the labels 0, 1 and 2; corrected: softmax over three units"
    x,y = colors(480, 32, 3)
    last = (1, 'sigmoid') if broken else (3, 'softmax')
    model = network(x, (32, 3, 0), 'relu', 'pool', (32, 3, 0), 'relu', 'pool', (64, 3, 0), 'relu', 'pool', 'flat', 64, 'relu', .5, *last)
    return model,'bce' if broken else 'cce',rmsprop,x,y.float() if broken else onehot(y),16,60


@case('loss_input', 'poor_input_scale', 'no_gradient', 'dead_units')
def so_44066044(broken):
    "Question 44066044: data up to 3e9, not normalized, and a ReLU before a binary cross-entropy; corrected: normalized, sigmoid"
    rng = np.random.default_rng(4)
    y = np.repeat([0., 1], [8, 13])
    n = len(y)
    x = np.stack([3232235773+5*y+3*(rng.random(n)<.5), np.full(n, 3232235779), np.full(n, 6), np.full(n, 128), rng.normal(5e5, 5e4, n),
        rng.choice([502, 56783], n), rng.choice([0, 12], n), rng.choice([0, 0, 61, 65280], n), rng.choice([0, 6], n), np.zeros(n), rng.choice([0, 206], n)], 1)
    if not broken: x = (x-x.mean(0))/np.where(x.std(0)>0, x.std(0), 1)
    x,y = floats(x, y)
    return network(x, 12, 'relu', 12, 'relu', 1, 'relu' if broken else 'sigmoid', init=normal(.05)),'bce',adam(),x,y,5,400


@case('loss_input', 'wrong_last_activation', 'dead_units', 'loss_stalls')
def so_47352366(broken):
    "Question 47352366: ReLU before the cross-entropy of ten classes; corrected: softmax"
    x,y = digits(1000, flat=False)
    model = network(x, (32, 5, 2), 'relu', 'pool', (64, 5, 2), 'relu', 'pool', 'flat', 1024, 'relu', .5, 10, 'relu' if broken else 'softmax',
        bias=lambda b: nn.init.constant_(b, .1))
    return model,'cce',adam(),x,onehot(y),50,40


@case('poor_input_scale', 'no_gradient')
def so_48594888(broken):
    "Question 48594888: images of 0 to 255; corrected: 0 to 1"
    x,y = colors(800, 16, 10, top=255. if broken else 1.)
    model = network(x, (64, 3, 0), 'relu', 'pool', (256, 3 if broken else 2, 0), 'relu', 'pool', 'flat', 512, 'relu', .3, 10, 'softmax')
    for i in (0, 3): he_normal(model[i].weight)
    return model,'cce',adam(),x,onehot(y),32,75


@is_healthy
def so_50481178_corrected(arm):
    "Question 50481178, corrected: softmax over two units in place of one sigmoid; nearly all labels are 1"
    x,y = floats(*datasets.make_multilabel_classification(800, 4, n_classes=1, random_state=0))
    train(arm, network(x, 10, 'relu', 20, 'relu', 30, 'relu', 40, 'relu', 50, 'relu', 2, 'softmax'), 'scce', adam(), x, y[:, 0], 10, 400)


@case('vanishing_gradient', 'collapse', 'loss_stalls')
def autotrainer_sigmoids(broken):
    "AUTOTRAINER: gradients vanish in eight layers of five sigmoids; corrected: tanh"
    x,y = floats(*datasets.make_circles(700, noise=.1, random_state=1))
    act = 'sigmoid' if broken else 'tanh'
    return network(x, *(5, act)*8, 1, 'sigmoid', init=he_uniform),'bce',adam(),x,y,128,400


@case('vanishing_gradient', 'dead_units', 'collapse')
def autotrainer_relus(broken):
    "AUTOTRAINER: 34 layers of ReLU in which gradients vanish; corrected: three layers"
    x,y = digits(1280)
    return network(x, *(128, 'relu')*(34 if broken else 3), 10, 'softmax'),'cce',adam(),x,onehot(y),32,200
