"Plans for merged calls of compiled graphs give the same rows as the general Python code, bit by bit and in the same order."
import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from recorder.test_plan_of_calls import alls, compare, record, scenarios
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint

from torchember import torchEmber
from torchember.capture import merging
from torchember.capture.compiled import ReportedCall, merge_calls_in_graph
from torchember.measure.planning import loaded_objects
from torchember.recorder.merged_plans import MergedCalls, MergedPlan, MergedPlans
from torchember.state.factories import from_activation_grad


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
            often = way=='gradients' and net!='llama' or net is shared
            yield pytest.param(net, way, marks=[pytest.mark.release]*(not often), id=f'{net if isinstance(net, str) else net.__name__}-{way}')


@pytest.mark.parametrize('name,way', cases())
def test_rows_are_those_of_the_general_way(monkeypatch, name, way):
    if name in ('gpt2', 'llama'): pytest.importorskip('transformers')
    check(monkeypatch, name, **ways[way])


# two scenarios replace functions that a compiled graph does not call. Torch itself refuses checkpoints of blocks with other shapes,
# and to trace a reader of the run
uncompiled = 'raises', 'fails_inside', 'a_wrapper', 'reads_in_the_middle'
# scenarios that change how merged calls are recorded; the others run before a release only, because compiling takes seconds
often = 'evaluates', 'other_shapes', 'micro_batches', 'disarms_in_the_middle', 'rearms', 'another_listener', 'probes', 'in_a_thread'
merged_scenarios = [pytest.param(s, marks=[pytest.mark.release]*(s.__name__ not in often)) for s in scenarios if s.__name__ not in uncompiled]


@pytest.mark.parametrize('scenario', merged_scenarios, ids=lambda f: f.__name__)
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
@pytest.mark.parametrize('name', [shared, pytest.param(uneven, marks=pytest.mark.release)], ids=lambda n: n.__name__)
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


# ---- passes that are not of the usual kind

def evaluates_in_another_shape(te, model, loss, i):
    "The shapes of an evaluation must not stay in the `moduleTrack`s after the next training step."
    model.eval()
    with torch.no_grad(): x = model(torch.ones(5, 6)).sum().item()
    model.train()
    return x, [(t.name, t.input_dt, t.output_dt) for t in te.tracks].__repr__()

def evaluates_with_gradients(te, model, loss, i):
    "The gradients of an evaluation have its phase."
    model.eval()
    loss(model).backward()
    model.train()

def disarms_before_the_backward(te, model, loss, i):
    "When the backward begins, the model is not recorded, and the graph represents modules by keys of deleted objects."
    if i!=2: return
    x = loss(model)
    te.disarm()
    x.backward()
    te.arm()

@pytest.mark.parametrize('scenario', [evaluates_in_another_shape, evaluates_with_gradients, disarms_before_the_backward], ids=lambda f: f.__name__)
def test_passes_of_other_kinds(monkeypatch, scenario): check(monkeypatch, shared, scenario, ttypes=alls)


def test_one_backward_of_two_steps(monkeypatch):
    "Without an optimizer, each pass is a step, until the weights show that two passes were micro-batches. One backward computes gradients of both."
    rows = []
    for plan in '01':
        torch._dynamo.reset()
        monkeypatch.setenv('TORCHEMBER_PLAN', plan)
        model,loss = shared()
        whole(model)
        with torchEmber(model, ttypes=alls) as te:
            for _ in range(6):
                (loss(model)+2*loss(model)).backward()
                with torch.no_grad():
                    for p in model.parameters(): p.sub_(.1*p.grad)
                model.zero_grad()
            written = te.recorder.events.merged.written
        rows.append([{k: v for k,v in r.items() if k!='ts'} for r in te.t.lines()])
    assert rows[0]==rows[1] and written


def late_backward(te, model, loss, i):
    "The backward of a recorded step begins in a step that is not recorded."
    x = loss(model)
    te.step()
    loss(model).item()
    x.backward()

def test_a_late_backward(monkeypatch): check(monkeypatch, shared, late_backward, ttypes=alls, every=2, optimizer=None)


def backward_of_a_removed_module(te, model, loss, i):
    "A backward reports gradients of a module that was deleted after the forward."
    if i!=5: return
    x = loss(model)
    model[1] = nn.Tanh()
    y = loss(model)
    gc.collect()
    x.backward()
    return y.item()

