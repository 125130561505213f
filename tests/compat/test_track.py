"Training loops for the library Track & Visualize with only the import changed, and their LogFrames (its tables)"
import inspect
import math
import re
import shutil
import sys
import types
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from torchember import (
    EmberWarning,
    emberTracker,
    read,
    read_parquet,
    read_pickle,
    stash_all_stats_and_hist,
    stash_full_tensor,
    stash_hist,
    stash_scalar_stats,
    to_logframe,
    track,
)

names = ['mean', 'std', 'mean_abs', 'max_abs', 'min_abs', 'rm2', 'rm4', 'rm8']


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1,self.fc2,self.fc3 = nn.Linear(28*28, 32),nn.Linear(32, 16),nn.Linear(16, 10)

    def forward(self, x):
        x = x.view(-1, 28*28)
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


def select(lf, **which):
    for k,v in which.items(): lf = lf[lf['metadata', k]==v]
    return lf


def steps(model, tracker, opt, n=3, zero='before', x=None, out=None, between=lambda: None):
    "Run training steps. Return the gradients of each step."
    kept = []
    for _ in range(n):
        if zero=='before': opt.zero_grad()
        y = model(torch.randn(4, 1, 28, 28) if x is None else x)
        if zero=='inside': opt.zero_grad()
        F.cross_entropy(y.float(), torch.arange(len(y))%y.shape[1]).backward()
        kept.append({k: p.grad.clone() for k,p in model.named_parameters()})
        opt.step()
        between()
        if zero=='after the step': opt.zero_grad()
        if zero=='to zeros': opt.zero_grad(set_to_none=False)
        tracker.step()
        if zero=='last': opt.zero_grad()
    return kept


def test_notebook_of_track_and_visualize(capsys):
    "The loop of Track & Visualize's notebook, with random images."
    model,device = MLP(),torch.device('cpu')
    criterion,optimizer = nn.CrossEntropyLoss(),optim.Adam(model.parameters(), lr=0.001)
    train_loader = [(torch.randn(8, 1, 28, 28), torch.randint(0, 10, (8,))) for _ in range(6)]
    with track(module=model, optimizer=optimizer) as tracker:
        for _ in range(2):
            for inputs,labels in train_loader:
                inputs,labels = inputs.to(device), labels.to(device)
                optimizer.zero_grad()
                loss = criterion(model(inputs), labels)
                loss.backward()
                optimizer.step()
                tracker.step()
    assert capsys.readouterr().out.splitlines()==[f'LogFrame of this run: {tracker.out_path}']
    lf = read_pickle(tracker.out_path)
    assert sorted(lf.metadata.step.unique())==[*range(12)]
    assert set(lf.metadata.tensor_type)=={'Activation', 'Gradient', 'Weights', 'Weight_Gradients', 'Optimiser_State.exp_avg', 'Optimiser_State.exp_avg_sq'}
    assert [*lf.scalar_stats]==names and [*lf.exponent_counts]==[-math.inf, *range(-16, 17), math.inf]
    assert set(select(lf, tensor_type='Activation').metadata.name)=={'', 'fc1', 'fc2', 'fc3'}
    for t in ('Weights', 'Weight_Gradients', 'Optimiser_State.exp_avg'):
        assert set(select(lf, tensor_type=t).metadata.name)=={f'fc{i}{b}' for i in (1, 2, 3) for b in ('', '.bias')}
    sizes = {n.removesuffix('.weight'): p.numel() for n,p in model.named_parameters()}
    weights = select(lf, tensor_type='Weights')
    assert weights.exponent_counts.sum(axis=1).tolist()==[sizes[n] for n in weights.metadata.name]
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())
    shutil.rmtree(Path(tracker.out_path).parent) # The tests of Track & Visualize also remove this folder
    assert emberTracker(tracker.name).df.step.nunique()==12


