"Live views on a terminal and from another process, up to each possible end of a run. test_interactive.py tests notebooks"
import gc
import os
import pty
import re
import signal
import termios
import textwrap
import time

import programs
import pytest
import torch

from torchember import EmberWarning, emberTracker, finding, live, overview, read, summary, torchEmber
from torchember.health.watch import Pace
from torchember.show.live.live_view import Viewer

training = """
    import os, sys, time, torch, torchember
    from torch import nn
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), .01)
    te = torchember.torchEmber(model, optimizer=opt, name='followed')
    def train(seconds, until=lambda: False):
        end = time.time()+seconds
        while time.time()<end and not until():
            loss = model(torch.randn(16, 4)).square().mean()
            opt.zero_grad(); loss.backward(); opt.step()
            te.log(loss=loss)
            time.sleep(.02)
"""


def program(code): return textwrap.dedent(training)+textwrap.dedent(code)


def on_terminal(code, stop=None):
    "Return the output of a program on a terminal, and its exit status"
    fd,theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 120))
    heard = 'import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n' # a program that is started in the background ignores Ctrl-C
    p = programs.start(heard+code, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    out = b''
    while True:
        try: got = os.read(fd, 4096)
        except OSError: break
        out += got
        # The terminal sends Ctrl-C to all processes
        if stop and stop in out: os.killpg(p.pid, signal.SIGINT); stop = None
    os.close(fd)
    return out.decode(), p.wait()


def steps_in(out): return [int(n.replace(',', '')) for n in re.findall(r'followed: step ([\d,]+)', out)]


@pytest.mark.release
@pytest.mark.slow
def test_a_terminal_shows_one_line():
    code = program("te.live(every=.2); train(3); print('\\n'+repr(te.close()))")
    out,rc = on_terminal(code)
    steps = steps_in(out)
    assert rc==0 and len(set(steps))>3 and steps==sorted(steps) and 'loss' in out
    line = out[:out.rindex('followed: step')].split('followed: waiting')[1]
    assert line.count('\n')<=2 and line.count('\r')>4 # The line is updated in place; only the report prints new lines
    assert 'of which live plots:' in out


@pytest.mark.release
@pytest.mark.slow
def test_a_program_without_close_ends():
    "A program without a call of `close` ends normally, and its last line shows the last step"
    out,rc = on_terminal(program("te.live(every=.2); train(2); print('\\nlast:', te.recorder.step)"))
    assert rc==0 and abs(steps_in(out)[-1]-int(re.findall(r'last: (\d+)', out)[0]))<=1


@pytest.fixture
def other():
    "Return a function that starts a training in another process"
    procs = []
    def start(code):
        procs.append(programs.start(program(code)))
        t = emberTracker('followed')
        while not t.log_path.exists() or not t.meta_path('base_followed').exists(): assert procs[0].poll() is None; time.sleep(.05)
        return procs[0]
    yield start
    for p in procs: p.kill(); p.communicate()


def test_a_killed_training_ends_the_view(other, capfd):
    p = other('train(600)')
    view = live('followed', every=.1, wait=False)
    while 'step' not in capfd.readouterr().err: time.sleep(.1)
    assert view.thread.is_alive()
    p.kill()
    p.wait()
    view.thread.join(60)
    assert not view.thread.is_alive() and 'followed: step' in capfd.readouterr().err


def test_wait_follows_a_run_of_another_process(other):
    "`live(wait=True)` follows a run of another process to its end, and Ctrl-C leaves no traceback"
    p = other('train(600)')
    out,rc = on_terminal("import torchember; torchember.live('followed', every=.1); print('gone on')", stop=b'steps/s')
    assert rc==0 and 'gone on' in out and 'Traceback' not in out and p.poll() is None


def trained(te, n=3):
    for _ in range(n): te.model(torch.randn(2, 4)).sum().backward(); te.step()


def ember(): return torchEmber(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()))


def test_open_findings_are_shown():
    "An open finding appears in the live line, in the title of a picture, and in the summary, until it is resolved"
    wrong = [True]
    def loud(h):
        if wrong: yield finding('0', 'This layer is loud.', 0, ttype='output')
    te = torchEmber(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()), rules=[loud], on_finding=lambda f: None, name='loud')
    te.rules.pace = Pace(share=1e9, first=1, always=0, more=1.) # Run the rules after each step
    viewer = Viewer(te.t.dir, True, {})
    def line(is_loud):
        "Train step by step until the live line contains the finding, or no longer contains it. Return the line"
        for _ in range(200):
            trained(te, 1)
            te.t.barrier()
            got = viewer.answer('loud', over=True).get('line')
            if got is not None and ('loud.' in got)==is_loud: return got
            time.sleep(.05)
    def title(): return overview(te).figure.get_suptitle()
    assert line(True).endswith(', This layer is loud.') and title()=='loud\nwarning: This layer is loud.'
    assert summary(te).found==('warning: This layer is loud.',)
    wrong.clear()
    assert line(False).startswith('loud: step ') and title()=='loud' and summary(te).found==()
    te.close()
    assert [o is True for o in read(te, ttype='finding')['over']]==[False, True]


def test_a_removed_log_ends_the_view(capfd):
    "If the log is deleted, a live view ends with a warning. The training continues"
    te = ember()
    trained(te)
    te.t.barrier()
    own,view = te.live(every=.05),live(te.fname, every=.05)
    shown = ''
    # Wait until both views have printed a line
    while (shown := shown+capfd.readouterr().err).count('step')<2: time.sleep(.05)
    with pytest.warns(EmberWarning, match='was removed'):
        te.t.log_path.unlink()
        for v in own,view: v.thread.join(60)
        assert not own.thread.is_alive() and not view.thread.is_alive()
    trained(te, 6)
    assert te.close()['live']>0


def test_a_view_ends_with_its_ember(capfd, recwarn):
    "A view ends with its ember: without training, if started twice, after `close`, and if the ember is deleted"
    te = ember()
    first = te.live()
    while first.reader is None: time.sleep(.01)
    second = te.live()
    assert not first.thread.is_alive() and second.thread.is_alive()
    trained(te)
    report = te.close()
    assert not second.thread.is_alive() and report['live']==pytest.approx(first.seconds+second.seconds)
    assert 0<report['live']<report['seconds'] and 'of which live' in repr(report)
    assert f"{te.fname}: step 2" in capfd.readouterr().err
    again = te.live()
    again.thread.join(60)
    assert not again.thread.is_alive() # The view ends, because the run has ended
    assert not [w for w in recwarn if 'live' in str(w.message)] # Closing a view is no failure, so there is no warning
    idle = ember()
    idle.live()
    assert 'live' in idle.close() and 'nothing was recorded' in capfd.readouterr().err
    gone = ember()
    view = gone.live(every=.05)
    del gone
    end = time.time()+60
    while view.thread.is_alive() and time.time()<end: gc.collect(); view.thread.join(.1)
    assert not view.thread.is_alive()


def test_a_dead_process_gives_one_warning(capfd):
    "If the process dies, there is one warning, and the training goes on"
    te = ember()
    view = te.live(every=.05)
    while view.reader is None: time.sleep(.01)
    with pytest.warns(EmberWarning, match='live picture has stopped: the drawing process has ended') as w:
        view.reader.kill()
        view.thread.join(60)
    trained(te)
    assert len(w)==1 and te.close()['recorded']==3


def test_a_forked_child_keeps_the_view_of_its_parent():
    "A forked child does not close the picture of its parent"
    te = ember()
    view = te.live()
    if not (pid := os.fork()):
        view.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1]==0 and view.thread.is_alive()
    te.close()
