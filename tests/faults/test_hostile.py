"Tests with hostile files: torchember executes no code from a folder of runs, writes nowhere else, and reads the valid files"
import inspect
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

import torchember
from torchember.ground.choose import select
from torchember.frames.listing import runs
from torchember.frames.logs import read, wide
from torchember.ground.messages import EmberWarning
from torchember.show.histograms import total_counts
from torchember.ground.child import interpreter_flags
from torchember.show.live.live_view import Reader, Viewer
from torchember.show.page.data import page_of
from torchember.show.pointing import read_losses
from torchember.state.plots import plot_heatmap, plot_hist
from torchember.store import log as store_log, base
from torchember.store import lines as by_lines
from torchember.store.jsonl import emberTracker, new_run
from torchember.store.log_file import last_step_of

root = Path(torchember.__file__).parents[1]


# ---- child processes

evil = "open({mark!r}, 'a').write(__name__+' ')\n"


def folder_of_modules(path):
    "Folder with Python modules that create a file when they are imported"
    for name in ('pickle', 'struct', 'copyreg', 'encodings', 'torchember', 'numpy', 'pandas', 'signal', 'tqdm', 'sitecustomize', 'usercustomize'):
        (path/f'{name}.py').write_text(evil.format(mark=str(path/'ran')))
    return path


def test_a_child_imports_nothing_of_the_folder_one_stands_in(tmp_path, monkeypatch):
    here = folder_of_modules(tmp_path)
    (tmp_path/'home'/'log').mkdir(parents=True)
    (tmp_path/'home'/'log'/'run').write_bytes(b'{"module": "model(Net)", "ttype": "output", "tname": "output_0", "step": 3, "rms": 1.0}\n')
    monkeypatch.chdir(here)
    monkeypatch.setenv('PYTHONPATH', ':') # An empty entry stands for the current folder of the child process
    monkeypatch.setattr(sys, 'path', ['', '.', *sys.path])
    reader = Reader(home=tmp_path/'home', picture=False, look={})
    try: assert reader.ask(name='run', over=True)['line']=='run: step 3'
    finally: reader.end()
    assert not (here/'ran').exists()


def test_a_program_that_shows_a_run_live_imports_nothing_of_its_folder(tmp_path, monkeypatch):
    "A script of another folder shows a run live, started in a folder with hostile modules."
    here = folder_of_modules(tmp_path)
    code = f"""if 1:
        import sys; sys.path.insert(0, {str(root)!r})
        import torchember
        t = torchember.emberTracker('run', {str(tmp_path/'home')!r})
        t + dict(module='model(Net)', ttype='output', tname='output_0', step=3, rms=1.)
        t.barrier()
        __import__('os').utime(t.log_path, (0, 0)) # it has not just begun, so that nobody waits for more
        torchember.live(t, wait=True)
        """
    script = tmp_path/'elsewhere'/'script.py'
    script.parent.mkdir()
    script.write_text(code)
    done = subprocess.run([sys.executable, script], cwd=here, capture_output=True, text=True)
    assert done.returncode==0 and 'run: step 3' in done.stderr and not (here/'ran').exists(), done.stderr


@pytest.mark.parametrize('how', [['-I', '-W', 'ignore::ResourceWarning', '-X', 'utf8=0'], ['-E', '-s', '-B'], ['-S', '-OO', '-bb', '-X', 'utf8'],
    ['-B', '-X', 'dev', '-X', 'pycache_prefix=elsewhere'], []], ids=' '.join)
def test_a_child_is_started_as_its_parent_was(how):
    "A child process gets all interpreter options of its parent, and imports nothing from the current folder."
    names = [n for n in dir(sys.flags) if not n.startswith('_') and not callable(getattr(sys.flags, n)) and n!='safe_path']
    look = f'[{{n: getattr(sys.flags, n) for n in {names}}}, sys.pycache_prefix, [*dict.fromkeys(sys.warnoptions)]]'
    def said(start, code): return eval(subprocess.run([*start, '-c', f'import sys\n{code}'], capture_output=True, text=True, check=True, cwd=root).stdout)
    told,parent = said([sys.executable, *how], f'{inspect.getsource(interpreter_flags)}\nprint([interpreter_flags(), {look}])')
    child,safe = said([sys.executable, *told], f'print([{look}, sys.flags.safe_path])')
    assert child==parent and safe


