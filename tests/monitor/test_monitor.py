"Quantities of a Monitor are compared with torch's hooks and numpy, for each way to run a model."
import copy
import gc
import json
import math
import os
import pickle
import warnings
import weakref
from pathlib import Path

import numpy as np
import programs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchember
from torchember import (BackwardInputExtension, BackwardOutputEigOfCovExtension, BackwardOutputExtension, EmberWarning, Extension,
    ForwardInputEigOfCovExtension, ForwardInputExtension, ForwardOutputExtension, Monitor, MultiStepQuantity, SingleStepQuantity, at, cal_cov_matrix,
    cal_eig, every, linear, quantity, read, torchEmber)
from torchember.monitor import InputMean, MeanTID, WeightNorm

every_quantity = ['InputCovMaxEig', 'InputCovStableRank', 'InputCovCondition', 'InputCovCondition20', 'InputCovCondition50', 'InputCovCondition80', 'InputMean',
    'InputStd', 'InputSndNorm', 'OutputGradSndNorm', 'OutputGradCovMaxEig', 'OutputGradCovStableRank', 'OutputGradCovCondition50', 'RankMe',
    'WeightNorm', 'WeightGradNorm', 'WeightEffectiveRank', 'LinearDeadNeuronNum', 'WeightParamJump', 'UpdateEffectiveRank', 'GradSNR', 'UnitActivity']


class Net(nn.Module):
    def __init__(self, inplace=False):
        super().__init__()
        self.conv,self.bn,self.relu = nn.Conv2d(3, 8, 3, padding=1),nn.BatchNorm2d(8),nn.ReLU(inplace)
        self.fc1,self.fc2 = nn.Linear(8*36, 12),nn.Linear(12, 4)

    def forward(self, x): return self.fc2(F.relu(self.fc1(self.relu(self.bn(self.conv(x))).flatten(1))))


def made(**kwargs):
    torch.manual_seed(0)
    return Net(**kwargs)


def batches(n=6, size=32):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 3, 6, 6, generator=g), torch.randint(4, (size,), generator=g)) for _ in range(n)]


def train(model, monitor=None, n=6, run=None, seen=None):
    opt = torch.optim.SGD(model.parameters(), lr=.05)
    for step,(x,y) in enumerate(batches(n)):
        opt.zero_grad()
        loss = F.cross_entropy((model if run is None else run)(x), y)
        loss.backward()
        if monitor is not None: monitor.track(step)
        if seen is not None: seen(step)
        opt.step()
    return loss.item()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch): monkeypatch.setenv('TORCHEMBER_HOME', str(tmp_path))


def truth(model, path, n=6):
    "Return the tensors of a module in each step, copied by torch's hooks: a list of dicts."
    m,steps,now = model.get_submodule(path),[],{}
    def forward(m, args, out):
        now.update(input=args[0].detach().clone(), output=out.detach().clone())
        out.register_hook(lambda g: now.update(output_grad=g.clone()))
    h = m.register_forward_hook(forward)
    train(model, n=n, seen=lambda step: steps.append({**now, 'weight': m.weight.detach().clone(), 'weight_grad': m.weight.grad.clone()}))
    h.remove()
    return steps


def eigs_of(x):
    x = x.double().numpy()
    x = np.moveaxis(x, 1, -1).reshape(-1, x.shape[1]) if x.ndim==4 else x
    return np.linalg.eigvalsh(np.cov(x.T))[::-1]


