"Tests of the command line: commands for recorded runs, in separate processes as in a shell"
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pandas as pd
import pexpect # A dependency of IPython
import programs
import pytest
import torch
from torch import nn

import torchember
from torchember import read, runs, torchEmber
from torchember.cli.commands import find_command, main, make_parser, module_of_command
from torchember.cli.steps import GrowingLog, OpenSteps, StepReport
from torchember.cli.terminal import text_width, format_table
from torchember.frames.handle import open_run
from torchember.health.rules import table as rules

root = Path(__file__).parents[2]
long_name = 'Schrödinger 卷积 with a name that is far too long for a terminal'
libraries = 'import torch._dynamo, torchember.ember, torchember.trained\nfrom torchember.measure import loading\nloading.loops()'
typed = [n for n,(_,what) in module_of_command.items() if what]


def train(home, name, seed=0, lr=.1, steps=6, **kwargs):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    with torchEmber(model, opt, name=name, home=home, **kwargs) as te:
        for _ in range(steps):
            loss = model(torch.randn(8, 4)).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            te.log(loss=loss)


@pytest.fixture(scope='module')
def runs_there(tmp_path_factory):
    "Folder with recorded runs, shared by tests that do not change them"
    home = tmp_path_factory.mktemp('home')
    for name,seed in (('before', 0), ('after', 0), ('other', 1), (long_name, 2)): train(home, name, seed)
    with pytest.warns(torchember.EmberWarning): train(home, 'blown', lr=1e3, steps=12, rules='default')
    return home


def environment(**env):
    kept = {k: v for k,v in os.environ.items() if k not in ('COLUMNS', 'NO_COLOR', 'TORCHEMBER_HOME')}
    return {**kept, 'PYTHONPATH': str(root), 'MPLBACKEND': 'agg', **env}


def shell(home, *args, cwd=None, stdin=subprocess.DEVNULL, **env):
    got = subprocess.run([sys.executable, '-m', 'torchember', *args], capture_output=True, text=True, stdin=stdin, cwd=cwd,
        env=environment(TORCHEMBER_HOME=str(home), **env), timeout=120)
    assert 'Traceback' not in got.stderr, got.stderr
    return got


@pytest.fixture
def run_here(runs_there, tmp_path, monkeypatch, capsys):
    "Run a command in this process, in an empty folder. Return a result like that of `shell`."
    monkeypatch.setenv('TORCHEMBER_HOME', str(runs_there))
    monkeypatch.chdir(tmp_path)
    def ask(*args):
        try: code = main(list(args))
        except SystemExit as e: code = e.code
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())
    return ask


def test_every_command_has_help_and_an_example():
    for name in typed:
        c = find_command(name)
        assert shlex.split(c.example)[:2]==['torchember', name] and len(c.function.__doc__)>30
        make_parser().parse_args(shlex.split(c.example)[1:])


one_step = '''
import torch
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
model(torch.ones(4, 2)).square().mean().backward()
opt.step()
'''


@pytest.mark.parametrize('name', [n for n in typed if n!='board']) # `board` runs until Ctrl-C
def test_help_and_its_example(tmp_path, name, run_here, monkeypatch):
    monkeypatch.setenv('TORCHEMBER_HOME', str(tmp_path/'home'))
    for run in 'before', 'after', 'tmp 1': train(tmp_path/'home', run)
    (tmp_path/'train.py').write_text('import sys; assert sys.argv[1:]==["--lr", "0.1"]'+one_step*(name=='check'))
    said = run_here(name, '--help')
    [example] = re.findall('^example:\n  torchember (.*)$', said.stdout, re.M)
    got = (shell if name in ('run', 'check') else lambda home, *args, cwd: run_here(*args))(tmp_path/'home', *shlex.split(example), cwd=tmp_path)
    assert (said.returncode, got.returncode)==(0, 0), got.stderr
    left = {'rm': ['after', 'before'], 'mv': ['after', 'before lr=3e-4', 'tmp 1']}.get(name, ['after', 'before', 'tmp 1'])
    assert sorted(runs(tmp_path/'home').name)==left
    made = {'report': 'before.html', 'export': 'before.csv', 'plot': 'before.png'}
    assert sorted(f.name for f in tmp_path.iterdir() if f.is_file())==sorted([made[n] for n in [name] if n in made]+['train.py'])


