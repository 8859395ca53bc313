"""A collective ends on all survivors as soon as it is known that a member is lost, wherever it stands; and then a new
group works in the same processes. The verdict is the test's: it kills, stops or cuts off a member and tells the rest.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from launching import SCRIPTS
from networks import Host
from networks import hosts as hosts
from warm import Process

PORT = 29500
STORE = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("0.0.0.0", int(sys.argv[1]), None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(3600)
"""


class Members:
    """Workers that take commands, two on each of `hosts` if there are any, where the last of them has the store; a
    killed one is replaced by a fresh process of the same rank.
    """

    def __init__(self, size: int, hosts: Sequence[Host] = ()) -> None:
        self.size, self.hosts = size, hosts
        self.address = hosts[-1].address if hosts else "127.0.0.1"
        self.store = self.begin(len(hosts) - 1, "-c", STORE, PORT if hosts else 0)
        (self.port,) = self.hear(self.store)
        self.processes = [self.start(rank) for rank in range(size)]
        for process in self.processes:
            assert self.hear(process) == ["ready"]
        self.number = 0

    def begin(self, host: int, *command: str | Path | int) -> subprocess.Popen[str]:
        python = [sys.executable, *map(str, command)]
        inside = self.hosts[host].inside if self.hosts else None
        return Process(python, inside=inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(self, rank: int) -> subprocess.Popen[str]:
        return self.begin(rank // 2, SCRIPTS / "interrupted.py", rank, self.size)

    @staticmethod
    def hear(process: subprocess.Popen[str]) -> list[str]:
        assert process.stdout is not None
        return process.stdout.readline().split(maxsplit=2)

    @staticmethod
    def tell(process: subprocess.Popen[str], text: str) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{text}\n")
        process.stdin.flush()

    def run(self) -> None:
        """A new group of all, in the midst of its collectives."""
        self.number += 1
        for process in self.processes:
            members = " ".join(map(str, range(self.size)))
            self.tell(process, f"start {self.number} {self.port} {self.address} {members}")
        for process in self.processes:
            assert self.hear(process) == ["running"]

    def give_verdict(self, processes: Sequence[subprocess.Popen[str]]) -> list[float]:
        """Tells them; their seconds to the error."""
        seconds = []
        for process in processes:
            self.tell(process, "verdict")
        for process in processes:
            word, waited, *_ = self.hear(process)
            assert word == "out"
            seconds.append(float(waited))
        return seconds

    def lose(self, rank: int, how: signal.Signals) -> list[float]:
        """Loses one; the seconds of the others. Puts a new one in its place."""
        lost = self.processes[rank]
        lost.send_signal(how)
        if how == signal.SIGKILL:
            lost.wait()
        seconds = self.give_verdict([process for process in self.processes if process is not lost])
        if how == signal.SIGKILL:
            self.processes[rank] = self.start(rank)
            assert self.hear(self.processes[rank]) == ["ready"]
        else:  # it wakes up in the old group, where nothing is left to harm, and is told as well
            lost.send_signal(signal.SIGCONT)
            self.give_verdict([lost])
        return seconds

    def cut_off(self, host: int) -> list[float]:
        """Pulls the cable of a host; the seconds of the workers of the others. Its own are told when it is back; the
        last host has none, but the store.
        """
        self.hosts[host].cut()
        # What was on the wire has arrived; nobody can have gone on far without the host, or without the store.
        time.sleep(0.05 if 2 * host < self.size else 2.0)
        lost = self.processes[2 * host : 2 * host + 2]
        seconds = self.give_verdict([process for process in self.processes if process not in lost])
        self.hosts[host].mend()
        self.give_verdict(lost)
        return seconds

    def end(self) -> None:
        for process in [*self.processes, self.store]:
            process.kill()
            process.wait()


def trials(count: int, size: int, seed: int, hosts: Sequence[Host] = ()) -> list[float]:
    """The seconds that each trial's last survivor took."""
    members, chance, slowest = Members(size, hosts), random.Random(seed), []
    try:
        for _ in range(count):
            members.run()
            time.sleep(chance.uniform(0, 0.05))
            if hosts:
                slowest.append(max(members.cut_off(chance.randrange(len(hosts)))))
            else:
                how = chance.choice([signal.SIGKILL, signal.SIGSTOP])
                slowest.append(max(members.lose(chance.randrange(size), how)))
    finally:
        members.end()
    slowest.sort()
    median, most = slowest[count // 2], slowest[-1]
    print(f"seconds to the last survivor: median {median:.3f}, 99 % {slowest[count * 99 // 100]:.3f}, most {most:.3f}")
    return slowest


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("count", "size"), [(5, 3), pytest.param(500, 6, marks=pytest.mark.slow)])
def test_kill_or_stop_of_a_worker_ends_any_collective_and_the_others_form_a_new_group(count, size):
    """The figure is printed; what is asserted is that no worker hangs."""
    assert len(trials(count, size, seed=1)) == count


@pytest.mark.root
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("count", "size"), [(2, 4), pytest.param(100, 6, marks=pytest.mark.slow)])
def test_network_cut_of_a_host_ends_any_collective_and_the_others_form_a_new_group(hosts, count, size):
    assert len(trials(count, size, seed=3, hosts=hosts(size // 2 + 1).hosts)) == count
