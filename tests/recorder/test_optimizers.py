"Optimizers that wrap another, take two steps for one, or call themselves: the outer step is recorded"
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
    "Sharpness-aware minimisation: up the slope, and from there the gradient to go down by"
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
    "Slow weights follow the fast ones every `k` steps. Looks like an optimizer, and never made itself one"
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
    "The same as a subclass that leaves out its parent's __init__"
    __init__,zero_grad,step = Lookahead.__init__,Lookahead.zero_grad,Lookahead.step


class Super(torch.optim.Adam):
    def step(self, closure=None): return super().step(closure)


class Twice(Super):
    "A subclass of a subclass, each of which calls the step above; both of their steps are wrapped by torch"
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
    "Weights before each step and after it, and the gradients that it was taken with"
    def __init__(self, model): self.model,self.weight,self.grad,self.update = model,[],[],[]
    def before(self): self.weight.append(weights(self.model))

    def after(self, got=None):
        self.grad.append(got or grads(self.model))
        self.update.append({n: w-self.weight[-1][n] for n,w in weights(self.model).items()})

    def told_by(self, te):
        for ttype,wanted in (('weight', self.weight), ('weight_grad', self.grad), ('update', self.update)): said_of_parameters(te, ttype, wanted)
        assert steps(te)==list(range(len(self.weight)))
        return table(te)


# ---- two steps for one

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
    "The second half put in the place of `step`, which then takes no closure"
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
    "Weights before the first half, gradients of the second, the update of both"
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
    "`opt.step` is set on the instance, and is there after disarming"
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
    "Also where the slow weights pull back"
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
    "It ends as many steps as it takes"
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


# ---- steps within steps

@pytest.mark.parametrize('make', [Super, Twice])
@pytest.mark.parametrize('closure', [False, True])
def test_a_step_that_calls_the_step_of_its_base_class_is_one_step(make, closure):
    "Torch runs its hooks for both"
    torch.optim.Adam(Net().parameters()) # from now on Adam.step itself calls hooks
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
    "It takes three inner steps on the same gradients"
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


# ---- those who listen, too

def test_hooks_and_schedulers_of_the_user_run_as_often_as_before():
    "A learning rate scheduler wraps `step`. Gradients that a hook clips are recorded as clipped"
    after = []
    for armed in (False, True):
        model,calls = seeded(),[]
        opt = momentum(model)
        opt.register_step_pre_hook(lambda o, a, k, model=model: (torch.nn.utils.clip_grad_norm_(model.parameters(), .01), None)[1])
        opt.register_step_post_hook(lambda o, a, k, calls=calls: calls.append(1))
        plan = torch.optim.lr_scheduler.StepLR(opt, 1, .5)
        te = torchEmber(model, optimizer=opt, ttypes=ALL) if armed else None
        with warnings.catch_warnings():
            warnings.simplefilter('error') # a scheduler looks whether `step` is still its own
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
    "They have the same parameters. No step waits forever"
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
    "Each has the rows of its model. After both are closed, nothing is left on the optimizer"
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
    "A deep copy of model and optimizer steps by itself"
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
    "Armed or closed: ember, model and optimizer live as long as the user keeps them"
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
    "The warning comes at once, nothing is left after the run, and the model can be armed again"
    model = seeded()
    opt,before = make(sgd(model.parameters())),left(model)
    with pytest.warns(EmberWarning, match='trains none of the'): torchEmber(model, optimizer=make(sgd(seeded().parameters()))).close()
    assert left(model)==before
    with heard() as said, torchEmber(model, optimizer=opt) as te: seen = by_hand(model, opt, batches(3))
    said_of_parameters(te, 'weight_grad', seen)
    assert not said
