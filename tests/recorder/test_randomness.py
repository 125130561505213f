"A user's statistic may draw random numbers without changing the random numbers of the training."
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from torchember import torchEmber
from torchember.recorder import step_buffer
from torchember.recorder.step_buffer import Generators
from torchember.recorder.recorder import recorded


def by_torch(x): return torch.randint(x.numel(), (8,))
def by_numpy(x): return torch.as_tensor(np.random.randint(x.numel(), size=8))
def by_python(x): return torch.tensor([random.randrange(x.numel()) for _ in range(8)])
def by_normals(x): return torch.tensor([abs(int(np.random.randn()*9))%x.numel(), abs(int(random.gauss(0, 9)))%x.numel(), int(torch.randn(()).abs())%x.numel()])


def drawn(draw, fails=False):
    "Return a statistic that averages a few elements, which `draw` selects at random."
    def stat(x):
        at = draw(x)
        if fails: raise ValueError('after it has drawn')
        return {'some': x.flatten()[at].float().mean(), 'at': at.tolist()}
    return stat


def train(stats=None, steps=6, compiled=False, **kw):
    "Train with random numbers of torch, numpy and Python. Return the losses with the next random numbers, and the rows."
    for seed in (torch.manual_seed, np.random.seed, random.seed): seed(0)
    m = nn.Sequential(nn.Linear(4, 8), nn.Dropout(.2), nn.Linear(8, 1))
    o,rows = torch.optim.SGD(m.parameters(), .1),None
    if stats: te = torchEmber(m, optimizer=o, stats=stats, ttypes=recorded, **kw)
    run,out = torch.compile(m, backend='aot_eager') if compiled else m,[]
    for _ in range(steps):
        o.zero_grad()
        x = torch.randn(16, 4)*np.random.randn()+random.gauss(0, 1)
        loss = run(x).square().mean()
        loss.backward()
        o.step()
        out.append((loss.item(), np.random.rand(), random.random()))
    if stats: te.close(); rows = te.t.df
    return out, rows


@pytest.mark.parametrize('fails', [False, True])
@pytest.mark.parametrize('draw', [by_torch, by_numpy, by_python, by_normals])
def test_the_training_draws_the_same_numbers(draw, fails, recwarn):
    alone,_ = train()
    seen,rows = train(drawn(draw, fails))
    assert seen==alone
    assert rows.step.nunique()==6 and ('error' in rows)==fails


def test_generators_are_restored_after_the_first_rows_if_used(monkeypatch):
    "If a function has used numpy's generator once, the generator is always restored after it. Otherwise it is not."
    monkeypatch.setattr(Generators, 'tries', 3)
    alone,_ = train()
    for draw in (by_torch, by_numpy, by_python, by_normals): assert train(drawn(draw))[0]==alone
    late,f = Generators(),lambda x: np.random.rand() if x>3 else 0
    for i in range(5):
        at = np.random.get_state()[2]
        late.call(f, torch.tensor(i))
        # a function that first draws after `tries` calls is not noticed, as documented
        assert (np.random.get_state()[2]==at)==(i!=4)


def test_compiled_training_draws_the_same_numbers():
    alone,_ = train(compiled=True)
    assert train(drawn(by_torch), compiled=True)[0]==alone


def test_the_draws_of_a_statistic_continue():
    "A statistic gets new random numbers at each call, even if the training draws none. The seed determines them."
    def run(seed):
        torch.manual_seed(seed)
        m = nn.Linear(50, 1)
        te = torchEmber(m, stats=drawn(by_torch), ttypes=('weight', 'input'))
        x = torch.ones(1, 50)
        before = torch.get_rng_state()
        for _ in range(4): m(x).sum().backward(); te.step()
        assert torch.equal(torch.get_rng_state(), before)
        te.close()
        d = te.t.df
        return d[d.tname!='weight_1']['at'].tolist()
    first = run(0)
    assert len(first)==8 and len({tuple(a) for a in first})==8 and run(0)==first!=run(1)


def test_built_in_statistics_save_no_generator(monkeypatch):
    monkeypatch.setattr(step_buffer, 'torch_generators', lambda device: 1/0)
    m = nn.Linear(3, 1)
    te = torchEmber(m, stats='full', on_error='raise')
    m(torch.ones(2, 3)).sum().backward()
    te.step()
    te.close()


def test_nested_statistics_and_threads_keep_generators_apart():
    "A statistic may call another statistic, also in several threads. The generators of the training stay unchanged."
    g,inner = Generators(),lambda x: torch.rand(())
    before = torch.get_rng_state()
    g.call(lambda x: (torch.rand(()), g.call(inner, x), torch.rand(())), torch.ones(1))
    assert torch.equal(torch.get_rng_state(), before)
    many = [threading.Thread(target=lambda: [Generators().call(inner, torch.ones(1)) for _ in range(200)]) for _ in range(4)]
    for t in many: t.start()
    for t in many: t.join()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_statistic_may_log_a_number_in_any_thread():
    "While a statistic runs, the lock of the run is held, so another thread cannot take it."
    asked = []
    def free(te):
        got = te.recorder.lock.acquire(blocking=False)
        if got: te.recorder.lock.release()
        asked.append(got)
    def stat(x):
        te.log(seen=x.numel())
        t = threading.Thread(target=free, args=(te,))
        t.start()
        t.join()
        return {'n': x.numel()}
    m = nn.Linear(3, 1)
    te = torchEmber(m, stats=stat, ttypes=('input', 'output', 'weight', 'output_grad'), on_error='raise')
    m(torch.ones(2, 3)).sum().backward()
    te.close()
    assert asked==[False]*5 # five tensors: input, output, weight, bias, gradient
    assert te.t.df.seen.dropna().tolist()==[6, 3, 1, 2, 2] # one number is logged for each of the five tensors
