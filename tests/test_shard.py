"""Sharded training beside `data`: the bits with `exact`, checkpoints from and to every plan, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import find_checkpoint
from launching import train_basics

from paceline.comm.places import Places

PLANS = {
    "data": (1, ""),
    "data, 3 workers": (3, ""),
    "shard=2 zero=1": (2, "shard=2 zero=1"),
    "shard=3 zero=1": (3, "shard=3 zero=1"),
    "data=2 shard=2 zero=1": (4, "data=2 shard=2 zero=1"),
}
BODY = (
    "from pathlib import Path\n"
    "def model(): return nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 2))\n"
    "t = paceline.Trainer(\n"
    "    model, cross_entropy, lambda params: torch.optim.AdamW(params, lr=0.01), global_batch=24, clip_norm=0.05,\n"
    "    forward=lambda model, batch: model(batch[0].float()))\n"
    "losses = [r.loss for r in t.steps(data, count=10)]\n"
    "t.export('out.safetensors')\n"
    "if t.main: Path('losses').write_text(repr(losses))\n"
)


def train(folder: Path, plan: str, *options: str) -> None:
    """Ten steps with `exact`, or as many as there are until the run that the options stop."""
    workers, words = PLANS[plan]
    train_basics(folder, BODY, workers, "--plan", f"exact {words}".strip(), *options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder, "data")
    return folder


@pytest.mark.parametrize("plan", [plan for plan in PLANS if "shard" in plan])
def test_exact_has_the_bytes_of_one_worker(plan: str, undisturbed: Path, tmp_path: Path) -> None:
    train(tmp_path, plan)
    for name in ("out.safetensors", "losses"):
        assert (tmp_path / name).read_bytes() == (undisturbed / name).read_bytes()


@pytest.mark.parametrize("then", PLANS)
@pytest.mark.parametrize("first", PLANS)
def test_what_any_plan_saved_any_plan_resumes(first: str, then: str, undisturbed: Path, tmp_path: Path) -> None:
    train(tmp_path, first, "--steps", "5")
    assert find_checkpoint(tmp_path / "out", print).step == 5
    train(tmp_path, then)
    assert (tmp_path / "out.safetensors").read_bytes() == (undisturbed / "out.safetensors").read_bytes()


def test_who_has_which_rows() -> None:
    """As torch.chunk cuts; every row is somebody's."""
    for length in range(1, 20):
        for count in range(1, 8):
            cuts = [Places(count).rows(length, place) for place in range(count)]
            chunks = [part.tolist() for part in torch.arange(length).chunk(count)]
            assert [list(rows) for rows in cuts if rows] == chunks
            assert [row for rows in cuts for row in rows] == list(range(length))
