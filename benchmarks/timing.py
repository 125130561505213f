"Measures the CPU times of two functions in turns, and computes confidence intervals of their ratio."
from math import comb
from statistics import median
from time import perf_counter, process_time


def seconds(f, times=1, clock=process_time):
    "Return the CPU seconds of one call of `f`, in all threads of this process. Another clock can be given."
    start = clock()
    for _ in range(times): f()
    return (clock()-start)/times


def gpu_seconds(f, times=1):
    "Return the seconds of one call of `f` on the GPU, including idle time of the GPU. Nothing synchronizes between the calls."
    import torch
    start,end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times): f()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)/1000/times


def pairs(
    bare, # Function without the measured feature, which returns its CPU seconds
    armed, # Function with the measured feature, which returns its CPU seconds
    budget:float, # CPU seconds for all pairs. The wall time is at most twice as long
    least:int=8, # Least number of pairs, whatever the budget is
    most:int=2000, # Largest number of pairs
    warm:bool=True # True to call both functions once before the measurement
): # List of pairs (bare, armed), in seconds
    """Measure two functions in turns, and return their seconds as pairs.

    Each pair begins with the other function, so that a machine that becomes slower favors neither."""
    if warm: bare(); armed()
    out,cpu,clock = [],process_time()+budget,perf_counter()+2*budget
    while len(out)<least or (process_time()<cpu and perf_counter()<clock and len(out)<most):
        if len(out)%2: a = armed(); b = bare()
        else: b = bare(); a = armed()
        out.append((b, a))
    return out


def interval(
    xs, # Measured numbers, in ascending order
    miss=.05 # Probability that the interval misses the true median, for any distribution
):
    "Return the confidence interval of the median as a pair of measured numbers. For fewer than 6 numbers, return the first and the last."
    n,k,tail = len(xs),0,0.
    while (tail := tail+comb(n, k)/2**n)<=miss/2: k += 1
    k = max(k, 1)
    return [xs[k-1], xs[n-k]]


def quartiles(xs):
    "Return the first and third quartile of sorted numbers."
    return [xs[len(xs)//4], xs[-1-len(xs)//4]]


def spread(
    xs # Measured numbers
):
    "Return the median of some numbers, with its confidence interval and quartiles, as keyword arguments of `line`."
    xs = sorted(xs)
    return dict(value=median(xs), interval=interval(xs), quartiles=quartiles(xs), n=len(xs))


def ratios(ps): return spread(a/b for b,a in ps)
def added(ps): return spread(100*(a/b-1) for b,a in ps) # added time in percent
def speedups(ps): return spread(b/a for b,a in ps) # a ratio of 3 means that the second function is 3 times as fast
