"What is said and shown of a run that goes on, step by step: without another process, and without waiting"
import io
import json
import os
import sys
import threading
import time
import types
import warnings

import pytest

from torchember import EmberWarning, emberTracker
from torchember.show.live import following, live_view
from torchember.show.live.following import OverviewRows, Tail, as_shown, loss_in, shown_rows, thinned_lines
from torchember.show.live.live_view import (Live, LogScreen, NotebookScreen, RowsOfFile, RowsTold, TerminalScreen, Viewer, Words, close_shown,
    goes_on, live)
from torchember.store import compaction, parts
from torchember.store.lines import parse


def row(step, path='a', ttype='output', std=1., **more):
    return {'step': step, 'module': f'model(N).{path}(L)', 'ttype': ttype, 'tname': f'{ttype}_0', 'call': 0, 'std': std, **more}


def number(step, **more): return {'step': step, 'module': 'model(N)', 'ttype': 'scalar', 'tname': 'log', 'call': 0, **more}


def lines(*rows): return ''.join(json.dumps(r)+'\n' for r in rows).encode()


def test_what_a_line_says():
    "The last step, the newest loss, the first trouble; of an evaluation only as long as there was no training"
    w = Words()
    assert (w.speed(), w.pace(), w.line('r'))==(None, '', 'r: step -1')
    w.add([], 0.)
    w.add([row(0, nan=2, phase='eval')], 1.)
    assert w.line('r')=='r: step 0, first not finite: step 0, output of a (2 NaN)' and len(w.at)==1
    w.add([number(0, loss=5., rate=2.), row(1), row(1, nan=1, phase='eval'), number(3, nan=1, loss=None)], 2.)
    assert (w.line('r'), w.loss, w.step)==('r: step 3, loss 5', ('loss', 5.), 3)
    w.add([row(5, path='b', posinf=3), row(4, path='c', neginf=1), number(4, loss=.25), number(4, rate=7)], 4.)
    assert w.line('r', 4.)=='r: step 5, loss 0.25, first not finite: step 4, output of c (1 -inf), 1.7 steps/s' # of the earliest step, as in a picture
    assert w.line('r', 94.).endswith(', 1.7 steps/s') and w.line('r', 95.).endswith(', nothing new for 2 min')
    w.add([number(2, loss=1.)], 4.)
    assert (w.step, w.loss)==(5, ('loss', 1.))


def test_the_pace_is_that_of_the_last_looks():
    "Of sixteen; and in words that fit"
    for seconds,said in ((1., ', 20 steps/s'), (20., ', 1 steps/s'), (200., ', 0.1 steps/s'), (400., ', 20 s a step'), (2., ', 10 steps/s')):
        w = Words()
        w.add([row(0)], 10.)
        w.add([row(20)], 10.+seconds)
        assert w.pace()==said
    w.add([row(20)], 99.)
    assert w.speed()==20/89
    for i in range(16): w.add([row(100+i)], 200.+2*i)
    assert w.speed()==.5
    still = Words()
    for at in (1., 1., 5.): still.add([row(3)], at)
    assert still.speed() is None and still.pace()==''


def test_what_a_viewer_answers(tmp_path, monkeypatch):
    "The line at each look, a picture where there is something new or it is the last; another log is read from its begin"
    log,other = tmp_path/'r',tmp_path/'s'
    v,drawn = Viewer(True, {}),[]
    monkeypatch.setattr(v, 'draw', lambda name, over: drawn.append((name, over)) or b'png')
    log.write_bytes(b'')
    assert (v.answer(None), v.answer(log))==({}, {})
    log.write_bytes(lines(row(0), number(0, loss=2.)))
    assert v.answer(log)=={'line': 'r: step 0, loss 2', 'png': b'png'} and drawn==[('r', False)]
    assert v.answer(log)=={'line': 'r: step 0, loss 2'} and len(drawn)==1
    assert v.answer(log, True)=={'line': 'r: step 0, loss 2', 'png': b'png'} and drawn[1:]==[('r', True)]
    with log.open('ab') as f: f.write(lines(row(1, nan=1))+b'{"step": 2')
    assert v.answer(log)['line'].startswith('r: step 1, loss 2, first not finite: step 1') and len(v.kept)==3 and v.kept.step==1
    other.write_bytes(lines(row(7)))
    assert v.answer(other)['line'].startswith('s: step 7') and v.tail.path==other and v.tail.at==len(lines(row(7)))
    plain = Viewer(False, {})
    assert plain.answer(log).keys()=={'line'} and plain.kept is None
    monkeypatch.setattr(Tail, 'more', lambda self, most=1<<26: (setattr(self, 'size', 3<<20), setattr(self, 'at', 1<<20), b'')[-1])
    behind = Viewer(False, {}).answer(log)
    assert behind.keys()=={'behind'} and behind['behind']==pytest.approx(1/3)


