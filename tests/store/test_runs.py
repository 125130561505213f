"Runs of complete processes, from the start to the exit."
import json

import programs
import pytest

begin = """
import sys, torch
from torchember import torchEmber
from torchember.measure import loading
loading.loops()
"""
train = """
te = torchEmber(torch.nn.Linear(2, 1))
for _ in range(3): te.model(torch.ones(1, 2))
"""


def start(code, home): return programs.start(code, after=begin, TORCHEMBER_HOME=home)


def finish(p):
    err = p.communicate()[1]
    return p.returncode, err


def rows(path): return [json.loads(line) for line in path.read_text().splitlines()]


def test_exit_writes_what_is_left(tmp_path):
    "All rows are written when the interpreter exits, also after an exception and with an open step."
    for i,end in enumerate(('', '1/0', 'sys.exit(3)')):
        home = tmp_path/str(i)
        finish(start(train+end, home))
        [log] = [p for p in (home/'log').iterdir() if not p.name.endswith('_latest')]
        measured = [r for r in rows(log) if r['ttype']!='finding']
        assert len(measured)==3*4 and {r['step'] for r in measured}=={0, 1, 2} and len(rows(log))-12==(end=='1/0')
        assert rows(log.with_name(log.name+'_latest'))==measured[-4:]
        data = {p.name.split('_')[0]: json.loads(p.read_text()) for p in (home/'data').iterdir()}
        assert data['vis']=={'vis_type': 'standard'} and data['structure']['name']=='model(Linear)' and {'start', 'user'} <= data['base'].keys()


def test_exit_writes_what_was_noted_after_the_run_was_closed(tmp_path):
    "After close(), a number is logged, or a step runs after arming again. These rows are written at exit."
    for i,(more,ttypes) in enumerate({'te.log(loss=1.)': {'scalar'}, 'te.arm().model(torch.ones(1, 2))': {'input', 'output', 'weight'}}.items()):
        home = tmp_path/str(i)
        assert finish(start(f'{train}te.close()\n{more}', home))[0]==0
        [log] = [p for p in (home/'log').iterdir() if not p.name.endswith('_latest')]
        assert {r['ttype'] for r in rows(log)[12:]}==ttypes


@pytest.mark.release # slow test, run only before a release
def test_eight_in_the_same_second(tmp_path):
    "Eight processes that start in the same second have eight separate runs."
    # wait for the same second, so that all processes choose the same name
    wait = "import time; from datetime import datetime\nwhile datetime.now().second%5: time.sleep(.01)\n"
    ps = [start(train.replace('te = ', wait+'te = '), tmp_path) for _ in range(8)]
    assert all(finish(p)[0]==0 for p in ps)
    logs = [p for p in (tmp_path/'log').iterdir() if not p.name.endswith('_latest')]
    assert len(logs)==8 and all(len(rows(p))==12 for p in logs)
    assert len(list((tmp_path/'data').glob('base_*.json')))==8


def test_a_home_that_cannot_be_written(tmp_path):
    "Training continues, and one warning explains the solution."
    (tmp_path/'home').mkdir()
    (tmp_path/'home'/'log').write_text('a file where a folder should be')
    code,err = finish(start(train+"print('trained to the end', file=sys.stderr)", tmp_path/'home'))
    assert code==0 and 'trained to the end' in err and err.count('cannot write')==1 and 'TORCHEMBER_HOME' in err
