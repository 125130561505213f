"Training loop, data and small networks, shared by the broken trainings"
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn import datasets
from torch import nn

from .data import batch, digits, standard


def fit(arm, model, opt, batches, loss_of=F.cross_entropy, **armed):
    "Run the usual training loop. Return the losses."
    te,losses = arm(model, optimizer=opt, **armed),[]
    for x,y in batches:
        loss = loss_of(model(x), y)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    te.close()
    return losses


def fit_language_model(arm, model, n=60, lr=3e-3, **armed):
    "Train a language model of Hugging Face, which returns its loss, to predict the next letter."
    opt = torch.optim.AdamW(model.parameters(), lr)
    te = arm(model, optimizer=opt, **armed)
    for x,_ in passages(n, 16):
        loss = model(input_ids=x, labels=x).loss
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
    te.close()


def batches(n, size, *tensors):
    for _ in range(n): yield batch(size, *tensors)


def first(found):
    "Return the index of the first true value."
    return next(i for i,f in enumerate(found) if f)


def first_not_finite(losses): return first(not math.isfinite(l) for l in losses)


def ends(losses, n=10):
    "Return the mean of the first losses and the mean of the last losses."
    return sum(losses[:n])/n,sum(losses[-n:])/n


def squared(out, y): return F.mse_loss(out.squeeze(-1), y)


def of_tokens(out, y): return F.cross_entropy(out.flatten(0, 1), y.flatten())


def weights(model): return {n: p.detach().clone() for n,p in model.named_parameters()}


def changed(model, before):
    "Return the names of the parameters that have changed since a copy of them was made."
    return {n for n,p in model.named_parameters() if not torch.equal(p, before[n])}


def table(name, raw=False, regression=False):
    "Return a data set of scikit-learn: features, and targets."
    x,y = getattr(datasets, f'load_{name}')(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32)
    return x if raw else standard(x),standard(torch.tensor(y, dtype=torch.float32)) if regression else torch.tensor(y)


prose = ('it was a bright cold day in april and the rain had been falling since the morning on the roofs of the town '
    'where nobody knew what the clocks were for and all of them went on asking one another for the time ')*6
letters = sorted(set(prose))
text = torch.tensor([letters.index(c) for c in prose])


def passages(n, size, length=24):
    "Yield batches of text, and the same text shifted by one letter as the target."
    for _ in range(n):
        at = torch.randint(len(text)-length-1, (size, 1))+torch.arange(length)
        yield text[at],text[at+1]


def echoes(n, size, length=20, late=None):
    """Yield batches of sequences, and the first number of each sequence as its target.

    From batch `late[0]` on, the length of the sequences is `late[1]`."""
    for i in range(n):
        x = torch.randn(size, late[1] if late and i>=late[0] else length, 1)
        yield x,x[:, 0, 0]


def ring(n=60):
    "Return a graph of three communities: features, normalized adjacency matrix, communities."
    y = torch.arange(n)%3
    a = (torch.rand(n, n)<torch.where(y[:, None]==y, .3, .03)).float().triu(1)
    a = a+a.T+torch.eye(n)
    d = a.sum(1).rsqrt()
    return F.one_hot(y, 3).float()+torch.randn(n, 3),d[:, None]*a*d,y


def mlp(*sizes, act=nn.ReLU):
    pairs = [*pairwise(sizes)]
    return nn.Sequential(*[m for i,(a,b) in enumerate(pairs) for m in (nn.Linear(a, b), act())[:1 if i==len(pairs)-1 else 2]])


class Convolutions(nn.Module):
    "A small CNN for the digits"
    def __init__(self, c=8, norm=True):
        super().__init__()
        def block(a, b): return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b) if norm else nn.Identity(), nn.ReLU())
        self.features = nn.Sequential(block(1, c), block(c, c), nn.MaxPool2d(2), block(c, 2*c))
        self.classifier = nn.Linear(2*c, 10)

    def forward(self, x): return self.classifier(self.features(x).mean((2, 3)))


class Letters(nn.Module):
    "An LSTM that predicts the next letter"
    def __init__(self, d=32, layers=1):
        super().__init__()
        self.embed = nn.Embedding(len(letters), d)
        self.lstm = nn.LSTM(d, d, layers, batch_first=True)
        self.head = nn.Linear(d, len(letters))

    def forward(self, x): return self.head(self.lstm(self.embed(x))[0])


class Recurrent(nn.Module):
    "A recurrent network with one output per sequence"
    def __init__(self, d=32, kind=nn.RNN, **kwargs):
        super().__init__()
        self.cell = kind(1, d, batch_first=True, **kwargs)
        self.read = nn.Linear(d, 1)

    def forward(self, x): return self.read(self.cell(x)[0][:, -1])


class Attention(nn.Module):
    "Causal attention with one head, whose scores are multiplied by `scale`"
    def __init__(self, d, scale=None):
        super().__init__()
        self.q,self.k,self.v,self.out = (nn.Linear(d, d) for _ in range(4))
        self.softmax,self.scale = nn.Softmax(-1),d**-.5 if scale is None else scale

    def forward(self, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (self.q(x)@self.k(x).transpose(1, 2)*self.scale).masked_fill(hidden, -math.inf)
        return self.out(self.softmax(scores)@self.v(x))


class Block(nn.Module):
    def __init__(self, d, act=nn.GELU, **kwargs):
        super().__init__()
        self.norm1,self.attn,self.norm2 = nn.LayerNorm(d),Attention(d, **kwargs),nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 4*d), act(), nn.Linear(4*d, d))

    def forward(self, x):
        x = x+self.attn(self.norm1(x))
        return x+self.ff(self.norm2(x))


class Transformer(nn.Module):
    "A transformer that predicts the next letter"
    def __init__(self, d=32, blocks=2, length=24, **kwargs):
        super().__init__()
        self.embed,self.place = nn.Embedding(len(letters), d),nn.Embedding(length, d)
        self.blocks = nn.ModuleList(Block(d, **kwargs) for _ in range(blocks))
        self.norm,self.head = nn.LayerNorm(d),nn.Linear(d, len(letters))

    def forward(self, x):
        x = self.embed(x)+self.place(torch.arange(x.shape[1]))
        for b in self.blocks: x = b(x)
        return self.head(self.norm(x))


class Graph(nn.Module):
    "Two graph convolutions, and an output for each node"
    def __init__(self, d=16):
        super().__init__()
        self.conv1,self.conv2,self.read = nn.Linear(3, d),nn.Linear(d, d),nn.Linear(d, 3)

    def forward(self, xa):
        x,a = xa
        x = F.relu(self.conv1(a@x))
        return self.read(F.relu(self.conv2(a@x)))


class Auto(nn.Module):
    "An autoencoder of digits"
    def __init__(self, *sizes, act=nn.ReLU):
        super().__init__()
        self.encoder,self.decoder = mlp(*sizes, act=act),mlp(*sizes[::-1], act=act)

    def forward(self, x): return self.decoder(self.encoder(x))


def pictures(n, size=64):
    "Yield batches of digits for an autoencoder."
    x,_ = digits()
    for _ in range(n):
        b, = batch(size, x)
        yield b,b
