"Compiled plans of calls give the same rows as the general Python code, bit by bit and in the same order."
import copy, gc, json, os, threading, weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchember import torchEmber
from torchember.capture.module_state import KEY
from torchember.measure.planning import WatchedDicts, loaded_objects
from torchember.recorder import call_plans
from torchember.state.factories import from_activation


@pytest.fixture(scope='module', autouse=True)
def compiled_code():
    "Load the compiled functions once for all tests, because compiling them takes many seconds at the first use on a machine."
    if loaded_objects() is None: pytest.skip('compiled code cannot take Python objects here')


alls = ('input', 'output', 'input_grad', 'output_grad', 'weight', 'weight_grad')


class Block(nn.Module):
    "A residual block that writes in place."
    def __init__(self, n=6):
        super().__init__()
        self.a,self.act,self.b,self.norm = nn.Linear(n, n),nn.ReLU(inplace=True),nn.Linear(n, n),nn.BatchNorm1d(n)
    def forward(self, x):
        y = self.norm(self.b(self.act(self.a(x))))
        y += x
        return y


class Nested(nn.Module):
    "A module whose inputs and outputs are containers of tensors."
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
    def forward(self, pair, *more, scale=None, opts=None):
        a,b = pair
        return {'sum': self.inner(a+b*(1 if scale is None else scale)), 'parts': [a, *more], 'n': 3}


class Calls(nn.Module):
    "A model with integer inputs, containers, a shared module, tied weights, an expanded tensor, and outputs of other dtypes."
    def __init__(self):
        super().__init__()
        self.table,self.block,self.nested,self.shared = nn.Embedding(9, 6),Block(),Nested(),nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight
        self.identity = nn.Identity()
        self.steps = 0
    def forward(self, ids):
        self.steps += 1
        x = self.shared(self.shared(self.block(self.table(ids))))
        self.identity(ids.to(torch.int32)); self.identity(x.detach().bfloat16()); self.identity(x.T); self.identity(x[:1].expand(4, 6)); self.identity(ids>3)
        self.identity(torch.zeros(3, 0)); self.identity(torch.view_as_complex(x.detach().reshape(-1, 2).contiguous()).conj().imag[:1])
        out = self.nested((x, x), x, scale=2. if self.steps%2 else x, opts={'k': [x], 'none': None})
        return self.head(out['sum'])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn,self.head = nn.LSTM(6, 6, 2, batch_first=True),nn.Linear(6, 2)
    def forward(self, x):
        out,(h,c) = self.rnn(x)
        return self.head(out[:, -1])+self.head(h[-1])


def ids(n=8): return torch.arange(n)%9
def floats(n=8): return torch.linspace(-2, 2, n*6).reshape(n, 6)


def network(name):
    torch.manual_seed(0)
    if name=='calls': return Calls(),lambda m: m(ids()).logsumexp(1).mean()
    if name=='blocks': return nn.Sequential(Block(), Block(), nn.Linear(6, 2)),lambda m: m(floats()).square().mean()
    if name=='lstm': return Recurrent(),lambda m: m(torch.stack([floats()]*3)).square().mean()
    if name=='large': return nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 2)),lambda m: m(floats(200)).square().mean()
    if name=='frozen':
        m = nn.Sequential(Block(), nn.Linear(6, 2))
        m[0].a.weight.requires_grad_(False)
        return m,lambda m: m(floats()).square().mean()
    import transformers as t
    if name=='gpt2': m = t.GPT2LMHeadModel(t.GPT2Config(vocab_size=9, n_positions=16, n_embd=8, n_layer=2, n_head=2))
    else: m = t.LlamaForCausalLM(t.LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2))
    return m.train(),lambda m: m(input_ids=ids()[None], labels=ids()[None]).loss


