"Each call is recorded in the right pass: if a pass raises, in solvers that are autograd Functions, and with checkpoints."
import pytest
import torch
import torch.utils.checkpoint
from tensor_rows import lines
from torch import nn

from torchember import torchEmber


def seen(te, **where): return [(r['step'], r['call'], r['mean'], r['numel']) for r in lines(te) if all(r.get(k)==v for k,v in where.items())]
def latest(te, **where):
    "Return (step, call, mean, numel) of the rows in the table, which has no superseded rows."
    d = te.t.df
    for k,v in where.items(): d = d[d[k]==v]
    return sorted(zip(d.step, d.call, d['mean'], d.numel, strict=True))


class Fails(nn.Module):
    def __init__(self, error=RuntimeError):
        super().__init__()
        self.a,self.b,self.error = nn.Identity(),nn.Linear(1, 1),error

    def forward(self, x):
        x = self.a(x)
        if len(x)>2: raise self.error('out of memory')
        return self.b(x)


def trained(te, model, opt, sizes, error=RuntimeError, reads=False):
    "Train on batches of these sizes, and skip batches that raise. All values of a batch are equal to its size."
    for n in sizes:
        try: model(torch.full((n, 1), float(n))).sum().backward()
        except error:
            if reads: te.t.barrier()
            continue
        opt.step()
        if te.recorder.watch is None and te.recorder.steps.manual: te.step()
        opt.zero_grad()


@pytest.mark.parametrize('error', [RuntimeError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize('reads', [False, True])
@pytest.mark.parametrize('ends', ['optimizer', 'te.step', 'passes'])
def test_a_pass_that_raises(ends, reads, error):
    "A failed pass is no step, and is not merged with the next pass. Rows of it that were already read are superseded."
    model = Fails(error)
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, stats=['mean', 'numel'], ttypes=('input', 'output', 'weight'), **(dict(optimizer=opt) if ends=='optimizer' else {}))
    if ends=='te.step': te.step()
    trained(te, model, opt, (8, 2, 1, 8, 9, 2), error, reads)
    report = te.close()
    want = [(0, 0, 2, 2), (1, 0, 1, 1), (2, 0, 2, 2)]
    assert latest(te, path='a', ttype='input')==latest(te, path='a', ttype='output')==latest(te, path='b', ttype='input')==want
    if not reads: assert seen(te, module='model(Fails).a(Identity)', ttype='input')==want
    assert sorted((r['step'], r['tname']) for r in te.t.lines() if r['ttype']=='weight')==[(s, f'weight_{i}') for s in range(3) for i in range(2)]
    assert report['steps']==3 and [m for m in report['remarks'] if '3 passes raised' in m]


@pytest.mark.parametrize('ends', ['optimizer', 'te.step', 'passes'])
def test_a_run_that_ends_with_an_exception(ends):
    "If the last pass raises, its rows are kept in a separate step."
    model = Fails()
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, stats=['mean', 'numel'], ttypes=('input',), **(dict(optimizer=opt) if ends=='optimizer' else {}))
    if ends=='te.step': te.step()
    trained(te, model, opt, (2, 8))
    te.close()
    assert seen(te, module='model(Fails).a(Identity)')==[(0, 0, 2, 2), (1, 0, 8, 8)] and seen(te, module='model(Fails).b(Linear)')==[(0, 0, 2, 2)]


def test_a_micro_batch_that_raises():
    "The first, a middle and the last of five micro-batches raise. The step merges only the two others."
    model = Fails()
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, optimizer=opt, stats=['mean', 'numel'], ttypes=('input', 'output', 'output_grad'))
    te.how_record_out(lambda x: {'mean': x.mean().item(), 'numel': x.numel()})
    for n in (8, 1, 9, 2, 8):
        try: model(torch.full((n, 1), float(n))).sum().backward()
        except RuntimeError: pass
    opt.step()
    te.close()
    a = dict(module='model(Fails).a(Identity)')
    assert seen(te, **a, ttype='input')==[(0, 0, pytest.approx(5/3), 3)]
    assert [(r['micro'], r['mean'], r['numel']) for r in te.t.lines() if r['module']==a['module'] and r['ttype']=='output']==[(0, 1, 1), (1, 2, 2)]
    grads = [r for r in te.t.lines() if r['ttype']=='output_grad' and r['module']=='model(Fails)']
    assert [(r['call'], r.get('backward'), r['mean'], r['numel']) for r in grads]==[(0, None, 1, 3)]


