"Recorded gradients, optimizer states and updates are compared with autograd and with values computed by hand."
from tensor_rows import df, lines
import copy
from functools import partial

import oracle
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from torchember import torchEmber
from torchember.capture import private_torch
from torchember.measure.summary import derived

ALL = ('input', 'output', 'weight', 'weight_grad', 'input_grad', 'output_grad', 'optimizer', 'update')
says = partial(oracle.says, rel=1e-5)


def find(rows, module, ttype, tname=None, **where):
    where = dict(where, ttype=ttype, **({'tname': tname} if tname else {}))
    got = [r for r in rows if r['module'].endswith(module) and all(r[k]==v for k,v in where.items())]
    assert len(got)==1, (module, ttype, tname, where, len(got))
    return got[0]


def gradients(model, x, names):
    "Compute the gradients of the outputs of the modules `names` and of the model's input with autograd.grad. Return a dict."
    kept = {}
    def keep(n):
        def hook(m, i, o): kept[n] = o
        return hook
    hs = [model.get_submodule(n).register_forward_hook(keep(n)) for n in names]
    x = x.clone().requires_grad_()
    loss = model(x).square().sum()
    for h in hs: h.remove()
    gs = torch.autograd.grad(loss, [*kept.values(), x])
    return dict(zip([*kept, 'x'], gs, strict=True))


class Net(nn.Module):
    "A residual model that ends with an in-place ReLU. `mode`: None, or `use_reentrant` of a checkpoint around its first layer."
    def __init__(self, mode=None):
        super().__init__()
        self.a,self.b,self.act,self.mode = nn.Linear(4, 4),nn.Linear(4, 4),nn.ReLU(inplace=True),mode

    def forward(self, x):
        y = self.a(x) if self.mode is None else torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=self.mode)
        return self.act(self.b(y)+x)


def graphs_take_hooks():
    if not private_torch.hooks_in_graphs: pytest.skip('compiled code of this torch cannot report the gradients of activations')


@pytest.mark.parametrize('how', ['eager', 'reentrant', 'checkpoint', 'aot_eager', 'inductor', 'compiled checkpoint'])
def test_activation_gradients(how):
    if how in ('aot_eager', 'inductor', 'compiled checkpoint'): graphs_take_hooks()
    torch.manual_seed(0)
    model = Net({'reentrant': True, 'checkpoint': False, 'compiled checkpoint': False}.get(how))
    x = torch.randn(3, 4)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    want = gradients(plain, x, ['a', 'b'])
    te = torchEmber(model, ttypes=('output_grad', 'input_grad'))
    f = model
    if how in ('aot_eager', 'inductor', 'compiled checkpoint'):
        torch._dynamo.reset()
        f = torch.compile(model, backend='aot_eager' if how=='compiled checkpoint' else how, fullgraph=True)
    f(x.clone().requires_grad_()).square().sum().backward()
    te.step()
    rows = lines(te)
    says(find(rows, '.a(Linear)', 'output_grad', 'output_0'), want['a'])
    says(find(rows, '.b(Linear)', 'output_grad', 'output_0'), want['b'])
    says(find(rows, '.b(Linear)', 'input_grad', 'input'), want['a'])
    says(find(rows, 'model(Net)', 'input_grad', 'x'), want['x'])
    assert len(find(rows, '.act(ReLU)', 'output_grad'))
    assert te.close()['errors']==0


@pytest.mark.parametrize('compiled', [False, True])
def test_calls_are_told_apart(compiled):
    "A layer is called three times. Each gradient row belongs to its own call, although the backward runs in reverse order."
    if compiled: graphs_take_hooks()
    class Loop(nn.Module):
        def __init__(self): super().__init__(); self.l = nn.Linear(3, 3)
        def forward(self, x):
            for _ in range(3): x = self.l(x).tanh()
            return x
    torch.manual_seed(0)
    model,x,kept = Loop(),torch.randn(2, 3),[]
    h = model.l.register_forward_hook(lambda m, i, o: kept.append(o))
    want = torch.autograd.grad(model(x).square().sum(), kept)
    h.remove()
    te = torchEmber(model, ttypes='output_grad')
    torch._dynamo.reset()
    f = torch.compile(model, backend='aot_eager', fullgraph=True) if compiled else model
    f(x).square().sum().backward()
    te.step()
    for i,w in enumerate(want): says(find(lines(te), '.l(Linear)', 'output_grad', call=i), w)
    te.close()


