"""A simulated accelerator: tensors compute on the CPU, and each missing synchronization between host, streams and memory is found.

Real devices run asynchronously, and the program must order their work. Here each operation has a number on its stream, and a stream knows up to which
number it has waited for each other stream. So a race that a real device shows now and then is found each time, and listed in `Machine.faults`:
- an operation reads memory that another stream has written, or writes memory that another stream uses, without waiting for that stream
- memory is freed while another stream still uses it, without a call of `record_stream`
- the host reads a copy before the event that marks the copy as complete
A graph is captured as on CUDA: no operation runs, and results are undefined. When the graph is replayed, its memory is read and written on the
current stream, and memory without references is overwritten.
Reading a value on the host waits for the device; `Machine.waits` lists where. A copy into pinned memory does not wait, and keeps the old content until then.
"""
import sys
import threading
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace as Some

import torch
import torchember
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
reads_a_value = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default, aten.masked_select.default}


def cuda(i=0): return torch.device('cuda', i)


class Stream:
    def __init__(self, device):
        # knows: other stream -> last operation of it that is done for this stream; copies: (operation, host, values)
        self.device,self.now,self.knows,self.copies = device,0,{},[]
        self.finished = 0 # number of the last operation that the host knows to be done
        self.stream_id,self.lock = id(self),threading.Lock() # the writer thread and the training thread use `copies`

    def sees(self, other, number): return other is self or self.knows.get(other, 0)>=number

    def wait(self, other, number, knows):
        for s,n in {**knows, other: number}.items(): self.knows[s] = max(self.knows.get(s, 0), n)

    def wait_stream(self, other): self.wait(other, other.now, other.knows)
    def wait_event(self, event): event.wait(self)

    def done(self, number):
        "Complete the operations of the stream up to a number, so that their copies to the host arrive."
        with self.lock:
            for at,host,values in self.copies:
                if at<=number: host.copy_(values)
            self.copies = [c for c in self.copies if c[0]>number]
            self.finished = max(self.finished, number)

    def __enter__(self):
        machine().chosen.append((self.device, self))
        return self

    def __exit__(self, *args): machine().chosen.pop()


class Event:
    def __init__(self, device=None, **kwargs): self.at = None
    def record(self, stream=None):
        s = stream or machine().stream()
        self.at = s,s.now,dict(s.knows)

    def wait(self, stream=None):
        if self.at: (stream or machine().stream()).wait(*self.at)

    def query(self):
        if machine().graph is not None: machine().fault('an event is asked while a graph is captured')
        failing()
        return self.at[0].finished>=self.at[1]

    def synchronize(self):
        if self.at is None: return machine().fault('an event is waited for that was never recorded')
        if machine().graph is not None: machine().fault('an event is waited for while a graph is captured')
        failing()
        self.at[0].done(self.at[1])
        # Threads of torchember may wait; only the training thread must not
        if threading.current_thread() is not threading.main_thread() or may_wait(): return
        machine().waits.append(Found(f"an event\n{''.join(traceback.format_stack(limit=14)[:-1])}", by_us()))


def failing():
    if machine().failed: raise RuntimeError('CUDA error: device-side assert triggered')


# torchember may wait in `disarm`, and before the capture of a graph, where torch waits, too
def may_wait(): return any(f.name in ('disarm', 'before_capture') for f in traceback.extract_stack())


class Chosen:
    "Replacement for `torch.cuda.device`, which selects the current device"
    def __init__(self, device): self.device = torch.device(device)
    def __enter__(self): machine().chosen.append((self.device, None))
    def __exit__(self, *args): machine().chosen.pop()


class Memory:
    "A simulated allocation: the operation that wrote the memory last, and the operations that have used it since then"
    def __init__(self, stream):
        self.owner,self.written,self.used,self.told,self.ours = stream,(stream, stream.now),{},set(),by_us()
        weakref.finalize(self, check_freed, machine(), stream, self.used, self.told, self.ours)


def check_freed(of, owner, used, told, ours):
    if the.machine is not of: return # The memory belongs to the simulated machine of an earlier test
    for s,(n,by_us) in used.items():
        if not owner.sees(s, n) and s not in told: machine().fault('memory is freed while another stream uses it', ours or by_us)


