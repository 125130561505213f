"All files of a run are counted, removed and renamed together, and no other files. A live run and foreign files stay unchanged."
import json
import os
import time
from pathlib import Path
from socket import gethostname

import pytest

from torchember import compact, du, emberTracker, mv, read, rm, runs
from torchember.frames import belongings
from torchember.frames.handle import Home, run_of_metadata
from torchember.store.jsonl import new_run

elsewhere = 'not-'+gethostname()


def line(step, **more): return json.dumps(dict(module='m(Net).f(L)', ttype='output', tname='o', step=step, mean=step/7)|more).encode()+b'\n'


def put(home, name, steps=3, base=None, **kinds):
    "Create a run with a log, a file of the latest step, and metadata. Return the path of the log."
    for d in 'log', 'data': (home/d).mkdir(parents=True, exist_ok=True)
    (home/'log'/name).write_bytes(b''.join(map(line, range(steps))))
    (home/'log'/f'{name}_latest').write_bytes(line(steps-1))
    for kind,x in ({'base': {'start': '2026-01-01 00:00:00', 'schema': 1, 'end': '2026-01-01 00:01:00'}|(base or {})}|kinds).items():
        (home/'data'/f'{kind}_{name}.json').write_text(json.dumps(x))
    return home/'log'/name


def there(home):
    def what(p): return os.readlink(p) if p.is_symlink() else None if p.is_dir() else p.read_bytes()
    return {str(p.relative_to(home)): what(p) for p in sorted(home.rglob('*')) if p.name!='.lock'}


def older(home, name='of_02'):
    "Create a run folder in the format of version 0.2."
    (home/'log'/name).mkdir(parents=True)
    (home/'log'/name/'a.log').write_bytes(b'{"tensor": "output", "mean": 1.0},\n')


# ---- the run that a file belongs to

def test_whose_metadata_it_is(tmp_path):
    "Metadata of torchember's own kinds names its run. Other metadata belongs to the longest matching run name."
    files = 'base_my_net', 'mine_my_net', 'mine_a_net', 'net', 'mine_'
    assert [run_of_metadata(s, {'net', 'my_net'}) for s in files]==['my_net', 'my_net', 'net', None, None]
    assert [run_of_metadata(f'{k}_my_net', {'net'}) for k in ('base', 'structure', 'parameters', 'ranks', 'vis', 'mine')]==['my_net']*5+['net']
    put(tmp_path, 'net', mine={'a': 1}, structure={})
    (tmp_path/'data'/'base_my_net.json').write_text('{"start": 1}') # this file belongs to no run: it has no `schema`
    (tmp_path/'data'/'base_gone.json').write_text('{"schema": 1}') # metadata of a run whose log was removed
    (tmp_path/'data'/'notes_net.txt').write_text('of the user')
    h = Home(tmp_path)
    assert h.names=={'net', 'gone'} and {p.name for p in h.files('net')['metadata']}=={'base_net.json', 'mine_net.json', 'structure_net.json'}
    # base_*.json is removed last, because it makes the run known
    assert [p.name for p in h.files('net')['metadata']][-1]=='base_net.json'
    assert [p.name for p in h.files('gone')['metadata']]==['base_gone.json']


def test_names_that_are_meant(tmp_path):
    "A text that is the name of a run is not used as a pattern. A pattern matches runs first, then single logs."
    for n in ('net', 'net2', 'a.rank10', 'a.rank2', 'a.rank0', 'a.rankx', 'b[1]', 'b1'): put(tmp_path, n)
    h = Home(tmp_path)
    assert h.members('a')==['a.rank0', 'a.rank2', 'a.rank10'] and h.members('a.rank2')==['a.rank2'] and h.members('none')==[]
    assert h.chosen('net')==['net'] and h.chosen('net*')==['net', 'net2'] and h.chosen(['net2', 'net', 'net*'])==['net2', 'net']
    assert h.chosen('a*')==['a', 'a.rankx'] and h.chosen('a.rank1*')==['a.rank10'] and h.chosen('b[1]')==['b[1]']
    assert h.chosen(emberTracker('net', tmp_path))==['net']
    with pytest.raises(FileNotFoundError, match="No run 'nett'.*Did you mean 'net'"): h.chosen('nett')
    with pytest.raises(FileNotFoundError, match='x'): h.chosen('x*')
    with pytest.raises(TypeError, match='a run must be a name, a pattern'): h.chosen(3)
    with pytest.raises(ValueError, match='net is a run in .*Give the folder with the run as home='): h.chosen(emberTracker('net', tmp_path/'other'))


# ---- sizes of runs

