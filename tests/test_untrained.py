"What got nothing is seen: a parameter that is frozen, cut off, forgotten or never called is noted from the start, and said by whatever shows the run"
import json

import pytest
import torch
from torch import nn

from torchember import emberTracker, torchEmber
from torchember.store.parameters import label_of, why_not

reasons = {'frozen': 'frozen', 'cut': 'no gradient ever arrived', 'forgotten': 'not in the optimizer', 'idle': 'module never called'}
told = 'Not trained: frozen: frozen; not in the optimizer: forgotten; no gradient ever arrived: cut; module never called: idle.'


class Net(nn.Module):
    "One layer of each kind, and two that are trained"
    def __init__(self):
        super().__init__()
        self.frozen,self.body,self.cut = nn.Linear(4, 8),nn.Linear(8, 8),nn.Linear(8, 8)
        self.forgotten,self.idle,self.head = nn.Linear(8, 8),nn.Linear(8, 8),nn.Linear(8, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.body(self.frozen(x)).relu()
        return self.head(self.forgotten(x+self.cut(x).detach()))


def optimizer_of(net): return torch.optim.SGD([p for n,p in net.named_parameters() if 'forgotten' not in n], .05)


def train(te, run, opt, steps=3):
    for _ in range(steps):
        loss = run(torch.randn(16, 4)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        te.log(loss=loss)


def file_of(te): return json.loads((te.t.data/f'parameters_{te.fname}.json').read_text())['parameters']


def reasons_of(ps): return {label_of(p): why_not(p) for p in ps}


@pytest.mark.parametrize('compiled', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_is_noted_and_named_with_its_reason(compiled):
    net = Net()
    opt = optimizer_of(net)
    te = torchEmber(net, optimizer=opt, name='each')
    train(te, torch.compile(net, backend='aot_eager') if compiled else net, opt)
    report = te.close()
    assert report['remarks'][-1]==told and told in repr(report)
    ps = file_of(te)
    assert reasons_of(ps)=={f'{m}.{n}': reasons.get(m) for m in ('frozen', 'body', 'cut', 'forgotten', 'idle', 'head') for n in ('weight', 'bias')}
    assert ps[0]=={'path': 'frozen', 'name': 'weight', 'shape': [8, 4], 'dtype': 'float32', 'requires_grad': False, 'optimizer': True,
        'gradient': False, 'called': True}


def test_known_from_the_first_row_on_and_kept_up_to_date():
    net = Net()
    opt = optimizer_of(net)
    te = torchEmber(net, optimizer=opt, name='live')
    train(te, net, opt, 1)
    te.t.refresh()
    written = emberTracker('live')['parameters_live']['parameters'] # also when the process is killed now
    assert reasons_of(written)['cut.weight']=='no gradient ever arrived'
    net.frozen.requires_grad_(True)
    opt.add_param_group({'params': net.forgotten.parameters()})
    train(te, net, opt, 3) # which makes four: it is looked again
    assert len(te.t.df)
    now = reasons_of(file_of(te))
    assert (now['frozen.weight'], now['forgotten.weight'], now['cut.weight'])==(None, None, 'no gradient ever arrived')
    net.cut.requires_grad_(False)
    te.rearm()
    te.disarm()
    te.t.close()
    assert reasons_of(file_of(te))['cut.bias']=='frozen'


def test_a_run_that_goes_on_knows_what_was_before():
    net = Net()
    opt = optimizer_of(net)
    te = torchEmber(net, optimizer=opt, name='on')
    train(te, net, opt)
    te.close()
    net.head.requires_grad_(False) # it has learnt enough
    te = torchEmber(net, optimizer=opt, name='on', resume=True)
    train(te, net, opt, 1)
    assert not any('head' in r for r in te.close()['remarks'])
    assert reasons_of(file_of(te))['head.weight'] is None and reasons_of(file_of(te))['frozen.weight']=='frozen'


def test_nothing_is_held_against_what_was_not_to_be_trained_or_recorded():
    net = Net().eval().requires_grad_(False)
    te = torchEmber(net, name='look')
    with torch.no_grad(): net(torch.randn(2, 4))
    assert not te.close()['remarks']
    net = Net()
    opt = optimizer_of(net)
    te = torchEmber(net, optimizer=opt, include=['body', 'head'], name='some')
    train(te, net, opt)
    assert not te.close()['remarks']
    assert [p['path'] for p in file_of(te) if 'recorded' not in p]==['body']*2+['head']*2
    net = nn.Linear(4, 1) # zero_grad comes too early for all: that is another sentence
    te = torchEmber(net, name='early')
    opt = torch.optim.SGD(net.parameters(), .1)
    with pytest.warns(match='No weight gradients'):
        for _ in range(4):
            net(torch.randn(2, 4)).sum().backward()
            opt.step()
            opt.zero_grad()
    assert not any('Not trained' in r for r in te.close()['remarks'])


def test_lazy_tied_and_none():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb,self.lazy,self.head = nn.Embedding(5, 4),nn.LazyLinear(4),nn.Linear(4, 5, bias=False)
            self.head.weight = self.emb.weight
            self.register_parameter('none', None)
        def forward(self, x): return self.head(self.lazy(self.emb(x)))
    net = Tied()
    te = torchEmber(net, name='tied')
    assert te.t['parameters_tied']['parameters'][1]['shape'] is None # not made yet
    loss = net(torch.arange(4)).sum()
    loss.backward()
    te.step()
    assert len(te.t.df)
    assert [(label_of(p), p.get('also'), p['shape'], p['gradient'], p['optimizer']) for p in file_of(te)]==[
        ('emb.weight', ['head.weight'], [5, 4], True, None), ('lazy.weight', None, [4, 4], True, None), ('lazy.bias', None, [4], True, None)]
    assert not te.close()['remarks']
