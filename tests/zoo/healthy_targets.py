"Healthy trainings with losses and targets that look wrong"
import torch
import torch.nn.functional as F
from torch import nn

from . import is_healthy
from .broken_facts import TwoPlaces, with_evaluations
from .data import digits, fell
from .parts import Letters, batches, fit, letters, mlp, of_tokens, passages, squared, table


def classifier(*after, sizes=(64, 32, 10)): return nn.Sequential(*mlp(*sizes), *after)


def adam(model, lr=3e-3): return torch.optim.Adam(model.parameters(), lr=lr)


@is_healthy
def nll_of_a_softmax_and_log(arm):
    torch.manual_seed(0)
    model = classifier(nn.Softmax(1))
    fell(fit(arm, model, adam(model, 1e-2), batches(150, 32, *digits()), lambda p, y: F.nll_loss((p+1e-8).log(), y)))


@is_healthy
def cross_entropy_of_logarithms(arm):
    "cross_entropy gets log-probabilities, for which it gives the same loss as for logits"
    torch.manual_seed(1)
    model = classifier(nn.LogSoftmax(1))
    fell(fit(arm, model, adam(model, 1e-2), batches(150, 32, *digits())))


@is_healthy
def distilled(arm):
    torch.manual_seed(2)
    x,y = digits()
    model,soft = classifier(),F.one_hot(y, 10)*.9+.01
    fit(arm, model, adam(model), batches(150, 32, x, soft), lambda out, t: F.kl_div(F.log_softmax(out/2, 1), t, reduction='batchmean')*4)


@is_healthy
def mixed_up(arm):
    "mixup: the targets are soft labels of two classes"
    torch.manual_seed(3)
    x,y = digits()
    def mixed():
        for x1,y1 in batches(150, 32, x, F.one_hot(y, 10).float()):
            at,k = torch.randperm(32),torch.rand(1)
            yield k*x1+(1-k)*x1[at],k*y1+(1-k)*y1[at]
    model = classifier()
    fit(arm, model, adam(model), mixed())


@is_healthy
def smoothed(arm):
    torch.manual_seed(4)
    model = classifier()
    fit(arm, model, adam(model), batches(150, 32, *digits()), lambda out, y: F.cross_entropy(out, y, label_smoothing=.1))


@is_healthy
def some_labels_ignored(arm):
    "A masked language model: most labels are -100, which the loss ignores"
    torch.manual_seed(5)
    model = Letters()
    def masked():
        for x,y in passages(120, 16): yield x,torch.where(torch.rand(y.shape)<.3, y, -100)
    fit(arm, model, adam(model, 1e-2), masked(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))


@is_healthy
def several_labels(arm):
    "A classifier with several right classes per sample, and ten sigmoids"
    torch.manual_seed(6)
    x,y = digits()
    labels = torch.stack([(y>>k)&1 for k in range(4)], 1).float()
    model = classifier(nn.Sigmoid(), sizes=(64, 32, 4))
    fell(fit(arm, model, adam(model, 1e-2), batches(150, 32, x, labels), F.binary_cross_entropy), .8)


@is_healthy
def autoencoder_of_pixels(arm):
    torch.manual_seed(7)
    x,_ = digits()
    model = nn.Sequential(*mlp(64, 16, 64), nn.Sigmoid())
    fit(arm, model, adam(model), batches(150, 32, x, x), F.binary_cross_entropy)


@is_healthy
def autoencoder_of_tanh(arm):
    torch.manual_seed(8)
    x,_ = digits()
    model = nn.Sequential(*mlp(64, 16, 64), nn.Tanh())
    fell(fit(arm, model, adam(model, 1e-2), batches(200, 32, 2*x-1, 2*x-1), F.mse_loss), .8)


@is_healthy
def counts_with_noise(arm):
    "Targets are counts with noise, a few of which are slightly below zero, and the last activation is a ReLU"
    torch.manual_seed(9)
    x = torch.randn(512, 4)
    y = x.abs().sum(1, keepdim=True)+.05*torch.randn(512, 1)
    model = nn.Sequential(*mlp(4, 32, 1), nn.ReLU())
    nn.init.constant_(model[2].bias, 2.)
    fell(fit(arm, model, adam(model, 1e-2), batches(200, 64, x, y), F.mse_loss), .8)


