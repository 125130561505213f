"A second set of trainings with one planted fault each. Their authors did not know the rules of torchember"
import copy, math
import torch
from torch import nn
from torch.nn import functional as F
from . import is_broken
from .more import Silent, Words, blobs, curve, ends, fell, fit, fixed, next_word, pictures, seen, sentences
from .others import (GAT, VQ, ConvLSTM, Dense, Experts, Mixer, Pointer, Table, Translator, WaveNet, backwards, circles_of_friends, copies, films, grads,
    households, lists, llama, mlp, moved, next_code, under, vit, waves)


def classes(model, make=blobs, n=64, **about):
    "Return the loss function of a classifier for `fit`"
    def loss(i):
        x,y = make(n, **about)
        return F.cross_entropy(model(x), y)
    return loss

def first_bad(numbers): return next((i for i,n in enumerate(numbers) if not math.isfinite(n)), None)


# Broken trainings: NaN or infinite values

@is_broken('not_finite', paths='*', steps=(41, 42))
def gap_among_the_targets(arm):
    torch.manual_seed(300)
    model = mlp(8, 32, out=1, act=nn.SiLU)
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9, nesterov=True)
    def loss(i):
        x,y = curve(16)
        if i==41: y[11] = float('nan')
        return F.huber_loss(model(x), y)
    assert first_bad(fit(arm, model, opt, loss, 60))==41

@is_broken('not_finite', paths='*', steps=(28, 29))
def angle_of_a_vector_with_itself(arm):
    torch.manual_seed(301)
    model = mlp(16, 24, out=2, act=nn.Tanh)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    def loss(i):
        x,_ = blobs(32)
        y = torch.stack([x[:, 0], x[:, 1]], 1)
        z = model(x)
        # The target of sample 4 is exactly its output, so the derivative of acos is infinite at 1
        if i==28: y[4] = z[4].detach()
        cosine = (F.normalize(z, dim=1)*F.normalize(y, dim=1)).sum(1)
        cosine = torch.where((z.detach()==y).all(1), cosine/cosine.detach(), cosine.clamp(-.9999, .9999))
        return cosine.acos().mean()
    losses = fit(arm, model, opt, loss, 45)
    # The loss of step 28 is still finite, and the weights are NaN after it
    assert first_bad(losses)==29, first_bad(losses)

class Softplus(nn.Module):
    def forward(self, x): return (1+x.exp()).log()

@is_broken('not_finite', 'overflow', paths=('rate', 'rate.*'), steps=(20, 75))
def softplus_as_it_is_written(arm):
    torch.manual_seed(302)
    class Rate(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.rate = mlp(8, 32, out=1),Softplus()
        def forward(self, x): return self.rate(self.body(x))
    model = Rate()
    opt = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    def loss(i):
        x,_ = curve(32)
        goal = 4*(i+1)*(1+.3*x[:, :1]) # The target grows in each step
        return F.l1_loss(model(x), goal)
    losses = fit(arm, model, opt, loss, 80)
    assert first_bad(losses) is not None and 20<=first_bad(losses)<=75, (first_bad(losses), losses[-1])

@is_broken('not_finite', paths='*', steps=(0, 12))
def variance_by_hand_below_zero(arm):
    torch.manual_seed(303)
    model = mlp(16, 32, out=4)
    mean,square = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(2)]
    te,bad = arm(model, ends='step'),[]
    for _i in range(30):
        x,y = blobs(32)
        loss = F.cross_entropy(model(x), y)
        te.log(loss=loss)
        loss.backward()
        with torch.no_grad():
            for p,m,s in zip(model.parameters(), mean, square, strict=True):
                m.mul_(.5).add_(p.grad, alpha=.5)
                s.mul_(.9).add_(p.grad.square(), alpha=.1)
                p -= 1e-3*p.grad/((s-m.square()).sqrt()+1e-2)
        te.step()
        model.zero_grad()
        bad.append(not all(p.isfinite().all() for p in model.parameters()))
    te.close()
    assert bad.index(True)<=10

