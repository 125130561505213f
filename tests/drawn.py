"Hypothesis strategies for rows of a log: `row` gives usual rows of an ember, and `any_row` gives rows with arbitrary values."
import math

from hypothesis import strategies as st

from torchember import emberTracker
from torchember.ground.record import line_of

nan,inf = math.nan,math.inf
odd = [None, True, 0, 7, -2**63, 2**63, 2**53+1, -0., 2., 1/3, nan, inf, -inf, '', 'a.b', '🔥é', '2024-01-01 00:00:00', [], [1, 2], [1., nan], [True], [None],
    [1, [2.5]], ['x'], {}, {'a': [nan, {'b': -inf}]}, {'nonfinite': 1}]
keys = ['mean', 'max', 'nan', 'posinf', 'shape', 'exponents', 'call', 'dtype', 'ts', 'supersedes', 'phase', 'path', 'epoch', 'run',
    '_torchember_layout', 'a.b', 'a', 'é"\n', '', 'step', 'module', 'ttype', 'tname', 'nonfinite', 'rank']
names = dict(step=st.integers(0, 3), module=st.sampled_from(['m(Net).f(L)', 'm(Net).g(L)', 'm(Net)']), ttype=st.sampled_from(['output', 'weight']),
    tname=st.sampled_from(['o', 'p']))
usual = dict(mean=st.floats(), max=st.floats(width=32), n=st.integers(-5, 5), exponents=st.lists(st.integers(0, 9), max_size=3),
    epoch=st.integers(0, 2)|st.floats(0, 1), run=st.just('mine'), ts=st.just('2024-01-01 00:00:00'), supersedes=st.just('numbers'),
    posinf=st.integers(0, 2), path=st.just('own'))
row = st.fixed_dictionaries(names, optional=usual)

def of_log(row):
    "Return True if a row can be written to a log."
    try: return bool(line_of(row))
    except ValueError: return False

any_row = st.builds(lambda a,b: {**a, **b}, row, st.dictionaries(st.sampled_from(keys), st.sampled_from(odd), max_size=4)).filter(of_log)


def lines(rows): return b''.join(line_of(r)+b'\n' for r in rows)

def begun(home, data, name='a'):
    "Create a run whose log file contains the bytes `data`. Return its tracker."
    t = emberTracker(name, home)
    t.log.mkdir(parents=True, exist_ok=True)
    t.log_path.write_bytes(data)
    return t