@pytest.mark.parametrize('how', ['eager', 'compiled', 'compiled before', 'inplace', 'with an ember', 'ember first'])
def test_values_equal_numpy(how):
    seen = {p: truth(made(inplace=how=='inplace'), p) for p in ('conv', 'fc1')}
    model = made(inplace=how=='inplace')
    run = torch.compile(model, backend='aot_eager', fullgraph=True) if 'compiled' in how else model
    if how=='compiled before': run(batches()[0][0]) # compile the model before the monitor is created
    if how=='compiled before': model.load_state_dict(made().state_dict())
    te = torchEmber(model) if how=='ember first' else None
    monitor = Monitor(run, {p: every_quantity for p in ('conv', 'fc1')})
    if how=='with an ember': te = torchEmber(model)
    train(model, monitor, run=run)
    got = monitor.get_output()
    monitor.close()
    if te: te.close()
    for p,steps in seen.items():
        for step,s in enumerate(steps):
            v = {k: d[step] for k,d in got[p].items() if step in d}
            e,o = eigs_of(s['input']),eigs_of(s['output_grad'])
            close = lambda a, b, rel=2e-4: np.testing.assert_allclose(a, b, rtol=rel, atol=1e-7) # noqa: E731
            close(v['InputCovMaxEig'], e[0])
            close(v['InputCovStableRank'], e.sum()/e[0])
            if p=='conv':
                close(v['InputCovCondition'], e[0]/e[-1])
                for at_ in (20, 50, 80): close(v[f'InputCovCondition{at_}'], e[0]/e[math.floor(len(e)*at_/100)])
            else: assert v['InputCovCondition']==math.inf # the covariance is singular: 32 samples of 288 features
            close(v['OutputGradCovMaxEig'], o[0])
            close(v['OutputGradCovStableRank'], o.sum()/o[0])
            close(v['OutputGradCovCondition50'], o[0]/o[len(o)//2])
            close(v['InputMean'], s['input'].double().mean((0, 2, 3) if p=='conv' else 0))
            close(v['InputMeanScalar'], s['input'].double().mean())
            close(v['InputStd'], s['input'].double().std())
            close(v['InputSndNorm'], s['input'].double().norm())
            close(v['OutputGradSndNorm'], s['output_grad'].double().norm())
            close(v['WeightNorm'], s['weight'].norm())
            close(v['WeightGradNorm'], s['weight_grad'].norm())
            out = s['output'] if p=='fc1' else s['output'].movedim(1, -1).reshape(-1, 8)
            close(v['LinearDeadNeuronNum'], (out<=0).all(0).double().mean())
            close(v['UnitActivity'], (out>0).double().mean(0))
            k = np.linalg.svd(s['output'].double().flatten(1).numpy(), compute_uv=False)
            close(v['RankMe'], np.exp(-((k/k.sum()+1e-7)*np.log(k/k.sum()+1e-7)).sum()))
            w = np.linalg.svd(s['weight'].double().flatten(1).numpy(), compute_uv=False)
            close(v['WeightEffectiveRank'], np.exp(-(w/w.sum()*np.log(w/w.sum())).sum()))
            if step:
                before = steps[step-1]['weight']
                close(v['WeightParamJump'], (before*s['weight']<0).double().mean())
                u = np.linalg.svd((s['weight']-before).double().flatten(1).numpy(), compute_uv=False)
                close(v['UpdateEffectiveRank'], np.exp(-(u/u.sum()*np.log(u/u.sum()+1e-300)).sum()), 1e-3)
            else: assert v['WeightParamJump']==0 and 'UpdateEffectiveRank' not in v
            assert math.isnan(v['GradSNR']) # the signal-to-noise ratio needs more than one step


def test_monitor_does_not_change_training():
    plain,watched = made(),made()
    a = train(plain)
    monitor = Monitor(watched, {'Conv2d': every_quantity, 'Linear': every_quantity, 'bn': ['MeanTID', 'VarTID']})
    b = train(watched, monitor)
    monitor.close()
    assert a==b and all(torch.equal(p, q) for p,q in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True))
    assert {n: set(m.__dict__) for n,m in plain.named_modules()}=={n: set(m.__dict__) for n,m in watched.named_modules()}


def test_batch_normalisation_over_windows():
    model = made()
    steps,bn = [],[]
    h = model.bn.register_forward_hook(lambda m, args, out: steps.append(args[0].detach().double()))
    monitor = Monitor(model, {'bn': [['MeanTID', 'linear(3, 2)'], ['VarTID', 'linear(3, 2)']]})
    train(model, monitor, seen=lambda s: bn.append((model.bn.running_mean.double().clone(), model.bn.running_var.double().clone())))
    h.remove()
    got = monitor.get_output()['bn']
    assert list(got['MeanTID'])==list(got['VarTID'])==[2, 5]
    for due,window in ((2, range(3)), (5, range(3, 6))):
        mean,var = bn[due]
        gaps = [((steps[s].mean((0, 2, 3))-mean).norm()/var.sqrt().norm()).item() for s in window]
        np.testing.assert_allclose(got['MeanTID'][due], np.mean(gaps), rtol=1e-5)
        gaps = [((steps[s].movedim(1, 0).flatten(1).std(1)-var.sqrt()).norm()/var.sqrt().norm()).item() for s in window]
        np.testing.assert_allclose(got['VarTID'][due], np.mean(gaps), rtol=1e-5)


def test_signal_to_noise_over_a_window():
    model,grads = made(),[]
    monitor = Monitor(model, {'fc2': [['GradSNR', 'linear(6, 5)']]})
    train(model, monitor, seen=lambda s: grads.append(model.fc2.weight.grad.double().numpy().copy()))
    g = np.stack(grads)
    np.testing.assert_allclose(monitor.get_output()['fc2']['GradSNR'][5], np.linalg.norm(g.mean(0))/np.sqrt(g.var(0, ddof=1).sum()), rtol=1e-5)


@pytest.mark.parametrize('spelling', ['bn', 'BatchNorm2d', nn.BatchNorm2d, 'b*'])
@pytest.mark.parametrize('what', ['MeanTID', ['MeanTID'], ['MeanTID', 'linear(0, 0)'], MeanTID, [MeanTID, 'linear(1,0)'], [MeanTID, every(1)],
    (MeanTID, linear())])
def test_ways_to_write_a_configuration(spelling, what):
    model = made()
    monitor = Monitor(model, {spelling: [what]})
    train(model, monitor, 2)
    assert list(monitor.get_output()['bn']['MeanTID'])==[0, 1]


def test_path_takes_precedence_over_class():
    monitor = Monitor(made(), {nn.Linear: [['WeightNorm', 3], 'InputStd'], 'fc1': [['WeightNorm', at(1)]]})
    train(monitor.model, monitor)
    got = monitor.get_output()
    assert list(got['fc1']['WeightNorm'])==[1] and list(got['fc2']['WeightNorm'])==[0, 3] and len(got['fc1']['InputStd'])==6


def test_wrapped_models():
    model = made()
    assert [*Monitor(torch.compile(model, backend='aot_eager'), {'_orig_mod.fc1': ['WeightNorm'], 'module.fc2': ['WeightNorm']}).parse_quantity]==['fc1', 'fc2']


# ---- quantities written for the library Taiyi

class OldMaxEig(SingleStepQuantity):
    def _compute(self, global_step):
        values,step = getattr(self._module, 'eigenvalues', (None, None))
        if step!=global_step:
            values = cal_eig(cal_cov_matrix(self._module.input_eig_data))
            self._module.eigenvalues = values,global_step
        return values[0]

    def forward_extensions(self): return [ForwardInputEigOfCovExtension()]

class OldRest(OldMaxEig):
    def _compute(self, global_step): return cal_eig(cal_cov_matrix(self._module.input_eig_data)).sum()

class OldEverything(SingleStepQuantity):
    def _should_compute(self, global_step): return global_step%2==1
    def _compute(self, global_step):
        m = self._module
        assert isinstance(m, nn.Conv2d) and m.__class__.__name__=='Conv2d' and m.weight.shape[0]==m.out_channels
        return torch.stack([m.input.norm(), m.output.norm(), m.input_grad.norm(), m.output_grad.norm(), m.output_grad_eig.norm(), m.weight.grad.norm()])

    def forward_extensions(self): return [ForwardInputExtension(), ForwardOutputExtension()]
    def backward_extensions(self): return [BackwardInputExtension(), BackwardOutputExtension(), BackwardOutputEigOfCovExtension()]

class OldWindow(MultiStepQuantity):
    def _compute_ones(self, global_step): return self._module.weight.norm()
    def _compute(self, global_step): return sum(self.cache)/len(self.cache)

class Halved(Extension):
    def __init__(self): self._name = 'halved'
    def _default(self, module, input, output): return input[0]/2+output.mean()

class OldOwnExtension(SingleStepQuantity):
    def _compute(self, global_step): return self._module.halved.sum()
    def forward_extensions(self): return [Halved()]


@pytest.mark.parametrize('compiled', [False, True])
def test_quantities_written_for_taiyi(compiled):
    model,seen = made(),[]
    run = torch.compile(model, backend='aot_eager', fullgraph=True) if compiled else model
    monitor = Monitor(model, {'conv': [OldMaxEig, OldRest, 'OldEverything', ['OldWindow', 'linear(2, 1)'], OldOwnExtension]})
    model.conv.weight.requires_grad_()
    opt,xs = torch.optim.SGD(model.parameters(), lr=.1),[]
    for step,(x,y) in enumerate(batches(4)):
        x = x.requires_grad_()
        opt.zero_grad()
        F.cross_entropy(run(x), y).backward()
        monitor.track(step)
        seen.append((x.grad.norm().item(), x.norm().item(), model.conv.weight.norm().item(), model.conv.weight.grad.norm().item()))
        xs.append(x.detach())
        opt.step()
    got = monitor.get_output()['conv']
    assert not {'input', 'halved', 'eigenvalues', 'name'} & set(model.conv.__dict__)
    assert list(got['OldEverything'])==[1, 3] and list(got['OldWindow'])==[1, 3]
    for step in (1, 3):
        v = got['OldEverything'][step]
        np.testing.assert_allclose(v[[2, 0, 5]], [seen[step][i] for i in (0, 1, 3)], rtol=1e-5)
        assert abs(v[3]-v[4])<1e-6*v[3]
        np.testing.assert_allclose(got['OldWindow'][step], np.mean([s[2] for s in seen[step-1:step+1]]), rtol=1e-6)
    for step,x in enumerate(xs):
        np.testing.assert_allclose(got['OldMaxEig'][step], eigs_of(x)[0], rtol=1e-4)
        np.testing.assert_allclose(got['OldRest'][step], eigs_of(x).sum(), rtol=1e-4)
    assert all(isinstance(v, float) for v in got['OldOwnExtension'].values())


def test_quantities_without_a_monitor():
    bn = nn.BatchNorm1d(3)
    q,x = MeanTID(bn, linear(2, 0)),torch.randn(4, 3, 5)
    for hook in q.forward_extensions(): bn.register_forward_hook(hook)
    for i in range(3):
        bn(x)
        q.track(i)
    assert list(q.get_output())==[0, 2] and q.should_show(2) and not q.should_show(1)
    gap = (x.mean((0, 2))-bn.running_mean).norm()/bn.running_var.sqrt().norm()
    np.testing.assert_allclose(q.get_output()[2], gap, rtol=.3)


# ---- quantities defined by users

@quantity
def Both(input, output_grad): return (input.mean()*0+output_grad.norm()).reshape(())

@quantity
def Top(input_eigs): return input_eigs[:2]

@quantity
def Named(weight, module, step): return weight.norm()*0+step+len(list(module.children()))


def test_quantities_as_functions():
    model = made()
    monitor = Monitor(model, {'conv': ['Both', 'Top', Named]})
    train(model, monitor, 3)
    got = monitor.get_output()['conv']
    assert got['Named']=={0: 0., 1: 1., 2: 2.} and got['Top'][0].shape==(2,) and all(v>0 for v in got['Both'].values())


def test_only_needed_tensors_are_captured():
    model = made()
    monitor = Monitor(model, {'fc1': ['WeightNorm'], 'fc2': [['InputStd', at(2)]]})
    assert '_torchember' not in model.fc1.__dict__ and '_torchember' in model.fc2.__dict__
    kept = []
    watch = next(w for w in monitor.watches if w.track.path=='fc2')
    train(model, monitor, seen=None, run=lambda x: (model(x), kept.append(len(watch.view._reduced)))[0])
    assert kept==[1, 1, 1, 0, 0, 0] # in the first two steps, the next due step cannot be predicted, so tensors are kept


def test_overwritten_tensor_has_no_value():
    class Spoil(nn.Module):
        def __init__(self): super().__init__(); self.fc = nn.Linear(3, 3)
        def forward(self, x): return self.fc(x).mul_(0.)
    class Late(SingleStepQuantity):
        def _compute(self, global_step): return self._module.output.norm()
        def forward_extensions(self): return [ForwardOutputExtension()]
    model,x = Spoil(),torch.randn(5, 3)
    monitor = Monitor(model, {'fc': [Late, 'LinearDeadNeuronNum']})
    with pytest.warns(EmberWarning, match='changed in place'):
        for step in range(3):
            model(x)
            monitor.track(step)
    got = monitor.get_output()['fc']
    want = F.linear(x, model.fc.weight, model.fc.bias).detach()
    assert list(got['Late'])==[1, 2] and abs(got['Late'][2]-want.norm().item())<1e-5
    assert list(got['LinearDeadNeuronNum'].values())==[((want<=0).all(0).double().mean().item())]*3


# ---- training loops

@pytest.mark.parametrize('steps', [range(0, 60, 10), [7, 8, 9, 10, 11], range(1000, 1006)])
def test_numbers_of_steps(steps):
    model = made()
    monitor = Monitor(model, {'fc1': [['InputStd', lambda s: s>=steps[0]], ['OutputGradSndNorm', every(2)]]})
    for (x,y),step in zip(batches(len(steps)), steps, strict=True):
        F.cross_entropy(model(x), y).backward()
        monitor.track(step)
    got = monitor.get_output()['fc1']
    assert list(got['InputStd'])==list(steps) and list(got['OutputGradSndNorm'])==[s for s in steps if s%2==0]


def test_irregular_steps_lose_few_values():
    model,steps = made(),[0, 1, 10, 11, 20, 21, 30, 31, 40, 41, 50, 51, 60, 61]
    monitor = Monitor(model, {'fc1': [['InputStd', 10]]})
    with pytest.warns(EmberWarning, match='the Monitor expected another number for this step'):
        for (x,_),step in zip(batches(len(steps), 4), steps, strict=True):
            model(x)
            monitor.track(step)
    assert len(monitor.get_output()['fc1']['InputStd'])>=6 # at most one of the 7 values is lost


def test_micro_batches_and_evaluations():
    model,(x,y) = made(),batches(1)[0]
    monitor = Monitor(model, {'fc1': [['InputStd', 2]]})
    last = {}
    h = model.fc1.register_forward_pre_hook(lambda m, args: last.update(x=args[0].detach().clone()) if m.training else None)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for step in range(7):
            for i in range(3): F.cross_entropy(model(x*(i+step+1)), y).backward()
            want = last['x'].std().item()
            model.eval()
            with torch.no_grad(): model(x*100)
            model.train()
            monitor.track(step)
            if step%2==0: assert abs(monitor.get_output()['fc1']['InputStd'][step]-want)<1e-5*want, step
    h.remove()
    assert list(monitor.get_output()['fc1']['InputStd'])==[0, 2, 4, 6]


def test_eval_pass_before_training_pass_is_not_a_micro_batch():
    "An adversarial attack computes gradients in eval mode. Only the training pass counts."
    model,want = nn.Linear(3, 2),{}
    opt,m = torch.optim.SGD(model.parameters(), lr=.1),Monitor(model, {'': ['InputStd']})
    for step in (0, 10, 20, 30):
        x = torch.randn(8, 3)
        want[step] = x.std().item()
        if step<30: model.eval()(5*x.clone().requires_grad_()).sum().backward()
        opt.zero_grad()
        model.train()(x).sum().backward()
        opt.step()
        m.track(step)
    m.close()
    df = m.t.df
    assert df.step.tolist()==list(want) and set(df.call)=={0}
    assert m.get_output()['']['InputStd'].keys()==want.keys()
    assert [float(v) for v in m.get_output()['']['InputStd'].values()]==pytest.approx(list(want.values()), rel=1e-5)


def test_call_of_a_submodule():
    model = made()
    monitor = Monitor(model, {'fc2': ['InputStd', 'OutputGradSndNorm']})
    for step in range(3):
        x = torch.randn(8, 12)*(step+1)
        model.fc2(x).sum().backward()
        monitor.track(step)
        np.testing.assert_allclose(monitor.get_output()['fc2']['InputStd'][step], x.std(), rtol=1e-5)
        np.testing.assert_allclose(monitor.get_output()['fc2']['OutputGradSndNorm'][step], math.sqrt(32), rtol=1e-6)


@pytest.mark.parametrize('reentrant', [False, True])
def test_activation_checkpointing(reentrant):
    class Saves(Net):
        def forward(self, x):
            x = checkpoint(lambda x: self.relu(self.bn(self.conv(x))), x, use_reentrant=reentrant)
            return self.fc2(F.relu(self.fc1(x.flatten(1))))
    plain,model = made(),(torch.manual_seed(0), Saves())[1]
    for m in plain,model: m.bn.momentum = 0.
    config = {'conv': ['InputStd', 'OutputGradSndNorm', 'OutputGradCovMaxEig'], 'fc1': ['OutputGradSndNorm']}
    monitors = [Monitor(m, config) for m in (plain, model)]
    x,y = batches(1)[0]
    for m,monitor in zip((plain, model), monitors, strict=True):
        F.cross_entropy(m(x.clone().requires_grad_()), y).backward()
        monitor.track(0)
    a,b = (m.get_output() for m in monitors)
    for path in config:
        for q in config[path]: np.testing.assert_allclose(a[path][q][0], b[path][q][0], rtol=1e-5)


def test_module_called_several_times():
    class Twice(nn.Module):
        def __init__(self): super().__init__(); self.fc = nn.Linear(4, 4)
        def forward(self, x): return self.fc(self.fc(x))
    model,x = Twice(),torch.randn(6, 4)
    monitor = Monitor(model, {'fc': ['InputStd', 'OutputGradSndNorm']})
    (model(x)*3).sum().backward()
    monitor.track(0)
    got = monitor.get_output()['fc'] # the value of the last call
    np.testing.assert_allclose(got['InputStd'][0], model.fc(x).std().item(), rtol=1e-5)
    np.testing.assert_allclose(got['OutputGradSndNorm'][0], 3*math.sqrt(24), rtol=1e-6)
    assert monitor.t.df.call.tolist()==[1, 1]


# ---- the log of a monitor and its memory

def test_rows_in_the_run_of_an_ember():
    model = made()
    te = torchEmber(model, every=2)
    monitor = Monitor(model, {'conv': ['InputMean', 'InputCovMaxEig'], 'bn': ['MeanTID']})
    assert monitor.t is te.t
    train(model, monitor)
    monitor.close(); te.close()
    df = read(te.t.fname)
    some = df[df.InputCovMaxEig.notna()]
    assert some.step.tolist()==list(range(6)) and set(some.path)=={'conv'} and set(some.ttype)=={'input'} and set(some.tname)=={'input'}
    assert [len(v) for v in some.InputMean]==[3]*6
    np.testing.assert_allclose([np.mean(v) for v in some.InputMean], some.InputMeanScalar, rtol=1e-9)
    assert df[df['mean'].notna()].step.unique().tolist()==[0, 2, 4]


def test_output_reads_dropped_values_from_the_log():
    from torchember.monitor.monitor import QuantityValues
    model = made()
    monitor = Monitor(model, {'conv': ['InputMean', 'InputStd']})
    monitor.outputs.most_numbers = 100
    train(model, monitor)
    assert monitor.outputs.in_log
    a = monitor.get_output()['conv']
    other = Monitor(made(), {'conv': ['InputMean', 'InputStd']})
    train(other.model, other)
    b = other.get_output()['conv']
    assert list(a['InputMean'])==list(b['InputMean'])==list(range(6))
    for s in range(6): np.testing.assert_array_equal(a['InputMean'][s], b['InputMean'][s])
    monitor.clean_mem()
    assert monitor.get_output()=={'conv': {'InputMean': {}, 'InputMeanScalar': {}, 'InputStd': {}}} and len(monitor.t.df)==6
    assert isinstance(QuantityValues().values, dict)


flat = '''
import gc, torch
from torch import nn
from torchember import Monitor
torch.set_num_threads(1)
def rss(): return int(next(l for l in open('/proc/self/status') if l.startswith('VmRSS')).split()[1])*1024
model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
monitor = Monitor(model, {'1': [['MeanTID', 'linear(10, 0)'], ['VarTID', 'linear(10, 0)']], '0': [['WeightParamJump', 5], ['GradSNR', 'linear(5, 4)']],
    '2': [['UnitActivity', 10]]})
x = torch.randn(256, 64)
def some(first, n):
    for step in range(first, first+n):
        model.zero_grad()
        model(x).sum().backward()
        monitor.track(step)
    monitor.clean_mem()
    monitor.t.barrier()
    gc.collect()
    return rss(), sum(type(o) is torch.Tensor for o in gc.get_objects())
(before,tensors),(after,more) = some(0, 500),some(500, 1500)
print(after-before, more-tensors)
'''

@pytest.mark.release
@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='needs /proc')
def test_memory_does_not_grow(tmp_path):
    "A new process trains with a Monitor. If 1500 batches were kept, they would need 98 MB."
    done = programs.run(flat, TORCHEMBER_HOME=tmp_path)
    assert done.returncode==0, done.stderr[-2000:]
    grown,tensors = map(int, done.stdout.split())
    assert grown<12e6 and tensors<=20, (grown, tensors)


