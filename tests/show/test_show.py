"Requirements of all pictures with real runs, and without torch"
import subprocess
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from torchember import (
    compare,
    exp_hist,
    out_of_range,
    overview,
    read,
    ridge,
    scalar_global_heatmap,
    scalar_line,
    summary,
    torchEmber,
    tree,
    updates,
)
from torchember.show.comparison import first_differences
from torchember.show.select import TensorSeries, grid, series, reduce_indices

root = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "Return a run of a small model in which the output of the last layer is NaN or infinite from step 6 on"
    home = tmp_path_factory.mktemp('home')
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    opt = torch.optim.Adam(model.parameters())
    kinds = ('input', 'output', 'weight', 'weight_grad', 'output_grad', 'optimizer', 'update')
    with torchEmber(model, optimizer=opt, stats='numerics', ttypes=kinds, name='seen', home=home) as te:
        for i in range(9):
            if i==6: model[2].weight.data[0, 0] = float('inf')
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward(); opt.step(); opt.zero_grad()
            te.log(loss=loss)
    return te


def finish(out):
    "Draw the figure of a picture completely, and close it"
    out.figure.canvas.draw()
    plt.close('all')


pictures = {'overview': overview, 'scalar_line': scalar_line, 'exp_hist': exp_hist, 'scalar_global_heatmap': scalar_global_heatmap, 'ridge': ridge,
    'tree': tree, 'updates': updates, 'out_of_range': lambda r: out_of_range(r, 'float8_e5m2'), 'compare': lambda r: compare([r, r])}


@pytest.mark.slow
@pytest.mark.parametrize('name', pictures)
@pytest.mark.parametrize('theme', ['default', 'dark_background'])
def test_each_picture_of_an_ember_a_tracker_and_a_table(run, name, theme):
    if name=='out_of_range': pytest.importorskip('ml_dtypes')
    with plt.style.context(theme):
        for source in (run, run.t, run.t.df): finish(pictures[name](source))
    assert matplotlib.rcParams['axes.titlelocation']=='center' # The picture has not changed this setting


def lightness(color): return np.dot(to_rgb(color), (.299, .587, .114))


@pytest.mark.parametrize('theme', ['default', 'dark_background'])
def test_every_text_can_be_read(run, theme):
    with plt.style.context(theme):
        for f in (overview, scalar_line, scalar_global_heatmap, updates):
            fig = f(run).figure
            fig.canvas.draw()
            back = lightness(fig.get_facecolor())
            for text in fig.findobj(matplotlib.text.Text):
                if text.get_text().strip(): assert abs(lightness(text.get_color())-back)>.2, (f.__name__, text.get_text())
            plt.close('all')


def test_overview_names_the_first_problem(run):
    title = overview(run).figure.get_suptitle()
    assert title.startswith('seen · first not finite: step 6, weight of 2.weight (1 +inf)')
    text = repr(summary(run))
    assert 'step 6' in text.splitlines()[0] and len(text.splitlines())==1+2+4
    assert summary(run).df['not finite'].tolist()==[2, 2, 3, 3]


def test_the_numbers_drawn_are_those_of_the_run(run):
    ax = scalar_line(run, '0', 'output', 'std')
    df = read(run)
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), df[(df.path=='0') & (df.ttype=='output')]['std'])
    mesh = scalar_global_heatmap(run, 'weight', 'rms').collections[0].get_array()
    rows = df[(df.ttype=='weight') & (df.path=='0') & (df.pname=='bias')]
    np.testing.assert_array_equal(mesh[1], rows['rms'])
    plt.close('all')


def test_pictures_work_without_torch(run):
    code = f"""if True:
        import sys
        sys.modules['torch'] = None
        import matplotlib; matplotlib.use('agg')
        from torchember import emberTracker, overview, summary, surface
        import pandas as pd
        t = emberTracker('seen', home={str(run.t.dir)!r})
        overview(t).figure.canvas.draw()
        print(summary(t))
        units = pd.DataFrame(dict(path='a', ttype='output', tname='x', step=[1, 2], UnitActivity=[[0., 1.], [0., .5]]))
        for kind in 'surface','heatmap': surface(units, 'UnitActivity', kind=kind).figure.canvas.draw()
    """
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=root)
    assert out.returncode==0, out.stderr
    assert 'step 6' in out.stdout


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=3000), st.integers(10, 200))
def test_thinning_keeps_extremes(values, n):
    y = np.array(values)
    bad = ~np.isfinite(y)
    keep = reduce_indices(np.arange(len(y)), y, bad, n)
    assert (np.diff(keep)>0).all() and keep[0]==0 and keep[-1]==len(y)-1
    ok = y[~bad]
    if len(ok): assert {ok.min(), ok.max()}<=set(y[keep])
    if bad.sum()<n: assert set(np.flatnonzero(bad))<=set(keep)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(3, 60), st.integers(1, 12), st.integers(1, 40), st.integers(0, 2**31))