def test_an_unknown_command_is_answered_with_the_commands_for_users(run_here):
    got = run_here('nope')
    assert got.returncode==2 and "invalid choice: 'nope'" in got.stderr and 'completion' in got.stderr and "complete'" not in got.stderr
    assert run_here('complete', 'zsh', 'che').stdout=='check\n'


def test_commands_start_without_pandas_and_torch(runs_there):
    for args in ['--help'], ['ls'], ['du'], ['tail', 'before'], ['completion', 'bash'], ['complete', 'zsh', 'show', '']:
        code = (f"import sys; from torchember.cli import main\ntry: main({args})\nexcept SystemExit: pass\n"
            "print([m for m in ('torch', 'pandas', 'matplotlib') if m in sys.modules])")
        got = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=environment(TORCHEMBER_HOME=str(runs_there)))
        assert got.stdout.splitlines()[-1]=='[]', (args, got.stderr)


def test_without_torch(tmp_path):
    "If torch is not installed, each command works or fails with one sentence."
    for name in 'before', 'after', 'tmp 1': train(tmp_path/'home', name)
    (tmp_path/'train.py').write_text('')
    code = '''import shlex, sys
sys.modules['torch'] = None
from torchember.cli.commands import find_command, main, module_of_command
for name in [n for n,(_,what) in module_of_command.items() if what and n not in ('mv', 'board')]+['mv']: # a board ends with Ctrl-C
    # the program of `check` trains nothing
    assert main(shlex.split(find_command(name).example)[1:])==2*(name=='check'), name
'''
    got = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=tmp_path, env=environment(TORCHEMBER_HOME=str(tmp_path/'home')))
    assert got.returncode==0, got.stderr
    assert (tmp_path/'before.png').exists() and sorted(runs(tmp_path/'home').name)==['after', 'before lr=3e-4']


def test_json_equals_the_results_of_the_library(runs_there, tmp_path, run_here):
    def told(*args): return json.loads(run_here(*args, '--json').stdout)
    there = runs(runs_there)
    assert [(r['name'], r['steps'], r['rows'], r['size']) for r in told('ls')]==[*there[['name', 'steps', 'rows', 'size']].itertuples(index=False, name=None)]
    assert [(r['name'], r['size']) for r in told('du', 'b*')]==[*torchember.du('b*', runs_there)[['name', 'size']].itertuples(index=False, name=None)]
    assert told('diagnose', 'blown')==json.loads(torchember.diagnose('blown', home=runs_there).to_json())
    assert told('diagnose', 'blow*')==[told('diagnose', 'blown')]
    assert told('brief', 'before')['text']==torchember.brief('before', home=runs_there)
    d = told('diff', 'before', 'other')
    assert (d['differ'], d['step'], d['names'])==(True, 0, ['before', 'other'])
    s = told('show', 'blown', '--ttype', 'weight')
    assert s['steps']==12 and s['findings'][0].startswith('error') and [l['weights'] for l in s['layers']]==['0.weight', '0.bias', '2.weight', '2.bias']
    rows = read('blown', home=runs_there)
    steps = [json.loads(l) for l in run_here('tail', 'blown', '-n', '100', '--json').stdout.splitlines()]
    at = {o['step']: o for o in steps if 'step' in o}
    told_rows = rows[rows['ttype']!='finding'].groupby('step').size()
    assert {s: o['rows'] for s,o in at.items()}==told_rows.to_dict()
    assert at[0]['numbers']['loss']==pytest.approx(rows.loc[(rows['tname']=='log') & (rows['step']==0), 'loss'].item()) and at[0]['trouble'] is None
    assert any('finding' in o for o in steps) and at[11]['not_finite']>0
    p = told('plot', 'before')
    assert (tmp_path/p['file']).read_bytes()[:4]==b'\x89PNG' and p['runs']==['before']
    e = told('export', 'before', 'it.parquet')
    assert len(pd.read_parquet(tmp_path/'it.parquet'))==e['rows']==len(read('before', home=runs_there))


