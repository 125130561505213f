"Choices and values of each control, and reactions of interactive pictures to the pointer, without a browser"
import asyncio
import math
import re
import warnings

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.backend_bases import KeyEvent, MouseEvent

from torchember import EmberWarning, compare, interactive, overview, tree, updates
from torchember.frames.handle import Run
from torchember.show import pointing
from torchember.show.controls import (Arguments, ControlRequest, LayerPicker, StepSlider, argument_help, arrange_controls, axis_columns, columns,
    control_for, controllable, is_same_value, label_for, layer_names, logged_in, main, make_choice, make_choices, make_literal, of_types, recorded_steps,
    statistics_of, type_labels)
from torchember.show.heatmaps import scalar_global_heatmap
from torchember.show.histograms import exp_hist, ridge
from torchember.show.lines import scalar_line
from torchember.show.pointing import (HeatmapCells, Interactive, Losses, PageFigure, axes_with_steps, error_text, read_losses, rows_of_same_tensor, tensor_at,
    vertical_line)
from torchember.show.select import grid, series
from torchember.show.style import figure

W = pytest.importorskip('ipywidgets')


def rows_of(steps=range(0, 40, 10), loss=True):
    "Return rows of two layers: outputs in all steps, weights at multiples of 20, optimizer states, and logged numbers"
    out = []
    for s in steps:
        def add(path, ttype, tname, pname=None, call=0, s=s, **more):
            out.append(dict(path=path, module=f'model(Net).{path}(L)', ttype=ttype, tname=tname, pname=pname, step=s, call=call, dtype='float32', lr=.1/(1+s),
                mine=float(len(out)), fixed=3., std=1.+s+len(out)/1000, nan=0, exponents=[0, 5, 3, 0], exponent_min=-1, **more))
        for p in ('', 'b', 'a'): add(p, 'output', 'output_0')
        if s%20==0:
            for p in 'ba':
                for q in ('weight', 'bias')[:1+(p=='b')]: add(p, 'weight', f'weight_{q}', q)
            for k in ('exp_avg', 'exp_avg_sq'): add('b', 'optimizer', f'{k}_0', 'weight')
        if loss: out.append(dict(path='', ttype='scalar', tname='log', step=s, call=0, loss=2.-s/40, rate=s/10., nan=0))
    t = pd.DataFrame(out)
    t.attrs['run'] = 'r'
    return t


t = rows_of()


def test_choices_come_from_the_table():
    "Choices have the order of the log. Logged numbers belong to no tensor, and a constant column is no choice for the x axis"
    assert list(type_labels(t).items())==[('outputs', 'output'), ('weights', 'weight'), ('optimizer states', 'optimizer'),
        ('optimizer states: exp_avg', 'optimizer.exp_avg'), ('optimizer states: exp_avg_sq', 'optimizer.exp_avg_sq')]
    assert (axis_columns(t), statistics_of(t), logged_in(t))==(['step', 'lr'], ['mine', 'fixed', 'std'], ['loss', 'rate'])
    one = t[(t.path=='a') & (t.ttype=='output')]
    assert (axis_columns(one), statistics_of(one), logged_in(one))==(['step', 'lr', 'mine'], ['lr', 'mine', 'fixed', 'std'], [])
    now = t[t.step==20]
    assert (axis_columns(now), statistics_of(now))==(['step'], ['lr', 'mine', 'fixed', 'std'])
    assert layer_names(t)==['', 'b', 'b.weight', 'b.bias', 'a'] and layer_names(t, 'weight')==['b', 'b.weight', 'b.bias', 'a']
    assert layer_names(t, 'optimizer.exp_avg')==['b'] and layer_names(t, ['weight', 'output'])==layer_names(t)==layer_names(t, 'input')
    assert layer_names(t.drop(columns='pname'))==['', 'b', 'a'] and layer_names(t[t.ttype!='scalar'].assign(layer_name='x'), 'weight')==['x']
    assert recorded_steps(t[::-1]).tolist()==[0, 10, 20, 30] and recorded_steps(t, 'weight').tolist()==[0, 20]
    assert set(of_types(t, 'update').ttype)=={'output', 'weight', 'optimizer'} and set(of_types(t, 'weight').ttype)=={'weight'}


def test_each_value_has_a_label():
    "The values 1 and True have different labels. An unknown value gets a new label"
    labels = {'none': None, 'one': 1, 'yes': True, 'half': .5}
    assert [label_for(labels, v) for v in (None, 1, True, .5)]==[*labels] and len(labels)==4
    assert label_for(labels, 1.)=='1.0' and labels['1.0']==1. and label_for(labels, False)=='False' and len(labels)==6
    assert [is_same_value(a, b) for a,b in [(1, True), (1, 1), (None, None), ((1,), (1,)), ([1], [2]), ('a', 'b')]]==[False, True, True, True, False, False]


