"`make quick` finds the tests of a changed file, and starts no test after its time limit."
import subprocess
import sys

import near
import pytest
import quick


def test_each_file_has_its_tests():
    assert quick.tests_of_file('nbs/05_ground/30_choose.ipynb')==quick.tests_of_file('torchember/ground/choose.py')
    assert quick.tests_of_file('torchember/ground/choose.py')[0]=='nbs/05_ground/30_choose.ipynb'
    assert quick.tests_of_file('tests/ground/test_quick.py')==['tests/ground/test_quick.py']
    assert quick.tests_of_file('tests/near.py')==quick.tests_of_file('README.md')==[]
    # a documentation page without a Python module
    assert quick.tests_of_file('nbs/tutorials/10_alexnet.ipynb')==['nbs/tutorials/10_alexnet.ipynb']


def test_a_module_without_an_entry_has_the_tests_that_import_it():
    assert 'trained' not in near.near
    assert {'nbs/91_trained.ipynb', 'tests/run/test_trained.py'} <= {*near.tests_near('trained')}


def test_tests_of_files_alternate():
    first,second = (quick.tests_of_file(f) for f in ('torchember/store/lines.py', 'torchember/measure/stats.py'))
    chosen = quick.choose(['torchember/store/lines.py', 'torchember/measure/stats.py'])
    assert chosen[:2]==[first[0], second[0]] and {*second} <= {*chosen}


def run_limited(pytester, changed=()):
    "Run two tests of which the second comes after the time limit. Return the result and the limit."
    pytester.makepyfile('def test_a(): pass\ndef test_b(): pass')
    # the clock at the start, before the first test, and before the second test
    limit = quick.TimeLimit(2, changed, iter([0, 1, 3]).__next__)
    return pytester.inline_run('-p', 'no:cacheprovider', '-o', 'addopts=', plugins=[limit]),limit


def test_no_test_starts_after_the_time_limit(pytester):
    result,limit = run_limited(pytester)
    result.assertoutcome(passed=1, skipped=1)
    assert (limit.left_out, limit.ran)==({'test_no_test_starts_after_the_time_limit.py'}, 1)


def test_changed_files_ignore_the_time_limit(pytester):
    result,limit = run_limited(pytester, ['test_changed_files_ignore_the_time_limit.py'])
    result.assertoutcome(passed=2)
    assert (limit.left_out, limit.ran)==(set(), 2)


def test_a_module_stands_for_its_notebook():
    assert quick.changed_tests(['torchember/store/lines.py', 'tests/ground/test_quick.py'])==['nbs/30_store/06_lines.ipynb', 'tests/ground/test_quick.py']


@pytest.mark.release
def test_files_with_marks_are_collected():
    "The mark `filterwarnings` is defined by a pytest plugin, so this plugin must stay on."
    done = subprocess.run([sys.executable, 'tests/quick.py', 'tests/health/test_no_numpy_warnings.py'], cwd=near.root, capture_output=True, text=True)
    assert done.returncode==0 and ' passed' in done.stdout, done.stdout+done.stderr


def test_a_run_without_a_test_fails(monkeypatch, capsys):
    monkeypatch.setattr(quick.pytest, 'main', lambda *args, **kwargs: 0)
    assert quick.main(['tests/ground/test_quick.py'])
    assert 'No test ran.' in capsys.readouterr().out


def test_all_paths_and_modules_of_the_table_exist():
    assert not [f for files in near.near.values() for f in files.split() if not (near.root/f).exists()]
    assert not [m for m in near.near if '.' in m and m not in near.notebooks()]
