"Tests of sinks: a run arrives completely, and faults of a sink change neither the training nor the log"
import math
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from sinked import by_hand, killed, same, train
from torch import nn

from torchember import emberTracker, mv, read, replay, rm, torchEmber
from torchember.frames.handle import open_run
from torchember.sinks.feed import Feed, StepSender
from torchember.sinks.sink import Sink, rms_of_row

EventAccumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator').EventAccumulator


def scalars(place):
    "Return a dict: tag -> {step: value}, from the event reader of TensorBoard. Each step must occur once."
    events = EventAccumulator(str(place), size_guidance={'scalars': 0}).Reload()
    found = {}
    for tag in events.Tags()['scalars']:
        values = events.Scalars(tag)
        found[tag] = {e.step: e.value for e in values}
        assert len(found[tag])==len(values), f'{tag} has a step twice'
    return found


def test_tensorboard_has_the_values_of_the_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _,report = train(tmp_path, stats=['mean', 'std', 'rms'], sinks='tensorboard')
    assert not report['remarks']
    found = scalars(tmp_path/'runs'/'first')
    assert set(found.pop('nonfinite/count').values())=={0}
    same(found, by_hand(read('first', home=tmp_path)))
    assert set(found['output/0/rms'])=={*range(6)} and set(found['eval/output/2/rms'])=={5}


def test_rms_follows_from_default_statistics(tmp_path):
    told = {}
    model,_ = train(tmp_path, sinks=lambda step, numbers: told.setdefault(step, numbers))
    w = read('first', home=tmp_path, ttype='weight', steps=5)
    for r in w.to_dict('records'):
        n = math.prod(r['shape'])
        expected = math.sqrt(r['mean']**2+(r['std']**2*(n-1)/n if n>1 else 0))
        assert told[5][f"weight/{r['path']}.{r['pname']}/rms"]==pytest.approx(expected, rel=1e-12)
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    assert told[0]['weight/0.weight/rms']==pytest.approx(first[0].weight.square().mean().sqrt().item(), rel=1e-6)


@pytest.mark.parametrize('stats', [['mean', 'std'], ['mean', 'std', 'shape'], ['mean', 'std', 'numel']], ids=lambda s: s[-1])
def test_rms_of_one_element_is_its_absolute_value(tmp_path, stats):
    "The rms of one element is its absolute value, although its standard deviation is NaN"
    model = nn.Sequential(nn.Linear(3, 1))
    with torch.no_grad(): model[0].bias.fill_(-2.)
    got = {}
    te = torchEmber(model, name='one', home=tmp_path, stats=stats, sinks=lambda step, numbers: got.update(numbers))
    model(torch.ones(1, 3)).sum().backward()
    te.step()
    te.close()
    w = model[0].weight.detach()
    assert {k: got[k] for k in ('weight/0.bias/rms', 'weight_grad/0.bias/rms')}=={'weight/0.bias/rms': 2., 'weight_grad/0.bias/rms': 1.}
    assert got['output/0/rms']==pytest.approx(abs(w.sum().item()-2), rel=1e-6)
    # Without the number of elements, rms follows from mean and std only approximately
    unbiased = math.hypot(w.mean().item(), w.std().item()*(1 if stats[-1]=='std' else math.sqrt(2/3)))
    assert got['weight/0.weight/rms']==pytest.approx(unbiased, rel=1e-6)


def test_rms_of_a_non_finite_tensor_is_not_finite():
    nan = math.nan
    assert [rms_of_row(r) for r in ({'mean': 3.}, {'std': nan}, {'mean': 3., 'std': None, 'shape': [2]}, {'mean': -3., 'std': nan})]==[None, None, None, 3.]
    assert all(math.isnan(rms_of_row({'mean': nan, 'std': nan, **more})) for more in ({}, {'shape': [0]}, {'shape': [4]}))


def test_sinks_do_not_change_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a,_ = train(tmp_path/'a')
    b,_ = train(tmp_path/'b', sinks=['tensorboard', lambda step, numbers: None])
    for x,y in zip(a.parameters(), b.parameters(), strict=True): assert torch.equal(x, y)
    columns = ['step', 'path', 'ttype', 'tname', 'mean', 'std', 'max', 'min']
    x,y = (read('first', home=tmp_path/k)[columns] for k in 'ab')
    assert x.equals(y)


