"""Runs of scripts/served.py and scripts/counted.py, which train with parameter servers, and how they are checked."""

from __future__ import annotations

import json
import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import served
import torch
from agents import until
from launching import SCRIPTS, paceline
from oracle import Plain, Weights, apart, built, grid
from safetensors.torch import load_file
from served import BATCH, CLIP, MICRO, ROWS, SEED
from torch.optim.lr_scheduler import LambdaLR
from warm import Process, environment

from paceline.base.exit_codes import STOPPED
from paceline.base.journal import read_journal

STEPS, TOLERANCE = 8, 1e-12  # of served.py
COUNTED_BATCH, COUNTED_ROWS = 6, 30  # of counted.py
PACE = {"PACE": "0.004"}
KILLED = "was killed by SIGKILL"


# -- served.py --------------------------------------------------------------------------------------------------------


def plain_served(make: Callable[[Any], Any] = served.groups, wrap: Callable[[Any], Any] = lambda one: one) -> Plain:
    """The training of served.py in one process, before its first step; its optimizer may be wrapped in another."""
    torch.set_num_threads(1)
    model = built(served.net, SEED)
    optimizer = make(model.named_parameters())
    loss = lambda output, batch: (output - batch[1]).square().sum(1).mean()
    return Plain(
        model, loss, [wrap(optimizer)], schedulers=[LambdaLR(optimizer, served.rate)], seed=SEED, clip_norm=CLIP
    )


def served_steps() -> list[list[Any]]:
    return grid(served.data(), BATCH, MICRO, count=STEPS, seed=SEED)


@cache
def served_by_hand(late: frozenset[tuple[int, int]] = frozenset()) -> tuple[Weights, list[list[float]]]:
    """Weights, and step, loss, rate and norm of each step, without the micro-batches that came too `late`, each with
    its step.
    """
    plain = plain_served()
    for number, batch in enumerate(served_steps(), 1):
        plain.step(batch, [index for index in range(len(batch)) if (number, index) not in late])
    figures = zip(plain.losses, plain.rates, plain.norms, strict=True)
    return plain.model.state_dict(), [[number, *one] for number, one in enumerate(figures, 1)]


def served_command(workers: int, plan: str, *options: str) -> tuple[str, ...]:
    start = ("run", "--workers", str(workers), "--run-dir", "run", "--plan", f"micro={MICRO} {plan}", *options)
    return (*start, str(SCRIPTS / "served.py"), ".", str(STEPS))


def train_served(folder: Path, workers: int, plan: str, *options: str, code: int = 0, **env: str) -> str:
    done = paceline(*served_command(workers, plan, *options), cwd=folder, code=code, **env)
    return done.stdout + done.stderr


def check_served_weights(folder: Path) -> None:
    assert apart(load_file(folder / "out.safetensors"), served_by_hand()[0]) <= TOLERANCE


def check_served(folder: Path, first: int = 1) -> None:
    """Weights, and the figures of the steps from this one on, are those of one process."""
    check_served_weights(folder)
    reported = json.loads((folder / "told.json").read_text())
    for figures, expected in zip(reported["figures"], served_by_hand()[1][first - 1 :], strict=True):
        assert figures == pytest.approx(expected, rel=1e-9)
    assert [one["n"] for one in reported["evaluated"]] == [ROWS, ROWS]


def check_served_from_checkpoint(folder: Path) -> None:
    """As `check_served`, where all went back to a checkpoint: figures are those of the steps since then."""
    check_served(folder, first=STEPS + 1 - len(json.loads((folder / "told.json").read_text())["figures"]))


def stop_at_a_mark(arguments: tuple[str, ...], folder: Path, mark: str = "reached", **env: str) -> int:
    """Sends SIGTERM to `paceline ARGUMENTS...` when there is the file `mark`; the step of the checkpoint that it saves,
    if any.
    """
    command = [sys.executable, "-m", "paceline", *arguments]
    with Process(command, environment(**env), cwd=folder, stdout=PIPE, stderr=PIPE) as process:
        until((folder / mark).exists)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == STOPPED, stderr
    saved = sorted((folder / "run" / "checkpoints").glob("step-*"))
    return int(saved[-1].name.removeprefix("step-")) if saved else 0