@is_healthy
def mean_and_variance(arm):
    "Heteroscedastic regression: the model returns a mean and a log-variance"
    torch.manual_seed(10)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 32, 2)
    def loss(out, y): return (.5*(out[:, 1]+(out[:, 0]-y)**2*(-out[:, 1]).exp())).mean()
    fit(arm, model, adam(model), batches(150, 32, x, y), loss)


@is_healthy
def quantiles_at_once(arm):
    "Quantile regression: three outputs are compared with one target on purpose"
    torch.manual_seed(11)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 32, 3)
    def loss(out, y):
        q,d = torch.tensor([.1, .5, .9]),y[:, None]-out
        return torch.maximum(q*d, (q-1)*d).mean()
    fit(arm, model, adam(model), batches(150, 32, x, y), loss)


@is_healthy
def ensemble_of_heads(arm):
    "Five outputs, all trained on the same target"
    torch.manual_seed(12)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 32, 5)
    fit(arm, model, adam(model), batches(150, 32, x, y[:, None]), lambda out, y: (out-y).square().mean())


@is_healthy
def pairs_of_samples(arm):
    "InfoNCE: labels are 0 to N-1, and the softmax is taken over the batch in both directions"
    torch.manual_seed(13)
    x,_ = digits()
    model = mlp(64, 64, 16)
    def loss(out, x):
        a,b = F.normalize(out, dim=1),F.normalize(model(x+.1*torch.randn_like(x)), dim=1)
        logits,y = a@b.T/.2,torch.arange(len(a))
        return (F.cross_entropy(logits, y)+F.cross_entropy(logits.T, y))/2
    fit(arm, model, adam(model, 1e-3), batches(100, 32, x, x), loss)


@is_healthy
def first_is_right(arm):
    "MoCo: the right class is always the first, and negative samples come from a queue"
    torch.manual_seed(14)
    x,_ = digits()
    model = mlp(64, 64, 16)
    def loss(out, x):
        a,b = F.normalize(out, dim=1),F.normalize(model(x+.1*torch.randn_like(x)), dim=1).detach()
        others = F.normalize(torch.randn(64, 16), dim=1)
        logits = torch.cat([(a*b).sum(1, keepdim=True), a@others.T], 1)/.2
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))
    fit(arm, model, adam(model, 1e-3), batches(100, 32, x, x), loss)


@is_healthy
def policy_gradient(arm):
    "A policy gradient: the loss is -log p times an advantage of either sign"
    torch.manual_seed(15)
    x,y = digits()
    model = classifier()
    def loss(out, y):
        p = torch.distributions.Categorical(logits=out)
        a = p.sample()
        return -(p.log_prob(a)*((a==y).float()-.1)).mean()
    fit(arm, model, adam(model), batches(200, 64, x, y), loss)


@is_healthy
def policy_gradient_by_hand(arm):
    torch.manual_seed(16)
    x,y = digits()
    model = classifier()
    def loss(out, y):
        logp = out.log_softmax(1)
        a = torch.multinomial(logp.detach().exp(), 1)
        return -(logp.gather(1, a)[:, 0]*((a[:, 0]==y).float()-.1)).mean()
    fit(arm, model, adam(model), batches(200, 64, x, y), loss)


@is_healthy
def deceives(arm):
    "A GAN: in each batch of the discriminator, all labels are equal"
    torch.manual_seed(17)
    x,_ = digits()
    g,d = mlp(8, 32, 64),mlp(64, 32, 1)
    og,od = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(.5, .99)) for m in (g, d))
    te_g,te_d = arm(g, optimizer=og),arm(d, optimizer=od)
    bce = F.binary_cross_entropy_with_logits
    for (real,) in batches(150, 32, x):
        fake = g(torch.randn(32, 8)).sigmoid()
        loss_d = bce(d(real), torch.ones(32, 1))+bce(d(fake.detach()), torch.zeros(32, 1))
        te_d.log(loss=loss_d)
        od.zero_grad(); loss_d.backward(); od.step()
        loss_g = bce(d(fake), torch.ones(32, 1))
        te_g.log(loss=loss_g)
        og.zero_grad(); loss_g.backward(); og.step()
    te_g.close()
    te_d.close()


