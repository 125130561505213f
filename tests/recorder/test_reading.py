"Reading rows during the training does not change them, and rows added in the meantime have the right step."
import warnings

import pytest
import torch
from models import mlp, x
from torch import nn

from torchember import torchEmber


def test_reading_a_table_between_micro_batches_changes_no_row():
    "Gradients are accumulated over four micro-batches. The rows still describe the whole step."
    tables = []
    for reads in (False, True):
        torch.manual_seed(0)
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), .1)
        te = torchEmber(model, optimizer=opt, ttypes=('input', 'output', 'weight', 'weight_grad'))
        for _ in range(2):
            opt.zero_grad()
            for _ in range(4):
                model(torch.randn(3, 4)).square().sum().backward()
                if reads: assert len(te.t.df)>=len(te.t.latest_df)>0
            if reads: assert len(te.log_model().t.df)
            opt.step()
        te.close()
        key = ['step', 'module', 'ttype', 'tname', 'call']
        tables.append(te.t.df.drop(columns='ts').sort_values(key, ignore_index=True)[[*key, 'mean', 'std', 'max', 'min']])
    assert tables[0].equals(tables[1])


def test_a_row_of_the_user_is_part_of_the_latest_step():
    te = torchEmber(nn.Linear(4, 2))
    te.model(x())
    te.step()
    te.t + {'loss': .5}
    assert len(te.t.latest_line_list())==5
    te.model(x())
    assert len(te.t.latest_line_list())==4
    te.close()


def test_log_model_sees_values_written_through_data():
    model = nn.Linear(4, 2)
    te = torchEmber(model)
    te.log_model()
    model.weight.data.fill_(7)
    te.log_model()
    [r] = [r for r in te.t.lines() if r['tname']=='weight_0']
    assert r['mean']==7
    te.close()


def test_marks_hide_nothing():
    te = torchEmber(nn.Linear(4, 2))
    with pytest.raises(ValueError, match='is the name of a statistic'): te.mark(max=3)
    te.how_record_out(lambda t: {'loss': 1.})
    te.mark(loss=9.)
    te.model(x())
    rows = te.t.lines()
    assert [r['loss'] for r in rows if r['ttype']=='output']==[1] and {r['loss'] for r in rows if r['ttype']=='weight'}=={9}
    te.close()


@pytest.mark.parametrize('read', [False, True])
def test_each_call_of_a_probe_has_its_row(read):
    "This holds with and without reading the rows between two calls."
    class Probes(nn.Module):
        def __init__(self): super().__init__(); self.fc = nn.Linear(1, 1)
        def forward(self, x):
            for i in range(3): te.probe('h', torch.full((2,), float(i)))
            if read: assert len(te.t.df)
            te.probe('h', torch.full((2,), 9.))
            return self.fc(x)
    te = torchEmber(Probes(), ttypes=('output',))
    te.model(torch.ones(1, 1))
    te.close()
    assert te.t.df.query('ttype=="probe"')['mean'].tolist()==[0, 1, 2, 9]


@pytest.mark.parametrize('read', [False, True])
def test_reading_does_not_change_the_ratio_of_an_update(read):
    model = nn.Linear(2, 1, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te,want = torchEmber(model, optimizer=opt, ttypes=('weight', 'update')),[]
    for _ in range(3):
        w = model.weight.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        if read: assert len(te.t.df)
        opt.step(); opt.zero_grad()
        want.append(((model.weight-w).norm()/w.norm()).item())
    te.close()
    assert te.t.df.ratio.dropna().tolist()==pytest.approx(want, rel=1e-5)


def test_a_custom_row_is_replaced_by_the_next():
    model = nn.Linear(2, 1, bias=False)
    opt = torch.optim.Adam(model.parameters())
    te = torchEmber(model, optimizer=opt, ttypes=('optimizer',))
    te.how_record('optimizer')(lambda t: {'s': float(t.sum())})
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for k in range(2):
            model(torch.ones(1, 2)).sum().backward()
            if k: te.log_model()
            opt.step()
    te.close()
    assert te.t.df.query('ttype=="optimizer"')[['step', 'tname']].values.tolist()==[[s, n] for s in (0, 1) for n in ('exp_avg_0', 'exp_avg_sq_0')]
