"Broken trainings: the last layer, the loss and the targets do not fit each other"
import torch
import torch.nn.functional as F
from torch import nn

from . import is_broken
from .data import digits
from .parts import Convolutions, Letters, batches, fit, letters, mlp, of_tokens, passages, squared, table


def classifier(*after, sizes=(64, 32, 10)): return nn.Sequential(*mlp(*sizes), *after)


def adam(model, lr=3e-3): return torch.optim.Adam(model.parameters(), lr=lr)


# ---- Broken trainings: the loss function expects another kind of output

@is_broken('loss_input', paths='3')
def softmax_and_cross_entropy(arm):
    "The model ends with a softmax, and the loss is cross_entropy, which expects logits"
    torch.manual_seed(0)
    model = classifier(nn.Softmax(1))
    fit(arm, model, adam(model), batches(60, 32, *digits()))


@is_broken('loss_input', paths=('4', '3'))
def relu_before_cross_entropy(arm):
    "A ReLU follows each layer, also the last layer, whose outputs should be logits"
    torch.manual_seed(1)
    model = classifier(nn.ReLU())
    fit(arm, model, adam(model), batches(60, 32, *digits()))


@is_broken('loss_input', paths='3')
def sigmoid_and_logits(arm):
    "Two classes: the model ends with a sigmoid, and the loss applies another sigmoid"
    torch.manual_seed(2)
    x,y = table('breast_cancer')
    model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
    fit(arm, model, adam(model), batches(60, 32, x, y.float()[:, None]), F.binary_cross_entropy_with_logits)


@is_broken('loss_input', paths='3')
def probabilities_for_nll(arm):
    "nll_loss gets the output of a softmax, because the logarithm is missing"
    torch.manual_seed(3)
    model = classifier(nn.Softmax(1))
    fit(arm, model, adam(model), batches(60, 32, *digits()), F.nll_loss)


@is_broken('loss_input', paths='2')
def logits_for_nll(arm):
    "nll_loss gets logits, because the log_softmax is missing"
    torch.manual_seed(4)
    model = classifier()
    fit(arm, model, adam(model), batches(60, 32, *digits()), F.nll_loss)


@is_broken('loss_input', paths='3')
def probabilities_for_kl_div(arm):
    "A student network learns from soft labels, but passes probabilities to kl_div, which expects logarithms"
    torch.manual_seed(5)
    x,y = digits()
    model,soft = classifier(nn.Softmax(1)),F.one_hot(y, 10)*.9+.01
    fit(arm, model, adam(model), batches(60, 32, x, soft), lambda p, t: F.kl_div(p, t, reduction='batchmean'))


@is_broken('loss_input', 'not_trained', paths='3')
def softmax_of_one(arm):
    "Two classes, but a model with one output and a softmax"
    torch.manual_seed(6)
    x,y = table('breast_cancer')
    model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1), nn.Softmax(1))
    fit(arm, model, adam(model), batches(60, 32, x, y.float()[:, None]), F.binary_cross_entropy)


@is_broken('loss_input', paths='3')
def softmax_over_batch(arm):
    "The softmax is taken over dimension 0, which is the batch"
    torch.manual_seed(7)
    model = classifier(nn.LogSoftmax(0))
    fit(arm, model, adam(model), batches(60, 32, *digits()), F.nll_loss)


@is_broken('loss_input', paths='2')
def logits_in_own_cross_entropy(arm):
    "A binary cross-entropy written by hand gets logits, and clips them to the range of probabilities"
    torch.manual_seed(8)
    x,y = table('breast_cancer')
    model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1))
    def loss(out, y):
        p = out.clamp(1e-6, 1-1e-6)
        return -(y*p.log()+(1-y)*(1-p).log()).mean()
    fit(arm, model, adam(model), batches(60, 32, x, y.float()[:, None]), loss)


@is_broken('loss_input', paths='3')
def sigmoid_of_classes(arm):
    "Ten sigmoids before nll_loss of their logarithms, which expects the probabilities of one distribution"
    torch.manual_seed(9)
    model = classifier(nn.Sigmoid())
    fit(arm, model, adam(model), batches(60, 32, *digits()), lambda p, y: F.nll_loss(p.clamp(min=1e-6).log(), y))


# ---- Broken trainings: the shapes of outputs and targets differ

