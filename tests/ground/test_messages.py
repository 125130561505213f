"Messages to the user: the line to which a warning points, and errors for unknown names and arguments."
import ast
import threading
import warnings
from pathlib import Path

import programs
import pytest
import torch
from torch import nn

from torchember import EmberWarning, NoiseScale, from_activation, torchEmber
from torchember.ground.messages import warn

root = Path(__file__).parents[2]
x = torch.ones(4, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc,self.head = nn.Linear(3, 3),nn.Linear(3, 1)

    def forward(self, x):
        x = self.fc(x).relu() # in the forward
        return self.head(x)


def exec_late():
    "Return a function that warns and has no source line of the user."
    ns = {'warn': warn, '__name__': 'torch.generated'}
    exec('def late(waits):\n    waits.wait()\n    warn("told")', ns)
    return ns['late']


late = exec_late()


def broken(tensor): raise ZeroDivisionError('not today')


def heard(f):
    "Call `f`. Return file, source line and message of each EmberWarning."
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        f()
    return [(w.filename, Path(w.filename).read_text().splitlines()[w.lineno-1].strip(), str(w.message)) for w in said if w.category is EmberWarning]


def points(f, line, says):
    "Check that `f` gives one warning that points to this source line of this file."
    [(file, source, text)] = heard(f)
    assert (file, source)==(__file__, line) and says in text, (file, source, text)


def test_no_warning_counts_levels():
    "All warnings use `messages.warn`, which finds the line of the user."
    for p in (root/'torchember').rglob('*.py'):
        calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(p.read_text(encoding='utf-8'))) if isinstance(n, ast.Call)]
        assert 'warnings.warn' not in calls, p
        assert calls.count('warnings.warn_explicit')==(p==root/'torchember'/'ground'/'messages.py'), p


@pytest.mark.parametrize('backend', [None, 'eager', 'aot_eager'])
def test_a_statistic_that_fails_in_a_forward_warns_at_its_line(backend):
    "The warning points to the user's forward. In compiled code, it points to the user's file."
    torch._dynamo.reset()
    model = Net()
    with torchEmber(model, include='fc', ttypes=['output']) as te:
        te.how_record('output')(broken)
        run = model if backend is None else torch.compile(model, backend=backend)
        [(file, source, text)] = heard(lambda: run(x))
        assert file==__file__ and 'output_0 of model(Net).fc(Linear)' in text
        if backend is None: assert source=='x = self.fc(x).relu() # in the forward'


@pytest.mark.parametrize('backend', [None, 'aot_eager'])
def test_a_statistic_that_fails_in_a_backward_warns_at_its_line(backend):
    torch._dynamo.reset()
    model = Net()
    with torchEmber(model, include='fc', ttypes=['output_grad']) as te:
        te.how_record('output_grad')(broken)
        loss = (model if backend is None else torch.compile(model, backend=backend))(x).sum()
        def backward():
            loss.backward() # here
        points(backward, 'loss.backward() # here', 'output_0 of model(Net).fc(Linear)')


def test_a_problem_in_an_optimizer_step_warns_at_its_line():
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    with torchEmber(model, optimizer=opt, include='fc', ttypes=['weight_grad']) as te:
        te.how_record('weight_grad')(broken)
        def step():
            model(x).sum().backward()
            opt.step() # here
        points(step, 'opt.step() # here', 'grad_0 of model(Net).fc(Linear)')


def test_a_warning_of_another_thread_has_a_line_of_the_user():
    "A warning points to a line of the user in the same thread, or else to the line at which the main thread waits."
    def of_mine(waits): warn('told') # mine
    def run(target):
        waits = threading.Event()
        t = threading.Thread(target=target, args=(waits,))
        t.start()
        waits.set(); t.join() # waits
    points(lambda: run(of_mine), "def of_mine(waits): warn('told') # mine", 'told')
    points(lambda: run(late), 'waits.set(); t.join() # waits', 'told')


