"`diff` of two runs names a planted difference, and reports nothing for runs that differ only in rounding"
import subprocess
import sys
from pathlib import Path

import pandas as pd
import programs
import pytest
import torch
from pairs_of_runs import adam, data, dense, everything, momentum, steps, train, where
from torch import nn
from torch.nn import functional as F

from torchember import assert_same_run, compact, diff, keep_run, read, torchEmber
from torchember.cli import main

pytestmark = pytest.mark.filterwarnings('ignore::torchember.EmberWarning')
runs = {}


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    runs.clear()
    return tmp_path_factory.mktemp('runs')


def run(home, **how):
    "Return the table of a training. Each training runs only once, and later calls return the stored table."
    key = repr(sorted((k, v if isinstance(v, str|int|float|tuple) else id(v)) for k,v in how.items()))
    # Stored arguments stay alive, so their id() stays unique
    if key not in runs: runs[key] = train(home, f'run {len(runs)}', **how), how
    return runs[key][0]


# ---- pairs of runs with a planted difference

def at_17(f): return lambda m, x, y, i: f(x, y) if i==17 else (x, y)
def noise(x, seed=5): return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def scaled(name, by=1.001):
    "Make a weight slightly larger at the start."
    def change(m):
        with torch.no_grad(): m.get_parameter(name).mul_(by)
    return change


def with_gelu():
    m = dense()
    m[1] = nn.GELU()
    return m


def in_double(m):
    "A layer that computes in float64"
    m[2].double()
    m[2].register_forward_pre_hook(lambda m, a: (a[0].double(),))
    m[2].register_forward_hook(lambda m, a, y: y.float())


def frozen(m): m[2].weight.requires_grad_(False)


