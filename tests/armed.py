"""Test cases behind the table in the docs of properties that arming a model does not change.

Each case arms a model, uses the model as users do, and checks the result.
`tests/capture/test_armed.py` and the page of the docs run all cases."""
import copy
import io
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import torch
import torch.utils.checkpoint
from models import Dicts, tensors
from torch import nn

from torchember import torchEmber

cases = {} # what stays true -> (description of the test, function)


def case(what, how):
    def add(f):
        cases[what] = how, f
        return f
    return add


def mlp(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
def x(n=3, d=4): return torch.randn(n, d)
def rows(te, **where): return [r for r in te.t.lines() if all(r.get(k)==v for k,v in where.items())]
def outputs(te): return rows(te, ttype='output')
def dicts(model): return {n: {k: dict(v) if isinstance(v, dict) else v for k,v in m.__dict__.items()} for n,m in model.named_modules()}


def own_weights(copied, inp, te):
    "Check that a copy of an armed model is not armed, records nothing, and has its own weights."
    n = len(te.t.lines())
    assert not any(k.startswith('_torchember') or k in ('forward', 'disarm', '__reduce_ex__', '__getstate__') for m in copied.modules() for k in m.__dict__)
    with torch.no_grad(): [p.zero_() for p in copied.parameters()]
    assert not any(t.any() for t in tensors(copied(inp)))
    assert len(te.t.lines())==n


def train_once(model, inp, opt=None):
    loss = sum(t.float().square().mean() for t in tensors(model(inp)) if t.requires_grad)
    loss.backward()
    if opt: opt.step()
    return loss


# ---- copies of an armed model

@case('copy.deepcopy', 'A copy of an armed model, or of a part of it, is not armed, has its own weights and records nothing, also after a training step.')
def deepcopy_():
    model = mlp()
    te = torchEmber(model)
    own_weights(copy.deepcopy(model), x(), te)
    train_once(model, x(), torch.optim.SGD(model.parameters(), .1))
    own_weights(copy.deepcopy(model), x(), te)
    own_weights(copy.deepcopy(model[0]), x(), te)
    kept = copy.deepcopy({'model': model, 'again': model})
    assert kept['model'] is kept['again']
    own_weights(kept['model'], x(), te)
    assert outputs(te) and hasattr(model, 'disarm') # The original is still armed
    te.close()


@case('pickle and torch.save',
    'An armed model, or a part of it, can be saved with all protocols, also after a training step, and loaded with `weights_only=False`.')
def pickled():
    model = mlp()
    te = torchEmber(model)
    train_once(model, x(), torch.optim.SGD(model.parameters(), .1))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL+1): own_weights(pickle.loads(pickle.dumps(model, protocol)), x(), te)
    own_weights(pickle.loads(pickle.dumps(model[0])), x(), te)
    for what in (model, model[0]):
        f = io.BytesIO()
        torch.save(what, f)
        f.seek(0)
        own_weights(torch.load(f, weights_only=False), x(), te)
    te.close()


@case('copy.copy', 'A shallow copy of a layer computes with the attributes that are set on the copy.')
def shallow():
    model = nn.LayerNorm(4)
    te = torchEmber(model)
    c = copy.copy(model)
    assert 'forward' not in c.__dict__ and '_torchember' not in c.__dict__
    c.eps = 1e9
    assert not torch.equal(c(x()), model(x()))
    te.close()


@case('classes with their own __deepcopy__, __getstate__ or __reduce__',
    'A model class with each of these methods, and an fx `GraphModule`, are copied and pickled as without torchember.')
def own_protocols():
    class Deep(nn.Linear):
        def __deepcopy__(self, memo):
            new = Deep(4, 2)
            new.__dict__.update({k: copy.deepcopy(v, memo) for k,v in self.__dict__.items()})
            return new
    class State(nn.Linear):
        def __getstate__(self): return {k:v for k,v in self.__dict__.items() if k!='cache'}
    class Slots(nn.Linear):
        __slots__ = ('extra',)
    for kind in (Deep, State, Slots):
        m = kind(4, 2)
        te = torchEmber(m)
        own_weights(copy.deepcopy(m), x(), te)
        te.close()
    g = torch.fx.symbolic_trace(mlp())
    te = torchEmber(g)
    own_weights(copy.deepcopy(g), x(), te)
    own_weights(pickle.loads(pickle.dumps(g)), x(), te)
    te.close()


