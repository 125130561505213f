"Functions of tables are compared with simple loops: the row that counts, its position, and its label."
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchember import emberTracker, read, summary, tree, wide
from torchember.show.run_summary import first_nonfinite_tensor
from torchember.show.heatmaps import column_edges
from torchember.show.histograms import rows_at_step, total_counts
from torchember.show.live.following import KeptLines, extreme_lines
from torchember.show.page.data import page_of
from torchember.show.select import grid, pick, places, series
from torchember.show.trees import boxes
from torchember.store.reading import without_superseded

numbers = st.sampled_from([1., 2., 3., .5, 100., 1e-6, -1., math.nan, math.inf])
row = st.fixed_dictionaries(dict(path=st.sampled_from(['', 'a', 'a.b', 'c']), ttype=st.sampled_from(['output', 'weight']),
    tname=st.sampled_from(['t_0', 't_1']), call=st.integers(0, 1), step=st.integers(0, 6), phase=st.sampled_from([None, None, 'eval']),
    std=numbers, nan=st.sampled_from([0, 0, 2]), posinf=st.just(0), neginf=st.just(0)))
tables = st.lists(row, min_size=1, max_size=25).map(pd.DataFrame)
some = settings(max_examples=50, deadline=None)


def same(a, b): return a==b or math.isnan(a) and math.isnan(b) or math.isclose(a, b, rel_tol=1e-12)
def place(r): return r['path'], r['ttype'], r['tname'], r['call']


def trained(df):
    rows = df.to_dict('records')
    return [r for r in rows if r['phase']!='eval'] or rows


def lines_of(df):
    "Return a dict: place -> step -> (mean of the usable values, True if one is not finite). A place is a tensor of a call."
    found = {}
    for r in trained(df): found.setdefault(place(r), {}).setdefault(r['step'], []).append((r['std'], r['nan']>0 or math.isinf(r['std'])))
    def one(some):
        said = [v for v,bad in some if bad or not math.isnan(v)]
        return sum(said)/len(said) if said else math.nan, any(bad for _,bad in some)
    return {p: {s: one(some) for s,some in sorted(steps.items())} for p,steps in found.items()}


@some
@given(tables)
def test_lines_of_a_table(df):
    "Lines are in the order of the log, each sorted by step. Evaluation rows are left out if there are training rows."
    got,want = list(series(df, 'std')),lines_of(df)
    assert len(got)==len(want)
    for (_,x,y,bad),steps in zip(got, want.values(), strict=True):
        assert x.tolist()==list(steps) and bad.tolist()==[b for _,b in steps.values()]
        assert all(same(a, b) for a,(b,_) in zip(y.tolist(), steps.values(), strict=True))


@some
@given(tables)
def test_labels_tell_tensors_apart(df):
    "There are as many labels as tensors, and no label is longer than needed."
    code,labels = places(df)
    known = list(dict.fromkeys(map(place, df.to_dict('records'))))
    assert code.tolist()==[known.index(place(r)) for r in df.to_dict('records')] and len(labels)==len(set(labels))==len(known)
    for (p,t,n,c),label in zip(known, labels, strict=True):
        others = [k for k in known if k[:2]==(p, t)]
        assert label.startswith(p or 'model') and (f'({t})' in label)==(len({k[1] for k in known})>1)
        assert (n in label)==(len({k[2] for k in others})>1) and (f'call {c}' in label)==(len({k[3] for k in others if k[2]==n})>1)


@some
@given(tables, st.integers(1, 4), st.integers(1, 4))
def test_cells_of_a_grid(df, most_rows, most_columns):
    "A cell shows the value that is farthest from its line's median. A NaN or infinity in a cell is always marked."
    lines,g = list(lines_of(df).values()),grid(series(df, 'std'), most_rows, most_columns)
    steps = sorted({s for line in lines for s in line})
    def group(i, n, most): return i*most//n if n>most else i
    column = {s: group(i, len(steps), most_columns) for i,s in enumerate(steps)}
    rows = [group(i, len(lines), most_rows) for i in range(len(lines))]
    assert [len(m) for m in g.members]==[rows.count(i) for i in sorted(set(rows))] and [m[0] for m in g.members]==g.labels
    assert g.steps.tolist()==[min(s for s in steps if column[s]==c) for c in sorted(set(column.values()))]
    finite = [v for line in lines for v,_ in line.values() if math.isfinite(v)]
    scale = math.log10 if finite and min(finite)>0 else float
    for i in range(len(g.labels)):
        for j in range(len(g.steps)):
            cell = [(line, *line[s]) for line,r in zip(lines, rows, strict=True) if r==i for s in line if column[s]==j]
            assert g.bad[i, j]==any(b for *_,b in cell)
            def far(line, v):
                known = [scale(w) for w,_ in line.values() if math.isfinite(w)]
                return abs(scale(v)-(np.median(known) if known else 0.)) if math.isfinite(v) else math.nan
            known = [(far(line, v), v) for line,v,_ in cell if math.isfinite(v)]
            if known and all(math.isfinite(v) or math.isnan(v) for _,v,_ in cell):
                assert any(same(g.value[i, j], v) and f>=max(known)[0]-1e-12 for f,v in known), (cell, g.value[i, j])
            elif not cell: assert math.isnan(g.value[i, j])