def test_the_last_picture_has_no_pace(tmp_path):
    "The others say until when they are"
    v,labels = Viewer(True, {}),[]
    v.kept.add([row(s, path=p) for s in range(3) for p in 'ab'])
    v.words.add([row(0)], 0.)
    v.words.add([row(4)], 2.)
    import torchember.show.first_look as first_look
    overview,first_look.overview = first_look.overview,lambda *args, **kwargs: labels.append(overview(*args, **kwargs)) or labels[-1]
    try: png = v.draw('r', False), v.draw('r', True)
    finally: first_look.overview = overview
    assert [ax.get_xlabel() for ax in labels]==['step · 5 until now, 2 steps/s', 'step'] and labels[0].figure.get_suptitle()=='r'
    assert png[0][:4]==png[1][:4]==b'\x89PNG' and Viewer(True, {}).draw('r', True) is None


def test_lines_of_a_file_are_a_minute_apart(monkeypatch):
    "And the last is never lost, nor said twice"
    now,out = [100.],io.StringIO()
    monkeypatch.setattr(live_view.time, 'monotonic', lambda: now[0])
    monkeypatch.setattr(sys, 'stderr', out)
    s = LogScreen('r')
    for at,line in ((100., 'a'), (159., 'b'), (160., 'c'), (161., 'd'), (200., 'e')):
        now[0] = at
        s.show(line, b'png')
    s.end(), s.end()
    assert out.getvalue()=='a\nc\ne\n'


def test_a_picture_of_a_notebook_stays(monkeypatch):
    "A line is shown until there is a picture, and with each picture"
    shown = []
    handle = types.SimpleNamespace(update=lambda data, raw: shown.append((data, raw)))
    monkeypatch.setattr('IPython.display.display', lambda data, raw, display_id: (shown.append((data, display_id)), handle)[1])
    s = NotebookScreen('r')
    s.show('a')
    s.show('b', b'p')
    s.show('c')
    s.show('d', b'q')
    assert shown==[({'text/plain': 'r: waiting for the first rows'}, True), ({'text/plain': 'a'}, True),
        ({'text/plain': 'b', 'image/png': 'cA=='}, True), ({'text/plain': 'd', 'image/png': 'cQ=='}, True)]


def test_a_long_name_leaves_room_on_a_terminal(monkeypatch):
    "For what is said of the run; a short one is whole"
    monkeypatch.setattr(live_view, 'get_terminal_size', lambda: os.terminal_size((40, 20)))
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    s = TerminalScreen('r')
    for line,said in (('r: step 3: x', 'r: step 3: x'), ('n'*30+': '+'s'*20, 'n'*16+'…: '+'s'*20), ('n'*17+': '+'s'*20, 'n'*17+': '+'s'*20),
            ('n'*30+': '+'s'*50, 'n'*7+'…: '+'s'*50)):
        s.show(line)
        assert s.bar.desc==said
    s.end()


class Screen:
    picture = False
    def __init__(self): self.shown,self.ended = [],0
    def show(self, line, png=None): self.shown.append((line, png))
    def end(self): self.ended += 1


class Answers:
    "Instead of a process: what it is to answer"
    made = []
    def __init__(self, **how):
        self.how,self.asked,self.killed = how,[],False
        self.made.append(self)

    def ask(self, **question):
        self.asked.append(question)
        got = self.script.pop(0)
        if isinstance(got, Exception): raise got
        return {'took': .5, 'seconds': .5*len(self.asked), **(got() if callable(got) else got)}

    def kill(self): self.killed = True
    def end(self): return 9.