def test_copies_and_pickles_are_plain_models():
    model = made()
    with Monitor(model, {'conv': every_quantity}) as monitor:
        train(model, monitor, 1)
        for m in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not any('torchember' in k for mod in m.modules() for k in mod.__dict__)
            m(batches(1)[0][0])
    del monitor
    gc.collect()
    assert not any('torchember' in k for mod in model.modules() for k in mod.__dict__)


def test_deleted_monitor_leaves_nothing():
    model = made()
    monitor = Monitor(model, {'conv': every_quantity})
    train(model, monitor, 1)
    del monitor
    gc.collect()
    assert not any('torchember' in k for mod in model.modules() for k in mod.__dict__)


def test_two_monitors_on_one_model():
    model = made()
    a,b = Monitor(model, {'conv': ['InputStd', OldMaxEig]}),Monitor(model, {'conv': ['InputStd', OldMaxEig], 'fc1': ['InputMean']})
    def both(step): a.track(step); b.track(step)
    train(model, seen=both)
    assert a.get_output()['conv']==b.get_output()['conv'] and len(b.get_output()['fc1']['InputMean'])==6


# ---- errors in quantities and configurations

def test_failing_quantity_does_not_affect_others():
    class Fails(SingleStepQuantity):
        def _compute(self, global_step): raise RuntimeError('my own mistake')
    class Odd(SingleStepQuantity):
        def _compute(self, global_step): return 'a string'
    model = made()
    monitor = Monitor(model, {'fc1': [Fails, 'WeightNorm', Odd]})
    with pytest.warns(EmberWarning) as warned: train(model, monitor)
    assert len(warned)==2 and 'my own mistake' in str(warned[0].message) and 'got a str' in str(warned[1].message)
    got = monitor.get_output()['fc1']
    assert all(math.isnan(v) for v in got['Fails'].values()) and len(got['WeightNorm'])==6 and not any(map(math.isnan, got['WeightNorm'].values()))
    assert all('my own mistake' in e and 'got a str' in e for e in monitor.t.df.error)
    with pytest.raises(RuntimeError, match='my own mistake'): train(made(), Monitor(model, {'fc1': [Fails]}, on_error='raise'), 1)


