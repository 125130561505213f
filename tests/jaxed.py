"""Small JAX models with a training step, and a reference computation of each model by plain operations

A step is `update(state, x, y) -> (state, gradients, more)`. `hand(note, state, x, y)` computes the loss once more with plain operations,
and calls `note(key, x)` for each value that must have a row. This file must not import torch."""
from dataclasses import dataclass
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from torchember.jaxember import probe, track


def entropy(logits, y): return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y).mean()


def batch(shape=(6, 4), classes=3, seed=0, dtype=np.float32):
    r = np.random.default_rng(seed)
    return jnp.asarray(r.standard_normal(shape).astype(dtype)), jnp.asarray(r.integers(0, classes, shape[0]))


@dataclass
class Case:
    "A training step of a JAX model, its initial state, and the function that computes the expected values of its rows"
    update:object # Compiled training step: (state, x, y) -> (state, gradients, further results)
    state:object # Function without arguments that returns the initial state
    parts:object # Function: state -> (model_state, optimizer_state), the arguments of `track`
    hand:object=None # Reference computation: (note, state, x, y) -> loss; `note` stores each expected value
    batch:object=batch # Function: seed -> (x, y)
    constant:tuple=() # Names of values without a gradient
    python:bool=False # True if `hand` has Python branches on values


compiled_quickly = dict(xla_backend_optimization_level=0, xla_llvm_disable_expensive_passes=True) # for functions that run once, where compilation takes longest


# ---- an MLP

class MLP(nn.Module):
    width:int=5
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(3)(x)

opt = optax.adam(.01)

def stepped(model, loss, opt=opt):
    "Return the usual training step of a model in flax.linen."
    def update(state, x, y):
        params,s = state
        value,grads = jax.value_and_grad(partial(loss, model))(params, x, y)
        up,s = opt.update(grads, s, params)
        return (optax.apply_updates(params, up), s), grads, value
    return update

def begun(model, opt=opt, shape=(6, 4)):
    @cache
    def first():
        p = jax.jit(model.init, compiler_options=compiled_quickly)(jax.random.key(1), jnp.ones(shape))
        return jax.device_get((p, opt.init(p)))
    return lambda: jax.tree.map(jnp.array, first())

def plain_loss(model, p, x, y): return entropy(model.apply(p, x), y)

def dense(p, x): return x @ p['kernel'] + p['bias']

def mlp_by_hand(note, state, x, y):
    p = state[0]['params']
    h = note('Dense_0', dense(p['Dense_0'], x))
    return entropy(note('', note('Dense_1', dense(p['Dense_1'], nn.relu(h)))), y)

def mlp(free=()):
    return Case(jax.jit(stepped(MLP(), plain_loss), donate_argnums=free), begun(MLP()), lambda s: s, mlp_by_hand)


# ---- a transformer with blocks in `nn.scan`, which are rematerialized for the gradients

class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, name='attn')(nn.LayerNorm(name='ln')(x))
        return x + nn.Dense(x.shape[-1], name='out')(nn.gelu(nn.Dense(2*x.shape[-1], name='up')(x))), None

class Transformer(nn.Module):
    layers:int=3
    remat:bool=True
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name='into')(x)
        B = nn.remat(Block, prevent_cse=False) if self.remat else Block
        x,_ = nn.scan(B, variable_axes={'params': 0}, split_rngs={'params': True}, length=self.layers)(name='blocks')(x, None)
        return nn.Dense(3, name='head')(x.mean(1))

def transformer_by_hand(note, state, x, y):
    p = state[0]['params']
    x = note('into', dense(p['into'], x))
    for i in range(3):
        b = jax.tree.map(lambda a, i=i: a[i], p['blocks'])
        h = note('blocks.ln', nn.LayerNorm().apply({'params': b['ln']}, x), i)
        q,k,v = (note(f'blocks.attn.{n}', jnp.einsum('bsd,dhe->bshe', h, b['attn'][n]['kernel'])+b['attn'][n]['bias'], i) for n in ('query', 'key', 'value'))
        a = nn.dot_product_attention(q, k, v)
        a = note('blocks.attn.out', jnp.einsum('bshe,hed->bsd', a, b['attn']['out']['kernel'])+b['attn']['out']['bias'], i)
        x = x + note('blocks.attn', a, i)
        x = note('blocks', x + note('blocks.out', dense(b['out'], nn.gelu(note('blocks.up', dense(b['up'], x), i))), i), i)
    return entropy(note('', note('head', dense(p['head'], x.mean(1)))), y)

