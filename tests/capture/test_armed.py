"The documentation has a table about armed models. Each of its cases is tested."
import pytest
from armed import cases


@pytest.mark.parametrize('what', cases)
def test_case(what): cases[what][1]()
