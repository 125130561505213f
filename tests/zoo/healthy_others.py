"A second set of healthy trainings that look broken. Their authors did not know the rules of torchember"
import copy, math
import torch
from torch import nn
from torch.nn import functional as F
from . import is_healthy
from .more import ResNet, Words, blobs, curve, ends, fell, fit, fixed, gpt, next_word, pictures, seen, sentences
from .others import (Dense, Experts, GAT, Mixer, Pointer, Table, Translator, VQ, WaveNet, ConvLSTM, backwards, circles_of_friends, copies, films, households,
    lists, llama, mlp, moved, next_code, under, vit, waves)


def classes(model, make=blobs, n=64, **about):
    "Return the loss function of a classifier for `fit`"
    def loss(i):
        x,y = make(n, **about)
        return F.cross_entropy(model(x), y)
    return loss


# Healthy trainings: many families of networks

@is_healthy
def mixer_of_patches(arm):
    torch.manual_seed(200)
    model = Mixer()
    opt = torch.optim.NAdam(model.parameters(), lr=5e-3)
    assert fell(fit(arm, model, opt, classes(model, pictures, 48), 60), .3)

@is_healthy
def wavenet_in_codes(arm):
    torch.manual_seed(201)
    model = WaveNet()
    opt = torch.optim.RAdam(model.parameters(), lr=3e-2)
    losses = fit(arm, model, opt, lambda i: next_code(model, waves(16)), 110, ttypes=('input', 'output', 'weight', 'weight_grad', 'output_grad'))
    assert fell(losses, .75), ends(losses)

@is_healthy
def pointer_to_the_largest(arm):
    torch.manual_seed(202)
    model = Pointer()
    opt = torch.optim.Adam(model.parameters(), lr=3e-2)
    def loss(i):
        x,y = lists(64)
        return F.nll_loss((model(x)+1e-9).log(), y)
    losses = fit(arm, model, opt, loss, 250)
    assert fell(losses, .2) and seen(model, lists(200)[0]).max(1).values.mean()>.85, ends(losses)

@is_healthy
def translator_that_looks_back(arm):
    torch.manual_seed(203)
    model = Translator()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    looked = []
    def loss(i):
        ids,said,out = backwards(32)
        return F.cross_entropy(model(ids, said).flatten(0, 1), out.flatten())
    def look(i, te):
        if i%50==49:
            ids,said,_ = backwards(64)
            model.eval()
            with torch.no_grad(): model(ids, said)
            model.train()
    hook = model.softmax.register_forward_hook(lambda m, i, o: looked.append(o.detach().max(-1).values.mean().item()))
    losses = fit(arm, model, opt, loss, 200, clip=1., after=look, only_training=True)
    hook.remove()
    assert fell(losses, .2) and looked[-1]>.7, (ends(losses), looked[-1])

@is_healthy
def films_by_convlstm(arm):
    torch.manual_seed(205)
    model = ConvLSTM()
    opt = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    def loss(i):
        x,y = films(16)
        return F.binary_cross_entropy_with_logits(model(x), y)
    losses = fit(arm, model, opt, loss, 100, every=5)
    assert fell(losses, .45), ends(losses)

@is_healthy
def dense_with_restarts(arm):
    torch.manual_seed(206)
    model = Dense()
    opt = torch.optim.SGD(model.parameters(), lr=.2, momentum=.9, nesterov=True)
    rate = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 30)
    losses = fit(arm, model, opt, classes(model, pictures, 24), 120, schedule=rate)
    assert fell(losses, .2), ends(losses)

class Hyper(nn.Module):
    "A hypernetwork, which computes the weights of another network"
    def __init__(self):
        super().__init__()
        self.write = mlp(3, 32, out=2*8+8+8+1)

    def forward(self, task, x):
        w = self.write(task)
        a,b,c,d = w[:, :16].view(-1, 2, 8),w[:, 16:24],w[:, 24:32],w[:, 32:]
        return (torch.tanh(x@a + b[:, None])@c[..., None]).squeeze(-1) + d

@is_healthy
def weights_written_by_a_net(arm):
    torch.manual_seed(207)
    model = Hyper()
    nn.init.normal_(model.write[-1].weight, std=.05)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    def loss(i):
        task,x = torch.randn(16, 3),torch.randn(16, 20, 2)
        y = torch.tanh(x[..., 0]*task[:, :1] + x[..., 1]*task[:, 1:2]) + task[:, 2:]
        return F.mse_loss(model(task, x), y)
    assert fell(fit(arm, model, opt, loss, 150), .4)