a_lot = dict(ttypes=everything)
planted = { # name -> (arguments of run 1, changed arguments of run 2, first difference: step, path, ttype, name)
    'seed': ({}, dict(seed=1), (0, '0', 'weight', 'weight')),
    'order of data': ({}, dict(batches=data()[::-1]), (0, '', 'input', 'input')),
    'learning rate': ({}, dict(opt=lambda ps: adam(ps, lr=3.03e-3)), (0, '', 'scalar', 'lr')),
    'learning rate, of updates': (a_lot, dict(opt=lambda ps: adam(ps, lr=3.3e-3)), (0, '0', 'update', 'weight')),
    'dropout': (dict(make='convolutions', noise=1), dict(noise=2), (0, 'drop', 'output', 'output_0')),
    'size of a weight': ({}, dict(before=scaled('2.weight')), (0, '2', 'weight', 'weight')),
    'size of a bias': ({}, dict(before=scaled('4.bias')), (0, '4', 'weight', 'bias')),
    'one batch': ({}, dict(each=at_17(lambda x, y: (x+.01*noise(x), y))), (17, '', 'input', 'input')),
    'activation': ({}, dict(make=with_gelu), (0, '1', 'output', 'output_0')),
    'weight decay of AdamW': (dict(opt=lambda ps: torch.optim.AdamW(ps, 3e-3, weight_decay=0)),
        dict(opt=lambda ps: torch.optim.AdamW(ps, 3e-3, weight_decay=.01)), (1, '0', 'weight', 'weight')),
    'weight decay of SGD': (dict(opt=momentum), dict(opt=lambda ps: momentum(ps, weight_decay=1e-4)), (1, '0', 'weight', 'weight')),
    'clipping': ({}, dict(after=lambda m, i: nn.utils.clip_grad_norm_(m.parameters(), .1) if i==9 else None), (9, '0', 'weight_grad', 'weight')),
    'clipping of values': ({}, dict(after=lambda m, i: nn.utils.clip_grad_value_(m[4].parameters(), .05) if i==9 else None),
        (9, '4', 'weight_grad', 'weight')),
    'eps of Adam': ({}, dict(opt=lambda ps: adam(ps, eps=1e-6)), (1, '0', 'weight', 'weight')),
    'optimizer': ({}, dict(opt=lambda ps: torch.optim.RMSprop(ps, 3e-3)), (1, '0', 'weight', 'weight')),
    'nesterov': (dict(opt=momentum), dict(opt=lambda ps: momentum(ps, nesterov=True)), (1, '0', 'weight', 'weight')),
    'beta2': (a_lot, dict(opt=lambda ps: adam(ps, betas=(.9, .99))), (0, '0', 'optimizer', 'weight')),
    'frozen': ({}, dict(before=frozen), (1, '2', 'weight', 'weight')),
    'momentum of BatchNorm': (dict(make='convolutions', noise=1, **a_lot), dict(before=lambda m: setattr(m.norm, 'momentum', .2)),
        (0, 'norm', 'buffer', 'running_mean')),
    'eps of BatchNorm': (dict(make='convolutions', noise=1), dict(before=lambda m: setattr(m.norm, 'eps', 1e-3)), (0, 'norm', 'output', 'output_0')),
    'label': ({}, dict(each=at_17(lambda x, y: (x, torch.cat([(y[:1]+1)%5, y[1:]])))), (17, '0', 'weight_grad', 'weight')),
    'label, with gradients of outputs': (dict(ttypes=('input', 'output', 'output_grad')), dict(each=at_17(lambda x, y: (x, (y+1)%5))),
        (17, '4', 'output_grad', 'output_0')),
    'loss': ({}, dict(loss=lambda p, y: 2*F.cross_entropy(p, y)), (0, '0', 'weight_grad', 'weight')),
    'smoothing': ({}, dict(loss=lambda p, y: F.cross_entropy(p, y, label_smoothing=.05)), (0, '0', 'weight_grad', 'weight')),
    'one sample more': ({}, dict(each=at_17(lambda x, y: (torch.cat([x, x[:1]]), torch.cat([y, y[:1]])))), (17, '', 'input', 'input')),
    'NaN': ({}, dict(each=at_17(lambda x, y: (torch.where(torch.arange(64)==3, torch.nan, x), y))), (17, '', 'input', 'input')),
    'float64 in between': ({}, dict(before=in_double), (0, '2', 'input', 'input')),
    'attention': (dict(make='attention'), dict(before=scaled('qkv.weight')), (0, 'qkv', 'weight', 'weight'))}
# Statistic of the first difference, if it is not mean, std, max or min
unlike = {'learning rate': 'lr', 'one sample more': 'shape', 'NaN': 'nan', 'float64 in between': 'dtype'}


@pytest.mark.parametrize('what', planted)
def test_a_planted_difference_is_named(home, what):
    how,other,place = planted[what]
    d = diff(run(home, **how), run(home, **{**how, **other}))
    at = where(d)
    assert d and (at.step, at.path, at.ttype, at.name)==place, d.text
    row = d.table.loc[d.first]
    assert row['distance']>row['tolerance'] and (row['stat'], row['a'], row['b'])==(d.stat, d.a, d.b) and d.a!=d.b
    assert d.stat==unlike.get(what, d.stat) and (what in unlike or d.stat in ('mean', 'std', 'max', 'min'))
    before = d.table.loc[:d.first].iloc[:-1]
    assert (before['distance']<=before['tolerance']).all() and before['step'].max()<=d.step if len(before) else True
    assert f'first differ at step {d.step}, in ' in d.text and (d.path in d.text)


too_small = 'order of data', 'learning rate, of updates', 'weight decay of AdamW', 'weight decay of SGD', 'eps of Adam', 'beta2', \
    'clipping of values', 'dropout', 'momentum of BatchNorm', 'eps of BatchNorm'


