"Run all test trainings and `diagnose` by `python -m zoo.judge`, and save a table of planted and reported faults"
import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import torch

from torchember import diagnose

from . import broken, healthy, load
from .run import run, warm

where = Path(__file__).parents[2]/'benchmarks'/'results'/'zoo.json'


def first_of(
    training, # A broken `Training`
    tables # What `diagnose` gives of each of its embers
): # Its first rule and '', or what is wrong with the first finding
    "Return the rule of the first finding. If a training has several embers, use the ember with the right finding."
    said = [(found.iloc[0]['rule'] if len(found) else '-', training.said_by(found)) for found in tables]
    return min(said, key=lambda s: s[1]!='')


def confusion(
    results # (training, tables) pairs
) -> dict:
    """Return a dict: planted fault -> rule of the first finding -> number of trainings. For healthy trainings, findings of severity 'info' do not
    count."""
    counts,alarms,n = {},Counter(),0
    for training,tables in results:
        if not training.rules:
            n += 1
            for found in tables: alarms.update(found[found['severity']!='info']['rule'])
            continue
        rule,wrong = first_of(training, tables)
        counts.setdefault(training.rules[0], Counter())[rule if wrong else training.rules[0]] += 1
    return {'healthy': {'trainings': n, 'findings': dict(alarms)}, 'broken': {k: dict(v) for k,v in sorted(counts.items())}}


def main(argv=None):
    p = argparse.ArgumentParser('python -m zoo.judge', description='Judge all trainings of the zoo, and save the table')
    p.add_argument('--save', type=Path, default=where, help='where to save')
    a = p.parse_args(argv)
    torch.set_num_threads(1)
    load()
    results = []
    with tempfile.TemporaryDirectory(prefix='zoo-') as home:
        warm(home)
        for t in [*healthy.values(), *broken.values()]:
            results.append((t, [diagnose(e.fname, home=home) for e in run(t, home)[0]]))
            said = [f.iloc[0]['rule'] if len(f) else '-' for f in results[-1][1]]
            print(f"{t.name:42} {first_of(t, results[-1][1])[1] if t.rules else ''} {' '.join(said)}")
    table = confusion(results)
    a.save.write_text(json.dumps(table, indent=1)+'\n')
    print(json.dumps(table, indent=1))


if __name__=='__main__': main()
