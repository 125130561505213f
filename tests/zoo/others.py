"Small networks of many families and their data, for the second set of trainings whose authors did not know the rules"
import math
import torch
from torch import nn
from torch.nn import functional as F
from .more import fixed


def mlp(i, *widths, out, act=nn.ReLU):
    sizes = [i, *widths]
    return nn.Sequential(*(layer for a,b in zip(sizes, widths, strict=False) for layer in (nn.Linear(a, b), act())), nn.Linear(sizes[-1], out))

def copies(model): return {k: p.detach().clone() for k,p in model.named_parameters()}

def moved(model, before):
    "Return the change of each parameter, as a fraction of its size."
    return {k: ((p.detach()-before[k]).norm()/before[k].norm().clamp(min=1e-12)).item() for k,p in model.named_parameters()}

def grads(model): return {k: p.grad.abs().mean().item() for k,p in model.named_parameters() if p.grad is not None}

class Named:
    "Wrapper of an ember that logs the loss under another name, or not at all"
    def __init__(self, te, name): self.te,self.name = te,name
    def log(self, loss): self.name and self.te.log(**{self.name: loss})
    def close(self): self.te.close()

def under(name, arm): return lambda model, optimizer=None, **about: Named(arm(model, optimizer=optimizer, **about), name)


class Mix(nn.Module):
    "A block that mixes the patches of an image, and then the channels"
    def __init__(self, patches=9, width=16, act=nn.GELU):
        super().__init__()
        self.norm1,self.across = nn.LayerNorm(width),mlp(patches, 16, out=patches, act=act)
        self.norm2,self.along = nn.LayerNorm(width),mlp(width, 32, out=width, act=act)

    def forward(self, x):
        x = x + self.across(self.norm1(x).mT).mT
        return x + self.along(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, layers=2, classes=4, **about):
        super().__init__()
        self.patch,self.mix = nn.Conv2d(1, 16, 4, stride=4),nn.Sequential(*(Mix(**about) for _ in range(layers)))
        self.norm,self.head = nn.LayerNorm(16),nn.Linear(16, classes)

    def forward(self, x): return self.head(self.norm(self.mix(self.patch(x).flatten(2).mT)).mean(1))


class Gated(nn.Module):
    "A causal convolution with a gate"
    def __init__(self, c, dilation):
        super().__init__()
        self.value,self.gate,self.out = nn.Conv1d(c, c, 2, dilation=dilation),nn.Conv1d(c, c, 2, dilation=dilation),nn.Conv1d(c, c, 1)
        self.tanh,self.sigmoid,self.pad = nn.Tanh(),nn.Sigmoid(),dilation

    def forward(self, x):
        h = F.pad(x, (self.pad, 0))
        return x + self.out(self.tanh(self.value(h))*self.sigmoid(self.gate(h)))


class WaveNet(nn.Module):
    def __init__(self, codes=16, c=12, layers=4):
        super().__init__()
        self.inward,self.layers = nn.Embedding(codes, c),nn.Sequential(*(Gated(c, 2**i) for i in range(layers)))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(c, codes, 1))

    def forward(self, ids): return self.head(self.layers(self.inward(ids).mT))

def waves(n, length=32, codes=16):
    "Return quantized sines of random length and phase."
    t = torch.arange(length+1)/length*2*math.pi
    y = torch.sin(t*(1+2*torch.rand(n, 1)) + 6*torch.rand(n, 1)) + .05*torch.randn(n, length+1)
    return ((y+1.2)/2.4*codes).long().clamp(0, codes-1)

def next_code(model, ids): return F.cross_entropy(model(ids[:, :-1]), ids[:, 1:])


