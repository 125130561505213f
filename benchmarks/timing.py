"CPU times of two functions in turns, and confidence intervals of their ratio."
from math import comb
from statistics import median
from time import perf_counter, process_time


def seconds(f, times=1, clock=process_time):
    "Return the CPU seconds of one call of `f` in all threads of this process, or the seconds of another clock."
    start = clock()
    for _ in range(times): f()
    return (clock()-start)/times


def gpu_seconds(f, times=1):
    "Return the seconds of one call of `f` on the GPU, with its waits. The calls run without synchronization between them."
    import torch
    start,end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times): f()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)/1000/times


def pairs(
    bare, # Function that returns CPU seconds
    armed, # Function that returns the CPU seconds to compare
    budget:float, # CPU seconds for all pairs; the wall time is at most twice as long
    least:int=8, # Minimum number of pairs, whatever the budget
    most:int=2000, # Maximum number of pairs
    warm:bool=True # True to run both once before the measurement
): # (bare, armed) pairs
    "Measure both functions in turns. The first one alternates, so that a machine that slows down favours neither."
    if warm: bare(); armed()
    out,cpu,clock = [],process_time()+budget,perf_counter()+2*budget
    while len(out)<least or (process_time()<cpu and perf_counter()<clock and len(out)<most):
        if len(out)%2: a = armed(); b = bare()
        else: b = bare(); a = armed()
        out.append((b, a))
    return out


def interval(
    xs, # Numbers in order
    miss=.05 # Probability that the interval misses the true median, for any distribution
):
    "Return the narrowest pair of order statistics around the median; the first and last of fewer than 6 numbers."
    n,k,tail = len(xs),0,0.
    while (tail := tail+comb(n, k)/2**n)<=miss/2: k += 1
    k = max(k, 1)
    return [xs[k-1], xs[n-k]]


def quartiles(xs):
    "Return the ends of the middle half of sorted numbers."
    return [xs[len(xs)//4], xs[-1-len(xs)//4]]


def spread(
    xs # Numbers
):
    "Return the median with its interval and quartiles, as keyword arguments of `line`."
    xs = sorted(xs)
    return dict(value=median(xs), interval=interval(xs), quartiles=quartiles(xs), n=len(xs))


def ratios(ps): return spread(a/b for b,a in ps)
def added(ps): return spread(100*(a/b-1) for b,a in ps) # percent
def speedups(ps): return spread(b/a for b,a in ps) # 3: the second function is 3 times as fast
