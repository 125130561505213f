"Healthy trainings of small networks: tables, small images, short sequences, and many losses and optimizers"
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR

from . import is_healthy
from .data import accuracy, batch, digits, fell, plain, standard, table, text, windows


# Healthy trainings: plain classifiers

@is_healthy
def digits_mlp_sgd(arm):
    torch.manual_seed(0)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    te,losses = arm(model, optimizer=opt),[]
    for _ in range(150):
        xb,yb = batch(64, x, y)
        loss = F.cross_entropy(model(xb), yb)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    te.close()
    fell(losses, .3)


@is_healthy
def converged_long_ago(arm):
    "A converged classifier: most batches hardly give a gradient, and a few have an image with a wrong label"
    torch.manual_seed(1)
    x,y = digits(classes=(0, 1))
    y[100] = 1-y[100]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    opt = torch.optim.Adam(model.parameters(), lr=8e-3)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(8, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 300, loss_of)
    te.close()
    late = sorted(losses[100:])
    assert late[100]<.01*losses[0] and accuracy(model, x, y)>.98


@is_healthy
def one_batch_on_purpose(arm):
    "The usual first test of a new network: it must memorize 16 images"
    torch.manual_seed(2)
    x,y = batch(16, *digits(images=True))
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    te = arm(model, optimizer=opt)
    losses = plain(te, opt, 200, lambda: F.cross_entropy(model(x), y))
    te.close()
    assert losses[-1]<.01 and accuracy(model, x, y)==1


@is_healthy
def batches_of_four(arm):
    "With batches of four samples, the loss of single steps is several times the usual loss"
    torch.manual_seed(3)
    x,y = digits(images=True)
    class LeNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1,self.conv2 = nn.Conv2d(1, 8, 3, padding=1),nn.Conv2d(8, 16, 3, padding=1)
            self.fc1,self.fc2 = nn.Linear(64, 32),nn.Linear(32, 10)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv1(x)), 2)
            x = F.max_pool2d(F.relu(self.conv2(x)), 2)
            return self.fc2(F.relu(self.fc1(x.flatten(1))))
    model = LeNet()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    te,losses = arm(model, optimizer=opt),[]
    for _ in range(300):
        xb,yb = batch(4, x, y)
        out = model(xb)
        loss = F.cross_entropy(out, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        te.log(train_loss=loss, train_acc=(out.argmax(-1)==yb).float().mean())
    te.close()
    fell(losses, .4)


@is_healthy
def whole_table_newton_like(arm):
    "LBFGS evaluates the model several times in a step"
    torch.manual_seed(4)
    x,y = table('breast_cancer')
    y = y.float()
    model = nn.Linear(30, 1)
    opt = torch.optim.LBFGS(model.parameters(), lr=.5, max_iter=4, line_search_fn='strong_wolfe')
    te,losses = arm(model, optimizer=opt),[]
    def closure():
        opt.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x)[:, 0], y)+1e-3*model.weight.square().sum()
        loss.backward()
        return loss
    for _ in range(40):
        loss = opt.step(closure)
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    assert losses[-1]<.15


@is_healthy
def large_batch_momentum_nesterov(arm):
    torch.manual_seed(5)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 10))
    opt = torch.optim.SGD(model.parameters(), lr=.3, momentum=.95, nesterov=True, weight_decay=1e-4)
    sched = MultiStepLR(opt, [50, 70], gamma=.1)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(1024, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 90, loss_of, sched.step)
    te.close()
    fell(losses, .2)


@is_healthy
def dropout_smoothing_mixup(arm):
    "Regularization is so strong that the loss cannot come near 0"
    torch.manual_seed(6)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(.5), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(.5), nn.Linear(256, 10))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=.05)
    te = arm(model, optimizer=opt)
    before = accuracy(model, x, y)
    for _ in range(150):
        xb,yb = batch(64, x, y)
        lam,other = torch.distributions.Beta(.4, .4).sample().item(),torch.randperm(64)
        out = model(lam*xb+(1-lam)*xb[other])
        loss = lam*F.cross_entropy(out, yb, label_smoothing=.1)+(1-lam)*F.cross_entropy(out, yb[other], label_smoothing=.1)
        opt.zero_grad(set_to_none=False)
        loss.backward()
        opt.step()
        te.log(loss=loss)
    te.close()
    assert before<.3 and accuracy(model, x, y)>.9


@is_healthy
def sigmoid_net_of_the_textbook(arm):
    "The textbook example of two moons: sigmoids, a squared error, and a suitable learning rate"
    from sklearn.datasets import make_moons
    torch.manual_seed(7)
    x,y = make_moons(300, noise=.1, random_state=0)
    x,y = torch.tensor(x, dtype=torch.float32),torch.tensor(y, dtype=torch.float32)[:, None]
    model = nn.Sequential(nn.Linear(2, 16), nn.Sigmoid(), nn.Linear(16, 1), nn.Sigmoid())
    opt = torch.optim.SGD(model.parameters(), lr=2., momentum=.9)
    te = arm(model, optimizer=opt)
    losses = plain(te, opt, 300, lambda: F.mse_loss(model(x), y))
    te.close()
    fell(losses, .3)


