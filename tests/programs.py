"""Run programs in separate processes without importing torch each time: a server process imports torch once, and forks for each program.

`run` and `start` take a program as text, or as the path of a script, and return the same results as `subprocess`.
A new Python process is started where a fork is impossible, or if an environment variable that torch reads at its import has another value.
For tests of the import itself, of Python options and of `-m`, use `subprocess`."""
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

variables = {**os.environ} # environment before the first test
read_at_start = 'PYTHON', 'OMP_', 'KMP_', 'MKL_', 'GOMP_', 'OPENBLAS_', 'TORCH_', 'PYTORCH_', 'CUDA_', 'LD_', 'LC_', 'LANG', 'TZ'

# Variables that programs do not need; scikit-learn and Lightning set some of them
of_no_matter = 'PYTHONPATH', 'PYTHONWARNINGS', 'KMP_DUPLICATE_LIB_OK', 'KMP_INIT_AT_FORK', 'PYTORCH_NVML_BASED_CUDA_CHECK'


# ---- functions that run in the process of the tests

def start(program, *args, after='', **kwargs):
    """Start a program, and return its `Popen` with text pipes.

    A keyword in capitals sets an environment variable; the value None removes the variable.
    after: code to run at the beginning of the program. Programs with the same code share a server process that has run the code once"""
    env = {**os.environ, **{k: str(v) for k,v in kwargs.items() if k.isupper()}}
    env = {k: v for k,v in env.items() if kwargs.get(k, '') is not None}
    kwargs = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)|{k: v for k,v in kwargs.items() if not k.isupper()}
    def line(program): return [sys.executable, *([str(program)] if isinstance(program, Path) else ['-c', program]), *map(str, args)]
    if forks(env): return Forked(line(program), after, **kwargs)
    return subprocess.Popen(line(f'{after}\n{program}' if after else program), **kwargs)


def run(program, *args, timeout=600, input=None, **kwargs):
    "Run a program, and return its `CompletedProcess`. After the timeout, kill the program and its child processes."
    with start(program, *args, stdin=subprocess.DEVNULL if input is None else subprocess.PIPE, **kwargs) as p:
        try: said = p.communicate(input, timeout)
        except BaseException:
            (os.killpg if isinstance(p, Forked) else os.kill)(p.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(p.args, p.returncode, *said)


def ranks(program, *args, n=2, timeout=600, **kwargs):
    "Run a program in `n` processes of torch.distributed, like torchrun. If one process fails, kill the others."
    with socket.create_server(('localhost', 0)) as s: port = s.getsockname()[1]
    with tempfile.TemporaryFile('w+') as said:
        def rank(r):
            return start(program, *args, stdin=subprocess.DEVNULL, stdout=said, stderr=said, RANK=r, LOCAL_RANK=r, WORLD_SIZE=n, LOCAL_WORLD_SIZE=n,
                MASTER_ADDR='localhost', MASTER_PORT=port, **kwargs)
        ps,end = [rank(r) for r in range(n)],time.monotonic()+timeout
        while {p.poll() for p in ps}<={None, 0} and any(p.returncode is None for p in ps) and time.monotonic()<end: time.sleep(.02)
        for p in ps:
            if p.returncode is None: p.kill()
            p.wait()
        said.seek(0)
        assert not any(p.returncode for p in ps), f'{[p.returncode for p in ps]}\n{said.read()[-3000:]}'


def forks(env):
    def read(env): return {k: v for k,v in env.items() if k.startswith(read_at_start) and k not in of_no_matter}
    return sys.platform=='linux' and 'NO_FORKS' not in os.environ and read(env)==read(variables)


class Forked(subprocess.Popen):
    "An object like `Popen` for a Python process that was forked by the server process"
    def __init__(self, args, after, **kwargs):
        self.server = server(after)[0]
        super().__init__(args, **kwargs)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest):
        stdin,_,_,stdout,_,stderr = pipes = rest[:6]
        self.ended,told = os.pipe()
        job = json.dumps(dict(args=args[1:], cwd=os.path.abspath(cwd or '.'), env=env)).encode()
        socket.send_fds(self.server, [job], [*(n if fd<0 else fd for n,fd in enumerate((stdin, stdout, stderr))), told])
        os.close(told)
        self._close_pipe_fds(*pipes)
        self.pid,self._child_created = self.number(),True

    def number(self):
        if not (told := os.read(self.ended, 4)): raise RuntimeError('The server that forks programs has ended')
        return int.from_bytes(told, 'big', signed=True)

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self.ended], [], [], timeout)[0]: raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self.number()
            os.close(self.ended)
        return self.returncode

    def poll(self):
        with suppress(subprocess.TimeoutExpired): self.wait(0)
        return self.returncode


