"Python modules import only earlier modules, and classes are short and have few attributes."
import ast
import io
import json
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

import torchember

root = Path(__file__).parents[2]
package = root/'torchember'
# largest number of code lines of a class (see `class_lines`), and of attributes of an object
most_lines,most_attributes = 120,14
larger = {} # exceptions: class -> number of attributes. Classes may be removed here, but not added
# Python module -> names that its display methods import from the package
shows = {'ember': {'overview', 'live', 'summary'}, 'health.diff': {'differences'}}


def modules(): return {'.'.join(p.relative_to(package).with_suffix('').parts): p for p in package.rglob('*.py') if p.name not in ('__init__.py', '_modidx.py')}


def class_lines(code):
    "Return a dict: class -> lines of code, without docstrings, comments and blank lines."
    tree,lines = ast.parse(code),set()
    for t in tokenize.generate_tokens(io.StringIO(code).readline):
        if t.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT): lines |= {*range(t.start[0], t.end[0]+1)}
    for o in ast.walk(tree):
        if isinstance(o, ast.ClassDef|ast.FunctionDef) and ast.get_docstring(o) is not None: lines -= {*range(o.body[0].lineno, o.body[0].end_lineno+1)}
    return {o.name: len(lines & {*range(o.lineno, o.end_lineno+1)}) for o in tree.body if isinstance(o, ast.ClassDef)}


def reading_order():
    "Yield the names of all Python modules, in the order of their notebooks."
    for p in sorted((root/'nbs').rglob('*.ipynb')):
        code = '\n'.join(''.join(c['source']) for c in json.loads(p.read_text(encoding='utf-8'))['cells'] if c['cell_type']=='code')
        if (m := re.search(r'^#\| default_exp ([\w.]+)$', code, re.M)): yield m[1]


def imported(code, module, known):
    "Return the Python modules that the code imports, also inside functions, and the names that it imports from torchember."
    found,names = set(),set()
    for o in ast.walk(ast.parse(code)):
        if isinstance(o, ast.Import): some = [a.name for a in o.names]
        elif isinstance(o, ast.ImportFrom):
            above = ['torchember', *module.split('.')[:-1]][:len(module.split('.'))-o.level+1] if o.level else []
            base = '.'.join([*above, *([o.module] if o.module else [])])
            some = [base, *(f'{base}.{a.name}' for a in o.names)]
            if base=='torchember': names |= {a.name for a in o.names}
        else: continue
        found |= {s.removeprefix('torchember.') for s in some if s.startswith('torchember.')}
    return found & {*known}, names & torchember.module_of.keys()


def test_docstrings_and_comments_do_not_count_as_lines():
    code = '''x = 1
class A:
    "What it is"
    # why
    def f(self, # a comment
        y):
        """Several
        lines"""

        return [1,
            y]
class B: y = 2'''
    assert class_lines(code)=={'A': 5, 'B': 1}


@pytest.mark.parametrize(('line', 'known', 'names'), [('from ..store.base import now', {'store.base'}, set()),
    ('from . import ranks', {'frames.ranks'}, set()), ('from ..measure import ranks', set(), set()),
    ('from torchember.store import base', {'store.base'}, set()),
    ('import torchember.ember', {'ember'}, set()), ('def f():\n    from ..ember import torchEmber', {'ember'}, set()),
    ('from torchember import read, ember', {'ember'}, {'read'}), ('import store.base', set(), set())])
def test_relative_and_absolute_imports_are_found(line, known, names):
    assert imported(line, 'frames.logs', ['store.base', 'frames.ranks', 'ember'])==(known, names)


def test_imports_of_a_module_without_a_package_are_found():
    assert imported('from .frames.logs import read\nfrom . import gone', 'ember', ['frames.logs', 'gone'])==({'frames.logs', 'gone'}, set())


def test_classes_are_small():
    large = {f'{module}.{c}': n for module,p in modules().items() for c,n in class_lines(p.read_text(encoding='utf-8')).items() if n>most_lines}
    assert not large, large


def attributes_of_classes(code):
    "Return a dict: class -> names that its methods assign to `self`, including base classes of the same module."
    classes = {o.name: o for o in ast.walk(ast.parse(code)) if isinstance(o, ast.ClassDef)}
    found = defaultdict(set)
    for name,c in classes.items():
        found[name] |= {n.attr for n in ast.walk(c) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and getattr(n.value, 'id', '')=='self'}
    def inherited(c): return found[c.name].union(*(inherited(classes[b.id]) for b in c.bases if isinstance(b, ast.Name) and b.id in classes))
    return {name: inherited(c) for name,c in classes.items()}


def test_inherited_attributes_count():
    code = 'class A:\n    def f(self): self.x,self.y = 1,self.z\nclass B(A):\n    def g(self, o): self.w = o.v = 2'
    assert attributes_of_classes(code)=={'A': {'x', 'y'}, 'B': {'x', 'y', 'w'}}


def test_objects_have_few_attributes():
    found = {f'{module}.{c}': len(names) for module,p in modules().items() for c,names in attributes_of_classes(p.read_text(encoding='utf-8')).items()}
    assert {c: n for c,n in found.items() if n>most_attributes}==larger


def test_no_module_imports_a_later_one():
    order = {module: i for i,module in enumerate(reading_order())}
    assert order.keys()==modules().keys() and len(order)>100
    later = []
    for module,p in modules().items():
        found,names = imported(p.read_text(encoding='utf-8'), module, order)
        found |= {torchember.module_of[n] for n in names-shows.get(module, set())}
        later += [f'{module} imports {r}' for r in sorted(found) if order[r]>=order[module] and r!=module]
    assert not later, later