@is_healthy
def deep_selu_alpha_dropout(arm):
    "Ten layers of SELU, whose outputs keep their variance without normalization"
    torch.manual_seed(8)
    x,y = table('wine')
    layers = [m for i in range(10) for m in (nn.Linear(13 if i==0 else 32, 32), nn.SELU(), nn.AlphaDropout(.05))]
    model = nn.Sequential(*layers, nn.Linear(32, 3))
    for m in model:
        if isinstance(m, nn.Linear):
            nn.init.kaiming_normal_(m.weight, nonlinearity='linear')
            nn.init.zeros_(m.bias)
    opt = torch.optim.SGD(model.parameters(), lr=.01, momentum=.9)
    te = arm(model, optimizer=opt)
    losses = plain(te, opt, 100, lambda: F.cross_entropy(model(x), y))
    te.close()
    fell(losses, .4)
    assert accuracy(model, x, y)>.9


@is_healthy
def deep_tanh_xavier(arm):
    torch.manual_seed(9)
    x,y = table('iris')
    model = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(),
        nn.Linear(24, 3))
    for m in model[::2]:
        nn.init.xavier_normal_(m.weight, gain=5/3)
        nn.init.zeros_(m.bias)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    te = arm(model, optimizer=opt, stats='full', ttypes=('input', 'output', 'weight', 'weight_grad', 'output_grad', 'update'))
    def loss_of():
        xb,yb = batch(32, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 120, loss_of)
    te.close()
    fell(losses, .3)


# Healthy trainings: inputs with unusual values

@is_healthy
def raw_columns_before_batchnorm(arm):
    "The columns of the wine data in their own units: proline is near 750, a hue near 1. The first module is a BatchNorm"
    from sklearn.datasets import load_wine
    torch.manual_seed(10)
    x,y = load_wine(return_X_y=True)
    x,y = torch.tensor(x, dtype=torch.float32),torch.tensor(y)
    model = nn.Sequential(nn.BatchNorm1d(13), nn.Linear(13, 32), nn.ELU(), nn.Linear(32, 3))
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(32, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 100, loss_of)
    te.close()
    fell(losses, .3)
    assert accuracy(model, x, y)>.9


@is_healthy
def bytes_of_pictures_and_batchnorm(arm):
    "Pixels from 0 to 255, many of which are 0 in all images, in a depthwise network with ReLU6, as on phones"
    torch.manual_seed(11)
    x,y = digits(images=True)
    x = (x*255).round()
    def separable(a, b, stride=1):
        return nn.Sequential(nn.Conv2d(a, a, 3, stride, 1, groups=a, bias=False), nn.BatchNorm2d(a), nn.ReLU6(inplace=True),
            nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU6(inplace=True))
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU6(inplace=True),
        separable(12, 24, 2), separable(24, 24), separable(24, 48, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(.1), nn.Linear(48, 10))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    te = arm(model, optimizer=opt, every=2)
    def loss_of():
        xb,yb = batch(32, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 100, loss_of)
    te.close()
    fell(losses, .5)


@is_healthy
def one_hots_and_constant_columns(arm):
    "Raw columns of a database: one-hot categories, a version number that is always 1, and a flag that is never set"
    torch.manual_seed(12)
    x,y = table('breast_cancer')
    category = (x[:, 0]*2).round().long().clamp(-3, 4)+3
    x = torch.cat([x[:, :8], F.one_hot(category, 12), torch.ones(len(x), 1), torch.zeros(len(x), 2)], 1)
    model = nn.Sequential(nn.Linear(23, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    opt = torch.optim.Adagrad(model.parameters(), lr=.05)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(48, x, y)
        return F.binary_cross_entropy_with_logits(model(xb)[:, 0], yb.float())
    losses = plain(te, opt, 100, loss_of)
    te.close()
    fell(losses, .6)


# Healthy trainings: regression and various losses

@is_healthy
def targets_of_thousands(arm):
    "Targets near 1500, which are normalized for the loss, and evaluations between the steps"
    torch.manual_seed(13)
    x,y = table('diabetes')
    y = y.float()*10
    (x,seen),(y,true) = (x[:350], x[350:]),(y[:350], y[350:])
    model = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Dropout(.1), nn.Linear(32, 1))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    te,scores = arm(model, optimizer=opt, only_training=True),[]
    for i in range(150):
        model.train()
        xb,yb = batch(64, x, y)
        loss = F.mse_loss(model(xb)[:, 0], (yb-y.mean())/y.std())
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss)
        if i%10==0:
            model.eval()
            with torch.no_grad():
                mae = (model(seen)[:, 0]*y.std()+y.mean()-true).abs().mean()
                te.log(val_mae=mae)
                scores.append(mae.item())
    te.close()
    assert scores[-1]<.9*scores[0]