def test_how_much(tmp_path):
    "The bytes of each kind of file are counted, with the largest run first. A link does not count."
    put(tmp_path, 'small')
    for r in range(2): put(tmp_path, f'many.rank{r}', 40)
    put(tmp_path, 'cut', 20, structure={'a': 1})
    compact('cut', tmp_path)
    (tmp_path/'log'/'cut_latest').unlink()
    (tmp_path/'log'/'cut_latest').symlink_to('small')
    older(tmp_path)
    got = du(home=tmp_path)
    def size(*names): return sum(os.lstat(tmp_path/n).st_size for n in names)
    parts = [*(tmp_path/'log'/'cut.parts').iterdir()]
    want = {'small': (1, 3, size('log/small'), 0, size('log/small_latest'), size('data/base_small.json')),
        'many': (2, 6, size('log/many.rank0', 'log/many.rank1'), 0, 2*size('log/many.rank0_latest'), 2*size('data/base_many.rank0.json')),
        'cut': (1, 3+len(parts), 0, size(*parts), 0, size('data/base_cut.json', 'data/structure_cut.json')), 'of_02': (1, 0, size('log/of_02/a.log'), 0, 0, 0)}
    assert {r.name: (r.ranks, r.files, r.log, r.parts, r.latest, r.metadata) for r in got.itertuples(index=False)}==want
    assert got['size'].tolist()==sorted((sum(w[2:]) for w in want.values()), reverse=True) and got.index.tolist()==[0, 1, 2, 3]
    assert du('s*', tmp_path)['name'].tolist()==['small'] and len(du(home=tmp_path/'none'))==0
    with pytest.raises(FileNotFoundError): du('smal', tmp_path/'none')


# ---- runs that must not be changed

refused = {
    'a link': (lambda p: p.symlink_to('good'), OSError, 'is a symbolic link, not a log file of torchember'),
    'a link that leads nowhere': (lambda p: p.symlink_to('nowhere'), OSError, 'is a symbolic link, not a log file of torchember'),
    'a run of 0.2': (lambda p: older(p.parents[1], p.name), OSError, 'was written by torchember 0.2'),
    'a part that is a folder': (lambda p: (put(p.parents[1], p.name), (p.parent/f'{p.name}.parts'/'x').mkdir(parents=True)),
        OSError, 'does not belong to a run'),
    'a part that is a link': (lambda p: (put(p.parents[1], p.name), (q := p.parent/f'{p.name}.parts').mkdir(), (q/'x').symlink_to(p)),
        OSError, 'x does not belong to a run'),
    'a folder': (lambda p: ((p.parents[1]/'data'/f'base_{p.name}.json').write_text('{"schema": 1}'), p.mkdir()), OSError,
        'is not a file, so it cannot be a log'),
    'ours': (lambda p: put(p.parents[1], p.name, base={'pid': os.getpid(), 'host': gethostname(), 'end': None}), ValueError, r'by this process.*te\.close'),
    'of a process that runs': (lambda p: put(p.parents[1], p.name, base={'pid': os.getppid(), 'host': gethostname(), 'end': None}), ValueError,
        f'by process {os.getppid()} on this machine'),
    'of another machine': (lambda p: put(p.parents[1], p.name, base={'pid': 7, 'host': elsewhere, 'end': None}), ValueError,
        f'still being written, or its process has crashed: the run was started on {elsewhere}.*10 minutes after')}


def drop_end(home):
    "Remove the key `end` from metadata in which it is None."
    for p in (home/'data').glob('base_*.json'): p.write_text(json.dumps({k: v for k,v in json.loads(p.read_text()).items() if v is not None}))


@pytest.mark.parametrize('which', refused)
def test_what_is_left_alone(tmp_path, which):
    "If one of the named runs must not be changed, none of them is changed, and the error gives the reason."
    make,error,said = refused[which]
    put(tmp_path, 'good')
    make(tmp_path/'log'/'w')
    drop_end(tmp_path)
    was = there(tmp_path)
    for act in (lambda: rm('w', tmp_path), lambda: rm(['good', 'w'], tmp_path), lambda: rm('*', tmp_path), lambda: mv('w', 'new', tmp_path)):
        with pytest.raises(error, match=said): act()
        assert there(tmp_path)==was


def test_one_of_several_processes_is_still_written(tmp_path):
    for r in range(2): put(tmp_path, f'a.rank{r}', base={} if r==0 else {'pid': os.getpid(), 'host': gethostname(), 'end': None})
    drop_end(tmp_path)
    was = there(tmp_path)
    for act in (lambda: rm('a', tmp_path), lambda: mv('a', 'b', tmp_path)):
        with pytest.raises(ValueError, match=r"a\.rank1'? is still being written by this process"): act()
    assert there(tmp_path)==was


