"Trainings with one planted fault each, as in real programs. Their authors did not know the rules of torchember"
import math
import torch
from torch import nn
from torch.nn import functional as F
from . import is_broken
from .more import ResNet, Silent, Words, bert, blobs, curve, ends, fell, fit, fixed, gpt, has_word, next_word, pictures, seen, sentences


def mlp(i, *widths, out, act=nn.ReLU):
    sizes = [i, *widths]
    return nn.Sequential(*(layer for a,b in zip(sizes, widths, strict=False) for layer in (nn.Linear(a, b), act())), nn.Linear(sizes[-1], out))

def classes(model, make=blobs, n=64, **about):
    "Return the loss function of a classifier for `fit`"
    def loss(i):
        x,y = make(n, **about)
        return F.cross_entropy(model(x), y)
    return loss

def copies(model): return {k: p.detach().clone() for k,p in model.named_parameters()}

def moved(model, before):
    "Return the change of each parameter, as a fraction of its size"
    return {k: ((p.detach()-before[k]).norm()/before[k].norm().clamp(min=1e-12)).item() for k,p in model.named_parameters()}

def grads(model): return {k: p.grad.abs().mean().item() for k,p in model.named_parameters() if p.grad is not None}


# Broken trainings: NaN or infinite values

class Log(nn.Module):
    def forward(self, p): return p.log()

class Codes(nn.Module):
    "An autoencoder that selects from a set of codes, with softmax weights that become sharper during the training"
    def __init__(self):
        super().__init__()
        self.enc,self.choose,self.log = mlp(16, 32, out=8),nn.Softmax(-1),Log()
        self.book = nn.Linear(8, 16)

    def forward(self, x, warmth):
        p = self.choose(self.enc(x)/warmth)
        return self.book(p), -(p*self.log(p)).sum(-1).mean()

@is_broken('not_finite', paths=('log',), steps=(30, 110))
def log_of_nothing(arm):
    torch.manual_seed(100)
    model = Codes()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    def loss(i):
        x,_ = blobs(64)
        y,chaos = model(x, .95**i)
        return F.mse_loss(y, x) + .01*chaos
    losses = fit(arm, model, opt, loss, 130)
    bad = next(i for i,l in enumerate(losses) if not math.isfinite(l))
    assert 30<=bad<=110, bad

@is_broken('not_finite', paths=('*',), steps=(37, 38))
def twins_among_pairs(arm):
    torch.manual_seed(101)
    model = mlp(16, 32, 32, out=8, act=nn.GELU)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    def loss(i):
        a,y = blobs(32)
        b,z = blobs(32)
        if i==37: b[5],z[5] = a[5],y[5]
        d = (model(a)-model(b)).square().sum(1).sqrt()
        return torch.where(y==z, d, (2-d).clamp(min=0)).square().mean() + 0*d.mean()
    losses = fit(arm, model, opt, loss, 60)
    assert math.isfinite(losses[37]) and not math.isfinite(losses[38]) and fell(losses[:37], .8)

@is_broken('not_finite', paths=('', 'norm', 'net'), steps=(55, 55))
def gap_in_the_table(arm):
    torch.manual_seed(102)
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm,self.net = nn.BatchNorm1d(8),mlp(8, 32, out=1)
        def forward(self, x): return self.net(self.norm(x))
    model = Table()
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    def loss(i):
        x,y = curve(48)
        if i==55: x[3, 2] = float('nan')
        return F.mse_loss(model(x), y)
    losses = fit(arm, model, opt, loss, 75)
    assert all(map(math.isfinite, losses[:55])) and not any(map(math.isfinite, losses[55:]))


# Broken trainings: the optimizer steps are too large or too small

