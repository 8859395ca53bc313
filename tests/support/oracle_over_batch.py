"""The oracle of losses over the whole global batch: one process, one graph."""

from __future__ import annotations

from typing import Any

import torch
from cases import Case
from oracle import Result
from torch import nn
from torch.utils._pytree import tree_map

from paceline import sample_index, stream_seed


def train_over_batch(case: Case, seed: int = 7) -> Result:
    """Outputs of all micro-batches, drawn from their streams, the loss on all rows, and its backward."""
    assert case.micro is not None
    torch.manual_seed(stream_seed(seed, 0, -1))
    model, columns = case.model(), case.data().tensors
    optimizer = case.optimizer(model.named_parameters())
    figures: dict[str, list[Any]] = {"loss": [], "norm": [], "samples": [], "metrics": []}
    count = len(columns[0])
    for step in range(case.steps):
        epoch, batch = divmod(step, -(-count // case.global_batch))
        first, stop = batch * case.global_batch, min((batch + 1) * case.global_batch, count)
        rows = [sample_index(position, count, seed, epoch) for position in range(first, stop)]
        outputs = []
        for number, start in enumerate(range(0, len(rows), case.micro)):
            torch.manual_seed(stream_seed(seed, step, number))
            outputs.append(case.forward(model, [column[rows[start : start + case.micro]] for column in columns]))
        found = case.loss(model, tree_map(lambda *parts: torch.cat(parts), *outputs))
        total, weight, metrics = found if isinstance(found, tuple) else (found, 1, {})
        optimizer.zero_grad()
        (total / weight).backward()
        figures["loss"].append(total.item() / weight)
        figures["norm"].append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)))
        figures["samples"].append(len(rows))
        figures["metrics"].append({key: float(a) / float(b) for key, (a, b) in metrics.items()})
        optimizer.step()
    return Result(dict(model.state_dict()), figures)
