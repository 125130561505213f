"Broken trainings: weights, their gradients, or the steps that change them are wrong"
import copy

import torch
import torch.nn.functional as F
from torch import nn

from . import is_broken
from .data import digits
from .parts import (Auto, Convolutions, Graph, Letters, Recurrent, Transformer, batches, changed, echoes, ends, fit, letters, mlp, of_tokens, passages,
    pictures, ring, squared, table, weights)


def all_but(named, *left_out):
    return [p for n,p in named.named_parameters() if not n.startswith(left_out)]


def as_before(model, before, *names):
    "Check that parameters with a given name prefix have not changed, and that all other parameters have changed"
    same = {*before}-changed(model, before)
    assert same=={n for n in before if n.startswith(names)}, same


# ---- Broken trainings: parameters are frozen, missing in the optimizer, or without a gradient

@is_broken('not_trained', paths='layers.1*', steps=(0, 10))
def frozen_by_name(arm):
    "Freezing parameters whose names begin with 'layers.1' also freezes layers.10 and layers.11"
    torch.manual_seed(0)
    x,y = digits()
    model = nn.Sequential()
    model.add_module('layers', nn.Sequential(nn.Linear(64, 32), *[nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU()) for _ in range(11)]))
    model.add_module('head', nn.Linear(32, 10))
    for n,p in model.named_parameters(): p.requires_grad = not n.startswith('layers.1')
    before = weights(model)
    fit(arm, model, torch.optim.SGD(model.parameters(), lr=.05), batches(50, 32, x, y))
    as_before(model, before, 'layers.1')


@is_broken('not_trained', paths='embed', steps=(0, 10))
def frozen_embedding(arm):
    "Embedding.from_pretrained freezes its weight by default, and the given weight is random"
    torch.manual_seed(1)
    model = Letters()
    model.embed = nn.Embedding.from_pretrained(torch.randn(len(letters), 32))
    before = weights(model)
    fit(arm, model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3), passages(60, 16), of_tokens)
    as_before(model, before, 'embed')


@is_broken('not_trained', paths='decoder*', steps=(0, 10))
def decoder_forgotten(arm):
    "The optimizer has only the parameters of the encoder"
    torch.manual_seed(2)
    model = Auto(64, 32, 8)
    before = weights(model)
    fit(arm, model, torch.optim.Adam(model.encoder.parameters(), lr=3e-3), pictures(60), F.mse_loss)
    as_before(model, before, 'decoder')


@is_broken('not_trained', paths=('classifier', 'classifier*'), steps=(0, 10))
def head_after_optimizer(arm):
    "Fine-tuning: the head for the new labels is created after the optimizer"
    from transformers import BertConfig, BertForSequenceClassification
    torch.manual_seed(3)
    model = BertForSequenceClassification(BertConfig(vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0., attention_probs_dropout_prob=0.))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.classifier = nn.Linear(32, 4)
    def texts():
        for _ in range(40):
            x = torch.randint(30, (16, 12))
            yield x,x[:, 0]%4
    before = weights(model)
    fit(arm, model, opt, texts(), lambda out, y: F.cross_entropy(out.logits, y))
    assert {n for n in before if n.startswith('classifier')} <= {*before}-changed(model, before)
    assert 'bert.pooler.dense.weight' in changed(model, before)


class Skips(nn.Module):
    "A CNN whose forward does not call one of its blocks"
    def __init__(self, c=8):
        super().__init__()
        def block(a, b): return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        self.stem,self.block1,self.block2,self.block3,self.head = block(1, c),block(c, c),block(c, c),block(c, c),nn.Linear(c, 10)

    def forward(self, x):
        x = self.block1(self.stem(x))
        x = self.block3(x) # The fault: `self.block2` is not called before `self.block3`
        return self.head(x.mean((2, 3)))


@is_broken('not_trained', paths='block2*', steps=(0, 10))
def block_never_called(arm):
    "A block is created in __init__ and never called in forward"
    torch.manual_seed(4)
    model = Skips()
    before = weights(model)
    fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), batches(50, 32, *digits(images=True)))
    as_before(model, before, 'block2')


class Detached(nn.Module):
    "A model with a body and two heads; a detach() should keep the gradient of the second head from the body"
    def __init__(self):
        super().__init__()
        self.body,self.age,self.risk = mlp(10, 32, 16),nn.Linear(16, 1),nn.Linear(16, 1)

    def forward(self, x):
        h = self.body(x).relu().detach()
        return self.age(h)+self.risk(h)


