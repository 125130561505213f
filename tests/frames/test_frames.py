"Logs become tables. With and without msgspec, a table is equal to the rows of its log."
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import programs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchember import emberTracker, query, read, runs, torchEmber, tracker, wide
from torchember.frames.handle import LogReader
from torchember.ground import record
from torchember.store import columns, lines
from torchember.store.reading import frame, distinct_layouts, path_of, without_superseded

root = Path(__file__).parents[2]
numbers = st.one_of(st.floats(), st.floats(width=16), st.integers(-2**63, 2**63-1), st.integers(-3, 3))
texts = st.sampled_from(['1', '2.5', 'true', '[1]', 'nan', '2020-01-01', '2026-01-01 10:00:00'])
values = st.one_of(numbers, st.none(), st.booleans(), st.text(max_size=5), texts,
    st.lists(st.one_of(st.floats(), st.integers(-9, 9), st.none(), st.text(max_size=2), st.lists(st.integers(0, 3), max_size=2)), max_size=3),
    st.dictionaries(st.sampled_from('abc'), st.one_of(st.none(), st.floats(), st.integers()), max_size=2))
stats = st.fixed_dictionaries({'shape': st.lists(st.integers(0, 9), max_size=3), 'mean': st.floats(), 'std': st.one_of(st.floats(), st.none())},
    optional={'max': numbers, 'rms': st.floats(), 'exponents': st.lists(st.integers(0, 99), min_size=3, max_size=3)})
who = st.fixed_dictionaries({'module': st.sampled_from(['model(Net)', 'model(Net).a(Linear)', 'model(Net).a(Linear).b(größe, "q")']),
    'ts': st.sampled_from(['2026-01-01 10:00:00', '2026-01-01 10:00:01']), 'ttype': st.sampled_from(['input', 'weight', 'scalar']),
    'tname': st.sampled_from(['x', 'weight_0']), 'step': st.integers(0, 5), 'call': st.just(0)},
    optional={'pname': st.just('bias'), 'nan': st.integers(0, 2), 'posinf': st.integers(1, 2), 'phase': st.sampled_from(['eval', 'warm']),
        'supersedes': st.just(True), 'epoch': st.integers(0, 2)})
free = st.fixed_dictionaries({}, optional={k: values for k in ('loss', 'own', 'Loss', 'a b')})
rows = st.lists(st.tuples(st.one_of(stats, st.just({})), who, free).map(lambda p: {**p[0], **p[1], **p[2]}), max_size=12)


def value_of(row, name):
    if name!='path' or 'path' in row: return row.get({'steps': 'step'}.get(name, name))
    return path_of(row['module']) if isinstance(row.get('module'), str) else row.get('module')


def by_rows(log, choice, columns=None):
    "Return the table of a log from its parsed rows, as a reference for `read`."
    rows = every = lines.parse(b''.join(log.blocks()))[0]
    for name in choice.conditions:
        values = [value_of(r, name) for r in rows]
        kept = choice.select(name, dict.fromkeys(v for v in values if isinstance(v, int if name=='steps' else str)))
        rows = [r for r,v in zip(rows, values, strict=True) if isinstance(v, int|str) and v in kept]
    df = frame(rows, distinct_layouts(every))
    if 'shape' in df and df['shape'].dtype==object:
        df['shape'] = pd.Series([tuple(v) if isinstance(v, list) else v for v in df['shape']], index=df.index, dtype=object)
    return without_superseded(df)


def answer(log, **asked):
    "Return the table, or the message of the error."
    try: return read(log, **asked)
    except ValueError as e: return str(e)


def both(log, **asked):
    "Return the table and a reference made from rows. Check that the table is the same with and without msgspec."
    with pytest.MonkeyPatch.context() as m:
        m.setattr(columns, 'msgspec', lambda: None)
        without = answer(log, **asked)
    with_it = answer(log, **asked)
    same(without, with_it)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(LogReader, 'table', by_rows)
        return with_it, answer(log, **asked)


def same(got, want):
    if isinstance(want, str): assert got==want
    else:
        pd.testing.assert_frame_equal(got, want, check_exact=True)
        for c in want: assert [type(v) for v in got[c]]==[type(v) for v in want[c]], c


