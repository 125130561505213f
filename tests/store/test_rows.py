"""Lines that are made from columns are equal, byte for byte, to lines that are made from one dict per row."""
import json, math

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from torchember.ground import record
from torchember.measure.arena import Arena
from torchember.measure.snapshot import columns_of
from torchember.measure.tap import observe
from torchember.ground.record import line_of
from torchember.recorder.step_buffer import tensor_key_in_step
from torchember.recorder.row import FirstNonfinite, one_row, describe_nonfinite
from torchember.recorder.rows import LineMaker, Measured


# ---- the reference: one dict per row

def reference(m):
    "Return the rows of a step, made one after another."
    got = m.snapshot.rows()
    size = {(r['key'][0], r['key'][2].removeprefix('weight_')): r['rms'] for r in got if r['key'][1] in ('weight', 'before')}
    for r in got:
        if r['key'][1]=='update' and (w := size.get((r['key'][0], r['key'][2].removeprefix('update_')))): r['stats']['ratio'] = r['rms']/w
    counts = {e: (int(v[0]), math.prod(s)) for c in columns_of([m.snapshot]) for e,v,s in zip(c.events.tolist(), c.vectors, c.shapes(), strict=True)}
    for r in got:
        n,told = counts[r['event']]
        if n!=told and 'numel' not in r['stats']: r['stats']['numel'] = n
    rows = [(r['event'], r['key'], r['call'], None, r['dtype'], r['stats']) for r in got if r['key'][1]!='before']
    rows = sorted(rows+m.custom, key=lambda r: r[0])
    return [one_row(*r[1:], m.step, m.ts, {**m.parts.get(tensor_key_in_step(r[1], r[2]), {}), **m.marks}, m.many_passes) for r in rows]

def text(rows): return [r if isinstance(r, bytes) else line_of(r) for r in rows]

def same(measured, lines=None):
    "Check that the lines of steps are equal to the reference, written together or one step at a time. Return them."
    want = [text(reference(m)) for m in measured]
    lines = lines or LineMaker()
    assert [text(rows) for rows in lines(measured)]==want
    assert [text(rows) for m in measured for rows in LineMaker()([m])]==want
    for rows in want:
        for line in rows: json.loads(line)
    return want


# ---- random steps of all kinds

usual = st.sampled_from([.5, -2., 3e-5, 1e16, 7.])
numbers = st.one_of(st.floats(width=32), st.sampled_from([0., 1., -1., 1e-30, 1e30, 1e-5, 1e16, math.nan, math.inf, -math.inf, 65504.]))
shapes = st.lists(st.integers(0, 3), max_size=4) | st.lists(st.integers(2, 4), min_size=1, max_size=2)
kinds = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool])
stats = st.sampled_from(['basic', 'full', 'numerics', ['shape'], ['numel', 'mean'], ['mean', 'shape', 'exponents(-3, 4)'], ['rms'],
    ['exponents', 'exponents(0, 2)', 'rms']])
names = st.sampled_from(['model(Net).fc(Linear)', *(f'model(Net).{i}(Linear)' for i in range(10)), 'model(Net).null(Linear)',
    'model(Net).größe "q"\\(Linear)', 'model(Net).\u2028(L)', 'model(\0)'])
values = st.one_of(st.integers(-2**63, 2**64-1), st.floats(), st.text(max_size=4), st.sampled_from(['null', '\u2028', '\0', True, None, [1, None]]))
words = st.sampled_from(['epoch', 'phase', 'mean', 'lr', 'größe', 'placement', 'ratio', 'rank', 'skipped'])
marks = st.sampled_from([{}, {'epoch': 1}, {'epoch': 2, 'lr': .5}]) | st.dictionaries(words, values, max_size=3)

@st.composite
def tensors(draw):
    shape,kind = draw(shapes),draw(kinds)
    n = math.prod(shape)
    x = torch.tensor(draw(st.lists(draw(st.sampled_from([usual, usual, numbers])), min_size=n, max_size=n)), dtype=torch.float64).reshape(shape)
    return torch.nan_to_num(x, 0, 9, -9).to(kind) if not kind.is_floating_point else x.to(kind)

