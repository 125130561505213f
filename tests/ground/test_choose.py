"All functions with `include=`, `exclude=` or a path select the same modules for the same argument."
import re

import pytest
import torch
from torch import nn
from torchember import from_activation, from_state_dict, from_weight, read, torchEmber, track
from torchember.ground.choose import NamedLayer, chosen, kinds_of, select
from torchember.monitor import Monitor
from torchember.show.select import pick, rows_to_draw


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1,self.fc10,self.norm = nn.Linear(3, 3),nn.Linear(3, 3, bias=False),nn.LayerNorm(3)

    def forward(self, x): return self.norm(self.fc10(self.fc1(x)))

class Net(nn.Module):
    "A model in which each module has its own weight, so that a selection of weights contains each module."
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.enc,self.head = nn.Sequential(Block(), Block()),nn.Linear(3, 2)
        for m in (self.enc, *self.enc): m.scale = nn.Parameter(torch.ones(3))

    def forward(self, x): return self.head(self.enc(x)*self.scale*self.enc.scale*self.enc[0].scale*self.enc[1].scale)

words = ['head', 'enc', 'enc.*', 'enc.?.fc1', '*fc1', '*', '', 'Linear', nn.Linear, 'Block', Block, nn.Module, re.compile('fc1'), re.compile(r'\.0\b'),
    re.compile('^enc$'), ['head', 'enc.0.fc10'], [nn.LayerNorm, 'head'], (re.compile('fc10'), Block), {'head'}, select('enc.*') & nn.Linear, ~select(nn.Linear),
    select('head') | re.compile('norm')]
left_out = [None, 'enc.0.*', nn.Linear, [re.compile('fc10'), 'head']]

@pytest.fixture
def run():
    net = Net()
    with torchEmber(net, ttypes=['output', 'weight'], name='all') as te: net(torch.ones(1, 3)).sum().backward()
    return net, te

def wanted(net, word, out):
    try: ids = chosen(net.named_modules(), word, out)
    except ValueError: return None
    return {p for p,m in net.named_modules() if id(m) in ids}

def choices():
    return [pytest.param(w, o, id=f'{w}-{o}') for w in words for o in left_out]

@pytest.mark.parametrize('word,out', choices())
def test_an_ember_a_snapshot_and_activations_choose_the_same(word, out):
    net,x = Net(),torch.ones(1, 3)
    want = wanted(net, word, out)
    def weights(d): return {k.rpartition('.')[0] for k in d}
    def embers():
        with torchEmber(net, ttypes=['output'], include=word, exclude=out) as te: net(x)
        return {*read(te.fname).path} if want else set()
    def caught():
        with from_activation(net, include=word, exclude=out) as acts: net(x)
        return {'' if k=='output_0' else k for k in acts.state_dict}, {'' if k=='output_0' else k for k in acts.state_dict.filter(include='*')}
    if want is None:
        for f in (embers, caught, lambda: from_weight(net, include=word, exclude=out), lambda: from_weight(net).filter(include=word, exclude=out)):
            with pytest.raises(ValueError): f()
        return
    assert embers()==want
    assert caught()==(want, want)
    assert weights(from_weight(net, include=word, exclude=out))==want
    assert weights(from_weight(net).filter(include=word, exclude=out))==want
    if out is None and not isinstance(word, str|re.Pattern): assert weights((from_weight(net)*2).filter(word))==want
    assert weights(from_weight(net, clone=True).filter('.*scale|.*weight', include=word, exclude=out))==want

@pytest.mark.parametrize('word', words)
def test_a_monitor_a_tracker_and_a_table_choose_the_same(word, run, tmp_path):
    net,te = run
    want = wanted(net, word, None)
    rows = rows_to_draw(read(te.fname))
    if word is nn.Module: # a log contains the name of a class, but not its base classes
        with pytest.raises(ValueError, match="No layer of the class itself 'Module'"): pick(rows, word)
    else: assert {*pick(rows, word).path}==want
    if not isinstance(word, list|tuple|set):
        with Monitor(Net(), {word: ['WeightNorm']} if '' not in want and not want & {'enc', 'enc.0', 'enc.1'} else {}) as m: pass
        assert not m.watches or {w.track.path for w in m.watches}==want
    pattern = isinstance(word, str) # in `track`, a text is a search pattern, as in Track & Visualize
    if not pattern and not isinstance(word, list|tuple|set):
        net = Net()
        with track(net, include=word) as tracker: net(torch.ones(1, 3)); tracker.step()
        assert {*read(tracker.name).path}==want

def test_names_select_the_same_as_modules():
    net = Net()
    pairs = [*net.named_modules()]
    layers = [(p, NamedLayer(p, kinds_of(m))) for p,m in pairs]
    for word in words:
        for out in left_out:
            if wanted(net, word, out) is None: continue
            ids = chosen(layers, word, out)
            assert {p for p,m in layers if id(m) in ids}==wanted(net, word, out)

def test_runs_without_modules_select_by_path():
    d = from_state_dict(Net().state_dict())
    assert [*d.filter(include='enc.1.fc*')]==['enc.1.fc1.weight', 'enc.1.fc1.bias', 'enc.1.fc10.weight']
    assert [*d.filter('.*bias', exclude=re.compile('norm'))]==['enc.0.fc1.bias', 'enc.1.fc1.bias', 'head.bias']
    with pytest.raises(ValueError, match="No module matches 'Linear'"): d.filter(include='Linear')

def test_a_shared_weight_belongs_to_the_selected_module():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    assert [*from_weight(net, include='1')]==['1.weight'] and [*from_weight(net)]==['0.weight']
