"If a first `te.step()` comes after several passes, these passes become one step, with the rows of a run that called te.step() from the start."
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

from torchember import emberTracker, every, torchEmber
from torchember.recorder.steps import ProvisionalSteps


class Parts(nn.Module):
    "A model whose second layer `b` is left out if `short` is True."
    def __init__(self):
        super().__init__()
        self.a,self.b,self.norm = nn.Linear(3, 4),nn.Linear(4, 4),nn.BatchNorm1d(4)

    def forward(self, x, short=False):
        y = self.norm(self.a(x))
        return y if short else self.b(y).tanh()


def own(x): return {'most': x.detach().abs().max(), 'n': x.numel()}


grads = ('input_grad', 'output_grad')
ttypes = ('input', 'output', 'weight', 'weight_grad', *grads, 'buffer')


def rows(passes, known, steps=3, each=False, log=False, compiled=False, move=True, short=False, **kw):
    "Train a model. Return the rows of the log and of the latest step without their times, and the report."
    torch.manual_seed(0)
    m = Parts()
    o,te = torch.optim.SGD(m.parameters(), .1, momentum=.9),torchEmber(m, **kw)
    run = torch.compile(m, backend='aot_eager') if compiled else m
    if known: te.step()
    for s in range(steps):
        outs = []
        for i in range(passes):
            outs.append(run(torch.randn(5, 3), short=short and i>0).square().mean()*(i+1))
            if each: outs.pop().backward()
            if log: te.log(**{f'loss_{i}': s+i/10})
        if outs: sum(outs).backward()
        te.step()
        if move: o.step()
        m.zero_grad()
    report = te.close()
    latest = te.t.latest_df
    df,latest = (d.drop(columns='ts').sort_values(list(key(d)), ignore_index=True) for d in (te.t.df, latest))
    return df, latest, report


def key(df): return [c for c in ('step', 'module', 'ttype', 'tname', 'pname', 'call', 'micro', 'backward') if c in df]


def same(a, b): pd.testing.assert_frame_equal(a[sorted(a)], b[sorted(b)], check_exact=False, rtol=1e-12, check_categorical=False)


cases = [dict(), dict(each=True), dict(log=True), dict(stats='numerics'), dict(short=True),
    dict(move=False), dict(log=True, each=True, stats=['mean', 'numel'])]

@pytest.mark.parametrize('passes', [1, 2, 3])
@pytest.mark.parametrize('case', cases, ids=lambda c: '-'.join(map(str, c)) or 'plain')
def test_passes_before_the_first_te_step_become_micro_batches(passes, case):
    (a,latest,report),(b,expected,told) = (rows(passes, known, ttypes=ttypes, **case) for known in (False, True))
    assert sorted(a.step.unique())==[0, 1, 2]
    assert not a.duplicated(key(a)).any()
    same(a, b)
    same(latest, expected)
    assert [report[k] for k in ('steps', 'recorded')]==[told[k] for k in ('steps', 'recorded')]


@pytest.mark.parametrize('passes', [2, 3])
def test_compiled(passes):
    (a,*_),(b,*_) = (rows(passes, known, compiled=True, ttypes=[t for t in ttypes if t not in grads]) for known in (False, True))
    same(a, b)


@pytest.mark.parametrize('passes', [2, 3])
def test_on_a_schedule_only_passes_in_the_log_are_joined(passes):
    "Passes of steps that the schedule does not select leave no rows in the joined step."
    df,_,report = rows(passes, False, every=every(2), steps=4)
    assert not df.duplicated(key(df)).any() and (df.step%2==0).all()
    assert report['recorded']==df.step.nunique()


@pytest.mark.parametrize('each', [True, False])
@pytest.mark.parametrize('only', [dict(ttypes=('weight_grad',)), dict(ttypes=('output',), include='b', short=True),
    dict(ttypes=('output',), include='b', short=True, log=True)], ids=['gradients', 'layer', 'numbers'])