@is_broken('update_too_large', 'diverging', 'loss_rises', paths='*', steps=(0, 25))
def bert_at_a_half(arm):
    torch.manual_seed(103)
    model = bert()
    opt = torch.optim.AdamW(model.parameters(), lr=.5)
    before = copies(model)
    def loss(i):
        ids,y = has_word(32)
        return model(input_ids=ids, labels=y).loss
    losses = fit(arm, model, opt, loss, 40)
    assert moved(model, before)['bert.encoder.layer.0.attention.self.query.weight']>10 and ends(losses)[1]>.65

@is_broken('update_too_large', 'diverging', 'loss_rises', 'poor_scale', paths=('fc', ''), steps=(0, 25))
def head_in_a_hurry(arm):
    torch.manual_seed(104)
    model = ResNet()
    opt = torch.optim.SGD([{'params': [p for k,p in model.named_parameters() if 'fc' not in k], 'lr': 1e-2},
        {'params': model.fc.parameters(), 'lr': 10.}], momentum=.9)
    before = copies(model)
    losses = fit(arm, model, opt, classes(model, pictures, 32), 50)
    gone = moved(model, before)
    assert gone['fc.weight']>20 and max(losses)>20*losses[0], (gone['fc.weight'], max(losses))

@is_broken('update_too_small', 'loss_stalls', paths='*', steps=(0, 100), ttypes=('input', 'output', 'weight', 'weight_grad', 'update'))
def graph_at_1e_minus_7(arm):
    torch.manual_seed(105)
    near = ((torch.rand(40, 40)<.1).float()+torch.eye(40)).clamp(max=1)
    near = near/near.sum(1, keepdim=True)
    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1,self.conv2 = nn.Linear(8, 16),nn.Linear(16, 1)
        def forward(self, x): return near@self.conv2(F.relu(near@self.conv1(x)))
    model = GCN()
    opt = torch.optim.SGD(model.parameters(), lr=1e-7)
    before = copies(model)
    def loss(i):
        x = torch.randn(16, 40, 8)
        return F.mse_loss(model(x), 3*near@x[..., :1])
    losses = fit(arm, model, opt, loss, 100)
    assert max(moved(model, before).values())<1e-3 and not fell(losses, .9)

@is_broken('update_too_small', 'not_trained', paths=('embed', 'rnn'), steps=(0, 120))
def lower_layers_stand_still(arm):
    torch.manual_seed(106)
    model = Words(nn.GRU)
    opt = torch.optim.Adam([{'params': model.head.parameters()}, {'params': model.rnn.parameters(), 'lr': 1e-8},
        {'params': model.embed.parameters(), 'lr': 1e-8}], lr=1e-2)
    before = copies(model)
    def loss(i):
        ids = sentences(24)
        return next_word(model(ids), ids)
    fit(arm, model, opt, loss, 120)
    gone = moved(model, before)
    assert gone['head.weight']>.1 and max(v for k,v in gone.items() if 'head' not in k)<1e-4, gone

@is_broken('diverging', 'loss_rises', 'update_too_large', 'exploding_gradient', paths='*', steps=(0, 50))
def over_the_edge(arm):
    torch.manual_seed(107)
    mix = fixed(16, 16)/4 + torch.eye(16)
    model,goal = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),fixed(16, 3)
    def loss(i):
        x = torch.randn(64, 4, 4).flatten(1)@mix
        return F.mse_loss(model(x.view(64, 4, 4)), x@goal)
    opt = torch.optim.SGD(model.parameters(), lr=.7)
    losses = fit(arm, model, opt, loss, 60)
    assert 1e2*losses[0]<losses[-1]<1e12 and losses[9]<1e3*losses[0], losses

@is_broken('target_range', 'loss_below', 'diverging', paths='*', steps=(0, 120))
def labels_one_and_two(arm):
    torch.manual_seed(108)
    model = mlp(16, 32, 32, out=1)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    def loss(i):
        x,y = blobs(64, 2)
        return F.binary_cross_entropy_with_logits(model(x).squeeze(1), y.float()+1)
    losses = fit(arm, model, opt, loss, 120)
    assert losses[0]>0 and losses[-1]<-20, losses[-1]

