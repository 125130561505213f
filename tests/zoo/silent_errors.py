"""Silent errors of TrainCheck (OSDI 2025, arXiv 2506.14813) and their fixed versions, and the healthy trainings of its false-alarm test

A name holds the number of the issue in which the error was reported. Only trainings of one process are here.

Left out:
- `broken_silent` has these errors already: pytorch-forum-84911 (`head_frozen_with_the_rest`), stackoverflow-67180955 (`three_workers_of_one_mind`),
  pytorch-51800 (`normalised_after_the_first_look`), pytorch-115607 (`optimizer_that_stops`), mmpretrain-702 (`frozen_by_a_late_call`),
  transformers-34204 (`one_sentence_for_all`), a checkpoint without some weights (`checkpoint_without_its_body`).
- The tutorial of automatic mixed precision has random targets and a rate at which nothing is learned, so `update_too_small` is right about it.
- Hogwild needs two processes.
- transformers-17877: weights are drawn several times over, which is slow, but gives the same distribution. Nothing in the training shows it."""
import copy
import math
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from . import is_broken, is_healthy
from .data import batch, digits
from .parts import mlp


def standard_digits(images=True):
    x,y = digits(images)
    return (x-x.mean())/x.std(),y

def batches(n, size, *tensors):
    for _ in range(n): yield batch(size, *tensors)

def convolutions():
    def block(i, o): return nn.Conv2d(i, o, 3, padding=1),nn.ReLU()
    return nn.Sequential(*block(1, 16), *block(16, 32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32*16, 64), nn.ReLU(), nn.Linear(64, 10))

def steps(te, model, opt, data, loss_of=F.cross_entropy, clear=True):
    "Run the usual training loop. `clear`: True to set the gradients to zero in each step."
    for x,y in data:
        if clear: opt.zero_grad()
        loss = loss_of(model(x), y)
        te.log(loss=loss)
        loss.backward()
        opt.step()

def error(*rules, **more):
    "Add a training twice: broken and fixed. The decorated function gets `arm` and `broken`, True for the broken version."
    def add(f):
        def version(broken):
            def training(arm): f(arm, broken)
            training.__name__,training.__module__,training.__doc__ = f.__name__+('' if broken else '_fixed'),f.__module__,f.__doc__
            return training
        is_broken(*rules, **{'steps': (0, 200)} | more)(version(True))
        is_healthy(version(False))
        return f
    return add


@error('gradients_add_up')
def gradients_never_cleared(arm, broken):
    "stackoverflow-60335387: zero_grad is missing (CNN, Adam with 1e-4, batches of 30)"
    x,y = standard_digits()
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    opt = torch.optim.Adam(model.parameters(), 1e-4)
    steps(arm(model, optimizer=opt), model, opt, batches(150, 30, x, y), clear=not broken)


class Reader(nn.Module):
    "A transformer block over the rows of a digit, whose attention calls dropout as a function"
    def __init__(self, always, d=32):
        super().__init__()
        self.always,self.embed,self.pos,self.qkv,self.out = always,nn.Linear(8, d),nn.Parameter(torch.randn(8, d)*.1),nn.Linear(d, 3*d),nn.Linear(d, d)
        self.norm1,self.norm2,self.ff,self.head = nn.LayerNorm(d),nn.LayerNorm(d),mlp(d, 2*d, d),nn.Linear(d, 10)
    def forward(self, x):
        x = self.embed(x)+self.pos
        q,k,v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x+self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=.3 if self.always or self.training else 0.))
        return self.head((x+self.ff(self.norm2(x))).mean(1))

@error('random_eval', 'train_eval')
def attention_drops_in_evaluation(arm, broken):
    "transformers-33844: dropout of the attention is active in eval() mode; one batch is evaluated after each epoch"
    x,y = standard_digits()
    x = x.squeeze(1)
    model = Reader(broken)
    opt = torch.optim.AdamW(model.parameters(), 2e-3)
    te = arm(model, optimizer=opt)
    for _ in range(6):
        model.train()
        steps(te, model, opt, batches(25, 64, x[:1400], y[:1400]))
        model.eval()
        with torch.no_grad(): model(x[1400:1500])


class Uncast(nn.Linear):
    "A linear layer whose forward disables autocast, so its inputs are not cast"
    def forward(self, x):
        with torch.autocast('cpu', enabled=False): return F.linear(x.float(), self.weight, self.bias)

