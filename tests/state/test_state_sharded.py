"""Reductions of a sharded model are those of the whole model, in every process"""
import json
import math
from pathlib import Path

import programs
import pytest

script = Path(__file__).parent/'sharded_state.py'
world = 2


@pytest.fixture(scope='module')
def numbers(tmp_path_factory):
    "Return the numbers of each process."
    d = tmp_path_factory.mktemp('ranks')
    ps = [programs.start(script, r, world, d/'store', d/'rank') for r in range(world)]
    try: errors = [p.communicate()[1] for p in ps]
    finally:
        for p in ps: p.kill()
    assert not any(p.returncode for p in ps), '\n'.join(errors)
    return [json.loads((d/f'rank{r}.json').read_text()) for r in range(world)]


def close(a, b):
    "Return True if two nested numbers are equal within rounding of float32."
    if isinstance(a, dict): return a.keys()==b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, list): return len(a)==len(b) and all(map(close, a, b))
    if isinstance(a, str): return a==b
    return math.isclose(a, b, rel_tol=2e-5, abs_tol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('what', range(3), ids=['weight', 'grad', 'update'])
def test_every_process_has_the_numbers_of_the_whole(numbers, what):
    for t in numbers: assert close(t['sharded'][what], t['plain'][what])


def test_ratios_of_whole_layers(numbers):
    for t in numbers: assert close(*t['ratio'])


def test_replicas_count_once_and_partial_sums_are_added(numbers):
    for t in numbers:
        assert close(t['mixed'], {k: t['want'] for k in t['mixed']} | {'one': t['want_one']})
        assert close(t['mixed_all'], math.sqrt(5*t['want']**2+t['want_one']**2))
        assert close(t['square'], {k: t['want'] for k in t['square']})


def test_one_collective_per_call_and_none_for_printing(numbers):
    for t in numbers: assert t['collectives']==dict(norm=1, describe=1, ratio=2, repr=0, shape=0)
    assert numbers[0]['repr']==numbers[1]['repr'] and 'L2=sharded' in numbers[0]['repr'] and 'Numel=58' in numbers[0]['repr']


def test_arithmetic_stays_sharded(numbers):
    for t in numbers: assert close(*t['flat']) and close(*t['twice'])
