"Tests with a signal, Ctrl-C or a fork in the middle of a step: training continues, and recorded rows are right"
import os
import signal

import programs
import pytest
import torch
from models import mlp, x
from torch import nn

from torchember import torchEmber


@pytest.mark.skipif(not hasattr(signal, 'setitimer'), reason='needs POSIX timers')
def test_a_signal_handler_that_reads_or_closes():
    code = """if True:
        import faulthandler, signal, torch; from torch import nn; from torchember import torchEmber
        faulthandler.dump_traceback_later(600, exit=True)
        m = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)]); te = torchEmber(m); n = 0
        def handler(*a):
            global n
            n += 1
            te.step() if n%2 else te.t.barrier()
        signal.signal(signal.SIGALRM, handler); signal.setitimer(signal.ITIMER_REAL, .005, .005)
        x = torch.ones(2, 4)
        for _ in range(600): m(x)
        signal.setitimer(signal.ITIMER_REAL, 0)
        te.close(); print('lived', n)
    """
    got = programs.run(code)
    assert 'lived' in got.stdout, got.stderr[-2000:]


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
def test_a_fork_of_an_armed_model():
    "A forked child runs the model without recording, and waits for no lock of the parent. The rows of the parent stay unchanged."
    model = mlp()
    te = torchEmber(model)
    model(x())
    n = len(te.t.lines())
    # Simulate another thread that holds both locks during the fork
    with te.recorder.lock, te.recorder.buffer.rows.arena.lock:
        pid = os.fork()
        if not pid:
            signal.alarm(30)
            with torch.no_grad(): model(x())
            te.step()
            os._exit(0 if not te.recorder.buffer.rows.arena.filled else 1)
    assert os.waitpid(pid, 0)[1]==0
    assert len(te.t.lines())==n
    model(x())
    assert len(te.t.lines())==2*n
    te.close()


def test_ctrl_c_at_the_end_of_a_step():
    "Rows measured before Ctrl-C are written with the number of their step."
    model = nn.Linear(1, 1)
    model.register_buffer('b', torch.ones(1))
    te,calls = torchEmber(model, ttypes=('input', 'buffer')),[]
    @te.how_record('buffer')
    def interrupted(x):
        calls.append(1)
        if len(calls)==1: os.kill(os.getpid(), signal.SIGINT); sum(range(10**6))
        return {'n': 1}
    for i in range(4):
        try: model(torch.full((1, 1), float(i)))
        except KeyboardInterrupt: assert i==1
    te.close()
    got = te.t.df.query('ttype=="input"')[['step', 'mean']].values.tolist()
    assert got[0]==[0, 0] and [m for _,m in got] in ([0, 2, 3], [0, 1, 2, 3])