optimizers = dict(adamw=lambda ps: torch.optim.AdamW(ps, 1e-2), fused=lambda ps: torch.optim.AdamW(ps, 1e-2, fused=True),
    foreach=lambda ps: torch.optim.Adam(ps, foreach=True), momentum=lambda ps: torch.optim.SGD(ps, .1, momentum=.9), rmsprop=torch.optim.RMSprop)


@pytest.mark.parametrize('make', optimizers.values(), ids=optimizers)
def test_states_and_updates(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    opt = make([{'params': model[0].parameters()}, {'params': model[2].parameters(), 'lr': 1e-3}])
    te = torchEmber(model, optimizer=opt, ttypes=ALL)
    for step in range(3):
        opt.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        before = [p.detach().clone() for p in model.parameters()]
        grads = [p.grad.clone() for p in model.parameters()]
        opt.step()
        opt.zero_grad() # the gradients were recorded in opt.step(), so clearing them has no effect
        rows = [r for r in lines(te) if r['step']==step]
        where = [('.0(Linear)', 0), ('.0(Linear)', 1), ('.2(Linear)', 0), ('.2(Linear)', 1)]
        for (module,i),p,old,g in zip(where, model.parameters(), before, grads, strict=True):
            says(find(rows, module, 'weight', f'weight_{i}'), old)
            says(find(rows, module, 'weight_grad', f'grad_{i}'), g)
            u = find(rows, module, 'update', f'update_{i}')
            says(u, p.detach()-old)
            assert u['ratio']==pytest.approx(((p.detach()-old).norm()/old.norm()).item(), rel=1e-4)
            for k,v in opt.state[p].items():
                if k!='step' and v is not None: says(find(rows, module, 'optimizer', f'{k}_{i}'), v)
    hooks = opt._optimizer_step_pre_hooks,opt._optimizer_step_post_hooks
    te.close()
    assert not hooks[0] and not hooks[1]


def test_accumulation_is_one_step():
    "With four micro-batches and one optimizer step, the rows equal the statistics of the whole batch."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    opt,x = torch.optim.SGD(model.parameters(), .1),torch.randn(8, 4)
    whole = copy.deepcopy(model)
    kept = []
    whole[0].register_forward_hook(lambda m, i, o: kept.append(o))
    out = whole(x)
    out_grad, = torch.autograd.grad(out.square().sum(), kept, retain_graph=True)
    out.square().sum().backward()
    te = torchEmber(model, optimizer=opt, ttypes=ALL)
    for part in x.split(2): model(part).square().sum().backward()
    opt.step()
    rows = lines(te)
    assert {r['step'] for r in rows}=={0}
    for ttype,want in (('output', kept[0]), ('output_grad', out_grad)):
        r = find(rows, '.0(Linear)', ttype)
        assert r['shape']==[2, 3]
        says({**r, 'shape': [8, 3]}, want)
    says(find(rows, '.0(Linear)', 'weight_grad', 'grad_0'), whole[0].weight.grad)
    te.close()


@pytest.mark.parametrize('clip', [False, True])
@pytest.mark.parametrize('fused', [False, True])
def test_scaler(clip, fused):
    "Gradients of weights and activations are recorded without the scale of the loss. A step that the scaler skips is marked."
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    opt,scaler = torch.optim.AdamW(model.parameters(), fused=fused),torch.amp.GradScaler('cpu', init_scale=1024.)
    te = torchEmber(model, optimizer=opt, scaler=scaler, ttypes=ALL)
    for factor in (1., float('inf'), 1.):
        opt.zero_grad()
        x = torch.ones(3, 4)
        scaler.scale(model(x).sum()*factor).backward()
        if clip: scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    rows = lines(te)
    for s in (0, 2):
        says(find(rows, 'model(Linear)', 'weight_grad', 'grad_0', step=s), torch.full((2, 4), 3.))
        says(find(rows, 'model(Linear)', 'output_grad', step=s), torch.ones(3, 2))
        assert not any(r.get('skipped') for r in rows if r['step']==s)
    skipped = [r for r in rows if r['step']==1]
    assert skipped and all(r['skipped'] is True for r in skipped)
    assert {r['step'] for r in rows}=={0, 1, 2}
    te.close()
    assert 'step' not in scaler.__dict__


@pytest.mark.parametrize('scale', [2.**16, 3.])
def test_every_statistic_of_scaled_gradients(scale):
    "Each statistic is corrected for the scale of the loss, so it equals the statistic of the same training without a scaler."
    names = [*derived, 'exponents']
    def rows(scaler):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
        # a fused optimizer unscales inside its step, so the recorder reads scaled gradients
        opt = torch.optim.AdamW(model.parameters(), fused=True)
        with torchEmber(model, optimizer=opt, scaler=scaler, ttypes=('weight_grad', 'output_grad', 'input_grad'), stats=names) as te:
            loss = model(torch.randn(7, 6)).exp().sum()
            (scaler.scale(loss) if scaler else loss).backward()
            scaler.step(opt) if scaler else opt.step()
        return lines(te)
    plain,scaled = rows(None),rows(torch.amp.GradScaler('cpu', init_scale=scale))
    assert len(plain)==len(scaled)>=8 and any(abs(r['skew'])>.5 for r in plain)
    for p,s in zip(plain, scaled, strict=True):
        assert (p['module'], p['tname'])==(s['module'], s['tname'])
        for n in derived:
            rounding = 1e-5*p['abs_max'] if n in ('mean', 'finite_mean') else 0
            assert s[n]==pytest.approx(p[n], rel=1e-4, abs=rounding, nan_ok=True), (n, p['tname'])
        if scale==2**16: assert s['exponents']==p['exponents']


def test_two_optimizers():
    "In a GAN, a step ends when both optimizers have stepped. Each gradient row is the gradient that its optimizer used."
    torch.manual_seed(0)
    class Gan(nn.Module):
        def __init__(self): super().__init__(); self.g,self.d = nn.Linear(2, 3),nn.Linear(3, 1)
        def forward(self, z): return self.d(self.g(z))
    model = Gan()
    og,od = torch.optim.Adam(model.g.parameters()),torch.optim.Adam(model.d.parameters())
    te = torchEmber(model, optimizer=[od, og], ttypes=ALL)
    for step in range(3):
        od.zero_grad()
        (model.d(torch.randn(4, 3)).mean()-model.d(model.g(torch.randn(4, 2)).detach()).mean()).backward()
        gd = model.d.weight.grad.clone()
        od.step()
        og.zero_grad()
        model(torch.randn(4, 2)).mean().backward()
        gg = model.g.weight.grad.clone()
        og.step()
        rows = [r for r in lines(te) if r['step']==step]
        says(find(rows, '.d(Linear)', 'weight_grad', 'grad_0'), gd)
        says(find(rows, '.g(Linear)', 'weight_grad', 'grad_0'), gg)
        assert len([r for r in rows if r['ttype']=='optimizer'])==8
    assert {r['step'] for r in lines(te)}=={0, 1, 2}
    te.close()


def test_bit_identical_with_everything_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))
    plain = copy.deepcopy(model)
    xs = [torch.randn(3, 1, 8, 8) for _ in range(4)]
    for m in (plain, model):
        opt = torch.optim.AdamW(m.parameters(), 1e-2)
        te = torchEmber(m, optimizer=opt, ttypes=ALL, stats='full', on_error='raise') if m is model else None
        for x in xs:
            opt.zero_grad()
            m(x).square().mean().backward()
            opt.step()
        if te: te.close()
    assert all(torch.equal(a, b) for a,b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))


