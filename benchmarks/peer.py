"""Measurements of other tools, each run in a Python process of its own.

`main(peer, 'cost' | 'features', quick, threads)` prints the results as JSON. torchember is not imported."""
import copy
import itertools
import json
import sys
import warnings
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import lookup_backend

from . import machine
from .models import MLP, AlexNet, ResNet18, keep_memory
from .timing import pairs

peers = {} # name of a tool -> (description of its records, function that installs the tool on a model)


def peer(
    name, # Name of the tool in the table
    records # Description of the records of the tool
):
    """Return a decorator for functions that install a tool on a model. Their arguments are model, optimizer and input.

    They return three functions, or None in place of a function: end a step, count the records, run the model."""
    def add(f):
        peers[name] = records,f
        return f
    return add


# ---- the tools, installed as their documentation says

@peer('torchember', 'inputs, outputs, weights, weight gradients: 4 statistics')
def ours(model, opt, x, **how):
    from torchember import torchEmber
    te = torchEmber(model, **how)
    return (None if how else te.step), (lambda: len(te.t.lines())), None


@peer('torchember, numerics', 'inputs, outputs, weights, weight and output gradients, optimizer state: 8 statistics, exponent counts')
def numerics(model, opt, x):
    return ours(model, opt, x, optimizer=opt, stats='numerics', ttypes=('input', 'output', 'weight', 'weight_grad', 'output_grad', 'optimizer'))


@peer('torchember 0.2.7', 'inputs, outputs, weights, weight gradients: 6 statistics')
def older(model, opt, x):
    from torchember.ember import torchEmber
    te = torchEmber(model)
    return te.log_model, (lambda: te.t.log_file.read_text().count('"ttype"') if te.t.log_file.exists() else 0), None


@peer('wandb', 'weights, weight gradients: histograms; log="all", log_freq=1, offline')
def wandb(model, opt, x):
    import wandb
    if wandb.run is not None: wandb.finish()
    run = wandb.init(mode='offline', settings=wandb.Settings(console='off', silent=True))
    wandb.watch(model, log='all', log_freq=1)
    def count(): return sum(k.startswith(('gradients/', 'parameters/')) for k in run.summary.keys()) # noqa: SIM118
    steps = itertools.count()
    return (lambda: wandb.log({'step': next(steps)})), count, None


@peer('TorchLens, watch', 'outputs, weights, weight gradients: scalars, as JSON lines')
def lens_watch(model, opt, x):
    from torchlens.trackers import JSONLSink, watch
    steps,path = itertools.count(),Path('lens.jsonl')
    sites = [n for n,_ in itertools.chain(model.named_modules(), model.named_parameters()) if n]
    watch(model, to=JSONLSink(path), signals=('parameters', 'gradients', 'activations'), select=sites, optimizer=opt, step=partial(next, steps),
        every=1, example_input=x)
    return None, (lambda: path.read_text().count('"scalar"')), None


@peer('TorchLens, record', 'outputs of all operations: whole tensors, in memory')
def lens_record(model, opt, x):
    from torchlens import fastlog
    last = []
    def run(*a):
        out,last[:] = fastlog.record(model, *a, return_output=True, backward_ready=True, default_op=fastlog.CaptureSpec(keep_grad=True)),[]
        last.append(out[1])
        return out[0]
    return None, (lambda: sum(len(r) for r in last)), run


@peer('tandv', 'outputs, output gradients, weights, weight gradients, optimizer state: 8 statistics, exponent counts')
def tandv(model, opt, x):
    from tandv.track.torch import track
    t = track(model, optimizer=opt)
    return t.step, (lambda: len(t.stashes)+sum(map(len, t._global_stash.values()))), None


@peer('nnstat', 'outputs, weights, weight gradients: describe(lw=True)')
def nnstat(model, opt, x):
    import nnstat
    seen,rows = nnstat.from_activation(model),[]
    def after():
        for s in (nnstat.from_weight(model), nnstat.from_grad(model), seen.state_dict): rows.append(s.describe(lw=True, display=False))
    return after, (lambda: sum(map(len, rows))), None


# ---- cost

class Loop:
    "Training loop of one model with its optimizer, with or without a tool."
    def __init__(self, model, x, loss):
        self.model,self.x,self.loss,self.after,self.run = model,x,loss,None,model
        self.opt = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=.9)

    def arm(self, name):
        self.after,self.count,run = peers[name][1](self.model, self.opt, self.x)
        self.run = run or self.model
        return self

    def step(self):
        loss = self.loss(self.run(self.x))
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        if self.after: self.after()

    def measured(self):
        start = machine.family()
        self.step()
        return machine.family()-start


def alexnet(inplace):
    torch.manual_seed(0)
    model,y = AlexNet(),torch.randint(1000, (8,))
    for m in model.modules():
        if isinstance(m, nn.ReLU): m.inplace = inplace
    return Loop(model, torch.randn(8, 3, 224, 224), lambda out: F.cross_entropy(out, y))


def cost(name, quick):
    "Return pairs of CPU seconds of a step without and with a tool. CPU time of processes that the tool started is included."
    keep_memory()
    said = None
    try:
        armed = alexnet(True).arm(name)
        armed.step()
    except Exception as e:
        armed,said = alexnet(False).arm(name),why(e)
        armed.step()
    bare = alexnet(said is None)
    return dict(pairs=pairs(bare.measured, armed.measured, 5 if quick else 25, 3 if quick else 6), inplace=said)


