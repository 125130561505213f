"The measured time of recording, and the time budget (`overhead`), tested with a simulated clock."
from tensor_rows import lines
import math
import random
import warnings

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter

from torchember import EmberWarning, at, torchEmber
from torchember.recorder import budget, cost, model_events, step_buffer


class Clock:
    "A simulated clock. `pass_` moves it forward."
    def __init__(self): self.now = 0.
    def __call__(self): return self.now
    def pass_(self, seconds): self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    c = Clock()
    for m in (budget, cost, model_events): monkeypatch.setattr(m, 'clock', c)
    monkeypatch.setenv('TORCHEMBER_PLAN', '0') # compiled plans of calls read the real clock, so they are switched off
    monkeypatch.setattr(cost, 'call_overhead', lambda told: 0)
    return c


@pytest.fixture
def slow(clock, monkeypatch):
    "Return a simulated clock that advances 1 s when a tensor is measured."
    real = step_buffer.observe
    def observe(*args, **kwargs):
        clock.pass_(1)
        return real(*args, **kwargs)
    monkeypatch.setattr(step_buffer, 'observe', observe)
    return clock


class Layer(nn.Linear):
    "A linear layer whose `forward` takes 10 s of the simulated clock."
    def forward(self, x):
        if Layer.clock is not None: Layer.clock.pass_(10)
        return super().forward(x)


Layer.clock = None


def net(): return nn.Sequential(Layer(2, 2), nn.ReLU())
def spent(te): return te.close()['seconds']-te.t.file.seconds


@pytest.mark.parametrize('ttypes', ['input', 'output', 'weight', 'weight_grad', 'output_grad', 'optimizer', 'update'])
def test_each_tensor_is_measured_once(slow, monkeypatch, ttypes):
    monkeypatch.setattr(Layer, 'clock', slow)
    model = net()
    opt = torch.optim.Adam(model.parameters())
    te = torchEmber(model, optimizer=opt, ttypes=ttypes)
    for _ in range(3):
        model(torch.randn(4, 2)).sum().backward()
        slow.pass_(5)
        opt.step()
        opt.zero_grad()
    rows = len(lines(te))
    # for an update, its weight is measured too, without a row
    assert rows and abs(spent(te)-rows*(2 if ttypes=='update' else 1))<1e-6


def test_passes_that_are_not_recorded_take_nothing(slow):
    model = net()
    te = torchEmber(model, every=4)
    for _ in range(8): model(torch.randn(4, 2))
    assert abs(spent(te)-2*8)<1e-6


@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
def test_compiled_passes_are_measured(slow, backend):
    torch._dynamo.reset()
    model = net()
    te = torchEmber(model, ttypes=('input', 'output', 'output_grad'))
    f = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):
        f(torch.randn(4, 2)).sum().backward()
        te.step()
    assert abs(spent(te)-len(lines(te)))<1e-6


def test_share_is_of_the_time_from_first_to_last_step(slow, monkeypatch):
    monkeypatch.setattr(Layer, 'clock', slow)
    model = net()
    te = torchEmber(model)
    slow.pass_(1000)
    for _ in range(3): model(torch.randn(4, 2))
    slow.pass_(1000)
    report = te.close()
    assert abs(report['share']-(24+te.t.file.seconds)/(24+30))<1e-3, report


def test_explicit_calls_are_measured(slow):
    model = net()
    te = torchEmber(model, every=at())
    model(torch.randn(4, 2))
    te.log_model()
    assert abs(spent(te)-2)<1e-6


def test_a_statistic_that_runs_the_model_is_not_counted_twice(clock, monkeypatch):
    monkeypatch.setattr(Layer, 'clock', clock)
    model = net()
    def again(x): return {'mean': model(torch.ones(1, 2)).mean()}
    te = torchEmber(model, ttypes='output', stats=again)
    model(torch.randn(4, 2))
    assert abs(spent(te)-3*10)<1e-6


def test_no_step_no_share(): assert torchEmber(net()).close()['share']==0


def test_a_report_is_a_dict_and_prints_as_a_sentence():
    model = net()
    with torchEmber(model, name='said') as te: model(torch.randn(4, 2))
    report = te.close()
    assert isinstance(report, dict) and list(report)==['run', 'steps', 'recorded', 'rows', 'bytes', 'seconds', 'share', 'errors', 'skipped', 'remarks']
    assert repr(report).startswith('said: 1 of 1 steps recorded, 8 rows, ')


# ---- the time of recording stays below its share of the training time

