"""Program of `test_reduce.py` for several processes: `python reduced_faults.py FOLDER WHAT`. Each process trains its own net, without collectives.

Messages and received rows go to `FOLDER/WHAT.RANK`, with the longest duration of a step"""
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

from torchember import torchEmber
from torchember.processes.whole_steps import StepCollector

folder,what = Path(sys.argv[1]),sys.argv[2]
rank = int(os.environ['RANK'])
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, skip):
        x = self.a(x)
        return self.c(x if skip else self.b(x))


def meet(where):
    "Wait until all processes have reached this line. Files are used instead of a collective operation."
    (folder/f'{what}.{where}{rank}').touch()
    end = time.monotonic()+20
    while len([*folder.glob(f'{what}.{where}*')])<int(os.environ['WORLD_SIZE']) and time.monotonic()<end: time.sleep(.005)


def dies():
    time.sleep(.5) # Rows of earlier steps are still being sent
    os.kill(os.getpid(), signal.SIGKILL)


def child():
    "Use the armed model in a forked child process."
    if (pid := os.fork())==0:
        net(torch.ones(2, 4), False).sum().backward()
        te.t.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1]==0


happens = {('sleeps', 1, 3): lambda: time.sleep(2), ('killed', 2, 3): dies, ('first_dies', 0, 3): dies, ('forks', 0, 2): child, ('forks', 1, 2): child,
    ('destroys', 0, 3): dist.destroy_process_group}
# On a busy machine, a rank may need more than the 2 s of a usual run. Tests with a missing rank set a shorter time
StepCollector.patience = {'sleeps': .5, 'killed': 2., 'first_dies': 2., 'skips': 5.}.get(what, 20.)
torch.manual_seed(rank)
if what!='no_group': dist.init_process_group('gloo')
heard = (folder/f'{what}.{rank}.heard').open('w')
net,told,own,longest = Net(),[],[],0.
opt = torch.optim.SGD(net.parameters(), lr=.1)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter('always')
    te = torchEmber(net, optimizer=opt, name=what, home=folder, reduce='step')
    te.t.listen(lambda step, rows: (told.append((step, rows)), print(json.dumps(step), file=heard, flush=True)))
    te.t.listen(lambda step, rows: own.append((step, rows)), per_rank=True)
    if what=='lives' and rank==0: te.live(every=.05)
    meet('began')
    for s in range(14 if what=='sleeps' else 6):
        if (f := happens.get((what, rank, s))): f()
        began = time.monotonic()
        net(torch.randn(2, 4), what=='skips' and s==2 and rank==1).square().mean().backward()
        opt.step()
        opt.zero_grad()
        te.log(loss=float(s+rank))
        longest = max(longest, time.monotonic()-began if s else 0)
        time.sleep(.02 if what=='sleeps' and rank else .2 if what=='sleeps' else .05)
    end = time.monotonic()+20
    while what=='skips' and rank==0 and not {0, 1, 2, 3}<={s for s,_ in told} and time.monotonic()<end: time.sleep(.01)
    meanwhile = [*told]
    if what=='skips': meet('told')
    began = time.monotonic()
    if what!='exits': te.close()
    closing = time.monotonic()-began
left = dict(said=[str(w.message) for w in said], told=told, own=own, meanwhile=meanwhile, longest=longest, closing=closing)
(folder/f'{what}.{rank}').write_text(json.dumps(left))
if what=='ends' and rank==0: os._exit(0)
if what!='no_group' and dist.is_initialized() and what!='exits': dist.destroy_process_group()
