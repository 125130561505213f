"Values of a Monitor in each step are compared with values computed by hand, for two models with different schedules."
import math

import numpy as np
import pytest
import torch
from torch import nn

from torchember import Monitor, at
from torchember.monitor.watching import StepPredictor, pass_rank

config = {'0': [['InputStd', 2], 'WeightNorm', ['WeightGradNorm', at(1, 6, 9)], ['WeightParamJump', 3], ['GradSNR', 4], ['UpdateEffectiveRank', 2]],
    '1': [['MeanTID', 3], ['VarTID', 2], 'OutputGradSndNorm'], '2': [['UnitActivity', 4], ['LinearDeadNeuronNum', 3]],
    '3': [['InputMean', 2], 'InputSndNorm', ['WeightGradNorm', 5]]}
place = dict(Input='input', WeightGrad='weight_grad', GradSNR='weight_grad', Weight='weight', Update='weight', MeanTID='input', VarTID='input',
    OutputGrad='output_grad', Unit='output', LinearDead='output')
tensor = dict(input=('input', None), weight=('weight_0', 'weight'), weight_grad=('grad_0', 'weight'), output_grad=('output_0', None), output=('output_0', None))
def due(when, s): return s in (1, 6, 9) if callable(when) else s%when==0


class Training:
    "A model with a Monitor. Its tensors of each step are copied by torch's hooks."
    def __init__(self, seed, home, passes, first, stride):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
        self.g,self.now,self.seen,self.passes,self.steps = torch.Generator().manual_seed(seed),{},[],passes,[first+stride*i for i in range(7)]
        for i,m in enumerate(self.model):
            def keep(m, args, y, i=i):
                if not m.training: return
                self.now[i, 'input'],self.now[i, 'output'] = args[0].detach().clone().numpy(),y.detach().clone().numpy()
                y.register_hook(lambda g: self.now.update({(i, 'output_grad'): g.clone().numpy()}))
            m.register_forward_hook(keep)
        self.monitor = Monitor(self.model, config, home=home, name=f'run{seed}')
        self.opt = torch.optim.SGD(self.model.parameters(), lr=.3)

    def step(self, i):
        for _ in range(self.passes): self.model(torch.randn(5, 3, generator=self.g)).square().sum().backward()
        for k,m in enumerate(self.model):
            if hasattr(m, 'weight'): self.now |= {(k, 'weight'): m.weight.detach().clone().numpy(), (k, 'weight_grad'): m.weight.grad.clone().numpy()}
        self.now['mean'],self.now['var'] = self.model[1].running_mean.clone().numpy(),self.model[1].running_var.clone().numpy()
        self.seen.append({k: v.astype(float) for k,v in self.now.items()})
        self.monitor.track(self.steps[i])
        self.opt.step()
        self.opt.zero_grad()
        self.model.eval()(torch.randn(3, 3, generator=self.g)) # a pass in eval mode
        self.model.train()

    def value(self, k, name, n, window):
        "Compute a quantity of module `k` at step n. `window`: all steps since the last due step, up to this step."
        x = lambda t, i=n: self.seen[i][k, t]
        mean,var = self.seen[n]['mean'],self.seen[n]['var']
        if name=='InputStd': return x('input').std(ddof=1)
        if name=='InputSndNorm': return np.linalg.norm(x('input'))
        if name=='InputMean': return x('input').mean(0)
        if name=='WeightNorm': return np.linalg.norm(x('weight'))
        if name=='WeightGradNorm': return np.linalg.norm(x('weight_grad'))
        if name=='OutputGradSndNorm': return np.linalg.norm(x('output_grad'))
        if name=='LinearDeadNeuronNum': return (x('output')<=0).all(0).mean()
        if name=='UnitActivity': return np.mean([(x('output', i)>0).mean(0) for i in window], 0)
        if name=='MeanTID': return np.mean([np.linalg.norm(x('input', i).mean(0)-mean) for i in window])/np.linalg.norm(np.sqrt(var))
        if name=='VarTID': return np.mean([np.linalg.norm(x('input', i).std(0, ddof=1)-np.sqrt(var)) for i in window])/np.linalg.norm(np.sqrt(var))
        if name=='WeightParamJump': return np.mean(np.any([x('weight', i)*x('weight', i-1)<0 for i in window if i] or [np.zeros((4, 3))], 0))
        if name=='GradSNR':
            g = np.array([x('weight_grad', i) for i in window])
            return np.linalg.norm(g.mean(0))/math.sqrt(g.var(0, ddof=1).sum()) if len(g)>1 else math.nan
        if window[0]==0: return None # the first step has no earlier weight to compare
        p = np.linalg.svd(x('weight')-x('weight', window[0]-1), compute_uv=False)
        p = p[p>1e-9]/p.sum()
        return math.exp(-(p*np.log(p)).sum())

    def want(self):
        "Return the expected values: (step, path, ttype) -> quantity -> value."
        out = {}
        for k,asked in config.items():
            for name,when in ((a, 1) if isinstance(a, str) else a for a in asked):
                last = 0
                for n,s in enumerate(self.steps):
                    if not due(when, s): continue
                    v = self.value(int(k), name, n, range(last, n+1))
                    last = n+1
                    if v is None: continue
                    row = out.setdefault((s, k, next(t for p,t in place.items() if name.startswith(p))), {})
                    row[name] = v
                    if name=='InputMean': row['InputMeanScalar'] = v.mean()
        return out


