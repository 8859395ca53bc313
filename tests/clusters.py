"""Agents on several hosts: `paceline run` and `paceline run --join` in network namespaces, on one script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launching import SCRIPTS
from networks import Network

PORT = 29400


@dataclass
class Agent:
    """A `paceline run` on a host, with the run folder `folder`."""

    process: subprocess.Popen[bytes]
    folder: Path
    console: Path

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
    """Everything in `folder`; training goes slowly until `go`, and the script is `tests/scripts/survivor.py`."""

    network: Network
    folder: Path
    steps: int = 80
    agents: list[Agent] = field(default_factory=list)

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
        command = [sys.executable, "-m", "paceline.cli", "run", "--workers", workers, "--run-dir", name, *where]
        console = self.folder / f"{name}.console"
        with console.open("wb") as out:
            process = subprocess.Popen(
                here.command(*map(str, [*command, *options, script, "out", self.steps])),
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "WAIT": f"{self.gate} go 1", "PACELINE_CHAOS": faults},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.agents.append(Agent(process, self.folder / name, console))
        return self.agents[-1]

    def status(self, agent: int = 0, host: int | None = None) -> dict[str, Any]:
        """What the coordinator of an agent tells everybody, asked with curl from its host; nothing where it is not."""
        path = self.agents[agent].folder / "coordinator.json"
        if not path.exists():
            return {}
        said = json.loads(path.read_text())
        hosts = [number for number, one in enumerate(self.network.hosts) if one.address == said["host"]]
        command = ["curl", "--silent", "--max-time", "2", f"http://{said['host']}:{said['port']}/status"]
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

    def members(self, count: int, agent: int = 0) -> None:
        """Waits until so many workers are of the team."""

        def there() -> bool:
            said = self.status(agent)
            states = [worker["state"] for worker in said.get("workers", {}).values()]
            return states.count("member") == len(said.get("members", ())) == count

        self.until(there)

    def coordinators(self) -> list[int]:
        """Process ids of the coordinators of this cluster."""
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                here = os.readlink(f"/proc/{entry}/cwd")
            except OSError:
                continue
            if b"paceline.team.server" in words and here == str(self.folder):
                found.append(int(entry))
        return found

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


def worker_of(folder: Path) -> int:
    """The process of one worker whose run folder is this."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", entry, "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"PACELINE_RUN_DIR={folder}".encode() in words and any(w.startswith(b"PACELINE_RANK=") for w in words):
            return int(entry)
    raise AssertionError("there is no such worker")
