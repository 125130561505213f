"""Run by `test_drifting.py` in each of 2 processes: DDP trainings whose model copies drift apart, and healthy trainings.

    python -m torch.distributed.run --nproc_per_node=2 drifting.py FOLDER"""
import os
import sys
import warnings
from contextlib import nullcontext

import torch
from torch import distributed as dist
from torch import nn

from torchember import torchEmber

warnings.simplefilter('ignore')
torch.set_num_threads(1)
folder,rank = sys.argv[1],int(os.environ['RANK'])
ddp = nn.parallel.DistributedDataParallel


def train(name, called=None, lr=.1, prepare=None, hook=None, after=None, micro=1, opt=torch.optim.SGD, steps=16):
    """Train with different data on each rank.

    called: function of DDP model and step, returns the model to call. prepare, after: functions called before the training and after each step
    """
    torch.manual_seed(0)
    inner,g = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),torch.Generator().manual_seed(rank)
    net = ddp(inner)
    if prepare: prepare(inner)
    if hook: net.register_comm_hook(None, hook)
    opt = opt(inner.parameters(), lr)
    with torchEmber(inner, optimizer=opt, name=name, home=folder) as te:
        for s in range(steps):
            opt.zero_grad()
            for m in range(micro):
                x = torch.randn(6, 4, generator=g)
                with net.no_sync() if m<micro-1 else nullcontext():
                    loss = (called(net, s) if called else net)(x).sub(x.sum(1, keepdim=True)).square().mean()
                    te.log(loss=loss)
                    loss.backward()
            opt.step()
            if after: after(inner, s)
    te.close()


def losing_hook():
    "Return a communication hook of DDP that averages gradients, but returns zeros on rank 1 in steps 5 and 9."
    seen = []
    def hook(state, bucket):
        seen.append(0)
        lost = rank and len(seen) in (6, 10)
        def result(f): return torch.zeros_like(f.value()[0]) if lost else f.value()[0]/2
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(result)
    return hook


def average(model, s):
    if s%4==3:
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= 2


def other_head(model):
    torch.manual_seed(rank)
    model[-1].reset_parameters()


def one_rank_decays(model, s):
    if rank and s==7: model[-1].weight.data *= .9


dist.init_process_group('gloo')
# trainings whose model copies drift apart
train('lost', hook=losing_hook())
train('second', called=lambda net, s: net.module if s%2 else net)
train('never', called=lambda net, s: net.module)
train('late', called=lambda net, s: net.module if s>=8 else net)
train('rates', lr=.1/(1+rank))
train('start', prepare=other_head)
train('by_hand', after=one_rank_decays)
# healthy trainings
train('plain', opt=torch.optim.AdamW, lr=.01)
train('accumulated', micro=3)
train('local', called=lambda net, s: net.module, after=average)
train('long', steps=40)
dist.destroy_process_group()
