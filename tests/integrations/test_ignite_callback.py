"Tests of `EmberCallback` in an Ignite Engine: rows equal those of a plain loop, and the training is unchanged"
import functools
import logging
from pathlib import Path

import programs
import pytest
import torch
import torch.nn.functional as F
from callback_runs import Ran, bits, numbers, ran, rows_of, steps_of
from looped import Net, batches, heard, left, loss_of, momentum, same, seeded, table
from tensor_rows import lines

from torchember import read, torchEmber

pytestmark = pytest.mark.filterwarnings('ignore')


@functools.cache
def ignite():
    "Import Ignite in the fixture, because the import takes a second."
    pytest.importorskip('ignite')
    import ignite.engine
    import ignite.handlers
    import ignite.metrics
    logging.getLogger('ignite').setLevel(logging.CRITICAL)
    return ignite


def callback(**options):
    ignite()
    from torchember.integrations.ignite import EmberCallback
    return EmberCallback(**options)


class FailingModel(Net):
    "A model that raises an exception in a training pass"
    fails = None # (number of the pass that fails, exception)
    passes = 0
    def forward(self, x):
        self.passes += self.training
        if self.fails and self.training and self.passes==self.fails[0]: raise self.fails[1]
        return super().forward(x)


def events(): return ignite().engine.Events
hundred = [(torch.full((2, 4), 100.), torch.tensor([0, 1]))]


def engines(ember=None, model=None, accumulate=1, evaluate=False, first=False, attached=None, **options):
    "Create a trainer with evaluator and scheduler. first: True to attach the callback before all other handlers"
    e,model = ignite().engine,model or seeded()
    opt = momentum(model)
    trainer = e.create_supervised_trainer(model, opt, F.cross_entropy, gradient_accumulation_steps=accumulate, **options)
    evaluator = e.create_supervised_evaluator(model, metrics={'nll': ignite().metrics.Loss(F.cross_entropy)})
    trainer.logger.setLevel(logging.CRITICAL)
    def attach(): ember.attach(trainer, model, opt, evaluator=evaluator, **{**dict(gradient_accumulation_steps=accumulate), **(attached or {})})
    if ember and first: attach()
    if evaluate: trainer.add_event_handler(events().EPOCH_COMPLETED, lambda trainer: evaluator.run(hundred))
    if ember and not first: attach()
    trainer.model,trainer.opt,trainer.evaluator = model,opt,evaluator
    return trainer


def fit(ember=None, data=None, epochs=1, **options):
    trainer = engines(ember, **options)
    with heard() as said: trainer.run(data or batches(), max_epochs=epochs)
    assert not said, said
    return trainer


def plain(data, accumulate=1, model=None, first_step=0):
    model = model or seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, first_step=first_step) as te:
        for i,(x,y) in enumerate(data):
            if not i%accumulate: opt.zero_grad()
            (loss_of(model, x, y)/accumulate).backward()
            if not (i+1)%accumulate: opt.step()
    return table(te)


@pytest.mark.parametrize('accumulate', [1, 2])
def test_rows_equal_those_of_a_plain_loop(accumulate):
    ember = callback()
    model = fit(ember, accumulate=accumulate).model
    same(rows_of(ember), plain(batches(), accumulate))
    assert bits(model.state_dict(), fit(accumulate=accumulate).model.state_dict())