# -- counted.py -------------------------------------------------------------------------------------------------------


def counted_command(workers: int, plan: str, steps: int, *options: str) -> tuple[str, ...]:
    start = ("run", "--workers", str(workers), "--run-dir", "run", "--plan", plan, *options)
    return (*start, str(SCRIPTS / "counted.py"), ".", str(steps))


def train_counted(folder: Path, workers: int, plan: str, steps: int, *options: str, micro: int = 3, **env: str) -> str:
    command = counted_command(workers, f"micro={micro} {plan}", steps, *options)
    done = paceline(*command, cwd=folder, **{**PACE, **env})
    return done.stdout + done.stderr


def stop_counted(folder: Path, plan: str, steps: int, workers: int = 3, **env: str) -> int:
    """SIGTERM comes when the first worker has made four steps; how many the checkpoint has."""
    command = counted_command(workers, plan, steps)
    done = stop_at_a_mark(command, folder, **{"REACHED": "0:8", "PACE": "0.05", **env})
    assert 0 < done < steps // 2
    return done


def windows_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_journal(folder / "run") if event["event"] == "window"]


def counted_weights(folder: Path) -> Weights:
    """The rows may be a table's."""
    weights = load_file(folder / "out.safetensors")
    return weights | {"rows": weights.pop("table.weight").flatten()} if "table.weight" in weights else weights


def check_each_row_counted_once(folder: Path, steps: int, first: int = 0) -> list[dict[str, Any]]:
    """Every row of every update, exactly; the windows of the journal, which are of the steps from the `first` on."""
    weights = counted_weights(folder)
    each = torch.full([COUNTED_ROWS], -steps * COUNTED_BATCH / COUNTED_ROWS, dtype=torch.float64)
    assert torch.equal(weights["rows"], each)
    assert torch.equal(weights["more"], torch.full([7], -steps * COUNTED_BATCH, dtype=torch.float64))
    assert weights["norm.num_batches_tracked"] == steps * COUNTED_BATCH // 3
    turns = json.loads((folder / "told.json").read_text())
    assert turns[-1][0] == steps
    assert [samples for _, _, samples in turns] == [turn * COUNTED_BATCH for _, turn, _ in turns]
    assert sum(turn for _, turn, _ in turns) == steps - first
    return windows_of(folder) if (folder / "run").exists() else []


def read_versions(folder: Path) -> list[Any]:
    """Of a table. Of each reading how many servers there were, how many updates were asked for, and the table and the
    rest had; never fewer, nor a part of one.
    """
    versions = [json.loads(line) for line in (folder / "versions").read_text().splitlines()]
    assert all(asked <= table == int(table) for _, asked, table, _ in versions)
    return versions


def check_tables_are_equal(folder: Path, workers: int) -> None:
    """At the end of each turn, of which all but the newcomers have each."""
    tables = defaultdict[int, list[Any]](list)
    for line in (folder / "turns").read_text().splitlines():
        step, table = json.loads(line)
        tables[step].append(table)
        assert sum(table) == -step * COUNTED_BATCH
    assert all(table == some[0] for some in tables.values() for table in some)
    assert max(map(len, tables.values())) == workers


# -- servers that are lost --------------------------------------------------------------------------------------------


def check_nobody_went_back(folder: Path, output: str, *lost: int) -> None:
    """Each of these servers was lost, once, and has come again; all others are still in their first processes."""
    assert "go back" not in output
    events = read_journal(folder / "run")
    ended = [one["server"] for one in events if one["event"] == "server" and one["what"] == "ended"]
    assert sorted(ended) == sorted(lost)
    started = [one for one in events if one["event"] in ("server", "worker") and one["what"] == "started"]
    assert sorted(one["server"] for one in started if one["life"]) == sorted(lost)
    assert [one["workers"] for one in events if one["event"] == "lost"] == [[1000000 + server] for server in lost]
