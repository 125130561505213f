"Healthy trainings that look broken. Their authors did not know the rules of torchember"
import copy, math
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from . import is_healthy
from .more import ResNet, Words, bert, blobs, curve, ends, fell, fit, fixed, gpt, has_word, next_word, pictures, seen, sentences


def mlp(i, *widths, out, act=nn.ReLU):
    sizes = [i, *widths]
    return nn.Sequential(*(layer for a,b in zip(sizes, widths, strict=False) for layer in (nn.Linear(a, b), act())), nn.Linear(sizes[-1], out))

def accuracy(model, x, y): return (seen(model, x).argmax(-1)==y).float().mean().item()


# Healthy trainings: the loss reaches its minimum early

@is_healthy
def line_without_noise(arm):
    torch.manual_seed(0)
    model,w = nn.Linear(6, 1),fixed(6, 1)
    opt = torch.optim.SGD(model.parameters(), lr=.2)
    def loss(i):
        x = torch.randn(64, 6)
        return F.mse_loss(model(x), x@w + 3)
    losses = fit(arm, model, opt, loss, 200)
    assert losses[-1]<1e-10, losses[-1]

@is_healthy
def hinge_to_zero(arm):
    torch.manual_seed(1)
    model = mlp(16, 32, out=1, act=nn.Tanh)
    opt = torch.optim.SGD(model.parameters(), lr=.2, momentum=.9)
    def loss(i):
        x,y = blobs(32, 2, far=3)
        return (1 - (2*y-1)*model(x).squeeze(1)).clamp(min=0).mean()
    losses = fit(arm, model, opt, loss, 200)
    assert sum(l==0 for l in losses[-50:])>40 and losses[0]>.5

@is_healthy
def sure_of_itself(arm):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 1), nn.Sigmoid())
    opt = torch.optim.Adam(model.parameters(), lr=.02)
    def loss(i):
        x,y = blobs(64, 2, far=4)
        return F.binary_cross_entropy(model(x).squeeze(1), y.float())
    losses = fit(arm, model, opt, loss, 150)
    x,_ = blobs(200, 2, far=4)
    p = seen(model, x)
    assert losses[-1]<.01 and (p-.5).abs().gt(.49).float().mean()>.9

@is_healthy
def settled_by_lbfgs(arm):
    torch.manual_seed(3)
    model = mlp(2, 16, out=1, act=nn.Tanh)
    opt = torch.optim.LBFGS(model.parameters(), lr=1, max_iter=5, line_search_fn='strong_wolfe')
    x = torch.rand(128, 2)*4-2
    y = torch.sin(x[:, :1])*x[:, 1:]
    te,losses = arm(model, optimizer=opt),[]
    for _i in range(40):
        def closure():
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss
        loss = opt.step(closure)
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    assert losses[-1]<.05*losses[0]


# Healthy trainings: some parameters are frozen or rarely used

class Lora(nn.Module):
    def __init__(self, base, r=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down,self.up = nn.Linear(base.in_features, r, bias=False),nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x): return self.base(x) + self.up(self.down(x))

@is_healthy
def lora_of_mlp(arm):
    torch.manual_seed(4)
    model,turn = mlp(16, 48, 48, out=4),torch.linalg.qr(fixed(16, 16, seed=3))[0]
    opt = torch.optim.Adam(model.parameters(), lr=.01)
    for _ in range(100):
        x,y = blobs(64)
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    model.requires_grad_(False)
    for i in (0, 2, 4): model[i] = Lora(model[i])
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=.01)
    def loss(i):
        x,y = blobs(64)
        return F.cross_entropy(model(x@turn), y)
    assert fell(fit(arm, model, opt, loss, 150), .5)

@is_healthy
def new_head_on_old_net(arm):
    torch.manual_seed(5)
    model = ResNet()
    opt = torch.optim.Adam(model.parameters(), lr=.01)
    for _ in range(40):
        x,y = pictures(32)
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    model.requires_grad_(False)
    model.fc = nn.Linear(8*36, 3)
    model.eval() # Evaluation mode keeps the running statistics of the frozen layers
    opt = torch.optim.SGD(model.fc.parameters(), lr=.01, momentum=.9)
    def loss(i):
        x,y = pictures(32, 3)
        return F.cross_entropy(model(x.flip(-1)), y)
    assert fell(fit(arm, model, opt, loss, 60), .6)