# ---- paths that are not regular files, and files from another user

def row(step=0, **more): return dict(module='model(Net).fc(Linear)', ttype='output', tname='output_0', step=step, mean=1., dtype='float32') | more


def lines(*rows): return b''.join(json.dumps(r).encode()+b'\n' for r in rows)


@pytest.fixture
def home(tmp_path):
    "Folder of runs with one good run of two steps"
    for d in 'log','data': (tmp_path/'home'/d).mkdir(parents=True)
    (tmp_path/'home'/'log'/'good').write_bytes(lines(row(0), row(1, mean=2.)))
    (tmp_path/'home'/'data'/'base_good.json').write_text('{"start": "2020-02-15 13:44:48", "model": "Net"}')
    return tmp_path/'home'


def put(path, what):
    "Create a file that is not valid at a path: a folder, a link, a pipe, a socket, or a file without JSON."
    path.unlink(missing_ok=True)
    if what=='pipe': os.mkfifo(path)
    elif what=='socket':
        was = os.getcwd()
        os.chdir(path.parent) # The path of a Unix socket may have only about a hundred characters
        try: socket.socket(socket.AF_UNIX).bind(path.name)
        finally: os.chdir(was)
    elif what=='folder': path.mkdir()
    elif what in ('device', 'nowhere', 'round'): path.symlink_to({'device': '/dev/zero', 'nowhere': 'there_is_none', 'round': path.name}[what])
    else: path.write_bytes(what)


def give_up(t):
    "Stop the writer, which would retry and warn until the interpreter ends."
    t.file.disk.waiting.clear()
    store_log.writer.holding.discard(t.file)


