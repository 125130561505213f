"Tests of CUDA graphs on the simulated device of `late`: rows of replays equal those of the CPU, without waits"
import copy
import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
from late import Graph, Late, Stream, captured, cuda, installed, late, machine, moved_model, over
from tensor_rows import df as rows_of
from torch import nn
from trainings import ALL, data, model, same

from torchember import torchEmber
from torchember.capture.graphs import GraphWatch
from torchember.measure.head import EVENT

flows = 'input', 'output', 'input_grad', 'output_grad'


@pytest.fixture(params=[pytest.param(True, id='kernels'), pytest.param(False, id='operations', marks=pytest.mark.release)])
def gpu(request, monkeypatch):
    before = {n: vars(Graph)[n] for n in ('capture_begin', 'capture_end', 'replay')}
    yield installed(monkeypatch, request.param)
    assert machine().kernels.memory=='of no graph' # The kernels must no longer use the memory of a graph
    assert {n: vars(Graph)[n] for n in before}==before and not GraphWatch.attached
    monkeypatch.undo()
    over()


def fail_on_faults(m):
    for found in (*m.faults, *m.waits): assert not found.ours, found


def sgd(net, **kwargs): return torch.optim.SGD(net.parameters(), lr=.05, momentum=.9, **kwargs)


def loss_of(net, x): return net(x).square().mean()


# ---- trainings on the CPU, and equal trainings with a CUDA graph

def train_eagerly(net, opt, xs, after_step=lambda i: None, passes=1):
    for i,x in enumerate(xs):
        loss_of(net, x).backward()
        if i%passes!=passes-1: continue
        opt.step()
        opt.zero_grad()
        after_step(i)


def with_graph(net, opt, xs, after_step=lambda i: None, passes=1, warm=2, whole=False, stream=None):
    "Train with a CUDA graph: after two eager steps, forward and backward or a whole step are captured."
    train_eagerly(net, opt, map(late, xs[:warm*passes]), after_step, passes)
    x,g = late(xs[0]),torch.cuda.CUDAGraph()
    for p in net.parameters(): p.grad = late(torch.zeros(p.shape)) if passes>1 else None
    with captured(g):
        loss_of(net, x).backward()
        if whole: opt.step()
    for i,new in enumerate(xs[warm*passes:], warm*passes):
        x.copy_(late(new))
        on = stream(i) if stream else None
        if on is not None:
            on.wait_stream(machine().stream())
            with on: g.replay()
            machine().stream().wait_stream(on)
        else: g.replay()
        if i%passes!=passes-1: continue
        if not whole: opt.step()
        if passes>1: opt.zero_grad(set_to_none=False)
        after_step(i)
    return g


def train_on_both(gpu, tmp_path, options, train=with_graph, passes=1, steps=6, **how):
    xs,tables = data(steps*passes),[]
    net = model()
    moved = moved_model(copy.deepcopy(net))
    for m,f in ((net, train_eagerly), (moved, train)):
        opt = sgd(m)
        te = torchEmber(m, opt, home=tmp_path/f.__name__, cuda_graphs=f is not train_eagerly, **options)
        f(m, opt, xs, passes=passes, **(how if f is not train_eagerly else {}))
        te.close()
        tables.append(te.t.df)
    fail_on_faults(gpu)
    for k,v in moved.state_dict().items(): torch.testing.assert_close(v.value, net.state_dict()[k])
    return tables


settings = {'all': dict(ttypes=ALL, stats='numerics'), 'as it comes': {}, 'every third': dict(ttypes=ALL, every=3),
    'clipped': dict(ttypes=('unclipped_grad', 'weight_grad'))}


@pytest.mark.parametrize('gpu', [False], indirect=True, ids=['operations'])
def test_where_operations_take_the_place_of_kernels(gpu, tmp_path):
    want,got = train_on_both(gpu, tmp_path, settings['all'], passes=2)
    same(got, want)


@pytest.mark.parametrize('options', ['all', 'as it comes', 'every third'])
@pytest.mark.parametrize('whole', [False, True], ids=['forward and backward', 'the whole step'])
def test_the_numbers_are_those_of_the_cpu(gpu, tmp_path, options, whole):
    want,got = train_on_both(gpu, tmp_path, settings[options], whole=whole)
    same(got, want)


def test_a_graph_with_more_tensors_than_are_laid_out_at_a_time(gpu, monkeypatch, tmp_path):
    from torchember.measure.graph_rows import GraphRows
    monkeypatch.setattr(GraphRows, 'size', 3)
    want,got = train_on_both(gpu, tmp_path, settings['all'], passes=2)
    same(got, want)


def test_gradients_before_they_are_clipped(gpu, tmp_path):
    def train_with_clipping(net, opt, xs, after_step=None, passes=1):
        for x in xs:
            loss_of(net, x).backward()
            nn.utils.clip_grad_value_(net.parameters(), .01)
            opt.step()
            opt.zero_grad()
    def in_graph(net, opt, xs, passes=1):
        train_with_clipping(net, opt, map(late, xs[:2]))
        x,g = late(xs[0]),torch.cuda.CUDAGraph()
        with captured(g):
            loss_of(net, x).backward()
            nn.utils.clip_grad_value_(net.parameters(), .01)
            opt.step()
        for new in xs[2:]:
            x.copy_(late(new))
            g.replay()
    tables = []
    for f in (train_with_clipping, in_graph):
        net = model() if f is train_with_clipping else moved_model(model())
        opt = sgd(net)
        with torchEmber(net, opt, home=tmp_path/f.__name__, cuda_graphs=True, ttypes=('unclipped_grad', 'weight_grad')) as te: f(net, opt, data(6))
        tables.append(te.t.df)
    fail_on_faults(gpu)
    same(tables[1], tables[0])
    assert set(tables[1]['ttype'])=={'unclipped_grad', 'weight_grad', 'scalar'}


def test_an_optimizer_of_its_own_kind(gpu, tmp_path):
    "Rows of a captured optimizer step equal those of eager steps on the device, digit for digit."
    tables = []
    for f in (train_eagerly, with_graph):
        net,xs = moved_model(model()),data(6)
        opt = torch.optim.AdamW(net.parameters(), lr=.01, capturable=True)
        with torchEmber(net, opt, home=tmp_path/f.__name__, cuda_graphs=True, **settings['all']) as te:
            if f is train_eagerly: train_eagerly(net, opt, map(late, xs))
            else: with_graph(net, opt, xs, whole=True)
        tables.append(te.t.df)
    fail_on_faults(gpu)
    same(tables[1], tables[0], 0)


