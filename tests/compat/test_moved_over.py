"Scripts for the libraries Track & Visualize, nnstat and torchember 0.2: each call works, or an error names the replacement"
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import torchember
from torchember import exp_hist, read_pickle, scalar_global_heatmap, scalar_line, track
from torchember.show.select import pick, rows_to_draw


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1,self.fc2 = nn.Linear(4, 4),nn.Linear(4, 1)

    def forward(self, x): return self.fc2(self.fc1(x).relu())


@pytest.fixture(scope='module')
def lf(tmp_path_factory):
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as env:
        env.setenv('TORCHEMBER_HOME', str(tmp_path_factory.mktemp('home')))
        m = Net()
        o = torch.optim.Adam(m.parameters())
        with track(m, optimizer=o, track_gradients=True) as t:
            for _ in range(4):
                o.zero_grad()
                m(torch.randn(8, 4)).sum().backward()
                o.step()
                t.step()
        return read_pickle(t.out_path)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close('all')


def names_of(lf, layer, tt):
    "Return the pair (path, parameter) of each selected tensor."
    rows = pick(rows_to_draw(lf), layer, tt)
    return sorted({*zip(rows['path'].astype(str), rows['pname'].astype(object).where(rows['pname'].notna(), '').astype(str), strict=True)})


# ---- selection of layers in a LogFrame, the table of Track & Visualize

@pytest.mark.parametrize('layer,wanted', [('fc1', [('fc1', 'weight')]), ('fc1.bias', [('fc1', 'bias')]),
    (re.compile('.*bias'), [('fc1', 'bias'), ('fc2', 'bias')]), (re.compile('fc2'), [('fc2', 'bias'), ('fc2', 'weight')]),
    (['fc1.bias', 'fc2'], [('fc1', 'bias'), ('fc2', 'weight')]), ('fc1*', [('fc1', 'bias'), ('fc1', 'weight')]),
    (['fc2', re.compile('fc1.bias$')], [('fc1', 'bias'), ('fc2', 'weight')])])
def test_layer_of_a_logframe_is_its_name(lf, layer, wanted):
    for tt in ('Weights', 'Weight_Gradients', 'Optimiser_State.exp_avg'): assert names_of(lf, layer, tt)==wanted
    scalar_line(lf, layer, 'Weights', 'std')


def test_regex_matches_names_from_the_start(lf):
    with pytest.raises(ValueError, match="'bias'.*fc1.bias"): scalar_line(lf, re.compile('bias'), 'Weights', 'std')
    assert names_of(lf, re.compile('fc1'), 'Activation')==[('fc1', '')]


def test_error_for_an_unknown_layer_lists_names(lf):
    with pytest.raises(ValueError, match='fc1.bias'): scalar_line(lf, 'fc1.bia', 'Weights', 'std')


def test_layer_of_a_run_is_a_path(lf):
    df = torchember.from_logframe(lf)
    assert names_of(df, 'fc1', 'Weights')==[('fc1', 'bias'), ('fc1', 'weight')]
    assert names_of(df, re.compile('c2$'), 'Weights')==[('fc2', 'bias'), ('fc2', 'weight')]


def test_each_name_has_a_panel(lf):
    fig = scalar_line(lf, ['fc1', 'fc1.bias'], 'Weights', 'std')
    assert [ax.get_title(loc='left') for ax in fig.axes]==['fc1', 'fc1.bias'] and [len(ax.lines) for ax in fig.axes]==[1, 1]
    std = lf[(lf.metadata.name=='fc1.bias') & (lf.metadata.tensor_type=='Weights')].scalar_stats['std'].to_numpy()
    np.testing.assert_allclose(fig.axes[1].lines[0].get_ydata(), std)


