"""Trains elastically with Horovod's API; worker 1 is killed once, at step 20."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import paceline.horovod.torch as hvd

STEPS, KILLED_AT = 400, 20
hvd.init()
torch.manual_seed(0)
x, y = torch.randn(24, 4, dtype=torch.float64), torch.randint(2, (24,))
model = torch.nn.Linear(4, 2).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.step < STEPS and not (state.grown and state.step % 10 == 0):
        if state.step == KILLED_AT and os.environ["PACELINE_RANK"] == "1" and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        rows = slice(hvd.rank(), None, hvd.size())
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        time.sleep(0.05)
        state.sizes.append(hvd.size())
        state.grown = 2 in state.sizes and hvd.size() == 3
        state.step += 1
        state.commit()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, sizes=[], grown=False)
train(state)
weights = hvd.allgather(model.weight.detach()[None])
assert bool((weights == weights[0]).all())
if hvd.rank() == 0:
    Path("elastic.json").write_text(json.dumps({"step": state.step, "sizes": state.sizes}))
