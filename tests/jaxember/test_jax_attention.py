"Tests of rows about attention heads in JAX: nested transformations, forms of the call, arguments of `track`, and limits"
import warnings
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip('jax')
import flax.linen as nn # noqa: E402
import jax.numpy as jnp # noqa: E402
from flax import nnx # noqa: E402
from jax import lax # noqa: E402

from jaxed import transformer # noqa: E402
from torchember import at, read # noqa: E402
from torchember.jaxember import track # noqa: E402
from torchember.jaxember.capture import attention as capture # noqa: E402

r = np.random.default_rng(0)
q,k,v = (jnp.asarray(r.standard_normal((3, 10, 2, 4)), jnp.float32) for _ in range(3))
causal = partial(jax.nn.dot_product_attention, key=k, value=v, is_causal=True)
def attend(q): return causal(q)
def one(q, k, v): return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
def looped(f, n=3): return lambda q: lax.scan(lambda c, _: (f(c), None), q, None, length=n)[0]
def until(f, n=3): return lambda q: lax.while_loop(lambda c: c[0]<n, lambda c: (c[0]+1, f(c[0], c[1])), (0, q))[1]


def numbers_by_hand(q, k=k):
    "Return entropy, weight of the first key, largest mean weight and largest logit of each head, computed in float64"
    q,k = (np.moveaxis(np.asarray(x, np.float64), -2, -3) for x in (q, k))
    n = q.shape[-2]
    logits = np.where(np.tri(n, dtype=bool), q@k.swapaxes(-1, -2)/2, -np.inf)
    w = np.exp(logits-logits.max(-1, keepdims=True))
    w = (w/w.sum(-1, keepdims=True))[:, :, 1:]
    entropy = -(w*np.log(np.where(w>0, w, 1))).sum(-1)/np.log(np.arange(2, n+1))
    return np.stack([entropy.mean((0, 2)), w[..., 0].mean((0, 2)), w.mean(2).max(-1).mean(0), logits.max((0, 2, 3))], -1)


def recorded(f, *args, name='heads', **kwargs):
    "Record one step. Return its result, and the rows about attention: (call, entropy, weight of the first key, largest mean weight, largest logit) by head"
    with track(attention=True, name=name, **kwargs) as t: out,_ = t.intercept(f, *args),t.step()
    df = read(name, ttype='attention')
    return out, df, df.sort_values(['call', 'tname'])[['entropy', 'first_token', 'top_share', 'logit_max']].to_numpy(float)


once = [attend, lambda q: jax.vmap(one)(q, k, v), jax.grad(lambda q: jax.checkpoint(attend)(q).sum()),
    lambda q: lax.cond(q.sum()>-1e9, attend, lambda q: 2*q, q), lambda q: jax.jvp(jax.grad(lambda q: (attend(q)**2).sum()), (q,), (q,))[1]]

def test_each_transformation_leaves_one_row_for_each_head():
    "Each head has one row under each transformation in a compiled program. The first form also runs without compilation."
    for name,f,n in (('jit', jax.jit(lambda q: [g(q) for g in once]), len(once)), ('eager', attend, 1)):
        plain = f(q)
        out,df,got = recorded(f, q, name=name)
        assert df[['tname', 'call', 'queries', 'keys', 'dtype']].values.tolist()==[[f'head_{i}', c, 10, 10, 'float32'] for c in range(n) for i in range(2)]
        np.testing.assert_allclose(got, np.tile(numbers_by_hand(q), (n, 1)), 1e-5)
        jax.tree.map(np.testing.assert_array_equal, out, plain)