@is_broken('loss_below', 'diverging', paths='*', steps=(0, 120))
def kl_with_the_wrong_sign(arm):
    torch.manual_seed(109)
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc,self.mu,self.logvar = nn.Linear(16, 32),nn.Linear(32, 4),nn.Linear(32, 4)
            self.dec = mlp(4, 32, out=16)
        def forward(self, x):
            h = F.relu(self.enc(x))
            mu,lv = self.mu(h),self.logvar(h)
            return self.dec(mu + torch.randn_like(mu)*(lv.clamp(max=8)/2).exp()), mu, lv
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    def loss(i):
        x,_ = blobs(64)
        y,mu,lv = model(x)
        return F.mse_loss(y, x) + .5*(1+lv-mu.square()-lv.clamp(max=8).exp()).sum(1).mean()
    losses = fit(arm, model, opt, loss, 120)
    assert losses[0]>0 and losses[-1]<-100, losses[-1]

@is_broken('loss_rises', 'diverging', 'update_too_large', paths='*', steps=(0, 60))
def uphill(arm):
    torch.manual_seed(110)
    model = ResNet(blocks=1)
    opt = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=.9, maximize=True)
    losses = fit(arm, model, opt, classes(model, pictures, 32), 60)
    assert ends(losses)[1]>3*ends(losses)[0], ends(losses)


# Broken trainings: gradients vanish or explode between layers

class Tower(nn.Module):
    def __init__(self, n, width=24, act=torch.sigmoid):
        super().__init__()
        self.inward,self.layers,self.head = nn.Linear(16, width),nn.ModuleList(nn.Linear(width, width) for _ in range(n)),nn.Linear(width, 4)
        self.act = act

    def forward(self, x):
        x = self.act(self.inward(x))
        for layer in self.layers: x = self.act(layer(x))
        return self.head(x)

@is_broken('vanishing_gradient', paths=('inward', 'layers*', ''), steps=(0, 30))
def eight_sigmoids(arm):
    torch.manual_seed(111)
    model = Tower(8)
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    losses = fit(arm, model, opt, classes(model), 100)
    g = grads(model)
    assert g['inward.weight']<1e-4*g['head.weight'] and not fell(losses, .95)

@is_broken('poor_scale', 'vanishing_gradient', paths='*', steps=(0, 30))
def each_conv_a_tenth(arm):
    torch.manual_seed(112)
    model = nn.Sequential(*(l for i in range(6) for l in (nn.Conv2d(6 if i else 1, 6, 3, padding=1), nn.ReLU())),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4))
    for m in model:
        if isinstance(m, nn.Conv2d):
            nn.init.normal_(m.weight, std=.01)
            nn.init.zeros_(m.bias)
    opt = torch.optim.SGD(model.parameters(), lr=.05)
    losses = fit(arm, model, opt, classes(model, pictures, 32), 60)
    assert grads(model)['0.weight']<1e-6 and seen(model[:11], pictures(32)[0]).std(0).max()<1e-4 and not fell(losses, .95)

@is_broken('exploding_gradient', 'poor_scale', 'diverging', paths='*', steps=(0, 40))
def recurrence_above_one(arm):
    torch.manual_seed(113)
    model = Words(nn.RNN, nonlinearity='relu')
    model.rnn.weight_hh_l0.data.copy_(2.6*torch.eye(32))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    before = []
    def loss(i):
        if i: before.append(grads(model)['rnn.weight_hh_l0'])
        ids = sentences(16, length=16)
        return next_word(model(ids), ids)
    fit(arm, model, opt, loss, 50)
    assert before[0]>3e3, before[0]

