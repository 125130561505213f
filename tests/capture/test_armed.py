"Every case of the table in the docs"
import pytest
from armed import cases


@pytest.mark.parametrize('what', cases)
def test_case(what): cases[what][1]()
