"Tests on the simulated device of `late`: rows equal those of the CPU, and there are no waits or races between streams"
import copy
import gc
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from late import Event, Kernels, Late, Machine, Stream, cuda, installed, late, machine, moved_model, over, the
from torch import nn
from trainings import ALL, adam, cases, data, in_halves, model, optimizers, plain, recorded, same, settings

from torchember import torchEmber
from torchember.health.diagnose import load_history
from torchember.measure import devices
from torchember.measure.arena import Arena, queue_of
from torchember.measure.blocks import address
from torchember.measure.devices import to_host
from torchember.measure.elements import Unmeasurable
from torchember.measure.summary import index
from torchember.measure.tap import observe
from torchember.recorder.step_buffer import StepBuffer, custom_row
from torchember.state.layers import summarize_layers


@pytest.fixture(params=[True, False], ids=['kernels', 'operations'])
def gpu(request, monkeypatch):
    yield installed(monkeypatch, request.param)
    monkeypatch.undo()
    over()


@pytest.fixture
def bare_machine(monkeypatch):
    "A simulated machine that no ember uses"
    the.machine = m = Machine()
    yield m
    over()


def fail_on_faults(m):
    "Fail with the faults that torchember has caused."
    for found in (*m.faults, *m.waits): assert not found.ours, found


@pytest.mark.parametrize('train,options,kind', cases, ids=lambda v: getattr(v, '__name__', v))
def test_the_numbers_are_those_of_the_cpu_and_nobody_waits(gpu, monkeypatch, tmp_path, train, options, kind):
    net = model().bfloat16() if train is in_halves else model()
    moved = moved_model(copy.deepcopy(net))
    want = recorded(train, net, torch.clone, tmp_path/'cpu', settings[options], kind)
    seen = []
    got = recorded(train, moved, late, tmp_path/'gpu', settings[options], kind, lambda: seen.append((len(gpu.waits), gpu.copies, gpu.launches)))
    fail_on_faults(gpu)
    first = [b[1]-a[1] for a,b in zip(seen, seen[1:], strict=False)]
    # At most one copy to the host per step, or two if rows have several widths
    assert set(first[1:])<={0, 1, 2} and sum(first)>=1, seen
    same(got.t.df, want.t.df, 1e-5 if train is not in_halves else .02)
    for k,v in moved.state_dict().items(): assert torch.equal(v.value, net.state_dict()[k]), k
    monkeypatch.undo()


