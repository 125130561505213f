"""Tests of arithmetic on StateDicts: algebraic laws for any model, and numbers compared with numpy and scipy in float64"""
import json
import math
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import AlexNet, Dicts, Residual
from oracle import by_scipy
from torch import nn

import torchember
from torchember import (
    EmberWarning, StateDict, emberTracker, from_activation, from_activation_grad, from_optimizer_state, from_together, from_weight, load, trust_ratio,
)
from torchember.state import layers


shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
finite = st.floats(-1e3, 1e3, width=32)


@st.composite
def snapshots(draw, n=1, dtype=None):
    "Draw StateDicts with the same names and shapes. Layers may have different dtypes."
    layers = [(s, dtype or draw(dtypes)) for s in draw(shapes)]
    def one(): return StateDict((f'layer{i}.w', torch.tensor(draw(st.lists(finite, min_size=math.prod(s), max_size=math.prod(s)))).reshape(s).to(d))
        for i,(s,d) in enumerate(layers))
    return [one() for _ in range(n)]


def equal(a, b, **within):
    assert list(a)==list(b)
    for k in a:
        torch.testing.assert_close(a[k], b[k], equal_nan=True, **within, msg=lambda m, k=k: f'{k}: {m}')


@given(snapshots(2), finite)
def test_operations_equal_torch_on_each_layer(ds, c):
    a,b = ds
    for f in (lambda x,y: x+y, lambda x,y: x-y, lambda x,y: x*y, lambda x,y: x/y, lambda x,y: x+c, lambda x,y: c-x, lambda x,y: c*x, lambda x,y: c/x,
            lambda x,y: x/c if c else x, lambda x,y: x**2, lambda x,y: -x, lambda x,y: abs(x), lambda x,y: x.sqrt(), lambda x,y: x.sign(),
            lambda x,y: x.clip(-1, 1), lambda x,y: torch.maximum(x, y)):
        equal(f(a, b), {k: f(a[k], b[k]) for k in a})


@given(snapshots(3, torch.float64))
def test_laws_of_arithmetic(ds):
    a,b,c = ds
    equal(a+b, b+a)
    equal(a-b, -(b-a))
    equal(a*b, b*a)
    equal(a-a, a.zeros())
    equal(a+a, 2*a)
    equal(a**0, a.ones())
    assert ((a+b)+c).is_compatible(a) and ((a*(b+c))-(a*b+a*c)).abs_max()<=1e-9 or not a.numel()
    assert (a+b).norm()<=a.norm()+b.norm()+1e-9
    assert abs((3*a).norm()-3*a.norm())<=1e-9*(1+a.norm())


@given(snapshots())
def test_operands_are_not_changed(ds):
    a, = ds
    given = {k: x.clone() for k,x in a.items()}
    shared = StateDict(a)
    for f in ('neg_', 'abs_', 'sqrt_', 'sign_', 'zeros_', 'ones_'): getattr(StateDict(shared), f)()
    StateDict(shared).clip_(0, 1)
    StateDict(shared).apply_(lambda x: x*3).to(dtype=torch.float64)
    equal(a, given, rtol=0, atol=0)


@given(snapshots(dtype=torch.float64), st.sampled_from([0, .5, 1, 1.5, 2, 3, 6, math.inf]))
def test_whole_is_merged_from_layers(ds, p):
    a, = ds
    x = np.concatenate([v.numpy().ravel() for v in a.values()])
    want = dict(numel=x.size, sum=x.sum(), norm1=np.abs(x).sum(), norm2=np.sqrt((x**2).sum()))
    if x.size: want |= dict(mean=x.mean(), max=x.max(), min=x.min(), abs_max=np.abs(x).max(), abs_min=np.abs(x).min(), norm1_mean=np.abs(x).mean())
    if x.size>1: want |= dict(var=x.var(ddof=1), std=x.std(ddof=1))
    for k,v in want.items(): assert math.isclose(getattr(a, k)(), v, rel_tol=1e-9, abs_tol=1e-9), k
    lw = [np.linalg.norm(v.numpy().ravel(), p) if v.numel() else 0 for v in a.values()]
    assert np.allclose(list(a.norm(p, lw=True).values()), lw, rtol=1e-9)
    assert math.isclose(a.norm(p), np.linalg.norm(x, p) if x.size else 0, rel_tol=1e-9)


