"Runs of torchember 0.1 and 0.2 in the same folder can be read. Rows that a process writes by hand are on disk at once."
import json
import os

import matplotlib.pyplot as plt
import programs
import pytest
import torch
from torch import nn

import torchember
from torchember import emberTracker, overview, read, report, runs, scalar_line, torchEmber, tracker
from torchember.store.older import json_rows

tree = {'name': 'model(Net)', 'short': 'model(Net)', 'children': [{'name': 'model(Net).a(Linear)', 'short': 'a(Linear)'}]}


def a_row(module, ttype, tname, value, second):
    return dict(shape=[2, 3], mean=value, std=value+1, max=2., min=-2., cnt_zero=0, module=module,
        ts=f'2020-03-01 10:00:{second:02d}', ttype=ttype, tname=tname)


def of_02(home, name='Net_20200412_100000'):
    "Write a run in the format of 0.2: a folder with a file for each set of marks, without line breaks. Return its name."
    folder = home/'log'/name
    folder.mkdir(parents=True)
    (home/'data').mkdir(exist_ok=True)
    for second,(marks,n) in enumerate({'init-00': 1, 'init-00_epoch-0': 2, 'init-00_epoch-1': 3}.items()):
        with open(folder/f'{marks}.log', 'a') as f:
            for i in range(n):
                for tt,tn in (('input_dt', 'x'), ('output_dt', 'out_0'), ('output_dt', 'out_1.tsr0'), ('weight', 'weight_0'), ('grad', 'grad_0')):
                    f.write(','+json.dumps(a_row('model(Net).a(Linear)', tt, tn, 10.*second+i, second)))
    (home/'data'/f'base_{name}.json').write_text(json.dumps({'start': '2020-04-12 10:00:00'}))
    (home/'data'/f'structure_{name}.json').write_text(json.dumps(tree))
    (home/'log'/f'{name}_latest').write_text(json.dumps(a_row('model(Net)', 'input_dt', 'x', 0., 1))+'\n')
    return name


def of_01(home, name='Net_20200224_100000', base=True):
    "Write a run in the format of 0.1: a file of JSON lines without steps. Return its name."
    (home/'log').mkdir(parents=True, exist_ok=True)
    (home/'data').mkdir(exist_ok=True)
    with open(home/'log'/name, 'w') as f:
        for i in range(3):
            for tt,tn in (('input', 'x'), ('weight', 'weight_0'), ('weight_grad', 'grad_0'), ('output', 'output_0')):
                f.write(json.dumps(a_row('model(Net).a(Linear)', tt, tn, float(i), i))+'\n')
    if base: (home/'data'/f'base_{name}.json').write_text(json.dumps({'start': '2020-02-24 10:00:00', 'user': 'me'}))
    return name


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCHEMBER_HOME', str(tmp_path))
    yield tmp_path
    plt.close('all')


def test_a_run_of_02_is_a_table_with_the_words_of_now(home):
    df = read(of_02(home))
    wanted = [(step, 'a', tt, tn, None if second==0 else second-1, 10.*second+i)
        for step,(second,i) in enumerate([(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)])
        for tt,tn in (('input', 'x'), ('output', 'output_0'), ('output', 'output_1.0'), ('weight', 'weight_0'), ('weight_grad', 'grad_0'))]
    epoch = df['epoch'].astype(object).where(df['epoch'].notna(), None)
    assert [*zip(df['step'], df['path'], df['ttype'], df['tname'], epoch, df['mean'], strict=True)]==wanted
    assert len(read('Net*'))==30 and len(read(home/'log'/'Net_20200412_100000'))==30
    assert read('Net_20200412_100000', steps=-1, ttype='weight')['mean'].tolist()==[22.]
    assert [r['step'] for r in emberTracker('Net_20200412_100000').lines()][-1]==emberTracker('Net_20200412_100000').last_step()==5


def test_a_run_of_01_is_a_table_whose_rows_have_steps(home):
    df = read(of_01(home))
    assert df[['step', 'path', 'ttype', 'tname', 'mean']].values.tolist()==[[i, 'a', tt, tn, float(i)] for i in range(3)
        for tt,tn in (('input', 'x'), ('weight', 'weight_0'), ('weight_grad', 'grad_0'), ('output', 'output_0'))]
    assert emberTracker('Net_20200224_100000').df['step'].tolist()==df['step'].tolist()


@pytest.mark.parametrize('of', [of_01, of_02])
def test_everything_reads_and_draws_an_older_run(home, of, tmp_path):
    name = of(home)
    tables = [lambda n: emberTracker(n).df, lambda n: emberTracker(n).latest_df, lambda n: emberTracker(n).lines()]
    for call in (read, overview, torchember.summary, scalar_line, *tables):
        assert call(name) is not None
    report(name, tmp_path/'it.html')
    got = runs()
    assert got[['name', 'running']].values.tolist()==[[name, False]] and got['rows'].tolist()==[30 if of is of_02 else 12] and got['size'][0]>1000


