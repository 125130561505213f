"""pytest plugin for notebooks: each section is a test. Exported cells are not run, because their names are imported from the library."""
import os
import re
import sys
import traceback
from importlib import import_module

import process # must be imported before torch and torchember
import pytest
from execnb.shell import CaptureShell
from fastcore.nbio import does_cell_eval, read_nb


def pytest_unconfigure(): process.over()


# texts in outputs about the first use of compiled loops, which only some runs have
first = r'; the start of recording waited [^;]* for compiled loops| \(of which compiling loops: [^;)]*\)'


def shown(c):
    "Return the words and the kinds of pictures in the outputs of a cell. Unlike numbers and addresses, they are the same on every machine."
    data = [d for o in c.outputs or () if o.get('name')!='stderr' for d in (o.get('data') or {'text/plain': o.get('text', '')}).items()]
    texts = [kind if kind.startswith('image/') else re.sub(f'0x[0-9a-f]+|{first}', '', ''.join(v)) for kind,v in data]
    return {w for t in texts for w in re.findall(r'[A-Za-z_]{3,}', t)} - {'nan', 'NaN', 'inf'}


class Section(pytest.Item):
    "Test of one section: the code cells below one heading."
    def __init__(self, cells, **kwargs):
        super().__init__(**kwargs)
        self.cells = cells

    def runtest(self): self.parent.run_to(self)
    def reportinfo(self): return self.path, None, self.name

    def repr_failure(self, excinfo):
        "Return the part of the traceback that begins in the notebook, and the source of the failed cell."
        if isinstance(excinfo.value, pytest.fail.Exception): return str(excinfo.value)
        tb = excinfo.tb
        while tb.tb_next and '<ipython' not in tb.tb_frame.f_code.co_filename: tb = tb.tb_next
        return ''.join(traceback.format_exception(excinfo.type, excinfo.value, tb)) + f'\n{self.parent.cell.source}'


# package -> names of the libraries to which its Python modules connect
libraries_of = {'integrations': ('lightning', 'transformers', 'accelerate', 'fastai', 'ignite', 'keras'),
    'sinks': ('wandb', 'tensorboard', 'mlflow', 'trackio')}
needed = {f'torchember.{package}.{lib}': (lib,) for package,libs in libraries_of.items() for lib in libs} # module -> libraries that its notebook imports
needed['torchember.integrations.private_trainers'] = 'accelerate', 'ignite', 'keras'


class Notebook(pytest.File):
    "Tests of a notebook. Its sections run in order in one shell."
    def collect(self):
        self.mod,parts = None,[(self.path.stem, [])]
        for c in read_nb(self.path).cells:
            if c.cell_type=='markdown' and c.source.startswith('#'): parts.append((c.source.splitlines()[0].lstrip('# '), []))
            elif c.cell_type=='code':
                d = c.directives
                if 'default_exp' in d: self.mod = f"torchember.{d['default_exp']}"
                if does_cell_eval(c, True) and not {'default_exp', 'export', 'exporti', 'exports'} & d.keys(): parts[-1][1].append(c)
            for mark in {'slow', 'release'} & c.directives.keys(): self.add_marker(mark) # `release`: tutorials whose statements are also tested in tests/
        self.todo = [Section.from_parent(self, name=n, cells=cs) for n,cs in parts if cs]
        return list(self.todo)

    def setup(self):
        "Start a shell in the folder of the notebook, with a new home for runs. It has all names of the exported module."
        for lib in ('jax', 'flax', 'optax', 'equinox') if 'jaxember' in (self.mod or '') else (): pytest.importorskip(lib)
        for lib in needed.get(self.mod, ()):
            with pytest.MonkeyPatch.context() as m:
                m.setenv('KERAS_BACKEND', 'torch') # keras reads this variable when it is imported
                pytest.importorskip(lib)
        self.optimize(False)
        self.before,self.failed,self.env,self.environ = process.Before(),self.session.testsfailed,pytest.MonkeyPatch(),dict(os.environ)
        process.fresh(self.env)
        process.forget_graphs()
        self.env.setattr(sys, 'path', sys.path[:])
        self.env.chdir(self.path.parent)
        self.shell = CaptureShell(self.path)
        if self.mod: self.shell.user_ns.update({k:v for k,v in vars(import_module(self.mod)).items() if not k.startswith('__')})
        self.came,self.began = {},process.Settings()

    def as_it_was(self, section):
        "Fail if the section has changed settings. Note in which section files, threads and the like were opened: later sections may use them."
        self.came = {s: self.came.get(s, section.name) for s in self.before.come()}
        if self.session.testsfailed>self.failed: return
        changed = self.began.changed(process.Settings())
        process.blame(section.name, [s for s in changed if ' TORCHEMBER_HOME ' not in s]) # a notebook may use several homes

    def optimize(self, yes):
        "Switch the optimization passes of XLA on or off. They take a third of the time of the notebooks about JAX. Tests of equal bits use them."
        if 'jaxember' in (self.mod or '') and self.path.name!='40_watching.ipynb': import_module('jax').config.update('jax_disable_most_optimizations', not yes)

    def teardown(self):
        self.shell.close()
        self.env.undo()
        for k in os.environ.keys() - self.environ.keys(): del os.environ[k] # settings of libraries, such as to stay offline, end with the notebook
        os.environ |= self.environ
        self.optimize(True)
        if self.session.testsfailed>self.failed or self.todo: return
        process.blame(self.path.name, [f'{s} (since {self.came[s]!r})' if s in self.came else s for s in self.before.left()])

    def run_to(self, section):
        "Run the sections up to `section` that have not run yet. Fail if their outputs differ from the saved outputs, which the pages show."
        old = []
        while section in self.todo:
            part = self.todo.pop(0)
            for c in part.cells:
                for what in c.directives.get('needs', '').split(): # such as `hooks_in_graphs`, which is False in older versions of torch
                    if not getattr(import_module('torchember.capture.private_torch'), what): pytest.skip(f'this torch has no {what}')
                self.cell,saved = c,shown(c)
                self.shell.cell(c)
                if self.shell.exc: raise self.shell.exc
                if 'hide' not in c.directives and (differ := saved ^ shown(c)): old.append(f'{c.source}\n\nshows, or has saved: {sorted(differ)}')
            self.as_it_was(part)
        if old: pytest.fail('\n\n'.join([*old, f'Look at it, and save it: make save NB={self.path.relative_to(self.config.rootpath)}']), pytrace=False)


def pytest_collection_modifyitems(items):
    "Run slow tests first, so that no worker has to run them alone at the end."
    items.sort(key=lambda o: o.get_closest_marker('slow') is None)


def pytest_collect_file(file_path, parent):
    if file_path.suffix=='.ipynb': return Notebook.from_parent(parent, path=file_path)
