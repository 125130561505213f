"The program on each page of docs/integrations runs as written, and records a run with layers"
import re
from importlib.util import find_spec
from pathlib import Path

import programs
import pytest

from torchember import read, runs

root = Path(__file__).parents[2]
pages = sorted((root/'docs'/'integrations').glob('*.md'))
import_name = {'pytorch-ignite': 'ignite'} # Import name of a package, if it differs from the package name


def blocks(page, kind='python'): return re.findall(rf'^```{kind}\n(.*?)^```$', page.read_text(encoding='utf-8'), re.M|re.S)


def test_each_sink_and_integration_has_a_page():
    "The reference links the page of each sink and each integration."
    from torchember.sinks.feed import sinks
    modules = {p.stem for p in (root/'torchember'/'integrations').glob('*.py')} - {'__init__', 'recording', 'private_trainers'}
    assert {p.stem.partition('_')[2] for p in pages}=={*sinks, *modules, 'function'}
    known = (root/'docs'/'reference'/'47_integrations.md').read_text(encoding='utf-8')
    assert all(f'../integrations/{p.name}' in known for p in pages)


# Pages with packages that are slow to import
heavy = ('wandb', 'mlflow', 'trackio', 'function', 'lightning', 'transformers', 'keras')
@pytest.mark.slow
@pytest.mark.parametrize('page', [pytest.param(p, id=p.stem, marks=[pytest.mark.release] if p.stem.endswith(heavy) else []) for p in pages])
def test_the_program_runs_and_records_layers(page, tmp_path):
    code,*more = blocks(page)
    for package in re.findall(r'^pip install (.*)', '\n'.join(blocks(page, 'sh')), re.M):
        for p in package.split():
            # Only look for the package, because an import of keras would fix its backend
            if find_spec(import_name.get(p, p)) is None: pytest.skip(f'there is no {p} here')
    assert '# add this line' in code
    later = '\n'.join(b for b in more if 'replay(' in b) # Code of the page for a finished run
    env = dict(TORCHEMBER_HOME=tmp_path/'home', HOME=tmp_path, MPLBACKEND='agg', PYTHONPATH=root, WANDB_MODE='offline')
    done = programs.run(f'{code}\n{later}', cwd=tmp_path, **env)
    assert done.returncode==0, f'{code}\n{done.stderr}'
    assert 'EmberWarning' not in done.stderr, done.stderr
    name, = runs(home=tmp_path/'home').name
    df = read(name, home=tmp_path/'home')
    assert df[df.ttype=='weight_grad'].path.nunique()>=2 and df.step.nunique()>=5


def test_pictures_exist():
    for page in pages:
        for file in re.findall(r'^!\[.*\]\((.*)\)', page.read_text(encoding='utf-8'), re.M): assert (page.parent/file).exists(), f'{page.name}: {file}'
