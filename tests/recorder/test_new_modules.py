"If modules are added to or removed from an armed model, the next step records the changed model."
import pytest
import torch
from compared import compiled, plain
from torch import nn

from torchember import EmberWarning, torchEmber


class Net(nn.Module):
    "A chain of modules. Modules can be appended."
    def __init__(self): super().__init__(); self.parts = nn.ModuleList([nn.Linear(3, 3), nn.Tanh()])
    def forward(self, x):
        for p in self.parts: x = p(x)
        return x


class Adapter(nn.Module):
    def __init__(self, base): super().__init__(); self.base,self.down = base,nn.Linear(3, 3, bias=False)
    def forward(self, x): return self.base(x)+self.down(x)


def step(model, opt, te=None, passes=1):
    for _ in range(passes): model(torch.randn(4, 3)).square().sum().backward()
    if opt: opt.step()
    if te: te.step()


def of_step(te, i, *ttypes):
    return [(r['module'].removeprefix('model(Net).parts(ModuleList).'), r['tname']) for r in plain(te) if r['step']==i and r['ttype'] in ttypes]


@pytest.mark.parametrize('given', [True, False], ids=['optimizer given', 'te.step'])
def test_a_new_layer_has_rows_from_the_next_step_on(given):
    "The new layer has rows of outputs, weights, updates and gradients without te.rearm()."
    model = Net()
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt if given else None, on_error='raise',
            ttypes=('input', 'output', 'output_grad', 'weight', 'weight_grad', *(['update'] if given else []))) as te:
        step(model, opt, None if given else te, 2)
        model.parts.append(nn.Linear(3, 2))
        opt.add_param_group({'params': model.parts[2].parameters()})
        step(model, opt, None if given else te, 2)
        assert not [m for m,_ in of_step(te, 0, 'output') if m.startswith('2')]
        new = [(t, n) for t in te.recorder.ttypes for m,n in of_step(te, 1, t) if m=='2(Linear)']
        want = [('input', 'input'), ('output', 'output_0'), ('output_grad', 'output_0'), ('weight', 'weight_0'), ('weight', 'weight_1'),
            ('weight_grad', 'grad_0'), ('weight_grad', 'grad_1'), *([('update', 'update_0'), ('update', 'update_1')] if given else [])]
        assert sorted(new)==sorted(want)
        assert [t.path for t in te.tracks]==['', 'parts', 'parts.0', 'parts.1', 'parts.2']
        te.recorder.sources.note_parameters()
        assert {p['path'] for p in te.recorder.sources.parameters.known.entries}=={'parts.0', 'parts.2'}
    assert all('_torchember' not in m.__dict__ and 'forward' not in m.__dict__ for m in model.modules())


def test_no_warning_and_no_rows_are_lost():
    "One layer is replaced. All layers have rows in the next step."
    model = Net()
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt, on_error='raise') as te:
        step(model, opt)
        old,model.parts[1] = model.parts[1],nn.ReLU()
        step(model, opt)
        first,second = (of_step(te, i, 'input', 'output', 'weight', 'weight_grad') for i in range(2))
        assert [(m.replace('Tanh', 'ReLU'), n) for m,n in first]==second
        assert '_torchember' not in old.__dict__ and 'forward' not in old.__dict__


def test_an_adapter_around_a_layer():
    "The wrapped layer has a new path. Its rows have the new name, and its weight still has one row per step."
    model = Net()
    with torchEmber(model, ends='step', on_error='raise') as te:
        step(model, None, te)
        model.parts[0] = Adapter(model.parts[0])
        step(model, None, te)
        assert of_step(te, 0, 'output')==[('0(Linear)', 'output_0'), ('1(Tanh)', 'output_0'), ('model(Net)', 'output_0')]
        assert of_step(te, 1, 'output')==[('0(Adapter).base(Linear)', 'output_0'), ('0(Adapter).down(Linear)', 'output_0'), ('0(Adapter)', 'output_0'),
            ('1(Tanh)', 'output_0'), ('model(Net)', 'output_0')]
        base = '0(Adapter).base(Linear)'
        assert of_step(te, 1, 'weight')==[(base, 'weight_0'), (base, 'weight_1'), ('0(Adapter).down(Linear)', 'weight_0')]


def test_include_holds_for_new_modules():
    model = Net()
    with torchEmber(model, include=nn.Linear, ends='step', on_error='raise') as te:
        step(model, None, te)
        model.parts.extend([nn.Linear(3, 2), nn.ReLU()])
        step(model, None, te)
        assert of_step(te, 1, 'output')==[('0(Linear)', 'output_0'), ('2(Linear)', 'output_0')]


def test_a_change_in_the_middle_of_a_step_counts_from_the_next_step_on():
    model = Net()
    with torchEmber(model, ends='step', on_error='raise') as te:
        step(model, None)
        model.parts.append(nn.Linear(3, 2))
        step(model, None, te)
        step(model, None, te)
        assert [m for m,_ in of_step(te, 0, 'output')]==['0(Linear)', '1(Tanh)', 'model(Net)']
        assert [m for m,_ in of_step(te, 1, 'output')]==['0(Linear)', '1(Tanh)', '2(Linear)', 'model(Net)']


def test_a_compiled_model_that_gets_a_layer():
    torch._dynamo.reset()
    model = Net()
    with torchEmber(model, ends='step', on_error='raise') as te:
        f = compiled(model, 'aot_eager')
        for i in range(3):
            if i==1: model.parts.append(nn.Linear(3, 2))
            f(torch.randn(4, 3)).square().sum().backward()
            te.step()
        assert of_step(te, 2, 'output')==[('0(Linear)', 'output_0'), ('1(Tanh)', 'output_0'), ('2(Linear)', 'output_0'), ('model(Net)', 'output_0')]


def test_a_selection_that_matches_nothing_any_more_is_a_warning():
    "The recorder warns, and the training continues."
    model = Net()
    with torchEmber(model, include='parts.0', ends='step', on_error='raise') as te:
        step(model, None, te)
        model.parts = nn.ModuleList()
        with pytest.warns(EmberWarning, match=r'model\(Net\) has new modules, which torchember could not begin to record.*te.rearm\(\)'):
            model(torch.randn(4, 3))
        model(torch.randn(4, 3))