@pytest.mark.parametrize('what', [w for w in planted if w not in too_small])
def test_a_planted_difference_is_named_although_rounding_differs(home, what):
    "Permute each batch of run 2. Cases with Dropout, or with a fault smaller than rounding, are left out"
    how,other,place = planted[what]
    each = other.get('each')
    d = diff(run(home, **how), train(home, f'shuffled {what}', **{**how, **other, 'each': lambda m, x, y, i: shuffled(m, *(each or as_it_is)(m, x, y, i), i)}))
    at = where(d)
    assert (at.step, at.path, at.ttype, at.name)==place, d.text


def as_it_is(m, x, y, i): return x, y


def shuffled(m, x, y, i):
    "Permute the samples of a batch, so that each sum over the batch rounds differently."
    at = torch.randperm(len(x), generator=torch.Generator().manual_seed(i))
    return x[at], y[at]


# ---- pairs of runs that differ only in rounding

class Einsum(nn.Linear):
    "A linear layer that adds in float64"
    def forward(self, input): return torch.einsum('ni,oi->no', input.double(), self.weight.double()).float()+self.bias


class Backwards(nn.Linear):
    "A linear layer that adds its products in reverse order"
    def forward(self, input): return input.flip(1)@self.weight.flip(1).T+self.bias


def with_layers(kind):
    def make():
        m = dense()
        for l in m:
            if isinstance(l, nn.Linear): l.__class__ = kind
        return m
    return make


def log_softmax(p, y): return -(p-p.exp().sum(1, keepdim=True).log())[torch.arange(len(y)), y].mean()


class Threads:
    def __enter__(self): self.n = torch.get_num_threads(); torch.set_num_threads(2)
    def __exit__(self, *e): torch.set_num_threads(self.n)


def channels_last(m): m.to(memory_format=torch.channels_last)
def halves(m, x, y, i): return x*(1+2**-24*torch.sign(noise(x, i))), y


no_dropout = dict(make='convolutions', before=lambda m: setattr(m.drop, 'p', 0.))
rounded = { # name -> (arguments of run 1, changed arguments of run 2)
    'order in a batch': ({}, dict(each=shuffled)),
    'order in a batch, SGD': (dict(opt=momentum), dict(each=shuffled)),
    'order in a batch, all types': (a_lot, dict(each=shuffled)),
    'order in a batch, BatchNorm': (no_dropout, dict(each=shuffled)),
    'order in a batch, BatchNorm, SGD': (dict(no_dropout, opt=momentum), dict(each=shuffled)),
    'order in a batch, attention': (dict(make='attention'), dict(each=shuffled)),
    'order in a batch, attention, all types': (dict(make='attention', **a_lot), dict(each=shuffled)),
    'order in a batch, large steps': (dict(opt=lambda ps: adam(ps, lr=3e-2)), dict(each=shuffled)),
    'order in a batch, only weights': (dict(ttypes=('weight',), **no_dropout), dict(each=shuffled)),
    'order in a batch, only outputs': (dict(ttypes=('output',), **no_dropout), dict(each=shuffled)),
    'order in a batch, each fifth step': (dict(every=5, **no_dropout), dict(each=shuffled)),
    'half an eps of the data': (dict(make='attention'), dict(each=halves)),
    'two threads': (no_dropout, dict(around=Threads)),
    'no MKL-DNN': (no_dropout, dict(around=lambda: torch.backends.mkldnn.flags(enabled=False))),
    'channels last': (no_dropout, dict(before=lambda m: (no_dropout['before'](m), channels_last(m)))),
    'single tensor Adam': (dict(opt=lambda ps: adam(ps, foreach=True)), dict(opt=lambda ps: adam(ps, foreach=False))),
    'fused Adam': (dict(make='attention'), dict(opt=lambda ps: adam(ps, fused=True))),
    'einsum': ({}, dict(make=with_layers(Einsum))),
    'matrix product': ({}, dict(make=with_layers(Backwards))),
    'log_softmax': ({}, dict(loss=log_softmax)),
    'accumulated': ({}, dict(parts=2)),
    'accumulated, attention': (dict(make='attention'), dict(parts=4)),
    'float64': ({}, dict(dtype=torch.float64)),
    'float64, attention': (dict(make='attention'), dict(dtype=torch.float64)),
    'bfloat16': ({}, dict(dtype=torch.bfloat16)),
    'bfloat16, attention': (dict(make='attention'), dict(dtype=torch.bfloat16)),
    'autocast': (dict(make='attention'), dict(forward=lambda m, x: in_autocast(m, x)))}