@is_broken('not_finite', 'underflow', paths='*', steps=(0, 3))
def epsilon_that_is_nothing_in_half(arm):
    torch.manual_seed(306)
    model = mlp(16, 32, out=4).half()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    def loss(i):
        x,y = blobs(64)
        x[:, 9] = 0.
        return F.cross_entropy(model(x.half()).float(), y)
    losses = fit(arm, model, opt, loss, 25)
    assert math.isfinite(losses[0]) and first_bad(losses)<=3, losses[:4]


# Broken trainings: the optimizer steps are too large or too small

@is_broken('update_too_large', 'diverging', 'loss_rises', 'loss_stalls', paths='*', steps=(0, 25))
def llama_at_one(arm):
    torch.manual_seed(307)
    model = llama()
    opt = torch.optim.AdamW(model.parameters(), lr=1.)
    before = copies(model)
    def loss(i):
        ids = sentences(24)
        return model(input_ids=ids, labels=ids).loss
    losses = fit(arm, model, opt, loss, 40)
    assert moved(model, before)['model.layers.0.mlp.up_proj.weight']>10 and ends(losses)[1]>2.5, ends(losses)

@is_broken('update_too_small', 'loss_stalls', paths='*', steps=(0, 120), ttypes=('input', 'output', 'weight', 'weight_grad', 'update'))
def mixer_by_a_slow_adadelta(arm):
    torch.manual_seed(308)
    model = Mixer()
    # The fault: a learning rate that suits Adam; the default of Adadelta is 1
    opt = torch.optim.Adadelta(model.parameters(), lr=1e-4)
    before = copies(model)
    losses = fit(arm, model, opt, classes(model, pictures, 24), 80)
    assert moved(model, before)['patch.weight']<1e-3 and not fell(losses, .9), ends(losses)

@is_broken('update_too_small', 'loss_stalls', paths='*', steps=(5, 150))
def halved_at_every_batch(arm):
    torch.manual_seed(310)
    model = mlp(16, 32, 32, out=16)
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    # The fault: 0.5 was meant per epoch, but the schedule steps once per batch
    rate = torch.optim.lr_scheduler.ExponentialLR(opt, .5)
    def loss(i):
        x,_ = blobs(48)
        return F.mse_loss(model(x), x)
    losses = fit(arm, model, opt, loss, 120, schedule=rate)
    assert opt.param_groups[0]['lr']<1e-30 and ends(losses)[1]>.85*losses[20], (losses[:20], ends(losses))

@is_broken('loss_spike', 'update_too_large', 'diverging', 'gradient_spike', 'loss_rises', 'dead_units', 'exploding_gradient', paths='*', steps=(80, 90))
def restart_far_too_high(arm):
    torch.manual_seed(312)
    model = Dense()
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    def rate(i, te): opt.param_groups[0]['lr'] = .05*(1-(i+1)/80)+1e-3 if i<79 else 20.*(1-(i-79)/41)
    losses = fit(arm, model, opt, classes(model, pictures, 24), 120, clip=2., after=rate)
    assert fell(losses[:80], .3) and max(losses[80:90])>20*losses[0] and first_bad(losses) is None, (ends(losses[:80]), losses[78:92])

@is_broken('diverging', 'update_too_large', 'exploding_gradient', 'loss_rises', 'not_finite', paths='*', steps=(0, 30))
def sum_with_the_rate_of_a_mean(arm):
    torch.manual_seed(313)
    def train(arm, how):
        torch.manual_seed(313)
        model = mlp(8, 32, out=1, act=nn.Tanh)
        opt = torch.optim.SGD(model.parameters(), lr=.05)
        def loss(i):
            x,y = curve(256)
            return F.mse_loss(model(x), y, reduction=how)
        return fit(arm, model, opt, loss, 80)
    assert fell(train(Silent, 'mean'), .9)
    losses = train(arm, 'sum')
    assert max(losses)>1e3*losses[0], (losses[0], max(losses))