@is_healthy
def evaluated_between_steps(arm):
    "Evaluations between the training steps, which are also recorded"
    torch.manual_seed(14)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(.3), nn.Linear(48, 10))
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    te = arm(model, optimizer=opt)
    for _ in range(12):
        model.train()
        for _ in range(10):
            xb,yb = batch(64, x[:1500], y[:1500])
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            te.log(loss=loss)
        model.eval()
        with torch.no_grad():
            out = model(x[1500:])
            te.log(val_loss=F.cross_entropy(out, y[1500:]), val_acc=(out.argmax(-1)==y[1500:]).float().mean())
    te.close()
    assert accuracy(model, x[1500:], y[1500:])>.85


@is_healthy
def quantiles(arm):
    torch.manual_seed(15)
    x,y = table('diabetes')
    y,q = standard(y[:, None].float()),torch.tensor([.1, .5, .9])
    model = nn.Sequential(nn.Linear(10, 32), nn.Mish(), nn.Linear(32, 3))
    opt = torch.optim.NAdam(model.parameters(), lr=4e-3)
    te,losses = arm(model, optimizer=opt),[]
    for i in range(150):
        xb,yb = batch(64, x, y)
        over = yb-model(xb)
        loss = torch.maximum(q*over, (q-1)*over).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if i%10==0: te.log(pinball_loss=loss)
    te.close()
    fell(losses, .85)
    below = (y<model(x)).float().mean(0)
    assert below[0]<.3 and below[2]>.7


@is_healthy
def hinge_to_exactly_zero(arm):
    "When all samples have the margin of the hinge loss, the loss and all gradients are exactly 0"
    torch.manual_seed(16)
    x,y = table('iris')
    x,y = x[:100],y[:100]*2.-1
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    opt = torch.optim.SGD(model.parameters(), lr=.2)
    te = arm(model, optimizer=opt)
    losses = plain(te, opt, 200, lambda: (1-y*model(x)[:, 0]).clamp(min=0).mean())
    te.close()
    assert losses[-1]==0


@is_healthy
def counts_softplus_poisson(arm):
    "A Poisson regression with softplus, whose output is always above 0, and whose loss falls below 0"
    torch.manual_seed(17)
    x = torch.randn(400, 6)
    y = torch.poisson((x@torch.tensor([.5, -.4, .3, .2, 0, 0])+2).exp())
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1), nn.Softplus())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(64, x, y)
        return F.poisson_nll_loss(model(xb)[:, 0], yb, log_input=False)
    losses = plain(te, opt, 200, loss_of)
    te.close()
    assert sum(losses[-20:])<sum(losses[:20])


@is_healthy
def last_relu(arm):
    "Targets are prices of at least 0, so a ReLU at the end is right: a third of the outputs is 0"
    torch.manual_seed(18)
    x = torch.randn(500, 8)
    y = (x[:, 0]*2+x[:, 1].abs()).clamp(min=0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1), nn.ReLU())
    nn.init.constant_(model[2].bias, 1.)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(64, x, y)
        return F.huber_loss(model(xb)[:, 0], yb)
    losses = plain(te, opt, 150, loss_of)
    te.close()
    fell(losses, .2)


@is_healthy
def pairs_to_rank(arm):
    torch.manual_seed(19)
    x,y = table('diabetes')
    y = y.float()
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te,right = arm(model, optimizer=opt),[]
    for _ in range(120):
        a,ya = batch(64, x, y)
        b,yb = batch(64, x, y)
        sa,sb,sign = model(a)[:, 0],model(b)[:, 0],(ya-yb).sign()
        loss = F.margin_ranking_loss(sa, sb, sign, margin=1.)
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss)
        right.append(((sa-sb)*sign>0).float().mean().item())
    te.close()
    assert sum(right[-20:])/20>.65


@is_healthy
def mixture_density(arm):
    "The negative log-likelihood of a density, logged as `nll`, falls below 0"
    torch.manual_seed(20)
    t = torch.rand(500, 1)*2-1
    y = .3*torch.sin(4*t)+.01*torch.randn_like(t)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 9))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    te,nlls = arm(model, optimizer=opt),[]
    for _ in range(250):
        tb,yb = batch(128, t, y)
        mix,mean,log_std = model(tb).chunk(3, -1)
        each = -.5*((yb-mean)/log_std.exp()).square()-log_std-.5*math.log(2*math.pi)
        nll = -(mix.log_softmax(-1)+each).logsumexp(-1).mean()
        opt.zero_grad()
        nll.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.)
        opt.step()
        te.log(nll=nll)
        nlls.append(nll.item())
    te.close()
    assert sum(nlls[-20:])/20<0<nlls[0]


# Healthy trainings: unusual changes of weights and learning rates

@is_healthy
def pruned_with_masks(arm):
    "Masks keep 90% of the weights at 0"
    torch.manual_seed(21)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    for m in model[::2]: prune.random_unstructured(m, 'weight', amount=.9 if m.out_features>10 else .5)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(64, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 120, loss_of)
    te.close()
    fell(losses, .4)


@is_healthy
def weight_and_spectral_norm(arm):
    torch.manual_seed(22)
    x,y = digits()
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(64, 64)), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(64, 32)), nn.ReLU(),
        nn.Linear(32, 10))
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(64, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 120, loss_of)
    te.close()
    fell(losses, .4)


