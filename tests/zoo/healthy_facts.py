"Healthy trainings that look like the broken trainings of `broken_facts`"
import torch
import torch.nn.functional as F
from torch import nn

from . import is_healthy
from .broken_facts import (HeadsByHand, Peaked, Residual, RowsOfDigits, Tanh, Wide, accumulated, clipped, digits_by, fine_tuned, one_cycle,
    pixels_are_bright, under_autocast, with_scaler)
from .data import digits
from .parts import batches, fit, mlp


# Healthy trainings: unusual handling of gradients

@is_healthy
def cleared_to_zeros_and_accumulated(arm):
    "`zero_grad` sets gradients to zeros instead of None, and the gradients of three backward passes add up on purpose"
    torch.manual_seed(450)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te = arm(model, optimizer=opt)
    for i,(a,b) in enumerate(batches(90, 32, x, y)):
        loss = F.cross_entropy(model(a), b)/3
        te.log(loss=loss*3)
        loss.backward()
        if i%3==2: opt.step(); opt.zero_grad(set_to_none=False)


@is_healthy
def accumulated_and_cleared_with_each_step(arm): accumulated(arm, 460, False)


@is_healthy
def a_discriminator_alone(arm):
    "Only the discriminator is recorded. It gets gradients from the loss of the generator, which its own `zero_grad` discards"
    torch.manual_seed(461)
    maker,critic = mlp(4, 32, 2),mlp(2, 32, 1)
    of_maker,of_critic = (torch.optim.Adam(m.parameters(), 2e-3, betas=(.5, .9)) for m in (maker, critic))
    te = arm(critic, optimizer=of_critic)
    for _ in range(80):
        real,fake = F.normalize(torch.randn(60, 2)),maker(torch.randn(60, 4))
        of_critic.zero_grad()
        loss = F.softplus(-critic(real)).mean()+F.softplus(critic(fake.detach())).mean()
        loss.backward()
        of_critic.step()
        of_maker.zero_grad()
        cost = F.softplus(-critic(fake)).mean()
        cost.backward()
        of_maker.step()
        te.log(critic=loss, maker=cost)


@is_healthy
def adversarial_examples_by_backward(arm):
    "Before each step, `backward` computes the gradient of the input three times, and `zero_grad` discards the gradients of the weights"
    torch.manual_seed(462)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te = arm(model, optimizer=opt)
    for a,b in batches(60, 32, x, y):
        for _ in range(3):
            moved = a.clone().requires_grad_()
            loss = F.cross_entropy(model(moved), b)
            te.log(attack=loss)
            loss.backward()
            a = (moved+.01*moved.grad.sign()).detach()
            opt.zero_grad()
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        opt.step()
        opt.zero_grad()


@is_healthy
def gradients_of_some_batches_are_skipped(arm):
    "Batches whose gradients are too large are left out, which is every third batch"
    torch.manual_seed(463)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te = arm(model, optimizer=opt)
    for i,(a,b) in enumerate(batches(90, 32, x, y)):
        opt.zero_grad()
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        if i%3!=1: opt.step()


@is_healthy
def gradients_of_old_tasks_are_measured(arm):
    "Before each step, the gradients of two batches of earlier data are copied and set to zero, as in gradient episodic memory"
    torch.manual_seed(464)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te = arm(model, optimizer=opt)
    for a,b in batches(60, 32, x, y):
        kept = []
        for c,d in batches(2, 32, x, y):
            opt.zero_grad()
            F.cross_entropy(model(c), d).backward()
            kept.append([p.grad.clone() for p in model.parameters()])
        opt.zero_grad()
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        opt.step()


@is_healthy
def sharpness_aware(arm):
    "SAM: the gradients of the first backward pass move the weights, and are set to zero before the second"
    torch.manual_seed(465)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te = arm(model, optimizer=opt)
    for a,b in batches(60, 32, x, y):
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        size = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [.05*p.grad/size for p in model.parameters()]
        with torch.no_grad():
            for p,m in zip(model.parameters(), moves, strict=True): p.add_(m)
        opt.zero_grad()
        again = F.cross_entropy(model(a), b)
        te.log(again=again)
        again.backward()
        with torch.no_grad():
            for p,m in zip(model.parameters(), moves, strict=True): p.sub_(m)
        opt.step()
        opt.zero_grad()