def train(b, steps, cost, time, late=lambda i: 0.):
    "Simulate steps with the budget `b`. Return the recorded steps, and the share of recording after each step."
    kept,shares,spent,elapsed,owing = [],[],0.,0.,0.
    for i in range(steps):
        on = b.allows()
        c,l = cost(i)*on,owing
        owing = late(i)*on
        b.add_step(time(i)+c, c, on, l)
        spent += c+l
        elapsed += time(i)+c
        shares.append(spent/elapsed)
        if on: kept.append(i)
    return kept, shares


@settings(max_examples=60, deadline=None)
@given(st.floats(.001, .5), st.floats(.01, 3), st.floats(1, 5))
def test_share_is_kept_and_used(share, cost, first):
    "Steps take 1 s. The share is kept as soon as the first step is paid for, and no more steps are skipped than necessary."
    n = budget.recording_interval(cost, 1., share)
    hypothesis.assume(n<=200)
    steps = 120*n+400
    kept,shares = train(budget.Budget(share), steps, lambda i: cost*first if i==0 else cost, lambda i: 1.)
    assert kept[0]==0
    paid = next(i for i,s in enumerate(shares) if s<=share)
    # with a higher cost, a second step may be recorded before the first is paid for
    if cost*first<=100*share: assert max(shares[paid:])<=share*(1+1e-6)
    gaps = [b-a for a,b in zip(kept[2:], kept[3:], strict=False)]
    assert max(gaps)<=1.2*n+1 and sum(gaps)/len(gaps)>=n-1.1
    assert shares[-1]<=share*(1+1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.floats(.01, .2))
def test_share_is_kept_when_times_vary(seed, share):
    r = random.Random(seed)
    cost,time = ([x*r.lognormvariate(0, .5) for _ in range(3000)] for x in (.3, 1.))
    kept,shares = train(budget.Budget(share), 3000, cost.__getitem__, time.__getitem__, lambda i: .1*cost[i])
    assert len(kept)>10 and shares[-1]<=share*1.02
    assert max(shares[1000:])<=share*1.2


def test_a_first_step_that_compiles_is_no_reason_for_silence():
    kept,_ = train(budget.Budget(.02), 1000, lambda i: .003 if i else 60., lambda i: .01)
    assert 100<=kept[1]<=201 and len(kept)>40


def test_a_pause_is_no_reason_for_a_burst():
    kept,_ = train(budget.Budget(.02), 600, lambda i: .003, lambda i: 3600. if i==300 else .01)
    assert len([k for k in kept if 300<=k<315])<=3


def test_costs_on_a_gpu_are_seen_in_the_time_of_steps():
    b,kept = budget.Budget(.02),[]
    for i in range(1000):
        on = b.allows()
        b.add_step(.01+.002*on, .0001*on, on, hidden=True)
        kept += [i]*on
    assert 9<=kept[-1]-kept[-2]<=10


@pytest.mark.parametrize('bad, error', [(0, ValueError), (-.02, ValueError), (1.01, ValueError), (float('nan'), ValueError), (float('inf'), ValueError),
    ('2%', TypeError), (True, TypeError), ([.02], TypeError)])
def test_bad_shares(bad, error):
    model = net()
    with pytest.raises(error, match='overhead= must be a fraction of the training time'): torchEmber(model, overhead=bad)
    assert not any('_torchember' in m.__dict__ for m in model.modules())


def steps(te): return sorted({r['step'] for r in lines(te)})


def test_a_model_that_moves_to_a_gpu_is_not_charged_with_whole_steps():
    "Costs hidden on a GPU are estimated only after some recorded and some unrecorded steps."
    b = budget.Budget(.5)
    for i in range(8): b.add_step(.01, .0001, True, hidden=i>3)
    assert b.times.cost==pytest.approx(.0001)
    for _ in range(3): b.add_step(.01, .0001, False, hidden=True)
    for _ in range(9): b.add_step(.03, .0001, True, hidden=True)
    assert b.times.cost==pytest.approx(.02)


def test_a_step_is_charged_for_the_time_of_the_writer_since_the_last_step():
    class Told(list):
        def add_step(self, took, cost, recorded, late, *more): self.append(late)
    c = cost.Cost(Told())
    for late in (1., 1.5, 1.5, 4.): c.end_step(True, late)
    assert c.budget==[.5, 0., 2.5] # the first charge is only .5 s: the time before the first step does not count


