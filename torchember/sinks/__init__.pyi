from .feed import replay as replay
from .mlflow import MLflow as MLflow
from .sink import Sink as Sink
from .tensorboard import TensorBoard as TensorBoard
from .trackio import Trackio as Trackio
from .wandb import Wandb as Wandb
