"""GPU kernels are tested without a GPU: Triton interprets them with numpy, in a child process with TRITON_INTERPRET=1.

What is tried there is in triton_cases.py. On a machine with a GPU the same cases run there too, compiled: `pytest tests/measure/triton_cases.py`.
"""
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import programs
import pytest

here = Path(__file__).parent
root = here.parents[1]
pytestmark = pytest.mark.skipif(not importlib.util.find_spec('triton'), reason='Triton is not installed')


@pytest.mark.slow
@pytest.mark.parametrize('marked', ['not release', pytest.param('release', marks=pytest.mark.release)])
def test_interpreted(marked):
    env = os.environ | {'TRITON_INTERPRET': '1'}
    done = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-n0', '-p', 'no:cacheprovider', '-m', marked, str(here/'triton_cases.py')],
        env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode==0, done.stdout+done.stderr
    assert 'skipped' not in done.stdout


compiled = '''
import re, sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torchember.measure.readers import triton as gpu

sizes = dict(n='i32', between='i32', tensors='i32', step='i32', apart='i32', span='i32', per='i32')
def text(cc, x, B, wanted):
    f,types = gpu._kernel,dict(x='*'+x, out='*fp64', jobs='*i64', rows='*fp64' if x=='fp64' else '*fp32', part='*fp64', counters='*i32', bins='*fp64')|sizes
    const,at = dict(wanted=wanted, B=B, W=16, T=gpu.tile, aligned=True),f.arg_names.index
    pointers = {(at(k),): [['tt.divisibility', 16]] for k,t in types.items() if t.startswith('*') and k!='out'}
    source = ASTSource(f, dict.fromkeys(f.arg_names, 'constexpr')|types, {(at(k),): v for k,v in const.items()}, pointers)
    return compile(source, target=GPUTarget('cuda', cc, 32), options=dict(num_warps=gpu.warps, enable_fp_fusion=True, maxnreg=128)).asm

for cc,x,wanted in ((80, 'fp32', 15), (80, 'fp64', 15), (90, 'bf16', 0)): # each type and each GPU; what a compile tells is of the type
    asm = text(cc, x, 2048 if x=='fp64' else 4096, wanted)
    code = asm['ptx']
    assert re.search('%start[^ ]* = arith.muli %start, %c[0-9]+_i64 : i64', asm['ttir']), 'where a program begins may be more than 31 bits count'
    assert '.ftz' not in code, 'subnormal numbers become zero'
    assert ('ld.global.v2.b64' if x=='fp64' else 'ld.global.v4.b32') in code, 'a thread does not load 16 bytes at once'
    assert code.count('atom.global.gpu.acq_rel')==2 and 'ld.volatile' in code, 'what other programs have written may not be seen'
'''


@pytest.mark.slow
@pytest.mark.release # slow test: the kernels rarely change, and the version of the compiler is fixed
def test_compiled_for_gpus_that_are_not_here(tmp_path):
    "Compiling needs no GPU. The code for A100 and H100 loads 16 bytes at once and keeps subnormal numbers."
    env = {k:v for k,v in os.environ.items() if k!='TRITON_INTERPRET'} | {'TRITON_CACHE_DIR': str(tmp_path)}
    done = subprocess.run([sys.executable, '-c', compiled], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode==0, done.stderr


def test_without_triton(tmp_path):
    "The Python module can be imported without Triton, and `available` returns False."
    (tmp_path/'triton.py').write_text("raise ImportError('no triton')")
    code = "from torchember.measure.readers import triton as gpu; print(gpu.available('cuda'), gpu.available('cpu'))"
    done = programs.run(code, cwd=root, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')]))
    assert done.stdout.split()==['False', 'False'], done.stderr
