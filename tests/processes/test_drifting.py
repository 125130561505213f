"diagnose() finds model copies that drift apart in two processes, and finds nothing in healthy data-parallel trainings."
import os
import warnings
from pathlib import Path

import programs
import pytest

from torchember import diagnose

here = Path(__file__).parent


@pytest.fixture(scope='module')
def ran(tmp_path_factory):
    "Run `drifting.py` in two processes. Return the folder of the runs."
    d = tmp_path_factory.mktemp('drifting')
    programs.ranks(here/'drifting.py', d, n=2, PYTHONPATH=os.environ.get('PYTHONPATH', ''))
    return d


def found(ran, name):
    "Return the findings about a run, except hints."
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        df = diagnose(name, home=ran)
    return df[df['severity']!='info'].to_dict('records')


@pytest.mark.parametrize('name,first,words', [
    ('lost', 5, 'All gradients of rank 1 are zero in steps 5, 9'), ('second', 1, 'differ in every second step'),
    ('late', 8, 'From this step on, the gradients are not averaged'),
    ('rates', 1, 'so the optimizers differ'), ('start', 0, 'the weights differ from the first step on'),
    ('by_hand', 8, 'so the optimizers differ')])
def test_copies_that_drift_apart_are_an_error_with_its_reason(ran, name, first, words):
    one = found(ran, name)[0]
    assert (one['rule'], one['severity'], one['first_step'])==('replicas', 'error', first) and words in one['text'], one['text']


@pytest.mark.parametrize('name', ['plain', 'accumulated', 'local', 'long'])
def test_healthy_copies_have_no_finding(ran, name):
    assert [f['text'] for f in found(ran, name) if f['rule'] in ('replicas', 'rank_waits')]==[]


def test_models_that_begin_equal_and_are_never_averaged_are_a_hint(ran):
    "No wrapper is called, so the models may be copies or independent. Their differences are only a hint."
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        one, = (f for f in diagnose('never', home=ran).to_dict('records') if f['rule']=='replicas')
    assert one['severity']=='info' and 'differ in all 16 recorded steps' in one['text']