def test_arming_twice_warns_at_the_second_call():
    model = Net()
    te = torchEmber(model)
    def again():
        return torchEmber(model) # again
    points(lambda: again().disarm(), 'return torchEmber(model) # again', 'is already recorded')
    def rearmed():
        te.rearm() # rearmed
    other = torchEmber(nn.Sequential(model.fc), include='0')
    te.disarm()
    points(lambda: (rearmed(), te.close()), 'te.rearm() # rearmed', 'is already recorded')
    other.close()


def test_a_log_that_cannot_be_written_warns_where_the_user_waits(tmp_path):
    "The writer thread finds the problem, but the warning points to the line at which the user waits for rows."
    model = Net()
    te = torchEmber(model, home=tmp_path)
    (tmp_path/'log').write_text('a file where a folder should be')
    model(x)
    def look():
        return te.t.df # look
    [(file, source, text), *_] = heard(look)
    assert (file, source)==(__file__, 'return te.t.df # look') and 'cannot write' in text
    (tmp_path/'log').unlink() # the log folder can be created again
    assert heard(te.close)==[] and len(te.t.df)==10


def test_snapshots_and_noise_warn_at_the_line_of_the_user():
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

def test_no_warning_points_into_an_installed_trainer(tmp_path):
    "Frames of an installed training loop are skipped, because the user cannot change them."
    site = tmp_path/'lib'/'site-packages'
    site.mkdir(parents=True)
    (site/'trainer.py').write_text('import torch\ndef fit(model): model(torch.ones(2))\n')
    (tmp_path/'mine.py').write_text(script.format(site=str(site)))
    got = programs.run(Path('mine.py'), cwd=tmp_path, PYTHONWARNINGS='always')
    assert got.returncode==0 and 'mine.py:10: EmberWarning: output_0 of model(Linear)' in got.stderr
    got = programs.run(script.format(site=str(site)), cwd=tmp_path, PYTHONWARNINGS='always')
    assert got.returncode==0 and '<string>:10: EmberWarning: output_0 of model(Linear)' in got.stderr


# ---- messages of errors

def told(exc, f, *args, **kwargs):
    with pytest.raises(exc) as e: f(*args, **kwargs)
    return str(e.value)


def train(model, te, order, steps=3, zero=None):
    "Run a training loop with these parts in order: f(orward), b(ackward), o(ptimizer), z(ero_grad), s (te.step)."
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    loss = None
    def forward():
        nonlocal loss
        loss = model(x).square().mean()
    parts = dict(f=forward, b=lambda: loss.backward(), o=opt.step, z=lambda: opt.zero_grad(**(zero or {})), s=te.step)
    said = []
    for _ in range(steps):
        for c in order: said.append((c, heard(parts[c])))
    return [(i, c) for i,(c,got) in enumerate(said) for _ in got], [text for _,got in said for _,_,text in got]


@pytest.mark.parametrize('order,zero,at', [
    ('zfbos', None, []), ('zfbso', None, []), ('fbsoz', None, []),
    ('fbozs', None, [(4, 's')]), # the first te.step() without gradients warns
    ('fbozs', {'set_to_none': False}, [(4, 's')]), # zero gradients have a message of their own
    ('fsboz', None, [(6, 's')])]) # the second te.step() warns, because the first was called before the backward
def test_a_step_without_gradients_warns_once(order, zero, at):
    "One warning is given immediately, and only if gradients are lost."
    model = Net()
    te = torchEmber(model)
    where,texts = train(model, te, order, zero=zero)
    assert where==at
    for t in texts: assert ('all gradients are zero' in t and 'call te.step() first' in t) if zero else 'after backward() and before zero_grad()' in t
    rows = te.t.df.query("ttype=='weight_grad'")
    assert len(rows)==(12 if not at or zero else 0) and ((rows[['max', 'min']]==0).all(axis=None) if zero else True)
    te.close()


def test_a_step_without_training_does_not_warn():
    "Passes without training, and models without trainable parameters, have no gradients that could be lost."
    model = Net()
    with torchEmber(model) as te:
        assert heard(lambda: [(model(x), te.step()) for _ in range(3)])==[]
    model.requires_grad_(False)
    with torchEmber(model) as te:
        assert heard(lambda: [(model(x), te.step()) for _ in range(3)])==[]


