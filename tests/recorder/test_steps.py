"Loops that people write: which step a row belongs to, and of which tensor it is"
import copy
import gc
import io
import math
import os
import random
import re
import sys
import threading
import time
import warnings

import pytest
import torch
from compared import needs_hooks
from looped import (ALL, Net, batches, by_hand, closure_of, ears, grads, heard, left, loss_of, momentum, said_of_parameters, same, says, seeded, steps, table,
    training, weights)
from torch import nn

import torchember
from torchember import torchEmber


def plain(data=None, accumulate=1, ttypes=ALL, make=momentum, **options):
    "The rows of the plain loop"
    model = seeded()
    opt = make(model)
    with torchEmber(model, optimizer=opt, ttypes=ttypes, **options) as te: by_hand(model, opt, batches() if data is None else data, accumulate)
    return table(te)


def outputs(te, **where): return [r for r in table(te, 'output', **where).values() if r['module'].count('.')==0]


# ---- the optimizer's step is the boundary

@pytest.mark.parametrize('accumulate', [1, 2])
def test_the_plain_loop(accumulate):
    "What other loops are compared with is itself right"
    model = seeded()
    opt,seen,before,after = momentum(model),[],[],[]
    opt.register_step_pre_hook(lambda *a: (seen.append(grads(model)), before.append(weights(model)))[:0] or None)
    opt.register_step_post_hook(lambda *a: after.append(weights(model)))
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te: by_hand(model, opt, batches(), accumulate)
    said_of_parameters(te, 'weight_grad', seen)
    said_of_parameters(te, 'weight', before)
    said_of_parameters(te, 'update', [{n: b[n]-a[n] for n in a} for a,b in zip(before, after, strict=True)])
    assert len(seen)==4//accumulate


@pytest.mark.parametrize('accumulate', [1, 2])
def test_closure(accumulate):
    "`step(closure)`: forward and backward run inside of the step, and are of this step"
    model = seeded()
    opt,seen = momentum(model),[]
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        data = batches()
        while data:
            opt.zero_grad()
            for x,y in data[:accumulate-1]: loss_of(model, x, y, accumulate).backward()
            opt.step(closure_of(model, opt, *data[accumulate-1], accumulate, seen))
            del data[:accumulate]
    same(table(te), plain(accumulate=accumulate))
    said_of_parameters(te, 'weight_grad', seen)


def test_closure_as_keyword():
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        for x,y in batches(): opt.step(closure=closure_of(model, opt, x, y))
    same(table(te), plain())


def test_closure_and_plain_steps_in_turn():
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        for i,(x,y) in enumerate(batches(6)):
            if i%2: opt.step(closure_of(model, opt, x, y))
            else:
                opt.zero_grad()
                loss_of(model, x, y).backward()
                opt.step()
    same(table(te), plain(batches(6)))


def test_no_closure_said_in_so_many_words():
    "`step(None)`, as wrappers call it"
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        for i,(x,y) in enumerate(batches()):
            opt.zero_grad()
            loss_of(model, x, y).backward()
            opt.step(None) if i%2 else opt.step(closure=None)
    same(table(te), plain())


def test_closure_on_a_schedule():
    "Every second step: the closure of the others is not looked at"
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL, every=2) as te:
        for x,y in batches(5): opt.step(closure_of(model, opt, x, y))
    assert steps(te)==[0, 2, 4]
    same(table(te), plain(batches(5), every=2))


def test_gradients_that_the_step_takes_away():
    "A step that calls its closure, then clears the gradients: recorded are those that the closure left"
    class Clears(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            self.zero_grad()
            return loss
    model = seeded()
    opt,seen = Clears(model.parameters(), .1),[]
    with torchEmber(model, optimizer=opt) as te:
        for x,y in batches(): opt.step(closure_of(model, opt, x, y, seen=seen))
    said_of_parameters(te, 'weight_grad', seen)


def test_what_the_closure_returns():
    "The loss comes back, the same object; a closure is called as often as without us"
    model,calls = seeded(),[]
    opt,losses = momentum(model),[torch.tensor(1.5), 2.5, None]
    with torchEmber(model, optimizer=opt):
        for loss in losses: assert opt.step(lambda loss=loss: (calls.append(1), loss)[1]) is loss
    assert len(calls)==3


@pytest.mark.parametrize('search', [None, 'strong_wolfe'])
def test_lbfgs(search):
    "Several passes in one step: the weights are those before it, the gradients those of the last call"
    model,seen,before,after = seeded(),[],[],[]
    opt = torch.optim.LBFGS(model.parameters(), .5, max_iter=4, line_search_fn=search)
    with torchEmber(model, optimizer=opt, ttypes=('output', 'weight', 'weight_grad', 'update')) as te:
        for x,y in batches(3):
            before.append(weights(model))
            calls = []
            opt.step(closure_of(model, opt, x, y, seen=calls))
            seen.append(calls[-1])
            after.append(weights(model))
            assert len(calls)>2
    assert steps(te)==[0, 1, 2]
    said_of_parameters(te, 'weight', before)
    said_of_parameters(te, 'weight_grad', seen)
    said_of_parameters(te, 'update', [{n: b[n]-a[n] for n in a} for a,b in zip(before, after, strict=True)])


def test_a_closure_that_raises():
    "The step was not taken; those that follow are counted on from there"
    model = seeded()
    opt,seen = momentum(model),[]
    def broken():
        closure_of(model, opt, *batches()[0])()
        raise KeyboardInterrupt
    with torchEmber(model, optimizer=opt) as te:
        for i,(x,y) in enumerate(batches(5)):
            if i in (1, 3):
                with pytest.raises(KeyboardInterrupt): opt.step(broken)
            opt.step(closure_of(model, opt, x, y, seen=seen))
    assert steps(te)==[0, 1, 2, 3, 4]
    said_of_parameters(te, 'weight_grad', seen)


def test_a_step_that_raises():
    class Fails(torch.optim.SGD):
        fails = False
        def step(self, closure=None):
            if self.fails: raise FloatingPointError
            return super().step(closure)
    model = seeded()
    opt,seen = Fails(model.parameters(), .1),[]
    with torchEmber(model, optimizer=opt) as te:
        for i,(x,y) in enumerate(batches(4)):
            opt.zero_grad()
            loss_of(model, x, y).backward()
            if i==1:
                opt.fails = True
                with pytest.raises(FloatingPointError): opt.step()
                opt.fails = False
            seen.append(grads(model))
            opt.step()
    assert steps(te)==[0, 1, 2, 3]
    said_of_parameters(te, 'weight_grad', seen)


# ---- validation in between

@pytest.mark.parametrize('only_training', [False, True])
def test_validation_in_between(only_training):
    "Training rows are those of a run without validation; eval rows are of the step before it"
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL, only_training=only_training) as te:
        for xy in batches():
            by_hand(model, opt, [xy])
            model.eval()
            with torch.no_grad(): model(torch.full((2, 4), 100.))
            model.train()
    same(training(te), plain())
    inputs = [r for r in table(te, 'input', phase='eval').values() if r['tname']=='x']
    assert [(r['step'], r['mean'], r['max'], r['min']) for r in inputs]==([] if only_training else [(i, 100, 100, 100) for i in range(4)])