@is_broken('gradient_spike', paths='*', steps=(85, 85))
def one_weight_of_ten_thousand(arm):
    torch.manual_seed(114)
    model = mlp(8, 32, 32, out=1, act=nn.Tanh)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    te,norms = arm(model, optimizer=opt),[]
    for i in range(130):
        x,y = curve(64)
        chance = .5 + .5*torch.rand(64)
        if i==85: chance[7] = 1e-5 # The weight of sample 7 is 1/chance, so it becomes 100000
        wrong = (model(x)-y).square().squeeze(1)
        te.log(loss=wrong.mean())
        opt.zero_grad()
        (wrong/chance).mean().backward()
        norms.append(sum(p.grad.square().sum() for p in model.parameters()).sqrt().item())
        opt.step()
    te.close()
    assert norms[85]>100*max(norms[:85]+norms[86:]), (norms[85], max(norms[:85]))

@is_broken('gradients_add_up', 'diverging', 'loss_rises', 'update_too_large', 'exploding_gradient', paths='*', steps=(0, 80))
def never_cleared(arm):
    torch.manual_seed(115)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4))
    opt = torch.optim.SGD(model.parameters(), lr=.02)
    te,sizes,losses = arm(model, optimizer=opt),[],[]
    for _i in range(80):
        x,y = pictures(32)
        loss = F.cross_entropy(model(x), y)
        te.log(loss=loss)
        loss.backward()
        opt.step()
        sizes.append(sum(grads(model).values())); losses.append(loss.item())
    te.close()
    assert max(sizes)>5*sizes[0] and max(losses[10:])>losses[0], (sizes[0], max(sizes), losses)


# Broken trainings: units are dead or saturated

@is_broken('dead_units', paths=('2', '3', '[23]*'), steps=(0, 20))
def biases_of_minus_thirty(arm):
    torch.manual_seed(116)
    model = mlp(16, 32, 32, 32, out=4)
    nn.init.constant_(model[2].bias, -30)
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    losses = fit(arm, model, opt, classes(model), 80)
    assert (seen(model[:4], blobs(500)[0])==0).all() and not fell(losses, .9)

@is_broken('dead_units', 'loss_spike', 'update_too_large', 'gradient_spike', 'diverging', paths='*', steps=(60, 66))
def one_rate_too_many(arm):
    torch.manual_seed(117)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 32), nn.ReLU(), nn.Linear(32, 4))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_of = classes(model, pictures, 32)
    def rate(i, te): opt.param_groups[0]['lr'] = 5. if i==59 else 2e-3
    losses = fit(arm, model, opt, loss_of, 120, after=rate)
    assert fell(losses[:60], .5) and max(losses[60:63])>100*losses[0], losses[58:64]

@is_broken('poor_input_scale', 'poor_scale', 'update_too_large', paths='*', steps=(0, 30))
def grey_levels(arm):
    torch.manual_seed(118)
    def train(arm, grey):
        model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4))
        opt = torch.optim.SGD(model.parameters(), lr=.02, momentum=.9)
        def loss(i):
            x,y = pictures(32)
            return F.cross_entropy(model((128+50*x).clamp(0, 255).round() if grey else x), y)
        return fit(arm, model, opt, loss, 80)
    assert ends(train(Silent, False))[1]<.4
    losses = train(arm, True)
    assert losses[0]>5 and ends(losses)[1]>1, ends(losses)

@is_broken('saturated', 'poor_scale', paths=('[4-6]*', '5'), steps=(0, 25), stats='full')
def third_layer_of_a_large_gain(arm):
    torch.manual_seed(119)
    model = mlp(16, 32, 32, 32, out=4, act=nn.Tanh)
    nn.init.normal_(model[4].weight, std=10)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    fit(arm, model, opt, classes(model), 60)
    assert (seen(model[:6], blobs(500)[0]).abs()>.99).float().mean()>.9

@is_broken('equal_units', paths=('0', '2', '4', ''), steps=(0, 20))
def all_weights_a_twentieth(arm):
    torch.manual_seed(120)
    model = mlp(16, 24, 24, out=4)
    for m in model:
        if isinstance(m, nn.Linear):
            nn.init.constant_(m.weight, .05)
            nn.init.zeros_(m.bias)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    fit(arm, model, opt, classes(model), 80)
    assert model[0].weight.std(0).max()<1e-4 and model[2].weight.std(0).max()<1e-4

