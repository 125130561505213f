"Warnings and remarks of a recorder, and healthy trainings that must not cause a warning."
import math
import re
import warnings

import pytest
import torch
from looped import ALL, Net, batches, by_hand, heard, loss_of, momentum, seeded, steps
from models import mlp
from torch import nn

from torchember import torchEmber
from torchember.measure.elements import Unmeasurable


def lines(te, *words): return [l for l in repr(te.close()).splitlines() if all(w in l.lower() for w in words)]


def test_the_report_of_a_healthy_run():
    model = seeded()
    opt = momentum(model)
    te = torchEmber(model, optimizer=opt, ttypes=ALL)
    by_hand(model, opt, batches())
    report = te.close()
    assert report['steps']==report['recorded']==4 and isinstance(report, dict)
    assert not any(w in repr(report).lower() for w in ('gradient', 'never', 'finite', 'nan'))


def test_the_report_tells_of_steps_without_gradients():
    model = seeded()
    opt = momentum(model)
    te = torchEmber(model, optimizer=opt)
    for x,y in batches():
        loss_of(model, x, y).backward()
        opt.zero_grad() # gradients are cleared before the optimizer steps
        opt.step()
    assert len(lines(te, 'gradient', '4'))==1


def test_the_report_tells_of_an_optimizer_that_never_stepped():
    model = seeded()
    te = torchEmber(model, optimizer=momentum(model))
    with heard(): by_hand(model, momentum(model), batches(40))
    assert len(lines(te, 'optimizer', 'never', 'step'))==1


class Breaks(nn.Module):
    "A module that returns NaN from its fourth call on."
    calls = 0
    def forward(self, x):
        self.calls += 1
        return x*(float('nan') if self.calls>3 else 1)


@pytest.mark.parametrize('every', [1, 3])
def test_the_first_value_that_is_not_finite(every):
    "The first NaN causes one warning with step, module and tensor name, and a remark in the report."
    def names(line): return re.search(r'step\W*3\b', line) and '0.1' in line and 'output_0' in line
    model = seeded(lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), Breaks()), nn.Linear(4, 3)))
    opt = momentum(model)
    with heard() as said:
        te = torchEmber(model, optimizer=opt, ttypes=ALL, every=every)
        by_hand(model, opt, batches(8))
        report = te.close()
    assert len(said)==1 and names(said[0]), said
    assert len([l for l in repr(report).splitlines() if names(l)])==1


def test_the_first_gradient_that_is_not_finite():
    model = seeded()
    opt = momentum(model)
    with heard() as said, torchEmber(model, optimizer=opt) as te:
        by_hand(model, opt, batches(2))
        model(batches()[0][0]).sum().backward()
        model.b.weight.grad[0, 0] = float('inf')
        opt.step()
        te.t.df # noqa: B018
    assert len(said)==1 and re.search(r'step\W*2\b', said[0]) and re.search(r'\bb\b', said[0]) and re.search('grad_0|weight', said[0]), said


def test_a_disabled_torchember_notes_nothing(monkeypatch):
    monkeypatch.setenv('TORCHEMBER_DISABLE', '1')
    model = seeded()
    te = torchEmber(model, optimizer=momentum(model))
    by_hand(model, momentum(model), batches(2))
    te.log(loss=1.)
    te.close()
    assert not te.t.log_path.exists()


@pytest.mark.parametrize('kind', ['64 micro-batches', 'frozen layers', 'learning rate 0', 'validation', 'batch norm', 'every 10'])
def test_healthy_loops_give_no_warning(kind):
    "A correct training loop causes no warning."
    def norm(): return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model = seeded(norm if kind=='batch norm' else Net)
    if kind=='frozen layers': model.a.requires_grad_(False)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0. if kind=='learning rate 0' else .1)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with torchEmber(model, optimizer=opt, ttypes=ALL, every=10 if kind=='every 10' else 1) as te:
            if kind=='validation':
                for x,_ in batches(40): model.eval()(x)
                model.train()
            by_hand(model, opt, batches(128 if kind=='64 micro-batches' else 20), 64 if kind=='64 micro-batches' else 1)
    assert steps(te)==([0, 1] if kind=='64 micro-batches' else [0, 10] if kind=='every 10' else list(range(20)))


