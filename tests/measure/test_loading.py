"Compiled loops are loaded in a background thread: no step waits or is charged for it, and no fork or exit hangs."
import os

import programs
import pytest

start = '''
import os, sys, time, warnings
import torch
from torch import nn
from torchember import torchEmber
from torchember.measure import loading
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
def train(te, n):
    for _ in range(n):
        model(torch.randn(4, 8)).square().mean().backward()
        te.step()
'''


def run(code, timeout=100, **env):
    "Run a program whose loops are loaded in a background thread. Return the words that it prints."
    done = programs.run(code, after=start, timeout=timeout, **{'TORCHEMBER_WAIT': '0', **env})
    assert done.returncode==0 and not done.stderr, done
    return done.stdout.split()


def test_nothing_is_loaded_by_importing():
    assert run("import torchember.ember, torchember.measure.tap; print('numba' in sys.modules)")==['False']


slowly = '''
import threading
real,gate = loading.load_numba,threading.Event() # loading takes until it is opened
def slow(): gate.wait(90); return real()
loading.load_numba = slow
'''


def test_the_first_step_does_not_wait():
    "Before the loops are loaded, torch operations measure. Both give the same statistics within a tolerance."
    told = run(slowly+'''
from torchember.recorder import cost
te = torchEmber(model, ttypes=('input', 'output', 'weight', 'weight_grad'), stats='full')
train(te, 1)
first = te.t.lines()
count = len(first)
assert loading.loops() is None # nobody has waited, as the gate is shut
gate.set()
assert loading.ready(60) and loading.seconds_in_background()>0
te.disarm(); te.arm(); model.zero_grad()
torch.manual_seed(0)
nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)) # draws what the model drew
train(te, 1)
second = te.t.lines()[count:]
norms = [[r.pop('grad_norm') for r in rows if r['ttype']=='scalar'] for rows in (first, second)]
assert len(norms[0])==len(norms[1])==1 and abs(norms[0][0]-norms[1][0])<=1e-6*norms[0][0], norms
first,second = ([r for r in rows if r['ttype']!='scalar'] for rows in (first, second))
assert len(first)==len(second)>8
for a,b in zip(first, second):
    assert a['tname']==b['tname'] and a['shape']==b['shape']
    for k in ('mean', 'std', 'l2', 'abs_mean', 'skew', 'kurtosis', 'zero_frac', 'min', 'max'):
        assert a[k]==b[k] or abs(a[k]-b[k])<=1e-6*max(abs(b[k]), b['std']), (k, a, b)
cost.seconds_in_background = lambda: 1000. # as if it had taken so long
report = te.close()
again = torchEmber(model).close()
print(report['seconds']<900, report['beside']>900, 'in the background' in repr(report), 'beside' in again)
''')
    assert told==['True', 'True', 'True', 'False']


def test_loading_is_not_charged_to_the_budget():
    "A step that is recorded while the loops are loaded does not count in the time budget."
    told = run(slowly+'''
te = torchEmber(model, overhead=.5)
train(te, 20)
print(te.recorder.tally.recorded, te.recorder.cost.budget.times.cost, te.recorder.cost.budget.balance)
gate.set()
assert loading.ready(60)
train(te, 200)
print(te.close()['recorded']>10)
''')
    assert told==['1', 'None', '0.0', 'True']


@pytest.mark.parametrize('plan', [None, '0'])
def test_functions_for_plans_are_compiled_beside_a_long_run(plan):
    "The first run on a machine does not wait for the compiler. After many calls, a background thread compiles the plans."
    told = run('''
from torchember.measure import planning
from torchember.recorder.call_plans import PlannedPass
planning.objects_are_cached,PlannedPass.calls_before_compiling = lambda: False,100
opt = torch.optim.SGD(model.parameters(), lr=.01)
te = torchEmber(model, optimizer=opt)
def train(n):
    for _ in range(n): model(torch.randn(4, 8)).square().mean().backward(); opt.step()
    loading.ready()
    return planning.objects() is not None, te.recorder.events.planned.written>0
print(*train(20), *train(30)[:1], *train(5))
te.close()
''', TORCHEMBER_PLAN=plan, TORCHEMBER_WAIT='1')
    assert told==(['False', 'False', 'True', 'True', 'True'] if plan is None else ['False']*5)


def test_only_formats_of_the_model_are_loaded():
    told = run('''
model.bfloat16()
te = torchEmber(model)
loading.ready()
print(sorted(loading.loader.loaded))
te.close()
''')
    assert 'bfloat16' in ''.join(told)


@pytest.mark.release # slow test, run only before a release
@pytest.mark.slow
@pytest.mark.parametrize('after,new', [(0, False), (.05, False), (.2, False), (.5, False), (1, False), pytest.param(0, True, marks=pytest.mark.slow),
    pytest.param(.5, True, marks=[pytest.mark.slow, pytest.mark.release])])
def test_a_process_can_exit_while_loading(after, new, tmp_path):
    "This also holds if the cache folder is empty, so that the loops must be compiled."
    told = run(f'''
te = torchEmber(model)
time.sleep({after})
train(te, 1)
te.close()
print('over', flush=True)
''', **({'NUMBA_CACHE_DIR': str(tmp_path)} if new else {}))
    assert told==['over']


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='there is no fork here')
@pytest.mark.parametrize('after', [0, .1, .4])
def test_a_process_can_fork_while_loading(after):
    "The forked child can measure tensors and import numba."
    told = run(f'''
warnings.simplefilter('ignore') # about forks beside threads
te = torchEmber(model)
time.sleep({after})
if not os.fork():
    import numba
    from torchember import get_stats
    get_stats(torch.ones(4))
    assert loading.ready(60)
    assert get_stats(torch.ones(4))['mean']==1
    print('child', flush=True)
    os._exit(0)
assert os.wait()[1]==0
train(te, 1)
te.close()
print('parent', flush=True)
''')
    assert told==['child', 'parent']


