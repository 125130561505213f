"Rows of an evaluation belong to the training step before it, whose weights it uses. An evaluation does not begin a new step."
from tensor_rows import df, lines
import contextlib
import json

import pytest
import torch
from torch import nn

from torchember import torchEmber


def rows(te, ttype='input', module='model(Sequential)'):
    d = df(te)
    d = d[(d.ttype==ttype) & (d.module==module)]
    phase = d.phase.astype(object).where(d.phase.notna(), None) if 'phase' in d else [None]*len(d)
    return [*zip(d.step, phase, d.call, d['mean'], strict=True)]


def passes(model, *values, grad=True):
    with contextlib.nullcontext() if grad else torch.no_grad(): return [model(torch.full((2, 1), float(v))).sum() for v in values]


class Loop:
    "A training loop. Inputs of training have the values 0, 1, 2; inputs of an evaluation have the values `v` and `v+2`."
    def __init__(self, ends, compiled=False, trains_in_eval=False, **options):
        torch._dynamo.reset()
        self.model = nn.Sequential(nn.Linear(1, 1))
        self.run = torch.compile(self.model, backend='aot_eager', fullgraph=True) if compiled else self.model
        self.opt,self.ends,self.mode = torch.optim.SGD(self.model.parameters(), .1),ends,not trains_in_eval
        self.model.train(self.mode)
        ttypes = ('input', 'weight', 'weight_grad')
        self.te = torchEmber(self.model, stats=['mean'], ttypes=ttypes, **(dict(optimizer=self.opt) if ends=='optimizer' else {}), **options)
        if ends=='te.step': self.te.step()

    def train(self, i):
        passes(self.run, i)[0].backward()
        self.opt.step()
        if self.ends=='te.step': self.te.step()
        self.opt.zero_grad()

    def evaluate(self, v, grad=False):
        self.model.eval()
        passes(self.run, v, v+2, grad=grad)
        self.model.train(self.mode)


training = [(i, None, 0, i) for i in range(3)]
evaluations = [(i, 'eval', 0, 101+10*i) for i in range(3)]
in_turn = [r for pair in zip(training, evaluations, strict=True) for r in pair]


@pytest.mark.parametrize('ends', ['optimizer', 'te.step'])
@pytest.mark.parametrize('grad', [False, True], ids=['no_grad', 'with gradients'])
@pytest.mark.parametrize('how', ['', 'read', 'compiled', 'before', 'only the last'])
def test_an_evaluation_belongs_to_the_step_before(ends, grad, how):
    "An evaluation before the first step belongs to step 0. Its rows have a phase, and it adds no step and no weight rows."
    loop = Loop(ends, compiled=how=='compiled')
    if how=='before': loop.evaluate(1000, grad)
    for i in range(3):
        loop.train(i)
        if how!='only the last' or i==2: loop.evaluate(100+10*i, grad)
        if how=='read': assert rows(loop.te)==in_turn[:2*i+2]
    report = loop.te.close()
    assert rows(loop.te)==([*training, evaluations[2]] if how=='only the last' else in_turn)
    assert report['steps']==report['recorded']==3
    for ttype in ('weight', 'weight_grad'):
        assert [r[:3] for r in rows(loop.te, ttype, 'model(Sequential).0(Linear)')]==[(i, None, 0) for i in range(3) for _ in range(2)]


@pytest.mark.parametrize('ends', ['optimizer', 'te.step'])
def test_an_evaluation_before_all_steps_belongs_to_step_0(ends):
    loop = Loop(ends)
    loop.evaluate(1000)
    loop.train(0)
    assert loop.te.close()['steps']==1 and sorted(rows(loop.te), key=str)==[(0, 'eval', 0, 1001), (0, None, 0, 0)]


def test_a_row_of_step_0_supersedes_that_of_an_evaluation_before():
    "An evaluation before and one after step 0 both have rows in the file. The later row replaces the earlier one."
    loop = Loop('optimizer')
    loop.evaluate(1000)
    loop.train(0)
    loop.evaluate(100)
    loop.te.close()
    lines = [json.loads(line) for line in loop.te.t.log_path.read_text().splitlines()]
    lines = [r for r in lines if r.get('phase') and r['module']=='model(Sequential)']
    assert [(r['step'], r['mean'], r.get('supersedes')) for r in lines]==[(0, 1001, None), (0, 101, True)]
    assert rows(loop.te)==in_turn[:2]