@is_healthy
def one_cycle_stepped_per_batch(arm): one_cycle(arm, 466, 160, False)


@is_healthy
def one_cycle_set_up_for_epochs(arm): one_cycle(arm, 467, 8, True)


@is_healthy
def one_cycle_for_epochs_in_its_warm_up(arm): one_cycle(arm, 468, 60, True)


@is_healthy
def a_critic_that_clears_before_its_own_backward(arm):
    "The backward pass of the generator also writes gradients of the critic, which the critic sets to zero before its own backward pass"
    torch.manual_seed(451)
    model = nn.ModuleDict(dict(maker=mlp(4, 32, 2), critic=mlp(2, 32, 1)))
    maker,critic = (torch.optim.Adam(model[n].parameters(), 2e-3, betas=(.5, .9)) for n in ('maker', 'critic'))
    te = arm(model, optimizer=[critic, maker])
    for _ in range(80):
        real,fake = F.normalize(torch.randn(60, 2)),model['maker'](torch.randn(60, 4))
        critic.zero_grad(set_to_none=False)
        a,b = model['critic'](real),model['critic'](fake.detach())
        loss = F.softplus(-a).mean()+F.softplus(b).mean()
        loss.backward()
        critic.step()
        maker.zero_grad()
        F.softplus(-model['critic'](fake)).mean().backward()
        maker.step()
        te.log(critic=loss)


@is_healthy
def each_layer_learns_on_its_own(arm):
    "Forward-forward (Hinton 2022): each layer has an optimizer of its own, and its gradients grow in the first steps"
    torch.manual_seed(452)
    x,y = digits()
    class Layer(nn.Linear):
        def forward(self, x): return F.relu(super().forward(x/(x.norm(2, 1, keepdim=True)+1e-4)))
    model = nn.Sequential(Layer(64, 100), Layer(100, 100))
    opts = [torch.optim.Adam(l.parameters(), .01) for l in model]
    te = arm(model)
    def labelled(x, y): x = x.clone(); x[:, :10] = 0; x[torch.arange(len(x)), y] = x.max(); return x
    for a,b in batches(80, 64, x, y):
        good,bad = labelled(a, b),labelled(a, (b+torch.randint(1, 10, b.shape))%10)
        for l,o in zip(model, opts, strict=True):
            good,bad = l(good.detach()),l(bad.detach())
            loss = F.softplus(torch.cat([2-good.pow(2).mean(1), bad.pow(2).mean(1)-2])).mean()
            o.zero_grad()
            loss.backward()
            o.step()
        te.log(loss=loss)
        te.step()


@is_healthy
def learned_weights_of_two_losses(arm):
    "Two tasks are weighted by their learned uncertainty (Kendall et al. 2018). The loss uses the two weights, and `forward` does not"
    torch.manual_seed(485)
    x,y = digits()
    model = nn.ModuleDict(dict(body=mlp(64, 48, 32), digit=nn.Linear(32, 10), size=nn.Linear(32, 1)))
    model.log_variances = nn.Parameter(torch.zeros(2))
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    te = arm(model, optimizer=opt)
    for a,b in batches(80, 32, x, y):
        h = model['body'](a).relu()
        both = torch.stack([F.cross_entropy(model['digit'](h), b), F.mse_loss(model['size'](h).squeeze(1), a.mean(1))])
        loss = (both*torch.exp(-model.log_variances)+model.log_variances/2).sum()
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()


# Healthy trainings: unusual use of gradient clipping

@is_healthy
def clipped_in_time(arm): clipped(arm, 475, '', late=True)


@is_healthy
def clipped_in_time_without_a_known_optimizer(arm): clipped(arm, 476, '', late=True, zeros=True, known=False)


@is_healthy
def clipped_before_and_after_the_backward(arm): clipped(arm, 477, 'before', late=True, zeros=True)


@is_healthy
def the_norm_is_measured_after_the_step(arm):
    "`clip_grad_norm_` with an infinite limit changes nothing: the training calls it for the norm that it returns"
    clipped(arm, 478, 'after', size=float('inf'))


