"One row, in a process of its own: `python -m benchmarks.child MODULE ROW quick|full THREADS` prints its lines as JSON"
import json
import sys

from .registry import load


def main(module, name, size, threads):
    title,f = load(module)[name]
    if 'torch' in sys.modules: sys.modules['torch'].set_num_threads(int(threads))
    print(json.dumps(list(f(size=='quick'))))


if __name__=='__main__': main(*sys.argv[1:])
