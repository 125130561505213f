"Broken trainings: values that pass through the model are NaN, infinite, saturated, lost or badly scaled"
import math

import torch
import torch.nn.functional as F
from torch import nn

from . import is_broken
from .data import digits
from .parts import (Attention, Auto, Convolutions, Letters, Transformer, batches, ends, first, first_not_finite, fit, letters, mlp, of_tokens, passages,
    pictures, squared, table)


def at(step, xys, change):
    "Yield batches. Apply the function `change` to the batch of one step."
    for i,(x,y) in enumerate(xys): yield change(x, y) if i==step else (x, y)


def with_value(value, *where):
    "Return a function that writes a number into one element of the inputs"
    def change(x, y):
        x = x.clone()
        x[where] = value
        return x,y
    return change


# ---- Broken trainings: NaN or infinite values

@is_broken('not_finite', paths=('', '0'), steps=(17, 17))
def nan_in_data(arm):
    "One value of a table is missing (NaN)"
    torch.manual_seed(0)
    x,y = table('wine')
    model = mlp(13, 32, 16, 3)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), at(17, batches(60, 32, x, y), with_value(math.nan, 5, 3)))
    assert first_not_finite(losses)==17 and math.isnan(losses[-1])


class Towers(nn.Module):
    "A model with two encoders, one for each half of the columns"
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleDict({'body': mlp(5, 16, 8), 'blood': mlp(5, 16, 8)})
        self.head = nn.Linear(16, 1)

    def forward(self, x): return self.head(torch.cat([self.towers['body'](x[:, :5]), self.towers['blood'](x[:, 5:])], 1))


@is_broken('not_finite', paths=('', 'towers.blood*'), steps=(41, 41))
def log_of_zero_in_data(arm):
    "A column of the data is the logarithm of a count, and one count is 0"
    torch.manual_seed(1)
    x,y = table('diabetes', regression=True)
    model = Towers()
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.05), at(41, batches(70, 32, x, y), with_value(-math.inf, 9, 7)), squared)
    assert first_not_finite(losses)==41


class Standardise(nn.Module):
    "Scale each image to mean 0 and standard deviation 1"
    def forward(self, x): return (x-x.mean((1, 2, 3), keepdim=True))/x.std((1, 2, 3), keepdim=True)


@is_broken('not_finite', paths='standardise', steps=(23, 23))
def blank_picture_is_standardised(arm):
    "The model divides each image by its standard deviation, which is 0 for a blank image"
    torch.manual_seed(2)
    model = nn.Sequential()
    model.add_module('standardise', Standardise())
    model.add_module('net', Convolutions())
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.1), at(23, batches(40, 32, *digits(images=True)), with_value(0., 11)))
    assert first_not_finite(losses)==23


class OfMoments(nn.Module):
    "A LayerNorm that computes the variance from the mean of squares, without an epsilon"
    def forward(self, x):
        mean,squares = x.mean(-1, keepdim=True),x.square().mean(-1, keepdim=True)
        return (x-mean)/(squares-mean*mean).sqrt()


@is_broken('not_finite', paths='body.norm2', steps=(30, 30))
def root_of_negative_variance(arm):
    "A variance computed as a difference of large numbers becomes negative for a row with nearly constant values"
    torch.manual_seed(3)
    x,y = table('breast_cancer')
    body = nn.Sequential()
    for name,m in (('lin1', nn.Linear(30, 16)), ('norm1', nn.LayerNorm(16)), ('act1', nn.Tanh()), ('lin2', nn.Linear(16, 16)), ('shift', nn.Identity()),
            ('norm2', OfMoments()), ('act2', nn.Tanh())): body.add_module(name, m)
    class Shift(nn.Module):
        step = -1
        def forward(self, x):
            self.step += 1
            return x*1e-4+9. if self.step==30 else x # The features become nearly equal, so their variance is nearly 0
    body.shift = Shift()
    model = nn.Sequential()
    model.add_module('body', body)
    model.add_module('head', nn.Linear(16, 2))
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), batches(50, 32, x, y))
    assert first_not_finite(losses)==30


class PoissonRate(nn.Module):
    "Logarithm of a Poisson rate, where a ReLU computes the rate, so the rate can be 0"
    def __init__(self, d):
        super().__init__()
        self.rate,self.relu = nn.Linear(d, 1),nn.ReLU()

    def forward(self, x): return torch.log(self.relu(self.rate(x))).squeeze(-1)


