"A patched forward computes the same as the original: with wrappers, unusual arguments, other modes, and statistics that call it."
import warnings

import pytest
import torch
from models import mlp, x
from torch import nn

from torchember import Monitor, from_activation, torchEmber


def test_wrapped_while_armed_and_armed_again():
    "The forward of an armed module is wrapped (as by accelerate) and armed again. Each call has one row, and all is restored."
    m = nn.Linear(4, 2)
    te = torchEmber(m)
    old = m.forward
    m.forward = wrapper = lambda *a, **k: old(*a, **k)
    te.rearm()
    want = nn.functional.linear(x(), m.weight, m.bias)
    assert torch.equal(m(x()), want) and len([r for r in te.t.lines() if r['ttype']=='output'])==1
    te.disarm()
    assert m.forward is wrapper and torch.equal(m(x()), want)
    n = nn.Linear(4, 2)
    te = torchEmber(n)
    kept = n.forward
    te.disarm()
    n.forward = kept
    te = torchEmber(n)
    assert n(x()).shape==(2, 2)
    te.close()
    assert not hasattr(nn.Linear(1, 1).forward, '__wrapped__')


def test_nested_tensors_are_skipped():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=True).eval()
    inp,mask = torch.randn(2, 5, 16),torch.tensor([[False]*5, [False]*3+[True]*2])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        want = model(inp, src_key_padding_mask=mask)
        with torchEmber(model) as te: got = model(inp, src_key_padding_mask=mask)
    assert torch.equal(want, got) and te.t.lines()


def test_arguments_that_cannot_be_searched():
    class Lazy(dict):
        def items(self): raise RuntimeError('not loaded')
    class Takes(nn.Module):
        def forward(self, x, other): return x
    deep = x()
    for _ in range(3000): deep = (deep,)
    model = Takes()
    te = torchEmber(model)
    for other in (Lazy(a=1), deep, list(range(1_000_000))):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            assert torch.equal(model(x(), other), x())
    te.close()


def test_inference_mode_and_in_place():
    model = mlp()
    inp = torch.randn(50, 4)
    with torch.inference_mode(), torchEmber(model) as te: model(inp)
    relu = [r for r in te.t.lines() if 'ReLU' in r['module'] and r['ttype']=='output']
    assert relu[0]['min']==0


def test_a_statistic_that_calls_the_model():
    model = mlp()
    te = torchEmber(model, include='0', on_error='raise')
    te.how_record_out(lambda t: {'top': model(t).max(), 'head': model[2](t).sum()})
    model(x())
    assert len([r for r in te.t.lines() if r['ttype']=='output'])==1
    te.close()


def test_a_statistic_that_writes():
    model = nn.Linear(4, 2)
    te = torchEmber(model)
    @te.how_record_in
    def careless(tensor): return {'m': tensor.abs_().max()}
    with pytest.warns(UserWarning, match='careless changed the tensor in place'): model(-x())
    te.close()


@pytest.mark.parametrize('arm,stop', [(torchEmber, lambda a: a.disarm()), (from_activation, lambda a: a.remove()),
    (lambda m: Monitor(m, {'0': ['InputMean']}), lambda a: a.close())], ids=['ember', 'activations', 'monitor'])
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_scripting_an_armed_model_gives_a_clear_error(arm, stop):
    "The error message explains the cause and the solution: the model can be scripted after disarming."
    class Own(nn.Module):
        def __init__(self): super().__init__(); self.l = nn.Linear(4, 2)
        def forward(self, x): return self.l(x)
    inp = x()
    for model in (nn.Sequential(nn.Linear(4, 2)), nn.Sequential(Own())):
        armed,want = arm(model),model(inp)
        for m in (model, model[0], nn.Sequential(model, nn.ReLU())):
            with pytest.raises(TypeError, match=r'torch.jit.script compiles the source .* of this (Sequential|Linear|Own) .*disarm\(\).*script the model'):
                torch.jit.script(m)
        traced = torch.jit.trace(model, inp)
        stop(armed)
        assert '__prepare_scriptable__' not in model.__dict__ and not hasattr(model, '__prepare_scriptable__')
        scripted = torch.jit.script(model)
        assert torch.equal(scripted(inp), want) and torch.equal(traced(inp), want)


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_a_scripted_part_of_an_armed_model_can_be_scripted_again():
    part = torch.jit.script(nn.Linear(4, 2))
    with torchEmber(part):
        inp = x()
        assert torch.equal(torch.jit.script(nn.Sequential(part, nn.Identity()))(inp), part(inp))
