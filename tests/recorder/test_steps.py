"Common forms of training loops: each row has the right step, and the statistics of the right tensor."
from tensor_rows import df, lines
import os
import random
import sys
import threading
import time

import pytest
import torch
from looped import (ALL, Net, batches, by_hand, closure_of, ears, grads, heard, left, loss_of, momentum, outputs, said_of_parameters, same, seeded,
    steps, table, training, weights)
from oracle import says
from torch import nn

import torchember
from torchember import EmberWarning, torchEmber
from torchember.ground.choose import TimeSchedule


def plain(data=None, accumulate=1, ttypes=ALL, make=momentum, **options):
    "Train with a plain loop. Return its rows."
    model = seeded()
    opt = make(model)
    with torchEmber(model, optimizer=opt, ttypes=ttypes, **options) as te: by_hand(model, opt, batches() if data is None else data, accumulate)
    return table(te)


# ---- an optimizer step ends a step of the run

@pytest.mark.parametrize('accumulate', [1, 2])
def test_the_plain_loop(accumulate):
    "The rows of the plain loop, with which other loops are compared, are themselves correct."
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
    "In `step(closure)`, forward and backward run inside of the optimizer step. Their rows belong to this step."
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
    "Wrappers of optimizers call `step(None)` or `step(closure=None)`."
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL) as te:
        for i,(x,y) in enumerate(batches()):
            opt.zero_grad()
            loss_of(model, x, y).backward()
            opt.step(None) if i%2 else opt.step(closure=None)
    same(table(te), plain())


def test_closure_on_a_schedule():
    "Only every second step is recorded, including the passes in its closure."
    model = seeded()
    opt = momentum(model)
    with torchEmber(model, optimizer=opt, ttypes=ALL, every=2) as te:
        for x,y in batches(5): opt.step(closure_of(model, opt, x, y))
    assert steps(te)==[0, 2, 4]
    same(table(te), plain(batches(5), every=2))


def test_gradients_that_the_step_takes_away():
    "The optimizer's step calls the closure and then clears the gradients. The gradients left by the closure are recorded."
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
    "step() returns the same object as the closure, and the closure is called exactly once."
    model,calls = seeded(),[]
    opt,losses = momentum(model),[torch.tensor(1.5), 2.5, None]
    with torchEmber(model, optimizer=opt):
        for loss in losses: assert opt.step(lambda loss=loss: (calls.append(1), loss)[1]) is loss
    assert len(calls)==3


@pytest.mark.parametrize('search', [None, 'strong_wolfe'])
def test_lbfgs(search):
    "LBFGS runs several passes in a step. Recorded are the weights before the step and the gradients of the last pass."
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
    "If a closure raises, the step was not taken. The next step gets its number."
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


# ---- validation between training steps

@pytest.mark.parametrize('only_training', [False, True])
def test_validation_in_between(only_training):
    "Training rows are the same as without validation. Validation rows belong to the training step before them."
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
    "Training outputs are always 1, and the outputs of the three validation batches are 100, 200 and 300."
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


# ---- optimizers of another model, and optimizers that were replaced

def test_an_optimizer_of_another_model():
    model,other = seeded(),seeded()
    before = left(model, o := momentum(other))
    with pytest.warns(EmberWarning, match='trains none of the'): torchEmber(model, optimizer=o).close()
    assert left(model, o)==before


def test_an_optimizer_of_a_part():
    model = seeded()
    opt = torch.optim.SGD(model.b.parameters(), .1)
    with heard() as said, torchEmber(model, optimizer=opt, ttypes=('weight', 'update')) as te: by_hand(model, opt, batches(20))
    assert not said and steps(te)==list(range(20))


def test_an_optimizer_made_anew():
    "The loop uses a new optimizer, so the given optimizer never steps although the weights change. One warning is given."
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


# ---- arming a model fails

class Odd(nn.Module):
    "A module whose attribute `forward` raises an exception when it is read."
    @property
    def forward(self): raise RuntimeError('not to be looked at')


class Deaf(torch.optim.SGD):
    "An optimizer that raises an exception when a hook is registered."
    def register_step_pre_hook(self, hook): raise RuntimeError('takes no hooks')
    def register_step_post_hook(self, hook): raise RuntimeError('takes no hooks')


@pytest.mark.parametrize('kind', ['module', 'optimizer'])
def test_arming_that_fails_leaves_nothing(kind):
    model = nn.Sequential(nn.Linear(4, 4), Odd() if kind=='module' else nn.Tanh(), nn.Linear(4, 2))
    opts = [momentum(model[0]), (Deaf if kind=='optimizer' else torch.optim.SGD)(model[2].parameters(), .1)]
    before = left(model, *opts)
    try: te = torchEmber(model, optimizer=opts, ttypes=ALL)
    except Exception as e: assert 'not to be looked at' in str(e) or 'takes no hooks' in str(e)
    else: te.close() # arming succeeded in spite of the error
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