def test_an_optimizer_may_be_given_by_position():
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    with torchEmber(model, opt) as te:
        for _ in range(2):
            model(x).sum().backward()
            opt.step()
    assert te.recorder.watch.optimizers==[opt] and te.t.df.step.unique().tolist()==[0, 1]
    assert 'got a str' in told(TypeError, lambda: torchEmber(model, 'full'))
    assert 'positional' in told(TypeError, lambda: torchEmber(model, opt, 'full'))
    assert 'full' in told(ValueError, lambda: torchEmber(model, opt, stats='ful'))


@pytest.mark.parametrize('typed,ours', [('gradient', 'output_grad'), ('Gradients', 'output_grad'), ('optimiser_state', 'optimizer'), ('updates', 'update')])
def test_a_picture_names_what_was_typed(typed, ours):
    from torchember import scalar_global_heatmap, scalar_line
    with torchEmber(Net()) as te: te.model(x)
    for picture in (scalar_line, scalar_global_heatmap):
        for source in (te, te.fname, te.t.df):
            text = told(ValueError, picture, source, tt=typed)
            assert f"has no rows of {typed!r}, which is {ours!r} here" in text and repr(ours) in text.partition('next time')[2], text
            text = told(ValueError, picture, source, tt=ours)
            assert f"has no rows of {ours!r};" in text


def test_the_advice_how_to_record_works():
    "The error message of a plot contains code, and this code can be run unchanged."
    from torchember import scalar_line
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    with torchEmber(model) as te: model(x)
    for asked in (dict(tt='update'), dict(tt='gradient'), dict(scalar_metric='l2'), dict(scalar_metric='norm')):
        text = told(ValueError, scalar_line, te, **asked)
        line = text[text.rindex('torchEmber('):].rstrip('.').split(", or stats=")[0]
        with eval(line, dict(torchEmber=torchEmber, model=model, opt=opt)) as next_:
            for _ in range(2):
                opt.zero_grad()
                model(x).sum().backward()
                opt.step()
                if next_.recorder.watch is None: next_.step()
        scalar_line(next_, **asked if 'norm' not in asked.values() else dict(scalar_metric='l2'))


def test_a_misspelt_statistic_is_not_suggested_for_recording():
    "The message suggests recording only for names of statistics that exist."
    from torchember import read, scalar_line, wide
    with torchEmber(Net()) as te: te.model(x)
    for f in (lambda s: scalar_line(te, scalar_metric=s), lambda s: wide(te, s, 'output'), lambda s: read(te, columns=[s])):
        assert 'torchEmber(' not in (text := told(ValueError, f, 'sdt')) and "Did you mean 'std'" in text
        assert 'torchEmber(' not in told(ValueError, f, 'qqqq')
        assert "Did you mean 'l2'? To have it in the next run: torchEmber(model, stats=['mean', 'std', 'l2'])" in told(ValueError, f, 'norm')
        text = told(ValueError, f, 'rms')
        assert "To have it in the next run: torchEmber(model, stats=['mean', 'std', 'rms'])" in text and 'Did you' not in text
        assert "Monitor(model, {'<path>': ['WeightNorm']})" in (text := told(ValueError, f, 'WeightNorn')) and "'WeightNorn']" not in text
    for stats in (['mean', 'sdt'], 'sdt'): assert "'std'" in told(ValueError, torchEmber, Net(), stats=stats)


@pytest.mark.parametrize('nothing', [(), [], set()])
def test_an_empty_choice_raises(nothing):
    "Empty ttypes or stats raise an error at once. Otherwise the user would find a run without rows at its end."
    model = Net()
    assert "no tensor type, so nothing would be recorded" in told(ValueError, torchEmber, model, ttypes=nothing)
    assert 'got an empty list' in told(ValueError, torchEmber, model, stats=nothing)
    assert '_torchember' not in vars(model)
    with torchEmber(model, ttypes='probe') as te:
        model(x)
        te.log(loss=1.)
    assert [r['ttype'] for r in te.t.lines()]==['scalar']