@is_healthy
def codes_of_which_many_idle(arm):
    torch.manual_seed(208)
    model = VQ(128)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    used = set()
    def loss(i):
        x,_ = blobs(64)
        y,commit,near = model(x)
        if i>100: used.update(near.tolist())
        return F.mse_loss(y, x) + commit
    losses = fit(arm, model, opt, loss, 140)
    assert fell(losses, .6) and 2<=len(used)<80, (ends(losses), len(used))

@is_healthy
def energies_of_data_and_noise(arm):
    torch.manual_seed(209)
    model = mlp(2, 32, 32, out=1, act=nn.SiLU)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    te,losses = arm(model, optimizer=opt),[]
    for _i in range(120):
        real = torch.randn(64, 2)*.3 + 1.
        x = torch.randn(64, 2)*2
        good,bad = model(torch.cat([real, x])).chunk(2)
        loss = good.mean() - bad.mean() + .1*(good.square()+bad.square()).mean()
        te.log(loss=loss)
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())
    te.close()
    assert losses[-1]<-1 and abs(losses[0])<.5 and seen(model, torch.ones(1, 2))<seen(model, -torch.ones(1, 2)), losses[-1]

class QPair(nn.Module):
    "A Q-network of action values, and the older copy of it that gives the targets"
    def __init__(self):
        super().__init__()
        self.online = mlp(6, 32, out=2)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, s): return self.online(s)

@is_healthy
def walk_by_dqn(arm):
    torch.manual_seed(210)
    model = QPair()
    opt = torch.optim.Adam(model.online.parameters(), lr=5e-3)
    place = torch.eye(6)
    def loss(i):
        if i%20==0: model.target.load_state_dict(model.online.state_dict())
        s,a = torch.randint(6, (32,)),torch.randint(2, (32,))
        t = (s+2*a-1).clamp(0, 5)
        r = (t==5).float()
        with torch.no_grad(): y = r + .8*model.target(place[t]).max(1).values
        return F.smooth_l1_loss(model(place[s]).gather(1, a[:, None]).squeeze(1), y)
    fit(arm, model, opt, loss, 240)
    assert seen(model, place).argmax(1).eq(1).all()

class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body,self.policy,self.value = nn.Sequential(nn.Linear(8, 32), nn.Tanh()),nn.Linear(32, 4),nn.Linear(32, 1)
        nn.init.normal_(self.policy.weight, std=.001) # All actions are nearly equally likely at first

    def forward(self, s):
        h = self.body(s)
        return F.log_softmax(self.policy(h), -1), self.value(h).squeeze(1)

@is_healthy
def clipped_policy(arm):
    torch.manual_seed(211)
    model,best = Actor(),fixed(8, 4)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-5)
    te,rewards,losses = arm(model, optimizer=opt),[],[]
    for _i in range(40):
        s = torch.randn(64, 8)
        with torch.no_grad():
            lp,v = model(s)
            a = torch.multinomial(lp.exp(), 1)
            r = ((s@best).argmax(1)==a.squeeze(1)).float()
            old,gain = lp.gather(1, a).squeeze(1),r-v
            gain = (gain-gain.mean())/gain.std()
        for _ in range(4):
            lp,v = model(s)
            ratio = (lp.gather(1, a).squeeze(1)-old).exp()
            loss = -torch.min(ratio*gain, ratio.clamp(.8, 1.2)*gain).mean() + .5*F.mse_loss(v, r) + .01*(lp.exp()*lp).sum(1).mean()
            te.log(loss=loss)
            opt.zero_grad(); loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), .5)
            opt.step()
            losses.append(loss.item())
        rewards.append(r.mean().item())
    te.close()
    assert sum(rewards[-5:])>2*sum(rewards[:5]), rewards

@is_healthy
def friends_by_attention(arm):
    torch.manual_seed(212)
    model,(x,near,y) = GAT(),circles_of_friends()
    opt = torch.optim.Adadelta(model.parameters(), lr=1.)
    known = torch.arange(len(y))<60
    def loss(i): return F.cross_entropy(model(x, near)[known], y[known])
    losses = fit(arm, model, opt, loss, 80)
    model.eval()
    with torch.no_grad(): right = (model(x, near).argmax(1)==y)[~known].float().mean()
    assert fell(losses, .4) and right>.8, (ends(losses), right)

