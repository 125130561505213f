"""Program of `test_jax_processes.py` for 2 or 4 processes: train a network in several layouts. Process 0 also computes it whole, in numpy.

    python spread_jax.py FOLDER DEVICES CASE ...        with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment"""
import json
import os
import re
import sys
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from torchember.jaxember import probe, stash_all_stats_and_hist, stash_scalar_stats, track
from torchember.jaxember.recorder.processes import Agreement
from torchember.jaxember.recorder.spread import rows_of_shards, local_shards_as_one

steps,samples,lr = 2,8,.1
folder,devices,wanted = Path(sys.argv[1]),int(sys.argv[2]),sys.argv[3:]
rank,world = int(os.environ['RANK']),int(os.environ['WORLD_SIZE'])
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', devices)
jax.config.update('jax_enable_x64', True)
jax.config.update('jax_disable_most_optimizations', True)
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", world, rank)
n = len(jax.devices())
size = f'{world}' if devices==1 else f'{world}x{devices}'


# ---- reference in numpy: a network of two layers, and a simplified Adam

def first():
    r = np.random.default_rng(0)
    def layer(a, b): return {'bias': r.standard_normal(b)*.1, 'kernel': r.standard_normal((a, b))/a**.5}
    return {'one': layer(4, 8), 'two': layer(8, 4)}


def batch(step):
    r = np.random.default_rng(100+step)
    return r.standard_normal((samples, 4))*2+.5, r.standard_normal((samples, 4))


def whole_batch(step, seen):
    "Return the values and gradients of a step as a dict of arrays by name"
    p,m = seen['p'],seen['m']
    x,y = batch(step)
    h = x@p['one']['kernel']+p['one']['bias']
    a = np.tanh(h)
    o = a@p['two']['kernel']+p['two']['bias']
    go = 2*(o-y)/o.size
    gh = go@p['two']['kernel'].T*(1-a**2)
    g = {'one': {'bias': gh.sum(0), 'kernel': x.T@gh}, 'two': {'bias': go.sum(0), 'kernel': a.T@go}}
    rows = {('one', 'output', 'output_0'): h, ('two', 'output', 'output_0'): o, ('', 'output', 'output_0'): o,
        ('one', 'output_grad', 'output_0'): gh, ('two', 'output_grad', 'output_0'): go, ('', 'output_grad', 'output_0'): go}
    for path in 'one','two':
        for i,k in enumerate(('bias', 'kernel')):
            rows |= {(path, 'weight', f'weight_{i}'): p[path][k].copy(), (path, 'optimizer', f'trace_{i}'): m[path][k].copy(),
                (path, 'weight_grad', f'grad_{i}'): g[path][k]}
            m[path][k] = g[path][k]+.9*m[path][k]
            p[path][k] = p[path][k]-lr*m[path][k]
    rows['', 'buffer', 'seen'] = seen['mean'].copy()
    seen['mean'] = .9*seen['mean']+.1*h.mean(0)
    return rows


def numbers(x):
    a,e = np.abs(x),np.bincount(np.clip(np.frexp(x[x!=0])[1]-1+17, 0, 34), minlength=35)
    e[0] += (x==0).sum()
    return dict(mean=x.mean(), std=x.std(ddof=1) if x.size>1 else None, abs_mean=a.mean(), abs_max=a.max(), abs_min=a.min(), rms=(a**2).mean()**.5,
        rm4=(a**4).mean()**.25, rm8=(a**8).mean()**.125, exponents=e.tolist(), shape=[*x.shape])


def write(name, rows):
    if rank: return
    (folder/f'{name}.jsonl').write_text(''.join(json.dumps(dict(path=p, ttype=tt, tname=t, step=s, **numbers(x)))+'\n' for s,(p,tt,t),x in rows))


def reference(name, some=None):
    zeros = {k: {i: 0*x for i,x in layer.items()} for k,layer in first().items()}
    seen = dict(p=first(), m=zeros, mean=np.zeros(8))
    write(name, [(s, k, x) for s in range(steps) for k,x in whole_batch(s, seen).items() if some is None or k[1] in some])


