"Rows keep the names of modules and tensors that the user or torch copies, replaces or creates again."
import copy
import io
import warnings

import pytest
import torch
from looped import ALL, batches, by_hand, heard, momentum, said_of_parameters, seeded, steps, table
from torch import nn

from torchember import torchEmber


def independent(copied, model, x):
    "Check that the copied model is not armed, and that it computes with its own weights."
    assert not hasattr(copied, 'disarm') and not getattr(getattr(copied, 'te', None), 'armed', False)
    # `original1` of weight_norm is only a direction and must not be zero
    with torch.no_grad(): [p.zero_() for n,p in copied.named_parameters() if not n.endswith('original1')]
    assert not copied(x).any() and model(x).any()


def through_a_file(model):
    f = io.BytesIO()
    torch.save(model, f)
    f.seek(0)
    return torch.load(f, weights_only=False)


@pytest.mark.parametrize('how', [copy.deepcopy, through_a_file])
def test_an_ember_kept_on_the_model(how):
    model = seeded()
    model.te = torchEmber(model, optimizer=momentum(model))
    x,_ = batches()[0]
    model(x)
    copied = how(model)
    n = len(model.te.t.lines())
    copied(x)
    assert len(model.te.t.lines())==n and model.te.armed
    independent(copied, model, x)
    model.te.close()


def test_a_parametrization_that_comes_later():
    "weight_norm is applied to an armed model. Outputs and copies stay correct, and its parameters have rows without te.rearm()."
    from torch.nn.utils.parametrizations import weight_norm
    def run(armed):
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        te = torchEmber(model) if armed else None
        weight_norm(model[0])
        return te, model
    x,_ = batches()[0]
    _,twin = run(False)
    with heard() as said:
        te,model = run(True)
        for _ in range(3): assert torch.equal(model(x), twin(x))
        copied = copy.deepcopy(model)
    assert not said
    assert torch.equal(copied(x), twin(x)) and not hasattr(copied, 'disarm')
    with torch.no_grad(): copied[0].parametrizations.weight.original0.zero_(); copied[0].bias.zero_()
    assert not copied(x).any() and torch.equal(model(x), twin(x))
    names = {r['pname'] for r in te.t.lines() if r['step']==max(steps(te)) and r['ttype']=='weight'}
    assert names=={'original0', 'original1', 'bias'}
    te.close()
    for a,b in zip(model.modules(), twin.modules(), strict=True): assert a.__dict__.keys()==b.__dict__.keys()
    assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize('with_optimizer', [False, True])
def test_tensors_are_swapped(with_optimizer):
    "With torch's swap option, model.double() swaps the parameters. This fails if another object refers to them."
    model,x = seeded(),batches()[0][0]
    opt = momentum(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torchEmber(model, ttypes=ALL if with_optimizer else ('input', 'output', 'weight'), optimizer=opt if with_optimizer else None) as te:
            for dtype in (torch.float32, torch.float64):
                model.to(dtype)
                out = model(x.to(dtype))
                if with_optimizer: out.sum().backward(); opt.step(); opt.zero_grad()
                del out
    finally: torch.__future__.set_swap_module_params_on_conversion(False)
    assert {(r['step'], r['dtype']) for r in table(te, 'weight').values()}=={(0, 'float32'), (1, 'float64')}


@pytest.mark.parametrize('action', ['always', 'error'])
def test_weights_that_are_no_leaves(action):
    "functional_call runs with computed parameters. torchember must not cause torch's warning about .grad of a non-leaf tensor."
    model,x = seeded(),batches()[0][0]
    with warnings.catch_warnings(record=action=='always') as said:
        warnings.simplefilter(action)
        with torchEmber(model, ttypes=('output', 'weight', 'weight_grad')) as te:
            torch.func.functional_call(model, {n: 2*p for n,p in model.named_parameters()}, x).sum().backward()
    assert not said
    said_of_parameters(te, 'weight', [{n: 2*p for n,p in model.named_parameters()}])


def test_a_model_on_meta():
    with heard() as said:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to('meta')
        with torchEmber(model): [model(torch.ones(1, 3, device='meta')) for _ in range(3)]
    assert len(said)==1 and 'meta' in said[0] and 'autocast' not in said[0]


def weights_by_name(te, step):
    return {r['pname']: r['shape'] for r in te.t.lines() if r['step']==step and r['ttype']=='weight'}


def test_a_parameter_that_comes_anew_keeps_its_name():
    "Pruning removes the parameter `weight` and registers `weight_orig` after the bias."
    from torch.nn.utils import prune
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3)))
    opt = momentum(model)
    with heard() as said, torchEmber(model, optimizer=opt, ttypes=('weight', 'weight_grad', 'update')) as te:
        by_hand(model, opt, batches(2))
        prune.l1_unstructured(model[0], 'weight', .5)
        by_hand(model, opt, batches(2))
    assert not said
    assert weights_by_name(te, 0)=={'weight': [3, 4], 'bias': [3]} and weights_by_name(te, 3)=={'bias': [3], 'weight_orig': [3, 4]}


def test_a_submodule_that_is_replaced():
    "A new module has rows, and the removed module has none. A module that is replaced by its compiled version keeps its rows."
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)))
    with heard() as said, torchEmber(model, ttypes=('output', 'weight')) as te:
        x,_ = batches()[0]
        model(x)
        model[1],old = nn.Linear(3, 3),model[1]
        model(x)
        old(torch.ones(1, 3))
    assert not said
    rows = [(r['module'], r['ttype'], r.get('pname')) for r in te.t.lines() if r['step']==1]
    assert rows==[('model(Sequential).0(Linear)', 'weight', 'weight'), ('model(Sequential).0(Linear)', 'weight', 'bias'),
        ('model(Sequential).0(Linear)', 'output', None), ('model(Sequential).1(Linear)', 'weight', 'weight'),
        ('model(Sequential).1(Linear)', 'weight', 'bias'), ('model(Sequential).1(Linear)', 'output', None), ('model(Sequential)', 'output', None)]
    with heard() as said, torchEmber(model, ttypes=('weight',)) as te:
        model(x)
        model[1] = torch.compile(model[1], backend='eager')
        model(x)
    assert not said and len([r for r in te.t.lines() if r['step']==1])==4
