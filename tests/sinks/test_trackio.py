"Tests of the sink for trackio: a run arrives with the steps of the training, nothing is printed, other runs count as before"
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from sinked import by_hand, forget, killed, same, told_where_nobody_answers, train
from torch import nn

from torchember import read, replay, torchEmber
from torchember.sinks.feed import sink_of
from torchember.sinks.trackio import RunProxy, Trackio, without_print

trackio = pytest.importorskip('trackio')


@pytest.fixture
def project(request, monkeypatch):
    "Return a new project, since all tests share a database."
    for k in ('TRACKIO_SPACE_ID', 'TRACKIO_SERVER_URL', 'TRACKIO_WRITE_TOKEN'): monkeypatch.delenv(k, raising=False)
    yield f'{request.node.name} {time.time_ns()}'
    if trackio.context_vars.current_run.get() is not None: trackio.finish()
    trackio.context_vars.current_project.set(None)


def mine(project, **kwargs): return trackio.init(project, name='mine', embed=False, auto_log_cpu=False, auto_log_gpu=False, **kwargs)


def rows(project, run=None):
    "Return a dict: key -> {step: value} of a run, or of the only run of a project. Each step must occur once."
    if run is None: run, = trackio.Api().runs(project)
    found = {}
    for r in trackio.SQLiteStorage.get_logs(project, run.name, run_id=run.id):
        for k,v in r.items():
            if k in ('step', 'timestamp'): continue
            assert r['step'] not in found.setdefault(k, {}), f'{k} has step {r["step"]} twice'
            found[k][r['step']] = v
    return found


def opened(project, **kwargs):
    sink = Trackio(project=project, **kwargs)
    sink.open('first', {})
    return sink


def test_own_run_has_the_values_of_the_log_and_prints_nothing(project, tmp_path, capsys):
    _,report = train(tmp_path, stats=['mean', 'std', 'rms'], sinks=Trackio(project=project))
    assert not report['remarks'] and capsys.readouterr().out==''
    run, = trackio.Api().runs(project)
    assert run.name=='first' and run.config['torchember']['model']=='Sequential'
    found = rows(project)
    assert found.pop('nonfinite/count')==dict.fromkeys(range(6), 0)
    same(found, by_hand(read('first', home=tmp_path)))
    assert {*found['output/0/rms']}=={*range(6)} and {*found['eval/output/2/rms']}=={5}
    assert trackio.context_vars.current_run.get() is None and not trackio.config.get('torchember')


def test_default_project_is_torchember(project, tmp_path):
    name = f'ours {time.time_ns()}'
    te = torchEmber(model := nn.Linear(2, 2), home=tmp_path, name=name, sinks='trackio')
    model(torch.ones(1, 2))
    assert not te.close()['remarks']
    run, = [r for r in trackio.Api().runs('torchember') if r.name==name]
    assert {*rows('torchember', run)['output/model/rms']}=={0}


def test_open_run_is_used_and_counts_as_before(project, tmp_path, capsys):
    run = mine(project, config={'lr': .1})
    trackio.log({'loss': 1.})
    capsys.readouterr()
    train(tmp_path, sinks='trackio')
    assert capsys.readouterr().out=='' and trackio.context_vars.current_run.get() is run and run._local_sender_thread.is_alive()
    trackio.log({'loss': .5})
    trackio.finish()
    found, = [rows(project)]
    assert found['loss']=={0: 1., 1: .5} and {*found['output/0/rms']}=={*range(6)} and {*found['weight/0.weight/rms']}=={*range(6)}
    theirs, = trackio.Api().runs(project)
    assert theirs.name=='mine' and theirs.config['lr']==.1 and 'torchember' not in theirs.config


def test_run_of_the_user_can_be_a_sink(project, tmp_path):
    run = mine(project)
    other = mine(f'{project} other') # This call finishes the first run
    sink = sink_of(run)
    assert isinstance(sink, Trackio) and sink.run is run
    train(tmp_path, sinks=run)
    trackio.finish()
    assert {*rows(project)['output/0/rms']}=={*range(6)}
    assert not trackio.SQLiteStorage.get_logs(other.project, other.name, run_id=other.id)


