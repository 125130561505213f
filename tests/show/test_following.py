"Live view of a running run as a line and a picture, tested without another process and without waiting"
import io
import json
import os
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from socket import gethostname

import pytest

from torchember import EmberWarning, emberTracker
from torchember.frames.handle import LogReader
from torchember.show.live import live_view
from torchember.show.live.following import FollowedLog, Tail
from torchember.show.live.live_view import Live, LogScreen, NotebookScreen, Speed, TerminalScreen, Viewer, finish_live_views, line_about, live
from torchember.store import compaction


def row(step, path='a', ttype='output', std=1., **more):
    return {'step': step, 'module': f'model(N).{path}(L)', 'ttype': ttype, 'tname': f'{ttype}_0', 'call': 0, 'std': std, **more}


def number(step, **more): return {'step': step, 'module': 'model(N)', 'ttype': 'scalar', 'tname': 'log', 'call': 0, **more}


def lines(*rows): return ''.join(json.dumps(r)+'\n' for r in rows).encode()


@pytest.fixture
def home(tmp_path):
    (tmp_path/'log').mkdir()
    return tmp_path


def write(home, name, *rows):
    "Append rows to the log of a run"
    with (home/'log'/name).open('ab') as f: f.write(lines(*rows))


def line_of_run(home, name='r', over=True): return Viewer(home, False, {}).answer(name, over).get('line')


def test_a_line_has_step_loss_and_the_worst_finding(home):
    "The line has the last loss, and the first training row with NaN or infinity, which outranks warnings but not errors"
    assert Viewer(home, False, {}).answer('r')=={}
    write(home, 'r', row(0, nan=2, phase='eval'), number(0, loss=5., rate=2.), row(1))
    assert line_of_run(home)=='r: step 1, loss 5'
    write(home, 'r', row(4, path='c', neginf=1), row(5, path='b', posinf=3), number(5, loss=.25))
    assert line_of_run(home)=='r: step 5, loss 0.25, first not finite: step 4, output of c (1 -inf)'
    finding = {'rule': 'r', 'first_step': 5, 'text': 'This is loud.'}
    write(home, 'r', row(5, ttype='finding', severity='warning', **finding))
    assert line_of_run(home).endswith('output of c (1 -inf)') # NaN or infinity outranks this warning
    write(home, 'r', row(5, ttype='finding', severity='error', **finding))
    assert line_of_run(home).endswith(', This is loud.')
    write(home, 'r', row(6, ttype='finding', severity='error', **finding, over=True))
    assert line_of_run(home).endswith('output of c (1 -inf)')
    assert line_about({'name': 'r', 'steps': 2, 'loss': ['loss', None], 'finding': None}, ', 2 steps/s')=='r: step 1, loss NaN, 2 steps/s'


def test_the_speed_is_that_of_the_last_16_looks():
    "The speed is that of the last 16 updates, in a unit that fits"
    for seconds,text in ((1., ', 20 steps/s'), (20., ', 1 steps/s'), (200., ', 0.1 steps/s'), (400., ', 20 s a step'), (2., ', 10 steps/s')):
        s = Speed()
        s.add(10., 0)
        s.add(10.+seconds, 20)
        assert s.text()==text and s.text_now(10.+seconds+90.)==text and s.text_now(10.+seconds+91.)==', nothing new for 2 min'
    for i in range(16): s.add(200.+2*i, 100+i)
    assert s.text()==', 0.5 steps/s'
    still = Speed()
    for at in (1., 1., 5.): still.add(at, 3)
    assert still.text()=='' and Speed().text_now(1e9)==''


def test_a_viewer_draws_only_what_is_new(home, monkeypatch):
    "Each answer has a line, and a picture only if there are new rows or the run has ended. Another run name starts again"
    v,drawn = Viewer(home, True, {}),[]
    monkeypatch.setattr(v, 'draw', lambda over: drawn.append((v.name, over)) or b'png')
    write(home, 'r')
    assert (v.answer('none'), v.answer('r'))==({}, {})
    write(home, 'r', row(0), number(0, loss=2.))
    shown = {'line': 'r: step 0, loss 2', 'state': 'ended'}
    assert v.answer('r')=={**shown, 'png': b'png'} and drawn==[('r', False)]
    assert v.answer('r')==shown and len(drawn)==1
    assert v.answer('r', True)=={**shown, 'png': b'png'} and drawn[1:]==[('r', True)]
    with (home/'log'/'r').open('ab') as f: f.write(lines(row(1, nan=1))+b'{"step": 2')
    assert v.answer('r', True)['line']=='r: step 1, loss 2, first not finite: step 1, output of a (1 NaN)'
    write(home, 's', row(7))
    assert v.answer('s')['line'].startswith('s: step 7')
    (home/'log'/'s').unlink()
    with pytest.raises(FileNotFoundError): v.answer('s')
    monkeypatch.setattr(FollowedLog, 'most', 1<<10)
    write(home, 'long', *(row(s, note='x'*1000) for s in range(3000)))
    long = Viewer(home, False, {})
    assert long.answer('long').keys()=={'behind'} and 0<long.answer('long')['behind']<.01