def test_a_broken_numba_gives_a_warning_at_the_first_measurement(tmp_path):
    (tmp_path/'numba.py').write_text("raise ImportError('Numba needs another NumPy')")
    told = run('''
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter('always')
    te = torchEmber(model)
    loading.ready()
    train(te, 2)
    te.close()
print(sum('needs another NumPy' in str(w.message) for w in said))
''', PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')]))
    assert told==['1']


def test_ready_waits_for_loading():
    assert run("print(loading.loops() is not None, loading.seconds_in_background()==0<loading.loading_seconds())")==['True', 'True']
    code = "te = torchEmber(model); train(te, 1); print(loading.seconds_in_background()==0<loading.loading_seconds()); te.close()"
    for wait in ('1', ''): assert run(code, TORCHEMBER_WAIT=wait)==['True']


def test_arming_waits():
    "Arming loads the loops, so no step is charged for it. Loops of another dtype are loaded at its first tensor."
    told = run('''
real = loading.load_numba
def slow(): time.sleep(2); return real()
loading.load_numba = slow
te = torchEmber(model, overhead=.5, ttypes=('input', 'weight'))
took = loading.loading_seconds()
print(sorted(loading.loader.loaded), took>=2)
train(te, 5)
print(loading.loading_seconds()==took, te.recorder.cost.spent<1, loading.seconds_in_background())
te.close()
''', TORCHEMBER_WAIT='')
    assert told==["['float32']", 'True', 'True', 'True', '0.0']


def test_the_report_names_the_time_of_loading():
    "The report names the time of loading and the wait at arming separately. A second run in the process has neither."
    told = run('''
real = loading.load_numba
def slow(): time.sleep(1.2); return real()
loading.load_numba = slow
def go():
    te = torchEmber(model, ttypes=('probe',))
    armed = loading.loader.times.total
    model(torch.randn(4, 8))
    te.probe('b', torch.ones(3, dtype=torch.bfloat16))
    return te.close(), armed, loading.loader.times.total-armed
r,armed,later = go()
print(abs(r['arming']-armed)<1e-6, armed>1.2, abs(r['compiling']-later)<1e-6, later>1.2, r['compiling']<=r['seconds'])
print(' (of which compiling loops: ' in repr(r), '; the start of recording waited ' in repr(r))
again = go()[0]
print('arming' in again, 'compiling' in again)
''', TORCHEMBER_WAIT='')
    assert told==['True']*7+['False']*2


still = '''
model = nn.ModuleList([nn.Linear(300, 301, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16)])
model.forward = lambda: None
big = nn.Parameter(torch.randn(1100, 1000))
model.register_parameter('big', big)
te = torchEmber(model, ttypes=('weight',), stats='full')
for i in range(12):
    if i>5: torch.set_num_threads(2)
    model(); te.log_model(); te.step(); time.sleep(.15)
te.close()
rows = [{k: v for k,v in r.items() if k not in ('step', 'ts')} for r in te.t.lines()]
kept = [str(r) for r in rows]
print(len(kept), len(set(kept)))
print(hash(tuple(kept[:9])))
'''


@pytest.mark.release # slow test, run only before a release
def test_equal_weights_have_equal_digits_in_each_step_and_process():
    "Unchanged weights have the same statistics to the last digit in each step and in two processes."
    a,b = (run(still, TORCHEMBER_WAIT='', PYTHONHASHSEED='0') for _ in range(2))
    assert a==b and a[:2]==['108', '9']


@pytest.mark.release
@pytest.mark.slow
def test_cached_kernels_of_two_processes_are_not_confused(tmp_path):
    "numba's cache key of kernels must differ between dtypes. Once, bfloat16 and float16 shared the same compiled code."
    def ones(*dtypes):
        script = 'import sys, torch; from torchember.measure import kernels, loading; loading.ready()\n' \
            'for d in sys.argv[1:]: print(kernels.read(torch.ones(16, dtype=getattr(torch, d)))[1])'
        got = programs.run(script, *dtypes, NUMBA_CACHE_DIR=tmp_path)
        assert got.returncode==0, got.stderr[-2000:]
        return got.stdout.split()
    # bfloat16 and float16 are each the second dtype of their process
    for dtypes in (['float32'], ['float32', 'bfloat16'], ['float32', 'float16']): ones(*dtypes)
    assert ones('bfloat16', 'float16')==ones('float16', 'bfloat16')==['1.0', '1.0']


def test_a_second_process_compiles_nothing():
    "A second process loads the machine code of all number formats from the cache on disk, also that of integers."
    load_all = '''
from numba.core.ccallback import CFunc
from torchember.measure.readers import numba
compile_anew = CFunc._compile_uncached
def compile_and_tell(self):
    print(self._pyfunc.__name__)
    return compile_anew(self)
CFunc._compile_uncached = compile_and_tell
for fmt in numba.entries: numba.kernel(fmt)
'''
    run(load_all)
    assert run(load_all)==[]
