"""Compile once what many test processes load: the loops of numba, and test files with rewritten assertions.

    python tests/warm.py

`.ci/run` calls this before pytest starts its workers, which would all compile the same code at the same time."""
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

root = Path(__file__).parents[1]
os.environ |= {'TORCHEMBER_PLAN': '1', 'TORCHEMBER_WAIT': '1'}
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)


def train_torch():
    "Record a short training in each number format, so that numba compiles the loops that read tensors and the plans of calls."
    import torch
    from torch import nn

    from torchember import torchEmber
    whole,kinds = torch.arange(4),(torch.int64, torch.int32, torch.uint8, torch.bool)
    class Reads(nn.Module):
        "Pass integer tensors of all kinds through a module that does nothing."
        def __init__(self):
            super().__init__()
            self.parts,self.out = nn.ModuleList(nn.Identity() for _ in kinds),nn.Linear(4, 4)
        def forward(self, x):
            for m,kind in zip(self.parts, kinds, strict=True): m(whole.to(kind))
            return self.out(x)
    for dtype in torch.float32, torch.float64, torch.bfloat16, torch.float16:
        m = Reads().to(dtype)
        opt = torch.optim.AdamW(m.parameters())
        with torchEmber(m, optimizer=opt):
            for _ in range(4):
                m(torch.rand(2, 4, dtype=dtype)).sum().backward()
                opt.step()
                opt.zero_grad()


def register_jax():
    "Register the measuring of JAX arrays of each number format, so that numba compiles its loops."
    from torchember.jaxember.measure.kernel import formats, register
    for name in formats: register(name)


if __name__=='__main__':
    collect = subprocess.Popen([sys.executable, '-m', 'pytest', '--collect-only', '-q', '-n', '0'], cwd=root, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as home:
        os.environ['TORCHEMBER_HOME'] = home
        train_torch()
    if importlib.util.find_spec('jax'): register_jax()
    sys.exit(collect.wait())
