"On healthy trainings nothing is said, and of a broken one the first sentence is the fault that was planted"
import pytest
import zoo
from zoo.run import ALL, run

from torchember import diagnose, read
from torchember.health.diagnose import history_of
from torchember.health.history import History

zoo.load()
pytestmark = pytest.mark.filterwarnings('error:The rule') # one that fails is a defect
rises = {'up_before_it_goes_down'} # whose first steps are as those of a training that diverges


def some(trainings, one_in):
    "All trainings, of which one in so many is in `make test`"
    return [pytest.param(t, id=n, marks=() if i%one_in==0 else pytest.mark.slow if t.room in zoo.rooms else pytest.mark.release) for i,(n,
        t) in enumerate(trainings.items())]


@pytest.mark.parametrize('training', some(zoo.healthy, 12))
def test_a_healthy_training_is_left_in_peace(training, tmp_path):
    for e in run(training, tmp_path)[0]:
        found = diagnose(e.fname, home=tmp_path)
        assert found.healthy, found
        h = history_of(e.fname, tmp_path)
        if training.name in rises: continue
        rows = read(e.fname, home=tmp_path)
        for n in (12, 24, 48): # nor while it goes on
            early = diagnose(History(rows[rows.step<n], h.parameters, h.name))
            assert early.healthy, (n, early)


@pytest.mark.parametrize('training', some(zoo.broken, 12))
def test_the_first_finding_is_the_fault(training, tmp_path):
    embers,_ = run(training, tmp_path)
    wrong = [training.said_by(diagnose(e.fname, home=tmp_path)) for e in embers]
    if training.name in zoo.unknown: pytest.xfail(zoo.unknown[training.name])
    assert '' in wrong, wrong


@pytest.mark.parametrize('training', some({n: t for n,t in zoo.healthy.items() if t.room in zoo.rooms}, 30))
def test_with_more_statistics_a_healthy_one_is_left_in_peace_too(training, tmp_path):
    for e in run(training, tmp_path, stats='full', ttypes=ALL)[0]:
        found = diagnose(e.fname, home=tmp_path)
        assert found.healthy, found
