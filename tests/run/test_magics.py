"Tests of the cell magic `%%ember` in an IPython shell: its output, and the state that it restores"
import ast
import re
import textwrap

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from torch import nn

import torchember
from torchember import emberTracker, runs
from torchember.capture.forward import find_exclusive_listener
from torchember.magics import models_of_cell, variables_of_cell

setup = '''
import torch
from torch import nn
def net(): return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
model = net()
opt = torch.optim.SGD(model.parameters(), .1)
x = torch.randn(8, 4)
def step(m=None, o=None):
    m,o = m or model,o or opt
    m(x).square().mean().backward()
    o.step()
    o.zero_grad()
'''


class Shell:
    "An IPython shell that has run the code in `setup`"
    def __init__(self):
        self.ip = InteractiveShell.instance() # Without this instance, `display` would only print
        self.ip.run_cell(setup).raise_error()
        self.ip.run_line_magic('load_ext', 'torchember')

    def run(self, cell):
        with capture_output() as self.shown: done = self.ip.run_cell(textwrap.dedent(cell))
        return done

    def __getitem__(self, name): return self.ip.user_ns[name]
    kinds = property(lambda self: [[*o.data] for o in self.shown.outputs])
    pictures = property(lambda self: sum('image/png' in ks for ks in self.kinds))
    texts = property(lambda self: [o.data.get('text/plain', '') for o in self.shown.outputs])


@pytest.fixture
def shell():
    yield Shell()
    InteractiveShell.clear_instance()


def steps(name): return sorted({r['step'] for r in emberTracker(name).lines()})
def given_back(model): return find_exclusive_listener(model) is None and not hasattr(model, 'disarm') and type(model.__dict__) is dict


def test_cell_that_trains_is_recorded(shell):
    "A training by a function defined outside of the cell is recorded. The output has a picture first, then the findings"
    shell.run('%%ember --name it --every 2\nfor _ in range(5): step()').raise_error()
    assert steps('it')==[0, 2, 4] and shell.pictures==1 and 'image/png' in shell.kinds[0]
    assert shell.texts[1].startswith('it:') and 'rules checked' in shell.texts[1] and len(shell.kinds)==2
    assert shell.shown.stdout.splitlines()==['torchember: records Sequential, 4 modules, trained by SGD, as the run it.'] and given_back(shell['model'])
    shell.run('step()')
    assert steps('it')==[0, 2, 4] and not shell.shown.outputs


def test_model_created_in_the_cell_is_recorded(shell):
    "A model created in the cell is armed when it trains. The notebook gets all variables, and the last value is shown"
    shell.run('%%ember --name it\nnew = net()\no = torch.optim.Adam(new.parameters())\nfor i in range(3): step(new, o)\ni+40')
    assert shell['i']==2 and '42' in shell.shown.stdout and shell['_']==42 and shell.pictures==1
    assert steps('it')==[0, 1, 2] and 'by Adam' in shell.shown.stdout and given_back(shell['new'])


def test_cell_that_raises_is_recorded(shell):
    "If the cell raises, the traceback begins in the cell, and the steps before are recorded and shown"
    done = shell.run("%%ember --name it\nstep()\nraise ValueError('it')")
    assert isinstance(done.error_in_exec, ValueError) and shell.pictures==1 and steps('it')[0]==0 and given_back(shell['model'])
    # The run contains the exception that ended it
    assert any('ValueError: it' in str(r) for r in emberTracker('it').lines())
    said = re.sub('\x1b.*?m', '', shell.shown.stdout)
    assert "raise ValueError('it')" in said and 'magics.py' not in said and 'run.py' not in said
    shell.run('%%ember\nif')
    assert 'SyntaxError' in shell.shown.stdout and not shell.pictures


def test_no_model(shell):
    shell.run('%%ember\nprint(1+1)').raise_error()
    first,said = shell.shown.stdout.splitlines()
    assert first=='2' and said.startswith('torchember: nothing was recorded') and not shell.shown.outputs and not len(runs())


def test_two_models(shell):
    shell.run('other = net(); of_other = torch.optim.SGD(other.parameters(), .1)')
    shell.run('%%ember --name it\nfor _ in range(2): step(); step(other, of_other)').raise_error()
    assert steps('it')==steps('it_2')==[0, 1] and shell.pictures==2 and [t[:3] for t in shell.texts[1::2]]==['it:', 'it_']
    assert given_back(shell['model']) and given_back(shell['other'])


def test_models_without_an_optimizer(shell):
    "Without an optimizer, each pass is a step, even without gradients. Models that the cell does not name stay unchanged"
    shell.run('alone = net(); other = net()')
    shell.run('%%ember --name it\nwith torch.no_grad():\n    for _ in range(3): alone(x)').raise_error()
    assert steps('it')==[0, 1, 2] and list(runs().name)==['it'] and shell.pictures==1


def test_optimizer_created_again_in_the_cell_is_used(shell):
    "An optimizer that the cell creates ends the steps, in place of the earlier optimizer of the model"
    shell.run('%%ember --name it\nopt = torch.optim.Adam(model.parameters())\nfor _ in range(3): step()').raise_error()
    assert steps('it')==[0, 1, 2] and 'by Adam,' in shell.shown.stdout and list(runs().name)==['it']


def test_displayed_optimizer_is_not_used(shell):
    "IPython keeps a displayed optimizer as a variable such as `_2`. It never steps, so it is ignored"
    shell.run('_2 = torch.optim.Adam(model.parameters())').raise_error()
    shell.run('%%ember --name it\nfor i in range(3): step()').raise_error()
    assert steps('it')==[0, 1, 2] and 'by SGD,' in shell.shown.stdout and list(runs().name)==['it']


def test_invalid_options_are_refused(shell):
    "An invalid option gives an error message, and the cell does not run"
    shell.run('%%ember --every 0\nran = 1')
    assert 'n>=1' in shell.shown.stderr and 'ran' not in shell.ip.user_ns


def test_magics_in_the_cell(shell):
    shell.run('%%ember --name it\n%time step()\nstep();').raise_error()
    assert steps('it')==[0, 1]


def test_extension_loads_and_is_not_listed():
    assert 'load_ipython_extension' not in dir(torchember) and callable(torchember.load_ipython_extension)


def test_which_models():
    a,frozen = nn.Linear(2, 2),nn.Linear(2, 2).requires_grad_(False)
    outer = nn.Sequential(a)
    assert models_of_cell([a, outer, frozen, nn.MSELoss(), 3, outer])==[outer] and models_of_cell([a])==[a] and models_of_cell([])==[]
    names = {}
    exec('def f(): return g()\ndef g(): return [m for _ in range(2)] or f()\nm = 1\nn = 2', names)
    assert {*variables_of_cell(ast.parse('f(); unknown'), names)}=={'f', 'g', 'm'} and variables_of_cell(ast.parse('n'), names)=={'n': 2}
