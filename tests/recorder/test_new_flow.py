"""A new tensor type needs only a class and one entry in `flowing` of `ground.record`: its rows are recorded, read and drawn.

The test runs in its own process. The entry is written into a copy of `ground.record`, and the Python module of the class is made by hand.
"""
import programs
import pytest

added = '''
import importlib.util, sys, types
import torch
import torchember.ground
spec = importlib.util.find_spec('torchember.ground.record')
source = open(spec.origin).read()
assert source.count('\\nflowing = dict(')==1
record = sys.modules[spec.name] = torchember.ground.record = importlib.util.module_from_spec(spec)
exec(compile(source.replace('\\nflowing = dict(', "\\nflowing = dict(residual='residuals.Residuals', "), spec.origin, 'exec'), record.__dict__)

class Residuals:
    ttypes = 'residual',
    def __init__(self, buffer, ttypes): self.buffer,self.given = buffer,{}

    def flow(self, state, ttype, named, call, phase=None):
        if ttype=='input':
            if named: self.given[state, call] = named[0][1].detach().clone()
            return
        x = self.given.pop((state, call), None)
        if x is not None and named and named[0][1].shape==x.shape:
            self.buffer.measure(state, 'residual', named[0][0], named[0][1].detach()-x, None, call, phase)

    def handle_step_end(self): self.given.clear()

import torchember.recorder
room = sys.modules['torchember.recorder.residuals'] = types.ModuleType('residuals')
room.Residuals = Residuals
import matplotlib; matplotlib.use('agg')
import pytest
from torch import nn
from torchember import read, scalar_line, torchEmber

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x): return x+self.lin(x).tanh()

torch.manual_seed(0)
model,xs,adds = nn.Sequential(Block(), Block(), nn.Linear(4, 2)),[],[]
for compiled in (False, True):
    torch._dynamo.reset()
    run = torch.compile(model, backend='eager', fullgraph=True) if compiled else model
    te = torchEmber(model, ttypes=['residual', 'output_grad'], name=f'flow_{compiled}')
    x = torch.randn(3, 4)
    for _ in range(2):
        run(x).sum().backward()
        te.step()
    live = te.t.df
    te.close()
    for df in (live, read(f'flow_{compiled}')):
        got = df[df.ttype=='residual']
        assert sorted({*zip(got.path, got.step)})==sorted((p, s) for p in ('0', '0.lin', '1', '1.lin') for s in (0, 1)), got # the others change the shape
        want = model[0].lin(x).tanh()
        for r in got[got.path=='0'].itertuples():
            assert (r.tname, r.call)==('output_0', 0) and abs(r.mean-want.mean().item())<1e-6 and abs(r.std-want.std().item())<1e-6
        assert {*df.ttype}=={'residual', 'output_grad'}
    assert scalar_line(f'flow_{compiled}', ttype='residual', stat='std') is not None
te = torchEmber(model, name='without')
model(x).sum().backward(); te.step()
assert 'residual' not in {*te.t.df.ttype}
te.close()
with pytest.raises(ValueError, match="Did you mean 'residual'"): torchEmber(model, ttypes=['residul'])
'''


@pytest.mark.slow
def test_residuals():
    done = programs.run(added)
    assert done.returncode==0, done.stdout+done.stderr
