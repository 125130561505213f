"Trainings of a small model that give the same numbers on each device. `to`: function that moves a tensor to the device of the model"
import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn

from torchember import torchEmber

ALL = 'input', 'output', 'weight', 'weight_grad', 'input_grad', 'output_grad', 'optimizer', 'update'


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body,self.norm,self.act,self.drop,self.head = nn.Linear(5, 8),nn.LayerNorm(8),nn.GELU(),nn.Dropout(0.),nn.Linear(8, 3)
    def forward(self, x): return self.head(self.drop(self.act(self.norm(self.body(x)))))


def model():
    torch.manual_seed(0)
    return Net()


def data(steps=4):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, generator=g) for _ in range(steps)]


def adam(net, **kwargs): return torch.optim.AdamW(net.parameters(), lr=.01, **kwargs)


def plain(net, opt, to, seen=lambda: None, **kwargs):
    for x in data():
        net(to(x)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        seen()


def accumulated(net, opt, to, seen=lambda: None):
    for i,x in enumerate(data(6)):
        net(to(x)).square().mean().backward()
        if i%2:
            opt.step()
            opt.zero_grad()
            seen()


def clipped(net, opt, to, seen=lambda: None):
    for x in data():
        net(to(x)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), .01)
        opt.step()
        opt.zero_grad()
        seen()


def checkpointed(net, opt, to, seen=lambda: None):
    for x in data():
        h = torch.utils.checkpoint.checkpoint(net.body, to(x).requires_grad_(), use_reentrant=False)
        net.head(net.act(h)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        seen()


def evaluated(net, opt, to, seen=lambda: None):
    for x in data():
        net(to(x)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        net.eval()
        with torch.no_grad(): net(to(x))
        net.train()
        seen()


def with_closure(net, opt, to, seen=lambda: None):
    for x in data():
        def closure(x=x):
            opt.zero_grad()
            loss = net(to(x)).square().mean()
            loss.backward()
            return loss
        opt.step(closure)
        seen()


def in_halves(net, opt, to, seen=lambda: None):
    "Train a model whose inputs are in bfloat16."
    for x in data():
        net(to(x.bfloat16())).square().mean().backward()
        opt.step()
        opt.zero_grad()
        seen()


trainings = [plain, accumulated, clipped, checkpointed, evaluated, with_closure, in_halves]
settings = {'all': dict(ttypes=ALL, stats='numerics'), 'as it comes': {}, 'every third': dict(every=3),
    'ratios': dict(ttypes=('weight', 'update'), stats='full')}
optimizers = {'foreach': dict(foreach=True), 'fused': dict(fused=True), 'one by one': dict(foreach=False)}


def recorded(train, net, to, home, options, kind, seen=lambda: None):
    opt = adam(net, **optimizers[kind])
    with torchEmber(net, opt, home=home, **options) as te: train(net, opt, to, seen)
    return te


def same(got, want, rtol=1e-5):
    assert len(got)==len(want) and list(got.columns)==list(want.columns)
    for c in want.columns.drop('ts'):
        if want[c].dtype.kind=='f': np.testing.assert_allclose(got[c], want[c], rtol=rtol, atol=1e-8, err_msg=c)
        else: assert list(map(str, got[c]))==list(map(str, want[c])), c


cases = [(plain, o, k) for o in settings for k in optimizers]+[(t, 'all', 'foreach') for t in trainings if t is not plain]
