"Tests of a `torchEmber` in Lightning, which steps with closures and may not call the root: rows equal those of a plain loop"
import functools
import logging
import warnings

import pytest
import torch
from looped import ALL, Net, batches, ears, grads, heard, left, loss_of, momentum, said_of_parameters, same, seeded, steps, table, training
from torch import nn

from torchember import torchEmber


@functools.cache
def lightning():
    "Import Lightning in the fixture, because the import takes seconds."
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return pytest.importorskip('lightning.pytorch')


@functools.cache
def kinds():
    class Lit(lightning().LightningModule):
        at = 0
        def __init__(self, make=momentum, **options):
            super().__init__()
            self.net,self.make,self.seen,self.options = Net(),make,{},options

        def forward(self, x): return self.net(x)
        def part(self): return self if self.options.get('root') else self.net
        def training_step(self, xy, i): self.at = i; return loss_of(self.part(), *xy)
        def validation_step(self, xy, i): self.part()(torch.full_like(xy[0], 100.))
        # If called several times for a batch, the last gradients stay
        def on_before_optimizer_step(self, optimizer): self.seen[self.at] = grads(self)
        def configure_optimizers(self): return self.make(self)

    class Manual(Lit):
        automatic_optimization = False
        def training_step(self, xy, i):
            opts = self.optimizers()
            opts = opts if isinstance(opts, list) else [opts]
            n = self.options.get('accumulate', 1)
            self.manual_backward(loss_of(self.part(), *xy, n))
            if (i+1)%n: return
            for opt in opts: opt.step()
            for opt in opts: opt.zero_grad()

    class Arm(lightning().Callback):
        def __init__(self, how='raw', log=False, **options): self.how,self.logs,self.options = how,log,options

        def on_train_start(self, trainer, module):
            ready = {'raw': lambda: trainer.optimizers[0], 'all': lambda: trainer.optimizers, 'wrapped': module.optimizers, 'none': lambda: None}
            self.before = left(module.net),ears(*trainer.optimizers)
            self.te = torchEmber(module, optimizer=ready[self.how](), **self.options)

        def on_train_batch_end(self, trainer, module, outputs, batch, i):
            if self.logs: self.te.log(loss=outputs['loss'], number=i)

        def on_train_end(self, trainer, module):
            self.te.close()
            assert self.before==(left(module.net), ears(*trainer.optimizers))
    return Lit, Manual, Arm


def fit(model, arm, data, folder, **options):
    "Train with Lightning, and return the ember."
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    loader = lambda d: torch.utils.data.DataLoader(d, batch_size=None)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        trainer = lightning().Trainer(**{**dict(accelerator='cpu', max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder, callbacks=[arm]), **options})
    with heard() as said: trainer.fit(model, loader(data), loader(data[:1]) if options.get('limit_val_batches') else None)
    assert not said, said
    return arm.te


def plain(data, accumulate=1, clip=None, ttypes=ALL, **options):
    "Train the same model with a plain loop, and return the ember."
    model = seeded(functools.partial(kinds()[0], **options))
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=ttypes) as te:
        for i,(x,y) in enumerate(data):
            (loss_of(model.part(), x, y)/accumulate).backward()
            if (i+1)%accumulate: continue
            if clip: nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
    return table(te)


@pytest.mark.parametrize('accumulate', [1, 2])
@pytest.mark.parametrize('how', ['raw', 'wrapped'])
@pytest.mark.parametrize('root', [True, False], ids=['self(x)', 'self.net(x)'])
def test_automatic_optimization(accumulate, how, root, tmp_path):
    Lit,_,Arm = kinds()
    model = seeded(lambda: Lit(root=root))
    te = fit(model, Arm(how, ttypes=ALL), batches(), tmp_path, accumulate_grad_batches=accumulate)
    same(table(te), plain(batches(), accumulate, root=root))
    said_of_parameters(te, 'weight_grad', model.seen.values())


@pytest.mark.parametrize('accumulate', [1, 2])
@pytest.mark.parametrize('how', ['raw', 'wrapped'])
def test_manual_optimization(accumulate, how, tmp_path):
    _,Manual,Arm = kinds()
    model = seeded(lambda: Manual(accumulate=accumulate))
    te = fit(model, Arm(how, ttypes=ALL), batches(), tmp_path)
    got = {(k[0], k[1].replace('model(Manual)', 'model(Lit)'), *k[2:]): r for k,r in table(te).items()}
    same(got, plain(batches(), accumulate))


