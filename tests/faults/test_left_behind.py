"""torchember leaves nothing on objects of the user: no weak references to parameters, picklable scalers, silent forks"""
import copy
import os
import pickle
import textwrap
import weakref

import programs
import pytest
import torch
from torch import nn

from torchember import torchEmber
from torchember.recorder.recorder import recorded


def referred(*tensors): return [weakref.getweakrefcount(x) for x in tensors]


@pytest.fixture
def swapping():
    "Let `Module._apply` swap tensors, which fails for a tensor with a weak reference."
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize('stats', ['basic', lambda x: {'n': x.numel()}])
def test_no_weak_references(stats, swapping):
    "No weak references remain after any kind of recording, also if it stops in the middle."
    m = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    os_ = [torch.optim.Adam(m[0].parameters(), .1), torch.optim.SGD(m[2].parameters(), .1, momentum=.9)]
    te = torchEmber(m, optimizer=os_, stats=stats, ttypes=recorded, on_error='raise')
    x = torch.randn(5, 4, requires_grad=True)
    def check(): assert not any(referred(x, *m.parameters(), *m.buffers(), *(p.grad for p in m.parameters() if p.grad is not None)))
    for _ in range(2):
        loss = m(x).sum()
        check()
        te.probe('x', x)
        check()
        loss.backward()
        check()
        te.log_model()
        check()
        os_[0].step()
        check() # between the two optimizer steps
        os_[1].step()
        check()
        m.zero_grad()
    te.log_model()
    m.double()
    x = x.detach().double()
    m(x).sum().backward()
    te.log_model()
    m.float()
    te.close()
    d = te.t.df
    assert sorted(d.step.unique())==[0, 1, 2] and set(d[(d.ttype=='weight') & (d.step==2)].dtype)=={'float64'}
    assert not d[d.ttype.isin(['weight', 'weight_grad'])].duplicated(['step', 'path', 'tname']).any()


def test_scaler_pickles():
    "A scaler can be pickled between two steps, armed or not. The copy works alone, and the original is unchanged."
    m = nn.Linear(4, 1)
    o = torch.optim.SGD(m.parameters(), .1)
    s = torch.amp.GradScaler('cpu', init_scale=64.)
    plain = dict(vars(s))
    te = torchEmber(m, optimizer=o, scaler=s)
    def step(s, scale=1.):
        o.zero_grad()
        s.scale(m(torch.ones(2, 4)).sum()*scale).backward()
        s.step(o)
        s.update()
    step(s)
    for other in (pickle.loads(pickle.dumps(s)), copy.deepcopy(s)):
        assert other.get_scale()==64.
        assert getattr(vars(other).get('step'), '__self__', other) is other
        step(other, float('inf')) # The copy halves its own scale, and the scale of the original stays 64
        assert (other.get_scale(), s.get_scale())==(32., 64.)
    te.disarm()
    assert vars(s).keys()-{'_scale', '_growth_tracker'}==plain.keys()-{'_scale', '_growth_tracker'} and 'step' not in vars(s)
    assert pickle.loads(pickle.dumps(s)).get_scale()==64.
    te.arm()
    step(s, float('inf'))
    assert s.get_scale()==32.
    te.close()
    d = te.t.df
    # The phase 'refused' marks passes with gradients scaled by a copy of the scaler
    skipped = d[d['skipped'].notna() & (d['phase']!='refused')]
    assert skipped.step.unique().tolist()==[int(d.step.max())]


def test_scaler_whose_step_somebody_replaced():
    "If the user has replaced the method `step` of a scaler, it is still called, and is restored afterwards."
    m = nn.Linear(4, 1)
    o = torch.optim.SGD(m.parameters(), .1)
    s = torch.amp.GradScaler('cpu', init_scale=64.)
    calls,class_step = [],s.step
    s.step = mine = lambda *a, **kw: (calls.append(a), class_step(*a, **kw))[1]
    te = torchEmber(m, optimizer=o, scaler=s)
    s.scale(m(torch.ones(2, 4)).sum()).backward()
    s.step(optimizer=o)
    s.update()
    te.close()
    assert len(calls)==1 and s.step is mine and te.t.df.step.unique().tolist()==[0]


def run(code):
    r = programs.run(textwrap.dedent(code), timeout=300)
    assert r.returncode==0, r.stderr
    return r


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='there are no forks here')
def test_fork_is_quiet():
    "A forked child that trains with its own optimizer prints nothing and records nothing, also when it ends."
    r = run('''
        import os, torch
        from torch import nn
        from torchember import torchEmber
        m = nn.Linear(4, 1)
        o = torch.optim.SGD(m.parameters(), .1)
        te = torchEmber(m, optimizer=o, stats='full')
        def step(o): o.zero_grad(); m(torch.randn(2, 4)).sum().backward(); o.step()
        step(o)
        child = os.fork()
        if not child:
            mine = torch.optim.SGD(m.parameters(), .1)
            for i in range(1500): step(mine)
            print('records nothing' in repr(te.close()), flush=True) # `os._exit` flushes nothing
            os._exit(0)
        assert os.waitpid(child, 0)[1]==0
        for i in range(3): step(o)
        te.close()
        d = te.t.df
        print(sorted(d.step.unique().tolist()), d[d.tname!='lr'].groupby('step').size().nunique())''')
    assert r.stderr==''
    assert r.stdout.splitlines()==['True', '[0, 1, 2, 3] 1']


def test_a_fork_takes_no_steps_along():
    "Only the parent writes the steps that are pending at the fork; the forked child does not."
    m = nn.Linear(2, 1)
    te = torchEmber(m, ttypes='output')
    for _ in range(4): m(torch.ones(1, 2))
    r = te.recorder
    assert len(r.writer.waiting)==2 # Step 0 is already in the log, and step 3 is not finished
    r.leave()
    r.flush()
    assert te.t.df.step.tolist()==[0] and not r.writer.waiting and not r.pipe.provisional.kept
    te.close()
