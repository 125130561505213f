"""Sphinx settings. The pages are the notebooks, with the outputs that are saved in them: `make docs`"""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from functools import cache
from importlib import import_module
from inspect import Parameter, getsource, signature
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

from docutils import nodes
from fastcore.nbio import dict2nb, mk_cell, nb2str
from nbdev.doclinks import NbdevLookup
from nbdev.process import NBProcessor
from nbdev.showdoc import showdoc_nm
from sphinx.addnodes import pending_xref, toctree
from sphinx.builders import html
from sphinx.project import Project
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms import SphinxTransform
from sphinx.util.logging import getLogger
from sphinx.util.nodes import make_refnode

root = Path(__file__).parents[1]
sys.path.insert(0, str(root/'docs'))
import docstrings  # noqa: E402

os.environ.setdefault('KERAS_BACKEND', 'torch') # keras reads this when a page's Python module is imported

ini = ConfigParser()
ini.read(root/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']

project,author,release = cfg['lib_name'],cfg['author'],cfg['version']
copyright = author
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.autosummary', 'sphinx.ext.viewcode', 'sphinx_copybutton']
exclude_patterns = ['**/.ipynb_checkpoints']
smartquotes = False # quotation marks stay as typed: most are in code
default_role = 'py:obj' # docstrings are Markdown, where one backtick means code
nb_execution_mode = 'off' # the tests run the notebooks and compare outputs with the saved ones
myst_enable_extensions = ['alert', 'dollarmath']
myst_heading_anchors = 3
autodoc_typehints_format = 'short'
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
autosummary_generate = False
html_theme = 'furo'
html_title = project
html_static_path = ['_static']
html_css_files = ['custom.css']

# Pages that are not in `nbs`: docname -> file
reference = {f'reference/{p.stem.partition("_")[2]}': p.relative_to(root) for p in sorted((root/'docs'/'reference').glob('*.md'))}
integrations = {f'integrations/{p.stem.partition("_")[2]}': p.relative_to(root) for p in sorted((root/'docs'/'integrations').glob('*.md'))}
beside = {'changelog':'CHANGELOG.md', 'contributing':'CONTRIBUTING.md', 'adding':'docs/adding.md', **reference, **integrations}
module_of = import_module(project).module_of # name that users type -> its Python module
jax_tracker = f'{project}.jaxember', 'tracker' # package and Python module that hold the names of the JAX tracker

# The MyST-NB tag for each nbdev or Quarto directive
tags = {'export':'remove-cell', 'exporti':'remove-cell', 'default_exp':'remove-cell', 'hide':'remove-cell', 'exports':'hide-input',
    'code-fold':'hide-input', 'echo false':'remove-input', 'output false':'remove-output'}
re_show_doc = re.compile(r'^show_doc\(([\w.]+)', re.M)
defs = ast.FunctionDef|ast.AsyncFunctionDef|ast.ClassDef

log = getLogger(__name__)

# ---- API entries of the names that a notebook exports

def public(names): return [o for o in dict.fromkeys(names) if not o.startswith('_')]

def assigned(o):
    "Return the names that statement `o` assigns."
    targets = o.targets if isinstance(o, ast.Assign) else [o.target] if isinstance(o, ast.AnnAssign) and o.value else []
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]

def documented(c):
    "Return the names that a cell documents: the name in its `show_doc`, or all names that the cell exports."
    if m := re_show_doc.search(c.source): return [m[1]]
    if not {'export', 'exports'} & c.directives_.keys(): return []
    return public(n for o in c.parsed_() for n in ([showdoc_nm(o)] if isinstance(o, defs) else assigned(o)))

def data_entry(c, mod, sym):
    "Return the entry of a value: its source if under 100 characters, and the comment beside or above it."
    o = next(o for o in c.parsed_() if sym in assigned(o))
    lines = c.source.splitlines()
    src = ast.unparse(o.value)
    comment = re.search(r'\s#\s*([^\'"]*)$', lines[o.end_lineno-1]) or re.match(r'\s*#(?!\|)\s*(.*)', lines[o.lineno-2] if o.lineno>1 else '')
    return f'.. py:data:: {mod}.{sym}\n' + (f'   :value: {src}\n' if len(src)<100 else '') + f'\n   {comment[1] if comment else ""}'

