"Listeners get exactly the rows of the log file. They do not delay or disturb the training, the file or other listeners."
import json
import signal
import textwrap
import threading
import time
import warnings

import programs
import pytest
import torch
from torch import nn

from torchember import emberTracker, torchEmber
from torchember.store.log import listen_directly
from torchember.store.lines import parse
from torchember.store.listeners import Listener, BoundedQueue


class Heard(list):
    "A listener that keeps all its calls: a list of pairs (step, rows)."
    def __call__(self, step, rows): self.append((step, rows))
    rows = property(lambda self: [r for _,rows in self for r in rows])
    steps = property(lambda self: [s for s,_ in self])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def in_file(t): return parse(t.log_path.read_bytes())[0]


def same(heard, t):
    "Check that a listener got all rows of the file in the same order, and that each call has the rows of one step. Return True."
    assert heard.rows and repr(heard.rows)==repr(in_file(t)) # texts are compared because NaN is not equal to itself
    assert all(rows and {r.get('step') for r in rows}=={step} for step,rows in heard)
    return True


def step(model, x=None, opt=None):
    model(torch.ones(2, 2) if x is None else x).sum().backward()
    if opt is not None: opt.step(); opt.zero_grad()


def until(true, seconds=20.):
    end = time.monotonic()+seconds
    while not true():
        assert time.monotonic()<end
        time.sleep(.002)


# ---- listeners get the rows of the file

def test_listeners_get_every_kind_of_row(tmp_path):
    "Rows may contain NaN, results of a user's function, and numbers of te.log. Steps that the schedule skips have no tensor rows."
    model,a,b = net(),Heard(),Heard()
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, opt, ttypes=('input', 'output', 'weight_grad', 'update'), every=2, home=tmp_path)
    te.t.listen(a)
    @te.how_record('input')
    def own(x): return {'all': [float(v) for v in x[0]], 'of': 'me'}
    for i in range(5):
        te.mark(epoch=i//2)
        step(model, torch.full((2, 2), float('nan') if i==4 else 1.*i), opt)
        te.log(loss=.5*i)
        if i==2: te.t.listen(b)
    te.close()
    # a logged loss has a row in every step, also in steps that the schedule skips
    assert same(a, te.t) and sorted(set(a.steps))==[0, 1, 2, 3, 4]
    assert sorted({r['step'] for r in a.rows if r['ttype']!='scalar'})==[0, 2, 4] and b.rows and repr(a.rows[-len(b.rows):])==repr(b.rows)
    assert any(r.get('nan') for r in a.rows) and any(r.get('of')=='me' for r in a.rows) and len(a.rows)>len(b.rows)


def test_listeners_get_joined_passes_as_one_step(tmp_path):
    "`te.step()` joins three passes to one step. Listeners get this step, including the rows that replace earlier rows."
    model,heard = net(),Heard()
    te = torchEmber(model, home=tmp_path)
    te.t.listen(heard)
    for _ in range(3): step(model)
    te.step()
    for _ in range(2): step(model)
    te.step()
    te.close()
    assert same(heard, te.t) and set(heard.steps)=={0, 1} and any(r.get('supersedes') for r in heard.rows)


def test_rows_read_within_a_step_are_superseded_for_listeners(tmp_path):
    model,heard = net(),Heard()
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), ttypes='output', home=tmp_path)
    te.t.listen(heard)
    for _ in range(3):
        step(model)
        assert len(te.t.df)
    te.close()
    assert same(heard, te.t) and set(heard.steps)=={0} and [any(r.get('supersedes') for r in rows) for _,rows in heard]==[False, True, True]


def test_listeners_get_evaluations_late_losses_and_skipped_steps(tmp_path):
    "Late rows belong to the step before, and a listener gets them in separate calls."
    model,heard = net(),Heard()
    opt = torch.optim.SGD(model.parameters(), .1)
    scaler = torch.amp.GradScaler('cpu', init_scale=4.)
    te = torchEmber(model, opt, ttypes=('output', 'weight_grad'), scaler=scaler, home=tmp_path)
    te.t.listen(heard)
    for i in range(3):
        loss = model(torch.full((2, 2), float('inf') if i==1 else 1.)).sum()
        scaler.scale(loss).backward()
        scaler.step(opt); scaler.update(); opt.zero_grad()
        te.log(loss=loss.detach())
        model.eval()
        with torch.no_grad(): model(torch.zeros(1, 2))
        model.train()
    te.close()
    assert same(heard, te.t) and heard.steps==sorted(heard.steps) and any(r.get('skipped') for r in heard.rows)
    assert {r['step'] for r in heard.rows if r.get('phase')=='eval'}=={0, 1, 2}