@is_broken('not_finite', paths=('2', ''), steps=(0, 0))
def log_of_relu(arm):
    "A Poisson regression whose rate is the output of a ReLU and may be 0: its logarithm is -inf at once"
    torch.manual_seed(4)
    x,_ = table('diabetes')
    y = torch.poisson((x[:, 2]*.5).exp())
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), PoissonRate(16))
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.01), batches(40, 32, x, y), lambda out, y: F.poisson_nll_loss(out, y))
    assert first(math.isnan(l) for l in losses)<=1


class Pool(nn.Module):
    "Attention pooling: a weighted mean of the tokens of a sequence, without padding"
    def __init__(self, d):
        super().__init__()
        self.ask = nn.Linear(d, 1)

    def forward(self, x, pad):
        share = self.ask(x).squeeze(-1).masked_fill(pad, -math.inf).softmax(1)
        return (share[..., None]*x).sum(1)


class Reader(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.embed,self.body,self.pool,self.head = nn.Embedding(20, d, padding_idx=0),nn.GRU(d, d, batch_first=True),Pool(d),nn.Linear(d, 2)

    def forward(self, x): return self.head(self.pool(self.body(self.embed(x))[0], x==0))


@is_broken('not_finite', paths='pool', steps=(12, 12))
def sentence_of_padding(arm):
    "A sentence of padding only: the softmax gets only -inf"
    torch.manual_seed(5)
    x = torch.randint(1, 20, (300, 10))
    x[torch.arange(10)>=torch.randint(3, 11, (300, 1))] = 0
    y = (x==7).any(1).long()
    model = Reader()
    losses = fit(arm, model, torch.optim.AdamW(model.parameters(), lr=3e-3), at(12, batches(40, 16, x, y), with_value(0, 4)))
    assert first_not_finite(losses)==12


class Distance(nn.Module):
    "The distance of two images, measured between their encodings"
    def __init__(self):
        super().__init__()
        self.encoder = mlp(64, 32, 8)

    def forward(self, ab):
        a,b = (self.encoder(x) for x in ab)
        return (a-b).square().sum(1).sqrt()


@is_broken('not_finite', paths='encoder*', steps=(15, 15))
def root_at_zero(arm):
    "One pair has the same image twice: the derivative of the square root at 0 is infinite, while the loss is finite"
    torch.manual_seed(6)
    x,y = digits()
    def pairs():
        for i,(a,ya) in enumerate(batches(50, 32, x, y)):
            b,yb = next(batches(1, 32, x, y))
            if i==15: b[3],yb[3] = a[3],ya[3]
            yield (a, b),(ya==yb).float()
    model = Distance()
    def contrastive(d, same): return (same*d.square()+(1-same)*(1-d).clamp(min=0).square()).mean()
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.05), pairs(), contrastive)
    assert first_not_finite(losses)==16 # The weights are NaN after step 15, so the loss is NaN from step 16 on


class Compress(nn.Module):
    "The square root of positive values, and 0 for all other values, by torch.where"
    def forward(self, x): return torch.where(x>0, x.sqrt(), 0.)


@is_broken('not_finite', paths='trunk.0', steps=(0, 0))
def where_does_not_stop_nan(arm):
    "torch.where removes square roots of negative numbers in the forward pass only: the backward pass gives NaN to the layer before"
    torch.manual_seed(7)
    x,y = table('breast_cancer')
    model = nn.Sequential()
    model.add_module('trunk', nn.Sequential(nn.Linear(30, 16), Compress()))
    model.add_module('head', nn.Linear(16, 2))
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.05), batches(40, 32, x, y))
    # The comparison NaN>0 is False, so the module returns 0 and the loss stays finite
    assert all(map(math.isfinite, losses)) and model.trunk[0].weight.isnan().any()


class Cosine(nn.Module):
    "Logits by the cosine between a sample's features and a prototype of each class"
    def __init__(self, d, classes):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(classes, d))

    def forward(self, x): return 10*(x/x.norm(dim=1, keepdim=True).clamp(min=1e-8))@(self.prototypes/self.prototypes.norm(dim=1, keepdim=True)).T


@is_broken('not_finite', paths='head', steps=(0, 0))
def division_by_norm_of_zero(arm):
    "A prototype of a class begins with zeros, and is divided by its norm"
    torch.manual_seed(8)
    x,y = digits()
    model = nn.Sequential()
    model.add_module('trunk', mlp(64, 32, 16))
    model.add_module('head', Cosine(16, 10))
    nn.init.zeros_(model.head.prototypes[9:])
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-3), batches(40, 32, x, y))
    assert first_not_finite(losses)==0


