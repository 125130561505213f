"A compacted run (Parquet parts) gives the same results as its JSON lines, also if the compacting process is killed at any time."
import json
import os
import shutil

import pandas as pd
import programs
import pyarrow.parquet as pq
import pytest
from drawn import any_row, begun, keys, lines, odd, row
from hypothesis import HealthCheck, example, given, settings, strategies as st

from torchember import compact, emberTracker, query, read, runs
from torchember.frames.choice import NoMatchingRows
from torchember.store import compaction, log as store_log, parts
from torchember.store.lines import parse

log = st.lists(row|any_row, min_size=1, max_size=9)
questions = [{}, dict(steps=1), dict(steps=-1), dict(steps=slice(-2, None)), dict(ttype='weight'), dict(path='f*', tname='o'), dict(columns=['step', 'ttype']),
    dict(columns=lambda c: 'm' in c), dict(steps=lambda s: s%2==0, ttype=['output'])]


def answers(home, name='a'):
    "Return the results of all reading functions for a run, as a dict."
    t = emberTracker(name, home)
    out = {'lines': repr(t.lines()), 'torn': t.torn, 'latest': t.latest_df, 'df': t.df, 'last': t.last_step(), 'rows': runs(home)[['name', 'steps']]}
    for q in questions:
        try: out[str(list(q.items()))] = read(name, home=home, **q)
        except (NoMatchingRows, ValueError, TypeError, AttributeError) as e: out[str(list(q.items()))] = type(e).__name__, str(e)
    return out

def told(x):
    "Return a table with its index and dtypes as text, because lists with NaN can be compared only as text."
    if not isinstance(x, pd.DataFrame): return str(x)
    def column(c): return f"{c!r} {x[c].dtype!r} {list(getattr(x[c].dtype, 'categories', ()))} {x[c].tolist()}"
    return '\n'.join([f'{x.index} {len(x)}', *map(column, x)])

def same(a, b):
    assert a.keys()==b.keys()
    for k in a: assert told(a[k])==told(b[k]), k


@pytest.mark.slow
@pytest.mark.parametrize('over', [True, False], ids=['over', 'going on'])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors])
@given(rows=log, torn=st.integers(0, 12), size=st.integers(200, 2000), n=st.integers(3, 6))
@example(rows=[{'step': 0, 'mean': v, 'ttype': 'output', 'tname': 'o', 'x': v} for v in odd], torn=3, size=300, n=100)
@example(rows=[{k: 1, 'step': i} for i,k in enumerate(keys)], torn=0, size=10_000, n=100)
@example(rows=[{'step': i, 'x': v} for i,v in enumerate([1, 2, 2.5, 3, None])], torn=9, size=10_000, n=100)
def test_answers_are_those_of_the_lines(over, tmp_path_factory, rows, torn, size, n):
    home = tmp_path_factory.mktemp('home')
    store_log.live.clear() # forget the open logs of earlier examples, which each read would check
    data = lines(rows[:torn])+b'{"torn": \n\n'*(torn<len(rows))+lines(rows[torn:])
    t = begun(home, data)
    if not over: t['base_a'] = {'pid': os.getpid(), 'host': parts.os.uname().nodename}
    expected = answers(home)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(compaction, 'most_bytes', size)
        m.setattr(compaction, 'most_rows', n)
        said, = compact('a', home)
    same(expected, answers(home))
    kept = t.log_path.read_bytes()
    assert said['lines']==len(kept) and kept==(b'' if over else data)
    last = max((r['step'] for r in rows if type(r.get('step')) is int and 0<=r['step']<2**53), default=-1)
    if not over and said['rows']:
        held = [r for p in sorted(parts.folder_of(t.log_path).glob('*.parquet')) for r in parsed(p)]
        assert len(held)==said['rows'] and all(r.get('step')!=last or type(r['step']) is not int for r in held)
    shutil.rmtree(home)

def parsed(path):
    about = json.loads(pq.read_schema(path).metadata[b'torchember'])
    return parts.Part(path, {about['id']: about}).parsed()[0]


killed = """
import os, signal, sys, shutil
from pathlib import Path
import pyarrow.parquet as pq
from torchember import compact, emberTracker, read
from torchember.store import compaction, parts

home,over = Path(sys.argv[1]),sys.argv[2]=='over'
def fresh():
    shutil.rmtree(home, ignore_errors=True)
    t = emberTracker('a', home)
    for i in range(40): t + dict(mean=i/7, ttype='output', tname='o', module='m(Net)', step=i//4)
    t.barrier()
    if not over: t['base_a'] = dict(pid=os.getpid(), host=os.uname().nodename)
    return t

def dies(n):
    "Each call of what touches the disk may be the last"
    done = 0
    def counted(f, half=None):
        def g(*args, **kwargs):
            nonlocal done
            done += 1
            if done==n:
                if half: half(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return f(*args, **kwargs)
        return g
    os.replace,os.fsync,os.link,Path.unlink = map(counted, (os.replace, os.fsync, os.link, Path.unlink))
    pq.write_table = counted(pq.write_table, lambda table, path: Path(path).write_bytes(b'PAR1'+bytes(999)))
    pq.read_metadata = counted(pq.read_metadata)
    try: compact('a', home)
    finally: os._exit(7)

compaction.most_rows = 16
t = fresh()
expected,n = t.lines(),0
while True:
    n += 1
    pid = os.fork()
    if pid==0: dies(n)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])==7: break
    assert t.lines()==expected and len(read('a', home=home))==40, n
    told = compact('a', home)[0]
    assert t.lines()==expected and told['rows']==(40 if over else 36), (n, told)
    left = {f.name for f in parts.folder_of(t.log_path).iterdir()}
    assert left=={'parts.json', '.lock', *(f'part-0000{i}.parquet' for i in range(3))}, (n, left)
    assert (t.log_path.stat().st_size==0)==over
    t = fresh()
print(n)
"""