@pytest.mark.parametrize('kind', ['foreach', 'fused'])
@pytest.mark.parametrize('bad', [None, 2], ids=['all finite', 'one step skipped'])
def test_a_loss_that_was_scaled(gpu, monkeypatch, tmp_path, kind, bad):
    "The scaler waits in each step. torchember waits only if a fused optimizer skips steps itself, which only the device knows."
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    def scaled(net, opt, to, device):
        scaler = torch.amp.GradScaler(device, init_scale=8.)
        for i,x in enumerate(data()):
            x = to(x*torch.inf if i==bad else x)
            scaler.scale(net(x).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    waits,tables = [],[]
    for armed,device in ((True, 'cpu'), (False, 'cuda'), (True, 'cuda')):
        net = moved_model(model()) if device=='cuda' else model()
        opt,before = adam(net, **optimizers[kind]),len(gpu.waits)
        te = torchEmber(net, opt, home=tmp_path, name=device, ttypes=ALL, stats='numerics') if armed else None
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            scaled(net, opt, late if device=='cuda' else torch.clone, device)
            if te: te.close()
        waits.append(len(gpu.waits)-before)
        if te: tables.append(te.t.df)
    assert waits[0]==0 and waits[1]>=4 and waits[2]-waits[1]==(4 if kind=='fused' else 0), (waits, gpu.waits[-1])
    for f in gpu.faults: assert not f.ours, f
    same(tables[1], tables[0])


@pytest.mark.parametrize('stats', ['basic', 'numerics'])
def test_a_scale_is_not_waited_for(gpu, monkeypatch, tmp_path, stats):
    "The loss scale is divided out on the device, without a wait. Only the scaler waits."
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    tables = []
    for device in ('cpu', 'cuda'):
        net,to = (model(),torch.clone) if device=='cpu' else (moved_model(model()),late)
        opt,scaler = adam(net),torch.amp.GradScaler(device, init_scale=8.)
        with torchEmber(net, opt, home=tmp_path/device, ttypes=ALL, stats=stats, scaler=scaler) as te:
            for x in data():
                scaler.scale(net(to(x)).square().mean()).backward()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        tables.append(te.t.df)
    assert not [w for w in gpu.waits if 'torchember/measure' in w or 'step_buffer' in w]
    for f in gpu.faults: assert not f.ours, f
    same(tables[1], tables[0])


def test_steps_that_are_not_recorded_launch_nothing(gpu, tmp_path):
    counts = {}
    for every in (None, 1000):
        net = moved_model(model())
        opt,seen = adam(net),[]
        if every is None: plain(net, opt, late, lambda: seen.append(gpu.launches)) # noqa: B023
        else:
            with torchEmber(net, opt, home=tmp_path, every=every): plain(net, opt, late, lambda: seen.append(gpu.launches)) # noqa: B023
        counts[every] = np.diff(seen)[1:].tolist()
    assert counts[1000]==counts[None]
    fail_on_faults(gpu)


def test_a_recorded_step_launches_the_same_each_time(gpu, tmp_path):
    net = moved_model(model())
    opt,seen = adam(net),[]
    with torchEmber(net, opt, home=tmp_path): plain(net, opt, late, lambda: seen.append(gpu.launches))
    assert len(set(np.diff(seen)[1:]))==1


class TwoDevices(nn.Module):
    "A model with one half on each of two devices"
    def __init__(self, to):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b,self.to_other = nn.Linear(5, 8),nn.Linear(8, 3),to
    def forward(self, x): return self.b(self.to_other(self.a(x)).tanh())


@pytest.mark.parametrize('chosen', [0, 1])
def test_a_model_on_two_devices(gpu, tmp_path, chosen):
    "Copies of each device are complete at the event of that device, whichever device is current."
    want_net,net = TwoDevices(torch.clone),TwoDevices(lambda x: x.to(cuda(1)))
    moved_model(net.a, cuda(0))
    moved_model(net.b, cuda(1))
    gpu.chosen[0] = cuda(chosen),None
    want = recorded(plain, want_net, torch.clone, tmp_path/'cpu', settings['all'], 'one by one')
    got = recorded(plain, net, lambda x: late(x, cuda(0)), tmp_path/'gpu', settings['all'], 'one by one')
    fail_on_faults(gpu)
    same(got.t.df, want.t.df)


def test_noted_numbers_of_a_device_are_not_waited_for(gpu, tmp_path):
    net = moved_model(model())
    opt = adam(net)
    with torchEmber(net, opt, home=tmp_path) as te:
        for i,x in enumerate(data()):
            loss = net(late(x)).square().mean()
            te.log(loss=loss, half=loss.detach().bfloat16(), whole=late(torch.tensor(i)))
            loss.backward()
            opt.step()
    fail_on_faults(gpu)
    rows = te.t.df.dropna(subset='loss')
    net,opt = model(),None
    opt = adam(net)
    want = []
    for x in data():
        loss = net(x).square().mean()
        want.append(loss.item())
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert rows['whole'].tolist()==[0, 1, 2, 3] and rows['loss'].iloc[0]==pytest.approx(want[0], rel=1e-6)
    np.testing.assert_allclose(rows['half'], rows['loss'], rtol=.01)


@pytest.mark.parametrize('waits', [True, False])
def test_a_pass_on_a_stream_of_its_own(gpu, tmp_path, waits):
    "A program that orders its streams shows no fault. A fault of the program itself is found with and without torchember."
    faults = {}
    for armed in (False, True):
        net = moved_model(model())
        opt,side,gpu.faults = adam(net),Stream(cuda()),[]
        te = torchEmber(net, opt, home=tmp_path, name=f'{armed}') if armed else None
        for x in data():
            x = late(x)
            if waits: side.wait_stream(gpu.stream())
            with side: net(x).square().mean().backward()
            if waits: gpu.stream().wait_stream(side)
            opt.step()
            opt.zero_grad(set_to_none=False)
            if waits: side.wait_stream(gpu.stream())
        if te: te.close()
        faults[armed] = list(gpu.faults)
    assert bool(faults[False])==(not waits)
    if waits: fail_on_faults(gpu)


class Branches(nn.Module):
    "A model with two branches that run in parallel on two streams"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b,self.head,self.sides = nn.Linear(5, 4),nn.Linear(5, 4),nn.Linear(8, 3),None

    def forward(self, x):
        if self.sides is None: return self.head(torch.cat([self.a(x), self.b(x)], 1))
        main,out = machine().stream(),[]
        for side,part in zip(self.sides, (self.a, self.b), strict=True):
            side.wait_stream(main)
            with side: out.append(part(x))
        for side,y in zip(self.sides, out, strict=True):
            main.wait_stream(side)
            y.record_stream(main)
            x.record_stream(side)
        return self.head(torch.cat(out, 1))


@pytest.mark.parametrize('ttypes', [('output',), ALL])
def test_branches_side_by_side(gpu, tmp_path, ttypes):
    "No branch waits for the other. Measurements are read when both streams are done, and memory is not reused before."
    want = recorded(plain, Branches(), torch.clone, tmp_path/'cpu', dict(ttypes=ttypes), 'one by one')
    net = moved_model(Branches())
    net.sides = Stream(cuda()),Stream(cuda())
    got = recorded(plain, net, late, tmp_path/'gpu', dict(ttypes=ttypes), 'one by one')
    gc.collect()
    fail_on_faults(gpu)
    same(got.t.df, want.t.df)


class SharedLayer(Branches):
    "A model whose two branches share one layer"
    def __init__(self):
        super().__init__()
        self.b = self.a


def test_one_layer_on_two_streams_at_once(gpu, tmp_path):
    "No call waits for the other, and each call writes into memory that no other stream writes."
    options = dict(ttypes=('output',), stats='full')
    want = recorded(plain, SharedLayer(), torch.clone, tmp_path/'cpu', options, 'one by one')
    net = moved_model(SharedLayer())
    net.sides = Stream(cuda()),Stream(cuda())
    got = recorded(plain, net, late, tmp_path/'gpu', options, 'one by one')
    gc.collect()
    fail_on_faults(gpu)
    same(got.t.df, want.t.df)


def test_what_is_measured_anew_is_forgotten_on_every_stream(gpu):
    a,side = Arena(),Stream(cuda())
    t,x = a.tap('x', 'full'),late(torch.arange(4.))
    observe(x, t)
    side.wait_stream(gpu.stream())
    with side:
        observe(late(torch.ones(4)), t)
        a.forget(t)
        observe(late(torch.full((4,), 7.)), t)
    assert [r['stats']['mean'] for r in a.take().rows()]==[7.]
    observe(x, t)
    assert [r['stats']['mean'] for r in a.take().rows()]==[1.5]
    assert not gpu.faults, gpu.faults[0]


class CalledOnTwoStreams(nn.Module):
    "A layer that is called on two streams in the same step"
    def __init__(self, calls):
        super().__init__()
        torch.manual_seed(0)
        self.layer,self.side,self.calls = nn.Linear(5, 5),None,calls

    def forward(self, x):
        for i in range(self.calls):
            if self.side is None or i%2==0: x = self.layer(x)
            else:
                main = machine().stream()
                self.side.wait_stream(main)
                with self.side: y = self.layer(x)
                main.wait_stream(self.side)
                x.record_stream(self.side)
                y.record_stream(main)
                x = y
        return x


@pytest.mark.parametrize('calls', [2, 7])
def test_a_layer_that_is_called_on_two_streams_in_turn(gpu, tmp_path, calls):
    "Each call has its own row, and no step needs more rows than the step before."
    options = dict(ttypes=('output', 'weight'), stats='full')
    want = recorded(plain, CalledOnTwoStreams(calls), torch.clone, tmp_path/'cpu', options, 'one by one')
    net = moved_model(CalledOnTwoStreams(calls))
    net.side,used,opt = Stream(cuda()),[],adam(net, foreach=False)
    with torchEmber(net, opt, home=tmp_path/'gpu', **options) as te:
        arena = te.recorder.buffer.rows.arena
        plain(net, opt, late, lambda: used.append([b.used for b in arena.blocks]))
    gc.collect()
    fail_on_faults(gpu)
    same(te.t.df, want.t.df)
    assert used[1]==used[-1] and len(used[-1])==2, used


# ---- failures

@pytest.mark.parametrize('ends', ['pass', 'te.step', 'optimizer'])
def test_what_is_captured_is_left_alone(gpu, tmp_path, ends):
    "If a graph is captured within a step, torchember does not end, read or launch anything. Later passes are recorded."
    net = moved_model(model())
    opt,launched = adam(net),[]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with torchEmber(net, opt if ends=='optimizer' else None, home=tmp_path, ttypes=('output', 'weight')) as te:
            for capturing in (False, True, True, False):
                gpu.captures = capturing
                before = gpu.launches
                net(late(data()[0])).square().mean().backward()
                if ends=='optimizer':
                    opt.step()
                    opt.zero_grad()
                if capturing:
                    te.recorder.flush() # Flush as a reader of the run does: it must launch nothing during the capture
                    launched.append(gpu.launches-before)
            if ends=='te.step': te.step() # Ends the only step here; its weights were measured in the first pass
    fail_on_faults(gpu)
    assert len(set(launched))==1
    assert sum('graph is being captured' in str(w.message) for w in said)==1
    rows = [r for r in te.t.lines() if r['ttype']=='output']
    # Both recorded passes of one step share a row
    assert [r['step'] for r in rows]==[0]*6+([1]*6 if ends!='te.step' else [])
    want = [r['mean'] for r in recorded(plain, model(), torch.clone, tmp_path/'cpu', {}, 'one by one').t.lines() if r['ttype']=='output' and r['step']==0]
    np.testing.assert_allclose([r['mean'] for r in rows[:6]], want, rtol=1e-5)


def test_what_waits_is_not_read_into_a_graph(gpu, monkeypatch):
    if not isinstance(gpu_kernels(), Kernels): pytest.skip('without kernels nothing waits to be read')
    a = Arena()
    t,x = a.tap('x', once=True),late(torch.arange(4.))
    observe(x, t, later=True)
    gpu.captures = True
    before = gpu.launches
    a.read_pending()
    assert gpu.launches==before and len(a.unread.by_row)==1
    gpu.captures = False
    assert [r['stats']['mean'] for r in a.take().rows()]==[1.5]


def gpu_kernels():
    from torchember.measure import kernels
    return kernels.gpu_kernels(cuda())


def test_rows_of_lists_that_were_not_read_any_more(gpu, monkeypatch):
    "If one list of tensors fails, the next list is not read, so its rows still have numbers of an earlier step."
    if not isinstance(gpu_kernels(), Kernels): pytest.skip('without kernels there are no lists')
    a = Arena()
    taps = [a.tap(n, how, once=True) for n,how in (('x', 'basic'), ('y', 'full'))]
    for last in (False, True):
        if last: monkeypatch.setattr(gpu.kernels, 'read_list', lambda *args: failing('no memory'))
        for t in taps: observe(late(torch.arange(4.)), t, later=True)
        if last:
            with pytest.raises(RuntimeError, match='no memory'): a.read_pending()
        assert len(a.take().rows())==(0 if last else 2)


def test_rows_that_follow_one_another_are_sent_as_they_lie(gpu):
    "Consecutive rows are copied directly. Scattered rows are selected by index, which costs two more launches."
    a,launched = Arena(),[]
    taps = [a.tap(n) for n in 'xyz']
    for names in ('xyz', 'xyz', 'xz', 'xz', 'y'):
        for i,n in enumerate(names): observe(late(torch.full((3,), float(i))), taps['xyz'.index(n)])
        before = gpu.launches
        rows = a.take().rows()
        launched.append(gpu.launches-before)
        assert [(r['key'], r['stats']['mean']) for r in rows]==[(n, float(i)) for i,n in enumerate(names)]
    assert launched[1]==launched[4]==launched[3]-2


def failing(what): raise RuntimeError(f'CUDA error: {what}')


def test_rows_that_a_device_does_not_give(gpu, monkeypatch, tmp_path):
    "Rows that the device does not return are lost, with a warning, and appear in no later step. Training and recording continue."
    from torchember.measure import arena as arenas
    net = moved_model(model())
    opt,at,send = adam(net),iter(range(99)),arenas.to_host
    monkeypatch.setattr(arenas, 'to_host', lambda x: failing('lost') if next(at)==1 else send(x))
    with pytest.warns(UserWarning, match='the tensors on a device of this step.*CUDA error: lost') as said, torchEmber(net, opt, home=tmp_path) as te:
        plain(net, opt, late)
    assert len(said)==1
    want = recorded(plain, model(), torch.clone, tmp_path/'cpu', {}, 'one by one').t.df
    got = te.t.df
    assert got['step'].unique().tolist()==[0, 2, 3]
    same(got.reset_index(drop=True), want[want['step']!=1].reset_index(drop=True))


def test_what_is_lost_stands_in_no_later_step(gpu, monkeypatch):
    "Lost numbers appear in no later step, also if that step has fewer rows."
    from torchember.measure import arena as room
    arena,send = Arena(),room.to_host
    taps = [arena.tap(n) for n in 'ab']
    for t in taps: observe(mean_of(2), t)
    monkeypatch.setattr(room, 'to_host', lambda x: failing('lost'))
    with pytest.raises(RuntimeError, match='lost'): arena.take()
    monkeypatch.setattr(room, 'to_host', send)
    observe(mean_of(5), taps[0])
    assert [(r[0], r[3]['mean']) for r in rows_of(arena)]==[('a', 5.)]


@pytest.mark.parametrize('x', [torch.arange(6.).double().view(2, 3), torch.tensor(1.5).bfloat16(), torch.tensor([0, -1, 165]), torch.zeros(0, 4)],
    ids=lambda x: f'{x.dtype} {tuple(x.shape)}')
def test_what_came_before_a_device_failed_is_there(gpu, x):
    "After a failure of the device, each wait raises. Only numbers that arrived before are used."
    came,comes = (to_host(late(x)) for _ in range(2))
    for host,values in ((h, v) for s in gpu.streams.values() for _,h,v in s.copies[:1]): host.copy_(values)
    gpu.failed = True
    assert np.array_equal(np.asarray(came), x.double().numpy())
    if not x.numel(): return
    with pytest.raises(RuntimeError, match='device-side assert'): np.asarray(comes)


@pytest.mark.parametrize('how', ['asked', 'nobody asks', 'the device fails'])
def test_memory_that_devices_write_to_is_used_again_and_never_given_back(gpu, how):
    "Pinned memory is never freed, because torch would end the process if it is freed after the device has failed."
    x = late(torch.arange(6.))
    p = to_host(x)
    memory = weakref.ref(p.memory)
    at = p.memory.data_ptr()
    if how=='the device fails': gpu.failed = True
    if how=='asked': assert np.array_equal(p, range(6)) and p.host is None and np.array_equal(p, range(6))
    if how!='asked': del p
    again = []
    if how=='the device fails':
        with pytest.raises(RuntimeError, match='device-side assert'): to_host(x)
    else: again = [to_host(x), to_host(x)]
    if how=='asked': assert again[0].memory.data_ptr()==at!=again[1].memory.data_ptr()
    if how=='asked': # Each read array has its own values, also if its pinned memory is used again
        kept,mine = to_host(x),to_host(late(torch.ones(6)))
        first = np.asarray(kept)
        first[:] = 9
        other = to_host(late(torch.zeros(6)))
        assert np.asarray(other).tolist()==[0.]*6 and np.asarray(mine).tolist()==[1.]*6 and np.asarray(kept).tolist()==[*map(float, range(6))]
    if how=='nobody asks': # The device may still write to this memory, so it is not used again yet
        assert at not in {p.memory.data_ptr() for p in again}
        gpu.streams[0].done(gpu.streams[0].now)
        assert to_host(x).memory.data_ptr()==at
    again.clear()
    p = kept = mine = other = None
    devices.pinned.free.clear()
    gc.collect()
    assert memory() is not None


def test_numbers_for_a_device_lie_in_memory_that_nobody_writes_to_before_they_are_there(gpu):
    a,b = (devices.to_device([i, i], cuda(0)) for i in (1, 2))
    (_,free), = devices.pinned.free.items()
    assert len(free)==2 and len({h.data_ptr() for h,_ in free})==2
    gpu.streams[0].done(gpu.streams[0].now)
    c = devices.to_device([3, 3], cuda(0))
    assert len(free)==2 and [x.tolist() for x in (a, b, c)]==[[1, 1], [2, 2], [3, 3]]


def test_a_training_whose_device_fails(gpu, tmp_path, recwarn):
    "Numbers that had arrived are in the log, and the report of the run says what is lost."
    net = moved_model(model())
    opt = adam(net)
    te = torchEmber(net, opt, home=tmp_path, ttypes=('output', 'weight'))
    plain(net, opt, late)
    for s in gpu.streams.values(): s.done(s.now)
    gpu.failed = True
    te.recorder.flush() # Simulates the flush at garbage collection
    te.close()
    steps = te.t.df['step'].unique()
    assert list(steps)==list(range(len(steps))) and len(steps)>=2


def test_told_to_raise_it_does(gpu, monkeypatch, tmp_path):
    from torchember.measure import arena as arenas
    net = moved_model(model())
    opt,send = adam(net),arenas.to_host
    te = torchEmber(net, opt, home=tmp_path, on_error='raise')
    monkeypatch.setattr(arenas, 'to_host', lambda x: failing('lost'))
    with pytest.raises(RuntimeError, match='CUDA error: lost'): plain(net, opt, late)
    monkeypatch.setattr(arenas, 'to_host', send)
    te.close()


def test_parameters_that_could_not_be_read_have_no_row(gpu, monkeypatch, tmp_path):
    "Parameters that could not be read must not get the numbers of the step before, which are still in memory."
    if not isinstance(gpu_kernels(), Kernels): pytest.skip('without kernels parameters are not read together')
    net = moved_model(model())
    opt,at,read_list = adam(net),iter(range(99)),gpu.kernels.read_list
    def read(xs, *args): return failing('no memory') if len(xs)==6 and next(at)==1 else read_list(xs, *args)
    monkeypatch.setattr(gpu.kernels, 'read_list', read)
    options = dict(home=tmp_path, ttypes=('output', 'weight'))
    with pytest.warns(UserWarning, match='CUDA error: no memory'), torchEmber(net, opt, **options) as te: plain(net, opt, late)
    n = te.t.df.groupby(['ttype', 'step']).size()
    assert n['weight'].to_dict()=={0: 6, 2: 6, 3: 6} and (n['output']==6).all()


@pytest.mark.parametrize('spread', [False, True])
def test_parameters_that_are_gathered_for_a_pass(gpu, monkeypatch, spread):
    "FSDP frees gathered parameters after a pass, so they are read during the pass. A parameter without memory has no row."
    from torchember.measure import tap, unread
    a = Arena()
    t,x = a.tap('x', once=True),late(torch.arange(4.))
    monkeypatch.setattr(tap, 'may_free_parameters', lambda: spread)
    monkeypatch.setattr(unread, 'is_freed', lambda y: True)
    observe(x, t, later=True)
    waits = bool(a.unread.by_row)
    assert [r['stats']['mean'] for r in a.take().rows()]==([] if waits else [1.5])
    assert not (spread and waits)
    observe(x, t, scale=2., later=True)
    assert bool(a.unread.by_row)==waits and [r['stats']['mean'] for r in a.take().rows()]==([] if waits else [.75])


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_what_is_divided_before_it_is_counted_keeps_its_digits(gpu, dtype):
    "Exponent counts cannot be divided by a scale, so the tensor is divided, in a dtype that keeps small numbers."
    tiny = torch.finfo(dtype).smallest_normal
    x = torch.tensor([tiny, -3*tiny, 7*tiny], dtype=dtype)
    for to,scale in ((torch.clone, 3.), (late, 3.), (late, late(torch.tensor(3.)))):
        arena = Arena()
        tap = arena.tap('a', 'numerics')
        for _ in range(2): observe(to(x), tap, scale=scale)
        want = x.double()/3 if dtype!=torch.float32 else (x/3).double()
        for row in rows_of(arena):
            got = [row[3][k] for k in ('abs_min', 'abs_max', 'abs_mean')]
            np.testing.assert_allclose(got, [f(want.abs()) for f in (torch.min, torch.max, torch.mean)], rtol=1e-6)
            assert sum(row[3]['exponents'])==3
    fail_on_faults(gpu)


def test_only_what_is_there_anyway_waits(gpu):
    "Only tensors that the program keeps are queued, not the divided copies made for exponent counts."
    arena,x = Arena(),mean_of(6)
    for n,stats in (('a', 'basic'), ('b', ['mean', 'exponents'])): observe(x, arena.tap(n, stats, once=True), scale=3., later=True)
    assert [t.number for t in arena.taps if t.rows[:2] in arena.unread.by_row]==([0] if gpu_kernels() else [])
    assert [r[3]['mean'] for r in rows_of(arena)]==[2., 2.]
    fail_on_faults(gpu)


def test_whose_memory_is_gone():
    from torchember.measure.unread import is_freed
    x = torch.ones(4)
    y = x[1:].detach()
    assert not is_freed(y) and not is_freed(x[:0])
    x.untyped_storage().resize_(0)
    assert is_freed(y) and is_freed(x)


def test_who_may_free_parameters(monkeypatch):
    import sys

    from torchember.capture.private_torch import may_free_parameters
    monkeypatch.setitem(sys.modules, 'torch.distributed.fsdp', None)
    assert not may_free_parameters()
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    assert may_free_parameters()
    monkeypatch.delitem(sys.modules, 'torch.distributed.fsdp')
    assert not may_free_parameters()


# ---- launches and shared rows on the simulated device

def rows_of(arena):
    "Return key, call, dtype and statistics of each row, read in a thread, because the writer thread may wait."
    with ThreadPoolExecutor(1) as pool: return [(r['key'], r['call'], r['dtype'], r['stats']) for r in pool.submit(arena.take().rows).result()]


def rows_on_both_devices(gpu, xs, stats='basic', **about):
    "Return the rows of tensors, each at its own tap, on the CPU and on the device."
    out = []
    for to in (torch.clone, late):
        arena = Arena()
        taps = [arena.tap(i, stats) for i in range(len(xs))]
        for _ in range(2):
            for x,t in zip(xs, taps, strict=True): observe(to(x), t, **about)
        out.append(rows_of(arena))
    return out


def test_a_tensor_is_read_by_one_launch(gpu):
    "A tensor is read by one launch and no other operation, also under autocast or no_grad. With a default device, more are needed."
    if not gpu_kernels(): pytest.skip('without kernels it takes several')
    arena,x = Arena(),late(torch.randn(3, 5))
    tap = arena.tap('a')
    observe(x.clone(), tap)
    ys = [x+i for i in range(4)]
    before = gpu.launches,gpu.at_once
    observe(ys[0], tap)
    with torch.autocast('cuda', torch.bfloat16): observe(ys[1], tap)
    with torch.no_grad(): observe(ys[2], tap, 7)
    assert (gpu.launches-before[0], gpu.at_once-before[1])==(3, 3)
    with torch.device('cpu'): observe(ys[3], tap)
    assert gpu.at_once-before[1]==3
    rows = rows_of(arena)
    np.testing.assert_allclose([r[3]['mean'] for r in rows], [y.value.double().mean() for y in (x, *ys)], rtol=1e-6)
    assert [r[1] for r in rows]==[0, 1, 2, 7, 4]
    fail_on_faults(gpu)


def test_a_tensor_that_is_seen_again_is_not_read_again(gpu):
    "A tensor is not read again while object, address, version and scale are unchanged."
    arena,x = Arena(),late(torch.randn(6))
    taps = [arena.tap(i) for i in range(8)]
    reads = []
    def seen(x, tap, **about):
        before = gpu.launches
        observe(x, tap, **about)
        reads.append(gpu.launches>before)
    seen(x, taps[0]); seen(x, taps[1]) # The second row copies the numbers of the first
    x.add_(1); seen(x, taps[2]) # The tensor has a new version, so it is read again
    seen(x, taps[3], scale=2.) # Another scale, so the tensor is read again
    seen(x, taps[4])
    arena.begin(1); seen(x, taps[5]); seen(x, taps[6]) # A new pass, so the tensor is read again
    assert reads==[True, False, True, True, True, True, False] and arena.shared==2
    means = [r[3]['mean'] for r in rows_of(arena)]
    np.testing.assert_allclose(means, [m:=x.value.double().mean()-1]*2+[m+1, (m+1)/2]+[m+1]*3, rtol=1e-5)
    seen(x, taps[7])
    assert reads[-1] # The rows were taken, so no row is left to copy from
    fail_on_faults(gpu)


@pytest.mark.parametrize('stats', ['basic', 'numerics'])
def test_all_kinds_of_tensors(gpu, stats):
    x = torch.randn(4, 6)
    xs = [x, x.half(), x.bfloat16(), x.double(), (x*9).int(), x>0, (x*9).long(), torch.complex(x, -x), x.t(), x[:, ::2], x[:1].expand(3, 6), x[0, 0], x[:0], x]
    cpu,there = rows_on_both_devices(gpu, xs, stats)
    for a,b in zip(cpu, there, strict=True):
        assert a[:3]==b[:3]
        for k in a[3]: np.testing.assert_allclose(b[3][k], a[3][k], rtol=1e-4, atol=1e-6, err_msg=f'{a[0]} {k}')
    fail_on_faults(gpu)


numbers = dict(float=(torch.randn(6), 1), double=(torch.randn(6).double(), 1), transposed=(torch.randn(4, 6).t(), 1), gaps=(torch.randn(4, 6), 2),
    whole=(torch.arange(6), 2), bool=(torch.arange(6)>2, 2), complex=(torch.complex(torch.ones(3), torch.ones(3)), 3))


@pytest.mark.parametrize('kind', numbers)
def test_what_a_tensor_takes(gpu, kind):
    "The numbers of launches are as documented, for a new tensor, a scaled tensor, and a tensor read before."
    if not gpu_kernels(): pytest.skip('operations of torch are several launches each')
    arena,took,(x,launches) = Arena(),[],numbers[kind]
    taps = [arena.tap(i) for i in range(4)]
    for how in ({}, {}, {'scale': 2.}, {}):
        y = late(x)[:, ::2] if kind=='gaps' else late(x)
        before = gpu.launches
        observe(y, taps[0], **how)
        took.append(gpu.launches-before)
    before = gpu.launches
    observe(y, taps[1])
    assert took[1:]==[launches, launches+1, launches] and gpu.launches==before
    fail_on_faults(gpu)


@pytest.mark.parametrize('wanted', [('basic',), ('basic', 'exponents')], ids=str)
def test_layers_of_several_devices(gpu, wanted):
    "Tensors of each device have their own rows, also integers and tensors that are not contiguous."
    xs = [torch.randn(n, 3)+n for n in (4, 1, 5, 2, 6, 3, 7)]
    xs[4] = torch.arange(9)
    places = [None, cuda(0), None, cuda(1), cuda(0), cuda(0), None]
    def there(x, d): return x if d is None else late(x, d)
    got = summarize_layers({str(i): there(x, d)[:, ::2] if i==5 else there(x, d) for i,(x,d) in enumerate(zip(xs, places, strict=True))}, wanted)
    xs[5] = xs[5][:, ::2]
    np.testing.assert_allclose(got, summarize_layers({str(i): x for i,x in enumerate(xs)}, wanted), rtol=1e-6)


def test_functions_of_the_users_run_without_autocast_of_the_device(gpu):
    "Functions of the user compute in full precision, as outside of autocast."
    def look(x): return {'cast': torch.is_autocast_enabled('cuda'), 'here': torch.is_autocast_enabled('cpu')}
    # torch.autocast does nothing without a CUDA device, so set the flag directly
    torch.set_autocast_enabled('cuda', True)
    try:
        with torch.autocast('cpu', torch.bfloat16): assert custom_row(look, late(torch.ones(2)))=={'cast': False, 'here': True}
        assert torch.is_autocast_enabled('cuda')
    finally: torch.set_autocast_enabled('cuda', False)


@pytest.mark.parametrize('whole', [False, True])
def test_tensors_of_inference_have_no_version(gpu, whole):
    "Tensors of inference mode have no version, so they are read each time."
    arena,plain = Arena(),torch.arange(4) if whole else torch.arange(4.)
    with torch.inference_mode(): x = late(plain)
    assert x.is_inference()
    a,b = arena.tap('a'),arena.tap('b')
    observe(x, a)
    before = gpu.at_once
    observe(x, b)
    with torch.inference_mode(): x.value.add_(1) # This change gives no new version
    observe(x, b)
    assert gpu.at_once-before==(2 if gpu_kernels() else 0)
    observe(x, b, scale=2.)
    with torch.device('cpu'): observe(x, b)
    assert [r[3]['mean'] for r in rows_of(arena)]==[1.5, 1.5, 2.5, 1.25, 2.5] and not arena.shared and not arena.seen
    fail_on_faults(gpu)


@pytest.mark.parametrize('stats', ['basic', 'numerics'])
def test_whole_numbers_are_made_floats_and_read_at_once(gpu, stats):
    "Integers are converted and read immediately, except under a dispatch mode or if reading is delayed. Complex tensors are read by their absolute values."
    xs = [torch.arange(-5, 6), torch.arange(7, dtype=torch.int32)*2**24+1, torch.arange(6)>2, torch.arange(9).to(torch.uint8),
        torch.arange(12).view(3, 4).t(), torch.arange(2), torch.complex(torch.ones(3), -torch.ones(3)), torch.arange(0)]
    before = gpu.at_once
    cpu,there = rows_on_both_devices(gpu, xs, stats)
    for a,b in zip(cpu, there, strict=True):
        assert a[:3]==b[:3]
        # Exact integers: 2^24+1 has no float32
        for k in a[3]: np.testing.assert_allclose(b[3][k], a[3][k], rtol=1e-12, err_msg=f'{a[0]} {k}')
    assert gpu.at_once-before==(14 if gpu_kernels() else 0) # Kernels read all tensors but the complex ones
    arena,x,seen = Arena(),late(torch.arange(6)),[]
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None): seen.append(func); return func(*args, **kwargs or {})
    a,b,c = (arena.tap(i, once=i=='c') for i in 'abc')
    observe(x.clone(), a)
    y = x+3
    with Mode(): observe(y, a)
    observe(x, b); x.add_(1); observe(x, b) # The second call reads again, because the version is new
    for _ in range(2): arena.forget(c); observe(x, c, later=True)
    x.add_(1)
    assert not seen and [r[3]['mean'] for r in rows_of(arena)]==[2.5, 5.5, 2.5, 3.5, 3.5]
    assert not queue_of(arena, False)(x, c)
    fail_on_faults(gpu)