def test_exponents_arrive_with_powers_of_two_as_edges(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(tmp_path, stats='numerics', sinks='tensorboard')
    events = EventAccumulator(str(tmp_path/'runs'/'first'), size_guidance={'histograms': 0}).Reload()
    row = read('first', home=tmp_path, ttype='weight', path='0', steps=3).iloc[0]
    h = next(e for e in events.Histograms('weight/0.weight/exponents') if e.step==3).histogram_value
    full = [(row['exponent_min']+i-1, n) for i,n in enumerate(row['exponents']) if n]
    assert {round(math.log2(limit))-1: n for limit,n in zip(h.bucket_limit, h.bucket, strict=True) if n}==dict(full)
    assert h.num==32


class Shaky(Sink):
    name = 'shaky'
    def __init__(self, *bad): super().__init__(); self.bad,self.told = bad,[]
    def scalars(self, step, numbers):
        if step in self.bad: raise ConnectionError('away')
        self.told.append(step)


@pytest.mark.filterwarnings('ignore:torchember')
def test_missing_steps_are_sent_later_and_none_twice(tmp_path):
    sink = Shaky(1, 2)
    _,report = train(tmp_path, sinks=sink)
    assert sink.told==[0, 3, 4, 5] and any('shaky' in r for r in report['remarks'])
    assert set(read('first', home=tmp_path)['step'])=={*range(6)}
    sink.bad = ()
    assert replay('first', sink, home=tmp_path)==2 and sink.told==[0, 3, 4, 5, 1, 2]
    assert replay('first', sink, home=tmp_path)==0


@pytest.mark.filterwarnings('ignore:torchember')
def test_sink_that_always_fails_is_given_up(tmp_path):
    sink = Shaky(*range(100))
    tried = []
    scalars = sink.scalars
    sink.scalars = lambda step, numbers: (tried.append(step), scalars(step, numbers))
    train(tmp_path, steps=12, sinks=sink)
    assert tried==[0, 1, 2, 3, 4]


@pytest.mark.filterwarnings('ignore:torchember')
def test_hanging_sink_does_not_delay_training(tmp_path, monkeypatch):
    monkeypatch.setattr(Feed, 'patience', .2)
    monkeypatch.setattr('torchember.store.listeners.Listener.patience', .2)
    stop = threading.Event()
    began = time.monotonic()
    _,report = train(tmp_path, sinks=lambda step, numbers: stop.wait(60))
    assert time.monotonic()-began<20 and any('replay' in r for r in report['remarks'])
    assert set(read('first', home=tmp_path)['step'])=={*range(6)}
    stop.set()


def test_sink_selects_modules_and_steps_as_other_functions(tmp_path):
    class Told(Sink):
        def __init__(self, **kw): super().__init__(**kw); self.told = {}
        def scalars(self, step, numbers): self.told[step] = numbers
    # Metrics of the last step: evaluations are sent in any step, independent of `every`
    eval_of_it = {'eval/output/0/max', 'eval/output/0/mean', 'nonfinite/count'}
    few = Told(include='0', ttypes=['output'], stats=['max', 'mean'], every=2)
    train(tmp_path, sinks=few)
    measured = {'output/0/max', 'output/0/mean', 'nonfinite/count'}
    noted = {'scalar/loss', 'scalar/grad_norm'}
    want = {step: {*noted, *(['scalar/lr'] if step==0 else ()), *(measured if step%2==0 else ()), *(eval_of_it if step==5 else ())} for step in range(6)}
    assert {step: set(n) for step,n in few.told.items()}==want


def test_non_finite_values_are_counted(tmp_path):
    told = {}
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.l,self.n = nn.Linear(4, 2),0
        def forward(self, x):
            self.n += 1
            return self.l(x)*(float('inf') if self.n==3 else 1)
    train(tmp_path, steps=3, model=Breaks(), sinks=lambda step, numbers: told.setdefault(step, numbers))
    assert told[0]['nonfinite/count']==told[1]['nonfinite/count']==0
    assert told[2]['nonfinite/count']>=10 # Counts the output of the model, and gradients


def test_findings_arrive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    class Told(Sink):
        def __init__(self): super().__init__(); self.found = []
        def scalars(self, step, numbers): pass
        def findings(self, step, found): self.found += found
    sink = Told()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), 1e30)
    te = torchEmber(model, opt, home=tmp_path, name='first', rules='default', on_finding=lambda f: None, sinks=[sink, 'tensorboard'])
    for _ in range(30):
        opt.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        opt.step()
    te.close()
    assert any(f['severity']=='error' for f in sink.found)
    tags = EventAccumulator(str(tmp_path/'runs'/'first')).Reload().Tags()['tensors']
    assert {t.split('/')[1] for t in tags}=={f['rule'] for f in sink.found}
    def texts():
        events = EventAccumulator(str(tmp_path/'runs'/'first'), size_guidance={'tensors': 0}).Reload()
        return sorted((t, e.step, e.tensor_proto.string_val[0]) for t in events.Tags()['tensors'] for e in events.Tensors(t))
    before = texts()
    assert sorted(f['step'] for f in sink.found)==sorted(step for _,step,_ in before)
    next(tmp_path.glob('**/sent_first*')).unlink() # Simulate a process that was killed before it noted the sent steps
    monkeypatch.chdir(tmp_path)
    assert replay('first', 'tensorboard', home=tmp_path)==30
    assert texts()==before