@st.composite
def taps(draw, arena):
    "Draw some taps (recorders of a tensor), including a weight with its update."
    some = [arena.tap((draw(names), draw(st.sampled_from(['input', 'output', 'output_grad', 'probe'])), draw(st.sampled_from(['x', 'output_0'])), None,
        draw(st.sampled_from([None, 'eval'])), draw(st.integers(0, 1))), draw(stats)) for _ in range(draw(st.integers(0, 3)))]
    for ttype in draw(st.lists(st.sampled_from(['weight', 'before', 'update', 'weight_grad']), max_size=4, unique=True)):
        tname = {'weight': 'weight_0', 'before': 'update_0', 'update': 'update_0', 'weight_grad': 'grad_0'}[ttype]
        some.append(arena.tap(('model(Net).fc(Linear)', ttype, tname, 'weight', None, 0), ('rms',) if ttype=='before' else draw(stats), once=True))
    return some

@st.composite
def steps(draw):
    "Draw steps with several passes, scaled tensors, rows of functions, and rows that were taken in the middle of a step."
    arena = Arena(draw(st.integers(1, 4)))
    places,out = draw(taps(arena)),[]
    parts = {tensor_key_in_step(t.key, call): {'placement': 'S(0)', 'global_shape': [4]} for t in places for call in range(2) if draw(st.integers(0, 5))==0}
    said = draw(marks)
    for step in range(draw(st.integers(1, 4))):
        taken,own = [],[]
        if draw(st.integers(0, 3))==0: said = draw(marks)
        for micro in range(draw(st.integers(1, 2))):
            arena.begin(micro)
            for _ in range(draw(st.integers(0, 4)) if places else 0):
                tap = draw(st.sampled_from(places))
                if tap.once: arena.forget(tap)
                observe(draw(tensors()), tap, None if not tap.once else 0, draw(st.sampled_from([None, None, 1024., 1000.])))
            for key,of,dtype,stats in ((('model(Net)', 'output', 'y', None, None, 0), micro, 'float32', {'num': .5, 'mean': 3}),
                    (('model', 'scalar', 'log', None, None, 0), None, 'float64', {'loss': draw(numbers)})):
                if draw(st.integers(0, 4))==0: own.append((next(arena.clock), key, 0, of, dtype, stats))
            if micro==0 and draw(st.integers(0, 3))==0: # the rows are read in the middle of the step
                early,owned,own = arena.take(list(taken)),own,[]
                if len(early): taken.append(early)
                out.append(Measured(early, owned, step, '2020-02-15 13:44:48', record.load_row(line_of(said)), {None: True}, parts))
        out.append(Measured(arena.take(taken), own, step, '2020-02-15 13:44:48', record.load_row(line_of(said)), {None: True}, parts))
    return out

some = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))

@some
@given(steps())
def test_the_same_bytes(measured): same(measured)

@settings(some, max_examples=100)
@given(steps())
def test_the_same_bytes_without_orjson(measured):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, 'orjson', None)
        same(measured)

@settings(some, max_examples=100)
@given(st.lists(steps(), min_size=2, max_size=2))
def test_other_taps_and_marks(runs):
    "One `LineMaker` is used for two runs with different taps and marks."
    lines = LineMaker()
    for measured in runs: same(measured, lines)

@settings(some, max_examples=200)
@given(steps())
def test_the_first_bad_row_is_found(measured):
    "Rows written as columns contain no value that must be reported, so the first bad row is found in the other rows."
    for m,rows in zip(measured, LineMaker()(measured), strict=True):
        want = next((b for r in reference(m) if (b := describe_nonfinite(r))), None)
        listener = FirstNonfinite(type('File', (), {'note': lambda self, what: None})())
        listener.add(rows)
        assert listener.found==want