def test_rows_that_others_have_their_numbers_from(gpu):
    "If a shared row is written again, rows that share its numbers keep the old numbers."
    arena,x,y = Arena(),late(torch.full((4,), 2.)),late(torch.full((4,), 5.))
    a,b,c = (arena.tap(i) for i in 'abc')
    for t in (a, b, c): observe(x, t)
    arena.forget(a)
    observe(y, a)
    assert [(r[0], r[3]['mean']) for r in rows_of(arena)]==[('b', 2.), ('c', 2.), ('a', 5.)]
    fail_on_faults(gpu)


def test_rows_are_shared_on_one_stream_only(gpu):
    "Rows are shared on one stream only, because another stream may not see the numbers yet."
    arena,x,side = Arena(),late(torch.full((4,), 2.)),Stream(cuda())
    taps = [arena.tap(i) for i in range(3)]
    observe(x, taps[0])
    side.wait_stream(gpu.stream())
    with side: observe(x, taps[1]); observe(x, taps[2])
    gpu.stream().wait_stream(side)
    assert arena.shared==1 and [r[3]['mean'] for r in rows_of(arena)]==[2.]*3
    fail_on_faults(gpu)


def test_a_row_that_could_not_be_written_is_none(gpu, monkeypatch):
    arena,x = Arena(),late(torch.full((4,), 2.))
    a,b = arena.tap('a'),arena.tap('b')
    observe(x.clone(), a)
    with monkeypatch.context() as m:
        if gpu_kernels(): m.setattr(gpu.kernels, 'read_one', lambda *args: failing('no memory'))
        else: m.setattr('torchember.measure.kernels.read_device', lambda *args: failing('no memory'))
        with pytest.raises(RuntimeError, match='no memory'): observe(x, a)
        with pytest.raises(RuntimeError, match='no memory'): observe(x, b)
    observe(x+1, a)
    observe(x, b) # The failed read of `x` left no row to copy from
    assert [(r[0], r[1], r[3]['mean']) for r in rows_of(arena)]==[('a', 0, 2.), ('a', 1, 3.), ('b', 0, 2.)]


