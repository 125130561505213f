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
pytestmark = pytest.mark.filterwarnings('error:The rule') # one that fails is a defect
rises = {'up_before_it_goes_down'} # healthy trainings whose first steps look like a divergence


moments = 12, 24, 48 # steps after which an unfinished training is judged, too


def some(trainings, one_in, in_ci=1):
    "Return all trainings as parameters: one of `one_in` for `make test`, one of `in_ci` for CI, the others for a release."
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
    "Check the finished training and one moment of it, chosen by the name of the training"
    check_no_findings(training, tmp_path, moments[len(training.name)%3])


@pytest.mark.release # rules that are silent after all of it, and at one of the moments, nearly always are at the others
@pytest.mark.parametrize('training', [pytest.param(t, id=n) for n,t in zoo.healthy.items()])
def test_a_healthy_training_has_no_finding_at_any_moment(training, tmp_path): check_no_findings(training, tmp_path, *moments)


def check_look(text):
    "Check that the expression `look` of a finding calls functions of torchember, with arguments that they have."
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
    "One of ten in CI: few rules need stats='full', and each has its own tests"
    for e in run(training, tmp_path, stats='full', ttypes=ALL)[0]:
        found = diagnose(e.fname, home=tmp_path)
        assert found.healthy, found