@pytest.mark.parametrize('config, message', [({'fc3': ['WeightNorm']}, "Did you mean 'fc"), ({'fc1': ['WieghtNorm']}, "Did you mean 'WeightNorm'"),
    ({'relu': ['WeightNorm']}, 'has no weight'), ({'bn': ['WeightEffectiveRank']}, 'is a vector'), ({'conv': ['MeanTID']}, 'has no running_mean'),
    ({'relu': ['SaturatedUnits']}, 'not a bounded activation'), ({'fc1': [['WeightNorm', 'lineer(5, 2)']]}, "WeightNorm of 'fc1': cannot read the schedule"),
    ({'fc1': [['WeightNorm', 'linear(5, 2)', 3]]}, r'\[name, schedule\]'), ({'fc1': [lambda input: 0]}, 'A lambda has no name'),
    ({'fc1': [nn.Linear]}, 'got the class Linear'), ({nn.Conv3d: ['WeightNorm']}, 'No module matches')])
def test_errors_of_configurations(config, message):
    model = made()
    with pytest.raises((ValueError, TypeError), match=message): Monitor(model, config)
    assert not any('torchember' in k for mod in model.modules() for k in mod.__dict__)


def test_track_refuses_other_values_than_numbers():
    with pytest.raises(TypeError, match='needs the step number'): Monitor(made(), {}).track('one')
    monitor = Monitor(made(), {'fc1': ['WeightNorm']})
    for s in (np.int64(0), torch.tensor(1), 2.): monitor.track(s)
    assert list(monitor.get_output()['fc1']['WeightNorm'])==[0, 1, 2]