def test_parameters_wait_until_they_are_read_together(gpu):
    "Parameters are queued until they are read together, also unchanged ones and under a dispatch mode."
    from torch.utils._python_dispatch import TorchDispatchMode
    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None): return f(*args, **(kwargs or {}))
    arena,ps = Arena(),[nn.Parameter(late(torch.full((4,), float(i)))) for i in range(3)]
    taps = [arena.tap(i, once=True) for i in range(3)]
    for n in range(3):
        for p,t in zip(ps, taps, strict=True):
            arena.forget(t)
            if n==2:
                with Look(): observe(p, t, later=True)
            else: observe(p, t, later=True)
        assert len(arena.unread.by_row)==(3 if gpu_kernels() else 0)
        gpu.kernels.lists.clear()
        assert [r[3]['mean'] for r in rows_of(arena)]==[0., 1., 2.]
        assert gpu.kernels.lists==([3] if gpu_kernels() else [])
    fail_on_faults(gpu)


def mean_of(value): return late(torch.full((4,), float(value)))


@pytest.mark.parametrize('asks', ['take', 'forget', 'read_pending'])
def test_who_asks_on_another_stream_comes_after_the_rows(gpu, asks):
    "A read on another stream waits until the rows are written, and the next row waits for that read."
    arena,x,y,side = Arena(),mean_of(2),mean_of(5),Stream(cuda())
    a,b,c = arena.tap('a'),arena.tap('b'),arena.tap('c', once=True)
    for t in (a, b): observe(x, t)
    observe(y, c, later=True)
    with side:
        if asks=='forget': arena.forget(a)
        else: getattr(arena, asks)()
    observe(y, a)
    want = {'take': [('a', 5.)], 'forget': [('b', 2.), ('c', 5.), ('a', 5.)], 'read_pending': [('a', 2.), ('b', 2.), ('c', 5.), ('a', 5.)]}
    assert [(r[0], r[3]['mean']) for r in rows_of(arena)]==want[asks]
    fail_on_faults(gpu)


