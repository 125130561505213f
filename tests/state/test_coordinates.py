"Tests of the coordinate check: it distinguishes parametrizations, names planted faults, and does not change the training"
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchember import coord_check
from torchember.state.layer_sizes import LayerSizes

widths = [64, 128, 256, 512]


def mlp(width, mup=True, factors=(0, 0, 0)):
    "Return an MLP with layers `0`, `2` and `4`. `factors`: exponents of width/64 that multiply the initial weights of each layer."
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
    for i in range(3):
        nn.init.kaiming_normal_(model[2*i].weight, nonlinearity='linear' if i==2 else 'relu')
        with torch.no_grad(): model[2*i].weight *= (width/64)**(factors[i]-(.5 if mup and i==2 else 0))
    return model


def optimizer(kind, mup=True, factors=(0, 0, 0)):
    "Return `make_optimizer`. `factors`: exponents of width/64 that multiply the learning rate of each layer."
    exponents = (0, 0, 0) if not mup else (0, -1, -1) if kind is torch.optim.Adam else (1, 0, -1)
    def make(model):
        ratio = model[2].in_features/64
        return kind([dict(params=model[2*i].parameters(), lr=(.001 if kind is torch.optim.Adam else .1)*ratio**(exponents[i]+factors[i])) for i in range(3)])
    return make


def check(kind=torch.optim.Adam, mup=True, weights=(0, 0, 0), rates=(0, 0, 0), **kwargs):
    "Return the coordinate check of the MLP. `weights`, `rates`: exponents of faults planted in initial weights and learning rates."
    g = torch.Generator().manual_seed(0)
    data = torch.randn(16, 16, generator=g),torch.randint(4, (16,), generator=g)
    return coord_check(lambda width: mlp(width, mup, weights), widths, data, loss_fn=F.cross_entropy, make_optimizer=optimizer(kind, mup, rates),
        **{'steps': 1} | kwargs)


def named(c):
    "Return the pair (rule, layers) of each finding."
    return [(f['rule'], f['evidence']['layers']) for f in c.findings.to_dict('records')]


def test_standard_parametrization_and_mup_with_adam():
    mup,standard = check(steps=3),check(mup=False)
    assert mup.findings.healthy and mup.at_step()['change'].abs().max()<.25
    assert mup.at_step(3)[['change', 'from the weights', 'from the inputs']].abs().max().max()<.3
    assert named(standard)==[('initial_weights', ['4']), ('learning_rate', ['2', '4'])]
    slopes = standard.at_step()
    assert abs(slopes['from the weights']['0'])<.05 and slopes['from the weights'][['2', '4']].between(.8, 1.2).all()
    assert 1<slopes['change']['4'] and 1<slopes['from the inputs']['4']


def test_standard_parametrization_and_mup_with_sgd():
    assert check(torch.optim.SGD).findings.healthy
    found = check(torch.optim.SGD, mup=False)
    assert named(found)[0]==('initial_weights', ['4'])
    # With growing width, updates of the input layer shrink, and updates of all other layers grow
    by_layer = {tuple(layers): found.findings['evidence'][i]['own_slope'] for i,(rule,layers) in enumerate(named(found)) if rule=='learning_rate'}
    assert by_layer['0',]<-.25 and min(v for k,v in by_layer.items() if k!=('0',))>.25
    assert all('First correct the initial weights of `4`' in a for a in found.findings['advice'][1:])


@pytest.mark.parametrize('kind', [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize('fault,first', [
    (dict(weights=(0, .5, 0)), ('initial_size', ['2'], '(64/width)**0.5')), (dict(weights=(0, -.5, 0)), ('initial_size', ['2'], '(width/64)**0.5')),
    (dict(weights=(0, 0, .5)), ('initial_weights', ['4'], '(64/width)**0.5')), (dict(rates=(1, 0, 0)), ('learning_rate', ['0'], '64/width')),
    (dict(rates=(0, 1, 0)), ('learning_rate', ['2'], '64/width')), (dict(rates=(0, -1, 0)), ('learning_rate', ['2'], 'width/64'))])
def test_a_planted_fault_is_named_first(kind, fault, first):
    c = check(kind, **fault)
    assert named(c)[0]==first[:2] and named(c)[0][0] in repr(c)
    # with SGD, slopes are less exact, and initial weights change the gradients of other layers
    if kind is torch.optim.Adam: assert f"of layer `{first[1][0]}` by {first[2]}" in c.findings['advice'][0]
    if kind is torch.optim.Adam or first[0]=='learning_rate': assert len(named(c))==1


def test_last_layer_that_begins_with_zeros():
    "The first step changes only the last layer; the slopes of other layers are read after the second step."
    def zeros(width):
        model = mlp(width)
        nn.init.zeros_(model[4].weight)
        return model
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(16, 16, generator=g), torch.randint(4, (16,), generator=g)) for _ in range(2)]
    c = coord_check(zeros, widths, data, 2, loss_fn=F.cross_entropy, make_optimizer=optimizer(torch.optim.Adam), seeds=2)
    assert c.step==2 and c.findings.healthy
    first = c.slopes[c.slopes['step']==1].set_index(['layer', 'quantity'])['slope']
    assert ('4', 'from_weights') in first and ('2', 'from_weights') not in first
    assert not c.table.query('step==1 and layer=="2"')['change'].any()


def test_parts_add_up_in_a_transformer_and_nothing_else_changes():
    "Both parts add up to W_t x_t - W_0 x_0, in training mode with dropout. Parameters train as without the check."
    def train(measure):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=.3, batch_first=True), nn.Linear(8, 9))
        opt,x = torch.optim.AdamW(model.parameters(), lr=.01),torch.randint(9, (3, 5))
        sizes = LayerSizes(model, lambda: model(x)) if measure else None
        rows = []
        for _ in range(2):
            opt.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            opt.step()
            if measure: rows = sizes.measure()
        return model,rows,(torch.rand(1), random.random(), np.random.rand())
    random.seed(0)
    np.random.seed(0)
    plain,_,after = train(False)
    random.seed(0)
    np.random.seed(0)
    model,rows,same = train(True)
    assert after==same and all(map(torch.equal, plain.parameters(), model.parameters()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with_weights = [r for r in rows if r['from_weights']==r['from_weights']]
    assert [r['layer'] for r in with_weights if '.norm' not in r['layer']]==['0', '1.self_attn.output_0', '1.linear1', '1.linear2', '2']
    for r in with_weights:
        assert r['from_weights']>0 and abs(r['from_weights']-r['from_inputs'])<=r['change']*1.001<=1.002*(r['from_weights']+r['from_inputs'])


def test_seeds_and_the_random_numbers_of_the_caller():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one = check(seeds=[5, 7])
    assert torch.equal(torch.rand(1), expected)
    assert one.table['output'].tolist()==check(seeds=[5, 7]).table['output'].tolist()
    assert sorted(one.table['seed'].unique())==[5, 7] and one.table.groupby('seed')['output'].sum().nunique()==2
    assert one.slopes['error'].notna().all() and check(seeds=1).slopes['error'].isna().all()
