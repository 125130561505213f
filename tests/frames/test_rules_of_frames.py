"Tables in the format of the older library Track & Visualize: trackers, two runs side by side, and reading a run again."
import math

import numpy as np
import pandas as pd

from torchember import emberTracker, from_logframe, read, read_parquet, read_pickle, to_logframe, wide
from torchember.frames.logframe import EXP, META, STAT
from torchember.compat.tracker import Stash, Tracker, means_by_type


def row(step, path='fc', ttype='output', tname='output_0', pname=None, call=0, **more):
    return {'module': f'model(Net).{path}(Linear)' if path else 'model(Net)', 'ttype': ttype, 'tname': tname, 'pname': pname, 'step': step, 'call': call,
        'dtype': 'float32', **more}


def step_of(s):
    "Return the rows of a step: two outputs, a weight, and rows that a LogFrame cannot express."
    counts = lambda below, inside, above: dict(exponents=[below, inside, 0, above], exponent_min=-1)
    return [row(s, mean=1.+s, rms=2., **counts(1, 2, 1)), row(s, call=1, mean=3.+s, rms=4., **counts(0, 4, 0)),
        row(s, ttype='weight', tname='weight_0', pname='weight', mean=5.+s, rms=6., **counts(3, 1, 4)), row(s, ttype='probe', tname='p', mean=99., rms=99.),
        row(s, '', 'scalar', 'log', loss=.5)]


class Wandb:
    "A minimal replacement of a W&B run."
    def __init__(self): self.logged,self.handed = [],[]
    def put(self, step, data): self.logged.append((step, data))
    def file(self, path, name, kind): self.handed.append((name, path, kind))


def names_of(lf): return list(zip(lf[META, 'step'], lf[META, 'name'], lf[META, 'tensor_type'], lf[STAT, 'mean'], lf[STAT, 'rm2'], strict=True))


def test_a_tracker_hands_each_row_on_once(tmp_path, capsys):
    "Two runs side by side: the user's function, W&B and the file on disk get each row of their own run once."
    a,b = ([], []), ([], [])
    made = []
    for got,(name,prefix,inc,kind) in zip((a, b), (('one', 'module', 2, '.parquet'), ('two', '', 3, '.pkl')), strict=True):
        w = Wandb()
        t = Tracker(emberTracker(name, tmp_path), prefix, inc, lambda n, s, lf, got=got: got[0].append((n, s, names_of(lf))), kind, w)
        made.append((t, w, prefix, inc))
    def want(s, prefix):
        name = 'module.fc' if prefix else 'fc'
        return [(s, name, 'Activation', 1.+s, 2.), (s, name, 'Activation', 3.+s, 4.), (s, name, 'Weights', 5.+s, 6.)]
    for s in range(2, 9):
        for i,(t,*_) in enumerate(made):
            seen = s!=3+2*i # in one step of each run, nothing is recorded
            if seen: t.t.put(lambda s=s: step_of(s), True)
            t.current_step = s
            t.note_step_end(s, seen)
            if seen and s==6: t.log_to_wandb(7) # step 7 has no rows yet, so nothing is logged
    for (t,w,prefix,inc),got in zip(made, (a, b), strict=True):
        there = [s for s in range(2, 9) if s!=(3 if prefix else 5)]
        kept = list(t)
        name = 'module.fc' if prefix else 'fc'
        assert [(k.name, k.type, k.tensor_type, k.dtype, k.value, k.first_value) for k in kept]==[(name, 'Linear', tt, 'float32', v, v)
            for tt,v in (('Activation', {'scalar_stats': {'mean': 9., 'rm2': 2.}, 'exp_hist': {'hist': [1, 2, 0, 1], 'bins': [-2, -1, 0, 1]}}),
            ('Activation', {'scalar_stats': {'mean': 11., 'rm2': 4.}, 'exp_hist': {'hist': [0, 4, 0, 0], 'bins': [-2, -1, 0, 1]}}),
            ('Weights', {'scalar_stats': {'mean': 13., 'rm2': 6.}, 'exp_hist': {'hist': [3, 1, 0, 4], 'bins': [-2, -1, 0, 1]}}))]
        assert (t[0], t[-1], t.stashes)==(kept[0], kept[-1], kept)
        t.finish(False)
        ends = [s for s in range(2, 9) if s%inc==0]
        parts = [[s for s in there if (0, *ends, 99)[i]<s<=(0, *ends, 99)[i+1]] for i in range(len(ends)+1)]
        assert got[0]==[(t.name, e, [r for s in part for r in want(s, prefix)]) for e,part in zip((*ends, 8), parts, strict=True) if part]
        lf = (read_parquet if prefix else read_pickle)(t.out_path)
        assert names_of(lf)==[r for s in there for r in want(s, prefix)]
        assert w.logged==[(s, {'Numerics.Activation/mean': 2.+s, 'Numerics.Activation/rm2': 3., 'Numerics.Activation/underflow_rate': .125,
            'Numerics.Activation/overflow_rate': .125, 'Numerics.Weights/mean': 5.+s, 'Numerics.Weights/rm2': 6., 'Numerics.Weights/underflow_rate': .375,
            'Numerics.Weights/overflow_rate': .5}) for s in there]
        assert w.handed==[(t.name, t.out_path, 'torchember-logframe')] and str(tmp_path/'track'/t.name) in t.out_path
    assert capsys.readouterr().out.splitlines()==[f'LogFrame of this run: {t.out_path}' for t,*_ in made]


