"""Copy the comments beside arguments into the docstrings of names that users type, as `Args:` and `Returns:` sections.

`help`, editors and Jupyter show docstrings, not comments. Notebooks contain only the comments. `make sync` writes the sections into the generated
modules after each export. `make update` removes them (`--strip`) before nbdev carries a changed module back into its notebook. A section that
reaches a notebook all the same is removed by the next `make sync`."""
import ast
import json
import re
import sys
import textwrap
from functools import cache
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, generate_tokens

root = Path(__file__).parents[1]
# These sections are the end of a docstring
our_sections = re.compile(r'\n\n *(?:Args|Returns):\n.*', re.S)
functions = ast.FunctionDef|ast.AsyncFunctionDef
# Names that no `__init__.py` lists, because packages below `integrations` have no lists
always_typed = {'EmberCallback'}

def imports_of(body, module):
    "Return pairs of module and name for the relative imports among statements. `module`: names of the package path and the module, as a tuple."
    found = [o for o in body if isinstance(o, ast.ImportFrom) and o.level and o.module]
    return {('.'.join([*module[:-o.level], *o.module.split('.')]), a.name) for o in found for a in o.names}

def listed_names(code):
    "Return pairs of module, such as '.algebra', and names that the `__init__.py` of a package lists: in `names`, `other_names` or `lazy_attributes`."
    found = [o.value for o in ast.parse(code).body if isinstance(o, ast.Assign)]
    dicts = [d for v in found for d in (v, *getattr(v, 'args', ())) if isinstance(d, ast.Dict)]
    return [(m if m[0]=='.' else f'.{m}', names.split()) for d in dicts for m,names in ast.literal_eval(d).items()]

def text_of(path): return path.read_text(encoding='utf-8')

@cache
def typed_names():
    "Return pairs of module and name, such as `('frames.logs', 'read')`, for each name that users type: where packages list it, and where it is defined."
    package = root/'torchember'
    stubs = {p: ast.parse(stub(text_of(p))) for p in package.rglob('__init__.py')}
    listed = set().union(*(imports_of(o.body, p.relative_to(package).with_suffix('').parts) for p,o in stubs.items()))
    imported = {m: imports_of(ast.parse(text_of(package/f"{m.replace('.', '/')}.py")).body, tuple(m.split('.'))) for m,_ in listed}
    return listed | {(m2, n) for m,n in listed for m2,n2 in imported[m] if n2==n}

def is_typed(module, name): return name in always_typed or (module, name) in typed_names()

def comments(code):
    "Return a dict: line number -> the code before the comment on that line, and the comment."
    lines = code.splitlines()
    return {t.start[0]: (lines[t.start[0]-1][:t.start[1]].rstrip(), t.string.lstrip('# ')) for t in generate_tokens(StringIO(code).readline) if t.type==COMMENT}

def arguments_by_line(a):
    "Return a dict: line number -> names of the arguments on that line."
    stars,out = [(a.vararg, '*'), (a.kwarg, '**')],{}
    for o,star in [*((o, '') for o in (*a.posonlyargs, *a.args, *a.kwonlyargs)), *((o, s) for o,s in stars if o)]:
        out.setdefault(o.lineno, []).append(star+o.arg)
    return out

def sections(f, comment_at):
    "Return the sections of function `f`, as pairs of title and lines. `comment_at`: result of `comments`."
    args,result = [],[]
    names = arguments_by_line(f.args)
    for line in range(f.lineno, f.body[0].lineno):
        before,comment = comment_at.get(line, ('', ''))
        # In a signature on one line, the comment begins with the name of an argument
        names_argument = comment.partition(': ')[0] in sum(names.values(), [])
        if before.endswith(':'): (args if names_argument else result).append(comment)
        elif comment and line in names: args.append(f"{', '.join(names[line])}: {comment}")
    return [(title, lines) for title,lines in (('Args', args), ('Returns', result)) if lines]

def bases_within(name, classes):
    "Return the class `name` and its base classes of the same module."
    o = classes.get(name)
    return [] if o is None else [o, *(c for b in o.bases if isinstance(b, ast.Name) for c in bases_within(b.id, classes))]

def documented(code, typed):
    "Yield pairs of nodes: the function or class with the docstring, and the function with its arguments. `typed`: function of a name."
    body = ast.parse(code).body
    yield from ((o, o) for o in body if isinstance(o, functions) and typed(o.name))
    classes = {o.name: o for o in body if isinstance(o, ast.ClassDef)}
    lines = [bases_within(n, classes) for n in classes if typed(n)]
    for line in lines:
        init = next((f for o in line for f in o.body if isinstance(f, functions) and f.name=='__init__'), None)
        if init: yield line[0], init
    yield from ((f, f) for o in {o.name: o for line in lines for o in line}.values() for f in o.body if isinstance(f, functions) and f.name[0]!='_')