def test_validation_passes_merge_with_each_other():
    "Training outputs are always 1, those of three validation batches 100, 200, 300"
    m = nn.Linear(1, 1, bias=False)
    nn.init.ones_(m.weight)
    opt = torch.optim.SGD(m.parameters(), 0.)
    with torchEmber(m, optimizer=opt, ttypes=('output',)) as te:
        for _ in range(2):
            m.train()(torch.ones(2, 1)).sum().backward()
            opt.step()
            m.eval()
            with torch.no_grad(): [m(torch.full((2, 1), v)) for v in (100., 200., 300.)]
    assert [(r['step'], r.get('phase'), r['mean'], r['min'], r['max']) for r in outputs(te, phase=None)]==[(0, None, 1, 1, 1), (1, None, 1, 1, 1)]
    assert [(r['step'], r.get('phase'), r['mean'], r['min'], r['max']) for r in outputs(te, phase='eval')]==[(s, 'eval', 200, 100, 300) for s in (0, 1)]


def test_validation_between_micro_batches():
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        for i,(x,y) in enumerate(batches()):
            model.eval()
            with torch.no_grad(): model(torch.full((2, 4), 100.))
            model.train()
            loss_of(model, x, y, 2).backward()
            if i%2: opt.step(); opt.zero_grad()
    same(training(te), plain(accumulate=2))
    assert {(r['step'], r['mean']) for r in table(te, 'input', tname='x', phase='eval').values()}=={(0, 100), (1, 100)}


def test_validation_where_te_step_closes():
    model = seeded()
    te = torchEmber(model, ttypes=('output', 'weight_grad'))
    for x,y in batches():
        loss_of(model, x, y).backward()
        te.step()
        model.zero_grad()
        model.eval()(x)
        model.train()
    te.close()
    assert [r['step'] for r in outputs(te, phase=None)]==[0, 1, 2, 3] and [r['step'] for r in outputs(te, phase='eval')]==[0, 1, 2, 3]


def test_validation_where_passes_are_steps():
    model = seeded()
    with torchEmber(model, ttypes=('output',)) as te:
        for x,_ in batches(3): model.train()(x); model.eval()(x)
    assert [r['step'] for r in outputs(te)]==[0, 1, 2, 3, 4, 5]


# ---- an optimizer that is not this model's, or no longer

def test_an_optimizer_of_another_model():
    model,other = seeded(),seeded()
    before = left(model, o := momentum(other))
    with pytest.raises(ValueError, match='parameter'): torchEmber(model, optimizer=o)
    assert left(model, o)==before


def test_an_optimizer_of_a_part():
    model = seeded()
    opt = torch.optim.SGD(model.b.parameters(), .1)
    with heard() as said, torchEmber(model, optimizer=opt, ttypes=('weight', 'update')) as te: by_hand(model, opt, batches(20))
    assert not said and steps(te)==list(range(20))


def test_an_optimizer_made_anew():
    "The one that was handed over never steps again, though the weights change: said once"
    model = seeded()
    with heard() as said, torchEmber(model, optimizer=momentum(model)):
        by_hand(model, momentum(model), batches(40))
    assert len(said)==1 and 'optimizer' in said[0]


def test_an_optimizer_made_anew_later():
    model = seeded()
    opt = momentum(model)
    with heard() as said, torchEmber(model, optimizer=opt) as te:
        by_hand(model, opt, batches(3))
        by_hand(model, momentum(model), batches(40))
    assert len(said)==1 and 'optimizer' in said[0]
    assert {0, 1, 2}<=set(steps(te))


