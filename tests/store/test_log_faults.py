"""The log under all faults of users and machines. LOG_KILLS, LOG_STEPS and LOG_FORKS set the numbers of trials."""
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from pathlib import Path

import programs
import pytest
import torch

from torchember import torchEmber
from torchember.ground.messages import EmberWarning
from torchember.store import log as store_log, log_file, base
from torchember.store.jsonl import emberTracker, new_run
from torchember.store.log_file import JsonLines

kills,steps,forks = (int(os.environ.get(f'LOG_{k}', n)) for k,n in (('KILLS', 40), ('STEPS', 2000), ('FORKS', 20)))
patience = 600 # longest wait in seconds; it is reached only if a process hangs


# ---- child processes; their imports are done only once

begin = """
import json, os, sys, tempfile, threading, time, warnings
import pandas, torch, torchember.ember
from torchember import torchEmber
from torchember.store.jsonl import emberTracker
from torchember.store.log import writer
from torchember.store.log_file import JsonLines
torch.set_num_threads(1)
model,x = torch.nn.Linear(2, 1),torch.ones(1, 2)
with tempfile.TemporaryDirectory() as d, torchEmber(model, home=d) as te: # warm
    model(x).sum().backward()
    te.t.df, te.t.latest_df
del te
model.zero_grad()
"""


class Child:
    "A child process that has imported everything. It runs `code` and ends like a script."
    def __init__(self, code, home, filter='default'):
        self.out,self.err = (Path(f'{home}.{next(number)}.{what}') for what in ('out', 'err'))
        with open(self.out, 'w') as out, open(self.err, 'w') as err:
            self.p = programs.start(f'warnings.simplefilter({filter!r}, UserWarning)\n{code}', after=begin, stdout=out, stderr=err, TORCHEMBER_HOME=home)

    def wait(self): return self.p.wait(patience), self.out.read_text(), self.err.read_text()

    def kill(self):
        self.p.kill()
        return self.wait()

    def until(self, word):
        end = time.time()+patience
        while word not in self.out.read_text():
            assert time.time()<end, self.err.read_text()
            time.sleep(.002)


number = itertools.count()


def logs(home): return sorted(p for p in (Path(home)/'log').iterdir() if not p.name.endswith('_latest') and p.name[0]!='.')
def whole(path): return [json.loads(line) for line in path.read_bytes().splitlines()]


# ---- processes that are killed

trained = """
te = torchEmber(model, name=os.path.basename(os.environ['TORCHEMBER_HOME']))
for i in range(10**9):
    model(x)
    if i%7==0: (te.t.lines, te.t.refresh, te.t.barrier, lambda: te.t.df)[i//7%4](); print(i, flush=True) # after a barrier
    te.mark(i=i)
    if i%50==0: te.t['notes'] = {'i': i, 'long': 'x'*1000}
"""


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    "After SIGKILL, all rows written before a barrier are in the log, every file can be read, and the run can continue."
    draw,barriers = random.Random(0),0
    for k in range(kills):
        c = Child(trained, tmp_path/f'run{k}')
        if k%2: c.until('0')
        time.sleep(draw.uniform(0, .1))
        code,said,err = c.kill()
        assert code==-signal.SIGKILL, err
        after(tmp_path/f'run{k}', f'run{k}', said)
        barriers += bool(said)
    print(f'{kills} kills, {barriers} after a barrier')
    assert barriers>=kills//2 # enough processes got as far as a barrier


def after(home, name, said):
    t = emberTracker(name, home)
    rows = t.lines() if t.log_path.exists() else [] # the process may be killed before anything was recorded
    last = max((int(i) for i in said.split() if i.isdigit()), default=-1)
    assert {r['step'] for r in rows}>=set(range(last+1)), (name, last, len(rows))
    assert t.torn<=1
    for step in range(last): assert sum(r['step']==step for r in rows)==4
    for p in (home/'data').glob('*.json'): json.loads(p.read_text())
    if t.latest.exists(): assert whole(t.latest)
    t + {'again': 1}
    assert t.lines()[-1]=={'again': 1} and len(t.df)==len(rows)+1


# ---- full and broken disks

@pytest.fixture
def small(tmp_path):
    "Mount a disk of 2 MB. Return its folder."
    place = tmp_path/'small'
    place.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=2m', 'tmpfs', place], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(['umount', '-l', place], check=True)


def said_of(record): return [str(w.message) for w in record if issubclass(w.category, EmberWarning)]


