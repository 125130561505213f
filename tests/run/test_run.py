"A program under `torchember run` behaves as under Python, and its rows equal those of a program that arms its model itself"
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import programs
import pytest
import torch
from looped import batches, by_hand, heard, momentum, same, seeded, steps, table

from torchember import emberTracker, read, runs, torchEmber
from torchember.run import options_in, user_part_of_traceback, run_command, split_arguments

root = Path(__file__).parents[2]
libraries = 'import torch._dynamo, torchember.ember, torchember.trained\nfrom torchember.measure import loading\nloading.loops()'
# Code of the command, for a forked process that need not import torch again
by_fork = 'import sys; from torchember.cli import main; sys.exit(main())'
begun = '''
import sys
sys.path.insert(0, TESTS)
import torch
from looped import *
model = seeded()
opt = momentum(model)
'''.replace('TESTS', repr(str(root/'tests')))


class Ran:
    "A finished run in the form that the functions of `looped` expect"
    def __init__(self, name): self.t = emberTracker(name)


def started(text, *args, options=('--name', 'it'), folder=None, **kwargs):
    "Start a program under `torchember run`. Return its process"
    file = Path(folder)/'train.py'
    file.write_text(textwrap.dedent(text))
    return programs.start(by_fork, 'run', *options, str(file), *args, after=libraries, PYTHONPATH=root, cwd=folder, **kwargs)


def run(text, *args, folder, **kwargs):
    with started(text, *args, folder=folder, **kwargs) as p: out,err = p.communicate(timeout=300)
    return subprocess.CompletedProcess(p.args, p.returncode, out, err)


def plain(text, *args, folder, **kwargs):
    "Run a program without torchember"
    (Path(folder)/'train.py').write_text(textwrap.dedent(text))
    return programs.run(Path(folder)/'train.py', *args, after=libraries, PYTHONPATH=root, cwd=folder, **kwargs)


def said(done): return [line.removeprefix('torchember: ') for line in done.stderr.splitlines() if line.startswith('torchember: ')]


def python(*argv, folder):
    "Run Python in a new process, not by a fork"
    return subprocess.run([sys.executable, *map(str, argv)], capture_output=True, text=True, cwd=folder, env={**os.environ, 'PYTHONPATH': str(root)})


def theirs(done):
    "Return the lines that the program wrote to stderr, without lines of torchember and of the test server `programs`"
    lines = [line for line in done.stderr.splitlines() if not line.startswith('torchember: ')]
    at = [i for i,line in enumerate(lines) if 'programs.py' in line]
    return [line for i,line in enumerate(lines) if i not in (*at, *(i+1 for i in at))]


loop = begun+'''
by_hand(model, opt, batches())
torch.save(model.state_dict(), sys.argv[1])
print('over', *sys.argv[1:])
'''


def test_rows_equal_those_of_an_armed_loop(tmp_path):
    "Rows begin with the forward pass of the first step. Weights equal those without torchember, bit for bit"
    done = run(loop, 'with.pt', '--every', '3', folder=tmp_path)
    assert (done.returncode, done.stdout)==(0, 'over with.pt --every 3\n'), done.stderr
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, opt) as te: by_hand(model, opt, batches())
    same(table(Ran('it')), table(te))
    assert steps(Ran('it'))==[0, 1, 2, 3]
    without = plain(loop, 'without.pt', folder=tmp_path)
    assert without.stdout=='over without.pt\n' and without.stderr==''
    a,b = (torch.load(tmp_path/n) for n in ('with.pt', 'without.pt'))
    assert a.keys()==b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    first,last = said(done)
    assert first=='records Net, 4 modules, trained by SGD, as the run it.' and last.startswith('it: 4 of 4 steps recorded')
    assert done.stderr.count('\n')==2


def test_options_are_arguments_of_torchEmber(tmp_path):
    asked = {'--every': 'linear(2, 1)', '--ttypes': 'weight,update', '--include': 'a,b', '--stats': 'rms', '--home': tmp_path/'home', '--store': 'parquet',
        '--sinks': 'tensorboard'}
    run(loop, 'w', options=['--name=it', *(str(w) for pair in asked.items() for w in pair)], folder=tmp_path)
    df = read('it', home=tmp_path/'home')
    rates,tensors = df[df.ttype=='scalar'],df[df.ttype!='scalar']
    assert {*tensors.step}=={1, 3} and {*tensors.ttype}=={'weight', 'update'} and {*tensors.path}=={'a', 'b'} and 'rms' in df and 'mean' not in df
    # Gradient norms need weight_grad, so the learning rate is the only scalar
    assert rates[['step', 'tname', 'path']].values.tolist()==[[1, 'lr', '']]
    assert [*(tmp_path/'home'/'log').glob('it*')] and [*(tmp_path/'runs'/'it').iterdir()] and not len(runs())


