"Healthy trainings of residual networks that look like those of `broken_stream`"
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from . import is_healthy
from .broken_stream import Residual, train
from .parts import fit_language_model, letters


@is_healthy
def a_residual_network(arm):
    torch.manual_seed(621)
    losses = train(arm, Residual([.3]*8))
    assert losses[-1]<2.5


@is_healthy
def factors_that_begin_with_zero(arm):
    "The factors of all blocks begin with zero, and are trained (ReZero)"
    torch.manual_seed(622)
    train(arm, Residual([nn.Parameter(torch.zeros(())) for _ in range(4)]))


@is_healthy
def massive_activations_in_bfloat16(arm):
    torch.manual_seed(623)
    model = Residual([.3]*4)
    model.blocks[1].first = 2e4
    train(arm, model.bfloat16(), 1e-3, n=30)


@is_healthy
def a_small_gpt2(arm):
    torch.manual_seed(624)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(letters), n_embd=32, n_layer=6, n_head=2, n_positions=32, resid_pdrop=0., attn_pdrop=0.,
        embd_pdrop=0., bos_token_id=1, eos_token_id=1))
    fit_language_model(arm, model, stream=True)
