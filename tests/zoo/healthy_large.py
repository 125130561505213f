"Healthy trainings of small versions of large networks: transformers, adapters, generators, agents, and networks with routing or shared layers"
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.checkpoint import checkpoint

from . import is_healthy
from .data import batch, digits, fell, plain, text, windows

try:
    from transformers import (BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config,
        T5ForConditionalGeneration, ViTConfig, ViTForImageClassification)
    is_healthy_there = is_healthy
except ImportError:
    def is_healthy_there(f): return f # Without the package transformers, these trainings are not added to the zoo


def mean(losses): return sum(losses)/len(losses)


# Healthy trainings: transformers

@is_healthy_there
def llama_warmed_and_cosine(arm):
    "A Llama with warm-up and cosine schedule, weights cast to bfloat16 in each pass, and tied embeddings with rare letters"
    torch.manual_seed(0)
    series,n = text()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=n, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True))
    decays = [p for p in model.parameters() if p.ndim>1]
    rest = [p for p in model.parameters() if p.ndim<2]
    opt = torch.optim.AdamW([{'params': decays, 'weight_decay': .1}, {'params': rest, 'weight_decay': 0.}], lr=6e-3, betas=(.9, .95))
    sched = LambdaLR(opt, lambda i: i/10 if i<10 else .5*(1+math.cos(math.pi*(i-10)/70)))
    te,losses = arm(model, optimizer=opt),[]
    for _ in range(80):
        w = windows(8, 32, series)
        with torch.autocast('cpu', torch.bfloat16): loss = model(input_ids=w, labels=w).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.)
        opt.step()
        sched.step()
        opt.zero_grad()
        te.log(loss=loss, lr=sched.get_last_lr()[0], grad_norm=norm)
        losses.append(loss.item())
    te.close()
    fell(losses, .8)


@is_healthy_there
def gpt2_from_a_checkpoint_with_lora(arm):
    "A frozen GPT-2 with LoRA: two narrow matrices beside each attention, the second of which begins with zeros"
    torch.manual_seed(1)
    series,n = text()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=n, n_positions=32, n_embd=48, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None))
    first = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        w = windows(8, 32, series)
        first.zero_grad()
        model(input_ids=w, labels=w).loss.backward()
        first.step()
    model.requires_grad_(False)
    class LoRA(nn.Module):
        def __init__(self, base, a, b, rank=8):
            super().__init__()
            self.base,self.down,self.up = base,nn.Linear(a, rank, bias=False),nn.Linear(rank, b, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x): return self.base(x)+2*self.up(self.down(x))
    for block in model.transformer.h: block.attn.c_attn,block.mlp.c_fc = LoRA(block.attn.c_attn, 48, 144),LoRA(block.mlp.c_fc, 48, 192)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    te,losses = arm(model, optimizer=opt),[]
    for _ in range(60):
        # New task for LoRA: every second token is the token 5
        w = windows(8, 32, series).where(torch.arange(32)%2==0, 5)
        loss = model(input_ids=w, labels=w).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    assert mean(losses[-10:])<.9*mean(losses[:5])


@is_healthy_there
def bert_with_masks(arm):
    "A BERT with texts of different lengths, padding, and 15% masked letters. The embedding of token types uses only one row"
    torch.manual_seed(2)
    series,n = text()
    model = BertForMaskedLM(BertConfig(vocab_size=n+1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=32))
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    te,losses = arm(model, optimizer=opt),[]
    for _ in range(60):
        w = windows(16, 24, series)
        there = torch.arange(24)<torch.randint(8, 25, (16, 1))
        hidden = there & (torch.rand(w.shape)<.15)
        loss = model(input_ids=w.masked_fill(hidden, n), attention_mask=there.long(), labels=w.masked_fill(~hidden, -100)).loss
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        opt.step()
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    fell(losses, .9)


@is_healthy_there
def t5_reverses_words(arm):
    torch.manual_seed(3)
    model = T5ForConditionalGeneration(T5Config(vocab_size=14, d_model=48, d_kv=12, d_ff=96, num_layers=1, num_decoder_layers=1, num_heads=4,
        dropout_rate=0., decoder_start_token_id=0, feed_forward_proj='gated-gelu'))
    opt = torch.optim.Adafactor(model.parameters(), lr=2e-2)
    te,losses = arm(model, optimizer=opt, every=2),[]
    for _ in range(80):
        w = torch.randint(2, 14, (48, 5))
        loss = model(input_ids=w, labels=w.flip(1)).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss)
        losses.append(loss.item())
    te.close()
    fell(losses, .7)