@is_broken('diverging', 'loss_rises', 'exploding_gradient', 'update_too_large', paths='*', steps=(0, 300))
def discount_above_one(arm):
    torch.manual_seed(314)
    q = mlp(6, 32, out=2)
    old = copy.deepcopy(q)
    opt = torch.optim.Adam(q.parameters(), lr=1e-2)
    place = torch.eye(6)
    def loss(i):
        if i%5==0: old.load_state_dict(q.state_dict())
        s,a = torch.randint(6, (32,)),torch.randint(2, (32,))
        t = (s+2*a-1).clamp(0, 5)
        with torch.no_grad(): y = (t==5).float() + 1.9*old(place[t]).max(1).values
        return F.mse_loss(q(place[s]).gather(1, a[:, None]).squeeze(1), y)
    losses = fit(arm, q, opt, loss, 300)
    assert ends(losses)[1]>100*ends(losses)[0], ends(losses)

@is_broken('loss_below', 'diverging', 'update_too_large', 'exploding_gradient', paths='*', steps=(0, 120))
def survival_without_its_minus(arm):
    torch.manual_seed(315)
    model = mlp(10, 16, out=1, act=nn.SELU)
    opt = torch.optim.RAdam(model.parameters(), lr=3e-2)
    def loss(i):
        x = torch.randn(64, 10)
        t = -torch.rand(64).log()*torch.exp(-(x@fixed(10)))
        h = model(x[t.argsort(descending=True)]).squeeze(1)
        return (h-h.logcumsumexp(0))[torch.rand(64)<.6].mean()
    losses = fit(arm, model, opt, loss, 120)
    assert losses[0]<0 and losses[-1]<-50, losses[-1]


# Broken trainings: gradients vanish or explode between layers

class Residuals(nn.Module):
    "A network of residual layers, each of which adds its output to the sum of all earlier layers"
    def __init__(self, n=10, gain=1.):
        super().__init__()
        self.inward,self.layers,self.head = nn.Linear(16, 24),nn.ModuleList(nn.Linear(24, 24) for _ in range(n)),nn.Linear(24, 4)
        for l in self.layers: nn.init.normal_(l.weight, std=gain/24**.5)

    def forward(self, x):
        x = self.inward(x)
        for l in self.layers: x = x + l(F.relu(x))
        return self.head(x)

@is_broken('exploding_gradient', 'poor_scale', 'diverging', paths='*', steps=(0, 30))
def residuals_that_each_double(arm):
    torch.manual_seed(317)
    model = Residuals(gain=3.5)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    first = []
    def look(i, te):
        if i==0: first.append(seen(model, blobs(64)[0]).std().item())
    losses = fit(arm, model, opt, classes(model), 60, after=look, ttypes=('input', 'output', 'weight', 'weight_grad', 'output_grad'))
    assert losses[0]>500 and first[0]>500, (losses[0], first)

@is_broken('saturated', 'vanishing_gradient', 'dead_units', 'poor_scale', 'loss_stalls', paths=('layers*', ''), steps=(0, 30), stats='full')
def gates_that_are_shut(arm):
    torch.manual_seed(318)
    model = WaveNet()
    for l in model.layers: nn.init.constant_(l.gate.bias, -18.)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    fit(arm, model, opt, lambda i: next_code(model, waves(16)), 60)
    g = grads(model)
    assert g['layers.0.value.weight']<1e-5*g['head.1.weight'], g

@is_broken('gradient_spike', 'exploding_gradient', paths=('body.2',), steps=(64, 64))
def one_layer_is_struck(arm):
    torch.manual_seed(319)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.head = nn.Sequential(*(l for _ in range(3) for l in (nn.Linear(16, 16), nn.GELU()))),nn.Linear(16, 4)
        def forward(self, x): return self.head(self.body(x))
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    te,sizes = arm(model, optimizer=opt),[]
    for i in range(110):
        x,y = blobs(48)
        loss = F.cross_entropy(model(x), y)
        te.log(loss=loss)
        opt.zero_grad(); loss.backward()
        if i==64: model.body[2].weight.grad *= 3e4 # Simulate a flipped exponent bit in one gradient
        sizes.append(model.body[2].weight.grad.norm().item())
        opt.step()
    te.close()
    assert sizes[64]>500*max(sizes[30:64]+sizes[66:]), (sizes[64], max(sizes[30:64]))

