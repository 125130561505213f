"Commands of the command line `torchember`"
from ..ground.lazy import lazy_attributes

__getattr__,__dir__ = lazy_attributes(__name__, {'commands': 'command main'})
