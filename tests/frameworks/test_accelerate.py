"Tests of models prepared by Accelerate, which wraps optimizer and forward: rows equal a plain loop, and all patches are removed"
import pytest
import torch
from looped import ALL, Net, batches, by_hand, heard, loss_of, momentum, same, seeded, steps, table
from oracle import says
from torch import nn

from torchember import torchEmber


@pytest.fixture
def accelerate():
    "Return the module accelerate, with its global state reset."
    library = pytest.importorskip('accelerate')
    from accelerate.state import AcceleratorState, GradientState
    def forget(): AcceleratorState._reset_state(True); GradientState._reset_state()
    forget()
    yield library
    forget()


def plain(accumulate=1):
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te: by_hand(model, opt, batches(), accumulate)
    return table(te)


@pytest.mark.parametrize('given,armed', [('as it was', 'before'), ('as it was', 'after'), ('prepared', 'after')])
@pytest.mark.parametrize('accumulate', [1, 2])
def test_prepare(accelerate, given, armed, accumulate):
    "The ember accepts the original and the prepared optimizer. With `accumulate()`, most calls of `step` do nothing."
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    def go(arms):
        model,te = seeded(),None
        opt = momentum(model)
        if arms and armed=='before': te = torchEmber(model, optimizer=opt, ttypes=ALL)
        model,prepared = accelerator.prepare(model, opt)
        if arms and armed=='after': te = torchEmber(model, optimizer=prepared if given=='prepared' else opt, ttypes=ALL)
        for x,y in batches():
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x, y))
                prepared.step()
                prepared.zero_grad()
        if te: te.close()
        return te, [x.__dict__.keys() for x in (*model.modules(), opt, prepared)], len(opt._optimizer_step_pre_hooks)+len(opt._optimizer_step_post_hooks)
    with heard() as said: te,keys,hooks = go(True)
    same(table(te), plain(accumulate))
    assert not said and hooks==0 and keys==go(False)[1]


def test_validation(accelerate):
    accelerator = accelerate.Accelerator(cpu=True)
    model = seeded()
    model,opt = accelerator.prepare(model, momentum(model))
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        for x,y in batches():
            accelerator.backward(loss_of(model, x, y))
            opt.step()
            opt.zero_grad()
            model.eval()
            with torch.no_grad(): model(torch.full_like(x, 100.))
            model.train()
    same(table(te, phase=None), plain())
    assert [(r['step'], r['mean']) for r in table(te, 'input', phase='eval', tname='x').values()]==[(s, 100) for s in (0, 1, 2, 3)]


@pytest.mark.parametrize('broken', [False, True])
@pytest.mark.parametrize('given', [True, False], ids=['given, too', ''])
def test_a_scaler_within(broken, given):
    "With a loss scaler, an AcceleratedOptimizer replaces `step` of the inner optimizer during each step."
    AcceleratedOptimizer = pytest.importorskip('accelerate.optimizer').AcceleratedOptimizer
    pytest.importorskip('accelerate').Accelerator(cpu=True)
    tables = []
    for wrapped in (False, True):
        model,scaler = seeded(),torch.amp.GradScaler('cpu', init_scale=256.)
        opt = momentum(model)
        outer = AcceleratedOptimizer(opt, scaler=scaler) if wrapped else opt
        with torchEmber(model, optimizer=outer, scaler=scaler if given or not wrapped else None, ttypes=ALL) as te:
            for i,(x,y) in enumerate(batches()):
                scaler.scale(loss_of(model, x, y)*(float('inf') if broken and i==1 else 1)).backward()
                if wrapped: outer.step()
                else: scaler.step(opt); scaler.update()
                outer.zero_grad()
        assert steps(te)==[0, 1, 2, 3]
        assert {r['step'] for r in te.t.lines() if r.get('skipped')}==({1} if broken else set())
        tables.append(table(te))
    same(*reversed(tables))


