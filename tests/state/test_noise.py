"Tests of the gradient noise scale: exact values from separate gradients, coverage of standard errors, side effects, and ranks"
import gc
import json
import math
import random
import warnings
import weakref

import numpy as np
import programs
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchember import EmberWarning, NoiseScale, noise_scale
from torchember.state.noise import NoiseEstimate, PairMean, fit_line_over_sizes, solve_two_sizes


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x*1
    @staticmethod
    def backward(ctx, g): return None


class Scaled(nn.Module):
    "A model whose parameter `scale` receives None from an autograd Function."
    def __init__(self): super().__init__(); self.net,self.scale = mlp(),nn.Parameter(torch.ones(1))
    def forward(self, x): return self.net(x)*NoGradient.apply(self.scale)


def mlp(): return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model, n=4, weight=1.): return (model(torch.randn(n, 6))-1).square().mean()*weight


def grads_of(model, loss): return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).double()


def by_hand(chains, m):
    "Return means over chains of |G|^2 and tr(Sigma), from gradients of shape (chains, k, parameters)."
    k = chains.shape[1]
    dots = chains@chains.mT
    off = (dots.sum((1, 2))-dots.diagonal(dim1=1, dim2=2).sum(1))/(k*(k-1))
    return off.mean().item(), m*chains.var(1).sum(1).mean().item()


def accumulate(ns, model, losses, micro=True):
    model.zero_grad()
    for loss in losses:
        loss.backward()
        if micro: ns.micro()


def test_compared_with_separate_gradients():
    "Compare `noise_scale` and `NoiseScale` with a computation from all gradients."
    model = mlp()
    torch.manual_seed(1)
    chains = torch.stack([torch.stack([grads_of(model, loss_of(model)) for _ in range(5)]) for _ in range(3)])
    G2,T = by_hand(chains, 4)
    torch.manual_seed(1)
    off = noise_scale(model, lambda: loss_of(model), 4, num_iters=5, num_average=3)
    torch.manual_seed(1)
    with NoiseScale(model, 4, decay=1) as ns:
        for _ in range(3):
            accumulate(ns, model, (loss_of(model) for _ in range(5)))
            on = ns.step()
    for est in (off, on): assert est.grad_sq==pytest.approx(G2, rel=1e-4) and est.trace==pytest.approx(T, rel=1e-4) and est.count==3
    assert on.errors==pytest.approx(off.errors, rel=1e-3, nan_ok=True) and on.sizes==[4, 20]


def test_closure_calls_backward():
    model,got = mlp(),[]
    def closure():
        loss = loss_of(model)
        loss.backward()
        return loss
    for f in (lambda: loss_of(model), closure, lambda: closure() and None):
        torch.manual_seed(0)
        got.append(noise_scale(model, f, 4, 3, 4).dict())
    for other in got[1:]: assert other==pytest.approx(got[0], nan_ok=True)


@pytest.mark.parametrize('scale', [1/4, 6., 2.**16])
def test_scaled_losses(scale):
    "The noise scale is a ratio, so a loss scale cancels. Its numerator and denominator need `scale=`."
    model = mlp()
    def run(factor, **kwargs):
        torch.manual_seed(0)
        off = noise_scale(model, lambda: loss_of(model, weight=factor), 4, 4, 8, **kwargs)
        torch.manual_seed(0)
        with NoiseScale(model, 4, **kwargs) as ns:
            for _ in range(8):
                accumulate(ns, model, (loss_of(model, weight=factor) for _ in range(4)))
                ns.step()
        return off, ns.estimate
    for plain,scaled,unscaled in zip(run(1), run(scale, scale=scale), run(scale), strict=True):
        assert scaled.dict()==pytest.approx(plain.dict(), rel=1e-3, nan_ok=True)
        assert unscaled.noise_scale==pytest.approx(plain.noise_scale, rel=1e-3) and unscaled.trace==pytest.approx(plain.trace*scale**2, rel=1e-3)


