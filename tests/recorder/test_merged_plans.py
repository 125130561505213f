"Plans for merged calls of compiled graphs give the same rows as the general Python code, bit by bit and in the same order."
import gc
import threading
import weakref

import pytest
import torch
from recorder.test_plan_of_calls import alls, compare, record, scenarios
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from torchember import torchEmber
from torchember.capture.compiled import merge_calls_in_graph
from torchember.measure.planning import loaded_objects


@pytest.fixture(scope='module', autouse=True)
def compiled_code():
    "Load the compiled functions once for all tests."
    if loaded_objects() is None: pytest.skip('compiled code cannot take Python objects here')


@pytest.fixture(autouse=True)
def from_scratch():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def merge(graph, example):
    "Compile a graph as Inductor would, but only merge the calls of operators, and run the graph by torch."
    merge_calls_in_graph(graph.graph)
    graph.recompile()
    return make_boxed_func(graph.forward)


backend = aot_autograd(fw_compiler=merge, bw_compiler=merge, inference_compiler=merge)


def whole(model): model.compile(backend=backend)
def in_parts(model):
    for m in model.children(): m.compile(backend=backend)


def check(monkeypatch, name, scenario=None, prepare=whole, planned=True, **how):
    general,got = [],[]
    for plan,out in (('0', general), ('1', got)):
        torch._dynamo.reset()
        out += record(monkeypatch, plan, name, scenario, prepare=prepare, **how)
    assert general[3]==(0, 0) and (got[3][1]>0)==planned, (general[3], got[3])
    compare(general, got)


class Whole(nn.Sequential):
    "A subclass with its own forward, because Dynamo does not compile a forward of torch's modules."
    def forward(self, x): return super().forward(x)


class Split(nn.Module):
    "A module with two outputs. The first has no gradient, because nothing uses it."
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
    def forward(self, x, scale): return self.inner(x)*scale, x.relu()


class Uneven(nn.Module):
    def __init__(self):
        super().__init__()
        self.split,self.head = Split(),nn.Linear(6, 2)
    def forward(self, x): return self.head(self.split(x, scale=torch.tensor(2.))[1])


def squared(model, x):
    torch.manual_seed(0)
    return model,lambda m: m(x).square().mean()

def large():
    "Tensors with more than 32,768 elements, which Python code measures."
    return squared(Whole(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 2)), torch.linspace(-2, 2, 1200).reshape(200, 6))

def shared():
    "A module that is called three times in a pass."
    inner = nn.Linear(6, 6)
    return squared(Whole(inner, nn.Tanh(), inner, Whole(nn.ReLU(), inner)), torch.linspace(-2, 2, 48).reshape(8, 6))

def uneven(): return squared(Uneven(), torch.linspace(-2, 2, 48).reshape(8, 6))


ways = {'default': {}, 'gradients': dict(ttypes=alls), 'full': dict(ttypes=alls, stats='full'), 'outputs': dict(ttypes=('output', 'output_grad')),
    'te.step': dict(optimizer=None), 'no box': dict(blackbox=False), 'every': dict(every=2)}


def cases():
    "Yield each network with each way of recording. Most cases are for a release only, because compiling takes seconds."
    for net in ('gpt2', 'llama', 'blocks', large, shared, uneven):
        for way in ways:
            often = way=='gradients' or net is shared
            yield pytest.param(net, way, marks=[pytest.mark.release]*(not often), id=f'{net if isinstance(net, str) else net.__name__}-{way}')


@pytest.mark.parametrize('name,way', cases())
def test_rows_are_those_of_the_general_way(monkeypatch, name, way):
    if name in ('gpt2', 'llama'): pytest.importorskip('transformers')
    check(monkeypatch, name, **ways[way])


# two scenarios replace functions that a compiled graph does not call, and torch itself refuses checkpoints of blocks with other shapes
uncompiled = 'raises', 'fails_inside', 'a_wrapper'


@pytest.mark.parametrize('scenario', [s for s in scenarios if s.__name__ not in uncompiled], ids=lambda f: f.__name__)
@pytest.mark.parametrize('prepare', [whole, pytest.param(in_parts, marks=pytest.mark.release)])
def test_what_happens_between_steps(monkeypatch, scenario, prepare):
    check(monkeypatch, 'blocks', scenario, prepare, ttypes=alls)


# ---- several passes and backwards of compiled graphs

def two_passes(te, model, loss, i): (loss(model)+loss(model)).backward()

def two_backwards(te, model, loss, i):
    x = loss(model)
    x.backward(retain_graph=True)
    x.backward()

def without_a_backward(te, model, loss, i):
    if i%2: return loss(model).item()

def other_thread_backward(te, model, loss, i):
    x = loss(model)
    t = threading.Thread(target=x.backward)
    t.start()
    t.join()

def torch_mode_backward(te, model, loss, i):
    x = loss(model)
    with torch.device('cpu'): x.backward()

def in_bfloat16(te, model, loss, i):
    with torch.autocast('cpu', torch.bfloat16): loss(model).backward()


@pytest.mark.parametrize('scenario', [two_passes, two_backwards, without_a_backward, other_thread_backward, torch_mode_backward, in_bfloat16],
    ids=lambda f: f.__name__)
@pytest.mark.parametrize('name', [shared, uneven], ids=lambda n: n.__name__)
def test_passes_and_backwards(monkeypatch, name, scenario): check(monkeypatch, name, scenario, ttypes=alls)


def test_a_scaler(monkeypatch):
    "Gradients that contain a loss scale are measured by Python code, because the scale is divided out of their statistics."
    results = []
    for plan in '01':
        torch._dynamo.reset()
        scaler = torch.amp.GradScaler('cpu', init_scale=8.)
        scaler.scale(torch.ones(1))
        def scaled(te, model, loss, i, scaler=scaler): scaler.scale(loss(model)).backward()
        results.append(record(monkeypatch, plan, shared, scaled, prepare=whole, ttypes=alls, scaler=scaler))
    compare(*results)


@pytest.mark.slow
def test_inductor(monkeypatch): check(monkeypatch, shared, prepare=lambda model: model.compile(fullgraph=True), ttypes=alls)


def test_tensors_on_a_device(monkeypatch):
    "Python code measures tensors on a device, and the plan numbers calls and gradients. Here, the tensors are on the CPU."
    calls = []
    def on_device(te, model, loss, i):
        te.recorder.buffer.on_device = True
        plans = te.recorder.events.merged.plans.values()
        calls.append(sum(part is not None for plan in plans for _,part in plan.parts))
    results = []
    for plan in '01':
        torch._dynamo.reset()
        results.append(record(monkeypatch, plan, shared, on_device, prepare=whole, ttypes=alls))
    compare(*results)
    assert calls[-1] and results[1][3]==(0, 0)


def test_a_run_that_python_code_records(monkeypatch):
    "Without the compiled functions, or with a user's statistics, there are no plans."
    check(monkeypatch, shared, planned=False, stats=lambda x: {'first': x.flatten()[:1].sum()})


def test_plans_keep_no_model_alive(monkeypatch):
    monkeypatch.setenv('TORCHEMBER_PLAN', '1')
    model,loss = shared()
    whole(model)
    te = torchEmber(model, optimizer=torch.optim.SGD(model.parameters(), lr=.1))
    for _ in range(3): loss(model).backward()
    assert te.recorder.events.merged.plans
    te.close()
    assert not te.recorder.events.merged.plans
    ref = weakref.ref(model[0])
    del model, loss, te
    torch._dynamo.reset()
    gc.collect()
    assert ref() is None
