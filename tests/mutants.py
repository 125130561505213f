"""Mutation testing: change one place of the library at a time, run the tests of its Python module, and list changes that no test notices.

    python tests/mutants.py                       30 faults, drawn from all packages
    python tests/mutants.py store choose -n 9     9 faults in packages whose names begin with these words
    python tests/mutants.py store.reading:51      all faults of one line: does a test notice them now?

A change that no test notices shows a missing test, a line without use, or a change without effect. Texts are not changed."""
import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from itertools import islice
from pathlib import Path

import pytest
from near import near, tests_near

root = Path(__file__).parent.parent
others = {} # operator -> operators that replace it
for pair in ('Lt LtE', 'Lt GtE', 'Gt GtE', 'Gt LtE', 'Eq NotEq', 'In NotIn', 'Is IsNot', 'And Or', 'Add Sub', 'Mult Div', 'Pow Mult', 'FloorDiv Mod',
        'BitAnd BitOr', 'LShift RShift'):
    one,other = (getattr(ast, p) for p in pair.split())
    others.setdefault(one, []).append(other)
    others.setdefault(other, []).append(one)
names = {'min': 'max', 'max': 'min', 'any': 'all', 'all': 'any', 'minimum': 'maximum', 'maximum': 'minimum', 'amin': 'amax', 'amax': 'amin'}
wording = ('__repr__', 'warn', 'unknown', 'note') # Functions that only compose messages


class Faults(ast.NodeVisitor):
    "Visitor that collects the possible changes of a Python module, as pairs (syntax node, new node)"
    def __init__(self): self.found = []
    def put(self, node, new): self.found.append((node, new if isinstance(new, str) else f'({ast.unparse(new)})'))

    def changed(self, node, **fields):
        "Return a copy of a syntax node in which some fields are replaced."
        return type(node)(**{**{k: getattr(node, k) for k in node._fields}, **fields})

    def visit_FunctionDef(self, node):
        if node.name in wording: return
        for o in (*node.decorator_list, *filter(None, (*node.args.defaults, *node.args.kw_defaults)), *node.body): self.visit(o)

    def visit_JoinedStr(self, node): pass
    def visit_Raise(self, node): self.put(node, 'pass')
    def visit_AnnAssign(self, node): pass

    def visit_Compare(self, node):
        for i,op in enumerate(node.ops):
            for other in others[type(op)]: self.put(node, self.changed(node, ops=[*node.ops[:i], other(), *node.ops[i+1:]]))
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.put(node, self.changed(node, op=others[type(node.op)][0]()))
        for i in range(len(node.values)):
            rest = node.values[:i]+node.values[i+1:]
            self.put(node, rest[0] if len(rest)==1 else self.changed(node, values=rest))
        self.generic_visit(node)

    def visit_BinOp(self, node):
        for other in others.get(type(node.op), ()): self.put(node, self.changed(node, op=other()))
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not|ast.USub|ast.Invert): self.put(node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node):
        v = node.value
        if isinstance(v, bool): self.put(node, str(not v))
        elif isinstance(v, int): self.put(node, str(v+1)); self.put(node, f'({v-1})')
        elif isinstance(v, float): self.put(node, repr(v*2 or 1.))

    def visit_Name(self, node):
        if node.id in names: self.put(node, names[node.id])

    def visit_Attribute(self, node):
        if node.attr in names: self.put(node, self.changed(node, attr=names[node.attr]))
        self.generic_visit(node)

    def visit_Call(self, node):
        called = getattr(node.func, 'attr', getattr(node.func, 'id', ''))
        if called in wording: return
        a,b = (*node.args, None, None)[:2]
        if b is not None and ast.dump(a)!=ast.dump(b) and not isinstance(a, ast.Starred) and not isinstance(b, ast.Starred):
            self.put(node, self.changed(node, args=[b, a, *node.args[2:]]))
        for k in node.keywords:
            if k.arg: self.put(node, self.changed(node, keywords=[o for o in node.keywords if o is not k]))
        self.generic_visit(node)

    def visit_If(self, node):
        self.put(node.test, ast.UnaryOp(ast.Not(), node.test))
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_comprehension(self, node):
        for o in node.ifs: self.put(o, 'True')
        for o in (node.iter, *node.ifs): self.visit(o)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call) and getattr(node.value.func, 'attr', '') not in wording: self.put(node, 'pass')
        self.visit(node.value)

    def visit_Assign(self, node):
        if all(isinstance(t, ast.Attribute|ast.Subscript) for t in node.targets): self.put(node, 'pass')
        self.visit(node.value)

    def visit_AugAssign(self, node):
        self.put(node, 'pass')
        for other in others.get(type(node.op), ()): self.put(node, f'{ast.unparse(self.changed(node, op=other()))}')
        self.visit(node.value)

    def visit_Delete(self, node): self.put(node, 'pass')
    def visit_Break(self, node): self.put(node, 'pass')
    def visit_Continue(self, node): self.put(node, 'pass')


def faults(source):
    "Return all possible changes of a Python module as a list of (line, begin, end, new text)."
    start = [0]
    for line in source.encode().split(b'\n'): start.append(start[-1]+len(line)+1)
    finder,got = Faults(),{}
    for o in ast.parse(source).body:
        if not isinstance(o, ast.Import|ast.ImportFrom) and not ast.unparse(o).startswith('__all__'): finder.visit(o)
    for node,new in finder.found:
        if new.strip('()')!=ast.unparse(node).strip('()'):
            got[node.lineno, start[node.lineno-1]+node.col_offset, start[node.end_lineno-1]+node.end_col_offset, new] = None
    return list(got)


