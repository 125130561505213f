"Findings about parameters agree with the rows, also for parameters of a second optimizer and layers frozen during the run"
import numpy as np
import pytest
import torch
from torch import nn

from torchember import diagnose, read, torchEmber
from torchember.capture.optimizer import find_ids_in_optimizers as in_live
from torchember.health.diagnose import load_history
from torchember.health.watch import Pace


class Split(nn.Module):
    "A model of backbone and head. With `cut`, a detach between them stops the gradient"
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head,self.cut = nn.Linear(8, 2),False

    def forward(self, x):
        y = self.backbone(x)
        return self.head(y.detach() if self.cut else y)


def split():
    torch.manual_seed(0)
    return Split()


def adam(m): return torch.optim.Adam(m.parameters(), lr=.01)


def fit(m, opts, n=60, before=lambda i: None, after=lambda i: None, set_to_none=True, wait=False, **kwargs):
    "Train with several optimizers, but pass only the first to the ember. Return the findings and the report"
    te = torchEmber(m, optimizer=opts[0], **kwargs)
    for i in range(n):
        before(i)
        x = torch.randn(32, 4)
        loss = (m(x)-x[:, :2]).square().mean()
        te.log(loss=loss)
        loss.backward()
        for o in opts: o.step()
        for o in opts: o.zero_grad(set_to_none=set_to_none)
        after(i)
        if wait: te.t.barrier(); te.t.file.listeners.wait()
    report = te.close()
    return diagnose(te), report


def facts(found): return [tuple(f) for f in found[['severity', 'rule', 'path', 'first_step']].values.tolist()]


def at(step, do): return lambda i: do() if i==step else None


def matrices_and_vectors(m):
    ps = list(m.parameters())
    return torch.optim.SGD([p for p in ps if p.dim()>1], lr=.1),torch.optim.AdamW([p for p in ps if p.dim()<2], lr=.05)


# ---- parameters of an optimizer that the ember does not know

def test_parameters_of_a_second_optimizer_are_not_called_unchanged():
    found,report = fit(m := split(), matrices_and_vectors(m), name='two')
    assert facts(found)==[('info', 'not_trained', '', 0)] and found.healthy
    assert found.text[0]==("`backbone.0.bias`, `backbone.2.bias`, `head.bias` (3 parameters, 18 values) are not in the optimizer that was "
        "passed to torchEmber, but their values change: another optimizer trains them.")
    assert 'optimizer=[a, b]' in found.advice[0]
    assert report['remarks']==[]
    assert [p.get('changes') for p in load_history('two').recorded_parameters]==[None, True]*3


def test_a_second_optimizer_does_not_stop_the_training(monkeypatch):
    monkeypatch.setattr(Pace, 'due', lambda self, steps, recording: steps>=8)
    found,_ = fit(m := split(), matrices_and_vectors(m), wait=True, rules='default', on_finding='stop', name='live')
    assert len(read('live', ttype='weight').step.unique())==60 and found.healthy


def test_a_second_optimizer_that_steps_rarely_is_no_fault_either():
    a,b = matrices_and_vectors(m := split())
    found,_ = fit(m, [a], after=lambda i: i%20==9 and b.step())
    assert found.healthy and 'never changes' not in ' '.join(found.text)


@pytest.mark.parametrize('created', [0, 2], ids=['before torchEmber', 'in step 2'])
def test_a_second_optimizer_that_steps_in_every_10th_step_does_not_stop_the_training(created, monkeypatch):
    monkeypatch.setattr(Pace, 'due', lambda self, steps, recording: steps>=8)
    a,b = matrices_and_vectors(m := split())
    other,ps = {},b.param_groups[0]['params']
    del b
    def make(i): other[0] = torch.optim.AdamW(ps, lr=.05)
    if not created: make(0)
    found,report = fit(m, [a], before=at(created, lambda: make(0)) if created else lambda i: None, after=lambda i: i%10==9 and other[0].step(),
        wait=True, rules='default', on_finding='stop', name='rare')
    assert facts(found)==[('info', 'not_trained', '', 0)] and 'their values change: another optimizer trains them' in found.text[0]
    assert report['remarks']==[] and len(read('rare', ttype='weight').step.unique())==60