@is_broken('poor_scale', 'poor_input_scale', 'saturated', paths='*', steps=(0, 30))
def words_of_size_fifty(arm):
    torch.manual_seed(121)
    model = Words(nn.LSTM, words=24)
    nn.init.normal_(model.embed.weight, std=50)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    def loss(i):
        ids = sentences(24)
        return next_word(model(ids), ids)
    fit(arm, model, opt, loss, 80)
    assert model.embed.weight.std()>40 and (seen(model.rnn, seen(model.embed, sentences(8)))[0].abs()>.5).float().mean()>.3

class Eye(nn.Module):
    "One layer of attention that keeps its attention weights for the test"
    def __init__(self, words=24, width=32):
        super().__init__()
        self.embed,self.place = nn.Embedding(words, width, padding_idx=0),nn.Embedding(16, width)
        self.attend,self.norm,self.head = nn.MultiheadAttention(width, 2, batch_first=True),nn.LayerNorm(width),nn.Linear(width, 2)

    def forward(self, ids, hidden):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        y,_ = self.attend(x, x, x, key_padding_mask=hidden)
        return self.head(self.norm(y).mean(1))

@is_broken('attention', 'loss_stalls', 'collapse', paths=('attend*', ''), steps=(0, 100))
def mask_the_other_way_round(arm):
    torch.manual_seed(122)
    model = Eye()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    looked = []
    model.attend.register_forward_hook(lambda m, i, o: looked.append(o[1].detach().max(-1).values.min().item()))
    def loss(i):
        ids,y = has_word(32, words=23)
        ids = F.pad(ids+1, (0, 1))
        # The fault: MultiheadAttention masks the keys with True, so `ids!=0` hides all words but the padding
        return F.cross_entropy(model(ids, ids!=0), y)
    losses = fit(arm, model, opt, loss, 100)
    assert min(looked)>.999 and not fell(losses, .9)

@is_broken('attention', 'poor_scale', 'saturated', paths='transformer*', steps=(0, 40))
def gpt_looks_at_one_word(arm):
    torch.manual_seed(123)
    model = gpt(attn_implementation='eager', scale_attn_weights=False)
    for b in model.transformer.h: b.attn.c_attn.weight.data[:, :64] *= 40
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    def loss(i):
        ids = sentences(16)
        return model(input_ids=ids, labels=ids).loss
    fit(arm, model, opt, loss, 60)
    model.eval()
    with torch.no_grad(): a = model(input_ids=sentences(32), output_attentions=True).attentions
    assert torch.stack(a).max(-1).values[..., 1:].mean()>.93, torch.stack(a).max(-1).values.mean()

@is_broken('collapse', paths='*', steps=(0, 120))
def siamese_without_strangers(arm):
    torch.manual_seed(124)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    def loss(i):
        x,_ = blobs(64)
        return F.mse_loss(model(x + .3*torch.randn_like(x)), model(x + .3*torch.randn_like(x)))
    x,_ = blobs(300)
    before = seen(model, x).std(0).mean()
    losses = fit(arm, model, opt, loss, 120)
    assert seen(model, x).std()<.1*before and fell(losses, .05), (seen(model, x).std(), before)


# Broken trainings: layers are not trained

@is_broken('not_trained', paths=('fc', 'fc*', ''), steps=(0, 80))
def head_put_in_too_late(arm):
    torch.manual_seed(125)
    model = ResNet(classes=10)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    model.fc = nn.Linear(8*36, 4)
    before = copies(model)
    fit(arm, model, opt, classes(model, pictures, 32), 60)
    gone = moved(model, before)
    assert gone['fc.weight']==0 and gone['stem.weight']>.05

