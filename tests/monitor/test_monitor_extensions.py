"Users' extensions: quantities read the tensors of the tracked step, of the forward and of the backward."
import json

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from torchember import Extension, ForwardOutputExtension, Monitor, MultiStepQuantity, SingleStepQuantity, read


class OutputSum(Extension):
    def __init__(self): self._name = 'mine'
    def _default(self, module, input, output): return output.sum()

class GradSum(Extension): # without `backward = True`, because `backward_extensions` returns this extension
    def __init__(self): self._name = 'mine_back'
    def _default(self, module, grad_input, grad_output): return torch.stack([grad_input[0].sum(), grad_output[0].sum()])

class Mine(SingleStepQuantity):
    def _compute(self, step): return self._module.mine
    def forward_extensions(self): return [OutputSum()]

class MineBack(SingleStepQuantity):
    def _compute(self, step): return self._module.mine_back
    def backward_extensions(self): return [GradSum()]

class BothWays(SingleStepQuantity):
    def _compute(self, step): return torch.stack([self._module.mine, *self._module.mine_back])
    def forward_extensions(self): return [OutputSum()]
    def backward_extensions(self): return [GradSum()]

class Window(MultiStepQuantity):
    def _compute_ones(self, step): return self._module.mine
    def _compute(self, step): return torch.stack(self.cache)
    def forward_extensions(self): return [OutputSum()]


def steps_of(model, config, n=6, run=None):
    "Train with a monitor. Return it, and for each step the sums of the output and of the input gradient."
    monitor,seen = Monitor(model, config),[]
    for step in range(n):
        x = torch.full((2, 3), 1.+step, requires_grad=True)
        y = model[0](x).detach()
        (run or model)(x).square().sum().backward()
        monitor.track(step)
        seen.append((y.sum().item(), x.grad.sum().item()))
    return monitor, seen


@pytest.mark.parametrize('compiled', [False, True])
def test_values_of_each_step_forward_and_backward(compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3))
    run = torch.compile(model, backend='aot_eager', fullgraph=True) if compiled else None
    monitor,seen = steps_of(model, {'0': [Mine, MineBack, BothWays, [Window, 'linear(3, 2)']]}, run=run)
    got = monitor.get_output()['0']
    assert [list(got[q]) for q in ('Mine', 'MineBack', 'BothWays')]==[list(range(6))]*3 and list(got['Window'])==[2, 5]
    for step,(y,gx) in enumerate(seen):
        np.testing.assert_allclose(got['Mine'][step], y, rtol=1e-5)
        out = model[0](torch.full((2, 3), 1.+step)).detach()
        np.testing.assert_allclose(got['MineBack'][step], [gx, 2*out.sum().item()], rtol=1e-4)
        np.testing.assert_allclose(got['BothWays'][step], [y, gx, 2*out.sum().item()], rtol=1e-4)
    np.testing.assert_allclose(got['Window'][5], [seen[s][0] for s in (3, 4, 5)], rtol=1e-5)
    assert not {'mine', 'mine_back'} & set(model[0].__dict__)
    rows = read(monitor.t)
    assert rows[rows['Mine'].notna()][['step', 'path', 'ttype', 'call']].values.tolist()==[[s, '0', 'input', 0] for s in range(6)]
    assert rows[rows['MineBack'].notna()][['step', 'path', 'ttype', 'call']].values.tolist()==[[s, '0', 'input_grad', 0] for s in range(6)]


class OutputMax(OutputSum):
    def _default(self, module, input, output): return output.max()

class Highest(Mine):
    def forward_extensions(self): return [OutputMax()]

class Scaled(Extension):
    def __init__(self, by): self._name,self.by = 'mine',by
    def _default(self, module, input, output): return output.sum()*self.by

class Twice(Mine):
    def forward_extensions(self): return [Scaled(2)]

class Thrice(Mine):
    def forward_extensions(self): return [Scaled(3)]


def test_two_extensions_with_one_name():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3))
    monitor,seen = steps_of(model, {'0': [Mine, Highest, Twice, Thrice]}, 3)
    got = monitor.get_output()['0']
    for step,(y,_) in enumerate(seen):
        out = model[0](torch.full((2, 3), 1.+step)).detach()
        np.testing.assert_allclose([got[q][step] for q in ('Mine', 'Highest', 'Twice', 'Thrice')], [y, out.max().item(), 2*y, 3*y], rtol=1e-5)


class Counted(OutputSum):
    calls = 0
    def _default(self, module, input, output):
        Counted.calls += 1
        return output.sum()