def test_a_second_optimizer_that_has_not_stepped_yet_is_an_info():
    a,b = matrices_and_vectors(m := split())
    found,_ = fit(m, [a], n=12, name='not yet')
    assert facts(found)==[('info', 'not_trained', '', 0)] and b is not None
    assert found.text[0].endswith("but another optimizer has them. In 12 recorded steps, no change of their values was observed.")
    assert [p.get('elsewhere') for p in load_history('not yet').recorded_parameters]==[None, True]*3


def test_other_optimizers_are_searched_for_only_if_a_parameter_is_in_none(monkeypatch):
    searches = []
    monkeypatch.setattr(in_live.__module__.replace('capture.optimizer', 'recorder.parameters')+'.find_ids_in_optimizers',
        lambda wanted: searches.append(len(wanted)) or in_live(wanted))
    fit(m := split(), [adam(m)], n=20)
    assert searches==[]
    m = split()
    fit(m, [torch.optim.SGD(m.head.parameters(), lr=.01)], n=20)
    assert searches==[4, 4, 4] # One search at arming, one after 4 steps, one at the end
    searches.clear()
    other = torch.optim.SGD(m.backbone.parameters(), lr=.01)
    fit(m, [torch.optim.SGD(m.head.parameters(), lr=.01)], n=20)
    assert searches==[4] and other is not None


statistics = {'of a function': lambda t: {'median': t.float().abs().median()}, 'of a function that never changes': lambda t: {'dims': float(t.ndim)},
    'zero_frac': ['zero_frac'], 'mean': ['mean'], 'max': ['max'], 'l1': ['l1']}


@pytest.mark.parametrize('stats', statistics.values(), ids=list(statistics))
def test_any_statistic_or_version_counter_shows_that_another_optimizer_trains(stats):
    found,_ = fit(m := split(), matrices_and_vectors(m), stats=stats, name='stats')
    assert ('info', 'not_trained', '', 0) in facts(found)
    text = ' '.join(found.text)
    assert 'their values change' in text and not any(w in text for w in ('never changes', 'did not change', 'No weight changed'))