def test_a_leaf_that_lives_on():
    "An input that lives longer than a step (for example because it is optimized) keeps no hook of torchember."
    model,x = nn.Linear(3, 1),torch.ones(2, 3, requires_grad=True)
    te = torchEmber(model, ttypes='input_grad')
    for _ in range(5):
        model(x).sum().backward()
        te.step()
    assert len(lines(te))==5 and not x._backward_hooks
    te.close()


def test_leaves_that_go_in_by_two_passes_before_one_backward():
    "Two passes with different leaf inputs have one common backward. The gradients of both inputs are recorded."
    model,a,b = nn.Linear(3, 2),*(torch.randn(4, 3, requires_grad=True) for _ in 'ab')
    opt,want = torch.optim.SGD(model.parameters(), lr=.1),[]
    with torchEmber(model, optimizer=opt, ttypes='input_grad') as te:
        for _ in range(2):
            a.grad = b.grad = None
            (model(a).sum()+model(b).square().sum()).backward()
            opt.step()
            want.append(torch.cat([a.grad, b.grad])) # the passes of a step are merged into one row
    rows = lines(te)
    assert [(r['step'], r['call'], r['tname']) for r in rows]==[(0, 0, 'input'), (1, 0, 'input')]
    for r,g in zip(rows, want, strict=True): says({**r, 'shape': [8, 3]}, g)


