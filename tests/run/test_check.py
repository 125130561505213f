"Tests of `torchember check`, which runs the first step of a program and reports problems, and of `te.check_step`"
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import programs
import pytest
import torch
from looped import batches, loss_of, momentum, seeded, weights
from torch import nn

from torchember import diagnose, runs, torchEmber

root = Path(__file__).parents[2]
libraries = ('import torch._dynamo, torchember.ember, torchember.trained, torchember.health.first_step, pandas\n'
    'from torchember.measure import loading\nloading.loops()')
by_fork = 'import sys; from torchember.cli import main; sys.exit(main())'
checks = 15 # Number of rows in a table without findings of rules


def check(text, folder, *options, args=(), **env):
    "Run a program under `torchember check`. Its home is `folder/home`."
    (folder/'train.py').write_text(textwrap.dedent(text))
    return programs.run(by_fork, 'check', *options, 'train.py', *args, after=libraries, PYTHONPATH=f'{root}:{root/"tests"}', cwd=folder,
        TORCHEMBER_HOME=folder/'home', TMPDIR=folder, timeout=300, **env)


def tables(done): return [{r['check']: r for r in t['checks']} for t in json.loads(done.stdout[done.stdout.index('[\n'):])]


def left(folder): return [p.name for p in folder.iterdir() if p.name.startswith('torchember-check')]+[*(folder/'home').glob('log/*')]


forgotten = '''
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
opt = torch.optim.SGD(model.parameters(), .1)
HEAD
print('begins')
for step in range(1000):
    loss = nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.randint(3, (6,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print('step', step, 'ended')
'''
healthy = forgotten.replace('HEAD', '')
forgotten = forgotten.replace('HEAD', 'model[2] = nn.Linear(8, 3)')


def test_a_forgotten_head_fails_the_check(tmp_path):
    done = check(forgotten, tmp_path)
    assert (done.returncode, done.stderr)==(1, '')
    first,_,title,*lines = done.stdout.splitlines()
    assert first=='begins' and title=='Sequential (4 modules, 67 values, trained by SGD), the first step'
    found = [l for l in lines if l.startswith(('ERROR', 'WARNING'))]
    assert [re.split('  +|(?<=ERROR) +', l) for l in found]==[['ERROR', 'the optimizer has the parameters']]
    assert '`2` (2 parameters, 27 values) is not in the optimizer' in done.stdout
    assert left(tmp_path)==[]


def test_a_healthy_program_passes_after_one_step(tmp_path):
    done = check(healthy, tmp_path, '--fail-on', 'warning', '--json')
    assert (done.returncode, done.stderr)==(0, '') and 'step 0' not in done.stdout
    [table] = tables(done)
    assert len(table)==checks and {r['status'] for r in table.values()}<={'ok', 'not checked'}
    assert table['the step changes the weights']['text']=='4 of 4 trained weights changed'
    assert float(table['the loss is finite']['text'].removeprefix('loss is '))==pytest.approx(1.1, abs=.3)
    # Exact value, from the recorded updates
    assert table['updates have a usual size']['text'].startswith('a step changes a weight by 0.0')


@pytest.mark.release
def test_several_steps_and_a_kept_run(tmp_path):
    done = check(healthy, tmp_path, '--steps', '3', '--keep')
    assert done.returncode==0 and 'step 1 ended' in done.stdout and 'step 2 ended' not in done.stdout
    assert 'the first 3 steps' in done.stdout and re.search('torchember: the run is Sequential_', done.stderr)
    there = runs(tmp_path/'home')
    assert there.steps.tolist()==[3] and diagnose(there.name[0], home=tmp_path/'home').healthy
    assert check(healthy, tmp_path, '--home', tmp_path/'other').returncode==0 and len(runs(tmp_path/'other'))==1


@pytest.mark.parametrize(('code', 'why'), {
    'import torch\nmodel = torch.nn.Linear(2, 1)\nmodel(torch.ones(1, 2))': 'nothing was checked: it created no torch optimizer.',
    'import torch\nm = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), .1)': 'no module with the optimizer\'s parameters was called',
    'import torch\nm = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), .1)\nm(torch.ones(1, 2))': 'The program ended.',
    'import sys, torch\nm = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), .1)\nm(torch.ones(1, 2)); sys.exit(3)': 'SystemExit(3)'}.items())