@pytest.mark.release
def test_a_removed_module(monkeypatch):
    "The plan of the forward, which keeps the module alive, may be dropped before the backward."
    monkeypatch.setattr(MergedPlans, 'most', 1)
    check(monkeypatch, shared, backward_of_a_removed_module, ttypes=alls, steps=7)


def test_cached_summaries_are_dropped_first(monkeypatch):
    "Compiled code writes without new version numbers, so a plan drops the cached summaries of earlier rows before it writes rows."
    run,record_calls,seen = MergedPlan.run,MergedCalls.record,[]
    def run_with_a_summary(plan, xs):
        plan.arena.seen[-1] = None
        run(plan, xs)
    def note_and_record(part, xs):
        seen.append(-1 in part.events.buffer.rows.arena.seen)
        return record_calls(part, xs)
    monkeypatch.setattr(MergedPlan, 'run', run_with_a_summary)
    monkeypatch.setattr(MergedCalls, 'record', note_and_record)
    record(monkeypatch, '1', shared, prepare=whole)
    assert seen and not any(seen)


# ---- graphs inside of a pass of uncompiled code

class Around(nn.Module):
    "A model that is not compiled. It calls compiled modules, and looks at the state of the recording between these calls."
    def __init__(self, checkpoints=None):
        super().__init__()
        self.first,self.second,self.head = Whole(nn.Linear(6, 6), nn.Tanh()),Whole(nn.Linear(6, 6), nn.Tanh()),nn.Linear(6, 2)
        self.checkpoints,self.look = checkpoints,lambda x: None
    def forward(self, x):
        for m in (self.first, self.second):
            x = m(x) if self.checkpoints is None else checkpoint(m, x, use_reentrant=self.checkpoints)
            self.look(x)
        return self.head(x)


def compile_inner(model):
    for m in (model.first, model.second): m.compile(backend=backend)

def around(**how): return lambda: squared(Around(**how), torch.linspace(-2, 2, 48).reshape(8, 6).requires_grad_())


def looking(model, loss, look):
    "Run a forward and a backward, and call `look` with the result of each compiled graph of the forward."
    model.look = look
    loss(model).backward()
    model.look = lambda x: None

def looks(te, model, loss, i):
    "Note between two compiled graphs which modules run, in the recorder and in the black box."
    seen,calls = [],te.recorder.buffer.calls
    def look(x):
        here,box = calls.here,calls.box
        at,names = here.box[1],{n: name for name,n in box.modules.items()}
        running = [names[n] for n in box.words[at+2:at+2+box.words[at+1]]]
        seen.append((te.current_mt.name, here.call, len(here.stack), running, names[box.words[at+3]]))
    looking(model, loss, look)
    return seen

def reuses_memory(te, model, loss, i):
    "Compiled code writes into tensors without a new version number, so rows of earlier tensors with the same memory must not be used again."
    looking(model, loss, lambda x: x.detach().numpy().__iadd__(1))

def reuses_memory_of_gradients(te, model, loss, i):
    "Also compiled code that computes gradients writes without a new version number."
    def add(g): g.numpy().__iadd__(1)
    looking(model, loss, lambda x: x.register_hook(add) and None)

def gradients_inside_a_pass(te, model, loss, i):
    "A backward inside of the forward recomputes the calls of a checkpoint."
    looking(model, loss, lambda x: torch.autograd.grad(x.square().sum(), model.first[0].weight, retain_graph=True) and None)

def runs_in_another_thread(te, model, loss, i):
    "While two threads run the model, Python code records their calls."
    def look(x):
        model.look = lambda x: None
        before = te.recorder.events.merged.written
        t = threading.Thread(target=loss, args=(model,))
        t.start()
        t.join()
        assert te.recorder.events.merged.written==before
    looking(model, loss, look)

def calls_a_part(te, model, loss, i): return model.first(torch.ones(3, 6)).sum().item()


@pytest.mark.parametrize('scenario', [looks, runs_in_another_thread, calls_a_part,
    *(pytest.param(f, marks=pytest.mark.release) for f in (reuses_memory, reuses_memory_of_gradients))],
    ids=lambda f: f.__name__)
def test_between_two_graphs(monkeypatch, scenario):
    check(monkeypatch, around(), scenario, compile_inner, ttypes=alls, blackbox=True)