def test_new_labels_keep_the_selection():
    "New choices keep the selected value without a notification; later changes notify"
    told = []
    c = make_choice(W, 'n', {'a': 1, 'b': 2, 'c': 3}, 2)
    c.observe(lambda: told.append(c.value))
    c.offer(['c', 'b'])
    assert (c.widget.value, c.widget.options, told, c.muted)==('b', ('c', 'b'), [], False)
    c.widget.value = 'c'
    c.offer(['a', 'b'])
    assert (c.widget.value, told)==('a', [3])
    c.value = 3 # This value is no longer offered
    assert (c.value, c.widget.options, told)==(3, ('a', 'b', 'c'), [3, 3])
    s = make_choices(W, 'n', {'a': 1, 'b': 2}, [2], None)
    s.observe(lambda: told.append(s.value))
    s.offer(['b', 'a', 'c'])
    assert (s.value, told)==(2, [3, 3])
    s.value = [1, 2]
    assert (s.value, s.widget.options, told)==([1, 2], ('b', 'a', 'c'), [3, 3, [1, 2]])
    s.widget.value = ()
    assert s.value is None
    l = make_literal(W, 'n', 7, None)
    assert (l.widget.value, l.value, l.widget.placeholder)==('7', 7, '')
    l.value = None
    assert (l.widget.value, l.value)==('', None)
    l.widget.value = " {'a': 1} "
    assert l.value=={'a': 1} and make_literal(W, 'n', (1, 2), (1, 2)).widget.placeholder=='(1, 2)'


def test_the_slider_uses_the_nearest_recorded_step():
    "The slider selects the nearest recorded step; negative numbers count from the end. The number field follows the slider"
    s = StepSlider(W, 'step', np.array([-2, 0, 10, 20, 40]), 10)
    assert [s.position(v) for v in (None, -1, -2, -3, -5, -6, 14, 15, 16, 99, 0)]==[4, 4, 0, 2, 0, 0, 2, 2, 3, 4, 1]
    assert (s.value, s.box.value, s.box.min, s.box.max, s.widget.max)==(10, 10, -2, 40, 4)
    s.box.value = 21
    assert (s.value, s.box.value, s.widget.value)==(20, 20, 3)
    s.widget.value = 4
    assert (s.value, s.box.value)==(40, 40)
    seen = []
    s.observe(lambda: seen.append((s.value, s.box.value)))
    s.offer(np.array([-2, 0, 10, 20, 40]))
    s.offer(np.array([0, 39, 50]))
    assert ([v for v,_ in seen], s.value, s.box.value, s.widget.max, s.box.min, s.box.max)==([39], 39, 39, 2, 0, 50)
    s.offer(np.array([1, 2]))
    assert (s.value, s.box.value, s.box.min, s.box.max)==(2, 2, 1, 2)


def test_the_layer_picker_keeps_the_selection_on_top():
    "Selected layers are on top; a search lists matching layers in the order of the model; each selection notifies once"
    names = ['', *(f'h.{i}.{p}' for i in range(300) for p in ('b', 'a')), 'head']
    l,told = LayerPicker(W, 'layer', names, ['h.7.a', 'head'], root='Net'),[]
    l.observe(lambda: told.append(l.value))
    assert l.widget.options[:4]==('h.7.a', 'head', 'Net', 'h.0.b') and len(l.widget.options)==401 and l.note.value=='and 202 more: type a part of the name'
    assert l.widget.value==('h.7.a', 'head') and l.note.layout.display is None
    l.search.value = 'h.12.'
    assert l.widget.options==('h.7.a', 'head', '*h.12.* (2)', 'h.12.b', 'h.12.a') and (l.note.value, l.note.layout.display)==('', 'none') and told==[]
    l.widget.value = ('*h.12.* (2)', 'h.12.a')
    assert l.value==['*h.12.*', 'h.12.a'] and told==[l.value]
    l.search.value = 'head'
    assert l.widget.options==('*h.12.* (2)', 'h.12.a', 'head') and l.widget.value==('*h.12.* (2)', 'h.12.a') and told==[l.value]
    l.value = None
    assert (l.value, l.widget.value, told[1:])==(None, (), [None])
    l.value = {'head'}
    assert (l.value, l.widget.value, told[2:])==('head', ('head',), ['head'])
    one = LayerPicker(W, 'layer', names, 'head', one=True)
    assert one.widget.options[:3]==('automatic', 'head', 'model') and one.widget.value=='head'
    one.search.value = 'h.1?.a'
    assert one.widget.options==('automatic', 'head', *(f'h.{i}.a' for i in range(10, 20))) and one.value=='head'
    one.widget.value = 'automatic'
    assert one.value is None and LayerPicker(W, 'layer', ['a'], re.compile('a')).widget.options==('/a/ (1)', 'a')
    # The layer has this name, so it is not a pattern
    assert LayerPicker(W, 'layer', ['a*'], 'a*').widget.options==('a*',)


def control(f, name, value=..., table=t):
    p = dict(controllable(f))[name]
    return control_for(ControlRequest(W, f, name, p, p.default if value is ... else value, table))


