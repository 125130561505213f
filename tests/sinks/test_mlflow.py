"Tests of the sink for MLflow: a run arrives with the steps of the training, and other runs are unchanged"
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from sinked import by_hand, forget, killed, same, told_where_nobody_answers, train
from torch import nn

from torchember import read, replay, torchEmber
from torchember.sinks.feed import sink_of
from torchember.sinks.mlflow import MLflow, metric_name, percentile_edges

mlflow = pytest.importorskip('mlflow')


@pytest.fixture(scope='module')
def database(tmp_path_factory):
    "Create one database for all tests, since it takes seconds."
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')/'mlflow.db'}"
    mlflow.MlflowClient(uri)
    return uri


@pytest.fixture
def store(database, monkeypatch, request, tmp_path):
    "Create an experiment for one test."
    monkeypatch.chdir(tmp_path) # MLflow would write artifacts into the current folder
    # MLflow may set these variables, so monkeypatch must restore them
    for k in ('MLFLOW_EXPERIMENT_ID', 'MLFLOW_RUN_ID'):
        monkeypatch.setenv(k, '')
        monkeypatch.delenv(k)
    monkeypatch.setattr('mlflow.tracking.fluent._active_experiment_id', None)
    monkeypatch.setenv('MLFLOW_EXPERIMENT_NAME', request.node.name)
    mlflow.set_tracking_uri(database)
    yield mlflow.MlflowClient()
    while mlflow.active_run(): mlflow.end_run()
    mlflow.set_tracking_uri(None)


def runs(name=None): return mlflow.search_runs(experiment_names=[name or os.environ['MLFLOW_EXPERIMENT_NAME']], output_format='list')


def metrics(run, client=None):
    "Return the metrics of a run: name -> {step: value}. Fail if a step occurs twice."
    client = client or mlflow.MlflowClient()
    found = {}
    for k in client.get_run(run.info.run_id).data.metrics:
        history = client.get_metric_history(run.info.run_id, k)
        found[k] = {m.step: m.value for m in history}
        assert len(found[k])==len(history), f'{k} has a step twice'
    return found


def opened(**kwargs):
    sink = MLflow(**kwargs)
    sink.open('first', {})
    return sink


def test_own_run_has_the_values_of_the_log(store, tmp_path):
    _,report = train(tmp_path, stats=['mean', 'std', 'rms'], sinks='mlflow')
    assert not report['remarks']
    run, = runs()
    assert (run.info.run_name, run.info.status, run.data.params['torchember.model'])==('first', 'FINISHED', 'Sequential')
    found = metrics(run)
    assert found.pop('nonfinite/count')==dict.fromkeys(range(6), 0)
    same(found, by_hand(read('first', home=tmp_path)))
    assert [*found['output/0/rms']]==[*range(6)] and [*found['eval/output/2/rms']]==[5]


def test_open_run_is_used_and_stays_open(store, tmp_path):
    with mlflow.start_run(run_name='mine') as mine:
        mlflow.log_metric('loss', 1., step=0)
        train(tmp_path, sinks='mlflow')
        mlflow.log_metric('loss', .5, step=1)
        assert mlflow.active_run().info.run_id==mine.info.run_id and store.get_run(mine.info.run_id).info.status=='RUNNING'
    run, = runs()
    found = metrics(run)
    assert run.info.run_name=='mine' and not run.data.params and 'torchember.run' not in run.data.tags
    assert found['loss']=={0: 1., 1: .5} and [*found['output/0/rms']]==[*range(6)]


@pytest.mark.parametrize('given', [lambda run: run, lambda run: mlflow.get_run(run.info.run_id), lambda run: MLflow(run.info.run_id)])
def test_run_of_the_user_can_be_a_sink(store, tmp_path, given):
    mine = mlflow.start_run(run_name='mine')
    mlflow.end_run()
    with mlflow.start_run(run_name='other'): train(tmp_path, sinks=given(mine))
    found = {r.info.run_name: metrics(r) for r in runs()}
    assert found['other']=={} and [*found['mine']['output/0/rms']]==[*range(6)]
    assert isinstance(sink_of(mine), MLflow) and sink_of(mine).given==mine.info.run_id