class SimpleModel(nn.Module):
    def __init__(self, input_size=32):
        super().__init__()
        self.l1,self.l2 = nn.Linear(input_size, input_size//2, bias=False),nn.Linear(input_size//2, 1, bias=False)

    def forward(self, x): return self.l2(F.relu(self.l1(x)))


@pytest.mark.parametrize('compiled', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_names_of_parameters(compiled):
    model = SimpleModel(64)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    if compiled: model = torch.compile(model)
    expected = {n.removesuffix('.weight') for n,_ in model.named_parameters()}
    with track(module=model, track_gradients=True, optimizer=optimizer, track_weights=True, offload_inc=1, stash_value=stash_all_stats_and_hist) as tracker:
        for _ in range(10):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(torch.randn(1, 64)), torch.randint(0, 2, (1, 1)).float())
            loss.backward()
            optimizer.step()
            tracker.step()
    df = read_pickle(tracker.out_path)
    kinds = set(df.metadata.tensor_type)
    assert len(kinds)==6
    for tt in kinds-{'Activation', 'Gradient'}:
        names = df.query(f'@df.metadata.tensor_type == "{tt}"').metadata.name.unique().tolist()
        assert set(names)==expected
    root = '_orig_mod' if compiled else ''
    for tt in ('Activation', 'Gradient'): assert set(select(df, tensor_type=tt).metadata.name)=={root, *expected}


def in_float64(x):
    x = x.detach().double().flatten()
    a = x.abs()
    return dict(mean=x.mean(), std=x.std(), mean_abs=a.mean(), max_abs=a.max(), min_abs=a.min(), rm2=x.pow(2).mean()**.5, rm4=x.pow(4).mean()**.25,
        rm8=x.pow(8).mean()**.125)


def exponents(x, lo=-16, hi=16):
    a = x.detach().double().abs().flatten()
    e = torch.where(a==0, -10_000, torch.frexp(a).exponent-1)
    return [(e<lo).sum().item(), *((e==i).sum().item() for i in range(lo, hi+1)), (e>hi).sum().item()]


def check(row, x):
    for k,v in in_float64(x).items(): assert row['scalar_stats', k]==pytest.approx(v.item(), rel=1e-5, abs=1e-7), k
    assert row['exponent_counts'].tolist()==exponents(x)


zeros = ['before', 'inside', 'after the step', 'to zeros', 'last']


@pytest.mark.parametrize('zero', zeros)
def test_gradients_belong_to_their_step(zero):
    model = MLP()
    opt = optim.Adam(model.parameters())
    with track(model, optimizer=opt) as tracker: kept = steps(model, tracker, opt, zero=zero)
    lf = select(read_pickle(tracker.out_path), tensor_type='Weight_Gradients')
    assert len(lf)==18
    for n,grads in enumerate(kept):
        for k,g in grads.items(): check(select(lf, step=n, name=k.removesuffix('.weight')).iloc[0], g)


@pytest.mark.parametrize('zero', zeros)
def test_gradients_without_the_optimizer(zero):
    "Without the optimizer, tracker.step() reads the gradients. If zero_grad was called before, a warning says so."
    model = MLP()
    opt = optim.SGD(model.parameters(), 1e-2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always', EmberWarning)
        with track(model) as tracker: kept = steps(model, tracker, opt, zero=zero)
    lf = select(read_pickle(tracker.out_path), tensor_type='Weight_Gradients')
    if zero=='after the step':
        assert not len(lf) and ['3 of 3 steps have no weight gradients' in str(w.message) for w in warned if w.category is EmberWarning]==[True]
    elif zero=='to zeros': assert (lf.scalar_stats.max_abs==0).all() # Gradients set to zero still exist
    else:
        for n,grads in enumerate(kept):
            for k,g in grads.items(): check(select(lf, step=n, name=k.removesuffix('.weight')).iloc[0], g)


def test_weights_and_states():
    "Weights are read at the beginning of a step, and optimizer states at its end."
    model = MLP()
    opt = optim.Adam(model.parameters())
    before,after = [],[]
    with track(model, optimizer=opt) as tracker:
        for _ in range(3):
            before.append({k: p.detach().clone() for k,p in model.named_parameters()})
            steps(model, tracker, opt, 1)
            after.append({k: opt.state[p]['exp_avg_sq'].clone() for k,p in model.named_parameters()})
    lf = read_pickle(tracker.out_path)
    for n in range(3):
        for k in before[n]:
            check(select(lf, step=n, name=k.removesuffix('.weight'), tensor_type='Weights').iloc[0], before[n][k])
            check(select(lf, step=n, name=k.removesuffix('.weight'), tensor_type='Optimiser_State.exp_avg_sq').iloc[0], after[n][k])


@pytest.mark.parametrize('given', [True, False])
def test_gradient_accumulation(given):
    "Gradient accumulation: only tracker.step() ends a step, also if the optimizer did not step."
    model = MLP()
    opt = optim.SGD(model.parameters(), 1e-2)
    x,kept = torch.randn(3, 4, 1, 28, 28),[]
    with track(model, optimizer=opt if given else None) as tracker:
        for n in range(3):
            for part in x: F.cross_entropy(model(part), torch.arange(4)).backward()
            kept.append({k: p.grad.clone() for k,p in model.named_parameters()})
            if n!=1:
                opt.step()
                if given: opt.zero_grad()
            tracker.step()
            if n!=1: opt.zero_grad()
    lf = read_pickle(tracker.out_path)
    assert sorted(lf.metadata.step.unique())==[0, 1, 2]
    for n in range(3):
        for k,g in kept[n].items(): check(select(lf, step=n, name=k.removesuffix('.weight'), tensor_type='Weight_Gradients').iloc[0], g)
    first = select(lf, step=0, name='', tensor_type='Activation')
    # One row for the three micro-batches of the step
    assert len(first)==1 and first.exponent_counts.sum(axis=1).item()==3*4*10


def test_one_of_two_optimizers_is_given():
    "If only one of two optimizers is given, gradients of the other parameters are read at the end of the step."
    model = MLP()
    opt,other = optim.Adam(model.fc1.parameters()),optim.SGD([*model.fc2.parameters(), *model.fc3.parameters()], .1)
    with track(model, optimizer=opt) as tracker:
        for _ in range(2):
            F.cross_entropy(model(torch.randn(4, 784)), torch.arange(4)).backward()
            grads = {k: p.grad.clone() for k,p in model.named_parameters()}
            opt.step()
            opt.zero_grad()
            other.step()
            tracker.step()
            other.zero_grad()
    lf = select(read_pickle(tracker.out_path), tensor_type='Weight_Gradients', step=1)
    assert len(lf)==6
    for k,g in grads.items(): check(select(lf, name=k.removesuffix('.weight')).iloc[0], g)


def test_one_of_two_optimizers_steps():
    "Each gradient is read once: in its optimizer step, or at the end of the step if its optimizer does not step."
    model = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(3))
    one,two = (optim.SGD(m.parameters(), .1) for m in model[:2])
    def passes(s):
        for i,m in enumerate(model): m(torch.full((1, 2), s+i)).sum().backward()
    with track(model, optimizer=[one, two]) as tracker:
        for s in (1., 10.):
            passes(s)
            one.step()
            one.zero_grad()
            passes(s) # Gradients of parameters in the other optimizer grow further
            tracker.step()
            model.zero_grad()
    rows = tracker.t.df.query('ttype=="weight_grad"')
    assert list(zip(rows.step, rows.path, rows.tname, rows['mean'], strict=True))==[(i, p, 'grad_0', g) for i,s in enumerate((1., 10.))
        for p,g in (('0', s), ('2', s+2), ('1', 2*(s+1)))]


def test_activations_and_their_gradients():
    model = MLP()
    opt = optim.SGD(model.parameters(), 1e-2)
    seen = {}
    for n,m in model.named_modules():
        def keep(m, args, y, n=n):
            seen[n] = y.detach().clone()
            y.register_hook(lambda g: seen.update({f'{n} grad': g.clone()}))
        m.register_forward_hook(keep)
    with track(model) as tracker: steps(model, tracker, opt, 1)
    lf = read_pickle(tracker.out_path)
    for n in ('fc1', 'fc2', 'fc3', ''):
        check(select(lf, name=n, tensor_type='Activation').iloc[0], seen[n])
        check(select(lf, name=n, tensor_type='Gradient').iloc[0], seen[f'{n} grad'])


def test_half_precision_does_not_overflow():
    x = torch.tensor([1e-7, 3e-5, .5, -2, 300, 60000, 0]).half()
    s = stash_scalar_stats(x)
    for k,v in in_float64(x).items(): assert s[k]==pytest.approx(v.item(), rel=1e-9), k
    assert stash_hist(x)['exp_hist']['hist']==exponents(x)
    assert stash_hist(x, -24, 15)['exp_hist']=={'hist': exponents(x, -24, 15), 'bins': [*range(-25, 17)]}
    assert stash_scalar_stats(torch.zeros(3))=={**dict.fromkeys(names, 0)}
    everything = stash_all_stats_and_hist(x)
    assert [*everything]==['scalar_stats', 'exp_hist'] and everything['scalar_stats']==s
    assert torch.equal(stash_full_tensor(x)['full_tensor'], x)
    bad = torch.tensor([math.nan, math.inf, 1.])
    assert math.isnan(stash_scalar_stats(bad)['mean']) and stash_hist(bad)['exp_hist']['hist']==[0]*17+[1]+[0]*16+[1]


def test_amp():
    model = MLP()
    opt = optim.Adam(model.parameters())
    with track(model, optimizer=opt) as tracker, torch.autocast('cpu', torch.bfloat16): steps(model, tracker, opt)
    lf = read_pickle(tracker.out_path)
    assert set(select(lf, name='fc1', tensor_type='Activation').metadata.dtype)=={'bfloat16'}
    assert set(select(lf, name='fc1', tensor_type='Weights').metadata.dtype)=={'float32'}
    assert np.isfinite(lf.scalar_stats.to_numpy()).all()


def test_grad_scaler():
    "Gradients are unscaled in the optimizer's step. A skipped step counts."
    model = MLP()
    opt,scaler = optim.SGD(model.parameters(), 1e-2),torch.amp.GradScaler('cpu', init_scale=1024.)
    kept = []
    with track(model, optimizer=opt) as tracker:
        for n in range(3):
            opt.zero_grad()
            loss = F.cross_entropy(model(torch.randn(4, 784)), torch.arange(4))
            scaler.scale(loss*(math.inf if n==1 else 1)).backward()
            kept.append({k: p.grad/scaler.get_scale() for k,p in model.named_parameters()})
            scaler.step(opt)
            scaler.update()
            tracker.step()
    lf = select(read_pickle(tracker.out_path), tensor_type='Weight_Gradients')
    assert sorted(lf.metadata.step.unique())==[0, 1, 2]
    for n in (0, 2):
        for k,g in kept[n].items(): check(select(lf, step=n, name=k.removesuffix('.weight')).iloc[0], g)


def test_convolutions():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(3*26*26, 10))
    opt = optim.SGD(model.parameters(), 1e-2, momentum=.9)
    with track(model, optimizer=opt) as tracker: kept = steps(model, tracker, opt)
    lf = read_pickle(tracker.out_path)
    check(select(lf, step=2, name='0', tensor_type='Weight_Gradients').iloc[0], kept[2]['0.weight'])
    assert set(select(lf, tensor_type='Activation').metadata.name)=={'', *'01234'}
    assert set(select(lf, tensor_type='Optimiser_State.momentum_buffer').metadata.name)=={'0', '0.bias', '1', '1.bias', '4', '4.bias'}