@is_broken('not_finite', paths='embed', steps=(1, 1))
def adam_without_epsilon(arm):
    "Adam with eps=0: the update of embedding rows without a gradient is 0/0. These weights are NaN, while all outputs stay finite"
    torch.manual_seed(9)
    model = Letters()
    model.embed = nn.Embedding(len(letters)+5, 32) # Five additional rows for letters that never occur
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.), passages(40, 16), of_tokens)
    assert model.embed.weight.isnan().any() and all(map(math.isfinite, losses))


@is_broken('not_finite', paths=('', 'head', 'lstm'), steps=(33, 33))
def loss_of_no_labels(arm):
    "All labels of one batch are ignored: the loss is 0/0, while all outputs of the model are finite"
    torch.manual_seed(10)
    model = Letters()
    def kept():
        for i,(x,y) in enumerate(passages(60, 16)): yield x,torch.full_like(y, -100) if i==33 else y
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=3e-3), kept(), of_tokens)
    assert first_not_finite(losses)==33


@is_broken('not_finite', paths='', steps=(26, 26))
def only_what_is_logged(arm):
    "The logged loss includes a mean over the positive samples, and one batch has none: the logged loss is NaN, but the training is right"
    torch.manual_seed(11)
    x,y = table('breast_cancer')
    model = mlp(30, 16, 1)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    te,logged = arm(model, optimizer=opt),[]
    for i in range(50):
        xb,yb = next(batches(1, 24, *((x[y==0], y[y==0]) if i==26 else (x, y))))
        each = F.binary_cross_entropy_with_logits(model(xb).squeeze(1), yb.float(), reduction='none')
        opt.zero_grad()
        each.mean().backward()
        opt.step()
        logged.append((each.mean()+each[yb==1].mean()).item()/2)
        te.log(loss=logged[-1])
    te.close()
    assert [math.isfinite(l) for l in logged].index(False)==26 and math.isfinite(logged[27])


# ---- Broken trainings: values exceed the range or precision of float16 or bfloat16

class Gated(nn.Module):
    "A feed-forward block with a gate, which multiplies two growing activations"
    def __init__(self, d):
        super().__init__()
        self.norm,self.wi_0,self.wi_1,self.wo = nn.LayerNorm(d),nn.Linear(d, 4*d),nn.Linear(d, 4*d),nn.Linear(4*d, d)

    def forward(self, x):
        h = self.norm(x)
        return x+self.wo(F.relu(self.wi_0(h))*self.wi_1(h))


class InHalf(nn.Module):
    "A block that computes in half precision, as under autocast"
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        with torch.autocast('cpu', torch.float16): return self.net(x)


@is_broken('overflow', 'not_finite', paths='net.2.wo', steps=(0, 0))
def half_overflows(arm):
    "float16 ends at 65504, but a checkpoint made in bfloat16 has larger outputs in one layer"
    torch.manual_seed(12)
    x,y = digits()
    net = nn.Sequential(nn.Linear(64, 32), *[Gated(32) for _ in range(3)], nn.LayerNorm(32), nn.Linear(32, 10))
    with torch.no_grad():
        for p in (net[2].wi_0.weight, net[2].wi_1.weight, net[2].wo.weight): p *= 80
    model = InHalf(net)
    assert net(x[:32]).isfinite().all() and not model(x[:32]).isfinite().all()
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=1e-3), batches(40, 32, x, y), lambda out, y: F.cross_entropy(out.float(), y))
    assert first_not_finite(losses)==0


@is_broken('overflow', 'not_finite', paths='net.square', steps=(20, 20))
def half_overflows_late(arm):
    "A long recording makes a sum of squares in float16 overflow"
    torch.manual_seed(13)
    class Energy(nn.Module):
        def forward(self, x): return (x*x).sum(-1, keepdim=True)/100
    net = nn.Sequential()
    net.add_module('conv', nn.Conv1d(1, 8, 9, padding=4))
    net.add_module('square', Energy())
    net.add_module('flat', nn.Flatten())
    net.add_module('read', nn.Linear(8, 2))
    model = InHalf(net)
    def sounds():
        for i in range(40):
            y = torch.randint(2, (16,))
            x = torch.sin(torch.arange(128)*(.2+.3*y[:, None]))+.1*torch.randn(16, 128)
            yield x[:, None]*(400 if i==20 else 1),y
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.05), sounds(), lambda out, y: F.cross_entropy(out.float(), y))
    assert first_not_finite(losses)==20