@is_healthy
def clipped_after_each_of_three_backwards(arm):
    torch.manual_seed(479)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te = arm(model, optimizer=opt)
    for i,(a,b) in enumerate(batches(120, 32, x, y)):
        loss = F.cross_entropy(model(a), b)/3
        te.log(loss=loss*3)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), .1)
        if i%3==2: opt.step(); opt.zero_grad()


@is_healthy
def two_losses_clipped_one_after_the_other(arm):
    "The gradients of the first network are clipped before the backward pass of the second network, and both optimizers step at the end"
    torch.manual_seed(480)
    x,y = digits()
    model = nn.ModuleDict(dict(first=mlp(64, 48, 10), second=mlp(64, 32, 10)))
    opts = [torch.optim.SGD(m.parameters(), lr=.1) for m in model.values()]
    te = arm(model, optimizer=opts)
    for a,b in batches(60, 32, x, y):
        for name,opt in zip(model, opts, strict=True):
            opt.zero_grad()
            loss = F.cross_entropy(model[name](a), b)
            te.log(**{name: loss})
            loss.backward()
            nn.utils.clip_grad_norm_(model[name].parameters(), 1.)
        for opt in opts: opt.step()


def with_a_second_backward(arm, seed, restored, body):
    """Move weights uphill, compute gradients there, restore the weights, clip and step, as SAM (Foret et al. 2020) does.

    `restored`: True to restore the weights before clipping, False to restore them after clipping; `body`: True if the
    gradients of the first backward are kept, as in adversarial training of embeddings (FGM)."""
    torch.manual_seed(seed)
    x,y = digits()
    model = mlp(64, 48, 10)
    opt,moved = torch.optim.SGD(model.parameters(), lr=.1),[model[0].weight] if body else [*model.parameters()]
    te = arm(model, optimizer=opt)
    for a,b in batches(60, 32, x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        by = [.05*p.grad/(p.grad.norm()+1e-12) for p in moved]
        with torch.no_grad(): torch._foreach_add_(moved, by)
        if not body: opt.zero_grad()
        F.cross_entropy(model(a), b).backward()
        if not restored: nn.utils.clip_grad_norm_(model.parameters(), 1.)
        with torch.no_grad(): torch._foreach_sub_(moved, by)
        if restored: nn.utils.clip_grad_norm_(model.parameters(), 1.)
        opt.step()


@is_healthy
def sharpness_aware_and_clipped(arm): with_a_second_backward(arm, 481, False, False)


@is_healthy
def sharpness_aware_and_clipped_after_the_weights_are_restored(arm): with_a_second_backward(arm, 482, True, False)


@is_healthy
def adversarial_weights_restored_before_clipping(arm): with_a_second_backward(arm, 483, True, True)


@is_healthy
def clipped_with_a_body_that_is_frozen_at_first(arm):
    "All gradients are clipped, but the body has none in the first half of the training. Weights are clamped, as in a Wasserstein GAN"
    torch.manual_seed(484)
    x,y = digits()
    model = nn.Sequential()
    model.body,model.head = mlp(64, 48, 32),nn.Linear(32, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te = arm(model, optimizer=opt)
    for i,(a,b) in enumerate(batches(80, 32, x, y)):
        opt.zero_grad()
        with torch.set_grad_enabled(i>=40): features = model.body(a)
        loss = F.cross_entropy(model.head(features), b)
        te.log(loss=loss)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        opt.step()
        with torch.no_grad(): torch._foreach_clamp_max_([*model.parameters()], 1.)


# Healthy trainings: autocast

class Outside(nn.Module):
    "A model whose embedding and head are called outside of autocast"
    def __init__(self): super().__init__(); self.inp,self.body,self.head = nn.Linear(64, 48),mlp(48, 48, 48),nn.Linear(48, 10)
    def forward(self, x):
        with torch.autocast('cpu', enabled=False): h = self.inp(x.float())
        h = self.body(h)
        with torch.autocast('cpu', enabled=False): return self.head(h.float())


@is_healthy
def ends_outside_of_autocast(arm):
    torch.manual_seed(453)
    under_autocast(arm, Outside())


@is_healthy
def a_head_in_full_precision(arm):
    "Only the last layer turns autocast off, so that the logits are exact"
    torch.manual_seed(454)
    under_autocast(arm, nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), Wide(96, 10)))


