"`locate` runs a training step again, and names the operation that produced the first NaN or infinity"
import copy
import gc
import inspect
import math
import re
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as of_torch
from torch.optim import optimizer as of_optimizers
from torch.utils.checkpoint import checkpoint

from torchember import locate, torchEmber
from torchember.capture.events import Listener
from torchember.capture.forward import arm, disarm
from torchember.capture.tree import tracks
from torchember.health.locate import LocateResult

inf,nan = math.inf,math.nan


def line(of, text):
    "Return the number of the only line of a function or class that contains a text."
    lines,first = inspect.getsourcelines(of)
    [found] = [first+i for i,s in enumerate(lines) if text in s]
    return found


def told(got): return got.op, got.made, got.phase, got.path, got.kind


def at(got, of, text):
    "Return True if the result names this line of the function."
    return (got.file, got.line, text in got.text)==('test_locate.py', line(of, text), True)


def mlp(*inner): return nn.Sequential(nn.Linear(4, 8), *inner, nn.Linear(8, 3))


def batch(n=6): return torch.randn(n, 4), torch.randint(3, (n,))


# ---- faults in the forward pass

class Entropy(nn.Module):
    def __init__(self): super().__init__(); self.scores = nn.Linear(8, 5)

    def forward(self, x):
        p = self.scores(x).relu()
        plogp = p*p.log()
        return plogp


def test_log_of_zero_in_a_module_is_named():
    model,(x,y) = mlp(Entropy()),batch()
    model[2] = nn.Linear(5, 3)
    def step(): F.cross_entropy(model(x), y).backward()
    got = locate(step)
    assert told(got)==('aten.log', '-inf', 'forward', '1', 'Entropy') and at(got, Entropy, 'p.log()')
    [(name, v)] = got.inputs
    zeros = int((model[1].scores(model[0](x)).relu()==0).sum())
    assert (name, v['shape'], v['dtype'], v['low'], v['nan'], v['inf'])==('self', (6, 5), 'float32', 0, 0, 0) and v['high']>0
    assert got.count==got.output['minus']==zeros>0 and got.output['n']==30
    assert got.then.startswith('aten.mul turned this value into NaN, in the forward pass of `1` (Entropy), at test_locate.py:')
    assert got.reached[0]=='the loss' and 'the gradient of `0.weight`' in got.reached
    said = str(got)
    assert said.startswith(f'aten.log made {zeros} of 30 values -inf, '
        f'in the forward pass of `1` (Entropy), at test_locate.py:{got.line}.\n    plogp = p*p.log()\n')
    assert 'self: [6, 5] float32, 0 to ' in said


def test_log_of_zero_in_a_loss_has_no_module():
    model,(x,y) = mlp(),batch()
    def loss_of(out): return -(F.one_hot(y, 3)*(out*1000).softmax(-1).log()).sum()
    def step(): loss_of(model(x)).backward()
    got = locate(step)
    assert told(got)==('aten.log', '-inf', 'forward', None, None) and at(got, loss_of, 'def loss_of')
    assert 'outside of any module' in str(got)


def test_an_infinity_that_stays_infinite_is_named():
    p = torch.tensor([.5, 0.], requires_grad=True)
    losses = []
    def step():
        loss = -p.log().sum()
        losses.append(loss*2)
    got = locate(step)
    assert told(got)[:3]==('aten.log', '-inf', 'forward') and got.then is None and got.reached==['a scalar with a gradient']
    def step(): losses.append((-p.detach().log().sum()).item())
    assert locate(step).reached==['a number that Python read']
    def step(): return -p.log().sum()
    assert locate(step).reached[0]=='the return value of the step'


def test_a_loss_module_has_no_path():
    class Ratio(nn.Module):
        def forward(self, out): return (out/out.detach().relu()).mean()
    model,(x,_),loss = mlp(),batch(),Ratio()
    def step(): loss(model(x)).backward()
    got = locate(step)
    assert got.op=='aten.div' and got.made in ('-inf', 'inf') and (got.path, got.kind)==('', 'Ratio')
    assert 'in the forward pass of a Ratio' in str(got)


def test_zero_divided_by_zero_is_named():
    class Standardize(nn.Module):
        def forward(self, x): return (x-x.mean(0))/x.std(0)
    model,(x,y) = nn.Sequential(nn.Sequential(Standardize()), nn.Linear(4, 3)),batch()
    x[:, 2] = 1
    def step(): F.cross_entropy(model(x), y).backward()
    got = locate(step)
    assert told(got)==('aten.div', 'NaN', 'forward', '0.0', 'Standardize') and got.count==6 and at(got, Standardize, 'x.std(0)')
    assert [n for n,_ in got.inputs]==['self', 'other'] and got.inputs[1][1]['low']==0


