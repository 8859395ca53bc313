"""A run whose replicas span hosts: `paceline launch ssh` over network namespaces that count as hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agents import until
from clusters import processes
from fake_ssh import install_ssh
from launching import SCRIPTS, paceline
from networks import Network, ip
from networks import hosts as hosts
from once import once
from warm import environment

from paceline.base.journal import effective_steps, read_journal

STEPS = 16
# Steps are slow until there is a file "gate": what happens to a host then happens in the midst of training.
SCRIPT = f"""
import os, time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import paceline

torch.manual_seed(0)
rows = torch.randn(96, 8, dtype=torch.float64), torch.randint(0, 3, (96,))
wide = int(os.environ.get("WIDE", "16"))

def model():
    blocks = [nn.TransformerEncoderLayer(8, 2, wide, 0.1, batch_first=True, bias=False) for _ in range(4)]
    return nn.Sequential(nn.Linear(8, 32), nn.Unflatten(1, (4, 8)), *blocks, nn.Flatten(), nn.Linear(32, 3)).double()

trainer = paceline.Trainer(
    model,
    loss=lambda output, batch: F.cross_entropy(output, batch[1]),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    global_batch=16,
    clip_norm=1.0,
)
trainer.state["seen"] = 0
for report in trainer.steps(TensorDataset(*rows), count={STEPS}):
    trainer.state["seen"] += report.samples
    time.sleep(0.0 if os.path.exists("gate") or report.step < 4 else 0.2)
trainer.export("out.safetensors")
if trainer.main:
    with open("seen", "w") as file:
        file.write(str(trainer.state["seen"]))
"""


def undisturbed(factory: pytest.TempPathFactory, plan: str, workers: int = 1) -> Path:
    """The folder in which so many workers of one host have trained the script under a plan."""

    def make(folder: Path) -> None:
        (folder / "train.py").write_text(SCRIPT)
        (folder / "gate").touch()
        paceline("run", "--workers", str(workers), "--plan", plan, "train.py", cwd=folder)

    return once(factory, f"replicas over hosts, {workers} on one, {plan}", make)


def coordinators_in(folder: Path) -> list[int]:
    """Process ids of the coordinators of a folder's runs."""
    ours = [one.info for one in processes() if one.info["cwd"] == str(folder)]
    return [info["pid"] for info in ours if "paceline.team.coordinator_server" in (info["cmdline"] or ())]


@dataclass
class HostTeam:
    """Hosts a, b, c, ... with these numbers of workers, and the launcher, all in `folder`. `more`: the script's end."""

    network: Network
    folder: Path
    workers: Sequence[int]
    more: str = ""
    started: subprocess.Popen[bytes] | None = None

    def start(self, plan: str, *options: str, **env: str) -> None:
        (self.folder / "train.py").write_text(SCRIPT + self.more)
        *there, here = self.network.hosts
        names = "abcdefgh"[: len(there)]
        install_ssh(self.folder, dict(zip(names, there, strict=True)), stays=True)
        options = ("--save-every", "1000", "--checkpoints", str(self.folder / "checkpoints"), *options)  # all see it
        spec = ",".join(f"{name}:{count}" for name, count in zip(names, self.workers, strict=True))
        variables = {"PYTHONPATH": f"{SCRIPTS}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1", **env}
        words = ["--hosts", spec, "--run-dir", "run", "--cwd", str(self.folder), "--plan", plan]
        words += [f"--env={name}={value}" for name, value in variables.items()]
        command = [sys.executable, "-m", "paceline", "launch", "ssh", *words, *options, "train.py"]
        path = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        with (self.folder / "console").open("wb") as out:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            self.started = subprocess.Popen(here.command(*command), cwd=self.folder, env=environment(**path), **streams)

    def until_step(self, step: int) -> None:
        """Waits until the journal has this step."""
        until(lambda: self.ended or max((e["step"] for e in self.events("step")), default=0) >= step, 120)
        assert not self.ended, self.text

    def events(self, kind: str) -> list[dict[str, Any]]:
        journal = self.folder / "run"
        return [event for event in read_journal(journal) if event["event"] == kind] if journal.exists() else []

    def lose(self, host: int) -> set[int]:
        """Kills all processes of a host at once; returns their ids."""
        space = self.network.hosts[host].space
        pids = {int(pid) for pid in ip("netns", "pids", space).split()}
        assert len(pids) > self.workers[host], "the host has an agent and workers"
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pids

    @property
    def text(self) -> str:
        return (self.folder / "console").read_text()

    @property
    def ended(self) -> bool:
        return self.started is None or self.started.poll() is not None

    def end(self) -> None:
        """Lets the run end, which has made each step once with all of its samples, and leaves no process."""
        (self.folder / "gate").touch()
        assert self.started is not None
        assert self.started.wait(180) == 0, self.text
        steps = effective_steps(read_journal(self.folder / "run"))
        assert sum(event["steps"] for event in steps) == STEPS
        assert (self.folder / "seen").read_text() == str(16 * STEPS)
        assert [one.info["cmdline"] for one in processes() if one.info["cwd"] == str(self.folder)] == []

    def close(self) -> None:
        if self.started is not None and self.started.poll() is None:
            self.started.terminate()
            try:
                self.started.wait(30)
            except subprocess.TimeoutExpired:
                self.started.kill()
                self.started.wait()


@pytest.fixture
def host_team(hosts: Callable[[int], Network], tmp_path: Path) -> Iterator[Callable[..., HostTeam]]:
    made: list[HostTeam] = []

    def make(*workers: int) -> HostTeam:
        made.append(HostTeam(hosts(len(workers) + 1), tmp_path, workers))
        return made[-1]

    yield make
    for one in made:
        one.close()