def test_transformer():
    transformers = pytest.importorskip('transformers')
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    opt = optim.AdamW(model.parameters())
    ids = torch.randint(0, 50, (2, 8))
    with track(model, optimizer=opt) as tracker:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            opt.step()
            opt.zero_grad()
            tracker.step()
    lf = read_pickle(tracker.out_path)
    assert set(select(lf, tensor_type='Weights').metadata.name)=={n.removesuffix('.weight') for n,_ in model.named_parameters()}
    assert {'transformer.h.0.attn', 'transformer.h.1.mlp.c_fc', 'lm_head'}<=set(select(lf, tensor_type='Activation').metadata.name)


@pytest.mark.parametrize('include, exclude, expected', [('fc', None, {'fc1', 'fc2', 'fc3'}), ('[12]$', 'fc2', {'fc1'}), (None, '^fc', {''}),
    (re.compile('FC3', re.IGNORECASE), None, {'fc3'}), ('c2', None, {'fc2'})])
def test_patterns_are_searched(include, exclude, expected):
    model = MLP()
    opt = optim.SGD(model.parameters(), 1e-2)
    with track(model, True, None, True, include, exclude) as tracker: steps(model, tracker, opt, 1)
    lf = read_pickle(tracker.out_path)
    assert set(select(lf, tensor_type='Activation').metadata.name)==expected
    assert {n.removesuffix('.bias') for n in select(lf, tensor_type='Weights').metadata.name}==expected-{''}