# ---- trainings in JAX

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8, name='one', param_dtype=jnp.float64)(x)
        seen = self.variable('batch_stats', 'seen', lambda: jnp.zeros(8))
        if not self.is_initializing(): seen.value = .9*seen.value+.1*h.mean(0)
        return nn.Dense(4, name='two', param_dtype=jnp.float64)(nn.tanh(h))


class Modules(nnx.Module):
    def __init__(self):
        p = first()
        self.one,self.two = (nnx.Linear(*p[k]['kernel'].shape, rngs=nnx.Rngs(0), param_dtype=jnp.float64) for k in ('one', 'two'))
        for k in 'one','two':
            for i,x in p[k].items(): getattr(self, k).__dict__[i][...] = jnp.asarray(x)
        self.seen = nnx.BatchStat(jnp.zeros(8))

    def __call__(self, x):
        h = self.one(x)
        self.seen[...] = .9*self.seen[...]+.1*h.mean(0)
        return self.two(nnx.tanh(h))


def error(o, y): return ((o-y)**2).mean()
opt = optax.sgd(lr, momentum=.9)
net = Net()


def step_of(v, s, x, y):
    def loss(p):
        o,new = net.apply({**v, 'params': p}, x, mutable=['batch_stats'])
        return error(o, y), new
    (value,new),g = jax.value_and_grad(loss, has_aux=True)(v['params'])
    up,s = opt.update(g, s, v['params'])
    return {'params': optax.apply_updates(v['params'], up), **new}, s, g, value


def mesh_of(*shape, names=('data', 'model')): return Mesh(np.array(jax.devices()).reshape(shape), names[:len(shape)])


def laid(x, mesh, spec):
    "Return a distributed array to which each process contributes the data of its devices"
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])


def begun(mesh, spec):
    v = {'params': first(), 'batch_stats': {'seen': np.zeros(8)}}
    s = opt.init(jax.tree.map(jnp.asarray, v['params']))
    return tuple(jax.tree_util.tree_map_with_path(lambda k, x: laid(x, mesh, spec(jax.tree_util.keystr(k), np.shape(x))), t) for t in (v, s))


def train(name, mesh, spec, data=('data',), stats=stash_scalar_stats):
    "Train with a tracker. spec: function of name and shape of a parameter that returns its PartitionSpec"
    update,(v,s) = jax.jit(step_of),begun(mesh, spec)
    with track(v, s, True, stash_value=stats, name=name, home=folder) as t:
        for i in range(steps):
            x,y = (laid(a, mesh, P(*data)) for a in batch(i))
            v,s,g,loss = t.intercept(update, v, s, x, y)
            t.log(loss=loss)
            t.step(v, s, g)
    reference(name)


cases = {}


def case(f):
    cases[f.__name__] = f
    return f


@case
def replicated(): train(f'replicated_{size}', mesh_of(n), lambda k, shape: P(), stats=stash_all_stats_and_hist)


@case
def sharded():
    "Shard parameters and optimizer states along their first dimension, over as many processes as divide it"
    train(f'sharded_{size}', mesh_of(n), lambda k, shape: P('data'))


@case
def tensor_parallel():
    def spec(k, shape): return P(None, 'model') if 'one' in k and len(shape)==2 else P('model') if 'two' in k and len(shape)==2 or 'one' in k else P()
    train(f'tensor_parallel_{size}', mesh_of(n, names=('model',)), spec, data=())


@case
def two_axes():
    "Shard the batch over one mesh axis and the weights over another, so that each device has a different pair of shards"
    def spec(k, shape): return P('data', 'model') if len(shape)==2 else P('model') if 'one' in k else P()
    train(f'two_axes_{size}', mesh_of(2, 2), spec)


@case
def modules():
    "Train a model of flax.nnx with parameters on all processes"
    mesh,name = mesh_of(n),f'modules_{size}'
    m = Modules()
    o = nnx.Optimizer(m, opt, wrt=nnx.Param)
    for part in m,o: nnx.update(part, jax.tree.map(lambda x: laid(x, mesh, P()), nnx.state(part)))
    @nnx.jit
    def update(m, o, x, y):
        loss,g = nnx.value_and_grad(lambda m: error(m(x), y))(m)
        o.update(m, g)
        return g, loss
    with track(m, o, True, stash_value=stash_scalar_stats, name=name, home=folder) as t:
        for i in range(steps):
            g,_ = t.intercept(update, m, o, *(laid(a, mesh, P('data')) for a in batch(i)))
            t.step(m, o, g)
    reference(name)


