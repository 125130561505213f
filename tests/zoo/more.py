"Random data, training loop and networks, for the trainings whose authors did not know the rules"
import torch
from torch import nn
from torch.nn import functional as F


class Silent:
    "Replacement for an ember, which records nothing"
    def __init__(self, model, optimizer=None, **about): pass
    def log(self, **numbers): pass
    def close(self): pass


def fit(arm, model, opt, loss_of, n, clip=None, schedule=None, after=None, **about):
    "Run `n` steps of the usual training loop. Return the losses."
    te,losses = arm(model, optimizer=opt, **about),[]
    for i in range(n):
        loss = loss_of(i)
        te.log(loss=loss)
        opt.zero_grad()
        loss.backward()
        if clip: nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        if schedule: schedule.step()
        losses.append(loss.item())
        if after: after(i, te)
    te.close()
    return losses

def ends(losses, n=10):
    "Return the mean of the first losses and the mean of the last losses."
    return sum(losses[:n])/n, sum(losses[-n:])/n

def fell(losses, to, n=10):
    "Return True if the loss has fallen to a fraction of its start."
    first,last = ends(losses, n)
    return last < to*first

def fixed(*shape, seed=7):
    "Return random numbers that are the same in each call, used as the function to learn."
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

def blobs(n, classes=4, dim=16, far=1.5):
    "Return points around the center of each class, and the numbers of their classes."
    y = torch.randint(classes, (n,))
    return far*fixed(classes, dim)[y] + torch.randn(n, dim), y

def pictures(n, classes=4, size=12, channels=1):
    "Return images with one noisy pattern per class, and the numbers of their classes."
    y = torch.randint(classes, (n,))
    return fixed(classes, channels, size, size)[y] + torch.randn(n, channels, size, size), y

def curve(n, dim=8):
    "Return inputs, and the values of a smooth function of them."
    x = torch.randn(n, dim)
    return x, torch.sin(x[:, :1]) + .5*x[:, 1:2]*x[:, 2:3]

def sentences(n, length=12, words=24):
    "Return sentences in which each word has two possible next words, the first of which is more frequent."
    follow = torch.stack([torch.randperm(words, generator=torch.Generator().manual_seed(s)) for s in (1, 2)])
    out = [torch.randint(words, (n,))]
    for _ in range(length-1): out.append(follow[(torch.rand(n)<.15).long(), out[-1]])
    return torch.stack(out, 1)

def next_word(logits, ids): return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

def seen(module, x):
    "Return the output of a module in evaluation mode, without gradients. The mode is restored afterwards."
    mode = module.training
    module.eval()
    with torch.no_grad(): y = module(x)
    module.train(mode)
    return y


class Block(nn.Module):
    "A residual block of two convolutions"
    def __init__(self, c, zero=False):
        super().__init__()
        self.conv1,self.bn1 = nn.Conv2d(c, c, 3, padding=1, bias=False),nn.BatchNorm2d(c)
        self.conv2,self.bn2 = nn.Conv2d(c, c, 3, padding=1, bias=False),nn.BatchNorm2d(c)
        if zero: nn.init.zeros_(self.bn2.weight)

    def forward(self, x): return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self, c=8, blocks=2, classes=4, zero=False):
        super().__init__()
        self.stem,self.bn = nn.Conv2d(1, c, 3, stride=2, padding=1, bias=False),nn.BatchNorm2d(c)
        self.blocks = nn.Sequential(*(Block(c, zero) for _ in range(blocks)))
        self.fc = nn.Linear(c*36, classes)

    def forward(self, x): return self.fc(self.blocks(F.relu(self.bn(self.stem(x)))).flatten(1))


class Words(nn.Module):
    "A recurrent network that predicts the next word"
    def __init__(self, kind=nn.LSTM, words=24, width=32, **about):
        super().__init__()
        self.embed,self.rnn,self.head = nn.Embedding(words, width),kind(width, width, batch_first=True, **about),nn.Linear(width, words)

    def forward(self, ids): return self.head(self.rnn(self.embed(ids))[0])


def gpt(**about):
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(**{'vocab_size': 24, 'n_positions': 16, 'n_embd': 32, 'n_layer': 2, 'n_head': 2,
        'bos_token_id': 0, 'eos_token_id': 0, **about}))

def bert(**about):
    from transformers import BertConfig, BertForSequenceClassification
    return BertForSequenceClassification(BertConfig(**{'vocab_size': 24, 'max_position_embeddings': 16, 'hidden_size': 32, 'num_hidden_layers': 2,
        'num_attention_heads': 2, 'intermediate_size': 64, 'num_labels': 2, **about}))

def has_word(n, length=10, words=24):
    "Return sentences, and whether each contains one of the first three words."
    ids = torch.randint(3, words, (n, length))
    y = torch.randint(2, (n,))
    ids[torch.arange(n), torch.randint(length, (n,))] = torch.where(y==1, torch.randint(3, (n,)), ids[:, 0])
    return ids, y
