"A tensor for which the backward computes no gradient has no gradient row, and the training continues."
import pytest
import torch
from compared import needs_hooks, places, plain, same_rows
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchember import EmberWarning, Monitor, from_activation_grad, torchEmber, track

TYPES = ('input', 'output', 'output_grad', 'input_grad', 'weight_grad')


class Heads(nn.Module):
    "A layer with three outputs, made by one chunk operation."
    def __init__(self): super().__init__(); self.proj = nn.Linear(4, 6)
    def forward(self, x): return self.proj(x).chunk(3, 1)


class FirstHeadUnused(nn.Module):
    def __init__(self): super().__init__(); self.heads,self.out = Heads(),nn.Linear(2, 1)
    def forward(self, x):
        _,b,c = self.heads(x)
        return self.out(b*c).sum()


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x*1
    @staticmethod
    def backward(ctx, g): return None


class Cut(nn.Module):
    "A model in which an autograd Function returns None as the gradient of layer `a` and of the parameter `w`."
    def __init__(self):
        super().__init__()
        self.a,self.b,self.w = nn.Linear(4, 4),nn.Linear(4, 4),nn.Parameter(torch.ones(4))
    def forward(self, x): return (self.b(NoGradient.apply(self.a(x)))*NoGradient.apply(self.w)).square().sum()


class Rows(nn.Module):
    def forward(self, p): return p.unbind(0)


class UnusedRowOfAParameter(nn.Module):
    "A model that splits a parameter into two rows, and uses only the first."
    def __init__(self): super().__init__(); self.p,self.rows = nn.Parameter(torch.randn(2, 4)),Rows()
    def forward(self, x):
        a,_ = self.rows(self.p)
        return (x*a).sum()


MODELS = FirstHeadUnused,Cut,UnusedRowOfAParameter
without = { # for each model, the tensors that get no gradient in the backward
    FirstHeadUnused: {('model(FirstHeadUnused).heads(Heads)', 'output_grad', 'output_0')},
    Cut: {('model(Cut)', 'input_grad', 'x'), *(('model(Cut).a(Linear)', *t) for t in (('input_grad', 'input'), ('output_grad', 'output_0')))},
    UnusedRowOfAParameter: {('model(UnusedRowOfAParameter).rows(Rows)', 'output_grad', 'output_1')}}


def rows_of(kind, how, backend=None):
    "Train two steps. Return the rows and the gradients of the parameters."
    torch._dynamo.reset()
    torch.manual_seed(0)
    model,x = kind(),torch.randn(3, 4, requires_grad=True)
    with torchEmber(model, ttypes=TYPES, stats='full', on_error='raise') as te:
        f = torch.compile(model, backend=backend, fullgraph=True) if how=='compiled' else model
        if how=='checkpointed': f = lambda x: checkpoint(model, x, use_reentrant=False) # noqa: E731
        if how=='reentrant': f = lambda x: checkpoint(model, x, use_reentrant=True) # noqa: E731
        for _ in range(2):
            f(x).backward()
            te.step()
        return plain(te), [p.grad for p in model.parameters()]


@pytest.mark.parametrize('kind', MODELS)
def test_rows_are_those_of_the_gradients_that_arrive(kind):
    "Each computed gradient has a row. The gradients are equal to those of an unarmed model."
    rows,grads = rows_of(kind, 'eager')
    got = {(r['module'], r['ttype'], r['tname']) for r in rows}
    tensors = {(m, {'input': 'input_grad', 'output': 'output_grad'}[t], n) for m,t,n in got if t in ('input', 'output')}
    assert tensors-got==without[kind]
    torch.manual_seed(0)
    model,x = kind(),torch.randn(3, 4, requires_grad=True)
    for _ in range(2): model(x).backward()
    assert all(p.grad is None and g is None or torch.equal(p.grad, g) for p,g in zip(model.parameters(), grads, strict=True))


def test_the_row_of_a_used_head_has_the_numbers_of_its_gradient():
    torch.manual_seed(0)
    model,grads = FirstHeadUnused(),{}
    with torchEmber(model, ttypes=('output', 'output_grad'), stats='full') as te:
        for n in (1, 2):
            model.heads.register_forward_hook(lambda m, i, out, n=n: out[n].register_hook(lambda g: grads.update({n: g.double()})) and None)
        model(torch.randn(3, 4)).backward()
        rows = {r['tname']: r for r in plain(te) if r['ttype']=='output_grad' and r['module'].endswith('heads(Heads)')}
    assert rows.keys()=={'output_1', 'output_2'}
    for n,g in grads.items():
        r = rows[f'output_{n}']
        assert r['shape']==[3, 2] and r['l2']==pytest.approx(g.norm().item(), rel=1e-6) and r['mean']==pytest.approx(g.mean().item(), rel=1e-6)


