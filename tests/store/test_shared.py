"The logs of many ranks share Parquet files of a few steps each. Each log keeps all its rows, for each reader and at any time."
import json
import os
import random
import shutil
import socket

import fsspec
import pytest
from torchember import compact, du, mv, read, rm, runs, scan, sync
from torchember.frames import chunks, listing
from torchember.show.board.some_steps import RunOfSelectedSteps
from torchember.store import compaction, parts, shared
from torchember.store.log_file import last_step_of
from torchember.store.parts import Part, blocks_of_run, part_file, read_part_list, summarize_parts

# ignore warnings about torn lines, different marks, and ranks that begin late
pytestmark = pytest.mark.filterwarnings('ignore::torchember.ground.messages.EmberWarning')


def row(rank, step, i, /, **more):
    "Return a row as an ember writes it."
    return dict(shape=[4, 2], module=f'net(Net).l{i}(Linear)', ttype='output', tname='output_0', step=step, call=0, dtype='float32',
        mean=rank+step+i/7, std=1., rank=0, part='dp:B')|more

def odd(g, rank, step, i):
    "Return random changes of a row, in some cases only."
    return g.choice([{}, {}, {}, {}, dict(mean=rank), dict(std=None), dict(nan=2), dict(step=max(step-1, 0), supersedes=True), dict(step=None),
        dict(note=[1, 2.5]), dict(note='x'),
        dict(note=True), dict(big=2**60), dict(big=.5)]) if g.random()<.3 else {}

def written(home, ranks=12, steps=12, tensors=3, name='a', plain=False, seed=0):
    "Write the logs of a finished run. Return their paths."
    g = random.Random(seed)
    (home/'log').mkdir(parents=True, exist_ok=True)
    (home/'data').mkdir(exist_ok=True)
    for r in range(ranks):
        lines = [json.dumps(row(r, s, i, **({} if plain else odd(g, r, s, i)))) for s in range(0 if plain else r%3, steps) for i in range(tensors)]
        lines = [{k: v for k,v in json.loads(line).items() if k!='step' or v is not None} for line in lines]
        lines = [json.dumps(line) for line in lines]
        if not plain and r%5==0: lines.insert(g.randrange(len(lines)), '{"torn')
        (home/'log'/f'{name}.rank{r}').write_text(''.join(f'{line}\n' for line in lines) if plain or r!=4 else '')
        (home/'data'/f'ranks_{name}.rank{r}.json').write_text(json.dumps(dict(rank=r, world=ranks, axes=dict(dp=list(range(ranks))))))
    return [home/'log'/f'{name}.rank{r}' for r in range(ranks)]

@pytest.fixture(autouse=True)
def small(monkeypatch):
    "Reduce the sizes of windows, row groups and files, so that few rows need several of them."
    for where,k,v in [(shared, 'window_rows', 150), (shared, 'file_rows', 90), (shared, 'group_rows', 40), (shared, 'most_logs', 6),
            (compaction, 'most_rows', 17), *((m, 'many_logs', 8) for m in (parts, shared, listing))]:
        monkeypatch.setattr(where, k, v)

def texts(path):
    "Return the rows of a log as text, and the number of torn lines."
    got = [(b.parsed() if not isinstance(b, bytes) else parts_of_lines(b)) for b in blocks_of_run(path)]
    return json.dumps([r for rows,_ in got for r in rows]), sum(torn for _,torn in got)

def parts_of_lines(data):
    rows,torn,_ = compaction.parse_before_step(data, None)
    return rows, torn

def shared_in(home): return sorted(home.glob('log/*/steps-*.parquet'))

