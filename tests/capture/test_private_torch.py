"All private names of torch are used in one Python module only, and no run fails if torch lacks one of them."
import ast
import json
import re
import warnings
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import programs
import pytest
import torch
from compared import FORWARD, GPT, ids, places, train
from torch import nn

from torchember import EmberWarning, torchEmber
from torchember.capture import private_torch
from torchember.capture import patch

package = Path(private_torch.__file__).parents[1]
# documented names of Python's standard library that begin with an underscore
python = {'_asdict', '_getframe', '_current_frames', '_fields', '_replace'}
well_known = { # name -> meaning, and why torch will keep it
    '_parameters': "a module's own parameters by name, without its children's; pickled models are made of them",
    '_modules': "a module's children by name, None among them; pickled models are made of them",
    '_buffers': "a module's own buffers by name; pickled models are made of them",
    '_version': 'how often a tensor was written to: described in the notes on autograd',
    '_orig_mod': 'the model that torch.compile wraps; saved state dicts have it in their keys',
    '_fsdp_wrapped_module': 'the model that FSDP wraps; saved state dicts have it in their keys',
    '_extra_state': 'the key of the result of `get_extra_state`',
    '_backward_hooks': 'the hooks on a tensor; pickled parameters are made of them',
    '__prepare_scriptable__': 'a method that torch.jit.script calls on each module before it compiles the module',
    '_replicate_for_data_parallel': 'a method that torch calls on modules, and that an armed module refuses',
    '_foreach_*': 'an operation on a list of tensors: described in the reference of torch'}
endings = {'_grad', '_latest', '_r'} # endings of torchember's own words, and of matplotlib's reversed colormaps


def is_private(name): return re.fullmatch('_[A-Za-z].*', name) is not None


def private_names_in(tree):
    "Yield the private names in a parsed source with their lines: in attributes, imports, and strings that are one name."
    pieces = {v for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for n in set(ast.walk(tree))-pieces:
        if isinstance(n, ast.Attribute): names = [n.attr] if isinstance(n.ctx, ast.Load) else []
        elif isinstance(n, ast.ImportFrom) and not n.level: names = [*n.module.split('.'), *(a.name for a in n.names)]
        elif isinstance(n, ast.Import): names = [p for a in n.names for p in a.name.split('.')]
        elif isinstance(n, ast.Constant) and isinstance(n.value, str) and re.fullmatch(r'[\w.]+', n.value): names = n.value.split('.')
        else: continue
        yield from ((name, n.lineno) for name in names if is_private(name))


def own_names(tree):
    "Yield the names that a parsed source defines: attributes that are set, functions and classes."
    for n in ast.walk(tree):
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store): yield n.attr
        elif isinstance(n, ast.FunctionDef|ast.ClassDef): yield n.name


def foreign_names(sources):
    "Return the private names in sources (name -> text) that the sources do not define and that are not well known."
    trees = {k: ast.parse(v) for k,v in sources.items()}
    known = {n for t in trees.values() for n in own_names(t)} | python | endings
    return [(k, line, n) for k,t in trees.items() for n,line in private_names_in(t)
        if n not in known and (k, n)!=('cli/check.py', '_exit') and not n.startswith('_torchember') and not any(fnmatch(n, w) for w in well_known)]


def test_private_names_are_in_one_python_module():
    # sinks and integrations have a module of their own for private names of other libraries
    rooms = 'private_torch.py', 'private_trackers.py', 'private_trainers.py'
    sources = {str(p.relative_to(package)): p.read_text() for p in package.rglob('*.py') if p.name not in ('_modidx.py', *rooms)}
    # this module reads pickles of other programs and does not import torch
    assert 'import torch' not in sources.pop('frames/files.py')
    # private names of JAX: the key-value store of the processes, and attention. If one is missing, a message is given
    of_jax = {('jaxember/recorder/processes.py', '_src'), ('jaxember/capture/attention.py', '_dot_product_attention_xla')}
    assert len(sources)>30 and {(k, n) for k,_,n in foreign_names(sources)}==of_jax


@pytest.mark.parametrize('line', ['torch._C._len_torch_dispatch_stack()', 'from torch._functorch import config', 'import torch._dynamo', "hasattr(o, '_scale')",
    "sys.modules['torch._inductor.lowering']", 'from torch.library import _register_effectful_op'])
def test_a_private_name_is_found(line): assert foreign_names({'room': line})


# ---- a version of torch that lacks private names

trains = '''
import importlib, json, sys, warnings
lacks,real = sys.argv[1].split(),importlib.import_module
class Without:
    "A Python module without some of its names."
    def __init__(self, name): self.name,self.module = name,real(name)
    def __getattr__(self, n):
        if f'{self.name}.{n}' in lacks or 'everything' in lacks: raise AttributeError(n)
        return getattr(self.module, n)
importlib.import_module = lambda name, *rest: Without(name) if name.startswith('torch.') else real(name, *rest)
import torchember.capture.private_torch
importlib.import_module = real

import torch, torch.utils.checkpoint
import torch._higher_order_ops.effects as effects
if lacks==['everything']:
    vars(torch.library).pop('_register_effectful_op', None)
    del effects._register_effectful_op
from torch import nn
import torchember.capture.private_torch as room
room.import_module = Without
from torchember import torchEmber

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(3, 4),nn.Linear(4, 2)
    def forward(self, x): return self.b(self.a(x).relu())

out = {}
for how in ('eager', 'aot_eager'):
    torch.manual_seed(0)
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=.1)
    te = torchEmber(net, optimizer=opt, ttypes=('input', 'output', 'weight', 'weight_grad'), on_error='raise')
    f = net if how=='eager' else torch.compile(net, backend=how, fullgraph=True)
    for x in torch.randn(3, 5, 3):
        opt.zero_grad()
        f(x).square().mean().backward()
        opt.step()
    out[how] = [{k:v for k,v in r.items() if k!='ts'} for r in te.t.lines() if r['ttype']!='scalar']
    assert te.close()['errors']==0
print(json.dumps([out, sorted(room.missing)]))
'''