no_files = ('pipe', 'socket', 'folder', 'device', 'nowhere', 'round')
no_metadata = (b'[]', b'null', b'3', b'"base"', b'', b'{', b'\xff\xfe', b'['*200_000, b'{"a":'*200_000, b'9'*10_000, b'[NaN', b'\x00'*100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize('what', no_files+no_metadata, ids=lambda w: w if isinstance(w, str) else repr(w[:12]))
def test_metadata_that_is_none(home, what):
    "With broken metadata, `runs` lists the run and its problem, and all other functions work as without metadata."
    (home/'log'/'bad').write_bytes(lines(row(0), row(4)))
    for kind in 'base','structure','vis': put(home/'data'/f'{kind}_bad.json', what)
    got = runs(home).set_index('name')
    assert sorted(got.index)==['bad', 'good'] and got.problem.isna()['good']
    assert got.loc['bad', ['steps', 'rows', 'running']].tolist()==[5, 2, False]
    if what not in ('nowhere',): assert isinstance(got.problem['bad'], str) and '\n' not in got.problem['bad']
    t = emberTracker('bad', home)
    assert t._repr_html_() is None and len(t.df)==2
    assert read('*', home=home).run.tolist()==['bad']*2+['good']*2
    if what=='folder': return
    t.begin({'start': 'now'}, {})
    t + row(5)
    t.close()
    assert len(t.lines())==3 and t['base_bad']['start']=='now' and runs(home).problem.isna().all()


@pytest.mark.timeout(120)
@pytest.mark.parametrize('what', no_files)
def test_a_log_that_is_none(home, what):
    "A log that is not a regular file blocks no reader, and nothing is written to it. All other logs are read."
    put(home/'log'/'bad', what)
    got = runs(home).set_index('name')
    assert got.problem.isna()['good'] and got.loc['good', 'steps']==2
    if what!='folder':
        assert isinstance(got.problem['bad'], str) and got.loc['bad', ['steps', 'rows', 'running']].tolist()==[0, 0, False]
    assert read('*', home=home).step.tolist()==[0, 1]
    t = emberTracker('bad', home)
    for f in (lambda: t.df, lambda: t.lines(), lambda: read('bad', home=home), lambda: read(home/'log'/'bad')):
        with pytest.raises(OSError, match='bad'): f()
    with pytest.warns(EmberWarning, match='cannot write'): t + row(1); t.barrier()
    with pytest.warns(EmberWarning, match='1 rows could not be written'): t.file.close()
    give_up(t)
    assert not (home/'log'/'there_is_none').exists()
    with pytest.raises(FileExistsError, match='exists already'): new_run('Net', 'bad', home=home)


@pytest.mark.timeout(120)
@pytest.mark.parametrize('what', (*no_files, b'', b'{', b'\x00'*1000, lines([], 3)))
def test_a_file_of_the_latest_step_that_is_none(home, what):
    "If the file of the latest step is broken, the latest step is read from the log."
    put(home/'log'/'good_latest', what)
    assert [r['step'] for r in emberTracker('good', home).latest_line_list()]==[1]
    t = emberTracker('good', home)
    if what=='folder': return
    t + row(2)
    t.refresh()
    assert (home/'log'/'good_latest').read_bytes()==lines(row(2)).replace(b' ', b'') and not (home/'log'/'good_latest').is_symlink()
    assert not (home/'log'/'there_is_none').exists()


def test_what_a_link_leads_to_is_not_written(home, tmp_path):
    "The target of a link is never changed, whether the link replaces a log, metadata, the latest step, or a temporary file."
    secret = tmp_path/'secret'
    secret.write_bytes(b'mine\n')
    for p in ('log/good_latest', 'data/base_linked.json', 'data/notes.json', 'log/linked'): (home/p).symlink_to(secret)
    t = emberTracker('linked', home)
    with pytest.warns(EmberWarning, match='is a link, and torchember does not write through links'): t + row(); t.barrier()
    give_up(t)
    t['notes'] = {'lr': 1}
    good = emberTracker('good', home)
    good + row(2)
    good.refresh()
    assert secret.read_bytes()==b'mine\n' and t['notes']=={'lr': 1} and len(good.latest_line_list())==1
    assert not [p for d in ('log', 'data') for p in (home/d).iterdir() if p.name[0]=='.']


def test_a_file_beside_is_a_new_one(home, monkeypatch):
    "If an attacker puts a link under the name of a temporary file, writing fails and does not follow the link."
    secret = home/'secret'
    secret.write_bytes(b'mine')
    monkeypatch.setattr(base, 'token_hex', lambda n: 'guessed')
    (home/'data'/'.torchember-guessed').symlink_to(secret)
    with pytest.raises(FileExistsError): base.replace(home/'data'/'x.json', b'3')
    assert secret.read_bytes()==b'mine'


def test_files_have_the_rights_that_the_user_gives(home):
    "Files have the permissions of the user's umask, so other users of the group may read a run."
    was = os.umask(0o027)
    try: base.replace(home/'data'/'x.json', b'3'); emberTracker('new', home)(row()).barrier()
    finally: os.umask(was)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (home/'data'/'x.json', home/'log'/'new')]==[0o640]*2


@pytest.mark.parametrize('what', ('none', 'ours', 'open to all', 'a link', 'a file', "somebody else's"))
def test_where_there_is_no_home(tmp_path, monkeypatch, what):
    "Without a home folder, torchember uses a private temporary folder, also if another user has created a folder of this name."
    def nobody(*args): raise RuntimeError('Could not determine home directory.')
    monkeypatch.setattr(Path, 'home', nobody)
    monkeypatch.delenv('TORCHEMBER_HOME')
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    place = tmp_path/f'torchember-{os.getuid()}'
    if what=='a file': place.touch()
    elif what=='a link': (tmp_path/'theirs').mkdir(mode=0o700); place.symlink_to(tmp_path/'theirs')
    elif what!='none': place.mkdir(mode=0o700)
    if what=='open to all': place.chmod(0o777)
    if what=="somebody else's":
        uid = os.getuid()+1
        monkeypatch.setattr(os, 'getuid', lambda: uid)
        place = place.rename(tmp_path/f'torchember-{uid}')
    base.home_fallback.cache_clear()
    try:
        with pytest.warns(EmberWarning, match='There is no home') as said: got = base.folder('torchember')
        assert base.folder('torchember')==got and len(said)==1
        assert (got==place)==(what in ('none', 'ours')) and ('exists already' in str(said[0].message))==(got!=place)
        assert got.parent==tmp_path and (what=="somebody else's" or base.is_private_folder(got)) and str(got) in str(said[0].message)
    finally: base.home_fallback.cache_clear()


