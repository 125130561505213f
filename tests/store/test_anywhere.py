"A remote file is read in few byte ranges and completely, and is written as a whole or not at all. Errors of the store become torchember errors."
import io
import os
import socket
import stat
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from torchember.store import anywhere
from torchember.store.anywhere import (RangedFile, StoreError, call_store, file_exists, file_size, folder_exists, is_url, list_folder,
    to_path, open_file, open_regular, path_exists, remove_remote, write_remote)

pytest.importorskip('upath')


class Store:
    "A fake remote store of files in memory, which keeps its requests. `most`: bytes per request; `fails`: errors of requests."
    def __init__(self, files=(), most=1<<30, **fails): self.files,self.most,self.fails,self.asked = dict(files),most,fails,[]

    def note(self, what, *about):
        self.asked.append((what, *about))
        if what in self.fails: raise self.fails[what]

    def info(self, path): self.note('info', path); return dict(size=len(self.files[path]), type='file')
    def cat_file(self, path, start=None, end=None): self.note('cat', start, end); return self.files[path][start:end][:self.most]
    def ls(self, path, detail): self.note('ls', path); return self.files[path]
    def pipe_file(self, path, data): self.files[path] = data; self.note('pipe', path)
    def makedirs(self, path, exist_ok=False): self.note('makedirs', path, exist_ok)
    def exists(self, path): return path in self.files
    def rm_file(self, path): self.note('rm', path); del self.files[path]
    def mv(self, a, b): self.note('mv', a, b); self.files[b] = self.files.pop(a)

class Place:
    "A path in a `Store`, with the interface of `UPath`."
    storage_options = {}
    def __init__(self, store, path='home/run', protocol='sftp'): self.fs,self.path,self.protocol = store,path,protocol
    def __str__(self): return f'{self.protocol}://{self.path}'
    def __truediv__(self, name): return Place(self.fs, f'{self.path}/{name}', self.protocol)
    def with_name(self, name): return self.parent/name
    parent = property(lambda self: Place(self.fs, str(PurePosixPath(self.path).parent), self.protocol))


# ---- local paths and URLs

def test_what_is_a_url():
    "A text with a protocol, or a path object with a store, is a URL. `file:///x` and other forms of local paths are not."
    for where in 's3://b/x','s3+x://b','simplecache::s3://b/x','a.b-c://d',to_path('memory://x'),Place(Store()): assert is_url(where), where
    of_machine = type('Local', (os.PathLike,), dict(fs=1, storage_options={}, __fspath__=lambda self: '/x'))()
    for where in 'x','/a/b','a/s3://b','://x','file:///x','local:///x',Path('/x'),of_machine,SimpleNamespace(fs=1),SimpleNamespace(storage_options={}),None,3:
        assert not is_url(where), where

def test_where_it_is():
    "Slashes at the end are removed, except if nothing else remains. Reading does not use cached listings of the store."
    for where in 'file:///x/y','file://localhost/x/y','local:///x/y','/x/y',Path('/x/y'): assert to_path(where)==Path('/x/y')
    assert to_path('file://localhosts/x')==Path('localhosts/x')
    assert [str(to_path(w)) for w in ('memory://b/x', 'memory://b/x//')]==['memory://b/x']*2 and to_path('memory://').protocol=='memory'
    assert [to_path(w).name for w in ('http://b/x/', 'http://b/x')]==['x', 'x']
    with pytest.raises(ValueError, match='null character'): to_path('memory://b/\0')
    from upath import UPath
    assert to_path('memory://b').storage_options==dict(use_listings_cache=False)
    kept = UPath('memory://b', use_listings_cache=True)
    assert to_path(kept) is kept
    at = to_path(UPath('memory://b/x', of='mine'))
    assert (str(at), at.protocol, at.storage_options)==('memory://b/x', 'memory', dict(of='mine', use_listings_cache=False))

