"Rows of the benchmark table and their lines."
from importlib import import_module

rows = {} # name of a row -> (title, function that measures it)


class Skip(Exception):
    "Raised by a row of the benchmark that this machine cannot measure. The message says what is missing."


def row(
    name, # Name on the command line: `python -m benchmarks NAME`
    title # Description of what the row compares
):
    """Return a decorator that registers a function as a row of the benchmark.

    The function has the argument `quick`, runs in a process of its own, and returns lines of the table."""
    def add(f):
        rows[name] = title,f
        return f
    return add


def load(modules):
    "Return the rows that some Python modules register: name -> (title, function). `modules`: names of Python modules, separated by commas."
    modules = modules.split(',')
    for m in modules: import_module(m)
    return {n: r for n,r in rows.items() if r[1].__module__ in modules}


def line(
    what, # Description of the measurement
    value, # The measured number: the median of repeated measurements
    unit, # Unit of the number: '%' for added CPU time, 'x' for a ratio, 'us' (tables show µs), 's', ...
    at_most=None, # Upper limit of the value
    at_least=None, # Lower limit of the value
    note='', # Explanation below the table
    **spread # Spread of the measurements: `interval`, `quartiles`, `n`
):
    """Return a line of the table as a dict, with the verdict whether its value is within its limits.

    The verdict is certain if the whole interval of the value gives the same verdict."""
    def ok(v): return (at_most is None or v<=at_most) and (at_least is None or v>=at_least)
    out = dict(what=what, value=value, unit=unit, at_most=at_most, at_least=at_least, note=note, interval=None, quartiles=None, n=1) | spread
    ends = {ok(v) for v in (value, *(out['interval'] or ()))}
    has_limit = (at_most, at_least)!=(None, None)
    return out | dict(verdict=('holds' if ok(value) else 'misses') if has_limit else None, sure=len(ends)==1 if has_limit else None)