@case('state_dict', 'The keys and tensors are those of the model that is not armed. `load_state_dict` changes the armed model.')
def state_dict():
    model = mlp()
    want = {k: v.clone() for k,v in model.state_dict().items()}
    te = torchEmber(model)
    assert list(model.state_dict())==list(want)
    model.load_state_dict({k: torch.ones_like(v) for k,v in want.items()})
    model(torch.ones(1, 4))
    assert [r['mean'] for r in rows(te, ttype='weight')]==[1]*4
    te.close()


# ---- arming and disarming

@case('an exception in forward',
    'An exception of a layer reaches the caller unchanged. The log of module calls is complete, and the next pass is recorded. Dicts and hooks are as before.')
def exception():
    class Fails(nn.Module):
        fail = True
        def forward(self, x):
            if self.fail: raise ZeroDivisionError('mine')
            return x
    model = nn.Sequential(nn.Linear(4, 4), Fails())
    before = dicts(model)
    te = torchEmber(model)
    for _ in range(2):
        try: model(x())
        except ZeroDivisionError as e: assert str(e)=='mine'
        else: raise AssertionError('the exception was lost')
        assert sum(s.startswith('enter') for s in te.mt_log)==sum(s.startswith('exit') for s in te.mt_log)==3
    model[1].fail = False
    model(x())
    assert te.t.latest_df.ttype.tolist().count('output')==3
    te.close()
    model[1].__dict__.pop('fail')
    assert dicts(model)==before


@case('KeyboardInterrupt in forward', 'After an interrupt in a layer, the model can be trained further and disarmed. It is equal to the model before.')
def interrupt():
    class Stops(nn.Module):
        def forward(self, x): raise KeyboardInterrupt
    model = nn.Sequential(nn.Linear(4, 4), Stops())
    before = dicts(model)
    te = torchEmber(model)
    try: model(x())
    except KeyboardInterrupt: pass
    assert te.recorder.calls.here.depth==0 and len(te.mt_log)==6
    te.close()
    assert dicts(model)==before


@case('dicts and hook tables',
    'The `__dict__` and the hooks of each module are equal before arming and after disarming. Hooks of the user are called once each.')
def hooks():
    model,seen = mlp(),[]
    model[0].register_forward_hook(lambda *a: seen.append('forward'))
    model[0].register_forward_pre_hook(lambda *a: seen.append('pre'))
    model[2].register_full_backward_hook(lambda *a: seen.append('backward'))
    before = dicts(model)
    te = torchEmber(model)
    train_once(model, x())
    assert seen==['pre', 'forward', 'backward']
    te.close()
    assert dicts(model)==before


@case('two embers',
    'If a second ember arms the same model, or a part of it, the first ember is disarmed, with a warning. Disarming twice, or in another order, does no harm.')