@pytest.mark.parametrize('passes', [2, 3])
def test_several_replays_in_a_step(gpu, tmp_path, passes):
    "Numbers of an earlier replay in the step are kept, and merged with those of the next replay."
    want,got = train_on_both(gpu, tmp_path, settings['all'], passes=passes)
    same(got, want)


@pytest.mark.parametrize('passes', [1, 2])
def test_replayed_on_another_stream_each_time(gpu, tmp_path, passes):
    streams = []
    def stream(i):
        streams.append(Stream(cuda()))
        return streams[-1]
    want,got = train_on_both(gpu, tmp_path, settings['all'], passes=passes, stream=stream)
    same(got, want)
    assert len(streams)==4*passes


def test_rows_that_somebody_copies_on_another_stream(gpu, tmp_path):
    "The replaying stream has waited for the last replay, but not for the stream that copies the rows."
    net,xs = moved_model(model()),[late(x) for x in data(4)]
    side,where = [Stream(cuda()) for _ in range(4)],[]
    with torchEmber(net, home=tmp_path, ttypes='output', cuda_graphs=True) as te, torch.no_grad():
        net(xs[0])
        x,g = late(data()[0]),torch.cuda.CUDAGraph()
        with captured(g): net(x)
        begun = torch.Event()
        begun.record()
        for i,s in enumerate(side):
            s.wait_event(begun)
            with s:
                x.copy_(xs[i])
                g.replay()
                begun = torch.Event()
                begun.record()
            te.recorder.flush()
            where.append(te.recorder.buffer.rows.arena.blocks[-1].stream)
    fail_on_faults(gpu)
    assert where==side and te.t.df['step'].nunique()==5


def test_rows_that_were_set_aside_are_copied_on_another_stream(gpu, tmp_path):
    "Rows are copied on a separate stream, for which no stream waits. The stream of each step has waited for the step before."
    net,xs,streams = moved_model(model()),[late(x) for x in data(8)],[Stream(cuda()) for _ in range(4)]
    with torchEmber(net, home=tmp_path, ttypes='output', cuda_graphs=True, ends='step') as te, torch.no_grad():
        net(xs[0])
        te.step()
        x,g,before = late(data()[0]),torch.cuda.CUDAGraph(),torch.Event()
        with captured(g): net(x)
        before.record()
        for i,s in enumerate(streams):
            s.wait_event(before)
            with s:
                for new in xs[2*i:2*i+2]:
                    x.copy_(new)
                    g.replay()
                before = torch.Event()
                before.record()
            te.step()
    fail_on_faults(gpu)
    assert te.t.df.groupby('step').size().tolist()==[6]*5


def test_passes_that_are_not_for_the_log(gpu, tmp_path):
    "A replay in `eval()` mode writes into the same rows, but these rows are not recorded."
    tables = []
    for moved in (False, True):
        net,to = (moved_model(model()),late) if moved else (model(),torch.clone)
        with torchEmber(net, home=tmp_path/str(moved), ttypes='output', cuda_graphs=True, only_training=True, ends='step') as te:
            x = to(data()[0])
            net(x)
            te.step()
            if moved:
                g = torch.cuda.CUDAGraph()
                with captured(g): net(x)
            for i,new in enumerate(data()[1:]):
                net.train(i!=1)
                x.copy_(to(new))
                g.replay() if moved else net(x)
            te.step()
        tables.append(te.t.df)
    fail_on_faults(gpu)
    same(tables[1], tables[0])
    assert tables[0].groupby('step').size().tolist()==[6, 6]


def test_an_eager_pass_on_the_stream_of_the_capture(gpu, tmp_path):
    "An eager pass gets rows of its own, because each replay overwrites the rows of the graph."
    tables = []
    for moved in (False, True):
        net,to = (moved_model(model()),late) if moved else (model(),torch.clone)
        with torchEmber(net, home=tmp_path/str(moved), ttypes='output', cuda_graphs=True, ends='step') as te, torch.no_grad():
            x = to(data()[0])
            net(x)
            te.step()
            if moved:
                g = torch.cuda.CUDAGraph()
                with (capture := captured(g)): net(x)
            for i,new in enumerate(data()):
                x.copy_(to(new))
                if not moved or i==3: net(x)
                elif i%2==0: g.replay()
                else:
                    capture.side.wait_stream(machine().stream())
                    with capture.side: net(x)
                    machine().stream().wait_stream(capture.side)
            te.step()
            if moved: del g, capture.graph
            gc.collect()
            for _ in range(3): # The rows of the eager pass still exist after the graph is deleted
                with capture.side if moved else torch.no_grad(): net(x)
                te.step()
        tables.append(te.t.df)
    fail_on_faults(gpu)
    same(tables[1], tables[0])


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.act,self.b = nn.Linear(5, 6),nn.ReLU(inplace=True),nn.Linear(6, 2)
    def forward(self, x): return self.b(self.act(self.a(x)))


def test_what_is_seen_twice_in_a_graph(gpu, tmp_path):
    "A tensor that occurs twice in a graph is read once, unless it was changed or more statistics are requested."
    tables,nodes = [],[]
    for moved,full in ((False, True), (True, True), (True, False)):
        net,to = (moved_model(InPlace()),late) if moved else (InPlace(),torch.clone)
        with torchEmber(net, home=tmp_path/f'{moved}{full}', ttypes=('input', 'output'), cuda_graphs=True) as te, torch.no_grad():
            if full: te.how_record('input')('full')
            x = to(data()[0])
            net(x)
            if moved:
                g = torch.cuda.CUDAGraph()
                with captured(g): net(x)
                nodes.append(g.nodes)
            for new in data()[1:]:
                x.copy_(to(new))
                g.replay() if moved else net(x)
        tables.append(te.t.df)
    fail_on_faults(gpu)
    same(tables[1], tables[0])
    assert nodes[1]<nodes[0]


