"Reading pickles that contain more than a table, and files of the library Track & Visualize."
import io
import os
import pickle
import struct

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from torchember import SchemaException, read_csv, read_parquet, read_pickle, to_logframe, write_parquet
from torchember.frames.files import arrow_texts, read_parts

row = dict(mean=.5, exponents=[0, 2, 1, 0], exponent_min=0, module='model(Net).fc1(Linear)', ttype='output', tname='output_0', dtype='float32')
lf = to_logframe(pd.DataFrame([{**row, 'step': s} for s in range(3)]))


def code(*parts): return b'\x80\x02'+b''.join(parts)+b'.'
def named(module, name): return f'c{module}\n{name}\n'.encode()
def text(s): return b'X'+struct.pack('<I', len(s))+s.encode()


ran = '/tmp/torchember-was-here'
system = named('posix', 'system')+text(f'touch {ran}')+b'\x85R' # pickled call of os.system(...)
crafted = {
    'a call': code(system),
    'a call, in a list': code(b']', system, b'a'),
    'the oldest way to call': f"(S'touch {ran}'\niposix\nsystem\n.".encode(),
    'a name with dots': b'\x80\x04\x8c\x06pandas\x8c\x0eDataFrame.eval\x93.',
    'a module of its own': b'\x80\x04\x8c\x0fpandas.io.pickl\x8c\x0bread_pickle\x93.',
    'what numpy loads': code(named('numpy', 'load'), text('x'), b'\x85R'),
    'a method of builtins': code(named('builtins', 'getattr')),
    'writing on a class of ours': code(named('pandas', 'DataFrame'), b'N}', text('__new__'), b'K\x01s\x86b'),
    'a call of what was let through': code(named('pandas', 'DataFrame'), b']', b'\x85R', b']', b'\x85R'),
    'from a registry': b'\x80\x02\x82\x07.',
    'a persistent id': b'\x80\x02X\x01\x00\x00\x00aQ.',
    'nothing': b'',
    'no end': pickle.dumps(lf)[:-200],
    'no pickle': b'metadata,metadata\nname,step\n',
    'another thing': pickle.dumps({'a': 1}),
    'a class': code(named('pandas', 'DataFrame')),
    'an empty frame without anything': code(named('pandas', 'DataFrame'), b')\x81'),
    'a frame of state that is none': code(named('pandas', 'DataFrame'), b')\x81', text('no'), b'b'),
}


@pytest.mark.parametrize('what', crafted)
def test_nothing_runs(what, tmp_path):
    before = dict(vars(pd.DataFrame))
    path = tmp_path/'run.pkl'
    path.write_bytes(crafted[what])
    with pytest.raises((pickle.UnpicklingError, SchemaException), match='run.pkl'): read_pickle(path)
    assert not os.path.exists(ran)
    assert dict(vars(pd.DataFrame))==before
    read_pickle(written(tmp_path)) # a good file can still be read afterwards


def written(folder):
    lf.to_pickle(folder/'good.pkl')
    return folder/'good.pkl'


def test_arrays_are_not_believed(tmp_path):
    "A wrong dtype in a pickle could make numpy access memory outside of an array. Such a file is rejected."
    honest = pickle.dumps(lf, protocol=2)
    i8 = b"X\x02\x00\x00\x00i8"
    assert i8 in honest
    for lie in (b'O8', b'V8', b'M8', b'i4', b'f9'):
        (tmp_path/'run.pkl').write_bytes(honest.replace(i8, i8[:-2]+lie))
        with pytest.raises((pickle.UnpicklingError, SchemaException), match='run.pkl|LogFrame'): read_pickle(tmp_path/'run.pkl')


