"Tests of merged logs of 2 and 4 processes: rows equal those of one process with the whole model and batch, seen by plain hooks"
import json
import math
import os
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import programs
import pytest

from torchember import EmberWarning, read, scan

here = Path(__file__).parent
where = ['path', 'ttype', 'tname', 'call', 'step']
rel = 1e-9
libraries = 'import numba, pandas, scipy.stats, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor.parallel\n' \
    'from transformers import LlamaForCausalLM'
pytestmark = pytest.mark.slow


def run_cases(folder, n):
    "Run all cases of `n` processes. Return their folder."
    helpers = os.pathsep.join([str(here.parent), os.environ.get('PYTHONPATH', '')])
    programs.ranks(here/'ranked.py', folder, n=n, after=libraries, PYTHONPATH=helpers)
    return folder


@pytest.fixture(scope='module')
def ran(tmp_path_factory): return run_cases(tmp_path_factory.mktemp('two'), 2)

@pytest.fixture(scope='module')
def ran_by_four(tmp_path_factory): return run_cases(tmp_path_factory.mktemp('four'), 4)


@pytest.fixture
def home_of(request):
    "Return a function from the name of a case to the folder of its run. The name ends with the number of processes."
    return lambda case: request.getfixturevalue('ran_by_four' if case.endswith('_4') else 'ran')


def before_a_release(case): return pytest.param(case, marks=pytest.mark.release) if case.endswith('_4') else case


def merged(ran, case, **how):
    "Return the merged table of a run, and the remarks about it."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always', EmberWarning)
        df = read(case, home=ran, **how)
    return df, ' '.join(str(w.message) for w in said)


def rows_of(df):
    return {tuple(r[c] for c in where): r for r in df.assign(path=df['path'].astype(str)).to_dict('records')}


def off(row, want):
    "Return the statistics that differ from the reference, relative to their scale."
    scale = {'mean': want['rms'], 'min': want['abs_max'], 'max': want['abs_max'], 'abs_min': want['abs_mean'], 'skew': 1, 'kurtosis': 1}
    out = []
    for k,v in want.items():
        if k in where or k=='numel': continue
        x = row[k]
        if k=='exponents': ok = x==v
        elif want['abs_max']>1e150: continue # Skip a mask: its squares exceed float64
        # Sums that cancel are exactly 0 with some splits, and 1e-19 with others
        elif k=='zero_frac' and want['abs_min']<1e-18: continue
        elif v is None: ok = x!=x
        else: ok = abs(x-v)<=rel*max(abs(v), scale.get(k, 0)) or k in ('skew', 'kurtosis') and want['std']<1e-6*want['abs_max']
        if not ok: out.append((k, x, v))
    n = row['numel'] if row.get('numel')==row.get('numel') and row.get('numel') else math.prod(row['shape'])
    return out if n==want['numel'] else [*out, ('numel', n, want['numel'])]


exact = ['replicated_2', 'composable_2', 'older_fsdp_2', 'older_hybrid_4', 'batch_norm_2', 'accumulated_2',
    'uneven_2', 'sharded_2', 'sharded_4', 'sharded_and_replicated_4', 'hugging_face_2', 'pipeline_2', 'tensor_parallel_4']


