"Rows are converted to a LogFrame and back. Everything that a LogFrame can express is kept."
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchember import LogFrame, from_logframe, to_logframe, torchEmber, validate
from torchember.frames.logframe import stat_names

names = st.sampled_from(['fc1', 'h', '0', '10', 'attn', 'output', 'norm_1', 'out:put', 'weights'])
pnames = st.lists(st.sampled_from(['weight', 'bias', 'in_proj_weight', 'scale', 'weight_ih_l0']), max_size=3, unique=True)
numbers = st.floats(allow_nan=True, allow_infinity=True, width=64)


@st.composite
def models(draw):
    "Draw a model: path -> class, own parameters and number of outputs."
    paths = draw(st.lists(st.lists(names, min_size=1, max_size=3), max_size=4))
    every = {'.'.join(p[:i]) for p in paths for i in range(len(p)+1)} | {''}
    classes = {p: f'C{i}' for i,p in enumerate(sorted(every))} # each module has its own class
    return {p: (classes, draw(pnames), draw(st.integers(1, 3))) for p in sorted(every)}


@st.composite
def logs(draw):
    "Draw the tidy rows of a few steps of a model."
    model,rows = draw(models()),[]
    lo,n = draw(st.integers(-20, 0)),draw(st.integers(1, 5))
    stats = draw(st.lists(st.sampled_from(['mean', 'std', 'abs_mean', 'abs_max', 'abs_min', 'rms', 'rm4', 'own']), min_size=1, unique=True))
    def display(path, classes):
        parts = path.split('.') if path else []
        return '.'.join([f"model({classes['']})", *(f"{p}({classes['.'.join(parts[:i+1])]})" for i,p in enumerate(parts))])
    def add(step, path, classes, ttype, tname, pname=None, call=0):
        counts = draw(st.lists(st.integers(0, 2**40), min_size=n+2, max_size=n+2).filter(any))
        rows.append(dict({s: draw(numbers) for s in stats}, path=path, module=display(path, classes), ttype=ttype, tname=tname, pname=pname, step=step,
            call=call, dtype=draw(st.sampled_from(['float32', 'bfloat16'])), exponents=counts, exponent_min=lo, shape=[1]))
    for step in range(3, 3+draw(st.integers(1, 2))):
        for path,(classes,own,outputs) in model.items():
            for call in range(draw(st.integers(1, 2))):
                for i in range(outputs): add(step, path, classes, 'output', f'output_{i}', call=call)
            add(step, path, classes, 'output_grad', 'output_0')
            for i,p in enumerate(own):
                add(step, path, classes, 'weight', f'weight_{i}', p)
                add(step, path, classes, 'optimizer', f'exp_avg_sq_{i}', p)
                add(step, path, classes, 'weight_grad', f'grad_{i}', p)
    return pd.DataFrame(rows)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(logs())
def test_there_and_back(df):
    lf = to_logframe(df)
    validate(lf)
    again = from_logframe(lf)
    assert len(again)==len(df)
    for c in df.columns.drop('shape'):
        a,b = again[c].tolist(),df[c].tolist()
        empty = lambda v: v is None or isinstance(v, float) and math.isnan(v)
        assert [None if empty(v) else v for v in a]==[None if empty(v) else v for v in b], c
    twice = to_logframe(again)
    pd.testing.assert_frame_equal(twice, lf)
    for c in ('mean', 'abs_max', 'rms', 'own'): # each number stays in its row
        if c in df: np.testing.assert_array_equal(lf['scalar_stats', stat_names.get(c, c)], df[c])
    counts = np.array(df.exponents.tolist())
    np.testing.assert_array_equal(lf.exponent_counts.to_numpy(), counts)
    lo = df.exponent_min[0]
    assert [*lf.exponent_counts]==[-math.inf, *range(lo, lo+counts.shape[1]-2), math.inf]


@pytest.mark.parametrize('keep', [(), True])
def test_a_run(keep):
    model = nn.Sequential(nn.LSTM(3, 4, batch_first=True), nn.Identity())
    model[1].forward = lambda x: x[0]
    opt = torch.optim.Adam(model.parameters())
    with torchEmber(model, optimizer=opt, stats='numerics', name='run', ttypes=('input', 'output', 'output_grad', 'weight', 'weight_grad', 'optimizer')) as te:
        for _ in range(2):
            model(torch.randn(2, 5, 3)).sum().backward()
            opt.step()
            opt.zero_grad()
        te.log(loss=1.)
    df = te.t.df
    lf = validate(to_logframe(df, keep))
    assert set(lf.metadata.tensor_type)=={'Activation', 'Gradient', 'Weights', 'Weight_Gradients', 'Optimiser_State.exp_avg', 'Optimiser_State.exp_avg_sq'} | \
        ({'input'} if keep else set())
    weights = lf[lf.metadata.tensor_type=='Weights']
    assert set(weights.metadata.name)=={n for n,_ in model.named_parameters()}
    assert set(lf[lf.metadata.tensor_type=='Activation'].metadata.name)=={'', '0', '0.output_1.0', '0.output_1.1', '1'}
    assert [*lf.scalar_stats]==['mean', 'std', 'mean_abs', 'max_abs', 'min_abs', 'rm2', 'rm4', 'rm8']
    elements = {n: p.numel() for n,p in model.named_parameters()}
    assert (weights.exponent_counts.sum(axis=1).to_numpy()==[elements[n] for n in weights.metadata.name]).all()
    back = from_logframe(lf)
    assert back.path.tolist()==['' if m.count('.')==0 else m.split('.')[1].partition('(')[0] for m in df[df.ttype.isin(back.ttype.unique())].module]


def test_many_rows_convert_quickly():
    "Names are computed once for each tensor, not for each row."
    one = pd.DataFrame([dict(mean=1., module=f'model(M).h(L).{i}(B)', ttype='output', tname='output_0', step=0, call=0, dtype='float32',
        exponents=[1]*35, exponent_min=-16) for i in range(100)])
    df = pd.concat([one]*500, ignore_index=True)
    df['step'] = np.repeat(np.arange(500), 100)
    lf = to_logframe(df)
    assert lf.shape==(50_000, 5+1+35) and lf.metadata.name.nunique()==100
    assert from_logframe(lf).path.nunique()==100


def test_schema_reads_as_it_is_documented():
    assert set(LogFrame.schema)=={'metadata', 'scalar_stats', 'exponent_counts'}
    assert {*LogFrame.schema['exponent_counts']}=={-math.inf, math.inf, '*'}
