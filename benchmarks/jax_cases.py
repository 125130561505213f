"""Measurements of JAX, each run in a Python process of its own.

`python -m benchmarks.jax_cases NAME ARGUMENTS-AS-JSON` prints the result as JSON. torchember is imported only where it is measured."""
import contextlib
import io
import json
import sys
import warnings
from importlib.metadata import version
from time import perf_counter, process_time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .timing import pairs


# ---- models

class MLP(nn.Module):
    "Dense layers with relu, and a head of ten classes."
    layers: int
    width: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers): x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(10)(x)


class Block(nn.Module):
    "Layer of a transformer, with the signature that `nn.scan` of flax needs."
    width: int

    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm()(x)
        x = x+nn.MultiHeadDotProductAttention(num_heads=4)(h, h)
        h = nn.LayerNorm()(x)
        return x+nn.Dense(self.width)(nn.gelu(nn.Dense(4*self.width)(h))), None


class Transformer(nn.Module):
    "Transformer whose layers run in a scan and are recomputed in the backward pass."
    width: int
    layers: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width)(x)
        scan = nn.scan(nn.remat(Block, prevent_cse=False), variable_axes={'params': 0}, split_rngs={'params': True}, length=self.layers)
        x,_ = scan(self.width, name='layers')(x, None)
        return nn.Dense(10)(x.mean(1))


models = { # name of a model -> (model, shape of a batch)
    'mlp': (MLP(4, 512), (1024, 512)),
    'transformer': (Transformer(128, 6), (16, 64, 64)),
    'tiny': (MLP(4, 16), (128, 64))}


def training(
    name # Name of a model in `models`
):
    "Return a jitted step of Adam on one batch, and the arguments of its first call. The step returns parameters, optimizer state and gradients."
    model,shape = models[name]
    random = np.random.RandomState(0)
    x,y = jnp.asarray(random.randn(*shape), jnp.float32),jnp.asarray(random.randint(0, 10, shape[0]))
    opt = optax.adam(1e-3)
    params = jax.jit(model.init)(jax.random.key(0), x)
    def loss(p, x, y): return optax.softmax_cross_entropy_with_integer_labels(model.apply(p, x), y).mean()
    @jax.jit
    def update(p, s, x, y):
        g = jax.grad(loss)(p, x, y)
        u,s = opt.update(g, s, p)
        return optax.apply_updates(p, u), s, g
    return lambda p, s, run=lambda f, *a: f(*a): run(update, p, s, x, y), params, jax.jit(opt.init)(params)


# ---- measurements of torchember

def tracked(
    params, state, # Parameters and optimizer state
    scalars, # True to record statistics only, without counts of exponents
    everything, # True to record parameters, optimizer state and gradients in addition to outputs
    **how # Other arguments of `track`
):
    "Return a tracker of jaxember."
    from torchember.jaxember.tracker import stash_scalar_stats, track
    if everything: how |= dict(model_state=params, optimizer_state=state, track_gradients=True)
    return track(stash_value=stash_scalar_stats if scalars else None, **how)


def timed(f):
    "Return CPU time and wall time of one call, in seconds."
    clock,cpu = perf_counter(),process_time()
    f()
    return process_time()-cpu, perf_counter()-clock


def both(bare, armed, budget, least):
    "Return the seconds of calls without and with a tracker, as pairs: first pairs of CPU time, then pairs of wall time."
    out = pairs(bare, armed, budget, least)
    return [[[b[i], a[i]] for b,a in out] for i in (0, 1)]


def cost(name, scalars, everything, quick, off=False):
    "Return the times of a training step without and with a tracker, measured in turns. The time of the writer thread is included."
    step,params,state = training(name)
    how = dict(every=lambda i: False) if off else {}
    times = 20 if name=='tiny' else 1
    with quiet(), tracked(params, state, scalars, everything, **how) as t:
        given = (lambda out: out) if everything else lambda out: ()
        def bare():
            for _ in range(times): jax.block_until_ready(step(params, state))
        def armed():
            for _ in range(times):
                out = step(params, state, t.intercept)
                t.step(*given(out))
                jax.block_until_ready(out)
            t.t.file.flush()
        for _ in range(3): bare(); armed()
        cpu,clock = both(lambda: timed(bare), lambda: timed(armed), *((1, 3) if quick else (5, 10)))
        rows = 0 if off else len(t.t.latest_line_list())
    return dict(cpu=[[x/times for x in p] for p in cpu], clock=[[x/times for x in p] for p in clock], rows=rows)


