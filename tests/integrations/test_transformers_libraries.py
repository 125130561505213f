"Trainers of trl, adapters of peft, and options of the transformers Trainer. Expected tensors come from hooks of torch"
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from callback_runs import bits, numbers, ran, rows_of, steps_of
from looped import batches, heard, same, seeded, table
from oracle import says
from test_transformers_callback import Scored, callback, kinds, plain, train, trainer_for
from torch import nn

from torchember import read, torchEmber

pytestmark = pytest.mark.filterwarnings('ignore')
@pytest.fixture(autouse=True)
# Models are created locally, so nothing is downloaded
def offline(monkeypatch): monkeypatch.setenv('HF_HUB_OFFLINE', '1')


words = '<pad> <eos> a b c d e f g h i j k l m n o p'.split()


def path_of(row): return '.'.join(filter(None, (re.sub(r'\([^)]*\)', '', row['module']).removeprefix('model').lstrip('.'), row.get('pname'))))


@functools.cache
def witness_kind():
    class Witness(kinds()[0].TrainerCallback):
        "Stores outputs, weights and gradients from torch hooks and the optimizer: (type, step, path) -> tensor"
        def on_train_begin(self, args, state, control, model=None, **more):
            self.tensors,self.others = {},0 # others: number of passes that are no training
            def hook(path):
                def hear(m, args, out):
                    trains = m.training and torch.is_grad_enabled()
                    self.others += not trains
                    if trains and isinstance(out, torch.Tensor): self.tensors['output', state.global_step, path] = out.detach().clone()
                return hear
            self.hooks = [m.register_forward_hook(hook(n)) for n,m in model.named_modules() if isinstance(m, nn.Linear|nn.Embedding)]

        def on_pre_optimizer_step(self, args, state, control, model=None, **more):
            for n,p in model.named_parameters():
                self.tensors['weight', state.global_step, n] = p.detach().clone()
                if p.grad is not None: self.tensors['weight_grad', state.global_step, n] = p.grad.clone()

        def on_train_end(self, *args, **more):
            for h in self.hooks: h.remove()
    return Witness()


def agree(ember, witness):
    "Check that rows equal the tensors, and that there are no other rows of parameters."
    rows = [r for r in ran(ember).t.lines() if r['ttype'] in ('weight', 'weight_grad') or r['ttype']=='output' and r['tname']=='output_0']
    got = {(r['ttype'], r['step'], path_of(r)): r for r in rows}
    assert len(got)==len(rows) and witness.tensors.keys()<=got.keys(), sorted(map(str, witness.tensors.keys()-got.keys()))[:5]
    assert {k for k in got if k[0]!='output'}=={k for k in witness.tensors if k[0]!='output'}
    for k,x in witness.tensors.items(): says(got[k], x)


# ---- trainers of trl

@functools.cache
def trl():
    kinds()
    datasets = pytest.importorskip('datasets')
    datasets.disable_progress_bars()
    return pytest.importorskip('trl')


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    t = Tokenizer(models.WordLevel({w: i for i,w in enumerate(words)}, unk_token='<eos>'))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return kinds()[0].PreTrainedTokenizerFast(tokenizer_object=t, pad_token='<pad>', eos_token='<eos>', unk_token='<eos>')


def small(folder, kind='LlamaForCausalLM'):
    "Load a small model from a folder, because trl loads its reference model from the same folder."
    transformers = kinds()[0]
    config = transformers.LlamaConfig(vocab_size=len(words), hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1, num_labels=1)
    seeded(lambda: getattr(transformers, kind)(config)).save_pretrained(folder/'model')
    return getattr(transformers, kind).from_pretrained(folder/'model', dtype=torch.float32)


told = {'SFT': [dict(text='a b c d e'), dict(text='f g h'), dict(text='a c e'), dict(text='b d f')],
    'DPO': [dict(prompt='a b ', chosen='c d', rejected='e f'), dict(prompt='b ', chosen='c d e', rejected='e')],
    'Reward': [dict(chosen='a c d', rejected='a e f'), dict(chosen='b c d e', rejected='b e')],
    'GRPO': [dict(prompt='a b'), dict(prompt='b')]}


def trl_trainer(folder, what, *callbacks, peft=False, **options):
    t = trl()
    from datasets import Dataset
    args = getattr(t, f'{what}Config')(output_dir=str(folder), **{**dict(max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy='no',
        logging_steps=1, bf16=False, per_device_train_batch_size=2, learning_rate=.01, gradient_checkpointing=False), **options})
    more = dict(reward_funcs=lambda completions, **_: [float(c.count('a')+i) for i,c in enumerate(completions)]) if what=='GRPO' else {}
    if peft: more['peft_config'] = lora()
    torch.manual_seed(0)
    model = small(folder, 'LlamaForSequenceClassification' if what=='Reward' else 'LlamaForCausalLM')
    trainer = getattr(t, f'{what}Trainer')(model, args=args, train_dataset=Dataset.from_list(told[what]*4), processing_class=tokenizer(),
        callbacks=[*callbacks], **more)
    trainer.remove_callback(kinds()[0].trainer_callback.PrinterCallback)
    return trainer


