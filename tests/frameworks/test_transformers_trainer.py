"Tests of a `torchEmber` in the transformers Trainer, which wraps the optimizer and evaluates: rows equal those of a plain loop"
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from looped import ALL, Net, batches, by_hand, heard, momentum, same, seeded, steps, table, training
from torch import nn

from torchember import torchEmber


class Scored(Net):
    "A model with the loss among its outputs, as the Trainer needs it"
    def forward(self, x, labels=None):
        logits = super().forward(x)
        return {'loss': F.cross_entropy(logits, labels), 'logits': logits}


def plain(data, accumulate=1, make=momentum, clip=None):
    model = seeded(Scored)
    opt = make(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        for i,(x,y) in enumerate(data):
            (model(x=x, labels=y)['loss']/accumulate).backward()
            if (i+1)%accumulate: continue
            if clip: nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
    return table(te)


@functools.cache
def kinds():
    "Import the classes in the fixture, because the import takes seconds."
    pytest.importorskip('accelerate')
    transformers = pytest.importorskip('transformers')
    class Arm(transformers.TrainerCallback):
        def __init__(self, logs, **options): self.logs,self.options,self.given = logs,options,None

        def on_train_begin(self, args, state, control, model=None, optimizer=None, **more):
            self.given,self.te = optimizer,torchEmber(model, optimizer=optimizer, **self.options)

        def on_step_end(self, args, state, control, **more):
            if self.logs: self.te.log(number=state.global_step)

        def on_evaluate(self, args, state, control, metrics=None, **more):
            if self.logs: self.te.log(eval_loss=metrics['eval_loss'], number=100*state.global_step)

        def on_train_end(self, *args, **more): self.te.close()

    class Trainer(transformers.Trainer):
        "A Trainer that uses prepared batches in their order, and the loss of the model"
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.model_accepts_loss_kwargs = False

        def get_train_dataloader(self): return torch.utils.data.DataLoader(self.train_dataset, batch_size=None)
        def get_eval_dataloader(self, *args): return torch.utils.data.DataLoader([hundred], batch_size=None)
    return transformers, Trainer, Arm


def train(model, data, folder, opt=None, logs=False, ttypes=ALL, **options):
    "Train with a callback that arms the model, and return the ember."
    transformers,Trainer,Arm = kinds()
    arm = Arm(logs, ttypes=ttypes)
    args = transformers.TrainingArguments(str(folder), **{**dict(max_steps=len(data)//options.get('gradient_accumulation_steps', 1), use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy='no', logging_strategy='no', max_grad_norm=0., lr_scheduler_type='constant'), **options})
    fixed = None if opt is None else torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1.)
    with heard() as said:
        with warnings.catch_warnings():
            Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=[arm], optimizers=(opt, fixed)).train()
    assert not said, said
    assert type(arm.given).__name__=='AcceleratedOptimizer'
    return arm.te


hundred = dict(x=torch.full((2, 4), 100.), labels=torch.tensor([0, 1]))


def named(data): return [dict(x=x, labels=y) for x,y in data]


@pytest.mark.parametrize('accumulate', [1, 2])
def test_a_callback_that_arms(accumulate, tmp_path):
    model = seeded(Scored)
    te = train(model, named(batches()), tmp_path, momentum(model), gradient_accumulation_steps=accumulate)
    same(table(te), plain(batches(), accumulate))


def test_gradients_are_clipped(tmp_path):
    "The rows have the clipped gradients that the optimizer uses."
    model = seeded(Scored)
    te = train(model, named(batches()), tmp_path, momentum(model), max_grad_norm=.01)
    same(table(te), plain(batches(), clip=.01))


def test_the_optimizer_that_the_trainer_makes(tmp_path):
    te = train(seeded(Scored), named(batches()), tmp_path, optim='adamw_torch', learning_rate=.01)
    same(table(te), plain(batches(), make=lambda m: torch.optim.AdamW(m.parameters(), .01, weight_decay=0.)))


@pytest.mark.parametrize('accumulate', [1, 2])
def test_evaluation_in_between(accumulate, tmp_path):
    "Rows of an evaluation belong to the step before it, and no training row changes."
    model = seeded(Scored)
    te = train(model, named(batches()), tmp_path, momentum(model), gradient_accumulation_steps=accumulate, eval_strategy='steps', eval_steps=1)
    same(training(te), plain(batches(), accumulate))
    rows = table(te, 'input', phase='eval', tname='x', module='model(Scored)').values()
    assert [(r['step'], r['min'], r['max']) for r in rows]==[(i, 100, 100) for i in range(4//accumulate)]


def test_what_a_callback_logs(tmp_path):
    "Values logged in on_step_end belong to the finished step, those in on_evaluate to the step before the evaluation."
    model = seeded(Scored)
    te = train(model, named(batches()), tmp_path, momentum(model), logs=True, eval_strategy='steps', eval_steps=2)
    assert {r['number']: r['step'] for r in te.t.lines() if r['tname']=='log'}=={1: 0, 2: 1, 200: 1, 3: 2, 4: 3, 400: 3}


def test_a_language_model(tmp_path):
    "A language model of transformers, which takes only keyword arguments and returns a ModelOutput, is recorded."
    transformers = kinds()[0]
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.)
    def make(): return transformers.GPT2LMHeadModel(config)
    data = [dict(input_ids=(ids := torch.randint(20, (2, 6))), labels=ids) for _ in range(3)]
    model,twin = seeded(make),seeded(make)
    te = train(model, data, tmp_path, momentum(model), ttypes=('output', 'weight', 'weight_grad'))
    opt = momentum(twin.train())
    with torchEmber(twin, optimizer=opt, ttypes=('output', 'weight', 'weight_grad')) as other:
        for d in data:
            twin(**d).loss.backward()
            opt.step()
            opt.zero_grad()
    assert steps(te)==[0, 1, 2]
    same(table(te), table(other))


def test_the_plain_loop_by_hand():
    "The plain loop here, in which the model computes the loss, equals the plain loop of other test files."
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes='weight_grad') as te: by_hand(model, opt, batches())
    same({(k[0], k[1].replace('Scored', 'Net'), *k[2:]): r for k,r in plain(batches()).items() if k[2]=='weight_grad'}, table(te))