@is_healthy
def fake_quantised(arm):
    "Weights and activations are rounded to eight bits in the forward pass, and gradients ignore the rounding"
    torch.manual_seed(23)
    x,y = digits()
    class Rounded(nn.Linear):
        def forward(self, x):
            w = self.weight
            scale = w.abs().max().detach().item()/7
            return F.linear(torch.fake_quantize_per_tensor_affine(x, .05, 0, -128, 127), torch.fake_quantize_per_tensor_affine(w, scale, 0, -8, 7), self.bias)
    model = nn.Sequential(Rounded(64, 64), nn.ReLU(), Rounded(64, 10))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(64, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 120, loss_of)
    te.close()
    fell(losses, .4)


@is_healthy
def early_layers_a_hundred_times_slower(arm):
    torch.manual_seed(24)
    x,y = digits(images=True)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
    opt = torch.optim.AdamW([{'params': model[0].parameters(), 'lr': 3e-5}, {'params': model[2].parameters(), 'lr': 3e-4},
        {'params': model[5].parameters(), 'lr': 3e-3, 'weight_decay': .3}])
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(32, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 120, loss_of)
    te.close()
    fell(losses, .6)


@is_healthy
def frozen_in_turns(arm):
    "The two factors of a matrix factorization are trained in turns of ten steps"
    torch.manual_seed(25)
    x,y = table('wine')
    model = nn.Sequential(nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 3))
    opt = torch.optim.SGD(model.parameters(), lr=.3)
    te,losses = arm(model, optimizer=opt),[]
    for i in range(120):
        for j in (0, 2): model[j].requires_grad_((i//10)%2==(j==2))
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    fell(losses, .3)


@is_healthy
def unfrozen_later(arm):
    "Only the head is trained for 40 steps, then all layers at a lower learning rate"
    torch.manual_seed(26)
    x,y = digits()
    model = nn.ModuleDict({'body': nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()), 'head': nn.Linear(32, 10)})
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.head = model['body'],model['head']
        def forward(self, x): return self.head(self.body(x))
    net = Whole()
    for p in net.body.parameters(): p.requires_grad = False
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    te,losses = arm(net, optimizer=opt),[]
    for i in range(120):
        if i==40:
            for p in net.body.parameters(): p.requires_grad = True
            opt.param_groups[0]['lr'] = 2e-3
        xb,yb = batch(64, x, y)
        loss = F.cross_entropy(net(xb), yb)
        te.log(loss=loss, lr=opt.param_groups[0]['lr'])
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    te.close()
    fell(losses, .3)


@is_healthy
def accumulated_and_clipped(arm):
    "One step of the optimizer for four forward and backward passes"
    torch.manual_seed(27)
    x,y = digits(images=True)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 16, 3, 2), nn.GroupNorm(4, 16), nn.SiLU(),
        nn.Flatten(), nn.Linear(64, 10))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    te,losses = arm(model, optimizer=opt),[]
    for i in range(240):
        xb,yb = batch(8, x, y)
        loss = F.cross_entropy(model(xb), yb)/4
        loss.backward()
        losses.append(loss.item()*4)
        if i%4==3:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.)
            te.log(loss=sum(losses[-4:])/4, grad_norm=norm)
            opt.step()
            opt.zero_grad()
    te.close()
    fell(losses, .6)


@is_healthy
def no_optimizer_no_loss(arm):
    "The training loop updates weights by hand, without an optimizer. Nothing is logged, and te.step() ends a step"
    torch.manual_seed(28)
    x,y = table('iris')
    model = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 3))
    te,losses = arm(model),[]
    for _ in range(100):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        te.step()
        with torch.no_grad():
            for p in model.parameters():
                p -= .5*p.grad
                p.grad = None
        losses.append(loss.item())
    te.close()
    fell(losses, .3)


@is_healthy
def sharpness_aware(arm):
    "Sharpness-aware minimization: each step has two passes, the second at nearby weights with a larger loss"
    torch.manual_seed(29)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    te,losses = arm(model, optimizer=opt),[]
    for _ in range(80):
        xb,yb = batch(64, x, y)
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        with torch.no_grad():
            scale = .05/torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            climbs = [p.grad*scale for p in model.parameters()]
            for p,c in zip(model.parameters(), climbs, strict=True): p += c
        opt.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        with torch.no_grad():
            for p,c in zip(model.parameters(), climbs, strict=True): p -= c
        opt.step()
        opt.zero_grad()
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    fell(losses, .4)


@is_healthy
def averaged_copy(arm):
    "The training keeps a moving average of the weights as its result"
    torch.manual_seed(30)
    x,y = digits(images=True)
    model = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 10))
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(.95), use_buffers=True)
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    sched = CosineAnnealingLR(opt, 100)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(32, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 100, loss_of, lambda: (ema.update_parameters(model), sched.step()))
    te.close()
    fell(losses, .3)
    assert accuracy(ema, x, y)>.85


