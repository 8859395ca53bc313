"""Connections that nobody knows cost a run little: no memory, few descriptors, a few seconds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agents import journal, until
from clusters import Cluster
from clusters import cluster as cluster
from launching import paceline
from networks import hosts as hosts
from oracle import apart
from safetensors.torch import load_file
from sockets import descriptors, listening
from warm import Process, environment

from paceline.greeting import STRANGERS

SCRIPT = """
from basics import *
import os, time
kept = [open(os.devnull) for _ in range(int(os.environ.get("OPEN", "0")))]
trainer = make()
for report in trainer.steps(data, epochs=2):
    while report.step == 3 and not os.path.exists(os.environ.get("GATE", "/")):
        time.sleep(0.02)
trainer.export("out.safetensors")
"""
# Opens so many connections and says so; then it waits until all of them were closed, and says so.
FLOOD = """
import socket, sys
wires = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(int(sys.argv[3]))]
print("open", flush=True)
for wire in wires:
    wire.settimeout(60)
    try:
        while wire.recv(4096):
            pass
    except ConnectionError:
        pass
print("closed", flush=True)
"""
MANY = 1100


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one worker gives."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SCRIPT)
    paceline("run", "--run-dir", "run", "train.py", cwd=folder)
    return folder / "out.safetensors"


def memory(pid: int) -> int:
    """Pieces of shared memory that a process has open."""
    return sum("memfd:paceline" in name for name in descriptors(pid))


def held(folder: Path) -> tuple[int, str]:
    """The server of a run of which no step is made now, and where it listens."""
    until(lambda: (folder / "journal.jsonl").exists() and journal(folder, "step"))
    (pid,) = {int(str(event["pid"])) for event in journal(folder, "server") if event["what"] == "started"}
    # A server has two sockets: its own, and the one for a store that only a first worker uses.
    addresses = {one.address for one in listening([pid]) if one.family == "tcp"}
    return pid, next(address for address in addresses if greets(address, pid))


def greets(address: str, pid: int) -> bool:
    """Whether what listens there, in the network of a process, sends a nonce to whoever comes."""
    host, port = address.split(":")
    code = f"import socket; w = socket.create_connection(({host!r}, {port})); w.settimeout(1); print(len(w.recv(100)))"
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True).stdout == "55\n"


def flooded(pid: int, address: str, command: list[str]) -> None:
    """The server makes nothing for whoever comes and says nothing, and closes them all in time."""
    before, count = memory(pid), len(descriptors(pid))
    with subprocess.Popen([*command, *address.split(":"), str(MANY)], stdout=subprocess.PIPE, text=True) as flood:
        assert flood.stdout is not None
        assert flood.stdout.readline() == "open\n"
        assert (memory(pid), len(descriptors(pid)) - count <= STRANGERS) == (before, True)
        assert flood.stdout.readline() == "closed\n"
        assert flood.wait() == 0
    until(lambda: len(descriptors(pid)) <= count)


@pytest.mark.root
def test_connections_that_say_nothing_harm_no_server(tmp_path: Path, alone: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--run-dir", "run", "--plan", "server=1"]
    run = Process(
        [*command, "train.py"],
        environment(GATE=str(tmp_path / "gate")),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        flooded(*held(tmp_path / "run"), [sys.executable, "-c", FLOOD])
        (tmp_path / "gate").touch()
        text, _ = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 0, text
    assert journal(tmp_path / "run", "lost") == []
    assert apart(load_file(tmp_path / "out.safetensors"), load_file(alone)) <= 1e-12


@pytest.mark.root
@pytest.mark.slow
def test_connections_from_another_host_harm_no_server(
    cluster: Callable[[int], Cluster], tmp_path: Path, alone: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    here = cluster(2)
    here.job, here.variables = ["train.py"], {"GATE": str(tmp_path / "gate")}
    here.start(0, 2, "--plan", "server=1")
    flooded(*held(here.agents[0].folder), here.network.hosts[1].command(sys.executable, "-c", FLOOD))
    here.go()
    assert here.agents[0].process.wait(120) == 0, here.agents[0].text
    assert here.agents[0].events("lost") == []
    assert apart(load_file(tmp_path / "out.safetensors"), load_file(alone)) <= 1e-12


@pytest.mark.parametrize("plan", ["server=1", pytest.param("data=2", marks=pytest.mark.slow)])
def test_a_script_may_have_many_files_open(tmp_path: Path, alone: Path, plan: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    paceline("run", "--workers", "2", "--run-dir", "run", "--plan", plan, "train.py", cwd=tmp_path, OPEN=str(MANY))
    assert apart(load_file(tmp_path / "out.safetensors"), load_file(alone)) <= 1e-12