def in_autocast(m, x):
    with torch.autocast('cpu', torch.bfloat16): return m(x)


@pytest.mark.parametrize('what', rounded)
def test_runs_that_differ_by_rounding_are_the_same(home, what):
    how,other = rounded[what]
    d = diff(run(home, **how), run(home, **{**how, **other}))
    assert not d, d.text
    assert (d.step, d.path, d.ttype, d.tname, d.pname, d.stat, d.a, d.b)==(None,)*8
    assert len(d.table)>100 or 'only' in what or 'each' in what
    assert (d.table['distance']<=d.table['tolerance']).all()


@pytest.mark.slow # slow because it compiles
@pytest.mark.parametrize('backend', ['aot_eager', 'inductor'])
def test_compiled_is_the_same_as_eager(home, backend):
    how = dict(make='attention', batches=data(n=10))
    d = diff(run(home, **how), train(home, f'compiled {backend}', compiled=backend, **how))
    assert not d and len(d.table)>300, d.text
    d = diff(run(home, **how), train(home, f'compiled {backend}, scaled', compiled=backend, before=scaled('out.weight'), **how))
    assert (d.step, d.path, d.ttype)==(0, 'out', 'weight'), d.text


@pytest.mark.release
@pytest.mark.slow # slow because it starts two processes
def test_runs_with_other_numbers_of_ranks_are_the_same(tmp_path):
    programs.ranks(Path(__file__).with_name('trained_by_two.py'), tmp_path)
    d = diff('one', 'two', home=tmp_path)
    assert not d and d.table['step'].nunique()==10 and {'input', 'output', 'weight', 'weight_grad', 'update'}<={*d.table['ttype']}, d.text
    d = diff('one', 'two, other lr', home=tmp_path)
    assert (d.step, d.path, d.ttype, d.pname)==(0, '0', 'update', 'weight'), d.text


# ---- runs of two libraries: PyTorch and JAX

@pytest.mark.slow # slow because it compiles
def test_jax_and_torch_are_the_same_with_mapped_paths(tmp_path):
    jax = pytest.importorskip('jax')
    import optax
    from flax import nnx

    from torchember import jaxember
    batches = [(x[:, :8].contiguous(), y) for x,y in data(n=12)]
    def small(): return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    ours = train(tmp_path, 'torch', make=small, batches=batches, opt=adam)
    torch.manual_seed(0)
    weights = {n: p.detach().numpy() for n,p in small().named_parameters()}

    class Net(nnx.Module):
        def __init__(self, rngs): self.a,self.b = nnx.Linear(8, 16, rngs=rngs),nnx.Linear(16, 5, rngs=rngs)
        def __call__(self, x): return self.b(nnx.relu(self.a(x)))

    def theirs(name, by=1.):
        model = Net(nnx.Rngs(0))
        for l,n in ((model.a, '0'), (model.b, '2')):
            l.kernel[...],l.bias[...] = weights[f'{n}.weight'].T,weights[f'{n}.bias']
        model.b.kernel[...] = model.b.kernel[...]*by
        opt = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
        @nnx.jit
        def update(model, opt, x, y):
            value,grads = nnx.value_and_grad(lambda m: optax.softmax_cross_entropy_with_integer_labels(m(x), y).mean())(model)
            opt.update(model, grads)
            return value, grads
        with jaxember.track(model, track_gradients=True, name=name, home=tmp_path) as tracker:
            for x,y in batches:
                value,grads = tracker.intercept(update, model, opt, jax.numpy.asarray(x.numpy()), jax.numpy.asarray(y.numpy()))
                tracker.log(loss=value)
                tracker.step(model, gradients=grads)
        return read(name, home=tmp_path)

    paths = {'0': 'a', '2': 'b', '1': None}
    d = diff(ours, theirs('jax'), paths=paths)
    assert not d and len(d.table)>12*8 and {'output', 'weight', 'weight_grad'}<={*d.table['ttype']} and 'module' not in d.text, d.text
    d = diff(ours, theirs('jax, scaled', 1.001), paths=paths)
    assert (d.step, d.path)==(0, '2') and d.pname in ('weight', None), d.text
    # This mapping of paths is wrong on purpose
    d = diff(ours, read('jax', home=tmp_path), paths={'0': 'b', '2': 'a', '1': None})
    assert d.step==0 and d.path=='0' and d.stat=='shape', d.text


