"A process that is killed or crashes loses no finished step, and its run shows the module or phase in which it died."
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
import warnings

import pandas as pd
import psutil
import pytest
import torch
from matplotlib.text import Text
from programs import ranks, run, start

from torchember import EmberWarning, brief, diagnose, emberTracker, overview, read, report, runs, summary, torchEmber
from torchember.recorder.recovery import recover_all
from torchember.store.base import folder
from torchember.store.lines import parse

common = """
import ctypes, os, signal, sys, tempfile, threading, warnings
import torch
from torch import nn
from torch.nn import functional as F
from torchember import torchEmber
from torchember.measure import kernels
torch.set_num_threads(1)
kernels.loops()
"""

training = """
name,kind,way,at,blackbox = sys.argv[1],sys.argv[2],sys.argv[3],int(sys.argv[4]),(None if len(sys.argv)<6 else {'False': False}.get(sys.argv[5]))
step = -1

def die():
    if way=='kill': os.kill(os.getpid(), 9)
    if way=='term': os.kill(os.getpid(), 15)
    if way=='segv': ctypes.string_at(0)
    if way=='abort': os.abort()
    if way=='exit': os._exit(3)
    if way=='bus': os.kill(os.getpid(), signal.SIGBUS)
    if way=='fpe': os.kill(os.getpid(), signal.SIGFPE)
    if way=='memory': ctypes.memset(8, 1, 1<<20)
    if way=='raise': raise ValueError('mine')
    if way=='wait': os.write(1, b'waits\\n'); os.read(0, 1)

class Fragile(nn.Module):
    def __init__(self, where): super().__init__(); self.where = where
    def forward(self, x):
        if step==at and where==self.where: die()
        if step==at and where=='backward' and self.where=='forward': x.register_hook(lambda g: die())
        return x*1.

where = sys.argv[6] if len(sys.argv)>6 else 'forward'

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Fragile('forward' if i==1 else 'nowhere')) for i in range(3))
        self.head = nn.Linear(8, 4)
    def forward(self, x):
        for l in self.layers: x = x+l(x)
        return self.head(x)

torch.manual_seed(0)
m = Net()
opt = torch.optim.Adam(m.parameters())
stats = 'full' if kind=='noted' else ['mean', 'std', 'max', 'min']
te = torchEmber(m, opt, name=name, stats=stats, ttypes=('input', 'output', 'weight', 'weight_grad', 'output_grad'), blackbox=blackbox)
if where=='optimizer': opt.register_step_pre_hook(lambda *a: die() if step==at else None)
call = torch.compile(m, backend='aot_eager') if kind=='compiled' else m
data = [torch.randn(16, 8) for _ in range(60)]
if kind=='loader':
    data = torch.utils.data.DataLoader(torch.cat(data).view(60, 16, 8), batch_size=None, num_workers=2, multiprocessing_context='fork')
for step,x in enumerate(data):
    loss = F.cross_entropy(call(x), torch.arange(16)%4)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if kind=='noted': te.log(loss=loss.item())
    os.write(1, b'%d\\n' % step)
te.close()
"""

def rows_by_step(name, **kwargs):
    "Return a dict: step -> the rows of this step in the order of the log, without their times."
    found = {}
    for r in read_lines(name):
        if r['ttype']=='finding': continue
        found.setdefault(r['step'], []).append({k: v for k,v in r.items() if k not in ('ts', 'unfinished')})
    return found

def read_lines(name):
    "Return the rows of the log file. A line that was cut off by the death of the process is left out; recovery writes its row again."
    return parse((folder('torchember')/'log'/name).read_bytes())[0]

def without_seeing(name):
    read(name)
    return rows_by_step(name)

twins = {}
def twin(kind):
    "Return the rows of the same training in a process that was not killed."
    if kind not in twins:
        run(training, f'twin {kind}', kind, 'none', '-1', 'False', after=common)
        twins[kind] = rows_by_step(f'twin {kind}')
    return twins[kind]


def dies(name, kind, way='random', at=-1, where='forward', moment=0.):
    "Start a training process that dies. Return the last step that it finished."
    with start(training, name, kind, way, str(at), 'None', where, after=common) as p:
        done = -1
        if way=='random':
            done = int(p.stdout.readline() or -1)
            time.sleep(moment)
            os.kill(p.pid, signal.SIGKILL)
        for line in p.stdout.read().split('\n'):
            if line.strip().isdigit(): done = max(done, int(line))
        p.wait()
    return done


