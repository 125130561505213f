"Reductions of a StateDict accept the arguments of torch and scipy, and refuse other arguments"
import pytest
import torch
from scipy import stats
from torch import nn

from torchember import StateDict, from_weight, get_weight


@pytest.fixture
def net():
    torch.manual_seed(0)
    return from_weight(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)))


cases = [(n, k) for n in ('var', 'std') for k in ({'unbiased': False}, {'unbiased': True}, {'correction': 0}, {'correction': 2})]
cases += [(n, {'dtype': t}) for n in ('sum', 'mean', 'norm') for t in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
dims = [('sum', {'dim': 0}), ('sum', {'dim': -1, 'keepdim': True}), ('sum', {'dim': 0, 'dtype': torch.float64}), ('mean', {'dim': 0}), ('norm', {'dim': 0}),
    ('var', {'dim': 0, 'unbiased': False}), ('std', {'dim': -1, 'correction': 0, 'keepdim': True})]


@pytest.mark.parametrize('name,given', cases)
def test_numbers_of_the_whole_and_of_each_layer(net, name, given):
    want = getattr(net.flatten().double(), name)(**{k: v for k,v in given.items() if k!='dtype'})
    got = getattr(net, name)(**given)
    dtype = given.get('dtype', torch.float32)
    assert got.shape==() and got.dtype==dtype
    torch.testing.assert_close(got, want.to(dtype), rtol=1e-6 if dtype is not torch.float64 else 1e-12, atol=1e-6 if dtype.itemsize<8 else 1e-12)
    each = getattr(net, name)(lw=True, pattern='1', **given)
    assert list(each)==['1.weight', '1.bias'] and each.name()==f'{net.name()}_stat'
    for k,v in each.items():
        want = getattr(net[k].double(), name)(**{k: v for k,v in given.items() if k!='dtype'})
        assert isinstance(v, float) and abs(v-want.to(dtype).item())<=1e-6*abs(v)


@pytest.mark.parametrize('name,given', dims)
def test_dim_returns_a_tensor_for_each_layer(net, name, given):
    got = getattr(net, name)(lw=True, **given)
    assert list(got)==list(net) and isinstance(got, StateDict) and got.name()==f'{net.name()}_stat'
    for k,x in net.items(): torch.testing.assert_close(got[k], getattr(x, name)(**given))
    torch.testing.assert_close(getattr(net, name)(**given), getattr(net.flatten(), name)(**given))
    assert list(getattr(net, name)(lw=True, pattern='.*bias', **given))==['0.bias', '1.bias']


@pytest.mark.parametrize('name', ['max', 'min', 'abs_max', 'abs_min'])
def test_extremes_with_dim_are_values(net, name):
    got = getattr(net, name)(lw=True, dim=0)
    for k,x in net.items():
        y = x.abs() if 'abs' in name else x
        torch.testing.assert_close(got[k], getattr(y, name.removeprefix('abs_'))(dim=0).values)
    assert getattr(net, name)(lw=True, dim=0, keepdim=True)['0.weight'].shape==(1, 7)
    torch.testing.assert_close(getattr(net, name)(), getattr(net.flatten().abs() if 'abs' in name else net.flatten(), name.removeprefix('abs_'))())


@pytest.mark.parametrize('name,given', [('skew', {'bias': False}), ('kurtosis', {'bias': False}), ('kurtosis', {'fisher': False}),
    ('kurtosis', {'fisher': False, 'bias': False}), ('skew', {}), ('kurtosis', {})])
def test_moments_equal_scipy(net, name, given):
    f = getattr(stats, name)
    assert abs(getattr(net, name)(**given).item()-f(net.flatten().double().numpy(), **given))<1e-5
    for k,v in getattr(net, name)(lw=True, **given).items(): assert abs(v-f(net[k].double().numpy(), axis=None, **given))<1e-5, k


def test_small_samples_equal_scipy():
    for n in (3, 4, 5):
        d,x = StateDict(a=torch.arange(n).double()**2),(torch.arange(n).double()**2).numpy()
        assert abs(d.skew(bias=False).item()-stats.skew(x, bias=False))<1e-9 and abs(d.kurtosis(bias=False).item()-stats.kurtosis(x, bias=False))<1e-9


def test_norms_accept_a_dtype(net):
    for p in (1, 2, 3, .5, float('inf')):
        got = net.norm(p, dtype=torch.float64)
        assert got.dtype==torch.float64 and abs(got.item()-net.flatten().double().norm(p).item())<1e-9*got.item()
        torch.testing.assert_close(net.norm(p, dim=1, lw=True, pattern='.*weight')['0.weight'], net['0.weight'].norm(p, dim=1))
    assert net.norm1(dtype=torch.float64).dtype==net.norm2(dtype=torch.float64).dtype==torch.float64
    assert abs(net.norm1(dtype=torch.float64).item()-net.flatten().double().abs().sum().item())<1e-9


def test_integer_sums_equal_torch(net):
    assert net.sum(dtype=torch.int64)==net.flatten().sum(dtype=torch.int64) and (net*100).sum(dtype=torch.int64)==(net*100).flatten().sum(dtype=torch.int64)


def test_unknown_arguments(net):
    with pytest.raises(TypeError, match="No argument of var 'biased'.*unbiased.*apply_reduction"): net.var(biased=True)
    with pytest.raises(TypeError, match="No argument of max 'dtype'"): net.max(dtype=torch.float64)
    with pytest.raises(TypeError, match='has a number for each layer'): net.norm(lw=True).sum(dim=0)
    with pytest.raises(TypeError, match='correction.*unbiased|unbiased.*correction'): net.var(correction=0, unbiased=True)
    assert net.norm(lw=True).var(unbiased=False)>0 # Reduce the results of a reduction


def test_netdict_accepts_the_arguments():
    d = get_weight(nn.Linear(4, 4))
    torch.testing.assert_close(d.var(unbiased=False), d.flatten().var(unbiased=False))