def test_one_sink_can_send_two_runs_in_turn(project, tmp_path):
    "The metrics of each model have the prefix of its run."
    sink = Trackio(project=project, prefix='gen/', ttypes='input')
    for name,x in (('a', 1.), ('b', 2.)):
        with torchEmber(nn.Linear(2, 2), name=name, home=tmp_path, sinks=sink, stats=['rms'], ttypes='input') as te:
            for _ in range(3): te.model(torch.full((1, 2), x))
        assert sink.of is sink.run is None and not sink.owns_run
    found = {r.name: rows(project, r) for r in trackio.Api().runs(project)}
    assert {n: v['gen/input/model/rms'] for n,v in found.items()}=={n: dict.fromkeys(range(3), x) for n,x in (('a', 1.), ('b', 2.))}


def test_run_is_found_again_and_has_nothing_twice(project, tmp_path):
    train(tmp_path, stats='numerics', sinks=Trackio(project=project))
    before = rows(project)
    forget(tmp_path)
    assert replay('first', Trackio(project=project), home=tmp_path)==6
    assert rows(project)==before # `rows` fails if a step occurs twice
    assert replay('first', Trackio(project=project), home=tmp_path)==0
    df = read('first', home=tmp_path, ttype='weight', path='0', steps=3)
    h = before['weight/0.weight/exponents'][3]
    full = [(r['exponent_min']+i-1, n) for r in [df.iloc[0]] for i,n in enumerate(r['exponents']) if n]
    assert h['_type']=='trackio.histogram' and [(round(math.log2(b)), n) for b,n in zip(h['bins'], h['values'], strict=False) if n]==full


def test_only_missing_steps_are_sent(project):
    sink = opened(project)
    sink.scalars(3, {'output/0/rms': 1.})
    sink.close()
    again = opened(project)
    again.scalars(3, {'output/0/rms': 9., 'output/1/rms': 2.})
    again.scalars(4, {'output/0/rms': 3.})
    again.close()
    assert rows(project)=={'output/0/rms': {3: 1., 4: 3.}, 'output/1/rms': {3: 2.}}


def test_continued_run_is_the_same_run(project, tmp_path):
    for resume in (False, True): train(tmp_path, sinks=Trackio(project=project), resume=resume)
    assert {*rows(project)['output/0/rms']}=={*range(12)}


def test_other_run_with_the_same_name_is_separate(project):
    for start in ('2026-01-01 00:00:00', '2026-01-01 00:00:01', '2026-01-01 00:00:00'):
        sink = Trackio(project=project)
        sink.open('first', {'start': start})
        sink.scalars(int(time.time()), {'output/0/rms': 1.})
        sink.close()
    assert len(trackio.Api().runs(project))==2


def test_findings_are_alerts_that_are_not_printed(project, capsys):
    found = [{'rule': r, 'text': 'so it is.', 'severity': s, **more} for r,s,more in (('nan', 'error', {'advice': 'Look.'}),
        ('nan', 'error', {'over': True}), ('stalls', 'info', {}), ('dead', 'warning', {}))]
    for _ in range(2):
        sink = opened(project)
        sink.scalars(3, {'output/0/rms': 1.})
        sink.findings(3, found)
        sink.close()
    said = trackio.Api().alerts(project)
    assert sorted((a['title'], a['level'], a['step'], a['text']) for a in said)==[('dead', 'warn', 3, 'so it is.'), ('nan', 'error', 3, 'so it is. Look.')]
    assert capsys.readouterr().out==''


def test_repeated_finding_is_another_alert(project):
    sink = opened(project)
    nan = {'rule': 'nan', 'text': 'It is NaN.', 'severity': 'error'}
    sink.findings(3, [nan])
    sink.close()
    again = opened(project)
    again.findings(8, [nan])
    again.close()
    assert sorted(a['step'] for a in trackio.Api().alerts(project))==[3, 8]


