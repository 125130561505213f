"Small trainings that send statistics to sinks, and the numbers that the sinks must receive"
import os
import socket
import subprocess
import sys
import time

import numpy as np
import torch
from torch import nn

from torchember import torchEmber


def train(home, steps=6, model=None, **kwargs):
    "Train a small model. Return the model and the report of the run."
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, opt, home=home, name='first', **kwargs)
    for _ in range(steps):
        opt.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        te.log(loss=loss)
        opt.step()
    model.eval()(torch.randn(5, 4))
    return model, te.close()


def by_hand(df):
    "Return the metrics that a sink must have received, computed from the table of a run that has the statistic rms."
    found = {}
    for r in df.to_dict('records'):
        if r['ttype']=='scalar':
            for name in ('loss', 'grad_norm', 'lr'):
                if r[name]==r[name]: found.setdefault(f'scalar/{name}', {})[r['step']] = r[name]
        if r['ttype'] not in ('output', 'weight', 'weight_grad') or (r['ttype']=='output' and r['path']==''): continue
        path = r['path']+(f".{r['pname']}" if r['ttype']!='output' else '')
        prefix = 'eval/' if r.get('phase')=='eval' else ''
        found.setdefault(f"{prefix}{r['ttype']}/{path}/rms", {})[r['step']] = r['rms']
    return found


def same(a, b):
    assert set(a)==set(b)
    for k,v in a.items():
        assert set(v)==set(b[k]), k
        np.testing.assert_allclose([v[s] for s in v], [b[k][s] for s in v], rtol=1e-6)


def forget(home):
    "Delete the records of steps that were sent to a sink, as if the process had died before it wrote them."
    notes = list(home.rglob('sent_*.json'))
    assert notes
    for p in notes: p.unlink()


# Program: a training that is killed after 400 steps, when some steps have arrived. Arguments: folder of runs, sink
killed = '''
import os, signal, sys, time, torch
from pathlib import Path
from torch import nn
def until(f):
    end = time.monotonic()+60
    while not f() and time.monotonic()<end: time.sleep(.01)
from torchember import torchEmber
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), .1)
te = torchEmber(model, opt, home=sys.argv[1], name='first', stats=['rms'], sinks=sys.argv[2])
from torchember.sinks.feed import StepSender
StepSender.patience = .01
for i in range(400):
    if i==200: until(lambda: list(Path(sys.argv[1]).rglob('sent_*.json')))
    opt.zero_grad(); model(torch.randn(5, 4)).square().mean().backward(); opt.step()
os.kill(os.getpid(), signal.SIGKILL)
'''


away = '''
import sys, time
from sinked import train
from torchember import torchEmber
began = time.monotonic()
_,report = train(sys.argv[1], steps=20, sinks=sys.argv[2])
assert any('replay' in r for r in report['remarks']), report
print(time.monotonic()-began)
'''


def told_where_nobody_answers(home, sink, silent, **env):
    "Return the seconds of a training, and of the end of its process, if the server of a sink refuses connections or never answers."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        if silent: s.listen(50)
        port = s.getsockname()[1]
        env = os.environ|{k: v.format(f'http://127.0.0.1:{port}') for k,v in env.items()}
        env['PYTHONPATH'] = os.pathsep.join(p for p in sys.path if p)
        p = subprocess.Popen([sys.executable, '-W', 'ignore', '-c', away, str(home), sink], cwd=home, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        said = p.stdout.readline()
        at = time.monotonic()
        _,err = p.communicate(timeout=200)
        assert p.returncode==0, err
        return float(said),time.monotonic()-at