class Factors(nn.Module):
    def __init__(self, users=60, films=40, width=6):
        super().__init__()
        self.user,self.film = nn.Embedding(users, width),nn.Embedding(films, width)
        self.user_bias,self.film_bias = nn.Embedding(users, 1),nn.Embedding(films, 1)
        for e in (self.user, self.film): nn.init.normal_(e.weight, std=.1)
        for e in (self.user_bias, self.film_bias): nn.init.zeros_(e.weight)

    def forward(self, u, f): return 3.5 + (self.user(u)*self.film(f)).sum(1) + self.user_bias(u).squeeze(1) + self.film_bias(f).squeeze(1)

@is_healthy
def ratings_by_factors(arm):
    torch.manual_seed(214)
    model = Factors()
    # The large rate compensates the mean over 512 samples, of which each user has only a few
    opt = torch.optim.SGD(model.parameters(), lr=3., momentum=.9)
    def loss(i):
        u,f = torch.randint(60, (512,)),torch.randint(40, (512,))
        stars = (3.5 + .7*(fixed(60, 2)[u]*fixed(40, 2, seed=9)[f]).sum(1) + .5*fixed(60, seed=3)[u]).clamp(1, 5)
        return F.mse_loss(model(u, f), stars.round())
    losses = fit(under(None, arm), model, opt, loss, 200)
    assert fell(losses, .4), ends(losses)

@is_healthy
def llama_in_two_parts(arm):
    torch.manual_seed(216)
    model = llama()
    opt = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(.9, .95))
    rate = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1., (i+1)/15))
    te,losses = arm(model, optimizer=opt, every=5),[]
    for _i in range(40):
        opt.zero_grad()
        total = 0.
        for _ in range(2):
            ids = sentences(16)
            loss = model(input_ids=ids, labels=ids).loss/2
            loss.backward()
            total += loss.item()
        te.log(loss=total)
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        opt.step(); rate.step()
        losses.append(total)
    te.close()
    assert fell(losses, .5), ends(losses)

class Sight(nn.Module):
    "A vision transformer with a pooler whose output is not used"
    def __init__(self):
        super().__init__()
        self.vit,self.head = vit(),nn.Linear(32, 4)

    def forward(self, x): return self.head(self.vit(pixel_values=x).last_hidden_state[:, 0])

@is_healthy
def vit_and_its_idle_pooler(arm):
    torch.manual_seed(218)
    model = Sight()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=.05)
    losses = fit(arm, model, opt, classes(model, pictures, 32), 60)
    assert fell(losses, .3), ends(losses)

class Adapter(nn.Module):
    "A frozen layer with an adapter beside it, whose output begins with zeros"
    def __init__(self, layer, width=32, narrow=4):
        super().__init__()
        self.layer,self.down,self.up = layer.requires_grad_(False),nn.Linear(width, narrow),nn.Linear(narrow, width)
        nn.init.zeros_(self.up.weight); nn.init.zeros_(self.up.bias)

    def forward(self, x):
        y = self.layer(x)
        return y + self.up(F.gelu(self.down(y)))

@is_healthy
def adapters_of_a_frozen_body(arm):
    torch.manual_seed(219)
    body = mlp(16, 32, 32, out=32)
    opt = torch.optim.Adam(body.parameters(), lr=5e-3)
    for _ in range(40):
        x,_ = blobs(64)
        opt.zero_grad(); F.mse_loss(body(x)[:, :16], x).backward(); opt.step()
    model = nn.Sequential(body[0], body[1], Adapter(body[2]), body[3], Adapter(body[4]), nn.Linear(32, 4))
    model[0].requires_grad_(False)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    assert fell(fit(arm, model, opt, classes(model), 80), .4)

class Prompted(nn.Module):
    "A frozen language model, and trained prompt vectors before the text"
    def __init__(self, lm, n=4):
        super().__init__()
        self.lm,self.prompt = lm.requires_grad_(False),nn.Parameter(.1*torch.randn(n, 32))

    def forward(self, ids):
        x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.lm.get_input_embeddings()(ids)], 1)
        return self.lm(inputs_embeds=x).logits[:, len(self.prompt):]

