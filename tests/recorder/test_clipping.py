"Gradients are recorded as they were before clipping, and torch's clipping functions return the same results as without torchember."
from tensor_rows import lines
import functools
import pickle
import sys

import pytest
import torch
from looped import Net, batches, by_hand, grads, loss_of, momentum, said_of_parameters, seeded, table
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad_norm_ as imported_by_name

from torchember import torchEmber
from torchember.capture.clipping import ClippingWatch
from torchember.capture.private_torch import norm_clipper
from torchember.health.diagnose import load_history

both = ('weight_grad', 'unclipped_grad')
names = 'clip_grad_norm_','clip_grad_value_','clip_grads_with_norm_','_clip_grads_with_norm_'
functions = [(place, name) for place in (utils, utils.clip_grad) for name in names]


def now(): return [getattr(place, name, None) for place,name in functions]


@pytest.fixture(autouse=True)
def as_before():
    before = now()
    yield
    assert now()==before


def clipped(clip, te_options=None, data=None, make=Net):
    "Train with the clipping function `clip`. Return the ember, and the gradients of each step before and after clipping."
    model = seeded(make)
    opt,before,after = momentum(model),[],[]
    with torchEmber(model, opt, **{'ttypes': both, **(te_options or {})}) as te:
        for x,y in data or batches():
            opt.zero_grad()
            loss_of(model, x, y).backward()
            before.append(grads(model))
            clip(model)
            after.append(grads(model))
            opt.step()
    return te, before, after


ways = {
    'norm': lambda m: utils.clip_grad_norm_(m.parameters(), .01),
    'value': lambda m: utils.clip_grad_value_(parameters=m.parameters(), clip_value=.001),
    'other place': lambda m: utils.clip_grad.clip_grad_norm_([*m.parameters()], max_norm=.01, norm_type=1.),
    'iterator': lambda m: nn.utils.clip_grad_norm_(iter(m.parameters()), .01, foreach=False)}


@pytest.mark.parametrize('clip', ways.values(), ids=ways)
def test_gradients_before_and_after_clipping_have_rows(clip):
    te,before,after = clipped(clip)
    said_of_parameters(te, 'unclipped_grad', before)
    said_of_parameters(te, 'weight_grad', after)
    assert any(not torch.equal(v, after[0][k]) for k,v in before[0].items())


@pytest.mark.skipif(norm_clipper is None, reason='before torch 2.6 the function calls no helper')
def test_a_function_imported_by_name_before_the_run_gives_the_same_rows():
    "All columns of the rows and the norms of all gradients are compared."
    runs = [clipped(lambda m, clip=clip: clip(m.parameters(), .01)) for clip in (imported_by_name, lambda *a: utils.clip_grad_norm_(*a))]
    said_of_parameters(runs[0][0], 'unclipped_grad', runs[0][1])
    said_of_parameters(runs[0][0], 'weight_grad', runs[0][2])
    def rows(te): return [{k: v for k,v in r.items() if k!='ts'} for r in lines(te)]
    def scalars(te): return [(r.step, r.grad_norm, r.grad_norm_unclipped) for r in te.t.df.itertuples() if r.tname=='grad_norm']
    assert rows(runs[0][0])==rows(runs[1][0]) and scalars(runs[0][0])==scalars(runs[1][0])
    want = [float(sum((g.double()**2).sum() for g in b.values())**.5) for b in runs[0][1]]
    assert [s[2] for s in scalars(runs[0][0])]==pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize('clip', [imported_by_name, lambda *a: utils.clip_grad_norm_(*a), lambda *a: utils.clip_grad.clip_grad_norm_(*a)],
    ids=['by name', 'utils', 'clip_grad'])
def test_each_call_is_reported_once(clip):
    "A call is reported once, although both the clipping function and its helper are replaced."
    if clip is imported_by_name and norm_clipper is None: pytest.skip('before torch 2.6 the function calls no helper')
    reports = []
    class Listener:
        def clips(self, parameters): reports.append([p.grad.tolist() for p in parameters])
    watch = ClippingWatch(Listener())
    watch.attach()
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([3., 4.])
    clip([p], 1.)
    clip((q for q in [p]), 1.)
    watch.detach()
    assert reports[0]==[[3., 4.]] and len(reports)==2


def test_an_error_inside_does_not_stop_later_reports():
    reports = []
    class Listener:
        def clips(self, parameters): reports.append(len(parameters))
    watch,p = ClippingWatch(Listener()),nn.Parameter(torch.ones(2))
    watch.attach()
    p.grad = torch.tensor([3., float('nan')])
    with pytest.raises(RuntimeError, match='non-finite'): utils.clip_grad_norm_([p], 1., error_if_nonfinite=True)
    utils.clip_grad_norm_([p], 1.)
    watch.detach()
    assert reports==[1, 1]


def test_a_plan_contains_unclipped_gradients():
    te,_,_ = clipped(lambda m: utils.clip_grad_norm_(m.parameters(), .01), data=batches(1))
    plan = te.plan()
    assert plan.rows==len(lines(te))==8 and 'before clipping' in str(plan)


def test_clipping_some_parameters_measures_only_these():
    te,before,_ = clipped(lambda m: utils.clip_grad_norm_(m.a.weight, .01))
    said_of_parameters(te, 'unclipped_grad', [{'a.weight': g['a.weight']} for g in before])


def test_the_last_clipping_of_a_step_counts():
    "Gradients are recorded before the last clipping of a step, so an earlier clipping has already changed them."
    te,_,after = clipped(lambda m: [utils.clip_grad_norm_(m.parameters(), n) for n in (.01, 1.)])
    said_of_parameters(te, 'unclipped_grad', after) # the second clipping, to a norm of 1, changes nothing