@pytest.mark.parametrize('kind', ['64 micro-batches', 'frozen layers', 'learning rate 0', 'validation', 'batch norm', 'every 10'])
def test_nothing_to_say(kind):
    "No warning where all is right"
    def norm(): return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model = seeded(norm if kind=='batch norm' else Net)
    if kind=='frozen layers': model.a.requires_grad_(False)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0. if kind=='learning rate 0' else .1)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with torchEmber(model, optimizer=opt, ttypes=ALL, every=10 if kind=='every 10' else 1) as te:
            if kind=='validation':
                for x,_ in batches(40): model.eval()(x)
                model.train()
            by_hand(model, opt, batches(128 if kind=='64 micro-batches' else 20), 64 if kind=='64 micro-batches' else 1)
    assert steps(te)==([0, 1] if kind=='64 micro-batches' else [0, 10] if kind=='every 10' else list(range(20)))


# ---- arming that fails

class Odd(nn.Module):
    "Nobody may look at its forward"
    @property
    def forward(self): raise RuntimeError('not to be looked at')


class Deaf(torch.optim.SGD):
    "Takes no hooks"
    def register_step_pre_hook(self, hook): raise RuntimeError('takes no hooks')
    def register_step_post_hook(self, hook): raise RuntimeError('takes no hooks')


@pytest.mark.parametrize('kind', ['module', 'optimizer'])
def test_arming_that_fails_leaves_nothing(kind):
    model = nn.Sequential(nn.Linear(4, 4), Odd() if kind=='module' else nn.Tanh(), nn.Linear(4, 2))
    opts = [momentum(model[0]), (Deaf if kind=='optimizer' else torch.optim.SGD)(model[2].parameters(), .1)]
    before = left(model, *opts)
    try: te = torchEmber(model, optimizer=opts, ttypes=ALL)
    except Exception as e: assert 'not to be looked at' in str(e) or 'takes no hooks' in str(e)
    else: te.close() # it could do without
    assert left(model, *opts)==before


def test_arming_again_after_a_failure():
    model = seeded()
    model.odd = Odd()
    with pytest.raises(RuntimeError): torchEmber(model)
    del model.odd
    opt = momentum(model)
    with heard() as said, torchEmber(model, optimizer=opt, ttypes=ALL) as te: by_hand(model, opt, batches())
    assert not said
    same(table(te), plain())


def test_nothing_is_left_behind():
    model = seeded()
    opt = momentum(model)
    by_hand(model, opt, batches(1))
    before = left(model),ears(opt)
    with torchEmber(model, optimizer=opt, ttypes=ALL):
        for x,y in batches(3): opt.step(closure_of(model, opt, x, y))
    assert before==(left(model), ears(opt))


# ---- te.log

def scalars(te): return [r for r in te.t.lines() if r['ttype']=='scalar']


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
    assert {'loss', 'lr'}<=set(te.t.df.columns)
    assert steps(te)==[0, 1, 2, 3]


def test_log_inside_of_a_step():
    "Called between forward and step, it is of the step that is open; one row for each call"
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


def test_calls_count_the_numbers_that_are_logged():
    "Before and after the end of a step they are of that step, one after another, and the next one begins at 0"
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


def test_log_where_passes_are_steps():
    model = seeded()
    with torchEmber(model) as te:
        for i,(x,_) in enumerate(batches()): model(x); te.log(loss=i)
    assert [(r['step'], r['loss']) for r in scalars(te)]==[(i, i) for i in range(4)] and steps(te)==[0, 1, 2, 3]


def test_log_where_te_step_closes():
    model = seeded()
    with torchEmber(model) as te:
        for i,(x,y) in enumerate(batches()):
            loss_of(model, x, y).backward()
            te.step()
            te.log(loss=i)
    assert [(r['step'], r['loss']) for r in scalars(te)]==[(i, i) for i in range(4)] and steps(te)==[0, 1, 2, 3]


def test_log_of_a_validation():
    "It joins the step that was just closed, after which the model was validated, and so do the rows of the pass itself"
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt) as te:
        for xy in batches(3):
            by_hand(model, opt, [xy])
            model.eval()(xy[0])
            te.log(val_loss=2.)
            model.train()
    assert [r['step'] for r in scalars(te)]==[0, 1, 2] and [r['step'] for r in outputs(te, phase='eval')]==[0, 1, 2]


def test_log_off_schedule():
    "The loss of each step is written, also where nothing else is"
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, every=10) as te:
        for i,xy in enumerate(batches(12)): by_hand(model, opt, [xy]); te.log(loss=i)
    assert [(r['step'], r['loss']) for r in scalars(te)]==[(i, i) for i in range(12)]
    assert sorted({r['step'] for r in table(te, 'weight').values()})==[0, 10]


def test_log_takes_numbers():
    import numpy as np
    model = seeded()
    with heard(), torchEmber(model) as te: # a loss that is NaN is worth a word
        model(batches()[0][0])
        te.log(a=torch.tensor(1.5), b=torch.tensor([[2.5]], requires_grad=True), c=np.float32(3.5), d=4, e=True, f=float('nan'), g=torch.tensor(5))
        for bad in ('warmup', 'nan'):
            with pytest.raises(TypeError, match='mark'): te.log(phase=bad)
        with pytest.raises((TypeError, ValueError)): te.log(a=torch.ones(2))
    [row] = scalars(te)
    assert [row[k] for k in 'abcdg']==[1.5, 2.5, 3.5, 4, 5] and row['f']!=row['f']
    assert te.t.df.loc[te.t.df.ttype=='scalar', 'a'].tolist()==[1.5]


