"Broken trainings with a normal-looking loss: lost batches, wrong checkpoints, wrong modes, and optimizers without effect"
import torch
from torch import nn
from torch.nn import functional as F

from . import is_broken
from .data import batch, digits
from .more import blobs
from .parts import mlp


def classify(arm, model, opt, n=80, size=64, before=None, after=None, data=None, test=None):
    """Train a classifier of digits with the usual loop.

    Functions are called before the forward pass and after the step of each batch. `test`: True to evaluate every 20 steps."""
    x,y = digits()
    te = arm(model, optimizer=opt)
    for i in range(n):
        if before: before(i, model)
        a,b = batch(size, x, y) if data is None else data(i)
        loss = F.cross_entropy(model(a), b)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if after: after(i, model)
        if test and i%20==19: test(model)
    te.close()


def look(model):
    "Evaluate the model on a batch, and switch back to training mode."
    model.eval()
    with torch.no_grad(): model(batch(100, *digits())[0])
    model.train()


@is_broken('resumed', steps=(50, 51))
def checkpoint_without_its_body(arm):
    "At step 50, a checkpoint is loaded whose keys have another prefix for the first layers, so these layers get new random values"
    def before(i, model):
        if i==50:
            for m in model[:4]:
                if isinstance(m, nn.Linear): m.reset_parameters()
    model = mlp(64, 64, 64, 10)
    classify(arm, model, torch.optim.Adam(model.parameters(), 3e-3), before=before)


@is_broken('resumed', steps=(60, 61))
def best_weights_are_the_first(arm):
    "At step 60, the best weights are restored, but the stored weights are still the initial ones"
    model = mlp(64, 64, 10)
    best = {k: v.clone() for k,v in model.state_dict().items()}
    classify(arm, model, torch.optim.Adam(model.parameters(), 3e-3), n=100, before=lambda i, m: i==60 and m.load_state_dict(best))


@is_broken('constant_batch', steps=(0, 60))
def batches_arrive_too_late(arm):
    "One batch in 15 is still empty when the model gets it"
    x,y = digits()
    def data(i):
        a,b = batch(64, x, y)
        return a*(i%15!=9), b
    model = mlp(64, 64, 10)
    classify(arm, model, torch.optim.SGD(model.parameters(), .1, momentum=.9), data=data)


@is_broken('repeated_data')
def three_workers_of_one_mind(arm):
    "Three workers of a data loader have the same random state and draw the same samples"
    drawn = []
    def data(i):
        if i%3==0: drawn[:] = [batch(64, *digits())]
        return drawn[0]
    model = mlp(64, 64, 10)
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), data=data, n=90)


class Described(nn.Module):
    "A data set of samples, each with a sentence about the sample"
    def __init__(self): super().__init__(); self.words,self.x,self.head = nn.Embedding(10, 16),nn.Linear(16, 16),nn.Linear(16, 4)
    def forward(self, ids, x): return self.head(F.relu(self.x(x)+self.words(ids).mean(1)))


@is_broken('batch_lost')
def one_sentence_for_all(arm):
    "The tokenizer joins the sentences of a batch, so all samples get the first sentence"
    model = Described()
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    te = arm(model, optimizer=opt)
    for _ in range(60):
        x,y = blobs(32)
        ids = torch.stack([y, y+torch.randint(3, (32,)), torch.randint(10, (32,))], 1)[:1]
        loss = F.cross_entropy(model(ids, x), y)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
    te.close()


class Halves(nn.Module):
    "A network on two devices, whose values are copied from one device to the other"
    def __init__(self, copy): super().__init__(); self.first,self.second,self.copy = mlp(64, 64, 64),mlp(64, 64, 10),copy
    def forward(self, x): return self.second(self.copy(self.first(x)))


@is_broken('hand_over', paths='second*', steps=(0, 40))
def copy_between_halves_is_lost(arm):
    "In one step of 20, the copy between the devices has not arrived, so the second half of the network gets zeros"
    count = iter(range(10**6))
    model = Halves(lambda h: h*(next(count)%20!=7))
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=100)