def test_changing_scale():
    "The scale changes as with a GradScaler, with a step that overflows."
    model = mlp()
    def run(scales):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as w, NoiseScale(model, 4) as ns:
            warnings.simplefilter('always')
            for s in scales:
                accumulate(ns, model, (loss_of(model, weight=s) for _ in range(3)))
                ns.step(scale=s)
        return ns, [o.category for o in w]
    ns,warned = run([1, 1, 1])
    other,_ = run([4., .5, 1024.])
    assert not warned and other.estimate.dict()==pytest.approx(ns.estimate.dict(), rel=1e-3, nan_ok=True)
    ns,warned = run([1., math.inf, 1., math.inf, 1.])
    assert ns.skipped==2 and ns.estimate.count==3 and warned==[EmberWarning] and math.isfinite(ns.estimate.trace) and '2 steps left out' in repr(ns)


def test_micro_batches_of_different_sizes():
    "Estimates from micro-batches of different sizes are unbiased: check their mean over many steps."
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad(): model.weight.fill_(1.)
    with NoiseScale(model, 8, decay=1) as ns:
        for _ in range(600):
            model.zero_grad()
            for n in (8, 2, 5):
                (model(torch.randn(n, 3)).squeeze(1)-torch.randn(n)).square().mean().div(2).backward()
                ns.micro(n)
            ns.step()
    want = dict(grad_sq=3., trace=4*3.+3, noise_scale=5.) # Exact values: |e|^2 = 3, trace = (d+1)|e|^2 + d
    for k,v in want.items(): assert abs(getattr(ns.estimate, k)-v)<3*ns.estimate.errors[k], (k, ns)
    assert ns.sizes[0]==pytest.approx(3/(1/8+1/2+1/5))


def test_coverage_of_errors():
    "About 68% of exact values are within one standard error, also with decay. Estimates are unbiased."
    rng = np.random.default_rng(0)
    d,m,k = 4,4,8
    e = np.full(d, .7)
    G2,T = e@e,(d+1)*(e@e)+d
    def steps(n):
        x = rng.standard_normal((n, k, m, d))
        g = ((x@e-rng.standard_normal((n, k, m)))[..., None]*x).mean(2)
        return (g**2).sum(-1).mean(1), (g.mean(1)**2).sum(-1)
    for decay,n in ((1., 16), (.95, 150)):
        hits,means = [],[]
        for _ in range(500):
            pairs = PairMean(decay)
            for a,b in zip(*steps(n), strict=True): pairs.add(solve_two_sizes(m, m*k, a, b))
            est = NoiseEstimate(pairs, (m, m*k))
            hits.append([abs(getattr(est, n)-w)<est.errors[n] for n,w in (('noise_scale', T/G2), ('grad_sq', G2), ('trace', T))])
            means.append(pairs.mean)
        means = np.array(means)
        assert (np.abs(np.mean(hits, 0)-.68)<.07).all(), (decay, np.mean(hits, 0))
        assert (np.abs(means.mean(0)-[G2, T])<4*means.std(0)/500**.5).all(), (decay, means.mean(0))


def test_coverage_of_errors_for_a_model():
    "Check the coverage of the errors of `noise_scale`, for the estimate of two batch sizes and for the fitted line."
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad(): model.weight.fill_(.7)
    def closure(): return (model(torch.randn(4, 4)).squeeze(1)-torch.randn(4)).square().mean()/2
    G2,T = 1.96,5*1.96+4
    hits = []
    for seed in range(60):
        torch.manual_seed(seed)
        est = noise_scale(model, closure, 4, num_iters=6, num_average=16)
        hits += [[abs(getattr(q, n)-w)<q.errors[n] for q in (est, est.fit) for n,w in (('noise_scale', T/G2), ('grad_sq', G2), ('trace', T))]]
    # With 60 runs, the standard deviation of a share is 6%
    assert .5<np.mean(hits, 0).min() and np.mean(hits, 0).max()<.86 and .6<np.mean(hits)<.76, np.mean(hits, 0)


class Odd(nn.Module):
    "A model with dropout, BatchNorm, a tied weight, a frozen weight and an unused weight."
    def __init__(self):
        super().__init__()
        self.a,self.norm,self.drop = nn.Linear(6, 6),nn.BatchNorm1d(6),nn.Dropout(.3)
        self.b,self.frozen,self.unused = nn.Linear(6, 6, bias=False),nn.Linear(6, 6),nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.frozen.requires_grad_(False)
    def forward(self, x): return self.frozen(self.b(self.drop(self.norm(self.a(x)))))