def test_a_tracker_of_what_no_logframe_has(tmp_path, capsys):
    "If no row fits into a LogFrame, nothing is handed on, and a message is printed. An existing folder is not used."
    w,got = Wandb(),[]
    t = Tracker(emberTracker('r', tmp_path), offload_inc=1, offload_fn=lambda *args: got.append(args), wandb=w)
    t.note_step_end(0, False)
    t.t.put(lambda: [row(0, ttype='probe', tname='p', mean=1.), row(0, '', 'scalar', 'log', loss=1.)], True)
    t.note_step_end(0)
    assert (len(t), list(t), bool(t))==(0, [], True) # a tracker without rows is empty, but still true
    t.finish(False)
    assert (got, w.logged, w.handed, t.out_path)==([], [], [], None) and "Use read('r')" in capsys.readouterr().out
    t.t.put(lambda: [row(1, mean=1.)], True)
    assert [k.value for k in t]==[{'scalar_stats': {'mean': 1.}}] # no histogram, because the row has no exponents
    (tmp_path/'track'/'r').mkdir(parents=True)
    assert [t.folder().name for _ in range(2)]==['r_2', 'r_2'] and sorted(p.name for p in (tmp_path/'track').iterdir())==['r', 'r_2']


def test_what_a_function_gave_twice(tmp_path):
    "Each full tensor gets its own number and file. Names are translated, and a result that is no dict stays unchanged."
    calls = []
    def f(x): return {'scalar_stats': {'rm2': x, 'own': x+1}, 'exp_hist': {'hist': [x, 0, 0], 'bins': [-8, -7, -6]}, 'full_tensor': np.full(2, x),
        'max_abs': 9} if x else 'none'
    s = Stash(f, lambda: calls.append(1) or tmp_path)
    assert [s(x) for x in (5, 0, 6)]==[{'rms': 5, 'own': 6, 'exponents': [5, 0, 0], 'exponent_min': -7, 'full_tensor': 0, 'abs_max': 9}, 'none',
        {'rms': 6, 'own': 7, 'exponents': [6, 0, 0], 'exponent_min': -7, 'full_tensor': 1, 'abs_max': 9}]
    assert {p.name: np.load(p).tolist() for p in (tmp_path/'tensors').iterdir()}=={'0.npy': [5, 5], '1.npy': [6, 6]}