@given(st.dictionaries(st.text(min_size=1, max_size=3), finite, min_size=1, max_size=4), finite)
def test_arithmetic_of_results_equals_tensors(d, c):
    a,t = StateDict(d),torch.tensor(list(d.values()), dtype=torch.float64)
    for f in (lambda x: x*c, lambda x: c-x, lambda x: x/c, lambda x: c/x, lambda x: x*x, lambda x: x/x, abs, lambda x: x.sqrt(),
            lambda x: x.sign(), lambda x: torch.exp(x/1e3)):
        np.testing.assert_allclose(list(f(a).values()), f(t).numpy(), rtol=1e-12)


@given(snapshots(2), st.integers(0, 4))
def test_mismatch_is_named(ds, i):
    a,b = ds
    k = list(a)[i%len(a)]
    less = StateDict({n: x for n,x in b.items() if n!=k})
    with pytest.raises(ValueError, match=f"'{k}' is in"): a+less
    with pytest.raises(ValueError, match=f"'{k}' is in"): less*a
    if a[k].dim():
        other = StateDict(b | {k: torch.zeros(9, 9)})
        with pytest.raises(ValueError, match=f"'{k}' has shape"): a-other
        assert not a.is_compatible(other)


numbers = ('norm1', 'norm2', 'norm1_mean', 'sum', 'mean', 'var', 'std', 'skew', 'kurtosis', 'max', 'min', 'abs_min', 'abs_max')


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reductions_equal_scipy(dtype):
    "16-bit values are summed with more bits, so sums do not overflow and lose no digits."
    m = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(300, 700), nn.Linear(700, 5)).to(dtype)
    with torch.no_grad(): m[2].weight.mul_(100).add_(50)
    sd = from_weight(m)
    layers = {k: p.detach().double().numpy().ravel() for k,p in m.named_parameters()}
    table = sd.describe(lw=True, group='all', display=False)
    whole,size = by_scipy(np.concatenate(list(layers.values()))),sum(map(len, layers.values()))
    for k,x in layers.items():
        want = by_scipy(x)
        for n in numbers:
            if n in want: assert math.isclose(table[k][n], want[n], rel_tol=2e-6, abs_tol=1e-7*want['norm1']), (k, n)
    for n in numbers: assert math.isclose(getattr(sd, n)(), whole[n], rel_tol=2e-6), n
    one = sd.describe(group='all', display=False)
    assert one['shape']==[size] and all(math.isclose(one[n], whole[n], rel_tol=2e-6) for n in numbers)
    assert sd.norm().dtype==torch.float32
    json.dumps(table)


def test_sums_beyond_the_range_of_float16():
    sd = StateDict(a=torch.full((1000,), 6e4, dtype=torch.float16), b=torch.full((10,), 1e-7, dtype=torch.float16))
    assert math.isclose(sd.norm(), 1000**.5*6e4, rel_tol=1e-3) and 0<sd.norm(lw=True)['b']<1


def test_nan_and_infinity_equal_torch():
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.tensor([1., bad, 3.])
        sd = StateDict(a=x, b=torch.ones(2))
        for n,f in dict(sum=torch.sum, mean=torch.mean, std=torch.std, max=torch.max, min=torch.min, norm2=torch.norm).items():
            for got,want in ((getattr(sd, n)(lw=True)['a'], f(x)), (getattr(sd, n)(), f(sd.flatten()))):
                assert math.isclose(got, want) or got==want or (math.isnan(got) and math.isnan(want)), (bad, n)


def test_transposed_and_expanded_layers():
    x = torch.randn(4, 6)
    assert torch.allclose(StateDict(a=x.T, b=x[:1].expand(3, 6), c=x[::2, ::3]).norm()**2, (x**2).sum()+3*(x[0]**2).sum()+(x[::2, ::3]**2).sum())


