"Tests of `EmberCallback` in a transformers Trainer: rows equal those of a plain loop, and the training is unchanged"
import functools
import os

import pytest
import torch
import torch.nn.functional as F
from callback_runs import Ran, bits, numbers, ran, rows_of, steps_of
from looped import Net, batches, heard, momentum, same, seeded, table, training
from torch import nn

from torchember import torchEmber

pytestmark = pytest.mark.filterwarnings('ignore')


class Scored(Net):
    "A model with the loss among its outputs, as the Trainer needs it"
    fails = None # (number of the training pass that fails, exception)
    passes = 0
    def forward(self, x, labels=None):
        self.passes += self.training
        if self.fails and self.training and self.passes==self.fails[0]: raise self.fails[1]
        logits = super().forward(x)
        return {'loss': F.cross_entropy(logits, labels), 'logits': logits}


@functools.cache
def kinds():
    "Import the classes in the fixture, because the import takes seconds."
    pytest.importorskip('accelerate')
    transformers = pytest.importorskip('transformers')
    transformers.logging.set_verbosity_error()
    class Trainer(transformers.Trainer):
        "A Trainer that uses prepared batches in their order, and the loss of the model"
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.model_accepts_loss_kwargs = False

        def get_train_dataloader(self): return torch.utils.data.DataLoader(self.train_dataset, 1, collate_fn=first)
        def get_eval_dataloader(self, *args): return torch.utils.data.DataLoader([hundred], batch_size=None)
        def get_test_dataloader(self, *args): return self.get_eval_dataloader()
    return transformers, Trainer


def first(batch): return batch[0]


hundred = dict(x=torch.full((2, 4), 100.), labels=torch.tensor([0, 1]))


def callback(**options):
    kinds()
    from torchember.integrations.transformers import EmberCallback
    return EmberCallback(**options)