# ---- several threads in one model

library,draw = os.path.dirname(torchember.__file__),random.Random(0).random


def uneasy(frame, event, arg):
    "Trace function: at some lines of the library, let another thread run."
    if not frame.f_code.co_filename.startswith(library): return None
    if draw()<.1: time.sleep(0)
    return uneasy


@pytest.mark.parametrize('passes', [1, 3])
def test_four_threads_run_one_model(passes):
    "All rows are complete, and each row belongs to the right module."
    n = 4
    def trial(k):
        model = seeded(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]).eval(), k)
        x,start,failed = torch.ones(3, 4),threading.Barrier(n),[]
        with torch.no_grad(): want = [x, *(x := m(x) for m in model)]
        def run():
            sys.settrace(uneasy) # sets the trace function of this thread only
            start.wait()
            try:
                with torch.no_grad():
                    for _ in range(passes): model(want[0])
            except Exception as e: failed.append(e)
        with torchEmber(model, ttypes=('input', 'output')) as te:
            ts = [threading.Thread(target=run) for _ in range(n)]
            [t.start() for t in ts]; [t.join() for t in ts]
        assert not failed
        rows = lines(te)
        for i in range(6):
            for ttype,x in (('input', want[i]), ('output', want[i+1])):
                mine = [r for r in rows if r['module'].endswith(f'.{i}(Linear)') and r['ttype']==ttype]
                assert len(mine)==n*passes
                for r in mine: says(r, x)
        root = [r for r in rows if '.' not in r['module']]
        assert len(root)==2*n*passes and len(rows)==7*2*n*passes
        table(te)
    for k in range(10): trial(k)


# ---- several backwards through one pass

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
    b = df(te).get('backward')
    assert b.fillna(0).tolist()==[0, 1, 0, 1]


def penalty(model, x, y):
    "Return a cross-entropy loss with the gradient penalty of a Wasserstein GAN."
    out = model(x)
    g, = torch.autograd.grad(out.sum(), x, create_graph=True)
    return nn.functional.cross_entropy(out, y)+(g.norm(dim=1)-1).square().mean()


def test_gradient_penalty():
    "Gradients of the first and the second backward have separate rows, also for a module that is called twice."
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
        sum(loss_of(model, x, y) for x,y in batches(2)).backward() # two passes with one common backward
        opt.step()
    assert not any(r.get('backward') for r in lines(te))
    table(te)


# ---- the training loop of a GAN

def gan(mark):
    "Train a discriminator on real and fake data, with another pass for the generator. Return the ember and the known outputs."
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
    "The generator's pass has no backward, but other passes of its step have one. So it is not merged with them."
    te,want = gan(False)
    rows = table(te, 'output', phase=None)
    assert [k[0] for k in rows]==[0, 1, 2, 3]
    for k,r in rows.items():
        x = torch.cat([o for s,b,o in want if s==k[0] and (b!='generator' or s==3)])
        assert r['shape']==[4, 1]
        says({**r, 'shape': x.shape}, x)
    apart = table(te, 'output', phase='refused')
    assert [k[0] for k in apart]==[0, 1] and all(r['skipped'] for r in apart.values())
    for s,r in enumerate(apart.values()): says(r, next(o for t,b,o in want if (t, b)==(s+1, 'generator')))


def test_marks_keep_passes_apart():
    te,want = gan(True)
    rows = {(r['step'], r['batch']): r for r in lines(te)}
    assert len(rows)==len(lines(te)) and rows.keys()=={(s, b) for s,b,_ in want}
    for s,b,x in want: says(rows[s, b], x)
    assert all(r['call']==0 for r in rows.values())


def test_a_schedule_that_raises_leaves_the_passes_countable():
    "With on_error='raise', the forward raises the exception of the schedule. Later passes are still counted correctly."
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


def test_step_beside_an_optimizer():
    "The given optimizer ends the steps. te.step() has no effect and warns once."
    model = seeded()
    opt = momentum(model)
    with heard('Leave out te.step') as said, torchEmber(model, optimizer=opt, ttypes=('weight_grad',)) as te:
        for x,y in batches(3):
            loss_of(model, x, y).backward()
            te.step()
            opt.step()
            opt.zero_grad()
    assert len(said)==1 and steps(te)==[0, 1, 2]


def test_a_schedule_by_time_records_a_step_when_its_time_has_passed():
    model,now = nn.Linear(2, 2),[0.]
    te = torchEmber(model, every=TimeSchedule(1., lambda: now[0]))
    for _ in range(13):
        model(torch.ones(3, 2)).sum().backward()
        te.step()
        model.zero_grad()
        now[0] += .3 # each step takes .3 s of the simulated time
    te.close()
    # at the end of each step, it is decided if the next step is recorded
    assert sorted(set(te.t.df.step))==[0, 5, 9]