@pytest.mark.parametrize('stats', [statistics['of a function'], ['zero_frac'], ['mean']], ids=['of a function', 'zero_frac', 'mean'])
def test_a_forgotten_parameter_is_an_error_with_any_statistic_and_with_marks(stats):
    m = split()
    te = torchEmber(m, optimizer=(opt := torch.optim.SGD([*m.backbone[0].parameters(), *m.head.parameters()], lr=.01)), stats=stats)
    for i in range(30):
        te.mark(epoch=i//5)
        loss = (m(torch.randn(8, 4))).square().mean()
        te.log(loss=loss)
        loss.backward(); opt.step(); opt.zero_grad()
    te.close()
    assert ('error', 'not_trained', 'backbone.2', 0) in facts(diagnose(te))


def test_a_function_that_draws_random_numbers_is_no_evidence_beside_the_spread():
    found,_ = fit(m := split(), [torch.optim.SGD(m.head.parameters(), lr=.01)], stats=lambda t: {'std': t.float().std().item(), 'some': torch.rand(()).item()})
    assert 'their values change' not in ' '.join(found.text)


def test_a_weight_that_was_loaded_once_is_not_called_unchanged():
    m = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    opt = torch.optim.SGD(m[1].parameters(), lr=.01)
    te = torchEmber(m, optimizer=opt)
    for i in range(20):
        if i==10:
            with torch.no_grad(): m[0].weight += .01
        m(torch.randn(8, 4)).square().mean().backward()
        opt.step(); opt.zero_grad()
    te.close()
    said = {f.path: (f.severity, f.text) for f in diagnose(te).itertuples() if f.rule=='not_trained'}
    assert {s for s,_ in said.values()}<={'info', 'warning'} and not any('never changes' in t and 'parameters' in t for _,t in said.values())


def test_a_forgotten_parameter_is_still_an_error():
    m = split()
    found,report = fit(m, [torch.optim.Adam([*m.backbone[0].parameters(), *m.head.parameters()], lr=.01)])
    assert ('error', 'not_trained', 'backbone.2', 0) in facts(found)
    assert report['remarks']==['Not trained: not in the optimizer: backbone.2.']


def test_an_average_of_weights_is_not_called_frozen():
    m = split()
    m.average = nn.Linear(8, 2).requires_grad_(False)
    def average(i):
        with torch.no_grad(): m.average.weight.lerp_(m.head.weight, .1); m.average.bias.lerp_(m.head.bias, .1)
    found,_ = fit(m, [torch.optim.Adam([*m.backbone.parameters(), *m.head.parameters()], lr=.01)], after=average)
    assert facts(found)==[]


# ---- parameters that are frozen during the run

def backbone_is_frozen(found, step=20):
    assert facts(found)==[('info', 'not_trained', 'backbone', step)] and found.healthy
    text = found.text[0]
    assert text.startswith(f"`backbone` (4 parameters, 112 values) was trained at first, but is frozen from step {step} on (requires_grad is False).")
    assert 'schedule' not in text+found.advice[0]
    return text


def test_a_part_that_is_frozen_during_the_run_is_named():
    found,_ = fit(m := split(), [adam(m)], before=at(20, lambda: m.backbone.requires_grad_(False)))
    assert backbone_is_frozen(found).endswith('The values of this part no longer change. The optimizer still has these parameters.')


def test_a_frozen_part_that_momentum_moves_is_named():
    found,_ = fit(m := split(), [adam(m)], before=at(20, lambda: m.backbone.requires_grad_(False)), set_to_none=False)
    assert 'The values of this part still change through momentum' in backbone_is_frozen(found)


def test_a_frozen_part_is_named_when_only_weights_are_recorded():
    backbone_is_frozen(fit(m := split(), [adam(m)], before=at(20, lambda: m.backbone.requires_grad_(False)), ttypes=('weight',))[0])


def test_a_frozen_part_is_named_beside_steps_that_a_scaler_skips():
    m,scaler = split(),torch.amp.GradScaler('cpu')
    m_opt = adam(m)
    te = torchEmber(m, optimizer=m_opt, scaler=scaler)
    for i in range(60):
        if i==20: m.backbone.requires_grad_(False)
        x = torch.randn(32, 4)
        loss = (m(x)-x[:, :2]).square().mean()
        te.log(loss=loss)
        scaler.scale(loss*(float('inf') if i%10==3 else 1)).backward()
        scaler.step(m_opt); scaler.update(); m_opt.zero_grad()
    te.close()
    backbone_is_frozen(diagnose(te))


def test_parts_that_are_frozen_one_after_the_other_are_named_one_by_one():
    def freeze(i):
        if i in (20, 40): m.backbone[i//10-2].requires_grad_(False)
    found,_ = fit(m := split(), [adam(m)], before=freeze)
    assert facts(found)==[('info', 'not_trained', 'backbone.0', 20), ('info', 'not_trained', 'backbone.2', 40)]


def test_a_model_that_is_frozen_as_a_whole_is_a_warning():
    m = split()
    te = torchEmber(m, optimizer=(opt := adam(m)))
    for i in range(60):
        if i==20: m.requires_grad_(False)
        loss = m(torch.randn(8, 4).requires_grad_()).square().mean()
        te.log(loss=loss)
        loss.backward(); opt.step(); opt.zero_grad()
    te.close()
    assert facts(diagnose(te))[0]==('warning', 'not_trained', '', 20) and 'schedule' not in ' '.join(diagnose(te).text)


@pytest.mark.parametrize('step', [20, 50])
def test_a_part_that_is_unfrozen_during_the_run_is_no_fault(step):
    m = split()
    m.backbone.requires_grad_(False)
    assert facts(fit(m, [adam(m)], before=at(step, lambda: m.backbone.requires_grad_(True)))[0])==[]


def test_a_part_that_is_frozen_in_every_second_step_is_no_fault():
    assert facts(fit(m := split(), [adam(m)], before=lambda i: m.backbone.requires_grad_(i%2==0))[0])==[]


def test_a_part_that_is_cut_off_during_the_run_is_named():
    found,_ = fit(m := split(), [adam(m)], before=at(20, lambda: setattr(m, 'cut', True)))
    assert facts(found)==[('info', 'not_trained', 'backbone', 20)] and 'This part no longer gets a gradient: it is frozen' in found.text[0]


def test_a_learning_rate_of_zero_in_one_group_is_no_schedule():
    m = split()
    opt = torch.optim.Adam([{'params': m.backbone.parameters()}, {'params': m.head.parameters()}], lr=.01)
    found,_ = fit(m, [opt], before=at(20, lambda: opt.param_groups[0].update(lr=0.)))
    assert facts(found)==[('info', 'not_trained', 'backbone', 20)] and 'its learning rate is zero' in found.text[0]


def noted_rates(m, rate, kept=False):
    "Train with the learning rate `rate(step)`, and log it. With `kept`, restore the old weights from step 20 on."
    te = torchEmber(m, optimizer=(opt := torch.optim.Adam(m.parameters(), lr=.003)))
    for i in range(60):
        opt.param_groups[0]['lr'] = rate(i)
        if i==0 or rate(i)!=rate(i-1): te.log(lr=rate(i))
        loss = (m(x := torch.randn(32, 4))-x[:, :2]).square().mean()
        te.log(loss=loss)
        loss.backward()
        before = [p.detach().clone() for p in m.parameters()]
        opt.step(); opt.zero_grad()
        if kept and i>=20:
            for p,w in zip(m.parameters(), before, strict=True): p.data.copy_(w)
    te.close()
    return diagnose(te)


def test_a_schedule_that_ends_too_soon_is_still_found_and_its_rate_is_quoted():
    found = noted_rates(split(), lambda i: .003 if i<20 else 1e-9)
    assert facts(found)==[('warning', 'update_too_small', '', 20)]
    assert 'The schedule lowered the learning rate too early: lr is 1e-09 at step 20. Its largest value is 0.003.' in found.text[0]
    assert 'The last 40 of 60 steps hardly change the weights.' in found.text[0]


def test_a_rate_that_stays_is_no_schedule():
    found = noted_rates(split(), lambda i: .003, kept=True)
    assert facts(found)==[('error', 'not_trained', '', 20), ('warning', 'update_too_small', '', 20)]
    assert 'schedule' not in ' '.join([*found.text, *found.advice]) and 'The learning rate has not fallen' in found.text[1]


def test_a_part_that_is_frozen_in_jax_is_named():
    "JAX runs have only rows: the backbone is frozen by an optimizer mask, or by a stopped gradient"
    import jax.numpy as jnp

    from torchember import jaxember
    def run(name, masked, stopped):
        w = {'backbone': jnp.ones((4, 4)), 'head': jnp.ones((4, 2))}
        rng = np.random.default_rng(0)
        with jaxember.track(model_state=w, track_gradients=True, name=name) as tracker:
            for i in range(60):
                tracker.intercept(lambda: None)
                grads = {k: jnp.asarray(rng.normal(size=v.shape)).astype(v.dtype) for k,v in w.items()}
                if stopped and i>=20: grads['backbone'] = jnp.zeros_like(grads['backbone'])
                w = {k: v-.01*grads[k]*(0 if masked and i>=20 and k=='backbone' else 1) for k,v in w.items()}
                tracker.step(model_state=w, gradients=grads)
        return diagnose(name)
    for name,masked,stopped,why in (('mask', True, False, 'This part still gets gradients'),
            ('stop', False, True, 'The gradients of this part are exactly zero')):
        found = run(name, masked, stopped)
        assert [f for f in facts(found) if f[1]=='not_trained'][0][0]=='info', found
        assert why in found[found.rule=='not_trained'].text.iloc[0] and 'backbone' in found[found.rule=='not_trained'].text.iloc[0]
        assert 'schedule' not in ' '.join(found.text)
