"Trainings with faults that only the recorder's facts show, not the rows: leftover gradients, autocast, first steps, parallel outputs"
import torch
import torch.nn.functional as F
from torch import nn

from . import is_broken
from .data import digits
from .parts import Convolutions, batches, fit, mlp


# Broken trainings: gradients of earlier steps are not cleared

@is_broken('gradients_add_up', paths=('', '*'), steps=(0, 60))
def steps_ended_by_hand_and_never_cleared(arm):
    "The ember does not know the optimizer, `te.step()` ends each step, and `zero_grad` is never called"
    torch.manual_seed(400)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt,te = torch.optim.SGD(model.parameters(), lr=1e-3),arm(model)
    for a,b in batches(60, 32, x, y):
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        opt.step()
        te.step()


@is_broken('gradients_add_up', paths='body*', steps=(0, 60))
def the_head_is_cleared_and_the_body_is_not(arm):
    "The training has two optimizers, and calls `zero_grad` of only one of them"
    torch.manual_seed(401)
    x,y = digits()
    model = nn.Sequential()
    model.body,model.head = mlp(64, 48, 32),nn.Linear(32, 10)
    body,head = torch.optim.SGD(model.body.parameters(), lr=2e-3),torch.optim.SGD(model.head.parameters(), lr=2e-3)
    te = arm(model, optimizer=[body, head])
    for a,b in batches(60, 32, x, y):
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        head.zero_grad(set_to_none=False)
        loss.backward()
        body.step()
        head.step()


# Broken trainings: gradients are set to zero before the optimizer uses them

def accumulated(arm, seed, early, micro=4, size=16, **armed):
    """Train a small network on digits, and accumulate the gradients of `micro` batches.

    `early`: True to call `zero_grad` after each batch, and not only after each step"""
    torch.manual_seed(seed)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te = arm(model, optimizer=opt, **armed)
    for i,(a,b) in enumerate(batches(60*micro, size, x, y)):
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        (loss/micro).backward()
        if (i+1)%micro==0: opt.step()
        if early or (i+1)%micro==0: opt.zero_grad()


@is_broken('discarded_gradients', steps=(0, 60))
def zero_grad_after_each_micro_batch(arm): accumulated(arm, 420, True)


@is_broken('discarded_gradients', steps=(0, 60))
def zero_grad_between_two_micro_batches(arm): accumulated(arm, 421, True, micro=2)


# Broken trainings: a schedule for batches is stepped per epoch

def one_cycle(arm, seed, calls, per_epoch, epochs=8):
    """Train a small network on digits with OneCycleLR, in epochs of 20 batches.

    `calls`: calls of `scheduler.step()` for which the schedule is created; `per_epoch`: True to call it once per epoch"""
    torch.manual_seed(seed)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=.1, total_steps=calls)
    te = arm(model, optimizer=opt)
    for _ in range(epochs):
        for a,b in batches(20, 64, x, y):
            loss = F.cross_entropy(model(a), b)
            te.log(loss=loss)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if not per_epoch: scheduler.step()
        if per_epoch: scheduler.step()


@is_broken('schedule_not_reached')
def one_cycle_for_batches_stepped_per_epoch(arm): one_cycle(arm, 430, 160, True)


# Broken trainings: gradients are clipped too early

def clipped(arm, seed, early, late=False, zeros=False, known=True, size=1., **armed):
    """Train a small network on digits, and clip its gradients before or after the backward pass.

    `early`: 'before' to clip between `zero_grad` and `backward`, 'after' to clip between `optimizer.step` and `zero_grad`, '' for neither;
    `late`: True to clip between `backward` and `optimizer.step`; `zeros`: True to set gradients to zeros instead of None;
    `known`: False to arm without the optimizer; `size`: largest norm of the gradients"""
    torch.manual_seed(seed)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te = arm(model, **armed | ({'optimizer': opt} if known else {}))
    def clip(): nn.utils.clip_grad_norm_(model.parameters(), size)
    for a,b in batches(60, 32, x, y):
        opt.zero_grad(set_to_none=not zeros)
        if early=='before': clip()
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        if late: clip()
        if not known: te.step()
        opt.step()
        if early=='after': clip()
    te.close()


@is_broken('clipped_early', paths='')
def clipped_before_the_backward(arm): clipped(arm, 470, 'before')


@is_broken('clipped_early', paths='')
def zeros_are_clipped_before_the_backward(arm): clipped(arm, 471, 'before', zeros=True)


