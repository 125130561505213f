"Labels are compared with the inputs of the model: inputs of all kinds, several losses, gradient accumulation, missing masks"
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchember import diagnose, torchEmber
from torchember.store.losses import read_loss_entries


class WithTokens(nn.Module):
    "A classifier that ignores its first input."
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, tokens, x): return self.out(x)


def ids(): return torch.tensor([[1, 2, 0], [1, 2, 3]])


odd_inputs = {'nested': lambda: torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([1, 2, 3])]),
    'jagged': lambda: torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([1, 2, 3])], layout=torch.jagged),
    'sparse': lambda: ids().to_sparse(), 'meta': lambda: ids().to('meta'), 'empty': lambda: ids()[:0], 'no positions': lambda: ids()[:, :0],
    'one position': lambda: ids()[:, :1], 'three dimensions': lambda: ids()[None], 'float': lambda: ids().float(), 'bool': lambda: ids()>1}


@pytest.mark.filterwarnings('ignore:The PyTorch API of nested tensors')
@pytest.mark.parametrize('kind', odd_inputs)
def test_inputs_that_are_no_tokens_change_nothing(kind):
    "The training continues, without a warning and without a fact."
    model = WithTokens()
    te,tokens = torchEmber(model, rules=None),odd_inputs[kind]()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        for _ in range(3):
            loss = F.cross_entropy(model(tokens, torch.randn(6, 4)), torch.randint(2, (6,)))
            te.log(loss=loss)
            loss.backward()
            te.step()
    te.close()
    entry, = read_loss_entries(te.t)
    assert entry['seen']==3 and 'next_tokens' not in entry
    assert not [w for w in seen if 'torchember' in str(w.message) or 'could not be measured' in str(w.message)]


class Attending(nn.Module):
    "A language model with one layer of attention. `causal`: True for a causal mask; `as_dict`: True to return a dict."
    def __init__(self, causal=False, as_dict=False):
        super().__init__()
        self.causal,self.as_dict = causal,as_dict
        self.embed,self.q,self.k,self.v,self.head = nn.Embedding(20, 16),nn.Linear(16, 16),nn.Linear(16, 16),nn.Linear(16, 16),nn.Linear(16, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        q,k,v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = self.head(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return {'logits': y, 'hidden': x} if self.as_dict else y


def train_attending(model, dtype=torch.float32, passes=1, lengths=(12,), each_pass=True, other_loss=False):
    "Train with `passes` passes in each step. `other_loss`: True to log another loss first."
    opt = torch.optim.SGD(model.to(dtype).parameters(), .1)
    te = torchEmber(model, optimizer=opt, attention=True)
    for step in range(5):
        for i in range(passes):
            x = torch.randint(20, (4, lengths[step%len(lengths)]+1))
            out = model(x[:, :-1])
            logits = out['logits'] if isinstance(out, dict) else out
            loss = F.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())/passes
            more = {'aux': F.cross_entropy(logits.float().mean(1), torch.zeros(4, dtype=torch.long))} if other_loss else {}
            if each_pass or i==passes-1: te.log(**more, loss=loss)
            loss.backward()
        opt.step()
        opt.zero_grad()
    te.close()
    return te


def found(te): return {f['rule'] for f in diagnose(te).to_dict('records')}


variants = {'plain': {}, 'bfloat16': dict(dtype=torch.bfloat16), 'accumulation': dict(passes=3), 'one log for three passes': dict(passes=3, each_pass=False),
    'two losses': dict(other_loss=True), 'other lengths': dict(lengths=(12, 15, 9))}


@pytest.mark.parametrize('as_dict', [False, True])
@pytest.mark.parametrize('variant', variants)
def test_a_missing_mask_is_found(variant, as_dict):
    torch.manual_seed(0)
    te = train_attending(Attending(as_dict=as_dict), **variants[variant])
    entry, = (e for e in read_loss_entries(te.t) if e['name']=='loss')
    assert entry['next_tokens']==1 and entry['lengths']==sorted(variants[variant].get('lengths', (12,)))
    assert 'future_attention' in found(te)


def test_a_causal_mask_is_no_finding():
    torch.manual_seed(0)
    te = train_attending(Attending(causal=True))
    assert read_loss_entries(te.t)[0]['next_tokens']==1
    assert 'future_attention' not in found(te)


def test_tokens_are_kept_only_until_four_batches_are_compared():
    model = Attending()
    te,kept = torchEmber(model),[]
    for _ in range(6):
        x = torch.randint(20, (4, 13))
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        kept.append(len(te.recorder.losses.tokens))
        te.log(loss=loss)
        te.step()
    te.close()
    assert kept==[1, 1, 1, 1, 0, 0]


def test_no_tokens_are_kept_after_a_run():
    model = Attending()
    te = torchEmber(model)
    model(torch.randint(20, (4, 13)))
    assert len(te.recorder.losses.tokens)==1
    te.close()
    assert te.recorder.losses.tokens==[]


def test_tokens_inside_vmap_are_not_used_after_it():
    "The tokens of the last call are those of one sample, which torch forbids to use after `vmap`."
    model = Attending()
    te,x = torchEmber(model, rules=None),torch.randint(20, (3, 4, 13))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        torch.func.vmap(lambda x: model(x))(x)
        assert te.recorder.losses.tokens==[]
        te.log(loss=F.cross_entropy(torch.randn(4*13, 20, requires_grad=True).log_softmax(1), x[0].flatten()))
    te.close()
    assert not [w for w in seen if 'could not be measured' in str(w.message)]


def test_a_mode_of_the_user_sees_no_operation_of_the_comparison():
    from torch.utils._python_dispatch import TorchDispatchMode
    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            self.names.append(str(f))
            return f(*args, **(kwargs or {}))
    def names(recorded):
        torch.manual_seed(0)
        model = Attending()
        te = torchEmber(model, ttypes=('output', 'target'), rules=None) if recorded else None
        x = torch.randint(20, (4, 13))
        with Names() as mode:
            loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            if te: te.log(loss=loss)
        if te: te.close()
        return {n for n in mode.names if 'eq' in n or 'ne.' in n or 'bitwise' in n or 'stack' in n}
    assert names(True)==names(False)


def test_nothing_is_compared_while_a_cuda_graph_is_captured(monkeypatch):
    "A replay of the graph would repeat the comparison."
    from torchember.recorder import losses
    tokens,found = torch.randint(20, (4, 12)),losses.NextTokens()
    monkeypatch.setattr(losses, 'is_being_captured', lambda kind: True)
    found.add([('ids', tokens)], tokens[:, 1:].flatten())
    assert not found.compared
    monkeypatch.undo()
    found.add([('ids', tokens)], tokens[:, 1:].flatten())
    assert found.compared==1
