"Values that rows may contain. The fast ways of writing and reading give the same results as the plain ways."
import enum
import json
import math
import os
import random
import uuid

import numpy as np
import pandas as pd
import pytest
import torch

from torchember import torchEmber
from torchember.ground import record
from torchember.store import columns as quick
from torchember.store import lines as by_lines
from torchember.store.jsonl import emberTracker
from torchember.store.lines import line_blocks, parse
from torchember.store.reading import frame, table_of_lines

lines_read = int(os.environ.get('LOG_LINES', 3000))


def nested(depth):
    v = 1.
    for _ in range(depth): v = [v]
    return v


class Name(str): pass
class Color(enum.Enum): red = 'red'
class Size(int, enum.Enum): big = 7


values = dict(
    none=None, true=True, zero=-0., small=5e-324, big=1.7976931348623157e308, third=1/3, inf=math.inf, minus=-math.inf, nan=math.nan,
    large=2**63-1, larger=2**64-1, least=-2**63, huge=2**64, negative=-2**63-1, astronomic=10**400, beyond=-10**5000,
    text='a"b\\c\nd\te\x00\x1f\x7f', separators='a\u2028b\u2029c\x85–', emoji='🔥é模', null='null', surrogate='half \ud800 pair', empty='', nan_text='NaN',
    list=[1, [math.nan, {'a': -math.inf}]], tuple=(1, 2), set={3}, deep=nested(100), nothing=[], empty_dict={}, nonfinite={'no': 'NaN'},
    dict={'a/b': {'~c': math.nan}, '': 1, 3: 4, math.nan: 5},
    tensor=torch.arange(3.), scalar=torch.tensor(math.nan), bf16=torch.ones(2, dtype=torch.bfloat16), array=np.eye(2), f32=np.float32(.1), f64=np.float64(.1),
    i8=np.int8(-3), u64=np.uint64(2**64-1), bool_=np.bool_(True), longdouble=np.longdouble(.5), longs=np.ones(2, np.longdouble),
    name=Name('x'), color=Color.red, size=Size.big, uuid=uuid.UUID(int=3))
refused = dict(bytes=b'x', object=object(), complex=1j, cls=int, deeper=nested(300), function=print)
both = pytest.mark.parametrize('fast', [True, False], ids=['orjson', 'json'])


@pytest.fixture
def library(fast, monkeypatch):
    if not fast: monkeypatch.setattr(record, 'orjson', None)
    elif record.orjson is None: pytest.skip("orjson is not installed")


def strict(line): return json.loads(line, parse_constant=lambda w: pytest.fail(f'{w} is not JSON'))


@both
@pytest.mark.parametrize('name', values)
def test_a_value_comes_back(name, fast, library):
    "A value is read back as it was, or as the nearest JSON value. Its line is strict JSON in UTF-8 without a line break."
    line = record.line_of({'before': 1, name: values[name]})
    assert b'\n' not in line and len(line.decode().splitlines())<=1+(name=='separators')
    strict(line)
    lost = {}
    want = {'before': 1, name: record.plain(values[name], name, lost)}
    if lost: want = record.restore({**want, 'nonfinite': lost})
    assert repr(record.load_row(line))==repr(want)
    assert not parse(line)[1]


@both
def test_refused_values_change_nothing(tmp_path, fast, library):
    t = emberTracker('a', tmp_path)
    for name,v in refused.items():
        with pytest.raises((TypeError, ValueError)): t + {'fine': 1, name: v}
        with pytest.raises((TypeError, ValueError)): t.mark(**{name: v})
        with pytest.raises((TypeError, ValueError)): t['meta'] = {name: v}
    cycle = []
    cycle.append(cycle)
    with pytest.raises((TypeError, ValueError)): t + {'cycle': cycle}
    for line in ('{"a": NaN}', '{"a": Infinity}', '[1]', '{"a": 1', '{"a": "\ud800"}', '{"a": "\\ud800"}', '{}\n{}', ''):
        with pytest.raises(ValueError): t.logging(line)
    assert not t.log_path.exists() and not t.marked
    with pytest.raises(FileNotFoundError): t.lines()


@both
def test_hostile_keys_in_rows_marks_and_metadata(tmp_path, fast, library):
    t = emberTracker('a', tmp_path)
    keys = ['', ' ', 'a/b', '~', '~1', '../x', 'nan', 'max', '\u2028', '"', '\\', '\n', 'é', '__class__', 'self', 'x'*10_000, 'half \ud800']
    t + dict.fromkeys(keys, math.nan)
    t.mark(**{k: math.inf for k in keys if k not in record.optional})
    t + {'nan': 'not a number', 'nonfinite': 'nor this'}
    t + {1: 2, None: 3, math.nan: 4}
    t['meta'] = {k: [math.nan, 1] for k in keys}
    first,second,third = t.lines()
    shown = [k.replace('\ud800', '\ufffd'*3) for k in keys]
    assert list(first)==shown and all(math.isnan(v) for v in first.values())
    assert second['nan']=='not a number' and second['']==math.inf
    assert (third['1'], third['None'], third['nan'])==(2, 3, 4)
    assert list(t['meta'])==shown and t['meta']['a/b']==[None, 1]
    assert len(t.df)==3 and len(t.latest_df)==3
    for k in ('', '../x', 'a/b', '\n', 'x'*10_000, 'half \ud800', '.', '..', 'a\0'):
        with pytest.raises(ValueError, match='metadata'): t[k] = {}
    assert [p.name for p in t.data.iterdir()]==['meta.json']


