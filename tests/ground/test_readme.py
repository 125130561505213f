"Every line of the README that can be run is run as it is written, as a reader would: in order, and alone where it needs nothing from before"
import builtins
import json
import re
import shlex
import symtable
from configparser import ConfigParser
from pathlib import Path

import programs
import pytest

from torchember.cli.commands import make_parser

root = Path(__file__).parents[2]
readme = (root/'README.md').read_text(encoding='utf-8')
shown = re.findall(r'^```(\w*)\n(.*?)^```$', readme, re.M|re.S)
blocks = [code for kind,code in shown if kind=='python']
table = next(part for part in re.split(r'^## ', readme, flags=re.M) if part.startswith('The first four questions'))
lines = [line for row in re.findall(r'^\| .*', table, re.M)[1:] for line in re.findall('`(.*?)`', row) if '(' in line]


def unbound(code):
    "Names that a program uses and nothing gives it"
    def used(t):
        names = {s.get_name() for s in t.get_symbols() if s.is_global() or t.get_type()=='module' and s.is_referenced()}
        return names.union(*map(used, t.get_children()))
    top = symtable.symtable(code, 'README.md', 'exec')
    given = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    return {n for n in used(top)-given if not hasattr(builtins, n)}


def run(code, tmp_path):
    "In a Python of its own, in an empty folder, without a display. What goes wrong is what it says"
    env = dict(TORCHEMBER_HOME=tmp_path/'home', MPLBACKEND='agg', PYTHONPATH=root, PYTHONWARNINGS='error::torchember.EmberWarning')
    got = programs.run(code, cwd=tmp_path, **env)
    assert got.returncode==0, f'{code}\n{got.stderr}'
    return got.stdout


def test_unbound():
    assert unbound('import a.b\nfrom c import d\ndef f(x, *y): return x+e\nclass G: h = d\n[i for i in f(1)]; j(k=2); len(l := 3)')=={'e', 'j'}


def needs_jax(code):
    if 'import jax' in code:
        for lib in ('jax', 'flax', 'optax'): pytest.importorskip(lib)


@pytest.mark.slow
def test_in_order(tmp_path):
    "All of it, in one program, with the table's lines where they stand; nothing in it asks for what comes later"
    at = next(i for i,b in enumerate(blocks) if b.startswith('from torchember import compare'))
    program = [*blocks[:at+1], *lines, *(b for b in blocks[at+1:] if 'import jax' not in b)]
    assert unbound('\n'.join(program))==set() and len(lines)==8 and len(blocks)==10, (lines, len(blocks))
    said = run('\n'.join(program), tmp_path)
    assert 'sigmoid: loss' in said and 'relu: loss' in said
    assert len({p.name.removesuffix('_latest') for p in (tmp_path/'home'/'log').glob('Net_*')})==3 # two trainings and a monitor, where it says that runs are
    assert re.search(r'`~/\.torchember/log`.*`\$TORCHEMBER_HOME`', readme)


alone = [b for b in blocks if not unbound(b)]

@pytest.mark.slow
@pytest.mark.parametrize('i', range(len(alone)))
def test_alone(i, tmp_path):
    "A block that needs nothing from before is a program"
    needs_jax(alone[i])
    run(alone[i], tmp_path)


def test_which_are_programs():
    "The training with a mistake, the one to look at, what is imported for the table, and JAX"
    assert [b.splitlines()[0] for b in alone]==['import torch', 'import torch',
        'from torchember import compare, overview, read, scalar_line, updates, wide', 'import jax, optax']


def test_commands():
    "What is installed and made exists"
    ini = ConfigParser()
    ini.read(root/'settings.ini', encoding='utf-8')
    extras = {k.removesuffix('_requirements') for k in ini['DEFAULT'] if k.endswith('_requirements')}
    targets = set(re.findall(r'^(\w+):', (root/'Makefile').read_text(encoding='utf-8'), re.M)) | {'sync'}
    asked = {e for es in re.findall(r"(?:\.|torchember)\[([\w,]+)\]", readme) for e in es.split(',')}
    assert {'torch', 'fast', 'jax', 'interactive'}<=asked<=extras
    made = {m for kind,code in shown if kind=='sh' for m in re.findall(r'^make (\w+)', code, re.M)} | set(re.findall('`make (\\w+)', readme))
    assert {'demo', 'test', 'docs'}<=made<=targets
    assert [l for kind,code in shown if kind=='sh' for l in code.splitlines() if not re.match(r"make \w+|pip install '\.\[[\w,]+\]'|torchember \w+", l)]==[]


def test_what_a_shell_is_told():
    "Each is a command with such arguments, and the first ones that a reader needs are there"
    lines = [l for kind,code in shown if kind=='sh' for l in code.splitlines() if l.startswith('torchember ')]
    asked = [make_parser().parse_args(shlex.split(l, comments=True)[1:]) for l in lines]
    assert [a.command for a in asked]==['run', 'board', 'ls', 'tail', 'plot', 'diagnose', 'diff']
    assert asked[0].program==['train.py', '--lr', '0.1'] and asked[5].fail_on=='error'


def title(path):
    text = ''.join(json.loads(path.read_text(encoding='utf-8'))['cells'][0]['source']) if path.suffix=='.ipynb' else path.read_text(encoding='utf-8')
    return re.match(r'# (.*)', text)[1].lower()


def test_no_two_entries_of_the_menu_are_called_alike():
    "Of the front page it says Start here"
    pages = [*(p for p in (root/'nbs').glob('*.ipynb') if p.stem!='index'), *(root/'nbs'/'tutorials').glob('*.ipynb'), *(root/'docs'/'reference').glob('*.md')]
    assert len(pages)>20 and sorted(map(title, pages))==sorted({title(p) for p in pages})


@pytest.mark.slow
@pytest.mark.parametrize('width', [1920, 1400, 1320, 1280, 1100, 1000, 400])
def test_pages_are_as_wide_as_the_window(chromium, tmp_path, width):
    "Furo's page with our width of text, and code in it that has longer lines"
    furo = Path(pytest.importorskip('furo').__file__).parent
    css = furo/'theme'/'furo'/'static'/'styles'/'furo.css'
    html = f'''<meta name=viewport content="width=device-width"><link rel=stylesheet href="{css.as_uri()}"><link rel=stylesheet
        href="{(root/'docs'/'_static'/'custom.css').as_uri()}"><div class=page><aside class=sidebar-drawer>menu</aside><div class=main><div class=content>
        <div class=article-container><article><section><p>{'word '*200}</p><div class=highlight><pre>{'x'*300}</pre></div></section></article></div></div>
        <aside class=toc-drawer>contents</aside></div></div>'''
    (tmp_path/'page.html').write_text(html)
    page = chromium().new_page(viewport={'width': width, 'height': 800})
    page.goto((tmp_path/'page.html').as_uri())
    inner,text = page.evaluate("[document.documentElement.scrollWidth, document.querySelector('.content').getBoundingClientRect().width]")
    assert inner==width and text>min(width, 1000)*.7
