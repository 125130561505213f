"A real JupyterLab server, and a notebook in it that a browser runs"
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager


@contextmanager
def server(
    tmp # An empty folder for settings and notebooks
):
    "Run a JupyterLab server. Yield its address, its token, and its folder of notebooks"
    dirs = ('JUPYTER_CONFIG_DIR', 'JUPYTER_DATA_DIR', 'JUPYTER_RUNTIME_DIR', 'IPYTHONDIR')
    token = secrets.token_hex(16)
    env = {k: v for k,v in os.environ.items() if not k.startswith(('JUPYTER', 'JPY_', 'MPLBACKEND'))}
    env |= {n: str(tmp/n) for n in dirs} | {'JUPYTER_TOKEN': token}
    (tmp/'root').mkdir()
    config = tmp/'JUPYTER_CONFIG_DIR/labconfig'
    config.mkdir(parents=True)
    # Disable an extension that would open a dialog
    (config/'page_config.json').write_text('{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}')
    with socket.create_server(('127.0.0.1', 0)) as s: port = s.getsockname()[1]
    url = f'http://127.0.0.1:{port}'
    with open(tmp/'log', 'wb') as log:
        proc = subprocess.Popen([sys.executable, '-m', 'jupyterlab', '--no-browser', '--allow-root', '--ServerApp.ip=127.0.0.1', f'--ServerApp.port={port}',
            '--ServerApp.port_retries=0', f"--ServerApp.root_dir={tmp/'root'}", '--LabApp.expose_app_in_browser=True', '--LabApp.extension_manager=readonly'],
            env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(1200):
            try:
                urllib.request.urlopen(f'{url}/api/status?token={token}', timeout=5)
                break
            except OSError:
                assert proc.poll() is None, (tmp/'log').read_text()
                time.sleep(.1)
        yield url, token, tmp/'root'
    finally:
        proc.send_signal(signal.SIGTERM) # the server stops its kernels, then exits
        try: proc.wait(30)
        finally:
            if proc.poll() is None: os.killpg(proc.pid, signal.SIGKILL)


def window(
    browser, # The browser of the fixture `chromium`
    lab, # Result of `server`
    **context # Device pixels per pixel of the page, and other arguments of `new_page` of playwright
):
    "Return a page with JupyterLab, in which `Notebook` opens notebooks"
    url,token,root = lab
    page = browser.new_page(**context)
    page.set_default_timeout(300_000) # a kernel needs minutes to start on a busy machine
    page.goto(f'{url}/lab?reset&token={token}')
    page.wait_for_function('window.jupyterapp?.restored.then(() => true)')
    page.root,page.kernel = root,None
    return page


class Notebook:
    "A notebook that is open in a page, with its kernel ready."
    def __init__(self,
        page, # Result of `window`; the previous notebook in it is closed
        *cells, # Source code of each cell
        size=(1500, 1600), # Size of the window in pixels
        fresh=True # False to use the kernel of the previous notebook again
    ):
        meta = {'kernelspec': {'name': 'python3', 'display_name': 'Python 3', 'language': 'python'}} # without a kernelspec, a dialog opens
        code = [dict(cell_type='code', source=c, metadata={}, outputs=[], execution_count=None) for c in cells]
        # A new name, because the kernel of an earlier notebook belongs to its name
        self.page,name = page,f'{len([*page.root.iterdir()])}.ipynb'
        (page.root/name).write_text(json.dumps(dict(cells=code, metadata=meta, nbformat=4, nbformat_minor=4)))
        page.set_viewport_size(dict(zip(('width', 'height'), size, strict=True)))
        # Close figures and widgets of the previous notebook
        if page.kernel: self.ask("import ipywidgets, matplotlib.pyplot as plt; plt.close('all'); ipywidgets.Widget.close_all()")
        page.evaluate("""([path, id]) => { for (const w of [...jupyterapp.shell.widgets('main')]) w.dispose()
            return jupyterapp.commands.execute('docmanager:open', {path, factory: 'Notebook', ...(id && {kernel: {id}})}).then(() => 0) }""",
            [name, None if fresh else page.kernel])
        page.wait_for_function("window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status == 'idle'")
        page.kernel = page.evaluate("""() => { window.bad = []; const context = jupyterapp.shell.currentWidget.sessionContext; context.iopubMessage.connect(
            (_, m) => m.header.msg_type == 'error' && bad.push(m.content.evalue)) // also those of a widget's callback, which no cell shows
            return context.session.kernel.id }""")

    def run(self): # Result: False if a cell has failed
        "Run all cells"
        return self.page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')")

    @property
    def bad(self):
        "Return the errors of cells and callbacks"
        return self.page.evaluate('bad')

    @property
    def out(self):
        "Return the outputs of cells. The editor contains the same texts"
        return self.page.locator('.jp-OutputArea')

    def ask(self,
        code # Code that prints something
    ):
        "Run code in the kernel. Return the text that it prints, or its error"
        return self.page.evaluate("""async code => { let out = ''
            const asked = jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({code})
            asked.onIOPub = m => { out += m.content.text ?? m.content.evalue ?? '' }
            await asked.done
            return out.trim() }""", code)

    def numbers(self,
        name # Text before the colon
    ):
        "Return the numbers in a line of output such as `name: 1 2.5`"
        return [float(v) for v in self.out.get_by_text(re.compile(name+r': [-\d]')).last.inner_text().split(':')[1].split()]