@is_healthy
def bert_a_little_further(arm):
    torch.manual_seed(6)
    model = bert(hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(100):
        ids,y = has_word(48)
        opt.zero_grad(); model(input_ids=ids, labels=y).loss.backward(); opt.step()
    ids,y = has_word(512)
    def quality(): return F.cross_entropy(seen_logits(model, ids.flip(1)), y).item()
    before = quality()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    def loss(i):
        ids,y = has_word(32)
        return model(input_ids=ids.flip(1), labels=y).loss
    fit(arm, model, opt, loss, 40)
    assert quality()<before and before<.5, (before, quality())

def seen_logits(model, ids):
    mode = model.training
    model.eval()
    with torch.no_grad(): y = model(input_ids=ids).logits
    model.train(mode)
    return y

class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = mlp(16, 32, out=32)
        self.heads = nn.ModuleDict({'class': nn.Linear(32, 4), 'size': nn.Linear(32, 1)})

    def forward(self, x, task): return self.heads[task](F.relu(self.trunk(x)))

@is_healthy
def tasks_in_turn(arm):
    torch.manual_seed(7)
    model = Turns()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    def loss(i):
        x,y = blobs(32)
        return F.mse_loss(model(x, 'size'), x[:, :1].abs()) if i%8==7 else F.cross_entropy(model(x, 'class'), y)
    losses = fit(arm, model, opt, loss, 160)
    assert fell(losses[7::8], .5, 4) and fell([l for i,l in enumerate(losses) if i%8!=7], .5)

class Teacher(nn.Module):
    "A student network, and a teacher network that is the moving average of the student"
    def __init__(self):
        super().__init__()
        self.student = mlp(16, 32, out=4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x, noisy):
        with torch.no_grad(): said = self.teacher(x)
        return self.student(noisy), said

    def follow(self):
        for a,b in zip(self.teacher.parameters(), self.student.parameters(), strict=False): a.lerp_(b.detach(), .05)

@is_healthy
def mean_teacher(arm):
    torch.manual_seed(8)
    model = Teacher()
    opt = torch.optim.Adam(model.student.parameters(), lr=5e-3)
    def loss(i):
        x,y = blobs(64)
        a,b = model(x, x + .5*torch.randn_like(x))
        return F.cross_entropy(a[:8], y[:8]) + F.mse_loss(a.softmax(-1), b.softmax(-1))
    losses = fit(arm, model, opt, loss, 150, after=lambda i, te: model.follow())
    assert fell(losses, .4) and accuracy(model.teacher, *blobs(500))>.9

class Experts(nn.Module):
    def __init__(self, n=4):
        super().__init__()
        self.inward,self.gate = nn.Linear(16, 24),nn.Linear(24, n)
        self.experts = nn.ModuleList(mlp(24, 24, out=24) for _ in range(n))
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        x = F.relu(self.inward(x))
        p = self.gate(x).softmax(-1)
        w,best = p.max(-1)
        y = torch.zeros_like(x)
        for k in best.unique().tolist(): y[best==k] = self.experts[k](x[best==k])*w[best==k, None]
        return self.head(x+y), p

@is_healthy
def few_for_each_expert(arm):
    torch.manual_seed(9)
    model = Experts()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    def loss(i):
        x,y = blobs(8)
        y_,p = model(x)
        return F.cross_entropy(y_, y) + .02*4*p.mean(0).square().sum()
    assert fell(fit(arm, model, opt, loss, 200), .5)

@is_healthy
def words_of_a_long_tail(arm):
    torch.manual_seed(10)
    words = 400
    model = nn.Sequential(nn.EmbeddingBag(words, 16, mode='mean', sparse=True), nn.Linear(16, 2))
    nn.init.normal_(model[0].weight, std=.1)
    opts = [torch.optim.SparseAdam(model[0].parameters(), lr=.02), torch.optim.Adam(model[1].parameters(), lr=.02)]
    often,good = 1/torch.arange(1., words+1),fixed(words).sign()
    te,losses = arm(model, optimizer=opts),[]
    for _i in range(200):
        ids = torch.multinomial(often, 32*8, replacement=True).view(32, 8)
        y = (good[ids].sum(1)>0).long()
        loss = F.cross_entropy(model(ids), y)
        te.log(loss=loss)
        for o in opts: o.zero_grad()
        loss.backward()
        for o in opts: o.step()
        losses.append(loss.item())
    te.close()
    assert fell(losses, .6)


# Healthy trainings: the loss does not fall steadily

@is_healthy
def two_samples_a_batch(arm):
    torch.manual_seed(11)
    model = mlp(8, 32, out=1)
    opt = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=.9)
    def loss(i):
        x,y = curve(2)
        return F.mse_loss(model(x), 2*y + .3*torch.randn(2, 1)/torch.rand(2, 1).clamp(min=.1).sqrt())
    losses = fit(arm, model, opt, loss, 300)
    assert fell(losses, .75, 80) and max(losses[100:])>6*sorted(losses[100:])[100]