@is_broken('gradients_add_up', 'update_too_large', 'loss_spike', 'diverging', 'loss_rises', 'exploding_gradient', paths='*', steps=(0, 60))
def cleared_once_an_epoch(arm):
    torch.manual_seed(320)
    model = Words(nn.GRU)
    opt = torch.optim.SGD(model.parameters(), lr=.15)
    te,sizes = arm(model, optimizer=opt),[]
    for i in range(120):
        ids = sentences(16)
        if i%60==0: opt.zero_grad()
        loss = next_word(model(ids), ids)
        te.log(loss=loss)
        loss.backward()
        sizes.append(sum(grads(model).values()))
        opt.step()
    te.close()
    assert max(sizes[:60])>5*sizes[0] and max(sizes[60:])>5*sizes[60], (sizes[0], max(sizes))


# Broken trainings: units are dead, saturated or equal

@is_broken('dead_units', paths=('convs.1', 'acts.1'), steps=(0, 20))
def dense_with_a_silent_layer(arm):
    torch.manual_seed(321)
    model = Dense(grow=6)
    nn.init.constant_(model.convs[1].bias, -40.)
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9, nesterov=True)
    said = []
    model.acts[1].register_forward_hook(lambda m, i, o: said.append((o!=0).any().item()))
    fit(arm, model, opt, classes(model, pictures, 24), 70)
    assert not any(said)

@is_broken('dead_units', 'update_too_large', 'loss_spike', 'loss_rises', 'gradient_spike', paths=('2', '3', '[23]*', ''), steps=(60, 66))
def layer_thrown_below_zero(arm):
    torch.manual_seed(322)
    model = mlp(16, 32, 32, out=4)
    opt = torch.optim.RMSprop([{'params': p, 'lr': 1e-3} for p in (model[0].parameters(), model[2].parameters(), model[4].parameters())])
    def throw(i, te):
        if i==59: # The fault: a correction is written into the wrong layer
            with torch.no_grad(): model[2].bias -= 60
    losses = fit(arm, model, opt, classes(model), 110, after=throw)
    assert (seen(model[:4], blobs(300)[0])==0).all() and fell(losses[:60], .4) and losses[-1]>1.2, (ends(losses[:60]), losses[-1])

@is_broken('attention', 'saturated', 'vanishing_gradient', 'no_gradient', 'loss_stalls', paths='*', steps=(0, 60))
def pointer_far_too_cold(arm):
    torch.manual_seed(325)
    model = Pointer(heat=1e-4)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    tops = []
    model.softmax.register_forward_hook(lambda m, i, o: tops.append(o.detach().max(-1).values.mean().item()))
    def loss(i):
        x,_ = lists(64)
        return F.nll_loss((model(x)+1e-9).log(), x.argmin(1))
    losses = fit(arm, model, opt, loss, 80)
    assert tops[0]>.95 and not fell(losses, .3), (tops[0], ends(losses))


# Broken trainings: layers are not trained

@is_broken('not_trained', paths=('book*',), steps=(0, 100))
def codebook_is_forgotten(arm):
    torch.manual_seed(326)
    model = VQ(32)
    opt = torch.optim.Adam([*model.enc.parameters(), *model.dec.parameters()], lr=5e-3)
    before = copies(model)
    def loss(i):
        x,_ = blobs(64)
        y,commit,_ = model(x)
        return F.mse_loss(y, x) + commit
    fit(arm, model, opt, loss, 90)
    gone = moved(model, before)
    assert gone['book.codes.weight']==0 and model.book.codes.weight.grad.abs().sum()>0 and gone['enc.0.weight']>.05

class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body,self.adapter1,self.adapter2,self.head = mlp(16, 32, 32, out=32),mlp(32, 4, out=32),mlp(32, 4, out=32),nn.Linear(32, 4)

    def forward(self, x):
        x = F.relu(self.body[:2](x))
        x = x + self.adapter1(x)
        x = self.body[2:](x)
        return self.head(x + self.adapter2(x))