@pytest.mark.parametrize('fails', [False, True])
def test_model_is_restored(fails):
    "`noise_scale` restores gradients, buffers, modes, random generators and hooks, also after an error."
    model,calls = Odd(),[]
    model.norm.eval()
    model(torch.randn(8, 6)).square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    before = [None if g is None else g.clone() for g in grads]
    buffers = {k: b.clone() for k,b in model.named_buffers()}
    state = torch.get_rng_state(),random.getstate(),np.random.get_state()[1].copy()
    def closure():
        calls.append(1)
        model.train()
        random.random(), np.random.rand()
        if fails and len(calls)==4: raise RuntimeError('the loader broke')
        return model(torch.randn(8, 6)).square().mean()
    if fails:
        with pytest.raises(RuntimeError, match='the loader broke'): noise_scale(model, closure, 8, 3, 4)
    else: assert noise_scale(model, closure, 8, 3, 4).trace>0 and len(calls)==12
    assert all(p.grad is g for p,g in zip(model.parameters(), grads, strict=True))
    assert all(b is None or torch.equal(g, b) for g,b in zip(grads, before, strict=True))
    assert all(torch.equal(b, buffers[k]) for k,b in model.named_buffers())
    assert model.training and not model.norm.training and model.drop.training
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate()==state[1] and (np.random.get_state()[1]==state[2]).all()
    assert not any(p._backward_hooks for p in model.parameters())


def test_hooks_are_removed():
    "Hooks are removed by `close`, at the end of a `with` block, after an error in it, and with the object."
    model = mlp()
    def hooks(): return sum(len(p._backward_hooks or ()) for p in model.parameters())
    ns = NoiseScale(model, 4)
    assert hooks()==4
    ns.close()
    ns.close()
    assert hooks()==0
    with pytest.raises(ZeroDivisionError), NoiseScale(model.parameters(), 4): raise ZeroDivisionError
    assert hooks()==0
    ns = NoiseScale(model, 4)
    accumulate(ns, model, [loss_of(model)])
    dead = weakref.ref(ns)
    del ns
    gc.collect()
    assert dead() is None and hooks()==0
    own = model[0].weight.register_hook(lambda g: None)
    noise_scale(model, lambda: loss_of(model), 4, 2, 2)
    assert hooks()==1
    own.remove()


def test_training_is_not_changed():
    "Training with and without a NoiseScale is equal, bit by bit."
    def train(watched):
        torch.manual_seed(0)
        model = Odd()
        opt = torch.optim.Adam(model.parameters())
        ns = NoiseScale(model, 8) if watched else None
        for _ in range(5):
            opt.zero_grad()
            for _ in range(2):
                model(torch.randn(8, 6)).square().mean().backward()
                if ns: ns.micro()
            if ns: ns.step()
            opt.step()
        return model.state_dict()
    a,b = train(False),train(True)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_noise_scale_during_training():
    "A NoiseScale ignores the gradients of `noise_scale` in the middle of a step."
    model,seen = mlp(),[]
    for between in (False, True):
        torch.manual_seed(0)
        with NoiseScale(model, 4) as ns:
            accumulate(ns, model, [loss_of(model)])
            if between: noise_scale(model, lambda: loss_of(model), 4, 3, 2)
            loss_of(model).backward()
            seen.append(ns.step().dict())
    assert seen[0]==pytest.approx(seen[1], nan_ok=True) and ns.skipped==0


@pytest.mark.parametrize('f', ['checkpoint', 'compiled', 'bfloat16', 'sparse'])
def test_other_ways_to_compute_gradients(f):
    "Each way gives one gradient for each parameter and micro-batch."
    torch.manual_seed(0)
    model,rel = mlp(),1e-3
    run = lambda x: model(x)
    data = lambda: torch.randn(4, 6)
    if f=='checkpoint': run = lambda x: checkpoint(model, x, use_reentrant=False)
    if f=='compiled': run = torch.compile(model, backend='aot_eager')
    if f=='bfloat16': model,data,rel = model.bfloat16(),lambda: torch.randn(4, 6).bfloat16(),.1
    if f=='sparse': model,data = nn.Sequential(nn.Embedding(5, 6, sparse=True), nn.Linear(6, 1)),lambda: torch.randint(5, (4,))
    def loss(net): return (net(data())-1).square().mean()
    with torch.random.fork_rng():
        chains = []
        for _ in range(4):
            kept = []
            for _ in range(4):
                grads = torch.autograd.grad(loss(model), list(model.parameters()))
                kept.append(torch.cat([g.to_dense().flatten().double() for g in grads]))
            chains.append(torch.stack(kept))
    G2,T = by_hand(torch.stack(chains), 4)
    est = noise_scale(model, lambda: loss(run), 4, 4, 4)
    assert est.grad_sq==pytest.approx(G2, rel=rel) and est.trace==pytest.approx(T, rel=rel)