@error('autocast', paths='4')
def one_layer_not_cast(arm, broken):
    "lightning-thunder-725: one of four linear layers is not cast to bfloat16"
    x,y = standard_digits(False)
    model = mlp(64, 128, 128, 128, 10)
    if broken: model[4] = Uncast(128, 128)
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    te = arm(model, optimizer=opt)
    for a,b in batches(100, 64, x, y):
        opt.zero_grad()
        with torch.autocast('cpu', torch.bfloat16): loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        opt.step()


@error('not_trained')
def optimizer_of_the_old_parameters(arm, broken):
    "accelerate-2665, in one process: a wrapper creates new parameters, but the optimizer still has the old ones"
    x,y = standard_digits()
    model = convolutions()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    if broken: model = copy.deepcopy(model)
    steps(arm(model, optimizer=opt), model, opt, batches(100, 32, x, y))


@error('not_trained')
def master_weights_not_written_back(arm, broken):
    "Second case study of the paper: the optimizer updates a master copy of the weights, which is never copied back to the model"
    x,y = standard_digits()
    model = convolutions()
    master = copy.deepcopy(model)
    opt = torch.optim.AdamW(master.parameters(), 1e-3)
    te = arm(model, optimizer=opt)
    for a,b in batches(100, 32, x, y):
        model.zero_grad()
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        for p,q in zip(model.parameters(), master.parameters(), strict=True): q.grad = p.grad.clone()
        opt.step()
        if broken: continue
        with torch.no_grad():
            for p,q in zip(model.parameters(), master.parameters(), strict=True): p.copy_(q)


@is_healthy
def all_of_a_checkpoint_is_loaded(arm):
    "Fixed version of a partially loaded checkpoint: at step 60, all weights of the checkpoint replace fresh weights"
    x,y = standard_digits()
    model = convolutions()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    te = arm(model, optimizer=opt)
    steps(te, model, opt, batches(60, 32, x, y))
    saved = {k: v.clone() for k,v in model.state_dict().items()}
    model.load_state_dict(convolutions().state_dict())
    model.load_state_dict(saved)
    steps(te, model, opt, batches(60, 32, x, y))


class Forward(nn.Linear):
    def forward(self, x): return F.relu(super().forward(x/(x.norm(2, 1, keepdim=True)+1e-4)))

@is_healthy
def forward_forward(arm):
    "Two layers that train one after the other, each with an optimizer of its own"
    x,y = standard_digits(False)
    def labeled(y):
        new = x.clone()
        new[:, :10] = 0
        new[torch.arange(len(x)), y] = x.max()
        return new
    right,wrong = labeled(y),labeled(y[torch.randperm(len(y))])
    for layer in (Forward(64, 200), Forward(200, 200)):
        opt = torch.optim.Adam(layer.parameters(), .03)
        te = arm(layer, optimizer=opt)
        for _ in range(80):
            good,bad = layer(right).square().mean(1),layer(wrong).square().mean(1)
            loss = F.softplus(torch.cat([2-good, bad-2])).mean()
            opt.zero_grad()
            te.log(loss=loss)
            loss.backward()
            opt.step()
        with torch.no_grad(): right,wrong = layer(right),layer(wrong)


class Rows(nn.Module):
    "An LSTM over the rows of a digit"
    def __init__(self):
        super().__init__()
        self.rnn,self.bn,self.drop,self.drop2 = nn.LSTM(8, 64, batch_first=True),nn.BatchNorm1d(64),nn.Dropout(.25),nn.Dropout(.5)
        self.fc1,self.fc2 = nn.Linear(64, 32),nn.Linear(32, 10)
    def forward(self, x):
        h = self.drop(self.bn(self.rnn(x.squeeze(1))[0][:, -1]))
        return F.log_softmax(self.fc2(self.drop2(F.relu(self.fc1(h)))), 1)

@is_healthy
def lstm_over_rows(arm):
    "Example `mnist_rnn` of PyTorch: LSTM over rows, batch norm, Dropout, Adadelta"
    x,y = standard_digits()
    model = Rows()
    opt = torch.optim.Adadelta(model.parameters(), .1)
    te = arm(model, optimizer=opt)
    for _ in range(6):
        model.train()
        steps(te, model, opt, batches(25, 64, x[:1400], y[:1400]), F.nll_loss)
        model.eval()
        with torch.no_grad(): model(x[1400:])


def pole(s, push):
    "Return the next state of a cart with a pole, as in the environment CartPole."
    x,v,t,w = s
    c,sin = math.cos(t),math.sin(t)
    q = ((10. if push else -10.)+.05*w*w*sin)/1.1
    turn = (9.8*sin-c*q)/(.5*(4/3-.1*c*c/1.1))
    return np.array([x+.02*v, v+.02*(q-.05*turn*c/1.1), t+.02*w, w+.02*turn])