def test_full_disk(small, monkeypatch):
    "On a full disk, training continues with one warning. When there is space again, all rows are written."
    model,x = torch.nn.Linear(2, 1),torch.ones(1, 2)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter('always')
        te = torchEmber(model, home=small)
        model(x)
        assert len(te.t.df)==4
        ballast = small/'ballast'
        with open(ballast, 'wb', buffering=0) as f:
            try:
                while True: f.write(bytes(4096))
            except OSError: pass
        for i in range(600):
            model(x)
            if i%100==0: te.t.refresh()
        # reading includes the rows that are still in memory
        assert te.t.file.disk.waiting and len(te.t.lines())==601*4 and len(te.t.df)==601*4
        assert te.t.latest_df.step.max()==600
        ballast.unlink()
        end = time.time()+patience
        # the waiting rows are written without a new row
        while te.t.file.disk.waiting and time.time()<end: time.sleep(.05)
        assert not te.t.file.disk.waiting
        for _ in range(10): model(x)
        te.close()
    [said] = said_of(record)
    assert 'No space left' in said and 'Free some disk space' in said
    assert [r['step'] for r in whole(te.t.log_path)]==[i for i in range(611) for _ in range(4)]
    assert {r['step'] for r in whole(te.t.latest)}=={610}
    assert json.loads((small/'data'/f'vis_{te.fname}.json').read_text())


def test_beyond_the_limit_is_counted(small, monkeypatch):
    "Rows that exceed the memory limit are dropped and counted, and a warning gives their number."
    monkeypatch.setattr(JsonLines, 'keep', 20_000)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter('always')
        t = emberTracker('full', small)
        t + {'i': -1}
        t.barrier()
        with open(small/'ballast', 'wb', buffering=0) as f:
            try:
                while True: f.write(bytes(4096))
            except OSError: pass
        for i in range(100): t + {'i': i, 'text': 'x'*1000}
        t.barrier()
        (small/'ballast').unlink()
        t.barrier()
        t + {'i': 100}
        got = [r['i'] for r in t.lines()]
    first,then = said_of(record)
    lost = 101-(len(got)-1)
    assert 'No space left' in first and f'{lost} rows were lost' in then and lost>50
    assert got==[*range(-1, len(got)-2), 100] and len(whole(t.log_path))==len(got)


def test_a_disk_is_asked_again_without_being_called(tmp_path, monkeypatch):
    "The writer thread tries again by itself, also if the error occurred in a barrier of another thread."
    full,append = [True],log_file.append_lines
    def refuse(*args):
        if full: raise OSError(28, 'No space left on device')
        append(*args)
    monkeypatch.setattr(log_file, 'append_lines', refuse)
    t = emberTracker('a', tmp_path)
    assert store_log.writer.start()
    with monkeypatch.context() as m, pytest.warns(EmberWarning, match='No space left'):
        m.setattr(store_log.writer, 'wake', lambda log: None)
        time.sleep(.1) # wait until the writer thread sleeps
        t + {'i': 1}
        assert t.lines()==[{'i': 1}] and not t.log_path.exists()
    full.clear()
    end = time.time()+patience
    while not t.log_path.exists() and time.time()<end: time.sleep(.01)
    with t.file.disk.lock: pass # wait until the thread has finished its append
    assert whole(t.log_path)==[{'i': 1}]


