"Program of `test_diff.py` for 2 processes: one training on two ranks, on one rank, and on two with another learning rate"
import os
import sys

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn

from torchember import torchEmber

home,rank = sys.argv[1],int(os.environ['RANK'])
torch.set_num_threads(1)
ttypes = ('input', 'output', 'weight', 'weight_grad', 'update')


def train(name, ranks, lr=1e-2, n=10):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    both = nn.parallel.DistributedDataParallel(model) if ranks>1 else model
    opt,data = torch.optim.Adam(model.parameters(), lr),torch.Generator().manual_seed(1)
    with torchEmber(both, optimizer=opt, name=name, home=home, ttypes=ttypes):
        for _ in range(n):
            x,y = torch.randn(32, 8, generator=data),torch.randint(5, (32,), generator=data)
            if ranks>1: x,y = x.chunk(2)[rank],y.chunk(2)[rank]
            F.cross_entropy(both(x), y).backward()
            opt.step()
            opt.zero_grad()


dist.init_process_group('gloo')
train('two', 2)
train('two, other lr', 2, 1.1e-2)
dist.destroy_process_group()
if rank==0:
    for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'): os.environ.pop(k, None)
    train('one', 1)