def test_a_norm_that_the_loop_computed_is_recorded():
    if not hasattr(utils, 'clip_grads_with_norm_'): pytest.skip('of a later torch')
    te,before,after = clipped(lambda m: utils.clip_grads_with_norm_(m.parameters(), .01, torch.tensor(1.)))
    said_of_parameters(te, 'unclipped_grad', before)
    said_of_parameters(te, 'weight_grad', after)


def test_only_scheduled_steps_have_unclipped_gradients():
    te,_,_ = clipped(lambda m: utils.clip_grad_norm_(m.parameters(), .01), dict(every=2))
    assert {k[0] for k in table(te)}=={0, 2} and {k[2] for k in table(te)}=={*both}


@pytest.mark.parametrize('unscale', [True, False])
def test_unclipped_gradients_are_recorded_without_the_scale(unscale):
    "A GradScaler multiplies the loss by a factor. The recorded gradients are divided by this factor."
    model = seeded()
    opt,scaler = momentum(model),torch.amp.GradScaler('cpu', init_scale=1024.)
    want = by_hand(seeded(), torch.optim.SGD(seeded().parameters(), 0.), batches(1))
    with torchEmber(model, opt, scaler=scaler, ttypes=both) as te:
        for x,y in batches(1):
            scaler.scale(loss_of(model, x, y)).backward()
            if unscale: scaler.unscale_(opt)
            utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(opt)
            scaler.update()
    said_of_parameters(te, 'unclipped_grad', want)
    said_of_parameters(te, 'weight_grad', want)


def test_each_of_two_models_records_its_own_clipping():
    gen,dis = seeded(),seeded(seed=1)
    embers = [torchEmber(m, momentum(m), ttypes=both) for m in (gen, dis)]
    for te in embers: te.arm()
    x,y = batches(1)[0]
    want = []
    for te in embers:
        loss_of(te.model, x, y).backward()
        want.append([grads(te.model)])
        utils.clip_grad_norm_(te.model.parameters(), .01)
        te.recorder.watch.optimizers[0].step()
    for te,w in zip(embers, want, strict=True):
        te.close()
        said_of_parameters(te, 'unclipped_grad', w)


def test_without_gradients_nothing_is_patched():
    before = now()
    with torchEmber(seeded(), ttypes='weight'): assert now()==before
    with torchEmber(seeded(), ttypes='weight_grad') as te:
        assert now()!=before and pickle.loads(pickle.dumps(utils.clip_grad_norm_)) is utils.clip_grad_norm_
        te.disarm()
        assert now()==before
        te.arm()


@pytest.mark.parametrize('wraps', [lambda f: lambda g: g, functools.wraps], ids=['plain', 'functools.wraps'])
def test_a_later_patch_of_the_user_stays(wraps):
    before,calls = utils.clip_grad_norm_,[]
    with torchEmber(seeded(), ttypes='unclipped_grad'):
        ours = utils.clip_grad_norm_
        @wraps(ours)
        def theirs(*args, **kwargs): calls.append(1); return ours(*args, **kwargs)
        utils.clip_grad_norm_ = theirs
    assert utils.clip_grad_norm_ is theirs
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([3., 4.])
    assert utils.clip_grad_norm_(p, 1.)==5. and calls==[1] and p.grad.norm()<1.001
    utils.clip_grad_norm_ = before


@pytest.mark.skipif(sys.platform!='linux', reason='a compiler is needed')
@pytest.mark.slow
def test_a_compiled_step_clips_as_before():
    "Clipping inside of torch.compile causes no graph break, and is not reported to the recorder."
    model = seeded()
    def run(model):
        utils.clip_grad_norm_(model.parameters(), .01)
        return model.a.weight.grad.norm()
    x,y = batches(1)[0]
    with torchEmber(model, ttypes='unclipped_grad'):
        loss_of(model, x, y).backward()
        was = grads(model)
        torch.compile(run, backend='eager', fullgraph=True)(model)
    want = {k: v.clone() for k,v in was.items()}
    total = torch.stack([v.norm() for v in want.values()]).norm()
    for k,v in grads(model).items(): torch.testing.assert_close(v, want[k]*(.01/(total+1e-6)))


def train_and_clip(model, opt, te, before, after=False, steps=12):
    for x,y in batches(steps):
        opt.zero_grad()
        if before: utils.clip_grad_norm_(model.parameters(), .01)
        loss_of(model, x, y).backward()
        if after: utils.clip_grad_norm_(model.parameters(), .01)
        opt.step()
    te.close()
    return load_history(te.fname).facts.get('early_clips', [])


@pytest.mark.parametrize('armed', [{}, dict(every=2), dict(ttypes='weight_grad'), dict(ttypes=('weight_grad', 'unclipped_grad'))], ids=str)
def test_clippings_before_the_backward_are_counted(armed):
    model = seeded()
    counts = train_and_clip(model, opt := momentum(model), torchEmber(model, opt, **armed), True)
    assert counts and all(c[2]==c[3]>=5 for c in counts)


@pytest.mark.parametrize('before', [False, True])
def test_clippings_in_time_are_counted(before):
    model = seeded()
    counts = train_and_clip(model, opt := momentum(model), torchEmber(model, opt), before, True)
    assert counts and all(c[2]>=10 and not c[3] for c in counts)


def test_without_a_known_backward_no_clipping_is_counted():
    "In compiled code and with FSDP or Opacus, the recorder cannot know the time of the backward."
    model = seeded()
    te = torchEmber(model, opt := momentum(model))
    te.recorder.pipe.remover.refused.hook_outputs = lambda outputs: None
    assert train_and_clip(model, opt, te, True)==[]