def test_log_keeps_the_marks_of_its_time():
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt) as te:
        for epoch in range(2):
            te.mark(epoch=epoch)
            by_hand(model, opt, batches(1))
            te.log(loss=1.)
    assert [(r['step'], r['epoch']) for r in scalars(te)]==[(0, 0), (1, 1)]


def test_a_loss_is_logged_not_marked():
    "A float that changes step after step was meant for te.log: said once"
    model = seeded()
    opt = momentum(model)
    with heard('te.log') as said, torchEmber(model, optimizer=opt) as te:
        for i,xy in enumerate(batches(12)): by_hand(model, opt, [xy]); te.mark(loss=1/(i+1))
    assert len(said)==1


def test_an_epoch_is_marked():
    model = seeded()
    opt = momentum(model)
    with heard() as said, torchEmber(model, optimizer=opt) as te:
        for i,xy in enumerate(batches(12)): te.mark(epoch=i, part='warmup' if i<6 else 'main'); by_hand(model, opt, [xy])
        for xy in batches(8): te.mark(temperature=.5); by_hand(model, opt, [xy])
    assert not said


# ---- several threads

library,draw = os.path.dirname(torchember.__file__),random.Random(0).random


def uneasy(frame, event, arg):
    "A trace function: at every line of the library the thread may give way to another"
    if not frame.f_code.co_filename.startswith(library): return None
    if draw()<.1: time.sleep(0)
    return uneasy


@pytest.mark.parametrize('passes', [1, 3])
def test_four_threads_run_one_model(passes):
    "Rows are complete, and stand under their own names"
    n = 4
    def trial(k):
        model = seeded(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]).eval(), k)
        x,start,failed = torch.ones(3, 4),threading.Barrier(n),[]
        with torch.no_grad(): want = [x, *(x := m(x) for m in model)]
        def run():
            sys.settrace(uneasy) # of this thread
            start.wait()
            try:
                with torch.no_grad():
                    for _ in range(passes): model(want[0])
            except Exception as e: failed.append(e)
        with torchEmber(model, ttypes=('input', 'output')) as te:
            ts = [threading.Thread(target=run) for _ in range(n)]
            [t.start() for t in ts]; [t.join() for t in ts]
        assert not failed
        rows = te.t.lines()
        for i in range(6):
            for ttype,x in (('input', want[i]), ('output', want[i+1])):
                mine = [r for r in rows if r['module'].endswith(f'.{i}(Linear)') and r['ttype']==ttype]
                assert len(mine)==n*passes
                for r in mine: says(r, x)
        root = [r for r in rows if '.' not in r['module']]
        assert len(root)==2*n*passes and len(rows)==7*2*n*passes
        table(te)
    for k in range(10): trial(k)


# ---- several backwards of one pass

def test_two_backwards_of_one_pass():
    model,x = nn.Linear(3, 2),torch.randn(4, 3)
    opt = torch.optim.SGD(model.parameters(), .1)
    want = [[torch.ones(4, 2), 2*model(x).detach()]]
    with torchEmber(model, optimizer=opt, ttypes=('output_grad', 'input_grad')) as te:
        for _ in range(2):
            y = model(x)
            y.sum().backward(retain_graph=True)
            y.square().sum().backward()
            opt.step()
            opt.zero_grad()
            want.append([torch.ones(4, 2), 2*model(x).detach()])
    rows = table(te, 'output_grad')
    assert [k[0] for k in rows]==[0, 0, 1, 1] and [k[-1] for k in rows]==['', 1]*2
    for (step,*_,second),r in rows.items(): says(r, want[step][second or 0])
    b = te.t.df.get('backward')
    assert b.fillna(0).tolist()==[0, 1, 0, 1]


def penalty(model, x, y):
    "The gradient penalty of a Wasserstein GAN"
    out = model(x)
    g, = torch.autograd.grad(out.sum(), x, create_graph=True)
    return nn.functional.cross_entropy(out, y)+(g.norm(dim=1)-1).square().mean()


def test_gradient_penalty():
    "What arrives in the first backward and in the second are told apart, also for a module that is called twice"
    class Twice(Net):
        def forward(self, x): return super().forward(x+self.act(x))
    seen,twin,model = [],seeded(Twice),seeded(Twice)
    def keep(n, call, g): seen[-1].setdefault((n, call), []).append(g.detach().clone())
    for n,m in twin.named_modules():
        def hook(m, i, o, n=n):
            m.calls = getattr(m, 'calls', -1)+1
            o.register_hook(lambda g, call=m.calls: keep(n, call, g))
        m.register_forward_hook(hook)
    opts = [momentum(m) for m in (twin, model)]
    te = torchEmber(model, optimizer=opts[1], ttypes=('output_grad', 'weight_grad'))
    truth = []
    for x,y in batches(3):
        seen.append({})
        for m in twin.modules(): m.calls = -1
        for m,opt in zip((twin, model), opts, strict=True):
            opt.zero_grad()
            penalty(m, x.clone().requires_grad_(), y).backward()
            if m is twin: truth.append(grads(twin))
            opt.step()
    te.close()
    paths = {name: t.path for name,t in te.modules.items()}
    rows = {(k[0], paths[k[1]], k[4], k[6] or 0): r for k,r in table(te, 'output_grad').items()}
    want = {(s, n, call, b): g for s,kept in enumerate(seen) for (n,call),gs in kept.items() for b,g in enumerate(gs)}
    assert max(b for *_,b in want)==1 and max(c for _,_,c,_ in want)==1 and rows.keys()==want.keys()
    for k,g in want.items(): says(rows[k], g)
    said_of_parameters(te, 'weight_grad', truth)