@pytest.mark.parametrize('passes', [1, 2])
def test_nothing_grows(gpu, tmp_path, passes):
    "Each step launches the same number of operations, and uses no more memory."
    seen,blocks = [],[]
    net = moved_model(model())
    with torchEmber(net, sgd(net), home=tmp_path, cuda_graphs=True, ttypes=ALL) as te:
        def after_step(i):
            seen.append(gpu.launches)
            blocks.append(len(te.recorder.buffer.rows.arena.blocks))
        with_graph(net, te.recorder.watch.optimizers[0], data(8*passes), after_step, passes)
    assert len(set(np.diff(seen[3:])))==1 and len(set(blocks[3:]))==1, (seen, blocks)


def test_without_the_option_nothing_of_ours_is_in_the_graph(gpu, tmp_path):
    nodes = []
    for armed in (None, False, True):
        net = moved_model(model())
        opt = sgd(net)
        te = None if armed is None else torchEmber(net, opt, home=tmp_path, cuda_graphs=armed)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            nodes.append(with_graph(net, opt, data(4)).nodes)
        if te: te.close()
        assert sum('graph is being captured' in str(w.message) for w in said)==(armed is False)
    assert nodes[0]==nodes[1]<nodes[2]


def test_nothing_is_asked_of_a_device_while_a_graph_is_captured(gpu, tmp_path):
    "During a capture, even the writer thread does not query the device, because all rows are written before."
    for i,armed in enumerate((False, True)):
        net = moved_model(model())
        with torchEmber(net, home=tmp_path/str(armed), cuda_graphs=armed) as te, torch.no_grad():
            for _ in range(3): net(late(data()[0]))
            te.recorder.flush()
            g = torch.cuda.CUDAGraph()
            with captured(g):
                assert not te.t.file.batches
                with warnings.catch_warnings():
                    warnings.simplefilter('ignore')
                    if not i: net(late(data()[0]))
                te.t.file.drain()
    assert not [f for f in gpu.faults if 'while a graph is captured' in f]


def test_steps_that_passes_end(gpu, tmp_path):
    "Without an optimizer, each replay is a step with its own rows."
    net,moved,xs = model(),moved_model(model()),data(5)
    with torchEmber(net, home=tmp_path/'cpu', ttypes=flows) as want:
        for x in xs: loss_of(net, x).backward()
    with torchEmber(moved, home=tmp_path/'gpu', ttypes=flows, cuda_graphs=True) as got:
        loss_of(moved, late(xs[0])).backward()
        x,g = late(xs[0]),torch.cuda.CUDAGraph()
        with captured(g): loss_of(moved, x).backward()
        for new in xs[1:]:
            x.copy_(late(new))
            g.replay()
        # No rows were copied to other blocks
        assert not [b for b in got.recorder.buffer.rows.arena.blocks if b.key is None and b.graph is None]
    fail_on_faults(gpu)
    same(got.t.df, want.t.df)


def test_a_graph_of_two_passes(gpu, tmp_path):
    net,moved,xs = model(),moved_model(model()),data(6)
    with torchEmber(net, home=tmp_path/'cpu', ttypes=flows) as want:
        for x in xs: loss_of(net, x).backward()
    with torchEmber(moved, home=tmp_path/'gpu', ttypes=flows, cuda_graphs=True) as got:
        for x in xs[:2]: loss_of(moved, late(x)).backward()
        a,b,g = late(xs[0]),late(xs[0]),torch.cuda.CUDAGraph()
        with captured(g):
            for x in (a, b): loss_of(moved, x).backward()
        for i in (2, 4):
            for x,new in ((a, xs[i]), (b, xs[i+1])): x.copy_(late(new))
            g.replay()
    fail_on_faults(gpu)
    same(got.t.df, want.t.df)


def test_graphs_in_turns_and_passes_between(gpu, tmp_path):
    "Two graphs for two shapes are replayed in turn, with an eager pass in each third step."
    net,moved = model(),moved_model(model())
    sizes = [4, 7, 4, 2, 7, 4, 2, 7]
    g = torch.Generator().manual_seed(3)
    xs = [torch.randn(n, 5, generator=g) for n in sizes]
    with torchEmber(net, sgd(net), home=tmp_path/'cpu', ttypes=ALL) as want: train_eagerly(net, want.recorder.watch.optimizers[0], xs)
    with torchEmber(moved, sgd(moved), home=tmp_path/'gpu', ttypes=ALL, cuda_graphs=True) as got:
        opt,graphs = got.recorder.watch.optimizers[0],{}
        train_eagerly(moved, opt, [late(xs[0])])
        for n in (4, 7):
            x,graph = late(torch.zeros(n, 5)),torch.cuda.CUDAGraph()
            opt.zero_grad()
            with captured(graph): loss_of(moved, x).backward()
            graphs[n] = x,graph,[p.grad for p in moved.parameters()]
        for x in xs[1:]:
            opt.zero_grad()
            if len(x) in graphs:
                its,graph,grads = graphs[len(x)]
                for p,d in zip(moved.parameters(), grads, strict=True): p.grad = d
                its.copy_(late(x))
                graph.replay()
            else: loss_of(moved, late(x)).backward()
            opt.step()
    fail_on_faults(gpu)
    same(got.t.df, want.t.df)


def test_forward_and_backward_in_two_graphs(gpu, tmp_path):
    "Two graphs as in torch.cuda.make_graphed_callables: the second graph computes the gradients."
    net,moved,xs = model(),moved_model(model()),data(5)
    with torchEmber(net, sgd(net), home=tmp_path/'cpu', ttypes=ALL) as want: train_eagerly(net, want.recorder.watch.optimizers[0], xs)
    with torchEmber(moved, sgd(moved), home=tmp_path/'gpu', ttypes=ALL, cuda_graphs=True) as got:
        opt = got.recorder.watch.optimizers[0]
        train_eagerly(moved, opt, [late(xs[0])])
        x,forward,backward = late(xs[0]),torch.cuda.CUDAGraph(),torch.cuda.CUDAGraph()
        with captured(forward): y = moved(x)
        dy = late(torch.zeros(y.shape))
        with captured(backward): grads = torch.autograd.grad([y], list(moved.parameters()), [dy])
        for new in xs[1:]:
            x.copy_(late(new))
            forward.replay()
            dy.copy_(y.detach()*2/y.numel())
            backward.replay()
            for p,d in zip(moved.parameters(), grads, strict=True): p.grad = d
            opt.step()
    fail_on_faults(gpu)
    same(got.t.df, want.t.df)