@pytest.mark.slow
def test_killed_run_is_sent_later_without_duplicates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    p = subprocess.run([sys.executable, '-c', killed, str(tmp_path), 'tensorboard'], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert p.returncode==-signal.SIGKILL, p.stderr
    before = scalars(tmp_path/'runs'/'first')['weight/0.weight/rms']
    n = replay('first', 'tensorboard', home=tmp_path)
    after = scalars(tmp_path/'runs'/'first')['weight/0.weight/rms'] # `scalars` fails if a step occurs twice
    assert 0<len(before)<=400 and len(after)==400 and n>=400-len(before)
    assert all(after[s]==v for s,v in before.items())


@pytest.mark.parametrize(('what', 'error', 'said'), [('tensorbord', ValueError, 'tensorboard'), (3, TypeError, 'sinks= takes'),
    ([None], TypeError, 'sinks= takes')])
def test_invalid_sinks_raise(tmp_path, what, error, said):
    model = nn.Linear(2, 2)
    with pytest.raises(error, match=said): torchEmber(model, home=tmp_path, sinks=what)
    assert 'forward' not in vars(model)


@pytest.mark.release
def test_last_step_is_sent_without_close(tmp_path):
    code = killed.replace('os.kill(os.getpid(), signal.SIGKILL)', '').replace('400', '7')
    p = subprocess.run([sys.executable, '-c', code, str(tmp_path), 'tensorboard'], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert p.returncode==0, p.stderr
    assert set(scalars(tmp_path/'runs'/'first')['weight/0.weight/rms'])=={*range(7)}


def test_removed_run_is_sent_again(tmp_path):
    for _ in range(2):
        told = []
        train(tmp_path, sinks=lambda step, numbers, told=told: told.append(step))
        assert told==[*range(6)]
        rm('first', home=tmp_path)
        assert not list(tmp_path.rglob('*first*'))


def test_replay_sends_the_same_values_also_non_finite(tmp_path):
    live,later = {},{}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU()).double()
    opt = torch.optim.Adam(model.parameters())
    te = torchEmber(model, opt, home=tmp_path, name='first', stats='numerics', sinks=lambda step, n: live.setdefault(step, n))
    for i in range(3):
        opt.zero_grad()
        # Two micro-batches per step
        for _ in range(2): model(torch.randn(5, 4).double()*(1e100 if i==1 else 1)).square().mean().backward()
        te.log(loss=float('nan') if i==2 else 1.)
        opt.step()
    te.close()
    assert replay('first', lambda step, n: later.setdefault(step, n), home=tmp_path)==3
    np.testing.assert_equal(later, live)
    assert math.isnan(live[2]['scalar/loss']) and live[1]['output/0/rms']>1e98


def test_replay_refuses_unknown_runs_and_tables(tmp_path):
    train(tmp_path)
    with pytest.raises(FileNotFoundError, match='first'): replay('frist', print, home=tmp_path)
    with pytest.raises(TypeError, match='got a table'): replay(read('first', home=tmp_path), print)
    mv('first', 'first of two', tmp_path)
    train(tmp_path)
    with pytest.raises(ValueError, match='One run is expected'): replay('first*', print, home=tmp_path)
    assert emberTracker('first', tmp_path).last_step()==5


ranked = '''
import sys, torch, torch.distributed as dist
from torch import nn
from torchember import torchEmber
dist.init_process_group('gloo'); torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
opt = torch.optim.SGD(model.parameters(), .1)
torch.manual_seed(dist.get_rank())
te = torchEmber(model, opt, home=sys.argv[1], name='two', sinks='tensorboard', reduce='step')
for i in range(4):
    opt.zero_grad(); model(torch.randn(8, 4)).square().mean().backward(); opt.step()
te.close()
dist.destroy_process_group()
'''


@pytest.mark.release
def test_merged_run_of_two_processes_is_sent_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'program.py').write_text(ranked)
    p = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--master-port', '0', '--rdzv-backend', 'c10d',
        '--rdzv-endpoint', 'localhost:0', 'program.py', str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert p.returncode==0, p.stderr[-2000:]
    found,whole = scalars(tmp_path/'runs'/'two'),read('two', home=tmp_path, ttype='output')
    for s in range(4): # The rms covers the batches of both ranks
        row = whole[whole['step']==s].iloc[0]
        n = math.prod(row['shape'])
        assert n==32 and found['output/model/rms'][s]==pytest.approx(math.sqrt(row['mean']**2+row['std']**2*(n-1)/n), rel=1e-6)
    assert replay('two', 'tensorboard', home=tmp_path)==0