def test_micro_batches_are_no_second_backward():
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        by_hand(model, opt, batches(), 2)
        sum(loss_of(model, x, y) for x,y in batches(2)).backward() # two passes, one backward
        opt.step()
    assert not any(r.get('backward') for r in te.t.lines())
    table(te)


# ---- a root that is not called

class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc,self.dec = nn.Sequential(nn.Linear(4, 2), nn.Tanh()),nn.Linear(2, 4)

    def encode(self, x): return self.enc(x)
    def decode(self, z): return self.dec(z)


@pytest.mark.parametrize('with_optimizer', [False, True])
def test_a_root_that_is_not_called(with_optimizer):
    "The step is over when the module that began it is called again, or when the optimizer has stepped"
    model,short = seeded(VAE),None
    opt = momentum(model)
    with heard() as said, torchEmber(model, ttypes=('input', 'output', 'weight'), **(dict(optimizer=opt) if with_optimizer else {})) as te:
        for x,_ in batches(30):
            (model.decode(model.encode(x))-x).square().mean().backward()
            log = list(te.mt_log)
            opt.step()
            opt.zero_grad()
            short = short or log
            assert log==short and log
    assert steps(te)==list(range(30)) and not said
    rows = table(te, 'output', 'weight')
    assert len(rows)==30*(4+4) and {k[4] for k in rows}=={0} # enc, its two, dec; two weights and two biases
    enters,exits = [l for l in short if l.startswith('enter')],[l for l in short if l.startswith('exit')]
    assert sorted(l.split(' ', 1)[1] for l in enters)==sorted(l.split(' ', 1)[1] for l in exits) and short[-1]=='exit model(VAE).dec(Linear)'


def test_the_log_of_a_root_that_is_not_called_does_not_grow():
    model = seeded(VAE)
    opt = momentum(model)
    for every in (1, 10**6):
        with torchEmber(model, optimizer=opt, every=every, ttypes='output') as te:
            for _ in range(300): model.decode(model.encode(torch.ones(1, 4))).sum().backward(); opt.step(); opt.zero_grad()
            assert len(te.mt_log)<=8
            assert not [o for o in gc.get_objects() if type(o) is list and len(o)>100 and 'exit model(VAE).dec(Linear)' in [s for s in o if type(s) is str]]


def test_micro_batches_of_a_root_that_is_not_called():
    "The passes of a step merge, as they do where the root is called"
    model = seeded(VAE)
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=('input', 'output', 'weight', 'weight_grad')) as te:
        for i,(x,_) in enumerate(batches(6)):
            (model.decode(model.encode(x))-x).square().mean().backward()
            if i%3==2: opt.step(); opt.zero_grad()
    assert steps(te)==[0, 1] and len(table(te))==2*(4+4+4+4) and {k[4] for k in table(te)}=={0}
    for s in (0, 1):
        [r] = table(te, 'input', step=s, module='model(VAE).enc(Sequential)').values()
        x = torch.cat([x for x,_ in batches(6)[3*s:3*s+3]])
        says({**r, 'shape': x.shape}, x)


def test_one_part_alone():
    "A LightningModule whose training_step calls self.net"
    class Lit(nn.Module):
        def __init__(self): super().__init__(); self.net = Net()
    model = seeded(Lit)
    with torchEmber(model, ttypes=('output', 'weight')) as te:
        for x,_ in batches(5): model.net(x)
    assert steps(te)==[0, 1, 2, 3, 4] and len(table(te, 'output'))==5*4 and len(table(te, 'weight'))==5*4


def test_weights_of_parts_that_no_call_reaches():
    "Of a part that is called alone they are recorded with it, however deep they are; and none of a part beside it"
    class Uses(nn.Module):
        def __init__(self): super().__init__(); self.a = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Sequential(nn.Linear(3, 3))))
        def forward(self, x): return nn.functional.linear(nn.functional.linear(x, self.a[0][0].weight), self.a[1][0][0].weight)
    model = seeded(lambda: nn.Sequential(Uses(), nn.Linear(3, 3)))
    with torchEmber(model, ttypes='weight') as te:
        for _ in range(2): model[0](torch.randn(2, 3))
    assert te.t.df[['step', 'path', 'pname', 'call']].values.tolist()==[
        [s, p, n, 0] for s in (0, 1) for p in ('0.a.0.0', '0.a.1.0.0') for n in ('weight', 'bias')]


# ---- copies, and what torch does to modules

def independent(copied, model, x):
    "Not armed, and computes with its own weights"
    assert not hasattr(copied, 'disarm') and not getattr(getattr(copied, 'te', None), 'armed', False)
    with torch.no_grad(): [p.zero_() for n,p in copied.named_parameters() if not n.endswith('original1')] # of weight_norm the size, not the direction
    assert not copied(x).any() and model(x).any()