@is_healthy
def physics_in_double_precision(arm):
    "A network solves u'' = -u with u(0)=0 and u'(0)=1: the loss contains derivatives of the network"
    torch.manual_seed(31)
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)).double()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te = arm(model, optimizer=opt)
    def loss_of():
        t = (torch.rand(64, 1, dtype=torch.float64)*3).requires_grad_()
        u = model(t)
        du, = torch.autograd.grad(u.sum(), t, create_graph=True)
        d2u, = torch.autograd.grad(du.sum(), t, create_graph=True)
        zero = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        u0 = model(zero)
        du0, = torch.autograd.grad(u0.sum(), zero, create_graph=True)
        return (d2u+u).square().mean()+5*u0.square().mean()+5*(du0-1).square().mean()
    losses = plain(te, opt, 250, loss_of)
    te.close()
    fell(losses, .2)


@is_healthy
def meta_learned_start(arm):
    "Meta-learning (MAML) of a start from which one step learns a sine wave: gradients of gradients"
    torch.manual_seed(32)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te,before,after = arm(model, optimizer=opt),[],[]
    for _ in range(120):
        total = 0
        for _ in range(4):
            height,phase = torch.rand(2)*torch.tensor([2., 3.])+torch.tensor([.5, 0])
            x = torch.rand(20, 1)*6-3
            y = height*torch.sin(x+phase)
            params = dict(model.named_parameters())
            inner = F.mse_loss(functional_call(model, params, (x[:10],)), y[:10])
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            fast = {n: p-.05*g for (n,p),g in zip(params.items(), grads, strict=True)}
            total = total+F.mse_loss(functional_call(model, fast, (x[10:],)), y[10:])/4
            before.append(inner.item())
        opt.zero_grad()
        total.backward()
        opt.step()
        te.log(meta_loss=total)
        after.append(total.item())
    te.close()
    assert sum(after[-20:])/20<.85*sum(after[:5])/5


@is_healthy
def distilled(arm):
    "Distillation: the teacher network is outside of the armed model, and is not trained"
    torch.manual_seed(33)
    x,y = digits()
    teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    first = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for _ in range(60):
        first.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        first.step()
    teacher.requires_grad_(False).eval()
    student = nn.Sequential(nn.Linear(64, 16), nn.Hardswish(), nn.Linear(16, 10))
    opt = torch.optim.Adam(student.parameters(), lr=1e-2)
    te,losses = arm(student, optimizer=opt),[]
    for _ in range(120):
        xb,_ = batch(64, x, y)
        loss = F.kl_div((student(xb)/3).log_softmax(-1), (teacher(xb)/3).log_softmax(-1), log_target=True, reduction='batchmean')*9
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(distill_loss=loss)
        losses.append(loss.item())
    te.close()
    fell(losses, .3)
    assert accuracy(student, x, y)>.85


@is_healthy
def heads_in_turns(arm):
    "Three tasks: each step trains one or two of them, so each head is unused in many steps"
    torch.manual_seed(34)
    x,y = digits()
    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
            self.heads = nn.ModuleDict({'digit': nn.Linear(64, 10), 'odd': nn.Linear(64, 2), 'ink': nn.Linear(64, 1)})

        def forward(self, x, task): return self.heads[task](self.trunk(x))
    model = Tasks()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    te,losses = arm(model, optimizer=opt),[]
    for i in range(180):
        xb,yb = batch(48, x, y)
        loss = F.cross_entropy(model(xb, 'digit'), yb)
        losses.append(loss.item())
        if i%3==0: loss = loss+.5*F.cross_entropy(model(xb, 'odd'), yb%2)
        if i%7==0: loss = loss+.1*F.mse_loss(model(xb, 'ink')[:, 0], xb.mean(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss)
    te.close()
    fell(losses, .3)


@is_healthy
def twins_with_shared_weights(arm):
    "A siamese network for pairs of images, which learns their distance"
    torch.manual_seed(35)
    x,y = digits()
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Sequential(nn.Linear(64, 48), nn.PReLU(), nn.Linear(48, 8))

        def forward(self, a, b): return (self.embed(a)-self.embed(b)).square().sum(-1).add(1e-9).sqrt()
    model = Siamese()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    te,losses = arm(model, optimizer=opt),[]
    for _ in range(120):
        a,ya = batch(64, x, y)
        b,yb = batch(64, x, y)
        same,d = (ya==yb).float(),model(a, b)
        loss = (same*d.square()*4+(1-same)*(1-d).clamp(min=0).square()).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    fell(losses, .6)


@is_healthy
def triplets_mostly_solved(arm):
    "A triplet loss: in the end, no triplet of most batches violates the margin, so the loss is 0"
    torch.manual_seed(36)
    x,y = digits(classes=range(4))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    te,losses = arm(model, optimizer=opt),[]
    for _ in range(150):
        c = torch.randint(4, (8,))
        other = (c+torch.randint(1, 4, (8,)))%4
        a,p,n = (torch.stack([batch(1, x[y==k])[0][0] for k in ks]) for ks in (c, c, other))
        loss = F.triplet_margin_loss(model(a), model(p), model(n), margin=.5)
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    assert sum(losses[-30:])<.3*sum(losses[:30]) and 0. in losses


@is_healthy
def autoencoder(arm):
    torch.manual_seed(37)
    x,_ = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 64), nn.Sigmoid())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb, = batch(64, x)
        return F.binary_cross_entropy(model(xb), xb)
    losses = plain(te, opt, 150, loss_of)
    te.close()
    fell(losses, .7)


