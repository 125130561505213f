"Tests that import paths of torchember 0.2 still work"
import pickle

import programs

import torchember


def test_core_has_the_objects_of_the_package():
    from torchember import core
    assert core.__all__==['emberTracker', 'moduleTrack', 'torchEmber', 'tracker']
    for name in core.__all__: assert getattr(core, name) is getattr(torchember, name)


def test_pickle_that_names_core():
    assert pickle.loads(b'ctorchember.core\ntorchEmber\n.') is torchember.torchEmber


def test_unknown_module_raises_the_error_of_python():
    got = programs.run('import torchember.cores')
    assert "ModuleNotFoundError: No module named 'torchember.cores'" in got.stderr


def test_import_adds_no_finder():
    got = programs.run('import sys; before = list(sys.meta_path); import torchember; assert sys.meta_path==before, sys.meta_path')
    assert got.returncode==0, got.stderr