def test_row_of_the_user_does_not_count_as_sent(project, monkeypatch):
    sink = opened(project)
    sink.pending = {3: {'output/0/rms', 'output/1/rms'}, 4: {'output/0/rms'}}
    monkeypatch.setattr(sink, 'rows', lambda first: [(3, {'loss': 1.}), (3, {'output/0/rms': 1.}), (4, {'output/0/rms': 1.})])
    assert not sink.is_persisted() and sink.pending=={3: {'output/1/rms'}}
    monkeypatch.setattr(sink, 'rows', lambda first: [(3, {'output/1/rms': 1.})])
    assert sink.is_persisted()
    sink.close()


def test_flush_does_not_wait_for_accepted_numbers(project, monkeypatch):
    sink = opened(project)
    monkeypatch.setattr(Trackio, 'is_local', False)
    for step in range(3):
        sink.scalars(step, {'output/0/rms': 1.})
        sink.flush()
        assert sink.pending=={}
    sink.close()


def test_alert_of_the_user_is_printed(project, capsys):
    run = mine(project)
    sink = Trackio()
    sink.open('first', {})
    sink.findings(3, [{'rule': 'nan', 'text': 'It is NaN.', 'severity': 'error'}])
    capsys.readouterr()
    trackio.alert('mine', 'something')
    assert 'mine' in capsys.readouterr().out
    sink.close()
    trackio.finish()
    assert {(a['title'], a['step']) for a in trackio.Api().alerts(project)}=={('nan', 3), ('mine', 0)} and run.name=='mine'


@pytest.mark.filterwarnings('ignore:torchember', 'ignore:trackio')
def test_lost_numbers_are_noticed_and_sent_later(project, tmp_path, monkeypatch):
    monkeypatch.setattr(Trackio, 'patience', 1.5)
    with monkeypatch.context() as m:
        def refuses(*args, **kwargs): raise OSError('disk full')
        m.setattr(trackio.SQLiteStorage, 'bulk_log', refuses) # trackio only warns of this error
        _,report = train(tmp_path, sinks=Trackio(project=project))
        assert any('trackio did not confirm' in r for r in report['remarks'])
    assert replay('first', Trackio(project=project), home=tmp_path)==6
    assert {*rows(project)['output/0/rms']}=={*range(6)}


def test_numbers_are_stored_after_flush(project):
    sink = opened(project)
    for step in range(50): sink.scalars(step, {'output/0/rms': step/2})
    sink.flush()
    # The rows are already readable while the run is open
    assert rows(project)['output/0/rms']=={s: s/2 for s in range(50)}
    run = sink.run
    sink.close()
    assert not run._local_sender_thread.is_alive() and sink.run is None