@pytest.mark.parametrize('name', ('CON', 'nul.rank0', 'a:b', '12:30', 'what?', '*', 'end.', 'end '))
def test_names_that_are_none_elsewhere(home, name):
    "A name that Windows does not allow is refused for a new run, but an existing run of this name is read."
    for make in (lambda: emberTracker(name, home), lambda: new_run('Net', name, home=home)):
        with pytest.raises(ValueError, match='run name'): make()
    (home/'log'/name).write_bytes(lines(row(3)))
    assert len(emberTracker(name, home).df)==1 and runs(home).set_index('name').loc[name.removesuffix('.rank0'), 'steps']==4


def test_metadata_too_large(home, monkeypatch):
    monkeypatch.setattr(base, 'most_meta', 1000)
    base.write_meta(home/'data'/'x.json', 'x'*990)
    with pytest.raises(ValueError, match='may have'): base.write_meta(home/'data'/'x.json', 'x'*1000)
    assert base.read_meta(home/'data'/'x.json')=='x'*990
    (home/'data'/'base_good.json').write_bytes(b' '*1001)
    assert 'too large' in runs(home).problem[0]


# ---- lines that are too long

def test_a_long_line_is_read_in_linear_time(tmp_path):
    "The CPU time grows linearly with the length of a line, and a line that is too long gives no row."
    def took(n):
        (tmp_path/'log').write_bytes(b'x'*n)
        began = time.process_time()
        assert b''.join(by_lines.blocks(tmp_path/'log', n, 1<<12))==b'x'*n
        return time.process_time()-began
    took(1<<20)
    small,large = min(took(1<<22) for _ in range(3)),min(took(1<<25) for _ in range(2))
    assert large<40*small # 8 times the length may take 40 times as long; quadratic time would be 64 times


def test_lines_that_are_too_long(home, monkeypatch):
    "Each reader skips a line that is too long, with a warning, and no writer writes such a line."
    for room in by_lines,store_log: monkeypatch.setattr(room, 'longest_line', 1000)
    for f,name,n in ((by_lines.blocks, 'longest', 1000), (by_lines.line_blocks, 'size', 100)):
        names = [p.name for p in inspect.signature(f).parameters.values() if p.default is not p.empty and p.kind is not p.KEYWORD_ONLY]
        monkeypatch.setattr(f, '__defaults__', tuple(n if k==name else d for k,d in zip(names, f.__defaults__, strict=True)))
    (home/'log'/'long').write_bytes(lines(row(0), row(7, more='x'*2000), row(2))+b'y'*5000)
    t = emberTracker('long', home)
    for f in (lambda: t.lines(), lambda: t.df.to_dict('records'), lambda: read('long', home=home).to_dict('records')):
        with pytest.warns(EmberWarning, match='A line of long has more than'): assert [r['step'] for r in f()]==[0, 2]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert t.lines() and t.torn==2
    with pytest.warns(EmberWarning, match='a row of more than .* MB is lost'):
        good = emberTracker('good', home)
        good + row(2, more='x'*2000)
        good.put(lambda: [row(3, more='x'*2000), row(4)])
        good.barrier()
    assert [r['step'] for r in good.lines()]==[0, 1, 4]


