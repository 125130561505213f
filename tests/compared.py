"Functions that train a model both in eager mode and compiled, and compare the recorded rows of both trainings."
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from models import tensors
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from torchember import torchEmber
from torchember.capture import private_torch

FORWARD = ('input', 'output', 'weight', 'weight_grad', 'probe')
# tensor types that compiled code can report
ALL = ('input', 'output', 'weight', 'weight_grad', *(('input_grad', 'output_grad') if private_torch.hooks_in_graphs else ()))
about = ('module', 'ttype', 'tname', 'pname', 'step', 'call', 'shape', 'dtype')


class Block(nn.Module):
    def __init__(self, d=16, h=2):
        super().__init__()
        self.h,self.ln1,self.qkv,self.o = h,nn.LayerNorm(d),nn.Linear(d, 3*d),nn.Linear(d, d)
        self.ln2,self.up,self.act,self.down = nn.LayerNorm(d),nn.Linear(d, 4*d),nn.GELU(),nn.Linear(4*d, d)

    def forward(self, x):
        b,t,c = x.shape
        q,k,v = self.qkv(self.ln1(x)).view(b, t, 3, self.h, c//self.h).permute(2, 0, 3, 1, 4)
        x = x+self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x+self.down(self.act(self.up(self.ln2(x))))


class GPT(nn.Module):
    "A small GPT, whose blocks are called `loops` times each. checkpoint: argument `use_reentrant` of `checkpoint`, or None for no checkpointing"
    def __init__(self, blocks=2, loops=1, checkpoint=None, d=16):
        super().__init__()
        self.emb,self.blocks,self.ln,self.head = nn.Embedding(29, d),nn.ModuleList(Block(d) for _ in range(blocks)),nn.LayerNorm(d),nn.Linear(d, 29)
        self.loops,self.checkpoint = loops,checkpoint

    def forward(self, i):
        x = self.emb(i)
        for _ in range(self.loops):
            for b in self.blocks: x = b(x) if self.checkpoint is None else torch.utils.checkpoint.checkpoint(b, x, use_reentrant=self.checkpoint)
        return self.head(self.ln(x))


class Few(nn.Module):
    "A model with few operations, because Inductor needs about a second for each kernel"
    class Block(nn.Module):
        def __init__(self): super().__init__(); self.ln,self.l,self.act = nn.LayerNorm(8),nn.Linear(8, 8),nn.Tanh()
        def forward(self, x): return x+self.act(self.l(self.ln(x)))

    def __init__(self, blocks=1):
        super().__init__()
        self.emb,self.blocks,self.head = nn.Embedding(29, 8),nn.ModuleList(self.Block() for _ in range(blocks)),nn.Linear(8, 29)

    def forward(self, i):
        x = self.emb(i)
        for b in self.blocks: x = b(x)
        return self.head(x)


def ids(n=2, length=6): return torch.randint(0, 29, (n, length))
def compiled(f, backend, **kwargs): return torch.compile(f, backend=backend, **kwargs)
def loss_of(out): return sum(t.float().square().mean() for t in tensors(out) if t.requires_grad)


def train(make, inputs, how='eager', backend='aot_eager', armed=True, steps=2, fullgraph=True, context=None, **options):
    """Train a new model: eager, compiled as a `whole`, or compiled by `blocks`.

    Return rows, losses, gradients, events and number of graphs.
    context: function that returns a context manager for each pass"""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = make()
    model,args,kwargs = made if isinstance(made, tuple) else (made, (inputs() if callable(inputs) else inputs,), {})
    count = CompileCounterWithBackend(backend)
    te = torchEmber(model, on_error='raise', **options) if armed else None
    f = compiled(model, count, fullgraph=fullgraph) if how=='whole' else model
    if how=='blocks': [b.compile(backend=count, fullgraph=fullgraph) for b in model.blocks]
    losses = []
    for i in range(steps):
        torch.manual_seed(i) # equal dropout masks in both trainings
        model.zero_grad()
        if context:
            with context(): loss = loss_of(f(*args, **kwargs))
        else: loss = loss_of(f(*args, **kwargs))
        if isinstance(loss, torch.Tensor): loss.backward()
        losses.append(loss.item() if isinstance(loss, torch.Tensor) else loss)
        if te: te.step()
    got = SimpleNamespace(model=model, losses=losses, grads=[p.grad for p in model.parameters()], graphs=count.frame_count, compiles=len(count.graphs),
        log=list(te.mt_log) if te else None, rows=[] if te is None else plain(te))
    if te: assert te.close()['errors']==0
    return got


def plain(te): return [{k:v for k,v in r.items() if k!='ts'} for r in te.t.lines()]
def places(rows): return [tuple(str(r.get(k)) for k in about) for r in rows]
def scale(r): return max((abs(v) for v in (r.get(k) for k in ('mean', 'std', 'max', 'min', 'rms')) if v is not None and math.isfinite(v)), default=0)


def ordered(rows):
    "Return rows in the order of recording, but gradients of activations sorted by their location, because the order of these gradients may vary."
    back = [r for r in rows if r['ttype'] in ('input_grad', 'output_grad')]
    return [r for r in rows if r['ttype'] not in ('input_grad', 'output_grad')]+sorted(back, key=lambda r: places([r]))


def same_rows(want, got, tol=1e-6):
    "Check that two runs have the same rows in the same order. Statistics may differ by `tol` times the size of the tensor."
    want,got = ordered(want),ordered(got)
    a,b = places(want),places(got)
    assert len(want) and Counter(a)==Counter(b), ([*(Counter(a)-Counter(b))][:5], [*(Counter(b)-Counter(a))][:5])
    assert a==b, next((i, x, y) for i,(x,y) in enumerate(zip(a, b, strict=True)) if x!=y)
    # tolerance for gradients that are zero except for rounding
    least = {t: .01*max(scale(r) for r in want if r['ttype']==t) for t in {r['ttype'] for r in want}}
    for r,s in zip(want, got, strict=True):
        assert r.keys()==s.keys()
        for k in r:
            # Both values are equal or NaN; the skewness of equal numbers is NaN
            if r[k]==s[k] or r[k]!=r[k] and s[k]!=s[k]: continue
            assert tol and isinstance(r[k], float) and abs(r[k]-s[k])<=tol*max(scale(r), least[r['ttype']], abs(r[k])), (places([r]), k, r[k], s[k])


needs_hooks = pytest.mark.skipif(not private_torch.hooks_in_graphs, reason='compiled code of this torch cannot report the gradients of activations')


def same_training(want, got, tol=1e-6):
    "Check that two trainings have equal losses, gradients and rows, and the same order of events."
    a,b = want.losses,got.losses
    assert a==b or tol and torch.allclose(torch.tensor(a), torch.tensor(b), rtol=max(tol, 1e-5)), (a, b)
    largest = max((p.abs().max().item() for p in want.grads if p is not None), default=0) # tolerance for gradients that are zero except for rounding
    for p,q in zip(want.grads, got.grads, strict=True):
        assert p is q is None or (torch.equal(p, q) if not tol else torch.allclose(p, q, rtol=min(1e-3, 100*tol), atol=tol*largest))
    same_rows(want.rows, got.rows, tol)
    assert want.log==got.log

