"Readers of a run give no numpy warnings for data that are NaN, infinite, masked, empty or constant"
import warnings

import matplotlib
import numpy as np
import pytest
import torch
from torch import nn

import torchember
from torchember import brief, diagnose, diff, read, report, torchEmber

matplotlib.use('agg')
inf,nan = float('inf'),float('nan')


class Odd(nn.Module):
    "A model with a given mask, a constant output, an empty tensor and a BatchNorm"
    def __init__(self):
        super().__init__()
        self.body,self.norm,self.act,self.same,self.head = nn.Linear(8, 8),nn.BatchNorm1d(8),nn.ReLU(),nn.Identity(),nn.Linear(8, 4)
        self.drop,self.zero = nn.Dropout(.5),nn.Linear(8, 4)
        nn.init.zeros_(self.zero.weight); nn.init.zeros_(self.zero.bias)

    def forward(self, x, mask, more):
        y = self.drop(self.act(self.norm(self.body(x))))
        self.same(mask); self.same(more)
        return self.head(y)+self.zero(y)


tensors = {
    'mask': torch.triu(torch.full((8, 8), -inf), 1), 'all masked': torch.full((8, 8), -inf), 'inf': torch.full((8, 8), inf), 'nan': torch.full((8, 8), nan),
    'both': torch.tensor([[inf, -inf], [nan, 0.]]), 'zero': torch.zeros(8, 8), 'empty': torch.zeros(0, 8), 'scalar': torch.tensor(3.),
    'huge': torch.full((4, 4), 3e38), 'tiny': torch.full((4, 4), 1e-45), 'double': torch.full((4, 4), 1e300, dtype=torch.float64),
    'half': torch.full((4, 4), 6e4, dtype=torch.float16), 'complex': torch.full((2, 2), complex(inf, 0)), 'whole': torch.zeros(3, dtype=torch.int64)}


def train(name, mask, bad_loss=None, n=30, stats='full', scale=1.):
    "Train a model with an unusual kind of tensor, and evaluate it between the steps"
    torch.manual_seed(0)
    m = Odd()
    opt = torch.optim.Adam(m.parameters(), lr=.01)
    ttypes = 'input', 'output', 'weight', 'weight_grad', 'update', 'buffer', 'optimizer', 'output_grad'
    te = torchEmber(m, optimizer=opt, name=name, stats=stats, ttypes=ttypes)
    empty = torch.zeros(0, 3)
    for i in range(n):
        loss = m(torch.randn(16, 8)*scale, mask, empty).square().mean()
        if bad_loss is not None and i>=n//2: loss = loss*bad_loss
        te.log(loss=loss)
        loss.backward(); opt.step(); opt.zero_grad()
        if i%5==4:
            m.eval()
            with torch.no_grad(): m(torch.randn(16, 8), mask if i%2 else torch.zeros(8, 8), empty)
            m.train()
    te.close()
    return te


def look_at(name, tmp_path):
    "Call all functions that read a run, with numpy warnings as errors."
    with warnings.catch_warnings():
        warnings.simplefilter('error', RuntimeWarning)
        warnings.filterwarnings('error', message='The rule')
        df = read(name)
        found = diagnose(name)
        brief(name)
        report(name, tmp_path/'run.html')
        torchember.overview(name)
        torchember.summary(name)
        torchember.scalar_global_heatmap(name, ttype='output', stat='std')
        torchember.scalar_line(name, 'same', 'output', 'std')
        torchember.updates(name)
        diff(name, name)
        torchember.wide(name, ttype='output', stat='std')
    matplotlib.pyplot.close('all')
    return df,found


cases = [*((k, dict(mask=t)) for k,t in tensors.items()), *((f'loss {v}', dict(bad_loss=v)) for v in (nan, inf, -inf, 0., 1e30)),
    *((f'data {v}', dict(scale=v)) for v in (0., 1e20, nan, inf))]

often = 'mask', 'both', 'empty', 'loss inf', 'data nan' # Cases of each test run; the remaining cases are slow


@pytest.mark.filterwarnings('ignore::torchember.EmberWarning')
@pytest.mark.parametrize('how', [pytest.param(how, id=k, marks=() if k in often else pytest.mark.slow) for k,how in cases])
def test_a_run_of_odd_numbers_gives_no_numpy_warning(how, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter('error', RuntimeWarning)
        train('odd', **dict(mask=tensors['mask']) | how)
    df,_ = look_at('odd', tmp_path)
    assert len(df[df.path=='same'])>40


def test_a_mask_in_evaluations_is_not_reported_as_another_size():
    "An infinite rms is ignored in the comparison of training and evaluation"
    train('odd', tensors['mask'])
    assert diagnose('odd').rule.tolist().count('train_eval')==0
    assert np.isinf(read('odd', path='same', ttype='output')['rms']).any()
