"""Program of `test_ranks.py` for 2 or 4 processes: train armed models in parallel. Rank 0 also trains each model alone, with plain hooks.

    python -m torch.distributed.run --nproc_per_node=4 ranked.py FOLDER CASE ..."""
import inspect
import json
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

from torchember import EmberWarning, torchEmber

warnings.simplefilter('ignore')
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
ttypes = ('input', 'output', 'output_grad', 'weight', 'weight_grad', 'optimizer', 'update')
recorded = ('shape', 'mean', 'std', 'min', 'max', 'rms', 'l1', 'l2', 'abs_mean', 'abs_min', 'abs_max', 'skew', 'kurtosis', 'rm4', 'rm8',
    'zero_frac', 'exponents')
steps,batch = 3,16
rank,world = int(os.environ['RANK']),int(os.environ['WORLD_SIZE'])
ddp = nn.parallel.DistributedDataParallel


# ---- reference: one process with plain hooks, numpy and scipy

def numbers(x):
    a,n = np.abs(x),x.size
    e = np.bincount(np.clip(np.frexp(x[x!=0])[1]-1+17, 0, 34), minlength=35)
    e[0] += (x==0).sum()
    spread = x.std()>1e-12*a.max()
    return dict(mean=x.mean(), std=x.std(ddof=1) if n>1 else None, min=x.min(), max=x.max(), rms=np.sqrt((x**2).mean()), l1=a.sum(), l2=np.sqrt((x**2).sum()),
        abs_mean=a.mean(), abs_min=a.min(), abs_max=a.max(), skew=stats.skew(x) if spread else None, kurtosis=stats.kurtosis(x) if spread else None,
        rm4=(a**4).mean()**.25, rm8=(a**8).mean()**.125, zero_frac=(x==0).mean(), exponents=e.tolist(), numel=n)


class Reference:
    "Computes the expected rows of a training in one process, from plain hooks"
    def __init__(self, model, opt):
        self.model,self.opt,self.rows,self.now,self.step,self.calls = model,opt,[],{},0,{}
        self.owner = {id(p): (path, i, n) for path,m in reversed(list(model.named_modules())) for i,(n,p) in enumerate(m._parameters.items()) if p is not None}
        model.register_forward_pre_hook(lambda m, a: self.calls.clear())
        for path,m in model.named_modules():
            names = list(inspect.signature(m.forward).parameters)
            m.register_forward_pre_hook(lambda m, a, k, path=path, names=names: self.enter(path, {**dict(zip(names, a, strict=False)), **k}), with_kwargs=True)
            m.register_forward_hook(lambda m, a, y, path=path: self.leave(path, y))

    def add(self, path, ttype, tname, x, call=0):
        self.now.setdefault((path, ttype, tname, call), []).append(x.detach().double().reshape(-1).numpy().copy())

    def enter(self, path, given):
        self.calls[path] = self.calls.get(path, -1)+1
        for n,x in given.items():
            if torch.is_tensor(x): self.add(path, 'input', n, x, self.calls[path])

    def leave(self, path, y):
        if not torch.is_tensor(y): return
        call = self.calls[path]
        self.add(path, 'output', 'output_0', y, call)
        if y.requires_grad: y.register_hook(lambda g: self.add(path, 'output_grad', 'output_0', g, call))

    def over(self):
        "End a step: store weights and gradients, run the optimizer step, then store updates and optimizer states."
        old = {p: p.detach().clone() for p in self.model.parameters()}
        for p in old:
            path,i,_ = self.owner[id(p)]
            self.add(path, 'weight', f'weight_{i}', p)
            if p.grad is not None: self.add(path, 'weight_grad', f'grad_{i}', p.grad)
        self.opt.step()
        for p,o in old.items():
            path,i,_ = self.owner[id(p)]
            self.add(path, 'update', f'update_{i}', p.detach()-o)
            for k,v in self.opt.state.get(p, {}).items():
                if torch.is_tensor(v) and k!='step': self.add(path, 'optimizer', f'{k}_{i}', v)
        self.opt.zero_grad()
        self.rows += [dict(path=p, ttype=tt, tname=n, call=c, step=self.step, **numbers(np.concatenate(xs))) for (p,tt,n,c),xs in self.now.items()]
        self.now,self.step = {},self.step+1


