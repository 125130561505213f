"Rules of a run on disk: the rows of the latest step, the metadata of a resumed run, and rows that supersede earlier rows."
import json
import os

from torchember import emberTracker
from torchember.ground.record import SCHEMA
from torchember.store.jsonl import last_step, new_run
from torchember.store.log_file import LatestStep
from torchember.store.parameters import cut_off, forgotten, frozen, not_called, untrained, why_not
from torchember.store.lines import parse, parse_blocks
from torchember.store.reading import frame, with_path
from torchember.store.table import tree_nodes, row_per_module, valid_tree


def test_what_the_latest_step_has():
    "The latest step has its own lines and later lines that join it. Of a very long step, only the last lines are kept."
    s = LatestStep(most=10)
    def state(): return b''.join(s.lines), s.size, s.closed
    for line in (b'aaa', b'bbb'): s.add(line)
    s.closed = True
    s.add(b'ccc', True)
    assert state()==(b'aaabbbccc', 9, True)
    s.add(b'dd')
    assert state()==(b'dd', 2, False)
    for line in (b'eeee', b'ffff', b'gggg'): s.add(line)
    assert state()==(b'ffffgggg', 8, False)
    s.add(b'h'*20)
    assert state()==(b'h'*20, 20, False) # at least one line is kept, however long it is


def test_rows_and_steps_of_a_run(tmp_path):
    "Tested are the latest step, marks and their precedence, superseded rows, and the counts in the metadata."
    t = new_run('Net', 'r', home=tmp_path)
    t.begin({'start': 'then', 'model': 'Net', 'schema': SCHEMA}, {'structure': {'name': 'one'}})
    def row(s, i, **more): return {'mean': float(i), 'module': 'model(Net)', 'ttype': 'output', 'tname': 'output_0', 'step': s, 'call': 0, **more}
    t.mark(epoch=1, fold=2)
    t.mark(epoch=3)
    t({'loss': 1., 'epoch': 7})
    t.unmark('fold')
    t({'loss': 2.})
    t.unmark()
    t.put(lambda: [row(0, 0), row(0, 1, call=1)])
    t.put(lambda: [row(0, 2, supersedes=True)], True)
    assert [r['mean'] for r in t.latest_line_list() if 'mean' in r]==[1., 2.]
    t.put(lambda: [row(1, 3)], True)
    assert t.latest_line_list()==[row(1, 3)]
    t.put(lambda: [row(2, 4)])
    t.put(lambda: [row(2, 5, call=1)]) # this step is still open
    assert [r['mean'] for r in t.latest_line_list()]==[4., 5.]
    assert t.lines()==[{'loss': 1., 'epoch': 7, 'fold': 2}, {'loss': 2., 'epoch': 3}, row(0, 1, call=1), row(0, 2), row(1, 3), row(2, 4), row(2, 5, call=1)]
    t.amend('structure', {'name': 'two'})
    t.put(lambda: [row(3, 6)], True)
    t.barrier()
    assert json.loads((tmp_path/'data/structure_r.json').read_text())=={'name': 'two'}
    t.end(share=.5)
    base = json.loads((tmp_path/'data/base_r.json').read_text())
    assert {k: base[k] for k in ('start', 'model', 'steps', 'rows', 'bytes', 'share', 'pid')}==dict(start='then', model='Net', steps=4, rows=9, share=.5,
        bytes=os.path.getsize(t.log_path), pid=os.getpid())
    again = new_run('Net', 'r', True, tmp_path)
    again.begin({'start': 'now', 'model': 'Other', 'user': 'me', 'schema': SCHEMA}, {})
    again.put(lambda: [row(9, 7)], True)
    again.barrier()
    base = json.loads((tmp_path/'data/base_r.json').read_text())
    assert (base['start'], base['model'], base['user'], *(k in base for k in ('end', 'rows', 'share')))==('then', 'Net', 'me', False, False, False)
    again.end()
    base = json.loads((tmp_path/'data/base_r.json').read_text())
    # the rows of the first process were not counted, so the number is left out
    assert (base['steps'], 'rows' in base, len(again.lines()))==(10, False, 9)
    names = [new_run('Net', home=tmp_path).fname for _ in range(3)]
    assert len({*names})==3 and all(n.startswith('Net_') for n in names)
    assert [r['mean'] for r in last_step([row(2, 0), {'note': 1}, row(5, 1), row(1, 2), row(5, 3), {'step': True}])]==[1., 3.]
    assert emberTracker('r', tmp_path).last_step()==9