# ---- rows that only one of the two runs has

def test_another_length_or_schedule_is_reported(home):
    a,b = run(home),run(home, n=12)
    d = diff(a.assign(path=a['path'].astype(object)), b)
    assert not d and f'Only `a` has {steps-12} steps from 12 to {steps-1}.' in d.text and d.table['step'].max()==11
    fifth = run(home, every=5)
    d = diff(fifth, a)
    assert not d and 'Only `b` has' in d.text and sorted(set(d.table[d.table.ttype=='weight']['step']))==[0, 5, 10, 15, 20, 25]
    d = diff(fifth, run(home, opt=lambda ps: adam(ps, lr=3.3e-3), every=1))
    assert (d.step, d.ttype, d.tname)==(0, 'scalar', 'lr')
    assert diff(a[a.step<3], a[a.step==2]).table['step'].unique().tolist()==[2]


def test_only_common_statistics_are_compared(home):
    a,b = run(home),run(home, stats='full')
    assert not diff(a, b) and not diff(b, a)
    only = run(home, stats=['l2', 'zero_frac'])
    d = diff(only, b)
    assert not d and set(d.table[d.table.ttype!='scalar']['stat'])=={'l2'}
    assert diff(only, run(home, stats='full', before=scaled('2.weight'))).stat=='l2'


def test_a_layer_of_only_one_run_is_reported(home):
    def longer():
        m = dense()
        m.extra = nn.Identity()
        return m
    a,b = run(home),run(home, make=longer)
    for d in (diff(a, b), diff(b, a)): assert not d and "has the module `extra`." in d.text, d.text
    d = diff(a, run(home, ttypes=('input', 'output')))
    assert not d and 'Only `a` has rows of weight, weight_grad.' in d.text


def test_paths_are_mapped(home):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first,self.act1,self.second,self.act2,self.last = dense()
        def forward(self, x): return self.last(self.act2(self.second(self.act1(self.first(x)))))
    a,b = run(home),run(home, make=Named)
    names = dict(zip('01234', ('first', 'act1', 'second', 'act2', 'last'), strict=True))
    for d in (diff(a, b, paths=names), diff(a, b, paths=lambda p: names.get(p, p))): assert not d and len(d.table)==sum(a['tname']!='grad_norm'), d.text
    d = diff(a, b, paths=names | {'0': 'second', '2': 'first'})
    assert (d.step, d.path, d.stat)==(0, '0', 'shape'), d.text
    d = diff(a, b, paths=names | {'2': None})
    assert not d and '2' not in set(d.table['path']) and 'Only `b` has the module `second`.' in d.text
    d = diff(a, run(home, make=Named, before=scaled('second.weight')), paths=names)
    assert (d.path, d.pname)==('2', 'weight')


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    def half(name, batches, state=None, **more):
        torch.manual_seed(0)
        model = dense()
        opt = adam(model.parameters())
        if state: model.load_state_dict(state[0]); opt.load_state_dict(state[1])
        with torchEmber(model, optimizer=opt, name=name, home=tmp_path, **more) as te:
            for x,y in batches:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                opt.step()
                opt.zero_grad()
                te.log(loss=loss)
        return model.state_dict(), opt.state_dict()
    half('straight', data(n=20))
    half('resumed', data(n=20)[10:], half('resumed', data(n=10)), resume=True)
    d = diff('straight', 'resumed', home=tmp_path)
    assert not d and d.table['step'].nunique()==20 and 'to the last digit' in d.text
    (state,optimizer) = half('lost', data(n=10))
    # The fault: a new optimizer without the saved state
    half('lost', data(n=20)[10:], (state, adam(dense().parameters()).state_dict()), resume=True)
    d = diff('straight', 'lost', home=tmp_path)
    assert (d.step, d.path, d.ttype)==(11, '0', 'weight'), d.text