def test_a_logframe_whole():
    "Two modules with several outputs, rows without exponents or with different ranges, and the way back to rows."
    lstm = dict(module='model(Net).h(List).0(LSTM)', dtype='bfloat16', call=0)
    root = dict(module='model(Net)', dtype='float32', call=0, step=4, nan=0)
    rows = [{**lstm, 'ttype': 'output_grad', 'tname': 'output_10', 'step': 3, 'mean': 1., 'rms': .1, 'nan': 0},
        {**lstm, 'ttype': 'output', 'tname': 'output_10', 'step': 3, 'mean': 2., 'rms': .2, 'exponents': [1, 2, 3], 'exponent_min': 5, 'nan': 0},
        {**lstm, 'ttype': 'output', 'tname': 'output_9', 'step': 3, 'mean': 3., 'rms': .3, 'exponents': [4, 5, 6, 7], 'exponent_min': 2, 'nan': 2},
        {**lstm, 'ttype': 'output', 'tname': 'output_9', 'step': 3, 'mean': 4., 'rms': .4, 'call': 1, 'nan': 0},
        {**lstm, 'ttype': 'weight', 'tname': 'weight_0', 'pname': 'weight_ih', 'step': 4, 'mean': 5., 'rms': .5, 'nan': 0},
        {**lstm, 'ttype': 'optimizer', 'tname': 'exp_avg_sq_12', 'pname': 'bias', 'step': 4, 'mean': 6., 'rms': .6, 'nan': 0},
        {**root, 'ttype': 'output', 'tname': 'output_0', 'mean': 7., 'rms': .7}, {**root, 'ttype': 'weight_grad', 'tname': 'grad_0', 'pname': 'weight',
            'mean': 8., 'rms': .8}, {**lstm, 'ttype': 'weight', 'tname': 'weight_1', 'pname': 'kernel', 'step': 4, 'mean': 9., 'rms': .9, 'nan': 0}]
    lf = to_logframe(pd.DataFrame(rows))
    assert [*lf.columns]==[(META, c) for c in ('name', 'type', 'tensor_type', 'step', 'dtype')]+[(STAT, c) for c in ('mean', 'rm2', 'nan')]+ \
        [(EXP, e) for e in (-math.inf, 2, 3, 4, 5, math.inf)]
    h,none = ('LSTM', 'bfloat16'),[0]*6
    want = [('h.0.output_10', *h, 'Gradient', 3, 1., .1, 0, none), ('h.0.output_10', *h, 'Activation', 3, 2., .2, 0, [1, 0, 0, 0, 2, 3]),
        ('h.0', *h, 'Activation', 3, 3., .3, 2, [4, 5, 6, 0, 0, 7]), ('h.0', *h, 'Activation', 3, 4., .4, 0, none),
        ('h.0.weight_ih', *h, 'Weights', 4, 5., .5, 0, none), ('h.0.bias', *h, 'Optimiser_State.exp_avg_sq', 4, 6., .6, 0, none),
        ('', 'Net', 'float32', 'Activation', 4, 7., .7, 0, none), ('weight', 'Net', 'float32', 'Weight_Gradients', 4, 8., .8, 0, none),
        ('h.0', *h, 'Weights', 4, 9., .9, 0, none)]
    got = [(*(r[META, c] for c in ('name', 'type', 'dtype', 'tensor_type', 'step')), r[STAT, 'mean'], r[STAT, 'rm2'], r[STAT, 'nan'],
        [r[EXP, e] for e in (-math.inf, 2, 3, 4, 5, math.inf)]) for _,r in lf.iterrows()]
    assert got==want
    back = from_logframe(lf)
    assert list(zip(back.path, back.module, back.ttype, back.tname, back.step, back.call, back['type'], strict=True))==[
        ('h.0', 'model(Net).h.0(LSTM)', 'output_grad', 'output_10', 3, 0, 'LSTM'), ('h.0', 'model(Net).h.0(LSTM)', 'output', 'output_10', 3, 0, 'LSTM'),
        ('h.0', 'model(Net).h.0(LSTM)', 'output', 'output_0', 3, 0, 'LSTM'), ('h.0', 'model(Net).h.0(LSTM)', 'output', 'output_0', 3, 1, 'LSTM'),
        ('h.0', 'model(Net).h.0(LSTM)', 'weight', 'weight_0', 4, 0, 'LSTM'), ('h.0', 'model(Net).h.0(LSTM)', 'optimizer', 'exp_avg_sq_1', 4, 0, 'LSTM'),
        ('', 'model(Net)', 'output', 'output_0', 4, 0, 'Net'), ('', 'model(Net)', 'weight_grad', 'grad_0', 4, 0, 'Net'),
        ('h.0', 'model(Net).h.0(LSTM)', 'weight', 'weight_2', 4, 0, 'LSTM')]
    assert back.exponents.iloc[1]==[1, 0, 0, 0, 2, 3] and back.exponent_min.iloc[1]==2 and math.isnan(back.exponents.iloc[0])
    assert back['nan'].tolist()==[0, 0, 2]+[0]*6 and back.rms.tolist()==[r['rms'] for r in rows]
    again = to_logframe(pd.DataFrame([{**rows[0], 'rm2': 5.}])) # both rms and rm2 exist: rm2 is a statistic of the user
    assert again[STAT].iloc[0].to_dict()=={'mean': 1., 'rms': .1, 'rm2': 5.}