def two_embers():
    model = mlp()
    before = dicts(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        a,b = torchEmber(model),torchEmber(model)
        assert not a.armed and b.armed and 'already recorded' in str(said[0].message)
        c = torchEmber(model[0])
        assert not b.armed and c.armed
    a.disarm(); c.disarm(); b.disarm(); a.disarm(); c.disarm()
    assert dicts(model)==before
    a.arm(); a.arm()
    model(x())
    n = len(outputs(a))
    assert n==4
    a.disarm(); a.disarm()
    model(x())
    assert len(outputs(a))==n and dicts(model)==before


@case('a forward set on the instance',
    'A `forward` that was set on a module before arming is called, and restored. A `forward` that is set while the model is armed is not changed.')
def instance_forward():
    model = mlp()
    mine = lambda x: x*2
    model[1].forward = mine
    te = torchEmber(model)
    model(torch.ones(1, 4))
    r = rows(te, module='model(Sequential).1(ReLU)')
    assert r[1]['mean']==2*r[0]['mean']
    te.disarm()
    assert model[1].forward is mine
    te.arm()
    other = lambda x: x*3
    armed = model[1].forward
    model[1].forward = other
    te.disarm()
    assert model[1].forward is other
    # A kept reference to the armed forward now calls the original forward
    assert torch.equal(armed(torch.ones(2)), mine(torch.ones(2)))
    te.close()


# ---- features of models

@case('in-place operations', 'With `ReLU(inplace=True)` after each layer, and `+=` on an output, gradients are equal, bit by bit.')
def inplace():
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.l,self.r = nn.Linear(4, 4),nn.ReLU(inplace=True)
        def forward(self, x):
            y = self.r(self.l(x))
            z = y*2
            z += y
            return self.r(z)
    model,inp = Net(),x()
    plain = copy.deepcopy(model)
    train_once(plain, inp)
    te = torchEmber(model)
    train_once(model, inp)
    te.close()
    assert all(torch.equal(a.grad, b.grad) for a,b in zip(plain.parameters(), model.parameters(), strict=True))
    out = [r for r in outputs(te) if 'Linear' in r['module']][0]
    assert out['min']<0 # The output was measured before the in-place ReLU changed it


@case('LSTM and nested outputs', 'Each tensor in nested tuples, dicts and dataclasses has a row and a name.')
def nested_outputs():
    te = torchEmber(nn.LSTM(4, 3))
    te.model(torch.randn(5, 2, 4))
    assert [r['tname'] for r in outputs(te)]==['output_0', 'output_1.0', 'output_1.1']
    te.close()
    te = torchEmber(Dicts())
    te.model(x(), mask=None)
    assert [r['tname'] for r in outputs(te)][-3:]==['output_logits', 'output_state.0', 'output_state.1.0']
    te.close()


@case('frozen parameters, requires_grad switched', 'Weights always have rows. Gradients have rows if they exist, before and after `requires_grad` is switched.')
def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    te = torchEmber(model)
    for on in (False, True):
        model[0].requires_grad_(on)
        model.zero_grad()
        train_once(model, x())
        te.step()
        assert len(rows(te, step=int(on), ttype='weight'))==4 and len(rows(te, step=int(on), ttype='weight_grad'))==2+2*on
    te.close()


@case('sparse gradients', 'With `nn.Embedding(sparse=True)`, the statistics are those of the dense gradient.')
def sparse():
    model = nn.Embedding(1000, 4, sparse=True)
    te = torchEmber(model)
    model(torch.tensor([1, 1, 7])).sum().backward()
    te.step()
    [r] = rows(te, ttype='weight_grad')
    dense = model.weight.grad.to_dense().double()
    near = 1e-9 if dense.is_cpu else 1e-8 # GPU kernels sum in float32
    assert r['shape']==[1000, 4] and abs(r['mean']-dense.mean())<near and abs(r['std']-dense.std())<1e-6
    te.close()


@case('no parameters, buffers, no tensors', '`nn.Identity`, BatchNorm with its buffers, and a module that takes and returns text work as before.')
def odd_modules():
    class Text(nn.Module):
        def forward(self, s): return s.upper()
    te = torchEmber(nn.Sequential(Text(), nn.Identity()))
    assert te.model('abc')=='ABC' and te.t.lines()==[]
    te.close()
    model = nn.BatchNorm1d(4)
    te = torchEmber(model)
    want = model.running_mean.clone()
    model(x(8))
    assert not torch.equal(model.running_mean, want) and len(rows(te, ttype='weight'))==2
    te.close()


@case('modules added or removed while armed', 'The model works. A removed module is as before arming. A new module is recorded from the next recorded step on.')
def changed():
    model = mlp()
    te = torchEmber(model)
    gone = model[1]
    model[1] = nn.Tanh()
    model.append(nn.Sigmoid())
    model(x())
    assert '_torchember' not in gone.__dict__ and any('Sigmoid' in r['module'] for r in outputs(te))
    te.close()
    assert all('_torchember' not in m.__dict__ for m in (*model.modules(), gone))


@case('lazy modules', 'A `LazyLinear` becomes a `Linear`, and its weights are recorded from its first pass on.')
def lazy():
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())
    te = torchEmber(model)
    train_once(model, x())
    te.step()
    assert type(model[0]) is nn.Linear and len(rows(te, ttype='weight'))==4 and len(rows(te, ttype='weight_grad'))==4
    te.close()


@case('a forward that calls itself', 'If the model or a part of it calls itself, there is one pass, and each call has rows.')
def recursive():
    class Tree(nn.Module):
        def __init__(self): super().__init__(); self.l = nn.Linear(4, 4)
        def forward(self, x, depth=3): return self.l(x) if not depth else self(self.l(x), depth-1)+self.l(x)
    te = torchEmber(Tree())
    train_once(te.model, x())
    te.t.refresh()
    assert {r['step'] for r in te.t.lines()}=={0}
    # The innermost call of the recursion returns first
    assert [r['call'] for r in rows(te, module='model(Tree)', ttype='output')]==[3, 2, 1, 0]
    assert [r['call'] for r in rows(te, module='model(Tree)', ttype='input')]==[0, 1, 2, 3] and len(rows(te, ttype='weight'))==2
    te.close()