@is_healthy
def deceives_with_squares(arm):
    "A GAN with squared errors (LSGAN): one target is broadcast to all samples"
    torch.manual_seed(18)
    x,_ = digits()
    g,d = mlp(8, 32, 64),mlp(64, 32, 1)
    og,od = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(.5, .99)) for m in (g, d))
    te = arm(d, optimizer=od)
    one,zero = torch.tensor(1.),torch.tensor(0.)
    for (real,) in batches(150, 32, x):
        fake = g(torch.randn(32, 8)).sigmoid()
        out = d(real)
        loss_d = F.mse_loss(out, one.expand_as(out))+F.mse_loss(d(fake.detach()), zero.expand_as(out))
        te.log(loss=loss_d)
        od.zero_grad(); loss_d.backward(); od.step()
        loss_g = ((d(fake)-1)**2).mean()
        og.zero_grad(); loss_g.backward(); og.step()
    te.close()


@is_healthy
def mostly_background(arm):
    "Segmentation of small images with one channel: most pixels are background"
    torch.manual_seed(19)
    x,_ = digits(images=True)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    fell(fit(arm, model, adam(model, 1e-2), batches(150, 8, x, (x[:, 0]>.6).long())), .8)


@is_healthy
def segments_with_one_channel(arm):
    torch.manual_seed(20)
    x,_ = digits(images=True)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1), nn.Sigmoid())
    fell(fit(arm, model, adam(model, 1e-2), batches(150, 16, x, (x>.6).float()), F.binary_cross_entropy), .8)


@is_healthy
def physics(arm):
    "A network solves the differential equation u' = -u: the targets are zeros, and a condition at the border"
    torch.manual_seed(21)
    model = mlp(1, 32, 1, act=nn.Tanh)
    def points():
        for _ in range(200): yield torch.rand(32, 1).requires_grad_(),torch.ones(1, 1)
    def loss(out, one):
        t = torch.linspace(0, 1, 32)[:, None].requires_grad_()
        u = model(t)
        du, = torch.autograd.grad(u.sum(), t, create_graph=True)
        return (du+u).square().mean()+(model(torch.zeros(1, 1))-one).square().mean()
    fit(arm, model, adam(model), points(), loss)


@is_healthy
def capped_logits(arm):
    "Logits are limited to -30 to 30 by a scaled tanh, as in Gemma"
    torch.manual_seed(22)
    model = classifier()
    fell(fit(arm, model, adam(model, 1e-2), batches(150, 32, *digits()), lambda out, y: F.cross_entropy(30*torch.tanh(out/30), y)))


@is_healthy
def noise_is_predicted(arm):
    "A diffusion model, whose target is the noise"
    torch.manual_seed(23)
    x,_ = digits()
    model = mlp(65, 64, 64)
    def noisy():
        for (x0,) in batches(150, 32, x):
            t,e = torch.rand(32, 1),torch.randn(32, 64)
            yield torch.cat([(1-t)*x0+t*e, t], 1),e
    fit(arm, model, adam(model), noisy(), F.mse_loss)


@is_healthy
def few_labels_of_one_class(arm):
    "Three steps on a few samples, all of one class"
    torch.manual_seed(24)
    x,y = digits(classes=[3])
    model = classifier()
    fit(arm, model, adam(model), ((x[:4], y[:4]) for _ in range(3)))


@is_healthy
def clear_squares(arm):
    "A regression whose outputs and targets both pass through a squeeze before the squared error"
    torch.manual_seed(25)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 32, 1)
    fit(arm, model, adam(model), batches(150, 32, x, y), squared)


@is_healthy
def compared_in_pairs(arm):
    "A loss of distances between all pairs of samples, by broadcasting on purpose"
    torch.manual_seed(26)
    x,_ = digits()
    model = mlp(64, 32, 1)
    def loss(out, x): return (out[:, 0].unsqueeze(1)-x.mean(1)[None]).square().mean()
    fit(arm, model, adam(model), batches(100, 32, x, x), loss)


