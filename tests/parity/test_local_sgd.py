"""Local SGD and DiLoCo: islands give what plain PyTorch gives, on any number of workers, whoever is killed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import islands
import pytest
import torch
from covering import each_value
from island_runs import KILL_MOMENTS, SGD, TOLERANCE, check_islands, islands_by_hand, stop_in_a_round, train_islands
from islands import BATCH, CASES, DATA
from oracle import DILOCO, Outer, apart
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Trainer, plateau
from paceline.base.journal import read_journal
from paceline.errors import PacelineError, UsageError
from paceline.local_sgd.island_migration import assign_islands
from paceline.team.fault_injection import read_log

TEAMS = [
    (3, "local=2 every=3", 2, 3, DILOCO),
    (2, "local=3 every=3 outer=sgd:0.9", 3, 3, SGD),
]
SLOW = [
    (1, "local=2 every=3", 2, 3, DILOCO),
    (2, "local=2 every=3", 2, 3, DILOCO),
    (4, "local=2 every=3", 2, 3, DILOCO),
    (1, "local=3 every=4", 3, 4, DILOCO),
    (3, "local=3 every=1", 3, 1, DILOCO),
    (4, "local=3 every=3 outer=sgd:0.9", 3, 3, SGD),
    (4, "shard=2 zero=1 local=2 every=3", 2, 3, DILOCO),
    (4, "shard=2 zero=2 local=2 every=3", 2, 3, DILOCO),
    (4, "shard=2 zero=3 local=2 every=3", 2, 3, DILOCO),
    (2, "shard=2 zero=3 local=2 every=3", 2, 3, DILOCO),
    (4, "pipeline=2 local=2 every=3", 2, 3, DILOCO),
    (2, "tensor=2 local=2 every=3", 2, 3, DILOCO),
    (4, "tensor=2 local=2 every=3", 2, 3, DILOCO),
]


@pytest.mark.parametrize(
    ("workers", "plan", "count", "every", "outer"),
    [*TEAMS, *[pytest.param(*team, marks=pytest.mark.slow) for team in SLOW]],
    ids=lambda value: str(value) if isinstance(value, int | str) else "",
)
def test_local_sgd_and_diloco_are_those_of_one_process(
    workers: int, plan: str, count: int, every: int, outer: Outer, tmp_path: Path
) -> None:
    blocks = "pipeline" in plan or "tensor" in plan
    train_islands(tmp_path, workers, plan, *(["blocks"] if blocks else [name for name in CASES if name != "blocks"]))
    check_islands(tmp_path, count, every, outer)


# By the number of workers: who has an island's state. One who has it alone gives another one a copy.
HAVE = {2: [{0, 1}, {0, 1}], 3: [{0, 1}, {0, 2}], 5: [{0, 1, 2}, {3, 4}]}


@pytest.mark.parametrize(
    ("workers", "worker", "moment"),
    [
        (3, 1, "reduced"),
        *[
            pytest.param(workers, worker, moment, marks=pytest.mark.slow)
            for workers in (2, 3, 5)
            for worker, moment in each_value(range(workers), (*KILL_MOMENTS, *(["forming"] if workers > 2 else [])))
        ],
    ],
)
def test_kill_of_any_worker_loses_no_island_that_another_one_has(
    workers: int, worker: int, moment: str, tmp_path: Path
) -> None:
    """`forming`: in the generation that another kill makes. Where both who have an island are lost, a line says so."""
    faults = {f"kill:{worker}@3.{moment}"}
    killed = {worker}
    if moment == "forming":
        killed.add((worker + 1) % workers)
        faults.add(f"kill:{(worker + 1) % workers}@3.backward")
    output = train_islands(tmp_path, workers, "local=2 every=3", "adamw", PACELINE_CHAOS=",".join(sorted(faults)))
    assert {entry["fault"] for entry in read_log(tmp_path / "run")} == faults, "a fault did not fire"
    gone = [island for island, has in enumerate(HAVE[workers]) if has <= killed]
    line = "the optimizer state of island {} was lost: it continues with a copy of the state of island {}"
    assert [island for island in (0, 1) if line.format(island, 1 - island) in output] == gone
    if not gone:
        check_islands(tmp_path, 2, 3)


def test_kill_of_all_who_have_an_island_takes_it_from_the_last_checkpoint(tmp_path: Path) -> None:
    """Which is that of the first loop's end, where the round that is done again began."""
    faults = "kill:0@4.backward,kill:2@4.forming"
    output = train_islands(tmp_path, 3, "local=2 every=2", "adamw", LOOPS="4,4", PACELINE_CHAOS=faults)
    assert {entry["fault"] for entry in read_log(tmp_path / "run")} == {*faults.split(",")}
    line = "the optimizer state of island 1 was lost: it continues with the state from the checkpoint of step 4\n"
    assert line in output
    assert apart(load_file(tmp_path / "adamw.safetensors"), islands_by_hand("adamw", 2, 2)[0]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 2])
