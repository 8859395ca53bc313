"""One table of recovery: every fault, at every moment of a step, of every process, under every plan. In each cell the
run ends with exit code 0, and its weights are those of the undisturbed run.

A row is one run in which its cells happen one after another, each in a complete team. The fast rows are a covering
array: every two values of different axes meet in one of their cells. The slow rows are the whole table.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from agents import until
from checkpoints import find_checkpoint
from covering import pairwise
from fault_runs import STEPS as LAST
from fault_runs import WORKERS, Undisturbed, fired, same, train
from fault_runs import undisturbed as undisturbed
from launching import SCRIPTS, paceline
from once import once
from oracle import apart
from safetensors.torch import load_file

from paceline.base.journal import effective_steps, read_journal
from paceline.team.fault_injection import parse_faults, read_log

SERVERS = 1_000_000  # the number of the first parameter server
FAULTS = ("kill", "stop", "raise", "exit")
PHASES = {
    "forward": ("loading", "forward"),
    "backward": ("backward", "summed"),
    "update": ("reduced", "applied"),
    "checkpoint": ("saving", "writing"),
    "new team": ("forming", "hand-over"),
}
MOMENTS = tuple(moment for moments in PHASES.values() for moment in moments)
TARGETS = ("worker 0", "last worker", "several workers", "server", "coordinator")


@dataclass(frozen=True)
class Plan:
    """A plan of the table. `undisturbed`: the plan with which one worker gives the expected weights."""

    words: str
    workers: int = 4
    several: tuple[int, ...] = (2, 3)  # which the others survive; none: nobody has what two of them had
    moments: Sequence[str] = MOMENTS[:-2]  # in the others a replica of two would be lost beside another one
    undisturbed: str = "micro=2 exact"
    model: str = "norm"
    of_server: Sequence[str] = ()  # the moments of a parameter server
    steps: int = 48


STREAMING = "micro=2 local=3 every=4 fragments=2 delay=1"
OF_ROUND = ("loading", "backward", "summed", "reduced", "applied")
OF_ISLANDS: Any = {"workers": 3, "several": (), "moments": OF_ROUND, "steps": 48}
BY_SERVERS: Any = {"workers": 3, "several": (1, 2)}
# Their workers come to the sums and the update once, at the end, and servers write the checkpoints.
OUT_OF_STEP: Any = {"model": "rows", "steps": 60, "of_server": ("reduced", "applied"), "several": (1, 2)}
OUT_OF_STEP["moments"] = ("loading", "forward", "backward", "saving")
PLANS = {
    "data": Plan("micro=2", several=(0, 3), moments=MOMENTS, steps=50),
    "exact": Plan("micro=2 exact", several=(0, 3), moments=MOMENTS, steps=50),
    **{f"zero={zero}": Plan(f"micro=2 exact shard=2 zero={zero}") for zero in (1, 2, 3)},
    "tensor": Plan("micro=4 tensor=2 recompute=blocks", undisturbed="micro=4", model="attention"),
    "pipeline": Plan("micro=4 pipeline=2", undisturbed="micro=4", model="attention"),
    "streaming": Plan(STREAMING, undisturbed=STREAMING, **OF_ISLANDS),
    "servers": Plan("micro=2 server=2 copies=1", of_server=("summed", "reduced", "applied"), **BY_SERVERS),
    "async": Plan("micro=2 server=2 copies=1 staleness=2 window=3", workers=3, **OUT_OF_STEP),
    "backup": Plan("micro=2 server=2 copies=1 backup=1 window=3", workers=3, **OUT_OF_STEP),
}
FAST = ("exact", "zero=3", "servers")  # the tests of the other plans have a fast fault each


class Cell(NamedTuple):
    fault: str
    moment: str
    target: str
    plan: str


def is_valid(fault: str, moment: str, target: str, plan: str) -> bool:
    """Whether there is such a cell: a process of the target comes to the moment under the plan."""
    of = PLANS[plan]
    if target == "server":
        return fault in ("kill", "stop") and moment in of.of_server
    if target == "coordinator":
        return fault == "kill" and moment in of.moments and moment not in ("writing", "forming", "hand-over")
    if target == "several workers" and not of.several:
        return False
    if moment == "writing":  # what is not large is written by worker 0, and an exception in its thread ends no worker
        return moment in of.moments and fault != "raise" and target == "worker 0"
    return moment in of.moments


def faults_of(cell: Cell, group: int) -> list[str]:
    """The words of PACELINE_CHAOS. What is lost while the team forms anew needs a loss before."""
    plan = PLANS[cell.plan]
    last = plan.workers - 1
    if cell.target == "coordinator":
        return [f"wait:0@{group}.{cell.moment}"]
    targets = {"worker 0": (0,), "last worker": (last,), "several workers": plan.several, "server": (SERVERS + 1,)}
    first = {"forming": [f"kill:1@{group}.loading"], "hand-over": [f"kill:{last}@{group}.forward"]}
    more = [f"{cell.fault}:{number}@{group}.{cell.moment}" for number in targets[cell.target]]
    return first.get(cell.moment, []) + more


def rows(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells by plan. A server does not know when all are back, and so those of servers come first."""
    return {plan: sorted((c for c in cells if c.plan == plan), key=lambda c: c.target != "server") for plan in PLANS}


def run(folder: Path, plan: Plan, workers: int, steps: int, faults: Sequence[str] = ()) -> str:
    words = plan.words if workers > 1 else plan.undisturbed
    options = ("--workers", str(workers), "--run-dir", "run", "--plan", words, "--max-restarts", "50")
    command = ("run", *options, SCRIPTS / "recovery.py", plan.model, str(steps), str(workers))
    return paceline(*command, cwd=folder, PACELINE_CHAOS=",".join(faults)).stderr