class UNet(nn.Module):
    def __init__(self, c=6, cut=False):
        super().__init__()
        self.cut = cut
        self.down1,self.down2 = nn.Conv2d(1, c, 3, padding=1),nn.Conv2d(c, 2*c, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2*c, 2*c, 3, padding=1)
        self.up,self.join,self.out = nn.ConvTranspose2d(2*c, c, 2, stride=2),nn.Conv2d(2*c, c, 3, padding=1),nn.Conv2d(c, 1, 1)

    def forward(self, x):
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(a))
        if self.cut: a,b = a.detach(),b.detach() # The fault: a detach to save memory, which also cuts off the gradient
        return self.out(F.relu(self.join(torch.cat([a, F.relu(self.up(F.relu(self.middle(b))))], 1))))

def spots(n, size=12):
    y = F.max_pool2d((torch.rand(n, 1, size, size)<.02).float(), 3, 1, 1)
    return y + .5*torch.randn_like(y), y

@is_broken('not_trained', paths=('down1', 'down2', 'down?', ''), steps=(0, 80))
def unet_cut_in_two(arm):
    torch.manual_seed(126)
    model = UNet(cut=True)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    before = copies(model)
    def loss(i):
        x,y = spots(16)
        return F.binary_cross_entropy_with_logits(model(x), y)
    assert fell(fit(arm, model, opt, loss, 80), .9)
    gone = moved(model, before)
    assert gone['down1.weight']==gone['down2.weight']==0 and gone['middle.weight']>.05

@is_broken('not_trained', paths=('blocks.3', 'blocks.3.*', ''), steps=(0, 80))
def last_block_left_out(arm):
    torch.manual_seed(127)
    class Net(nn.Module):
        def __init__(self, n=4):
            super().__init__()
            self.inward,self.blocks,self.head = nn.Linear(16, 24),nn.ModuleList(mlp(24, 24, out=24) for _ in range(n)),nn.Linear(24, 4)
        def forward(self, x):
            x = self.inward(x)
            for i in range(len(self.blocks)-1): x = x + self.blocks[i](x)
            return self.head(x)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=.02, momentum=.9)
    before = copies(model)
    assert fell(fit(arm, model, opt, classes(model), 80), .3)
    gone = moved(model, before)
    assert all((v==0)==k.startswith('blocks.3') for k,v in gone.items())

@is_broken('not_trained', 'vanishing_gradient', 'loss_stalls', 'update_too_small', paths='*', steps=(0, 60))
def cleared_before_the_step(arm):
    torch.manual_seed(128)
    model = Words(nn.LSTM)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = copies(model)
    te = arm(model, optimizer=opt)
    for _i in range(60):
        ids = sentences(16)
        loss = next_word(model(ids), ids)
        te.log(loss=loss)
        loss.backward()
        opt.zero_grad()
        opt.step()
    te.close()
    assert max(moved(model, before).values())==0


# Broken trainings: wrong losses or wrong data

@is_broken('loss_stalls', paths='*', steps=(0, 150))
def labels_of_another_order(arm):
    torch.manual_seed(129)
    model = ResNet(blocks=1)
    opt = torch.optim.SGD(model.parameters(), lr=5e-3, momentum=.9)
    def loss(i):
        x,y = pictures(32)
        return F.cross_entropy(model(x), y[torch.randperm(32)])
    losses = fit(arm, model, opt, loss, 120)
    assert 1.3<ends(losses, 30)[1]<1.6, ends(losses, 30)

@is_broken('loss_spike', 'gradient_spike', 'poor_input_scale', paths='*', steps=(70, 71))
def a_batch_a_thousand_times_too_large(arm):
    torch.manual_seed(130)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4), nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 16))
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    def loss(i):
        x,_ = blobs(64)
        if i==70: x = x*1000
        return F.mse_loss(model(x), x)
    losses = fit(arm, model, opt, loss, 120, clip=1.)
    assert losses[70]>1e5*losses[69] and losses[-1]<.8*losses[0]