def members_of(cls, documented):
    "Return the public methods and properties of a class, with those of base classes that have no entry."
    classes = [b for b in reversed(cls.__mro__) if b is cls or b.__module__==cls.__module__ and b.__name__ not in documented]
    return list(dict.fromkeys(public(s.name for b in classes for s in ast.parse(getsource(b)).body[0].body if isinstance(s, defs))))

def entry(c, mod, sym, all_syms):
    "Return a cell with the API entry of `sym`. A class lists its public methods and properties without an entry of their own."
    o = import_module(mod)
    for a in sym.split('.'): o = getattr(o, a)
    top = sym.partition('.')[0]
    # True if the reference has an entry of this name, to which links lead
    in_reference = mod==f'{project}.{module_of.get(top)}' or mod=='.'.join(jax_tracker) and top in import_module(jax_tracker[0]).__all__
    if any(sym in assigned(s) for s in c.parsed_()): rst = data_entry(c, mod, sym)
    else:
        kind = 'class' if isinstance(o, type) else 'property' if isinstance(o, property) else 'method' if '.' in sym else 'function'
        kind = 'exception' if kind=='class' and issubclass(o, BaseException) else kind
        rst = f'.. auto{kind}:: {mod}.{sym}'
        if members := isinstance(o, type) and [n for n in members_of(o, all_syms) if f'{sym}.{n}' not in all_syms]:
            rst += f'\n   :members: {", ".join(members)}\n   :undoc-members:\n   :member-order: bysource'
    if in_reference: rst = rst.replace('\n', '\n   :no-index:\n', 1) if '\n' in rst else rst+'\n   :no-index:'
    return mk_cell(f'```{{eval-rst}}\n{rst}\n```', 'markdown')

def page_cells(nb, docname):
    "Yield the cells of `nb` for MyST-NB: tags instead of directives, and the entry of each name after the last cell that documents it."
    mod = next((f"{project}.{c.directives_['default_exp']}" for c in nb.cells if 'default_exp' in c.directives_), None)
    last = {o:c for c in nb.cells if c.cell_type=='code' for o in documented(c)}
    for o in getattr(import_module(mod), '__all__', ()) if mod else ():
        # The entry of an imported name is on the page of its own Python module
        home = getattr(getattr(import_module(mod), o), '__module__', mod)
        if o not in last and (home==mod or not home.startswith(project)): log.warning(f"{mod}.{o} is public, but no cell documents it", location=docname)
    for c in nb.cells:
        new = [entry(c, mod, o, last) for o,l in last.items() if l is c]
        if c.cell_type=='code':
            c.metadata = {'tags': [t for k,t in tags.items() if k in c.directives_ or k in map(' '.join, c.directives_.items())]}
            c.source = '\n'.join(l for l in c.source.splitlines() if not l.startswith('#|'))
        if not re_show_doc.search(c.source): yield c
        yield from new

def sections_of(obj, doc):
    "Return a docstring without sections, and its sections: from the docstring, or from the comments of an internal function or class."
    text,found = docstrings.split(doc)
    if found['Args'] or found['Returns']: return text, found
    try: code = dedent(getsource(obj))
    except (TypeError, OSError): return text, found # built-in, or created by a call
    f = next((f for o,f in docstrings.documented(code, lambda name: True) if o.lineno==ast.parse(code).body[0].lineno), None)
    if f is None: return text, found
    blocks = ['\n'.join([f'{title}:', *lines]) for title,lines in docstrings.sections(f, docstrings.comments(code))]
    return docstrings.split('\n\n'.join([text, *blocks]))

def add_docments(app, what, name, obj, options, lines):
    "Show the arguments of a docstring as a table, and read its backticks as Markdown does."
    text,found = sections_of(obj, '\n'.join(lines))
    if found['Args']:
        defaults = {k: f'``{short(p.default)}``' for k,p in signature(obj).parameters.items() if p.default is not Parameter.empty}
        rows = [('argument', 'default', 'meaning'), *((bold(k), defaults.get(k, ''), v) for k,v in found['Args'].items())]
        rows = rows if defaults else [(k, v) for k,_,v in rows]
        text += '\n\n.. list-table::\n   :header-rows: 1\n   :class: arguments\n\n' + '\n'.join('   * - '+'\n     - '.join(r) for r in rows)
    if found['Returns']: text += f"\n\n:returns: {found['Returns']}"
    lines[:] = re.sub(r'(?<!`)`([^`]+)`(?!`)(\w?)', in_rst, text).splitlines()

