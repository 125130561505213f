"CPU time of two things in turns, and how sure their ratio is"
from math import comb
from statistics import median
from time import perf_counter, process_time


def seconds(f, times=1, clock=process_time):
    "CPU seconds of this process, all its threads, in one call of `f`; seconds of another clock"
    start = clock()
    for _ in range(times): f()
    return (clock()-start)/times


def gpu_seconds(f, times=1):
    "Seconds that the GPU and what it waits for take in one call of `f`; many calls follow one another, and only then is it asked"
    import torch
    start,end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times): f()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)/1000/times


def pairs(
    bare, # Function that gives CPU seconds
    armed, # The same, for what is compared with it
    budget:float, # CPU seconds to go on for; on a busy machine, no longer than twice as many on the clock
    least:int=8, # Pairs, whatever the budget
    most:int=2000,
    warm:bool=True # Whether to run both once before, for what only happens once
): # (bare, armed) pairs
    "Measure in turns; who goes first changes from pair to pair, so that a machine that slows down favours neither"
    if warm: bare(); armed()
    out,cpu,clock = [],process_time()+budget,perf_counter()+2*budget
    while len(out)<least or (process_time()<cpu and perf_counter()<clock and len(out)<most):
        if len(out)%2: a = armed(); b = bare()
        else: b = bare(); a = armed()
        out.append((b, a))
    return out


def interval(
    xs, # Numbers in order
    miss=.05 # Chance to miss the true median, whatever the distribution
):
    "The narrowest pair of order statistics that holds the median; of fewer than 6 numbers, the first and last"
    n,k,tail = len(xs),0,0.
    while (tail := tail+comb(n, k)/2**n)<=miss/2: k += 1
    k = max(k, 1)
    return [xs[k-1], xs[n-k]]


def quartiles(xs):
    "The middle half of numbers in order"
    return [xs[len(xs)//4], xs[-1-len(xs)//4]]


def spread(
    xs # Numbers
): # The median's `value`, `interval`, `quartiles` and `n`, as `line` takes them
    "The median and how sure it is"
    xs = sorted(xs)
    return dict(value=median(xs), interval=interval(xs), quartiles=quartiles(xs), n=len(xs))


def ratios(ps): return spread(a/b for b,a in ps)
def added(ps): return spread(100*(a/b-1) for b,a in ps) # percent
def slowness(ps): return spread(b/a for b,a in ps) # how many times as long the bare one takes