@is_healthy
def labels_a_third_wrong(arm):
    torch.manual_seed(12)
    model = mlp(16, 32, out=4)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    def loss(i):
        x,y = blobs(64)
        return F.cross_entropy(model(x), torch.where(torch.rand(64)<.45, torch.randint(4, (64,)), y))
    losses = fit(arm, model, opt, loss, 200)
    assert ends(losses)[1]>.85 and accuracy(model, *blobs(500))>.9

@is_healthy
def lessons_get_harder(arm):
    torch.manual_seed(13)
    model = Words(nn.GRU)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    def loss(i):
        ids = sentences(32)
        if i<80: ids = ids.clamp(max=5) # Only words 0 to 5 at first, and all words from step 80 on
        return next_word(model(ids), ids)
    losses = fit(arm, model, opt, loss, 200)
    assert losses[82]>2*losses[79] and losses[-1]<.6*losses[82]

@is_healthy
def momentum_of_99(arm):
    torch.manual_seed(14)
    model = mlp(8, 32, out=1, act=nn.Tanh)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=.99)
    def loss(i):
        x,y = curve(64)
        return F.mse_loss(model(x), y+1)
    assert fell(fit(arm, model, opt, loss, 300), .4)

@is_healthy
def flow_of_a_ring(arm):
    torch.manual_seed(15)
    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.net,self.flip = mlp(1, 24, out=2, act=nn.Tanh),flip
        def forward(self, x):
            a,b = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
            s,t = self.net(a).chunk(2, 1)
            s = 2*torch.tanh(s)
            y = torch.cat([a, b*s.exp()+t], 1)
            return (y.flip(1) if self.flip else y), s.squeeze(1)
    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList(Coupling(i%2) for i in range(6))
        def forward(self, x):
            total = 0.
            for s in self.steps:
                x,d = s(x)
                total = total+d
            return x, total
    model = Flow()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    def loss(i):
        t = 2*math.pi*torch.rand(128)
        x = .1*torch.stack([t.cos(), t.sin()], 1) + .003*torch.randn(128, 2)
        z,d = model(x)
        return (.5*z.square().sum(1) + math.log(2*math.pi) - d).mean()
    losses = fit(arm, model, opt, loss, 120)
    assert losses[0]>0 and ends(losses)[1]<-1.5, ends(losses)

@is_healthy
def vae_with_kl_coming_in(arm):
    torch.manual_seed(16)
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc,self.mu,self.logvar = nn.Linear(16, 32),nn.Linear(32, 4),nn.Linear(32, 4)
            self.dec = mlp(4, 32, out=16)
        def forward(self, x):
            h = F.relu(self.enc(x))
            mu,lv = self.mu(h),self.logvar(h)
            return self.dec(mu + torch.randn_like(mu)*(lv/2).exp()), mu, lv
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    wrong = []
    def loss(i):
        x,_ = blobs(64)
        y,mu,lv = model(x)
        err,kl = F.mse_loss(y, x),.5*(mu.square()+lv.exp()-lv-1).sum(1).mean()
        wrong.append(err.item())
        return err + .15*max(0, min(1, (i-80)/80))*kl
    losses = fit(arm, model, opt, loss, 220)
    assert fell(wrong, .75) and max(losses[140:])>losses[80]