def bold(name): return '**' + name.replace('*', '\\*') + '**'
def short(default): return default.__name__ if callable(default) else repr(default)

def in_rst(m):
    "Return a text in backticks as reStructuredText: a name that may become a link, or code. A letter may follow the backtick."
    code = m[0][:len(m[1])+2] if re.fullmatch(r'[\w.]+', m[1]) else f'``{m[1]}``'
    return code + (m[2] and '\\ '+m[2])

@cache
def find_patched(app, mod):
    "Return the source of `mod` and its tags. Functions that `patch` turns into methods have the names of methods."
    a = ModuleAnalyzer.for_module(mod)
    a.find_tags()
    fns = [o for o in ast.parse(a.code).body if isinstance(o, ast.FunctionDef)]
    return a.code, a.tags | {showdoc_nm(o): ('def', o.lineno, o.end_lineno) for o in fns if o.decorator_list}

# ---- the pages

def title_and_summary(docname):
    "Return the title of a notebook, and the line that summarizes it."
    text = ''.join(json.loads((root/'nbs'/f'{docname}.ipynb').read_text(encoding='utf-8'))['cells'][0]['source'])
    return re.match(r'# (.*)', text)[1], (re.search(r'^> (.*)', text, re.M) or ('', ''))[1]

def index_page(folder, docs):
    "Return the page of a folder: a list of its notebooks with their summaries."
    title = re.sub(r'^\d+_', '', folder).replace('_', ' ')
    listed = '\n'.join(f'- [{t}]({d.rpartition("/")[2]}): {summary}' for d in docs for t,summary in [title_and_summary(d)])
    toctree = '```{toctree}\n:hidden:\n\n' + '\n'.join(d.rpartition('/')[2] for d in docs) + '\n```'
    return f'# {title}\n\n{listed}\n\n{toctree}\n'

def sidebar(docs):
    "Return a dict: caption -> pages. Under 'How it works' are the remaining notebooks in reading order, one page for a folder."
    guides = [d for d in docs if d.startswith('tutorials/')]
    works = dict.fromkeys(f'{d.partition("/")[0]}/index' if '/' in d else d for d in docs if d not in (*guides, *beside, 'index', 'glossary'))
    return {'Use it': ['Start here <self>', *guides, 'glossary', 'changelog'], 'Other tools': [*integrations],
        'Reference': [*reference, 'All names <genindex>'], 'How it works': [*works, 'contributing', 'adding']}

def render_nb(app, docname, content):
    "Turn the source of a notebook into the source of its page, in `content[0]`."
    if docname in beside or docname.endswith('/index'): return
    nb = NBProcessor(nb=dict2nb(json.loads(content[0])), rm_directives=False).nb
    nb.cells = list(page_cells(nb, docname))
    if docname==app.config.root_doc:
        for caption,docs in sidebar(sorted(app.env.found_docs)).items():
            nb.cells.append(mk_cell(f'```{{toctree}}\n:hidden:\n:caption: {caption}\n\n' + '\n'.join(docs) + '\n```', 'markdown'))
    # Line number of each cell. The default is 10,000 lines for each cell, which autodoc would parse
    nb.metadata['source_map'] = list(range(len(nb.cells)))
    content[0] = nb2str(nb)

def titles(toc):
    "Return a page's table of contents without its headings, for the sidebar."
    toc = toc.deepcopy()
    for entry in toc.children:
        if len(entry)>1: entry[1:] = [nodes.bullet_list('', *below)] if (below := list(entry.findall(toctree))) else []
    return toc

def in_sidebar(env, *args, resolve=html.global_toctree_for_doc, **kwargs):
    "Resolve the sidebar without headings. Sphinx copies the headings of all pages for each page and then drops them: half of the time of writing."
    if not hasattr(env, 'without_headings'): env.without_headings = {d: titles(t) for d,t in env.tocs.items()}
    tocs,env.tocs = env.tocs,env.without_headings
    try: return resolve(env, *args, **kwargs)
    finally: env.tocs = tocs

html.global_toctree_for_doc = in_sidebar

def discover(self, *args, notebooks=Project.discover):
    "Return the docnames of all pages: the notebooks, one index per folder, and the files outside `nbs`."
    notebooks(self, *args)
    files = {d: root/f for d,f in beside.items()}
    for folder,docs in groupby(sorted(d for d in self.docnames if '/' in d and not d.startswith('tutorials/')), lambda d: d.partition('/')[0]):
        files[f'{folder}/index'] = f = root/'docs'/'_build'/'indexes'/f'{folder}.md'
        f.parent.mkdir(parents=True, exist_ok=True)
        f.write_text(index_page(folder, list(docs)), encoding='utf-8')
    for d,f in files.items():
        self.docnames.add(d)
        self._docname_to_path[d] = Path('..', f.relative_to(root))
        self._path_to_docname |= {Path('..', f.relative_to(root)):d, f:d}
    return self.docnames

