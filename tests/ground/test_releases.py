"A list names the test cases that run only before a release. Each of these tests has other cases that always run."
import re
import subprocess
import sys
from pathlib import Path

import pytest
import releases

root = Path(__file__).parents[1]


class Item:
    def __init__(self, path, name): self.path,self.name,self.originalname,self.marks = root/path,name,name.partition('[')[0],set()
    def add_marker(self, mark): self.marks.add(mark.name)
    def get_closest_marker(self, name): return name if name in self.marks else None


def test_listed_cases_are_marked(monkeypatch):
    monkeypatch.setattr(releases, 'cases', {'a/test_x.py': 'test_one[1-*\n test_one[2]', 'test_y.py': 'test_two[0]\ntest_gone[1]', 'test_z.py': 'test_it[0]'})
    items = [Item('a/test_x.py', f'test_one[{n}]') for n in ('1-a', '1-b', '2', '2-a', '3')]+[Item('test_y.py', n) for n in ('test_two[0]', 'test_else')]
    items.append(Item('../nbs/test_x.py', 'test_one[2]'))
    assert releases.mark(items, root)==(['test_y.py: test_gone[1]'], ['test_y.py: test_two'])
    assert [o.name for o in items if o.marks]==['test_one[1-a]', 'test_one[1-b]', 'test_one[2]', 'test_two[0]']


@pytest.mark.release
def test_each_listed_case_exists_and_its_test_keeps_others(tmp_path):
    "pytest collects the cases here. Tests of missing packages are not collected, and count as skipped."
    program = tmp_path/'look.py'
    program.write_text(f'''
import sys
sys.path.insert(0, {str(root)!r})
import pytest, releases
class Look:
    def pytest_collection_modifyitems(self, items): # what conftest has marked is marked
        unknown,bare = releases.mark(items, __import__('pathlib').Path({str(root)!r}))
        print('unknown', unknown)
        print('bare', bare)
files = [f'{root}/{{name}}' for name in releases.cases]
pytest.main(['--collect-only', '-q', '-n0', '-p', 'no:cacheprovider', *files], plugins=[Look()])
''')
    done = subprocess.run([sys.executable, program], cwd=root.parent, capture_output=True, text=True, timeout=600)
    told = dict(re.findall(r'^(unknown|bare) (.*)$', done.stdout, re.M))
    assert told=={'unknown': '[]', 'bare': '[]'}, (told, done.stdout[-2000:], done.stderr[-2000:])