def test_the_last_picture_has_no_speed(home, monkeypatch):
    "Pictures before the end name the current step. The picture of a large run names the number of shown steps"
    write(home, 'r', *(row(s, path=p) for s in range(60) for p in 'ab'))
    v,axes = Viewer(home, True, {}),[]
    import torchember.show.first_look as first_look
    monkeypatch.setattr(first_look, 'overview', lambda *args, own=first_look.overview: axes.append(own(*args)) or axes[-1])
    png = [v.answer('r')['png'], v.answer('r', True)['png']]
    v.most = 20
    png.append(v.answer('r', True)['png'])
    assert [ax.get_xlabel() for ax in axes]==['step · 60 so far', 'step', 'step · 10 of 60 shown'] and axes[0].figure.get_suptitle()=='r'
    assert all(p[:4]==b'\x89PNG' for p in png)
    write(home, 'numbers', number(0, loss=1.))
    assert Viewer(home, True, {}).answer('numbers', True)['png'] is None


def test_compaction_loses_no_row_of_a_followed_log(home, monkeypatch):
    "The view has the numbers of all rows, each once, although the log is compacted; so has a view that starts later"
    monkeypatch.setattr(compaction, 'most_rows', 4)
    path,v = home/'log'/'r',Viewer(home, False, {})
    for first in range(0, 40, 10):
        write(home, 'r', *(number(s, loss=float(s)) for s in range(first, first+10)))
        while 'line' not in (got := v.answer('r')): pass
        assert got['line'].startswith(f'r: step {first+9}, loss {first+9}')
        if first<30: compaction.convert_to_parts(path)
    log, = v.listing.logs_of('r')
    assert log.loss[1].values()==[float(s) for s in range(40)] and log.tail.rows==40
    late = Viewer(home, False, {})
    while 'line' not in (got := late.answer('r')): pass
    assert late.listing.logs_of('r')[0].loss[1].values()==log.loss[1].values()


def test_lines_of_a_file_are_a_minute_apart(monkeypatch):
    "When stderr is a file, lines are printed once a minute, and the last line once at the end"
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
    "In a notebook, lines are shown until the first picture, and later only together with a new picture"
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


def test_a_long_name_is_shortened_on_a_terminal(monkeypatch):
    "On a terminal, a long run name is shortened so that the rest of the line fits"
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
    "Gives prepared answers in place of a viewer process"
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
    "Return a function that creates a `Live` view which runs in this thread and gets prepared answers"
    monkeypatch.setattr(live_view, 'Reader', Answers)
    def follow(script, over=(), name='r', every=2.):
        Answers.script,Answers.made[:],over = list(script),[],iter(over)
        v = Live(Path('home'), lambda: name, Screen(), every, lambda: not next(over, True))
        v.pauses = []
        v.pause = v.pauses.append
        return v
    return follow


def test_a_run_is_followed_to_its_end(answers):
    "Each answer is shown, and the last request says so. A process that is behind is asked again at once"
    v = answers([{}, {'line': 'r: 1'}, {'behind': .25}, {'line': 'r: 2', 'png': b'p'}, {'behind': .5}, {'line': 'r: 3', 'png': b'q'}], [0, 0, 0, 0, 1, 1])
    v.run()
    assert v.screen.shown==[('r: 1', None), ('r: reading the log, 25%', None), ('r: 2', b'p'), ('r: reading the log, 50%', None), ('r: 3', b'q')]
    assert [q['over'] for q in v.reader.asked]==[False]*4+[True]*2 and {q['name'] for q in v.reader.asked}=={'r'} and v.screen.ended==1
    assert (v.process_seconds, len(v.pauses), v.reader.how)==(9., 3, {'home': Path('home'), 'picture': False, 'look': {}}) and v.seconds==v.thread_seconds+9.


