"Pictures are asked for as run, path, ttype, stat, in this order. Track & Visualize's words, and the order that there once was, give the same picture"
import inspect
import io

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from torchember import compare, exp_hist, out_of_range, overview, ridge, scalar_global_heatmap, scalar_line, summary, surface, tree, updates


@pytest.fixture(scope='module')
def t():
    "Outputs, weights and updates of two layers; a statistic of the user's, one that is a vector, and counts of exponents"
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
    "What a picture looks like, or what a table says"
    if not hasattr(got, 'figure') and not isinstance(got, np.ndarray): return repr(got)
    fig,file = np.ravel(np.array(got, dtype=object))[0].figure,io.BytesIO()
    fig.savefig(file, format='png', dpi=40)
    plt.close('all')
    return file.getvalue()


def test_one_order():
    "Of what there is of them, after the run: path, ttype, stat; and no other word for these"
    for f in (overview, summary, scalar_line, exp_hist, scalar_global_heatmap, tree, updates, compare, ridge, out_of_range, surface):
        names = list(inspect.signature(f).parameters)
        ours = [n for n in ('path', 'ttype', 'stat') if n in names]
        assert names[0]==('runs' if f is compare else 'run') and names[1:1+len(ours)]==ours and not {'df', 'layer', 'tt', 'scalar_metric'} & set(names)


calls = { # the same picture, asked for in three ways
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


@pytest.mark.parametrize('f', calls, ids=lambda f: f.__name__)
def test_words_and_orders(f, t):
    "Ours, theirs, and the order that there was"
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


def test_where_both_orders_can_be_meant(t):
    "What was understood goes on to be: a tensor type, a statistic, a number format. A layer of such a name is asked for by path="
    odd = t.assign(path=t.path.replace({'fc1': 'output', 'fc2': 'std'}), module=t.module.str.replace('fc1', 'output').str.replace('fc2', 'std'))
    assert seen(scalar_global_heatmap(odd, 'output'))==seen(scalar_global_heatmap(odd, ttype='output'))!=seen(scalar_global_heatmap(odd, path='output'))
    assert seen(tree(odd, 'std'))==seen(tree(odd, stat='std'))!=seen(tree(odd, path='std'))
    assert seen(tree(t, 'fc1'))==seen(tree(t, path='fc1')) and seen(tree(t, 'mine'))==seen(tree(t, stat='mine'))
    assert seen(overview(t, 'fc1', 'weight'))==seen(overview(t, path='fc1', ttype='weight'))
    assert seen(overview(t, None, 'weight'))==seen(overview(t, ttype='weight'))
    assert repr(summary(t, None, ['rms']))==repr(summary(t, stats=['rms'])) and repr(summary(t, 'fc1'))==repr(summary(t, path='fc1'))


def test_what_is_none_of_them(t):
    "The sentence is about what was nearest; one argument in two words is too many"
    for f,args,says in ((tree, ('sdt',), "Did you mean 'std'"), (tree, ('fc3',), "Did you mean 'fc"), (overview, ('mien',), "Did you mean .*'mine'"),
            (scalar_global_heatmap, ('outputt',), "Did you mean 'output'"), (scalar_global_heatmap, ('weight', 'sdt'), "Did you mean 'std'"),
            (scalar_global_heatmap, ('fc3', 'weight'), "Did you mean 'fc"), (surface, ('unitss',), "no 'unitss' in this log")):
        with pytest.raises(ValueError, match=says): f(t, *args)
    with pytest.raises(TypeError, match='got ttype= twice'): scalar_line(t, ttype='weight', tt='weight')
    with pytest.raises(TypeError, match='surface needs a statistic'): surface(t)
    with pytest.raises(TypeError, match="No argument of tree 'qqq'"): tree(t, 'mine', qqq=1)


def test_controls_have_the_words_that_were_typed(t):
    "Track & Visualize's where these were; and are found by either"
    pytest.importorskip('ipywidgets')
    from torchember.show.pointing import Interactive
    ours,theirs = (Interactive(scalar_line, t, {n: 'fc1', s: ['std', 'rms']}, False, live=False) for n,s in (('path', 'stat'), ('layer', 'scalar_metric')))
    for i,names in ((ours, ('path', 'ttype', 'stat')), (theirs, ('layer', 'tt', 'scalar_metric'))):
        widgets = i.controls['path'].search,i.controls['ttype'].widget,i.controls['stat'].widget
        assert tuple(w.description for w in widgets)==names
        assert [i.controls[a] is i.controls[b] for a,b in (('layer', 'path'), ('tt', 'ttype'), ('scalar_metric', 'stat'))]==[True]*3
        i.controls['tt'].value = 'weight'
        assert i.figure.get_suptitle()=='r · weights · fc1' and i.said==''
    with pytest.raises(KeyError): ours.controls['metric']


def test_what_a_picture_returns(t, tmp_path):
    "Has its figure; of several panels it can be saved and has its axes; an array of axes is an array, and a Figure a Figure"
    pytest.importorskip('ml_dtypes')
    other = t.assign(std=np.where(t.step>3, t['std']*2, t['std']))
    other.attrs['run'] = 's'
    got = {'lines': scalar_line(t, 'fc*', 'weight'), 'sizes': exp_hist(t, 'fc*', 'weight'), 'cells': scalar_global_heatmap(t), 'parting': compare([t, other]),
        'formats': out_of_range(t, dtypes=['float8_e4m3fn', 'float8_e5m2']), 'first': overview(t)}
    for name,p in got.items():
        p.savefig(tmp_path/f'{name}.png', dpi=20)
        assert (tmp_path/f'{name}.png').read_bytes()[:4]==b'\x89PNG' and isinstance(p.figure, plt.Figure)
        axes = p.axes if isinstance(p.axes, list) else [p.axes]
        assert all(a in p.figure.axes for a in axes)
    assert [isinstance(got[n], plt.Figure) for n in got]==[True]*3+[False]*3 and isinstance(got['first'], plt.Axes)
    both = got['parting']
    assert isinstance(both, np.ndarray) and both.shape==(2,) and both.axes==[both[0], both[1]]==list(both) and both.figure is both[1].figure
    for one in (compare([t, other], 'fc1'), out_of_range(t, dtypes='float8_e5m2'), tree(t), updates(t), ridge(t)): assert isinstance(one, plt.Axes)
    parts = plt.figure().subfigures(1, 2)
    inside = compare([t, other], ax=parts[0].subplots(2))
    assert inside.figure is parts[0]
    inside.savefig(tmp_path/'whole.png', dpi=20)
    assert (tmp_path/'whole.png').stat().st_size>0
    plt.close('all')
