"A training whose results must not depend on recording"
import torch
from torch import nn
from torch.nn import functional as F

from torchember import torchEmber


def train(model, steps=3, run=None, **more):
    "Train a model for a few steps. Return the losses, the weights and the state of the random generator, and the ember."
    torch.manual_seed(0)
    for p in model.parameters(): nn.init.normal_(p, std=.3)
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, opt, **more) if more else None
    losses = []
    for _ in range(steps):
        loss = F.dropout((run or model)(torch.randn(3, 12, 8)), .5).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    if te: te.close()
    return [torch.tensor(losses), *(p.detach() for p in model.parameters()), torch.get_rng_state()], te
