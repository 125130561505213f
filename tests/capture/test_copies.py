"Each way to copy an armed module gives an unarmed module with its own weights."
import copy
import pickle

import pytest
import torch
from torch import nn

from torchember import from_activation, torchEmber

internal = ('_parameters', '_buffers', '_modules', '_forward_hooks', '_forward_pre_hooks', '_backward_hooks')


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.times = nn.Linear(4, 3),nn.Linear(3, 1),1

    def forward(self, x): return self.b(self.a(x).tanh())*self.times


def by_attribute(m):
    "Copy each attribute with `setattr` to an object of another class, as `higher` does."
    new = nn.Module.__new__(type(type(m).__name__, (type(m),), {}))
    nn.Module.__init__(new)
    for k,v in m.__dict__.items():
        if k not in internal: setattr(new, k, v)
    return new


def by_dict(m):
    "Copy a module through its `__dict__`, as learn2learn does."
    new = m.__new__(type(m))
    new.__dict__ = m.__dict__.copy()
    return new


def by_update(m):
    new = m.__new__(type(m))
    new.__dict__.update(m.__dict__)
    return new


def by_words(m):
    new = m.__new__(type(m))
    for k in m.__dict__: new.__dict__[k] = m.__dict__[k]
    return new


def by_stars(m):
    new = m.__new__(type(m))
    new.__dict__ = {**m.__dict__} | m.__dict__
    return new


ways = {f.__name__: f for f in (by_attribute, by_dict, by_update, by_words, by_stars, copy.copy)}


def cloned(m, way, factor=2.):
    "Return a copy of the module, made with `way`, with all weights multiplied by `factor`."
    new = way(m)
    for k in ('_parameters', '_buffers', '_modules'): new.__dict__[k] = {}
    for n,p in m._parameters.items(): new._parameters[n] = None if p is None else nn.Parameter(p.detach()*factor)
    for n,c in m._modules.items(): new._modules[n] = cloned(c, way, factor)
    return new


def heard(te): return [(r['step'], r['module'], r['ttype'], r['tname'], r['call']) for r in te.t.lines()]


@pytest.mark.parametrize('who', ['ember', 'activations', 'both', 'the other first'])
@pytest.mark.parametrize('way', ways.values(), ids=ways)
def test_a_copy_is_not_armed(way, who):
    torch.manual_seed(0)
    model,x = Net(),torch.ones(2, 4)
    want = cloned(model, way)(x)
    if who=='the other first': acts = from_activation(model)
    te = torchEmber(model, ttypes='output') if who!='activations' else None
    if who in ('activations', 'both'): acts = from_activation(model)
    model(x)
    n = te and heard(te)
    new = cloned(model, way)
    assert torch.equal(new(x), want) and torch.equal(new.forward(x), want)
    assert not any('_torchember' in k or k in ('forward', 'disarm') for m in new.modules() for k in vars(m))
    if te:
        assert heard(te)==n==[(0, f'model(Net){m}', 'output', 'output_0', 0) for m in ('.a(Linear)', '.b(Linear)', '')]
        model(x)
        assert len(heard(te))==6 and heard(te)[3:]==[(1, *r[1:]) for r in n] # the original is still armed
        te.close()
    if who!='ember': acts.remove()
    assert torch.equal(cloned(model, way)(x), want) and type(model.__dict__) is dict


def test_a_compiled_copy():
    "The compiler uses the copy's own forward, and the original module has one row per call."
    torch.manual_seed(0)
    model,x = Net(),torch.ones(2, 4)
    want = cloned(model, by_attribute)(x)
    te = torchEmber(model, ttypes='output')
    torch._dynamo.reset()
    fast,new = torch.compile(model, backend='aot_eager', fullgraph=True),cloned(model, by_attribute)
    fast(x)
    assert torch.allclose(torch.compile(new, backend='aot_eager', fullgraph=True)(x), want)
    fast(x)
    assert [r[0] for r in heard(te) if r[1]=='model(Net)']==[0, 1]
    te.close()


