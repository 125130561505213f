"A run is copied to another place: to memory, and to an S3 server in its own process, which is killed during the copy."
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pandas as pd
import pytest

from torchember import compact, du, mv, read, rm, runs, sync
from torchember.frames.handle import Home
from torchember.frames import moving
from torchember.frames.moving import SyncState, LogCopy, Target, sync_runs
from torchember.store import compaction
from torchember.store.base import write_meta

pytest.importorskip('upath')


def lines(steps, rows=20, width=0):
    "Return lines of rows of these steps, as an ember writes them."
    return b''.join(json.dumps(dict(mean=s/7+i, std=1., shape=[3, i], module=f'model(Net).l{i}(Linear)', ts='2020-02-15 13:44:48', ttype='output',
        tname='output_0', step=s, call=0, dtype='float32', note='x'*width)).encode()+b'\n' for s in steps for i in range(rows))

def add(home, name, data):
    path = Path(home)/'log'/name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'ab') as f: f.write(data)

def begin(home, name, **more):
    write_meta(Path(home)/'data'/f'base_{name}.json', dict(start='2020-02-15 13:44:48', schema=1, pid=os.getpid(), host=socket.gethostname(), **more))

def end(home, name): begin(home, name, end='2020-02-15 14:44:48')

def same(name, home, url): pd.testing.assert_frame_equal(read(name, home=home), read(name, home=url))

@pytest.fixture
def url(request):
    from fsspec.implementations.memory import MemoryFileSystem
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = ['']
    yield 'memory://there'
    MemoryFileSystem.store.clear()

def there(url='memory://there'):
    from fsspec.implementations.memory import MemoryFileSystem
    return {k.removeprefix('/there/'): f.getvalue() for k,f in MemoryFileSystem.store.items()}

class Sent(Target):
    "A target of a copy that keeps the written files, and may fail at one of them."
    def __init__(self, *args, fail=-1, after=lambda: None, **kwargs):
        super().__init__(*args, **kwargs)
        self.written,self.fail,self.after = [],fail,after

    def write(self, path, piece):
        if len(self.written)==self.fail: raise PermissionError('no more')
        super().write(path, piece)
        self.written.append((path.name, piece.size))
        self.after()

    def remove(self, rel):
        super().remove(rel)
        self.after()


def test_a_small_run_is_there_byte_for_byte(tmp_path, url):
    add(tmp_path, 'a', lines(range(3)))
    end(tmp_path, 'a')
    write_meta(tmp_path/'data'/'structure_a.json', {'name': 'model(Net)'})
    (tmp_path/'log'/'a_latest').write_bytes(lines([2]))
    add(tmp_path, 'ab', lines(range(1)))
    said, = sync('a', url, home=tmp_path)
    here = {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob('*') if p.is_file() and p.name!='ab' and p.name[0]!='.'}
    got = there()
    manifest = json.loads(got.pop('data/sync_a.json'))
    assert got==here and set(here)=={'log/a', 'log/a_latest', 'data/base_a.json', 'data/structure_a.json'}
    assert {k: f['size'] for k,f in manifest['files'].items()}=={k: len(v) for k,v in here.items()}
    assert said==dict(name='a', files=4, size=sum(map(len, here.values())), sent=4, bytes=sum(map(len, here.values())), over=True)
    assert sync('a', url, home=tmp_path)[0]['sent']==0
    assert runs(url).drop(columns='size').equals(runs(tmp_path).query('name=="a"').reset_index(drop=True).drop(columns='size'))


def test_processes_of_a_run_go_together(tmp_path, url):
    for r in range(2): add(tmp_path, f'w.rank{r}', lines(range(2)))
    add(tmp_path, 'other', lines(range(2)))
    assert [s['name'] for s in sync('w', url, home=tmp_path)]==['w.rank0', 'w.rank1']
    assert [s['name'] for s in sync('*', url, home=tmp_path)]==['other', 'w.rank0', 'w.rank1']
    same('w', tmp_path, url)


@pytest.fixture
def tiny(monkeypatch):
    "Reduce the sizes of parts to some kB."
    for module in (moving, compaction): monkeypatch.setattr(module, 'most_bytes', 1<<17)
    monkeypatch.setattr(moving, 'least', 1<<11)
    monkeypatch.setattr(moving, 'small', 1<<13)
    monkeypatch.setattr(moving, 'together', 4)

