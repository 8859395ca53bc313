"""Connections that nobody knows cost a run little: no memory, few descriptors, a few seconds."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

import pytest
from agents import journal, until
from clusters import Cluster, worker_of
from clusters import cluster as cluster
from launching import free_port, paceline
from networks import hosts as hosts
from oracle import apart
from safetensors.torch import load_file
from sockets import descriptors, family_of, listening
from warm import Process, environment

from paceline.base.handshake import HELLO, STRANGERS, NewConnections
from paceline.base.http_server import OF_ONE

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


@pytest.mark.slow
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


# Asks each address for so many connections, without waiting for any: what is not accepted waits in the kernel's queue.
KEEP = """
import socket, sys, time
wires = []
for address in sys.argv[2:]:
    host, _, port = address.removeprefix("::ffff:").rpartition(":")
    for _ in range(int(sys.argv[1])):
        wires.append(socket.socket())
        wires[-1].setblocking(False)
        wires[-1].connect_ex((host, int(port)))
print("open", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", pytest.param("shard=2 zero=3", marks=pytest.mark.slow)])
def test_connections_that_say_nothing_to_torchs_ports_end_no_run(tmp_path: Path, alone: Path, plan: str) -> None:
    """The store and gloo close none of them; a worker whose soft limit of open files is 1,024 has room for more."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["-m", "paceline", "run", "--workers", "2", "--run-dir", "run", "--plan", plan, "train.py"]
    limited = ["sh", "-c", 'ulimit -Sn 1024; exec "$@"', "sh", sys.executable, *command]
    variables = environment(GATE=str(tmp_path / "gate"))
    run = subprocess.Popen(limited, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    flood: subprocess.Popen[str] | None = None
    try:
        until(lambda: (tmp_path / "run/journal.jsonl").exists() and journal(tmp_path / "run", "step"))
        workers = [worker_of(tmp_path / "run", rank) for rank in (0, 1)]
        addresses = {one.address.rpartition(":") for one in listening(workers) if one.family != "unix"}
        assert addresses
        reached = {f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}" for host, _, port in addresses}
        words = [sys.executable, "-c", KEEP, str(3 * MANY), *sorted(reached)]
        flood = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert flood.stdout is not None
        assert flood.stdout.readline() == "open\n"
        until(lambda: max(len(descriptors(pid)) for pid in workers) > MANY)
        (tmp_path / "gate").touch()
        text, _ = run.communicate(timeout=120)
    finally:
        run.kill()
        if flood is not None:
            flood.kill()
            flood.communicate()
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


def ask(port: int, path: str, key: str) -> int:
    http = HTTPConnection("127.0.0.1", port, timeout=60)
    http.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    status = http.getresponse().status
    http.close()
    return status


@pytest.mark.slow
def test_connections_that_say_nothing_keep_nobody_from_status_page_and_figures(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    page, figures = free_port(), free_port()
    command = [sys.executable, "-m", "paceline", "run", "--run-dir", "run"]
    options = ["--page", f"127.0.0.1:{page}", "--metrics", f"127.0.0.1:{figures}", "train.py"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = Process([*command, *options], environment(GATE=str(tmp_path / "gate")), cwd=tmp_path, **streams)
    try:
        until(lambda: (tmp_path / "run/journal.jsonl").exists() and bool(journal(tmp_path / "run", "step")))
        status = json.loads((tmp_path / "run/coordinator.json").read_text())["port"]
        key = (tmp_path / "run/reading_key").read_text().strip()
        for port, path in ((status, "/status"), (page, "/journal"), (figures, "/metrics")):
            pids = {one.pid for one in listening(family_of(run.pid)) if one.address == f"127.0.0.1:{port}"}
            count = max(len(descriptors(pid)) for pid in pids)
            wires = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
            assert ask(port, path, key) == 200
            assert max(len(descriptors(pid)) for pid in pids) <= count + OF_ONE + 5
            for wire in wires:
                wire.close()
        (tmp_path / "gate").touch()
        text, _ = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 0, text


def test_the_oldest_of_an_address_gives_way() -> None:
    new = NewConnections[int](of_one=2, in_all=4)
    assert [new.come(one, where, float(one)) for one, where in enumerate("aabb")] == [None] * 4
    assert new.come(4, "a", 4.0) == 0
    assert new.come(5, "c", 5.0) == 1, "of all addresses"
    new.go(3)
    assert new.come(6, "b", 6.0) is None
    assert [*new] == [2, 4, 5, 6]
    assert new.late(2.0 + HELLO + 0.5) == [2]
