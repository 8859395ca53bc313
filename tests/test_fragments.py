"""Islands that are merged a fragment at a time give what a loop by hand gives, on any number of workers."""

from __future__ import annotations

import copy
import signal
import sys
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from subprocess import PIPE
from typing import Any

import islands
import numpy
import pytest
import torch
from agents import until
from by_hand import built, grid
from islands import BATCH, CASES, DATA, MICRO, SEED, STEPS
from launching import SCRIPTS
from test_islands import DILOCO, MOMENTS, right, trained
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from warm import Process, environment

from paceline import stream_seed
from paceline.step import deal
from paceline.team.chaos import read_log
from paceline.team.coordinator import STOPPED

# The first parameters of the fragments of a model with these many blocks, which are as even as can be.
PARTS = {("net", 2): [("0.",), ("1.", "2.", "3.")], ("blocks", 2): [("0.", "1.", "2."), ("3.", "4.", "6.")]}
PARTS["blocks", 3] = [("0.", "1."), ("2.", "3."), ("4.", "6.")]
Plan = tuple[Any, ...]  # islands, every, fragments, delay, and maybe the largest number of a code
BLOCK = 256


@cache
def by_hand(name: str, plan: Plan, outer: tuple[float, float, bool]) -> tuple[Any, list[dict[str, Any]]]:
    """One process: so many copies of the model, of which a fragment is merged at a time."""
    (count, every, fragments, delay, *code), (rate, momentum, nesterov), case = plan, outer, CASES[name]
    torch.set_num_threads(1)
    model = built(case.model, SEED)
    named = dict(model.named_parameters())
    starts = PARTS["blocks" if name == "blocks" else "net", fragments] if fragments > 1 else [("",)]
    parts = [[one for one in named if one.startswith(start)] for start in starts]
    assert sorted(chain.from_iterable(parts)) == sorted(named)
    merges = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=nesterov)
    copies = [copy.deepcopy(model) for _ in range(count)]
    optimizers = [case.optimizer(one.parameters()) for one in copies]
    schedules = [LambdaLR(one, case.schedule or (lambda step: 1.0)) for one in optimizers]
    steps = grid(DATA, BATCH, MICRO, count=STEPS, seed=SEED)
    since = [[0.0] * fragments for _ in copies]
    sent = [Sent(count, *code) for _ in parts] if code else [None] * fragments
    ends, figures = [(f + 1) * every // fragments for f in range(fragments)], []
    for first in range(0, STEPS, every):
        total, counts, losses = 0.0, [0.0] * count, 0.0
        under_way: dict[int, Any] = {}
        length, merged = min(every, STEPS - first), 0
        for number in range(first, first + length):
            for island, run in enumerate(deal(len(steps[number]), [1.0] * count)):
                found, part = _step(copies[island], optimizers[island], steps[number], run, number, case.clip_norm)
                schedules[island].step()
                total, counts[island], losses = total + found, counts[island] + part, losses + part
                since[island] = [before + part for before in since[island]]
            at = number + 1 - first
            while merged < fragments and (at == length or at >= ends[merged] - delay):
                if merged not in under_way:
                    under_way[merged] = _launched(
                        model, copies, parts[merged], [one[merged] for one in since], sent[merged]
                    )
                if at < min(length, ends[merged]):
                    break
                _landed(model, copies, parts[merged], under_way[merged], merges)
                for one in since:
                    one[merged] = 0.0
                merged += 1
        _merge_buffers(model, copies, counts)
        figures.append({"step": number + 1, "loss": total / losses, "turn": length})
    return model.state_dict(), figures


def _step(one: nn.Module, optimizer: Any, batch: Any, run: Any, number: int, clip: float | None) -> tuple[float, float]:
    one.zero_grad()
    total = count = 0.0
    for index in run:
        torch.manual_seed(stream_seed(SEED, number, index))
        found, part, _ = islands.loss(one(batch[index][0]), batch[index])
        found.backward()
        total, count = total + found.item(), count + part
    if run:
        for param in one.parameters():
            param.grad /= count
        nn.utils.clip_grad_norm_(one.parameters(), clip or 1e9)
        optimizer.step()
    return total, count


@dataclass
class Sent:
    """What codes of numbers up to `most` leave out, by numpy: of so many islands, and of their sums, of which each
    island has a stretch of whole blocks.
    """

    count: int
    most: int
    left: Any = None

    def __call__(self, deltas: Any) -> Any:
        self.left = deltas * 0 if self.left is None else self.left
        before, length = deltas + self.left, deltas.shape[1]
        sums = self._coded(before).astype(numpy.float64).sum(0)
        self.left = before - self._coded(before)
        made = self._coded(sums[None])[0]
        for island, share in enumerate(deal(-(-length // BLOCK), [1.0] * self.count)):
            stretch = slice(share.start * BLOCK, share.stop * BLOCK)
            self.left[island, stretch] += sums[stretch] - made[stretch]
        assert abs(made + self.left.sum(0) - before.sum(0)).max() < 1e-12, "what is not sent is kept"
        return made

    def _coded(self, rows: Any) -> Any:
        blocks = numpy.pad(rows.astype(numpy.float32), ((0, 0), (0, -rows.shape[1] % BLOCK))).reshape(-1, BLOCK)
        scales = abs(blocks).max(1, keepdims=True) / numpy.float32(self.most)
        codes = numpy.rint(blocks / numpy.where(scales == 0, numpy.float32(1), scales))
        return (codes * scales).reshape(len(rows), -1)[:, : rows.shape[1]]


def _launched(
    model: nn.Module, copies: list[nn.Module], part: list[str], counts: list[float], sent: Sent | None
) -> dict[str, Any]:
    named = [dict(one.named_parameters()) for one in copies]
    if sent is not None:
        before = [model.get_parameter(name).detach() for name in part]
        rows = [
            torch.cat([((was - one[name].detach()) * c).view(-1) for was, name in zip(before, part, strict=True)])
            for c, one in zip(counts, named, strict=True)
        ]
        mean = torch.from_numpy(sent(torch.stack(rows).numpy()).astype(numpy.float64)) / sum(counts)
        pieces = mean.split([was.numel() for was in before])
        return {name: one.view_as(was) for name, one, was in zip(part, pieces, before, strict=True)}
    found = {}
    for name in part:
        mean = sum(c / sum(counts) * one[name].detach() for c, one in zip(counts, named, strict=True))
        found[name] = model.get_parameter(name).detach() - mean
    return found


def _landed(model: nn.Module, copies: list[nn.Module], part: list[str], grads: dict[str, Any], merges: Any) -> None:
    for name in part:
        model.get_parameter(name).grad = grads[name]
    merges.step()
    merges.zero_grad()
    for one in copies:
        for name in part:
            one.get_parameter(name).data.copy_(model.get_parameter(name).data)


def _merge_buffers(model: nn.Module, copies: list[nn.Module], counts: list[float]) -> None:
    for name, buffer in model.named_buffers():
        found = [one.get_buffer(name) for one in copies]
        if buffer.is_floating_point():
            buffer.copy_(sum(c / sum(counts) * one for c, one in zip(counts, found, strict=True)))
        else:
            buffer.copy_(torch.stack(found).max())
        for one in found:
            one.copy_(buffer)


SGD = 0.9, 0.0, False
CODED = (2, "local=2 every=4 fragments=2 delay=1 outer_codec=int4", (2, 4, 2, 1, 7), DILOCO)
TEAMS = [
    (1, "local=2 every=4 fragments=2 delay=1", (2, 4, 2, 1), DILOCO),
    (2, "local=2 every=5 fragments=2", (2, 5, 2, 0), DILOCO),
    (3, "local=2 every=3 fragments=1 delay=1", (2, 3, 1, 1), DILOCO),
    (2, "local=3 every=5 fragments=2 delay=1 outer=sgd:0.9", (3, 5, 2, 1), SGD),
]

SLOW = [
    (3, "local=2 every=4 fragments=2 delay=1", (2, 4, 2, 1), DILOCO),
    (1, "local=3 every=7 fragments=3 delay=1", (3, 7, 3, 1), DILOCO),
    (3, "local=3 every=3 fragments=3 outer=sgd:0.9", (3, 3, 3, 0), SGD),
    (2, "local=2 every=7 fragments=3 delay=1 outer=sgd:0.9", (2, 7, 3, 1), SGD),
    (4, "local=2 every=4 fragments=2 delay=1", (2, 4, 2, 1), DILOCO),
    (4, "shard=2 zero=1 local=2 every=4 fragments=2 delay=1", (2, 4, 2, 1), DILOCO),
    (4, "shard=2 zero=2 local=3 every=4 fragments=2 delay=1", (3, 4, 2, 1), DILOCO),
    (4, "shard=2 zero=3 local=2 every=4 fragments=2 delay=1", (2, 4, 2, 1), DILOCO),
    *[(workers, *CODED[1:]) for workers in (1, 2, 3, 4)],
    (2, "local=3 every=3 outer_codec=int8", (3, 3, 1, 0, 127), DILOCO),
    (3, "local=3 every=5 outer_codec=int4 outer=sgd:0.9", (3, 5, 1, 0, 7), SGD),
    (4, "pipeline=2 local=2 every=7 fragments=3 delay=1", (2, 7, 3, 1), DILOCO),
    (2, "tensor=2 local=2 every=4 fragments=2 delay=1", (2, 4, 2, 1), DILOCO),
]


@pytest.mark.parametrize(
    ("workers", "plan", "by", "outer"),
    [*TEAMS, *[pytest.param(*team, marks=pytest.mark.slow) for team in SLOW]],
    ids=lambda value: str(value) if isinstance(value, int | str) else "",
)
def test_fragments_are_a_loop_by_hand(
    workers: int, plan: str, by: Plan, outer: tuple[float, float, bool], tmp_path: Path
) -> None:
    blocks = by[2] == 3 or any(word in plan for word in ("pipeline", "tensor", "codec"))
    trained(tmp_path, workers, plan, *(["blocks"] if blocks else [name for name in CASES if name != "blocks"]))
    right(tmp_path, by, outer, by_hand=by_hand)


TWO = (2, 4, 2, 1), DILOCO
PLAN = "local=2 every=4 fragments=2 delay=1"


@pytest.mark.parametrize(
    ("worker", "calls"),
    [
        (1, 12),
        *[pytest.param(w, calls, marks=pytest.mark.slow) for w in range(3) for calls in (3, 5, 7, 10, 12, 14)],
    ],
)
def test_a_round_is_done_again_by_all(worker: int, calls: int, tmp_path: Path) -> None:
    """In rounds of 4 steps, with sums under way in the second and the fourth, the loss is called twice a step, and more
    often in the first one.
    """
    plan = "local=3 every=4 fragments=2 delay=1"
    said = trained(tmp_path, 3, plan, "adamw", KILL=f"{worker}:{calls}")
    assert (tmp_path / "killed").exists()
    assert f"worker {worker} was killed by SIGKILL: 2 workers go on" in said
    right(tmp_path, (3, 4, 2, 1), DILOCO, by_hand=by_hand)


@pytest.mark.parametrize("moment", ["reduced", *[pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS[:-1]]])
def test_who_is_lost_at_any_moment(moment: str, tmp_path: Path) -> None:
    fault = f"kill:1@4.{moment}"
    trained(tmp_path, 3, "local=3 every=4 fragments=2 delay=1", "adamw", PACELINE_CHAOS=fault)
    assert [entry["fault"] for entry in read_log(tmp_path / "run")] == [fault]
    right(tmp_path, (3, 4, 2, 1), DILOCO, by_hand=by_hand)


@pytest.mark.parametrize(
    "workers", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_checkpoint_goes_on_with_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    trained(tmp_path, 3 - workers % 2, PLAN, "adamw", options=("--steps", "4"))
    said = trained(tmp_path, workers, PLAN, "adamw")
    assert "resuming from step 4" in said
    right(tmp_path, *TWO, by_hand=by_hand)


def test_a_stop_in_the_midst_of_a_round_saves_its_start(tmp_path: Path) -> None:
    """The loss is called about twelve times by each of two workers in a round."""
    command = ("run", "--workers", "2", "--run-dir", "run", str(SCRIPTS / "islands.py"), str(tmp_path))
    command = (sys.executable, "-m", "paceline", *command, PLAN, "adamw")
    with Process(command, environment(SLOW="20"), cwd=tmp_path, stdout=PIPE, stderr=PIPE) as process:
        until((tmp_path / "reached").exists)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == STOPPED, stdout + stderr
    assert "stopped after step 4; saved" in stdout + stderr
    trained(tmp_path, 2, PLAN, "adamw")
    right(tmp_path, *TWO, by_hand=by_hand)