def test_lines_that_become_rows():
    "A null becomes NaN or inf, as the counts of its row say. Torn lines are counted, and empty lines are ignored."
    data = b'{"mean": null, "std": null, "nan": 1}\n\n{"mean": null, "std": 1.5, "posinf": 2}\n{"mean": nu\n{"max": null, "neginf": 1, "min": null}\n[1]\n'
    rows,torn = parse(data)
    assert torn==2 and [{k: str(v) for k,v in r.items()} for r in rows]==[{'mean': 'nan', 'std': 'nan', 'nan': '1'},
        {'mean': 'inf', 'std': '1.5', 'posinf': '2'}, {'max': rows[2]['max'].__str__(), 'neginf': '1', 'min': '-inf'}]
    df = with_path(frame([{'shape': [1], 'mean': 1., 'module': 'model(N).a(1)(B).0(D)', 'ts': '', 'ttype': 'output', 'tname': 'output_0', 'step': 0, 'call': 0,
        'mine': 3}]))
    assert [*df.columns]=='shape mean module path ts ttype tname step call nan posinf neginf mine'.split() and df.path[0]=='a(1).0'

    df = with_path(frame([{'module': 'model(N).a(D)', 'ttype': 'output', 'tname': 'output_0', **own} for own in ({}, {'path': 'mine'}, {})]))
    assert df.path.tolist()==['a', 'mine', 'a'] # a row may contain a path of its own
    rows,torn = parse_blocks(lambda: [b'{"a": 1}\n{"a"\n', b'{\n{"a": 2}\n', b'{"a": 3}\n'])
    # rows of all blocks, although a line is torn at a block boundary
    assert ([r['a'] for r in rows], torn)==([1, 2, 3], 2)


def test_which_row_stands_for_a_module_and_which_modules_there_are():
    "A module is represented by its first output row, else input or weight. A tree may be cut to a number of modules."
    rows = [{'module': m, 'ttype': t, 'i': i} for i,(m,t) in enumerate((('a', 'weight'), ('a', 'input'), ('b', 'buffer'), ('a', 'output'), ('a', 'output'),
        ('b', 'weight'), ('b', 'weight'), ('c', 'probe'), ('c', 'x')))]
    assert {m: r['i'] for m,r in row_per_module(rows).items()}=={'a': 3, 'b': 5, 'c': 7}
    tree = {'name': 'm', 'children': [{'name': 'm.a', 'path': 'a', 'children': [{'name': 'm.a.x'}, 3]}, {'name': 'm.b', 'short': 'bee', 'aliases': ['c', 4]}]}
    got = valid_tree(tree)
    assert [(d, n['name'], n['short'], n['path'], n.get('aliases')) for d,n in tree_nodes(got)]==[(0, 'm', 'm', '', None), (1, 'm.a', 'a', 'a', None),
        (2, 'm.a.x', 'x', '', None), (1, 'm.b', 'bee', '', ['c'])]
    assert [n['name'] for _,n in tree_nodes(valid_tree(tree, 3))]==['m', 'm.a', 'm.b']


def test_why_a_parameter_is_not_trained():
    "The first reason that applies is given, for the largest parts of the model that share it."
    def p(path, **known): return dict(dict(path=path, name='weight', requires_grad=True, optimizer=True, gradient=True, called=True), **known)
    why = {frozen: dict(requires_grad=False, optimizer=False, gradient=False, called=False), forgotten: dict(optimizer=False, gradient=False),
        not_called: dict(gradient=False, called=False), cut_off: dict(gradient=False)}
    assert {why_not(p('a', **k)) for k in why.values()}=={*why} and all(why_not(p('a', **k))==w for w,k in why.items())
    assert why_not(p('a')) is why_not(p('a', gradient=None, optimizer=None)) is why_not(p('a', recorded=False, gradient=False)) is None
    assert why_not(p('a', requires_grad=False)) is None # the parameter got a gradient before it was frozen
    some = [p('h.0', **why[frozen]), p('h.1.x', **why[frozen]), p('h.1.y', **why[frozen]), p('h.2'), p('k.0', **why[cut_off]), p('k.1', **why[cut_off]),
        p('u', **why[cut_off], recorded=False)]
    assert untrained(some)==f'Not trained: {frozen}: h.0, h.1; {cut_off}: k.' and untrained([some[3]])==''
    assert untrained(some, some[1:3], most=1)==f'Not trained: {frozen}: h.1.'
    assert untrained(some, most=1)==f'Not trained: {frozen}: h.0 and 1 more; {cut_off}: k.'
    assert untrained([p(f'{i}', **why[frozen]) for i in range(3)])==f'Not trained: {frozen}: all of the model (3 parameters).'