def tongue(n, length=4):
    "Return sentences of words from one of two languages, and one boolean per sentence, True for the first language"
    ids = [torch.randint(24, (n,))]
    own = [torch.randperm(24, generator=torch.Generator().manual_seed(s)) for s in (5, 6)]
    which = torch.rand(n)<.5
    for _ in range(length-1): ids.append(torch.where(which, own[0][ids[-1]], own[1][ids[-1]]))
    return torch.stack(ids, 1), which

@is_healthy
def prompts_are_all_that_learns(arm):
    torch.manual_seed(220)
    lm = gpt()
    opt = torch.optim.AdamW(lm.parameters(), lr=5e-3)
    for _ in range(100):
        ids,_ = tongue(64)
        opt.zero_grad(); lm(input_ids=ids, labels=ids).loss.backward(); opt.step()
    model = Prompted(lm)
    opt = torch.optim.Adam([model.prompt], lr=.1)
    def loss(i):
        ids,first = tongue(64)
        return next_word(model(ids[first]), ids[first])
    before = copies(model)
    losses = fit(arm, model, opt, loss, 60)
    assert fell(losses, .8) and moved(model, before)['prompt']>.5 and moved(model, before)['lm.transformer.wte.weight']==0, ends(losses)

@is_healthy
def patches_that_are_hidden(arm):
    torch.manual_seed(221)
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.inward,self.place,self.mask = nn.Linear(9, 24),nn.Parameter(.02*torch.randn(16, 24)),nn.Parameter(torch.zeros(24))
            self.encoder = nn.TransformerEncoderLayer(24, 2, 48, dropout=0., batch_first=True, norm_first=True)
            self.decoder = nn.Linear(24, 9)
        def forward(self, x, hide): return self.decoder(self.encoder(torch.where(hide[..., None], self.mask, self.inward(x)) + self.place))
    model = Hidden()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(.9, .95))
    def loss(i):
        x,_ = pictures(32)
        x = F.unfold(.3*x + .7*fixed(4, 1, 12, 12)[torch.randint(4, (1,))], 3, stride=3).mT
        hide = torch.rand(32, 16).argsort(1)<12
        return F.mse_loss(model(x, hide)[hide], x[hide])
    losses = fit(arm, model, opt, loss, 150)
    assert ends(losses, 20)[1]<.75*ends(losses, 20)[0], ends(losses, 20)

class School(nn.Module):
    "A small student network, and the large teacher network from which it learns"
    def __init__(self, teacher):
        super().__init__()
        self.teacher,self.student = teacher.eval().requires_grad_(False),mlp(16, 12, out=4)

    def forward(self, x): return self.student(x), self.teacher(x)

@is_healthy
def student_of_a_teacher_within(arm):
    torch.manual_seed(222)
    teacher = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(.2), nn.Linear(64, 4))
    opt = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    for _ in range(50):
        x,y = blobs(64, far=.7)
        opt.zero_grad(); F.cross_entropy(teacher(x), y).backward(); opt.step()
    model = School(teacher)
    opt = torch.optim.Adam(model.student.parameters(), lr=1e-2)
    te,losses = arm(model, optimizer=opt),[]
    for _i in range(120):
        x,_ = blobs(64, far=.7)
        s,t = model(x)
        loss = F.kl_div(F.log_softmax(s/2, -1), F.softmax(t/2, -1), reduction='batchmean')*4
        te.log(distance=loss)
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())
    te.close()
    assert fell(losses, .2), ends(losses)

class Sphere(nn.Module):
    "A classifier by the cosine between the features of a sample and a vector for each class"
    def __init__(self):
        super().__init__()
        self.body,self.proxies = mlp(16, 32, out=8),nn.Parameter(torch.randn(12, 8))

    def forward(self, x): return 16*F.normalize(self.body(x), dim=1)@F.normalize(self.proxies, dim=1).T

@is_healthy
def proxies_on_a_sphere(arm):
    torch.manual_seed(223)
    model = Sphere()
    opt = torch.optim.SGD([{'params': model.body.parameters()}, {'params': [model.proxies], 'lr': 1.}], lr=.05, momentum=.9)
    losses = fit(arm, model, opt, classes(model, blobs, 64, classes=12), 100)
    assert losses[0]>3.5 and fell(losses, .3), ends(losses)

