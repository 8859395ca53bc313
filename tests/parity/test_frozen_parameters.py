"""Parameters that are frozen after the Trainer was made, and trained again, do as in plain PyTorch under each plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from freezing import in_plain_torch
from launching import SCRIPTS, paceline
from safetensors.torch import load_file

CELLS = [(2, "tensor=2"), (2, "context=2"), (2, "pipeline=2"), (2, ""), (3, "shard=3 zero=1"), (2, "shard=2 zero=2")]
CELLS += [(3, "shard=3"), (2, "server=1"), (4, "pipeline=2 tensor=2"), (2, "shard=2 offload=cpu"), (1, "")]


@pytest.mark.parametrize(
    ("workers", "plan"),
    [pytest.param(*cell, marks=[pytest.mark.slow] if at > 1 else []) for at, cell in enumerate(CELLS)],
)
def test_weights_are_those_of_plain_pytorch(workers: int, plan: str, tmp_path: Path) -> None:
    words = ["--plan", plan] if plan else []
    paceline("run", "--workers", str(workers), *words, SCRIPTS / "freezing.py", cwd=tmp_path)
    found, expected = load_file(tmp_path / "out.safetensors"), in_plain_torch()
    gap = torch.cat([(found[name] - tensor).reshape(-1) for name, tensor in expected.items()]).norm()
    assert gap <= 1e-12 * torch.cat([tensor.reshape(-1) for tensor in expected.values()]).norm()
