"What recording takes: measured by itself, with a clock that a test moves"
import pytest
import torch
from torch import nn

from torchember import budget, core, torchEmber


class Clock:
    "Time passes only when a test says so"
    def __init__(self): self.now = 0.
    def __call__(self): return self.now
    def pass_(self, seconds): self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    c = Clock()
    for m in (budget, core): monkeypatch.setattr(m, 'clock', c)
    monkeypatch.setattr(core, 'idle', lambda: 0)
    return c


@pytest.fixture
def slow(clock, monkeypatch):
    "Each tensor takes a second to measure"
    real = core.observe
    def observe(*args, **kwargs):
        clock.pass_(1)
        return real(*args, **kwargs)
    monkeypatch.setattr(core, 'observe', observe)
    return clock


class Layer(nn.Linear):
    "A forward that takes ten seconds"
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
    rows = len(te.t.lines())
    assert rows and abs(spent(te)-rows*(2 if ttypes=='update' else 1))<1e-6 # an update needs its weight, which has no row


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
    assert abs(spent(te)-len(te.t.lines()))<1e-6


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
    te = torchEmber(model, every=core.at())
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


def test_report_is_a_dict_that_reads_as_a_sentence():
    model = net()
    with torchEmber(model, name='said') as te: model(torch.randn(4, 2))
    report = te.close()
    assert isinstance(report, dict) and list(report)==['run', 'steps', 'recorded', 'rows', 'bytes', 'seconds', 'share', 'errors', 'skipped']
    assert repr(report).startswith('said: 1 of 1 steps recorded, 8 rows, ')
