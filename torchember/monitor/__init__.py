"""Chosen quantities of chosen modules, at chosen steps

The classes of the quantities are fetched from their rooms when they are touched: `from torchember.monitor import MeanTID`."""
from importlib import import_module

rooms = 'single_step', 'multi_step'


def __getattr__(name):
    for room in rooms if not name.startswith('_') and name not in ('views', 'quantities', 'watching', 'monitor', *rooms) else ():
        found = getattr(import_module(f'.{room}', __name__), name, None)
        if isinstance(found, type): return found
    raise AttributeError(f"module 'torchember.monitor' has no attribute {name!r}")