def test_listeners_of_a_resumed_run_get_new_rows_only(tmp_path):
    "A tracker without a model (`emberTracker`) can have listeners, too."
    t,heard = emberTracker('mine', tmp_path),Heard()
    t + {'step': 0, 'loss': 1.}
    with t.listen(heard):
        t + {'step': 1, 'loss': float('nan')}
        t + {'note': 'no step'}
        t.logging('{"step": 2}')
        t.barrier()
    t + {'step': 3}
    t.close()
    assert heard.steps==[1, None, 2] and repr(heard.rows)==repr(in_file(t)[1:4])
    model,more = net(),Heard()
    te = torchEmber(model, ttypes='output', name='r', home=tmp_path)
    step(model)
    te.close()
    old = len(in_file(te.t))
    te = torchEmber(model, ttypes='output', name='r', resume=True, home=tmp_path)
    te.t.listen(more)
    step(model)
    te.close()
    assert repr(more.rows)==repr(in_file(te.t)[old:]) and set(more.steps)=={1}


def test_the_file_has_a_row_before_a_listener_gets_it(tmp_path):
    "A listener may read the run, set marks, and close itself."
    model,seen = net(),[]
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), ttypes='output', home=tmp_path)
    def f(step, rows):
        lines = te.t.log_path.read_bytes().count(b'\n')
        te.mark(seen=step) # set the mark before `seen` grows, because the main thread then begins the next step
        seen.append((step, lines, len(te.t.lines()), threading.current_thread() is not threading.main_thread()))
        if step==1: l.close()
    l = te.t.listen(f)
    for i in range(4):
        step(model)
        te.recorder.close()
        until(lambda i=i: l.is_closed or len(seen)>i)
    te.close()
    assert [s[0] for s in seen]==[0, 1] and all(n==m and off for _,n,m,off in seen) and [s[1] for s in seen]==[4, 8]
    assert {r['step']: r.get('seen') for r in te.t.lines()}=={0: None, 1: 0, 2: 1, 3: 1}


def test_a_new_listener_gets_the_whole_open_step_and_no_earlier_step(tmp_path):
    "This also holds if earlier steps are not yet written. `since` is the file position of its first row."
    t,heard = emberTracker('mine', tmp_path),Heard()
    for i in range(3): t.put(lambda i=i: [{'step': i}], True)
    listening = t.listen(heard)
    assert listening.since==t.log_path.stat().st_size>0
    t.put(lambda: [{'step': 3}], True)
    t.close()
    assert heard.steps==[3]
    model,heard = net(),Heard()
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), ttypes='output', name='r', home=tmp_path)
    step(model)
    te.recorder.close()
    model(torch.ones(2, 2)) # this pass belongs to the open step
    te.t.listen(heard)
    model(torch.zeros(2, 2))
    te.close()
    assert repr(heard.rows)==repr([r for r in in_file(te.t) if r['step']==1]) and {r['tname'] for r in heard.rows}=={'output_0'} and len(heard.rows)==4


def test_listeners_do_not_get_the_rows_that_they_cause(tmp_path):
    "This also holds for indirect causes: two listeners that log in response to each other do not loop endlessly."
    model,spy,calls = net(),Heard(),{'a': [], 'b': [], 'c': []}
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), ttypes='output', home=tmp_path)
    def notes(name, say):
        def f(step, rows):
            calls[name].append((step, [k for r in rows for k in 'abc' if k in r]))
            if len(calls[name])<99: say()
        return f
    te.t.listen(notes('a', lambda: te.log(a=1.)))
    te.t.listen(notes('b', lambda: te.log(b=2.)))
    te.t.listen(notes('c', lambda: te.t + {'c': 3.}))
    te.t.listen(spy)
    step(model)
    te.recorder.close() # the step is over now: listeners add their numbers to a finished step
    until(lambda: len(spy)>=16)
    te.close()
    # 4 rows of the model, then 3, 6 and 6 rows caused by one, two and three listeners
    assert same(spy, te.t) and len(in_file(te.t))==4+3+6+6
    for name in calls: assert calls[name][0]==(0, []) and len(calls[name])==5 and not any(name in k for _,k in calls[name])


# ---- a listener that fails or hangs disturbs nothing else