@pytest.fixture
def answers(monkeypatch):
    "A run that is followed in this thread, with these answers"
    monkeypatch.setattr(live_view, 'Reader', Answers)
    def follow(script, over=(), path='p/r', every=2.):
        Answers.script,Answers.made[:],over = list(script),[],iter(over)
        path = path and types.SimpleNamespace(name=path.rpartition('/')[2])
        v = Live(RowsOfFile(lambda: path, lambda: not next(over, True)), Screen(), every)
        v.pauses = []
        v.pause = v.pauses.append
        return v
    return follow


def test_a_run_is_followed_to_its_end(answers):
    "Each answer is shown, and the last question says that it is the last; what is behind is read on at once"
    v = answers([{}, {'line': 'r: 1'}, {'behind': .25}, {'line': 'r: 2', 'png': b'p'}, {'behind': .5}, {'line': 'r: 3', 'png': b'q'}], [0, 0, 0, 0, 1, 1])
    v.run()
    assert v.screen.shown==[('r: 1', None), ('r: reading what there is, 25%', None), ('r: 2', b'p'), ('r: reading what there is, 50%', None), ('r: 3', b'q')]
    assert [q['over'] for q in v.reader.asked]==[False]*4+[True]*2 and {q['path'].name for q in v.reader.asked}=={'r'} and v.screen.ended==1
    assert (v.process_seconds, v.drawing, len(v.pauses), v.reader.how)==(9., 3., 3, {'picture': False, 'look': {}}) and v.seconds==v.thread_seconds+9.


def test_drawing_takes_a_twentieth_of_a_core(answers):
    "After a second of it in advance, and never less than what was asked for lies between"
    v = answers([{}]*5, [0, 0, 0, 0, 1])
    v.run()
    assert v.pauses[:2]==[2., 2.] and v.pauses[2:]==[pytest.approx(10, abs=1), pytest.approx(20, abs=1)]


def test_a_run_without_rows_says_so(answers):
    for path,said in (('p/r', 'r: nothing was recorded'), (None, 'The run: nothing was recorded')):
        v = answers([{}, {}], [0, 1], path)
        v.run()
        assert v.screen.shown==[(said, None)]


@pytest.mark.parametrize(('answer', 'said'), [({'error': 'KeyError: 3'}, 'has stopped: KeyError: 3'), ({'gone': True}, 'has ended: the log .* was removed'),
    (EOFError(), 'has stopped: its process has ended'), (ValueError('x'), 'has stopped: ValueError: x')])
def test_what_ends_it_is_said(answers, answer, said):
    "Once; the screen and the process are let go, and who has let it go first hears nothing"
    v = answers([{}, answer], [0])
    with pytest.warns(EmberWarning, match=f'torchember: live {said}. Everything else goes on.'): v.run()
    assert (v.screen.ended, v.process_seconds)==(1, 9.)
    dropped = answers([{}, answer], [0])
    dropped.pause = lambda s: setattr(dropped, 'closing', True)
    dropped.say = lambda what, own=dropped.say: (setattr(dropped, 'dropped', True), own(what))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        dropped.run()


@pytest.mark.parametrize('last', [True, False])
def test_closing(answers, last):
    "Asks once more, as the last; or drops it at once, and the process with it. A second time does nothing"
    v = answers([{'line': 'r: 1'}, {'line': 'r: 2'}], [0]*9)
    began,go_on = threading.Event(),threading.Event()
    v.pause = lambda s: (began.set(), Live.pause(v, 60))
    if not last: Answers.script[1] = lambda: (go_on.wait(5), {'line': 'r: 2'})[1]
    v.begin()
    assert began.wait(10) and v in live_view.shown
    if not last: # it is asking when it is dropped
        v.reader.kill = lambda: (setattr(v.reader, 'killed', True), go_on.set())
        v.calls.put(1)
        while len(v.reader.asked)<2: time.sleep(.001)
    v.close(last)
    assert not v.thread.is_alive() and v.reader.killed is not last and 'ended' in repr(v)
    assert [q['over'] for q in v.reader.asked]==[False, last] and [line for line,_ in v.screen.shown][:1]==['r: 1']
    n = v.calls.qsize()
    v.close()
    assert v.calls.qsize()==n