def transformer():
    model = Transformer()
    return Case(jax.jit(stepped(model, plain_loss)), begun(model, shape=(4, 5, 6)), lambda s: s, transformer_by_hand, partial(batch, (4, 5, 6)))


# ---- a model with batch normalization and dropout: it has other variables than parameters, and needs random numbers

class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=.9, name='bn')(nn.Dense(5, name='fc')(x))
        return nn.Dense(3, name='head')(nn.Dropout(.5, deterministic=not train, name='drop')(nn.relu(x)))

def normed():
    model = Normed()
    @jax.jit
    def update(state, x, y):
        v,s,key = state
        key,sub = jax.random.split(key)
        def loss(p):
            out,new = model.apply({'params': p, 'batch_stats': v['batch_stats']}, x, rngs={'dropout': sub}, mutable=['batch_stats'])
            return entropy(out, y), new
        (value,new),grads = jax.value_and_grad(loss, has_aux=True)(v['params'])
        up,s = opt.update(grads, s, v['params'])
        return ({'params': optax.apply_updates(v['params'], up), **new}, s, key), grads, value
    def state():
        v = model.init({'params': jax.random.key(1), 'dropout': jax.random.key(2)}, jnp.ones((6, 4)))
        return v, opt.init(v['params']), jax.random.key(3)
    def hand(note, state, x, y):
        v,_,key = state
        p = v['params']
        h = note('fc', dense(p['fc'], x))
        mean,var = h.mean(0),(h**2).mean(0)-h.mean(0)**2
        h = note('bn', (h-mean)*lax.rsqrt(var+1e-5)*p['bn']['scale']+p['bn']['bias'])
        # The output of dropout gives its mask: nonzero elements are kept
        seen = model.apply(v, x, rngs={'dropout': jax.random.split(key)[1]}, mutable=['batch_stats'], capture_intermediates=True)[1]['intermediates']
        h = note('drop', jnp.where(lax.stop_gradient(seen['drop']['__call__'][0])!=0, nn.relu(h)*2, 0.))
        return entropy(note('', note('head', dense(p['head'], h))), y)
    return Case(update, state, lambda s: s[:2], hand)


# ---- a recurrent network

class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x): return nn.Dense(3, name='head')(nn.RNN(nn.SimpleCell(5), name='rnn')(x)[:, -1])

def recurrent():
    model = Recurrent()
    def hand(note, state, x, y):
        p = state[0]['params']
        # The parent module created the cell, so flax stores the parameters of the cell there
        cell,name = p['SimpleCell_0'],'SimpleCell_0'
        h,out = jnp.zeros((len(x), 5)),[]
        for t in range(x.shape[1]):
            i = note(f'{name}.i', dense(cell['i'], x[:, t]), t)
            h = jnp.tanh(i + note(f'{name}.h', h@cell['h']['kernel'], t))
            # The cell returns two outputs: the carried state and the result
            out.append(note((name, 'output', 'output_1'), h, t))
            h = note((name, 'output', 'output_0'), h, t)
        return entropy(note('', note('head', dense(p['head'], note('rnn', jnp.stack(out, 1))[:, -1]))), y)
    return Case(jax.jit(stepped(model, plain_loss)), begun(model, shape=(3, 4, 2)), lambda s: s, hand, partial(batch, (3, 4, 2)))


# ---- flax.nnx, which changes model and optimizer in place

class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 5, rngs=rngs)])
        self.bn,self.head = nnx.BatchNorm(5, rngs=rngs),nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers: x = nnx.relu(layer(x))
        return self.head(self.bn(x))

def nnx_net(compiled=True):
    def update(state, x, y):
        model,opt = state
        value,grads = nnx.value_and_grad(lambda m: entropy(m(x), y))(model)
        opt.update(model, grads)
        return grads, value
    fast = nnx.jit(update) if compiled else update
    def state():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, opt, wrt=nnx.Param)
    def hand(note, state, x, y):
        m = state[0]
        of = lambda l, x: x @ l.kernel[...] + l.bias[...]
        h = nn.relu(note('layers.0', of(m.layers[0], x)))
        h = nn.relu(note('layers.1', of(m.layers[1], h)))
        h = (h-h.mean(0))*lax.rsqrt((h**2).mean(0)-h.mean(0)**2+1e-5)*m.bn.scale[...]+m.bn.bias[...]
        return entropy(note('', note('head', of(m.head, note('bn', h)))), y)
    return Case(lambda state, x, y: (state, *fast(state, x, y)), state, lambda s: (s[0], s[1]), hand)