def test_each_argument_has_its_control():
    "Check the choices and the initial value of each control, and the arguments that have no control"
    for name in ('figsize', 'legend_kws'): assert control(exp_hist, name) is None
    assert control(scalar_global_heatmap, 'col_wrap') is None and control(scalar_line, 'col_wrap').widget.options==('automatic', *'12345678')
    assert control(exp_hist, 'kind').widget.options==('bar', 'line', 'kde') and control(scalar_line, 'kind').widget.options==('line', 'scatter')
    assert control(scalar_line, 'ttype').widget.options[-1]=='each type' and control(scalar_line, 'ttype', None).value is None
    assert control(scalar_line, 'ttype', 'Weights').value=='weight' and control(scalar_line, 'ttype', ['Weights', 'Activation']).value==['weight', 'output']
    assert control(scalar_global_heatmap, 'ttype').widget.options==tuple(type_labels(t)) and control(scalar_global_heatmap, 'ttype').value=='output'
    assert type(control(scalar_global_heatmap, 'stat').widget).__name__=='Dropdown'
    many = control(scalar_line, 'stat', ['std', 'mine'])
    assert (many.value, many.widget.options)==(['std', 'mine'], ('mine', 'fixed', 'std'))
    assert control(scalar_line, 'x').widget.options==('step', 'lr') and control(scalar_line, 'x', ('metadata', 'lr')).value=='lr'
    info = control(exp_hist, 'dtype_info', (True, False, True))
    assert (info.value, info.widget.value)==((True, False, True), ('largest', 'smallest'))
    info.value = (False, True, False)
    assert (info.value, info.widget.value)==((False, True, False), ('smallest normal',))
    inc = control(scalar_global_heatmap, 'inc', 2)
    assert (inc.value, inc.widget.min, inc.widget.max)==(2, 1, 30) and control(scalar_global_heatmap, 'inc', 50).widget.max==50
    title = control(scalar_line, 'fig_title')
    assert title.value is None and control(scalar_line, 'fig_title', 'mine').value=='mine'
    title.value = 'a'
    title.value = None
    assert (title.value, title.widget.value)==(None, '')
    assert [control(scalar_line, 'facet_kws').widget.options, control(scalar_line, 'facet_kws', {'sharex': True, 'sharey': False}).widget.value]==[
        ('automatic', 'the same axes', 'the same x axis', 'the same y axis', 'separate axes'), 'the same x axis']
    assert control(ridge, 'steps', [1, 2]) is None and (control(ridge, 'steps').widget.min, control(ridge, 'steps').widget.max)==(1, 12)
    assert control(ridge, 'steps', 3).widget.max==4 and control(ridge, 'steps', 3, rows_of(range(99))).widget.max==40
    robust = control(scalar_global_heatmap, 'robust')
    assert (type(robust.widget).__name__, robust.value, control(scalar_global_heatmap, 'robust', True).value)==('Checkbox', False, True)
    assert control(scalar_global_heatmap, 'zeros').value is None
    assert control(scalar_line, 'bbox_to_anchor', lambda: 1) is None and control(scalar_line, 'bbox_to_anchor', (1, 2)).value==(1, 2)
    layer = control(ridge, 'path')
    assert layer.one and not control(scalar_line, 'path').one and layer.widget.options[:2]==('automatic', 'Net')


def test_arguments_follow_their_controls():
    "Check given and changed arguments; choices of layers and steps depend on the tensor type"
    calls = []
    a = Arguments(exp_hist, t, {'tt': 'Weights', 'figsize': (3, 4), 'step': 20}, ('col_wrap',), lambda a: calls.append(a.values()))
    assert a.values()=={'ttype': 'weight', 'figsize': (3, 4), 'step': 20} and 'col_wrap' not in a.controls and 'figsize' not in a.controls
    assert a.controls['layer'].names==['b', 'b.weight', 'b.bias', 'a'] and a.controls['step'].steps.tolist()==[0, 20]
    a.controls['tt'].value = 'output'
    assert a.controls['layer'].names==layer_names(t, 'output') and a.controls['step'].steps.tolist()==[0, 10, 20, 30]
    assert calls==[{'ttype': 'output', 'figsize': (3, 4), 'step': 20}]
    a.controls['step'].value = 30
    a.controls['ttype'].value = 'weight'
    # Step 30 has no weights, so step 20 is selected
    assert a.values()=={'ttype': 'weight', 'figsize': (3, 4), 'step': 20} and a.muted is False
    a.controls['kind'].value = 'line'
    a.controls['kind'].value = 'bar'
    assert calls[3:]==[{**a.values(), 'kind': 'line'}, a.values()] # Default values are not passed to the picture
    a.controls['kind'].value = 'kde'
    assert calls[5]==a.values()=={'ttype': 'weight', 'figsize': (3, 4), 'step': 20, 'kind': 'kde'}
    assert Arguments(exp_hist, t, {}).values()=={'step': 30} # None is the last step, and the slider shows its number
    assert Arguments(scalar_line, [t[t.path=='b'], t], {'tt': 'weight'}).controls['layer'].names==['b', 'b.weight', 'b.bias']
    assert [n for n,_ in controllable(scalar_global_heatmap)][-9:]==['robust', 'zeros', 'center', 'vmin', 'vmax', 'cmap', 'cbar', 'yticklabels', 'xticklabels']
    assert argument_help(scalar_global_heatmap)['inc']=='Draw only steps that are multiples of `inc`'
    assert a.controls['kind'].widget.tooltip==argument_help(exp_hist)['kind']


