"""Averages of weights in `trainer.state` are kept in pieces where parameters are, and whole where they are whole.

Fast tests hold this in test_resume_under_another_plan.py, and through a kill in test_script_view_of_weights.py.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from averages import STEPS
from freezing import batches
from launching import SCRIPTS, paceline
from optimizers import data, loss, model
from safetensors.torch import load_file
from torch.optim import AdamW

from paceline import stream_seed


@cache
def in_plain_torch() -> dict[str, torch.Tensor]:
    torch.manual_seed(stream_seed(0, 0, -1))
    net = model()
    optimizer = AdamW(net.parameters(), lr=0.01)
    found = {name: param.detach().clone() for name, param in net.named_parameters()}
    for _, rows in zip(range(STEPS), batches(STEPS), strict=False):
        optimizer.zero_grad()
        loss(net(data.tensors[0][rows]), (None, data.tensors[1][rows])).backward()
        optimizer.step()
        for name, param in net.named_parameters():
            found[name].lerp_(param.detach(), 0.1)
    return found


def train(folder: Path, workers: int, plan: str, *options: str, **env: str) -> str:
    words = [*(["--plan", plan] if plan else []), *options, SCRIPTS / "averages.py"]
    return paceline("run", "--workers", str(workers), "--run-dir", "out", *words, cwd=folder, **env).stderr


def right(folder: Path) -> None:
    found, expected = load_file(folder / "averages.safetensors"), in_plain_torch()
    assert len(found) == 4 * len(expected)
    for name, tensor in found.items():
        gap = (tensor - expected[name.partition(".")[2]]).norm()
        assert gap <= 1e-12 * expected[name.partition(".")[2]].norm(), name


CELLS = [((2, "shard=2"), (1, "")), ((1, ""), (2, "shard=2")), ((2, "shard=2 zero=2"), (3, "shard=3"))]
CELLS += [((3, "shard=3"), (3, "data=3")), ((2, "tensor=2"), (2, "shard=2"))]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), CELLS)
def test_averages_of_one_plan_are_resumed_under_another(
    first: tuple[int, str], then: tuple[int, str], tmp_path: Path
) -> None:
    train(tmp_path, *first, "--steps", "5")
    (tmp_path / "averages.safetensors").unlink(missing_ok=True)
    train(tmp_path, *then)
    right(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_averages_survive_the_kill_of_a_worker(zero: int, tmp_path: Path) -> None:
    said = train(tmp_path, 4, f"data=2 shard=2 zero={zero}", KILL="3")
    assert (tmp_path / "killed").exists()
    assert "worker 3 was killed" in said or "SIGKILL" in said, said
    right(tmp_path)
