"Values of a Monitor in wandb (offline), TensorBoard and matplotlib"
import json
from pathlib import Path

import numpy as np
import programs
import pytest

libraries = 'import matplotlib.pyplot, torch, torchember.ember\nfrom torchember.measure import loading\nloading.loops()'
training = '''
import torch
from torch import nn
from torchember import Monitor, Visualization
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
opt = torch.optim.SGD(model.parameters(), lr=.1)
monitor = Monitor(model, {'Linear': ['WeightNorm'], '1': [['MeanTID', 'linear(5, 0)'], ['InputMean', 'linear(5, 0)']]})
def train(vis, n=12):
    vis.pace.share = 0 # draw at each step
    for step in range(n):
        opt.zero_grad()
        loss = model(torch.randn(16, 6)).square().mean()
        loss.backward()
        monitor.track(step)
        vis.show(step, {'loss': loss.item()})
        opt.step()
    vis.log_ext({'accuracy': .5})
    vis.close()
    monitor.close()
    return monitor.get_output()
'''


def run(code, tmp_path, **env):
    done = programs.run(training+code, after=libraries, cwd=tmp_path, **{'TORCHEMBER_HOME': tmp_path/'home', 'HOME': tmp_path, 'MPLBACKEND': 'agg', **env})
    assert done.returncode==0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize('sink', ['wandb', 'run'])
def test_wandb_offline(tmp_path, sink):
    pytest.importorskip('wandb')
    out = run(f'''
import json, wandb
run = wandb.init(mode='offline', project='p', dir='.', settings=wandb.Settings(console='off', silent=True))
seen, log = [], run.log
def note(d, commit):
    if d: seen.append({{k: v if isinstance(v, float|int) else type(v).__name__ for k,v in d.items()}})
    return log(d, commit=commit)
run.log = wandb.log = note
got = train(Visualization(monitor, {sink}))
print(json.dumps([seen, list(got['0']['WeightNorm'].values())]))
''', tmp_path, WANDB_MODE='offline')
    seen,norms = json.loads(out.strip().splitlines()[-1])
    assert [d.pop('torchember/step') for d in seen]==[*range(12), 11]
    assert [d['0_WeightNorm'] for d in seen[:12]]==norms
    floats = ('0_WeightNorm', '3_WeightNorm', '1_MeanTID', '1_InputMeanScalar', 'loss')
    assert set(seen[0])=={*floats, '1_InputMean'} and seen[0]['1_InputMean']=='Image' and all(isinstance(seen[0][k], float) for k in floats)
    assert set(seen[1])=={'0_WeightNorm', '3_WeightNorm', 'loss'} and seen[12:]==[{'accuracy': .5}]
    assert len(list(tmp_path.glob('wandb/offline-run-*/files/media/images/1_InputMean*.png')))==3
    assert list(tmp_path.glob('wandb/offline-run-*/run-*.wandb'))


def test_tensorboard(tmp_path):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    out = run('''
import json
from torch.utils.tensorboard import SummaryWriter
got = train(Visualization(monitor, SummaryWriter('tb')))
print(json.dumps({q: got['1'][q] if q in got['1'] else got['0'][q] for q in ('MeanTID', 'WeightNorm')}))
''', tmp_path)
    got = json.loads(out.strip().splitlines()[-1])
    events = EventAccumulator(str(tmp_path/'tb'))
    events.Reload()
    assert set(events.Tags()['scalars'])=={'0_WeightNorm', '3_WeightNorm', '1_MeanTID', '1_InputMeanScalar', 'loss', 'accuracy'}
    assert events.Tags()['images']==['1_InputMean'] and [e.step for e in events.Images('1_InputMean')]==[0, 5, 10]
    for tag,name in (('1_MeanTID', 'MeanTID'), ('0_WeightNorm', 'WeightNorm')):
        assert [str(e.step) for e in events.Scalars(tag)]==list(got[name])
        np.testing.assert_allclose([e.value for e in events.Scalars(tag)], list(got[name].values()), rtol=1e-6)
    assert [e.step for e in events.Scalars('accuracy')]==[11]


@pytest.mark.parametrize('sink', ['None', 'plt.figure()', *(pytest.param(s, marks=pytest.mark.slow) for s in ('plt', 'Figure()'))])
def test_matplotlib(tmp_path, sink):
    out = run(f'''
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
before = dict(plt.rcParams)
vis = Visualization(monitor, {sink})
train(vis)
vis.figure.savefig('seen.png')
print(sorted(a.get_title(loc='left') for a in vis.figure.axes), dict(plt.rcParams)==before)
''', tmp_path)
    assert out.strip()==f"{sorted(['InputMeanScalar', 'MeanTID', 'WeightNorm', '1_InputMean', 'accuracy', 'loss'])} True"
    assert (tmp_path/'seen.png').stat().st_size>10_000


def test_own_sink_and_invalid_sinks():
    from matplotlib.figure import Figure
    from torch import nn, ones

    from torchember import Monitor, Visualization
    class Own:
        def __init__(self): self.seen = []
        def log(self, d): self.seen.append(d)
    model,own = nn.Linear(3, 3),Own()
    monitor = Monitor(model, {'': ['InputMean', 'WeightNorm']})
    vis = Visualization(monitor, own)
    for step in range(3):
        model(ones(2, 3)).sum().backward()
        monitor.track(step)
        vis.show(step)
    vis.close()
    assert set(own.seen[0])=={'InputMean', 'InputMeanScalar', 'WeightNorm'} and isinstance(own.seen[-1]['InputMean'], Figure)
    assert all({'InputMeanScalar', 'WeightNorm'}<=set(d) for d in own.seen[:3])
    for bad in (3, 'wandb', object()):
        with pytest.raises(TypeError, match='sink= of a Visualization must be'): Visualization(monitor, bad)
    with pytest.raises(TypeError, match='got a Linear'): Visualization(model, own)
    monitor.close()
    assert Path(monitor.t.log_path).exists()