@case('300 nested modules', "A deeply nested model that works without torchember also works armed: during a pass, Python's recursion limit is higher.")
def nested():
    model = nn.Identity()
    for _ in range(300): model = nn.Sequential(model)
    limit = sys.getrecursionlimit()
    answer = {}
    def run():
        try: answer['bare'] = bool(model(torch.ones(1)).any())
        except RecursionError as e: answer['bare'] = type(e)
        te = torchEmber(model)
        try: answer['armed'] = bool(model(torch.ones(1)).any())
        except RecursionError as e: answer['armed'] = type(e)
        answer['rows'] = len(te.t.lines())
        te.close()
    t = threading.Thread(target=run) # In a new thread, the stack is empty, so the recursion depth is known
    t.start(); t.join()
    assert answer['bare']==answer['armed'] and (answer['armed'] is RecursionError or answer['rows']==602), answer
    assert sys.getrecursionlimit()==limit


# ---- modes of torch, such as checkpointing, inference mode and torch.compile

@case('activation checkpointing', 'With both kinds of checkpoints, gradients are equal, and the recomputation is not recorded.')
def checkpointing():
    class Net(nn.Module):
        def __init__(self, mode): super().__init__(); self.mode,self.a,self.b = mode,mlp(),nn.Linear(2, 2)
        def forward(self, x):
            y = self.a(x) if self.mode is None else torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=self.mode)
            return self.b(y)
    torch.manual_seed(0)
    plain,inp = Net(None),x().requires_grad_()
    train_once(plain, inp)
    for mode in (True, False):
        model = Net(mode)
        model.load_state_dict(plain.state_dict())
        te = torchEmber(model)
        train_once(model, inp)
        assert all(torch.equal(p.grad, q.grad) for p,q in zip(plain.parameters(), model.parameters(), strict=True))
        assert len(outputs(te))==6 and len(te.mt_log)==12
        te.close()


@case('autocast', 'With bfloat16 on the CPU, outputs are bfloat16 and equal. Statistics are computed without autocast.')
def autocast():
    model,inp = mlp(),x(50)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        want = model(inp)
        te = torchEmber(model)
        got = model(inp)
    assert torch.equal(got, want)
    r = outputs(te)[-1]
    assert r['dtype']=='bfloat16' and abs(r['std']-want.double().std())<1e-6*r['std']
    te.close()


@case('no_grad and inference_mode', 'A model can be armed and called inside these modes, before and after training passes.')
def inference():
    model = mlp()
    with torch.inference_mode(): te = torchEmber(model); model(x())
    train_once(model, x())
    with torch.no_grad(): model(x())
    with torch.inference_mode(): model(x())
    assert len(outputs(te))==16
    te.close()


@case('torch.func', '`functional_call`, `grad`, and `vmap` over samples and over weights give equal results. A row has the statistics of all samples together.')
def functional():
    model,inp = mlp(),x(6)
    ps = dict(model.named_parameters())
    f = lambda ps, inp: torch.func.functional_call(model, ps, (inp,)).square().sum()
    runs = [lambda: f(ps, inp), lambda: torch.func.grad(f)(ps, inp)['0.weight'], lambda: torch.vmap(model)(inp),
        lambda: torch.vmap(torch.func.grad(f), (None, 0))(ps, inp)['0.weight'],
        lambda: torch.vmap(f, (0, None))({k: torch.stack([v, 2*v]) for k,v in ps.items()}, inp)]
    want = [r() for r in runs]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        te = torchEmber(model, on_error='raise')
        got = [r() for r in runs]
    assert all(torch.equal(a, b) for a,b in zip(want, got, strict=True))
    by_step = [[r for r in outputs(te) if r['step']==s][0] for s in range(5)]
    assert all(r['shape'][-1]==8 for r in by_step) and abs(by_step[2]['mean']-by_step[0]['mean'])<1e-6
    te.close()


