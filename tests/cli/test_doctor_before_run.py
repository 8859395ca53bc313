"""`paceline doctor` before a run: what this host has, and what hosts have and are to each other."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from conftest import lacking
from fake_ssh import install_ssh
from launching import SCRIPTS, environment, paceline
from networks import Network
from networks import hosts as hosts
from test_ssh import Shore

from paceline.launch import preflight as checkup
from paceline.launch.engines.preflight_hosts import ALL, rounds

SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift 2
exec "$@"
"""


def test_this_host(tmp_path: Path) -> None:
    said = paceline("doctor", cwd=tmp_path).stdout.splitlines()
    assert re.fullmatch(r"ok    python 3\.\S+, torch 2\.\S+, paceline \S+", said[0])
    assert any(re.fullmatch(r"ok    a copy through shared memory is correct, [\d.]+ GB/s", line) for line in said)
    assert any(re.fullmatch(rf"ok    .* free in {tmp_path}, a flush takes \d+ ms", line) for line in said)
    assert said[-2:] == ["ok    no launcher found: `python train.py` trains with one worker", "ready to start a run"]


def test_what_is_wrong_here(tmp_path: Path) -> None:
    """The variables of two starts, one of which disagrees with itself; an interface that is none."""
    said = paceline(
        *("doctor",),
        cwd=tmp_path,
        code=1,
        RANK="3",
        WORLD_SIZE="2",
        GLOO_SOCKET_IFNAME="eth77",
        SKYPILOT_NODE_RANK="1",
        SKYPILOT_NUM_NODES="2",
        DSTACK_NODE_RANK="0",
        DSTACK_NODES_NUM="2",
    ).stdout.splitlines()
    bad = [line for line in said if line.startswith("BAD")]
    assert re.fullmatch(
        r"BAD   GLOO_SOCKET_IFNAME=eth77 is not an interface: unset it, or use one of lo\b.*",
        bad[0],
    )
    assert bad[1:] == [
        "BAD   RANK=3 must be less than WORLD_SIZE=2: number the workers from 0",
        (
            "BAD   the variables of SkyPilot and dstack contradict each other: unset the variables that another"
            " launcher left"
        ),
    ]
    assert said[-1] == "3 problems to fix"


def test_who_has_started_us(tmp_path: Path) -> None:
    sky = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    torchs = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    said = paceline("doctor", cwd=tmp_path, **torchs, **sky).stdout
    assert "ok    started by torchrun: `python train.py` is worker 1 of 2\n" in said
    assert "ok    node 1 of 4 at 10.0.0.1: start `paceline run --nodes auto train.py` on each node\n" in said


def test_a_small_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkup.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 26, 0, 1 << 26 - 1))
    (found,) = checkup._room()
    cure = "use docker run --shm-size=8g, or a memory emptyDir in Kubernetes"
    assert str(found) == f"BAD   33.6 MB free in /dev/shm: {cure}"


@pytest.mark.slow
@pytest.mark.root
def test_it_is_named_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from basics import *\nfor report in make().steps(data, count=2): pass\n")
    command = f"{sys.executable} -m paceline run --workers 2 --run-dir out train.py"
    inside = f"mount -t tmpfs -o size=48m tmpfs /dev/shm && exec {command}"
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-c", inside], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    before, _, after = ran.stderr.partition(
        "\n50.3 MB free in /dev/shm: use docker run --shm-size=8g, or a memory emptyDir in Kubernetes\n"
    )
    assert "run folder out" in before
    assert "step 2/2" in after


@pytest.mark.parametrize("count", range(2, 13))
def test_all_pairs_are_tried(count: int) -> None:
    """Each host once in a round; each pair once, of many hosts so many that each has seven."""
    found = [*rounds(count)]
    for pairs in found:
        assert max(Counter(host for pair in pairs for host in pair).values()) == 1
    seen = [pair for pairs in found for pair in pairs]
    assert len({*seen}) == len(seen)
    if count <= ALL:
        assert {*seen} == {*combinations(range(count), 2)}
    else:
        each = Counter(host for pair in seen for host in pair)
        assert min(each.values()) >= ALL - 2


def test_hosts_one_of_which_does_not_come(tmp_path: Path) -> None:
    """Where ssh is a shell here."""
    (tmp_path / "ssh").write_text(SSH.replace("shift 2", '[ "$2" != c ] || exit 255; shift 2'))
    (tmp_path / "ssh").chmod(0o755)
    words = ("doctor", "--hosts", "a,b,c", "--python", sys.executable)
    said = paceline(*words, cwd=tmp_path, code=1, PATH=f"{tmp_path}:/usr/bin:/bin").stdout.splitlines()
    for name, line in zip("ab", said[:2], strict=True):
        assert re.fullmatch(rf"{name}  [\d.]+, python 3\S+, torch 2\S+, paceline \S+, clock [+-]0\.\d{{3}} s", line)
    assert re.fullmatch(r"a to b: [\d,]+ Mbit/s, [\d.]+ ms round trip", said[2])
    assert "BAD   c does not answer: no output" in said
    assert said[-1] == "1 problem to fix"


LAN = "ip link set lo up; ip link add lan type veth peer name far; "
LAN += "ip addr add 10.9.9.1/24 dev lan; ip link set far up; ip link set lan up; "