@is_healthy
def bandit_by_reinforce(arm):
    torch.manual_seed(17)
    policy = mlp(16, 32, out=4, act=nn.Tanh)
    opt = torch.optim.Adam(policy.parameters(), lr=5e-3)
    te,rewards,base = arm(policy, optimizer=opt),[],0.
    for _i in range(200):
        x,y = blobs(32)
        d = torch.distributions.Categorical(logits=policy(x))
        a = d.sample()
        r = (a==y).float()
        loss = -((r-base)*d.log_prob(a)).mean() - .01*d.entropy().mean()
        te.log(loss=loss, reward=r.mean())
        base = .9*base + .1*r.mean().item()
        opt.zero_grad(); loss.backward(); opt.step()
        rewards.append(r.mean().item())
    te.close()
    assert ends(rewards)[0]<.5 and ends(rewards)[1]>.8

@is_healthy
def q_values_grow(arm):
    torch.manual_seed(18)
    n,gamma = 6,.95
    q = mlp(n, 32, out=2)
    target = copy.deepcopy(q)
    opt = torch.optim.Adam(q.parameters(), lr=5e-3)
    te,losses = arm(q, optimizer=opt),[]
    for i in range(300):
        s,a = torch.randint(n, (64,)),torch.randint(2, (64,))
        to = (s + 2*a-1).clamp(0, n-1)
        # The best policy gets reward 5 in each step at the last state, so the largest Q value is 5/(1-.95)
        r = ((s==n-1)&(a==1)).float()*5
        with torch.no_grad(): goal = r + gamma*target(F.one_hot(to, n).float()).max(1).values
        loss = F.smooth_l1_loss(q(F.one_hot(s, n).float()).gather(1, a[:, None]).squeeze(1), goal)
        te.log(loss=loss)
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())
        if i%20==19: target.load_state_dict(q.state_dict())
    te.close()
    best = seen(q, torch.eye(n))
    assert best.argmax(1).eq(1).all() and best.max()>15

class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.gen,self.disc = mlp(4, 32, out=2),mlp(2, 32, out=1, act=lambda: nn.LeakyReLU(.2))

@is_healthy
def gan_in_balance(arm):
    torch.manual_seed(19)
    model = Gan()
    og,od = (torch.optim.Adam(m.parameters(), lr=2e-3, betas=(.5, .9)) for m in (model.gen, model.disc))
    te = arm(model, optimizer=[og, od])
    for _i in range(150):
        real = torch.randn(64, 2)*.5 + torch.tensor([1., -1.])
        fake = model.gen(torch.randn(64, 4))
        ld = F.softplus(-model.disc(real)).mean() + F.softplus(model.disc(fake.detach())).mean()
        od.zero_grad(); ld.backward(); od.step()
        lg = F.softplus(-model.disc(fake)).mean()
        og.zero_grad(); lg.backward()
        te.log(loss_d=ld, loss_g=lg)
        og.step()
    te.close()
    fake = seen(model.gen, torch.randn(500, 4))
    assert (fake.mean(0)-torch.tensor([1., -1.])).norm()<.5 and fake.std(0).min()>.15, (fake.mean(0), fake.std(0))

@is_healthy
def nothing_noted(arm):
    torch.manual_seed(20)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4))
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    te,losses = arm(model, optimizer=opt),[]
    for _i in range(100):
        x,y = pictures(32)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())
    te.close()
    assert fell(losses, .5)


# Healthy trainings: steps differ in learning rate, number of passes or mode

@is_healthy
def gpt_warms_up_and_cools(arm):
    torch.manual_seed(21)
    model,n = gpt(),80
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(.9, .95), weight_decay=.1)
    rate = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: i/20 if i<20 else .5*(1+math.cos(math.pi*(i-20)/(n-20))))
    def loss(i):
        ids = sentences(32)
        return model(input_ids=ids, labels=ids).loss
    losses = fit(arm, model, opt, loss, n, clip=1., schedule=rate)
    assert fell(losses, .5)