def penalty(model, x, between):
    g, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (g.norm(dim=1)-1).square().mean()+between()

def twice(model, x, between):
    y = model(x).square().sum()
    y.backward(retain_graph=True)
    between()
    return y

def evaluated(model):
    with torch.no_grad(): model.eval()(torch.randn(5, 3))
    model.train()
    return 0.

@pytest.mark.parametrize('between', [lambda m: 0., lambda m: m(torch.randn(5, 3)).mean(), evaluated], ids=['nothing', 'a pass', 'an evaluation'])
@pytest.mark.parametrize('body', [penalty, twice])
def test_the_second_gradient_of_a_leaf_comes_after_another_pass(body, between):
    "An input gets two gradients, as with a gradient penalty. Each has a row of the right step and call."
    torch.manual_seed(0)
    model,want,leaves = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)),[],[]
    opt = torch.optim.SGD(model.parameters(), .1)
    with torchEmber(model, optimizer=opt, ttypes='input_grad', stats=['mean']) as te:
        for s in range(2):
            x = torch.randn(4, 3, requires_grad=True)
            leaves.append(x)
            h = x.register_hook(lambda g, s=s: want.append((s, g.mean().item())))
            opt.zero_grad()
            body(model, x, lambda: between(model)).backward()
            opt.step()
            h.remove()
            assert not x._backward_hooks
        sum(model(x).sum() for x in leaves).backward() # an input of an earlier step is used again in this step
    want = [(s, 0, b or None, pytest.approx(m, abs=1e-7)) for i,(s,m) in enumerate(want) for b in [i%2]]
    for name in ('model(Sequential)', '.0(Linear)'): # the model and its first layer get the same tensor
        rows = [r for r in lines(te) if r['module'].endswith(name)]
        assert [(r['step'], r['call'], r.get('backward'), r['mean']) for r in rows if r['step']<2]==want
        assert [(r['step'], r.get('backward')) for r in rows if r['step']>1]==[(2, None)]


@pytest.mark.parametrize('compiled', [False, True])
def test_probe_and_variable(compiled):
    class Probed(nn.Module):
        def __init__(self): super().__init__(); self.l = nn.Linear(3, 2)
        def forward(self, x):
            scores = self.l(x)*2
            te.probe('scores', scores)
            return scores
    model = Probed()
    te = torchEmber(model, every=2)
    v = te.watch_tensor('temperature', torch.full((3,), 2., requires_grad=True))
    torch._dynamo.reset()
    f = torch.compile(model, backend='aot_eager', fullgraph=True) if compiled else model
    for _ in range(4):
        x = torch.randn(4, 3)
        want = f(x)
        (want*v.sum()).sum().backward()
        te.step()
    rows = lines(te)
    assert [r['step'] for r in rows if r['ttype']=='probe']==[0, 2]
    assert [r['mean'] for r in rows if r['tname']=='temperature' and r['ttype']=='weight']==[2, 2]
    assert len([r for r in rows if r['tname']=='temperature' and r['ttype']=='weight_grad'])==2
    te.close()
    te.probe('scores', torch.ones(1)) # after te.close(), a probe records nothing


def test_disable(monkeypatch):
    monkeypatch.setenv('TORCHEMBER_DISABLE', '1')
    model = nn.Linear(2, 1)
    with torchEmber(model, optimizer=torch.optim.SGD(model.parameters(), .1)) as te:
        model(torch.ones(1, 2)).sum().backward()
        te.step(); te.probe('x', torch.ones(1)); te.log_model()
    assert '_torchember' not in model.__dict__ and lines(te)==[] and not te.armed


