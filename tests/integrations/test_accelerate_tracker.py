"Tests of `EmberCallback` as a tracker of Accelerate: rows equal those of a plain loop, and the training is unchanged"
import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from callback_runs import bits, numbers, ran, rows_of, steps_of
from looped import batches, heard, left, loss_of, momentum, same, seeded, table
from tensor_rows import lines

from torchember import read, torchEmber

pytestmark = pytest.mark.filterwarnings('ignore')


@pytest.fixture(autouse=True)
def no_state():
    "Reset the state of Accelerate, which is global in the process."
    accelerate = pytest.importorskip('accelerate')
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def callback(**options):
    from torchember.integrations.accelerate import EmberCallback
    return EmberCallback(**options)


def accelerator_for(ember=None, **options):
    import accelerate
    return accelerate.Accelerator(cpu=True, **({'log_with': ember} if ember else {}), **options)


def loader(data): return torch.utils.data.DataLoader(data, batch_size=None)
def adam(model): return torch.optim.Adam(model.parameters(), .1)


class Loop:
    "The usual training loop of Accelerate"
    def __init__(self, ember=None, data=None, model=None, opt=momentum, first='trackers', end=True, **options):
        self.a,self.model,self.end = accelerator_for(ember, **options),model or seeded(),end
        self.opt = opt(self.model)
        def prepare(): self.net,self.o,self.data = self.a.prepare(self.model, self.opt, loader(data or batches()))
        def trackers(): self.a.init_trackers('mine', config=dict(lr=.1))
        for f in (trackers, prepare) if first=='trackers' else (prepare, trackers) if first=='prepare' else (prepare,): f()

    def step(self, x, y):
        with self.a.accumulate(self.net):
            loss = loss_of(self.net, x, y)
            self.a.backward(loss)
            self.o.step()
            self.o.zero_grad()
        return loss.item()

    def run(self, epochs=1, log=False):
        for _ in range(epochs):
            self.net.train()
            for n,(x,y) in enumerate(self.data):
                loss = self.step(x, y)
                if log and self.a.sync_gradients: self.a.log({'loss': loss, 'text': 'a'}, step=n+1)
        if self.end: self.a.end_training()
        return self


def plain(data, accumulate=1, opt=momentum, bf16=False, sees_loss=True): # sees_loss: False for loops without `accelerator.backward`
    model = seeded()
    opt = opt(model)
    with torchEmber(model, optimizer=opt) as te:
        for i,(x,y) in enumerate(data):
            with torch.autocast('cpu', torch.bfloat16, enabled=bf16): loss = loss_of(model, x, y)
            if sees_loss: te.recorder.losses.note({'loss': loss}) # The tracker notes the loss before the backward pass
            (loss/accumulate).backward()
            # The last batches of an epoch form a step, even if there are fewer
            if (i+1)%accumulate and i+1<len(data): continue
            opt.step()
            opt.zero_grad()
    return table(te)


@pytest.mark.parametrize('first', ['trackers', 'prepare', 'no trackers'])
@pytest.mark.parametrize(('n', 'accumulate'), [(4, 1), (4, 2), (5, 2)])
def test_rows_equal_those_of_a_plain_loop(first, n, accumulate):
    "The last step of an epoch may have fewer batches, because Accelerate ends accumulation there."
    ember = callback()
    with heard() as said: model = Loop(ember, batches(n), first=first, gradient_accumulation_steps=accumulate).run().model
    assert not said, said
    same(rows_of(ember), plain(batches(n), accumulate))
    assert bits(model.state_dict(), Loop(None, batches(n), gradient_accumulation_steps=accumulate).run().model.state_dict())


def test_bf16():
    "Only rows of parameters are compared, because Accelerate converts outputs to float32."
    ember = callback(ttypes=('weight', 'weight_grad'))
    Loop(ember, mixed_precision='bf16').run()
    same(rows_of(ember), {k: r for k,r in plain(batches(), bf16=True).items() if k[2] in ('weight', 'weight_grad')})


