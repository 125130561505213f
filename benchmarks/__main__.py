"Command `python -m benchmarks`: measures the rows of the benchmark table, prints the table and saves it."
import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path

from .machine import versions
from .registry import load
from .runner import modules, run_row
from .table import columns_text, save, text


def arguments(argv):
    p = argparse.ArgumentParser('python -m benchmarks', description='Measure what torchember costs. A whole run is saved as latest.json and latest.md')
    p.add_argument('rows', nargs='*', metavar='ROW', help='rows to measure (all)')
    p.add_argument('--quick', action='store_true', help='few repetitions, for a rough estimate')
    p.add_argument('--list', action='store_true', help='list the rows')
    p.add_argument('--threads', type=int, default=1, help='threads of torch (1)')
    p.add_argument('--update', action='store_true', help='replace these rows in latest.json')
    p.add_argument('--peers', action='store_true', help='install the other tools that the rows peers and survives need, each into its own folder')
    p.add_argument('--rows-of', default=modules, metavar='MODULES', help='Python modules that register other rows')
    p.add_argument('--results', type=Path, default=Path(__file__).with_name('results'), metavar='FOLDER', help='where to save')
    return p, p.parse_args(argv)


def updated(old, new):
    "Return the saved result `old` with the rows of `new` replaced. Both must have equal versions, because a table compares one set of versions."
    if old['versions']!=new['versions']: raise SystemExit(f"latest.json has other versions: {old['versions']}. Measure all rows.")
    rows = {r['row']: r for r in new['rows']}
    return new | {'rows': [rows.pop(r['row'], r) for r in old['rows']] + list(rows.values())}


def main(argv=None):
    parser,a = arguments(argv)
    if a.peers: os.environ['TORCHEMBER_PEERS'] = '1'
    rows = load(a.rows_of)
    if a.list: return print(columns_text([(n, title) for n,(title,_) in rows.items()]))
    for n in a.rows:
        if n not in rows: parser.error(f"there is no row {n!r}. Rows: {', '.join(rows)}")
    done = []
    for n in a.rows or rows:
        print(f'{n}: {rows[n][0]} ...', end=' ', file=sys.stderr, flush=True)
        done.append(run_row(n, rows[n][0], rows[n][1].__module__, a.quick, a.threads))
        print(f"{done[-1]['wall']:.0f} s", file=sys.stderr)
        if 'error' in done[-1]: print(done[-1]['trace'], file=sys.stderr)
    result = dict(date=str(date.today()), quick=a.quick, versions=versions(a.threads), rows=done)
    name = 'partial' if a.quick or (a.rows and not a.update) else 'latest'
    if a.rows and name=='latest': result = updated(json.loads((a.results/'latest.json').read_text()), result)
    save(result, a.results, name)
    print(f'\n{text(result)}\n\nSaved as {name}.json and {name}.md')
    return any('error' in r for r in done)


if __name__=='__main__': sys.exit(main())
