"Tests of JAX rows in full: step, call, time and marks are right, also with two trackers, changing states and repeated runs"
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

jax = pytest.importorskip('jax')
import jax.numpy as jnp # noqa: E402

from torchember import EmberWarning, read # noqa: E402
from torchember.jaxember import probe, stash_all_stats_and_hist, stash_hist, stash_scalar_stats, track # noqa: E402
from torchember.jaxember.recorder import recorder as room # noqa: E402

double = jax.jit(lambda w: probe('x', 2*w))
slope = jax.jit(jax.grad(lambda w: probe('x', 3*w).sum()))
columns = ['step', 'path', 'ttype', 'tname', 'pname', 'call', 'mean', 'loss', 'ts', 'epoch']


def rows(t, *names, home=None):
    "Return the values of some columns of a run; None for missing values"
    df = read(t.name, home=home)
    df = pd.DataFrame({c: df[c].astype(object) if c in df else [None]*len(df) for c in names or columns})
    return [tuple(None if v is None or v!=v else str(v) if n=='ts' else v for n,v in zip(names or columns, r, strict=True)) for r in df.itertuples(index=False)]


@pytest.fixture
def clock(monkeypatch):
    "Replace the clock by a number of seconds that the test sets"
    at = SimpleNamespace(now=0)
    monkeypatch.setattr(room, 'now', lambda: f'2026-01-01 10:00:{at.now:02}')
    return at


def test_rows_of_two_alternating_trackers_stay_apart(tmp_path, clock):
    "One tracker records every second step, the other records all steps and gradients. Each row belongs to its own run."
    a,b = (jnp.full(2, float(x)) for x in (10, 100))
    with track({'w': a}, every=2, init_step=5, home=tmp_path, name='a') as one, \
            track({'u': 0*b, 'w': b}, {'mu': {'w': -b}}, True, exclude='no such', home=tmp_path, name='b') as two:
        for s in range(4):
            clock.now = 10*s+1
            one.intercept(double, a+s)
            g = two.intercept(slope, b+s)
            clock.now += 5 # The time of a row is the beginning of its step
            two.intercept(double, b-s)
            one.log(loss=s)
            two.log(loss=-1.*s)
            two.log(loss=s+.5)
            one.t.mark(epoch=s)
            two.t.mark(epoch=10*s)
            one.step({'w': a+s+1})
            if s==0:
                with pytest.warns(EmberWarning, match='no such'): two.step({'u': 0*b, 'w': b+s+1}, {'mu': {'w': -b-s-1}}, {'w': g*(s+1)})
            else: two.step({'u': 0*b, 'w': b+s+1}, {'mu': {'w': -b-s-1}}, {'w': g*(s+1)})
        clock.now = 59
        two.log(loss=7.)
        one.intercept(double, a) # This step is not recorded
    def r(i, *who, call=0, mean=None, loss=None):
        "Return a row of the i-th step of both trackers"
        ttype,tname,pname = *who, *(None,)*(3-len(who))
        return first+i, '', ttype, tname, pname, call, mean, loss, f'2026-01-01 10:00:{10*i+1 if i<4 else 59:02}', many*min(i, 3)
    first,many = 5,1
    assert rows(one, home=tmp_path)==[row for i in (1, 3) for row in (r(i, 'weight', 'weight_0', 'w', mean=10.+i), r(i, 'probe', 'x', mean=2*(10.+i)),
        r(i, 'scalar', 'log', loss=i))]
    first,many,want = 0,10,[]
    for i in range(5):
        want += [r(i, 'weight', 'weight_0', 'u', mean=0.), r(i, 'weight', 'weight_1', 'w', mean=100.+i), r(i, 'optimizer', 'mu_1', 'w', mean=-100.-i)]
        if i<4: want += [r(i, 'probe', 'x', mean=3*(100.+i)), r(i, 'output_grad', 'x', mean=1.), r(i, 'probe', 'x', mean=2*(100.-i), call=1),
            r(i, 'weight_grad', 'grad_1', 'w', mean=3.*(i+1)), r(i, 'scalar', 'log', loss=-1.*i), r(i, 'scalar', 'log', call=1, loss=i+.5),
            r(i, 'scalar', 'grad_norm')]
    assert rows(two, home=tmp_path)==[*want, r(4, 'scalar', 'log', loss=7.)]
    norms = [(step, norm) for step,norm in rows(two, 'step', 'grad_norm', home=tmp_path) if norm is not None]
    assert norms==[(i, pytest.approx(3*(i+1)*2**.5)) for i in range(4)] # The gradient has two elements equal to 3*(i+1)


