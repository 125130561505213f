"Tests of `TrainingRecorder`: when a run is continued, and errors at the end of a run"
import pytest
from looped import batches, by_hand, heard, momentum, seeded

from torchember import emberTracker
from torchember.integrations.recording import TrainingRecorder


def train(recording, first, n):
    model = seeded()
    opt = momentum(model)
    recording.begin(model, opt, first)
    by_hand(model, opt, batches(n))
    return recording.end()['run']


def steps_of(run): return sorted({r['step'] for r in emberTracker(run).lines()})


def test_unrecorded_steps_are_no_gap():
    "The last recorded step is 2, the checkpoint is from step 4: the run is continued."
    for first in (0, 4): assert train(TrainingRecorder(name='mine', every=2), first, 4)=='mine'
    assert steps_of('mine')==[0, 2, 4, 6]


def test_last_run_of_a_name_is_continued():
    for _ in range(2): train(TrainingRecorder(name='mine'), 0, 3)
    assert train(TrainingRecorder(name='mine'), 3, 2)=='mine_2' and steps_of('mine_2')==[0, 1, 2, 3, 4] and steps_of('mine')==[0, 1, 2]


def test_warning_about_another_run_is_given_once():
    recording = TrainingRecorder(name='mine')
    train(recording, 0, 3)
    with heard('this training begins at step 1') as said:
        assert [train(recording, 1, 1) for _ in range(2)]==['mine_2', 'mine_3']
    assert len(said)==1


def test_failed_end_hides_no_error(monkeypatch):
    recording,model = TrainingRecorder(),seeded()
    te = recording.begin(model, momentum(model))
    close = te.close
    def broken(): close(); raise OSError('disk full')
    monkeypatch.setattr(te, 'close', broken)
    with heard('disk full') as said, pytest.raises(ValueError, match='of the user'):
        try: raise ValueError('of the user')
        except ValueError:
            recording.end()
            raise
    assert len(said)==1 and recording.te is None and not te.armed