def test_kill_in_the_midst_of_a_round_repeats_the_round(worker: int, tmp_path: Path) -> None:
    """The loss is called twice in the first step, where losses are looked at, and thrice in the next two."""
    output = train_islands(tmp_path, 3, "local=3 every=4 outer=sgd:0.9", "adamw", KILL=f"{worker}:7")
    assert (tmp_path / "killed").exists()
    assert f"worker {worker} was killed by SIGKILL: 2 workers go on" in output
    check_islands(tmp_path, 3, 4, SGD)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_resume_of_islands_on_another_number_of_workers(workers: int, tmp_path: Path) -> None:
    train_islands(tmp_path, 3 - workers % 2, "local=2 every=3", "adamw", options=("--steps", "3"))
    output = train_islands(tmp_path, workers, "local=2 every=3", "adamw")
    assert "resuming from step 3" in output
    check_islands(tmp_path, 2, 3)


def test_resume_under_another_number_of_islands_says_how_mathematics_changes(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    """What codes omitted is sent by the islands that come after."""
    texts = []
    for step, plan in enumerate(
        [
            "local=2 every=2 outer_codec=int4",
            "local=3 every=2 fragments=2",
            "local=3 every=2",
            "data=1",
            "local=2 every=2",
        ],
        1,
    ):
        steps = ("--steps", str(min(2 * step, 7))) if step < 5 else ()
        output = train_islands(tmp_path, 1, plan, "momentum", options=steps)
        texts += [line.partition("changed mathematics: ")[2] for line in output.splitlines() if "changed math" in line]
    golden("from int4 codes to fragments, to no fragments, to no islands, to islands", "\n".join(texts))


def test_stop_in_the_midst_of_a_round_saves_its_start(tmp_path: Path) -> None:
    stop_in_a_round(tmp_path, "local=2 every=4")
    check_islands(tmp_path, 2, 4)
    records = [(event["step"], event["steps"]) for event in read_journal(tmp_path / "run") if event["event"] == "step"]
    assert sum(steps for _, steps in records) == records[-1][0]


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        ("local=9 every=2", {}),
        ("local=2 every=2", {"loss_over": "batch"}),
        ("local=2 every=2", {"schedule": plateau("loss")}),
        ("local=2 every=2 exact", {}),
        ("local=2 every=2 codec=int8", {}),
        ("local=2 every=2 precision=fp16", {}),
    ],
)
def test_local_sgd_refuses_what_does_not_fit(
    plan: str, more: dict[str, Any], run: Any, golden: Callable[[str, str], None]
) -> None:
    with pytest.raises(PacelineError) as refused:
        Trainer(islands.net, islands.loss, CASES["sgd"].optimizer, BATCH, plan=f"micro=2 {plan}", **more)
    golden(" ".join(["refused:", plan, *more]), str(refused.value))


def test_local_sgd_refuses_single_steps(run: Any, golden: Callable[[str, str], None]) -> None:
    trainer = Trainer(islands.net, islands.loss, CASES["sgd"].optimizer, BATCH, plan="micro=2 local=2 every=2")
    with pytest.raises(UsageError) as refused:
        trainer.step([part[:4] for part in DATA.tensors])
    golden("refused: a single step", str(refused.value))


@pytest.mark.parametrize(
    ("plan", "size"), [("local=3 every=2 outer=sgd:1", 4099), ("local=3 every=2 outer=sgd:1 fragments=1 delay=1", 4127)]
)
def test_islands_keep_no_copy_of_the_weights_between_rounds(plan: str, size: int, run: Any) -> None:
    """With optimizers that keep nothing, the weight is the only tensor of its size."""
    trainer = Trainer(
        lambda: nn.Linear(1, size, bias=False),
        lambda output, batch: output.mean(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        6,
        plan=f"micro=2 {plan}",
    )
    for _ in trainer.steps(TensorDataset(torch.ones(12, 1)), count=4):
        gc.collect()
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.numel() == size]
        tensors = [one for one in tensors if one.device.type == "cpu"]  # a skeleton of the model has no values
        assert len({one.untyped_storage().data_ptr() for one in tensors}) == 1


def test_a_worker_keeps_the_island_that_it_has() -> None:
    assert assign_islands(5, [(), ()]) == [[0, 1, 2], [3, 4]]
    assert assign_islands(4, [{0, 1}, {2, 3}, ()]) == [[0], [2, 3], [1]]
    assert assign_islands(4, [{0, 1}, {2}]) == [[0, 1], [2, 3]]
    assert assign_islands(2, [{1}, {0, 1}]) == [[1], [0]]