@is_healthy
def all_under_autocast(arm):
    torch.manual_seed(455)
    under_autocast(arm, nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.LayerNorm(576), nn.Linear(576, 10)))


@is_healthy
def half_precision_with_scaling(arm):
    "The broken training `half_precision_without_scaling`, but with a loss scale for float16"
    torch.manual_seed(456)
    x,y = digits()
    model = mlp(64, 64, 64, 10)
    opt,scale = torch.optim.AdamW(model.parameters(), 1e-3),1024.
    te = arm(model, optimizer=opt)
    for a,b in batches(25, 32, x, y):
        opt.zero_grad()
        with torch.autocast('cpu', torch.float16): loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        (loss*scale).backward()
        for p in model.parameters(): p.grad /= scale
        opt.step()


# Healthy trainings: unusual values in the first step

@is_healthy
def begins_with_zeros(arm):
    "The last layer begins with zeros, so its first update is infinitely larger than the weight"
    torch.manual_seed(457)
    x,y = digits()
    model = mlp(64, 64, 64, 10)
    nn.init.zeros_(model[-1].weight)
    fit(arm, model, torch.optim.Adam(model.parameters(), 1e-2), batches(60, 32, x, y))


@is_healthy
def weights_are_loaded_after_the_first_step(arm):
    torch.manual_seed(458)
    x,y = digits()
    model,other = mlp(64, 64, 64, 10),mlp(64, 64, 64, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te = arm(model, optimizer=opt)
    for i,(a,b) in enumerate(batches(60, 32, x, y)):
        opt.zero_grad()
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        opt.step()
        if i==0: model.load_state_dict(other.state_dict())


@is_healthy
def attention_of_usual_size(arm):
    torch.manual_seed(459)
    x,y = digits()
    model = Peaked(times=32**-.5)
    fit(arm, model, torch.optim.Adam(model.parameters(), 1e-3), batches(60, 32, x.reshape(-1, 8, 8), y))


@is_healthy
def attention_to_few_places(arm):
    "Attention in which most positions are masked, so that each row has only one, two or three positions left"
    torch.manual_seed(460)
    class Masked(Peaked):
        def forward(self, x):
            h = F.layer_norm(self.inp(x), (32,))
            far = (torch.arange(8)[:, None]-torch.arange(8)).abs()>1
            weights = self.soft((self.q(h)@self.k(h).transpose(1, 2)/32**.5).masked_fill(far, float('-inf')))
            return self.head((weights@self.v(h)).mean(1))
    x,y = digits()
    model = Masked()
    fit(arm, model, torch.optim.Adam(model.parameters(), 2e-3), batches(60, 32, x.reshape(-1, 8, 8), y))


@is_healthy
def a_recurrent_layer_of_usual_size(arm):
    torch.manual_seed(461)
    x,y = digits()
    model = Tanh(1.)
    fit(arm, model, torch.optim.Adam(model.parameters(), 3e-3), batches(100, 32, x.reshape(-1, 8, 8), y))


# Healthy trainings: outputs of different samples become parallel on purpose

@is_healthy
def two_classes_learned_to_the_end(arm):
    "Neural collapse: with two classes, the last features of all samples get one direction (Papyan et al. 2020)"
    torch.manual_seed(462)
    x,y = digits(classes=(0, 1))
    model = mlp(64, 64, 32, 2)
    fit(arm, model, torch.optim.Adam(model.parameters(), 3e-3), batches(150, 32, x, y))


@is_healthy
def a_regression_with_a_large_mean(arm):
    "The last features of all samples are nearly equal, because the targets are 50 with small differences"
    torch.manual_seed(463)
    x = torch.randn(600, 16)
    y = 50+x[:, :3].sum(1, keepdim=True)
    model = mlp(16, 64, 32, 1)
    fit(arm, model, torch.optim.Adam(model.parameters(), 5e-3), batches(200, 32, x, y), F.mse_loss)


@is_healthy
def views_kept_apart(arm):
    "A contrastive loss makes two views of a sample similar, and different samples different"
    torch.manual_seed(464)
    x,_ = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    te = arm(model, optimizer=opt)
    for a, in batches(120, 64, x):
        opt.zero_grad()
        h = F.normalize(model(torch.cat([a+.3*torch.randn_like(a), a+.3*torch.randn_like(a)])), dim=1)
        loss = F.cross_entropy(h[:64]@h[64:].T/.1, torch.arange(64))
        te.log(loss=loss)
        loss.backward()
        opt.step()


# Healthy trainings: weights without gradients

@is_healthy
def only_evaluated(arm):
    "A program that restores a model and its optimizer, and only evaluates the model"
    torch.manual_seed(463)
    x,y = digits()
    model = mlp(64, 48, 10).eval()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    te = arm(model, optimizer=opt)
    with torch.no_grad():
        for a,b in batches(30, 32, x, y):
            te.log(loss=F.cross_entropy(model(a), b))
            te.step()


@is_healthy
def updated_by_an_evolution_strategy(arm):
    "An evolution strategy changes the weights without any gradient"
    torch.manual_seed(464)
    x,y = digits()
    model = mlp(64, 10)
    te = arm(model)
    ps = list(model.parameters())
    with torch.no_grad():
        for a,b in batches(40, 64, x, y):
            before,loss = [p.clone() for p in ps],F.cross_entropy(model(a), b)
            noise = [.01*torch.randn_like(p) for p in ps]
            for p,n in zip(ps, noise, strict=True): p += n
            step = (F.cross_entropy(model(a), b)-loss)/.01
            for p,n,old in zip(ps, noise, before, strict=True): p.copy_(old-.02*step*n)
            te.log(loss=loss)
            te.step()


# Healthy trainings: parameters outside of the recorded model

@is_healthy
def layers_in_a_list_that_the_optimizer_has(arm):
    "The layers are in a list of Python, but their parameters are passed to the optimizer"
    torch.manual_seed(490)
    model = Residual(list)
    inside = [p for f in model.inside for p in f.parameters()]
    fit(arm, model, torch.optim.Adam([*model.parameters(), *inside], 1e-3), batches(80, 32, *digits()))


@is_healthy
def layers_in_a_list_trained_by_hand(arm):
    "The layers are in a list of Python, and a loop writes their updates into `p.data`, which does not change the version counter"
    torch.manual_seed(491)
    model = Residual(list)
    inside = [p for f in model.inside for p in f.parameters()]
    opt = torch.optim.SGD(model.parameters(), .1)
    te = arm(model, optimizer=opt)
    for a,b in batches(80, 32, *digits()):
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
        for p in inside: p.data.sub_(.1*p.grad); p.grad = None


@is_healthy
def only_the_decoder_is_recorded(arm):
    "An autoencoder with an optimizer for each half. Only the decoder is recorded, whose input comes from the encoder"
    torch.manual_seed(492)
    encoder,decoder = mlp(64, 32, 8),mlp(8, 32, 64)
    opt,other = torch.optim.Adam(decoder.parameters(), 2e-3),torch.optim.Adam(encoder.parameters(), 2e-3)
    te = arm(decoder, optimizer=opt)
    for a, in batches(120, 32, digits()[0]):
        loss = F.mse_loss(decoder(encoder(a)), a)
        te.log(loss=loss)
        opt.zero_grad()
        other.zero_grad()
        loss.backward()
        opt.step()
        other.step()


@is_healthy
def compared_by_a_fixed_network(arm):
    "A perceptual loss: a network that is never trained, but not frozen, compares the output of the model with its input"
    torch.manual_seed(493)
    model,eye = mlp(64, 32, 64),mlp(64, 96, 96)
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    te = arm(model, optimizer=opt)
    for a, in batches(120, 32, digits()[0]):
        loss = F.mse_loss(eye(model(a)), eye(a).detach())
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()


# Healthy trainings: gradients are removed before some steps, or moved to other tensors

@is_healthy
def gradients_moved_to_a_copy(arm):
    "The optimizer has copies of the weights. They take over the gradients, which are then removed from the model"
    torch.manual_seed(494)
    model = mlp(64, 48, 10)
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    opt = torch.optim.SGD(copies, lr=.2)
    te = arm(model, optimizer=opt)
    for a,b in batches(100, 32, *digits()):
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        loss.backward()
        for c,p in zip(copies, model.parameters(), strict=True): c.grad = p.grad.clone()
        model.zero_grad()
        opt.step()
        with torch.no_grad():
            for c,p in zip(copies, model.parameters(), strict=True): p.copy_(c)


@is_healthy
def bad_batches_are_left_out(arm):
    "The gradients of a batch with a large norm are removed before the step, as some loops do after a spike"
    torch.manual_seed(495)
    model = mlp(64, 48, 10)
    opt = torch.optim.SGD(model.parameters(), lr=.2)
    te = arm(model, optimizer=opt)
    for i,(a,b) in enumerate(batches(120, 32, *digits())):
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        if i%5==2: opt.zero_grad()
        opt.step()


# Healthy trainings: gradients that are always clipped

@is_healthy
def always_clipped_for_adam(arm):
    "Each gradient is clipped to a norm of 0.001, but Adam divides gradients by their size"
    torch.manual_seed(496)
    model = mlp(64, 48, 10)
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    te = arm(model, optimizer=opt)
    for a,b in batches(120, 32, *digits()):
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        opt.step()


@is_healthy
def normalized_gradients_with_a_warm_up(arm):
    "Each gradient is clipped to a norm of 0.01, with a learning rate that fits, after a warm-up"
    torch.manual_seed(497)
    model = mlp(64, 48, 10)
    opt = torch.optim.SGD(model.parameters(), lr=10.)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min((step+1)/40, 1))
    te = arm(model, optimizer=opt)
    for a,b in batches(160, 32, *digits()):
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), .01)
        opt.step()
        warm.step()


