"A model with mixture-of-experts layers, shared by trainings that record routers"
import torch
import torch.nn.functional as F
from torch import nn

from .parts import letters


class Mixture(nn.Module):
    "A mixture of experts: each token uses `k` of them. `balance`: load-balancing loss of Switch transformers, 1 at equal load"
    def __init__(self, d, experts=4, k=2, calls_empty=True): # calls_empty: True to call also experts without tokens
        super().__init__()
        self.k,self.gate,self.calls_empty = k,nn.Linear(d, experts),calls_empty
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 2*d), nn.GELU(), nn.Linear(2*d, d)) for _ in range(experts))
        # Added to the router scores only to select experts, not to weight their outputs
        self.register_buffer('bias', torch.zeros(experts))

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        chosen = (scores+self.bias).topk(self.k).indices
        self.load = F.one_hot(chosen, len(self.experts)).sum(-2).float().mean((0, 1))
        self.balance = len(self.experts)/self.k*(self.load*scores.mean((0, 1))).sum()
        share = scores.gather(-1, chosen)
        share,out = share/share.sum(-1, keepdim=True),torch.zeros_like(x)
        for i,expert in enumerate(self.experts):
            *at,place = torch.where(chosen==i)
            if not len(place) and not self.calls_empty: continue
            out = out.index_put(tuple(at), share[*at, place, None]*expert(x[tuple(at)]), accumulate=True)
        return out


class Mixtures(nn.Module):
    "A GRU with mixture-of-experts layers that predicts the next letter"
    def __init__(self, d=32, layers=2, **kwargs):
        super().__init__()
        self.embed,self.past = nn.Embedding(len(letters), d),nn.GRU(d, d, batch_first=True)
        self.norms,self.layers = (nn.ModuleList(m() for _ in range(layers)) for m in (lambda: nn.LayerNorm(d), lambda: Mixture(d, **kwargs)))
        self.head = nn.Linear(d, len(letters))

    def forward(self, x):
        x = self.past(self.embed(x))[0]
        for norm,layer in zip(self.norms, self.layers, strict=True): x = x+layer(norm(x))
        return self.head(x)