@case('trace, export, fx, make_fx', 'The traced graph and its results are those of a model that is not armed. The graph contains no operation of torchember.')
def traced():
    from torch.fx.experimental.proxy_tensor import make_fx
    model,inp = mlp().eval(),x()
    fresh = {'fx': lambda: torch.fx.symbolic_trace(model), 'export': lambda: torch.export.export(model, (inp,)).module(),
        'trace': lambda: torch.jit.trace(model, inp), 'make_fx': lambda: make_fx(model)(inp)}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        code = {k: f().code for k,f in fresh.items()}
        te = torchEmber(model)
        for k,f in fresh.items():
            m = f()
            assert m.code==code[k], k
            n = len(te.t.lines())
            te.disarm()
            assert torch.equal(m(inp), model(inp))
            assert len(te.t.lines())==n
            te.arm()
    te.close()


@case('scripted, traced and C-implemented forwards',
    'Results of `torch.jit.script`, `trace` and fx work as the model and as a part of it. So does a `forward` that is a builtin or a `staticmethod`.')
def scripted():
    class Builtin(nn.Module): forward = torch.relu
    class Static(nn.Module):
        @staticmethod
        def forward(x): return x+1
    inp = x()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        for part in (torch.jit.script(mlp()), torch.jit.trace(mlp(), inp), Builtin(), Static(), torch.fx.symbolic_trace(mlp())):
            for model in (part, nn.Sequential(part, nn.Identity())):
                want = model(inp)
                te = torchEmber(model)
                assert torch.equal(model(inp), want)
                assert outputs(te)[-1]['shape']==list(want.shape)
                te.close()
                assert torch.equal(model(inp), want)


@case('the signature of forward',
    '`inspect.signature`, the docstring and the annotations of `model.forward` do not change, for a class, an instance and a script.')
def signature():
    import inspect
    class Net(nn.Module):
        def forward(self, x:torch.Tensor, mask=None, *rest, flag:bool=False, **more) -> torch.Tensor:
            "Docstring of the user, which must survive arming"
            return x
    own,script = nn.Identity(),torch.jit.script(mlp())
    own.forward = lambda a, b=1: a
    for model in (Net(), mlp(), own, script, nn.TransformerEncoderLayer(4, 2, 4)):
        f = model.forward
        want = inspect.signature(f),f.__doc__
        te = torchEmber(model)
        assert (inspect.signature(model.forward), model.forward.__doc__)==want, (type(model), want, inspect.signature(model.forward), model.forward.__doc__)
        te.close()


@case('torch.compile',
    'A model that is armed before or after compiling has no graph breaks, as many graphs as without torchember, equal results, and the rows of eager mode.')
def compiled():
    from torch._dynamo.testing import CompileCounter
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.net = mlp()
        def forward(self, x): return self.net(x)
    model,inp = Net(),x()
    te = torchEmber(model)
    want = model(inp)
    torch._dynamo.reset()
    count = CompileCounter()
    f = torch.compile(model, backend=count, fullgraph=True)
    assert torch.equal(f(inp), want) and count.frame_count==1
    te.disarm()
    assert torch.equal(f(inp), want) and count.frame_count==2 # The disarmed model compiles to a second graph
    te.arm()
    assert torch.equal(f(inp), want) and count.frame_count==2 # The first graph is used again, without a new compilation
    steps = [[{k:v for k,v in r.items() if k not in ('ts', 'step')} for r in te.t.lines() if r['step']==s] for s in range(3)]
    assert steps[0]==steps[1]==steps[2], [(a, b) for other in steps[1:] for a,b in zip(steps[0], other, strict=False) if a!=b] or [*map(len, steps)]
    assert len(te.mt_log)==10, te.mt_log
    te.close()


@case('evaluation passes, with only_training=True',
    'Evaluation passes are not recorded and are no steps. Layers in `eval()` mode are recorded during a training pass.')
def only_training():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    te = torchEmber(model, only_training=True)
    model(x())
    model.eval()(x())
    model.train()
    model[1].eval()
    model(x())
    assert {r['step'] for r in te.t.lines()}=={0, 1} and len(outputs(te))==6
    te.close()


# ---- threads and processes

@case('two models in two threads', 'Each run has all of its own rows.')
def two_threads():
    tes = [torchEmber(mlp()) for _ in range(2)]
    def run(te):
        for _ in range(50): train_once(te.model, x())
    ts = [threading.Thread(target=run, args=(te,)) for te in tes]
    [t.start() for t in ts]; [t.join() for t in ts]
    for te in tes:
        assert {r['step'] for r in te.t.lines()}==set(range(50)) and len(outputs(te))==200
        te.close()