def row(path='0', ttype='output', tname='output_0', **more):
    "Return a log row of a linear layer."
    return {'module': f'model(Net).{path}(Linear)', 'ttype': ttype, 'tname': tname, 'step': 0, 'call': 0, 'dtype': 'float32', **more}


def test_update_is_sent_as_ratio_to_the_weight(tmp_path):
    told = {}
    train(tmp_path, ttypes=['weight', 'update'], sinks=lambda step, numbers: told.setdefault(step, numbers))
    r = read('first', home=tmp_path, ttype='update', path='2', steps=4).iloc[0]
    assert told[4][f"update/2.{r['pname']}/ratio"]==r['ratio'] and not any(k.startswith('update') and k.endswith('rms') for k in told[4])


def test_calls_of_a_module_are_merged():
    calls = [row(call=c, max=m, min=-m, abs_max=m, mean=m, rms=m) for c,m in enumerate((1., 5., 3.))]
    numbers,_ = Sink(stats=['max', 'min', 'abs_max', 'mean']).chosen(calls)
    assert numbers=={'output/0/max': 5., 'output/0/min': -5., 'output/0/abs_max': 5., 'output/0/mean': 3., 'nonfinite/count': 0}


def test_layer_added_later_is_sent():
    sink = Sink(include='*')
    sink.chosen([row('0', rms=1.)])
    assert 'output/1/rms' in sink.chosen([row('0', rms=1.), row('1', rms=2.)])[0]


def test_superseded_row_is_not_sent():
    assert Sink().chosen([row(rms=1.), row(rms=2., supersedes=True)])[0]['output/0/rms']==2.


def test_evaluation_has_metric_names_of_its_own():
    numbers,_ = Sink().chosen([row(rms=1.), row(tname='output_1', phase='eval', rms=2.)])
    assert numbers=={'output/0/rms': 1., 'eval/output/0/rms': 2., 'nonfinite/count': 0}


def test_histograms_can_be_left_out():
    rows = [row(rms=1., exponents=[0, 3, 0], exponent_min=0)]
    assert Sink().chosen(rows)[1]=={'output/0': ([1., 2.], [3])} and not Sink(histograms=False).chosen(rows)[1]


@pytest.mark.filterwarnings('ignore:torchember')
def test_sink_with_some_failures_continues(tmp_path):
    sink = Shaky(*range(0, 20, 2))
    train(tmp_path, steps=20, sinks=sink)
    assert sink.told==[*range(1, 20, 2)]


def test_each_destination_gets_all_steps(tmp_path):
    train(tmp_path)
    a,b = Shaky(),Shaky()
    b.target = lambda: 'another'
    assert replay('first', a, home=tmp_path)==replay('first', b, home=tmp_path)==6 and a.told==b.told==[*range(6)]


