"Tests of `EmberCallback` in a fastai Learner: rows equal those of a plain loop, and the training is unchanged"
import copy
import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from callback_runs import Ran, bits, numbers, ran, rows_of, steps_of
from looped import Net, batches, heard, left, loss_of, same, seeded, table
from torch import nn

from torchember import emberTracker, torchEmber

pytestmark = pytest.mark.filterwarnings('ignore')


@functools.cache
def fastai():
    "Import fastai in the fixture, because the import takes seconds."
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        pytest.importorskip('fastai')
        import fastai.callback.all as callbacks
        import fastai.tabular.all as rest
    return SimpleNamespace(**{**vars(rest), **vars(callbacks)})


def callback(**options):
    fastai()
    from torchember.integrations.fastai import EmberCallback
    return EmberCallback(**options)


class Samples(list):
    def new_empty(self): return Samples()


def loader(data):
    "Data loader with the same batches in the same order in each epoch"
    return fastai().DataLoader(Samples((x, y) for xs,ys in data for x,y in zip(xs, ys, strict=True)), bs=5, shuffle=False, num_workers=0)


def hundred(n=2): return [(torch.full((5, 4), 100.), torch.arange(5)%3) for _ in range(n)]
def momentum(params, lr, **kwargs): return fastai().OptimWrapper(params, torch.optim.SGD, lr=lr, momentum=.9)


class FailingModel(Net):
    fails = None # (number of the training pass that fails, exception)
    passes = 0
    def forward(self, x):
        self.passes += self.training
        if self.fails and self.training and self.passes==self.fails[0]: raise self.fails[1]
        return super().forward(x)


def learner(folder, *callbacks, data=None, val=None, model=None, **options):
    f = fastai()
    learn = f.Learner(f.DataLoaders(loader(data or batches()), loader(val or hundred(1))), model or seeded(), **{**dict(loss_func=F.cross_entropy,
        opt_func=momentum, lr=.1, cbs=[*callbacks], path=folder), **options})
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__=='ProgressCallback'])
    learn.logger = f.noop
    return learn


def fit(folder, *callbacks, epochs=1, **options):
    "Train, and return the learner."
    learn = learner(folder, *callbacks, **options)
    with heard() as said: learn.fit(epochs)
    assert not said, said
    return learn


def plain(data, accumulate=1, clip=None, model=None, opt=None, first_step=0, **options):
    "Return the rows of the same model trained by a plain loop, with the loss scaled as in gradient accumulation."
    model = model or seeded()
    opt = opt or torch.optim.SGD(model.parameters(), .1, momentum=.9)
    with torchEmber(model, optimizer=opt, first_step=first_step, **options) as te:
        for i,(x,y) in enumerate(data):
            loss = loss_of(model, x, y)
            te.recorder.losses.note({'loss': loss}) # The callback notes the loss before the backward pass
            (loss/accumulate).backward()
            if (i+1)%accumulate: continue
            if clip: nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
    return table(te)


@pytest.mark.parametrize(('more', 'by_hand'), [(lambda f: [], {}), (lambda f: [f.GradientAccumulation(10)], dict(accumulate=2)),
    (lambda f: [f.GradientClip(.01)], dict(clip=.01)), (lambda f: [f.MixedPrecision('bf16')], {})], ids=['plain', 'accumulate', 'clip', 'bf16'])
def test_rows_equal_those_of_a_plain_loop(more, by_hand, tmp_path):
    ember,f = callback(),fastai()
    model = fit(tmp_path, ember, *more(f)).model
    same(rows_of(ember), plain(batches(), **by_hand))
    assert bits(model.state_dict(), fit(tmp_path, *more(f)).model.state_dict())


def test_gradients_before_and_after_clipping(tmp_path):
    both = ('weight_grad', 'unclipped_grad')
    ember = callback(ttypes=both)
    fit(tmp_path, ember, fastai().GradientClip(.01))
    same(rows_of(ember), want := plain(batches(), clip=.01, ttypes=both))
    assert {k[2] for k in want}=={*both}


