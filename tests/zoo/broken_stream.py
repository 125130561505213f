"Broken trainings of residual networks with a fault in the residual stream, the sum of all block outputs"
import torch
from torch import nn

from . import is_broken
from .parts import fit, letters, of_tokens, passages


class Branch(nn.Module):
    """A residual block: an MLP of the current letter and of the mean of all letters so far, added to its input

    scale: factor of what is added
    first: number that is also added to a channel of the first token"""
    def __init__(self, d, scale=1., norm=True):
        super().__init__()
        self.first = 0.
        self.norm,self.scale = nn.LayerNorm(d) if norm else nn.Identity(),scale
        self.past,self.up,self.down = nn.Linear(d, d),nn.Linear(d, 2*d),nn.Linear(2*d, d)

    def forward(self, x):
        y = self.norm(x)
        y = y+self.past(y.cumsum(1)/torch.arange(1, y.shape[1]+1, dtype=y.dtype)[:, None])
        y = self.scale*self.down(self.up(y).relu())
        if self.first: y[:, 0, 5] += self.first
        return x+y


class Residual(nn.Module):
    "Blocks with a residual stream that predict the next letter. `scales`: factor of each block; `last`: True to normalize the last output"
    def __init__(self, scales, d=32, last=True, **kwargs):
        super().__init__()
        self.embed,self.blocks = nn.Embedding(len(letters), d),nn.ModuleList(Branch(d, s, **kwargs) for s in scales)
        self.norm,self.head = nn.LayerNorm(d) if last else nn.Identity(),nn.Linear(d, len(letters))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks: x = block(x)
        return self.head(self.norm(x)).float()


def train(arm, model, lr=3e-3, n=60, **kwargs):
    return fit(arm, model, torch.optim.AdamW(model.parameters(), lr, **kwargs), passages(n, 16), of_tokens, stream=True)


@is_broken('massive_activations', 'overflow', paths='blocks.*', steps=(0, 60))
def a_model_with_massive_activations_in_float16(arm):
    "A model with one very large activation, which bfloat16 can hold, is trained in float16"
    torch.manual_seed(521)
    model = Residual([.3]*4)
    model.blocks[1].first = 2e4
    train(arm, model.half(), 1e-3, n=12, eps=1e-4)


@is_broken('stream_grows', 'exploding_gradient', 'poor_scale', 'update_too_large', 'loss_rises', paths=('blocks*', ''), steps=(0, 60))
def many_blocks_without_normalization(arm):
    torch.manual_seed(522)
    train(arm, Residual([5.]*16, norm=False, last=False), 2e-4)


@is_broken('idle_blocks', paths='blocks.2')
def blocks_with_a_wrong_factor(arm):
    "Two blocks multiply their output by 1e-5, a constant that is not trained, so these blocks do nothing"
    torch.manual_seed(523)
    train(arm, Residual([.3, .3, 1e-5, 1e-5]))