def test_frequent_controls_come_first():
    "Frequently used controls come first, and the others are folded. Low controls stand in pairs before tall ones"
    a = Arguments(scalar_line, t, {})
    names = {id(c.shown): n for n,c in a.controls.items()}
    _,row,more = a.box.children
    def flat(w): return [names[id(w)]] if id(w) in names else [n for c in w.children for n in flat(c)]
    first = [n for n in main if n in a.controls]
    low = [n for n in first if n not in ('stat', 'path')]
    assert sorted(flat(row))==sorted(first) and flat(row)[:len(low)]==low and sorted(flat(more))==sorted(set(a.controls)-set(first))
    assert flat(row)[len(low)]=='stat' and more.selected_index is None
    few = {n: a.controls[n] for n in ('kind', 'ttype', 'x')}
    assert len(arrange_controls(W, few).children)==2 and [flat(c) for c in columns(W, list(few.values()))]==[['kind', 'ttype'], ['x']]


# Events of the pointer, and pictures for them

class Agg(PageFigure):
    "A figure that handles events of the pointer without a browser"
    def __init__(self, W, width, height, live):
        super().__init__(W, width, height, False)
        self.live,self.sent = live,0
        self.canvas.blit = lambda *_: setattr(self, 'sent', self.sent+1)


class Unseen(Agg):
    "A figure that is never drawn, because drawing takes most of the time"
    def show(self): pass


@pytest.fixture
def pointed(monkeypatch):
    monkeypatch.setattr(pointing, 'PageFigure', Unseen)
    return lambda f, source=t, pause=0., stats=None, live=True, **given: Interactive(f, source, given, stats, 900, pause, live)


def send(name, ax, x, y=None, button=None):
    at = ax.transData.transform((x, np.mean(ax.get_ylim()) if y is None else y))
    ax.figure.canvas.callbacks.process(name, MouseEvent(name, ax.figure.canvas, *at, button=button))


def key(i, k): i.picture.surface.canvas.callbacks.process('key_press_event', KeyEvent('key_press_event', i.picture.surface.canvas, k))


calls = []


def quick(name, along=True):
    "Return a plot function that draws quickly, and records its arguments"
    def f(df, tt='output', layer=None, step: int|None=None, x='step', kind='line', bad=False):
        calls.append({k: v for k,v in dict(tt=tt, layer=layer, step=step, kind=kind).items()})
        ax = figure((7, 3)).subplots()
        ax.plot([0, 30], [1, 2])
        if along: ax.set_xlabel(x)
        if layer=='b': raise ValueError('There is no such layer.')
        if layer=='a': raise KeyError('a')
        return ax
    f.__name__ = name
    if along:
        def g(df, tt='output', layer=None, kind='line', x='step'): return f(df, tt, layer, None, x, kind)
        g.__name__ = name
        return g
    return f


def crossed(i):
    "Return position and text of the cross-hair, and the positions of vertical lines in the picture"
    line,dots,text = i.cursor.loss.cross
    if not line.get_visible():
        assert not text.get_visible() and not any(d.get_visible() for d in dots)
        return None, [l.get_xdata()[0] for l in i.picture.lines if l.get_visible()]
    assert text.get_visible() and all(d.get_visible() and d.get_xdata()[0]==line.get_xdata()[0]==line.get_xdata()[1] for d in dots)
    return (line.get_xdata()[0], [d.get_ydata()[0] for d in dots], text.get_text()), [l.get_xdata()[0] for l in i.picture.lines if l.get_visible()]


def test_losses_are_sorted_by_step():
    "Losses are sorted by step, each curve with its own values. The given dict is not changed"
    given = {'steps': [20, 0, 10], 'a': [1., 500., 2.], 'none': None, 'b': [3., math.nan, 5.]}
    l = read_losses(given, None)
    assert l.steps.tolist()==[0, 10, 20] and {n: y.tolist()[1:] for n,y in l.lines.items()}=={'a': [2., 1.], 'b': [5., 3.]} and len(given)==4
    assert [l.index_of(s) for s in (-9, 4, 5, 6, 99)]==[0, 0, 0, 1, 2]
    assert l.text(1)=='step=10\na=2\nb=5'==l.text(1, 10) and l.text(2, 30)=='step=20\na=1\nb=3\nrecorded: step 30'
    ax = l.draw(mpl.figure.Figure())
    assert ax.get_yscale()=='log' and ax.get_ylabel()=='' and [x.get_text() for x in ax.get_legend().get_texts()]==['a', 'b']
    one = read_losses({'steps': [3], 'a': [5.]}, None).draw(mpl.figure.Figure())
    assert (one.get_yscale(), one.get_ylabel(), one.get_legend(), one.lines[0].get_marker())==('linear', 'a', None, '.')
    below = Losses(np.arange(2), {'a': np.array([-1., 500.])}).draw(mpl.figure.Figure())
    assert below.get_yscale()=='linear' and Losses(np.arange(2), {'a': np.array([5., 500.])}).draw(mpl.figure.Figure()).get_yscale()=='linear'
    own = read_losses(None, t)
    assert (own.steps.tolist(), {n: y.tolist() for n,y in own.lines.items()})==([0, 10, 20, 30], {'loss': [2., 1.75, 1.5, 1.25]})
    assert read_losses(False, t) is None and read_losses(None, rows_of(loss=False)) is None
    with pytest.raises(TypeError, match='got a dict$|got a dict[^w]*$'): read_losses({'steps': [1], 'a': None}, t)


