"""A run ends with exit code 0 where it is finished, and nowhere else; and not without a word."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from agents import Launcher, alive, journal, until
from launching import paceline, train_basics
from warm import Process, environment

from paceline.base.journal import effective_steps, read_journal

GATED = """
from basics import *
import os, time
t = make()
for report in t.steps(data, count={}):
    time.sleep(0 if os.path.exists("gate") else 0.05)
"""


@dataclass
class Running:
    """A run of `GATED` that is under way."""

    process: subprocess.Popen[str]
    folder: Path
    steps: int

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_journal(self.folder / "run") if event["event"] == kind]

    def coordinator(self) -> int | None:
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "paceline.team.coordinator_server" in child.cmdline():
                    return int(child.pid)
        return None

    def port(self) -> int:
        return int(json.loads((self.folder / "run/coordinator.json").read_text())["port"])

    def works(self) -> bool:
        """Whether the coordinator knows its agent."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port()}/status") as answer:
            return bool(json.load(answer)["workers"])
        return False

    def worker(self, number: int) -> int:
        return next(int(event["pid"]) for event in self.events("worker") if event["worker"] == number)

    def end(self, losses: int) -> str:
        """Its console; it must have finished, every step once."""
        (self.folder / "gate").touch()
        text, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, text
        assert [event["step"] for event in self.events("finished")] == [self.steps]
        assert sum(event["steps"] for event in effective_steps(read_journal(self.folder / "run"))) == self.steps
        assert len(self.events("lost")) == losses
        return text


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    """With as many workers and steps as the test says."""
    workers, steps = request.param
    (tmp_path / "train.py").write_text(GATED.format(steps))
    command = [sys.executable, "-m", "paceline.cli.main", "run", "--workers", str(workers), "--run-dir", "run"]
    process = Process(
        [*command, "train.py"], environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    made = Running(process, tmp_path, steps)
    until(lambda: made.events("step"))
    yield made
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("running", [(2, 400)], indirect=True)
def test_sigstop_of_the_agent_while_the_coordinator_restarts(running: Running) -> None:
    """Its workers train on meanwhile: nobody has failed."""
    before = running.coordinator()
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(lambda: running.coordinator() not in (None, before))
    running.process.send_signal(signal.SIGSTOP)
    time.sleep(5)
    running.process.send_signal(signal.SIGCONT)
    until(lambda: running.events("step")[-1]["step"] > 10)
    running.end(losses=0)


@pytest.mark.slow
@pytest.mark.parametrize("running", [(5, 100)], indirect=True)
def test_half_open_connections_do_not_block_the_coordinator(running: Running) -> None:
    """130 connections that never come to a request, of the agent's own address and before it, while the coordinator and
    a worker die.
    """
    coordinator, worker, port = running.coordinator(), running.worker(1), running.port()
    assert coordinator is not None
    running.process.send_signal(signal.SIGSTOP)
    os.kill(coordinator, signal.SIGKILL)
    until(lambda: not alive(coordinator))
    with contextlib.ExitStack() as open_ones:
        for _ in range(130):
            half_open = open_ones.enter_context(socket.socket())
            half_open.setblocking(False)
            half_open.connect_ex(("127.0.0.1", port))
        os.kill(worker, signal.SIGKILL)
        running.process.send_signal(signal.SIGCONT)
        until(lambda: len(running.events("formed")) == 2, 20)
        text = running.end(losses=1)
    assert "\nworker 1 was killed by SIGKILL: 4 workers go on\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("running", [(2, 100)], indirect=True)
def test_kill_of_the_coordinator_seven_times_starts_it_again(running: Running) -> None:
    """Seven times within ten seconds, and each one has worked before."""
    ended: set[int | None] = {None}
    for _ in range(7):
        until(lambda: running.coordinator() not in ended)
        coordinator = running.coordinator()
        assert coordinator is not None
        until(running.works)
        ended.add(coordinator)
        os.kill(coordinator, signal.SIGKILL)
        until(lambda coordinator=coordinator: not alive(coordinator))
    text = running.end(losses=0)
    assert text.count("the coordinator ended (SIGKILL) and is restarted; training continues\n") == 7


def test_coordinator_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "site" / "tornado").mkdir(parents=True)
    (tmp_path / "site" / "tornado" / "__init__.py").write_text("raise ImportError('no tornado today')\n")
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    done = paceline(
        *("run", "--cold-start", "--run-dir", "run", "train.py"),
        cwd=tmp_path,
        code=2,
        PYTHONPATH=str(tmp_path / "site"),
    )
    told = "paceline: the coordinator ended 5 times within 10 s (exit code 1); read run/logs/coordinator.log\n"
    assert done.stderr.endswith(told)
    assert "no tornado today" in (tmp_path / "run" / "logs" / "coordinator.log").read_text()


