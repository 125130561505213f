"A log is read in chunks: no row is lost between chunks, each column has one type, and only chunks that may match are read."
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from drawn import begun, lines

from torchember import compact, query, read, scan
from torchember.frames import chunks, dataset
from torchember.frames.chunks import Chunk, Segment, chunk_table, make_chunks, inspect_log, output_columns, index_lines
from torchember.frames.handle import open_run
from torchember.frames.scan import conjuncts, may_have_matching_rows
from torchember.store.columns import Expected


def row(step, /, **more):
    return dict(mean=step/4, module='m(Net).f(L)', ts='2024-01-01 00:00:00', ttype='output', tname='o', step=step, call=0, dtype='float32')|more

def put(home, *pieces, name='a'):
    "Create a run. Each piece of rows becomes a Parquet part, except the last piece, which stays JSON lines."
    t = begun(home, b'', name)
    for i,rows in enumerate(pieces):
        if i: compact(name, home)
        with open(t.log_path, 'ab') as f: f.write(lines(rows))
    return t

def rows_of(home, columns, run='a', **how):
    t = scan(run, 'arrow', home=home, columns=columns, **how).to_table()
    return [*zip(*(t[c].to_pylist() for c in columns), strict=True)]

def of_read(home, columns, run='a', **how):
    df = read(run, home=home, **how)
    return [tuple(None if isinstance(v, float) and v!=v else v for v in r) for r in df[columns].astype(object).values.tolist()]

def as_read(home, columns=('step', 'mean'), run='a', **how):
    "Return the rows of `scan`, and check that they are equal to those of `read`."
    got = rows_of(home, [*columns], run, **how)
    assert got==of_read(home, [*columns], run, **how)
    return got

@pytest.fixture(autouse=True)
def small(monkeypatch):
    "Do not join small parts, so that they keep their sizes."
    monkeypatch.setattr('torchember.store.compaction.find_small_parts', lambda parts: None)

@pytest.fixture
def asked(monkeypatch):
    "Return a list that gets the chunks that are read."
    read_now = []
    monkeypatch.setattr(dataset, 'chunk_table', lambda c, *a, of=dataset.chunk_table: read_now.append(c) or of(c, *a))
    return read_now


# ---- types of columns

of_values = [ # values in a part, values in lines, type of the common column, and its values
    ([1], [2.5], 'double', [1, 2.5]), ([2.5], [1], 'double', [2.5, 1]), ([1], [None], 'int64', [1, None]), ([None], [1], 'int64', [None, 1]),
    ([None, 1], [2], 'int64', [None, 1, 2]), ([None], [None], 'double', [None, None]), ([np.nan], [1.], 'double', [None, 1]),
    ([np.inf], [-np.inf], 'double', [np.inf, -np.inf]), ([1], [2**63], 'string', ['1', str(2**63)]), ([2**63], [1], 'string', [str(2**63), '1']),
    ([-2**63], [2**62], 'int64', [-2**63, 2**62]), ([True], [False], 'bool', [True, False]),
    ([True], [1], 'string', ['true', '1']), ([True, None], [None], 'bool', [True, None, None]), (['b'], ['c'], 'string', ['b', 'c']),
    (['b', None], ['c'], 'string', ['b', None, 'c']), (['b'], [1], 'string', ['"b"', '1']), ([1], ['b', None], 'string', ['1', '"b"', None]),
    ([{'a': 1}, None], [3], 'string', ['{"a": 1}', None, '3']), ([None], [{'a': 1}, None], 'string', [None, '{"a": 1}', None]),
    ([[1, 2]], [[3]], 'list<item: int64>', [[1, 2], [3]]), ([[1]], [None], 'list<item: int64>', [[1], None]),
    ([[1]], [[1., 2]], 'string', ['[1]', '[1.0, 2]']), ([[1]], [['b']], 'string', ['[1]', '["b"]']), ([[True]], [[1]], 'string', ['[true]', '[1]']),
    ([[1]], [3], 'string', ['[1]', '3'])]
# within one piece, these values would become a column of JSON
in_pieces = [([2**53+1], [.5], 'double', [2**53, .5]), ([[1.5]], [[1]], 'list<item: double>', [[1.5], [1]])]

@pytest.mark.parametrize('kept', ['both', 'lines', 'parts', 'two parts'])
def test_a_column_has_one_type(tmp_path, kept):
    "The type does not depend on the kind of storage, or on other columns."
    cases = of_values+in_pieces*(kept in ('both', 'two parts'))
    a,b = ([row(s, **{f'x{i}': case[k][s%len(case[k])] for i,case in enumerate(cases)}) for s in range(2)] for k in range(2))
    put(tmp_path, *dict(both=(a, b), lines=(a+b,), parts=(a+b, []), **{'two parts': (a, b, [])})[kept])
    t = scan('a', 'arrow', home=tmp_path).to_table()
    assert t.column_names==[*read('a', home=tmp_path)]
    for i,(a,b,kind,want) in enumerate(cases):
        got = t[f'x{i}'].to_pylist()
        assert (str(t.schema.field(f'x{i}').type), got[:len(a)]+got[2:2+len(b)])==(kind, want), (a, b)

