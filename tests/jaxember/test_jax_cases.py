"Nested and repeated JAX programs: each row must have the right path, call number and backward number"
import contextlib, warnings

import flax.linen as nn
import numpy as np
import pytest

jax = pytest.importorskip('jax')
pytest.importorskip('optax')
import jax.numpy as jnp # noqa: E402
import optax # noqa: E402
from flax import nnx # noqa: E402
from flax.training.train_state import TrainState # noqa: E402
from jax import lax # noqa: E402

from torchember import EmberWarning # noqa: E402
from torchember.jaxember import probe, track # noqa: E402

key = ('step', 'path', 'ttype', 'tname', 'pname', 'call', 'backward')


def table(tracker):
    "Return all rows of a run by their keys, and check that keys are unique"
    df = tracker.t.df
    for k in key:
        if k not in df: df[k] = None
    df = df.astype({'pname': object, 'backward': object})
    rows = [({k: None if r[k]!=r[k] else r[k] for k in key}, r) for r in df.to_dict('records')]
    named = {tuple(k.values()): r for k,r in rows}
    assert len(named)==len(rows)
    return named


def means(rows, step=0, **only):
    "Return the means of one step by (path, tname, call, backward)"
    return {(k[1], k[3], k[5], k[6] or 0): r['mean'] for k,r in rows.items() if k[0]==step and all(k[key.index(c)]==v for c,v in only.items())}


def near(x): return pytest.approx(x, rel=1e-5, abs=1e-6)


def trained(f, *args, steps=2, home=None, **kwargs):
    "Track a step that runs several times and returns its gradients. Return all rows"
    with track(track_gradients=True, home=home, **kwargs) as tracker:
        for _ in range(steps): tracker.step(kwargs.get('model_state'), gradients=tracker.intercept(f, *args))
    return table(tracker)


# ---- checkpoints inside of checkpoints: values are computed again in the backward pass

W = jnp.array([[.5, .1], [-.2, .7]])

def layer(c, _): return probe('p', jnp.tanh(W@c)), None
def nested(y): return jax.checkpoint(lambda y: lax.scan(jax.checkpoint(layer), y, None, 3)[0])(y)
def thrice(y): return jax.checkpoint(jax.checkpoint(jax.checkpoint(lambda y: nested(nested(y)))))(y)

def by_hand(n, y=None):
    "Return the values of `n` layers, and the gradients of their sum"
    xs,gs = [jnp.ones(2) if y is None else y],[jnp.ones(2)]
    for _ in range(n): xs.append(jnp.tanh(W@xs[-1]))
    for x in xs[:1:-1]: gs.append(W.T@(gs[-1]*(1-x**2)))
    return [float(x.mean()) for x in xs[1:]], [float(g.mean()) for g in gs[::-1]]

@pytest.mark.parametrize('f,n', [(nested, 3), (thrice, 6)])
@pytest.mark.parametrize('compiled', ['nothing', 'all', 'inside'])
def test_nested_checkpoints_record_each_value_once(f, n, compiled, tmp_path):
    "Each value and each gradient is recorded once, with its own call number."
    loss = jax.jit(lambda y: f(y).sum()) if compiled=='inside' else lambda y: f(y).sum()
    g = jax.jit(jax.grad(loss)) if compiled=='all' else jax.grad(loss)
    rows,(values,grads) = trained(g, jnp.ones(2), home=tmp_path),by_hand(n)
    for step in (0, 1):
        assert means(rows, step, ttype='probe')=={('', 'p', i, 0): near(v) for i,v in enumerate(values)}
        assert means(rows, step, ttype='output_grad')=={('', 'p', i, 0): near(g) for i,g in enumerate(grads)}


def test_a_checkpoint_stores_no_tagged_value():
    "With recording, `checkpoint` still recomputes its values and stores none of them."
    from torchember.jaxember.capture.tags import TagRequest, asked
    def kept(f): return sorted(x.shape for x in jax.tree.leaves(jax.vjp(f, jnp.ones(2))[1]))
    plain = kept(nested)
    with asked(TagRequest(None, None, True)): assert kept(nested)==plain


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _): return jnp.tanh(nn.Dense(2, name='fc')(x)), None

class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        B = nn.remat(nn.scan(nn.remat(Block, prevent_cse=False), variable_axes={'params': 0}, split_rngs={'params': True}, length=3))
        return B(name='blocks')(x, None)[0]