def test_a_model_that_catches_an_exception():
    "If the model catches an exception of a submodule, only the call fails, and the pass continues."
    class Tries(nn.Module):
        def __init__(self): super().__init__(); self.first,self.second = Fails(),nn.Identity()
        def forward(self, x):
            try: return self.first(x)
            except RuntimeError: return self.second(x)*self.first.b.weight
    model = Tries()
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, optimizer=opt, stats=['mean', 'numel'], ttypes=('input', 'output'))
    for n in (8, 2):
        model(torch.full((n, 1), float(n))).sum().backward()
        opt.step()
    assert not te.close()['remarks']
    assert seen(te, module='model(Tries).first(Fails)', ttype='input')==[(0, 0, 8, 8), (1, 0, 2, 2)]
    assert seen(te, module='model(Tries).second(Identity)', ttype='output')==[(0, 0, 8, 8)]


def test_a_child_that_raises_is_a_failed_call():
    "The root is not called, so the calls of its children together form one pass. If a child raises, the pass fails."
    model = nn.ModuleDict(dict(g=nn.Identity(), d=Fails()))
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, optimizer=opt, stats=['mean', 'numel'], ttypes=('input',))
    for n in (8, 2):
        try: model['d'](model['g'](torch.full((n, 1), float(n)))).sum().backward()
        except RuntimeError: continue
        opt.step()
    te.close()
    assert {m: seen(te, module=f'model(ModuleDict).{m}') for m in ('g(Identity)', 'd(Fails)', 'd(Fails).a(Identity)')}==dict.fromkeys(
        ('g(Identity)', 'd(Fails)', 'd(Fails).a(Identity)'), [(0, 0, 2, 2)])


def test_compiled_code_that_raises():
    "Compiled code does not report exceptions. The recorder finds the failed pass when the next pass begins."
    class Looks(nn.Module):
        def __init__(self): super().__init__(); self.a,self.emb = nn.Identity(),nn.Embedding(4, 1)
        def forward(self, i): return self.emb(self.a(i))
    model = Looks()
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, optimizer=opt, stats=['mean', 'numel'], ttypes=('input',))
    torch._dynamo.reset()
    fast = torch.compile(model, backend='aot_eager', fullgraph=True)
    for i in (1, 9, 2, 9, 9, 3):
        try: fast(torch.full((2,), i)).sum().backward()
        except IndexError: continue
        opt.step()
    te.close()
    assert te.recorder.calls.here.depth==te.recorder.events.running==0
    assert seen(te, module='model(Looks).a(Identity)')==[(0, 0, 1, 2), (1, 0, 2, 2), (2, 0, 3, 2)]


# ---- autograd Functions that call modules

class Field(nn.Module):
    def __init__(self): super().__init__(); self.l = nn.Linear(2, 2)
    def forward(self, y): return self.l(y).tanh()


def solved(f, y, n=4):
    "Integrate with Euler's method and the adjoint method: `n` evaluations in the forward, and `n` in the backward."
    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, *ps):
            with torch.no_grad():
                for _ in range(n): y = y+f(y)/n
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, g):
            y, = ctx.saved_tensors
            gs = [torch.zeros_like(p) for p in f.parameters()]
            for _ in range(n):
                with torch.enable_grad(): out = f(z := y.detach().requires_grad_())
                cotangents.append(g.mean().item())
                d,*dp = torch.autograd.grad(out, (z, *f.parameters()), g)
                g,gs,y = g+d/n,[a+b/n for a,b in zip(gs, dp, strict=True)],y-out.detach()/n
            return g, *gs
    cotangents = []
    return Adjoint.apply(y, *f.parameters()), cotangents