def trained(lacks, home):
    got = programs.run(trains, lacks, after='import torch._dynamo', TORCHEMBER_HOME=home)
    assert got.returncode==0, got.stderr
    return json.loads(got.stdout.splitlines()[-1])


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "Return the rows of a training with an unchanged torch."
    out,_ = trained('', tmp_path_factory.mktemp('whole'))
    assert len(out['eager'])==len(out['aot_eager'])==3*14
    return out


groups = {
    'modes': 'torch._C._len_torch_dispatch_stack torch._C._len_torch_function_stack torch.utils._python_dispatch._disable_current_modes '
        'torch._C._functorch.peek_interpreter_stack torch._C._functorch.is_functorch_wrapped_tensor '
        'torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack',
    'the compiler': 'torch._C._dynamo.eval_frame.set_code_exec_strategy torch._C._current_graph_task_id',
    'everything': 'everything'}


@pytest.mark.parametrize('lacks', [pytest.param(g, marks=[pytest.mark.slow]*(g!='everything')) for g in groups])
def test_the_same_rows_without(lacks, whole, tmp_path):
    out,missing = trained(groups[lacks], tmp_path)
    assert len(missing)>12 if lacks=='everything' else set(missing)>=set(groups[lacks].split())
    assert out['eager']==whole['eager']
    def in_any_order(rows): return sorted(json.dumps(r, sort_keys=True) for r in rows)
    assert in_any_order(out['aot_eager'])==in_any_order(whole['aot_eager'])


def test_one_warning_on_a_newer_torch(monkeypatch):
    "The warning appears once, when a model is armed, and only if a private name of torch is missing."
    def heard():
        with warnings.catch_warnings(record=True) as got:
            warnings.simplefilter('always')
            torchEmber(nn.Linear(1, 1)).disarm()
        return [(str(w.message), w.filename) for w in got if w.category is EmberWarning]
    monkeypatch.setattr(private_torch, 'newest', (1, 0))
    monkeypatch.setattr(private_torch, 'missing', {})
    monkeypatch.setattr(private_torch, 'warned', set())
    assert heard()==[]
    private_torch.private('torch.library.gone', None, 'nothing else is')
    [(line, where)] = heard()
    assert 'effect: torch.library.gone: nothing else is.' in line and where==__file__
    assert heard()==[]


def test_a_scaler_without_private_names():
    "The scale is read with the public method `get_scale`. A call of scaler.unscale_ cannot be noticed."
    class Scaler:
        def get_scale(self): return 8.
    assert private_torch.loss_scale(Scaler())==8. and not private_torch.is_unscaled(Scaler(), None)


def test_modules_without_a_private_method(monkeypatch):
    "A private method that this torch lacks is not checked for overrides."
    class Own(nn.Linear):
        def parameters(self, recurse=True): return iter(())
    monkeypatch.delattr(nn.Module, '_named_members')
    assert private_torch.lists_parameters_as_torch(nn.Linear(1, 1)) and not private_torch.lists_parameters_as_torch(Own(1, 1))


def test_names_of_runs_without_a_store(monkeypatch):
    from torchember.recorder.process import shared_name
    monkeypatch.setattr(private_torch, 'private', lambda path, without, then: without)
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    assert shared_name('Net').startswith('Net_')


def compiled_on_a_torch_without_hooks(monkeypatch):
    "Return the rows of a model (eager, compiled, compiled in blocks) and the warnings, if graphs cannot have hooks."
    monkeypatch.setattr(private_torch, 'hooks_in_graphs', False)
    monkeypatch.setattr(patch, 'hooks_in_graphs', False)
    monkeypatch.setattr(private_torch, 'warned', set())
    options = dict(ttypes=(*FORWARD, 'input_grad', 'output_grad'))
    with warnings.catch_warnings(record=True) as got:
        warnings.simplefilter('always')
        rows = [train(lambda: GPT(2), ids, how, **options).rows for how in ('eager', 'whole', 'blocks')]
    return rows, [str(w.message) for w in got if w.category is EmberWarning]


@pytest.mark.release # slow test, run only before a release
def test_gradients_of_activations_where_graphs_take_no_hooks(monkeypatch):
    "A model still compiles as one graph. All other rows are recorded, and one warning appears."
    (eager,whole,blocks),said = compiled_on_a_torch_without_hooks(monkeypatch)
    without = [r for r in eager if r['ttype'] not in ('input_grad', 'output_grad')]
    assert len(without)<len(eager) and Counter(places(whole))==Counter(places(without))
    assert {r['ttype'] for r in blocks} >= {r['ttype'] for r in without}
    assert len(said)==1 and 'cannot report the gradients of inputs and outputs' in said[0]
