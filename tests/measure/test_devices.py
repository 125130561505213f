"Kernels of a device are checked before their first use. If they are wrong, slow or missing, the user is warned and torch operations are used."
import gc
import math
import threading
import time
import weakref
from functools import cache
from types import SimpleNamespace as Some

import numpy as np
import programs
import pytest
import torch
from torch import nn

from torchember import EmberWarning, torchEmber
from torchember.measure import arena, devices, kernels
from torchember.measure.graph_rows import GraphRows
from torchember.measure.readers import torch as plain
from torchember.measure.readers import triton as gpu
from torchember.measure.self_check import find_reader_mistake, trials
from torchember.measure.summary import groups, index, length, read_array

cpu = torch.device('cpu')
full = tuple(groups)


def numbers(x): return x.double().numpy()


def read_right(x, wanted, out, per=None): out.copy_(torch.from_numpy(read_array(numbers(x), wanted)))


def read_all(xs, wanted, out, to):
    for x,i in zip(xs, to, strict=True): read_right(x, wanted, out[i])


@pytest.fixture
def kernels_here(monkeypatch):
    "Replace the GPU kernels by correct functions that run on the CPU."
    monkeypatch.setattr(gpu, 'read_one', read_right)
    monkeypatch.setattr(gpu, 'read_list', read_all)
    monkeypatch.setattr(gpu, 'trusted', {})
    monkeypatch.setattr(gpu, 'triton', Some(__version__='0'))


def said_of(recwarn): return [str(w.message) for w in recwarn if issubclass(w.category, EmberWarning)]


def test_kernels_are_checked_once_for_each_device_dtype_and_groups(kernels_here, monkeypatch, recwarn):
    tries = []
    monkeypatch.setattr(gpu, 'read_one', lambda *args: tries.append((args[0].dtype, args[1])) or read_right(*args))
    for _ in range(2):
        assert gpu.reads(torch.float32, ('basic',), cpu) and gpu.reads(torch.bfloat16, full, cpu)
    assert set(tries)=={(torch.float32, ('basic',)), (torch.bfloat16, full)} and len(tries)==4*len(trials(torch.float32))
    assert not said_of(recwarn)


def test_a_check_of_one_choice_of_statistics_is_not_used_for_others(kernels_here, monkeypatch):
    "Each combination of device, dtype and statistics is checked separately."
    tries = []
    monkeypatch.setattr(gpu, 'first_mistake', lambda *key: tries.append(key) or ('' if len(tries)<3 else 'all'))
    monkeypatch.setattr(gpu, 'device_name', str)
    monkeypatch.setattr(gpu, 'warn', lambda text: None)
    keys = [(torch.float32, ('basic',), torch.device('cuda', 0)), (torch.float32, ('basic',), torch.device('cuda', 1)),
        (torch.float32, full, torch.device('cuda', 0)), (torch.float16, ('basic',), torch.device('cuda', 0))]
    for _ in range(2): assert [gpu.reads(*k) for k in keys]==[True, True, False, False]
    assert len(tries)==4


def test_nan_in_place_of_a_number_is_wrong():
    "The check also finds a wrong result for an empty tensor."
    def reads(i, value):
        def read(x, wanted):
            v = read_array(numbers(x), wanted)
            v[i] = value
            return v
        return read
    for p in ('count', 'mean', 'm2', 'min', 'max', 'l1'): assert find_reader_mistake(reads(index[p], np.nan), torch.float32, full), p
    assert find_reader_mistake(reads(index['s8'], 0.), torch.float32, ('basic',))
    assert not find_reader_mistake(lambda x, wanted: read_array(numbers(x), wanted), torch.float32, full)