@is_healthy
def a_rare_class(arm):
    "One sample in fifty is of the second class, so more than half of the batches have labels of the first class only"
    torch.manual_seed(50)
    x,y = digits(classes=(0, 1))
    zeros,ones = (y==0).nonzero()[:, 0],(y==1).nonzero()[:, 0]
    keep = torch.cat([zeros[:147], ones[:3]])
    model = classifier(sizes=(64, 16, 2))
    fit(arm, model, adam(model, 1e-3), batches(150, 16, x[keep], y[keep]))


class AutoOfLetters(nn.Module):
    "An autoencoder of letters, with one vector for each passage"
    def __init__(self, d=48):
        super().__init__()
        self.embed,self.encode,self.code = nn.Embedding(len(letters), d),nn.GRU(d, d, batch_first=True),nn.Linear(d, d)
        self.decode,self.head = nn.GRU(d, d, batch_first=True),nn.Linear(d, len(letters))

    def forward(self, x):
        code = self.code(self.encode(self.embed(x))[0][:, -1])
        return self.head(self.decode(code[:, None].expand(-1, x.shape[1], -1))[0])


@is_healthy
def letters_from_one_vector(arm):
    "An autoencoder of six letters: the labels are the inputs on purpose"
    torch.manual_seed(51)
    model = AutoOfLetters()
    fell(fit(arm, model, adam(model, 1e-2), ((x, x) for x,_ in passages(300, 32, 6)), of_tokens), .5)


class ShiftsItself(Letters):
    "A language model that shifts the letters before its embedding, so its labels are its inputs"
    def forward(self, x): return super().forward(F.pad(x, (1, 0))[:, :-1])


@is_healthy
def letters_shifted_inside(arm):
    torch.manual_seed(52)
    model = ShiftsItself()
    fell(fit(arm, model, adam(model, 1e-2), ((x, x) for x,_ in passages(200, 16)), of_tokens), .7)


@is_healthy
def hidden_letters(arm):
    "A masked language model: the labels are the letters, and most letters are given. Attention sees all of them, without a mask"
    torch.manual_seed(53)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0., batch_first=True), 1, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(len(letters)+1, 32), model, nn.Linear(32, len(letters)))
    def hidden():
        for x,_ in passages(120, 16):
            is_hidden = torch.rand(x.shape)<.2
            yield torch.where(is_hidden, len(letters), x),torch.where(is_hidden, x, -100)
    fit(arm, model, adam(model, 1e-2), hidden(), of_tokens)


class Translator(nn.Module):
    "A transformer whose encoder sees all letters of the source, and whose decoder hides later letters"
    def __init__(self, d=32):
        super().__init__()
        self.embed,self.place,self.head = nn.Embedding(len(letters), d),nn.Embedding(16, d),nn.Linear(d, len(letters))
        self.body = nn.Transformer(d, 4, 1, 1, 64, 0., batch_first=True)

    def forward(self, both):
        source,target = (self.embed(x)+self.place.weight for x in both)
        return self.head(self.body(source, target, tgt_mask=torch.full((16, 16), -torch.inf).triu(1)))


@is_healthy
def reversed_letters(arm):
    "A transformer with encoder and decoder turns passages around. The labels are the next letters of the decoder's input"
    torch.manual_seed(54)
    model = Translator()
    def pairs():
        for x,_ in passages(120, 16, 17):
            back = x.flip(1)
            yield (x[:, :16], back[:, :16]),back[:, 1:]
    fell(fit(arm, model, adam(model, 3e-3), pairs(), of_tokens), .9)


class TimeFirst(nn.Module):
    "An LSTM with time in dimension 0, which gets images as (samples, lines, pixels) and transposes them"
    def __init__(self):
        super().__init__()
        self.lstm,self.head = nn.LSTM(8, 32),nn.Linear(32, 10)

    def forward(self, x): return self.head(self.lstm(x.transpose(0, 1))[0][-1])


@is_healthy
def lines_transposed(arm):
    torch.manual_seed(55)
    x,y = digits()
    model = TimeFirst()
    fell(fit(arm, model, adam(model, 1e-2), batches(150, 32, x.view(-1, 8, 8), y)), .7)


@is_healthy
def one_long_sequence(arm):
    "A single sequence of 40 positions as a batch of one, with a label for each position: the LSTM runs over dimension 0"
    torch.manual_seed(56)
    class Tagger(TimeFirst):
        def forward(self, x): return self.head(self.lstm(x[:, None])[0][:, 0])
    model = Tagger()
    def sequences():
        for _ in range(150):
            x = torch.randn(40, 8)
            yield x,(x[:, 0].cumsum(0)>0).long()
    fit(arm, model, adam(model, 1e-2), sequences(), F.cross_entropy)


