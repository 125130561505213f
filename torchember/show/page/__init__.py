"A run as one HTML file, and its data"
from ...ground.lazy import lazy_attributes

__getattr__,__dir__ = lazy_attributes(__name__, {'document': 'report'})
