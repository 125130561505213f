"A pass whose gradients no optimizer used is 'refused': it is not merged with micro-batches, is marked, and belongs to the step before."
import programs
import pytest
import torch
from tensor_rows import lines
from torch import nn

from torchember import read, torchEmber

ENDS = ['optimizer', 'te.step']
nan = float('nan')


def batch(v): return torch.full((2, 1), float(v))


class Loop:
    "A training loop of a one-layer model. The inputs are constant, so the mean of a row shows the passes that are merged in it."
    def __init__(self, ends='optimizer', ttypes=('input', 'weight', 'weight_grad'), **options):
        self.model = nn.Sequential(nn.Linear(1, 1))
        self.opt,self.ends = torch.optim.SGD(self.model.parameters(), .1),ends
        self.te = torchEmber(self.model, ttypes=ttypes, **{'stats': ['mean'], **options}, **(dict(optimizer=self.opt) if ends=='optimizer' else {}))
        if ends=='te.step': self.te.step()

    def backward(self, *values):
        for v in values: self.model(batch(v)).sum().backward()

    def step(self):
        self.opt.step()
        if self.ends=='te.step': self.te.step()
        self.opt.zero_grad()

    def train(self, *values):
        self.backward(*values)
        self.step()

    def rows(self, ttype='input'):
        "Return for each row: step, phase, True if skipped, number of the pass, and mean."
        found = [r for r in lines(self.te) if r['ttype']==ttype and (ttype!='input' or r['module'].endswith('.0(Linear)'))]
        return [(r['step'], r.get('phase'), r.get('skipped'), r.get('micro'), r.get('mean', r.get('loss'))) for r in found]


def row(step, mean): return step, None, None, None, mean
def refused(step, n, mean): return step, 'refused', True, n, mean


def by_hand(model):
    for p in model.parameters(): p.grad = None

def in_place(model):
    for p in model.parameters(): p.grad.zero_()

WAYS = {'optimizer.zero_grad()': lambda l: l.opt.zero_grad(), 'optimizer.zero_grad(set_to_none=False)': lambda l: l.opt.zero_grad(set_to_none=False),
    'model.zero_grad()': lambda l: l.model.zero_grad(), 'p.grad = None': lambda l: by_hand(l.model), 'p.grad.zero_()': lambda l: in_place(l.model)}


@pytest.mark.parametrize('ends', ENDS)
@pytest.mark.parametrize('way', WAYS)
def test_a_batch_whose_gradients_are_removed_is_not_merged_with_the_next_step(ends, way):
    loop = Loop(ends)
    loop.train(0)
    for v in (100, 200): loop.backward(v); WAYS[way](loop)
    loop.train(1, 3)
    report = loop.te.close()
    assert loop.rows()==[row(0, 0), refused(0, 0, 100), refused(0, 1, 200), row(1, 2)]
    assert report['steps']==2 and any(r.startswith('2 training passes belong to no step: ') for r in report['remarks'])
    for ttype in ('weight', 'weight_grad'): assert [r[0] for r in loop.rows(ttype) if r[1] is None]==[0, 0, 1, 1]
    df = read(loop.te)
    assert set(df[df.skipped.notna()].step)=={0} and not df.duplicated(['step', 'path', 'ttype', 'tname', 'call', 'micro', 'phase']).any()


@pytest.mark.parametrize('ends', ENDS)
def test_a_batch_before_the_first_step_belongs_to_the_first_step(ends):
    loop = Loop(ends)
    loop.backward(100)
    loop.opt.zero_grad()
    loop.train(1)
    report = loop.te.close()
    assert sorted(loop.rows(), key=str)==sorted([refused(0, 0, 100), row(0, 1)], key=str) and report['steps']==1


def test_a_batch_at_the_end_of_a_run_is_marked_and_is_no_step():
    loop = Loop()
    loop.train(0)
    loop.backward(100)
    loop.opt.zero_grad()
    assert loop.te.close()['steps']==1 and loop.rows()==[row(0, 0), refused(0, 0, 100)]