def test_one_sample_and_missing_gradients():
    model = made().eval()
    monitor = Monitor(model, {'fc1': ['InputCovMaxEig'], 'fc2': ['OutputGradSndNorm']})
    with pytest.warns(EmberWarning) as warned:
        with torch.no_grad(): model(torch.randn(1, 3, 6, 6))
        monitor.track(0)
    assert any('several samples, got 1' in str(w.message) for w in warned) and any('no gradient' in str(w.message) for w in warned)
    assert math.isnan(monitor.get_output()['fc1']['InputCovMaxEig'][0]) and not monitor.get_output()['fc2']['OutputGradSndNorm']


def test_disabled(monkeypatch):
    monkeypatch.setenv('TORCHEMBER_DISABLE', '1')
    monitor = Monitor(made(), {'fc1': ['WeightNorm']})
    train(monitor.model, monitor, 2)
    assert monitor.get_output()=={'fc1': {'WeightNorm': {}}}


def test_killed_process_keeps_its_rows(tmp_path):
    code = '''
import os, signal, torch
from torch import nn
from torchember import Monitor
model = nn.Linear(3, 3)
monitor = Monitor(model, {'': ['WeightNorm', 'InputStd']}, name='killed')
for step in range(50):
    model(torch.randn(4, 3)).sum().backward()
    monitor.track(step)
monitor.t.barrier()
os.kill(os.getpid(), signal.SIGKILL)
'''
    assert programs.run(code, TORCHEMBER_HOME=tmp_path).returncode==-9
    df = read('killed')
    assert df[df.WeightNorm.notna()].step.tolist()==list(range(50))


