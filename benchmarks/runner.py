"Runs the measurement of each row of the benchmark in a new process."
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
    name, # Name of the row
    title='', # Description of what the row compares
    module=modules, # Python module that registers the row
    quick=False, # True to measure with few repetitions
    threads=1 # Number of threads of torch
):
    """Measure one row in a child process. Return a dict: row, title, wall (seconds) and lines; `error` or `skipped` is the reason for no lines.

    The child process has its own home folder of runs."""
    start = perf_counter()
    with tempfile.TemporaryDirectory(prefix='torchember-') as home:
        env = os.environ | dict.fromkeys(pools, str(threads)) | {'TORCHEMBER_HOME': home, 'TRANSFORMERS_VERBOSITY': 'error'}
        child = subprocess.run([sys.executable, '-m', 'benchmarks.child', module, name, 'quick' if quick else 'full', str(threads)],
            env=env, cwd=root, capture_output=True, text=True)
    out = dict(row=name, title=title, wall=round(perf_counter()-start, 1), lines=[])
    if child.returncode: return out | {'error': (child.stderr.strip().splitlines() or [f'exit status {child.returncode}'])[-1], 'trace': child.stderr}
    result = json.loads(child.stdout.splitlines()[-1])
    return out | (result if 'skipped' in result else {'lines': result})