def test_reading_before_and_after_the_gradients_are_removed():
    "The row was read as part of the open step. A later row marks the pass as refused and replaces it."
    loop = Loop()
    loop.train(0)
    loop.backward(100)
    assert loop.rows()==[row(0, 0), row(1, 100)]
    loop.opt.zero_grad()
    loop.train(1)
    loop.te.close()
    assert sorted(loop.rows(), key=str)==sorted([row(0, 0), refused(0, 0, 100), row(1, 1)], key=str)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): raise torch.OutOfMemoryError('on purpose')


@pytest.mark.parametrize('ends', ENDS)
@pytest.mark.parametrize('after', [False, True], ids=['before any gradient came', 'after some came'])
def test_a_batch_whose_backward_raised(ends, after):
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b,self.fails = nn.Linear(1, 1),nn.Linear(1, 1),False
        def forward(self, x):
            x = self.a(x)
            return self.b(Fails.apply(x)) if self.fails and after else Fails.apply(self.b(x)) if self.fails else self.b(x)
    model = Model()
    opt = torch.optim.SGD(model.parameters(), .1)
    te = torchEmber(model, ttypes=('input',), stats=['mean'], **(dict(optimizer=opt) if ends=='optimizer' else {}))
    if ends=='te.step': te.step()
    for i in range(4):
        model.fails = i in (1, 2)
        opt.zero_grad()
        loss = model(batch(i)).sum()
        try: loss.backward()
        except torch.OutOfMemoryError: continue
        opt.step()
        if ends=='te.step': te.step()
    report = te.close()
    got = [(r['step'], r.get('phase'), r.get('micro'), r['mean']) for r in lines(te) if r['module']=='model(Model)']
    assert got==[(0, None, None, 0), (0, 'refused', 0, 1), (0, 'refused', 1, 2), (1, None, None, 3)] and report['steps']==2


@pytest.mark.parametrize('ends', ENDS)
def test_a_pass_that_never_gets_a_backward_is_taken_out_at_the_end_of_the_step(ends):
    loop = Loop(ends)
    for i in range(2):
        loop.opt.zero_grad()
        loop.model(batch(100+i)).sum() # no backward: the loop skips a batch, for example if its loss is not finite
        loop.train(i)
    loop.te.close()
    assert sorted(loop.rows(), key=str)==sorted([refused(0, 0, 100), row(0, 0), refused(0, 1, 101), row(1, 1)], key=str)


# ---- passes that are not refused

@pytest.mark.parametrize('ends', ENDS)
@pytest.mark.parametrize('accumulate', [1, 2])
@pytest.mark.parametrize('to_none', [True, False])
def test_zero_grad_between_forward_and_backward_refuses_nothing(ends, accumulate, to_none):
    loop = Loop(ends)
    for i in range(3):
        for k in range(accumulate):
            loss = loop.model(batch(2*k+i)).sum()
            if not k: loop.opt.zero_grad(to_none)
            loss.backward()
        loop.opt.step()
        if ends=='te.step': loop.te.step()
    report = loop.te.close()
    assert loop.rows()==[row(i, i+accumulate-1) for i in range(3)] and not any('belong' in r for r in report['remarks'])


def test_a_batch_that_is_refused_in_a_loop_with_zero_grad_between_forward_and_backward():
    "The gradients of the refused batch are cleared only after the forward of the next batch."
    loop = Loop(stats=['mean'])
    for i in range(4):
        loss = loop.model(batch(i)).sum()
        loop.te.log(loss=float(i))
        loop.opt.zero_grad()
        loss.backward()
        if i!=1: loop.opt.step()
    loop.te.close()
    assert loop.rows()==[row(0, 0), refused(0, 0, 1), row(1, 2), row(2, 3)]
    assert loop.rows('scalar')==[row(0, 0), refused(0, 0, 1), row(1, 2), row(2, 3)]
    assert [r['call'] for r in lines(loop.te) if r['ttype']=='scalar' and not r.get('phase')]==[0, 0, 0]


