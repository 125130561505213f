"""Tests of other training libraries on an accelerator, in float32 and mixed precision: rows equal those of a plain loop on the CPU.

`make gpu` runs this too; without an accelerator all of it is skipped."""
import copy
import os
import re

import numpy as np
import pytest
import test_accelerate as of_accelerate
import test_lightning as of_lightning
import test_transformers_trainer as of_trainer
import torch
from looped import ALL, batches, grads, heard, momentum, numbers, seeded, table
from test_accelerate import accelerate  # noqa: F401 a fixture
from torch import nn

from torchember import torchEmber

# True to run these tests on a CPU, to test the tests themselves
rehearsed = bool(os.environ.get('TORCHEMBER_REHEARSAL'))
there = hasattr(torch, 'accelerator') and torch.accelerator.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not there and not rehearsed, reason='there is no accelerator here')]
device = torch.accelerator.current_accelerator() if there else torch.device('cpu')
precisions = pytest.mark.parametrize('precision,rel', [('32', 1e-4), ('bf16', .05)]+[('16', .01)]*there)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    # Lightning sets this variable permanently, so set it here to restore it afterwards
    monkeypatch.setenv('CUDA_DEVICE_ORDER', 'PCI_BUS_ID')
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def close(got, want, rel):
    "Check that two tables have the same locations and nearly the same numbers, with the tolerance `rel` times the largest value."
    assert got.keys()==want.keys(), sorted(map(str, got.keys()^want.keys()))[:8]
    size = {}
    for k,r in want.items(): size[k[1:4]] = max(size.get(k[1:4], 1e-3), abs(r['min']), abs(r['max']))
    for k,r in want.items():
        assert not got[k].get('skipped') and got[k]['shape']==r['shape']
        for n in numbers:
            if n in ('mean', 'std', 'min', 'max'): assert np.isclose(got[k][n], r[n], rtol=0, atol=rel*size[k[1:4]], equal_nan=True), (k, n, got[k], r)


@precisions
@pytest.mark.parametrize('accumulate', [1, 2])
def test_lightning(precision, rel, accumulate, tmp_path):
    Lit,_,Arm = of_lightning.kinds()
    how = dict(accelerator='cpu' if rehearsed else 'gpu', devices=1, accumulate_grad_batches=accumulate,
        precision={'32': '32-true', '16': '16-mixed', 'bf16': 'bf16-mixed'}[precision])
    class Scaled(Arm):
        def on_train_start(self, trainer, module):
            self.options['scaler'] = getattr(trainer.precision_plugin, 'scaler', None)
            super().on_train_start(trainer, module)
    te = of_lightning.fit(seeded(Lit), Scaled('wrapped', ttypes=ALL), batches(), tmp_path, **how)
    close(table(te), of_lightning.plain(batches(), accumulate), rel)


@precisions
@pytest.mark.parametrize('accumulate', [1, 2])
def test_trainer(precision, rel, accumulate, tmp_path):
    how = dict(use_cpu=rehearsed, gradient_accumulation_steps=accumulate, bf16=precision=='bf16', fp16=precision=='16')
    model = seeded(of_trainer.Scored)
    rows = table(of_trainer.train(model, of_trainer.named(batches()), tmp_path, momentum(model), **how))
    want = of_trainer.plain(batches(), accumulate)
    # Accelerate returns a copy of the logits, so this row has no counterpart
    if precision!='32': want = {k: r for k,r in want.items() if k[1:4]!=('model(Scored)', 'output_grad', 'output_logits')}
    close(rows, want, rel)


@precisions
@pytest.mark.parametrize('armed', ['before', 'after'])
@pytest.mark.parametrize('accumulate', [1, 2])
def test_prepared(accelerate, precision, rel, armed, accumulate): # noqa: F811
    mixed = {'32': 'no', '16': 'fp16', 'bf16': 'bf16'}[precision]
    accelerator = accelerate.Accelerator(cpu=rehearsed, mixed_precision=mixed, gradient_accumulation_steps=accumulate)
    def go(arms):
        model,te = seeded(),None
        opt = momentum(model)
        if arms and armed=='before': te = torchEmber(model, optimizer=opt, scaler=accelerator.scaler, ttypes=ALL)
        model,prepared = accelerator.prepare(model, opt)
        if arms and armed=='after': te = torchEmber(model, optimizer=prepared, ttypes=ALL)
        for x,y in batches():
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x.to(device)), y.to(device)))
                prepared.step()
                prepared.zero_grad()
        if te: te.close()
        return te, [p.detach().clone() for p in model.parameters()]
    with heard() as said: te,after = go(True)
    assert not said
    for p,q in zip(after, go(False)[1], strict=True): assert torch.equal(p, q)
    close(table(te), of_accelerate.plain(accumulate), rel)


@pytest.mark.parametrize('compiled', [False, True])
def test_convolutions_in_channels_last(compiled, tmp_path):
    "A channels-last ResNet under autocast trains to the same bits as without recording, and its rows equal its outputs."
    vision = pytest.importorskip('torchvision')
    torch.manual_seed(0)
    first = vision.models.resnet18().to(device, memory_format=torch.channels_last)
    x = torch.randn(4, 3, 64, 64, device=device).to(memory_format=torch.channels_last)
    seen,done = {},[]
    torch.use_deterministic_algorithms(True)
    try:
        for watched in (False, True):
            torch._dynamo.reset()
            net = copy.deepcopy(first)
            opt = torch.optim.SGD(net.parameters(), .01, momentum=.9)
            te = torchEmber(net, opt, home=tmp_path, ttypes=ALL) if watched else None
            if watched and not compiled:
                for n,m in net.named_modules(): m.register_forward_hook(lambda m, args, out, n=n: seen.__setitem__(n, out.detach().float().cpu()))
            run = torch.compile(net) if compiled else net
            for _ in range(3):
                with torch.autocast(device.type, torch.bfloat16): loss = run(x).square().mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
            if te: te.close()
            done.append(grads(net)|{n: p.detach().clone() for n,p in net.named_parameters()})
    finally: torch.use_deterministic_algorithms(False)
    if compiled: # Compiled code fuses other operations, and so rounds differently
        for n,p in done[1].items(): torch.testing.assert_close(p, done[0][n], rtol=.02, atol=.02)
    else:
        for n,p in done[1].items(): assert torch.equal(p, done[0][n]), n
    rows = [r for r in te.t.latest_line_list() if r['ttype']=='output']
    assert len(rows)>=60 and te.t.df['step'].nunique()==3
    for r in rows if not compiled else ():
        y = seen[re.sub(r'\([^)]*\)', '', r['module']).partition('.')[2]]
        if r.get('call'): continue # Skip repeated calls of a shared ReLU
        if sum(q['module']==r['module'] for q in rows)>1: continue
        for n,want in dict(mean=y.double().mean(), min=y.min(), max=y.max(), std=y.double().std(correction=1)).items():
            assert abs(r[n]-float(want))<=1e-5*max(1, abs(float(want))), (r, n, want)