def softmax_by_hand(x):
    e = x.exp()
    return e/e.sum(-1, keepdim=True)


def test_an_exp_that_overflows_is_named():
    model,(x,y) = mlp(),batch()
    def step(): (softmax_by_hand(model(x)*1000)*F.one_hot(y, 3)).sum().backward()
    got = locate(step)
    assert told(got)==('aten.exp', 'inf', 'forward', None, None) and at(got, softmax_by_hand, 'x.exp()') and 'aten.div turned this value into NaN' in got.then


def test_an_overflow_of_float16_is_named():
    class Square(nn.Module):
        def forward(self, x): return x*x
    model,(x,_) = nn.Sequential(nn.Linear(4, 4), Square(), nn.LayerNorm(4)).half(),batch()
    def step(): model(x.half()*3000).float().square().sum().backward()
    got = locate(step)
    assert told(got)==('aten.mul', 'inf', 'forward', '1', 'Square') and got.output['dtype']=='float16' and 'layer_norm turned this value into NaN' in got.then
    assert 256<=got.inputs[0][1]['high']<65504


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_an_overflow_under_autocast_is_named(dtype):
    model,(x,y) = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)),batch()
    nn.init.constant_(model[1].weight, 200. if dtype is torch.float16 else 2e38)
    def step():
        with torch.autocast('cpu', dtype=dtype): out = model(x.abs()*1000+1000)
        F.cross_entropy(out.float(), y).backward()
    nn.init.constant_(model[0].weight, 1.)
    got = locate(step)
    assert (got.made, got.phase, got.path, got.kind)==('inf', 'forward', '1', 'Linear') and got.op=='aten.addmm'
    assert got.output['dtype']==str(dtype)[6:]


def test_the_growing_loop_of_a_recurrent_network_is_named():
    class Recurrent(nn.Module):
        def __init__(self): super().__init__(); self.cell,self.head = nn.RNNCell(4, 4, nonlinearity='relu'),nn.Linear(4, 3)
        def forward(self, x):
            h = torch.zeros(x.shape[0], 4)
            for _ in range(200): h = self.cell(x, h)
            return self.head(h)
    model,(x,y) = Recurrent(),batch()
    nn.init.constant_(model.cell.weight_hh, 1.)
    def step(): F.cross_entropy(model(x), y).backward()
    got = locate(step)
    assert got.made=='inf' and (got.phase, got.path, got.kind)==('forward', 'cell', 'RNNCell') and got.file=='test_locate.py'
    assert at(got, Recurrent, 'h = self.cell(x, h)')


def test_a_recurrent_module_of_torch_is_named():
    model,x = nn.LSTM(4, 4, proj_size=2),torch.randn(5, 2, 4)
    with torch.no_grad(): model.weight_hr_l0.fill_(1e38)
    x = x.abs()*100
    def step(): (model(x)[0]*1e3).sum().backward()
    got = locate(step)
    assert got and got.made in ('inf', '-inf', 'NaN') and got.path in ('', None)


# ---- faults in the backward pass

def test_the_derivative_of_a_root_at_zero_is_named():
    class Norm(nn.Module):
        def forward(self, x): return x.square().sum(-1).sqrt()
    model,(x,_) = nn.Sequential(nn.Linear(4, 4), Norm()),batch()
    for p in model.parameters(): nn.init.zeros_(p)
    def step(): model(x).sum().backward()
    got = locate(step)
    assert told(got)==('aten.div', 'inf', 'backward', '1', 'Norm') and got.node=='SqrtBackward0' and at(got, Norm, '.sqrt()')
    assert got.count==6 and 'in the backward pass (SqrtBackward0) of test_locate.py:' in str(got)
    assert 'aten.mul turned this value into NaN, in the backward pass (PowBackward0)' in got.then
    assert {'the gradient of `0.bias`', 'the gradient of `0.weight`'}=={*got.reached}


def test_the_gradient_of_the_unused_branch_of_where_is_named():
    w = nn.Parameter(torch.tensor([0., 1.]))
    def step(): torch.where(w>0, w.log(), 0.).sum().backward()
    got = locate(step) # `where` drops the -inf of the forward pass, so the fault begins in the backward pass
    assert told(got)[:3]==('aten.div', 'NaN', 'backward') and got.node=='LogBackward0' and got.reached==['the gradient of a tensor of [2]']


def test_the_line_is_that_of_the_operation_with_a_gradient():
    w = nn.Parameter(torch.zeros(2))
    def step():
        root = w.sqrt()
        with torch.no_grad(): w.add(1)
        root.sum().backward()
    assert at(locate(step), step, 'w.sqrt()')


