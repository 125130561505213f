"What lies in a folder is data: nothing of it is run, nothing is written elsewhere, and no bad file ends a look at the good ones"
import subprocess
import sys
from pathlib import Path

import torchember
from torchember.show.live_view import Reader

root = Path(torchember.__file__).parents[1]


# ---- children

evil = "open({mark!r}, 'a').write(__name__+' ')\n"


def folder_of_modules(path):
    "A folder with modules that leave a mark when they are imported"
    for name in ('pickle', 'struct', 'copyreg', 'encodings', 'torchember', 'numpy', 'pandas', 'signal', 'tqdm', 'sitecustomize', 'usercustomize'):
        (path/f'{name}.py').write_text(evil.format(mark=str(path/'ran')))
    return path


def test_a_child_imports_nothing_of_the_folder_one_stands_in(tmp_path, monkeypatch):
    here = folder_of_modules(tmp_path)
    log = tmp_path/'log'
    log.write_bytes(b'{"module": "model(Net)", "ttype": "output", "tname": "output_0", "step": 3, "rms": 1.0}\n')
    monkeypatch.chdir(here)
    monkeypatch.setenv('PYTHONPATH', ':') # an empty entry is the current folder, of whoever starts
    monkeypatch.setattr(sys, 'path', ['', '.', *sys.path])
    reader = Reader(picture=False, look={})
    try: assert reader.ask(path=log, over=True)['line']=='log: step 3'
    finally: reader.end()
    assert not (here/'ran').exists()


def test_a_program_that_shows_a_run_live_imports_nothing_of_its_folder(tmp_path, monkeypatch):
    "The whole of it, as a user would: a script elsewhere, started in a folder that is anybody's"
    here = folder_of_modules(tmp_path)
    code = f"""if 1:
        import sys; sys.path.insert(0, {str(root)!r})
        import torchember
        t = torchember.emberTracker('run', {str(tmp_path/'home')!r})
        t + dict(module='model(Net)', ttype='output', tname='output_0', step=3, rms=1.)
        t.barrier()
        torchember.live(t, wait=True)
        """
    script = tmp_path/'elsewhere'/'script.py'
    script.parent.mkdir()
    script.write_text(code)
    done = subprocess.run([sys.executable, script], cwd=here, capture_output=True, text=True)
    assert done.returncode==0 and 'run: step 3' in done.stderr and not (here/'ran').exists(), done.stderr


def test_a_child_is_started_as_its_parent_was(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(root)!r}); from torchember.show.live_view import flags; print(flags())"
    said = lambda *how: eval(subprocess.run([sys.executable, *how, '-c', code], capture_output=True, text=True, check=True, cwd=root).stdout)
    got = said('-I', '-W', 'ignore::ResourceWarning', '-X', 'utf8')
    assert got[0]=='-P' and '-I' in got and '-Wignore::ResourceWarning' in got and 'utf8' in got[got.index('-X')+1]
    got = said('-E', '-s')
    assert got[0]=='-P' and {'-E', '-s'}<=set(got) and '-I' not in got
