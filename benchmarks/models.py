"Models and trainings that the benchmark measures."
import ctypes
from functools import partial
from time import process_time

import torch
import torch.nn.functional as F
from torch import nn

from .timing import seconds


class AlexNet(nn.Module):
    "AlexNet, with the same layers as in torchvision."
    def __init__(self, classes=1000):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(256*6*6, 4096), nn.ReLU(inplace=True),
            nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, classes))

    def forward(self, x): return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def alexnet(batch=8):
    "Return AlexNet and a function that computes its loss on one batch."
    model,x,y = AlexNet(),torch.randn(batch, 3, 224, 224),torch.randint(1000, (batch,))
    return model, lambda: F.cross_entropy(model(x), y)


class BasicBlock(nn.Module):
    "Block of two convolutions with a skip connection around them."
    def __init__(self, before, width, stride):
        super().__init__()
        self.conv1,self.bn1 = nn.Conv2d(before, width, 3, stride, 1, bias=False),nn.BatchNorm2d(width)
        self.conv2,self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False),nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)) if stride>1 or before!=width else None

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet18(nn.Sequential):
    "ResNet-18, with the widths and depths of the paper by He et al., 2016."
    def __init__(self, classes=10):
        widths,before,layers = (64, 128, 256, 512),64,[]
        for i,w in enumerate(widths):
            layers += [BasicBlock(before, w, 2 if i else 1), BasicBlock(w, w, 1)]
            before = w
        super().__init__(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), *layers,
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))

    def forward(self, x):
        for m in self: x = m(x)
        return x


def resnet18(batch=8, size=112):
    "Return ResNet-18 and a function that computes its loss on one batch of images."
    model,x,y = ResNet18(),torch.randn(batch, 3, size, size),torch.randint(10, (batch,))
    return model, lambda: F.cross_entropy(model(x), y)


def small_cnn(batch=32):
    "Return a CNN of 10 modules for images of 28 x 28 pixels, and a function that computes its loss on one batch."
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    x,y = torch.randn(batch, 1, 28, 28),torch.randint(10, (batch,))
    return model, lambda: F.cross_entropy(model(x), y)


def gpt2(width=256, layers=4, sequences=4, tokens=128):
    "Return a GPT-2 (3.7 million parameters at width 256), and a function for its loss on `sequences` sequences of `tokens` tokens."
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(vocab_size=2000, n_positions=128, n_embd=width, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0))
    x = torch.randint(2000, (sequences, tokens))
    return model, lambda: F.cross_entropy(model(x, use_cache=False).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def mixtral(width=256, sequences=4, tokens=128):
    "Return a Mixtral with 4 layers of 8 experts, and a function for its loss on `sequences` sequences of `tokens` tokens."
    from transformers import MixtralConfig, MixtralForCausalLM
    model = MixtralForCausalLM(MixtralConfig(vocab_size=2000, hidden_size=width, intermediate_size=2*width, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=8, max_position_embeddings=tokens))
    x = torch.randint(2000, (sequences, tokens))
    return model, lambda: F.cross_entropy(model(x, use_cache=False).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def gpt2_small(compiled=False, batch=8, tokens=1024):
    "Return GPT-2 small (124 million random parameters) on the GPU, and a function for its loss under autocast to bfloat16."
    from transformers import GPT2Config, GPT2LMHeadModel
    with torch.device('cuda'): model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0))
    if compiled: model.compile()
    x = torch.randint(50_257, (batch, tokens), device='cuda')
    def loss():
        with torch.autocast('cuda', dtype=torch.bfloat16):
            return F.cross_entropy(model(x, use_cache=False).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    return model, loss


def gpt2_small_shapes():
    "Return the shapes of the 148 weights of GPT-2 small, which have 124 million elements."
    block = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *12*block, (768,), (768,)]


class MLP(nn.Sequential):
    "An `nn.Sequential` with a `forward` of its own, because torch.compile skips torch's `forward` of a root module."
    def forward(self, x):
        for m in self: x = m(x)
        return x


def mlp(layers, width=8, batch=4):
    "Return an MLP of `layers` modules, in which linear and tanh alternate, and a function that computes its loss."
    model,x = MLP(*(nn.Linear(width, width) if i%2==0 else nn.Tanh() for i in range(layers))),torch.randn(batch, width)
    return model, lambda: model(x).square().mean()


def keep_memory():
    """Let the C library keep freed memory for later allocations.

    Otherwise the kernel allocates the gradients of AlexNet again in each step, which is a quarter of the step's time and most of its noise."""
    trim_threshold,mmap_max,top_pad = -1,-4,-2
    try: mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError): return # the C library is not glibc
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)
    mallopt(top_pad, 1<<26)


class Training:
    "Training loop of one model, with or without an armed `torchEmber`."
    def __init__(self,
        model, # Model to train
        loss, # Function that runs the model on a batch and returns the loss
        calls_step=True, # True to call `te.step()` in armed steps
        warm=1, # Number of steps before the measurement
        steps=1, # Number of steps per measurement
        opt=None, # Function that creates the optimizer from the parameters. If it is given, the optimizer ends the steps of `torchEmber`
        clock=process_time, # Clock of the measurement: CPU time of all threads, CPU time of this thread, or wall time
        waits=True, # True to include the time until the writer thread has written all rows
        **how # Options of `torchEmber`
    ):
        from torchember import torchEmber
        keep_memory()
        self.model,self.loss,self.calls_step,self.warm,self.steps,self.clock,self.waits = model,loss,calls_step,warm,steps,clock,waits
        self.opt = (opt or partial(torch.optim.SGD, lr=1e-4))(model.parameters())
        if opt: self.calls_step,how = False,how | {'optimizer': self.opt}
        self.te = torchEmber(model, **how)
        self.te.disarm()

    def step(self):
        loss = self.loss()
        self.opt.zero_grad()
        loss.backward()
        if self.calls_step and self.te.armed: self.te.step()
        self.opt.step()

    def measured(self):
        "Return the measured seconds per step."
        for _ in range(self.warm): self.step()
        self.te.t.file.flush()
        def run():
            for _ in range(self.steps): self.step()
            if self.waits: self.te.t.file.flush()
        return seconds(run, clock=self.clock)/self.steps

    def bare(self):
        self.te.disarm()
        return self.measured()

    def armed(self):
        self.te.arm()
        return self.measured()