def test_rows_follow_a_state_that_changes_its_form(tmp_path):
    "Rows have the names, numbers and shapes of the latest tree, also if only a name or a shape changes, and back again."
    forms = [{'a': 1., 'b': 2.}, {'a': 1., 'c': 2.}, {'c': 2.}, {'c': np.ones(3)}, {'a': 1., 'b': 2.}, {'b': 2., 'a': {'k': 1.}}]
    def of(form, by): return jax.tree.map(lambda v: jnp.full(np.shape(v), by*np.mean(v)), form)
    with track(of(forms[0], 1), {'mu': of(forms[0], -1)}, True, home=tmp_path) as t:
        for s,form in enumerate(forms):
            after = forms[(s+1)%len(forms)]
            t.intercept(lambda: probe('x', jnp.ones(2)))
            t.step(of(after, 1), {'mu': of(after, -1)}, of(form, 10))
    def leaves(form, path=''):
        return sorted(l for k,v in form.items() for l in (leaves(v, k) if isinstance(v, dict) else [(path, k, np.shape(v), float(np.mean(v)))]))
    got = [(*r[:4], r[4] or (), r[5]) for r in rows(t, 'step', 'ttype', 'path', 'pname', 'shape', 'mean', home=tmp_path) if r[1] not in ('probe', 'scalar')]
    kinds = dict(weight=1, optimizer=-1, weight_grad=10)
    assert sorted(got)==sorted((s, ttype, path, name, shape, by*mean) for s,form in enumerate(forms) for ttype,by in kinds.items()
        for path,name,shape,mean in leaves(form))


@pytest.mark.parametrize(('lo', 'hi'), [(-2, 3), (0, 0)])
def test_the_last_exponent_is_counted_and_the_next_one_is_above(lo, hi):
    "Values at the upper limit of the exponents are counted in the right bin, for concrete arrays and inside jit."
    some = [s*2.**k*f for k in range(-5, 6) for s in (1, -1) for f in (1, 1.5)]+[0., -0., np.nan, np.inf, -np.inf]
    within = [sum(2.**k<=abs(x)<2.**(k+1) for x in some) for k in range(lo, hi+1)]
    want = [sum(abs(x)<2.**lo for x in some), *within, sum(abs(x)>=2.**(hi+1) for x in some)]
    x = jnp.array(some)
    inside = jax.jit(lambda x: stash_hist(x, lo, hi)['exp_hist']['hist'])(x).tolist()
    assert (stash_hist(x, lo, hi)['exp_hist'], inside)==({'hist': want, 'bins': [*range(lo-1, hi+2)]}, want)
    assert stash_all_stats_and_hist(x, lo, hi)['exp_hist']==stash_hist(x, min_exp=lo, max_exp=hi)['exp_hist']
    finite = np.array([v for v in some if np.isfinite(v)])
    want = dict(mean=finite.mean(), std=finite.std(ddof=1), mean_abs=abs(finite).mean(), max_abs=abs(finite).max(), min_abs=0.,
        **{f'rm{p}': (abs(finite)**p).mean()**(1/p) for p in (2, 4, 8)})
    for got in (stash_scalar_stats(jnp.array(finite)), jax.jit(stash_scalar_stats)(jnp.array(finite))):
        assert {k: float(v) for k,v in got.items()}==pytest.approx(want, rel=1e-5, abs=1e-6)


