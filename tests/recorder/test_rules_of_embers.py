"Each argument of torchEmber has its effect on the recording, and disarming restores the model."
from tensor_rows import df, lines
import copy
import json
import math
import warnings

import pytest
import torch
from looped import heard
from torch import nn

from torchember import emberTracker, torchEmber
from torchember.recorder.process import open_recorders


def net(): return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
def run(model, x=1.): return model(torch.full((1, 2), float(x))).sum()
def paths(te): return sorted({r['module'].rpartition('.')[2] for r in lines(te)})
def of(te, *columns, **where): return [tuple(r.get(c) for c in columns) for r in lines(te) if all(r.get(k)==v for k,v in where.items())]


def test_arguments_reach_the_recorder(tmp_path):
    "Tested arguments: home, name, ttypes, stats, include, exclude, every, and only_training."
    model = net()
    other = torchEmber(net(), home=tmp_path/'other', name='r')
    with torchEmber(model, ttypes=('output', 'weight'), include=['0', '2'], exclude='2', every=2, stats=['max', 'l2'], only_training=True, name='r',
        home=tmp_path/'home') as te:
        for i in range(4):
            run(model, i)
            model.eval(); run(model, 100); model.train()
    assert (te.fname, te.t.dir.parent if te.t.dir.name=='log' else te.t.dir)==('r', tmp_path/'home') and other.t.dir!=te.t.dir
    assert of(te, 'step', 'module', 'ttype', 'tname')==[(s, 'model(Sequential).0(Linear)', *r) for s in (0, 2) for r in
        (('weight', 'weight_0'), ('weight', 'weight_1'), ('output', 'output_0'))]
    assert all({'max', 'l2'}<=r.keys() and 'mean' not in r for r in lines(te)) and lines(other)==[] and te.close()['steps']==4
    other.close()


def test_modules_are_chosen_by_any_of_their_names():
    "A shared module has several paths. include and exclude accept each of them."
    model = nn.Sequential(nn.ModuleDict({'a': nn.Linear(2, 2)}), nn.Linear(2, 2))
    model.register_module('twin', model[0]['a'])
    def chosen(**k):
        te = torchEmber(model, **k)
        got = [st.track.path for st in te.recorder.sources.states if st.watched]
        te.close()
        return got
    assert chosen(include='twin')==['0.a'] and chosen(exclude='twin')==['', '0', '1'] and chosen(include=nn.Linear, exclude='1')==['0.a']
    assert chosen(include=['0.a', '1'], exclude='0.a')==['1'] and chosen()==['', '0', '0.a', '1']


def test_a_run_can_be_resumed_twice():
    "The step numbers continue, and the metadata still says which parameters got a gradient."
    model = net()
    for k in range(3):
        te = torchEmber(model, name='r', resume=k>0)
        assert te.recorder.step==2*k
        for _ in range(2): (run(model)*(k==0)).backward() if k==0 else run(model); te.step()
        te.close()
        model.zero_grad()
    assert sorted({s for s, in of(te, 'step')})==list(range(6))
    known = json.loads(next(te.t.dir.parent.rglob('parameters_r.json')).read_text())['parameters']
    assert [(p['path'], p['name'], p['gradient']) for p in known]==[(p, n, True) for p in '02' for n in ('weight', 'bias')]
    assert torchEmber(model, name='s').recorder.step==0


def test_arming_or_disarming_twice_changes_nothing():
    model = net()
    te = torchEmber(model, ttypes='output')
    states = te.recorder.sources.states
    assert te.arm() is te and te.recorder.sources.states is states
    run(model)
    assert te.disarm() is model and te.disarm() is model
    assert (te.armed, te.recorder.sources.states, te.recorder.sources.sampled, te.recorder.owner)==(False, [], [], None)
    run(model, 9)
    assert te.rearm() is te and te.armed
    run(model)
    assert te.rearm() is te and te.armed and model.disarm() is model and not te.armed
    with te as again: assert again is te and te.armed
    assert not te.armed and te.recorder not in open_recorders
    (s,a),(t,b) = of(te, 'step', 'mean', module='model(Sequential)')
    assert (s, t)==(0, 1) and a==b
    assert [te.close()['steps'] for _ in range(2)]==[2, 2]