def test_one_sink_can_send_two_runs_in_turn(store, tmp_path):
    "The metrics of each model have the prefix of its run."
    sink = MLflow(prefix='gen/', ttypes='input')
    for name,x in (('a', 1.), ('b', 2.)):
        with torchEmber(nn.Linear(2, 2), name=name, home=tmp_path, sinks=sink, stats=['rms'], ttypes='input') as te:
            for _ in range(3): te.model(torch.full((1, 2), x))
        assert sink.of is sink.opened is None
    found = {r.info.run_name: metrics(r) for r in runs()}
    assert {n: v['gen/input/model/rms'] for n,v in found.items()}=={n: dict.fromkeys(range(3), x) for n,x in (('a', 1.), ('b', 2.))}


def test_run_opened_after_the_sink_is_used(store, tmp_path):
    sink = MLflow()
    with mlflow.start_run(run_name='mine') as mine: train(tmp_path, sinks=sink)
    assert [r.info.run_id for r in runs()]==[mine.info.run_id] and [*metrics(mine)['output/0/rms']]==[*range(6)]


def test_run_of_a_launcher_is_used(store, tmp_path, monkeypatch):
    mine = store.create_run('0')
    monkeypatch.setenv('MLFLOW_RUN_ID', mine.info.run_id)
    train(tmp_path, sinks='mlflow')
    assert [*metrics(mine)['output/0/rms']]==[*range(6)] and store.get_run(mine.info.run_id).info.status=='RUNNING'


def test_chosen_experiment_is_used_else_torchember(store, tmp_path, monkeypatch):
    monkeypatch.delenv('MLFLOW_EXPERIMENT_NAME')
    opened().close()
    assert [r.info.run_name for r in runs('torchember')]==['first']
    monkeypatch.setenv('MLFLOW_EXPERIMENT_NAME', 'by name')
    opened().close()
    monkeypatch.delenv('MLFLOW_EXPERIMENT_NAME')
    mlflow.set_experiment('by call')
    opened().close()
    opened(experiment='by argument').close()
    for name in ('by name', 'by call', 'by argument'): assert len(runs(name))==1, name
    assert len(runs('torchember'))==1


def test_run_is_found_again_and_has_nothing_twice(store, tmp_path):
    train(tmp_path, stats='numerics', sinks='mlflow')
    run, = runs()
    before = metrics(run)
    forget(tmp_path)
    assert replay('first', 'mlflow', home=tmp_path)==6
    again, = runs()
    assert again.info.run_id==run.info.run_id and again.info.status=='FINISHED' and again.data.params==run.data.params
    assert metrics(again)==before and [*before['weight/0.weight/exponents/p50']]==[*range(6)]
    assert replay('first', 'mlflow', home=tmp_path)==0


def test_other_run_with_the_same_name_is_separate(store, tmp_path):
    for start in ('2026-01-01 00:00:00', '2026-01-01 00:00:01', '2026-01-01 00:00:00'):
        sink = MLflow()
        sink.open('first', {'start': start})
        sink.close()
    assert len(runs())==2


def test_continued_run_is_the_same_run(store, tmp_path):
    train(tmp_path, sinks='mlflow')
    train(tmp_path, sinks='mlflow', resume=True)
    run, = runs()
    assert [*metrics(run)['output/0/rms']]==[*range(12)] and run.info.status=='FINISHED'


def test_continued_run_has_the_status_running(store):
    opened().close()
    again = opened()
    run, = runs()
    assert run.info.status=='RUNNING'
    again.close()
    assert store.get_run(run.info.run_id).info.status=='FINISHED'


@pytest.mark.filterwarnings('ignore:torchember')
def test_refused_numbers_are_sent_later(store, tmp_path, monkeypatch):
    monkeypatch.setattr('torchember.sinks.feed.StepSender.patience', 0.)
    real,calls = mlflow.MlflowClient.log_batch,[]
    def log_batch(self, *args, metrics=(), **kwargs):
        if metrics:
            calls.append(len(metrics))
            if len(calls) in (2, 3): raise ConnectionError('the network is away')
        return real(self, *args, metrics=metrics, **kwargs)
    monkeypatch.setattr(mlflow.MlflowClient, 'log_batch', log_batch)
    _,report = train(tmp_path, stats=['mean', 'std', 'rms'], sinks='mlflow')
    assert any('the network is away' in r for r in report['remarks']) and calls[2]==2*calls[1]
    run, = runs()
    found = metrics(run)
    found.pop('nonfinite/count')
    same(found, by_hand(read('first', home=tmp_path))) # Steps whose request had failed were sent with a later request
    assert replay('first', 'mlflow', home=tmp_path)==0