class ReplaysSubmodule(nn.Module):
    "A model with a submodule that is replayed twice in a pass, and a probe of its input"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.part,self.b = nn.Linear(5, 6),nn.Sequential(nn.Linear(6, 6), nn.Tanh()),nn.Linear(6, 2)
        self.replays = None

    def forward(self, x):
        x = self.a(x)
        for _ in range(2): x = self.part(x) if self.replays is None else self.replays(x)
        return self.b(x)


def test_a_part_that_is_replayed_in_a_pass(gpu, tmp_path):
    net,moved,xs = ReplaysSubmodule(),moved_model(ReplaysSubmodule()),data(4)
    ttypes = 'input', 'output', 'weight'
    with torchEmber(net, home=tmp_path/'cpu', ttypes=ttypes) as want, torch.no_grad():
        for x in xs: net(x)
    with torchEmber(moved, home=tmp_path/'gpu', ttypes=ttypes, cuda_graphs=True) as got, torch.no_grad():
        moved(late(xs[0]))
        x,g = late(torch.zeros(4, 6)),torch.cuda.CUDAGraph()
        with captured(g): y = moved.part(x)
        def replays(new):
            x.copy_(new)
            g.replay()
            return y.clone()
        moved.replays = replays
        for new in xs[1:]: moved(late(new))
    fail_on_faults(gpu)
    key = ['step', 'module', 'ttype', 'tname', 'pname', 'call']
    a,b = (t.t.df.sort_values(key).reset_index(drop=True) for t in (got, want))
    same(a, b)


class ReplaysTwice(nn.Module):
    "A replay writes its output into the same tensor without a new version, so the model calls a replay twice"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.part,self.b,self.c = nn.Sequential(nn.Linear(5, 5), nn.Tanh()),nn.Linear(5, 5),nn.Linear(5, 2)
        self.replays = None

    def part_of(self, x): return self.part(x) if self.replays is None else self.replays(x)
    def forward(self, x): return self.c(self.part_of(self.b(self.part_of(x))))


def test_what_a_replay_has_written_is_read_anew(gpu, tmp_path):
    net,moved,xs = ReplaysTwice(),moved_model(ReplaysTwice()),data(4)
    with torchEmber(net, home=tmp_path/'cpu', ttypes='input') as want, torch.no_grad():
        for x in xs: net(x)
    with torchEmber(moved, home=tmp_path/'gpu', ttypes='input', cuda_graphs=True) as got, torch.no_grad():
        moved(late(xs[0]))
        x,g = late(torch.zeros(4, 5)),torch.cuda.CUDAGraph()
        with captured(g): y = moved.part(x)
        def replays(new):
            x.copy_(new)
            g.replay()
            return y
        moved.replays = replays
        for new in xs[1:]: moved(late(new))
    fail_on_faults(gpu)
    same(got.t.df, want.t.df)


def test_leaves_that_were_captured_and_are_used_again(gpu, tmp_path):
    "A gradient hook of one capture reports nothing in another capture or in an eager backward."
    net,moved,xs = model(),moved_model(model()),data(5)
    with torchEmber(net, home=tmp_path/'cpu', ttypes=flows) as want:
        for x in xs: loss_of(net, x.requires_grad_()).backward()
    with warnings.catch_warnings(), torchEmber(moved, home=tmp_path/'gpu', ttypes=flows, cuda_graphs=True) as got:
        warnings.simplefilter('error')
        x = late(xs[0]).requires_grad_()
        loss_of(moved, x).backward()
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        for g in graphs:
            with captured(g): loss_of(moved, x).backward()
        # Two hooks on x, as input of the model and as input of its first layer
        assert len(got.recorder.model.graphs.gradients.handles)==2
        for new,g in zip(xs[1:], (*graphs, None, graphs[1]), strict=True):
            with torch.no_grad(): x.copy_(late(new))
            g.replay() if g is not None else loss_of(moved, x).backward()
    fail_on_faults(gpu)
    same(got.t.df, want.t.df)


def test_two_passes_on_one_leaf(gpu, tmp_path):
    "Two passes use one leaf tensor, and one backward goes through both passes."
    net,moved,xs,how = model(),moved_model(model()),data(3),dict(ttypes=flows, ends='step')
    def back(net, x): (loss_of(net, x)+loss_of(net, x)*2).backward()
    with torchEmber(net, home=tmp_path/'cpu', **how) as want:
        for x in xs:
            back(net, x.requires_grad_())
            want.step()
    with torchEmber(moved, home=tmp_path/'gpu', cuda_graphs=True, **how) as got:
        x = late(xs[0]).requires_grad_()
        back(moved, x)
        got.step()
        with captured(g := torch.cuda.CUDAGraph()): back(moved, x)
        for new in xs[1:]:
            with torch.no_grad(): x.copy_(late(new))
            g.replay()
            got.step()
    fail_on_faults(gpu)
    same(got.t.df, want.t.df)


class CallsLayerTwice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b = nn.Linear(5, 5),nn.Linear(5, 2)
    def forward(self, x): return self.b(self.a(self.a(x).tanh()))


def test_a_layer_that_is_called_twice(gpu, tmp_path):
    net,moved,xs = CallsLayerTwice(),moved_model(CallsLayerTwice()),data(5)
    with torchEmber(net, sgd(net), home=tmp_path/'cpu', ttypes=ALL) as want: train_eagerly(net, want.recorder.watch.optimizers[0], xs)
    with torchEmber(moved, sgd(moved), home=tmp_path/'gpu', ttypes=ALL, cuda_graphs=True) as got:
        with_graph(moved, got.recorder.watch.optimizers[0], xs)
    fail_on_faults(gpu)
    same(got.t.df, want.t.df)
    assert set(got.t.df.loc[got.t.df['ttype']=='output_grad', 'call'])=={0, 1}


