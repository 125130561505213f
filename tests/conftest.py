"Fixtures for all tests: an empty folder of runs, fixed random seeds, and a check that each test leaves the process unchanged."
import shutil
from functools import cache
from pathlib import Path

import process
import pytest
import releases

pytest_plugins = 'pytester' # runs pytest inside a test


def pytest_unconfigure(): process.over()


@pytest.hookimpl(tryfirst=True) # before pytest selects tests by their marks
def pytest_collection_modifyitems(items):
    "Mark the slow test cases listed in `releases.py`, which run only before a release."
    releases.mark(items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def as_it_was(request):
    """Fail if the test has changed the process. Skip this check if the test has failed.

    This fixture is set up before and torn down after all other fixtures."""
    before,failed = process.Before(),request.session.testsfailed
    yield
    process.close_figures()
    if request.session.testsfailed==failed: process.blame(request.node.name, before.left())


@pytest.fixture(autouse=True)
def fresh(as_it_was, monkeypatch): process.fresh(monkeypatch)


@pytest.fixture(scope='module', autouse=True)
def without_graphs(): process.forget_graphs()


@pytest.fixture(scope='module')
def chromium():
    "Return a browser without network access, shared by the tests of a file. `chromium('EXCLUDE 127.0.0.1')` may connect to this machine."
    path = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
    if path is None: pytest.skip('chromium is not installed')
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        @cache
        def start(*rules):
            return p.chromium.launch(executable_path=path, args=['--no-sandbox', f"--host-resolver-rules={', '.join(['MAP * ~NOTFOUND', *rules])}"])
        yield start
