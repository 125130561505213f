"""Export some notebooks to the library, with `Args:` and `Returns:` sections.

    python docs/export.py                          the notebooks that changed since the last commit
    python docs/export.py nbs/05_ground/20_record.ipynb

`make sync` exports all notebooks and writes the index, the README and the editor hints. One notebook takes 2 s here, `make sync` 30 s."""
import subprocess
import sys
from pathlib import Path

from docstrings import change, cleaned, fill
from nbdev.config import get_config
from nbdev.export import nb_export
from nbdev.process import NBProcessor

root = Path(__file__).parents[1]


def changed_files():
    "Return the files that differ from the last commit, relative to the repository."
    def lines(*args): return subprocess.run(['git', *args], cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({*lines('diff', '--name-only', 'HEAD'), *lines('ls-files', '-o', '--exclude-standard')})


def changed_notebooks(): return [f for f in changed_files() if f.startswith('nbs/') and f.endswith('.ipynb') and (root/f).exists()]


def module_of(notebook):
    "Return the name of the Python module that a notebook exports, None for a page without one."
    for cell in NBProcessor(notebook).nb.cells:
        if exported := cell.directives_.get('default_exp'): return exported if isinstance(exported, str) else exported[0]


def export(notebook):
    "Export one notebook. Return the path of its Python module, or None if it exports nothing."
    change(notebook, cleaned)
    module = module_of(notebook)
    if module is None: return None
    nb_export(notebook, lib_path=get_config().lib_path)
    path = root/'torchember'/f"{module.replace('.', '/')}.py"
    fill(path)
    return path


if __name__=='__main__':
    for name in sys.argv[1:] or changed_notebooks():
        if not (root/name).is_file(): sys.exit(f"There is no notebook {name}. Give paths such as nbs/05_ground/20_record.ipynb.")
        if path := export(root/name): print(f'{name} -> {path.relative_to(root)}')
