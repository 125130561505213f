"""The process that tests run in: what it gets before anything imports torch, and what a test has left in it when it is over

Both `conftest.py` begin with it, that of tests/ and that of the notebooks."""
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

# Before anything imports torch or torchember: a home that is nobody's, no windows, and no fight between workers over the cores
if signal.getsignal(signal.SIGINT)==signal.SIG_IGN: # begun in a background: programs would have Ctrl-C ignored, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
home,env = tempfile.TemporaryDirectory(prefix='torchember-'),pytest.MonkeyPatch()
env.setenv('TORCHEMBER_HOME', home.name)
env.setenv('MPLBACKEND', 'agg')
env.delenv('COLUMNS', raising=False) # which xdist has set: how wide a terminal is, a test says itself
env.setenv('TRACKIO_DIR', os.path.join(home.name, 'trackio')) # which trackio reads when it is imported
env.setenv('MLFLOW_DISABLE_TELEMETRY', 'true')
env.setenv('TORCHEMBER_WAIT', '1') # the last digits of a first step are not left to chance
env.setenv('TORCHINDUCTOR_COMPILE_THREADS', '1') # more are a pool of processes, each of which imports torch
if 'TORCHINDUCTOR_VEC_ISA_OK' not in os.environ: env.setenv('TORCHINDUCTOR_VEC_ISA_OK', '1') # a compiler for each instruction set that this CPU says it has
if 'PYTEST_XDIST_WORKER' in os.environ: env.setenv('OMP_NUM_THREADS', '1')


# Some collections in a process full of compilers take half a second each; tests that mean one ask for it
gc.set_threshold(20_000, 20, 20)


def over():
    if programs := loaded('programs'): programs.over()
    env.undo()
    home.cleanup()


def fresh(monkeypatch):
    "An empty $TORCHEMBER_HOME, and seeded generators"
    import numpy as np
    import torch
    monkeypatch.setenv('TORCHEMBER_HOME', tempfile.mkdtemp(dir=home.name))
    for seed in (random.seed, np.random.seed, torch.manual_seed): seed(0)
    if absl := loaded('absl.logging'): # which has what was standard error when it was imported, and closes it when uvicorn sets up logging while it is another
        absl.get_absl_handler().python_handler.stream = sys.__stderr__


def forget_graphs():
    "Dynamo counts what it has compiled of a function, and gives up at eight: files compile the same functions of torch, such as the forward of Sequential"
    if dynamo := loaded('torch._dynamo'): dynamo.reset()


def close_figures():
    "pyplot holds on to what was drawn"
    if plt := loaded('matplotlib.pyplot'): plt.close('all')


# ---- what there is in the process: each of these gives things by name. What is not imported has changed nothing

def loaded(name): return sys.modules.get(name)


def open_recorders():
    m = loaded('torchember.recorder.process')
    return {r.t.fname: r for r in list(m.open_recorders)} if m else {}


def armed_modules():
    "Those that an ember, a monitor or a snapshot of activations hears"
    compiled,forward = (loaded(f'torchember.capture.{n}') for n in ('compiled', 'forward'))
    patches = [h for h in list(compiled.holders.values()) if isinstance(h, forward.Patch)] if forward else []
    return {f'{type(m).__name__} at {id(m):#x}': m for p in patches if p.states and (m := p.states[0].track.module).__dict__.get(forward.KEY) is p}


def threads():
    "Ours, but for those that serve all runs for as long as the process lives; and what would keep it from ending"
    serve = ('torchember-writer', 'torchember loads', 'torchember_')
    return {t.name: t for t in threading.enumerate() if not t.name.startswith(serve) and (not t.daemon or t.name.startswith('torchember'))}


def processes(): return {p.name: p for p in multiprocessing.active_children()}


def variables(): return {k:v for k,v in os.environ.items() if not k.startswith(of_libraries)}


# Which they set for themselves, when they are used first: _TORCHINDUCTOR_ is for the code that Inductor compiles, _RJEM_ for the allocator of polars
of_libraries = ('PYTEST_', 'PYTORCH_', 'TORCHINDUCTOR_CACHE', '_TORCHINDUCTOR_', 'KMP_', 'TRITON_', 'ACCELERATE_', 'LIGHTNING_', 'PL_', 'TRANSFORMERS_',
    'TOKENIZERS_', 'WANDB_', 'KERAS_', 'XLA_', 'TPU_', 'TF_', 'JUPYTER_', 'PYDEVD_', '_RJEM_')