# Healthy trainings: short sequences

@is_healthy
def adding_problem(arm):
    "A GRU with clipped gradients adds the two marked numbers among twelve"
    torch.manual_seed(38)
    class Adder(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn,self.out = nn.GRU(2, 32, batch_first=True),nn.Linear(32, 1)

        def forward(self, x): return self.out(self.rnn(x)[0][:, -1])[:, 0]
    model = Adder()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    te = arm(model, optimizer=opt)
    def loss_of():
        x = torch.rand(64, 12, 2)
        x[..., 1] = 0
        x[torch.arange(64)[:, None], torch.rand(64, 12).argsort(1)[:, :2], 1] = 1
        return F.mse_loss(model(x), x.prod(-1).sum(-1))
    losses = []
    for _ in range(240):
        loss = loss_of()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), .5)
        opt.step()
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    fell(losses, .3)


@is_healthy
def sine_lstm(arm):
    torch.manual_seed(39)
    series = torch.sin(torch.arange(600)*.2)+.3*torch.sin(torch.arange(600)*.53)
    class Forecast(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm,self.head = nn.LSTM(1, 24, 2, batch_first=True, dropout=.1),nn.Linear(24, 1)

        def forward(self, x):
            h,(_,_) = self.lstm(x)
            return self.head(h)
    model = Forecast()
    opt = torch.optim.RMSprop(model.parameters(), lr=3e-3, momentum=.5)
    te,losses = arm(model, optimizer=opt, every=5),[]
    for _ in range(120):
        w = windows(32, 25, series)[..., None]
        loss = F.mse_loss(model(w[:, :-1])[:, 5:], w[:, 6:])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), .2)
        opt.step()
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    fell(losses, .3)


