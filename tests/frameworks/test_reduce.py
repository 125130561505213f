"Tests of `reduce='step'` in 2 to 4 processes: the rows merged on rank 0 equal those in the files, and no process disturbs another"
import json
import os
import signal
import socket
import time
import warnings
from pathlib import Path

import programs
import pytest

from torchember import EmberWarning, read
from torchember.store.reading import path_of

here = Path(__file__).parent
libraries = 'import numba, pandas, scipy.stats, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor.parallel, torchember.processes.whole_steps'
where = ['step', 'path', 'ttype', 'tname', 'call', 'micro', 'phase', 'backward']
more = os.pathsep.join([str(here.parent), str(here), os.environ.get('PYTHONPATH', '')])


def table(run, folder):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', EmberWarning)
        return read(run, home=folder)


def keyed(rows):
    "Return a dict: location (step, module, tensor, call, ...) -> row. Fail if two rows have the same location."
    out = {}
    for r in rows:
        r = {'path': path_of(r['module']), **{k: v for k,v in r.items() if v is not None and v==v}}
        out.setdefault(tuple(r.get(k) for k in where), []).append(r)
    assert all(len(rs)==1 for rs in out.values())
    return {k: rs[0] for k,rs in out.items()}


def same(x, y):
    if isinstance(x, int|float) and isinstance(y, int|float): return abs(x-y)<=1e-12*max(abs(x), abs(y))
    return [*x]==[*y] if isinstance(x, list|tuple) else x==y


def compare(told, run, folder):
    "Check that the rows received during training equal all rows in the files."
    df = table(run, folder)
    want = keyed(df.drop(columns=['ts', 'run'], errors='ignore').astype({c: object for c in df.columns if df[c].dtype=='category'}).to_dict('records'))
    got = keyed(r for _,rows in told for r in rows)
    assert got.keys()==want.keys() and got
    for k,w in want.items():
        w,g = ({c: v for c,v in r.items() if v!=0 or c not in ('nan', 'posinf', 'neginf')} for r in (w, got[k]))
        assert w.keys()==g.keys()-{'ts'}, k
        assert not [(k, c, w[c], g[c]) for c in w if not same(w[c], g[c])]


# ---- rows merged during the training equal the rows in the files

@pytest.mark.release
@pytest.mark.slow # slow because it starts six processes
@pytest.mark.parametrize('n, cases', [(2, 'accumulated uneven few experts interleaved drifted'), (4, 'sharded sharded_and_replicated tensor_parallel experts')])
def test_told_is_what_is_read(tmp_path, n, cases): check(tmp_path, n, cases)


@pytest.mark.release
def test_told_is_what_is_read_of_the_usual_cases(tmp_path): check(tmp_path, 2, 'replicated sharded tensor_parallel pipeline')


def check(folder, n, cases):
    programs.ranks(here/'reduced.py', folder, *cases.split(), n=n, after=libraries, timeout=100, PYTHONPATH=more)
    for case in cases.split():
        told,remarks = json.loads((folder/f'{case}_{n}.told').read_text())
        compare(told, f'{case}_{n}', folder)
        assert not remarks and [s for s,_ in told]==sorted(s for s,_ in told)


# ---- faults of processes

def trained(folder, what, n=2, timeout=30):
    "Run a training with a fault. Return the exit codes, the results of each process (None if it wrote none), and the errors."
    with socket.create_server(('localhost', 0)) as s: port = s.getsockname()[1]
    env = dict(WORLD_SIZE=n, MASTER_ADDR='localhost', MASTER_PORT=port, PYTHONPATH=more)
    ps = [programs.start(here/'reduced_faults.py', folder, what, after=libraries, RANK=r, **env) for r in range(n)]
    end,said = time.monotonic()+timeout,[]
    for p in ps:
        try: said.append(p.communicate(timeout=max(end-time.monotonic(), .1)))
        except BaseException:
            for q in ps:
                if q.poll() is None: q.kill()
            raise
    left = [folder/f'{what}.{r}' for r in range(n)]
    return [p.returncode for p in ps], [json.loads(f.read_text()) if f.exists() else None for f in left], [err for _,err in said]


def of_ember(left): return [s for s in left['said'] if 'whole' in s or 'rank' in s or 'reduce' in s]


