"""Agents on several hosts: `paceline run` and `paceline run --join` in network namespaces, on one script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import SCRIPTS, paceline
from networks import Network
from once import once
from safetensors.torch import load_file
from warm import Process, environment

from paceline.base.journal import effective_steps, read_journal

PORT, STEPS = 29400, 60


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one worker gives."""
    command = ("run", "--workers", "1", SCRIPTS / "survivor.py", "out", str(STEPS))
    return once(tmp_path_factory, f"cluster of {STEPS} steps", lambda folder: paceline(*command, cwd=folder))


def processes() -> list[psutil.Process]:
    """All of this machine that are not over, with `info`: cwd, cmdline, environ (None: it could not be read)."""
    return list(psutil.process_iter(["pid", "cwd", "cmdline", "environ"]))


def in_no_process(secret: str) -> None:
    """It is in no process's arguments, and no variable has it."""
    for one in processes():
        assert not any(secret in word for word in one.info["cmdline"] or ())
        assert secret not in (one.info["environ"] or {}).values()


@dataclass
class Agent:
    """A `paceline run` on a host, with the run folder `folder`."""

    process: subprocess.Popen[str]
    folder: Path
    console: Path
    again: Callable[[], subprocess.Popen[str]]  # the same command

    @property
    def text(self) -> str:
        return self.console.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def kill(self) -> None:
        self.process.kill()


@dataclass
class Cluster:
    """Everything in `folder`; training goes slowly until `go`, and the script is `tests/scripts/survivor.py`, unless a
    test says another `job`: a script and its arguments, under these variables.
    """

    network: Network
    folder: Path
    steps: int = STEPS
    agents: list[Agent] = field(default_factory=list)
    job: Sequence[str | Path] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def gate(self) -> Path:
        return self.folder / "gate"

    def start(self, host: int, workers: int, *options: str, code: str | None = None, faults: str = "") -> Agent:
        """The first one begins the run, on host 0 unless said; others join it."""
        name = f"run-{len(self.agents)}"
        here = self.network.hosts[host]
        if self.agents:
            token = self.folder / "run-0" / "token"
            where = ["--join", f"{self.network.hosts[0].address}:{PORT}", "--token-file", str(token)]
        else:
            where = ["--listen", f"{here.address}:{PORT}"]
        script = SCRIPTS / "survivor.py"
        if code is not None:
            script = self.folder / "other.py"
            script.write_text(code)
        command = [sys.executable, "-m", "paceline", "run", "--workers", str(workers), "--run-dir", name, *where]
        job = self.job or [script, "out", str(self.steps)]
        console = self.folder / f"{name}.console"
        console.unlink(missing_ok=True)

        def begin() -> subprocess.Popen[str]:
            with console.open("ab") as out:
                return Process(
                    [*command, *options, *job],
                    environment(WAIT=f"{self.gate} go 1", PACELINE_CHAOS=faults, **self.variables),
                    here.inside,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )

        self.agents.append(Agent(begin(), self.folder / name, console, begin))
        return self.agents[-1]

    def spread(self, *counts: int, options: Sequence[str] = (), faults: str = "") -> None:
        """So many workers on each host: the first begin the run, and the others join it. All are of the team then."""
        self.start(0, counts[0], *options, faults=faults)
        self.until(lambda: self.status().get("step", 0) > 2)
        for host, count in enumerate(counts[1:], 1):
            self.start(host, count)
        self.members(sum(counts))

    def status(self, agent: int = 0, host: int | None = None) -> dict[str, Any]:
        """What the coordinator of an agent tells everybody, asked with curl from its host; nothing where it is not."""
        path = self.agents[agent].folder / "coordinator.json"
        if not path.exists():
            return {}
        said = json.loads(path.read_text())
        hosts = [number for number, one in enumerate(self.network.hosts) if one.address == said["host"]]
        key = self.agents[agent].folder / "reading_key"
        command = ["curl", "--silent", "--max-time", "2", f"http://{said['host']}:{said['port']}/status"]
        command += ["--header", f"Authorization: Bearer {key.read_text().strip()}"] if key.exists() else []
        done = subprocess.run(
            self.network.hosts[hosts[0] if host is None else host].command(*command), capture_output=True, text=True
        )
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def until(self, what: Callable[[], object], seconds: float = 60.0) -> None:
        """Waits until `what` is so."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, "\n".join(f"{a.folder.name}:\n{a.text}" for a in self.agents)
            time.sleep(0.1)

    def has(self, count: int, agent: int = 0, step: int = 0) -> bool:
        """Whether so many workers are of the team, and have done so many steps."""
        said = self.status(agent)
        states = [worker["state"] for worker in said.get("workers", {}).values()]
        return states.count("member") == len(said.get("members", ())) == count and said.get("step", 0) >= step

    def members(self, count: int, agent: int = 0) -> None:
        """Waits until so many workers are of the team."""
        self.until(lambda: self.has(count, agent))

    def coordinators(self) -> list[int]:
        """Process ids of the coordinators of this cluster."""
        ours = [one.info for one in processes() if one.info["cwd"] == str(self.folder)]
        return [info["pid"] for info in ours if "paceline.team.coordinator_server" in (info["cmdline"] or ())]

    def restart_coordinator(self) -> None:
        """Kills the coordinator, and waits for the one that its agent starts instead."""
        (before,) = self.coordinators()
        os.kill(before, signal.SIGKILL)
        self.until(lambda: self.coordinators() not in ([], [before]))

    def go(self) -> None:
        self.gate.write_text("go\n")

    def end(self, *codes: int) -> None:
        """Waits for all agents, whose exit codes must be these."""
        self.go()
        for agent, code in zip(self.agents, codes, strict=True):
            try:
                found = agent.process.wait(90)
            except subprocess.TimeoutExpired:
                found = None
            assert found == code, "\n".join(f"{a.folder.name}:\n{a.text}" for a in self.agents)

    def close(self) -> None:
        for agent in self.agents:
            agent.process.kill()
            agent.process.wait()

    def stop(self, agent: int, number: int = signal.SIGTERM) -> None:
        self.agents[agent].process.send_signal(number)


def worker_of(folder: Path, rank: int | None = None) -> int:
    """The process of one worker whose run folder is this, if need be of this number."""
    told = {event["pid"]: event for event in read_journal(folder) if event["event"] == "worker"}
    there = {event["worker"]: int(event["pid"]) for event in told.values() if event["what"] != "ended"}
    return next(iter(there.values())) if rank is None else there[rank]


@pytest.fixture
def cluster(hosts: Callable[[int], Network], tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    made: list[Cluster] = []

    def make(count: int) -> Cluster:
        made.append(Cluster(hosts(count), tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def same(cluster: Cluster, undisturbed: Path, first: int = 0) -> None:
    """Equal bytes and losses; with one writer, whose run folder is that of agent `first`, every step once."""
    assert json.loads((cluster.folder / "out.json").read_text()) == json.loads((undisturbed / "out.json").read_text())
    mine, other = (load_file(folder / "out.safetensors") for folder in (cluster.folder, undisturbed))
    assert [name for name, value in other.items() if not value.equal(mine[name])] == []
    assert (cluster.folder / "out.safetensors").read_bytes() == (undisturbed / "out.safetensors").read_bytes()
    steps = effective_steps(cluster.agents[first].events("step"))
    assert [event["step"] for event in steps] == sorted({event["step"] for event in steps})
    if first == 0:
        assert sum(event["steps"] for event in steps) == STEPS, "a step is missing in the journal, or there twice"
    left = [process.info for process in processes() if process.info["cwd"] == str(cluster.folder)]
    assert left == []
