"Rows of the benchmark: each function measures in its own process and yields lines."
import gc
import json
import os
import random
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, thread_time

import torch
from torch import nn

from . import machine
from .models import Training, alexnet, gpt2, gpt2_small, gpt2_small_shapes, mixtral, mlp, resnet18, small_cnn
from .registry import Skip, line, row
from .table import number
from .timing import added, gpu_seconds, pairs, ratios, seconds, speedups, spread

torch.manual_seed(0)
never = dict(every=lambda step: False)
every_type = 'input', 'output', 'weight', 'weight_grad', 'input_grad', 'output_grad', 'optimizer', 'update'


def compare(bare, armed, quick, budget, least=8): return pairs(bare, armed, budget/20 if quick else budget, min(least, 3) if quick else least)
def home(): return os.environ['TORCHEMBER_HOME']


@contextmanager
def without_loops(off=True):
    "In a `with` block, pretend that numba is not installed, if `off` is True."
    from torchember.measure import kernels
    before = kernels.loops
    if off: kernels.loops = lambda: None
    try: yield
    finally: kernels.loops = before


def cpu_readers():
    "Return a dict: name of a reader of CPU tensors -> argument `off` of `without_loops`. The compiled reader needs numba."
    from torchember.measure import kernels
    return {**({'compiled loops': False} if kernels.loops() else {}), 'plain torch': True}


# ---- controls: they show whether the other rows can be trusted

@row('control', 'AlexNet against itself, and against itself with 1% more work')
def control(quick):
    t = Training(*alexnet(), warm=0)
    ps = compare(t.measured, t.measured, quick, 25)
    yield line('nothing added', unit='%', at_least=-.5, at_most=.5, note='both steps are the same, so the difference is the noise of this machine', **added(ps))
    extra = spread(b for b,_ in ps)['value']/100
    def longer():
        end = process_time()+extra
        while process_time()<end: pass
    ps = compare(t.measured, lambda: t.measured()+seconds(longer), quick, 25)
    yield line('1% added', unit='%', at_least=.5, at_most=1.5, note='a busy loop adds 1%, so this should be 1%', **added(ps))


# ---- cost of recording one tensor

@row('summary', 'CPU time of computing the statistics of a float32 tensor, against x.sum()')
def summary(quick):
    from torchember import summarize
    kinds = dict(basic=(('basic',), 2.5), full=(('basic', 'absolute', 'higher', 'powers'), 2.5), exponents=(('basic', 'absolute', 'exponents'), 6))
    for n,times in ((1<<24, 1), (1<<16, 100)):
        x = torch.randn(n)
        for name,(wanted,limit) in kinds.items():
            for way,off in cpu_readers().items():
                rep = times if name=='basic' or not off or n<1<<20 else 1
                with without_loops(off):
                    ps = compare(lambda: seconds(x.sum, times), lambda: seconds(lambda: summarize(x, wanted), rep), quick, 4, 5) # noqa: B023
                size = '16M numbers' if n==1<<24 else '64k numbers, in the cache'
                note = f"x.sum() takes {number(spread(1e6*b for b,_ in ps)['value'], 'us')}"
                yield line(f'{name}, {size}, {way}', unit='x', at_most=limit if n==1<<24 and not off else None, note=note, **ratios(ps))


@row('gpu', 'GPU time of computing the statistics of tensors on a GPU, against sum()')
def on_gpu(quick):
    from torchember.measure.readers import triton as gpu
    if not torch.cuda.is_available(): raise Skip('needs an NVIDIA GPU, and there is none here')
    if not gpu.available('cuda'): raise Skip('needs Triton')
    def against(what, xs, wanted, limit=None):
        out = torch.full((len(xs), 272), torch.nan, dtype=torch.float64, device='cuda')
        read = (lambda: gpu.read_one(xs[0], wanted, out[0])) if len(xs)==1 else lambda: gpu.read_list(xs, wanted, out)
        size = sum(x.nbytes for x in xs)
        times = max(int(min(2e9/size, 2000/len(xs))), 1)
        ps = compare(lambda: gpu_seconds(lambda: [x.sum() for x in xs], times), lambda: gpu_seconds(read, times), quick, 4, 5)
        a,b = (spread(t)['value'] for t in zip(*ps, strict=True))
        note = f"{number(1e6*b, 'us')}, {size/b/1e9:.3g} GB/s; sum() takes {number(1e6*a, 'us')}, {size/a/1e9:.3g} GB/s"
        return line(what, unit='x', at_most=limit, note=note, **spread(b/a for a,b in ps))
    kinds = dict(basic=('basic',), full=('basic', 'absolute', 'higher', 'powers'), exponents=('basic', 'absolute', 'exponents'))
    for dtype,big in ((torch.float32, range(3, 9)), (torch.bfloat16, (8,))):
        for e in big:
            x = torch.randn(10**e, device='cuda').to(dtype)
            for name,wanted in kinds.items():
                if name!='basic' and e not in (3, 8): continue
                limit = None if e<8 else 6 if name=='exponents' else 2.5
                yield against(f'{name}, 1e{e} numbers, {str(dtype)[6:]}', [x], wanted, limit)
            del x
    for dtype in (torch.float32, torch.bfloat16):
        xs = [torch.randn(s, device='cuda').to(dtype) for s in gpt2_small_shapes()]
        for name,wanted in kinds.items(): yield against(f'{name}, {len(xs)} weights of GPT-2 small, {str(dtype)[6:]}', xs, wanted)
        del xs


@row('gpu-gpt2', 'GPT-2 small in bfloat16 on a GPU, 8 sequences of 1024 tokens, AdamW: added wall time of a step, eager and compiled')
def gpt2_on_gpu(quick):
    if not torch.cuda.is_available(): raise Skip('needs an NVIDIA GPU, and there is none here')
    kinds = {'recorded': ({}, 5), 'all types of tensors': (dict(ttypes=every_type), None),
        "all types, stats='numerics'": (dict(ttypes=every_type, stats='numerics'), None),
        'every tenth step': (dict(every=10), 5), 'off schedule': (never, 1)}
    for compiled in (False, True):
        for name,(how,limit) in list(kinds.items())[:3 if compiled else None]:
            torch._dynamo.reset()
            torch.manual_seed(0)
            model,loss = gpt2_small(compiled)
            t = Training(model, loss, warm=1, steps=10, opt=partial(torch.optim.AdamW, lr=1e-4, fused=True), clock=machine.gpu_clock, **how)
            ps = compare(t.bare, t.armed, quick, 20, 5)
            memory = [peak_gpu_memory(f) for f in (t.bare, t.armed)]
            step,n = 1e3*spread(b for b,_ in ps)['value'],len(t.te.t.latest_line_list()) if t.te.t.log_path.exists() else 0
            t.te.close()
            note = f"{n} rows per step; {step:.3g} ms unarmed; peak memory {memory[0]/1e9:.3g} GB unarmed, {memory[1]/1e9:.3g} GB armed"
            yield line(f"GPT-2 small{', compiled' if compiled else ''}, {name}", unit='%', at_most=limit, note=note, **added(ps))


def peak_gpu_memory(f):
    "Return the largest GPU memory, in bytes, that is used during one call of `f`."
    torch.cuda.reset_peak_memory_stats()
    f()
    return torch.cuda.max_memory_allocated()