@pytest.mark.parametrize('storage', ['python', 'pyarrow'])
def test_texts_as_pandas_keeps_them(storage, tmp_path):
    name = pd.array(['', 'a', 'ü', None, 'a'*300], dtype=pd.StringDtype(storage))
    df = pd.DataFrame({('metadata', 'name'): ['', 'a', 'ü', 'x', 'b'], ('metadata', 'type'): name, ('metadata', 'tensor_type'): pd.Categorical(list('AABBA')),
        ('metadata', 'step'): pd.array([1, 2, 3, 4, 5], dtype='Int64'), ('metadata', 'dtype'): 'float32', ('scalar_stats', 'mean'): np.float32(.5),
        ('exponent_counts', -np.inf): 0, ('exponent_counts', 3): np.int32(7), ('exponent_counts', np.inf): 0})
    for i,some in enumerate((df, df.iloc[1:], df.iloc[::2], df.iloc[:0], df.set_index(pd.Index([5, 4, 3, 2, 1])), df.set_index(pd.Index(list('abcde'))))):
        some.to_pickle(tmp_path/f'{i}.pkl')
        read = read_pickle(tmp_path/f'{i}.pkl', shifted=False)
        assert read.index.tolist()==some.index.tolist()
        for c in some: assert [None if pd.isna(v) else v for v in read[c]]==[None if pd.isna(v) else v for v in some[c]], c


def test_texts_of_an_array_that_was_cut_before_it_was_pickled():
    "A sliced Arrow array has leading bytes, missing or empty texts, and non-ASCII letters."
    whole = pa.chunked_array([pa.array(['', 'a', 'ü', None, 'b', 'c'], pa.large_string()), pa.array(['d', None], pa.large_string())])
    for some in (whole, whole.slice(1), whole.slice(2, 3), whole.slice(3), whole.slice(7)):
        assert arrow_texts(read_parts(io.BytesIO(pickle.dumps(some)), 'x'))==some.to_pylist()


def test_all_files_hold_the_same(tmp_path):
    lf.to_pickle(tmp_path/'x.pkl'); lf.to_csv(tmp_path/'x.csv'); write_parquet(lf, tmp_path/'x.parquet')
    with pytest.warns(UserWarning): lf.to_parquet(tmp_path/'two.parquet')
    for read in (read_pickle(tmp_path/'x.pkl'), read_csv(tmp_path/'x.csv'), read_parquet(tmp_path/'x.parquet'), read_parquet(tmp_path/'two.parquet')):
        pd.testing.assert_frame_equal(read, lf, check_dtype=False, check_column_type=False)


def test_broken_files():
    "For random changes of its bytes, a file gives a table or one of two exceptions."
    import io
    import random
    data,found = pickle.dumps(lf),set()
    for i in range(400):
        b,rng = bytearray(data),random.Random(i)
        for _ in range(rng.choice((1, 2, 10))): b[rng.randrange(len(b))] = rng.randrange(256)
        try: found.add(type(read_pickle(io.BytesIO(bytes(b)))))
        except (pickle.UnpicklingError, SchemaException) as e: found.add(type(e))
    assert found>={pickle.UnpicklingError, pd.DataFrame}


def test_reading_needs_no_torch(tmp_path):
    import subprocess
    import sys
    lf.to_pickle(tmp_path/'x.pkl')
    code = f"from torchember import TrainingStats, from_logframe, read_pickle; print(len(from_logframe(read_pickle({str(tmp_path/'x.pkl')!r}))))"
    got = subprocess.run([sys.executable, '-c', f"import sys; sys.modules['torch'] = None; {code}"], capture_output=True, text=True)
    assert got.stdout=='3\n', got.stderr
    got = subprocess.run([sys.executable, '-c', "import sys; sys.modules['torch'] = None; from torchember import track"], capture_output=True, text=True)
    assert 'torchember.track needs torch' in got.stderr


