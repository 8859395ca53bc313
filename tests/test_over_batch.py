"""A loss over the whole global batch is that of plain PyTorch on the whole batch: any team, any plan, any accumulation,
through losses of workers.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import over_batch
import pytest
import torch
from launching import SCRIPTS, paceline
from once import once
from oracle import apart
from over_batch import BATCH, CASES, CLIP, ROWS, SEED, STEPS
from safetensors.torch import load_file
from test_team import Ended, fired, outcome, same, train
from torch import nn

from paceline import sample_index, stream_seed


@cache
def oracle(name: str, micro: int = 3) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]]]:
    """One process, one graph: outputs of all micro-batches, drawn from their streams, the loss on all rows, its
    backward.
    """
    torch.set_num_threads(1)
    case = CASES[name]
    torch.manual_seed(stream_seed(SEED, 0, -1))
    model = case.model().double()
    optimizer = over_batch.adamw(model.parameters())
    figures: dict[str, list[Any]] = {"loss": [], "grad_norm": [], "metrics": []}
    for step in range(STEPS):
        epoch, batch = divmod(step, -(-ROWS // BATCH))
        stop = min(batch * BATCH + BATCH, ROWS)
        rows = [sample_index(place, ROWS, SEED, epoch) for place in range(batch * BATCH, stop)]
        outputs = []
        for number, start in enumerate(range(0, len(rows), micro)):
            torch.manual_seed(stream_seed(SEED, step, number))
            outputs.append(case.forward(model, [part[rows[start : start + micro]] for part in case.data.tensors]))
        found = case.loss(model, torch.utils._pytree.tree_map(lambda *parts: torch.cat(parts), *outputs))
        total, count, metrics = found if isinstance(found, tuple) else (found, 1, {})
        optimizer.zero_grad()
        (total / count).backward()
        figures["loss"].append(float(total) / count)
        figures["grad_norm"].append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        figures["metrics"].append({key: float(a) / float(b) for key, (a, b) in metrics.items()})
        optimizer.step()
    return dict(model.state_dict()), figures


def trained(folder: Path, *arguments: str, options: tuple[str, ...] = ("--workers", "1")) -> dict[str, Any]:
    """What a team reports of each case."""
    paceline("run", *options, SCRIPTS / "over_batch.py", folder, *arguments, cwd=folder)
    return json.loads((folder / "figures.json").read_text())


def compare(folder: Path, figures: dict[str, Any], micro: int = 3) -> None:
    for name, mine in figures.items():
        weights, theirs = oracle(name, micro)
        assert apart(load_file(folder / f"{name}.safetensors"), weights) <= 1e-12, name
        for key in ("loss", "grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-10), (name, key)
        assert mine["metrics"] == [pytest.approx(one, rel=1e-12) for one in theirs["metrics"]]


TEAMS = {
    "1 worker": ("--workers", "1"),
    "2 workers": ("--workers", "2"),
    "3 unequal, one idle": ("--workers", "3", "--shares", "1,0,2"),
    "5 workers": ("--workers", "5"),
}


@pytest.mark.parametrize("team", [t if "idle" in t else pytest.param(t, marks=pytest.mark.slow) for t in TEAMS])
def test_any_team(team: str, tmp_path: Path) -> None:
    compare(tmp_path, trained(tmp_path, *CASES, options=TEAMS[team]))


PLANS = {
    "shard=3 zero=1": ("--workers", "3", "--shares", "3,1,2"),
    "shard=3 zero=2": ("--workers", "3", "--shares", "3,1,2"),
    "shard=3 zero=3": ("--workers", "3", "--shares", "3,0,2"),
    "exact": ("--workers", "3", "--shares", "3,0,2"),
    "shard=2 zero=3 exact": ("--workers", "4", "--shares", "1,0,2,1"),
    "tensor=2": ("--workers", "4", "--shares", "1,0,2,1"),
    "pipeline=2": ("--workers", "4", "--shares", "1,0,2,1"),
    "pipeline=2 virtual=2": ("--workers", "2"),
    "pipeline=2 schedule=gpipe": ("--workers", "2"),
    "context=2": ("--workers", "4", "--shares", "1,0,2,1"),
    "shard=2 zero=1 pipeline=2": ("--workers", "4"),
    "pipeline=2 context=2 tensor=2": ("--workers", "8"),
    "recompute=blocks": ("--workers", "2"),
}
QUICK = {"shard=3 zero=3", "pipeline=2"}


@pytest.mark.parametrize("plan", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PLANS])
def test_any_plan(plan: str, tmp_path: Path) -> None:
    cut = any(word in plan for word in ("tensor", "pipeline", "context", "recompute"))
    names = ["blocks"] if cut else [name for name in CASES if "zero=" not in plan or name != "blocks"]
    options = (*PLANS[plan], "--max-restarts", "0")
    compare(tmp_path, trained(tmp_path, *names, *plan.split(), options=options))


# ---- losses of workers


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OVER", "batch")
            train(folder, 1, 24)

    return outcome(once(tmp_path_factory, "undisturbed, over batches", make), "")


MOMENTS = ("loading", "outputs", "gathered", "forward", "backward", "summed", "reduced", "applied")
LOST = [(kind, moment, worker) for kind in ("kill", "raise") for moment in MOMENTS for worker in (0, 2, 4)]
LOST_QUICK = {("kill", "outputs", 0), ("kill", "gathered", 2)}


@pytest.mark.parametrize(
    ("kind", "moment", "worker"),
    [pytest.param(*row, marks=[] if row in LOST_QUICK else pytest.mark.slow) for row in LOST],
)
def test_whoever_is_lost_nothing_else_is(
    kind: str, moment: str, worker: int, calm: Ended, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OVER", "batch")
    fault = f"{kind}:{worker}@11.{moment}"
    ended = train(tmp_path, 5, 24, fault)
    assert fired(ended) == {fault}
    same(ended, calm)
