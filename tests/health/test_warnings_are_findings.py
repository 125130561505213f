"A warning during the training is also a finding of the finished run, and its advice works"
import json
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from torchember import EmberWarning, diagnose, read, torchEmber
from torchember.health.diagnose import load_history
from torchember.health.watch import StepsForRules, Pace, history_of_lines
from torchember.store.jsonl import emberTracker


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def adam(m): return torch.optim.Adam(m.parameters(), lr=.05)


def loss_of(m):
    x = torch.randn(6, 4)
    return (m(x)-x[:, :1]).square().mean()


def facts(found): return [tuple(f) for f in found[['severity', 'rule', 'first_step']].values.tolist()]


def warned(f):
    "Call a function. Return the texts of its warnings, and its result."
    with warnings.catch_warnings(record=True) as got:
        warnings.simplefilter('always')
        result = f()
    return [str(w.message) for w in got if issubclass(w.category, EmberWarning)],result


# ---- an optimizer that is replaced during the training

def lose_optimizer(**kwargs):
    "Train 20 steps, and then 40 steps with a new optimizer that the ember does not know"
    m = net()
    o = adam(m)
    te = torchEmber(m, optimizer=o, **kwargs)
    for i in range(60):
        if i==20: o = adam(m)
        loss = loss_of(m)
        te.log(loss=loss)
        loss.backward(); o.step(); o.zero_grad()
    te.close()
    return te


def test_an_optimizer_that_is_made_anew_is_a_finding_of_the_run():
    texts,te = warned(lambda: lose_optimizer(name='lost'))
    found = diagnose('lost')
    assert facts(found)==[('warning', 'recording', 20)] and not found.healthy
    assert found.text.tolist()==texts and 'So step 20 does not end' in texts[0]
    rows = read('lost', ttype='finding')
    assert rows[['rule', 'tname', 'severity', 'step', 'path', 'module']].values.tolist()==[['recording', 'stalled', 'warning', 20, '', 'model(Sequential)']]
    assert te.t.latest_df.ttype.isin(['finding']).sum()==0


def two_optimizers(m): return torch.optim.Adam(m[0].parameters(), lr=.01),torch.optim.SGD(m[2].parameters(), lr=.01)


def fit_two(who_steps, renew=lambda i, opts: opts, n=60, **kwargs):
    "Train with two optimizers. `who_steps(i)` gives the numbers of the optimizers that step after pass `i`; `renew` replaces optimizers"
    m = net()
    opts = two_optimizers(m)
    te = torchEmber(m, optimizer=list(opts), **kwargs)
    for i in range(n):
        opts = renew(i, opts)
        loss_of(m).backward()
        for o in who_steps(i): opts[o].step()
        m.zero_grad()
    te.close()
    return te


def renewed(*which): return lambda i, opts: tuple(two_optimizers_of[o](opts[o]) if i==20 and o in which else opts[o] for o in (0, 1))


two_optimizers_of = [lambda o: torch.optim.Adam(o.param_groups[0]['params'], lr=.02), lambda o: torch.optim.SGD(o.param_groups[0]['params'], lr=.02)]


@pytest.mark.parametrize('who_steps, which, waits, why, passes', [
    (lambda i: (0, 1), (0,), ' that torchEmber was given, Adam, has not', 'another optimizer has stepped 12 times', 13),
    (lambda i: (0, 1), (1,), ' that torchEmber was given, SGD, has not', 'another optimizer has stepped 12 times', 13),
    (lambda i: (0, 1), (0, 1), 's that torchEmber was given, Adam, SGD, have not', 'the weights change nevertheless', 14),
    (lambda i: (0, 1) if i<20 else (0,), (), ' that torchEmber was given, SGD, has not', 'another optimizer has stepped 12 times', 13)],
    ids=['first is renewed', 'second is renewed', 'both are renewed', 'second stops'])
def test_one_of_several_optimizers_that_stops_is_a_warning_and_a_finding(who_steps, which, waits, why, passes):
    texts,te = warned(lambda: fit_two(who_steps, renewed(*which), name='several'))
    found = diagnose(te)
    assert facts(found)==[('warning', 'recording', 20)] and found.text.tolist()==texts
    assert texts[0].startswith(f"The optimizer{waits} stepped since step 19, but {why}. So step 20 does not end, "
        f"and has {passes} training passes so far.")
    assert 'te.close()' in texts[0] and 'resume=True' in texts[0] and 'te.step()' in texts[0]


