"The rows in benchmarks/ run in their own process and become a table. No test depends on speed."
import json
from pathlib import Path

import pytest

root = Path(__file__).parents[2]
fake = '''
import os
from benchmarks.registry import line, row

@row('fake', 'two numbers')
def two(quick):
    print('noise')
    yield line('pid', os.getpid(), '')
    yield line('quick' if quick else 'slow', 4.2, '%', at_most=10, note='a note', interval=[3, 12], quartiles=[4, 5], n=7)

@row('broken', 'nothing')
def broken(quick): raise ValueError('no such luck')
'''


@pytest.fixture
def rows(tmp_path, monkeypatch):
    "Write a Python module with benchmark rows that this process and its children can import. Return command-line arguments."
    (tmp_path/'fake_rows.py').write_text(fake)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    return ['--rows-of', 'fake_rows', '--results', str(tmp_path/'results')]


def test_a_row_runs_in_its_own_process(rows):
    import os

    from benchmarks.runner import run_row
    r = run_row('fake', module='fake_rows', quick=True)
    pid,other = r['lines']
    assert pid['value']!=os.getpid() and pid['verdict'] is None
    assert (other['what'], other['verdict'], other['sure']) == ('quick', 'holds', False)


def test_a_run_is_printed_and_saved(rows, tmp_path, capsys):
    from benchmarks.__main__ import main
    assert main([*rows, 'fake', '--quick'])==0
    printed = capsys.readouterr().out
    assert '+4.20%' in printed and 'holds, within noise' in printed and 'python 3.' in printed and '+3.00% to +12%' in printed
    saved = json.loads((tmp_path/'results/partial.json').read_text())
    assert saved['rows'][0]['lines'][1]['at_most']==10
    page = (tmp_path/'results/partial.md').read_text()
    assert '<= +10%' in page and '- quick: a note' in page
    assert str(Path.home()) not in page+json.dumps(saved)


def test_a_failed_row_is_a_line_with_its_error(rows, tmp_path, capsys):
    from benchmarks.__main__ import main
    assert main(rows)==1
    out,err = capsys.readouterr()
    assert 'failed: ValueError: no such luck' in out and 'Traceback' in err and '+4.20%' in out
    latest = tmp_path/'results/latest.json'
    assert 'Traceback' not in latest.read_text()
    before = json.loads(latest.read_text())['rows']
    assert main([*rows, 'fake', '--update'])==0
    after = json.loads(latest.read_text())['rows']
    assert [r['row'] for r in after]==['fake', 'broken'] and after[1]==before[1] and after[0]!=before[0]


def test_a_skipped_row_is_a_line_with_its_reason(rows, tmp_path):
    from benchmarks.runner import run_row
    from benchmarks.table import cells
    (tmp_path/'far_rows.py').write_text("""
from benchmarks.registry import Skip, row

@row('far', 'there')
def far(quick):
    raise Skip('needs the sea')
    yield""")
    r = run_row('far', 'there', 'far_rows')
    assert 'error' not in r and cells(r)[0][:3]==['far', 'there', 'skipped: needs the sea']


def test_rows_of_several_modules_run(rows, tmp_path):
    from benchmarks.registry import load
    (tmp_path/'more_rows.py').write_text("from benchmarks.registry import row\n\n@row('more', 'rows')\ndef more(quick): return []\n")
    assert list(load('fake_rows,more_rows'))==['fake', 'broken', 'more']


def test_missing_and_broken_tools_are_reported(rows, tmp_path, monkeypatch):
    from benchmarks import peers
    monkeypatch.delenv('TORCHEMBER_PEERS', raising=False)
    monkeypatch.setattr(peers, 'tools', {'absent': (['nothing'], 'absent', ['absent']), 'broken': (['nothing'], 'absent', ['tandv'])})
    broken = tmp_path/'python'
    broken.write_text('#!/bin/sh\necho no such tool >&2; exit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv('PEER_BROKEN', str(broken))
    (name,got,no),(_,_,failed) = peers.each('cost', True)
    assert (name, got)==('absent', None) and '--peers' in no
    assert failed=='the tool failed: no such tool'
    assert peers.line('absent', None, '%')['verdict'] is None


def test_cpu_time_of_child_processes_counts(rows):
    from subprocess import run
    from sys import executable
    from time import process_time

    from benchmarks.machine import family
    before,own = family(),process_time()
    run([executable, '-c', 'import time\nwhile time.process_time()<.3: pass'], check=True)
    # the CPU time of a child process is included once the child has ended
    assert family()-before >= .25 > process_time()-own


def test_rows_are_listed_and_selected_by_name(rows, capsys):
    from benchmarks.__main__ import main
    main([*rows, '--list'])
    assert capsys.readouterr().out.splitlines()==['fake    two numbers', 'broken  nothing']
    main(['--list'])
    assert {'control', 'alexnet', 'off', 'reading', 'steps'} <= {l.split()[0] for l in capsys.readouterr().out.splitlines()}
    with pytest.raises(SystemExit): main([*rows, 'faek'])
    assert "no row 'faek'. Rows: fake, broken" in capsys.readouterr().err


def test_medians_have_intervals_and_pairs_alternate(rows):
    from benchmarks.timing import interval, pairs, quartiles, spread
    # with 9 values: 8 of 9 on one side has p=.039, 7 of 9 has p=.18 (scipy.stats.binomtest)
    assert interval(range(9))==[1, 7]
    assert interval(range(3))==[0, 2]
    assert quartiles(range(9))==[2, 6]
    assert spread([3, 1, 2])['value']==2
    turns = []
    assert pairs(lambda: turns.append('b') or 1, lambda: turns.append('a') or 2, 0, least=3)==[(1, 2)]*3
    assert ''.join(turns)=='ba'+'ba'+'ab'+'ba'


@pytest.mark.parametrize('name', ['tap', 'steps', 'blackbox', 'off'])
def test_rows_of_trainings_run(name, monkeypatch, tmp_path):
    "Four rows run with tiny models in this process, because they use internal objects of an ember that may be renamed."
    from benchmarks import rows
    from benchmarks.models import mlp, small_cnn
    monkeypatch.setenv('TORCHEMBER_HOME', str(tmp_path))
    monkeypatch.setattr(rows, 'pairs', lambda bare, armed, *a, **kw: [(bare(), armed()) for _ in range(3)])
    monkeypatch.setattr(rows, 'alexnet', lambda: mlp(2)) # replaces a model of 100 MB
    monkeypatch.setattr(rows, 'gpt2', small_cnn)
    lines = list(load_row(rows, name)(True))
    assert lines and all(l['value']==l['value'] for l in lines)


def load_row(module, name):
    "Return the function of the benchmark row `name`."
    from benchmarks.registry import load
    return load(module.__name__)[name][1]