def docstring(o):
    "Return the node of a docstring, or None."
    first = o.body[0]
    return first.value if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str) else None

def split(doc):
    "Return a docstring without our sections, and the content of the sections."
    found = our_sections.search(doc)
    args,_,result = (found[0] if found else '').partition('Returns:\n')
    pairs = [line.strip().split(': ', 1) for line in args.partition('Args:\n')[2].splitlines() if line.strip()]
    return our_sections.sub('', doc), {'Args': {k: meaning for names,meaning in pairs for k in names.split(', ')}, 'Returns': result.strip()}

def quoted(text):
    return f'"""{text}"""' if '\n' in text else f'"{text}"'

def replaced(code, news):
    "Return `code` with other docstrings. `news`: pairs of a node and its new text, without quotes."
    lines = code.encode().splitlines(keepends=True)
    for o,text in sorted(news, key=lambda new: -new[0].lineno):
        before,after = lines[o.lineno-1][:o.col_offset],lines[o.end_lineno-1][o.end_col_offset:]
        lines[o.lineno-1:o.end_lineno] = [before + quoted(text).encode() + after]
    return b''.join(lines).decode()

def source_text(code, o):
    "Return the text of the docstring node `o` as written, without quotes."
    return re.fullmatch(r'("""|")(.*)\1', ast.get_source_segment(code, o), re.S)[2]

def stripped(code):
    "Return `code` without our sections."
    docs = [d for o in ast.walk(ast.parse(code)) if isinstance(o, functions|ast.ClassDef) and (d := docstring(o))]
    return replaced(code, [(d, our_sections.sub('', t)) for d in docs if our_sections.search(t := source_text(code, d))])

def filled(code, typed):
    "Return `code` with our sections, each once. `typed(name)`: True for names that users type."
    code = stripped(code)
    comment_at,news = comments(code),[]
    for o,f in documented(code, typed):
        found,doc = sections(f, comment_at),docstring(o)
        if not found or doc is None: continue # a function without a docstring is internal
        indent = '\n'+' '*doc.col_offset
        text = [f'{indent}{title}:' + ''.join(f'{indent}    {line}' for line in lines) for title,lines in found]
        news.append((doc, '\n'.join([source_text(code, doc), *text])+indent))
    return replaced(code, news)

def fill(path):
    "Write the sections into a generated module."
    module = '.'.join(path.relative_to(root/'torchember').with_suffix('').parts)
    change(path, lambda code: filled(code, lambda name: is_typed(module, name)))

def change(path, f):
    "Write `f(text)` to a file if it differs from the text of the file."
    old = path.read_text(encoding='utf-8')
    new = f(old)
    if new!=old: path.write_text(new, encoding='utf-8')

def cleaned(notebook):
    "Return the JSON of a notebook without our sections."
    nb = json.loads(notebook)
    found = [c for c in nb['cells'] if c['cell_type']=='code' and '#| export' in (s := ''.join(c['source'])) and our_sections.search(s)]
    for c in found: c['source'] = stripped(''.join(c['source'])).splitlines(keepends=True)
    return json.dumps(nb, indent=1, ensure_ascii=False)+'\n' if found else notebook

def import_hint(module, names):
    "Return the import of some names as themselves, for editors, in lines of at most 120 characters."
    pairs = ', '.join(f'{n}\0as\0{n}' for n in names) # \0: no line ends before `as`
    line = f'from {module} import {pairs}'
    if len(line)>120: line = textwrap.fill(f'from {module} import ({pairs})', 120, subsequent_indent='    ')
    return line.replace('\0', ' ')+'\n'

def stub(code):
    "Return the text of `__init__.pyi` for the `__init__.py` of a package: an import of each name that it lists, for editors. '' if it lists no names."
    others = re.search(r'^packages = (.*)', code, re.M)
    imports = [*listed_names(code), *([('.', ast.literal_eval(others[1]))] if others else [])]
    return ''.join(import_hint(module, names) for module,names in imports)+'__version__: str\n'*("'__version__'" in code)

def write_stub(path):
    "Write `__init__.pyi` beside the `__init__.py` of a package."
    if text := stub(text_of(path)): path.with_suffix('.pyi').write_text(text, encoding='utf-8')

def modules(where): return [where] if where.suffix=='.py' else [p for p in sorted(where.rglob('*.py')) if p.name not in ('__init__.py', '_modidx.py')]

if __name__=='__main__':
    match sys.argv[1:]:
        case []:
            for p in (root/'torchember').rglob('__init__.py'): write_stub(p)
            for p in modules(root/'torchember'): fill(p)
        case ['--strip', where]:
            for p in modules(Path(where)): change(p, stripped)
        case ['--notebooks']:
            for p in sorted((root/'nbs').rglob('*.ipynb')): change(p, cleaned)
        case _: sys.exit(__doc__)