def test_the_end_of_the_interpreter_ends_them(monkeypatch):
    "Each, though another one fails: what is not written yet is written before"
    done = []
    class V:
        def __init__(self, n, flush=lambda: None): self.n,self.rows = n,types.SimpleNamespace(flush=flush)
        def close(self, patience): done.append((self.n, patience))
    monkeypatch.setattr(live_view, 'shown', [V(1, lambda: done.append('flush')), V(2, lambda: 1/0), V(3)])
    monkeypatch.setattr(sys, 'stderr', err := io.StringIO())
    close_shown()
    assert done==['flush', (1, 10.), (3, 10.)] and 'division' in err.getvalue()


def test_whether_a_run_goes_on(tmp_path, monkeypatch):
    "Not after its end, nor when its process is gone; on another machine nobody can tell, and without any word its log tells"
    t = emberTracker('r', tmp_path)
    assert not goes_on(t, None)
    t(row(0))
    t.barrier()
    assert goes_on(t, None)
    os.utime(t.log_path, (1, 1))
    assert not goes_on(t, None)
    here = live_view.gethostname()
    known = [({'host': here, 'pid': os.getpid()}, True), ({'host': here, 'pid': 2**22+1}, False), ({'host': 'elsewhere', 'pid': 2**22+1}, True),
        ({'host': here, 'pid': os.getpid(), 'end': 'x'}, False), ({'host': 'elsewhere', 'pid': 1, 'end': 'x'}, False)]
    assert [goes_on(t, base) for base,_ in known]==[yes for _,yes in known]
    t.close()


def test_which_view_of_a_run_is_made(tmp_path, monkeypatch):
    "An ember's own takes the place of its last one; a run that is over or elsewhere is followed by its words, and waited for where it is elsewhere"
    made = []
    class View:
        def __init__(self, rows, screen, every):
            self.rows,self.goes_on,self.every,self.done = rows,rows.goes_on,every,[]
            made.append(self)
        told = property(lambda self: isinstance(self.rows, RowsTold))
        def begin(self): self.done.append('begin')
        def wait(self): self.done.append('wait')
        def close(self, last): self.done.append(('close', last))
    monkeypatch.setattr(live_view, 'Live', View)
    monkeypatch.setattr(live_view, 'screen_for', lambda name: name)
    t = emberTracker('r', tmp_path)
    t.source = lambda close: None # somebody in this process records it
    class Ember: pass
    te = Ember()
    te.t,te.views,te.armed = t,[],True
    first,second = live(te), live(te, every=.5)
    assert first.done==['begin', ('close', False)] and second.done==['begin'] and te.views==[first, second] and (first.every, second.every)==(2., .5)
    assert first.told and second.told and first.goes_on()
    with pytest.raises(ValueError, match='would wait for a training'): live(te, wait=True)
    t(row(0))
    second.rows.flush()
    assert [second.rows.question(ready)['lines'] for ready in (False, True)]==[b'', t.log_path.read_bytes()] and second.rows.path==t.log_path
    base = {'pid': os.getpid()}
    monkeypatch.setattr(live_view, 'base_of', lambda t: base)
    own,other = live(t),live('r', home=tmp_path, wait=True)
    assert (own.done, own.told, own.goes_on())==(['begin'], True, True) and (other.done, other.told)==(['begin', 'wait'], False)
    base = {'pid': os.getpid()+1}
    assert live(t).done==['begin', 'wait'] and live(t, wait=False).done==['begin'] and live(te).done==['begin']
    te.armed = False
    assert live(te).told
    base = {'pid': os.getpid(), 'end': 'x'}
    over = live(te, wait=True)
    assert (over.told, over.done, over.goes_on(), te.views[-1] is over)==(False, ['begin', 'wait'], False, True) and not own.goes_on()
    te.armed = True
    assert live(te).told # which goes on all the same
    gone = made[1]
    del te
    assert not gone.goes_on()
    for v in made: v.rows.end()
    assert t.file.listeners.all==()
    for every in (0, True, '2', -1, None, float('nan')):
        with pytest.raises(ValueError, match='every is a number'): live(t, every=every)
    with pytest.raises(TypeError, match='not an int'): live(3)
    t.close()


