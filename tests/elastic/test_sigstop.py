"""Who is stopped (SIGSTOP), or stands still, is noticed by its agent from the first moment on: workers, coordinator."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from agents import alive, until
from launching import paceline
from once import once
from oracle import apart
from replay import STORE, Replay
from safetensors.torch import load, load_file
from warm import Process, environment

from paceline.base.journal import effective_steps, read_journal
from paceline.launch import coordinator_process
from paceline.team.coordinator import RETURN, Coordinator
from paceline.team.membership import Membership
from paceline.team.worker_slots import WorkerReport

# A worker waits at a place as long as there is a file that says so; all go slowly until there is "gate".
SCRIPT = """
import os, time
def here(place):
    number = os.environ.get("PACELINE_RANK", "0")
    open(f"{place}-{number}-{os.getpid()}", "w").close()
    while os.path.exists(f"hold-{place}-{number}"):
        time.sleep(0.01)
here("importing")
from basics import *
def model():
    here("building")
    return net()
t = make(model=model)
here("built")
for report in t.steps(data, count=30):
    here("training")
    time.sleep(0 if os.path.exists("gate") else 0.05)
t.export("out.safetensors")
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What one worker gives."""

    def make(folder: Path) -> None:
        for name, text in (("train.py", SCRIPT), ("gate", "")):
            (folder / name).write_text(text)
        paceline("run", "--plan", "exact micro=3", "train.py", cwd=folder)

    return (once(tmp_path_factory, "undisturbed by stops", make) / "out.safetensors").read_bytes()


@dataclass
class Running:
    """A run of `SCRIPT`."""

    process: subprocess.Popen[str]
    folder: Path
    console: Path

    @property
    def text(self) -> str:
        return self.console.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        journal = self.folder / "run" / "journal.jsonl"
        return [event for event in read_journal(journal.parent) if event["event"] == kind] if journal.exists() else []

    def started(self, number: int) -> list[int]:
        """The processes that were started for a worker."""
        told = (event for event in self.events("worker") if event["what"] == "started")
        return [int(event["pid"]) for event in told if event["worker"] == number]

    def stop(self, pid: int) -> int:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        return pid

    def coordinator(self) -> int | None:
        for child in psutil.Process(self.process.pid).children():
            try:
                if "paceline.team.coordinator_server" in child.cmdline():
                    return int(child.pid)
            except psutil.Error:
                continue
        return None

    def says(self, line: str) -> None:
        """Waits for a line of the console."""
        until(lambda: re.search(f"^{re.escape(line)}$", self.text, re.M) is not None or self.ended)
        assert re.search(f"^{re.escape(line)}$", self.text, re.M), self.text

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def end(self, undisturbed: bytes) -> str:
        """Its console; nothing was lost."""
        (self.folder / "gate").touch()
        assert self.process.wait(120) == 0, self.text
        assert (self.folder / "out.safetensors").read_bytes() == undisturbed
        assert sum(event["steps"] for event in effective_steps(read_journal(self.folder / "run"))) == 30
        return self.text


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Running] = []

    def begin(workers: int, *options: str, hold: str = "", group: bool = False, **env: str) -> Running:
        (tmp_path / "train.py").write_text(SCRIPT)
        if hold:
            (tmp_path / f"hold-{hold}").touch()
        command = [sys.executable, "-m", "paceline", "run", "--workers", str(workers), "--run-dir", "run"]
        console = tmp_path / "console"
        with console.open("wb") as out:
            process = Process(
                [*command, "--plan", "exact micro=3", *options, "train.py"],
                environment(**env),
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=os.setpgrp if group else None,
            )
        made.append(Running(process, tmp_path, console))
        return made[-1]

    yield begin
    for one in made:
        one.process.kill()
        one.process.wait()


# ---- the coordinator's decisions


def first(workers: int = 2) -> Replay:
    """A team that has not begun."""
    return Replay(1, workers)


def said(play: Replay, worker: int, **fields: Any) -> None:
    play.said[0][worker] = replace(play.said[0][worker], **fields)
    play.tell(0)


def again(play: Replay) -> None:
    """The coordinator dies and is started again."""
    before = play.coordinator
    play.coordinator = Coordinator(3, 1, before.record, Membership(tuple(play.hosts[0])), recovering=play.now + RETURN)
    play.coordinator.join("agent 0", "logs", STORE, play.hosts[0], len(play.hosts[0]))
    play.tell(0)


def test_sigstop_of_a_worker_loses_it_as_soon_as_others_can_go_on() -> None:
    play = first()
    said(play, 1, ready=True)
    said(play, 1, stopped=True)
    assert play.journal == []
    said(play, 0, ready=True)
    assert play.journal == ["lost", "generation"]
    assert play.coordinator.membership.members == (0,)

    play = first()
    play.begin()
    play.everybody(stopped=True)
    assert play.journal == []
    play.coordinator.tick(2.0)
    said(play, 0, stopped=False)
    assert play.journal == ["lost", "generation"]
    assert play.coordinator.membership.members == (0,)
    play.said[0][1] = WorkerReport(1, STORE, newcomer=True)
    play.tell(0)
    assert [text.partition("\n")[0] for _, text, _ in play.coordinator.lines] == [
        "workers 0-1 have been stopped (SIGSTOP) for 2 s, and no other worker has the training state: waiting",
        "worker 0 is running again",
        "worker 1 was stopped: 1 worker goes on",
    ]


def test_sigstop_of_the_last_worker_with_the_state_is_waited_for() -> None:
    play = first(1)
    play.begin()
    said(play, 0, stopped=True)
    for play.now in (2.0, 10.0, 100.0):
        play.coordinator.tick(play.now)
    said(play, 0, stopped=False)
    assert [text for _, text, _ in play.coordinator.lines] == [
        "worker 0 has been stopped (SIGSTOP) for 2 s, and no other worker has the training state: waiting",
        "worker 0 is running again",
    ]
    assert play.journal == []


def test_coordinator_that_is_restarted_before_the_first_step_keeps_the_first_team() -> None:
    """One worker has come to it, and another is in its second life: they are the first team all the same."""
    play = first()
    play.everybody(life=1)
    said(play, 0, ready=True)
    again(play)
    assert play.coordinator.membership.members == (0, 1)
    assert {number: wanted["life"] for number, wanted in play.ask(0)["workers"].items()} == {0: 1, 1: 1}
    said(play, 1, ready=True)
    assert play.coordinator.membership.begun
    assert play.journal == []


def test_sigstop_before_the_first_step_restarts_all_workers_three_times() -> None:
    play = first()
    for life in range(4):
        said(play, 1, stopped=True)
        for seconds in (2.0, 3.0):
            play.now += seconds
            play.coordinator.tick(play.now)
        if life < 3:
            wanted = play.ask(0)["workers"]
            assert wanted == {n: {"life": life + 1, "out": False, "newcomer": False} for n in (0, 1)}
            play.said[0] = {n: WorkerReport(life + 1, STORE) for n in (0, 1)}
            play.tell(0)
    assert play.coordinator.failing == {1: "was stopped (SIGSTOP) for 5 s"}


# ---- a worker before the first step


def stopped_at(place: str, worker: int, run: Running) -> int:
    until(lambda: (any(run.folder.glob(f"{place}-{worker}-*")) and run.started(worker)) or run.ended)
    return run.stop(run.started(worker)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "worker"), [("importing", 1), ("importing", 0), ("building", 0), ("built", 0), ("built", 1)]
)
def test_sigstop_before_the_first_step_restarts_all_workers(
    place: str, worker: int, start: Start, undisturbed: bytes
) -> None:
    """The others wait for it in the rendezvous, in what the Trainer does together, or in the first step."""
    run = start(2, hold=f"{place}-{worker}")
    stopped = stopped_at(place, worker, run)
    (run.folder / f"hold-{place}-{worker}").unlink()
    where = f"worker {worker} has been stopped (SIGSTOP) for"
    run.says(f"{where} 2 s, before the first step: all workers are restarted unless it runs again within 3 s")
    run.says(f"{where} 5 s, before the first step: all workers are restarted")
    text = run.end(undisturbed)
    assert not alive(stopped)
    assert [len(run.started(number)) for number in (0, 1)] == [2, 2]
    (lost,) = run.events("lost")
    assert (lost["workers"], lost["why"], lost["step"]) == ([worker], "was stopped before the first step", 0)
    assert run.events("generation") == [], "they are the first team"
    assert "go on" not in text
    assert "goes on\n" not in text


@pytest.mark.slow
def test_sigstop_before_the_first_step_with_sigcont_in_time_loses_no_worker(start: Start, undisturbed: bytes) -> None:
    run = start(2, hold="building-1")
    stopped = stopped_at("building", 1, run)
    (run.folder / "hold-building-1").unlink()
    run.says(
        "worker 1 has been stopped (SIGSTOP) for 2 s, before the first step: all workers are restarted unless it runs "
        "again within 3 s"
    )
    os.kill(stopped, signal.SIGCONT)
    run.says("worker 1 is running again")
    run.end(undisturbed)
    assert [len(run.started(number)) for number in (0, 1)] == [1, 1]
    assert run.events("lost") == []


def test_sigstop_ends_a_run_that_survives_no_loss(start: Start, golden: Callable[[str, str], None]) -> None:
    run = start(2, "--max-restarts", "0", hold="importing-1")
    stopped_at("importing", 1, run)
    assert run.process.wait(120) == 1
    line = "worker 1 has been stopped (SIGSTOP) for 5 s, before the first step: the run ends\n"
    block = re.sub(r"\(host \S+, pid \d+", "(host H, pid P", run.text[run.text.index(line) :])
    golden("a stopped worker ends the run", block)


# ---- the coordinator


def replaced(run: Running, number: int, why: str, undisturbed: bytes) -> None:
    """The coordinator gets a signal in the midst of training. A worker that is lost meanwhile is survived."""
    until(lambda: run.events("step") or run.ended)
    before = run.coordinator()
    assert before is not None
    os.kill(before, number)
    os.kill(run.started(1)[0], signal.SIGKILL)
    run.says(f"the coordinator {why} and is restarted; training continues")
    run.says("worker 1 was killed by SIGKILL: 1 worker goes on")
    assert not alive(before)
    until(lambda: len(run.events("formed")) == 2 or run.ended)
    text = run.end(undisturbed)
    assert "does not answer; the workers of this host wait" not in text


def test_sigstop_of_the_coordinator_replaces_it(start: Start, undisturbed: bytes) -> None:
    replaced(start(2), signal.SIGSTOP, "was stopped (SIGSTOP)", undisturbed)


HANGS = """
import signal, sys, time
if "paceline.team.coordinator_server" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1000))
"""


@pytest.mark.slow
def test_coordinator_that_does_not_answer_is_replaced(start: Start, undisturbed: bytes, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HANGS)
    run = start(2, PYTHONPATH=f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}")
    replaced(run, signal.SIGUSR1, "does not answer", undisturbed)


STARTS_NOT = """
import sys, time
if "paceline.team.coordinator_server" in sys.orig_argv:
    time.sleep(1000)