def test_exponents_of_the_weight_alone(lf):
    bars = exp_hist(lf, 'fc1', 'Weights', 2, dtype_annotation=False).patches
    one = lf[(lf.metadata.name=='fc1') & (lf.metadata.tensor_type=='Weights') & (lf.metadata.step==2)].exponent_counts
    counts = one[[c for c in one.columns if np.isfinite(c)]].to_numpy().ravel()
    assert sorted(b.get_height() for b in bars if b.get_height())==pytest.approx(sorted((counts/one.to_numpy().sum())[counts>0]))


# ---- axes of the heat map

def mesh_of(ax): return ax.collections[0].get_array()


@pytest.mark.parametrize('x,y,turned', [(('metadata', 'step'), ('metadata', 'name'), False), ('step', None, False), ('step', 'name', False),
    (('metadata', 'name'), ('metadata', 'step'), True), ('name', 'step', True), ('path', None, True)])
def test_axes_of_a_heat_map_accept_names_of_a_logframe(lf, x, y, turned):
    ax = scalar_global_heatmap(lf, 'Activation', 'rm2', x=x, y=y)
    wide = lf[lf.metadata.tensor_type=='Activation']
    want = np.stack([wide[wide.metadata.name==n].scalar_stats['rm2'].to_numpy() for n in dict.fromkeys(wide.metadata.name)])
    np.testing.assert_allclose(np.asarray(mesh_of(ax)), want.T if turned else want)
    assert (ax.get_ylabel() if turned else ax.get_xlabel())=='step' and ax.yaxis_inverted()
    names = [t.get_text() for t in (ax.get_xticklabels() if turned else ax.get_yticklabels())]
    assert {'fc1', 'fc2'}<=set(names)


@pytest.mark.parametrize('x,y', [('step', 'type'), (('metadata', 'step'), ('metadata', 'dtype')), ('nonsense', None), ('name', 'nonsense'), ('dtype', None)])
def test_unknown_axes_of_a_heat_map(lf, x, y):
    with pytest.raises(ValueError, match='axis|column of numbers'): scalar_global_heatmap(lf, 'Activation', 'rm2', x=x, y=y)


# ---- arguments that are passed to seaborn

def test_numbers_in_cells(lf):
    ax = scalar_global_heatmap(lf, 'Activation', 'std', annot=True, fmt='.3f', annot_kws={'fontsize': 5})
    cells = np.asarray(mesh_of(ax))
    texts = {t.get_text() for t in ax.texts}
    assert texts=={f'{v:.3f}' for v in cells.ravel()} and all(t.get_fontsize()==5 for t in ax.texts)
    for t in ax.texts: # Each number is written in its own cell
        j,i = (int(round(p)) if k==0 else int(p) for k,p in enumerate(t.get_position()))
        assert t.get_text()==f'{cells[i, j]:.3f}'
    turned = scalar_global_heatmap(lf, 'Activation', 'std', x='name', annot=True)
    assert len(turned.texts)==cells.size


def test_too_many_numbers_are_refused(lf):
    one = torchember.from_logframe(lf)
    many = pd.concat([one.assign(step=one['step']+4*i) for i in range(400)], ignore_index=True)
    with pytest.raises(ValueError, match='space for only 2,500. Draw fewer layers'): scalar_global_heatmap(many, 'Activation', 'std', annot=True)


def test_squares_lines_and_colour_bars(lf):
    ax = scalar_global_heatmap(lf, 'Activation', 'std', square=True, linewidths=.5, linecolor='red')
    assert ax.get_aspect()==1 and ax.collections[0].get_linewidth()[0]==.5
    other = scalar_global_heatmap(lf, 'Activation', 'std', inc=2, square=True)
    assert other.get_aspect()==2 # Each column covers two steps
    _,(a,b) = plt.subplots(1, 2)
    scalar_global_heatmap(lf, 'Activation', 'std', cbar_ax=b)
    assert b.get_ylabel() and not a.get_ylabel()
    assert len(scalar_global_heatmap(lf, 'Activation', 'std', cbar=False).figure.axes)==1


