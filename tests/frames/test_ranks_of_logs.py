"Logs of several ranks made by hand: torn, missing, doubled or invalid data is reported, and no wrong number is given silently."
import json
import warnings

import numpy as np
import pytest

from torchember import EmberWarning, read, scan

g = np.random.default_rng(0)
x,w = g.normal(size=(3, 8, 5)),g.normal(size=(3, 4, 5)) # x: outputs of a batch in each step; w: a weight in each step
pieces = {'world': 2, 'axes': {'dp': [0, 1]}}


def row(a, step, ttype, tname, part, **more):
    return dict(shape=[*a.shape], mean=a.mean(), std=a.std(ddof=1), l1=np.abs(a).sum(), min=a.min(), max=a.max(), module='model(Net).fc(Linear)', ttype=ttype,
        tname=tname, step=step, call=0, dtype='float64', part=part) | more


def rows(rank):
    "Return the rows of one of two ranks, which have halves of a batch and equal weights."
    return [r for s in range(3) for mine in [x[s][4*rank:4*rank+4]] for r in (row(mine, s, 'output', 'output_0', 'dp:B'),
        row(2*mine, s, 'output_grad', 'output_0', 'dp:B', gscale=.5), row(w[s], s, 'weight', 'weight_0', 'dp:R'))]


def about(rank): return {'rank': rank, **pieces}


def lines(rows): return ''.join(json.dumps(r)+'\n' for r in rows)


def write(home, *logs, name='run'):
    "Write logs and metadata. `logs`: tuples of rank, rows or text, and metadata or None."
    for rank,log,meta in logs:
        for d in 'log','data': (home/d).mkdir(exist_ok=True)
        (home/'log'/f'{name}.rank{rank}').write_text(log if isinstance(log, str) else lines(log))
        if meta is not None: (home/'data'/f'ranks_{name}.rank{rank}.json').write_text(meta if isinstance(meta, str) else json.dumps(meta))


def merged(home, name='run', **how):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        df = read(name, home=home, **how)
    assert all(issubclass(w.category, EmberWarning) for w in said), [str(w.message) for w in said]
    return df, ' '.join(str(w.message) for w in said)


def off(df, ttypes=('output', 'output_grad', 'weight')):
    "Return step and type of the merged rows that differ from the rows of the whole batch."
    whole = ('output', 'output_0', x), ('output_grad', 'output_0', x), ('weight', 'weight_0', w)
    want = [row(a[s], s, tt, n, '') for s in range(3) for tt,n,a in whole if tt in ttypes]
    got = {(r['step'], r['ttype']): r for r in df.to_dict('records')}
    assert len(got)==len(df)
    return [(r['step'], r['ttype']) for r in want if (mine := got.get((r['step'], r['ttype']))) is None or tuple(mine['shape'])!=tuple(r['shape'])
        or any(not abs(mine[k]-r[k])<1e-9 for k in ('mean', 'std', 'l1', 'min', 'max'))]


def test_two_halves(tmp_path):
    write(tmp_path, *((r, rows(r), about(r)) for r in range(2)))
    df,said = merged(tmp_path)
    assert not off(df) and not said


def test_without_metadata(tmp_path):
    "Without metadata, all ranks are assumed to be one group, with a warning. Replicas are still counted once."
    write(tmp_path, *((r, rows(r), None) for r in range(2)))
    df,said = merged(tmp_path)
    assert not off(df) and "lists the ranks along the axis 'dp', so all 2 ranks are assumed to be one group" in said
    write(tmp_path, (2, rows(1), None), (3, rows(0), None))
    for r in range(2): (tmp_path/'data'/f'ranks_run.rank{r}.json').write_text(json.dumps({'rank': r, 'world': 4, 'axes': pieces['axes']}))
    assert "rank 2, rank 3 left no metadata (data/ranks_*.json), so the groups of these ranks along the axis 'dp' are unknown" in merged(tmp_path)[1]


