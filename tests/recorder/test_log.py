"te.log adds a number to the step of the last pass, with the marks (such as the epoch) of the time of the call."
from tensor_rows import df, lines
import pytest
import torch
from looped import batches, by_hand, heard, loss_of, momentum, outputs, seeded, steps, table

from torchember import torchEmber


def scalars(te): return [r for r in lines(te) if r['ttype']=='scalar']


def test_log_joins_the_step_that_closed():
    model = seeded()
    opt,losses = momentum(model),[]
    with torchEmber(model, optimizer=opt) as te:
        for x,y in batches():
            loss = loss_of(model, x, y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
            te.log(loss=loss, lr=opt.param_groups[0]['lr'])
    rows = scalars(te)
    assert [r['step'] for r in rows]==[0, 1, 2, 3] and {r['module'] for r in rows}=={'model(Net)'}
    assert [r['loss'] for r in rows]==pytest.approx(losses, rel=1e-6) and [r['lr'] for r in rows]==[.1]*4
    assert {'loss', 'lr'}<=set(df(te).columns)
    assert steps(te)==[0, 1, 2, 3]


def test_log_within_a_step_joins_that_step():
    "Numbers logged between forward and optimizer step, or directly after it, belong to this step. Each call has its own row."
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt) as te:
        for i,(x,y) in enumerate(batches()):
            loss = loss_of(model, x, y)
            te.log(loss=i)
            loss.backward()
            te.log(norm=10*i)
            opt.step()
            te.log(after=100*i)
    assert [(r['step'], r.get('loss'), r.get('norm'), r.get('after')) for r in scalars(te)]==[
        row for i in range(4) for row in ((i, i, None, None), (i, None, 10*i, None), (i, None, None, 100*i))]


def test_calls_of_log_are_counted_in_each_step():
    "The column `call` counts the te.log calls of a step, also calls after its end. It begins at 0 in each step."
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt) as te:
        for x,y in batches(2):
            loss_of(model, x, y).backward()
            te.log(loss=1.)
            opt.step()
            te.log(norm=2.)
            te.log(norm=3.)
    assert [(r['step'], r['call'], r.get('loss'), r.get('norm')) for r in scalars(te)]==[
        (s, *rest) for s in (0, 1) for rest in ((0, 1., None), (1, None, 2.), (2, None, 3.))]


def test_log_joins_the_last_pass_where_passes_are_steps():
    model = seeded()
    with torchEmber(model) as te:
        for i,(x,_) in enumerate(batches()): model(x); te.log(loss=i)
    assert [(r['step'], r['loss']) for r in scalars(te)]==[(i, i) for i in range(4)] and steps(te)==[0, 1, 2, 3]


def test_log_after_te_step_joins_the_step_before():
    model = seeded()
    with torchEmber(model) as te:
        for i,(x,y) in enumerate(batches()):
            loss_of(model, x, y).backward()
            te.step()
            te.log(loss=i)
    assert [(r['step'], r['loss']) for r in scalars(te)]==[(i, i) for i in range(4)] and steps(te)==[0, 1, 2, 3]


def test_log_of_a_validation_joins_the_step_before():
    "Numbers logged during validation and the rows of the validation pass belong to the same step."
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt) as te:
        for xy in batches(3):
            by_hand(model, opt, [xy])
            model.eval()(xy[0])
            te.log(val_loss=2.)
            model.train()
    assert [r['step'] for r in scalars(te)]==[0, 1, 2] and [r['step'] for r in outputs(te, phase='eval')]==[0, 1, 2]


def test_log_is_written_in_steps_that_are_not_selected():
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, every=10) as te:
        for i,xy in enumerate(batches(12)): by_hand(model, opt, [xy]); te.log(loss=i)
    assert [(r['step'], r['loss']) for r in scalars(te)]==[(i, i) for i in range(12)]
    assert sorted({r['step'] for r in table(te, 'weight').values()})==[0, 10]


def test_log_takes_numbers():
    import numpy as np
    model = seeded()
    with heard(), torchEmber(model) as te: # a logged NaN causes a warning
        model(batches()[0][0])
        te.log(a=torch.tensor(1.5), b=torch.tensor([[2.5]], requires_grad=True), c=np.float32(3.5), d=4, e=True, f=float('nan'), g=torch.tensor(5))
        for bad in ('warmup', 'nan'):
            with pytest.raises(TypeError, match='mark'): te.log(phase=bad)
        with pytest.raises((TypeError, ValueError)): te.log(a=torch.ones(2))
    [row] = scalars(te)
    assert [row[k] for k in 'abcdg']==[1.5, 2.5, 3.5, 4, 5] and row['f']!=row['f']
    assert df(te).loc[df(te).ttype=='scalar', 'a'].tolist()==[1.5]


def test_log_keeps_the_marks_of_its_time():
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt) as te:
        for epoch in range(2):
            te.mark(epoch=epoch)
            by_hand(model, opt, batches(1))
            te.log(loss=1.)
    assert [(r['step'], r['epoch']) for r in scalars(te)]==[(0, 0), (1, 1)]


def test_a_mark_that_changes_with_each_step_warns_once():
    "A float that changes in each step should be logged with te.log instead of te.mark."
    model = seeded()
    opt = momentum(model)
    with heard('te.log') as said, torchEmber(model, optimizer=opt) as te:
        for i,xy in enumerate(batches(12)): by_hand(model, opt, [xy]); te.mark(loss=1/(i+1))
    assert len(said)==1


def test_a_mark_may_be_named_part_except_in_a_run_of_several_processes(monkeypatch):
    "Rows of a run with several processes already have columns `part` and `gscale`."
    for k,v in dict(RANK='1', WORLD_SIZE='2').items(): monkeypatch.setenv(k, v)
    model = seeded()
    with torchEmber(model) as te:
        te.mark(epoch=1)
        for k in 'part','gscale':
            with pytest.raises(ValueError, match=f"'{k}' is the name of a column about shards .* Choose another name"): te.mark(**{k: 1})
        by_hand(model, momentum(model), batches(4)[:1])
        te.step()
    assert {(r['rank'], r['part'], r['epoch']) for r in lines(te) if r['ttype']!='finding'}=={(1, 'world:?', 1)} and df(te).columns[-1]=='epoch'


def test_an_epoch_is_marked():
    model = seeded()
    opt = momentum(model)
    with heard() as said, torchEmber(model, optimizer=opt) as te:
        for i,xy in enumerate(batches(12)): te.mark(epoch=i, part='warmup' if i<6 else 'main'); by_hand(model, opt, [xy])
        for xy in batches(8): te.mark(temperature=.5); by_hand(model, opt, [xy])
    assert not said