def test_nested_remat_records_each_iteration_once(tmp_path):
    x = jnp.ones((1, 2))
    p = Deep().init(jax.random.key(0), x)
    f = jax.jit(jax.grad(lambda p: Deep().apply(p, x).sum()))
    rows = trained(f, p, model_state=p, home=tmp_path)
    h,want = x,{}
    for i in range(3):
        fc = jax.tree.map(lambda a, i=i: a[i], p['params']['blocks']['fc'])
        want['blocks.fc', 'output_0', i, 0] = near(float((h@fc['kernel']+fc['bias']).mean()))
        h = jnp.tanh(h@fc['kernel']+fc['bias'])
        want['blocks', 'output_0', i, 0] = near(float(h.mean()))
    want['', 'output_0', 0, 0] = near(float(h.mean()))
    for step in (0, 1):
        assert means(rows, step, ttype='output')==want
        assert means(rows, step, ttype='output_grad').keys()==want.keys()


def test_the_bounded_loop_of_equinox_is_recorded(tmp_path):
    "A bounded loop of equinox is made of checkpointed loops; the library diffrax differentiates its steps with it."
    eqxi = pytest.importorskip('equinox').internal
    def solve(y): return eqxi.while_loop(lambda c: c[0]<3, lambda c: (c[0]+1, layer(c[1], None)[0]), (0, y), max_steps=16, kind='bounded')[1].sum()
    rows,(values,grads) = trained(jax.jit(jax.grad(solve)), jnp.ones(2), home=tmp_path),by_hand(3)
    assert means(rows, 1, ttype='probe')=={('', 'p', i, 0): near(v) for i,v in enumerate(values)}
    assert means(rows, 1, ttype='output_grad')=={('', 'p', i, 0): near(g) for i,g in enumerate(grads)}


# ---- a loop of unknown length in a differentiated function

def found(w, x): return lax.while_loop(lambda c: c[0]<3, lambda c: (c[0]+1, probe('z', jnp.tanh(w*c[1]+x))), (0, x))[1]

def equilibrium(w, x): return (w*lax.stop_gradient(found(w, x))).sum(), found(w, x).mean()

def in_layers(w, x):
    def one(c, _): return lax.stop_gradient(lax.while_loop(lambda c: c[0]<3, jax.jit(lambda c: (c[0]+1, probe('z', jnp.tanh(w*c[1]+x)))), (0, c))[1]), None
    return w.sum()*jax.checkpoint(lambda w, x: lax.scan(jax.checkpoint(one), x, None, 2)[0])(w, x).sum(), None

@pytest.mark.parametrize('loss,want', [(equilibrium, [(0, 3), (0, 3)]), (in_layers, [(0, 3), (3, 6)])], ids=['for metrics, too', 'in checkpointed layers'])
@pytest.mark.parametrize('gradients', [False, True])
def test_a_loop_with_a_stopped_gradient_is_recorded_once(loss, want, gradients, tmp_path):
    "The loop is like that of a deep equilibrium model. Results equal those without recording."
    f,w,x = jax.value_and_grad(loss, has_aux=True),jnp.array([.5, .1]),jnp.array([1., -.2])
    plain,zs = jax.jit(f)(w, x),[x]
    for _ in range(6): zs.append(jnp.tanh(w*zs[-1]+x))
    with track(track_gradients=gradients, home=tmp_path) as tracker:
        for _ in range(2):
            got = tracker.intercept(jax.jit(f) if gradients else f, w, x)
            assert all(np.allclose(a, b) for a,b in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True))
            tracker.step(gradients=got[1] if gradients else None)
    # All iterations of a loop are merged into one row
    each = {('', 'z', i, 0): near(float(jnp.stack(zs[1+a:1+b]).mean())) for i,(a,b) in enumerate(want)}
    for step in (0, 1): assert means(table(tracker), step, ttype='probe')==each
    assert not means(table(tracker), ttype='output_grad')


# ---- several models in one step

class Gen(nn.Module):
    @nn.compact
    def __call__(self, z): return nn.Dense(4)(nn.relu(nn.Dense(5)(z)))

class Disc(nn.Module):
    @nn.compact
    def __call__(self, x): return nn.Dense(1)(jnp.tanh(nn.Dense(5)(x)))

G,D,z,real = Gen(),Disc(),jnp.linspace(-1, 1, 18).reshape(6, 3),jnp.linspace(0, 2, 24).reshape(6, 4)