@is_healthy_there
def vit_of_digits(arm):
    "A vision transformer with patches of 2 by 2, learned positions, and a class token through which all gradients come"
    torch.manual_seed(4)
    x,y = digits(images=True)
    model = ViTForImageClassification(ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=8,
        patch_size=2, num_channels=1, num_labels=10))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=.05)
    te = arm(model, optimizer=opt, every=4)
    def loss_of():
        xb,yb = batch(32, x, y)
        return model(pixel_values=xb*2-1, labels=yb).loss
    losses = plain(te, opt, 120, loss_of)
    te.close()
    fell(losses, .85)


class Causal(nn.Module):
    "An attention block with a causal mask of -inf, and with branches that begin with a weight of 0 (ReZero)"
    def __init__(self, d, heads=4):
        super().__init__()
        self.attend,self.up,self.down = nn.MultiheadAttention(d, heads, batch_first=True),nn.Linear(d, 2*d),nn.Linear(2*d, d)
        self.alpha = nn.Parameter(torch.zeros(2))

    def forward(self, x, mask):
        x = x+self.alpha[0]*self.attend(x, x, x, attn_mask=mask, need_weights=False)[0]
        return x+self.alpha[1]*self.down(F.gelu(self.up(x)))


@is_healthy
def rezero_and_masks_of_infinity(arm):
    torch.manual_seed(5)
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed,self.place = nn.Embedding(10, 32),nn.Parameter(.02*torch.randn(16, 32))
            self.blocks,self.head = nn.ModuleList(Causal(32) for _ in range(3)),nn.Linear(32, 10)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

        def forward(self, x, mask):
            h = self.embed(x)+self.place[:x.shape[1]]
            for b in self.blocks: h = b(h, mask)
            return self.head(h)
    model = Model()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te = arm(model, optimizer=opt)
    mask = torch.full((12, 12), -math.inf).triu(1)
    def loss_of(): # The target is the letter before the current one
        w = torch.randint(10, (32, 12))
        return F.cross_entropy(model(w, mask)[:, 2:].flatten(0, 1), w[:, 1:-1].flatten())
    losses = plain(te, opt, 100, loss_of)
    te.close()
    fell(losses, .3)


@is_healthy
def encoder_with_padding(arm):
    "torch's own encoder with padding masks learns which word is more frequent. Warm-up, then a rate that falls with the square root"
    torch.manual_seed(6)
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 32, padding_idx=0)
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=.1, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 2)

        def forward(self, x):
            pad = x==0
            h = self.encoder(self.embed(x), src_key_padding_mask=pad)
            return self.head(h.masked_fill(pad[..., None], 0).sum(1)/(~pad).sum(1, keepdim=True))
    model = Model()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(.9, .98))
    sched = LambdaLR(opt, lambda i: min((i+1)/20, (20/(i+1))**.5))
    te = arm(model, optimizer=opt)
    def loss_of():
        x = torch.randint(1, 20, (48, 14))*(torch.arange(14)<torch.randint(5, 15, (48, 1)))
        x[:, :4] = torch.randint(1, 4, (48, 4))
        return F.cross_entropy(model(x), ((x==1).sum(1)>(x==2).sum(1)).long())
    losses = plain(te, opt, 80, loss_of, sched.step)
    te.close()
    fell(losses, .6)


@is_healthy
def huge_vocabulary_tied(arm):
    "A vocabulary of 5000 words, few of which are in a batch. Words follow Zipf's law, and the output layer shares the embedding matrix"
    torch.manual_seed(7)
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed,self.norm,self.mix = nn.Embedding(5000, 32),nn.RMSNorm(32),nn.Linear(64, 32)
            self.head = nn.Linear(32, 5000, bias=False)
            nn.init.normal_(self.embed.weight, std=.02)
            self.head.weight = self.embed.weight

        def forward(self, x): return self.head(self.norm(self.mix(self.embed(x).flatten(1))))
    model = Model()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=.01)
    te = arm(model, optimizer=opt, every=4)
    share = 1/(torch.arange(5000)+2.)
    def loss_of():
        x = torch.multinomial(share, 128, replacement=True).view(64, 2)
        return F.cross_entropy(model(x), x[:, 1])
    losses = plain(te, opt, 80, loss_of)
    te.close()
    fell(losses, .85)


# Healthy trainings: half precision