def through_a_file(model):
    f = io.BytesIO()
    torch.save(model, f)
    f.seek(0)
    return torch.load(f, weights_only=False)


@pytest.mark.parametrize('how', [copy.deepcopy, through_a_file])
def test_an_ember_kept_on_the_model(how):
    model = seeded()
    model.te = torchEmber(model, optimizer=momentum(model))
    x,_ = batches()[0]
    model(x)
    copied = how(model)
    n = len(model.te.t.lines())
    copied(x)
    assert len(model.te.t.lines())==n and model.te.armed
    independent(copied, model, x)
    model.te.close()


def test_a_parametrization_that_comes_later():
    "weight_norm on an armed model: it works, it copies, it comes off; its parameters are seen after te.rearm(), which is said once"
    from torch.nn.utils.parametrizations import weight_norm
    def run(armed):
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        te = torchEmber(model) if armed else None
        weight_norm(model[0])
        return te, model
    x,_ = batches()[0]
    _,twin = run(False)
    with heard('rearm') as said:
        te,model = run(True)
        for _ in range(3): assert torch.equal(model(x), twin(x))
        copied = copy.deepcopy(model)
    assert len(said)==1
    assert torch.equal(copied(x), twin(x)) and not hasattr(copied, 'disarm')
    with torch.no_grad(): copied[0].parametrizations.weight.original0.zero_(); copied[0].bias.zero_()
    assert not copied(x).any() and torch.equal(model(x), twin(x))
    with heard() as said:
        te.rearm()
        model(x)
    names = {r['pname'] for r in te.t.lines() if r['step']==max(steps(te)) and r['ttype']=='weight'}
    assert not said and {'original0', 'original1'}<=names
    te.close()
    for a,b in zip(model.modules(), twin.modules(), strict=True): assert a.__dict__.keys()==b.__dict__.keys()
    assert torch.equal(model(x), twin(x))


@pytest.mark.parametrize('with_optimizer', [False, True])
def test_tensors_are_swapped(with_optimizer):
    "model.double() where torch swaps parameters, which nobody else may hold then, instead of setting their data"
    model,x = seeded(),batches()[0][0]
    opt = momentum(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torchEmber(model, ttypes=ALL if with_optimizer else ('input', 'output', 'weight'), optimizer=opt if with_optimizer else None) as te:
            for dtype in (torch.float32, torch.float64):
                model.to(dtype)
                out = model(x.to(dtype))
                if with_optimizer: out.sum().backward(); opt.step(); opt.zero_grad()
                del out
    finally: torch.__future__.set_swap_module_params_on_conversion(False)
    assert {(r['step'], r['dtype']) for r in table(te, 'weight').values()}=={(0, 'float32'), (1, 'float64')}


@pytest.mark.parametrize('action', ['always', 'error'])
def test_weights_that_are_no_leaves(action):
    "functional_call with computed parameters: torch's warning about .grad of a non-leaf is not ours to cause"
    model,x = seeded(),batches()[0][0]
    with warnings.catch_warnings(record=action=='always') as said:
        warnings.simplefilter(action)
        with torchEmber(model, ttypes=('output', 'weight', 'weight_grad')) as te:
            torch.func.functional_call(model, {n: 2*p for n,p in model.named_parameters()}, x).sum().backward()
    assert not said
    said_of_parameters(te, 'weight', [{n: 2*p for n,p in model.named_parameters()}])


def test_a_model_on_meta():
    with heard() as said:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to('meta')
        with torchEmber(model): [model(torch.ones(1, 3, device='meta')) for _ in range(3)]
    assert len(said)==1 and 'meta' in said[0] and 'autocast' not in said[0]


# ---- a GAN's loop

def gan(mark):
    "The discriminator sees real data, fake data, and in the generator's step fake data again; its outputs are known"
    D = nn.Linear(2, 1)
    with torch.no_grad(): D.weight.fill_(1.); D.bias.fill_(0.)
    opt,now = torch.optim.SGD(D.parameters(), .1),[]
    with torchEmber(D, optimizer=opt, ttypes=('output',)) as te:
        for i in range(3):
            for batch,value in (('real', 3.), ('fake', -3.)):
                if mark: te.mark(batch=batch)
                out = D(torch.full((4, 2), value+i))
                now.append((i, batch, out.detach().clone()))
                (out.mean()*(1 if batch=='fake' else -1)).backward()
            opt.step()
            opt.zero_grad()
            if mark: te.mark(batch='generator')
            now.append((i+1, 'generator', D(torch.full((4, 2), -7.)).detach().clone()))
    return te, now


def test_passes_of_one_step_merge():
    te,want = gan(False)
    rows = table(te, 'output')
    assert [k[0] for k in rows]==[0, 1, 2, 3]
    for k,r in rows.items():
        x = torch.cat([o for s,_,o in want if s==k[0]])
        assert r['shape']==[4, 1]
        says({**r, 'shape': x.shape}, x)


def test_marks_keep_passes_apart():
    te,want = gan(True)
    rows = {(r['step'], r['batch']): r for r in te.t.lines()}
    assert len(rows)==len(te.t.lines()) and rows.keys()=={(s, b) for s,b,_ in want}
    for s,b,x in want: says(rows[s, b], x)
    assert all(r['call']==0 for r in rows.values())


# ---- what the report says

def lines(te, *words): return [l for l in repr(te.close()).splitlines() if all(w in l.lower() for w in words)]


def test_the_report_of_a_healthy_run():
    model = seeded()
    opt = momentum(model)
    te = torchEmber(model, optimizer=opt, ttypes=ALL)
    by_hand(model, opt, batches())
    report = te.close()
    assert report['steps']==report['recorded']==4 and isinstance(report, dict)
    assert not any(w in repr(report).lower() for w in ('gradient', 'never', 'finite', 'nan'))


def test_the_report_tells_of_steps_without_gradients():
    model = seeded()
    opt = momentum(model)
    te = torchEmber(model, optimizer=opt)
    for x,y in batches():
        loss_of(model, x, y).backward()
        opt.zero_grad() # too early
        opt.step()
    assert len(lines(te, 'gradient', '4'))==1


def test_the_report_tells_of_an_optimizer_that_never_stepped():
    model = seeded()
    te = torchEmber(model, optimizer=momentum(model))
    with heard(): by_hand(model, momentum(model), batches(40))
    assert len(lines(te, 'optimizer', 'never', 'step'))==1


class Breaks(nn.Module):
    "Gives NaN from its fourth call on"
    calls = 0
    def forward(self, x):
        self.calls += 1
        return x*(float('nan') if self.calls>3 else 1)


@pytest.mark.parametrize('every', [1, 3])
def test_the_first_value_that_is_not_finite(every):
    "Said once, with step, module and tensor, and again in the report"
    def names(line): return re.search(r'step\W*3\b', line) and '0.1' in line and 'output_0' in line
    model = seeded(lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), Breaks()), nn.Linear(4, 3)))
    opt = momentum(model)
    with heard() as said:
        te = torchEmber(model, optimizer=opt, ttypes=ALL, every=every)
        by_hand(model, opt, batches(8))
        report = te.close()
    assert len(said)==1 and names(said[0]), said
    assert len([l for l in repr(report).splitlines() if names(l)])==1


