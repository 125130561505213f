"Tests of `Trainings`, which finds the trained model in a program and arms it: rows equal those of a training armed by hand"
import copy
import gc
import math
import sys
import warnings
import weakref
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from looped import ALL, batches, by_hand, closure_of, heard, loss_of, momentum, same, seeded, steps, table, weights
from tensor_rows import lines
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as step_hooks

import torchember.trained
from torchember import torchEmber
from torchember.trained import Trainings, optimizers_in_use, models_of

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning:torch')


class Ran:
    "A run in the form that the functions of `looped` expect"
    def __init__(self, t): self.t = t


class Watched(Trainings):
    "A context that records trainings in it. `said`: messages; `runs`: recorded runs"
    def __init__(self, *args, **options):
        self.said = []
        super().__init__(self.said.append, *args, **options)

    def __enter__(self): return self.start()
    def __exit__(self, kind, error, tb): self.stop(error)
    runs = property(lambda self: [Ran(t.t) for t in self.trainings])


def armed(train, *args, **options):
    with Watched(**options) as w: train(*args)
    return w


def one(w, n=1):
    assert len(w.runs)==n, w.said
    return w.runs[0]


def test_torch_is_restored():
    before = nn.Module.__call__,torch.optim.Optimizer.__init__,dict(step_hooks)
    model = seeded()
    with Watched() as w:
        opt = momentum(model)
        assert nn.Module.__call__ is not before[0]
        x,y = batches(1)[0]
        loss_of(model, x, y).backward()
        assert nn.Module.__call__ is before[0] and hasattr(model, 'disarm')
        opt.step()
    assert (nn.Module.__call__, torch.optim.Optimizer.__init__, dict(step_hooks))==before
    assert not hasattr(model, 'disarm') and steps(one(w))==[0]
    w.stop()


def test_calls_are_patched_only_while_an_optimizer_is_pending():
    former = nn.Module.__call__
    with Watched():
        assert nn.Module.__call__ is former
        a,b = seeded(),seeded()
        of_a,of_b = momentum(a),momentum(b)
        by_hand(a, of_a, batches(1))
        assert nn.Module.__call__ is not former
        by_hand(b, of_b, batches(1))
        assert nn.Module.__call__ is former


def test_later_patch_of_the_user_stays():
    former = nn.Module.__call__
    try:
        with Watched():
            momentum(seeded())
            ours = nn.Module.__call__
            def theirs(self, *args, **kwargs): return ours(self, *args, **kwargs)
            nn.Module.__call__ = theirs
        assert nn.Module.__call__ is theirs
        assert seeded()(torch.ones(1, 4)).shape==(1, 3)
    finally: nn.Module.__call__ = former


def test_a_model_that_is_called_without_gradients_before():
    "A call without gradients before the training, such as a check of shapes, is no step"
    def train(model):
        opt = momentum(model)
        with torch.no_grad(): model.eval()(torch.ones(2, 4))
        model.train()
        by_hand(model, opt, batches())
    w,model = armed(train, seeded()),seeded()
    with torchEmber(model, opt := momentum(model)) as te: by_hand(model, opt, batches())
    same(table(one(w)), table(te))