@is_healthy
def scaler_that_skips_late(arm):
    "A GradScaler tries a larger scale now and then, and takes it back after a skipped step"
    torch.manual_seed(8)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    scaler = torch.amp.GradScaler('cpu', init_scale=2.**12, growth_interval=25)
    te,losses = arm(model, optimizer=opt, scaler=scaler),[]
    for _ in range(120):
        xb,yb = batch(64, x, y)
        with torch.autocast('cpu', torch.bfloat16): loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad()
        scaler.scale(loss).backward()
        # Simulate a float16 overflow: one gradient becomes infinite at a large scale
        if scaler.get_scale()>=2**15: model[2].weight.grad[0, 0] = math.inf
        scaler.step(opt)
        scaler.update()
        te.log(loss=loss, scale=scaler.get_scale())
        losses.append(loss.item())
    te.close()
    fell(losses, .3)


@is_healthy
def bfloat16_throughout(arm):
    "Weights are in bfloat16, with a learning rate at which rounding loses no updates"
    torch.manual_seed(9)
    x,y = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10)).bfloat16()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    te = arm(model, optimizer=opt)
    def loss_of():
        xb,yb = batch(64, x, y)
        return F.cross_entropy(model(xb.bfloat16()).float(), yb)
    losses = plain(te, opt, 120, loss_of)
    te.close()
    fell(losses, .4)


# Healthy trainings: generative models

@is_healthy
def gan_of_a_ring(arm):
    "A GAN: two models, two optimizers, and two losses, neither of which falls"
    torch.manual_seed(10)
    gen = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    dis = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(.2), nn.Linear(48, 48), nn.LeakyReLU(.2), nn.Linear(48, 1))
    gopt,dopt = (torch.optim.Adam(m.parameters(), lr=2e-3, betas=(.5, .99)) for m in (gen, dis))
    te_gen,te_dis = arm(gen, optimizer=gopt),arm(dis, optimizer=dopt, every=2)
    def real(n):
        a = torch.rand(n)*2*math.pi
        return torch.stack([a.cos(), a.sin()], 1)*2+.05*torch.randn(n, 2)
    def off_ring(): return (gen(torch.randn(256, 4)).norm(dim=1)-2).abs().mean().item()
    with torch.no_grad(): before = (gen(torch.randn(256, 4)).norm(dim=1)-2).abs().mean().item()
    for _ in range(150):
        z = torch.randn(64, 4)
        d_loss = F.softplus(-dis(real(64))).mean()+F.softplus(dis(gen(z).detach())).mean()
        dopt.zero_grad()
        d_loss.backward()
        dopt.step()
        te_dis.log(d_loss=d_loss)
        g_loss = F.softplus(-dis(gen(torch.randn(64, 4)))).mean()
        gopt.zero_grad()
        g_loss.backward()
        gopt.step()
        te_gen.log(g_loss=g_loss)
    te_gen.close()
    te_dis.close()
    with torch.no_grad(): assert off_ring()<.75*before


@is_healthy
def adversaries_in_one_module(arm):
    "Generator and discriminator in one model, with a list of optimizers: a step ends when both have stepped"
    torch.manual_seed(11)
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.gen = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1))
            self.critic = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 1))

        def forward(self, z): return self.critic(self.gen(z))
    model = Both()
    opts = [torch.optim.RMSprop(model.critic.parameters(), lr=2e-3), torch.optim.RMSprop(model.gen.parameters(), lr=2e-3)]
    te,means = arm(model, optimizer=opts),[]
    for _ in range(150):
        fake = model.gen(torch.randn(64, 2))
        true = 3+.5*torch.randn(64, 1)
        c_loss = F.softplus(-model.critic(true)).mean()+F.softplus(model.critic(fake.detach())).mean()
        opts[0].zero_grad()
        c_loss.backward()
        opts[0].step()
        g_loss = F.softplus(-model.critic(fake)).mean()
        opts[1].zero_grad()
        g_loss.backward()
        opts[1].step()
        te.log(critic_loss=c_loss, gen_loss=g_loss)
        means.append(fake.mean().item())
    te.close()
    assert abs(mean(means[-10:])-3)<abs(means[0]-3)*.6


