"What surprised people who tried to break it: each was wrong once"
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from torchember import emberTracker, select, torchEmber
from torchember.recorder.process import open_recorders


def x(n=2): return torch.ones(n, 4)
def mlp(): return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def test_wrapped_while_armed_and_armed_again():
    "Somebody wraps the forward (as accelerate does) and the cell is run again: no recursion, one row a call, and all comes off"
    m = nn.Linear(4, 2)
    te = torchEmber(m)
    old = m.forward
    m.forward = wrapper = lambda *a, **k: old(*a, **k)
    te.rearm()
    want = nn.functional.linear(x(), m.weight, m.bias)
    assert torch.equal(m(x()), want) and len([r for r in te.t.lines() if r['ttype']=='output'])==1
    te.disarm()
    assert m.forward is wrapper and torch.equal(m(x()), want)
    n = nn.Linear(4, 2)
    te = torchEmber(n)
    kept = n.forward
    te.disarm()
    n.forward = kept
    te = torchEmber(n)
    assert n(x()).shape==(2, 2)
    te.close()
    assert not hasattr(nn.Linear(1, 1).forward, '__wrapped__')


def test_nested_tensors_are_passed_over():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=True).eval()
    inp,mask = torch.randn(2, 5, 16),torch.tensor([[False]*5, [False]*3+[True]*2])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        want = model(inp, src_key_padding_mask=mask)
        with torchEmber(model) as te: got = model(inp, src_key_padding_mask=mask)
    assert torch.equal(want, got) and te.t.lines()


def test_arguments_that_cannot_be_looked_through():
    class Lazy(dict):
        def items(self): raise RuntimeError('not loaded')
    class Takes(nn.Module):
        def forward(self, x, other): return x
    deep = x()
    for _ in range(3000): deep = (deep,)
    model = Takes()
    te = torchEmber(model)
    for other in (Lazy(a=1), deep, list(range(1_000_000))):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            assert torch.equal(model(x(), other), x())
    te.close()


@pytest.mark.skipif(not hasattr(signal, 'setitimer'), reason='needs POSIX timers')
def test_a_signal_handler_that_reads_or_closes():
    code = """if True:
        import faulthandler, signal, torch; from torch import nn; from torchember import torchEmber
        faulthandler.dump_traceback_later(600, exit=True)
        m = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]); te = torchEmber(m); n = 0
        def handler(*a):
            global n
            n += 1
            te.step() if n%2 else te.t.barrier()
        signal.signal(signal.SIGALRM, handler); signal.setitimer(signal.ITIMER_REAL, .005, .005)
        x = torch.ones(2, 4)
        for _ in range(600): m(x)
        signal.setitimer(signal.ITIMER_REAL, 0)
        te.close(); print('lived', n)
    """
    got = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert 'lived' in got.stdout, got.stderr[-2000:]


def test_inference_mode_and_in_place():
    model = mlp()
    inp = torch.randn(50, 4)
    with torch.inference_mode(), torchEmber(model) as te: model(inp)
    relu = [r for r in te.t.lines() if 'ReLU' in r['module'] and r['ttype']=='output']
    assert relu[0]['min']==0


def test_log_model_sees_what_data_wrote():
    model = nn.Linear(4, 2)
    te = torchEmber(model)
    te.log_model()
    model.weight.data.fill_(7)
    te.log_model()
    [r] = [r for r in te.t.lines() if r['tname']=='weight_0']
    assert r['mean']==7
    te.close()


def test_submodules_alone_off_schedule():
    "A container whose parts are called: steps go on, and calls count from 0 in each"
    class Gan(nn.Module):
        def __init__(self): super().__init__(); self.g,self.d = nn.Linear(4, 4),nn.Linear(4, 1)
    gan = Gan()
    te = torchEmber(gan, every=2)
    for _ in range(6):
        gan.d(gan.g(x()))
        gan.d(x())
        te.step()
    df = te.t.df
    assert sorted(df.step.unique())==[0, 2, 4]
    d = df[df.module.str.contains('.d(', regex=False) & (df.ttype=='output')]
    assert d.call.tolist()==[0, 1]*3
    te.close()


def test_reading_changes_nothing():
    "Accumulation with a table after each micro-batch: the rows are those of the whole step all the same"
    tables = []
    for reads in (False, True):
        torch.manual_seed(0)
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), .1)
        te = torchEmber(model, optimizer=opt, ttypes=('input', 'output', 'weight', 'weight_grad'))
        for _ in range(2):
            opt.zero_grad()
            for _ in range(4):
                model(torch.randn(3, 4)).square().sum().backward()
                if reads: assert len(te.t.df)>=len(te.t.latest_df)>0
            if reads: assert len(te.log_model().t.df)
            opt.step()
        te.close()
        key = ['step', 'module', 'ttype', 'tname', 'call']
        tables.append(te.t.df.drop(columns='ts').sort_values(key, ignore_index=True)[[*key, 'mean', 'std', 'max', 'min']])
    assert tables[0].equals(tables[1])


