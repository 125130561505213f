"Healthy trainings of transformers that look like those of `broken_attention`"
import torch
from torch import nn

from . import is_healthy
from .heads import Reader, causal, everything
from .parts import batch, fit, letters, of_tokens, passages
from .broken_attention import first_key_preferred, train


@is_healthy
def causal_heads(arm):
    torch.manual_seed(601)
    losses = train(arm, Reader([causal]*4))
    assert losses[-1]<1.5


@is_healthy
def heads_that_see_both_sides(arm):
    "Masked letters are predicted from letters on both sides, so no causal mask is needed"
    torch.manual_seed(602)
    model = Reader([everything]*2)
    def hidden():
        for x,_ in passages(150, 16):
            at = torch.rand(x.shape)<.15
            yield x.masked_fill(at, 0),x
    fit(arm, model, torch.optim.AdamW(model.parameters(), 3e-3), hidden(), of_tokens, attention=True)


@is_healthy
def a_prefix_that_all_see(arm):
    "All letters attend to the first eight letters, and beyond them only to earlier letters (prefix mask)"
    torch.manual_seed(603)
    def prefix(n): return causal(n) | (torch.arange(n)<8)
    train(arm, Reader([prefix]*2))


@is_healthy
def queries_that_start_at_zero(arm):
    "Only the queries start at zero, so they get gradients, and no head stays a plain average"
    torch.manual_seed(604)
    model = Reader([causal]*2)
    with torch.no_grad():
        for layer in model.layers: layer.attn.q.weight.zero_(); layer.attn.q.bias.zero_()
    train(arm, model)


@is_healthy
def heads_that_copy(arm):
    "At each position, the model copies the letter three positions before, so the heads attend to one key"
    torch.manual_seed(605)
    model = Reader([causal], d=64)
    def copies():
        for _ in range(400):
            x = torch.randint(len(letters), (16, 24))
            yield x,x.roll(3, 1)
    losses = fit(arm, model, torch.optim.AdamW(model.parameters(), 3e-3), copies(), lambda out, y: of_tokens(out[:, 3:], y[:, 3:]), attention=True)
    assert losses[-1]<.1


@is_healthy
def a_small_window(arm):
    "Each letter attends to itself and to the five letters before it"
    torch.manual_seed(606)
    train(arm, Reader([lambda n: causal(n) & everything(n).triu(-5)]*2))


@is_healthy
def an_encoder_of_torch(arm):
    torch.manual_seed(607)
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0., batch_first=True), 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(len(letters), 32), layers, nn.Linear(32, len(letters)))
    x,y = zip(*passages(40, 16), strict=True)
    x,y = torch.cat(x),torch.cat(y)
    fit(arm, model, torch.optim.AdamW(model.parameters(), 1e-3), (batch(16, x, x) for _ in range(100)), of_tokens, attention=True)


@is_healthy
def a_prefix_without_loss(arm):
    "The first 14 letters attend to each other, and the loss uses only the letters after them"
    torch.manual_seed(608)
    def prefix(n): return causal(n) | (torch.arange(n)<14)
    def later(out, y): return of_tokens(out, y.masked_fill(torch.arange(y.shape[1])<14, -100))
    model = Reader([prefix]*2)
    fit(arm, model, torch.optim.AdamW(model.parameters(), 3e-3), passages(120, 16), later, attention=True)


@is_healthy
def an_encoder_and_a_decoder(arm):
    "The decoder has a mask, and predicts the next letter of a passage that the encoder reads backwards"
    torch.manual_seed(609)
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed,self.place = nn.Embedding(len(letters), 32),nn.Embedding(24, 32)
            self.both,self.head = nn.Transformer(32, 2, 1, 1, 64, 0., batch_first=True),nn.Linear(32, len(letters))

        def forward(self, x):
            place = self.place(torch.arange(x.shape[1]))
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.head(self.both(self.embed(x.flip(1))+place, self.embed(x)+place, tgt_mask=mask))
    model = Translator()
    fit(arm, model, torch.optim.AdamW(model.parameters(), 1e-3), passages(60, 16), of_tokens, attention=True)


@is_healthy
def output_projections_that_start_at_zero(arm):
    "In the first step, attention adds nothing and the values get no gradient. From the second step on, all heads learn"
    torch.manual_seed(610)
    model = Reader([causal]*2)
    with torch.no_grad():
        for layer in model.layers: layer.attn.out.weight.zero_(); layer.attn.out.bias.zero_()
    losses = train(arm, model)
    assert losses[-1]<2.5 and all(layer.attn.out.weight.abs().mean()>.01 for layer in model.layers)


@is_healthy
def values_that_start_at_zero(arm):
    "The value weights of one head start at zero, and the learning rate rises slowly from zero"
    torch.manual_seed(611)
    model = Reader([causal]*2)
    with torch.no_grad(): model.layers[1].attn.v.weight[:16] = 0; model.layers[1].attn.v.bias[:16] = 0
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(n/100, 1))
    opt.register_step_post_hook(lambda *_: warmup.step())
    train(arm, model, opt)
    assert model.layers[1].attn.v.weight[:16].abs().mean()>.01


@is_healthy
def a_trained_model_with_an_attention_sink(arm):
    "A trained model gives the first key almost all the weight (an attention sink), and is trained further with a small learning rate"
    torch.manual_seed(620)
    model = Reader([causal, first_key_preferred, causal])
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    for x,y in passages(150, 16):
        of_tokens(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    train(arm, model, torch.optim.AdamW(model.parameters(), 3e-4))