class Asks(Mine):
    def forward_extensions(self): return [Counted()]

class AsksToo(Asks): pass


def test_equal_extensions_run_once_per_step():
    Counted.calls,model = 0,nn.Sequential(nn.Linear(3, 3))
    steps_of(model, {'0': [Asks, AsksToo]}, 4)
    assert Counted.calls==4


class Hidden(Extension):
    def __init__(self): self._name = 'hidden'
    def _LSTM(self, module, input, output): return output[0].norm()

class HiddenNorm(SingleStepQuantity):
    def _compute(self, step): return self._module.hidden
    def forward_extensions(self): return [Hidden()]

class BuiltIn(SingleStepQuantity):
    def _compute(self, step): return self._module.output.norm()
    def forward_extensions(self): return [ForwardOutputExtension()]


def test_extension_receives_a_tuple_output():
    torch.manual_seed(0)
    model = nn.ModuleDict({'lstm': nn.LSTM(3, 4, batch_first=True)})
    monitor = Monitor(model, {'lstm': [HiddenNorm, BuiltIn]})
    for step in range(2):
        y,_ = model['lstm'](torch.randn(2, 5, 3))
        y.sum().backward()
        monitor.track(step)
        got = monitor.get_output()['lstm']
        np.testing.assert_allclose([got[q][step] for q in ('HiddenNorm', 'BuiltIn')], [y.norm().item()]*2, rtol=1e-6)


def test_missing_tensor_is_not_taken_from_an_earlier_step():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    monitor = Monitor(model, {'1': [Mine]}, on_error='raise')
    model(torch.ones(2, 3)).sum().backward()
    monitor.track(0)
    model[0](torch.ones(2, 3)).sum().backward() # layer 1, which has the quantity, is not called
    with pytest.raises(AttributeError, match='mine'): monitor.track(1)


def test_last_call_counts_without_a_monitor():
    layer = nn.Linear(3, 3)
    q = Mine(layer)
    layer.register_forward_hook(OutputSum())
    for step in range(3): y = layer(torch.full((2, 3), float(step))); q.track(step)
    np.testing.assert_allclose(q.get_output()[2], y.sum().item(), rtol=1e-6)
    assert list(q.get_output())==[0, 1, 2] and q.get_output()[0]!=q.get_output()[2]


class Nested(SingleStepQuantity):
    def _compute(self, step): return {'sum': self._module.mine, 'both': [self._module.mine, torch.ones(2)], 'given': 3}
    def forward_extensions(self): return [OutputSum()]


# with 50, few values stay in memory, and older values are read from the log
@pytest.mark.parametrize('most', [4_000_000, 50])
def test_numbers_are_numpy_scalars(most, monkeypatch):
    monkeypatch.setattr('torchember.monitor.monitor.QuantityValues.most_numbers', most)
    monitor,seen = steps_of(nn.Sequential(nn.Linear(3, 3)), {'0': [Mine, 'InputMean', 'WeightNorm']})
    got = monitor.get_output()['0']
    assert [list(got[q]) for q in ('Mine', 'InputMean', 'WeightNorm')]==[list(range(6))]*3
    for v in (*got['Mine'].values(), *got['WeightNorm'].values()): # a 0-d array, and a number
        assert (v.size, v.shape, v.ndim, v.dtype.kind)==(1, (), 0, 'f') and v.item()==v and isinstance(v, float) and json.loads(json.dumps(v))==v
    assert all(v.shape==(3,) for v in got['InputMean'].values()) and pd.DataFrame({'mine': got['Mine']}).dtypes['mine']=='float64'
    np.testing.assert_allclose([v.item() for v in got['Mine'].values()], [y for y,_ in seen], rtol=1e-5)


def test_numbers_inside_values_are_numpy_scalars():
    monitor,seen = steps_of(nn.Sequential(nn.Linear(3, 3)), {'0': [Nested]}, 2)
    for step,v in monitor.get_output()['0']['Nested'].items():
        np.testing.assert_allclose([v['sum'].item(), v['both'][0].item(), v['given'].item()], [seen[step][0]]*2+[3], rtol=1e-5)
        assert v['both'][1].tolist()==[1, 1]
    q = Mine(layer := nn.Linear(3, 3))
    layer.register_forward_hook(OutputSum())
    y = layer(torch.ones(2, 3))
    q.track(7)
    assert q.get_output()[7].size==1 and abs(q.get_output()[7].item()-y.sum().item())<1e-6