def calls(quick):
    "Return the seconds of the calls `intercept` and `step` alone, in steps that are not recorded."
    with quiet(), tracked({}, {}, True, False, every=lambda i: False) as t:
        def plain():
            for f in [int]*1000: f()
        def ours():
            for _ in range(1000): t.intercept(int); t.step()
        ps = pairs(lambda: timed(plain)[0]/1000, lambda: timed(ours)[0]/1000, .2 if quick else 2, 5)
    return dict(cpu=ps)


def first(name, armed, scalars=True, everything=True):
    "Return the seconds of the first step without imports: tracing, compiling, and the start and end of the tracker."
    step,params,state = training(name)
    jax.block_until_ready((params, state))
    if not armed: return timed(lambda: jax.block_until_ready(step(params, state)))
    import torchember.jaxember.tracker # noqa: F401 so that the import does not count
    def run():
        with tracked(params, state, scalars, everything) as t:
            out = step(params, state, t.intercept)
            t.step(*(out if everything else ()))
            jax.block_until_ready(out)
    with quiet(): return timed(run)


def quiet():
    warnings.simplefilter('ignore')
    return contextlib.redirect_stdout(io.StringIO())


# ---- the example of Track & Visualize, measured with both tools

class Digits(nn.Module):
    "MLP of three layers, with 512, 512 and 10 units."
    @nn.compact
    def __call__(self, x):
        for width in (512, 512): x = nn.relu(nn.Dense(width)(x))
        x = nn.Dense(10)(x)
        return x-jax.nn.logsumexp(x, axis=1, keepdims=True)


def digits():
    "Return batches of 128 images of 8 x 8 pixels."
    from sklearn.datasets import load_digits
    data = load_digits()
    x,y,random = np.float32(data.data/16),np.eye(10, dtype=np.float32)[data.target],np.random.RandomState(0)
    while True:
        order = random.permutation(len(x))
        for i in range(0, len(x)-127, 128): yield x[order[i:i+128]], y[order[i:i+128]]


def restore_removed_names():
    "Restore names that newer versions of JAX removed, so that Track & Visualize runs."
    import typing

    from optax._src import base
    out = []
    if not hasattr(base, 'NamedTuple'):
        base.NamedTuple = typing.NamedTuple
        out.append('optax._src.base.NamedTuple')
    for cls in (type(jnp.zeros(1)), jax.core.Tracer):
        if not hasattr(cls, '__div__'):
            cls.__div__ = cls.__truediv__
            out.append(f'{cls.__name__}.__div__')
    return out


def example(tool, quick, jitted=False, mend=False):
    "Return pairs of seconds of a step, without and with `tool`. It tracks parameters, optimizer state, gradients, outputs and exponents."
    mends = restore_removed_names() if mend else []
    model,batches,opt = Digits(),digits(),optax.adam(1e-3, eps=2**-16)
    params = model.init(jax.random.PRNGKey(42), np.zeros((128, 64), np.float32))
    state = opt.init(params)
    def loss(params, batch): return -jnp.mean(jnp.sum(model.apply(params, batch[0])*batch[1], axis=1))
    def update(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        updates,state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads
    f = jax.jit(update) if jitted else update
    if tool=='tandv': from tandv.track.jax import track
    else: from torchember.jaxember.tracker import track
    with quiet(), track(model_state=params, optimizer_state=state, track_gradients=True) as t:
        at = {'bare': (params, state), 'armed': (params, state)}
        def bare():
            at['bare'] = f(*at['bare'], next(batches))[:2]
            jax.block_until_ready(at['bare'])
        def armed():
            *new,grads = t.intercept(f, *at['armed'], next(batches))
            t.step(*new, grads)
            at['armed'] = tuple(new)
            jax.block_until_ready(new)
            if tool!='tandv': t.t.file.flush()
        for _ in range(3): armed(); bare() # the first tracked step traces the jitted functions, which takes longer
        if tool=='tandv': count = len(t._global_stash[max(t._global_stash)]) if t._global_stash else 0
        else: count = len(t.t.latest_line_list())
        cpu,clock = both(lambda: timed(bare), lambda: timed(armed), *((2, 3) if quick else (6, 10)))
    return dict(cpu=cpu, clock=clock, rows=count, mended=mends)


def main(case, arguments):
    try:
        with contextlib.redirect_stdout(sys.stderr): out = globals()[case](**arguments)
    except Exception as e:
        why = e.__context__ or e # an exception while closing hides the first exception, which is the reason
        sys.exit(f"{type(why).__name__}: {(str(why).strip().splitlines() or [''])[0]}")
    if isinstance(out, dict) and arguments.get('tool'):
        with contextlib.suppress(Exception): out['version'] = version(arguments['tool'])
    print('\n'+json.dumps(out))
    sys.stdout.flush()


if __name__=='__main__': main(sys.argv[1], json.loads(sys.argv[2]))