looks = '''
import sys, os, json, pickle
class Own: pass
if __name__=='__main__':
    main = sys.modules['__main__']
    names = ['__file__', '__name__', '__package__', '__cached__', '__doc__']
    print(json.dumps(dict(argv=sys.argv, path=sys.path[0], here=vars(main) is globals(), own=pickle.loads(pickle.dumps(Own())).__class__ is Own,
        spec=str(__spec__ and __spec__.name), loader=type(__loader__).__name__, builtins=str(__builtins__)[:20],
        line=sys._getframe().f_code.co_filename, **{n: globals()[n] for n in names})))
'''


@pytest.mark.parametrize('how', ['script', 'module', 'package'])
@pytest.mark.parametrize('by', ['python -m', 'command'])
def test_program_has_the_environment_of_python(how, by, tmp_path):
    "A script by a link, a module and a package see the same environment as under Python; each runs in a new Python process"
    (tmp_path/'sub').mkdir()
    (tmp_path/'sub'/'train.py').write_text(looks)
    (tmp_path/'link.py').symlink_to(tmp_path/'sub'/'train.py')
    (tmp_path/'pack').mkdir()
    (tmp_path/'pack'/'__main__.py').write_text(looks)
    program = {'script': ['link.py'], 'module': ['-m', 'sub.train'], 'package': ['-m', 'pack']}[how]
    def go(*argv): return python(*argv[1:], *program, 'a', '--', '-m', folder=tmp_path)
    (tmp_path/'bin').mkdir()
    (tmp_path/'bin'/'torchember').write_text('import sys; from torchember.cli import main; sys.exit(main())')
    start = [sys.executable, '-m', 'torchember'] if by=='python -m' else [sys.executable, tmp_path/'bin'/'torchember']
    got,want = go(*start, 'run'),go(sys.executable)
    assert json.loads(got.stdout)==json.loads(want.stdout)
    assert want.returncode==got.returncode==0 and said(got)==['nothing was recorded: the program has not imported torch.']


# After KeyboardInterrupt, Python ends by SIGINT. Code that torch's compiler runs at exit changes this to exit code 1
ends = {'sys.exit(3)': 3, "sys.exit('why')": 1, "raise ValueError('it')": 1, 'raise KeyboardInterrupt': 1, 'os._exit(4)': 4,
    'os.kill(os.getpid(), signal.SIGTERM)': -signal.SIGTERM, 'os.kill(os.getpid(), signal.SIGINT)': 1}


@pytest.mark.parametrize('last', ends)
def test_program_ends_as_under_python(last, tmp_path):
    "Exit code, output and traceback equal those under Python, and the run contains all steps"
    code = begun+f'''
import os, signal
def fails(): {last}
by_hand(model, opt, batches())
print('trained', flush=True)
fails()
'''
    got,want = run(code, folder=tmp_path),plain(code, folder=tmp_path)
    assert got.returncode==want.returncode==ends[last], got.stderr
    assert got.stdout==want.stdout=='trained\n'
    assert theirs(got)==theirs(want)
    assert {*read('it').step.dropna()}>={0, 1, 2, 3}
    silent = 'os._exit' in last or 'SIGTERM' in last
    assert len(said(got))==(1 if silent else 2) # A process that is not killed also reports how much was recorded


def test_ctrl_c_without_torch(tmp_path):
    (tmp_path/'train.py').write_text('raise KeyboardInterrupt')
    got,want = python('-m', 'torchember', 'run', 'train.py', folder=tmp_path),python('train.py', folder=tmp_path)
    assert got.returncode==want.returncode==-signal.SIGINT and theirs(got)==theirs(want)


def test_run_has_the_exception_that_ended_it(tmp_path):
    run(begun+"by_hand(model, opt, batches())\nraise ValueError('the end')", folder=tmp_path)
    rows = [r for r in emberTracker('it').lines() if 'the end' in str(r)]
    assert len(rows)==1, rows
    run(begun+"by_hand(model, opt, batches())\nsys.exit(3)", folder=tmp_path, options=('--name', 'other'))
    assert not [r for r in emberTracker('other').lines() if r.get('ttype')=='death' or 'SystemExit' in str(r)]