@pytest.mark.parametrize('ends', ['optimizer', 'te.step'])
def test_a_second_evaluation_of_a_step_supersedes_the_first(ends):
    "The rows are read after each evaluation, so the earlier evaluation is already in the file."
    loop = Loop(ends)
    for i in range(2):
        loop.train(i)
        for v in (300, 200, 100+10*i):
            loop.evaluate(v)
            loop.te.t.refresh()
            assert rows(loop.te)==[*in_turn[:2*i+1], (i, 'eval', 0, v+1)]
    assert loop.te.close()['steps']==2 and rows(loop.te)==in_turn[:4]


@pytest.mark.parametrize('ends', ['optimizer', 'te.step'])
def test_te_step_after_an_evaluation_ends_no_step(ends):
    loop = Loop(ends)
    for i in range(3):
        loop.train(i)
        loop.evaluate(100+10*i)
        if ends=='te.step': loop.te.step()
    assert loop.te.close()['steps']==3 and rows(loop.te)==in_turn


@pytest.mark.parametrize('ends', ['optimizer', 'te.step'])
def test_a_model_can_be_trained_in_eval_mode(ends):
    "Training rows have no phase after the first step. A pass without gradients is an evaluation of the step before it."
    loop = Loop(ends, trains_in_eval=True)
    for i in range(3):
        loop.train(i)
        if i: loop.evaluate(100+10*i)
    assert loop.te.close()['steps']==3 and rows(loop.te)==[(0, 'eval', 0, 0), *in_turn[2:]]


@pytest.mark.parametrize('ends', ['optimizer', 'te.step'])
def test_steps_go_on_when_a_model_changes_to_eval_mode(ends):
    "A user may switch to eval mode to freeze normalization layers. Only the first step after the change has the phase 'eval'."
    loop = Loop(ends)
    for i in range(4):
        if i==2: loop.model.eval(); loop.mode = False
        loop.train(i)
    assert loop.te.close()['steps']==4 and rows(loop.te)==[(0, None, 0, 0), (1, None, 0, 1), (2, 'eval', 0, 2), (3, None, 0, 3)]


@pytest.mark.parametrize('ends', ['optimizer', 'te.step'])
def test_te_step_makes_steps_of_evaluations_if_nothing_trains(ends):
    "With te.step(), each evaluation is a step. With an optimizer that never steps, evaluations are no steps."
    loop = Loop(ends)
    for i in range(3):
        loop.evaluate(10*i)
        if ends=='te.step': loop.te.step()
    loop.te.close()
    assert rows(loop.te)==([(i, 'eval', 0, 10*i+1) for i in range(3)] if ends=='te.step' else [(0, 'eval', 0, 11)])


def test_a_pass_in_train_mode_without_gradients_belongs_to_the_open_step_and_is_not_merged():
    loop = Loop('optimizer')
    for i in range(2):
        loop.train(i)
        passes(loop.model, 10+i, grad=False)
    loop.te.close()
    assert rows(loop.te)==[(0, None, 0, 0), (1, 'no_grad', 0, 10), (1, None, 0, 1), (2, 'no_grad', 0, 11)]


def test_an_evaluation_is_a_step_where_every_pass_is():
    "Without an optimizer and without te.step(), each pass is a step, also a pass of an evaluation."
    loop = Loop('passes')
    for i in range(2): loop.train(i); loop.evaluate(100+10*i)
    loop.te.close()
    assert rows(loop.te)==[(0, None, 0, 0), (1, None, 0, 100), (2, None, 0, 102), (3, None, 0, 1), (4, None, 0, 110), (5, None, 0, 112)]