@pytest.mark.parametrize('value,off', [('1', True), ('yes', True), ('0', False), ('', False)])
def test_the_environment_can_disable_recording(value, off, monkeypatch):
    monkeypatch.setenv('TORCHEMBER_DISABLE', value)
    model = net()
    with torchEmber(model) as te:
        run(model)
        te.log(loss=1.)
    assert (len(lines(te))==0)==off and te.recorder.tally.steps==(not off)


def test_arming_a_part_disarms_the_ember_of_the_whole_model():
    "A warning names the run that was disarmed. If that run is already closed, there is no warning."
    model = net()
    def said(m):
        with heard('already recorded') as got: te = torchEmber(m)
        return te, [g.split(' is already recorded as the run ') for g in got]
    a,first = said(model)
    b,second = said(model[0])
    c,third = said(model)
    assert first==[] and [s[0] for s in second]==['A part of the model'] or second[0][0]=='The model'
    assert a.fname in second[0][1] and not a.armed and third[0][0]=='A part of the model' and b.fname in third[0][1] and (b.armed, c.armed)==(False, True)
    c.close()
    assert said(model)[1]==[]


def test_a_statistic_applies_to_the_named_tensor_types():
    "Old and new names of tensor types are accepted, and the decorator returns the function."
    def f(x): return {'own': 1.}
    def changed(use):
        te = torchEmber(net(), stats=['mean'])
        got = use(te)
        assert got is f
        changed = [t for t,how in te.recorder.buffer.stats.items() if how is f]
        te.close()
        return changed
    assert changed(lambda te: te.how_record_in(f))==['input'] and changed(lambda te: te.how_record_out(f))==['output']
    assert changed(lambda te: te.how_record_weight(f))==['weight', 'weight_grad']
    assert changed(lambda te: te.how_record('probe', 'update')(f))==['update', 'probe']
    for word,ttype in {'in': 'input', 'out': 'output', 'weight': 'weight', 'grad': 'weight_grad', 'buffer': 'buffer'}.items():
        assert changed(lambda te, word=word: te.set_metric(word)(f))==[ttype]
    te = torchEmber(net())
    for bad in ((), ('nope',)):
        with pytest.raises(ValueError): te.how_record(*bad)
    with pytest.raises(TypeError): te.how_record(f)
    te.close()


def test_log_accepts_numbers_and_refuses_other_values():
    import numpy as np
    te = torchEmber(model := net())
    run(model)
    te.log(a=1, b=np.float32(2.5), c=torch.tensor([[3.]]), d=True, e=math.nan, f=np.array([4]), module_=np.bool_(False))
    for bad in (dict(x=torch.ones(2)), dict(x='1'), dict(x=None), dict(x=1j), dict(x=torch.tensor(1j)), dict(x=np.complex64(1)), dict(x=np.ones(2))):
        with pytest.raises(TypeError): te.log(**bad)
    for name in ('step', 'module', 'shape', 'call', 'tname'):
        with pytest.raises(ValueError): te.log(**{name: 1.})
    with pytest.raises(TypeError): te.log({'x': 1.})
    te.log()
    te.close()
    [r] = [r for r in lines(te) if r['ttype']=='scalar']
    assert [r[k] for k in 'abcdf']==[1, 2.5, 3., True, 4] and math.isnan(r['e']) and (r['step'], r['call'], r['module_'])==(0, 0, False)


def test_variable_and_probe_return_their_tensor():
    te,x = torchEmber(model := net()),torch.ones(2)
    assert te.watch_tensor('v', x) is x and te.probe('p', x) is x and te.recorder.sources.followed.tensors=={'v': x}
    assert te.watch_tensor('nobody', None) is None and te.watch_tensor('v', None) is None and te.recorder.sources.followed.tensors=={}
    for f in (te.watch_tensor, te.probe):
        with pytest.raises(TypeError): f('x', 1.)
    te.disarm()
    assert te.probe('p', x) is x and of(te, 'ttype')==[('probe',)]
    for bad in ('mean', 'shape'):
        with pytest.raises(ValueError): te.mark(**{bad: 1})
    te.mark(epoch=1, fold=2)
    te.unmark('fold')
    te.arm()
    run(model)
    te.close()
    assert {(r.get('epoch'), r.get('fold')) for r in lines(te) if r['ttype']!='probe'}=={(1, None)}