def test_package_lists_its_quantities():
    from torchember import monitor
    assert monitor.InputMean is InputMean
    with pytest.raises(AttributeError): monitor.Nothing # noqa: B018
    assert torchember.Monitor is Monitor


@pytest.mark.parametrize('how', ['scaler', 'unscaled by hand', 'of the ember'])
def test_gradients_are_unscaled(how):
    quantities = ['OutputGradSndNorm', 'WeightGradNorm', Both]
    plain,scaled = made(),made()
    monitors = [Monitor(plain, {'fc1': quantities})]
    opt = torch.optim.SGD(scaled.parameters(), lr=.1)
    scaler = torch.amp.GradScaler('cpu', init_scale=1024.)
    te = torchEmber(scaled, optimizer=opt, scaler=scaler) if how=='of the ember' else None
    monitors.append(Monitor(scaled, {'fc1': quantities}, scaler=None if te else scaler))
    x,y = batches(1)[0]
    F.cross_entropy(plain(x), y).backward()
    scaler.scale(F.cross_entropy(scaled(x), y)).backward()
    if how=='unscaled by hand': scaler.unscale_(opt)
    for m in monitors: m.track(0)
    scaler.step(opt)
    a,b = (m.get_output()['fc1'] for m in monitors)
    for q in a: np.testing.assert_allclose(a[q][0], b[q][0], rtol=1e-5)
    if te: te.close()


def alone(step, model, opt, x, y):
    model.train()
    opt.zero_grad()
    # the forward of the whole model is not called
    F.cross_entropy(model.fc2(F.relu(model.fc1(model.bn(model.conv(x)).flatten(1)))), y).backward()

def test_root_is_never_called_and_model_is_validated():
    model = made()
    opt = torch.optim.SGD(model.parameters(), lr=.05)
    monitor = Monitor(model, {'fc1': ['InputStd', ['OutputGradSndNorm', 3]], 'conv': ['InputStd']})
    for step,(x,y) in enumerate(batches(12, 8)):
        alone(step, model, opt, x, y)
        want = x.std().item()
        if step%3==1: # a validation pass before track
            model.eval()
            model.fc1(model.bn(model.conv(x*100)).flatten(1))
        monitor.track(step)
        assert abs(monitor.get_output()['conv']['InputStd'][step]-want)<1e-5
        if step%3==2: # a validation pass after track
            model.eval()
            with torch.no_grad(): model.fc1(model.bn(model.conv(x*100)).flatten(1))
        opt.step()
    got = monitor.get_output()['fc1']
    assert list(got['InputStd'])==list(range(12)) and list(got['OutputGradSndNorm'])==[0, 3, 6, 9]


@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('mode', ['train', 'eval'])
@pytest.mark.parametrize('alone', [False, True])
def test_pass_without_gradients_between_forward_and_backward(compiled, mode, alone):
    if compiled and alone: pytest.skip('its parts are called by name')
    model,seen = made(),[]
    run = torch.compile(model, backend='aot_eager') if compiled else model
    f = (lambda x: model.fc2(F.relu(model.fc1(model.relu(model.bn(model.conv(x))).flatten(1))))) if alone else run
    monitor = Monitor(model, {'fc1': ['OutputGradSndNorm', 'InputStd'], 'fc2': ['WeightGradNorm']})
    for step,(x,y) in enumerate(batches(8)):
        model.zero_grad()
        z = []
        def hear(m, args, out, z=z):
            z.append(args[0].std().item())
            out.register_hook(lambda g: z.append(g.norm().item()))
        h = None if compiled else model.fc1.register_forward_hook(hear)
        loss = F.cross_entropy(f(x), y)
        if h: h.remove()
        model.train(mode=='train')
        with torch.no_grad(): f(x*100)
        model.train()
        loss.backward()
        monitor.track(step)
        seen.append(z)
    got = monitor.get_output()['fc1']
    assert list(got['InputStd'])==list(got['OutputGradSndNorm'])==list(range(8))
    assert max(got['InputStd'].values())<5
    if not compiled: np.testing.assert_allclose([(got['InputStd'][s], got['OutputGradSndNorm'][s]) for s in range(8)], seen, rtol=1e-5)


