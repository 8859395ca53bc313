"""Counts the parameters and buffers of a model, also by block."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from torch import nn

from paceline.compute.blocks import blocks_of


def count_elements(model: nn.Module) -> dict[str, Any]:
    """Returns the fields of the journal's ``model`` event about a model that is not divided yet.

    `parameters` and `trained` are elements of parameters, `buffers` of buffers, each tensor counted once. `blocks` has
    (name, class, how many, elements of one, trained ones of one) of each block and each other child with parameters;
    equal ones that follow one another are in one entry.
    """
    blocks = blocks_of(model, sharing=True)
    rest = {
        name: child
        for name, child in model.named_children()
        if not any(block == name or block.startswith(f"{name}.") for block in blocks)
    }
    order = {name: number for number, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    parts = sorted({**rest, **blocks}.items(), key=lambda item: order[item[0]])
    rows = [(name, type(module).__name__, *_elements(module)) for name, module in parts]
    rows = [row for row in rows if row[2]]
    grouped = [[*group] for _, group in groupby(rows, lambda row: (row[0].rpartition(".")[0], *row[1:]))]
    return {
        "model": type(model).__name__,
        **dict(zip(("parameters", "trained"), _elements(model), strict=True)),
        "buffers": sum(buffer.numel() for buffer in model.buffers()),
        "blocks": [
            [group[0][0] + (f" to {group[-1][0].rpartition('.')[2]}" if len(group) > 1 else ""), group[0][1]]
            + [len(group), *group[0][2:]]
            for group in grouped
        ],
    }


def _elements(module: nn.Module) -> tuple[int, int]:
    parameters = list(module.parameters())
    return sum(one.numel() for one in parameters), sum(one.numel() for one in parameters if one.requires_grad)
