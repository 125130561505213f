"Rules that run during a training: each finding is reported once, becomes a row, and can stop the training"
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchember import EmberWarning, TrainingStopped, diagnose, finding, read, rule, torchEmber
from torchember.health.rules import table
from torchember.health.watch import Pace, RuleWatch

due = Pace.due


@pytest.fixture(autouse=True)
def at_every_step(monkeypatch):
    "Let the rules run after each step from step 8 on, regardless of their cost."
    monkeypatch.setattr(Pace, 'due', lambda self, steps, recording: steps>=8)


@pytest.fixture
def own_rules():
    "Remove rules that a test has registered."
    before = dict(table)
    yield
    table.clear()
    table.update(before)


def model(dead=True):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    if dead: nn.init.constant_(m[2].bias, -10)
    return m


def train(te, m, opt, n=40, wait=None, step=False):
    "Run a training. Return the number of steps that were finished before an exception."
    for i in range(n):
        try:
            loss = F.cross_entropy(m(torch.rand(16, 8)), torch.randint(4, (16,)))
            te.log(loss=loss)
            loss.backward()
            if step: te.step()
            opt.step()
            opt.zero_grad()
        except TrainingStopped: return i
        if wait: wait(i)
    return n


def until_told(te):
    "Return a function that waits until the rules have received all rows."
    def wait(i): te.t.barrier(); te.t.file.listeners.wait()
    return wait


def ember(m, opt, **kwargs): return torchEmber(m, optimizer=opt, **kwargs)


def adam(m): return torch.optim.Adam(m.parameters(), 1e-3)


def test_what_they_see_is_said_once_and_is_a_row_of_the_run():
    m = model()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        te = ember(m, opt := adam(m), rules='default', name='dead')
        train(te, m, opt, wait=until_told(te))
        report = te.close()
    zeros = [str(w.message) for w in said if 'is zero for all samples' in str(w.message)]
    assert len(zeros)==1 and all(issubclass(w.category, EmberWarning) for w in said)
    rows = read('dead', ttype='finding')
    row = rows[rows.rule=='dead_units']
    assert row[['severity', 'path', 'step', 'first_step']].values.tolist()==[['error', '2', 0, 0]]
    assert report['rules']>0 and 'rules: ' in repr(report) and any('is zero for all samples' in r for r in report['remarks'])
    assert diagnose('dead').iloc[0].text==row['text'].iloc[0]
    assert (read('dead').groupby('ttype', observed=True).size()[['input', 'output', 'weight', 'scalar']]>0).all()


def test_findings_are_no_rows_of_the_latest_step():
    m = model()
    te = ember(m, opt := adam(m), rules='default', on_finding=lambda f: None, name='latest')
    train(te, m, opt, wait=until_told(te))
    te.close()
    assert set(te.t.latest_df['step'])=={39} and 'finding' not in set(te.t.latest_df['ttype'])


@pytest.mark.parametrize('how', ['optimizer', 'step', 'passes'])
def test_an_error_ends_the_training_where_a_step_ends(how):
    m,said = model(),[]
    opt = adam(m)
    te = torchEmber(m, rules='default', on_finding='stop', **({'optimizer': opt} if how=='optimizer' else {}))
    with pytest.warns(EmberWarning, match='is zero for all samples'):
        n = train(te, m, opt, wait=until_told(te), step=how=='step')
        te.close()
    assert 7<=n<15
    assert not any('forward' in x.__dict__ for x in m.modules())
    assert read(te.fname)['step'].max()>=n-1
    m(torch.rand(2, 8)) # The model still works after the exception
    assert not said


def test_a_healthy_training_is_not_stopped():
    m = model(dead=False)
    te = ember(m, opt := adam(m), rules='default', on_finding='stop')
    assert train(te, m, opt, wait=until_told(te))==40
    assert te.close()['remarks']==[]
    rows = read(te.fname)
    # Only 'info' findings are right, because random labels cannot be learned
    assert set(rows['severity'].dropna() if 'severity' in rows else ())<={'info'}


def test_a_function_is_called_in_another_thread_and_may_fail():
    m,found,threads = model(),[],set()
    def f(one):
        found.append(one)
        threads.add(threading.current_thread())
        raise ValueError('mine')
    te = ember(m, opt := adam(m), rules='default', on_finding=f)
    with pytest.warns(EmberWarning, match='on_finding failed: ValueError: mine') as said:
        assert train(te, m, opt, wait=until_told(te))==40
        te.close()
    assert [one['rule'] for one in found][0]=='dead_units' and threading.main_thread() not in threads
    assert sum('on_finding failed' in str(w.message) for w in said)==1


def test_a_function_that_hangs_holds_nobody_up(monkeypatch):
    from torchember.store.listeners import Listener
    monkeypatch.setattr(Listener, 'patience', .2)
    go = threading.Event()
    m = model()
    te = ember(m, opt := adam(m), rules='default', on_finding=lambda f: go.wait(60), name='hangs')
    with warnings.catch_warnings(record=True):
        warnings.simplefilter('always')
        train(te, m, opt)
        try: te.t.barrier()
        finally: go.set()
        te.close()
    assert read('hangs', ttype='output')['step'].nunique()==40