@case
def not_compiled():
    "Run a step without jit on arrays of all processes: each process records values of its shards"
    mesh,name = mesh_of(n),f'not_compiled_{size}'
    x = laid(batch(0)[0], mesh, P('data'))
    with track(name=name, home=folder, stash_value=stash_scalar_stats) as t:
        t.intercept(lambda x: probe('twice', 2*x), x)
        t.step()
    write(name, [(0, ('', 'probe', 'twice'), 2*batch(0)[0])])


@case
def own_arrays():
    "Train without distributed arrays: each process has a part of the batch, and the program averages the gradients itself"
    name,k = f'own_arrays_{size}',samples//world
    v,s = {'params': jax.tree.map(jnp.asarray, first()), 'batch_stats': {'seen': jnp.zeros(8)}},None
    s = opt.init(v['params'])
    grads = jax.jit(lambda v, x, y: jax.value_and_grad(lambda p: error(net.apply({**v, 'params': p}, x, mutable=['batch_stats'])[0], y))(v['params']))
    with track(v, s, True, stash_value=stash_scalar_stats, name=name, home=folder) as t:
        for i in range(steps):
            x,y = (jnp.asarray(a[rank*k:(rank+1)*k]) for a in batch(i))
            _,g = t.intercept(grads, v, x, y)
            g = jax.tree.map(lambda a: jnp.asarray(a.mean(0)), multihost_utils.process_allgather(g))
            up,s = opt.update(g, s, v['params'])
            v = {**v, 'params': optax.apply_updates(v['params'], up)}
            t.step(v, s, g)
    reference(name, ('output', 'weight', 'weight_grad', 'optimizer'))


@case
def mapped():
    "Run a `shard_map` with values that differ between devices, and with a sum over all devices"
    mesh,name = mesh_of(n),f'mapped_{size}'
    x = batch(0)[0]
    @jax.jit
    @jax.grad
    def f(w, x):
        def one(w, x):
            y = probe('mine', jnp.tanh(w*x))
            return probe('all', jax.lax.psum((y**2).sum(), 'data'))
        return jax.shard_map(one, mesh=mesh, in_specs=(P(), P('data')), out_specs=P())(w, x)
    with track(track_gradients=True, name=name, home=folder, stash_value=stash_scalar_stats) as t:
        g = t.intercept(f, laid(2., mesh, P()), laid(x, mesh, P('data')))
        t.step(gradients=[g])
    y = np.tanh(2*x)
    write(name, [(0, (f'data={i}', 'probe', 'mine'), part) for i,part in enumerate(np.split(y, n))]
        +[(0, (f'data={i}', 'output_grad', 'mine'), part) for i,part in enumerate(np.split(2*y, n))]
        +[(0, ('', 'probe', 'all'), (y**2).sum()), (0, ('', 'output_grad', 'all'), np.array(1.)), (0, ('', 'weight_grad', 'grad_0'), (2*y*(1-y**2)*x).sum())])