@is_broken('not_trained', paths='body*', steps=(0, 10))
def body_is_detached(arm):
    "A detach() is one line too early, so that the body gets no gradient"
    torch.manual_seed(5)
    model = Detached()
    before = weights(model)
    fit(arm, model, torch.optim.SGD(model.parameters(), lr=.02), batches(60, 32, *table('diabetes', regression=True)), squared)
    as_before(model, before, 'body')


class Filtered(nn.Module):
    "A network for sound whose features are computed with numpy"
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(1, 8, 9, stride=4), nn.ReLU(), nn.Conv1d(8, 8, 5), nn.ReLU())
        self.back = nn.Sequential(nn.Flatten(), nn.Linear(8*10, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x): return self.back(torch.as_tensor(self.front(x).detach().numpy().clip(0, 5)))


@is_broken('not_trained', paths='front*', steps=(0, 10))
def through_numpy(arm):
    "Values that pass through numpy have no gradient"
    torch.manual_seed(6)
    def sounds():
        for _ in range(50):
            y = torch.randint(2, (16,))
            yield (torch.sin(torch.arange(64)*(.2+.3*y[:, None]))+.3*torch.randn(16, 64))[:, None],y
    model = Filtered()
    before = weights(model)
    fit(arm, model, torch.optim.Adam(model.parameters(), lr=3e-3), sounds())
    as_before(model, before, 'front')


class NoGrad(Graph):
    "A network whose second convolution runs under no_grad, copied from an evaluation"
    def forward(self, xa):
        x,a = xa
        x = F.relu(self.conv1(a@x))
        with torch.no_grad(): x = F.relu(self.conv2(a@x))
        return self.read(x)


@is_broken('not_trained', paths=('conv1', 'conv2'), steps=(0, 10))
def graph_without_gradient(arm):
    "no_grad around the middle of a graph network also cuts off all layers before"
    torch.manual_seed(7)
    x,a,y = ring()
    model = NoGrad()
    before = weights(model)
    fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), (((x, a), y) for _ in range(60)))
    as_before(model, before, 'conv')


@is_broken('not_trained', paths='encoder*', steps=(0, 10))
def encoder_is_a_copy(arm):
    "After the optimizer is created, the encoder is replaced by a copy of itself"
    torch.manual_seed(8)
    model = Auto(64, 32, 16)
    opt,kept = torch.optim.AdamW(model.parameters(), lr=3e-3),copy.deepcopy(model.encoder)
    model.encoder = kept
    before = weights(model)
    fit(arm, model, opt, pictures(60), F.mse_loss)
    as_before(model, before, 'encoder')


@is_broken('not_trained', paths='lstm', steps=(0, 10))
def weights_replaced(arm):
    "After the optimizer is created, initial weights are set as new Parameters"
    torch.manual_seed(9)
    model = Letters()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for n,p in [*model.lstm.named_parameters()]:
        if 'weight' in n: setattr(model.lstm, n, nn.Parameter(nn.init.orthogonal_(torch.empty_like(p))))
    before = weights(model)
    fit(arm, model, opt, passages(60, 16), of_tokens)
    as_before(model, before, 'lstm.weight')


# ---- Broken trainings: initial weights are too large or too small

@is_broken('poor_scale', 'exploding_gradient', 'saturated', paths=('', '*'), steps=(0, 3))
def weights_of_deviation_one(arm):
    "All layers begin with weights of standard deviation 1, the default of nn.init.normal_"
    torch.manual_seed(10)
    x,y = digits()
    model = mlp(64, 64, 64, 64, 10)
    for m in model:
        if isinstance(m, nn.Linear): nn.init.normal_(m.weight)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-3), batches(60, 32, x, y))
    assert losses[0]>100


@is_broken('poor_scale', paths=('blocks.1.ff.0', 'blocks.1.ff.2', 'blocks.1.ff', 'blocks.1'), steps=(0, 3))
def one_layer_of_a_block_too_large(arm):
    "The initial weights of one feed-forward layer are scaled by the wrong dimension, and forty times too large"
    torch.manual_seed(11)
    model = Transformer(32, blocks=3)
    with torch.no_grad(): model.blocks[1].ff[2].weight *= 40
    assert model.blocks[1].ff[2].weight.std()>2
    fit(arm, model, torch.optim.AdamW(model.parameters(), lr=3e-3), passages(40, 8), of_tokens)


