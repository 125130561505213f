"Without compiled plans of calls, Python code records all calls. The tests about passes and steps must pass in this mode, too."
import os
import subprocess
import sys
from pathlib import Path

import pytest

tests = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize('file', ['recorder/test_rules_of_steps.py', pytest.param('capture/test_passes.py', marks=pytest.mark.release)])
def test_files_pass_without_plans(file):
    done = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-n0', '-p', 'no:cacheprovider', '-m', 'not slow and not release', str(tests/file)],
        env=os.environ|{'TORCHEMBER_PLAN': '0'}, cwd=tests.parent, capture_output=True, text=True)
    assert done.returncode==0, done.stdout+done.stderr