def in_shared(paths): return [any('holder' in p for p in (read_part_list(p) or dict(parts=[]))['parts']) for p in paths]


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(4))
def test_each_log_keeps_each_row(tmp_path, seed):
    "Order, values and numbers of torn lines are the same as before, for readers of one log and of all logs."
    paths = written(tmp_path, seed=seed)
    before,whole,each = [texts(p) for p in paths], read('a', home=tmp_path), read('a', home=tmp_path, per_rank=True)
    steps = [last_step_of(p) for p in paths]
    wanted = scan('a', 'arrow', home=tmp_path).to_table()
    compact('a', home=tmp_path)
    assert sum(in_shared(paths))==11 and len(shared_in(tmp_path))>2 and not list(tmp_path.glob('log/*/part-*'))
    assert [texts(p) for p in paths]==before
    assert [last_step_of(p) for p in paths]==steps and [summarize_parts(p)['rows'] for p in paths]==[len(json.loads(rows)) for rows,_ in before]
    again = read('a', home=tmp_path)
    assert again.to_csv()==whole.to_csv() and list(again)==list(whole) and again.attrs==whole.attrs
    assert read('a', home=tmp_path, per_rank=True).to_csv()==each.to_csv()
    got = scan('a', 'arrow', home=tmp_path).to_table()
    assert sorted(map(repr, got.to_pylist()))==sorted(map(repr, wanted.to_pylist())) and got.schema.names==wanted.schema.names

def test_steps_of_a_log_go_back(tmp_path):
    "Step numbers go back, as in a run that was resumed from a checkpoint. The rows keep their order."
    paths = written(tmp_path, plain=True)
    for p in paths[:5]: p.write_text(p.read_text()+''.join(json.dumps(row(0, s, 0, mean=-1.))+'\n' for s in (3, 4, 5, 20)))
    before = [texts(p) for p in paths]
    compact('a', home=tmp_path)
    assert all(in_shared(paths)) and [texts(p) for p in paths]==before

@pytest.mark.release
def test_some_steps_are_read_from_some_groups_of_each_file(tmp_path, monkeypatch):
    "Each shared file is opened only once, and not once per log."
    monkeypatch.setattr(chunks, 'most_merged', 150)
    monkeypatch.setattr(shared, 'file_rows', 400)
    paths = written(tmp_path, ranks=12, steps=60, plain=True)
    compact('a', home=tmp_path)
    wanted,opened,groups = read('a', home=tmp_path), [], []
    first = Part.__init__
    def init(self, path, abouts, steps=None, skip=0):
        first(self, path, abouts, steps, skip)
        if len(abouts)>1: opened.append(path); groups.append(len(self.groups)/len(self.about.rows))
    monkeypatch.setattr(Part, '__init__', init)
    rows = scan('a', 'arrow', home=tmp_path)
    assert len(rows.pruned.chunks)>5 and not opened
    got = rows.to_table()
    assert got['mean'].to_pylist()==wanted['mean'].tolist() and got['step'].to_pylist()==wanted['step'].tolist()
    assert len(opened)<=4*len(rows.pruned.chunks)+4 and sum(groups)/len(groups)<.6, (len(opened), len(rows.pruned.chunks), sum(groups)/len(groups))
    shares = []
    for path in paths: # one log reads only those row groups of a shared file that contain its rows
        told = read_part_list(path)
        one = parts.open_part(path, told['parts'][0], told['id'])
        assert one.rows==told['parts'][0]['rows']
        shares.append(len(one.groups)/len(one.about.rows))
    assert max(shares)<=.5 and sum(shares)/len(shares)<.4, shares
    opened.clear()
    assert read('a', home=tmp_path)['mean'].tolist()==wanted['mean'].tolist()
    assert sorted(opened)==shared_in(tmp_path) # each file is opened once