@pytest.fixture
def eager(monkeypatch):
    "Read logs in many small blocks. From the first blocks, the reader learns the layouts of rows."
    pytest.importorskip('msgspec')
    monkeypatch.setattr(lines.line_blocks, '__defaults__', (b'', None, 300))


def written(path, some, tail=b''):
    path.write_bytes(b''.join(record.line_of(r)+b'\n' for r in some)+tail)
    return path


questions = [{}, {'path': 'a*'}, {'ttype': 'weight'}, {'tname': ['x']}, {'steps': range(1, 4)}, {'steps': -1},
    {'steps': slice(-3, None), 'path': re.compile('b')}, {'steps': lambda s: s%2==0, 'ttype': ['input', 'scalar']},
    {'columns': ['path', 'step', 'mean', 'nan']}]


@pytest.mark.slow
@settings(deadline=None, max_examples=int(os.environ.get('FRAMES', 60)), suppress_health_check=list(HealthCheck))
@given(rows, st.sampled_from([b'', b'{"mean": 0.1, "st', b'{}']), st.sampled_from(questions))
def test_with_and_without_msgspec(tmp_path, eager, some, tail, asked):
    same(*both(written(tmp_path/'log', some, tail), **asked))


odd_numbers = [None, -0., 2, 2., 2**53+1, 2**63-1, 2**63, 1e300, 'text', columns.missing] # `missing` removes a key
odd_parts = st.one_of( # parts of a row that replace its usual values
    st.tuples(st.sampled_from(['mean', 'std', 'loss', 'step', 'epoch', 'seed']), st.sampled_from(odd_numbers)),
    st.tuples(st.just('shape'), st.sampled_from([None, [], [2., 3.], [[2], 3], [None], {'a': 1}, 'text', columns.missing])),
    st.tuples(st.sampled_from(['module', 'tname', 'pname', 'phase']), st.sampled_from([None, '', 'a', 'größe', 'model(Net).b(Linear)', 3, columns.missing])),
    st.tuples(st.just('ts'), st.sampled_from([None, '2026-01-01 10:00:01', '2026-01-01 10:00:02', columns.missing])),
    st.tuples(st.just('note'), st.sampled_from([['a'], [['a']], {'a': 1}, 'b', 2]))).map(lambda change: dict([change])) | st.sampled_from([
    {'mean': None, 'posinf': 1}, {'std': None, 'nan': 2}, {'supersedes': True}, {'mean': None, 'nonfinite': {'mean': 'Infinity'}}, {'nonfinite': {}}])


def regular_rows(n):
    "Return `n` rows as in a training: every fourth row has a loss, and the others have the statistics of a weight."
    for i in range(n):
        row = {'shape': [2, 3], 'mean': i/7, 'std': i/3, 'module': f'model(Net).{"ab"[i%2]}(Linear)', 'ts': '2026-01-01 10:00:00', 'ttype': 'weight',
            'tname': 'x', 'step': i//4, 'call': 0, 'epoch': 1, 'pname': 'bias', 'seed': 3} | ({'posinf': 1} if i<3 else {})
        if i%4==0: row = {k: v for k,v in row.items() if k not in ('shape', 'mean', 'pname', 'epoch')} | {'ttype': 'scalar', 'loss': i/5}
        yield row


@settings(deadline=None, max_examples=int(os.environ.get('FRAMES', 150)), suppress_health_check=list(HealthCheck))
@given(st.integers(20, 80), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(1, 6), odd_parts), max_size=3),
    st.sampled_from([b'', b'{"mean": 0.1, "st']), st.sampled_from([300, 2000]), st.sampled_from([*questions[:5], *questions[7:]]))
def test_a_regular_log_with_few_odd_values(tmp_path, eager, n, odd_values, tail, block, asked):
    """Most blocks are read by msgspec, and converted without an inspection of each value. The odd values are read correctly nevertheless.

    No question counts steps from the end, because an odd value changes the last step."""
    some = list(regular_rows(n))
    for first,period,times,part in odd_values:
        for i in range(first, n, period)[:times]: some[i] |= part
    (tmp_path/'log').write_bytes(b''.join(json.dumps({k: v for k,v in r.items() if v is not columns.missing}).encode()+b'\n' for r in some)+tail)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(lines.line_blocks, '__defaults__', (b'', None, block))
        same(*both(tmp_path/'log', **asked))


