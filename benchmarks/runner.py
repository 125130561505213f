"Each row in a fresh process, so that none disturbs another"
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

root = Path(__file__).parents[1]
modules = 'benchmarks.rows,benchmarks.peers,benchmarks.jax_rows'
pools = ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS')


def run_row(
    name, # A row
    title='', # What it compares
    module=modules, # Who registers it
    quick=False, # Few repetitions
    threads=1 # Of torch
): # Dict: row, title, wall, lines, and error or skipped if there are none
    "The lines of a row, measured in a child process with a home of its own"
    start = perf_counter()
    with tempfile.TemporaryDirectory(prefix='torchember-') as home:
        env = os.environ | dict.fromkeys(pools, str(threads)) | {'TORCHEMBER_HOME': home, 'TRANSFORMERS_VERBOSITY': 'error'}
        done = subprocess.run([sys.executable, '-m', 'benchmarks.child', module, name, 'quick' if quick else 'full', str(threads)],
            env=env, cwd=root, capture_output=True, text=True)
    out = dict(row=name, title=title, wall=round(perf_counter()-start, 1), lines=[])
    if done.returncode: return out | {'error': (done.stderr.strip().splitlines() or [f'exit status {done.returncode}'])[-1], 'trace': done.stderr}
    got = json.loads(done.stdout.splitlines()[-1])
    return out | (got if 'skipped' in got else {'lines': got})