@pytest.mark.parametrize('scenario', [None, gradients_inside_a_pass], ids=['after the pass', 'inside'])
@pytest.mark.parametrize('reentrant', [False, True])
def test_recomputation_of_a_checkpoint_is_not_recorded(monkeypatch, reentrant, scenario):
    if reentrant and scenario is not None: pytest.skip('torch refuses `autograd.grad` through a reentrant checkpoint')
    check(monkeypatch, around(checkpoints=reentrant), scenario, compile_inner, ttypes=alls)


def maps_over_rows(te, model, loss, i):
    if i>2: return torch.func.vmap(model)(torch.linspace(-2, 2, 24).reshape(4, 6)).sum().item()

@pytest.mark.release
def test_a_transform(monkeypatch): check(monkeypatch, around(), maps_over_rows, compile_inner, ttypes=alls)


@pytest.mark.parametrize('name', [shared, uneven], ids=lambda n: n.__name__)
def test_calls_in_several_graph_parts(monkeypatch, name):
    "With a low limit for unused memory, several merged calls report the calls of a graph, also the start and the end of one call."
    monkeypatch.setattr(merging, 'groups_of_calls', partial(merging.groups_of_calls, least=0))
    monkeypatch.setattr(merging, 'most_part', .2)
    check(monkeypatch, name, ttypes=alls)


def test_facts_about_outputs(monkeypatch):
    "In the steps that collect facts about outputs, Python code gets all tensors."
    facts = []
    for plan in '01':
        torch._dynamo.reset()
        monkeypatch.setenv('TORCHEMBER_PLAN', plan)
        model,loss = squared(Whole(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16)), torch.linspace(-2, 2, 96).reshape(16, 6))
        whole(model)
        opt = torch.optim.SGD(model.parameters(), lr=.1)
        with torchEmber(model, optimizer=opt) as te:
            for _ in range(5): loss(model).backward(); opt.step()
            facts.append(te.recorder.sources.at_calls[-1].facts()['outputs'])
    assert facts[0]==facts[1] and facts[0]['1']['steps']==[0, 1, 3]


def other_listener_of_gradients(te, model, loss, i):
    "While another listener wants the gradients of all outputs, it gets the same gradients as without plans."
    if i<2: return
    if i==2: te.acts = from_activation_grad(model)
    if i==4: te.acts.remove()
    return {k: x.sum().item() for k,x in te.acts.state_dict.items()}

@pytest.mark.release
def test_another_listener_of_gradients(monkeypatch): check(monkeypatch, shared, other_listener_of_gradients, ttypes=alls)


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.head,self.body,self.name = nn.Linear(6, 2),Whole(nn.Linear(6, 6), nn.Tanh()),'body'
    def forward(self, x): return self.head(getattr(self, self.name)(x))

def renamed(): return squared(Renamed(), torch.linspace(-2, 2, 48).reshape(8, 6))

def renames(te, model, loss, i):
    if i!=5: return
    model.other,model.name = model.body,'other'
    del model.body

@pytest.mark.release
def test_a_renamed_module(monkeypatch):
    "After a module was renamed, its rows have the new name, although the graph reports the same names of tensors for the same modules."
    check(monkeypatch, renamed, renames, ttypes=alls, steps=8)


def changes_statistics_late(te, model, loss, i):
    "Compiled code has the addresses of the taps at this time. In the scenario `changes_statistics`, it has none yet."
    if i==5: te.recorder.buffer.use(('min', 'max'), ['output', 'output_grad', 'weight'], te.recorder.sources.states)

def test_new_taps(monkeypatch): check(monkeypatch, shared, changes_statistics_late, ttypes=alls, steps=8)


def test_a_missing_gradient_stays_none():
    "A report with the index -1 gets None in place of a tensor."
    got = []
    ReportedCall(0, 'grads_arrived', lambda holder, xs, *more: got.append((xs, more)), [1, -1, 0], ['output_grad']).run(None, ['a', 'b'])
    assert got==[(['b', None, 'a'], ('output_grad',))]


class Mean(nn.Module):
    def forward(self, x): return x.mean(0, keepdim=True)

def pooled():
    torch.manual_seed(0)
    return Whole(Mean(), nn.Linear(6, 2)),lambda m: m(torch.ones(8, 6)).square().sum()

def smaller_batches(te, model, loss, i):
    out = model(torch.ones(5, 6)).sum().item()
    return out, [(t.name, t.input_dt) for t in te.tracks].__repr__()

def test_shapes_of_unrecorded_inputs(monkeypatch):
    "The shapes of inputs are noted, even if only outputs are recorded, and no output has a new shape."
    check(monkeypatch, pooled, smaller_batches, ttypes=('output',), steps=7)