def test_a_functional_call():
    "`functional_call` calls the armed module itself. The call uses the given weights, and is recorded."
    model,x = nn.Linear(2, 1, bias=False),torch.ones(1, 2)
    with torchEmber(model, ttypes=('output',), stats=['mean']) as te:
        out = torch.func.functional_call(model, {'weight': torch.tensor([[3., 4.]])}, x)
    assert out.item()==7 and [(r['step'], r['call'], r['mean']) for r in te.t.lines()]==[(0, 0, 7)]


def test_iteration_over_an_armed_module_shows_it_unarmed():
    "Iteration, comparison, repr and copies of an armed module's `__dict__` show only the module's own keys."
    model = nn.Linear(2, 1)
    mine = model.__dict__
    was = dict(mine)
    te = torchEmber(model)
    d = vars(model)
    assert 'forward' in d and d['forward'] is model.forward and '_torchember' in d
    assert [*d]==[*d.keys()]==[*was] and [*d.values()]==[*was.values()] and [*d.items()]==[*was.items()] and [*reversed(d)]==[*reversed(was)]
    assert len(d)==len(was) and d==was and was==d and d==d and not (d!=was or was!=d) and repr(d)==repr(was) and dict(d)==was==d.copy()
    assert {**d}=={} | d==d | {}==was and type(d | {}) is type({} | d) is dict
    for c in (copy.deepcopy(d), pickle.loads(pickle.dumps(d))): assert type(c) is dict and c.keys()==was.keys()
    te.close()
    assert model.__dict__ is mine and mine==was and [*mine]==[*was]


def test_attributes_can_be_set_and_deleted_while_armed():
    model = Net()
    te = torchEmber(model)
    model.times,model.new = 3,'new'
    del model.b
    assert vars(model).get('new')=='new' and 'new' in [*vars(model)]
    te.close()
    assert model.times==3 and model.new=='new' and 'b' not in model._modules and 'forward' not in vars(model)


def test_a_forward_of_the_instance():
    "A `forward` set before arming is copied and restored. A `forward` set while the module is armed stays after disarming."
    model,x = nn.Linear(2, 1),torch.ones(1, 2)
    def former(x): return x*10
    model.forward = former
    te = torchEmber(model, ttypes='output', stats=['mean'])
    assert vars(model).copy()['forward'] is former and all(way(model)(x).tolist()==[[10, 10]] for way in ways.values())
    for m in (copy.deepcopy(model), by_attribute(model), by_dict(model), copy.copy(model)): assert vars(m)['forward'] is former
    model(x)
    assert {r['mean'] for r in te.t.lines()}=={10}
    te.disarm()
    assert vars(model)['forward'] is former
    te.arm()
    model.forward = theirs = lambda x: x*100
    assert vars(model).copy()['forward'] is theirs
    te.close()
    assert vars(model)['forward'] is theirs and [k for k in vars(model) if 'torchember' in k]==[]


def test_a_restored_dict_stays_armed():
    "Some programs save and restore the `__dict__` of a module. The module stays armed."
    model,x = nn.Linear(2, 1),torch.ones(1, 2)
    model.forward = former = lambda x: x*10
    for put in (lambda d, kept: d.update(kept), lambda d, kept: (d.clear(), d.update(kept))):
        te = torchEmber(model, ttypes='output')
        kept = dict(vars(model))
        model.cache = 1
        put(vars(model), kept)
        model(x)
        assert len(te.t.lines())==1 and '_torchember' in vars(model)
        te.close()
        assert '_torchember' not in vars(model) and vars(model)['forward'] is former
        vars(model).pop('cache', None)


def test_a_module_with_another_dict_is_no_longer_armed():
    "If a user assigns another `__dict__`, the module is no longer armed. Disarming then changes nothing."
    model,x = nn.Linear(2, 1),torch.ones(1, 2)
    te = torchEmber(model, ttypes='output')
    model.__dict__ = other = vars(model).copy()
    model(x)
    te.close()
    assert model.__dict__ is other and not te.t.lines() and model(x).shape==(1, 1)