def settings():
    out = {'current folder': os.getcwd(), 'sys.excepthook': sys.excepthook,
        'sys.path': [p for p in sys.path if not p.endswith('_vendor')], # setuptools', which Inductor imports
        'recursion limit': max(sys.getrecursionlimit(), 2000), # as high as Inductor needs it
        'switch interval': sys.getswitchinterval(),
        'garbage collector': gc.isenabled(), 'signal handlers': [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]}
    if torch := loaded('torch'):
        out |= {'default dtype': torch.get_default_dtype(), 'default device': torch.get_default_device(), 'threads of torch': torch.get_num_threads(),
            'gradients': torch.is_grad_enabled(), 'inference mode': torch.is_inference_mode_enabled(), 'anomaly mode': torch.is_anomaly_enabled(),
            'deterministic algorithms': torch.are_deterministic_algorithms_enabled(), 'autocast': torch.is_autocast_enabled('cpu'),
            'precision of matmul': torch.get_float32_matmul_precision(),
            'process group': torch.distributed.is_available() and torch.distributed.is_initialized()}
        places = (loaded('torch.nn.modules.module'), loaded('torch.optim.optimizer'))
        out |= {f'{m.__name__}.{k}': [*v] for m in places for k,v in vars(m).items() if k.startswith('_global') and isinstance(v, dict)} # hooks
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
    shell = 'backend', 'interactive' # which a notebook's shell chooses when it begins
    return {f'rcParams[{k!r}] of matplotlib': v for k,v in dict.items(m.rcParams) if k not in shell} if m else {}


# what may go, but not come; how to say so
things = {'{} is an open recorder: close its ember': open_recorders, '{} is armed': armed_modules, 'the thread {} runs': threads,
    'the process {} runs': processes, '{} is open': figures}
# what is to be as it was; a library that was imported meanwhile has its settings from then on
values = {'the environment variable {}': variables, '{}': lambda: settings()|drawing()}

# where somebody may put something else in the place of what is there: modules, and classes in them
patchable = {'builtins': '', 'os': '', 'time': '', 'json': '', 'pickle': '', 'threading': 'Thread', 'subprocess': 'Popen',
    'torch': 'Tensor', 'torch.nn': 'Module Linear', 'torch.nn.functional': '', 'torch.autograd': '', 'torch.optim': 'Optimizer SGD Adam AdamW',
    'torch.compiler': '', 'torch.distributed': '', 'numpy': '', 'pandas': 'DataFrame', 'jax': '', 'jax.numpy': '', 'jax.lax': '', 'optax': '',
    'flax.nnx': 'Module', 'flax.linen': 'Module'}

def attributes():
    "Module or class -> its attributes. All of torchember's, too"
    places = {}
    for name,classes in patchable.items():
        if (m := loaded(name)) is None: continue
        for where,of in {name: m, **{f'{name}.{c}': vars(m).get(c) for c in classes.split()}}.items():
            if of is None: continue
            places[where] = {}
            for c in reversed(getattr(of, '__mro__', [of])): places[where].update(vars(c)) # what is inherited can be covered
    for name,m in list(sys.modules.items()):
        if m is not None and name.startswith('torchember.'):
            places[name] = own = vars(m).copy()
            for c in classes_of(name, len(own)): places[f'{name}.{c.__name__}'] = vars(c).copy()
    return places


@cache
def classes_of(name, size): return [v for v in vars(sys.modules[name]).values() if isinstance(v, type) and v.__module__==name]


class Settings:
    "What is set in the process now. It holds none of the things that there are"
    def __init__(self):
        self.values = {say: look() for say,look in values.items()}
        self.attributes = attributes()

    def changed(self, now):
        "What is something else at a later time: a sentence each"
        out = []
        for say,look in values.items():
            was,new = self.values[say],now.values[say]
            known = was.keys()|new.keys() if look is variables else was.keys()&new.keys()
            out += [f'{say.format(n)} was {was.get(n)!r:.200}, and is {new.get(n)!r:.200}' for n in sorted(known) if was.get(n)!=new.get(n)]
        for where,was in self.attributes.items():
            new = now.attributes.get(where, was)
            if was.keys()==new.keys() and all(map(is_, was.values(), new.values())): continue # nearly always, and soon seen
            out += [f'{where}.{n} is patched' for n,v in was.items() if (w := new.get(n, self)) is not v and by_somebody(where, n, v, w)]
        return out


class Before(Settings):
    "What there is in the process now, and what is set"
    collections = 0 # of what nobody holds any more, after tests that left something

    def __init__(self):
        self.things = {say: look() for say,look in things.items()}
        super().__init__()

    def come(self):
        return [say.format(n) for say,look in things.items() for n,o in look().items() if not any(o is p for p in self.things[say].values())]

    def left(self):
        "What has come, or is something else since. What nobody holds any more is collected first, so that chance does not decide"
        if self.come():
            Before.collections += 1
            if Before.collections%50==0: gc.unfreeze() # what was frozen may be garbage by now
            gc.collect()
            if not self.come(): gc.freeze() # modules mostly, through which no later collection need go again
        return self.come()+self.changed(Settings())


def by_somebody(where, name, was, new):
    "Whether what takes another's place does so for a test. Libraries do it to themselves and to others, when they are used for the first time"
    package,code = where.split('.')[0],getattr(new, '__code__', None)
    if package=='torchember': return not re.fullmatch(r'__.*|_\d+_c\d+', name) # by which Dynamo keeps there what it has compiled, and throws it away
    library = 'site-packages' in code.co_filename if code else f'{getattr(new, "__module__", "")}.'.startswith(f'{package}.')
    return callable(was) and not library


def blame(name, left):
    "Say who left what"
    if left: pytest.fail('\n'.join([f'{name} left something:', *left]), pytrace=False)