def test_a_backward_of_the_user_is_named():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x+1

        @staticmethod
        def backward(ctx, g): return g/torch.zeros_like(g)
    class Calls(nn.Module):
        def forward(self, x): return Bad.apply(x)
    model,(x,y) = mlp(Calls()),batch()
    def step(): F.cross_entropy(model(x), y).backward()
    got = locate(step)
    assert (got.op, got.phase, got.path, got.kind, got.node)==('aten.div', 'backward', '1', 'Calls', 'BadBackward') and at(got, Bad, 'zeros_like')


def test_a_hook_on_a_tensor_is_named():
    model,(x,y) = mlp(),batch()
    def spoil(g): return g*1e38*1e38
    def step():
        h = model[0](x)
        h.register_hook(spoil)
        F.cross_entropy(model[1](h), y).backward()
    got = locate(step, model)
    assert (got.op, got.phase)==('aten.mul', 'backward') and at(got, spoil, '1e38')


# ---- faults under activation checkpointing and in compiled code

class Block(nn.Module):
    def __init__(self, bad): super().__init__(); self.inner,self.bad = nn.Linear(8, 8),bad

    def forward(self, x):
        h = self.inner(x)
        return h/(h-h) if self.bad else h


class Checkpointed(nn.Module):
    def __init__(self, reentrant, bad=True):
        super().__init__()
        self.first,self.block,self.last,self.reentrant = nn.Linear(4, 8),Block(bad),nn.Linear(8, 3),reentrant

    def forward(self, x): return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize('reentrant', [False, True])
def test_an_operation_in_a_checkpointed_block_is_named(reentrant):
    model,(x,y) = Checkpointed(reentrant),batch()
    def step(): F.cross_entropy(model(x), y).backward()
    got = locate(step)
    assert got.op=='aten.div' and (got.phase, got.path, got.kind)==('forward', 'block', 'Block') and at(got, Block, 'h/(h-h)')
    assert not locate(lambda: F.cross_entropy(Checkpointed(reentrant, False)(x), y).backward())


@pytest.mark.parametrize('reentrant', [False, True])
def test_an_operation_in_the_backward_of_a_checkpointed_block_is_named(reentrant):
    class Root(nn.Module):
        def forward(self, x): return (x-x.detach()).abs().sqrt()
    model,(x,y) = Checkpointed(reentrant),batch()
    model.block = Root()
    def step(): F.cross_entropy(model(x), y).backward()
    got = locate(step)
    assert (got.phase, got.node, got.path, got.kind)==('backward', 'SqrtBackward0', 'block', 'Root') and at(got, Root, 'sqrt()')


def test_an_operation_that_fails_only_when_recomputed_is_named():
    "Recomputation in the backward pass gives other values than the forward pass"
    class Worse(nn.Module):
        n = 0
        def forward(self, x):
            self.n += 1
            return (x/(2-self.n)).exp()
    model,(x,y) = Checkpointed(False),batch()
    model.block = Worse()
    def step(): F.cross_entropy(model(x), y).backward()
    got = locate(step)
    assert got.op=='aten.div' and (got.phase, got.path, got.kind)==('forward', 'block', 'Worse') and at(got, Worse, 'exp()')