# ---- quantities of modules, measured in the same training loop

shared_quantities = { # title of a quantity -> configuration that torchember and Taiyi accept
    'covariance spectra of inputs': {'Conv2d': ['InputCovMaxEig', 'InputCovStableRank', 'InputCovCondition20', 'InputCovCondition50', 'InputCovCondition80']},
    'means and norms': {'Conv2d': ['InputMean', 'InputStd', 'InputSndNorm', 'OutputGradSndNorm', 'WeightNorm', 'WeightGradNorm']},
    'statistics of batch normalisation': {'BatchNorm2d': [['MeanTID', 'linear(5, 0)'], ['VarTID', 'linear(5, 0)']]}}


def quantities(name, quick):
    "Return pairs of CPU seconds of a step, without quantities and with quantities computed in each step."
    tool,_,kind = name.partition(', ')
    if tool=='Taiyi': from Taiyi.taiyi.monitor import Monitor
    else: from torchember import Monitor
    keep_memory()
    class Watched(Loop):
        def step(self):
            loss = self.loss(self.run(self.x))
            self.opt.zero_grad()
            loss.backward()
            if self.after: self.after()
            self.opt.step()
    loops = []
    for watch in (False, True):
        torch.manual_seed(0)
        model,y = ResNet18(),torch.randint(10, (8,))
        loop = Watched(model, torch.randn(8, 3, 112, 112), lambda out, y=y: F.cross_entropy(out, y))
        if watch:
            monitor,steps = Monitor(model, shared_quantities[kind]),itertools.count()
            loop.after = lambda: monitor.track(next(steps)) # noqa: B023
        for _ in range(2): loop.step()
        loops.append(loop)
    return dict(pairs=pairs(loops[0].measured, loops[1].measured, 10 if quick else 40, 3 if quick else 6))


# ---- features of a model that a tool may not support

class LSTM(nn.Module):
    def __init__(self): super().__init__(); self.lstm,self.head = nn.LSTM(8, 8, batch_first=True),nn.Linear(8, 1)
    def forward(self, x): return self.head(self.lstm(x)[0])


class Shared(nn.Module):
    "Model that calls one of its modules twice."
    def __init__(self): super().__init__(); self.one,self.act = nn.Linear(8, 8),nn.Tanh()
    def forward(self, x): return self.one(self.act(self.one(x)))


def small(): return MLP(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


models = {'torch.compile, fullgraph': small, 'recording starts after compiling': small,
    'in-place ReLU': lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 1)),
    'LSTM': LSTM, 'a module used twice': Shared,
    'copy.deepcopy': small}


ran = [] # compiled graphs that ran


def counted(graph, xs):
    "Backend of torch.compile that compiles nothing, and appends each graph that runs to `ran`."
    f = lookup_backend('aot_eager')(graph, xs)
    def run(*a):
        ran.append(graph)
        return f(*a)
    return run


def why(e): return shorten(f'{type(e).__name__}: {(str(e).strip().splitlines() or [""])[0]}', 120, placeholder=' ...')


def after_three(loop):
    "Return the parameters of a model after three training steps."
    for _ in range(3): loop.step()
    return [p.detach().clone() for p in loop.model.parameters()]


def survives(name, feature):
    "Return 'yes' if a model with a feature trains the same with a tool as without it. Otherwise, return the error."
    torch.manual_seed(0)
    model = models[feature]()
    x = torch.randn(4, 5, 8) if feature=='LSTM' else torch.randn(4, 8)
    plain,watched,loop = (Loop(m, x, lambda y: y.square().mean()) for m in (copy.deepcopy(model), copy.deepcopy(model), model))
    late = feature=='recording starts after compiling'
    compiled = late or feature.startswith('torch.compile')
    if compiled:
        after_three(watched.arm(name))
        for l in (plain, loop): l.model.compile(backend=counted, fullgraph=True)
    if late: plain.step(); loop.step()
    wanted = after_three(plain)
    if feature.startswith('torch.compile'): torch._dynamo.reset() # otherwise `loop` could run graphs that were compiled for `plain`
    ran.clear()
    got = after_three(loop.arm(name))
    if not all(torch.equal(a, b) for a,b in zip(wanted, got, strict=True)): return 'the trained weights differ'
    n,eager = loop.count(),watched.count() if compiled else None
    if not n: return 'records nothing'
    if eager and not ran: return 'the compiled code no longer runs'
    if eager not in (None, n): return f'{n} records instead of {eager}'
    if feature!='copy.deepcopy': return 'yes'
    twin,before = copy.deepcopy(model),model(x)
    with torch.no_grad():
        for p in twin.parameters(): p.zero_()
        if twin(x).abs().max(): return "the copy computes with the original's weights"
        if not torch.equal(model(x), before): return 'the copy changes the original'
    return 'yes'


def features(name, quick):
    out = {}
    for f in models:
        try: out[f] = survives(name, f)
        except Exception as e: out[f] = why(e)
    return dict(features=out)


def main(name, package, what, quick, threads):
    torch.set_num_threads(threads)
    warnings.simplefilter('ignore')
    out = globals()[what](name, quick)
    with suppress(Exception): out['version'] = version(package)
    print('\n'+json.dumps(out))
    sys.stdout.flush()
