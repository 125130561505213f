"Tensors are still measured if numba is missing, switched off or broken."
import os
import platform

import programs
import pytest

code = '''
import warnings
warnings.simplefilter('always')
import torch
from torchember import get_stats
from torchember.measure import kernels
got = get_stats(torch.tensor([3., 4, 0, 5]), ['mean', 'std', 'exponents(0, 2)'])
print({k: round(v, 6) if isinstance(v, float) else v for k,v in got.items()}, kernels.loops() is None)
'''
right = "{'mean': 3.0, 'std': 2.160247, 'exponents': [1, 0, 1, 2, 0], 'exponent_min': 0}"


def run(path='', code=code, **env):
    return programs.run(code, PYTHONPATH=os.pathsep.join([str(path), os.environ.get('PYTHONPATH', '')]), **env)


def test_numba_is_used():
    done = run()
    assert done.stdout.strip()==f'{right} False' and not done.stderr, done


def test_numba_switched_off():
    done = run(NUMBA_DISABLE_JIT='1')
    assert done.stdout.strip()==f'{right} True' and not done.stderr, done


@pytest.mark.parametrize('error,said', [("ModuleNotFoundError('No module', name='numba')", False), ("ImportError('Numba needs another NumPy')", True)])
def test_numba_missing_or_broken(error, said, tmp_path):
    (tmp_path/'numba.py').write_text(f'raise {error}')
    done = run(tmp_path)
    assert done.stdout.strip()==f'{right} True', done
    assert ('EmberWarning' in done.stderr and 'needs another NumPy' in done.stderr)==said, done


def test_no_writable_cache_folder(tmp_path):
    "Without a writable cache folder, numba compiles again in each process."
    cache = tmp_path/'cache'
    cache.write_text('a file, no folder')
    done = run(NUMBA_CACHE_DIR=str(cache))
    assert done.stdout.strip()==f'{right} False', done


everywhere = '''
import numpy as np
from torchember.measure.readers import numba as cpu
from torchember.measure.summary import groups, read_array, width
rng = np.random.default_rng(0)
for n in (1, 63, 64, 128, 1000, cpu.block+77):
    for scale in (1, 1e-20, 1e20):
        x = (scale*rng.standard_normal(n)).astype(np.float32)
        x[rng.random(n)<.1] = 0
        for bad in (False, True):
            if bad: x[rng.integers(n)] = np.nan
            for y in (x, x.astype(np.float64)):
                got,want = cpu.read_at(y.ctypes.data, n, y.dtype.name, tuple(groups)),read_array(y, tuple(groups))
                np.testing.assert_allclose(got[:width-1], want[:width-1], rtol=1e-9)
                np.testing.assert_array_equal(got[width:], want[width:])
print(cpu.lanes)
'''


@pytest.mark.skipif(platform.machine().lower() not in ('x86_64', 'amd64'), reason='these are names of x86 processors')
@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize('name,features', [('generic', ''), ('haswell', '+avx2,+avx,+fma,+sse4.2,+sse4.1,+ssse3,+sse3,+bmi,+bmi2,+popcnt,+lzcnt,+f16c')])
def test_numbers_do_not_depend_on_the_processor(name, features):
    "The statistics do not depend on the vector width of the processor."
    done = run(code=everywhere, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
    assert done.stdout.strip()=='8', done