def planted(source, fault):
    "Return the source with a change, and the line before and after the change. Return None if the changed source is not valid Python."
    line,b,e,new = fault
    text = (source.encode()[:b]+new.encode()+source.encode()[e:]).decode()
    try: compile(text, 'fault', 'exec')
    except SyntaxError: return None
    return text, *(t.split('\n')[line-1].strip() for t in (source, text))


class Copy:
    "A copy of the repository in another folder, in which the library can be changed"
    def __init__(self, place):
        self.place,self.before = Path(place),{}
        listed = subprocess.run(['git', 'ls-files', '-z'], cwd=root, capture_output=True, text=True, check=True).stdout
        for f in filter(None, listed.split('\0')):
            if not (root/f).exists(): continue
            (self.place/f).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root/f, self.place/f)

    def run(self, tests, timeout=None, most=0):
        "Run tests in a forked process, which saves the import of torch. Return the failed tests, or how the process ended, and the seconds."
        began,out = time.time(),self.place/'out.txt'
        pid = os.fork()
        if not pid: self.child(tests, most, out)
        code = None
        while code is None:
            done,code = os.waitpid(pid, os.WNOHANG)
            if done: break
            if timeout and time.time()-began>timeout:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return {'it never ends'}, time.time()-began
            code = time.sleep(.1)
        failed = set(re.findall(r'^(?:FAILED|ERROR) (.+?)(?: - .*)?$', out.read_text(errors='replace'), re.M))
        return failed or ({f'pytest ends with {code}'} if code else set()), time.time()-began

    def child(self, tests, most, out):
        os.setsid()
        for n in (1, 2): os.dup2(os.open(out, os.O_CREAT|os.O_WRONLY|os.O_TRUNC*(n==1)|os.O_APPEND), n)
        os.chdir(self.place)
        os.environ.update(PYTHONPATH=str(self.place), PYTHONDONTWRITEBYTECODE='1', LOG_KILLS='5', LOG_STEPS='600', LOG_FORKS='3')
        # The repository may contain a virtual environment, so its packages stay importable
        def ours(p): return p.is_relative_to(root) and not p.is_relative_to(sys.prefix)
        sys.path[:] = [str(self.place), *(p for p in sys.path if not ours(Path(p).absolute()))]
        sys.dont_write_bytecode = True
        os._exit(pytest.main(['-q', '-rfE', '-n0', '-p', 'no:cacheprovider', '-o', 'timeout=120', f'--maxfail={most}', *tests]))

    def try_out(self, room, text):
        "Return the tests that fail with a change of the library and pass without the change."
        tests = tests_near(room)
        key = ' '.join(tests)
        if key not in self.before: self.before[key] = self.run(tests)
        known,seconds = self.before[key]
        path = self.place/'torchember'/f'{room.replace(".", "/")}.py'
        sound = path.read_text()
        path.write_text(text)
        try: failed,_ = self.run(tests, 3*seconds+60, len(known)+1)
        finally: path.write_text(sound)
        return failed-known


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('rooms', nargs='*', help='beginnings of rooms, or room:line')
    parser.add_argument('-n', type=int, default=30, help='how many faults')
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    lines = {tuple(r.rsplit(':', 1)) for r in args.rooms if ':' in r}
    found = []
    for path in sorted((root/'torchember').rglob('*.py')):
        room = '.'.join(path.relative_to(root/'torchember').with_suffix('').parts)
        if path.stem in ('__init__', '_modidx'): continue
        if args.rooms and not any(f'{room}.'.startswith(f'{r.split(":")[0]}.') for r in args.rooms): continue
        found += [(room, path, f) for f in faults(path.read_text()) if not lines or (room, str(f[0])) in lines]
    if not found: sys.exit(f"There is nothing in {' or '.join(args.rooms)}. Rooms: {', '.join(near)}")
    random.Random(args.seed).shuffle(found)
    drawn = list(islice(((*f, p) for f in found if (p := planted(f[1].read_text(), f[2]))), None if lines else args.n))
    for module in ('torch', 'pandas', 'scipy.stats', 'hypothesis', 'IPython', 'execnb.shell', 'fastcore.test'): import_module(module)
    with tempfile.TemporaryDirectory(prefix='torchember-mutants-') as place:
        copy,lived = Copy(place),0
        for i,(room,_,fault,(text,old,new)) in enumerate(sorted(drawn, key=lambda f: (f[0], f[2]))):
            noticed = copy.try_out(room, text)
            lived += not noticed
            print(f"{i+1:3} {'noticed' if noticed else 'LIVES  '} {room}:{fault[0]}", f'- {old:.150}', f'+ {new:.150}', sep='\n      ')
            print(f"      {min(noticed, default=''):.120}", flush=True)
        print(f'{len(drawn)-lived} of {len(drawn)} noticed, out of {len(found)} that can be planted there')
        for tests,(known,_) in copy.before.items():
            if known: print(f'{tests}: fails without a fault, too: {", ".join(sorted(known)):.300}')


if __name__=='__main__': main()