def test_a_compiled_model_runs_uncompiled():
    model,(x,y) = mlp(Block(True)),batch()
    compiled = []
    fast = torch.compile(model, backend=lambda graph, inputs: compiled.append(graph) or graph)
    def step(): F.cross_entropy(fast(x), y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        got = locate(step)
    assert not compiled
    assert got.op=='aten.div' and (got.path, got.kind)==('1', 'Block') and at(got, Block, 'h/(h-h)')
    assert got.notes==['Code under torch.compile ran without compilation.'] and got.notes[0] in str(got)
    assert locate(lambda: model(x)).notes==[]


# ---- faults in the optimizer step

@pytest.mark.parametrize('foreach', [False, True])
def test_an_update_that_overflows_is_named(foreach):
    model,(x,y) = mlp(),batch()
    opt = torch.optim.SGD(model.parameters(), lr=1e38, foreach=foreach)
    def step():
        (F.cross_entropy(model(x), y)*1e3).backward()
        opt.step()
    got = locate(step)
    assert (got.made in ('inf', '-inf'), got.phase)==(True, 'optimizer') and got.tensor=='`0.weight`' and at(got, step, 'opt.step()')
    assert got.op==('aten._foreach_add_' if foreach else 'aten.add_') and 'in the optimizer step of SGD' in str(got) and '`0.weight`' in got.reached


@pytest.mark.parametrize('foreach', [False, True])
def test_adam_without_eps_is_named(foreach):
    model,(x,y) = mlp(),batch()
    model[1].weight.requires_grad_(True)
    opt = torch.optim.Adam(model.parameters(), eps=0., foreach=foreach)
    def step():
        opt.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        model[1].bias.grad.zero_()
        opt.step()
    got = locate(step)
    assert (got.made, got.phase, got.tensor)==('NaN', 'optimizer', '`1.bias`') and 'addcdiv' in got.op and got.count==3


@pytest.mark.parametrize('layer', [0, 1])
def test_weights_that_were_bad_before_the_step_are_named(layer):
    model,(x,y) = mlp(),batch()
    with torch.no_grad(): model[layer].weight.zero_()[0, 0] = inf # zeros and one infinity, like a mask
    def step(): F.cross_entropy(model(x), y).backward()
    got = locate(step)
    assert (got.phase, got.made, got.count, got.tensor, got.op)==('before', 'inf', 1, f'`{layer}.weight`', 'aten.addmm')
    assert (got.path, got.kind)==(str(layer), 'Linear')
    n = model[layer].weight.numel()
    assert str(got).startswith(f'1 of {n} values of `{layer}.weight` are inf, but no operation of this step wrote these values. '
        'The first operation that reads this tensor is aten.addmm')


def test_an_optimizer_state_that_was_bad_before_the_step_is_named():
    model,(x,y) = mlp(),batch()
    opt = torch.optim.Adam(model.parameters())
    def step():
        F.cross_entropy(model(x), y).backward()
        opt.step()
    step()
    opt.state[model[0].bias]['exp_avg_sq'][2] = nan
    got = locate(step)
    assert (got.phase, got.tensor, got.count)==('before', '`exp_avg_sq` of Adam for `0.bias`', 1)


@pytest.mark.parametrize('row', [0, 5])
def test_bad_data_are_named_by_their_variable(row):
    model,(x,y) = mlp(),batch()
    x[row, 1] = nan
    def step():
        for part in x.split(2): F.cross_entropy(model(part), y[:2]).backward()
    got = locate(step)
    assert (got.phase, got.made, got.count, got.tensor, got.path)==('before', 'NaN', 1, '`x`', '0')


def test_bad_data_in_a_dict_are_named_by_their_key():
    model,(_,y) = mlp(),batch()
    def loaded(): return {'x': torch.from_numpy(np.float32([[inf], *[[v] for v in range(5)]])+np.zeros((6, 4), np.float32)), 'y': y}
    def step():
        batch = loaded()
        F.cross_entropy(model(batch['x']), batch['y']).backward()
    assert locate(step).tensor=="`batch['x']`"


def test_data_similar_to_a_mask_are_a_fault():
    model,(x,y) = mlp(),batch()
    x.zero_()[0, :2] = torch.tensor([inf, -inf])
    got = locate(lambda: F.cross_entropy(model(x), y).backward())
    assert (got.phase, got.made, got.tensor)==('before', 'inf', '`x`')


def test_a_nan_in_the_code_is_named():
    got = locate(lambda: torch.ones(2)*nan)
    assert (got.op, got.made, got.count, got.reached)==('aten.mul', 'NaN', 2, ['the return value of the step'])


# ---- intended infinities, such as masks

def causal(x, mask=None):
    s = x@x.transpose(-1, -2)
    return (s.masked_fill(torch.ones(s.shape).triu(1)>0, -inf) if mask is None else s+mask).softmax(-1)@x


@pytest.mark.parametrize('mask', [None, torch.full((6, 6), -inf).triu(1), torch.ones(6, 6).tril().log()])
def test_a_mask_is_no_fault(mask):
    model,(x,y) = mlp(),batch()
    opt = torch.optim.Adam(model.parameters())
    def step():
        F.cross_entropy(causal(model(x), mask), y).backward()
        opt.step()
    got = locate(step)
    assert not got and got.op is None and got.reached==() and str(got).startswith('No result of this step has a NaN or infinity.')


@pytest.mark.parametrize('make', [lambda: torch.full((6, 6), -inf).triu(1),
    lambda: torch.zeros(6, 6).masked_fill_(torch.ones(6, 6).triu(1)>0, -inf),
    lambda: torch.where(torch.ones(6, 6).tril()>0, 0., -inf), lambda: torch.ones(6, 6).tril().log(), lambda: nn.Transformer.generate_square_subsequent_mask(6)])
def test_a_mask_made_in_the_step_is_no_fault(make):
    model,(x,y) = mlp(),batch()
    assert not locate(lambda: F.cross_entropy(causal(model(x), make()), y).backward())


def test_masked_attention_of_torch_is_no_fault():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True)
    x = torch.randn(2, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    assert not locate(lambda: model(x, src_mask=mask, is_causal=True).square().mean().backward())
    assert not locate(lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=mask==0).sum())
    model.norm1.weight.data.fill_(1e38)
    got = locate(lambda: model(x*1e4, src_mask=mask, is_causal=True).square().mean().backward())
    assert got.made!='-inf' or not got.op.startswith('aten.masked_fill')


