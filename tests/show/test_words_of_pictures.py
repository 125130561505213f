"Pictures take run, path, ttype, stat in this order. Names of the library Track & Visualize, and an earlier order, work, too"
import inspect
import io

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import torchember
from torchember import (compare, exp_hist, out_of_range, overview, report, ridge, scalar_global_heatmap, scalar_line, summary, surface, tree, updates,
    wide)
from torchember.show.histograms import rows_at_step
from torchember.show.style import Panels


@pytest.fixture(scope='module')
def t():
    "Return a table with outputs, weights and updates of two layers, and with custom, vector and exponent statistics"
    out,g = [],np.random.default_rng(0)
    for s in range(6):
        for path in ('fc1', 'fc2'):
            for ttype in ('output', 'weight', 'weight_grad', 'update'):
                p = None if ttype=='output' else 'weight'
                out.append(dict(path=path, module=f'model(Net).{path}(Linear)', ttype=ttype, tname=f'{ttype}_{p or 0}', pname=p, step=s, call=0,
                    dtype='float32', std=g.random(), rms=g.random(), mine=g.random(), ratio=1e-3*(1+s), nan=0, zero_frac=0.,
                    exponents=[0, *g.integers(1, 9, 45).tolist(), 0], exponent_min=-28, shape=(4, 4), units=g.random(4).tolist()))
    t = pd.DataFrame(out)
    t.attrs['run'] = 'r'
    return t


def seen(got):
    "Return the pixels of a picture, or the text of a table, to compare results"
    if not hasattr(got, 'figure'): return repr(got)
    file = io.BytesIO()
    got.figure.savefig(file, format='png', dpi=40)
    plt.close('all')
    return file.getvalue()


others = {'attention_map': 'of rows about attention', 'differences': 'of what diff gives', 'interactive': 'takes a picture',
    'Surface3d': "Taiyi's, of a dict", 'query': 'begins with a question', 'runs': 'of no run', 'live': 'of all',
    **dict.fromkeys(('du', 'mv', 'rm', 'compact', 'sync'), 'of files'), 'scan': "gives an engine's frame",
    **dict.fromkeys(('from_logframe', 'validate', 'write_parquet'), 'of a LogFrame'), **dict.fromkeys(('read_pickle', 'read_csv', 'read_parquet'), 'of a file')}
public = {n: getattr(torchember, n) for n,module in torchember.module_of.items() if module.startswith(('show.', 'frames.'))}
of_runs = {n: f for n,f in public.items() if inspect.isfunction(f) and n not in others}
# Functions that return a table, and `report`, which writes a file
tables = {'read', 'wide', 'summary', 'dead_units', 'to_logframe', 'report'}
# Further arguments for some pictures
more = {'wide': dict(stat='std'), 'surface': dict(ttype='output', stat='units'), 'exp_hist': dict(path='fc1')}


@pytest.mark.parametrize('name', of_runs)
def test_pictures_have_one_order_of_arguments(name):
    "Each public picture, also a future one, takes path, ttype, stat in this order after the run"
    f = of_runs[name]
    words = list(inspect.signature(f).parameters)
    asked = [w.replace('stats', 'stat') for w in words if w in ('path', 'ttype', 'stat', 'stats')]
    assert words[0]==('runs' if name=='compare' else 'run') and asked==[w for w in ('path', 'ttype', 'stat') if w in asked]
    assert not {'df', 'layer', 'layers', 'tt', 'scalar_metric', 'metric', 'pattern', 'name'} & set(words)


