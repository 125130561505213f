"The norm of all gradients and the learning rates have a scalar row in each step, equal to the values computed with torch."
import math

import numpy as np
import pytest
import torch
from looped import Net, batches, loss_of, momentum, seeded
from torch import nn
from torch.nn import utils

from torchember import read, torchEmber

both = ('weight_grad', 'unclipped_grad')


def norm_of(model):
    "Compute the norm of all gradients with torch in float64."
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return utils.get_total_norm([(g.to_dense() if g.is_sparse else g).detach().double() for g in grads]).item()


def train(model, opt, te, clip=None, micro=1, data=None, scaler=None, after=lambda te, step: None):
    "Train with a hand-written loop. Return an array: the gradient norms of each step, before and after clipping."
    norms = []
    for step,(x,y) in enumerate(data or batches()):
        for _ in range(micro):
            loss = loss_of(model, x, y)/micro
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None: scaler.unscale_(opt)
        before = norm_of(model)
        if clip: clip(model)
        norms.append((before, norm_of(model)))
        opt.step() if scaler is None else (scaler.step(opt), scaler.update())
        opt.zero_grad()
        after(te, step)
    return np.array(norms)


def scalars(te, tname, name): # return a dict: step -> value, from the scalar rows of this name
    df = te.t.df
    rows = df[(df.ttype=='scalar') & (df.tname==tname)]
    return {} if name not in rows else {int(s): v for s,v in zip(rows.step, rows[name], strict=True) if v==v}


def norms(te, name='grad_norm'): return scalars(te, 'grad_norm', name)


def test_the_norm_equals_that_of_torch_before_and_after_clipping():
    model = seeded(Net)
    with torchEmber(model, opt := momentum(model), ttypes=both) as te:
        expected = train(model, opt, te, lambda m: utils.clip_grad_norm_(m.parameters(), .01))
    assert norms(te)==pytest.approx(dict(enumerate(expected[:, 1])), rel=1e-6)
    assert norms(te, 'grad_norm_unclipped')==pytest.approx(dict(enumerate(expected[:, 0])), rel=1e-6)


def test_the_whole_row():
    model = seeded(Net)
    with torchEmber(model, opt := momentum(model), ttypes=['weight_grad']) as te: expected = train(model, opt, te)
    row = next(r for r in te.t.lines() if r['tname']=='grad_norm' and r['step']==1)
    assert row.pop('grad_norm')==pytest.approx(expected[1, 1], rel=1e-6) and isinstance(row.pop('ts'), str)
    assert row==dict(module='model(Net)', ttype='scalar', tname='grad_norm', step=1, call=0, dtype='float64')
    assert [r['tname'] for r in te.t.lines() if r['ttype']=='scalar' and r['step']==0]==['lr', 'grad_norm']


def test_the_norm_before_clipping_is_what_clip_grad_norm_returns():
    model,returned = seeded(Net),[]
    with torchEmber(model, opt := momentum(model), ttypes=both) as te:
        train(model, opt, te, lambda m: returned.append(utils.clip_grad_norm_(m.parameters(), .01).item()))
    assert norms(te, 'grad_norm_unclipped')==pytest.approx(dict(enumerate(returned)), rel=1e-5)


def test_gradients_that_were_not_clipped_are_part_of_both_norms():
    model = seeded(Net)
    with torchEmber(model, opt := momentum(model), ttypes=both) as te:
        expected = train(model, opt, te, lambda m: utils.clip_grad_norm_([next(m.parameters())], .01))
    assert norms(te, 'grad_norm_unclipped')==pytest.approx(dict(enumerate(expected[:, 0])), rel=1e-6)
    assert norms(te)==pytest.approx(dict(enumerate(expected[:, 1])), rel=1e-6)


def test_a_step_in_which_nothing_clips_has_no_norm_before_clipping():
    model = seeded(Net)
    with torchEmber(model, opt := momentum(model), ttypes=both) as te: train(model, opt, te)
    assert len(norms(te))==len(batches()) and not norms(te, 'grad_norm_unclipped')


@pytest.mark.parametrize('options', [dict(stats=['max']), dict(stats='numerics'), dict(store='parquet')], ids=str)
def test_the_norm_does_not_depend_on_the_statistics_and_the_store(options):
    model = seeded(Net)
    with torchEmber(model, opt := momentum(model), **options) as te: expected = train(model, opt, te)
    assert norms(te)==pytest.approx(dict(enumerate(expected[:, 1])), rel=1e-6)
    assert read(te.fname, tname='grad_norm').grad_norm.tolist()==pytest.approx(expected[:, 1].tolist(), rel=1e-6)


def test_micro_batches_have_one_norm():
    model = seeded(Net)
    with torchEmber(model, opt := momentum(model)) as te: expected = train(model, opt, te, micro=3)
    assert norms(te)==pytest.approx(dict(enumerate(expected[:, 1])), rel=1e-6)


