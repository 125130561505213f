"""Program of `test_distributed.py` for two processes: train each model unarmed and armed, and save the results.

    python -m torch.distributed.run --nproc_per_node=2 sharded.py CASE FOLDER"""
import json
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from compared import GPT
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchember import torchEmber

warnings.simplefilter('ignore')
BACKEND = 'aot_eager'
TTYPES = ('input', 'output', 'weight', 'weight_grad', 'output_grad')


def shard(model):
    for b in model.blocks: fully_shard(b)
    return fully_shard(model)


def compile_blocks(model):
    for b in model.blocks: b.compile(backend=BACKEND)
    return model


ddp = nn.parallel.DistributedDataParallel
steps = { # case -> operations on the model, in their order; 'arm' creates the ember
    'ddp armed before': 'arm ddp', 'ddp armed after': 'ddp arm',
    'ddp compiled, armed before': 'arm ddp compile', 'ddp compiled, armed after': 'ddp compile arm',
    'fsdp armed before': 'arm shard', 'fsdp armed after': 'shard arm',
    'fsdp blocks, armed before': 'arm blocks shard', 'fsdp blocks, armed after': 'shard blocks arm'}
do = {'ddp': ddp, 'compile': lambda m: torch.compile(m, backend=BACKEND), 'shard': shard, 'blocks': compile_blocks}


def local(x): return x.to_local() if hasattr(x, 'to_local') else x


def run(order, name):
    "Train a model after the given operations, armed if `name` is given. Return losses, means of gradients, and numbers of the ember."
    torch._dynamo.reset()
    torch.manual_seed(0)
    net,te,seen = GPT(2),None,[]
    inner = net
    for what in order.split():
        if what!='arm': net = do[what](net)
        else: te = torchEmber(net, ttypes=TTYPES, name=name.replace(' ', '_').replace(',', ''), every=2, on_error='raise')
    opt = torch.optim.SGD(net.parameters(), .1)
    torch.manual_seed(10+dist.get_rank()) # Each rank has different data
    losses = []
    for i in range(4):
        x = torch.randint(0, 29, (2, 6))
        loss = net(x).square().mean()
        loss.backward()
        if not name and i==2: seen = {n: local(p.grad).double().mean().item() for n,p in inner.named_parameters()}
        if te: te.step()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    report = te.close() if te else None
    return losses, seen, report, len(te.t.lines()) if te else 0


if __name__=='__main__':
    dist.init_process_group('gloo')
    torch.set_num_threads(1)
    # The unarmed training is the same for cases that arm before or after wrapping, so it runs once
    out,unarmed = {},cache(lambda order: run(order, None))
    for case in (sys.argv[1].split(';') if sys.argv[1]!='all' else steps):
        (bare,seen,_,_),(armed,_,report,rows) = unarmed(steps[case].replace('arm', '').strip()),run(steps[case], case)
        out[case] = dict(bare=bare, armed=armed, report=report, rows=rows, seen=seen)
    (Path(sys.argv[2])/f'{dist.get_rank()}.json').write_text(json.dumps(out))
    dist.barrier()
    dist.destroy_process_group()