@is_healthy
def vae_of_digits(arm):
    torch.manual_seed(12)
    x,_ = digits()
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc,self.mu,self.log_var = nn.Sequential(nn.Linear(64, 64), nn.ReLU()),nn.Linear(64, 6),nn.Linear(64, 6)
            self.dec = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64))

        def forward(self, x):
            h = self.enc(x)
            mu,log_var = self.mu(h),self.log_var(h)
            return self.dec(mu+(log_var/2).exp()*torch.randn_like(mu)),mu,log_var
    model = VAE()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    te,elbos = arm(model, optimizer=opt),[]
    for i in range(150):
        xb, = batch(64, x)
        out,mu,log_var = model(xb)
        kl = -.5*(1+log_var-mu.square()-log_var.exp()).sum(1).mean()
        elbo = -F.binary_cross_entropy_with_logits(out, xb, reduction='sum')/64-min(1, i/80)*kl
        opt.zero_grad()
        (-elbo).backward()
        opt.step()
        te.log(elbo=elbo, kl=kl)
        elbos.append(elbo.item())
    te.close()
    assert mean(elbos[-15:])>mean(elbos[:5])+5


@is_healthy
def flow_below_zero(arm):
    "A normalizing flow whose last layers begin with zeros, and whose negative log-likelihood falls below 0"
    torch.manual_seed(13)
    class Coupling(nn.Module):
        def __init__(self, swap):
            super().__init__()
            self.swap,self.net = swap,nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))
            nn.init.zeros_(self.net[2].weight)
            nn.init.zeros_(self.net[2].bias)

        def forward(self, x):
            a,b = x.flip(1).chunk(2, 1) if self.swap else x.chunk(2, 1)
            s,t = self.net(a).chunk(2, 1)
            s = 2*torch.tanh(s)
            return torch.cat([a, b*s.exp()+t], 1),s[:, 0]
    model = nn.ModuleList(Coupling(i%2) for i in range(6))
    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            total = 0
            for p in self.parts:
                x,s = p(x)
                total = total+s
            return -.5*x.square().sum(1)-math.log(2*math.pi)+total
    flow = Flow()
    opt = torch.optim.Adam(flow.parameters(), lr=1e-2)
    te = arm(flow, optimizer=opt)
    def loss_of():
        a = torch.rand(128, 1)*.6-.3
        return -flow(torch.cat([a, 2*a.square()+.02*torch.randn(128, 1)], 1)).mean()
    losses = plain(te, opt, 150, loss_of)
    te.close()
    assert mean(losses[-10:])<0<losses[0]


@is_healthy
def diffusion_of_points(arm):
    "A diffusion model (DDPM): adaptive normalizations, which get the time, and the last layer begin with zeros. A copy of the model is averaged"
    torch.manual_seed(14)
    from sklearn.datasets import make_swiss_roll
    data = torch.tensor(make_swiss_roll(500, noise=.3, random_state=0)[0][:, [0, 2]], dtype=torch.float32)/8
    class Block(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.norm,self.mlp,self.ada = nn.LayerNorm(d, elementwise_affine=False),nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d)),nn.Linear(d, 3*d)
            nn.init.zeros_(self.ada.weight)
            nn.init.zeros_(self.ada.bias)

        def forward(self, x, c):
            shift,scale,gate = self.ada(F.silu(c)).chunk(3, -1)
            return x+gate*self.mlp(self.norm(x)*(1+scale)+shift)
    class Denoiser(nn.Module):
        def __init__(self, d=48):
            super().__init__()
            self.embed,self.time,self.blocks,self.out = nn.Linear(2, d),nn.Linear(16, d),nn.ModuleList(Block(d) for _ in range(3)),nn.Linear(d, 2)
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

        def forward(self, x, t):
            waves = t[:, None]*torch.arange(1, 9)
            h,c = self.embed(x),self.time(torch.cat([waves.sin(), waves.cos()], 1))
            for b in self.blocks: h = b(h, c)
            return self.out(h)
    model = Denoiser()
    ema = copy.deepcopy(model)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    te = arm(model, optimizer=opt)
    def loss_of():
        x, = batch(128, data)
        t,noise = torch.rand(128),torch.randn(128, 2)
        a = (t*math.pi/2).cos()[:, None]
        return F.mse_loss(model(a*x+(1-a.square()).sqrt()*noise, t), noise)
    def average():
        with torch.no_grad():
            for p,q in zip(ema.parameters(), model.parameters(), strict=True): p.lerp_(q, .05)
    losses = plain(te, opt, 150, loss_of, average)
    te.close()
    fell(losses, .75)


