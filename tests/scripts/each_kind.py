"""A metric with a state of each kind, as torchmetrics has them, without torchmetrics."""

from __future__ import annotations

from typing import Any

import torch


class EachKind:
    """Its states merge by every reduction there is."""

    _defaults: dict[str, Any] = {  # noqa: RUF012
        "mean": torch.zeros((), dtype=torch.float64),
        "most": torch.tensor(-1e9),
        "least": torch.tensor(1e9),
        "rows": torch.tensor(100),
        "total": torch.tensor(5.0),
        "wide": torch.zeros(2000),
        "parts": torch.zeros(0),
        "middle": torch.zeros(1),
        "each": torch.zeros(1),
        "texts": [],
    }
    _reductions: dict[str, Any] = {  # noqa: RUF012
        "mean": "mean",
        "most": "max",
        "least": "min",
        "rows": "sum",
        "total": "sum",
        "wide": "sum",
        "parts": "cat",
        "each": None,
        "middle": lambda stacked: stacked.median(0).values,
        "texts": None,
    }

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        for name, start in self._defaults.items():
            setattr(self, name, start.clone() if isinstance(start, torch.Tensor) else [])

    def update(self, output: torch.Tensor, batch: Any) -> None:
        value = batch[0][:, 0]
        self.mean, self.most, self.least = value.mean(), value.max(), value.min()
        self.rows += len(value)
        self.total = self.total + value.sum()
        self.wide += value.sum().float()
        self.parts, self.middle, self.each = value, value.max().reshape(1), value.sum().reshape(1)
        self.texts.append([str(len(value)), value[:1]])

    def compute(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self._defaults if name != "texts"}
        return {**found, "texts": float("".join(text for text, _ in self.texts))}


def compare(results: dict[str, Any], value: torch.Tensor, micro: int) -> None:
    """The results over rows whose first column is `value`, in micro-batches of so many rows; `value` is not empty."""
    parts = value.split(micro)
    assert results.pop("n") == len(value)
    assert abs(results["mean"] - float(value.mean())) < 1e-12
    assert (results["most"], results["least"]) == (float(value.max()), float(value.min()))
    assert results["rows"] == 100 + len(value)
    assert abs(results["total"] - 5 - float(value.sum())) < 1e-12
    assert torch.allclose(results["wide"], value.sum().float().expand(2000))
    assert torch.equal(results["parts"], value)
    assert results["middle"] == float(torch.stack([part.max() for part in parts]).median())
    assert torch.allclose(results["each"], torch.stack([part.sum().reshape(1) for part in parts]))
    assert results["texts"] == float("".join(str(len(part)) for part in parts))