def test_shared_and_copied_snapshots_during_training():
    m = nn.Linear(3, 2)
    opt = torch.optim.AdamW(m.parameters(), lr=.1)
    def step():
        opt.zero_grad()
        m(torch.randn(4, 3)).square().sum().backward()
        opt.step()
    step()
    shared,copied,state = from_weight(m),from_weight(m, clone=True),from_optimizer_state(m, opt, 'exp_avg')
    was = state.clone()
    step()
    equal(shared, dict(m.named_parameters()), rtol=0, atol=0)
    assert (shared-copied).norm()>0 and (state-was).norm()>0
    assert m.load_state_dict(copied) and (shared-copied).norm()==0
    assert all(x.grad_fn is None and not x.requires_grad for x in (shared*2-copied).values())


def test_sharing_and_names(tmp_path):
    model,x = nn.Linear(2, 1),torch.ones(1, 2)
    opt = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    opt.step()
    weight,grad,[avg,*_] = from_together(model, opt, ['exp_avg'])
    for d,want in ((weight, model.weight), (grad, model.weight.grad), (avg, opt.state[model.weight]['exp_avg'])):
        assert d['weight'].data_ptr()==want.data_ptr()
    for name,called in ((None, 'Linear_activation'), ('mine', 'mine')):
        with from_activation(model, name=name) as a:
            model(x)
            assert a.state_dict.name()==called
    torch.save([x], tmp_path/'list.pt')
    with pytest.raises(TypeError, match='contains a list'): load(tmp_path/'list.pt')


def test_norm_is_not_cached():
    sd = StateDict(a=torch.tensor([3., 4.]))
    assert sd.norm()==5
    sd['a'].mul_(10)
    assert sd.norm()==50
    sd['a'] = torch.tensor([6., 8.])
    assert sd.norm()==10


@pytest.mark.parametrize('make,x', [(AlexNet, (2, 3, 64, 64)), (lambda: Residual(4), (2, 4, 8, 8)), (Dicts, (2, 4))], ids=['AlexNet', 'residual', 'dicts'])
def test_activations_do_not_change_the_model(make, x):
    m,x = make().eval(),torch.randn(x)
    def loss(y): return y.sum() if isinstance(y, torch.Tensor) else y['logits'].sum()
    loss(m(x)).backward()
    want = {k: p.grad.clone() for k,p in m.named_parameters()}
    before = {n: dict(o.__dict__) for n,o in m.named_modules()}
    m.zero_grad()
    with from_activation(m, clone=True) as acts, from_activation_grad(m) as grads:
        loss(m(x)).backward()
        assert set(grads.state_dict)<=set(acts.state_dict) and len(acts.state_dict)>=len(list(m.modules()))-1
        for k,g in grads.state_dict.items(): assert g.shape==acts.state_dict[k].shape
    for k,p in m.named_parameters(): assert torch.equal(p.grad, want[k])
    assert all({k: v for k,v in o.__dict__.items() if k!='_modules'}.keys()=={k for k in before[n] if k!='_modules'} for n,o in m.named_modules())
    assert not any(o._forward_hooks or o._forward_pre_hooks for o in m.modules())


def test_gradients_of_activations_equal_autograd():
    m,x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Tanh()),torch.randn(5, 3)
    with from_activation_grad(m) as grads: m(x).square().sum().backward()
    a = m[0](x).detach().requires_grad_()
    b = a.relu()
    c = m[2](b)
    d = c.tanh()
    want = torch.autograd.grad(d.square().sum(), [a, b, c, d])
    for k,g in zip('0123', want, strict=True): assert torch.allclose(grads.state_dict[k], g, atol=1e-6), k


def test_overwritten_value_is_reported_once():
    m = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    acts = from_activation(m)
    m(torch.ones(1, 2))
    with pytest.warns(EmberWarning, match="Outputs were overwritten in place.*: '0'"): assert len(acts.state_dict)==3
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert len(acts.state_dict)==3
    acts.remove()