def test_syntax_error_is_shown_as_by_python(tmp_path):
    got,want = run('import torch\nif', folder=tmp_path),plain('import torch\nif', folder=tmp_path)
    assert got.returncode==want.returncode==1
    assert theirs(got)==theirs(want)[-len(theirs(got)):] and theirs(got)[0].endswith('train.py", line 2') and len(theirs(got))==4


def test_signals_during_training(tmp_path):
    "The program keeps its own signal handlers during the training"
    code = begun+'''
import signal, time
def over(n, frame): print('told'); sys.exit(5)
print(signal.getsignal(signal.SIGTERM)==signal.SIG_DFL, signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
signal.signal(signal.SIGTERM, over)
for i in range(10**6):
    by_hand(model, opt, batches(1))
    if i==3: print('trains', flush=True)
    time.sleep(.01)
'''
    with started(code, folder=tmp_path) as p:
        assert p.stdout.readline()=='True True\n' and p.stdout.readline()=='trains\n'
        p.send_signal(signal.SIGTERM)
        out,err = p.communicate(timeout=60)
    assert (p.returncode, out)==(5, 'told\n') and 'steps recorded' in err
    assert read('it').step.max()>=3


def test_killed_program_keeps_its_rows(tmp_path):
    code = begun+"by_hand(model, opt, batches())\nprint('trained', flush=True)\nimport time; time.sleep(600)"
    with started(code, folder=tmp_path) as p:
        assert p.stdout.readline()=='trained\n'
        p.kill()
        p.communicate(timeout=60)
    assert {*read('it').step}>={0, 1, 2, 3}


nones = {'print(1)': 'no torch optimizer', # torch is imported already
    'import torch\nm = torch.nn.Linear(2, 2)\nm(torch.ones(1, 2)).sum().backward()': 'no torch optimizer',
    'import torch\nm = torch.nn.Linear(2, 2)\no = torch.optim.SGD(m.parameters())\nwith torch.no_grad(): m(torch.ones(1, 2))':
        'no optimizer stepped',
    'import torch\nw = torch.nn.Parameter(torch.ones(2))\no = torch.optim.SGD([w])\nw.sum().backward()\no.step()': 'belong to no module',
    '''
class Own:
    def __init__(self, ps): self.ps = [*ps]
    def step(self):
        for p in self.ps: p.data -= p.grad
import torch
m = torch.nn.Linear(2, 2)
o = Own(m.parameters())
m(torch.ones(1, 2)).sum().backward()
o.step()''': 'torchEmber(model)'}


@pytest.mark.parametrize('code', nones)
def test_message_says_why_nothing_was_recorded(code, tmp_path):
    done = run(code, folder=tmp_path)
    assert done.returncode==0 and len(said(done))==1 and nones[code] in said(done)[0], done.stderr
    assert not len(runs())