def test_marks_hide_nothing():
    te = torchEmber(nn.Linear(4, 2))
    with pytest.raises(ValueError, match='is a statistic'): te.mark(max=3)
    te.how_record_out(lambda t: {'loss': 1.})
    te.mark(loss=9.)
    te.model(x())
    rows = te.t.lines()
    assert [r['loss'] for r in rows if r['ttype']=='output']==[1] and {r['loss'] for r in rows if r['ttype']=='weight'}=={9}
    te.close()


def test_a_statistic_that_calls_the_model():
    model = mlp()
    te = torchEmber(model, include='0', on_error='raise')
    te.how_record_out(lambda t: {'top': model(t).max(), 'head': model[2](t).sum()})
    model(x())
    assert len([r for r in te.t.lines() if r['ttype']=='output'])==1
    te.close()


def test_a_statistic_that_writes():
    model = nn.Linear(4, 2)
    te = torchEmber(model)
    @te.how_record_in
    def careless(tensor): return {'m': tensor.abs_().max()}
    with pytest.warns(UserWarning, match='careless changed the tensor in place'): model(-x())
    te.close()


def test_choosing_a_module_itself():
    model = mlp()
    assert select(model[0]).pick(model.named_modules())==[model[0]]
    with torchEmber(model, include=model[2]) as te: model(x())
    assert te.t.df.module.unique().tolist()==['model(Sequential).2(Linear)']


def test_the_hint_does_not_cry_wolf(recwarn):
    "A network that follows another under no_grad has no gradients, and needs none"
    ema = mlp()
    te = torchEmber(ema)
    for _ in range(5):
        with torch.no_grad():
            ema(x())
            for p in ema.parameters(): p.lerp_(torch.randn_like(p), .1)
    assert not [w for w in recwarn if 'zero_grad' in str(w.message)]
    te.close()


def test_answers_to_what_is_mistyped():
    model = mlp()
    for kwargs,word in ((dict(stats=None), 'statistics are'), (dict(ttypes=3), 'tensor types are'), (dict(ttypes=None), 'tensor types are')):
        with pytest.raises(TypeError, match=word): torchEmber(model, **kwargs)
    te = torchEmber(model)
    with pytest.raises(TypeError, match='how_record_out'): te.how_record(lambda t: {})
    assert te.t.df.empty and {'module', 'ttype', 'step'} <= set(te.t.df.columns)
    te.close()
    with pytest.raises(FileNotFoundError, match='typo'): len(emberTracker('typo').df)


def test_a_row_of_the_user_is_part_of_the_latest_step():
    te = torchEmber(nn.Linear(4, 2))
    te.model(x())
    te.step()
    te.t + {'loss': .5}
    assert len(te.t.latest_line_list())==5
    te.model(x())
    assert len(te.t.latest_line_list())==4
    te.close()


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
def test_a_fork_of_an_armed_model():
    "The child runs the model, records nothing, and cannot hang on the parent's locks; the parent's rows are untouched"
    model = mlp()
    te = torchEmber(model)
    model(x())
    n = len(te.t.lines())
    with te.recorder.lock, te.recorder.buffer.arena.lock: # as another thread might hold them at that moment
        pid = os.fork()
        if not pid:
            signal.alarm(30)
            with torch.no_grad(): model(x())
            te.step()
            os._exit(0 if not te.recorder.buffer.arena.filled else 1)
    assert os.waitpid(pid, 0)[1]==0
    assert len(te.t.lines())==n
    model(x())
    assert len(te.t.lines())==2*n
    te.close()


def test_resume_goes_on_after_the_last_step():
    model = nn.Linear(4, 2)
    with torchEmber(model, name='long', ttypes='output') as te:
        for _ in range(3): model(x())
        te.t + {'note': 'x'*100_000}
    with torchEmber(model, name='long', ttypes='output', resume=True) as te:
        te.mark(self=1)
        model(x())
    assert [r['step'] for r in te.t.lines() if 'step' in r]==[0, 1, 2, 3]


def test_a_run_that_is_closed_is_not_asked_when_another_is_resumed():
    "It is open from the first to the last that it records: when it is made, armed once more, and when a number comes late"
    with torchEmber(nn.Linear(4, 2), name='other', ttypes='output') as te: assert te.recorder in open_recorders
    assert te.recorder not in open_recorders
    te.arm()
    assert te.recorder in open_recorders
    te.close()
    te.log(late=1.)
    assert te.recorder in open_recorders
    te.close()
    assert te.recorder not in open_recorders