@pytest.mark.parametrize('micro', [0, 1])
@pytest.mark.parametrize('together', [True, False])
def test_what_a_list_takes_the_place_of_may_be_on_another_stream(gpu, together, micro):
    "Gradients are read on one stream, then on another, and then complete: the step keeps one row for each gradient."
    if not gpu_kernels(): pytest.skip('without kernels there are no lists')
    arena,side,got = Arena(),Stream(cuda()),[]
    taps = [arena.tap(i, once=True) for i in range(3)]
    def xs(value): return [mean_of(value+i) for i in range(3)]
    for step in range(3):
        with side:
            measure_tensors(arena, xs(100*step+10), taps, False, together)
            arena.read_pending()
        gpu.stream().wait_stream(side)
        arena.begin(micro)
        measure_tensors(arena, xs(100*step+20), taps, False, together)
        arena.read_pending()
        measure_tensors(arena, xs(100*step+30), taps, True, together)
        arena.unread.assign_rows()
        got.append([(r[0], r[3]['mean']) for r in rows_of(arena)])
        arena.begin(0)
    assert got==[[(i, 100.*step+30+i) for i in range(3)] for step in range(3)]
    fail_on_faults(gpu)


@pytest.mark.parametrize('which', [(1,), (0, 2), (0, 1, 2)], ids=str)
def test_those_of_a_list_whose_memory_was_given_back_meanwhile_have_no_rows(gpu, monkeypatch, which):
    "Queued tensors that were freed meanwhile, such as gathered parameters, are not read and have no rows."
    from torchember.measure import unread
    # The wrapper tensor has no storage, so look at its value
    monkeypatch.setattr(unread, 'is_freed', lambda x: not x.value.untyped_storage().nbytes())
    if not gpu_kernels(): pytest.skip('without kernels there are no lists')
    arena,got = Arena(),[]
    taps = [arena.tap(i, once=True) for i in range(3)]
    for step in range(4):
        xs = [mean_of(10*step+i) for i in range(3)]
        measure_tensors(arena, xs, taps, False, True)
        arena.unread.assign_rows()
        assert [len(ys) for _,ys in arena.unread.lists]==([3] if step else []) # Lists are known from the second step on
        for i in which if step==2 else (): xs[i].value.untyped_storage().resize_(0)
        got.append([(r[0], r[3]['mean']) for r in rows_of(arena)])
    assert got==[[(i, 10.*step+i) for i in range(3) if step!=2 or i not in which] for step in range(4)]
    fail_on_faults(gpu)


def test_a_list_that_fails_when_it_was_launched_writes_no_later_row(gpu, monkeypatch):
    "A launch on another stream that was started before the failure is complete before the next row is written."
    if not isinstance(gpu_kernels(), Kernels): pytest.skip('without kernels there are no lists')
    arena,read = Arena(),gpu.kernels.read_list
    taps = [arena.tap(n, once=True) for n in 'ab']
    for t in taps: observe(mean_of(2), t, later=True)
    def launched(*args):
        read(*args)
        failing('no memory')
    monkeypatch.setattr(gpu.kernels, 'read_list', launched)
    with Stream(cuda()), pytest.raises(RuntimeError, match='no memory'): arena.read_pending()
    monkeypatch.setattr(gpu.kernels, 'read_list', read)
    for t in taps: arena.forget(t)
    for t in taps: observe(mean_of(5), t)
    assert [(r[0], r[3]['mean']) for r in rows_of(arena)]==[('a', 5.), ('b', 5.)]
    fail_on_faults(gpu)


def test_a_row_is_known_of_a_tensor_only(gpu):
    "A stored row is reused only for the same tensor object, not for another tensor with equal id, address and version."
    arena,x = Arena(),late(torch.tensor([1., 2., 3., 10.]))
    y = x[:2]
    a,b = arena.tap('a'),arena.tap('b')
    observe(x, a)
    arena.seen[id(y)] = arena.seen.pop(id(x))
    observe(y, b)
    assert address(x)==address(y) and x._version==y._version and [r[3]['mean'] for r in rows_of(arena)]==[4., 1.5]
    fail_on_faults(gpu)


def test_a_pass_begins_with_nothing_that_waits(gpu):
    "Before a pass begins, queued tensors are read, so their rows have the values before the pass."
    arena,p = Arena(),mean_of(2)
    observe(p, arena.tap('p', once=True), later=True)
    arena.begin(1)
    p.add_(3)
    assert not arena.unread.by_row and [r[3]['mean'] for r in rows_of(arena)]==[2.]
    fail_on_faults(gpu)


