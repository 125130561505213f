"`probe('prediction', x)` and `probe('target', y)` record the arguments of a loss in JAX, and the rules about losses check them"
import warnings

import numpy as np
import pytest

jax = pytest.importorskip('jax')
import jax.numpy as jnp # noqa: E402

from torchember import diagnose, read # noqa: E402
from torchember.jaxember import probe, track # noqa: E402

pytestmark = pytest.mark.filterwarnings('error:The rule')


def cross_entropy(logits, y): return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1, mode='clip').mean()


def squared(p, y): return ((p-y)**2).mean()


def train(home, labels, loss=cross_entropy, out=3, steps=20):
    "Train a linear model. `labels`: function of a random generator that returns the targets of a batch. Return the findings, rows and last target"
    r = np.random.default_rng(0)
    w = jnp.asarray(r.standard_normal((4, out))*.1)
    f = jax.jit(jax.grad(lambda w, x, y: loss(probe('prediction', x@w), probe('target', y))))
    with warnings.catch_warnings(), track({'w': w}, track_gradients=True, home=home, name='run') as t:
        warnings.simplefilter('ignore')
        for _ in range(steps):
            x,y = jnp.asarray(r.standard_normal((16, 4))),jnp.asarray(labels(r))
            last,g = x@w,t.intercept(f, w, x, y)
            w = w-.1*g
            t.step({'w': w}, None, {'w': g})
    return diagnose('run', home=home),read('run', home=home),last,y


def test_rows_of_predictions_and_targets(tmp_path):
    found,rows,x,y = train(tmp_path, lambda r: r.integers(0, 3, 16))
    assert found.healthy, found
    rows = rows[rows.step==19].set_index(['ttype', 'tname'])
    for ttype,v in (('prediction', x), ('target', y)):
        row = rows.loc[(ttype, 'loss')]
        np.testing.assert_allclose(row[['mean', 'std', 'abs_max']].astype(float), [v.mean(), np.std(v, ddof=1), abs(v).max()], rtol=1e-5)
        assert (row['path'], row['call'], row['dtype'])==('', 0, str(v.dtype))
    assert ('output_grad', 'prediction') in rows.index and 'probe' not in rows.index.get_level_values(0)


faults = {
    'label too large': ('target_range', lambda r: r.integers(0, 4, 16)),
    'labels from 1': ('target_range', lambda r: r.integers(1, 4, 16)),
    'one class': ('one_class', lambda r: np.ones(16, int)),
    'sorted': ('one_class', lambda r: np.full(16, r.integers(0, 3))),
    'broadcast': ('broadcast', lambda r: r.standard_normal(16), squared, 1)}


@pytest.mark.parametrize('fault', faults)
def test_rules_of_losses(fault, tmp_path):
    rule,*more = faults[fault]
    found = train(tmp_path, *more)[0]
    assert [f for f in found['rule'] if f in ('target_range', 'one_class', 'broadcast')]==[rule], found


healthy = {
    'regression': (lambda r: r.standard_normal((16, 1)), squared, 1),
    'negative targets': (lambda r: r.integers(-3, 3, (16, 1)), squared, 1),
    'one-hot': (lambda r: np.eye(3)[r.integers(0, 3, 16)], lambda p, y: -(jax.nn.log_softmax(p)*y).mean()),
    'one value for all': (lambda r: np.float32(.5), lambda p, y: squared(jnp.tanh(p), y), 3),
    'an index of another shape': (lambda r: r.integers(0, 3, 5), lambda p, y: -jax.nn.log_softmax(p)[:5, 0].mean()+0*y.sum())}


@pytest.mark.parametrize('case', healthy)
def test_healthy_losses(case, tmp_path):
    found = train(tmp_path, *healthy[case])[0]
    assert not {'target_range', 'one_class', 'broadcast', 'loss_input'} & set(found['rule']), found
