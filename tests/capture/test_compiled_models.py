"Complete models under torch.compile: all recorded statistics are equal to those of eager mode."
import pytest
import torch
from compared import ALL, FORWARD, ids, same_training, train
from models import AlexNet, zoo
from torch import nn

pytestmark = pytest.mark.filterwarnings('ignore')


def alexnet():
    m = AlexNet()
    m.classifier[1],m.classifier[4],m.classifier[6] = nn.Linear(256*36, 64),nn.Linear(64, 64),nn.Linear(64, 10)
    return m, (torch.randn(2, 3, 63, 63),), {}


def shallow(make):
    "Return a function that makes the same model with one of its two equal layers, which compiles faster."
    def made():
        m,args,kwargs = make()
        for part in m.modules():
            for n,c in part.named_children():
                if isinstance(c, nn.ModuleList) and len(c)==2: setattr(part, n, c[:1])
        return m, args, kwargs
    return made


def language(name, loss=False):
    "Return a function that makes a language model without a key-value cache, which training does not need."
    def make():
        m,args,kwargs = zoo[name]()
        if not loss: kwargs.pop('labels')
        return m, args, kwargs | {'use_cache': False}
    return make


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.lstm,self.head = nn.Embedding(29, 8),nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True),nn.Linear(12, 3)

    def forward(self, i):
        y,(h,c) = self.lstm(self.emb(i))
        return self.head(y), h, c


class Cells(nn.Module):
    "A recurrent network that can be compiled."
    def __init__(self): super().__init__(); self.cell,self.head = nn.LSTMCell(8, 6),nn.Linear(6, 2)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[1], 6)
        for t in x: h,c = self.cell(t, (h, c))
        return self.head(h)


class Branches(nn.Module):
    "A model with two independent layers and a residual connection."
    def __init__(self): super().__init__(); self.a,self.b,self.head = nn.Linear(4, 4),nn.Linear(4, 4),nn.Linear(4, 2)

    def forward(self, x): return self.head(x+self.a(x)*self.b(x).tanh())


def tagger(): return Tagger(), (ids(),), {}
def cells(length=5): return Cells(), (torch.randn(length, 3, 8),), {}


whole = {'alexnet': alexnet, 'resnet': zoo['residual'], 'gpt2': language('gpt2'), 'bert': shallow(zoo['bert']), 'vit': shallow(zoo['vit']),
    'llama': shallow(language('llama')), 'mixtral': shallow(language('mixtral')), 'cells': cells, 'dicts': zoo['dicts'],
    'encoder': shallow(zoo['encoder']), 'parametrized': zoo['spectral norm']}
# if compiled, these models get an explicit attention mask: another kernel, and other rounding errors
MASKED = ('gpt2', 'llama', 'mixtral')


def trained(make, how, **options):
    got = train(make, None, how, **options)
    if got.rows: got.rows = [r for r in got.rows if r['tname']!='attention_mask']
    return got


def same_bits(a, b): return a.losses==b.losses and all(p is q is None or torch.equal(p, q) for p,q in zip(a.grads, b.grads, strict=True))


# these models are similar to others: bert to vit, and mixtral's attention to llama's
marks = {'alexnet': pytest.mark.slow, 'llama': pytest.mark.slow, 'bert': pytest.mark.release, 'mixtral': pytest.mark.release}


@pytest.mark.parametrize('name', [pytest.param(n, marks=marks.get(n, ())) for n in whole])
def test_rows_in_one_graph_are_those_of_eager_mode(name):
    "With fullgraph, all rows and the order of events are as in eager mode. Training is bit-identical to an unarmed model."
    want,bare = trained(whole[name], 'eager', ttypes=ALL),trained(whole[name], 'whole', armed=False)
    got = trained(whole[name], 'whole', ttypes=ALL)
    assert got.graphs==bare.graphs==1 and same_bits(bare, got)
    same_training(want, got, 1e-5 if name in MASKED else 1e-6)


graphs = {'tagger': tagger, 'routed': zoo['routed'], 'gpt2 with its loss': shallow(language('gpt2', True))}


@pytest.mark.slow
@pytest.mark.parametrize('name', [pytest.param(n, marks=[pytest.mark.slow, pytest.mark.release]*n.startswith('gpt2')) for n in graphs])
def test_rows_in_several_graphs_are_those_of_eager_mode(name):
    "A model with graph breaks has the same rows. Arming needs up to two more graphs."
    make = graphs[name]
    want,bare,got = trained(make, 'eager', ttypes=ALL),trained(make, 'whole', armed=False, fullgraph=False),trained(make, 'whole', fullgraph=False, ttypes=ALL)
    assert got.graphs<=bare.graphs+2
    same_training(want, got, 1e-5)
    if name.startswith('gpt2'): return
    every = trained(make, 'whole', fullgraph=False, ttypes=FORWARD[:4], every=2, steps=6)
    assert every.graphs<=2*got.graphs and {r['step'] for r in every.rows}=={0, 2, 4}


# the models are small, because Inductor needs a second for each kernel
under_inductor = graphs | whole | {'branches': lambda: (Branches(), (torch.randn(3, 4),), {}), 'cells': lambda: cells(2)}


@pytest.mark.slow
@pytest.mark.parametrize('name', ['branches', 'routed', 'cells', *(pytest.param(n, marks=pytest.mark.release) for n in ('resnet', 'vit', 'gpt2'))])
def test_inductor(name):
    """Modules that do not depend on each other, such as q, k and v, are recorded in the order of the program.

    The larger models have the mark `release`, because they use the same operators as the small models."""
    import torch._inductor.config as config
    make,fullgraph = under_inductor[name],name not in graphs
    with config.patch(fallback_random=True):
        make = shallow(make)
        want,got = trained(make, 'eager', ttypes=ALL),trained(make, 'whole', backend='inductor', fullgraph=fullgraph, ttypes=ALL)
    same_training(want, got, 1e-4)