def test_an_optimizer_of_fastai(tmp_path):
    "An optimizer of fastai has no hooks, and stores its states in its own way."
    f,ttypes = fastai(),('weight', 'weight_grad', 'update', 'optimizer')
    ember = callback(ttypes=ttypes)
    learn = fit(tmp_path, ember, opt_func=functools.partial(f.Adam, eps=1e-8), wd=0.)
    assert 'step' not in vars(learn.opt)
    model,seen = seeded(),{}
    opt = torch.optim.Adam(model.parameters(), .1, betas=(.9, .99), eps=1e-8)
    for i,(x,y) in enumerate(batches()):
        loss_of(model, x, y).backward()
        was = model.a.weight.detach().clone()
        seen[i] = model.a.weight.grad.norm().item()
        opt.step()
        seen[i] = seen[i], was.norm().item(), (model.a.weight.detach()-was).norm().item()
        opt.zero_grad()
    got = {}
    for r in ran(ember).t.lines():
        if r['module'].endswith('a(Linear)') and r.get('pname')=='weight': got.setdefault(r['step'], {}).setdefault((r['ttype'], r['tname']), r)
    def norm(r): return (r['mean']**2*24+r['std']**2*23)**.5
    for i,(grad,weight,update) in seen.items():
        rows = {k[0]: r for k,r in got[i].items() if k[0]!='optimizer'}
        assert norm(rows['weight_grad'])==pytest.approx(grad, rel=1e-4) and norm(rows['weight'])==pytest.approx(weight, rel=1e-4)
        assert norm(rows['update'])==pytest.approx(update, rel=1e-3)
    assert {k[1] for r in got.values() for k in r if k[0]=='optimizer'}=={'grad_avg_0', 'sqr_avg_0'}