package = str(Path(torchember.__file__).parent)
# Frames that do not count as torchember: `capture.clipping` runs torch's clipping functions for the program
skipped = str(Path(torch.__file__).parent),__file__,str(Path(package, 'capture', 'clipping.py'))


def by_us():
    "Return True if the running operation was started by code of torchember, and not by the program."
    f = sys._getframe(1)
    while f is not None and (f.f_code.co_filename.startswith(skipped) or '/lib/python' in f.f_code.co_filename): f = f.f_back
    return f is not None and f.f_code.co_filename.startswith(package)


class Found(str):
    "Description of a fault or a wait of the simulated device, with its stack. ours: True if torchember caused it, and not the program"
    def __new__(cls, text, ours):
        self = super().__new__(cls, text)
        self.ours = ours
        return self


class Machine:
    def __init__(self, devices=2):
        self.streams = {i: Stream(cuda(i)) for i in range(devices)} # default stream of each device
        self.chosen,self.faults,self.waits,self.launches,self.copies,self.pinned = [(cuda(), None)],[],[],0,0,set()
        self.at_once = 0 # number of tensors that were read by a single launch
        self.failed = False # True after the device has failed
        self.captures = False # True while a graph is captured: launches do not run, and a wait breaks the capture
        self.graph = None # `Graph` of a capture that also records the operations of torchember

    def fault(self, text, ours=True): self.faults.append(Found(f"{text}\n{''.join(traceback.format_stack(limit=14)[:-1])}", ours))

    def stream(self, device=None):
        device = torch.device(device) if device is not None else self.chosen[-1][0]
        if device.index is None: device = cuda(self.chosen[-1][0].index or 0)
        return next((s for d,s in reversed(self.chosen) if s is not None and d==device), self.streams[device.index])

    def wait_for_all(self, why):
        self.waits.append(Found(f"{why}\n{''.join(traceback.format_stack(limit=14)[:-2])}", by_us()))
        if self.graph is not None:
            self.graph.broken = True
            raise RuntimeError('CUDA error: operation not permitted when stream is capturing')
        for s in (*self.streams.values(), *{s for _,s in self.chosen if s}): s.done(s.now)

    def launched(self, device, used, written):
        s,ours = self.stream(device),by_us()
        if self.graph is not None:
            self.launches += 1
            self.graph.nodes += 1
            return self.graph.notes(s, used, written)
        if self.captures and ours: self.fault('something of ours is launched into the graph that a program captures')
        s.now += 1
        self.launches += 1
        for m in (*used, *written):
            if not s.sees(*m.written): self.fault(f'{device} uses what another stream has written, and has not waited for it', ours or m.ours)
        for m in written:
            for other,(n,_) in m.used.items():
                if not s.sees(other, n): self.fault(f'{device} writes what another stream uses, and has not waited for it', ours or m.ours)
            m.written = s,s.now
            m.used.clear()
        for m in (*used, *written): m.used[s] = s.now,ours
        return s


the = Some(machine=None)
def machine(): return the.machine


def device_in(args, kwargs): return next((torch.device(a) for a in (*args, kwargs.get('device')) if isinstance(a, torch.device|str)), None)


