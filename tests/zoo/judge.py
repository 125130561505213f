"Run all trainings of the zoo and `diagnose` by `python -m zoo.judge`. Save tables of planted and reported faults"
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
# Modules with trainings of public benchmarks; each module has a table of its own
public = 'stackoverflow','silent_errors'


def first_of(
    training, # A broken training, an instance of `Training`
    tables # Findings of each ember of the training, as `diagnose` returns them
): # Rule of the first finding, and a description of the differences, '' if the finding is right
    "Return the rule of the first finding. If a training has several embers, use the ember with the right finding."
    said = [(found.iloc[0]['rule'] if len(found) else '-', training.said_by(found)) for found in tables]
    return min(said, key=lambda s: s[1]!='')


def confusion(
    results # Pairs of a training and the list of its tables of findings
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


def collection(module): return module if module in public else 'zoo'


def tables_of(
    results # Pairs of a training and the list of its tables of findings
) -> dict:
    "Return a confusion table for each collection: the trainings of the project, and each public benchmark."
    names = sorted({collection(t.module) for t,_ in results}, key=('zoo', *public).index)
    return {n: confusion([r for r in results if collection(r[0].module)==n]) for n in names}


def saved(file):
    "Return the tables of a result file. An older file contains only the table of the zoo."
    old = json.loads(file.read_text()) if file.exists() else {}
    return {'zoo': old} if 'broken' in old else old


def main(argv=None):
    p = argparse.ArgumentParser('python -m zoo.judge', description='Judge all trainings of the zoo, and save the tables')
    p.add_argument('--save', type=Path, default=where, help='where to save')
    p.add_argument('--only', choices=public, help='judge one public collection, and keep the other tables of the file')
    a = p.parse_args(argv)
    torch.set_num_threads(1)
    load()
    results = []
    with tempfile.TemporaryDirectory(prefix='zoo-') as home:
        warm(home)
        for t in [*healthy.values(), *broken.values()]:
            if a.only and t.module!=a.only: continue
            results.append((t, [diagnose(e.fname, home=home) for e in run(t, home)[0]]))
            said = [f.iloc[0]['rule'] if len(f) else '-' for f in results[-1][1]]
            print(f"{t.name:42} {first_of(t, results[-1][1])[1] if t.rules else ''} {' '.join(said)}", flush=True)
    table = (saved(a.save) if a.only else {})|tables_of(results)
    a.save.write_text(json.dumps(table, indent=1)+'\n')
    print(json.dumps(table, indent=1))


if __name__=='__main__': main()