@is_healthy
def unet_of_blobs(arm):
    "A U-Net marks blobs, which are one pixel in ten, so the loss is small from the start"
    torch.manual_seed(15)
    def conv(a, b): return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1,self.down2,self.mid = conv(1, 8),conv(8, 16),conv(16, 16)
            self.pool,self.up2,self.up1 = nn.MaxPool2d(2),nn.ConvTranspose2d(16, 16, 2, 2),nn.ConvTranspose2d(16, 8, 2, 2)
            self.dec2,self.dec1,self.out = conv(32, 16),conv(16, 8),nn.Conv2d(8, 1, 1)

        def forward(self, x):
            a = self.down1(x)
            b = self.down2(self.pool(a))
            h = self.mid(self.pool(b))
            h = self.dec2(torch.cat([self.up2(h), b], 1))
            return self.out(self.dec1(torch.cat([self.up1(h), a], 1)))
    model = UNet()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te = arm(model, optimizer=opt, every=2)
    at = torch.stack(torch.meshgrid(torch.arange(16.), torch.arange(16.), indexing='ij'), -1)
    def loss_of():
        middle = torch.rand(8, 1, 1, 2)*16
        y = ((at-middle).norm(dim=-1)<3).float()[:, None]
        out = model(y+.5*torch.randn_like(y))
        p = out.sigmoid()
        return F.binary_cross_entropy_with_logits(out, y)+1-(2*(p*y).sum()+1)/(p.sum()+y.sum()+1)
    losses = plain(te, opt, 60, loss_of)
    te.close()
    fell(losses, .7)


# Healthy trainings: learning without labels

@is_healthy
def contrasted_views(arm):
    "SimCLR: the model learns to recognize two noisy views of the same image"
    torch.manual_seed(16)
    x,_ = digits(images=True)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
        nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    te = arm(model, optimizer=opt)
    def view(x): return torch.roll(x, (torch.randint(-1, 2, ()).item(), torch.randint(-1, 2, ()).item()), (2, 3))+.1*torch.randn_like(x)
    def loss_of():
        xb, = batch(48, x)
        z = F.normalize(model(torch.cat([view(xb), view(xb)])), dim=1)
        alike = (z@z.T/.2).masked_fill(torch.eye(96, dtype=torch.bool), -math.inf)
        return F.cross_entropy(alike, (torch.arange(96)+48)%96)
    losses = plain(te, opt, 80, loss_of)
    te.close()
    fell(losses, .85)


@is_healthy
def own_past_as_the_target(arm):
    "BYOL: the target network has no gradients and is a moving average of the model; a predictor prevents a collapse"
    torch.manual_seed(17)
    x,_ = digits()
    def net(a, b): return nn.Sequential(nn.Linear(a, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, b))
    class Byol(nn.Module):
        def __init__(self):
            super().__init__()
            self.online,self.predict = net(64, 16),net(16, 16)
            self.target = copy.deepcopy(self.online).requires_grad_(False)

        def forward(self, a, b):
            with torch.no_grad(): goal = self.target(b)
            return 2-2*F.cosine_similarity(self.predict(self.online(a)), goal).mean()
    model = Byol()
    opt = torch.optim.Adam([*model.online.parameters(), *model.predict.parameters()], lr=2e-3)
    te = arm(model, optimizer=opt)
    def follow():
        with torch.no_grad():
            for t,o in zip(model.target.parameters(), model.online.parameters(), strict=True): t.lerp_(o, .03)
    def loss_of():
        xb, = batch(64, x)
        a,b = (xb+.2*torch.randn_like(xb) for _ in range(2))
        return (model(a, b)+model(b, a))/2
    losses = plain(te, opt, 120, loss_of, follow)
    te.close()
    fell(losses, .4)
    with torch.no_grad(): assert F.normalize(model.online(x), dim=1).std(0).mean()>.05


# Healthy trainings: reinforcement learning

@is_healthy
def bandit_by_reinforce(arm):
    "A policy gradient (REINFORCE) for a bandit: the reward rises, while the loss means nothing"
    torch.manual_seed(18)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    te,rewards,baseline = arm(model, optimizer=opt),[],0.
    best = torch.randn(6, 4)
    for _ in range(200):
        state = torch.randn(32, 6)
        dist = torch.distributions.Categorical(logits=model(state))
        action = dist.sample()
        reward = (action==(state@best).argmax(1)).float()+.3*torch.randn(32)
        baseline = .9*baseline+.1*reward.mean().item()
        loss = -(dist.log_prob(action)*(reward-baseline)).mean()-.01*dist.entropy().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss, reward=reward.mean())
        rewards.append(reward.mean().item())
    te.close()
    assert mean(rewards[-20:])>mean(rewards[:20])+.2