@is_broken('broadcast', paths='2')
def column_against_row(arm):
    "Predictions have the shape (N, 1) and targets the shape (N,), so broadcasting compares all pairs"
    torch.manual_seed(10)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 32, 1)
    fit(arm, model, adam(model), batches(80, 32, x, y), lambda out, y: ((out-y)**2).mean())


@is_broken('broadcast', paths='2')
def row_against_column(arm):
    "Predictions are squeezed to shape (N,), and targets are not, so broadcasting compares all pairs"
    torch.manual_seed(11)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 32, 1)
    fit(arm, model, adam(model), batches(80, 32, x, y[:, None]), lambda out, y: F.smooth_l1_loss(out.squeeze(1), y))


# ---- Broken trainings: the output cannot reach the targets

@is_broken('target_range', paths='3')
def sigmoid_for_standardized_targets(arm):
    "A sigmoid follows the last layer of a regression with standardized targets"
    torch.manual_seed(12)
    x,y = table('diabetes', regression=True)
    model = nn.Sequential(*mlp(10, 32, 1), nn.Sigmoid())
    fit(arm, model, adam(model), batches(80, 32, x, y), squared)


@is_broken('target_range', paths='3')
def tanh_for_large_targets(arm):
    "The targets are numbers from 25 to 346, and the last activation is a tanh"
    torch.manual_seed(13)
    x,_ = table('diabetes')
    y = table('diabetes', raw=True)[1].float()
    model = nn.Sequential(*mlp(10, 32, 1), nn.Tanh())
    fit(arm, model, adam(model), batches(80, 32, x, y), lambda out, y: (out[:, 0]-y).abs().mean())


@is_broken('target_range', paths='3')
def relu_for_both_signs(arm):
    "A ReLU follows the last layer of a regression with standardized targets, half of which are negative"
    torch.manual_seed(14)
    x,y = table('diabetes', regression=True)
    model = nn.Sequential(*mlp(10, 32, 1), nn.ReLU())
    fit(arm, model, adam(model, 1e-3), batches(80, 32, x, y), squared)


@is_broken('target_range', paths=('', '2'))
def labels_of_minus_one(arm):
    "The labels are -1 and 1, but the loss is a binary cross-entropy, which expects 0 and 1"
    torch.manual_seed(15)
    x,y = table('breast_cancer')
    model = mlp(30, 16, 1)
    fit(arm, model, adam(model), batches(60, 32, x, 2*y.float()[:, None]-1), F.binary_cross_entropy_with_logits)


# ---- Broken trainings: the labels or their order are wrong

@is_broken('one_class', paths='classifier')
def labels_scaled_to_zero(arm):
    "Labels are divided by 255 and rounded like the pixels, so that all labels become 0"
    torch.manual_seed(16)
    x,y = digits(images=True)
    model = Convolutions(norm=False)
    fit(arm, model, adam(model), batches(60, 32, x, (y/255).long()))


@is_broken('one_class', paths='2')
def sorted_by_class(arm):
    "The data are sorted by class, and the data loader does not shuffle"
    torch.manual_seed(17)
    x,y = digits()
    at = y.argsort()
    def ordered():
        for _ in range(2):
            for i in at.split(16): yield x[i],y[i]
    model = classifier()
    fit(arm, model, adam(model, 1e-3), ordered())


@is_broken('one_class', paths='2')
def classes_one_after_the_other(arm):
    "Four files with one class each are read one after the other, in so few batches that two of seven have two classes"
    torch.manual_seed(50)
    x,y = digits(classes=range(4))
    at = torch.cat([(y==k).nonzero()[:, 0][:100] for k in range(4)])
    def files():
        for _ in range(12):
            for i in at.split(60): yield x[i],y[i]
    model = classifier(sizes=(64, 32, 4))
    fit(arm, model, torch.optim.SGD(model.parameters(), lr=.5, momentum=.9), files())


# ---- Broken trainings: sequences

class BothWays(nn.Module):
    "A transformer for letters, whose attention sees all letters"
    def __init__(self, d=32):
        super().__init__()
        self.embed,self.place = nn.Embedding(len(letters), d),nn.Embedding(24, d)
        self.norm,self.attn = nn.LayerNorm(d),nn.MultiheadAttention(d, 4, batch_first=True)
        self.feed,self.head = nn.Sequential(nn.LayerNorm(d), *mlp(d, 64, d)),nn.Linear(d, len(letters))

    def forward(self, x, mask=None):
        x = self.embed(x)+self.place(torch.arange(x.shape[1]))
        n = self.norm(x)
        x = x+self.attn(n, n, n, attn_mask=mask, need_weights=False)[0]
        return self.head(x+self.feed(x))