@pytest.mark.parametrize('says_step', [False, True])
@pytest.mark.parametrize('compiled', [False, True])
def test_thinned_steps(slow, monkeypatch, compiled, says_step):
    "Measuring a tensor takes 1 s, and a step takes 10 s. With 8 tensors and a share of 10%, one step in 8 is recorded."
    torch._dynamo.reset()
    model = net()
    te = torchEmber(model, overhead=.1)
    count = CompileCounter()
    f = torch.compile(model, backend=count, fullgraph=True) if compiled else model
    for _ in range(64):
        f(torch.ones(4, 2))
        slow.pass_(10)
        if says_step: te.step()
    got = steps(te)
    report = te.close()
    assert got[0]==0 and got[1]<16 and {b-a for a,b in zip(got[1:], got[2:], strict=False)} <= {7, 8} and len(got)>6
    assert report['recorded']==len(got) and report['thinned']==64-len(got)
    assert report['rows']==8*len(got)
    assert report['budget']=='recording one step in 8 to stay under 10%' and report['budget'] in repr(report)
    if compiled: assert count.frame_count==2


def test_the_schedule_is_the_upper_bound(slow):
    model = net()
    te = torchEmber(model, every=30, overhead=.1)
    for _ in range(100):
        model(torch.ones(4, 2))
        slow.pass_(10)
    assert steps(te)==[0, 30, 60, 90]
    assert te.close()['thinned']==0


def test_explicit_requests_are_not_thinned(slow):
    model = net()
    te = torchEmber(model, overhead=.1)
    for i in range(10):
        model(torch.ones(4, 2))
        if i==5: te.log_model()
        te.step()
        slow.pass_(10)
    assert 5 in steps(te)


def test_a_budget_that_is_too_small_gives_one_warning(slow):
    model = net()
    te = torchEmber(model, overhead=.001)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        for _ in range(2500):
            model(torch.ones(4, 2))
            slow.pass_(.001)
    got = steps(te)
    said = [str(w.message) for w in said if issubclass(w.category, EmberWarning)]
    assert len(said)==1 and 'Record less' in said[0]
    assert len(got)>2 and got[-1]-got[-2]==1000


def test_without_overhead_nothing_is_thinned(slow):
    model = net()
    te = torchEmber(model)
    for _ in range(20): model(torch.ones(4, 2))
    assert steps(te)==list(range(20)) and 'thinned' not in te.close()


def test_a_step_without_rows_does_not_wake_the_writer(monkeypatch):
    model = net()
    te = torchEmber(model, every=10)
    puts = []
    put = te.t.put
    monkeypatch.setattr(te.t, 'put', lambda *args: (puts.append(te.recorder.step), put(*args)))
    for _ in range(21):
        model(torch.ones(4, 2))
        te.t.barrier()
    te.close()
    assert set(puts)=={0, 10, 20}


# ---- decisions of the budget, compared with sums computed by hand

@settings(max_examples=200, deadline=None)
@given(st.floats(.001, 5), st.floats(.01, 3), st.floats(.01, .9), st.floats(0, .2))
def test_the_recording_interval_is_the_least_that_keeps_the_share(cost, time, share, off):
    "One of `n` steps is recorded, and each of the other steps has an overhead of `off`."
    def kept(n, slack): return cost+(n-1)*off<=share*(n*time+cost+(n-1)*off)*(1+slack)
    n = budget.recording_interval(cost, time, share, off)
    if cost<=off: assert n==1 # skipping a step saves no time
    elif n<math.inf: assert kept(n, 1e-6) and (n==1 or not kept(n-1, -1e-6))
    else: assert not kept(10**6, -1e-4)


def test_times_and_decisions_of_a_budget():
    b = budget.Budget(.1)
    # with unknown costs, a step is recorded, unless .5 s were already spent on it
    assert b.allows() and not b.allows(.5) and b.thinned==1
    b.add_step(1.5, .5, True, disturbed=True)
    # compiled code was loaded, so the times are ignored and the cost stays unknown
    assert not b.allows() and b.times.recorded==0 and (b.times.time, b.times.cost)==(0, None)
    b.add_step(9., 0., False, disturbed=True)
    assert not b.allows() and b.thinned==3
    b.add_step(1., 0., False)
    assert b.allows() and (b.times.time, b.times.cost, b.since, b.interval)==(1., None, 1, None)
    b.add_step(1.5, .5, True)
    assert (b.times.time, b.times.cost, b.since, b.times.recorded, b.interval)==(1., .5, 0, 1, 5)
    for n in range(1, 4): b.add_step(1., 0., False); assert b.since==n
    b = budget.Budget(.5)
    for step in ((2., 1., True), (1., 0., False), (2., 1., True)): b.add_step(*step)
    assert b.allows() and not b.allows(1.1) and (b.times.late, b.times.idle_cost)==(0., 0.)
    b.add_step(2., 1., True, late=.5)
    # the cost includes the writer's time per recorded step, except the first
    assert b.times.late==.5 and b.times.cost==1+.5/2
    b.add_step(1., 0., False, late=.25)
    b.add_step(2., 1., True)
    assert b.times.late==.75 and b.times.cost==1+.75/3