def test_a_disk_that_takes_a_part(tmp_path):
    "A partly written append is undone, so nothing is written twice. The file size limit of the process simulates a full disk."
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
t = emberTracker('a')
for i in range(30): t + {'i': i, 'text': 'x'*300}; t.barrier()
size = t.log_path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,)*2)
t + {'i': 30}
t.barrier()
print(size)
"""
    code,out,err = Child(code, tmp_path).wait()
    assert code==0 and int(out)<=5000 and err.count('cannot write')==1, err
    assert [r['i'] for r in whole(tmp_path/'log'/'a')]==list(range(31))


without_names = "for k in ('HOME', 'USER', 'LOGNAME', 'LNAME', 'USERNAME', 'TORCHEMBER_HOME'): os.environ.pop(k, None)"
broken_home = "\nfor i in range(30): model(x); te.t.refresh()\nprint('trained', len(te.t.lines()), len(te.t.df))"


@pytest.mark.parametrize('what', ['file', 'file for data', 'readonly', 'unreadable', 'nobody'])
def test_a_home_that_refuses(tmp_path, what):
    "If the home folder cannot be written, one warning explains the solution, and training continues."
    home = tmp_path/'home'
    home.mkdir()
    first = "te = torchEmber(model)"
    if what=='file': (home/'log').write_text('a file in place of the folder')
    elif what=='file for data': (home/'data').write_text('a file in place of the folder')
    elif what=='readonly':
        if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'ro', 'tmpfs', home], capture_output=True).returncode: pytest.skip("needs the right to mount a tmpfs")
    else:
        if os.getuid()==0: first = f"os.setuid({54321 if what=='nobody' else 65534})\n{first}"
        elif what=='nobody': pytest.skip("needs root, to become a user without a name")
        tmp_path.chmod(0o777)
        for p in tmp_path.parents: # the other user needs access to these parent folders
            if p==Path(tempfile.gettempdir()): break
            p.chmod(p.stat().st_mode|0o111)
        home.chmod(0)
    if what=='nobody': first = f"{without_names}\nimport tempfile; tempfile.tempdir = {str(tmp_path)!r}\n{first}"
    code,out,err = Child(first+broken_home, home).wait()
    if what=='readonly': subprocess.run(['umount', '-l', home], check=True)
    home.chmod(0o755)
    assert code==0 and 'trained 120 120' in out, err
    # one warning, and another one about lost rows at the end
    assert err.count('Warning')-('are lost' in err)==1 and 'TORCHEMBER_HOME' in err, err
    assert ('120 rows could not be written' in err)==(what in ('file', 'readonly', 'unreadable')), err
    if what=='file for data': assert len(whole(logs(home)[0]))==120
    if what=='nobody': assert len(whole(logs(tmp_path/'torchember-54321')[0]))==120


@pytest.mark.parametrize('what', ['file', 'file for data', 'unreadable', 'not mine'])
def test_a_chosen_home_that_refuses(tmp_path, what):
    "If a given home= cannot be written, arming raises an error. No folder is created, and the model is unchanged."
    home,first = tmp_path/'home',''
    if what.startswith('file'): home.mkdir(); (home/('data' if 'data' in what else 'log')).touch()
    else:
        if os.getuid()==0: first = "os.setuid(65534)"
        elif what=='not mine': pytest.skip("needs root, to have what is another's")
        for p in tmp_path.parents:
            if p==Path(tempfile.gettempdir()): break
            p.chmod(p.stat().st_mode|0o111)
        tmp_path.chmod(0o755)
        if what=='unreadable': home.mkdir(); home.chmod(0)
    before = sorted(map(str, tmp_path.rglob('*')))
    code = f"""{first}