@pytest.mark.slow
def test_a_run_that_goes_on_is_whole_at_every_moment(tmp_path, url, tiny):
    begin(tmp_path, 'a')
    seen = [0]
    def look():
        try: df = read('a', home=url)
        except FileNotFoundError:
            assert seen==[0]
            return
        assert len(df)>=seen[0] and df.step.is_monotonic_increasing
        pd.testing.assert_frame_equal(df, whole.iloc[:len(df)].reset_index(drop=True), check_categorical=False)
        seen[0] = len(df)
    m = SyncState(tmp_path, Sent(url, after=look), deep=False)
    sent = 0
    for step in range(20):
        add(tmp_path, 'a', lines([step], 10))
        if step>=12: add(tmp_path, 'a', b'{"mean": 3, "st') # a line that is still being written
        if step==19: end(tmp_path, 'a')
        whole = read('a', home=tmp_path)
        sent += sync_runs('a', m)[0]['bytes']
        look()
        assert seen[0]==len(whole)
        # an incomplete line is not copied
        assert step==19 or all(v.endswith(b'\n') for k,v in there().items() if 'lines-' in k or k=='log/a' and v)
        if step>=12: os.truncate(tmp_path/'log'/'a', (tmp_path/'log'/'a').stat().st_size-15)
    got = there()
    names = [p['file'] for p in json.loads(got['log/a.parts/parts.json'])['parts']]
    assert set(got)=={'log/a', 'data/base_a.json', 'data/sync_a.json', 'log/a.parts/parts.json', *(f'log/a.parts/{n}' for n in names)}
    assert len(names)<8 and got['log/a']==b''
    sync('a', url, home=tmp_path)
    same('a', tmp_path, url)
    assert read('a', home=url, steps=19, columns=['step'])['step'].tolist()==[19]*10


@pytest.mark.parametrize('grown', (False, True))
def test_a_sync_that_was_cut_off_anywhere_is_gone_on_with(tmp_path, url, tiny, grown):
    add(tmp_path, 'a', lines(range(3), 10))
    begin(tmp_path, 'a')
    sync('a', url, home=tmp_path)
    before,n = there(),0
    assert before['log/a']==lines(range(3), 10)
    while True:
        n += 1
        from fsspec.implementations.memory import MemoryFileSystem
        MemoryFileSystem.store.clear()
        Target(url).home.fs.pipe({f'/there/{k}': v for k,v in before.items()})
        (tmp_path/'log'/'a').write_bytes(lines(range(40), 10))
        begin(tmp_path, 'a')
        to = Sent(url, fail=n-1)
        try: sync_runs('a', SyncState(tmp_path, to))
        except PermissionError as e: assert 'a could not be copied to memory://there.' in str(e) and 'the next call of sync continues. Cause: no more' in str(e)
        else: break
        df = read('a', home=url)
        assert len(df) in (30, 390, 400) and df.step.is_monotonic_increasing
        if grown: add(tmp_path, 'a', lines(range(40, 45), 10))
        again = Sent(url)
        sync_runs('a', SyncState(tmp_path, again))
        assert not grown or len(read('a', home=url))==450
        same('a', tmp_path, url)
        assert not any(w in again.written for w in to.written if w[0].startswith('sync-')) or grown
    assert n>5
    end(tmp_path, 'a')
    sync_runs('a', SyncState(tmp_path, Sent(url)))
    same('a', tmp_path, url)


def test_what_compact_makes_is_brought_as_it_is(tmp_path, url, tiny):
    add(tmp_path, 'a', lines(range(100), 10))
    begin(tmp_path, 'a')
    sync('a', url, home=tmp_path)
    same('a', tmp_path, url)
    compact('a', home=tmp_path) # compact the run while it continues
    add(tmp_path, 'a', lines(range(100, 130), 10))
    sync('a', url, home=tmp_path)
    same('a', tmp_path, url)
    end(tmp_path, 'a')
    compact('a', home=tmp_path)
    sync('a', url, home=tmp_path)
    same('a', tmp_path, url)
    here = {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob('*.parquet')}
    assert {k: v for k,v in there().items() if k.endswith('.parquet')}==here
    assert sync('a', url, home=tmp_path)[0]['sent']==0


