"A run of several processes has one name in the list of runs, pictures, texts, reports and file operations"
import json
import os
import re
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import programs
import pytest

import torchember
from torchember import EmberWarning, du, mv, read, rm, runs

here = Path(__file__).parent
libraries = 'import numba, pandas, scipy.stats, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor.parallel'


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "Runs of two processes: FSDP2, a pipeline, and replicas of which one drifts"
    d = tmp_path_factory.mktemp('ranks')
    helpers = os.pathsep.join([str(here.parent), os.environ.get('PYTHONPATH', '')])
    programs.ranks(here.parent/'frameworks/ranked.py', d, 'sharded', 'pipeline', 'drifted', n=2, after=libraries, PYTHONPATH=helpers)
    for f in d.glob('*.jsonl'): f.unlink()
    return d


@pytest.fixture
def home(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path/'home')
    monkeypatch.setenv('TORCHEMBER_HOME', str(tmp_path/'home'))
    return tmp_path/'home'


def files(home): return sorted(str(p.relative_to(home)) for p in home.glob('*/*'))
def of(name, there): return [f for f in there if name in f]


# ---- list of runs

@pytest.mark.slow
def test_a_run_of_several_processes_is_one_row(home):
    got = runs().set_index('name')
    assert sorted(got.index)==['drifted_2', 'pipeline_2', 'sharded_2']
    logs = [(home/'log'/f'pipeline_2.rank{k}').read_bytes() for k in range(2)]
    r,rows = got.loc['pipeline_2'],[len(b.splitlines()) for b in logs]
    assert (r.ranks, r.steps, r.rows, r['size'], r.running)==(2, 3, sum(rows), sum(map(len, logs)), False)
    assert min(rows)>0 and got.problem.isna().all() and got.end.notna().all()


def test_a_missing_rank_is_reported(home):
    (home/'log/sharded_2.rank1').unlink()
    for f in (home/'data').glob('*sharded_2.rank1.json'): f.unlink()
    lines = (home/'log/pipeline_2.rank1').read_bytes().splitlines(True)
    (home/'log/pipeline_2.rank1').write_bytes(b''.join(l for l in lines if b'"step":2' not in l.replace(b' ', b'')))
    (home/'log/drifted_2.rank1').unlink()
    got = runs().set_index('name').problem
    assert got['sharded_2']=='of 2 processes rank 1 left no log'
    assert got['pipeline_2']=='rank 1 has 2 of 3 steps'
    assert 'rank 1: Its log is missing' in got['drifted_2']


def test_a_long_log_without_an_end_is_not_read(tmp_path, monkeypatch):
    from torchember.frames import listing
    (tmp_path/'log').mkdir()
    line = b'{"step": 0, "ttype": "output", "tname": "a", "module": "N", "mean": 1.0}\n'
    (tmp_path/'log/long').write_bytes(line*30_000)
    monkeypatch.setattr(listing, 'most_counted', 1<<20)
    monkeypatch.setattr(listing, 'count_lines', lambda *a: pytest.fail('counted'))
    assert abs(runs(tmp_path).rows[0]-30_000)<10 and runs(tmp_path).steps[0]==1


# ---- file operations

def test_removal_deletes_only_the_files_of_the_run(home, capsys):
    for n in 'sharded_20.rank0', 'sharded_2.rank10x', 'a_sharded_2.rank1': shutil.copy(home/'log/sharded_2.rank0', home/'log'/n)
    shutil.copy(home/'data/base_sharded_2.rank0.json', home/'data/base_a_sharded_2.rank1.json')
    (home/'data/mine_sharded_2.rank0.json').write_text('1') # This file belongs to the user
    (home/'data/sharded_2.json').write_text('1') # This file belongs to no run
    (home/'log/sharded_2.rank1.parts').mkdir()
    (home/'log/sharded_2.rank1.parts/0.parquet').write_bytes(b'x'*100)
    before = files(home)
    others = [f for f in before if not f.removesuffix('.json').removesuffix('_latest').removesuffix('.parts').endswith(('sharded_2.rank0', 'sharded_2.rank1'))
        or 'a_sharded' in f]
    size = du('sharded_2').iloc[0]
    assert (size['ranks'], size.parts, size.files)==(2, 100, len(before)-len(others))
    got = rm('sharded_2')
    assert files(home)==others and 'log/sharded_20.rank0' in others and 'data/base_a_sharded_2.rank1.json' in others
    assert got.name.tolist()==['sharded_2'] and capsys.readouterr().out.startswith(f'removed sharded_2: {size.files} files')
    with pytest.raises(FileNotFoundError, match=r"No run 'sharded_2'"): rm('sharded_2')