def test_a_row_with_all_entries_masked_is_a_fault():
    model,(x,y) = mlp(),batch()
    def attend(x):
        s = x@x.T
        s = s.masked_fill(torch.ones(6, 6).triu()>0, -inf)
        return s.softmax(-1)@x
    def step(): F.cross_entropy(attend(model(x)), y).backward()
    got = locate(step)
    assert told(got)==('aten._softmax', 'NaN', 'forward', None, None) and at(got, attend, 'softmax(-1)') and got.count==6
    assert re.search('This infinity looks intended: aten.masked_fill made -inf outside of any module, at test_locate.py:', str(got))


def test_a_row_that_a_buffer_masks_is_a_fault():
    class Attend(nn.Module):
        def __init__(self): super().__init__(); self.register_buffer('mask', torch.full((6, 6), -inf).triu())
        def forward(self, x): return (x@x.T+self.mask).softmax(-1)@x
    model,(x,y) = mlp(Attend()),batch()
    got = locate(lambda: F.cross_entropy(model(x), y).backward())
    assert told(got)==('aten._softmax', 'NaN', 'forward', '1', 'Attend') and 'the buffer `1.mask` has -inf' in str(got)


def test_a_fault_after_a_mask_is_named():
    "A mask with -inf is intended, and it does not hide an overflow of the logits"
    model,(x,_),y = mlp().half(),batch(),torch.zeros(6).long()
    def attend(x):
        s = (x*300)@(x*300).T
        return causal(s)
    def step(): F.cross_entropy(attend(model(x.half()*10)).float(), y).backward()
    got = locate(step)
    assert (got.op, got.made in ('inf', '-inf'))==('aten.mm', True) and at(got, attend, 's = (x*300)')


def test_a_mask_in_a_module_is_no_fault():
    class Attend(nn.Module):
        def __init__(self): super().__init__(); self.register_buffer('mask', torch.zeros(6, 6))
        def forward(self, x):
            self.mask = torch.full((6, 6), -inf).triu(1)
            return causal(x, self.mask)
    model,(x,y) = mlp(Attend()),batch()
    assert not locate(lambda: F.cross_entropy(model(x), y).backward())


def test_masked_logits_are_no_fault():
    model,(x,_) = mlp(),batch()
    class Masked(nn.Module):
        def forward(self, x): return x.masked_fill(torch.arange(3)==0, -inf)
    model.append(Masked())
    assert not locate(lambda: model(x))
    assert not locate(lambda: F.cross_entropy(model(x), torch.ones(6).long()).backward())


def test_an_infinity_that_disappears_is_no_fault():
    w = nn.Parameter(torch.tensor([200., 1.]))
    got = locate(lambda: (1/(1+w.detach().exp())+w).sum().backward())
    assert not got and 'inf occurred, but is in no result of the step: aten.exp made 1 of 2 values inf, outside of any module' in got.notes[0]


def test_a_learning_rate_of_nan_is_named():
    w = nn.Parameter(torch.ones(3))
    opt = torch.optim.SGD([w], lr=.1)
    opt.param_groups[0]['lr'] = nan
    def step():
        w.sum().backward()
        opt.step()
    got = locate(step)
    assert (got.made, got.phase, got.tensor)==('NaN', 'optimizer', '`parameter 0 of SGD`')


def test_an_operation_on_nested_tensors_is_named():
    layer,x = nn.Linear(4, 4),torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    def step(): (layer(x)/0).values().sum().backward()
    got = locate(step)
    assert (got.op, got.phase)==('aten.div', 'forward') and at(got, step, '/0')


def test_a_closure_counts_as_forward():
    model,(x,y) = mlp(),batch()
    opt = torch.optim.LBFGS(model.parameters())
    def closure():
        loss = (F.cross_entropy(model(x), y)-1e9).log()
        loss.backward()
        return loss
    def step(): opt.step(closure)
    got = locate(step)
    assert (got.op, got.made, got.phase)==('aten.log', 'NaN', 'forward') and at(got, closure, '.log()')


