"Rows of the benchmark about JAX. Each measurement runs in a Python process of its own, which does not import torch."
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from .registry import Skip, line, row
from .timing import added, ratios, spread

names = {'mlp': 'MLP of 4 layers of width 512', 'transformer': 'transformer, scanned and rematerialised', 'tiny': 'MLP of 4 layers of width 16'}


def needs_jax():
    if missing := [n for n in ('jax', 'flax', 'optax') if not find_spec(n)]: raise Skip(f"needs {' and '.join(missing)}")


def on_cores(n):
    "Return a function for `preexec_fn` that limits a new process to `n` cores, and therefore JAX to `n` threads."
    def limit():
        if hasattr(os, 'sched_setaffinity'): os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-n:])
    return limit


def case(what, exe=sys.executable, environment=None, **arguments):
    "Return the result of a function of benchmarks/jax_cases.py, run in a process of its own. Raise RuntimeError if the process fails."
    threads = int(os.environ.get('OMP_NUM_THREADS', 1))
    done = subprocess.run([exe, '-m', 'benchmarks.jax_cases', what, json.dumps(arguments)], env=os.environ | (environment or {}),
        capture_output=True, text=True, preexec_fn=on_cores(threads))
    if done.returncode: raise RuntimeError((done.stderr.strip().splitlines() or [f'exit status {done.returncode}'])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def of_step(got):
    "Return the explanation of a line in the table about the time of a step."
    ms = spread(1e3*b for b,_ in got['cpu'])['value']
    rows = f"{got['rows']} rows per step; " if got.get('rows') else ''
    return f"{rows}{ms:.3g} ms of CPU time without recording; ratio of wall times {spread(a/b for b,a in got['clock'])['value']:.2f}x"


def of_rows(got): return spread(1e6*(a-b)/got['rows'] for b,a in got['cpu'])


@row('jax', 'JAX: CPU time of a compiled step with Adam, recorded by jaxember, against a step without recording')
def steps(quick):
    needs_jax()
    kinds = [(f"{'statistics' if scalars else 'statistics and exponents'} of {'all tensors' if everything else 'outputs'}", scalars, everything)
        for scalars in (True, False) for everything in (False, True)]
    for name,title in names.items():
        for what,scalars,everything in kinds:
            got = case('cost', name=name, scalars=scalars, everything=everything, quick=quick)
            if name=='tiny': yield line(f'{title}: {what}, time per row', unit='us', at_most=30 if scalars else None, note=of_step(got), **of_rows(got))
            else: yield line(f'{title}: {what}', unit='x', at_most=1.15 if scalars else None, note=of_step(got), **ratios(got['cpu']))


@row('jax-plain', 'JAX without numba: as the benchmark jax, but operations of XLA compute the statistics')
def plain(quick):
    needs_jax()
    for name,title in names.items():
        for what,everything in (('outputs', False), ('all tensors', True)):
            got = case('cost', environment={'NUMBA_DISABLE_JIT': '1'}, name=name, scalars=True, everything=everything, quick=quick)
            if name=='tiny': yield line(f'{title}: statistics of {what}, time per row', unit='us', note=of_step(got), **of_rows(got))
            else: yield line(f'{title}: statistics of {what}', unit='x', note=of_step(got), **ratios(got['cpu']))


@row('jax-off', 'JAX: CPU time of the calls of intercept and step, in steps that are not recorded')
def off(quick):
    needs_jax()
    own = spread(1e6*(a-b) for b,a in case('calls', quick=quick)['cpu'])
    yield line('both calls', unit='us', note='the tracker records only outputs', **own)
    for name in ('mlp', 'transformer'):
        got = case('cost', name=name, scalars=True, everything=True, quick=quick, off=True)
        ms = spread(1e3*b for b,_ in got['cpu'])['value']
        yield line(f'{names[name]}: both calls, share of the step', own['value']/ms/10, '%', at_most=.5, note=f'a step takes {ms:.3g} ms of CPU time')
        yield line(f'{names[name]}: steps with both calls, against steps without', unit='%',
            note='measurement error: no step is recorded, and the calls take less than the noise', **added(got['cpu']))


@row('jax-first', 'JAX: CPU time of the first step, which is traced and compiled, against a first step without recording')
def first(quick):
    needs_jax()
    for name,title in names.items():
        both = [[case('first', name=name, armed=armed) for armed in (False, True)] for _ in range(2 if quick else 3)]
        clock = spread(a[1]/b[1] for b,a in both)['value']
        was,took = (spread(x[0] for x in some)['value'] for some in zip(*both, strict=True))
        note = f'{was:.2f} s of CPU time without recording, {took:.2f} s with recording; ratio of wall times {clock:.2f}x'
        yield line(f'{title}: first step, statistics of all tensors', unit='x', at_most=2, note=note, **ratios((b[0], a[0]) for b,a in both))


tools = ('jaxember', 'torchember', False),('Track & Visualize', 'tandv', False),('Track & Visualize, with removed functions of JAX put back', 'tandv', True)
examples = [(f"{title}{', jitted' if jitted else ''}", tool, dict(jitted=jitted, mend=mend)) for jitted in (False, True) for title,tool,mend in tools]


@row('jax-peers', 'JAX: CPU time of a step with the trackers of jaxember and Track & Visualize, against a step without recording. '
    'An example of Track & Visualize: an MLP of 512, 512 and 10 units on digits')
def peers(quick):
    from .peers import only_benchmarks, python
    needs_jax()
    if not find_spec('sklearn'): raise Skip('needs scikit-learn, for the digits')
    with tempfile.TemporaryDirectory(prefix='peers-') as folder:
        folder = Path(folder)
        apart = {'PYTHONPATH': str(only_benchmarks(folder)), 'HOME': str(folder)}
        for title,tool,how in examples:
            try:
                exe = python(tool, folder)
                got = case('example', exe, apart if tool=='tandv' else None, tool=tool, quick=quick, **how)
            except (Skip, RuntimeError) as e: yield line(title, None, 'x', note=f'not measured: {e}', n=0); continue
            mended = f"; put back: {', '.join(got['mended'])}" if got['mended'] else ''
            yield line(title, unit='x', note=of_step(got)+mended, **ratios(got['cpu']))
