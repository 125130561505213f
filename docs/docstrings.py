"""Write what the comments beside arguments say into the docstrings of the exported library: `help`, editors and Jupyter show only these

The comments stay the one source. `make sync` runs this after each export; `make update` takes the sections out again (`--strip`) before nbdev carries a
change of a module back into its notebook. Should one get there all the same, the next `make sync` takes it out of the notebook, too."""
import ast
import json
import re
import sys
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, generate_tokens

root = Path(__file__).parents[1]
ours = re.compile(r'\n\n *(?:Args|Returns):\n.*', re.S) # how a docstring of ours ends
functions = ast.FunctionDef|ast.AsyncFunctionDef

def comments(code):
    "Line -> the code and the comment on it"
    lines = code.splitlines()
    return {t.start[0]: (lines[t.start[0]-1][:t.start[1]].rstrip(), t.string.lstrip('# ')) for t in generate_tokens(StringIO(code).readline) if t.type==COMMENT}

def named(a):
    "Line -> the arguments that a comment on it speaks of"
    stars,out = [(a.vararg, '*'), (a.kwarg, '**')],{}
    for o,star in [*((o, '') for o in (*a.posonlyargs, *a.args, *a.kwonlyargs)), *((o, s) for o,s in stars if o)]:
        out.setdefault(o.lineno, []).append(star+o.arg)
    return out

def sections(f, beside):
    "What is said beside the arguments of the function `f`, and beside its result"
    args,result = [],[]
    names = named(f.args)
    for line in range(f.lineno, f.body[0].lineno):
        before,said = beside.get(line, ('', ''))
        of_one = said.partition(': ')[0] in sum(names.values(), []) # where all is on one line, the comment says of which argument it is
        if before.endswith(':'): (args if of_one else result).append(said)
        elif said and line in names: args.append(f"{', '.join(names[line])}: {said}")
    return [(title, lines) for title,lines in (('Args', args), ('Returns', result)) if lines]

def lineage(name, classes):
    "A class and those of this module that it is made of"
    o = classes.get(name)
    return [] if o is None else [o, *(c for b in o.bases if isinstance(b, ast.Name) for c in lineage(b.id, classes))]

def documented(code):
    "The public functions, classes and methods: what has the docstring, and what has the arguments"
    body = ast.parse(code).body
    names = next((ast.literal_eval(o.value) for o in body if isinstance(o, ast.Assign) and getattr(o.targets[0], 'id', '')=='__all__'), ())
    yield from ((o, o) for o in body if isinstance(o, functions) and o.name in names)
    classes = {o.name: o for o in body if isinstance(o, ast.ClassDef)}
    lines = [lineage(n, classes) for n in names if n in classes]
    for line in lines:
        init = next((f for o in line for f in o.body if isinstance(f, functions) and f.name=='__init__'), None)
        if init: yield line[0], init
    yield from ((f, f) for o in {o.name: o for line in lines for o in line}.values() for f in o.body if isinstance(f, functions) and f.name[0]!='_')

def docstring(o):
    "The node of a docstring, if there is one"
    first = o.body[0]
    return first.value if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str) else None

def split(doc):
    "A docstring without our sections, and what these say"
    found = ours.search(doc)
    args,_,result = (found[0] if found else '').partition('Returns:\n')
    pairs = [line.strip().split(': ', 1) for line in args.partition('Args:\n')[2].splitlines() if line.strip()]
    return ours.sub('', doc), {'Args': {k: what for names,what in pairs for k in names.split(', ')}, 'Returns': result.strip()}

def quoted(text):
    return f'"""{text}"""' if '\n' in text else f'"{text}"'

def replaced(code, news):
    "`code` with other docstrings: pairs of a node and its new text, without quotes"
    lines = code.encode().splitlines(keepends=True)
    for o,text in sorted(news, key=lambda new: -new[0].lineno):
        before,after = lines[o.lineno-1][:o.col_offset],lines[o.end_lineno-1][o.end_col_offset:]
        lines[o.lineno-1:o.end_lineno] = [before + quoted(text).encode() + after]
    return b''.join(lines).decode()

def inside(code, o):
    "The text of the docstring `o`, as it is written"
    return re.fullmatch(r'("""|")(.*)\1', ast.get_source_segment(code, o), re.S)[2]

def stripped(code):
    "`code` without our sections"
    docs = [d for o in ast.walk(ast.parse(code)) if isinstance(o, functions|ast.ClassDef) and (d := docstring(o))]
    return replaced(code, [(d, ours.sub('', t)) for d in docs if ours.search(t := inside(code, d))])

def filled(code):
    "`code` with our sections, once"
    code = stripped(code)
    beside,news = comments(code),[]
    for o,f in documented(code):
        found,doc = sections(f, beside),docstring(o)
        if not found or doc is None: continue # what has no docstring is not for users
        indent = '\n'+' '*doc.col_offset
        text = [f'{indent}{title}:' + ''.join(f'{indent}    {line}' for line in lines) for title,lines in found]
        news.append((doc, '\n'.join([inside(code, doc), *text])+indent))
    return replaced(code, news)

def change(path, f):
    "Apply `f` to a file, which stays as it is when there is nothing to change"
    old = path.read_text(encoding='utf-8')
    new = f(old)
    if new!=old: path.write_text(new, encoding='utf-8')

def cleaned(notebook):
    "A notebook without our sections"
    nb = json.loads(notebook)
    found = [c for c in nb['cells'] if c['cell_type']=='code' and '#| export' in (s := ''.join(c['source'])) and ours.search(s)]
    for c in found: c['source'] = stripped(''.join(c['source'])).splitlines(keepends=True)
    return json.dumps(nb, indent=1, ensure_ascii=False)+'\n' if found else notebook

def hinted(code):
    "`torchember/__init__.py` with an import of each of its `names`, for editors"
    rooms = next(ast.literal_eval(o.value) for o in ast.parse(code).body if isinstance(o, ast.Assign) and o.targets[0].id=='names')
    lines = ''.join(f'    from .{room} import {n} as {n}\n' for room,names in rooms.items() for n in names.split())
    return re.sub(r'(?<=\nif TYPE_CHECKING:\n)(    .*\n)+', lines, code, count=1)

def modules(where): return [where] if where.suffix=='.py' else [p for p in sorted(where.rglob('*.py')) if p.name not in ('__init__.py', '_modidx.py')]

if __name__=='__main__':
    match sys.argv[1:]:
        case []:
            for p in modules(root/'torchember'): change(p, filled)
            change(root/'torchember/__init__.py', hinted)
        case ['--strip', where]:
            for p in modules(Path(where)): change(p, stripped)
        case ['--notebooks']:
            for p in sorted((root/'nbs').rglob('*.ipynb')): change(p, cleaned)
        case _: sys.exit(__doc__)
