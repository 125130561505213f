"Broken trainings: transformers with a fault in their attention"
import torch
from torch.nn.utils import prune

from . import is_broken
from .heads import Reader, causal, everything
from .parts import fit, of_tokens, passages


def train(arm, model, opt=None, n=120):
    return fit(arm, model, opt or torch.optim.AdamW(model.parameters(), 3e-3), passages(n, 16), of_tokens, attention=True)


@is_broken('future_attention', paths='layers.1.attn')
def one_layer_without_a_mask(arm):
    torch.manual_seed(501)
    train(arm, Reader([causal, everything, causal, causal]))


@is_broken('future_attention', paths='layers.0.attn')
def a_mask_that_is_shifted_by_one(arm):
    torch.manual_seed(502)
    losses = train(arm, Reader([lambda n: ~torch.ones(n, n, dtype=torch.bool).triu(2)]*2))
    assert losses[-1]<1 # A low loss shows that the model copies the next letter, which it must not see


@is_broken('peaked_attention', 'attention', paths='layers.*')
def logits_without_a_scale(arm):
    "The logits are not divided by the square root of the head size, and queries and keys start four times too large"
    torch.manual_seed(503)
    model = Reader([causal]*2, d=64, scale=lambda: 1.)
    with torch.no_grad():
        for layer in model.layers:
            for f in (layer.attn.q, layer.attn.k): f.weight *= 4
    train(arm, model)


def first_key_preferred(n): # a mask of numbers that are added to the logits; the column of the first key was set to 20, not to 0
    return torch.where(causal(n), 0., -torch.inf)+20*(torch.arange(n)==0)


@is_broken('peaked_attention', paths='layers.*')
def all_weight_on_the_first_key(arm):
    "From the first step on, all queries give the first key almost all the weight, because the mask adds 20 to its logits"
    torch.manual_seed(506)
    train(arm, Reader([first_key_preferred]*2))


@is_broken('attention_logits', 'attention_collapse', paths='layers.*', steps=(3, 200))
def weight_decay_with_the_wrong_sign(arm):
    "The weight decay of queries and keys has the wrong sign, so these weights and the attention logits grow"
    torch.manual_seed(504)
    model = Reader([causal]*2)
    grow = [p for layer in model.layers for f in (layer.attn.q, layer.attn.k) for p in f.parameters()]
    rest = [p for p in model.parameters() if not any(p is g for g in grow)]
    opt = torch.optim.AdamW([dict(params=grow, weight_decay=-12.), dict(params=rest)], 3e-3)
    train(arm, model, opt)


@is_broken('attention_collapse', 'attention_logits', paths='layers.*', steps=(3, 200))
def a_temperature_that_falls_to_zero(arm):
    "The scale of the attention logits grows by 4% at each call, and the learning rate is too small to learn anything"
    torch.manual_seed(505)
    passes = [0]
    def scale():
        passes[0] += 1
        return .25*1.04**passes[0]
    model = Reader([causal]*2, scale=scale)
    train(arm, model, torch.optim.AdamW(model.parameters(), 1e-5))


@is_broken('dead_heads', paths='layers.*')
def a_head_whose_queries_and_keys_start_at_zero(arm):
    "Queries and keys of one head start at zero, so both get no gradient, and the head averages all values forever"
    torch.manual_seed(506)
    model = Reader([causal]*2)
    with torch.no_grad():
        for f in (model.layers[1].attn.q, model.layers[1].attn.k): f.weight[:16] = 0; f.bias[:16] = 0
    train(arm, model)


@is_broken('future_attention', paths='layers.*')
def no_mask_in_any_layer(arm):
    "No layer has a causal mask, so the model sees each letter that it must predict"
    torch.manual_seed(507)
    losses = train(arm, Reader([everything]*2))
    assert losses[-1]<1 # A low loss shows that the model copies the next letter, which it must not see


@is_broken('dead_heads', paths='layers.1.attn')
def a_mask_that_hides_all_keys(arm):
    "The additive mask of the second layer is -1e9 at all positions, so no key is visible"
    torch.manual_seed(508)
    train(arm, Reader([causal, lambda n: torch.full((n, n), -1e9)]))


@is_broken('attention_collapse', 'attention_logits', paths='layers.*', steps=(40, 90))
def a_temperature_that_falls_after_the_loss_has_fallen(arm):
    "The loss falls until the scale of the attention logits begins to grow. From then on, the loss falls no more"
    torch.manual_seed(509)
    passes = [0]
    def scale():
        passes[0] += 1
        return .25*1.2**min(max(passes[0]-100, 0), 60)
    train(arm, Reader([causal]*2, scale=scale), n=200)


@is_broken('dead_heads', paths='layers.1.attn')
def a_head_whose_values_are_pruned(arm):
    "A mask of `torch.nn.utils.prune` keeps the value weights of one head at zero"
    torch.manual_seed(510)
    model = Reader([causal]*2)
    values,kept = model.layers[1].attn.v,torch.arange(32)>=16
    prune.custom_from_mask(values, 'weight', kept[:, None].expand(32, 32))
    prune.custom_from_mask(values, 'bias', kept)
    train(arm, model)
    assert values.weight[:16].abs().max()==0


@is_broken('dead_heads', paths='layers.0.attn')
def masks_that_hide_all_keys_in_all_layers(arm):
    "The masks of all layers hide all keys, so no row of the run has a largest logit"
    torch.manual_seed(511)
    train(arm, Reader([lambda n: ~everything(n)]*3))


@is_broken('future_attention', paths='layers.1.attn')
def most_layers_without_a_mask(arm):
    "Only the first of four layers has a causal mask, although the labels are the next letters"
    torch.manual_seed(512)
    train(arm, Reader([causal, everything, everything, everything]))