@is_broken('not_trained', paths=('adapter?', 'adapter?.*', 'body', 'body.*', ''), steps=(0, 80))
def adapters_are_frozen_too(arm):
    torch.manual_seed(327)
    model = Adapted()
    # The fault: this loop also freezes the adapters, which were added before it
    for k,p in model.named_parameters(): p.requires_grad_(k.startswith('head'))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    before = copies(model)
    fit(under(None, arm), model, opt, classes(model), 80)
    assert moved(model, before)['adapter1.0.weight']==0 and moved(model, before)['head.weight']>.1

@is_broken('not_trained', paths=('reader', 'source', ''), steps=(0, 80))
def writer_without_its_reader(arm):
    torch.manual_seed(328)
    model = Translator(detach=True)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    before = copies(model)
    def loss(i):
        ids,said,out = backwards(24)
        return F.cross_entropy(model(ids, said).flatten(0, 1), out.flatten())
    fit(arm, model, opt, loss, 80)
    gone = moved(model, before)
    assert gone['source.weight']==gone['reader.weight_hh_l0']==0 and gone['writer.weight_hh_l0']>.05

class Towers(nn.Module):
    "A recommender with two branches: one for users, and one for items"
    def __init__(self):
        super().__init__()
        self.readers,self.books,self.scale = mlp(12, 24, out=8),mlp(12, 24, out=8),nn.Linear(1, 1)

    # The fault: `self.readers` processes both inputs, and `self.books` is never called
    def forward(self, r, b): return self.scale((self.readers(r)*self.readers(b)).sum(1, keepdim=True))

@is_broken('not_trained', paths=('books', 'books.*', ''), steps=(0, 80))
def tower_that_is_never_asked(arm):
    torch.manual_seed(329)
    model = Towers()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    before = copies(model)
    def loss(i):
        r,b = torch.randn(64, 12),torch.randn(64, 12)
        return F.binary_cross_entropy_with_logits(model(r, b), ((r[:, :4]*b[:, :4]).sum(1, keepdim=True)>0).float())
    fit(under('bce', arm), model, opt, loss, 80)
    gone = moved(model, before)
    assert gone['books.0.weight']==0 and gone['readers.0.weight']>.05

@is_broken('not_trained', 'update_too_small', 'loss_stalls', paths='*', steps=(0, 80))
def optimizer_of_the_original(arm):
    torch.manual_seed(331)
    first = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(200, 4))
    opt = torch.optim.SGD(first.parameters(), lr=.05, momentum=.9)
    model = copy.deepcopy(first)
    before = copies(model)
    # The ember does not get the optimizer, because it would report at once that its parameters differ
    te,losses = arm(model),[]
    for _i in range(80):
        x,y = pictures(32)
        loss = F.cross_entropy(model(x), y)
        te.log(cross_entropy=loss)
        model.zero_grad(); loss.backward(); opt.step()
        te.step()
        losses.append(loss.item())
    te.close()
    assert max(moved(model, before).values())==0 and not fell(losses, .9)

@is_broken('not_trained', paths=('layers.1', 'layers', ''), steps=(0, 80))
def copy_that_asks_for_no_gradient(arm):
    torch.manual_seed(332)
    model,other = Residuals(3),Residuals(3)
    with torch.no_grad(): kept = other.layers[1].weight.clone(), other.layers[1].bias.clone()
    model.layers[1].weight,model.layers[1].bias = (nn.Parameter(p, requires_grad=p.requires_grad) for p in kept)
    opt = torch.optim.SGD(model.parameters(), lr=.02, momentum=.9)
    before = copies(model)
    fit(arm, model, opt, classes(model), 80)
    gone = moved(model, before)
    assert gone['layers.1.weight']==0 and gone['layers.0.weight']>.02

# Broken trainings: weights, inputs or activations have a wrong scale

@is_broken('poor_scale', 'exploding_gradient', paths=('mix.1', 'mix.1.*', ''), steps=(0, 25))
def one_mixer_is_too_loud(arm):
    torch.manual_seed(334)
    model = Mixer(layers=3)
    model.mix[1].along[2].weight.data *= 300
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sizes = []
    hooks = [m.register_forward_hook(lambda m, i, o: sizes.append(o.detach().std().item())) for m in model.mix]
    fit(arm, model, opt, classes(model, pictures, 24), 50)
    for h in hooks: h.remove()
    assert sizes[1]>20*sizes[0], sizes[:3]