@pytest.mark.parametrize('mode', [True, False], ids=['train()', 'eval()'])
def test_an_evaluation_in_a_graph(gpu, tmp_path, mode):
    "An evaluation is recognized in a graph, also if the model trains in `eval()` mode: then it has no gradients."
    tables = []
    for moved in (False, True):
        net,to = (moved_model(model()),late) if moved else (model(),torch.clone)
        opt = sgd(net)
        with torchEmber(net, opt, home=tmp_path/str(moved), ttypes=('output', 'weight'), cuda_graphs=True) as te:
            for i,new in enumerate(data(5)):
                net.train(mode)
                loss_of(net, to(new)).backward()
                opt.step()
                opt.zero_grad()
                net.eval()
                with torch.no_grad():
                    if not moved or i==0: net(to(new))
                    if moved and i==0:
                        x,g = to(new),torch.cuda.CUDAGraph()
                        with captured(g): net(x)
                    elif moved:
                        x.copy_(to(new))
                        g.replay()
        tables.append(te.t.df)
    fail_on_faults(gpu)
    same(tables[1], tables[0])
    assert (tables[1]['phase']=='eval').any()


def test_gradients_that_are_clipped_twice_in_a_step(gpu, tmp_path):
    "If gradients are clipped twice in a step, eager and in a graph, the last clipping counts."
    tables = []
    for moved in (False, True):
        net,to = (moved_model(model()),late) if moved else (model(),torch.clone)
        def back(x, net=net):
            loss_of(net, x).backward()
            nn.utils.clip_grad_value_(net.parameters(), .01)
        with torchEmber(net, home=tmp_path/str(moved), ttypes='unclipped_grad', cuda_graphs=True, ends='step') as te:
            for p in net.parameters(): p.grad = to(torch.zeros(p.shape))
            for i,new in enumerate(data(6)):
                if i==2 and moved:
                    x,g = to(new),torch.cuda.CUDAGraph()
                    with captured(g): back(x)
                if i%2==0 or i<3 or not moved: back(to(new))
                else:
                    x.copy_(to(new))
                    g.replay()
                if i%2: te.step()
        tables.append(te.t.df)
    fail_on_faults(gpu)
    same(tables[1], tables[0])


def test_probes_and_the_order_of_calls(gpu, tmp_path):
    orders,tables = [],[]
    for moved in (False, True):
        net,to = (moved_model(model()),late) if moved else (model(),torch.clone)
        with torchEmber(net, home=tmp_path/str(moved), ttypes=('output',), cuda_graphs=True) as te, torch.no_grad():
            net.act.register_forward_hook(lambda m, args, out, te=te: te.probe('twice', out*2) is None or None)
            x = to(data()[0])
            net(x)
            if moved:
                g = torch.cuda.CUDAGraph()
                with captured(g): net(x)
            x.copy_(to(data()[1]))
            if moved: g.replay()
            else: net(x)
            orders.append([*te.recorder.calls.log])
        tables.append(te.t.df)
    fail_on_faults(gpu)
    same(tables[1], tables[0])
    assert orders[0]==orders[1] and len(orders[0])==12 and (tables[1]['ttype']=='probe').sum()==2


class CatchesError(nn.Module):
    "A model that catches the error of one layer, and then calls another layer"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.fails,self.b = nn.Linear(5, 5),nn.Sequential(nn.Linear(5, 5), nn.Unflatten(1, (2, 2))),nn.Linear(5, 2)
    def forward(self, x):
        x = self.a(x)
        try: self.fails(x)
        except RuntimeError: pass
        return self.b(x)


def test_a_layer_that_fails_in_a_graph(gpu, tmp_path):
    "After the caught error of a layer, later and outer calls have the right rows and call numbers."
    net,moved,xs = CatchesError(),moved_model(CatchesError()),data(5)
    with torchEmber(net, sgd(net), home=tmp_path/'cpu', ttypes=ALL) as want: train_eagerly(net, want.recorder.watch.optimizers[0], xs)
    with torchEmber(moved, sgd(moved), home=tmp_path/'gpu', ttypes=ALL, cuda_graphs=True) as got:
        g = with_graph(moved, got.recorder.watch.optimizers[0], xs)
        assert [e[0] for e in got.recorder.model.graphs.tapes[g].events].count('call_fails')==2
    fail_on_faults(gpu)
    same(got.t.df, want.t.df)
    assert got.recorder.calls.log==want.recorder.calls.log


class OpaqueArgument(dict):
    "An argument of a layer in which torchember cannot find tensors"
    def items(self): raise OSError('no such thing')


