"Tests of `EmberCallback` in Lightning's Trainer: rows equal those of a plain loop, and the training is unchanged"
import functools
import logging
import warnings

import programs
import pytest
import torch
from callback_runs import bits, numbers, ran, rows_of, steps_of
from looped import Net, batches, heard, left, loss_of, momentum, same, seeded, table
from torch import nn

from torchember import read, torchEmber

pytestmark = pytest.mark.filterwarnings('ignore')


@functools.cache
def lightning():
    "Import Lightning in the fixture, because the import takes seconds"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        L = pytest.importorskip('lightning.pytorch')
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    return L


def callback(**options):
    lightning()
    from torchember.integrations.lightning import EmberCallback
    return EmberCallback(**options)


@functools.cache
def kinds():
    class Lit(lightning().LightningModule):
        fails = None # (number of the batch that fails, exception)
        def __init__(self):
            super().__init__()
            self.net,self.lr = Net(),.1

        def training_step(self, xy, i):
            if self.fails and self.fails[0]==self.trainer.global_step: raise self.fails[1]
            loss = loss_of(self.net, *xy)
            self.log('train_loss', loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, xy, i):
            self.net(torch.full_like(xy[0], 100.))
            self.log('val_loss', loss_of(self.net, *xy))

        test_step = validation_step
        def predict_step(self, xy, i): return self.net(xy[0])
        def configure_optimizers(self): return torch.optim.SGD(self.parameters(), self.lr, momentum=.9)

    class Two(Lit):
        "A model with manual optimization and two optimizers, which step one after the other"
        automatic_optimization = False
        def training_step(self, xy, i):
            for o in self.optimizers():
                o.zero_grad()
                self.manual_backward(loss := loss_of(self.net, *xy))
                o.step()
            return loss

        def configure_optimizers(self): return [momentum(self.net.a), momentum(self.net.b)]
    return Lit, Two


def loader(data): return torch.utils.data.DataLoader(data, batch_size=None)


def trainer_for(folder, *callbacks, **options):
    return lightning().Trainer(**{**dict(accelerator='cpu', max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[*callbacks]), **options})


def fit(folder, ember=None, data=None, model=None, val=None, ckpt_path=None, **options):
    "Train a model with Lightning, and return it. Without an ember, the training is not recorded"
    model,trainer = model or seeded(kinds()[0]),trainer_for(folder, *([ember] if ember else []), **options)
    with heard() as said: trainer.fit(model, loader(data or batches()), val and loader(val), ckpt_path=ckpt_path)
    assert not said, said
    return model, trainer


def plain(data, accumulate=1, clip=None, bf16=False, first_step=0, model=None, opt=None, **options):
    "Return the rows of the same model trained by a plain loop"
    model = model or seeded(kinds()[0])
    opt = opt or momentum(model)
    with torchEmber(model, optimizer=opt, first_step=first_step, **options) as te:
        for i,(x,y) in enumerate(data):
            with torch.autocast('cpu', torch.bfloat16, enabled=bf16): loss = loss_of(model.net, x, y)/accumulate
            te.recorder.losses.note({'loss': loss}) # The callback notes the loss before the backward pass
            loss.backward()
            if (i+1)%accumulate: continue
            if clip: nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
    return table(te)


@pytest.mark.parametrize(('options', 'by_hand'), [({}, {}), (dict(accumulate_grad_batches=2), dict(accumulate=2)),
    (dict(gradient_clip_val=.01), dict(clip=.01)), (dict(precision='bf16-mixed'), dict(bf16=True))], ids=['plain', 'accumulate', 'clip', 'bf16'])
def test_rows_equal_those_of_a_plain_loop(options, by_hand, tmp_path):
    ember = callback()
    model,_ = fit(tmp_path, ember, **options)
    same(rows_of(ember), plain(batches(), **by_hand))
    other,_ = fit(tmp_path, **options)
    assert bits(model.state_dict(), other.state_dict())


def test_gradients_before_and_after_clipping(tmp_path):
    both = ('weight_grad', 'unclipped_grad')
    ember = callback(ttypes=both)
    fit(tmp_path, ember, gradient_clip_val=.01)
    same(rows_of(ember), want := plain(batches(), clip=.01, ttypes=both))
    assert {k[2] for k in want}=={*both}