@pytest.mark.parametrize('step', ('"1"', 'true', '1e3', '-3', '9'*30, 'null', '[1]', '{}', '"x"'))
def test_steps_of_another_type(home, step):
    "The last step of a run is its last valid step number; step numbers of a wrong type are ignored."
    (home/'log'/'odd').write_bytes(lines(row(2))+b'{"ttype":"output","tname":"o","module":"m","step":%s}\n' % step.encode())
    assert last_step_of(home/'log'/'odd')==2 and [r['step'] for r in emberTracker('odd', home).latest_line_list()]==[2]
    assert runs(home).set_index('name').loc['odd', 'steps']==3


def test_the_last_step_is_far_from_the_end(home):
    (home/'log'/'far').write_bytes(lines(row(5))+lines(dict(note='x'*1000))*5000)
    assert last_step_of(home/'log'/'far')==5


def test_a_report_is_not_written_through_a_link(home, tmp_path, monkeypatch):
    "A report with the default name is not written through a link. A path that the user gives may be a link."
    monkeypatch.chdir(tmp_path)
    (tmp_path/'secret').write_text('mine')
    for made in (lambda: torchember.report('good', home=home), lambda: torchember.report('good', tmp_path, home=home)):
        (tmp_path/'good.html').unlink(missing_ok=True)
        (tmp_path/'good.html').symlink_to('secret')
        assert made()==tmp_path/'good.html' and not (tmp_path/'good.html').is_symlink() and (tmp_path/'secret').read_text()=='mine'
    (tmp_path/'link.html').symlink_to('secret')
    assert torchember.report('good', 'link.html', home=home)==tmp_path/'secret' and (tmp_path/'link.html').is_symlink()
    for name in ('..', '../up', '/etc/x', 'a\x1b[2J\n', '\u20ac'*300):
        table = read('good', home=home)
        table.attrs['run'] = name
        made = torchember.report(table)
        assert made.parent==tmp_path and made.exists() and made.name.isprintable()


def test_a_log_that_grows_without_an_end_of_line(tmp_path, monkeypatch):
    "A growing line that exceeds the limit is skipped, with one warning."
    from torchember.show.live import following
    monkeypatch.setattr(following, 'longest_line', 100)
    (tmp_path/'log').write_bytes(b'x'*90)
    tail = following.Tail(tmp_path/'log')
    assert tail.more(40)==b'' and tail.at==0
    (tmp_path/'log').write_bytes(b'x'*250)
    assert tail.more(40)==b'' and tail.at>100
    while tail.at<200: tail.more(40)
    with open(tmp_path/'log', 'ab') as f: f.write(b'xx\n'+lines(row(3)))
    assert tail.more(4000).endswith(lines(row(3)))


# ---- rows with hostile content

def test_a_path_of_twenty_thousand_levels(home):
    "The report of a path with 20000 levels shows a hundred levels, and joins the others in one name."
    deep = '.'.join(['x']*20_000)
    table = read('good', home=home).drop(columns='module').assign(path=deep)
    began = time.process_time()
    page = page_of(table)
    # Without this limit, one such module takes 13 seconds and hundreds of megabytes
    assert time.process_time()-began<20 and len(page['tree'])==102
    assert page['tree'][-1][0]==deep and sum(len(p) for p,*_ in page['tree'])<20*len(deep)


def test_exponents_that_no_number_has(home):
    "Plots include rows with valid counts of exponents, and leave out rows with impossible exponents."
    counted = dict(exponents=[0, 3, 1, 0], exponent_min=-2, shape=[4])
    rows = [row(s, **counted) for s in range(3)]+[row(3, **{**counted, 'exponent_min': 2**40}), row(4, **{**counted, 'exponents': [1, {}]})]
    (home/'log'/'odd').write_bytes(lines(*rows))
    table = read('odd', home=home)
    kind, = page_of(table)['kinds']
    assert kind['exponents']['step']==[0, 1, 2] and kind['exponents']['first']==-2 and kind['exponents']['counts']['shape']==[1, 3, 4]
    assert total_counts(table)[0].tolist()==[9, 3] and total_counts(table)[1:]==(-2, 0, 0)
    with pytest.raises(ValueError, match='no exponent counts'): total_counts(table[table.step>2])


