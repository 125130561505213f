"XLA's passes cost half of what a test in JAX takes, and its small programs are no faster for them"
import sys

import pytest


@pytest.fixture(scope='session')
def optimized(): "Fixture for tests that compare bits of programs which XLA optimizes as for users"


@pytest.fixture(autouse=True)
def compiled_quickly(request):
    if (jax := sys.modules.get('jax')) is None or 'optimized' in request.fixturenames: return (yield)
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', False)