def test_what_is_measured_anew_again_and_again_takes_no_more_rows(gpu):
    "Measuring the same tensor again and again takes no more rows, on any stream."
    arena,side = Arena(4),Stream(cuda())
    a = arena.tap('a')
    for i in range(20):
        arena.forget(a)
        observe(mean_of(i), a)
        with side: observe(mean_of(-i), a)
    assert sum(b.used for b in arena.blocks)==2 and [r[3]['mean'] for r in rows_of(arena)]==[19., -19.]
    fail_on_faults(gpu)


@pytest.mark.parametrize('later', [False, True])
def test_what_a_launch_cannot_read_is_not_launched_for(gpu, later):
    "No launch for tensors that a kernel cannot read: freed memory, and views with the negative bit."
    arena,x,y = Arena(),mean_of(2),mean_of(3)
    a,b = arena.tap('a', once=later),arena.tap('b', once=later)
    observe(x, a, later=later); observe(x, b, later=later)
    assert [r[3]['mean'] for r in rows_of(arena)]==[2., 2.]
    y.is_neg,y.resolve_neg,y.detach = lambda: True,lambda: -x,lambda: y
    observe(y, b)
    x.value.untyped_storage().resize_(0)
    with pytest.raises(Unmeasurable, match='the tensor has no memory'): observe(x, a)
    assert [(r[0], r[3]['mean']) for r in rows_of(arena)]==[('b', -2.)]
    fail_on_faults(gpu)


def test_what_waits_is_divided_by_its_own_scale(gpu):
    arena,x,two,four = Arena(),mean_of(8),late(torch.tensor(2.)),late(torch.tensor(4.))
    for n,scale in enumerate((two, four, None, two)): observe(x, arena.tap(n, once=True), scale=scale, later=True)
    assert [r[3]['mean'] for r in rows_of(arena)]==[4., 2., 8., 4.]
    fail_on_faults(gpu)


def test_a_tensor_that_was_moved_or_is_asked_for_more_is_read_again(gpu):
    "A tensor is read again after `x.data = y`, which changes no version, or if more statistics are requested."
    arena,x,y = Arena(),mean_of(2),mean_of(5)
    a,b,c,d = arena.tap('a'),arena.tap('b', ['mean', 'abs_mean']),arena.tap('c'),arena.tap('d')
    observe(x, a); observe(x, b); observe(x, c)
    x.value,x.memory = y.value,y.memory
    observe(x, d)
    rows = rows_of(arena)
    assert [r[3]['mean'] for r in rows]==[2., 2., 2., 5.] and rows[1][3]['abs_mean']==2. and arena.shared==1
    fail_on_faults(gpu)


@pytest.mark.parametrize('once', [False, True])
def test_a_row_that_was_written_anew_is_nobodys_source(gpu, once):
    "A row that was discarded, or will be, is not the source of another row."
    arena,x,y = Arena(),mean_of(2),mean_of(5)
    a,b,c = arena.tap('a', once=once),arena.tap('b'),arena.tap('c')
    observe(x, a)
    if once: observe(x, b)
    arena.forget(a)
    observe(y, a)
    observe(x, c)
    assert sorted((r[0], r[3]['mean']) for r in rows_of(arena))==[('a', 5.), *[('b', 2.)]*once, ('c', 2.)]
    fail_on_faults(gpu)


def test_rows_of_a_tap_lie_in_several_blocks(gpu):
    arena = Arena(2)
    taps = [arena.tap('a'),arena.tap('b')]
    for i in range(9): observe(mean_of(i), taps[i%2])
    assert len(arena.blocks)>2 and [(r[0], r[3]['mean']) for r in rows_of(arena)]==[('ab'[i%2], float(i)) for i in range(9)]
    fail_on_faults(gpu)


@pytest.mark.parametrize('multiplied', [False, True])
def test_a_row_that_waits_has_numbers_of_its_own(gpu, multiplied):
    "A queued row has its own numbers, also if another row had used the memory before."
    arena,x,y,scale = Arena(),mean_of(2),mean_of(6),late(torch.tensor(2.)) if multiplied else None
    a,b = arena.tap('a'),arena.tap('b')
    observe(x, a, scale=scale); observe(x, b, scale=scale)
    assert arena.shared==1 and len(arena.take())==2
    observe(x, b, scale=scale, later=True)
    arena.forget(b)
    observe(y, b, scale=scale, later=True)
    assert [r[3]['mean'] for r in rows_of(arena)]==[3. if multiplied else 6.]
    observe(x, b, later=True)
    arena.forget(b)
    observe(y, b)
    assert [r[3]['mean'] for r in rows_of(arena)]==[6.]
    fail_on_faults(gpu)


def test_nobody_sees_that_a_parameter_waits(gpu):
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []
    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            seen.append(f)
            return f(*args, **(kwargs or {}))
    arena = Arena()
    t,p = arena.tap('p', once=True),nn.Parameter(mean_of(2))
    observe(p, t) # The first call allocates the row
    arena.forget(t)
    with Look(): observe(p, t, later=True)
    assert not seen and [r[3]['mean'] for r in rows_of(arena)]==[2.]


def test_what_no_launch_reads_goes_the_long_way(gpu, monkeypatch):
    "Without a kernel for a tensor that is not dense, or for a statistic, torch operations compute the row."
    if not gpu_kernels(): pytest.skip('without kernels all do')
    from torchember.measure import arena as room
    arena,x = Arena(),late(torch.randn(4, 6))
    a,b,c = (arena.tap(i) for i in 'abc')
    observe(x, a); observe(x[:, :4].clone(), b)
    assert gpu.at_once==2
    observe(x[:, ::3], c); observe(x[:, 1:5], b)
    assert gpu.at_once==2
    with torch.cuda.device(cuda(1)): observe(late(x.value+1, cuda(1)), a)
    assert gpu.at_once==3
    monkeypatch.setattr(room, 'sums_not_in_loops', lambda wanted: ('logs',))
    observe(x+2, arena.tap('d'))
    assert gpu.at_once==3
    v = x.value.double()
    want = [v.mean(), v[:, :4].mean(), v[:, ::3].mean(), v[:, 1:5].mean(), v.mean()+1, v.mean()+2]
    np.testing.assert_allclose([r[3]['mean'] for r in rows_of(arena)], want, rtol=1e-5)
    fail_on_faults(gpu)


def test_each_repeat_of_an_expanded_tensor_counts(gpu):
    arena,x = Arena(),late(torch.arange(3.))
    for i,y in enumerate((x.expand(4, 3), x[:, None].expand(3, 5), x[:1].expand(7), x.expand(2, 2, 3))): observe(y, arena.tap(str(i), 'numerics'))
    _,summarize_layers = arena.take().parts[0]
    fail_on_faults(gpu)
    v = np.asarray(summarize_layers)
    assert v[:, index['count']].tolist()==[12, 15, 7, 12] and v[:, index['zeros']].tolist()==[4, 5, 7, 4]
    np.testing.assert_allclose(v[:, index['l1']], [12, 15, 0, 12])


def test_whole_numbers_are_read_in_all_their_digits(gpu):
    "Integers without a kernel are converted to floats with as many bits."
    xs = [torch.tensor([2**40+1, 2**40+3]), torch.tensor([2.**40+1], dtype=torch.complex128), torch.tensor([2**30+1]).int()]
    for stats in rows_on_both_devices(gpu, xs): assert [r[3]['max'] for r in stats]==[2**40+3, 2**40+1, 2**30+1]*2 and stats[0][3]['mean']==2**40+2
    fail_on_faults(gpu)


# ---- other parts of torchember that read from the device

def test_what_is_measured_now_is_not_what_it_becomes(gpu, tmp_path):
    net = moved_model(model())
    want = net.body.weight.value.double().mean().item()
    with torchEmber(net, home=tmp_path, ttypes='weight', ends='step') as te, torch.no_grad():
        te.log_model()
        for p in net.parameters(): p.zero_()
    rows = {r['module']: r for r in te.t.lines() if r['ttype']=='weight' and r['pname']=='weight'}
    np.testing.assert_allclose(rows['model(Net).body(Linear)']['mean'], want, rtol=1e-6)


def test_numbers_of_a_step_that_is_over_are_not_waited_for(gpu, tmp_path):
    "torchember never waits for the numbers of a finished step, not even for its black box, the file of the latest steps."
    net = moved_model(model())
    opt = adam(net)
    with torchEmber(net, opt, home=tmp_path, ttypes='output', blackbox=True) as te:
        for x in data():
            loss = net(late(x)).square().mean()
            loss.backward()
            opt.step()
            te.log(loss=loss.detach(), known=1.)
    fail_on_faults(gpu)
    assert te.t.df['loss'].notna().sum()==len(data())