@is_healthy
def cell_by_hand(arm):
    "An RNN cell, called in a loop over the letters, learns to copy short words, and later longer ones"
    torch.manual_seed(40)
    class Copier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed,self.cell,self.out = nn.Embedding(9, 16),nn.GRUCell(16, 48),nn.Linear(48, 8)

        def forward(self, word):
            h = torch.zeros(len(word), 48)
            for t in range(word.shape[1]): h = self.cell(self.embed(word[:, t]), h)
            outs = []
            for _ in range(word.shape[1]):
                h = self.cell(self.embed(torch.full((len(word),), 8)), h)
                outs.append(self.out(h))
            return torch.stack(outs, 1)
    model = Copier()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    te,first = arm(model, optimizer=opt),[]
    for i in range(160):
        n = 1+i//60
        word = torch.randint(8, (48, n))
        loss = F.cross_entropy(model(word).flatten(0, 1), word.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        opt.step()
        te.log(loss=loss, length=n)
        first.append(loss.item())
    te.close()
    assert first[59]<.3 and first[119]<1.5 and first[-1]<1.8


@is_healthy
def letters_gru(arm):
    "A GRU predicts the letters of a manual, many of which are rare. SGD has a high learning rate, as was usual for RNNs"
    torch.manual_seed(41)
    series,n = text()
    class Letters(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed,self.rnn,self.out = nn.Embedding(n, 24),nn.GRU(24, 64, batch_first=True),nn.Linear(64, n)

        def forward(self, x): return self.out(self.rnn(self.embed(x))[0])
    model = Letters()
    opt = torch.optim.SGD(model.parameters(), lr=2., momentum=.5)
    te,losses = arm(model, optimizer=opt, every=3),[]
    for _ in range(120):
        w = windows(16, 33, series)
        loss = F.cross_entropy(model(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), .25)
        opt.step()
        losses.append(loss.item())
        te.log(loss=loss, ppl=loss.exp())
    te.close()
    fell(losses, .8)


@is_healthy
def causal_convolutions(arm):
    "A temporal convolutional network (TCN) with dilation, residual connections and weight norm"
    torch.manual_seed(42)
    class Block(nn.Module):
        def __init__(self, c, d):
            super().__init__()
            self.pad,self.conv,self.drop = nn.ZeroPad1d((2*d, 0)),parametrizations.weight_norm(nn.Conv1d(c, c, 3, dilation=d)),nn.Dropout(.1)

        def forward(self, x): return x+self.drop(F.relu(self.conv(self.pad(x))))
    model = nn.Sequential(nn.Conv1d(1, 24, 1), Block(24, 1), Block(24, 2), Block(24, 4), nn.Conv1d(24, 1, 1))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te = arm(model, optimizer=opt, every=2)
    def loss_of():
        x = torch.randn(32, 1, 24)
        return F.mse_loss(model(x)[..., 5:], (x[..., 5:]+x[..., 3:-2]+x[..., :-5])/3)
    losses = plain(te, opt, 120, loss_of)
    te.close()
    fell(losses, .4)


@is_healthy
def words_with_sparse_gradients(arm):
    "Skip-grams of a manual: most words are rare, and gradients are sparse, with rows only for the words of the batch"
    torch.manual_seed(43)
    words = nn.Transformer.__doc__.split()+nn.LSTM.__doc__.split()+nn.Conv2d.__doc__.split()
    known = sorted(set(words))
    ids = torch.tensor([known.index(w) for w in words])
    class SkipGram(nn.Module):
        def __init__(self):
            super().__init__()
            self.word,self.context = (nn.Embedding(len(known), 16, sparse=True) for _ in range(2))
            nn.init.zeros_(self.context.weight)

        def forward(self, w, c): return (self.word(w)[:, None]*self.context(c)).sum(-1)
    model = SkipGram()
    opt = torch.optim.SparseAdam(model.parameters(), lr=.03)
    te,losses = arm(model, optimizer=opt),[]
    for _ in range(200):
        at = torch.randint(2, len(ids)-2, (64,))
        near = ids[at+torch.tensor([-2, -1, 1, 2])[torch.randint(4, (64,))]]
        score = model(ids[at], torch.cat([near[:, None], ids[torch.randint(len(ids), (64, 4))]], 1))
        loss = -(F.logsigmoid(score[:, 0])+F.logsigmoid(-score[:, 1:]).sum(-1)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    fell(losses, .85)


@is_healthy
def stars_of_users(arm):
    "A matrix factorization with biases that begin with 0"
    torch.manual_seed(44)
    a,b = torch.randn(60, 4),torch.randn(80, 4)
    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.user,self.item,self.user_bias,self.item_bias = nn.Embedding(60, 8),nn.Embedding(80, 8),nn.Embedding(60, 1),nn.Embedding(80, 1)
            for e in (self.user, self.item): nn.init.normal_(e.weight, std=.1)
            for e in (self.user_bias, self.item_bias): nn.init.zeros_(e.weight)

        def forward(self, u, i): return (self.user(u)*self.item(i)).sum(-1)+self.user_bias(u)[:, 0]+self.item_bias(i)[:, 0]
    model = Factors()
    opt = torch.optim.Adagrad(model.parameters(), lr=.2)
    te = arm(model, optimizer=opt)
    def loss_of():
        u,i = torch.randint(60, (256,)),torch.randint(80, (256,))
        return F.mse_loss(model(u, i), (a[u]*b[i]).sum(-1)+1.)
    losses = plain(te, opt, 200, loss_of)
    te.close()
    fell(losses, .5)


@is_healthy
def alignment_ctc(arm):
    "A CTC loss: letters at unknown positions in time"
    torch.manual_seed(45)
    code = torch.randn(5, 8)
    model = nn.Sequential(nn.Conv1d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 6, 1))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te,losses = arm(model, optimizer=opt),[]
    for _ in range(200):
        y = torch.randint(1, 6, (24, 4))
        x = code[y-1].repeat_interleave(3, 1)+.3*torch.randn(24, 12, 8)
        out = model(x.transpose(1, 2)).permute(2, 0, 1).log_softmax(-1)
        loss = F.ctc_loss(out, y, torch.full((24,), 12), torch.full((24,), 4))
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    fell(losses, .3)


@is_healthy
def one_cycle_resnet(arm):
    "A ResNet with BatchNorm: the last BatchNorm of each branch begins with weight 0, so that blocks begin as the identity"
    torch.manual_seed(46)
    x,y = digits(images=True)
    class Block(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.conv1,self.conv2 = (nn.Conv2d(c, c, 3, 1, 1, bias=False) for _ in range(2))
            self.bn1,self.bn2 = nn.BatchNorm2d(c),nn.BatchNorm2d(c)
            nn.init.zeros_(self.bn2.weight)

        def forward(self, x): return F.relu(x+self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
    model = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), Block(12), Block(12),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10))
    opt = torch.optim.SGD(model.parameters(), lr=.2, momentum=.9, weight_decay=5e-4)
    sched = OneCycleLR(opt, max_lr=.2, total_steps=90)
    te,losses = arm(model, optimizer=opt, ttypes=('input', 'output', 'weight', 'weight_grad', 'output_grad')),[]
    for _ in range(90):
        xb,yb = batch(64, x, y)
        loss = F.cross_entropy(model(xb), yb)
        te.log(loss=loss, lr=sched.get_last_lr()[0])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        losses.append(loss.item())
    te.close()
    fell(losses, .3)


@is_healthy
def transferred_with_frozen_batchnorm(arm):
    "The body of the model was trained for five digits, and is frozen in evaluation mode. A new head learns the other five digits"
    torch.manual_seed(47)
    x,y = digits(images=True, classes=range(5))
    trunk = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    old = nn.Sequential(trunk, nn.Linear(128, 5))
    first = torch.optim.Adam(old.parameters(), lr=5e-3)
    for _ in range(25):
        xb,yb = batch(64, x, y)
        first.zero_grad()
        F.cross_entropy(old(xb), yb).backward()
        first.step()
    class Transferred(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk,self.head = copy.deepcopy(trunk).requires_grad_(False),nn.Linear(128, 5)

        def train(self, mode=True):
            super().train(mode)
            self.trunk.eval()
            return self

        def forward(self, x): return self.head(self.trunk(x))
    model = Transferred().train()
    x,y = digits(images=True, classes=range(5, 10))
    opt = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(64, x, y)
        return F.cross_entropy(model(xb), yb-5)
    losses = plain(te, opt, 80, loss_of)
    te.close()
    fell(losses, .6)
    assert accuracy(model, x, y-5)>.7


# Healthy trainings: the loss hardly falls, or rises again

@is_healthy
def resumed_from_a_checkpoint(arm):
    "The recording begins at step 150, with an optimizer that already has its states: the model has learned nearly everything"
    torch.manual_seed(48)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    sched = CosineAnnealingLR(opt, 250)
    def loss_of():
        xb,yb = batch(64, x, y)
        return F.cross_entropy(model(xb), yb)
    for _ in range(150):
        opt.zero_grad()
        loss_of().backward()
        opt.step()
        sched.step()
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model.load_state_dict(saved[0])
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    opt.load_state_dict(saved[1])
    sched = CosineAnnealingLR(opt, 250, last_epoch=149)
    with torch.no_grad(): before = F.cross_entropy(model(x), y)
    te = arm(model, optimizer=opt, first_step=150)
    plain(te, opt, 100, loss_of, sched.step)
    te.close()
    with torch.no_grad(): after = F.cross_entropy(model(x), y)
    assert after<.97*before and accuracy(model, x, y)>.93, f"{before:.3f} to {after:.3f}, {accuracy(model, x, y):.2f}"


@is_healthy
def tuned_at_a_tiny_rate(arm):
    "Fine-tuning at a learning rate of 2e-5: a weight of .1 changes by 1/5000 per step, and the loss by a few percent in total"
    torch.manual_seed(49)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    first = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        xb,yb = batch(64, x[:900], y[:900])
        first.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        first.step()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    x,y = x[900:],y[900:]
    with torch.no_grad(): before = F.cross_entropy(model(x), y).item()
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(128, x, y)
        return F.cross_entropy(model(xb), yb)
    plain(te, opt, 100, loss_of)
    te.close()
    with torch.no_grad(): assert F.cross_entropy(model(x), y).item()<.99*before


@is_healthy
def mostly_noise(arm):
    "Only a twentieth of the variance can be explained: the loss soon reaches its floor, after a fall of 5%"
    torch.manual_seed(50)
    x = torch.randn(4000, 10)
    signal = .3*x[:, 0]*(x[:, 1]>0)
    y = signal+torch.randn(4000)
    model = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=.1)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(256, x, y)
        return F.mse_loss(model(xb)[:, 0], yb)
    plain(te, opt, 250, loss_of)
    te.close()
    with torch.no_grad(): out = model(x)[:, 0]
    assert torch.corrcoef(torch.stack([out, signal]))[0, 1]>.6


@is_healthy
def one_in_a_hundred(arm):
    "A rare class: the loss is small from the start, nearly all logits are below 0, and most batches have no positive sample"
    torch.manual_seed(51)
    x = torch.randn(3000, 12)
    y = (x[:, :3].sum(1)>4).float()
    assert y.mean()<.02
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
    nn.init.constant_(model[2].bias, -4.)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(64, x, y)
        return F.binary_cross_entropy_with_logits(model(xb)[:, 0], yb)
    losses = plain(te, opt, 200, loss_of)
    te.close()
    with torch.no_grad(): out = model(x)[:, 0]
    assert out[y==1].mean()>out[y==0].mean()+3 and sum(losses[-40:])<sum(losses[:40])


@is_healthy
def restarted_schedule(arm):
    "The learning rate falls to 0 and starts again, three times. The loss rises a little at each restart"
    torch.manual_seed(52)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 10))
    opt = torch.optim.SGD(model.parameters(), lr=.5, momentum=.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 30, T_mult=2)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(32, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 210, loss_of, sched.step)
    te.close()
    fell(losses, .4)