@pytest.mark.parametrize('case', [*map(before_a_release, [*exact, 'tensor_parallel_2', 'experts_2', 'experts_4'])])
def test_as_one_process(home_of, case):
    "The merged run has all rows and statistics of the reference. Unknown statistics are left out, with a remark."
    ran = home_of(case)
    df,said = merged(ran, case)
    got,wrong,unknown = rows_of(df[df.ttype!='scalar']),[],set()
    wanted = [json.loads(line) for line in (ran/f'{case}.jsonl').read_text().splitlines()]
    weights = {(w['path'], w['tname'].removeprefix('weight_'), w['step']): w['rms'] for w in wanted if w['ttype']=='weight'}
    for want in wanted:
        place = tuple(want[c] for c in where)
        if case.startswith('pipeline') and place[0]=='': continue # Each pipeline stage has a root module of its own
        assert place in got, place
        row = got.pop(place)
        # Skip: these are gradients of each rank's own loss, as a remark says
        if case.startswith('experts') and want['ttype']=='output_grad': continue
        # Replicated weights that get gradients of a part of the sequence; with FSDP, these are summed
        if case=='tensor_parallel_2' and row['std']!=row['std']:
            unknown.add((want['ttype'], place[0].split('.')[-1].rstrip('12')))
            assert row['mean']!=row['mean'] or abs(row['mean']-want['mean'])<=rel*want['rms'], place
        elif bad := off(row, want): wrong.append((place, bad))
        if want['ttype']=='update': # The ratio compares the update with the weight before it
            before = weights[want['path'], want['tname'].removeprefix('update_'), want['step']]
            assert row['ratio']==pytest.approx(want['rms']/before, rel=rel) if before else row['ratio']!=row['ratio'], place
    assert not wrong, (len(wrong), wrong[:3])
    # Only this case has more rows: tensors in tuples and dicts, which plain hooks do not see
    if case!='hugging_face_2': assert {p[0] for p in got}<={'@pp0', '@pp1'}
    if case in exact: assert not said
    elif case=='tensor_parallel_2': assert '30 rows describe tensors that are summed over ranks' in said and unknown=={('weight_grad', 'norm')}
    else: assert 'parameters of its own in moe.experts.0, moe.experts.1' in said and "each rank's own loss" in said


@pytest.mark.parametrize('case', ['hugging_face_bert_2', 'hugging_face_t5_2'])
def test_positions_that_each_process_has_whole(ran, case):
    "Positions that each process has whole occur once. Only the mean of their summed gradients is known, and a remark says so."
    df,said = merged(ran, case)
    got,sums,wrong,n = rows_of(df[df.ttype!='scalar']),set(),[],0
    for want in map(json.loads, (ran/f'{case}.jsonl').read_text().splitlines()):
        place = tuple(want[c] for c in where)
        if place not in got: # A weight shared by two modules has rows under one name only
            assert place[1]=='weight' and place[0] in ('cls.predictions', 'shared'), place
            continue
        row,n = got[place],n+1
        if row['std']!=row['std'] and want['std'] is not None:
            sums.add((place[0].split('.')[-1], place[1]))
            assert abs(row['mean']-want['mean'])<=rel*want['rms']
        # Skip gradients of key biases, which are 0 except for rounding
        elif want['abs_max']>1e-18 and (bad := off(row, want)): wrong.append((place, bad))
    assert not wrong and n>1000, (len(wrong), wrong[:3])
    assert sums=={('position_embeddings' if 'bert' in case else 'relative_attention_bias', 'output_grad')}
    assert 'describe tensors that are summed over ranks' in said


@pytest.mark.release
def test_two_models_of_two_processes_each(ran_by_four):
    "Each pair of processes trains its own model. The table has two models, although their layers have the same names."
    df,said = merged(ran_by_four, 'two_models_4')
    assert said.startswith('two_models_4: 2 groups of ranks have parameters of their own in layers.0, layers.1, layers.2') and 'own loss' not in said
    assert {*df['path'].dropna().astype(str)}>={f'layers.{i}' for i in range(6)} and 'layers.6' not in set(df['path'])
    each,_ = merged(ran_by_four, 'two_models_4', per_rank=True)
    for pair,layer in ((0, 1), 'layers.1'), ((2, 3), 'layers.4'):
        for ttype,name in ('output', 'output_0'), ('output_grad', 'output_0'), ('weight', 'weight_0'):
            want = each[each['rank'].isin(pair) & (each.path=='layers.1') & (each.ttype==ttype) & (each.tname==name)]
            row = df[(df.path==layer) & (df.ttype==ttype) & (df.tname==name)].set_index('step')
            halves = want.groupby('step')[['mean', 'max', 'l1']].agg(dict(mean='mean', max='max', l1='sum'))
            scale = .5 if ttype=='output_grad' else 1. # Output gradients belong to the mean loss of both processes
            assert np.allclose(row['mean'], halves['mean']*scale, rtol=rel, atol=0) and np.allclose(row['max'], halves['max']*scale, rtol=rel, atol=0)
            assert np.allclose(row['l1'], halves['l1']*(scale if ttype!='weight' else .5), rtol=rel, atol=0)