def near(v): return pytest.approx(v, rel=2e-4, abs=1e-6, nan_ok=True)


def test_values_of_each_step(tmp_path):
    "Two models are trained in turns, one with two passes per step. Each value of each step is checked."
    both = [Training(1, tmp_path, 1, 0, 1), Training(2, tmp_path, 2, 6, 3)]
    for i in range(7):
        for t in both: t.step(i)
    assert {n for t in both for row in t.want().values() for n in row}=={*(a if isinstance(a, str) else a[0] for asked in config.values() for a in asked),
        'InputMeanScalar'}
    for t in both:
        rows,want = t.monitor.t.lines(),t.want()
        got = {(r['step'], r['module'].split('.')[-1][0], r['ttype']): {k: v for k,v in r.items() if k[0].isupper()} for r in rows}
        assert len(rows)==len(got) and got.keys()==want.keys()
        for at_,values in want.items(): assert {k: math.nan if v is None else v for k,v in got[at_].items()}=={k: near(v) for k,v in values.items()}, at_
        for r in rows: assert (r['tname'], r.get('pname'), r['call'], r['dtype'])==(*tensor[r['ttype']], 0, 'float32')
        given = {(s, p, n): v for p,names in t.monitor.output.items() for n,steps in names.items() for s,v in steps.items()}
        flat = {(s, p, n): v for (s, p, _),values in want.items() for n,v in values.items()}
        assert given.keys()==flat.keys() and all(v==near(flat[k]) for k,v in given.items())
        last = {p: {n: v for (s, q, n),v in given.items() if (s, q)==(t.steps[-1], p)} for p in config}
        of = t.monitor.of_step(t.steps[-1])
        assert {p: v for p,v in last.items() if v}.keys()==of.keys() and all(of[p].keys()==last[p].keys() for p in of)
        t.monitor.clean_mem()
        assert not any(steps for names in t.monitor.output.values() for steps in names.values())
        t.monitor.close()


def test_step_prediction():
    "Checks the ranks of passes, the passes per step, and the predicted step numbers until one is wrong."
    assert [pass_rank(t, g) for t in (False, True) for g in (False, True)]==[0, 2, 1, 3]
    e,seen = StepPredictor(),[]
    def step(number, *ranks):
        for r in ranks:
            e.begin_pass(r)
            seen.append((e.skipped, e.passes, e.is_early, e.step))
        e.end_step(number)
        out,seen[:] = [*seen],[]
        return out
    # in a step, the first pass of rank 3 replaces the earlier pass of rank 2
    assert step(0, 2, 3, 2, 3)==[(False, 1, False, None), (False, 1, False, None), (True, 1, False, None), (False, 2, False, None)]
    assert (e.usual_passes, e.ranks.previous, e.pass_)==(2, 3, 3)
    # a pass without gradients counts less than one with gradients, if the previous step had gradients
    assert step(5, 1, 3)==[(True, 0, False, None), (False, 1, False, None)]
    assert (e.usual_passes, e.varies, e.step)==(1, True, 10)
    assert step(10, 3, 3)==[(False, 1, False, 10), (False, 2, False, None)] # this step has one pass more than usual
    e = StepPredictor()
    for s in (0, 5): step(s, 3, 3)
    assert step(10, 3, 3)==[(False, 1, True, 10), (False, 2, False, 10)] # the last of the two passes counts
    # the predicted step number was wrong
    assert step(12, 3, 3)==[(False, 1, True, 15), (False, 2, False, 15)] and e.needed_steps==4
    assert [step(s, 3, 3)[1][3] for s in (14, 16, 18, 20, 22, 24)]==[None]*4+[22, 24]
    step(30)
    # a step without a pass leaves the usual number of passes unchanged
    assert (e.ranks.previous, e.passes, e.step)==(3, 0, None)
    step(31, 1, 0)
    # this step had only a validation pass, so a validation pass counts in the next step
    assert (e.ranks.previous, e.usual_passes)==(1, 2)
    assert step(32, 1)[0][:2]==(False, 1)