def test_logs_of_older_versions(tmp_path):
    "Rows have no `part`: equal tensors count as replicas, and gradients of activations as those of each rank's own loss."
    def older(r): return [{k: v for k,v in row.items() if k not in ('part', 'gscale')} for row in rows(r)]
    write(tmp_path, *((r, older(r), None) for r in range(2)))
    df,said = merged(tmp_path)
    assert not off(df, ('output', 'weight')) and "each rank's own loss" in said
    write(tmp_path, (0, rows(0), about(0)))
    df,said = merged(tmp_path)
    assert not off(df, ('output', 'weight')) and "each rank's own loss" in said


@pytest.mark.parametrize('spoil', [lambda h: h[:-1]+[h[-1][:40]], lambda h: h[:4]+['\0'*300+'\n']+h[5:],
    lambda h: h[:4]+[h[4].replace('"step": 1', '"step": []')]+h[5:], lambda h: h[:4]+[h[4].replace('"gscale": 0.5', '"gscale": -1')]+h[5:]])
def test_torn_lines(tmp_path, spoil):
    "A row of one rank cannot be read. A warning is given, and all other rows are right."
    write(tmp_path, (0, rows(0), about(0)), (1, ''.join(spoil(lines(rows(1)).splitlines(True))), about(1)))
    df,said = merged(tmp_path)
    assert len(off(df))<=1 and 'The log of rank 1 has 1 invalid lines. Merged rows lack the values of these lines.' in said


def test_empty_logs(tmp_path):
    write(tmp_path, (0, rows(0), about(0)), (1, '', about(1)))
    df,said = merged(tmp_path)
    assert len(df)==9 and 'Of 2 ranks, rank 1 left no rows' in said and 'same batch' not in said
    write(tmp_path, (0, '', about(0)))
    df,said = merged(tmp_path)
    assert len(df)==0 and 'rank 0, rank 1 left no rows' in said


def test_of_different_lengths(tmp_path):
    write(tmp_path, (0, rows(0), about(0)), (1, rows(1)[3:], about(1)))
    assert 'rank 1 has no rows before step 1, while other ranks begin at step 0' in merged(tmp_path)[1]
    write(tmp_path, (1, rows(1)[:6], about(1)))
    df,said = merged(tmp_path)
    assert 'rank 1 has no rows after step 1, while other ranks continue to step 2' in said and set(off(df))=={(2, 'output'), (2, 'output_grad')}


def test_names(tmp_path):
    "Names such as `rank01`, a run name that looks like a rank, folders and links must not be mixed up with logs of ranks."
    write(tmp_path, *((r, rows(r), about(r)) for r in range(2)))
    for odd in '01', '00', '٣', '9'*30: (tmp_path/'log'/f'run.rank{odd}').write_text(lines(rows(0)[:1]))
    (tmp_path/'log'/'run.rank2').mkdir()
    (tmp_path/'log'/'run.rank3').symlink_to('/nowhere')
    df,said = merged(tmp_path)
    assert not off(df) and 'run.rank00, run.rank01' in said and 'files with another ending were not read' in said
    write(tmp_path, *((r, rows(r), about(r)) for r in range(2)), name='a.rank1')
    for name in 'a.rank1', 'a.*': assert not off(merged(tmp_path, name)[0].drop(columns='run', errors='ignore'))
    (tmp_path/'log'/'run').write_text(lines(rows(0)))
    df,said = merged(tmp_path)
    assert df['shape'].iloc[0]==(4, 5) and 'this is the log of one process' in said


@pytest.mark.parametrize('meta', [[], 'x', 5, '{{{', {'world': 'two'}, {'world': -3}, {'world': 10**12}, {'world': True},
    {'world': 2., 'axes': {}}, {'world': None, 'axes': None}, {'world': 2, 'axes': []},
    *({'world': 2, 'axes': {'dp': a}} for a in (5, None, [], ['0', '1'], [[0], [1]], [-1, 0], [0, 5], [1], [0]*9)),
    *({**pieces, 'stages': s} for s in ('0', [], {'': -1}, {'': 10**9}, {'': '0'})), {**pieces, 'rank': 1}], ids=str)
def test_metadata_that_makes_no_sense(tmp_path, meta):
    "The valid metadata of the other rank is used. A warning names the invalid metadata if it is a dict."
    write(tmp_path, (0, rows(0), meta if isinstance(meta, str) else json.dumps(meta)), (1, rows(1), about(1)))
    df,said = merged(tmp_path)
    assert not off(df) and ('The metadata of rank 0 is ignored' in said)==isinstance(meta, dict)