class Late(torch.Tensor):
    "Tensor on the simulated device. `value`: CPU tensor with its elements"
    @staticmethod
    def __new__(cls, value, device, memory):
        lies = dict(strides=value.stride(), storage_offset=value.storage_offset())
        x = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device='cpu', **lies)
        x.value,x.at,x.memory = value,device,memory
        return x

    device = property(lambda self: self.at)
    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: True)
    def data_ptr(self): return self.value.data_ptr()
    def record_stream(self, stream): self.memory.told.add(stream)
    def get_device(self): return self.at.index
    def cpu(self, **kwargs): return self.to('cpu')
    def __repr__(self): return f'Late({tuple(self.shape)}, {self.at})'
    def numpy(self, **kwargs): raise TypeError("can't convert cuda:0 device type tensor to numpy")
    def __array__(self, *args, **kwargs): return self.numpy()
    def tolist(self): return self.cpu().tolist()

    def to(self, *args, **kwargs):
        device = device_in(args, kwargs)
        if device==self.at:
            args,device = tuple(a for a in args if not isinstance(a, torch.device|str)),None
            kwargs.pop('device', None)
        if device is None: return super().to(*args, **kwargs) if args or kwargs else self
        return Moved.apply(self, device, next((a for a in (*args, kwargs.get('dtype')) if isinstance(a, torch.dtype)), self.dtype))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        m,found = machine(),[]
        tree_map_only(Late, found.append, (args, kwargs))
        written = [v for a,v in zip(func._schema.arguments, args, strict=False) if a.alias_info is not None and a.alias_info.is_write]
        written = [*written, *(kwargs[a.name] for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write and a.name in kwargs)]
        to = []
        tree_map_only(torch.Tensor, to.append, written)
        if func is aten.copy_.default and not isinstance(args[0], Late): return to_the_host(*args, **kwargs)
        if func in reads_a_value: m.wait_for_all(str(func))
        device = next((x.at for x in found if x.dim()), found[0].at)
        if len({x.at for x in found if x.dim()})>1: raise RuntimeError(f'Expected all tensors to be on the same device: {func}, {[x.at for x in found]}')
        if kwargs.get('device') is not None and torch.device(kwargs['device']).type=='cuda': kwargs['device'] = 'cpu'
        plain_args,plain_kwargs = tree_map_only(Late, lambda x: x.value, (args, kwargs))
        out = func(*plain_args, **plain_kwargs) if m.graph is None else m.graph.takes(func, args, kwargs, plain_args, plain_kwargs, to)
        view = not to and any(r.alias_info is not None for r in func._schema.returns)
        memories = {id(x.memory): x.memory for x in found}
        writes = {id(x.memory): x.memory for x in to if isinstance(x, Late)}
        s = m.stream(device) if view else m.launched(device, [v for k,v in memories.items() if k not in writes], writes.values())
        def wrapped(y):
            of = next((x.memory for x in found if x.value.untyped_storage().data_ptr()==y.untyped_storage().data_ptr() and y.numel()), None)
            if of is None:
                of = Memory(s)
                if m.graph is not None and not view: m.graph.made.append((y, weakref.ref(of)))
            return Late(y, device, of)
        out = tree_map_only(torch.Tensor, wrapped, out)
        return return_and_correct_aliasing(func, args, kwargs, out)


class Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, device, dtype):
        ctx.was = x.device,x.dtype
        return moved(x.detach(), device, dtype)

    @staticmethod
    def backward(ctx, g): return moved(g, *ctx.was), None, None


def moved(x, device, dtype=None, non_blocking=False):
    "Return a copy of a tensor on another device, or on the host. A copy to the host waits for the device."
    dtype,device = dtype or x.dtype,torch.device(device)
    if isinstance(x, Late) and device.type=='cpu':
        machine().wait_for_all('a copy for the host')
        machine().launched(x.at, [x.memory], [])
        return x.value.to(dtype, copy=True)
    if isinstance(x, Late): machine().launched(x.at, [x.memory], [])
    elif x.device.type=='cpu' and by_us() and not (non_blocking and x.data_ptr() in machine().pinned): machine().wait_for_all('a copy from memory of the host')
    if isinstance(x, Late): machine().stream(device).wait_stream(machine().stream(x.at)) # torch orders the streams of two devices in the same way
    return late(x.value if isinstance(x, Late) else x, device, dtype)


def late(x, device=None, dtype=None):
    device = torch.device(device or 'cuda')
    device = cuda(machine().chosen[-1][0].index) if device.index is None else device
    s = machine().launched(device, [], [])
    value = x.detach().to(dtype or x.dtype, copy=True)
    if machine().graph is not None: machine().graph.fills(value)
    return Late(value, device, Memory(s))


def to_the_host(host, x, non_blocking=False):
    m = machine()
    s = m.launched(x.at, [x.memory], [])
    if not non_blocking or host.data_ptr() not in m.pinned:
        m.wait_for_all('a copy into memory of the host that is not pinned')
        return host.copy_(x.value)
    m.copies += 1
    with s.lock: s.copies.append((s.now, host, x.value.clone()))
    return host # `host` keeps its old content until the copy arrives


