"A parameter that is frozen, detached, missing in the optimizer or never called is noted at once, and all views of the run show it."
import gzip
import json
from base64 import b64decode

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn

from torchember import emberTracker, overview, read, scalar_global_heatmap, summary, torchEmber, updates
from torchember.show.page.data import page_of
from torchember.store.parameters import label_of, why_not

reasons = {'frozen': 'frozen', 'cut': 'no gradient ever arrived', 'forgotten': 'not in the optimizer', 'idle': 'module never called'}
told = 'Not trained: frozen: frozen; not in the optimizer: forgotten; no gradient ever arrived: cut; module never called: idle.'


class Net(nn.Module):
    "A model with one layer for each reason of not being trained, and two trained layers."
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
    # the facts are in the file at once, in case the process is killed
    written = emberTracker('live')['parameters_live']['parameters']
    assert reasons_of(written)['cut.weight']=='no gradient ever arrived'
    net.frozen.requires_grad_(True)
    opt.add_param_group({'params': net.forgotten.parameters()})
    train(te, net, opt, 3) # after four steps, the parameters are checked again
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
    net.head.requires_grad_(False) # the head is frozen because it is trained enough
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
    net = nn.Linear(4, 1) # zero_grad too early affects all parameters and has its own warning
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
    assert te.t['parameters_tied']['parameters'][1]['shape'] is None # a lazy parameter has no shape yet
    loss = net(torch.arange(4)).sum()
    loss.backward()
    te.step()
    assert len(te.t.df)
    assert [(label_of(p), p.get('also'), p['shape'], p['gradient'], p['optimizer']) for p in file_of(te)]==[
        ('emb.weight', ['head.weight'], [5, 4], True, None), ('lazy.weight', None, [4, 4], True, None), ('lazy.bias', None, [4], True, None)]
    assert not te.close()['remarks']


def unpacked(a): return np.frombuffer(gzip.decompress(b64decode(a['zip'])), 'u1').reshape(4, -1).T.copy().view('<f4').reshape(a['shape'])


def a_run(name='shown', **kwargs):
    net = Net()
    opt = optimizer_of(net)
    te = torchEmber(net, optimizer=opt, name=name, **kwargs)
    train(te, net, opt)
    te.close()
    return te


def texts(ax): return {t.get_text(): t.get_position()[1] for t in ax.texts}


def test_overview_and_heat_map_have_gray_rows_with_the_reason():
    te = a_run()
    fig = overview(te).figure
    ax = next(a for a in fig.axes if a.get_ylabel()=='weight gradients')
    rows = [t.get_text() for t in ax.get_yticklabels()]
    order = [m for m in ('frozen', 'body', 'cut', 'forgotten', 'idle', 'head') for _ in range(2)]
    # rows are in the order of the model; untrained parameters are not put at the end
    assert rows==[f'{m}.{n}' for m,n in zip(order, ['weight', 'bias']*6, strict=True)]
    value = ax.collections[0].get_array()
    empty = {r.partition('.')[0] for r,v in zip(rows, value.mask.all(1), strict=True) if v}
    assert empty>={'frozen', 'cut', 'idle'} and not empty & {'body', 'head'}
    assert texts(ax)=={reasons[m]: order.index(m)+1 for m in reasons} # one text for the rows of weight and bias
    df = te.t.df
    one = df[(df.path=='head') & (df.pname=='bias') & (df.ttype=='weight_grad')]['std']
    assert value[11].tolist()==one.tolist()
    heat = scalar_global_heatmap('shown', 'weight_grad', 'std')
    assert texts(heat)==texts(ax) and heat.collections[0].get_array().shape==(12, 3)
    # from a table alone, parameters without rows and their reasons are unknown
    assert not scalar_global_heatmap(df, 'weight_grad', 'std').texts
    part = overview(te, tt='weight_grad', layer=['cut', 'head'])[-1]
    assert [t.get_text() for t in part.get_yticklabels()]==['cut.weight', 'cut.bias', 'head.weight', 'head.bias']
    with pytest.raises(ValueError, match='no rows to draw. Not trained: no gradient ever arrived: cut.'): overview(te, tt='weight_grad', layer='cut')
    plt.close('all')