def test_numbers_of_the_step_that_closed(tmp_path):
    f = fastai()
    def correct(out, y): return (out.argmax(1)==y).float().mean()
    ember,data = callback(),batches()
    fit(tmp_path, ember, data=data, epochs=2, metrics=correct)
    model,losses,valid = seeded(),[],[]
    opt = torch.optim.SGD(model.parameters(), .1, momentum=.9)
    for _ in range(2):
        for x,y in data:
            loss = loss_of(model, x, y)
            loss.backward(); opt.step(); opt.zero_grad()
            losses.append(loss.item())
        (x,y), = hundred(1)
        with torch.no_grad(): valid.append((loss_of(model, x, y).item(), correct(model(x), y).item()))
    assert numbers(ember, 'loss')==pytest.approx(dict(enumerate(losses)))
    assert numbers(ember, 'learning_rate')==dict.fromkeys(range(8), .1)
    for j,name in enumerate(('valid_loss', 'correct')): assert numbers(ember, name)==pytest.approx({3: valid[0][j], 7: valid[1][j]})
    smooth,seen = f.AvgSmoothLoss(),{}
    for i,loss in enumerate(losses):
        smooth.accumulate(type('', (), dict(loss=torch.tensor(loss), yb=(torch.zeros(5),), to_detach=lambda self, x, **kw: x))())
        if i%4==3: seen[i] = smooth.value.item()
    assert numbers(ember, 'train_loss')==pytest.approx(seen, rel=1e-5)
    assert {(r['step'], r['epoch']) for r in ran(ember).t.lines()}=={(i, i//4) for i in range(8)} and not numbers(ember, 'time')


def test_learning_rates_belong_to_their_step(tmp_path):
    "Each step has its learning rates of a one-cycle schedule, one for each parameter group"
    ember = callback()
    learn = learner(tmp_path, ember, splitter=lambda m: [[*m.a.parameters()], [*m.b.parameters()]])
    learn.fit_one_cycle(2, slice(.01, .1))
    assert [*numbers(ember, 'learning_rate_group1').values()]==pytest.approx([float(lr) for lr in learn.recorder.lrs])
    assert [*numbers(ember, 'learning_rate').values()]==pytest.approx([float(lr)/10 for lr in learn.recorder.lrs])
    assert len(learn.recorder.lrs)==8 and not numbers(ember, 'learning_rate_group2')


def test_validation_is_recorded_and_other_evaluations_are_not(tmp_path):
    ember = callback()
    learn = fit(tmp_path, ember, data=batches(3), epochs=2)
    same(rows_of(ember), plain(batches(3)*2))
    rows = table(ran(ember), 'input', phase='eval', tname='x', module='model(Net)').values()
    assert [(r['step'], r['max'], r['epoch']) for r in rows]==[(2, 100, 0), (5, 100, 1)]
    before,was = [*ran(ember).t.lines()],ember.report
    learn.validate(); learn.get_preds(); learn.get_preds(0)
    assert [*ran(ember).t.lines()]==before and ember.report is was


@pytest.mark.parametrize('how', ['get_preds', 'validate'])
def test_predictions_while_it_trains_are_left_out(how, tmp_path):
    f,asked = fastai(),[]
    class Asks(f.Callback):
        order = 90
        def after_batch(self):
            if not self.learn.training or self.learn.iter!=1: return
            asked.append(self.learn.epoch)
            state = {k: v for k,v in vars(self.learn).items() if k in ('dl', 'n_iter', 'train_iter', 'epoch', 'iter', 'training')}
            dl = loader([(torch.full((5, 4), 77.), torch.zeros(5).long())])
            if how=='get_preds': self.learn.get_preds(dl=dl, inner=True)
            else: self.learn.validate(dl=dl)
            for k,v in state.items(): setattr(self.learn, k, v)
            self.learn.model.train()
    ember = callback()
    with heard() as said: learner(tmp_path, ember, Asks(), data=batches(3)).fit(2)
    assert not said and asked==[0, 1]
    same(rows_of(ember), plain(batches(3)*2))
    assert {r['max'] for r in table(ran(ember), 'input', phase='eval', tname='x', module='model(Net)').values()}=={100}
    assert [*numbers(ember, 'loss')]==[*range(6)]


def test_lr_find_is_left_out(tmp_path):
    ember = callback()
    learn = learner(tmp_path, ember)
    learn.lr_find(num_it=8, show_plot=False, suggest_funcs=None)
    assert ember.report is None and ember.te is None and '_with_events' not in vars(learn)
    learn.fit(1)
    same(rows_of(ember), plain(batches()))


def test_saved_files_equal_those_without_the_callback(tmp_path):
    f,saved = fastai(),[]
    for ember in (callback(), None):
        learn = fit(tmp_path/str(len(saved)), *([ember] if ember else []), f.SaveModelCallback(with_opt=True))
        saved.append(torch.load(tmp_path/str(len(saved))/'models'/'model.pth'))
        learn.export('it.pkl')
    a,b = saved
    assert a.keys()==b.keys() and bits(a['model'], b['model']) and a['opt'].keys()==b['opt'].keys()


def tables(folder, *cbs):
    "Return a Learner of tabular data, with the optimizer, loss and loaders that fastai chooses."
    pd,f = pytest.importorskip('pandas'),fastai()
    f.set_seed(0)
    df = pd.DataFrame(torch.randn(80, 3).numpy(), columns=[*'abc'])
    df['kind'],df['y'] = ['x', 'y']*40,[*(df.a>0).astype(str)]
    dls = f.TabularDataLoaders.from_df(df, folder, procs=[f.Categorify, f.Normalize], cat_names=['kind'], cont_names=[*'abc'],
        y_names='y', valid_idx=range(20), bs=10, device='cpu')
    learn = f.tabular_learner(dls, layers=[8], cbs=[*cbs])
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__=='ProgressCallback'])
    learn.logger = f.noop
    return learn