def trainer_for(folder, ember=None, data=None, model=None, **options):
    transformers,Trainer = kinds()
    model,data = model or seeded(Scored),data or batches()
    args = transformers.TrainingArguments(str(folder), **{**dict(max_steps=len(data)//options.get('gradient_accumulation_steps', 1), use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy='no', logging_steps=1, max_grad_norm=0., lr_scheduler_type='constant'), **options})
    opt = momentum(model)
    named = [dict(x=x, labels=y) for x,y in data]
    trainer = Trainer(model, args, train_dataset=named, eval_dataset=named, callbacks=[ember] if ember else [],
        optimizers=(opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1.)))
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    return trainer


def train(folder, ember=None, resume=None, **options):
    "Train, and return the trainer. Without `ember`, the training is not recorded."
    trainer = trainer_for(folder, ember, **options)
    with heard() as said: trainer.train(resume_from_checkpoint=resume)
    assert not said, said
    return trainer


def plain(data, accumulate=1, clip=None, bf16=False, **options):
    model = seeded(Scored)
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, **options) as te:
        for i,(x,y) in enumerate(data):
            with torch.autocast('cpu', torch.bfloat16, enabled=bf16): loss = model(x=x, labels=y)['loss']/accumulate
            loss.backward()
            if (i+1)%accumulate: continue
            if clip: nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
    return table(te)


@pytest.mark.parametrize(('options', 'by_hand'), [({}, {}), (dict(gradient_accumulation_steps=2), dict(accumulate=2)),
    (dict(max_grad_norm=.01), dict(clip=.01))], ids=['plain', 'accumulate', 'clip'])
def test_rows_equal_those_of_a_plain_loop(options, by_hand, tmp_path):
    ember = callback()
    model = train(tmp_path, ember, **options).model
    same(rows_of(ember), plain(batches(), **by_hand))
    assert bits(model.state_dict(), train(tmp_path, **options).model.state_dict())


def test_gradients_before_and_after_clipping(tmp_path):
    both = ('weight_grad', 'unclipped_grad')
    ember = callback(ttypes=both)
    train(tmp_path, ember, max_grad_norm=.01)
    same(rows_of(ember), want := plain(batches(), clip=.01, ttypes=both))
    assert {k[2] for k in want}=={*both}


def test_bf16(tmp_path):
    "Only rows of parameters are compared, because the Trainer converts outputs to float32."
    ember = callback(ttypes=('weight', 'weight_grad'))
    train(tmp_path, ember, bf16=True)
    same(rows_of(ember), {k: r for k,r in plain(batches(), bf16=True).items() if k[2] in ('weight', 'weight_grad')})


def test_numbers_of_the_step_that_closed(tmp_path):
    ember,data = callback(),batches()
    train(tmp_path, ember, data=data, max_steps=8, max_grad_norm=1., eval_strategy='steps', eval_steps=4)
    model,losses = seeded(Scored),[]
    opt = momentum(model)
    for x,y in data*2:
        loss = model(x, y)['loss']
        loss.backward(); nn.utils.clip_grad_norm_(model.parameters(), 1.); opt.step(); opt.zero_grad()
        losses.append(loss.item())
    assert numbers(ember, 'loss')==pytest.approx(dict(enumerate(losses)), rel=1e-3)
    assert [*numbers(ember, 'learning_rate')]==[*numbers(ember, 'grad_norm')]==[*range(8)]
    assert [*numbers(ember, 'eval_loss')]==[3, 7] and [*numbers(ember, 'train_runtime')]==[7]
    assert {(r['step'], r['epoch']) for r in ran(ember).t.lines()}=={(i, i//4) for i in range(8)}


@pytest.mark.parametrize('on_start', [False, True])
def test_evaluation_inside_and_outside(on_start, tmp_path):
    ember = callback()
    trainer = train(tmp_path, ember, eval_strategy='steps', eval_steps=2, eval_on_start=on_start)
    trained = {k: r for k,r in rows_of(ember).items() if k[5]!='eval'}
    same(trained, plain(batches()))
    rows = table(ran(ember), 'input', phase='eval', tname='x', module='model(Scored)').values()
    assert [(r['step'], r['max']) for r in rows if r['step'] or not on_start]==[(1, 100), (3, 100)]
    before = [*ran(ember).t.lines()]
    trainer.evaluate(); trainer.predict(trainer.eval_dataset)
    assert [*ran(ember).t.lines()]==before


def test_nothing_in_checkpoints(tmp_path):
    for ember,folder in ((callback(), tmp_path/'a'), (None, tmp_path/'b')): train(folder, ember, save_strategy='steps', save_steps=2)
    a,b = (tmp_path/n/'checkpoint-4' for n in 'ab')
    assert sorted(os.listdir(a))==sorted(os.listdir(b))
    assert 'Ember' not in (a/'trainer_state.json').read_text()
    weights = next(n for n in os.listdir(a) if n.startswith(('model', 'pytorch_model')))
    assert (a/weights).read_bytes()==(b/weights).read_bytes()
    assert torch.load(a/'optimizer.pt').keys()==torch.load(b/'optimizer.pt').keys()


@pytest.mark.parametrize('named', [True, False])
def test_resume_from_checkpoint(named, tmp_path):
    whole,name = callback(),dict(name='mine') if named else {}
    train(tmp_path/'whole', whole, data=batches(6))
    train(tmp_path, callback(**name), data=batches(6), max_steps=3, save_strategy='steps', save_steps=3)
    ember = callback(**name)
    train(tmp_path, ember, data=batches(6), model=seeded(Scored, 5), resume=str(tmp_path/'checkpoint-3'))
    assert steps_of(ember)==[*range(0 if named else 3, 6)]
    same(rows_of(ember), {k: r for k,r in rows_of(whole).items() if named or k[0]>2})


def test_several_trainings(tmp_path):
    ember,names = callback(name='mine'),[]
    for _ in range(2):
        train(tmp_path, ember)
        names.append(ember.report['run'])
    assert names==['mine', 'mine_2'] and steps_of(ember)==[0, 1, 2, 3]


@pytest.mark.parametrize('error', [ValueError('broken'), KeyboardInterrupt()], ids=['error', 'Ctrl-C'])
def test_after_an_exception(error, tmp_path):
    "The Trainer does not notify callbacks of an exception. The next training or `close` ends the run."
    ember,model = callback(name='mine'),seeded(Scored)
    before = [m.__dict__.get('forward') for m in model.modules()]
    trainer = trainer_for(tmp_path, ember, model=model)
    model.fails = 3, error
    with pytest.raises(type(error)): trainer.train()
    before_it = [*ember.te.t.lines()]
    trainer.predict(trainer.eval_dataset)
    assert [*ember.te.t.lines()]==before_it and ember.te.armed
    lost = ember.te
    train(tmp_path, ember)
    assert ember.report['run']=='mine_2' and ember.te is None and not lost.armed
    same({k: r for k,r in training(Ran('mine')).items() if k[0]<2 and k[2]!='scalar'}, plain(batches(2)))
    assert [m.__dict__.get('forward') for m in model.modules()]==before


def test_with_ends_the_run(tmp_path):
    model = seeded(Scored)
    trainer = None
    with pytest.raises(ValueError, match='broken'), callback(name='mine') as ember:
        trainer = trainer_for(tmp_path, ember, model=model)
        model.fails = 3, ValueError('broken')
        trainer.train()
    assert ember.te is None and ember.report['recorded']>=2
    before = [*ran(ember).t.lines()]
    trainer.predict(trainer.eval_dataset)
    assert [*ran(ember).t.lines()]==before


def test_an_evaluation_that_a_callback_asks_for(tmp_path):
    "After an evaluation that a callback requests, training passes are recorded again."
    transformers = kinds()[0]
    class Asks(transformers.TrainerCallback):
        def on_step_end(self, *args, **more): self.trainer.evaluate()
    ember,asks = callback(),Asks()
    asks.trainer = trainer_for(tmp_path, ember)
    asks.trainer.add_callback(asks)
    asks.trainer.train()
    same(rows_of(ember), plain(batches()))


def test_a_trainer_with_a_loss_of_its_own(tmp_path):
    "A Trainer with its own loss function, like those of trl"
    transformers,Trainer = kinds()
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **more):
            self.log({'reward': 1., 'text': 'no number'})
            return model(**inputs)['loss']
    ember = callback()
    trainer = trainer_for(tmp_path, ember)
    trainer.__class__ = Own
    trainer.train()
    same(rows_of(ember), plain(batches()))
    assert set(numbers(ember, 'reward').values())=={1.}


def language(folder, ember=None, **options):
    transformers,Trainer = kinds()
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.)
    model = seeded(lambda: transformers.GPT2LMHeadModel(config))
    torch.manual_seed(1)
    data = [dict(input_ids=(ids := torch.randint(20, (2, 6))), labels=ids) for _ in range(3)]
    args = transformers.TrainingArguments(str(folder), **{**dict(max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy='no',
        logging_strategy='no'), **options})
    trainer = Trainer(model, args, train_dataset=data, callbacks=[ember] if ember else [])
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    return {n.replace('_orig_mod.', ''): p.detach() for n,p in trainer.model.named_parameters()}


def test_gradient_checkpointing(tmp_path):
    "The repeated forward pass of gradient checkpointing is not recorded as another pass."
    ttypes = 'output', 'weight', 'weight_grad'
    a,b = callback(ttypes=ttypes),callback(ttypes=ttypes)
    weights = language(tmp_path, a, gradient_checkpointing=True)
    language(tmp_path, b)
    assert bits(weights, language(tmp_path, gradient_checkpointing=True))
    def of(ember): return {k: r for k,r in table(ran(ember)).items() if k[2]!='scalar'}
    assert of(a).keys()==of(b).keys() and steps_of(a)==[0, 1, 2]
    for k,r in of(a).items(): assert r['mean']==pytest.approx(of(b)[k]['mean'], abs=1e-6)


@pytest.mark.release # This test compiles
@pytest.mark.slow
def test_torch_compile(tmp_path):
    ttypes = 'output', 'weight', 'weight_grad'
    a,b = callback(ttypes=ttypes),callback(ttypes=ttypes)
    try: language(tmp_path, a, torch_compile=True, torch_compile_backend='aot_eager')
    finally: torch.compiler.reset()
    language(tmp_path, b)
    def of(ember): return {k: r for k,r in table(ran(ember)).items() if k[2]!='scalar'}
    assert steps_of(a)==[0, 1, 2]
    for t in ('weight', 'weight_grad'):
        wanted = {k: r for k,r in of(b).items() if k[2]==t}
        assert {k for k in of(a) if k[2]==t}==wanted.keys()
        for k,r in wanted.items(): assert of(a)[k]['mean']==pytest.approx(r['mean'], abs=1e-5)


def test_wrong_arguments_at_once():
    with pytest.raises(TypeError, match="No argument of EmberCallback 'stat'.*Known"): callback(stat='full')
    with pytest.raises(TypeError, match='takes optimizer from the trainer'): callback(optimizer=None)