def test_steps_that_te_step_ends():
    model = seeded(Net)
    opt,expected = momentum(model),[]
    with torchEmber(model) as te:
        for x,y in batches():
            for _ in range(2): loss_of(model, x, y).backward()
            expected.append(norm_of(model))
            opt.step()
            te.step()
            opt.zero_grad()
    assert norms(te)==pytest.approx(dict(enumerate(expected)), rel=1e-6) and not scalars(te, 'lr', 'lr')


def test_passes_that_are_steps_have_the_norm_of_the_step_before():
    model,expected = seeded(Net),[]
    with torchEmber(model) as te:
        for x,y in batches():
            model.zero_grad()
            model(x) # this pass begins after zero_grad has cleared the gradients of the step before
            loss_of(model, x, y).backward()
            expected.append(norm_of(model))
            model(x)
    found = norms(te)
    assert found and all(any(v==pytest.approx(e, rel=1e-6) for e in expected) for v in found.values())


def test_a_scaler_that_skips_a_step():
    model = seeded(Net)
    opt,scaler = momentum(model),torch.amp.GradScaler('cpu', init_scale=2.**10)
    first = next(model.parameters())
    first.register_hook(lambda g: torch.full_like(g, math.inf) if scaler.get_scale()==2.**10 else g)
    with torchEmber(model, opt, scaler=scaler, ttypes=both) as te: expected = train(model, opt, te, scaler=scaler)
    assert norms(te)==pytest.approx(dict(enumerate(expected[:, 1])), rel=1e-6) and norms(te)[0]==math.inf
    rows = [r for r in te.t.lines() if r['tname']=='grad_norm']
    assert [bool(r.get('skipped')) for r in rows]==[True]+[False]*(len(rows)-1) and rows[1]['grad_norm']<math.inf


def test_nan_gradients_give_a_norm_of_nan_that_the_line_names():
    model = seeded(Net)
    with torchEmber(model, opt := momentum(model), ttypes=['weight_grad']) as te:
        train(model, opt, te, lambda m: next(m.parameters()).grad.view(-1)[0].fill_(math.nan), data=batches(1))
    row, = [r for r in te.t.lines() if r['tname']=='grad_norm']
    assert math.isnan(row['grad_norm']) and row['nan']==1
    assert '"nonfinite":{"/grad_norm":"NaN"}' in te.t.log_path.read_text() or '"nonfinite":{"grad_norm":"NaN"}' in te.t.log_path.read_text()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed,self.out = nn.Embedding(7, 4),nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x): return self.out(self.frozen(self.embed(x)))


def test_tied_weights_count_once_and_frozen_ones_do_not():
    torch.manual_seed(0)
    model = Tied()
    with torchEmber(model, opt := torch.optim.SGD([p for p in model.parameters() if p.requires_grad], .1)) as te:
        model(torch.tensor([1, 2])).square().sum().backward()
        expected = model.embed.weight.grad.double().norm().item()
        opt.step()
    assert norms(te)=={0: pytest.approx(expected, rel=1e-6)}


def test_sparse_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True))
    with torchEmber(model, opt := torch.optim.SparseAdam(model.parameters())) as te:
        model(torch.tensor([3, 3, 5])).square().sum().backward()
        expected = model[0].weight.grad.to_dense().double().norm().item()
        opt.step()
    assert norms(te)=={0: pytest.approx(expected, rel=1e-6)}


def test_the_norm_of_two_optimizers_is_that_of_all_gradients():
    model = seeded(Net)
    first,*rest = model.parameters()
    opts = [torch.optim.SGD([first], .1), torch.optim.Adam(rest, .01)]
    with torchEmber(model, opts) as te:
        expected = []
        for x,y in batches():
            loss_of(model, x, y).backward()
            expected.append(norm_of(model))
            for o in opts: o.step(); o.zero_grad()
    assert norms(te)==pytest.approx(dict(enumerate(expected)), rel=1e-6)
    assert scalars(te, 'lr', 'lr/0')=={0: .1} and scalars(te, 'lr', 'lr/1')=={0: .01}


def test_a_compiled_model():
    model = seeded(Net)
    compiled = torch.compile(model, backend='aot_eager')
    with torchEmber(compiled, opt := momentum(model)) as te:
        expected = []
        for x,y in batches():
            loss_of(compiled, x, y).backward()
            expected.append(norm_of(model))
            opt.step(); opt.zero_grad()
    assert norms(te)==pytest.approx(dict(enumerate(expected)), rel=1e-6)


# ---- no norm is recorded if it would be wrong

def custom(te):
    @te.how_record('weight_grad')
    def stats(tensor): return {'largest': tensor.max()}


partly = {'some modules': (dict(include=nn.Linear), None), 'another tensor type': (dict(ttypes=['output', 'unclipped_grad']), None),
    "a function of the user's": ({}, custom)}


@pytest.mark.parametrize('options,prepare', partly.values(), ids=partly)
def test_there_is_no_norm_where_gradients_have_no_rows(options, prepare):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(12, 2))
    with torchEmber(model, opt := momentum(model), **options) as te:
        if prepare: prepare(te)
        for _ in range(2):
            model(torch.randn(4, 1, 8)).sum().backward()
            utils.clip_grad_norm_(model.parameters(), .1)
            opt.step()
    assert not norms(te) and not norms(te, 'grad_norm_unclipped') and scalars(te, 'lr', 'lr')