@pytest.mark.parametrize('name', sorted(of_runs.keys()-tables))
def test_one_panel_is_its_axes_and_several_are_panels(name, t, tmp_path):
    "A picture of one panel is its axes, and a picture of several is an array; both have a figure and can be saved"
    pytest.importorskip('ml_dtypes')
    f,other = of_runs[name],t.assign(std=t['std']*2)
    other.attrs['run'] = 's'
    given = [[t, other]] if name=='compare' else [t]
    one,two = (f(*given, **({'dtypes': d} if 'dtypes' in inspect.signature(f).parameters and name!='ridge' else {}), **{**more.get(name, {}), 'path': p})
        for p,d in (('fc1', 'float8_e5m2'), (['fc1', 'fc2'], ['float8_e5m2', 'float8_e4m3fn'])))
    several = {'scalar_line', 'exp_hist', 'surface', 'compare', 'out_of_range'}
    if name!='overview': assert isinstance(one, plt.Axes) and isinstance(two, Panels if name in several else plt.Axes)
    else: assert isinstance(f(t, ttype='output'), plt.Axes) and len(one)==2
    for p in (one, two):
        p.savefig(tmp_path/'p.png', dpi=20)
        assert (tmp_path/'p.png').read_bytes()[:4]==b'\x89PNG' and isinstance(p.figure, plt.Figure)
    if 'ax' in inspect.signature(f).parameters:
        mine = plt.figure().subplots()
        assert f(*given, path='fc1', ax=mine, **({'dtypes': 'float8_e5m2'} if name=='out_of_range' else {})) is mine and not hasattr(mine, 'savefig')
    plt.close('all')


@pytest.mark.parametrize('name', sorted(of_runs.keys()-{'compare', 'read', 'dead_units'}))
def test_words_of_track_and_visualize_work(name, t, tmp_path):
    "Each picture accepts Track & Visualize's names for the run, the layers and the tensor type"
    pytest.importorskip('ml_dtypes')
    f,words = of_runs[name],inspect.signature(of_runs[name]).parameters
    ours = {**{n: v for n,v in (('path', 'fc1'), ('ttype', 'output')) if n in words}, **more.get(name, {})}
    if name=='report': ours['file'] = tmp_path/'r.html'
    theirs = {{'path': 'layer', 'ttype': 'tt'}.get(n, n): v for n,v in ours.items()}
    a,b = f(run=t, **ours),f(df=t, **theirs)
    assert a.equals(b) if isinstance(a, pd.DataFrame) else seen(a)==seen(b)


calls = { # Each entry: one picture, called in three ways
    scalar_line: (('fc1', 'weight', 'rms'), dict(layer='fc1', tt='Weights', scalar_metric='rms'), ('fc1', 'weight', 'rms')),
    exp_hist: (('fc*', 'weight', 3), dict(layer='fc*', tt='Weights', step=3), ('fc*', 'Weights', 3)),
    scalar_global_heatmap: (('fc1', 'weight', 'rms', 2), dict(layer='fc1', tt='Weights', scalar_metric='rms', inc=2),
        ('Weights', 'rms', 2, 'step', None, None, None, 'fc1')),
    overview: (('fc1', 'weight', 'rms'), dict(layer='fc1', tt='weight', stat='rms'), ('rms', 'weight', 'fc1')),
    tree: (('fc*', 'weight', 'mine', 2), dict(layer='fc*', tt='weight', stat='mine', step=2), ('mine', 'weight', 2, 'fc*')),
    updates: (('fc1', (1e-5, 1e-1)), dict(layer='fc1', healthy=(1e-5, 1e-1)), ('fc1', (1e-5, 1e-1))),
    ridge: (('fc1', 'weight', 4), dict(layer='fc1', tt='weight', steps=4), ('fc1', 'weight', 4)),
    out_of_range: (('fc1', 'weight', 'float8_e5m2', 2), dict(layer='fc1', tt='weight', dtypes='float8_e5m2', step=2), ('float8_e5m2', 'weight', 2, 'fc1')),
    surface: (('fc1', 'weight', 'units', 'heatmap'), dict(path='fc1', tt='weight', stat='units', kind='heatmap'), ('units', 'fc1', 'weight', 'heatmap')),
    summary: (('fc1', 'weight', ['rms']), dict(layer='fc1', tt='weight', stats=['rms']), ('weight', ['rms'], 'fc1'))}


@pytest.mark.slow
@pytest.mark.parametrize('f', calls, ids=lambda f: f.__name__)
def test_all_names_and_orders_of_arguments_are_equal(f, t):
    "Our names of arguments, those of Track & Visualize, and the earlier order give equal pictures"
    if f is out_of_range: pytest.importorskip('ml_dtypes')
    ours,theirs,before = calls[f]
    names = list(inspect.signature(f).parameters)[1:]
    wanted = seen(f(t, **dict(zip(names, ours, strict=False))))
    assert seen(f(t, *ours))==wanted==seen(f(t, *before))
    run = {'df' if f in (scalar_line, exp_hist, scalar_global_heatmap) else 'run': t}
    assert seen(f(**run, **theirs))==wanted


