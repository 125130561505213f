"Runs of two ranks with a wrapper in some steps only, and metadata that is found by the name of such a run."
import os
import signal
import warnings
from pathlib import Path

import programs
import pytest

from torchember import EmberWarning, diagnose, read
from torchember.frames.handle import open_run

here = Path(__file__).parent
paths = ['', 'body', 'body.0', 'body.1', 'head']


@pytest.fixture(scope='module')
def ran(tmp_path_factory):
    "Run `rewrapped.py` in two processes. Return the folder of the runs."
    d = tmp_path_factory.mktemp('rewrapped')
    programs.ranks(here/'rewrapped.py', d, n=2, PYTHONPATH=os.environ.get('PYTHONPATH', ''))
    return d


def merged(ran, name):
    "Return the merged table of a run, and the warnings."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always', EmberWarning)
        df = read(name, home=ran)
    return df, [str(w.message).removeprefix(f'{name}: ') for w in said]


@pytest.mark.parametrize('name', ['second', 'late', 'in_step'])
def test_modules_keep_their_names_when_a_wrapper_comes_and_goes(ran, name):
    df,said = merged(ran, name)
    assert sorted(set(df['path'])-{'unused'})==paths and len(df)==len(read(f'{name}.rank0', home=ran))
    assert not any('parameters of its own' in s or 'same batch' in s for s in said), said


@pytest.mark.parametrize('name', ['second', 'late'])
def test_replicas_that_drift_between_the_wrapped_steps_are_reported(ran, name):
    _,said = merged(ran, name)
    [drift] = [s for s in said if 'drifted apart' in s]
    assert drift.startswith('Replicas have drifted apart: tensor weight (weight) of body.0 differs between rank 1 and rank 0 since step 1 (')


def test_inputs_of_wrapped_and_unwrapped_steps_are_parts_of_one_batch(ran):
    df,_ = merged(ran, 'second')
    each = read('second', home=ran, per_rank=True)
    for step in range(8):
        whole,parts = (d[(d['step']==step)&(d['path']=='')&(d['ttype']=='input')] for d in (df, each))
        assert whole['shape'].tolist()==[(12, 4)] and parts['shape'].tolist()==[(6, 4)]*2
        assert whole['mean'].item()==pytest.approx(parts['mean'].mean(), abs=1e-7)


def test_a_wrapper_that_comes_late_is_found(ran):
    parts = read('late.rank0', home=ran)
    parts = parts[(parts['ttype']=='input')&(parts['path']=='head')].set_index('step')['part'].to_dict()
    assert parts=={**dict.fromkeys(range(5), 'world:?'), **dict.fromkeys(range(5, 8), 'dp:B')}


@pytest.mark.parametrize(('name', 'sentence'), [('mostly_same', 'All ranks get the same batch in 6 of 8 steps: '), ('once_same', None),
    ('second', None)])
def test_the_same_batch_is_reported_if_it_is_the_same_in_most_steps(ran, name, sentence):
    _,said = merged(ran, name)
    found = [s for s in said if 'same batch' in s]
    assert len(found)==bool(sentence) and all(s.startswith(sentence) for s in found)


def test_the_parameters_of_all_ranks_are_found_by_the_name_of_the_run(ran):
    entries,alone = open_run('in_step', ran).parameters(),open_run('in_step.rank0', ran).parameters()
    assert entries==alone and {(p['path'], p['name']): p['optimizer'] for p in entries}=={**{(path, n): True for path in ('body.0', 'head')
        for n in ('weight', 'bias')}, ('unused', 'weight'): False, ('unused', 'bias'): False}
    found = diagnose('in_step', home=ran)
    assert 'which parameters the optimizer has' not in dict(found.missing)
    tree = open_run('in_step', ran).structure()
    assert tree==open_run('in_step.rank0', ran).structure() and [c['path'] for c in tree['children']]==['body', 'head', 'unused']


def test_the_parameters_are_found_if_one_rank_left_no_metadata(ran):
    for f in (ran/'data').glob('*_late.rank0.json'): f.unlink()
    both,one = open_run('late', ran),open_run('late.rank1', ran)
    assert both.parameters()==one.parameters()!=[] and both.structure()==one.structure()


killed = f'''
import os, sys, torch
from torchember import torchEmber
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), .1)
te = torchEmber(model, optimizer=opt, name='killed', home=sys.argv[1])
for _ in range(3+int(os.environ['RANK'])):
    model(torch.ones(4, 2)).sum().backward()
    opt.step()
    opt.zero_grad()
te.t.barrier()
os.kill(os.getpid(), {int(signal.SIGKILL)})
'''


def test_ranks_that_died_are_named(tmp_path):
    for rank in 0,1:
        out = programs.run(killed, tmp_path, RANK=rank, WORLD_SIZE=2, PYTHONPATH=os.environ.get('PYTHONPATH', ''))
        assert out.returncode==-signal.SIGKILL, out.stderr
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        df,found = read('killed', home=tmp_path),diagnose('killed', home=tmp_path)
    starts = ['Rank 0: The training died after step 2: killed', 'Rank 1: The training died after step 3: killed']
    for texts in df[df['ttype']=='finding']['text'],found[found['rule']=='died']['text']:
        assert [t[:len(s)] for t,s in zip(sorted(texts), starts, strict=True)]==starts
    [alone] = diagnose('killed.rank1', home=tmp_path).query("rule=='died'")['text']
    assert alone.startswith('The training died after step 3')
