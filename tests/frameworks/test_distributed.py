"Tests with two processes: DDP and FSDP2, armed before and after wrapping, eager and compiled"
import json
import os
from pathlib import Path

import programs
import pytest
from sharded import steps

from torchember import emberTracker

libraries = 'import scipy.stats, numba, pandas, torch._dynamo.backends.distributed, torch._functorch.aot_autograd, torch.distributed.fsdp'
pytestmark = pytest.mark.slow # slow because two processes compile


@pytest.fixture(scope='module')
def ran(tmp_path_factory):
    "Run all cases in two processes once. Return the output and the rows of each rank."
    d = tmp_path_factory.mktemp('ranks')
    here = Path(__file__).parent
    helpers = os.pathsep.join([str(here.parent), os.environ.get('PYTHONPATH', '')])
    programs.ranks(here/'sharded.py', 'all', d, after=libraries, TORCHEMBER_HOME=d, PYTHONPATH=helpers)
    said = [json.loads((d/f'{k}.json').read_text()) for k in range(2)]
    def rows(case, k): return emberTracker(f"{case.replace(' ', '_').replace(',', '')}.rank{k}", home=d).lines()
    return said, {(c, k): rows(c, k) for c in steps for k in range(2)}


def without(r, *keys): return {k:v for k,v in r.items() if k not in ('ts', *keys)}


@pytest.mark.parametrize('case', steps)
def test_training_goes_on(ran, case):
    "Losses equal the losses without recording. The log of each rank contains every second step."
    for k,said in enumerate(ran[0]):
        s = said[case]
        assert s['bare']==s['armed'] and s['report']['steps']==4 and s['report']['recorded']==2 and s['report']['errors']==s['report']['skipped']==0
        rows = ran[1][case, k]
        assert len(rows)==s['rows'] and {r['rank'] for r in rows}=={k} and {r['step'] for r in rows}=={0, 2}
        places = [(r['module'], r['ttype'], r['tname'], r['step'], r['call']) for r in rows]
        assert len(set(places))==len(places)
    # Losses differ between ranks, because each rank has different data
    assert ran[0][0][case]['bare']!=ran[0][1][case]['bare']


@pytest.mark.parametrize('case', [c for c in steps if c!='ddp armed before'])
@pytest.mark.parametrize('rank', [0, 1])
def test_activations(ran, case, rank):
    "Inputs, outputs and weights equal those of eager DDP on the same rank."
    def pick(c): return [without(r, 'module', 'part') for r in ran[1][c, rank] if r['ttype'] in ('input', 'output', 'weight')]
    want,got = pick('ddp armed before'),pick(case)
    assert len(want)==len(got)==2*69
    for r,s in zip(want, got, strict=True):
        for k in r: assert r[k]==s[k] or isinstance(r[k], float) and abs(r[k]-s[k])<=1e-5*max(abs(r['max']), abs(r['min']), 1e-3), (k, r, s)


@pytest.mark.parametrize('case', [c for c in steps if c.startswith('fsdp')])
def test_a_shard_says_that_it_is_one(ran, case):
    "Each rank measures its shard of a gradient. The row has the shape of the shard, the placement, and the global shape."
    for k in range(2):
        rows,seen = ran[1][case, k],ran[0][k][case]['seen']
        for name,mean in seen.items():
            path,_,pname = name.rpartition('.')
            [r] = [r for r in rows if r['step']==2 and r['ttype']=='weight_grad' and r.get('pname')==pname and
                '.'.join(p.split('(')[0] for p in r['module'].split('.')[1:])==path]
            assert r['placement'] in ('S(0)', 'Shard(dim=0)') and len(r['global_shape'])==len(r['shape']) and r['shape'][0]<=r['global_shape'][0]
            assert abs(r['mean']-mean)<=1e-6*max(abs(r['max']), abs(r['min']), 1e-6)
        up = [r for r in rows if r['step']==2 and r['ttype']=='weight_grad' and r['module'].endswith('.up(Linear)') and r['pname']=='weight'][0]
        assert up['shape']==[32, 16] and up['global_shape']==[64, 16]
        # FSDP gathers whole weights for the forward pass, so these rows have no placement
        assert all('placement' not in r for r in rows if r['ttype'] in ('input', 'output', 'weight'))


def test_ddp_gradients_are_everybodys(ran):
    for case in (c for c in steps if c.startswith('ddp')):
        a,b = ([without(r, 'rank') for r in ran[1][case, k] if r['ttype']=='weight_grad'] for k in range(2))
        assert a==b and a and all('placement' not in r for r in a)
