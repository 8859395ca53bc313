"""A run with one worker on each of two hosts: two `paceline run` by hand, or one `paceline launch ssh` from a third."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from agents import until
from clusters import processes, worker_of
from fake_ssh import install_ssh
from launching import SCRIPTS, paceline
from networks import Host, Network
from networks import hosts as hosts
from noting import NOTES
from once import once
from oracle import apart
from safetensors.torch import load, load_file
from warm import Process, environment

from paceline.base.journal import effective_steps, read_journal

PORT, STEPS = 29400, 200
WAYS = ("by hand", "ssh")
# Steps are slow until there is a file "gate".
SCRIPT = f"""{NOTES}
kept = [open(os.devnull) for _ in range(int(os.environ.get("OPEN", "0")))]
from basics import *
trainer = make()
for report in trainer.steps(data, count={STEPS}):
    if report.step >= 3:
        open(f"half-{{RANK}}-{{os.getpid()}}", "w").close()
    time.sleep(0 if os.path.exists("gate") else 0.1)
trainer.export("out.safetensors")
"""


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What one worker exports."""

    def make(folder: Path) -> None:
        (folder / "train.py").write_text(SCRIPT)
        (folder / "gate").touch()
        paceline("run", "train.py", cwd=folder)

    return (once(tmp_path_factory, "a pair's script, alone", make) / "out.safetensors").read_bytes()


@dataclass
class Pair:
    """All in `folder`. `started` are two agents, or the launcher, each with a console."""

    way: str
    network: Network
    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *options: str, members: bool = True, **env: str) -> None:
        """Begins training, and waits until both workers are in the midst of it."""
        (self.folder / "train.py").write_text(SCRIPT)
        if self.way == "ssh":
            self.launch(*options, **env)
        else:
            here = self.network.hosts[0]
            first = ("--listen", f"{here.address}:{PORT}", "--min-workers", "2")
            self.agent("run", 0, *first, *options, **env)
            until(lambda: (self.folder_of(0) / "coordinator.json").exists() or self.ended)
            token = str(self.folder_of(0) / "token")
            self.agent("join", 1, "--join", f"{here.address}:{PORT}", "--token-file", token, **env)
        if members:
            until(lambda: len({path.name.split("-")[1] for path in self.folder.glob("half-*")}) == 2 or self.ended)
            assert not self.ended, self.text

    def agent(self, name: str, host: int, *options: str, **env: str) -> None:
        command = [sys.executable, "-m", "paceline", "run", "--workers", "1", "--run-dir", name, *options, "train.py"]
        with (self.folder / f"console-{len(self.started)}").open("wb") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            inside = self.network.hosts[host].inside
            self.started.append(Process(command, environment(**env), inside, cwd=self.folder, **streams))

    def launch(self, *options: str, **env: str) -> None:
        *there, here = self.network.hosts
        if not (self.folder / "bin").exists():
            install_ssh(self.folder, dict(zip("ab", there, strict=True)))
        words = ["--hosts", "a,b", "--run-dir", "run", "--min-workers", "2", "--cwd", str(self.folder)]
        variables = {"PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1", **env}
        words += ["--workers-per-host", "1", *(f"--env={name}={value}" for name, value in variables.items())]
        command = [sys.executable, "-m", "paceline", "launch", "ssh", *words, *options, "train.py"]
        path = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        with (self.folder / f"console-{len(self.started)}").open("wb") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(
                here.command(*command), cwd=self.folder, env=environment(**path), text=True, **streams
            )
        self.started.append(process)

    def folder_of(self, host: int) -> Path:
        names = ("run", "run/hosts/b") if self.way == "ssh" else ("run", "join")
        return self.folder / names[host]

    def worker(self, host: int) -> int:
        return worker_of(self.folder_of(host))

    def agent_of(self, host: int) -> int:
        return psutil.Process(self.worker(host)).ppid()

    def coordinator(self) -> int:
        children = psutil.Process(self.agent_of(0)).children()
        (found,) = (child.pid for child in children if "paceline.team.coordinator_server" in child.cmdline())
        return int(found)

    def address(self) -> tuple[str, int]:
        """Where the coordinator listens."""
        said = json.loads((self.folder_of(0) / "coordinator.json").read_text())
        return said["host"], said["port"]

    @property
    def third(self) -> Host:
        """A host that is not of the run."""
        return self.network.hosts[2]

    @property
    def text(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("console-*")))

    @property
    def ended(self) -> bool:
        return any(process.poll() is not None for process in self.started)

    def says(self, line: str) -> None:
        """Waits for a line, of one host or the other."""
        heard = lambda: [one for one in self.text.splitlines() if one.removeprefix("b | ") == line]
        until(lambda: heard() or self.ended)
        assert heard(), self.text

    def end(self, alone: bytes, silent: bool = False) -> str:
        """What all have said; they train what one worker trains, and no process of the run is left.

        Processes of a host that was `silent` may have been replaced elsewhere while they stood, and their last records
        of steps are then missing.
        """
        (self.folder / "gate").touch()
        for process in self.started:
            assert process.wait(120) == 0, self.text
        assert apart(load_file(self.folder / "out.safetensors"), load(alone)) <= 1e-12
        if not silent:
            assert not (self.folder / "twice").exists(), (self.folder / "twice").read_text()
            steps = effective_steps(read_journal(self.folder_of(0)))
            assert sum(event["steps"] for event in steps) == STEPS
        assert self.left() == []
        return self.text

    def left(self) -> list[list[str]]:
        """The command lines of processes of the run."""
        return [one.info["cmdline"] for one in processes() if one.info["cwd"] == str(self.folder)]

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


Begin = Callable[[str], Pair]


@pytest.fixture
def pair(hosts: Callable[[int], Network], tmp_path: Path) -> Iterator[Begin]:
    made: list[Pair] = []

    def make(way: str) -> Pair:
        made.append(Pair(way, hosts(3), tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()