@is_healthy
def pole_by_actor_critic(arm):
    "An actor-critic balances a pole: one pass for each move and one step for each game. Games become longer, and returns larger"
    torch.manual_seed(19)
    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.actor,self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh()),nn.Linear(32, 2),nn.Linear(32, 1)

        def forward(self, x):
            h = self.body(x)
            return self.actor(h),self.critic(h)[..., 0]
    model = ActorCritic()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    te,lengths = arm(model, optimizer=opt),[]
    for _ in range(60):
        angle,speed,states,actions = (torch.rand(8)-.5)*.2,torch.zeros(8),[],[]
        alive,lives = torch.ones(8),[]
        for _ in range(25): # Each move is made for eight poles at once
            state = torch.stack([angle*5, speed*2], 1)
            with torch.no_grad(): action = torch.distributions.Categorical(logits=model(state)[0]).sample()
            states.append(state)
            actions.append(action)
            lives.append(alive)
            speed = speed+.3*angle+.06*(action*2-1)+.01*torch.randn(8)
            angle = angle+speed
            alive = alive*(angle.abs()<.5)
        lives = torch.stack(lives)
        returns = torch.zeros(25, 8)
        total = torch.zeros(8)
        for t in reversed(range(25)):
            total = lives[t]+.95*total
            returns[t] = total
        logits,values = model(torch.stack(states))
        dist = torch.distributions.Categorical(logits=logits)
        advantage = returns/10-values.detach()
        loss = -(dist.log_prob(torch.stack(actions))*advantage*lives).sum()/lives.sum()+((returns/10-values).square()*lives).sum()/lives.sum()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        opt.step()
        lengths.append(lives.sum(0).mean().item())
        te.log(policy_loss=loss, length=lengths[-1])
    te.close()
    assert mean(lengths[-10:])>1.3*mean(lengths[:10])


@is_healthy
def corridor_by_q_learning(arm):
    "Q-learning with a target network that is copied now and then: the loss jumps at each copy, and rises at first"
    torch.manual_seed(20)
    model = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 2))
    target = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    te = arm(model, optimizer=opt)
    for i in range(240):
        if i%20==0: target.load_state_dict(model.state_dict())
        place,action = torch.randint(9, (64,)),torch.randint(2, (64,))
        after = (place+action*2-1).clamp(min=0)
        reward = (after==9).float()*5
        with torch.no_grad(): goal = reward+.8*(after<9)*target(F.one_hot(after, 10).float()).max(1).values
        loss = F.smooth_l1_loss(model(F.one_hot(place, 10).float()).gather(1, action[:, None])[:, 0], goal)
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(td_loss=loss)
    te.close()
    with torch.no_grad(): q = model(torch.eye(10)[:9])
    assert (q[:, 1]>q[:, 0]).float().mean()>.8


# Healthy trainings: networks that route samples, repeat layers or share layers

@is_healthy
def experts_idle_in_turns(arm):
    "A mixture of eight experts, two for each word. In a small batch, some experts are not called. A loss term balances the experts"
    torch.manual_seed(21)
    class Experts(nn.Module):
        def __init__(self, d=16, n=8):
            super().__init__()
            self.gate = nn.Linear(d, n, bias=False)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 32), nn.SiLU(), nn.Linear(32, d)) for _ in range(n))

        def forward(self, x):
            share = self.gate(x).softmax(-1)
            top,which = share.topk(2, -1)
            out = torch.zeros_like(x)
            for i,expert in enumerate(self.experts):
                at,slot = (which==i).nonzero(as_tuple=True)
                if len(at): out = out.index_add(0, at, expert(x[at])*top[at, slot, None])
            return out,8*(share.mean(0)*F.one_hot(which, 8).float().mean((0, 1))).sum()
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed,self.moe,self.norm,self.head = nn.Linear(8, 16),Experts(),nn.LayerNorm(16),nn.Linear(16, 8)

        def forward(self, x):
            h = self.embed(x)
            more,balance = self.moe(h)
            return self.head(self.norm(h+more)),balance
    model = Model()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    te,losses = arm(model, optimizer=opt),[]
    means,turn = torch.randn(4, 8)*2,torch.randn(4, 8, 8)/3
    for _ in range(120):
        k = torch.randint(4, (12,))
        x = means[k]+torch.randn(12, 8)
        out,balance = model(x)
        mse = F.mse_loss(out, (x[:, None]@turn[k])[:, 0])
        loss = mse+.01*balance
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss, balance=balance)
        losses.append(mse.item())
    te.close()
    fell(losses, .4)


