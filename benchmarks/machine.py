"What the machine says of this process, and of itself"
import os
import platform
import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time

unknown = 'unknown'


def status(key):
    "Bytes that Linux counts for this process: VmRSS is what it holds, VmHWM the most that it ever held"
    try: lines = Path('/proc/self/status').read_text().splitlines()
    except OSError: raise OSError(f"{key} is read from /proc/self/status, which only Linux has. The other rows run everywhere.") from None
    return next(1024*int(l.split()[1]) for l in lines if l.startswith(key))


def gpu_clock():
    "Seconds, when the GPU has done what it was asked"
    import torch
    torch.cuda.synchronize()
    return perf_counter()


def descriptors(): return len(os.listdir('/proc/self/fd'))


def family():
    "CPU seconds of this process, of those that it has started and that are over, and of those that still run"
    t,stats = os.times(),map(read, Path('/proc').glob('[0-9]*/stat'))
    fields = {int(s.split()[0]): [int(n) for n in s.rpartition(')')[2].split()[1:15]] for s in stats if s} # from the parent's number on
    ours = {os.getpid()}
    while more := {p for p,f in fields.items() if f[0] in ours}-ours: ours |= more
    ticks = sum(sum(fields[p][10:14]) for p in ours-{os.getpid()} if p in fields)
    return process_time()+t.children_user+t.children_system+ticks/os.sysconf('SC_CLK_TCK')


def read(path):
    "A file of a process, which may be over by now"
    try: return path.read_text()
    except OSError: return ''


def cpu_name():
    "What the processor calls itself"
    try: return next(l.split(':')[1].strip() for l in Path('/proc/cpuinfo').read_text().splitlines() if l.startswith('model name'))
    except (OSError, StopIteration): return platform.processor() or platform.machine() or unknown


def versions(threads):
    "Where the numbers come from; no name of a host, a user or a folder"
    def version(name):
        try: return import_module(name).__version__
        except ImportError: return unknown
    names = ('torch', 'numpy', 'pandas', 'numba', 'orjson', 'transformers', 'jax', 'flax', 'torchember')
    return dict(python=platform.python_version(), **{n: version(n) for n in names},
        system=f'{platform.system()} {platform.machine()}', cpu=f'{cpu_name()}, {os.cpu_count()} cores', threads=threads)


def interpreter(code):
    "CPU seconds of a fresh interpreter that runs `code`"
    import resource
    import subprocess
    def spent(): u = resource.getrusage(resource.RUSAGE_CHILDREN); return u.ru_utime+u.ru_stime
    start = spent()
    subprocess.run([sys.executable, '-c', code], check=True)
    return spent()-start