def test_what_a_store_says():
    "The error message of a store names the place. Local errors keep their type, and a StoreError is not wrapped again."
    same = ImportError,MemoryError,FileNotFoundError,PermissionError,NotADirectoryError,IsADirectoryError
    def fail(e):
        def f(): raise e
        with pytest.raises(type(e) if isinstance(e, same) else StoreError) as got: call_store(Place(Store()), f, 'moved')
        return got.value, str(got.value)
    for e in FileNotFoundError('no key'),PermissionError('no key'),NotADirectoryError('no key'),IsADirectoryError('no key'):
        assert fail(e)[1]=='sftp://home/run could not be moved: no key.' and type(fail(e)[0]) is type(e)
        assert fail(type(e)())[1]==f'sftp://home/run could not be moved: {type(e).__name__}.'
    for e in ImportError('install it'),MemoryError(),StoreError('said'): assert fail(e)[0] is e
    assert 'could not be moved: KeyError: 3. Check that the store is running' in fail(KeyError(3))[1]
    assert 'ConnectionResetError: gone' in fail(ConnectionResetError('gone'))[1]
    assert call_store(Place(Store()), lambda: 3)==3


# ---- listing folders and files

def test_what_is_there(tmp_path):
    at = to_path('memory://of-anywhere')
    at.fs.pipe({'/of-anywhere/log/a': b'12345', '/of-anywhere/log/a.parts/x': b'1'})
    (tmp_path/'log').mkdir()
    (tmp_path/'log'/'a').write_bytes(b'12345')
    (tmp_path/'link').symlink_to('nowhere')
    for home in at,tmp_path:
        assert [f(home/'log') for f in (file_exists, folder_exists, path_exists)]==[False, True, True]
        assert [f(home/'log'/'a') for f in (file_exists, folder_exists, path_exists, file_size)]==[True, False, True, 5]
        assert [f(home/'no') for f in (file_exists, folder_exists, path_exists)]==[False]*3
        assert list_folder(home/'no')==list_folder(home/'log'/'a'/'b')==[]
        e, = [e for e in list_folder(home/'log') if e.name=='a']
        assert (e.is_file(), e.is_dir(), e.is_symlink(), e.is_file(follow_symlinks=False))==(True, False, False, True)
    assert [f(tmp_path/'link') for f in (file_exists, path_exists)]==[False, True]
    assert {e.name: (e.is_dir(), e.is_file(), e.size) for e in list_folder(at/'log')}=={'a': (False, True, 5), 'a.parts': (True, False, 0)}
    at.fs.rm('/of-anywhere', recursive=True)

def test_what_a_folder_has():
    "A listing leaves out the folder itself, which some stores include, and names such as `..`."
    def listed(*names, folder='b/log'):
        return Store({folder: [dict(name=n, size=i, type='directory' if n.endswith('/') else 'file') for i,n in enumerate(names)]})
    store = listed('b/log/', 'b/log/a', '/b/log/c/', 'b/log/..', 'b/log/.', 'b/log//', 'b/log/log')
    got = list_folder(Place(store, 'b/log'))
    assert [(e.name, e.path.path, e.size, e.is_dir()) for e in got]==[('a', 'b/log/a', 1, False), ('c', 'b/log/c', 2, True), ('log', 'b/log/log', 6, False)]
    assert [e.name for e in list_folder(Place(listed('b/log', folder='/b/log/'), '/b/log/'))]==[]
    for e in FileNotFoundError,NotADirectoryError: assert list_folder(Place(Store(ls=e())))==[]
    with pytest.raises(PermissionError, match='sftp://home/run could not be read: not yours'): list_folder(Place(Store(ls=PermissionError('not yours'))))


# ---- local files