@is_broken('clipped_early', paths='', steps=(0, 3))
def clipped_after_the_optimizer_step(arm): clipped(arm, 472, 'after')


@is_broken('clipped_early', paths='')
def clipped_early_without_a_known_optimizer(arm): clipped(arm, 473, 'before', known=False)


@is_broken('clipped_early', paths='')
def accumulated_and_clipped_before_the_first_backward(arm):
    "Three backward passes make one step, and gradients are clipped only before the first of them"
    torch.manual_seed(474)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    te = arm(model, optimizer=opt)
    for i,(a,b) in enumerate(batches(120, 32, x, y)):
        if i%3==0: opt.zero_grad(); nn.utils.clip_grad_norm_(model.parameters(), 1.)
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        (loss/3).backward()
        if i%3==2: opt.step()
    te.close()


# Broken trainings: autocast is turned off or used without a loss scale

class Wide(nn.Module):
    "A linear layer whose forward disables autocast for its own computation"
    def __init__(self, i, o): super().__init__(); self.weight,self.bias = nn.Parameter(torch.randn(o, i)/i**.5),nn.Parameter(torch.zeros(o))
    def forward(self, x):
        with torch.autocast('cpu', enabled=False): return F.linear(x.float(), self.weight, self.bias)


def under_autocast(arm, model, n=40, dtype=torch.bfloat16):
    x,y = digits()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    te = arm(model, optimizer=opt)
    for a,b in batches(n, 64, x, y):
        opt.zero_grad()
        with torch.autocast('cpu', dtype): loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        opt.step()


@is_broken('autocast', paths='3', steps=(0, 40))
def one_layer_is_not_cast(arm):
    torch.manual_seed(402)
    under_autocast(arm, nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), Wide(96, 96), nn.GELU(), nn.Linear(96, 10)))


@is_broken('autocast', paths='', steps=(0, 40))
def no_layer_is_cast(arm):
    torch.manual_seed(403)
    under_autocast(arm, nn.Sequential(Wide(64, 96), nn.GELU(), Wide(96, 96), nn.GELU(), Wide(96, 10)))


@is_broken('underflow', 'lost_gradients', 'vanishing_gradient', paths=('', '*'), steps=(0, 40))
def half_precision_without_scaling(arm):
    "Gradients shrink by a factor of 10 to 20 from layer to layer, and float16 rounds the gradients of the first layers to zero"
    torch.manual_seed(404)
    under_autocast(arm, mlp(64, *[48]*9, 10, act=nn.Sigmoid), 30, torch.float16)


# Broken trainings: the fault is visible in the first step

@is_broken('first_step', 'update_too_large', paths=('', '*'), steps=(0, 2))
def the_first_rate_is_a_thousand_times_too_large(arm):
    "A schedule gives the first step a learning rate that is a thousand times too large"
    torch.manual_seed(405)
    x,y = digits()
    model = mlp(64, 64, 64, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.05)
    te = arm(model, optimizer=opt)
    for i,(a,b) in enumerate(batches(60, 32, x, y)):
        opt.param_groups[0]['lr'] = 150. if i==0 else .05
        opt.zero_grad()
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        opt.step()


class Peaked(nn.Module):
    "Attention without division by the square root of the head size, and with initial keys that are too large"
    def __init__(self, d=32, times=4.):
        super().__init__()
        self.q,self.k,self.v,self.soft,self.head = nn.Linear(d, d),nn.Linear(d, d),nn.Linear(d, d),nn.Softmax(-1),nn.Linear(d, 10)
        self.inp,self.times = nn.Linear(8, d),times
    def forward(self, x):
        h = F.layer_norm(self.inp(x), (32,))
        weights = self.soft(self.times*self.q(h)@self.k(h).transpose(1, 2))
        return self.head((weights@self.v(h)).mean(1))


@is_broken('attention', paths='soft', steps=(0, 3))
def attention_is_peaked_from_the_start(arm):
    torch.manual_seed(406)
    x,y = digits()
    model = Peaked()
    fit(arm, model, torch.optim.Adam(model.parameters(), 1e-3), batches(50, 32, x.reshape(-1, 8, 8), y))