def test_log_and_mark_explain_wrong_arguments():
    with torchEmber(Net()) as te:
        te.model(x)
        assert 'of shape (3,). Pass one number: te.log(loss=loss.mean())' in told(TypeError, lambda: te.log(loss=torch.ones(3)))
        assert 'Write te.log(loss=loss)' in told(TypeError, lambda: te.log({'loss': 1.}))
        assert 'Write te.mark(epoch=3)' in told(TypeError, lambda: te.mark(3))
        assert told(TypeError, lambda: te.log(loss=None))=='te.log takes numbers, but loss is None. Pass one number, or leave out loss.'
        te.log(loss=torch.ones(1, 1))
    assert te.t.df.query("ttype=='scalar'").loss.tolist()==[1.]


def test_functions_report_a_run_without_rows():
    "For a run without rows, the errors of all functions give this reason."
    from torchember import overview, report, scalar_global_heatmap, scalar_line, wide
    te = torchEmber(Net())
    for f in (overview, scalar_line, scalar_global_heatmap, lambda te: wide(te, 'std', 'output'), lambda te: report(te, 'x.html')):
        assert 'has no rows yet. Rows are recorded when the model is called' in told(ValueError, f, te), f
    te.close()


def test_functions_report_a_run_with_scalars_only():
    "A run with only scalar rows has no tensors to draw. The message does not mention arguments that were not given."
    from torchember import overview, summary
    te = torchEmber(Net())
    te.log(loss=1.)
    for f in (overview, summary, lambda te: te.show()):
        assert told(ValueError, f, te)==f'{te.fname} has no rows of tensors yet. Rows are recorded when the model is called during the training.'
    assert 'got ttype=[]' in told(ValueError, lambda: te.show(tt=[]))
    te.close()


def test_an_unknown_argument_names_the_known_ones():
    "The message lists the arguments of the function. A TypeError raised inside the function is not changed."
    import matplotlib.pyplot as plt

    from torchember import overview, read, scalar_global_heatmap, scalar_line, summary
    with torchEmber(Net()) as te: te.model(x)
    for f,args,odd,meant in ((torchEmber, Net(), 'stat', 'stats'), (torchEmber, Net(), 'statistics', 'stats'), (torchEmber, Net(), 'optim', 'optimizer'),
            (read, te, 'layer', 'path'), (overview, te, 'metric', 'stat'), (te.show, None, 'metric', 'stat'), (summary, te, 'tensor_type', 'ttype'),
            (scalar_line, te, 'metric', 'stat'), (scalar_line, te, 'tensor_type', 'ttype'), (scalar_line, te, 'markr', 'marker'),
            (scalar_global_heatmap, te, 'metric', 'stat'), (scalar_global_heatmap, te, 'module', 'path')):
        text = told(TypeError, f, *([] if args is None else [args]), **{odd: 'std'})
        assert text.startswith('No argument of ') and f' {odd!r}. Known: ' in text and f' Did you mean {meant!r}' in text, text
    assert 'Known: run, path, ttype, stat' in told(TypeError, scalar_line, te, metric='std')
    assert "missing 1 required positional argument: 'model'" in told(TypeError, torchEmber)
    assert 'torchEmber records an nn.Module, got an int.' in told(TypeError, torchEmber, 3)
    plt.close('all')


def test_a_model_that_is_never_called_warns():
    "The given model is never called: this gives a warning at the second step, and a remark at the end."
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    te = torchEmber(model, optimizer=opt)
    another = Net()
    def step():
        another(x).sum().backward()
        opt.step() # steps
    said = [heard(step) for _ in range(4)]
    assert [len(s) for s in said]==[0, 1, 0, 0]
    assert said[1][0][1]=='opt.step() # steps' and 'is never called' in said[1][0][2]
    assert 'is never called' in str(te.close())


def test_unknown_attributes_suggest_known_names():
    import torchember
    te = torchEmber(Net())
    assert told(AttributeError, lambda: te.df)=="a torchEmber has no attribute 'df'. The tracker te.t has this attribute: te.t.df."
    assert told(AttributeError, lambda: te.lerning)=="a torchEmber has no attribute 'lerning'."
    assert not hasattr(te, '__array__') and told(AttributeError, lambda: te._nothing)=="a torchEmber has no attribute '_nothing'."
    assert "Did you mean 'scalar_line'" in told(AttributeError, lambda: torchember.scalarline)
    assert not hasattr(torchember, '_nothing')
    te.close()