@is_broken('poor_scale', 'vanishing_gradient', paths=('decoder.2', 'decoder.0', 'decoder*'), steps=(0, 3))
def one_layer_of_a_decoder_too_small(arm):
    "The initial weights of an inner layer are scaled by 1e-4, which was meant for the last layer"
    torch.manual_seed(12)
    model = Auto(64, 48, 32, 16, act=nn.Tanh)
    nn.init.normal_(model.decoder[2].weight, std=1e-5)
    before = weights(model)
    fit(arm, model, torch.optim.SGD(model.parameters(), lr=.1), pictures(60), F.mse_loss)
    assert (model.decoder[2].weight-before['decoder.2.weight']).abs().max()<.05


@is_broken('poor_scale', 'attention', 'exploding_gradient', 'saturated', paths=('', '*'), steps=(0, 3))
def bert_of_wide_range(arm):
    "A BERT model with initializer_range=2 in place of .02"
    from transformers import BertConfig, BertForMaskedLM
    torch.manual_seed(13)
    model = BertForMaskedLM(BertConfig(vocab_size=len(letters), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0., attention_probs_dropout_prob=0., initializer_range=2.))
    losses = fit(arm, model, torch.optim.AdamW(model.parameters(), lr=1e-3), passages(30, 8), lambda out, y: of_tokens(out.logits, y))
    assert losses[0]>8


# ---- Broken trainings: all units of a layer are equal

@is_broken('equal_units', 'not_trained', 'dead_units', 'vanishing_gradient', paths=('features.1.0', 'features.3.0'), steps=(0, 5))
def convolution_of_equal_weights(arm):
    "All weights of a convolution begin with .02, so its units stay equal"
    torch.manual_seed(14)
    model = Convolutions(norm=False)
    conv = model.features[1][0]
    nn.init.constant_(conv.weight, .02)
    nn.init.zeros_(conv.bias)
    # The next layer has equal weights, too, so all units of `conv` get the same gradient
    nn.init.constant_(model.features[3][0].weight, .02)
    fit(arm, model, torch.optim.Adam(model.parameters(), lr=3e-3), batches(50, 32, *digits(images=True)))
    assert torch.allclose(conv.weight[:1].expand_as(conv.weight), conv.weight, atol=1e-4)


@is_broken('equal_units', 'not_trained', 'vanishing_gradient', 'poor_scale', 'loss_stalls', 'dead_units', paths=('2', '0', '4'), steps=(0, 5))
def layer_of_zeros(arm):
    "The weights and bias of a hidden layer before a ReLU begin with 0: no gradient passes"
    torch.manual_seed(15)
    x,y = table('breast_cancer')
    model = mlp(30, 32, 16, 2)
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    before = weights(model)
    fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), batches(60, 32, x, y))
    as_before(model, before, '0', '2', '4.weight')


@is_broken('equal_units', 'vanishing_gradient', paths='cell', steps=(0, 5))
def recurrent_of_equal_weights(arm):
    "All weights of an LSTM begin with .1: its 16 units stay equal and remember one number"
    torch.manual_seed(16)
    model = Recurrent(16, nn.LSTM)
    for p in model.cell.parameters(): nn.init.constant_(p, .1)
    nn.init.constant_(model.read.weight, .1)
    fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), echoes(50, 16, 8), squared)
    w = model.cell.weight_ih_l0.view(4, 16, 1)
    assert torch.allclose(w, w[:, :1].expand_as(w), atol=1e-5)


# ---- Broken trainings: weight decay makes the weights vanish

@is_broken('weights_decay', 'collapse', 'loss_stalls', 'vanishing_gradient', paths=('', '*'), steps=(0, 100))
def decay_of_one(arm):
    "SGD with weight_decay=1, which makes the weights vanish"
    torch.manual_seed(17)
    x,y = digits()
    model = mlp(64, 32, 32, 10)
    before = weights(model)
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.1, weight_decay=1.), batches(100, 32, x, y))
    assert model[2].weight.norm()<.01*before['2.weight'].norm() and ends(losses)[1]>2.2