@pytest.mark.parametrize('columns', [40, 80, 200])
def test_lines_fit(run_here, columns, monkeypatch):
    monkeypatch.setenv('COLUMNS', str(columns))
    for args in ['ls'], ['du'], ['show', 'blown'], ['tail', 'blown']:
        lines = run_here(*args).stdout.splitlines()
        format_table = lines[lines.index('')+1:] if args[0]=='show' else [l for l in lines if not l.startswith(('error', 'warning'))]
        assert len(format_table)>3 and max(map(text_width, format_table))<=columns, (args, format_table)
    names = [l.split()[0] for l in run_here('ls').stdout.splitlines()]
    assert {'name', 'before', 'after', 'blown'}<={*names}


def test_pipe_gets_everything_without_colours(runs_there):
    out = shell(runs_there, 'ls').stdout
    assert long_name in out and '\x1b' not in out


def on_terminal(home, *args, answer=b'', to=b'', size=80, **env):
    "Run a command on a terminal. Return its output and exit code. answer: text that is typed after the first output"
    ours,theirs = pty.openpty()
    before = termios.tcgetattr(ours)
    with subprocess.Popen([sys.executable, '-m', 'torchember', *args], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=environment(TORCHEMBER_HOME=str(home), TERM='xterm-256color', COLUMNS=str(size), **env)) as p:
        os.close(theirs)
        shown = b''
        while True:
            try: data = os.read(ours, 1<<16)
            except OSError: break # the program has closed the terminal
            if not data: break
            shown += data
            if answer and to in shown: os.write(ours, answer); answer = b''
        code = p.wait(60)
    assert termios.tcgetattr(ours)==before # The settings of the terminal are restored
    os.close(ours)
    return code, shown.decode()


def test_colours_on_a_terminal(runs_there):
    assert '\x1b[1m' in on_terminal(runs_there, 'ls')[1] and '\x1b[31m' in on_terminal(runs_there, 'diagnose', 'blown')[1]
    assert '\x1b' not in on_terminal(runs_there, 'ls', NO_COLOR='1')[1]


def test_rm_asks(tmp_path):
    for name in 'tmp 1', 'tmp 2', 'kept': train(tmp_path, name, steps=1)
    assert shell(tmp_path, 'rm', 'tmp*').returncode==2 and len(runs(tmp_path))==3
    code,shown = on_terminal(tmp_path, 'rm', 'tmp*', answer=b'n\n', to=b'[y/N]')
    assert code==2 and 'Remove 2 runs' in shown and len(runs(tmp_path))==3
    assert on_terminal(tmp_path, 'rm', 'tmp*', answer=b'y\n', to=b'[y/N]')[0]==0 and runs(tmp_path).name.tolist()==['kept']
    assert shell(tmp_path, 'rm', 'kept', '-y').returncode==0 and not len(runs(tmp_path))


def test_plot_draws_blocks_in_a_terminal(run_here, monkeypatch):
    monkeypatch.setattr('torchember.cli.pictures.is_terminal', lambda *_: True)
    shown = run_here('plot', 'before').stdout
    assert '▀' in shown and not [*Path().iterdir()]
    assert run_here('plot', 'before', '-o', 'other.svg').stdout=='other.svg\n' and '<svg' in Path('other.svg').read_text()


def test_plot_draws_blocks_into_a_pipe(run_here):
    assert '▀' in run_here('plot', 'before', '--inline').stdout and not [*Path().iterdir()]