@pytest.mark.parametrize('when', ['writing', 'lists', 'last list', 'removing'])
def test_who_is_stopped_in_between_loses_nothing(tmp_path, monkeypatch, when):
    "After an interruption at any point, all rows can be read, and the next compaction finishes."
    paths = written(tmp_path)
    before,whole = [texts(p) for p in paths], read('a', home=tmp_path)
    calls = []
    def stopped(f, at):
        def call(*args, **more):
            calls.append(1)
            if len(calls)==at: raise KeyboardInterrupt
            return f(*args, **more)
        return call
    with monkeypatch.context() as m:
        if when=='writing': m.setattr(shared.SharedFiles, 'write_file', stopped(shared.SharedFiles.write_file, 2))
        elif when=='removing': m.setattr(shared, 'sync_part_list', stopped(shared.sync_part_list, 3))
        else: m.setattr(shared, 'write_part_list', stopped(shared.write_part_list, 1 if when=='lists' else 4))
        with pytest.raises(KeyboardInterrupt): compact('a', home=tmp_path)
    assert [texts(p) for p in paths]==before and read('a', home=tmp_path).to_csv()==whole.to_csv()
    monkeypatch.setattr(shared, 'many_logs', 2)
    compact('a', home=tmp_path)
    assert sum(in_shared(paths))==11 and [texts(p) for p in paths]==before and read('a', home=tmp_path).to_csv()==whole.to_csv()
    named = {str(part_file(p, part)) for p in paths if read_part_list(p) for part in read_part_list(p)['parts']}
    assert {str(f) for f in tmp_path.glob('log/*/*.parquet')}=={str(f) for f in map(str, named)} and not list(tmp_path.glob('log/*/.torchember-*'))

def test_more_rows_come_later(tmp_path):
    "A compacted run gets more rows, and is compacted again."
    paths = written(tmp_path)
    compact('a', home=tmp_path)
    for r,p in enumerate(paths): p.write_text(''.join(json.dumps(row(r, s, 0))+'\n' for s in range(12, 15)))
    before,whole = [texts(p) for p in paths], read('a', home=tmp_path)
    assert whole['step'].max()==14
    n = len(shared_in(tmp_path))
    compact('a', home=tmp_path)
    assert len(shared_in(tmp_path))>n and all(in_shared(paths)) and [texts(p) for p in paths]==before and read('a', home=tmp_path).to_csv()==whole.to_csv()
    compact('a', home=tmp_path) # a second compaction has nothing to do
    assert [texts(p) for p in paths]==before

@pytest.mark.release
def test_lines_may_stay(tmp_path):
    "With keep=True, the lines stay beside the Parquet files."
    paths = written(tmp_path)
    before,sizes = [texts(p) for p in paths], [p.stat().st_size for p in paths]
    compact('a', home=tmp_path, keep=True)
    assert sum(in_shared(paths))==11 and [texts(p) for p in paths]==before and [p.stat().st_size for p in paths]==sizes
    with paths[1].open('a') as f: f.write(json.dumps(row(1, 99, 0))+'\n')
    assert read('a', home=tmp_path)['step'].max()==99
    compact('a', home=tmp_path)
    assert not sum(p.stat().st_size for p in paths) and read('a', home=tmp_path)['step'].max()==99 and [texts(p) for p in paths[2:]]==before[2:]

@pytest.mark.parametrize('rank', [0, 1])
def test_somebody_else_writes_parts_meanwhile(tmp_path, monkeypatch, rank):
    "Another process writes parts during the compaction. This raises an error, and its parts are kept."
    paths = written(tmp_path, plain=True)
    for p in paths: compaction.convert_to_parts(p)
    asked = []
    def more(path, told):
        asked.append(path)
        if len(asked)==len(paths):
            paths[rank].write_text(json.dumps(row(rank, 77, 0))+'\n')
            compaction.convert_to_parts(paths[rank])
        return True
    with monkeypatch.context() as m:
        m.setattr(shared, 'has_steps', more)
        with pytest.raises(BlockingIOError, match='was changed by another process. Call compact again'): shared.share_parts(paths)
    assert read('a', home=tmp_path)['step'].max()==77
    lock = compaction.lock_folder(parts.folder_of(paths[rank]))
    with lock, pytest.raises(BlockingIOError, match='is being written by another process'): shared.share_parts(paths)
    before = [texts(p) for p in paths]
    monkeypatch.setattr(shared, 'many_logs', 1)
    shared.share_parts(paths)
    assert all(in_shared(paths)) and [texts(p) for p in paths]==before and read('a', home=tmp_path)['step'].max()==77

