"""A language model whose weights have averages of several kinds in `trainer.state`: `resumed.py STEPS [experts]`. After
each step the numbers that a script reads of weights and averages go to a file of their own, where the plan lets it
read them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import expert_models
import staging
import torch
from averages import Average
from cases import groups, next_token
from mixture_models import words
from safetensors.torch import save_file

import paceline

steps = int(sys.argv[1])
has_experts = "experts" in sys.argv
trainer = paceline.Trainer(
    lambda: (expert_models.Model(4) if has_experts else staging.Skips()).double(),
    expert_models.loss if has_experts else next_token,
    groups,
    global_batch=8,
    clip_norm=0.05,
    plan="micro=3",
)
net, state = trainer.model, trainer.state
state["named"] = {name: param.detach().clone() for name, param in net.named_parameters()}
state["listed"] = [param.detach().clone() for param in net.parameters()]
state["object"] = Average(net)


def write_numbers(name: str) -> None:
    if trainer.plan.pipeline:  # where a script may not read weights of another stage
        return
    tensors = [x.detach() for x in (*net.parameters(), *state["named"].values(), *state["listed"])][::3]
    found = [float(sum(x.square().sum() for x in tensors)), float(tensors[0][-1, 0]), sum(x.numel() for x in tensors)]
    found += [x.abs().sum().item() for x in tensors] + [float(x.norm()) for x in tensors]
    found += [float(x.mean()) for x in tensors] + [float(x.max()) for x in tensors if len(x) > 8]
    found += [int((x > 0.1).sum()) for x in tensors] + [bool((x > 0.3).any()) for x in tensors]
    if trainer.main:
        Path(f"numbers {name}.json").write_text(json.dumps(found))


write_numbers(f"before step {trainer.steps_done + 1}")
for report in trainer.steps(words(16) if has_experts else staging.ids, count=steps):
    for (name, param), listed in zip(net.named_parameters(), state["listed"], strict=True):
        state["named"][name].mul_(0.9).add_(param.detach(), alpha=0.1)
        listed.lerp_(param.detach(), 0.2)
    state["object"].update(net)
    write_numbers(f"after step {report.step}")
trainer.export("out.safetensors")
if paceline.join().size == 1:
    found = {f"named.{name}": tensor for name, tensor in state["named"].items()}
    found |= {f"listed.{number}": tensor for number, tensor in enumerate(state["listed"])}
    found |= {f"object.{name}": tensor for name, tensor in state["object"].shadow.items()}
    assert state["object"].updates == steps
    assert all(type(tensor) is torch.Tensor for tensor in found.values())
    save_file(found, "averages.safetensors")