# ---- equinox, recorded by probes

def equinox_net():
    import equinox as eqx
    class Small(eqx.Module):
        one:eqx.nn.Linear
        two:eqx.nn.Linear
        def __init__(self, key):
            a,b = jax.random.split(key)
            self.one,self.two = eqx.nn.Linear(4, 5, key=a),eqx.nn.Linear(5, 3, key=b)
        def __call__(self, x): return probe('logits', self.two(jax.nn.relu(probe('hidden', self.one(x)))))
    @eqx.filter_jit
    def fast(model, s, x, y):
        value,grads = eqx.filter_value_and_grad(lambda m: entropy(jax.vmap(m)(x), y))(model)
        up,s = opt.update(grads, s, eqx.filter(model, eqx.is_array))
        return (eqx.apply_updates(model, up), s), grads, value
    def state():
        m = Small(jax.random.key(1))
        return m, opt.init(eqx.filter(m, eqx.is_array))
    def hand(note, state, x, y):
        m = state[0]
        h = note(('', 'probe', 'hidden'), x@m.one.weight.T+m.one.bias)
        return entropy(note(('', 'probe', 'logits'), nn.relu(h)@m.two.weight.T+m.two.bias), y)
    return Case(lambda state, x, y: fast(*state, x, y), state, lambda s: (eqx.filter(s[0], eqx.is_array), s[1]), hand)


# ---- static arguments, vmap, cond, loops, custom derivatives and bfloat16

def static():
    @partial(jax.jit, static_argnums=(0, 1), static_argnames='scale')
    def fast(model, opt, state, x, y, scale): return stepped(model, lambda *a: plain_loss(*a)*scale, opt)(state, x, y)
    return Case(lambda state, x, y: fast(MLP(), opt, state, x, y, scale=2.), begun(MLP()), lambda s: s, lambda *a: mlp_by_hand(*a)*2)

def per_example():
    model = MLP()
    @jax.jit
    def update(state, x, y):
        p,s = state
        each = jax.vmap(jax.grad(lambda p, x, y: plain_loss(model, p, x[None], y[None])), (None, 0, 0))(p, x, y)
        grads = jax.tree.map(lambda g: g.mean(0), each)
        up,s = opt.update(grads, s, p)
        return (optax.apply_updates(p, up), s), grads, each
    def hand(note, state, x, y): # Sum, not mean: each example's gradient belongs to its own loss
        p = state[0]['params']
        h = note('Dense_0', dense(p['Dense_0'], x[:, None]))
        out = note('', note('Dense_1', dense(p['Dense_1'], nn.relu(h))))
        return optax.softmax_cross_entropy_with_integer_labels(out, y[:, None]).sum()
    return Case(update, begun(model), lambda s: s, hand)

@jax.custom_vjp
def doubled(x): return probe('doubled', 2*x)
# The derivative is wrong on purpose (3, not 2): it shows that the custom rule is used
doubled.defvjp(lambda x: (doubled(x), None), lambda _, ct: (probe('cotangent', 3*ct),))

def branched():
    "A training step with `cond`, `scan`, `while_loop` and a custom derivative"
    def loss(p, x, y):
        x = lax.cond(x.sum()>0, lambda x: probe('positive', jnp.sin(x)), lambda x: probe('negative', jnp.cos(x)), x)
        x = lax.fori_loop(0, 3, lambda i, x: probe('looped', x*p['w']+i), x)
        x = doubled(x)
        n = lax.while_loop(lambda s: (s**2).sum()<5000, lambda s: probe('until', s*1.5), lax.stop_gradient(x))
        return entropy(probe('out', x*n), y)
    @jax.jit
    def update(state, x, y):
        p,s = state
        value,grads = jax.value_and_grad(loss)(p, x, y)
        up,s = opt.update(grads, s, p)
        return (optax.apply_updates(p, up), s), grads, value
    def hand(note, state, x, y):
        tell = lambda k, x, *call: note(('', 'probe', k), x, *call)
        @jax.custom_vjp
        def doubled(x): return 2*x
        doubled.defvjp(lambda x: (2*x, None), lambda _, ct: (3*ct,))
        w = state[0]['w']
        x = tell('positive', jnp.sin(x)) if x.sum()>0 else tell('negative', jnp.cos(x))
        for i in range(3): x = tell('looped', x*w+i, i)
        x = doubled(x)
        tell('doubled', x)
        n,seen = lax.stop_gradient(x),[]
        while (n**2).sum()<5000:
            n = n*1.5
            seen.append(n)
        if seen: tell('until', jnp.stack(seen)) # All iterations of the loop are merged into one row
        return entropy(tell('out', x*n), y)
    def state(): return {'w': (w := jnp.linspace(.2, .5, 4))}, opt.init({'w': w})
    return Case(update, state, lambda s: s, hand, constant=('positive', 'negative', 'doubled', 'until'), python=True)