servers = []

@cache
def server(after):
    ours,its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its: p = subprocess.Popen([sys.executable, __file__, str(its.fileno()), after], env={k: v for k,v in variables.items() if k!='PYTHONWARNINGS'},
        pass_fds=[its.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    servers.append((ours, p))
    return ours,p


def over():
    "End the server processes, and kill programs that no test has waited for."
    for ours,p in servers:
        ours.close()
        p.communicate()
    servers.clear()
    server.cache_clear()


# ---- functions that run in the server process

def serve(sock):
    "Fork a child process for each message. Send its process id, and later its exit code. In the child, return the message."
    def say(told, n):
        with suppress(BrokenPipeError): os.write(told, n.to_bytes(4, 'big', signed=True))
    running = {}
    while True:
        for fd in select.select([sock, *running], [], [])[0]:
            if fd is not sock:
                pid,told = running.pop(fd)
                say(told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                for f in (fd, told): os.close(f)
                continue
            job,fds,*_ = socket.recv_fds(sock, 1<<20, 4)
            if not job:
                for pid,_ in running.values(): os.killpg(pid, signal.SIGKILL)
                os._exit(0)
            if pid := os.fork():
                running[os.pidfd_open(pid)] = pid,fds[3]
                say(fds[3], pid)
                for f in fds[:3]: os.close(f)
            else:
                os.setpgid(0, 0)
                for n,f in enumerate(fds[:3]): os.dup2(f, n)
                for f in (*fds, *(f for r,(_,told) in running.items() for f in (r, told))): os.close(f)
                sock.close()
                return json.loads(job)


def become(main, filters, args, cwd, env):
    "Make a forked child process like a new Python process with these arguments. Return the code to run."
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if args[0]=='-c': code,sys.argv,folder = compile(args[1], '<string>', 'exec'),['-c', *args[2:]],''
    else:
        code,sys.argv,folder = compile(Path(args[0]).read_bytes(), args[0], 'exec'),args,os.path.dirname(os.path.realpath(args[0]))
        main.__file__ = args[0]
    sys.path[:0] = [folder, *on_the_path(env)]
    importlib.invalidate_caches()
    sys.warnoptions[:] = [o for o in env.get('PYTHONWARNINGS', '').split(',') if o]
    of_torch = [f for f in warnings.filters if f not in filters] # torch puts its warning filters before those of the command line
    warnings.filters[:] = filters
    warnings._processoptions(sys.warnoptions)
    warnings.filters[:0] = of_torch
    if torch.initial_seed()==seed: torch.default_generator.seed() # a random seed, as after an import of torch. Python seeds its own generator after a fork
    if 'numpy.random' in sys.modules: sys.modules['numpy.random'].seed()
    return code


def on_the_path(env): return [os.path.abspath(p) for p in env.get('PYTHONPATH', '').split(os.pathsep) if p]


if __name__=='__main__':
    sock,after,filters = socket.socket(fileno=int(sys.argv[1])),sys.argv[2],warnings.filters[:]
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    sys.argv = ['-c']
    del sys.path[0] # the folder of this file
    import torch
    seed = torch.initial_seed()
    exec(after, vars(main))
    sys.path[:] = [p for p in sys.path if p not in on_the_path(os.environ)]
    gc.collect()
    gc.freeze() # so that children do not collect the objects of the server
    exec(become(main, filters, **serve(sock)), vars(main))