class Tanh(nn.Module):
    "A recurrent network with tanh whose initial weights are much too large"
    def __init__(self, times):
        super().__init__()
        self.rnn,self.head = nn.RNN(8, 64, batch_first=True),nn.Linear(64, 10)
        with torch.no_grad(): self.rnn.weight_hh_l0 *= times; self.rnn.weight_ih_l0 *= times
    def forward(self, x): return self.head(self.rnn(x)[0][:, -1])


@is_broken('saturated', 'poor_scale', 'exploding_gradient', paths='rnn', steps=(0, 3))
def a_recurrent_layer_is_saturated(arm):
    torch.manual_seed(407)
    x,y = digits()
    model = Tanh(30.)
    fit(arm, model, torch.optim.Adam(model.parameters(), 1e-3), batches(50, 32, x.reshape(-1, 8, 8), y))


# Broken trainings: outputs of all samples become parallel

@is_broken('rank_collapse', 'collapse', paths=('', '*'), steps=(0, 150))
def two_views_without_a_stop(arm):
    "The loss makes two views of a sample equal, and nothing keeps different samples apart: all embeddings become parallel"
    torch.manual_seed(408)
    x,_ = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    opt = torch.optim.SGD(model.parameters(), lr=.5, momentum=.9)
    te = arm(model, optimizer=opt)
    for a, in batches(150, 64, x):
        opt.zero_grad()
        h = F.normalize(model(torch.cat([a+.3*torch.randn_like(a), a+.3*torch.randn_like(a)])), dim=1)
        loss = 2-2*(h[:64]*h[64:]).sum(1).mean()
        te.log(loss=loss)
        loss.backward()
        opt.step()
    assert loss.item()<.02


# Broken trainings: the loss is not connected to the model

def unconnected(arm, predict, seed, logged=True):
    "Run a training whose loss `predict(model, batch)` has no connection to the model"
    torch.manual_seed(seed)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.)
    te = arm(model, optimizer=opt)
    for a,b in batches(40, 32, x, y):
        opt.zero_grad()
        loss = F.cross_entropy(predict(model, a), b)
        if logged: te.log(loss=loss)
        loss.backward()
        opt.step()


@is_broken('not_trained', steps=(0, 40))
def logits_that_went_through_numpy(arm): unconnected(arm, lambda model, a: torch.tensor(model(a).detach().numpy(), requires_grad=True), 460)


@is_broken('not_trained', steps=(0, 40))
def all_of_the_forward_without_gradients(arm):
    def predict(model, a):
        with torch.no_grad(): return model(a).requires_grad_()
    unconnected(arm, predict, 461)


@is_broken('not_trained', steps=(0, 40))
def one_hot_predictions(arm): unconnected(arm, lambda model, a: F.one_hot(model(a).argmax(1), 10).float().requires_grad_(), 462, logged=False)


# Broken trainings: parameters that are in no module of the model

class Residual(nn.Module):
    "A classifier with residual layers, which `hold` stores in a container of Python or of torch"
    def __init__(self, hold, n=3, d=48):
        super().__init__()
        self.stem,self.head = nn.Linear(64, d),nn.Linear(d, 10)
        self.inside = hold([nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU(), nn.Linear(d, d)) for _ in range(n)])

    def forward(self, x):
        x = self.stem(x)
        for f in self.inside.values() if isinstance(self.inside, dict) else self.inside: x = x+f(x)
        return self.head(F.relu(x))


@is_broken('outside_model', paths='')
def layers_in_a_dict(arm):
    "The layers are in a dict of Python, so the optimizer does not have their parameters"
    torch.manual_seed(470)
    model = Residual(lambda layers: dict(enumerate(layers)))
    fit(arm, model, torch.optim.Adam(model.parameters(), 1e-3), batches(80, 32, *digits()))


# Broken trainings: gradients are removed before the step

@is_broken('not_trained', paths='')
def cleared_to_zeros_between_backward_and_step(arm):
    "Two backward passes for each step, then `zero_grad` sets the gradients to zeros, and only then the optimizer steps"
    torch.manual_seed(471)
    model = mlp(64, 48, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    te = arm(model, optimizer=opt)
    for i,(a,b) in enumerate(batches(120, 32, *digits())):
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        (loss/2).backward()
        if i%2: opt.zero_grad(set_to_none=False); opt.step()


# Broken trainings: clipping that always acts

@is_broken('clipped_always', paths='')
def clipped_to_almost_nothing(arm):
    "The limit for the norm of the gradients is 0.0005, in a convolutional network that is trained with SGD"
    torch.manual_seed(472)
    model = Convolutions(norm=False)
    opt = torch.optim.SGD(model.parameters(), lr=.05, momentum=.9)
    te = arm(model, optimizer=opt)
    for a,b in batches(100, 32, *digits(images=True)):
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5e-4)
        opt.step()