def test_tables(tmp_path):
    "A tabular model has two inputs and batch normalization; it is trained with a one-cycle schedule."
    ember,weights = callback(),[]
    for cbs in ([ember], []):
        learn = tables(tmp_path, *cbs)
        learn.fit_one_cycle(2, .01)
        weights.append(learn.model.state_dict())
    assert bits(*weights) and steps_of(ember)==[*range(12)]
    assert {r['tname'] for r in table(ran(ember), 'input').values() if r['module'].count('.')==0}=={'x_cat', 'x_cont'}


def test_an_exported_learner_needs_no_torchember(tmp_path):
    "A Learner can be loaded without torchember, also if it was copied or exported during a training."
    f,ember,copies = fastai(),callback(),[]
    learn = tables(tmp_path, ember)
    learn.fit(1, cbs=f.Callback(after_validate=lambda self: copies or copies.append(copy.deepcopy(self.learn))))
    assert len(copies)==1 and type(copies[0].ember) is f.Callback and vars(copies[0])['_with_events'].__func__ is f.Learner._with_events
    copies[0].fit(1)
    learn.export('after.pkl')
    assert b'torchember' not in (tmp_path/'after.pkl').read_bytes()
    back = f.load_learner(tmp_path/'after.pkl')
    assert bits(back.model.state_dict(), learn.model.state_dict()) and type(back.cbs[-1]) is f.Callback and back.ember.learn is back
    back.dls,back.logger = learn.dls,f.noop
    back.create_opt()
    back.fit(1)
    assert learn.ember is ember


def test_learner_is_restored(tmp_path):
    ember,model = callback(),seeded()
    before = left(model)
    learn = fit(tmp_path, ember, model=model)
    model.train()
    assert left(model)==before and ember.te is None and '_with_events' not in vars(learn)


@pytest.mark.parametrize('error', [ValueError('broken'), KeyboardInterrupt()], ids=['error', 'Ctrl-C'])
@pytest.mark.parametrize('at', [1, 3, 6])
def test_an_exception_ends_the_run(error, at, tmp_path):
    ember,model = callback(),seeded(FailingModel)
    before = left(model)
    model.fails = at+1, error
    learn = learner(tmp_path, ember, model=model)
    with pytest.raises(type(error)): learn.fit(2)
    del model.fails, model.passes
    assert ember.te is None and left(model)==before and '_with_events' not in vars(learn)
    same({k: r for k,r in rows_of(ember).items() if k[0]<at}, plain((batches()*2)[:at], model=seeded(FailingModel)))


def test_exception_without_a_private_method(tmp_path, monkeypatch):
    "If fastai has no private method to patch, the run ends when the next fit begins."
    monkeypatch.setattr('torchember.integrations.fastai.patch_events', lambda learn, call: None)
    ember,model = callback(),seeded(FailingModel)
    model.fails = 3, ValueError('broken')
    learn = learner(tmp_path, ember, model=model)
    with pytest.raises(ValueError, match='broken'): learn.fit(1)
    failed = ember.te
    assert failed.armed
    model.fails = None
    learn.fit(1)
    assert not failed.armed and ember.te is None and steps_of(ember)==[0, 1, 2, 3]


@pytest.mark.parametrize('event', ['before_epoch', 'after_epoch', 'before_validate', 'after_step'])
def test_an_exception_in_a_callback(event, tmp_path):
    f = fastai()
    def go(self):
        if self.learn.epoch==1: raise ValueError('broken')
    ember = callback()
    learn = learner(tmp_path, ember, type('Raises', (f.Callback,), {event: go})())
    with pytest.raises(ValueError, match='broken'): learn.fit(2)
    assert ember.te is None and '_with_events' not in vars(learn) and steps_of(ember)[:4]==[0, 1, 2, 3]