def gan():
    k = jax.random.key(0)
    params = dict(gen=G.init(k, z), disc=D.init(k, real))
    return params, {m: optax.adam(1e-3).init(p) for m,p in params.items()}

def d_loss(disc, gen): return D.apply(disc, lax.stop_gradient(G.apply(gen, z))).mean()-D.apply(disc, real).mean()
def g_loss(gen, disc): return -D.apply(disc, G.apply(gen, z)).mean()

def stepped(grads, state, p): return (lambda u: (optax.apply_updates(p, u[0]), u[1]))(optax.adam(1e-3).update(grads, state))

@jax.jit
def both(params, states):
    grads = dict(disc=jax.grad(d_loss)(params['disc'], params['gen']), gen=jax.grad(g_loss)(params['gen'], params['disc']))
    new = {m: stepped(grads[m], states[m], params[m]) for m in params}
    return {m: p for m,(p,_) in new.items()}, {m: s for m,(_,s) in new.items()}, grads

@jax.jit
def one_of(m, loss, params, states):
    grads = jax.grad(loss)(params[m], params['gen' if m=='disc' else 'disc'])
    p,s = stepped(grads, states[m], params[m])
    return {**params, m: p}, {**states, m: s}, grads
one_of = jax.jit(one_of.__wrapped__, static_argnums=(0, 1))

def apart(call, params, states):
    grads = {}
    for m,loss in (('disc', d_loss), ('gen', g_loss)): params,states,grads[m] = call(one_of, m, loss, params, states)
    return params, states, grads

def dense(p, name, x): return x@p['params'][name]['kernel']+p['params'][name]['bias']

@pytest.mark.parametrize('way', ['one step', 'a step each', 'no state'])
def test_outputs_of_two_models_have_the_paths_of_their_weights(way, tmp_path):
    "Layers of a generator and of a discriminator have equal names, so their weights decide the path of each output."
    params,states = gan()
    first = params
    with track(*(() if way=='no state' else (params, states)), track_gradients=True, home=tmp_path) as tracker:
        for _ in range(2):
            if way=='a step each': params,states,grads = apart(tracker.intercept, params, states)
            else: params,states,grads = tracker.intercept(both, params, states)
            tracker.step(*(() if way=='no state' else (params, states)), gradients=grads)
    rows = table(tracker)
    places = {f'{m}{d}' for m in ('gen', 'disc') for d in ('', '.Dense_0', '.Dense_1')}
    outs = means(rows, 1, ttype='output')
    assert {p for p,*_ in outs}==places
    assert {p: sum(q==p for q,*_ in outs) for p in places}=={p: 2 if p.startswith('gen') else 3 for p in places}
    layers = {p for p in places if '.' in p}
    for ttype in ('weight_grad',)+('weight', 'optimizer')*(way!='no state'): assert {k[1] for k in rows if k[2]==ttype}==layers
    got = means(rows, 0, ttype='output')
    fake = G.apply(first['gen'], z)
    for i,x in enumerate((fake, real)): assert got['disc.Dense_1', 'output_0', i, 0]==near(float(dense(first['disc'], 'Dense_1', x).mean()))
    assert got['gen', 'output_0', 0, 0]==near(float(fake.mean()))
    grads = means(rows, 0, ttype='output_grad')
    # Call 0 of the generator was not differentiated, so only call 1 has gradients
    assert {c for p,_,c,_ in grads if p.startswith('gen')}=={1}
    assert [grads['disc', 'output_0', c, 0] for c in range(3)]==[near(1/6), near(-1/6), near(-1/6)]
    kernel = float(first['gen']['params']['Dense_0']['kernel'].mean())
    if way!='no state': assert rows[0, 'gen.Dense_0', 'weight', 'weight_1', 'kernel', 0, None]['mean']==near(kernel)


def test_a_warning_names_models_with_equal_parameters(tmp_path):
    "A network and its target network have equal parameters: a warning says so, and each call is recorded once."
    p = D.init(jax.random.key(0), real)
    state = dict(online=p, target=jax.tree.map(lambda a: a*2, p))
    f = jax.jit(lambda s: D.apply(s['online'], real)-D.apply(s['target'], real))
    with pytest.warns(EmberWarning, match="Disc has the same parameters as 'online' and 'target'"), track(state, home=tmp_path) as tracker:
        tracker.intercept(f, state)
        tracker.step(state)
    got = means(table(tracker), ttype='output')
    assert [got['Disc.Dense_0', 'output_0', i, 0] for i in (0, 1)]==[near(float(D.apply(state[m], real).mean())) for m in ('online', 'target')]


