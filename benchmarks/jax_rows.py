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

names = {'mlp': 'MLP of 4 x 512', 'transformer': 'transformer, scanned and rematerialised', 'tiny': 'MLP of 4 x 16'}


def needs_jax():
    if missing := [n for n in ('jax', 'flax', 'optax') if not find_spec(n)]: raise Skip(f"it needs {' and '.join(missing)}")


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
    rows = f"{got['rows']} rows, " if got.get('rows') else ''
    return f"{rows}of a step of {ms:.3g} ms of CPU time; on the clock {spread(a/b for b,a in got['clock'])['value']:.2f}x"


def of_rows(got): return spread(1e6*(a-b)/got['rows'] for b,a in got['cpu'])


@row('jax', 'JAX: what a compiled step takes more, Adam, watched by jaxember')
def steps(quick):
    needs_jax()
    kinds = [(f"{'numbers' if scalars else 'numbers and exponents'}, {'everything' if everything else 'outputs'}", scalars, everything)
        for scalars in (True, False) for everything in (False, True)]
    for name,title in names.items():
        for what,scalars,everything in kinds:
            got = case('cost', name=name, scalars=scalars, everything=everything, quick=quick)
            if name=='tiny': yield line(f'{title}: {what}, a row', unit='us', at_most=30 if scalars else None, note=of_step(got), **of_rows(got))
            else: yield line(f'{title}: {what}', unit='x', at_most=1.15 if scalars else None, note=of_step(got), **ratios(got['cpu']))


@row('jax-plain', 'JAX without numba: the same, by operations of XLA')
def plain(quick):
    needs_jax()
    for name,title in names.items():
        for what,everything in (('outputs', False), ('everything', True)):
            got = case('cost', environment={'NUMBA_DISABLE_JIT': '1'}, name=name, scalars=True, everything=everything, quick=quick)
            if name=='tiny': yield line(f'{title}: numbers, {what}, a row', unit='us', note=of_step(got), **of_rows(got))
            else: yield line(f'{title}: numbers, {what}', unit='x', note=of_step(got), **ratios(got['cpu']))


@row('jax-off', 'JAX: what `intercept` and `step` take where no step is recorded')
def off(quick):
    needs_jax()
    own = spread(1e6*(a-b) for b,a in case('calls', quick=quick)['cpu'])
    yield line('the two calls by themselves', unit='us', note='with nothing tracked but outputs', **own)
    for name in ('mlp', 'transformer'):
        got = case('cost', name=name, scalars=True, everything=True, quick=quick, off=True)
        ms = spread(1e3*b for b,_ in got['cpu'])['value']
        yield line(f'{names[name]}: both calls, as a part of the step', own['value']/ms/10, '%', at_most=.5, note=f'of a step of {ms:.3g} ms')
        yield line(f'{names[name]}: the steps against each other', unit='%', note='what the machine makes of no difference', **added(got['cpu']))


@row('jax-first', 'JAX: the first step, which is traced and compiled, against the first of one that is not watched')
def first(quick):
    needs_jax()
    for name,title in names.items():
        both = [[case('first', name=name, armed=armed) for armed in (False, True)] for _ in range(2 if quick else 3)]
        clock = spread(a[1]/b[1] for b,a in both)['value']
        was,took = (spread(x[0] for x in some)['value'] for some in zip(*both, strict=True))
        note = f'numbers, everything; from {was:.2f} to {took:.2f} s of CPU time; on the clock {clock:.2f}x'
        yield line(title, unit='x', at_most=2, note=note, **ratios((b[0], a[0]) for b,a in both))


tools = ('jaxember', 'torchember', False),('Track & Visualize', 'tandv', False),('Track & Visualize, with what JAX has no more put back', 'tandv', True)
examples = [(f"{title}{', jitted' if jitted else ''}", tool, dict(jitted=jitted, mend=mend)) for jitted in (False, True) for title,tool,mend in tools]


@row('jax-peers', "JAX: Track & Visualize's own tracker on its own example, an MLP of 512, 512 and 10 on digits")
def peers(quick):
    from .peers import only_benchmarks, python
    needs_jax()
    if not find_spec('sklearn'): raise Skip('it needs scikit-learn, for the digits')
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
