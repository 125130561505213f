"The rows of the table, and what a line of it is"
from importlib import import_module

rows = {} # name -> (title, function)


class Skip(Exception):
    "What a row needs, and this machine has not"


def row(
    name, # What `python -m benchmarks` calls it
    title # What it compares
): # A decorator that returns the function unchanged
    "A row: a function of `quick` that runs in a process of its own and gives lines"
    def add(f):
        rows[name] = title,f
        return f
    return add


def load(modules):
    "The rows that modules register, their names with a comma between"
    modules = modules.split(',')
    for m in modules: import_module(m)
    return {n: r for n,r in rows.items() if r[1].__module__ in modules}


def line(
    what, # What was measured
    value, # The number; the median when it was measured often
    unit, # '%' of added CPU time, 'x', 'us', 's', ...
    at_most=None, # The bar
    at_least=None, # The bar, where more is better
    note='', # What a reader must know
    **spread # `interval`, `quartiles`, `n`
):
    "A line of the table. It holds when the value keeps to the bar; it is sure when the whole interval says the same"
    def ok(v): return (at_most is None or v<=at_most) and (at_least is None or v>=at_least)
    out = dict(what=what, value=value, unit=unit, at_most=at_most, at_least=at_least, note=note, interval=None, quartiles=None, n=1) | spread
    ends = {ok(v) for v in (value, *(out['interval'] or ()))}
    bar = (at_most, at_least)!=(None, None)
    return out | dict(verdict=('holds' if ok(value) else 'misses') if bar else None, sure=len(ends)==1 if bar else None)
