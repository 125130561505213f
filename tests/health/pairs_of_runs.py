"Pairs of trainings that differ in one planted point, or only in rounding"
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from torchember import read, torchEmber

steps = 30
everything = ('input', 'output', 'weight', 'weight_grad', 'output_grad', 'update', 'optimizer', 'buffer')


class Convolutions(nn.Module):
    "A CNN with a bias before BatchNorm: the exact gradient of this bias is 0, so only rounding is left"
    def __init__(self):
        super().__init__()
        self.conv,self.norm,self.act,self.drop,self.head = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(.1), nn.Linear(72, 5)

    def forward(self, x): return self.head(self.drop(F.max_pool2d(self.act(self.norm(self.conv(x.view(-1, 1, 8, 8)))), 2)).flatten(1))


class Attention(nn.Module):
    "Attention with a bias of the keys: the exact gradient of this bias is 0"
    def __init__(self, n=16):
        super().__init__()
        self.embed,self.norm,self.qkv,self.out,self.head = nn.Linear(8, n), nn.LayerNorm(n), nn.Linear(n, 3*n), nn.Linear(n, n), nn.Linear(n, 5)

    def forward(self, x):
        x = self.embed(x.view(-1, 8, 8))
        q,k,v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.head((x+self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))).mean(1))


def dense(): return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))


makes = {'dense': dense, 'convolutions': Convolutions, 'attention': Attention}


def data(seed=1, n=steps, size=32):
    "Return batches of samples with labels that a model can learn."
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    xs = [torch.randn(size, 64, generator=g) for _ in range(n)]
    return [(x, (x@w).argmax(1)) for x in xs]


def adam(ps, **more): return torch.optim.Adam(ps, **{'lr': 3e-3} | more)
def momentum(ps, **more): return torch.optim.SGD(ps, **{'lr': .05, 'momentum': .9} | more)


def train(home, name, make='dense', opt=adam, batches=None, seed=0, before=None, each=None, after=None, loss=F.cross_entropy, parts=1, forward=None,
    around=None, noise=None, dtype=None, note=True, compiled=False, n=None, **more):
    """A run, as a table. before(model), each(model, x, y, step) -> (x, y), after(model, step) between backward and the optimizer's step;
    noise: seed of dropout"""
    torch.manual_seed(seed)
    model = (makes[make] if isinstance(make, str) else make)()
    if before: before(model)
    if dtype: model.to(dtype)
    if noise is not None: torch.manual_seed(noise)
    o = opt([p for p in model.parameters() if p.requires_grad])
    call = torch.compile(model, backend='aot_eager' if compiled is True else compiled) if compiled else model
    with torchEmber(model, optimizer=o, name=name, home=home, **more) as te, around() if around else nullcontext():
        for i,(x,y) in enumerate((batches or data())[:n]):
            if each: x,y = each(model, x, y, i)
            if dtype: x = x.to(dtype)
            total = 0.
            for xs,ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
                value = loss((forward or (lambda m, x: m(x)))(call, xs), ys)/parts
                value.backward()
                total += float(value.detach())
            if note: te.log(loss=total)
            if after: after(model, i)
            o.step()
            o.zero_grad()
    return read(name, home=home)


def where(d): return SimpleNamespace(step=d.step, path=d.path, ttype=d.ttype, name=d.pname or d.tname)