@pytest.mark.slow
@pytest.mark.parametrize('over', ['over', 'going on'])
def test_who_compacts_may_be_killed(over, tmp_path):
    "The process is killed at each call that changes the disk. No row is lost or doubled, and the next compaction cleans up."
    p = programs.run(killed, tmp_path/'home', over)
    assert p.returncode==0, p.stderr[-3000:]
    assert int(p.stdout)>15


@pytest.fixture
def run(tmp_path):
    t = begun(tmp_path, lines([dict(mean=i/7, ttype='output', tname='o', module='m(Net)', step=i) for i in range(20)]))
    compact('a', tmp_path, keep=True)
    return t

def test_lines_may_be_kept(run, tmp_path):
    assert len(run.log_path.read_bytes().split(b'\n'))==21 and len(run.lines())==20
    assert compact('a', tmp_path)==[dict(name='a', rows=20, parquet=parts.summarize_parts(run.log_path)['size'], lines=0)] and len(run.lines())==20

def test_a_compacted_run_goes_on(run, tmp_path):
    "A compacted run gets new rows, and is compacted again after each of them."
    for i in range(20, 24):
        compact('a', tmp_path)
        run + dict(mean=i/7, ttype='output', tname='o', module='m(Net)', step=i)
        run.barrier()
        assert [r['step'] for r in run.lines()]==[*range(i+1)] and run.last_step()==i and runs(tmp_path)['rows'].tolist()==[i+1]
        assert read('a', steps=-1, home=tmp_path)['step'].tolist()==[i] and query('SELECT count(*) n FROM log', 'a', tmp_path)['n'][0]==i+1

def test_a_part_of_another_run_is_refused(run, tmp_path):
    begun(tmp_path, run.log_path.read_bytes(), 'b')
    compact('b', tmp_path)
    folder = parts.folder_of(run.log_path)
    shutil.copy(parts.folder_of(run.log/'b')/'part-00000.parquet', folder)
    for ask in (lambda: read('a', home=tmp_path), run.lines, lambda: run.df):
        with pytest.raises(ValueError, match="part-00000.parquet is a part of another run, 'b', so it was not read"): ask()
    (folder/'part-00000.parquet').write_bytes(b'PAR1 and half of it')
    with pytest.raises(ValueError, match='part-00000.parquet is not a valid Parquet file of torchember.compact'): read('a', home=tmp_path)
    (folder/'part-00000.parquet').unlink()
    with pytest.raises(FileNotFoundError, match='a file with rows of the run, was removed while the run was read'): read('a', home=tmp_path)

def test_lines_of_another_run_are_refused(run, tmp_path):
    run.log_path.write_bytes(b'{"step": 0}\n')
    for ask in (lambda: read('a', home=tmp_path), lambda: compact('a', tmp_path)):
        with pytest.raises(ValueError, match='has 12 bytes, but its first .* bytes were converted to Parquet files earlier'): ask()
    assert run.log_path.read_bytes()==b'{"step": 0}\n'
    (parts.folder_of(run.log_path)/'parts.json').write_text('{"parts": 3}')
    with pytest.raises(ValueError, match='is not the list of Parquet files that compact writes'): read('a', home=tmp_path)

def test_one_at_a_time(run, tmp_path):
    lock = compaction.lock_folder(parts.folder_of(run.log_path))
    with lock, pytest.raises(BlockingIOError, match='is being written by another process'): compact('a', tmp_path)

def test_logs_of_ranks_are_compacted_one_by_one(tmp_path):
    rows = [dict(mean=i/7, ttype='weight', tname='o', module='m(Net)', step=i) for i in range(5)]
    for r in range(2): begun(tmp_path, lines(rows), f'a.rank{r}')
    before = read('a', home=tmp_path, per_rank=True)
    assert [s['name'] for s in compact('a', tmp_path)]==['a.rank0', 'a.rank1']
    pd.testing.assert_frame_equal(read('a', home=tmp_path, per_rank=True), before)

def rows_of(blocks): return [r for b in blocks for r in parse(b)[0]]