def test_numbers_of_the_step_that_closed():
    ember,data = callback(),batches()
    Loop(ember, data, gradient_accumulation_steps=2).run(2, log=True)
    assert [*numbers(ember, 'loss')]==[0, 1, 2, 3] and numbers(ember, 'logged_step')=={0: 2, 1: 4, 2: 2, 3: 4}
    assert {(r['step'], r['epoch']) for r in ran(ember).t.lines()}=={(i, i//2) for i in range(4)}
    model,losses = seeded(),[]
    opt = momentum(model)
    for i,(x,y) in enumerate(data*2):
        loss = loss_of(model, x, y)
        (loss/2).backward()
        losses.append(loss.item())
        if i%2: opt.step(); opt.zero_grad()
    assert numbers(ember, 'loss')==pytest.approx(dict(enumerate(losses[1::2])))


def test_numbers_without_a_step():
    ember = callback()
    l = Loop(ember)
    l.a.log({'before': 1.})
    l.step(*batches()[0])
    l.a.log({'loss': 2.})
    l.a.end_training()
    l.a.log({'after': 1.})
    assert numbers(ember, 'loss')=={0: 2.} and not numbers(ember, 'logged_step') and not numbers(ember, 'before') and not numbers(ember, 'after')


def test_earlier_passes_are_not_recorded_and_evaluation_is():
    ember = callback()
    l = Loop(ember, end=False)
    l.net.eval(); l.net(torch.full((2, 4), 77.))
    l.net.train()
    with torch.no_grad(): l.net(torch.full((2, 4), 77.))
    assert ember.te is None
    valid = l.a.prepare(loader(batches(2)))
    for _ in range(2):
        l.run()
        l.net.eval()
        for _ in range(2): # Epochs of the validation loader must not count as epochs of the training
            for x,_ in valid: l.net(torch.full_like(x, 100.))
    l.a.end_training()
    same(rows_of(ember), plain(batches()*2))
    rows = table(ran(ember), 'input', phase='eval', tname='x', module='model(Net)').values()
    assert {(r['step'], r['max'], r['epoch']) for r in rows}=={(3, 100, 0), (7, 100, 1)}
    before = [*ran(ember).t.lines()]
    l.net(torch.ones(2, 4))
    assert [*ran(ember).t.lines()]==before


def test_a_scaler():
    "The rows have unscaled gradients, and rows of a skipped step are marked as skipped."
    ember,data = callback(),batches()
    l = Loop(ember, end=False)
    scaler = l.a.scaler = torch.amp.GradScaler('cpu', init_scale=2.**10)
    from accelerate.optimizer import AcceleratedOptimizer
    l.a._optimizers.clear()
    l.o = AcceleratedOptimizer(l.opt, scaler=scaler)
    l.a._optimizers.append(l.o)
    for i,(x,y) in enumerate(data):
        scaler.scale(loss_of(l.net, x, y)*(float('inf') if i==1 else 1)).backward()
        l.o.step(); l.o.zero_grad()
    l.a.end_training()
    got,number = rows_of(ember),{0: 0, 1: 2, 2: 3}
    assert {r['step'] for r in got.values() if r.get('skipped')}=={1} and steps_of(ember)==[0, 1, 2, 3]
    same({k: r for k,r in got.items() if k[0]!=1}, {(number[k[0]], *k[1:]): r for k,r in plain([data[0], data[2], data[3]], sees_loss=False).items()})


@pytest.mark.parametrize('opt', [adam, momentum])
@pytest.mark.parametrize('named', [True, False])
def test_resume_continues_the_run(opt, named, tmp_path):
    whole,name = callback(),dict(name='mine') if named else {}
    Loop(whole, batches(3), opt=opt).run(2)
    first = Loop(callback(**name), batches(3), opt=opt, end=False).run()
    first.a.save_state(tmp_path/'it')
    first.a.end_training()
    ember = callback(**name)
    l = Loop(ember, batches(3), opt=opt, model=seeded(seed=5))
    l.a.load_state(tmp_path/'it')
    l.run()
    begins = 0 if named else 3 if opt is adam else 0
    # Without a step count in the optimizer and without a run name, steps begin again at 0
    shift = 3 if opt is momentum and not named else 0
    assert steps_of(ember)==[*range(begins, 6-shift)]
    same({(k[0]+shift, *k[1:]): r for k,r in rows_of(ember).items()}, {k: r for k,r in rows_of(whole).items() if named or k[0]>2})


def test_loaded_state_counts_for_the_next_training(tmp_path):
    first = Loop(callback(name='mine'), end=False).run()
    first.a.save_state(tmp_path/'it')
    first.a.end_training()
    ember = callback(name='mine')
    l = Loop(ember)
    l.a.load_state(tmp_path/'it')
    l.run()
    assert ember.report['run']=='mine' and steps_of(ember)==[*range(8)]
    l.net,l.o = l.a.prepare(other := seeded(seed=3), momentum(other))
    l.run()
    assert ember.report['run']=='mine_2' and steps_of(ember)==[*range(4)]


def test_steps_are_counted_by_the_most_stepped_parameter():
    from torchember.integrations.accelerate import steps_so_far as counted
    late,early = adam(seeded()),adam(seeded())
    for n,p in enumerate(q for o in (late, early) for g in o.param_groups for q in g['params']):
        (late if n<4 else early).state[p]['step'] = torch.tensor(float(5 if n>6 else 2))
    assert counted([late, early])==counted([early, late])==5 and counted([momentum(seeded())])==counted([])==0


def test_a_name_without_a_state_is_another_run():
    for want in ('mine', 'mine_2'):
        ember = callback(name='mine')
        Loop(ember).run()
        assert ember.report['run']==want and steps_of(ember)==[0, 1, 2, 3]


def test_checkpoints_equal_those_without_the_callback(tmp_path):
    for ember,folder in ((callback(), 'a'), (None, 'b')):
        l = Loop(ember, end=False)
        l.step(*batches()[0])
        l.a.save_state(tmp_path/folder)
    a,b = tmp_path/'a',tmp_path/'b'
    assert sorted(os.listdir(a))==sorted(os.listdir(b)) and len(os.listdir(a))>2
    for n in os.listdir(a):
        if n.endswith('.safetensors'): assert (a/n).read_bytes()==(b/n).read_bytes()
        assert b'torchember' not in (a/n).read_bytes()


def test_model_and_class_are_restored():
    import accelerate
    init = accelerate.Accelerator.__init__
    ember,model = callback(),seeded()
    assert accelerate.Accelerator.__init__ is not init
    before = left(model)
    l = Loop(ember, model=model)
    assert accelerate.Accelerator.__init__ is init
    twin = copy.deepcopy(l.net)
    assert torch.equal(twin(torch.ones(1, 4)), l.net.eval()(torch.ones(1, 4)))
    l.run()
    del model._is_accelerate_prepared
    assert left(model)==before and ember.te is None and vars(twin)['forward'].__self__ is twin
    assert accelerate.Accelerator(cpu=True).log_with==[]


def test_two_trackers_and_two_accelerators():
    a,b = callback(),callback(ttypes=('weight',))
    la = Loop(a)
    lb = Loop(b, model=seeded(seed=3))
    la.run()
    lb.run()
    assert a.report['run']!=b.report['run'] and {r['ttype'] for r in lines(ran(b))}=={'weight'} and a.accelerator is la.a and b.accelerator is lb.a


def test_only_optimizers_that_train_it():
    "Two models with their own optimizers: only the model that is trained first is recorded, with its own optimizer."
    ember = callback()
    a = accelerator_for(ember)
    frozen,other,model = seeded(seed=3),seeded(seed=4),seeded()
    frozen,other,model,oo,o = a.prepare(frozen, other, model, momentum(other), momentum(model))
    frozen.eval()
    for x,y in batches():
        frozen(x)
        loss_of(model, x, y).backward(); o.step(); o.zero_grad()
        loss_of(other, x, y).backward(); oo.step(); oo.zero_grad()
    a.end_training()
    same(rows_of(ember), plain(batches(), sees_loss=False))


def test_an_exception_and_close():
    model = seeded()
    before = left(model)
    with pytest.raises(ValueError, match='broken'), callback() as ember:
        l = Loop(ember, model=model)
        for i,(x,y) in enumerate(batches()):
            if i==2: raise ValueError('broken')
            l.step(x, y)
    del model._is_accelerate_prepared
    assert ember.te is None and left(model)==before and steps_of(ember)==[0, 1] and ember.close() is ember.report


def test_a_tracker_of_accelerate():
    import accelerate
    ember = callback()
    l = Loop(ember, end=False)
    assert isinstance(ember, accelerate.tracking.GeneralTracker) and l.a.get_tracker('torchember') is ember
    l.step(*batches()[0])
    assert l.a.get_tracker('torchember', unwrap=True) is ember.te is ember.tracker is not None
    l.a.end_training()


def test_other_trackers_are_unchanged(tmp_path):
    import accelerate
    class Other(accelerate.tracking.GeneralTracker):
        name,requires_logging_directory,heard = 'other',False,[]
        def __init__(self): super().__init__()
        tracker = None
        def store_init_configuration(self, values): self.heard.append(values)
        def log(self, values, step=None, **kwargs): self.heard.append(values)
    ember,other = callback(),Other()
    l = Loop([other, ember])
    l.run(log=True)
    assert [v['lr'] for v in other.heard[:1]]==[.1] and [*numbers(ember, 'loss').values()]==[v['loss'] for v in other.heard[1:]]


def test_wrong_arguments_at_once():
    with pytest.raises(TypeError, match="No argument of EmberCallback 'stat'.*Known"): callback(stat='full')
    with pytest.raises(TypeError, match='takes scaler from the trainer'): callback(scaler=None)


@pytest.mark.release # starts two processes, which import torch and accelerate
@pytest.mark.slow
def test_two_processes(tmp_path):
    program = f'''
import sys, warnings; warnings.filterwarnings('ignore'); sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch
from accelerate import Accelerator
from looped import batches, loss_of, momentum, seeded
from torchember.integrations.accelerate import EmberCallback
ember = EmberCallback(name='both')
a = Accelerator(cpu=True, log_with=ember)
model = seeded()
model,opt = a.prepare(model, momentum(model))
a.init_trackers('it')
assert a.num_processes==2
for i,(x,y) in enumerate(batches()):
    loss = loss_of(model, x, y)
    a.backward(loss); opt.step(); opt.zero_grad()
    a.log({{'loss': loss.item()}}, step=i)
a.end_training()
assert ember.te is None and ember.report['steps']==4
'''
    (tmp_path/'both.py').write_text(program)
    env = dict(os.environ, TORCHEMBER_HOME=str(tmp_path), ACCELERATE_USE_CPU='true')
    out = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', tmp_path/'both.py'],
        env=env, capture_output=True, text=True, timeout=300)
    assert not out.returncode, out.stderr[-3000:]
    df = read('both', home=tmp_path)
    assert sorted(set(df.step))==[0, 1, 2, 3] and df[df.ttype=='scalar'].loss.notna().sum()==4
    want = {(k[0], k[1].split('.', 1)[-1], k[3]): r for k,r in plain(batches()).items() if k[2]=='weight_grad'}
    got = df[df.ttype=='weight_grad']
    assert len(got)==len(want)
    for r in got.to_dict('records'): assert r['mean']==pytest.approx(want[r['step'], r['module'].split('.', 1)[-1], r['tname']]['mean'], rel=1e-5)