def in_own_network(network: str, command: str, folder: Path) -> list[str]:
    """What a command of the shell says where there is no network but this one, and no route beyond it."""
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"{network} {command}"],
        cwd=folder,
        env=environment(PATH=f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin"),
        capture_output=True,
        text=True,
    )
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.root
def test_a_host_without_a_default_route_is_reached_in_its_own_network(tmp_path: Path) -> None:
    doctor, name = f"{sys.executable} -m paceline doctor", socket.gethostname()
    said = in_own_network(LAN, doctor, tmp_path)
    reached = f"other hosts reach {name} at 10.9.9.1, only in its own network: this host has no default route"
    assert next(line for line in said if "10.9.9.1" in line)[6:].startswith(reached)
    assert said[-1] == "ready to start a run"
    said = in_own_network("", doctor, tmp_path)
    assert f"note  {name} has no network address: only workers on this host can connect to each other" in said


@pytest.mark.root
@pytest.mark.parametrize("known", [True, False], ids=["reached through ssh", "by another name"])
def test_hosts_without_a_default_route_can_meet(known: bool, tmp_path: Path) -> None:
    """Nothing else is said under a link that was measured."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    way = "export SSH_CONNECTION='10.9.9.1 5 10.9.9.1 22'; " if known else ""
    command = f"{way}{sys.executable} -m paceline doctor --hosts a,b --python {sys.executable}"
    said = in_own_network(LAN, command, tmp_path)
    assert re.fullmatch(r"a to b: [\d,]+ Mbit/s, [\d.]+ ms round trip", said[2])
    assert [line for line in said if "meet" in line or "BAD" in line] == []
    assert said[-1] == "ready to start a run"


@pytest.mark.root
def test_hosts_without_any_network_have_no_link(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    command = f"{sys.executable} -m paceline doctor --hosts a,b --python {sys.executable}"
    said = in_own_network("ip link set lo up;", command, tmp_path)
    cure = "open all ports between the hosts, or those of --listen and of the coordinator"
    assert f"BAD   a cannot reach b (it has no network address): {cure}" in said
    assert not any("Mbit/s" in line for line in said)


@pytest.mark.slow
@pytest.mark.root
def test_hosts_behind_ssh(hosts: Callable[[int], Network], tmp_path: Path) -> None:
    """A link of 20 Mbit/s is found, and one that is none is named."""
    if shutil.which("sshd", path="/usr/sbin") is None:
        lacking("there is no sshd: run .ci/servers")
    shore = Shore(hosts(4), tmp_path, "ssh")
    try:
        one, other, third = shore.hosts
        other.cap(20)
        subprocess.run(one.command("ip", "route", "add", "unreachable", third.address), check=True)
        config = f"--engine=-F {tmp_path / 'config'}"
        words = ("doctor", "--hosts", "a,b,c", "--python", sys.executable, config)
        said = subprocess.run(
            shore.here.command(sys.executable, "-m", "paceline", *words), cwd=tmp_path, capture_output=True, text=True
        )
    finally:
        shore.close()
    assert said.returncode == 1, said.stderr
    rate = {
        line.partition(":")[0]: float(line.split(": ")[1].split()[0].replace(",", ""))
        for line in said.stdout.splitlines()
        if "Mbit/s" in line
    }
    assert 15 < rate["b to c"] < 25
    assert rate["a to b"] > 100
    assert (
        "BAD   a cannot reach c (No route to host): open all ports between the hosts, or those of --listen and "
        "of the coordinator" in said.stdout.splitlines()
    )


@pytest.mark.slow
@pytest.mark.root
def test_launch_compares_hosts_before_the_run(hosts: Callable[[int], Network], tmp_path: Path) -> None:
    """All figures are shown, and a host with a link of 20 Mbit/s is named; without the check nothing is."""
    network = hosts(4)
    *far, here = network.hosts
    far[1].cap(20)
    ssh = {"PATH": f"{install_ssh(tmp_path, dict(zip('abc', far, strict=True)))}:{os.environ['PATH']}"}
    (tmp_path / "train.py").write_text("from basics import *\nfor report in make().steps(data, count=2): pass\n")
    variables = [
        f"--env={name}={value}" for name, value in {"PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"}.items()
    ]
    command = [sys.executable, "-m", "paceline", "launch", "ssh", "--hosts", "a,b,c", "--workers-per-host", "1"]

    def launched(*options: str) -> str:
        words = here.command(*command, *variables, *options, "train.py")
        done = subprocess.run(words, cwd=tmp_path, env=environment(**ssh), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    said = launched("--run-dir", "one")
    assert "\nchecking 3 hosts: memory, processors, disks, clocks and links\n" in f"\n{said}"
    number = r"[\d.,]+"
    spans = [f"memory bandwidth {number}( to {number})? GB/s", f"matrix products {number}( to {number})? GFLOP/s"]
    spans += [f"a flush to disk {number}( to {number})? ms", f"links {number} to {number} Mbit/s"]
    assert re.search(rf"^checked 3 hosts in \d\.\d s: {', '.join(spans)}$", said, re.M), said
    slow = rf"^the link from b to c is slow: speed: {number} Mbit/s; the others {number} to {number} Mbit/s$"
    assert re.search(slow, said, re.M), said
    assert "checking" not in launched("--run-dir", "two", "--no-preflight")