def test_pass_after_an_exception():
    class Fails(nn.Module):
        def __init__(self): super().__init__(); self.a,self.fails = nn.Linear(2, 2),True
        def forward(self, x):
            x = self.a(x)
            if self.fails: raise RuntimeError
            return self.a(x)
    m = Fails()
    with from_activation(m) as acts:
        with pytest.raises(RuntimeError): m(torch.ones(1, 2))
        m.fails = False
        m(torch.ones(1, 2))
        assert list(acts.state_dict)==['a', 'a@1', 'output_0']


def test_step_of_sgd_equals_the_gradient():
    m = nn.Linear(3, 2).double()
    opt = torch.optim.SGD(m.parameters(), lr=.5)
    m(torch.randn(4, 3).double()).square().sum().backward()
    before = from_weight(m, clone=True)
    opt.step()
    update = from_weight(m)-before
    r = trust_ratio(update, before)
    for k,p in m.named_parameters(): assert math.isclose(r[k], (.5*p.grad.norm()/before[k].norm()).item())


def test_rows_in_a_log(tmp_path):
    m = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    t = emberTracker('arithmetic')
    for step in range(2):
        for row in from_weight(m).rows(['l2'], step=step): t + row
    df = t.df
    assert list(df.tname)==['weight_0', 'weight_1']*4 and set(df.ttype)=={'weight'} and list(df.step)==[0]*4+[1]*4
    assert math.isclose(df.l2[0], m[0].weight.detach().norm(), rel_tol=1e-6) and df.module[0]=='model(Sequential).0(Linear)'
    from_weight(m).norm(lw=True).save(tmp_path/'r.pt')
    assert dict(load(tmp_path/'r.pt'))==dict(from_weight(m).norm(lw=True))


def test_several_threads():
    sd,out = StateDict((f'{i}', torch.randn(3000)) for i in range(20)),[]
    ts = [threading.Thread(target=lambda: out.append(sd.std().item())) for _ in range(8)]
    for t in ts: t.start()
    for t in ts: t.join()
    assert len(set(out))==1 and len(out)==8


def test_each_layer_is_read_once(monkeypatch):
    "A table of all columns reads each layer once, and does not concatenate layers."
    sd,reads = StateDict((f'{i}', torch.randn(10, i)) for i in range(6)),[]
    read = layers.read
    monkeypatch.setattr(layers, 'read', lambda x, *a: (reads.append(x.data_ptr()), read(x, *a))[1])
    monkeypatch.setattr(torch, 'cat', lambda *a, **k: pytest.fail('layers were joined'))
    for lw in (True, False):
        sd.describe(lw=lw, group='all', display=False)
        assert len(reads)==len(sd)
        reads.clear()


def test_tables_have_plain_values():
    "Values of tables are plain Python values, for layers of any dtype."
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2).half(), nn.Linear(2, 2).double())
    more = dict(mask=torch.tensor([True, False]), bytes=torch.ones(3, dtype=torch.uint8), none=torch.empty(0, 2))
    sd = torchember.from_state_dict(m.state_dict() | more)
    assert sd['1.num_batches_tracked'].dtype==torch.int64
    def plain(x): return all(map(plain, x.values())) if type(x) is dict else all(map(plain, x)) if type(x) is list else type(x) in (int, float, str)
    for kw in (dict(lw=True), dict(lw=False), dict(lw=True, additional_info=dict(r=sd.norm(lw=True)))):
        got = sd.describe(group='all', display=False, **kw)
        assert plain(got) and json.dumps(got)
    assert all(plain({k: v for k,v in r.items()}) for r in sd.rows('full')) and json.dumps(sd.rows('full'))
    assert sd.numel()==sd.shape()[0]==sum(x.numel() for x in sd.values())