@is_broken('weights_decay', 'collapse', 'loss_stalls', 'vanishing_gradient', paths='conv*', steps=(0, 120))
def decay_of_a_graph(arm):
    "AdamW with a weight decay of 30 for the convolutions, where 3e-2 was meant"
    torch.manual_seed(18)
    x,a,y = ring()
    model = Graph()
    groups = [{'params': all_but(model, 'read'), 'weight_decay': 30.}, {'params': model.read.parameters(), 'weight_decay': 3e-2}]
    before = weights(model)
    fit(arm, model, torch.optim.AdamW(groups, lr=3e-3), (((x, a), y) for _ in range(120)))
    assert model.conv2.weight.norm()<.3*before['conv2.weight'].norm()


# ---- Broken trainings: the optimizer steps are too large or too small

@is_broken('update_too_large', 'dead_units', 'saturated', 'loss_rises', 'diverging', 'loss_spike', 'exploding_gradient', paths=('', '*'), steps=(0, 15))
def sgd_of_large_rate(arm):
    "SGD with a learning rate of 20"
    torch.manual_seed(19)
    x,y = digits()
    model = mlp(64, 32, 32, 10, act=nn.Tanh)
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=20.), batches(60, 32, x, y))
    assert ends(losses)[1]>2*losses[0]


@is_broken('update_too_large', 'attention', 'loss_spike', 'loss_rises', 'poor_scale', 'loss_stalls', paths=('', '*'), steps=(0, 15))
def adam_of_large_rate(arm):
    "GPT-2 with a learning rate of 3e-1, where about 3e-4 is usual"
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(20)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(letters), n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.,
        bos_token_id=0, eos_token_id=0))
    losses = fit(arm, model, torch.optim.AdamW(model.parameters(), lr=.3), passages(40, 8), lambda out, y: of_tokens(out.logits, y))
    assert ends(losses)[1]>2.6 and max(losses)>2*losses[0]


@is_broken('update_too_large', 'loss_spike', 'saturated', paths=('net.4', 'net.*', ''), steps=(1, 20))
def one_group_of_large_rate(arm):
    "The parameter group of the last but one layer has a learning rate with a misplaced decimal point"
    torch.manual_seed(21)
    x,y = table('diabetes', regression=True)
    model = nn.Sequential()
    model.add_module('net', mlp(10, 32, 32, 32, 1, act=nn.Tanh))
    rest = all_but(model, 'net.4')
    fit(arm, model, torch.optim.Adam([{'params': rest}, {'params': model.net[4].parameters(), 'lr': 1.}], lr=1e-3), batches(60, 32, x, y), squared)
    assert model.net[4].weight.std()>3


@is_broken('update_too_small', 'loss_stalls', paths=('', '*'), steps=(1, 60))
def adam_of_tiny_rate(arm):
    "An LSTM with a learning rate of 1e-8"
    torch.manual_seed(22)
    model = Letters()
    before = weights(model)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-8), passages(60, 16), of_tokens)
    assert max((p-before[n]).abs().max() for n,p in model.named_parameters())<1e-6 and ends(losses)[1]>2.8


@is_broken('update_too_small', 'loss_stalls', paths=('', '*'), steps=(10, 100))
def schedule_of_epochs_by_batch(arm):
    "StepLR(5, .1) should be stepped once per epoch, and is stepped once per batch"
    torch.manual_seed(23)
    model = Convolutions()
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    schedule,seen = torch.optim.lr_scheduler.StepLR(opt, 5, .1),{}
    te = arm(model, optimizer=opt)
    for i,(x,y) in enumerate(batches(100, 32, *digits(images=True))):
        if i in (40, 99): seen[i] = weights(model)
        loss = F.cross_entropy(model(x), y)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
    te.close()
    assert max((seen[99][n]-seen[40][n]).abs().max() for n in seen[40])<1e-6 and loss>1


@is_broken('update_too_small', 'not_trained', 'vanishing_gradient', paths='encoder*', steps=(1, 60))
def one_group_of_tiny_rate(arm):
    "The new encoder has the tiny learning rate of a pretrained one, with one zero too many"
    torch.manual_seed(24)
    model = Auto(64, 32, 16)
    before = weights(model)
    groups = [{'params': model.encoder.parameters(), 'lr': 1e-9}, {'params': model.decoder.parameters()}]
    fit(arm, model, torch.optim.Adam(groups, lr=3e-3), pictures(80), F.mse_loss)
    assert all((p-before[n]).abs().max()<1e-6 for n,p in model.named_parameters() if n.startswith('encoder'))


