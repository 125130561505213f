"Tests of merged JAX runs of 2 and 4 processes: rows equal those of one process with whole arrays, computed in numpy"
import json
import warnings
from pathlib import Path

import programs
import pytest

from torchember import EmberWarning, read, runs, to_logframe

pytest.importorskip('jax')
pytest.importorskip('flax')
pytest.importorskip('optax')
here = Path(__file__).parent
rel = 1e-9
imported = 'import numba, pandas, scipy.stats, flax.linen, flax.nnx, optax, jax.experimental.multihost_utils'
in_two = 'replicated', 'sharded', 'tensor_parallel', 'not_compiled', 'own_arrays', 'mapped', 'laid_out_inside', 'layouts', 'drifted', 'unnamed', 'not_all'


def start(d, n, devices, *cases):
    programs.ranks(here/'spread_jax.py', d, devices, *cases, n=n, after=imported, timeout=300)
    return d


@pytest.fixture(scope='module')
def two(tmp_path_factory): return start(tmp_path_factory.mktemp('two'), 2, 1, *in_two)


def merged(home, run, **how):
    "Return the merged table of a run, and the messages about it"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always', EmberWarning)
        df = read(run, home=home, **how)
    return df, ' '.join(str(w.message) for w in said)


def place(r): return r['path'] or r.get('shard') or '', r['ttype'], r['tname'], r['step']


def off(row, want):
    "Return statistics that differ from the expected values, relative to their magnitude"
    out = []
    for k,v in want.items():
        if k in ('path', 'ttype', 'tname', 'step'): continue
        x = row.get(k)
        if k=='shape': ok = list(x)==v
        elif k=='exponents': ok = x is None or x!=x or x[:1]+x[1:]==v
        elif v is None: ok = x!=x
        else: ok = abs(x-v)<=rel*max(abs(v), want['rms'] if k=='mean' else 0)
        if not ok: out.append((k, x, v))
    return out


def same_as_one(home, run, quiet=True):
    "Check that a run has exactly the rows of a run of one process, with the same numbers"
    df,said = merged(home, run)
    df = df[df.ttype!='scalar'].assign(path=df['path'].astype(str))
    if 'shard' in df: df = df.assign(shard=df['shard'].astype(object).where(df['shard'].notna(), None))
    rows = [r for r in df.to_dict('records')]
    got = {place(r): r for r in rows}
    wanted = [json.loads(line) for line in (home/f'{run}.jsonl').read_text().splitlines()]
    assert len(got)==len(rows)==len(wanted), sorted({*got}^{place(w) for w in wanted})
    wrong = [(place(w), bad) for w in wanted if (bad := off(got[place(w)], w))]
    assert not wrong, (len(wrong), wrong[:3])
    if quiet: assert not said
    return df, said


def parts(home, run):
    "Return the column `part` of the rows of each tensor"
    df,_ = merged(home, run, per_rank=True)
    return {(r['path'], r['ttype'], r['tname']): r['part'] for r in df.to_dict('records') if r['ttype']!='scalar'}


@pytest.mark.slow
@pytest.mark.parametrize('case', ['replicated_2', 'sharded_2', 'tensor_parallel_2', 'not_compiled_2', 'mapped_2', 'laid_out_inside_2'])
def test_merged_rows_are_those_of_one_process(two, case):
    df,_ = same_as_one(two, case)
    if case=='replicated_2':
        assert set(parts(two, case).values())=={'data:R'} and df['exponents'].notna().all()
        assert len(to_logframe(merged(two, case)[0]))>0
    if case=='sharded_2':
        of = parts(two, case)
        assert of['one', 'weight', 'weight_1']==of['two', 'optimizer', 'trace_0']==of['', 'buffer', 'seen']=='data:S0'
        assert of['one', 'output', 'output_0']=='data:R'
        each = merged(two, case, per_rank=True)[0]
        one = each[(each.path=='one') & (each.tname=='weight_1') & (each.step==0)]
        assert one['shape'].map(tuple).tolist()==[(2, 8), (2, 8)] and one['global_shape'].map(tuple).tolist()==[(4, 8)]*2
    if case=='not_compiled_2': assert parts(two, case)=={('', 'probe', 'twice'): 'data:S0'}


@pytest.mark.slow
def test_logged_numbers_are_merged_and_the_run_is_listed_once(two):
    df,_ = merged(two, 'replicated_2', ttype='scalar')
    df = df[df.tname=='log']
    assert df['step'].tolist()==[0, 1] and df['loss'].notna().all()
    r, = runs(home=two).query("name=='replicated_2'").to_dict('records')
    assert (r['ranks'], r['steps'], r['model'])==(2, 2, 'Net') and not isinstance(r['problem'], str)
    about = json.loads((two/'data'/'ranks_replicated_2.rank1.json').read_text())
    assert about=={'rank': 1, 'world': 2, 'axes': {'data': [0, 1]}}