@is_broken('underflow', 'vanishing_gradient', 'not_trained', paths=('net.encoder*', 'net.decoder*'), steps=(0, 10))
def half_without_scaler(arm):
    "The loss is a mean over many outputs, so its gradients are too small for float16"
    torch.manual_seed(14)
    model = InHalf(Auto(64, 32, 16, act=nn.Tanh))
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    before = model.net.encoder[0].weight.detach().clone()
    # Loss of one of eight tasks, with the small weight 1e-4
    def loss_of(out, y): return 1e-4*F.mse_loss(out, y.half()).float()/8
    fit(arm, model, opt, pictures(60, 256), loss_of)
    lost = (model.net.encoder[0].weight.grad==0).float().mean()
    assert lost>.9, lost
    assert (model.net.encoder[0].weight==before).float().mean()>.9


@is_broken('underflow', 'update_too_small', 'not_trained', 'loss_stalls', paths=('*norm*', 'blocks.*', ''), steps=(1, 50))
def updates_below_bfloat16(arm):
    "Weights are in bfloat16, and updates are less than half of their last digit: the weights of normalizations stay 1"
    torch.manual_seed(15)
    model = Transformer(blocks=1).bfloat16()
    before = {n: p.clone() for n,p in model.named_parameters()}
    fit(arm, model, torch.optim.SGD(model.parameters(), lr=2e-3), passages(50, 8), lambda out, y: of_tokens(out.float(), y))
    assert all(torch.equal(p, before[n]) for n,p in model.named_parameters() if 'norm' in n and n.endswith('weight'))


# ---- Broken trainings: the loss scaler skips steps

@is_broken('scaler_skips', 'not_finite', 'not_trained', 'loss_stalls', paths=('', '*'), steps=(0, 20))
def scale_far_too_large(arm):
    "The initial loss scale is 2**100, where 2**16 was meant: all gradients overflow, and each step is skipped"
    torch.manual_seed(16)
    x,y = digits()
    model = InHalf(mlp(64, 32, 32, 10))
    opt,scaler = torch.optim.SGD(model.parameters(), lr=.1),torch.amp.GradScaler('cpu', init_scale=2.**100)
    te,before = arm(model, optimizer=opt, scaler=scaler),model.net[0].weight.detach().clone()
    for xb,yb in batches(50, 32, x, y):
        loss = F.cross_entropy(model(xb).float(), yb)
        te.log(loss=loss)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    te.close()
    assert torch.equal(model.net[0].weight, before)


@is_broken('scaler_skips', 'not_finite', 'not_trained', 'loss_stalls', paths=('', 'encoder*'), steps=(0, 20))
def gradients_never_finite(arm):
    "A square root at 0 in each batch makes a gradient NaN: the loss scaler takes this as an overflow and skips every step"
    torch.manual_seed(17)
    x,y = digits()
    model = Distance()
    opt,scaler = torch.optim.Adam(model.parameters(), lr=1e-3),torch.amp.GradScaler('cpu')
    te,before = arm(model, optimizer=opt, scaler=scaler),model.encoder[0].weight.detach().clone()
    for a,_ in batches(50, 32, x, y):
        # The first pair contains the same sample twice, so its distance is 0
        b = torch.cat([a[:1], x[torch.randint(len(x), (31,))]])
        loss = model((a, b)).mean()
        te.log(loss=loss)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    te.close()
    assert torch.equal(model.encoder[0].weight, before) and scaler.get_scale()<1


# ---- Broken trainings: units always return 0

@is_broken('dead_units', 'not_trained', 'vanishing_gradient', paths=('features.3.*', 'features.3'), steps=(0, 5))
def dead_convolution(arm):
    "The bias of a convolution is -10 by mistake, so its outputs are all negative, and the ReLU after it returns 0"
    torch.manual_seed(18)
    model = Convolutions(norm=False)
    nn.init.constant_(model.features[3][0].bias, -10.)
    x,y = digits(images=True)
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.05), batches(60, 32, x, y))
    assert (model.features(x)==0).all() and ends(losses)[1]>2.2