def test_names_in_a_logframe_and_back():
    "The first output has the name of its module. Names that look like outputs, and several calls, are kept."
    net = dict(module='model(Net).a(Two)', dtype='float32', call=0, step=0, mean=1.)
    rows = [{**net, 'ttype': 'output_grad', 'tname': 'output_0'}, {**net, 'ttype': 'output', 'tname': 'output_1'},
        {**net, 'ttype': 'output', 'tname': 'output_2'}, {**net, 'ttype': 'output', 'tname': 'output_1', 'step': 1},
        {**net, 'ttype': 'output', 'tname': 'output_1', 'step': 1, 'call': 1},
        {**net, 'module': 'model(Net).a(Two).output_7(Head)', 'ttype': 'output', 'tname': 'output_0'},
        *({**net, 'ttype': t, 'tname': f'{n}_{i}', 'pname': p} for t,n in (('weight', 'weight'), ('weight_grad', 'grad'))
            for i,p in enumerate(('bias', 'weight')))]
    lf = to_logframe(pd.DataFrame(rows))
    names = ['a.output_0', 'a', 'a.output_2', 'a', 'a', 'a.output_7', 'a.bias', 'a', 'a.bias', 'a']
    assert lf[META, 'name'].tolist()==names
    # Track & Visualize gives parameters no type
    lf[META, 'type'] = [None if i>5 else c for i,c in enumerate(lf[META, 'type'])]
    back = from_logframe(lf)
    assert list(zip(back.path, back.module, back.tname, back.step, back.call, strict=True))==[(*(('a.output_7', 'model.a(Two).output_7(Head)') if i==5 else
        ('a', 'model.a(Two)')), n, s, c) for i,(n,s,c) in enumerate((('output_0', 0, 0), ('output_0', 0, 0), ('output_2', 0, 0), ('output_0', 1, 0),
        ('output_0', 1, 1), ('output_0', 0, 0), ('weight_0', 0, 0), ('weight_1', 0, 0), ('grad_0', 0, 0), ('grad_1', 0, 0)))]


def test_means_for_wandb_are_of_what_there_is():
    "Tensors without exponents are left out of the rates, and NaN is left out of the means."
    lf = to_logframe(pd.DataFrame([row(0, mean=2., exponents=[1, 3, 0], exponent_min=0), row(0, call=1, mean=math.nan), row(0, call=2, mean=4.)]))
    assert means_by_type(lf)=={'Numerics.Activation/mean': 3., 'Numerics.Activation/underflow_rate': .25, 'Numerics.Activation/overflow_rate': 0.}


def test_two_runs_read_together_and_apart(tmp_path):
    "Columns that one run lacks are empty, and counts are 0. Rows are in the order of the log and of the requested runs."
    def write(name, rows):
        t = emberTracker(name, tmp_path)
        # statistics come first, as in the lines of a log
        for r in rows: t({k: v for k,v in sorted(r.items(), key=lambda kv: kv[0] not in ('mean', 'std')) if v is not None})
        t.close()
    write('b', [row(s, 'z', mean=1.+s, nan=s) for s in (1, 0)])
    write('a', [row(0, 'y', ttype='weight', tname='weight_0', pname='bias', std=5., epoch='e', run='mine'), row(2, 'z', mean=7.)])
    df = read(['b', 'a'], home=tmp_path)
    none = lambda v: None if v is None or v!=v else v
    words = ('run', 'path', 'ttype', 'pname', 'step', 'epoch', 'mean', 'std', 'nan', 'posinf', 'mark_run')
    got = [tuple(none(r.get(c)) for c in words) for r in df.to_dict('records')]
    want = [('b', 'z', 'output', None, 1, None, 2., None, 1, 0, None), ('b', 'z', 'output', None, 0, None, 1., None, 0, 0, None),
        ('a', 'y', 'weight', 'bias', 0, 'e', None, 5., 0, 0, 'mine'), ('a', 'z', 'output', None, 2, None, 7., None, 0, 0, None)]
    assert got==want and df.nan.dtype.kind=='i'
    assert [*df.columns]=='mean std run module path ttype tname step call dtype pname nan posinf neginf epoch mark_run'.split()
    assert [*map(tuple, read('*', home=tmp_path)[['run', 'step']].values)]==[('a', 0), ('a', 2), ('b', 1), ('b', 0)]
    # the last step of each run
    assert [*map(tuple, read(['a', 'b'], steps=-1, home=tmp_path)[['run', 'step', 'path']].values)]==[('a', 2, 'z'), ('b', 1, 'z')]
    some = read(['b', 'a'], columns=['step', 'mean'], path='z', home=tmp_path)
    assert list(some.itertuples(index=False, name=None))==[('b', 1, 2.), ('b', 0, 1.), ('a', 2, 7.)]
    assert read('b', columns=['mean', 'step'], home=tmp_path).values.tolist()==[[2., 1], [1., 0]]
    assert set(read('b*', home=tmp_path).run)=={'b'} # only one run matches this pattern
    assert [*df.path.cat.categories]==['z', 'y'] # categories are in the order of their first rows
    some = read(['b', 'a'], columns=lambda c: c in ('mean', 'step'), home=tmp_path)
    assert [*some.columns]==['mean', 'run', 'step'] and some.run.tolist()==['b', 'b', 'a', 'a']
    alone = read(['b', 'a'], path='y', home=tmp_path) # a run without matching rows adds no columns
    assert [*alone.columns]==[*read(['a'], path='y', home=tmp_path).columns] and alone.run.tolist()==['a']
    w = wide(read('b', home=tmp_path), 'mean')
    assert (w.index.tolist(), w.columns.tolist(), w['z'].tolist())==([0, 1], ['z'], [1., 2.])