def test_drawing_takes_a_twentieth_of_a_core(answers):
    "Pauses grow so that drawing takes 5% of a core, after one second in advance; pauses are never shorter than requested"
    v = answers([{}]*5, [0, 0, 0, 0, 1])
    v.run()
    assert v.pauses[:2]==[2., 2.] and v.pauses[2:]==[pytest.approx(10, abs=1), pytest.approx(20, abs=1)]


def test_a_run_without_rows_shows_a_message(answers):
    v = answers([{}, {}], [0, 1])
    v.run()
    assert v.screen.shown==[('r: nothing was recorded', None)]


@pytest.mark.parametrize('state', ['ended', 'died'])
def test_an_ended_run_is_drawn_once_more(answers, state):
    "An ended run is drawn again at once, for the last time. A silent run on another machine is still followed"
    v = answers([{'line': 'r: 1', 'state': 'silent'}, {'line': 'r: 2', 'state': state}, {'line': 'r: 3', 'state': state}], [0]*9)
    v.run()
    assert [line for line,_ in v.screen.shown]==['r: 1', 'r: 2', 'r: 3'] and [q['over'] for q in v.reader.asked]==[False, False, True] and len(v.pauses)==1


@pytest.mark.parametrize(('answer', 'said'), [({'error': 'KeyError: 3'}, 'has stopped: KeyError: 3'), ({'gone': True}, 'has ended: the log of r was removed'),
    (EOFError(), 'has stopped: the drawing process has ended'), (ValueError('x'), 'has stopped: ValueError: x')])
def test_an_error_ends_a_view_with_one_warning(answers, answer, said):
    "An error gives one warning, and closes screen and process. After `close(last=False)` there is no warning"
    v = answers([{}, answer], [0])
    with pytest.warns(EmberWarning, match=f'torchember: the live picture {said}. Training and recording continue.'): v.run()
    assert (v.screen.ended, v.process_seconds)==(1, 9.)
    dropped = answers([{}, answer], [0])
    dropped.pause = lambda s: setattr(dropped, 'closing', True)
    dropped.warn = lambda what, own=dropped.warn: (setattr(dropped, 'dropped', True), own(what))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        dropped.run()


@pytest.mark.parametrize('last', [True, False])
def test_close_asks_for_the_last_picture(answers, last):
    "`close` waits for a last picture, or kills the process with last=False. A second call does nothing"
    v = answers([{'line': 'r: 1'}, {'line': 'r: 2'}], [0]*9)
    began,go_on = threading.Event(),threading.Event()
    v.pause = lambda s: (began.set(), Live.pause(v, 60))
    if not last: Answers.script[1] = lambda: (go_on.wait(5), {'line': 'r: 2'})[1]
    v.begin()
    assert began.wait(10) and v in live_view.shown
    if not last: # Kill the process while it computes an answer
        v.reader.kill = lambda: (setattr(v.reader, 'killed', True), go_on.set())
        v.calls.put(1)
        while len(v.reader.asked)<2: time.sleep(.001)
    v.close(last)
    assert not v.thread.is_alive() and v.reader.killed is not last and 'ended' in repr(v)
    assert [q['over'] for q in v.reader.asked]==[False, last] and [line for line,_ in v.screen.shown][:1]==['r: 1']
    n = v.calls.qsize()
    v.close()
    assert v.calls.qsize()==n


def test_the_end_of_the_interpreter_closes_all_views(monkeypatch):
    "All rows are written before the views close. An error in one view does not affect other views"
    done = []
    class V:
        home = Path('home')
        def __init__(self, n): self.n = n
        def close(self, patience): done.append((self.n, patience))
    def write_rows(place):
        done.append(place)
        if len(done)==3: raise ZeroDivisionError('division')
    monkeypatch.setattr(live_view, 'shown', [V(1), V(2), V(3)])
    monkeypatch.setattr(live_view, 'flush_logs', write_rows)
    monkeypatch.setattr(sys, 'stderr', err := io.StringIO())
    finish_live_views()
    log = Path('home')/'log'
    assert done==[log, (1, 10.), log, log, (3, 10.)] and 'division' in err.getvalue()