def test_a_gradient_of_a_gradient_is_located():
    model,(x,_) = mlp(),batch()
    def penalty():
        z = x.clone().requires_grad_()
        [g] = torch.autograd.grad(model(z).square().sum(), z, create_graph=True)
        return (g-g.detach()).square().sum(1).sqrt()
    def step(): penalty().sum().backward()
    got = locate(step)
    assert (got.op, got.made, got.phase, got.node)==('aten.div', 'inf', 'backward', 'SqrtBackward0') and at(got, penalty, 'sqrt()')


def test_an_infinite_learning_rate_is_named():
    "An infinity in an optimizer is never intended"
    w = nn.Parameter(torch.ones(3))
    opt = torch.optim.SGD([w], lr=inf)
    def step():
        w.sum().backward()
        opt.step()
        return (w-w).detach()
    got = locate(step)
    assert (got.op, got.made, got.phase)==('aten.add_', '-inf', 'optimizer') and 'the return value of the step' in got.reached


def test_each_tensor_of_a_list_has_its_own_origin():
    a,b = nn.Parameter(torch.ones(2)),nn.Parameter(torch.ones(3))
    opt = torch.optim.SGD([a, b], lr=1e38, foreach=True)
    a.grad,b.grad = torch.full((2,), 1e38),torch.tensor([nan, 1., 1.])
    got = locate(opt.step)
    assert (got.phase, got.count, got.tensor)==('before', 1, 'the gradient of `parameter 1 of SGD`')
    # Parameter 0 is missing here: its infinity comes from the update, not from this NaN
    assert got.reached==['`parameter 1 of SGD`', 'the gradient of `parameter 1 of SGD`']
    for p in (a, b): p.data.fill_(1.)
    b.grad.fill_(1.)
    a.grad.fill_(1e38)
    got = locate(opt.step)
    assert (got.op, got.phase, got.tensor, got.made)==('aten._foreach_add_', 'optimizer', '`parameter 0 of SGD`', '-inf')


def test_a_bad_output_without_a_loss_is_named():
    model,(x,_) = mlp(Block(True)),batch()
    def step(): model(x)
    got = locate(step)
    assert got.op=='aten.div' and got.reached==['the output of a Sequential']


def test_an_intended_infinity_that_reaches_the_loss_is_named():
    model,(x,_) = mlp(),batch()
    def step(): model(x).masked_fill(torch.arange(3)==0, -inf).sum().backward()
    got = locate(step)
    assert (got.op, got.made, got.reached)==('aten.masked_fill', '-inf', ['the loss']) and at(got, step, 'masked_fill')


# ---- uninitialized memory

def test_uninitialized_memory_is_named(monkeypatch):
    x = torch.ones(4, requires_grad=True)
    def step():
        out = torch.empty(4)
        torch.from_numpy(out.numpy())[:] = nan # Simulate uninitialized memory that contains NaN
        (out*x).sum().backward()
    got = locate(step)
    assert (got.phase, got.op, got.made)==('unwritten', 'aten.mul', 'NaN') and at(got, step, 'torch.empty(4)')


def test_overwritten_memory_counts_with_its_new_values():
    x = torch.ones(4, requires_grad=True)
    def step():
        out = torch.empty(4)
        out.numpy()[:] = nan
        out.copy_(torch.ones(4))
        (out*x).sum().backward()
    assert not locate(step)
    def step():
        out = torch.empty(4)
        out.numpy()[:] = nan
        torch.mul(x.detach(), 2, out=out)
        (out*x).sum().backward()
    assert not locate(step)
    def step():
        out = torch.empty(4)
        out.numpy()[:] = nan
        torch.div(x.detach(), 0, out=out)
        (out*x).sum().backward()
    got = locate(step)
    assert (got.op, got.made, got.phase)==('aten.div', 'inf', 'forward') and at(got, step, 'torch.div')


def test_a_fault_written_over_uninitialized_memory_is_named():
    x = torch.zeros(4)
    def step():
        out = torch.empty(4)
        out.numpy()[:] = nan
        return out.copy_(x/0)
    got = locate(step)
    assert (got.op, got.made, got.phase)==('aten.div', 'NaN', 'forward') and at(got, step, 'x/0')


def test_an_intended_infinity_written_over_memory_is_no_fault():
    def step():
        out = torch.empty(4)
        out.numpy()[:] = [inf, -inf, 0, 1] # Simulate uninitialized memory that contains infinities
        return out.copy_(torch.full((4,), -inf))
    assert not locate(step)


def test_memory_written_outside_of_torch_is_named():
    def step():
        h = torch.ones(3)+1
        h.numpy()[0] = nan
        return h*2
    got = locate(step)
    assert (got.op, got.phase, got.made, got.count, got.tensor)==('aten.mul', 'before', 'NaN', 1, '`h`')