try: torchEmber(model, home={str(home)!r})
except OSError as e: print(type(e).__name__, e, list(vars(model))==list(vars(torch.nn.Linear(2, 1))))
"""
    code,out,err = Child(code, tmp_path/'env').wait()
    if what=='unreadable': home.chmod(0o755)
    kind = 'NotADirectoryError' if 'file' in what else 'PermissionError'
    assert code==0 and out.startswith(kind) and str(home) in out and 'another home=' in out and out.endswith('True\n'), (out, err)
    assert [p for p in sorted(map(str, tmp_path.rglob('*'))) if 'env' not in p]==before


def test_removed_under_a_live_run(tmp_path):
    "The log file, its folder or the whole home is removed during a run. The log begins again."
    t = emberTracker('a', tmp_path/'home')
    for i,remove in enumerate((lambda: t.log_path.unlink(), lambda: shutil.rmtree(t.log), lambda: shutil.rmtree(t.dir))):
        (t + {'i': i}).barrier()
        remove()
        assert t.lines()==[] and t.df.empty
        t.refresh()
        (t + {'i': i+10}).refresh()
        assert t.lines()==[{'i': i+10}]==t.latest_line_list()


# ---- several threads and processes at the same time

def test_eight_threads(tmp_path):
    "Eight threads write to one log. No row is lost, and no two lines are mixed."
    t = emberTracker('a', tmp_path)
    def write(k):
        for i in range(1500): t + {'k': k, 'i': i, 'text': 'x'*(i%200)}
    ts = [threading.Thread(target=write, args=(k,)) for k in range(8)]
    for th in ts: th.start()
    while any(th.is_alive() for th in ts): assert len(t.df)<=12_000
    rows = t.lines()
    assert not t.torn and len(rows)==12_000==t.file.disk.written_rows
    for k in range(8): assert [r['i'] for r in rows if r['k']==k]==list(range(1500))


def test_rows_that_are_put_while_others_are_taken(tmp_path):
    "New rows are queued while the log empties the queue. No warning is given, and no row is lost."
    log = store_log.Log(tmp_path/'a')
    def made(some): return [list(rows) for rows in some]
    class Rows(list):
        more = 0
        def __len__(self):
            if self.more: self.more -= 1; log.batches.put([{'n': 10+self.more}], True, False, made, ())
            return super().__len__()
    for n in range(3): log.batches.put(rows := Rows([{'n': n}]), True, False, made, ())
    rows.more = 1
    log.drain()
    assert [json.loads(line)['n'] for line in (tmp_path/'a').read_bytes().splitlines()]==[0, 1, 2, 10] and not log.batches


def test_the_same_name_in_two_processes(tmp_path):
    "The second process gets a name with a number, and a message about it."
    wait = "while not os.path.exists(os.environ['TORCHEMBER_HOME']+'/go'): time.sleep(.01)\n"
    code = f"te = torchEmber(model, name='same')\nprint('ready', flush=True)\n{wait}\nfor _ in range(20): model(x)\nte.close()\nprint(te.fname)"
    ps = [Child(code, tmp_path/'home') for _ in range(2)]
    for p in ps: p.until('ready')
    (tmp_path/'home').mkdir()
    (tmp_path/'home'/'go').touch()
    done = [p.wait() for p in ps]
    assert sorted(out.split()[-1] for _,out,_ in done)==['same', 'same_2'] and [len(whole(p)) for p in logs(tmp_path/'home')]==[80, 80]
    assert sum("this run is called 'same_2'" in err for *_,err in done)==1
    assert len(list((tmp_path/'home'/'data').glob('structure_same*.json')))==2


def test_read_while_written(tmp_path):
    "A reader sees only complete rows in order, and never fewer than before."
    p = Child("te = torchEmber(model, name='live')\nprint('go', flush=True)\nfor _ in range(500): model(x); time.sleep(.002)\nte.close()", tmp_path)
    p.until('go')
    while not (tmp_path/'log'/'live').exists() or not (tmp_path/'log'/'live').stat().st_size: time.sleep(.01)
    t,last,end = emberTracker('live', tmp_path),0,time.time()+patience
    while last<4*500:
        assert time.time()<end, last
        rows = t.lines()
        assert len(rows)>=last and all(len(r)>=11 for r in rows) and [r['step'] for r in rows]==sorted(r['step'] for r in rows)
        last = len(rows)
        df = t.df
        assert len(df)>=last and df.step.is_monotonic_increasing and df['mean'].notna().all()
        assert t.latest_df.empty or t.latest_df.step.nunique()==1
    assert p.wait()[0]==0


def test_lines_that_are_not_whole(tmp_path):
    "Broken lines (cut, not UTF-8, nested too deeply, or with a too long number) are skipped and counted."
    t = emberTracker('a', tmp_path)
    (t + {'a': 1}).barrier()
    junk = [b'{"a": 2, "b', b'\xff\xfe{"a": 3}', b'{"a": "\xc3"}', b'\x00'*50, b'['*10_000]
    junk += [b'{"a": %b}' % (b'1'*5000), b'{"a": "\\ud800"}', b'[]', b'"a"', b'{"a": 1}{"a": 2}']
    with open(t.log_path, 'ab') as f: f.write(b'\n'.join(junk))
    t + {'a': 4}
    lines = t.lines()
    assert lines[0]=={'a': 1} and lines[-1]=={'a': 4}
    # orjson accepts a number of 5000 digits, so one line less may be broken
    assert t.torn in (len(junk), len(junk)-1) and len(lines)==2+len(junk)-t.torn
    assert t.df.a.tolist()[0]==1 and len(t.df)==len(lines)


# ---- forked processes

def test_workers_of_a_data_loader(tmp_path):
    "Forked workers of a data loader with an armed model neither hang nor write rows."
    code = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, i): return model(x.clone()).detach()
te = torchEmber(model, name='a')
for epoch in range(3):
    for batch in torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context='fork'): model(x)
te.close()
print(sorted(set(os.listdir(te.t.log))))
"""
    code,out,err = Child(code, tmp_path).wait()
    assert code==0 and out.strip()=="['a', 'a_latest']", err
    assert [r['step'] for r in whole(tmp_path/'log'/'a')]==[i for i in range(96) for _ in range(4)]


