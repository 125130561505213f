"Tests of the sink for W&B with an ember, `track` and `Visualization`. They read the files that W&B writes offline"
import json
import time

import numpy as np
import programs
import pytest

from torchember import read, read_pickle

pytestmark = pytest.mark.slow

libraries = 'import torch, torchember.ember\nfrom torchember.measure import loading\nloading.loops()'
begin = '''
import json, torch, wandb
from torch import nn
from torchember import Monitor, Visualization, torchEmber, track
torch.manual_seed(0)
def loop(model, step, n=4, log=True):
    opt = torch.optim.SGD(model.parameters(), .1)
    for i in range(n):
        opt.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        opt.step()
        step(i, opt)
        if log: wandb.log({'mine': i/2})
def small(): return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
def start(): return wandb.init(mode='offline', project='p', settings=wandb.Settings(console='off', silent=True))
'''


def pieces(path):
    "Yield the records of a W&B file: seven bytes, then a LevelDB log in blocks of 32 KiB. A record may have several pieces."
    data,at,whole = path.read_bytes(),7,b''
    while at+7<=len(data):
        if 32768-at%32768<7: at += 32768-at%32768; continue
        n,kind = int.from_bytes(data[at+4:at+6], 'little'),data[at+6]
        whole += data[at+7:at+7+n]
        at += 7+n
        if kind in (1, 4): yield whole; whole = b''