class Graph:
    "Replacement for `torch.cuda.CUDAGraph`"
    def __init__(self): self.reset()

    def reset(self):
        self.broken = False
        self.runs,self.used,self.written,self.nodes = [],[],[],0
        self.made,self.gone = [],[] # made: computed values and their memory; gone: values without references at the end of the capture

    def capture_begin(self, pool=None, capture_error_mode='global'):
        self.reset()
        machine().graph,machine().captures = self,True

    def capture_end(self):
        machine().graph,machine().captures = None,False
        if self.broken: raise RuntimeError('CUDA error: operation failed due to a previous error during capture')
        # Later operations of the graph reuse the memory of values without references
        self.gone = [value for value,memory in self.made if memory() is None and value.is_floating_point()]

    def notes(self, stream, used, written):
        "Remember the memory that each replay of the graph reads and writes."
        self.used += map(weakref.ref, used)
        self.written += map(weakref.ref, written)
        return stream

    def takes(self, func, args, kwargs, plain_args, plain_kwargs, to):
        "Remember an operation for the replays of the graph. Return a result with the right shape, and do not change written tensors yet."
        ids = {id(x) for x in to}
        now_args,now_kwargs = tree_map_only(Late, lambda x: x.value.clone() if id(x) in ids else x.value, (args, kwargs))
        out,new = func(*now_args, **now_kwargs),[]
        if not to: tree_map_only(torch.Tensor, new.append, out)
        view = not to and any(r.alias_info is not None for r in func._schema.returns)
        def run():
            got = []
            tree_map_only(torch.Tensor, got.append, func(*plain_args, **plain_kwargs))
            for old,value in zip(new, got, strict=False): old.copy_(value)
        if not view: self.runs.append(run)
        return out

    def fills(self, value):
        was = value.clone()
        self.runs.append(lambda: value.copy_(was))

    def replay(self):
        m = machine()
        alive = lambda refs: list({id(x): x for r in refs if (x := r()) is not None}.values())
        used,written = alive(self.used),alive(self.written)
        s = m.launched(m.chosen[-1][0], used, written)
        # The replay may use all this memory, which belongs to the graph or to tensors of the user
        for x in (*used, *written): x.told.add(s)
        for run in self.runs: run()
        for value in self.gone: value.fill_(torch.nan)


class captured:
    "Replacement for `torch.cuda.graph`, which captures a graph"
    def __init__(self, graph): self.graph = graph

    def __enter__(self):
        m = machine()
        device = m.chosen[-1][0]
        self.side = Stream(device)
        self.side.wait_stream(m.stream())
        m.chosen.append((device, self.side))
        self.graph.capture_begin()

    def __exit__(self, *args):
        machine().chosen.pop()
        self.graph.capture_end()


class Kernels:
    "Replacement for the kernels of `measure.readers`: a single launch reads the same tensors as a launch of the real kernel"
    def __init__(self): self.lists,self.memory = [],'of no graph'
    def exchange(self, own):
        self.memory,former = own,self.memory
        return former

    def reads(self, dtype, wanted, device): return True

    def has_no_gaps(self, x):
        from torchember.measure.readers.triton import has_no_gaps
        return has_no_gaps(x)

    def reading(self, n, dtype, device, wanted): return Reading(self, device, wanted)

    def read_one(self, x, wanted, out): self.read_list([x], wanted, out[None], [0])

    def read_list(self, xs, wanted, out, to=None):
        from torchember.measure.readers.torch import read_device
        from torchember.measure.readers.triton import without_gaps
        self.lists.append(len(xs))
        xs = [without_gaps(x) for x in xs]
        machine().launched(out.device, [x.memory for x in xs], [out.memory])
        def run():
            for x,i in zip(values, range(len(values)) if to is None else to, strict=True): rows[i, :] = read_device(x.reshape(-1), wanted)
        values,rows = [x.value for x in xs],out.value
        run() if machine().graph is None else machine().graph.runs.append(run)


class Reading:
    "Object that reads one tensor into its row immediately, on the current stream"
    def __init__(self, kernels, device, wanted): self.kernels,self.device,self.wanted = kernels,device,wanted

    def stream(self):
        chosen = machine().chosen[-1][0].index or 0
        return id(machine().stream(self.device)) if chosen==self.device.index else None

    def __call__(self, x, rows, i, stream):
        if id(machine().stream(self.device))!=stream: machine().fault('rows are written on another stream than was said')
        machine().at_once += 1
        self.kernels.read_one(x, self.wanted, rows[i])


