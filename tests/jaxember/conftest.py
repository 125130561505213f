"Turn off most optimization passes of XLA: they take half of the test time in JAX, and small programs run as fast without them"
import sys

import pytest


@pytest.fixture(scope='session')
def optimized(): "Fixture for tests that compare bits, and so need programs that XLA optimizes as for users"


@pytest.fixture(autouse=True)
def compiled_quickly(request):
    if (jax := sys.modules.get('jax')) is None or 'optimized' in request.fixturenames: return (yield)
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', False)
