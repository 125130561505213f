"Listeners get exactly the rows that the file gets. They delay and harm neither training nor file nor other listeners"
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
    "What a listener was told"
    def __call__(self, step, rows): self.append((step, rows))
    rows = property(lambda self: [r for _,rows in self for r in rows])
    steps = property(lambda self: [s for s,_ in self])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def in_file(t): return parse(t.log_path.read_bytes())[0]


def same(heard, t):
    "Whether a listener was told what is in the file: all of it, in its order, each call of one step"
    assert heard.rows and repr(heard.rows)==repr(in_file(t)) # NaN is not equal to itself
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


# ---- the same as in the file

def test_listeners_get_every_kind_of_row(tmp_path):
    "Lines and dicts, NaN, functions of the user and te.log. Steps that the schedule leaves out are not reported"
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
    assert same(a, te.t) and sorted(set(a.steps))==[0, 1, 2, 3, 4] # a loss is noted in any step
    assert sorted({r['step'] for r in a.rows if r['ttype']!='scalar'})==[0, 2, 4] and b.rows and repr(a.rows[-len(b.rows):])==repr(b.rows)
    assert any(r.get('nan') for r in a.rows) and any(r.get('of')=='me' for r in a.rows) and len(a.rows)>len(b.rows)


def test_listeners_get_joined_passes_as_one_step(tmp_path):
    "`te.step()` joins three passes. Listeners get the joined step, with the rows that supersede"
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
    "They belong to the step before, and come in batches of their own"
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
    "A tracker without a model has listeners, too"
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
    "A listener may read the run, note numbers, request rows, and remove itself"
    model,seen = net(),[]
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), ttypes='output', home=tmp_path)
    def f(step, rows):
        lines = te.t.log_path.read_bytes().count(b'\n')
        te.mark(seen=step) # before `seen` grows, because the next step begins then
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
    "Also if the writer has not reached the earlier steps yet. A listener knows its first byte in the file"
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
    model(torch.ones(2, 2)) # of the step that is open
    te.t.listen(heard)
    model(torch.zeros(2, 2))
    te.close()
    assert repr(heard.rows)==repr([r for r in in_file(te.t) if r['step']==1]) and {r['tname'] for r in heard.rows}=={'output_0'} and len(heard.rows)==4


def test_listeners_do_not_get_the_rows_that_they_cause(tmp_path):
    "Not through others either: two listeners that answer each other stop. A listener that notes nothing gets all rows"
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
    te.recorder.close() # from here on numbers are noted of a step that is over
    until(lambda: len(spy)>=16)
    te.close()
    assert same(spy, te.t) and len(in_file(te.t))==4+3+6+6 # of the model, by each, of that by each other, and of that by the third
    for name in calls: assert calls[name][0]==(0, []) and len(calls[name])==5 and not any(name in k for _,k in calls[name])


# ---- nobody is harmed

@pytest.mark.parametrize('error', [ValueError('too much'), SystemExit(3), KeyboardInterrupt()])
def test_a_listener_that_raises_gets_the_next_steps(tmp_path, error):
    "The user gets one warning, and the number of lost rows at the end. Other listeners get everything"
    model,good,got = net(),Heard(),[]
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), ttypes='output', home=tmp_path)
    def bad(step, rows):
        rows.clear() # its own
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
    "Training, file and other listeners continue. The end waits once and warns. If the queue is full, the oldest rows are lost"
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
    assert [r for r in report['remarks'] if 'hangs' in r]==[f'{l.name} lost rows of 7 steps: it is too slow (at step 1).'] # 1 to 4, and 5 to 7 that wait
    goes_on.set()
    until(lambda: got==[0, 5, 6, 7]) # what was kept
    until(lambda: not l.hangs)
    assert (l.lost.count, l.queue.size, len(l.queue))==(4, 0, 0)
    te.close()


def test_queued_rows_are_bounded_in_bytes(monkeypatch):
    "A single batch is reported, however large"
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
    "close() waits for queued rows. The thread ends with the run"
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
    for i in (10, 11): # there is a thread while there may be something to tell
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
    "The interpreter ends, and all rows in the file have been reported"
    assert run(program+'    te.t.listen(say); train(3)', tmp_path)[:2]==(0, '0:2 1:1 2:1 ')


def test_the_interpreter_does_not_wait_for_a_listener_that_hangs(tmp_path):
    began = time.monotonic()
    code,out,err = run(program+"""
    from torchember.store.listeners import Listener
    Listener.patience = .5
    te.t.listen(lambda step, rows: threading.Event().wait(), 'hangs'); te.t.listen(say); train(3)""", tmp_path)
    assert (code, out)==(0, '0:2 1:1 2:1 ') and 'hangs has not returned from its call for step 0' in err and time.monotonic()-began<60
    assert [r['step'] for r in emberTracker('r', tmp_path).lines()]==[0, 0, 1, 2] # the first one has the learning rate


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
    "It ends without waiting, and the parent continues"
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
    "They are kept back because `te.step()` might join them. Whatever ends this, the log has them in order"
    model,x = nn.Linear(2, 1),torch.ones(1, 2)
    with torchEmber(model, name='a', home=tmp_path) as te:
        got = []
        te.t.listen(lambda step, rows: got.append(step))
        for _ in range(5): model(x).sum().backward()
    steps = [r['step'] for r in te.t.lines()]
    assert steps==sorted(steps) and [*dict.fromkeys(steps)]==[*dict.fromkeys(got)]==[0, 1, 2, 3, 4]