@is_healthy
def letters_copied_both_ways(arm):
    "A bidirectional LSTM learns to copy its input, as the first step before other tasks"
    torch.manual_seed(57)
    model = Letters()
    model.lstm = nn.LSTM(32, 16, batch_first=True, bidirectional=True)
    fell(fit(arm, model, adam(model, 1e-2), ((x, x) for x,_ in passages(150, 16)), of_tokens))


@is_healthy
def large_targets_that_are_reached(arm):
    "The targets have a mean of 300, and the learning rate is large enough to reach them"
    torch.manual_seed(30)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 64, 1)
    fell(fit(arm, model, adam(model, 3e-2), batches(150, 32, x, 300+50*y), squared))


@is_healthy
def the_output_is_scaled(arm):
    "The targets have a mean of 2000, and the model multiplies its output by 1000"
    torch.manual_seed(31)
    x,y = table('diabetes', regression=True)
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(10, 64, 1)
        def forward(self, x): return 1000*self.body(x)
    model = Scaled()
    fell(fit(arm, model, adam(model, 1e-2), batches(150, 32, x, 2000+500*y), squared))


@is_healthy
def high_dropout_of_a_wide_layer(arm):
    "A wide layer learns, although nine of ten of its outputs are dropped"
    torch.manual_seed(32)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Dropout(.9), nn.Linear(1024, 10))
    fell(fit(arm, model, adam(model, 1e-3), batches(200, 32, *digits())))


class TagsItself(Letters):
    "A forward LSTM that gets the labels as a second argument, and computes its loss"
    def forward(self, x, tags):
        out = super().forward(x)
        return out,of_tokens(out, tags)


@is_healthy
def tags_as_an_input_of_the_model(arm):
    "The labels are an argument of the model, so they equal one of its inputs. They are the letters of the passage, each moved by one in the alphabet"
    torch.manual_seed(58)
    model = TagsItself()
    opt = adam(model, 1e-2)
    te = arm(model, optimizer=opt)
    for x,_ in passages(150, 16):
        _,loss = model(x, (x+1)%len(letters))
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()


@is_healthy
def few_labels_in_a_batch(arm):
    "Most samples have no label (-1). Often, all labels of a batch are of one class by chance"
    torch.manual_seed(59)
    x,y = digits(classes=range(2))
    hidden = torch.where(torch.rand(len(y))<.06, y, -1)
    model = classifier(sizes=(64, 16, 2))
    def some():
        for a,b in batches(150, 32, x, hidden):
            if (b>=0).any(): yield a,b
    fit(arm, model, adam(model, 1e-3), some(), lambda p, t: F.cross_entropy(p, t, ignore_index=-1))


class OneExpert(nn.Module):
    "A mixture of experts with only one expert, on the rows of a digit"
    def __init__(self):
        super().__init__()
        self.gate,self.experts,self.out = nn.Linear(8, 1),nn.ModuleList([nn.Linear(8, 32)]),nn.Linear(32, 10)
    def forward(self, x):
        x = x.view(-1, 8, 8)
        mixed = (self.gate(x).softmax(-1).unsqueeze(-1)*torch.stack([f(x) for f in self.experts], -2)).sum(-2)
        return self.out(mixed.relu().mean(1))


class AttendsToOne(nn.Module):
    "Attention to a context of a few tokens, here one: the whole digit"
    def __init__(self):
        super().__init__()
        self.q,self.kv,self.score,self.out = nn.Linear(8, 32),nn.Linear(64, 64),nn.Linear(32, 1),nn.Linear(64, 10)
    def forward(self, x):
        q,(k,v) = self.q(x.view(-1, 8, 8)),self.kv(x.unsqueeze(1)).chunk(2, -1)
        y = q.tanh()+(q@k.transpose(1, 2)).softmax(-1)@v
        pooled = (self.score(v).softmax(1)*v).sum(1) # over the tokens of the context
        return self.out(torch.cat([(self.score(y).softmax(1)*y).sum(1), pooled], -1))


