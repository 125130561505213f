"Commands of the command line `torchember`"
from typing import TYPE_CHECKING

from ..ground.lazy import lazy_attributes

if TYPE_CHECKING:
    from .commands import command as command, main as main

__getattr__,__dir__ = lazy_attributes(__name__, {'commands': 'command main'})