def test_a_program_without_a_step_is_explained(tmp_path, code, why):
    done = check(code, tmp_path)
    assert done.returncode==2 and why in done.stderr and 'Traceback' not in done.stderr
    if '(torch.ones' in code and 'optim' in code: assert 'Linear (1 modules' in done.stdout and 'its optimizer did not step' in done.stdout
    assert left(tmp_path)==[]


def test_a_program_without_torch_is_explained(tmp_path):
    (tmp_path/'train.py').write_text('print(1)')
    done = subprocess.run([sys.executable, '-m', 'torchember', 'check', 'train.py'], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(root)})
    assert (done.returncode, done.stdout)==(2, '1\n') and 'nothing was checked: it has not imported torch.' in done.stderr


def test_a_program_that_raises_shows_its_traceback(tmp_path):
    done = check(healthy.replace('(6,))', '(7,))'), tmp_path)
    assert done.returncode==2 and done.stderr.count('Traceback')==1 and 'The program raised ValueError: Expected input batch_size' in done.stderr
    # The traceback begins in the user's program
    assert 'torchember/' not in done.stderr.partition('File "')[2].partition('\n')[0]


def test_wrong_use(tmp_path):
    def said(*words): return programs.run(by_fork, 'check', *words, after=libraries, PYTHONPATH=root, cwd=tmp_path)
    for words,why in {(): 'the program to run is missing', ('--steps', '0', 'x.py'): 'must be at least 1', ('x.py',): "cannot run x.py",
            ('--rules', 'nope', 'x.py'): "nope"}.items():
        assert said(*words).returncode==2 and why in said(*words).stderr, words
    assert 'exit codes: 0 no error' in said('--help').stdout


adversaries = '''
import torch
from torch import nn
torch.manual_seed(0)
G,D = nn.Linear(3, 4),nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
og,od = torch.optim.Adam(G.parameters(), 1e-3),torch.optim.Adam(D.parameters(), 1e-3)
for _ in range(1000):
    for _ in range(2):
        od.zero_grad()
        (D(torch.randn(8, 4)).mean()-D(G(torch.randn(8, 3)).detach()).mean()).backward()
        od.step()
    og.zero_grad()
    D(G(torch.randn(8, 3))).mean().backward()
    og.step()
'''


def test_two_models_get_a_table_each(tmp_path):
    done = check(adversaries, tmp_path)
    assert done.returncode==0, done.stdout
    assert 'Linear (1 modules, 16 values, trained by Adam), the first step' in done.stdout
    assert 'Sequential (4 modules, 49 values, trained by Adam), the first 2 steps' in done.stdout
    # If one optimizer never steps, the check ends later, but it still ends
    done = check(adversaries.replace('    og.step()', '    pass'), tmp_path)
    assert done.returncode in (0, 1) and 'its optimizer did not step' in done.stdout


@pytest.mark.release
def test_a_scaled_loss_is_shown_as_it_was(tmp_path):
    plain,scaled = healthy,healthy.replace('opt = ', 'scaler = torch.amp.GradScaler("cpu", init_scale=1024.)\nopt = ').replace(
        'loss.backward()', 'scaler.scale(loss).backward()').replace('opt.step()', 'scaler.step(opt); scaler.update()')
    [a],[b] = (tables(check(code, tmp_path, '--json')) for code in (plain, scaled))
    assert a['the loss is finite']['text']==b['the loss is finite']['text'] and a['gradients have a usual size']==b['gradients have a usual size']


@pytest.mark.release
def test_a_program_that_catches_everything_ends_at_each_step(tmp_path):
    caught = healthy.replace('    opt.step()\n', '    try: opt.step()\n    except: print("caught")\n').replace('range(1000)', 'range(3)')
    done = check(caught, tmp_path)
    assert done.returncode==0 and done.stdout.count('caught')==3 and done.stdout.count('the first step')==1


