"""`paceline.keras`: trains a compiled Keras 3 model (torch backend) on any number of workers."""

from paceline.integrations.keras.training import KerasTrainer as KerasTrainer
from paceline.integrations.keras.training import trainer as trainer

__all__ = ["KerasTrainer", "trainer"]