@pytest.mark.filterwarnings('ignore:torchember')
def test_hanging_sink_is_not_called_by_other_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(Feed, 'patience', .2)
    monkeypatch.setattr('torchember.store.listeners.Listener.patience', .2)
    stop,calls = threading.Event(),[]
    train(tmp_path, sinks=lambda step, numbers: (calls.append(step), stop.wait(60)))
    assert calls==[0]
    stop.set()


@pytest.mark.filterwarnings('ignore:torchember')
def test_unflushed_steps_are_not_noted_as_sent(tmp_path):
    sink = Shaky()
    def fails(): raise OSError('disk full')
    sink.flush = fails
    train(tmp_path, sinks=sink)
    del sink.flush
    assert replay('first', sink, home=tmp_path)==6


def test_finding_of_an_earlier_step_does_not_end_the_open_step(tmp_path):
    told = {}
    te = torchEmber(nn.Linear(2, 2), home=tmp_path, name='first', sinks=lambda step, numbers: told.setdefault(step, numbers))
    feed, = te.feeds
    feed.receive_rows(5, [row('0', rms=1.)])
    feed.receive_rows(2, [{'ttype': 'finding', 'rule': 'nan', 'text': 'It is NaN.', 'step': 2}])
    feed.receive_rows(5, [row('1', rms=2.)])
    te.close()
    assert told=={5: {'output/0/rms': 1., 'output/1/rms': 2., 'nonfinite/count': 0}}


def test_no_histogram_is_written_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(tmp_path, stats='numerics', sinks='tensorboard')
    for p in tmp_path.rglob('sent_*.json'): p.unlink() # Simulate a process that died before it noted the sent steps
    replay('first', 'tensorboard', home=tmp_path)
    scalars(tmp_path/'runs'/'first') # `scalars` fails if a step occurs twice
    events = EventAccumulator(str(tmp_path/'runs'/'first'), size_guidance={'histograms': 0}).Reload()
    assert [e.step for e in events.Histograms('weight/0.weight/exponents')]==[*range(6)]


class Tracker:
    "Replacement for a W&B run that stores its calls."
    id,run = 'mine',None
    def __init__(self): self.rows,self.alerts = [],[]
    def define_metric(self, *args, **kwargs): pass
    def log(self, data, commit=None): self.rows.append((data, commit))
    def alert(self, title, text, level): self.alerts.append((title, level))
    def init(self, **kwargs): raise AssertionError('a run is open')


def test_wandb_run_opened_after_the_sink_is_used(monkeypatch):
    wandb = pytest.importorskip('torchember.sinks.wandb')
    library = Tracker()
    monkeypatch.setattr(wandb, 'needs', lambda *args, **kwargs: library)
    sink = wandb.Wandb()
    library.run = Tracker()
    sink.open('first', {})
    sink.scalars(0, {'output/0/rms': 1.})
    sink.close()
    # The sink never ends a row that belongs to the user
    assert library.run.rows==[({'output/0/rms': 1., 'torchember/step': 0}, False)]


def test_wandb_gets_one_alert_per_finding_and_one_end_per_row(monkeypatch):
    wandb = pytest.importorskip('torchember.sinks.wandb')
    monkeypatch.setattr(wandb, 'needs', lambda *args, **kwargs: Tracker())
    sink = wandb.Wandb(run := Tracker(), commit=True)
    sink.open('first', {})
    sink.findings(3, [{'rule': r, 'text': 'so it is.', 'severity': s, **more} for r,s,more in (('nan', 'error', {}), ('nan', 'error', {'over': True}),
        ('stalls', 'info', {}), ('dead', 'warning', {}))])
    assert run.alerts==[('nan', 'ERROR'), ('dead', 'WARN')]
    sink.scalars(0, {'a/b': 1.})
    for _ in range(2): sink.flush()
    sink.close()
    assert [commit for _,commit in run.rows]==[False, True]


@pytest.mark.parametrize('what', ['name', 'pattern', 'file', 'run', 'ember', 'handle'])
def test_replay_accepts_each_way_to_name_a_run(tmp_path, monkeypatch, what):
    "`replay` sends equal data for each way to name a run, with and without home=."
    monkeypatch.setenv('TORCHEMBER_HOME', str(tmp_path/'here'))
    model = nn.Linear(2, 2)
    with torchEmber(model, name='r') as te: model(torch.ones(1, 2))
    got = []
    runs = {'name': 'r', 'pattern': 'r*', 'file': te.t.log_path, 'run': emberTracker('r'), 'ember': te, 'handle': open_run('r')}
    assert replay(runs[what], lambda step, numbers: got.append(step))==1 and got==[0]