def check(name, kind, done):
    "Check that all finished steps have complete rows, and that the unfinished step has the first of its rows."
    rows,whole = without_seeing(name),twin(kind)
    noted = lambda rs: [r for r in rs if r['ttype']=='scalar']
    rest = lambda rs: [r for r in rs if r['ttype']!='scalar']
    last = max(rows)
    assert sorted(rows)==list(range(last+1)) and last in (done, done+1, done+2), (sorted(rows), done)
    for s in range(done+1): assert rest(rows[s])==rest(whole[s]), s
    for s in range(done): assert noted(rows[s])==noted(whole[s]), s
    for s in range(done+1, last+1):
        mine = rest(rows[s])
        assert mine==rest(whole[s])[:len(mine)], s
    return last


@pytest.mark.parametrize('kind', ['noted', *(pytest.param(k, marks=pytest.mark.slow) for k in ('eager', 'compiled', 'loader'))])
@pytest.mark.parametrize('n', [2, pytest.param(60, marks=pytest.mark.release)])
def test_a_kill_at_any_moment_loses_no_finished_step(kind, n):
    for i in range(n):
        random.seed(f'{kind} {i}')
        done = dies(f'{kind} {n} {i}', kind, moment=random.random()*.12)
        check(f'{kind} {n} {i}', kind, done)
        if done<59: assert diagnose(f'{kind} {n} {i}').iloc[0].rule=='died'


said = {'kill': 'killed without a message', 'exit': 'killed without a message', 'segv': 'Segmentation fault', 'abort': 'Aborted', 'bus': 'Bus error',
    'fpe': 'Floating point exception', 'memory': 'Segmentation fault', 'term': 'killed without a message', 'raise': 'ValueError: mine'}

rarer = [pytest.param(way, 23, marks=pytest.mark.slow) for way in said if way not in ('kill', 'segv')]

@pytest.mark.parametrize('way, at', [('kill', 0), ('kill', 23), ('segv', 23), *rarer])
def test_the_module_that_ran_is_named(way, at):
    name = f'{way} {at}'
    done = dies(name, 'eager', way, at)
    assert done==at-1
    check(name, 'eager', done)
    found = diagnose(name).iloc[0]
    assert (found.rule, found.severity, found.path, found.first_step)==('died', 'error', 'layers.1.2', at)
    assert said[way] in found.text and f'in step {at}, in `layers.1.2` (forward)' in found.text


in_compiled_code = """
@torch.library.custom_op('dies::here', mutates_args=())
def here(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    if step.item()==3: os.kill(os.getpid(), 9)
    return x.clone()
here.register_fake(lambda x, step: torch.empty_like(x))

class Fragile(nn.Module):
    def forward(self, x, step): return here(x, step)

class Inner(nn.Module):
    def __init__(self): super().__init__(); self.a,self.fragile,self.b = nn.Linear(4, 4),Fragile(),nn.Linear(4, 4)
    def forward(self, x, step): return self.b(self.fragile(self.a(x), step))

class Net(nn.Module):
    def __init__(self): super().__init__(); self.first,self.inner = nn.Linear(4, 4),Inner()
    def forward(self, x, step): return self.inner(self.first(x), step)

torch.manual_seed(0)
m = Net()
te = torchEmber(m, name=sys.argv[1])
(m if sys.argv[2]=='whole' else m.inner).compile(fullgraph=True)
for step in range(5):
    with torch.no_grad(): m(torch.ones(2, 4), torch.tensor(step)) # no backward, because Inductor takes seconds to compile a graph
    te.step()
"""

@pytest.mark.slow
# a slow test: the process compiles a model. The documentation page about recovery also shows this finding
@pytest.mark.release
@pytest.mark.parametrize('what, first', [('whole', 'first'), ('inner', 'inner.a')])
def test_a_death_in_compiled_code_is_between_two_modules(what, first):
    "Inductor merges the reports of all modules of a graph, so the black box contains only the first and the last module."
    with start(in_compiled_code, what, what, after=common) as p: p.wait()
    found = diagnose(what).iloc[0]
    assert (found.rule, found.path, found.first_step)==('died', '', 3)
    assert f'in step 3, in code compiled by torch.compile, which calls modules from `{first}` to `inner.b` (forward)' in found.text
    assert found.evidence['compiled']==[first, 'inner.b'] and found.evidence['running']==[[] if what=='whole' else ['']]
    rows = read(what)
    assert set(rows[rows.ttype=='output'].groupby('step').size().loc[:2])=={6}
    assert not (rows[rows.step==3].module.str.contains('inner')).any()