def write_odd(home, name, field, value):
    "Write a log with one wrong value in its third row."
    bad = lines({k: v for k,v in row(2).items() if k!=field})[:-2]+b', "%s": %s}\n' % (field.encode(), value.encode())
    (home/'log'/name).write_bytes(lines(row(0), row(1, mean=2.))+bad+lines(row(3, mean=4.)))


odd_values = ('"1"', '{}', '[]', 'true', 'null', '-3', '1e300', '9'*30, '"x"', '[[1]]', '{"a": [1]}', '1.5', '""')


# Nearly all values take the same code path
@pytest.mark.parametrize('values', [odd_values[::3], pytest.param(odd_values, marks=pytest.mark.release)], ids=['some', 'all'])
@pytest.mark.parametrize('field', [*row(), 'nan', 'shape', 'call', 'phase', 'pname', 'supersedes', 'nonfinite', 'path', 'run', 'exponents', 'exponent_min'])
def test_fields_of_another_type(home, field, values):
    "A row with a wrong type neither stops the reading of other rows nor changes their values."
    for i,value in enumerate(values):
        write_odd(home, name := f'odd{i}', field, value)
        t = emberTracker(name, home)
        assert len(t.lines())==len(t.df)==len(read(name, home=home))==4, value
        assert len(t.latest_df) and runs(home).set_index('name').loc[name, 'rows']==4 and t._repr_html_() is None
        table = wide(read(name, home=home), 'mean', 'output')
        column = table.iloc[:, 0]
        assert column[[0, 1, 3]].tolist()==[1., 2., 4.], value
        assert torchember.summary(t, stats=['mean']).df.iloc[0]['mean last']==4., value
        got = torchember.to_logframe(t)['scalar_stats', 'mean']
        assert {1., 2., 4.}<=set(got), value


@pytest.mark.slow
@pytest.mark.parametrize('field', ['step', 'module', 'ttype', 'mean', 'shape', 'nan', 'exponents'])
def test_pictures_of_fields_of_another_type(home, field):
    for i,value in enumerate(('"1"', '{}', '[]', 'true', '9'*30)):
        write_odd(home, name := f'odd{i}', field, value)
        t = emberTracker(name, home)
        assert torchember.overview(t).get_xlabel()=='step', value
        assert 'step 3' in Viewer(home, True, {}).answer(name, True)['line'], value
        assert page_of(t)['run']['last']==3, value
        plt.close('all')


# ---- hostile names

hostile = (r'$\x$', '$', '$$', '\x1b[2J', '\x1b]0;t\x07', '\x9b31m', '\u202eabc', 'a\nb', '(', '<script>', '_hidden', '%s', '{0}', "'", '\\', 'größe', '层')


@pytest.fixture
def named_run(home):
    "Record a run whose layers and scalar have hostile names."
    layers = [row(s, module=f'model(Net).{n}(L)', exponents=[0, 3, 1, 0], exponent_min=-2, shape=[4], std=.5+i)
        for s in range(3) for i,n in enumerate(hostile)]
    (home/'log'/'named').write_bytes(lines(*layers, *(row(s, module='model(Net)', ttype='scalar', **{r'$\x$': 10.**s}) for s in range(4))))
    return emberTracker('named', home)


pictures = {
    'overview': lambda r: torchember.overview(r, loss=r'$\x$'),
    'exp_hist': lambda r: torchember.exp_hist(r, layer=r'$\x$'),
    'tree': torchember.tree,
    'ridge': lambda r: torchember.ridge(r, layer=r'$\x$'),
    'lines': lambda r: torchember.scalar_line(r, scalar_metric='std'),
    'panels': lambda r: torchember.scalar_line(r, layer=[r'$\x$', '\x1b[2J'], scalar_metric='std'),
    'heat map': lambda r: torchember.scalar_global_heatmap(r, tt='output', scalar_metric='std'),
    'losses': lambda r: read_losses(None, r.df).draw(plt.figure()),
    'layers': lambda r: plot_hist({n: torch.ones(2) for n in hostile}, r'$\x$', lw=True),
    'stripes': lambda r: plot_heatmap({n: torch.ones(2) for n in hostile}, r'$\x$')}