def test_training_of_parts_and_validation_of_the_whole():
    model = made()
    monitor = Monitor(model, {'fc1': ['InputStd', 'OutputGradSndNorm'], 'bn': ['InputStd']})
    opt = torch.optim.SGD(model.parameters(), lr=.05)
    for step,(x,y) in enumerate(batches(8)):
        model.train()
        model.bn.eval() # batch normalization is frozen
        opt.zero_grad()
        with torch.no_grad(): h = model.bn(model.conv(x))
        F.cross_entropy(model.fc2(F.relu(model.fc1(h.flatten(1)))), y).backward()
        monitor.track(step)
        model.eval()
        with torch.no_grad(): model(x*100)
    got = monitor.get_output()
    assert [list(v) for m in got.values() for v in m.values()]==[list(range(8))]*3 and max(got['bn']['InputStd'].values())<5


def test_failed_passes_and_vmap_do_not_count():
    model,(x,y) = made(),batches(1)[0]
    monitor = Monitor(model, {'conv': ['InputStd'], 'fc1': ['InputStd']})
    for step in range(4):
        F.cross_entropy(model(x), y).backward()
        if step==1:
            # this image size does not fit the layer fc1
            with pytest.raises(RuntimeError): model(torch.randn(4, 3, 9, 9))
        if step==2: torch.vmap(lambda x: model.conv(x[None]))(x)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter('always')
            monitor.track(step)
        if step==1: assert len(warned)==2 and all('raised an error' in str(w.message) for w in warned)
    got = monitor.get_output()
    assert [list(m['InputStd']) for m in got.values()]==[[0, 2, 3]]*2
    np.testing.assert_allclose(got['conv']['InputStd'][2], x.std(), rtol=1e-5)


def test_track_once_per_epoch():
    model = nn.Linear(3, 3)
    monitor = Monitor(model, {'': ['InputMean']})
    monitor.passes.predictor.patience = 20
    for epoch in range(4):
        for _ in range(100): x = torch.randn(8, 3); model(x).sum().backward()
        with warnings.catch_warnings(): warnings.simplefilter('ignore', EmberWarning); monitor.track(epoch)
        values = monitor.get_output()[''].get('InputMean', {})
        if epoch in values: np.testing.assert_allclose(values[epoch], x.mean(0), rtol=1e-5)
    # in the first epoch, the number of passes per epoch is unknown, so there is no value
    assert {2, 3}<=set(values) and 0 not in values


def test_training_switches_to_eval_mode():
    model = made()
    monitor = Monitor(model, {'fc1': ['InputStd', 'OutputGradSndNorm']})
    for step,(x,y) in enumerate(batches(6)):
        model.train(step<2)
        F.cross_entropy(model(x), y).backward()
        monitor.track(step)
    assert [list(v) for v in monitor.get_output()['fc1'].values()]==[list(range(6))]*2


@pytest.mark.parametrize('parametrize', [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal])
def test_reading_does_not_change_parametrizations(parametrize):
    plain,watched = made(),made()
    for m in plain,watched:
        torch.manual_seed(1)
        parametrize(m.fc1)
    monitor = Monitor(watched, {'fc1': ['WeightNorm', 'WeightParamJump', 'UpdateEffectiveRank', ['WeightEffectiveRank', 2]]})
    assert train(plain)==train(watched, monitor)
    assert all(torch.equal(a, b) for a,b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True))
    with pytest.raises(ValueError, match='computed by a parametrization'): Monitor(watched, {'fc1': ['WeightGradNorm']})


def test_quantity_that_changes_a_tensor_is_reported():
    class Centres(SingleStepQuantity):
        def _compute(self, global_step): return self._module.input.sub_(self._module.input.mean()).norm()
        def forward_extensions(self): return [ForwardInputExtension()]
    model = made()
    monitor = Monitor(model, {'conv': [Centres]})
    model(batches(1)[0][0])
    with pytest.warns(EmberWarning, match='changed a tensor of the model in place'): monitor.track(0)


def test_invalid_values_of_quantities():
    @quantity
    def Wave(input): return torch.fft.rfft(input.flatten()[:8])
    monitor = Monitor(made(), {'conv': ['Wave', 'InputStd']})
    with pytest.warns(EmberWarning, match='real numbers'): train(monitor.model, monitor, 1)
    assert monitor.t.df.InputStd.notna().all() and math.isnan(monitor.get_output()['conv']['Wave'][0])
    for bad in ({'conv': ['SingleStepQuantity']}, {'conv': ['InputStd', 'linear(2, 0)']}, {'conv': [type('Empty', (MultiStepQuantity,), {})]}):
        with pytest.raises((ValueError, TypeError)): Monitor(made(), bad)


def test_layer_with_a_new_size():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    monitor = Monitor(model, {'0': [[q, 'linear(4, 3)'] for q in ('UnitActivity', 'GradSNR', 'UpdateEffectiveRank', 'WeightParamJump')]})
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', EmberWarning)
        for step in range(16):
            if step==5: cut(model)
            model.zero_grad()
            model(torch.randn(8, 4)).square().sum().backward()
            monitor.track(step)
    got = monitor.get_output()['0']
    assert len(got['UnitActivity'][3])==8 and len(got['UnitActivity'][15])==6 and all(math.isfinite(got[q][15]) for q in ('GradSNR', 'WeightParamJump'))

def cut(model):
    a,b = model[0],model[2]
    a.weight,a.bias,a.out_features = nn.Parameter(a.weight[:6].detach()),nn.Parameter(a.bias[:6].detach()),6
    b.weight,b.in_features = nn.Parameter(b.weight[:, :6].detach()),6


def test_resume():
    for resume in (False, True):
        monitor = Monitor(made(), {'fc1': ['WeightNorm']}, name='again', resume=resume)
        for step in range(3): monitor.track(step+3*resume)
        monitor.close()
    assert read('again').step.tolist()==list(range(6))


def test_plot_without_a_tensor_type():
    import matplotlib.pyplot as plt

    from torchember import scalar_line
    monitor = Monitor(made(), {'fc1': ['WeightNorm', 'InputStd']})
    train(monitor.model, monitor)
    monitor.close()
    for stat in ('WeightNorm', 'InputStd'): assert len(scalar_line(monitor, scalar_metric=stat).lines)>=1
    with pytest.raises(ValueError, match='Monitor'): scalar_line(monitor, scalar_metric='InputSndNorm')
    plt.close('all')