grpo = dict(num_generations=2, max_completion_length=4, temperature=1.)
asks = {('SFT', False): False, ('SFT', True): False, ('DPO', False): False, ('DPO', True): True, ('Reward', False): False,
    ('GRPO', False): True, ('GRPO', True): True} # (trainer, with an adapter) -> whether it asks the model for more than a loss


@pytest.mark.slow # trl takes seconds to import
@pytest.mark.parametrize(('what', 'peft'), [*asks], ids=[f"{w}{'-peft' if p else ''}" for w,p in asks])
def test_trainers_of_trl(what, peft, tmp_path):
    "Passes of the reference model and of text generation leave no rows, also if the trained model itself generates."
    ember,witness = callback(name='mine'),witness_kind()
    options = dict(beta=.1, **grpo) if what=='GRPO' else {}
    trainer = trl_trainer(tmp_path/'a', what, ember, witness, peft=peft, **options)
    with heard() as said: trainer.train()
    assert not said and ember.te is None and steps_of(ember)==[0, 1, 2]
    agree(ember, witness)
    assert bool(witness.others)==asks[what, peft]
    assert not [r for r in ran(ember).t.lines() if r.get('phase') or r['call']>0 and r['ttype']!='scalar' and 'rotary' not in r['module']]
    assert {*numbers(ember, 'loss')}=={0, 1, 2}
    alone = trl_trainer(tmp_path/'b', what, peft=peft, **options)
    alone.train()
    assert bits(trainer.model.state_dict(), alone.model.state_dict())
    if peft: assert all('lora_' in path_of(r) for r in ran(ember).t.lines() if r['ttype']=='weight_grad')


@pytest.mark.slow
def test_what_is_generated_for_several_steps(tmp_path):
    "Rows of micro-batches of a step are merged. Passes that generate text leave no rows."
    ember,seen = callback(ttypes=('output',)),[]
    trainer = trl_trainer(tmp_path, 'GRPO', ember, gradient_accumulation_steps=2, **grpo)
    trainer.model.get_input_embeddings().register_forward_hook(lambda m, args, out: seen.append(out.detach()) if torch.is_grad_enabled() else None)
    trainer.train()
    rows = [r for r in ran(ember).t.lines() if r['module'].endswith('embed_tokens(Embedding)')]
    assert [r['step'] for r in rows]==[0, 1, 2] and len(seen)==6
    for r,a,b in zip(rows, seen[::2], seen[1::2], strict=True): assert r['mean']==pytest.approx(torch.cat([a.flatten(), b.flatten()]).mean().item(), abs=1e-7)


# ---- adapters of peft

def lora():
    return pytest.importorskip('peft').LoraConfig(r=2, lora_alpha=4, target_modules=['q_proj', 'v_proj'], lora_dropout=0., task_type='CAUSAL_LM')


def adapted(folder):
    peft = pytest.importorskip('peft')
    model = small(folder)
    torch.manual_seed(0)
    return peft.get_peft_model(model, lora())


def ids(n=3):
    g = torch.Generator().manual_seed(1)
    return [torch.randint(2, len(words), (2, 6), generator=g) for _ in range(n)]


def language(folder, model, *callbacks, data=None, **options):
    transformers,Trainer = kinds()
    args = transformers.TrainingArguments(str(folder), **{**dict(max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy='no',
        logging_steps=1, learning_rate=.01, max_grad_norm=0., lr_scheduler_type='constant', optim='adamw_torch'), **options})
    trainer = Trainer(model, args, train_dataset=[dict(input_ids=i, labels=i) for i in data or ids()], callbacks=[*callbacks])
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    return trainer


def plainly(model, data=None, accumulate=1, clip=None, **options):
    "Return the rows of the same model trained by a plain loop."
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], .01, weight_decay=0.)
    model.train()
    with torchEmber(model, optimizer=opt, **options) as te:
        for i,x in enumerate(data or ids()):
            (model(input_ids=x, labels=x).loss/accumulate).backward()
            if (i+1)%accumulate: continue
            if clip: nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step(); opt.zero_grad()
    return table(te)