def test_bad_optimizer():
    model = nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), .1)
    for kwargs,word in ((dict(optimizer='adam'), 'got a str'), (dict(ttypes='update'), 'needs optimizer='),
            (dict(scaler=torch.amp.GradScaler('cpu')), 'needs optimizer='), (dict(optimizer=opt, scaler=3), 'GradScaler')):
        with pytest.raises((TypeError, ValueError), match=word): torchEmber(model, **kwargs)


class Outside:
    "A model of three layers, and a training whose optimizers get only some of the parameters."
    def __init__(self, given, scaler=None, every=1, **kw):
        torch.manual_seed(0)
        self.m = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        self.os = [torch.optim.SGD([p for i in which for p in self.m[i].parameters()], .1) for which in given]
        self.te = torchEmber(self.m, optimizer=self.os, ttypes=('weight', 'weight_grad'), stats=['l2'], scaler=scaler, every=every, on_error='raise', **kw)
        self.want = []

    def note(self, step, *layers):
        for i in layers:
            for k,p in enumerate(self.m[i].parameters()): self.want.append((step, f'{i}', f'grad_{k}', 0, p.grad.double().norm().item()))

    def rows(self):
        self.te.close()
        d = df(self.te)
        d = d[d.ttype=='weight_grad']
        assert not len(d) or not d.duplicated(['step', 'path', 'tname']).any() # each parameter has one row per step
        return sorted(zip(d.step, d.path, d.tname, d['call'], d.l2, strict=True))

    def check(self):
        got = self.rows()
        assert [g[:4] for g in got]==[w[:4] for w in sorted(self.want)]
        assert [g[4] for g in got]==pytest.approx([w[4] for w in sorted(self.want)], rel=1e-6)


def test_gradients_outside_the_optimizer():
    "Gradients of a parameter without an optimizer are recorded once per step. A frozen parameter has no gradient row."
    t = Outside([[2]])
    for step in range(4):
        if step==3: t.m[0].requires_grad_(False)
        t.m(torch.randn(5, 2)).square().sum().backward()
        t.note(step, *((0, 2) if step<3 else (2,)))
        t.os[0].step()
        t.m.zero_grad()
    t.check()


def test_gradients_outside_that_pile_up():
    "`optimizer.zero_grad()` does not clear gradients of other parameters. Their recorded gradients add up over the steps."
    t = Outside([[0]])
    for step in range(3):
        t.m(torch.randn(5, 2)).square().sum().backward()
        t.note(step, 0, 2)
        t.os[0].step()
        t.os[0].zero_grad()
    assert t.m[2].weight.grad is not None
    t.check()


def test_gradients_outside_with_a_scaler():
    "Gradients of parameters without an optimizer are recorded without the scale, also if scaler.unscale_ was not called."
    for unscaled in (False, True):
        s = torch.amp.GradScaler('cpu', init_scale=1000.)
        t = Outside([[2]], s)
        for step in range(2):
            t.m.zero_grad()
            s.scale(t.m(torch.randn(5, 2)).square().sum()).backward()
            scale = s.get_scale()
            t.note(step, 0, 2)
            t.want = [(*w[:4], w[4]/scale) if w[0]==step else w for w in t.want]
            if unscaled: s.unscale_(t.os[0])
            s.step(t.os[0])
            s.update()
        t.check()