def test_columns_that_rows_do_not_have(tmp_path):
    "Missing counts (nan, posinf) are 0. The internal key `nonfinite` is no column. An empty run has the usual columns."
    put(tmp_path, [row(0, nan=3), row(1), row(2, x=np.nan, y=np.inf)], [row(3), row(4, nan=2, x=1.)])
    assert as_read(tmp_path, ('nan', 'posinf', 'x', 'y'))==[(3, 0, None, None), (0, 0, None, None), (0, 0, None, np.inf), (0, 0, None, None), (2, 0, 1, None)]
    assert 'nonfinite' not in scan('a', 'arrow', home=tmp_path).schema.names
    put(tmp_path, [row(0, nan='many')], name='b')
    assert rows_of(tmp_path, ['nan'], 'b')==[('many',)]
    put(tmp_path, [], name='empty')
    said = scan('empty', 'arrow', home=tmp_path).schema
    assert {f.name: str(f.type) for f in said}==dict.fromkeys(('module', 'path', 'ttype', 'tname', 'dtype'), 'string')|dict(ts='timestamp[s]')|dict.fromkeys(
        ('step', 'call', 'nan', 'posinf', 'neginf'), 'int64')
    begun(tmp_path, b'{"loss": 1.5, "step": 0}\n', 'own')
    assert scan('own', 'arrow', home=tmp_path).schema.names==[*read('own', home=tmp_path)]==['loss', 'step', 'nan', 'posinf', 'neginf']

def test_stamps_are_times(tmp_path):
    put(tmp_path, [row(0), row(1, ts=None), row(2, ts='2024-02-03 04:05:06')], [row(3, ts='2024-02-03 04:05:07')])
    t = scan('a', 'arrow', home=tmp_path).to_table()['ts']
    assert t.type==pa.timestamp('s') and [str(v) for v in t.to_pylist()]==['2024-01-01 00:00:00', 'None', '2024-02-03 04:05:06', '2024-02-03 04:05:07']
    put(tmp_path, [row(0, ts='yesterday')], [row(1, ts='today'), row(2), row(3, ts='2024-01-01 00:00:00.5')], name='b')
    assert [str(v) for v in scan('b', 'arrow', home=tmp_path).to_table()['ts'].to_pylist()]==['None', 'None', '2024-01-01 00:00:00', 'None']

def test_paths(tmp_path):
    "The path of a row is its own value, or follows from its module, also if these columns contain odd values."
    odd = [row(0), row(1, path='own'), row(2, path=None), row(3, module='m(Net)'), row(4, module='m(Net).g(L)', path='')]
    for i,more in enumerate(([], [row(5, path=7)], [row(5, module=7)], [row(5, module=None)])):
        for pieces in ((odd+more, []), (odd, more), (more+odd, [])):
            name = f'a{i}{len(pieces[0])}{len(pieces[1])}{pieces[0][0]["step"]}'
            put(tmp_path, *pieces, name=name)
            got = dict(rows_of(tmp_path, ['step', 'path'], name))
            assert [got[s] for s in range(5)]==['f', 'own', 'f', '', ''], (i, got)
            assert not more or got[5] in ([], ['f'], ['7'], [None])[i]
            assert len(scan(name, path='f', home=tmp_path).collect())==len(read(name, path='f', home=tmp_path))

def test_more_than_a_part_can_say_of_itself(tmp_path):
    "A column that only some parts have is empty in other rows. Equal texts of a part are stored once."
    put(tmp_path, [row(0, x='b'), row(1, x='b')], [row(2, y=1)], [row(3, x='c', y=2)])
    assert as_read(tmp_path, ('x', 'y'))==[('b', None), ('b', None), (None, 1), ('c', 2)]


# ---- rows with unusual steps

def test_rows_whose_step_nobody_expects(tmp_path):
    "With superseding rows in a log, rows without a step and rows of unknown steps are still found."
    none = {k: v for k,v in row(0).items() if k!='step'}
    again = row(50, mean=7., supersedes=True)
    put(tmp_path, [row(s) for s in range(3)], [none, row(1, step='x'), row(50), again])
    t = scan('a', home=tmp_path).collect()
    assert t['step'].to_list()==['0', '1', '2', None, '"x"', '50'] and t['mean'].to_list()==[0., .25, .5, 0., .25, 7.]
    assert scan('a', home=tmp_path).filter(pl.col('step')=='50').collect().height==1
    put(tmp_path, [row(s) for s in range(10, 13)], [none, row(50), row(3), again], name='b')
    assert as_read(tmp_path, run='b')==[(10, 2.5), (11, 2.75), (12, 3.), (None, 0.), (3, .75), (50, 7.)]
    rows = scan('b', home=tmp_path)
    assert [rows.filter(pl.col('step')==s).collect()['mean'].to_list() for s in (3, 10, 50)]==[[.75], [2.5], [7.]]
    assert rows.filter(pl.col('step').is_null()).collect().height==1
    assert [scan('b', home=tmp_path, steps=s).collect()['mean'].to_list() for s in (3, -1, slice(40, 60))]==[[.75], [7.], [7.]]