@pytest.mark.parametrize('accumulate', [1, 2])
def test_accumulated(accumulate):
    def train(model): by_hand(model, momentum(model), batches(), accumulate)
    w,model = armed(train, seeded()),seeded()
    with torchEmber(model, opt := momentum(model)) as te: by_hand(model, opt, batches(), accumulate)
    same(table(one(w)), table(te))
    assert steps(one(w))==[*range(4//accumulate)]


class Loss(nn.Module):
    def __init__(self, net): super().__init__(); self.net = net
    def forward(self, x, y): return F.cross_entropy(self.net(x), y)


def test_averages_references_and_losses_are_not_armed():
    "A moving average, a reference model and a copy are not armed, although they have the same layers and are called"
    model,ref = seeded(),seeded()
    ema = torch.optim.swa_utils.AveragedModel(model)
    twin = copy.deepcopy(model)
    def train():
        opt = momentum(model)
        for x,y in batches():
            (loss_of(model, x, y)+F.mse_loss(model(x), ref(x))+twin(x).sum()).backward()
            opt.step(); opt.zero_grad()
            ema.update_parameters(model)
            ema(x)
            assert not any(hasattr(m, 'disarm') for m in (ref, twin, ema))
            assert hasattr(model, 'disarm')
    w = armed(train)
    assert {r['module'] for r in one(w).t.lines()}=={'model(Net)', 'model(Net).a(Linear)', 'model(Net).act(Tanh)', 'model(Net).b(Linear)'}


def test_frozen_layers_are_recorded():
    def train(model):
        model.a.requires_grad_(False)
        by_hand(model, momentum(model.b), batches())
    w,model = armed(train, seeded()),seeded()
    model.a.requires_grad_(False)
    with torchEmber(model, opt := momentum(model.b)) as te: by_hand(model, opt, batches())
    same(table(one(w)), table(te))


def test_two_models_are_two_runs():
    "Two models with their own optimizers become two runs, each with its own steps, as if armed by hand"
    def gan(G, D, of_G, of_D):
        for i in range(3):
            z = torch.full((4, 4), i+1.)
            fake = G(z)
            of_D.zero_grad(); (D(fake.detach().repeat(1, 2)[:, :4]).sum()).backward(); of_D.step()
            of_G.zero_grad(); (-D(fake.repeat(1, 2)[:, :4]).sum()).backward(); of_G.step()
    def train(G, D): gan(G, D, momentum(G), momentum(D))
    w = armed(train, seeded(), seeded(seed=1), name='gan')
    G,D = seeded(),seeded(seed=1)
    of_G,of_D = momentum(G),momentum(D)
    with torchEmber(G, of_G) as g, torchEmber(D, of_D) as d: gan(G, D, of_G, of_D)
    for got,want in zip(w.runs, (g, d), strict=True): same(table(got), table(want))
    assert [r.t.fname for r in w.runs]==['gan', 'gan_2'] and len(w.said)==2


def test_two_optimizers_of_a_model_end_its_steps_together():
    def train(model, opts):
        for x,y in batches():
            loss_of(model, x, y).backward()
            for o in opts: o.step()
            for o in opts: o.zero_grad()
    w,model = armed(lambda m: train(m, [momentum(m.a), torch.optim.Adam(m.b.parameters())]), seeded()),seeded()
    with torchEmber(model, opts := [momentum(model.a), torch.optim.Adam(model.b.parameters())]) as te: train(model, opts)
    same(table(one(w)), table(te))
    assert w.said==[f'records Net, 4 modules, trained by SGD and Adam, as the run {w.runs[0].t.fname}.']


def test_one_optimizer_of_two_models():
    def train(a, b):
        opt = torch.optim.SGD([*a.parameters(), *b.parameters()], .1)
        for x,y in batches(): (loss_of(a, x, y)+loss_of(b, x, y)).backward(); opt.step(); opt.zero_grad()
    w = armed(train, seeded(), seeded(seed=1))
    assert [steps(r) for r in w.runs]==[[0, 1, 2, 3]]*2
    a,b = seeded(),seeded(seed=1)
    opt = torch.optim.SGD([*a.parameters(), *b.parameters()], .1)
    with torchEmber(a, opt) as of_a, torchEmber(b, opt) as of_b:
        for x,y in batches(): (loss_of(a, x, y)+loss_of(b, x, y)).backward(); opt.step(); opt.zero_grad()
    def by_weight(ran): return table(ran)[next(k for k in table(ran) if k[:3]==(0, 'model(Net).a(Linear)', 'weight'))]['mean']
    # The order of the two runs is not defined
    for got,want in zip(sorted(w.runs, key=by_weight), sorted((of_a, of_b), key=by_weight), strict=True): same(table(got), table(want))


def test_two_phases_are_two_runs():
    "A model that gets another optimizer for the same parameters begins another run at step 0"
    model = seeded()
    def train():
        by_hand(model, momentum(model.b), batches(2))
        by_hand(model, torch.optim.Adam(model.parameters()), batches(3))
    w = armed(train, name='it')
    assert [steps(r) for r in w.runs]==[[0, 1], [0, 1, 2]] and [r.t.fname for r in w.runs]==['it', 'it_2']
    assert 'Adam' in w.said[1] and 'SGD' not in w.said[1] and len(w.reports)==2


def test_later_optimizer_for_other_parameters_joins():
    model = seeded()
    def train():
        a = momentum(model.a)
        by_hand(model, a, batches(2))
        b = torch.optim.Adam(model.b.parameters())
        for x,y in batches(3): loss_of(model, x, y).backward(); a.step(); b.step(); a.zero_grad(); b.zero_grad()
    w = armed(train)
    assert [steps(r) for r in w.runs]==[[0, 1], [0, 1, 2]] and 'SGD and Adam' in w.said[1]


def test_optimizer_created_again_before_training_is_used():
    "An optimizer that never steps is ignored if the model gets a second one before the training"
    kept = []
    def train(model):
        kept.append(momentum(model))
        kept.append(momentum(model))
        by_hand(model, kept[-1], batches())
    assert steps(one(armed(train, seeded())))==[0, 1, 2, 3]


def test_optimizer_that_seemed_replaced_can_step():
    model = seeded()
    def train():
        first,_second = momentum(model),momentum(model)
        by_hand(model, first, batches())
        assert _second
    w = armed(train)
    assert steps(w.runs[-1])==[0, 1, 2, 3][:len(steps(w.runs[-1]))] and len(steps(w.runs[-1]))>=3 and 'step 0 has only weights' in w.said[-1], w.said


class Twice(torch.optim.Optimizer):
    "A wrapper optimizer, as for sharpness-aware minimization, that is created before the inner optimizer and calls its step"
    def __init__(self, params, base):
        super().__init__(params, {})
        self.base = base(self.param_groups)

    def step(self, closure=None): self.base.step()


def test_a_wrapper_steps_once():
    def train(model): by_hand(model, Twice(model.parameters(), lambda ps: torch.optim.SGD(ps, .1)), batches())
    w = armed(train, seeded())
    assert steps(one(w))==[0, 1, 2, 3] and 'by Twice,' in w.said[0]
    a = momentum(m := seeded())
    b = Twice(m.parameters(), lambda ps: torch.optim.SGD(ps, .1))
    assert optimizers_in_use([a, b, b.base])==[b] and optimizers_in_use([b, b.base, a])==[a]


@pytest.mark.release
def test_models_created_again_are_released():
    "Each new model begins another run. A deleted model is garbage, and its run is complete"
    refs = []
    def train():
        for i in range(3):
            model = seeded(seed=i)
            refs.append(weakref.ref(model))
            by_hand(model, momentum(model), batches())
            del model
            gc.collect()
        assert [r() is None for r in refs]==[True, True, True]
    w = armed(train)
    assert [steps(r) for r in w.runs]==[[0, 1, 2, 3]]*3


def test_model_armed_by_the_program_is_not_armed_again():
    model = seeded()
    def train():
        opt = momentum(model)
        with torchEmber(model, opt, name='theirs') as te: by_hand(model, opt, batches())
        assert steps(te)==[0, 1, 2, 3]
    with heard() as warned: w = armed(train)
    assert not warned and not w.runs and w.said==['Net is not recorded again, because the program itself records it as the run theirs.']


def test_model_with_an_armed_part_is_not_armed():
    model = seeded()
    def train():
        with torchEmber(model.a, name='theirs'): by_hand(model, momentum(model), batches())
    with heard('already recorded') as warned: w = armed(train)
    assert not warned and not w.runs and 'not recorded again' in w.said[0]


def test_a_closure():
    "With LBFGS, the first forward pass runs inside the optimizer step, and belongs to step 0"
    def train(model, opt):
        for x,y in batches(): opt.step(closure_of(model, opt, x, y))
    w,model = armed(lambda m: train(m, torch.optim.LBFGS(m.parameters(), max_iter=3)), seeded()),seeded()
    with torchEmber(model, opt := torch.optim.LBFGS(model.parameters(), max_iter=3)) as te: train(model, opt)
    same(table(one(w)), table(te))
    assert len(w.said)==1


def test_a_model_whose_parts_are_called():
    model = seeded()
    def train():
        opt = momentum(model)
        for x,y in batches(): F.cross_entropy(model.b(model.act(model.a(x))), y).backward(); opt.step(); opt.zero_grad()
    w = armed(train)
    assert {r['module'] for r in lines(one(w))}=={'model(Net).a(Linear)', 'model(Net).act(Tanh)', 'model(Net).b(Linear)'} and steps(one(w))==[0, 1, 2, 3]


def test_step_without_a_visible_forward():
    "If the program never calls the model, step 0 has only weights and gradients, and one warning says so"
    model = seeded()
    def given(x): return F.linear(F.linear(x, model.a.weight, model.a.bias).tanh(), model.b.weight, model.b.bias)
    def train():
        opt = momentum(model)
        for x,y in batches(): F.cross_entropy(given(x), y).backward(); opt.step(); opt.zero_grad()
    with heard('never called') as warned: w = armed(train)
    assert len(warned)==1
    assert {r['ttype'] for r in lines(one(w)) if r['step']==0}=={'weight', 'weight_grad'} and steps(one(w))==[0, 1, 2, 3]
    assert 'step 0 has only weights and their gradients' in w.said[1]


def test_copied_optimizer_is_recorded():
    "A copied optimizer is noticed at its first step, because its constructor never ran"
    model = seeded()
    model.opt = momentum(model)
    model = copy.deepcopy(model)
    w = armed(lambda: by_hand(model, model.opt, batches()))
    assert steps(one(w))==[0, 1, 2, 3]
    assert {r['step'] for r in one(w).t.lines() if r['ttype']=='output'}=={1, 2, 3}


def scaled_by_hand(model, opt, scaler, data):
    for x,y in data:
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.step(opt); scaler.update(); opt.zero_grad()


def cpu_scaler(kind=torch.amp.GradScaler, **options): return kind('cpu', init_scale=8., **options)
def used(scaler): return scaler.scale(torch.ones(1)) is not None and scaler


@pytest.mark.parametrize('others', [0, 2])
def test_gradients_are_unscaled(others):
    "Gradients are unscaled by the scaler in use, although other scalers exist, new ones or used ones"
    kept = [used(cpu_scaler()), cpu_scaler()][:others]
    w = armed(lambda m: scaled_by_hand(m, momentum(m), cpu_scaler(), batches()), seeded(), ttypes=ALL)
    model,scaler = seeded(),cpu_scaler()
    with torchEmber(model, opt := momentum(model), scaler=scaler, ttypes=ALL) as te: scaled_by_hand(model, opt, scaler, batches())
    same(table(one(w)), table(te))
    assert len(kept)==others and len(w.said)==1, w.said


def test_unused_scaler_scales_nothing():
    kept = used(cpu_scaler())
    w = armed(lambda m: by_hand(m, momentum(m), batches()), seeded(), ttypes=ALL)
    model = seeded()
    with torchEmber(model, opt := momentum(model), ttypes=ALL) as te: by_hand(model, opt, batches())
    same(table(one(w)), table(te))
    assert w.trainings[0].scaler is None and kept.is_enabled()


def test_disabled_scaler_scales_nothing():
    off = torch.amp.GradScaler('cpu', enabled=False)
    w = armed(lambda m: scaled_by_hand(m, momentum(m), off, batches()), seeded(), ttypes=ALL)
    model = seeded()
    with torchEmber(model, opt := momentum(model), ttypes=ALL) as te: by_hand(model, opt, batches())
    same(table(one(w)), table(te))


class Scales(torch.amp.GradScaler):
    "A loss scaler with its own method `scale`, as FSDP has one"
    def scale(self, outputs): return super().scale([outputs])[0]


@pytest.mark.parametrize('kind', [torch.amp.GradScaler, Scales])
@pytest.mark.parametrize('first', ['scaled', 'plain'])
def test_one_of_two_models_is_scaled(kind, first):
    "If only one of two models uses a scaler, its gradients are unscaled from the first step on, also after a skipped step"
    former = torch.amp.GradScaler.scale,Scales.scale
    def train(a, b, scaler):
        of_a,of_b = momentum(a),momentum(b)
        for i,(x,y) in enumerate(batches()):
            losses = [loss_of(m, x, y) for m in (a, b)]
            for which in sorted(['scaled', 'plain'], key=first.__ne__):
                if which=='plain': losses[1].backward()
                else: scaler.scale(losses[0]*(math.inf if i==0 else 1)).backward()
            scaler.step(of_a); scaler.update(); of_b.step()
            of_a.zero_grad(); of_b.zero_grad()
    w = armed(train, seeded(), seeded(seed=1), cpu_scaler(kind), ttypes=ALL)
    a,b,s = seeded(),seeded(seed=1),cpu_scaler(kind)
    with torchEmber(a, of_a := momentum(a), scaler=s, ttypes=ALL) as ta, torchEmber(b, of_b := momentum(b), ttypes=ALL) as tb:
        for i,(x,y) in enumerate(batches()):
            s.scale(loss_of(a, x, y)*(math.inf if i==0 else 1)).backward(); s.step(of_a); s.update(); of_a.zero_grad()
        by_hand(b, of_b, batches())
    assert len(w.runs)==2 and len(w.said)==2, w.said
    for run,te in zip(w.runs, (ta, tb), strict=True): same(table(run), table(te))
    assert (torch.amp.GradScaler.scale, Scales.scale)==former


def test_scalers_are_patched_until_the_first_step():
    former = torch.amp.GradScaler.scale
    with Watched():
        model,scaler = seeded(),cpu_scaler()
        assert torch.amp.GradScaler.scale is former
        opt = momentum(model)
        loss = loss_of(model, *batches(1)[0])
        assert torch.amp.GradScaler.scale is not former
        scaler.scale(loss).backward()
        scaler.step(opt)
        assert torch.amp.GradScaler.scale is former


def test_a_second_model_with_a_scaler_of_its_own():
    kept = []
    def train():
        for seed in 0, 1:
            kept.append((seeded(seed=seed), cpu_scaler()))
            scaled_by_hand(kept[-1][0], momentum(kept[-1][0]), kept[-1][1], batches(2))
    w = armed(train)
    assert [t.scaler for t in w.trainings]==[s for _,s in kept] and len(w.said)==2, w.said


def test_gradients_unscaled_by_hand_are_not_unscaled_again():
    "The optimizer steps without its scaler, after the program has called `unscale_` itself"
    def train(model, opt, scaler):
        for x,y in batches():
            scaler.scale(loss_of(model, x, y)).backward()
            scaler.unscale_(opt)
            opt.step(); scaler.update(); opt.zero_grad()
    w = armed(lambda m: train(m, momentum(m), cpu_scaler()), seeded(), ttypes=ALL)
    model = seeded()
    with torchEmber(model, opt := momentum(model), ttypes=ALL) as te: by_hand(model, opt, batches())
    same(table(one(w)), table(te))


def test_backward_reaches_finds_the_parameters_of_a_loss():
    a,b = seeded(),seeded()
    ids = {id(p) for p in a.parameters()}
    x,y = batches(1)[0]
    assert torchember.trained.backward_reaches(loss_of(a, x, y), ids) and torchember.trained.backward_reaches([loss_of(b, x, y), loss_of(a, x, y)], ids)
    assert not torchember.trained.backward_reaches(loss_of(b, x, y), ids) and not torchember.trained.backward_reaches(torch.ones(1), ids)


@pytest.mark.slow
@pytest.mark.parametrize('when', ['before', 'after', 'in place'])
def test_compiled(when):
    "The first step has rows of the forward pass, whenever the model is compiled"
    def train(model):
        torch.compiler.reset()
        called = torch.compile(model, backend='aot_eager') if when=='before' else model
        opt = momentum(model)
        if when=='after': called = torch.compile(model, backend='aot_eager')
        if when=='in place': model.compile(backend='aot_eager')
        by_hand(called, opt, batches())
        return called
    model = seeded()
    w = armed(train, model)
    plain = seeded()
    with torchEmber(plain, opt := momentum(plain)) as te: by_hand(plain, opt, batches())
    got,want = table(one(w)),table(te)
    assert got.keys()==want.keys() and all(abs(got[k]['mean']-r['mean'])<1e-5 for k,r in want.items())
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_step():
    model = seeded()
    def train():
        torch.compiler.reset()
        opt = momentum(model)
        f = torch.compile(lambda x,y: loss_of(model, x, y), backend='aot_eager')
        for x,y in batches(): f(x, y).backward(); opt.step(); opt.zero_grad()
    w = armed(train)
    assert steps(one(w))==[0, 1, 2, 3] and {r['step'] for r in one(w).t.lines() if r['ttype']=='output'}>={1, 2, 3}
    torch.compiler.reset()


def test_model_that_cannot_be_armed_trains(monkeypatch):
    def broken(*args, **kwargs): raise RuntimeError('no')
    monkeypatch.setattr('torchember.ember.torchEmber', broken)
    model,plain = seeded(),seeded()
    w = armed(lambda: by_hand(model, momentum(model), batches()))
    by_hand(plain, momentum(plain), batches())
    assert w.said==['Net could not be recorded: RuntimeError: no']
    assert all(torch.equal(v, weights(plain)[k]) for k,v in weights(model).items())


@pytest.mark.parametrize('where', ['models_of', 'trained_parameters', 'running_scaler', 'ids_of'])
def test_failed_search_is_reported_once_and_training_continues(monkeypatch, where):
    def broken(*args): raise RuntimeError('no')
    def train(model, also):
        scaler,other = cpu_scaler(),cpu_scaler()
        opts = [torch.optim.SGD(m.parameters(), lr=.1) for m in (model, also)]
        for m,o,s in ((model, opts[0], scaler), (also, opts[1], other))*3:
            o.zero_grad()
            s.scale(m(torch.ones(2, 4)).square().mean()).backward()
            s.step(o)
            s.update()
    models = [nn.Linear(4, 2) for _ in range(2)]
    plain = copy.deepcopy(models)
    with Watched() as w:
        monkeypatch.setattr(torchember.trained, where, broken)
        train(*models)
        monkeypatch.undo()
    train(*plain)
    assert all(torch.equal(v, weights(q)[k]) for m,q in zip(models, plain, strict=True) for k,v in weights(m).items())
    told = [s for s in w.said if 'could not be found' in s]
    assert told==['The models of the program could not be found: RuntimeError: no. No more models are recorded. '
        'Call torchEmber(model) in the program instead.'], w.said
    assert all(not t.te().armed for t in w.trainings)
    assert nn.Module.__call__ is w.patches.calls.former


def test_named_models_without_an_optimizer():
    "If models are passed by name, each pass is a step, also without gradients. A model without trainable weights is ignored"
    model,frozen = seeded(),seeded().requires_grad_(False)
    with Watched([model, frozen]) as w, torch.no_grad():
        for x,_ in batches(): model(x); frozen(x)
    assert steps(one(w))==[0, 1, 2, 3] and nn.Module.__call__ is w.patches.calls.former


def test_lightning_module_is_the_model_if_its_parts_are_called():
    class LightningModule(nn.Module): pass
    class Own(LightningModule):
        def __init__(self):
            super().__init__()
            self.back,self.head = nn.Linear(4, 4).requires_grad_(False),nn.Linear(4, 3)
    model = Own()
    assert models_of([*model.head.parameters()], model.head)==[model]
    assert models_of([*model.head.parameters()], model.back)==[model]
    outer = nn.Sequential(model)
    assert models_of([*model.head.parameters()], outer)==[outer]


def test_models_of(monkeypatch):
    a,b,c = (nn.Linear(2, 2) for _ in range(3))
    both = nn.Sequential(a, b)
    more = nn.Sequential(both, c)
    ps = [*a.parameters(), *b.parameters()]
    assert models_of(ps, modules=[a, b, c, both])==[both] and models_of(ps, modules=[more, a, both, b])==[both]
    assert models_of(ps, more, [a, both])==[more] and models_of(ps[:2], modules=[both, a])==[a]
    assert models_of([*ps, *c.parameters()], modules=[both, c])==[both, c]
    assert models_of(ps, c, [both, a])==[both] and models_of([torch.ones(1)], modules=[both])==[]
    half = nn.Linear.__new__(nn.Linear)
    class Remote(nn.Module):
        def parameters(self, recurse=True): raise ValueError('not here')
    assert models_of(ps, modules=[half, Remote(), both])==[both]
    for name,what in (('_parameters', None), ('_modules', None), ('_modules', {'a': 'no module'})):
        odd = nn.Linear(2, 2)
        odd.__dict__[name] = what
        assert models_of(ps, modules=[odd, both])==[both]
    # torch also accepts an unusual type for this attribute
    odd.__dict__['_modules'] = UserDict(a=a, b=b)
    assert models_of(ps, modules=[odd])==[odd]
    deep = nn.Linear(2, 2)
    for _ in range(2*sys.getrecursionlimit()): deep = nn.Sequential(deep)
    assert models_of(ps, modules=[deep, both])==[both]
    chain = [deep]
    while chain[-1]._modules: chain += chain[-1]._modules.values()
    asked,real = [],nn.Module.parameters
    with monkeypatch.context() as m:
        m.setattr(nn.Module, 'parameters', lambda self, recurse=True: asked.append(self) or real(self, recurse))
        # Only `both` may be searched: with all modules, the search would take hours
        assert len(chain)>1000 and models_of(ps, modules=[*chain, both])==[both] and {*asked}=={both}
    class Own(nn.Module):
        def parameters(self, recurse=True): return iter(ps)
    class Tells(nn.Module):
        def named_modules(self, memo=None, prefix='', remove_duplicate=True): yield from ((prefix+'a', a), (prefix+'b', b))
    for own in (Own(), nn.Sequential(Tells())): assert models_of(ps, modules=[own])==[own]


def test_models_with_a_common_layer():
    shared,c = nn.Linear(2, 2),nn.Linear(2, 2)
    one,two = nn.Sequential(shared),nn.Sequential(shared, c)
    ps = [*shared.parameters(), *c.parameters()]
    for modules in ([one, two], [two, one]):
        assert models_of(ps, modules=modules)==[two] and models_of([*shared.parameters()], modules=modules)==[one]
    one.register_module('none', None) # A layer that is None
    assert models_of(ps, modules=[one, two])==[two]
    many = nn.Linear(2, 2)
    # 2**100 paths lead to one layer, so each layer must be visited only once
    for _ in range(100): many = nn.Sequential(many, many)
    assert models_of([*many.parameters()], modules=[many])==[many] and models_of(ps, modules=[many, two])==[two]


def test_models_in_torchscript():
    "The submodules of a TorchScript model are not in a Python dict, and the model is still found"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    around = nn.Sequential(model)
    assert models_of([*model.parameters()], modules=[model])==[model] and models_of([*model.parameters()], modules=[model, around])==[around]


def test_ends_with_an_error_in_the_program():
    model = seeded()
    with pytest.raises(ValueError), Watched() as w:
        by_hand(model, momentum(model), batches())
        raise ValueError('theirs')
    assert any('theirs' in str(r) for r in one(w).t.lines()) and not hasattr(model, 'disarm')


def test_a_model_that_was_called_before_its_optimizer_was_made():
    "The model is called while the optimizer of another model is awaited, and is still recorded later"
    model,other = seeded(),seeded()
    def train():
        awaited = momentum(other)
        x,y = batches(1)[0]
        loss_of(model, x, y)
        by_hand(model, momentum(model), batches())
        assert awaited
    w = armed(train)
    assert {r['step'] for r in one(w).t.lines() if r['ttype']=='output'}=={0, 1, 2, 3}


def test_model_called_before_training_is_recorded():
    "A trained model is recorded, too, if another model was passed by name"
    model,other = seeded(),seeded()
    with Watched([other]) as w:
        opt = momentum(model)
        with torch.no_grad(): model(torch.ones(2, 4))
        by_hand(model, opt, batches())
    assert {r['step'] for r in one(w).t.lines() if r['ttype']=='output'}=={0, 1, 2, 3}


def test_optimizer_with_the_id_of_a_deleted_one():
    "A new optimizer can have the id() of a deleted one, and is still noticed"
    awaited,opt = torchember.trained.PendingOptimizers(),momentum(seeded())
    awaited.settle([opt])
    awaited.add(opt)
    assert not awaited.settled and awaited.live()==[opt]
    awaited.add(opt)
    assert awaited.live()==[opt]


def test_first_step_of_a_new_optimizer_is_handled():
    opt = momentum(seeded())
    with Watched() as w:
        w.stepped.add(id(opt)) # The id belongs to a deleted optimizer
        w.on_created(opt)
        assert not w.stepped and w.created==1


def test_names_of_several_processes(monkeypatch):
    "Each rank looks for existing logs of its own rank only"
    monkeypatch.setattr('torchember.recorder.process.rank_and_size', lambda: (1, 2))
    there = {'it', 'other.rank1', 'other.rank0', 'other_2.rank1'}
    monkeypatch.setattr('torchember.store.jsonl.exists', lambda n, home: n in there)
    assert [Trainings(name=n).armer.next_name() for n in ('it', 'other', None)]==['it', 'other_3', None]