def test_the_first_batch_of_the_writer_does_not_count():
    b = budget.Budget(.5)
    b.add_step(2., 1., True, late=9.)
    b.add_step(2., 1., True, late=1.)
    assert b.times.late==1. and b.times.cost==2.


def test_some_steps_are_skipped_to_find_hidden_costs():
    b = budget.Budget(.9)
    for i in range(3): b.add_step(1., .001, True, hidden=True); assert b.allows()==(i<2)
    for i in range(3): b.add_step(.5, 0., False, hidden=True); assert b.allows()==(i==2)
    b.add_step(1., .001, True, hidden=True)
    # the hidden cost is the difference to the time of unrecorded steps
    assert b.times.costs[-1]==.5 and b.times.bare[-1]==.5


def test_a_budget_that_no_schedule_can_keep():
    b = budget.Budget(.01)
    b.add_step(2., 1., True)
    assert not b.hopeless
    for _ in range(24): b.add_step(1., .02, False)
    assert not b.hopeless
    for _ in range(8): b.add_step(1., .02, False) # the overhead of each unrecorded step already exceeds the share
    assert b.hopeless and str(b)=='recording one step in 1,000, although this costs more than overhead=0.01 allows'
    b.since = b.rarest-2
    assert not b.allows()
    b.since += 1
    assert b.allows() # one step in `b.rarest` steps is recorded anyway
    fine = budget.Budget(.25)
    assert str(fine)=='overhead=0.25, no step skipped'
    fine.add_step(2., 1., True)
    fine.thinned = 1
    assert str(fine)=='recording one step in 3 to stay under 25%'


def test_units_of_times_and_sizes():
    said = ['1 s', '999 ms', '1,000 ms', '1 ms', '999 us', '1 us', '0.9 us', '998 s', '1,000 s']
    assert [budget.duration(s) for s in (1, .9994, .9996, 1e-3, 999.4e-6, 1e-6, 9e-7, 998, 999.6)]==said
    assert [budget.byte_size(n) for n in (999.4, 1e3, 999_400, 999_600, 1e6, 1e9)]==['999 bytes', '1 KB', '999 KB', '1,000 KB', '1 MB', '1 GB']


def test_the_text_of_a_report():
    told = dict(run='r', steps=1200, recorded=1100, rows=5, bytes=2000, seconds=.5, share=.125)
    plain = 'r: 1,100 of 1,200 steps recorded, 5 rows, 2 KB; recording took 500 ms, 12.50% of the time from first to last step'
    assert repr(budget.Report(told))==plain
    assert repr(budget.Report(told, arming=.9))==plain and repr(budget.Report(told, arming=1.))==plain+'; the start of recording waited 1 s for compiled loops'
    both = budget.Report(told, live=2., compiling=.1, arming=3.)
    assert repr(both)==plain+(' (of which live plots: 2 s, in a separate process; compiling loops: 100 ms, once)'
        '; the start of recording waited 3 s for compiled loops')
    more = budget.Report(told, live=2., beside=3., budget='thin', errors=1, skipped=0, remarks=['One.', 'Two.'])
    assert repr(more)==plain+' (of which live plots: 2 s, in a separate process); compiled loops loaded in 3 s, in the background; thin; 1 errors\nOne.\nTwo.'


def test_time_of_two_threads_and_of_nested_calls(clock):
    "Each thread has its own timer. The time of nested timed calls is counted once, also after an exception."
    import threading
    class Works:
        def __init__(self): self.cost,self.local,self.spent = self,budget.ThreadTimer(),0.
        @budget.timed
        def go(self, n):
            clock.pass_(1)
            if n: self.go(n-1)
            if n==2: other.start(); other.join()
            return n
        @budget.timed
        def fail(self): clock.pass_(5); raise ValueError
    w = Works()
    other = threading.Thread(target=w.go, args=(0,))
    assert w.go(2)==2 and w.spent==3+1+1 # the second of the other thread passes in both threads
    with pytest.raises(ValueError): w.fail()
    assert w.local.entered is None and w.spent==10
    w.go(0)
    assert w.spent==11