def test_a_layer_without_gradients_has_its_outputs():
    fig = overview(a_run(), layer='cut').figure
    assert [a.get_ylabel() for a in fig.axes[:2]]==['loss', 'outputs']
    plt.close('all')


def test_the_summary_says_it_in_words_and_has_the_rows():
    a_run()
    s = summary('shown')
    assert s.missing==told and repr(s).split('\n')[1]==told and told in s._repr_html_() and 'cut' in s.df.index
    s = summary('shown', 'weight_grad')
    steps = s.df['steps']
    assert list(steps.index)==[f'{m}.{n}' for m in ('frozen', 'body', 'cut', 'forgotten', 'idle', 'head') for n in ('weight', 'bias')]
    assert (steps['cut.weight'], steps['idle.bias'], steps['head.bias'], s.df['not finite']['idle.bias'])==(0, 0, 3, 0)
    assert summary('shown', layer=['cut', 'head']).missing=='Not trained: no gradient ever arrived: cut.'


def test_the_page_has_them_in_their_places():
    a_run(stats='numerics')
    page = page_of('shown', ttype='weight_grad')
    assert page['run']['missing']==told
    kind = page['kinds'][0]
    order = 'frozen', 'body', 'cut', 'forgotten', 'idle', 'head'
    assert [(t['label'], t.get('why')) for t in kind['tensors'][::2]]==[(f'{m}.weight', reasons.get(m)) for m in order]
    assert [t['shape'] for t in kind['tensors'][:2]]==[[8, 4], [8]] and [n==0 for n in kind['n']['std']][:6]==[True, True, False, False, True, True]
    counts = unpacked(kind['exponents']['counts'])
    assert counts.shape[:2]==(12, 3) and counts[2].sum(1).tolist()==[64]*3 and counts[11].sum(1).tolist()==[2]*3 and not counts[:2].any()
    assert unpacked(kind['stats']['std']).shape==(12, 3)


def last_text(ax): return ax.texts[-1].get_text().split('\n')[-1]


def test_updates_from_weights_alone_name_what_never_moved_exactly():
    te = a_run()
    ax = updates(te)
    assert last_text(ax)=='never changed: ' + ', '.join(f'{m}.{n} ({reasons[m]})' for m in ('frozen', 'cut') for n in ('weight', 'bias')) + ' and 4 more'
    assert len([l for l in ax.lines if l.get_xdata().tolist()==[1, 2]])==4 and ax.get_ylabel().endswith('at least')
    a_run('exact', ttypes=('weight', 'weight_grad', 'update'))
    exact = updates('exact')
    assert last_text(exact)==last_text(ax) and not exact.get_ylabel().endswith('at least')
    least,true = [{l.get_color(): l.get_ydata() for l in a.lines} for a in (ax, exact)]
    df = read('exact', ttype='update')
    ratio = df[(df.path=='body') & (df.pname=='weight')]['ratio'].tolist()
    assert any(y.tolist()==ratio for y in true.values()) and all((y>0).all() for y in least.values())
    plt.close('all')


def test_an_update_of_zero_and_a_weight_of_zeros_are_counted():
    net = nn.Linear(3, 2)
    nn.init.zeros_(net.bias)
    opt = torch.optim.SGD([{'params': [net.weight]}, {'params': [net.bias], 'lr': 0.}], .1)
    te = torchEmber(net, optimizer=opt, ttypes=('weight', 'update'), name='zeros')
    for i in range(4):
        opt.param_groups[0]['lr'] = .1*(i!=2)
        opt.zero_grad()
        net(torch.randn(4, 3)).pow(2).sum().backward()
        opt.step()
    te.close()
    ax = updates(te)
    assert ax.texts[-1].get_text()=='not changed at some steps: weight (1 of 4 steps)\nnever changed: bias'
    assert updates(te, 'weight').texts[-1].get_text()=='not changed at some steps: weight (1 of 4 steps)'
    plt.close('all')