@pytest.mark.parametrize('most', [2, 99])
def test_all_of_them_are_in_one_chunk(tmp_path, monkeypatch, most):
    "Rows without a known step are in one chunk, however many they are."
    monkeypatch.setattr(chunks, 'most_rows', most)
    def has(name, *pieces):
        put(tmp_path, *pieces, name=name)
        assert sorted(rows_of(tmp_path, ['mean', 'n'], name), key=str)==sorted(of_read(tmp_path, ['mean', 'n'], name), key=str)!=[]
    none = [{k: v for k,v in row(i, n=i).items() if k!='step'} for i in range(3)]
    again = none[0]|dict(n=9, supersedes=True)
    has('a', [row(s, n=s) for s in range(10, 20)], none+[row(s, n=s) for s in (3, 10, 15, 19, 20, 50)]+[again])
    has('b', none+[again])
    has('c', none, [row(0, step='x', n=3), again])

def test_steps_of_which_some_are_texts(tmp_path):
    "One piece has steps that are texts, and another piece has integers. Both are found."
    put(tmp_path, [row(s) for s in range(3)], [row(0, step='x')])
    rows = scan('a', 'arrow', home=tmp_path)
    assert rows.to_table(filter=ds.field('step')=='"x"').num_rows==1 and rows.to_table(filter=ds.field('step')=='1').num_rows==1
    assert [scan('a', home=tmp_path).filter(pl.col('step')==s).collect().height for s in ('"x"', '1', '9')]==[1, 1, 0]

def test_rows_whose_step_is_none_of_an_ember(tmp_path, monkeypatch):
    "Row groups with only negative steps are read together with rows that have no step."
    monkeypatch.setattr('torchember.store.parts.group_rows', 512)
    none = {k: v for k,v in row(0).items() if k!='step'}
    put(tmp_path, [row(-5, mean=float(i)) for i in range(512)]+[none]*88, [row(s, supersedes=True) for s in range(9)])
    got = rows_of(tmp_path, ['step', 'mean'])
    assert sorted(got, key=str)==sorted(of_read(tmp_path, ['step', 'mean']), key=str) and sum(s==-5 for s,_ in got)==512

def test_a_row_without_a_step_among_many_lines(tmp_path, monkeypatch):
    "The row is in a later block of lines, which is read like the earlier blocks."
    monkeypatch.setattr('torchember.frames.scan.most_rows', 9)
    none = {k: v for k,v in row(0).items() if k!='step'}
    put(tmp_path, [row(0), row(0, supersedes=True)]+[row(s) for s in range(1, 20)]+[none]+[row(20)])
    assert as_read(tmp_path)[-3:]==[(19, 4.75), (None, 0.), (20, 5.)]

def test_groups_of_a_part(tmp_path, monkeypatch):
    "The steps of a part are known only if all its row groups have them. Row groups that are not needed are not read."
    monkeypatch.setattr('torchember.store.parts.group_rows', 512)
    none = {k: v for k,v in row(0).items() if k!='step'}
    put(tmp_path, [row(s) for s in range(600)]+[none], [])
    assert [(s.first, s.last) for s in inspect_log(open_run('a', tmp_path).log).segments]==[(None, None)]
    assert scan('a', home=tmp_path).filter(pl.col('step').is_null()).collect().height==1
    put(tmp_path, [row(s) for s in range(600)], [], name='b')
    there = inspect_log(open_run('b', tmp_path).log)
    assert [(s.first, s.last, s.rows) for s in there.segments]==[(0, 599, 600)]
    chunk, = make_chunks('b', [('b', None)], [there], tmp_path)
    fields = output_columns([there])
    assert chunk.plain and [chunk_table(chunk, fields, steps).num_rows for steps in (None, (0, 3), (511, 512), (512, 999))]==[600, 512, 600, 88]
    with there.segments[0].open((0, 3)) as part: assert part.parsed()[0][-1]['step']==511
    assert part.file.closed

def test_stretches_of_some_steps():
    "A segment matches if its steps overlap the requested steps, or if its steps are unknown."
    s = Segment('x', 0, 9, 9, 3, 6)
    assert [s.overlaps(steps) for steps in ((0, 2), (0, 3), (4, 5), (6, 9), (7, 9), None)]==[False, True, True, True, False, True]
    assert Segment('x', 0, 9, 9, None, None).overlaps((0, 2))
    def known(of, steps): return Chunk('a', (('a', None, of),), steps=steps).known
    assert [known((s,), steps) for steps in (None, (0, 9), (4, 9), (0, 5))]==[(3, 6), (3, 6), (4, 6), (3, 5)]
    assert known((s, Segment('x', 9, 19, 9, 5, 8)), None)==(3, 8) and known((s, Segment('x', 9, 19, 9, None, None)), (0, 5))==known((), None)==(None, None)