def test_the_first_of_two_origins_in_one_storage_is_named():
    x = torch.zeros(2)
    def step():
        out = torch.zeros(4)
        out[:2] = x.log()
        out[2:] = (x+1)/x
        return out.sum()
    got = locate(step)
    assert (got.op, got.made)==('aten.log', '-inf') and 'aten.sum turned this value into NaN' in got.then


def test_in_place_operations_are_named():
    x = torch.tensor([1., 0., 3.])
    def step():
        h = x.clone()
        h[1:].log_()
        return h.sum()
    got = locate(step)
    assert (got.op, got.made, got.count)==('aten.log_', '-inf', 1) and at(got, step, 'log_()')
    [(name, v)] = got.inputs
    # Values of the tensor before the in-place operation
    assert (name, v['low'], v['high'], v['shape'])==('self', 0, 3, (2,))
    assert math.isinf(step())


# ---- a training step that raises an exception

def test_a_step_that_raises_is_located():
    def step(): raise KeyError('of the user')
    with pytest.raises(KeyError, match='of the user'): locate(step)
    w = nn.Parameter(torch.zeros(2))
    def step():
        loss = w.log().sum()
        if not loss.isfinite(): raise FloatingPointError('the loss is bad')
    got = locate(step)
    assert got.op=='aten.log' and got.notes==['The step raised FloatingPointError: the loss is bad'] and got.notes[0] in str(got)
    def step(): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): locate(step)


def test_a_harmless_infinity_is_not_blamed_for_an_exception():
    def step():
        (1/torch.tensor([200.]).exp()).sqrt()
        (torch.zeros(2)/torch.zeros(2)).add(1)
        raise FloatingPointError
    got = locate(step)
    assert (got.op, got.made, got.reached)==('aten.div', 'NaN', [])


def test_an_exception_of_anomaly_mode_becomes_a_note():
    w = nn.Parameter(torch.zeros(2))
    def step():
        with torch.autograd.detect_anomaly(): (w.sqrt()*0).sum().backward()
    with pytest.warns(UserWarning, match='Anomaly'): got = locate(step)
    assert (got.op, got.made, got.phase, got.node)==('aten.div', 'NaN', 'backward', 'SqrtBackward0') and got.notes[0].startswith('The step raised RuntimeError')


def test_an_argument_that_is_no_function_raises():
    with pytest.raises(TypeError, match=r'got a Tensor. Write locate\(lambda: step\(batch\)\)'): locate(torch.ones(1))


# ---- a training step with a loss scaler

def test_a_step_that_a_scaler_skips_is_located():
    model,(x,y) = mlp(),batch()
    opt,scaler = torch.optim.SGD(model.parameters(), lr=.1),torch.amp.GradScaler('cpu', init_scale=2.**120)
    def step():
        scaler.scale(F.cross_entropy(model(x), y)*1e3).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    before = copy.deepcopy(model.state_dict())
    got = locate(step)
    assert got and got.made in ('inf', '-inf', 'NaN') and all(torch.equal(v, before[k]) for k,v in model.state_dict().items())


# ---- `locate` leaves no changes behind

def state_of_all(model):
    return [(m.__dict__.copy(), [len(v) for k,v in m.__dict__.items() if k.endswith('_hooks')]) for m in model.modules()]


def global_hooks():
    return {k: len(v) for m in (of_torch, of_optimizers) for k,v in vars(m).items() if k.startswith('_global') and isinstance(v, dict)}


@pytest.mark.parametrize('fails', [None, ValueError, KeyboardInterrupt])
def test_locate_leaves_no_hooks_and_modes(fails):
    model,(x,y) = mlp(Block(False)),batch()
    opt = torch.optim.Adam(model.parameters())
    def step():
        F.cross_entropy(model(x), y).backward()
        opt.step()
        if fails: raise fails
    step_hooks = [len(d) for d in (opt._optimizer_step_pre_hooks, opt._optimizer_step_post_hooks)]
    try: step()
    except BaseException as e: assert type(e) is fails
    before,hooks = state_of_all(model),global_hooks()
    try: assert not locate(step)
    except BaseException as e: assert type(e) is fails
    assert global_hooks()==hooks and state_of_all(model)==before
    assert [len(d) for d in (opt._optimizer_step_pre_hooks, opt._optimizer_step_post_hooks)]==step_hooks
    assert torch._C._len_torch_dispatch_stack()==0 and torch.compiler.is_compiling() is False


