"A run as one HTML file, and its data"
from typing import TYPE_CHECKING

from ...ground.wings import open_wing

if TYPE_CHECKING:
    from .document import report as report

__getattr__,__dir__ = open_wing(__name__, {'document': 'report'})