@pytest.mark.parametrize('set_to_none', [True, False])
def test_optimizers_in_turn(set_to_none):
    "In a GAN, the second loss also reaches parameters of the first optimizer. Recorded is the gradient that each optimizer used."
    t = Outside([[0], [2]])
    rest = nn.Parameter(torch.ones(2))
    t.m.register_parameter('rest', rest)
    t.te.rearm()
    for step in range(3):
        for i in (0, 2):
            t.m.zero_grad(set_to_none)
            (t.m(torch.randn(5, 2)*rest).square().sum()*(i+1)).backward()
            t.note(step, i)
            # a parameter without an optimizer: its last gradient of the step is recorded
            if i==2: t.want.append((step, '', 'grad_0', 0, rest.grad.double().norm().item()))
            t.os[i//2].step()
    t.check()


def test_gradients_outside_off_schedule():
    t = Outside([[2]], every=2)
    for step in range(4):
        t.m(torch.randn(5, 2)).square().sum().backward()
        if step%2==0: t.note(step, 0, 2)
        t.os[0].step()
        t.m.zero_grad()
    t.check()


@pytest.mark.parametrize('scale', [1024., 1000., 3., 1/3, 7e4])
def test_exponents_do_not_depend_on_the_scale(scale):
    "With a scaled loss, all gradient statistics equal the unscaled ones, also if the scale is not a power of two."
    def run(scale):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
        o,s = torch.optim.SGD(m.parameters(), .1),torch.amp.GradScaler('cpu', init_scale=scale, enabled=scale!=1)
        te = torchEmber(m, optimizer=o, scaler=s, stats='numerics', ttypes=('output_grad', 'input_grad', 'weight_grad'), on_error='raise')
        for _ in range(2):
            for _ in range(2): s.scale((m(torch.randn(64, 3))*1.01).sum()).backward() # two micro-batches per step
            s.step(o)
            s.update()
            o.zero_grad()
        te.close()
        return df(te).drop(columns='ts').to_dict('records')
    plain,scaled = run(1.),run(scale)
    assert len(plain)==len(scaled)==2*(4+2+4) # 10 rows per step: the model's input has no gradient
    for p,s in zip(plain, scaled, strict=True):
        assert {k: v for k,v in p.items() if not isinstance(v, float)}=={k: v for k,v in s.items() if not isinstance(v, float)}, (p, s)
        for k,v in p.items():
            if isinstance(v, float): assert s[k]==pytest.approx(v, rel=1e-5, abs=1e-9, nan_ok=True), (k, p, s)


@pytest.mark.parametrize('later', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_counted_without_the_scale(dtype, later):
    "The scale may be a tensor that is known only on the device, or 1/3, as in an average over three processes."
    from torchember import get_stats
    from torchember.measure.arena import Arena
    from torchember.measure.tap import observe
    torch.manual_seed(0)
    for scale in (torch.tensor(3.), 3., 1/3, torch.tensor(512.), 512.):
        g = torch.randn(1000)*2.**torch.randint(-9, 5, (1000,))
        g[:3] = torch.tensor([0., 1., -2.])
        x = (g*scale).to(dtype)
        a = Arena()
        observe(x, a.tap('g', ['exponents', 'numel', 'rms', 'zero_frac']), scale=scale, later=later)
        [row] = a.take().rows()
        want = get_stats(x.double()/float(scale), ['exponents', 'numel', 'rms', 'zero_frac'])
        assert row['dtype']==str(dtype)[6:] and row['stats'].pop('rms')==pytest.approx(want.pop('rms'), rel=1e-6) and row['stats']==want


def test_no_copy_of_a_gradient_waits(monkeypatch):
    "On a GPU, gradients are read at the end of the step. A divided copy is read at once, so that copies need no memory until then."
    from torchember.measure import tap
    from torchember.measure.arena import Arena
    monkeypatch.setattr(tap, 'list_kernels', lambda x, wanted: True)
    a,x = Arena(),torch.tensor([3., 6., 12.])
    tap.observe(x, a.tap('divided', ['mean', 'exponents']), scale=torch.tensor(3.), later=True)
    assert not a.unread
    row = a.take().rows()[0]
    assert row['key']=='divided' and row['stats']['mean']==pytest.approx(7/3) and sum(row['stats']['exponents'])==3
    tap.observe(x, a.tap('as it is', ['mean']), scale=torch.tensor(3.), later=True)
    assert [(p.data_ptr(), s) for p,_,s in a.unread.by_row.values()]==[(x.data_ptr(), 3)]


@pytest.mark.parametrize('zero', [False, True])
def test_whether_gradients_are_zero_is_asked_once(monkeypatch, tmp_path, zero):
    "The check must wait for the device, so it runs only once in a run."
    from torchember.recorder import parameters
    asked,all_zero = [],parameters.all_zero
    monkeypatch.setattr(parameters, 'all_zero', lambda states: asked.append(1) or all_zero(states))
    net = nn.Linear(3, 2)
    with torchEmber(net, home=tmp_path) as te:
        for _ in range(5):
            net(torch.randn(4, 3)).sum().backward()
            if zero: net.zero_grad(set_to_none=False)
            te.step()
    assert asked==[1]