def test_lines_that_are_removed_while_they_are_read_are_read(run, tmp_path, monkeypatch):
    "Lines are compacted and removed while a reader has not reached them. The reader still gets all rows."
    rows = [dict(mean=i/7, ttype='output', tname='o', module='m(Net)', step=i) for i in range(30)]
    monkeypatch.setattr(compaction, 'most_rows', 4)
    with run.log_path.open('ab') as f: f.write(lines(rows[20:]))
    def removed(): compaction.convert_to_parts(run.log_path)
    def half():
        with monkeypatch.context() as m:
            m.setattr(compaction, 'make_parts', lambda *args: 1/0)
            with pytest.raises(ZeroDivisionError): compaction.remove_lines(run.log_path, parts.read_part_list(run.log_path))
    for change in half, removed:
        blocks = parts.blocks_of_run(run.log_path)
        first = rows_of([next(blocks)])
        change()
        assert first==rows[:20] and rows_of(blocks)==rows[20:], change
    run.log_path.write_bytes(lines(rows[:3]))
    compaction.convert_to_parts(run.log_path, keep=True)
    files,done = parts.lines_after,[]
    def later(path, told):
        if not done: done.append(1); compaction.convert_to_parts(path)
        return files(path, told)
    monkeypatch.setattr(parts, 'lines_after', later)
    assert parts.summarize_parts(run.log_path)['rows']==33 and rows_of(parts.blocks_of_run(run.log_path))==rows+rows[:3]

def test_up_to_a_byte(run):
    "Reading stops at a given byte of the log file. Rows behind this byte are left out, even if a part contains them."
    data = run.log_path.read_bytes()
    every = rows_of(parts.blocks_of_run(run.log_path))
    for n in 0, 5, 20: assert rows_of(parts.blocks_of_run(run.log_path, b'{"step": 9}\n', len(b''.join(data.splitlines(True)[:n]))))==[*every[:n], {'step': 9}]
    compaction.convert_to_parts(run.log_path)
    for i in 20, 21: # compact each of the two lines into a part of its own
        with run.log_path.open('ab') as f: f.write(lines([{'step': i}]))
        compaction.convert_to_parts(run.log_path, i+1)
    for end,more in (0, []), (len(lines([{'step': 20}])), [{'step': 20}]), (None, [{'step': 20}, {'step': 21}]):
        assert rows_of(parts.blocks_of_run(run.log_path, end=end))==every+more

@pytest.mark.parametrize('links', [True, False])
def test_a_run_has_a_file_of_its_name_at_any_time(run, tmp_path, monkeypatch, links):
    "The log file exists even if the removal of its lines was interrupted and new lines were added."
    data,other = run.log_path.read_bytes(),parts.renamed_file(run.log_path, parts.read_part_list(run.log_path))
    rows,more = rows_of(parts.blocks_of_run(run.log_path)),lines([{'step': 20}])
    if not links: monkeypatch.setattr(os, 'link', lambda *paths: os.stat(tmp_path/'none'))
    with monkeypatch.context() as m:
        m.setattr(compaction, 'replace', lambda *args: 1/0)
        with pytest.raises(ZeroDivisionError): compaction.convert_to_parts(run.log_path)
    assert other.read_bytes()==data and run.log_path.exists()==links
    assert rows_of(parts.blocks_of_run(run.log_path))==rows
    with run.log_path.open('ab') as f: f.write(more)
    compaction.convert_to_parts(run.log_path, 20)
    assert rows_of(parts.blocks_of_run(run.log_path))==[*rows, {'step': 20}] and not other.exists()
    assert run.log_path.read_bytes()==(data+more if links else more)

def test_lines_that_were_put_aside_come_before_those_after(run, monkeypatch):
    "The removal of compacted lines was interrupted, and new lines were added. The rows keep their order."
    def steps(): return [r['step'] for r in rows_of(parts.blocks_of_run(run.log_path))]
    compaction.convert_to_parts(run.log_path)
    with run.log_path.open('ab') as f: f.write(lines({'step': i} for i in range(20, 23)))
    with monkeypatch.context() as m:
        m.setattr(compaction, 'make_parts', lambda *args: 1/0)
        with pytest.raises(ZeroDivisionError): compaction.remove_lines(run.log_path, parts.read_part_list(run.log_path))
    with run.log_path.open('ab') as f: f.write(lines([{'step': 23}]))
    for _ in range(3):
        assert steps()==[*range(24)]
        compaction.convert_to_parts(run.log_path)
    assert run.log_path.stat().st_size==0

def test_the_last_line_of_a_run_that_is_over_may_have_no_end(run):
    with run.log_path.open('ab') as f: f.write(b'{"step": 20}')
    compaction.convert_to_parts(run.log_path, 21)
    assert run.log_path.stat().st_size # the unfinished last line stays, because a process may still be writing it
    compaction.convert_to_parts(run.log_path)
    assert [r['step'] for r in run.lines()]==[*range(21)] and run.log_path.stat().st_size==0