@pytest.mark.filterwarnings('ignore:.*(Glyph|font)') # Fonts lack many of these letters
@pytest.mark.parametrize('picture', pictures)
def test_names_are_drawn_letter_by_letter(named_run, picture):
    "Matplotlib must not read a name as a formula, because this would raise an error or change the name."
    pictures[picture](named_run)
    texts = [t for n in plt.get_fignums() for t in plt.figure(n).findobj(plt.Text) if t.get_text()]
    for n in plt.get_fignums(): plt.figure(n).canvas.draw()
    plt.close('all')
    assert not [t.get_text() for t in texts if not quiet(t.get_text())]
    assert not [t.get_text() for t in texts if r'\x$' in t.get_text() and t.get_parse_math()]


def quiet(text): return all(c.isprintable() or c in '\n\t' for c in text)


def said_by(f):
    "Call a function. Return all its texts: warnings, errors, output and result."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        try: got = repr(f())
        except (LookupError, ValueError, TypeError, OSError) as e: got = ' '.join(map(str, e.args))
    return [got, *(str(w.message) for w in said if issubclass(w.category, EmberWarning))]


def net_named(names, kind):
    "Return a model whose class and layers have hostile names."
    net = type(kind, (torch.nn.Sequential,), {})()
    for n in names: net.add_module(n, torch.nn.Linear(2, 2))
    return net


def test_names_reach_terminals_printable(tmp_path, capsys):
    "No warning, repr, plan, summary or error contains a control character from a name of a layer, class, mark or run."
    esc,names = '\x1b[2J',[n for n in hostile if n!='_hidden']
    said,net = [],net_named(names, f'Net{esc}')
    def warned(f): said.extend(said_by(f)); return f
    with torchember.torchEmber(net, home=tmp_path) as te:
        te.mark(**{esc: 1.})
        for f in (lambda: te, lambda: te.plan(), lambda: te.plan(torch.ones(1, 2)), lambda: te.tracks,
            lambda: te.model(torch.full((1, 2), float('nan'))).sum().backward(),
            te.step, lambda: te.unmark('no such'), lambda: torchember.torchEmber(net, include='no such')): warned(f)
    table = read(te.fname, home=tmp_path)
    twice = table.assign(run=[esc]+['b']*(len(table)-1))
    for f in (lambda: torchember.summary(te), te.close, lambda: torchember.summary(te, layer='no such'), lambda: read(te.fname, path='no such', home=tmp_path),
        lambda: read(te.fname, columns='no such', home=tmp_path), lambda: wide(table, 'no such'), lambda: wide(table, 'std', 'no such'),
        lambda: wide(twice, 'std'), lambda: torchember.summary(twice), lambda: torchember.overview(te, loss='no such'),
        lambda: torchember.summary(table.drop(columns='step').rename(columns={'std': esc})), lambda: te.t, lambda: te.close(),
        lambda: torchember.from_weight(net), lambda: torchember.from_weight(net).describe(display=False), lambda: torchember.from_weight(net)['no such'],
        lambda: torchember.from_weight(net).norm(lw=True), lambda: select([type(net), 'a']), lambda: runs(tmp_path).to_string()): warned(f)
    torchember.from_weight(net).describe()
    said.append(capsys.readouterr().out)
    assert any('2J' in t for t in said)
    assert not [t for t in said if not quiet(t)]
    # Files and tables contain the names unchanged
    assert set(read(te.fname, home=tmp_path)['path'])>={esc, 'größe', '层', r'$\x$'}
    assert "größe" in repr(torchember.summary(te)) and '层' in repr(torchember.summary(te))