def test_excluded_modules():
    model = MLP()
    opt = optim.SGD(model.parameters(), 1e-2)
    for kwargs,kinds in ((dict(track_gradients=False), {'Activation', 'Weights'}), (dict(track_weights=False), {'Activation', 'Gradient'}),
            (dict(track_gradients=False, track_weights=False), {'Activation'})):
        with track(model, **kwargs) as tracker: steps(model, tracker, opt, 2)
        assert set(read_pickle(tracker.out_path).metadata.tensor_type)==kinds


@pytest.mark.parametrize('only', [True, False])
def test_evaluations(only):
    model = MLP()
    opt = optim.SGD(model.parameters(), 1e-2)
    def evaluate():
        model.eval()
        with torch.no_grad(): model(torch.ones(7, 784))
        model.train()
    with track(model, only_stash_during_training=only) as tracker: steps(model, tracker, opt, 2, between=evaluate)
    lf = select(read_pickle(tracker.out_path), tensor_type='Activation', name='', step=0)
    assert sorted(lf.exponent_counts.sum(axis=1))==([40] if only else [40, 70])


def test_steps_are_counted():
    "Steps count from init_step, one for each call of step, also without a pass."
    model = MLP()
    opt = optim.SGD(model.parameters(), 1e-2)
    with track(model, init_step=7, name='counted') as tracker:
        steps(model, tracker, opt, 2)
        model.eval()
        model(torch.ones(1, 784))
        tracker.step()
        model.train()
        steps(model, tracker, opt, 1)
        assert tracker.current_step==11
    assert sorted(read_pickle(tracker.out_path).metadata.step.unique())==[7, 8, 10]
    with pytest.raises(FileExistsError, match='Choose another name='): track(model, name='counted')


