"Ranks exchange rows during training: packets of rows, merged steps, late ranks and broken stores."
import gc
import json
import math
import os
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from torch.distributed import HashStore

from torchember.processes import packed_rows, whole_steps
from torchember.processes.checks import DriftWatch
from torchember.processes.packed_rows import Packer, Packet, StepMerger, Unpacker, split_row
from torchember.processes.shards import RankRows
from torchember.processes.whole_steps import StepCollector, Inbox, Outbox, Receiver, Sharing, WholeSteps, run_job
from torchember.ground.record import line_of
from torchember.measure.summary import Summary

stats = 'mean', 'std', 'min', 'max', 'rms', 'l1', 'skew'


def row(rank, x, step=0, part='dp:B', ttype='output', module='model(Net).up(Linear)', **more):
    return {**Summary.of(x).dict(stats), 'shape': list(np.shape(x)), 'module': module, 'ts': '2020-02-15 13:44:48', 'ttype': ttype, 'tname': f'{ttype}_0',
        'step': step, 'call': 0, 'dtype': 'float64', 'rank': rank, 'part': part, **more}


def about(rank, world=2): return {'rank': rank, 'world': world, 'axes': {'dp': [*range(world)]}}


def packets(*rows, **head): return {r: Packet.of(some, **head) for r,some in enumerate(rows)}


def plain(rows): return [{k: (round(v, 12) if isinstance(v, float) and v==v else str(v)) for k,v in r.items()} for r in rows]


# ---- packets: the rows of one rank, packed into arrays

def test_a_packet_holds_all_rows():
    packer,unpacker = Packer(),Unpacker()
    for s in range(3):
        rows = [row(1, np.arange(3.)+s, s, gscale=.5, exponents=[s, 2, 0], skipped=True), {**row(1, np.ones(2), s), 'ts': 'later', 'mean': math.nan, 'n': s}]
        sent = Packet.of(rows, about=about(1))
        data = packer.pack(sent)
        got = unpacker.unpack(data)
        assert (got.step, got.layout, got.text, got.ts, got.head)==(s, sent.layout, sent.text, ['2020-02-15 13:44:48', 'later'], {'about': about(1)})
        want,n = [x for r in rows for x in split_row(r)[2]],len(split_row(rows[0])[2])
        assert got.numbers.tolist()[:n]==want[:n] and np.isnan(got.numbers).sum()==np.isnan(np.array(want)).sum()
        assert ('"text"' in data.partition(b'\n')[0].decode())==(s==0)
    names = [n for n,_,_ in split_row(rows[0])[0]]
    assert 'exponents' in names and {'gscale', 'shape', 'rank', 'skipped'}.isdisjoint(names) and 'ts' not in json.loads(sent.text)[0][1]


@pytest.mark.parametrize('rows', [[row(0, np.ones(2)), {**row(0, np.ones(2)), 'shape': [3]}], [row(0, np.ones(2)), {**row(0, np.ones(2)), 'part': 'dp:R'}],
    [row(0, np.ones(2)), {**row(0, np.ones(2)), 'nan': 1}], [row(0, np.ones(2)), {**row(0, np.ones(2)), 'mean': 1}]])
def test_a_changed_fixed_value_changes_the_layout(rows): assert Packet.of(rows[:1]).layout!=Packet.of(rows[1:]).layout


# ---- merged rows of all ranks

