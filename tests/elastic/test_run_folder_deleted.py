"""A run folder that is deleted, moved or changed in mid-run: it is said at once, and training ends as it would have."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from agents import until
from launching import paceline
from once import once
from warm import Process, environment

from paceline.base.journal import effective_steps, read_journal

STEPS = 30
# Goes slowly until there is "gate".
SCRIPT = f"""
import os, time
from basics import *
trainer = make(plan="exact micro=3")
for report in trainer.steps(data, count={STEPS}):
    if report.step == 5:
        open(f"half-{{os.environ.get('PACELINE_RANK', '0')}}-{{os.getpid()}}", "w").close()
    time.sleep(0 if os.path.exists("gate") else 0.1)
trainer.export("out.safetensors")
"""
AGAIN = (
    "training continues, and the journal, token and logs are written there again; "
    "earlier logs and checkpoints are missing"
)
DELETED = f"the run folder run was deleted or moved: {AGAIN}"
REPORT = "report  run/report.html"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    def make(folder: Path) -> None:
        (folder / "train.py").write_text(SCRIPT)
        (folder / "gate").touch()
        paceline("run", "train.py", cwd=folder)

    return (once(tmp_path_factory, "undisturbed in its run folder", make) / "out.safetensors").read_bytes()


class Running:
    """A run of `SCRIPT` that has made some steps."""

    def __init__(self, folder: Path, *options: str) -> None:
        (folder / "train.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--run-dir", "run", *options, "train.py"]
        self.folder, self.run, self._console = folder, folder / "run", folder / "console"
        with self._console.open("wb") as out:
            quiet = subprocess.DEVNULL
            self.process = Process(
                command, environment(), cwd=folder, stdin=quiet, stdout=out, stderr=subprocess.STDOUT
            )
        until(lambda: len([*folder.glob("half-*")]) == 2 or self.process.poll() is not None)

    @property
    def text(self) -> str:
        return self._console.read_text()

    def says(self, line: str) -> None:
        until(lambda: line in self.text.splitlines() or self.process.poll() is not None)
        assert line in self.text.splitlines(), self.text

    def kill_coordinator(self) -> None:
        children = psutil.Process(self.process.pid).children()
        (coordinator,) = [child for child in children if "paceline.team.coordinator_server" in child.cmdline()]
        coordinator.kill()
        self.says("the coordinator ended (SIGKILL) and is restarted; training continues")

    def kill_worker(self) -> None:
        """Training needs the coordinator then."""
        (half,) = self.folder.glob("half-1-*")
        os.kill(int(half.name.rpartition("-")[2]), signal.SIGKILL)

    def end(self, undisturbed: bytes) -> str:
        """Its console; it has finished."""
        (self.folder / "gate").touch()
        assert self.process.wait(120) == 0, self.text
        assert (self.folder / "out.safetensors").read_bytes() == undisturbed
        return self.text


Begin = Callable[..., Running]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    made: list[Running] = []

    def start(*options: str) -> Running:
        made.append(Running(tmp_path, *options))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()


def remove(path: Path) -> None:
    """At once, whatever is written there meanwhile."""
    gone = path.rename(path.with_name("gone"))
    if gone.is_dir():
        shutil.rmtree(gone)
    else:
        gone.unlink()


def delete(run: Running) -> None:
    remove(run.run)


def move(run: Running) -> None:
    run.run.rename(run.folder / "moved")


def create_another(run: Running) -> None:
    """As logs and profiles do, with the usual mode, before the agent looks."""
    other = run.folder / "another"
    other.joinpath("logs").mkdir(parents=True)
    other.chmod(0o755)
    move(run)
    other.rename(run.run)


@pytest.mark.parametrize("how", [delete, create_another, pytest.param(move, marks=pytest.mark.slow)])
def test_deleted_run_folder_is_created_again(begin: Begin, undisturbed: bytes, how: Callable[[Running], None]) -> None:
    run = begin()
    token = (run.run / "token").read_text()
    how(run)
    run.says(DELETED)
    run.kill_coordinator()  # which reads what is there
    run.kill_worker()
    text = run.end(undisturbed)
    assert text.count("was deleted") == 1
    assert REPORT in text.splitlines()
    assert (run.run / "token").read_text() == token
    assert (run.run / "token").stat().st_mode & 0o777 == 0o600
    assert run.run.stat().st_mode & 0o777 == 0o700
    assert sum(event["steps"] for event in effective_steps(read_journal(run.run))) == STEPS
    paceline("run", "--run-dir", "run", "--steps", str(STEPS), "train.py", cwd=run.folder)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["changed", "deleted", "opened"])
def test_changed_token_is_written_again_before_the_coordinator_restarts(
    begin: Begin, undisturbed: bytes, how: str
) -> None:
    run = begin()
    path = run.run / "token"
    token = path.read_text()
    if how == "changed":
        path.write_text("a" * 64)
    elif how == "deleted":
        path.unlink()
    else:
        path.chmod(0o644)
    run.kill_coordinator()
    run.kill_worker()
    run.says("files of the run folder run were deleted or changed; written again: token")
    until(lambda: len([*run.folder.glob("half-1-*")]) == 2 or "1 worker goes on" in run.text)
    text = run.end(undisturbed)
    assert text.count("written again") == 1
    assert (path.read_text(), path.stat().st_mode & 0o777) == (token, 0o600)


GONE = {
    "journal.jsonl": "files of the run folder run were deleted or changed; written again: journal.jsonl (complete)",
    "logs": "files of the run folder run were deleted or changed; written again: logs (without earlier lines)",
    "coordinator.json": "files of the run folder run were deleted or changed; written again: coordinator.json",
    "reading_key": "files of the run folder run were deleted or changed; written again: reading_key",
    "checkpoints": (
        "the folder run/checkpoints was deleted or moved: training continues, but earlier checkpoints are missing"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GONE)
def test_deleted_part_of_the_run_folder_is_written_again(begin: Begin, undisturbed: bytes, name: str) -> None:
    run = begin("--save-every", "2")
    path = run.run / name
    time.sleep(1.1)  # between two looks of the agent
    remove(path)
    run.says(GONE[name])
    text = run.end(undisturbed)
    assert text.count(GONE[name]) == 1
    assert REPORT in text.splitlines()
    assert path.exists()
    assert sum(event["steps"] for event in effective_steps(read_journal(run.run))) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "kept"])
def test_deleted_checkpoint_folder_elsewhere(begin: Begin, undisturbed: bytes, name: str) -> None:
    run = begin("--save-every", "2", "--checkpoints", "kept")
    time.sleep(1.1)
    remove(run.folder / name)
    lost = "the folder kept was deleted or moved: training continues, but earlier checkpoints are missing"
    run.says(DELETED if name == "run" else lost)
    run.end(undisturbed)
    assert [*(run.folder / "kept").iterdir()]


@pytest.mark.slow
def test_run_folder_that_cannot_be_created_again(begin: Begin, undisturbed: bytes) -> None:
    """The end is what it was; what could not be written is named."""
    run = begin("--checkpoints", "kept")
    remove(run.run)
    run.run.touch()
    run.says(
        "the run folder run cannot be written (File exists); training continues without its journal, logs and report"
    )
    text = run.end(undisturbed)
    assert text.count("cannot be written (") == 1
    what = "run is not a run folder: it does not contain journal.jsonl; pass a folder made by --run-dir"
    assert f"train.py finished, but its report cannot be written: {what}" in text.splitlines()