@pytest.mark.parametrize(('event', 'order', 'last'), [('after_batch', -9, 5), ('after_batch', 90, 5), ('before_epoch', 0, 3), ('before_backward', 0, 4)])
def test_a_fit_that_is_cancelled(event, order, last, tmp_path):
    "The callback that cancels the fit may run before `EmberCallback`."
    f = fastai()
    def go(self):
        if self.learn.epoch==1 and (event=='before_epoch' or self.learn.iter==1): raise f.CancelFitException
    ember = callback()
    fit(tmp_path, ember, type('Cancels', (f.Callback,), {event: go, 'order': order})(), epochs=3)
    assert ember.te is None and [*numbers(ember, 'loss')]==[*range(last+1)] and [*numbers(ember, 'valid_loss')]==[3]


def test_early_stopping(tmp_path):
    "The fit ends in a callback that runs after the Recorder, so the last epoch must be recorded."
    ember = callback()
    fit(tmp_path, ember, fastai().EarlyStoppingCallback(min_delta=1e9, patience=1), data=batches(2), epochs=9)
    assert steps_of(ember)==[0, 1, 2, 3] and ember.te is None and [*numbers(ember, 'valid_loss')]==[1, 3]


def test_half_epochs(tmp_path):
    "Names of metrics match their values, also if the Recorder lacks the training loss or the validation loss."
    f = fastai()
    for at,names in (('after_train', {'train_loss', 'valid_loss'}), ('before_batch', {'valid_loss'}), ('before_validate', {'train_loss'})):
        def go(self, at=at):
            if at=='before_batch' and self.learn.iter==2 and self.training: raise f.CancelTrainException
            if at=='before_validate': raise f.CancelValidException
        ember = callback()
        learn = fit(tmp_path, ember, type('Cancels', (f.Callback,), {at: go})())
        assert {n for n in ('train_loss', 'valid_loss') if numbers(ember, n)}==names
        if at=='before_batch': assert numbers(ember, 'valid_loss')=={1: pytest.approx(loss_of(learn.model, *hundred(1)[0]).item())}


@pytest.mark.parametrize('which', [0, 1])
def test_cancelled_step_has_no_scalars(which, tmp_path):
    "A cancelled step has no number; the next step gets the number."
    f = fastai()
    class Cancels(f.Callback):
        def before_step(self):
            if self.learn.iter==which: raise f.CancelStepException
    ember = callback()
    fit(tmp_path, ember, Cancels())
    losses = numbers(ember, 'loss')
    assert [*losses]==[0, 1, 2]
    assert len([r for r in ran(ember).t.lines() if r['ttype']=='scalar' and 'loss' in r])==3


def test_a_scaler(tmp_path):
    "The rows have unscaled gradients, and rows of a skipped step are marked as skipped."
    f = fastai()
    class Scaled(f.MixedPrecision):
        def before_fit(self):
            super().before_fit()
            self.autocast,self.learn.scaler = torch.autocast('cpu', enabled=False),torch.amp.GradScaler('cpu', init_scale=2.**10)
        def before_backward(self):
            super().before_backward()
            if self.learn.iter==1: self.learn.loss_grad = self.learn.loss_grad*float('inf')
    ember = callback()
    model = fit(tmp_path, ember, Scaled()).model
    got,data = rows_of(ember),batches()
    assert {r['step'] for r in got.values() if r.get('skipped')}=={1} and steps_of(ember)==[0, 1, 2, 3] and [*numbers(ember, 'loss')]==[0, 1, 2, 3]
    want = plain([data[0], data[2], data[3]])
    number = {0: 0, 1: 2, 2: 3}
    same({k: r for k,r in got.items() if k[0]!=1}, {(number[k[0]], *k[1:]): r for k,r in want.items()})
    assert bits(model.state_dict(), fit(tmp_path, Scaled()).model.state_dict())