class Narrow(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(5, dtype=jnp.bfloat16)(x))
        return nn.Dense(3, dtype=jnp.bfloat16)(x)

def narrow():
    def hand(note, state, x, y):
        p = jax.tree.map(lambda a: a.astype(jnp.bfloat16), state[0]['params'])
        h = note('Dense_0', dense(p['Dense_0'], x.astype(jnp.bfloat16)))
        return entropy(note('', note('Dense_1', dense(p['Dense_1'], nn.relu(h)))), y)
    return Case(jax.jit(stepped(Narrow(), plain_loss)), begun(Narrow()), lambda s: s, hand)

cases = dict(mlp=mlp, transformer=transformer, normed=normed, recurrent=recurrent, nnx=nnx_net, equinox=equinox_net, donated=partial(mlp, (0,)),
    static=static, per_example=per_example, branched=branched, bfloat16=narrow)


# ---- tracked runs and their expected rows

def plain(x): return np.array(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) if isinstance(x, jax.Array) else x

def copied(tree): return jax.tree.map(plain, tree)

def run(case, steps=3, **kwargs):
    "Run a training, and track it if arguments of `track` are given. Return copies of each step's results, and the tracker."
    state,out = case.state(),[]
    def take(state, grads, more):
        parts = map(nnx.state, state) if isinstance(state[0], nnx.Module) else case.parts(state)
        out.append(copied((*parts, grads, more)))
    if not kwargs:
        for i in range(steps):
            state,grads,more = case.update(state, *case.batch(seed=i))
            take(state, grads, more)
        return out, None
    m,o = case.parts(state)
    with track(**{'model_state': m, 'optimizer_state': o, 'track_gradients': True, **kwargs}) as tracker:
        for i in range(steps):
            state,grads,more = tracker.intercept(case.update, state, *case.batch(seed=i))
            tracker.step(*case.parts(state), grads)
            take(state, grads, more)
    return out, tracker

def same_bits(a, b):
    "Return True if two trees of arrays have the same bits."
    a,b = (jax.tree.flatten(t) for t in (a, b))
    pairs = [(np.asarray(x), np.asarray(y)) for x,y in zip(a[0], b[0], strict=True)]
    return a[1]==b[1] and all(x.dtype==y.dtype and x.tobytes()==y.tobytes() for x,y in pairs)

def by_hand(case, state, x, y):
    "Return a dict of the values that must have a row, computed by plain operations. Keys: (path, ttype, tname, call)."
    keys = []
    def values():
        got = {}
        def note(k, x, call=0):
            got[k, call] = x
            return x
        case.hand(note, state, x, y)
        keys[:] = got
        return [*got.values()]
    def loss(zeros):
        bumps = dict(zip(keys, zeros, strict=True))
        return case.hand(lambda k, x, call=0: x+bumps[k, call], state, x, y)
    def both():
        got = values()
        return got, jax.grad(loss)([jnp.zeros_like(v) for v in got])
    def named(k, call, grad):
        path,ttype,tname = k if isinstance(k, tuple) else (k, 'output', 'output_0')
        return path, 'output_grad' if grad else ttype, tname, call
    got,grads = both() if case.python else jax.jit(both, compiler_options=compiled_quickly)()
    return {named(*k, False): v for k,v in zip(keys, got, strict=True)} | {named(*k, True): v for k,v in zip(keys, grads, strict=True)
        if not (isinstance(k[0], tuple) and k[0][-1] in case.constant)}
