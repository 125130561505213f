"""Rows of the benchmark that measure other tools.

Each tool runs in its own Python: $PEER_<NAME>, or a virtual environment that --peers creates."""
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from .registry import Skip, line, row
from .timing import added, spread

root = Path(__file__).parents[1]
boot = "import sys; sys.path.insert(0, {here!r}); {ours}from benchmarks.peer import main; main({name!r}, {package!r}, {what!r}, {quick}, {threads})"
tools = { # name of a tool -> (arguments of each pip call, none for this torchember; package; names of the tool in benchmarks/peer.py)
    'torchember': ([], 'torchember', ['torchember', 'torchember, numerics']),
    'old': (['--no-deps torchember==0.2.7'], 'torchember', ['torchember 0.2.7']),
    'wandb': (['wandb'], 'wandb', ['wandb']),
    'torchlens': (['torchlens'], 'torchlens', ['TorchLens, watch', 'TorchLens, record']),
    # tandv needs --no-deps, because its requirements are versions of 2024
    'tandv': (['msgpack randomname', '--no-deps git+https://github.com/graphcore-research/track-and-visualize'], 'tandv', ['tandv']),
    'nnstat': (['git+https://github.com/zhengzangw/nnstat'], 'nnstat', ['nnstat']),
    # Taiyi computes quantities, see `quantities` in benchmarks/peer.py
    'taiyi': (['plotly', '--no-deps git+https://github.com/DLCV-BUAA/Taiyi'], 'Taiyi', [])}


def python(tool, folder):
    "Return the path of a Python that has `tool` installed. Raise Skip if there is none."
    if not tools[tool][0]: return sys.executable
    if given := os.environ.get(f'PEER_{tool.upper()}'): return given
    if not os.environ.get('TORCHEMBER_PEERS'): raise Skip('needs --peers, which installs other tools into temporary folders')
    made = folder/tool/'bin/python'
    if not made.exists(): make(tool, made)
    return str(made)


def make(tool, made):
    "Create a virtual environment with `tool`. Other packages, such as torch, are taken from the current environment."
    here = sysconfig.get_paths()['purelib']
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', made.parents[1]], check=True)
    found = subprocess.run([made, '-c', "import sysconfig; print(sysconfig.get_paths()['purelib'])"], check=True, capture_output=True, text=True)
    Path(found.stdout.strip(), 'torch_is_here.pth').write_text(here)
    for what in tools[tool][0]:
        pip = [sys.executable, '-m', 'pip', '--python', made, 'install', '-q', '-c', root/'constraints.txt', *what.split()]
        if subprocess.run(pip, capture_output=True).returncode: made.unlink(); raise Skip('pip could not install the tool')


def only_benchmarks(folder):
    "Return a folder for sys.path that contains only this package. Other installed packages may also have the name benchmarks."
    here = folder/'only'
    if not here.exists():
        here.mkdir()
        (here/'benchmarks').symlink_to(root/'benchmarks')
    return here


def ask(tool, name, what, quick, folder):
    "Return the result of benchmarks/peer.py for the tool `name`. Raise Skip if it cannot run."
    exe = python(tool, folder)
    home = Path(tempfile.mkdtemp(dir=folder))
    own = not tools[tool][0]
    here = only_benchmarks(folder)
    code = boot.format(here=str(here), ours=f'sys.path.insert(0, {str(root)!r}); ' if own else '', name=name, package=tools[tool][1], what=what, quick=quick,
        threads=int(os.environ.get('OMP_NUM_THREADS', 1)))
    env = {k:v for k,v in os.environ.items() if k!='PYTHONPATH'} | {'HOME': str(home), 'WANDB_MODE': 'offline', 'TORCHEMBER_HOME': str(home)}
    done = subprocess.run([exe, '-P', '-c', code], cwd=home, env=env, capture_output=True, text=True)
    if done.returncode: raise Skip(f"the tool failed: {(done.stderr.strip().splitlines() or ['no error message'])[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def each(what, quick):
    "Yield pairs (name of a tool, result of its measurement or the reason why there is none)."
    with tempfile.TemporaryDirectory(prefix='peers-') as folder:
        for tool,(_,_,names) in tools.items():
            for name in names:
                try: yield name, ask(tool, name, what, quick, Path(folder)), None
                except Skip as e: yield name, None, str(e)


def titled(name, got):
    "Return the name of a tool together with its version."
    v,(tool,*how) = got.get('version'),name.split(', ')
    return name if not v or v in name else ', '.join([f'{tool} {v}', *how])


@row('peers', 'other tools: added time of a step of AlexNet, SGD with momentum, in the same training loop')
def peers(quick):
    from .peer import peers as known
    for name,got,no in each('cost', quick):
        records = known[name][0]
        if no: yield line(name, None, '%', note=f'not measured: {no}', records=records, n=0); continue
        note = records+(f"; measured without in-place ReLU, which fails ({got['inplace']})" if got['inplace'] else '')
        base = spread(1e3*b for b,_ in got['pairs'])['value']
        yield line(titled(name, got), unit='%', note=f'{note}; {base:.0f} ms without the tool', records=records, **added(got['pairs']))


@row('survives', 'other tools: features of torch that work while a tool records the model')
def survives(quick):
    for name,got,no in each('features', quick):
        if no: yield line(name, None, '', note=f'not tested: {no}', n=0); continue
        f = got['features']
        note = '; '.join(f'{k}: {v}' for k,v in f.items() if v!='yes')
        yield line(titled(name, got), sum(v=='yes' for v in f.values()), f'of {len(f)}', note=note, features=f)


@row('quantities-peers', 'another tool: added time of a step of a ResNet-18, with quantities of each convolution or batch normalisation')
def quantities(quick):
    from .peer import shared_quantities
    with tempfile.TemporaryDirectory(prefix='peers-') as folder:
        for tool,name in (('torchember', 'torchember'), ('taiyi', 'Taiyi')):
            for kind in shared_quantities:
                try: got = ask(tool, f'{name}, {kind}', 'quantities', quick, Path(folder))
                except Skip as e: yield line(f'{name}, {kind}', None, '%', note=f'not measured: {e}', n=0); continue
                base = spread(1e3*b for b,_ in got['pairs'])['value']
                yield line(titled(f'{name}, {kind}', got), unit='%', note=f'{base:.0f} ms without quantities', **added(got['pairs']))