def test_run_has_died_if_one_process_has(tmp_path):
    for rank in 0, 1: train(tmp_path, f'many.rank{rank}', steps=1)
    def state(): return json.loads(shell(tmp_path, 'ls', '--json').stdout)[0]['state']
    assert state()=='ended'
    file = tmp_path/'data'/'base_many.rank1.json'
    said = {k: v for k,v in json.loads(file.read_text()).items() if k!='end'}
    gone = programs.start('')
    gone.communicate()
    file.write_text(json.dumps({**said, 'pid': gone.pid}))
    assert state()=='died'
    # The process ran on another machine, so the time of its last rows decides
    file.write_text(json.dumps({**said, 'pid': gone.pid, 'host': 'another'}))
    assert state()=='running'
    os.utime(tmp_path/'log'/'many.rank1', (0, 0))
    assert state()=='silent' and [l.split()[-1] for l in shell(tmp_path, 'ls').stdout.splitlines()]==['state', 'silent']


def test_newest_run_is_first(tmp_path):
    for name,day in (('b', 2), ('c', 3), ('a', 1)):
        train(tmp_path, name, steps=1)
        file = tmp_path/'data'/f'base_{name}.json'
        file.write_text(json.dumps({**json.loads(file.read_text()), 'start': f'2026-01-0{day} 00:00:00'}))
    (tmp_path/'data'/'base_b.json').write_text('{}') # Metadata without a start time
    assert [r['name'] for r in json.loads(shell(tmp_path, 'ls', '--json').stdout)]==['c', 'a', 'b']
    assert [l.split()[0] for l in shell(tmp_path, 'ls', 'a', 'b').stdout.splitlines()]==['name', 'a', 'b']


def test_least_important_columns_are_dropped_first(monkeypatch):
    monkeypatch.setenv('COLUMNS', '24')
    lines = format_table([dict(name='x'*20, more='y'*8, less='z'*8)], ['name', 'more', 'less'], elastic=('name',), drop=('less', 'more'))
    # Other columns are dropped before a name is cut to fewer than 16 characters
    assert [l.split() for l in lines]==[['name'], ['x'*20]]
    monkeypatch.setenv('COLUMNS', '26')
    lines = format_table([dict(name='x'*20, more='y'*8, less='z'*8)], ['name', 'more', 'less'], ('name',), ('less', 'more'))
    assert [l.split() for l in lines]==[['name', 'more'], ['x'*8+'…'+'x'*7, 'y'*8]]


@pytest.mark.parametrize(('severity', 'codes'), [('warning', {'error': 0, 'warning': 1, 'info': 1, 'never': 0}),
    ('info', {'error': 0, 'warning': 0, 'info': 1, 'never': 0}), ('error', {'error': 1, 'warning': 1, 'info': 1, 'never': 0})])
def test_fail_on_decides_the_exit_code(runs_there, monkeypatch, capsys, severity, codes):
    def odd(history): yield torchember.finding('', 'It is odd.', 0)
    monkeypatch.setattr('torchember.diagnose', lambda run, rules, *, old=torchember.diagnose: old(run, [torchember.rule(severity=severity)(odd)]))
    for fail_on,code in codes.items(): assert main(['diagnose', 'before', '--home', str(runs_there), '--fail-on', fail_on])==code, fail_on
    assert main(['diagnose', 'before', '--home', str(runs_there)])==codes['warning'] and 'It is odd.' in capsys.readouterr().out
    rules.pop('odd')


def test_plot_for_a_program_that_has_a_terminal(run_here, monkeypatch):
    monkeypatch.setattr('torchember.cli.pictures.is_terminal', lambda *_: True)
    assert json.loads(run_here('plot', 'before', '--json').stdout)['file']=='before.png' and Path('before.png').exists()


def test_exit_codes(run_here):
    def code(*args): return run_here(*args).returncode
    assert [code('diagnose', *a) for a in (['before'], ['blown'], ['before', 'blown'], ['nowhere'], ['blown', '--fail-on', 'never'])]==[0, 1, 1, 2, 0]
    assert [code('diff', 'before', n) for n in ('after', 'other', 'nowhere')]==[0, 1, 2]
    for args in '', 'nothing', 'ls --home nowhere', 'ls nowhere', 'show *', 'export before x.txt', 'show before --path none':
        got = run_here(*args.split())
        assert got.returncode==2 and got.stderr and not got.stdout, args
    for c in typed: assert code(c, '--no-such-option')==2, c
    assert '-n, the number of lines to print, must be at least 0' in run_here('tail', 'before', '-n', '-1').stderr


