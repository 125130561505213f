"The root module is never called: its parts are called directly, once or several times, also compiled."
from tensor_rows import df as rows_of
from tensor_rows import lines
import gc

import pytest
import torch
from compared import needs_hooks
from looped import Net, batches, heard, momentum, same, seeded, steps, table
from oracle import says
from models import x
from torch import nn

from torchember import torchEmber


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc,self.dec = nn.Sequential(nn.Linear(4, 2), nn.Tanh()),nn.Linear(2, 4)

    def encode(self, x): return self.enc(x)
    def decode(self, z): return self.dec(z)


@pytest.mark.parametrize('with_optimizer', [False, True])
def test_steps_of_a_root_that_is_not_called_end(with_optimizer):
    "A step ends when its first module is called again, or when the optimizer has stepped."
    model,short = seeded(VAE),None
    opt = momentum(model)
    with heard() as said, torchEmber(model, ttypes=('input', 'output', 'weight'), **(dict(optimizer=opt) if with_optimizer else {})) as te:
        for x,_ in batches(30):
            (model.decode(model.encode(x))-x).square().mean().backward()
            log = list(te.mt_log)
            opt.step()
            opt.zero_grad()
            short = short or log
            assert log==short and log
    assert steps(te)==list(range(30)) and not said
    rows = table(te, 'output', 'weight')
    # per step 4 outputs (enc, its two layers, dec) and 4 weights
    assert len(rows)==30*(4+4) and {k[4] for k in rows}=={0}
    enters,exits = [l for l in short if l.startswith('enter')],[l for l in short if l.startswith('exit')]
    assert sorted(l.split(' ', 1)[1] for l in enters)==sorted(l.split(' ', 1)[1] for l in exits) and short[-1]=='exit model(VAE).dec(Linear)'


def test_the_log_of_a_root_that_is_not_called_does_not_grow():
    model = seeded(VAE)
    opt = momentum(model)
    for every in (1, 10**6):
        with torchEmber(model, optimizer=opt, every=every, ttypes='output') as te:
            for _ in range(300): model.decode(model.encode(torch.ones(1, 4))).sum().backward(); opt.step(); opt.zero_grad()
            assert len(te.mt_log)<=8
            assert not [o for o in gc.get_objects() if type(o) is list and len(o)>100 and 'exit model(VAE).dec(Linear)' in [s for s in o if type(s) is str]]


def test_micro_batches_of_parts_are_merged():
    "The rows are merged in the same way as micro-batches of a root that is called."
    model = seeded(VAE)
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=('input', 'output', 'weight', 'weight_grad')) as te:
        for i,(x,_) in enumerate(batches(6)):
            (model.decode(model.encode(x))-x).square().mean().backward()
            if i%3==2: opt.step(); opt.zero_grad()
    assert steps(te)==[0, 1] and len(table(te))==2*(4+4+4+4) and {k[4] for k in table(te)}=={0}
    for s in (0, 1):
        [r] = table(te, 'input', step=s, module='model(VAE).enc(Sequential)').values()
        x = torch.cat([x for x,_ in batches(6)[3*s:3*s+3]])
        says({**r, 'shape': x.shape}, x)


def test_one_part_called_alone_is_recorded():
    "An example is a LightningModule whose training_step calls self.net."
    class Lit(nn.Module):
        def __init__(self): super().__init__(); self.net = Net()
    model = seeded(Lit)
    with torchEmber(model, ttypes=('output', 'weight')) as te:
        for x,_ in batches(5): model.net(x)
    assert steps(te)==[0, 1, 2, 3, 4] and len(table(te, 'output'))==5*4 and len(table(te, 'weight'))==5*4


def test_a_part_called_alone_records_all_weights_inside():
    "Weights at any depth inside the part are recorded. Weights of a neighboring part are not."
    class Uses(nn.Module):
        def __init__(self): super().__init__(); self.a = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Sequential(nn.Linear(3, 3))))
        def forward(self, x): return nn.functional.linear(nn.functional.linear(x, self.a[0][0].weight), self.a[1][0][0].weight)
    model = seeded(lambda: nn.Sequential(Uses(), nn.Linear(3, 3)))
    with torchEmber(model, ttypes='weight') as te:
        for _ in range(2): model[0](torch.randn(2, 3))
    assert rows_of(te)[['step', 'path', 'pname', 'call']].values.tolist()==[
        [s, p, n, 0] for s in (0, 1) for p in ('0.a.0.0', '0.a.1.0.0') for n in ('weight', 'bias')]


@pytest.mark.slow
@needs_hooks
@pytest.mark.parametrize('with_optimizer,every', [(False, 1), (False, 2), (True, 1), (True, 3)])
def test_a_compiled_part_begins_the_pass_as_an_uncompiled_part_does(with_optimizer, every):
    "The part is compiled once more when the recorder finds that the part is called without the root."
    from torch._dynamo.testing import CompileCounterWithBackend
    class Lit(nn.Module):
        def __init__(self): super().__init__(); self.net = Net()
    torch._dynamo.reset()
    tables = []
    for compiled in (False, True):
        model = seeded(Lit)
        opt,count = momentum(model),CompileCounterWithBackend('aot_eager')
        net = torch.compile(model.net, backend=count, fullgraph=True) if compiled else model.net
        with torchEmber(model, every=every, ttypes=('input', 'output', 'weight', 'output_grad'), **(dict(optimizer=opt) if with_optimizer else {})) as te:
            for x,_ in batches(7):
                net(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
        assert te.close()['steps']==7 and steps(te)==list(range(0, 7, every))
        tables.append(table(te))
    same(*tables)
    assert count.frame_count==2+(every>1)


def test_a_leaf_given_in_every_pass_has_a_gradient_of_each_pass():
    "One leaf tensor is the input of two passes. Each pass has its own hook on it."
    model = seeded(lambda: nn.Linear(2, 1, bias=False))
    with torch.no_grad(): model.weight[:] = 1.
    x = torch.ones(3, 2, requires_grad=True)
    with torchEmber(model, optimizer=momentum(model), ttypes=('input_grad',)) as te:
        for k in (1., 5.): (k*model(x)).sum().backward()
    rows = lines(te)
    assert [(r['mean'], r['min'], r['max'], r.get('backward')) for r in rows]==[(3, 1, 5, None)]


def test_parts_called_alone_count_steps_and_calls_off_schedule():
    "Only every second step is recorded. Calls are counted from 0 in each step."
    class Gan(nn.Module):
        def __init__(self): super().__init__(); self.g,self.d = nn.Linear(4, 4),nn.Linear(4, 1)
    gan = Gan()
    te = torchEmber(gan, every=2)
    for _ in range(6):
        gan.d(gan.g(x()))
        gan.d(x())
        te.step()
    df = rows_of(te)
    assert sorted(df.step.unique())==[0, 2, 4]
    d = df[df.module.str.contains('.d(', regex=False) & (df.ttype=='output')]
    assert d.call.tolist()==[0, 1]*3
    te.close()