@is_healthy
def twenty_rare_tags(arm):
    torch.manual_seed(224)
    model = mlp(24, 48, out=20)
    nn.init.constant_(model[-1].bias, -4.)
    nn.init.normal_(model[-1].weight, std=.01)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    def loss(i):
        x = torch.randn(64, 24)
        return F.binary_cross_entropy_with_logits(model(x), (x@fixed(24, 20)>10).float())
    losses = fit(arm, model, opt, loss, 250)
    assert losses[0]<.2 and ends(losses, 40)[1]<.7*ends(losses, 40)[0], ends(losses, 40)

class Grades(nn.Module):
    "An ordinal regression: one output, and four thresholds between the grades"
    def __init__(self):
        super().__init__()
        self.body,self.cuts = mlp(8, 24, out=1, act=nn.Tanh),nn.Parameter(torch.tensor([-2., -1., 1., 2.]))

    def forward(self, x): return self.body(x) - self.cuts

@is_healthy
def grades_in_order(arm):
    torch.manual_seed(225)
    model = Grades()
    opt = torch.optim.SGD(model.parameters(), lr=.3, momentum=.8, nesterov=True)
    te,losses = arm(model, optimizer=opt),[]
    for _i in range(200):
        x,y = curve(48)
        y = 2*x[:, 3:4] + y
        above = (y > torch.tensor([-3., -1., 1., 3.])).float()
        loss = F.binary_cross_entropy_with_logits(model(x), above)
        te.log(ordinal=loss)
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())
    te.close()
    assert fell(losses, .5), ends(losses)

def survivors(n):
    "Return samples sorted by survival time, the longest first, and for each sample whether its death was observed"
    x = torch.randn(n, 10)
    t = -torch.rand(n).log()*torch.exp(-(x@fixed(10)))
    x = x[t.argsort(descending=True)]
    return x, torch.rand(n)<.6

@is_healthy
def lives_that_are_cut(arm):
    torch.manual_seed(226)
    model = mlp(10, 16, out=1, act=nn.SELU)
    opt = torch.optim.RAdam(model.parameters(), lr=2e-2)
    def loss(i):
        x,died = survivors(64)
        h = model(x).squeeze(1)
        return -(h-h.logcumsumexp(0))[died].mean()
    losses = fit(arm, model, opt, loss, 100)
    assert fell(losses, .8), ends(losses)

# Healthy trainings: unusual optimizers and schedules

@is_healthy
def lion_written_by_hand(arm):
    torch.manual_seed(228)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(72, 4))
    mean = [torch.zeros_like(p) for p in model.parameters()]
    te,losses = arm(model),[]
    for i in range(100):
        x,y = pictures(32)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        te.log(loss=loss)
        with torch.no_grad():
            for p,m in zip(model.parameters(), mean, strict=True):
                p -= 2e-3*(1-i/100)*(.9*m+.1*p.grad).sign()
                m.mul_(.99).add_(p.grad, alpha=.01)
        te.step()
        model.zero_grad()
        losses.append(loss.item())
    te.close()
    assert fell(losses, .4), ends(losses)

@is_healthy
def four_at_a_time_by_asgd(arm):
    torch.manual_seed(229)
    model = mlp(8, 24, out=1, act=nn.Tanh)
    opt = torch.optim.ASGD(model.parameters(), lr=.05)
    def loss(i):
        x,_ = curve(4)
        return F.l1_loss(model(x), 2*x[:, :1] + 2*torch.distributions.StudentT(2.).sample((4, 1)))
    held = torch.randn(500, 8)
    losses = fit(arm, model, opt, loss, 400)
    assert F.mse_loss(seen(model, held), 2*held[:, :1])<2.5 and max(losses)>4*sorted(losses)[200]

@is_healthy
def one_table_by_rprop(arm):
    torch.manual_seed(230)
    model = mlp(8, 16, out=1, act=nn.Tanh)
    opt = torch.optim.Rprop(model.parameters(), lr=1e-2)
    x,y = curve(200)
    losses = fit(arm, model, opt, lambda i: F.mse_loss(model(x), y), 120)
    assert fell(losses, .3), ends(losses)

@is_healthy
def up_before_it_goes_down(arm):
    torch.manual_seed(231)
    model = ResNet(blocks=2)
    opt = torch.optim.SGD(model.parameters(), lr=.25, momentum=.9)
    rate = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: (i+1)/10 if i<10 else .5*(1+math.cos(math.pi*(i-10)/90)))
    losses = fit(arm, model, opt, classes(model, pictures, 24), 100, schedule=rate)
    assert max(losses[3:20])>1.3*losses[0] and fell(losses, .2), (losses[:20], ends(losses))