def test_the_step_computes_the_same_numbers():
    "Under `locate`, a step gives the same weights and random numbers, equal to the last bit"
    x,y = batch()
    def trained(how):
        torch.manual_seed(3)
        model = mlp(nn.BatchNorm1d(8), nn.Dropout(.5))
        opt = torch.optim.Adam(model.parameters())
        def step():
            F.cross_entropy(model(x), y).backward()
            opt.step()
        how(step)
        ps = [*model.parameters()]
        return [*model.state_dict().values(), *(p.grad for p in ps), torch.rand(3), opt.state[ps[0]]['exp_avg'], torch.tensor([p._version for p in ps])]
    ends = [trained(how) for how in (lambda f: f(), locate)]
    assert all(torch.equal(a, b) for a,b in zip(*ends, strict=True))


@pytest.mark.parametrize('ends', [None, 'step'])
@pytest.mark.parametrize('given', [False, True])
def test_an_armed_ember_records_nothing(ends, given):
    model,(x,y) = mlp(Block(False)),batch()
    opt = torch.optim.Adam(model.parameters())
    def train(te, bad=False):
        loss = F.cross_entropy(model(x) if not bad else model(x)/(y-y)[:, None], y)
        te.log(loss=loss)
        loss.backward()
        opt.step()
        if ends: te.step()
        opt.zero_grad()
    ttypes = ('input', 'output', 'weight', 'weight_grad', *(('update',) if given else ()))
    te = torchEmber(model, optimizer=opt if given else None, ends=ends, ttypes=ttypes)
    train(te)
    before = copy.deepcopy([o.state_dict() for o in (model, opt)])
    rows,step = (te.t.barrier(), [*te.t.lines()])[1],te.recorder.step
    forwards = [m.forward for m in model.modules()]
    listener = te.recorder.watch and te.recorder.watch.listener
    got = te.locate(lambda: train(te, True))
    assert (te.recorder.watch and te.recorder.watch.listener) is listener
    assert got.op=='aten.div' and got.path is None and te.armed
    for o,d in zip((model, opt), before, strict=True): o.load_state_dict(d)
    assert (te.t.barrier(), [*te.t.lines()])[1]==rows and te.recorder.step==step and [m.forward for m in model.modules()]==forwards
    assert not {'log', 'boundary', 'log_model', 'add_rows'} & vars(te.recorder).keys()
    train(te)
    new = [r for r in (te.t.barrier(), [*te.t.lines()])[1][len(rows):]]
    assert {r['step'] for r in new}<={step, step+1} and len(new)>=len(rows)//2
    te.close()


def test_an_open_step_of_an_ember_stays_open():
    model,(x,_) = mlp(),batch()
    te = torchEmber(model, ends='step')
    model(x).sum().backward()
    te.locate(lambda: (model(x), te.step(), te.log_model()))
    assert te.recorder.step==0 and te.recorder.steps.opened
    te.step()
    assert {r['step'] for r in (te.t.barrier(), [*te.t.lines()])[1]}=={0}
    te.close()


def test_other_listeners_of_the_model_are_paused():
    class Spy(Listener):
        told = 0
        def call_begins(self, state, inputs, compiled=False): self.told += 1
    model,spy,(x,_) = mlp(),Spy(),batch()
    ts = tracks(model)
    arm(ts, spy)
    try:
        locate(lambda: model(x), model)
        assert spy.told==0
        model(x)
        assert spy.told==3
    finally: disarm(ts, spy)


def test_locate_keeps_no_model_alive():
    def found():
        model,(x,y) = mlp(Block(True)),batch()
        opt = torch.optim.SGD(model.parameters(), lr=.1)
        def step():
            F.cross_entropy(model(x), y).backward()
            opt.step()
        return locate(step), [weakref.ref(o) for o in (model, opt)]
    got,gone = found()
    gc.collect()
    assert got.op=='aten.div' and [r() for r in gone]==[None, None]


def test_the_path_begins_at_the_outermost_model():
    class Second(nn.Module):
        n = 0
        def forward(self, x):
            self.n += 1
            return x/(self.n-2)
    model,(x,_) = mlp(Second()),batch()
    def step(): return model[1](x), model(x)
    got = locate(step)
    assert (got.op, got.path, got.kind)==('aten.div', '1', 'Second')


def test_the_path_begins_at_the_given_model():
    model = nn.ModuleDict({'net': mlp(Block(True))})
    (x,y) = batch()
    def step(): F.cross_entropy(model['net'](x), y).backward()
    assert locate(step).path=='1' and locate(step, model).path=='net.1'
    te = torchEmber(model)
    assert te.locate(step).path=='net.1'
    te.close()


def test_the_result_is_true_only_if_something_was_found():
    assert isinstance(locate(lambda: None), LocateResult) and not locate(lambda: None)