def test_operations_measure_values_that_float32_cannot_hold():
    "The mean of equal elements is exact, and their variance is 0. Magnitudes of complex numbers are computed in float64."
    for n in (3, 6, 7, 9, 11, 12, 15):
        v = plain.read_device(torch.full((n,), .1, dtype=torch.float64), full)
        assert v[index['mean']]==.1 and not v[[index[p] for p in ('m2', 'm3', 'm4')]].any()
    v = plain.read_device(torch.tensor([3e38+3e38j, 3e38, 4j]), full)
    assert v[index['posinf']]==0
    np.testing.assert_allclose(v[index['max']], 18**.5*1e38, rtol=1e-7)


def lost(i): return lambda x, wanted, out, per=None: (read_right(x, wanted, out), out.__setitem__(i, out[i]+1))


def cut_short(x, wanted, out, per=None): read_right(x.reshape(-1)[:-1], wanted, out)


def of_the_other(xs, wanted, out, to): read_all(xs[::-1], wanted, out, to)


def raises(*args): raise RuntimeError('no kernel image')


@pytest.mark.parametrize('name,wrong,why', [('read_one', lost(0), 'count is 1.0 instead of 0.0'), ('read_one', cut_short, 'count is 0.0 instead of 1.0'),
    ('read_one', raises, 'RuntimeError: no kernel image'), ('read_list', of_the_other, 'mean is '), ('read_list', raises, 'RuntimeError: no kernel image')])
def test_kernels_that_are_wrong_are_not_used_again(kernels_here, monkeypatch, recwarn, name, wrong, why):
    monkeypatch.setattr(gpu, name, wrong)
    assert [gpu.reads(torch.float32, ('basic',), cpu) for _ in range(3)]==[False]*3
    [said] = said_of(recwarn)
    assert said.startswith('The kernels of torchember are not used for float32 on cpu: ') and why in said and torch.__version__ in said
    monkeypatch.setattr(gpu, 'read_one', read_right)
    monkeypatch.setattr(gpu, 'read_list', read_all)
    assert gpu.reads(torch.float64, ('basic',), cpu) and not gpu.reads(torch.float32, ('basic',), cpu)


def test_a_compiler_that_does_not_end_is_not_waited_for(kernels_here, monkeypatch, recwarn):
    over = threading.Event()
    monkeypatch.setattr(gpu, 'patience', .05)
    monkeypatch.setattr(gpu, 'read_one', lambda *args: over.wait(20))
    began = time.monotonic()
    assert not gpu.reads(torch.float32, ('basic',), cpu) and time.monotonic()-began<10
    over.set()
    for t in threading.enumerate():
        if t.name=='torchember checks': t.join()
    assert 'no result after 0.05 s' in said_of(recwarn)[0]


def test_torch_operations_replace_wrong_kernels(kernels_here, monkeypatch):
    "The torch operations give the right statistics, also for lists of tensors."
    monkeypatch.setattr(kernels, 'gpu_kernels', lambda device: gpu)
    monkeypatch.setattr(gpu, 'available', lambda device: True)
    x = torch.tensor([3., math.nan, -1., 0.])
    assert kernels.list_kernels(x, ('basic',)) is gpu
    gpu.trusted.clear()
    monkeypatch.setattr(gpu, 'read_list', of_the_other)
    with pytest.warns(EmberWarning, match='not used for float32'): assert kernels.list_kernels(x, ('basic',)) is None
    got = kernels.read_on_device(x, 2, ('basic',))
    np.testing.assert_allclose(got.numpy(), read_array([3., math.nan, -1., 0., 0., 0.], ('basic',)), rtol=1e-12)


@pytest.mark.parametrize('broken', [lambda x, wanted: plain.read_device(x, wanted)*2, raises])
def test_tensors_are_copied_to_the_cpu_if_torch_operations_are_wrong(monkeypatch, broken):
    monkeypatch.setattr(kernels, 'read_device', broken)
    kernels.operations_are_right.cache_clear()
    x = torch.tensor([3., math.inf, -1.])
    with pytest.warns(EmberWarning, match='Operations of torch on cpu give wrong numbers') as said:
        for _ in range(2): got = kernels.read_by_operations(x, ('basic', 'absolute'))
    assert len(said)==1
    np.testing.assert_allclose(got.numpy(), read_array(numbers(x), ('basic', 'absolute')), rtol=1e-12)
    kernels.operations_are_right.cache_clear()