@pytest.mark.parametrize('error', [ValueError('too much'), SystemExit(3), KeyboardInterrupt()])
def test_a_listener_that_raises_gets_the_next_steps(tmp_path, error):
    "The user gets one warning, and the report has the number of lost steps. Other listeners get all rows."
    model,good,got = net(),Heard(),[]
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), ttypes='output', home=tmp_path)
    def bad(step, rows):
        rows.clear() # this listener's own list; other listeners have their own copies
        got.append(step)
        if step in (1, 2): raise error
    te.t.listen(bad, 'the odd one'); te.t.listen(good)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        for _ in range(4): step(model); te.recorder.close()
        report = te.close()
    assert got==[0, 1, 2, 3] and same(good, te.t)
    said = [str(w.message) for w in said if 'odd' in str(w.message)]
    assert len(said)==1 and f'the odd one did not get all rows: {type(error).__name__}' in said[0] and 'at step 1' in said[0]
    assert [r for r in report['remarks'] if 'odd' in r]==[f'the odd one lost rows of 2 steps: {type(error).__name__}: {error} (at step 1).']


def test_a_listener_that_hangs_delays_only_the_end_of_the_run(tmp_path, monkeypatch):
    "te.close() waits for a short time and warns. If the queue is full, the oldest rows are lost."
    monkeypatch.setattr(Listener, 'patience', .3)
    monkeypatch.setattr(BoundedQueue, 'max_pieces', 3)
    model,good,goes_on,got = net(),Heard(),threading.Event(),[]
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), ttypes='output', home=tmp_path)
    def hangs(step, rows):
        got.append(step)
        goes_on.wait()
    l = te.t.listen(hangs); te.t.listen(good)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        for i in range(8):
            step(model); te.recorder.close(); te.t.barrier()
            if not i: until(lambda: got)
            until(lambda i=i: len(good)>i)
        began = time.monotonic()
        report = te.close()
        took = time.monotonic()-began
    assert same(good, te.t) and good.steps==[*range(8)] and .3<=took<3
    for what in ('hangs did not get all rows: it is too slow, at step 1', 'hangs has not returned from its call for step 0'):
        assert sum(what in str(w.message) for w in said)==1
    # steps 1 to 4 were dropped, and steps 5 to 7 still wait in the queue
    assert [r for r in report['remarks'] if 'hangs' in r]==[f'{l.name} lost rows of 7 steps: it is too slow (at step 1).']
    goes_on.set()
    until(lambda: got==[0, 5, 6, 7]) # the steps that stayed in the queue
    until(lambda: not l.hangs)
    assert (l.lost.count, l.queue.size, len(l.queue))==(4, 0, 0)
    te.close()


def test_queued_rows_are_bounded_in_bytes(monkeypatch):
    "The queue drops its oldest batches above `max_bytes`. A single batch is always delivered, even if it is larger."
    goes_on,got = threading.Event(),[]
    l = Listener(lambda step, rows: (got.append((step, len(rows[0]['of']))), goes_on.wait()))
    l.queue.max_bytes = 100
    for i,n in enumerate((5, 60, 60, 300)):
        line = json.dumps({'step': i, 'of': 'x'*n}).encode()
        l.put([line], line+b'\n')
        if not i: until(lambda: l.step==0)
    goes_on.set()
    until(lambda: len(got)==2)
    l.close()
    assert got==[(0, 5), (3, 300)] and l.lost.count==2


def test_no_listener_is_called_after_close(tmp_path):
    "close() of a listener waits until its queued rows are delivered. Its thread ends when the run is closed."
    t,heard = emberTracker('mine', tmp_path),Heard()
    slow = t.listen(lambda step, rows: (time.sleep(.01), heard(step, rows)))
    for i in range(9): t + {'step': i}
    slow.close(); slow.close()
    assert heard.steps==[*range(9)] and t.file.listeners.all==()
    t + {'step': 9}
    t.close()
    assert heard.steps==[*range(9)]
    with pytest.raises(TypeError, match='a function of a step and its rows, got a list'): t.listen([])
    last = t.listen(heard)
    for i in (10, 11): # the listener has a thread only while the run is open
        assert (last.thread is None)==(i>10)
        t + {'step': i}
        t.close()
    assert heard.steps==[*range(12)][:9]+[10, 11] and last.thread is None


def test_without_listeners_nothing_is_queued(tmp_path):
    t = emberTracker('mine', tmp_path)
    t.put(lambda: [{'step': 0}], True)
    t.barrier()
    assert not t.file.listeners.pieces and not t.file.listeners.all


def test_listeners_get_rows_once_although_the_disk_is_full(tmp_path):
    t,heard = emberTracker('mine', tmp_path),Heard()
    t.listen(heard)
    t + {'step': 0}
    t.barrier()
    t.file.disk.path,path = tmp_path/'log'/'mine'/'no',t.file.path
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        t + {'step': 1}
        until(lambda: heard.steps==[0, 1])
        t.file.disk.path = path
        t.close()
    assert heard.steps==[0, 1]==[r['step'] for r in in_file(t)]