def test_shards_are_found_again_when_the_numbers_contradict_the_last_step(monkeypatch):
    "Equal inputs of two ranks are one copy in one step, and different inputs are parts of a batch in the next."
    known,rng,made = StepMerger(),np.random.default_rng(0),[]
    monkeypatch.setattr(packed_rows, 'RankRows', lambda *args, make=packed_rows.RankRows: (made.append(1), make(*args))[1])
    for r in (0, 1): known.note_head(r, Packet.of([], about=about(r), paths=['', 'up', 'down.0', 'down.1']))
    for step in range(12):
        alike = [bool(int(b)) for b in f'{[0, 0, 7, 7, 5, 2, 2, 0, 1, 4, 7, 0][step]:03b}']
        def x(i): return rng.normal(size=(4+i, 3))
        flow,own = (lambda v: [v, v if same else x(0)])(x(0)) if (same := alike[0]) is not None else None,x(1)
        other = own if alike[1] else x(1)
        odd = math.nan if alike[2] else 1.
        lost = math.nan if step in (8, 9) else 1. # weights without statistics count as equal on all ranks
        some = [[row(r, flow[r], step), row(r, (own, other)[r]*lost, step, 'dp:?', 'weight', 'model(Net).down(Sequential).0(Linear)', pname='weight'),
            row(r, x(2)*odd, step, 'dp:B', 'input', 'model(Net)', nan=18 if alike[2] else 0),
            row(r, x(3), step-1, 'dp:B', 'input', 'model(Net)', late=1)] for r in (0, 1)]
        one = StepMerger()
        one.metadata,one.paths = known.metadata,known.paths
        p = packets(*some)
        before = len(made)
        got = known.rows(p)
        again = len(made)==before
        assert plain(got)==plain(one.rows(p)), step
        if step in (1, 3, 6): assert again, step # the merge plan of the previous step is used again
    assert len(known.layouts)==len(known.last)==1


def test_rows_of_two_steps_become_rows_of_one():
    "A number recorded twice in a step gives two rows. Numbers of two steps give one row each, with the same packet layout."
    w = StepMerger()
    for first in (0, 1, 3, 3):
        step = first+(first<3)
        p = packets(*([row(r, np.arange(4.)+r, s, 'dp:B', 'output') for s in (step, first)] for r in (0, 1)))
        for r in p: w.note_head(r, Packet.of([], about=about(r)))
        assert sorted((r['step'], r['mean']) for r in w.rows(p))==sorted((s, 2.) for s in (first, step))


def test_a_plan_is_dropped_when_the_axes_of_a_rank_change():
    w,x = StepMerger(),np.arange(8.).reshape(2, 4)
    some = lambda s: packets(*([row(r, x[r:r+1], s, 'tp:R', 'weight', pname='weight')] for r in (0, 1)))
    for r in (0, 1): w.note_head(r, Packet.of([], about={'rank': r, 'world': 2, 'axes': {'tp': [0, 1]}}))
    assert [w.rows(some(s))[0]['mean'] for s in (0, 1)]==[1.5, 1.5] # replicas are counted once
    for r in (0, 1): w.note_head(r, Packet.of([], about={'rank': r, 'world': 2, 'axes': {'tp': [r]}}))
    assert w.rows(some(2))[0]['mean']==3.5
    fresh = StepMerger()
    fresh.metadata = w.metadata
    assert plain(w.rows(some(2)))==plain(fresh.rows(some(2)))


def test_modules_of_a_ranks_own_keep_their_names_in_steps_without_weights():
    "Weights differ between ranks and are recorded in every second step. Scalars are still averaged."
    w,rng = StepMerger(),np.random.default_rng(0)
    for r in (0, 1): w.note_head(r, Packet.of([], about=about(r), paths=['', 'up']))
    def some(s, weights):
        noted = [dict(loss=float(r), module='model(Net)', ts='now', ttype='scalar', tname='log', step=s, dtype='float64', call=0, rank=r) for r in (0, 1)]
        own = [[row(r, rng.normal(size=3), s, None, 'weight', pname='weight')] for r in (0, 1)]
        return packets(*([row(r, rng.normal(size=(2, 3)), s, None), *own[r][:weights], noted[r]] for r in (0, 1)))
    for s,weights in enumerate([True, False, True, False]):
        rows = w.rows(some(s, weights))
        there = sorted((r['ttype'], r.get('path')) for r in rows if r['ttype']!='scalar')
        assert there==[(t, f'up@rank{r}') for t in ('output', 'weight')[:1+weights] for r in (0, 1)]
        loss, = (r for r in rows if r['ttype']=='scalar')
        assert loss['loss']==.5 and loss['module']=='model(Net)' and 'path' not in loss