def test_operations_of_torch_are_right_here():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert find_reader_mistake(lambda x, wanted: plain.read_device(x.reshape(-1), wanted), dtype, full) is None


loops = '''
import warnings
warnings.simplefilter('always')
import torch
from torchember import get_stats
from torchember.measure import kernels
from torchember.measure.readers import numba as cpu
way = cpu.{name}
def wrong(*args):
    {fault}
cpu.{name} = wrong
got = get_stats(torch.tensor([3., 4, 0, 5]), ['mean', 'max'])
print(got, kernels.loops() is None)
'''


@pytest.mark.parametrize('name,fault,said', [
    ('read_at', 'v = way(*args); v[7] = v[6]; return v', 'max is '),
    ('read_at', 'return way(args[0], max(args[1]-1, 0), *args[2:])', 'count is '),
    ('prepare_cursor', 'put = way(*args); return lambda tap, x, n, *rest: put(tap, x+4, n, *rest)', ' is '),
    ('prepare_cursor', 'way(*args); return lambda *args: 0', ' is ')])
def test_wrong_loops_are_not_used(name, fault, said):
    done = programs.run(loops.format(name=name, fault=fault))
    assert done.stdout.strip()=="{'mean': 3.0, 'max': 5.0} True", done
    assert 'EmberWarning: numba does not work, so tensors are measured by plain torch operations' in done.stderr and said in done.stderr, done.stderr


around = '''
import tempfile, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchember import torchEmber
from torchember.measure import kernels
seen = []
class Count(TorchDispatchMode):
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        seen.append(f)
        return f(*args, **(kwargs or {{}}))
model = torch.nn.Linear(3, 2)
with {around}: te = torchEmber(model, home=tempfile.mkdtemp())
model(torch.ones(1, 3, device='cpu')).sum().backward()
te.close()
print(kernels.loops() is not None, len(seen), sorted(te.t.df['ttype'].unique()))
'''


@pytest.mark.parametrize('mode', ["torch.device('meta')", 'FakeTensorMode()', 'Count()', 'torch.inference_mode()', "torch.autocast('cpu', torch.bfloat16)"])
def test_checks_run_without_the_modes_and_default_device_of_the_user(mode):
    "A user's default device must not apply: memory addresses on another device are not host addresses."
    done = programs.run(around.format(around=mode))
    there,seen,*_ = done.stdout.split() # at most two operations were seen: lift_fresh, called when the model is armed
    assert there=='True' and int(seen)<=2 and "'output'" in done.stdout and not done.stderr, done


