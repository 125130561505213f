"Optimizers that wrap another one, take two steps at once, or call the step of a base class: the outermost step is recorded."
import copy
import gc
import warnings
import weakref
from collections import defaultdict

import pytest
import torch
from looped import (ALL, Net, batches, by_hand, closure_of, ears, grads, heard, left, loss_of, momentum, said_of_parameters, seeded, steps, table, weights)

from torchember import EmberWarning, torchEmber


class SAM(torch.optim.Optimizer):
    "Sharpness-aware minimization: the first half moves up the slope, and the second half uses the gradient computed there."
    def __init__(self, params, base, rho=.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    def trained(self): return [p for g in self.param_groups for p in g['params'] if p.grad is not None]

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        ps = self.trained()
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        for p in ps:
            self.state[p]['old_p'] = p.clone()
            p.add_(p.grad*self.param_groups[0]['rho']/norm)
        if zero_grad: self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for p in self.trained(): p.copy_(self.state[p]['old_p'])
        self.base_optimizer.step()
        if zero_grad: self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        self.first_step(True)
        with torch.enable_grad(): closure()
        self.second_step()


class Lookahead:
    "Slow weights follow the fast weights every `k` steps. It has the methods of an optimizer, but not its base class."
    def __init__(self, optimizer, k=2, alpha=.5):
        self.optimizer,self.k,self.alpha,self.count,self.slow = optimizer,k,alpha,0,{}
        self.param_groups,self.state,self.defaults = optimizer.param_groups,defaultdict(dict),optimizer.defaults

    def zero_grad(self): self.optimizer.zero_grad()

    def step(self, closure=None):
        for p in self.trained(): self.slow.setdefault(p, p.detach().clone())
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count%self.k==0:
            for p,s in self.slow.items(): p.data.copy_(s.lerp_(p.data, self.alpha))
        return loss

    def trained(self): return [p for g in self.param_groups for p in g['params']]


class Derived(torch.optim.Optimizer, Lookahead):
    "Lookahead as a subclass of Optimizer that does not call `Optimizer.__init__`."
    __init__,zero_grad,step = Lookahead.__init__,Lookahead.zero_grad,Lookahead.step


class Super(torch.optim.Adam):
    def step(self, closure=None): return super().step(closure)


class Twice(Super):
    "A subclass of a subclass. Each `step` calls the `step` of its parent class, and torch wraps both of them."
    def step(self, closure=None):
        loss = super().step(closure)
        for p in self.param_groups[0]['params']: p.data.clamp_(-1, 1)
        return loss


def real(package, name):
    def make(*args, **kwargs): return getattr(pytest.importorskip(package), name)(*args, **kwargs)
    return make


def sgd(params, **kwargs): return torch.optim.SGD(params, lr=.1, momentum=.9, **kwargs)


sams = dict(ours=SAM, pytorch_optimizer=real('pytorch_optimizer', 'SAM'))
lookaheads = dict(ours=Lookahead, derived=Derived, **{p: real(p, 'Lookahead') for p in ('pytorch_optimizer', 'torch_optimizer')})
each_sam = pytest.mark.parametrize('make', sams.values(), ids=sams)
each_lookahead = pytest.mark.parametrize('make', lookaheads.values(), ids=lookaheads)


class Truth:
    "Keeps the weights before each step, the gradients used in it, and the updates, to compare them with the rows."
    def __init__(self, model): self.model,self.weight,self.grad,self.update = model,[],[],[]
    def before(self): self.weight.append(weights(self.model))

    def after(self, got=None):
        self.grad.append(got or grads(self.model))
        self.update.append({n: w-self.weight[-1][n] for n,w in weights(self.model).items()})

    def told_by(self, te):
        for ttype,wanted in (('weight', self.weight), ('weight_grad', self.grad), ('update', self.update)): said_of_parameters(te, ttype, wanted)
        assert steps(te)==list(range(len(self.weight)))
        return table(te)


# ---- one training step made of two optimizer steps (SAM)

def by_hand_in_two(model, opt, x, y):
    loss_of(model, x, y).backward()
    opt.first_step(zero_grad=True)
    loss_of(model, x, y).backward()
    got = grads(model)
    opt.second_step(zero_grad=True)
    return got


def by_closure(model, opt, x, y):
    closure = closure_of(model, opt, x, y)
    closure()
    opt.step(closure)
    return grads(model)


def step_replaced(model, opt, x, y):
    "Run a SAM step after replacing `opt.step` by `opt.second_step`, which takes no closure."
    opt.step = opt.second_step
    loss_of(model, x, y).backward()
    opt.first_step(zero_grad=True)
    loss_of(model, x, y).backward()
    got = grads(model)
    opt.step()
    opt.zero_grad()
    return got


@each_sam
@pytest.mark.parametrize('loop', [by_hand_in_two, by_closure, step_replaced])
@pytest.mark.parametrize('given', ['outer', 'inner'])
def test_sam_has_one_step_of_two_halves(make, loop, given):
    "Recorded are the weights before the first half, the gradients of the second half, and the update of both halves together."
    model = seeded()
    opt,truth = make(model.parameters(), torch.optim.SGD, lr=.1, momentum=.9),Truth(model)
    with heard() as said, torchEmber(model, optimizer=opt if given=='outer' else opt.base_optimizer, ttypes=ALL) as te:
        for x,y in batches(3):
            truth.before()
            truth.after(loop(model, opt, x, y))
    truth.told_by(te)
    assert not said
    momenta = [k for k in table(te, 'optimizer') if k[3].startswith('momentum_buffer_')]
    assert len(momenta)==3*4


def test_step_replaced_before_and_after_arming():
    "The user sets `opt.step` on the instance. This attribute is still set after disarming."
    for late in (False, True):
        model = seeded()
        opt,truth = SAM(model.parameters(), torch.optim.SGD, lr=.1),Truth(model)
        if not late: opt.step = mine = opt.second_step
        with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
            if late: opt.step = mine = opt.second_step
            for x,y in batches(3):
                opt.zero_grad()
                loss_of(model, x, y).backward()
                opt.first_step(zero_grad=True)
                loss_of(model, x, y).backward()
                truth.before()
                truth.weight[-1] = {n: opt.state[p]['old_p'].clone() for n,p in model.named_parameters()}
                opt.step()
                truth.after()
        truth.told_by(te)
        assert opt.__dict__['step'] is mine or opt.step==mine


@each_lookahead
@pytest.mark.parametrize('closure', [False, True])
def test_the_update_of_lookahead_is_that_of_the_outer_step(make, closure):
    "This includes steps in which Lookahead moves the weights back toward the slow weights."
    model = seeded()
    opt,truth = make(sgd(model.parameters()), k=2),Truth(model)
    with heard() as said, torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        for x,y in batches(5):
            opt.zero_grad()
            truth.before()
            if closure: opt.step(closure_of(model, opt, x, y))
            else:
                loss_of(model, x, y).backward()
                opt.step()
            truth.after()
    truth.told_by(te)
    assert not said


@each_lookahead
def test_disarming_restores_an_outer_optimizer(make):
    model = seeded()
    opt = make(sgd(model.parameters()))
    before = left(model, opt, opt.optimizer)
    torchEmber(model, optimizer=opt, ttypes=ALL).close()
    assert left(model, opt, opt.optimizer)==before
    by_hand(model, opt, batches(3))


@each_lookahead
def test_the_inner_optimizer_of_a_lookahead_ends_the_steps_if_given(make):
    "Each step of the inner optimizer ends one recorded step."
    model = seeded()
    opt = make(sgd(model.parameters()))
    with torchEmber(model, optimizer=opt.optimizer, ttypes=('weight', 'weight_grad', 'optimizer')) as te: seen = by_hand(model, opt, batches(5))
    said_of_parameters(te, 'weight_grad', seen)


def test_an_optimizer_in_an_optimizer_in_an_optimizer():
    model = seeded()
    opt,truth = Derived(Lookahead(sgd(model.parameters())), k=3),Truth(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        for x,y in batches(6):
            opt.zero_grad()
            truth.before()
            opt.step(closure_of(model, opt, x, y))
            truth.after()
    truth.told_by(te)


# ---- an optimizer step that calls another step

@pytest.mark.parametrize('make', [Super, Twice])
@pytest.mark.parametrize('closure', [False, True])
def test_a_step_that_calls_the_step_of_its_base_class_is_one_step(make, closure):
    "Torch runs its step hooks for both calls of `step`, but only one step is recorded."
    # creating a plain Adam makes torch wrap Adam.step, so Adam.step calls hooks from now on
    torch.optim.Adam(Net().parameters())
    model = seeded()
    opt,truth = make(model.parameters(), .1),Truth(model)
    with heard() as said, torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        for x,y in batches(3):
            opt.zero_grad()
            truth.before()
            if closure: opt.step(closure_of(model, opt, x, y))
            else:
                loss_of(model, x, y).backward()
                opt.step()
            truth.after()
    truth.told_by(te)
    assert not said and len(table(te, 'optimizer'))==3*4*2


def test_an_outer_step_with_several_inner_steps_is_one_step():
    "The outer `step` calls the inner `step` three times with the same gradients."
    class Thrice(torch.optim.SGD):
        def step(self, closure=None):
            for _ in range(3): super().step()
    torch.optim.SGD(Net().parameters())
    model = seeded()
    opt,truth = Thrice(model.parameters(), .1),Truth(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        for x,y in batches(3):
            opt.zero_grad()
            loss_of(model, x, y).backward()
            truth.before()
            opt.step()
            truth.after()
    truth.told_by(te)


# ---- hooks, schedulers and other embers on the same optimizer

def test_hooks_and_schedulers_of_the_user_run_as_often_as_before():
    "A learning rate scheduler also wraps `step`. Gradients that a user's hook clips are recorded after clipping."
    after = []
    for armed in (False, True):
        model,calls = seeded(),[]
        opt = momentum(model)
        opt.register_step_pre_hook(lambda o, a, k, model=model: (torch.nn.utils.clip_grad_norm_(model.parameters(), .01), None)[1])
        opt.register_step_post_hook(lambda o, a, k, calls=calls: calls.append(1))
        plan = torch.optim.lr_scheduler.StepLR(opt, 1, .5)
        te = torchEmber(model, optimizer=opt, ttypes=ALL) if armed else None
        with warnings.catch_warnings():
            warnings.simplefilter('error') # a scheduler warns if `step` is not the function that it wrapped
            for xy in batches(3): by_hand(model, opt, [xy]); plan.step()
        assert len(calls)==3 and opt.param_groups[0]['lr']==.1/8
        after.append(weights(model))
        if te: te.close()
    assert all(torch.equal(after[0][n], after[1][n]) for n in after[0])
    assert steps(te)==[0, 1, 2]
    assert all(max(abs(r['max']), abs(r['min']))<=.01 for r in table(te, 'weight_grad').values())


def test_a_step_ends_when_all_optimizers_with_closures_have_stepped():
    model,seen = seeded(),[]
    opts = [momentum(model.a), momentum(model.b)]
    with torchEmber(model, optimizer=opts, ttypes=ALL) as te:
        for x,y in batches(3):
            now = {}
            for opt,part in zip(opts, 'ab', strict=True):
                opt.step(closure_of(model, opt, x, y))
                now |= {n: g for n,g in grads(model).items() if n[0]==part}
                model.zero_grad()
            seen.append(now)
    assert steps(te)==[0, 1, 2]
    said_of_parameters(te, 'weight_grad', seen)


def test_an_optimizer_given_with_its_wrapper_counts_once():
    "An optimizer and its wrapper have the same parameters, so a step does not wait for both of them."
    model = seeded()
    inner = sgd(model.parameters())
    opt,truth = Lookahead(inner),Truth(model)
    with torchEmber(model, optimizer=[inner, opt], ttypes=('weight', 'weight_grad')) as te:
        for x,y in batches(3):
            opt.zero_grad()
            loss_of(model, x, y).backward()
            truth.before()
            opt.step()
            truth.after()
    said_of_parameters(te, 'weight', truth.weight)
    said_of_parameters(te, 'weight_grad', truth.grad)


either = pytest.mark.parametrize('make', [lambda o: o, Lookahead], ids=['plain', 'wrapped'])


@either
@pytest.mark.parametrize('first', [0, 1])
def test_two_embers_can_share_an_optimizer(make, first):
    "Each ember records the rows of its own model. After both are closed, no hook remains on the optimizer."
    models = [seeded(seed=k) for k in (0, 1)]
    inner = sgd([p for m in models for p in m.parameters()])
    opt,seen = make(inner),([], [])
    before = ears(opt, inner)
    tes = [torchEmber(m, optimizer=opt, ttypes=('weight', 'weight_grad')) for m in models]
    for i,(x,y) in enumerate(batches(5)):
        if i==3: tes[first].close()
        sum(loss_of(m, x, y) for m in models).backward()
        for s,m in zip(seen, models, strict=True): s.append(grads(m))
        opt.step()
        opt.zero_grad()
    tes[1-first].close()
    for k,te in enumerate(tes): said_of_parameters(te, 'weight_grad', seen[k][:3 if k==first else 5])
    assert ears(opt, inner)==before


@either
def test_steps_of_a_copied_optimizer_are_not_recorded(make):
    "Model and optimizer are copied with deepcopy. Training the copy adds no rows."
    model = seeded()
    opt = make(sgd(model.parameters()))
    with torchEmber(model, optimizer=opt) as te:
        seen = by_hand(model, opt, batches(2))
        before = weights(model)
        twin,other = copy.deepcopy((model, opt))
        by_hand(twin, other, batches(2))
        assert all(torch.equal(before[n], w) for n,w in weights(model).items())
        assert all(not torch.equal(before[n], w) for n,w in weights(twin).items())
        seen += by_hand(model, opt, batches(2))
    said_of_parameters(te, 'weight_grad', seen)


@either
@pytest.mark.parametrize('closed', [False, True])
def test_an_ember_keeps_no_optimizer_alive(make, closed):
    "An ember, its model and its optimizer are freed as soon as the user drops them, whether the ember is armed or closed."
    def run():
        model = seeded()
        opt = make(sgd(model.parameters()))
        te = torchEmber(model, optimizer=opt, ttypes=ALL)
        for x,y in batches(2): opt.step(closure_of(model, opt, x, y))
        if closed: te.close()
        return [weakref.ref(o) for o in (model, opt, te)]
    refs = run()
    gc.collect()
    assert [r() for r in refs]==[None]*3


@either
def test_an_optimizer_of_another_model_is_a_warning(make):
    "The warning comes when the model is armed. Closing the ember leaves no trace, and the model can be armed again."
    model = seeded()
    opt,before = make(sgd(model.parameters())),left(model)
    with pytest.warns(EmberWarning, match='trains none of the'): torchEmber(model, optimizer=make(sgd(seeded().parameters()))).close()
    assert left(model)==before
    with heard() as said, torchEmber(model, optimizer=opt) as te: seen = by_hand(model, opt, batches(3))
    said_of_parameters(te, 'weight_grad', seen)
    assert not said