def test_a_scalar_that_is_not_finite():
    "The scalar is NaN in the row of its call. Rows of other calls do not contain it."
    more = dict(module='model(Net)', ts='now', ttype='scalar', tname='log', step=3, dtype='float64')
    def noted(r, call, **numbers): return {**numbers, **more, 'call': call, 'rank': r}
    some = packets(*([noted(r, 0, loss=math.nan if r else 1., nan=r), noted(r, 1, acc=.5+r/4)] for r in (0, 1)))
    loss,acc = StepMerger().rows(some)
    assert math.isnan(loss['loss']) and loss['nan']==1 and 'acc' not in loss
    last, = StepMerger().rows(packets([noted(0, 0, loss=1.), {**noted(0, 0, val=2.), 'step': 4}]))[1:]
    assert last['val']==2. and 'loss' not in last # the row of the other call contains the loss
    assert acc['acc']==.625 and {'loss', 'nan', 'numel', 'shape'}.isdisjoint(acc)


def test_old_layouts_are_forgotten():
    w = StepMerger()
    for s in range(40): assert w.rows(packets([row(0, np.ones(2), s, word=f'w{s}')]))[0]['word']==f'w{s}'
    assert len(w.layouts)<=w.most and set(w.last)<=set(w.layouts)


def test_rows_are_as_one_process_writes_them():
    "Integers stay int, missing values stay missing, and statistics that infinities make unknown are NaN."
    a,b = row(0, np.array([[1., math.inf]]), posinf=1, n=3, epoch=2),row(1, np.array([[1., 5.]]), n=4, epoch=2)
    got,other = StepMerger().rows(packets([a, row(0, np.ones(1), ttype='weight', part='dp:R', pname='bias')], [b]))
    assert got['posinf']==1 and type(got['posinf']) is int and 'nan' not in got and got['epoch']==2 and type(got['epoch']) is int
    assert math.isnan(got['std']) and got['max']==math.inf and [*got['shape']]==[2, 2] and got['ts']==a['ts']
    assert {'rank', 'part', 'path', 'gscale'}.isdisjoint(got) and 'posinf' not in other and math.isnan(other['std']) and 'n' not in other


# ---- messages in the store

def test_unread_messages_are_bounded():
    store = HashStore()
    out,into = Outbox(store, 3),Inbox(store, 3)
    while not out.is_full: out.put(b'%d' % out.n)
    assert out.n==16 and store.num_keys()<=17
    assert [into.get() for _ in range(3)]==[b'0', b'1', b'2'] and not out.is_full
    out.put(b'a'); out.put(b'b'); out.put(b'c')
    assert out.is_full and Inbox(store, 2).get() is None


def test_metadata_is_sent_when_it_changes(monkeypatch):
    p = Pair(monkeypatch)
    heads,merger = [],p.first.sharing.channel.merger
    note_head = merger.note_head
    monkeypatch.setattr(merger, 'note_head', lambda r, packet: (heads.append((r, packet.step, sorted(packet.head))), note_head(r, packet)))
    for s in range(3):
        if s==2: p.second.sharing.about = lambda: {'about': about(1, 4), 'paths': ['', 'up']}
        p.step(s); p.both()
    assert sorted(heads)==[(0, 0, ['about', 'nth', 'paths']), (0, 1, ['nth']), (0, 2, ['nth']), (1, 0, ['about', 'nth', 'paths']), (1, 1, ['nth']),
        (1, 2, ['about', 'nth'])]
    assert merger.metadata=={0: about(0), 1: about(1, 4)} and merger.paths=={r: ['', 'up'] for r in (0, 1)}
    for x in (p.first, p.second): x.rest(); x.listeners.wait()


