"A plain training loop, and functions that compare its rows with the rows of other trainers and with the tensors"
from tensor_rows import lines
import warnings
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from oracle import is_row, numbers, says
from torch import nn

from torchember import EmberWarning

ALL = ('input', 'output', 'weight', 'weight_grad', 'output_grad', 'update', 'optimizer')
place = ('step', 'module', 'ttype', 'tname', 'call', 'phase', 'backward')


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.act,self.b = nn.Linear(4, 6),nn.Tanh(),nn.Linear(6, 3)

    def forward(self, x): return self.b(self.act(self.a(x)))


def seeded(make=Net, seed=0):
    "Return a new model whose weights depend only on `seed`."
    torch.manual_seed(seed)
    return make()


def batches(n=4, size=5, seed=1):
    "Return `n` pairs of inputs and classes, which are the same in each call."
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, generator=g), torch.randint(3, (size,), generator=g)) for _ in range(n)]


def momentum(model): return torch.optim.SGD(model.parameters(), .1, momentum=.9)
def loss_of(model, x, y, share=1): return F.cross_entropy(model(x), y)/share


def by_hand(model, opt, data, accumulate=1):
    "Train a model with the plain loop. Return the gradients that the optimizer used in each step."
    seen = []
    for i,(x,y) in enumerate(data):
        loss_of(model, x, y, accumulate).backward()
        if (i+1)%accumulate: continue
        seen.append(grads(model))
        opt.step()
        opt.zero_grad()
    return seen


def grads(model): return {n: p.grad.clone() for n,p in model.named_parameters() if p.grad is not None}
def weights(model): return {n: p.detach().clone() for n,p in model.named_parameters()}


def closure_of(model, opt, x, y, share=1, seen=None):
    "Return a closure for `opt.step`, which runs zero_grad, forward and backward. seen: list to which each call appends the gradients"
    def closure():
        if share==1: opt.zero_grad()
        loss = loss_of(model, x, y, share)
        loss.backward()
        if seen is not None: seen.append(grads(model))
        return loss
    return closure


@contextmanager
def heard(word=''):
    "In a `with` block, collect the texts of the EmberWarnings that contain `word`. The list is filled at the end of the block."
    got = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        yield got
    got += [str(w.message) for w in caught if issubclass(w.category, EmberWarning) and word in str(w.message)]


# ---- comparison of tables of rows

def table(te, *ttypes, **where):
    "Return a dict: location (step, module, tensor, call, ...) -> row. Fail if two rows have the same location."
    rows = [r for r in lines(te) if (not ttypes or r['ttype'] in ttypes) and all(r.get(k)==v for k,v in where.items())]
    at = {tuple(r.get(k) or '' if k in ('phase', 'backward') else r[k] for k in place): r for r in rows}
    assert len(at)==len(rows), f'{len(rows)-len(at)} rows have the location of another row'
    return at


def same(got, want):
    "Check that two tables have rows at the same locations, with the same statistics."
    assert got.keys()==want.keys(), {'more': sorted(map(str, got.keys()-want.keys()))[:8], 'fewer': sorted(map(str, want.keys()-got.keys()))[:8]}
    for k,r in want.items(): is_row(got[k], [r[n] for n in numbers], r['shape'])


def steps(te): return sorted({r['step'] for r in lines(te)})


def training(te, *ttypes):
    "Return the rows of training steps as a table, without rows of evaluations."
    rows = table(te, *ttypes, phase=None)
    trained = {k[0] for k in rows if k[2] not in ('weight', 'scalar')}
    return {k: r for k,r in rows.items() if k[0] in trained}


# ---- rows of parameters

def said_of_parameters(te, ttype, wanted):
    """Check that the rows of the tensor type `ttype` have the statistics of the tensors in `wanted`.

    `wanted`: a dict for each step, name of a parameter -> tensor."""
    paths = {name: t.path for name,t in te.modules.items()}
    rows = [r for r in lines(te) if r['ttype']==ttype]
    got = {(r['step'], '.'.join(filter(None, (paths[r['module']], r['pname'])))): r for r in rows}
    want = {(i, n): x for i,tensors in enumerate(wanted) for n,x in tensors.items()}
    assert len(got)==len(rows) and got.keys()==want.keys(), {'got': sorted(got), 'want': sorted(want)}
    for k,x in want.items(): says(got[k], x)


def plainly(d): return {k: dict(v) if isinstance(v, dict) else id(v) for k,v in d.items()}


def left(model, *optimizers):
    "Return the attributes and hooks of modules, parameters and optimizers. Tests compare them before and after a recording."
    return [plainly(x.__dict__) for x in (*model.modules(), *optimizers)], [dict(p._backward_hooks or {}) for p in model.parameters()]


def ears(*optimizers):
    "Return the hooks of optimizers and their replaced method `step`. Other attributes change when optimizers step."
    return [plainly({k: v for k,v in o.__dict__.items() if k=='step' or k.endswith('hooks')}) for o in optimizers]


def outputs(te, **where): return [r for r in table(te, 'output', **where).values() if r['module'].count('.')==0]
