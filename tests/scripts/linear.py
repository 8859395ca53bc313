"""A loss that is linear in the weights, so that they end where the sum of all gradients brings them, whatever was sent
when. Usage: linear.py OUT STEPS, with the plan in PLAN and WIDE rows of weights instead of 20. Goes slowly after a
third of the steps until WAIT has come, and more slowly until ALL workers have.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

out, steps = sys.argv[1], int(sys.argv[2])
wide = int(os.environ.get("WIDE", "20"))
chance = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(200, 30, generator=chance), torch.randn(200, wide, generator=chance))


def pause(step):
    if "WAIT" not in os.environ:
        return 0.0
    path = os.path.join(os.environ["PACELINE_RUN_DIR"], os.environ["WAIT"].split()[0])
    if os.path.exists(path):
        return 0.0
    if step <= steps // 3:
        return 0.05
    return 1.0 if paceline.join().size >= int(os.environ.get("ALL", "1")) else 4.0


trainer = paceline.Trainer(
    lambda: nn.Linear(30, wide),
    loss=lambda output, batch: (output * batch[1]).sum(1).mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    global_batch=20,
    plan=os.environ.get("PLAN", ""),
)
for report in trainer.steps(data, count=steps):
    time.sleep(pause(report.step))
trainer.export(f"{out}.safetensors")
