"""The listening sockets of real runs are those of the table in docs/security.md, and no others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest
from agents import journal, until
from clusters import Cluster
from clusters import cluster as cluster
from fake_ssh import install_ssh
from launching import SCRIPTS, free_port, piped
from networks import Network
from networks import hosts as hosts
from paths import DOCS
from sockets import Listening, listening
from warm import Process, environment

PAGE = DOCS / "security.md"
SCRIPT = """
from basics import *
import time
for report in make().steps(data, epochs=1000, loader={"num_workers": LOADERS}):
    time.sleep(0.02)
"""


def table() -> Counter[tuple[str, str]]:
    """How many listening sockets of a kind each process of a sort may have."""
    found = Counter[tuple[str, str]]()
    for line in PAGE.read_text().splitlines():
        words = [word.strip() for word in line.strip("|").split(" | ")]
        if len(words) == 7 and words[2] in ("tcp", "unix"):
            for sort in words[1].split(", "):
                found[sort, words[2]] += int(words[3])
    return found


def members(folder: Path) -> dict[int, str]:
    """The workers and parameter servers that the journals in a folder tell of."""
    found = {}
    for path in folder.rglob("journal.jsonl"):
        for event in map(json.loads, path.read_text().splitlines()):
            if event["event"] in ("worker", "server") and event["what"] == "started":
                found[event["pid"]] = "worker" if event["event"] == "worker" else "parameter server"
    return found


def sort_of(pid: int, command: str, known: dict[int, str]) -> str:
    """Which of the page's processes one is."""
    sorts = {
        r"paceline\.team\.coordinator_server": "coordinator",
        r"paceline\.observe\.server": "serving",
        r"paceline launch": "launcher",
        r"paceline (run|agent)|paceline\.launch": "agent",
    }
    if pid in known:
        return known[pid]
    parent = psutil.Process(pid).ppid()
    if parent in known:
        return "loader"
    return next((sort for pattern, sort in sorts.items() if re.search(pattern, command)), f"unknown: {command}")


def check(folder: Path, pids: Iterable[int], addresses: set[str]) -> dict[str, set[Listening]]:
    """Each listening socket is one that the table has, at one of these addresses; by sort of process."""
    known, allowed, found = members(folder), table(), dict[str, set[Listening]]()
    counts = Counter[tuple[int, str, str]]()
    for one in listening(pids):
        sort = sort_of(one.pid, one.command, known)
        found.setdefault(sort, set()).add(one)
        # What a loader has of its worker is the worker's.
        counts[one.pid, "worker" if sort == "loader" and one.family == "tcp" else sort, one.family] += 1
        if one.family != "unix":
            assert one.address.rpartition(":")[0] in addresses, one
    for (pid, sort, family), count in counts.items():
        assert count <= allowed[sort, family], (pid, sort, family, listening([pid]))
    return found


def of_folder(folder: Path) -> list[int]:
    return [one.pid for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(folder)]


def trains(folder: Path) -> bool:
    return (folder / "journal.jsonl").exists() and bool(journal(folder, "step"))


def together(folder: Path, count: int) -> bool:
    return any(len(event["workers"]) == count for event in journal(folder, "formed"))


def listed(tmp_path: Path, loaders: int, *options: str) -> dict[str, set[Listening]]:
    (tmp_path / "train.py").write_text(SCRIPT.replace("LOADERS", str(loaders)))
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--run-dir", "run", *options, "train.py"]
    process = Process(command, environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        until(lambda: trains(tmp_path / "run"))
        return check(tmp_path, of_folder(tmp_path), {"127.0.0.1"})
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_shows_its_page_and_figures(tmp_path: Path) -> None:
    page, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    found = listed(tmp_path, 1, "--page", page, "--metrics", metrics)
    assert {one.address for one in found["serving"]} == {page, metrics}
    assert found.keys() >= {"coordinator", "agent", "worker"}


def test_a_run_with_parameter_servers(tmp_path: Path) -> None:
    found = listed(tmp_path, 0, "--plan", "server=1")
    assert len(found["parameter server"]) == 2
    assert "serving" not in found


@pytest.mark.root
def test_a_run_on_two_hosts(cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("LOADERS", "0"))
    here = cluster(2)
    here.job = ["train.py"]
    here.start(0, 1)
    here.until(lambda: trains(here.agents[0].folder))
    here.start(1, 1)
    here.members(2)
    found = check(tmp_path, of_folder(tmp_path), {host.address for host in here.network.hosts})
    assert len({one.pid for one in found["worker"]}) == 2
    here.stop(0)
    here.end(75, 75)


@pytest.mark.parametrize("tunnel", [False, True])
@pytest.mark.root
@pytest.mark.slow
def test_a_run_that_ssh_launches(hosts: Callable[[int], Network], tmp_path: Path, tunnel: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("LOADERS", "0"))
    network = hosts(3)
    ssh = install_ssh(tmp_path, dict(zip("ab", network.hosts, strict=False)))
    words = ["--hosts", "a,b", "--run-dir", "run", "--min-workers", "2", "--cwd", str(tmp_path)]
    words += ["--workers-per-host", "1", "--env=CUDA_VISIBLE_DEVICES", f"--env=PYTHONPATH={SCRIPTS}"]
    command = [sys.executable, "-m", "paceline", "launch", "ssh", *words, *(["--tunnel"] if tunnel else []), "train.py"]
    path = f"{ssh}:{os.environ['PATH']}"
    process = piped(network.hosts[2].command(*command), tmp_path, devices="-1", PATH=path)
    try:
        until(lambda: trains(tmp_path / "run") and together(tmp_path / "run", 2), 200)
        pids = of_folder(tmp_path)
        own = {host.address for host in network.hosts}
        loopback = {one.address.rpartition(":")[0] for one in listening(pids) if one.address.startswith("127.")}
        found = check(tmp_path, pids, loopback if tunnel else own)
        assert found.keys() == {"agent", "coordinator", "worker", *(["launcher"] if tunnel else [])}
        assert len({one.pid for one in found["worker"]}) == 2
    finally:
        process.terminate()  # a launcher that is killed leaves the folder of its tunnel
        process.communicate(timeout=100)
        until(lambda: not of_folder(tmp_path))


def test_a_socket_that_the_page_does_not_have_is_found(tmp_path: Path) -> None:
    """By the check itself: a worker that listens on its own."""
    script = "import socket\nlistener = [socket.create_server(('127.0.0.1', 0)) for _ in range(20)]\n" + SCRIPT
    (tmp_path / "train.py").write_text(script.replace("LOADERS", "0"))
    command = [sys.executable, "-m", "paceline", "run", "--run-dir", "run", "train.py"]
    process = Process(command, environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        until(lambda: trains(tmp_path / "run"))
        with pytest.raises(AssertionError, match="worker"):
            check(tmp_path, of_folder(tmp_path), {"127.0.0.1"})
    finally:
        process.kill()
        process.communicate()
