"What a user is told: which line a warning points at, and what an error says to a name or an argument that cannot be"
import ast
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from torchember import EmberWarning, NoiseScale, from_activation, torchEmber
from torchember.record import warn

root = Path(__file__).parents[1]
x = torch.ones(4, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc,self.head = nn.Linear(3, 3),nn.Linear(3, 1)

    def forward(self, x):
        x = self.fc(x).relu() # in the forward
        return self.head(x)


def exec_late():
    "A function without a line of the user's"
    ns = {'warn': warn, '__name__': 'torch.generated'}
    exec('def late(waits):\n    waits.wait()\n    warn("told")', ns)
    return ns['late']


late = exec_late()


def broken(tensor): raise ZeroDivisionError('not today')


def heard(f):
    "(file, line of the source, message) of each warning of ours that `f` gives"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        f()
    return [(w.filename, Path(w.filename).read_text().splitlines()[w.lineno-1].strip(), str(w.message)) for w in said if w.category is EmberWarning]


def points(f, line, says):
    "`f` gives one warning, at this line of this file"
    [(file, source, text)] = heard(f)
    assert (file, source)==(__file__, line) and says in text, (file, source, text)


def test_no_warning_counts_levels():
    "All go by `record.warn`, which looks for the user's line"
    for p in (root/'torchember').rglob('*.py'):
        calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(p.read_text(encoding='utf-8'))) if isinstance(n, ast.Call)]
        assert 'warnings.warn' not in calls, p
        assert calls.count('warnings.warn_explicit')==(p==root/'torchember'/'record.py'), p


@pytest.mark.parametrize('backend', [None, 'eager', 'aot_eager'])
def test_a_statistic_that_fails_in_a_forward(backend):
    "It points into the user's forward; where that is compiled, at least into the user's file"
    torch._dynamo.reset()
    model = Net()
    with torchEmber(model, include='fc', ttypes=['output']) as te:
        te.how_record('output')(broken)
        run = model if backend is None else torch.compile(model, backend=backend)
        [(file, source, text)] = heard(lambda: run(x))
        assert file==__file__ and 'output_0 of model(Net).fc(Linear)' in text
        if backend is None: assert source=='x = self.fc(x).relu() # in the forward'


@pytest.mark.parametrize('backend', [None, 'aot_eager'])
def test_a_statistic_that_fails_in_a_backward(backend):
    torch._dynamo.reset()
    model = Net()
    with torchEmber(model, include='fc', ttypes=['output_grad']) as te:
        te.how_record('output_grad')(broken)
        loss = (model if backend is None else torch.compile(model, backend=backend))(x).sum()
        def backward():
            loss.backward() # here
        points(backward, 'loss.backward() # here', 'output_0 of model(Net).fc(Linear)')


def test_what_an_optimizer_step_finds():
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    with torchEmber(model, optimizer=opt, include='fc', ttypes=['weight_grad']) as te:
        te.how_record('weight_grad')(broken)
        def step():
            model(x).sum().backward()
            opt.step() # here
        points(step, 'opt.step() # here', 'grad_0 of model(Net).fc(Linear)')


def test_in_another_thread():
    "A thread of the user's has lines of its own; what has none is where the main thread waits"
    def of_mine(waits): warn('told') # mine
    def run(target):
        waits = threading.Event()
        t = threading.Thread(target=target, args=(waits,))
        t.start()
        waits.set(); t.join() # waits
    points(lambda: run(of_mine), "def of_mine(waits): warn('told') # mine", 'told')
    points(lambda: run(late), 'waits.set(); t.join() # waits', 'told')


def test_arming_twice():
    model = Net()
    te = torchEmber(model)
    def again():
        return torchEmber(model) # again
    points(lambda: again().disarm(), 'return torchEmber(model) # again', 'is armed already')
    def rearmed():
        te.rearm() # rearmed
    other = torchEmber(nn.Sequential(model.fc), include='0')
    te.disarm()
    points(lambda: (rearmed(), te.close()), 'te.rearm() # rearmed', 'is armed already')
    other.close()


def test_a_log_that_cannot_be_written(tmp_path):
    "The thread that writes finds it; it is told where the user's code waits for the rows"
    model = Net()
    te = torchEmber(model, home=tmp_path)
    (tmp_path/'log').write_text('a file where a folder should be')
    model(x)
    def look():
        return te.t.df # look
    [(file, source, text), *_] = heard(look)
    assert (file, source)==(__file__, 'return te.t.df # look') and 'cannot write' in text
    (tmp_path/'log').unlink() # there is a place again
    assert heard(te.close)==[] and len(te.t.df)==10


def test_of_a_snapshot_and_of_noise():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with from_activation(model) as caught:
        model(x)
        def look():
            return caught.state_dict # look
        points(look, 'return caught.state_dict # look', 'overwritten in place')
    with NoiseScale(model, 4) as ns:
        def step():
            ns.step() # noise
        points(step, 'ns.step() # noise', 'no backward')


script = '''
import sys, torch, warnings
sys.path.insert(0, {site!r})
from torch import nn
import trainer
from torchember import torchEmber
model = nn.Linear(2, 2)
te = torchEmber(model)
te.how_record('output')(lambda t: 1/0)
trainer.fit(model) # line 10
'''

def test_not_at_an_installed_trainer(tmp_path):
    "A training loop that was installed is passed over: it is not what the user can change"
    site = tmp_path/'lib'/'site-packages'
    site.mkdir(parents=True)
    (site/'trainer.py').write_text('import torch\ndef fit(model): model(torch.ones(2))\n')
    (tmp_path/'mine.py').write_text(script.format(site=str(site)))
    got = subprocess.run([sys.executable, '-W', 'always', 'mine.py'], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert 'mine.py:10: EmberWarning: output_0 of model(Linear)' in got.stderr
    got = subprocess.run([sys.executable, '-W', 'always', '-c', script.format(site=str(site))], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert '<string>:10: EmberWarning: output_0 of model(Linear)' in got.stderr
