"""Run by `test_monitor.py` in each of two processes: train a model with DDP or FSDP2 and a Monitor, and write the results.

    python -m torch.distributed.run --nproc_per_node=2 monitored.py FOLDER"""
import json
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchember import Monitor

config = {'0': ['InputStd', 'InputCovMaxEig', 'WeightNorm', 'WeightGradNorm', 'WeightEffectiveRank'], '1': [['MeanTID', 'linear(2, 1)']],
    '3': ['OutputGradSndNorm', 'WeightParamJump']}


def trained(how, rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    run = nn.parallel.DistributedDataParallel(model) if 'ddp' in how else fully_shard(model) if how=='fsdp' else model
    if 'compiled' in how: run = torch.compile(run, backend='aot_eager')
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    monitor = Monitor(run, config)
    g = torch.Generator().manual_seed(rank)
    for step in range(4):
        opt.zero_grad()
        run(torch.randn(16, 6, generator=g)).square().sum().backward()
        monitor.track(step)
        opt.step()
    monitor.close()
    return dict(output=monitor.get_output(), run=monitor.fname, rows=monitor.t.df[['rank', 'step']].drop_duplicates().values.tolist())


if __name__=='__main__':
    dist.init_process_group('gloo')
    torch.set_num_threads(1)
    rank = dist.get_rank()
    out = {how: trained(how, rank) for how in ('ddp', 'ddp compiled', 'fsdp')}
    (Path(sys.argv[1])/f'{rank}.json').write_text(json.dumps(out))
    dist.barrier()
    dist.destroy_process_group()
