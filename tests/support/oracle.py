"""The oracle of the contract suite: the same trainings in one process, written by hand in plain PyTorch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cases import Case, right
from launching import SCRIPTS, paceline
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import default_collate

from paceline import sample_index, stream_seed


@dataclass
class Result:
    weights: dict[str, torch.Tensor]
    figures: dict[str, list[Any]] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)


def train(case: Case, seed: int = 7) -> Result:
    """A hand-written loop: accumulation over micro-batches, one division by the count, clipping, update."""
    random.seed(stream_seed(seed, 0, -1))
    torch.manual_seed(stream_seed(seed, 0, -1))
    model = case.model()
    data = case.data()
    optimizers = case.optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    base = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    micro = case.micro or -(-case.global_batch // 8)
    figures: dict[str, list[Any]] = {"loss": [], "norm": [], "samples": [], "metrics": []}
    epoch = position = 0
    for step in range(case.steps):
        if position >= len(data):
            epoch, position = epoch + 1, 0
        stop = min(position + case.global_batch, len(data))
        indices = [sample_index(place, len(data), seed, epoch) for place in range(position, stop)]
        position = stop
        model.zero_grad(set_to_none=True)
        total, weight, metrics = 0.0, 0.0, {}
        for number, start in enumerate(range(0, len(indices), micro)):
            batch = default_collate([data[index] for index in indices[start : start + micro]])
            torch.manual_seed(stream_seed(seed, step, number))
            found = case.loss(case.forward(model, batch), batch)
            part, count = (
                (found[0], float(found[1])) if isinstance(found, tuple) else (found * len(batch[0]), len(batch[0]))
            )
            for name, (a, b) in (found[2] if isinstance(found, tuple) else {}).items():
                before = metrics.get(name, (0.0, 0.0))
                metrics[name] = (before[0] + float(a), before[1] + float(b))
            part.backward()
            total, weight = total + part.item(), weight + count
        params = [p for p in model.parameters() if p.grad is not None]
        for param in params:
            param.grad /= weight
        figures["norm"].append(float(nn.utils.get_total_norm([p.grad for p in params])))
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(params, case.clip_norm)
        factor = case.schedule(step) if case.schedule else 1.0
        for group, rate in zip([g for o in optimizers for g in o.param_groups], base, strict=True):
            group["lr"] = rate * factor
        for optimizer in optimizers:
            optimizer.step()
        figures["loss"].append(total / weight)
        figures["samples"].append(len(indices))
        figures["metrics"].append({name: a / b for name, (a, b) in metrics.items()})
    return Result(dict(model.state_dict()), figures, _evaluate(case, model, data, micro))


def _evaluate(case: Case, model: nn.Module, data: Any, micro: int) -> dict[str, float]:
    model.eval()
    sums: dict[str, list[float]] = {}
    with torch.no_grad():
        for start in range(0, len(data), micro):
            batch = default_collate([data[i] for i in range(start, min(start + micro, len(data)))])
            for name, (a, b) in right(case.forward(model, batch), batch).items():
                pair = sums.setdefault(name, [0.0, 0.0])
                pair[0], pair[1] = pair[0] + float(a), pair[1] + float(b)
    return {name: a / b for name, (a, b) in sums.items()} | {"n": len(data)}


def apart(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over all tensors together, relative to the norm of theirs."""
    assert mine.keys() == theirs.keys()
    difference = sum(float((mine[n].double() - theirs[n].double()).square().sum()) for n in mine)
    return (difference / sum(float(theirs[n].double().square().sum()) for n in theirs)) ** 0.5


def as_one_worker(folder: Path) -> None:
    """What train.py of the folder exports to out.safetensors is what one worker gives, whom this starts."""
    found = load_file(folder / "out.safetensors")
    paceline("run", "--run-dir", "alone", "train.py", cwd=folder, PYTHONPATH=str(SCRIPTS))
    assert apart(found, load_file(folder / "out.safetensors")) < 1e-12