class Solver(nn.Module):
    def __init__(self): super().__init__(); self.f,self.head = Field(),nn.Linear(2, 1)
    def forward(self, y):
        y,self.cotangents = solved(self.f, y)
        return self.head(y)


@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('with_optimizer', [True, False])
@pytest.mark.parametrize('root', [True, False], ids=['the field is the root', 'a layer'])
def test_an_adjoint_solver(root, with_optimizer, compiled):
    "All evaluations of a step, in forward and backward, are calls of one pass. Each gradient belongs to its own call."
    torch.manual_seed(0)
    model = Field() if root else Solver()
    f = model if root else model.f
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, ttypes=('input', 'output', 'output_grad'), stats=['mean', 'numel'], **(dict(optimizer=opt) if with_optimizer else {}))
    torch._dynamo.reset()
    if compiled: f.compile(backend='aot_eager')
    cotangents = []
    for _ in range(2):
        y,x = None,torch.randn(3, 2)
        if root: y,got = solved(f, x)
        else: y = model(x); got = model.cotangents
        y.square().sum().backward()
        cotangents += got
        opt.step()
    te.close()
    name = 'model(Field)' if root else 'model(Solver).f(Field)'
    for module in (name, f'{name}.l(Linear)'):
        for ttype in ('input', 'output'): assert [r[:2] for r in seen(te, module=module, ttype=ttype)]==[(s, c) for s in range(2) for c in range(8)]
        assert sorted(r[:2] for r in seen(te, module=module, ttype='output_grad'))==[(s, c) for s in range(2) for c in range(4, 8)]
    assert [r[2] for r in sorted(seen(te, module=name, ttype='output_grad'))]==pytest.approx(cotangents, rel=1e-4, abs=1e-6)
    if not root: assert [r[:2] for r in seen(te, module='model(Solver)', ttype='output')]==[(0, 0), (1, 0)]


def test_two_solves_of_one_step_are_two_passes():
    "Rows of the two passes are merged call by call, as for micro-batches."
    f = Field()
    opt = torch.optim.SGD(f.parameters(), .1)
    with torchEmber(f, optimizer=opt, ttypes=('output',), stats=['mean', 'numel']) as te:
        for n in (3, 2): solved(f, torch.randn(n, 2))[0].sum().backward()
        opt.step()
    assert [(r[0], r[1], r[3]) for r in seen(te, module='model(Field)')]==[(0, c, 10) for c in range(8)]


@pytest.mark.parametrize('reentrant', [True, False])
@pytest.mark.parametrize('with_optimizer', [True, False])
@pytest.mark.parametrize('root', [True, False], ids=['around the root', 'inside'])
def test_a_checkpoint_is_recorded_once(root, with_optimizer, reentrant):
    "The recomputation of a checkpoint is not recorded, also if a user's autograd Function triggers it."
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): ctx.save_for_backward(x); return 2*x
        @staticmethod
        def backward(ctx, g): return g*2*torch.ones_like(ctx.saved_tensors[0])
    class Body(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = nn.Linear(2, 2),nn.Linear(2, 2)
        def forward(self, x): return Twice.apply(self.b(Twice.apply(self.a(x))))
    class Outer(nn.Module):
        def __init__(self): super().__init__(); self.body = Body()
        def forward(self, x): return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=reentrant)
    model = Body() if root else Outer()
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, ttypes=('output', 'output_grad'), stats=['mean', 'numel'], **(dict(optimizer=opt) if with_optimizer else {}))
    for _ in range(2):
        x = torch.randn(3, 2, requires_grad=True)
        (torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant) if root else model(x)).sum().backward()
        opt.step()
    te.close()
    name = 'model(Body)' if root else 'model(Outer).body(Body)'
    for module,grad in ((name, 1), (f'{name}.b(Linear)', 2)):
        assert [r[:2]+r[3:] for r in seen(te, module=module, ttype='output')]==[(0, 0, 6), (1, 0, 6)]
        assert seen(te, module=module, ttype='output_grad')==[(0, 0, grad, 6), (1, 0, grad, 6)]