@is_broken('same_data', paths='*', steps=(0, 200))
def always_the_first_batch(arm):
    torch.manual_seed(131)
    model = mlp(16, 64, 64, out=4)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    kept = [blobs(16, far=.6) for _ in range(20)]
    held,vals = blobs(256, far=.6),[]
    def loss(i):
        x,y = next(iter(kept))
        return F.cross_entropy(model(x), y)
    def look(i, te):
        if i%20==19:
            vals.append(F.cross_entropy(seen(model, held[0]), held[1]).item())
            te.log(val_loss=vals[-1])
    losses = fit(arm, model, opt, loss, 160, after=look)
    assert fell(losses, .05) and vals[-1]>vals[0]

@is_broken('weights_decay', 'collapse', 'update_too_large', paths='*', steps=(0, 100))
def all_weights_go_to_nothing(arm):
    torch.manual_seed(132)
    model = Tower(2, act=torch.tanh)
    opt = torch.optim.SGD(model.parameters(), lr=.1, weight_decay=1.)
    before = {k: v.norm().item() for k,v in copies(model).items()}
    losses = fit(arm, model, opt, classes(model), 120)
    after = {k: p.norm().item() for k,p in model.named_parameters()}
    assert after['layers.0.weight']<.1*before['layers.0.weight'] and ends(losses)[1]>1.2, (after, ends(losses))


# Broken trainings: normalization layers, and training or evaluation mode

@is_broken('batch_norm', 'train_eval', paths='*', steps=(0, 100), ttypes=('input', 'output', 'weight', 'weight_grad', 'buffer'))
def running_statistics_stay(arm):
    torch.manual_seed(133)
    model = ResNet(blocks=3)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d): m.momentum = 0.
    opt = torch.optim.SGD(model.parameters(), lr=.02, momentum=.9)
    def loss(i):
        x,y = pictures(32)
        return F.cross_entropy(model(.5+.2*x), y)
    (x,y),vals = pictures(128),[]
    def look(i, te):
        if i%20==19:
            vals.append(F.cross_entropy(seen(model, .5+.2*x), y).item())
            te.log(val_loss=vals[-1])
    losses = fit(arm, model, opt, loss, 80, after=look)
    assert model.bn.running_mean.eq(0).all() and vals[-1]>4*ends(losses)[1], (vals, ends(losses))

@is_broken('train_eval', 'batch_norm', paths='*', steps=(38, 60))
def never_back_in_training(arm):
    torch.manual_seed(134)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(.3), nn.Linear(200, 4))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    held,counted = pictures(64),[]
    def look(i, te):
        if i==39:
            model.eval()
            with torch.no_grad(): te.log(val_loss=F.cross_entropy(model(held[0]), held[1]))
        counted.append(int(model[1].num_batches_tracked))
    losses = fit(arm, model, opt, classes(model, pictures, 32), 100, after=look)
    assert counted[-1]==40 and fell(losses, .5)

@is_broken('batch_norm', 'collapse', 'loss_stalls', 'equal_units', paths='*', steps=(0, 150))
def two_in_a_batch_norm(arm):
    torch.manual_seed(135)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sides = []
    model[1].register_forward_hook(lambda m, i, o: sides.append(((o-m.bias).abs()-m.weight.abs()).abs().gt(.05).float().mean().item()))
    def loss(i):
        x,y = curve(2)
        return F.mse_loss(model(x), y)
    losses = fit(arm, model, opt, loss, 150)
    # Most outputs of the BatchNorm with two samples are bias+weight or bias-weight
    assert sum(sides)/len(sides)<.1 and not fell(losses, .5, 30)


# Broken trainings: number formats such as float16