@pytest.mark.parametrize('part', [5, [], '', ':', 'dp', 'dp:', 'dp:X', 'x'*99, 'dp:S', None])
def test_parts_that_make_no_sense(tmp_path, part):
    "An invalid `part` is ignored: equal tensors count as replicas, and different tensors as parts."
    write(tmp_path, *((r, [row | {'part': part} for row in rows(r)], about(r)) for r in range(2)))
    assert not off(merged(tmp_path)[0])


def test_how_many_elements(tmp_path):
    "Without shape and numel, the mean of the whole tensor is unknown: it is NaN, not 0."
    def bare(r): return [{k: v for k,v in row.items() if k!='shape'} for row in rows(r)]
    write(tmp_path, *((r, bare(r), about(r)) for r in range(2)))
    df,said = merged(tmp_path)
    out = df[df.ttype=='output']
    assert out['mean'].isna().all() and np.allclose(out['max'], x.max((1, 2))) and "Record 'shape' or 'numel'" in said
    assert np.allclose(df[df.ttype=='weight']['mean'], w.mean((1, 2)))


def test_functions_of_the_user(tmp_path):
    "Results of users' functions cannot be merged. Equal values are shown, and a warning names different values."
    def own(r): return [{k: v for k,v in row.items() if k not in ('shape', 'mean', 'std', 'l1', 'min', 'max')} | {'med': r, 'top': 3.} for row in rows(r)]
    write(tmp_path, *((r, own(r), about(r)) for r in range(2)))
    df,said = merged(tmp_path)
    assert (df['top']==3).all() and df[df.ttype=='output']['med'].isna().all()
    assert 'med: the values differ between ranks' in said and 'number of elements' not in said


def test_quantities_of_a_monitor(tmp_path):
    "Rows of weights have only quantities and no `part`. They count as one parameter of all ranks."
    of = dict(module='model(Net).fc(Linear)', ttype='weight', tname='weight_0', pname='weight', step=0, call=0, dtype='float64', WeightNorm=2.)
    write(tmp_path, *((r, [of | {'Other': r}], None) for r in range(2)))
    df,said = merged(tmp_path)
    assert df['path'].tolist()==['fc'] and df['WeightNorm'].tolist()==[2] and df['Other'].isna().all()
    assert 'Other: the values differ between ranks' in said and 'of its own' not in said


def test_resumed_with_fewer_processes(tmp_path):
    early = [(r, [row for row in rows(r-2) if row['step']<1], {'rank': r, 'world': 4, 'axes': {'dp': [0, 1, 2, 3]}}) for r in (2, 3)]
    write(tmp_path, *((r, rows(r), about(r)) for r in range(2)), *early)
    df,said = merged(tmp_path)
    assert 'The logs of the ranks contain different numbers of ranks: 2 (rank 0, rank 1), 4 (rank 2, rank 3)' in said
    assert 'rank 2 has no rows after step 0' in said
    assert {s for s,_ in off(df)}=={0} and len(df[df.ttype=='weight'])==3


def test_numbers_noted(tmp_path):
    "Each logged number is averaged over the ranks that logged it. A NaN of one rank makes the result NaN."
    def note(call, **numbers): return dict(module='model(Net)', ttype='scalar', tname='log', step=0, call=call, dtype='float64') | numbers
    notes = [[note(0, loss=1.), note(0, loss=5.), note(1, a=2., lr=.1), note(2, loss=1.)],
        [note(0, loss=2.), note(0, loss=6.), note(1, a=2.), note(2, loss=None, nan=1)]]
    write(tmp_path, *((r, rows(r)+notes[r], about(r)) for r in range(2)))
    df,said = merged(tmp_path)
    got = df[df.ttype=='scalar'].sort_values('call', kind='stable')
    want = [[1.5, np.nan, np.nan, 0], [5.5, np.nan, np.nan, 0], [np.nan, 2, .1, 0], [np.nan, np.nan, np.nan, 1]]
    assert np.array_equal(got[['loss', 'a', 'lr', 'nan']], want, equal_nan=True)
    assert not said and not off(df[df.ttype!='scalar'])