rows_again = st.lists(st.fixed_dictionaries(
    dict(step=st.integers(0, 1), module=st.sampled_from('mn'), ttype=st.sampled_from(['output', 'input']), tname=st.sampled_from('xy'), call=st.integers(0, 1)),
    optional=dict(micro=st.integers(0, 1), phase=st.just('eval'), backward=st.just(1), rank=st.integers(0, 1), shard=st.sampled_from('pq'),
        supersedes=st.just(True))), max_size=12)


@given(rows_again)
def test_a_row_stands_in_place_of_the_earlier_ones_of_its_place(rows):
    "A row supersedes only earlier rows of the same step, module, tensor, call, pass, phase, backward, rank and shard."
    rows = [{**r, 'mean': float(i)} for i,r in enumerate(rows)]
    def where(r): return {k: v for k,v in r.items() if k not in ('mean', 'supersedes')}
    want = [r['mean'] for i,r in enumerate(rows) if not any('supersedes' in o and where(o)==where(r) for o in rows[i+1:])]
    assert [r['mean'] for r in without_superseded(rows)]==want and not any('supersedes' in r for r in without_superseded(rows))
    if rows: assert without_superseded(pd.DataFrame(rows))['mean'].tolist()==want


@pytest.mark.parametrize(('asked', 'wanted'), [(-1, {9}), (-2, {8}), ([0, -1], {0, 9}), (range(2, 8, 3), {2, 5}), (slice(-3, None), {8, 9}),
    (slice(None, 4), {0, 2, 3}), (slice(2, -1, 3), {2, 5, 8}), (slice(None, -7), {0, 2}), (lambda s: s%4==0, {0, 8}), ((3, 3), {3}), ({5}, {5})])
def test_steps_that_are_asked_for(asked, wanted, tmp_path):
    "Negative steps count from the last step of the run, wherever this step is in the file and whichever modules have it."
    t = emberTracker('r', tmp_path)
    for s in (0, 9, 2, 3, 5, 8):
        for m in 'ab' if s<9 else 'a': t({'step': s, 'module': f'model(N).{m}(L)', 'ttype': 'output', 'tname': 'output_0', 'call': 0, 'mean': 1.*s})
    t({'step': None, 'note': 'no step'})
    t.close()
    df = read('r', steps=asked, home=tmp_path)
    assert list(zip(df.step, df.path, df['mean'], strict=True))==[(s, m, s) for s in (0, 9, 2, 3, 5, 8) if s in wanted for m in ('ab' if s<9 else 'a')]


def test_runs_of_the_same_name_in_two_folders(tmp_path):
    "Both runs are in the table. A run that is named twice is read only once."
    for home in 'xy':
        t = emberTracker('r', tmp_path/home)
        t({'step': 0, 'module': 'model(N)', 'ttype': 'output', 'tname': 'output_0', 'call': 0, 'mean': float(home=='y')})
        t.close()
    x,y = (tmp_path/h/'log'/'r' for h in 'xy')
    df = read([x, y, x])
    assert list(zip(df.run, df['mean'], strict=True))==[('r', 0.), ('r', 1.)]


@some
@given(tables)
def test_wide_has_the_last_row_that_says_something(df):
    "If a step has several calls, the last one with a value counts."
    for ttype in df.ttype.unique():
        rows = [r for r in df.to_dict('records') if r['ttype']==ttype]
        got,labels = wide(df, 'std', ttype),places(df[df.ttype==ttype].drop(columns='call'))
        assert got.index.tolist()==sorted({r['step'] for r in rows}) and len(got.columns)==len(labels[1])
        want = {}
        for r,c in zip(rows, labels[0], strict=True):
            if not math.isnan(r['std']) or r['nan']: want[r['step'], c] = r['std']
        for i,s in enumerate(got.index):
            for c in range(len(got.columns)): assert same(got.iloc[i, c], want.get((s, c), math.nan))


