"The check for leftovers reports changes that a test leaves in the process, and ignores things that it only used."
import gc
import json
import os
import signal
import sys
import threading
import warnings

import matplotlib.pyplot as plt
import numpy as np
import process
import pytest
import torch
from fastcore.nbio import mk_cell, new_nb, write_nb
from torch import nn

from torchember import Monitor, torchEmber
from torchember.monitor import quantities
from torchember.store import jsonl, log as store_log


def once(): "Do nothing."


def thread():
    over = threading.Event()
    t = threading.Thread(target=over.wait, name='torchember-live', daemon=True)
    t.start()
    return lambda: (over.set(), t.join())


def ember():
    te = torchEmber(nn.Linear(1, 1), name='mine')
    return te.close


def monitor():
    m = Monitor(nn.Sequential(nn.Tanh()), {'0': ['InputMean']})
    return m.close


def setting(get, put, value):
    old = get()
    put(value)
    return lambda: put(old)


def put(where, name, value):
    m = pytest.MonkeyPatch()
    (m.setitem if hasattr(where, 'keys') else m.setattr)(where, name, value)
    return m.undo


def hook():
    h = torch.nn.modules.module.register_module_forward_hook(lambda *a: None)
    return h.remove


def figure():
    f = plt.figure()
    return lambda: plt.close(f)


def folder():
    old = os.getcwd()
    os.chdir('/')
    return lambda: os.chdir(old)


leaves = { # part of the message -> function that makes a change and returns a function to undo it
    'mine is an open recorder': ember, 'Linear at 0x': ember, 'Sequential at 0x': monitor, 'torchember-live runs': thread, 'figure': figure,
    'current folder was': folder,
    'the environment variable NEW_ONE was None': lambda: put(os.environ, 'NEW_ONE', '1'),
    'the environment variable MPLBACKEND was': lambda: put(os.environ, 'MPLBACKEND', 'pdf'),
    'sys.path was': lambda: put(sys, 'path', ['/x', *sys.path]), 'recursion limit was': lambda: setting(sys.getrecursionlimit, sys.setrecursionlimit, 5000),
    'default dtype was': lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    'threads of torch was': lambda: setting(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads()+1),
    'gradients was': lambda: setting(torch.is_grad_enabled, torch._C._set_grad_enabled, False),
    'signal handlers was': lambda: setting(lambda: signal.getsignal(signal.SIGTERM), lambda h: signal.signal(signal.SIGTERM, h), signal.SIG_IGN),
    'errors of numpy was': lambda: setting(np.geterr, lambda e: np.seterr(**e), dict(all='raise')),
    "rcParams['lines.linewidth'] of matplotlib was": lambda: put(plt.rcParams, 'lines.linewidth', 7.),
    'torch.nn.modules.module._global_forward_hooks was': hook,
    'torch.randn is patched': lambda: put(torch, 'randn', once), 'torch.Tensor.add is patched': lambda: put(torch.Tensor, 'add', once),
    'builtins.print is patched': lambda: put(__import__('builtins'), 'print', once), 'json.dumps is patched': lambda: put(json, 'dumps', once),
    'torchember.store.jsonl.now is patched': lambda: put(jsonl, 'now', once),
    'torchember.store.log.Writer.patience is patched': lambda: put(store_log.Writer, 'patience', 9),
    'the quantity InputMean was': lambda: put(quantities.classes, 'InputMean', once)}


@pytest.mark.parametrize('said', leaves)
def test_a_change_that_stays_is_named(said):
    "Each change is reported, and is no longer reported after it was undone."
    before = process.Before()
    assert before.left()==[]
    undo = leaves[said]()
    try: left = before.left()
    finally: undo()
    assert len([s for s in left if said in s])==1 and len(left)==1+(leaves[said] in (ember, monitor)), left
    assert before.left()==[]


