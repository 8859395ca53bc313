"""`paceline.hf`: trains what a Hugging Face `transformers.Trainer` describes, on any number of workers."""

from paceline.integrations.huggingface.training import train as train
from paceline.integrations.huggingface.training import trainer as trainer

__all__ = ["train", "trainer"]