def test_passes_without_measurements_are_joined(only, each):
    "The first pass may have no gradients yet, and later passes may not call the recorded layer."
    (a,_,report),(b,_,told) = (rows(3, known, each=each, **only) for known in (False, True))
    assert sorted(a.step.unique())==[0, 1, 2] and not a.duplicated(key(a)).any()
    same(a, b)
    assert report['steps']==told['steps']==3


def test_a_pass_that_was_read_stays_a_step():
    "If the user reads the rows after the first pass, this pass keeps its own step. Later passes are joined."
    m = nn.Linear(3, 1)
    te = torchEmber(m, ttypes=('input',))
    m(torch.ones(2, 3))
    assert te.t.df.step.tolist()==[0]
    for x in (2., 3.): m(torch.full((2, 3), x)).sum().backward()
    te.step()
    for x in (4., 6.): m(torch.full((2, 3), x)).sum().backward()
    te.step()
    assert te.close()['steps']==3 and te.t.df[['step', 'mean']].values.tolist()==[[0, 1], [1, 2.5], [2, 5]]


def test_custom_rows_of_joined_passes_are_numbered():
    "Rows of a user's function cannot be merged: each pass has its own row, with its number in the column `micro`."
    (a,*_),(b,*_) = (rows(2, known, stats=own) for known in (False, True))
    a,b = (d.assign(micro=d.micro.fillna(0).astype(int)) for d in (a, b))
    assert not a.duplicated(key(a)).any()
    same(a.sort_values(key(a), ignore_index=True), b.sort_values(key(b), ignore_index=True))


def test_passes_with_other_weights_stay_steps():
    m = nn.Linear(3, 1)
    o,te = torch.optim.SGD(m.parameters(), .1),torchEmber(m)
    for _ in range(4): # each pass is a step as long as te.step() is not called
        o.zero_grad()
        m(torch.ones(2, 3)).sum().backward()
        o.step()
    assert sorted(te.t.df.step.unique())==[0, 1, 2, 3]
    for _ in range(2):
        o.zero_grad()
        (m(torch.ones(2, 3))-m(torch.zeros(2, 3))).sum().backward()
        te.step()
        o.step()
    te.close()
    df = te.t.df
    assert sorted(df.step.unique())==[0, 1, 2, 3, 4, 5] and (df[df.ttype=='input'].numel.fillna(6)==[6]*4+[12]*2).all()


def test_an_evaluation_between_passes_is_not_joined():
    m = nn.Sequential(nn.Linear(3, 1), nn.Dropout())
    te = torchEmber(m, ttypes=('input',))
    m(torch.ones(2, 3))
    m.eval()
    m(torch.full((2, 3), 5.))
    m.train()
    m(torch.full((2, 3), 2.)).sum().backward()
    te.step()
    te.close()
    df = te.t.df
    assert df[df.path==''][['step', 'mean']].values.tolist()==[[0, 1], [1, 5], [2, 2]]


def test_too_many_passes_are_steps():
    m = nn.Linear(3, 1)
    te = torchEmber(m, ttypes=('input',))
    for _ in range(ProvisionalSteps.most+2): m(torch.ones(2, 3))
    te.step()
    assert te.close()['steps']==ProvisionalSteps.most+2 and te.t.df.step.nunique()==ProvisionalSteps.most+2


def test_the_first_pass_is_written_before_the_next_begins():
    "Only the first pass is written at once, because te.step() may join later passes. Without gradients, each pass is written."
    m = nn.Linear(3, 1)
    def lines(te):
        te.t.file.flush()
        return len(te.t.log_path.read_text().splitlines())
    te = torchEmber(m, ttypes=('output',))
    for _ in range(3): m(torch.ones(2, 3))
    assert lines(te)==1
    te.step()
    te.close()
    assert emberTracker(te.fname).df.step.tolist()==[0]
    te = torchEmber(m, ttypes=('output',))
    with torch.no_grad():
        for _ in range(3): m(torch.ones(2, 3))
    assert lines(te)==2
    te.close()


