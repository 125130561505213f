"Fixtures that serve a board, the web page of all runs, in a thread of the test process"
from contextlib import contextmanager
from threading import Thread

import pytest
import torch
from torch import nn

from torchember import torchEmber

hostile = '<img src=x onerror="window.hit=1">'


class Training:
    "A training of which the test runs the steps."
    def __init__(self, name, home=None, stats='numerics'):
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4))
        self.opt = torch.optim.SGD(self.model.parameters(), .05)
        self.te,self.n = torchEmber(self.model, self.opt, name=name, home=home, stats=stats),0

    def steps(self, n, nan=False):
        for _ in range(n):
            if nan:
                with torch.no_grad(): self.model[2][0].weight[0, 0] = torch.nan
            loss = self.model(torch.randn(16, 8)).pow(2).mean()
            self.te.log(train_loss=loss, rate=.05)
            if self.n%2: self.te.log(val_loss=loss.detach()*1.5)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.n += 1
        self.te.t.barrier()
        return self

    def close(self):
        if self.te: self.te.close()
        self.te = None


@pytest.fixture
def training():
    "Return a function that starts a training; it is closed after the test"
    some = []
    def start(*args, **kwargs):
        some.append(Training(*args, **kwargs))
        return some[-1]
    yield start
    for t in some: t.close()


@contextmanager
def serving(*runs, home=None, token='secret', port=0, every=.1, allow=()):
    "Serve a board in a thread. Return its address"
    from torchember.show.board.server import Board, make_server, bind_socket
    b,s = Board(runs, home, token, allow),bind_socket('127.0.0.1', port)
    b.every,b.pages.share = every,1
    server = make_server(b)
    t = Thread(target=server.run, kwargs=dict(sockets=[s]))
    t.start()
    try: yield f'http://127.0.0.1:{s.getsockname()[1]}/?token={token}'
    finally:
        server.should_exit = True
        t.join()
        s.close()


@pytest.fixture(scope='module')
def served(): return serving


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "Return a folder with three ended runs: `fine`, `broken` with a NaN from step 12 on, and `other`"
    home = tmp_path_factory.mktemp('home')
    torch.manual_seed(1)
    for name,n,bad in (('other', 15, 0), ('fine', 20, 0), ('broken', 12, 6)):
        t = Training(name, home).steps(n)
        if bad: t.steps(bad, nan=True)
        t.close()
    return home