class Pair(nnx.Module):
    def __init__(self, n, rngs): self.fc,self.out = nnx.Linear(n, 5, rngs=rngs),nnx.Linear(5, 3, rngs=rngs)
    def __call__(self, x): return self.out(jnp.tanh(self.fc(x)))

class Other(Pair): pass

def test_outputs_of_two_nnx_models_have_the_paths_of_their_weights(tmp_path):
    a,b = Pair(4, nnx.Rngs(0)),Other(3, nnx.Rngs(1))
    @nnx.jit
    def step(a, b): return nnx.grad(lambda a: b(a(real)).sum())(a)
    with track((a, b), track_gradients=True, home=tmp_path) as tracker:
        for _ in range(2): tracker.step((a, b), gradients=(tracker.intercept(step, a, b), None))
    rows = table(tracker)
    got = means(rows, 1, ttype='output')
    assert got.keys()=={(f'{m}{l}', 'output_0', 0, 0) for m in '01' for l in ('', '.fc', '.out')}
    assert got['1.fc', 'output_0', 0, 0]==near(float(b.fc(a(real)).mean()))
    assert {k[1] for k in rows if k[2]=='weight'}=={f'{m}.{l}' for m in '01' for l in ('fc', 'out')}
    assert {k[1] for k in rows if k[2]=='weight_grad'}=={'0.fc', '0.out'}


# ---- functions that are traced once and called in several places

@jax.jit
def inner(x): return probe('inner', jnp.sin(x))
@jax.jit
def helper(x, k): return inner(probe('scaled', x*k))

class Calls(nn.Module):
    @nn.compact
    def __call__(self, x): return helper(x, 2.)

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3): x = Calls(name=f'h{i}')(x)
        x = nn.remat(Calls)(name='again')(x)
        for n in ('fast', 'faster'): x = nn.jit(Calls)(name=n)(x)
        return nn.scan(lambda m, c, _: (m(c), None), length=2)(Calls(name='looped'), x, None)[0]

@pytest.mark.parametrize('compiled', [False, True])
def test_probes_of_a_shared_function_belong_to_the_calling_layer(compiled, tmp_path):
    "A probe outside of all modules belongs to no layer."
    def f(x): return helper(Net().apply({}, x), 3.).sum()
    rows = trained(jax.jit(jax.grad(f)) if compiled else jax.grad(f), x := jnp.array([.3, -.7]), home=tmp_path)
    want,back = {},[]
    for path,call in (*((p, 0) for p in ('h0', 'h1', 'h2', 'again', 'fast', 'faster')), ('looped', 0), ('looped', 1), ('', 0)):
        k = 2. if path else 3.
        want[path, 'scaled', call, 0],want[path, 'inner', call, 0] = near(float((x*k).mean())),near(float(jnp.sin(x*k).mean()))
        back.append((path, call, x, k))
        x = jnp.sin(x*k)
    grads,g = {},jnp.ones(2)
    for path,call,x,k in reversed(back):
        grads[path, 'inner', call, 0] = near(float(g.mean()))
        grads[path, 'scaled', call, 0] = near(float((g*jnp.cos(x*k)).mean()))
        g = g*jnp.cos(x*k)*k
    for step in (0, 1):
        assert means(rows, step, ttype='probe')==want
        assert {k: v for k,v in means(rows, step, ttype='output_grad').items() if k[1]!='output_0'}==grads


class Shared(nn.Module):
    @nn.compact
    def __call__(self, c, x, s):
        t = nn.Dense(2, name='t', use_bias=False)(s) # This value is equal in each iteration
        return nn.Dense(2, name='d', use_bias=False)(c)+probe('tx', t*x), t