@is_broken('labels_not_shifted', paths='head')
def letters_as_their_own_labels(arm):
    "The labels of a language model are its input letters, which were not shifted by one position"
    torch.manual_seed(51)
    model = Letters()
    fit(arm, model, adam(model, 1e-2), ((x, x) for x,_ in passages(150, 16)), of_tokens)


def letters_with_loss(arm, model, n=150):
    "Train a model that gets letters and labels, and returns its loss."
    opt = adam(model, 1e-2)
    te = arm(model, optimizer=opt)
    for x,y in passages(n, 16):
        loss = model(x, labels=y)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        opt.step()


class LettersWithLoss(Letters):
    "An LSTM that shifts its labels by one letter, as the causal language models of Hugging Face, and returns its loss"
    def forward(self, x, labels):
        return F.cross_entropy(super().forward(x).flatten(0, 1), F.pad(labels, (0, 1), value=-100)[:, 1:].flatten())


@is_broken('labels_shifted_twice', paths='head')
def letters_shifted_by_data_and_model(arm):
    "The labels are the next letters, and the model shifts its labels once more"
    torch.manual_seed(59)
    letters_with_loss(arm, LettersWithLoss())


@is_broken('labels_shifted_twice', paths='head')
def letters_shifted_by_data_and_loss(arm):
    "The labels are the next letters, and the loss compares each output with the label of the next position"
    torch.manual_seed(60)
    model = Letters()
    fit(arm, model, adam(model, 1e-2), passages(150, 16), lambda out, y: of_tokens(out[:, :-1], y[:, 1:]))


@is_broken('no_causal_mask', paths='attn')
def attention_without_mask(arm):
    "The labels are the next letters, but nn.MultiheadAttention gets no mask"
    torch.manual_seed(52)
    model = BothWays()
    fit(arm, model, adam(model, 1e-2), passages(120, 16), of_tokens)


class Readings(nn.Module):
    "A GRU over the lines of an image, and a classifier of its last output"
    def __init__(self, **kwargs):
        super().__init__()
        self.gru,self.head = nn.GRU(8, 32, **kwargs),nn.Linear(32, 10)

    def forward(self, x): return self.head(self.gru(x)[0][:, -1])


@is_broken('batch_as_sequence', paths='gru')
def lines_without_batch_first(arm):
    "The images have the shape (samples, lines, pixels), but the GRU was created without batch_first=True"
    torch.manual_seed(53)
    x,y = digits()
    model = Readings()
    fit(arm, model, adam(model, 1e-2), batches(100, 32, x.view(-1, 8, 8), y))


@is_broken('batch_as_sequence', paths='lstm')
def language_model_without_batch_first(arm):
    "A language model whose LSTM was created without batch_first=True, so that each letter sees the same position of other samples"
    torch.manual_seed(54)
    model = Letters()
    model.lstm = nn.LSTM(32, 32)
    fit(arm, model, adam(model, 1e-2), passages(100, 16), of_tokens)


@is_broken('raw_targets')
def incomes_in_cents(arm):
    "The targets of a regression have a mean of 50,000 and are not normalized. The loss is an absolute error with a smooth minimum"
    torch.manual_seed(18)
    x,y = table('diabetes', regression=True)
    model = mlp(10, 64, 64, 1)
    fit(arm, model, adam(model, 1e-3), batches(120, 32, x, 5e4+2e4*y), lambda p, t: F.smooth_l1_loss(p.squeeze(-1), t))


@is_broken('dropout_too_high', paths=('2', '5'))
def dropout_keeps_four_percent(arm):
    "The argument of Dropout is 0.96, because it was taken for the share to keep"
    torch.manual_seed(19)
    model = nn.Sequential(*(m for _ in range(2) for m in (nn.Linear(64, 64), nn.ReLU(), nn.Dropout(.96))), nn.Linear(64, 10))
    fit(arm, model, adam(model, 3e-3), batches(200, 32, *digits()))