def two_passes_one_loss(l): (l.model(batch(0))*l.model(batch(2))).sum().backward()
def two_backwards(l):
    a,b = l.model(batch(0)).sum(),l.model(batch(2)).sum()
    a.backward(retain_graph=True); b.backward(); a.backward()
def penalty(l):
    x = batch(0).requires_grad_()
    g, = torch.autograd.grad(l.model(x).square().sum(), x, create_graph=True)
    (l.model(batch(2)).sum()+g.square().sum()).backward()
def saliency(l):
    x = batch(0).requires_grad_()
    torch.autograd.grad(l.model(x).sum(), x)
    l.model(batch(2)).sum().backward()
def clipped(l):
    for v in (0, 2): l.backward(v); nn.utils.clip_grad_norm_(l.model.parameters(), 1e-3)
def zero_gradients(l):
    for v in (0, 2): (0*l.model(batch(v))).sum().backward()

@pytest.mark.parametrize('ends', ENDS)
@pytest.mark.parametrize('how', [two_passes_one_loss, two_backwards, penalty, clipped, zero_gradients], ids=lambda f: f.__name__)
def test_passes_whose_gradients_are_used_are_micro_batches(ends, how):
    loop = Loop(ends)
    for _ in range(2): how(loop); loop.step()
    report = loop.te.close()
    assert loop.rows()==[row(0, 1), row(1, 1)] and not any('belong' in r for r in report['remarks'])


@pytest.mark.parametrize('of', ['input', 'weights'])
@pytest.mark.parametrize('ends', ENDS)
def test_a_pass_that_only_autograd_grad_uses_is_not_merged(ends, of):
    "Examples are an attack on the input, or a saliency map. Their gradients never reach the optimizer."
    loop = Loop(ends)
    def query():
        x = batch(0).requires_grad_()
        torch.autograd.grad(loop.model(x).sum(), x if of=='input' else [*loop.model.parameters()])
    for _ in range(2):
        query()
        loop.train(2)
    assert loop.rows()==[refused(0, 0, 0), row(0, 2), refused(0, 1, 0), row(1, 2)]


def test_a_refused_batch_is_found_with_a_process_group():
    got = programs.run("""
import torch, torch.distributed as dist
from torch import nn
from torchember import torchEmber
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(1, 1)
opt = torch.optim.SGD(model.parameters(), .1)
te = torchEmber(model, optimizer=opt, ttypes=('input',))
for v in (1., float('nan'), 3.):
    model(torch.full((2, 1), v)).sum().backward()
    if v==v: opt.step()
    opt.zero_grad()
te.close()
dist.destroy_process_group()
print([(r['step'], r.get('phase'), r['nan'] if 'nan' in r else 0) for r in te.t.lines() if r['ttype']=='input'])
""")
    assert got.stdout.splitlines()[-1:]==["[(0, None, 0), (0, 'refused', 2), (1, None, 0)]"], (got.stdout, got.stderr)


def test_an_optimizer_beside_the_given_one_uses_gradients():
    "The ember does not know optimizer `b`. Changed weights show that the gradients of these passes were used."
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    a,b = (torch.optim.SGD(m.parameters(), .1) for m in model)
    te = torchEmber(model, optimizer=a, ttypes=('input',), stats=['mean'])
    for v in (0, 2): model(batch(v)).sum().backward(); b.step(); b.zero_grad(); a.zero_grad()
    model(batch(4)).sum().backward()
    a.step()
    te.close()
    assert [(r['step'], r.get('phase'), r['mean']) for r in lines(te) if r['module']=='model(Sequential)']==[(0, None, 2)]


