"""Islands give what a loop by hand gives: on any number of workers, which are dealt to them or they to it."""

from __future__ import annotations

import copy
import gc
import json
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

import islands
import pytest
import torch
from agents import until
from by_hand import built, grid
from islands import BATCH, CASES, DATA, MICRO, ROWS, SEED, STEPS
from launching import SCRIPTS, paceline
from oracle import apart
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset
from warm import Process, environment

from paceline import Trainer, plateau, stream_seed
from paceline.base.batching import deal
from paceline.base.journal import read_journal
from paceline.errors import PacelineError, UsageError
from paceline.local_sgd.island_migration import assign_islands
from paceline.team.coordinator import STOPPED
from paceline.team.fault_injection import read_log

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


def trained(
    folder: Path, workers: int, plan: str, *names: str, options: tuple[str, ...] = (), code: int = 0, **env: str
) -> str:
    """What the command says."""
    said = ("--workers", str(workers), "--run-dir", "run", *options)
    done = paceline("run", *said, SCRIPTS / "islands.py", folder, plan, *names, cwd=folder, code=code, **env)
    return done.stdout + done.stderr


def right(folder: Path, *plan: Any, by_hand: Callable[..., Any] = by_hand) -> None:
    """Weights, and all figures that there are, as by hand."""
    for name, one in json.loads((folder / "told.json").read_text()).items():
        weights, figures = by_hand(name, *plan)
        assert apart(load_file(folder / f"{name}.safetensors"), weights) <= TOLERANCE, name
        by_step = {theirs["step"]: theirs for theirs in figures}
        for mine in one["figures"]:
            mine |= mine.pop("metrics")
            assert {key: mine[key] for key in by_step[mine["step"]]} == pytest.approx(by_step[mine["step"]], rel=1e-9)
        assert one["evaluated"]["n"] == ROWS


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
    (4, "pipeline=2 local=2 every=3", 2, 3, DILOCO),
    (2, "tensor=2 local=2 every=3", 2, 3, DILOCO),
    (4, "tensor=2 local=2 every=3", 2, 3, DILOCO),
]


@pytest.mark.parametrize(
    ("workers", "plan", "count", "every", "outer"),
    [*TEAMS, *[pytest.param(*team, marks=pytest.mark.slow) for team in SLOW]],
    ids=lambda value: str(value) if isinstance(value, int | str) else "",
)
def test_islands_are_a_loop_by_hand(
    workers: int, plan: str, count: int, every: int, outer: tuple[float, float, bool], tmp_path: Path
) -> None:
    cut = "pipeline" in plan or "tensor" in plan
    trained(tmp_path, workers, plan, *(["blocks"] if cut else [name for name in CASES if name != "blocks"]))
    right(tmp_path, count, every, outer)


TWO = 2, 3, DILOCO
# By the number of workers: who has an island's state. One who has it alone gives another one a copy.
HAVE = {2: [{0, 1}, {0, 1}], 3: [{0, 1}, {0, 2}], 5: [{0, 1, 2}, {3, 4}]}
MOMENTS = ("loading", "backward", "summed", "reduced", "applied", "forming")


@pytest.mark.parametrize(
    ("workers", "worker", "moment"),
    [
        (3, 1, "reduced"),
        *[
            pytest.param(workers, worker, moment, marks=pytest.mark.slow)
            for workers in (2, 3, 5)
            for worker in range(workers)
            for moment in MOMENTS
            if (workers, worker, moment) != (3, 1, "reduced") and (workers > 2 or moment != "forming")
        ],
    ],
)
def test_whoever_is_lost_nothing_else_is(workers: int, worker: int, moment: str, tmp_path: Path) -> None:
    """`forming`: in the generation that another loss makes. Where both who have an island are lost, a line says so."""
    faults = {f"kill:{worker}@3.{moment}"}
    lost = {worker}
    if moment == "forming":
        lost.add((worker + 1) % workers)
        faults.add(f"kill:{(worker + 1) % workers}@3.backward")
    said = trained(tmp_path, workers, "local=2 every=3", "adamw", PACELINE_CHAOS=",".join(sorted(faults)))
    assert {entry["fault"] for entry in read_log(tmp_path / "run")} == faults, "a fault did not fire"
    gone = [island for island, has in enumerate(HAVE[workers]) if has <= lost]
    told = "island {} was lost with what its optimizer keeps: it goes on with a copy of what that of island {} does"
    assert [island for island in (0, 1) if told.format(island, 1 - island) in said] == gone
    if not gone:
        right(tmp_path, *TWO)


def test_an_island_that_nobody_has_is_taken_from_the_last_checkpoint(tmp_path: Path) -> None:
    """Which is that of the first loop's end, where the round that is done again began."""
    weights = []
    for faults in ("", "kill:0@4.backward,kill:2@4.forming"):
        (folder := tmp_path / f"run-{len(weights)}").mkdir()
        said = trained(folder, 3, "local=2 every=2", "adamw", LOOPS="4,4", PACELINE_CHAOS=faults)
        weights.append(load_file(folder / "adamw.safetensors"))
    assert {entry["fault"] for entry in read_log(folder / "run")} == {*faults.split(",")}
    assert "island 1 was lost with what its optimizer keeps: it goes on with that of the checkpoint of step 4\n" in said
    assert apart(*weights) <= TOLERANCE