@pytest.mark.parametrize('seed', range(4))
def test_regular_logs_take_the_quick_way(seed, tmp_path, eager, monkeypatch):
    "Thousands of rows as an ember writes them: with NaN, marks, logged numbers, and a torn last line."
    draw = random.Random(seed)
    def number(): return draw.choice([draw.gauss(0, 1), draw.gauss(0, 1), math.nan, math.inf, -math.inf])
    some = []
    for i in range(6000):
        ttype,tname = draw.choice(['input', 'output']),f'x_{draw.randint(0, 1)}'
        id_ = dict(ts=f'2026-01-01 10:{i//600%60:02}:{i//10%60:02}', ttype=ttype, tname=tname, step=i//20, call=0, dtype='float32')
        if draw.random()<.1: some.append({'loss': draw.random(), 'module': 'model(Net)', **id_, 'ttype': 'scalar', 'tname': 'log'}); continue
        mean,std = number(),number()
        kinds = [0 if math.isfinite(mean) else draw.randint(0, 2) for _ in columns.bad]
        stats = {'shape': [draw.randint(1, 3), 4], 'mean': mean, 'std': std, 'own': [draw.random(), number()]}
        marks = ({'epoch': i//1000} if i>2000 else {}) | ({'fold': '3', 'train': i%2==0} if i>4000 else {})
        some.append({**stats, 'module': f'model(Net).{i%7}(Linear)', **id_, **{k: n for k,n in zip(columns.bad, kinds, strict=True) if n}, **marks})
    path = written(tmp_path/'log', some, b'{"mean": 0.1, "st')
    want = both(path)[1]
    plain,by_dicts = columns.parse,[]
    monkeypatch.setattr(lines.line_blocks, '__defaults__', (b'', None, 1<<13))
    monkeypatch.setattr(columns, 'parse', lambda data: by_dicts.append(len(data)) or plain(data))
    same(read(path), want)
    assert sum(by_dicts)<path.stat().st_size/4 # only rows with a new layout are parsed one by one
    last = want.step>=want.step.max()-8
    for asked,keep in (({'path': '1'}, want.path=='1'), ({'steps': slice(-9, None)}, last), ({'ttype': 'scalar'}, want.ttype=='scalar'),
            ({'path': ['1', '2'], 'ttype': 'input', 'tname': 'x_0', 'steps': range(5, 9)},
             want.path.isin(['1', '2']) & (want.ttype=='input') & (want.tname=='x_0') & want.step.between(5, 8))):
        got,part = read(path, **asked),want[keep].reset_index(drop=True)
        pd.testing.assert_frame_equal(got, part[got.columns], check_dtype=False, check_categorical=False, check_exact=True)
        assert part.drop(columns=got.columns).isna().all(axis=None)
    pd.testing.assert_frame_equal(read(path, columns=['step', 'mean']), want[['step', 'mean']])


@pytest.mark.parametrize('asked', [-1, -2, [0, -1], slice(None, -1), slice(2, -2), slice(-3, None), slice(-9, -7), slice(None, None, 3)])
def test_steps_are_counted_from_the_end_of_the_run_and_not_of_a_piece(asked, tmp_path, eager, monkeypatch):
    "A long log is read in several pieces. Negative steps count from the end of the whole run."
    monkeypatch.setattr(lines.line_blocks, '__defaults__', (b'', None, 1<<13))
    path = written(tmp_path/'log', [{'mean': i*.5, 'module': 'model(Net)', 'ttype': 'input', 'tname': 'x', 'step': i//500, 'call': i%500} for i in range(6000)])
    steps = range(12)
    wanted = set(steps[asked]) if isinstance(asked, slice) else {steps[s] for s in (asked if isinstance(asked, list) else [asked])}
    for got in both(path, steps=asked): assert got['mean'].tolist()==[i*.5 for i in range(6000) if i//500 in wanted]


odd = ['{"a":true}', '{"a":"12"}', '{"a":2.5}', '{"a":2.0}', '{"a":null}', '{"a":[1]}', '{"a":{"b":1}}', '{"a":12345678901234567890}',
    '{"a":9007199254740993}', '{"b":1}', '{"A":1}', '{"a":1,"a":2}', '{"a":1,}', '{"a":NaN}', '{"a":1e400}', '{"a":1}{"a":2}', '[1]', 'junk', '', '{}',
    '{"a":"x:true"}', '{"a": false}', '{"a":{"b":null}}', '{"a":-0}', '{ "a" : 1 }', '{"a":"\\u0022"}', '{"a\\u0062":1}', '{"a":1', '"a":1}',
    '{"a":null,"nan":1}', '{"mean":null,"nan":"x"}', '{"mean":null,"nonfinite":{"mean":"NaN","b/0":"NaN"}}']


@pytest.mark.parametrize('at', [3, 4500])
@pytest.mark.parametrize('line', odd)
def test_one_odd_line(line, at, tmp_path, eager, monkeypatch):
    "The odd line is at the start, where the reader learns the layouts, or late in the log."
    monkeypatch.setattr(lines.line_blocks, '__defaults__', (b'', None, 1<<14))
    log = [f'{{"a":{i},"t":"text"}}' for i in range(5000)]
    log[at] = line
    (tmp_path/'log').write_text('\n'.join(log)+'\n')
    same(*both(tmp_path/'log'))


def test_whole_numbers_of_many_digits_among_others(tmp_path, eager, monkeypatch):
    monkeypatch.setattr(record, 'orjson', None) # orjson would make floats of these integers
    (tmp_path/'log').write_text(''.join(f'{{"a":{i}.5}}\n' for i in range(90))+'{"a":1234567890123456789012345}\n{"a":1e30}\n')
    same(*both(tmp_path/'log'))


def test_a_run_that_is_being_written(tmp_path, eager, recwarn):
    "Rows of this process may still be in memory. Another process may be writing the last line."
    t = tracker('mine', 'a', tmp_path)
    for i in range(50): t({'loss': i, 'step': i})
    assert len(read(t))==50
    with open(t.log_path, 'ab') as f: f.write(b'{"loss": 1, "st')
    assert len(read(t.log_path))==50 and not recwarn.list


def test_what_is_appended_meanwhile_does_not_count(tmp_path, eager, monkeypatch):
    path,plain = written(tmp_path/'log', [{'a': i, 'step': i} for i in range(500)]),columns.Expected.read
    def appends(self, data):
        with open(path, 'ab') as f: f.write(b'{"a": "new", "other": 1}\n')
        return plain(self, data)
    monkeypatch.setattr(columns.Expected, 'read', appends)
    df = read(path)
    assert len(df)==500 and df.a.dtype=='int64' and 'other' not in df


@pytest.mark.slow
def test_runs_that_go_on_and_that_do_not(tmp_path):
    code = f"import torch, torchember; te = torchember.torchEmber(torch.nn.Linear(1, 1), name='NAME', home={str(tmp_path)!r}); " \
        "te.model(torch.ones(1, 1)); te.t.barrier()"
    assert programs.run(code.replace('NAME', 'broken off')+"; import os; os._exit(1)", cwd=root).returncode==1
    waits = code.replace('NAME', 'other')+"; print('there', flush=True); input(); te.close()"
    with programs.start(waits, cwd=root, stdin=subprocess.PIPE) as p:
        p.stdout.readline()
        there = runs(tmp_path).set_index('name')
        assert there.running.to_dict()=={'broken off': False, 'other': True} and there.end.isna().to_dict()=={'broken off': False, 'other': True}
        p.communicate('\n')
    base = tmp_path/'data/base_other.json'
    assert not runs(tmp_path).running.any() and json.loads(base.read_text())['rows']==runs(tmp_path).set_index('name').rows['other']==4
    base.write_text(json.dumps({**{k: v for k,v in json.loads(base.read_text()).items() if k!='end'}, 'host': 'elsewhere', 'pid': os.getpid()}))
    # on another machine, it cannot be tested whether a process exists: the time of its last rows decides
    assert runs(tmp_path).set_index('name').running.to_dict()=={'broken off': False, 'other': True}
    os.utime(tmp_path/'log/other', (0, 0))
    assert not runs(tmp_path).running.any()
    base.write_text('{"start"') # the metadata file is incomplete
    assert len(runs(tmp_path))==2


def test_a_run_that_is_resumed(tmp_path):
    for resume in (False, True):
        with torchEmber(torch.nn.Linear(1, 1), name='a', home=tmp_path, resume=resume) as te:
            te.model(torch.ones(1, 1))
            te.t.barrier()
            assert runs(tmp_path).running.all()
    r = runs(tmp_path).iloc[0]
    assert (r.steps, r.rows, r.running, r.model)==(2, 8, False, 'Linear')


def test_a_run_that_goes_on_began_when_it_was_begun(tmp_path):
    "A resumed run keeps its first start time. Rows that are added after its end are counted."
    def recorded(resume):
        with torchEmber(torch.nn.Linear(1, 1), name='a', ttypes='output', home=tmp_path, resume=resume) as te: te.model(torch.ones(1, 1))
    base = tmp_path/'data/base_a.json'
    recorded(False)
    base.write_text(json.dumps({**json.loads(base.read_text()), 'start': '2020-02-02 10:00:00', 'pid': 1}))
    recorded(True)
    now = json.loads(base.read_text())
    assert (now['start'], now['pid'], now['steps'])==('2020-02-02 10:00:00', os.getpid(), 2)
    def listed(): r = runs(tmp_path).iloc[0]; return str(r.start), r.steps, r.rows
    assert listed()==('2020-02-02 10:00:00', 2, 2)
    with torchEmber(torch.nn.Linear(1, 1), name='b', ttypes='output', home=tmp_path) as te: te.model(torch.ones(1, 1))
    assert json.loads((tmp_path/'data/base_b.json').read_text())['rows']==1
    t = emberTracker('b', tmp_path)
    t({'note': 'looked at'})
    t.close()
    assert runs(tmp_path).set_index('name').rows.to_dict()=={'a': 2, 'b': 2}


def test_without_duckdb(tmp_path, monkeypatch):
    written(tmp_path/'log', [{'a': 1}])
    monkeypatch.setitem(sys.modules, 'duckdb', None)
    with pytest.raises(ModuleNotFoundError, match='pip install duckdb'): query('SELECT 1', tmp_path/'log')


def test_names_of_every_kind(tmp_path, eager):
    "Run names may contain a quote or look like a pattern, and a mark may have the name of a column."
    (tmp_path/'log').mkdir()
    for name in ("it's", 'a[1]', 'b*', 'x.gz'):
        (tmp_path/'log'/name).touch() # the log file exists already, because a new run cannot be called b*
        t = emberTracker(name, tmp_path)
        t.mark(run='mine')
        t({'loss': 1., 'step': 0})
        t.close()
        assert read(name, home=tmp_path).loss.tolist()==[1.]
    df = read('*', home=tmp_path)
    assert df.run.tolist()==['a[1]', 'b*', "it's", 'x.gz'] and set(df.mark_run)=={'mine'}
    assert query('SELECT count(*) n FROM log', home=tmp_path).n[0]==4


def test_the_last_step_is_the_greatest_and_need_not_be_written_last(tmp_path, eager):
    t = emberTracker('a', tmp_path)
    for s in (0, 7, 3): t({'step': s, 'module': 'model(N)', 'ttype': 'output', 'tname': 'output_0', 'call': 0, 'mean': 1.*s})
    assert t.last_step()==7
    for got in both(t.log_path, steps=-1): assert got[['step', 'mean']].values.tolist()==[[7, 7.]]
    t({'step': 5, 'module': 'model(N)', 'ttype': 'output', 'tname': 'output_0', 'call': 0, 'mean': 5.})
    assert t.last_step()==7
    for got in both(t.log_path, steps=-1): assert got[['step', 'mean']].values.tolist()==[[7, 7.]]


def test_a_log_that_was_edited_in_place_is_read_anew(tmp_path, eager):
    "The edited log is read again, even if its size is unchanged."
    t = emberTracker('a', tmp_path)
    for s in range(2000): t({'step': s, 'module': 'model(N)', 'ttype': 'output', 'tname': 'output_0', 'call': 0, 'mean': 1.*s, 'who': 'anna'})
    t.barrier()
    for old,new in (('anna', 'otto'), ('otto', 'anna')):
        assert set(read('a', home=tmp_path).who)=={old}
        before,data = os.stat(t.log_path),t.log_path.read_bytes().replace(old.encode(), new.encode())
        with open(t.log_path, 'r+b') as f: f.write(data)
        os.utime(t.log_path, ns=(before.st_atime_ns, before.st_mtime_ns+10**9))
        assert set(read('a', home=tmp_path).who)=={new}


def test_of_the_calls_of_a_step_the_last_counts_also_where_it_is_nan():
    rows = dict(path='a', ttype='output', tname='output_0', step=[0, 0, 1, 1], call=[0, 1, 0, 1], mean=[1., math.nan, math.nan, 2.], nan=[0, 3, 3, 0])
    got = wide(pd.DataFrame(rows), 'mean')
    assert list(got.columns)==['a'] and list(got.index)==[0, 1] and math.isnan(got.loc[0, 'a']) and got.loc[1, 'a']==2.


def test_wide_is_a_pivot(tmp_path):
    with torchEmber(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()), name='a', home=tmp_path) as te:
        for _ in range(5): te.model(torch.randn(4, 3)).sum().backward()
    df = read(te)
    got,some = wide(df, 'std', 'output'),df[df.ttype=='output']
    want = some.pivot(index='step', columns='path', values='std')
    pd.testing.assert_frame_equal(got, want[got.columns].rename_axis(columns=None).set_axis(list(got.columns), axis=1), check_column_type=False)
    pd.testing.assert_frame_equal(wide(te, 'std', 'output'), got)


def test_a_folder_beside_the_runs_is_no_run(tmp_path):
    "A user may move old runs into a subfolder."
    (tmp_path/'log/archive').mkdir(parents=True)
    assert len(runs(tmp_path))==0
    written(tmp_path/'log/a', [{'a': 1, 'step': 0}])
    assert read('*', home=tmp_path).run.tolist()==runs(tmp_path).name.tolist()==['a']


def test_what_a_table_has_is_asked_for_as_it_is(tmp_path, eager):
    "Conditions accept values taken from another table: numpy numbers, arrays and columns."
    log = written(tmp_path/'a', [{'module': f'model(Net).{p}(Linear)', 'ttype': 'output', 'tname': 'x', 'step': s} for s in range(9) for p in 'ab'])
    df = read(log)
    for steps in (df.step.max(), df.step.unique()[-1:], df.step.tail(2), pd.Index([8]), torch.tensor([-1]), [df.step.max()], slice(df.step.max(), None)):
        assert read(log, steps=steps).step.tolist()==[8, 8], steps
    last = df.step.min()-2 # a negative numpy integer, counted from the last step
    assert read(log, steps=last).step.tolist()==read(log, steps=slice(last, last+1)).step.tolist()==[7, 7]
    for path in (df.path.unique()[:1], df.path.head(1), pd.Index(['a'])): assert set(read(log, path=path).path)=={'a'}


def test_a_path_is_found_as_it_is_written(tmp_path, eager):
    "A path is found by its exact text, even if it looks like a pattern. Keys of a ModuleDict may contain brackets."
    names = ['a[0]', 'a0', 'b[!x]', 'c*']
    log = written(tmp_path/'a', [{'module': f'model(Net).{p}(Linear)', 'ttype': 'output', 'tname': 'x', 'step': 0} for p in names])
    for p in names: assert p in set(read(log, path=p).path), p


def test_no_mark_is_called_path(tmp_path):
    "A mark named `path` would replace the layer of each row in tables and pictures."
    with pytest.raises(ValueError, match="'path' is a column that torchember writes"): emberTracker('a', tmp_path).mark(path='data/train')