@pytest.mark.slow
@pytest.mark.parametrize('where', ['backward', 'optimizer'])
def test_between_modules_the_phase_is_named(where):
    done = dies(where, 'eager', 'kill', 11, where)
    check(where, 'eager', done)
    found = diagnose(where).iloc[0]
    phase = {'backward': 'after the forward pass (loss or backward)', 'optimizer': 'in the optimizer'}[where]
    assert (found.rule, found.first_step)==('died', 11) and phase in found.text


def texts_of(picture): return [t.get_text() for t in picture.figure.findobj(Text)]


def test_every_view_of_a_run_shows_its_death(tmp_path):
    dies('shown', 'noted', 'kill', 7)
    sentence = 'died in step 7, in `layers.1.2` (forward)'
    assert sentence in str(diagnose('shown')) and sentence in brief('shown') and any(sentence in t for t in texts_of(overview('shown')))
    assert 'step 7' in str(summary('shown')) and sentence in open(report('shown', tmp_path/'shown.html')).read()
    df = read('shown')
    assert set(df['step'][df['unfinished'].notna()])=={7} and df['unfinished'].notna().sum()==len(df[(df['step']==7) & (df['ttype']!='finding')])
    losses = df['loss'].dropna()
    assert f'The last loss was {losses.iloc[-1]:.4g}.' in df['text'].dropna().iloc[0] and len(losses)==7
    # before recovery, the file of the latest step contained an earlier step
    assert set(emberTracker('shown').latest_df['step'])=={7}
    # a second read adds no rows: the black box is recovered only once
    assert not df.drop(columns='ts').astype(str).duplicated().any() and len(read('shown'))==len(df)


def test_a_resumed_run_is_not_shown_as_dead():
    dies('again', 'eager', 'kill', 7)
    model = torch.nn.Linear(8, 4)
    te = torchEmber(model, name='again', resume=True)
    assert te.recorder.step==8
    for _ in range(3): model(torch.ones(2, 8)).sum().backward(); te.step()
    te.close()
    found = diagnose('again')
    assert found[found.rule=='died'].iloc[0].severity=='info' and 'The run went on to step 10' in found[found.rule=='died'].iloc[0].text
    assert not any('died' in t for t in texts_of(overview('again')))


def test_the_box_of_a_living_process_is_not_recovered():
    with start(training, 'lives', 'eager', 'wait', '3', after=common, stdin=subprocess.PIPE) as p:
        while p.stdout.readline()!='waits\n': assert p.poll() is None, p.stderr.read()
        os.kill(p.pid, signal.SIGSTOP)
        try:
            before = len(read('lives'))
            box = folder('torchember')/'box'
            assert list(box.glob(f'{p.pid}-*.box')) and not recover_all(box.parent) and list(box.glob(f'{p.pid}-*.box'))
        finally: os.kill(p.pid, signal.SIGCONT)
        p.communicate('.')
    df = read('lives')
    assert before<len(df) and not (df['ttype']=='finding').any() and not box.exists()
    assert rows_by_step('lives')==twin('eager')


@pytest.fixture(scope='module')
def left(tmp_path_factory):
    "Return the folder of a run whose process was killed in its eighth step, and the name of the black box that remains there."
    home = tmp_path_factory.mktemp('left')
    with start(training, 'left', 'noted', 'kill', '7', 'None', 'forward', after=common, TORCHEMBER_HOME=home) as p: p.wait()
    return home, next((home/'box').glob('*.box')).stem

def copied(left, to, name=None):
    shutil.copytree(left[0], to, dirs_exist_ok=True)
    if name: [p.rename(p.with_name(name+p.suffix)) for p in (to/'box').iterdir()]
    return to, name or left[1]

def run_is(folder, name, run):
    "Change the name of the run that is stored in a black box."
    told = folder/'box'/f'{name}.told'
    first,rest = told.read_bytes().split(b'\n', 1)
    told.write_bytes(json.dumps({**json.loads(first), 'run': run}).encode()+b'\n'+rest)


