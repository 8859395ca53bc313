"""Counts of a model's parameters and buffers, and the line about them."""

from __future__ import annotations

import torch
from torch import nn

from paceline.compute.model_size import count_elements
from paceline.observe.model_text import block_table, model_line


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers.append(nn.Linear(8, 8, bias=False))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.table.weight
        self.layers[0].bias.requires_grad_(False)


def test_each_tensor_counts_once() -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Tied()
        size = count_elements(model)
        assert size["parameters"] == sum(one.numel() for one in model.parameters()) == 800 + 4 * 64 + 3 * 8 + 16
        assert size["trained"] == size["parameters"] - 8
        assert size["buffers"] == 8 + 8 + 1
    assert model_line(size) == "Tied, 1,096 parameters, 1,088 of them trained, 17 values in buffers"
    assert block_table(size).splitlines() == [
        "  table          Embedding, 800 parameters",
        "  layers.0       Linear, 72 parameters, 64 trained",
        "  layers.1 to 2  2 x Linear, 72 parameters each",
        "  layers.3       Linear, 64 parameters",
        "  norm           BatchNorm1d, 16 parameters",
        "  head           Linear, 800 parameters",
    ]


def test_what_a_worker_holds_and_large_counts() -> None:
    about = {"model": "GPT", "parameters": 124_439_808, "trained": 124_439_808, "buffers": 0}
    assert model_line({**about, "held": [497_759_232, 497_759_232, 0]}) == (
        "GPT, 124.4M parameters, all trained; each worker holds 498 MB of parameters, 498 MB of gradients"
    )
    assert (
        model_line({**about, "trained": 0, "parameters": 7_241_732_096}) == "GPT, 7.242B parameters, 0 of them trained"
    )
    assert model_line({}) == ""
