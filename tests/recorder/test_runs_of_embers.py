"Runs that follow each other: resumed, armed again, or created in the same second. Selected modules and misspelled arguments."
from tensor_rows import df, lines
import pytest
import torch
from looped import batches, by_hand, heard, momentum, seeded, steps
from models import mlp, x
from torch import nn

from torchember import emberTracker, select, torchEmber
from torchember.recorder.process import open_recorders


def test_choosing_a_module_itself():
    model = mlp()
    assert select(model[0]).pick(model.named_modules())==[model[0]]
    with torchEmber(model, include=model[2]) as te: model(x())
    assert df(te).module.unique().tolist()==['model(Sequential).2(Linear)']


def test_answers_to_what_is_mistyped():
    model = mlp()
    for kwargs,word in ((dict(stats=None), 'stats must be'), (dict(ttypes=3), 'tensor types must be'), (dict(ttypes=None), 'tensor types must be')):
        with pytest.raises(TypeError, match=word): torchEmber(model, **kwargs)
    te = torchEmber(model)
    with pytest.raises(TypeError, match='how_record_out'): te.how_record(lambda t: {})
    assert df(te).empty and {'module', 'ttype', 'step'} <= set(df(te).columns)
    te.close()
    with pytest.raises(FileNotFoundError, match='typo'): len(emberTracker('typo').df)


def test_resume_goes_on_after_the_last_step():
    model = nn.Linear(4, 2)
    with torchEmber(model, name='long', ttypes='output') as te:
        for _ in range(3): model(x())
        te.t + {'note': 'x'*100_000}
    with torchEmber(model, name='long', ttypes='output', resume=True) as te:
        te.mark(self=1)
        model(x())
    assert [r['step'] for r in lines(te) if 'step' in r]==[0, 1, 2, 3]


def test_a_run_that_is_closed_is_not_asked_when_another_is_resumed():
    "A recorder is in `open_recorders` while it may record: after creation, te.arm(), or a late te.log, until close()."
    with torchEmber(nn.Linear(4, 2), name='other', ttypes='output') as te: assert te.recorder in open_recorders
    assert te.recorder not in open_recorders
    te.arm()
    assert te.recorder in open_recorders
    te.close()
    te.log(late=1.)
    assert te.recorder in open_recorders
    te.close()
    assert te.recorder not in open_recorders


class Swaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b,self.swap,self.w = nn.Identity(),nn.Identity(),False,nn.Parameter(torch.ones(1))

    def forward(self, x):
        for m,y in ((self.b, x*100), (self.a, x)) if self.swap else ((self.a, x), (self.b, x*100)): m(y)
        return x*self.w


def test_armed_anew_in_an_open_step():
    "te.rearm() creates new taps. Rows from before and after are not mixed, although the order of calls changes."
    model = Swaps()
    opt = torch.optim.SGD(model.parameters(), lr=0.)
    te = torchEmber(model, optimizer=opt, ttypes=('input',))
    model(torch.ones(2)).sum().backward()
    te.rearm()
    model.swap = True
    model(torch.ones(2)).sum().backward()
    opt.step()
    te.close()
    assert df(te).groupby('module')['mean'].unique().to_dict()=={'model(Swaps)': [1], 'model(Swaps).a(Identity)': [1], 'model(Swaps).b(Identity)': [100]}


@pytest.mark.parametrize('inside', [False, True])
def test_a_run_that_goes_on_while_its_first_ember_lives(inside):
    "This happens if a cell of a notebook is interrupted and run again."
    model = seeded()
    opt = momentum(model)
    first = torchEmber(model, optimizer=opt, name='again')
    by_hand(model, opt, batches(3))
    if inside: model(batches()[0][0])
    with heard('disarmed first') as said: te = torchEmber(model, optimizer=opt, name='again', resume=True)
    by_hand(model, opt, batches(2))
    te.close()
    assert not first.armed and len(said)<=1
    assert steps(te)==list(range(5+inside))
    assert len({(r['step'], r['module'], r['ttype'], r['tname']) for r in lines(te)})==len(lines(te))


def test_embers_of_one_second_have_names_of_their_own(monkeypatch):
    "This matters if each of two processes arms a generator and a discriminator at the same time."
    monkeypatch.setenv('RANK', '1')
    monkeypatch.setenv('WORLD_SIZE', '2')
    tes = [torchEmber(nn.Linear(2, 1)) for _ in range(3)]
    assert len({te.fname for te in tes})==3 and all(te.fname.endswith('.rank1') for te in tes)
    for te in tes: te.close()