def test_errors_of_arguments():
    "The error for a wrong argument names its value and a remedy."
    model = mlp()
    def good(): return loss_of(model)
    def twice():
        good().backward()
        good().backward()
    def zeroes():
        model.zero_grad()
        return good()
    def clips():
        good().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for kw,message in ((dict(num_iters=1), 'The noise scale compares gradients'), (dict(num_average=0), 'num_average must be at least 1, got 0'),
            (dict(micro_batch_size=0), 'micro_batch_size must be at least 1, got 0')):
        with pytest.raises(ValueError, match=message): noise_scale(model, good, **dict(micro_batch_size=4, num_average=2) | kw)
    for f,message in ((twice, 'two gradients in one call'), (zeroes, 'were not accumulated'), (clips, 'averaged over ranks, or clipped'),
            (lambda: 3., 'gave no gradient and returned 3.0'), (lambda: None, 'returned None')):
        with pytest.raises(ValueError, match=message): noise_scale(model, f, 4)
    with pytest.raises(ValueError, match='got 4 and 4'): solve_two_sizes(4, 4, 1, 1)
    with pytest.raises(ValueError, match='two different batch sizes'): fit_line_over_sizes([4], [1])
    with pytest.raises(ValueError, match='at most 1'): NoiseScale(model, 4, decay=1.01)
    with pytest.raises(ValueError, match='micro_batch_size must be at least 1, got 0'): NoiseScale(model, 0)
    with pytest.raises(ValueError, match='no parameter requires a gradient'): NoiseScale(nn.Linear(2, 2).requires_grad_(False), 4)
    assert not any(p._backward_hooks for p in model.parameters())


def test_unusable_steps_are_left_out():
    "Unusable steps do not count, with one warning for each reason. Other steps count."
    model = mlp()
    def good(ns): accumulate(ns, model, [loss_of(model) for _ in range(2)])
    def one(ns): accumulate(ns, model, [loss_of(model)])
    def none(ns): model.zero_grad()
    def twice(ns): accumulate(ns, model, [loss_of(model) for _ in range(2)], micro=False)
    def gone(ns):
        good(ns)
        model.zero_grad()
    def zeros(ns):
        good(ns)
        model.zero_grad(set_to_none=False)
    def infinite(ns): accumulate(ns, model, [loss_of(model, weight=math.nan) for _ in range(2)])
    for f,message in ((one, 'one micro-batch'), (none, 'no backward'), (twice, 'micro()'), (gone, 'before zero_grad'), (zeros, 'before zero_grad'),
            (infinite, 'not finite')):
        with warnings.catch_warnings(record=True) as w, NoiseScale(model, 4) as ns:
            warnings.simplefilter('always')
            for g in (good, f, f, good):
                g(ns)
                ns.step()
        assert len(w)==1 and message in str(w[0].message) and w[0].category is EmberWarning and w[0].filename==__file__, [str(o.message) for o in w]
        assert ns.skipped==2 and ns.estimate.count==2 and math.isfinite(ns.estimate.trace)


def test_gradient_of_only_noise():
    "If gradients are only noise, the noise scale is infinite, and its text states a lower bound."
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    est = noise_scale(model, lambda: (model(torch.randn(4, 3)).squeeze(1)-torch.randn(4)).square().mean()/2, 4)
    assert est.noise_scale==math.inf and math.isnan(est.errors['noise_scale']) and est.at_least>20
    assert 'cannot be distinguished from zero' in repr(est) and f'At least {est.at_least:.3g}' in repr(est) and est.trace==pytest.approx(3, rel=.2)
    est.plot()


def test_gradient_without_noise():
    model = nn.Linear(3, 1, bias=False)
    est = noise_scale(model, lambda: model(torch.ones(4, 3)).mean(), 4)
    assert est.noise_scale==pytest.approx(0, abs=1e-5) and est.grad_sq==pytest.approx(3) and est.trace==pytest.approx(0, abs=1e-5)