def test_rows_that_are_told_follow_those_of_the_file(tmp_path):
    "What was there before is read once, up to where telling began; what is told comes after it, each row once, also where the file is cut or gone"
    t = emberTracker('r', tmp_path)
    for i in range(3): t(row(i))
    told,v = RowsTold(t, lambda: True),Viewer(False, {})
    seen,v.words.add = [],lambda rows, now: seen.extend(r['step'] for r in rows)
    for i in range(3, 6): t(row(i))
    t({'note': 'no step'})
    v.answer(**told.question(False))
    assert seen==[0, 1, 2]
    t.close()
    t.log_path.unlink()
    for _ in range(2): v.answer(**told.question(True))
    assert seen==[*range(6)]
    t(row(6)); t.close()
    v.answer(**told.question(True))
    told.end()
    t(row(7)); t.close()
    v.answer(**told.question(True))
    assert seen==[*range(7)]


def test_rows_that_are_told_are_bounded(monkeypatch, tmp_path):
    "Of too many those of each second step stay, with the last one and the first that is not finite"
    monkeypatch.setattr(RowsTold, 'most', 8)
    t = emberTracker('r', tmp_path)
    told = RowsTold(t, lambda: True)
    for i in range(100): told(i, lines(row(i, nan=1) if i in (2, 5) else row(i), row(i, 'b')))
    told(None, b'{"a": 1}\n'*100)
    told.end()
    assert told.n<=12
    rows = [json.loads(l) for l in told.question(True)['lines'].splitlines()]
    assert len(rows)<=12 and rows[-1]['step']==99 and [r['step'] for r in rows if r.get('nan')]==[2, 5] and told.question(True)['lines']==b''
    assert told.n==0 # what was handed on counts no more


def test_the_last_question_is_asked_when_what_was_before_is_read(answers):
    v = answers([{'behind': .5}, {'line': 'r: 1'}, {'line': 'r: 2'}], [1]*9)
    asked = []
    v.rows.question = lambda ready: asked.append(ready) or {'path': v.rows.path(), 'lines': b''}
    v.run()
    assert asked==[False, False, True] and [line for line,_ in v.screen.shown][-1]=='r: 2'


def test_what_was_appended(tmp_path):
    "Whole lines, each once; a log that was cut is read from where it ends, another file of the name is none of it"
    path = tmp_path/'r'
    path.write_bytes(b'{"a":1}\n{"a":2}\n{"a":')
    t = Tail(path)
    assert (t.more(), t.at, t.more(), t.size)==(b'{"a":1}\n{"a":2}\n', 16, b'', 21)
    with path.open('ab') as f: f.write(b'3}\n{"a":4}\n')
    assert (t.more(4), t.share, t.more(), t.share)==(b'{"a":3}\n', 24/32, b'{"a":4}\n', 1)
    os.truncate(path, 8)
    assert (t.more(), t.at)==(b'', 8)
    with path.open('ab') as f: f.write(b'{"a":5}\n')
    assert t.more()==b'{"a":5}\n'
    (tmp_path/'s').write_bytes(path.read_bytes()+b'{"a":6}\n')
    os.replace(tmp_path/'s', path)
    with pytest.raises(FileNotFoundError, match='another file'): t.more()


def test_a_line_that_is_too_long_is_passed_over(tmp_path, monkeypatch):
    "And what comes after it is read"
    monkeypatch.setattr('torchember.show.live.following.longest_line', 20)
    path = tmp_path/'r'
    path.write_bytes(b'1\n'+b'x'*50+b'\n2\n')
    t,got = Tail(path),[]
    while t.at<path.stat().st_size: got.append(t.more(8))
    assert got[0]==b'1\n' and b''.join(got).endswith(b'2\n')


def test_rows_that_can_be_shown():
    "A step and a type; a name that is none and a count that is none are left out, zero is one"
    good,odd = row(0, nan=0, posinf=2),row(1, nan=-1, posinf='x', neginf=True)
    odd |= {'module': {}, 'path': 3, 'pname': None}
    assert shown_rows([good, odd, row('1'), {'step': 1}, {**good, 'ttype': 3}, {**good, 'step': None}])==[good,
        {'step': 1, 'ttype': 'output', 'tname': 'output_0', 'call': 0, 'std': 1.}]
    assert as_shown(good) is good