@pytest.mark.release
@pytest.mark.filterwarnings('ignore::torchember.EmberWarning')
@pytest.mark.parametrize('case', [*exact, 'interleaved_2', 'two_models_4', 'hugging_face_t5_2', 'tensor_parallel_2', 'experts_2', 'experts_4'])
def test_a_few_steps_at_a_time(home_of, case, monkeypatch):
    "Reading a few steps at a time gives the same rows as reading the whole run."
    ran = home_of(case)
    monkeypatch.setattr('torchember.frames.chunks.most_merged', 100)
    rows,want = scan(case, 'arrow', home=ran),read(case, home=ran)
    assert len(rows.pruned.chunks)>1
    got = rows.to_table().to_pandas()
    if 'numel' not in want: assert got.pop('numel').isna().all()
    assert [*got]==[*want] and len(got)==len(want)
    for c in want:
        a,b = got[c],want[c]
        if b.dtype.kind in 'if' or c in ('ratio', 'numel'): assert np.allclose(a.astype(float), b.astype(float), rtol=1e-12, atol=0, equal_nan=True), c
        else: assert [plain(v) for v in a]==[plain(v) for v in b], c


def plain(v): return [int(n) for n in v] if isinstance(v, tuple|list|np.ndarray) else None if v is None or v!=v else str(v)


def test_stages_that_take_turns(ran):
    "With two interleaved stages per process, layers have the names of the whole model, and calls of a stage together cover the batch."
    df,said = merged(ran, 'interleaved_2')
    assert not said and {*df[df.ttype!='scalar']['path'].dropna().astype(str)}=={*'01234567', '@pp0', '@pp1', '@pp2', '@pp3'}
    assert df[df.path=='6']['module'].iloc[0]=='model(ModuleList).6(Linear)'
    got,wanted = rows_of(df[df.ttype!='scalar']),[json.loads(line) for line in (ran/'interleaved_2.jsonl').read_text().splitlines()]
    for want in (w for w in wanted if w['path']):
        if want['ttype'] in ('input', 'output', 'output_grad'):
            calls = [r for k,r in got.items() if (*k[:3], k[4])==tuple(want[c] for c in where if c!='call')]
            assert sum(r['l1'] for r in calls)==pytest.approx(want['l1'], rel=rel) and max(r['max'] for r in calls)==pytest.approx(want['max'], rel=rel)
        else: assert not off(got[tuple(want[c] for c in where)], want), want


def test_what_compiled_code_cannot_tell_of(ran):
    "Each process warns once about a `DTensor` in compiled code, which cannot report its layout. All other rows need no warning."
    def seen(kind):
        df,_ = merged(ran, f'compiled_2_{kind}')
        assert set(df[df.ttype=='weight']['path'])=={'0'} and len(df[df.ttype=='update'])==2
        return {(r['ttype'], str(r['path'])) for r in df.to_dict('records') if r['ttype'] in ('input', 'output', 'output_grad')}
    for rank in 0, 1:
        said,none = (json.loads((ran/f'compiled_2_{kind}.said{rank}').read_text()) for kind in ('spread', 'plain'))
        assert not none and len(said)==1 and 'input of model(Sequential).0(Linear) is not measured: this tensor is a DTensor in compiled code' in said[0]
    assert seen('spread')=={(t, '') for t in ('input', 'output', 'output_grad')}
    assert seen('plain')=={(t, p) for t in ('input', 'output', 'output_grad') for p in ('', '0')}