# Healthy trainings: the elements are moved, or a reshape fits by chance

@is_healthy
def channels_transposed_to_positions(arm):
    torch.manual_seed(480)
    digits_by(arm, RowsOfDigits(lambda y: y.transpose(1, 2)))


@is_healthy
def heads_transposed_and_joined(arm):
    torch.manual_seed(481)
    digits_by(arm, HeadsByHand(lambda y: y.transpose(1, 2).reshape(-1, 8, 32)))


@is_healthy
def logits_of_pixels_permuted_to_rows(arm): pixels_are_bright(arm, 482, lambda p: p.permute(0, 2, 3, 1).reshape(-1, 2))


class AttentionOfRows(nn.Module):
    "nn.MultiheadAttention over the rows of a digit"
    def __init__(self):
        super().__init__()
        self.embed,self.attn,self.out = nn.Linear(8, 32),nn.MultiheadAttention(32, 2, batch_first=True),nn.Linear(32, 10)
    def forward(self, x):
        x = self.embed(x.view(-1, 8, 8))
        return self.out((x+self.attn(x, x, x)[0]).mean(1))


@is_healthy
def as_many_samples_as_features_of_a_head(arm):
    "In nn.MultiheadAttention, (8, 16, 32) becomes (8, 16*2, 16): the sizes are exchanged by chance"
    torch.manual_seed(483)
    model = AttentionOfRows()
    fit(arm, model, torch.optim.Adam(model.parameters(), 3e-3), batches(100, 16, *digits()))


# Healthy trainings: parameter groups with other learning rates, clipping with a loss scale

@is_healthy
def a_decay_that_keeps_the_ratio_of_groups(arm):
    def decay(opt, over):
        for g,lr in zip(opt.param_groups, (.01, .1), strict=True): g['lr'] = lr*(1-over)
    fine_tuned(arm, 520, decay, share=.1)


@is_healthy
def groups_that_become_equal_later(arm):
    "Layer-wise learning rates in the first third of the training, then one learning rate for all layers"
    def warm(opt, over):
        for g,lr in zip(opt.param_groups, (.01, .1), strict=True): g['lr'] = lr if over<.3 else .1
    fine_tuned(arm, 521, warm, share=.1)


@is_healthy
def clipped_after_unscale(arm): with_scaler(arm, 522, True)


@is_healthy
def clipped_by_a_limit_times_the_loss_scale(arm): with_scaler(arm, 523, False, by_scale=True)


@is_healthy
def clipped_to_a_small_norm_after_unscale(arm): with_scaler(arm, 524, True, limit=.2)