def test_what_a_device_does_not_give_takes_nothing_else_with_it(gpu, monkeypatch):
    "If the device fails, rows of user functions and logged numbers survive, because they are on the host."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        buffer = StepBuffer({'output': ('mean',)})
        observe(late(torch.ones(3)), buffer.rows.arena.tap('x'))
        buffer.add(('model', 'scalar', 'log', None, None, 0), 0, None, 'float64', {'loss': 2.})
        monkeypatch.setattr(buffer.rows.arena, 'take', lambda *args: failing('device-side assert triggered'))
        snapshot,custom = buffer.take(True)
    assert len(snapshot)==0 and [r[5] for r in custom]==[{'loss': 2.}] and 'device-side assert' in str(said[0].message)


def test_a_number_that_is_noted_during_a_capture(gpu, tmp_path):
    "A number logged during a capture is not available yet: a warning says so, and the graph contains no operation for it."
    net,x = moved_model(model()),late(data()[0])
    with warnings.catch_warnings(record=True) as said, torchEmber(net, home=tmp_path, ttypes='output') as te, torch.no_grad():
        warnings.simplefilter('always')
        loss = net(x).mean()
        gpu.captures,before = True,gpu.launches
        te.log(loss=loss, known=3.)
        assert gpu.launches==before
        gpu.captures = False
    fail_on_faults(gpu)
    assert [str(w.message) for w in said if 'graph is being captured' in str(w.message)]
    assert te.t.df['known'].dropna().tolist()==[3.] and 'loss' not in te.t.df


def test_the_random_numbers_of_a_device_are_its_own(monkeypatch):
    "Recording leaves the random generator of each device unchanged, whichever device is current."
    from torchember.recorder.step_buffer import torch_generators as of_torch
    put = []
    room = SimpleNamespace(get_rng_state=lambda device=None: device, set_rng_state=lambda state, device=None: put.append((state, device)))
    monkeypatch.setattr(torch, 'get_device_module', lambda kind: room)
    get,give = of_torch(torch.device('cuda', 1))['cuda:1']
    give('as it was')
    assert get()==torch.device('cuda', 1) and put==[('as it was', torch.device('cuda', 1))]


def test_a_step_with_tensors_here_and_there_was_on_a_device(gpu):
    for where,on_device in (('cpu', False), ('both', True), ('cuda', True)):
        buffer = StepBuffer({'output': ('mean',)})
        for i,x in enumerate((torch.ones(3), late(torch.ones(3)))):
            if where in ('both', x.device.type): observe(x, buffer.rows.arena.tap(str(i)))
        buffer.take(True)
        buffer.handle_step_end()
        assert buffer.on_device is on_device


def test_squares_of_gradients_on_two_devices(gpu):
    from torchember.measure.summary import read_array
    from torchember.state.noise import squared_norms
    a,b,c = (read_array(np.arange(n, dtype=np.float32), ('basic',)) for n in (3, 5, 2))
    got = squared_norms([[late(torch.from_numpy(a), cuda(0)), b], [late(torch.from_numpy(c), cuda(1))]])
    np.testing.assert_allclose(got, [5+30, 1])


def test_a_sketch_on_a_device_is_that_on_the_cpu(gpu):
    from torchember.measure.units import Sketch
    x = torch.randn(5000)
    sketch = Sketch(5000, 64)
    np.testing.assert_allclose(sketch.on_device(x, torch.float32), sketch(x), rtol=1e-4, atol=1e-4)


def test_the_cost_of_a_tensor_is_told_when_it_was_read(monkeypatch):
    from torchember.recorder import plan
    waited = []
    monkeypatch.setattr(plan, 'wait_for', lambda device: waited.append(device))
    xs,_ = plan.time_reading(('mean',), torch.float32, torch.device('cpu'), 16)
    assert len(waited)==9 and xs==[16]


def test_what_the_machine_sees(bare_machine):
    a,b = bare_machine.stream(cuda()),Stream(cuda())
    x = late(torch.ones(3))
    with b: x+1
    assert ['uses what another stream has written' in f for f in bare_machine.faults]==[True]
    bare_machine.faults.clear()
    b.wait_stream(a)
    with b: x+1
    assert not bare_machine.faults
    x.add_(1)
    assert ['writes what another stream uses' in f for f in bare_machine.faults]==[True]
    bare_machine.faults.clear()
    with b: x*2
    b.wait_stream(a)
    y = late(torch.ones(2))
    b.wait_stream(a)
    with b: y*2
    bare_machine.faults.clear()
    del y
    assert ['freed while another stream uses it' in f for f in bare_machine.faults]==[True]
    bare_machine.faults.clear()
    z = late(torch.ones(2))
    b.wait_stream(a)
    with b: z*2
    z.record_stream(b)
    del z
    assert not bare_machine.faults and not bare_machine.waits


def test_a_copy_is_not_there_before_its_event(bare_machine):
    host = torch.zeros(3)
    bare_machine.pinned.add(host.data_ptr())
    x = late(torch.arange(3.))
    host.copy_(x, non_blocking=True)
    early,done = Event(),Event()
    assert host.tolist()==[0, 0, 0]
    done.record()
    x.add_(5)
    done.synchronize()
    assert host.tolist()==[0, 1, 2] and len(bare_machine.waits)==1 # The copy has the values from before `add_`
    early.synchronize()
    assert 'never recorded' in bare_machine.faults[0]
    assert x.sum().item()==18 and len(bare_machine.waits)==2
    assert isinstance(x, Late) and machine() is bare_machine


# ---- lists of parameters that are read together

def measure_tensors(arena, xs, taps, again, together):
    "Measure weights or gradients in one list with `StepBuffer.measure_together`, or one by one."
    waits = queue_of(arena, again) if together else None
    for x,t in zip(xs, taps, strict=True):
        if waits is not None and waits(x, t): continue
        if again: arena.forget(t)
        observe(x, t, 0, later=True)


@pytest.mark.parametrize('seed', [*range(9), *(pytest.param(i, marks=pytest.mark.release) for i in range(9, 60))])
def test_lists_have_the_rows_that_each_tensor_has_by_itself(gpu, seed):
    "Tensors read in a list and one by one have equal rows, whatever happens in between: passes, steps, streams, new shapes."
    if not gpu_kernels(): pytest.skip('without kernels there are no lists')
    rng,side = np.random.default_rng(seed),Stream(cuda())
    plan = rng.choice(['weights', 'grads', 'some', 'others', 'begin', 'take', 'read', 'back', 'renumber', 'forget', 'aside', 'flow'], 40,
        p=[.2, .15, .08, .05, .1, .16, .08, .04, .04, .04, .03, .03])
    def run(together):
        arena,out = Arena(size=4),[]
        names = [*'abcdef']
        taps = {n: arena.tap(n, 'basic' if n!='c' or seed%2 else 'full', once=True) for n in names+[n+' grad' for n in names]}
        flow = arena.tap('flow')
        def xs(n, step, shift=0): return late(torch.arange(3.+shift+'abcdef'.index(n[0])%2)+step*10+ord(n[0]))
        micro,has = 0,set() # has: names of parameters with a row in this step
        for step,what in enumerate(plan):
            some = names if what!='some' else names[step%3::2]
            if what in ('weights', 'some', 'others', 'aside'):
                ts = [taps[n] for n in some]
                given,again = [xs(n, step, shift=what=='others') for n in some],not has.isdisjoint(some)
                has |= {*some}
                if what=='aside':
                    with side:
                        given = [xs(n, step) for n in some]
                        measure_tensors(arena, given, ts, again, together)
                    arena.read_pending()
                else: measure_tensors(arena, given, ts, again, together)
            if what=='grads': measure_tensors(arena, [xs(n, step) for n in names], [taps[n+' grad'] for n in names], True, together)
            if what=='flow': observe(late(torch.ones(2)*step), flow, 0)
            if what=='begin': micro += 1; arena.begin(micro)
            if what=='read': arena.read_pending()
            if what=='back': arena.drop_failed_pass(micro, [])
            if what=='renumber': arena.renumber(micro+3)
            if what=='forget': arena.forget(taps['b']); arena.forget(taps['d grad'])
            if what=='take':
                out.append([(r['key'], r['call'], r['micro'], r['stats']) for r in in_thread(arena.take)])
                has.clear()
        out.append([(r['key'], r['call'], r['micro'], r['stats']) for r in in_thread(arena.take)])
        return out, arena
    want,_ = run(False)
    got,arena = run(True)
    assert got==want
    assert arena.unread.plans
    fail_on_faults(gpu)


def in_thread(take):
    snapshot = take()
    with ThreadPoolExecutor(1) as pool: return pool.submit(snapshot.rows).result()