@pytest.mark.parametrize('kind', MODELS)
@pytest.mark.parametrize('how', ['checkpointed', 'reentrant'])
def test_checkpointed_models_have_the_same_rows(kind, how):
    want,got = rows_of(kind, 'eager')[0],rows_of(kind, how)[0]
    assert sorted(places(want))==sorted(places(got))


@needs_hooks
@pytest.mark.parametrize('kind', MODELS)
@pytest.mark.parametrize('backend', ['eager', 'aot_eager', pytest.param('inductor', marks=pytest.mark.slow)])
def test_compiled_models_have_the_same_rows(kind, backend):
    (want,a),(got,b) = rows_of(kind, 'eager'),rows_of(kind, 'compiled', backend)
    same_rows(want, got, 2e-5)
    assert all(p is q is None or torch.allclose(p, q, rtol=1e-4) for p,q in zip(a, b, strict=True))


@needs_hooks
def test_the_unused_output_of_a_compiled_block_has_a_gradient_of_zeros():
    "torch passes zeros as the gradient of an unused output of a compiled graph, so this output has a row of zeros."
    torch._dynamo.reset()
    model = FirstHeadUnused()
    with torchEmber(model, ttypes=('output_grad',), stats='full') as te:
        model.heads.compile(backend='aot_eager')
        model(torch.randn(3, 4)).backward()
        rows = {r['tname']: r['l2'] for r in plain(te) if r['module'].endswith('heads(Heads)')}
    assert rows.keys()=={'output_0', 'output_1', 'output_2'} and rows['output_0']==0<rows['output_1']


@needs_hooks
def test_a_second_derivative_through_an_unused_head():
    torch._dynamo.reset()
    def rows(f, model):
        with torchEmber(model, ttypes=('output_grad',), on_error='raise') as te:
            x = torch.randn(3, 4, requires_grad=True)
            g, = torch.autograd.grad(f(x), x, create_graph=True)
            g.square().sum().backward()
            return {(r['module'], r['tname'], r.get('backward')) for r in plain(te)}
    model = FirstHeadUnused()
    assert rows(model, model)
    assert ('model(FirstHeadUnused).heads(Heads)', 'output_0', None) not in rows(torch.compile(model, backend='eager'), model)


@pytest.mark.parametrize('kind', MODELS)
def test_track_continues_without_a_gradient(kind):
    "The function `track` records gradients of outputs by default, also in a model with missing gradients."
    model = kind()
    opt = torch.optim.SGD(model.parameters(), .1)
    te = track(model, optimizer=opt)
    for _ in range(2):
        model(torch.randn(3, 4)).backward()
        opt.step()
        opt.zero_grad()
    got = {(r['module'], r['ttype'], r['tname']) for r in plain(te)}
    model.disarm()
    assert ('output_grad' in {t for _,t,_ in got}) and not got & without[kind]


def test_a_monitor_computes_the_quantities_of_the_gradients_that_arrive():
    "A missing gradient causes one warning. Quantities of other gradients are computed."
    model = FirstHeadUnused()
    with pytest.warns(EmberWarning) as warned:
        monitor = Monitor(model, {'heads': ['OutputGradSndNorm'], 'out': ['OutputGradSndNorm']})
        for step in range(2):
            model(torch.randn(3, 4)).backward()
            monitor.track(step)
    got = monitor.get_output()
    monitor.close()
    assert got=={'heads': {'OutputGradSndNorm': {}}, 'out': {'OutputGradSndNorm': {0: pytest.approx(3**.5), 1: pytest.approx(3**.5)}}}
    assert len(warned)==1 and "no gradient of the output of 'heads' arrived" in str(warned[0].message)


def test_a_snapshot_has_the_gradients_that_arrive():
    model = FirstHeadUnused()
    with from_activation_grad(model) as grads:
        model(torch.randn(3, 4)).backward()
        assert [k for k in grads.state_dict if k.startswith('heads')]==['heads.proj', 'heads.output_1', 'heads.output_2']