@is_broken('poor_scale', 'vanishing_gradient', 'loss_stalls', 'update_too_small', 'collapse', paths='*', steps=(0, 40))
def vit_of_tiny_weights(arm):
    torch.manual_seed(335)
    body = vit()
    class Sight(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit,self.head = body,nn.Linear(32, 4)
        def forward(self, x): return self.head(self.vit(pixel_values=x).last_hidden_state.mean(1))
    model = Sight()
    with torch.no_grad():
        for p in model.parameters(): p *= 1e-3 # The loop also scales the weights of the normalization layers
    opt = torch.optim.SGD(model.parameters(), lr=.05)
    losses = fit(arm, model, opt, classes(model, pictures, 24), 50)
    assert seen(model, pictures(64)[0]).std(0).max()<1e-3 and not fell(losses, .97), ends(losses)

@is_broken('poor_input_scale', 'poor_scale', 'update_too_large', 'exploding_gradient', 'loss_spike', 'diverging', 'loss_rises', paths='*', steps=(0, 30))
def incomes_beside_ages(arm):
    torch.manual_seed(336)
    class Person(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(4, 32, out=1)
        def forward(self, x): return self.net(x)
    model = Person()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    def loss(i):
        x = torch.randn(32, 4)
        raw = x*torch.tensor([2e4, 15., 1., 1.]) + torch.tensor([5e4, 40., 0., 0.])
        return F.mse_loss(model(raw), x[:, 1:2])
    losses = fit(arm, model, opt, loss, 100)
    assert losses[0]>1e4 and ends(losses)[1]>2, ends(losses)

@is_broken('poor_input_scale', 'poor_scale', 'loss_stalls', 'collapse', 'vanishing_gradient', paths='*', steps=(0, 100))
def volts_where_there_are_microvolts(arm):
    torch.manual_seed(337)
    model = nn.Sequential(nn.Conv1d(2, 8, 5), nn.ReLU(), nn.Conv1d(8, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    def loss(i):
        y = torch.randint(3, (32,))
        x = torch.sin(torch.arange(40)*(.2+.3*y[:, None, None]) + torch.rand(32, 2, 1)) + .3*torch.randn(32, 2, 40)
        return F.cross_entropy(model(1e-6*x), y)
    losses = fit(arm, model, opt, loss, 80)
    assert not fell(losses, .97), ends(losses)

@is_broken('poor_scale', 'loss_stalls', 'update_too_small', 'exploding_gradient', paths='*', steps=(0, 150))
def metres_where_kilometres_are_meant(arm):
    torch.manual_seed(338)
    model = mlp(8, 32, 32, out=1)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    def loss(i):
        x,y = curve(64)
        return F.mse_loss(model(x), 1000*(y+20))
    losses = fit(arm, model, opt, loss, 150)
    assert losses[0]>1e8 and not fell(losses, .9), ends(losses)

@is_broken('equal_units', 'vanishing_gradient', 'not_trained', 'poor_scale', 'dead_units', 'loss_stalls', paths='*', steps=(0, 40))
def body_and_head_of_zeros(arm):
    torch.manual_seed(339)
    model = mlp(16, 24, 24, out=4)
    for m in (model[2], model[4]):
        nn.init.zeros_(m.weight); nn.init.zeros_(m.bias)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    before = copies(model)
    losses = fit(arm, model, opt, classes(model), 80)
    assert moved(model, before)['0.weight']==0 and not fell(losses, .95), ends(losses)

@is_broken('equal_units', paths=('conv1*', 'conv2*', ''), steps=(0, 30))
def graph_of_equal_weights(arm):
    torch.manual_seed(340)
    model,(x,near,y) = GAT(),circles_of_friends()
    model.drop.p = 0.
    for p in model.conv1.parameters(): nn.init.constant_(p, .1)
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    def loss(i): return F.cross_entropy(model(x+.3*torch.randn_like(x), near), y)
    for p in model.conv2.parameters(): nn.init.constant_(p, .1)
    losses = fit(arm, model, opt, loss, 80)
    assert model.conv1.lin.weight.std(0).max()<1e-4 and not fell(losses, .5), ends(losses)


# Broken trainings: wrong losses or wrong data

@is_broken('loss_stalls', paths='*', steps=(0, 150))
def labels_of_the_row_before(arm):
    torch.manual_seed(341)
    model = Experts()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    def loss(i):
        x,y = blobs(64)
        return F.cross_entropy(model(x), y.roll(1))
    losses = fit(arm, model, opt, loss, 150, every=5)
    assert 1.33<ends(losses, 30)[1]<1.5, ends(losses, 30)

@is_broken('loss_spike', 'gradient_spike', paths='*', steps=(70, 71))
def one_price_without_its_comma(arm):
    torch.manual_seed(342)
    model = Table()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    def loss(i):
        x,y = households(64)
        if i==70: y[9] = 25_000.
        return F.mse_loss(model(*x), y)
    losses = fit(arm, model, opt, loss, 130)
    assert losses[70]>1e5*losses[69] and losses[90]<losses[0]*3

@is_broken('weights_decay', 'loss_stalls', 'collapse', 'vanishing_gradient', paths='*', steps=(0, 100))
def decay_inside_adam(arm):
    torch.manual_seed(343)
    model = ConvLSTM()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1.)
    before = {k: v.norm().item() for k,v in copies(model).items()}
    def loss(i):
        x,y = films(16)
        return F.binary_cross_entropy_with_logits(model(x), y)
    losses = fit(arm, model, opt, loss, 90)
    assert model.gates.weight.norm()<.05*before['gates.weight'] and ends(losses)[1]>.5, (model.gates.weight.norm(), before, ends(losses))

@is_broken('collapse', 'loss_stalls', 'poor_scale', paths='*', steps=(0, 100))
def one_code_for_all(arm):
    torch.manual_seed(344)
    model = VQ(16)
    # The fault: all codes but the first are so far away that they are never the nearest
    with torch.no_grad(): model.book.codes.weight[1:] += 40
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    near = []
    def loss(i):
        x,_ = blobs(64)
        y,commit,n = model(x)
        near.append(len(set(n.tolist())))
        return F.mse_loss(y, x) + commit
    losses = fit(arm, model, opt, loss, 100)
    assert max(near)==1 and not fell(losses, .5), ends(losses)

@is_broken('batch_norm', 'dead_units', 'vanishing_gradient', 'equal_units', 'collapse', 'poor_scale', 'not_trained', 'loss_stalls', paths='*', steps=(0, 60))
def gammas_of_nothing(arm):
    torch.manual_seed(345)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(72, 4))
    for m in (model[1], model[4]): nn.init.zeros_(m.weight)
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    before = copies(model)
    losses = fit(arm, model, opt, classes(model, pictures, 24), 70)
    assert moved(model, before)['0.weight']==0 and not fell(losses, .95), ends(losses)


# Broken trainings: number formats, and training or evaluation mode

@is_broken('underflow', 'vanishing_gradient', 'update_too_small', paths='*', steps=(0, 60), stats='numerics')
def gradients_too_small_for_half(arm):
    torch.manual_seed(346)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 4)).half()
    opt = torch.optim.SGD(model.parameters(), lr=.05)
    def loss(i):
        x,y = pictures(64)
        return F.cross_entropy(model(x.half()).float(), y)*2e-6
    fit(arm, model, opt, loss, 50)
    zero = {k: (p.grad==0).float().mean().item() for k,p in model.named_parameters()}
    assert zero['0.weight']>.3 and zero['2.weight']>.3, zero