# Broken trainings: operations that make a part of the model useless

class AttentivePool(nn.Module):
    "Reads a digit as 8 rows, and adds up the rows, weighted by attention. `dim`: dimension of the softmax"
    def __init__(self, dim, product=False):
        super().__init__()
        self.embed,self.score,self.out,self.dim,self.product = nn.Linear(8, 24),nn.Linear(24, 1),nn.Linear(24, 10),dim,product
    def forward(self, x):
        rows = self.embed(x.view(-1, 8, 8)).tanh()
        weights = F.dropout(self.score(rows).softmax(self.dim), .1, self.training)
        return self.out((weights.transpose(1, 2)@rows)[:, 0] if self.product else (weights*rows).sum(1))


@is_broken('softmax_of_one', paths='score', steps=(0, 60))
def attention_pool_over_the_features(arm):
    "The softmax of attention scores of shape (samples, positions, 1) is taken over the last dimension"
    torch.manual_seed(430)
    model = AttentivePool(2)
    fit(arm, model, torch.optim.Adam(model.parameters(), 3e-3), batches(60, 32, *digits()))


@is_broken('softmax_of_one', paths='score', steps=(0, 60))
def attention_pool_by_a_matrix_product(arm):
    "Add up the positions by a matrix product, with the same softmax"
    torch.manual_seed(431)
    model = AttentivePool(-1, product=True)
    fit(arm, model, torch.optim.Adam(model.parameters(), 3e-3), batches(60, 32, *digits()))


@is_broken('no_activation', paths='0', steps=(0, 120))
def xor_without_an_activation(arm):
    "All layers are linear, so the model cannot represent an exclusive or"
    torch.manual_seed(432)
    x = torch.randn(1000, 2)
    model = nn.Sequential(nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 1), nn.Sigmoid())
    y = ((x[:, :1]>0) ^ (x[:, 1:]>0)).float()
    fit(arm, model, torch.optim.Adam(model.parameters(), 5e-3), batches(120, 50, x, y), F.binary_cross_entropy)


# Broken trainings: one BatchNorm in two places

class TwoPlaces(nn.Module):
    "A small CNN that normalizes its channels in two places. `norms`: the two normalizations"
    def __init__(self, *norms, c=12):
        super().__init__()
        self.stem,self.inner = nn.Conv2d(1, c, 3, 2, 1),nn.Conv2d(c, c, 3, 2, 1)
        self.norms,self.head = nn.ModuleList(norms),nn.Linear(4*c, 10)

    def forward(self, x):
        x = F.relu(self.norms[0](self.stem(x)))
        return self.head(F.relu(self.norms[1](4*self.inner(x))).flatten(1))


def with_evaluations(arm, model, n=80, lr=2e-3):
    "Train with digits, and evaluate in every tenth step"
    x,y = digits(images=True)
    opt = torch.optim.Adam(model.parameters(), lr)
    te = arm(model, optimizer=opt)
    for i,(a,b) in enumerate(batches(n, 32, x[300:], y[300:])):
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i%10==9:
            model.eval()
            with torch.no_grad(): model(x[:300])
            model.train()


@is_broken('shared_batch_norm', paths='norms.0', steps=(0, 20))
def one_batch_norm_for_two_places(arm):
    "The list of the normalizations contains the same BatchNorm twice"
    torch.manual_seed(473)
    with_evaluations(arm, TwoPlaces(*[nn.BatchNorm2d(12)]*2))


# Broken trainings: a reshape exchanges dimensions, but does not move the elements

class RowsOfDigits(nn.Module):
    "A convolution over the rows of a digit, whose features are `moved` into a sequence for a recurrent layer"
    def __init__(self, moved):
        super().__init__()
        self.conv,self.rnn,self.out,self.moved = nn.Conv1d(8, 24, 3, padding=1),nn.GRU(24, 24, batch_first=True),nn.Linear(24, 10),moved
    def forward(self, x): return self.out(self.rnn(self.moved(self.conv(x.view(-1, 8, 8)).relu()))[0].mean(1))