def test_writer_of_another_library_gets_single_numbers(tmp_path):
    class Writer:
        log_dir = str(tmp_path)
        def __init__(self): self.told = []
        def add_scalar(self, *args): self.told.append(args)
        def flush(self): pass
    writer = Writer()
    from torchember.sinks import TensorBoard
    sink = TensorBoard(writer)
    sink.open('r', {})
    sink.scalars(3, {'a/b': 1., 'c': float('inf')})
    sink.close()
    assert writer.told==[('a/b', 1., 3), ('c', float('inf'), 3)]
    from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter(str(tmp_path/'real')) as real: TensorBoard(real).scalars(3, {'a/b': 1., 'c': float('inf'), 'd': float('nan'), 'e': 1e300, 'f': 1e-45})
    got = scalars(tmp_path/'real')
    with SummaryWriter(str(tmp_path/'theirs')) as theirs:
        for k,v in {'a/b': 1., 'c': float('inf'), 'd': float('nan'), 'e': 1e300, 'f': 1e-45}.items(): theirs.add_scalar(k, v, 3)
    assert repr(got)==repr(scalars(tmp_path/'theirs')) and len(got)==5


def test_one_sink_can_send_two_runs_in_turn(tmp_path, monkeypatch):
    "Both runs are complete, although another W&B run is open during the second run."
    from torchember.sinks import TensorBoard
    sink = TensorBoard(log_dir=tmp_path/'runs', ttypes='input')
    for name,x in (('a', 1.), ('b', 2.)):
        with torchEmber(nn.Linear(2, 2), name=name, home=tmp_path, sinks=sink, stats=['rms'], ttypes='input') as te:
            for _ in range(3): te.model(torch.full((1, 2), x))
        assert sink.of is None and sink.writer is None
    assert sorted(p.name for p in (tmp_path/'runs').iterdir())==['a', 'b']
    for name,x in (('a', 1.), ('b', 2.)): assert scalars(tmp_path/'runs'/name)['input/model/rms']=={step: x for step in range(3)}
    wandb = pytest.importorskip('torchember.sinks.wandb')
    made = []
    class Library(Tracker):
        def init(self, **kwargs):
            made.append(run := Tracker())
            run.id,run.finish = kwargs['id'],lambda: run.rows.append('finished')
            return run
    library = Library()
    monkeypatch.setattr(wandb, 'needs', lambda *args, **kwargs: library)
    sink = wandb.Wandb()
    for name,v in (('a', 1.), ('b', 2.)):
        sink.open(name, {'start': name})
        sink.scalars(0, {'output/0/rms': v})
        sink.close()
    assert [run.rows for run in made]==[[({'output/0/rms': v, 'torchember/step': 0}, False), ({}, True), 'finished'] for v in (1., 2.)]
    assert made[0].id.startswith('a-') and made[1].id.startswith('b-') and not sink.owns_run and not sink.commit


@pytest.mark.filterwarnings('ignore:torchember')
def test_sink_refuses_a_second_run_at_once(tmp_path):
    class Told(Sink):
        def __init__(self): super().__init__(); self.runs = []
        def open(self, run, about): self.runs.append(run)
        def scalars(self, step, numbers): pass
    sink = Told()
    a,b = (torchEmber(nn.Linear(2, 2), name=n, home=tmp_path, sinks=sink) for n in 'ab')
    for te in (a, b):
        for _ in range(2): te.model(torch.ones(1, 2))
        te.t.barrier()
        end = time.monotonic()+20
        while te is a and not sink.of and time.monotonic()<end: time.sleep(.01)
    said = b.close()['remarks']
    assert sink.runs==['a'] and "already sends the run 'a'. Create another sink for" in said[0], said
    assert not a.close()['remarks'] and sink.of is None