@pytest.mark.parametrize("worker", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_who_is_lost_in_the_midst_of_a_round_does_that_again(worker: int, tmp_path: Path) -> None:
    """The loss is called twice in the first step, where losses are looked at, and thrice in the next two."""
    said = trained(tmp_path, 3, "local=3 every=4 outer=sgd:0.9", "adamw", KILL=f"{worker}:7")
    assert (tmp_path / "killed").exists()
    assert f"worker {worker} was killed by SIGKILL: 2 workers go on" in said
    right(tmp_path, 3, 4, (0.9, 0.0, False))


@pytest.mark.parametrize("workers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_with_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    trained(tmp_path, 3 - workers % 2, "local=2 every=3", "adamw", options=("--steps", "3"))
    said = trained(tmp_path, workers, "local=2 every=3", "adamw")
    assert "resuming from step 3" in said
    right(tmp_path, *TWO)


def test_a_checkpoint_goes_on_without_islands_and_into_them(tmp_path: Path) -> None:
    trained(tmp_path, 2, "local=2 every=3", "momentum", options=("--steps", "3"))
    said = trained(tmp_path, 2, "data=2", "momentum", options=("--steps", "4"))
    assert (
        "changed mathematics: training goes on without islands, with what the optimizer of island 0 keeps; "
        "that of the others and of the merges is dropped"
    ) in said
    said = trained(tmp_path, 1, "local=2 every=2", "momentum", options=("--steps", "6"))
    assert "changed mathematics: training goes on in 2 islands, each with what the optimizer keeps" in said
    said = trained(tmp_path, 1, "local=3 every=2", "momentum")
    assert (
        "changed mathematics: 2 islands are 3 from here: each goes on with what the optimizer of island 0 keeps" in said
    )


def stopped_in_a_round(folder: Path, plan: str) -> None:
    """Two workers are told to stop in their second round of 4 steps, in which each calls the loss about twelve times,
    and go on.
    """
    command = ("run", "--workers", "2", "--run-dir", "run", str(SCRIPTS / "islands.py"), str(folder))
    command = (sys.executable, "-m", "paceline", *command, plan, "adamw")
    with Process(command, environment(SLOW="20"), cwd=folder, stdout=PIPE, stderr=PIPE) as process:
        until((folder / "reached").exists)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == STOPPED, stdout + stderr
    assert "stopped after step 4; saved" in stdout + stderr
    trained(folder, 2, plan, "adamw")


def test_a_stop_in_the_midst_of_a_round_saves_its_start(tmp_path: Path) -> None:
    stopped_in_a_round(tmp_path, "local=2 every=4")
    right(tmp_path, 2, 4, DILOCO)
    records = [(event["step"], event["steps"]) for event in read_journal(tmp_path / "run") if event["event"] == "step"]
    assert sum(steps for _, steps in records) == records[-1][0]


@pytest.mark.parametrize(
    ("plan", "more", "told"),
    [
        (
            "local=9 every=2",
            {},
            "local=9: its global batch of 12 rows is 6 micro-batches, and each island needs one; say micro=1, which "
            "changes the mathematics",
        ),
        (
            "local=2 every=2",
            {"loss_over": "batch"},
            'local=2: loss_over="batch" needs the whole global batch at once; leave one of the two out',
        ),
        (
            "local=2 every=2",
            {"schedule": plateau("loss")},
            "schedule=paceline.plateau(...) does not work with local=2, where optimizers are at several steps; "
            "take a schedule of steps, or leave local=2 out",
        ),
        ("local=2 every=2 exact", {}, "exact and local=2 are not built together yet; leave exact or local out"),
        (
            "local=2 every=2 codec=int8",
            {},
            "codec=int8 and local=2 are not built together yet; leave codec=int8 or local out",
        ),
        (
            "local=2 every=2 precision=fp16",
            {},
            "precision=fp16 and local=2 are not built together yet; leave precision=fp16 or local out",
        ),
    ],
)
def test_what_does_not_fit_is_refused(plan: str, more: dict[str, Any], told: str, run: Any) -> None:
    with pytest.raises(PacelineError) as refused:
        Trainer(islands.net, islands.loss, CASES["sgd"].optimizer, BATCH, plan=f"micro=2 {plan}", **more)
    assert str(refused.value) == told


def test_single_steps_are_refused(run: Any) -> None:
    trainer = Trainer(islands.net, islands.loss, CASES["sgd"].optimizer, BATCH, plan="micro=2 local=2 every=2")
    with pytest.raises(UsageError) as refused:
        trainer.step([part[:4] for part in DATA.tensors])
    assert str(refused.value) == (
        "step() brings the rows of one step, and under local=2 a turn of the loop has several; "
        "use steps(), or leave local=2 out"
    )


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
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.numel() == size]
        assert len({one.untyped_storage().data_ptr() for one in tensors}) == 1


def test_who_has_an_island_keeps_it() -> None:
    assert assign_islands(5, [(), ()]) == [[0, 1, 2], [3, 4]]
    assert assign_islands(4, [{0, 1}, {2, 3}, ()]) == [[0], [2, 3], [1]]
    assert assign_islands(4, [{0, 1}, {2}]) == [[0, 1], [2, 3]]
    assert assign_islands(2, [{1}, {0, 1}]) == [[1], [0]]
