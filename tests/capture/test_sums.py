"Under tensor parallelism, a layer's forward may return a partial sum. The output is reported after the layer's hooks have summed it."
import threading
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchember import torchEmber
from torchember.capture.events import Listener, always
from torchember.capture.forward import arm, disarm
from torchember.capture.tree import tracks


class Part(torch.Tensor):
    "A tensor that has one half of a sum. Another rank has the other half."
    placements = types.SimpleNamespace(is_partial=lambda: True),


class Split(nn.Linear):
    def __init__(self): # the weights are 3 and 4; the full sum is twice the output
        super().__init__(2, 1, bias=False)
        with torch.no_grad(): self.weight.copy_(torch.tensor([[3., 4.]]))

    def forward(self, x): return super().forward(x).as_subclass(Part)


def add_up(m, args, y): return (2*y).as_subclass(torch.Tensor) if isinstance(y, Part) else None
def ones(): return torch.ones(1, 2, requires_grad=True)


@pytest.fixture
def layer():
    m = Split()
    m.register_forward_hook(add_up)
    return m


def watch(model, **how):
    te = torchEmber(model, ttypes=('output', 'output_grad'), stats=('mean',), on_error='raise', **how)
    # simulates a run with several ranks
    te.recorder.buffer.shards.ranks = types.SimpleNamespace(sharded=True, pass_begins=lambda: None, columns=lambda *args: {})
    return te


def rows(te):
    df = te.t.df
    return sorted(zip(df['path'].astype(str), df['ttype'].astype(str), df['call'], df['mean'], strict=True))


class Ear(Listener):
    wants,sums_after_hooks = always(output_grad=True),True
    def __init__(self): self.heard = []
    def call_ends(self, st, named, compiled=False):
        self.heard += [('ends', st.track.path, type(x).__name__, x.item()) for _,x in named]
        return len(self.heard), None
    def returned(self, st, named, call, phase=None): self.heard += [('returned', st.track.path, type(x).__name__, x.item(), call) for _,x in named]
    def recomputed(self, st, inputs, outputs): self.heard += [('recomputed', st.track.path, type(x).__name__, x.item()) for _,x in outputs]
    def call_fails(self, st): self.heard.append('fails')


def test_rows_are_of_the_sum(layer):
    "Each call has one row with the full sum and its gradient, also if a hook is added later. No hook of torchember remains."
    layer.register_forward_hook(lambda m, args, y: y.expand(1, 2))
    model = nn.Sequential(layer, layer)
    want = model(ones())
    te = watch(model)
    layer.register_forward_hook(lambda m, args, y: 3*y)
    y = model(ones())
    assert torch.equal(y, want*9)
    y.sum().backward()
    te.close()
    assert rows(te)==[('', 'output', 0, 1764.), ('', 'output_grad', 0, 1.), ('0', 'output', 0, 42.), ('0', 'output', 1, 1764.), ('0', 'output_grad', 0, 42.),
        ('0', 'output_grad', 1, 1.)]
    assert len(layer._forward_hooks)==3 and not layer._forward_hooks_always_called


@pytest.mark.parametrize('reentrant', [True, False])
def test_checkpoints(layer, reentrant):
    model = nn.Sequential(layer)
    te = watch(model)
    (3*checkpoint(model, ones(), use_reentrant=reentrant)).backward()
    te.close()
    assert rows(te)==[('', 'output', 0, 14.), ('', 'output_grad', 0, 3.), ('0', 'output', 0, 14.), ('0', 'output_grad', 0, 3.)]
    assert len(layer._forward_hooks)==1


def test_two_listeners(layer):
    "Listeners may be armed in any order. A listener without `sums_after_hooks` gets the partial sum."
    ears,ts = [Ear(), Ear(), Ear()],tracks(layer)
    ears[1].sums_after_hooks = False
    for e in ears: arm(ts, e)
    layer(ones())
    assert [e.heard for e in ears]==[[('returned', '', 'Tensor', 14., 0)], [('ends', '', 'Part', 7.)], [('returned', '', 'Tensor', 14., 0)]]
    for e in ears: disarm(ts, e)
    assert len(layer._forward_hooks)==1


def test_without_hooks(layer):
    "Without a hook that adds up the sum, the partial sum is reported."
    e,plain,idle = Ear(),Split(),Split()
    idle.register_forward_hook(lambda m, args, y: None)
    ts = [*tracks(layer), *tracks(plain), *tracks(idle)]
    arm(ts, e)
    layer.forward(ones()); plain(ones()); idle(ones())
    assert e.heard==[('ends', '', 'Part', 7.)]*2+[('returned', '', 'Part', 7., 2)] and len(layer._forward_hooks)==1 and not plain._forward_hooks
    e.heard,calls = [],[]
    def once_more(m, args, y):
        calls.append(1)
        if len(calls)==1: m(10*args[0])
    layer.register_forward_hook(once_more)
    layer(ones())
    assert e.heard==[('returned', '', 'Tensor', 140., 0), ('returned', '', 'Tensor', 14., 0)]
    disarm(ts, e)
    assert len(layer._forward_hooks)==2


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
def test_a_hook_that_fails(layer, error):
    "If a hook raises, the last known result is reported. A hook left by Ctrl-C is removed by the next call or when disarming."
    fail = []
    def fails(m, args, y):
        if fail: raise fail[0]
    layer.register_forward_hook(fails)
    e,ts = Ear(),tracks(layer)
    arm(ts, e)
    for after in 'call','disarm':
        e.heard,fail[:] = [],[error]
        with pytest.raises(error): layer(ones())
        left = [('returned', '', 'Tensor', 14., 0)] if error is ValueError else []
        assert e.heard==left and len(layer._forward_hooks)==2+(not left)
        fail.clear()
        if after=='call':
            layer(ones())
            assert e.heard==[*left, ('returned', '', 'Tensor', 14., len(left))] and len(layer._forward_hooks)==2
    disarm(ts, e)
    assert len(layer._forward_hooks)==2 and not layer._forward_hooks_always_called


def test_threads(layer):
    "Two threads call one layer. Each result is reported for its own call."
    both = threading.Barrier(2, timeout=20)
    def wait(m, args, y): both.wait()
    layer.register_forward_hook(wait, prepend=True)
    e,ts = Ear(),tracks(layer)
    arm(ts, e)
    threads = [threading.Thread(target=layer, args=(k*ones(),)) for k in (1, 10)]
    for t in threads: t.start()
    for t in threads: t.join()
    disarm(ts, e)
    assert sorted(h[3] for h in e.heard)==[14., 140.] and {h[:3] for h in e.heard}=={('returned', '', 'Tensor')}
    assert len(layer._forward_hooks)==2


def test_disarmed_by_a_hook(layer):
    "A hook of the user disarms the ember during a call. Nothing more is reported, and the model is restored."
    te = watch(layer)
    def disarm_it(m, args, y): te.disarm()
    layer.register_forward_hook(disarm_it)
    for _ in range(2): assert layer(ones()).item()==14
    te.close()
    assert te.t.df.empty and len(layer._forward_hooks)==2 and 'forward' not in layer.__dict__
