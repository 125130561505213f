"Tests of rules with JAX runs: a planted fault is the first finding, and a healthy training has no finding"
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from torchember import diagnose, jaxember


class Classifier(nnx.Module):
    def __init__(self, rngs): self.a,self.b,self.c = nnx.Linear(16, 32, rngs=rngs),nnx.Linear(32, 32, rngs=rngs),nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x): return self.c(nnx.relu(self.b(nnx.relu(self.a(x)))))


def found_in(bias=0., scale=1., nan=None, rate=1e-2, sign=1):
    "Return the findings about a training with a fault"
    model = Classifier(nnx.Rngs(0))
    model.b.bias[...] = model.b.bias[...]+bias
    model.b.kernel[...] = model.b.kernel[...]*scale
    opt = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)

    @nnx.jit
    def update(model, opt, x, y):
        def loss(model): return sign*optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
        value,grads = nnx.value_and_grad(loss)(model)
        opt.update(model, grads)
        return sign*value, grads

    rng = np.random.default_rng(0)
    truth = rng.normal(size=(16, 4))
    with jaxember.track(model, track_gradients=True, name='jax') as tracker:
        for i in range(60):
            x = rng.normal(size=(32, 16)).astype('f4')
            y = jnp.asarray((x@truth).argmax(1))
            if i==nan: x[3, 2] = np.nan
            value,grads = tracker.intercept(update, model, opt, jnp.asarray(x), y)
            tracker.log(loss=value)
            tracker.step(model, gradients=grads)
    return diagnose('jax')


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::torchember.EmberWarning')
@pytest.mark.parametrize(('fault', 'rule', 'path', 'step'), [(dict(bias=-10.), 'dead_units', 'b', 0), (dict(nan=20), 'not_finite', 'a', 20),
    (dict(scale=30.), 'poor_scale', 'b', 0), (dict(rate=3.), 'update_too_large', '', 0), (dict(rate=1e-9), 'update_too_small', '', 0),
    (dict(sign=-1), 'loss_rises', '', 0)], ids=lambda v: v if isinstance(v, str) else None)
def test_the_fault_is_the_first_finding(fault, rule, path, step):
    first = found_in(**fault).iloc[0]
    assert (first['rule'], first['path'], first['first_step'])==(rule, path, step), first['text']


@pytest.mark.slow
def test_a_healthy_training_has_no_findings():
    found = found_in()
    assert found.healthy, found