def test_iterations_of_a_scan_are_calls_and_those_of_a_while_loop_are_merged():
    steps = np.stack([numbers_by_hand(x) for x in (q, attend(q), attend(attend(q)))])
    loops = [jax.grad(lambda q: looped(jax.checkpoint(attend))(q).sum()), until(lambda i, q: attend(q)),
        until(lambda i, q: lax.cond(i==2, attend, lambda q: q*1, q))]
    _,df,got = recorded(jax.jit(lambda q: [f(q) for f in loops]), q)
    assert df.call.tolist()==[0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    merged = np.concatenate([steps.mean(0)[:, :3], steps.max(0)[:, 3:]], 1)
    np.testing.assert_allclose(got, np.concatenate([*steps, merged, steps[0]]), 1e-4)


def test_size_of_the_values():
    "In the last form, two query heads share the values of a group. Values of single examples and of the iterations of a loop are merged."
    more = jnp.tile(q, (1, 1, 2, 1))
    forms = [attend, lambda q: jax.vmap(one)(q, k, v), until(lambda i, q: attend(q)), lambda q: jax.nn.dot_product_attention(more, k, v)]
    _,df,_ = recorded(jax.jit(lambda q: [f(q) for f in forms]), q)
    rms = np.sqrt(np.square(np.asarray(v, np.float64)).mean((0, 1, 3)))
    np.testing.assert_allclose(df.sort_values(['call', 'tname']).value_rms.astype(float), [*rms]*3+[rms[0]]*2+[rms[1]]*2, 1e-6)
    net = nn.MultiHeadDotProductAttention(num_heads=2) # linen computes the weights in a function without values
    x = q.reshape(3, 10, 8)
    assert 'value_rms' not in recorded(jax.jit(lambda x: net.apply(net.init(jax.random.key(0), x), x)), x, name='linen')[1]


# Compiles two programs with optimization; the notebook of `track` tests a smaller model
@pytest.mark.release
def test_blocks_in_scan_and_remat_have_paths_of_their_modules_and_the_training_keeps_its_bits(optimized):
    case = transformer()
    x,y = case.batch()
    plain = case.update(case.state(), x, y)
    with track(model_state=case.state()[0], attention=True, name='blocks') as t:
        got = t.intercept(case.update, case.state(), x, y)
        t.step(got[0][0])
    df = read('blocks', ttype='attention')
    assert df[['path', 'tname', 'call']].values.tolist()==[['blocks.attn', f'head_{i}', c] for c in range(3) for i in range(2)]
    assert df.module.unique().tolist()==['model(Transformer).blocks(Block).attn(MultiHeadDotProductAttention)']
    jax.tree.map(np.testing.assert_array_equal, got, plain)


def test_nnx_with_dropout_and_a_schedule_of_steps():
    class Net(nnx.Module):
        def __init__(self, rngs): self.attn = nnx.MultiHeadAttention(2, 8, decode=False, dropout_rate=.1, rngs=rngs)
        def __call__(self, x): return self.attn(x, deterministic=False)
    net,step = Net(nnx.Rngs(0)),nnx.jit(lambda m, x: m(x))
    with track(model_state=net, attention=at(1), name='net') as t:
        for _ in range(2): t.intercept(step, net, q.reshape(3, 10, 8)); t.step(net)
    df = read('net', ttype='attention')
    assert df[['path', 'step', 'tname']].values.tolist()==[['attn', 1, 'head_0'], ['attn', 1, 'head_1']] and (df.reach==9).all()


def test_a_statistic_of_the_user_and_parameters_made_in_the_step():
    net = nn.MultiHeadDotProductAttention(num_heads=2)
    def step(x): return net.apply(net.init(jax.random.key(0), x), x)
    _,df,_ = recorded(jax.jit(step), q.reshape(3, 10, 8), stash_value=lambda x: {'top': jnp.max(x)})
    assert df.tname.tolist()==['head_0', 'head_1'] and (df.path=='').all() # The attention in `init` has no rows
    assert 'top' in read('heads', ttype='output')


def test_limits_of_cudnn_hide_the_same_keys(monkeypatch):
    "A stand-in has the signature of the function for cuDNN, which needs a GPU."
    module,real = capture.sys.modules[jax.nn.dot_product_attention.__module__],jax.nn.dot_product_attention
    def stand_in(query, key, value, bias=None, mask=None, q_seqlen=None, kv_seqlen=None, *, scale=1., mask_type=None, sliding_window_length=None, **more):
        return query
    monkeypatch.setattr(module, 'cudnn_dot_product_attention', stand_in)
    lengths = jnp.array([10, 7, 4], jnp.int32)
    limits = dict(is_causal=True, local_window_size=(3, 0), key_value_seq_lengths=lengths, query_seq_lengths=lengths, scale=.3)
    both = [recorded(jax.jit(partial(real, implementation=i, **limits)), q, k, v, name=i)[1] for i in ('xla', 'cudnn')]
    columns = [c for c in both[0] if c not in ('ts', 'step')]
    assert both[0][columns].equals(both[1][columns]) and (both[0].effective_length<4).all()
    assert module.cudnn_dot_product_attention is stand_in


def test_what_is_not_found_is_said_once_and_all_functions_are_restored():
    before = capture.replaced_functions()
    with warnings.catch_warnings(record=True) as said, track(attention=True, name='none') as t:
        warnings.simplefilter('always')
        for _ in range(2): t.intercept(jax.jit(jax.nn.softmax), q); t.step()
    assert sum('No attention was found' in str(w.message) for w in said)==1
    def fails(q): causal(q); raise ValueError('in the step')
    with track(attention=True, name='fails') as t:
        with pytest.raises(ValueError, match='in the step'): t.intercept(jax.jit(fails), q)
        t.intercept(jax.jit(attend), q); t.step()
    assert len(read('fails', ttype='attention'))==2
    assert capture.replaced_functions()==before and capture.reports.say is None
    assert read('none').query("ttype=='finding'").text.str.contains('No attention').sum()==1


@pytest.mark.parametrize('dtype,value', [('float64', -np.inf), ('float64', -1e9), ('float32', -1e9), ('bfloat16', -30000.), ('float32', -9001.)])
def test_masks_of_finite_numbers_and_float64(dtype, value):
    "A bias that hides later keys gives the same rows as `is_causal`, also in float64."
    with jax.enable_x64(dtype=='float64'):
        xs = [jnp.asarray(np.asarray(x), dtype) for x in (q, k, v)]
        bias = jnp.asarray(np.where(np.tri(10, dtype=bool), 0., value), dtype)[None, None]
        _,df,got = recorded(jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, bias=bias)), *xs)
    assert df.dtype.tolist()==[dtype]*2 and (df.reach==0).all() and (df.future==0).all()
    np.testing.assert_allclose(got, numbers_by_hand(*xs[:2]), 1e-5)