@pytest.mark.release
def test_a_thread_of_the_program_does_not_hold_the_process(tmp_path):
    done = check('import threading\nthreading.Thread(target=threading.Event().wait).start()\n'+forgotten, tmp_path)
    assert done.returncode==1 and 'the first step' in done.stdout and left(tmp_path)==[]


@pytest.mark.release
def test_a_training_in_a_thread_is_checked(tmp_path):
    code = 'import threading\ndef go():\n'+textwrap.indent(forgotten, '    ')+'\nt = threading.Thread(target=go)\nt.start()\nt.join()'
    done = check(code, tmp_path)
    assert done.returncode==1 and '`2` (2 parameters, 27 values) is not in the optimizer' in done.stdout


def test_a_program_that_records_itself_is_named(tmp_path):
    done = check(healthy.replace("print('begins')", "from torchember import torchEmber; te = torchEmber(model, opt, name='own')").replace(
        'range(1000)', 'range(2)'), tmp_path)
    assert done.returncode==2 and 'the program itself records it as the run own' in done.stderr


trainer = '''
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))
data = [dict(input_ids=x, labels=x) for x in torch.randint(50, (64, 8))]
arguments = TrainingArguments(output_dir='out', per_device_train_batch_size=4, warmup_steps=WARM, report_to=[], use_cpu=True, disable_tqdm=True)
Trainer(model, arguments, train_dataset=data).train()
'''
lightning = '''
import lightning as L, torch
from torch import nn
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body,self.head = nn.Linear(4, 8),nn.Linear(8, 2)
    def training_step(self, batch, i): return nn.functional.cross_entropy(self.head(self.body(batch[0]).detach()), batch[1])
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), .1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,))), 8)
L.Trainer(max_epochs=100, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator='cpu').fit(Net(), data)
'''
accelerated = forgotten.replace('print(', '''from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model,opt = accelerator.prepare(model, opt)
print(''').replace('loss.backward()', 'accelerator.backward(loss)')


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(('library', 'code', 'row', 'status'), [
    ('transformers', trainer.replace('WARM', '0'), 'the step changes the weights', 'ok'),
    ('transformers', trainer.replace('WARM', '5'), 'the step changes the weights', 'not checked'),
    ('lightning', lightning, 'the loss reaches the parameters', 'error'),
    ('accelerate', accelerated, 'the optimizer has the parameters', 'error')])
def test_trainers_of_other_libraries(tmp_path, library, code, row, status):
    pytest.importorskip(library)
    done = check(code, tmp_path, '--json')
    assert done.returncode==(status=='error'), done.stderr
    [table] = tables(done)
    assert table[row]['status']==status and {n for n,r in table.items() if r['status']=='error'}<={row}
    assert table['the loss is finite']['text'].startswith('loss is ')


# ---- `te.check_step` inside a program

def train(te, model, opt, data, check=False):
    for x,y in data:
        loss = loss_of(model, x, y)
        te.log(loss=loss)
        loss.backward()
        if check and te.recorder.tally.steps: te.check_step() # Call the check in the middle of a step, too
        opt.step()
        if check: te.check_step()
        opt.zero_grad()


def test_a_check_changes_neither_training_nor_rows():
    trained = []
    for checks in (False, True):
        model = seeded()
        opt = momentum(model)
        state = torch.get_rng_state()
        with torchEmber(model, opt, name=f'checks_{checks}') as te: train(te, model, opt, batches(), checks)
        assert torch.equal(state, torch.get_rng_state())
        trained.append((weights(model), te.t.df))
    (a,rows),(b,others) = trained
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert rows.drop(columns='ts').equals(others.drop(columns='ts'))


def test_a_check_before_the_first_step_says_when_to_call_it():
    model = seeded()
    with torchEmber(model, momentum(model)) as te:
        with pytest.raises(RuntimeError, match=r'Call check_step after the first optimizer.step\(\)'): te.check_step()
        loss_of(model, *batches(1)[0]).backward()
        with pytest.raises(RuntimeError, match='needs one finished step'): te.check_step()


