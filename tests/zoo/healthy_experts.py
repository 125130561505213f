"Healthy trainings of mixtures of experts that look like those of `broken_experts`"
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from . import is_healthy
from .broken_experts import train
from .experts import Mixtures
from .parts import fit_language_model, letters


@is_healthy
def experts_with_a_loss_about_the_load(arm):
    torch.manual_seed(611)
    losses = train(arm, Mixtures(), .02)
    assert losses[-1]<2.5


@is_healthy
def one_expert_of_each_token(arm):
    torch.manual_seed(612)
    train(arm, Mixtures(k=1), .02)


@is_healthy
def a_bias_that_falls_with_the_load(arm):
    "A bias balances the load without a loss, as in DeepSeek-V3"
    torch.manual_seed(613)
    model = Mixtures()
    def balance():
        for layer in model.layers: layer.bias -= .02*(layer.load-layer.load.mean()).sign()
    train(arm, model, each=balance)


@is_healthy
def a_small_mixtral(arm):
    torch.manual_seed(614)
    model = MixtralForCausalLM(MixtralConfig(vocab_size=len(letters), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=.02))
    fit_language_model(arm, model, routers=True)