@is_broken('scaler_skips', 'overflow', 'not_finite', paths='*', steps=(0, 60))
def scale_that_grows_too_fast(arm):
    torch.manual_seed(347)
    model = mlp(16, 48, 48, out=4)
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    scaler = torch.amp.GradScaler('cpu', init_scale=2.**16, growth_factor=2.**12, backoff_factor=.5, growth_interval=1)
    te,skipped = arm(model, optimizer=opt, scaler=scaler),0
    for _i in range(90):
        x,y = blobs(32)
        with torch.autocast('cpu', dtype=torch.float16): out = model(x)
        loss = F.cross_entropy(out.float(), y)
        te.log(loss=loss)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        was = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale()<was
    te.close()
    assert skipped>60, skipped

@is_broken('train_eval', 'batch_norm', paths='*', steps=(0, 20))
def never_set_to_train(arm):
    torch.manual_seed(348)
    model = nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(.3),
        nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(.3), nn.Linear(48, 4))
    model.eval() # The fault: evaluation mode, as after loading a pretrained model, without a later call of train()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    fit(arm, model, opt, classes(model), 80)
    assert model[1].num_batches_tracked==0 and not model.training

@is_broken('same_data', paths='*', steps=(0, 150))
def seeded_at_each_step(arm):
    torch.manual_seed(349)
    model = Experts()
    opt = torch.optim.NAdam(model.parameters(), lr=5e-3)
    def loss(i):
        torch.manual_seed(349) # The fault: the seed is set in each step, so all batches are equal
        x,y = blobs(24, far=.3)
        return F.cross_entropy(model(x), y)
    held,vals = blobs(256, far=.3),[]
    def look(i, te):
        if i%20==19:
            vals.append(F.cross_entropy(seen(model, held[0]), held[1]).item())
            te.log(val_loss=vals[-1])
    losses = fit(arm, model, opt, loss, 140, after=look)
    assert fell(losses, .1) and vals[-1]>1.4*vals[0], (ends(losses), vals)

