"""Each row describes the shard or replica of its tensor. Tested on the first of four simulated ranks.

The other three ranks do not exist: torch's fake process group returns its members, which is all that is needed, and its collectives do nothing."""
import sys
from itertools import chain, combinations
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchember.capture import ranks
from torchember.capture.ranks import Ranks

x = torch.ones(2, 2)
everybody = [0, 1, 2, 3]


@pytest.fixture(autouse=True)
def first_of_four(monkeypatch):
    # restore sys.excepthook after the test, because a process group replaces it
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    dist.init_process_group('fake', rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def net(): return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def watched(model, world=4):
    "Return the `Ranks` of a model, notified of each pass, and a list that gets the reported metadata."
    told = []
    r = Ranks(model, 0, world, told.append)
    model.register_forward_pre_hook(lambda *_: r.pass_begins())
    return r,told


def spread(mesh, *placements): return nn.Parameter(DTensor.from_local(x, mesh, placements, run_check=False))


def part(r, module, ttype='output', x=x, pname=None): return r.columns(module, ttype, x, pname)


def of_own(r, module, pname='weight', ttype='weight'): return part(r, module, ttype, getattr(module, pname), pname)


# ---- axes: groups of ranks over which tensors are distributed

def test_an_axis_of_one_rank_does_not_count():
    "A mesh dimension with one rank, or a wrapper for one rank, gives no axis."
    m = net()
    m[0].weight = spread(init_device_mesh('cpu', (4, 1), mesh_dim_names=('dp', 'tp')), Shard(0), Shard(1))
    r,told = watched(m)
    r.pass_begins()
    assert of_own(r, m[0])=={'part': 'dp:S0'} and told==[{'rank': 0, 'world': 4, 'axes': {'dp': everybody}}]
    alone = DistributedDataParallel(net(), process_group=dist.new_group([0]))
    r,told = watched(alone)
    alone(x)
    assert part(r, alone.module[0], 'output_grad')=={'part': 'world:?'} and told[0]['axes']=={}
    m = fully_shard(net(), mesh=init_device_mesh('cpu', (1, 4), mesh_dim_names=('copies', 'shard')))
    r,told = watched(m)
    r.pass_begins()
    assert part(r, m[0], 'output_grad')=={'part': 'shard:B', 'gscale': .25} and told[0]['axes']=={'shard': everybody}


def test_axes_with_equal_names_are_numbered():
    "Axes with the same name but different ranks get a number in their names."
    r = Ranks(net(), 0, 4)
    sets = [(0, *some) for some in chain.from_iterable(combinations((1, 2, 3), n) for n in (1, 2, 3))]
    names = ['mesh', *(f'mesh{i}' for i in range(2, 8))]
    assert [r.axes.add('mesh', s) for s in sets]==names and r.axes==dict(zip(names, sets, strict=True))
    # the same ranks under another name are the same axis
    assert [r.axes.add('tp', s) for s in sets]==names and len(r.axes)==7
    r = Ranks(net(), 0, 2)
    assert [r.axes.add(n, s) for n,s in (('dp2', (0, 1)), ('dp', (0, 2)), ('dp', (0, 3)), ('dp', (0, 4)), ('dp', (0,)))]==['dp2', 'dp', 'dp3', 'dp4', None]


def test_meshes_without_names():
    m = net()
    m[0].weight,m[0].bias = spread(DeviceMesh('cpu', [0, 1]), Shard(0)),spread(DeviceMesh('cpu', [0, 2]), Replicate())
    m[1].weight = spread(DeviceMesh('cpu', [1, 2]), Shard(0)) # this mesh does not contain rank 0, so it gives no axis
    r,told = watched(m)
    r.pass_begins()
    assert told[0]['axes']=={'mesh': [0, 1], 'mesh2': [0, 2]}
    assert of_own(r, m[0])=={'part': 'mesh:S0 mesh2:?'} and of_own(r, m[0], 'bias')=={'part': 'mesh2:R mesh:?'} and of_own(r, m[1])=={'part': 'mesh:? mesh2:?'}


def test_whether_sums_may_be_partial():
    "`sharded` is updated by each search, because a parameter may become sharded, or whole again."
    m = net()
    r,_ = watched(m)
    seen = []
    for w in (None, spread(DeviceMesh('cpu', everybody), Shard(0)), nn.Parameter(x)):
        if w is not None: m[1].weight = w
        r.find_axes()
        seen.append(r.sharded)
    assert seen==[False, True, False]
    ddp = DistributedDataParallel(net())
    r,_ = watched(ddp)
    ddp(x)
    assert not r.sharded and part(r, ddp.module[1])=={'part': 'dp:B'}


def test_a_tensor_may_be_sharded_in_another_way_each_time():
    "An output may be sharded differently in each call, depending on weights and inputs."
    m,mesh = net(),init_device_mesh('cpu', (4,), mesh_dim_names=('tp',))
    m[0].weight = spread(mesh, Shard(0))
    r,_ = watched(m)
    outputs = x,*(spread(mesh, p) for p in (Shard(0), Shard(1), Partial(), Replicate())),spread(DeviceMesh('cpu', everybody), Shard(0))
    for _ in range(2): assert [part(r, m[0], 'output', o)['part'] for o in outputs]==['tp:?', 'tp:S0', 'tp:S1', 'tp:P', 'tp:R', 'tp:S0']


# ---- searching for wrappers such as DDP and FSDP

@pytest.mark.parametrize('at', range(1, 6))
def test_a_wrapper_is_found_before_each_of_the_first_three_passes(at):
    m = net()
    r,told = watched(m)
    for n in range(1, 6):
        if n==at: m[1].weight = spread(init_device_mesh('cpu', (4,), mesh_dim_names=('tp',)), Shard(0))
        r.pass_begins()
        assert r.searched==min(n, 3)
    axes = [t['axes'] for t in told]
    # metadata is reported only if it has changed
    assert axes==([{'tp': everybody}] if at==1 else [{}, {'tp': everybody}] if at<=3 else [{}])
    assert r.sharded==(at<=3)


def test_a_row_before_the_first_pass_searches():
    m = net()
    m[0].weight = spread(init_device_mesh('cpu', (4,), mesh_dim_names=('tp',)), Shard(0))
    r,told = watched(m)
    assert of_own(r, m[0])=={'part': 'tp:S0'} and len(told)==r.searched==1
    assert of_own(r, m[0])=={'part': 'tp:S0'} and len(told)==r.searched==1


def test_a_module_stays_spread_when_its_wrapper_is_gone():
    "The model runs without a wrapper, with it, and without it again. Names of axes must stay the same."
    m = net()
    r,told = watched(m)
    ddp,seen = DistributedDataParallel(m),[]
    for f in (m, ddp, m):
        f(x)
        seen.append([part(r, m[0], 'output_grad'), of_own(r, m[1])])
    assert seen==[[{'part': 'world:?'}]*2, *[[{'part': 'dp:B', 'gscale': .25}, {'part': 'dp:R'}]]*2]
    assert [t['axes'] for t in told]==[{}, {'dp': everybody}] # the axis stays after the wrapper is gone


# ---- wrappers around a part of the model

def test_parameters_that_a_wrapper_does_not_keep_equal():
    m = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(m, ['1.bias'])
    r,_ = watched(m)
    DistributedDataParallel(m)(x)
    assert [of_own(r, l, p)['part'] for l in m for p in ('weight', 'bias')]==['dp:R', 'dp:R', 'dp:R', 'dp:?']
    assert [part(r, m[1], t) for t in ('input', 'output', 'input_grad', 'output_grad')]==[{'part': 'dp:B'}]*2+[{'part': 'dp:B', 'gscale': .25}]*2
    # the wrapper averages this gradient, so all ranks have the same
    assert part(r, m[1], 'weight_grad', x, 'weight')=={'part': 'dp:R'}


def test_the_inner_of_two_wrappers_counts():
    "The whole model is sharded over four ranks, and its second layer over two of them."
    m = net()
    fully_shard(m[1], mesh=init_device_mesh('cpu', (2, 2), mesh_dim_names=('copies', 'shard'))['shard'])
    fully_shard(m, mesh=init_device_mesh('cpu', (4,), mesh_dim_names=('all',)))
    r,told = watched(m)
    r.pass_begins()
    assert told[0]['axes']=={'all': everybody, 'shard': [0, 1]}
    assert [part(r, l, 'output_grad') for l in (m, *m)]==[{'part': 'all:B shard:?', 'gscale': .25}]*2+[{'part': 'shard:B all:?', 'gscale': .5}]
    assert of_own(r, m[0])=={'part': 'all:S0 shard:?'} and of_own(r, m[1])=={'part': 'shard:S0 all:?'}


def test_stages_of_a_pipeline(monkeypatch):
    "One rank has two pipeline stages. The schedule divides the gradients by its 8 micro-batches."
    m,two = net(),dist.new_group([0, 2])
    stages = [(SimpleNamespace(stage_index=i, group=two), l, 8) for i,l in ((1, m[0]), (3, m[1]))]
    monkeypatch.setattr(ranks, 'pipeline_stages', lambda model: stages if model is m else [])
    later,(r,told) = [stages.pop()],watched(m)
    r.pass_begins()
    stages += later
    r.pass_begins()
    about = {'rank': 0, 'world': 4, 'axes': {'pp': [0, 2]}}
    assert told==[{**about, 'stages': {'0': 1}}, {**about, 'stages': {'0': 1, '1': 3}}]
    assert part(r, m[0], 'output_grad')=={'part': 'pp:U world:?', 'gscale': .125} and of_own(r, m[0])=={'part': 'pp:U world:?'}
    stages.clear()
    r.pass_begins()
    # the module belongs to no stage any more
    assert told[2]==about and of_own(r, m[0])=={'part': 'pp:? world:?'} and part(r, m[0], 'output_grad')=={'part': 'pp:? world:?'}
    stages[:] = [(SimpleNamespace(stage_index=0, group=None), m[0], 1)]
    r,told = watched(m)
    r.pass_begins()
    assert told[0]['axes']=={'pp': everybody} and part(r, m[0], 'output_grad')=={'part': 'pp:U'}