def test_tensor_at_returns_the_tensor_that_gives_the_color():
    "`tensor_at` returns the tensor and step whose value colors a patch; a tensor with NaN or infinity goes first"
    df = t[t.ttype=='output'].reset_index(drop=True)
    df.loc[(df.path=='a') & (df.step==30), ['std', 'nan']] = math.nan, 2
    df = pd.concat([df, df[df.path=='b'].assign(phase='eval', std=-1.)], ignore_index=True)
    for rows,columns_ in ((3, 4), (2, 4), (3, 2), (1, 1), (2, 3)):
        g = grid(series(df, 'std'), rows, columns_)
        ends = [*g.steps[1:], math.inf]
        for i,members in enumerate(g.members):
            for j,(first,last) in enumerate(zip(g.steps, ends, strict=True)):
                r = tensor_at(df, 'std', g, i, j)
                assert (r.path or 'Net') in members and first<=r.step<last and r.get('phase')!='eval'
                if g.bad[i, j]: assert (r.path, r.step)==('a', 30)
                else: assert r['std']==g.value[i, j]
    gaps = df[(df.path!='b') | (df.step!=10)]
    assert tensor_at(gaps, 'std', grid(series(gaps, 'std')), 1, 1) is None
    inf = df.assign(std=df['std'].where((df.path!='') | (df.step!=0), math.inf))
    g = grid(series(inf, 'std'), 1, 2)
    assert g.bad[0, 0] and tuple(tensor_at(inf, 'std', g, 0, 0)[['path', 'step']])==('', 0)
    by = df.assign(lr=df.step*-1.)
    g = grid(series(by, 'std', 'lr'))
    assert tensor_at(by, 'std', g, 2, 1, 'lr').step==20 and g.steps.tolist()==[-30, -20, -10, 0]


def test_rows_of_the_same_tensor():
    "All rows with the same path, tensor type, name and call belong to one tensor"
    own = dict(path='a', ttype='output', tname='x', call=0)
    df = pd.DataFrame([own, own, *({**own, **o} for o in (dict(path='b'), dict(ttype='input'), dict(tname='y'), dict(call=1)))])
    assert rows_of_same_tensor(df, df.iloc[0]).index.tolist()==[0, 1] and rows_of_same_tensor(df, df.iloc[5]).index.tolist()==[5]
    assert rows_of_same_tensor(df.drop(columns='call'), df.iloc[0]).index.tolist()==[0, 1, 5]


def test_tensors_of_a_heat_map_have_labels():
    "Rows of evaluations have no label, and two tensors of one module have different labels"
    def row(path, tname, **more): return dict(path=path, ttype='output', tname=tname, call=0, step=0, std=1., nan=0, **more)
    cells = HeatmapCells(None, pd.DataFrame([row('z', 'x', phase='eval'), row('a', 'x'), row('b', 'x'), row('a', 'y')]))
    cells.store_arguments({})
    assert cells.labels()==['a x', 'b', 'a y'] and cells.row_of('a y', 0)[['path', 'tname', 'label']].tolist()==['a', 'y', 'a y']
    assert cells.row_of('no such', 0)['label']=='a x' and cells.row_of('b', 3) is None and cells.at(0, 1.5)['label']=='b'


def test_the_cross_hair_follows_the_pointer(pointed):
    "The cross-hair moves to the nearest step of the loss, and moves back when the pointer leaves"
    i = pointed(quick('scalar_line'))
    assert crossed(i)==(None, []) and len(i.picture.lines)==1
    send('motion_notify_event', i.cursor.loss.axes, 12)
    assert crossed(i)==((10, [1.75], 'step=10\nloss=1.75'), [10])
    send('motion_notify_event', i.cursor.loss.axes, 1e9)
    assert crossed(i)==(None, [])
    send('button_press_event', i.cursor.loss.axes, 18, button=3)
    assert i.cursor.pinned is None and crossed(i)==(None, [])
    send('button_press_event', i.cursor.loss.axes, 18, button=1)
    send('motion_notify_event', i.cursor.loss.axes, 1)
    assert i.cursor.pinned==20 and crossed(i)==((0, [2.], 'step=0\nloss=2'), [0])
    send('motion_notify_event', i.cursor.loss.axes, 1e9)
    assert crossed(i)==((20, [1.5], 'step=20\nloss=1.5'), [20])
    i.controls['kind'].value = 'scatter' # The cross-hair keeps its position when the picture is drawn again
    assert crossed(i)==((20, [1.5], 'step=20\nloss=1.5'), [20]) and calls[-1]['kind']=='scatter'
    send('button_press_event', i.cursor.loss.axes, 1e9, button=1)
    assert i.cursor.pinned==20


def test_a_click_goes_to_a_recorded_step(pointed):
    "A click shows the nearest recorded step. The text of the cross-hair names both steps if they differ"
    i = pointed(quick('exp_hist', False), rows_of(range(0, 80, 20)), stats={'steps': range(70), 'train': np.arange(70.)})
    assert i.controls['step'].value==60 and i.cursor.pinned==60 and crossed(i)[0][0]==60 and i.picture.lines==[]
    n = len(calls)
    send('button_press_event', i.cursor.loss.axes, 33, button=1)
    assert calls[n:]==[{'tt': 'output', 'layer': None, 'step': 40, 'kind': 'line'}]
    assert i.controls['step'].value==40==i.cursor.pinned and crossed(i)[0]==(40, [40.], 'step=40\ntrain=40')
    send('motion_notify_event', i.cursor.loss.axes, 12)
    assert crossed(i)[0]==(12, [12.], 'step=12\ntrain=12\nrecorded: step 20') and i.controls['step'].value==40
    i.controls['step'].value = 0
    assert i.cursor.pinned==0 and crossed(i)[0][0]==0 and calls[-1]['step']==0