Project.discover = discover

# ---- links

aliases = {'pd':'pandas', 'np':'numpy', 'nn':'torch.nn', 'F':'torch.nn.functional', 'Tensor':'torch.Tensor'}
lookup = NbdevLookup()

class LinkNames(SphinxTransform):
    "A transform of Sphinx that links each name in backticks to its documentation, if there is any."
    default_priority = 500
    def apply(self):
        for o in list(self.document.findall(nodes.literal)):
            if isinstance(o.parent, nodes.reference|nodes.title|pending_xref) or not re.fullmatch(r'[A-Za-z_][\w.]*', o.astext()): continue
            ref = pending_xref('', refdomain='py', reftype='obj', reftarget=o.astext(), refdoc=self.env.docname)
            o.replace_self(ref)
            ref += o

def link_name(app, env, node, contnode):
    "Return a link for a short name that is unique in this project (a method is `Class.method`), or for a name in nbdev's indexes of other libraries."
    if node.get('refdomain')!='py': return
    name = node['reftarget']
    objs = env.domains['py'].objects
    short = name.removeprefix(f'{project}.')
    found = [(k, o) for k,o in objs.items() if k.endswith(f'.{short}')]
    if '.' not in short: found = [(k, o) for k,o in found if o.objtype not in ('method', 'property', 'attribute')]
    if f'{project}.{short}' in objs: found = [(f'{project}.{short}', objs[f'{project}.{short}'])] # a name at the top of the package comes before others
    if len(found)==1:
        [(full, o)] = found
        return make_refnode(app.builder, node['refdoc'], o.docname, o.node_id, contnode, full)
    pre,dot,post = name.partition('.')
    url = lookup.doc(aliases.get(pre, pre)+dot+post)
    if url and url.startswith('http'): return nodes.reference('', '', contnode, refuri=url, internal=False)

def check_reference(app, env):
    "Warn of each name that users type and that has no entry in the reference."
    for n in module_of:
        if f'{project}.{n}' not in env.domains['py'].objects: log.warning(f"{project}.{n} is public, but no page in docs/reference documents it")
    for n in import_module(jax_tracker[0]).__all__:
        if f'{jax_tracker[0]}.{n}' not in env.domains['py'].objects: log.warning(f"{jax_tracker[0]}.{n} is public, but no page in docs/reference documents it")

sidebars = {} # folder of pages with source code -> their sidebar as HTML

def share_sidebar(app, pagename, templatename, context, doctree):
    "Use one sidebar for all pages with source code in a folder, because their links are equal. Separate ones take most of the build time."
    if not pagename.startswith('_modules/') or 'toctree' not in context: return
    make,folder = context['toctree'],pagename.rpartition('/')[0]
    def shared(**kwargs):
        "Return the sidebar as HTML. It is created only for the first page of the folder."
        if folder not in sidebars: sidebars[folder] = make(**kwargs)
        return sidebars[folder]
    context['toctree'] = shared

def add_report(app, error):
    "Write the report of the demo into the folder of the front page, which links to it."
    if error or app.builder.format!='html': return
    with TemporaryDirectory() as home:
        result = subprocess.run([sys.executable, root/'examples/digits.py'], capture_output=True, text=True,
            env={**os.environ, 'TORCHEMBER_HOME': home, 'MPLBACKEND': 'agg', 'PYTHONPATH': str(root)})
    if result.returncode: raise RuntimeError(f'The front page links to the report of examples/digits.py, but that program failed:\n{result.stderr}')
    shutil.copy(root/'examples/out/digits.html', app.outdir)

def setup(app):
    app.connect('env-check-consistency', check_reference)
    app.connect('source-read', render_nb)
    app.connect('viewcode-find-source', find_patched)
    app.connect('autodoc-process-docstring', add_docments)
    app.connect('missing-reference', link_name)
    app.connect('html-page-context', share_sidebar, priority=400) # Run before the theme creates the sidebar
    app.connect('build-finished', add_report)
    app.add_transform(LinkNames)