def test_custom_stash_function():
    model = MLP()
    opt = optim.SGD(model.parameters(), 1e-2)
    def mine(x): return {'scalar_stats': {'median': x.median(), 'rm2': x.pow(2).mean().sqrt()}, **stash_hist(x, -4, 4), 'top': x.max().item()}
    with track(model, stash_value=mine) as tracker: kept = steps(model, tracker, opt, 2)
    lf = read_pickle(tracker.out_path)
    assert 'rms' in tracker.t.df and 'rm2' not in tracker.t.df # The log uses the names of torchember
    assert [*lf.scalar_stats]==['median', 'rm2', 'top'] and [*lf.exponent_counts]==[-math.inf, *range(-4, 5), math.inf]
    row,g = select(lf, step=1, name='fc2', tensor_type='Weight_Gradients').iloc[0],kept[1]['fc2.weight']
    assert row['scalar_stats', 'median']==pytest.approx(g.median().item()) and row['exponent_counts'].tolist()==exponents(g, -4, 4)


@pytest.mark.parametrize('f, stats, first, last', [(stash_scalar_stats, names, 0, 0), (stash_hist, ['mean'], -16, 16),
    (partial(stash_hist, min_exp=-24, max_exp=15), ['mean'], -24, 15),
    (partial(stash_all_stats_and_hist, max_exp=4), names, -16, 4), (stash_full_tensor, ['full_tensor'], 0, 0)])
def test_stash_functions_equal_those_of_track_and_visualize(f, stats, first, last):
    model = MLP()
    opt = optim.SGD(model.parameters(), 1e-2)
    with track(model, stash_value=f) as tracker: kept = steps(model, tracker, opt, 2)
    lf = read_pickle(tracker.out_path)
    assert [*lf.scalar_stats]==stats and [*lf.exponent_counts]==[-math.inf, *range(first, last+1), math.inf]
    if f is stash_full_tensor:
        n = select(lf, step=1, name='fc1.bias', tensor_type='Weight_Gradients').iloc[0]['scalar_stats', 'full_tensor']
        assert torch.equal(torch.load(Path(tracker.out_path).parent/'tensors'/f'{n}.pt'), kept[1]['fc1.bias'])


def test_offload():
    model = MLP()
    opt = optim.SGD(model.parameters(), 1e-2)
    got = []
    with track(model, offload_inc=3, async_offload=True, offload_type='.parquet', name='parts',
            offload_fn=lambda name, step, df: got.append((name, step, sorted(df.metadata.step.unique())))) as tracker: steps(model, tracker, opt, 8)
    assert got==[('parts', 0, [0]), ('parts', 3, [1, 2, 3]), ('parts', 6, [4, 5, 6]), ('parts', 8, [7])]
    assert tracker.out_path.endswith('final_logframe.parquet') and read_parquet(tracker.out_path).metadata.step.max()==7