def test_the_store_is_bounded_while_the_first_rank_reads_nothing(pair):
    for s in range(30): pair.step(s, [1]); pair.settle(pair.second)
    assert pair.store.num_keys()<=17 and pair.second.sharing.channel.left_out==14
    pair.step(30, [0]); pair.settle()
    # steps that the first rank does not have are not reported
    assert pair.seen()==[(30, [(31.5, [1])])] and pair.store.num_keys()<=1


# ---- sharing of rows without the thread

def shares(store, rank, patience=0., **kwargs):
    "Return the `Sharing` of one of two ranks, and a list that gets the step, mean and missing ranks of each report."
    told = []
    def report(rows): told.append([(r['step'], r['mean'], r.get('without')) for r in rows])
    s = Sharing(store, rank, 2, lambda: {'about': about(rank)}, report=report, **kwargs)
    if rank==0: s.channel.assembly.patience = patience
    return s,told


def own(rank, n): return line_of(row(rank, np.arange(4.)+4*rank+n, n))+b'\n'


@pytest.mark.parametrize('behind, waits', [(0, True), (4, True), (5, False), (8, False)])
def test_other_ranks_are_waited_for_while_the_queue_is_short(behind, waits):
    first,told = shares(HashStore(), 0, .05, queued=lambda: behind)
    first.take(own(0, 3)); first.report_complete()
    assert told==([[(3, 4.5, [1])]] if waits else []) and first.channel.partial==waits


def test_a_step_is_left_out_when_too_many_wait():
    "Ten steps wait for the other rank. Only eight may wait together with the oldest, so one is left out and 9 are reported."
    first,told = shares(HashStore(), 0)
    for s in range(10): first.take(own(0, s))
    first.report_complete()
    assert [s for (s,_,_), in told]==[*range(1, 10)] and (first.channel.left_out, first.channel.partial)==(1, 9)