def record(monkeypatch, plan, name, scenario=None, steps=5, prepare=lambda model: None, **how):
    """Train a model. Return its rows, the values that a user sees in each step, the final parameters, and the numbers of planned rows.

    `name`: name of a network, or a function that returns a model and its loss."""
    monkeypatch.setenv('TORCHEMBER_PLAN', plan)
    model,loss = network(name) if isinstance(name, str) else name()
    prepare(model)
    opt = torch.optim.SGD(model.parameters(), lr=.01)
    how = {'optimizer': opt} | how
    if how['optimizer'] is None: del how['optimizer']
    te,seen = torchEmber(model, **how),[]
    for i in range(steps):
        if scenario is not None: seen.append(scenario(te, model, loss, i))
        x = loss(model)
        x.backward()
        if 'optimizer' not in how: te.step()
        opt.step()
        opt.zero_grad()
        current = te.current_mt
        seen.append((x.item(), list(te.mt_log), current and current.name, [(t.name, t.input_dt, t.output_dt) for t in copy.copy(te.tracks)].__repr__()))
    written = te.recorder.events.planned.written,te.recorder.events.merged.written
    te.close()
    rows = [json.dumps({k: v for k,v in r.items() if k!='ts'}, sort_keys=True) for r in te.t.lines()]
    return rows,seen,[p.tolist() for p in model.parameters()],written


def check(monkeypatch, name, scenario=None, planned=True, **how):
    general,got = (record(monkeypatch, plan, name, scenario, **how) for plan in ('0', '1'))
    assert general[3]==(0, 0) and (got[3][0]>0)==planned
    # no row is counted twice. Rows of a scenario may be merged or removed later, and a row with exponent counts counts as several
    assert 'stats' in how or scenario is not None or sum(got[3])<=len(got[0])
    compare(general, got)


def compare(general, got):
    "Assert that two results of `record` have equal rows, values and parameters."
    for a,b in zip(general[0], got[0], strict=False): assert a==b
    assert len(general[0])==len(got[0])
    assert general[1]==got[1] and general[2]==got[2]


names = 'calls', 'blocks', 'lstm', 'large', 'frozen', 'gpt2', 'llama'


@pytest.mark.parametrize('how', [{}, dict(ttypes=alls), dict(ttypes=alls, stats='full'), dict(stats=['rms', 'mean', 'min', 'max', 'skew', 'kurtosis', 'std']),
    dict(optimizer=None), dict(blackbox=False), dict(ttypes=('input', 'output', 'weight', 'weight_grad', 'update'))],
    ids=['default', 'gradients', 'full', 'columns', 'te.step', 'no box', 'updates'])
@pytest.mark.parametrize('name', names)
def test_rows_are_those_of_the_general_way(monkeypatch, name, how):
    if name in ('gpt2', 'llama'): pytest.importorskip('transformers')
    check(monkeypatch, name, **how)


@pytest.mark.parametrize('ttypes', [('output',), ('input', 'weight'), ('output', 'output_grad'), ('weight', 'weight_grad')], ids='_and_'.join)
@pytest.mark.parametrize('name', ['calls', 'blocks', 'lstm'])
def test_rows_of_some_tensor_types(monkeypatch, name, ttypes): check(monkeypatch, name, ttypes=ttypes)


def test_gradients_alone_have_no_row_of_compiled_code(monkeypatch): check(monkeypatch, 'calls', planned=False, ttypes=('input_grad', 'output_grad'))


def test_statistics_of_a_user_are_not_planned(monkeypatch): check(monkeypatch, 'calls', planned=False, stats=lambda x: {'first': x.flatten()[:1].sum()})


# ---- scenarios: functions that run before each step as scenario(ember, model, loss, step)

def evaluates(te, model, loss, i):
    if i%2: return
    model.eval()
    with torch.no_grad(): x = loss(model).item()
    model.train()
    with torch.no_grad(): return x, loss(model).item()

def raises(te, model, loss, i):
    if i not in (1, 3): return
    inner = next(m for m in model.modules() if type(m) is nn.ReLU)
    def fail(m, args): raise KeyError('planned')
    handle = inner.register_forward_pre_hook(fail)
    with pytest.raises(KeyError): loss(model)
    handle.remove()
    return list(te.mt_log)

def fails_inside(te, model, loss, i):
    inner,was = next(m for m in model.modules() if type(m) is nn.BatchNorm1d),nn.functional.batch_norm
    if i not in (1, 3): return
    def fail(*args, **kwargs): raise KeyError('planned')
    nn.functional.batch_norm = fail
    try:
        with pytest.raises(KeyError): loss(model)
    finally: nn.functional.batch_norm = was
    return inner.training