def test_marks_that_are_not_finite_or_not_numbers(tmp_path):
    t = emberTracker('a', tmp_path, source=lambda close: None)
    for _ in range(2): t.mark(lr=math.nan, array=np.ones(2), tensor=torch.ones(2), on=True)
    t + {'mean': math.inf}
    [row] = t.lines()
    assert math.isnan(row['lr']) and row['mean']==math.inf and row['array']==row['tensor']==[1, 1] and row['on'] is True and 'nonfinite' not in row


# ---- the fast way to make a table gives the same as the plain way

def some_row(draw, i):
    "Return a random row of one of many layouts, as models and users write them."
    mean = draw.choice([draw.gauss(0, 1)*10**draw.randint(-40, 40), 0, -0., 3, 2**53+1])
    stats = {'shape': [draw.randint(0, 9) for _ in range(draw.randint(0, 3))], 'mean': mean, 'std': draw.random(), 'count': draw.randint(-5, 2**62)}
    module = draw.choice(['model(Net)', 'model(Net).a(Linear)', 'größe, "quoted"', '}{][,:'])
    row = {**stats, 'module': module, 'ts': f'2020-02-15 13:44:{i%60:02}', 'tname': 'x', 'step': i}
    kind = draw.randint(0, 11)
    if kind==0: row |= {'mean': draw.choice([math.nan, math.inf]), 'nan': draw.randint(0, 2)}
    if kind==1: row = {**row, 'mean': None, 'posinf': draw.randint(0, 1), 'neginf': 1}
    if kind==2: row |= {'pname': 'weight'}
    if kind==3: row |= {'epoch': draw.choice([1, None, 2.5]), 'train': True}
    if kind==4: row = {'row_max': [draw.random(), None], 'nested': [[1], [2, [3]]], **row}
    if kind==5: row |= {'error': "ValueError: no", 'hist': {'a': 1}}
    if kind==6: row = {draw.choice(['loss', 'gain', 'accuracy']): draw.random()} # the same layout with different keys
    if kind==7: row = {}
    if kind==8: row |= {'names': ['a', 'b'], 'empty': '', 'train': False}
    if kind==9: row |= {'only_null': None}
    if kind==10: row |= {'ttype': 'input'}
    return row


def by_file(path, data):
    "Return the table of a file, read with msgspec where possible."
    path = path.with_name('a log')
    path.write_bytes(data)
    return table_of_lines(lambda: line_blocks(path), (path, len(data)))


@pytest.fixture
def eager(monkeypatch):
    "Read files in many blocks. Return a list that gets the data of blocks which were parsed row by row."
    pytest.importorskip('msgspec')
    by_dicts,plain = [],quick.parse
    monkeypatch.setattr(quick, 'parse', lambda data: by_dicts.append(data) or plain(data))
    monkeypatch.setattr(by_lines.line_blocks, '__defaults__', (b'', None, 1000))
    return by_dicts


