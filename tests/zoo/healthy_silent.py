"Healthy trainings that look like the broken trainings of `broken_silent`"
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from . import is_healthy
from .broken_silent import Described, Halves, classify, look
from .data import batch, digits
from .more import blobs
from .parts import mlp


@is_healthy
def evaluated_within_each_epoch_and_switched_back(arm):
    "The model is evaluated after every tenth step, and switched back to training mode"
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(.5), nn.Linear(64, 10))
    def before(i, m):
        if i%10==5: look(m)
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=150, before=before)


@is_healthy
def new_head_for_a_new_task(arm):
    "At step 60 the labels change, and the last layer is initialized again"
    x,y = digits()
    model = mlp(64, 64, 64, 10)
    def before(i, m):
        if i==60: m[-1].reset_parameters()
    def data(i):
        a,b = batch(64, x, y)
        return a, b if i<60 else (b*3+1)%10
    classify(arm, model, torch.optim.Adam(model.parameters(), 3e-3), n=120, before=before, data=data)


@is_healthy
def labels_change_for_a_new_task(arm):
    "At step 60 the labels change, and the weights do not"
    x,y = digits()
    model = mlp(64, 64, 10)
    def data(i):
        a,b = batch(64, x, y)
        return a, b if i<60 else (b*3+1)%10
    classify(arm, model, torch.optim.Adam(model.parameters(), 3e-3), n=120, data=data)


@is_healthy
def pruned_to_a_fifth(arm):
    "At step 60, four fifths of the weights are set to zero, and stay zero (pruning)"
    model,masks = mlp(64, 128, 128, 10),{}
    def prune(i, m):
        for p in m.parameters():
            if i==60 and p.ndim>1: masks[p] = (p.abs()>p.abs().flatten().quantile(.8)).float()
            if p in masks: p.data.mul_(masks[p])
    classify(arm, model, torch.optim.Adam(model.parameters(), 3e-3), n=120, after=prune)


@is_healthy
def restarts_with_warmth(arm):
    "The learning rate returns to its first value every 40 steps"
    model = mlp(64, 64, 10)
    opt = torch.optim.SGD(model.parameters(), .1, momentum=.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 40)
    classify(arm, model, opt, n=160, after=lambda i, m: schedule.step())


@is_healthy
def cycles_on_purpose(arm):
    "The learning rate rises and falls linearly every 40 steps"
    model = mlp(64, 64, 10)
    opt = torch.optim.SGD(model.parameters(), .1, momentum=.9)
    schedule = torch.optim.lr_scheduler.CyclicLR(opt, 5e-4, .1, 20)
    classify(arm, model, opt, n=160, after=lambda i, m: schedule.step())


@is_healthy
def one_cycle_to_the_end(arm):
    model = mlp(64, 64, 10)
    opt = torch.optim.SGD(model.parameters(), .1, momentum=.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, .1, total_steps=120)
    classify(arm, model, opt, n=119, after=lambda i, m: schedule.step())


@is_healthy
def slow_weights_look_ahead(arm):
    "Lookahead: every 5 steps, the weights move halfway back to their values 5 steps before"
    model = mlp(64, 64, 10)
    slow = copy.deepcopy(model.state_dict())
    def after(i, m):
        if i%5!=4: return
        for k,v in m.state_dict().items():
            slow[k] += .5*(v-slow[k])
            v.copy_(slow[k])
    classify(arm, model, torch.optim.Adam(model.parameters(), 3e-3), n=120, after=after)


@is_healthy
def learns_to_learn(arm):
    "Reptile: after ten steps for a task, the weights move a little from their old values to the new ones"
    model = mlp(4, 64, 64, 1, act=nn.Tanh)
    opt = torch.optim.SGD(model.parameters(), .05)
    te = arm(model, optimizer=opt)
    for task in range(20):
        start,w = copy.deepcopy(model.state_dict()),torch.randn(4)
        for _ in range(10):
            x = torch.randn(32, 4)
            loss = F.mse_loss(model(x).squeeze(1), torch.sin(x@w))
            te.log(loss=loss)
            opt.zero_grad()
            loss.backward()
            opt.step()
        now = model.state_dict()
        model.load_state_dict({k: start[k]+.3*(1-task/20)*(now[k]-start[k]) for k in now})
    te.close()