def test_what_cannot_be_looked_through_in_a_graph(gpu, tmp_path):
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.a,self.odd = nn.Linear(5, 2),False
        def forward(self, x, more): return self.a(x)
    net,xs = moved_model(Net()),data(3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with torchEmber(net, home=tmp_path, cuda_graphs=True) as te, torch.no_grad():
            x = late(xs[0])
            net(x, {})
            g = torch.cuda.CUDAGraph()
            with captured(g): net(x, OpaqueArgument())
            g.replay()
    fail_on_faults(gpu)
    assert len(warned(said, 'no such thing'))==1
    assert (te.t.df['ttype']=='output').sum()==4


# ---- loss scaling

@pytest.mark.parametrize('stats', ['basic', 'numerics'])
def test_a_scale_that_changes(gpu, tmp_path, stats):
    "A loss scale that changes is read in the graph at each replay."
    class Scaler(torch.amp.GradScaler):
        def step(self, optimizer, *args, **kwargs):
            for p in net.parameters(): p.grad /= self._scale
            return optimizer.step()
    net,xs = moved_model(model()),data(5)
    opt,scaler = sgd(net),Scaler('cpu', init_scale=8.)
    scaler._scale = late(torch.tensor(8.))
    def back(x): (loss_of(net, x)*scaler._scale).backward()
    with torchEmber(net, opt, home=tmp_path/'gpu', ttypes=ALL, stats=stats, cuda_graphs=True, scaler=scaler) as got:
        back(late(xs[0]))
        scaler.step(opt)
        opt.zero_grad()
        x,g = late(xs[0]),torch.cuda.CUDAGraph()
        with captured(g): back(x)
        for i,new in enumerate(xs[1:]):
            scaler._scale.fill_(1.5**i)
            x.copy_(late(new))
            g.replay()
            scaler.step(opt)
    net = model()
    with torchEmber(net, sgd(net), home=tmp_path/'cpu', ttypes=ALL, stats=stats) as want: train_eagerly(net, want.recorder.watch.optimizers[0], xs)
    for f in gpu.faults: assert not f.ours, f
    same(got.t.df[lambda d: d['ttype']=='output_grad'].reset_index(drop=True), want.t.df[lambda d: d['ttype']=='output_grad'].reset_index(drop=True))


# ---- failures and limits

def warned(said, words): return [str(w.message) for w in said if words in str(w.message)]


def test_a_function_of_the_users(gpu, tmp_path):
    net = moved_model(model())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with torchEmber(net, sgd(net), home=tmp_path, cuda_graphs=True) as te:
            te.how_record_out(lambda x: {'n': x.numel()})
            with_graph(net, te.recorder.watch.optimizers[0], data(5))
    fail_on_faults(gpu)
    assert len(warned(said, 'no Python runs in a CUDA graph'))==1
    # Both eager steps warn, because random state of the simulated device cannot be saved
    assert len(warned(said, 'measured'))==2
    df = te.t.df
    assert df[df['ttype']=='output']['step'].unique().tolist()==[0, 1] and df[df['ttype']=='input']['step'].unique().tolist()==[0, 1, 2, 3, 4]


def test_statistics_that_are_changed_after_the_capture(gpu, tmp_path):
    net,xs = moved_model(model()),data(5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with torchEmber(net, sgd(net), home=tmp_path, cuda_graphs=True) as te:
            def after_step(i):
                if i==2: te.how_record('output')('full')
            with_graph(net, te.recorder.watch.optimizers[0], xs, after_step)
    assert len(warned(said, 'Capture the graph again'))==1
    df = te.t.df
    assert df[df['ttype']=='output']['step'].unique().tolist()==[0, 1, 2] and df[df['ttype']=='input']['step'].nunique()==5


def test_a_capture_without_a_step_before(gpu, tmp_path):
    "A check that runs once per process would break a capture, so it must run before."
    net = moved_model(model())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with torchEmber(net, sgd(net), home=tmp_path, cuda_graphs=True) as te: with_graph(net, te.recorder.watch.optimizers[0], data(4), warm=0)
    assert len(warned(said, 'warm-up'))==1
    # Weights and gradients are read at the end of a step, so only these rows exist
    assert set(rows_of(te)['ttype'])=={'weight', 'weight_grad', 'finding'}


def test_statistics_that_are_new_in_a_capture(gpu, tmp_path):
    "A check that runs once for new statistics would break a capture, also if such tensors were measured before."
    net,xs = moved_model(model()),data(5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with torchEmber(net, sgd(net), home=tmp_path, ttypes=('input', 'output'), cuda_graphs=True) as te:
            def after_step(i):
                if i==1: te.how_record('output')('numerics')
            with_graph(net, te.recorder.watch.optimizers[0], xs, after_step)
    assert len(warned(said, 'warm-up'))==1
    df = te.t.df
    assert df[df['ttype']=='output']['step'].unique().tolist()==[0, 1] and df[df['ttype']=='input']['step'].unique().tolist()==[0, 1, 2, 3, 4]
    fail_on_faults(gpu)


def test_a_graph_that_begins_while_another_is_taped(gpu, tmp_path):
    "If a second graph is captured, such as in another thread, recording of the first continues, and the second is not recorded."
    net,xs = moved_model(model()),data(4)
    with torchEmber(net, sgd(net), home=tmp_path, cuda_graphs=True) as te:
        opt,graphs = te.recorder.watch.optimizers[0],te.recorder.model.graphs
        train_eagerly(net, opt, [late(xs[0])])
        x,g,other = late(xs[1]),torch.cuda.CUDAGraph(),torch.cuda.CUDAGraph()
        with captured(g):
            tape = graphs.tape
            graphs.graph_begins(other)
            assert graphs.tape is tape
            loss_of(net, x).backward()
            graphs.graph_ends(other, True)
            assert graphs.tape is tape
        assert list(graphs.tapes)==[g]
        g.replay()
        opt.step()
    fail_on_faults(gpu)
    sizes = rows_of(te).groupby('step').size()
    assert sizes.nunique()==1 and len(sizes)==2


def test_a_tape_is_told_as_it_was_heard():
    "A replay repeats each event with its own arguments. A call whose begin was not recorded has no events."
    from torchember.recorder.graphs import Call, Player
    class EventListener:
        on,recorded = True,True
        def __init__(self): self.heard = []
        def __getattr__(self, what): return lambda *args: (self.heard.append((what, *args)), (7, 'eval'))[1]
        def records(self): return self.recorded
        def pass_begins(self, *args): self.heard.append(('pass_begins', *args)); return True
    class State: watched = True
    class Optimizer: pass
    st,opt = State(),Optimizer()
    def tape(call):
        return [('pass_begins', st, True), ('call_begins', call, ['in']), ('call_ends', call, ['out']), ('returned', call, ['sum']), ('call_fails', call),
            ('gradient', st, 'output_grad', 'grad_0', 'g', call, 1), ('gradient', st, 'input_grad', 'grad_1', 'h', 3, 0), ('probe', st, 'name', 'p'),
            ('pass_ends', st), ('step_begins', opt), ('gradients_ready', opt, 2.), ('step_ends', opt, None), ('step_ends', opt, torch.tensor(0.)),
            ('step_ends', opt, torch.tensor(1.))]
    beside = [('gradient', st, 'input_grad', 'grad_1', 'h', 3, None, 0), ('probe', st, 'name', 'p'), ('pass_ends', st, False)]
    its = [('call_begins', st, ['in']), ('call_ends', st, ['out']), ('returned', st, ['sum'], 7, 'eval'), ('call_fails', st),
        ('gradient', st, 'output_grad', 'grad_0', 'g', 7, 'eval', 1)]
    for recorded in (True, False):
        events,of_optimizers = EventListener(),EventListener()
        events.recorded = recorded
        Player(events, of_optimizers).play(tape(Call(st)))
        assert events.heard==[('pass_begins', st, True), *(its if recorded else []), *beside]
        assert of_optimizers.heard==[('step_begins', opt), ('gradients_ready', opt, 2., False), ('step_ends', opt), ('step_ends', opt), ('step_skipped', opt)]


def test_a_capture_that_fails(gpu, tmp_path):
    net,xs = moved_model(model()),data(4)
    with torchEmber(net, sgd(net), home=tmp_path, cuda_graphs=True) as te:
        opt = te.recorder.watch.optimizers[0]
        train_eagerly(net, opt, [late(xs[0])])
        g,x = torch.cuda.CUDAGraph(),late(xs[1])
        with pytest.raises(RuntimeError, match='during capture'), captured(g): net(x).sum().item()
        assert net._torchember.states[0].listener is te.recorder.events and g not in te.recorder.model.graphs.tapes
        train_eagerly(net, opt, [late(xs[2])])
        with captured(g): loss_of(net, x).backward()
        g.replay()
        opt.step()
    counts = rows_of(te).groupby('step')['ttype'].value_counts().unstack()
    assert len(counts)==3 and len(counts.drop_duplicates())==1


@pytest.mark.parametrize('whole', [False, True], ids=['forward and backward', 'the whole step'])
def test_a_replay_that_raises(gpu, monkeypatch, tmp_path, whole):
    "A replay that raises has no rows, and its optimizer step does not count. The next replay is recorded as usual."
    net,xs = moved_model(model()),data(5)
    with torchEmber(net, sgd(net), home=tmp_path, ttypes=(*flows, 'weight_grad'), cuda_graphs=True) as te:
        opt = te.recorder.watch.optimizers[0]
        g = with_graph(net, opt, xs[:3], whole=whole)
        runs,g.runs = g.runs,[lambda: 1/0]
        with pytest.raises(ZeroDivisionError): g.replay()
        assert not any(b.head[:, EVENT].any() for b in te.recorder.model.graphs.tapes[g].rows.blocks)
        assert te.recorder.step==3
        g.runs = runs
        g.replay()
        if not whole: opt.step()
    fail_on_faults(gpu)
    counts = rows_of(te).groupby(['step', 'ttype']).size().unstack()
    assert list(counts.index)==[0, 1, 2, 3] and (counts==counts.iloc[0]).all(axis=None)


def test_a_graph_that_ends_while_another_is_taped(gpu, tmp_path):
    net,x = moved_model(model()),late(data()[0])
    with torchEmber(net, home=tmp_path, ttypes='output', cuda_graphs=True) as te, torch.no_grad():
        net(x)
        graphs,g = te.recorder.model.graphs,torch.cuda.CUDAGraph()
        with captured(g):
            graphs.graph_ends(torch.cuda.CUDAGraph(), True) # Another thread ends the capture of another graph
            net(x)
        g.replay()
    assert len(te.t.df)==12


def test_an_ember_that_nobody_has_any_more(gpu, tmp_path):
    "If an ember is garbage without `close`, a new ember is notified once of each replay."
    lost = torchEmber(moved_model(model()), home=tmp_path/'lost', cuda_graphs=True)
    lost.recorder.model.graphs.watch.attached.clear() # Simulates garbage collection
    lost.close()
    net,x = moved_model(model()),late(data()[0])
    with torchEmber(net, home=tmp_path, ttypes='output', cuda_graphs=True) as te, torch.no_grad():
        net(x)
        with captured(g := torch.cuda.CUDAGraph()): net(x)
        for _ in range(2): g.replay()
    assert te.t.df.groupby('step').size().tolist()==[6]*3


class DictModel(nn.Module):
    "A model with several inputs and outputs, in bfloat16"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed,self.head = nn.Embedding(9, 6, dtype=torch.bfloat16),nn.Linear(6, 9, dtype=torch.bfloat16)
    def forward(self, ids, *, scale):
        h = self.embed(ids)*scale['by']
        return {'hidden': h, 'logits': [self.head(h), None]}


def test_a_model_that_returns_a_dict(gpu, tmp_path):
    tables = []
    ids = [torch.randint(9, (2, 3), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    for moved in (False, True):
        net,to = (moved_model(DictModel()),late) if moved else (DictModel(),torch.clone)
        opt = sgd(net)
        def back(x, by, net=net): net(x, scale={'by': by})['logits'][0].float().square().mean().backward()
        with torchEmber(net, opt, home=tmp_path/str(moved), ttypes=('input', 'output', 'output_grad', 'weight'), cuda_graphs=True) as te:
            x,by = to(ids[0]),to(torch.tensor(2., dtype=torch.bfloat16))
            for i,new in enumerate(ids):
                x.copy_(to(new))
                if moved and i==1:
                    with captured(g := torch.cuda.CUDAGraph()): back(x, by)
                if moved and i: g.replay()
                else: back(x, by)
                opt.step()
                if not moved or not i: opt.zero_grad()
        tables.append(te.t.df)
    fail_on_faults(gpu)
    same(tables[1], tables[0], .02)
    assert {'scale.by', 'output_hidden', 'output_logits.0'}<=set(tables[1]['tname'])


def test_compiled_code_is_taped_as_it_is_without_a_compiler(monkeypatch, tmp_path):
    "In a capture, compiled code has the same calls, order and gradients as eager code. Runs on the CPU, without reading tensors."
    monkeypatch.setattr(torch.cuda, 'CUDAGraph', type('Graph', (), {n: lambda self: None for n in ('capture_begin', 'capture_end', 'replay')}))
    from torchember.measure import devices
    monkeypatch.setattr(devices, 'chosen_device', lambda: torch.device('cpu'))
    told = []
    for compiled in (False, True):
        torch._dynamo.reset()
        net,x = model(),data()[0]
        run = torch.compile(net, backend='aot_eager') if compiled else net
        with warnings.catch_warnings(), torchEmber(net, home=tmp_path/str(compiled), ttypes=flows, cuda_graphs=True) as te:
            warnings.simplefilter('ignore')
            loss_of(run, x).backward()
            g = torch.cuda.CUDAGraph()
            g.capture_begin()
            loss_of(run, x).backward()
            g.capture_end()
            events = te.recorder.model.graphs.tapes[g].events
            where = lambda o: getattr(getattr(o, 'state', o), 'track', None)
            told.append([(what, where(a).path if where(a) else a) for what,a,*_ in events])
    torch._dynamo.reset()
    passes,gradients = ([[t for t in some if (t[0]=='gradient') is yes] for some in told] for yes in (False, True))
    assert passes[1]==passes[0] and len(passes[0])==14
    # The order of hooks on a tensor that two modules share may differ
    assert sorted(gradients[1])==sorted(gradients[0]) and len(gradients[0])>=10


def test_a_model_that_is_armed_again(gpu, tmp_path):
    net,xs = moved_model(model()),data(4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with torchEmber(net, home=tmp_path, ttypes='output', cuda_graphs=True) as te, torch.no_grad():
            net(late(xs[0]))
            g,x = torch.cuda.CUDAGraph(),late(xs[1])
            with captured(g): net(x)
            te.disarm()
            g.replay()
            te.arm()
            for _ in range(2): g.replay()
            net(x)
    assert len(warned(said, 'captured before recording of the model began again'))==1
    d = te.t.df
    assert d['step'].unique().tolist()==[0, 1] and d['ttype'].value_counts().to_dict()=={'output': 12, 'finding': 1}


def test_disarmed_in_the_middle_of_a_capture(gpu, tmp_path):
    net,x = moved_model(model()),late(data()[0])
    te = torchEmber(net, home=tmp_path, ttypes='output', cuda_graphs=True)
    with torch.no_grad():
        net(x)
        g = torch.cuda.CUDAGraph()
        with captured(g):
            net(x)
            te.recorder.model.graphs.abandon()
            assert net._torchember.states[0].listener is te.recorder.events
    te.close()
    assert len(te.t.df)==6


def test_what_a_graph_has_goes_with_it(gpu, tmp_path):
    net,x = moved_model(model()),late(data()[0])
    with torchEmber(net, home=tmp_path, ttypes='output', cuda_graphs=True) as te, torch.no_grad():
        net(x)
        before = len(te.recorder.buffer.rows.arena.blocks)
        g = torch.cuda.CUDAGraph()
        with captured(g): net(x)
        g.replay()
        rows = weakref.ref(te.recorder.model.graphs.tapes[g].rows.blocks[0])
        del g
        net(x) # The last rows of the graph belong to the step before, so they stay during this pass
        gc.collect()
        net(x)
        assert rows() is None and len(te.recorder.buffer.rows.arena.blocks)==before
    assert te.t.df['step'].unique().tolist()==[0, 1, 2, 3]


def test_a_graph_that_outlives_the_ember(gpu, tmp_path):
    "A graph that outlives its ember still writes its rows, so no other ember may use their memory."
    net,x,g = moved_model(model()),late(data()[0]),torch.cuda.CUDAGraph()
    with torch.no_grad():
        te = torchEmber(net, home=tmp_path, ttypes='output', cuda_graphs=True)
        net(x)
        with captured(g): net(x)
        rows = weakref.ref(te.recorder.model.graphs.tapes[g].rows.blocks[0].rows)
        te.close()
        del te
        gc.collect()
        g.replay()
    assert rows() is not None
    del g
    gc.collect()
    assert rows() is None


def test_two_embers(gpu, tmp_path):
    "Two embers record their own models in one graph."
    a,b = moved_model(model()),moved_model(nn.Linear(3, 2))
    x = late(data()[0])
    how = dict(ttypes='output', cuda_graphs=True)
    with torchEmber(a, home=tmp_path/'a', **how) as ta, torchEmber(b, home=tmp_path/'b', **how) as tb, torch.no_grad():
        b(a(x))
        g = torch.cuda.CUDAGraph()
        with captured(g): b(a(x))
        g.replay()
    fail_on_faults(gpu)
    for te,n in ((ta, 6), (tb, 1)):
        df = te.t.df
        assert len(df)==2*n
        np.testing.assert_array_equal(df['mean'][:n], df['mean'][n:])
    assert not isinstance(ta.recorder.model.graphs.tape, Late)


class SkipsItself(torch.optim.SGD):
    "An optimizer like a fused one with a scaler: a number on the device decides if its step changes anything"
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]['params']: p.add_(p.grad*(1-self.found_inf), alpha=-.05)


def test_a_step_that_the_device_skips(gpu, tmp_path):
    xs,counts,tables = data(6),[],[]
    for graph in (False, True):
        net = moved_model(model())
        opt = SkipsItself(net.parameters(), lr=.05)
        opt.found_inf = late(torch.zeros(()))
        with torchEmber(net, opt, home=tmp_path/str(graph), ttypes=ALL, cuda_graphs=True) as te:
            for i,new in enumerate(xs):
                if graph and i==2:
                    x,g = late(new),torch.cuda.CUDAGraph()
                    with captured(g):
                        loss_of(net, x).backward()
                        opt.step()
                opt.found_inf.fill_(float(i==4))
                if graph and i>=2:
                    x.copy_(late(new))
                    g.replay()
                else:
                    loss_of(net, late(new)).backward()
                    opt.step()
                    opt.zero_grad()
        counts.append(te.recorder.tally.skipped)
        tables.append(te.t.df)
    for f in gpu.faults: assert not f.ours, f
    same(tables[1], tables[0])
    assert counts==[1, 1] and tables[1].loc[tables[1]['skipped']==True, 'step'].unique().tolist()==[4] # noqa: E712


def test_who_stays_hears_on_when_another_leaves(gpu, tmp_path):
    one,other = (moved_model(model()) for _ in range(2))
    x = late(data()[0])
    leaves,stays = (torchEmber(net, home=tmp_path/str(i), ttypes='output', cuda_graphs=True) for i,net in enumerate((one, other)))
    with torch.no_grad():
        other(x)
        with captured(g := torch.cuda.CUDAGraph()): other(x)
        leaves.close()
        for _ in range(2): g.replay()
    stays.close()
    assert stays.t.df.groupby('step').size().tolist()==[6]*3 and not GraphWatch.former


def test_rows_of_a_replay_on_another_stream_are_complete_before_they_move(gpu, tmp_path):
    "The user does not order the streams of two replays. The rows of the first replay are copied before the second one."
    net = moved_model(model())
    opt,xs = sgd(net),data(8)
    te = torchEmber(net, opt, home=tmp_path, cuda_graphs=True, ttypes=ALL)
    train_eagerly(net, opt, map(late, xs[:2]))
    x,g = late(xs[0]),torch.cuda.CUDAGraph()
    with captured(g): loss_of(net, x).backward()
    g.replay()
    side = Stream(cuda())
    with side: g.replay()
    te.close()
    fail_on_faults(gpu)
