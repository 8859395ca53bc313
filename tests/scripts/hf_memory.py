"""Trains a model of a folder for one step; each worker writes the most memory that it took until the first step began.

hf_memory.py FOLDER
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import paceline


def used() -> int:
    """Bytes of this process without pages of files, which the system takes back when it needs them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Watch(TrainerCallback):
    """Measures memory from now until training begins."""

    def __init__(self) -> None:
        self.base, self.peak, self.done = used(), 0, False
        threading.Thread(target=self.measure, daemon=True).start()

    def measure(self) -> None:
        while not self.done:
            self.peak = max(self.peak, used() - self.base)
            time.sleep(0.002)

    def on_train_begin(self, args, state, control, **more):
        self.done = True
        Path(f"peak-{paceline.join().rank}").write_text(str(max(self.peak, used() - self.base)))


words = torch.arange(16)
rows = [{"input_ids": words + number, "labels": words + number} for number in range(8)]
options = {"max_steps": 1, "per_device_train_batch_size": 2, "optim": "sgd", "save_strategy": "no"}
arguments = TrainingArguments("out", use_cpu=True, report_to="none", **options)
Trainer(torch.nn.Linear(1, 1), arguments)  # imports the rest
watch = Watch()
model = LlamaForCausalLM.from_pretrained(sys.argv[1])
paceline.hf.train(Trainer(model, arguments, train_dataset=rows, callbacks=[watch]))