def test_a_mark_set_within_a_step_applies_to_later_rows_only():
    "A mark is set between two calls of a pass. Earlier rows stay without the mark, and later calls have it."
    model = net()
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, opt, ttypes='output') as te:
        for s in (0, 1):
            for mark in (lambda s: te.mark(fold=s), lambda s: te.t.mark(fold=s)):
                x = model[1](model[0](torch.ones(1, 2)))
                mark(s)
                model[2](x).sum().backward()
                (te.unmark if s else te.t.unmark)('fold')
            opt.step()
    assert of(te, 'step', 'module', 'fold', 'supersedes')==[(s, f'model(Sequential).{m}', fold, None) for s in (0, 1) for _ in range(2)
        for m,fold in (('0(Linear)', None), ('1(ReLU)', None), ('2(Linear)', s))]


def test_micro_batches_with_different_marks_are_not_merged():
    "A mark is added, changed or removed between two micro-batches. Setting the same value again has no effect."
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    opt = torch.optim.SGD(model.parameters(), 0.)
    between = [lambda te: te.mark(a=1), lambda te: te.mark(a=1), lambda te: te.mark(a=2), lambda te: te.unmark('a')]
    with torchEmber(model, opt, ttypes='output') as te:
        for do in between:
            model(torch.ones(1, 1)).sum().backward()
            do(te)
            model(torch.full((1, 1), 3.)).sum().backward()
            te.t.barrier()
            opt.step()
    assert of(te, 'step', 'mean', 'numel', 'a')==[(0, 1, None, None), (0, 3, None, 1), (1, 2, 2, 1), (2, 1, None, 1), (2, 3, None, 2),
        (3, 1, None, 2), (3, 3, None, None)]


def test_a_copy_of_an_ember_reads_and_records_nothing():
    model = net()
    model.ember = te = torchEmber(model, name='r')
    run(model)
    c = copy.deepcopy(model)
    n = len(lines(te))
    run(c)
    assert not c.ember.armed and c.ember.fname=='r' and c.ember.model_name=='Sequential' and len(c.ember.t.lines())==n==len(lines(te))
    c.ember.disarm(); c.ember.close()
    assert te.armed and 'reads the run r' in repr(c.ember)
    with pytest.raises(AttributeError, match="'log' is not available"): getattr(c.ember, 'log') # noqa: B009
    with pytest.raises(AttributeError) as e: getattr(c.ember, 'nothing') # noqa: B009
    assert str(e.value)=='nothing'
    model.ember = None
    te.close()


def test_the_report_counts_steps_errors_and_unreadable_tensors():
    "Every second step is recorded. A second close() returns the same report."
    model = net()
    te = torchEmber(model, every=2, ttypes=('input', 'output'), name='r')
    def broken(x): raise ValueError
    te.how_record('input')(broken)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for _ in range(6): run(model); te.step()
        te.probe('x', torch.ones(1, device='meta'))
    report = te.close()
    assert {**report, **dict(run='r', steps=6, recorded=3, errors=12, skipped=1, remarks=[])}==report
    assert report['rows']==len(emberTracker('r').lines())==3*8+1 and report['bytes']==te.t.log_path.stat().st_size
    assert report['share']>0 and report['seconds']>0 and 'live' not in report and 'budget' not in report
    rows = df(te)
    assert rows[rows.ttype!='finding'].step.unique().tolist()==[0, 2, 4]
    # the probe of a meta tensor could not be measured
    assert rows[rows.ttype=='finding'][['rule', 'tname', 'severity']].values.tolist()==[['recording', 'unmeasured', 'info']]
    assert repr(te).startswith('<torchEmber of Sequential: 4 modules, step 6, not armed')
    names = ['model(Sequential)', *(f'model(Sequential).{i}' for i in ('0(Linear)', '1(ReLU)', '2(Linear)'))]
    assert te.mod_tree()['short']==names[0] and [*te.modules]==names


def test_te_step_beside_an_optimizer_warns_once_and_ends_no_step():
    model = net()
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, optimizer=opt)
    with heard('te.step() does nothing') as said:
        te.step()
        for _ in range(2): run(model).backward(); te.step(); opt.step(); te.step()
    assert len(said)==1 and te.recorder.step==2
    te.close()