class Intensity(nn.Module):
    "Mean of the outputs of ReLU units, which are never below 0"
    def __init__(self):
        super().__init__()
        self.body,self.units = nn.Sequential(nn.Linear(10, 32), nn.Sigmoid()),nn.Sequential(nn.Linear(32, 16), nn.ReLU())

    def forward(self, x): return self.units(self.body(x)).mean(1)


@is_broken('dead_units', 'loss_spike', 'gradient_spike', 'update_too_large', paths=('units', 'units.*', ''), steps=(30, 33))
def layer_dies_late(arm):
    "Missing values are coded as -999, and one batch has only missing values: one step makes a layer return 0 forever"
    torch.manual_seed(19)
    x,y = table('diabetes', regression=True)
    def missing(x, y): return x,torch.full_like(y, -999.)
    model = Intensity()
    nn.init.ones_(model.units[0].bias)
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.05), at(30, batches(90, 32, x, y+3), missing), squared)
    assert ends(losses[:30])[1]<2 and not model.units(model.body(x)).any() and all(map(math.isfinite, losses))


@is_broken('dead_units', 'not_trained', 'poor_scale', 'vanishing_gradient', paths='model.decoder.layers.1*', steps=(0, 5))
def dead_feed_forward(arm):
    "The initial biases of one feed-forward layer in an OPT model make its output 0 for each token"
    from transformers import OPTConfig, OPTForCausalLM
    torch.manual_seed(20)
    model = OPTForCausalLM(OPTConfig(vocab_size=len(letters), hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=32, dropout=0.))
    ff = model.model.decoder.layers[1]
    nn.init.constant_(ff.fc1.bias, -10.)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.)
    te,seen = arm(model, optimizer=opt),[]
    for x,y in passages(40, 8):
        loss = of_tokens(model(x).logits, y)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        seen.append(ff.fc1.weight.grad.abs().max().item())
        opt.step()
    te.close()
    assert not any(seen)


# ---- Broken trainings: units are saturated

@is_broken('saturated', 'poor_scale', 'vanishing_gradient', paths=('encoder.2', 'encoder.3', 'encoder.0'), steps=(0, 5))
def saturated_code(arm):
    "Large initial weights before a tanh: all values of the code are -1 or 1"
    torch.manual_seed(21)
    model = Auto(64, 48, 24, act=nn.Tanh)
    model.encoder.append(nn.Tanh())
    nn.init.normal_(model.encoder[2].weight, std=30.)
    fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-3), pictures(60), F.mse_loss)
    assert (model.encoder(digits()[0]).abs()>.99).float().mean()>.9


class Highway(nn.Module):
    "A highway layer: a layer, and a gate that mixes its output with its input"
    def __init__(self, d):
        super().__init__()
        self.gate,self.layer = nn.Sequential(nn.Linear(d, d), nn.Sigmoid()),nn.Sequential(nn.Linear(d, d), nn.Tanh())

    def forward(self, x):
        g = self.gate(x)
        return g*self.layer(x)+(1-g)*x


@is_broken('saturated', 'vanishing_gradient', 'poor_scale', 'not_trained', 'dead_units', paths=('*3.gate*', '*3.layer*', '*3'), steps=(0, 5))
def closed_gate(arm):
    "The gate of one highway layer has the bias -25, where -2 was meant: the gate stays closed"
    torch.manual_seed(22)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 32), *[Highway(32) for _ in range(5)], nn.Linear(32, 10))
    nn.init.constant_(model[3].gate[0].bias, -25.)
    before = model[3].layer[0].weight.detach().clone()
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=5e-3), batches(60, 32, x, y))
    assert ends(losses)[1]<1.5 # The other layers still learn
    assert model[3].gate(model[:3](x)).max()<1e-6 and torch.allclose(before, model[3].layer[0].weight, atol=1e-4)


# ---- Broken trainings: attention

@is_broken('attention', 'saturated', 'poor_scale', paths='blocks.1.attn*', steps=(0, 5))
def attention_without_scale(arm):
    "One block lacks the division of attention logits by sqrt(width), and its queries and keys start large: each token attends to one key"
    torch.manual_seed(23)
    model = Transformer(64)
    model.blocks[1].attn = Attention(64, scale=1.)
    for l in (model.blocks[1].attn.q, model.blocks[1].attn.k): nn.init.normal_(l.weight, std=.7)
    seen = []
    model.blocks[1].attn.softmax.register_forward_hook(lambda m, args, out: seen.append(out.amax(-1)[:, 4:].mean().item()))
    fit(arm, model, torch.optim.AdamW(model.parameters(), lr=1e-3), passages(50, 8), of_tokens)
    assert seen[0]>.9


