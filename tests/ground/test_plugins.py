"Another package adds a sink and a command. The package is built and installed, and both are used by name."
import subprocess
import sys

import programs
import pytest

pyproject = '''
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "my-package"
version = "1.0"
[tool.setuptools]
py-modules = ["my_package"]
[project.entry-points."torchember.sinks"]
csv = "my_package:CsvSink"
lines = "my_package:print_numbers"
broken = "my_package:missing"
wandb = "my_package:CsvSink"
[project.entry-points."torchember.commands"]
count = "my_package:count_command"
silent = "my_package:print_numbers"
[project.entry-points."torchember.rules"]
long_run = "my_package:long_run"
few_steps = "my_package:few_steps"
gone = "my_package:missing"
'''
package = '''
import csv, os
from torchember.cli.commands import command
from torchember.sinks import Sink

class CsvSink(Sink):
    "Write one row for each step into the file $CSV_FILE."
    name = 'csv'
    def scalars(self, step, numbers):
        with open(os.environ['CSV_FILE'], 'a', newline='') as f: csv.writer(f).writerow([step, *(f'{k}={v}' for k,v in sorted(numbers.items()))])

from torchember import finding, rule

@rule(severity='info')
def long_run(history, least=3):
    "Make a run of many steps."
    if len(history.steps)>=least: yield finding('', 'This run is long.', history.steps[0], history.steps[-1])

def few_steps(history):
    if len(history.steps)<3: yield finding('', 'This run is short.', history.steps[0])

def print_numbers(step, numbers): print('step', step, len(numbers))

@command(lambda p: p.add_argument('run'), 'torchember count before')
def count_command(args):
    "Print the number of steps of a run."
    from torchember import read
    print(read(args.run, home=args.home)['step'].nunique())
    return 0
'''
train = '''
import sys, torch
from torchember import torchEmber
model = torch.nn.Linear(2, 1); opt = torch.optim.SGD(model.parameters(), .1)
with torchEmber(model, opt, name='watched', home=sys.argv[1], sinks=sys.argv[2]) as te:
    for i in range(3):
        model(torch.ones(4, 2)).sum().backward()
        opt.step(); opt.zero_grad()
'''


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    "Build and install the package. Return its folder, which is added to sys.path."
    source,site = tmp_path_factory.mktemp('source'),tmp_path_factory.mktemp('site')
    (source/'pyproject.toml').write_text(pyproject)
    (source/'my_package.py').write_text(package)
    subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', '--no-index', '--no-deps', '--no-build-isolation', '--target', site, source], check=True)
    return site


def run(code, *args, site, **env):
    "Run a program in the folder `site`, so that no sink writes into the folder of the tests."
    return programs.run(f'import sys; sys.path.append({str(site)!r})\n{code}', *args, cwd=site, **env)


def test_a_sink_of_another_package_is_used_by_name(site, tmp_path):
    got = run(train, tmp_path/'home', 'csv', site=site, CSV_FILE=tmp_path/'steps.csv')
    assert got.returncode==0, got.stderr
    rows = (tmp_path/'steps.csv').read_text().splitlines()
    assert [r.split(',')[0] for r in rows]==['0', '1', '2'] and 'output/model/rms=' in rows[0]


def test_a_function_of_another_package_is_a_sink(site, tmp_path):
    got = run(train, tmp_path/'home', 'lines', site=site)
    assert [l.split()[:2] for l in got.stdout.splitlines()]==[['step', '0'], ['step', '1'], ['step', '2']], got.stderr


def test_an_unknown_sink_names_those_of_packages(site, tmp_path):
    got = run(train, tmp_path/'home', 'csw', site=site)
    assert "ValueError" in got.stderr and "'csv'" in got.stderr and not (tmp_path/'home').exists()


def test_a_package_cannot_replace_a_built_in_sink(site, tmp_path):
    got = run("from torchember.sinks.feed import sinks_of; print(type(sinks_of('wandb')[0]).__module__)", site=site)
    assert got.stdout.strip()=='torchember.sinks.wandb', got.stderr
    assert "The package 'my-package' has a sink 'wandb', but torchember uses its own sink of this name." in got.stderr
    assert "sinks=CsvSink, from my_package." in got.stderr


def test_a_package_that_cannot_be_imported_is_named(site, tmp_path):
    got = run(train, tmp_path/'home', 'broken', site=site)
    assert "ImportError: The plugin 'broken' of the package 'my-package' cannot be imported from 'my_package:missing': AttributeError" in got.stderr


def test_a_command_of_another_package_runs(site, tmp_path):
    assert run(train, tmp_path/'home', 'lines', site=site).returncode==0
    main = "from torchember.cli import main; sys.exit(main(sys.argv[1:]))"
    got = run(main, 'count', 'watched', '--home', tmp_path/'home', site=site)
    assert (got.returncode, got.stdout)==(0, '3\n'), got.stderr
    assert 'a command of the package my-package' in run(main, '--help', site=site).stdout
    assert 'Print the number of steps of a run.' in run(main, 'count', '--help', site=site).stdout
    assert 'count' in run(main, 'complete', 'zsh', 'co', site=site).stdout.split()
    got = run(main, 'silent', site=site)
    assert got.returncode==2 and 'defines no function silent_command' in got.stderr


def test_rules_of_another_package_run(site, tmp_path):
    code = """
import warnings
from torchember import diagnose
from torchember.health.diagnose import choose_rules
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    print([t for t in diagnose('watched', home=sys.argv[1]).text if 'This run' in t], len(diagnose('watched', 'long_run', home=sys.argv[1])))
    print([r.name for r in choose_rules('default')][-2:])
print([str(w.message) for w in caught])
"""
    assert run(train, tmp_path/'home', 'lines', site=site).returncode==0
    got = run(code, tmp_path/'home', site=site)
    assert got.returncode==0, got.stderr
    found,names,caught = got.stdout.splitlines()
    assert found=="['This run is long.'] 1" and {*eval(names)}=={'long_run', 'few_steps'}
    [text] = eval(caught) # one warning, although several functions requested the rules
    assert "The plugin 'gone' of the package 'my-package' cannot be imported" in text and 'Its rules are left out.' in text