def test_both_and_one_of_now_are_beside_each_other(home):
    of_01(home); of_02(home)
    with torchEmber(nn.Linear(2, 1), name='now') as te: te.model(torch.ones(1, 2))
    got = runs()
    assert sorted(got['name'])==['Net_20200224_100000', 'Net_20200412_100000', 'now'] and len(read('now', ttype='output'))==1
    assert set(read('*')['run'])==set(got['name'])


def test_a_run_that_is_written_by_hand_without_steps_says_what_is_missing(home):
    name = of_01(home, base=False) # without metadata, the run is not recognized as one of version 0.1
    assert 'step' not in read(name) and len(emberTracker(name).df)==12
    for call in (overview, torchember.summary, scalar_line):
        with pytest.raises(ValueError, match='no column.*step'): call(name)


@pytest.mark.parametrize('of', [of_01, of_02])
def test_an_older_run_is_not_gone_on_with(home, of):
    name = of(home)
    with pytest.raises(FileExistsError, match='recorded by an older torchember.*Choose another name'): torchEmber(nn.Linear(1, 1), name=name, resume=True)
    with pytest.raises(FileExistsError, match='exists already'): torchEmber(nn.Linear(1, 1), name=name)
    if of is of_02:
        for add in (lambda t: t + {'a': 1}, lambda t: t.logging('{"a": 1}')):
            with pytest.raises(FileExistsError, match='can be read'): add(emberTracker(name))


def test_what_is_torn_or_no_row_is_counted_and_the_rest_read(home):
    name = of_02(home)
    with open(home/'log'/name/'init-00_epoch-1.log', 'a') as f: f.write(',{"mean": 0.')
    (home/'log'/name/'init-00_epoch-2.log').write_text('no rows at all')
    (home/'log'/name/'notes.txt').write_text('mine')
    if hasattr(os, 'mkfifo'): os.mkfifo(home/'log'/name/'pipe.log')
    t = emberTracker(name)
    assert len(t.lines())==30 and t.torn==2
    assert len(read(name))==30


def test_a_row_that_was_torn_costs_only_itself(home):
    name = of_02(home)
    path = home/'log'/name/'init-00_epoch-1.log'
    text = path.read_text()
    # the process was killed while writing a line, and then continued
    with open(path, 'a') as f: f.write(3*(',{"mean": 0., "shape": [1, 2'+text[text.rindex(',{'):]))
    t = emberTracker(name)
    assert len(t.lines())==33 and t.torn==3 and len(read(name))==33
    text = path.read_text()
    for size in (1, 7, 100, len(text)):
        got = list(json_rows(path.open(), size))
        assert sum(isinstance(r, dict) for r in got)==18 and sum(isinstance(r, str) for r in got)==3


def test_marks_are_columns_and_a_mark_called_step_is_the_step(home):
    folder = home/'log'/'marked'
    folder.mkdir(parents=True)
    for i in (3, 7): (folder/f'init-00_step-{i}_phase-warm_up_lr-1e-3.log').write_text(','+json.dumps(a_row('model(Net)', 'input_dt', 'x', i/2, i)))
    df = read('marked')
    assert df[['step', 'path', 'ttype', 'tname', 'phase', 'lr', 'mean']].values.tolist()==[[i, '', 'input', 'x', 'warm_up', .001, i/2] for i in (3, 7)]


def test_a_folder_without_rows_is_no_run(home):
    (home/'log'/'mine').mkdir(parents=True)
    assert not len(runs())
    for call in (read, lambda n: emberTracker(n).df):
        with pytest.raises((FileNotFoundError, ValueError)) as e: call('mine')
        assert len(str(e.value))>40


# ---- rows that users write by hand

def test_rows_by_hand_are_on_disk_at_once(home):
    t = emberTracker('mine')
    for i in range(3):
        t + {'i': i}
        assert [json.loads(line)['i'] for line in (home/'log'/'mine').read_text().splitlines()]==list(range(i+1))
    t.logging('{"i": 3}')
    t.mark(epoch=1)
    t({'i': 4})
    assert [json.loads(line) for line in (home/'log'/'mine').read_text().splitlines()][3:]==[{'i': 3}, {'i': 4, 'epoch': 1}]
    other = tracker('mylib', 'run', home=home/'mylib')
    other + {'i': 0}
    assert other.log_path.read_text()=='{"i":0}\n' or json.loads(other.log_path.read_text())=={'i': 0}


def test_rows_by_hand_outlive_a_process_that_is_killed(home):
    code = "import os, signal; from torchember import emberTracker; t = emberTracker('killed'); t + {'i': 0} + {'i': 1}; os.kill(os.getpid(), signal.SIGKILL)"
    assert programs.run(code, TORCHEMBER_HOME=home).returncode!=0
    assert [r['i'] for r in emberTracker('killed').lines()]==[0, 1]


def test_rows_by_hand_beside_an_ember_are_in_its_run(home):
    te = torchEmber(nn.Linear(2, 1), name='beside')
    te.model(torch.ones(1, 2))
    te.t + {'i': 0}
    te.disarm()
    assert sorted(str(r.get('ttype', r.get('i'))) for r in te.t.lines())==['0', 'input', 'output', 'weight', 'weight']