def test_each_rank_as_it_saw_it(ran):
    df,_ = merged(ran, 'sharded_2', per_rank=True)
    assert sorted(df['rank'].unique())==[0, 1] and set(df['part'].dropna())=={'shard:B', 'shard:R', 'shard:S0'}
    one = read('sharded_2.rank1', home=ran)
    assert len(df[df['rank']==1])==len(one) and df[df['rank']==1]['mean'].reset_index(drop=True).equals(one['mean'])
    assert set(df[df.ttype=='output_grad']['gscale'])=={.5} and df[df.ttype!='output_grad']['gscale'].isna().all()


def test_logged_numbers(ran):
    "The merged table has the mean of a logged number over all processes."
    each,_ = merged(ran, 'sharded_2', per_rank=True, ttype='scalar')
    df,said = merged(ran, 'sharded_2', ttype='scalar')
    each,df = (d[d.tname=='log'] for d in (each, df))
    want = each.groupby('step')['loss'].mean()
    assert each.groupby('step')['loss'].nunique().tolist()==[2, 2, 2] and not said
    assert df['loss'].tolist()==pytest.approx(want.tolist(), rel=1e-12) and df['done'].tolist()==[1, 2, 3]


def test_few_statistics(ran):
    "With few statistics, no column contains the number of elements of a shard."
    df,said = merged(ran, 'few_2')
    got,want = rows_of(df),[json.loads(line) for line in (ran/'few_2.jsonl').read_text().splitlines()]
    assert not said and len(want)==144
    for w in want:
        r = got[tuple(w[c] for c in where)]
        assert abs(r['mean']-w['mean'])<=rel*w['rms'] and (w['std'] is None or abs(r['var']-w['std']**2)<=rel*w['std']**2), w


def test_some_rows(ran):
    "Filters, columns, patterns and lists of `read` apply to the merged table."
    df,_ = merged(ran, 'sharded_2')
    some,_ = merged(ran, 'sharded_2', path='layers.*', ttype='weight_grad', steps=-1, columns=['path', 'rms'])
    want = df[df.path.astype(str).str.startswith('layers.') & (df.ttype=='weight_grad') & (df.step==2)]
    assert list(some.columns)==['path', 'rms'] and some.rms.tolist()==want.rms.tolist() and len(some)==6
    both,_ = merged(ran, 's*_2')
    assert list(both['run'].unique())==['same_2', 'sharded_2']
    stage,_ = merged(ran, 'pipeline_2', path='4', ttype='weight')
    assert set(stage['module'])=={'model(Sequential).4(Linear)'} and len(stage)==6


def test_replicas_that_drift(ran):
    _,said = merged(ran, 'drifted_2')
    assert re.search(r'drifted apart: tensor weight \(weight\) of layers\.1 differs between rank 1 and rank 0 since step 1', said)


@pytest.mark.release
def test_logs_that_end_early_or_are_missing(ran_by_four):
    "The merged table is readable if a process ended early or left no log."
    _,said = merged(ran_by_four, 'one_dies_4')
    assert 'rank 2 has no rows after step 0, while other ranks continue to step 2' in said
    for f in [*(ran_by_four/'log').glob('one_dies_4.rank1*'), *(ran_by_four/'data').glob('*one_dies_4.rank1.json')]: f.unlink()
    _,said = merged(ran_by_four, 'one_dies_4')
    assert 'Of 4 ranks, rank 1 left no rows' in said


def test_shards_that_do_not_add_up(ran):
    "If the log of one of two processes is missing, half of the shards of weight gradients is missing, and a remark says so."
    for d in 'log','data':
        for f in (ran/d).glob('*sharded_2.rank0*'): shutil.copy(f, f.with_name(f.name.replace('sharded_2', 'half')))
    _,said = merged(ran, 'half')
    assert re.search(r'have different numbers of elements. The first is .*: the shards together have \d+ elements, but the whole tensor has \d+', said)
    assert 'rank 1 left no rows' in said


def test_the_same_batch(ran):
    "A sampler that gives each rank the same samples is reported."
    _,said = merged(ran, 'same_2')
    assert 'All ranks get the same batch' in said