@pytest.mark.filterwarnings('ignore:torchember')
def test_a_sink_is_opened_again_after_it_failed_once(tmp_path):
    "If a server is down in the first step, the later steps are sent"
    class Down(Sink):
        def __init__(self): super().__init__(); self.tried,self.steps = 0,[]
        def open(self, run, about):
            self.tried += 1
            if self.tried==1: raise ConnectionError('the server is down')
        def scalars(self, step, numbers): self.steps.append(step)
    sink = Down()
    with torchEmber(nn.Linear(2, 2), name='down', home=tmp_path, sinks=sink) as te:
        for _ in range(4):
            te.model(torch.ones(1, 2))
            te.t.barrier()
    assert sink.tried==2 and sink.steps[-1]==3 and sink.of is None


def test_folder_of_another_run_is_not_used(tmp_path, monkeypatch):
    "A folder of another home or program is not used. A continued run keeps its folder."
    monkeypatch.chdir(tmp_path)
    train(tmp_path/'one', sinks='tensorboard', stats=['rms'])
    before = scalars(tmp_path/'runs'/'first')
    time.sleep(1.1) # The start time that identifies a run has a resolution of one second
    train(tmp_path/'two', sinks='tensorboard', stats=['rms', 'max'], steps=4)
    assert scalars(tmp_path/'runs'/'first')==before
    same({k: v for k,v in scalars(tmp_path/'runs'/'first_2').items() if k!='nonfinite/count'}, by_hand(read('first', home=tmp_path/'two')))
    assert replay('first', 'tensorboard', home=tmp_path/'two')==0
    (tmp_path/'runs'/'mine').mkdir()
    with torchEmber(nn.Linear(2, 2), name='mine', home=tmp_path, sinks='tensorboard') as te: te.model(torch.ones(1, 2))
    with torchEmber(te.model, name='mine', resume=True, home=tmp_path, sinks='tensorboard') as te: te.model(torch.ones(1, 2))
    assert [*(tmp_path/'runs'/'mine').iterdir()]==[] and sorted(p.name for p in (tmp_path/'runs').iterdir())==['first', 'first_2', 'mine', 'mine_2']
    assert set(scalars(tmp_path/'runs'/'mine_2')['weight/model.weight/rms'])=={0, 1}


def test_two_models_in_one_folder_have_different_names(tmp_path, recwarn):
    from torch.utils.tensorboard import SummaryWriter
    from torchember.sinks import TensorBoard
    def both(**prefixes):
        writer = SummaryWriter(str(tmp_path/'w'/'_'.join(['w', *prefixes])))
        sinks = {n: TensorBoard(writer, prefix=prefixes.get(n, '')) for n in ('gen', 'dis')}
        embers = [torchEmber(nn.Linear(2, 2), name=f'{n}{len(prefixes)}', home=tmp_path, sinks=sink) for n,sink in sinks.items()]
        for _ in range(3):
            for te in embers: te.model(torch.ones(1, 2)); te.t.barrier(); time.sleep(.3)
        for te in embers: te.close()
        writer.close()
        return scalars(writer.log_dir) if prefixes else None
    both()
    said = [str(w.message) for w in recwarn.list if 'with equal metric names' in str(w.message)]
    assert len(said)==1 and "prefix=" in said[0] and "'gen0'" in said[0] and "'dis0'" in said[0]
    recwarn.clear()
    found = both(gen='gen/', dis='dis/')
    assert not [w for w in recwarn.list if 'equal metric names' in str(w.message)]
    for n in ('gen', 'dis'):
        assert set(found[f'{n}/weight/model.weight/rms'])=={0, 1, 2}
    assert all(k.startswith(('gen/', 'dis/')) for k in found)
    with pytest.raises(TypeError, match="prefix= must be a text such as .* got"): Sink(prefix=3)


@pytest.mark.parametrize('name', ['Sink', 'TensorBoard', 'Wandb', 'MLflow', 'Trackio'])
def test_sinks_can_be_pickled(name, tmp_path, monkeypatch):
    "A trainer that starts processes pickles its callbacks with their sinks."
    import pickle

    import torchember.sinks
    if name!='Sink': pytest.importorskip(name.lower())
    monkeypatch.chdir(tmp_path) # MLflow would create a database in the current folder
    sink = pickle.loads(pickle.dumps(getattr(torchember.sinks, name)(every=10, include='0', prefix='a/')))
    assert [s for s in range(21) if sink.when(s)]==[0, 10, 20] and sink.prefix=='a/'