def test_a_launch_is_prepared_once_for_each_stream_and_alignment(monkeypatch):
    "A launch is prepared again only if work memory has grown. Later launches pass only the addresses of tensor and row."
    monkeypatch.setattr(gpu, 'memories', {})
    monkeypatch.setattr(gpu, 'handles', {})
    ready,launches = [],[]
    def launch(x, out, jobs, between, programs, stream, args, n, tensors, wanted, aligned):
        ready.append((stream, aligned))
        gpu.handles[gpu.kernel_key(x.dtype, x.device, wanted, n, aligned)] = lambda *args: launches.append(args)
    monkeypatch.setattr(gpu, 'launch', launch)
    r,x,rows = gpu.TensorLaunch(5000, torch.float32, cpu, ('basic',)),torch.zeros(5004),torch.zeros(4, 20, dtype=torch.float64)
    r(x[:5000], rows[:, :16], 1, 7); r(x[:5000], rows[:, :16], 2, 7)
    assert ready==[(7, True)] and launches[0][:4]==(r.programs, 7, x.data_ptr(), rows[2].data_ptr())
    memory = gpu.memory_of(cpu, 7)
    rest = map(gpu.launch_argument, memory.arguments(torch.float32, ('basic',), 2, 1))
    assert launches[0][4:]==(memory.tensors['jobs'].data_ptr(), 5000, 0, 0, *rest, r.span, r.per)
    r(x[1:5001], rows, 0, 7); r(x[4:], rows, 0, 8)
    assert ready[1:]==[(7, False), (8, True)] and gpu.memory_of(cpu, 8) is not memory
    r(x[:5000], rows, 0, 8)
    assert len(launches)==2 and launches[1][4]==gpu.memory_of(cpu, 8).tensors['jobs'].data_ptr() and len(ready)==3
    memory.arguments(torch.float32, ('basic',), 5000, 40)
    r(x[:5000], rows, 0, 8)
    r(x[:5000], rows, 0, 7)
    assert ready[3:]==[(8, True), (7, True)]
    r(x[:5000], rows, 3, 7)
    assert launches[2][4]==gpu.memory_of(cpu, 7).tensors['jobs'].data_ptr() and launches[2][6:8]==(0, 0)
    assert launches[2][8]==memory.tensors['rows', torch.float32].data_ptr()!=launches[0][8]
    r(x[:5000], rows, 0, 8); r(x[1:5001], rows, 0, 7)
    assert len(launches)==5 and len(ready)==5
    r(x[2:5002], rows, 0, 9); r(x[4:], rows, 0, 9)
    # an offset of 8 bytes is not 16-byte aligned, so this launch is prepared separately
    assert ready[5:]==[(9, False)] and len(launches)==6


def test_a_cuda_graph_has_its_own_work_memory(monkeypatch):
    "The stream of a capture may be used again later. Work memory of the graph must not be used by other launches."
    monkeypatch.setattr(gpu, 'memories', {})
    monkeypatch.setattr(gpu, 'handles', {})
    monkeypatch.setattr(kernels, 'gpu_kernels', lambda device: gpu)
    used = []
    def launch(x, out, jobs, between, programs, stream, args, n, tensors, wanted, aligned):
        used.append(args[0].data_ptr())
        gpu.handles[gpu.kernel_key(x.dtype, x.device, wanted, n, aligned)] = lambda *args: used.append(args[8])
    monkeypatch.setattr(gpu, 'launch', launch)
    r,x,rows,eager = gpu.TensorLaunch(5000, torch.float32, cpu, ('basic',)),torch.zeros(5000),torch.zeros(4, 20, dtype=torch.float64),gpu.memories
    class Graph: pass
    graphs,kept = [Graph(), Graph()],[]
    r(x, rows, 0, 7)
    for g in graphs:
        its = [GraphRows(g, cpu) for _ in range(2)] # rows of two embers in the same graph
        for i in range(2): r(x, rows, i, 7)
        assert gpu.memories is not eager and len(gpu.memories)==1
        memory = gpu.memories
        its[0].end(); its[0].end() # a second end() changes nothing
        assert gpu.memories is memory
        its[1].end()
        assert gpu.memories is eager
        memory[0] = Graph() # an object that supports weak references
        kept.append(weakref.ref(memory[0]))
        del memory, its
    r(x, rows, 0, 7)
    assert len(used)==6 and used[0]==used[5] and used[1]==used[2]!=used[3]==used[4] and len({used[0], used[1], used[3]})==3
    assert not GraphRows.captured
    gc.collect()
    assert all(k() is not None for k in kept) # the memory lives as long as the graph
    del graphs[0], g
    graphs.clear()
    assert not any(k() is not None for k in kept)


