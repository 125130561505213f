"""All finished steps are in the log after `disarm`, and for each reader in the recording process."""
import os

import pytest
import torch
from torch import nn

from torchember import emberTracker, overview, query, read, report, runs, summary, torchEmber
from torchember.frames.logframe import to_logframe
from torchember.frames.logs import wide
from torchember.store import jsonl, log as store_log


@pytest.fixture
def slow_writer(monkeypatch):
    "Replace the writer by one that writes nothing by itself, so that rows are written only if a reader requests them."
    monkeypatch.setattr(store_log, 'writer', store_log.Writer())
    monkeypatch.setattr(store_log.Writer, 'run', lambda self: None)
    monkeypatch.setattr(store_log.Log, 'bound', 10**9)


def trained(steps=20, **kw):
    m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    o = torch.optim.SGD(m.parameters(), .01)
    te = torchEmber(m, optimizer=o, stats='full', **kw)
    more(m, o, te, steps)
    return m, o, te


def more(m, o, te, steps):
    for _ in range(steps):
        o.zero_grad()
        loss = m(torch.randn(4, 8)).square().mean()
        te.log(loss=loss)
        loss.backward()
        o.step()


def nothing_in(te): return not te.t.log_path.exists() or not te.t.log_path.stat().st_size


def steps_in(df): return sorted(df['step'].unique().tolist())


def test_disarmed(slow_writer):
    "`disarm` writes all rows of each step exactly once, without a reader."
    m,o,te = trained()
    assert nothing_in(te)
    te.disarm()
    rows,_ = jsonl.parse(te.t.log_path.read_bytes())
    rows = [r for r in rows if r['tname']!='lr'] # ignore the learning rate, which is written only if it changes
    assert len(rows)==20*(len(rows)//20) and {r['step'] for r in rows}==set(range(20))
    each = [sorted((r['ttype'], r['module'], r['tname']) for r in rows if r['step']==s) for s in range(20)]
    assert all(e==each[0] and len(set(e))==len(e) for e in each) and {t for t,*_ in each[0]}=={'input', 'output', 'weight', 'weight_grad', 'scalar'}
    te.arm()
    more(m, o, te, 5)
    te.disarm()
    # after arming again, the second disarm writes the other steps
    assert {r['step'] for r in jsonl.parse(te.t.log_path.read_bytes())[0]}==set(range(25))
    te.close()


def metadata(te): return emberTracker(te.fname)[f'structure_{te.fname}'] and list(range(20))
def by_sql(te): pytest.importorskip('duckdb'); return steps_in(query('select step from log', te.fname))


readers = dict(read=lambda te: steps_in(read(te.fname)), pattern=lambda te: steps_in(read(te.fname[:-1]+'*')), file=lambda te: steps_in(read(te.t.log_path)),
    some=lambda te: steps_in(read(te.fname, ttype='weight')), several=lambda te: steps_in(read([te.fname])),
    wide=lambda te: wide(te.fname, 'std', 'weight').index.tolist(),
    df=lambda te: steps_in(emberTracker(te.fname).df),
    lines=lambda te: sorted({r['step'] for r in emberTracker(te.fname).lines()}),
    latest=lambda te: [*range(19), *{r['step'] for r in emberTracker(te.fname).latest_line_list()}],
    last=lambda te: list(range(emberTracker(te.fname).last_step()+1)),
    runs=lambda te: list(range(int(runs().set_index('name').steps[te.fname]))), metadata=metadata,
    query=by_sql,
    own=lambda te: steps_in(te.t.df),
    logframe=lambda te: sorted(to_logframe(read(te.fname))['metadata', 'step'].unique().tolist()))


@pytest.mark.parametrize('reader', readers)
def test_readers(reader, slow_writer, tmp_path, monkeypatch):
    "Each reader of a live run gets all finished steps: 20, and later 23."
    m,o,te = trained()
    assert nothing_in(te)
    assert readers[reader](te)==list(range(20))
    if reader not in ('metadata', 'latest'):
        more(m, o, te, 3)
        assert readers[reader](te)==list(range(23))
    te.close()


@pytest.mark.parametrize('show', [summary, overview, report])
def test_pictures(show, slow_writer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _,_,te = trained()
    assert show(te.fname) is not None
    # 16 rows per step: 3 inputs, 3 outputs, 4 weights, 4 gradients, loss, norm; and one learning rate
    assert te.t.file.disk.written_rows==20*16+1
    te.close()


def test_through_a_link(slow_writer, tmp_path):
    "A run is recognized as live, even if its home is opened through a symbolic link."
    (tmp_path/'real').mkdir()
    os.symlink(tmp_path/'real', tmp_path/'link')
    _,_,te = trained(home=tmp_path/'real')
    assert steps_in(read(te.fname, home=tmp_path/'link'))==list(range(20))
    te.close()


def test_another_run_is_left_alone(slow_writer):
    _,_,a = trained(name='a')
    _,_,b = trained(name='b')
    assert steps_in(read('a'))==list(range(20)) and a.t.file.disk.written_rows and not b.t.file.disk.written_rows
    a.close(), b.close()


def test_an_open_step_stays_open(slow_writer):
    "Reading a live run by its name gives the finished steps, and does not end the open step."
    m,o,te = trained(3)
    m(torch.randn(4, 8)).sum().backward()
    assert steps_in(read(te.fname))==[0, 1, 2] and te.recorder.step==3
    o.step()
    df = read(te.fname)
    # step 3 has one row less, because no loss was logged in it
    assert steps_in(df)==[0, 1, 2, 3] and len(df[df.step==3])==len(df[df.step==2])-1 and 'supersedes' not in df
    te.close()


@pytest.mark.parametrize('of, asked', [('a', ['a']), ('', ['a', 'other']), ('none', [])])
def test_a_home_that_is_reached_by_another_path(tmp_path, monkeypatch, of, asked):
    "Logs under the same real folder are flushed before reading. Logs of other folders are not."
    for d in 'home','else': (tmp_path/d).mkdir()
    (tmp_path/'link').symlink_to('home')
    ts = [emberTracker(n, tmp_path/d) for n,d in (('a', 'link'), ('other', 'link'), ('a', 'else'))]
    for t in ts: t + dict(module='m(Net)', ttype='scalar', tname='log', step=0, loss=1.)
    got = []
    with monkeypatch.context() as m:
        m.setattr(store_log.Log, 'flush', lambda log: got.append(log))
        store_log.flush_logs(tmp_path/'home'/'log'/of)
    assert sorted(log.path.name for log in got)==asked and ts[2].file not in got
    for t in ts: t.close()