def test_only_complete_rows_of_wandb_are_noted_as_sent(monkeypatch):
    "Only rows that have ended in W&B count as sent, and no row gets numbers of an earlier step."
    wandb = pytest.importorskip('torchember.sinks.wandb')
    class Run(Tracker):
        step = 0
        def define_metric(self, name, **kwargs): assert '*' not in name.removesuffix('/*')
    monkeypatch.setattr(wandb, 'needs', lambda *args, **kwargs: Tracker())
    sink = wandb.Wandb(run := Run())
    sink.open('r', {})
    sink.scalars(0, {'output/a/rms': 1., 'output/*[b]/rms': 2., 'scalar/val_loss': 3., 'eval/output/a/rms': 4.})
    sink.scalars(1, {'output/a/rms': 5.})
    assert sink.persisted_steps([0, 1])==[]
    run.step = 1 # The user has logged, so the row of step 0 has ended
    assert sink.persisted_steps([0, 1])==[0, 1] # Step 0 has a loss and an evaluation, step 1 has an output
    sink.scalars(2, {'output/a/rms': 6.})
    sink.scalars(3, {'output/a/rms': 7.})
    assert run.rows[2][0]=={'output/a/rms': 6., 'torchember/step': 2} # A new row repeats no numbers of an older row
    run.step = 2
    assert sink.persisted_steps([2, 3])==[3]
    row = {}
    for data,commit in run.rows[:2]: row |= data; assert not commit
    assert row=={'output/a/rms': 5., 'output/*[b]/rms': None, 'torchember/step': 1, 'scalar/val_loss': 3., 'torchember/scalar/val_loss/step': 0,
        'eval/output/a/rms': 4., 'torchember/eval_step': 0}
    sink.close()
    assert (sink.run, sink.row.content, sink.row.ended_steps, sink.row.number)==(run and sink.given, {}, set(), None)


def test_prefix_does_not_change_axes_of_wandb(monkeypatch):
    wandb = pytest.importorskip('torchember.sinks.wandb')
    monkeypatch.setattr(wandb, 'needs', lambda *args, **kwargs: Tracker())
    sink = wandb.Wandb(run := Tracker(), prefix='gen/')
    sink.open('r', {})
    sink.scalars(4, {'gen/output/a/rms': 1., 'gen/eval/output/a/rms': 2., 'gen/scalar/loss': 3.})
    axes = {k for k in run.rows[0][0] if not k.startswith('gen/')}
    assert axes=={'torchember/step', 'torchember/eval_step', 'torchember/scalar/loss/step'}
    exponents = dict(exponents=[1, 2, 3], exponent_min=0)
    assert [set(d) for d in sink.chosen([row('a', rms=1., **exponents)])]==[{'gen/output/a/rms', 'gen/nonfinite/count'}, {'gen/output/a'}]


def test_step_is_noted_once_its_row_has_ended(tmp_path):
    "Only the last of the steps that have not arrived can still arrive."
    class Late(Sink):
        there = ()
        def scalars(self, step, numbers): pass
        def persisted_steps(self, steps): return [s for s in steps if s in self.there]
        def target(self): return 'late'
    train(tmp_path, steps=1)
    feeding = StepSender(emberTracker('first', tmp_path), sink := Late())
    def told(step): feeding.step(step, [row('a', rms=1.)])
    told(7); told(8); feeding.flush()
    assert feeding.unconfirmed==[8] and feeding.sent.steps==set()
    sink.there = [7, 8]
    told(9); feeding.flush()
    assert feeding.unconfirmed==[9] and feeding.sent.steps=={8}
    sink.there = [9]
    feeding.close()
    assert feeding.sent.steps=={8, 9} and sink.of is None


def test_findings_are_sent_with_their_step(tmp_path):
    found = []
    class Told(Sink):
        def scalars(self, step, numbers): pass
        def findings(self, step, rows): found.append((step, [r['rule'] for r in rows]))
    te = torchEmber(nn.Linear(2, 2), home=tmp_path, name='first', sinks=Told())
    te.feeds[0].receive_rows(9, [{'ttype': 'finding', 'rule': r, 'text': 'So it is.', 'step': step} for r,step in (('a', 3), ('b', 5), ('c', 3))])
    te.close()
    assert found==[(3, ['a', 'c']), (5, ['b'])]