def test_an_evaluation_is_recorded_if_the_next_step_is():
    "An evaluation is recorded if the schedule selects the next step. With only_training, evaluations are never recorded."
    loop = Loop('optimizer', every=2)
    for i in range(3): loop.train(i); loop.evaluate(100+10*i)
    loop.te.close()
    assert rows(loop.te)==[training[0], evaluations[1], training[2]]
    loop = Loop('optimizer', only_training=True)
    for i in range(3): loop.train(i); loop.evaluate(100+10*i)
    assert loop.te.close()['steps']==3 and rows(loop.te)==training


def test_te_log_joins_the_step_before_and_log_model_the_next():
    "After an evaluation, te.log adds to the last step, and te.log_model and watched tensors add to the next step."
    loop = Loop('optimizer')
    loop.te.watch_tensor('t', torch.ones(1))
    loop.train(0)
    loop.evaluate(100)
    loop.te.log(loss=1.)
    loop.te.log_model()
    loop.evaluate(200)
    loop.train(1)
    loop.te.close()
    assert [(r['step'], r['phase'], r['loss']) for r in lines(loop.te) if r['ttype']=='scalar']==[(0, 'eval', 1.)]
    assert [r for r in rows(loop.te) if r[1] is None]==training[:2] and (0, 'eval', 0, 101) in rows(loop.te)
    assert [(r['step'], r.get('phase')) for r in lines(loop.te) if r['tname']=='t']==[(0, None), (1, None)]
    assert [r[:2] for r in rows(loop.te, 'weight', 'model(Sequential).0(Linear)')]==[(i, None) for i in range(2) for _ in range(2)]


@pytest.mark.parametrize('last', ['disarm', 'rearm'])
def test_disarmed_in_an_evaluation(last):
    loop = Loop('optimizer')
    loop.train(0)
    loop.evaluate(100)
    getattr(loop.te, last)()
    assert rows(loop.te)==in_turn[:2] and loop.te.recorder.step==1
    if last=='rearm':
        loop.train(1)
        assert rows(loop.te)==in_turn[:3]
    loop.te.close()


def test_the_pass_of_a_closure_ends_the_evaluation_before():
    "The optimizer step has already begun when the closure runs. Updates are relative to the weights before this step."
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    opt = torch.optim.SGD(model.parameters(), .5)
    te = torchEmber(model, optimizer=opt, stats=['mean'], ttypes=('input', 'update'))
    def closure():
        opt.zero_grad()
        passes(model.train(), 1)[0].backward()
    for i in range(2):
        opt.step(closure)
        passes(model.eval(), 100+i, grad=False)
    te.close()
    got = [(r['step'], r['ttype'], r.get('phase'), r['mean'], r.get('ratio')) for r in lines(te)]
    # the update is -1: learning rate .5 times a gradient of 2, from two inputs of 1
    assert got==[(0, 'input', None, 1, None), (0, 'update', None, -1, 1), (0, 'input', 'eval', 100, None),
        (1, 'input', None, 1, None), (1, 'update', None, -1, None), (1, 'input', 'eval', 101, None)]


def test_a_leaf_of_an_evaluation_gets_no_gradient_of_the_training():
    "A leaf tensor is the input of training and of evaluation. Only the training pass has an 'input_grad' row."
    model = nn.Linear(1, 1, bias=False)
    opt,x = torch.optim.SGD(model.parameters(), 0.),torch.ones(2, 1, requires_grad=True)
    with torchEmber(model, optimizer=opt, ttypes=('input_grad',), stats=['mean']) as te:
        for s in range(2):
            model(x).sum().mul(s+1).backward()
            opt.step()
            model.eval()(x)
            model.train()
    w = model.weight.item()
    assert [(r['step'], r['call'], r.get('phase'), r['mean']) for r in lines(te)]==[(0, 0, None, w), (1, 0, None, pytest.approx(2*w))]


def test_an_evaluation_left_out_costs_only_unreported_calls():
    "With `only_training`, the calls of an evaluation count as unrecorded calls, also if the step is recorded."
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    te = torchEmber(model, only_training=True)
    model(torch.ones(1, 2)).sum().backward()
    model.eval()
    with torch.no_grad(): model(torch.ones(1, 2))
    assert te.recorder.cost.calls=={True: 3, False: 3}
    te.close()