@pytest.mark.parametrize('again', [False, True])
def test_nothing_is_lost_between_chunks(tmp_path, monkeypatch, again):
    "Each row is in exactly one chunk, wherever the chunks are cut."
    monkeypatch.setattr(chunks, 'most_rows', 7)
    last = row(30, mean=9.)|({'supersedes': True} if again else {})
    put(tmp_path, [row(s, mean=i/4) for s in range(20) for i in range(3)], [row(s) for s in range(20, 31)], [last])
    rows = scan('a', 'arrow', home=tmp_path)
    assert as_read(tmp_path)[-1]==(30, 9.)
    if again: assert len(rows.pruned.chunks)>5 and all(c.known==c.steps and c.rest==(i==0) for i,c in enumerate(rows.pruned.chunks))
    if again: assert [len(rows.pruned(ds.field('step')==s)) for s in range(31)]==[1]*31 and rows.pruned(ds.field('step')==31)==[]
    for s in (0, 19, 20, 30): assert as_read(tmp_path, steps=s)==[r for r in as_read(tmp_path) if r[0]==s]


# ---- lines that change between reads

def test_whole_numbers_among_floats(tmp_path):
    "In lines, large integers among floats become floats, as in `read`. A Parquet part keeps them exactly, as JSON."
    put(tmp_path, [row(0, big=2**60+1), row(1, big=.5)])
    assert as_read(tmp_path, ['big'])==[(2.**60,), (.5,)]
    compact('a', home=tmp_path)
    assert rows_of(tmp_path, ['big'])==[(str(2**60+1),), ('0.5',)]

def test_a_last_line_without_an_end(tmp_path):
    "A complete last line without a line break counts as a row, but only once."
    t = put(tmp_path, [row(0), row(1)])
    with open(t.log_path, 'ab') as f: f.write(lines([row(2, epoch=1)])[:-1])
    for _ in range(2): assert as_read(tmp_path, ('step', 'epoch'))==[(0, None), (1, None), (2, 1)]
    with open(t.log_path, 'ab') as f: f.write(b'\n'+lines([row(3)])[:40])
    for _ in range(2): assert as_read(tmp_path, ('step', 'epoch'))==[(0, None), (1, None), (2, 1)]
    with open(t.log_path, 'ab') as f: f.write(lines([row(3)])[40:])
    assert as_read(tmp_path, ('step', 'epoch'))==[(0, None), (1, None), (2, 1), (3, None)]