@is_healthy
def resnet_of_nothing_at_first(arm):
    torch.manual_seed(22)
    model = ResNet(blocks=3, zero=True)
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9, weight_decay=5e-4)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 60)
    def loss(i):
        x,y = pictures(32)
        return F.cross_entropy(model(x), y)
    assert fell(fit(arm, model, opt, loss, 60, schedule=rate), .3)

@is_healthy
def four_passes_a_step(arm):
    torch.manual_seed(23)
    model = Words(nn.LSTM)
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    te,losses = arm(model, optimizer=opt),[]
    for _i in range(60):
        opt.zero_grad()
        total = 0.
        for _ in range(4):
            ids = sentences(8)
            loss = next_word(model(ids), ids)/4
            loss.backward()
            total += loss.item()
        te.log(loss=total)
        opt.step()
        losses.append(total)
    te.close()
    assert fell(losses, .5)

@is_healthy
def sharpness_aware(arm):
    torch.manual_seed(24)
    model = mlp(16, 32, 32, out=4)
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    te,losses = arm(model, optimizer=opt),[]
    for _i in range(100):
        x,y = blobs(64)
        loss = F.cross_entropy(model(x), y)
        te.log(loss=loss)
        losses.append(loss.item())
        opt.zero_grad(); loss.backward()
        ps = list(model.parameters())
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        with torch.no_grad():
            moved = [p.grad*(.2/(norm+1e-12)) for p in ps]
            for p,e in zip(ps, moved, strict=False): p.add_(e)
        opt.zero_grad(); F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p,e in zip(ps, moved, strict=False): p.sub_(e)
        opt.step()
    te.close()
    assert fell(losses, .3)

@is_healthy
def dropout_and_looks_between(arm):
    torch.manual_seed(25)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(.6), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(.6), nn.Linear(64, 4))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    held,vals = blobs(256),[]
    def loss(i):
        x,y = blobs(32)
        return F.cross_entropy(model(x), y)
    def look(i, te):
        if i%20==19:
            vals.append(F.cross_entropy(seen(model, held[0]), held[1]).item())
            te.log(val_loss=vals[-1])
    losses = fit(arm, model, opt, loss, 120, after=look)
    assert fell(losses, .6) and vals[-1]<.5*ends(losses)[1]

@is_healthy
def lstm_always_clipped(arm):
    torch.manual_seed(26)
    model = Words(nn.LSTM, num_layers=2)
    opt = torch.optim.SGD(model.parameters(), lr=5., momentum=.9)
    norms = []
    def loss(i):
        ids = sentences(24)
        return next_word(model(ids), ids)
    te,losses = arm(model, optimizer=opt),[]
    for i in range(120):
        l = loss(i)
        te.log(loss=l)
        opt.zero_grad(); l.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), .1).item())
        opt.step()
        losses.append(l.item())
    te.close()
    assert fell(losses, .6) and sum(n>.1 for n in norms)>100


# Healthy trainings: loss scales, large numbers and masks

@is_healthy
def scaler_looks_for_its_scale(arm):
    torch.manual_seed(27)
    model = mlp(16, 48, 48, out=4)
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    scaler = torch.amp.GradScaler('cpu', init_scale=2.**26, growth_interval=40)
    te,losses,scales = arm(model, optimizer=opt, scaler=scaler),[],[]
    for _i in range(120):
        x,y = blobs(64)
        with torch.autocast('cpu', dtype=torch.float16): out = model(x)
        loss = F.cross_entropy(out.float(), y)
        te.log(loss=loss)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item()); scales.append(scaler.get_scale())
    te.close()
    halved = sum(b<a for a,b in zip([2.**26, *scales], scales, strict=False))
    assert fell(losses, .3) and 3<=halved<=15, halved

@is_healthy
def all_in_bfloat16(arm):
    torch.manual_seed(28)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)).bfloat16()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    def loss(i):
        x,y = blobs(64)
        return F.cross_entropy(model(x.bfloat16()).float(), y)
    assert fell(fit(arm, model, opt, loss, 120), .3)