@is_healthy
def mixture_of_one_expert(arm):
    torch.manual_seed(60)
    model = OneExpert()
    # a loss of the load balance trains the gate a little
    fit(arm, model, adam(model, 1e-2), batches(150, 32, *digits()), lambda p, y: F.cross_entropy(p, y)+1e-3*model.gate.weight.square().sum())


@is_healthy
def attention_to_one_token(arm):
    "Softmaxes over a context of one token return 1"
    torch.manual_seed(61)
    model = AttendsToOne()
    fell(fit(arm, model, adam(model, 3e-3), batches(150, 32, *digits())))


@is_healthy
def linear_autoencoder(arm):
    "A linear autoencoder with four units finds principal components. The loss cannot fall far"
    torch.manual_seed(62)
    x,_ = digits()
    model = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 64))
    fit(arm, model, adam(model), batches(200, 32, x, x), F.mse_loss)


@is_healthy
def deep_linear_network(arm):
    "Three linear layers without an activation learn a linear function, as in studies of deep linear networks"
    torch.manual_seed(63)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    fell(fit(arm, model, adam(model, 1e-3), batches(150, 32, *digits())))


@is_healthy
def linear_layers_before_normalization(arm):
    "A factorized first layer, and an activation later"
    torch.manual_seed(64)
    model = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    fell(fit(arm, model, adam(model), batches(150, 32, *digits())))


class TwoHeads(Letters):
    "An LSTM with one head for the next letter, and one head for the letter after the next one"
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(32, len(letters))

    def forward(self, x):
        h = self.lstm(self.embed(x))[0]
        return self.head(h),self.second(h)


@is_healthy
def two_letters_ahead_by_a_second_head(arm):
    "Multi-token prediction: the labels of the second head are two letters ahead on purpose"
    torch.manual_seed(61)
    model = TwoHeads()
    fell(fit(arm, model, adam(model, 1e-2), passages(150, 16), lambda out, y: of_tokens(out[0], y)+.3*of_tokens(out[1][:, :-1], y[:, 1:])))


class OddEven(Letters):
    "An LSTM that gets every letter twice, so the next letter of a passage is two positions ahead"
    def forward(self, x): return super().forward(x.repeat_interleave(2, 1))[:, 1::2]


@is_healthy
def letters_given_twice(arm):
    torch.manual_seed(62)
    model = OddEven()
    fell(fit(arm, model, adam(model, 1e-2), passages(120, 16), of_tokens))


@is_healthy
def sequences_of_period_two(arm):
    "Each sequence alternates between two letters, so the letter two positions ahead is the letter itself, and the next label is the letter before"
    torch.manual_seed(63)
    model = Letters()
    def alternating():
        for x,_ in passages(100, 16): yield (both := x[:, :2].repeat(1, 13))[:, :-2],both[:, 1:-1]
    fell(fit(arm, model, adam(model, 1e-2), alternating(), of_tokens))


# Healthy trainings: a BatchNorm that is called several times in one pass

@is_healthy
def two_views_of_a_siamese_network_with_batch_norm(arm):
    "Both images of a pair go through the same network: its BatchNorm is called twice, with inputs of the same distribution"
    torch.manual_seed(20)
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 16))
        def forward(self, a, b): return (self.net(a)-self.net(b)).square().mean(1)
    x,y = digits()
    model = Siamese()
    opt = adam(model)
    te = arm(model, optimizer=opt)
    for i in range(80):
        at,to = torch.randint(len(x), (2, 48))
        loss = F.binary_cross_entropy_with_logits(1-model(x[at], x[to]), (y[at]==y[to]).float())
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i%10==9:
            model.eval()
            with torch.no_grad(): model(x[:200], x[200:400])
            model.train()


@is_healthy
def one_batch_norm_without_running_statistics_for_two_places(arm):
    "Without running statistics, a BatchNorm normalizes evaluations by the batch, too"
    torch.manual_seed(21)
    with_evaluations(arm, TwoPlaces(*[nn.BatchNorm2d(12, track_running_stats=False)]*2))


@is_healthy
def two_batch_norms_for_two_places(arm):
    torch.manual_seed(22)
    with_evaluations(arm, TwoPlaces(nn.BatchNorm2d(12), nn.BatchNorm2d(12)))