def test_weights_that_are_updated_through_data_end_no_pass_that_te_step_ends():
    loop = Loop('te.step')
    for i in range(3):
        loop.backward(i)
        for p in loop.model.parameters(): p.data -= .1*p.grad; p.grad = None
        loop.te.step()
    loop.te.close()
    assert loop.rows()==[row(i, i) for i in range(3)]


@pytest.mark.parametrize('root', ['both', 'discriminator'])
def test_a_gan(root):
    "If only the discriminator is recorded, the generator's pass gives it gradients that no optimizer uses."
    both = nn.ModuleDict({'g': nn.Linear(1, 1), 'd': nn.Linear(1, 1)})
    g,d = both['g'],both['d']
    og,od = (torch.optim.SGD(m.parameters(), .01) for m in (g, d))
    te = torchEmber(both if root=='both' else d, optimizer=[og, od] if root=='both' else od, ttypes=('input',), stats=['mean'])
    with torch.no_grad(): g.weight.zero_(); g.bias.fill_(50.)
    for i in range(2):
        od.zero_grad()
        d(batch(i)).sum().backward()
        d(batch(2+i)).sum().backward()
        od.step()
        og.zero_grad()
        d(g(batch(7)).clamp(50, 50)).sum().backward()
        og.step()
    te.close()
    got = [(r['step'], r.get('phase'), r['mean']) for r in lines(te) if 'g(' not in r['module']]
    if root=='both': assert not any(p for _,p,_ in got) and {s for s,*_ in got}=={0, 1}
    # gradients of the last pass were not cleared, so it is not refused
    else: assert got==[(0, None, 1), (0, 'refused', 50), (1, None, 2), (2, None, 50)]


def test_lbfgs_calls_the_model_many_times_in_one_step():
    model = nn.Sequential(nn.Linear(1, 1))
    opt = torch.optim.LBFGS(model.parameters(), .1, max_iter=4, line_search_fn='strong_wolfe')
    te = torchEmber(model, optimizer=opt, ttypes=('input',), stats=['mean'])
    def closure():
        opt.zero_grad()
        loss = (model(batch(1))-3).square().sum()
        loss.backward()
        return loss
    for _ in range(2): opt.step(closure)
    report = te.close()
    assert report['steps']==2 and not any(r.get('phase') for r in te.t.lines())


# ---- rows of refused passes

def test_rows_of_functions_and_gradients_of_a_refused_batch():
    loop = Loop(ttypes=('input', 'output_grad'), stats=lambda x: {'mean': x.mean()})
    loop.train(0)
    loop.backward(1)
    (loop.model(batch(nan))).sum().backward()
    loop.opt.zero_grad()
    loop.train(5)
    loop.te.close()
    got = [(r['step'], r.get('phase'), r.get('micro')) for r in loop.te.t.lines() if r['ttype']=='output_grad' and '.0(' in r['module']]
    assert got==[(0, None, None), (0, 'refused', 0), (0, 'refused', 1), (1, None, None)]
    means = [r[4] for r in loop.rows()]
    assert means[:2]==[0, 1] and means[2]!=means[2] and means[3]==5


def test_rules_and_alarms_pass_over_a_refused_batch(recwarn):
    from torchember import diagnose
    loop = Loop(ttypes=('input', 'output', 'weight_grad'), stats='full')
    for i in range(12):
        loss = loop.model(batch(nan if i==5 else 1)).sum()
        loop.te.log(loss=loss)
        loss.backward()
        if i==5: loop.opt.zero_grad(); continue
        loop.step()
    loop.te.close()
    assert 'not finite' not in ' '.join(str(w.message) for w in recwarn)
    assert not any('NaN' in t or 'not finite' in t for t in diagnose(loop.te).text)
    assert {r['step'] for r in loop.te.t.lines() if r.get('nan')}=={4}


