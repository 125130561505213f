"Importing torchember has no side effects, and logs can be read without torch."
import json
import os
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import torch

from torchember import emberTracker, torchEmber

root = Path(__file__).parents[2]


def run(code, *flags, **env):
    got = subprocess.run([sys.executable, *flags, '-c', code], capture_output=True, text=True, env={**os.environ, **env})
    assert got.returncode==0, got.stderr
    return got.stdout


def test_import_does_nothing(tmp_path):
    heavy = 'torch numpy pandas matplotlib jax IPython fastcore'.split()
    out = run(f"import sys, torchember; dir(torchember); print([m for m in {heavy} if m in sys.modules])", HOME=str(tmp_path), TORCHEMBER_HOME='')
    assert out.split('\n')[0]=='[]'
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_arming_makes_no_folder(tmp_path):
    code = "import torch, torchember; te = torchember.torchEmber(torch.nn.Linear(1, 1)); te.t, te.fname, repr(te); te.disarm()"
    run(code, HOME=str(tmp_path), TORCHEMBER_HOME='')
    assert not (tmp_path/'.torchember').exists()


def test_dir_lists_the_main_names(tmp_path):
    out = run("import torchember, torchember.ground.choose; torchember.every; names = {n for n in dir(torchember) if n[:2]!='__'}\n"
        "print(names=={*torchember.__all__, *torchember.packages}-{'__version__'}, len(torchember.__all__)<=41)", HOME=str(tmp_path), TORCHEMBER_HOME='')
    assert out=='True True\n' # dir() lists neither helper names nor modules that are already loaded


def test_each_package_has_its_names():
    import torchember
    for package in ('state', 'monitor', 'compat', *(['jaxember'] if 'jax' in sys.modules else [])):
        for name in dir(getattr(torchember, package)):
            found = getattr(getattr(torchember, package), name)
            assert found is not None and (package=='jaxember' or name not in torchember.module_of or found is getattr(torchember, name)), (package, name)
        hints = (root/'torchember'/package/'__init__.pyi').read_text()
        for name in dir(getattr(torchember, package)): assert re.search(rf'[ (]{name} as {name}\b', hints)


def test_every_public_name_can_be_imported():
    import torchember
    assert {'torchEmber', 'emberTracker', 'tracker', 'moduleTrack', 'get_stats', 'select', 'every'} <= set(torchember.module_of)
    for name in torchember.module_of: assert getattr(torchember, name) is not None
    hints = (root/'torchember'/'__init__.pyi').read_text()
    # the stub file, which editors read
    for name in torchember.module_of: assert re.search(rf'[ (]{name} as {name}\b', hints)


def bare_site(tmp_path):
    "Return a folder with torchember, pandas and its dependencies, and no other packages."
    import dateutil
    import numpy
    import pandas
    import six
    site = tmp_path/'site'
    site.mkdir()
    modules = [numpy, pandas, dateutil, *([pytest.importorskip('pytz')] if pandas.__version__<'3' else [])]
    for m in modules:
        folder = Path(m.__file__).parent
        (site/folder.name).symlink_to(folder)
        libs = folder.with_name(f'{folder.name}.libs')
        if libs.exists(): (site/libs.name).symlink_to(libs)
    (site/'six.py').symlink_to(six.__file__)
    (site/'torchember').symlink_to(root/'torchember')
    return site


def test_reading_without_torch(tmp_path):
    with torchEmber(torch.nn.Linear(2, 1), name='seen', home=tmp_path) as te: te.model(torch.tensor([[1., float('inf')]]))
    code = f"""if True:
        import sys; sys.path.insert(0, {str(bare_site(tmp_path))!r})
        import torchember
        df = torchember.emberTracker('seen', home={str(tmp_path)!r}).df
        print(len(df), df['max'].max(), list(df.columns)[:3], 'torch' in sys.modules)
        read = torchember.read('*', home={str(tmp_path)!r})
        print(len(read), len(torchember.wide(read, 'max', 'input')), len(torchember.runs({str(tmp_path)!r})), 'torch' in sys.modules)
        import pandas as pd
        units = pd.DataFrame(dict(path='a', ttype='output', tname='x', step=[1, 2], UnitActivity=[[0., 1.], [0., 0.]]))
        print(torchember.dead_units(units)['since'].tolist(), 'torch' in sys.modules)
        from torchember.measure.summary import Summary
        print((Summary.of([1, 2]) + Summary.of([3])).mean)
        try: torchember.torchEmber
        except ModuleNotFoundError as e: print(e)
    """
    out = run(code, '-I', '-S').splitlines()
    assert out[0]=="4 inf ['shape', 'mean', 'std'] False" and out[1]=='4 1 1 False'
    assert out[2]=='[1, 2] False' and out[3]=='2.0' and 'pip install torch' in out[4]


def strict(line):
    def bad(word): raise ValueError(word)
    return json.loads(line, parse_constant=bad)


