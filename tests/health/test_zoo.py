"Healthy trainings have no findings, and the first finding of a broken training is the planted fault"
import ast
from inspect import signature

import pytest
import torchember
import zoo
from zoo.run import ALL, run

from torchember import diagnose, read
from torchember.health.diagnose import load_history
from torchember.health.history import History

zoo.load()
pytestmark = pytest.mark.filterwarnings('error:The rule') # A rule that raises an exception is a defect
rises = {'up_before_it_goes_down'} # Healthy trainings with a rising loss in the first steps, as in a divergence


moments = 12, 24, 48 # Numbers of steps after which an unfinished training is diagnosed, too


def some(trainings, one_in, in_ci=1):
    "Return trainings as parameters. Marks: every `one_in`-th always runs, every `in_ci`-th runs in CI, and the rest before a release."
    def marks(i, t):
        if i%one_in==0: return ()
        return pytest.mark.slow if t.name in zoo.in_ci or t.module in zoo.first_modules and i%in_ci==0 else pytest.mark.release
    return [pytest.param(t, id=n, marks=marks(i, t)) for i,(n,t) in enumerate(trainings.items())]


def check_no_findings(training, home, *moments):
    for e in run(training, home)[0]:
        h = load_history(e.fname, home)
        found = diagnose(h)
        assert found.healthy, found
        if training.name in rises: continue
        rows = read(e.fname, home=home)
        for n in moments:
            early = diagnose(History(rows[rows.step<n], h.parameters, h.name))
            assert early.healthy, (n, early)


@pytest.mark.parametrize('training', some(zoo.healthy, 12, 3))
def test_a_healthy_training_has_no_finding(training, tmp_path):
    "Diagnose the finished training, and also the training at one earlier moment, which depends on its name"
    check_no_findings(training, tmp_path, moments[len(training.name)%3])


@pytest.mark.release # Rarely finds more than the test above, which checks one moment and the end
@pytest.mark.parametrize('training', [pytest.param(t, id=n) for n,t in zoo.healthy.items()])
def test_a_healthy_training_has_no_finding_at_any_moment(training, tmp_path): check_no_findings(training, tmp_path, *moments)


def check_look(text):
    "Check that the expression `look` of a finding calls functions of torchember with valid arguments."
    calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    assert calls, text
    for call in calls: signature(getattr(torchember, call.func.id)).bind(*call.args, **{k.arg: k.value for k in call.keywords})


@pytest.mark.parametrize('training', some(zoo.broken, 12, 2))
def test_the_first_finding_is_the_planted_fault(training, tmp_path):
    embers,_ = run(training, tmp_path)
    found = [diagnose(e.fname, home=tmp_path) for e in embers]
    for looks in (f['look'] for f in found): [check_look(text) for text in looks if isinstance(text, str) and text]
    wrong = [training.said_by(f) for f in found]
    if training.name in zoo.unknown: pytest.xfail(zoo.unknown[training.name])
    assert '' in wrong, wrong


@pytest.mark.parametrize('training', some({n: t for n,t in zoo.healthy.items() if t.module in zoo.first_modules}, 30, 10))
def test_a_healthy_training_with_all_statistics_has_no_finding(training, tmp_path):
    "CI runs one of ten trainings, because few rules need stats='full', and each rule has its own tests"
    for e in run(training, tmp_path, stats='full', ttypes=ALL)[0]:
        found = diagnose(e.fname, home=tmp_path)
        assert found.healthy, found