@pytest.mark.slow
def test_an_adapter(tmp_path):
    ember = callback(name='mine')
    model = adapted(tmp_path)
    with heard() as said: language(tmp_path/'a', model, ember, save_strategy='steps', save_steps=3).train()
    assert not said
    same(rows_of(ember), plainly(adapted(tmp_path)))
    rows = [*ran(ember).t.lines()]
    attention = 'base_model.model.model.layers.0.self_attn'
    def of(ttype): return {path_of(r) for r in rows if r['ttype']==ttype}
    adapters = {f'{attention}.{p}.lora_{ab}.default.weight' for p in ('q_proj', 'v_proj') for ab in 'AB'}
    assert of('weight_grad')==adapters and of('weight')=={n for n,_ in model.named_parameters()}
    assert of('weight')>adapters | {f'{attention}.q_proj.base_layer.weight'}
    alone = adapted(tmp_path)
    language(tmp_path/'b', alone, save_strategy='steps', save_steps=3).train()
    a,b = (tmp_path/n/'checkpoint-3' for n in 'ab')
    assert sorted(os.listdir(a))==sorted(os.listdir(b)) and 'adapter_model.safetensors' in os.listdir(a)
    assert (a/'adapter_model.safetensors').read_bytes()==(b/'adapter_model.safetensors').read_bytes()
    assert 'ember' not in (a/'trainer_state.json').read_text().lower()
    merged,wanted = model.merge_and_unload(),alone.merge_and_unload()
    assert bits(merged.state_dict(), wanted.state_dict()) and type(merged).__name__=='LlamaForCausalLM'
    assert not [m for m in merged.modules() if 'forward' in m.__dict__]
    assert torch.equal(merged(input_ids=ids()[0]).logits, wanted(input_ids=ids()[0]).logits)


# ---- options of the transformers Trainer

@pytest.mark.slow
@pytest.mark.parametrize('options', [dict(gradient_checkpointing=True),
    dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=False)),
    dict(gradient_checkpointing=True, gradient_accumulation_steps=3), dict(max_grad_norm=.01)],
    ids=['checkpointing', 'not reentrant', 'accumulate', 'clip'])
def test_gradients_are_those_that_the_optimizer_has(options, tmp_path):
    "The rows have accumulated and clipped gradients. Recomputation by checkpointing in the backward pass is no other pass."
    ember = callback()
    data = ids(3*options.get('gradient_accumulation_steps', 1))
    trainer = language(tmp_path/'a', small(tmp_path), ember, data=data, **options)
    trainer.model.config.use_cache = False
    with heard() as said: trainer.train()
    assert not said
    other = small(tmp_path)
    other.config.use_cache = False
    same({k: r for k,r in rows_of(ember).items() if k[2]!='input'},
        {k: r for k,r in plainly(other, data, options.get('gradient_accumulation_steps', 1), options.get('max_grad_norm')).items() if k[2]!='input'})


@pytest.mark.slow
@pytest.mark.release # This test compiles
@pytest.mark.parametrize('backend', ['aot_eager', 'inductor'])
def test_compiled_and_accumulated(backend, tmp_path):
    ember = callback(ttypes=('weight', 'weight_grad'))
    try: language(tmp_path/'a', small(tmp_path), ember, data=ids(6), torch_compile=True, torch_compile_backend=backend, gradient_accumulation_steps=2).train()
    finally: torch.compiler.reset()
    want,got = plainly(small(tmp_path), ids(6), accumulate=2, ttypes=('weight', 'weight_grad')),rows_of(ember)
    assert got.keys()==want.keys() and {k[0] for k in got}=={0, 1, 2}
    for k,r in want.items(): assert [got[k][n] for n in ('mean', 'max')]==pytest.approx([r[n] for n in ('mean', 'max')], abs=1e-5)


def test_a_schedule_goes_on_from_a_checkpoint(tmp_path):
    def rates(ember): return numbers(ember, 'learning_rate')
    options = dict(lr_scheduler_type='linear', data=ids(6), max_steps=6, save_strategy='steps', save_steps=3)
    whole = callback()
    language(tmp_path/'a', small(tmp_path), whole, **options).train()
    again = callback(name='mine')
    language(tmp_path/'a', small(tmp_path), again, **options).train(resume_from_checkpoint=str(tmp_path/'a'/'checkpoint-3'))
    assert steps_of(again)==[3, 4, 5]
    same(rows_of(again), {k: r for k,r in rows_of(whole).items() if k[0]>2})
    assert rates(whole)==pytest.approx({i: .01*(6-i)/6 for i in range(6)})
    assert rates(again)=={i: v for i,v in rates(whole).items() if i>2}