@pytest.mark.slow
def test_functions_in_the_documentation_of_nnstat(tmp_path, capsys):
    "Call each function in the guide and reference of the library nnstat, with each argument."
    nnstat = torchember
    class ResNet(nn.Sequential): pass
    model = ResNet(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4*36, 2))
    conv,optimizer = '.*0',torch.optim.AdamW(model.parameters())
    acts,grads = nnstat.from_activation(model, pattern='0|4'),nnstat.from_activation_grad(model, '0|4')
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    assert '00: 0' in str(acts) and '00: 0' in str(grads) # Printing works before `state_dict` was read
    assert list(acts.state_dict)==list(grads.state_dict)==['0', '4']
    how = dict(clone=True, device='cpu', dtype=torch.float64)
    for d,name in ((nnstat.from_weight(model, conv, requires_grad=True, **how), 'ResNet_weights'), (nnstat.from_grad(model, conv, **how), 'ResNet_grad'),
            (nnstat.from_optimizer_state(model, optimizer, optimizer_key='exp_avg', pattern=conv, **how), 'ResNet_optimizer_state'),
            (nnstat.from_state_dict(model.state_dict(), conv, name='mine', **how), 'mine')):
        assert d.name()==name and list(d)==['0.weight', '0.bias'] and d.dtype==torch.float64
    w,g,(m,v) = nnstat.from_together(model, optimizer, optimizer_keys=['exp_avg', 'exp_avg_sq'], pattern=None, clone=False)
    assert (m/(v.sqrt()+1e-8)).is_compatible(w) and w.at(0).data_ptr()==model[0].weight.data_ptr() and g.at(0) is not None
    for n in ('no', 'name', 'shape', 'numel', 'norm', *numbers, 'value'):
        assert getattr(w, n)() is not None and list(getattr(w, n)(lw=True, pattern=conv))==['0.weight', '0.bias']
    for n in ('sqrt', 'abs', 'zeros', 'ones', 'sign'):
        c = w.clone()
        assert getattr(w, n)().is_compatible(w) and getattr(c, n+'_')() is c
    assert w.norm(p=2, lw=True).name()=='ResNet_weights_stat' and w.norm(p=3)<w.norm(2) and w.clip(min=-1, max=1).clip_(0, None).min()==0
    assert w.flatten(pattern=conv).numel()==w.flatten(lazy=False, pattern=conv).numel()==w.filter(conv).numel()
    assert len(w.flatten(lazy=True))==w.numel()
    assert w.clone(device='cpu', dtype=torch.float16).to(device='cpu', dtype=torch.float32).dtype==torch.float32 and type(w.state_dict()) is dict
    w.set_name('w').save(tmp_path/'w.pt')
    assert nnstat.load(tmp_path/'w.pt', name='again').name()=='again' and nnstat.load(tmp_path/'w.pt').is_compatible(w)
    w.register_reduction('largest', lambda x: x.abs().max())
    try: assert w.describe(display=False, include_keys='largest')['largest']==w.largest()==max(w.largest(lw=True).values())
    finally:
        torchember.state.tables.columns_group['all'].remove('largest')
        del StateDict.largest
    capsys.readouterr()
    w.describe()
    w.describe(lw=True, pattern=conv, group='all', exlude_keys=['shape'], additional_info=dict(ratio=w.norm(lw=True)))
    w.norm(lw=True).describe(lw=True)
    printed = capsys.readouterr().out
    assert ' Stats w ' in printed and 'ratio' in printed and 'kurtosis' in printed and ' Stats w_stat ' in printed and 'shape' in printed.split(' Stats w ')[1]
    assert w.describe(display=False, include_keys=['norm1', 'norm2'])=={'norm1': pytest.approx(w.norm1().item()), 'norm2': pytest.approx(w.norm2().item())}
    nnstat.utils.set_cache_dir(str(tmp_path/'pictures'))
    try:
        w.hist(bins=10, logx=True, logy=True)
        w.ecdf(lw=True, pattern=conv, name='mine', logx=True)
        w.abs().heatmap(lw=True, pattern=conv, vmin=1e-3, vmax=1, log=True, square=False)
    finally: nnstat.utils.set_cache_dir(None)
    assert len(list((tmp_path/'pictures').iterdir()))==3
    w.hist()
    assert len(list((tmp_path/'pictures').iterdir()))==3
    import matplotlib.pyplot as plt
    plt.close('all')