class HeadsByHand(nn.Module):
    "Attention over the rows of a digit with four heads, which are `joined` after the attention"
    def __init__(self, joined):
        super().__init__()
        self.embed,self.qkv,self.proj,self.out,self.joined = nn.Linear(8, 32),nn.Linear(32, 96),nn.Linear(32, 32),nn.Linear(32, 10),joined
    def forward(self, x):
        x = self.embed(x.view(-1, 8, 8))
        q,k,v = (t.view(len(x), 8, 4, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out((x+self.proj(self.joined((q@k.transpose(-2, -1)/8**.5).softmax(-1)@v))).mean(1))


class Bright(nn.Module):
    "Two logits for each pixel, of shape (samples, 2, rows, columns): is the pixel bright?"
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    def forward(self, x): return self.net(x.view(-1, 1, 8, 8))


def pixels_are_bright(arm, seed, in_rows):
    "Train a segmentation of digits. `in_rows`: function that makes one row for each pixel from the logits."
    torch.manual_seed(seed)
    x,_ = digits()
    model = Bright()
    fit(arm, model, torch.optim.Adam(model.parameters(), 1e-2), batches(80, 32, x, (x>x.mean()).long()), lambda p, y: F.cross_entropy(in_rows(p), y.flatten()))


def digits_by(arm, model, n=100): fit(arm, model, torch.optim.Adam(model.parameters(), 3e-3), batches(n, 30, *digits()))


@is_broken('view_not_permute', paths='rnn', steps=(0, 10))
def channels_viewed_as_positions(arm):
    torch.manual_seed(480)
    digits_by(arm, RowsOfDigits(lambda y: y.view(-1, 8, 24)))


@is_broken('view_not_permute', paths='proj', steps=(0, 10))
def heads_joined_without_a_transposition(arm):
    torch.manual_seed(481)
    digits_by(arm, HeadsByHand(lambda y: y.reshape(-1, 8, 32)))


@is_broken('view_not_permute', paths='', steps=(0, 10))
def logits_of_pixels_viewed_as_rows(arm): pixels_are_bright(arm, 482, lambda p: p.reshape(-1, 2))


# Broken trainings: one learning rate for all parameter groups, clipping of gradients that contain the loss scale

def fine_tuned(arm, seed, set_rates, lr=.1, share=.01):
    """Train a body and a head in two parameter groups. The body has a small part of the head's learning rate.

    `share`: this part; `set_rates`: function that is called with the optimizer and the share of the training that is over"""
    torch.manual_seed(seed)
    x,y = digits()
    model = nn.Sequential()
    model.body,model.head = mlp(64, 48, 32),nn.Linear(32, 10)
    opt = torch.optim.SGD([{'params': model.body.parameters(), 'lr': share*lr}, {'params': model.head.parameters()}], lr=lr, momentum=.9)
    te = arm(model, optimizer=opt)
    for i,(a,b) in enumerate(batches(60, 32, x, y)):
        set_rates(opt, i/60)
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()


@is_broken('rates_overwritten', steps=(0, 60))
def a_decay_for_all_groups(arm):
    def decay(opt, over):
        for g in opt.param_groups: g['lr'] = .1*(1-over)
    fine_tuned(arm, 500, decay)


@is_broken('rates_overwritten', steps=(0, 60))
def a_constant_rate_for_all_groups(arm):
    def constant(opt, over):
        for g in opt.param_groups: g['lr'] = .05
    fine_tuned(arm, 501, constant)


def with_scaler(arm, seed, unscale, limit=1., by_scale=False, **armed):
    "Train a small network on digits with a `GradScaler`, and clip its gradients. `by_scale`: True to multiply the limit by the loss scale"
    torch.manual_seed(seed)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt,scaler = torch.optim.SGD(model.parameters(), lr=.1),torch.amp.GradScaler('cpu')
    te = arm(model, optimizer=opt, **({'scaler': scaler} if armed.get('known') else {}))
    for a,b in batches(60, 32, x, y):
        with torch.autocast('cpu', torch.bfloat16): loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        opt.zero_grad()
        scaler.scale(loss).backward()
        if unscale: scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), limit*(scaler.get_scale() if by_scale else 1))
        scaler.step(opt)
        scaler.update()


@is_broken('clipped_scaled')
def clipped_before_unscale(arm): with_scaler(arm, 510, False)


@is_broken('clipped_scaled')
def clipped_before_unscale_with_a_known_scaler(arm): with_scaler(arm, 511, False, known=True)