def test_other_readers_get_numbers(tmp_path):
    "If the log contains NaN and infinity, other libraries still read columns of numbers."
    import duckdb
    import pandas as pd
    import polars as pl
    import pyarrow.json
    with torchEmber(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), home=tmp_path, name='bad') as te:
        for v in (1., float('nan'), float('inf')): te.model(torch.tensor([[1., v]]))
        te.how_record_out(lambda t: {'mean': t.mean(), 'own': [1., float('nan')]})
        te.model(torch.full((1, 2), float('nan')))
    path = te.t.log_path
    rows = [strict(line) for line in path.read_text().splitlines()]
    assert any(r['mean'] is None and r['nan']==1 for r in rows)
    assert any(r.get('nonfinite')=={'mean': 'NaN', 'own/1': 'NaN'} for r in rows)
    assert 'DOUBLE' in [t for n,t,*_ in duckdb.sql(f"describe select * from read_json('{path}')").fetchall() if n=='mean']
    assert pl.read_ndjson(path)['mean'].dtype==pl.Float64
    assert str(pyarrow.json.read_json(path).schema.field('mean').type)=='double'
    assert pd.read_json(path, lines=True)['mean'].dtype==float
    df = te.t.df
    assert df['mean'].dtype==float and df.nan.dtype=='int64' and df.step.dtype=='int64'
    # NaN was read back, because NaN is not equal to itself
    assert emberTracker('bad', home=tmp_path).lines()[-1]['mean']!=emberTracker('bad', home=tmp_path).lines()[-1]['mean']


def test_modules_for_jax_work_without_torch(tmp_path):
    "Without torch, all modules for reading, drawing and trackers can be imported and used, up to a LogFrame and a picture."
    code = f"""if True:
        import pkgutil, sys
        from importlib import import_module
        sys.modules['torch'] = None # as if it were not installed
        for wing in ('ground', 'store', 'frames', 'show', 'compat'):
            wing = import_module('torchember.'+wing)
            for room in pkgutil.walk_packages(wing.__path__, wing.__name__+'.'):
                if room.name not in ('torchember.compat.tandv', 'torchember.compat.nnstat'): import_module(room.name) # these are torch's
        import numpy as np, torchember
        from torchember.compat.tracker import Stash, Tracker, check_arguments, builtin_statistics, scalars
        from torchember.measure.columns import as_dicts, stat_names
        from torchember.measure.summary import Summary
        from torchember.recorder.row import one_row, warn_of_first_nonfinite
        names = stat_names(('shape', *scalars))
        check_arguments('.parquet', 1, None, None, None, {str(tmp_path)!r})
        run = torchember.emberTracker('seen', {str(tmp_path)!r})
        tracker = Tracker(run)
        warn_of_first_nonfinite(run.file)
        for tracker.current_step in range(3):
            [stats] = as_dicts(Summary.of([1, tracker.current_step]).vector[None], names, [(2,)])
            row = one_row(('m(Net).a(Dense)', 'output', 'output_0', None, None, 0), 0, None, 'float32', stats, tracker.current_step, 'now', {{}}, {{}})
            run.put(lambda row=row: [row], True)
            tracker.note_step_end(tracker.current_step)
        run.close()
        tracker.finish(False)
        lf = torchember.read_pickle(tracker.out_path)
        print(lf['scalar_stats', 'mean'].tolist())
        torchember.scalar_line(run.df, scalar_metric='mean').figure.savefig(tracker.folder()/'mean.png')
        torchember.overview(run)
        Stash(lambda x: {{'full_tensor': x}}, tracker.folder)(np.ones(3))
        print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'jax') and sys.modules[m]])
    """
    out = run(code, MPLBACKEND='agg').splitlines()
    assert out[1:]==['[0.5, 1.0, 1.5]', '[]'] and out[0].startswith('LogFrame of this run')
    assert {p.name for p in (tmp_path/'track'/'seen').rglob('*.*')}=={'final_logframe.pkl', 'mean.png', '0.npy'}


def test_torch_and_jax_are_extras():
    "torch and jax are not required packages, so an installed PyTorch is kept. constraints.txt pins both."
    ini = ConfigParser()
    ini.read(root/'settings.ini', encoding='utf-8')
    asked = {k.removesuffix('_requirements'): re.findall(r'(?:^|\s)([\w-]+)', v) for k,v in ini['DEFAULT'].items() if k.endswith('requirements')}
    assert not {'torch', 'jax'} & set(asked['requirements']) and asked['torch']==['torch'] and 'jax' in asked['jax']
    assert {*asked['torch'], *asked['jax']} <= set(asked['dev'])
    pins = re.findall(r'^([\w-]+)==', (root/'constraints.txt').read_text(), re.M)
    assert pins[0]=='torch' and set(asked['jax']) <= set(pins)


def test_jaxember_needs_no_torch():
    pytest.importorskip('jax')
    code = """if True:
        import pkgutil, sys
        from importlib import import_module
        sys.modules['torch'] = None
        wing = import_module('torchember.jaxember')
        for room in pkgutil.walk_packages(wing.__path__, wing.__name__+'.'): import_module(room.name)
        import numpy as np
        from torchember.jaxember.capture.trees import named_parameters
        print([(n.path, n.tname) for n in named_parameters({'params': {'fc': {'kernel': np.ones(2)}}})], 'flax' in sys.modules)
    """
    assert run(code).strip()=="[('fc', 'weight_0')] False"