@pytest.mark.parametrize('how', ['all', 'wrapped'])
def test_manual_optimization_of_two(how, tmp_path):
    "With two optimizers, a step ends when both have stepped."
    _,Manual,Arm = kinds()
    def both(model): return momentum(model.net.a), momentum(model.net.b)
    te = fit(seeded(lambda: Manual(both)), Arm(how, ttypes=ALL), batches(), tmp_path)
    got = {(k[0], k[1].replace('model(Manual)', 'model(Lit)'), *k[2:]): r for k,r in table(te).items()}
    same(got, plain(batches()))


def test_gradients_are_clipped_in_the_closure(tmp_path):
    "The rows have the clipped gradients that the optimizer uses, not the gradients directly after backward."
    Lit,_,Arm = kinds()
    te = fit(seeded(Lit), Arm(ttypes=ALL), batches(), tmp_path, gradient_clip_val=.01)
    same(table(te), plain(batches(), clip=.01))
    assert max(abs(r['max']) for r in table(te, 'weight_grad').values())<=.01


@pytest.mark.parametrize('how', ['raw', 'wrapped'])
@pytest.mark.parametrize('root', [True, False], ids=['self(x)', 'self.net(x)'])
def test_validation_epochs_in_between(how, root, tmp_path):
    "Rows of a validation belong to the step before it. The training has two epochs of three steps."
    Lit,_,Arm = kinds()
    data = batches(3)
    te = fit(seeded(lambda: Lit(root=root)), Arm(how, ttypes=ALL), data, tmp_path, max_epochs=2, limit_val_batches=1)
    same(training(te), plain(data*2, root=root))
    rows = [r for r in table(te, 'input', phase='eval').values() if r['module'].endswith('.net(Net)')]
    assert [(r['step'], r['min'], r['max']) for r in rows]==[(2, 100, 100), (5, 100, 100)]


def test_validation_between_micro_batches(tmp_path):
    Lit,_,Arm = kinds()
    te = fit(seeded(Lit), Arm(ttypes=ALL), batches(), tmp_path, accumulate_grad_batches=2, val_check_interval=1, limit_val_batches=1)
    assert te.t.df.pipe(lambda d: d[d.phase!='eval']).step.unique().tolist()==[0, 1]
    d = te.t.df # Two evaluations follow each step; only the last one has rows
    d = d[(d.phase=='eval') & (d.ttype=='input') & d.module.str.endswith('.net(Net)')]
    assert [*zip(d.step, d['min'], d['max'], strict=True)]==[(s, 100, 100) for s in (0, 1)]


def test_no_optimizer_handed_over(tmp_path):
    "If the ember gets no optimizer, each forward pass is a step, also if the root module is never called."
    Lit,_,Arm = kinds()
    ttypes = ('input', 'output', 'weight')
    te = fit(seeded(Lit), Arm('none', ttypes=ttypes), batches(), tmp_path)
    same(table(te), plain(batches(), ttypes=ttypes))


@pytest.mark.parametrize('accumulate', [1, 2])
def test_what_a_callback_logs(accumulate, tmp_path):
    "Values logged in on_train_batch_end belong to the last step, also between micro-batches."
    Lit,_,Arm = kinds()
    te = fit(seeded(Lit), Arm(log=True), batches(), tmp_path, accumulate_grad_batches=accumulate)
    assert [(r['step'], r['number']) for r in te.t.lines() if r['tname']=='log']==[(i//accumulate, i) for i in range(4)]
    assert steps(te)==list(range(4//accumulate))


def test_lbfgs(tmp_path):
    "If an optimizer calls its closure several times, the gradients of the last call are recorded."
    Lit,_,Arm = kinds()
    model = seeded(lambda: Lit(lambda m: torch.optim.LBFGS(m.parameters(), .5, max_iter=3)))
    te = fit(model, Arm('wrapped', ttypes=('weight', 'weight_grad', 'update')), batches(3), tmp_path)
    said_of_parameters(te, 'weight_grad', model.seen.values())
    assert steps(te)==[0, 1, 2] and len(table(te, 'weight'))==len(table(te, 'update'))==12


def test_a_wrapper_without_a_trainer():
    "An optimizer in Lightning's wrapper works without a Trainer."
    lightning()
    from lightning.pytorch.core.optimizer import LightningOptimizer
    model = seeded()
    opt = momentum(model)
    wrapped = LightningOptimizer(opt)
    before = left(model),ears(opt, wrapped)
    with torchEmber(model, optimizer=wrapped, ttypes=ALL) as te:
        for x,y in batches(3):
            loss_of(model, x, y).backward()
            opt.step()
            opt.zero_grad()
    assert steps(te)==[0, 1, 2] and len(table(te, 'weight_grad'))==12
    assert before==(left(model), ears(opt, wrapped))