def test_the_content_of_a_box_is_treated_as_data(left, tmp_path):
    "A name of a run that is stored in a box cannot make recovery write outside of the folder."
    outside = tmp_path/'outside'
    for i,run_name in enumerate(('../../outside', str(outside), '..', '', 'a/b', 7, None)):
        home,name = copied(left, tmp_path/str(i))
        run_is(home, name, run_name)
        with pytest.warns(EmberWarning, match='cannot be read'): assert recover_all(home)==[]
        files = [sorted(p.name for p in (folder/'log').iterdir()) for folder in (home, left[0])]
        assert files[0]==files[1] and not outside.exists() and (home/'box'/f'{name}.box').exists()


def test_a_damaged_box_harms_no_reader(left, tmp_path):
    "Bytes of the box are changed, or its files are cut. Reading gives at most a warning, and the rows of the log stay."
    before = (left[0]/'log'/'left').read_bytes()
    rng,read_all = random.Random(0),0
    for i in range(40):
        home,name = copied(left, tmp_path/str(i))
        file = home/'box'/f"{name}.{rng.choice(['box', 'box', 'told'])}"
        data = bytearray(file.read_bytes())
        if rng.random()<.3: data = data[:rng.randrange(len(data))]
        else:
            for _ in range(rng.choice([1, 30])): data[rng.randrange(min(len(data), 20_000))] = rng.randrange(256)
        file.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            read_all += bool(recover_all(home))
            read('left', home=home)
        assert (home/'log'/'left').read_bytes().startswith(before)
    assert read_all>3 # some boxes can still be read, because not every changed byte matters


def test_a_killed_reader_leaves_no_row_twice(left, tmp_path, monkeypatch):
    home,_ = copied(left, tmp_path/'home')
    remove = os.unlink
    def ends(path, *args, **kwargs): raise KeyboardInterrupt
    monkeypatch.setattr(os, 'unlink', ends)
    with pytest.raises(KeyboardInterrupt): recover_all(home)
    monkeypatch.setattr(os, 'unlink', remove)
    once = (home/'log'/'left').read_bytes()
    assert recover_all(home)==['left'] and (home/'log'/'left').read_bytes()==once and not (home/'box').exists()


def test_a_new_process_may_have_the_id_of_a_dead_one(left, tmp_path):
    "This happens in a restarted container, where each training has the process id 1."
    home,_ = copied(left, tmp_path/'home', f'{os.getpid()}-0')
    assert recover_all(home)==['left']


def test_a_box_of_another_version_is_kept(left, tmp_path):
    home,name = copied(left, tmp_path/'home')
    told = home/'box'/f'{name}.told'
    told.write_bytes(told.read_bytes().replace(b'"width":', b'"width":1', 1))
    with pytest.warns(EmberWarning, match='another version of torchember'): assert recover_all(home)==[]
    assert told.exists()


def test_rows_that_the_box_cannot_hold_harm_no_training(monkeypatch):
    "The training continues if a row does not fit into the box, or if a step cannot be copied into the box."
    from torchember.recorder import black_box
    def full(self, line): raise OSError(28, 'No space left on device')
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    with torchEmber(model, name='lines') as te:
        model[0](torch.ones(1, 3))
        with monkeypatch.context() as m:
            m.setattr(black_box.BlackBoxFiles, 'append_line', full)
            for _ in range(3): model(torch.ones(1, 3)).sum().backward(); te.step()
        # the box is marked as invalid, because a row is missing
        assert te.recorder.box.box.header.words[black_box.MAGIC]==0
    def breaks(self, *args, **kwargs): raise ValueError('odd')
    monkeypatch.setattr(black_box.BlackBox, 'keep', breaks)
    with pytest.warns(EmberWarning, match='not be copied into the black box.*ValueError: odd') as heard, torchEmber(model, name='steps') as te:
        for _ in range(3): model(torch.ones(1, 3)).sum().backward(); te.step()
    assert len(heard)==1 and read('lines')['step'].nunique()>=3 and read('steps')['step'].nunique()==3


def test_many_armings_leave_no_descriptor_file_or_thread():
    model,me = torch.nn.Linear(3, 2),psutil.Process()
    def once(i):
        with torchEmber(model, name=f'arms {i}'): model(torch.ones(1, 3))
    once(0)
    before = me.num_fds(),me.num_threads()
    for i in range(1, 21): once(i)
    gc.collect()
    assert me.num_fds()<=before[0]+1 and me.num_threads()<=before[1] and not (folder('torchember')/'box').exists()