@pytest.mark.slow
def test_outputs_of_each_process_are_parts_of_a_batch(two):
    "Different outputs without metadata are parts of a batch. A message says that the scale of gradients is unknown."
    df,said = merged(two, 'own_arrays_2')
    grads = df.ttype=='output_grad'
    assert grads.any() and "each rank's own loss" in said and set(parts(two, 'own_arrays_2').values())=={'world:?'}
    got = {place(r): r for r in df[~grads & (df.ttype!='scalar')].assign(path=df['path'].astype(str)).to_dict('records')}
    wanted = [json.loads(line) for line in (two/'own_arrays_2.jsonl').read_text().splitlines()]
    assert not [(place(w), bad) for w in wanted if (bad := off(got.pop(place(w)), w))]
    assert {k[1:3] for k in got}=={('buffer', 'seen')}


layout = dict(rows='data:S0', columns='data:R', both='data:S0', one='data:S0', turned='data:S0', number='data:R', mine='world:?', empty='data:R',
    whole_numbers='data:R', complex='data:S0')


def laid_out(home, run):
    df,said = merged(home, run)
    df = df[~df.ttype.isin(['scalar', 'finding'])]
    got = {r['pname']: r for r in df.to_dict('records')}
    for line in (home/f'{run}.jsonl').read_text().splitlines():
        w = json.loads(line)
        assert not off(got[w['path']], w), (w['path'], off(got[w['path']], w))
    assert not said and got['empty']['shape']==(0, 3) and len(got)==15
    own = {r['pname']: r for r in merged(home, f'{run}_own', per_rank=True)[0].query('rank==0 and ttype not in ("scalar", "finding")').to_dict('records')}
    return {r['pname']: r['part'] for r in merged(home, run, per_rank=True)[0].query('ttype not in ("scalar", "finding")').to_dict('records')}, own


@pytest.mark.slow
def test_layouts_over_processes_are_described(two):
    part,own = laid_out(two, 'layouts_2')
    assert {k: part[k] for k in layout}==layout
    assert {k: own[k]['n'] for k in ('rows', 'columns', 'all', 'mine')}=={'rows': 32, 'columns': 64, 'all': 64, 'mine': 8}


@pytest.mark.slow
def test_a_drifted_replica_is_reported(two):
    _,said = merged(two, 'drifted_2')
    assert 'drifted apart: tensor kernel (weight) of layer differs between rank 1 and rank 0 since step 1' in said


@pytest.mark.slow
def test_a_process_without_log_is_named(two):
    for f in [*(two/'log').glob('drifted_2.rank1*'), *(two/'data').glob('*drifted_2.rank1.json')]: f.unlink()
    _,said = merged(two, 'drifted_2')
    assert 'Of 2 ranks, rank 1 left no rows' in said


@pytest.mark.slow
def test_processes_agree_on_one_name(two):
    names = [(two/f'unnamed.{r}').read_text() for r in range(2)]
    assert names[0].startswith('jax_2') and names==[names[0].removesuffix('.rank0')+f'.rank{r}' for r in range(2)]


@pytest.mark.slow
def test_a_process_that_does_not_record_blocks_nobody(two):
    "If a process does not record, values of shared programs are missing with a message, and all others are recorded."
    said = [json.loads((two/f'not_all.{r}').read_text()) for r in range(2)]
    for r in range(2):
        first = [s for s in said[r] if 'outputs of modules in programs that processes 0, 1 share are not recorded' in s]
        assert len(first)==2-r and 'every is every(2) in process 0 and every(1) in process 1' in first[0], said[r]
    assert 'process 1 has not reached such a program within 3 seconds' in said[0][-1]+said[0][-2]
    df,_ = merged(two, 'alone')
    assert set(df['ttype'])=={'weight'}


@pytest.mark.slow
def test_two_devices_in_each_of_two_processes_are_merged(tmp_path):
    start(tmp_path, 2, 2, 'two_axes', 'layouts')
    df,_ = same_as_one(tmp_path, 'two_axes_2x2')
    assert parts(tmp_path, 'two_axes_2x2')['one', 'weight', 'weight_1']=='data:S0'
    part,own = laid_out(tmp_path, 'layouts_2x2')
    assert part['odd']==part['odd_replicas']=='devices:R' and part['odd_both']=='devices:S0'
    assert {k: part[k] for k in layout}==layout
    assert {k: own[k]['n'] for k in ('both', 'one', 'odd', 'odd_both')}=={'both': 32, 'one': 32, 'odd': 64, 'odd_both': 32}


@pytest.mark.slow
# CI tests two axes with two processes of two devices; four processes compile everything four times
@pytest.mark.release
def test_four_processes_are_merged(tmp_path):
    start(tmp_path, 4, 1, 'two_axes', 'modules', 'layouts')
    for case in 'two_axes_4','modules_4': same_as_one(tmp_path, case)
    of = parts(tmp_path, 'two_axes_4')
    assert of['one', 'weight', 'weight_1']=='data:S0 model:S1' and of['one', 'weight', 'weight_0']=='data:R model:S0'
    assert of['', 'output', 'output_0']=='data:R model:R'
    part,_ = laid_out(tmp_path, 'layouts_4')
    assert part['both']=='data:S0 model:S1' and part['turned']=='model:S1 data:S0' and part['one']=='data:S0 model:S0', part
