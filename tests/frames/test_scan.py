"`scan` gives the same columns, rows and numbers as `read`, with each engine, for any content and any kind of storage."
import json
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow.dataset as ds
import pytest
from drawn import any_row, begun, lines, row
from hypothesis import HealthCheck, given, settings, strategies as st

from torchember import compact, query, read, scan
from torchember.store.parts import Part, folder_of, read_part_list


def plain(v, kind=None):
    "Return a value in a common form for all engines: None for NaN, floats for numbers, and texts for other types."
    if v is None or v is pd.NaT or isinstance(v, float) and v!=v: return None
    if isinstance(v, pd.Timestamp|np.datetime64): return str(pd.Timestamp(v))
    if isinstance(v, np.ndarray|tuple|list): return [plain(x) for x in v]
    if isinstance(v, dict|bool|np.bool_): return str(v)
    return float(v) if isinstance(v, int|float|np.number) else str(v)

def as_json(v):
    "Return the JSON text of a value, as a JSON column contains it."
    if isinstance(v, tuple): v = list(v)
    return None if v is None or isinstance(v, float) and v!=v else json.dumps(v)

def same(got, want):
    # merged rows of several ranks may have an empty column `numel`
    if 'numel' not in want and 'numel' in got: assert got.pop('numel').isna().all()
    assert list(got)==list(want)
    for c in want:
        a,b = got[c].tolist(),want[c].tolist()
        if [*map(plain, a)]==[*map(plain, b)]: continue
        if want[c].dtype.kind=='M' or c=='ts': b = [str(pd.Timestamp(x)) if isinstance(x, pd.Timestamp) else x for x in b]
        assert [json.loads(x) if isinstance(x, str) else plain(x) for x in a]==[None if as_json(x) is None else json.loads(as_json(x)) for x in b], c


@pytest.mark.slow
@pytest.mark.parametrize('kept', ['lines', 'parts', 'both'])
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(row, min_size=1, max_size=12))
def test_rows_are_those_of_read(tmp_path, rows, kept):
    shutil.rmtree(tmp_path)
    begun(tmp_path, lines(rows))
    if kept=='both': chunked_parts(tmp_path, rows)
    elif kept=='parts': compact('a', home=tmp_path)
    same(scan('a', 'arrow', home=tmp_path).to_table().to_pandas(), read('a', home=tmp_path))