def test_the_metadata_of_a_run_and_its_warnings_are_written_once(tmp_path):
    "The metadata have model, framework and length of the run. Warnings are findings, such as the first NaN."
    class Net(dict):
        def __call__(self): pass
    jax.tree_util.register_pytree_node(Net, lambda n: (tuple(n.values()), tuple(n)), lambda k, v: Net(zip(k, v, strict=True)))
    with warnings.catch_warnings(record=True) as said, track(Net(w=jnp.ones(2)), home=tmp_path) as t:
        warnings.simplefilter('always', EmberWarning)
        for _ in range(2):
            t.intercept(double, jnp.array([1., np.nan]))
            t.step(Net(w=jnp.ones(2)), gradients=jnp.ones(2))
        t.t.barrier()
    said = [str(w.message) for w in said if issubclass(w.category, EmberWarning)]
    assert len(said)==2 and 'gradients was given to step and is not recorded' in said[0]+said[1] and 'probe' in said[0]+said[1]
    assert t.name.startswith('Net_') and read(t.name, home=tmp_path).step.tolist()==[0, 0, 1, 1]
    base = json.loads((tmp_path/f'data/base_{t.name}.json').read_text())
    assert (base['framework'], base['steps'], base['rows'])==('jax', 2, 4)


def test_the_watch_for_values_that_are_not_finite_is_the_first_listener(tmp_path):
    "The writer calls the watch for NaN before other listeners, as with torch. Listeners get the rows of the file."
    got,w = [],{'w': jnp.ones(2)}
    with warnings.catch_warnings(record=True) as said, track(w, home=tmp_path, name='r') as t:
        warnings.simplefilter('always', EmberWarning)
        with t.t.listen(lambda step, rows: got.append((step, rows))):
            for i in range(3):
                t.intercept(double, jnp.array([1., np.inf if i else 1.]))
                t.step(w)
        first = t.t.file.listeners.all[0].remark()
    assert [str(x.message).split(': ')[1] for x in said if 'not finite' in str(x.message)]==[first.split(': ')[1].rstrip('.')]
    assert 'step 1, probe x' in first and [s for s,_ in got]==[0, 1, 2] and [r for _,rows in got for r in rows]==t.t.lines()


def test_a_step_that_raises_is_recorded_unless_it_is_run_again(tmp_path):
    a = jnp.full(2, 3.)
    def broken(w):
        probe('x', 2*w)
        raise KeyError('of the user')
    with pytest.raises(KeyError), track({'w': a}, home=tmp_path, name='raised') as t:
        with pytest.raises(KeyError): t.intercept(broken, 5*a)
        t.intercept(double, a)
        t.step({'w': a+1})
        t.intercept(broken, a+1)
    want = [(0, 'weight', 3.), (0, 'probe', 6.), (1, 'weight', 4.), (1, 'probe', 8.)]
    assert rows(t, 'step', 'ttype', 'mean', home=tmp_path)==want


def test_a_row_that_merges_iterations_has_the_number_of_its_elements(tmp_path):
    "A merged row has the shape of one iteration, and a column with its number of elements. A row of one iteration lacks this column."
    def doubled(x): return jax.lax.while_loop(lambda x: x.sum()<40, lambda x: probe('x', 2*x), x)
    with track(home=tmp_path, name='merged') as t:
        for first in (3., 13.): # Sums of the iterations: 12, 24, 48 for the first input, and 52 for the second
            t.intercept(jax.jit(doubled), jnp.full(2, first))
            t.step()
    want = [(0, (2,), 6., 14.), (1, (2,), None, 26.)]
    assert [(s, tuple(shape), n, m) for s,shape,n,m in rows(t, 'step', 'shape', 'numel', 'mean', home=tmp_path)]==want