def test_a_part_whose_rest_is_frozen_has_its_norm_until_the_rest_is_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    with torchEmber(model, opt := momentum(model), include='1') as te:
        for step in range(3):
            if step==2: model[0].requires_grad_(True)
            model(torch.randn(4, 3)).sum().backward()
            opt.step()
    assert [*norms(te)]==[0, 1]


def test_a_module_that_appears_after_arming_is_part_of_the_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torchEmber(model, opt := momentum(model)) as te:
        for step in range(3):
            if step==1:
                model.append(nn.Linear(2, 2))
                opt.add_param_group({'params': model[2].parameters()})
            model(torch.randn(4, 3)).sum().backward()
            opt.step()
    assert norms(te).keys()=={0, 1, 2}
    df = te.t.df
    for step,n in norms(te).items():
        rows = df[(df.step==step) & (df.ttype=='weight_grad')]
        assert n==pytest.approx(math.sqrt(sum((r['mean']**2*m+r['std']**2*(m-1)) for _,r in rows.iterrows() for m in [math.prod(r['shape'])])), rel=1e-5)
        assert len(rows)==(6 if step else 4)


def test_a_schedule_leaves_steps_out():
    model = seeded(Net)
    with torchEmber(model, opt := momentum(model), every=2) as te: expected = train(model, opt, te)
    assert norms(te)==pytest.approx({i: n for i,n in enumerate(expected[:, 1]) if i%2==0}, rel=1e-6)


# ---- users may log numbers under the same names

def test_the_names_that_the_user_logs_are_the_user_s():
    model = seeded(Net)
    with torchEmber(model, opt := momentum(model), ttypes=['weight_grad']) as te:
        expected = train(model, opt, te, after=lambda te, step: te.log(grad_norm=-1., lr=-2.) if step>0 else None)
    n = len(batches())
    assert norms(te)==pytest.approx({0: expected[0, 1]}, rel=1e-6) and scalars(te, 'log', 'grad_norm')==dict.fromkeys(range(1, n), -1.)
    assert norms(te, 'recorded_grad_norm')==pytest.approx({i: expected[i, 1] for i in range(1, n)}, rel=1e-6)
    df = te.t.df
    assert not df[df.grad_norm.notna()].step.duplicated().any()


# ---- learning rates

def test_a_learning_rate_is_recorded_first_and_when_it_changes():
    model = seeded(Net)
    opt = torch.optim.SGD(model.parameters(), lr=.4)
    sched = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=.5)
    with torchEmber(model, opt) as te: train(model, opt, te, data=batches(6), after=lambda te, step: sched.step())
    assert scalars(te, 'lr', 'lr')=={0: .4, 2: .2, 4: .1}


def test_a_change_in_a_step_that_is_not_recorded_is_in_the_next_one_that_is():
    model = seeded(Net)
    opt = torch.optim.SGD(model.parameters(), lr=.4)
    sched = torch.optim.lr_scheduler.StepLR(opt, 3, gamma=.5)
    with torchEmber(model, opt, every=2) as te: train(model, opt, te, data=batches(6), after=lambda te, step: sched.step())
    assert scalars(te, 'lr', 'lr')=={0: .4, 4: .2}


def test_groups_have_names_or_numbers_and_may_come_later():
    model = seeded(Net)
    first,second,*rest = model.parameters()
    opt = torch.optim.SGD([first], lr=.4)
    def add(te, step):
        if step==1: opt.add_param_group({'params': [second], 'lr': .2, 'name': 'second'})
        if step==2: opt.add_param_group({'params': rest, 'lr': .1})
    with torchEmber(model, opt) as te: train(model, opt, te, data=batches(4), after=add)
    assert scalars(te, 'lr', 'lr')=={0: .4} and scalars(te, 'lr', 'lr/0')=={2: .4}
    assert scalars(te, 'lr', 'lr/second')=={2: .2} and scalars(te, 'lr', 'lr/2')=={3: .1}


def test_a_learning_rate_that_is_a_tensor():
    model = seeded(Net)
    opt = torch.optim.Adam(model.parameters(), lr=torch.tensor(.5), capturable=False, foreach=False)
    with torchEmber(model, opt) as te:
        train(model, opt, te, data=batches(4), after=lambda te, step: opt.param_groups[0]['lr'].mul_(.5) if step==1 else None)
    assert scalars(te, 'lr', 'lr')=={0: .5, 2: .25}


# ---- pages of a run without a logged loss are unchanged

def test_pages_do_not_take_a_norm_for_a_loss():
    from torchember.health.diagnose import load_history
    from torchember.show.run_summary import loss_curve
    model = seeded(Net)
    with torchEmber(model, opt := momentum(model)) as te: train(model, opt, te)
    assert load_history(te).loss is None and loss_curve(te.t.df, None) is None
    assert loss_curve(te.t.df, 'grad_norm')[1].tolist()==[*range(len(batches()))]
