"A transformer with several attention heads, shared by trainings that record attention"
import torch
import torch.nn.functional as F
from torch import nn

from .parts import letters


class Heads(nn.Module):
    "Attention with two heads. `mask(n)`: boolean (n, n), True for a visible key; `scale`: function that returns the factor of the logits"
    def __init__(self, d, mask, scale=None, heads=2):
        super().__init__()
        self.num_heads,self.mask,self.scale = heads,mask,scale or (lambda: (d//heads)**-.5)
        self.q,self.k,self.v,self.out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        q,k,v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x.shape[1]), scale=self.scale())
        return self.out(y.transpose(1, 2).flatten(2))


def causal(n): return torch.ones(n, n, dtype=torch.bool).tril()


def everything(n): return torch.ones(n, n, dtype=torch.bool)


class Layer(nn.Module):
    def __init__(self, d, **kwargs):
        super().__init__()
        self.norm1,self.attn,self.norm2 = nn.LayerNorm(d),Heads(d, **kwargs),nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2*d), nn.GELU(), nn.Linear(2*d, d))

    def forward(self, x):
        x = x+self.attn(self.norm1(x))
        return x+self.ff(self.norm2(x))


class Reader(nn.Module):
    "A transformer that returns scores of all letters at each position. `masks`: one mask function for each layer"
    def __init__(self, masks, d=32, length=24, **kwargs):
        super().__init__()
        self.embed,self.place = nn.Embedding(len(letters), d),nn.Embedding(length, d)
        self.layers = nn.ModuleList(Layer(d, mask=m, **kwargs) for m in masks)
        self.norm,self.head = nn.LayerNorm(d),nn.Linear(d, len(letters))

    def forward(self, x):
        x = self.embed(x)+self.place(torch.arange(x.shape[1]))
        for layer in self.layers: x = layer(x)
        return self.head(self.norm(x))