def check_row(cells: Sequence[Cell], factory: pytest.TempPathFactory, folder: Path, longer: int = 1) -> None:
    """All faults of the cells fire, and the weights, to the bit where the plan says so, are the undisturbed ones."""
    plan, steps = PLANS[cells[0].plan], longer * PLANS[cells[0].plan].steps
    faults = [fault for group, cell in enumerate(cells, 1) for fault in faults_of(cell, group)]
    text = run(folder, plan, plan.workers, steps, faults)
    assert {entry["fault"] for entry in read_log(folder / "run")} == {*faults}, f"a fault did not fire: {text}"
    events = read_journal(folder / "run")
    losses = [{*event["workers"], *event.get("mates", ())} for event in events if event["event"] == "lost"]
    struck = [fault for fault in parse_faults(",".join(faults)) if fault.kind != "wait"]
    assert {fault.worker for fault in struck if fault.moment not in ("writing", "hand-over")} <= {*chain(*losses)}
    if plan.several == (2, 3):
        assert all({worker ^ 1 for worker in lost} == lost for lost in losses), "a replica starts anew as a whole"
    again = "the coordinator ended (SIGKILL) and is restarted" in text
    assert again == (len(struck) < len(faults))
    journaled = [event["step"] for event in effective_steps(events)]
    assert journaled == sorted({*journaled})
    weights, counted = load_file(folder / "out.safetensors"), json.loads((folder / "out.json").read_text())
    if plan.model == "rows":
        check_each_row_counted_once(weights, steps, all_come=cells[0].plan != "backup")
    else:
        wanted = once(factory, f"undisturbed {plan.undisturbed} {steps}", lambda folder: run(folder, plan, 1, steps))
        limit = 0.0 if "exact" in plan.words else 1e-12
        assert apart(weights, load_file(wanted / "out.safetensors")) <= limit
        assert counted == json.loads((wanted / "out.json").read_text())
    left = lambda: [one.info for one in psutil.process_iter(["cwd", "cmdline"]) if one.info["cwd"] == str(folder)]
    until(lambda: not left(), 10.0)  # what wakes a stopped worker waits for two seconds


def check_each_row_counted_once(weights: dict[str, torch.Tensor], steps: int, all_come: bool) -> None:
    """Each row of the dataset has been taken away from its weight once in each epoch; see scripts/counted.py.

    Unless all rows come in time, a step is a mean over those that do.
    """
    rows = weights["rows"]
    assert float(rows.sum()) == pytest.approx(-6.0 * steps, rel=1e-12)
    assert not all_come or torch.equal(rows, torch.full_like(rows, -6.0 * steps / len(rows)))
    assert torch.equal(weights["more"], torch.full([7], -6.0 * steps, dtype=torch.float64))


def covering() -> list[Cell]:
    """Every two of a fault, a phase, a target and a plan are in a cell, whose moment is one that is in the fewest."""
    cells: list[Cell] = []

    def moments(fault: str, phase: str, target: str, plan: str) -> list[str]:
        return [moment for moment in PHASES[phase] if is_valid(fault, moment, target, plan)]

    for fault, phase, target, plan in pairwise(FAULTS, [*PHASES], TARGETS, FAST, valid=lambda *one: any(moments(*one))):
        used = Counter(cell.moment for cell in cells)
        moment = min(moments(fault, phase, target, plan), key=lambda moment: used[moment])
        cells.append(Cell(fault, moment, target, plan))
    return cells


COVERING = rows(covering())


def test_covering_has_all_moments() -> None:
    assert {cell.moment for cells in COVERING.values() for cell in cells} == {*MOMENTS}


@pytest.mark.parametrize("plan", FAST)
def test_kill_stop_raise_exit_in_all_phases_give_the_undisturbed_weights(
    plan: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    check_row(COVERING[plan], tmp_path_factory, tmp_path)


def all_rows() -> list[list[Cell]]:
    """All cells, in rows by plan, fault and target. A coordinator that is killed too often at once ends the run, and an
    island whose copies are lost before they are made again is lost.
    """
    found = []
    for plan, fault, target in product(PLANS, FAULTS, TARGETS):
        cells = [Cell(fault, m, target, plan) for m in PLANS[plan].moments if is_valid(fault, m, target, plan)]
        most = 1 if not PLANS[plan].several else 4 if target == "coordinator" else len(MOMENTS)
        found += [cells[start : start + most] for start in range(0, len(cells), most)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "cells", all_rows(), ids=lambda cells: f"{cells[0].plan}-{cells[0].fault}-{cells[0].target}-{cells[0].moment}"
)
def test_each_fault_of_each_target_under_each_plan_gives_the_undisturbed_weights(
    cells: list[Cell], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    check_row(cells, tmp_path_factory, tmp_path, longer=min(2, len(cells)))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("targets", [(0,), (1,), (3,), (1, 4)])
def test_fault_while_several_workers_write_a_checkpoint_gives_the_undisturbed_bytes(
    fault: str, targets: tuple[int, ...], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The model is so large that all six workers write. An exception in the thread that writes ends no worker."""
    faults = {f"{fault}:{worker}@9.writing" for worker in targets}
    ended = train(tmp_path, WORKERS, LAST, ",".join(faults), ballast=WORKERS)
    assert fired(ended) == faults, "a fault did not fire"
    same(ended, undisturbed["writing"])
    newest = find_checkpoint(ended.folder, pytest.fail)
    assert newest is not None
    assert newest.step == LAST
    assert len(newest.manifest["files"]) > 1, "more than one worker wrote the checkpoint"
    if fault == "raise":
        assert "training continues without this checkpoint: worker " in ended.text
    else:
        assert {*targets} <= {worker for event in ended.events("lost") for worker in event["workers"]}