def run(code, home):
    p = programs.run(textwrap.dedent(code), after=libraries, timeout=120, PYTHONWARNINGS='default', TORCHEMBER_HOME=home)
    return p.returncode, p.stdout, p.stderr


libraries = 'import torch, torchember.ember\nfrom torchember.measure import loading\nloading.loops()'
program = """if True:
    import os, signal, sys, threading, time, torch
    from torchember import torchEmber
    model = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, opt, ttypes='output', name='r')
    def train(n):
        for _ in range(n): model(torch.ones(1, 2)).sum().backward(); opt.step(); opt.zero_grad()
    def say(step, rows): os.write(1, f'{step}:{len(rows)} '.encode())
"""


@pytest.mark.slow
def test_listeners_get_all_rows_of_an_unclosed_run(tmp_path):
    "The interpreter exits without te.close(). Listeners still get all rows of the file."
    assert run(program+'    te.t.listen(say); train(3)', tmp_path)[:2]==(0, '0:2 1:1 2:1 ')


def test_the_interpreter_does_not_wait_for_a_listener_that_hangs(tmp_path):
    began = time.monotonic()
    code,out,err = run(program+"""
    from torchember.store.listeners import Listener
    Listener.patience = .5
    te.t.listen(lambda step, rows: threading.Event().wait(), 'hangs'); te.t.listen(say); train(3)""", tmp_path)
    assert (code, out)==(0, '0:2 1:1 2:1 ') and 'hangs has not returned from its call for step 0' in err and time.monotonic()-began<60
    # step 0 has two rows; the first one is the learning rate
    assert [r['step'] for r in emberTracker('r', tmp_path).lines()]==[0, 0, 1, 2]


def test_after_a_kill_the_file_has_all_reported_rows(tmp_path):
    code,out,_ = run(program+"""
    told = threading.Event()
    def kills(step, rows):
        say(step, rows)
        if step==2: os.kill(os.getpid(), signal.SIGKILL)
    te.t.listen(kills)
    while True: train(1); te.recorder.close(); te.t.barrier(); time.sleep(.01)""", tmp_path)
    assert code==-signal.SIGKILL and out=='0:2 1:1 2:1 '
    assert [r['step'] for r in parse((tmp_path/'log'/'r').read_bytes())[0]][:4]==[0, 0, 1, 2]


def test_a_forked_process_calls_no_listener(tmp_path):
    "The forked child ends without waiting for a listener, and the parent process continues."
    code,out,err = run(program+"""
    gate = threading.Event()
    def waits(step, rows): gate.wait(); say(step, rows)
    l = te.t.listen(waits)
    train(2); te.recorder.close(); te.t.barrier()
    time.sleep(.2) # it is told of step 0 now
    pid = os.fork()
    if not pid:
        began = time.monotonic()
        model(torch.ones(1, 2))
        l.close(); te.close()
        os.write(1, b'child ' if time.monotonic()-began<5 else b'slow ')
        sys.exit()
    assert os.waitpid(pid, 0)[1]==0
    gate.set()
    train(1)
    te.close()""", tmp_path)
    assert (code, out)==(0, 'child 0:2 1:1 2:1 '), err


def test_rows_are_made_once_and_written_before_they_are_reported(tmp_path):
    t,got,made = emberTracker('mine', tmp_path),[],[]
    def look(rows): got.append([r['step'] for r in rows if isinstance(r, dict)]+[r['step'] for r in in_file(t)])
    listen_directly(t.file, look, lambda: None)
    for i in range(3):
        t.put(lambda i=i: made.append(i) or [{'step': i}], True)
        t.barrier()
    assert got==[[0, 0], [1, 0, 1], [2, 0, 1, 2]] and made==[0, 1, 2]


def test_lost_rows_are_counted_in_steps_not_in_batches():
    l = Listener(lambda step, rows: 1/0)
    for i in (0, 0, 1, None, None, 2, 2): l.put([{'step': i}], json.dumps({'step': i}).encode()+b'\n')
    l.close()
    assert l.lost.count==4 and 'lost rows of 4 steps: ZeroDivisionError' in l.remark()


def test_steps_ended_by_passes_are_written_in_order(tmp_path):
    "Steps are held back because `te.step()` might join them. The log has them in order in any case."
    model,x = nn.Linear(2, 1),torch.ones(1, 2)
    with torchEmber(model, name='a', home=tmp_path) as te:
        got = []
        te.t.listen(lambda step, rows: got.append(step))
        for _ in range(5): model(x).sum().backward()
    steps = [r['step'] for r in te.t.lines()]
    assert steps==sorted(steps) and [*dict.fromkeys(steps)]==[*dict.fromkeys(got)]==[0, 1, 2, 3, 4]
