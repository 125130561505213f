"Runs the tests of `keras_on_torch.py` in a process of its own, because Keras fixes its backend at import"
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_keras = pytest.mark.skipif(find_spec('keras') is None, reason='there is no keras here')


def run(folder, backend, *args):
    # Without these variables, the inner pytest is no xdist worker
    env = {k: v for k,v in os.environ.items() if not k.startswith('PYTEST_')}
    return subprocess.run([sys.executable, *args], env=dict(env, KERAS_BACKEND=backend, KERAS_HOME=str(folder)), capture_output=True, text=True, timeout=600)


@pytest.mark.slow # imports torch, keras and torchember again
@needs_keras
@pytest.mark.release # the documentation page of this integration trains in each run
@pytest.mark.parametrize('which', ['not release', 'release'])
def test_on_torch(which, tmp_path):
    out = run(tmp_path, 'torch', '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-p', 'no:xdist', '-o', 'addopts=', '-m', which,
        str(Path(__file__).with_name('keras_on_torch.py')))
    assert not out.returncode and ' passed' in out.stdout, out.stdout[-6000:]


@pytest.mark.slow
@pytest.mark.release
@needs_keras
def test_on_another_backend(tmp_path):
    pytest.importorskip('jax')
    out = run(tmp_path, 'jax', '-W', 'ignore', '-c', 'from torchember.integrations.keras import EmberCallback; EmberCallback()')
    assert out.returncode and ("RuntimeError: EmberCallback records Keras on torch, but Keras runs on jax. "
        "Set os.environ['KERAS_BACKEND'] = 'torch' before keras is imported.") in out.stderr