def test_another_log_in_its_place(tmp_path):
    "A log is replaced by another one with lines of the same length, or by a shorter one. No old row is read."
    t = put(tmp_path, [row(s, x=1.5) for s in range(9)])
    assert as_read(tmp_path, ('step', 'x'))==[(s, 1.5) for s in range(9)]
    t.log_path.write_bytes(lines([row(s, x='b') for s in range(9)]))
    assert as_read(tmp_path, ('step', 'x'))==[(s, 'b') for s in range(9)]
    t.log_path.write_bytes(lines([row(s, y=1) for s in range(7)]))
    assert as_read(tmp_path, ('step', 'y'))==[(s, 1) for s in range(7)] and 'x' not in scan('a', 'arrow', home=tmp_path).schema.names
    size = t.log_path.stat().st_size
    assert [s.rows for s in index_lines(t.log_path, 0, size, 99, Expected()).segments]==[7]
    assert [(s.rows, s.end) for s in index_lines(t.log_path, 0, size//7, 99, Expected()).segments]==[(1, size//7)]

def test_logs_that_end_alike(tmp_path):
    "Two logs in different folders have the same name and the same end. Cached facts of one are not used for the other."
    for home,x in (tmp_path/'one', 1.5),(tmp_path/'two', 'b'): put(home, [row(0, x=x)]+[row(s, x=None) for s in range(1, 60)])
    for home,x in (tmp_path/'one', 1.5),(tmp_path/'two', 'b'): assert as_read(home, ('x',))==[(x,)]+[(None,)]*59

def test_lines_that_go_into_parts_meanwhile(tmp_path):
    "With keep=True the lines stay beside the parts. Only lines that were added later are read, so no row is doubled."
    t = put(tmp_path, [row(s) for s in range(6)])
    assert len(as_read(tmp_path))==6
    compact('a', tmp_path, keep=True)
    assert len(as_read(tmp_path))==6
    with open(t.log_path, 'ab') as f: f.write(lines([row(6, epoch='b')]))
    assert as_read(tmp_path, ('step', 'epoch'))==[(s, None) for s in range(6)]+[(6, 'b')]
    assert [s.entry is None for s in inspect_log(open_run('a', tmp_path).log).segments]==[False, True]

def test_what_is_kept_of_logs_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, 'indexes', {})
    monkeypatch.setattr(chunks, 'most_indexes', 3)
    for i in range(5):
        put(tmp_path, [row(0)], name=f'a{i}')
        assert len(as_read(tmp_path, run=f'a{i}'))==1 and len(chunks.indexes)==min(i+1, 3)
    put(tmp_path, [row(s) for s in range(9)], name='b')
    assert [[s.rows for s in inspect_log(open_run('b', tmp_path).log, n).segments] for n in (99, 4, 99)]==[[9], [4, 4, 1], [9]]


def test_lines_of_a_file_that_is_renamed_while_they_are_read(tmp_path, monkeypatch):
    "If a file is shorter when it is opened, because another file has its name now, the lines are read from the renamed file"
    old,new,data = tmp_path/'a.1',tmp_path/'a.2',b'{"step":0}\n'*9
    old.write_bytes(data); new.write_bytes(data)
    listed = iter([[(old, 0)]])
    monkeypatch.setattr('torchember.store.parts.parts_and_lines', lambda path: (None, next(listed, [(new, 0)])))
    def shrinking(path, start, n, real=chunks.read_bytes):
        if path==old: old.write_bytes(data[:11])
        return real(path, start, n)
    monkeypatch.setattr(chunks, 'read_bytes', shrinking)
    segment = Segment(old, 0, len(data), 9, 0, 0, log=tmp_path/'a')
    assert segment.lines()==data
    new.write_bytes(data[:22])
    with pytest.raises(OSError, match='is shorter than before.*Call scan again'): segment.lines()


def live(path, size=None, more=b'', fresh=False):
    "Return a run of this process of which only `size` bytes are on disk, with more lines in memory."
    disk = SimpleNamespace(unwritten_lines=lambda: (size, more), fresh=fresh)
    return SimpleNamespace(path=path, t=SimpleNamespace(older=lambda: False), store=disk)

def steps_in(source):
    there = inspect_log(source)
    t = [chunk_table(c, output_columns([there])) for c in make_chunks('a', [('a', None)], [there], None)]
    return [s for x in t for s in x['step'].to_pylist()]

def test_lines_that_a_disk_has_not_taken(tmp_path):
    "Lines in memory follow the lines on disk. The log file may not exist yet, or belong to an older run."
    t = put(tmp_path, [row(s) for s in range(3)])
    path,data = t.log_path,lines([row(0), row(1)])
    assert steps_in(live(path))==[0, 1, 2]
    # a part of a third line is already on disk
    assert steps_in(live(path, len(data), lines([row(2), row(3)])))==[0, 1, 2, 3]
    assert steps_in(live(path, 0, lines([row(9)]), True))==[9] and steps_in(live(path, more=lines([row(9)]), fresh=True))==[9]
    assert steps_in(live(path.with_name('later'), 0, lines([row(9)])))==[9]
    folder = Path(f'{path}.parts')
    folder.mkdir()
    # the lines were set aside for compaction, and the run has begun a new file
    (folder/'lines-0').write_bytes(path.read_bytes())
    (folder/'parts.json').write_text(json.dumps(dict(run='a', id='x', removed=0, parts=[], group=512, aside=True)))
    path.write_bytes(lines([row(3), row(4)]))
    assert steps_in(live(path, len(data)//2, lines([row(4)])))==[0, 1, 2, 3, 4]

def test_a_log_elsewhere_that_became_shorter():
    "If a remote log becomes shorter, reading raises an error instead of leaving out rows."
    pytest.importorskip('upath')
    from torchember.store.anywhere import to_path
    home = to_path('memory://of-chunks')
    (home/'log').fs.pipe_file((home/'log'/'a').path, lines([row(s) for s in range(9)]))
    rows = scan('a', home=home)
    assert rows.collect()['step'].to_list()==[*range(9)]
    (home/'log').fs.pipe_file((home/'log'/'a').path, lines([row(s) for s in range(5)]))
    with pytest.raises(Exception, match='is shorter than before'): rows.collect()
    home.fs.rm(home.path, recursive=True)

def test_a_run_of_an_older_torchember(tmp_path):
    (tmp_path/'log'/'old').mkdir(parents=True)
    (tmp_path/'log'/'old'/'a.log').write_bytes(b'{"tensor": "output", "mean": 1.0},\n{"tensor": "output", "mean": 2.0},\n')
    want = read('old', home=tmp_path)
    t = scan('old', 'arrow', home=tmp_path).to_table()
    assert len(want)==2 and t['mean'].to_pylist()==want['mean'].tolist() and t.column_names==[*want]


# ---- logs of several ranks

def test_the_process_is_that_of_the_file(tmp_path):
    "If rows have no rank, it is taken from the name of the log file, for lines and for parts."
    for rank in 0,1: begun(tmp_path, lines([row(s, mean=float(rank)) for s in range(2)]), f'w.rank{rank}')
    for _ in range(2):
        t = scan('w', 'arrow', home=tmp_path, per_rank=True).to_table()
        assert t.schema.field('rank').type==pa.int64() and [*zip(t['rank'].to_pylist(), t['mean'].to_pylist(), strict=True)]==[(0, 0), (0, 0), (1, 1), (1, 1)]
        assert t.column_names==[*read('w', home=tmp_path, per_rank=True)]
        compact('w', tmp_path)

@pytest.mark.filterwarnings('ignore::torchember.EmberWarning')
def test_numbers_of_wholes(tmp_path):
    "Merged statistics are floats, even if all ranks have integers. Columns about shards are left out, and counts stay integers."
    for d in 'log','data': (tmp_path/d).mkdir()
    for rank in 0,1:
        rows = [row(s, mean=rank, std=1, min=rank, max=rank, ratio=rank, exponents=[rank, 2], shape=[2], rank=rank, part='dp:B', n=3) for s in range(3)]
        (tmp_path/'log'/f'w.rank{rank}').write_bytes(lines(rows))
        (tmp_path/'data'/f'ranks_w.rank{rank}.json').write_text(json.dumps(dict(rank=rank, world=2, axes={'dp': [0, 1]})))
    want = read('w', home=tmp_path)
    t = scan('w', 'arrow', home=tmp_path).to_table()
    types = {f.name: str(f.type) for f in t.schema}
    assert [types[c] for c in ('mean', 'std', 'min', 'ratio', 'numel')]==['double']*5 and types['n']==types['step']=='int64'
    assert types['exponents']=='list<item: int64>' and not {'part', 'rank', 'axes'}&types.keys()
    for c in want: assert c not in ('mean', 'std', 'max', 'step', 'n', 'path') or t[c].to_pylist()==want[c].tolist(), c
    assert t['mean'].to_pylist()==[.5]*3 and len(want)==3

def test_columns_of_a_run_in_order(tmp_path):
    "Marks are the last columns, whichever part of the log contains them."
    put(tmp_path, [row(0)], [row(1, epoch=3, run='mine')|dict(n=1)])
    there = [inspect_log(open_run('a', tmp_path).log)]
    assert [*output_columns(there)]==[*read('a', home=tmp_path)] and [*output_columns(there)][-3:]==['epoch', 'run', 'n']
    assert [*output_columns(there, several=True)][-3:]==['epoch', 'mark_run', 'n']


# ---- conditions on rows

def test_what_a_log_has_not(tmp_path):
    "A condition on a missing column gives no rows. A condition on a JSON column uses the original values."
    begun(tmp_path, lines([dict(loss=1., step=0), dict(loss=2., step=1)]), 'own')
    for how in dict(ttype='output'),dict(path='f'),dict(tname=['o']): assert scan('own', home=tmp_path, **how).collect().height==0
    assert rows_of(tmp_path, ['loss'], 'own', steps=-1)==[(2.,)]
    put(tmp_path, [row(0), row(1, ttype=3, step='x')], [row(2, tname=['b']), row(3, step=4.)])
    for how in dict(ttype='output'),dict(tname='o', path='f'),dict(steps=[0, 2]),dict(steps=-1),dict(steps=lambda s: s>0),dict(path='g'):
        asked_rows = scan('a', home=tmp_path, **how).collect()['mean'].to_list()
        assert asked_rows==([] if how=={'path': 'g'} else read('a', home=tmp_path, **how)['mean'].tolist()) or how.get('steps') and asked_rows[-1]==.75
    put(tmp_path, [row(0)|dict(step=[1])], name='c')
    assert scan('c', home=tmp_path, steps=1).collect().height==0

def test_names_are_asked_for_under_their_names(tmp_path):
    put(tmp_path, [row(s, ttype=t, tname=n) for s in range(3) for t,n in (('output', 'o'), ('weight', 'p'))], [row(3, ttype='weight', tname='p')])
    for how in dict(ttype='weight'),dict(tname='o'),dict(ttype='weight', steps=[0, 3]),dict(path='f', tname=['p'], steps=slice(1, None)):
        assert len(as_read(tmp_path, ('step', 'ttype', 'tname'), **how))>1
    assert rows_of(tmp_path, ['mean'], tname='o', steps=-2)==[(.5,)] # the condition uses columns that are not requested

@pytest.mark.filterwarnings('ignore::torchember.EmberWarning')
def test_the_last_step_is_that_of_each_run(tmp_path):
    "The last step of a run is the largest of its ranks. With per_rank=True each rank has its own last step."
    for name,n in ('a', 3),('b', 9): put(tmp_path, [row(s) for s in range(n)], [], name=name)
    assert as_read(tmp_path, ('run', 'step'), '*', steps=-1)==[('a', 2), ('b', 8)]
    assert len(as_read(tmp_path, ('run', 'step'), ['a', 'b'], steps=slice(-4, None)))==7
    for rank,n in (0, 5),(1, 4): begun(tmp_path, lines([row(s, rank=rank, shape=[2], std=0., min=0., max=1.) for s in range(n)]), f'w.rank{rank}')
    assert as_read(tmp_path, ('rank', 'step'), 'w', steps=-1, per_rank=True)==[(0, 4), (1, 3)]
    assert as_read(tmp_path, ('step',), 'w', steps=-1)==[(4,)]

def test_chunks_that_can_have_an_answer_are_read(tmp_path, asked):
    "Only chunks whose steps match are read. For distant steps, a condition is not tested for all steps in between."
    put(tmp_path, [row(s) for s in range(4)], [row(s) for s in range(4, 8)], [row(s, ttype='weight') for s in range(8, 10)])
    rows = scan('a', 'arrow', home=tmp_path)
    for s,i in (0, 0),(3, 0),(4, 1),(7, 1),(8, 2),(9, 2):
        del asked[:]
        assert rows.to_table(columns=['step'], filter=ds.field('step')==s).num_rows==1 and asked==[rows.pruned.chunks[i]]
        assert scan('a', home=tmp_path).filter(pl.col('step')==s, pl.col('mean')>=0, pl.col('ttype')!='x').select('path').collect()['path'].to_list()==['f']
        assert len(asked)==2
        assert len(scan('a', 'arrow', home=tmp_path, steps=s).pruned.chunks)==1
    assert [len(t) for t in scan('a', 'pandas', home=tmp_path, ttype='output')]==[4, 4]
    del asked[:]
    assert scan('a', home=tmp_path).head(5).collect().height==5 and len(asked)==2
    put(tmp_path, [row(0), row(1<<21)], name='far')
    tried = []
    assert rows_of(tmp_path, ['step'], 'far', steps=lambda s: tried.append(s) or s>0)==[(1<<21,)] and sorted({*tried})==[0, 1<<21]

def test_conditions_of_polars():
    "Conditions joined by `and` are tested separately against the known steps and run of a chunk."
    a,b,c,d = pl.col('step')>3,pl.col('run')=='a',pl.col('mean')>0,pl.col('step')<5
    assert [len(conjuncts(x)) for x in (a, a & b, a & b & c, a & (b & (c & d)), a | b, (a & b) | c, a & (b | c), a==b)]==[1, 2, 3, 4, 1, 1, 2, 1]
    one = Chunk('a', (('a', None, (Segment('x', 0, 9, 9, 3, 6),)),), labelled=True)
    def may(*conditions, of=one, **how): return may_have_matching_rows(pl, conditions, of, **how)
    assert [may(pl.col('step')==s) for s in (2, 3, 6, 7)]==[False, True, True, False]
    assert may() and may(a, b) and not may(a, pl.col('run')=='b') and not may(a, pl.col('step')<4)
    assert may(pl.col('step')==99, most=3) and not may(pl.col('step')==99, most=4)
    other = Chunk('a', one.logs)
    assert may(pl.col('run')=='mine', of=other) and not may(pl.col('step')==99, of=other)
    assert may(pl.col('step')==99, of=Chunk('a', (('a', None, (Segment('x', 0, 9, 9, None, None),)),)))

def test_columns_that_are_needed_are_read(tmp_path, monkeypatch):
    "Only the requested columns and the columns of conditions are read."
    put(tmp_path, [row(s) for s in range(4)])
    fields = []
    monkeypatch.setattr(dataset, 'chunk_table', lambda c, f, *a, of=dataset.chunk_table: fields.append({*f}) or of(c, f, *a))
    rows = scan('a', 'arrow', home=tmp_path, tname='o')
    rows.to_table(columns=['mean'], filter=ds.field('step')>1)
    rows.to_table(columns={'x': ds.field('nan')+1})
    scan('a', home=tmp_path, steps=[1, 2]).filter(pl.col('path')=='f').select('mean').collect()
    assert fields==[{'mean', 'step', 'tname'}, {'nan', 'tname'}, {'mean', 'path', 'step'}]

def test_a_mark_that_is_called_run(tmp_path):
    "A mark `run` is not the name of the run. In a table of several runs its column is `mark_run`."
    put(tmp_path, [row(0, run='mine')], [row(1, run='yours')])
    assert scan('a', home=tmp_path).filter(pl.col('run')=='mine').collect()['step'].to_list()==[0]
    rows = scan('a', 'arrow', home=tmp_path)
    assert rows.to_table(filter=ds.field('run')=='yours')['step'].to_pylist()==[1] and len(rows.pruned(ds.field('run')=='yours'))==2
    assert as_read(tmp_path, ('run', 'mark_run'), ['a'])==[('a', 'mine'), ('a', 'yours')]
    assert as_read(tmp_path, ('run', 'step'))==[('mine', 0), ('yours', 1)]

def test_columns_that_are_asked_for(tmp_path):
    "Columns have the requested order. `run` comes first unless it is requested; marks come last."
    put(tmp_path, [row(0)])
    put(tmp_path, [row(1, epoch=3)], [row(2, lr=.5)], name='b')
    def names(run, columns): return scan(run, 'arrow', home=tmp_path, columns=columns).schema.names
    assert [names('*', c) for c in (['step', 'mean'], ['mean', 'run', 'mean'], 'mean')]==[['run', 'step', 'mean'], ['mean', 'run'], ['run', 'mean']]
    assert names('a', ['step', 'mean'])==['step', 'mean'] and names(['a'], ['mean'])==['run', 'mean']
    assert names('*', lambda c: 'm' in c)==['mean', 'run', 'module', 'tname']
    for run in '*', ['b', 'a'], 'b', ['a']: assert names(run, None)==[*read(run, home=tmp_path)]
    with pytest.raises(ValueError, match="'men'.*Did you mean.*mean"): names('a', ['step', 'men'])
    t = scan('*', 'arrow', home=tmp_path).to_table()
    assert t['epoch'].to_pylist()==[None, 3, None]
    assert t['run'].to_pylist()==['a', 'b', 'b'] and t['lr'].to_pylist()==[None, None, .5]


# ---- engines for queries

def test_a_dataset_of_arrow(tmp_path):
    "Arrow can compute columns, filter, count and sort. The dataset can be pickled for another process."
    put(tmp_path, [row(s) for s in range(6)], [row(s, x=9-s) for s in range(6, 9)])
    rows = scan('a', 'arrow', home=tmp_path, steps=range(1, 9), ttype='output')
    assert rows.to_table(columns={'twice': ds.field('mean')*2, 's': ds.field('step')}, filter=ds.field('path')=='f').to_pydict()==dict(
        twice=[s/2 for s in range(1, 9)], s=[*range(1, 9)])
    assert rows.to_table(columns=['mean'], filter=(ds.field('step')>3) & (ds.field('tname')!='p')).to_pydict()=={'mean': [s/4 for s in range(4, 9)]}
    assert rows.count_rows()==8 and rows.count_rows(filter=ds.field('mean')>1)==4
    assert rows.sort_by([('step', 'descending')]).to_table()['step'].to_pylist()==[*range(8, 0, -1)]
    sent = pickle.loads(pickle.dumps(rows))
    assert sent.schema==rows.schema and sent.to_table().equals(rows.to_table()) and repr(sent).startswith('<torchember.frames.dataset.LogDataset of 2 chunks>')
    few = scan('a', 'arrow', home=tmp_path, columns=['mean'], steps=[2, 7])
    assert few.to_table().to_pydict()=={'mean': [.5, 1.75]} and pickle.loads(pickle.dumps(few)).to_table().equals(few.to_table())
    for ask in rows.join, rows.get_fragments, rows.replace_schema:
        with pytest.raises(NotImplementedError, match='Read a table first'): ask(None)

def test_tables_of_pandas_have_the_same_types(tmp_path):
    "Integers become floats in all tables, if values may be missing in one of them."
    put(tmp_path, [row(s, n=3) for s in range(3)], [row(3), row(4, n=2)])
    a,b = scan('a', 'pandas', home=tmp_path)
    assert a.dtypes.equals(b.dtypes) and [str(a[c].dtype) for c in ('step', 'nan', 'call', 'n', 'mean')]==['int64']*2+['float64']*3
    assert [[*t] for t in scan('a', 'pandas', home=tmp_path, columns=['mean'], tname='o', steps=range(9))]==[['mean']]*2
    assert a['n'].tolist()==[3]*3 and b['n'].isna().tolist()==[True, False]

def test_limits_of_polars(tmp_path):
    "head, tail and slice work across chunks. A key that is an empty text is a column with an empty name."
    put(tmp_path, [row(s) for s in range(4)], [row(s) for s in range(4, 8)], [row(s)|{'': s} for s in range(8, 12)])
    rows = scan('a', home=tmp_path)
    assert [rows.head(n).collect()['step'].to_list() for n in (0, 3, 4, 6, 99)]==[[*range(n)] for n in (0, 3, 4, 6, 12)]
    assert rows.filter(pl.col('mean')>=1.25).head(2).select('tname', 'step').collect().rows()==[('o', 5), ('o', 6)]
    assert rows.select(pl.len()).collect().item()==12
    assert [x.collect()['step'].to_list() for x in (rows.tail(2), rows.slice(3, 2))]==[[10, 11], [3, 4]]
    assert rows.filter(pl.col('step')==pl.col('step').max()).collect()[''].to_list()==[11]

def test_sql(tmp_path):
    "A query can read only the table `log`, no files. The error for a wrong table name mentions `log`."
    put(tmp_path, [row(s) for s in range(4)], [row(4)])
    put(tmp_path, [row(0)], name='b')
    assert query('SELECT run, count(*) n FROM log GROUP BY run', 'a', tmp_path).values.tolist()==[['a', 5]]
    assert query('SELECT run, count(*) n FROM log GROUP BY run ORDER BY run', ['b', 'a'], tmp_path).values.tolist()==[['a', 5], ['b', 1]]
    assert query('SELECT max(step) FROM log WHERE step<3', home=tmp_path).values.tolist()==[[2]]
    (tmp_path/'x.csv').write_text('1\n')
    for sql in f"SELECT * FROM '{tmp_path/'x.csv'}'",f"COPY log TO '{tmp_path/'y.csv'}'",'SET enable_external_access=true','SET enable_progress_bar=true':
        with pytest.raises(Exception, match='disabled|locked'): query(sql, home=tmp_path)
    with pytest.raises(Exception, match='FROM log$'): query('SELECT * FROM logs', home=tmp_path)