def test_one_rank_has_its_own_name(home):
    shutil.copy(home/'log/sharded_2.rank1', home/'log/sharded_2.rank10')
    before = files(home)
    rm('sharded_2.rank1')
    assert set(before)-set(files(home))=={f for f in before if f.removesuffix('.json').removesuffix('_latest').endswith('sharded_2.rank1')}


def test_an_interrupted_removal_can_be_repeated(home, monkeypatch):
    class Stop(Exception): pass
    n,unlink = len(du('pipeline_2')) and int(du('pipeline_2').files[0]),Path.unlink
    for k in range(n):
        def some(p, missing_ok=False, left=[1]): # noqa: B006
            if not left: raise Stop
            left.pop()
            unlink(p, missing_ok=missing_ok)
        with monkeypatch.context() as m:
            m.setattr(Path, 'unlink', some)
            try: rm('pipeline_2')
            except Stop: assert 'pipeline_2' in runs().name.tolist(), k
    assert 'pipeline_2' not in runs().name.tolist() and not of('pipeline_2', files(home))


@pytest.mark.parametrize('how', (rm, lambda run: mv(run, 'other')))
def test_running_and_foreign_runs_are_not_removed(home, how):
    base = home/'data/base_sharded_2.rank1.json'
    was = base.read_text()
    known = json.loads(was)
    def written(**more): base.write_text(json.dumps({k: v for k,v in known.items() if k!='end'}|more))
    before = files(home)
    for more,said in (({'pid': os.getpid()}, r'by this process. End the recording first: te.close\(\)'),
            ({'pid': os.getppid()}, f'by process {os.getppid()} on'),
            ({'host': 'elsewhere'}, 'or its process has crashed: the run was started on elsewhere')):
        written(**more)
        if 'host' in more: os.utime(home/'log/sharded_2.rank1')
        with pytest.raises(ValueError, match=said): how('sharded_2')
        assert files(home)==before
    base.write_text(was)
    (home/'log/link').symlink_to(home/'log/drifted_2.rank0')
    with pytest.raises(OSError, match='is a symbolic link'): how('link')
    (home/'log/folder').mkdir()
    with pytest.raises(FileNotFoundError, match="No run 'folder'"): how('folder')
    assert (home/'log/drifted_2.rank0').exists() and (home/'log/link').is_symlink()


def test_ranks_are_removed_together_or_not_at_all(home):
    base = home/'data/base_sharded_2.rank1.json'
    base.write_text(base.read_text().replace('"end"', '"was"').replace('"pid": ', '"pid": 1, "p": '))
    before = files(home)
    with pytest.raises(ValueError, match='by process 1 '): rm('*_2')
    assert files(home)==before
    rm(['pipeline_2', 'drift*'])
    assert runs().name.tolist()==['sharded_2']


def test_a_moved_run_is_the_same_run(home):
    before,there = read('pipeline_2'),files(home)
    assert mv('pipeline_2', 'cut lr=3e-4')=='cut lr=3e-4'
    assert files(home)==sorted(f.replace('pipeline_2', 'cut lr=3e-4') for f in there)
    assert read('cut lr=3e-4').drop(columns='ts', errors='ignore').equals(before.drop(columns='ts', errors='ignore'))
    assert runs().set_index('name').loc['cut lr=3e-4', ['ranks', 'model', 'steps']].tolist()==[2, 'Sequential', 3]
    for name,error,said in (('sharded_2', FileExistsError, 'is already used'), ('a/b', ValueError, 'separator'), ('nul', ValueError, 'device'),
            ('x_latest', ValueError, '_latest'), (3, ValueError, 'not empty')):
        with pytest.raises(error, match=said): mv('drifted_2', name)
    with pytest.raises(ValueError, match='mv takes one run'): mv('*_2', 'x')
    assert 'drifted_2' in runs().name.tolist()


