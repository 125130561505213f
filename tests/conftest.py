"""Each test has a home of its own, and draws the same random numbers whatever ran before it"""
import os
import random
import shutil
import tempfile

import pytest

# Before anything imports torch or torchember: a home that is nobody's, no windows, and no fight between workers over the cores
home,env = tempfile.TemporaryDirectory(prefix='torchember-'),pytest.MonkeyPatch()
env.setenv('TORCHEMBER_HOME', home.name)
env.setenv('MPLBACKEND', 'agg')
env.setenv('TORCHEMBER_WAIT', '1') # the last digits of a first step are not left to chance
env.setenv('TORCHINDUCTOR_COMPILE_THREADS', '1') # more are a pool of processes, each of which imports torch
if 'PYTEST_XDIST_WORKER' in os.environ: env.setenv('OMP_NUM_THREADS', '1')


def pytest_unconfigure():
    env.undo()
    home.cleanup()


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    "An empty $TORCHEMBER_HOME, and seeded generators"
    import numpy as np
    import torch
    monkeypatch.setenv('TORCHEMBER_HOME', tempfile.mkdtemp(dir=home.name))
    for seed in (random.seed, np.random.seed, torch.manual_seed): seed(0)


@pytest.fixture
def chromium():
    "Starts a browser that reaches nothing; `chromium('EXCLUDE 127.0.0.1')` reaches this machine"
    path = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
    if path is None: pytest.skip('there is no chromium here')
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        def start(*rules):
            return p.chromium.launch(executable_path=path, args=['--no-sandbox', f"--host-resolver-rules={', '.join(['MAP * ~NOTFOUND', *rules])}"])
        yield start