def some_lines(seed, odd=True):
    draw,lines = random.Random(seed),[]
    for i in range(lines_read//6):
        line = record.line_of(some_row(draw, i))
        if seed%2 and draw.random()<.3: line = json.dumps(json.loads(line)).encode()
        if odd and draw.random()<.02: line = line[:draw.randint(0, len(line)-1)]
        if odd and draw.random()<.01: line = draw.choice([b'', b'junk', b'\xff\xfe', b'"', b'{"a": "\t"}', b'{"a": 1}}', line+line, b'{"mean": 1_0}', b'\x1f'])
        lines.append(line)
    return lines


@pytest.mark.parametrize('odd', [False, True])
@pytest.mark.parametrize('seed', range(6))
def test_table_is_what_frame_says(seed, odd, tmp_path, eager):
    "Content, dtypes and column order are equal to the plain way, with torn lines, two writing styles, and any blocks."
    lines = some_lines(seed, odd)
    data = b'\n'.join(lines)+b'\n'
    want,torn = parse(data)
    got,t = by_file(tmp_path/'log', data)
    pd.testing.assert_frame_equal(got, frame(want), check_exact=True)
    assert t==torn
    for size in (1, 7):
        blocks = [b'\n'.join(lines[i:i+size])+b'\n' for i in range(0, 60, size)]
        pd.testing.assert_frame_equal(table_of_lines(lambda: iter(blocks))[0], frame(parse(b''.join(blocks))[0]), check_exact=True) # noqa: B023


@pytest.mark.parametrize('value', [1., math.nan, math.inf, -math.inf])
def test_trouble_always_has_its_columns(value, tmp_path):
    "The columns nan, posinf and neginf exist in each table of an ember, with integers."
    with torchEmber(torch.nn.Identity(), home=tmp_path, name='a') as te:
        te.model(torch.tensor([0., value]))
        tables = [te.t.df, te.t.latest_df]
    t = emberTracker('a', tmp_path)
    want = [int(math.isnan(value)), int(value==math.inf), int(value==-math.inf)]
    for df in (*tables, t.df, t.latest_df):
        assert df[['nan', 'posinf', 'neginf']].to_numpy().tolist()==[want]*2 and set(map(str, df.dtypes[['nan', 'posinf', 'neginf']]))=={'int64'}
    # the file contains these columns only if they are not 0
    assert [[r[k] for k in ('nan', 'posinf', 'neginf') if k in r] for r in t.lines()]==[[n for n in want if n]]*2


def test_the_quick_way_is_taken(tmp_path, monkeypatch, eager):
    "Rows of an ember are never parsed one by one, even with lists, NaN, marks, empty strings or bools."
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    with torchEmber(model, home=tmp_path, name='a', stats='full') as te:
        te.how_record_out(lambda t: {'mean': t.mean(), 'rows': [r.sum() for r in t], 'any': bool((t>0).any()), 'why': ''})
        for step in range(12):
            if step==3: te.mark(epoch=1, phase='warm-up', fine=True)
            model(torch.full((2, 2), math.nan if step==5 else float(step))).sum().backward()
            te.log(loss=math.nan if step==5 else step)
    data = te.t.log_path.read_bytes()
    want = frame(parse(data)[0])
    pd.testing.assert_frame_equal(by_file(tmp_path/'log', data*20)[0], pd.concat([want]*20, ignore_index=True), check_exact=True)
    assert sum(map(len, eager))<=2*len(data) # at most a small part was parsed row by row, to learn the layouts
    eager.clear()
    pd.testing.assert_frame_equal(by_file(tmp_path/'log', data*20+b'{"mean": 0.1, "st')[0], pd.concat([want]*20, ignore_index=True), check_exact=True)
    assert sum(map(len, eager))<=2*len(data)


columns = [[1, 2.5, None], [1, 'a'], [True, False], [True, None], [True, 1], [None, None], ['a', None], [[1], None], [[], [1]], [2**63, 1], [2**64, .5],
    [1e308, 1e-320], ['', ' '], ['1', '2'], ['null', 'nan', 'True'], ['True', 'False'], [1, {}], [-1, 2**62], ['2020-01-01', '2020-01-02']]


def kinds(column): # pandas 2 gives None or NaN for a missing text
    return [float if v is None and pd.__version__<'3' else type(v) for v in column]


@pytest.mark.parametrize('column', columns, ids=str)
@pytest.mark.parametrize('gap', [False, True])
def test_columns_of_every_kind(column, gap, tmp_path, eager):
    rows = [{'a': v, 'b': 1} for v in column] + [{'b': 2}]*gap
    data = b''.join(json.dumps(r, separators=(',', ':')).encode()+b'\n' for r in rows)
    got,want = by_file(tmp_path/'log', data)[0],frame(parse(data)[0])
    pd.testing.assert_frame_equal(got, want, check_exact=True)
    assert kinds(got.a)==kinds(want.a)
    alone = b''.join(json.dumps({'a': v}).encode()+b'\n' for v in column)
    pd.testing.assert_frame_equal(by_file(tmp_path/'log', alone)[0], frame(parse(alone)[0]), check_exact=True)


def test_rows_of_nothing(tmp_path, eager):
    assert len(by_file(tmp_path/'log', b'{}\n{}\n')[0])==2 and by_file(tmp_path/'log', b'')[0].empty


def test_numbers_are_rounded_as_python_does(tmp_path, eager):
    "Numbers are read exactly to the last bit, also with 17 digits and in difficult cases."
    draw = random.Random(0)
    numbers = [draw.uniform(-1, 1)*10.**draw.randint(-300, 300) for _ in range(5000)]
    numbers += [float(np.float32(x)) for x in numbers if abs(x)<1e38][:1000] + [2.2250738585072011e-308, 9007199254740993., 5e-324, 1.7976931348623157e308]
    data = b''.join(b'{"a":%s}\n' % repr(x).encode() for x in numbers)
    assert by_file(tmp_path/'log', data)[0].a.tolist()==numbers
    assert len(eager)==1
