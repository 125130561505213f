"""What of a run goes to trackers that people already use"""
from typing import TYPE_CHECKING

from ..ground.wings import open_wing

if TYPE_CHECKING:
    from .feed import replay as replay
    from .sink import Sink as Sink
    from .tensorboard import TensorBoard as TensorBoard
    from .wandb import Wandb as Wandb

__getattr__,__dir__ = open_wing(__name__, {'feed': 'replay', 'sink': 'Sink', 'tensorboard': 'TensorBoard', 'wandb': 'Wandb'})