@is_healthy
def three_batches_are_all(arm):
    "A data set of only three batches, which is not shuffled"
    x,y = digits()
    model = mlp(64, 32, 10)
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=90, data=lambda i: (x[i%3*64:i%3*64+64], y[i%3*64:i%3*64+64]))


@is_healthy
def sparse_marks(arm):
    "Most inputs are zero, so some small batches have few values other than zero"
    model = mlp(64, 32, 2)
    def data(i):
        x = (torch.rand(16, 64)<.02).float()
        return x, (x.sum(1)>1).long()
    classify(arm, model, torch.optim.Adam(model.parameters(), 3e-3), n=120, data=data)


class Placed(nn.Module):
    "A model with two additional inputs: positions, and one noise level for the whole batch"
    def __init__(self): super().__init__(); self.at,self.x,self.level,self.head = nn.Embedding(12, 16),nn.Linear(8, 16),nn.Linear(1, 16),nn.Linear(16, 8)
    def forward(self, x, places, level): return self.head(torch.tanh(self.x(x)+self.at(places)+self.level(level)))


@is_healthy
def places_and_one_level(arm):
    "Inputs of positions of shape (1, n), and of one changing noise level of shape (1, 1)"
    model = Placed()
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    te = arm(model, optimizer=opt)
    for _ in range(100):
        clean,level = torch.randn(32, 1, 8).expand(32, 12, 8),torch.rand(1, 1)
        loss = F.mse_loss(model(clean+level*torch.randn(32, 12, 8), torch.arange(12)[None], level), clean)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
    te.close()


@is_healthy
def every_sample_has_its_sentence(arm):
    model = Described()
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    te = arm(model, optimizer=opt)
    for _ in range(80):
        x,y = blobs(32)
        loss = F.cross_entropy(model(torch.stack([y, y+torch.randint(3, (32,)), torch.randint(10, (32,))], 1), x), y)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
    te.close()


class Carried(nn.Module):
    def __init__(self): super().__init__(); self.rnn,self.head = nn.LSTM(4, 32, batch_first=True),nn.Linear(32, 4)
    def forward(self, x, h, c):
        o,(h,c) = self.rnn(x, (h, c))
        return self.head(o), h, c


@is_healthy
def state_is_carried_on(arm):
    "The state of an LSTM is passed on from batch to batch. It begins with zeros in each epoch and in each evaluation"
    model = Carried()
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    te = arm(model, optimizer=opt)
    wave = torch.sin(torch.arange(2000)*.05*torch.arange(1, 5)[:, None]).T
    for _ in range(6):
        h,c = torch.zeros(1, 8, 32),torch.zeros(1, 8, 32)
        for i in range(20):
            x = torch.stack([wave[200*j+8*i:200*j+8*i+9] for j in range(8)])
            y,h,c = model(x[:, :-1], h.detach(), c.detach())
            loss = F.mse_loss(y, x[:, 1:])
            te.log(loss=loss)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad(): model(torch.stack([wave[200*j:200*j+30] for j in range(8)]), torch.zeros(1, 8, 32), torch.zeros(1, 8, 32))
        model.train()
    te.close()


class Latent(nn.Module):
    def __init__(self): super().__init__(); self.enc,self.dec = nn.Linear(64, 16),nn.Linear(8, 64)
    def forward(self, x):
        mean,log = self.enc(x).chunk(2, -1)
        return self.dec(mean+torch.randn_like(mean)*(log/2).exp()), mean, log


@is_healthy
def samples_in_evaluations(arm):
    "A variational autoencoder also draws random latent values in evaluations"
    x,_ = digits()
    model = Latent()
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    te = arm(model, optimizer=opt)
    for i in range(120):
        b, = batch(64, x)
        y,mean,log = model(b)
        loss = F.mse_loss(y, b, reduction='sum')/64-.5*(1+log-mean.square()-log.exp()).sum(1).mean()
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i%20==19:
            model.eval()
            with torch.no_grad(): model(x[:100])
            model.train()
    te.close()


@is_healthy
def dropout_measures_doubt(arm):
    "Evaluations keep Dropout in training mode on purpose, to estimate the uncertainty of the model"
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(.2), nn.Linear(64, 10))
    def test(m):
        m.eval()
        m[2].train()
        with torch.no_grad():
            for _ in range(5): m(digits()[0][:100])
        m.train()
    classify(arm, model, torch.optim.Adam(model.parameters(), 3e-3), n=100, test=test)


