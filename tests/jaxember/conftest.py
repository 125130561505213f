"XLA's passes cost half of what a test in JAX takes, and its small programs are no faster for them"
import sys

import pytest


@pytest.fixture(scope='session')
def optimized(): "Asked for by a test in which a program as XLA makes it for users is to give the same bits"


@pytest.fixture(autouse=True)
def compiled_quickly(request):
    if (jax := sys.modules.get('jax')) is None or 'optimized' in request.fixturenames: return (yield)
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', False)
