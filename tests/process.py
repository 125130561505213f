"""The process of the tests: settings that must be made before torch is imported, and a check of what a test has left behind

Both files `conftest.py`, that of tests/ and that of the notebooks, import this Python module first."""
import gc
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
from functools import cache
from operator import is_

import pytest

# These settings must precede the import of torch: an empty folder of runs, no windows, one thread per worker
if signal.getsignal(signal.SIGINT)==signal.SIG_IGN: # a shell job in the background ignores Ctrl-C, and child processes would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
home,env = tempfile.TemporaryDirectory(prefix='torchember-'),pytest.MonkeyPatch()
env.setenv('TORCHEMBER_HOME', home.name)
env.setenv('MPLBACKEND', 'agg')
env.delenv('COLUMNS', raising=False) # set by xdist, but tests set the width of the terminal themselves
env.setenv('TRACKIO_DIR', os.path.join(home.name, 'trackio')) # trackio reads this variable when it is imported
env.setenv('MLFLOW_DISABLE_TELEMETRY', 'true')
env.setenv('TORCHEMBER_WAIT', '1') # load the kernels before the first step, so that all steps use the same arithmetic
if 'TORCHEMBER_PLAN' not in os.environ: env.setenv('TORCHEMBER_PLAN', '1') # also the functions for plans of calls; test_without_plans runs tests without them
env.setenv('TORCHINDUCTOR_COMPILE_THREADS', '1') # a pool of compiler processes would import torch in each process
if 'TORCHINDUCTOR_VEC_ISA_OK' not in os.environ: env.setenv('TORCHINDUCTOR_VEC_ISA_OK', '1') # skip a test compilation for each instruction set of this CPU
if 'PYTEST_XDIST_WORKER' in os.environ: env.setenv('OMP_NUM_THREADS', '1')


# Garbage collections take half a second in a process full of compilers, so they are rare. Tests that need one call gc.collect
gc.set_threshold(20_000, 20, 20)


def over():
    if programs := loaded('programs'): programs.over()
    env.undo()
    home.cleanup()


def fresh(monkeypatch):
    "Give a test an empty folder of runs ($TORCHEMBER_HOME), and set the seeds of the random generators."
    import numpy as np
    import torch
    monkeypatch.setenv('TORCHEMBER_HOME', tempfile.mkdtemp(dir=home.name))
    for seed in (random.seed, np.random.seed, torch.manual_seed): seed(0)
    if absl := loaded('absl.logging'): # absl keeps the stderr of its import, a capture of pytest, and would close it when uvicorn sets up logging
        absl.get_absl_handler().python_handler.stream = sys.__stderr__


def forget_graphs():
    "Reset Dynamo between test files. Dynamo stops compiling a function, such as Sequential.forward, after eight graphs."
    if dynamo := loaded('torch._dynamo'): dynamo.reset()


def close_figures():
    "Close all figures of matplotlib, because pyplot keeps them."
    if plt := loaded('matplotlib.pyplot'): plt.close('all')


# ---- state of the process: each function returns a dict, name -> object. A library that is not imported has no state

def loaded(name): return sys.modules.get(name)


def open_recorders():
    m = loaded('torchember.recorder.process')
    return {r.t.fname: r for r in list(m.open_recorders)} if m else {}


def armed_modules():
    "Return the modules that are patched by an ember, a monitor or a snapshot of activations."
    compiled,forward = (loaded(f'torchember.capture.{n}') for n in ('compiled', 'forward'))
    patches = [h for h in list(compiled.holders.values()) if isinstance(h, forward.Patch)] if forward else []
    return {f'{type(m).__name__} at {id(m):#x}': m for p in patches if p.states and (m := p.states[0].track.module).__dict__.get(forward.KEY) is p}


def threads():
    "Return the threads of torchember that belong to one run, and all threads that would prevent the process from ending."
    serve = ('torchember-writer', 'torchember loads', 'torchember_')
    return {t.name: t for t in threading.enumerate() if not t.name.startswith(serve) and (not t.daemon or t.name.startswith('torchember'))}


