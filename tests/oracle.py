"Expected statistics: check rows, summaries and models against float64 results of numpy, scipy and torch"
import math
from dataclasses import InitVar, dataclass

import numpy as np
from scipy import stats

from torchember.measure.summary import derive, groups, index, length, parts_in, read_array, width

numbers = ('mean', 'std', 'max', 'min')
everything = tuple(groups)
rel = 1e-6 # Allowed relative error of section 5 of SPEC, compared with the float64 value
eps = 2**-52


# ---- checks of rows

def is_row(row, want, shape, rel=1e-6):
    "Check that a row has given values of mean, std, max and min, within the precision of float32."
    assert list(row['shape'])==list(shape), (row, shape)
    size = rel*max([abs(v) for v in want if math.isfinite(v)], default=0)
    for n,v in zip(numbers, want, strict=True):
        assert abs(row[n]-v)<=size or row[n]==v or row[n]!=row[n] and v!=v, (n, v, row)


def says(row, x, rel=1e-6):
    "Check that the statistics of a row are the statistics of the tensor `x`."
    d = x.detach().double()
    is_row(row, [d.mean().item(), d.std().item() if d.numel()>1 else math.nan, d.max().item(), d.min().item()], x.shape, rel)


# ---- checks of summary vectors

@dataclass
class Tolerance:
    """The largest allowed difference of each statistic from its float64 value.

    Copied values and counts must be exact. Sums of values with the same sign have a relative tolerance.
    The values of a mean can cancel each other, so its tolerance is relative to the standard deviation, which is the smallest scale of a tensor.
    The rounding of the largest element in float64 is added. A skewness can cancel, too, so its scale is the mean of |d|^3.
    """
    x:InitVar[np.ndarray] # The elements in float64

    def __post_init__(self, x):
        ok = x[np.isfinite(x)].astype(np.longdouble)
        n = max(ok.size, 1)
        mean = ok.sum()/n
        d = np.abs(ok-mean)
        self.std,self.rms = float(np.sqrt((d*d).sum()/n)),float(np.sqrt((ok*ok).sum()/n))
        # Largest rounding error of an element or of the mean
        self.round = 16*eps*float(np.abs(ok).max(initial=0))
        self.bent = float((d**3).sum()/n/np.sqrt((d*d).sum()/n)**3) if self.std else 1.
        # Rounding error of an element after division by the standard deviation
        self.lean = self.round/self.std if self.std else 0.

    def of(self, name, want):
        "Return the tolerance of the statistic `name`, whose float64 value is `want`."
        if name in ('mean', 'finite_mean'): return rel*self.std + self.round
        if name in ('std', 'finite_std'): return rel*abs(want) + self.round
        if name=='var': return 2*rel*abs(want) + self.round*(2*self.std+self.round)
        if name=='skew': return (3*rel+8*self.lean)*self.bent
        if name=='kurtosis': return (4*rel+12*self.lean)*(abs(want)+6)
        if name in ('rms', 'l1', 'l2', 'abs_mean', 'rm4', 'rm8'): return rel*abs(want)
        return 0.

    def knows(self, name):
        "Return True if the float64 value of a statistic is reliable: not a skewness of rounding errors, and no overflow of the eighth power."
        if name in ('skew', 'kurtosis'): return self.std==0 or self.lean<1e-3
        if name in ('rm4', 'rm8'): return self.rms==0 or 1e-36<self.rms<1e36
        return True


class Answer:
    "The float64 summary of an array, and its tolerances. Computed once for many readers, without keeping the array"
    def __init__(self, x):
        # Libraries round the absolute value of complex numbers differently
        self.ulp = 8*eps if np.iscomplexobj(x) else 0
        x = (np.abs(x) if np.iscomplexobj(x) else np.asarray(x)).astype(np.float64).ravel()
        self.vector,self.tolerance = read_array(x, everything),Tolerance(x)

    def of(self, wanted):
        "Return the summary vector of some groups of statistics. Entries of other groups are NaN."
        v = self.vector[:length(wanted)].copy()
        v[[i for p,i in index.items() if p not in parts_in(wanted)]] = np.nan
        return v


def judge(vector, x, wanted=everything, worst=None, where=''):
    "Check that a summary vector has the statistics of a float64 array. x: the array, or its `Answer`"
    x = x if isinstance(x, Answer) else Answer(x)
    want,ulp,tol = x.of(wanted),x.ulp,x.tolerance
    for p in ('count', 'nan', 'posinf', 'neginf', 'min', 'max'):
        a,b = vector[index[p]],want[index[p]]
        assert a==b or abs(a-b)<=ulp*abs(b), f'{p}: {a!r} for {b!r} {where}'
    if 'exponents' in wanted and not ulp:
        np.testing.assert_array_equal(vector[width:], want[width:], err_msg=f'exponents {where}')
        assert vector[index['zeros']]==want[index['zeros']]
    both = derive(np.stack([vector[:width], want[:width]]))
    for name,(a,b) in both.items():
        a,b = float(a),float(b)
        if not tol.knows(name): continue
        if math.isfinite(a) and math.isfinite(b):
            t,e = max(tol.of(name, b), ulp*abs(b)),abs(a-b)
            assert e<=t, f'{name}: {a!r} for {b!r}, off by {e/t if t else math.inf:.3g} tolerances {where}'
            if worst is not None and t: worst[name] = max(worst.get(name, (0, '')), (e/t, where))
        else: assert a==b or (a!=a and b!=b), f'{name}: {a!r} for {b!r} {where}'


# ---- checks of whole models

def by_scipy(x):
    "Return the statistics of an array, computed by scipy and numpy."
    a = np.abs(x)
    return dict(norm1=a.sum(), norm2=np.sqrt((x**2).sum()), norm1_mean=a.mean(), sum=x.sum(), mean=x.mean(), var=x.var(ddof=1), std=x.std(ddof=1),
        **(dict(skew=stats.skew(x), kurtosis=stats.kurtosis(x)) if np.ptp(x) else {}), max=x.max(), min=x.min(), abs_min=a.min(), abs_max=a.max())