def test_a_tensor_is_read_once_per_block(another):
    "A tensor is read again if other statistics are requested, or if the tensor has changed."
    class Graph: pass
    graph = Graph()
    rows,x = GraphRows(graph, cpu),torch.arange(4.)
    a,b = (Some(rows=torch.zeros(9, length(w), dtype=torch.float64)) for w in (('basic',), full))
    def row(block, i, wanted=('basic',), scale=None): return rows.row_of(x, wanted, scale, block, i)
    assert [row(a, 3), row(a, 4)]==[3, 3] and not a.rows[4].any()
    assert row(b, 5, full)==5 and row(b, 6)==5 and row(a, 7)==7
    x.add_(1)
    assert row(a, 8)==8 and a.rows[8, index['max']]==4 and a.rows[7, index['max']]==3
    rows.end()


def test_the_table_of_a_list_is_on_the_device_of_its_stream(monkeypatch):
    "Each stream has its own table of addresses. A flag says if all addresses are multiples of 16."
    plans,x = [],torch.zeros(400)
    monkeypatch.setattr(gpu, 'memories', {})
    monkeypatch.setattr(gpu, 'plan', cache(gpu.plan.__wrapped__))
    monkeypatch.setattr(gpu, 'launch', lambda x, out, jobs, between, programs, stream, args, n, tensors, wanted, aligned: plans.append((jobs, stream, aligned)))
    for stream,first in ((1, 0), (1, 0), (2, 0), (1, 1)):
        monkeypatch.setattr(gpu, 'chosen_stream', lambda device: stream) # noqa: B023
        gpu.read_list([x[:100], x[100+first:200]], ('basic',), torch.zeros(2, 16, dtype=torch.float64))
    assert [p[1:] for p in plans]==[(1, True), (1, True), (2, True), (1, False)]
    assert plans[0][0] is plans[1][0] and plans[2][0] is not plans[0][0] and len(gpu.memories)==2


def used_of(wanted):
    "Return the columns in a row of a block that a kernel writes."
    more = dict(higher=['s4'], absolute=['zeros'], powers=['p8'], exponents=['zeros'])
    return {'posinf', *(c for g in wanted for c in more.get(g, ()))}


@pytest.mark.parametrize('blocks,groups,tensors', [(900, 800, 300), (40, 30, 20), (79, 70, 60), (57, 1, 1)])
def test_work_memory_is_large_enough_for_its_launch(blocks, groups, tensors):
    "Allocated sizes are rounded up to powers of two. Several cases are tested, because this may hide a wrong size."
    for wanted in (('basic',), *(('basic', g) for g in full[1:]), full):
        memory = gpu.StreamMemory(cpu)
        rows,k,part,n,counters,bins = memory.arguments(torch.float32, wanted, blocks, groups, tensors)
        assert (k, n)==(blocks, groups) and len(rows)>=blocks*(1+max(i for i,c in enumerate(gpu.columns) if c in used_of(wanted)))
        assert len(part)>=groups*15 and len(counters)>=tensors+groups and len(bins)>=tensors*256 and (rows.dtype, part.dtype)==(torch.float32, torch.float64)


def test_tensors_without_gaps_in_memory_are_recognized():
    x = torch.arange(24.)
    runs = x, x.view(4, 6), x.view(4, 6).t(), x.view(2, 3, 4).permute(1, 2, 0), x[5:9], x[3], x[:0], x.view(24, 1)[:, :1], x[:6].view(1, 6).expand(1, 6)
    others = x[::2], x.view(4, 6)[:, 1:], x.view(4, 6)[::2], x[:6].expand(4, 6), x[:4, None].expand(4, 3), x.as_strided((3, 3), (1, 1)), x[:1].expand(3)
    assert [gpu.has_no_gaps(y) for y in runs]==[True]*9 and [gpu.has_no_gaps(y) for y in others]==[False]*7


@pytest.mark.parametrize('block', [64, 4096])
def test_trials_have_one_block_less_and_more(block):
    "The tested sizes are around one block of elements, and more than two blocks."
    sizes = []
    def read(x, wanted):
        sizes.append(x.numel())
        return kernels.read(x, wanted)
    assert find_reader_mistake(read, torch.float32, ('basic',), block) is None
    assert {0, 1, block-1, block, block+1, 2*block+3}<={*sizes}


