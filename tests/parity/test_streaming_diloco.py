"""Streaming DiLoCo: islands that are merged a fragment at a time give what plain PyTorch gives, whoever is killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import islands
import pytest
import torch
from covering import each_value
from island_runs import KILL_MOMENTS, SGD, check_islands, stop_in_a_round, train_islands
from islands import BATCH, CASES
from oracle import DILOCO
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Trainer
from paceline.base.environment import World
from paceline.base.exit_codes import STOPPED
from paceline.comm.communicator import Group
from paceline.comm.compression import coded_sum
from paceline.errors import PlanError
from paceline.local_sgd.island_state import InnerOptimizerState, WorkerGroup
from paceline.local_sgd.streaming_diloco import InFlightFragment, QuantizedOuterSync
from paceline.team.fault_injection import read_log

Plan = tuple[Any, ...]  # islands, every, outer optimizer, fragments, delay, and maybe the largest number of a code
PLAN, TWO = "local=2 every=4 fragments=2 delay=1", (2, 4, DILOCO, 2, 1)
THREE = (3, 4, DILOCO, 2, 1)
CODED, INT4 = f"{PLAN} outer_codec=int4", (2, 4, DILOCO, 2, 1, 7)
TEAMS: list[tuple[int, str, Plan]] = [
    (3, "local=2 every=3 fragments=1 delay=1", (2, 3, DILOCO, 1, 1)),
    (2, "local=3 every=5 fragments=2 outer=sgd:0.9", (3, 5, SGD, 2, 0)),
]
SLOW: list[tuple[int, str, Plan]] = [
    (1, PLAN, TWO),
    (2, "local=2 every=5 fragments=2", (2, 5, DILOCO, 2, 0)),
    (2, "local=3 every=5 fragments=2 delay=1 outer=sgd:0.9", (3, 5, SGD, 2, 1)),
    (3, PLAN, TWO),
    (1, "local=3 every=7 fragments=3 delay=1", (3, 7, DILOCO, 3, 1)),
    (3, "local=3 every=3 fragments=3 outer=sgd:0.9", (3, 3, SGD, 3, 0)),
    (2, "local=2 every=7 fragments=3 delay=1 outer=sgd:0.9", (2, 7, SGD, 3, 1)),
    (4, PLAN, TWO),
    (4, f"shard=2 zero=1 {PLAN}", TWO),
    (4, "shard=2 zero=2 local=3 every=4 fragments=2 delay=1", THREE),
    (4, f"shard=2 zero=3 {PLAN}", TWO),
    *[(workers, CODED, INT4) for workers in (1, 2, 3, 4)],
    (2, "local=3 every=3 outer_codec=int8", (3, 3, DILOCO, 1, 0, 127)),
    (3, "local=3 every=5 outer_codec=int4 outer=sgd:0.9", (3, 5, SGD, 1, 0, 7)),
    (4, "pipeline=2 local=2 every=7 fragments=3 delay=1", (2, 7, DILOCO, 3, 1)),
    (2, f"tensor=2 {PLAN}", TWO),
]


@pytest.mark.parametrize(
    ("workers", "plan", "by"),
    [*TEAMS, *[pytest.param(*team, marks=pytest.mark.slow) for team in SLOW]],
    ids=lambda value: str(value) if isinstance(value, int | str) else "",
)
def test_streaming_diloco_is_that_of_one_process(workers: int, plan: str, by: Plan, tmp_path: Path) -> None:
    blocks = by[3] == 3 or any(word in plan for word in ("pipeline", "tensor", "codec"))
    train_islands(tmp_path, workers, plan, *(["blocks"] if blocks else [name for name in CASES if name != "blocks"]))
    check_islands(tmp_path, *by)


@pytest.mark.parametrize(
    ("worker", "calls"),
    [
        (1, 14),
        *[pytest.param(*one, marks=pytest.mark.slow) for one in each_value(range(3), (3, 7, 10, 12, 13, 15, 16))],
    ],
)
def test_kill_in_the_midst_of_a_round_repeats_the_round(worker: int, calls: int, tmp_path: Path) -> None:
    """In rounds of 4 steps, with sums in flight in the second and the fourth, the loss is called twice a step, and more
    often in the first one.
    """
    plan = "local=3 every=4 fragments=2 delay=1"
    output = train_islands(tmp_path, 3, plan, "adamw", KILL=f"{worker}:{calls}")
    assert (tmp_path / "killed").exists()
    assert f"worker {worker} was killed by SIGKILL: 2 workers go on" in output
    check_islands(tmp_path, *THREE)


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILL_MOMENTS)
def test_kill_at_any_moment_keeps_what_codes_omit(moment: str, tmp_path: Path) -> None:
    """Without codes: in the table of recovery."""
    fault = f"kill:1@4.{moment}"
    train_islands(tmp_path, 3, "local=3 every=4 outer_codec=int8", "blocks", PACELINE_CHAOS=fault)
    assert [entry["fault"] for entry in read_log(tmp_path / "run")] == [fault]
    check_islands(tmp_path, 3, 4, DILOCO, 1, 0, 127)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_resume_of_fragments_on_another_number_of_workers(workers: int, tmp_path: Path) -> None:
    train_islands(tmp_path, 3 - workers % 2, PLAN, "adamw", options=("--steps", "4"))
    output = train_islands(tmp_path, workers, PLAN, "adamw")
    assert "resuming from step 4" in output
    check_islands(tmp_path, *TWO)


@pytest.mark.slow
def test_stop_in_the_midst_of_a_round_saves_its_start(tmp_path: Path) -> None:
    stop_in_a_round(tmp_path, PLAN)
    check_islands(tmp_path, *TWO)


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
def test_streaming_diloco_has_the_weights_of_torchft(delay: int, merged: list[tuple[float, float]], run: Any) -> None:
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
    weights = [tuple(float(w.detach()) for w in trainer.model.layers) for _ in trainer.steps(rows, count=18)]
    assert weights == merged


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16], indirect=True)
@pytest.mark.parametrize("word", ["int8", "int4"])
def test_outer_codec_keeps_what_its_codes_omit(word: str, default: None) -> None:
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
def test_outer_codec_survives_kill_and_resume(calls: int, tmp_path: Path) -> None:
    """What codes omitted is copied with what an island keeps, and is in the checkpoint."""
    train_islands(tmp_path, 3, CODED, "blocks", options=("--steps", "4"))
    train_islands(tmp_path, 2, CODED, "blocks", KILL=f"1:{calls}")
    assert (tmp_path / "killed").exists()
    check_islands(tmp_path, *INT4)


def test_more_fragments_than_blocks_are_refused(run: Any, golden: Callable[[str, str], None]) -> None:
    plan = "micro=2 local=2 every=8 fragments=3"
    with pytest.raises(PlanError) as refused:
        Trainer(islands.net, islands.loss, CASES["sgd"].optimizer, BATCH, plan=plan)
    golden("refused: three fragments of two blocks", str(refused.value))


@pytest.mark.parametrize("calls", [16, *[pytest.param(calls, marks=pytest.mark.slow) for calls in (15, 17, 18)]])
def test_stop_of_one_worker_stops_all_and_one_worker_resumes(calls: int, tmp_path: Path) -> None:
    """Others come to the next sum in that round, and learn of the stop there; its start is saved."""
    plan = "local=3 every=4 fragments=2 delay=1"
    stop = {"KILL": f"1:{calls}", "SIGNAL": "SIGUSR2"}
    output = train_islands(tmp_path, 3, plan, "adamw", code=STOPPED, **stop)
    assert "stopped after step 4; saved" in output
    assert "resuming from step 4" in train_islands(tmp_path, 1, plan, "adamw")
    check_islands(tmp_path, *THREE)