@pytest.mark.parametrize('names', [['0', '1'], ['', '0'], ['0', '0.bias'], ['007', '1e5'], ['1.5', '']])
@pytest.mark.parametrize('index', [True, False])
def test_names_stay_names_in_csv(tmp_path, names, index):
    "Modules may have names that look like numbers, as in nn.Sequential."
    rows = [dict(module='model(Net)', path=n, ttype='output', tname='output_0', step=0, dtype='float32', mean=1.) for n in names]
    lf = to_logframe(pd.DataFrame(rows))
    lf.to_csv(tmp_path/'x.csv', index=index)
    assert read_csv(tmp_path/'x.csv')['metadata', 'name'].tolist()==names


def nested(levels, width=10):
    "Return a pickle of nested lists, each of which contains the same inner list several times."
    return code(b']q\x00', *(b'](' + (b'h'+bytes([i]))*width + b'eq'+bytes([i+1]) for i in range(levels)))


bombs = {
    'a place far away': code(b'N', b'r'+struct.pack('<I', 1<<28)),
    'a place far away, as a text': b'Np268435456\n.',
    'a text of a terabyte': b'\x80\x04\x8d'+struct.pack('<Q', 1<<40)+b'abc.',
    'bytes of four gigabytes': b'\x80\x04B'+struct.pack('<I', (1<<32)-1)+b'abc.',
    'an array of a terabyte': b'\x80\x05\x96'+struct.pack('<Q', 1<<40)+b'abc.',
    'a frame of a terabyte': b'\x80\x04\x95'+struct.pack('<Q', 1<<40)+b'N.',
    'lists of the same list': nested(30),
    'a list in itself': code(b']q\x00h\x00a'),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize('what', bombs)
def test_a_few_bytes_do_not_ask_for_gigabytes(what, tmp_path):
    import tracemalloc
    (tmp_path/'run.pkl').write_bytes(bombs[what])
    tracemalloc.start()
    try:
        with pytest.raises((pickle.UnpicklingError, SchemaException), match='run.pkl'): read_pickle(tmp_path/'run.pkl')
        assert tracemalloc.get_traced_memory()[1]<50_000_000
    finally: tracemalloc.stop()


@pytest.mark.timeout(60)
def test_attributes_that_unfold(tmp_path):
    "The attributes of a pickled table contain nested lists that would expand to a huge size."
    deep = [1]
    for _ in range(30): deep = [deep]*10
    bad = lf.copy()
    bad.attrs['deep'] = deep
    path = tmp_path/'run.pkl'
    path.write_bytes(pickle.dumps(bad, protocol=4))
    assert path.stat().st_size<20_000
    with pytest.raises(pickle.UnpicklingError, match='which no real table does'): read_pickle(path)


def test_texts_that_overlap():
    "The end offsets of texts must increase. Otherwise a small file could expand to a huge number of texts."
    def part(what, *args):
        from torchember.frames.files import PicklePart
        return type(what, (PicklePart,), {'what': what})(*args)
    def texts(ends, n):
        buffers = None, np.array(ends, np.int32).tobytes(), b'x'*1000
        return part('_restore_array', (part('type_for_alias', 'string'), n, 0, 0, buffers, [], None))
    assert arrow_texts(texts([0, 3, 5], 2))==['xxx', 'xx']
    for ends,n in (([0, 1000, 0, 1000], 3), ([0, 1], 10**12), ([5, 3, 1], 2)):
        with pytest.raises(Exception, match='wrong offsets'): arrow_texts(texts(ends, n))


def test_exponents_that_there_are_not(tmp_path):
    "A column label of 2^40 would need an array with all exponents up to it, so it is rejected."
    bad = lf.copy()
    bad.columns = pd.MultiIndex.from_tuples([(top, 2**40 if c==0 and top=='exponent_counts' else c) for top,c in lf.columns])
    bad.to_pickle(tmp_path/'run.pkl')
    with pytest.raises(SchemaException): read_pickle(tmp_path/'run.pkl')
    assert not to_logframe(pd.DataFrame([{**row, 'step': 0}, {**row, 'step': 1, 'exponent_min': 2**40}]))['exponent_counts'].to_numpy()[1].any()
