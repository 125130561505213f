"Statistics of the residual stream are compared with hooks: Hugging Face and torch models, blocks that write in place, bad input."
import math
import warnings

import pytest
import torch
from same_training import train
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchember import EmberWarning, torchEmber


def stream(te):
    "Return the rows about the residual stream as a DataFrame."
    df = te.t.df
    return df[df.ttype=='stream'].reset_index(drop=True)


def first(o): return o if isinstance(o, torch.Tensor) else o[0]


def hooked(blocks):
    "Return a list that gets (input, output) of each call of these blocks."
    found,inputs = [],[]
    for b in blocks:
        b.register_forward_pre_hook(lambda m, args, kwargs: inputs.append((args[0] if args else kwargs['hidden_states']).detach().clone()),
            with_kwargs=True)
        b.register_forward_hook(lambda m, args, out: found.append((inputs.pop(), first(out).detach().clone())))
    return found


def compare(rows, calls):
    "Compare the rows with the tensors of the calls in the same order. The sample contains all tokens here."
    assert len(rows)==len(calls) and list(rows.depth)==list(range(len(calls)))
    for (_,row),(x,y) in zip(rows.iterrows(), calls, strict=True):
        x,y = x.double(),y.double()
        wanted = dict(rms=y.square().mean().sqrt(), rms_input=x.square().mean().sqrt(), added=(y-x).norm()/x.norm(), largest=y.abs().max(),
            median_ratio=y.abs().max()/y.abs().median())
        for column,want in wanted.items(): assert row[column]==pytest.approx(want.item(), rel=1e-5), column
        assert y.reshape(-1, y.shape[-2], y.shape[-1])[:, int(row.token), int(row.channel)].abs().max()==y.abs().max()


sizes = dict(vocab_size=60, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24, max_position_embeddings=64)
models = {'GPT2LMHeadModel': (dict(vocab_size=60, n_embd=16, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1), 'transformer.h'),
    'MixtralForCausalLM': (dict(sizes, num_key_value_heads=2, num_local_experts=4), 'model.layers'), 'BertForMaskedLM': (sizes, 'bert.encoder.layer')}


@pytest.mark.parametrize('name', models)
def test_numbers_equal_those_of_hooks(name):
    tf = pytest.importorskip('transformers')
    cls,(config,path) = getattr(tf, name),models[name]
    model = cls(cls.config_class(**config)).train()
    te = torchEmber(model, stream=True)
    calls = hooked(model.get_submodule(path))
    model(input_ids=torch.randint(3, 60, (3, 20)))
    te.close()
    assert list(stream(te).path)==[f'{path}.{i}' for i in range(3)]
    compare(stream(te), calls)


class Block(nn.Module):
    "A residual block with experts. With `how='in place'`, the block adds its result to the input tensor itself."
    def __init__(self, how='', size=8):
        super().__init__()
        self.how,self.norm = how,nn.LayerNorm(size)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(size, size), nn.Sequential(nn.Tanh())) for _ in range(2))

    def forward(self, x):
        y = self.norm(x*1) # x*1 is a copy, because the backward of the norm needs its unchanged input
        for e in self.experts: y = e(y)
        if self.how!='in place': return x+y
        return x.add_(y)


class Net(nn.Module):
    def __init__(self, *how, again=1):
        super().__init__()
        self.up,self.layers,self.again,self.checkpointed = nn.Linear(8, 8),nn.ModuleList(map(Block, how or ['']*3)),again,None
    def forward(self, x):
        x = self.up(x)
        for layer in [*self.layers]*self.again:
            x = layer(x) if self.checkpointed is None else checkpoint(layer, x, use_reentrant=self.checkpointed)
        return x


def test_blocks_that_write_in_place_and_their_experts():
    model = Net('', 'in place', '')
    te = torchEmber(model, stream=True)
    calls = hooked(model.layers)
    model(torch.randn(3, 12, 8))
    te.disarm()
    compare(stream(te), calls)
    # experts are not blocks of the residual stream, so they have no rows
    assert list(stream(te).path)==['layers.0', 'layers.1', 'layers.2'] and (stream(te).added>.1).all()


def test_convolutions_have_their_channels_first():
    def block(): return nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.Sequential(nn.BatchNorm2d(6), nn.Tanh()))
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Sequential(block(), block()))
    with torch.no_grad(): model[1][1][1][0].weight[4] = 50.
    te = torchEmber(model, stream=True)
    model[1][1][1][1] = nn.Identity()
    y = model(torch.randn(2, 3, 5, 7))
    te.disarm()
    rows = stream(te)
    assert list(rows.path)==['1.0', '1.1'] and rows.channel[1]==4 and rows.largest[1]==pytest.approx(y.abs().max().item())


def test_training_is_the_same_to_the_bit():
    alone,recorded = train(Net('', 'in place'))[0],train(Net('', 'in place'), stream=1)
    assert all(map(torch.equal, alone, recorded[0])) and len(stream(recorded[1]))==6


@pytest.mark.parametrize('reentrant', [True, False])
def test_recomputed_blocks_have_no_second_rows(reentrant):
    model = Net(again=2)
    model.checkpointed = reentrant
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), stream=1)
    model(torch.randn(3, 12, 8, requires_grad=True)).mean().backward()
    te.close()
    assert list(stream(te).depth)==[0, 1, 2, 3, 4, 5] and list(stream(te).call)==[0, 0, 0, 1, 1, 1]


def test_names_steps_and_missing_blocks():
    model = Net()
    te = torchEmber(model, torch.optim.SGD(model.parameters(), .1), stream=['layers.1', 'layers.2'])
    for _ in range(2): model(torch.randn(3, 4, 8)).mean().backward(); te.recorder.watch.optimizers[0].step()
    te.close()
    assert list(stream(te).path)==['layers.1', 'layers.2']*2
    with pytest.raises(ValueError, match='blocks'): torchEmber(model, stream=['blocks.*'])
    small = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.warns(EmberWarning, match='No blocks were found in model') as found:
        te = torchEmber(small, stream=1)
        for _ in range(3): small(torch.randn(4, 8))
        te.close()
    assert len(found)==1 and not len(stream(te))


def test_odd_inputs():
    class Odd(Net):
        def forward(self, x): return [layer(t) for t in (x[0, 0, 0], x[:0], x*0, x/0, x.double()*1e-3) for layer in self.layers.to(t.dtype)]
    model = Odd()
    te = torchEmber(model, ttypes='weight', stream=True)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model(torch.ones(3, 2, 4, 8))
        te.disarm()
    rows = stream(te)
    zero,nan,double = (rows[i:i+3] for i in (0, 3, 6))
    assert len(rows)==9 and math.isnan(zero.added.iloc[0]) and zero.rms_input.iloc[0]==0
    assert nan.rms.isna().all() and set(double.dtype)=={'float64'} and (double.rms>0).all()


def test_nested_tensors_have_no_rows():
    model = Net()
    te = torchEmber(model, ttypes='weight', stream=1)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', category=EmberWarning, message='.*not (be )?measured')
        for layer in model.layers[:1]: layer(torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)]))
    te.close()
    assert not len(stream(te))


@pytest.mark.parametrize(('name', 'value'), [('stream', 'often'), ('routers', 'often'), ('attention', 'often'), ('stream', -1), ('routers', .5)])
def test_wrong_steps_are_an_error_before_the_run_exists(name, value, tmp_path):
    with pytest.raises((TypeError, ValueError), match=f'{name}={value!r}: '): torchEmber(Net(), home=tmp_path, **{name: value})
    assert not list(tmp_path.rglob('*.json*'))