def test_a_run_that_is_closed_can_be_removed_and_its_name_taken_again(tmp_path):
    import torch
    net = torch.nn.Linear(2, 1)
    for _ in range(2):
        te = torchember.torchEmber(net, name='again', home=tmp_path)
        net(torch.ones(1, 2)).sum().backward()
        te.step()
        te.t.barrier()
        with pytest.raises(ValueError, match='by this process'): rm(te, tmp_path)
        te.close()
        rm(te, tmp_path)
        assert not files(tmp_path)


# ---- pictures, texts and reports

def data_of(file): return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', file.read_text(), re.S)[1])


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:drifted_2')
def test_every_picture_accepts_a_run_of_several_ranks(home):
    name = 'pipeline_2'
    for f in 'overview', 'scalar_line', 'exp_hist', 'ridge', 'updates', 'tree', 'out_of_range', 'scalar_global_heatmap':
        fig = getattr(torchember, f)(name).figure
        assert name in ' '.join([t.get_text() for t in fig.texts]+[a.get_title()+a.get_title('left') for a in fig.axes]+[fig.get_suptitle()]), f
        plt.close('all')
    assert torchember.summary(name).df.loc['3', 'steps']==3
    assert set(torchember.to_logframe(name)['metadata', 'step'])==set(range(3))
    assert torchember.query('SELECT count(DISTINCT step) n FROM log', name).n[0]==3
    with pytest.warns(EmberWarning, match='only in a notebook'): torchember.interactive(torchember.tree, run=name)
    fig = torchember.compare(['sharded_2', 'drifted_2']).figure
    assert 'drifted_2' in ' '.join(t.get_text() for t in fig.findobj(plt.Text))
    plt.close('all')
    with pytest.raises(FileNotFoundError, match=rf"The run '{name}' has 2 processes, each with a log. read\('{name}'\)"):
        len(torchember.emberTracker(name).df)


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:drifted_2')
def test_notes_about_ranks_are_in_the_summary_and_on_the_page(home, tmp_path, monkeypatch):
    said = 'Replicas have drifted apart: weight '
    assert said in repr(got := torchember.summary('drifted_2')) and said in got._repr_html_() and len(got.said)==1
    assert torchember.summary('sharded_2').said==() and 'said' not in read('sharded_2').attrs
    assert read('*_2').attrs['said'][0].startswith(f'drifted_2: {said}')
    monkeypatch.delenv('TORCHEMBER_HOME')
    for name in 'drifted_2', 'sharded_2':
        run = data_of(torchember.report(name, tmp_path/'page.html', home=home))['run']
        assert (run['name'], run['ranks'], run['steps'], run['running'])==(name, 2, 3, False) and run['start']<=run['end']
        assert said in run.get('missing', '') if name=='drifted_2' else 'missing' not in run


def test_a_parameter_that_is_not_trained_on_any_process_is_named(home):
    for k in range(2):
        p = home/f'data/parameters_sharded_2.rank{k}.json'
        noted = json.loads(p.read_text())
        for e in noted['parameters']:
            if e['path']=='layers.0': e['gradient'] = False
            if e['path']=='layers.1': e['gradient'] = k==1
        p.write_text(json.dumps(noted))
    from torchember.show.missing import parameters_of_run
    got = {(p['path'], p['name']): p['gradient'] for p in parameters_of_run('sharded_2')}
    assert got=={(f'layers.{i}', n): i>0 for i in range(3) for n in ('weight', 'bias')}
    assert 'layers.0' in torchember.summary('sharded_2').missing and 'layers.1' not in torchember.summary('sharded_2').missing
    # Parameters of both pipeline stages
    assert {(p['path'], p['name']) for p in parameters_of_run('pipeline_2')}=={(f'{i}', n) for i in (0, 2, 4) for n in ('weight', 'bias')}
    assert torchember.overview('sharded_2') is not None
    plt.close('all')


def test_live_follows_all_ranks(home, capfd):
    torchember.live('sharded_2', every=.1, wait=True)
    assert 'sharded_2: step 2' in capfd.readouterr().err
