"Broken trainings: mixtures of experts with a fault in their routers"
import torch

from . import is_broken
from .experts import Mixtures
from .parts import fit, of_tokens, passages


def train(arm, model, balance=0., n=60, each=lambda: None):
    "Train with the task loss plus `balance` times the load-balancing losses. Call `each` in each step."
    def loss_of(out, y):
        each()
        return of_tokens(out, y)+balance*sum(layer.balance for layer in model.layers)
    return fit(arm, model, torch.optim.AdamW(model.parameters(), 3e-3), passages(n, 16), loss_of, routers=True)


@is_broken('router_collapse', paths='layers.*', steps=(0, 30))
def the_balance_has_the_wrong_sign(arm):
    "The load-balancing loss is subtracted instead of added, so the routers send all tokens to two experts"
    torch.manual_seed(511)
    train(arm, Mixtures(), -.3)


@is_broken('router_collapse', paths='layers.1')
def one_expert_begins_with_a_large_bias(arm):
    "Each token uses one expert, one expert starts with a large router bias, and no loss balances the load"
    torch.manual_seed(512)
    model = Mixtures(k=1)
    with torch.no_grad(): model.layers[1].gate.bias[2] = 6.
    train(arm, model)


@is_broken('router_collapse', 'unused_expert', paths='layers.*', steps=(0, 60))
def a_bias_that_grows_with_the_load(arm):
    "The router bias of an overloaded expert rises, although it must fall to balance the load (DeepSeek-V3)"
    torch.manual_seed(513)
    model = Mixtures()
    def balance():
        for layer in model.layers: layer.bias += .05*(layer.load-layer.load.mean()).sign()
    train(arm, model, each=balance)


@is_broken('unused_expert', paths='layers.0')
def an_expert_that_is_masked(arm):
    "The router bias of one expert is -inf, as if this expert were padding, so no token uses it"
    torch.manual_seed(514)
    model = Mixtures(experts=6)
    model.layers[0].bias[5] = -torch.inf
    train(arm, model, .1)


@is_broken('router_collapse', 'unused_expert', paths='layers.0')
def experts_that_are_called_only_with_tokens(arm):
    "Each router has a large bias for two experts, and an expert without tokens is never called: a consequence of the router"
    torch.manual_seed(515)
    model = Mixtures(calls_empty=False)
    for layer in model.layers: layer.bias[:2] = 30.
    train(arm, model)