def test_numbers_of_the_step_that_closed(tmp_path):
    ember,data = callback(),batches()
    fit(tmp_path, ember, data=data, max_epochs=2, val=data[:1])
    model,losses = seeded(kinds()[0]),[]
    opt = momentum(model)
    for x,y in data*2:
        loss = loss_of(model.net, x, y)
        loss.backward(); opt.step(); opt.zero_grad()
        losses.append(loss.item())
    assert numbers(ember, 'train_loss_step')==pytest.approx(dict(enumerate(losses)))
    assert numbers(ember, 'learning_rate')==dict.fromkeys(range(8), .1)
    assert numbers(ember, 'train_loss_epoch')==pytest.approx({3: sum(losses[:4])/4, 7: sum(losses[4:])/4})
    assert [*numbers(ember, 'val_loss')]==[3, 7]
    assert {(r['step'], r['epoch']) for r in ran(ember).t.lines()}=={(i, i//4) for i in range(8)}


def test_learning_rate_belongs_to_its_step(tmp_path):
    "The row has the learning rate of its step, although the scheduler steps before `on_train_batch_end`."
    class Falling(kinds()[0]):
        def configure_optimizers(self):
            opt = super().configure_optimizers()
            return [opt], [dict(scheduler=torch.optim.lr_scheduler.ExponentialLR(opt, .5), interval='step')]
    ember = callback()
    fit(tmp_path, ember, model=seeded(Falling))
    assert numbers(ember, 'learning_rate')==pytest.approx({0: .1, 1: .05, 2: .025, 3: .0125})


def test_validation_is_recorded_and_the_sanity_check_is_not(tmp_path):
    ember = callback()
    model,trainer = fit(tmp_path, ember, data=batches(3), val=batches(2), num_sanity_val_steps=2, max_epochs=2)
    same(rows_of(ember), plain(batches(3)*2))
    rows = [r for r in table(ran(ember), 'input', phase='eval').values() if r['module'].endswith('.net(Net)')]
    assert {r['step'] for r in rows}=={2, 5} and {r['max'] for r in rows}>={100}
    before = [*ran(ember).t.lines()]
    for f in (trainer.validate, trainer.test, trainer.predict): f(model, loader(batches(1)), **({} if f==trainer.predict else dict(verbose=False)))
    assert [*ran(ember).t.lines()]==before


def test_a_sanity_check_alone_is_no_run(tmp_path, monkeypatch):
    "The passes of the sanity check precede the first step, and must not become rows of step 0."
    ember = callback()
    seen = []
    monkeypatch.setattr(type(ember), 'on_sanity_check_end', lambda self, trainer, module: seen.append((self.te, trainer.lightning_module.training)))
    fit(tmp_path, ember, val=batches(1), limit_val_batches=1)
    assert [te for te,_ in seen]==[None]
    assert not [r for r in ran(ember).t.lines() if r.get('phase')=='eval' and r['step']<3]


def test_fast_dev_run_is_recorded(tmp_path):
    ember = callback()
    fit(tmp_path, ember, val=batches(1), fast_dev_run=2)
    assert steps_of(ember)==[0, 1] and {*numbers(ember, 'train_loss_step')}=={0, 1}


def test_checkpoints_equal_those_without_the_callback(tmp_path):
    L,saved = lightning(),[]
    for ember in (callback(), None):
        folder = tmp_path/str(len(saved))
        keep = L.callbacks.ModelCheckpoint(folder, save_last=True)
        trainer = trainer_for(folder, *([ember] if ember else []), keep, enable_checkpointing=True, max_epochs=1)
        trainer.fit(seeded(kinds()[0]), loader(batches()))
        saved.append(torch.load(folder/'last.ckpt', weights_only=False))
    a,b = saved
    assert a.keys()==b.keys() and [k.split('{')[0] for k in a['callbacks']]==[k.split('{')[0] for k in b['callbacks']]==['ModelCheckpoint']
    assert bits(a['state_dict'], b['state_dict']) and a['loops']==b['loops']


def test_model_is_restored(tmp_path):
    ember = callback()
    model = seeded(kinds()[0])
    before = left(model.net)
    fit(tmp_path, ember, model=model)
    assert left(model.net)==before and ember.te is None


@pytest.mark.parametrize('error', [ValueError('broken'), KeyboardInterrupt()], ids=['error', 'Ctrl-C'])
def test_an_exception_ends_the_run(error, tmp_path, monkeypatch):
    import signal
    was = signal.getsignal(signal.SIGINT)
    ember,model = callback(),seeded(kinds()[0])
    before = left(model.net)
    model.fails = 2, error
    with pytest.raises((ValueError, SystemExit)): fit(tmp_path, ember, model=model)
    signal.signal(signal.SIGINT, was) # Lightning has replaced this signal handler
    assert ember.te is None and left(model.net)==before
    same({k: r for k,r in rows_of(ember).items() if k[0]<2}, plain(batches(2)))


def checkpoint(trainer, folder):
    trainer.save_checkpoint(folder/'it.ckpt')
    return folder/'it.ckpt'


@pytest.mark.parametrize('every', [1, 2])
def test_resume_continues_the_run(every, tmp_path):
    whole = callback(every=every)
    fit(tmp_path, whole, data=batches(3), max_epochs=2)
    _,trainer = fit(tmp_path, callback(name='mine', every=every), data=batches(3))
    ember = callback(name='mine', every=every)
    fit(tmp_path, ember, data=batches(3), max_epochs=2, model=seeded(kinds()[0], 5), ckpt_path=checkpoint(trainer, tmp_path))
    assert ember.report['run']=='mine' and sorted({k[0] for k in rows_of(ember)})==[*range(0, 6, every)]
    same(rows_of(ember), rows_of(whole))


def test_resume_before_the_end_of_the_run(tmp_path):
    "If a checkpoint before the end of the run is resumed, the repeated steps go into another run."
    _,trainer = fit(tmp_path, callback(name='mine'), data=batches(3))
    path = checkpoint(trainer, tmp_path)
    fit(tmp_path, callback(name='mine'), data=batches(3), max_epochs=2, ckpt_path=path)
    ember = callback(name='mine')
    trainer = trainer_for(tmp_path, ember, max_epochs=2)
    with heard("recorded as 'mine_2'") as said: trainer.fit(seeded(kinds()[0]), loader(batches(3)), ckpt_path=path)
    assert len(said)==1 and ember.report['run']=='mine_2' and steps_of(ember)==[3, 4, 5]


def test_several_fits(tmp_path):
    "Each fit is a run of its own. A fit that continues a training continues its step numbers."
    ember,model = callback(),seeded(kinds()[0])
    _,trainer = fit(tmp_path, ember, model=model)
    first = ember.report['run']
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(batches()))
    assert ember.report['run']!=first and steps_of(ember)==[4, 5, 6, 7] and [*numbers(ember, 'train_loss_step')]==[4, 5, 6, 7]
    named = callback(name='mine')
    names = []
    for _ in range(2):
        fit(tmp_path, named)
        names.append(named.report['run'])
    assert names==['mine', 'mine_2'] and steps_of(named)==[0, 1, 2, 3]


def test_early_stopping(tmp_path):
    ember = callback()
    stop = lightning().callbacks.EarlyStopping('val_loss', patience=1, min_delta=1e9)
    trainer = trainer_for(tmp_path, ember, stop, max_epochs=9)
    trainer.fit(seeded(kinds()[0]), loader(batches(2)), loader(batches(1)))
    assert steps_of(ember)==[0, 1, 2, 3] and ember.te is None


def test_two_optimizers(tmp_path):
    "With two optimizers, Lightning counts two steps per round, torchember counts one."
    ember = callback(name='gan')
    _,trainer = fit(tmp_path, ember, model=seeded(kinds()[1]))
    assert trainer.global_step==8 and steps_of(ember)==[0, 1, 2, 3]
    assert {n for n in ran(ember).t.df.columns if n.startswith('learning')}=={'learning_rate_0', 'learning_rate_1'}
    again = callback(name='gan')
    fit(tmp_path, again, model=seeded(kinds()[1]), max_epochs=2, ckpt_path=checkpoint(trainer, tmp_path))
    assert again.report['run']=='gan' and steps_of(again)==[*range(8)]


def test_trials_of_a_tuner_are_left_out(tmp_path):
    ember,model = callback(),seeded(kinds()[0])
    trainer = trainer_for(tmp_path, ember)
    tuner = lightning().tuner.Tuner(trainer)
    tuner.lr_find(model, loader(batches(8)), num_training=5, update_attr=False)
    assert ember.report is None and ember.te is None
    trainer.fit(model, loader(batches()))
    assert steps_of(ember)==[0, 1, 2, 3]


def test_trials_before_an_epoch_are_left_out(tmp_path):
    L = lightning()
    class Finder(L.callbacks.LearningRateFinder):
        def on_fit_start(self, *args): pass
        def on_train_epoch_start(self, trainer, module):
            self.lr_find(trainer, module)
            tried.append(len(self.optimal_lr.results['loss']))
            module.net(torch.full((2, 4), 77.))
    ember,tried = callback(),[]
    trainer = trainer_for(tmp_path, ember, Finder(num_training_steps=3, update_attr=False), max_epochs=2)
    trainer.fit(seeded(kinds()[0]), loader(batches(6)))
    assert tried[0]==3 and 77. not in [r['max'] for r in table(ran(ember), 'input').values()]
    assert len(table(ran(ember), 'input'))==len({k[:4] for k in table(ran(ember), 'input')}) and max(steps_of(ember))<12
    same({k: r for k,r in rows_of(ember).items() if k[0]<6}, plain(batches(6)))


def test_wrong_arguments_at_once():
    with pytest.raises(TypeError, match="No argument of EmberCallback 'stat'.*Known"): callback(stat='full')
    with pytest.raises(TypeError, match='takes first_step from the trainer'): callback(first_step=3)


def test_the_name_that_the_program_uses():
    from torchember.integrations.lightning import EmberCallback
    assert issubclass(EmberCallback, lightning().Callback)


@pytest.mark.release # starts two processes, which import torch and lightning
@pytest.mark.slow
def test_two_processes(tmp_path):
    import os
    import subprocess
    import sys
    from pathlib import Path
    program = f'''
import sys, warnings; warnings.filterwarnings('ignore'); sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch, lightning.pytorch as L
from looped import Net, batches, loss_of, momentum, seeded
from torchember.integrations.lightning import EmberCallback
class Lit(L.LightningModule):
    def __init__(self): super().__init__(); self.net = Net()
    def training_step(self, xy, i): return loss_of(self.net, *xy)
    def configure_optimizers(self): return momentum(self)
if __name__=='__main__':
    ember = EmberCallback(name='both')
    L.Trainer(accelerator='cpu', devices=2, strategy='ddp', max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, callbacks=[ember]).fit(seeded(Lit), torch.utils.data.DataLoader(batches(), batch_size=None))
    assert ember.te is None and ember.report['steps']==4
'''
    (tmp_path/'both.py').write_text(program)
    out = subprocess.run([sys.executable, tmp_path/'both.py'], env=dict(os.environ, TORCHEMBER_HOME=str(tmp_path)), capture_output=True, text=True, timeout=300)
    assert not out.returncode, out.stderr[-3000:]
    from torchember import read
    df = read('both', home=tmp_path)
    assert sorted(set(df.step))==[0, 1, 2, 3]
    want = {(k[0], k[1].split('.', 1)[-1], k[3]): r for k,r in plain(batches()).items() if k[2]=='weight_grad'}
    got = df[df.ttype=='weight_grad']
    assert len(got)==len(want)
    for r in got.to_dict('records'): assert r['mean']==pytest.approx(want[r['step'], r['module'].split('.', 1)[-1], r['tname']]['mean'], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('which', [pytest.param('pytorch_lightning is installed', marks=pytest.mark.release), 'pytorch_lightning is used',
    pytest.param('both are there', marks=pytest.mark.release)])
def test_under_the_name_that_the_program_uses(tmp_path, which):
    "The packages `lightning` and `pytorch_lightning` refuse callbacks of each other, so the imported package decides."
    pytest.importorskip('pytorch_lightning')
    pytest.importorskip('lightning')
    other = {'pytorch_lightning is installed': "sys.modules['lightning'] = None", 'pytorch_lightning is used': '', 'both are there': ''}[which]
    name = 'lightning.pytorch' if which=='both are there' else 'pytorch_lightning'
    loads = '' if which=='pytorch_lightning is installed' else f'import {name} as L'
    done = programs.run(f'''
import sys, torch
{other}
{loads}
from torchember.integrations.lightning import EmberCallback
import {name} as L
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 2)
    def training_step(self, x, i): return self.net(x).square().mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), .1)
L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator='cpu', callbacks=[EmberCallback(name='r')]).fit(
    Lit(), torch.utils.data.DataLoader(torch.ones(4, 3), 2))
print(issubclass(EmberCallback, L.Callback))
''', cwd=tmp_path, TORCHEMBER_HOME=tmp_path, HOME=tmp_path)
    assert done.returncode==0 and done.stdout.splitlines()[-1]=='True', done.stderr
    df = read('r', home=tmp_path)
    assert df[df.ttype=='weight_grad'].step.unique().tolist()==[0, 1]