def test_json_lines_and_parquet_compare_as_equal(home):
    a = run(home)
    train(home, 'columns', store='parquet')
    train(home, 'packed')
    compact('packed', home=home)
    keep_run(a, home/'kept.parquet', overwrite=True)
    for other in ('columns', 'packed'): assert 'to the last digit' in diff(a, other, home=home).text
    assert 'to the last digit' in diff(home/'kept.parquet', 'packed', home=home).text
    assert diff(str(home/'kept.parquet'), a).names==('kept', 'b')


# ---- logged numbers, evaluations and statistics of the user

def test_a_tensor_is_named_before_a_noted_number_of_the_same_step(home):
    def noting(name, lr, n=6, shift=0.):
        torch.manual_seed(0)
        model = dense()
        opt = adam(model.parameters())
        with torchEmber(model, optimizer=opt, name=name, home=home) as te:
            for i,(x,y) in enumerate(data(n=n)):
                F.cross_entropy(model(x+shift*(i>=3)), y).backward()
                te.log(lr=lr if i>=3 else 1e-3)
                opt.step()
                opt.zero_grad()
        return read(name, home=home)
    a = noting('noting', 1e-3)
    d = diff(a, noting('noting, other', 2e-3))
    assert (d.step, d.path, d.ttype, d.tname, d.stat, d.a, d.b)==(3, '', 'scalar', 'lr', 'lr', 1e-3, 2e-3)
    d = diff(a, noting('noting, shifted', 2e-3, shift=.1))
    assert (d.step, d.ttype)==(3, 'input')
    d = diff(a, noting('noting, lost', float('nan')))
    assert (d.step, d.tname)==(3, 'lr') and d.b!=d.b


def test_evaluations_of_the_same_step_are_compared(home):
    def evaluating(name, by=1.):
        torch.manual_seed(0)
        model = dense()
        opt = adam(model.parameters())
        with torchEmber(model, optimizer=opt, name=name, home=home):
            for i,(x,y) in enumerate(data(n=6)):
                F.cross_entropy(model(x), y).backward()
                opt.step()
                opt.zero_grad()
                model.eval()
                with torch.no_grad(): model(x*(by if i==2 else 1.))
                model.train()
        return read(name, home=home)
    a = evaluating('evaluating')
    assert not diff(a, a)
    d = diff(a, evaluating('evaluating, other', 1.01))
    assert (d.path, d.ttype)==('', 'input') and a[(a.step==d.step) & (a.phase=='eval')].size and d.step in (2, 3)


def test_statistics_of_the_user_are_compared_and_marks_are_not(home):
    def own(name, mark, add=0.):
        with torchEmber(nn.Linear(2, 2), name=name, home=home) as te:
            @te.how_record('output')
            def mine(t): return {'mine': 3.+add}
            te.mark(seed=mark)
            torch.manual_seed(0)
            nn.init.ones_(te.model.weight)
            nn.init.zeros_(te.model.bias)
            te.model(torch.ones(2, 2))
        return read(name, home=home)
    a = own('own', 1)
    assert not diff(a, own('own, marked', 2))
    d = diff(a, own('own, other', 1, .5))
    assert (d.path, d.ttype, d.stat, d.a, d.b)==('', 'output', 'mine', 3., 3.5)