def test_the_first_gradient_that_is_not_finite():
    model = seeded()
    opt = momentum(model)
    with heard() as said, torchEmber(model, optimizer=opt) as te:
        by_hand(model, opt, batches(2))
        model(batches()[0][0]).sum().backward()
        model.b.weight.grad[0, 0] = float('inf')
        opt.step()
        te.t.df # noqa: B018
    assert len(said)==1 and re.search(r'step\W*2\b', said[0]) and re.search(r'\bb\b', said[0]) and re.search('grad_0|weight', said[0]), said


def test_nothing_is_noted_where_torchember_is_switched_off(monkeypatch):
    monkeypatch.setenv('TORCHEMBER_DISABLE', '1')
    model = seeded()
    te = torchEmber(model, optimizer=momentum(model))
    by_hand(model, momentum(model), batches(2))
    te.log(loss=1.)
    te.close()
    assert not te.t.log_path.exists()


def test_a_schedule_that_raises_leaves_the_passes_countable():
    "With on_error='raise' it goes through the forward; what comes after is counted as before"
    def when(step):
        if step==1: raise RuntimeError('on purpose')
        return True
    model = seeded()
    te = torchEmber(model, every=when, on_error='raise', ttypes=('output',))
    x,_ = batches()[0]
    model(x)
    with pytest.raises(RuntimeError, match='on purpose'): model(x)
    assert te.recorder.events.running==te.recorder.calls.recorded==te.recorder.calls.here.depth==0
    te.close()


@needs_hooks
@pytest.mark.parametrize('with_optimizer,every', [(False, 1), (False, 2), (True, 1), (True, 3)])
def test_a_compiled_part_of_a_root_that_is_not_called(with_optimizer, every):
    "It is the pass, as it is uncompiled. The compiler looks once more when it has turned out that it is called by itself"
    from torch._dynamo.testing import CompileCounterWithBackend
    class Lit(nn.Module):
        def __init__(self): super().__init__(); self.net = Net()
    torch._dynamo.reset()
    tables = []
    for compiled in (False, True):
        model = seeded(Lit)
        opt,count = momentum(model),CompileCounterWithBackend('aot_eager')
        net = torch.compile(model.net, backend=count, fullgraph=True) if compiled else model.net
        with torchEmber(model, every=every, ttypes=('input', 'output', 'weight', 'output_grad'), **(dict(optimizer=opt) if with_optimizer else {})) as te:
            for x,_ in batches(7):
                net(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
        assert te.close()['steps']==7 and steps(te)==list(range(0, 7, every))
        tables.append(table(te))
    same(*tables)
    assert count.frame_count==2+(every>1)


def test_a_leaf_that_is_given_in_every_pass():
    "Each pass has a hook on it, and hears the backward of its own pass alone"
    model = seeded(lambda: nn.Linear(2, 1, bias=False))
    with torch.no_grad(): model.weight[:] = 1.
    x = torch.ones(3, 2, requires_grad=True)
    with torchEmber(model, optimizer=momentum(model), ttypes=('input_grad',)) as te:
        for k in (1., 5.): (k*model(x)).sum().backward()
    rows = te.t.lines()
    assert [(r['mean'], r['min'], r['max'], r.get('backward')) for r in rows]==[(3, 1, 5, None)]


# ---- what somebody found who tried to break it

def weights_by_name(te, step):
    return {r['pname']: r['shape'] for r in te.t.lines() if r['step']==step and r['ttype']=='weight'}


def test_a_parameter_that_comes_anew_keeps_its_name():
    "Pruning takes `weight` away and puts `weight_orig` behind the bias"
    from torch.nn.utils import prune
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3)))
    opt = momentum(model)
    with heard('rearm') as said, torchEmber(model, optimizer=opt, ttypes=('weight', 'weight_grad', 'update')) as te:
        by_hand(model, opt, batches(2))
        prune.l1_unstructured(model[0], 'weight', .5)
        by_hand(model, opt, batches(2))
    assert len(said)==1
    assert weights_by_name(te, 0)=={'weight': [3, 4], 'bias': [3]} and weights_by_name(te, 3)=={'bias': [3], 'weight_orig': [3, 4]}


