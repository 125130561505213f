"A process that evaluates rules during the training can be killed at any moment without losing a written row"
import os
import random
import signal
import time

import pytest
from programs import start

from torchember import diagnose, read

training = """
import sys, torch
from torch import nn
from torchember import torchEmber
torch.manual_seed(0)
m = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
nn.init.constant_(m[2].bias, -10)
opt = torch.optim.SGD(m.parameters(), .1)
te = torchEmber(m, optimizer=opt, rules='default', name=sys.argv[1], on_finding=lambda f: None)
for i in range(10_000):
    loss = nn.functional.cross_entropy(m(torch.rand(16, 8)), torch.randint(4, (16,)))
    te.log(loss=loss)
    loss.backward(); opt.step(); opt.zero_grad()
    if i%5==4:
        te.t.barrier()
        print(i, flush=True)
"""


def killed(name):
    "Kill a training at a random moment. Return the last step that must be in the file."
    with start(training, name) as p:
        last = int(p.stdout.readline())
        time.sleep(random.random()*.6)
        os.kill(p.pid, signal.SIGKILL)
        for line in p.stdout.read().split('\n'):
            if line.isdigit(): last = int(line)
        p.wait()
    return last


@pytest.mark.slow
@pytest.mark.parametrize('n', [2, pytest.param(200, marks=pytest.mark.release)])
def test_no_written_row_is_lost(n):
    for i in range(n):
        random.seed(i)
        last = killed(f'k{i}')
        df = read(f'k{i}')
        counts = df[df.ttype=='output'].groupby('step').size()
        assert counts[counts.index<=last].tolist()==[6]*(last+1)
        assert (df[df.tname=='log']['loss'].notna()).all()
        if last>20: assert diagnose(f'k{i}')['rule'].tolist()[:2]==['died', 'dead_units']
        told = df[df.ttype=='finding']
        assert told.empty or set(told['tname'])<={'died', 'dead_units', 'vanishing_gradient', 'loss_stalls'}
