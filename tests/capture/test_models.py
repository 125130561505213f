"Arming a model changes no bit of results and gradients, and disarming leaves no attribute or hook behind."
import copy
import warnings

import pytest
import torch
from models import AlexNet, tensors, zoo

from torchember import torchEmber


def state_of(model):
    "Return each module's dict and hook tables, copied one level deep."
    return {n: {k: dict(v) if isinstance(v, dict) else v for k,v in m.__dict__.items()} for n,m in model.named_modules()}


def one_step(model, args, kwargs):
    "Return the outputs and gradients of one training step."
    torch.manual_seed(1)
    model.zero_grad()
    out = model(*args, **kwargs)
    got = tensors(out)
    loss = sum(t.float().square().mean() for t in got if t.requires_grad)
    if isinstance(loss, torch.Tensor): loss.backward()
    return [t.detach().clone() for t in got], [p.grad.clone() if p.grad is not None else None for p in model.parameters()]


def same(a, b):
    return len(a)==len(b) and all(x is y is None or torch.equal(x.to_dense(), y.to_dense()) for x,y in zip(a, b, strict=True))


@pytest.mark.parametrize('name', zoo)
def test_bit_identical_and_nothing_left(name):
    torch.manual_seed(0)
    model,args,kwargs = zoo[name]()
    plain = copy.deepcopy(model)
    want = one_step(plain, args, kwargs)
    before = state_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        te = torchEmber(model, on_error='raise')
        got = one_step(model, args, kwargs)
        te.step()
        report = te.close()
    assert same(want[0], got[0]) and same(want[1], got[1])
    after = state_of(model)
    assert before.keys()==after.keys()
    for n in before: assert before[n].keys()==after[n].keys(), n
    df = te.t.df
    assert report['errors']==report['skipped']==0 and len(df)
    rows = df.groupby('ttype').size()
    assert rows.get('weight', 0)==len(list(model.parameters()))
    assert rows.get('weight_grad', 0)==sum(g is not None for g in got[1])
    called = df[df.ttype=='output'].module.nunique()
    assert called>=1 and df[['module', 'ttype', 'tname', 'step', 'call']].duplicated().sum()==0


def test_alexnet_rows():
    "A pass of AlexNet has 64 rows, or 80 with weight gradients, in the order of the calls."
    torch.manual_seed(0)
    model = AlexNet()
    x = torch.randn(2, 3, 224, 224)
    te = torchEmber(model)
    loss = model(x).square().mean()
    assert len(te.modules)==24
    assert len(te.t.df)==len(te.t.latest_df)==64
    assert te.t.df.groupby('ttype').size().to_dict()=={'input': 24, 'output': 24, 'weight': 16}
    loss.backward()
    assert len(te.t.df)==64 # reading does not end the step; weight gradients are read when the next pass begins
    model(x)
    df = te.t.latest_df
    assert len(df)==80 and len(te.t.df)==144
    conv = df[df.module=='model(AlexNet).features(Sequential).0(Conv2d)']
    assert conv.tname.tolist()==['input', 'weight_0', 'grad_0', 'weight_1', 'grad_1', 'output_0']
    assert df.tname.iloc[:3].tolist()==['x', 'input', 'input'] and df.module.iloc[-1]=='model(AlexNet)'
    assert len(te.mt_log)==48 and te.mt_log[0]=='enter model(AlexNet)' and te.mt_log[-1]=='exit model(AlexNet)'
    weight = model.features[0].weight
    row = conv[conv.tname=='grad_0'].iloc[0]
    assert row['mean']==pytest.approx(weight.grad.double().mean().item(), rel=1e-5) and row['std']==pytest.approx(weight.grad.double().std().item(), rel=1e-6)
    assert te.t['structure_'+te.fname]==te.mod_tree()
    te.close()


def test_names_in_nests():
    model,args,kwargs = zoo['dicts']()
    with torchEmber(model) as te: model(*args, **kwargs)
    df = te.t.df
    root = df[df.module=='model(Dicts)']
    assert root.tname.tolist()==['x', 'mask', 'past.0.0', 'output_logits', 'output_state.0', 'output_state.1.0', 'output_past.0.0']
    cell = df[(df.module=='model(Dicts).cell(Linear)') & (df.ttype=='output')]
    assert cell.call.tolist()==[0, 1, 2]
    head = df[(df.module=='model(Dicts).head(Linear)') & (df.ttype=='output')]
    assert head.call.tolist()==[0, 1] and te.modules['model(Dicts).head(Linear)'].aliases==['twin']
    assert df[df.ttype=='weight'].groupby('module').size().to_dict()=={'model(Dicts).cell(Linear)': 2, 'model(Dicts).head(Linear)': 2}


def test_more_calls_than_rows():
    "A layer that is called a hundred times in a pass has a hundred output rows."
    cell = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(*[cell]*100)
    with torchEmber(model) as te: model(torch.randn(2, 3))
    df = te.t.df
    assert df[(df.ttype=='output') & df.module.str.contains('Linear')].call.tolist()==list(range(100))


def test_a_submodule_called_alone():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    te = torchEmber(model)
    model(torch.ones(1, 3))
    model[1](torch.ones(1, 3))
    assert len(te.t.latest_df)==10+2 and te.t.df.step.unique().tolist()==[0]
    model(torch.ones(1, 3))
    assert te.t.df.step.unique().tolist()==[0, 1]
    te.close()


def test_the_gradient_hint(recwarn):
    "If zero_grad is called before the next pass begins, the user gets one hint to call te.step()."
    model = torch.nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model)
    for _ in range(5):
        model(torch.ones(1, 3)).sum().backward()
        opt.step()
        opt.zero_grad()
    assert len([w for w in recwarn if 'te.step()' in str(w.message)])==1
    te.close()


@pytest.mark.parametrize('how', ['zero_grad first', 'te.step()', 'optimizer=', 'accumulated', 'off schedule'])
def test_no_hint_where_there_are_gradients(how, recwarn):
    "The hint to call te.step() is given only if gradient rows are missing."
    model = torch.nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt if how=='optimizer=' else None, every=2 if how=='off schedule' else 1) as te:
        for i in range(6):
            loss = model(torch.ones(1, 3)).sum()
            if how in ('zero_grad first', 'off schedule'): opt.zero_grad()
            loss.backward()
            opt.step()
            if how=='te.step()': te.step()
            if how in ('te.step()', 'optimizer=') or how=='accumulated' and i%2: opt.zero_grad()
    assert any(r['ttype']=='weight_grad' for r in te.t.lines())
    assert not [w for w in recwarn if 'te.step()' in str(w.message)]


def test_steps():
    "te.step() without a pass since the last step counts no step. Steps that are not recorded are counted."
    model = torch.nn.Linear(3, 1)
    te = torchEmber(model, every=2, ttypes='output')
    for _ in range(3): te.step()
    for _ in range(5):
        model(torch.ones(1, 3))
        te.step()
        te.step()
    assert te.t.df.step.tolist()==[0, 2, 4] and te.recorder.step==5
    te.log_model()
    assert te.t.latest_df.ttype.tolist()==['weight', 'weight'] and te.t.latest_df.step.unique().tolist()==[5]
    te.close()
