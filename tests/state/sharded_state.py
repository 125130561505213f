"""Program of `test_state_sharded.py` for several processes: compute reductions of a sharded model."""
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torchember import StateDict, from_grad, from_weight, trust_ratio

rank,world,store,out = int(sys.argv[1]),int(sys.argv[2]),sys.argv[3],sys.argv[4]
dist.init_process_group('gloo', init_method=f'file://{store}', rank=rank, world_size=world)
mesh = init_device_mesh('cpu', (world,))
numbers = ('norm1', 'norm2', 'norm1_mean', 'sum', 'mean', 'std', 'skew', 'kurtosis', 'max', 'min', 'abs_min', 'abs_max')


def numbers_of(d):
    "Return all reductions of a StateDict as Python numbers."
    return dict(whole={n: getattr(d, n)().item() for n in numbers}, numel=d.numel(), p3=d.norm(3).item(), lw=d.norm(lw=True), p3lw=d.norm(3, lw=True),
        shape=d.shape(lw=True), table=d.describe(lw=True, group='all', display=False))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)) # uneven shards: 5 rows, 3 rows for 2 processes, and a bias of 3


def trained(m):
    before = from_weight(m, clone=True)
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    torch.manual_seed(1)
    m(torch.randn(4, 7)).square().sum().backward()
    grad = from_grad(m, clone=True)
    opt.step()
    return before, grad, from_weight(m)-before


plain = trained(model())
sharded = model()
fully_shard(sharded, mesh=mesh)
sharded = trained(sharded)
assert all(isinstance(x, DTensor) for d in sharded for x in d.values())
assert sharded[0].at(0).to_local().numel()<plain[0].at(0).numel()

calls = []
gather = dist.all_gather
dist.all_gather = lambda *a, **k: (calls.append(1), gather(*a, **k))
collectives = {}
for what,f in dict(norm=lambda: sharded[0].norm(), describe=lambda: sharded[0].describe(True, group='all', display=False),
    ratio=lambda: trust_ratio(sharded[2], sharded[0]), repr=lambda: repr(sharded[0]), shape=lambda: sharded[0].shape(lw=True)).items():
    calls.clear()
    f()
    collectives[what] = len(calls)

torch.manual_seed(2)
x = torch.randn(6, 4)
def spread(x, how): return distribute_tensor(x, mesh, [how])
mixed = StateDict(whole=x, copies=spread(x, Replicate()), rows=spread(x, Shard(0)), cols=spread(x, Shard(1)), one=spread(x[:1], Shard(0)),
    partial=DTensor.from_local(x/world, mesh, [Partial()]))
grid = init_device_mesh('cpu', (1, world))
square = StateDict(x=distribute_tensor(x, grid, [Replicate(), Shard(0)]), y=distribute_tensor(x, grid, [Shard(0), Replicate()]))
with open(f'{out}{rank}.json', 'w') as f:
    json.dump(dict(plain=[numbers_of(d) for d in plain], sharded=[numbers_of(d) for d in sharded], ratio=[trust_ratio(d[2], d[0]) for d in (plain, sharded)],
        mixed=mixed.norm(lw=True), mixed_all=mixed.norm().item(), want=x.norm().item(), want_one=x[:1].norm().item(), square=square.norm(lw=True),
        collectives=collectives, repr=repr(sharded[0]), flat=[d[0].flatten().tolist() for d in (plain, sharded)],
        twice=[(2*d[0]+1).norm().item() for d in (plain, sharded)]), f)
dist.destroy_process_group()