@given(st.lists(st.tuples(st.integers(-4, 3), st.lists(st.integers(0, 9), min_size=3, max_size=6)), min_size=1, max_size=5))
def test_exponents_of_rows_with_other_ranges_are_added(rows):
    df = pd.DataFrame([dict(exponent_min=lo, exponents=c) for lo,c in rows]+[dict(exponent_min=math.nan, exponents=None)])
    counts,lo,below,above = total_counts(df)
    want = {}
    for first,c in rows:
        for i,n in enumerate(c[1:-1]): want[first+i] = want.get(first+i, 0)+n
    assert {lo+i: n for i,n in enumerate(counts.tolist())}=={k: want.get(k, 0) for k in range(min(want), max(want)+1)}
    assert (below, above)==(sum(c[0] for _,c in rows), sum(c[-1] for _,c in rows))


@some
@given(tables)
def test_a_summary_has_a_line_for_each_tensor(df):
    df = df.assign(std=df['std'].replace(math.inf, 7.))
    lines = {p: line for p,line in lines_of(df).items() if p[1]==('output' if 'output' in set(df.ttype) else 'weight')}
    if not lines or not any(math.isfinite(v) for line in lines.values() for v,_ in line.values()): return
    ttype = next(iter(lines))[1]
    rows = df[df.ttype==ttype]
    lines = lines_of(rows)
    got = summary(df, ttype, stats=('std',)).df
    assert len(got)==len(lines)
    for (_,r),line in zip(got.iterrows(), lines.values(), strict=True):
        values = [v for v,_ in line.values() if math.isfinite(v)]
        assert r['steps']==len(line) and r['not finite']==sum(b for _,b in line.values())
        assert same(r['std first'], values[0] if values else math.nan) and same(r['std last'], values[-1] if values else math.nan)
        if values:
            y = np.log(values) if min(values)>0 else np.array(values)
            far = abs(y-np.median(y))
            assert any(same(r['std worst'], v) and f>=max(far)-1e-12 for v,f in zip(values, far, strict=True))