def test_the_last_position_of_a_fast_pointer_is_kept(pointed):
    "The cross-hair moves at once, later only as often as requested, and at last to the final position of the pointer"
    async def moved():
        i,at = pointed(quick('scalar_line'), pause=.05),[]
        own = i.cursor.point
        i.cursor.point = lambda step: (at.append(step and round(step)), own(step))
        i.cursor.hover.last = 0.
        for x in (1, 11, 19, 31): send('motion_notify_event', i.cursor.loss.axes, x)
        before = list(at)
        await asyncio.sleep(.2)
        return before, at, crossed(i)[0][0], i.cursor.hover.waiting
    before,at,where,waiting = asyncio.run(moved())
    assert (before, at, where, waiting)==([1], [1, 31], 30, None)


def test_a_failed_change_shows_a_message_and_keeps_the_picture(pointed):
    "The message disappears when the picture can be drawn again"
    i = pointed(quick('scalar_line'))
    n = len(calls)
    i.controls['layer'].value = 'b'
    assert i.message=='There is no such layer.' in i.layout.message.value and 'status' in i.layout.message.value
    assert [c['layer'] for c in calls[n:]]==['b', None]
    i.controls['layer'].value = 'a'
    assert i.message=="KeyError: 'a'" and calls[-1]['layer'] is None
    i.controls['layer'].value = None
    assert (i.message, i.layout.message.value)==('', '') and i.picture.good[1].get('layer') is None
    assert [error_text(e) for e in (ValueError('x'), ValueError(), TypeError('y'), KeyError('z'))]==['x', 'ValueError: ', 'y', "KeyError: 'z'"]
    i.locked(lambda a: 1/a)(0)
    assert i.message.startswith('ZeroDivisionError: ')


def test_a_click_opens_a_histogram_and_escape_closes_it(pointed):
    "A left click on the heat map opens a histogram, and Escape, Back or a right click closes it"
    i = pointed(scalar_global_heatmap, tt='weight', scalar_metric='std')
    outside = i.stack[0]
    assert i.layout.top.children==(outside.box,) and 'Click a cell' in i.layout.hint.value and 'keep the line at this step' in i.layout.hint.value
    title = i.figure.get_suptitle()
    for ax,x,y,b in ((i.figure.axes[0], 19, .5, 2), (i.figure.axes[0], 1e9, .5, 1), (i.figure.axes[1], .5, None, 1)):
        send('button_press_event', ax, x, y, b)
        assert len(i.stack)==1
    send('button_press_event', i.figure.axes[0], 19, 1.7, 1)
    assert i.figure.get_suptitle()=='r · weights · b.bias · step 20'
    assert i.layout.top.children==(i.layout.back, i.now.box) and 'right click, Escape' in i.layout.hint.value
    assert (i.controls['step'].steps.tolist(), i.cursor.pinned, 'go to this step' in i.layout.hint.value)==([0, 20], 20, True) and crossed(i)[0][0]==20
    assert set(i.now.table.pname)=={'bias'} and i.controls is i.now.controls is not outside.controls
    good = i.picture.good
    outside.controls['inc'].value = 2 # Hidden controls do not redraw the picture
    assert i.picture.good is good
    outside.controls['inc'].value = 1
    send('button_press_event', i.figure.axes[0], 1, .1, 1)
    key(i, 'a')
    assert len(i.stack)==2
    key(i, 'escape')
    assert (len(i.stack), i.cursor.pinned, i.figure.get_suptitle(), i.layout.top.children)==(1, None, title, (outside.box,)) and crossed(i)==(None, [])
    key(i, 'escape')
    assert len(i.stack)==1
    i.controls['tt'].value = 'output' # The picture now has other cells, and their histograms read other exponents
    send('button_press_event', i.figure.axes[0], 31, 2.5, 1)
    assert i.figure.get_suptitle()=='r · outputs · a · step 30' and i.controls['step'].steps.tolist()==[0, 10, 20, 30]
    i.layout.back.click()
    assert len(i.stack)==1 and i.patches.found is None
    i.enter(i.patches.at(-100, -3)), i.leave()
    assert i.patches.cells()[2].labels==['Net', 'b', 'a']
    i.enter(i.patches.at(99, 99))
    assert i.figure.get_suptitle()=='r · outputs · a · step 30'