def test_export_replaces_a_file_only_with_force_and_when_complete(run_here, monkeypatch):
    file = Path('x.csv')
    file.write_text('mine')
    assert run_here('export', 'before', 'x.csv').returncode==2 and file.read_text()=='mine'
    def fails(run, file, *rest):
        Path(file).write_text('half')
        raise OSError('the disk is full')
    with monkeypatch.context() as m:
        m.setattr('torchember.cli.changing.write_run', fails)
        assert run_here('export', 'before', 'x.csv', '--force').returncode==2
    assert [(f.name, f.read_text()) for f in Path().iterdir()]==[('x.csv', 'mine')]
    assert run_here('export', 'before', 'x.csv', '--force').returncode==0 and len(pd.read_csv(file))==len(read('before'))


def test_empty_home(tmp_path):
    for c in 'ls', 'du':
        got = shell(tmp_path/'none', c)
        assert (got.returncode, got.stdout)==(0, '') and 'There are no runs in' in got.stderr
        assert json.loads(shell(tmp_path/'none', c, '--json').stdout)==[]
    assert not (tmp_path/'none').exists()


def test_internal_error_has_exit_code_2(runs_there):
    code = ("import sys; import torchember.health.diff as d; d.diff = lambda *a, **k: {}['x']\n"
        "from torchember.cli import main; sys.exit(main(['diff', 'before', 'after']))")
    got = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=environment(TORCHEMBER_HOME=str(runs_there)))
    assert got.returncode==2 and 'KeyError' in got.stderr


