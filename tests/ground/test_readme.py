"The code and commands of the README run as they are written: all blocks in order, and independent blocks also alone."
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
table = next(part for part in re.split(r'^## ', readme, flags=re.M) if part.startswith('Answer your first questions'))
lines = [line for row in re.findall(r'^\| .*', table, re.M)[1:] for line in re.findall('`(.*?)`', row) if '(' in line]


def unbound(code):
    "Return the names that a program uses but does not define."
    def used(t):
        names = {s.get_name() for s in t.get_symbols() if s.is_global() or t.get_type()=='module' and s.is_referenced()}
        return names.union(*map(used, t.get_children()))
    top = symtable.symtable(code, 'README.md', 'exec')
    given = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    return {n for n in used(top)-given if not hasattr(builtins, n)}


def run(code, tmp_path):
    "Run a program in a new process in an empty folder, without a display. Return its printed output."
    env = dict(TORCHEMBER_HOME=tmp_path/'home', MPLBACKEND='agg', PYTHONPATH=root, PYTHONWARNINGS='error::torchember.EmberWarning')
    got = programs.run(code, cwd=tmp_path, **env)
    assert got.returncode==0, f'{code}\n{got.stderr}'
    return got.stdout


def test_undefined_names_are_found():
    assert unbound('import a.b\nfrom c import d\ndef f(x, *y): return x+e\nclass G: h = d\n[i for i in f(1)]; j(k=2); len(l := 3)')=={'e', 'j'}


@pytest.mark.slow
def test_all_blocks_run_in_order(tmp_path):
    "All blocks form one program. The code lines of the README's table run at its position, on runs with all statistics."
    at = next(i for i,b in enumerate(blocks) if b.startswith('from torchember import brief'))
    runs = """te.close()
for name in ('before', 'after'):
    with torchEmber(model, optimizer=opt, stats='full', name=name) as te: loss = model(x).square().mean(); loss.backward(); opt.step(); opt.zero_grad()"""
    program = [*blocks[:at+1], runs, *lines, *blocks[at+1:]]
    assert unbound('\n'.join(program))==set() and len(lines)==12 and len(blocks)==4, (lines, len(blocks))
    assert 'ERROR (not_trained): `4`' in run('\n'.join(program), tmp_path)
    # the runs are in the folder that the README names
    assert {p.name.removesuffix('_latest') for p in (tmp_path/'home'/'log').iterdir()}>={'finetune', 'before', 'after'}
    assert (tmp_path/'run.html').exists()
    assert re.search(r'`~/\.torchember/log`.*`\$TORCHEMBER_HOME`', readme)


alone = [b for b in blocks if not unbound(b)]

@pytest.mark.slow
@pytest.mark.parametrize('i', range(len(alone)))
def test_a_block_that_stands_alone_runs_alone(i, tmp_path):
    "A block that uses no names of earlier blocks can be run alone."
    run(alone[i], tmp_path)


def test_the_expected_blocks_are_programs():
    "Two blocks can be run alone: the training with a mistake, and the imports for the table."
    assert [b.splitlines()[0] for b in alone]==['import torch',
        'from torchember import brief, compare, diff, overview, read, report, scalar_line, updates, wide']


def test_the_readme_is_short(): assert len(readme.splitlines())<=160


def test_extras_and_targets_of_make_exist():
    "The package extras and the make targets that the README names exist."
    ini = ConfigParser()
    ini.read(root/'settings.ini', encoding='utf-8')
    extras = {k.removesuffix('_requirements') for k in ini['DEFAULT'] if k.endswith('_requirements')}
    targets = set(re.findall(r'^(\w+):', (root/'Makefile').read_text(encoding='utf-8'), re.M)) | {'sync'}
    asked = {e for es in re.findall(r"(?:\.|torchember)\[([\w,]+)\]", readme) for e in es.split(',')}
    assert {'torch', 'fast', 'jax', 'board'}<=asked<=extras
    made = {m for kind,code in shown if kind=='sh' for m in re.findall(r'^make (\w+)', code, re.M)} | set(re.findall('`make (\\w+)', readme))
    assert {'demo', 'test', 'docs'}<=made<=targets
    assert [l for kind,code in shown if kind=='sh' for l in code.splitlines() if not re.match(r"make \w+|pip install '\.\[[\w,]+\]'|torchember \w+", l)]==[]


def test_the_command_line_accepts_each_line():
    "The parser of the command line accepts each `torchember` command of the README."
    lines = [l for kind,code in shown if kind=='sh' for l in code.splitlines() if l.startswith('torchember ')]
    asked = [make_parser().parse_args(shlex.split(l, comments=True)[1:]) for l in lines]
    assert [a.command for a in asked]==['run', 'check', 'board', 'ls', 'tail', 'plot', 'diagnose', 'diff']
    assert asked[0].program==['train.py', '--lr', '0.1'] and asked[6].fail_on=='error'


def title(path):
    text = ''.join(json.loads(path.read_text(encoding='utf-8'))['cells'][0]['source']) if path.suffix=='.ipynb' else path.read_text(encoding='utf-8')
    return re.match(r'# (.*)', text)[1].lower()


def test_titles_of_pages_differ():
    "The front page is not included, because the menu shows it as Start here."
    pages = [*(p for p in (root/'nbs').glob('*.ipynb') if p.stem!='index'), *(root/'nbs'/'tutorials').glob('*.ipynb'), *(root/'docs'/'reference').glob('*.md')]
    assert len(pages)>20 and sorted(map(title, pages))==sorted({title(p) for p in pages})


@pytest.mark.slow
@pytest.mark.parametrize('width', [1920, 1400, 1320, 1280, 1100, 1000, 400])
def test_pages_are_as_wide_as_the_window(chromium, tmp_path, width):
    "A page of the theme Furo with our text width fits the window, also with long lines of code."
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