@is_healthy
def body_set_free_at_half(arm):
    torch.manual_seed(232)
    model = Words(nn.GRU)
    for m in (model.embed, model.rnn): m.requires_grad_(False)
    opt = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    def free(i, te):
        if i==59:
            for m in (model.embed, model.rnn):
                m.requires_grad_(True)
                opt.add_param_group({'params': list(m.parameters()), 'lr': 5e-3})
    def loss(i):
        ids = sentences(24)
        return next_word(model(ids), ids)
    losses = fit(arm, model, opt, loss, 130, after=free)
    assert fell(losses[:60], .8) and fell(losses, .4), ends(losses)

@is_healthy
def half_of_it_at_rest(arm):
    torch.manual_seed(233)
    model,w = nn.Sequential(nn.Linear(12, 16, bias=False), nn.Linear(16, 3)),fixed(12, 3)
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    rate = torch.optim.lr_scheduler.StepLR(opt, 60, .2)
    def loss(i):
        x = torch.randn(128, 12)
        return F.mse_loss(model(x), x@w + .3*torch.randn(128, 3))
    losses = fit(arm, model, opt, loss, 300, schedule=rate)
    assert .08<sum(losses[140:200])/60<.1 and .08<sum(losses[-60:])/60<.1 and losses[0]>5


# Healthy trainings: unusual sizes of losses, inputs and outputs

@is_healthy
def losses_of_a_millionth(arm):
    torch.manual_seed(234)
    model = mlp(8, 32, out=1, act=nn.Tanh)
    nn.init.normal_(model[-1].weight, std=1e-5); nn.init.zeros_(model[-1].bias)
    opt = torch.optim.Adam(model.parameters(), lr=5e-4)
    def loss(i):
        x,y = curve(64)
        return F.mse_loss(model(x), 1e-3*y)
    losses = fit(arm, model, opt, loss, 150)
    assert losses[0]<3e-6 and fell(losses, .5), ends(losses)

@is_healthy
def losses_of_millions(arm):
    torch.manual_seed(235)
    model = mlp(16, 32, out=16)
    # The tiny rate fits the loss, a sum of squared errors of 512 samples multiplied by 100
    opt = torch.optim.SGD(model.parameters(), lr=1e-8, momentum=.9)
    def loss(i):
        x,_ = blobs(512)
        return F.mse_loss(100*model(x), 100*x, reduction='sum')
    losses = fit(arm, model, opt, loss, 200, clip=1e7)
    assert losses[0]>1e6 and fell(losses, .5), ends(losses)

@is_healthy
def visits_up_to_fifty(arm):
    torch.manual_seed(236)
    model = mlp(12, 32, out=1)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    def loss(i):
        x = torch.poisson(torch.rand(64, 12)*30)
        x[:, 4],x[:, 7] = 1.,0. # Columns 4 and 7 are constant
        return F.poisson_nll_loss(model(x), torch.poisson(.05*x[:, :1] + .02*x[:, 1:2]))
    losses = fit(arm, model, opt, loss, 200)
    assert ends(losses)[1]<ends(losses)[0]-.3, ends(losses)

@is_healthy
def bags_of_words(arm):
    torch.manual_seed(237)
    model = mlp(200, 32, out=4)
    opt = torch.optim.Adagrad(model.parameters(), lr=3e-2)
    def loss(i):
        y = torch.randint(4, (64,))
        words = torch.where(torch.rand(64, 8)<.5, torch.randint(50, (64, 8))*4+y[:, None], torch.randint(200, (64, 8)))
        return F.cross_entropy(model(torch.zeros(64, 200).scatter_(1, words, 1.)), y)
    losses = fit(arm, model, opt, loss, 120)
    assert fell(losses, .4), ends(losses)

@is_healthy
def codes_of_plus_and_minus(arm):
    torch.manual_seed(238)
    model = nn.Sequential(*mlp(16, 32, out=8), nn.Tanh())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    code = fixed(4, 8).sign()
    def loss(i):
        x,y = blobs(64)
        b = model(x)
        return F.mse_loss(b, code[y]) + .1*(1-b.abs()).mean()
    losses = fit(arm, model, opt, loss, 150)
    assert fell(losses, .1) and (seen(model, blobs(300)[0]).abs()>.95).float().mean()>.8, ends(losses)