def test_lines_without_a_step_are_kept():
    data = b'{"note": 1}\n'+b''.join(b'{"step": %d}\n'%s for s in range(9))
    assert thinned_lines(data, 5)==b'{"note": 1}\n'+b''.join(b'{"step": %d}\n'%s for s in (0, 2, 4, 6, 8))


def test_the_loss_that_is_drawn():
    "One that is called so, else the first; marks are none"
    assert [loss_in(r) for r in ([number(0, rate=1, val_loss=2)], [number(0, rate=1), number(1, b=2)], [number(0)], [number(0, x='a', y=1)])]==[
        'val_loss', 'rate', None, 'y']


def test_what_an_overview_needs_is_kept():
    "Outputs and gradients of weights; of other types the first that came, as long as there is nothing better"
    k = OverviewRows()
    k.add([row(0, ttype='input'), row(0, ttype='weight'), row(0, ttype='input', path='b')])
    table,kinds = k.table()
    assert (kinds, table.path.tolist(), k.other, len(k))==(['input'], ['a', 'b'], 'input', 2)
    k.add([row(1, ttype='input'), row(1), row(1, ttype='weight_grad')])
    table,kinds = k.table()
    assert (kinds, list(zip(table.step, table.ttype, strict=True)))==(['output', 'weight_grad'], [(1, 'output'), (1, 'weight_grad')])
    k.add([row(2, ttype='input', nan=1), row(2), row(3, ttype='weight', neginf=1), row(2.5), {'step': 9}])
    table,_ = k.table()
    assert list(zip(table.step, table.ttype, strict=True))==[(2, 'input'), (1, 'output'), (1, 'weight_grad'), (2, 'output')] and k.step==3
    k.add([number(4, rate=1.), number(5, loss=2., ts=1, nonfinite='x')])
    assert (k.loss, k.last_loss, k.step, len(k), k.numbers[-1].keys() & {'ts', 'nonfinite'})==('loss', 2., 5, 5, set())
    k.add([row(1, std=7., supersedes=True)])
    assert [(r.step, r.std) for r in k.together().itertuples() if r.ttype=='output']==[(2, 1.), (1, 7.)] and len(k.parts)==1


def test_what_is_kept_of_a_row():
    "The best statistic alone; where there is none, what tells the row from one of these"
    k = OverviewRows()
    known = {k_: v for k_,v in row(0).items() if k_!='std'}
    assert k.slim(row(0, rms=2., mean=3., abs_max=4.))=={**known, 'rms': 2.} and k.slim(row(0, rms=None, mean=3.))=={**known, 'std': 1.}
    assert k.slim({**known, 'mine': 3., 'n': 4, 'v': [1, 2]})=={**known, 'mine': 3., 'n': 4, 'v': []}
    assert k.slim({**known, 'std': None, 'mine': 3., 'n': 4})=={**known, 'mine': 3.}
    a,b = k.slim(json.loads(json.dumps(row(0)))),k.slim(json.loads(json.dumps(row(1))))
    assert a['module'] is b['module']


def test_a_long_run_is_put_together(monkeypatch):
    "As often as it must be, for all of its steps alike; few steps stay as they are, and numbers have bins of their own"
    monkeypatch.setattr(OverviewRows, 'most', 100)
    monkeypatch.setattr(OverviewRows, 'least', 8)
    monkeypatch.setattr(OverviewRows, 'most_numbers', 40)
    k = OverviewRows()
    def step(s): return [*(row(s, path=p, std=1.+(s==77)) for p in 'ab'), number(s, loss=1.+(s==33), rate=.1)]
    for s in range(0, 200, 10): k.add([r for i in range(s, s+10) for r in step(i)])
    table,_ = k.table()
    outputs = table[table.ttype=='output']
    assert k.n==len(k.together())<=100 and k.width in (4, 8) and len(k.numbers)<=40 and k.width_of_numbers>=8
    assert outputs['step'].tolist()[-1]==199 and set(outputs['step'][:-4]%k.width)=={k.width-1} and outputs['std'].tolist().count(2.)==2
    assert [(r.step, r.loss) for r in table[table.ttype=='scalar'].itertuples() if r.loss==2.]==[(33, 2.)]
    wide = OverviewRows()
    for s in range(0, 9, 3): wide.add([row(s+j, path=f'p{i}') for j in range(3) for i in range(40)])
    assert wide.table()[0]['step'].nunique()>=5 # 8 steps of 40 layers are more than 100 rows