def test_exception_in_the_loop(tmp_path):
    model = MLP()
    opt = optim.Adam(model.parameters())
    tracker = track(model, optimizer=opt, name='broken')
    with pytest.raises(ZeroDivisionError), tracker:
        steps(model, tracker, opt, 2)
        model(torch.ones(1, 784))
        raise ZeroDivisionError
    lf = read_pickle(tracker.out_path)
    assert sorted(lf.metadata.step.unique())==[0, 1, 2] and set(select(lf, step=2).metadata.tensor_type)=={'Activation', 'Weights'}
    assert not any(m._forward_hooks for m in model.modules()) and not opt._optimizer_step_pre_hooks
    with pytest.raises(ZeroDivisionError), track(model, home=tmp_path) as tracker: raise ZeroDivisionError
    assert tracker.out_path is None and not (tmp_path/'track').exists()


def test_steps_are_never_ended():
    model = MLP()
    with pytest.warns(EmberWarning, match='never called'), track(model) as tracker:
        for _ in range(3): model(torch.ones(1, 784)).sum().backward()
    assert set(read_pickle(tracker.out_path).metadata.step)=={0}


def test_wandb(monkeypatch):
    "A replacement for W&B provides the functions that `track` uses."
    model = MLP()
    opt = optim.SGD(model.parameters(), 1e-2)
    monkeypatch.setitem(sys.modules, 'wandb', None) # Pretend that wandb is not installed
    with pytest.raises(ImportError, match='pip install wandb'): track(model, use_wandb=True)
    logged,handed = [],[]
    class Artifact:
        def __init__(self, name, type): self.name,self.type,self.files = name,type,[]
        def add_file(self, path): self.files.append(path)
    wandb = types.SimpleNamespace(run=None, Artifact=Artifact)
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    with pytest.raises(RuntimeError, match='wandb.init'): track(model, use_wandb=True)
    wandb.run = types.SimpleNamespace(log_artifact=handed.append, log=lambda d, commit: logged.append((d, commit)), define_metric=lambda *a, **k: None)
    with track(model, use_wandb=True, name='w b') as tracker: steps(model, tracker, opt, 3)
    assert [d['torchember/step'] for d,_ in logged]==[0, 1, 2] and not any(commit for _,commit in logged)
    lf = read_pickle(tracker.out_path)
    for n,(d,_) in enumerate(logged):
        for t in ('Activation', 'Gradient', 'Weights', 'Weight_Gradients'):
            mine = select(lf, step=n, tensor_type=t)
            assert d[f'Numerics.{t}/rm2']==pytest.approx(mine.scalar_stats.rm2.mean())
            share = mine.exponent_counts[-math.inf]/mine.exponent_counts.sum(axis=1)
            assert d[f'Numerics.{t}/underflow_rate']==pytest.approx(share.mean())
    assert [(a.name, a.files) for a in handed]==[('w_b', [tracker.out_path])]


def test_stashes_of_a_step():
    model = MLP()
    opt = optim.SGD(model.parameters(), 1e-2)
    with track(model) as tracker:
        steps(model, tracker, opt, 1)
        assert len(tracker)==len(tracker.stashes)==4+4+6+6
        s = next(s for s in tracker if (s.name, s.tensor_type)==('fc1', 'Weights'))
        assert (s.type, s.dtype, [*s.first_value])==('Linear', 'float32', ['scalar_stats', 'exp_hist'])
        assert s.value['exp_hist']==stash_hist(torch.zeros(1))['exp_hist'] | {'hist': s.value['exp_hist']['hist']}
        assert to_logframe(tracker.t.df).shape==(20, 48) and to_logframe(tracker.te.t.df).equals(to_logframe(tracker.t.df))


