"A program that is forked from a prepared process behaves like a program in a new Python process."
import json
import os
import subprocess
import time
from pathlib import Path

import programs
import pytest

pytestmark = pytest.mark.skipif(not programs.forks(programs.variables), reason='nothing can be forked here')
looks = '''
import atexit, gc, json, os, random, signal, sys, threading, time, warnings
was_there = [m for m in sys.modules if m.split('.')[0] in ('torchember', 'numba', 'pandas', 'jax', 'matplotlib')]
import numpy as np, torch
atexit.register(print, 'at exit')
print(json.dumps(dict(was_there=was_there, argv=sys.argv, path=sys.path, main=[vars(sys.modules['__main__']) is globals(), __name__, globals().get('__file__')],
    names=sorted({*globals()}-{'__annotations__', '__cached__'}), cwd=os.getcwd(), env={**os.environ}, stdin=sys.stdin.read(),
    tty=[f.isatty() for f in (sys.stdin, sys.stdout, sys.stderr)], threads=threading.active_count(), tasks=len(os.listdir('/proc/self/task')),
    files=[f for f in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{f}')], signals=[str(signal.getsignal(s)) for s in range(1, 32)],
    filters=[str(f) for f in warnings.filters], options=sys.warnoptions,
    flags=str(sys.flags), gc=[gc.isenabled(), *gc.get_threshold()], hook=sys.excepthook is sys.__excepthook__,
    torch=torch.get_num_threads(),
    recursion=sys.getrecursionlimit(), umask=os.umask(0))))
print(random.random(), np.random.rand(), torch.rand(1).item(), file=sys.stderr)
threading.Thread(target=lambda: (time.sleep(.1), print('a thread'))).start()
sys.exit(3)
'''


def by_itself(monkeypatch): monkeypatch.setattr(programs, 'forks', lambda env: False)


@pytest.mark.slow
@pytest.mark.parametrize('script', [False, True])
def test_a_forked_program_is_like_a_new_python(script, tmp_path, monkeypatch):
    "Environment, seeded random numbers and end are the same. Unseeded random numbers differ."
    (tmp_path/'program.py').write_text(looks)
    def run():
        p = programs.run(tmp_path/'program.py' if script else looks, 'a', 'b c', input='typed', cwd=tmp_path, ONE='1', HOME=None, PYTHONPATH=str(tmp_path),
            PYTHONWARNINGS='error::ResourceWarning')
        said,*more = p.stdout.splitlines()
        return json.loads(said),more,p.returncode,p.stderr.split()
    forked,again = run(),run()
    by_itself(monkeypatch)
    started = run()
    for k in started[0]|forked[0]: assert forked[0][k]==started[0][k], k
    assert forked[:3]==again[:3]==started[:3] and started[1:3]==(['a thread', 'at exit'], 3)
    assert all(len({*drawn})==3 for drawn in zip(forked[3], again[3], started[3], strict=True))


ends = {'raise ValueError("it")': 1, 'raise SystemExit("it")': 1, '': 0, 'import os; os._exit(4)': 4, 'import os; os.kill(os.getpid(), 9)': -9,
    'raise KeyboardInterrupt': -2, 'it is none': 1}


@pytest.mark.parametrize('code', ends)
def test_output_and_exit_status_are_the_same(code, monkeypatch):
    "Output and exit status are compared for each way to end a program."
    forked = programs.run(code)
    by_itself(monkeypatch)
    started = programs.run(code)
    assert forked.returncode==started.returncode==ends[code] and forked.stdout==started.stdout
    assert forked.stderr.splitlines()[-1:]==started.stderr.splitlines()[-1:]


def test_two_programs_run_at_once():
    "Two programs run at the same time. Each can be polled, killed, and waited for twice."
    code = 'print("there", flush=True); input(); print("over")'
    with programs.start(code, stdin=subprocess.PIPE) as a, programs.start(code, stdin=subprocess.PIPE) as b:
        assert a.stdout.readline()=='there\n' and a.poll() is None is b.poll()
        a.kill()
        assert a.wait(60)==a.wait()==a.poll()==-9 and b.poll() is None
        assert b.communicate('\n', 60)==('there\nover\n', '') and b.returncode==0


def test_a_program_over_its_time_is_killed_with_its_children(tmp_path):
    code = f"import os, time; open({str(tmp_path/'pid')!r}, 'w').write(str(os.fork() or os.getpid())); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired): programs.run(code, timeout=2)
    pid,end = int((tmp_path/'pid').read_text()),time.time()+60
    while Path(f'/proc/{pid}/stat').exists() and Path(f'/proc/{pid}/stat').read_text().split()[2]!='Z': assert time.time()<end


@pytest.mark.release
def test_common_code_runs_once():
    "The code in `after` runs once. Each program has its own copies of the names, and functions see names defined later."
    after = 'import os, torch\nbegun,more = os.getpid(),[]\ndef said(): return begun!=os.getpid(), more, later'
    drawn = set()
    for _ in range(2):
        *said,n = programs.run('later = 1; more.append(2); print(*said(), torch.rand(1).item())', after=after).stdout.split()
        assert said==['True', '[2]', '1']
        drawn.add(n)
    assert len(drawn)==2
    seeded = [programs.run('print(torch.rand(1).item())', after='import torch; torch.manual_seed(1); torch.rand(1)').stdout for _ in range(2)]
    assert seeded[0]==seeded[1]


@pytest.mark.release
def test_variables_that_torch_reads_start_a_new_python(monkeypatch):
    "An environment variable that torch reads at its start needs a new Python process. Other variables do not."
    monkeypatch.setenv('KMP_INIT_AT_FORK', 'FALSE')
    code = 'import torch; print(torch.get_num_threads())'
    n = 3-int(os.environ.get('OMP_NUM_THREADS', 1))%2
    assert programs.run(code, OMP_NUM_THREADS=n).stdout.split()==[str(n)]
    assert type(programs.start('')) is programs.Forked is not type(programs.start('', PYTHONHASHSEED=0))