@pytest.mark.release
def test_a_long_run_reuses_its_space():
    "Memory of the box is overwritten as soon as the log contains its rows."
    from torchember.recorder.black_box import LATE, NOTED, most_text
    model = torch.nn.Linear(3, 2)
    with torchEmber(model, name='long') as te:
        box,most = None,0
        for i in range(1200):
            model(torch.ones(1, 3)).sum().backward()
            te.log(within=i)
            te.step()
            te.log(loss=float(i))
            box = te.recorder.box.box
            if i%50==0: te.t.file.flush()
            most = max(most, box.header.words[LATE], box.header.words[NOTED])
        size = box.header.file.end
    # at most 70 slots: the number of steps that may wait for the writer thread
    assert size<2_000_000 and len(box.slots.memories)<=70 and most<most_text//4
    assert read('long')['loss'].notna().sum()==1200


def test_a_deep_model_and_many_threads_keep_to_their_places():
    from torchember.recorder.black_box import THREAD, most_depth, thread_width
    class Deep(torch.nn.Module):
        def __init__(self, n): super().__init__(); self.inner = Deep(n-1) if n else torch.nn.Linear(3, 3)
        def forward(self, x): return self.inner(x)
    model = Deep(most_depth+20)
    with torchEmber(model, name='deep', ttypes='output') as te:
        model(torch.ones(1, 3))
        words = te.recorder.box.box.header.words
        assert words[THREAD+1+most_depth]>0 and not any(words[THREAD+thread_width+i] for i in range(thread_width))


caught = """
import os, torch
from torch import nn
from torchember import torchEmber
class Fails(nn.Module):
    def forward(self, x):
        if step==2: raise ValueError('mine')
        return x
m = nn.Sequential(nn.Linear(3, 3), Fails())
opt = torch.optim.SGD(m.parameters(), .1)
te = torchEmber(m, opt, name='caught')
for step in range(9):
    try: loss = m(torch.ones(1, 3)).sum()
    except ValueError: continue
    loss.backward(); opt.step(); opt.zero_grad()
os.kill(os.getpid(), 9)
"""

def test_a_caught_exception_is_not_named_as_the_cause():
    run(caught, after=common)
    assert 'exception' not in diagnose('caught').iloc[0].text


in_pieces = """
import os, sys, torch
from torch import nn
from torchember import torchEmber
torch.manual_seed(0)
m = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
opt = torch.optim.SGD(m.parameters(), .1)
te = torchEmber(m, opt, name=sys.argv[1])
for step in range(8):
    for micro in range(2):
        if step==6 and micro and sys.argv[1]=='pieces': os.kill(os.getpid(), 9)
        m(torch.randn(4, 3)).square().mean().backward()
        if step in (2, 5) and not micro: te.t.df # somebody reads in the middle of a step
    opt.step()
    opt.zero_grad()
te.close()
"""

def test_steps_handed_over_in_parts_are_recovered_whole():
    run(in_pieces, 'pieces', after=common)
    run(in_pieces, 'in one', after=common)
    a,b = (read(n) for n in ('pieces', 'in one'))
    a,b = (t[(t['step']<6) & (t['ttype']!='finding')].drop(columns=['ts', 'unfinished'], errors='ignore').reset_index(drop=True) for t in (a, b))
    pd.testing.assert_frame_equal(a[b.columns], b, check_categorical=False)
    assert set(read('pieces', steps=6)['unfinished'].dropna())=={True}


