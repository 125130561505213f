"A run as one HTML file, and its data"
from typing import TYPE_CHECKING

from ...ground.lazy import lazy_attributes

if TYPE_CHECKING:
    from .document import report as report

__getattr__,__dir__ = lazy_attributes(__name__, {'document': 'report'})
