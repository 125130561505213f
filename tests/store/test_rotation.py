"Lines of a run become Parquet parts while the run is written. All rows stay readable, whatever is killed, refused or forked."
import json
import random
import re
import signal
import sys
import threading
import time
import warnings

import pandas as pd
import programs
import pytest
import torch
from test_compact import lines, rows_of, told
from torch import nn

from torchember import compact, du, emberTracker, mv, query, read, rm, runs, scan, sync, torchEmber
from torchember.frames.listing import estimate_rows
from torchember.ground.messages import EmberWarning
from torchember.monitor.monitor import Monitor
from torchember.store import compaction, log_file, parts, rotation
from torchember.store.jsonl import new_run
from torchember.store.log_file import last_step_of
from torchember.store.rotation import CompactionProcess, Rotation


def row(i): return dict(mean=i/7, ttype='output', tname='o', module='m(Net)', step=i//4, n=i)

def numbers(t): return [r['n'] for r in t.lines()]

def files(path): return sorted(f.name for f in parts.folder_of(path).iterdir())

def begun(home, store='parquet', name='a', **how):
    t = emberTracker(name, home, store=store, **how)
    t.begin(dict(start='2026-01-01 00:00:00', model='Net', schema=1), {})
    return t

def wait(t, seconds=60):
    "Wait until the process that makes the parts has ended."
    r,until = t.file.rotation,time.monotonic()+seconds
    while r.child is not None or r.ready:
        assert time.monotonic()<until
        time.sleep(.01)
        r.run_child(t.log_path)

@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(Rotation, 'most_rows', 40)
    monkeypatch.setattr(Rotation, 'pause', 0.)

@pytest.fixture
def inline(monkeypatch):
    "Replace the compaction process by a direct call."
    class Inline:
        def __init__(self, path): compaction.compact_renamed(path)
        def has_ended(self, patience=0): return True
        def error(self): return None
    monkeypatch.setattr(rotation, 'CompactionProcess', Inline)


# ---- rows of a training

def train(store, home, steps=60):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    o = torch.optim.SGD(m.parameters(), .01)
    te = torchEmber(m, o, name='a', home=home, store=store, stats='numerics')
    for i in range(steps):
        loss = m(torch.randn(5, 4)).square().mean()
        loss.backward()
        te.log(loss=loss)
        o.step()
        o.zero_grad()
        if i%20==5: te.mark(epoch=i//20)
        te.t.barrier()
    return te

@pytest.mark.release # slow test, run only before a release
@pytest.mark.slow
def test_a_training_has_the_rows_that_lines_have(tmp_path, small, monkeypatch):
    monkeypatch.setattr(Rotation, 'most_rows', 200)
    a,b = train('jsonl', tmp_path/'a'),train('parquet', tmp_path/'b')
    wait(b.t)
    assert len(parts.read_part_list(b.t.log_path)['parts'])>=1 and b.t.log_path.stat().st_size<a.t.log_path.stat().st_size
    def answers(te, home):
        def ask(f): return f.drop(columns='ts', errors='ignore')
        out = dict(df=te.t.df, latest=te.t.latest_df, last=te.t.last_step(), read=read('a', home=home), steps=read('a', home=home, steps=slice(7, 9)),
            kinds=read('a', home=home, ttype='weight_grad', columns=['step', 'mean', 'exponents']), lines=pd.DataFrame(te.t.lines()),
            query=query('SELECT step, path, count(*) n, sum(mean) s FROM log GROUP BY ALL ORDER BY ALL', 'a', home),
            scan=scan('a', home=home).collect().to_pandas(), runs=runs(home)[['name', 'model', 'steps', 'rows']])
        return {k: ask(v) if isinstance(v, pd.DataFrame) else v for k,v in out.items()}
    going,expected = answers(b, tmp_path/'b'),answers(a, tmp_path/'a')
    for k in expected: assert told(going[k])==told(expected[k]), k
    a.close()
    b.close()
    over,expected = answers(b, tmp_path/'b'),answers(a, tmp_path/'a')
    for k in expected: assert told(over[k])==told(expected[k]), k
    held = parts.summarize_parts(b.t.log_path)
    assert (held['rows'], b.t.log_path.stat().st_size, held['lines'])==(len(expected['df']), 0, a.t.log_path.stat().st_size)
    assert b.t['base_a']['rows']==a.t['base_a']['rows']==held['rows'] and b.t['base_a']['bytes']==a.t['base_a']['bytes']

def test_what_there_is_to_choose(tmp_path, monkeypatch):
    "Each function that begins a run raises an error for an unknown store or a missing library, before the run exists."
    m = nn.Linear(2, 1)
    def doors(store):
        how = dict(store=store, home=tmp_path)
        return [lambda: torchEmber(m, **how), lambda: Monitor(m, {}, **how), lambda: emberTracker('a', **how), lambda: new_run('N', **how)]
    for door in doors('parqet'):
        with pytest.raises(ValueError, match="No store 'parqet'. Known: jsonl, parquet. Did you mean 'parquet'"): door()
    for lib in 'pyarrow', 'pyarrow.parquet':
        with monkeypatch.context() as p:
            p.setitem(sys.modules, lib, None)
            for door in doors('parquet'):
                with pytest.raises(ImportError, match="store='parquet' needs pyarrow.* pip install pyarrow$"): door()
    assert not list(tmp_path.rglob('*')) and not m._forward_hooks
    assert emberTracker('a', tmp_path).file.rotation is None
    with Monitor(m, {}, store='parquet', home=tmp_path) as mon: assert type(mon.t.file.rotation) is Rotation


# ---- the time at which lines are set aside for compaction

def test_when_lines_are_put_aside(tmp_path, monkeypatch, inline):
    "Lines are set aside after a number of new rows or bytes. Lines of an earlier process count as bytes."
    monkeypatch.setattr(Rotation, 'most_rows', 10)
    t = begun(tmp_path)
    for i in range(25): t + row(i)
    assert [p['rows'] for p in parts.read_part_list(t.log_path)['parts']]==[10, 10] and numbers(t)==[*range(25)]
    size = t.log_path.stat().st_size
    assert size==len(lines(map(row, range(20, 25))))
    monkeypatch.setattr(Rotation, 'most_rows', 1000)
    monkeypatch.setattr(Rotation, 'most_bytes', size+len(lines([row(25), row(26)])))
    again = begun(tmp_path)
    again + row(25)
    again.barrier()
    assert len(parts.read_part_list(t.log_path)['parts'])==2
    again + row(26)
    again.barrier()
    assert [p['rows'] for p in parts.read_part_list(t.log_path)['parts']]==[10, 10, 7] and again.log_path.stat().st_size==0
    for i in range(27, 40): again + row(i)
    n = next(n for n in range(1, 13) if len(lines(map(row, range(27, 27+n))))>=Rotation.most_bytes)
    assert numbers(again)==[*range(40)] and [p['rows'] for p in parts.read_part_list(t.log_path)['parts']]==[10, 10, 7, n]
    again.end()
    assert [p['rows'] for p in parts.read_part_list(t.log_path)['parts']]==[10, 10, 7, n, 13-n] and again.log_path.stat().st_size==0
    again + row(40) # rows can still be added after the end of the run
    assert numbers(again)==[*range(41)] and again.log_path.stat().st_size
    again.end()
    assert numbers(again)==[*range(41)] and not again.log_path.stat().st_size

def test_no_lock_is_held_while_a_process_is_started(tmp_path, small, monkeypatch):
    held = []
    class Looks(CompactionProcess):
        def __init__(self, path):
            held.append(t.file.disk.lock._is_owned())
            super().__init__(path)
    monkeypatch.setattr(rotation, 'CompactionProcess', Looks)
    t = begun(tmp_path)
    for i in range(50): t + row(i)
    assert held==[False]
    t.end()
    assert numbers(t)==[*range(50)] and parts.summarize_parts(t.log_path)['rows']==50

def test_nobody_appends_while_the_last_lines_are_put_aside(tmp_path, inline, monkeypatch):
    t,held = begun(tmp_path),[]
    real = rotation.rotate
    monkeypatch.setattr(rotation, 'rotate', lambda *args: held.append(t.file.disk.lock._is_owned()) or real(*args))
    monkeypatch.setattr(Rotation, 'most_rows', 5)
    for i in range(7): t + row(i)
    t.end()
    assert held==[True, True] and numbers(t)==[*range(7)]

def test_lines_that_stand_aside_come_first(tmp_path, small, inline):
    "Lines set aside by a killed process become parts first. Later lines are still counted, and then set aside."
    t = begun(tmp_path)
    for i in range(10): t + row(i)
    compaction.rotate(t.log_path)
    again = begun(tmp_path)
    for i in range(10, 50): again + row(i)
    assert [p['rows'] for p in parts.read_part_list(t.log_path)['parts']]==[10] and again.log_path.stat().st_size
    for i in (50, 51): again + row(i)
    assert [p['rows'] for p in parts.read_part_list(t.log_path)['parts']]==[10, 42] and numbers(again)==[*range(52)]

def test_one_process_at_a_time(tmp_path, small, monkeypatch):
    "New rows stay lines while a compaction process runs. The end of the run waits for the process for a limited time."
    class Never(list):
        def __init__(self, path): made.append(self)
        def has_ended(self, patience=0): waited.append(patience)
        def error(self): return None
    made,waited = [],[]
    monkeypatch.setattr(rotation, 'CompactionProcess', Never)
    monkeypatch.setattr(Rotation, 'patience', 7.)
    t = begun(tmp_path)
    for i in range(200): t + row(i)
    assert len(made)==1 and numbers(t)==[*range(200)]
    with pytest.warns(EmberWarning, match=r"lines of a to Parquet takes more than 7 s. It continues; call compact\('a'\)"): t.end()
    assert max(waited)==7 and numbers(t)==[*range(200)]
    t.file.rotation.child = None
    compact('a', tmp_path)
    assert numbers(t)==[*range(200)] and parts.summarize_parts(t.log_path)['rows']==200
    t.file.rotation = None

def test_the_last_part_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, 'most_bytes', 100)
    t = begun(tmp_path)
    for i in range(20): t + row(i)
    with pytest.warns(EmberWarning, match=r"0 MB of a are still JSON lines. compact\('a'\) converts them"): t.end()
    assert parts.summarize_parts(t.log_path)['rows']==0 and numbers(t)==[*range(20)]

@pytest.mark.release
def test_two_runs_at_once_and_logs_of_ranks(tmp_path, small):
    ts = [begun(tmp_path, name=f'a.rank{r}', ranks=8) for r in range(2)]
    for i in range(100):
        for r,t in enumerate(ts): t + (row(i)|dict(rank=r))
    for t in ts: t.end()
    for r,t in enumerate(ts):
        assert [(x['n'], x['rank']) for x in t.lines()]==[(i, r) for i in range(100)] and t.log_path.stat().st_size==0
        assert parts.read_part_list(t.log_path)['group']==parts.rows_per_group(8)==parts.group_rows//2
    assert len(read('a', home=tmp_path, per_rank=True))==200


# ---- errors during compaction

def test_a_folder_that_cannot_be_made_is_said_once(tmp_path, small):
    t = begun(tmp_path)
    t.log.mkdir(parents=True)
    folder = parts.folder_of(t.log_path)
    folder.write_text('in the way')
    with pytest.warns(EmberWarning) as said:
        for i in range(60): t + row(i)
    [what] = [str(w.message) for w in said]
    assert 'lines of the run could not be converted to Parquet, so they remain JSON lines, and the conversion is' in what and 'FileExistsError' in what
    assert numbers(t)==[*range(60)] and t.log_path.stat().st_size==len(lines(map(row, range(60))))
    folder.unlink()
    t.file.rotation.again = 0
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        t + row(60)
        wait(t)
        t.end()
    assert numbers(t)==[*range(61)] and parts.summarize_parts(t.log_path)['rows']==61

def test_what_the_process_says_is_said(tmp_path, small, monkeypatch):
    "The error of the compaction process is reported once. It is tried again, each time after twice the pause."
    monkeypatch.setattr(Rotation, 'pause', 5.)
    monkeypatch.setattr(CompactionProcess, 'program', 'import sys; sys.exit("OSError: No space left on device")')
    t = begun(tmp_path)
    with pytest.warns(EmberWarning, match='could not be converted to Parquet.*No space left on device') as said:
        for i in range(50): t + row(i)
        for _ in range(3):
            until = time.monotonic()+60
            while t.file.rotation.child is not None and time.monotonic()<until: t.file.rotation.run_child(t.log_path)
            assert t.file.rotation.child is None and t.file.rotation.again>time.monotonic()
            if t.file.rotation.wait<40: t.file.rotation.again = 0; t.barrier()
    assert len(said)==1 and t.file.rotation.wait==40 and numbers(t)==[*range(50)]
    monkeypatch.undo()
    t.file.rotation.again = 0
    t.barrier()
    wait(t)
    assert t.file.rotation.wait==Rotation.pause and numbers(t)==[*range(50)] and parts.summarize_parts(t.log_path)['rows']==40

@pytest.mark.release
def test_who_is_before_us_is_waited_for(tmp_path, small):
    "If another process holds the lock, no warning is given: lines stay, and compaction is tried again later."
    t = begun(tmp_path)
    parts.folder_of(t.log_path).mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with compaction.lock_folder(parts.folder_of(t.log_path)):
            for i in range(45): t + row(i)
            assert files(t.log_path)==['.lock'] and numbers(t)==[*range(45)]
        t + row(45)
        assert 'lines-0' in files(t.log_path) or parts.summarize_parts(t.log_path)['rows']
        wait(t)
        with compaction.lock_folder(parts.folder_of(t.log_path)):
            child = CompactionProcess(t.log_path)
            assert child.has_ended(60)
            with pytest.raises(BlockingIOError): child.error()
        t.end()
    assert numbers(t)==[*range(46)] and parts.summarize_parts(t.log_path)['rows']==46

def test_nothing_is_put_aside_while_somebody_may_read_up_to_a_byte(tmp_path, small, inline, monkeypatch):
    "After a failed write, a reader gets the file and then rows in memory, so the file must not be set aside."
    t = begun(tmp_path)
    for i in range(30): t + row(i)
    refuse = [OSError('full')]
    def append(*args):
        if refuse: raise refuse[0]
        return real(*args)
    real = log_file.append_lines
    monkeypatch.setattr(log_file, 'append_lines', append)
    with pytest.warns(EmberWarning, match='cannot write'):
        for i in range(30, 60): t + row(i)
    blocks = t.file.disk.rows()
    refuse.clear()
    t.barrier()
    assert t.log_path.stat().st_size and rows_of(blocks)==t.lines() and numbers(t)==[*range(60)]
    t.file.files.retry_at = -100
    t + row(60)
    assert parts.summarize_parts(t.log_path)['rows']==61 and numbers(t)==[*range(61)]

forked = """
import os, sys, warnings
from torchember import emberTracker
from torchember.store import compaction, parts
from torchember.store.rotation import Rotation
Rotation.most_rows = 10
t = emberTracker('a', sys.argv[1], store='parquet')
for i in range(15): t + dict(n=i)
pid = os.fork()
if not pid:
    warnings.simplefilter('ignore')
    for i in range(30): t + dict(n=-1)
    t.end()
    sys.exit() # with all that is done at exit
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])==0
told = parts.read_part_list(t.log_path)
assert [r['n'] for r in t.lines()]==[*range(15)] and t.log_path.stat().st_size, told
"""

def test_a_forked_process_makes_no_parts(tmp_path):
    "A forked process compacts nothing. At its exit, the process that began the run makes a part of the remaining lines."
    p = programs.run(forked, tmp_path)
    assert p.returncode==0, p.stderr[-3000:]
    t = emberTracker('a', tmp_path)
    assert numbers(t)==[*range(15)] and t.log_path.stat().st_size==0 and [x['rows'] for x in parts.read_part_list(t.log_path)['parts']]==[10, 5]


# ---- processes that are killed

writes = """
import sys
from torchember import emberTracker
from torchember.store.rotation import Rotation
Rotation.most_rows,Rotation.pause = 25,0.
t = emberTracker('a', sys.argv[1], store='parquet', fsync='never')
first = int(sys.argv[2])
for i in range(first, first+100_000):
    t + dict(mean=i/7, ttype='output', tname='o', module='m(Net)', step=i//4, n=i)
    print(i, flush=True)
"""

@pytest.mark.slow
def test_a_run_that_is_killed_loses_nothing(tmp_path):
    "A run is killed at random times and continued, fifteen times, and compacted in between. No row is lost."
    g,t = random.Random(0),emberTracker('a', tmp_path)
    n = 0
    for again in range(15):
        p = programs.start(writes, tmp_path, n)
        for _ in range(g.randrange(1, 120)): p.stdout.readline()
        time.sleep(g.random()/5)
        p.send_signal(signal.SIGKILL)
        seen = p.communicate()[0].split()
        got = numbers(t)
        # all written rows exist, once and in order
        assert got==[*range(len(got))] and len(got)>(int(seen[-1]) if seen else n), again
        n = len(got)
        assert len(read('a', home=tmp_path))==n and t.last_step()==(n-1)//4 and runs(tmp_path)['rows'].tolist()==[n]
        if again%4==3:
            done(t)
            assert numbers(t)==[*range(n)] and t.log_path.stat().st_size==0 and set(files(t.log_path))=={'.lock', 'parts.json', *named(t)}
    done(t)
    assert numbers(t)==[*range(n)] and parts.summarize_parts(t.log_path)['rows']==n>100

def named(t): return [p['file'] for p in parts.read_part_list(t.log_path)['parts']]

def done(t):
    "Compact the run as soon as the compaction process of the killed run has ended."
    until = time.monotonic()+60
    while True:
        try: return compact(t.fname, t.dir)
        except BlockingIOError:
            assert time.monotonic()<until
            time.sleep(.02)


@pytest.mark.slow
@pytest.mark.parametrize('what', ['rotated', pytest.param('joined', marks=pytest.mark.slow)])
def test_who_is_killed_at_any_call_that_touches_the_disk(what, tmp_path):
    p = programs.run(at_calls, tmp_path/'home', what)
    assert p.returncode==0, p.stderr[-3000:]
    assert int(p.stdout)>10

at_calls = """
import os, signal, sys, shutil
from pathlib import Path
import pyarrow.parquet as pq
from torchember import compact, emberTracker, read
from torchember.store import compaction, parts

home,before,what = Path(sys.argv[1]),Path(sys.argv[1]+'-before'),sys.argv[2]
def fresh():
    shutil.rmtree(home, ignore_errors=True)
    if before.exists(): shutil.copytree(before, home); return emberTracker('a', home)
    t = emberTracker('a', home)
    for i in range(40):
        t + dict(mean=i/7, ttype='output', tname='o', module='m(Net)', step=i//4)
        if what=='joined' and i%8==7: compaction.convert_to_parts(t.log_path, i//4)
    t.barrier()
    shutil.copytree(home, before)
    return t

def change(t):
    if what=='joined': return compaction.convert_to_parts(t.log_path)
    compaction.rotate(t.log_path)
    compaction.compact_renamed(t.log_path)

def dies(n):
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
    try: change(t)
    finally: os._exit(7)

compaction.most_rows = 16
t = fresh()
expected,n = t.lines(),0
more = dict(mean=1., step=10)
while True:
    n += 1
    pid = os.fork()
    if pid==0: dies(n)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])==7: break
    assert t.lines()==expected and len(read('a', home=home))==40 and t.last_step()==9, n
    t + more # it goes on as it is
    assert t.lines()==[*expected, more] and t.last_step()==10, n
    if n%2: change(t)
    assert t.lines()==[*expected, more], n
    told = compact('a', home)[0]
    assert t.lines()==[*expected, more] and told['rows']==41 and told['lines']==0, (n, told)
    left = {f.name for f in parts.folder_of(t.log_path).iterdir()}
    assert left=={'parts.json', '.lock', *(p['file'] for p in parts.read_part_list(t.log_path)['parts'])}, (n, left)
    t = fresh()
print(n)
"""


# ---- reading during compaction

def changes(path):
    "Yield functions that change a log while it is read."
    yield lambda: compaction.rotate(path)
    yield lambda: compaction.compact_renamed(path)
    yield lambda: compaction.convert_to_parts(path)

def test_whoever_reads_while_lines_are_put_aside_has_them_once(tmp_path, monkeypatch):
    "Compaction happens between any two disk accesses of a reader. Each row is read exactly once."
    t = begun(tmp_path, 'jsonl')
    t.log.mkdir(parents=True)
    def scanned():
        frames = scan('a', 'pandas', home=tmp_path)
        armed[0] = None # from here on, scan has decided on the files to read
        try: return [n for df in frames for n in df['n']]
        except OSError as e: # parts were made or joined right after scan chose its files
            assert re.search('Read (it|the run) again|Call scan again', str(e))
            return scanned()
    asked = dict(lines=lambda: numbers(t), last=t.last_step, runs=lambda: runs(tmp_path)['rows'].tolist(), scan=scanned)
    real,calls,armed = parts.read_part_list,[0],[None]
    def listed(path):
        got = real(path)
        if armed[0] is not None:
            calls[0] -= 1
            if calls[0]==0:
                change,armed[0] = armed[0],None
                change()
        return got
    monkeypatch.setattr(parts, 'read_part_list', listed)
    for n in range(1, 4):
        for how in range(3):
            for what,ask in asked.items():
                rm('a', tmp_path) if t.log_path.exists() else None
                t.log_path.write_bytes(lines(map(row, range(20))))
                for i,change in enumerate(changes(t.log_path)):
                    if i==how: break
                    change()
                with t.log_path.open('ab') as f: f.write(lines(map(row, range(20, 24))))
                calls[0],armed[0] = n,change
                got = ask()
                armed[0] = None
                assert got==dict(lines=[*range(24)], last=5, runs=[24], scan=[*range(24)])[what], (n, how, what)

def test_steps_and_rows_are_known_while_lines_stand_aside(tmp_path):
    t = begun(tmp_path)
    for i in range(20): t + row(i)
    compaction.rotate(t.log_path)
    assert t.log_path.stat().st_size==0 and last_step_of(t.log_path)==t.last_step()==4 and runs(tmp_path)[['steps', 'rows']].values.tolist()==[[5, 20]]
    t + row(20)
    assert last_step_of(t.log_path)==5 and runs(tmp_path)['rows'].tolist()==[21] and numbers(t)==[*range(21)]
    compaction.rotate(t.log_path) # does nothing, because lines that were set aside earlier must be compacted first
    assert t.log_path.stat().st_size and numbers(t)==[*range(21)]
    compaction.compact_renamed(t.log_path)
    compaction.compact_renamed(t.log_path) # the second call has nothing to do
    assert last_step_of(t.log_path)==5 and runs(tmp_path)['rows'].tolist()==[21] and numbers(t)==[*range(21)]

def test_a_frame_that_is_asked_for_later(tmp_path):
    "A lazy frame of scan still finds lines that were set aside. Once they are in parts, collecting it raises an error."
    t = begun(tmp_path)
    for i in range(20): t + row(i)
    late = [scan('a', home=tmp_path) for _ in range(2)]
    compaction.rotate(t.log_path)
    for i in range(20, 60): t + row(i)
    assert late[0].collect()['n'].to_list()==[*range(20)]
    compaction.compact_renamed(t.log_path)
    with pytest.raises(Exception, match='was compacted or truncated while scan read it. Call scan again'): late[1].collect()
    assert scan('a', home=tmp_path).collect()['n'].to_list()==[*range(60)]

@pytest.mark.release
def test_many_readers_while_it_is_written(tmp_path, small):
    "Each reader sees all rows up to some point, in order."
    t,over,wrong,looks = begun(tmp_path),threading.Event(),[],[0]
    def reads():
        while not over.is_set():
            try: got = [r['n'] for r in rows_of(parts.blocks_of_run(t.log_path))]
            except Exception as e: wrong.append(repr(e)); return
            looks[0] += 1
            if got!=[*range(len(got))]: wrong.append(got); return
    t + row(0)
    threads = [threading.Thread(target=reads) for _ in range(2)]
    for x in threads: x.start()
    for i in range(1, 400): t + row(i); time.sleep(.002)
    wait(t)
    over.set()
    for x in threads: x.join()
    assert not wrong and looks[0]>5, (wrong[:1], looks)
    t.end()
    assert numbers(t)==[*range(400)]


# ---- moving, removing and copying a run

def test_a_run_goes_on_is_moved_and_removed(tmp_path, small):
    t = begun(tmp_path)
    for i in range(50): t + row(i)
    t.end()
    assert du('a', home=tmp_path)['size'].sum()>0
    mv('a', 'b', home=tmp_path)
    assert numbers(emberTracker('b', tmp_path))==[*range(50)]
    again = new_run('N', 'b', resume=True, home=tmp_path, store='parquet')
    for i in range(50, 120): again + row(i)
    again.end()
    assert numbers(again)==[*range(120)] and again.log_path.stat().st_size==0
    as_lines = new_run('N', 'b', resume=True, home=tmp_path)
    as_lines + row(120)
    as_lines.end()
    assert numbers(as_lines)==[*range(121)] and as_lines.log_path.stat().st_size
    rm('b', home=tmp_path)
    assert not [f for f in tmp_path.rglob('*') if f.is_file() and f.name.startswith('b')] and not parts.folder_of(again.log_path).exists()

def test_sync_of_a_run_that_goes_on(tmp_path, small):
    t,there = begun(tmp_path/'here'),tmp_path/'there'
    for i in range(130):
        t + row(i)
        if i%13==0: sync('a', there, home=tmp_path/'here')
        if i%31==0: assert numbers(emberTracker('a', there))==[*range(i//13*13+1)]
    t.end()
    sync('a', there, home=tmp_path/'here')
    assert numbers(emberTracker('a', there))==[*range(130)]==numbers(t)
    pd.testing.assert_frame_equal(read('a', home=there), read('a', home=tmp_path/'here'))


# ---- joining small parts

def test_small_parts_are_joined_when_a_run_is_over(tmp_path, monkeypatch):
    "Neighboring parts are joined up to the largest size. File names are never reused, and a second call changes nothing."
    monkeypatch.setattr(compaction, 'most_rows', 10)
    t = begun(tmp_path, 'jsonl')
    for i in range(36):
        t + row(i)
        if i in (1, 5, 21):
            with t.log_path.open('ab') as f: f.write(b'{"torn\n')
        if i%4==3: t.barrier(); compaction.convert_to_parts(t.log_path, i//4)
    before,sizes = named(t),[p['rows'] for p in parts.read_part_list(t.log_path)['parts']]
    assert sizes==[4]*8 and before==[f'part-{i:05}.parquet' for i in range(8)]
    with t.log_path.open('ab') as f: f.write(b'{"torn\n')
    compaction.convert_to_parts(t.log_path)
    now = parts.read_part_list(t.log_path)['parts']
    assert [p['rows'] for p in now]==[8, 8, 8, 8, 4] and [p['last'] for p in now]==[1, 3, 5, 7, 8] and [p['torn'] for p in now]==[2, 0, 1, 0, 1]
    assert numbers(t)==[*range(36)] and t.torn==4 and not set(before)&set(named(t)[:4]) and len(set(named(t)))==5
    again = [named(t), {f: (parts.folder_of(t.log_path)/f).stat().st_mtime_ns for f in named(t)}]
    compaction.convert_to_parts(t.log_path)
    assert again==[named(t), {f: (parts.folder_of(t.log_path)/f).stat().st_mtime_ns for f in named(t)}]
    monkeypatch.setattr(compaction, 'most_bytes', now[1]['end'])
    monkeypatch.setattr(compaction, 'most_rows', 1000)
    compaction.convert_to_parts(t.log_path)
    # joining another eight rows would exceed the limit by one byte
    assert [p['rows'] for p in parts.read_part_list(t.log_path)['parts']]==[16, 8, 12]

@pytest.mark.parametrize('given', range(6))
def test_parts_that_are_joined_while_they_are_read(given, tmp_path, monkeypatch):
    "A reader that has read some of the parts continues with the next row."
    t = begun(tmp_path, 'jsonl')
    for i in range(20):
        t + row(i)
        if i%4==3: t.barrier(); compaction.convert_to_parts(t.log_path, i//4)
    blocks = parts.blocks_of_run(t.log_path)
    got = [r for _ in range(given) for r in rows_of([next(blocks)])]
    compaction.convert_to_parts(t.log_path)
    assert len(named(t))==1 and [r['n'] for r in got+rows_of(blocks)]==[*range(20)]


def test_a_file_that_was_put_aside_is_not_counted_as_the_one_that_follows(tmp_path):
    "An estimate of rows is cached for each file. The new log file must not get the old estimate."
    log = tmp_path/'log'/'a'
    log.parent.mkdir()
    def lines(n, more): return ''.join(json.dumps(dict(module='m(Net)', ttype='output', tname='o', step=i, mean=1., note='x'*more))+'\n' for i in range(n))
    log.write_text(lines(3, 200))
    assert estimate_rows(log)==3
    compaction.rotate(log)
    log.write_text(lines(20, 0))
    assert log.stat().st_size>len(lines(3, 200)) and estimate_rows(log)==23