@row('tap', 'time of measuring one tiny tensor (one tap), in eager mode')
def tap(quick):
    from torchember.measure.arena import Arena
    from torchember.measure.tap import observe
    arena,xs = Arena(),[torch.randn(64) for _ in range(80)]
    taps = [arena.tap(i) for i in range(len(xs))]
    def one_pass():
        for x,t in zip(xs, taps, strict=True): observe(x, t)
    def measured():
        arena.begin()
        out = seconds(one_pass)
        arena.take()
        return 1e6*out/len(xs)
    for _ in range(20): measured()
    limit = 10 if len(cpu_readers())>1 else 25
    yield line('observe(x, tap), 64 numbers', unit='us', at_most=limit, **spread(measured() for _ in range(200 if quick else 2000)))
    t = Training(*mlp(20), warm=2, steps=10)
    ps = compare(t.bare, t.armed, quick, 12)
    n = len(t.te.t.latest_line_list())
    yield line('a row of an armed MLP, from the tensor to the file', unit='us', at_most=25,
        note=f'added time of a step of 20 tiny layers, including the writer thread, divided by its {n} rows', **spread(1e6*(a-b)/n for b,a in ps))


@row('sizes', 'observe: time of measuring one tensor of 1 to 100 million numbers')
def sizes(quick):
    from torchember.measure.arena import Arena
    from torchember.measure.tap import observe
    arenas = {off: Arena() for off in (False, True)} # an arena for each reader, because a tap keeps the reader of its first call
    taps = {off: [a.tap(i) for i in range(80)] for off,a in arenas.items()}
    for e in range(7 if quick else 9):
        xs = [torch.randn(10**e) for _ in range(max(min(80, 10**6//10**e), 1))]
        def reading(off=False, xs=xs):
            arena = arenas[off]
            arena.begin()
            with without_loops(off): out = seconds(lambda: [observe(x, t) for x,t in zip(xs, taps[off], strict=False)])
            arena.take()
            return out/len(xs)
        def summing(xs=xs): return seconds(lambda: [x.sum() for x in xs])/len(xs)
        times = {}
        for way,off in cpu_readers().items():
            ps = compare(summing, lambda: reading(off), quick, 2, 5) # noqa: B023
            times['x.sum()'],times[way] = (spread(1e6*t for t in ts) for ts in zip(*ps, strict=True))
        way,*_ = (first for first in times if first!='x.sum()')
        others = ', '.join(f"{w} {number(t['value'], 'us')}" for w,t in times.items() if w!=way)
        yield line(f'observe, 1e{e} numbers, {way}', unit='us', note=others, x=10**e, curves={w: t['value'] for w,t in times.items()}, **times[way])


@row('modules', 'MLPs of 10 to 10,000 tiny modules: added time of a step, divided by the number of modules')
def modules(quick):
    for e in range(1, 4 if quick else 5):
        n,rows,times = 10**e,0,{}
        for way,how in (('recorded', {}), ('off schedule', never)):
            t = Training(*mlp(n), warm=1, steps=max(1000//n, 1), **how)
            ps = compare(t.bare, t.armed, quick, 8, 5)
            times[way] = spread(1e6*(a-b)/n for b,a in ps)
            rows = rows or len(t.te.t.latest_line_list())
            t.te.disarm()
            t.te.close()
        curves = {w: t['value'] for w,t in times.items()}
        note = f"{rows/n:.2g} rows per module; off schedule: {number(curves['off schedule'], 'us')} per module"
        yield line(f'MLP of {n:,} modules, recorded, time per module', unit='us', note=note, x=n, curves=curves, **times['recorded'])


# ---- cost of recording whole models

def recorded(what, quick, budget, limit=None, note='', least=8, off=False, **how):
    "Return a line about AlexNet, with inputs, outputs, weights and weight gradients recorded in each step."
    t = Training(*alexnet(), **how)
    with without_loops(off): ps = compare(t.bare, t.armed, quick, budget, least)
    rows = len(t.te.t.latest_line_list())
    return line(what, unit='%', at_most=limit, note=f"{rows} rows per step; {1e3*spread(b for b,_ in ps)['value']:.0f} ms unarmed{note}", **added(ps))


@row('alexnet', 'AlexNet, batch 8: added time of a step that records inputs, outputs, weights and weight gradients')
def alexnet_recorded(quick):
    for way,off in cpu_readers().items(): yield recorded(f'AlexNet, te.step(), {way}', quick, 35, limit=10 if off else 5, off=off)
    ps = alexnet_sums(quick)
    yield line('AlexNet, x.sum() of each weight and gradient instead', unit='%', note='lower bound: recording must read the same numbers', **added(ps))


def alexnet_sums(quick):
    "Return pairs of seconds: a step of AlexNet, and a step that also computes the sums of all weights and gradients."
    t = Training(*alexnet(), **never)
    t.te.disarm()
    def sums():
        for p in t.model.parameters(): p.sum(); p.grad.sum()
    return compare(t.measured, lambda: t.measured()+seconds(sums), quick, 20)


@row('alexnet-default', 'as the benchmark alexnet, but the next forward pass ends a step')
def alexnet_default(quick):
    limit = 5 if len(cpu_readers())>1 else 10
    yield recorded('AlexNet, by passes', quick, 35, limit=limit, note='; gradients are read at the start of the next step', calls_step=False)


@row('alexnet-full', "as the benchmark alexnet, with stats='full'")
def alexnet_full(quick): yield recorded("AlexNet, stats='full'", quick, 20, least=2 if quick else 5, stats='full')


@row('alexnet-numerics', 'as the benchmark alexnet, with output gradients, optimizer state, 8 statistics and exponent counts')
def alexnet_numerics(quick):
    from torchember.measure.columns import sets
    if len(cpu_readers())==1: raise Skip('needs the extra `fast`, which is not installed')
    types = ('input', 'output', 'weight', 'weight_grad', 'output_grad', 'optimizer')
    few = [n for n in sets['numerics'] if n not in ('rm4', 'rm8')]
    momentum = partial(torch.optim.SGD, lr=1e-4, momentum=.9)
    for what,stats,opt,limit in (("stats='numerics', SGD with momentum", 'numerics', momentum, 30), ("stats='numerics' without rm4 and rm8", few, momentum, 20),
        ("stats='numerics', Adam", 'numerics', partial(torch.optim.Adam, lr=1e-5), None)):
        yield recorded(f'AlexNet, {what}', quick, 30, limit=limit, stats=stats, opt=opt, ttypes=types)


# ---- attention, residual stream, routers

def selected(n):
    "Return the number of steps in a run of `n` steps at which attention, the stream and routers are recorded by default."
    from torchember.recorder.pass_numbers import PassSteps
    steps = PassSteps()
    return sum(steps.selects(i, '') for i in range(n))


def pass_numbers(ttype, name, model, loss, quick):
    "Yield the cost of the numbers of a tensor type, such as 'router', against the same recording without them."
    t = Training(model, loss, warm=0, opt=partial(torch.optim.AdamW, lr=1e-5), ttypes='output')
    def step(when):
        t.te.recorder.model.record_numbers(ttype, when)
        return t.armed()
    ps = compare(partial(step, False), partial(step, 1), quick, 15)
    each = added(ps)
    def share(n): return each['value']*selected(n)/n
    ms = 1e3*spread(b for b,_ in ps)['value']
    yield line(f'{name}, a step with {ttype} rows', unit='%', note=f'{ms:.3g} ms without {ttype} rows', **each)
    yield line(f'{name}, mean over the first 1,000 steps', share(1000), '%', at_most=3,
        note=f'{selected(1000)} of 1,000 steps have {ttype} rows; mean over the first 100 steps: {share(100):.2g}%', n=len(ps))


@row('attention', 'attention=True: added time of recording the attention of 16 heads of GPT-2')
def attention(quick):
    for implementation in ('sdpa', 'eager'):
        model,loss = gpt2()
        model.set_attn_implementation(implementation)
        yield from pass_numbers('attention', f'GPT-2, {implementation}', model, loss, quick)


@row('stream', 'stream=True: added time of recording the residual stream of GPT-2')
def stream(quick): yield from pass_numbers('stream', 'GPT-2', *gpt2(), quick)


@row('routers', 'routers=True: added time of recording the load of the experts of Mixtral, with 4 layers of 8 experts')
def routers(quick): yield from pass_numbers('router', 'Mixtral', *mixtral(), quick)


# ---- torch.compile

def compiling(made, armed):
    """Return a `Training` after its first step, and three facts about this step: CPU seconds, number of graphs, number of graph breaks.

    The seconds include the C++ compiler."""
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    model,loss = made()
    model.compile(fullgraph=True)
    t = Training(model, loss, ttypes=('input', 'output', 'output_grad'), warm=0)
    if armed: t.te.arm()
    start = machine.family()
    t.step()
    return t, machine.family()-start, counters['stats']['unique_graphs'], sum(counters['graph_break'].values())


def under_inductor(name, made, steps, budget, quick):
    "Yield lines about a compiled model: number of graphs and graph breaks, time to compile, time of a step."
    from shutil import which

    from torch._inductor import config
    from torch._inductor.utils import fresh_cache
    if not any(map(which, ('g++', 'clang++'))): raise Skip('needs a C++ compiler, and there is none here')
    config.compile_threads = 1 # one thread, so that compiling counts as CPU time of this process
    with fresh_cache(): compiling(lambda: mlp(2), True)[0].te.close() # take the one-time costs of the first compilation before the measurement
    times,t = ([], []),None
    for _ in range(1 if quick else 2):
        for armed in (False, True):
            if t: t.te.close()
            with fresh_cache(): t,took,graphs,breaks = compiling(made, armed)
            times[armed].append(took)
            if not armed: unarmed = graphs
    yield line(f'{name}, graph breaks', breaks, '', at_most=0)
    yield line(f'{name}, graphs', graphs, '', at_most=unarmed, note=f'unarmed: {unarmed}')
    note = f"{min(times[0]):.1f} s unarmed, {min(times[1]):.1f} s armed: CPU time of the first step, forward and backward"
    yield line(f'{name}, compilation', 100*(min(times[1])/min(times[0])-1), '%', note=note, n=len(times[0]))
    t.steps = steps
    with fresh_cache(): ps = compare(t.bare, t.armed, quick, budget)
    n = len(t.te.t.latest_line_list())
    step = spread(1e3*b for b,_ in ps)['value']
    yield line(f'{name}, a compiled step', unit='%', note=f'{n} rows per step; {step:.3g} ms unarmed', **added(ps))
    note = 'added time of a step, including the writer thread, divided by its rows'
    if steps>1: yield line(f'{name}, a compiled step, time per row', unit='us', note=note, **spread(1e6*(a-b)/n for b,a in ps))


@row('compiled', 'torch.compile(fullgraph=True) with inductor: added time of recording inputs, outputs and output gradients of each module')
def compiled(quick): yield from under_inductor('GPT-2', gpt2, 1, 40, quick)


@row('compiled-mlp', 'as the benchmark compiled, for an MLP: here the fixed cost of a row dominates')
def compiled_mlp(quick): yield from under_inductor('MLP of 20 tiny layers', lambda: mlp(20), 100, 8, quick)


@row('memory', 'peak memory of 200 steps of AlexNet, armed against unarmed')
def memory(quick):
    t = Training(*alexnet())
    t.te.disarm()
    def most():
        for _ in range(20 if quick else 200): t.step()
        t.te.t.barrier()
        return machine.status('VmHWM')
    bare = most()
    t.te.arm()
    armed = most()
    yield line('AlexNet, peak memory', 100*(armed/bare-1), '%', note=f'{bare/1e6:,.0f} MB unarmed, then {armed/1e6:,.0f} MB armed, in the same process')


@row('runs', 'time of torchember.runs() for 10,000 logs. Half of the logs belong to runs of four processes; one log in twenty is of a killed process')
def runs(quick):
    import torchember
    n,place = 500 if quick else 10_000,Path(home())
    for part in 'log','data': (place/part).mkdir(parents=True, exist_ok=True)
    rows = b'{"step": 0, "module": "Net.fc(Linear)", "ttype": "output", "tname": "output_0", "mean": 1.0, "std": 2.0}\n'*80
    for i in range(n):
        name = f'run_{i//4}.rank{i%4}' if i<n//2 else f'run_{i}'
        known = {'start': '2026-01-01 00:00:00', 'user': 'me', 'schema': 1, 'model': 'Net', 'pid': 1<<30, 'host': 'elsewhere'}
        if i%20: known |= {'end': '2026-01-01 01:00:00', 'steps': 1, 'rows': 80, 'bytes': len(rows), 'seconds': 1., 'share': .5}
        (place/'log'/name).write_bytes(rows)
        (place/'log'/f'{name}_latest').write_bytes(rows[:-1])
        (place/'data'/f'base_{name}.json').write_text(json.dumps(known, indent=2))
        for kind in 'structure','parameters','vis','ranks': (place/'data'/f'{kind}_{name}.json').write_text('{"world": 4}')
    took = []
    for _ in range(2 if quick else 5):
        began = process_time()
        found = torchember.runs()
        took.append(process_time()-began)
    yield line(f'{n:,} logs, {len(found):,} runs', min(took), 's', at_most=None if quick else 1., note='CPU time, files in the page cache')


# ---- cost of an armed model: small models, steps that are not recorded, additional features

@row('small', 'small models with AdamW: time of a recorded step, against an unarmed step. CPU time on one thread, wall time on all threads')
def small(quick):
    from torchember.measure import loading
    loading.ready()
    cores = os.cpu_count()
    for name,made,steps,limits in (('CNN of 10 modules', small_cnn, 20, (1.35, 1.4)), ('MLP of 12 layers', lambda: mlp(12, 64, 32), 50, (None, None)),
            ('GPT-2 of 4 layers, width 128', lambda: gpt2(128), 2, (None, None))):
        for threads,clock,limit,what in ((1, process_time, limits[0], 'CPU time, one thread'), (cores, perf_counter, limits[1], f'wall time, {cores} threads')):
            torch.set_num_threads(threads)
            t = Training(*made(), warm=2, steps=steps, opt=torch.optim.AdamW, clock=clock)
            ps = compare(t.bare, t.armed, quick, 20)
            rows = len(t.te.t.latest_line_list())
            bare,armed = (spread(t)['value'] for t in zip(*ps, strict=True))
            note = f'{rows} rows per step; {1e3*bare:.3g} ms unarmed, plus {1e6*(armed-bare)/rows:.3g} µs per row'
            yield line(f'{name}, {what}', unit='x', at_most=limit, note=note, **ratios(ps))
            t.te.close()
    torch.set_num_threads(1)


host_types = {'all default rows': None, 'inputs and outputs': ('input', 'output'), 'weights and their gradients': ('weight', 'weight_grad'),
    'outputs and their gradients': ('output', 'output_grad')}


@row('host', 'GPT-2 of 12 narrow layers, 16 tokens, AdamW: added time of the Python program per row. Reading the tiny tensors takes almost no time')
def host(quick):
    from torchember.measure import loading
    loading.ready()
    for what,ttypes in host_types.items():
        how = {} if ttypes is None else {'ttypes': ttypes}
        for clock,place,limit in ((thread_time, 'training thread', 8), (perf_counter, 'wall time', 10)):
            t = Training(*gpt2(48, 12, 1, 16), warm=2, steps=8, opt=partial(torch.optim.AdamW, fused=True), clock=clock, waits=False, **how)
            ps = compare(t.bare, t.armed, quick, 30)
            rows = len(t.te.t.latest_line_list())
            t.te.close()
            bare = spread(1e3*b for b,_ in ps)['value']
            yield line(f'{what}, {place}, time per row', unit='us', at_most=None if ttypes else limit, note=f'{rows} rows per step',
                **spread(1e6*(a-b)/rows for b,a in ps))
            if ttypes is None: yield line(f'{what}, {place}, a step', unit='x', at_most=1.25, note=f'{bare:.3g} ms unarmed', **ratios(ps))


@row('off', 'added time of a step that is not recorded, in an armed model')
def off(quick):
    t = Training(*mlp(200), warm=0, steps=10, **never)
    ps = compare(t.bare, t.armed, quick, 10)
    each = spread((a-b)/len(t.te.tracks) for b,a in ps)['value']
    yield line('MLP of 200 tiny layers, off schedule', unit='%', note=f'{1e6*each:.2g} µs for each of its {len(t.te.tracks)} modules', **added(ps))
    for name,made,budget in (('AlexNet', alexnet, 40), ('GPT-2', gpt2, 30)):
        t = Training(*made(), warm=0, **never)
        ps = compare(t.bare, t.armed, quick, budget)
        modules,step = len(t.te.tracks),spread(b for b,_ in ps)['value']
        note = f'computed: {modules} modules of {1e6*each:.2g} µs each take {100*each*modules/step:.2g}% of {1e3*step:.0f} ms, which is below the noise'
        yield line(f'{name}, off schedule', unit='%', at_most=.5, note=note, **added(ps))


first_step = '''
import sys
from time import perf_counter
import torch
from torch import nn
from torchember import torchEmber
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(10)))
def step(): model(torch.randn(50, 64)).square().mean().backward()
if 'warm' in sys.argv: step()
te = torchEmber(model) if 'armed' in sys.argv else None
start = perf_counter()
for _ in range(int(sys.argv[1])):
    step()
    if te: te.step()
print(perf_counter()-start)
if te: te.close()
'''


@row('rules', "rules='default': added CPU time of a training that checks the rules, against a training that only records")
def rules(quick):
    seconds_each = 4 if quick else 20
    for name,made in (('CNN', small_cnn), ('GPT-2', gpt2)):
        def of_step(made=made, **how):
            t = Training(*made(), **how)
            t.te.arm()
            t.step()
            end,start,n = perf_counter()+seconds_each,process_time(),0
            while perf_counter()<end: t.step(); n += 1
            t.te.t.barrier()
            took = process_time()-start
            return took/n, t.te.close()
        reports = []
        def watched(of_step=of_step, reports=reports):
            took,report = of_step(rules='default', on_finding=lambda found: None)
            reports.append(report)
            return took
        ps = pairs(lambda of_step=of_step: of_step()[0], watched, 0, least=2 if quick else 6, warm=False)
        share = median(r['rules']/(r['seconds']-r['rules']) for r in reports)
        yield line(f'{name}, recorded, with rules', unit='%', at_most=2, note=f'trainings of {seconds_each} s; the last check is not counted; '
            f'all checks took {share:.1%} of the time of recording', **added(ps))


@row('blackbox', 'black box (file of recent steps, which survives if the process is killed): added time of a recorded step')
def blackbox(quick):
    for name,made,steps in (('MLP of tiny tensors', partial(mlp, 10), 40), ('CNN', small_cnn, 20), ('GPT-2', gpt2, 2)):
        def of(made=made, steps=steps, **how):
            t = Training(*made(), steps=steps, **how)
            t.te.arm()
            return t.measured
        without,within = of(blackbox=False),of()
        yield line(f'{name}, a recorded step with a black box', unit='%', at_most=1, **added(pairs(without, within, 2 if quick else 40)))


unreachable = 'http://127.0.0.1:9' # no server listens on this port, so each connection is refused

@row('sinks', 'added CPU time of a step in the training thread, without a network. Trainings with and without sinks take turns')
def sinks(quick):
    from torchember.sinks import feed
    os.chdir(home())
    n = 100 if quick else 300
    def train(sink, env):
        before = dict(os.environ)
        os.environ |= dict(env)
        t = Training(*small_cnn(), opt=torch.optim.AdamW, sinks=sink)
        t.te.arm()
        for _ in range(20): t.step()
        clocks = thread_time, perf_counter, process_time
        start = [c() for c in clocks]
        for _ in range(n): t.step()
        took = [(c()-s)/n for c,s in zip(clocks, start, strict=True)]
        began = perf_counter()
        report = t.te.close()
        os.environ.clear(); os.environ.update(before)
        return took, perf_counter()-began, report['remarks']
    offline,online = {'WANDB_MODE': 'offline'},{'WANDB_BASE_URL': unreachable, 'WANDB_API_KEY': '0'*40}
    cases = [('no sink', (), {}), ('a function', lambda step, numbers: None, {}), ('tensorboard', 'tensorboard', {}), ('wandb, offline', 'wandb', offline),
        ('wandb, server unreachable', 'wandb', online), ('mlflow, a file', 'mlflow', {'MLFLOW_TRACKING_URI': 'sqlite:///mlflow.db'}),
        ('mlflow, server unreachable', 'mlflow', {'MLFLOW_TRACKING_URI': unreachable}), ('trackio', 'trackio', {})]
    cases = [c for c in cases if (library := c[0].partition(',')[0]) not in feed.sinks or find_spec(library)]
    trainings = {name: [] for name,*_ in cases}
    # The variants run in another order in each round. The first round takes the one-time costs
    for i in range(2 if quick else 9):
        for name,sink,env in cases[i%len(cases):]+cases[:i%len(cases)]: trainings[name].append(train(sink, env))
    bare = [took for took,*_ in trainings.pop('no sink')][1:]
    step = spread([1e3*b[1] for b in bare])['value']
    for name,results in trainings.items():
        thread,wall,cpu = (spread([1e6*(a[0][c]-b[c]) for b,a in zip(bare, results[1:], strict=True)]) for c in range(3))
        note = f"a step without sinks takes {step:.1f} ms; added wall time {wall['value']:.0f} µs, added CPU time of all threads {cpu['value']:.0f} µs; "
        note += f"te.close() takes {max(end for _,end,_ in results):.1f} s"
        if remarks := results[-1][2]: note += f'; remark: {remarks[0]}'
        yield line(name, unit='us', note=note, **thread)


@row('first', 'the first steps of a process: wall time')
def first(quick):
    def took(steps, *how, **env): # measures wall time, because waiting takes no CPU time
        env = {**os.environ, **env}
        return float(subprocess.run([sys.executable, '-c', first_step, str(steps), *how], env=env, capture_output=True, text=True, check=True).stdout)
    for what,steps in (('the first step', 1), ('the first 300 steps', 300)):
        ps = [[took(steps), took(steps, 'armed', TORCHEMBER_WAIT='0'), took(steps, 'armed')] for _ in range(2 if quick else 7)]
        bare,beside,waits = (spread(1e3*t for t in ts) for ts in zip(*ps, strict=True))
        note = f"{number(bare['value'], 'ms')} unarmed; {number(waits['value'], 'ms')} if the process waits for the compiled loops; wall time"
        yield line(f'MLP of 10 layers, {what}, armed', unit='ms', note=note, **beside)


@row('arming', 'CPU time to arm and disarm 10,000 modules')
def arming(quick):
    from torch import nn

    from torchember import torchEmber
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(1, 1) for _ in range(99))) for _ in range(10 if quick else 100)))
    on,off = [],[]
    for _ in range(3 if quick else 7):
        start = process_time()
        te = torchEmber(model)
        armed = process_time()
        te.disarm()
        on.append(armed-start); off.append(process_time()-armed)
        te.close()
    n = sum(1 for _ in model.modules())
    yield line(f'arming {n:,} modules', unit='s', **spread(on))
    yield line(f'disarming {n:,} modules', unit='s', **spread(off))


# ---- cost of writing and reading the log

def a_row(i):
    "Return a row as in the log of AlexNet."
    x = random.random()
    return dict(shape=[8, 64, 55, 55], mean=x, std=x/3, max=4*x, min=-x, module=f'model(AlexNet).features(Sequential).{i%13}(Conv2d)', ts='2026-11-21 03:37:05',
        ttype='output', tname='output_0', step=i//80, call=0, dtype='float32')


@row('writing', 'speed-up of writing rows to the file, against open, json.dumps, append and close per row')
def writing(quick):
    from torchember import emberTracker
    n,made = 2000,[0]
    rows = [a_row(i) for i in range(n)]
    def fresh():
        made[0] += 1
        return emberTracker(f'run{made[0]}')
    def by_hand():
        path = Path(home())/'by_hand.jsonl'
        for r in rows:
            with open(path, 'a') as f: f.write(json.dumps(r)+'\n')
        path.unlink()
    def one_by_one(t):
        for r in rows: t(r)
        t.close()
    def by_step(t):
        for i in range(0, n, 80): t.put(lambda i=i: rows[i:i+80], True)
        t.close()
    def timed(f): t = fresh(); out = seconds(lambda: f(t)); t.log_path.unlink(); return out
    fast = find_spec('orjson')
    for what,f,limit in (('80 rows per step, as torchEmber writes them', by_step, fast and 10), ('row by row, by t(row)', one_by_one, None)):
        ps = compare(lambda: seconds(by_hand), lambda: timed(f), quick, 6) # noqa: B023
        rate = n/spread(a for _,a in ps)['value']
        note = f'{rate:,.0f} rows per second of CPU time'
        yield line(what, unit='x', at_least=limit, note=note, **speedups(ps))


def a_row_of_training(i):
    "Return row `i` of a training with 57 rows in each step: 4 tensors of 14 layers, and the loss."
    step,k = divmod(i, 57)
    if k==56: return dict(loss=1+random.random()/(1+step), module='model(Net)', ts='2026-11-21 03:37:05', ttype='scalar', tname='log', step=step, call=0)
    ttype = ('input', 'weight', 'output', 'weight_grad')[k%4]
    return a_row(i) | dict(module=f'model(Net).{k//4}(Linear)', ttype=ttype, tname=f'{ttype}_0', step=step) | ({'pname': 'weight'} if k%2 else {})


def a_log(n, row=a_row, name='long'):
    "Write a finished run of `n` rows. Return its tracker. `row`: function that returns row `i`."
    from torchember import emberTracker
    from torchember.ground.record import dump_row
    t = emberTracker(name)
    t.log.mkdir(parents=True, exist_ok=True)
    with open(t.log_path, 'w') as f:
        for i in range(n): f.write(dump_row(row(i))+'\n')
    return t


@contextmanager
def without_msgspec(off=True):
    "In a `with` block, pretend that msgspec is not installed, if `off` is True."
    from torchember.store import columns
    before = columns.msgspec
    if off: columns.msgspec = lambda: None
    try: yield
    finally: columns.msgspec = before


@row('reading', 'speed-up of reading a million rows into a DataFrame, against json.loads per line and pd.DataFrame. Also the time of diagnose')
def reading(quick):
    import pandas as pd

    from torchember import compact, diagnose, read
    n = 100_000 if quick else 1_000_000
    t = a_log(n)
    def by_hand():
        with open(t.log_path) as f: return pd.DataFrame([json.loads(l) for l in f])
    def timed(f, off):
        with without_msgspec(off): return seconds(f)
    fast = find_spec('msgspec')
    ways = [('read(run), msgspec', lambda: read(t), False, 8), ('te.t.df, msgspec', lambda: t.df, False, 5)]*bool(fast)
    for what,f,off,limit in (*ways, ('read(run), without msgspec', lambda: read(t), True, None)):
        ps = pairs(lambda: seconds(by_hand), lambda: timed(f, off), 0, least=3, warm=False) # noqa: B023
        note = f"{spread(a for _,a in ps)['value']:.1f} s of CPU time"
        yield line(f'{n:,} rows, {what}', unit='x', at_least=limit if n>100_000 else None, note=note, **speedups(ps))
    trained = a_log(n, a_row_of_training, 'trained')
    for what,limit in (('JSON lines', 2), *([('Parquet', 1)] if find_spec('pyarrow') else ())):
        if what=='Parquet': compact(trained)
        diagnose(trained) # the first call imports the rules
        took = spread(seconds(lambda: diagnose(trained)) for _ in range(3))
        yield line(f'{n:,} rows, diagnose(run), {what}', unit='s', at_most=limit if n>100_000 and fast else None, note='CPU time', **took)


@row('board', 'CPU time of the page of a run of a million rows, and of the list of ten running trainings of 1,000 modules')
def board(quick):
    from torchember.ground.record import dump_row
    from torchember.show.board.listing import Listing
    from torchember.show.board.server import Pages
    n,steps = 100_000 if quick else 1_000_000,3 if quick else 20
    log = a_log(n).log_path
    listing = Listing()
    listing.look()
    pages,took = Pages(listing),[]
    for _ in range(4):
        pages.made.clear()
        began = process_time()
        pages.of('long')
        took.append(process_time()-began)
    yield line(f'{n:,} rows, the page', min(took), 's', at_most=None if quick else 2., note='CPU time, without the imports for the first page')
    used = 0.
    for s in range(steps):
        rows = '\n'.join(dump_row({**a_row(0), 'module': f'Net.l{m}(Linear)', 'step': s}) for m in range(1000))+'\n'
        for i in range(10):
            with open(log.with_name(f'run{i}'), 'a') as f: f.write(rows)
        began = process_time()
        listing.look()
        used += process_time()-began
    yield line('list of 10 runs that each write a step per second', 100*used/steps, '% of a core', at_most=20.)
    began = process_time()
    for _ in range(steps): listing.look()
    yield line('list of 10 runs that write nothing', 100*(process_time()-began)/steps, '% of a core', at_most=5.)
    listing.close()


@row('parquet', 'compacted run (Parquet files): its size against JSON lines, and the speed-up of reading, against JSON lines and against duckdb')
def parquet(quick):
    if not (find_spec('pyarrow') and find_spec('duckdb')): raise Skip('needs pyarrow and duckdb')
    import duckdb

    from torchember import compact, read
    from torchember.store.parts import folder_of
    n = 100_000 if quick else 1_000_000
    t,some = a_log(n),['step', 'mean']
    size = t.log_path.stat().st_size
    compact(t, keep=True)
    parts = [p.read_bytes() for p in sorted(folder_of(t.log_path).glob('*.parquet'))]
    ratio = sum(map(len, parts))/size
    yield line(f'{n:,} rows, bytes of the Parquet files', ratio, 'x', at_most=.2, note=f'a row has {size/n:.0f} bytes in JSON lines')
    files,log = str(folder_of(t.log_path)/'*.parquet'),t.log_path.read_bytes()
    lines = type(t)('lines') # a run with the same rows as JSON lines, without Parquet parts
    lines.log_path.write_bytes(log)
    for what,columns in (('all columns', None), ('two columns', some)):
        def stored(): return read(t, columns=columns) # noqa: B023
        query = f"SELECT {', '.join(columns or '*')} FROM read_parquet('{files}')"
        for beside,f in (('JSON lines', lambda: read(lines, columns=columns)), ('duckdb', lambda: duckdb.sql(query).df())): # noqa: B023
            ps = pairs(lambda: seconds(f), lambda: seconds(stored), 0, least=3) # noqa: B023
            note = f"{spread(a for _,a in ps)['value']:.2f} s of CPU time"
            yield line(f'{n:,} rows, {what}, against {beside}', unit='x', at_least=1 if beside!='duckdb' and n>100_000 else None, note=note, **speedups(ps))


# ---- runs that are larger than memory

queries = dict( # few: mean of a statistic for each layer, over outputs of the last 1% of the steps. every: mean over all rows
    polars="""import polars as pl
few = lambda r,n: r.filter(pl.col('ttype')=='output', pl.col('step')>=n).group_by('path').agg(pl.col('mean').mean()).sort('path').collect()['mean'].to_list()
every = lambda r: r.select(pl.col('mean').mean()).collect().item()""",
    duckdb="""
few = lambda r,n: [m for _,m in r.filter(f"ttype='output' AND step>={n}").aggregate('path, avg(mean)').order('path').fetchall()]
every = lambda r: r.aggregate('avg(mean)').fetchall()[0][0]""",
    arrow="""import pyarrow.dataset as ds, pyarrow.compute as pc
few = lambda r,n: r.to_table(columns=['path', 'mean'], filter=(ds.field('ttype')=='output') & (ds.field('step')>=n)).group_by('path').aggregate(
    [('mean', 'mean')]).sort_by('path')['mean_mean'].to_pylist()
def every(r):
    parts = [(pc.sum(b['mean']).as_py(), len(b)-b['mean'].null_count) for b in r.to_batches(columns=['mean']) if len(b)]
    return sum(a for a,_ in parts)/sum(n for _,n in parts)""",
    dask="""
def few(r, n): return r[(r.ttype=='output') & (r.step>=n)].groupby('path')['mean'].mean().compute().sort_index().tolist()
every = lambda r: r['mean'].mean().compute()""",
    ray="""from ray.data.expressions import col
def few(r, n):
    some = r.filter(expr=(col('ttype')=='output') & (col('step')>=n))
    return some.groupby('path').mean('mean').to_pandas().sort_values('path')['mean(mean)'].tolist()
every = lambda r: r.mean('mean')""")

ask_in_child = """import json, sys, time
engine,name,first,which = sys.argv[1:5]
CODE
def main():
    from torchember import scan
    began,how = time.perf_counter(),dict(columns=['step', 'path', 'ttype', 'mean']) if engine=='ray' else {}
    if which=='few': out = few(scan(name, engine, **how, **(dict(steps=range(int(first), 1<<40)) if engine in ('dask', 'ray') else {})), int(first))
    else: out = every(scan(name, engine, **how))
    took = time.perf_counter()-began
    most = [int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM')] # peak memory since exec
    return dict(out=out, took=took, most=most[0]*1024)
if __name__=='__main__':
    if engine=='dask':
        from distributed import Client, LocalCluster
        with LocalCluster(n_workers=2, threads_per_worker=1, memory_limit='1GB', dashboard_address=None) as cluster, Client(cluster):
            print('answer', json.dumps(main()))
    else:
        if engine=='ray':
            import ray
            ray.init(num_cpus=2, include_dashboard=False, logging_level='ERROR', log_to_driver=False, object_store_memory=500_000_000)
        print('answer', json.dumps(main()))
"""


def answer_of(engine, name, first, which):
    "Run a query in a process of its own. Return a dict: its output `out`, seconds `took`, and largest memory `most` in bytes."
    import tempfile
    with tempfile.TemporaryDirectory() as d:
        (Path(d)/'ask.py').write_text(ask_in_child.replace('CODE', queries[engine]))
        got = subprocess.run([sys.executable, str(Path(d)/'ask.py'), engine, name, str(first), which], capture_output=True, text=True, timeout=3000)
    answers = [line for line in got.stdout.splitlines() if line.startswith('answer ')]
    if not answers: raise RuntimeError(got.stderr[-2000:])
    return json.loads(answers[0].removeprefix('answer '))


def a_large_log(size):
    "Return a compacted run of `size` bytes of JSON lines. Its parts repeat the rows of the first parts, at later steps."
    import pyarrow as pa
    import pyarrow.parquet as pq

    from torchember import compact
    from torchember.store.compaction import write_part_list
    from torchember.store.parts import folder_of, read_part_list, write_part
    t = a_log(1<<17)
    compact(t)
    listed,folder = read_part_list(t.log_path),folder_of(t.log_path)
    first = [(p, pq.read_table(folder/p['file'])) for p in listed['parts']]
    steps = max(p['last'] for p in listed['parts'])+1
    while listed['end']<size:
        for p,table in first:
            k,at = len(listed['parts'])//len(first),len(listed['parts'])
            new = p | dict(file=f'part-{at:05}.parquet', start=listed['end'], end=listed['end']+p['end']-p['start'], last=p['last']+k*steps)
            i = table.column_names.index('step')
            moved = table.set_column(i, 'step', pa.compute.add(table['step'], pa.scalar(k*steps, pa.int64())))
            about = json.loads(table.schema.metadata[b'torchember']) | {c: new[c] for c in ('start', 'end')}
            write_part(moved.replace_schema_metadata({'torchember': json.dumps(about)}), folder/new['file'])
            listed = listed | {'parts': [*listed['parts'], new | {'size': (folder/new['file']).stat().st_size}], 'end': new['end'], 'removed': new['end']}
    write_part_list(t.log_path, listed)
    return t


@row('scan', 'compacted run of 10 GB of JSON lines: time of a query of the last steps and of a query of all rows, in each engine')
def scan(quick):
    if not (find_spec('pyarrow') and find_spec('polars') and find_spec('duckdb')): raise Skip('needs pyarrow, polars and duckdb')
    from torchember import read
    from torchember.store.parts import read_part_list
    t = a_large_log(3e8 if quick else 1e10)
    rows = sum(p['rows'] for p in read_part_list(t.log_path)['parts'])
    last = t.last_step()
    first = last-last//100
    want = read(t, steps=range(first, last+1), ttype='output', columns=['path', 'mean'])
    want = want.groupby(want['path'].astype(str))['mean'].mean().sort_index().tolist()
    for which in 'few','every':
        for engine in queries:
            if engine in ('dask', 'ray') and not find_spec('distributed' if engine=='dask' else 'ray'): continue
            got = answer_of(engine, t.fname, first, which)
            same = which!='few' or all(abs(a-b)<=1e-12*abs(b) for a,b in zip(got['out'], want, strict=True))
            if not same: raise ValueError(f'{engine} differs')
            what = 'last steps' if which=='few' else 'all rows, one column'
            note = f"peak memory of the process: {got['most']/1e6:,.0f} MB, including the engine"
            yield line(f'{rows:,} rows, {what}, {engine}', got['took'], 's', note=note)


@row('reading-memory', 'peak memory of reading a million rows, against the size of the frame')
def reading_memory(quick):
    import pandas # noqa: F401 imported first, so that it does not count

    from torchember import read
    n = 100_000 if quick else 1_000_000
    t = a_log(n)
    before = machine.status('VmRSS')
    df = read(t)
    most,frame = machine.status('VmHWM')-before,int(df.memory_usage(deep=True).sum())
    yield line(f'{n:,} rows, memory', most/frame, 'x', at_most=3, note=f'{most/1e6:,.0f} MB for a frame of {frame/1e6:,.0f} MB')


# ---- cost of drawing pictures

def table_of(layers, steps):
    "Return a table with the columns of a run, filled with random numbers."
    import numpy as np
    import pandas as pd
    path = pd.Categorical.from_codes(np.tile(np.arange(layers), steps), [f'h.{i}.mlp' for i in range(layers)])
    std = np.random.default_rng(0).lognormal(size=layers*steps)
    df = pd.DataFrame(dict(path=path, ttype='output', tname='output_0', step=np.repeat(np.arange(steps), layers), call=0, std=std, nan=0))
    return df.astype(dict(ttype='category', tname='category'))


@row('pictures', 'CPU time to draw pictures of large tables, from the table to the PNG file')
def pictures(quick):
    import io
    import matplotlib
    matplotlib.use('agg')
    from torchember import overview, scalar_global_heatmap, scalar_line
    def drawn(f, df):
        out = f(df)
        (out if hasattr(out, 'savefig') else out.figure).savefig(io.BytesIO())
        matplotlib.pyplot.close('all')
    drawn(overview, table_of(2, 3))
    large = {'10,000 layers, 100 steps': table_of(1000 if quick else 10_000, 100), '3 layers, 100,000 steps': table_of(3, 10_000 if quick else 100_000)}
    for what,df in large.items():
        for f in (scalar_line, scalar_global_heatmap, overview):
            took = seconds(lambda f=f, df=df: drawn(f, df))
            yield line(f'{f.__name__}, {what}', took, 's', at_most=5, note=f'{len(df):,} rows')


@row('report', 'page of a run of 200 modules and 1,000 steps, opened from disk: size and times')
def report(quick):
    import shutil

    import numpy as np
    import pandas as pd

    from torchember import report
    layers,steps = (50, 200) if quick else (200, 1000)
    df = pd.concat([table_of(layers, steps).assign(ttype=t) for t in ('input', 'output', 'weight', 'weight_grad')], ignore_index=True)
    # Random noise, because it is the hardest to compress
    for i,c in enumerate(('mean', 'max', 'min')): df[c] = np.random.default_rng(i).normal(size=len(df))
    file,size = Path(home())/'page.html',f'{len(df):,} rows, 4 statistics'
    took = seconds(lambda: report(df, file))
    yield line('size of the page', file.stat().st_size/1e6, 'MB', at_most=15, note=size)
    yield line('writing the page', took, 's', note=f'CPU time, {size}')
    try: from playwright.sync_api import sync_playwright
    except ImportError: raise Skip('playwright is not installed') from None
    if not (chromium := shutil.which('chromium')): raise Skip('there is no chromium')
    def ready():
        with sync_playwright() as p:
            page = p.chromium.launch(executable_path=chromium, args=['--no-sandbox']).new_page(viewport={'width': 1400, 'height': 1000})
            page.goto(file.as_uri())
            first = float(page.wait_for_selector('html[data-ready]').get_attribute('data-ready'))/1e3
            return first, page.evaluate("""async () => { const now = performance.now(); choose({ label: kind().tensors[7].label, step: 5 })
                await drawing; await new Promise(requestAnimationFrame); return performance.now()-now }""")/1e3
    opened,clicked = zip(*[ready() for _ in range(2 if quick else 7)], strict=True)
    yield line('from opening the page until it is ready', sorted(opened)[len(opened)//2], 's', at_most=3, n=len(opened), note='wall time; median')
    yield line('from a click until the picture is drawn', sorted(clicked)[len(clicked)//2], 's', n=len(clicked), note='wall time; median')


# ---- memory, threads and files of a long run

@row('steps', '10,000 armed steps of a small MLP: growth of memory, threads and open files')
def steps(quick):
    first,last = (500, 2500) if quick else (2000, 10_000)
    t = Training(*mlp(6))
    def held():
        t.te.t.barrier()
        gc.collect()
        return machine.status('VmRSS'), threading.active_count(), machine.descriptors()
    def grown(n):
        for _ in range(first): t.step()
        before = held()
        for _ in range(n-first): t.step()
        return [b-a for a,b in zip(before, held(), strict=True)]
    bare = grown(last)[0]
    t.te.arm()
    memory,threads,files = grown(last)
    span = f'steps {first:,} to {last:,}'
    note = f"the same steps unarmed: {bare/1e6:.2g} MB; {t.te.close()['rows']:,} rows were written"
    yield line(f'growth of memory, {span}', memory/1e6, 'MB', at_most=1, note=note)
    yield line(f'growth of the number of threads, {span}', threads, '', at_most=0)
    yield line(f'growth of the number of open files, {span}', files, '', at_most=0)


@row('import', 'CPU time of import torchember, in addition to the start of Python')
def imports(quick):
    ps = compare(lambda: machine.interpreter('pass'), lambda: machine.interpreter('import torchember'), quick, 8)
    yield line('import torchember', unit='ms', note='in addition to python -c pass', **spread(1e3*(a-b) for b,a in ps))


# ---- arithmetic on snapshots of whole models

def snapshot_of(quick):
    "Return a StateDict with the layers of GPT-2 small and random weights. If `quick` is True, it has no embeddings."
    from torchember import StateDict
    shapes = gpt2_small_shapes()
    return StateDict((f'layer{i}', torch.randn(s).mul_(.02)) for i,s in enumerate(shapes[2:] if quick else shapes))


def by_passes(x):
    "Compute the numbers of `describe(group='all')` with a torch operation for each number."
    def central(k):
        d = (x-x.mean()).flatten()
        q = d*d
        return q.dot(d if k==3 else q)/d.numel() # few temporary tensors, so that the reference is not slow because of allocations
    values = (x.norm(1), x.norm(1)/x.numel(), x.norm(2), x.sum(), x.mean(), x.var(), x.std(), central(3)/x.var(correction=0)**1.5,
        central(4)/x.var(correction=0)**2-3, x.max(), x.min(), x.abs().min(), x.abs().max())
    return [v.item() for v in values]


@row('state-describe', 'speed-up of StateDict.describe for GPT-2 small, all columns, against one torch operation per number')
def state_describe(quick):
    from torchember.measure.kernels import loops
    sd,how = snapshot_of(quick),'compiled loops' if loops() else 'without numba'
    def ours(lw): return sd.describe(lw=lw, group='all', display=False)
    for what,lw,theirs in (('each layer', True, lambda: [by_passes(x) for x in sd.values()]),
            ('the whole model, against one joined tensor', False, lambda: by_passes(torch.cat([x.flatten() for x in sd.values()])))):
        ps = pairs(lambda: seconds(theirs), lambda: seconds(lambda: ours(lw)), 0, least=3 if quick else 5) # noqa: B023
        took = spread(1e3*a for _,a in ps)['value']
        yield line(f'describe {sd.numel()/1e6:.0f}M numbers, {what}', unit='x', at_least=5, note=f'{took:.0f} ms of CPU time, {how}', **speedups(ps))


@row('state-memory', 'peak memory of describing GPT-2 small, against the size of the model')
def state_memory(quick):
    sd = snapshot_of(quick)
    size = sum(x.nbytes for x in sd.values())
    sd.filter('layer3').describe(lw=True, group='all', display=False) # one-time costs of compilation and imports, before the measurement
    before = machine.status('VmRSS')
    sd.describe(lw=True, group='all', display=False)
    sd.describe(group='all', display=False)
    most = machine.status('VmHWM')-before
    yield line(f'describe {sd.numel()/1e6:.0f}M numbers, memory', 100*most/size, '%', at_most=1, note=f'{most/1e6:.1f} MB for a model of {size/1e6:.0f} MB')
    before = machine.status('VmRSS')
    x = torch.cat([x.flatten() for x in sd.values()])
    joined = machine.status('VmHWM')-before
    yield line('joining all tensors into one tensor, memory', 100*joined/size, '%', note=f'{x.nbytes/1e6:.0f} MB, before any statistic is computed')


# ---- quantities that a `Monitor` computes of chosen modules

spectra = ['InputCovMaxEig', 'InputCovStableRank', 'InputCovCondition20', 'InputCovCondition50', 'InputCovCondition80']


class Tracked:
    "Training of a ResNet-18 on one batch, with or without a `Monitor`."
    def __init__(self, config=None, batch=8, size=112):
        from torchember import Monitor
        torch.manual_seed(0)
        self.model,self.loss = resnet18(batch, size)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=.9)
        self.monitor,self.n = Monitor(self.model, config) if config else None,0
        for _ in range(3): self.step() # warm-up: from the third step on, a `Monitor` knows its schedule

    def step(self):
        self.opt.zero_grad()
        self.loss().backward()
        if self.monitor: self.monitor.track(self.n)
        self.opt.step()
        self.n += 1

    def seconds(self): return seconds(self.step)


@row('spectra', 'speed-up of five covariance quantities of the inputs of the 20 convolutions of a ResNet-18, against five full SVDs per covariance')
def spectra_of(quick):
    from torchember.measure.spectrum import covariance, samples
    def ours(x):
        s = covariance(x, 1).spectrum
        return s.largest, s.stable_rank(), [s.condition(p) for p in (.2, .5, .8)]
    for batch,size in ((8, 112), (32, 32), (32, 64))[:1 if quick else 3]:
        torch.manual_seed(0)
        (model,loss),xs = resnet18(batch, size),[]
        convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        hooks = [m.register_forward_pre_hook(lambda m, args: xs.append(args[0].detach().clone())) for m in convs] # noqa: B023
        loss()
        for h in hooks: h.remove()
        covs = [torch.cov(samples(x, 1).T) for x in xs]
        def svds():
            for c in covs: # noqa: B023
                for _ in range(5): torch.linalg.svd(c)
        ps = pairs(lambda: seconds(svds), lambda: seconds(lambda: [ours(x) for x in xs]), 3 if quick else 20, 3 if quick else 8) # noqa: B023
        took = spread(1e3*a for _,a in ps)['value']
        note = f'{took:.0f} ms of CPU time, including the covariances; the time of the SVDs excludes the covariances'
        yield line(f'ResNet-18, {batch} images of {size} x {size} pixels', unit='x', at_least=10, note=note, **speedups(ps))


@row('monitor', 'added time of a step of a ResNet-18 with a Monitor, 8 images of 112 x 112 pixels, SGD')
def monitor(quick):
    bare,never = Tracked(),10**9
    kinds = {'five covariance quantities of each convolution, each step': ({'Conv2d': spectra}, None),
        'five covariance quantities of each convolution, off schedule': ({'Conv2d': [[q, f'linear({never}, {never-1})'] for q in spectra]}, .5),
        'MeanTID and VarTID of each batch normalisation, each step': ({'BatchNorm2d': [['MeanTID', 'linear(10, 0)'], ['VarTID', 'linear(10, 0)']]}, None)}
    for what,(config,limit) in kinds.items():
        t = Tracked(config)
        ps = compare(bare.seconds, t.seconds, quick, 60)
        yield line(what, unit='%', at_most=limit, note=f"{spread(1e3*b for b,_ in ps)['value']:.0f} ms without Monitor", **added(ps))
        if limit is None: continue
        from torchember import Monitor
        one,plain = nn.Identity(),nn.Identity()
        watch = Monitor(nn.Sequential(one), {'0': [['InputStd', f'linear({never}, {never-1})']]})
        for i in range(4): watch.passes.begin_pass(3); one(torch.ones(2)); watch.track(i)
        watch.passes.begin_pass(3)
        def own():
            t.monitor.passes.begin_pass(3) # noqa: B023
            t.monitor.track(t.n) # noqa: B023
        x = torch.ones(2)
        calls = pairs(lambda: seconds(lambda: plain(x), 2000), lambda: seconds(lambda: one(x), 2000), 2, 20) # noqa: B023
        us = 1e6*(seconds(own, 500)+20*spread(a-b for b,a in calls)['value'])
        share = us/1e4/spread(b for b,_ in ps)['value']
        yield line(f'{what}: sum of its calls', us, 'us', note=f'{share:.3f}% of the step; measured separately: begin_pass, 20 calls of modules, track')