def other_shapes(te, model, loss, i): return model(floats(3+i%2)).sum().item()

def shapes_in_turns(te, model, loss, i):
    "Run the model with changing shapes, in planned calls and in calls that Python code records (outermost, or under a torch mode)."
    out = []
    for n,way in ((5, 'outermost'), (3, ''), (5, 'outermost'), (4, ''), (3, 'mode'), (4, 'outermost'), (3, '')):
        called = model[0] if way=='outermost' else model
        with torch.device('cpu') if way=='mode' else nullcontext(): out.append(called(floats(n)).sum().item())
        out.append([(t.name, t.input_dt, t.output_dt) for t in te.tracks])
    return repr(out)

def micro_batches(te, model, loss, i): loss(model).backward(); loss(model).backward()

def rearms(te, model, loss, i):
    if i==2: te.rearm()

def disarms(te, model, loss, i):
    if i==2: te.disarm()
    if i==3: te.arm()

def disarms_in_the_middle(te, model, loss, i):
    if i!=3: return
    inner = model[1].act
    handle = inner.register_forward_hook(lambda *args: te.disarm() and None)
    x = loss(model).item()
    handle.remove()
    te.arm()
    return x

def flushes_in_the_middle(te, model, loss, i):
    def flush(*args):
        with te.recorder.lock: te.recorder.pipe.flush()
    handle = model[1].act.register_forward_hook(flush)
    x = loss(model)
    x.backward()
    handle.remove()
    return x.item()

def reads_in_the_middle(te, model, loss, i):
    "Count the rows that a reader sees while the model runs."
    counts = []
    handle = model[1].act.register_forward_hook(lambda *args: counts.append(len(te.t.df)) and None)
    loss(model).backward()
    handle.remove()
    return counts

def adds_modules(te, model, loss, i):
    if i==2: model[0].extra = nn.Linear(6, 6)
    if i==3: model[0].act = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    if i==4: model[0].a.weight = nn.Parameter(torch.ones(6, 6))

def copies(te, model, loss, i):
    other = copy.deepcopy(model)
    return loss(other).item()

def another_listener(te, model, loss, i):
    if i==2: te.acts = from_activation(model)
    if i==4: te.acts.remove()

def transforms(te, model, loss, i): return torch.func.vmap(model[2])(floats(4)).sum().item()

def modes(te, model, loss, i):
    with torch.device('cpu'): loss(model).backward()

def parts(te, model, loss, i): return model[0](floats()).sum().item()

def in_a_thread(te, model, loss, i):
    out = []
    t = threading.Thread(target=lambda: out.append(loss(model).item()))
    t.start()
    t.join()
    return out

def probes(te, model, loss, i):
    handle = model[1].act.register_forward_hook(lambda m, args, out: te.probe('here', out*2))
    x = loss(model).item()
    handle.remove()
    return x

def changes_statistics(te, model, loss, i):
    if i==2: te.recorder.buffer.use(('min', 'max'), ['output', 'weight', 'weight_grad'], te.recorder.sources.states)

def writes_data(te, model, loss, i): model[0].a.weight.data.mul_(1.5)

def hidden_gradients(te, model, loss, i):
    if i==2: model[1].b.weight.requires_grad_(False)
    if i==3: model[1].b.weight.requires_grad_(True)

def a_wrapper(te, model, loss, i):
    x = floats().requires_grad_()
    y = checkpoint(model[0], checkpoint(model[1], x, use_reentrant=bool(i%2)), use_reentrant=False)
    model[2](y).sum().backward()

scenarios = [evaluates, raises, fails_inside, other_shapes, shapes_in_turns, micro_batches,
    rearms, disarms, disarms_in_the_middle, flushes_in_the_middle, reads_in_the_middle, adds_modules, copies,
    another_listener, transforms, modes, parts, in_a_thread, probes, changes_statistics, writes_data, hidden_gradients, a_wrapper]