def test_huge_tensors_have_their_own_compiled_code():
    "From 2^31 elements on, the number of elements does not fit into int32."
    assert len({gpu.kernel_key(torch.float32, cpu, ('basic',), n, True) for n in (0, 5, 2**31-1, 2**31, 2**33)})==2


@pytest.mark.parametrize('name', ['blocks', 'tile', 'width'])
def test_each_compiled_constant_is_in_the_key_of_the_code(monkeypatch, name):
    def key(): return gpu.kernel_key(torch.float32, cpu, ('basic',), 9, True)
    before = key()
    monkeypatch.setattr(gpu, name, {torch.float32: 128} if name=='blocks' else 7)
    assert key()!=before


def test_no_fast_launch_on_a_device_that_is_not_current(monkeypatch):
    monkeypatch.setattr(gpu, 'driver', lambda: Some(get_current_stream=lambda i: 40+i, get_current_device=lambda: 1))
    assert [gpu.TensorLaunch(5, torch.float32, torch.device('cuda', i), ('basic',)).stream() for i in (0, 1)]==[None, 41]
    monkeypatch.setattr(gpu, 'driver', lambda: None)
    assert gpu.TensorLaunch(5, torch.float32, torch.device('cuda', 1), ('basic',)).stream() is None


def test_tensors_without_strides_are_not_read_in_lists(kernels_here, monkeypatch):
    monkeypatch.setattr(kernels, 'gpu_kernels', lambda device: gpu)
    monkeypatch.setattr(gpu, 'available', lambda device: True)
    x = torch.eye(4)
    assert kernels.list_kernels(x, ('basic',)) is gpu and kernels.list_kernels(x[:, 1:3], ('basic',)) is None
    for other in (x.to_sparse(), x.to_sparse_csr(), x.to_sparse_csc()): assert kernels.list_kernels(other, ('basic',)) is None


def test_tensors_that_wrap_others_have_no_address(kernels_here, monkeypatch):
    monkeypatch.setattr(kernels, 'gpu_kernels', lambda device: gpu)
    monkeypatch.setattr(gpu, 'available', lambda device: True)
    class Of(torch.Tensor): pass
    x = torch.eye(4)
    assert kernels.kernels_for(x, ('basic',)) is kernels.kernels_for(nn.Parameter(x), ('basic',)) is gpu
    assert kernels.kernels_for(x.as_subclass(Of), ('basic',)) is kernels.list_kernels(x.as_subclass(Of), ('basic',)) is None
    whole = torch.arange(4)
    assert kernels.kernels_for(whole, ('basic',)) is None and kernels.kernels_for(whole, ('basic',), torch.float64) is gpu


class Event:
    "A fake stream event that notes its calls."
    def __init__(self, device): self.device = device
    def record(self): made.append((self.device, chosen[-1]))
    def synchronize(self): made.append('waited')


made,chosen = [],[None]


class Chosen:
    def __init__(self, device): self.device = device
    def __enter__(self): chosen.append(self.device)
    def __exit__(self, *args): chosen.pop()


@pytest.fixture
def another(monkeypatch):
    "Make the CPU look like an accelerator with asynchronous copies."
    monkeypatch.setattr(devices, 'pinned', devices.Pinned())
    made.clear()
    for f in (devices.accelerator, devices.copies_async, devices.capture_of): f.cache_clear()
    monkeypatch.setattr(devices, 'accelerator', lambda: 'cpu')
    monkeypatch.setattr(torch.accelerator, 'current_stream', lambda device: Some(stream_id=0))
    monkeypatch.setattr(torch, 'Event', Event)
    monkeypatch.setattr(torch, 'empty', lambda *args, pin_memory=False, **kwargs: torch.zeros(*args, **kwargs))
    monkeypatch.setattr(torch, 'get_device_module', lambda kind: Some(device=Chosen, is_current_stream_capturing=lambda: made==['capturing']))
    yield
    for f in (devices.copies_async, devices.capture_of): f.cache_clear()


