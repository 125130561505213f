"""Trainings of which one knows what is wrong with them. `healthy` and `broken` have all of them by name.

A training is a function of `arm`, which it calls in place of `torchEmber`, with the same arguments, and whose result it uses as an ember. Those in
`*_more` and `*_others` were written by people who did not know the rules, and first judged when the rules were as they were."""
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module

healthy,broken = {},{}
rooms = 'healthy_small', 'healthy_large', 'broken_values', 'broken_weights', 'broken_losses'
later = 'healthy_more', 'broken_more', 'healthy_others', 'broken_others'

unknown = { # broken trainings whose fault no row shows, and why
    'siamese_without_stop': 'that samples are alike shows in no number of a whole tensor',
    'siamese_without_strangers': 'that samples are alike shows in no number of a whole tensor',
    'targets_of_another_text': 'the loss falls to what the letters alone tell, and stays'}

@dataclass
class Training:
    name: str # What is trained, and what is planted in it
    run: Callable # Function of `arm`
    room: str # Where it is written
    rules: tuple = () # Of a broken one: rules one of which says it first
    paths: tuple = () # Modules one of which the first finding is of; a glob each; '' is the whole model
    steps: tuple = (0, 0) # Step in which the fault is first seen: from, to
    more: dict = field(default_factory=dict) # Arguments of `arm` with which it must be found, where a default run does not show it

    def said_by(self,
        found # What `diagnose` gives
    ): # What is wrong with the first finding: '' where it is the planted fault
        "Whether the first finding is what was planted"
        if not len(found): return 'nothing is found'
        first = found.iloc[0]
        wrong = [] if first['rule'] in self.rules else [f"{first['rule']}, not {' or '.join(self.rules)}"]
        if self.paths and not any(fnmatchcase(first['path'], p) for p in self.paths): wrong.append(f"of {first['path']!r}, not {self.paths}")
        start = first['first_step']==0 and self.steps[0]<=3 # what a whole training has, it has from its first step on
        if not start and not self.steps[0]<=first['first_step']<=self.steps[1]: wrong.append(f"at step {first['first_step']}, not {self.steps}")
        return '; '.join(wrong)

def noted(where, f, *args):
    "Put a training among the others, under a name of its own"
    room = f.__module__.rpartition('.')[2]
    name = f.__name__ if f.__name__ not in where else f'{f.__name__}_of_{room}'
    where[name] = Training(name, f, room, *args)
    return f

def is_healthy(f):
    "Note a healthy training"
    return noted(healthy, f)

def is_broken(*rules, paths=(), steps=(0, 0), **more):
    "Note a training with one planted fault, and what has to be said of it"
    return lambda f: noted(broken, f, rules, (paths,) if isinstance(paths, str) else tuple(paths), steps, more)

def load(also=True): # also: those that were written later
    "All trainings are noted"
    for room in rooms+(later if also else ()): import_module(f'.{room}', __name__)