@is_broken('hand_over', paths='second*', steps=(0, 40))
def copy_of_the_step_before(arm):
    "In one step of 20, the second half of the network gets the values of the step before"
    count,last = iter(range(10**6)),[None]
    def copy(h):
        old,last[0] = last[0],h.detach()
        return old if next(count)%20==7 else h
    model = Halves(copy)
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=100)


class Dropping(nn.Module):
    "A network whose dropout does not depend on training or evaluation mode"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(64, 64),nn.Linear(64, 10)
    def forward(self, x): return self.b(F.dropout(F.relu(self.a(x)), .3))


@is_broken('random_eval', steps=(0, 40))
def dropout_that_does_not_know_the_mode(arm):
    "`F.dropout` is called without training=self.training, and the model is evaluated every 20 steps"
    model = Dropping()
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=100, test=look)


@is_broken('train_eval')
def loaded_in_evaluation_mode(arm):
    "A model with dropout is trained as a library loads it, in evaluation mode, without a call of `train()`"
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(.3), nn.Linear(64, 10)).eval()
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3))


@is_broken('train_eval', steps=(5, 6))
def evaluated_within_each_epoch(arm):
    "The model is switched to training mode at the start of each epoch of 25 steps, and evaluated after every tenth step"
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(.5), nn.Linear(64, 10))
    def before(i, m):
        if i%25==0: m.train()
        if i%10==5: m.eval() # The fault: no call of train() after the evaluation
    classify(arm, model, torch.optim.Adam(model.parameters(), 1e-3), n=150, before=before)


@is_broken('train_eval')
def normalised_after_the_first_look(arm):
    "The first pass of a model with the old `spectral_norm` is an evaluation, in which the weights are not normalized yet"
    sn = nn.utils.spectral_norm
    model = nn.Sequential(sn(nn.Linear(64, 128)), nn.ReLU(), sn(nn.Linear(128, 128)), nn.ReLU(), sn(nn.Linear(128, 10)))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    first = []
    def before(i, m):
        if not first: first.append(look(m))
    classify(arm, model, opt, before=before)


@is_broken('not_trained', steps=(30, 31))
def optimizer_that_stops(arm):
    "After 30 steps, the optimizer has other tensors than the model: it steps, but the weights of the model do not change"
    model = mlp(64, 64, 10)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    def before(i, m):
        if i==30:
            with torch.no_grad(): opt.param_groups[0]['params'] = [p.clone().requires_grad_() for p in m.parameters()]
    classify(arm, model, opt, before=before)


@is_broken('not_trained')
def head_frozen_with_the_rest(arm):
    "A loop freezes all parameters, also those of the new head, although the optimizer trains only this head"
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    opt = torch.optim.Adam(model[3].parameters(), 1e-3)
    for n,p in model.named_parameters(): p.requires_grad = n.startswith('1')
    classify(arm, model, opt)


@is_broken('not_trained', steps=(40, 41))
def frozen_by_a_late_call(arm):
    "A method `train()` of the model freezes the first layer, and is first called at step 40"
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    def before(i, m):
        if i==40: m[0].requires_grad_(False)
    classify(arm, model, torch.optim.SGD(model.parameters(), .05, momentum=.9), n=100, before=before)


@is_broken('schedule_per_batch')
def cosine_of_epochs_in_batches(arm):
    "CosineAnnealingLR has T_max in epochs, but is stepped once per batch"
    model = mlp(64, 64, 10)
    opt = torch.optim.SGD(model.parameters(), .1, momentum=.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)
    classify(arm, model, opt, n=120, after=lambda i, m: schedule.step())


@is_broken('update_too_small', steps=(15, 45))
def steps_of_epochs_in_batches(arm):
    "StepLR has a step size of 10 epochs, but is stepped once per batch"
    torch.manual_seed(311)
    model = mlp(64, 64, 10)
    opt = torch.optim.SGD(model.parameters(), .05, momentum=.9)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 10, .1)
    classify(arm, model, opt, n=120, after=lambda i, m: schedule.step())