def test_lists_change_while_a_log_is_read(tmp_path):
    "The files are shared while a log is being read. The reader still gets each row once."
    paths = written(tmp_path, plain=True)
    before = [texts(p) for p in paths]
    for p in paths: compaction.convert_to_parts(p)
    reading = [blocks_of_run(p) for p in paths]
    got = [[next(b).parsed()[0] for _ in range(r%3)] for r,b in enumerate(reading)]
    shared.share_parts(paths)
    assert all(in_shared(paths))
    for r,(b,some) in enumerate(zip(reading, got, strict=True)):
        some += [p.parsed()[0] for p in b]
        assert json.dumps([x for rows in some for x in rows])==before[r][0]

def test_the_board_reads_some_steps(tmp_path):
    "From shared files, the board reads the same rows of some steps as from lines."
    paths = written(tmp_path, plain=True)
    def some(): return [(r['step'], r['mean']) for r in RunOfSelectedSteps(paths[3].name, tmp_path, [2, 9]).lines()]
    before = some()
    compact('a', home=tmp_path)
    assert in_shared(paths)[3] and some()==before and {s for s,_ in before}=={2, 9}

def test_a_file_of_another_run_is_noticed(tmp_path):
    "A shared file is replaced by a file of another run. This is an error, also if the old file was already known."
    for n in 'ab': written(tmp_path, name=n, plain=True)
    compact('*', home=tmp_path)
    assert len(read('a', home=tmp_path))
    files = [f for f in shared_in(tmp_path) if f.parent.name=='a.rank0.parts']
    shutil.copy(tmp_path/'log'/'b.rank0.parts'/files[0].name, files[0])
    for ask in (lambda: read('a', home=tmp_path), lambda: read('a', home=tmp_path, per_rank=True), lambda: scan('a', 'arrow', home=tmp_path)):
        with pytest.raises(ValueError, match='part of another run'): ask()
    files[0].write_bytes(files[0].read_bytes()[:-100])
    with pytest.raises(ValueError, match='not a valid Parquet file of torchember.compact'): read('a', home=tmp_path)
    files[0].unlink()
    with pytest.raises(FileNotFoundError, match='was removed while the run was read'): read('a', home=tmp_path)

def test_the_rows_of_a_log_that_is_gone_are_not_read(tmp_path):
    "Rows of a removed log are not read, although the shared files still contain them."
    for name in 'ab':
        paths = written(tmp_path/name)
        if name=='a': compact('a', home=tmp_path/name)
        paths[2].unlink()
        shutil.rmtree(parts.folder_of(paths[2]), ignore_errors=True)
    assert in_shared([tmp_path/'a'/'log'/'a.rank3'])==[True]
    assert read('a', home=tmp_path/'a').to_csv()==read('a', home=tmp_path/'b').to_csv()
    assert read('a', home=tmp_path/'a', per_rank=True).to_csv()==read('a', home=tmp_path/'b', per_rank=True).to_csv()

def test_what_belongs_to_a_run(tmp_path):
    "Shared files are moved and removed with the whole run. A single log cannot be moved or removed."
    paths = written(tmp_path, plain=True)
    compact('a', home=tmp_path)
    whole,size = read('a', home=tmp_path), sum(f.stat().st_size for f in tmp_path.glob('log/*/*.parquet'))
    assert int(du('a', tmp_path)['parts'][0])>=size and runs(tmp_path)['rows'].tolist()==[12*3*12]
    for f in (lambda: rm('a.rank3', tmp_path), lambda: mv('a.rank0', 'b', tmp_path), lambda: rm(['a.rank3', 'a.rank0'], tmp_path)):
        with pytest.raises(ValueError, match='Give the name of the whole run'): f()
    assert size-36<sum(summarize_parts(p)['size'] for p in paths)<=size
    mv('a', 'new', tmp_path)
    assert read('new', home=tmp_path).to_csv()==whole.to_csv()
    rm('new', tmp_path)
    assert not list(tmp_path.glob('log/*')) and not list(tmp_path.glob('data/*'))