def episode(policy):
    "Return log-probabilities and discounted returns of an episode."
    s,logs,returns = np.random.uniform(-.05, .05, 4),[],[]
    while len(logs)<200 and abs(s[0])<2.4 and abs(s[2])<.2095:
        move = torch.distributions.Categorical(policy(torch.tensor(s, dtype=torch.float32)[None]))
        a = move.sample()
        s = pole(s, a.item())
        logs.append(move.log_prob(a))
    for _ in logs: returns.insert(0, 1+.99*(returns[0] if returns else 0))
    return torch.cat(logs),torch.tensor(returns)

@is_healthy
def pole_on_a_cart(arm):
    "Example `reinforce` of PyTorch: one pass per move, one step per episode"
    policy = nn.Sequential(nn.Linear(4, 128), nn.Dropout(.6), nn.ReLU(), nn.Linear(128, 2), nn.Softmax(-1))
    opt = torch.optim.Adam(policy.parameters(), 1e-2)
    te = arm(policy, optimizer=opt)
    for _ in range(60):
        logs,returns = episode(policy)
        loss = -(logs*(returns-returns.mean())/(returns.std()+1e-6)).sum()
        opt.zero_grad()
        te.log(loss=loss, reward=len(logs))
        loss.backward()
        opt.step()


class Twin(nn.Module):
    "One network for both digits of a pair"
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(128, 256), nn.ReLU(inplace=True), nn.Linear(256, 1))
    def forward(self, a, b): return torch.sigmoid(self.fc(torch.cat([self.net(a), self.net(b)], 1)))

@is_healthy
def pairs_of_digits(arm):
    "Example `siamese_network` of PyTorch: pairs of equal or different digits, binary cross-entropy, Adadelta with rate 1."
    x,y = standard_digits()
    model = Twin()
    opt = torch.optim.Adadelta(model.parameters(), 1.)
    te = arm(model, optimizer=opt)
    of_class = [(y[:1400]==c).nonzero().flatten().tolist() for c in range(10)]
    for _ in range(100):
        i = torch.randint(1400, (64,))
        j = torch.tensor([random.choice(of_class[y[k]]) if n%2 else random.randrange(1400) for n,k in enumerate(i)])
        opt.zero_grad()
        loss = F.binary_cross_entropy(model(x[i], x[j]).squeeze(1), (y[i]==y[j]).float())
        te.log(loss=loss)
        loss.backward()
        opt.step()


class Words(nn.Module):
    def __init__(self, n=30, d=64):
        super().__init__()
        self.drop,self.encoder,self.rnn,self.decoder = nn.Dropout(.2),nn.Embedding(n, d),nn.LSTM(d, d, 2, dropout=.2),nn.Linear(d, n)
        for w in (self.encoder.weight, self.decoder.weight): nn.init.uniform_(w, -.1, .1)
        nn.init.zeros_(self.decoder.bias)
    def forward(self, x, h):
        o,h = self.rnn(self.drop(self.encoder(x)), h)
        return F.log_softmax(self.decoder(self.drop(o)).flatten(0, 1), 1),h

def chain(vocab, n):
    "Return the words of a Markov chain."
    p,out = (torch.rand(vocab, vocab)**8).cumsum(1),[0]
    for u in torch.rand(n-1).tolist(): out.append(min(int(torch.searchsorted(p[out[-1]], u*p[out[-1], -1])), vocab-1))
    return torch.tensor(out)

@is_healthy
def words_with_manual_steps(arm):
    "Example `word_language_model` of PyTorch: an LSTM that carries its state, clipped gradients, steps by hand with a rate of 20"
    data = chain(30, 16000).view(20, -1).T.contiguous()
    model = Words()
    te = arm(model)
    for _ in range(6):
        model.train()
        h = torch.zeros(2, 20, 64),torch.zeros(2, 20, 64)
        for i in range(0, 700, 20):
            h = tuple(a.detach() for a in h)
            model.zero_grad()
            o,h = model(data[i:i+20], h)
            loss = F.nll_loss(o, data[i+1:i+21].flatten())
            te.log(loss=loss)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), .25)
            te.step()
            for p in model.parameters(): p.data.add_(p.grad, alpha=-20)
        model.eval()
        with torch.no_grad(): model(data[700:], (torch.zeros(2, 20, 64), torch.zeros(2, 20, 64)))