def test_a_patch_without_rows_opens_no_histogram(pointed):
    "A patch without rows or without exponent counts shows a message and opens no histogram"
    i = pointed(quick('scalar_global_heatmap'), t[(t.path!='b') | (t.step!=10)])
    i.enter(i.patches.at(10, 1))
    assert (len(i.stack), i.message)==(1, 'Nothing was recorded in this cell.')
    i.enter(i.patches.at(20, 1))
    assert (len(i.stack), i.message)==(2, '')
    by = pointed(quick('scalar_global_heatmap'), x='lr') # steps go to the left here
    by.enter(by.patches.at(.1/11, 1))
    assert by.figure.get_suptitle()=='r · outputs · b · step 10'
    plain = pointed(quick('scalar_global_heatmap'), t.drop(columns=['exponents', 'exponent_min']))
    children = plain.layout.top.children
    plain.enter(plain.patches.at(20, 1))
    assert len(plain.stack)==1 and 'no exponent counts' in plain.message and plain.layout.top.children==children and len(plain.figure.axes[0].lines)==2


def test_images_have_a_slider_and_a_button(pointed):
    "Without pointer events, a slider selects a step of the loss, and lists and a button open a histogram of a tensor"
    i = pointed(scalar_global_heatmap, tt='weight', live=False)
    chooser = i.chooser
    assert i.layout.foot.children==(chooser.shown,) and chooser.names==['b.weight', 'b.bias', 'a.weight']
    assert (chooser.which.value, chooser.when.value)==('b.weight', 20)
    assert (i.cursor.slider.value, i.cursor.pinned, crossed(i))==(30, 30, ((30, [1.25], 'step=30\nloss=1.25'), [30]))
    i.cursor.slider.value = 10
    assert crossed(i)==((10, [1.75], 'step=10\nloss=1.75'), [10])
    chooser.which.value,chooser.when.value = 'a.weight',0
    chooser.button.click()
    assert i.figure.get_suptitle()=='r · weights · a.weight · step 0' and i.layout.foot.children==() and i.cursor.slider.value==0
    i.layout.back.click()
    assert i.layout.foot.children==(chooser.shown,) and (chooser.which.value, chooser.when.value)==('a.weight', 0)
    i.controls['tt'].value = 'output'
    assert chooser.names==['Net', 'b', 'a'] and (chooser.which.value, chooser.when.value)==('Net', 0) and chooser.when.steps.tolist()==[0, 10, 20, 30]
    chooser.which.value,chooser.when.value = None,30
    chooser.button.click() # Without a chosen tensor, the button opens the first
    assert i.figure.get_suptitle()=='r · outputs · Net · step 30'
    holes = pointed(quick('scalar_global_heatmap'), t[(t.path!='b') | (t.step!=10)], live=False)
    holes.chooser.which.value,holes.chooser.when.value = 'b',10
    holes.chooser.button.click()
    assert (holes.message, len(holes.stack))==('Nothing was recorded in this cell.', 1)


def test_a_turned_heat_map_returns_the_same_tensor(pointed):
    "A heat map with layers on the x axis returns the same tensor and step as with steps on the x axis"
    down,across,rate = (pointed(scalar_global_heatmap, stats=False, **x) for x in ({}, dict(x='name'), dict(x='name', y='lr')))
    for step,layer in ((0, 0), (10, 2), (30, 1)):
        want = down.patches.at(step, layer+.5)
        assert across.patches.at(layer+.5, step).equals(want) and (want.step, want.path)==(step, ('', 'b', 'a')[layer])
        assert rate.patches.at(layer+.5, want.lr).equals(want)


def test_lines_at_a_step_do_not_change_limits():
    "Vertical lines at a step appear in all axes with steps, not in color bars, and do not change limits"
    fig = mpl.figure.Figure()
    a,b = fig.subplots(2)
    a.plot([3, 4], [1, 2])
    b.set_label('<colorbar>')
    limits = a.get_xlim()
    line = vertical_line(a)
    assert a.get_xlim()==limits and not line.get_visible() and line.get_xdata()[0]==limits[0]
    assert axes_with_steps(fig)==[]
    a.set_xlabel('step')
    assert axes_with_steps(fig)==[a]
    b.set_xlabel('step')
    assert axes_with_steps(fig)==[a]
    a.set_xlabel('lr')
    assert axes_with_steps(fig)==[]
    fig.supxlabel('step')
    assert axes_with_steps(fig)==[a]
    for size,said in (('step', 2), ('lr', 0)): # Two axes share an x axis, so only the lower one has the label
        shared = mpl.figure.Figure()
        axes = shared.subplots(2, sharex=True)
        axes[1].set_xlabel(size)
        assert axes_with_steps(shared)==[*axes][:said]
    assert axes_with_steps(mpl.figure.Figure().add_subplot(projection='3d', xlabel='step').figure)==[]


@pytest.mark.parametrize('f,n', [(scalar_line, 1), (scalar_global_heatmap, 1), (overview, 2), (updates, 1), (tree, 0), (exp_hist, 0), (ridge, 0),
    (lambda t: scalar_line(t, ['a', 'b']), 2), (lambda t: compare([t, t]), 2), (lambda t: scalar_global_heatmap(t, x='name'), 0),
    (lambda t: scalar_line(t, x='lr'), 0)])
def test_axes_with_steps_are_found_by_their_label(f, n):
    "Axes have steps if their x label, or that of the figure, is 'step'"
    t = pd.DataFrame([dict(path=p, module=f'm(N).{p}(L)', ttype=k, tname=f'{k}_0', pname='weight' if k=='update' else None, step=s, call=0, std=1.+s, ratio=.1,
        lr=s/2, exponents=[0, 1, 2, 0], exponent_min=0, dtype='float32') for s in range(3) for p in 'ab' for k in ('output', 'update')]
        +[dict(path='', module='m(N)', ttype='scalar', tname='log', step=s, loss=1.) for s in range(3)])
    got = axes_with_steps(f(t).figure)
    plt.close('all')
    assert len(got)==n