def test_only_files_are_opened(tmp_path, monkeypatch):
    "Folders, pipes, sockets and devices are not opened, even if one replaces a file in between. A new file may be created."
    really,asked = os.open,[]
    monkeypatch.setattr(os, 'open', lambda path, flags, *mode: asked.append(flags) or really(path, flags|os.O_NONBLOCK, *mode))
    os.mkfifo(tmp_path/'pipe')
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path/'socket'))
        for path,what in (tmp_path, 'a folder'),(tmp_path/'pipe', 'a pipe'),(tmp_path/'socket', 'a socket'),('/dev/null', 'a device'):
            with pytest.raises(OSError, match=f'is {what}, not a file, so it was not opened'): open_file(path)
    assert asked==[]
    with open(tmp_path/'new', 'xb', opener=open_regular) as f: f.write(b'12345')
    assert stat.S_IMODE((tmp_path/'new').stat().st_mode)&0o600==0o600 and asked[0]&os.O_CREAT and asked[0]&os.O_NONBLOCK
    with open_file(tmp_path/'new') as f: assert f.read()==b'12345' and isinstance(f, io.BufferedReader)
    with open_file(tmp_path/'new', buffering=0) as f: assert isinstance(f, io.FileIO)
    with pytest.raises(FileNotFoundError): open_file(tmp_path/'no')
    as_file,before = os.stat(tmp_path/'new'),len(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') else None
    with monkeypatch.context() as m:
        m.setattr(os, 'stat', lambda *a, **k: as_file)
        with pytest.raises(OSError, match='is a pipe, not a file'): open_regular(tmp_path/'pipe', os.O_RDONLY)
    assert before is None or len(os.listdir('/proc/self/fd'))==before


# ---- remote files

data = bytes(i*i%251 for i in range(1000))*1000 # 1 MB of test data

def ranges(store): return [a[1:] for a in store.asked if a[0]=='cat']

def test_ranges_that_are_asked_for():
    "The first request is small. Each following one is twice as large, up to a limit. No byte is requested twice."
    store = Store({'home/run': data})
    f = RangedFile(Place(store))
    assert f.readable() and f.seekable() and store.asked==[('info', 'home/run')]
    assert (f.read(10), f.read(300_000), f.tell())==(data[:10], data[10:300_010], 300_010)
    assert ranges(store)==[(0, 65536), (65536, 300_010)]
    assert f.read(1)==data[300_010:300_011] and ranges(store)[2:]==[(300_010, 300_010+(1<<18))]
    for at in 300_010,400_000,300_500:
        f.seek(at)
        assert f.read(9)==data[at:at+9] and len(ranges(store))==3 # these bytes were already read
    f.seek(300_009)
    # after a jump back, the size of requests begins small again
    assert f.read(2)==data[300_009:300_011] and ranges(store)[3:]==[(300_009, 300_009+65536)]
    store.asked.clear()
    f = type('Small', (RangedFile,), dict(least=100, most=400))(Place(store), len(data))
    assert b''.join(iter(lambda: f.read(50), b''))==data
    got = ranges(store)
    assert [b-a for a,b in got[:4]]==[100, 200, 400, 400] and got[-1][1]==len(data) and [a for a,_ in got[1:]]==[b for _,b in got[:-1]]
    assert store.asked[0]==('cat', 0, 100) # the size was given, so it is not requested
    empty = Store({'home/run': b''})
    assert RangedFile(Place(empty), 0).read()==b'' and empty.asked==[]

def test_seeking():
    "Seeking works from the start, the current position and the end. Behind the end, nothing is read and nothing is requested."
    store = Store({'home/run': data[:1000]})
    f = RangedFile(Place(store))
    assert [f.seek(*to) for to in ((10,), (5, 1), (-3, 1), (-4, 2), (7, 2), (-2000, 2), (-5,))]==[10, 15, 12, 996, 1007, 0, 0]
    assert f.seek(995) and f.read(99)==data[995:1000] and f.read(1)==b'' and f.seek(2000) and f.read(1)==b'' and f.read()==b''
    assert ranges(store)==[(995, 1000)]
    f.seek(990)
    assert f.read()==data[990:1000] and f.seek(0)==0 and f.read()==data[:1000]

def test_all_bytes_of_a_store_that_gives_less():
    "If a store returns fewer bytes than requested, the rest is requested again. A file that became shorter is an error."
    store = Store({'home/run': data[:5000]}, most=700)
    f = RangedFile(Place(store))
    assert f.read(5000)==data[:5000] and len(ranges(store))==8
    store.files['home/run'] = data[:3000]
    f = RangedFile(Place(store), 5000)
    with pytest.raises(OSError, match='had 5000 bytes, but now has only 3000'): f.read(5000)

def test_small_files_are_brought_at_once():
    "A file that is known to be small is read with one request, and its size is not requested."
    for size,want in (5, io.BytesIO),(1<<20, io.BytesIO),((1<<20)+1, RangedFile),(None, RangedFile):
        store = Store({'home/run': bytes(size or 3)})
        f = open_file(Place(store), size=size)
        assert type(f) is want and store.asked==([('cat', None, None)] if want is io.BytesIO else [('info', 'home/run')]*(size is None))
        assert len(f.read())==(size or 3)
    with pytest.raises(FileNotFoundError, match='sftp://home/run could not be read: gone'): open_file(Place(Store(info=FileNotFoundError('gone'))))
    with pytest.raises(StoreError, match='sftp://home/run could not be read: ConnectionError'): open_file(Place(Store(cat=ConnectionError())), size=3)
    f = RangedFile(Place(Store(cat=ConnectionError())), 9)
    with pytest.raises(StoreError, match='sftp://home/run could not be read: ConnectionError'): f.read(3)


# ---- writing and removing

def test_written_whole(monkeypatch):
    "An object store gets the file in one request. On other stores, a temporary file is written and then renamed."
    store = Store()
    for protocol in 's3','memory':
        write_remote(Place(store, 'b/log/a', protocol), b'new')
        assert store.asked==[('pipe', 'b/log/a')] and store.files['b/log/a']==b'new'
        store.asked.clear()
    write_remote(Place(store, 'b/log/a'), b'newer')
    (made,parents,fine),(_,temp),moved = store.asked
    assert (made, parents, fine)==('makedirs', 'b/log', True) and moved==('mv', temp, 'b/log/a') and store.files=={'b/log/a': b'newer'}
    assert temp.startswith('b/log/.torchember-')
    write_remote(Place(store, 'b/log/a'), b'')
    assert store.asked[4][1]!=temp and store.files=={'b/log/a': b''}
    assert {'s3', 'gs', 'memory'}<=anywhere.objects and not {'sftp', 'file', 'smb'}&anywhere.objects

@pytest.mark.parametrize('at', ['makedirs', 'pipe', 'mv'])
@pytest.mark.parametrize('error', [ConnectionError('gone'), KeyboardInterrupt()], ids=['error', 'stopped'])
def test_half_of_it_is_left_nowhere(at, error):
    "After an error or Ctrl-C, no temporary file remains, and the old file is unchanged."
    store = Store({'b/log/a': b'old'}, **{at: error})
    with pytest.raises(StoreError if isinstance(error, Exception) else KeyboardInterrupt) as got: write_remote(Place(store, 'b/log/a'), b'new')
    assert store.files=={'b/log/a': b'old'}
    assert not isinstance(error, Exception) or str(got.value).startswith('sftp://b/log/a could not be written: ConnectionError: gone')

def test_what_failed_first_is_said():
    "The first error is reported, even if there is no temporary file to remove."
    class Full(Store):
        def pipe_file(self, path, data): raise OSError('no space')
    store = Full()
    with pytest.raises(StoreError, match='could not be written: OSError: no space'): write_remote(Place(store), b'new')
    assert [a[0] for a in store.asked]==['makedirs']

def test_removed():
    "A file that is already gone causes no error. A file that cannot be removed causes one."
    store = Store({'home/run': b'1'})
    remove_remote(Place(store))
    assert store.files=={}
    remove_remote(Place(Store(rm=FileNotFoundError())))
    with pytest.raises(PermissionError, match='sftp://home/run could not be removed: not yours'): remove_remote(Place(Store(rm=PermissionError('not yours'))))