# ---- what counts as the end

LATER = """
import urllib.request
event("join")
def generation():
    line = commands.readline()
    return json.loads(line)["number"] if "number" in line else generation()
commands = os.fdopen(int(os.environ["PACELINE_COMMANDS_FD"]))
if RANK == 0 and "PACELINE_NEWCOMER" not in os.environ:
    event("ready")
    mark("up")
    wait_for("formed", 1)
    port = json.load(open(f"{RUN}/coordinator.json"))["port"]
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status") as said:
            if json.load(said)["workers"]["1"]["state"] == "member":
                break
    os.kill(os.getpid(), signal.SIGKILL)
event("waiting")
mark("waits")
if RANK == 1:
    for _ in range(2):
        event("formed", number=generation())
        mark("formed")
    event("ended")
    sys.exit(0)
time.sleep(600)
"""


def test_finish_by_workers_of_another_host_is_exit_code_0(launcher: Launcher) -> None:
    """Those of the first one are lost, and not back yet: what ends with 0 there must be the coordinator's word."""
    first = launcher.start(LATER, workers=1)
    launcher.wait_for("up", 1)
    joined = launcher.end(launcher.start(LATER, workers=1, join="run"))
    ended = launcher.end(first)
    assert (ended.code, joined.code) == (0, 0)
    for said in (ended, joined):
        assert said.stderr.endswith(
            "\nthe run has ended; its report is in the run folder on the host that started the run\n"
        )


def test_lost_coordinator_host_is_exit_code_1(launcher: Launcher) -> None:
    """It was cut off where it began, and then the last worker here dies, which was never of the team."""
    script = LATER.replace('wait_for("formed", 1)', "time.sleep(600)").replace("if RANK == 1:", "if False:")
    first = launcher.start(script, workers=1)
    launcher.wait_for("up", 1)
    second = launcher.start(script, workers=1, join="run", seconds={"GIVEN_UP": 2.0})
    until(lambda: (launcher.folder / "run" / "waits-1").exists())
    workers = partial(journal, launcher.folder / "run", "worker")
    (pid,) = until(lambda: [event["pid"] for event in workers() if event["worker"] == 1])
    first.kill()
    first.wait()
    os.kill(int(str(pid)), signal.SIGKILL)
    ended = launcher.end(second)
    assert ended.code == 1
    what = "all workers of this host have ended, but the coordinator has not reported that the run is finished"
    assert ended.stderr.endswith(
        f"\n{what}\nlogs: run/logs/\nnext: see the console of the host that started the run; if "
        "the run ended there, start it again, then run "
        "`paceline run --join run --workers 1 train.py`\n"
    )
    (event,) = journal(launcher.folder / "run", "failed")
    assert (event["worker"], event["cause"], event["code"]) == (None, what, 1)
    told = paceline("explain", "run", cwd=launcher.folder).stdout
    assert f"  failure  {what}\n  ended    failed at step 0: {what}\n" in told


@pytest.mark.parametrize("options", [(), ("--max-restarts", "0")])
def test_worker_that_calls_os_exit_has_not_finished(options: tuple[str, ...], tmp_path: Path) -> None:
    body = "import os\nfor report in make().steps(data, count=9):\n    print('enough')\n    os._exit(0)\n"
    done = train_basics(tmp_path, body, 1, *options, code=1)
    block = re.sub(r"\(host \S+, pid \d+", "(host H, pid P", done.stderr[done.stderr.index("worker 0 failed") :])
    assert block == (
        "worker 0 failed (host H, pid P, after step 1)\n"
        "  exited with code 0 in the middle of its script, without an error message\n"
        "the end of out/logs/worker-0.log:\n"
        "  | enough\n"
        "logs: out/logs/\n"
        "next: see the log of the worker; then run `paceline run --workers 1 --run-dir out train.py`: "
        "it starts over, as no checkpoint "
        "was written\n"
    )