@is_healthy
def statistics_stay_frozen(arm):
    "Normalizations stay in evaluation mode, with running statistics of earlier data, while the other layers are trained"
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(.1), nn.Linear(64, 10))
    for _ in range(40): model(batch(64, x)[0])
    def before(i, m): m[1].eval()
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=80, before=before)


@is_healthy
def evaluated_before_it_begins(arm):
    "A model with Dropout and normalization is evaluated before the first step, as trainers do to check the evaluation"
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(.2), nn.Linear(64, 10))
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=80, before=lambda i, m: i==0 and look(m), test=look)


class Mixed(nn.Module):
    "A model that mixes hidden values of samples within the batch, after a random layer"
    def __init__(self): super().__init__(); self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)])
    def forward(self, x):
        k = int(torch.randint(3, ())) if self.training else None
        for i,l in enumerate(self.layers):
            if i-1==k: x = .9*x+.1*x.roll(1, 0)
            x = l(x)
        return x


@is_healthy
def hidden_values_are_mixed(arm):
    model = Mixed()
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=120)


class Skipped(nn.Module):
    "A model that skips a block at random in training"
    def __init__(self):
        super().__init__()
        self.first,self.last = nn.Linear(64, 64),nn.Linear(64, 10)
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x):
        x = self.first(x)
        for b in self.blocks:
            if not self.training or torch.rand(())>.1: x = b(x)
        return self.last(x)


@is_healthy
def blocks_are_skipped(arm):
    model = Skipped()
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=120)


@is_healthy
def copied_between_halves(arm):
    model = Halves(lambda h: h.clone())
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=80)


@is_healthy
def body_frozen_after_a_while(arm):
    "All layers are trained at first, and later only the head"
    model = mlp(64, 64, 64, 10)
    def before(i, m):
        if i==50: m[:-1].requires_grad_(False)
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=100, before=before)


@is_healthy
def layer_after_layer_is_frozen(arm):
    "Every 30 steps, one more layer is frozen"
    model = mlp(64, 32, 32, 64, 10)
    def before(i, m):
        if i in (30, 60): m[2*(i//30-1)].requires_grad_(False)
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=100, before=before)


@is_healthy
def warm_up_then_inverse_root(arm):
    model = mlp(64, 64, 10)
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min((i+1)/20, math.sqrt(20/(i+1))))
    classify(arm, model, opt, n=120, after=lambda i, m: schedule.step())


@is_healthy
def gradients_are_studied_afterwards(arm):
    "After the training, the program computes gradients with respect to the data, without any optimizer step"
    x,y = digits()
    model = mlp(64, 64, 10)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    te = arm(model, optimizer=opt)
    for i in range(100):
        a,b = batch(64, x, y)
        loss = F.cross_entropy(model(a), b)
        if i<70: te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        if i<70: opt.step()
    te.close()


@is_healthy
def a_last_batch_of_one_sample(arm):
    "Each epoch of 21 samples ends with a batch of one sample, so the output has a single value"
    torch.manual_seed(455)
    x,y = torch.randn(21, 11),torch.arange(21)%2
    model = nn.Sequential(nn.Linear(11, 12), nn.ReLU(), nn.Linear(12, 1), nn.Sigmoid())
    opt = torch.optim.Adam(model.parameters(), .01)
    te = arm(model, optimizer=opt)
    for _ in range(20):
        for at in torch.randperm(21).split(5):
            loss = F.binary_cross_entropy(model(x[at]), y[at, None].float())
            te.log(loss=loss)
            opt.zero_grad()
            loss.backward()
            opt.step()


@is_healthy
def samples_of_zeros_and_of_ones(arm):
    "Each training batch is one sample of zeros or ones, and each evaluation has samples of both kinds, so activation sizes differ"
    torch.manual_seed(456)
    x,y = torch.arange(200.)[:, None].remainder(2).expand(200, 32).contiguous(),torch.arange(200)%2
    model = nn.Sequential(nn.Linear(32, 20), nn.ReLU(), nn.Dropout(.2), nn.Linear(20, 1), nn.Sigmoid())
    opt = torch.optim.RMSprop(model.parameters(), 1e-3)
    te = arm(model, optimizer=opt)
    for _ in range(2):
        model.train()
        for i in torch.randperm(200):
            loss = F.binary_cross_entropy(model(x[i, None]), y[i, None, None].float())
            te.log(loss=loss)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad(): model(x[:8])