def test_row_names_as_in_seaborn(lf):
    n = len(np.asarray(mesh_of(scalar_global_heatmap(lf, 'Activation', 'std'))))
    labels = lambda **k: [t.get_text() for t in scalar_global_heatmap(lf, 'Activation', 'std', **k).get_yticklabels()]
    assert labels(yticklabels=[f'row {i}' for i in range(n)])==[f'row {i}' for i in range(n)]
    assert len(labels(yticklabels=2))==(n+1)//2 and labels(yticklabels=False)==[] and len(labels(yticklabels='auto'))==n
    with pytest.raises(ValueError, match='1 names were given'): labels(yticklabels=['one'])
    with pytest.raises(TypeError, match='xticklabels must be True or False'): labels(xticklabels=2)


@pytest.mark.parametrize('bad,message', [({'mask': 1}, 'takes no mask=: select layers with path='),
    ({'anot': True}, "No argument of a heat map 'anot'"), ({'ax': 1}, 'takes no ax=')])
def test_errors_of_heat_maps(lf, bad, message):
    with pytest.raises(TypeError, match=message): scalar_global_heatmap(lf, 'Activation', 'std', **bad)


def test_height_and_aspect_of_a_panel(lf):
    assert tuple(scalar_line(lf, ['fc1', 'fc2'], 'Activation', 'std', height=3, aspect=2).get_size_inches())==(12, 3)
    assert tuple(scalar_line(lf, 'fc1', 'Activation', 'std', height=3, aspect=2).figure.get_size_inches())==(6, 3)
    assert tuple(scalar_line(lf, ['fc1', 'fc2'], 'Activation', 'std', facet_kws={'height': 4}).get_size_inches())==(8, 4)
    assert tuple(scalar_line(lf, 'fc1', 'Activation', 'std', height=3, figsize=(5, 5)).figure.get_size_inches())==(5, 5)


def test_palettes_markers_and_legends(lf):
    def colours(**k):
        return [plt.matplotlib.colors.to_hex(line.get_color()) for line in scalar_line(lf, 'fc1', 'Activation', ['std', 'rm2'], **k).lines]
    assert colours(palette=['red', 'blue'])==['#ff0000', '#0000ff']==colours(palette={'rm2': 'blue', 'std': 'red'})
    assert colours(palette='Set1')==[plt.matplotlib.colors.to_hex(c) for c in plt.get_cmap('Set1').colors[:2]]
    legend = lambda **k: [t.get_text() for g in scalar_line(lf, 'fc1', 'Activation', ['std', 'rm2'], **k).figure.legends for t in g.get_texts()]
    assert len(legend())==2 and legend(legend=False)==[] and len(legend(legend='full'))==2
    by_legend = scalar_line(lf, 'fc1', 'Activation', ['std', 'rm2'], palette=['red', 'blue']).figure.legends[0]
    assert [plt.matplotlib.colors.to_hex(h.get_color()) for h in by_legend.get_lines()]==['#ff0000', '#0000ff']
    assert {line.get_marker() for line in scalar_line(lf, 'fc1', 'Activation', 'std', markers=True).lines}=={'o'}
    assert scalar_line(lf, 'fc1', 'Activation', 'std', errorbar=None, estimator=None, sort=True, lw=3).lines[0].get_linewidth()==3
    with pytest.raises(ValueError, match="palette= 'huls'"): scalar_line(lf, 'fc1', 'Activation', ['std', 'rm2'], palette='huls')


@pytest.mark.parametrize('kind', ['line', 'scatter'])
@pytest.mark.parametrize('bad,message', [({'hue': 'x'}, 'choose layers, tensor types'), ({'estimator': 'mean'}, 'each recorded value is drawn'),
    ({'lww': 1}, "No argument of a picture of lines 'lww'")])
def test_errors_of_line_plots(lf, kind, bad, message):
    with pytest.raises(TypeError, match=message): scalar_line(lf, 'fc1', 'Activation', 'std', kind=kind, **bad)


# ---- former names

