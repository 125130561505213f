"""Test trainings with a known fault, or without a fault. The dicts `healthy` and `broken` contain all of them by name.

A training is a function of `arm`. It calls `arm` like `torchEmber`, and uses the result as an ember.
The authors of the Python modules `*_more` and `*_others` did not know the rules of torchember.
The rules were not changed before their first test on these trainings."""
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module

healthy,broken = {},{}
first_modules = ('healthy_small', 'healthy_large', 'healthy_outputs', 'healthy_targets', 'broken_values', 'broken_weights', 'broken_losses',
    'broken_outputs', 'broken_targets')
later_modules = ('healthy_more', 'broken_more', 'healthy_others', 'broken_others', 'healthy_silent', 'broken_silent', 'healthy_facts', 'broken_facts',
    'stackoverflow', 'silent_errors', 'broken_attention', 'healthy_attention', 'broken_experts', 'healthy_experts', 'broken_stream', 'healthy_stream')
in_ci = {'so_48221692', 'so_33969059', 'optimizer_of_the_old_parameters', # fast trainings of later modules that run in CI, too
    'so_48221692_corrected', 'one_layer_not_cast_fixed', 'pole_on_a_cart'}

unknown = { # broken trainings whose fault is visible in no row, or not in each run, with the reason
    'siamese_without_stop': 'equal samples do not change any statistic of a whole tensor',
    'siamese_without_strangers': 'equal samples do not change any statistic of a whole tensor',
    'targets_of_another_text': 'the loss falls to the level of letter frequencies, and stays there',
    'autotrainer_relus': 'the loss stays at ln 10 for a while, and then falls without help, to 1.4 or 1.7 after 200 steps'}

@dataclass
class Training:
    name: str # What is trained, and what is planted in it
    run: Callable # Function of `arm`
    module: str # Python module that defines it
    rules: tuple = () # For a broken training: one of these rules must report first
    paths: tuple = () # Globs: the first finding must be about one of these modules; '' is the whole model
    steps: tuple = (0, 0) # First and last step in which the fault may appear
    more: dict = field(default_factory=dict) # Arguments of `arm`, if a default run does not show the fault

    def said_by(self,
        found # What `diagnose` gives
    ): # What is wrong with the first finding: '' where it is the planted fault
        "Compare the first finding with the planted fault. Return what is wrong with the finding, or ''."
        if not len(found): return 'nothing is found'
        first = found.iloc[0]
        wrong = [] if first['rule'] in self.rules else [f"{first['rule']}, not {' or '.join(self.rules)}"]
        if self.paths and not any(fnmatchcase(first['path'], p) for p in self.paths): wrong.append(f"of {first['path']!r}, not {self.paths}")
        start = first['first_step']==0 and self.steps[0]<=3 # what a whole training has, it has from its first step on
        if not start and not self.steps[0]<=first['first_step']<=self.steps[1]: wrong.append(f"at step {first['first_step']}, not {self.steps}")
        return '; '.join(wrong)

def noted(where, f, *args):
    "Add a training to a dict of trainings under a unique name."
    module = f.__module__.rpartition('.')[2]
    name = f.__name__ if f.__name__ not in where else f'{f.__name__}_of_{module}'
    where[name] = Training(name, f, module, *args)
    return f

def is_healthy(f):
    "Add a healthy training to the zoo."
    return noted(healthy, f)

def is_broken(*rules, paths=(), steps=(0, 0), **more):
    "Add a training with one planted fault to the zoo, and the finding that `diagnose` must report first."
    return lambda f: noted(broken, f, rules, (paths,) if isinstance(paths, str) else tuple(paths), steps, more)

def load(also=True): # also: True to include the modules that were written later
    "Import all Python modules with trainings, so that `healthy` and `broken` are complete."
    for module in first_modules+(later_modules if also else ()): import_module(f'.{module}', __name__)