def test_an_ember_has_one_view(tmp_path, monkeypatch):
    "A new view of an ember replaces its previous view. `live` waits for a run of another process until it ends"
    made = []
    class View:
        def __init__(self, home, name, screen, every, is_wanted):
            self.home,self.name,self.is_wanted,self.every,self.done = home,name,is_wanted,every,[]
            made.append(self)
        def begin(self): self.done.append('begin')
        def wait(self): self.done.append('wait')
        def close(self, last): self.done.append(('close', last))
    monkeypatch.setattr(live_view, 'Live', View)
    monkeypatch.setattr(live_view, 'screen_for', lambda name: name)
    t = emberTracker('r', tmp_path, source=lambda close: None) # A tracker with a source records in this process
    class Ember: pass
    te = Ember()
    te.t,te.views,te.armed = t,[],True
    first,second = live(te), live(te, every=.5)
    assert first.done==['begin', ('close', False)] and second.done==['begin'] and te.views==[first, second] and (first.every, second.every)==(2., .5)
    assert first.is_wanted() and (first.home, first.name())==(t.dir, 'r')
    with pytest.raises(ValueError, match='would wait forever'): live(te, wait=True)
    t(row(0))
    t.barrier()
    base = {'pid': os.getpid(), 'host': gethostname()}
    monkeypatch.setattr(LogReader, 'base', property(lambda self: base))
    own,other = live(t),live('r', home=tmp_path, wait=True)
    assert (own.done, own.is_wanted(), own.name(), other.done)==(['begin'], True, 'r', ['begin', 'wait'])
    base = {'pid': os.getppid(), 'host': gethostname()}
    assert live(t).done==['begin', 'wait'] and live(t, wait=False).done==['begin'] and live(te).done==['begin']
    base = {'pid': os.getpid(), 'host': gethostname(), 'end': 'x'}
    assert live(t).done==['begin']
    te.armed = False
    over = live(te, wait=True)
    assert (over.done, te.views[-1] is over)==(['begin', 'wait'], True)
    del te
    # `second` ends with its deleted ember, and `over` ends with its run
    assert not second.is_wanted() and over.is_wanted()
    for every in (0, True, '2', -1, None, float('nan')):
        with pytest.raises(ValueError, match='every must be a number'): live(t, every=every)
    with pytest.raises(TypeError, match='got an int'): live(3)
    t.close()


def test_tail_returns_each_line_once(tmp_path):
    "`Tail` returns whole lines, each once. It continues at the end of a truncated log, and fails for another file of this name"
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


def test_tail_skips_a_line_that_is_too_long(tmp_path, monkeypatch):
    "A line that is too long is skipped, and the next line is read"
    monkeypatch.setattr('torchember.show.live.following.longest_line', 20)
    path = tmp_path/'r'
    path.write_bytes(b'1\n'+b'x'*50+b'\n2\n')
    t,got = Tail(path),[]
    while t.at<path.stat().st_size: got.append(t.more(8))
    assert got[0]==b'1\n' and b''.join(got).endswith(b'2\n')


def test_tail_follows_a_rotated_log(tmp_path):
    "After a rotation, the old file is read to its end, then the new file, each line once; also after two rotations"
    path,rows = tmp_path/'r',[b'{"a":%d}\n'%i for i in range(9)]
    def add(*some):
        with path.open('ab') as f: f.write(b''.join(some))
    add(*rows[:3])
    t = Tail(path)
    assert t.more(8)==rows[0]
    compaction.rotate(path)
    add(*rows[3:5])
    assert (t.more(8), t.more(), t.more(), t.more())==(rows[1], rows[2], rows[3]+rows[4], b'') and t.share==1 and not t.is_behind
    compaction.compact_renamed(path)
    add(rows[5])
    assert (t.more(), t.share)==(rows[5], 1)
    compaction.rotate(path)
    compaction.compact_renamed(path)
    add(rows[6])
    assert (t.more(), t.more(), t.share, t.was_compacted())==(rows[6], b'', 1, False)
    for i in 7,8:
        add(rows[i])
        compaction.rotate(path)
        compaction.compact_renamed(path)
    got = [b''.join(json.dumps(r).encode()+b'\n' for r in b.block().rows()).replace(b' ', b'') if not isinstance(b, bytes) else b for b in iter(t.more, b'')]
    assert b''.join(got)==rows[7]+rows[8] and t.rows==9
