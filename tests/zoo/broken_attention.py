"Broken trainings of transformers whose attention is at fault"
import torch

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
    assert losses[-1]<1 # the next letter is copied


@is_broken('peaked_attention', 'attention', paths='layers.*')
def logits_without_a_scale(arm):
    "The logits are not divided by the square root of the head size, and queries and keys start four times too large"
    torch.manual_seed(503)
    model = Reader([causal]*2, d=64, scale=lambda: 1.)
    with torch.no_grad():
        for layer in model.layers:
            for f in (layer.attn.q, layer.attn.k): f.weight *= 4
    train(arm, model)


@is_broken('attention_logits', 'attention_collapse', paths='layers.*', steps=(3, 200))
def weight_decay_with_the_wrong_sign(arm):
    "The weight decay of queries and keys has the wrong sign, so the logits grow"
    torch.manual_seed(504)
    model = Reader([causal]*2)
    grow = [p for layer in model.layers for f in (layer.attn.q, layer.attn.k) for p in f.parameters()]
    rest = [p for p in model.parameters() if not any(p is g for g in grow)]
    opt = torch.optim.AdamW([dict(params=grow, weight_decay=-12.), dict(params=rest)], 3e-3)
    train(arm, model, opt)


@is_broken('attention_collapse', 'attention_logits', paths='layers.*', steps=(3, 200))
def a_temperature_that_falls_to_zero(arm):
    "The temperature of the softmax is divided by the number of passes, and nothing is learned: the learning rate is tiny"
    torch.manual_seed(505)
    passes = [0]
    def scale():
        passes[0] += 1
        return .25*1.04**passes[0]
    model = Reader([causal]*2, scale=scale)
    train(arm, model, torch.optim.AdamW(model.parameters(), 1e-5))


@is_broken('dead_heads', paths='layers.*')
def a_head_whose_queries_and_keys_start_at_zero(arm):
    "Queries and keys of a head start at zero, so neither gets a gradient, and the head stays an average"
    torch.manual_seed(506)
    model = Reader([causal]*2)
    with torch.no_grad():
        for f in (model.layers[1].attn.q, model.layers[1].attn.k): f.weight[:16] = 0; f.bias[:16] = 0
    train(arm, model)


@is_broken('future_attention', paths='layers.*')
def no_mask_in_any_layer(arm):
    "Each letter is predicted from the whole passage, the letter itself included"
    torch.manual_seed(507)
    losses = train(arm, Reader([everything]*2))
    assert losses[-1]<1 # the next letter is copied


@is_broken('dead_heads', paths='layers.1.attn')
def a_mask_that_hides_all_keys(arm):
    "A mask that shows the keys is added to the logits after it was inverted twice too often, so no key is left"
    torch.manual_seed(508)
    train(arm, Reader([causal, lambda n: torch.full((n, n), -1e9)]))


@is_broken('attention_collapse', 'attention_logits', paths='layers.*', steps=(40, 90))
def a_temperature_that_falls_after_the_loss_has_fallen(arm):
    "The loss falls until the factor of the logits begins to grow, and not any more from then on"
    torch.manual_seed(509)
    passes = [0]
    def scale():
        passes[0] += 1
        return .25*1.2**min(max(passes[0]-100, 0), 60)
    train(arm, Reader([causal]*2, scale=scale), n=200)
