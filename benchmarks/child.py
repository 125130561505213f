"""Measures one row of the benchmark in its own process.

`python -m benchmarks.child MODULE ROW quick|full THREADS` prints the lines of the row as JSON, or the reason why there are none."""
import json
import sys

from .registry import Skip, load


def main(module, name, size, threads):
    title,f = load(module)[name]
    if 'torch' in sys.modules: sys.modules['torch'].set_num_threads(int(threads))
    try: out = list(f(size=='quick'))
    except Skip as e: out = {'skipped': str(e)}
    print(json.dumps(out))


if __name__=='__main__': main(*sys.argv[1:])