def test_a_reader_waits_for_a_copy_on_the_device_of_the_copy(another):
    got = devices.to_host(torch.tensor([1.5, 2.], dtype=torch.bfloat16))
    tried = ['waited'] # the device was tried first with a test copy
    assert made==[(cpu, cpu), *tried, (cpu, cpu)] and chosen==[None]
    assert np.asarray(got).tolist()==[1.5, 2.] and made[-1]=='waited'
    assert devices.to_host(torch.arange(3)).shape==(3,) and len(made)==5


def test_memory_that_a_cuda_graph_reads_is_not_reused(another):
    devices.copies_async(cpu)
    for capturing in (True, False):
        made[:] = ['capturing'] if capturing else []
        devices.pinned.free.clear()
        assert devices.to_device([3, 4], cpu).tolist()==[3, 4]
        assert sum(map(len, devices.pinned.free.values()))==(0 if capturing else 1)


@pytest.mark.parametrize('fault', ['no memory', 'other numbers'])
def test_a_device_with_wrong_copies_is_copied_synchronously(another, monkeypatch, fault):
    if fault=='no memory': monkeypatch.setattr(torch, 'empty', raises)
    else: monkeypatch.setattr(torch.Tensor, 'copy_', lambda self, x, non_blocking=False: self)
    assert devices.to_host(torch.arange(3)).tolist()==[0, 1, 2] and not devices.copies_async(cpu)


def test_mps_is_copied_synchronously(monkeypatch):
    "If a test copy of a device is wrong, its tensors are copied synchronously."
    monkeypatch.setattr(devices, 'accelerator', lambda: 'mps')
    monkeypatch.setattr(devices, 'start_copy', lambda x: np.arange(5))
    devices.copies_async.cache_clear()
    assert not devices.copies_async(torch.device('mps'))
    devices.copies_async.cache_clear()


def test_tensors_in_a_captured_graph_are_not_recorded(another, monkeypatch, tmp_path):
    "During a CUDA graph capture, no tensors and no logged numbers are recorded, and one warning is given."
    model = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), .1)
    with pytest.warns(EmberWarning) as said, torchEmber(model, opt, ttypes=('output',), home=tmp_path) as te:
        # switch off direct reads, as for a tensor on a GPU
        monkeypatch.setattr(arena.Tap, 'plan_cpu_read', lambda *args: None)
        for capturing in (False, True, True, False):
            made[:] = ['capturing'] if capturing else []
            loss = model(torch.ones(1, 2)).sum()
            te.log(**{'loss' if capturing else 'outside': loss})
            loss.backward()
            opt.step()
    df = te.t.df
    steps = [df[rows]['step'].tolist() for rows in (df['ttype']=='output', df['tname']=='log', df['tname']=='lr')]
    assert steps==[[0, 3], [0, 3], [0]] and 'loss' not in df
    assert ['a CUDA graph is being captured' in str(w.message) for w in said]==[True]


def test_which_float_is_the_widest(monkeypatch):
    assert devices.widest(torch.device('mps')) is torch.float32 and devices.widest(cpu) is torch.float64
    devices.has_float64.cache_clear()
    monkeypatch.setattr(torch, 'full', raises)
    assert devices.widest(torch.device('xpu')) is torch.float32
    monkeypatch.setattr(torch, 'full', lambda size, value, dtype, device: torch.tensor([value]*2, dtype=torch.float32))
    devices.has_float64.cache_clear()
    assert devices.widest(torch.device('xpu')) is torch.float32
    monkeypatch.setattr(torch, 'full', lambda size, value, dtype, device: torch.tensor([value]*2, dtype=dtype))
    devices.has_float64.cache_clear()
    assert devices.widest(torch.device('xpu')) is torch.float64
    devices.has_float64.cache_clear()
