"Passes that are no micro-batches: passes without gradients, calls by another model that shares a part, and checks of `torch.jit.trace`."
import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchember import diff, read, torchEmber

ENDS = ['optimizer', 'te.step']


def batch(v): return torch.full((2, 1), float(v))


def rows(te, path='0', ttype='input'):
    "Return step, phase, call and mean of each row of one module."
    found = [r for r in te.t.lines() if r['ttype']==ttype and te.modules[r['module']].path==path]
    return [(r['step'], r.get('phase'), r['call'], r['mean']) for r in found]


class Loop:
    "A training loop of a one-layer model. The inputs are constant, so the mean of a row shows the passes that are merged in it."
    def __init__(self, ends='optimizer', compiled=None, make=lambda: nn.Sequential(nn.Linear(1, 1)), **options):
        torch._dynamo.reset()
        self.model = make()
        self.run = torch.compile(self.model, backend=compiled, fullgraph=True) if compiled else self.model
        self.opt,self.ends = torch.optim.SGD(self.model.parameters(), .1),ends
        self.te = torchEmber(self.model, stats=['mean'], ttypes=('input', 'weight'), **(dict(optimizer=self.opt) if ends=='optimizer' else {}), **options)
        if ends=='te.step': self.te.step()

    def train(self, *values):
        for v in values: self.run(batch(v)).sum().backward()
        self.step()

    def step(self):
        self.opt.step()
        if self.ends=='te.step': self.te.step()
        self.opt.zero_grad()


