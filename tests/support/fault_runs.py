"""Runs of scripts/survivor.py with faults, and the undisturbed runs that they are compared with."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import SCRIPTS, paceline
from once import once
from oracle import apart
from safetensors.torch import load_file

from paceline.base.journal import effective_steps, read_journal
from paceline.team.fault_injection import GO, read_log

WORKERS, STEPS, LONG = 6, 16, 90
MOMENTS = ("loading", "forward", "backward", "summed", "reduced", "applied", "saving", "writing", "forming")


@dataclass
class Ended:
    weights: bytes
    told: dict[str, object]
    samples: list[int]
    folder: Path
    text: str

    def events(self, kind: str) -> list[dict[str, object]]:
        return [event for event in read_journal(self.folder) if event["event"] == kind]


def train(
    folder: Path,
    workers: int,
    steps: int,
    faults: str = "",
    wait: str = "",
    loaders: int = 0,
    preexec: Callable[[], None] | None = None,
    ballast: int = 0,
    plan: str = "micro=2 exact",
    spares: int = 0,
) -> Ended:
    """Runs the script to its end with faults. `wait`: long runs go slowly until there are so many lines of a file. With
    `spares`, the first fault must be a wait; it ends when all of these workers are ready.
    """
    out, run = folder / "out", folder / "run"
    env = {"PACELINE_CHAOS": faults, "BALLAST": str(ballast)} | ({"WAIT": wait} if wait else {})
    options = ("--workers", str(workers), "--run-dir", str(run), "--plan", plan)
    options = (*options, "--spares", str(spares)) if spares else options
    command = ("run", *options, SCRIPTS / "survivor.py", out, str(steps), str(loaders))
    with ready_spares(run, spares):
        done = paceline(*command, cwd=folder, preexec=preexec, **env)
    steps_written = effective_steps(read_journal(run))
    assert [event["step"] for event in steps_written] == sorted({event["step"] for event in steps_written})
    assert sum(event["steps"] for event in steps_written) == steps, "a step is missing in the journal, or there twice"
    return outcome(folder, done.stderr)


@contextmanager
def ready_spares(run: Path, count: int) -> Iterator[None]:
    """Ends the waiting fault of a run once so many spares are ready."""
    ready, ended = threading.Event(), threading.Event()

    def watch() -> None:
        while not (ready.is_set() or ended.wait(0.02)):
            journal = run / "journal.jsonl"
            events = read_journal(run) if journal.exists() else []
            if any(event["event"] == "spares" and len(event["workers"]) == count for event in events):
                ready.set()
        (run / GO).touch()

    watcher = threading.Thread(target=watch if count else ready.set)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    assert ready.is_set(), "the spares were never ready"


def outcome(folder: Path, text: str) -> Ended:
    """The results that `train` left in the folder."""
    weights, told = (folder / "out.safetensors").read_bytes(), json.loads((folder / "out.json").read_text())
    samples = [event["samples"] for event in effective_steps(read_journal(folder / "run"))]
    return Ended(weights, told, samples, folder / "run", text)


class Undisturbed:
    """The results of one worker, by the number of steps; `writing`: of a run whose checkpoints all workers write."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def __getitem__(self, kind: int | str) -> Ended:
        steps, ballast = (STEPS, WORKERS) if kind == "writing" else (int(kind), 0)
        made = once(self._factory, f"team of {kind}", lambda folder: train(folder, 1, steps, ballast=ballast))
        return outcome(made, "")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory)


def same(ended: Ended, undisturbed: Ended) -> None:
    """Asserts the undisturbed bytes and figures, and that no process of the run is left."""
    assert ended.weights == undisturbed.weights
    losses, all_losses = ended.told["losses"], undisturbed.told["losses"]
    assert isinstance(losses, list)
    assert isinstance(all_losses, list)
    assert ended.told["seen"] == undisturbed.told["seen"]
    # The main worker writes those that it has seen: one that came late has few.
    assert losses == all_losses[len(all_losses) - len(losses) :]
    assert sum(ended.samples) == sum(undisturbed.samples)
    left = subprocess.run(["pgrep", "-f", str(ended.folder.parent)], capture_output=True, text=True).stdout.split()
    assert [pid for pid in left if int(pid) != os.getpid()] == []


def fired(ended: Ended) -> set[object]:
    """The faults that fired in the run."""
    return {entry["fault"] for entry in read_log(ended.folder)}


class Calm:
    """The undisturbed results of plans whose weights are equal to rounding, by the number of steps and environment."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def of(self, steps: int, words: str = "") -> Path:
        plan, kind = f"micro=4 {words}", [os.environ.get(name) for name in ("ATTENTION", "EXPERTS", "DTYPE")]
        return once(self._factory, f"calm: {steps} {words} {kind}", lambda at: train(at, 1, steps, plan=plan))

    def meets_after(self, fault: str, ended: Ended, steps: int) -> None:
        """Asserts that this fault alone fired, and what `meets` asserts."""
        assert fired(ended) == {fault}
        self.meets(ended, steps)

    def meets_kill(self, folder: Path, plan: str, worker: int, moment: str, step: int = 11) -> Ended:
        """Trains with four workers, one of which is killed, and asserts what `meets_after` asserts."""
        fault = f"kill:{worker}@{step}.{moment}"
        ended = train(folder, 4, STEPS, fault, plan=f"micro=4 {plan}")
        self.meets_after(fault, ended, STEPS)
        return ended

    def meets(self, ended: Ended, steps: int) -> None:
        """Asserts the same weights, to rounding, and the same values that the script counted."""
        folder = self.of(steps)
        told = json.loads((folder / "out.json").read_text())
        weights, expected = (load_file(where / "out.safetensors") for where in (ended.folder.parent, folder))
        weights.pop("ballast", None)
        assert apart(weights, expected) <= 1e-12
        assert ended.told["seen"] == told["seen"]
        losses, all_losses = ended.told["losses"], told["losses"]
        assert isinstance(losses, list)
        since_return = all_losses[len(all_losses) - len(losses) :]
        for one, other in zip(losses, since_return, strict=True):
            assert one == pytest.approx(other, rel=1e-12)


@pytest.fixture
def calm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Calm:
    monkeypatch.setenv("DTYPE", "float64")
    return Calm(tmp_path_factory)
