"""Write README.md from nbs/index.ipynb, with the outputs saved there"""
import re
from base64 import b64decode
from pathlib import Path
from posixpath import normpath

from fastcore.nbio import read_nb

root = Path(__file__).parents[1]
images = root/'docs/images'

def output_md(o, name):
    "Return an output as Markdown: text, or a picture that is saved in `images`."
    d = {k:''.join(v) for k,v in o.get('data', {'text/plain': o.get('text', '')}).items()}
    if 'image/png' in d:
        images.mkdir(exist_ok=True)
        (images/f'{name}.png').write_bytes(b64decode(d['image/png']))
        return f'![](docs/images/{name}.png)'
    if 'text/markdown' in d: return d['text/markdown']
    return f"```text\n{d['text/plain'].rstrip()}\n```" if 'text/plain' in d else d.get('text/html', '')

def cell_md(c):
    "Return the Markdown of a cell. Its links are relative to `root`."
    if {'hide', 'export', 'default_exp'} & c.directives.keys(): return []
    if c.cell_type=='markdown':
        # GitHub shows no HTML
        text = c.source.replace('<a href="digits.html">Open a report</a>', 'For an example, run `make demo`, and open `examples/out/digits.html`')
        return [re.sub(r'\]\((?!\w+:|#|/)([^)\s]+)', lambda m: f"]({normpath('nbs/'+m[1])}", text)]
    return [f'```python\n{c.source}\n```', *(output_md(o, f'{c.id}-{i}') for i,o in enumerate(c.outputs))]

for old in images.glob('*-[0-9]*.png'): old.unlink() # remove old pictures of the README; pictures of other pages have other names
md = [o for c in read_nb(root/'nbs/index.ipynb').cells for o in cell_md(c)]
md.insert(0, '<!-- Written by docs/readme.py from nbs/index.ipynb: edit that, then run `make` -->')
(root/'README.md').write_text('\n\n'.join(md)+'\n', encoding='utf-8')
