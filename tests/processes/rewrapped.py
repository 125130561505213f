"""Run by `test_rewrapped.py` in each of 2 processes: models with a `DistributedDataParallel` wrapper in some steps only.

    python -m torch.distributed.run --nproc_per_node=2 rewrapped.py FOLDER"""
import os
import sys
import warnings

import torch
from torch import distributed as dist
from torch import nn

from torchember import torchEmber

warnings.simplefilter('ignore')
torch.set_num_threads(1)
folder,rank,steps = sys.argv[1],int(os.environ['RANK']),8
ddp = nn.parallel.DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body,self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh()),nn.Linear(5, 1)
        self.unused = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x): return self.head(self.body(x))


def train(name, wrapped, same=(), **how):
    "Train with different data on each rank. wrapped: steps with a new DDP wrapper. same: steps with the same data on all ranks"
    torch.manual_seed(0)
    model,g = Net(),torch.Generator().manual_seed(rank)
    opt = torch.optim.SGD([*model.body.parameters(), *model.head.parameters()], .1)
    te = torchEmber(model, optimizer=opt, name=name, home=folder, ttypes=('input', 'output', 'weight', 'weight_grad', 'output_grad'))
    for s in range(steps):
        net = ddp(model, find_unused_parameters=True, **how) if s in wrapped else model
        x = torch.randn(6, 4, generator=g)
        net(torch.ones(6, 4)*s if s in same else x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return te


dist.init_process_group('gloo')
alone = dict(init_sync=False) # DDP does not synchronize the replicas at its creation, so they stay different
train('second', range(1, steps, 2), **alone).close()
train('late', range(5, steps, 2), **alone).close()
train('in_step', range(0, steps, 2)).close()
train('mostly_same', range(steps), range(2, steps)).close()
train('once_same', range(steps), [1]).close()
dist.destroy_process_group()