def test_from_the_second_step_on_parameters_are_lists(gpu, monkeypatch, tmp_path):
    "From the second step, parameters are read in lists. A frozen parameter or a new shape makes another list."
    from torchember.measure.unread import ListPlan
    if not gpu_kernels(): pytest.skip('without kernels parameters are not read together')
    written = []
    write = ListPlan.write_heads
    monkeypatch.setattr(ListPlan, 'write_heads', lambda self, *args: written.append(len(self.taps)) or write(self, *args))
    net = moved_model(model())
    opt = adam(net)
    steps = []
    with torchEmber(net, opt, home=tmp_path, ttypes=('weight', 'weight_grad')) as te:
        for i,x in enumerate(data(7)):
            if i==4: net.head.weight.requires_grad_(False); net.head.weight.grad = None
            if i==6: net.head.weight.requires_grad_(True)
            net(late(x)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            steps.append(list(written))
            written.clear()
    assert steps[0]==[] and steps[2]==steps[3]==[6, 6] and steps[4]==steps[5]==[6, 5] and steps[6]==[6, 6], steps
    n = te.t.df.groupby(['ttype', 'step']).size()
    assert n['weight'].tolist()==[6]*7 and n['weight_grad'].tolist()==[6]*4+[5]*2+[6]
    fail_on_faults(gpu)


def test_lists_of_a_buffer(gpu):
    "Lists divide out the scale, and a tensor that is read again replaces its row. Lists are used from the second step."
    buffer = StepBuffer({'weight_grad': ('mean', 'shape')})
    states = [SimpleNamespace(track=SimpleNamespace(name=n), taps={}) for n in 'abc']
    def some(value): return [(st, 'weight_grad', 'grad_0', 'weight', late(torch.full((3,), value+i))) for i,st in enumerate(states)]
    def means():
        snapshot,_ = buffer.take(True)
        with ThreadPoolExecutor(1) as pool: return [(r['key'][0], r['stats']['mean']) for r in pool.submit(snapshot.rows).result()]
    for value in (1., 2.): buffer.measure_together(some(value)) # Two measurements allocate two rows for each
    assert len(means())==6
    for step in range(4):
        buffer.begin_pass(0)
        buffer.measure_together(some(8.), 2., True)
        assert means()==[('a', 4.), ('b', 4.5), ('c', 5.)], step
        buffer.measure_together(some(8.), late(torch.tensor(4.)), True)
        assert means()==[('a', 2.), ('b', 2.25), ('c', 2.5)], step
        buffer.measure_together(some(1.))
        buffer.measure_together(some(20.), replace=True)
        buffer.measure_together(some(30.)[1:2], replace=True)
        assert means()==[('a', 20.), ('c', 22.), ('b', 31.)], step
        for new in (5., 6.): # Each measurement is read before the next
            buffer.measure_together(some(new), replace=True)
            buffer.read_pending()
        assert means()==[('a', 6.), ('b', 7.), ('c', 8.)], step
    fail_on_faults(gpu)


def test_nothing_waits_while_a_graph_is_captured(gpu):
    arena,x = Arena(),mean_of(2)
    if not gpu_kernels(): pytest.skip('without kernels there are no lists')
    t,u = (arena.tap(n, once=True) for n in 'xu')
    for tap in (t, u): observe(x, tap, later=True)
    arena.take()
    assert queue_of(arena, False)(x, t)
    gpu.captures = True
    assert not queue_of(arena, False)(x, u)
    gpu.captures = False
    assert [r[0] for r in rows_of(arena)]==['x']


@pytest.mark.parametrize('what', ['parts', 'ranks'])
def test_where_there_are_several_processes_each_tensor_is_looked_at(gpu, monkeypatch, what):
    "With several processes, each tensor is read separately, and its row describes its shard."
    buffer = StepBuffer({'weight': ('mean',)})
    state = SimpleNamespace(track=SimpleNamespace(name='a', module=None), taps={})
    some = [(state, 'weight', 'weight_0', 'weight', mean_of(2))]
    for _ in range(2):
        buffer.measure_together(some)
        buffer.take(True)
    asked = []
    if what=='ranks': buffer.shards.ranks = SimpleNamespace(columns=lambda module, ttype, x, pname: asked.append((ttype, pname)) or {'placement': 'S(0)'})
    else: buffer.shards.columns['another'] = {}
    looked = buffer.measure
    monkeypatch.setattr(buffer, 'measure', lambda *args, **more: asked.append('looked') or looked(*args, **more))
    buffer.measure_together(some)
    assert asked==(['looked', ('weight', 'weight')] if what=='ranks' else ['looked'])
    assert what=='parts' or [*buffer.shards.columns.values()]==[{'placement': 'S(0)'}]


@pytest.mark.parametrize('on', ['cpu', 'cuda'])
@pytest.mark.parametrize('n', [1, 2, 3, 6])
def test_what_is_forgotten_is_gone_wherever_its_rows_are(gpu, on, n):
    "Discarded rows are gone in all blocks, also rows of lists that were too short."
    arena = Arena(size=3)
    t,other = arena.tap('x'),arena.tap('other')
    def x(value): return torch.full((3,), float(value)) if on=='cpu' else mean_of(value)
    for step in range(2):
        for i in range(n): observe(x(i), t); observe(x(10+i), other)
        if step: arena.forget(t)
        observe(x(9), t)
        assert [r[3]['mean'] for r in rows_of(arena) if r[0]=='x']==([9.] if step else [*range(n), 9.])
    for i in range(2*n): observe(x(10+i), other)
    for i in range(2*n): observe(x(i), t)
    arena.forget(t)
    assert [r[3]['mean'] for r in rows_of(arena)]==[10.+i for i in range(2*n)]
    fail_on_faults(gpu)


def test_what_cannot_be_looked_at_any_more_ends_no_training(gpu, monkeypatch):
    "A gradient that becomes sparse has no strides and raises an error; a tensor subclass has no address. Training continues."
    from torchember.measure import arena
    buffer = StepBuffer({'weight_grad': ('mean',)})
    state = SimpleNamespace(track=SimpleNamespace(name='a'), taps={})
    class Own:
        def __getattr__(self, name): raise ValueError(name)
    def means(x):
        buffer.measure_together([(state, 'weight_grad', 'grad_0', 'weight', x)], replace=True)
        return [r[3]['mean'] for r in rows_of(buffer.rows.arena)]
    assert means(mean_of(2))==means(mean_of(2))==[2.]
    with monkeypatch.context() as m:
        m.setattr(arena.DeviceReadPlan, 'fits', lambda plan, x: failing('no strides'))
        assert means(mean_of(3))==[3.]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        assert means(Own())==[]
    assert 'grad_0 of a could not be measured' in str(said[0].message)


def labelled(net, to, where, steps=12):
    "Train a classifier with labels on a device, and return the facts that the ember noted about its loss."
    opt,te = torch.optim.SGD(net.parameters(), .1),torchEmber(net, home=where, name='run')
    torch.manual_seed(0)
    for i in range(steps):
        y = torch.full((16,), 2) if i==3 else torch.randint(5, (16,))
        y[0] = -100
        loss = nn.functional.cross_entropy(net(to(torch.randn(16, 4))), to(y))
        te.log(loss=loss)
        loss.backward()
        te.step()
        opt.step()
        opt.zero_grad()
    te.close()
    return load_history('run', where).losses


def test_labels_are_counted_without_waiting(gpu, monkeypatch, tmp_path):
    net = nn.Linear(4, 5)
    want = labelled(copy.deepcopy(net), torch.clone, tmp_path/'cpu')
    got = labelled(moved_model(net), late, tmp_path/'gpu')
    fail_on_faults(gpu)
    assert got==want and (got[0]['smallest'], got[0]['largest'], got[0]['batches'], got[0]['single'], got[0]['distinct'])==(0, 4, 12, 1, 5)


def test_labels_of_a_device_that_fails(gpu, monkeypatch, tmp_path):
    from torchember.recorder.losses import Labels
    labels = Labels()
    for _ in range(20): labels.add(late(torch.arange(3)))
    assert len(labels.copies.pending)==16
    labels.copies.read()
    assert len(labels.copies.pending)==16 # No copy has arrived yet
    gpu.failed = True
    labels.copies.read(True)
    assert not labels.copies.pending and labels.facts()=={}
    gpu.failed = False


def test_labels_are_compared_with_the_next_tokens_without_waiting(gpu, tmp_path):
    "A language model on the device has the same facts about its labels as on the CPU."
    def train(to, where):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
        net = net if to is torch.clone else moved_model(net)
        te = torchEmber(net, home=where, name='run')
        for _ in range(6):
            x = torch.randint(20, (4, 9))
            loss = nn.functional.cross_entropy(net(to(x[:, :-1])).flatten(0, 1), to(x[:, 1:].flatten()))
            te.log(loss=loss)
            loss.backward()
            te.step()
        te.close()
        return load_history('run', where).losses
    want,got = train(torch.clone, tmp_path/'cpu'),train(late, tmp_path/'gpu')
    fail_on_faults(gpu)
    assert got==want and (got[0]['next_tokens'], got[0]['lengths'])==(1., [8])