def test_compare(t):
    other = t.assign(std=np.where(t.step>3, t['std']*2, t['std']))
    other.attrs['run'] = 's'
    assert seen(compare([t, other], 'fc1', 'weight', 'std'))==seen(compare([t, other], layer='fc1', tt='weight', stat='std'))==seen(
        compare([t, other], path='fc1', ttype='weight', stat='std'))


def test_earlier_calls_keep_their_meaning(t):
    "A positional tensor type, statistic or number format is still recognized. A layer of such a name needs path="
    odd = t.assign(path=t.path.replace({'fc1': 'output', 'fc2': 'std'}), module=t.module.str.replace('fc1', 'output').str.replace('fc2', 'std'))
    assert seen(scalar_global_heatmap(odd, 'output'))==seen(scalar_global_heatmap(odd, ttype='output'))!=seen(scalar_global_heatmap(odd, path='output'))
    assert seen(tree(odd, 'std'))==seen(tree(odd, stat='std'))!=seen(tree(odd, path='std'))
    assert seen(tree(t, 'fc1'))==seen(tree(t, path='fc1')) and seen(tree(t, 'mine'))==seen(tree(t, stat='mine'))
    assert seen(overview(t, 'fc1', 'weight'))==seen(overview(t, path='fc1', ttype='weight'))
    assert seen(overview(t, None, 'weight'))==seen(overview(t, ttype='weight'))
    assert repr(summary(t, None, ['rms']))==repr(summary(t, stats=['rms'])) and repr(summary(t, 'fc1'))==repr(summary(t, path='fc1'))


def test_an_unknown_value_names_the_nearest_meaning(t):
    "The error suggests the most similar known value. Giving one argument under two names is an error"
    for f,args,says in ((tree, ('sdt',), "Did you mean 'std'"), (tree, ('fc3',), "Did you mean 'fc"), (overview, ('mien',), "Did you mean .*'mine'"),
            (scalar_global_heatmap, ('outputt',), "Did you mean 'output'"), (scalar_global_heatmap, ('weight', 'sdt'), "Did you mean 'std'"),
            (scalar_global_heatmap, ('fc3', 'weight'), "Did you mean 'fc"), (surface, ('unitss',), "no statistic 'unitss' in this log")):
        with pytest.raises(ValueError, match=says): f(t, *args)
    with pytest.raises(TypeError, match='got ttype= and tt=, which are two names of one argument'): scalar_line(t, ttype='weight', tt='weight')
    with pytest.raises(TypeError, match='surface needs a statistic'): surface(t)
    with pytest.raises(TypeError, match="No argument of tree 'qqq'"): tree(t, 'mine', qqq=1)


def test_controls_have_the_words_that_were_typed(t):
    "Controls use the names in the call, ours or those of Track & Visualize, and are found by both names"
    pytest.importorskip('ipywidgets')
    from torchember.show.pointing import Interactive
    ours,theirs = (Interactive(scalar_line, t, {n: 'fc1', s: ['std', 'rms']}, False, live=False) for n,s in (('path', 'stat'), ('layer', 'scalar_metric')))
    for i,names in ((ours, ('path', 'ttype', 'stat')), (theirs, ('layer', 'tt', 'scalar_metric'))):
        widgets = i.controls['path'].search,i.controls['ttype'].widget,i.controls['stat'].widget
        assert tuple(w.description for w in widgets)==names
        assert [i.controls[a] is i.controls[b] for a,b in (('layer', 'path'), ('tt', 'ttype'), ('scalar_metric', 'stat'))]==[True]*3
        i.controls['tt'].value = 'weight'
        assert i.figure.get_suptitle()=='r · weights · fc1' and i.message==''
    with pytest.raises(KeyError): ours.controls['metric']