@is_broken('attention', 'poor_scale', 'saturated', paths=('layers.1.self_attn', 'layers.1'), steps=(0, 5))
def attention_sees_one(arm):
    "The projections of an nn.MultiheadAttention begin fifty times too large"
    torch.manual_seed(24)
    class Seeing(nn.Module):
        def __init__(self, d=32):
            super().__init__()
            self.self_attn,self.norm = nn.MultiheadAttention(d, 2, batch_first=True),nn.LayerNorm(d)
        def forward(self, x): return self.norm(x+self.self_attn(x, x, x)[0])
    x,y = digits()
    model = nn.Sequential()
    model.add_module('rows', nn.Linear(8, 32))
    model.add_module('layers', nn.Sequential(Seeing(), Seeing(), Seeing()))
    model.add_module('flat', nn.Flatten())
    model.add_module('head', nn.Linear(256, 10))
    with torch.no_grad(): model.layers[1].self_attn.in_proj_weight[:64] *= 50
    seen = []
    model.layers[1].self_attn.register_forward_hook(lambda m, args, out: seen.append(out[1].square().sum(-1).mean().item()))
    fit(arm, model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches(40, 16, x.view(-1, 8, 8), y))
    assert seen[0]>.5 # Sum of squared attention weights, averaged over both heads; equal weights for 8 keys give .125


@is_broken('attention', 'update_too_large', 'saturated', 'exploding_gradient', 'loss_rises', 'loss_stalls',
    paths=('blocks.0.attn*', 'blocks.0', ''), steps=(1, 70))
def attention_logits_grow(arm):
    "The learning rate of queries and keys in the first block is 100 times too large: logits grow until each token attends to one key"
    torch.manual_seed(25)
    model = Transformer(32)
    fast = [*model.blocks[0].attn.q.parameters(), *model.blocks[0].attn.k.parameters()]
    rest = [p for p in model.parameters() if all(p is not f for f in fast)]
    seen = []
    model.blocks[0].attn.softmax.register_forward_hook(lambda m, args, out: seen.append(out.amax(-1)[:, 4:].mean().item()))
    fit(arm, model, torch.optim.AdamW([{'params': rest}, {'params': fast, 'lr': .1}], lr=1e-3), passages(70, 8), of_tokens)
    assert seen[0]<.4 and seen[-1]>.9, (seen[0], seen[-1])


# ---- Broken trainings: the outputs or encodings of all samples become equal

class Masked(nn.Module):
    "A network that replaces unknown columns by zeros, given a mask"
    def __init__(self):
        super().__init__()
        self.encoder,self.head = mlp(10, 32, 16),nn.Linear(16, 1)

    def forward(self, x):
        missing = x.isnan()
        return self.head(self.encoder(x*missing)) # The fault: `x*missing` instead of `x*~missing`


@is_broken('collapse', 'loss_stalls', 'same_data', 'dead_units', 'not_trained', paths=('', 'head', 'encoder*'), steps=(0, 20))
def mask_is_inverted(arm):
    "The mask is inverted, so known values are removed: all samples have the same output"
    torch.manual_seed(26)
    x,y = table('diabetes', regression=True)
    model = Masked()
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), batches(60, 32, x, y), squared)
    assert model(x).std()<1e-6 and ends(losses)[1]>.7


class Siamese(nn.Module):
    "Two views of each image, and a predictor of the encoding of one view from the other (SimSiam)"
    def __init__(self):
        super().__init__()
        self.encoder,self.predictor = mlp(64, 32, 16),mlp(16, 8, 16)

    def forward(self, ab):
        za,zb = (self.encoder(x) for x in ab)
        return self.predictor(za),zb


@is_broken('collapse', 'loss_stalls', 'loss_below', paths=('', 'encoder*', 'predictor*'), steps=(3, 130), stats='full')
def siamese_without_stop(arm):
    "SimSiam without its stop-gradient: the encodings of all images become equal"
    torch.manual_seed(27)
    x,_ = digits()
    def views():
        for xb, in batches(130, 32, x): yield (xb+.3*torch.randn_like(xb), xb+.3*torch.randn_like(xb)),None
    model = Siamese()
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=3e-3), views(), lambda out, _: 1-F.cosine_similarity(*out).mean())
    z = F.normalize(model.encoder(x), dim=1)
    assert (z@z.T).mean()>.98 and losses[-1]<.02


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.body,self.to_mean,self.to_log_var,self.decoder = mlp(64, 32, 32),nn.Linear(32, 4),nn.Linear(32, 4),mlp(4, 32, 64)

    def forward(self, x):
        h = self.body(x).relu()
        mean,log_var = self.to_mean(h),self.to_log_var(h)
        return self.decoder(mean+(log_var/2).exp()*torch.randn_like(mean)),mean,log_var