@case
def layouts():
    "Record arrays with all kinds of distribution over devices, without a training"
    name,grid,x = f'layouts_{size}',np.array(jax.devices()),np.arange(64.).reshape(8, 8)**1.5-100
    two = Mesh(grid.reshape(2, -1), ('data', 'model'))
    turned = Mesh(grid.reshape(2, -1).T, ('model', 'data'))
    # A mesh in which the devices of a process are not adjacent
    diagonal = Mesh(grid[[0, *range(2, n), 1]].reshape(2, -1), ('a', 'b'))
    specs = {'rows': (two, P('data')), 'columns': (two, P(None, 'model')), 'both': (two, P('data', 'model')), 'one': (two, P(('data', 'model'))),
        'turned': (turned, P('data', 'model')), 'odd': (diagonal, P('a')), 'odd_replicas': (diagonal, P(None, 'b')), 'all': (two, P()),
        'odd_both': (diagonal, P('a', 'b')), 'all_odd': (diagonal, P())}
    tree = {k: laid(x+i, *s) for i,(k,s) in enumerate(specs.items())}
    tree |= {'number': laid(3., two, P()), 'mine': jnp.asarray(x[0]), 'empty': laid(np.zeros((0, 3)), two, P())}
    tree['whole_numbers'] = laid(np.arange(16), two, P('model'))
    tree['complex'] = laid(x+1j*x, two, P('data'))
    with track(tree, name=name, home=folder) as t: t.step(tree)
    with track(tree, name=f'{name}_own', home=folder, stash_value=lambda x: {'sum': jnp.abs(x).sum(), 'n': x.size}) as t: t.step(tree)
    if devices>1: # The program must not communicate between devices: each device reads only its own shard
        array,some = local_shards_as_one(tree['both'])
        program = rows_of_shards(('basic', 'absolute'), some).lower([array]).compile().as_text()
        assert 'f64[4,4]' in program and not re.search('all-(gather|reduce|to-all)|collective|f64\\[8,', program), program
    todo = {k: x+i for i,k in enumerate(specs)} | {'number': np.array(3.), 'mine': x[0], 'whole_numbers': np.arange(16.), 'complex': np.abs(x+1j*x)}
    write(name, [(0, (k, 'weight', ''), x) for k,x in todo.items()])


@case
def laid_out_inside():
    "Run a program that distributes its input itself, by a mesh in the program or by axis names of a mesh that is set"
    mesh,name,x = mesh_of(n),f'laid_out_inside_{size}',batch(0)[0]
    by_constraint = jax.jit(lambda x: probe('once', jax.lax.with_sharding_constraint(2*x, NamedSharding(mesh, P('data')))))
    with track(name=name, home=folder, stash_value=stash_scalar_stats) as t, jax.set_mesh(mesh):
        t.intercept(by_constraint, x)
        t.intercept(jax.jit(jax.shard_map(lambda x: probe('each', 3*x), in_specs=P('data'), out_specs=P('data'))), x)
        t.step()
    write(name, [(0, ('', 'probe', 'once'), 2*x)]+[(0, (f'data={i}', 'probe', 'each'), 3*part) for i,part in enumerate(np.split(x, n))])


@case
def drifted():
    "Train with replicas that differ from the second step on"
    mesh = mesh_of(n)
    def one(i):
        parts = [jax.device_put(np.arange(4.)+(rank if i else 0), d) for d in jax.local_devices()]
        return {'layer': {'kernel': jax.make_array_from_single_device_arrays((4,), NamedSharding(mesh, P()), parts)}}
    with track(one(0), name=f'drifted_{size}', home=folder) as t:
        for i in range(3): t.step(one(i+1))


@case
def unnamed():
    "Track without a name. All processes must agree on one run name"
    with track({'w': jnp.ones(3)}, home=folder) as t: t.step({'w': jnp.ones(3)})
    (folder/f'unnamed.{rank}').write_text(t.name)


@case
def not_all():
    "One process records with other settings, and one does not record at all: their trainings must not change"
    Agreement.patience = 3
    mesh = mesh_of(n)
    x = laid(batch(0)[0], mesh, P('data'))
    f,g = (jax.jit(lambda x, k=k: probe('sum', (x*k).sum())) for k in (2., 3.))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with track({'x': x}, name='every', home=folder, every=1 if rank else 2) as t:
            a = t.intercept(f, x)
            t.step({'x': x})
        if rank: b = g(x)
        else:
            with track({'x': x}, name='alone', home=folder) as t:
                b = t.intercept(g, x)
                t.step({'x': x})
    want = batch(0)[0].sum()
    assert abs(float(a)-2*want)<1e-9 and abs(float(b)-3*want)<1e-9
    (folder/f'not_all.{rank}').write_text(json.dumps([str(w.message) for w in said]))


for c in wanted: cases[c]()
multihost_utils.sync_global_devices('over')
jax.distributed.shutdown()
