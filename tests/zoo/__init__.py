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
# Fast trainings of `later_modules` that also run in CI
in_ci = {'so_48221692', 'so_33969059', 'optimizer_of_the_old_parameters',
    'so_48221692_corrected', 'one_layer_not_cast_fixed', 'pole_on_a_cart'}

unknown = { # Broken trainings whose fault is not visible in the rows of every run, each with the reason
    'siamese_without_stop': 'equal samples do not change any statistic of a whole tensor',
    'siamese_without_strangers': 'equal samples do not change any statistic of a whole tensor',
    'targets_of_another_text': 'the loss falls to the level of letter frequencies, and stays there',
    'autotrainer_relus': 'the loss stays at ln 10 for a while, and then falls without help, to 1.4 or 1.7 after 200 steps'}

@dataclass
class Training:
    name: str # Name of the training function
    run: Callable # Training function, called with a replacement of `torchEmber` as its argument `arm`
    module: str # Name of the module in tests/zoo that defines the training
    rules: tuple = () # For a broken training: one of these rules must report first
    paths: tuple = () # Globs: the first finding must be about one of these modules; '' is the whole model
    steps: tuple = (0, 0) # First and last step in which the fault may appear
    more: dict = field(default_factory=dict) # Additional arguments of `torchEmber`, if the default arguments do not show the fault

    def said_by(self,
        found # Table of findings, as `diagnose` returns it
    ): # Differences between the first finding and the planted fault as text, or '' if they agree
        "Compare the first finding with the planted fault. Return what is wrong with the finding, or ''."
        if not len(found): return 'nothing is found'
        first = found.iloc[0]
        wrong = [] if first['rule'] in self.rules else [f"{first['rule']}, not {' or '.join(self.rules)}"]
        if self.paths and not any(fnmatchcase(first['path'], p) for p in self.paths): wrong.append(f"of {first['path']!r}, not {self.paths}")
        # A finding about the whole training begins at step 0, so step 0 is accepted if the fault is early
        start = first['first_step']==0 and self.steps[0]<=3
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
    "Add a training with one planted fault to the zoo, together with the rules that may report this fault first."
    return lambda f: noted(broken, f, rules, (paths,) if isinstance(paths, str) else tuple(paths), steps, more)

def load(also=True): # also: True to import `later_modules`, too
    "Import all Python modules with trainings, so that `healthy` and `broken` are complete."
    for module in first_modules+(later_modules if also else ()): import_module(f'.{module}', __name__)
