"""Islands that are merged a fragment at a time give what a loop by hand gives, on any number of workers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import islands
import numpy
import pytest
import torch
from by_hand import built, grid
from islands import BATCH, CASES, DATA, MICRO, SEED, STEPS
from test_local_sgd import DILOCO, MOMENTS, right, stopped_in_a_round, trained
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from paceline import Trainer, stream_seed
from paceline.base.batching import deal
from paceline.base.environment import World
from paceline.comm.communicator import Group
from paceline.comm.compression import coded_sum
from paceline.errors import PlanError
from paceline.local_sgd.island_state import InnerOptimizerState, WorkerGroup
from paceline.local_sgd.streaming_diloco import InFlightFragment, QuantizedOuterSync
from paceline.team.coordinator import STOPPED
from paceline.team.fault_injection import read_log

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
        (1, 14),
        *[pytest.param(w, calls, marks=pytest.mark.slow) for w in range(3) for calls in (3, 7, 10, 12, 13, 15, 16)],
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


@pytest.mark.parametrize(
    ("moment", "coded"),
    [
        ("reduced", False),
        *[pytest.param(moment, coded, marks=pytest.mark.slow) for moment in MOMENTS[:-1] for coded in (True, False)],
    ],
)
def test_who_is_lost_at_any_moment(moment: str, coded: bool, tmp_path: Path) -> None:
    fault = f"kill:1@4.{moment}"
    plan = "local=3 every=4 outer_codec=int8" if coded else "local=3 every=4 fragments=2 delay=1"
    trained(tmp_path, 3, plan, "blocks" if coded else "adamw", PACELINE_CHAOS=fault)
    assert [entry["fault"] for entry in read_log(tmp_path / "run")] == [fault]
    right(tmp_path, (3, 4, 1, 0, 127) if coded else (3, 4, 2, 1), DILOCO, by_hand=by_hand)


@pytest.mark.parametrize(
    "workers", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_checkpoint_goes_on_with_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    trained(tmp_path, 3 - workers % 2, PLAN, "adamw", options=("--steps", "4"))
    said = trained(tmp_path, workers, PLAN, "adamw")
    assert "resuming from step 4" in said
    right(tmp_path, *TWO, by_hand=by_hand)


def test_a_stop_in_the_midst_of_a_round_saves_its_start(tmp_path: Path) -> None:
    stopped_in_a_round(tmp_path, PLAN)
    right(tmp_path, *TWO, by_hand=by_hand)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.ones(1, 1)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0 + self.layers[0] + self.layers[1]


@pytest.mark.parametrize(
    ("delay", "merged"),
    [
        (0, [(-11, -23), (-35, -47), (-59, -71)]),
        (1, [(-7, -19), (-27, -39), (-47, -59)]),
    ],
)
def test_the_histories_of_torchft(delay: int, merged: list[tuple[float, float]], run: Any) -> None:
    """What torchft's diloco_regression_test.py (test_diloco_mocked_updates, without mixing) does: two weights of 1 in a
    fragment each, gradients of 2, inner rate 1, outer rate 2 without momentum, merged every 6 steps. By hand: a weight
    that was merged at w has gone down by 2 in each of the steps up to its sum, 6 - delay of them but for the first
    fragment's first, 3 - delay; and goes on from w less twice that.
    """
    trainer = Trainer(
        Weights,
        lambda output, batch: 2 * output.mean(),
        lambda params: torch.optim.SGD(params, lr=1.0),
        4,
        plan=f"micro=2 local=2 every=6 outer=sgd:2 fragments=2 delay={delay}",
    )
    rows = TensorDataset(torch.zeros(8, 1))
    found = [tuple(float(w.detach()) for w in trainer.model.layers) for _ in trainer.steps(rows, count=18)]
    assert found == merged


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16], indirect=True)
@pytest.mark.parametrize("word", ["int8", "int4"])
def test_what_codes_leave_out_is_kept(word: str, default: None) -> None:
    """Of three islands on one worker: sent + left = deltas, and int8 is closer than int4."""
    draw, shapes = torch.Generator().manual_seed(1), [(30, 30), (7,), ()]
    names = [str(number) for number in range(len(shapes))]
    work = {island: SimpleNamespace(inner=InnerOptimizerState()) for island in range(3)}
    isles = SimpleNamespace(
        count=3,
        local_islands=[0, 1, 2],
        groups=[WorkerGroup([0], [0, 1, 2])],
        progress=work,
        twins=Group(World()),
    )
    code = coded_sum(word).code
    assert code is not None
    coded = QuantizedOuterSync(code, isles)  # type: ignore[arg-type]
    sent, deltas, apart = 0.0, 0.0, []
    for _ in range(5):
        each = {i: [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes] for i in range(3)}
        given = {i: [delta.clone() for delta in each[i]] for i in each}
        for island, one in work.items():
            for name, delta in zip(names, given[island], strict=True):
                delta += one.inner.extra.get("left", {}).get(name, 0.0)
        flight = InFlightFragment(
            [torch.zeros(shape, dtype=torch.float64) for shape in shapes], torch.ones(2, dtype=torch.float64)
        )
        coded.start(flight, names, given)
        flight.wait(isles.twins)
        coded.keep_omitted(flight, names)
        sent += torch.cat([total.view(-1) for total in flight.totals])
        deltas += sum(torch.cat([delta.view(-1) for delta in some]) for some in each.values())
        left = sum(one.inner.extra["left"][name].view(-1).sum() for one in work.values() for name in names)
        assert float(sent.sum() + left) == pytest.approx(float(deltas.sum()), abs=1e-11)
        apart.append(float((sent - deltas).abs().max()))
    assert max(apart) < (0.1 if word == "int8" else 1.6)


@pytest.mark.parametrize(
    "calls", [6, pytest.param(12, marks=pytest.mark.slow), pytest.param(15, marks=pytest.mark.slow)]
)
def test_codes_survive_losses_and_resumes(calls: int, tmp_path: Path) -> None:
    """What they left out is copied with what an island keeps, and is in the checkpoint."""
    plan = CODED[1]
    trained(tmp_path, 3, plan, "blocks", options=("--steps", "4"))
    trained(tmp_path, 2, plan, "blocks", KILL=f"1:{calls}")
    assert (tmp_path / "killed").exists()
    right(tmp_path, *CODED[2:], by_hand=by_hand)


def test_other_islands_send_what_codes_left_out(tmp_path: Path) -> None:
    trained(tmp_path, 1, "local=2 every=2 outer_codec=int4", "momentum", options=("--steps", "2"))
    said = trained(tmp_path, 2, "local=3 every=2 fragments=2", "momentum", options=("--steps", "4"))
    assert "changed mathematics: 2 islands are 3 from here" in said
    said = trained(tmp_path, 1, "local=3 every=2", "momentum", options=("--steps", "6"))
    assert "changed mathematics: islands go on from the weights that were merged last" in said
    trained(tmp_path, 1, "data=1", "momentum")


def test_more_fragments_than_there_are_parts(run: Any) -> None:
    plan = "micro=2 local=2 every=8 fragments=3"
    with pytest.raises(PlanError) as refused:
        Trainer(islands.net, islands.loss, CASES["sgd"].optimizer, BATCH, plan=plan)
    assert str(refused.value) == (
        "fragments=3: the model has 2 blocks and parameters beside them; say fragments=2 or less"
    )


@pytest.mark.parametrize("calls", [16, *[pytest.param(calls, marks=pytest.mark.slow) for calls in (15, 17, 18)]])
def test_who_alone_is_told_to_stop_stops_all(calls: int, tmp_path: Path) -> None:
    """Others come to the next sum in that round, and learn of it there."""
    plan = "local=3 every=4 fragments=2 delay=1"
    told = {"KILL": f"1:{calls}", "SIGNAL": "SIGUSR2"}
    said = trained(tmp_path, 3, plan, "adamw", code=STOPPED, **told)
    assert "stopped after step 4; saved" in said
    trained(tmp_path, 2, plan, "adamw")
    right(tmp_path, (3, 4, 2, 1), DILOCO, by_hand=by_hand)