@pytest.mark.parametrize('ends', ENDS)
def test_a_loop_that_combines_copies_of_gradients_refuses_nothing_from_the_second_step_on(ends):
    "Gradients of each pass are copied and cleared, as in PCGrad. Their sum is assigned to .grad for the optimizer."
    loop = Loop(ends)
    for _ in range(3):
        copies = []
        for v in 1, 2, 3:
            loop.backward(v)
            copies.append([p.grad.clone() for p in loop.model.parameters()])
            loop.opt.zero_grad()
        for p,*grads in zip(loop.model.parameters(), *copies, strict=True): p.grad = sum(grads)
        loop.step()
    first = int(ends=='te.step') # with te.step(), `Loop` first ends an empty step, which has no number
    rows = [r for r in loop.rows() if r[0]>0]
    assert rows and all(r[1:]==(None, None, None, 2.) for r in rows), (first, rows)
    assert not [r for r in loop.te.close()['remarks'] if 'belong' in r]


def test_clipped_gradients_are_no_copies():
    "Clipping changes gradients in place. A batch that is refused after a clipping is still found."
    loop = Loop()
    for values in (1, nan), (2,):
        for v in values:
            loop.backward(v)
            if v!=v: loop.opt.zero_grad(); continue
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), .1)
        loop.step() if values==(2,) else loop.opt.zero_grad()
    loop.backward(nan)
    loop.opt.zero_grad()
    loop.train(3)
    assert [r[1] for r in loop.rows()].count('refused')>=2 and any('belong' in r for r in loop.te.close()['remarks'])


@pytest.mark.parametrize('ends', ENDS)
def test_a_gradient_penalty_that_no_backward_of_the_output_follows_is_a_micro_batch(ends):
    "The output is linear in the input, so the second backward reaches only the weights, not the output of the pass."
    loop = Loop(ends)
    for _ in range(2):
        x = batch(0).requires_grad_()
        g, = torch.autograd.grad(loop.model(x).sum(), x, create_graph=True)
        (loop.model(batch(2)).sum()+g.square().sum()).backward()
        loop.step()
    loop.te.close()
    assert loop.rows()==[row(0, 1), row(1, 1)]


def test_two_batches_that_are_refused_at_once_keep_their_own_rows():
    "Results of a user's function cannot be merged, so each refused pass has its own row."
    loop = Loop(stats=lambda x: {'mean': x.float().mean().item()}, ttypes=('input',))
    loop.train(0)
    loop.backward(100, 200)
    loop.opt.zero_grad()
    loop.train(1)
    loop.te.close()
    got = loop.rows()
    assert [r[-1] for r in got if r[1]=='refused']==[100, 200] and [(r[0], r[-1]) for r in got if r[1] is None]==[(0, 0), (1, 1)], got


def test_outputs_without_a_gradient_get_no_hook():
    class Both(nn.Module):
        def __init__(self): super().__init__(); self.l = nn.Linear(1, 1)
        def forward(self, x): return {'y': self.l(x), 'mask': x>0, 'detached': x.detach()}
    model = Both()
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt, ttypes=('input',), stats=['mean']) as te:
        for v in 1., nan, 3.:
            model(batch(v))['y'].sum().backward()
            if v==v: opt.step()
            opt.zero_grad()
    assert [(r['step'], r.get('phase')) for r in lines(te) if r['module']=='model(Both)']==[(0, None), (0, 'refused'), (1, None)]


def test_models_whose_parameters_fsdp1_replaces_are_left_out():
    from torchember.recorder.refused import RefusedPasses
    class FullyShardedDataParallel(nn.Module):
        def __init__(self, inner): super().__init__(); self.inner = inner
    passes,plain = RefusedPasses(),nn.Sequential(nn.Linear(1, 1))
    for model,n in ((plain, 2), (nn.Sequential(FullyShardedDataParallel(plain)), 0)):
        passes.choose_parameters(model)
        assert len(passes.parameters)==n