class Highway(nn.Module):
    "A highway network: the gates of its layers pass the input on, until the layers have learned"
    def __init__(self, n=5, width=24):
        super().__init__()
        self.inward,self.head = nn.Linear(16, width),nn.Linear(width, 4)
        self.ways,self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(n)),nn.ModuleList(nn.Linear(width, width) for _ in range(n))
        self.sigmoid = nn.ModuleList(nn.Sigmoid() for _ in range(n))
        for g in self.gates: nn.init.constant_(g.bias, -2.)

    def forward(self, x):
        x = self.inward(x)
        for way,gate,sigmoid in zip(self.ways, self.gates, self.sigmoid, strict=True):
            g = sigmoid(gate(x))
            x = g*F.relu(way(x)) + (1-g)*x
        return self.head(x)

@is_healthy
def gates_closed_at_first(arm):
    torch.manual_seed(239)
    model = Highway()
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9, nesterov=True)
    losses = fit(arm, model, opt, classes(model), 80, stats='full')
    assert fell(losses, .3), ends(losses)

@is_healthy
def words_on_a_ball_of_ten(arm):
    torch.manual_seed(240)
    model = Table(max_norm=10.)
    for e in (model.town, model.trade): nn.init.normal_(e.weight, std=10.)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    def loss(i):
        x,y = households(128)
        return F.mse_loss(model(*x), y)
    losses = fit(arm, model, opt, loss, 250)
    assert model.town.weight.norm(dim=1).median()>9 and fell(losses, .4), ends(losses)

@is_healthy
def one_weight_in_twenty(arm):
    torch.manual_seed(241)
    model = mlp(16, 128, 128, out=4)
    keep = {}
    for k,p in model.named_parameters():
        if p.dim()==2 and p.shape[0]>4:
            keep[k] = (torch.rand_like(p)<.05).float()
            p.data *= 4*keep[k]
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    def prune(i, te):
        with torch.no_grad():
            for k,p in model.named_parameters():
                if k in keep: p *= keep[k]
    losses = fit(arm, model, opt, classes(model), 100, after=prune)
    assert fell(losses, .3) and (model[2].weight==0).float().mean()>.93, ends(losses)

class Winners(nn.Module):
    "A layer of which only the largest fifth of the outputs is kept"
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x): return F.relu(x - x.topk(self.k+1, 1).values[:, -1:].detach())

@is_healthy
def four_of_five_are_silent(arm):
    torch.manual_seed(242)
    model = nn.Sequential(nn.Linear(16, 60), Winners(12), nn.Linear(60, 60), Winners(12), nn.Linear(60, 16))
    opt = torch.optim.NAdam(model.parameters(), lr=3e-3)
    def loss(i):
        x,_ = blobs(64)
        return F.mse_loss(model(x), x)
    losses = fit(under('reconstruction', arm), model, opt, loss, 120)
    assert fell(losses, .5) and (seen(model[:2], blobs(200)[0])==0).float().mean()>.75, ends(losses)

@is_healthy
def only_the_encoder_is_watched(arm):
    torch.manual_seed(244)
    encoder,decoder = mlp(16, 32, out=3),mlp(3, 32, out=16)
    opt = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=5e-3)
    te,losses = arm(encoder, optimizer=opt),[]
    for i in range(150):
        x,_ = blobs(64)
        loss = F.mse_loss(decoder(encoder(x)), x)
        opt.zero_grad(); loss.backward(); opt.step()
        losses.append(loss.item())
        if i%30==29: seen(encoder, x)
    te.close()
    assert fell(losses, .6), ends(losses)

@is_healthy
def autocast_with_looks_between(arm):
    torch.manual_seed(245)
    model = Experts()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    held = blobs(128)
    def loss(i):
        x,y = blobs(64)
        with torch.autocast('cpu', dtype=torch.bfloat16): return F.cross_entropy(model(x).float(), y)
    def look(i, te):
        if i%25==24: te.log(val_loss=F.cross_entropy(seen(model, held[0]), held[1]))
    losses = fit(arm, model, opt, loss, 100, after=look, only_training=True)
    assert fell(losses, .3), ends(losses)