def test_several_fits(tmp_path):
    "Two fits are two runs: first with frozen layers, then with all layers."
    ember,names = callback(name='mine'),[]
    learn = learner(tmp_path, ember, splitter=lambda m: [[*m.a.parameters()], [*m.b.parameters()]])
    learn.freeze()
    for _ in range(2):
        learn.fit(1)
        names.append(ember.report['run'])
        learn.unfreeze()
    assert names==['mine', 'mine_2'] and steps_of(ember)==[0, 1, 2, 3]
    def trained(name): return {r['module'].split('.')[-1] for r in Ran(name).t.lines() if r['ttype']=='weight_grad'}
    assert trained('mine')=={'b(Linear)'} and trained('mine_2')=={'a(Linear)', 'b(Linear)'}


def test_of_one_fit_alone(tmp_path):
    learn = learner(tmp_path)
    ember = callback()
    learn.fit(1, cbs=ember)
    assert steps_of(ember)==[0, 1, 2, 3] and ember.learn is None
    before = [*ran(ember).t.lines()]
    learn.fit(1)
    assert [*ran(ember).t.lines()]==before


def test_a_fit_goes_on_where_another_one_ended(tmp_path):
    whole = callback()
    fit(tmp_path, whole, data=batches(3), epochs=3)
    fit(tmp_path, callback(name='mine'), data=batches(3), epochs=1).save('one')
    ember = callback(name='mine')
    learn = learner(tmp_path, ember, data=batches(3), model=seeded(seed=5)).load('one')
    learn.fit(3, start_epoch=1)
    assert ember.report['run']=='mine'
    same(rows_of(ember), rows_of(whole))
    assert [*numbers(ember, 'valid_loss')]==[2, 5, 8] and {(r['step'], r['epoch']) for r in ran(ember).t.lines()}=={(i, i//3) for i in range(9)}


def test_accumulated_steps_continue_the_run(tmp_path):
    f = fastai()
    ember = callback()
    learn = learner(tmp_path, ember, f.GradientAccumulation(8), data=batches(4))
    learn.fit(3, start_epoch=1)
    assert steps_of(ember)==[2, 3, 4, 5] and learn.recorder.values[0]==[]


@pytest.mark.parametrize('every', [2, 3])
def test_options_are_those_of_torchember(every, tmp_path):
    ember = callback(every=every, ttypes=('weight_grad',))
    fit(tmp_path, ember)
    got = rows_of(ember)
    assert {k[0] for k in got}=={*range(0, 4, every)} and {k[2] for k in got}=={'weight_grad'}
    same(got, {k: r for k,r in plain(batches()).items() if k[2]=='weight_grad' and k[0]%every==0})


def test_wrong_arguments_at_once():
    with pytest.raises(TypeError, match="No argument of EmberCallback 'stat'.*Known"): callback(stat='full')
    with pytest.raises(TypeError, match='takes first_step from the trainer'): callback(first_step=3)


def test_class_of_the_callback_is_accepted(tmp_path):
    fastai()
    from torchember.integrations.fastai import EmberCallback
    learn = fit(tmp_path, EmberCallback)
    assert steps_of(learn.ember)==[0, 1, 2, 3]


@pytest.mark.release # This test starts another program
@pytest.mark.slow
def test_ctrl_c_of_a_program(tmp_path):
    program = f'''
import os, signal, sys; sys.path += {[str(p) for p in Path(__file__).parents[:2]]!r}
from test_fastai_callback import *
class Stops(fastai().Callback):
    def after_pred(self):
        if self.learn.train_iter==2: os.kill(os.getpid(), signal.SIGINT)
ember = callback(name='mine')
learn = learner('.', ember, Stops())
try: learn.fit(1)
except KeyboardInterrupt: print(ember.te, ember.report['recorded'])
'''
    (tmp_path/'it.py').write_text(program)
    env = dict(os.environ, TORCHEMBER_HOME=str(tmp_path))
    out = subprocess.run([sys.executable, 'it.py'], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert not out.returncode and out.stdout.split()[0]=='None', out.stderr[-3000:]
    assert sorted(set(emberTracker('mine', tmp_path).df.step))[:2]==[0, 1]