def chunked_parts(home, rows, name='a'):
    "Create a run whose first half of rows is in Parquet parts, and its second half in lines."
    t = begun(home, lines(rows[:len(rows)//2]), name)
    compact(name, home=home)
    with open(t.log_path, 'ab') as f: f.write(lines(rows[len(rows)//2:]))


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(any_row, min_size=1, max_size=6), parts=st.booleans())
def test_whatever_is_in_it(tmp_path, rows, parts):
    "For any content of rows, no engine fails, and the number of rows is right."
    shutil.rmtree(tmp_path)
    begun(tmp_path, lines(rows))
    if parts: compact('a', home=tmp_path)
    try: want = read('a', home=tmp_path)
    except (TypeError, AttributeError, ValueError): return
    assert len(scan('a', home=tmp_path).collect())==len(want)
    assert scan('a', 'arrow', home=tmp_path).count_rows()==len(want)


# ---- runs of several ranks

g = np.random.default_rng(0)

def stats(a, step, ttype, tname, part, **more):
    return dict(shape=[*a.shape], mean=a.mean(), std=a.std(ddof=1), min=a.min(), max=a.max(), module='model(Net).fc(Linear)', ttype=ttype,
        tname=tname, step=step, call=0, dtype='float64', part=part) | more

def ranked(home, n=40, own=False, name='run'):
    "Write the logs of two ranks with halves of a batch. The weights are equal, or with `own` different and recorded in every tenth step."
    for d in 'log','data': (home/d).mkdir(exist_ok=True, parents=True)
    x,w = g.normal(size=(n, 8, 5)),g.normal(size=(n, 2, 4, 5))
    for rank in range(2):
        log = []
        for s in range(n):
            log.append(stats(x[s][4*rank:4*rank+4], s, 'output', 'output_0', 'dp:B', rank=rank))
            if s%10==0 or not own: log.append(stats(w[s, rank*own], s, 'weight', 'weight_0', 'dp:?' if own else 'dp:R', rank=rank))
        (home/'log'/f'{name}.rank{rank}').write_bytes(lines(log))
        (home/'data'/f'ranks_{name}.rank{rank}.json').write_text(json.dumps(dict(rank=rank, world=2, axes={'dp': [0, 1]})))


@pytest.mark.filterwarnings('ignore::torchember.EmberWarning')
@pytest.mark.parametrize('own', [False, True])
@pytest.mark.parametrize('parts', [False, True])
def test_several_processes(tmp_path, monkeypatch, own, parts):
    "Merging chunk by chunk gives the same rows as merging everything, and the names of modules agree."
    ranked(tmp_path, own=own)
    if parts: compact('run', home=tmp_path)
    monkeypatch.setattr('torchember.frames.chunks.most_merged', 20)
    rows = scan('run', 'arrow', home=tmp_path)
    assert len(rows.pruned.chunks)>3 and [c.steps for c in rows.pruned(ds.field('step')==39)]==[rows.pruned.chunks[-1].steps]
    want = read('run', home=tmp_path)
    same(rows.to_table().to_pandas(), want)
    assert want['path'].nunique()==1+own and len(want)==(88 if own else 80)
    same(scan('run', 'arrow', home=tmp_path, per_rank=True).to_table().to_pandas(), read('run', home=tmp_path, per_rank=True))


def test_runs_together(tmp_path):
    "A table of several runs has a column `run`. A condition on this column avoids reading other runs."
    ranked(tmp_path, 3)
    rows = [dict(mean=1., run='a mark', module='m(Net).f(L)', ttype='output', tname='o', step=s, call=0, dtype='float32', epoch=0) for s in range(3)]
    for name in 'a','b': begun(tmp_path, lines(rows), name)
    compact('b', home=tmp_path)
    every = scan('*', 'arrow', home=tmp_path)
    same(every.to_table().to_pandas(), read('*', home=tmp_path))
    assert [c.run for c in every.pruned(ds.field('run')=='b')]==['b']
    assert set(scan('*', home=tmp_path).filter(pl.col('run')=='run', pl.col('step')>1).collect()['mark_run'])=={None}
    assert query("SELECT run, count(*) n FROM log GROUP BY run ORDER BY run", home=tmp_path).values.tolist()==[['a', 3], ['b', 3], ['run', 6]]


# ---- engines for queries

def big(home, steps=400):
    "Create a run with Parquet parts, later lines, and superseding rows. Return its table."
    rows = [dict(mean=float(x), std=1/3, rms=2., module=f'm(Net).{i}(L)', ts='2024-01-01 00:00:00', ttype=t, tname='o', step=s, call=0, dtype='float32')
        for s in range(steps) for i in range(3) for t,x in (('output', s*i), ('weight', np.nan if s==7 else -i))]
    rows.insert(100, rows[90]|dict(mean=1e6, supersedes=True))
    begun(home, lines(rows[:-60]))
    compact('a', home=home)
    with open(home/'log'/'a', 'ab') as f: f.write(lines(rows[-60:]))
    return read('a', home=home)

def answer(df):
    "Return the reference result: the mean of the output means of each module, over some steps."
    some = df[(df.ttype=='output') & (df.step>=10) & (df.step<390)]
    return [(p, float(m)) for p,m in some.groupby(some['path'].astype(str))['mean'].mean().sort_index().items()]

question = dict(ttype='output', steps=range(10, 390))

def ask_polars(rows):
    of = (pl.col('ttype')=='output') & (pl.col('step')>=10) & (pl.col('step')<390)
    return rows.filter(of).group_by('path').agg(pl.col('mean').mean()).sort('path').collect().rows()

def ask_duckdb(rows): return rows.filter("ttype='output' AND step BETWEEN 10 AND 389").aggregate('path, avg(mean)').order('path').fetchall()

def ask_arrow(rows):
    of = (ds.field('ttype')=='output') & (ds.field('step')>=10) & (ds.field('step')<390)
    t = rows.to_table(columns=['path', 'mean'], filter=of).group_by('path').aggregate([('mean', 'mean')]).sort_by('path')
    return list(zip(t['path'].to_pylist(), t['mean_mean'].to_pylist(), strict=True))

def ask_pandas(rows): return answer(pd.concat(rows))

def ask_dask(rows, **how):
    some = rows[(rows.ttype=='output') & (rows.step>=10) & (rows.step<390)]
    return [(p, float(m)) for p,m in some.groupby('path')['mean'].mean().compute(**how).sort_index().items()]

def ask_ray(rows):
    from ray.data.expressions import col
    of = (col('ttype')=='output') & (col('step')>=10) & (col('step')<390)
    df = rows.filter(expr=of).groupby('path').mean('mean').to_pandas().sort_values('path')
    return list(zip(df['path'].tolist(), df['mean(mean)'].tolist(), strict=True))

ask = dict(polars=ask_polars, duckdb=ask_duckdb, arrow=ask_arrow, pandas=ask_pandas, dask=partial(ask_dask, scheduler='synchronous'))

def equal(got, want):
    assert [p for p,_ in got]==[p for p,_ in want] and np.allclose([m for _,m in got], [m for _,m in want], rtol=1e-12, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize('engine', ask)
@pytest.mark.parametrize('what', ['one process', 'several'])
def test_one_question(tmp_path, monkeypatch, engine, what):
    "All engines give the same result, with the condition in the query or in the arguments of `scan`."
    if what=='several': ranked(tmp_path, 400, name='a')
    want = answer(big(tmp_path) if what!='several' else read('a', home=tmp_path))
    monkeypatch.setattr('torchember.frames.chunks.most_merged', 300)
    monkeypatch.setattr('torchember.frames.chunks.most_rows', 700)
    equal(ask[engine](scan('a', engine, home=tmp_path)), want)
    equal(ask[engine](scan('a', engine, home=tmp_path, columns=['path', 'ttype', 'step', 'mean'], **question)), want)


@pytest.mark.release # slow test, run only before a release
@pytest.mark.slow
# starting a Ray cluster needs 40 s of CPU time
@pytest.mark.parametrize('engine', ['dask', pytest.param('ray', marks=pytest.mark.release)])
def test_on_two_workers(tmp_path, engine):
    "Chunks are read and merged in the processes of two workers."
    if not find_spec('ray' if engine=='ray' else 'distributed'): pytest.skip(f'{engine} is not installed')
    ranked(tmp_path, 400, name='a')
    want = answer(read('a', home=tmp_path))
    got = subprocess.run([sys.executable, Path(__file__).with_name('clusters.py'), engine, tmp_path], capture_output=True, text=True, timeout=300)
    said = [s for s in got.stdout.splitlines() if s.startswith('answer ')]
    assert said, got.stderr[-3000:]
    equal(json.loads(said[0].removeprefix('answer ')), want)


# ---- chunks that are read or skipped

def test_only_what_is_asked_for(tmp_path, monkeypatch):
    "With polars and DuckDB, a condition on steps avoids reading other chunks."
    big(tmp_path)
    monkeypatch.setattr('torchember.frames.chunks.most_rows', 700)
    read_now = []
    from torchember.frames import dataset
    monkeypatch.setattr(dataset, 'chunk_table', lambda c, *a, of=dataset.chunk_table: read_now.append(c.steps) or of(c, *a))
    assert scan('a', home=tmp_path).filter(pl.col('step')==399, pl.col('mean')>0).select(pl.len()).collect().item()==2 and len(read_now)==1
    del read_now[:]
    assert scan('a', 'duckdb', home=tmp_path).filter('step=399 and mean>0').count('*').fetchall()==[(2,)] and len(read_now)==1
    del read_now[:]
    assert sum(map(len, scan('a', 'pandas', steps=-1, home=tmp_path)))==6 and len(read_now)==1
    del read_now[:]
    assert len(scan('a', home=tmp_path).head(5).collect())==5 and len(read_now)==1


def test_grows_meanwhile(tmp_path):
    "A log that grows is read only from the point reached before. A log that was replaced is read again."
    rows = [dict(mean=1., module='m(Net).f(L)', ttype='output', tname='o', step=s, call=0, dtype='float32') for s in range(9)]
    t = begun(tmp_path, lines(rows[:3])[:-5])
    assert scan('a', home=tmp_path).collect().height==2
    t.log_path.write_bytes(lines(rows[:6]))
    before = scan('a', home=tmp_path)
    with open(t.log_path, 'ab') as f: f.write(lines([r|dict(epoch='first') for r in rows[6:]]))
    assert before.collect().height==6 and scan('a', home=tmp_path).collect()['epoch'].to_list()==[None]*6+['first']*3
    t.log_path.write_bytes(lines([r|dict(mean='other', step=r['step']+100) for r in rows]))
    assert scan('a', home=tmp_path).collect()['mean'].to_list()==['"other"']*9 or scan('a', home=tmp_path).collect()['mean'].to_list()==['other']*9
    late = scan('a', home=tmp_path)
    compact('a', home=tmp_path)
    with pytest.raises(Exception, match='is shorter than before'): late.collect()
    assert scan('a', home=tmp_path).collect().height==9


def test_what_came_is_said(tmp_path):
    big(tmp_path, 20)
    with pytest.raises(ValueError, match="No engine 'spark'"): scan('a', 'spark', home=tmp_path)
    with pytest.raises(ValueError, match='rsm.*Did you mean.*rms'): scan('a', columns=['rsm'], home=tmp_path)
    with pytest.raises(FileNotFoundError, match='No run'): scan('b', home=tmp_path)
    with pytest.raises(TypeError, match='path must be a glob'): scan('a', path=3, home=tmp_path)
    assert scan('a', ttype='weight_grad', home=tmp_path).collect().height==0
    begun(tmp_path, b'', 'empty')
    assert scan('empty', home=tmp_path).collect().height==0 and list(scan('empty', 'pandas', home=tmp_path))==[]


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.filterwarnings('ignore::torchember.EmberWarning')
def test_few_rows_of_many_logs(tmp_path, monkeypatch):
    "Many ranks have few rows each in a range of steps. Parts and lines are cut small, so that few other rows are read."
    monkeypatch.setattr('torchember.store.parts.group_rows', 1024)
    monkeypatch.setattr('torchember.frames.scan.most_merged', 1024)
    monkeypatch.setattr('torchember.frames.chunks.most_merged', 700)
    rows = [stats(g.normal(size=(4, 5)), s, 'output', 'output_0', 'dp:B') for s in range(2000)]
    (tmp_path/'log').mkdir(parents=True)
    for rank in range(8): (tmp_path/'log'/f'a.rank{rank}').write_bytes(lines([r|dict(rank=rank) for r in rows]))
    def most(): return max(s.rows for c in scan('a', 'arrow', home=tmp_path).pruned.chunks for *_,of in c.logs for s in of)
    assert most()==512
    want = read('a', home=tmp_path)
    first = scan('a', 'arrow', home=tmp_path).to_table().to_pandas()
    compact('a', home=tmp_path)
    told = read_part_list(tmp_path/'log'/'a.rank3')
    part = Part(folder_of(tmp_path/'log'/'a.rank3')/told['parts'][0]['file'], {told['id']: told['parts'][0]}, steps=(600, 601))
    with part.file: assert part.steps[1]==(512, 1023) and part.groups==[1] and len(part.layout)==512
    second = scan('a', 'arrow', home=tmp_path).to_table().to_pandas()
    same(first, want)
    same(second, want)