def test_a_submodule_that_is_replaced():
    "It is said, and what is in the model no more has no rows. One that is only compiled is the same as before"
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)))
    with heard('rearm') as said, torchEmber(model, ttypes=('output', 'weight')) as te:
        x,_ = batches()[0]
        model(x)
        model[1] = nn.Linear(3, 3)
        model(x)
    assert len(said)==1
    assert {r['module'] for r in te.t.lines() if r['step']==1}=={'model(Sequential)', 'model(Sequential).0(Linear)'}
    with heard() as said, torchEmber(model, ttypes=('weight',)) as te:
        model(x)
        model[1] = torch.compile(model[1], backend='eager')
        model(x)
    assert not said and len([r for r in te.t.lines() if r['step']==1])==4


@pytest.mark.parametrize('inside', [False, True])
def test_a_run_that_goes_on_while_its_first_ember_lives(inside):
    "As in a notebook whose cell is interrupted and run again"
    model = seeded()
    opt = momentum(model)
    first = torchEmber(model, optimizer=opt, name='again')
    by_hand(model, opt, batches(3))
    if inside: model(batches()[0][0])
    with heard('disarmed first') as said: te = torchEmber(model, optimizer=opt, name='again', resume=True)
    by_hand(model, opt, batches(2))
    te.close()
    assert not first.armed and len(said)<=1
    assert steps(te)==list(range(5+inside))
    assert len({(r['step'], r['module'], r['ttype'], r['tname']) for r in te.t.lines()})==len(te.t.lines())


def test_step_beside_an_optimizer():
    "The optimizer ends the steps, and te.step() says so once"
    model = seeded()
    opt = momentum(model)
    with heard('Leave out one') as said, torchEmber(model, optimizer=opt, ttypes=('weight_grad',)) as te:
        for x,y in batches(3):
            loss_of(model, x, y).backward()
            te.step()
            opt.step()
            opt.zero_grad()
    assert len(said)==1 and steps(te)==[0, 1, 2]


def test_embers_of_one_second_have_names_of_their_own(monkeypatch):
    "Two processes, of which each arms a generator and a discriminator"
    monkeypatch.setenv('RANK', '1')
    monkeypatch.setenv('WORLD_SIZE', '2')
    tes = [torchEmber(nn.Linear(2, 1)) for _ in range(3)]
    assert len({te.fname for te in tes})==3 and all(te.fname.endswith('.rank1') for te in tes)
    for te in tes: te.close()


def test_masked_scores_do_not_use_up_the_alarm():
    class Masked(nn.Module):
        def forward(self, x): return x.masked_fill(x<0, -math.inf)
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Masked(), nn.Softmax(-1)))
    x,_ = batches()[0]
    with heard() as said, torchEmber(model, ttypes=('input', 'output')) as te:
        for _ in range(2): model(x)
        te.t.df # noqa: B018
        assert not said
        model(x*float('nan'))
    assert len(said)==1 and re.search(r'step\W*2', said[0])


def test_an_evaluation_before_the_first_step_is_no_lack_of_gradients():
    "Lightning looks at two batches of the validation before it trains, and its closure clears the gradients of the step before"
    model = seeded()
    opt = momentum(model)
    with heard() as said, torchEmber(model) as te:
        model.eval()(batches()[0][0])
        model.train()
        for x,y in batches(4):
            def closure(x=x, y=y):
                loss = loss_of(model, x, y)
                opt.zero_grad()
                loss.backward()
                return loss
            opt.step(closure)
    assert not said and any(r['ttype']=='weight_grad' for r in te.t.lines())


def test_rollouts_are_no_silence_of_the_optimizer():
    model = seeded()
    opt = momentum(model)
    with heard() as said, torchEmber(model, optimizer=opt, ttypes='probe') as te:
        for _ in range(2):
            with torch.no_grad():
                for _ in range(1100): model(batches()[0][0])
            by_hand(model, opt, batches(2))
    assert not said and te.close()['steps']==4


def test_one_of_two_optimizers_stops():
    model = seeded()
    a,b = (torch.optim.SGD(m.parameters(), .01) for m in (model.a, model.b))
    with heard('not step') as said:
        te = torchEmber(model, optimizer=[a, b], ttypes='probe')
        for i in range(230):
            loss_of(model, *batches()[0]).backward()
            a.step()
            if i<3: b.step()
            a.zero_grad(); b.zero_grad()
        report = te.close()
    assert len(said)==1 and any('waited for SGD' in r for r in report['remarks'])
