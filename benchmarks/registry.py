"Rows of the benchmark table and their lines."
from importlib import import_module

rows = {} # name -> (title, function)


class Skip(Exception):
    "Raised by a row that this machine cannot run. The message says what is missing."


def row(
    name, # Name on the command line: `python -m benchmarks NAME`
    title # What the row compares
):
    "Return a decorator that registers a function of `quick` as a row. The function runs in its own process and returns lines."
    def add(f):
        rows[name] = title,f
        return f
    return add


def load(modules):
    "Return the rows that `modules` register: name -> (title, function). `modules`: names with commas between."
    modules = modules.split(',')
    for m in modules: import_module(m)
    return {n: r for n,r in rows.items() if r[1].__module__ in modules}


def line(
    what, # Description of the measurement
    value, # The number; the median of repeated measurements
    unit, # '%' of added CPU time, 'x', 'us', 's', ...
    at_most=None, # Upper limit
    at_least=None, # Lower limit
    note='', # Explanation below the table
    **spread # `interval`, `quartiles`, `n`
):
    "Return a line of the table. It holds if the value is within its limits, and is sure if the whole interval agrees."
    def ok(v): return (at_most is None or v<=at_most) and (at_least is None or v>=at_least)
    out = dict(what=what, value=value, unit=unit, at_most=at_most, at_least=at_least, note=note, interval=None, quartiles=None, n=1) | spread
    ends = {ok(v) for v in (value, *(out['interval'] or ()))}
    has_limit = (at_most, at_least)!=(None, None)
    return out | dict(verdict=('holds' if ok(value) else 'misses') if has_limit else None, sure=len(ends)==1 if has_limit else None)