def test_invalid_arguments_are_refused(tmp_path, monkeypatch, capsys):
    (tmp_path/'train.py').write_text("print('runs')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    def go(*args):
        try: code = run_command([*args])
        except SystemExit as e: code = e.code
        out,err = capsys.readouterr()
        assert out=='' or '-h' in args, out
        return code,err
    for args,word in {('--every', '0', 'train.py'): 'n>=1', ('--every', 'x', 'train.py'): 'schedule', ('--ttypes', 'weigth', 'train.py'): "'weight'",
        ('--stats', 'rmx', 'train.py'): 'rmx', ('--overhead', '2', 'train.py'): '.02', ('--rules', 'none', 'train.py'): 'none',
        ('--evry', '1', 'train.py'): 'evry',
        (): 'the program to run is missing', ('-m',): 'the program to run is missing',
        ('--store', 'x', 'train.py'): 'parquet', ('nowhere.py',): 'nowhere.py', ('-m', 'no.where'): 'no',
        ('--name',): 'name'}.items():
        code,err = go(*args)
        assert code==2 and word in err and 'Traceback' not in err, (args, err)
    assert go('-h')[0]==0


def test_options():
    assert options_in([])=={} and options_in(['--stats', 'rms,max'])=={'stats': ['rms', 'max']}
    assert options_in(['--rules', 'default', '--every', '3'])=={'rules': ['default'], 'every': 3}
    assert split_arguments(['--', 'a', '--', 'b'])==([], False, ['a', '--', 'b'])
    assert split_arguments(['--every', '3', '--', 'a'])==(['--every', '3'], False, ['a'])
    assert split_arguments(['a', '--', 'b'])==([], False, ['a', '--', 'b'])
    assert split_arguments(['--home=x', '--name', 'n', '-m', 'm', '-m'])==(['--home=x', '--name', 'n'], True, ['m', '-m'])
    assert split_arguments(['--help'])==(['-h'], False, []) and split_arguments([])==([], False, [])


def test_own_part_of_a_traceback():
    def f(): raise ValueError
    try: f()
    except ValueError as e: tb = e.__traceback__
    assert user_part_of_traceback(tb, __file__) is tb and user_part_of_traceback(tb, 'other') is None


@pytest.mark.slow
@pytest.mark.release # This test starts a new Python that imports torch; tests below cover forks
def test_spawn_and_fork(tmp_path):
    "Child processes can import the script, and they are not recorded"
    code = begun.replace('model =', "if __name__=='__main__': print('main')\nmodel =")+'''
import torch.multiprocessing as mp
def work(i): by_hand(model, opt, batches(2)); print('worked', __name__, flush=True)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((4,), float(i)), i%3
if __name__=='__main__':
    mp.spawn(work, nprocs=1)
    p = mp.get_context('fork').Process(target=work, args=(1,)); p.start(); p.join()
    by_hand(model, opt, torch.utils.data.DataLoader(Data(), 4, num_workers=1))
'''
    done = run(code, folder=tmp_path)
    assert done.returncode==0, done.stderr
    assert done.stdout.split('\n')[:-1]==['main', 'worked __mp_main__', 'worked __main__']
    assert steps(Ran('it'))==[0, 1] and list(runs().name)==['it'] and len(said(done))==2


def test_forked_process_prints_nothing(tmp_path):
    (tmp_path/'train.py').write_text("import os\nchild = os.fork()\nif child: os.waitpid(child, 0)\nprint('over', flush=True)")
    done = python('-m', 'torchember', 'run', 'train.py', folder=tmp_path)
    assert (done.returncode, done.stdout, len(said(done)))==(0, 'over\nover\n', 1), done.stderr


def test_torch_is_not_imported_before_the_program(tmp_path):
    "The program starts without torch, so it can still set environment variables that torch reads at import"
    (tmp_path/'train.py').write_text("import sys\nwas = 'torch' in sys.modules, 'numpy' in sys.modules\n"+loop+'print(was)')
    done = python('-m', 'torchember', 'run', '--name', 'it', 'train.py', 'w', folder=tmp_path)
    assert done.stdout.endswith('(False, False)\n') and steps(Ran('it'))==[0, 1, 2, 3], done.stderr


of_two = begun+'''
torch.distributed.init_process_group('gloo')
ddp = torch.nn.parallel.DistributedDataParallel(model)
by_hand(ddp, opt, batches())
torch.distributed.destroy_process_group()
'''


def two_processes_are_one_run():
    with heard('same batch'): df = read('it')
    assert {*df.step}=={0, 1, 2, 3} and {*emberTracker('it.rank1').df.step}=={0, 1, 2, 3} and {*df.path}=={'', 'a', 'act', 'b'}


def test_two_processes(tmp_path):
    "Two ranks are one run with rows of both, and only rank 0 prints messages"
    with socket.create_server(('localhost', 0)) as s: port = s.getsockname()[1]
    env = dict(WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_ADDR='localhost', MASTER_PORT=port)
    ranks = [started(of_two, folder=tmp_path, RANK=r, LOCAL_RANK=r, **env) for r in range(2)]
    errors = [p.communicate(timeout=300)[1] for p in ranks]
    assert [p.returncode for p in ranks]==[0, 0], errors
    assert [e.count('torchember: ') for e in errors]==[2, 0], errors
    two_processes_are_one_run()


@pytest.mark.slow
# Starts three Pythons that import torch; `test_two_processes` tests the environment variables
@pytest.mark.release
def test_two_processes_by_torchrun(tmp_path):
    (tmp_path/'train.py').write_text(of_two)
    done = python('-m', 'torch.distributed.run', '--nproc_per_node', 2, '--rdzv_backend', 'c10d', '--rdzv_endpoint', 'localhost:0',
        '-m', 'torchember', 'run', '--name', 'it', 'train.py', folder=tmp_path)
    assert done.returncode==0, done.stderr
    assert len(said(done))==2, done.stderr
    two_processes_are_one_run()


@pytest.mark.slow
@pytest.mark.release # Starts two Pythons that import torch, and the launcher rarely changes
def test_accelerate_launch(tmp_path):
    pytest.importorskip('accelerate')
    (tmp_path/'train.py').write_text(begun+'''
from accelerate import Accelerator
acc = Accelerator(cpu=True)
model,opt = acc.prepare(model, opt)
for x,y in batches(): acc.backward(loss_of(model, x, y)); opt.step(); opt.zero_grad()
''')
    done = python('-m', 'accelerate.commands.launch', '--cpu', '--num_processes', 1, '--num_machines', 1, '--mixed_precision', 'no', '--dynamo_backend', 'no',
        '-m', 'torchember', 'run', '--name', 'it', 'train.py', folder=tmp_path)
    assert done.returncode==0, done.stderr
    model = seeded()
    with torchEmber(model, opt := momentum(model)) as te: by_hand(model, opt, batches())
    same(table(Ran('it')), table(te))


def test_thread_can_train_after_the_last_line(tmp_path):
    code = begun+"import threading, time\ndef f(): time.sleep(.5); by_hand(model, opt, batches())\nthreading.Thread(target=f).start()"
    done = run(code, folder=tmp_path)
    assert done.returncode==0 and steps(Ran('it'))==[0, 1, 2, 3] and 'it: 4 of 4 steps' in said(done)[-1], done.stderr


def test_program_without_torch_starts_fast(tmp_path):
    (tmp_path/'train.py').write_text("import sys; print([m for m in ('torch', 'pandas', 'numba', 'matplotlib') if m in sys.modules])")
    done = python('-m', 'torchember', 'run', 'train.py', folder=tmp_path)
    assert done.stdout=='[]\n'


hf = begun+'''
import transformers, sys
sys.path.insert(0, sys.argv[1])
from test_transformers_callback import callback, plain, trainer_for, Scored
print(type(trainer_for('.', callback(name='theirs') if 'ours' in sys.argv else None).train()).__name__)
'''


# test_trained.py also tests models that the program itself has armed
only_before_a_release = pytest.param(True, marks=pytest.mark.release)

@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize('theirs', [False, only_before_a_release])
def test_a_script_with_transformers(theirs, tmp_path):
    "Rows equal those of `EmberCallback`. If the program itself uses `EmberCallback`, nothing is recorded twice"
    pytest.importorskip('transformers')
    done = run(hf, root/'tests'/'integrations', *['ours']*theirs, folder=tmp_path)
    assert done.returncode==0, done.stderr
    assert list(runs().name)==['theirs' if theirs else 'it']
    if theirs: assert said(done)==['Scored is not recorded again, because the program itself records it as the run theirs.'], done.stderr
    sys.path.insert(0, str(root/'tests'/'integrations'))
    try: from test_transformers_callback import plain as loop
    finally: del sys.path[0]
    got = {k: r for k,r in table(Ran('theirs' if theirs else 'it')).items() if k[2]!='scalar'}
    same(got, loop(batches()))


light = begun+'''
sys.path.insert(0, sys.argv[1])
from test_lightning_callback import callback, fit
fit('.', callback(name='theirs') if 'ours' in sys.argv else None)
'''


@pytest.mark.slow
@pytest.mark.release # Covered by the test with transformers
@pytest.mark.parametrize('theirs', [False, only_before_a_release])
def test_a_script_with_lightning(theirs, tmp_path):
    pytest.importorskip('lightning')
    done = run(light, root/'tests'/'integrations', *['ours']*theirs, folder=tmp_path)
    assert done.returncode==0, done.stderr
    assert list(runs().name)==['theirs' if theirs else 'it']
    if theirs: assert 'not recorded again' in said(done)[0] and len(said(done))==1, done.stderr
    sys.path.insert(0, str(root/'tests'/'integrations'))
    try: from test_lightning_callback import plain as loop
    finally: del sys.path[0]
    got = {k: r for k,r in table(Ran('theirs' if theirs else 'it')).items() if k[2]!='scalar' and k[5]!='eval'}
    same(got, loop(batches()))