@is_broken('collapse', 'loss_stalls', paths=('to_mean', 'decoder*', ''), steps=(10, 150))
def posterior_collapses(arm):
    "The KL divergence is a sum and the reconstruction error is a mean, so the code carries no information about the image"
    torch.manual_seed(28)
    def loss_of(out, y):
        seen,mean,log_var = out
        return F.mse_loss(seen, y)+(mean.square()+log_var.exp()-log_var-1).sum(1).mean()/2
    model = Variational()
    fit(arm, model, torch.optim.Adam(model.parameters(), lr=3e-3), pictures(150), loss_of)
    out = model(digits()[0])
    assert out[1].std(0).max()<.1, out[1].std(0)


# ---- Broken trainings: running statistics, or different behavior in evaluation mode

def evaluated(arm, model, opt, xys, test, loss_of=F.cross_entropy, every=10, **armed):
    "Train a model, and evaluate it on test data every few steps. Return both losses"
    te,losses,tests = arm(model, optimizer=opt, **armed),[],[]
    for i,(x,y) in enumerate(xys):
        model.train()
        loss = loss_of(model(x), y)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if i%every==every-1:
            model.eval()
            with torch.no_grad(): tests.append(loss_of(model(test[0]), test[1]).item())
    te.close()
    return losses,tests


@is_broken('batch_norm', 'train_eval', paths=('features.*', ''), steps=(0, 60), ttypes=('input', 'output', 'weight', 'weight_grad', 'buffer'))
def momentum_is_the_other(arm):
    "BatchNorm momentum was converted wrongly from another library: .999 became .0, so running statistics never change"
    torch.manual_seed(29)
    x,y = digits(images=True)
    x = 3*x+2
    model = Convolutions()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d): m.momentum = 0.
    losses,tests = evaluated(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), batches(60, 64, x, y), (x[:200], y[:200]))
    assert tests[-1]>3*losses[-1] and not model.features[0][1].running_mean.any()


@is_broken('batch_norm', 'train_eval', paths=('2', '1', ''), steps=(0, 80), ttypes=('input', 'output', 'weight', 'weight_grad', 'buffer'))
def momentum_is_tiny(arm):
    "The only BatchNorm of a network for unscaled columns has momentum .0005, so its running statistics adapt too slowly"
    torch.manual_seed(30)
    x,y = table('breast_cancer')
    model = nn.Sequential(nn.Linear(30, 32), nn.Sigmoid(), nn.BatchNorm1d(32, momentum=.0005), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
    nn.init.constant_(model[0].bias, 3.)
    losses,tests = evaluated(arm, model, torch.optim.SGD(model.parameters(), lr=.1), batches(80, 64, x, y), (x[:200], y[:200]))
    with torch.no_grad(): seen = model[:2](x)
    assert ((seen.mean(0)-model[2].running_mean)/seen.std(0)).abs().median()>3


@is_broken('batch_norm', 'train_eval', 'poor_input_scale', paths=('net.features.0*', 'net', ''), steps=(9, 60))
def test_data_has_other_scale(arm):
    "Images have values from 0 to 1 in training, and from 0 to 16 in evaluations"
    torch.manual_seed(31)
    x,y = digits(images=True)
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Convolutions()
        def forward(self, x): return self.net(x)
    model = Wrapped()
    losses,tests = evaluated(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), batches(60, 64, x, y), (16*x[:200], y[:200]))
    assert tests[-1]>2*losses[-1], (tests, losses[-1])


@is_broken('batch_norm', 'poor_scale', 'train_eval', 'exploding_gradient', paths=('features.*', ''), steps=(0, 10))
def norms_left_in_eval(arm):
    "The normalizations are in evaluation mode from the start, as for fine-tuning, but with running statistics of other data"
    torch.manual_seed(32)
    x,y = digits(images=True)
    model = Convolutions()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d): m.eval().running_var.fill_(1e-2)
    seen = []
    model.features[1][1].register_forward_hook(lambda m, args, out: seen.append(out.std().item()))
    fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-3), batches(50, 64, x, y))
    assert seen[0]>5, seen[0]