@pytest.mark.parametrize('turn', [4, 8, 15, 25])
def test_optimizers_that_take_long_turns_are_a_warning_and_a_finding(turn):
    texts,te = warned(lambda: fit_two(lambda i: (i//turn%2,), name='turns'))
    assert [f[:2] for f in facts(diagnose(te))]==[('warning', 'recording')] and len(texts)==1 and f"stepped {'since' if turn<20 else ''}" in texts[0]


@pytest.mark.parametrize('who_steps', [lambda i: (0, 1) if i%2 else (0,), lambda i: (0, 1) if i%5==4 else (0,), lambda i: (1, 0) if i%5==0 else (0,),
    lambda i: (0, 1) if i%16==15 else (0,), lambda i: (i%2,), lambda i: (0, 1) if i%16==15 else (), lambda i: (1, 0) if i%8==7 else (0,)],
    ids=['every 2nd', 'every 5th', 'every 5th, first', 'every 16th', 'by turns', 'both accumulate', 'every 8th'])
def test_optimizers_that_step_rarely_are_no_fault(who_steps):
    texts,te = warned(lambda: fit_two(who_steps, n=100, name='rarely'))
    assert texts==[] and 'recording' not in set(diagnose(te).rule)


def test_the_advice_for_renewed_optimizers_works():
    m = net()
    def train(te, opts, n):
        for _ in range(n):
            loss_of(m).backward()
            for o in opts: o.step()
            m.zero_grad()
        te.close()
    for resume in (False, True):
        train(torchEmber(m, optimizer=list(opts := two_optimizers(m)), name='advice', resume=resume), opts, 5)
    assert sorted(read('advice', ttype='weight').step.unique())==list(range(10))


def test_it_is_warned_of_once_beside_live_rules_and_on_finding_is_called(monkeypatch):
    monkeypatch.setattr(Pace, 'due', lambda self, steps, recording: steps>=8)
    texts,_ = warned(lambda: lose_optimizer(name='live', rules='default', on_finding='stop'))
    assert len([t for t in texts if 'does not step any more' in t])==1
    assert facts(diagnose('live'))==[('warning', 'recording', 20)] and len(read('live', ttype='finding'))==1
    found = []
    warned(lambda: lose_optimizer(name='called', rules='default', on_finding=found.append))
    assert [f['rule'] for f in found]==['recording']


def test_a_model_that_is_never_called_is_a_finding_of_the_run():
    m,other = net(),net()
    te = torchEmber(m, optimizer=(o := adam(m)))
    def train():
        for _ in range(4):
            loss = torch.func.functional_call(other, dict(m.named_parameters()), (torch.randn(6, 4),)).square().mean()
            loss.backward(); o.step(); o.zero_grad()
        te.close()
    texts,_ = warned(train)
    assert ('warning', 'recording', 2) in facts(diagnose(te)) and any('never called' in t for t in texts)


def test_gradients_that_are_missing_are_a_finding_of_the_run():
    m = net()
    te,o = torchEmber(m),adam(m)
    def train():
        for _ in range(5): loss_of(m).backward(); o.step(); o.zero_grad()
        te.close()
    texts,_ = warned(train)
    found = diagnose(te)
    assert found[found.rule=='recording'][['severity', 'text']].values.tolist()==[['info', texts[0]]] and found.healthy


def test_a_tensor_that_is_not_measured_is_a_finding_of_the_run():
    class Nested(nn.Module):
        def forward(self, x): return torch.nested.nested_tensor([x, x[:1]])
    m = nn.Sequential(nn.Linear(4, 4), Nested())
    te = torchEmber(m, ttypes=('output',))
    texts,_ = warned(lambda: [m(torch.randn(2, 4)) for _ in range(3)] and te.close())
    found = diagnose(te)
    assert found[found.rule=='recording'].text.tolist()==[t for t in texts if 'is not measured' in t]!=[] and found.healthy


def test_modules_that_are_changed_are_a_finding_of_the_run():
    m = net()
    te = torchEmber(m, optimizer=(o := adam(m)))
    def train():
        for i in range(4):
            if i==2: m[0].register_parameter('more', nn.Parameter(torch.zeros(2)))
            loss_of(m).backward(); o.step(); o.zero_grad()
        te.close()
    texts,_ = warned(train)
    assert [t for t in diagnose(te).text if 'has got, lost or changed' in t]==[t for t in texts if 'has got, lost or changed' in t]


def test_a_finding_of_an_own_rule_is_a_finding_of_the_run(monkeypatch):
    monkeypatch.setattr(Pace, 'due', lambda self, steps, recording: steps>=8)
    from torchember import finding
    def too_warm(h):
        if len(h.steps)>9: yield finding('', 'It is too warm.', 3, severity='warning')
    m = net()
    te = torchEmber(m, optimizer=(o := adam(m)), rules=['default', too_warm], name='own')
    def train():
        for _ in range(20): loss_of(m).backward(); o.step(); o.zero_grad()
        te.close()
    warned(train)
    assert [f for f in facts(diagnose('own')) if f[1]=='too_warm']==[('warning', 'too_warm', 3)]
    assert len([f for f in facts(diagnose('own', rules=['default', too_warm])) if f[1]=='too_warm'])==1


def test_a_run_of_jax_without_steps_is_a_finding():
    import jax.numpy as jnp

    from torchember import jaxember
    w = {'a': jnp.ones((2, 2))}
    def train():
        with jaxember.track(model_state=w, name='jax') as tracker: tracker.intercept(lambda: jaxember.probe('x', jnp.ones(3)))
    texts,_ = warned(train)
    assert ('warning', 'recording', 0) in facts(diagnose('jax')) and any('never called' in t for t in texts)


def test_a_healthy_run_has_no_such_finding():
    m = net()
    te = torchEmber(m, optimizer=(o := adam(m)))
    for _ in range(20): loss_of(m).backward(); o.step(); o.zero_grad()
    te.close()
    assert te.t.df.ttype.isin(['finding']).sum()==0


# ---- optimizers that step inside the backward pass

def train_in_backward(m, te, opts, steps=6, set_to_none=True):
    def hook(p): opts[p].step(); opts[p].zero_grad(set_to_none=set_to_none)
    handles = [p.register_post_accumulate_grad_hook(hook) for p in m.parameters()]
    for _ in range(steps):
        loss = loss_of(m)
        te.log(loss=loss)
        loss.backward()
        yield
    for h in handles: h.remove()
    te.close()


@pytest.mark.parametrize('set_to_none', [True, False])
@pytest.mark.parametrize('calls_step', [True, False])
def test_advice_for_optimizers_inside_the_backward_names_the_list_of_all(calls_step, set_to_none):
    m = net()
    te = torchEmber(m)
    texts,_ = warned(lambda: [te.step() for _ in train_in_backward(m, te, {p: torch.optim.Adam([p]) for p in m.parameters()}, 6, set_to_none) if calls_step])
    # With set_to_none=False, gradients of zero still exist at the next forward pass, so no warning is given
    assert set_to_none or calls_step or not texts
    assert all('Then pass all optimizers: torchEmber(model, optimizer=[...])' in t for t in texts)


def test_with_the_list_of_all_optimizers_each_backward_is_a_step_with_all_its_rows():
    m = net()
    opts = {p: torch.optim.Adam([p], lr=.05) for p in m.parameters()}
    te = torchEmber(m, optimizer=list(opts.values()), ttypes=('input', 'output', 'weight', 'weight_grad', 'output_grad', 'update', 'optimizer'), name='in')
    grads = {n: [] for n,_ in m.named_parameters()}
    for n,p in m.named_parameters(): p.register_hook(lambda g, n=n: grads[n].append(g.double().mean().item()))
    texts,_ = warned(lambda: list(train_in_backward(m, te, opts)))
    assert texts==[]
    d = te.t.df
    assert sorted(d.step.unique())==list(range(6)) and d[d.ttype!='scalar'].groupby('step').size().nunique()==1
    assert set(d.ttype)=={'input', 'output', 'weight', 'weight_grad', 'output_grad', 'update', 'optimizer', 'scalar'}
    for n,want in grads.items():
        path,_,pname = n.rpartition('.')
        got = d[(d.ttype=='weight_grad')&(d.path==path)&(d.pname==pname)]['mean']
        assert np.allclose(got, want, atol=1e-6), n
    assert diagnose('in').healthy


# ---- gradients that exist, but are zero

def zeros(zero_first):
    "Train with gradients of zero, from a loss of zero or from a `zero_grad` before te.step()."
    m = net()
    te,o = torchEmber(m),torch.optim.SGD(m.parameters(), lr=.1, weight_decay=.1)
    for _ in range(4):
        (loss_of(m)*(1 if zero_first else 0)).backward()
        if zero_first: o.step(); o.zero_grad(set_to_none=False); te.step()
        else: o.step(); te.step(); o.zero_grad()
    te.close()


@pytest.mark.parametrize('zero_first', [True, False])
def test_gradients_of_zero_are_not_called_missing(zero_first):
    texts,_ = warned(lambda: zeros(zero_first))
    said = [t for t in texts if 'te.step()' in t]
    assert len(said)==1 and said[0].startswith("te.step() found that all gradients are zero although the weights change.")
    assert 'no gradients' not in said[0]


def test_gradients_that_are_missing_are_called_missing():
    m = net()
    te,o = torchEmber(m),adam(m)
    def train():
        for _ in range(4): loss_of(m).backward(); o.step(); o.zero_grad(); te.step()
        te.close()
    assert [t.partition(' although')[0] for t in warned(train)[0] if 'te.step()' in t]==['te.step() found no gradients']


# ---- rules during the training, which check only some of the steps

def lines_of_run(name):
    "Return the rows of a run as a dict: step -> rows."
    by = {}
    for line in emberTracker(name).log_path.read_bytes().splitlines(keepends=True): by.setdefault(json.loads(line)['step'], []).append(line)
    return {s: b''.join(ls) for s,ls in by.items()}


class Masked(nn.Module):
    "A model with a mask of -inf in each step, and with a NaN from one step on"
    def __init__(self, first):
        super().__init__()
        self.body,self.mask,self.bad,self.head = nn.Linear(4, 4),nn.Identity(),nn.Identity(),nn.Linear(4, 1)
        self.first,self.step = first,0

    def forward(self, x):
        y = self.body(x)
        self.mask(torch.full((2, 2), -float('inf')))
        y = self.bad(y*float('nan') if self.step>=self.first else y)
        self.step += 1
        return self.head(y)


@pytest.mark.parametrize('first', [150, 303])
def test_the_first_step_that_is_not_finite_is_kept_and_blamed(first):
    torch.manual_seed(0)
    m = Masked(first)
    te = torchEmber(m, optimizer=(o := torch.optim.SGD(m.parameters(), lr=.01)), name='nan')
    for _ in range(500):
        loss = m(torch.randn(2, 4)).square().mean()
        te.log(loss=loss)
        loss.backward(); o.step(); o.zero_grad()
    te.close()
    kept = StepsForRules()
    kept.most_bytes = 60_000
    for s,piece in lines_of_run('nan').items(): kept.add(s, piece)
    assert len(kept.lines)<150 and kept.size<200_000
    live = [f for f in diagnose(history_of_lines(kept.select_lines(), te.t)).itertuples() if f.rule=='not_finite']
    whole = [f for f in diagnose(load_history('nan')).itertuples() if f.rule=='not_finite']
    assert [(f.path, f.first_step) for f in live]==[(f.path, f.first_step) for f in whole]==[('bad', first)]
    assert 'the computation of the loss' not in live[0].text


@pytest.mark.parametrize('kind,missing', [('mse_loss', True), ('l1_loss', False)])
def test_a_loss_that_is_logged_after_its_backward_has_no_targets(kind, missing):
    "The result of `diagnose` names the targets as not checked, and how to record them. An l1 loss never shows its targets"
    def train(name, before):
        "Train for four steps, and log the loss before or after the backward"
        model = nn.Linear(4, 3)
        opt = torch.optim.SGD(model.parameters(), .1)
        te = torchEmber(model, name=name, optimizer=opt)
        for _ in range(4):
            loss = getattr(nn.functional, kind)(model(torch.randn(8, 4)), torch.zeros(8, 3))
            if before: te.log(loss=loss)
            loss.backward()
            if not before: te.log(loss=loss)
            opt.step()
            opt.zero_grad()
        te.close()
        return diagnose(te)
    how = 'the targets of the loss (to record: te.log(loss=loss), before loss.backward())'
    assert how not in repr(train('early', True)) and (how in repr(train('late', False)))==missing
