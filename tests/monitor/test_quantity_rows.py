"Rows of a Monitor's quantities in a log, also vectors, do not change the plots of an ember's rows."
import json

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from torchember import (
    compare,
    dead_units,
    emberTracker,
    exp_hist,
    out_of_range,
    overview,
    query,
    read,
    report,
    ridge,
    scalar_global_heatmap,
    scalar_line,
    summary,
    surface,
    to_logframe,
    torchEmber,
    tree,
    updates,
    wide,
)
from torchember.show.controls import axis_columns, statistics_of
from torchember.show.live.live_view import Viewer
from torchember.show.page.data import page_of
from torchember.store import columns, lines

vectors = {'InputMean': [.1, .2, .3], 'UnitActivity': [0., .5, 1.]}


def quantities(t, step, i):
    "Write rows of quantities to a log: for tensors that the ember records, with equal or other names, and for other tensors."
    row = {'module': 'model(Sequential).0(Linear)', 'ts': t.ts, 'ttype': 'output', 'tname': 'output_0', 'step': step, 'call': 0, 'dtype': 'float32'}
    some = {'InputStd': 1.+i, **vectors}
    t + {**some, **row} # noqa: B018
    t + {**some, **row, 'tname': 'x'} # noqa: B018
    t + {**some, **row, 'ttype': 'input'} # noqa: B018
    t + {**vectors, **row, 'tname': 'y'} # noqa: B018
    t + {'Elsewhere': i, **row, 'module': 'model(Sequential).9(Linear)'} # noqa: B018
    t + {'Jumps': i/2, **row, 'ttype': 'weight', 'tname': 'weight_0', 'pname': 'weight'} # noqa: B018
    t + {'Jumps': i/2, **row, 'ttype': 'update', 'tname': 'w'} # noqa: B018


@pytest.fixture(scope='module', params=[None, 5])
def logs(request, tmp_path_factory):
    "Return the log of an ember, and the same log with added rows of quantities. With the parameter 5, step 5 has infinite values."
    home,other = (tmp_path_factory.mktemp(n) for n in ('alone', 'both'))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt, stats='numerics', ttypes=('output', 'weight', 'weight_grad', 'update'), name='run', home=home) as te:
        for i in range(8):
            loss = model(torch.full((5, 4), float('inf') if i==request.param else 1.)).square().mean()
            opt.zero_grad(); loss.backward()
            if i!=request.param: opt.step()
            te.log(loss=loss)
    alone,both = emberTracker('run', home),emberTracker('run', other)
    for line in alone.log_path.read_text().splitlines():
        row = json.loads(line)
        # the logged loss is the last row of a step; a refused pass belongs to the step before
        is_last = row['tname']=='log' and not row.get('skipped')
        # add quantities before the last row of the step
        if is_last and row['step']%3==0: quantities(both, row['step'], row['step'])
        both.logging(line)
        # add quantities after the last row of the step
        if is_last and row['step']%2==0: quantities(both, row['step'], row['step'])
    for step in 11,14: quantities(both, step, step)
    both.barrier()
    return alone, both


@pytest.fixture(params=['msgspec', 'no msgspec'])
def reader(request, monkeypatch):
    "Read logs in small blocks, with and without msgspec."
    if request.param=='msgspec': pytest.importorskip('msgspec')
    else: monkeypatch.setattr(columns, 'msgspec', lambda: None)
    monkeypatch.setattr(lines.line_blocks, '__defaults__', (b'', None, 1000))


pictures = {
    'overview': overview,
    'overview of a statistic': lambda t: overview(t, 'rms', ['output', 'weight']),
    'scalar_line': scalar_line,
    'scalar_line of all types': lambda t: scalar_line(t, '0', None, 'std'),
    'scalar_line, a panel for a layer': lambda t: scalar_line(t, '*', 'output', ['std', 'abs_max']),
    'scalar_global_heatmap': scalar_global_heatmap,
    'heat map of weights': lambda t: scalar_global_heatmap(t, 'weight', 'rm2', layer=['0', '2']),
    'tree': tree,
    'updates': updates,
    'compare': lambda t: compare([t, t]),
    'exp_hist': exp_hist,
    'ridge': ridge,
    'out_of_range': lambda t: out_of_range(t, 'float8_e5m2')}


def pixels(picture, of):
    fig = picture(of).figure
    fig.canvas.draw()
    image = np.asarray(fig.canvas.buffer_rgba()).copy()
    plt.close('all')
    return image


@pytest.mark.slow
@pytest.mark.parametrize('name', pictures)
def test_pictures(logs, name):
    alone,both = (pixels(pictures[name], t) for t in logs)
    np.testing.assert_array_equal(alone, both)


