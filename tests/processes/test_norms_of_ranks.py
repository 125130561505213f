"The norm of all gradients in a run of several ranks is the norm of the whole model, or missing if it cannot be known."
import json
import math

import numpy as np
import pandas as pd
import pytest

from torchember.frames.tables import prepare_table
from torchember.processes.packed_rows import Packet, StepMerger
from torchember.processes.ranks import merge_and_check

rng = np.random.default_rng(0)
first,second = rng.normal(size=(4, 3)),rng.normal(size=(6,))
expected = math.sqrt((first**2).sum()+(second**2).sum())


def gradient(rank, name, x, part, shape=None, ttype='weight_grad', step=0, stats=('mean', 'std')):
    known = dict(mean=float(x.mean()), std=float(x.std(ddof=1)), max=float(x.max()))
    return dict({s: known[s] for s in stats}, shape=list(x.shape), numel=x.size, module=f'model(Net).{name}(Linear)', ts='2020-02-15 13:44:48', ttype=ttype,
        tname='grad_0', step=step, call=0, dtype='float32', pname='weight', part=part, rank=rank, **({} if shape is None else {'global_shape': list(shape)}))


def norm(rank, value, step=0, name='grad_norm', tname='grad_norm', **more):
    return {name: value, 'module': 'model(Net)', 'ts': '2020-02-15 13:44:48', 'ttype': 'scalar', 'tname': tname, 'step': step, 'call': 0, 'dtype': 'float64',
        'rank': rank, **more}


def about(axis, world=2): return {r: {'rank': r, 'world': world, 'axes': {axis: list(range(world))}} for r in range(world)}


def merged(rows, axis, world=2):
    df = prepare_table(pd.DataFrame(rows))
    out,_ = merge_and_check(df, about(axis, world))
    return out[out.ttype=='scalar']


def shards(**more):
    return [*(gradient(r, 'a', first[2*r:2*r+2], 'fsdp:S0', first.shape, **more) for r in (0, 1)),
        *(gradient(r, 'b', second[3*r:3*r+3], 'fsdp:S0', second.shape, **more) for r in (0, 1))]


def replicas(**more): return [gradient(r, n, x, 'dp:R', **more) for r in (0, 1) for n,x in (('a', first), ('b', second))]


def test_shards_are_added():
    rows = merged([*shards(), norm(0, 1.), norm(1, 2.)], 'fsdp')
    assert rows.grad_norm.tolist()==[pytest.approx(expected, rel=1e-9)] and rows.tname.tolist()==['grad_norm']


def test_replicas_count_once():
    assert merged([*replicas(), norm(0, expected), norm(1, expected)], 'dp').grad_norm.tolist()==[pytest.approx(expected, rel=1e-9)]


def test_without_a_rank_replicas_have_a_norm_and_shards_have_none():
    assert len(merged([r for r in replicas() if r['rank']==0]+[norm(0, expected)], 'dp'))==1
    assert len(merged([*shards(), norm(0, 1.)], 'fsdp'))==0
    assert len(merged([r for r in shards() if r['rank']==0]+[norm(0, 1.)], 'fsdp'))==0


def test_a_partial_sum_has_no_norm():
    rows = [gradient(r, 'a', first, 'tp:P') for r in (0, 1)]
    assert len(merged([*rows, norm(0, 1.), norm(1, 1.)], 'tp'))==0


def test_statistics_that_do_not_give_a_norm():
    assert len(merged([*shards(stats=('max',)), norm(0, 1.), norm(1, 2.)], 'fsdp'))==0


def test_the_norm_before_clipping_includes_unclipped_gradients():
    clipped = [gradient(r, 'a', 10*first[2*r:2*r+2], 'fsdp:S0', first.shape, 'unclipped_grad') for r in (0, 1)]
    row, = merged([*shards(), *clipped, norm(0, 1., grad_norm_unclipped=1.), norm(1, 2., grad_norm_unclipped=3.)], 'fsdp').to_dict('records')
    assert row['grad_norm']==pytest.approx(expected, rel=1e-9)
    assert row['grad_norm_unclipped']==pytest.approx(math.sqrt(100*(first**2).sum()+(second**2).sum()), rel=1e-9)


def test_each_step_has_its_norm_and_scalars_are_averaged():
    rows = [*shards(), *shards(step=1), *(norm(r, 7., s, 'recorded_grad_norm') for r in (0, 1) for s in (0, 1)),
        *(norm(r, 1.+r, 1, tname='log') for r in (0, 1))]
    out = merged(rows, 'fsdp')
    assert out.recorded_grad_norm.dropna().tolist()==[pytest.approx(expected, rel=1e-9)]*2
    assert out[out.tname=='log'].grad_norm.tolist()==[1.5]


def test_rows_merged_during_training_have_the_same_norm():
    w,rows = StepMerger(),[*shards(), norm(0, 1.), norm(1, 2.), *(dict(norm(r, .5, name='loss', tname='log')) for r in (0, 1))]
    w.about = about('fsdp')
    found = w.rows({r: Packet.of(json.loads(json.dumps([x for x in rows if x['rank']==r]))) for r in (0, 1)})
    assert [r['grad_norm'] for r in found if r['tname']=='grad_norm']==[pytest.approx(expected, rel=1e-9)]
    assert [sorted(r.keys() & {'loss', 'grad_norm'}) for r in found if r['ttype']=='scalar']==[['grad_norm'], ['loss']]