# ---- a stored run as the expected result of a test

def test_check_compares_a_training_with_a_stored_run(home, tmp_path):
    golden = keep_run(run(home), tmp_path/'golden.parquet')
    assert golden.stat().st_size<300_000
    torch.manual_seed(0)
    model = dense()
    opt = adam(model.parameters())
    with torchEmber(model, optimizer=opt, home=home, name='checked') as te:
        for i,(x,y) in enumerate(data()):
            F.cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad()
            if i==9: te.check(golden) # The run is equal to the stored run up to step 9
            if i==15: opt.param_groups[0]['lr'] = 5e-3
        with pytest.raises(AssertionError, match=r'`golden` and `checked` first differ at step 17, in weight `0\.weight`: '): te.check(golden)
        te.check(golden, rtol=10)
    with pytest.raises(FileNotFoundError, match='keep_run'): te.check(tmp_path/'none.parquet')
    assert_same_run(train(home, 'for a test', each=shuffled), golden)
    with pytest.raises(AssertionError, match='in weight `2.weight`'): assert_same_run(run(home, before=scaled('2.weight')), golden)
    with pytest.raises(FileExistsError, match='overwrite=True'): keep_run(run(home), golden)


def test_a_kept_run_has_no_time_and_no_path(home, tmp_path):
    train(home, 'with more', stats='full')
    df = pd.read_parquet(keep_run('with more', tmp_path/'sub'/'golden.parquet', home=home))
    assert not {'ts', 'skew', 'kurtosis'}&{*df.columns} and {'mean', 'rms', 'step', 'shape', 'dtype', 'loss', 'pname'}<={*df.columns}
    assert str(home) not in str(df.attrs) and df.attrs['run']=='with more'
    assert sorted(p.name for p in (tmp_path/'sub').iterdir())==['golden.parquet']


# ---- the command `torchember diff`

def test_the_command_returns_exit_codes(home, capsys):
    a,b,c = (n for n in ('shell a', 'shell b', 'shell c'))
    train(home, a, n=3), train(home, b, n=3), train(home, c, n=3, seed=1)
    assert main(['diff', a, b, '--home', str(home)])==0 and 'to the last digit' in capsys.readouterr().out
    assert main(['diff', a, c, '--home', str(home)])==1 and 'first differ at step 0, in weight `0.weight`' in capsys.readouterr().out
    assert main(['diff', a, c, '--home', str(home), '--rtol', '9'])==0
    assert main(['diff', a, 'nowhere', '--home', str(home)])==2
    assert "No run 'nowhere'" in capsys.readouterr().err
    keep_run(a, home/'shell.parquet', home=home)
    assert [main(['diff', str(home/'shell.parquet'), x, '--home', str(home)]) for x in (b, c)]==[0, 1]


@pytest.mark.release
@pytest.mark.slow # slow because it starts Python processes
def test_the_command_runs_as_a_process(home):
    train(home, 'process a', n=2), train(home, 'process b', n=2, seed=1)
    def shell(*args): return subprocess.run([sys.executable, '-m', 'torchember', *args], capture_output=True, text=True)
    said = shell('diff', 'process a', 'process b', '--home', str(home))
    assert said.returncode==1 and said.stdout.startswith('`process a` and `process b` first differ at step 0') and not said.stderr
    assert [shell('diff', 'process a', n, '--home', str(home)).returncode for n in ('process a', 'none')]==[0, 2]
    loaded = "import sys; from torchember.cli import main; main(['--help'])"
    said = subprocess.run([sys.executable, '-X', 'importtime', '-c', loaded], capture_output=True, text=True)
    assert said.returncode==0 and not any(f' {m}\n' in said.stderr for m in ('torch', 'pandas', 'numpy', 'matplotlib'))


# ---- the text, table and HTML of a difference

