"`make quick` finds the tests of a changed file and keeps its time limit"
import near
import quick


def test_each_file_has_its_tests():
    assert quick.tests_of_file('nbs/05_ground/30_choose.ipynb')==quick.tests_of_file('torchember/ground/choose.py')
    assert quick.tests_of_file('torchember/ground/choose.py')[0]=='nbs/05_ground/30_choose.ipynb'
    assert quick.tests_of_file('tests/ground/test_quick.py')==['tests/ground/test_quick.py']
    assert quick.tests_of_file('tests/near.py')==quick.tests_of_file('README.md')==[]
    assert quick.tests_of_file('nbs/tutorials/10_alexnet.ipynb')==['nbs/tutorials/10_alexnet.ipynb'] # a page without a Python module


def test_a_module_without_an_entry_has_the_tests_that_import_it():
    assert 'trained' not in near.near
    assert {'nbs/91_trained.ipynb', 'tests/run/test_trained.py'} <= {*near.tests_near('trained')}


def test_tests_of_files_alternate():
    first,second = (quick.tests_of_file(f) for f in ('torchember/store/lines.py', 'torchember/measure/stats.py'))
    chosen = quick.choose(['torchember/store/lines.py', 'torchember/measure/stats.py'])
    assert chosen[:2]==[first[0], second[0]] and {*second} <= {*chosen}


def test_no_test_starts_after_the_time_limit(pytester):
    pytester.makepyfile('def test_a(): pass\ndef test_b(): raise AssertionError')
    limit = quick.TimeLimit(2, iter([0, 1, 3]).__next__) # the time of the start, of the first test and of the second
    pytester.inline_run('-p', 'no:cacheprovider', '-o', 'addopts=', plugins=[limit]).assertoutcome(passed=1, skipped=1)
    assert limit.left_out=={'test_no_test_starts_after_the_time_limit.py'}