@pytest.mark.parametrize('checked', [True, False])
@pytest.mark.parametrize('compiled', [False, True])
def test_constants_of_a_scanned_body_are_recorded_once(compiled, checked, tmp_path):
    "flax traces a loop body before the loop, to find constants. These are recorded once, with their gradients."
    class Loop(nn.Module):
        @nn.compact
        def __call__(self, x, s):
            out = nn.broadcast if checked else 0
            L = nn.scan(Shared, variable_broadcast='params', split_rngs={'params': False}, in_axes=(0, nn.broadcast), out_axes=out, length=3,
                check_constancy_invariants=checked)
            c,t = L(name='b')(x, jnp.arange(3.), s)
            return c.sum()+10*(t if checked else t[0]).sum()
    x,s,eye = jnp.array([.5, -1.]),jnp.array([1., 2.]),jnp.array([[0., 1.], [1., 1.]])
    p = {'params': {'b': {n: {'kernel': eye} for n in 'td'}}}
    f = jax.grad(lambda p: Loop().apply(p, x, s))
    with track(track_gradients=True, home=tmp_path) as tracker:
        for _ in range(2): tracker.step(gradients=tracker.intercept(jax.jit(f) if compiled else f, p))
    t,carry,g = s@eye,[x],[jnp.ones(2)]
    for k in range(3): carry.append(carry[-1]@eye+t*k)
    for _ in range(2): g.insert(0, g[0]@eye.T)
    for _,df in tracker.t.df.groupby('step'):
        df = df.set_index(['ttype', 'path', 'tname']).sort_values('call')['mean']
        def seen(*key, means=df): return means.loc[[key if len(key)==3 else (*key, 'output_0')]].tolist()
        assert seen('output', 'b')==[near(float(c.mean())) for c in carry[1:]]
        assert seen('output', 'b.d')==[near(float((c@eye).mean())) for c in carry[:3]]
        assert {*seen('output', 'b.t')}=={float(t.mean())}
        assert seen('probe', 'b', 'tx')==[near(float((t*k).mean())) for k in range(3)]
        assert seen('output_grad', 'b')==seen('output_grad', 'b.d')==seen('output_grad', 'b', 'tx')==[near(float(v.mean())) for v in g]
        of_t = 10+sum(k*v for k,v in enumerate(g)) # Gradient from all uses of t, in the loop and after it
        assert sum(seen('output_grad', 'b.t'))==near(float(of_t.mean()))
        assert seen('weight_grad', 'b.t', 'grad_0')==[near(float(jnp.outer(s, of_t).mean()))]


def test_a_function_traced_in_another_run_belongs_to_the_new_model(tmp_path):
    class Fresh(nn.Module):
        @nn.compact
        def __call__(self, x): return Calls(name='mine')(x)
    for _ in range(2):
        rows = trained(jax.jit(jax.grad(lambda x: Fresh().apply({}, x).sum())), jnp.ones(2), steps=1, home=tmp_path)
        assert {k[1] for k in rows if k[2] in ('probe', 'output_grad') and k[3] in ('scaled', 'inner')}=={'mine'}


def test_a_program_called_with_and_without_a_gradient_has_one_gradient(tmp_path):
    "The second call computes a target, so it has no gradient."
    @jax.jit
    def q(w, x): return probe('q', w*x)
    rows = trained(jax.jit(jax.grad(lambda w: (q(w, 2.)-q(5., 3.))**2)), 1., home=tmp_path)
    assert means(rows, 1, ttype='probe')=={('', 'q', 0, 0): 2., ('', 'q', 1, 0): 15.}
    assert means(rows, 1, ttype='output_grad')=={('', 'q', 0, 0): -26.}


# ---- loops over layers

class Add(nn.Module):
    @nn.compact
    def __call__(self, x, _): return x+self.param('b', nn.initializers.ones, ()), None

class Twice(nn.Module):
    def setup(self): self.h = nn.scan(Add, variable_axes={'params': 0}, split_rngs={'params': True}, length=3)()
    def __call__(self, a, b): return self.h(a, None)[0], self.h(b, None)[0]

def test_calls_of_scanned_layers_that_run_twice_are_those_without_compilation(tmp_path):
    "Call numbers equal those without compilation, and each gradient has the call number of its value."
    m,zero = Twice(),jnp.zeros(2)
    p = m.init(jax.random.key(0), zero, zero)
    def loss(p): return (lambda a, b: 2*a.sum()+3*b.sum())(*m.apply(p, zero, zero+100))
    for f in (jax.grad(loss), jax.jit(jax.grad(loss))):
        rows = trained(f, p, model_state=p, home=tmp_path)
        assert means(rows, 1, ttype='output', path='h')=={('h', 'output_0', i, 0): v for i,v in enumerate((1., 2., 3., 101., 102., 103.))}
        assert means(rows, 1, ttype='output_grad', path='h')=={('h', 'output_0', i, 0): v for i,v in enumerate((2., 2., 2., 3., 3., 3.))}