def test_a_difference_has_text_html_table_and_curve(home):
    d = diff(run(home), run(home, before=scaled('2.weight')))
    assert repr(d)==d.text and '<p' in d._repr_html_() and '`2.weight`' in d._repr_html_()
    assert d.table.columns.tolist()==['step', 'path', 'ttype', 'tname', 'pname', 'call', 'stat', 'a', 'b', 'distance', 'tolerance']
    assert d.curve.index.tolist()==list(range(steps)) and d.curve[0]>=d.table.loc[d.first, 'distance']
    assert d.tensors.iloc[0][['path', 'ttype', 'since']].tolist()==['2', 'weight', 0] and d.tensors['since'].is_monotonic_increasing
    evil = run(home)
    d = diff(evil.assign(path=evil['path'].astype(object).replace('2', '<b>\x1b[31m')), run(home, before=scaled('2.weight')), paths={'<b>\x1b[31m': '2'})
    assert '<b>' not in d._repr_html_() and '\x1b' not in d.text and bool(d)


@pytest.mark.parametrize(('wrong', 'kind', 'says'), [(lambda a: diff(a, a[:0]), ValueError, 'no rows'),
    (lambda a: diff(a, 3), TypeError, 'a run must be a name'),
    (lambda a: diff(a[a.step<3], a[a.step>5]), ValueError, 'no step in common: 3 steps from 0 to 2 against 24 steps from 6 to 29'),
    (lambda a: diff(a[a.path=='0'], a[a.path=='2']), ValueError, 'paths={'), (lambda a: diff(a, a, rtol='1'), ValueError, 'rtol must be a number'),
    (lambda a: diff(a, a, paths=['0']), TypeError, 'a dict or a function'), (lambda a: diff(a, a, paths={'x': '0'}), ValueError, "No path 'x'"),
    (lambda a: diff(a[['mean']], a), ValueError, 'with the columns step')])
def test_runs_that_cannot_be_compared_raise_with_the_reason(home, wrong, kind, says):
    a = run(home, note=False)
    with pytest.raises(kind) as e: wrong(a)
    assert says in str(e.value)


def test_layers_and_tensor_types_can_be_selected(home):
    a,b = run(home),run(home, before=scaled('2.weight'))
    d = diff(a, b, ttype='output')
    assert (d.step, d.path, d.ttype)==(0, '2', 'output') and set(d.table['ttype'])=={'output'}
    assert set(diff(a, b, path='4', ttype=['weight']).table['path'])=={'4'}
    d = diff(a, b, path='0')
    # Path '' is the row of the loss
    assert (d.step, d.path, d.ttype)==(0, '0', 'weight_grad') and set(d.table['path'])=={'0', ''}


def test_rtol_replaces_the_tolerance_for_rounding(home):
    a,b = run(home),run(home, before=scaled('2.weight'))
    assert [bool(diff(a, b, rtol=r)) for r in (0, 5e-4, 2)]==[True, True, False]
    assert diff(a, run(home, each=shuffled), rtol=0).step==0 and diff(a, a, rtol=0).step is None


def test_a_run_that_lacks_a_tensor_is_not_the_same():
    "A shorter run passes. A run that lacks a tensor fails"
    of = lambda p, t, s: dict(shape=(4,), mean=.1+s, std=1., module=f'model(Net).{p}(Linear)', path=p, ttype=t, tname='x', step=s, call=0, dtype='float32')
    whole = pd.DataFrame([of(p, t, s) for s in range(5) for p in 'ab' for t in ('input', 'output')])
    assert_same_run(whole[whole.step<3], whole)
    for kept,said in ((whole.path!='b', 'input x of `b`; output x of `b`'), (whole.ttype!='input', 'input x of `a`; input x of `b`')):
        assert not diff(whole, whole[kept])
        with pytest.raises(AssertionError, match=f"b lacks rows of a: {said}. Everything else is equal"): assert_same_run(whole[kept], whole)
        assert_same_run(whole, whole[kept]) # Additional rows in the new run are accepted