def test_masked_scores_are_not_the_first_value_that_is_not_finite():
    class Masked(nn.Module):
        def forward(self, x): return x.masked_fill(x<0, -math.inf)
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Masked(), nn.Softmax(-1)))
    x,_ = batches()[0]
    with heard() as said, torchEmber(model, ttypes=('input', 'output')) as te:
        for _ in range(2): model(x)
        te.t.df # noqa: B018
        assert not said
        model(x*float('nan'))
    assert len(said)==1 and re.search(r'step\W*2', said[0])


def test_an_evaluation_before_the_first_step_is_no_lack_of_gradients():
    "Lightning runs two validation batches before training. Its closure clears old gradients after the forward."
    model = seeded()
    opt = momentum(model)
    with heard() as said, torchEmber(model) as te:
        model.eval()(batches()[0][0])
        model.train()
        for x,y in batches(4):
            def closure(x=x, y=y):
                loss = loss_of(model, x, y)
                opt.zero_grad()
                loss.backward()
                return loss
            opt.step(closure)
    assert not said and any(r['ttype']=='weight_grad' for r in te.t.lines())


def test_rollouts_are_no_stalled_step():
    model = seeded()
    opt = momentum(model)
    with heard() as said, torchEmber(model, optimizer=opt, ttypes='probe') as te:
        for _ in range(2):
            with torch.no_grad():
                for _ in range(1100): model(batches()[0][0])
            by_hand(model, opt, batches(2))
    assert not said and te.close()['steps']==4


def test_one_of_two_optimizers_stops():
    model = seeded()
    a,b = (torch.optim.SGD(m.parameters(), .01) for m in (model.a, model.b))
    with heard('not step') as said:
        te = torchEmber(model, optimizer=[a, b], ttypes='probe')
        for i in range(230):
            loss_of(model, *batches()[0]).backward()
            a.step()
            if i<3: b.step()
            a.zero_grad(); b.zero_grad()
        report = te.close()
    assert len(said)==1 and any('waited for SGD' in r for r in report['remarks'])


def test_a_network_without_gradients_gives_no_hint(recwarn):
    "A network that is updated under `no_grad`, such as an average of weights, has no gradients. This is no problem."
    ema = mlp()
    te = torchEmber(ema)
    for _ in range(5):
        with torch.no_grad():
            ema(torch.ones(2, 4))
            for p in ema.parameters(): p.lerp_(torch.randn_like(p), .1)
    assert not [w for w in recwarn if 'zero_grad' in str(w.message)]
    te.close()


def test_five_tensors_without_values_are_named(tmp_path):
    "For each reason, at most five tensors that cannot be measured have a warning. The report has their number."
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)])
        te = torchEmber(model, home=tmp_path, ttypes=('output',))
        for _ in range(3): model(torch.ones(2, 3))
        te.recorder.buffer.notices.failed('model', 'x', Unmeasurable('it is something else'))
        te.close()
    got = [str(w.message) for w in said if 'measured' in str(w.message)]
    assert len(got)==len({*got})==7 and sum('a fake tensor' in g for g in got)==6 and sum(g.startswith('More tensors') for g in got)==1
    assert te.recorder.buffer.notices.unmeasurable==3*21+1 and 'it is something else' in got[-1]


def test_five_tensors_without_values_give_five_warnings(recwarn):
    from torchember.recorder.notices import Notices
    notices = Notices()
    for _ in range(3):
        for i in range(Notices.most_places):
            notices.failed('model', f'weight_{i}', Unmeasurable('the tensor is a nested tensor, which has rows of different lengths'))
    assert len(recwarn)==5 and not [w for w in recwarn if 'More' in str(w.message)] and notices.unmeasurable==15