def test_the_first_rank_waits_for_the_end_of_all_ranks(monkeypatch):
    "The store lives in the process of the first rank, so the first rank must end last."
    store,sleeps = HashStore(),[]
    (first,told),(second,_) = shares(store, 0, 9.),shares(store, 1)
    for p in (second, first): p.take(own(p.rank, 0))
    def sleep(seconds): sleeps.append(seconds); second.finish(own(1, 1))
    monkeypatch.setattr(whole_steps, 'time', SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    first.finish(own(0, 1))
    assert sleeps==[Receiver.pause] and first.channel.assembly.ended=={0, 1} and told==[[(0, 3.5, None)], [(1, 4.5, None)]]
    first,told = shares(HashStore(), 0, 9.)
    monkeypatch.setattr(whole_steps.time, 'sleep', lambda seconds: (sleeps.append(seconds), first.channel.assembly.end(1)))
    first.finish(b'') # there are no more rows
    assert len(sleeps)==2 and first.channel.assembly.ended=={0, 1} and not told


def test_the_kept_object_is_dropped_when_the_sharing_stops():
    "The object is freed as soon as the sharing stops. `WholeSteps` itself is freed without the garbage collector."
    class Kept: pass
    gc.collect(); gc.disable()
    try:
        p,kept = WholeSteps(HashStore(), 0, 2, kept=(k := Kept())),weakref.ref(k)
        del k
        assert kept() is not None
        p.sharing.stop('reset by peer')
        assert kept() is None
        gone = weakref.ref(p)
        del p
        assert gone() is None
    finally: gc.enable()


def test_all_left_out_steps_are_counted(monkeypatch):
    "Two steps find the queue full, and the first rank lacks one step: 3 steps are left out."
    p = Pair(monkeypatch)
    p.second.sharing.take(own(1, 0))
    p.first.thread = threading.main_thread()
    for s in range(1, 11): p.step(s, [0])
    assert p.first.left_out==2 and p.first.queue.qsize()==8
    run_job(p.first.sharing, p.first.queue.get()) # 7 more jobs wait, so the first rank does not wait for the other rank
    assert p.first.sharing.channel.left_out==1 and len(p.first.sharing.channel.assembly.waiting[0])==1 and not p.first.sharing.channel.partial
    assert p.first.remark()=='Rows of the whole: 3 steps were left out, because they came faster than they could be reported.'
    p.first.listeners.wait()


def test_after_a_stop_own_rows_are_reported_with_the_lines_of_the_log(monkeypatch):
    p,taken = Pair(monkeypatch),[]
    p.first.sharing.stop('reset by peer')
    monkeypatch.setattr(p.first.listeners, 'collect', lambda rows, lines: taken.append((rows, lines)))
    lines = b'{"mean": 1.50, "step": 3}\n'
    p.first.put([], lines); p.second.put([], lines)
    assert taken==[([{'mean': 1.5, 'step': 3}], lines)]
    p.first.listeners.wait()


# ---- sharing of rows in a thread

class Pair:
    "Two ranks in threads of this process. Keeps the steps and messages that the first rank reports."
    def __init__(self, monkeypatch, patience=.3, store=None, world=2):
        monkeypatch.setattr(StepCollector, 'patience', patience)
        self.store,self.told,self.said = store or HashStore(),[],[]
        def process(r): return WholeSteps(self.store, r, world, lambda: {'about': about(r, world), 'paths': ['', 'up']}, self.said.append)
        self.first,self.second = process(0),process(1)
        self.first.listen(lambda step, rows: self.told.append((step, rows)), 'spy')

    def step(self, n, who=(0, 1), over=True, **more):
        for r in who:
            p = (self.first, self.second)[r]
            p.put([], line_of(row(r, np.arange(4.)+4*r+n, n, **more))+b'\n')
            if over: p.end_step()

    def settle(self, p=None):
        p = p or self.first
        p.wait(p.mark(), time.monotonic()+10)

    def both(self): self.settle(self.second); self.settle()

    def end(self):
        ends = [threading.Thread(target=p.end) for p in (self.second, self.first)]
        for t in ends: t.start()
        for t in ends: t.join(10); assert not t.is_alive()

    def seen(self): return [(s, [(r['mean'], r.get('without')) for r in rows]) for s,rows in self.told]


@pytest.fixture
def pair(monkeypatch):
    p = Pair(monkeypatch)
    yield p
    p.both()
    for x in (p.first, p.second): x.rest(); x.listeners.wait()


def test_the_rows_of_the_whole_are_reported(pair):
    for s in range(3): pair.step(s); pair.both()
    assert pair.seen()==[(s, [(3.5+s, None)]) for s in range(3)] and not pair.said and pair.first.remark() is None
    assert pair.store.num_keys()<=1 # messages are removed after reading; HashStore has one key of its own


def test_a_drifted_replica_is_reported_once(pair):
    "Drift is reported during training, also if the set of rows changes. A temporary difference is not reported."
    pair.first.sharing.channel.merger.drift.patience = 3
    def step(n, off):
        for p,more in (pair.first, 0.), (pair.second, off):
            p.put([], line_of(row(0, np.arange(4.)+more, n, part='dp:R', ttype='weight'))+b'\n')
            if n%2: p.put([], line_of(row(0, np.arange(4.), n, part='dp:R', ttype='buffer'))+b'\n')
            p.end_step()
        pair.both()
    for n,off in enumerate([0., 1e-3, 1e-3, 0., 1e-13, 1e-3, 1e-3]): step(n, off)
    assert not pair.said
    for n in 7, 8, 9: step(n, 1e-3)
    assert pair.said==['Replicas have drifted apart: tensor weight_0 (weight) of up differs between rank 1 and rank 0 since step 5. Rows show rank 0 only.']


def test_a_drift_names_the_tensor_and_the_rank_that_began_it():
    drift = DriftWatch()
    drift.patience = 2
    said = []
    for n in range(4):
        there = [(r, i, np.arange(4.)+(r==2)*(n>1)+(r==1)*(n>0)*(i>0)) for r in range(3) for i in (0, 1)]
        df = pd.DataFrame([row(r, x, n, part='dp:R', ttype='weight', module=f'm(M).{i}(L)', path=str(i)) for r,i,x in there])
        rows = RankRows(df, {r: about(r, 3) for r in range(3)}, {})
        said.append(drift.note(rows, *rows.shards.replicas(rows.df['ttype'])))
    assert said[:2]==[None, None] and said[3:]==[None]
    assert said[2]=="Replicas have drifted apart: tensor weight_0 (weight) of 1 differs between rank 1 and rank 0 since step 1. Rows show rank 0 only."


def test_several_batches_of_a_step_are_one_packet_and_late_numbers_follow(pair, monkeypatch):
    "Numbers recorded after a step are reported with the next step, or at the end of the run."
    for s in range(2):
        pair.step(s, over=False)
        pair.step(s, ttype='weight', part='dp:R')
        pair.both()
        pair.step(s, ttype='scalar', over=False)
    assert [(s, [r['ttype'] for r in rows]) for s,rows in pair.told]==[(0, ['output', 'weight']), (0, ['scalar']), (1, ['output', 'weight'])]
    monkeypatch.setattr(StepCollector, 'patience', 4.) # far longer than the end of a run takes on a busy machine, so a wait would be noticed
    began = time.monotonic()
    pair.end()
    assert [(s, [r['ttype'] for r in rows]) for s,rows in pair.told[3:]]==[(1, ['scalar'])] and time.monotonic()-began<3 and not pair.said
    assert not pair.first.thread and not pair.second.thread


def test_a_late_rank_is_named_once_and_comes_back(pair):
    pair.step(0); pair.both()
    for s in (1, 2): pair.step(s, [0]); began = time.monotonic(); pair.settle(); assert time.monotonic()-began<(.6 if s==1 else .25)
    assert pair.seen()[1:]==[(1, [(2.5, [1])]), (2, [(3.5, [1])])]
    assert len(pair.said)==1 and 'rank 1 sent nothing for 0 seconds, at step 1' in pair.said[0]
    for s in (1, 2): pair.step(s, [1])
    pair.settle(pair.second)
    pair.step(3); pair.both()
    assert pair.seen()[3:]==[(3, [(6.5, None)])] and len(pair.said)==1
    pair.step(4, [0]); pair.settle()
    # rank 1 is late again, but it was already named in a warning
    assert pair.seen()[4:]==[(4, [(5.5, [1])])] and len(pair.said)==1
    pair.step(4, [1]); pair.settle(pair.second); pair.step(5); pair.both()
    assert pair.seen()[5:]==[(5, [(8.5, None)])] # rank 1 has caught up, so the first rank waits for it again
    assert pair.first.remark()=='Rows of the whole: 3 steps were reported without the rows of some rank.'


def test_a_step_without_one_rank_is_reported_at_once_if_the_rank_is_ahead(pair):
    pair.step(0, [0]); pair.step(1); pair.both()
    assert pair.seen()==[(0, [(1.5, [1])]), (1, [(4.5, None)])] and not pair.said
    pair.step(2, [1]); pair.step(3); pair.both()
    # the first rank has no rows of step 2
    assert [s for s,_ in pair.told]==[0, 1, 3] and pair.first.sharing.channel.left_out==1


def test_an_ended_rank_is_not_waited_for(pair):
    pair.step(0); pair.both()
    pair.second.end()
    began = time.monotonic()
    pair.step(1, [0]); pair.settle()
    assert pair.seen()[1:]==[(1, [(2.5, [1])])] and time.monotonic()-began<.25 and not pair.said


@pytest.mark.parametrize('broken', ['set', 'check', 'get', 'delete_key'])
def test_a_broken_store(monkeypatch, broken):
    "If the store fails, each rank continues alone. The first rank warns once, and reports only its own rows."
    class Store:
        def __init__(self): self.store,self.ok = HashStore(),True
        def __getattr__(self, name):
            if name==broken and not self.ok: raise ConnectionError('reset by peer')
            return getattr(self.store, name)
    store = Store()
    p = Pair(monkeypatch, store=store)
    p.step(0); p.both()
    store.ok = False
    for s in range(1, 4): p.step(s); p.both()
    whole = [(0, [(3.5, None)])]
    if broken=='set': # only rank 1 fails; the first rank notices nothing
        assert p.second.sharing.stopped and not p.first.sharing.stopped and p.seen()[-1]==(3, [(4.5, [1])])
    else:
        assert p.seen()==[*whole, (2, [(3.5, None)]), (3, [(4.5, None)])] and len(p.said)==1 and 'reset by peer' in p.said[0] and p.told[-1][1][0]['rank']==0
        assert p.first.remark()=='Merged rows of all ranks were not reported to the end: ConnectionError: reset by peer.'
    p.end()
    for x in (p.first, p.second): x.rest()


def test_a_damaged_message_stops_the_sharing(pair):
    pair.step(0); pair.both()
    pair.store.set('1/1', b'{"step": 1, "layout": "never sent", "ts": null}\n')
    pair.step(1, [0]); pair.settle()
    assert len(pair.said)==1 and 'KeyError' in pair.said[0]


def test_a_hanging_store_is_waited_for_once(monkeypatch):
    class Store:
        def __init__(self): self.store,self.go = HashStore(),threading.Event()
        def set(self, *args): self.go.wait(20); self.store.set(*args)
        def __getattr__(self, name): return getattr(self.store, name)
    store = Store()
    p = Pair(monkeypatch, patience=.1, store=store)
    for s in range(30):
        began = time.monotonic()
        p.step(s, [1])
        assert time.monotonic()-began<.1
    assert p.second.left_out>=20
    began = time.monotonic()
    for _ in range(3): p.settle(p.second)
    assert time.monotonic()-began<1
    began = time.monotonic()
    p.second.end()
    assert time.monotonic()-began<.05
    store.go.set()
    p.second.rest()
    p.first.listeners.wait()


def test_steps_that_come_too_fast_are_left_out(pair, monkeypatch):
    slow = StepMerger.rows
    monkeypatch.setattr(whole_steps.StepMerger, 'rows', lambda self, p: (time.sleep(.05), slow(self, p))[1])
    for s in range(60): pair.step(s); time.sleep(.005)
    pair.both()
    steps = [s for s,_ in pair.told]
    assert 5<len(steps)<50 and steps==sorted(steps) and pair.first.left_out and 'faster' in pair.first.remark() and not pair.said


def test_rows_without_a_tensor_are_reported_of_the_first_rank_only(pair):
    for p in (pair.first, pair.second): p.put([], line_of({'note': p.rank})+b'\n')
    pair.step(0); pair.both()
    assert sorted(pair.told, key=lambda t: t[0] is not None)==[(None, [{'note': 0}]), (0, pair.told[-1][1])]


def test_a_forked_process_does_nothing(pair):
    pair.step(0); pair.both()
    if (pid := os.fork())==0:
        pair.step(1); pair.first.end(); pair.settle(); pair.first.rest()
        os._exit(0 if pair.first.thread is not None and len(pair.told)==1 else 1)
    assert os.waitpid(pid, 0)[1]==0
    pair.step(1); pair.both()
    assert [s for s,_ in pair.told]==[0, 1]


def test_a_removed_listener(pair):
    listening = pair.first.listen(lambda step, rows: None)
    pair.step(0); pair.both()
    listening.close()
    pair.step(1); pair.both()
    assert len(pair.first.listeners.all)==1 and [s for s,_ in pair.told]==[0, 1]


def test_the_thread_ends_with_the_run(monkeypatch):
    p = Pair(monkeypatch)
    p.step(0); p.both()
    threads = [x.thread for x in (p.first, p.second)]
    p.first.sharing.about = lambda: None
    end = time.monotonic()+5
    p.step(1, [0])
    while any(t and t.is_alive() for t in threads[:1]) and time.monotonic()<end: time.sleep(.01)
    assert not (threads[0] and threads[0].is_alive())
    p.second.rest()
    p.first.listeners.wait()