@pytest.mark.filterwarnings('ignore:torchember')
def test_numbers_of_a_failing_store_are_sent_later(store, tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        def refuses(*args, **kwargs): raise ConnectionError('away')
        m.setattr(mlflow.MlflowClient, 'get_experiment_by_name', refuses)
        _,report = train(tmp_path, sinks='mlflow')
        assert any("replay('first', 'mlflow')" in r for r in report['remarks'])
    assert not runs() and replay('first', 'mlflow', home=tmp_path)==6
    run, = runs()
    assert [*metrics(run)['output/0/rms']]==[*range(6)] and run.info.status=='FINISHED'


def test_requests_have_at_most_a_thousand_numbers(store, monkeypatch):
    # With this setting, MLflow returns before the numbers are stored
    monkeypatch.setenv('MLFLOW_ENABLE_ASYNC_LOGGING', 'true')
    real,sizes = mlflow.MlflowClient.log_batch,[]
    def log_batch(self, *args, metrics=(), **kwargs):
        sizes.append(len(metrics))
        return real(self, *args, metrics=metrics, **kwargs)
    monkeypatch.setattr(mlflow.MlflowClient, 'log_batch', log_batch)
    sink = opened()
    sizes.clear()
    sink.scalars(0, {f'output/{i}/rms': float(i) for i in range(600)})
    assert sizes==[]
    sink.scalars(1, {f'output/{i}/rms': float(-i) for i in range(1700)})
    sink.flush()
    assert sizes==[1000, 1000, 300]
    run, = runs()
    names = {f'output/{i}/rms' for i in (0, 599, 600, 1699)}
    assert {k: v for k,v in metrics_of(store, run, names).items()}=={'output/0/rms': {0: 0., 1: 0.}, 'output/599/rms': {0: 599., 1: -599.},
        'output/600/rms': {1: -600.}, 'output/1699/rms': {1: -1699.}}
    sink.close()


def metrics_of(client, run, names): return {k: {m.step: m.value for m in client.get_metric_history(run.info.run_id, k)} for k in names}


def test_non_finite_values_arrive_as_in_mlflow(store):
    sink = opened()
    sink.scalars(0, {'scalar/a': math.nan, 'scalar/b': math.inf, 'scalar/c': -math.inf, 'scalar/d': 1e300})
    sink.close()
    found = metrics_of(store, runs()[0], 'scalar/a scalar/b scalar/c scalar/d'.split())
    most = sys.float_info.max # A database has no infinity, so MLflow stores the largest float
    assert math.isnan(found['scalar/a'][0]) and [found[f'scalar/{k}'][0] for k in 'bcd']==[most, -most, 1e300]


def test_layers_with_invalid_names_arrive(store, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential()
    names = ['a(1)', 'a[1]', 'b//c', 'ü', '/', "it's", 'x'*300, 'nl\n', 'a:b', 'tab\t', '%41']
    for n in names: model.add_module(n, nn.Linear(4, 4))
    te = torchEmber(model, home=tmp_path, name='first', stats=['rms'], ttypes=['output'], sinks='mlflow')
    model(torch.randn(5, 4))
    te.log(**{'../loss': 1.})
    assert not te.close()['remarks']
    df,run = read('first', home=tmp_path, ttype='output'),runs()[0]
    found = {k: v[0] for k,v in metrics(run).items()}
    assert found.pop(metric_name('scalar/../loss'))==1. and found.pop('nonfinite/count')==0
    rms = df[df['path']!=''].set_index('path')['rms']
    assert len(rms)==len(names) and sorted(found.values())==pytest.approx(sorted(rms))
    assert all(found[metric_name(f'output/{n}/rms')]==pytest.approx(rms[n]) for n in names if n in rms.index)


def test_metric_names_are_valid_and_differ():
    from mlflow.utils.validation import _validate_metric_name
    parts = ['a', 'A', 'a(', 'a)', 'a_', '', '.', '..', '...', ' ', 'é', '\n', 'a'*250, 'a'*251, 'a:b', '-']
    keys = [f'output/{a}{b}' for a in parts for b in ('', '/rms')]+['/a', 'a/', '../a', './a']
    names = [metric_name(k) for k in keys]
    for n in names: _validate_metric_name(n)
    assert len({*names})==len(names) and max(map(len, names))<=250
    assert metric_name('weight_grad/layers.0.weight/rms')=='weight_grad/layers.0.weight/rms' and metric_name('output/a b/rms')=='output/a b/rms'
    assert re.fullmatch(r'output/a_-[0-9a-f]{8}/rms', metric_name('output/a(/rms'))


def test_percentiles_of_sizes_are_correct():
    assert percentile_edges([1., 2., 4., 8.], [5, 45, 50])=={'p5': 1., 'p50': 2., 'p95': 4.}
    assert percentile_edges([1., 2., 4., 8.], [4, 46, 50])=={'p5': 2., 'p50': 2., 'p95': 4.}
    sink = MLflow.__new__(MLflow)
    told = {}
    sink.queue_numbers = lambda step, numbers: told.update({step: numbers})
    sink.histograms(3, {'weight/0': ([1., 2.], [7])})
    assert told=={3: {f'weight/0/exponents/{p}': 1. for p in ('p5', 'p50', 'p95')}}


def test_findings_are_tags_with_a_line_for_each(store):
    sink = opened()
    nan = {'rule': 'nan', 'text': 'The output of 0 is NaN.', 'severity': 'error'}
    sink.findings(2, [nan, {'rule': 'dead (all)', 'text': 'It is dead.', 'severity': 'info'}])
    sink.findings(5, [nan | {'over': True}])
    sink.close()
    again = opened()
    again.findings(2, [nan])
    again.findings(7, [nan | {'text': 'x'*6000}]) # This text is longer than a tag may be
    again.close()
    tags = runs()[0].data.tags
    assert tags['torchember.finding.nan']=='step 2: The output of 0 is NaN.\nstep 5: no longer so: The output of 0 is NaN.'
    assert tags[metric_name('torchember.finding.dead (all)')]=='step 2: It is dead.'


def test_several_sinks_at_once(store, tmp_path):
    pytest.importorskip('tensorboard')
    trackio = pytest.importorskip('trackio')
    from torchember.sinks.trackio import Trackio
    told,project = {},f'several {time.time_ns()}'
    _,report = train(tmp_path, sinks=['mlflow', Trackio(project=project), 'tensorboard', lambda step, numbers: told.setdefault(step, numbers)])
    assert not report['remarks']
    run,theirs = runs()[0],trackio.Api().runs(project)[0]
    found = metrics(run)
    rows = {}
    for r in trackio.SQLiteStorage.get_logs(project, theirs.name, run_id=theirs.id): rows.setdefault(r['step'], {}).update(r)
    assert [*told]==[*range(6)]
    for step,numbers in told.items():
        assert {k: v[step] for k,v in found.items() if step in v}==numbers=={k: rows[step][k] for k in numbers}


def test_files_of_older_mlflow(store, tmp_path, monkeypatch):
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    mlflow.set_tracking_uri((tmp_path/'mlruns').as_uri())
    train(tmp_path, stats=['mean', 'std', 'rms'], sinks='mlflow')
    forget(tmp_path)
    replay('first', 'mlflow', home=tmp_path)
    run, = runs()
    found = metrics(run)
    found.pop('nonfinite/count')
    same(found, by_hand(read('first', home=tmp_path)))


@pytest.mark.slow
@pytest.mark.release # test_sinks.py has this test for TensorBoard
def test_killed_run_is_sent_later_without_duplicates(store, tmp_path):
    p = subprocess.run([sys.executable, '-c', killed, str(tmp_path), 'mlflow'], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert p.returncode==-signal.SIGKILL, p.stderr
    run, = runs()
    before = metrics(run)['weight/0.weight/rms']
    n = replay('first', 'mlflow', home=tmp_path)
    run, = runs()
    after = metrics(run)['weight/0.weight/rms'] # `metrics` fails if a step occurs twice
    assert 0<len(before)<=400 and len(after)==400 and n>=400-len(before) and all(after[s]==v for s,v in before.items())
    assert run.info.status=='FINISHED'


@pytest.mark.slow
@pytest.mark.release # Waits for half a minute
@pytest.mark.parametrize('silent', [False, True])
def test_silent_server_does_not_end_training_and_gets_all_later(store, tmp_path, silent):
    took,ended = told_where_nobody_answers(tmp_path, 'mlflow', silent, MLFLOW_TRACKING_URI='{}')
    assert took<60 and ended<10 # The time includes the import of MLflow, and at most 10 s of waiting for the sink
    assert replay('first', 'mlflow', home=tmp_path)==20
    assert [*metrics(runs()[0])['output/0/rms']]==[*range(20)]
