"Functions that read runs recorded by callbacks of other trainer libraries. Their tables have the form of `looped.table`"
import torch
from looped import training

from torchember import emberTracker


class Ran:
    "A finished run, with a tracker in the attribute `t`, like an ember"
    def __init__(self, name): self.t = emberTracker(name)


def ran(ember): return Ran(ember.report['run'])
def numbers(ember, name): return {r['step']: r[name] for r in ran(ember).t.lines() if r['ttype']=='scalar' and name in r}
def rows_of(ember): return {k: r for k,r in training(ran(ember)).items() if k[2]!='scalar'}
def steps_of(ember): return sorted({r['step'] for r in ran(ember).t.lines()})
def bits(a, b): return a.keys()==b.keys() and all(torch.equal(v, b[k]) for k,v in a.items())