@is_healthy
def graph_of_communities(arm):
    "Two layers of graph convolution find three communities among 200 nodes, of which six have labels"
    torch.manual_seed(22)
    y = torch.arange(200)%3
    edge = torch.rand(200, 200)<torch.where(y[:, None]==y, .12, .02)
    a = ((edge|edge.T).float()+torch.eye(200)).clamp(max=1)
    a = a/a.sum(1, keepdim=True)
    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.first,self.second,self.drop = nn.Linear(200, 24, bias=False),nn.Linear(24, 3),nn.Dropout(.5)

        def forward(self, x): return self.second(a@self.drop(F.relu(self.first(a@x))))
    model = GCN()
    opt = torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=5e-4)
    te,known = arm(model, optimizer=opt),torch.arange(12)
    losses = plain(te, opt, 80, lambda: F.cross_entropy(model(torch.eye(200))[known], y[known]))
    te.close()
    fell(losses, .5)
    model.eval()
    with torch.no_grad(): assert (model(torch.eye(200)).argmax(1)==y).float().mean()>.7


@is_healthy
def message_passing_and_a_mean(arm):
    "A graph network counts triangles in small random graphs. Its three rounds of message passing share one layer"
    torch.manual_seed(23)
    class Rounds(nn.Module):
        def __init__(self):
            super().__init__()
            self.start,self.message,self.update,self.out = nn.Linear(1, 24),nn.Linear(24, 24),nn.GRUCell(24, 24),nn.Linear(24, 1)

        def forward(self, a):
            h = torch.tanh(self.start(a.sum(-1, keepdim=True)/4))
            for _ in range(3):
                m = a@F.relu(self.message(h))/4
                h = self.update(m.flatten(0, 1), h.flatten(0, 1)).view_as(h)
            return self.out(h.mean(1))[:, 0]
    model = Rounds()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te = arm(model, optimizer=opt, every=2)
    def loss_of():
        up = (torch.rand(48, 8, 8)<torch.rand(48, 1, 1)).float().triu(1)
        a = up+up.transpose(1, 2)
        return F.mse_loss(model(a), (a@a@a).diagonal(dim1=1, dim2=2).sum(1)/100)
    losses = plain(te, opt, 120, loss_of)
    te.close()
    fell(losses, .3)


@is_healthy
def equilibrium_of_one_layer(arm):
    "An equilibrium model calls one layer until its output no longer changes: twelve times without gradients, and twice with gradients"
    torch.manual_seed(24)
    x,y = digits()
    class Equilibrium(nn.Module):
        def __init__(self):
            super().__init__()
            self.inject,self.cell,self.head = nn.Linear(64, 32),nn.Linear(32, 32),nn.Linear(32, 10)
            nn.init.normal_(self.cell.weight, std=.08)

        def forward(self, x):
            u = self.inject(x)
            with torch.no_grad():
                z = torch.zeros_like(u)
                for _ in range(12): z = torch.tanh(self.cell(z)+u)
            for _ in range(2): z = torch.tanh(self.cell(z)+u)
            return self.head(z)
    model = Equilibrium()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te = arm(model, optimizer=opt, every=3)
    def loss_of():
        xb,yb = batch(64, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 100, loss_of)
    te.close()
    fell(losses, .4)


@is_healthy
def flow_of_time(arm):
    "A learned differential equation: each of four Runge-Kutta steps calls the same network four times"
    torch.manual_seed(25)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    turn = torch.tensor([[0., 1.], [-1., 0.]])
    def walk(f, x, n=4, h=.25):
        for _ in range(n):
            k1 = f(x)
            k2 = f(x+h/2*k1)
            k3 = f(x+h/2*k2)
            x = x+h*(k1+2*k2+2*k3+f(x+h*k3))/6
        return x
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    te = arm(model, optimizer=opt, every=4)
    def loss_of():
        x = torch.randn(64, 2)
        return F.mse_loss(walk(model, x), walk(lambda z: z@turn, x))
    losses = plain(te, opt, 100, loss_of)
    te.close()
    fell(losses, .2)


