"The command line"
from typing import TYPE_CHECKING

from ..ground.wings import open_wing

if TYPE_CHECKING:
    from .commands import command as command
    from .commands import main as main

__getattr__,__dir__ = open_wing(__name__, {'commands': 'command main'})