def test_a_log_that_was_compacted(tmp_path, monkeypatch):
    "What was removed from its file is read from parts, one at a look, and what comes after it from the file; removed while it is followed, nothing is lost"
    monkeypatch.setattr(compaction, 'most_rows', 4)
    path,rows = tmp_path/'r',[row(s, std=float(s)) for s in range(10)]
    path.write_bytes(lines(*rows[:6]))
    v,seen = Viewer(False, {}),[]
    monkeypatch.setattr(v, 'rows_in', lambda block: seen.extend(got := Viewer.rows_in(v, block)) or got)
    assert v.answer(path)['line'].startswith('r: step 5') and seen==rows[:6]
    compaction.into_parts(path)
    seen.clear()
    assert 'behind' not in v.answer(path) and seen==[] # all of that is read
    v.begin()
    assert v.answer(path)['behind']==pytest.approx(len(lines(*rows[:4]))/len(lines(*rows[:6])))
    with path.open('ab') as f: f.write(lines(*rows[6:]))
    assert 'behind' in v.answer(path) and seen==rows[:6]
    assert v.answer(path)['line'].startswith('r: step 9') and seen==rows and v.tail.share==1
    compaction.into_parts(path, 9) # it goes on: its lines stay
    told,again = lines(row(10)),Viewer(False, {})
    seen.clear()
    monkeypatch.setattr(again, 'rows_in', lambda block: seen.extend(got := Viewer.rows_in(again, block)) or got)
    at = parts.summarize_parts(path)['lines']+path.stat().st_size
    with path.open('ab') as f: f.write(told)
    while 'behind' in (got := again.answer(path, until=at)): pass
    assert got['line'].startswith('r: step 9') and seen==rows
    assert again.answer(path, until=at, lines=told)['line'].startswith('r: step 10') and seen==[*rows, row(10)]
    compaction.into_parts(path)
    resumed = Viewer(False, {}) # nothing is in the file, and the process that goes on tells
    while 'behind' in (got := resumed.answer(path, until=0)): pass
    assert got['line'].startswith('r: step 10') and resumed.answer(path, until=0, lines=lines(row(11)))['line'].startswith('r: step 11')


def test_a_log_that_is_rotated_is_followed_on(tmp_path):
    "What was put aside is read to its end, then the file in its place, each line once; who was away for two times is told"
    path,rows = tmp_path/'r',[b'{"a":%d}\n'%i for i in range(9)]
    def add(*some):
        with path.open('ab') as f: f.write(b''.join(some))
    add(*rows[:3])
    t = Tail(path)
    assert t.more(8)==rows[0]
    compaction.rotate(path)
    add(*rows[3:5])
    assert (t.more(8), t.more(), t.more(), t.more())==(rows[1], rows[2], rows[3]+rows[4], b'') and t.share==1 and not t.behind
    compaction.compact_aside(path)
    add(rows[5])
    assert (t.more(), t.share)==(rows[5], 1)
    compaction.rotate(path)
    compaction.compact_aside(path)
    add(rows[6])
    assert (t.more(), t.more(), t.share, t.was_compacted())==(rows[6], b'', 1, False)
    for _ in range(2):
        add(rows[7])
        compaction.rotate(path)
        compaction.compact_aside(path)
    with pytest.raises(FileNotFoundError, match='another file'): t.more()
    assert t.was_compacted()


def test_a_large_part_is_thinned(tmp_path):
    "As lines are: whole steps, the last among them, what is not finite, what rules saw, and what has no step"
    path,rows = tmp_path/'r',[{'note': 1}, *[row(s//2, path='ab'[s%2], nan=int(s==5)) for s in range(60)], {**row(2, ttype='finding'), 'over': True}]
    path.write_bytes(lines(*rows))
    compaction.into_parts(path)
    for part in parts.blocks_of_run(path):
        for all_finite in (True, False):
            got = following.thinned_rows(part, 20, all_finite)
            assert got==parse(thinned_lines(lines(*rows), 20, all_finite))[0] and len(got)<25 and got[-1]['ttype']=='finding'
        assert following.thinned_rows(part)==rows