def test_another_run_of_the_same_name_takes_the_place(tmp_path, url, tiny):
    add(tmp_path, 'a', lines(range(100), 10))
    sync('a', url, home=tmp_path)
    (tmp_path/'log'/'a').write_bytes(lines(range(1000, 1090), 10))
    sync('a', url, home=tmp_path)
    same('a', tmp_path, url)
    # another run, which begins with the same line
    (tmp_path/'log'/'a').write_bytes(lines(range(1000, 1001), 10)+lines(range(2000, 2089), 10))
    sync('a', url, home=tmp_path)
    same('a', tmp_path, url)
    (tmp_path/'log'/'a').write_bytes(lines(range(2), 10))
    sync('a', url, home=tmp_path)
    same('a', tmp_path, url)


@pytest.mark.parametrize('which', ('log/small', 'part', 'parts.json', 'data/base_a.json'))
def test_a_byte_that_was_changed_is_found(tmp_path, url, tiny, which):
    add(tmp_path, 'a', lines(range(100), 10))
    add(tmp_path, 'small', lines(range(1), 10))
    for n in 'a','small': end(tmp_path, n)
    sync(['a', 'small'], url, home=tmp_path)
    before = there()
    key = next(k for k in before if which in k and (which!='part' or k.endswith('.parquet')))
    bad = bytearray(before[key])
    bad[len(bad)//2] ^= 1
    Target(url).home.fs.pipe_file(f'/there/{key}', bytes(bad))
    said = sync(['a', 'small'], url, home=tmp_path)
    assert sum(s['sent'] for s in said)>=1
    assert {k: v for k,v in there().items() if 'sync_' not in k}=={k: v for k,v in before.items() if 'sync_' not in k} or which=='parts.json'
    same('a', tmp_path, url)
    same('small', tmp_path, url)


def test_a_run_that_is_moved_is_gone_here_only_when_it_is_there(tmp_path, url, tiny, monkeypatch):
    add(tmp_path, 'a', lines(range(100), 10))
    begin(tmp_path, 'a')
    with pytest.raises(ValueError, match='still being written'): sync('a', url, home=tmp_path, move=True)
    assert (tmp_path/'log'/'a').exists()
    end(tmp_path, 'a')
    df,real = read('a', home=tmp_path),Target.sha
    sync('a', url, home=tmp_path)
    monkeypatch.setattr(Target, 'sha', lambda self, rel: 'another' if rel.endswith('base_a.json') else real(self, rel))
    with pytest.raises(OSError, match='was not removed'): moving.remove_moved(Home(tmp_path), 'a', Target(url))
    monkeypatch.undo()
    assert (tmp_path/'log'/'a').exists()
    sync('a', url, home=tmp_path, move=True)
    assert not [p for p in tmp_path.rglob('*') if p.is_file() and p.name[0]!='.']
    pd.testing.assert_frame_equal(df, read('a', home=url))


def test_what_cannot_be_synced_is_said(tmp_path, url):
    add(tmp_path, 'a', lines(range(2)))
    with pytest.raises(FileNotFoundError, match="Did you mean 'a'"): sync('aa', url, home=tmp_path)
    with pytest.raises(ValueError, match='Give a local folder'): sync('a', url, home='memory://here')
    with pytest.raises(ValueError, match='is the home of the runs, so nothing would be copied'): sync('a', str(tmp_path), home=tmp_path)
    with pytest.raises(ValueError, match='needs a finished run'): sync('a', url, home=tmp_path, every=3, move=True)
    with pytest.raises(ValueError, match='greater than 0'): sync('a', url, home=tmp_path, every=0)
    assert not there()


def test_a_folder_on_another_disk_is_a_place_too(tmp_path, tiny):
    add(tmp_path/'h', 'a', lines(range(100), 10))
    begin(tmp_path/'h', 'a')
    sync('a', tmp_path/'t', home=tmp_path/'h')
    same('a', tmp_path/'h', tmp_path/'t')
    add(tmp_path/'h', 'a', lines(range(100, 130), 10))
    end(tmp_path/'h', 'a')
    sync('a', f"file://{tmp_path/'t'}", home=tmp_path/'h')
    same('a', tmp_path/'h', tmp_path/'t')


def test_it_goes_on_in_the_background_until_the_run_is_over(tmp_path, url, tiny):
    begin(tmp_path, 'a')
    with sync('a', url, home=tmp_path, every=.05) as back: # the run has no rows yet
        for step in range(20):
            add(tmp_path, 'a', lines([step], 10))
            time.sleep(.02)
        end(tmp_path, 'a')
        back.thread.join(10)
        assert not back.thread.is_alive() and back.said[0]['over'] and 'is over' in repr(back)
    same('a', tmp_path, url)


def test_a_store_that_is_gone_harms_nobody_in_the_background(tmp_path, url, monkeypatch):
    add(tmp_path, 'a', lines(range(3)))
    begin(tmp_path, 'a')
    real,down = Target.write,[True]
    def write(self, path, piece):
        if down: raise ConnectionResetError('the store is gone')
        real(self, path, piece)
    monkeypatch.setattr(Target, 'write', write)
    with pytest.warns(UserWarning, match='Training continues.*the store is gone') as said:
        back = sync('a', url, home=tmp_path, every=.05, patience=.1)
        time.sleep(.6)
        assert 'the store is gone' in back.error and back.thread.is_alive()
        down.clear()
        assert back.stop()[0]['name']=='a' and back.error is None
    assert len(said)==1
    same('a', tmp_path, url)


def test_what_is_wrong_from_the_beginning_is_said_in_the_background(tmp_path, url, monkeypatch):
    add(tmp_path, 'a', lines(range(3)))
    def write(self, path, piece): raise FileNotFoundError('The specified bucket does not exist')
    monkeypatch.setattr(Target, 'write', write)
    with pytest.warns(UserWarning, match='Training continues.*bucket does not exist'):
        back = sync('a', url, home=tmp_path, every=30)
        while not back.error: time.sleep(.01)
    with pytest.raises(FileNotFoundError, match='bucket does not exist'): back.stop()
    with sync('none', url, home=tmp_path, every=30) as back: pass # a run that never gets a row
    assert back.said==[]

def test_stop_does_not_wait_for_a_store_that_is_gone(tmp_path, url, monkeypatch):
    add(tmp_path, 'a', lines(range(3)))
    asked = threading.Event()
    def write(self, path, piece):
        asked.set()
        raise ConnectionResetError('gone')
    monkeypatch.setattr(Target, 'write', write)
    back = sync('a', url, home=tmp_path, every=30, patience=60)
    assert asked.wait(10)
    began = time.monotonic()
    with pytest.raises(OSError, match='gone'): back.stop(patience=.1)
    assert time.monotonic()-began<5

def test_two_at_once_are_one_after_the_other(tmp_path, url, tiny, monkeypatch):
    add(tmp_path, 'a', lines(range(100), 10))
    end(tmp_path, 'a')
    real,within,most = LogCopy.sync,[],[]
    def slow(self):
        within.append(1)
        most.append(len(within))
        time.sleep(.1)
        try: return real(self)
        finally: within.pop()
    monkeypatch.setattr(LogCopy, 'sync', slow)
    said = []
    threads = [threading.Thread(target=lambda: said.extend(sync('a', url, home=tmp_path))) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert max(most)==1 and sorted(s['sent']>0 for s in said)==[False, False, True]
    same('a', tmp_path, url)


def test_a_run_that_is_there_is_made_parts_of_there(tmp_path, url, tiny, monkeypatch):
    add(tmp_path, 'a', lines(range(100), 10))
    begin(tmp_path, 'a')
    sync('a', url, home=tmp_path, parquet=False)
    whole,real = read('a', home=tmp_path),compaction.replace
    assert there()['log/a']==lines(range(100), 10)
    said, = compact('a', home=url)
    assert said['rows']==990 and there()['log/a']==lines(range(100), 10)
    pd.testing.assert_frame_equal(whole, read('a', home=url))
    base = json.loads(there()['data/base_a.json'])|dict(end='2020-02-15 14:44:48')
    Target(url).home.fs.pipe_file('/there/data/base_a.json', json.dumps(base).encode())
    left = [0]
    def counting(path, data): # writes that fail at some point: after each write, the copy must be complete
        if not left: raise ConnectionResetError('gone')
        left.pop()
        real(path, data)
        pd.testing.assert_frame_equal(whole, read('a', home=url))
    monkeypatch.setattr(compaction, 'replace', counting)
    monkeypatch.setattr('torchember.store.base.replace', counting)
    for n in range(10):
        left[:] = [0]*n
        try: said, = compact('a', home=url)
        except ConnectionResetError: pd.testing.assert_frame_equal(whole, read('a', home=url))
        else: break
    assert 0<n<9 and there()['log/a']==b'' and said['lines']==0 and said['rows']==1000
    assert json.loads(there()['log/a.parts/parts.json']).get('alone') is None
    left[:] = [0]*9
    compact('a', home=url)
    pd.testing.assert_frame_equal(whole, read('a', home=url))

def test_what_belongs_to_a_run_there(tmp_path, url, tiny):
    for n in 'a','ab': add(tmp_path, n, lines(range(50), 10))
    end(tmp_path, 'a')
    sync('*', url, home=tmp_path)
    size = sum(len(v) for k,v in there().items() if '/ab' not in k and '_ab' not in k)
    assert du('a', home=url)[['name', 'size']].values.tolist()==[['a', size]]
    with pytest.raises(OSError, match='cannot rename files'): mv('a', 'b', home=url)
    rm('a', home=url)
    assert there() and all('/ab' in k or '_ab' in k for k in there())
    same('ab', tmp_path, url)

# ---- an S3 server in its own process

def port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

class Server:
    "An S3 server of the package moto. It loses all data when it ends."
    def __init__(self): self.port,self.process = port(),None

    def start(self):
        self.process = subprocess.Popen([sys.executable, '-m', 'moto.server', '-p', str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(300):
            try: urllib.request.urlopen(f'http://127.0.0.1:{self.port}', timeout=1).close()
            except OSError: time.sleep(.1)
            else: return
        raise TimeoutError('moto did not start')

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

class Proxy:
    "A proxy in front of the S3 server. It can cut all connections during a request, while the server keeps its data."
    def __init__(self, to): self.to,self.port,self.open,self.most,self.passed = to,port(),[],None,0

    def start(self):
        self.most,self.passed,self.gone = None,0,False
        self.socket = socket.create_server(('127.0.0.1', self.port))
        threading.Thread(target=self.accept, args=(self.socket,), daemon=True).start()

    def accept(self, server):
        while True:
            try: a,_ = server.accept()
            except OSError: return
            b = socket.create_connection(('127.0.0.1', self.to))
            self.open += [a, b]
            for x,y,up in (a, b, True), (b, a, False): threading.Thread(target=self.carry, args=(x, y, up), daemon=True).start()

    def carry(self, a, b, up):
        try:
            while data := a.recv(4096):
                if up:
                    self.passed += len(data)
                    if self.most is not None and self.passed>self.most: return self.kill()
                b.sendall(data)
        except OSError: pass
        for s in a, b:
            try: s.shutdown(socket.SHUT_RDWR)
            except OSError: pass

    def kill(self):
        self.gone = True
        for s in self.socket, *self.open:
            try: s.shutdown(socket.SHUT_RDWR)
            except OSError: pass
            s.close()
        self.open = []

@pytest.fixture(scope='module')
def server():
    pytest.importorskip('s3fs')
    pytest.importorskip('moto.server')
    s = Server()
    s.start()
    yield s
    s.kill()

def bucket(at, name, monkeypatch, make=True):
    "Return a bucket as a home of runs. Its client does not retry failed requests by itself."
    from upath import UPath
    for k in 'AWS_ACCESS_KEY_ID','AWS_SECRET_ACCESS_KEY': monkeypatch.setenv(k, 'testing')
    monkeypatch.setenv('AWS_DEFAULT_REGION', 'us-east-1')
    import fsspec
    home = UPath(f's3://{name}/runs', endpoint_url=f'http://127.0.0.1:{at.port}', config_kwargs={'retries': {'max_attempts': 1}, 'connect_timeout': 2})
    fsspec.filesystem('s3').clear_instance_cache()
    if make: home.fs.mkdir(name)
    return home

@pytest.mark.slow
def test_a_run_in_a_bucket(tmp_path, server, monkeypatch, tiny):
    at = bucket(server, 'one', monkeypatch)
    begin(tmp_path, 'a')
    for r in range(2): add(tmp_path, f'w.rank{r}', lines(range(2)))
    for step in range(0, 60, 20):
        add(tmp_path, 'a', lines(range(step, step+20), 10))
        sync('a', at, home=tmp_path)
        same('a', tmp_path, at)
    end(tmp_path, 'a')
    sync('*', at, home=tmp_path)
    for n in 'a','w': same(n, tmp_path, at)
    assert sum(s['sent'] for s in sync('*', at, home=tmp_path))==0
    assert sorted(runs(at)[['name', 'ranks', 'rows']].values.tolist())==[['a', 1, 600], ['w', 2, 80]]
    part = next(p for p in (at/'log'/'a.parts').iterdir() if p.name.endswith('.parquet'))
    was = part.read_bytes()
    at.fs.pipe_file(part.path, was[:-9]+b'?'+was[-8:])
    assert sync('a', at, home=tmp_path)[0]['sent']>=1
    same('a', tmp_path, at)
    assert sync('a', at, home=tmp_path)[0]['sent']==0
    monkeypatch.setenv('AWS_ENDPOINT_URL', f'http://127.0.0.1:{server.port}')
    pd.testing.assert_frame_equal(read('a', home=tmp_path), read('s3://one/runs/log/a'))
    with pytest.raises(FileNotFoundError, match="a could not be copied to s3://nosuch/runs"):
        sync('a', bucket(server, 'nosuch', monkeypatch, make=False), home=tmp_path, patience=1)

@pytest.mark.release
@pytest.mark.slow
def test_connections_that_end_in_the_middle_of_an_upload(tmp_path, server, monkeypatch, tiny):
    proxy = Proxy(server.port)
    proxy.start()
    at = bucket(proxy, 'two', monkeypatch)
    add(tmp_path, 'a', lines(range(700), 10))
    end(tmp_path, 'a')
    proxy.passed,proxy.most = 0,40_000
    with pytest.raises(OSError, match='a could not be copied to s3://two/runs.*the next call of sync continues'): sync('a', at, home=tmp_path, patience=.5)
    assert proxy.gone
    assert (tmp_path/'log'/'a').read_bytes()==lines(range(700), 10)
    proxy.start()
    there = {p.name for p in (at/'log'/'a.parts').iterdir()} if (at/'log'/'a.parts').exists() else set()
    with pytest.raises(FileNotFoundError): read('a', home=at)
    assert there
    said, = sync('a', at, home=tmp_path)
    assert said['sent']==said['files']-len(there)
    same('a', tmp_path, at)
    add(tmp_path, 'a', lines(range(700, 900), 10))
    proxy.passed,proxy.most = 0,2000
    # the server comes back while the request is repeated
    threading.Timer(.6, lambda: proxy.gone and proxy.start()).start()
    sync('a', at, home=tmp_path, patience=20)
    assert proxy.most is None
    same('a', tmp_path, at)
    proxy.kill()

@pytest.mark.release # slow test, run only before a release
@pytest.mark.slow
def test_a_server_that_is_killed_and_has_lost_everything(tmp_path, monkeypatch, tiny):
    pytest.importorskip('s3fs')
    pytest.importorskip('moto.server')
    server = Server()
    server.start()
    at = bucket(server, 'three', monkeypatch)
    add(tmp_path, 'a', lines(range(700), 10))
    begin(tmp_path, 'a')
    real = Target.write
    def write(self, path, piece):
        real(self, path, piece)
        if path.name.startswith('sync-') and server.process.poll() is None: server.kill()
    with monkeypatch.context() as m, pytest.raises(OSError, match='a could not be copied'):
        m.setattr(Target, 'write', write)
        sync('a', at, home=tmp_path, patience=.5)
    assert server.process.poll()==-signal.SIGKILL and (tmp_path/'log'/'a').read_bytes()==lines(range(700), 10)
    server.start()
    with pytest.raises(FileNotFoundError, match='bucket'): sync('a', at, home=tmp_path, patience=.5)
    at = bucket(server, 'three', monkeypatch)
    sync('a', at, home=tmp_path)
    same('a', tmp_path, at)
    end(tmp_path, 'a')
    sync('a', at, home=tmp_path, move=True)
    assert not (tmp_path/'log'/'a').exists() and len(read('a', home=at))==7_000
    server.kill()

@pytest.mark.release
@pytest.mark.slow
def test_two_processes_bring_a_run_at_once(tmp_path, server, monkeypatch):
    bucket(server, 'four', monkeypatch)
    add(tmp_path, 'a', lines(range(1500), 10))
    end(tmp_path, 'a')
    code = f"from torchember import sync; print(sync('a', 's3://four/runs', home={str(tmp_path)!r})[0]['sent'])"
    env = os.environ|{'AWS_ENDPOINT_URL': f'http://127.0.0.1:{server.port}'}
    both = [subprocess.Popen([sys.executable, '-c', code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sent = sorted(int(p.communicate(timeout=60)[0]) for p in both)
    assert sent[0]==0 and sent[1]>=4
    monkeypatch.setenv('AWS_ENDPOINT_URL', env['AWS_ENDPOINT_URL'])
    pd.testing.assert_frame_equal(read('a', home=tmp_path), read('a', home='s3://four/runs'))
