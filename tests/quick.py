"""Run the tests of the changed files, for at most a minute.

    python tests/quick.py                                  tests of files changed since the last commit
    python tests/quick.py nbs/05_ground/20_record.ipynb    tests of a notebook, a Python module or a test file

Changed notebooks are exported first. Tests that do not fit into the minute are listed with the command that runs them."""
import os
import subprocess
import sys
import time
from itertools import zip_longest
from pathlib import Path

import near
import pytest

root = Path(__file__).parent.parent
sys.path.append(str(root/'docs'))
seconds = float(os.environ.get('QUICK_SECONDS', 55))


class TimeLimit:
    "Pytest plugin that skips tests which would start after the time limit. Changed test files are never skipped."
    def __init__(self, seconds, changed=(), clock=time.monotonic):
        self.clock,self.end,self.changed,self.left_out,self.ran = clock,clock()+seconds,{*changed},set(),0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        if self.clock()>self.end and item.location[0] not in self.changed:
            self.left_out.add(item.location[0])
            pytest.skip('no time left')
        self.ran += 1


def tests_of_file(name):
    "Return the test files and notebooks that test a changed file."
    path = Path(name)
    if path.parts[0]=='tests': return [name] if path.name.startswith('test_') else []
    if path.suffix=='.ipynb':
        module = next((m for m,nb in near.notebooks().items() if nb==name), None)
        return near.tests_near(module) if module else [name]
    if path.parts[0]=='torchember' and path.suffix=='.py': return near.tests_near('.'.join(path.relative_to('torchember').with_suffix('').parts))
    return []


def files_in(name):
    "Return the notebooks in a folder. For a file, return a list of only this file."
    path = root/name
    return [str(p.relative_to(root)) for p in sorted(path.glob('*.ipynb'))] if path.is_dir() else [name]*path.exists()


def changed_tests(names):
    "Return the notebooks and test files that belong to the changed files. For a Python module, this is its notebook."
    return [near.notebooks().get('.'.join(Path(n).relative_to('torchember').with_suffix('').parts), n) if n.startswith('torchember/') else n for n in names]


def choose(names):
    "Return the tests of all changed files `names`: first the fastest test of each file, then the second of each file, and so on."
    lists = [[f for t in tests_of_file(n) for f in files_in(t)] for n in names]
    return [*dict.fromkeys(t for turn in zip_longest(*lists) for t in turn if t)]


def main(names):
    from export import changed_files
    names = names or [f for f in changed_files() if (root/f).exists()]
    for n in names:
        if not (root/n).exists(): sys.exit(f"There is no file {n}. Give paths such as nbs/05_ground/20_record.ipynb.")
    notebooks = [n for n in names if n.endswith('.ipynb')]
    if notebooks: subprocess.run([sys.executable, 'docs/export.py', *notebooks], cwd=root, check=True)
    tests = choose(names)
    if not tests: return print(f"No tests belong to {', '.join(names) or 'the last commit: nothing has changed'}.")
    print('pytest', *tests, flush=True)
    limit = TimeLimit(seconds, changed_tests(names))
    code = pytest.main(['-q', '-n0', '-m', 'not slow and not release', '-p', 'no:cacheprovider', '--disable-warnings', *tests], plugins=[limit])
    if limit.left_out: print(f"Not run, because {seconds:g} s were over: make test ARGS='{' '.join(sorted(limit.left_out))}'")
    if not limit.ran: print('No test ran.')
    return code or not limit.ran


if __name__=='__main__':
    os.chdir(root)
    os.environ['NO_FORKS'] = '1' # starting the fork server takes longer than the few programs of these tests
    sys.exit(main(sys.argv[1:]))