@pytest.mark.release
def test_forks_while_rows_are_written(tmp_path):
    "A fork may happen while the writer thread holds its locks. The children can end, read, and record their own runs."
    code = """
te = torchEmber(model, name='a')
stop = []
def busy():
    while not stop: te.t + {'busy': 1}
threading.Thread(target=busy).start()
children = []
for i in range(forks):
    model(x)
    pid = os.fork()
    if not pid:
        model(x); te.t.lines(); te.t + {'child': i}
        other = emberTracker(f'child{i}')
        other + {'i': i}
        late = time.time()+patience
        while not other.log_path.exists() and time.time()<late: time.sleep(.01) # it has a thread of its own
        if not other.log_path.exists(): os._exit(1)
        if i%10==0:
            with torchEmber(torch.nn.Linear(2, 1), name=f'model{i}') as mine: mine.model(x)
        sys.exit(0) if i%2 else os._exit(0 if other.lines()==[{'i': i}] else 1)
    children.append(pid)
stop.append(1)
end = time.time()+patience
codes = []
for pid in children:
    while (got := os.waitpid(pid, os.WNOHANG))==(0, 0) and time.time()<end: time.sleep(.01)
    codes.append(got[1])
print(any(codes), 'late' if time.time()>end else 'fine')
if time.time()>end: [os.kill(pid, 9) for pid in children]
te.close()
"""
    code,out,err = Child(f'forks,patience = {forks},{patience}\n{code}', tmp_path).wait()
    assert code==0 and out.strip()=='False fine', err
    rows = whole(tmp_path/'log'/'a')
    assert sum('module' in r for r in rows)==forks*4 and not any('child' in r for r in rows)
    assert [whole(tmp_path/'log'/f'child{i}') for i in range(forks)]==[[{'i': i}] for i in range(forks)]
    assert all(len(whole(tmp_path/'log'/f'model{i}'))==4 for i in range(0, forks, 10))
    assert 'cannot add rows' in err


# ---- the end of a process

ends = {
    'normal': '', 'exception': '1/0', 'exit': 'sys.exit(3)', 'dropped': 'del te, model',
    'exit in a thread': 'th = threading.Thread(target=lambda: (model(x), sys.exit(1))); th.start(); th.join()',
    'exception in a thread': 'th = threading.Thread(target=lambda: (model(x), 1/0)); th.start(); th.join()',
    'thread that goes on': 'threading.Thread(target=lambda: (time.sleep(.3), model(x))).start()',
    'step is open': 'te.t.df; te.step(); model(x)', # te.t.df reads three passes as steps, so te.step() does not join them
}


@pytest.mark.parametrize('filter', ['default', 'error'])
def test_ends(tmp_path, filter):
    "Whenever a process ends without being killed, all its rows are in the log."
    ps = {end: Child('te = torchEmber(model)\nfor _ in range(3): model(x)\n'+code, tmp_path/end, filter=filter) for end,code in ends.items()}
    for end,p in ps.items():
        code,_,err = p.wait()
        assert code=={'exception': 1, 'exit': 3}.get(end, 0), (end, err)
        passes = 3+(end in ('exit in a thread', 'exception in a thread', 'thread that goes on', 'step is open'))
        [log] = logs(tmp_path/end)
        said = [r for r in whole(log) if r['ttype']=='finding'] # the finding about the exception that ended the process
        assert len(said)==(end=='exception') and len(whole(log))==4*passes+len(said), end
        assert {r['step'] for r in whole(log.with_name(log.name+'_latest'))}=={passes-1}, end


def test_one_log_that_fails_does_not_take_others_along(tmp_path):
    "At exit with warnings as errors, every log is written, also after another log failed."
    code = """
writer.wake = lambda log: None # what is queued stays so until exit
def new(name, broken):
    t = emberTracker(name, home=os.environ['TORCHEMBER_HOME'] + ('/bad' if broken else ''))
    return t + {'i': 1}
os.makedirs(os.environ['TORCHEMBER_HOME']+'/bad')
open(os.environ['TORCHEMBER_HOME']+'/bad/log', 'w').close()
ts = [new(f'{i:02}', i%2) for i in range(20)]
"""
    code,_,err = Child(code, tmp_path, filter='error').wait()
    assert code==0 and err.count('cannot write')==10
    assert [whole(p) for p in logs(tmp_path)]==[[{'i': 1}]]*10


def test_a_thread_that_cannot_be_started(tmp_path):
    "If no thread can be started (as at exit since Python 3.12), the thread that adds a row writes it."
    code = """
threading.Thread.start = lambda self: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
t = emberTracker('a')
import atexit
torchember.store.log.atexit.unregister(torchember.store.log.at_exit)
t + {'i': 1}
os._exit(0)
"""
    code,_,err = Child(code, tmp_path).wait()
    assert code==0 and whole(tmp_path/'log'/'a')==[{'i': 1}], err


