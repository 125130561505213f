"Pictures, reports and texts show the norm of all gradients in each step"
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn

from torchember import brief, overview, torchEmber
from torchember.ground.record import load_row
from torchember.frames.handle import Home
from torchember.show.live.following import FollowedLog, KeptLines
from torchember.show.page.data import page_of

types = ('output', 'weight', 'weight_grad')


def trained(name, steps=6, loss=True, bad=None, ttypes=types):
    "Return the ember of a finished training of a small model; one batch contains NaN"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), .01)
    with torchEmber(model, opt, name=name, ttypes=ttypes) as te:
        for i in range(steps):
            x = torch.randn(8, 3)
            if i==bad: x[0, 0] = float('nan')
            opt.zero_grad()
            out = model(x).square().mean()
            out.backward()
            if loss: te.log(loss=out)
            opt.step()
    return te


def drawn(ax):
    line = ax.lines[0]
    return ax.get_ylabel(), line.get_xdata().tolist(), line.get_ydata().tolist()


def recorded(te):
    df = te.t.df
    df = df[df.tname=='grad_norm']
    return 'grad_norm', df.step.tolist(), df.grad_norm.tolist()


@pytest.mark.parametrize('steps', [3, 300])
def test_overview_draws_the_norm_beside_the_loss(steps):
    te = trained(f'both{steps}', steps)
    top = overview(te)[0]
    second, = top.child_axes
    assert top.get_ylabel()=='loss' and drawn(second)==recorded(te) and second.get_yscale()=='log'
    assert second.yaxis.get_label_position()=='right' and second.get_xlim()==top.get_xlim()
    plt.close('all')


def test_overview_draws_the_norm_without_a_loss():
    te = trained('alone', loss=False)
    axes = overview(te)
    assert [a.get_ylabel() for a in axes]==['grad_norm', 'outputs', 'weight gradients'] and drawn(axes[0])==recorded(te) and not axes[0].child_axes
    plt.close('all')


def test_overview_has_no_second_axis_if_the_run_has_no_norm():
    top,_ = overview(trained('none', ttypes=('output',)))
    assert top.get_ylabel()=='loss' and not top.child_axes
    plt.close('all')


def test_overview_marks_steps_whose_norm_is_nan():
    te = trained('bad', loss=False, bad=3)
    top = overview(te)[0]
    assert top.lines[1].get_xdata().tolist()==[3, 4, 5] and 'not finite' in top.figure.get_suptitle()
    assert np.isfinite(drawn(top)[2]).tolist()==[True]*3+[False]*3
    top.figure.canvas.draw()
    plt.close('all')


def test_clearing_axes_of_the_user_removes_the_second_axis():
    "If the user clears the axes, as a live view does, `overview` draws the second axis again, only once"
    te,(_,ax) = trained('cleared'),plt.subplots()
    for _ in range(2):
        ax.clear()
        overview(te, ax=ax)
        top, = ax.child_axes
        assert len(top.child_axes)==1 and drawn(top.child_axes[0])==recorded(te)
    plt.close('all')


def test_a_live_view_keeps_norms_when_it_drops_rows(tmp_path):
    "A live view that drops rows keeps the smallest and the largest loss and norm of each bin of steps"
    log,n = FollowedLog('r', Home(tmp_path)),10_000
    def row(step, tname, **v): return {'module': 'm(N)', 'path': '', 'ttype': 'scalar', 'tname': tname, 'step': step, 'call': 0, **v}
    log.kept = KeptLines(8000)
    for s in range(n):
        log.add(row(s, 'log', loss=1./(s+1)))
        log.add(row(s, 'grad_norm', grad_norm=50. if s==777 else 1.+s%2))
    rows = [load_row(line) for _,line in log.kept.lines]
    norms_kept = {r['step']: r['grad_norm'] for r in rows if 'grad_norm' in r}
    assert len(rows)<=8000 and norms_kept[777]==50. and min(norms_kept.values())==1. and len(norms_kept)>1000
    assert sum('loss' in r for r in rows)>1000
    log.close()


def test_the_page_offers_the_norm_among_the_numbers():
    te = trained('page')
    numbers = {n['name']: n['step'] for n in page_of(te)['numbers']}
    assert numbers=={'loss': [*range(6)], 'grad_norm': [*range(6)], 'lr': [0]}


@pytest.mark.parametrize('bad,end', [(None, ''), (4, '; not finite at 2 steps, first at step 4')])
def test_a_brief_has_a_line_about_the_norm(bad, end):
    te = trained(f'brief{bad}', bad=bad)
    v = np.array(recorded(te)[2])
    ok = v[np.isfinite(v)]
    last = f'{v[-1]:.3g}'.replace('nan', 'NaN')
    line = f'- norm of all gradients (`grad_norm`): first {v[0]:.3g}, median {np.median(ok):.3g}, largest {ok.max():.3g}, last {last}{end}'
    assert line in brief(te).split('\n')


def test_a_brief_of_a_run_without_norms_has_no_such_line():
    assert 'norm of all gradients' not in brief(trained('without', ttypes=('output',)))