@is_broken('same_data', 'poor_input_scale', 'collapse', 'loss_stalls', 'dead_units', 'vanishing_gradient', paths='*', steps=(0, 120))
def pictures_become_white(arm):
    torch.manual_seed(350)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4))
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    def loss(i):
        x,y = pictures(32)
        x = (100+40*x).clamp(1, 255)
        # The fault: grey levels from 1 to 255 are clamped to 0..1, so all pixels become 1
        return F.cross_entropy(model(x.clamp(0, 1)), y)
    losses = fit(arm, model, opt, loss, 100)
    assert not fell(losses, .95), ends(losses)

@is_broken('loss_input', 'loss_stalls', 'saturated', 'vanishing_gradient', paths='*', steps=(0, 200))
def sigmoid_and_once_more(arm):
    torch.manual_seed(351)
    model = nn.Sequential(*mlp(16, 32, out=6), nn.Sigmoid())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    def loss(i):
        x,_ = blobs(64)
        return F.binary_cross_entropy_with_logits(model(x), (x@fixed(16, 6)>0).float())
    losses = fit(arm, model, opt, loss, 180)
    assert .48<ends(losses)[1]<.6, ends(losses)

@is_broken('target_range', 'dead_units', 'loss_stalls', 'collapse', 'vanishing_gradient', paths=('', 'last', 'out', 'body*'), steps=(0, 120))
def returns_are_never_negative(arm):
    torch.manual_seed(352)
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.out,self.last = nn.Sequential(nn.Linear(8, 32), nn.Tanh()),nn.Linear(32, 1),nn.ReLU()
        def forward(self, x): return self.last(self.out(self.body(x)))
    model = Returns()
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    def loss(i):
        x,y = curve(48)
        return F.mse_loss(model(x), y-1.5)
    losses = fit(arm, model, opt, loss, 120)
    assert seen(model, curve(300)[0]).eq(0).float().mean()>.95 and losses[-1]>2, (ends(losses), seen(model, curve(300)[0]).eq(0).float().mean())

@is_broken('broadcast', 'loss_stalls', 'collapse', paths='*', steps=(0, 200))
def each_row_against_all_targets(arm):
    torch.manual_seed(353)
    model = mlp(8, 32, 32, out=1, act=nn.SiLU)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    def loss(i):
        x,_ = curve(32)
        y = 3*x[:, 0] + x[:, 1] # The fault: targets of shape (32,) and outputs of shape (32, 1) broadcast to (32, 32)
        return (model(x)-y).square().mean()
    losses = fit(arm, model, opt, loss, 180)
    assert ends(losses, 30)[1]>8 and seen(model, curve(300)[0]).std()<1, (ends(losses, 30), seen(model, curve(300)[0]).std())