@pytest.fixture(scope='module')
def tables(logs): return [read(t) for t in logs]


@pytest.mark.parametrize('name', ['overview', 'scalar_line', 'scalar_global_heatmap', 'compare', 'ridge'])
def test_pictures_of_tables(logs, tables, name):
    alone,both = (pixels(pictures[name], t) for t in tables)
    np.testing.assert_array_equal(alone, both)
    pixels(pictures[name], logs[1].df)


def test_words(logs):
    alone,both = map(summary, logs)
    assert alone.title==both.title and alone.df.equals(both.df)
    got = summary(logs[1], tt='input', stats=['InputStd']).df
    assert got['InputStd last'].tolist()==[15] and got['steps'].tolist()==[7]


def test_tables(logs, reader, tables):
    alone,both = map(read, logs)
    for got,drawn in zip((alone, both), tables, strict=True): pd.testing.assert_frame_equal(got, drawn, check_exact=True)
    for stat,tt in ('std', 'output'),('std', 'weight'),('ratio', None): assert wide(alone, stat, tt).equals(wide(both, stat, tt))
    std = wide(both, 'InputStd', 'input')
    assert std.columns.tolist()==['0'] and std['0'].tolist()==[1+s for s in (0, 2, 3, 4, 6, 11, 14)]
    assert wide(both, 'loss').iloc[:, 0].tolist()==wide(alone, 'loss').iloc[:, 0].tolist()
    assert both['InputMean'].dropna().map(list).tolist()[0]==[.1, .2, .3]
    for f in wide,lambda t,s: scalar_line(t, tt='input', scalar_metric=s),lambda t,s: scalar_global_heatmap(t, 'input', s),lambda t,s: tree(t, s, 'input'):
        with pytest.raises(ValueError, match=r"a vector.* surface\("): f(both, 'InputMean')


def test_logframe(logs, reader):
    alone,both = (to_logframe(read(t)) for t in logs)
    assert 'InputMean' not in both['scalar_stats'] and len(both)>len(alone)
    whole = both['scalar_stats']['std'].notna().to_numpy() | (both['scalar_stats']['Jumps'].isna() & both['scalar_stats']['InputStd'].isna()).to_numpy()
    assert len(both[whole])>=len(alone)
    np.testing.assert_array_equal(pixels(scalar_line, alone), pixels(scalar_line, both))


@pytest.mark.slow
def test_page(logs, reader, tmp_path):
    alone,both = map(page_of, logs)
    kinds = [{k['ttype']: k for k in p['kinds']} for p in (alone, both)]
    for name,kind in kinds[0].items(): assert kinds[1][name]==kind
    assert set(kinds[1])-set(kinds[0])=={'input'} and set(kinds[1]['input']['stats'])=={'InputStd'}
    assert {k: both[k] for k in ('numbers', 'trouble', 'formats')}=={k: alone[k] for k in ('numbers', 'trouble', 'formats')}
    report(logs[1], tmp_path/'run.html')


def test_menu(logs):
    alone,both = map(read, logs)
    assert axis_columns(both)==axis_columns(alone)
    more = set(statistics_of(both))-set(statistics_of(alone))
    assert more=={'InputStd', 'Elsewhere', 'Jumps'} # quantities that are vectors are not in the menu


def test_live(logs):
    "The live picture is equal to the picture of the ember's rows alone."
    alone,both = (Viewer(t.dir, True, {}).answer('run', over=True)['png'] for t in logs)
    assert alone==both and alone[:4]==b'\x89PNG'


def test_quantities_alone(tmp_path):
    t = emberTracker('alone', tmp_path)
    for step in range(4): quantities(t, step, step)
    t.barrier()
    line,cells = lambda t: scalar_line(t, tt='input', scalar_metric='InputStd'),lambda t: scalar_global_heatmap(t, 'output', 'Elsewhere')
    for picture in overview,line,cells: pixels(picture, t)
    assert page_of(t)['kinds'] and str(summary(t))
    report(t, tmp_path/'page.html')


def test_vectors(logs, reader):
    t = logs[1]
    for run in t, read(t), t.df, t.log_path:
        units = dead_units(run, '0')
        assert units['path'].unique().tolist()==['0.output_0 (output)', '0.x (output)', '0.y (output)', '0 (input)']
        assert units['unit'].tolist()==[0, 1, 2]*4 and units['since'].isna().tolist()==[False, True, True]*4 and units['since'].max()==0
    for kind in 'surface','heatmap': assert len(pixels(lambda t, kind=kind: surface(t, 'InputMean', '0', 'Activation', kind), t))


def test_query(logs):
    pytest.importorskip('duckdb')
    assert query("SELECT count(*) n FROM log WHERE InputMean[1]=.1", logs[1].log_path)['n'].item()==36