# ---- memory of long runs

@pytest.mark.parametrize('disk', ['takes', 'refuses'])
def test_no_growth(tmp_path, disk):
    "Memory, threads and file descriptors are the same after thousands of steps as after hundreds."
    code = """
import psutil
JsonLines.keep = 300_000
me = psutil.Process()
def use(): return me.memory_info().rss, me.num_threads(), me.num_fds()
te = torchEmber(model)
for i in range(steps):
    if i==max(steps//4, 500): te.t.barrier(); begin = use()
    model(x).sum().backward()
te.t.barrier()
print([b-a for a,b in zip(begin, use())], len(te.t.file.step), len(te.t.file.batches), flush=True) # `os._exit` flushes nothing
os._exit(0)
"""
    if disk=='refuses': (tmp_path/'log').write_text('a file')
    code,out,err = Child(f'steps = {steps}\n{code}', tmp_path).wait()
    assert code==0, err
    rss,threads,fds = json.loads(out[:out.index(']')+1])
    print(disk, steps, out)
    assert rss<3_000_000 and threads<=0 and fds<=0, out


def test_rows_without_steps_do_not_pile_up(tmp_path):
    "`t + row` never ends a step. The log keeps only the last rows in memory, and writes each row once."
    t = emberTracker('a', tmp_path)
    t.file.step.most = 50_000
    for i in range(20_000): t + {'i': i, 'text': 'x'*50}
    t.barrier()
    assert t.file.step.size<=50_000 and len(t.lines())==20_000
    latest = whole(t.latest)
    assert latest==t.lines()[-len(latest):] and len(latest)>300


# ---- names of runs and folders

@pytest.mark.parametrize('name', ['x'*300, 'a/b\\c', '../../up', 'größe', '模型'*100, 'half \ud800 pair', '.hidden', '', 'a\nb\0c', 'con:*?"<>|', '-rf', ' '])
def test_class_names(tmp_path, name):
    "For any class name of a model, its run is one file in the log folder."
    cls = type('Net', (torch.nn.Linear,), {})
    try: cls.__name__ = name
    except (ValueError, UnicodeEncodeError): return # Python itself rejects some class names
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with torchEmber(cls(2, 1)) as te: te.model(torch.ones(1, 2))
    [log] = logs(te.t.dir)
    assert log==te.t.log_path and len(te.t.df)==4 and len(te.t.latest_df)==4
    for p in te.t.data.iterdir(): json.loads(p.read_bytes())
    assert len(list(te.t.data.iterdir()))==4


def test_a_run_name_as_long_as_can_be(tmp_path):
    with torchEmber(torch.nn.Linear(2, 1), name='x'*200, home=tmp_path) as te: te.model(torch.ones(1, 2))
    assert len(te.t.lines())==4 and te.t[f'vis_{"x"*200}']=={'vis_type': 'standard'} and len(list((tmp_path/'data').iterdir()))==4
    with pytest.raises(ValueError, match='longer than 200 bytes'): new_run('Net', name='é'*101, home=tmp_path)


def test_no_home_no_user(tmp_path, monkeypatch):
    for k in ('HOME', 'USER', 'LOGNAME', 'LNAME', 'USERNAME', 'TORCHEMBER_HOME'): monkeypatch.delenv(k, raising=False)
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    import pwd
    def nobody(*args): raise KeyError('uid not found')
    monkeypatch.setattr(pwd, 'getpwuid', nobody)
    base.home_fallback.cache_clear()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter('always')
        for _ in range(3): assert base.folder('torchember').name.startswith('torchember-')
    assert base.user()=='unknown' and len(record)==1 and 'TORCHEMBER_HOME' in str(record[0].message)


def test_a_relative_home(tmp_path, monkeypatch):
    "A relative home is resolved when the run begins, and stays the same if the working directory changes."
    (tmp_path/'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('TORCHEMBER_HOME', 'logs')
    te = torchEmber(torch.nn.Linear(2, 1))
    monkeypatch.chdir(tmp_path/'elsewhere')
    te.model(torch.ones(1, 2))
    assert len(te.t.df)==4
    te.close()
    assert len(whole(logs(tmp_path/'logs')[0]))==4 and not list((tmp_path/'elsewhere').iterdir())