def test_compared_with_track_and_visualize(tmp_path, monkeypatch):
    "If Track & Visualize is installed, both packages record one model, and their numbers agree."
    theirs = pytest.importorskip('tandv.track.torch')
    monkeypatch.chdir(tmp_path)
    model = MLP()
    opt = optim.Adam(model.parameters())
    with theirs.track(model, optimizer=opt) as a, track(model, optimizer=opt) as b:
        for _ in range(4):
            opt.zero_grad()
            F.cross_entropy(model(torch.randn(4, 784)), torch.arange(4)).backward()
            opt.step()
            a.step(); b.step()
    a,b = read_pickle(a.out_path),read_pickle(b.out_path)
    assert [*a.exponent_counts]==[-math.inf, *range(-17, 16), math.inf] # correct the shift: see `lower_exponents_by_one`
    compared = 0
    for _,row in b.iterrows():
        name,kind,step = (row['metadata', k] for k in ('name', 'tensor_type', 'step'))
        # Track & Visualize assigns these rows to the next step
        late = kind=='Weight_Gradients' or kind.startswith('Optimiser')
        other = select(a, name=name, tensor_type=kind, step=step+late)
        if not len(other): assert late and step==3; continue
        other,compared = other.iloc[0],compared+1
        for s in names: assert row['scalar_stats', s]==pytest.approx(other['scalar_stats', s], rel=2e-4, abs=1e-7), (name, kind, s)
        nonzero = lambda r: {e: n for e,n in r['exponent_counts'].items() if n and -16<=e<=15 and e!=-1} # Track & Visualize counts zeros at -1
        assert nonzero(row)==nonzero(other), (name, kind)
    assert compared>=4*4*2+4*6+3*6*3-6


def test_order_of_arguments():
    order = ['module', 'track_gradients', 'optimizer', 'track_weights', 'include', 'exclude', 'stash_value', 'async_offload', 'offload_inc', 'offload_type',
        'use_wandb', 'only_stash_during_training', 'init_step']
    given = inspect.signature(track).parameters
    assert [*given][:len(order)]==order and all(p.kind is p.KEYWORD_ONLY for p in [*given.values()][len(order):])


@pytest.mark.slow
def test_custom_function_in_a_compiled_model():
    model = SimpleModel(8)
    opt = optim.SGD(model.parameters(), .1)
    compiled = torch.compile(model)
    with track(compiled, optimizer=opt, include='l1', stash_value=lambda x: {'n': x.numel()}) as tracker:
        for _ in range(2):
            compiled(torch.ones(3, 8)).sum().backward()
            opt.step()
            tracker.step()
            opt.zero_grad()
    lf = read_pickle(tracker.out_path)
    assert {(t, n): x for t,n,x in zip(lf.metadata.tensor_type, lf.metadata.name, lf.scalar_stats.n, strict=True)}=={
        ('Activation', '_orig_mod.l1'): 12, ('Gradient', '_orig_mod.l1'): 12, ('Weights', '_orig_mod.l1'): 32, ('Weight_Gradients', '_orig_mod.l1'): 32}


def test_nothing_is_recorded_if_disabled(monkeypatch, capsys):
    monkeypatch.setenv('TORCHEMBER_DISABLE', '1')
    model = MLP()
    with track(model) as tracker: steps(model, tracker, optim.SGD(model.parameters(), .1), 2)
    assert tracker.out_path is None and 'no LogFrame' in capsys.readouterr().out


@pytest.mark.parametrize('kind', ['.pkl', '.parquet'])
def test_stash_function_without_numbers(kind, tmp_path):
    "If the stash function returns no numbers, no LogFrame is written, with a message. The training continues, and the log has the values."
    model = nn.Linear(2, 1)
    with pytest.warns(EmberWarning, match='stash_value returned no numbers'):
        with track(model, stash_value=lambda x: {'what': 'a text'}, offload_type=kind, home=tmp_path) as tracker:
            model(torch.ones(3, 2)).sum().backward()
            tracker.step()
    assert tracker.out_path is None and set(read(tracker.t)['what'].dropna())=={'a text'}


def test_stash_functions_accept_torch_and_jax():
    jnp,there = pytest.importorskip('jax.numpy'),pytest.importorskip('torchember.jaxember')
    values = [0., .25, -3, 300, 1e-30]
    for f in (stash_scalar_stats, stash_hist, stash_all_stats_and_hist, stash_full_tensor): assert getattr(there, f.__name__) is f
    ours,theirs = stash_all_stats_and_hist(torch.tensor(values), -3, 4),stash_all_stats_and_hist(jnp.array(values), -3, 4)
    assert ours['exp_hist']==theirs['exp_hist']=={'hist': [2, 0, 1, 0, 0, 1, 0, 0, 0, 1], 'bins': [*range(-4, 6)]}
    assert theirs['scalar_stats']==pytest.approx(ours['scalar_stats'], rel=1e-6)
    assert isinstance(stash_full_tensor(torch.ones(1))['full_tensor'], torch.Tensor) and isinstance(stash_full_tensor(jnp.ones(1))['full_tensor'], np.ndarray)