@pytest.mark.parametrize('armed', ['before', 'after'])
def test_mixed_precision_and_unwrapping(accelerate, armed):
    "`unwrap_model(keep_fp32_wrapper=False)` unwraps the forward of bf16 training: then the model equals one that was never armed."
    x,_ = batches()[0]
    def go(arms):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision='bf16')
        model,te,out = seeded(),None,[]
        if arms and armed=='before': te = torchEmber(model)
        model = accelerator.prepare(model)
        if arms and armed=='after': te = torchEmber(model)
        out.append(model(x))
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        out.append(model(x))
        if te: te.close()
        out.append(model(x))
        return model, out, te
    model,got,te = go(True)
    twin,want,_ = go(False)
    assert all(torch.equal(a, b) for a,b in zip(got, want, strict=True))
    assert 0 in steps(te)
    if armed=='after':
        for a,b in zip(model.modules(), twin.modules(), strict=True): assert a.__dict__.keys()==b.__dict__.keys()
        assert model.forward.__func__ is twin.forward.__func__ is Net.forward
    assert not any('torchember' in k for m in model.modules() for k in m.__dict__)


@pytest.mark.parametrize('armed', ['before', 'after'])
def test_mixed_precision(accelerate, armed):
    "In bf16, losses equal those without recording bit for bit, and rows do not depend on the order of preparing and arming."
    def go(arms):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision='bf16')
        model,losses,te = seeded(),[],None
        opt = momentum(model)
        if arms=='before': te = torchEmber(model, optimizer=opt, ttypes=ALL)
        model,prepared = accelerator.prepare(model, opt)
        if arms=='after': te = torchEmber(model, optimizer=prepared, ttypes=ALL)
        for x,y in batches():
            loss = loss_of(model, x, y)
            accelerator.backward(loss)
            prepared.step()
            prepared.zero_grad()
            losses.append(loss.item())
        if te: te.close()
        return losses, te
    want,_ = go(None)
    got,te = go(armed)
    assert got==want and steps(te)==[0, 1, 2, 3]
    hidden = [r['dtype'] for r in table(te, 'output').values() if r['module'].endswith('.a(Linear)')]
    assert hidden==['bfloat16']*4 and len(table(te, 'weight_grad'))==16


# ---- weights that are offloaded

def two(): return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def offload(library, model, how, folder):
    if how=='cpu_offload': return library.cpu_offload(model, execution_device='cpu')
    if how=='disk_offload': return library.disk_offload(model, folder, execution_device='cpu')
    return library.dispatch_model(model, {'0': 'cpu', '1': 'disk'}, main_device='cpu', offload_dir=folder)


ways = pytest.mark.parametrize('how', ['cpu_offload', 'disk_offload', 'dispatch_model'])


@ways
def test_offloaded_before_arming(accelerate, how, tmp_path):
    "Offloaded weights exist only during the forward that was wrapped before arming: one warning explains this."
    model,x = seeded(two),batches()[0][0]
    want = model(x)
    model = offload(accelerate, model, how, str(tmp_path))
    with heard() as said, torchEmber(model) as te:
        for _ in range(3): assert torch.equal(model(x), want)
    assert len(said)==1 and ('meta' in said[0] or 'offload' in said[0]) and 'autocast' not in said[0], said
    assert len(table(te, 'output'))==9
    assert torch.equal(model(x), want)


@ways
def test_offloaded_after_arming(accelerate, how, tmp_path):
    "If weights are offloaded after arming, the patched forward runs while the weights are present."
    model,x = seeded(two),batches()[0][0]
    want,ws = model(x),[p.detach().clone() for p in model.parameters()]
    with heard() as said, torchEmber(model) as te:
        model = offload(accelerate, model, how, str(tmp_path))
        for _ in range(3): assert torch.equal(model(x), want)
    assert not said
    for s in range(3):
        for r,w in zip(table(te, 'weight', step=s).values(), ws, strict=True): says(r, w)
    assert torch.equal(model(x), want)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    n = len(te.t.lines())
    assert torch.equal(model(x), want) and len(te.t.lines())==n


def test_hooks_that_leave_the_weights(accelerate):
    "With a hook of Accelerate that moves no weights, weights and gradients are recorded, in either order."
    from accelerate.hooks import ModelHook, add_hook_to_module
    for first in (False, True):
        model = seeded()
        opt = momentum(model)
        if first: [add_hook_to_module(m, ModelHook()) for m in model.modules()]
        with heard() as said, torchEmber(model, optimizer=opt, ttypes=ALL) as te:
            if not first: [add_hook_to_module(m, ModelHook()) for m in model.modules()]
            by_hand(model, opt, batches())
        assert not said
        same(table(te), plain())