def test_rows_say_that_all_examples_passed_a_branch(tmp_path):
    "Under `vmap`, `cond` computes both branches for all examples, and rows are marked so. A row of one chosen branch is not marked."
    x = jnp.linspace(-1, 1, 4)[:, None]*jnp.ones((4, 3))
    def one(x): return lax.cond(x.sum()>0, lambda x: probe('pos', x*2), lambda x: probe('neg', x*3), x).sum()
    for f in (jax.grad(lambda x: jax.vmap(one)(x).sum()), jax.jit(jax.grad(lambda x: jax.vmap(one)(x).sum()))):
        rows = trained(f, x, home=tmp_path)
        some = {k: r for k,r in rows.items() if k[0]==1 and k[3] in ('pos', 'neg')}
        assert {(k[2], k[3], k[5]) for k in some}=={(t, n, 0) for t in ('probe', 'output_grad') for n in ('pos', 'neg')}
        assert all(r['all_examples'] is True and tuple(r['shape'])==(4, 3) for r in some.values())
    rows = trained(jax.jit(jax.grad(one)), x[0], home=tmp_path)
    taken = {(k[2], k[3], r.get('all_examples')) for k,r in rows.items() if k[0]==1 and k[3] in ('pos', 'neg')}
    assert taken=={('probe', 'neg', None), ('output_grad', 'neg', None)}


# ---- second derivatives

def test_both_gradients_of_a_penalty_belong_to_the_value(tmp_path):
    "The column `backward` distinguishes the inner gradient from the gradient of the loss."
    w,x = jnp.linspace(-.5, .8, 9).reshape(3, 3),jnp.linspace(.1, 1, 6).reshape(2, 3)
    def f(w, x, bump=0.): return (probe('y', jnp.tanh(x@w)+bump)**2).sum()
    def loss(w): return (jax.grad(f, 1)(w, x)**2).sum()+f(w, 2*x)
    y = jnp.tanh(x@w)
    def by_bump(bump): return (jax.grad(lambda x: ((jnp.tanh(x@w)+bump)**2).sum())(x)**2).sum()
    want = {('', 'y', 0, 0): near(float((2*y).mean())), ('', 'y', 0, 1): near(float(jax.grad(by_bump)(jnp.zeros_like(y)).mean())),
        ('', 'y', 1, 0): near(float((2*jnp.tanh(2*x@w)).mean()))}
    for g in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        rows = trained(g, w, home=tmp_path)
        assert means(rows, 1, ttype='probe')=={('', 'y', 0, 0): near(float(y.mean())), ('', 'y', 1, 0): near(float(jnp.tanh(2*x@w).mean()))}
        assert means(rows, 1, ttype='output_grad')==want


def test_a_second_backward_through_the_same_values_is_numbered(tmp_path):
    def f(x):
        _,back = jax.vjp(lambda x: probe('y', x*2), x)
        return back(jnp.float32(3))[0]+back(jnp.float32(5))[0]
    for g in (f, jax.jit(f)):
        rows = trained(g, jnp.float32(1), home=tmp_path)
        assert means(rows, 1, ttype='output_grad')=={('', 'y', 0, 0): 3., ('', 'y', 0, 1): 5.}
        assert means(rows, 1, ttype='probe')=={('', 'y', 0, 0): 2.}


# ---- a training state in a dict

def test_moments_in_a_dict_are_optimizer_rows_once(tmp_path):
    "Optimizer states in a dict have one row each. A moving average of the parameters is a buffer with its own name."
    p = {'Dense_0': {'kernel': jnp.ones((3, 2))}}
    state = {'params': p, 'opt_state': optax.adam(1e-3).init(p), 'ema': jax.tree.map(lambda x: x*3, p), 'step': 7}
    want = {('Dense_0', 'weight', 'weight_0', 'kernel', 1.), ('ema.Dense_0', 'buffer', 'kernel', None, 3.), ('', 'buffer', 'step', None, 7.),
        ('Dense_0', 'optimizer', 'mu_0', 'kernel', 0.), ('Dense_0', 'optimizer', 'nu_0', 'kernel', 0.)}
    for args in ((state,), (state, state), (state, state['opt_state'])):
        with track(*args, home=tmp_path) as tracker:
            tracker.intercept(lambda: probe('x', jnp.ones(1)))
            tracker.step(*args)
        rows = table(tracker)
        assert {(*k[1:5], r['mean']) for k,r in rows.items() if k[2]!='probe'}==want
        assert all(np.isfinite(r['mean']) and k[0]==0 and k[5]==0 for k,r in rows.items())