def test_what_each_process_has_whole(tmp_path):
    "A positional embedding without a batch dimension counts once. Its gradient is the sum over all parts of the batch."
    one,grads = g.normal(size=(1, 5)),g.normal(size=(2, 3, 1, 5))
    def more(r): return [dict(row(a, s, tt, 'output_0', 'dp:B', **how), module='model(Net).pos(Embedding)') for s in range(3)
        for tt,a,how in (('output', one, {}), ('output_grad', grads[r, s], {'gscale': .5}))] + [dict(row(np.zeros((4, 5)), 0, tt, 'output_0', 'dp:B'),
        module='model(Net).zero(Linear)') for tt in ('output', 'output_grad')]
    write(tmp_path, *((r, rows(r)+more(r), about(r)) for r in range(2)))
    df,said = merged(tmp_path)
    got = df[df['path']=='pos']
    out,grad = (got[got.ttype==t] for t in ('output', 'output_grad'))
    assert not off(df[df['path']=='fc']) and out['shape'].tolist()==[(1, 5)]*3 and np.allclose(out['l1'], np.abs(one).sum())
    assert np.allclose(grad['mean'], (grads.sum(0)/2).mean((1, 2))) and grad[['std', 'l1', 'max']].isna().all(axis=None)
    assert '3 rows describe tensors that are summed over ranks' in said and 'tensor output_0 (output_grad) of pos' in said
    assert df[df['path']=='zero']['shape'].tolist()==[(8, 5)]*2


@pytest.mark.parametrize('halves, role, mean', [('B', 'P', lambda m: (3*(m[0]+m[1])+5*(m[2]+m[3]))/8), ('R', 'P', lambda m: m[0]+m[1]), ('B', 'P*', None)])
def test_a_sum_that_is_not_added_up_yet(tmp_path, halves, role, mean):
    "Ranks have partial sums of uneven halves of a batch. Only the mean of the sum is known, no other statistic."
    axes = {r: {'rank': r, 'world': 4, 'axes': {'dp': [r%2, r%2+2], 'tp': [r//2*2, r//2*2+1]}} for r in range(4)}
    def terms(r): return x[0][[0, r%2]] if halves=='R' else x[0][r%2:r%2+3] if r<2 else x[0][r%2+2:r%2+7]
    write(tmp_path, *((r, [row(terms(r), 0, 'output', 'output_0', f'dp:{halves} tp:{role}', gscale=.5)], axes[r]) for r in range(4)))
    df,said = merged(tmp_path)
    want = np.nan if mean is None else mean([terms(r).mean()/2 for r in range(4)])
    np.testing.assert_allclose(df['mean'], [want], rtol=1e-12)
    assert df[['std', 'l1', 'min', 'max']].isna().all().all() and '1 rows describe tensors that are summed over ranks' in said, said


def test_scan_says_who_is_missing(tmp_path):
    "Problems that can be found without reading rows are reported by `scan` at once, with the same messages as by `read`."
    def said(**how):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            scan('run', 'arrow', home=tmp_path, **how)
        return ' '.join(str(w.message) for w in said)
    write(tmp_path, (0, rows(0), about(0)), (1, rows(1), about(1)))
    assert said()==''
    write(tmp_path, (1, rows(1)[3:6], about(1)))
    assert said()==('run: rank 1 has no rows before step 1, while other ranks begin at step 0. '
        'run: rank 1 has no rows after step 1, while other ranks continue to step 2.')
    assert said() in merged(tmp_path)[1] and said(per_rank=True)==''
    write(tmp_path, (1, '', about(1)))
    assert said()=='run: Of 2 ranks, rank 1 left no rows, so shards are missing.'
    write(tmp_path, (1, rows(1), {'rank': 1, 'world': 'two', 'axes': {}}))
    assert "The metadata of rank 1 is ignored, because 'world' has the invalid value 'two'" in said()
    write(tmp_path, (1, [r|{'step': None} for r in rows(1)], about(1)))
    assert said()==''