@pytest.mark.parametrize('how', ['it was long ago', 'it has ended', 'its log is gone', 'it says of no process', 'of a process here that is gone'])
def test_what_is_not_written_any_more(tmp_path, how, capsys):
    "A process may have ended without noting its end. After ten minutes without rows, its run can be removed."
    who = {'pid': 2**31-2, 'host': gethostname()} if how=='of a process here that is gone' else {'pid': 7, 'host': elsewhere}
    log = put(tmp_path, 'w', base=who|({'end': None} if how!='it has ended' else {}))
    drop_end(tmp_path)
    if how=='it was long ago': os.utime(log, (time.time()-601,)*2)
    if how=='its log is gone': log.unlink()
    if how=='it says of no process': (tmp_path/'data'/'base_w.json').write_text('{"schema": 1}')
    assert rm('w', tmp_path)['name'].tolist()==['w'] and not any(there(tmp_path)[f] for f in there(tmp_path))


def test_just_under_ten_minutes(tmp_path):
    os.utime(put(tmp_path, 'w', base={'pid': 7, 'host': elsewhere, 'end': None}), (time.time()-590,)*2)
    drop_end(tmp_path)
    with pytest.raises(ValueError, match='the last rows were written 59. s ago'): rm('w', tmp_path)


# ---- removing runs

def test_all_of_it_goes_and_nothing_else(tmp_path, capsys):
    "All files of all ranks are removed, and runs with similar names stay. The base metadata is removed last."
    keep = 'a', 'net2', 'my_net', 'net.rank', 'net.rank1x'
    for n in keep: put(tmp_path, n, vis={})
    was = there(tmp_path)
    for r in range(2): put(tmp_path, f'net.rank{r}', vis={}, mine={'r': r})
    compact('net', tmp_path, keep=True)
    files,order,unlink = [p for p in tmp_path.rglob('net.rank[01]*') if p.is_file()],[],Path.unlink
    files += [p for p in tmp_path.glob('log/net.rank[01].parts/*')]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Path, 'unlink', lambda p, **how: (order.append(p), unlink(p, **how))[1])
        size = int(du('net', tmp_path)['size'][0])
        got = rm('net', tmp_path)
    assert there(tmp_path)==was and got[['name', 'ranks', 'size']].values.tolist()==[['net', 2, size]]
    assert capsys.readouterr().out==f'removed net: {got["files"][0]} files, {size:,} bytes\n'
    kind = ['parts' if p.parent.suffix=='.parts' else 'base' if p.name.startswith('base_') else 'metadata' if p.parent.name=='data' else
        'latest' if p.name.endswith('_latest') else 'log' for p in order]
    assert list(dict.fromkeys(kind))==['parts', 'latest', 'log', 'metadata', 'base'] and kind==sorted(kind, key=list(dict.fromkeys(kind)).index)


def test_removing_was_cut_short(tmp_path, monkeypatch, capsys):
    "Removal is interrupted at any file. The rest is still listed as a run, and can be removed later."
    unlink = Path.unlink
    for n in range(20):
        put(tmp_path, 'net', 20, vis={}, structure={})
        compact('net', tmp_path, keep=True)
        left = [n]
        def cut(p, left=left, **how):
            left[0] -= 1
            if left[0]<0: raise KeyboardInterrupt
            unlink(p)
            unlink(p, **how) # the second call meets a file that is already gone
        with monkeypatch.context() as m:
            m.setattr(Path, 'unlink', cut)
            try: rm('net', tmp_path)
            except KeyboardInterrupt: assert 'net' in runs(tmp_path)['name'].tolist() and du('net', tmp_path)['files'][0]
            else: break
        rm('net', tmp_path)
        assert not any(there(tmp_path)[f] is not None for f in there(tmp_path)), n
    assert 6<n<19


def test_a_name_is_free_again(tmp_path, capsys):
    "A removed or renamed run leaves its name free, also in the same process. The rows of a new run are counted correctly."
    for change in (lambda n: rm('net', tmp_path), lambda n: mv('net', f'was{n}', tmp_path)):
        for n in (3, 5):
            t = new_run('Net', 'net', home=tmp_path)
            for s in range(n): t + dict(module='m(Net)', ttype='output', tname='o', step=s, mean=1., note='x'*n)
            t.close()
            assert runs(tmp_path).set_index('name').loc['net', 'rows']==n
            change(n)
    assert sorted(runs(tmp_path)['name'])==['was3', 'was5']