@pytest.mark.parametrize('scenario', scenarios, ids=lambda f: f.__name__)
@pytest.mark.parametrize('ttypes', [None, alls], ids=['default', 'gradients'])
def test_what_happens_between_steps(monkeypatch, scenario, ttypes):
    check(monkeypatch, 'blocks', scenario, **({} if ttypes is None else {'ttypes': ttypes}))


@pytest.mark.parametrize('scenario', [pytest.param(s, marks=[pytest.mark.release]*('middle' not in s.__name__)) for s in scenarios], ids=lambda f: f.__name__)
def test_what_happens_between_steps_of_outputs(monkeypatch, scenario): check(monkeypatch, 'blocks', scenario, ttypes=('output',))


def test_two_threads_in_one_pass(monkeypatch):
    def count(plan):
        monkeypatch.setenv('TORCHEMBER_PLAN', plan)
        model,loss = network('blocks')
        opt = torch.optim.SGD(model.parameters(), lr=.01)
        with torchEmber(model, optimizer=opt) as te:
            for _ in range(4):
                ts = [threading.Thread(target=model[0], args=(floats(),)) for _ in range(3)]
                for t in ts: t.start()
                loss(model).backward()
                for t in ts: t.join()
                opt.step()
        return len(te.t.lines())>0
    assert count('0') and count('1')


def test_objects_are_collected(monkeypatch):
    monkeypatch.setenv('TORCHEMBER_PLAN', '1')
    model,loss = network('blocks')
    opt = torch.optim.SGD(model.parameters(), lr=.01)
    te = torchEmber(model, optimizer=opt)
    for _ in range(3): loss(model).backward(); opt.step()
    assert te.recorder.events.planned.written
    te.close()
    refs = [weakref.ref(o) for o in (model, opt, model[0].a, model[0].a.weight)]
    del model, opt, te, loss
    gc.collect()
    assert [r() for r in refs]==[None]*4


def test_counters_of_references_stay(monkeypatch):
    import sys
    monkeypatch.setenv('TORCHEMBER_PLAN', '1')
    model,loss = network('calls')
    opt = torch.optim.SGD(model.parameters(), lr=.01)
    with torchEmber(model, optimizer=opt) as te:
        def step(): loss(model).backward(); opt.step(); opt.zero_grad()
        for _ in range(4): step()
        r = te.recorder
        st = r.sources.states[2]
        groups = next(iter(st.taps.values())).format.groups
        objects = None,True,False,torch.Tensor,st,st.track,r.calls,model.head.weight,r.buffer.rows.arena.seen,groups
        before = [sys.getrefcount(o) for o in objects]
        for _ in range(20): step()
        after = [sys.getrefcount(o) for o in objects]
    assert all(abs(a-b)<400 for a,b in zip(before[:3], after[:3], strict=True))
    assert all(abs(a-b)<8 for a,b in zip(before[3:], after[3:], strict=True)), (before, after)


# ---- memory: compiled code may read the address of an object only while the object is alive

def trained(monkeypatch, name='blocks', steps=4, **how):
    "Train some steps with compiled plans. Return the model, its loss function, its optimizer and its ember."
    monkeypatch.setenv('TORCHEMBER_PLAN', '1')
    model,loss = network(name)
    opt = torch.optim.SGD(model.parameters(), lr=.01)
    te = torchEmber(model, optimizer=opt, **how)
    for _ in range(steps): step(model, loss, opt)
    assert te.recorder.events.planned.written
    return model, loss, opt, te


def step(model, loss, opt):
    loss(model).backward()
    opt.step()
    opt.zero_grad()


def plan_of(module): return module.__dict__[KEY].plan


def in_pass(model, module, loss, f):
    "Call `f` in the middle of a pass, after the call of `module`. Return the result of `f`."
    got = []
    def once(*args):
        handle.remove()
        got.append(f())
    handle = module.register_forward_hook(once)
    loss(model).sum().backward()
    return got[0]


def test_compiled_code_does_not_go_on_after_a_stop(monkeypatch):
    "Another thread may stop the planned pass while Python code measures a tensor. Compiled code must then do nothing."
    model,loss,_,te = trained(monkeypatch)
    planned,plan,x = te.recorder.events.planned,plan_of(model[1].act),floats()
    def codes():
        planned.stop()
        return plan.enter(plan.address, (x,), {}, 0), plan.leave(plan.address, x, 0)
    k = planned.compiled
    assert in_pass(model, model[0].act, loss, codes)==(k.OTHER, k.OTHER)
    te.close()