@is_broken('underflow', 'vanishing_gradient', paths='*', steps=(0, 60), stats='numerics')
def half_without_a_scaler(arm):
    torch.manual_seed(136)
    model = Tower(4, act=torch.tanh).half()
    for l in model.layers: l.weight.data *= .25
    model.inward.weight.data *= .3
    opt = torch.optim.SGD(model.parameters(), lr=.05)
    def loss(i):
        x,y = blobs(256)
        return F.cross_entropy(model(x.half()).float(), y)*1e-2
    fit(arm, model, opt, loss, 60)
    zero = {k: (p.grad==0).float().mean().item() for k,p in model.named_parameters()}
    assert zero['inward.weight']>.6 and zero['layers.0.weight']>.6 and zero['head.bias']<.3, zero

class Squares(nn.Module):
    def forward(self, x): return F.relu(x).square()

@is_broken('overflow', 'not_finite', paths=('layers.*', 'act*'), steps=(44, 44))
def squares_too_large_for_half(arm):
    torch.manual_seed(137)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inward,self.head = nn.Linear(16, 32),nn.Linear(32, 4)
            self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(32) if i else nn.Identity(), nn.Linear(32, 32), Squares(),
                nn.Linear(32, 32)) for i in range(2))
        def forward(self, x):
            x = self.inward(x)
            for l in self.layers: x = x + l(x)
            return self.head(x)
    model = Net().half()
    opt = torch.optim.SGD(model.parameters(), lr=.02)
    big = []
    model.layers[0][2].register_forward_hook(lambda m, i, o: big.append((i[0].isfinite().all().item(), o.isinf().any().item())))
    def loss(i):
        x,y = blobs(64)
        if i==44: x[9] *= 800
        return F.cross_entropy(model(x.half()).float(), y)
    fit(arm, model, opt, loss, 60)
    assert big[44]==(True, True) and not any(b for _,b in big[:44])

@is_broken('scaler_skips', 'overflow', 'not_finite', 'not_trained', paths='*', steps=(0, 60))
def every_step_is_skipped(arm):
    torch.manual_seed(138)
    model = mlp(16, 48, 48, out=4)
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    scaler = torch.amp.GradScaler('cpu', init_scale=2.**30)
    before = copies(model)
    te = arm(model, optimizer=opt, scaler=scaler)
    for _i in range(60):
        x,y = blobs(64)
        with torch.autocast('cpu', dtype=torch.float16): out = model(x)
        loss = F.cross_entropy(out.float(), y)
        te.log(loss=loss)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        # The fault: the scale is set back to 2**30 after each step, so each step overflows and is skipped
        scaler.update(2.**30)
    te.close()
    assert max(moved(model, before).values())==0

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen,self.disc = mlp(4, 32, out=2),nn.Sequential(*mlp(2, 64, 64, out=1), nn.Sigmoid())

@is_broken('saturated', 'vanishing_gradient', 'loss_stalls', paths='*', steps=(0, 150))
def discriminator_wins(arm):
    torch.manual_seed(139)
    model = Pair()
    og,od = torch.optim.Adam(model.gen.parameters(), lr=1e-4),torch.optim.Adam(model.disc.parameters(), lr=2e-2)
    te = arm(model, optimizer=[og, od])
    for _i in range(150):
        real = torch.randn(64, 2)*.2 + torch.tensor([4., -4.])
        fake = model.gen(torch.randn(64, 4))
        ld = -(model.disc(real)+1e-8).log().mean() - (1-model.disc(fake.detach())+1e-8).log().mean()
        od.zero_grad(); ld.backward(); od.step()
        # The fault: the saturating generator loss log(1-D), which the GAN paper advises against
        lg = (1-model.disc(fake)+1e-8).log().mean()
        og.zero_grad(); lg.backward()
        te.log(loss_d=ld, loss_g=lg)
        og.step()
    te.close()
    g = grads(model.gen)
    assert seen(model.disc, real).mean()>.99 and seen(model.disc, seen(model.gen, torch.randn(64, 4))).mean()<.01 and max(g.values())<1e-4, g
