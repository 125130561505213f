"help(), editors and Jupyter show the meaning of each argument of public names, copied from the comment beside the argument."
import ast
import inspect
import json
import sys
from pathlib import Path

import programs
import pytest
from fastcore.docments import docments
from IPython.core.interactiveshell import InteractiveShell

import torchember
from torchember import torchEmber

root = Path(__file__).parents[2]
sys.path.insert(0, str(root/'docs'))
import docstrings  # noqa: E402

meanings = {'optimizer': 'Optimizer, or list of optimizers', 'every': 'Steps to record', 'on_error': "What to do if a tensor cannot be measured: 'warn' once"}


def help_of(code):
    got = programs.run(code)
    assert got.returncode==0, got.stderr
    return ' '.join(got.stdout.replace('|', ' ').split())


def test_help_shows_arguments():
    text = help_of('from torchember import torchEmber; help(torchEmber)')
    for k,v in meanings.items(): assert f'{k}: {v}' in text
    assert 'tensor: Any tensor, inside a forward' in text # an argument of a method


def test_jupyter_shows_arguments():
    "Jupyter sends these requests to the kernel for `torchEmber?` and Shift-Tab."
    shell = InteractiveShell()
    shell.push({'torchEmber': torchEmber})
    text = shell.object_inspect_mime('torchEmber')['text/plain']
    for k,v in meanings.items(): assert f'{k}: {v}' in text
    assert "name: Name of the tensor in the log, in column `tname`" in shell.object_inspect_mime('torchEmber.probe')['text/plain']


def test_the_source_names_each_argument():
    tree = ast.parse((root/'torchember'/'ember.py').read_text())
    doc = ast.get_docstring(next(o for o in tree.body if getattr(o, 'name', '')=='torchEmber'))
    said = docstrings.split(doc)[1]['Args']
    assert set(said)==set(inspect.signature(torchEmber).parameters)


def members(o):
    "Return a function, or a class with its public methods, including inherited methods."
    if not isinstance(o, type): return [o]
    ours = [c for c in o.__mro__ if c.__module__.startswith('torchember')]
    return [o, *(getattr(f, '__func__', f) for c in ours for n,f in vars(c).items() if not n.startswith('_') and callable(getattr(f, '__func__', f)))]


@pytest.mark.parametrize('name', [n for n in torchember.module_of if n!='ttypes'])
def test_each_comment_of_an_argument_is_shown_once(name):
    for o in members(getattr(torchember, name)):
        if not (doc := inspect.getdoc(o)) or isinstance(o, type) and getattr(o.__init__, '__module__', '')!=o.__module__: continue
        said = docstrings.split(doc)[1]['Args']
        # read by fastcore instead of torchember
        beside = {k: v for k,v in docments(o, returns=False, args_kwargs=True).items() if v and k!='self'}
        assert {k.lstrip('*') for k in said}>=beside.keys(), o
        assert doc.count('Args:\n')==bool(said) and doc.count('Returns:\n')<2


code = '''def f(
    x:int, # A "number": any
    *more, # Others
    how='sum', where=None # How and where
) -> int: # Their sum
    "Add up"
    return x

class Net:
    """Two lines,
    of which this is one"""
    def __init__(self,
        width # How wide
    ): pass

    def run(self): # The result
        "Run it"
    def quiet(self, x): "Says nothing of x"
    def due(self, n, m=0) -> bool: # m: how many there were
        "Whether it is time"

def within(
    y # Users do not type this name
): "As it is"
'''


def filled(code): return docstrings.filled(code, {'f', 'Net'}.__contains__)


def test_typed_names_are_those_that_packages_list():
    assert {('monitor.quantities', 'quantity'), ('show.lines', 'scalar_line')}<=docstrings.typed_names()
    assert docstrings.is_typed('ember', 'torchEmber') and docstrings.is_typed('integrations.keras', 'EmberCallback')
    assert docstrings.is_typed('compat.tracker', 'stash_hist') # a public name: users import it from `compat.tandv`
    assert not docstrings.is_typed('measure.kernels', 'read') # not public: the public `read` is another function


def test_internal_functions_have_no_sections():
    assert 'Args:' not in docstrings.filled(code, lambda name: False)


def test_sections_are_written_once_and_removed():
    got = filled(code)
    args = '    Args:\n        x: A "number": any\n        *more: Others\n        how, where: How and where\n'
    assert f'    """Add up\n\n{args}\n    Returns:\n        Their sum\n    """\n' in got
    assert '    """Two lines,\n    of which this is one\n\n    Args:\n        width: How wide\n    """\n' in got
    assert '        """Run it\n\n        Returns:\n            The result\n        """\n' in got
    # no section about the returned value
    assert '        """Whether it is time\n\n        Args:\n            m: how many there were\n        """\n' in got
    assert '"Says nothing of x"' in got and '): "As it is"' in got
    assert filled(got)==got
    assert docstrings.stripped(got)==code
    exec(got, names := {})
    said = {'x': 'A "number": any', '*more': 'Others', 'how': 'How and where', 'where': 'How and where'}
    assert docstrings.split(inspect.getdoc(names['f']))==('Add up', {'Args': said, 'Returns': 'Their sum'})


def test_a_section_in_a_notebook_is_removed():
    cell = {'cell_type': 'code', 'source': ('#| export\n'+filled(code)).splitlines(keepends=True)}
    prose = {'cell_type': 'markdown', 'source': ['\n\nArgs:\n']}
    got = json.loads(docstrings.cleaned(json.dumps({'cells': [cell, prose]})))['cells']
    assert ''.join(got[0]['source'])=='#| export\n'+code and got[1]==prose
    clean = json.dumps({'cells': got})
    assert docstrings.cleaned(clean)==clean


def test_stubs_list_each_name_in_order():
    code = """names = { # all
    'a': 'b d', 'long': 'name_00 name_01 name_02 name_03 name_04 name_05'}
packages = 'x', 'y'
__getattr__,__dir__ = lazy_attributes(__name__, {'..e.f': 'g'})
other = 'z'
"""
    pairs = [f'name_{i:02} as name_{i:02}' for i in range(6)]
    more = f"from .long import ({', '.join(pairs[:5])},\n    {', '.join(pairs[5:])})\n"
    got = docstrings.stub(code)
    assert got==f'from .a import b as b, d as d\n{more}from ..e.f import g as g\nfrom . import x as x, y as y\n'
    assert max(map(len, got.splitlines()))<=120
    assert docstrings.stub("__all__ = ['__version__']")=='__version__: str\n' and docstrings.stub('"A package"')==''