def test_closed_pipe_ends_the_command(runs_there):
    for args in ['tail', 'blown'], ['--help'], ['export', 'blown', '-', '--as', 'jsonl']:
        with subprocess.Popen([sys.executable, '-m', 'torchember', *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(TORCHEMBER_HOME=str(runs_there))) as p:
            p.stdout.close()
            # argparse ignores errors when it writes the help, so exit code 0 is accepted
            assert p.stderr.read()==b'' and p.wait(60) in ([141, 0] if args==['--help'] else [141]), args


def test_hostile_names(tmp_path):
    train(tmp_path, 'good', steps=1)
    (tmp_path/'log'/'bad\x1b[31m\n').write_text('{}\n')
    (tmp_path/'log'/'<b>$(x)').write_text('no json\n')
    for args in ['ls'], ['du'], ['ls', '--json'], ['complete', 'zsh', 'show', '']:
        got = shell(tmp_path, *args)
        assert got.returncode==0 and '\x1b' not in got.stdout and 'good' in got.stdout, args
    assert [r['name'] for r in json.loads(shell(tmp_path, 'ls', 'b*', '--json').stdout)]==[r'bad\x1b[31m\n']
    got = shell(tmp_path, 'show', 'a\x1b[31m')
    assert got.returncode==2 and '\x1b' not in got.stderr
    assert shell(tmp_path, 'ls', LC_ALL='C', PYTHONIOENCODING='ascii').returncode==0


program = """import sys, torch
from torchember import torchEmber
with torchEmber(torch.nn.Linear(2, 1), name='other process', home=sys.argv[1]) as te:
    for line in sys.stdin:
        te.model(torch.ones(1, 2)).sum().backward()
        te.log(loss=float(line))
        te.step()
        te.t.barrier()
        print(flush=True)
"""


class Training:
    "A training process that runs a step for each line in its input"
    def __init__(self, home):
        self.p = programs.start(program, home, stdin=subprocess.PIPE, stderr=None, after=libraries, PYTHONPATH=root)

    def step(self, loss):
        self.p.stdin.write(f'{loss}\n')
        self.p.stdin.flush()
        self.p.stdout.readline()


@pytest.mark.parametrize('end', ['end', 'kill', 'interrupt'])
def test_tail_of_a_run_that_another_process_writes(tmp_path, end):
    training = Training(tmp_path)
    for i in range(3): training.step(i)
    tail = subprocess.Popen([sys.executable, '-m', 'torchember', 'tail', 'other process', '-n', '1'], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment(TORCHEMBER_HOME=str(tmp_path)))
    first = tail.stdout.readline().split()
    assert first[:4]==['step', '1', 'loss', '1'] # Step 2 may still be incomplete
    for i in (3, 4): training.step(i)
    seen = [tail.stdout.readline().split()[1] for _ in range(2)]
    assert seen==['2', '3'] # These steps appear while the training continues
    if end=='kill': training.p.kill(), training.p.wait()
    elif end=='interrupt': tail.send_signal(signal.SIGINT)
    else: training.p.stdin.close()
    out,err = tail.communicate(timeout=60)
    assert tail.returncode=={'end': 0, 'kill': 1, 'interrupt': 130}[end] and 'Traceback' not in err
    if end!='interrupt': assert [l.split()[1] for l in out.splitlines() if l.startswith('step')]==['4']
    state,shown = json.loads(shell(tmp_path, 'ls', '--json').stdout)[0]['state'],shell(tmp_path, 'show', 'other process').stdout
    assert state=={'end': 'ended', 'kill': 'died', 'interrupt': 'running'}[end] and ('\ndied ' in shown)==(end=='kill')
    if end=='kill': assert 'has ended without closing' in err and any(l.startswith('error') for l in out.splitlines())
    training.p.kill(), training.p.wait(), training.p.stdout.close()
    if end!='end': training.p.stdin.close()


def test_tail_prints_an_open_step_after_a_pause(tmp_path):
    training = Training(tmp_path)
    training.step(0)
    tail = subprocess.Popen([sys.executable, '-m', 'torchember', 'tail', 'other process'], stdout=subprocess.PIPE, text=True,
        env=environment(TORCHEMBER_HOME=str(tmp_path)))
    assert tail.stdout.readline().split()[:4]==['step', '0', 'loss', '0']
    for p in tail,training.p: p.kill(), p.communicate()


def test_late_row_delays_no_step():
    steps = OpenSteps()
    for step in 5, 3: steps.add('log', dict(step=step, ttype='output'))
    assert [s.step for s in steps.pop_complete(['log'])]==[3] and [s.step for s in steps.pop_complete([])]==[5]


def test_tail_names_the_first_non_finite_tensor():
    s = StepReport(0)
    for path in 'a', 'b', 'c': s.add(dict(step=0, ttype='output', module=f'm(Net).{path}(Linear)', nan=int(path!='a')))
    assert s.trouble=='NaN in output of b and 1 more' and (s.rows, s.n_nonfinite)==(3, 2)


def test_tail_of_several_processes(tmp_path):
    "`tail` prints each step once, with the rows of all processes."
    for rank,steps in ((0, 4), (1, 4)): train(tmp_path, f'many.rank{rank}', steps=steps)
    lines = [json.loads(l) for l in shell(tmp_path, 'tail', 'many', '--json').stdout.splitlines()]
    one = read('many.rank0', home=tmp_path).groupby('step').size()
    assert shell(tmp_path, 'complete', 'zsh', 'tail', '').stdout=='many\n'
    assert [(o['step'], o['rows']) for o in lines]==[(s, 2*n) for s,n in one.items()]


def test_tail_reads_only_the_end_of_a_long_log(tmp_path, monkeypatch):
    train(tmp_path, 'long', steps=40)
    log = GrowingLog(open_run('long', tmp_path).log)
    for most in 1, 5000, 20_000, None:
        log.open_at(most)
        some = [r for rows in log.read_new() for r in rows]
        every = [json.loads(l) for l in (tmp_path/'log'/'long').read_text().splitlines()]
        assert [r['step'] for r in some]==[r['step'] for r in every[len(every)-len(some):]] and log.tail.rows==len(every)
        assert most is None or sum(len(json.dumps(r)) for r in some)<most*1.2
    log.open_at(5000)
    torchember.compact('long', tmp_path)
    assert [r for rows in log.read_new() for r in rows][-1]['step']==39 and log.tail.rows==len(every)


@pytest.fixture
def at_shells(runs_there, tmp_path):
    "Return environment variables for shells in which Tab completes the command and names of runs"
    (tmp_path/'torchember').write_text(f'#!/bin/sh\nexec {sys.executable} -m torchember "$@"\n')
    (tmp_path/'torchember').chmod(0o755)
    return environment(TORCHEMBER_HOME=str(runs_there), PATH=f"{tmp_path}:{os.environ['PATH']}", HOME=str(tmp_path))


def only_with(shell): return pytest.mark.skipif(shutil.which(shell) is None, reason=f'no {shell}')


@only_with('bash')
def test_bash_completes(at_shells):
    code = """source <(torchember completion bash); COMP_LINE=$1; COMP_POINT=${#1}; _torchember; printf '%s\\n' "${COMPREPLY[@]}" """
    def completed(line): return subprocess.run(['bash', '-c', code, '-', line], capture_output=True, text=True, env=at_shells).stdout.split('\n')[:-1]
    assert completed('torchember diff bef')==['before'] and completed('torchember dia')==['diagnose']
    assert completed('torchember show b')==['before', 'blown'] and completed('torchember show --j')==['--json']
    assert completed('torchember _')==[''] and {'run', 'ls', '--help'}<={*completed('torchember ')}
    assert completed("torchember show 'Schr")==[long_name] and completed('torchember show Schr')==[long_name.replace(' ', r'\ ')]
    assert completed('torchember run --st')==['--stats', '--store']


@only_with('fish')
def test_fish_completes(at_shells):
    def completed(line):
        code = f'torchember completion fish | source; complete -C "{line}"'
        return subprocess.run(['fish', '-c', code], capture_output=True, text=True, env=at_shells).stdout.split('\n')[:-1]
    assert completed('torchember diff bef')==['before'] and completed('torchember dia')==['diagnose']
    assert completed('torchember show b')==['before', 'blown'] and completed('torchember run --st')==['--stats', '--store']
    assert completed('torchember show Schr')==[long_name] and completed('torchember comple')==['completion']
    # Files are completed, because no other completion is known
    assert f'{at_shells["HOME"]}/torchember' in completed(f'torchember run {at_shells["HOME"]}/to')


@only_with('zsh')
def test_zsh_completes(at_shells, tmp_path):
    "Type into zsh and press Tab. A key binding of the test writes the completed line into a file."
    lines = tmp_path/'lines'
    shell = pexpect.spawn('zsh', ['-f', '-i'], env={**at_shells, 'TERM': 'dumb'}, timeout=60, encoding='utf-8')
    def completed(line):
        before = lines.read_text() if lines.exists() else ''
        # Keys: Tab completes, Ctrl-O is the key binding of the test, Ctrl-U clears the line
        shell.send(f'{line}\t\x0f\x15')
        until = time.monotonic()+60
        while not lines.exists() or not lines.read_text().endswith('\n') or lines.read_text()==before:
            assert time.monotonic()<until, line
            time.sleep(.1)
        return lines.read_text()[len(before):].rstrip('\n')
    try:
        shell.sendline("autoload -Uz compinit; compinit -u; source <(torchember completion zsh); setopt no_list_beep; "
            "note() { print -r -- $BUFFER >> ~/lines }; zle -N note; bindkey '^O' note; echo rea''dy")
        shell.expect('ready')
        assert completed('torchember diff bef')=='torchember diff before ' and completed('torchember dia')=='torchember diagnose '
        assert completed('torchember show b')=='torchember show b' and completed('torchember show --j')=='torchember show --json '
        assert completed('torchember show Schr')==f"torchember show {long_name.replace(' ', chr(92)+' ')} "
        assert completed("torchember show 'Schr")==f"torchember show '{long_name}' "
    finally: shell.close(force=True)