"""


def test_coordinator_that_does_not_start_gets_more_time_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is told of once; nobody trains."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "journal.jsonl").touch()
    (tmp_path / "sitecustomize.py").write_text(STARTS_NOT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(coordinator_process, "LONGEST", 0.25)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, selectors.DefaultSelector() as selector:
        kept = coordinator_process.CoordinatorProcess(
            listener, tmp_path, b"", {"again": False, "epoch": 1}, selector, said.append, lambda: None
        )
        seen = {0.25}
        try:
            while max(seen) < 2.0:
                kept.tend(0.0)
                selector.select(0.02)
                seen.add(kept._patience)
        finally:
            kept.close()
    assert seen == {0.25, 0.5, 1.0, 2.0}
    assert said == ["the coordinator does not answer and is restarted"]


@pytest.mark.slow
def test_sigstop_of_the_agent_replaces_nobody(start: Start, undisturbed: bytes) -> None:
    run = start(2, hold="training-1")
    until(lambda: any(run.folder.glob("training-1-*")) or run.ended)
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(4)  # longer than a coordinator may be silent
    run.process.send_signal(signal.SIGCONT)
    time.sleep(1)  # in which it looks at the coordinator
    (run.folder / "hold-training-1").unlink()
    text = run.end(undisturbed)
    assert "is started again" not in text


# ---- an agent that stands still, beside parameter servers


def stalls(run: Running, seconds: float, group: bool) -> None:
    """The agent, alone or with its process group, is stopped for so long; nothing that it started is."""
    number = run.process.pid
    assert os.getpgid(number) == number or not group
    send = os.killpg if group else os.kill
    send(number, signal.SIGSTOP)
    until(lambda: psutil.Process(number).status() == psutil.STATUS_STOPPED)
    time.sleep(seconds)
    send(number, signal.SIGCONT)


STALLS = [
    ("server=1", 3.0, False, "training-1"),  # longer than the coordinator waits for a host that others can replace
    ("server=1", 20.0, False, "training-1"),
    ("server=1", 3.0, True, "training-1"),
    ("server=1", 3.0, False, ""),  # trains to its end meanwhile
    ("server=1", 3.0, False, "built-1"),  # before the first step
    ("server=2 copies=1", 3.0, False, "training-1"),
    ("server=2 copies=1", 20.0, True, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "seconds", "group", "hold"), STALLS)
def test_sigstop_of_the_agent_ends_no_run_with_parameter_servers(
    start: Start, undisturbed: bytes, plan: str, seconds: float, group: bool, hold: str
) -> None:
    run = start(2, "--plan", f"micro=3 {plan}", hold=hold, group=group)
    until(lambda: any(run.folder.glob(f"{hold or 'training-1'}-*")) or run.ended)
    if not hold:
        (run.folder / "gate").touch()
    stalls(run, seconds, group)
    if hold:
        (run.folder / f"hold-{hold}").unlink()
    (run.folder / "gate").touch()
    assert run.process.wait(120) == 0, run.text
    assert "lost" not in run.text
    assert run.events("lost") == []
    trained, wanted = load_file(run.folder / "out.safetensors"), load(undisturbed)
    assert apart(trained, wanted) < 1e-12
    assert sum(event["steps"] for event in effective_steps(read_journal(run.folder / "run"))) == 30