@some
@given(tables)
def test_the_first_trouble_is_of_the_earliest_step(df):
    "The first trouble (NaN) is in the earliest step, wherever this step is in the log. Within a step, the first row counts."
    rows = df.to_dict('records')
    bad = [i for i,r in enumerate(rows) if r['nan']]
    got = first_nonfinite_tensor(df)
    assert (got is None)==(not bad)
    if bad: assert got.name==min(bad, key=lambda i: (rows[i]['step'], i))


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1., 2., -1., math.nan, math.inf])), max_size=20), st.integers(1, 5))
def test_numbers_that_are_kept_of_many(some, width):
    "From each bin of steps, the smallest, the largest and the first non-finite number are kept, separately for each name."
    lines = [(s, b'', {'loss': v}) for s,v in some]+[(0, b'', {'rate': 9.}), (0, b'', {}), (0, b'', {})]
    want = {len(some), len(some)+1}
    for b in {s//width for s,_ in some}:
        here = [(i, v) for i,(s,v) in enumerate(some) if s//width==b]
        finite = [(i, v) for i,v in here if math.isfinite(v)]
        if finite: want |= {min(finite, key=lambda p: (p[1], p[0]))[0], max(finite, key=lambda p: (p[1], -p[0]))[0]}
        want |= {i for i,v in here if not math.isfinite(v) and i==min(j for j,w in here if not math.isfinite(w))}
    assert extreme_lines(lines, width)==[lines[i] for i in sorted(want)]


def test_the_lines_that_are_kept_are_bounded():
    "The number of kept lines is limited, for any number of names, and including findings."
    kept = KeptLines(100)
    for s in range(3000):
        kept.add(s, b'number', {f'name {s%500}': 1.})
        kept.add(s, b'finding')
        assert len(kept.lines)<=100
    assert kept.lines[-2:]==[(2999, b'number'), (2999, b'finding')] and [s for s,l in kept.lines if l==b'finding']==[*range(2975, 3000)]
    numbers = [s for s,l in kept.lines if l==b'number']
    # only the latest numbers are kept, because 500 names do not fit into one bin
    assert numbers==[*range(numbers[0], 3000)]
    kept.add(3000, b'only texts', {})
    assert (3000, b'only texts') in kept.lines and len(kept.findings)==25


@given(st.lists(st.sampled_from(['', 'a', 'a.b', 'a.c', 'a.b.d', 'e', 'e.f', 'e.g']), min_size=1, max_size=8, unique=True), st.sampled_from([None, 1, 2]))
def test_boxes_lie_inside_of_their_modules_box(paths, deepest):
    "A module's box is as tall as the boxes of its children together. A module without children has height 1."
    got = {b.path: b for b in boxes(paths, deepest)}
    cut = list(dict.fromkeys('.'.join(p.split('.')[:deepest]) for p in paths))
    known = {'', *(p[:i] for p in cut for i in range(len(p)+1) if p and (i==len(p) or p[i]=='.'))}
    assert set(got)==known
    for path,b in got.items():
        inside = sorted((c for p,c in got.items() if p and p.rpartition('.')[0]==path), key=lambda c: c.top)
        assert b.depth==(path.count('.')+1 if path else 0) and b.height==(sum(c.height for c in inside) or 1)
        top = b.top
        for c in inside:
            assert c.top==top
            top += c.height
        first = [next(i for i,p in enumerate(paths) if p==c.path or p.startswith(f'{c.path}.')) for c in inside]
        assert first==sorted(first)


def test_a_module_of_several_tensors_has_the_colour_of_the_first_that_is_finite():
    "In the picture of the module tree, the values are those of the last step."
    some = [('a', 'output_0', 1.), ('a', 'output_1', 2.), ('b', 'output_0', math.nan), ('b', 'output_1', 3.), ('c', 'output_0', 4.),
        ('c', 'output_1', math.nan), ('d', 'output_0', math.nan), ('d', 'output_1', math.nan)]
    df = pd.DataFrame([dict(path=p, ttype='output', tname=t, step=s, std=v+10-10*s) for s in (0, 1) for p,t,v in some])
    said = dict(t.get_text().split() for t in tree(df).texts if '  ' in t.get_text())
    assert {p: float(v) for p,v in said.items() if v!='nan'}=={'a': 1., 'b': 3., 'c': 4.}


def test_a_page_has_the_exponents_of_the_step_of_the_first_trouble():
    "A page of a long run has the exponents of some steps, including the first, the last, and that of the first NaN."
    def page(at):
        rows = [dict(path='a', ttype='output', tname='output_0', step=s, call=0, std=1., nan=int(s in at), posinf=0, neginf=0, exponents=[0, s, 0],
            exponent_min=-1) for s in range(100)]
        return page_of(pd.DataFrame(rows))
    usual = page(())['kinds'][0]['exponents']['step']
    assert {0, 99} <= set(usual) and len(usual)==24 and not {37, 38} & set(usual)
    got = page((37, 38))
    assert got['trouble']['step']==37 and got['kinds'][0]['exponents']['step']==sorted([*usual, 37])


def test_columns_end_halfway_between_steps():
    assert column_edges([0, 10, 30]).tolist()==[-5, 5, 20, 40] and column_edges([7]).tolist()==[6.5, 7.5]


def test_a_step_that_is_asked_for():
    df = pd.DataFrame(dict(step=[0, 10, 10, 30], std=[1., 2., 3., 4.]))
    for asked,(step,values) in {None: (30, [4.]), -1: (30, [4.]), -3: (0, [1.]), 10: (10, [2., 3.]), 0: (0, [1.])}.items():
        rows,got = rows_at_step(df, asked)
        assert got==step and rows['std'].tolist()==values
    with pytest.raises(ValueError, match='nearest: 0, 10, 30'): rows_at_step(df, 11)


def test_layers_that_are_asked_for():
    "Layers are selected by path, glob, regular expression and parameter. Each matching row is returned once."
    import re
    df = pd.DataFrame(dict(path=['', 'a', 'a', 'a.b', 'c', 'a'], ttype='weight', tname=['w_0', 'w_0', 'w_1', 'w_0', 'w_0', 'w_0'], step=[0, 0, 0, 0, 0, 1],
        pname=['weight', 'weight', 'bias', 'weight', 'weight', 'weight']))
    for asked,rows in {'a': [1, 2, 5], 'a*': [1, 2, 3, 5], 'a.bias': [2], '': [0], re.compile('b|c'): [3, 4], None: [0, 1, 2, 3, 4, 5]}.items():
        assert pick(df, asked).index.tolist()==rows
    assert pick(df, ['c', 'a.bias']).index.tolist()==[2, 4] and pick(df, ['c', 'a.b']).index.tolist()==[3, 4]
