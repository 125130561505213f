"A run as one file, and what it is made of"
from typing import TYPE_CHECKING

from ...ground.lazy import lazy_attributes

if TYPE_CHECKING:
    from .document import report as report

__getattr__,__dir__ = lazy_attributes(__name__, {'document': 'report'})