def test_a_value_that_is_not_finite_is_seen_at_once(monkeypatch):
    monkeypatch.setattr(Pace, 'due', lambda self, steps, recording: False)
    m,found = model(dead=False),[]
    te = ember(m, opt := adam(m), rules='default', on_finding=found.append)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for i in range(20):
            x = torch.rand(16, 8)
            if i==5: x[3, 2] = float('nan')
            loss = F.cross_entropy(m(x), torch.randint(4, (16,)))
            loss.backward()
            opt.step()
            opt.zero_grad()
            until_told(te)(i)
            if i==6: early = list(found)
        te.close()
    assert [(f['rule'], f['path'], f['first_step']) for f in early]==[('not_finite', '', 5)]


def test_a_rule_of_ones_own_with_a_threshold(own_rules):
    @rule(severity='warning', needs='output')
    def too_hot(history, at=.5):
        "Report an output above a limit"
        for s in history.series('output'):
            if (s.abs_max>at).any(): yield finding(s, f"It reaches {s.abs_max.max():.2f}.", s.steps[s.abs_max>at][0])
    m,found = model(dead=False),[]
    te = ember(m, opt := adam(m), rules=[too_hot.but(at=.01)], on_finding=found.append)
    train(te, m, opt, wait=until_told(te))
    te.close()
    assert {f['rule'] for f in found}=={'too_hot'} and {f['path'] for f in found}=={'', '0', '1', '2', '3', '4'}
    assert not len(diagnose(te, rules=[too_hot.but(at=1e6)]))


@pytest.mark.parametrize('wrong', [dict(rules='dead_unit'), dict(rules=[3]), dict(rules='default', on_finding='shout'), dict(rules='default', on_finding=3)])
def test_wrong_arguments_change_nothing(wrong):
    m = model()
    with pytest.raises((ValueError, TypeError)): torchEmber(m, **wrong)
    assert not any('forward' in x.__dict__ for x in m.modules())


def test_without_rules_nobody_listens():
    m = model()
    te = ember(m, opt := adam(m))
    train(te, m, opt, 10)
    assert te.rules is None and 'rules' not in te.close()


def test_looking_keeps_to_its_share():
    pace,looks = Pace(share=.02),[]
    for step in range(1, 50_000): # Recording takes 1 ms per step, and each run of the rules takes 20 ms
        if due(pace, step, lambda step=step: step*1e-3): pace.note_cost(step, .02); looks.append(step)
    assert looks[:4]==[4, 8, 16, 32] and len(looks)>=10
    assert pace.took+.02<=.02*50 # .02 s more for the run of the rules at the end


@pytest.mark.parametrize('dies', [0, 5])
def test_a_fault_that_is_visible_at_step_8_is_reported_by_step_16(dies, monkeypatch):
    "This holds even if the rules have no time budget left"
    monkeypatch.setattr(Pace, 'due', lambda self, steps, recording: due(self, steps, lambda: 0.))
    m,found,seen = model(dead=False),[],{}
    te = ember(m, opt := adam(m), rules='default', on_finding=found.append)
    def wait(i):
        if i==dies: nn.init.constant_(m[2].bias, -10)
        until_told(te)(i)
        if 'dead_units' in {f['rule'] for f in found}: seen.setdefault('step', i)
    train(te, m, opt, wait=wait)
    te.close()
    assert seen['step']<=16


def test_nobody_is_told_of_steps_that_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(Pace, 'due', lambda self, steps, recording: due(self, steps, lambda: 0.))
    m,calls = model(),[]
    te = ember(m, opt := adam(m), rules='default', on_finding=lambda f: None)
    tell = te.rules.listening.f
    te.rules.listening.f = lambda step, lines: (calls.append(step), tell(step, lines))
    train(te, m, opt, wait=until_told(te))
    # The rules run after 4, 8, 16 and 32 steps, regardless of their cost
    assert len(calls)==4 and te.rules.kept.count==40
    te.close()
    assert [f['rule'] for f in te.rules.found][0]=='dead_units' # The last run of the rules uses all rows


def test_training_is_the_same_to_the_last_bit_with_rules():
    def weights(**kwargs):
        m = model(dead=False)
        opt = adam(m)
        te = ember(m, opt, **kwargs)
        torch.manual_seed(1)
        train(te, m, opt, wait=until_told(te))
        te.close()
        return [p.detach().clone() for p in m.parameters()]
    assert all(torch.equal(a, b) for a,b in zip(weights(), weights(rules='default'), strict=True))


def test_a_run_goes_on_with_rules():
    m = model()
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            te = ember(m, opt := adam(m), rules='default', name='goes on', resume=_==1)
            train(te, m, opt, 20, wait=until_told(te))
            te.close()
    assert read('goes on', ttype='output')['step'].nunique()==40 and diagnose('goes on').iloc[0].rule=='dead_units'
    time.sleep(0)
    assert isinstance(te.rules, RuleWatch)