@is_healthy
def prices_in_dollars(arm):
    torch.manual_seed(29)
    class Prices(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(8, 32, 32, out=1)
        def forward(self, x): return 3e5 + 1e5*self.body(x)
    model = Prices()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    def loss(i):
        x,y = curve(64)
        return F.mse_loss(model(x), 3e5 + 1e5*y)
    losses = fit(arm, model, opt, loss, 200)
    assert losses[0]>1e9 and fell(losses, .3)

class Masked(nn.Module):
    "Attention with a mask for padding and for later positions"
    def __init__(self, words=24, width=32):
        super().__init__()
        self.embed,self.place = nn.Embedding(words, width, padding_idx=0),nn.Embedding(16, width)
        self.qkv,self.softmax,self.out,self.norm = nn.Linear(width, 3*width),nn.Softmax(-1),nn.Linear(width, width),nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, ids):
        n,t = ids.shape
        x = self.embed(ids) + self.place(torch.arange(t))
        q,k,v = self.qkv(x).chunk(3, -1)
        hidden = torch.ones(t, t).triu(1).bool() | (ids==0)[:, None]
        hidden[:, :, 0] = False
        s = (q@k.mT/q.shape[-1]**.5).masked_fill(hidden, float('-inf'))
        return self.head(self.norm(x + self.out(self.softmax(s)@v)))

@is_healthy
def padding_is_masked(arm):
    torch.manual_seed(30)
    model = Masked()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    def loss(i):
        ids = sentences(32).clamp(min=1)
        ids[torch.arange(12) >= torch.randint(5, 13, (32, 1))] = 0
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
    assert fell(fit(arm, model, opt, loss, 100), .6)

# Healthy trainings: weights that are pruned, normalized, shared or reused

@is_healthy
def mostly_pruned(arm):
    torch.manual_seed(31)
    model = mlp(16, 64, 64, out=4)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        x,y = blobs(64, far=.8)
        opt.zero_grad(); F.cross_entropy(model(x), y).backward(); opt.step()
    for i in (0, 2):
        prune.ln_structured(model[i], 'weight', amount=.75, n=2, dim=0)
        model[i].bias.data[model[i].weight_mask.sum(1)==0] = 0.
        prune.l1_unstructured(model[i], 'weight', amount=.5)
    opt = torch.optim.SGD(model.parameters(), lr=.02, momentum=.9)
    def loss(i):
        x,y = blobs(64, far=.8)
        return F.cross_entropy(model(x), y)
    losses = fit(arm, model, opt, loss, 120)
    assert fell(losses, .9) and (model[2].weight==0).float().mean()>.7, ends(losses)

@is_healthy
def norms_apart_from_directions(arm):
    torch.manual_seed(32)
    model = nn.Sequential(*(l for _ in range(3) for l in (parametrizations.weight_norm(nn.Linear(16, 16)), nn.ELU())), nn.Linear(16, 4))
    opt = torch.optim.Adamax(model.parameters(), lr=1e-2)
    def loss(i):
        x,y = blobs(64)
        return F.cross_entropy(model(x), y)
    assert fell(fit(arm, model, opt, loss, 100), .3)

@is_healthy
def words_in_and_out_are_one(arm):
    torch.manual_seed(33)
    model = Words(nn.GRU)
    nn.init.normal_(model.embed.weight, std=.1)
    model.head.weight = model.embed.weight
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    def loss(i):
        ids = sentences(24)
        return next_word(model(ids), ids)
    assert fell(fit(arm, model, opt, loss, 100), .5)

@is_healthy
def one_graph_again_and_again(arm):
    torch.manual_seed(34)
    n = 120
    y = torch.arange(n)%3
    near = (torch.rand(n, n, generator=torch.Generator().manual_seed(1)) < torch.where(y[:, None]==y, .15, .02)).float()
    near = ((near+near.T)>0).float() + torch.eye(n)
    near = near/near.sum(1, keepdim=True)
    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1,self.conv2,self.drop = nn.Linear(12, 16),nn.Linear(16, 3),nn.Dropout(.3)
        def forward(self, x): return near@self.conv2(self.drop(F.relu(near@self.conv1(x))))
    model,x = GCN(),fixed(n, 12, seed=2) + .6*fixed(3, 12)[y]
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    known = torch.arange(n)<45
    def loss(i): return F.cross_entropy(model(x)[known], y[known])
    losses = fit(arm, model, opt, loss, 150)
    assert fell(losses, .5) and (seen(model, x).argmax(1)==y)[~known].float().mean()>.8