@pytest.mark.parametrize('name', ['compute_trust_ratio', 'compute_noise_scale', 'get_update', 'plot_heatmap', 'TorchTracker',
    'exp_histogram', 'ScheduleSelector', 'VisualByTensor'])
def test_error_for_an_old_name_names_the_replacement(name):
    with pytest.raises(AttributeError, match=f"no '{name}' .a name in .*(instead|now)"): getattr(torchember, name)
    with pytest.raises(ImportError, match=f"no '{name}' .a name in .*(instead|now)"): exec(f'from torchember import torchEmber, {name}')
    assert not hasattr(torchember, name) and getattr(torchember, name, 3)==3 and name not in dir(torchember)


def test_error_for_an_unknown_name():
    with pytest.raises(AttributeError, match="^module 'torchember' has no attribute 'anything'"): torchember.anything # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'anything'"): exec('from torchember import anything')


def test_replacements_exist():
    from torchember.compat.gone import gone
    words = {w for _,what in gone.values() for w in re.findall(r'\b([a-z_]+|[A-Z]\w+)\(', what)}
    known = {w for w in words if w in torchember.module_of}
    assert {'trust_ratio', 'noise_scale', 'from_together', 'stash_hist', 'rankme', 'runs', 'read', 'updates'}<=known
    import torchember.monitor as quantities
    for n,(_,what) in gone.items():
        if what.startswith('this class is now in torchember.monitor'): assert isinstance(getattr(quantities, n), type), n


# ---- intended differences, as listed in the reference

def test_listed_differences_are_true(tmp_path, monkeypatch, lf):
    monkeypatch.setenv('TORCHEMBER_HOME', str(tmp_path))
    net = torchember.from_weight(Net())
    assert net.no(pattern='.*bias')==2 and dict(net.no(lw=True, pattern='.*bias'))=={'fc1.bias': 1, 'fc2.bias': 3}
    assert abs(net.norm(dtype=torch.float64).item()-net.flatten().double().norm().item())<1e-12 and net.dtype==torch.float32
    model = nn.Sequential(layer := nn.Linear(3, 3), nn.ReLU(), layer)
    with torchember.from_activation(model) as acts:
        y = model(torch.ones(2, 3))
        assert {'0', '0@1', '1', 'output_0'}==set(acts.state_dict) and torch.equal(acts.state_dict['0@1'], y)
    assert set(lf.metadata.type)=={'Linear', 'Net'}
    conv = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(2), nn.BatchNorm1d(3))
    monitor = torchember.Monitor(conv, {'0': ['RankMe'], '2': ['InputMean', 'MeanTID']})
    out = []
    conv[0].register_forward_hook(lambda m, i, o: out.append(o.detach()))
    conv(torch.randn(4, 2, 5, 5)).sum().backward()
    monitor.track(0)
    got = monitor.get_output()
    s = np.linalg.svd(out[0].flatten(1).numpy(), compute_uv=False)
    p = s/s.sum()+1e-7
    np.testing.assert_allclose(got['0']['RankMe'][0], np.exp(-(p*np.log(p)).sum()), rtol=1e-4)
    # The shape is (N, C, L), so channels are dimension 1
    np.testing.assert_allclose(got['2']['InputMean'][0], out[0].mean((0, 2, 3)).numpy(), rtol=1e-5)


@pytest.mark.parametrize('kind,bad,message', [('kde', {'gridsize': 100}, 'takes no gridsize=: the curve is computed from recorded'),
    ('bar', {'n': 10000}, 'takes no n=: the recorded counts'),
    ('line', {'linewith': 2}, "Did you mean 'linewidth'")])
def test_errors_of_histograms(lf, kind, bad, message):
    with pytest.raises(TypeError, match=message): exp_hist(lf, 'fc1', 'Weights', 2, kind=kind, sp_kws=bad)
    exp_hist(lf, 'fc1', 'Weights', 2, kind='kde', sp_kws=dict(n=10000, log_scale=2, bw_adjust=4, fill=True), legend_kws=dict(loc='upper left'))