# ---- renaming runs

@pytest.mark.parametrize('ranks', [0, 2])
def test_all_of_it_is_called_otherwise(tmp_path, ranks):
    "Log, parts and metadata are renamed, and reading gives the same table. The kind `vis` of metadata is not renamed."
    names = [f'vis.rank{r}' for r in range(ranks)] or ['vis']
    for i,n in enumerate(names): put(tmp_path, n, 20+i, vis={'v': i}, my_vis={'m': i}, base={'model': f'M{i}'})
    put(tmp_path, 'vis2')
    compact('vis', tmp_path, keep=True)
    with (tmp_path/'log'/names[0]).open('ab') as f: f.write(line(99))
    before,table = there(tmp_path),read('vis', home=tmp_path, per_rank=bool(ranks))
    assert mv('vis', 'new', tmp_path)=='new'
    def called(f):
        for d,a,b in ('log/', '', ''), ('data/base_', '', ''), ('data/vis_', '', ''), ('data/my_vis_', '', ''):
            if f.startswith(f'{d}{a}vis') and not f.startswith((f'{d}vis2', f'{d}vis_')) or f.startswith(f'{d}vis_latest'): return f'{d}new{b}{f[len(d)+3:]}'
        return f
    assert there(tmp_path)=={called(f): x for f,x in before.items()} and read('new', home=tmp_path, per_rank=bool(ranks)).equals(table)
    assert sorted(runs(tmp_path)['name'])==['new', 'vis2']


def test_it_is_known_at_any_moment(tmp_path, monkeypatch):
    "During renaming, the metadata exists under both names until the log has its new name."
    put(tmp_path, 'net', vis={})
    rename,seen = os.rename,[]
    monkeypatch.setattr(belongings.os, 'rename', lambda a, b: (seen.append({p.name for p in (tmp_path/'data').iterdir()}), rename(a, b)))
    mv('net', 'new', tmp_path)
    assert seen==[{f'{k}_{n}.json' for k in ('base', 'vis') for n in ('net', 'new')}]
    assert {p.name for p in (tmp_path/'data').iterdir()}=={'base_new.json', 'vis_new.json'}


taken = {'a log': lambda h: put(h, 'new'), 'a latest step': lambda h: (h/'log'/'new_latest').write_bytes(b''), 'parts': lambda h: (h/'log'/'new.parts').mkdir(),
    'metadata': lambda h: (h/'data'/'vis_new.json').write_text('{}'), 'base': lambda h: (h/'data'/'base_new.json').write_text('{"schema": 1}'),
    'a link': lambda h: (h/'log'/'new').symlink_to('nowhere'), 'a run of several processes': lambda h: put(h, 'new.rank3'),
    'a run of 0.2': lambda h: older(h, 'new'), 'a run that has no row yet': lambda h: new_run('Net', 'new', home=h)}


@pytest.mark.parametrize('by', taken)
def test_a_name_that_is_taken(tmp_path, by):
    put(tmp_path, 'net')
    t = taken[by](tmp_path)
    was = there(tmp_path)
    with pytest.raises(FileExistsError, match="name 'new' is already used.*Choose another name") as e: mv('net', 'new', tmp_path)
    assert ("rm('new')" in str(e.value))==(by not in ('a latest step', 'metadata', 'a run that has no row yet'))
    assert there(tmp_path)==was
    if hasattr(t, 'close'): t.close()


@pytest.mark.parametrize('name, error, said', [('a/b', ValueError, 'separator'), ('', ValueError, 'not empty'), (3, ValueError, 'not empty'),
    ('x'*195, ValueError, 'longer'), ('x_latest', ValueError, '_latest'), ('a.rank0', FileExistsError, 'already used')])
def test_names_that_a_run_cannot_have(tmp_path, name, error, said):
    "The new name must also be valid for the longer names of the logs of single ranks."
    for r in range(2): put(tmp_path, f'net.rank{r}')
    put(tmp_path, 'a.rank0')
    was = there(tmp_path)
    with pytest.raises(error, match=said): mv('net', name, tmp_path)
    assert there(tmp_path)==was


def test_one_run_has_one_name(tmp_path):
    for n in ('net', 'net2'): put(tmp_path, n)
    with pytest.raises(ValueError, match=r"mv takes one run, but 'net\*' matches 2: net, net2"): mv('net*', 'new', tmp_path)
    with pytest.raises(FileExistsError, match=r"remove that run: rm\('net2'\)"): mv('net', 'net2', tmp_path)
    with pytest.raises(FileExistsError): mv('net', 'net', tmp_path)
