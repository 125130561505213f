"Each case of the table of armed models in the reference"
import pytest
from armed import cases


@pytest.mark.parametrize('what', cases)
def test_case(what): cases[what][1]()