@pytest.mark.filterwarnings('ignore:torchember')
def test_non_finite_values_and_odd_names_arrive(project, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential()
    names = ['a(1)', 'a[1]', 'b//c', 'ü', '/', "it's", 'x'*300, 'a:b', '"', '\\', '__x', 'step']
    for n in names: model.add_module(n, nn.Linear(4, 4))
    te = torchEmber(model, home=tmp_path, name="it's", stats=['rms'], ttypes=['output'], sinks=Trackio(project=project))
    model(torch.randn(5, 4))
    te.log(loss=math.inf, other=-math.inf, lost=math.nan)
    assert not any('trackio' in r for r in te.close()['remarks'])
    df,found = read("it's", home=tmp_path, ttype='output'),rows(project)
    assert found['scalar/loss'][0]==math.inf and found['scalar/other'][0]==-math.inf and math.isnan(found['scalar/lost'][0])
    rms = df[df['path']!=''].set_index('path')['rms']
    assert len(rms)==len(names) and {k: v[0] for k,v in found.items() if k.endswith('/rms')}=={f'output/{n}/rms': pytest.approx(v) for n,v in rms.items()}


def test_id_with_a_quote_works(project):
    run = trackio.Run(None, project, None, name="it's", run_id="it's")
    sink = Trackio(run)
    sink.open('first', {})
    sink.scalars(0, {'output/0/rms': 1.})
    sink.close()
    run.finish()
    assert rows(project)=={'output/0/rms': {0: 1.}}


def test_two_logging_threads_keep_their_steps(project):
    run = mine(project)
    sink = Trackio()
    sink.open('first', {})
    thread = threading.Thread(target=lambda: [sink.scalars(step, {'output/0/rms': 1.}) for step in range(1000, 1500)])
    thread.start()
    for _ in range(200): run.log({'loss': 1.})
    thread.join()
    sink.close()
    trackio.finish()
    found = rows(project)
    assert {*found['loss']}=={*range(200)} and {*found['output/0/rms']}=={*range(1000, 1500)}


def test_proxy_reads_the_run_and_keeps_what_is_set():
    class Run:
        n,more = 1,2
    run = Run()
    proxy = RunProxy(run)
    proxy.n += 5
    run.more = 3
    assert (proxy.n, proxy.more, run.n)==(6, 3, 1)
    with pytest.raises(AttributeError): _ = proxy.other


def test_function_without_print_returns_the_same(capsys):
    def f(a, b=2, *, c=3):
        print('heard')
        return a,b,c
    assert without_print(f)(1, c=4)==(1, 2, 4) and without_print(f)(1)==(1, 2, 3) and capsys.readouterr().out==''
    assert f(1, 5)==(1, 5, 3) and capsys.readouterr().out=='heard\n'


def test_other_folder_is_another_destination(project, monkeypatch):
    def target(url):
        sink = Trackio(trackio.Run(url, project, object() if url else None, name='first', run_id='first', server_base_url=url))
        sink.run.finish()
        return sink.target()
    assert len({target(None), target('http://127.0.0.1:1'), target('http://127.0.0.1:2')})==3


@pytest.mark.filterwarnings('ignore:torchember')
def test_closed_space_raises(project, tmp_path, monkeypatch):
    monkeypatch.setenv('TRACKIO_SPACE_ID', 'me/board')
    _,report = train(tmp_path, sinks=Trackio(project=project))
    assert any('trackio.init' in r for r in report['remarks'])


def test_server_gets_the_numbers(project, tmp_path, monkeypatch, capsys):
    app,_,_,full = trackio.show(project, open_browser=False, block_thread=False)
    try:
        monkeypatch.setenv('TRACKIO_SERVER_URL', full)
        capsys.readouterr()
        _,report = train(tmp_path, stats=['mean', 'std', 'rms'], sinks=Trackio(project=project))
        assert not report['remarks'] and capsys.readouterr().out==''
        found = rows(project)
        found.pop('nonfinite/count')
        same(found, by_hand(read('first', home=tmp_path)))
        assert replay('first', Trackio(project=project), home=tmp_path)==0
        monkeypatch.delenv('TRACKIO_SERVER_URL')
        # This project has no rows of the run yet
        assert replay('first', Trackio(project=f'{project} here'), home=tmp_path)==6
        (there,),(here,) = (trackio.Api().runs(p) for p in (project, f'{project} here'))
        assert there.id==here.id
    finally: app.close()


@pytest.mark.slow
@pytest.mark.release # test_sinks.py has this test for TensorBoard
def test_killed_run_is_sent_later_without_duplicates(project, tmp_path):
    name = f'killed {time.time_ns()}'
    code = killed.replace("'first'", repr(name))
    p = subprocess.run([sys.executable, '-c', code, str(tmp_path), 'trackio'], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert p.returncode==-signal.SIGKILL and p.stdout=='', p.stderr
    run, = [r for r in trackio.Api().runs('torchember') if r.name==name]
    before = rows('torchember', run)['weight/0.weight/rms']
    n = replay(name, 'trackio', home=tmp_path)
    after = rows('torchember', run)['weight/0.weight/rms'] # `rows` fails if a step occurs twice
    assert 0<len(before)<=400 and len(after)==400 and n>=400-len(before) and all(after[s]==v for s,v in before.items())


@pytest.mark.slow
@pytest.mark.release # Waits for half a minute
@pytest.mark.parametrize('silent', [False, True])
def test_silent_server_does_not_end_training_and_gets_all_later(project, tmp_path, silent):
    took,ended = told_where_nobody_answers(tmp_path, 'trackio', silent, TRACKIO_SERVER_URL='{}/?write_token=x')
    assert took<60 and ended<10 # The time includes the import of trackio, and at most 10 s of waiting for the sink
    assert 'TRACKIO_SERVER_URL' not in os.environ and replay('first', Trackio(project=project), home=tmp_path)==20
    assert {*rows(project)['output/0/rms']}=={*range(20)}
