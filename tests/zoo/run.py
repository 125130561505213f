"Run trainings of the zoo with a real `torchEmber`, and print the time of each: `python -m zoo.run`"
import argparse
import os
import sys
import tempfile
import time
import traceback
import zlib

import torch

import torchember

from . import broken, healthy, load

ALL = ('input', 'output', 'weight', 'weight_grad', 'output_grad', 'input_grad', 'update', 'optimizer', 'buffer')


def with_name(t, embers, home=None, **forced):
    """Return the function that a training calls instead of `torchEmber`.

    It appends each ember to `embers`. A second ember of a training has the name `<name>_2`."""
    def arm(model, **asked):
        name = t.name if not embers else f'{t.name}_{len(embers)+1}'
        wanted = {'name': name, 'home': home} | asked | t.more | forced
        if 'ttypes' in forced and wanted.get('optimizer') is None: wanted['ttypes'] = [k for k in ALL if k not in ('update', 'optimizer')]
        embers.append(torchember.torchEmber(model, **wanted))
        return embers[-1]
    return arm


def rows_and_loss(ember):
    "Return the number of rows of a run, and the last loss. The loss column with most values is used."
    df = ember.t.df
    noted = df.dropna(axis=1, how='all').columns.difference(['step', 'module'])
    losses = [c for c in noted if any(w in str(c).lower() for w in ('loss', 'nll', 'elbo', 'return'))]
    best = max(losses, key=lambda c: df[c].notna().sum(), default=None)
    return len(df), None if best is None else float(df[best].dropna().iloc[-1])


def run(t, home=None, **forced):
    "Run one training of the zoo. Return its embers and the CPU seconds."
    torch.manual_seed(zlib.crc32(t.name.encode())) # The seed depends on the name, because some trainings set no seed
    embers,start = [],time.process_time()
    try: t.run(with_name(t, embers, home, **forced))
    finally:
        seconds = time.process_time()-start
        for e in embers: e.close() # Embers are closed also if the training raises an exception
    if not embers: raise AssertionError(f'{t.name} armed nothing')
    return embers,seconds


def warm(home):
    "Create an ember before the first training, so that the imports of the first ember do not count as time of a training."
    model = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=.1)
    for name,form in (('warm', {}), ('warm_full', {'stats': 'full', 'ttypes': ALL})):
        te = torchember.torchEmber(model, optimizer=opt, home=home, name=name, **form)
        model(torch.randn(3, 2)).sum().backward()
        opt.step()
        te.close()


def main(argv=None):
    p = argparse.ArgumentParser('python -m zoo.run', description='Run trainings of the zoo')
    p.add_argument('names', nargs='*', metavar='[healthy|broken] [NAME ...]', help='which; all of them without it')
    p.add_argument('--home', help='where the runs go; a folder that is removed afterwards without it')
    p.add_argument('--full', action='store_true', help="with stats='full', and all tensor types where there is an optimizer")
    a = p.parse_args(argv)
    torch.set_num_threads(1)
    load()
    kinds = {'healthy': healthy, 'broken': broken}
    wanted = [kinds[n] for n in a.names if n in kinds] or [healthy, broken]
    names = [n for n in a.names if n not in kinds]
    known = {n: t for trainings in wanted for n,t in trainings.items()}
    if missing := [n for n in names if n not in known]: p.error(f"no training {', '.join(missing)}")
    forced = {'stats': 'full', 'ttypes': ALL} if a.full else {}
    failed = []
    with tempfile.TemporaryDirectory(prefix='zoo-') as home:
        warm(home)
        for t in (known[n] for n in names or known):
            state = torch.get_default_dtype(),torch.is_grad_enabled()
            try:
                embers,seconds = run(t, a.home or home, **forced)
                told = [rows_and_loss(e) for e in embers]
                print(f'{t.name:<40} {seconds:6.2f} s {sum(n for n,_ in told):>8,} rows', *('-' if l is None else f'{l:.4g}' for _,l in told), flush=True)
            except Exception as e:
                failed.append(t.name)
                print(f'{t.name:<40} FAILED {type(e).__name__}: {str(e)[:300]}', flush=True)
                traceback.print_exc(limit=-4)
            if state!=(torch.get_default_dtype(), torch.is_grad_enabled()):
                torch.set_default_dtype(state[0])
                torch.set_grad_enabled(state[1])
                print(f'{t.name:<40} left a setting of torch', flush=True)
                failed.append(t.name)
    print(f'{len(failed)} of {len(names or known)} failed' if failed else f'{len(names or known)} passed')
    return bool(failed)


if __name__=='__main__':
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    sys.exit(main())