def test_objects_of_a_pass_live_until_all_threads_have_left_it(monkeypatch):
    model,loss,_,te = trained(monkeypatch)
    planned = te.recorder.events.planned
    def another():
        t = threading.Thread(target=loss, args=(model,))
        t.start()
        t.join()
        return len(planned.held), planned.cells[planned.compiled.ON]
    held,on = in_pass(model, model[0].act, loss, another)
    assert held>5 and not on and planned.held==()
    te.close()


def test_forked_process_writes_no_rows(monkeypatch):
    "A forked process inherits the memory of the planned rows. Recording must be off in the child process."
    if not hasattr(os, 'fork'): pytest.skip('no fork')
    model,loss,_,te = trained(monkeypatch)
    planned = te.recorder.events.planned
    def fork():
        pid = os.fork()
        if pid==0: os._exit(int(planned.cells[planned.compiled.ON]))
        return planned.cells[planned.compiled.ON], os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert in_pass(model, model[0].act, loss, fork)==(1, 0)
    te.close()


@pytest.mark.parametrize('what', ['inputs', 'outputs'])
def test_interrupted_learning_leaves_no_address(monkeypatch, what):
    model,loss,_,te = trained(monkeypatch)
    def interrupt(*args): raise KeyboardInterrupt
    plan = plan_of(model[2])
    k,words = plan.kinds,plan.words
    assert words[k.ARGS] and words[k.RESULT]
    monkeypatch.setattr(call_plans, 'structure_of', interrupt)
    with pytest.raises(KeyboardInterrupt): plan.finish_inputs(k.OTHER, (floats(),), {}) if what=='inputs' else plan.finish_rows(k.OTHER, [], 0, floats())
    assert not words[k.ARGS if what=='inputs' else k.RESULT]
    te.close()


def test_plans_hold_the_taps_whose_addresses_they_have(monkeypatch):
    model,_,_,te = trained(monkeypatch)
    plan = plan_of(model[2])
    k,(words,*_,taps) = plan.kinds,plan.weights
    assert len(words)==2 and [w[k.WEIGHT_TAP+k.TAPPED] for w in words]==list(map(id, taps))
    gradients = te.recorder.sources.parameters.plan
    assert len(gradients.words)>2 and [w[k.GRADIENT_TAP+k.TAPPED] for w in gradients.words]==list(map(id, gradients.held))
    te.close()


def test_gradients_of_a_removed_parameter_are_not_read(monkeypatch):
    "Another thread may remove a parameter after the plan was compared with the model. Its freed memory must not be read."
    model,loss,_,te = trained(monkeypatch)
    loss(model).backward()
    parameters = te.recorder.sources.parameters
    plan,gathered = parameters.plan,parameters.gathered.places['weight_grad']
    parameters.buffer.rows.forget_cached_summaries()
    gathered.clear()
    del model[2].bias
    plan.measure_gradients(parameters)
    assert len(gathered)==len(plan.which)-1
    te.close()


def test_freed_value_is_a_change(monkeypatch):
    "A new module may get the memory address of a removed module. The change must still be noticed."
    monkeypatch.setenv('TORCHEMBER_PLAN', '1')
    d = {'a': nn.ReLU()}
    for _ in range(100):
        same,was = WatchedDicts([d]),id(d['a'])
        assert same.unchanged()
        del d['a']
        d['a'] = nn.ReLU()
        assert not same.unchanged()
        if id(d['a'])==was: break
    assert id(d['a'])==was


def test_cached_code_is_that_of_these_sources():
    "Compiled code contains constants of other Python modules. Cached code must not be loaded after such a module has changed."
    from torchember.measure import head
    from torchember.measure.readers import numba, objects
    assert objects.enter_call.__qualname__==f'enter_call_{numba.layout_checksum ^ objects.own_checksum:x}'
    assert objects.own_checksum==numba.source_checksum(objects.__name__)!=numba.source_checksum(head.__name__)
