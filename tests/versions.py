"""Run the tests with other versions of torch and of other packages.

    python tests/versions.py 'torch==2.9.1' 'torch==2.15.0 pandas<3 python=3.13 -numba'

Each argument describes an environment: requirements for pip, a version of Python, and packages to leave out after a minus.
uv creates the environment, the core tests run in it, and it is deleted before the next environment is created.
Without arguments, the script tests all environments that are named on the front page of the docs."""
import argparse
import os
import shutil
import subprocess
import sys
import time
from configparser import ConfigParser
from pathlib import Path

root = Path(__file__).parents[1]
tested = [ # environments named on the front page
    *(f'torch=={v}' for v in ('2.15.0', '2.13.0', '2.10.0', '2.8.0', '2.6.0')),
    'torch==2.15.0 python=3.13', 'torch==2.13.0 numpy<2 pandas<3 pyarrow<22 -numba -orjson -triton']
core = ['nbs', *(f"tests/{t.replace('/', '/test_')}.py" for t in (
    'capture/armed capture/compiled capture/forward capture/models capture/private_torch measure/loops store/log_values '
    'recorder/exchanged recorder/gradients recorder/optimizers recorder/roots recorder/runs_of_embers recorder/steps').split())]
needed = 'nbdev==3.3.26 tqdm pytest pytest-timeout pytest-xdist hypothesis scipy scikit-learn transformers orjson numba '\
    'msgspec duckdb pyarrow ml_dtypes'.split()
shows = 'torch numpy pandas numba orjson triton jax'.split()


def arguments():
    p = argparse.ArgumentParser('python tests/versions.py', description='Run the tests in other environments, one after the other')
    p.add_argument('environments', nargs='*', metavar='ENV', help="such as 'torch==2.9.1 numpy<2 python=3.12 -numba'", default=tested)
    p.add_argument('--all', action='store_true', help='all tests, and all that developers install')
    p.add_argument('--tests', nargs='+', metavar='TEST', default=core, help='other tests than the core')
    p.add_argument('--folder', type=Path, default=Path.home()/'.cache'/'torchember-versions', help='where environments and logs go (%(default)s)')
    p.add_argument('--keep', action='store_true', help='leave the environments there; the next run takes them as they are')
    p.add_argument('-n', type=int, default=1, metavar='N', help='tests at a time (1)')
    return p.parse_args()


def settings(all_):
    "Return the requirements of torchember from settings.ini, and the packages that the tests import."
    ini = ConfigParser()
    ini.read(root/'settings.ini', encoding='utf-8')
    cfg = ini['DEFAULT']
    return cfg['requirements'].split() + cfg['torch_requirements'].split() + (cfg['dev_requirements'].split() if all_ else needed)


def make(env, words, all_):
    "Create the virtual environment that the words of an argument describe."
    uv = shutil.which('uv') or sys.exit('uv is needed to create environments, but is not installed. Run: pip install uv')
    python = next((w.removeprefix('python=') for w in words if w.startswith('python=')), f'{sys.version_info.major}.{sys.version_info.minor}')
    less = [w[1:] for w in words if w.startswith('-')]
    more = [w for w in words if not w.startswith(('-', 'python='))]
    subprocess.run([uv, 'venv', '-q', '--python', python, env], check=True)
    pip = [uv, '--no-cache', '-q', 'pip']
    subprocess.run([*pip, 'install', '--python', env, *settings(all_), *more], check=True)
    if less: subprocess.run([*pip, 'uninstall', '--python', env, *less], check=True)


def installed(env):
    "Return the versions of the most important packages in an environment."
    say = f"import sys; from importlib.metadata import version as v\nprint('python', sys.version.split()[0])\nfor n in {shows}:\n  try: print(n, v(n))\n" \
        "  except Exception: print(n, '-')"
    got = subprocess.run([env/'bin'/'python', '-c', say], capture_output=True, text=True, check=True)
    return dict(line.split() for line in got.stdout.splitlines())


def test(env, tests, n, log):
    "Run tests in an environment. Return the last line that pytest prints."
    paths = {'PYTHONPATH': str(root), 'PATH': f"{env/'bin'}{os.pathsep}{os.environ['PATH']}", 'OMP_NUM_THREADS': '1'}
    command = [env/'bin'/'python', '-m', 'pytest', '-q', '-n', str(n), '-m', 'not slow', '-p', 'no:cacheprovider', *tests]
    with open(log, 'w') as f: subprocess.run(command, cwd=root, env=os.environ | paths, stdout=f, stderr=subprocess.STDOUT)
    return log.read_text().splitlines()[-1]


def row(words, a):
    env = a.folder/'_'.join(words).replace('/', '-')
    log,since = env.with_name(f'{env.name}.log'),time.time()
    try:
        if not env.exists(): make(env, words, a.all)
        return installed(env) | {'result': test(env, a.tests, a.n, log), 'log': log.name}
    except subprocess.CalledProcessError: return {'python': ' '.join(words), 'result': 'not made'}
    finally:
        print(f"{' '.join(words)}: {time.time()-since:.0f} s", file=sys.stderr, flush=True)
        if not a.keep: shutil.rmtree(env, ignore_errors=True)


def table(rows):
    names = ['python', *shows, 'result', 'log']
    print('| '+' | '.join(names)+' |\n|'+'---|'*len(names))
    for r in rows: print('| '+' | '.join(r.get(n, '') for n in names)+' |', flush=True)


def main():
    a = arguments()
    a.folder.mkdir(parents=True, exist_ok=True)
    rows = [row(e.split(), a) for e in a.environments]
    table(rows)
    return any(w in r['result'] for r in rows for w in ('failed', 'error', 'not made'))


if __name__=='__main__': sys.exit(main())