def test_one_chain_has_no_errors():
    torch.manual_seed(1)
    model = mlp()
    est = noise_scale(model, lambda: loss_of(model), 64, num_average=1)
    assert math.isfinite(est.noise_scale) and all(map(math.isnan, est.errors.values())) and 'no errors' in repr(est)
    est.plot()


def test_progress_bar_and_plot(capsys):
    import matplotlib.pyplot as plt
    model = mlp()
    est = noise_scale(model, lambda: loss_of(model), 4, 4, 4, progress=True)
    assert '/16' in capsys.readouterr().err
    _,ax = plt.subplots()
    assert est.plot(ax) is ax and ax.get_xlabel()=='1 / batch size' and len(ax.lines)>=2
    line,band = ax.lines[0].get_xydata(),ax.collections[0].get_paths()[0].vertices
    # At 1/B = 0 the value is |G|^2 with its error; at larger 1/B, the trace contributes to value and error
    for x,y in (line[0], line[25], line[-1]):
        ends = band[band[:, 0]==x, 1]
        assert y==pytest.approx(est.grad_sq+est.trace*x) and (ends.max()+ends.min())/2==pytest.approx(y)
        assert (ends.max()-ends.min())/2==pytest.approx((np.array([1, x])@est.cov@[1, x])**.5)
    assert est.cov[0, 0]==pytest.approx(est.errors['grad_sq']**2)
    plt.close('all')


ranks = """
import json, os, sys, torch
from torch import nn, distributed as dist
from torchember import NoiseScale
dist.init_process_group('gloo')
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
data = torch.randn(5, 2, 3, 4, 6) # steps, ranks, micro-batches, samples
net = nn.parallel.DistributedDataParallel(model)
calls = []
reduce = dist.all_reduce
dist.all_reduce = lambda x, *a, **k: (calls.append(x.numel()), reduce(x, *a, **k))
def loss(x): return (net(x)-1).square().mean()
out = {}
for micros in (1, 3):
    with NoiseScale(net, 4, decay=1, scale=1/micros) as ns:
        for step in data:
            net.zero_grad()
            for x in step[rank][:micros-1]:
                with net.no_sync(): (loss(x)/micros).backward()
                ns.micro()
            (loss(step[rank][micros-1])/micros).backward()
            ns.step()
    out[micros] = ns.estimate.dict()
    assert calls==[3]*5, calls
    calls.clear()
json.dump(out, open(sys.argv[1]+str(rank), 'w'))
dist.destroy_process_group()
"""


@pytest.mark.release
@pytest.mark.slow
def test_ranks(tmp_path):
    "Two gloo processes give the result of one process with all micro-batches, with one collective of three numbers per step."
    programs.ranks(ranks, tmp_path/'out')
    got = [json.loads((tmp_path/f'out{r}').read_text()) for r in range(2)]
    torch.manual_seed(0)
    model = mlp()
    data = torch.randn(5, 2, 3, 4, 6)
    for micros in (1, 3):
        with NoiseScale(model, 4, decay=1) as ns:
            for step in data:
                accumulate(ns, model, ((model(x)-1).square().mean() for x in step[:, :micros].flatten(0, 1)))
                ns.step()
        assert ns.estimate.count==5
        for g in got: assert g[str(micros)]==pytest.approx(ns.estimate.dict(), rel=1e-3, nan_ok=True)


class WithEmpty(Scaled):
    "A model with a parameter without elements."
    def __init__(self): nn.Module.__init__(self); self.net,self.scale = mlp(),nn.Parameter(torch.empty(0))
    def forward(self, x): return self.net(x)+self.scale.sum()


@pytest.mark.parametrize('kind', [Scaled, WithEmpty])
def test_parameter_without_gradient_or_elements(kind):
    "Both estimates equal those of the model without this parameter."
    got = []
    for make in (kind, mlp):
        torch.manual_seed(0)
        model = make()
        with NoiseScale(model, 4) as ns:
            for _ in range(2):
                accumulate(ns, model, (loss_of(model) for _ in range(4)))
                got.append(ns.step())
        assert all(p.grad is None for n,p in model.named_parameters() if n=='scale' and p.numel())
        torch.manual_seed(1)
        got.append(noise_scale(model, lambda: loss_of(model), 4, num_iters=3, num_average=2)) # noqa: B023
    for a,b in zip(got[:3], got[3:], strict=True): assert (a.grad_sq, a.trace, a.count)==(b.grad_sq, b.trace, b.count)
