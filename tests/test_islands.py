"""Islands give what a loop by hand gives: on any number of workers, which are dealt to them or they to it."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import islands
import pytest
import torch
from by_hand import built, grid
from islands import BATCH, CASES, DATA, MICRO, ROWS, SEED, STEPS
from launching import SCRIPTS, paceline
from oracle import apart
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from paceline import sample_index, stream_seed
from paceline.islands import dealt
from paceline.step import deal

TOLERANCE = 1e-12


@cache
def by_hand(name: str, count: int, every: int, outer: tuple[float, float, bool]) -> tuple[Any, list[dict[str, Any]]]:
    """One process: so many copies of the model, each with an optimizer of its own, merged every so many steps."""
    case, rate, momentum, nesterov = CASES[name], *outer
    torch.set_num_threads(1)
    model = built(case.model, SEED)
    merges = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=nesterov)
    copies = [copy.deepcopy(model) for _ in range(count)]
    optimizers = [case.optimizer(one.parameters()) for one in copies]
    schedules = [LambdaLR(one, case.schedule or (lambda step: 1.0)) for one in optimizers]
    steps = grid(DATA, BATCH, MICRO, count=STEPS, seed=SEED)
    figures = []
    for first in range(0, STEPS, every):
        total, counts, metrics, norms, rates = 0.0, [0.0] * count, [0.0, 0], [], []
        for number in range(first, min(first + every, STEPS)):
            batch = steps[number]
            for island, run in enumerate(deal(len(batch), [1.0] * count)):
                one, step_count = copies[island], 0.0
                one.zero_grad()
                rates += [optimizers[0].param_groups[0]["lr"]] if island == 0 else []
                for index in run:
                    torch.manual_seed(stream_seed(SEED, number, index))
                    found, part, more = islands.loss(one(batch[index][0]), batch[index])
                    found.backward()
                    step_count, total = step_count + part, total + found.item()
                    metrics = [metrics[0] + float(more["far"][0]), metrics[1] + more["far"][1]]
                if run:
                    for param in one.parameters():
                        param.grad /= step_count
                    norm = float(nn.utils.clip_grad_norm_(one.parameters(), case.clip_norm or 1e9))
                    norms += [norm] if island == 0 else []
                    optimizers[island].step()
                counts[island] += step_count
                schedules[island].step()
        _merge(model, copies, counts, merges)
        figures.append(
            {"step": number + 1, "loss": total / sum(counts), "far": metrics[0] / metrics[1]}
            | {"lr": rates[-1], "grad_norm": norms[-1], "turn": number + 1 - first}
        )
    return model.state_dict(), figures


def _merge(model: nn.Module, copies: list[nn.Module], counts: list[float], merges: torch.optim.Optimizer) -> None:
    share = [count / sum(counts) for count in counts]
    named = [dict(one.named_parameters()) for one in copies]
    for name, param in model.named_parameters():
        ends = sum(part * one[name].detach() for part, one in zip(share, named, strict=True))
        param.grad = param.detach() - ends
    merges.step()
    for name, buffer in model.named_buffers():
        found = [dict(one.named_buffers())[name] for one in copies]
        if buffer.is_floating_point():
            buffer.copy_(sum(part * one for part, one in zip(share, found, strict=True)))
        else:
            buffer.copy_(torch.stack(found).max())
    for one in copies:
        one.load_state_dict(model.state_dict())


def trained(folder: Path, workers: int, plan: str, *names: str) -> dict[str, Any]:
    options = ("--workers", str(workers), "--run-dir", "run", "--quiet")
    paceline("run", *options, SCRIPTS / "islands.py", folder, plan, *names, cwd=folder)
    return dict(json.loads((folder / "told.json").read_text()))


def right(folder: Path, told: dict[str, Any], *plan: Any) -> None:
    for name, one in told.items():
        weights, figures = by_hand(name, *plan)
        assert apart(load_file(folder / f"{name}.safetensors"), weights) <= TOLERANCE, name
        for mine, theirs in zip(one["figures"], figures, strict=True):
            assert mine["metrics"]["far"] == pytest.approx(theirs.pop("far"), rel=TOLERANCE)
            assert {key: mine[key] for key in theirs} == pytest.approx(theirs, rel=1e-9), name
            theirs["far"] = mine["metrics"]["far"]
        assert sum(mine["samples"] for mine in one["figures"]) == sum(
            len(part[0]) for step in _steps() for part in step
        )
        assert one["evaluated"]["n"] == ROWS


def _steps() -> list[list[Any]]:
    return grid(DATA, BATCH, MICRO, count=STEPS, seed=SEED, order=sample_index)


DILOCO = (0.7, 0.9, True)
TEAMS = [
    (1, "local=2 every=3", 2, 3, DILOCO),
    (3, "local=2 every=3", 2, 3, DILOCO),
    (2, "local=3 every=3 outer=sgd:0.9", 3, 3, (0.9, 0.0, False)),
]
SLOW = [
    (2, "local=2 every=3", 2, 3, DILOCO),
    (4, "local=2 every=3", 2, 3, DILOCO),
    (1, "local=3 every=4", 3, 4, DILOCO),
    (3, "local=3 every=1", 3, 1, DILOCO),
    (4, "local=3 every=3 outer=sgd:0.9", 3, 3, (0.9, 0.0, False)),
    (4, "shard=2 zero=1 local=2 every=3", 2, 3, DILOCO),
    (4, "shard=2 zero=2 local=2 every=3", 2, 3, DILOCO),
    (4, "shard=2 zero=3 local=2 every=3", 2, 3, DILOCO),
    (2, "shard=2 zero=3 local=2 every=3", 2, 3, DILOCO),
]


@pytest.mark.parametrize(
    ("workers", "plan", "count", "every", "outer"),
    [*TEAMS, *[pytest.param(*team, marks=pytest.mark.slow) for team in SLOW]],
    ids=lambda value: str(value) if isinstance(value, int | str) else "",
)
def test_islands_are_a_loop_by_hand(
    workers: int, plan: str, count: int, every: int, outer: tuple[float, float, bool], tmp_path: Path
) -> None:
    told = trained(tmp_path, workers, plan, *([] if "zero=1" not in plan else ["sgd", "momentum", "adamw"]))
    right(tmp_path, told, count, every, outer)


def test_who_has_an_island_keeps_it() -> None:
    assert dealt(5, [(), ()]) == [[0, 1, 2], [3, 4]]
    assert dealt(4, [{0, 1}, {2, 3}, ()]) == [[0], [2, 3], [1]]
    assert dealt(4, [{0, 1}, {2}]) == [[0, 1], [2, 3]]
    assert dealt(2, [{1}, {0, 1}]) == [[1], [0]]