def test_own_fields_of_a_train_state_are_recorded(tmp_path):
    "Additional fields in a subclass of flax's TrainState are recorded like those of a dict, and the optimizer state, too."
    class Mine(TrainState):
        batch_stats:dict
        ema:dict
        scale:jax.Array
    p = {'Dense_0': {'kernel': jnp.ones((3, 2))}}
    state = Mine.create(apply_fn=None, params=p, tx=optax.adam(1e-3), batch_stats={'BN': {'mean': jnp.zeros(2)}},
        ema=jax.tree.map(lambda x: x*3, p), scale=jnp.float32(7))
    want = {('Dense_0', 'weight', 'weight_0', 'kernel', 1.), ('ema.Dense_0', 'buffer', 'kernel', None, 3.), ('', 'buffer', 'scale', None, 7.),
        ('BN', 'buffer', 'mean', None, 0.), ('Dense_0', 'optimizer', 'mu_0', 'kernel', 0.), ('Dense_0', 'optimizer', 'nu_0', 'kernel', 0.)}
    for args in ((state,), (state, state)):
        with track(*args, home=tmp_path) as tracker:
            for _ in range(2):
                tracker.intercept(lambda: probe('x', jnp.ones(1)))
                tracker.step(*args)
        assert {(k[0], *k[1:5], r['mean']) for k,r in table(tracker).items() if k[2]!='probe'}=={(step, *w) for step in (0, 1) for w in want}


# ---- a whole training in one loop of JAX

class Stack(nn.Module):
    @nn.compact
    def __call__(self, x): return nn.scan(Add, variable_axes={'params': 0}, split_rngs={'params': True}, length=2)(name='h')(x, None)[0].sum()

stack = Stack()

@jax.jit
def looped(p, xs):
    "Return a training whose steps add 1 to a number for each layer, with a gradient of 2"
    def step(p, x): return jax.tree.map(lambda a, g: a-.25*g, p, jax.grad(lambda p: stack.apply(p, x*jnp.ones(2)))(p)), None
    return lax.scan(step, p, xs)[0]

@pytest.mark.parametrize('every', [1, 3, 7, 50])
@pytest.mark.parametrize('gradients', [False, True])
def test_steps_of_a_scanned_training_are_calls(every, gradients, tmp_path):
    "Each step of the loop is a call. `every=` selects some steps, and each selected step has rows of all layers."
    p,xs = stack.init(jax.random.key(0), jnp.ones(2)),jnp.arange(7.)
    with track(p, track_gradients=gradients, every=every, home=tmp_path) as tracker:
        q = tracker.intercept(looped, p, xs)
        tracker.step(q, gradients=p if gradients else None)
    assert all(np.array_equal(a, b) for a,b in zip(jax.tree.leaves(q), jax.tree.leaves(looped(p, xs)), strict=True))
    rows,want = table(tracker),{}
    for n,i in enumerate(range(0, 7, every)):
        b = 1-.5*i # Each layer adds this value in step i
        for k in range(2): want['h', 'output_0', 2*n+k, 0] = near(i+(k+1)*b)
        want['', 'output_0', n, 0] = near(2*(i+2*b))
    assert means(rows, 0, ttype='output')==want
    assert {k: 1. for k in want if gradients}==means(rows, 0, ttype='output_grad')
    for name,per in (('h', 2), ('', 1)):
        told = {(k[5], r.get('iteration')) for k,r in rows.items() if k[2]=='output' and k[1]==name}
        assert told=={(n*per+j, i) for n,i in enumerate(range(0, 7, every)) for j in range(per)}


def test_a_program_without_recordable_values_loses_nothing_else(tmp_path):
    "If one value cannot be recorded, all other values of the step are: before it, after it, and in its program."
    below = lambda x: lax.while_loop(lambda c: probe('condition', c).sum()<9, lambda c: c+1, x)
    alone,both,other = jax.jit(below),jax.jit(lambda x: probe('both', below(x))),jax.jit(lambda x: probe('other', x*2))
    with pytest.warns(EmberWarning, match='the condition of a while loop cannot be recorded'), track(home=tmp_path) as tracker:
        for i in range(2):
            tracker.intercept(lambda x: other(both(alone(other(x)))), jnp.ones(3)*i)
            tracker.step()
    for i in range(2): assert means(table(tracker), i)=={('', 'other', 0, 0): 2*i, ('', 'both', 0, 0): 3, ('', 'other', 1, 0): 6}