@pytest.mark.release
def test_a_process_that_skips_a_layer(tmp_path):
    codes,left,_ = trained(tmp_path, 'skips')
    assert codes==[0, 0] and not of_ember(left[0]) and not of_ember(left[1])
    compare(left[0]['told'], 'skips', tmp_path)
    # Rank 0 received all these steps during the training
    assert {r['step'] for _,rows in left[0]['meanwhile'] for r in rows if r['ttype']!='scalar'}>={0, 1, 2, 3}
    # Rank 1 still receives only its own rows
    assert [s for s,_ in left[1]['told']] and all(r['rank']==1 for _,rows in left[1]['told'] for r in rows)
    assert max(x['closing'] for x in left)<2


# On a busy machine, other processes may need more than the 0.5 s that rank 0 waits
@pytest.mark.release
def test_a_process_that_sleeps(tmp_path):
    "The first process waits for a slow process up to its patience, names it once, and includes it again later."
    codes,left,errors = trained(tmp_path, 'sleeps')
    assert codes==[0, 0], errors
    said = of_ember(left[0])
    assert len(said)==1 and 'rank 1 sent nothing' in said[0] and 'at step 3' in said[0]
    without = {r['step']: r.get('without') for _,rows in left[0]['told'] for r in rows if r['ttype']!='scalar'}
    assert [*without]==[*range(14)] and not any(without[s] for s in (0, 1, 2, 12, 13)) and all(without[s]==[1] for s in range(3, 7))
    assert left[0]['longest']<.5


def test_a_process_that_is_killed(tmp_path):
    "If another process is killed, the first continues with the other processes, and names the missing one."
    codes,left,errors = trained(tmp_path, 'killed', n=3)
    said = of_ember(left[0])
    assert codes==[0, 0, -signal.SIGKILL], errors
    assert len(said)==1 and 'rank 2 sent nothing for 2 seconds, at step' in said[0], said
    without = {r['step']: r.get('without') for _,rows in left[0]['told'] for r in rows if r['ttype']!='scalar'}
    assert [*without]==[*range(6)] and without[1] is None and all(without[s]==[2] for s in (3, 4, 5))
    assert left[0]['longest']<1 and left[0]['closing']<5


@pytest.mark.release
def test_the_first_is_killed(tmp_path):
    "If the first process is killed, its store is gone. The other processes finish their training."
    codes,left,_ = trained(tmp_path, 'first_dies')
    assert codes==[-signal.SIGKILL, 0] and not of_ember(left[1]) and [s for s,_ in left[1]['told']][-1]==5
    assert left[1]['longest']<1 and left[1]['closing']<5
    assert table('first_dies.rank1', tmp_path)['step'].max()==5


@pytest.mark.slow
@pytest.mark.parametrize('what', [pytest.param('forks', marks=pytest.mark.release), 'destroys', 'exits', 'ends'])
def test_ends_of_all_kinds(tmp_path, what):
    "No end harms a process: a forked child, a destroyed group, no `close`, and a first process that exits immediately."
    codes,left,errs = trained(tmp_path, what)
    assert codes==[0, 0] and not of_ember(left[0]) and not of_ember(left[1]) and 'Traceback' not in ''.join(errs), errs
    # The last step arrives when the interpreter ends
    if what=='exits': assert {*(tmp_path/'exits.0.heard').read_text().split()}=={*'012345'}
    else: compare(left[0]['told'], what, tmp_path)


def test_live_shows_the_whole(tmp_path):
    "`live` shows the loss of step 5 averaged over both processes, 5.5. `per_rank=True` returns the rows of the first process alone."
    codes,left,errs = trained(tmp_path, 'lives')
    assert codes==[0, 0] and 'lives: step 5, loss 5.5\n' in errs[0], errs
    assert not errs[1] and {r['rank'] for _,rows in left[0]['own'] for r in rows}=={0} and [s for s,_ in left[0]['own']][-1]==5


def test_without_a_group(tmp_path):
    "Without a process group, there is one warning, and each process writes its own rows."
    codes,left,_ = trained(tmp_path, 'no_group')
    assert codes==[0, 0]
    for r,x in enumerate(left):
        assert len(of_ember(x))==1 and 'init_process_group before torchEmber' in of_ember(x)[0]
        assert {s for s,_ in x['told']}=={*range(6)} and all(row['rank']==r for _,rows in x['told'] for row in rows)
