"""The number of elements of a row follows from its shape, or is in `numel` if several tensors were merged."""
import math

import pytest
import torch
from tensor_rows import lines
from torch import nn

from torchember import torchEmber
from torchember.measure.columns import sets


def trained(sizes, stats, ttypes=('input', 'output', 'output_grad', 'weight', 'weight_grad', 'update'), steps=2):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    o = torch.optim.SGD(m.parameters(), .1)
    te = torchEmber(m, optimizer=o, stats=stats, ttypes=ttypes, on_error='raise')
    for _ in range(steps):
        for n in sizes: m(torch.randn(n, 3)).sum().backward()
        o.step()
        o.zero_grad()
    te.close()
    return lines(te)


@pytest.mark.parametrize('stats', [*sets, ('std',), ('shape', 'exponents')])
def test_micro_batches(stats):
    "Tensors of three micro-batches (5, 7 and 2 samples) are merged. The row has the last shape, and `numel` counts all elements."
    rows = trained((5, 7, 2), stats)
    merged = [r for r in rows if r['ttype'] in ('input', 'output', 'output_grad')]
    assert len(merged)==2*9 and len(rows)==2*(9+4+4+4)
    for r in merged:
        width = {'input': 3, 'output': 1, 'output_grad': 1}[r['ttype']] if r['module']=='model(Sequential)' else None
        assert r['numel']%14==0 and (width is None or r['numel']==14*width), r
        if 'shape' in r: assert r['shape'][0]==2 and r['numel']==7*math.prod(r['shape'])
        if 'exponents' in r: assert sum(r['exponents'])==r['numel']
    for r in rows:
        if r['ttype'] in ('input', 'output', 'output_grad'): continue
        assert ('numel' in r)==(stats=='full'), r
        if r['ttype']=='update': assert 'ratio' in r


@pytest.mark.parametrize('stats', ['basic', 'numerics'])
def test_one_batch(stats):
    "Rows have no `numel` if their shape gives the number of elements."
    rows = trained((5,), stats)
    assert not any('numel' in r for r in rows)
    assert [*rows[0]][:len(sets['basic'])]==list(sets['basic']) or stats!='basic'
    for r in rows:
        if 'exponents' in r: assert sum(r['exponents'])==math.prod(r['shape'])


def test_some_steps_of_several():
    "Steps with one pass and steps with several passes are written in the same batch."
    torch.manual_seed(0)
    m = nn.Linear(3, 1)
    o = torch.optim.SGD(m.parameters(), .1)
    te = torchEmber(m, optimizer=o, ttypes=('input',))
    for sizes in ((4, 4), (8,), (2, 6, 1), (0,), (0, 3)):
        for n in sizes: m(torch.randn(n, 3)).sum().backward()
        o.step()
    te.close()
    assert [(r['step'], r['shape'], r.get('numel')) for r in lines(te)]==[
        (0, [4, 3], 24), (1, [8, 3], None), (2, [1, 3], 27), (3, [0, 3], None), (4, [3, 3], None)]


def test_many_dimensions():
    "A shape with too many dimensions is cut, so the row has `numel`."
    m = nn.Identity()
    te = torchEmber(m, ttypes=('output',))
    m(torch.ones(*[1]*12, 2))
    te.close()
    [r] = te.t.lines()
    assert r['numel']==2 and r['shape'][-1]==-1