def test_no_spike_is_lost_in_a_grid(layers, steps, most_rows, most_columns, seed):
    g = np.random.default_rng(seed)
    df = pd.DataFrame([{'path': f'l{i}', 'ttype': 'output', 'tname': 'output_0', 'step': s, 'call': 0, 'std': 1., 'nan': 0}
        for s in range(steps) for i in range(layers)])
    at = g.integers(len(df))
    df.loc[at, 'std'] = 1e6
    df.loc[g.integers(len(df)), 'nan'] = 1
    made = grid(series(df, 'std'), most_rows, most_columns)
    assert made.value.shape==(min(layers, most_rows), min(steps, most_columns))
    assert (made.value==1e6).sum()==1 and made.bad.sum()==1 and sum(len(m) for m in made.members)==layers


def lines_of(*ys):
    "Return a `Series` of paths a, b, ..., with a value per step"
    row,step = np.indices((len(ys), len(ys[0]))).reshape(2, -1)
    return TensorSeries([*'abcdefgh'[:len(ys)]], row, step, np.concatenate(ys), np.zeros(len(row), bool))


def test_a_cell_of_several_steps_has_the_most_unusual_value():
    "A cell for several steps shows the value farthest from the median of its tensor, on a log scale in both directions"
    low,high = np.array([1., 1., 1., 1e-6, 1., 1., 1.1, 1.]),np.array([1., 1e6, 1., 1., 1., 1., 1., .9])
    assert grid(lines_of(low, high), most_columns=2).value.tolist()==[[1e-6, 1.1], [1e6, .9]]


def test_small_values_are_compared_relatively():
    "`first_differences` compares relatively, and returns the first different step of each layer"
    one = np.array([1e-9, 1e-9, 1e-9])
    assert first_differences([lines_of(one, one), lines_of(one*[1, 2, 5], one*[1, 1, 3])])=={'a': 1, 'b': 2}
    assert first_differences([lines_of(one), lines_of(one)])=={'a': None}


def test_out_of_range_of_a_run_with_numerics(run):
    "`out_of_range` draws the formats that the exponent counts cover. Its label says 'or zero' if zeros were not counted separately"
    pytest.importorskip('ml_dtypes')
    axes = out_of_range(run)
    assert [a.get_title('left') for a in axes]==['float8_e4m3fn', 'float8_e5m2'] and 'or zero' in axes[0].figure.get_supxlabel()
    with pytest.raises(ValueError, match='float16 needs -24'): out_of_range(run, 'float16')
    with pytest.raises(ValueError, match='needs a number format'): out_of_range(run, [])
    plt.close('all')


@pytest.mark.parametrize('more', [[], ['shape']])
def test_zeros_fit_every_format(tmp_path, more):
    "Half of the outputs of a ReLU are zero, and zeros are not out of range of any format"
    pytest.importorskip('ml_dtypes')
    with torchEmber(torch.nn.ReLU(), stats=['zero_frac', 'exponents', *more], ttypes=('output',), home=tmp_path) as te:
        te.model(torch.linspace(-1, 1, 64))
        te.step()
    ax = out_of_range(te, 'float8_e5m2')
    assert all(p.get_width()==0 for p in ax.patches) and 'or zero' not in ax.figure.get_supxlabel()
    plt.close('all')


def test_pictures_draw_into_axes_of_the_user(run):
    "Pictures accept axes of a subfigure and keep its title. A small tree shows short names"
    pytest.importorskip('ml_dtypes')
    fig = plt.figure(figsize=(12, 6), layout='constrained')
    fig.suptitle('mine')
    part,other = fig.subfigures(1, 2)
    part.suptitle('a half')
    top,low = part.subplots(2)
    overview(run, ax=top)
    out_of_range(run, 'float8_e5m2', ax=low)
    top,low = other.subplots(2, 4)
    axes = [updates(run, ax=top[0]), ridge(run, ax=top[1]), tree(run, ax=top[2])]
    compare([run, run], ax=low)
    fig.canvas.draw()
    assert (fig.get_suptitle(), part.get_suptitle(), other.get_suptitle())==('mine', 'a half', '')
    assert all(len(t.get_text())<11 for t in axes[2].texts if 'finite' not in t.get_text())
    plt.close('all')


@pytest.mark.parametrize(('value', 'message'), [('text', "cannot be drawn: its first value is 'text', not a number"),
    ([1, 2], r'is a vector, not a number\. To draw it: surface\('), ({'a': 1}, "cannot be drawn: its first value is {'a': 1}, not a number")])
def test_a_statistic_without_numbers_is_an_error(run, value, message):
    df = read(run).assign(mine=[value]*len(read(run)))
    for f in (lambda: scalar_line(df, scalar_metric='mine'), lambda: tree(df, 'mine'), lambda: overview(df, 'mine')):
        with pytest.raises(ValueError, match=f"The statistic 'mine' {message}"): f()