@is_broken('loss_stalls', 'update_too_small', 'not_trained', paths=('', '*'), steps=(1, 60))
def warmup_of_whole_numbers(arm):
    "The warm-up multiplies the learning rate by step//1000, which is 0 for a thousand steps"
    torch.manual_seed(25)
    model = Transformer(32, blocks=1)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1, step//1000))
    te,before = arm(model, optimizer=opt),weights(model)
    for x,y in passages(60, 8):
        loss = of_tokens(model(x), y)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
    te.close()
    as_before(model, before, '')


# ---- Broken trainings: gradients vanish or explode between layers

@is_broken('vanishing_gradient', 'update_too_small', 'loss_stalls', 'collapse', 'saturated', paths=('0', '2', '4', '*'), steps=(0, 10))
def deep_sigmoid(arm):
    "A network of ten layers with a sigmoid after each layer"
    torch.manual_seed(26)
    x,y = digits()
    model = mlp(64, *[32]*9, 10, act=nn.Sigmoid)
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.1), batches(60, 32, x, y))
    assert model[0].weight.grad.norm()<1e-5*model[-1].weight.grad.norm() and ends(losses)[1]>2.2


@is_broken('vanishing_gradient', 'update_too_small', 'loss_stalls', 'collapse', paths=('body.0', 'body.*', ''), steps=(0, 10))
def deep_and_plain(arm):
    "A network of thirty layers without residual connections or normalizations"
    torch.manual_seed(27)
    x,y = table('breast_cancer')
    model = nn.Sequential()
    model.add_module('body', mlp(30, *[24]*30))
    model.add_module('head', nn.Linear(24, 2))
    fit(arm, model, torch.optim.SGD(model.parameters(), lr=.05), batches(40, 32, x, y))
    assert model.body[0].weight.grad.norm()<1e-6*model.head.weight.grad.norm()


@is_broken('exploding_gradient', 'poor_scale', 'not_finite', 'update_too_large', 'loss_spike', 'diverging', paths=('cell', ''), steps=(0, 5))
def recurrent_without_clipping(arm):
    "A recurrent network of ReLUs over 40 numbers whose initial matrix is 1.6 times an orthogonal matrix"
    torch.manual_seed(28)
    model = Recurrent(24, nonlinearity='relu')
    with torch.no_grad(): nn.init.orthogonal_(model.cell.weight_hh_l0).mul_(1.6)
    fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-4), echoes(40, 16, 40), squared)
    assert model.cell.weight_hh_l0.grad.norm()>1e3


@is_broken('exploding_gradient', 'poor_scale', paths=('0', '2', '4', '*'), steps=(0, 5))
def gain_too_large(arm):
    "Sixteen layers of tanh with initial weights of gain 4: gradients grow from layer to layer in the backward pass"
    torch.manual_seed(29)
    x,y = table('wine')
    model = mlp(13, *[32]*15, 3, act=nn.LeakyReLU)
    for m in model:
        if isinstance(m, nn.Linear): nn.init.xavier_normal_(m.weight, 4.)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-4), batches(40, 32, x, y))
    assert losses[0]>1e5


@is_broken('exploding_gradient', 'gradient_spike', 'loss_spike', 'update_too_large', 'not_finite', paths=('cell', 'read', ''), steps=(25, 28))
def long_sequence_explodes(arm):
    "From step 25 on, sequences have 120 numbers instead of 8, and the gradients are not clipped"
    torch.manual_seed(30)
    model = Recurrent(24, nonlinearity='relu')
    with torch.no_grad(): nn.init.orthogonal_(model.cell.weight_hh_l0).mul_(1.4)
    opt,norms = torch.optim.Adam(model.parameters(), lr=1e-3),[]
    te = arm(model, optimizer=opt)
    for x,y in echoes(45, 16, 8, (25, 120)):
        loss = squared(model(x), y)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        norms.append(model.cell.weight_hh_l0.grad.norm().item())
        opt.step()
    te.close()
    assert norms[25]>1e3*max(norms[:25]), norms[20:30]