def test_garbage_is_collected_and_not_named():
    before = process.Before()
    te = torchEmber(nn.Linear(1, 1), name='mine')
    te.model(torch.ones(1, 1))
    te.t.barrier()
    gc.disable()
    try:
        assert any('mine' in s for s in before.left() if 'recorder' in s)
        del te
        assert before.left()==['garbage collector was True, and is False']
    finally: gc.enable()


def test_changes_by_libraries_are_not_named(monkeypatch):
    "Libraries set variables and the recursion limit at first use. Similar changes by torchember are still reported."
    names = '_140_c2', '__compiled_fn_1', '_ours'
    for n in names: monkeypatch.setattr(jsonl, n, once, raising=False)
    before = process.Before()
    for n in names: monkeypatch.delattr(jsonl, n)
    for k in ('_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR', '_RJEM_MALLOC_CONF', 'TORCHINDUCTOR_OURS'): monkeypatch.setenv(k, '1')
    monkeypatch.setattr(sys, 'path', [*sys.path, '/setuptools/_vendor'])
    was = sys.getrecursionlimit()
    sys.setrecursionlimit(2000)
    try: assert before.left()==["the environment variable TORCHINDUCTOR_OURS was None, and is '1'", 'torchember.store.jsonl._ours is patched']
    finally: sys.setrecursionlimit(was)


def test_a_resource_from_before_may_be_released():
    with torchEmber(nn.Linear(1, 1)), warnings.catch_warnings(): before = process.Before()
    assert before.left()==[]


@pytest.mark.release
@pytest.mark.slow
def test_a_test_that_leaves_a_change_fails(pytester, request):
    "If a test fails anyway, its leftovers are not reported in addition."
    root = request.config.rootpath
    pytester.makeconftest(f'import sys\nsys.path[:0] = [{str(root/"tests")!r}]\n'+(root/'tests'/'conftest.py').read_text())
    pytester.makepyfile("""
        import os
        def test_leaves(): os.environ['LEFT'] = 'here'
        def test_leaves_nothing(monkeypatch): monkeypatch.setenv('AGAIN', '1')
        def test_fails(): os.environ['MORE'] = 'here'; assert False
    """)
    got = pytester.runpytest_subprocess('-n0', '-p', 'no:cacheprovider')
    got.assert_outcomes(passed=2, failed=1, errors=1)
    got.stdout.fnmatch_lines(['*test_leaves left something:*', "*the environment variable LEFT was None, and is 'here'*"])
    assert 'MORE was' not in got.stdout.str() and 'AGAIN was' not in got.stdout.str()


@pytest.mark.release
@pytest.mark.slow
def test_a_section_that_leaves_a_change_fails(pytester, request):
    "The section is named at the end of the cell. Resources that later cells may use are reported for the whole notebook."
    root,nbs = request.config.rootpath,pytester.path/'nbs'
    nbs.mkdir()
    (nbs/'conftest.py').write_text(f'import sys\nsys.path[:0] = [{str(root/"tests")!r}]\n'+(root/'nbs'/'conftest.py').read_text())
    def notebook(name, **sections):
        cells = [c for title,code in sections.items() for c in (mk_cell(f'## {title}', 'markdown'), mk_cell(code, outputs=[], execution_count=None))]
        write_nb(new_nb(cells), nbs/f'{name}.ipynb')
    arms = 'from torchember import torchEmber; from torch import nn\nte = torchEmber(nn.Linear(1, 1), name="mine")'
    notebook('sets', one="import os; os.environ['TORCHEMBER_HOME'] += '/x'", two="os.environ['LEFT'] = 'here'", three="del os.environ['LEFT']")
    notebook('opens', one=arms, two='te.close();')
    notebook('forgets', one='1', two=arms, three='2')
    got = pytester.runpytest_subprocess('-n0', '-p', 'no:cacheprovider', 'nbs')
    got.assert_outcomes(passed=7, failed=1, errors=1)
    got.stdout.fnmatch_lines(['*two left something:*', "*the environment variable LEFT was None, and is 'here'*"])
    got.stdout.fnmatch_lines(['*forgets.ipynb left something:*', "*mine is an open recorder: close its ember (since 'two')*"])