def factory(make):
    def f(*args, device=None, pin_memory=False, **kwargs):
        if isinstance(device, str|torch.device) and torch.device(device).type=='cuda': return late(make(*args, **kwargs), device)
        # torch raises this error if the user's default device is a GPU
        if pin_memory and device is None: raise RuntimeError('Only dense CPU tensors can be pinned')
        out = make(*args, **kwargs) if device is None else make(*args, device=device, **kwargs)
        if pin_memory:
            machine().pinned.add(out.data_ptr())
            out.untyped_storage().fill_(0x5a) # Pinned memory is not zeroed: fill it with bytes of an earlier use
        return out
    return f


def installed(monkeypatch, kernels=True):
    "In a `with` block, replace the device functions of torch and torchember by those of a new simulated `Machine`."
    from torchember.measure import arena, devices, elements, tap
    from torchember.measure import kernels as reading
    from torchember.recorder import step_buffer
    the.machine = m = Machine()
    monkeypatch.setattr(devices, 'pinned', devices.Pinned())
    m.kernels = Kernels()
    of_tensor,as_it_is = torch.Tensor.to,torch.as_tensor
    for n in ('zeros', 'ones', 'full', 'empty', 'arange', 'tensor', 'randn'): monkeypatch.setattr(torch, n, factory(getattr(torch, n)))
    monkeypatch.setattr(torch, 'as_tensor', lambda x, **kwargs: x.to(**kwargs) if isinstance(x, Late) else as_it_is(x).to(**kwargs))
    def to(self, *args, **kwargs):
        device = device_in(args, kwargs)
        if device is None or device.type!='cuda': return of_tensor(self, *args, **kwargs)
        return moved(self, device, next((a for a in (*args, kwargs.get('dtype')) if isinstance(a, torch.dtype)), None), kwargs.get('non_blocking', False))
    monkeypatch.setattr(torch.Tensor, 'to', to)
    monkeypatch.setattr(torch, 'Event', Event)
    monkeypatch.setattr(torch.accelerator, 'current_stream', m.stream)
    monkeypatch.setattr(torch.accelerator, 'synchronize', lambda device=None: m.wait_for_all('all'))
    monkeypatch.setattr(torch.cuda, 'device', Chosen)
    monkeypatch.setattr(torch.cuda, 'CUDAGraph', Graph)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: m.chosen[-1][0].index or 0)
    def captures():
        failing()
        return m.captures
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', captures)
    for f in (devices.capture_of, devices.copies_async, reading.operations_are_right, reading.gpu_kernels): f.cache_clear()
    for room in (devices,): monkeypatch.setattr(room, 'accelerator', lambda: 'cuda')
    monkeypatch.setattr(devices, 'capture_of', lambda kind: captures if kind=='cuda' else None)
    for room in (arena, elements, reading, tap, step_buffer): monkeypatch.setattr(room, 'ordinary', (torch.Tensor, torch.nn.Parameter, Late))
    if kernels: monkeypatch.setattr(reading, 'gpu_kernels', lambda device: m.kernels if device.type=='cuda' else None)
    else: monkeypatch.setattr(reading, 'gpu_kernels', lambda device: None)
    # Skip a check that each process makes once
    monkeypatch.setattr(reading, 'operations_are_right', lambda *args: True)
    # Make the check for asynchronous copies now, because each process makes it once
    for i in m.streams: assert devices.copies_async(cuda(i))
    m.waits.clear()
    m.copies = 0
    return m


def over():
    the.machine = None
    from torchember.measure import devices
    from torchember.measure import kernels as reading
    for f in (devices.copies_async, reading.operations_are_right): f.cache_clear()


def moved_model(model, device=None):
    "Move the parameters and buffers of a model to the simulated device. Return the model."
    for mod in model.modules():
        for k,p in mod._parameters.items():
            if p is not None: mod._parameters[k] = torch.nn.Parameter(late(p, device), requires_grad=p.requires_grad)
        for k,b in mod._buffers.items():
            if b is not None: mod._buffers[k] = late(b, device)
    return model
