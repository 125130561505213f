"The library reads in one direction: a cell is short enough to be read in one go, and no room needs one that comes after it"
import ast
import json
import re
from pathlib import Path

import pytest

import torchember

root = Path(__file__).parents[2]
package = root/'torchember'
most = 120 # lines of a cell, as it is in the module: what arguments mean is in it twice
# room -> what it looks up in the package when it is asked to show something, and not before
shows = {'ember': {'overview', 'live', 'summary'}, 'health.diff': {'differences'}}


def modules(): return {'.'.join(p.relative_to(package).with_suffix('').parts): p for p in package.rglob('*.py') if p.name not in ('__init__.py', '_modidx.py')}


def cells(code):
    "The cells of a generated module: first line in the file, and how many lines there are"
    marks = [i for i,line in enumerate(code.splitlines()) if line.startswith('# %% ')]
    for i,end in zip(marks, [*marks[1:], None], strict=True):
        yield i+2, len('\n'.join(code.splitlines()[i+1:end]).strip('\n').splitlines())


def reading_order():
    "The rooms, as the numbers of their notebooks have them"
    for p in sorted((root/'nbs').rglob('*.ipynb')):
        code = '\n'.join(''.join(c['source']) for c in json.loads(p.read_text(encoding='utf-8'))['cells'] if c['cell_type']=='code')
        if (m := re.search(r'^#\| default_exp ([\w.]+)$', code, re.M)): yield m[1]


def imported(code, room, rooms):
    "Rooms that a module imports, wherever in it that is; and names that it looks up in the package"
    found,names = set(),set()
    for o in ast.walk(ast.parse(code)):
        if isinstance(o, ast.Import): some = [a.name for a in o.names]
        elif isinstance(o, ast.ImportFrom):
            above = ['torchember', *room.split('.')[:-1]][:len(room.split('.'))-o.level+1] if o.level else []
            base = '.'.join([*above, *([o.module] if o.module else [])])
            some = [base, *(f'{base}.{a.name}' for a in o.names)]
            if base=='torchember': names |= {a.name for a in o.names}
        else: continue
        found |= {s.removeprefix('torchember.') for s in some if s.startswith('torchember.')}
    return found & {*rooms}, names & torchember.rooms.keys()


def test_cells_of_a_module():
    assert [*cells('"what"\n\n# %% auto #0\na\n\n# %% b #1\nb\n\nc\n\n\n# %% d #2\nd\n')]==[(4, 1), (7, 3), (13, 1)]


@pytest.mark.parametrize(('line', 'rooms', 'names'), [('from ..store.base import now', {'store.base'}, set()),
    ('from . import ranks', {'frames.ranks'}, set()), ('from ..measure import ranks', set(), set()),
    ('from torchember.store import base', {'store.base'}, set()),
    ('import torchember.ember', {'ember'}, set()), ('def f():\n    from ..ember import torchEmber', {'ember'}, set()),
    ('from torchember import read, ember', {'ember'}, {'read'}), ('import store.base', set(), set())])
def test_imports_of_a_module(line, rooms, names):
    assert imported(line, 'frames.logs', ['store.base', 'frames.ranks', 'ember'])==(rooms, names)


def test_imports_of_a_room_without_a_wing():
    assert imported('from .frames.logs import read\nfrom . import gone', 'ember', ['frames.logs', 'gone'])==({'frames.logs', 'gone'}, set())


def test_no_cell_is_longer_than_can_be_read_in_one_go():
    long = [f'{room}, line {at}: {n} lines' for room,p in sorted(modules().items()) for at,n in cells(p.read_text(encoding='utf-8')) if n>most]
    assert not long, long


def test_no_room_imports_one_that_comes_later():
    order = {room: i for i,room in enumerate(reading_order())}
    assert order.keys()==modules().keys() and len(order)>100
    later = []
    for room,p in modules().items():
        found,names = imported(p.read_text(encoding='utf-8'), room, order)
        found |= {torchember.rooms[n] for n in names-shows.get(room, set())}
        later += [f'{room} imports {r}' for r in sorted(found) if order[r]>=order[room] and r!=room]
    assert not later, later