class Drop(nn.Module):
    "A dropout that does not divide by the fraction of kept values"
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x): return x*(torch.rand_like(x)>self.p) if self.training else x


@is_broken('train_eval', paths=('', '*'), steps=(4, 80))
def dropout_without_its_scale(arm):
    "Three layers drop most values in training without rescaling: outputs are much larger in evaluations"
    torch.manual_seed(33)
    x,y = table('diabetes', regression=True)
    def block(a): return nn.Linear(a, 128),nn.ReLU(),Drop(.7)
    model = nn.Sequential(*block(10), *block(128), *block(128), nn.Linear(128, 1))
    losses,tests = evaluated(arm, model, torch.optim.Adam(model.parameters(), lr=3e-3), batches(80, 64, x, y), (x[:128], y[:128]), squared, 5)
    assert tests[-1]>2*losses[-1], (tests, losses[-1])


@is_broken('train_eval', 'batch_norm', 'poor_scale', paths=('', '*'), steps=(4, 60))
def noise_left_out(arm):
    "Codes are multiplied by 8 only in training, in a branch of `if self.training`"
    torch.manual_seed(34)
    class Branch(nn.Module):
        def forward(self, x): return 8*x if self.training else x
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), Branch(), nn.Linear(32, 10))
    losses,tests = evaluated(arm, model, torch.optim.Adam(model.parameters(), lr=1e-3), batches(60, 64, x, y), (x[:128], y[:128]), every=5)
    with torch.no_grad(): assert model.eval()(x).std()<.3*model.train()(x).std()


# ---- Broken trainings: wrong input data

@is_broken('same_data', paths=('', 'features*'), steps=(1, 20))
def first_batch_for_ever(arm):
    "The loop calls next(iter(loader)) in each step, and the data loader does not shuffle: all steps use the first batch"
    torch.manual_seed(35)
    x,y = digits(images=True)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32)
    model = Convolutions(norm=False)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-2), (next(iter(loader)) for _ in range(60)))
    assert losses[-1]<.2<F.cross_entropy(model(x), y).item()


@is_broken('same_data', 'collapse', 'not_trained', 'loss_stalls', 'dead_units', paths=('', '0'), steps=(0, 20))
def pictures_are_black(arm):
    "Images are divided as whole numbers, so that all pixels become 0"
    torch.manual_seed(36)
    x,y = digits()
    x = ((x*255).int()//256).float()
    model = mlp(64, 32, 10)
    losses = fit(arm, model, torch.optim.SGD(model.parameters(), lr=.1), batches(60, 32, x, y))
    assert not x.any() and ends(losses)[1]>2.2


@is_broken('same_data', 'collapse', 'loss_stalls', paths=('', 'transformer*'), steps=(0, 20))
def tokens_are_unknown(arm):
    "A tokenizer that knows no letter returns the same token for all texts"
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(37)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(letters), n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.))
    losses = fit(arm, model, torch.optim.AdamW(model.parameters(), lr=3e-3), ((torch.zeros_like(x), y) for x,y in passages(40, 8)),
        lambda out, y: of_tokens(out.logits, y))
    assert ends(losses)[1]>2.5


@is_broken('poor_input_scale', 'exploding_gradient', 'loss_rises', 'loss_spike', paths=('', '0'), steps=(0, 5))
def columns_as_they_are(arm):
    "Some columns of the data have values up to 4000, and others below .01"
    torch.manual_seed(38)
    x,y = table('breast_cancer', raw=True)
    model = mlp(30, 32, 16, 2)
    losses = fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-3), batches(60, 32, x, y))
    assert x.max()>4000 and losses[0]>2


@is_broken('poor_input_scale', 'saturated', paths=('', 'encoder', 'encoder.0', 'encoder.1'), steps=(0, 5))
def pictures_to_255(arm):
    "An autoencoder of images with values up to 255"
    torch.manual_seed(39)
    model = Auto(64, 32, 8, act=nn.Tanh)
    fit(arm, model, torch.optim.Adam(model.parameters(), lr=1e-3), ((255*x, y) for x,y in pictures(60)), F.mse_loss)
    assert (torch.tanh(model.encoder[0](255*digits()[0])).abs()>.99).float().mean()>.7