def test_moving_artists_are_painted_over_the_stored_figure():
    "Moving artists are painted over the stored picture. A figure sent as an image is drawn completely"
    s = Agg(W, 500, 4., True)
    line = vertical_line(s.figure.subplots())
    s.set_moving(line)
    painted = []
    s.figure.draw_artist = painted.append
    assert line.get_animated() and s.figure.get_size_inches().tolist()==[5., 4.]
    s.moved() # No picture is stored yet, so the figure is drawn
    assert (s.sent, painted, s.back is not None)==(0, [], True)
    line.set_visible(True)
    s.moved()
    assert (s.sent, painted, s.canvas._force_full)==(1, [line], True)
    s.stretch(6)
    assert s.figure.get_size_inches().tolist()==[5., 6.]
    image = PageFigure(W, 500, 4., False)
    other = vertical_line(image.figure.subplots())
    image.set_moving(other)
    image.moved()
    assert not other.get_animated() and image.back is None and image.widget.value[:4]==b'\x89PNG'


def test_interactive_reads_a_run_once(pointed, monkeypatch):
    "The log is read once for the picture, and once for exponents at the first histogram of a tensor type"
    import torchember.frames.logs as logs
    asked = []
    monkeypatch.setattr(logs, 'read', lambda source, columns=None, **wanted: (asked.append((wanted, columns('exponents'))), t.copy())[1])
    i = pointed(quick('scalar_global_heatmap'), Run('small', {}), tt='Activation')
    for tt in ('output', 'weight', 'output'):
        i.controls['tt'].value = tt
        for _ in range(2): i.enter(i.patches.at(20, 1)); i.leave()
    assert [(w.get('ttype'), e) for w,e in asked]==[(None, False), (['output'], True), (['weight'], True)]
    asked.clear()
    pointed(quick('compare'), [Run('small', {}), Run('small', {})], stats=False)
    assert [e for _,e in asked]==[False, False]
    asked.clear()
    drawing = quick('mine')
    def mine(df, tt='output', dtypes=()): return drawing(df, tt)
    pointed(mine, Run('small', {}), stats=False)
    assert asked==[({}, True)] # Pictures with number formats (`dtypes`) need exponents


def test_interactive_outside_a_notebook_returns_the_picture(monkeypatch):
    "Outside of a notebook, `interactive` warns and returns the plain picture; the run may be passed as df=, run= or frame="
    def scalar_line(frame, layer=None): return frame, layer
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        assert interactive(scalar_line, df=1, layer=2)==(1, 2)==interactive(scalar_line, run=1, layer=2)==interactive(scalar_line, frame=1, layer=2)
    assert len(said)==3 and all(w.category is EmberWarning and 'works only in a notebook' in str(w.message) for w in said)
    with pytest.raises(TypeError, match='needs a run'): interactive(scalar_line, layer=2)
    made = []
    monkeypatch.setattr(pointing, 'why_no_controls', lambda: None)
    monkeypatch.setattr(pointing, 'Interactive', lambda *args: (made.append(args), type('I', (), {'show': lambda self: made.append('shown')})())[1])
    monkeypatch.setattr(mpl, 'get_backend', lambda: 'module://ipympl.backend_nbagg')
    interactive(scalar_line, train_stats='s', width=700, mouse_sensitivity=500, df=1, layer=2)
    assert made==[(scalar_line, 1, {'layer': 2}, 's', 700, pytest.approx(5e-4), True), 'shown']
    monkeypatch.setattr(mpl, 'get_backend', lambda: 'agg')
    assert not pointing.reports_pointer()


def test_interactive_is_displayed_once_per_cell(pointed, monkeypatch):
    "A second display in the same cell is ignored, and an expression in another cell displays the picture again"
    i,n,shown = pointed(quick('scalar_line'), live=False),[1],[]
    monkeypatch.setattr(pointing, 'execution_count', lambda: n[0])
    monkeypatch.setattr('IPython.display.display', shown.append)
    for at in (1, 1, 2, 2, 1):
        n[0] = at
        i._ipython_display_()
    assert shown==[i.layout.box]*3 and repr(i)=='interactive scalar_line of r'


def test_interactive_keeps_the_style_of_its_creation(pointed):
    "A later change of the matplotlib style does not change the picture at a redraw"
    with mpl.rc_context({'figure.facecolor': '#000010'}): i = pointed(quick('scalar_line'))
    i.controls['kind'].value = 'scatter'
    dark = mpl.colors.to_rgba('#000010')
    assert i.cursor.loss.surface.figure.get_facecolor()==dark and mpl.rcParams['figure.facecolor']!='#000010'
    assert (i.picture.surface.width, i.cursor.loss.surface.width)==(720, 180) and pointed(quick('overview')).cursor is None
    own = pointed(quick('overview'), stats={'steps': [1], 'a': [2.]})
    assert own.cursor.loss.losses.steps.tolist()==[1] and pointed(quick('scalar_line'), stats=False).picture.surface.width==900