@pytest.mark.filterwarnings('ignore:No weight gradients are recorded')
@pytest.mark.parametrize('ends', ['te.step()', 'the next pass'])
def test_a_loop_without_an_optimizer(ends):
    model = seeded()
    opt = momentum(model)
    with torchEmber(model) as te:
        for x,y in batches(2):
            loss_of(model, x, y).backward()
            if ends=='te.step()': te.step()
            opt.step()
            table = te.check_step().set_index('check')
            opt.zero_grad()
    assert 'the optimizer is unknown' in table.text['the optimizer has the parameters'] and 'te.log(loss=loss)' in table.text['the loss is finite']
    # Without te.step(), `zero_grad` has already removed the gradients when the step ends
    assert table.status['the step changes the weights']==('ok' if ends=='te.step()' else 'not checked') and not table.status.isin(['error', 'warning']).any()


def test_another_optimizer_is_no_fault_in_the_first_step():
    model = seeded()
    a,b = momentum(model.a),momentum(model.b)
    with torchEmber(model, a) as te:
        loss_of(model, *batches(1)[0]).backward()
        b.step()
        a.step()
        table = te.check_step().set_index('check')
    assert table.status['the optimizer has the parameters']=='info' and 'optimizer=[a, b]' in table.advice['the optimizer has the parameters']


def test_a_closed_run_and_a_named_run_are_checked():
    from torchember.health.first_step import check_step
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, opt, name='closed') as te: train(te, model, opt, batches(20))
    same_rows = te.check_step(),check_step('closed')
    assert [t.text.tolist() for t in same_rows][0]==same_rows[1].text.tolist() and 'the first 8 steps' in str(te.check_step())
    assert 'the first 3 steps' in str(te.check_step(steps=3))
    with pytest.raises(ValueError, match='steps>=1'): te.check_step(steps=0)


@pytest.mark.parametrize('options', [dict(stats='full'), dict(stats='numerics'), dict(stats=['rms']), dict(stats=lambda x: {'sum': x.float().sum().item()}),
    dict(ttypes=['output']), dict(include='a'), dict(every=2), dict(store='parquet')], ids=lambda options: ', '.join(options))
def test_all_choices_of_rows_are_checked(options):
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, opt, **options) as te:
        train(te, model, opt, batches(3))
        table = te.check_step()
    assert table.healthy and len(table)==checks and 'failed' not in str(table)


@pytest.mark.filterwarnings('ignore:torchember. step 0, input x')
def test_values_that_are_not_finite_are_an_error():
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, opt) as te:
        (x,y),*_ = batches(1)
        train(te, model, opt, [(x/0, y)])
        table = te.check_step().set_index('check')
    assert table.status['all values are finite']=='error' and table.status['the loss reaches the parameters']=='ok'


def test_rules_of_the_user_get_rows_of_their_own():
    from torchember import finding, rule
    from torchember.health.rules import table as known
    model = seeded()
    opt = momentum(model)
    @rule(severity='warning')
    def mine(history): yield finding('a', "This is mine.", 0)
    try:
        with torchEmber(model, opt) as te:
            train(te, model, opt, batches(1))
            assert te.check_step().iloc[-1][['check', 'status', 'text']].tolist()==['mine', 'warning', 'This is mine.']
            assert len(te.check_step('not_trained'))==checks
    finally: del known['mine']


def test_a_check_in_another_thread():
    model = seeded()
    opt = momentum(model)
    found = []
    with torchEmber(model, opt) as te:
        train(te, model, opt, batches(1))
        thread = threading.Thread(target=lambda: found.append(te.check_step()))
        thread.start()
        thread.join()
    assert found[0].healthy


def test_frozen_weights_in_half_and_a_model_without_parameters():
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 2).bfloat16())
    model[0].requires_grad_(False)
    opt = torch.optim.SGD(model[1].parameters(), 1e-6)
    with torchEmber(model, opt) as te:
        model(torch.ones(2, 4).bfloat16()).sum().backward()
        opt.step()
        table = te.check_step().set_index('check')
    assert table.status['parameters are not frozen']=='info' and 'bfloat16' in table.text['the step changes the weights']
    with torchEmber(nn.ReLU()) as te:
        te.model(torch.ones(2))
        te.step()
        assert te.check_step().healthy