@case('one model in two threads', 'No row is lost or mixed with another row. The log of module calls of a pass has the calls of one thread.')
def one_model_two_threads():
    model = mlp()
    te = torchEmber(model)
    def run():
        for _ in range(50): model(x())
    ts = [threading.Thread(target=run) for _ in range(2)]
    [t.start() for t in ts]; [t.join() for t in ts]
    assert len(outputs(te))==400 and len(te.mt_log)==8
    assert not te.t.df[['module', 'ttype', 'tname', 'step', 'call']].duplicated().any()
    te.close()
    inside,go = threading.Event(),threading.Event()
    class Waits(nn.Identity):
        def forward(self, x):
            inside.set(); assert go.wait(30)
            return x
    te = torchEmber(nn.Sequential(Waits()))
    t = threading.Thread(target=te.model, args=(x(),))
    t.start(); assert inside.wait(30)
    te.model[0].forward,waits = nn.Identity().forward,te.model[0].forward
    for _ in range(3): te.model(x())
    te.model[0].forward = waits
    go.set(); t.join()
    assert len(te.mt_log)==2, te.mt_log # Only entry and exit of the first call: the three calls during it are not noted
    te.close()


@case('nn.DataParallel', 'An error names DistributedDataParallel, if torchEmber gets a `DataParallel`, or if a `DataParallel` contains an armed model.')
def data_parallel():
    model = mlp()
    for f in (lambda: torchEmber(nn.DataParallel(model)), lambda: torchEmber(model).model._replicate_for_data_parallel()):
        try: f()
        except TypeError as e: assert 'DistributedDataParallel' in str(e)
        else: raise AssertionError('not refused')
    model.disarm()


ddp = """
import torch
from torch import nn, distributed as dist
from torchember import torchEmber
dist.init_process_group('gloo')
torch.manual_seed(0)
for order in ('before', 'after'):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if order=='before': te = torchEmber(model)
    net = nn.parallel.DistributedDataParallel(model)
    if order=='after': te = torchEmber(net)
    opt = torch.optim.SGD(net.parameters(), .1)
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        opt.zero_grad()
        net(torch.randn(6, 4)).square().mean().backward()
        te.step()
        opt.step()
    w = [torch.empty_like(model[0].weight) for _ in range(2)]
    dist.all_gather(w, model[0].weight.detach())
    assert torch.equal(*w)
    te.close()
dist.destroy_process_group()
"""


@case('DistributedDataParallel',
    'With two processes (gloo), armed before and after wrapping, weights stay equal, and each rank has its own log with the same name.')
def distributed():
    from torchember import emberTracker
    with tempfile.TemporaryDirectory() as d:
        script = Path(d)/'train.py'
        script.write_text(ddp)
        got = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2', '--standalone', str(script)],
            env={**os.environ, 'TORCHEMBER_HOME': d, 'OMP_NUM_THREADS': '1'}, capture_output=True, text=True)
        assert got.returncode==0, got.stderr[-3000:]
        every = sorted(p.name for p in (Path(d)/'log').iterdir() if not p.name.endswith('_latest'))
        names = sorted({n.rsplit('.', 1)[0] for n in every})
        assert every==[f'{n}.rank{k}' for n in names for k in (0, 1)] and len(names)==2, every
        for logs in (every[:2], every[2:]):
            whole = [emberTracker(n, home=d).df for n in logs]
            norms = [t.loc[t.tname=='grad_norm', 'grad_norm'].tolist() for t in whole]
            assert len(norms[0])==5 and norms[0]==norms[1]
            tables = [t[t.ttype!='scalar'] for t in whole]
            for k,t in enumerate(tables):
                assert t['rank'].unique().tolist()==[k] and t.step.unique().tolist()==[0, 1, 2, 3, 4] and len(t)==5*(8+4+4)
            grads = [t[t.ttype=='weight_grad']['mean'].tolist() for t in tables]
            assert grads[0]==grads[1] and tables[0]['mean'].tolist()!=tables[1]['mean'].tolist()


@case('nothing left behind', 'After disarming, the garbage collector frees the model and the ember when the user has no reference to them.')
def collected():
    import gc
    import weakref
    model = mlp()
    te = torchEmber(model)
    train_once(model, x())
    te.close()
    refs = [weakref.ref(model), weakref.ref(te), weakref.ref(te.recorder)]
    del model, te
    gc.collect()
    assert [r() for r in refs]==[None]*3