def processes(): return {p.name: p for p in multiprocessing.active_children()}


def variables(): return {k:v for k,v in os.environ.items() if not k.startswith(of_libraries)}


# Libraries set these at their first use: _TORCHINDUCTOR_ belongs to code compiled by Inductor, _RJEM_ to the allocator of polars
of_libraries = ('PYTEST_', 'PYTORCH_', 'TORCHINDUCTOR_CACHE', '_TORCHINDUCTOR_', 'KMP_', 'TRITON_', 'ACCELERATE_', 'LIGHTNING_', 'PL_', 'TRANSFORMERS_',
    'TOKENIZERS_', 'WANDB_', 'KERAS_', 'XLA_', 'TPU_', 'TF_', 'JUPYTER_', 'PYDEVD_', '_RJEM_')


def settings():
    out = {'current folder': os.getcwd(), 'sys.excepthook': sys.excepthook,
        'sys.path': [p for p in sys.path if not p.endswith('_vendor')], # setuptools adds it when Inductor imports setuptools
        'recursion limit': max(sys.getrecursionlimit(), 2000), # Inductor raises the limit to 2000
        'switch interval': sys.getswitchinterval(),
        'garbage collector': gc.isenabled(), 'signal handlers': [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]}
    if torch := loaded('torch'):
        out |= {'default dtype': torch.get_default_dtype(), 'default device': torch.get_default_device(), 'threads of torch': torch.get_num_threads(),
            'gradients': torch.is_grad_enabled(), 'inference mode': torch.is_inference_mode_enabled(), 'anomaly mode': torch.is_anomaly_enabled(),
            'deterministic algorithms': torch.are_deterministic_algorithms_enabled(), 'autocast': torch.is_autocast_enabled('cpu'),
            'precision of matmul': torch.get_float32_matmul_precision(),
            'process group': torch.distributed.is_available() and torch.distributed.is_initialized()}
        places = (loaded('torch.nn.modules.module'), loaded('torch.optim.optimizer'))
        # global hooks of modules and optimizers
        out |= {f'{m.__name__}.{k}': [*v] for m in places for k,v in vars(m).items() if k.startswith('_global') and isinstance(v, dict)}
    if private := loaded('torchember.capture.private_torch'):
        out |= {'modes of torch': (private.count_dispatch_modes(), private.count_function_modes()), 'transform': private.inside_transform()}
    if np := loaded('numpy'): out |= {'errors of numpy': np.geterr(), 'printing of numpy': np.get_printoptions()}
    if jax := loaded('jax'):
        out |= {f'jax.config.{k}': getattr(jax.config, k) for k in ('jax_enable_x64', 'jax_disable_jit', 'jax_debug_nans', 'jax_check_tracer_leaks')}
    if quantities := loaded('torchember.monitor.quantities'): out |= {f'the quantity {n}': quantities.classes[n] for n in quantities.builtin}
    if plots := loaded('torchember.state.plots'): out['folder for pictures'] = dict(plots.pictures)
    if modules := loaded('torchember.jaxember.capture.modules'): out['modules of JAX that run'] = dict(modules.marked)
    return out


def figures():
    m = loaded('matplotlib._pylab_helpers')
    return {f'figure {n}': f for n,f in m.Gcf.figs.items()} if m else {}


def drawing():
    m = loaded('matplotlib')
    shell = 'backend', 'interactive' # The notebook shell sets these two values when it starts
    return {f'rcParams[{k!r}] of matplotlib': v for k,v in dict.items(m.rcParams) if k not in shell} if m else {}


# objects that a test may remove but not leave behind: message -> function
things = {'{} is an open recorder: close its ember': open_recorders, '{} is armed': armed_modules, 'the thread {} runs': threads,
    'the process {} runs': processes, '{} is open': figures}
# values that a test must restore: message -> function. Libraries imported during the test are compared from then on
values = {'the environment variable {}': variables, '{}': lambda: settings()|drawing()}