@pytest.mark.parametrize('first', [True, False])
def test_numbers_of_the_step_that_closed(first):
    ember,data = callback(),batches()
    fit(ember, data, 2, evaluate=True, first=first)
    model,losses,valid = seeded(),[],[]
    opt = momentum(model)
    for _ in range(2):
        for x,y in data:
            opt.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward(); opt.step()
            losses.append(loss.item())
        with torch.no_grad(): valid.append(loss_of(model, *hundred[0]).item())
    assert numbers(ember, 'loss')==pytest.approx(dict(enumerate(losses))) and numbers(ember, 'learning_rate')==dict.fromkeys(range(8), .1)
    assert numbers(ember, 'eval_nll')==pytest.approx({3: valid[0], 7: valid[1]})
    assert {(r['step'], r['epoch']) for r in ran(ember).t.lines()}=={(i, i//4+1) for i in range(8)}


def test_losses_of_accumulated_steps():
    "With accumulation, the loss of the last batch of a step is recorded once."
    ember,data = callback(),batches()
    fit(ember, data, accumulate=2)
    model,losses = seeded(),[]
    opt = momentum(model)
    for i,(x,y) in enumerate(data):
        loss = loss_of(model, x, y)
        (loss/2).backward()
        losses.append(loss.item())
        if i%2: opt.step(); opt.zero_grad()
    assert numbers(ember, 'loss')==pytest.approx({0: losses[1], 1: losses[3]})
    assert len([r for r in lines(ran(ember)) if r['ttype']=='scalar'])==2


@pytest.mark.parametrize('event', ['ITERATION_STARTED', 'ITERATION_COMPLETED'])
@pytest.mark.parametrize('first', [True, False])
def test_learning_rate_belongs_to_its_step(event, first):
    "The learning rate is right for each time of the scheduler step, and for each order of attachment."
    ember,seen = callback(),{}
    trainer = engines(ember if first else None)
    schedule = ignite().handlers.PiecewiseLinear(trainer.opt, 'lr', [(0, .1), (4, .5)])
    trainer.add_event_handler(events()[event], schedule)
    trainer.opt.register_step_pre_hook(lambda o, *args: seen.update({len(seen): o.param_groups[0]['lr']}))
    if not first: ember.attach(trainer, trainer.model, trainer.opt)
    trainer.run(batches(), max_epochs=1)
    assert numbers(ember, 'learning_rate')==seen and len(set(seen.values()))>=3


@pytest.mark.parametrize('first', [True, False])
def test_metrics_of_the_trainer(first):
    ember = callback()
    trainer = engines(ember if first else None)
    ignite().metrics.Average(lambda loss: loss).attach(trainer, 'mean')
    if not first: ember.attach(trainer, trainer.model, trainer.opt)
    trainer.run(batches(), max_epochs=2)
    losses = [*numbers(ember, 'loss').values()]
    assert numbers(ember, 'mean')==pytest.approx({3: sum(losses[:4])/4, 7: sum(losses[4:])/4})


def test_outputs():
    "An output that is a dict is recorded directly, and other outputs need `output_transform`."
    def named(x, y, p, loss): return {'a': loss.item(), 'text': 'b', 'p': p}
    def pair(x, y, p, loss): return p, loss
    def alone(x, y, p, loss): return p
    for transform,out,want in ((None, named, {'a'}), (lambda o: {'b': o[1]}, pair, {'b'}), (None, alone, set())):
        ember = callback()
        fit(ember, output_transform=out, attached=dict(output_transform=transform) if transform else None)
        names = {n for r in ran(ember).t.lines() if r['ttype']=='scalar' for n in r} & {'a', 'b', 'p', 'loss', 'text'}
        assert names==want


@pytest.mark.parametrize('first', [True, False])
def test_evaluation_inside_and_outside(first):
    ember = callback()
    trainer = engines(ember, evaluate=True, first=first)
    trainer.evaluator.run(hundred)
    for event in ('STARTED', 'EPOCH_STARTED'): trainer.add_event_handler(events()[event](once=1), lambda: trainer.evaluator.run(hundred))
    trainer.add_event_handler(events().COMPLETED, lambda: trainer.evaluator.run([(torch.full((2, 4), 50.), torch.tensor([0, 1]))]))
    trainer.run(batches(3), max_epochs=2)
    same(rows_of(ember), plain(batches(3)*2))
    rows = table(ran(ember), 'input', phase='eval', tname='x', module='model(Net)').values()
    assert [(r['step'], r['max'], r['epoch']) for r in rows]==[(2, 100, 1), (5, 100, 2), (5, 50, 2)][:len(rows)] and len(rows)>=2
    assert {*numbers(ember, 'eval_nll')}=={2, 5}
    before = [*ran(ember).t.lines()]
    trainer.evaluator.run(hundred)
    assert [*ran(ember).t.lines()]==before


def test_names_of_evaluators():
    ember = callback()
    trainer = engines()
    ember.attach(trainer, trainer.model, trainer.opt, evaluator={'val': trainer.evaluator})
    trainer.add_event_handler(events().EPOCH_COMPLETED, lambda: trainer.evaluator.run(hundred))
    trainer.run(batches(), max_epochs=1)
    assert [*numbers(ember, 'val_nll')]==[3]


def test_trials_of_rates_are_left_out():
    ember = callback()
    trainer = engines(ember)
    trainer.state.max_epochs,trainer.state.epoch_length = 2,4
    finder = ignite().handlers.FastaiLRFinder()
    with finder.attach(trainer, dict(model=trainer.model, optimizer=trainer.opt), num_iter=5, end_lr=1.) as t: t.run(batches())
    assert ember.report is None and ember.te is None and len(finder.get_results()['lr'])>=5
    trainer.state.max_epochs = None
    trainer.run(batches(), max_epochs=1)
    same(rows_of(ember), plain(batches()))


def test_checkpoints_equal_those_without_the_callback(tmp_path):
    saved = []
    for ember in (callback(), None):
        trainer,folder = engines(ember),tmp_path/str(bool(ember))
        keep = ignite().handlers.Checkpoint(dict(trainer=trainer, model=trainer.model, optimizer=trainer.opt), str(folder), n_saved=None)
        trainer.add_event_handler(events().ITERATION_COMPLETED(every=2), keep)
        trainer.run(batches(), max_epochs=1)
        saved.append({p.name: torch.load(p) for p in folder.iterdir()})
    a,b = saved
    assert a.keys()==b.keys() and len(a)==2
    for k in a: assert bits(a[k]['model'], b[k]['model']) and a[k]['trainer']==b[k]['trainer'] and a[k]['optimizer'].keys()==b[k]['optimizer'].keys()


@pytest.mark.parametrize(('named', 'accumulate'), [(True, 1), (False, 1), (True, 2)])
def test_resume_continues_the_run(named, accumulate):
    whole,name,n = callback(),dict(name='mine') if named else {},4//accumulate
    fit(whole, epochs=2, accumulate=accumulate)
    old = fit(callback(**name), accumulate=accumulate)
    ember = callback(**name)
    trainer = engines(ember, model=seeded(seed=5), accumulate=accumulate)
    for a,b in ((trainer, old), (trainer.model, old.model), (trainer.opt, old.opt)): a.load_state_dict(b.state_dict())
    trainer.run(batches(), max_epochs=2)
    assert steps_of(ember)==[*range(0 if named else n, 2*n)]
    same(rows_of(ember), {k: r for k,r in rows_of(whole).items() if named or k[0]>=n})
    assert {(r['step'], r['epoch']) for r in ran(ember).t.lines() if r['step']>=n}=={(i, 2) for i in range(n, 2*n)}


def test_several_runs():
    "A trainer that continues also continues its run. A trainer that starts again gets a new run."
    ember,names = callback(name='mine'),[]
    trainer = engines(ember)
    for epochs in (1, 2, 2):
        trainer.run(batches(), max_epochs=epochs)
        names.append(ember.report['run'])
    assert names==['mine', 'mine', 'mine_2'] and steps_of(ember)==[*range(8)]
    assert sorted({r['step'] for r in Ran('mine').t.lines()})==[*range(8)] and [*numbers(ember, 'loss')]==[*range(8)]


def test_early_stopping():
    ember = callback()
    trainer = engines(ember, evaluate=True)
    stop = ignite().handlers.EarlyStopping(1, lambda e: 0., trainer)
    trainer.evaluator.add_event_handler(events().COMPLETED, stop)
    trainer.run(batches(2), max_epochs=9)
    assert steps_of(ember)==[0, 1, 2, 3] and ember.te is None and '_handle_exception' not in vars(trainer)


@pytest.mark.parametrize('skip', [True, False])
def test_terminate(skip):
    ember = callback()
    trainer = engines(ember)
    trainer.add_event_handler(events().ITERATION_COMPLETED(once=3), lambda: trainer.terminate(skip_completed=skip))
    trainer.run(batches(), max_epochs=2)
    assert ember.te is None and [*numbers(ember, 'loss')]==[0, 1, 2]


def test_an_epoch_that_is_cut_short():
    ember = callback()
    trainer = engines(ember)
    trainer.add_event_handler(events().ITERATION_COMPLETED(once=2), trainer.terminate_epoch)
    trainer.run(batches(), max_epochs=2)
    assert {(r['step'], r['epoch']) for r in ran(ember).t.lines()}=={(0, 1), (1, 1), *((i, 2) for i in range(2, 6))}


def test_model_is_restored():
    ember,model = callback(),seeded()
    before = left(model)
    trainer = fit(ember, model=model)
    assert left(model)==before and ember.te is None and '_handle_exception' not in vars(trainer)


@pytest.mark.parametrize('error', [ValueError('broken'), KeyboardInterrupt()], ids=['error', 'Ctrl-C'])
def test_an_exception_ends_the_run(error):
    ember,model = callback(),seeded(FailingModel)
    before = left(model)
    model.fails = 3, error
    trainer = engines(ember, model=model)
    with pytest.raises(type(error)): trainer.run(batches(), max_epochs=1)
    del model.fails, model.passes
    assert ember.te is None and left(model)==before and '_handle_exception' not in vars(trainer)
    same({k: r for k,r in rows_of(ember).items() if k[0]<2}, plain(batches(2), model=seeded(FailingModel)))


def test_exception_without_a_private_method(monkeypatch):
    "If Ignite has no private method to patch, `close` or the next run ends the run."
    monkeypatch.setattr('torchember.integrations.ignite.patch_exceptions', lambda trainer, call: None)
    ember,model = callback(),seeded(FailingModel)
    model.fails = 3, ValueError('broken')
    trainer = engines(ember, model=model)
    with pytest.raises(ValueError, match='broken'): trainer.run(batches(), max_epochs=1)
    assert ember.te.armed and ember.close()['steps']==3 and ember.te is None


@pytest.mark.parametrize('event', ['ITERATION_COMPLETED', 'EPOCH_COMPLETED', 'COMPLETED'])
def test_an_exception_of_a_handler(event):
    ember = callback()
    trainer = engines(ember)
    trainer.add_event_handler(events()[event], lambda: 1/0)
    with pytest.raises(ZeroDivisionError): trainer.run(batches(), max_epochs=2)
    assert ember.te is None and ember.report['steps']==(1 if event=='ITERATION_COMPLETED' else 8 if event=='COMPLETED' else 4)


def test_handled_exceptions_do_not_end_the_run():
    "After a handled error, the Engine and the run continue with the next epoch. After Ctrl-C, both end."
    for error,steps in ((ValueError('broken'), [0, 1, 2, 3, 4]), (KeyboardInterrupt(), [0])):
        ember,model,caught = callback(),seeded(FailingModel),[]
        model.fails = 2, error
        trainer = engines(ember, model=model)
        trainer.add_event_handler(events().EXCEPTION_RAISED, lambda t, e, caught=caught: caught.append(e))
        trainer.run(batches(), max_epochs=2)
        assert caught==[error] and ember.te is None and [*numbers(ember, 'loss')]==steps and '_handle_exception' not in vars(trainer)


def test_interrupted_run_continues():
    "While the Engine is interrupted, the model is not armed."
    E,ember = ignite().engine.Engine,callback()
    was,E.interrupt_resume_enabled = E.interrupt_resume_enabled,True
    try:
        trainer = engines(ember)
        trainer.add_event_handler(events().ITERATION_COMPLETED(once=2), trainer.interrupt)
        trainer.run(batches(), max_epochs=1)
        assert not ember.te.armed
        trainer.model(torch.full((2, 4), 77.))
        trainer.run(batches(), max_epochs=1)
    finally: E.interrupt_resume_enabled = was
    same(rows_of(ember), plain(batches()))
    assert ember.te is None


def test_interrupted_run_can_be_closed():
    with callback() as ember:
        trainer = engines(ember)
        trainer.add_event_handler(events().ITERATION_COMPLETED(once=2), trainer.interrupt)
        trainer.run(batches(), max_epochs=1)
        assert ember.te is not None
    assert ember.te is None and [*numbers(ember, 'loss')]==[0, 1] and ember.close() is ember.report
    assert '_handle_exception' not in vars(trainer)


@pytest.mark.parametrize('where', ['trainer', 'attach'])
def test_a_scaler(where):
    "The rows have unscaled gradients, and rows of a skipped step are marked as skipped."
    ember,data = callback(),batches()
    model = seeded()
    opt,scaler = momentum(model),torch.amp.GradScaler('cpu', init_scale=2.**10)
    def step(trainer, xy):
        opt.zero_grad()
        loss = scaler.scale(loss_of(model, *xy))
        (loss*float('inf') if trainer.state.iteration==2 else loss).backward()
        scaler.step(opt); scaler.update()
    trainer = ignite().engine.Engine(step)
    if where=='trainer': trainer.state.scaler = scaler
    ember.attach(trainer, model, [opt], scaler=scaler if where=='attach' else None)
    trainer.run(data, max_epochs=1)
    got,number = rows_of(ember),{0: 0, 1: 2, 2: 3}
    assert {r['step'] for r in got.values() if r.get('skipped')}=={1} and steps_of(ember)==[0, 1, 2, 3]
    same({k: r for k,r in got.items() if k[0]!=1}, {(number[k[0]], *k[1:]): r for k,r in plain([data[0], data[2], data[3]]).items()})


def test_what_is_attached_between_two_runs():
    "A handler attached between two runs runs before the callback in the second run."
    ember,seen = callback(),{}
    trainer = engines(ember)
    trainer.run(batches(), max_epochs=1)
    trainer.add_event_handler(events().ITERATION_STARTED, ignite().handlers.PiecewiseLinear(trainer.opt, 'lr', [(0, .1), (4, .5)]))
    trainer.opt.register_step_pre_hook(lambda o, *args: seen.update({len(seen): o.param_groups[0]['lr']}))
    trainer.run(batches(), max_epochs=1)
    assert numbers(ember, 'learning_rate')==seen and len(set(seen.values()))==4


def test_abandoned_training_is_ended():
    "The next training ends the run of an abandoned training, and leaves no patches behind."
    ember,model = callback(),seeded()
    before = left(model)
    trainer = engines(ember, model=model)
    trainer.run(batches(), max_epochs=1)
    ember.begin(trainer)
    name,handlers = ember.te.fname,[len(hs) for hs in trainer._event_handlers.values()]
    trainer.run(batches(), max_epochs=1)
    assert ember.report['run']!=name and [len(hs) for hs in trainer._event_handlers.values()]==handlers
    assert ember.te is None and left(model)==before and '_handle_exception' not in vars(trainer)


def test_two_optimizers():
    ember,model = callback(),seeded()
    opts = momentum(model.a),momentum(model.b)
    def step(trainer, xy):
        for o in opts:
            o.zero_grad()
            loss = loss_of(model, *xy)
            loss.backward(); o.step()
        return {'loss': loss.item()}
    trainer = ignite().engine.Engine(step)
    ember.attach(trainer, model, opts)
    trainer.run(batches(), max_epochs=1)
    assert steps_of(ember)==[0, 1, 2, 3] and [*numbers(ember, 'learning_rate_1')]==[*numbers(ember, 'loss')]==[0, 1, 2, 3]


def test_wrong_arguments_at_once():
    with pytest.raises(TypeError, match="No argument of EmberCallback 'stat'.*Known"): callback(stat='full')
    with pytest.raises(TypeError, match='takes model from the trainer'): callback(model=None)


@pytest.mark.release
@pytest.mark.slow
def test_two_processes(tmp_path):
    "Each process has half of the batches; gradients are the mean over both processes."
    ignite()
    programs.ranks(f'''
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch
import torch.distributed as dist
from looped import batches, loss_of, momentum, seeded
from ignite.engine import Engine
from torchember.integrations.ignite import EmberCallback
dist.init_process_group('gloo')
model = torch.nn.parallel.DistributedDataParallel(seeded())
opt,ember = momentum(model),EmberCallback(name='both')
def step(engine, batch):
    opt.zero_grad()
    loss = loss_of(model, *batch)
    loss.backward(); opt.step()
    return loss.item()
trainer = Engine(step)
ember.attach(trainer, model, opt)
trainer.run(batches(8)[dist.get_rank()::2])
assert ember.te is None and ember.report['steps']==4
dist.destroy_process_group()
''', TORCHEMBER_HOME=tmp_path)
    df = read('both', home=tmp_path)
    pairs = [(torch.cat([a, c]), torch.cat([b, d])) for (a,b),(c,d) in zip(batches(8)[::2], batches(8)[1::2], strict=True)]
    want = {(k[0], k[1].split('.', 1)[-1], k[3]): r for k,r in plain(pairs).items() if k[2]=='weight_grad'}
    got = df[df.ttype=='weight_grad']
    assert sorted(set(df.step))==[0, 1, 2, 3] and len(got)==len(want) and set(df[df.ttype=='scalar'].step)=={0, 1, 2, 3}
    for r in got.to_dict('records'): assert r['mean']==pytest.approx(want[r['step'], r['module'].split('.', 1)[-1], r['tname']]['mean'], rel=1e-5, abs=1e-7)