@is_healthy
def recomputed_in_backward(arm):
    "Activation checkpointing: the forward pass of each block runs again in the backward pass, to save memory"
    torch.manual_seed(26)
    x,y = digits()
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.start,self.head = nn.Linear(64, 48),nn.Linear(48, 10)
            self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48)) for _ in range(4))

        def forward(self, x):
            h = self.start(x)
            for b in self.blocks: h = h+checkpoint(b, h, use_reentrant=False)
            return self.head(h)
    model = Deep()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    te = arm(model, optimizer=opt, every=2)
    def loss_of():
        xb,yb = batch(64, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 80, loss_of)
    te.close()
    fell(losses, .4)


@is_healthy
def stochastic_depth(arm):
    "Stochastic depth: blocks are skipped at random, later blocks more often"
    torch.manual_seed(27)
    x,y = digits(images=True)
    class Block(nn.Module):
        def __init__(self, c, drop):
            super().__init__()
            self.depth,self.norm,self.mix,self.out = nn.Conv2d(c, c, 3, 1, 1, groups=c),nn.GroupNorm(1, c),nn.Conv2d(c, 2*c, 1),nn.Conv2d(2*c, c, 1)
            self.scale,self.drop = nn.Parameter(torch.full((c, 1, 1), 1e-2)),drop

        def forward(self, x):
            if self.training and torch.rand(()).item()<self.drop: return x
            return x+self.scale*self.out(F.gelu(self.mix(self.norm(self.depth(x)))))/(1-self.drop)
    model = nn.Sequential(nn.Conv2d(1, 16, 2, 2), nn.GroupNorm(1, 16), *(Block(16, .1*i) for i in range(1, 5)),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    opt = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=.05)
    sched = CosineAnnealingLR(opt, 100)
    te = arm(model, optimizer=opt, every=2)
    def loss_of():
        xb,yb = batch(32, x, y)
        return F.cross_entropy(model(xb), yb)
    losses = plain(te, opt, 100, loss_of, sched.step)
    te.close()
    fell(losses, .5)


@is_healthy
def sets_in_any_order(arm):
    "The largest element of a set, computed from the sum of a network's outputs for the elements. te.step() ends a step, without an optimizer"
    torch.manual_seed(28)
    class Sets(nn.Module):
        def __init__(self):
            super().__init__()
            self.each,self.all = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 32)),nn.Sequential(nn.ReLU(), nn.Linear(32, 1))

        def forward(self, x): return self.all(self.each(x[..., None]).amax(1))[:, 0]
    model = Sets()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    te,losses = arm(model),[]
    for _ in range(100):
        x = torch.randn(64, 6)
        loss = F.l1_loss(model(x), x.max(1).values)
        opt.zero_grad()
        loss.backward()
        te.log(loss=loss)
        te.step()
        opt.step()
        losses.append(loss.item())
    te.close()
    fell(losses, .3)


@is_healthy
def fields_in_waves(arm):
    "SIREN: a network with sine activations learns one image as a function of the position. The batch is the whole image"
    torch.manual_seed(29)
    x,_ = digits(images=True)
    picture = F.interpolate(x[:1], scale_factor=3, mode='bilinear').flatten()
    at = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 24), torch.linspace(-1, 1, 24), indexing='ij'), -1).view(-1, 2)
    class Sine(nn.Linear):
        def __init__(self, a, b, bound):
            super().__init__(a, b)
            nn.init.uniform_(self.weight, -bound, bound)

        def forward(self, x): return torch.sin(8*super().forward(x))
    model = nn.Sequential(Sine(2, 48, .5), Sine(48, 48, math.sqrt(6/48)/8), nn.Linear(48, 1))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    te = arm(model, optimizer=opt)
    losses = plain(te, opt, 120, lambda: F.mse_loss(model(at)[:, 0], picture))
    te.close()
    fell(losses, .1)


@is_healthy
def decayed_by_a_lot(arm):
    "Grokking: sums modulo 13, with a weight decay so large that weights shrink long after the loss has fallen"
    torch.manual_seed(30)
    a,b = torch.meshgrid(torch.arange(13), torch.arange(13), indexing='ij')
    x,y = torch.stack([a, b], -1).view(-1, 2),((a+b)%13).view(-1)
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed,self.net = nn.Embedding(13, 32),nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 13))

        def forward(self, x): return self.net(self.embed(x).flatten(1))
    model = Sums()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1.)
    te = arm(model, optimizer=opt)
    losses = plain(te, opt, 200, lambda: F.cross_entropy(model(x), y))
    te.close()
    fell(losses, .1)