class Dense(nn.Module):
    "A network in which each convolution gets the outputs of all earlier ones"
    def __init__(self, grow=4, layers=3, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(1, grow, 3, stride=2, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(grow*(i+1)) for i in range(layers))
        self.convs = nn.ModuleList(nn.Conv2d(grow*(i+1), grow, 3, padding=1) for i in range(layers))
        self.acts = nn.ModuleList(nn.ReLU() for _ in range(layers))
        self.fc = nn.Linear(grow*(layers+1)*9, classes)

    def forward(self, x):
        x = self.stem(x)
        for norm,conv,act in zip(self.norms, self.convs, self.acts, strict=True): x = torch.cat([x, act(conv(norm(x)))], 1)
        return self.fc(F.avg_pool2d(x, 2).flatten(1))


class Pointer(nn.Module):
    "A pointer network, whose output is the position of the largest number in a list"
    def __init__(self, width=24, heat=1.):
        super().__init__()
        self.read,self.query,self.key,self.softmax = nn.Linear(1, width),nn.Linear(width, width),nn.Linear(width, width),nn.Softmax(-1)
        self.heat = heat

    def forward(self, x):
        h = torch.tanh(self.read(x[..., None]))
        q = self.query(h.max(1).values)
        return self.softmax((self.key(h)@q[..., None]).squeeze(-1)/q.shape[-1]**.5/self.heat)

def lists(n, length=6):
    x = torch.randn(n, length)
    return x, x.argmax(1)


class Translator(nn.Module):
    "A recurrent encoder, and a recurrent decoder with attention"
    def __init__(self, words=12, width=32, detach=False):
        super().__init__()
        self.source,self.target = nn.Embedding(words, width),nn.Embedding(words+1, width)
        self.reader,self.writer = nn.GRU(width, width, batch_first=True),nn.GRU(width, width, batch_first=True)
        self.look,self.softmax,self.head = nn.Linear(width, width, bias=False),nn.Softmax(-1),nn.Linear(2*width, words)
        self.detach = detach

    def forward(self, ids, said):
        h,last = self.reader(self.source(ids))
        if self.detach: h,last = h.detach(),last.detach()
        s,_ = self.writer(self.target(said), last)
        a = self.softmax(self.look(s)@h.mT)
        return self.head(torch.cat([s, a@h], -1))

def backwards(n, length=6, words=12):
    "Return words, the input of the decoder, and the target: the words in reverse."
    ids = torch.randint(words, (n, length))
    out = ids.flip(1)
    return ids, F.pad(out[:, :-1], (1, 0), value=words), out


class ConvLSTM(nn.Module):
    def __init__(self, c=6):
        super().__init__()
        self.gates,self.out = nn.Conv2d(1+c, 4*c, 3, padding=1),nn.Conv2d(c, 1, 1)
        self.c = c

    def forward(self, x):
        h = s = x.new_zeros(len(x), self.c, *x.shape[-2:])
        for t in range(x.shape[1]):
            i,f,o,g = self.gates(torch.cat([x[:, t, None], h], 1)).chunk(4, 1)
            s = torch.sigmoid(f+1)*s + torch.sigmoid(i)*torch.tanh(g)
            h = torch.sigmoid(o)*torch.tanh(s)
        return self.out(h)

def films(n, size=8, length=4):
    "Return short films of a moving spot, and the next image of each film."
    at,go = torch.randint(size, (n, 1)),torch.randint(1, 3, (n, 1))
    row = torch.randint(size, (n,))
    x = torch.zeros(n, length+1, size, size)
    for t in range(length+1): x[torch.arange(n), t, row, (at+go*t).squeeze(1)%size] = 1.
    return x[:, :-1], x[:, -1:]


class Codebook(nn.Module):
    "Replaces vectors by the nearest code of a codebook, with a straight-through gradient"
    def __init__(self, n=16, dim=4):
        super().__init__()
        self.codes = nn.Embedding(n, dim)

    def forward(self, z):
        near = torch.cdist(z, self.codes.weight).argmin(1)
        q = self.codes(near)
        return z + (q-z).detach(), F.mse_loss(q, z.detach()) + .25*F.mse_loss(z, q.detach()), near


class VQ(nn.Module):
    def __init__(self, n=16):
        super().__init__()
        self.enc,self.book,self.dec = mlp(16, 32, out=4),Codebook(n),mlp(4, 32, out=16)

    def forward(self, x):
        q,commit,near = self.book(self.enc(x))
        return self.dec(q), commit, near


class EdgeAttention(nn.Module):
    "Attention of the nodes of a graph to their neighbors"
    def __init__(self, i, o):
        super().__init__()
        self.lin,self.left,self.right,self.softmax = nn.Linear(i, o, bias=False),nn.Linear(o, 1, bias=False),nn.Linear(o, 1, bias=False),nn.Softmax(-1)

    def forward(self, x, near):
        h = self.lin(x)
        a = F.leaky_relu(self.left(h)+self.right(h).mT, .2).masked_fill(~near, float('-inf'))
        return self.softmax(a)@h


class GAT(nn.Module):
    def __init__(self, i=12, classes=3):
        super().__init__()
        self.conv1,self.conv2,self.drop = EdgeAttention(i, 16),EdgeAttention(16, classes),nn.Dropout(.3)

    def forward(self, x, near): return self.conv2(self.drop(F.elu(self.conv1(x, near))), near)

def circles_of_friends(n=90):
    "Return a random graph with three kinds of nodes: features, adjacency matrix, and kinds of the nodes."
    y = torch.arange(n)%3
    near = torch.rand(n, n, generator=torch.Generator().manual_seed(1)) < torch.where(y[:, None]==y, .2, .03)
    return fixed(n, 12, seed=2) + .7*fixed(3, 12)[y], near | near.T | torch.eye(n, dtype=torch.bool), y


class Experts(nn.Module):
    "A mixture of experts in which all experts are called and weighted"
    def __init__(self, n=4, i=16, o=4):
        super().__init__()
        self.gate,self.softmax,self.experts = nn.Linear(i, n),nn.Softmax(-1),nn.ModuleList(mlp(i, 16, out=o) for _ in range(n))

    def forward(self, x):
        p = self.softmax(self.gate(x))
        return (torch.stack([e(x) for e in self.experts], 1)*p[..., None]).sum(1)


class Table(nn.Module):
    "A network for tables with numeric columns and two categorical columns"
    def __init__(self, **about):
        super().__init__()
        self.town,self.trade,self.net = nn.Embedding(30, 4, **about),nn.Embedding(8, 4, **about),mlp(6+8, 32, out=1)

    def forward(self, x, town, trade): return self.net(torch.cat([x, self.town(town), self.trade(trade)], 1))

def households(n):
    x,town,trade = torch.randn(n, 6),torch.randint(30, (n,)),torch.randint(8, (n,))
    y = fixed(30)[town] + fixed(8, seed=8)[trade]*x[:, 0] + .5*x[:, 1]
    return (x, town, trade), y[:, None]


def llama(**about):
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(**{'vocab_size': 24, 'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2, 'num_attention_heads': 2,
        'num_key_value_heads': 1, 'max_position_embeddings': 16, 'pad_token_id': None, 'bos_token_id': 0, 'eos_token_id': 0, **about}))

def vit(**about):
    from transformers import ViTConfig, ViTModel
    return ViTModel(ViTConfig(**{'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'intermediate_size': 64, 'image_size': 12,
        'patch_size': 4, 'num_channels': 1, 'hidden_dropout_prob': 0., 'attention_probs_dropout_prob': 0., **about}))