def test_it_is_read_elsewhere(tmp_path):
    "A copy on another store gives the same rows. Each shared file is sent once."
    paths = written(tmp_path)
    compact('a', home=tmp_path)
    whole = read('a', home=tmp_path)
    there = f'memory://shared{tmp_path.name}'
    first = sync('a', there, home=tmp_path)
    assert read('a', home=there).to_csv()==whole.to_csv()
    again = sync('a', there, home=tmp_path)
    assert sum(r['sent'] for r in first)>12 and not sum(r['sent'] for r in again)
    sent = fsspec.filesystem('memory').glob(f'{there}/log/*/steps-*')
    assert sorted(f.split('/log/')[1] for f in sent)==[str(f.relative_to(tmp_path/'log')) for f in shared_in(tmp_path)]
    assert sum(r['bytes'] for r in first)<1.5*sum(f.stat().st_size for f in tmp_path.rglob('*') if f.is_file())
    one = f'memory://one{tmp_path.name}' # syncing one log also copies the shared files that it needs
    sync('a.rank3', one, home=tmp_path)
    assert read('a.rank3', home=one).to_csv()==read('a.rank3', home=tmp_path).to_csv()
    for p in paths[:3]: p.write_text(json.dumps(row(0, 40, 0))+'\n')
    sync('a', there, home=tmp_path)
    assert read('a', home=there).to_csv()==read('a', home=tmp_path).to_csv()!=whole.to_csv()

def test_a_list_that_makes_no_sense(tmp_path):
    "An invalid list of parts raises an error."
    path = written(tmp_path, plain=True)[3]
    compact('a', home=tmp_path)
    f = parts.folder_of(path)/'parts.json'
    whole = f.read_text()
    for k,v in dict(holder='a.rank0', whole=None).items():
        told = json.loads(whole)
        told['parts'][0][k] = v
        f.write_text(json.dumps(told))
        with pytest.raises(ValueError, match='is not the list of Parquet files that compact writes'): read('a', home=tmp_path)

def test_a_run_that_goes_on_keeps_its_own_parts(tmp_path):
    "Parts of a live run are not shared, because its process will write more of them."
    paths = written(tmp_path, plain=True)
    (tmp_path/'data'/'base_a.rank5.json').write_text(json.dumps(dict(schema=1, pid=os.getpid(), host=socket.gethostname(), start='2026-01-01 00:00:00')))
    compact('a', home=tmp_path)
    assert not any(in_shared(paths)) and len(read_part_list(paths[0])['parts'])>1

def test_few_logs_or_odd_steps_stay_as_they_are(tmp_path):
    written(tmp_path, ranks=7)
    compact('a', home=tmp_path)
    paths = written(tmp_path, name='b', plain=True)
    for p,step in zip(paths[:6], ['last', 2**70, .5]*2, strict=True): p.write_text(p.read_text()+json.dumps(row(0, 0, 0, step=step))+'\n')
    before = [texts(p) for p in paths]
    compact('b', home=tmp_path)
    assert not shared_in(tmp_path) and [texts(p) for p in paths]==before

def test_a_window_has_its_steps_alone(tmp_path):
    "Each window of steps is separate, also if logs have different numbers of rows per step, or end early."
    paths = written(tmp_path, plain=True, steps=40)
    for r,p in enumerate(paths): p.write_text(''.join(f'{line}\n' for line in p.read_text().splitlines()[:50+6*r] for _ in range(r%4+1)))
    for p in paths: compaction.convert_to_parts(p)
    files = shared.SharedFiles(some := [shared.LogRows(p, read_part_list(p), i) for i,p in enumerate(paths)], tmp_path, [])
    found = []
    for log in some: log.begin(files.table)
    for window in shared.windows(some, 200):
        tables = [t for log,n in zip(some, window, strict=True) for t in log.take(n)]
        steps = [s for t in tables for s in t['step'].to_pylist()]
        assert not found or min(steps)>found[-1][1]
        assert [n for t in tables for n in t[files.log].to_pylist()]==sorted(n for t in tables for n in t[files.log].to_pylist())
        found.append((min(steps), max(steps), len(steps)))
    assert sum(n for *_,n in found)==sum(len(json.loads(texts(p)[0])) for p in paths) and len(found)>5 and max(n for *_,n in found)<600