@is_broken('gradient_spike', 'exploding_gradient', 'update_too_large', 'loss_spike', paths=('aux', 'aux*', 'body*'), steps=(35, 36))
def auxiliary_loss_once_too_large(arm):
    "The weight of a second loss is 1 in one step, and .001 otherwise: the gradients of its head are a thousand times too large"
    torch.manual_seed(31)
    x,y = digits()
    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.head,self.aux = mlp(64, 32, 32),nn.Linear(32, 10),nn.Linear(32, 64)
        def forward(self, x):
            h = self.body(x).relu()
            return self.head(h),self.aux(h.detach())
    model = Tasks()
    opt,norms = torch.optim.SGD(model.parameters(), lr=.5),[]
    te = arm(model, optimizer=opt)
    for i,(xb,yb) in enumerate(batches(70, 32, x, y)):
        out,seen = model(xb)
        main,aux = F.cross_entropy(out, yb),F.mse_loss(seen, xb)
        te.log(loss=main)
        opt.zero_grad()
        (main+(1. if i==35 else .001)*aux).backward()
        norms.append(model.aux.weight.grad.norm().item())
        opt.step()
    te.close()
    assert norms[35]>300*max(norms[:35])


@is_broken('gradient_spike', 'exploding_gradient', 'loss_spike', 'update_too_large', paths='blocks.2*', steps=(22, 23))
def gradient_of_one_block(arm):
    "In one step, the gradients of one block are not divided by the loss scale, unlike all others"
    torch.manual_seed(32)
    model = Transformer(32, blocks=4)
    opt,norms = torch.optim.AdamW(model.parameters(), lr=1e-3),[]
    scale = torch.ones(())
    for p in model.blocks[2].parameters(): p.register_hook(lambda g: g*scale)
    te = arm(model, optimizer=opt)
    for i,(x,y) in enumerate(passages(45, 8)):
        scale.fill_(1024. if i==22 else 1.)
        loss = of_tokens(model(x), y)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        norms.append(model.blocks[2].ff[0].weight.grad.norm().item())
        opt.step()
    te.close()
    assert norms[22]>100*max(norms[:22])


# ---- Broken trainings: gradients of earlier steps are not cleared

def without_zero(arm, model, opt, xys, loss_of=F.cross_entropy):
    "Train without ever calling zero_grad. Return the losses and the sizes of the gradients"
    te,losses,norms = arm(model, optimizer=opt),[],[]
    for x,y in xys:
        loss = loss_of(model(x), y)
        te.log(loss=loss)
        loss.backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        opt.step()
        losses.append(loss.item())
    te.close()
    return losses,norms


@is_broken('gradients_add_up', 'exploding_gradient', 'update_too_large', 'loss_spike', 'diverging', paths=('', '*'), steps=(1, 60))
def never_zeroed(arm):
    "The training loop of a CNN has no zero_grad: the gradients of all steps are added"
    torch.manual_seed(33)
    model = Convolutions()
    _,norms = without_zero(arm, model, torch.optim.SGD(model.parameters(), lr=1e-3), batches(60, 32, *digits(images=True)))
    assert norms[30]>10*norms[0]


@is_broken('gradients_add_up', 'exploding_gradient', 'update_too_large', 'loss_stalls', paths=('', '*'), steps=(1, 60))
def never_zeroed_transformer(arm):
    "A training of a transformer has no zero_grad. With AdamW, the steps have the usual size nevertheless"
    torch.manual_seed(34)
    model = Transformer(32, blocks=1)
    _,norms = without_zero(arm, model, torch.optim.AdamW(model.parameters(), lr=1e-4), passages(60, 8), of_tokens)
    assert norms[40]>8*norms[0], norms


@is_broken('gradients_add_up', 'exploding_gradient', 'update_too_large', 'diverging', 'loss_spike', paths=('critic*', ''), steps=(1, 80))
def wrong_one_zeroed(arm):
    "Two optimizers, of an actor and of a critic: zero_grad is called twice on one of them, and never on the other"
    torch.manual_seed(35)
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor,self.critic = mlp(10, 16, 4),mlp(10, 16, 1)
        def forward(self, x): return self.actor(x),self.critic(x)
    x,y = table('diabetes', regression=True)
    model = Pair()
    actor,critic = torch.optim.SGD(model.actor.parameters(), lr=.05),torch.optim.SGD(model.critic.parameters(), lr=1e-3)
    te,norms = arm(model, optimizer=[actor, critic]),[]
    for xb,yb in batches(80, 32, x, y):
        chosen,value = model(xb)
        loss = F.cross_entropy(chosen, (yb>0).long())+squared(value, yb+3)
        te.log(loss=loss)
        actor.zero_grad()
        actor.zero_grad()
        loss.backward()
        norms.append(model.critic[0].weight.grad.norm().item())
        actor.step()
        critic.step()
    te.close()
    assert max(norms)>8*norms[0], norms