def test_recovery_reads_only_the_end_of_a_large_log(tmp_path):
    "All lines from a given step to the end of the file are compared, also lines of other steps among them."
    from torchember.recorder.recovery import missing_lines, tail_lines
    lines = [b'{"step":%d,"i":%d,"x":"%s"}' % (i//1000, i, b'x'*400) for i in range(10_000)]
    log = tmp_path/'log'
    log.write_bytes(b'\n'.join(lines)+b'\n')
    found = tail_lines(log, 0, 7, 1000)
    assert set(lines[7000:])<=set(found) and len(found)<len(lines)
    new = b'{"step":8,"i":-1}'
    # lines[7001] is missing once: the log has it once, and the box twice
    assert missing_lines(log, [lines[9999], new, lines[7001], lines[7001]])==[lines[7001], new]
    assert missing_lines(tmp_path/'none', [new])==[new]


def test_the_cause_of_death_is_a_sentence(monkeypatch):
    from types import SimpleNamespace as Some

    from torchember.recorder import recovery
    here = dict(host=recovery.socket.gethostname(), boot=recovery.boot_id(), killed=3)
    monkeypatch.setattr(recovery, 'count_memory_kills', lambda: 3)
    said = lambda fault='', **about: recovery.cause_of_process_end(Some(fault=fault, about=here|about))
    assert said('Fatal Python error: Bus error\n\nmore')=='Bus error' and said().startswith('killed without a message (by SIGKILL')
    assert 'probably by the kernel' in said(killed=2) and said(boot='another')=='the machine was restarted since then'
    # the cause of death is unknown if the process ran on another machine
    assert said(host='elsewhere', boot='another', killed=2)==said()


ended = """
import sys, torch
from torchember import torchEmber
m = torch.nn.Linear(3, 2)
opt = torch.optim.SGD(m.parameters(), .1)
te = torchEmber(m, opt, name=sys.argv[1])
for step in range(4):
    m(torch.ones(1, 3)).sum().backward()
    if step==3 and sys.argv[1]=='within': raise KeyError('x')
    if step==3 and sys.argv[1]=='stopped': raise KeyboardInterrupt
    opt.step()
if sys.argv[1]=='exit': sys.exit(3)
raise ValueError('after all')
"""

backward = 'in step 3, after the forward pass (loss or backward), by '

@pytest.mark.parametrize('name, severity, sentence', [('within', 'error', backward+'KeyError: '), ('stopped', 'info', backward+'KeyboardInterrupt.'),
    ('after', 'info', 'after step 3, by ValueError: after all.')])
def test_an_exception_that_ends_the_process_has_a_finding(name, severity, sentence):
    run(ended, name, after=common)
    found = diagnose(name)
    found = found[found.rule=='died'].iloc[0]
    assert found.severity==severity and sentence in found.text


def test_a_process_that_ends_normally_has_not_died():
    run(ended, 'exit', after=common)
    assert not (read('exit')['ttype']=='finding').any()


by_hand = """
import os, torch
from torchember import torchEmber
m = torch.nn.Linear(3, 2)
te = torchEmber(m, name='by hand', ends='step')
for s in range(5):
    m(torch.ones(1, 3)).sum().backward()
    te.step()
os.kill(os.getpid(), 9)
"""

def test_a_step_that_the_loop_has_ended_is_over():
    run(by_hand, after=common)
    assert 'died after step 4' in diagnose('by hand').iloc[0].text


def test_a_thread_gets_the_place_of_one_that_ended():
    from torchember.recorder.black_box import THREADS, most_threads
    model = torch.nn.Linear(3, 2)
    with torchEmber(model, name='threads') as te:
        for _ in range(2*most_threads):
            t = threading.Thread(target=lambda: model(torch.ones(1, 3)))
            t.start()
            t.join()
        assert te.recorder.box.box.header.words[THREADS]<=3


def test_a_full_disk_has_no_box_and_the_training_goes_on(monkeypatch):
    from torchember.recorder import black_box
    def full(fd, at, size): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(black_box, 'allocate', full)
    model = torch.nn.Linear(3, 2)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter('always')
        with torchEmber(model, name='full') as te:
            model(torch.ones(1, 3))
            assert te.recorder.box.box is None and 'No space' in te.recorder.box.why
        assert not heard
        with torchEmber(model, name='asked', blackbox=3): model(torch.ones(1, 3))
    assert sum('no black box' in str(w.message) for w in heard)==1
    assert len(read('full')) and len(read('asked'))


def test_if_the_disk_fills_later_rows_use_ordinary_memory(monkeypatch):
    from torchember.recorder import black_box
    model = torch.nn.Linear(3, 2)
    with torchEmber(model, name='later') as te:
        model(torch.ones(1, 3))
        def full(fd, at, size): raise OSError(28, 'No space left on device')
        monkeypatch.setattr(black_box, 'allocate', full)
        te.t.barrier()
        for _ in range(3): model(torch.ones(1, 3)).sum().backward(); te.step()
    assert read('later')['step'].nunique()==4


@pytest.mark.parametrize('wish', [-1, 101, 'twenty', 2.5])
def test_wrong_values_of_blackbox_raise(wish):
    with pytest.raises((ValueError, TypeError), match='blackbox'): torchEmber(torch.nn.Linear(1, 1), blackbox=wish)


scheduled = """
import os, sys, torch
from torchember import torchEmber
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
opt = torch.optim.SGD(m.parameters(), .1)
te = torchEmber(m, opt, name=sys.argv[1], every=30, blackbox=5, **({'rules': 'default', 'on_finding': lambda f: None} if sys.argv[2]=='rule' else {}))
for s in range(80):
    x = torch.randn(4, 8)
    if s==47 and sys.argv[2]=='nan': x[0] = torch.nan
    if s==47 and sys.argv[2]=='kill': os.kill(os.getpid(), 9)
    if s==47 and sys.argv[2]=='raise': 1/0
    opt.zero_grad()
    loss = m(x).sum()
    loss.backward()
    opt.step()
    te.log(loss=loss.item())
te.close()
"""

@pytest.mark.parametrize('way, steps', [('none', [0, 30, 60]), ('kill', [0, 30, *range(42, 47)]), ('raise', [0, 30, *range(42, 47)]),
    ('nan', [0, 30, *range(42, 53), 60])])
def test_the_last_steps_are_kept_whatever_the_schedule(way, steps):
    name = f'scheduled {way}'
    done = run(scheduled, name, way, after=common)
    assert (done.returncode==0)==(way in ('none', 'nan')), done.stderr
    df = read(name)
    assert sorted(set(df['step'][df['ttype']=='output']))==steps
    # numbers of te.log are kept in every step, whatever the schedule
    assert sorted(set(df['step'][df['ttype']=='scalar']))==list(range(80 if way in ('none', 'nan') else 47))
    assert df[df['ttype']=='output'].groupby('step').size().nunique()==1


def test_a_run_that_has_only_a_box_is_listed():
    dies('young', 'eager', 'kill', 0)
    assert 'young' in list(runs()['name'])


both = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchember import torchEmber
dist.init_process_group('gloo')
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
ddp = DistributedDataParallel(m)
opt = torch.optim.SGD(ddp.parameters(), .1)
te = torchEmber(ddp, opt, name='both')
for s in range(30):
    if s==17: os.kill(os.getpid(), 9) if dist.get_rank() else None
    ddp(torch.randn(4, 8)).square().mean().backward()
    opt.step()
    opt.zero_grad()
"""

@pytest.mark.release
@pytest.mark.slow
def test_each_of_two_processes_has_its_own_box():
    with pytest.raises(AssertionError, match='-9'): ranks(both)
    rows = {r: read(f'both.rank{r}') for r in (0, 1)}
    assert set(rows[1]['step'][rows[1]['ttype']=='weight_grad'])==set(range(17))
    assert 'after step 16' in rows[1]['text'].dropna().iloc[0]
    assert set(range(17))<=set(rows[0]['step'][rows[0]['ttype']=='weight_grad']) and len(rows[0]['text'].dropna())<=1
    whole = read('both')
    assert whole[(whole['ttype']=='weight_grad') & (whole['step']<17)].groupby('step').size().tolist()==[4]*17
    assert diagnose('both').iloc[0].rule=='died'


several = """
import os, sys, threading, torch
from torch import nn
from torchember import torchEmber

class Waits(nn.Module):
    def forward(self, x):
        if x.shape[0]==2: inside.set(); go.wait(); os.kill(os.getpid(), 9)
        return x

inside,go = threading.Event(),threading.Event()
m = nn.Sequential(nn.Linear(3, 3), Waits(), nn.Linear(3, 3))
te = torchEmber(m, name='several')
m(torch.ones(1, 3))
t = threading.Thread(target=lambda: m(torch.ones(2, 3)))
t.start()
inside.wait()
for _ in range(3): m[0](torch.ones(1, 3))
go.set()
t.join()
"""

def test_the_thread_inside_a_module_is_named():
    run(several, after=common)
    assert '`1`' in diagnose('several').iloc[0].text


def test_a_forked_child_writes_nothing():
    model = torch.nn.Linear(3, 2)
    with torchEmber(model, name='forks') as te:
        model(torch.ones(1, 3))
        box = te.recorder.box.box
        before = bytes(box.header.memory)
        if not (pid := os.fork()):
            for _ in range(3): model(torch.full((1, 3), 9.))
            os._exit(0)
        os.waitpid(pid, 0)
        assert bytes(box.header.memory)==before and os.path.exists(f'{box.header.file.path}.box')
        model(torch.ones(1, 3))
    assert read('forks').query("ttype=='output'")['step'].nunique()==2
