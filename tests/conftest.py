"Each test has a home of its own, draws the same random numbers whatever ran before it, and leaves the process as it was"
import shutil
from functools import cache
from pathlib import Path

import process
import pytest
import releases

pytest_plugins = 'pytester' # for tests of tests


def pytest_unconfigure(): process.over()


@pytest.hookimpl(tryfirst=True) # before marks are asked for
def pytest_collection_modifyitems(items):
    "Mark what `releases` has for a release"
    releases.mark(items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def as_it_was(request):
    "What a test has left is named. The first fixture to begin and the last to end; a test that failed could not clean up"
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
    "A browser that reaches nothing, for all tests of a file; `chromium('EXCLUDE 127.0.0.1')` reaches this machine. Each page is of a context of its own"
    path = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
    if path is None: pytest.skip('there is no chromium here')
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        @cache
        def start(*rules):
            return p.chromium.launch(executable_path=path, args=['--no-sandbox', f"--host-resolver-rules={', '.join(['MAP * ~NOTFOUND', *rules])}"])
        yield start
