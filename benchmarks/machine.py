"Facts about the process of a benchmark and about the machine."
import os
import platform
import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time

unknown = 'unknown'


def status(key):
    "Return the memory of this process in bytes, on Linux. `key`: VmRSS for the memory now, VmHWM for the maximum so far."
    try: lines = Path('/proc/self/status').read_text().splitlines()
    except OSError: raise OSError(f"{key} is read from /proc/self/status, which only Linux has. The other rows run everywhere.") from None
    return next(1024*int(l.split()[1]) for l in lines if l.startswith(key))


def gpu_clock():
    "Return the time in seconds, after the GPU has finished all queued work."
    import torch
    torch.cuda.synchronize()
    return perf_counter()


def descriptors(): return len(os.listdir('/proc/self/fd'))


def family():
    "Return CPU seconds of this process and of its child processes, running and ended."
    t,stats = os.times(),map(read, Path('/proc').glob('[0-9]*/stat'))
    # Process id -> fields of its stat file, beginning with the parent's process id
    fields = {int(s.split()[0]): [int(n) for n in s.rpartition(')')[2].split()[1:15]] for s in stats if s}
    ours = {os.getpid()}
    while more := {p for p,f in fields.items() if f[0] in ours}-ours: ours |= more
    ticks = sum(sum(fields[p][10:14]) for p in ours-{os.getpid()} if p in fields)
    return process_time()+t.children_user+t.children_system+ticks/os.sysconf('SC_CLK_TCK')


def read(path):
    "Return the text of a file in /proc, or '' if its process has ended."
    try: return path.read_text()
    except OSError: return ''


def cpu_name():
    "Return the name of the processor."
    try: return next(l.split(':')[1].strip() for l in Path('/proc/cpuinfo').read_text().splitlines() if l.startswith('model name'))
    except (OSError, StopIteration): return platform.processor() or platform.machine() or unknown


def versions(threads):
    "Return the versions of packages, the system and the processor. Names of the host, the user and folders are left out."
    def version(name):
        try: return import_module(name).__version__
        except ImportError: return unknown
    names = ('torch', 'numpy', 'pandas', 'numba', 'orjson', 'transformers', 'jax', 'flax', 'torchember')
    return dict(python=platform.python_version(), **{n: version(n) for n in names},
        system=f'{platform.system()} {platform.machine()}', cpu=f'{cpu_name()}, {os.cpu_count()} cores', threads=threads)


def interpreter(code):
    "Return the CPU seconds of a new Python interpreter that runs `code`."
    import resource
    import subprocess
    def spent(): u = resource.getrusage(resource.RUSAGE_CHILDREN); return u.ru_utime+u.ru_stime
    start = spent()
    subprocess.run([sys.executable, '-c', code], check=True)
    return spent()-start