def test_rearming_between_passes_repeats_no_row():
    m = nn.Linear(3, 1)
    te = torchEmber(m, ttypes=('output',))
    for _ in range(2): m(torch.ones(2, 3))
    te.rearm()
    m(torch.ones(2, 3)).sum().backward()
    te.step()
    m(torch.ones(2, 3)).sum().backward()
    te.step()
    te.close()
    df = te.t.df
    assert not df.duplicated(key(df)).any() and df.step.is_monotonic_increasing and df.step.nunique()==df.step.max()+1


@pytest.mark.parametrize('brings', [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)], ids=str)
def test_passes_without_rows_count_as_passes(brings):
    "Some passes have no backward, so they have no rows. The steps are the same as with te.step() from the start."
    def got(known):
        m = nn.Linear(3, 1)
        te = torchEmber(m, ttypes=('output_grad',), stats=['mean', 'numel'])
        if known: te.step()
        for s in range(2):
            for i,b in enumerate(brings):
                y = m(torch.ones(2, 3)).sum()*(10*s+i+1)
                if b: y.backward()
            te.step()
        report = te.close()
        # ignore the remark about the number of passes before the first te.step()
        remarks = [r for r in report['remarks'] if 'belong' not in r]
        return te.t.df.reindex(columns=['step', 'call', 'mean', 'numel']).values.tolist(), report['steps'], report['recorded'], remarks
    assert got(False)==got(True)
    assert [r[0] for r in got(True)[0]]==([0, 1] if any(brings) else [])


def test_ends_and_first_step_fix_the_first_step_in_advance(tmp_path):
    "With ends='step', only te.step() ends a step, also the first one. The numbers of the steps begin with `first_step`."
    model = nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), .1)
    for optimizer in (None, opt):
        te = torchEmber(model, optimizer, ttypes=('output', 'weight_grad'), stats=['mean'], ends='step', first_step=7, home=tmp_path)
        for _ in range(2):
            # without ends='step', each of these passes would end a step
            for _ in range(3): model(torch.ones(1, 2)).sum().backward(); opt.step()
            te.step()
            opt.zero_grad()
        report,rows = te.close(),te.t.lines()
        assert [(r['step'], r['ttype'], r.get('numel')) for r in rows if r['tname'] in ('output_0', 'grad_0')]== \
            [(s, *of) for s in (7, 8) for of in (('output', 3), ('weight_grad', None))]
        assert report['steps']==2
    with pytest.raises(ValueError, match="ends must be 'step'.* got 'optimizer'"): torchEmber(model, ends='optimizer')
    for n in (-1, 1., True, '1'):
        with pytest.raises(ValueError, match='first_step must be an integer of at least 0'): torchEmber(model, first_step=n)


def test_a_run_continues_at_the_step_of_a_checkpoint(tmp_path):
    "A resumed run may skip step numbers. An error is raised if `first_step` is a step that the log already contains."
    model = nn.Linear(2, 3)
    def go(n, **kw):
        with torchEmber(model, name='r', include='', ttypes='output', stats='mean', home=tmp_path, **kw) as te:
            for _ in range(n): model(torch.ones(1, 2))
        return [r['step'] for r in te.t.lines()]
    assert go(3)==[0, 1, 2]
    log = Path(emberTracker('r', tmp_path).log_path).read_bytes()
    for first in (0, 2):
        with pytest.raises(ValueError, match=rf"'r' already contains steps up to 2, .* first_step={first}\. Leave out first_step to continue at 3"):
            go(1, resume=True, first_step=first)
        assert Path(emberTracker('r', tmp_path).log_path).read_bytes()==log
    assert model(torch.ones(1, 2)) is not None and 'forward' not in vars(model)
    assert go(2, resume=True, first_step=7)==[0, 1, 2, 7, 8]
    assert go(2, resume=True)==[0, 1, 2, 7, 8, 9, 10]
    assert go(3, resume=True, first_step=11, every=3)==[0, 1, 2, 7, 8, 9, 10, 12]
    assert go(1, resume=True, first_step=13)==[0, 1, 2, 7, 8, 9, 10, 12, 13]