def test_stopped_early_and_back_to_the_best(tmp_path):
    "Only evaluations of the training loop are recorded, also if the Trainer loads the best model at the end."
    transformers = kinds()[0]
    def run(folder, *callbacks):
        torch.manual_seed(0)
        trainer = trainer_for(folder, data=batches(8), eval_strategy='steps', eval_steps=1, save_strategy='steps', save_steps=1, load_best_model_at_end=True,
            metric_for_best_model='loss', greater_is_better=True, model=seeded(Scored))
        for c in (*callbacks, transformers.EarlyStoppingCallback(2)): trainer.add_callback(c)
        trainer.train()
        return trainer
    ember = callback(name='mine')
    trainer,alone = run(tmp_path/'a', ember),run(tmp_path/'b')
    # Early stopping wrongly expects a rising loss here, so it stops after two steps without a new best
    assert trainer.state.best_global_step+2==trainer.state.global_step<8
    steps = [*range(trainer.state.global_step)]
    assert steps_of(ember)==[*numbers(ember, 'eval_loss')]==steps and bits(trainer.model.state_dict(), alone.model.state_dict())
    weights = {path_of(r): r for r in ran(ember).t.lines() if r['ttype']=='weight' and r['step']==trainer.state.best_global_step}
    # The weights after the best step equal the recorded weights before the next step
    for n,p in trainer.model.named_parameters(): says(weights[n], p)
    assert {r['step'] for r in table(ran(ember), phase='eval').values()}=={*steps} and not [m for m in trainer.model.modules() if 'forward' in m.__dict__]


def test_evaluations_that_others_ask_for(tmp_path):
    "Evaluations that a callback starts are not recorded, even in the middle of a step."
    transformers = kinds()[0]
    class Asks(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args, **more): self.trainer.evaluate()
        def on_substep_end(self, *args, **more): self.trainer.evaluate()
        def on_save(self, *args, **more): self.trainer.predict(self.trainer.eval_dataset)
    for asked in (False, True):
        ember,other = callback(),Asks()
        other.trainer = trainer_for(tmp_path, ember, gradient_accumulation_steps=2, save_strategy='steps', save_steps=1,
            **dict(eval_strategy='steps', eval_steps=2) if asked else {})
        other.trainer.add_callback(other)
        other.trainer.train()
        assert steps_of(ember)==[0, 1]
        assert {r['step'] for r in ran(ember).t.lines() if r.get('phase')}==({1} if asked else set())


def test_after_an_exception_only_training_is_recorded(tmp_path):
    ember,model = callback(name='mine'),seeded(Scored)
    model.fails = 3, ValueError('broken')
    with pytest.raises(ValueError, match='broken'): train(tmp_path, ember, model=model)
    before,x = [*ember.te.t.lines()],torch.ones(2, 4)
    model.fails = None
    model.eval(); model(x, torch.tensor([0, 1]))
    with torch.no_grad(): model.train()(x, torch.tensor([0, 1]))
    assert [*ember.te.t.lines()]==before
    ember.close()
    assert not [m for m in model.modules() if 'forward' in m.__dict__]


@pytest.mark.slow
@pytest.mark.release # a test with two processes of Lightning is in every run
def test_two_processes(tmp_path):
    "Each process has half of the batches; gradients are the mean over both processes."
    pytest.importorskip('accelerate')
    program = f'''
import sys, warnings; warnings.filterwarnings('ignore'); sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
import torch, transformers
from looped import batches, momentum, seeded
from test_transformers_callback import Scored
from torchember.integrations.transformers import EmberCallback
rows = [dict(x=x[0], labels=y[0]) for x,y in batches(8, size=1)]
model = seeded(Scored)
opt,ember = momentum(model),EmberCallback(name='both')
args = transformers.TrainingArguments({str(tmp_path/'out')!r}, max_steps=4, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy='no', logging_steps=1,
    max_grad_norm=0., per_device_train_batch_size=1, ddp_backend='gloo')
class Trainer(transformers.Trainer):
    def _get_train_sampler(self, *args): return torch.utils.data.SequentialSampler(self.train_dataset)
Trainer(model, args, train_dataset=rows, callbacks=[ember], optimizers=(opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1.))).train()
assert ember.te is None and ember.report['steps']==4
'''
    (tmp_path/'both.py').write_text(program)
    out = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', tmp_path/'both.py'],
        env=dict(os.environ, TORCHEMBER_HOME=str(tmp_path)), capture_output=True, text=True, timeout=300)
    assert not out.returncode, out.stderr[-3000:]
    df = read('both', home=tmp_path)
    pairs = [(torch.cat([a, c]), torch.cat([b, d])) for (a,b),(c,d) in zip(batches(8, size=1)[::2], batches(8, size=1)[1::2], strict=True)]
    want = {(k[0], k[1], k[3]): r for k,r in plain(pairs).items() if k[2]=='weight_grad'}
    got = df[df.ttype=='weight_grad']
    assert sorted(set(df.step))==[0, 1, 2, 3] and len(got)==len(want)
    for r in got.to_dict('records'): assert r['mean']==pytest.approx(want[r['step'], r['module'], r['tname']]['mean'], rel=1e-5, abs=1e-7)
    assert set(df[df.loss.notna()].step)=={0, 1, 2, 3}