@pytest.mark.release
@pytest.mark.slow
def test_two_processes(tmp_path):
    "DDP (also compiled) and FSDP2: activations belong to one rank, weights and gradients to the whole model on all ranks."
    here = Path(__file__).parent
    programs.ranks(here/'monitored.py', tmp_path, TORCHEMBER_HOME=tmp_path)
    a,b = (json.loads((tmp_path/f'{k}.json').read_text()) for k in range(2))
    for how in a:
        for k,result in enumerate((a[how], b[how])):
            assert result['run'].endswith(f'.rank{k}') and result['rows']==[[k, step] for step in range(4)]
            assert list(result['output']['1']['MeanTID'])==['1', '3']
            for path,quantities in result['output'].items():
                for q,values in quantities.items():
                    # DDP broadcasts the running statistics of the first rank to all ranks
                    if how=='fsdp' and q=='MeanTID': continue
                    np.testing.assert_allclose(list(values.values()), list((a, b)[k]['ddp']['output'][path][q].values()), rtol=2e-5, err_msg=f'{how} {q}')
        for q in ('WeightNorm', 'WeightGradNorm', 'WeightEffectiveRank'): assert a[how]['output']['0'][q]==b[how]['output']['0'][q]
        assert a[how]['output']['0']['InputStd']!=b[how]['output']['0']['InputStd']


def test_training_call_takes_precedence_in_its_step(tmp_path):
    "A submodule is called alone, and without gradients before and after. The value of the training call is recorded."
    def Seen(input): return input.mean()
    model = nn.Sequential(nn.Linear(2, 2))
    with Monitor(model, {'0': [Seen]}, name='alone', home=tmp_path) as monitor:
        for s in range(3):
            for value,grad in ((1., False), (2.+s, True), (9., False)):
                with torch.set_grad_enabled(grad): y = model[0](torch.full((1, 2), value))
                if grad: y.sum().backward()
            monitor.track(s)
    assert monitor.output['0']['Seen']=={0: 2., 1: 3., 2: 4.}
    df = read('alone', home=tmp_path)
    assert df[['step', 'call', 'ttype', 'tname', 'Seen']].values.tolist()==[[s, 0, 'input', 'input', 2.+s] for s in range(3)]


def test_failed_pass_explains_only_its_own_step(tmp_path):
    def Seen(input): return input.mean()
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = nn.Linear(2, 2),nn.Linear(2, 2)
        def forward(self, x, how):
            if how!='without a': x = self.a(x)
            if how=='raise': raise KeyError('of the user')
            return self.b(x)
    model = Net()
    with Monitor(model, {'a': [Seen]}, name='raised', home=tmp_path, on_error='raise') as monitor:
        with pytest.raises(KeyError): model(torch.ones(1, 2), 'raise')
        with pytest.raises(AttributeError, match="the last pass that called 'a' raised an error"): monitor.track(0)
        model(torch.ones(1, 2), 'without a').sum().backward()
        with pytest.raises(AttributeError, match="no call of 'a' was seen since the last tracked step|expected another number"): monitor.track(1)
        model(torch.full((1, 2), 5.), 'with').sum().backward()
        monitor.track(2)
    assert monitor.output['a']['Seen']=={2: 5.}


@pytest.mark.parametrize('how', ['eager', 'compiled'])
def test_gradient_of_the_last_call(how, tmp_path):
    "A layer is called twice. Its gradients are 6 in the first call and 1 in the last call, which counts."
    def Slope(output_grad): return output_grad.mean()
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 1, bias=False)
        def forward(self, x): return self.fc(2*self.fc(x))
    model = Twice()
    nn.init.constant_(model.fc.weight, 3.)
    with Monitor(model, {'fc': [Slope]}, name='twice', home=tmp_path) as monitor:
        run = torch.compile(model, backend='aot_eager') if how=='compiled' else model
        for s in range(3):
            run(torch.ones(1, 1)).sum().backward()
            monitor.track(s)
    assert monitor.output['fc']['Slope']=={0: 1., 1: 1., 2: 1.}
    assert read('twice', home=tmp_path)[['step', 'call', 'Slope']].values.tolist()==[[s, 1, 1.] for s in range(3)]


def test_hooks_on_leaf_tensors_are_removed_after_each_step(tmp_path):
    def Slope(input_grad): return input_grad.mean()
    model,x = nn.Sequential(nn.Linear(2, 2)),torch.ones(1, 2, requires_grad=True)
    with Monitor(model, {'0': [Slope]}, home=tmp_path) as monitor:
        for s in range(3):
            model(x).sum().backward()
            assert len(x._backward_hooks)==1
            monitor.track(s)
            assert not x._backward_hooks
    assert list(monitor.output['0']['Slope'])==[0, 1, 2]


def test_row_has_the_errors_of_two_quantities(tmp_path):
    def First(input): raise ValueError('one')
    def Second(input): raise KeyError('two')
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(EmberWarning), Monitor(model, {'0': [First, Second]}, name='both', home=tmp_path) as monitor:
        model(torch.ones(1, 2))
        monitor.track(0)
    row, = read('both', home=tmp_path).to_dict('records')
    assert (row['error'], row['First']!=row['First'], row['Second']!=row['Second'])==("First: ValueError: one; Second: KeyError: 'two'", True, True)


def test_a_quantity_that_is_kept_does_not_keep_the_model():
    model = nn.Sequential(nn.Linear(2, 2))
    q = WeightNorm(model[0])
    monitor = Monitor(model, {'0': [q]})
    monitor.track(0)
    monitor.close()
    gone = weakref.ref(model)
    del model,monitor
    gc.collect()
    assert gone() is None and isinstance(q, WeightNorm)