@is_healthy
def task_after_task(arm):
    "The digits change every 60 steps: the loss jumps to its start, and falls again"
    torch.manual_seed(53)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    te = arm(model, optimizer=opt)
    for task in (0, 3, 6):
        x,y = digits(classes=range(task, task+3))
        def loss_of():
            xb,yb = batch(32, x, y) # noqa: B023
            return F.cross_entropy(model(xb), yb)
        fell(plain(te, opt, 60, loss_of), .3)
    te.close()


@is_healthy
def steps_of_one_size(arm):
    "Lion, in an optimizer written by the user: each weight changes by the learning rate, whatever its gradient is. Only linear layers are recorded"
    torch.manual_seed(54)
    x,y = digits()
    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3, decay=.1): super().__init__(params, {'lr': lr, 'decay': decay})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group['params']:
                    m = self.state[p].setdefault('mean', torch.zeros_like(p))
                    p.mul_(1-group['lr']*group['decay']).sub_(m.lerp(p.grad, .1).sign(), alpha=group['lr'])
                    m.lerp_(p.grad, .01)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    opt = Lion(model.parameters(), lr=2e-3)
    te = arm(model, optimizer=opt, include=nn.Linear, stats='numerics', ttypes=('output', 'weight', 'weight_grad', 'optimizer'))
    def loss_of():
        xb,yb = batch(64, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 100, loss_of)
    te.close()
    fell(losses, .3)
