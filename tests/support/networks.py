"""Hosts on this machine: each a network namespace with an own address, all on one switch, and no names known."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from paths import SCRIPTS
from warm import Process, environment

_numbers = itertools.count()
# What a host is inside: its own name, and a hosts file that knows nobody.
INSIDE = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
PORT = 29500


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@dataclass
class Host:
    """`address` on the switch, through the device eth0."""

    space: str
    address: str
    known: Path

    @property
    def inside(self) -> tuple[str, str, str]:
        """Where a `Process` is to run that runs on this host."""
        return f"/run/netns/{self.space}", str(self.known), f"nowhere-{self.address.rpartition('.')[2]}"

    def command(self, *command: str | Path) -> list[str]:
        """The command that runs `command` on this host."""
        space, known, name = self.inside
        enter = ["nsenter", f"--net={space}", "unshare", "--uts", "--mount", "sh", "-c", INSIDE, "sh"]
        return [*enter, known, name, *map(str, command)]

    def sent(self) -> int:
        """Bytes that left through eth0 so far."""
        (device,) = json.loads(ip("-n", self.space, "-s", "-j", "link", "show", "dev", "eth0"))
        return int(device["stats64"]["tx"]["bytes"])

    def cap(self, mbit: int) -> None:
        """What leaves through eth0 goes at so many Mbit/s."""
        enter = ["nsenter", f"--net=/run/netns/{self.space}", "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"]
        shape = ["rate", f"{mbit}mbit", "burst", f"{max(64, mbit)}kb", "latency", "50ms"]
        subprocess.run([*enter, *shape], check=True)

    def cut(self) -> None:
        """Pulls the cable."""
        ip("-n", self.space, "link", "set", "eth0", "down")

    def mend(self) -> None:
        ip("-n", self.space, "link", "set", "eth0", "up")


@contextmanager
def far(one: Host, other: Host, seconds: float) -> Iterator[None]:
    """What one sends to the other takes so long, each way."""
    command = [sys.executable, SCRIPTS / "far.py", one.space, other.space, str(seconds)]
    for host in (one, other):
        ip("-n", host.space, "link", "set", "eth0", "down")
        ip("-n", host.space, "link", "set", "eth0", "name", "near")
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as forwards:
        try:
            assert forwards.stdout is not None
            assert forwards.stdout.readline() == "ready\n"
            for host in (one, other):
                ip("-n", host.space, "addr", "del", f"{host.address}/24", "dev", "near")
                ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
                ip("-n", host.space, "link", "set", "eth0", "mtu", "9000", "up")
            yield
        finally:
            forwards.kill()


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[str]
    code: int = 0
    stdout: str = ""
    stderr: str = ""


@dataclass
class Network:
    """Hosts with the addresses 10.77.0.1, 10.77.0.2, ..., and the workers on them."""

    hosts: list[Host]
    folder: Path
    switch: str
    workers: list[Worker] = field(default_factory=list)

    def start(
        self,
        counts: Sequence[int],
        *command: str | Path,
        everywhere: Mapping[str, str] | None = None,
        by_host: Sequence[Mapping[str, str]] = (),
    ) -> list[Worker]:
        """Starts `counts` workers on the hosts with torchrun's variables; `by_host` are further ones of each host."""
        self.workers, size = [], sum(counts)
        for number, (host, count) in enumerate(zip(self.hosts, counts, strict=True)):
            for local in range(count):
                rank = len(self.workers)
                env = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count}
                env |= {"MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1}
                env |= {"CUDA_VISIBLE_DEVICES": "", **(everywhere or {}), **(by_host[number] if by_host else {})}
                process = Process(
                    [sys.executable, *command],
                    environment(**{name: str(value) for name, value in env.items()}),
                    host.inside,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                self.workers.append(Worker(rank, process))
        return self.workers

    def end(self, timeout: float = 240) -> list[Worker]:
        """Waits for the workers."""
        for worker in self.workers:
            worker.stdout, worker.stderr = worker.process.communicate(timeout=timeout)
            worker.code = worker.process.returncode
        return self.workers

    def run(self, counts: Sequence[int], *command: str | Path, **more: Mapping[str, str]) -> list[Worker]:
        """Starts workers that all must end well."""
        self.start(counts, *command, **more)
        for worker in self.end():
            assert worker.code == 0, f"worker {worker.rank} ended with {worker.code}\n{worker.stdout}\n{worker.stderr}"
        return self.workers

    def part(self, *hosts: Host) -> None:
        """From now on none of these reaches another one, but all reach the rest."""
        for host in hosts:
            port = f"v{host.address.rpartition('.')[2]}"
            ip("-n", self.switch, "link", "set", port, "type", "bridge_slave", "isolated", "on")

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.communicate()


@contextmanager
def network(count: int, folder: Path) -> Iterator[Network]:
    """`count` hosts. Everything is in namespaces of our own, named after this process, and goes with them."""
    known = folder / "hosts"
    known.write_text("127.0.0.1 localhost\n")
    prefix = f"paceline-{os.getpid()}-{next(_numbers)}"
    with ExitStack() as stack:

        def space(name: str) -> str:
            ip("netns", "add", f"{prefix}-{name}")
            stack.callback(ip, "netns", "del", f"{prefix}-{name}")
            ip("-n", f"{prefix}-{name}", "link", "set", "lo", "up")
            return f"{prefix}-{name}"

        switch = space("switch")
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        hosts = []
        for number in range(1, count + 1):
            host = Host(space(str(number)), f"10.77.0.{number}", known)
            ip("-n", switch, "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", host.space)
            ip("-n", switch, "link", "set", f"v{number}", "master", "br0", "up")
            ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.space, "link", "set", "eth0", "up")
            hosts.append(host)
        made = Network(hosts, folder, switch)
        stack.callback(made.close)
        yield made


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[int], Network]]:
    """Makes hosts for a test."""
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(network(count, tmp_path))


def join_over(
    net: Network, base: Path, workers: int, start: Callable[..., subprocess.Popen[bytes]]
) -> list[subprocess.Popen[bytes]]:
    """A run of so many workers on the first host, in `base`/run, and what joins it on the second one: `start(host, run
    folder, *options)` starts each.
    """
    at, run = f"{net.hosts[0].address}:{PORT}", base / "run"
    first = start(net.hosts[0], run, "--listen", at, "--min-workers", str(workers))
    while not (run / "coordinator.json").exists() and first.poll() is None:
        time.sleep(0.1)
    return [first, start(net.hosts[1], base / "joins", "--join", at, "--token-file", str(run / "token"))]