def test_panels_are_an_array_with_a_figure(t, tmp_path):
    "The array of panels has the methods of a Figure; saving a subfigure saves the whole figure"
    other = t.assign(std=np.where(t.step>3, t['std']*2, t['std']))
    other.attrs['run'] = 's'
    both = compare([t, other])
    assert isinstance(both, np.ndarray) and both.shape==(2,) and both.axes==[both[0], both[1]]==list(both) and both.figure is both[1].figure
    both.set_size_inches(3, 2)
    assert both.get_suptitle()==both.figure.get_suptitle()!='' and both.figure.get_size_inches().tolist()==[3, 2]
    with pytest.raises(AttributeError, match='sevefig'): both.sevefig('a')
    assert [a.get_ylabel() for a in overview(pd.concat([t, t.assign(ttype='scalar', loss=1.).iloc[::40]]))]==['loss', 'outputs', 'weight gradients']
    parts = plt.figure().subfigures(1, 2)
    inside = compare([t, other], ax=parts[0].subplots(2))
    assert inside.figure is parts[0]
    inside.savefig(tmp_path/'whole.png', dpi=20)
    assert (tmp_path/'whole.png').stat().st_size>0
    plt.close('all')


def test_a_report_of_some_of_a_run(t, tmp_path):
    "`report` takes arguments like pictures, or in the earlier form with the file as `path`"
    page = lambda file: file.read_text('utf-8')
    ours = page(report(t, tmp_path/'a.html', 'fc1', 'weight', ['std']))
    assert ours!=page(report(t, tmp_path/'b.html'))
    for before in (lambda: report(t, tmp_path/'c.html', ['std'], 'weight', 'fc1'), lambda: report(t, tmp_path/'c.html', 'std', 'weight', 'fc1'),
            lambda: report(t, path=tmp_path/'c.html', stats='std', tt='weight', layer='fc1'), lambda: report(t, path=str(tmp_path/'c.html'), stats='std',
                ttype='weight', layer='fc1'), lambda: report(t, path='fc1', ttype='weight', stats='std', file=tmp_path/'c.html')):
        assert page(before())==ours
        (tmp_path/'c.html').unlink()


def test_wide_accepts_both_orders(t):
    "`wide` accepts both orders of its arguments, with and without a path"
    assert wide(t, 'fc1', 'weight', 'std').equals(wide(t, 'std', 'weight')[['fc1']]) and wide(t, ['fc*'], 'weight', 'mine').equals(wide(t, 'mine', 'weight'))
    for bad,says in ((dict(path='fc3'), "No path matches 'fc3'"), (dict(), 'several tensor types')):
        with pytest.raises(ValueError, match=says): wide(t, stat='std', **bad)
    with pytest.raises(TypeError, match='wide needs the argument stat'): wide(t, ttype='weight')


def test_one_of_several_layers_or_steps_is_the_default(t):
    "Defaults are the layer that differs first, the first tensor type, the last module, and the last row"
    other = t.assign(std=np.where((t.path=='fc2') & (t.step>2), t['std']*2, t['std']))
    other.attrs['run'] = 's'
    one = compare([t, other], most=1)
    assert isinstance(one, plt.Axes) and one.get_title('left')=='fc2' and one.figure.get_suptitle().endswith('the runs differ from step 3 on, first in fc2')
    assert compare([t, t]).figure.get_suptitle().endswith('the runs do not differ')
    for kinds,label in ((['output', 'weight'], 'outputs'), (['weight', 'output'], 'weights')):
        assert overview(t, ttype=kinds, ax=plt.figure().subplots()).get_ylabel()==label
    assert ridge(t).get_title('left')=='r · outputs · fc2' # The default is the last module with exponents
    twice = pd.concat([t.assign(std=t['std']+10), t])
    assert wide(twice, ttype='output', stat='std').equals(wide(t, ttype='output', stat='std'))
    # Each layer has a narrow range, and both together have a wide range
    far = t.assign(std=t['std']+np.where(t.path=='fc1', 1, 1e4))
    for facets,scale in (({}, 'log'), ({'sharey': False}, 'linear')): assert {a.get_yscale() for a in scalar_line(far, 'fc*', facet_kws=facets)}=={scale}
    early = t.assign(step=t.step-3)
    for step,found in ((-1, -1), (-3, -3), (None, 2), (2, 2), (-5, -2)):
        assert rows_at_step(early, step)[1]==found and set(rows_at_step(early, step)[0].step)=={found}
    plt.close('all')