# modules and their classes in which a test may have replaced attributes
patchable = {'builtins': '', 'os': '', 'time': '', 'json': '', 'pickle': '', 'threading': 'Thread', 'subprocess': 'Popen',
    'torch': 'Tensor', 'torch.nn': 'Module Linear', 'torch.nn.functional': '', 'torch.autograd': '', 'torch.optim': 'Optimizer SGD Adam AdamW',
    'torch.compiler': '', 'torch.distributed': '', 'numpy': '', 'pandas': 'DataFrame', 'jax': '', 'jax.numpy': '', 'jax.lax': '', 'optax': '',
    'flax.nnx': 'Module', 'flax.linen': 'Module'}

def attributes():
    "Return the attributes of the classes and modules in `patchable`, and of all Python modules of torchember: name -> dict."
    places = {}
    for name,classes in patchable.items():
        if (m := loaded(name)) is None: continue
        for where,of in {name: m, **{f'{name}.{c}': vars(m).get(c) for c in classes.split()}}.items():
            if of is None: continue
            places[where] = {}
            for c in reversed(getattr(of, '__mro__', [of])): places[where].update(vars(c)) # an attribute set on the class hides an inherited one
    for name,m in list(sys.modules.items()):
        if m is not None and name.startswith('torchember.'):
            places[name] = own = vars(m).copy()
            for c in classes_of(name, len(own)): places[f'{name}.{c.__name__}'] = vars(c).copy()
    return places


@cache
def classes_of(name, size): return [v for v in vars(sys.modules[name]).values() if isinstance(v, type) and v.__module__==name]


class Settings:
    "Values and attributes of the process at one time. No references to recorders, threads or figures are kept"
    def __init__(self):
        self.values = {say: look() for say,look in values.items()}
        self.attributes = attributes()

    def changed(self, now):
        "Return a sentence for each value or attribute that is different in `now`, the later `Settings`."
        out = []
        for say,look in values.items():
            was,new = self.values[say],now.values[say]
            known = was.keys()|new.keys() if look is variables else was.keys()&new.keys()
            out += [f'{say.format(n)} was {was.get(n)!r:.200}, and is {new.get(n)!r:.200}' for n in sorted(known) if was.get(n)!=new.get(n)]
        for where,was in self.attributes.items():
            new = now.attributes.get(where, was)
            if was.keys()==new.keys() and all(map(is_, was.values(), new.values())): continue # usually equal; this comparison is fast
            out += [f'{where}.{n} is patched' for n,v in was.items() if (w := new.get(n, self)) is not v and by_somebody(where, n, v, w)]
        return out


class Before(Settings):
    "Objects, values and attributes of the process before a test starts"
    collections = 0 # number of garbage collections after tests that left objects behind

    def __init__(self):
        self.things = {say: look() for say,look in things.items()}
        super().__init__()

    def come(self):
        return [say.format(n) for say,look in things.items() for n,o in look().items() if not any(o is p for p in self.things[say].values())]

    def left(self):
        """Return sentences about objects that a test has left behind, and about changed values.

        Garbage is collected first, so that the result is the same each time."""
        if self.come():
            Before.collections += 1
            if Before.collections%50==0: gc.unfreeze() # frozen objects may be garbage by now
            gc.collect()
            if not self.come(): gc.freeze() # the remaining objects are mostly modules; later collections skip them
        return self.come()+self.changed(Settings())


def by_somebody(where, name, was, new):
    "Return True if the test has replaced an attribute. Libraries may replace attributes at their first use."
    package,code = where.split('.')[0],getattr(new, '__code__', None)
    if package=='torchember': return not re.fullmatch(r'__.*|_\d+_c\d+', name) # names under which Dynamo stores compiled code in a module
    library = 'site-packages' in code.co_filename if code else f'{getattr(new, "__module__", "")}.'.startswith(f'{package}.')
    return callable(was) and not library


def blame(name, left):
    "Fail with the name of the test, and with the objects and changes that the test left behind."
    if left: pytest.fail('\n'.join([f'{name} left something:', *left]), pytrace=False)