def test_a_long_loop_keeps_fewer_iterations_and_warns(monkeypatch, tmp_path):
    "The warning about a long loop comes before the loop runs."
    from torchember.jaxember.recorder import twins
    monkeypatch.setattr(twins, 'most', 5*3*544*4)
    p,xs = stack.init(jax.random.key(0), jnp.ones(2)),jnp.arange(11.)
    with pytest.warns(EmberWarning, match=r'a loop with 11 iterations would need 0.0\d+ MB.*one iteration in 3 is recorded'), track(home=tmp_path) as tracker:
        tracker.intercept(looped, p, xs)
        tracker.step()
    rows = means(table(tracker), 0, ttype='output', path='')
    assert rows=={('', 'output_0', n, 0): near(2*(i+2*(1-.5*i))) for n,i in enumerate(range(0, 11, 3))}


def test_every_does_not_skip_scanned_layers(tmp_path):
    p = stack.init(jax.random.key(0), jnp.ones(2))
    rows = trained(jax.jit(jax.grad(lambda p: stack.apply(p, jnp.zeros(2)))), p, every=2, steps=3, home=tmp_path)
    for step in (0, 2): assert means(rows, step, ttype='output', path='h')=={('h', 'output_0', i, 0): i+1. for i in (0, 1)}
    assert {k[0] for k in rows}=={0, 2}


# ---- a step that raised an exception

def test_a_pass_that_raised_is_in_no_step_if_it_is_run_again(tmp_path):
    "If a failed pass is repeated, only rows of the repetition count. If it is not repeated, its rows are written at the end."
    def step(x, fail):
        y = probe('y', 2*x)
        if fail: raise KeyError('mine')
        return y
    one = jnp.ones(2)
    with pytest.raises(KeyError, match='last'), track(home=tmp_path) as tracker:
        for k,tries in enumerate(([1, None], [2, 3, None], [None, 4, 5, None], [4])):
            for i,fails in enumerate(tries):
                with contextlib.suppress(KeyError): tracker.intercept(step, one*(10*k+i), fails)
            tracker.step()
        with contextlib.suppress(KeyError): tracker.intercept(step, one*50, True)
        tracker.intercept(step, one*60, False)
        with contextlib.suppress(KeyError): tracker.intercept(step, one*70, True)
        raise KeyError('last')
    got = [(r['step'], r['call'], r['mean']) for r in table(tracker).values()]
    assert got==[(0, 0, 2.), (1, 0, 24.), (2, 0, 40.), (2, 1, 46.), (4, 0, 120.), (4, 1, 140.)]


# ---- arguments of `step` that differ from the trees given first

def test_a_tree_in_the_place_of_another_is_reported_once(tmp_path):
    "A warning names swapped arguments, or a loss among the gradients, and they are recorded. A tree may grow or shrink."
    p,g = {'a': {'kernel': jnp.ones((2, 3)), 'bias': jnp.ones(3)}},{'a': {'kernel': jnp.ones((2, 3)), 'bias': jnp.zeros(3)}}
    s = optax.adam(1e-3).init(p)
    bigger = {**p, 'b': p['a'], 'c': {'d': p['a']}}
    cases = [((s, p, g), ['model_state', 'optimizer_state']), ((p, s, (jnp.ones(()), g)), ['gradients']), ((p, p, g), ['optimizer_state']),
        ((bigger, optax.adam(1e-3).init(bigger), bigger), []), (({'a': {'bias': jnp.ones(3)}}, s, {'a': {'bias': jnp.ones(3)}}), []),
        (({'params': p}, s, {'params': g}), []), ((p, s, g), [])]
    for given,odd in cases:
        with warnings.catch_warnings(record=True) as said, track(p, s, True, home=tmp_path) as tracker:
            warnings.simplefilter('always')
            for _ in range(3):
                tracker.intercept(lambda: probe('x', jnp.ones(1)))
                tracker.step(*given)
        texts = [str(w.message) for w in said]
        assert len(texts)==bool(odd)
        if odd: assert 'have other names than' in texts[0] and [w for w in ('model_state', 'optimizer_state', 'gradients') if f'{w} (' in texts[0]]==odd
        rows = table(tracker)
        assert {k[0] for k in rows if k[2]=='weight_grad'}=={0, 1, 2}
        paths = {'a', 'b', 'c.d'} if given[0] is bigger else {'0', '0.mu.a', '0.nu.a'} if given[0] is s else {'a'}
        assert {k[1] for k in rows if k[2]=='weight' and k[0]==2}==paths