def history(folder, run='*'):
    "Return the rows of the only run in a folder, and the globs with an axis of their own."
    record = pytest.importorskip('wandb.proto.wandb_internal_pb2').Record
    path, = folder.glob(f'wandb/offline-run-*/run-{run}.wandb')
    rows,axes = [],{}
    for data in pieces(path):
        r = record.FromString(data)
        if r.WhichOneof('record_type')=='history':
            row = {'/'.join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
            rows.append({k: v for k,v in row.items() if not k.startswith('_') or k=='_step'})
        if r.WhichOneof('record_type')=='metric': axes[r.metric.glob_name or r.metric.name] = r.metric.step_metric
    return rows, axes


def run(code, tmp_path, name='*'):
    pytest.importorskip('wandb')
    done = programs.run(begin+code, after=libraries, cwd=tmp_path, TORCHEMBER_HOME=tmp_path/'home', HOME=tmp_path, WANDB_MODE='offline', WANDB_DIR=tmp_path)
    assert done.returncode==0, done.stderr
    end = time.monotonic()+30
    # The process of W&B may still be writing
    while not (found := history(tmp_path, name))[0] and time.monotonic()<end: time.sleep(.2)
    return found


def test_ember_adds_to_a_run_of_the_user(tmp_path):
    rows,axes = run('''
with start():
    model = small()
    with torchEmber(model, torch.optim.SGD(model.parameters(), .1), name='r', ends='step', stats='full', sinks='wandb') as te:
        loop(model, lambda i, opt: (te.step(), te.t.barrier()))
''', tmp_path)
    df = read('r', home=tmp_path/'home')
    # The step counter of W&B for the user's rows is unchanged
    assert [(r['_step'], r['mine']) for r in rows if 'mine' in r]==[(i, i/2) for i in range(4)]
    assert len({r['_step'] for r in rows})==len(rows)
    told = {r['torchember/step']: r['output/2/rms'] for r in rows if 'output/2/rms' in r}
    want = {int(r.step): r.rms for r in df[(df.ttype=='output') & (df.path=='2')].itertuples()}
    assert told and all(want[s]==v for s,v in told.items())
    assert axes['output/2/*']=='torchember/step' and axes['weight_grad/0.weight/*']=='torchember/step'


@pytest.mark.release
def test_user_rows_have_no_older_numbers_under_a_newer_step(tmp_path):
    "The layer is called in some steps only, losses are rare, there are evaluations, and the user logs every third step."
    rows,axes = run('''
class Now(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.n = nn.Linear(4, 4),nn.Linear(4, 4),0
    def forward(self, x):
        self.n += 1
        return self.b(self.a(x)) if self.n%3==0 else self.a(x)
with start() as mine:
    model = Now()
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, opt, name='r', stats='full', sinks='wandb') as te:
        for i in range(24):
            opt.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            if i%5==0: te.log(val_loss=i/7)
            opt.step()
            if i%4==0: model.eval()(torch.randn(5, 4)); model.train()
            te.t.barrier()
            if i%3==2: mine.log({'mine': i})
''', tmp_path)
    df = read('r', home=tmp_path/'home')
    assert [r['mine'] for r in rows if 'mine' in r]==[*range(2, 24, 3)]
    n = 0
    for r in rows:
        for k,v in r.items():
            if v is None or not k.endswith('/rms') or 'output' not in k: continue
            path,phase = k.split('/')[-2],'eval' if k.startswith('eval/') else 'train'
            step = r['torchember/eval_step' if phase=='eval' else 'torchember/step']
            of = df[(df.ttype=='output') & (df.path==path) & (df.step==step)]
            of = of[of.phase=='eval'] if phase=='eval' else of[of.phase!='eval']
            assert of.rms.tolist()==[v], (k, step)
            n += 1
        if r.get('scalar/val_loss') is not None: assert r['scalar/val_loss']==r['torchember/scalar/val_loss/step']/7
    assert n>4 and axes['eval/output/a/rms']=='torchember/eval_step' and axes['scalar/val_loss']=='torchember/scalar/val_loss/step'
    assert any(r.get('scalar/val_loss') is not None for r in rows) and any(r.get('eval/output/a/rms') is not None for r in rows)


def test_ember_opens_its_own_run(tmp_path):
    rows,_ = run('''
model = small()
with torchEmber(model, name='r', ends='step', stats='full', sinks='wandb') as te: loop(model, lambda i, opt: te.step(), 6, log=False)
''', tmp_path)
    df = read('r', home=tmp_path/'home')
    for path in ('0', '2'):
        assert [(r['torchember/step'], r[f'output/{path}/rms']) for r in rows if f'output/{path}/rms' in r]== \
            [(int(r.step), r.rms) for r in df[(df.ttype=='output') & (df.path==path)].itertuples()]


@pytest.mark.release
def test_track(tmp_path):
    rows,axes = run('''
with start():
    model = small()
    opt = torch.optim.SGD(model.parameters(), .1)
    with track(model, optimizer=opt, use_wandb=True, name='r') as tracker: loop(model, lambda i, opt: tracker.step())
    wandb.log({'over': 1})
''', tmp_path)
    lf = read_pickle(next((tmp_path/'home').rglob('final_logframe.pkl')))
    assert [(r['_step'], r['mine']) for r in rows if 'mine' in r]==[(i, i/2) for i in range(4)]
    for t in ('Activation', 'Weights'):
        mine = lf[lf.metadata.tensor_type==t].scalar_stats.rm2.groupby(lf.metadata.step).mean()
        got = {r['torchember/step']: r[f'Numerics.{t}/rm2'] for r in rows if f'Numerics.{t}/rm2' in r}
        assert set(got)==set(mine.index) and np.allclose([got[s] for s in mine.index], mine)
        assert axes[f'Numerics.{t}/*']=='torchember/step'


@pytest.mark.release
def test_visualization_opens_a_run_if_there_is_none(tmp_path):
    rows,axes = run('''
model = small()
monitor = Monitor(model, {'Linear': ['WeightNorm']})
vis = Visualization(monitor, wandb)
loop(model, lambda i, opt: (monitor.track(i), vis.show(i, {'loss': i/4})), log=False)
vis.close()
print(json.dumps(monitor.get_output()['0']['WeightNorm']))
monitor.close()
''', tmp_path)
    assert [(r['torchember/step'], r['loss']) for r in rows if 'loss' in r]==[(i, i/4) for i in range(4)]
    assert len({r['0_WeightNorm'] for r in rows if '0_WeightNorm' in r})==4
    assert {axes[k] for k in ('loss', '0_WeightNorm', '2_WeightNorm')}=={'torchember/step'}
    assert not [k for k in axes if k.startswith(('/', '*'))]


@pytest.mark.release
@pytest.mark.parametrize('reinit', [pytest.param('return_previous', marks=pytest.mark.release), 'finish_previous'])
def test_run_that_the_user_opens_later_is_separate(tmp_path, reinit):
    "The run of torchember continues beside a W&B run that the user opens later."
    rows,_ = run(f'''
model = small()
te = torchEmber(model, name='r', stats='full', sinks='wandb')
loop(model, lambda i, opt: te.step(), log=False)
te.t.barrier()
sink = te.feeds[0].sender.sink
while sink.run is None: pass
ours = sink.run
with wandb.init(mode='offline', project='p', id='mine', reinit='{reinit}', settings=wandb.Settings(console='off', silent=True)) as mine:
    assert mine is not ours and wandb.run is mine
    loop(model, lambda i, opt: te.step())
report = te.close()
assert not report['remarks'], report['remarks']
''', tmp_path, 'mine')
    assert [r['mine'] for r in rows]==[0., .5, 1., 1.5] and not any(k.startswith('output') for r in rows for k in r)
    ours,_ = history(tmp_path, 'r-*')
    assert {r['torchember/step'] for r in ours if 'output/2/rms' in r}=={*range(8)}