def adam(model): return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)


def reference(make, losses):
    "Train in one process, and return the expected rows. losses: (model, step) -> losses whose gradients are added"
    if rank: return
    m = make()
    r = Reference(m, adam(m))
    for s in range(steps):
        for loss in losses(m, s): loss.backward()
        r.over()
    (folder/f'{name}.jsonl').write_text(''.join(json.dumps(row)+'\n' for row in r.rows))


def train(net, opt, losses, **how):
    "Train an armed model on each rank. losses: as in `reference`"
    te = torchEmber(net, optimizer=opt, ttypes=ttypes, name=name, home=folder, on_error='raise', **{'stats': recorded, **how})
    for s in range(steps):
        for loss in losses(net, s): loss.backward()
        opt.step()
        opt.zero_grad()
        te.log(loss=loss.item(), done=s+1)
    te.close()


# ---- models and their data

class MLP(nn.Module):
    def __init__(self, sizes=(20, 37, 23, 5)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a,b in zip(sizes, sizes[1:], strict=False))
        self.act = nn.ReLU()

    def forward(self, x):
        for i,l in enumerate(self.layers): x = self.act(l(x)) if i+1<len(self.layers) else l(x)
        return x


class Attention(nn.Module):
    def __init__(self, d, head):
        super().__init__()
        self.head = head
        self.q,self.k,self.v,self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x):
        b,t,_ = x.shape
        q,k,v = (l(x).view(b, t, -1, self.head).transpose(1, 2) for l in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, d=24, head=6, wide=50):
        super().__init__()
        self.norm1,self.attn,self.norm2 = nn.LayerNorm(d),Attention(d, head),nn.LayerNorm(d)
        self.up,self.act,self.down = nn.Linear(d, wide),nn.GELU(),nn.Linear(wide, d)

    def forward(self, x):
        x = x+self.attn(self.norm1(x))
        return x+self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Module):
    vocab = 62

    def __init__(self, d=24, n=2):
        super().__init__()
        self.tok,self.blocks = nn.Embedding(self.vocab, d),nn.ModuleList(Block(d) for _ in range(n))
        self.norm,self.head = nn.LayerNorm(d),nn.Linear(d, self.vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for b in self.blocks: x = b(x)
        return self.head(self.norm(x))


def seeded(make):
    torch.manual_seed(0)
    return make()


def numbers_of(step, n=batch):
    g = torch.Generator().manual_seed(100+step)
    return torch.randn(n, 20, generator=g)*2+.5, torch.randn(n, 5, generator=g)


def words(step):
    g = torch.Generator().manual_seed(100+step)
    return tuple(torch.randint(0, GPT.vocab, (batch, 8), generator=g) for _ in range(2))


def part(xs, r, n): return [x.chunk(n)[r] for x in xs]
def error(m, x, y): return (m(x)-y).square().mean()
def surprise(m, x, y): return F.cross_entropy(m(x).flatten(0, 1), y.flatten())


# ---- trainings, one function for each case

cases = {}


def case(*worlds):
    def add(f):
        cases[f.__name__] = f,worlds
        return f
    return add


@case(2)
def replicated():
    net = ddp(seeded(GPT))
    train(net, adam(net), lambda m, s: [surprise(m, *part(words(s), rank, world))])
    reference(lambda: seeded(GPT), lambda m, s: [surprise(m, *words(s))])


def of_mlp(wrap, **how):
    net = wrap(seeded(MLP))
    train(net, adam(net), lambda m, s: [error(m, *part(numbers_of(s), rank, world))], **how)
    reference(lambda: seeded(MLP), lambda m, s: [error(m, *numbers_of(s))])


@case(2)
def composable():
    from torch.distributed._composable.replicate import replicate
    of_mlp(lambda m: replicate(m) or m)


@case(2)
def older_fsdp():
    from torch.distributed.fsdp import FullyShardedDataParallel
    def wrap(m): return FullyShardedDataParallel(m, use_orig_params=True, device_id=torch.device('cpu'))
    def each(m):
        for i,l in enumerate(m.layers): m.layers[i] = wrap(l)
        return wrap(m)
    of_mlp(each)


@case(4)
def older_hybrid():
    "FSDP1 with hybrid sharding: parameters are sharded in pairs of processes, and the pairs are replicas"
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))
    how = dict(use_orig_params=True, device_id=torch.device('cpu'), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    def wrap(m): return FullyShardedDataParallel(m, **how)
    def each(m):
        for i,l in enumerate(m.layers): m.layers[i] = wrap(l)
        return wrap(m)
    of_mlp(each)


def normed(): return nn.Sequential(nn.Linear(20, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))


@case(2)
def batch_norm():
    "Data-parallel training with batch normalization: each process normalizes its own half of the batch"
    net = ddp(seeded(normed))
    train(net, adam(net), lambda m, s: [error(m, *part(numbers_of(s), rank, world))])
    reference(lambda: seeded(normed), lambda m, s: [error(m, *part(numbers_of(s), r, world))/world for r in range(world)])


@case(4)
def two_models():
    "Ranks 0 and 1 train one model, ranks 2 and 3 another model with the same layer names. Their rows must not be merged"
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank//2)
    net = ddp(MLP(), process_group=pairs[rank//2])
    train(net, adam(net), lambda m, s: [error(m, *part(numbers_of(s), rank%2, 2))])


@case(2)
def few(): of_mlp(ddp, stats=['mean', 'var'])


@case(2)
def accumulated():
    "Accumulate gradients of three micro-batches; DDP averages over the ranks at the last micro-batch"
    def three(m, s):
        for i in range(3):
            with m.no_sync() if i<2 else nullcontext(): yield error(m, *part(numbers_of(10*s+i), rank, world))/3
    net = ddp(seeded(MLP))
    train(net, adam(net), three)
    reference(lambda: seeded(MLP), lambda m, s: [error(m, *numbers_of(10*s+i))/3 for i in range(3)])


@case(2)
def uneven():
    "Data-parallel training with uneven batches: in the last step, rank 0 has 8 samples and rank 1 has 3"
    def mine(s, r): return [x[8*r:8*r+(3 if r and s==steps-1 else 8)] for x in numbers_of(s)]
    net = ddp(seeded(MLP))
    train(net, adam(net), lambda m, s: [error(m, *mine(s, rank))])
    reference(lambda: seeded(MLP), lambda m, s: [error(m, *mine(s, r))/2 for r in range(2)])


def shard(make, losses, blocks, dims, **kwargs):
    mesh = init_device_mesh('cpu', tuple(dims.values()), mesh_dim_names=tuple(dims))
    net = seeded(make)
    for b in blocks(net): fully_shard(b, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, adam(net), lambda m, s: [losses(m, *part(kwargs['data'](s), rank, world))])
    reference(lambda: seeded(make), lambda m, s: [losses(m, *kwargs['data'](s))])


@case(2, 4)
# Layers with 37, 23 and 5 rows give uneven shards and an empty shard
def sharded(): shard(MLP, error, lambda m: m.layers, {'shard': world}, data=numbers_of)


@case(4)
def sharded_and_replicated(): shard(GPT, surprise, lambda m: m.blocks, {'replicate': 2, 'shard': 2}, data=words)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(vocab_size=GPT.vocab, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, attn_implementation='eager'))


@case(2)
def hugging_face(): shard(llama, lambda m, x, y: F.cross_entropy(m(input_ids=x, use_cache=False).logits.flatten(0, 1), y.flatten()), lambda m: m.model.layers,
    {'shard': 2}, data=words)


def bert():
    from transformers import BertConfig, BertForMaskedLM
    return BertForMaskedLM(BertConfig(vocab_size=GPT.vocab, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0, attn_implementation='eager'))


def t5():
    from transformers import T5Config, T5ForConditionalGeneration
    return T5ForConditionalGeneration(T5Config(vocab_size=GPT.vocab, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0,
        decoder_start_token_id=0))


def of_words(make, loss):
    "Train a language model on 8 samples of 6 words per process. Tensors without a batch dimension, such as positions, are equal on all"
    def six(s): return [x[:, :6] for x in words(s)]
    net = ddp(seeded(make))
    train(net, adam(net), lambda m, s: [loss(m, *part(six(s), rank, world))])
    reference(lambda: seeded(make), lambda m, s: [loss(m, *six(s))])


@case(2)
def hugging_face_bert(): of_words(bert, lambda m, x, y: F.cross_entropy(m(input_ids=x).logits.flatten(0, 1), y.flatten()))


@case(2)
def hugging_face_t5():
    "A T5 model, whose encoder, decoder and head share an embedding"
    of_words(t5, lambda m, x, y: F.cross_entropy(m(input_ids=x, decoder_input_ids=y, use_cache=False).logits.flatten(0, 1), y.flatten()))


def parallelize(m, mesh):
    parallelize_module(m, mesh, {'tok': RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), 'norm': SequenceParallel(),
        'head': ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
    for b in m.blocks:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        parallelize_module(b, mesh, {'norm1': SequenceParallel(), 'attn': whole, 'attn.q': ColwiseParallel(), 'attn.k': ColwiseParallel(),
            'attn.v': ColwiseParallel(), 'attn.o': RowwiseParallel(output_layouts=Shard(1)), 'norm2': SequenceParallel(),
            'up': ColwiseParallel(input_layouts=Shard(1)), 'down': RowwiseParallel(output_layouts=Shard(1))})


@case(2, 4)
def tensor_parallel():
    "Train with tensor parallelism, with four processes also with FSDP"
    mesh = init_device_mesh('cpu', (world//2, 2), mesh_dim_names=('shard', 'tp'))
    net = seeded(GPT)
    parallelize(net, mesh['tp'])
    if world>2:
        for b in net.blocks: fully_shard(b, mesh=mesh['shard'])
        fully_shard(net, mesh=mesh['shard'])
    train(net, adam(net), lambda m, s: [surprise(m, *part(words(s), mesh['shard'].get_local_rank(), world//2))])
    reference(lambda: seeded(GPT), lambda m, s: [surprise(m, *words(s))])


@case(2)
def compiled():
    "Train compiled models. With tensor parallelism, compiled code cannot report the layout of a `DTensor`; with FSDP, activations are plain tensors"
    mesh = init_device_mesh('cpu', (2,))
    for kind,wrap,backend in (('spread', lambda m: parallelize_module(m, mesh, {'0': ColwiseParallel(output_layouts=Replicate())}), 'aot_eager'),
            ('plain', lambda m: fully_shard(m, mesh=mesh), 'eager')):
        net = seeded(lambda: nn.Sequential(nn.Linear(20, 5)))
        wrap(net)
        opt = adam(net)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always', EmberWarning)
            te = torchEmber(net, optimizer=opt, ttypes=ttypes, name=f'{name}_{kind}', home=folder)
            error(torch.compile(net, backend=backend), *numbers_of(0)).backward()
            opt.step()
            te.close()
        (folder/f'{name}_{kind}.said{rank}').write_text(json.dumps([str(w.message) for w in said if w.category is EmberWarning]))


def cut(make, stages, schedule):
    "Split a model into pipeline stages by hand; each stage counts its layers from 0. stages: number -> slice, for this rank"
    from torch.distributed import pipelining
    mine = {i: nn.Sequential(*make()[of]) for i,of in stages.items()}
    net = nn.ModuleList(mine.values()) if len(mine)>1 else mine[rank]
    opt = adam(net)
    te = torchEmber(net, optimizer=opt, ttypes=ttypes, stats=recorded, name=name, home=folder, on_error='raise')
    n = len(stages)*world
    there = [pipelining.PipelineStage(m, i, n, torch.device('cpu')) for i,m in mine.items()]
    schedule = getattr(pipelining, schedule)(there if len(mine)>1 else there[0], 4, loss_fn=lambda y, t: (y-t).square().mean())
    for s in range(steps):
        x,t = numbers_of(s)
        schedule.step(target=t) if rank else schedule.step(x)
        opt.step()
        opt.zero_grad()
    te.close()
    reference(make, lambda m, s: [error(m, *numbers_of(s))])


def in_a_row(*sizes): return nn.Sequential(*(m for a,b in zip(sizes, sizes[1:], strict=False) for m in (nn.Linear(a, b), nn.Tanh())))


@case(2)
def pipeline(): cut(lambda: seeded(lambda: in_a_row(20, 37, 23, 5)), {rank: slice(2, None) if rank else slice(2)}, 'ScheduleGPipe')


@case(2)
def interleaved():
    "Interleaved pipeline: the processes have stages 0 and 2, 1 and 3. A stage called twice in a row has two calls in the pass"
    cut(lambda: seeded(lambda: in_a_row(20, 12, 11, 10, 5)), {i: slice(2*i, 2*i+2) for i in (rank, rank+2)}, 'ScheduleInterleaved1F1B')


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, got):
        ctx.of = sent,got
        y = x.new_empty(sum(got), x.shape[1])
        dist.all_to_all_single(y, x.contiguous(), got, sent)
        return y

    @staticmethod
    def backward(ctx, g):
        sent,got = ctx.of
        y = g.new_empty(sum(sent), g.shape[1])
        dist.all_to_all_single(y, g.contiguous(), sent, got)
        return y, None, None


class Experts(nn.Module):
    "A layer of `n` experts, distributed over `ways` processes, which count their experts from 0. The last expert gets no token"
    def __init__(self, d, n, ways=1, place=0):
        super().__init__()
        self.n,self.ways,self.own = n,ways,n//ways
        self.router = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList([nn.Linear(d, d) for _ in range(n)][place*self.own:(place+1)*self.own])

    def forward(self, x):
        p = self.router(x).softmax(-1)
        q = p.detach().clone()
        q[:, -1] = -1
        to = q.argmax(-1)
        order,counts = to.argsort(stable=True),torch.bincount(to, minlength=self.n)
        z,ids = x[order],to[order]
        if self.ways>1:
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            theirs = theirs.view(self.ways, self.own)
            sent,got = counts.view(self.ways, self.own).sum(1).tolist(),theirs.sum(1).tolist()
            z,ids = Exchange.apply(z, sent, got),torch.cat([torch.repeat_interleave(torch.arange(self.own), n) for n in theirs])
        y = torch.zeros_like(z)
        for i,e in enumerate(self.experts):
            at = (ids==i).nonzero()[:, 0]
            if len(at): y = y.index_copy(0, at, e(z[at]))
        if self.ways>1: y = Exchange.apply(y, got, sent)
        return x+torch.empty_like(x).index_copy(0, order, y)*p.gather(1, to[:, None])


class Mixture(nn.Module):
    def __init__(self, n, ways=1, place=0):
        super().__init__()
        self.inp,self.out = nn.Linear(20, 12),nn.Linear(12, 5)
        self.moe = Experts(12, n, ways, place)

    def forward(self, x): return self.out(self.moe(self.inp(x)))


@case(2, 4)
def experts():
    "Expert parallelism without a torch wrapper: the script averages the gradients itself"
    def mine(m, s):
        yield error(m, *part(numbers_of(s, 32), rank, world))
        for n,p in m.named_parameters():
            if p.grad is None: continue
            if 'experts' not in n: dist.all_reduce(p.grad)
            p.grad /= world
    net = seeded(lambda: Mixture(2*world, world, rank))
    train(net, adam(net), mine)
    reference(lambda: seeded(lambda: Mixture(2*world)), lambda m, s: [error(m, *numbers_of(s, 32))])


@case(2)
def drifted():
    "Replicas drift apart: the script changes a weight of rank 1 before step 1"
    def losses(m, s):
        if s==1 and rank: m.module.layers[1].weight.data[0, 0] += 1e-3
        return [error(m, *part(numbers_of(s), rank, world))]
    net = ddp(seeded(MLP))
    train(net, adam(net), losses)


@case(2)
def same():
    "A faulty sampler gives all ranks the same samples"
    net = ddp(seeded(MLP))
    train(net, adam(net), lambda m, s: [error(m, *numbers_of(s))])


@case(4)
def one_dies():
    "Rank 2 exits after step 0, without an error"
    net = seeded(MLP)
    opt = adam(net)
    te = torchEmber(net, optimizer=opt, ttypes=ttypes, name=name, home=folder)
    for s in range(steps):
        error(net, *part(numbers_of(s), rank, world)).backward()
        opt.step()
        opt.zero_grad()
        if rank==2 and s==0: te.t.barrier(); break
    if rank!=2: te.close()


if __name__=='__main__':
    folder = Path(sys.argv[1])
    dist.init_process_group('gloo')
    for name,(f,worlds) in cases.items():
        if world not in worlds or (sys.argv[2:] and name not in sys.argv[2:]): continue
        name = f'{name}_{world}'
        f()
        dist.barrier()
    dist.destroy_process_group()