@pytest.mark.parametrize('ends', ENDS)
@pytest.mark.parametrize('without', [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize('compiled', [None, 'eager', 'aot_eager'])
def test_passes_without_gradients_merge_with_each_other_and_not_with_micro_batches(ends, without, compiled):
    loop = Loop(ends, compiled)
    for i in range(3):
        for v in (100, 102):
            with without(): loop.run(batch(v+i))
        loop.train(i, i+2)
    report = loop.te.close()
    assert rows(loop.te)==[(i, *r) for i in range(3) for r in (('no_grad', 0, 101+i), (None, 0, 1+i))]
    assert rows(loop.te, ttype='weight')==[(i, None, 0, m) for i in range(3) for m in [r[3] for r in rows(loop.te, ttype='weight')][2*i:2*i+2]]
    assert report['steps']==3


@pytest.mark.parametrize('ends', ENDS)
def test_a_pass_without_gradients_between_micro_batches(ends):
    loop = Loop(ends)
    for i in range(2):
        loop.run(batch(i)).sum().backward()
        with torch.no_grad(): loop.run(batch(100))
        loop.train(i+2)
    loop.te.close()
    assert rows(loop.te)==[(i, *r) for i in range(2) for r in ((None, 0, i+1), ('no_grad', 0, 100))]


def test_each_pass_without_gradients_is_a_step_if_each_pass_is():
    loop = Loop('passes')
    for i in range(2):
        with torch.no_grad(): loop.run(batch(100+i))
        loop.train(i)
    loop.te.close()
    assert rows(loop.te)==[(0, None, 0, 100), (1, None, 0, 0), (2, None, 0, 101), (3, None, 0, 1)]


@pytest.mark.parametrize('ends', ENDS)
def test_a_model_that_is_trained_without_autograd_has_training_rows_after_its_first_step(ends):
    "An example is evolution strategies. After a pass with gradients, passes without gradients have the phase 'no_grad' again."
    loop = Loop(ends)
    for i in range(3):
        with torch.no_grad(): loop.run(batch(i)); loop.run(batch(i+2))
        for p in loop.model.parameters(): p.grad = torch.ones_like(p)
        loop.step()
    loop.train(7)
    with torch.no_grad(): loop.run(batch(100))
    loop.train(8)
    report = loop.te.close()
    assert rows(loop.te)==[(0, 'no_grad', 0, 1), (1, None, 0, 2), (2, None, 0, 3), (3, None, 0, 7), (4, 'no_grad', 0, 100), (4, None, 0, 8)]
    assert report['steps']==5 and {r[:2] for r in rows(loop.te, ttype='weight')}=={(i, None) for i in range(5)}


def test_only_training_leaves_out_passes_without_gradients():
    loop = Loop(only_training=True)
    for i in range(2):
        with torch.no_grad(): loop.run(batch(100))
        loop.train(i)
    assert loop.te.close()['steps']==2 and rows(loop.te)==[(0, None, 0, 0), (1, None, 0, 1)]


def test_the_first_forward_of_a_reentrant_checkpoint_is_a_training_pass():
    "A reentrant checkpoint runs its first forward without gradients. It is a training pass, unless it runs under no_grad."
    loop = Loop()
    for i in range(2):
        with torch.no_grad(): checkpoint(loop.run, batch(100).requires_grad_(), use_reentrant=True)
        checkpoint(loop.run, batch(i).requires_grad_(), use_reentrant=True).sum().backward()
        loop.step()
    loop.te.close()
    assert rows(loop.te)==[(i, *r) for i in range(2) for r in (('no_grad', 0, 100), (None, 0, i))]


class Agent(nn.Module):
    "Its parts are called directly: `online` is trained, and `target` is called without gradients."
    def __init__(self): super().__init__(); self.online,self.target,self.head = nn.Linear(1, 1),nn.Linear(1, 1),nn.Linear(1, 1)


@pytest.mark.parametrize('target_first', [False, True])
def test_parts_that_are_called_without_gradients_have_their_phase_and_do_not_divide_the_pass(target_first):
    loop = Loop(make=Agent)
    for i in range(2):
        if target_first:
            with torch.no_grad(): loop.model.target(batch(10+i))
        y = loop.model.online(batch(i))
        if not target_first:
            with torch.no_grad(): loop.model.target(batch(10+i))
        (loop.model.head(y)+loop.model.head(batch(i))).sum().backward()
        loop.step()
    assert loop.te.close()['steps']==2
    assert rows(loop.te, 'online')==[(i, None, 0, i) for i in range(2)] and rows(loop.te, 'target')==[(i, 'no_grad', 0, 10+i) for i in range(2)]
    assert [r[:3] for r in rows(loop.te, 'head')]==[(i, None, c) for i in range(2) for c in range(2)]


def test_readers_leave_out_rows_beside_the_training():
    "Plots, rules and sinks ignore rows of passes without gradients. `read` returns all rows."
    from torchember.health.history import History
    from torchember.show.select import training
    got = []
    loop = Loop(sinks=[lambda step, numbers: got.append((step, numbers))])
    for i in range(4):
        with torch.no_grad(): loop.run(batch(100))
        loop.train(i)
    loop.te.close()
    df = read(loop.te)
    inputs = df[df.ttype=='input']
    assert len(inputs)==4*4 and len(training(inputs))==4*2 and set(training(inputs)['mean'])=={0, 1, 2, 3}
    assert {s.phase for s in History(df).trained}=={None}
    assert diff(loop.te, loop.te).table.distance.max()==0


# ---- passes that torch.jit.trace runs to check a trace

@pytest.mark.parametrize('evaluates', [False, True])
def test_the_run_that_checks_a_trace_leaves_no_rows(evaluates):
    loop = Loop()
    loop.train(1)
    loop.model.train(not evaluates)
    torch.jit.trace(loop.model, batch(100))
    loop.model.train()
    loop.train(2)
    assert loop.te.close()['steps']==2 and rows(loop.te)==[(0, None, 0, 1), (1, None, 0, 2)]


def test_add_graph_leaves_no_rows(tmp_path):
    writer = pytest.importorskip('torch.utils.tensorboard').SummaryWriter(tmp_path)
    loop = Loop()
    loop.train(1)
    writer.add_graph(loop.model, batch(100))
    writer.close()
    loop.train(2)
    assert loop.te.close()['steps']==2 and rows(loop.te)==[(0, None, 0, 1), (1, None, 0, 2)]


# ---- two models that share a submodule

class Shares(nn.Module):
    def __init__(self, part): super().__init__(); self.first,self.part,self.last = nn.Linear(1, 1),part,nn.Linear(1, 1)
    def forward(self, x): return self.last(self.part(self.first(x)))


def scaled(model, by):
    with torch.no_grad(): model.first.weight.fill_(by); model.first.bias.zero_()
    return model


PARTS = {'activation': nn.Tanh, 'layer': lambda: nn.Linear(1, 1), 'block': lambda: nn.Sequential(nn.Linear(1, 1), nn.Tanh())}


@pytest.mark.parametrize('ends', [*ENDS, 'passes'])
@pytest.mark.parametrize('part', PARTS)
@pytest.mark.parametrize('other', ['before', 'after', 'with gradients', 'compiled'])
def test_calls_by_another_model_that_shares_a_part_have_no_rows(ends, part, other):
    shared = PARTS[part]()
    loop = Loop(ends, make=lambda: scaled(Shares(shared), 1.))
    teacher = scaled(Shares(shared), 50.).requires_grad_(False)
    if other=='compiled': teacher = torch.compile(teacher, backend='aot_eager')
    def ask():
        with contextlib.nullcontext() if other=='with gradients' else torch.no_grad(): teacher(batch(1))
    for i in range(2):
        if other!='after': ask()
        y = loop.run(batch(1)).sum()
        if other=='after': ask()
        y.backward()
        first = loop.model.first.weight.item()+loop.model.first.bias.item() # the input of the shared part
        loop.step()
        got = [r for r in rows(loop.te, 'part') if r[0]==i]
        assert [r[:3] for r in got]==[(i, None, 0)] and abs(got[0][3]-first)<1e-6
    assert loop.te.close()['steps']==2


class Whole(nn.Module):
    "A module that contains the recorded model, and calls its parts directly."
    def __init__(self, agent): super().__init__(); self.agent,self.more = agent,nn.Linear(1, 1)
    def forward(self, x): return self.more(self.agent.head(self.agent.online(x)))


@pytest.mark.parametrize('outer', [Whole, lambda m: nn.Sequential(m.online, m.head), lambda m: nn.Sequential(m.online, m.target, m.head, nn.Linear(1, 1)),
    lambda m: torch.compile(nn.Sequential(m.online, nn.Tanh(), m.head), backend='aot_eager')], ids=['contains', 'of parts', 'more', 'compiled'])
def test_parts_that_a_module_calls_which_stands_for_the_root_keep_their_rows(outer):
    "The calling module contains the root or all of its parameters, or it has no parameters of its own."
    loop = Loop(make=Agent)
    loop.run = outer(loop.model)
    for i in range(2): loop.train(i)
    loop.te.close()
    assert rows(loop.te, 'online')==[(i, None, 0, i) for i in range(2)]


def test_parts_of_a_root_that_is_never_called_have_rows_once_its_weights_change():
    "Another module with own parameters trains the part. In the first step, this looks like another model."
    loop = Loop(make=Agent)
    loop.run = nn.Sequential(loop.model.online, nn.Linear(1, 1))
    for i in range(3): loop.train(i)
    loop.te.close()
    assert rows(loop.te, 'online')==[(i, None, 0, i) for i in (1, 2)]
