"""Several hosts: workers in network namespaces of this machine, which share neither memory nor names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from agents import until
from cases import CASES
from launching import SCRIPTS, paceline
from networks import Network
from networks import hosts as hosts
from oracle import apart, train
from safetensors.torch import load_file

pytestmark = pytest.mark.root
Hosts = Callable[[int], Network]
TEAMS = {(2, 1): "[[0, 1], [2]]", (2, 2): "[[0, 1], [2, 3]]", (2, 1, 3): "[[0, 1], [2], [3, 4, 5]]"}
JOIN = "import paceline\nteam = paceline.join()\n"
ADD = JOIN + "import torch\nprint(team.all_reduce(torch.tensor([team.rank + 1]), name='places').item())\n"


@pytest.mark.parametrize(
    "counts", [(2, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in ((2, 2), (2, 1, 3)))], ids=str
)
def test_every_collective_gives_what_plain_arithmetic_gives(hosts: Hosts, counts: tuple[int, ...]) -> None:
    for worker in hosts(len(counts)).run(counts, SCRIPTS / "everything.py"):
        assert worker.stdout == f"hosts {TEAMS[counts]}\n"


@pytest.mark.slow
def test_every_collective_of_a_team_that_is_too_large_to_connect_all_with_all(hosts: Hosts) -> None:
    """Which is all that more than 64 workers do in another way."""
    for worker in hosts(2).run((2, 2), SCRIPTS / "everything.py", "many"):
        assert worker.stdout == f"hosts {TEAMS[2, 2]}\n"


# What each worker is connected with beside the store, whose port is not gloo's.
CONNECTED = """
import os, socket, sys
import torch
from paceline.comm import hierarchical as hosts
hosts.MESH = int(sys.argv[1])
import paceline

def connections():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                here, there = one.getsockname(), one.getpeername()
        except OSError:
            continue
        if isinstance(here, tuple) and 29500 not in (here[1], there[1]):
            found.append(there)
    return len(found)

team = paceline.join()
said = [connections()]
if team.rank in (1, 4):
    message = torch.ones(3)
    (team.group.receive if team.rank == 1 else team.group.send)(message, 5 - team.rank)
said.append(connections())
team.group.declare("exchange")
team.group.exchange([torch.ones(1)] * 6, [torch.empty(1) for _ in range(6)])
print(*said, connections())
"""


@pytest.mark.parametrize(("mesh", "leader", "other"), [(64, (7, 7, 7), (5, 5, 5)), (0, (2, 2, 7), (0, 0, 5))])
def test_who_is_connected_with_whom(
    hosts: Hosts, tmp_path: Path, mesh: int, leader: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """Of many the leaders, by two connections, and who sends each other something, until all do."""
    (tmp_path / "train.py").write_text(CONNECTED)
    for worker in hosts(2).run((3, 3), "train.py", str(mesh)):
        expected = [*(leader if worker.rank in (0, 3) else other)]
        if not mesh and worker.rank in (1, 4):
            expected = [0, 1, 6]
        assert [*map(int, worker.stdout.split())] == expected, worker.rank


# How often leaders write to each other for a collective, and what comes of it.
COUNTED = (
    JOIN
    + """
import torch
group, made = team.group, []
leaders = group.channel.hosts.leaders
whole = leaders.stream
leaders.stream = lambda *given: made.append(1) or whole(*given)
ones = lambda count, dtype=torch.float64: torch.full((count,), team.rank + 1, dtype=dtype)
for call in (
    lambda: group.sum(ones(63)),
    lambda: group.largest(ones(3, torch.bfloat16)),
    lambda: group.broadcast(ones(504, torch.uint8), 1),
    lambda: torch.cat(group.gather(ones(team.rank + 1))),
    lambda: group.sum(ones(64)),
    lambda: group.broadcast(ones(505, torch.uint8), 1),
):
    group.declare("some", check=False)
    made.clear()
    found = call()
    print(len(made), found.unique().tolist())
"""
)


def test_what_is_small_travels_with_the_question_whether_all_come_to_the_same(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COUNTED)
    for worker in hosts(2).run((1, 1), "train.py"):
        assert worker.stdout.splitlines() == [
            "1 [3.0]",
            "1 [2.0]",
            "1 [2]",
            "2 [1.0, 2.0]",  # lengths, and then what is that long
            "1 [3.0]",  # and a question that was asked ahead
            "2 [2]",
        ]


DIFFER = [
    ("group.broadcast(torch.ones(4), 0)", "group.broadcast(torch.ones(100_000), 0)"),
    ("group.sum(torch.ones(4))", "group.sum(torch.ones(4000))"),
    ("group.sum(torch.ones(4))", "group.sum(torch.ones(5))"),
    ("group.sum(torch.ones(4))", "group.largest(torch.ones(4))"),
    ("group.broadcast(torch.ones(4), 0)", "group.gather(torch.ones(4))"),
]


@pytest.mark.parametrize("calls", [DIFFER[0], *(pytest.param(pair, marks=pytest.mark.slow) for pair in DIFFER[1:])])
def test_hosts_that_come_to_different_collectives_say_so(hosts: Hosts, tmp_path: Path, calls: tuple[str, str]) -> None:
    """gloo by itself would end the process over sizes that differ, or mix what is not the same."""
    one, another = calls
    body = f"""
import torch
group = team.group
if team.rank == 0:
    group.declare("one", check=False)
    {one}
else:
    group.declare("another", check=False)
    {another}
"""
    (tmp_path / "train.py").write_text(JOIN + body)
    here = hosts(2)
    here.start((1, 1), "train.py")
    first, second = here.end()
    assert [first.code, second.code] == [1, 1], first.stderr + second.stderr
    # The other one may find the store gone with the first, before it knows why.
    assert "paceline.errors.CollectiveMismatchError: workers called different collectives: " in first.stderr


WAITING = (
    JOIN
    + """
import time, torch
if team.rank == 0:
    time.sleep(3.0)
    team.group.send(torch.ones(3), 1)
elif team.rank == 1:
    team.group.receive(came := torch.zeros(3), 0)
    print(came.tolist())
"""
)


@pytest.mark.parametrize("mesh", [64, 0])
def test_a_message_may_come_much_later_than_connections_may_take(hosts: Hosts, tmp_path: Path, mesh: int) -> None:
    (tmp_path / "train.py").write_text(f"from paceline.comm import hierarchical\nhierarchical.MESH = {mesh}\n{WAITING}")
    workers = hosts(2).run((1, 2), "train.py", everywhere={"PACELINE_JOIN_TIMEOUT": "3"})
    assert [worker.stdout for worker in workers] == ["", "[1.0, 1.0, 1.0]\n", ""]


@pytest.mark.parametrize("counts", [(2, 2), pytest.param((2, 1, 3), marks=pytest.mark.slow)], ids=str)
def test_weights_and_reports_are_those_of_one_process(hosts: Hosts, counts: tuple[int, ...], tmp_path: Path) -> None:
    hosts(len(counts)).run(counts, SCRIPTS / "contract.py", tmp_path / "out", *CASES)
    tensors, figures = load_file(tmp_path / "out.safetensors"), json.loads((tmp_path / "out.json").read_text())
    torch.set_num_threads(1)
    for name, case in CASES.items():
        alone = train(case)
        mine = {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
        assert apart(mine, alone.weights) <= 1e-12, name
        assert figures[name]["loss"] == pytest.approx(alone.figures["loss"], rel=1e-10)
        assert figures[name]["samples"] == alone.figures["samples"]
        assert figures[name]["evaluation"] == pytest.approx(alone.evaluation, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("counts", TEAMS, ids=str)
def test_exact_has_the_bits_of_one_worker(hosts: Hosts, counts: tuple[int, ...], tmp_path: Path) -> None:
    cases = ["mlp", "dropout", "batchnorm", "partly", "tokens"]
    hosts(len(counts)).run(counts, SCRIPTS / "contract.py", tmp_path / "out", *cases, "exact")
    paceline("run", "--workers", "1", SCRIPTS / "contract.py", tmp_path / "one", *cases, "exact", cwd=tmp_path)
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


# What one all-reduce costs on the wire is the difference between runs of many and of few.
SUMS = """
import sys, torch, torch.distributed as dist
from paceline.comm.autoload import register
register()
dist.init_process_group("paceline")
data, mine = torch.ones(2 << 20), torch.empty(1 << 19)
for _ in range(int(sys.argv[2])):
    dist.all_reduce(data) if sys.argv[1] == "all" else dist.reduce_scatter_tensor(mine, data)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("which", "bytes_"), [("all", 8 << 20), ("scattered", 4 << 20)])
def test_a_sum_crosses_the_wire_once_per_host(hosts: Hosts, tmp_path: Path, which: str, bytes_: int) -> None:
    """8 MB among two hosts: each sends half of it twice, or once where each worker keeps a part, however many workers
    it has.
    """
    (tmp_path / "sums.py").write_text(SUMS)
    here = hosts(2)
    sent = []
    for count in ("1", "5"):
        before = [host.sent() for host in here.hosts]
        here.run((2, 2), "sums.py", which, count)
        sent.append([host.sent() - was for host, was in zip(here.hosts, before, strict=True)])
    for few, many in zip(*sent, strict=True):
        assert (many - few) / 4 == pytest.approx(bytes_, rel=0.1)


# -- which way ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["eth0", "eth0,eth0"])
def test_the_interface_may_be_chosen(hosts: Hosts, tmp_path: Path, names: str) -> None:
    (tmp_path / "train.py").write_text(ADD)
    for worker in hosts(2).run((1, 2), "train.py", everywhere={"GLOO_SOCKET_IFNAME": names}):
        assert worker.stdout == "6\n"


def test_a_first_host_whose_name_is_the_loopback_to_itself(hosts: Hosts, tmp_path: Path) -> None:
    """As Debian writes it: worker 0 is found by the others under a name that on its own host means 127.0.1.1."""
    (tmp_path / "train.py").write_text(ADD)
    here = hosts(2)
    for number, address in enumerate(("127.0.1.1", here.hosts[0].address)):
        here.hosts[number].known = tmp_path / f"hosts-{number}"
        here.hosts[number].known.write_text(f"127.0.0.1 localhost\n{address} first\n")
    for worker in here.run((2, 1), "train.py", everywhere={"MASTER_ADDR": "first"}):
        assert worker.stdout == "6\n"


def test_an_interface_that_is_not_there_is_said_by_every_worker(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ADD)
    here = hosts(2)
    here.start((2, 1), "train.py", by_host=[{}, {"GLOO_SOCKET_IFNAME": "ib0"}])
    for worker in here.end():
        assert worker.code == 1
        assert (
            "UsageError: worker 2 found no network interface to reach other hosts (GLOO_SOCKET_IFNAME=ib0); "
            "set GLOO_SOCKET_IFNAME on its host to the interface that the others can reach; it has lo, eth0\n"
        ) in worker.stderr


@pytest.mark.slow
def test_an_interface_that_leads_nowhere(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ADD)
    here = hosts(2)
    here.start((1, 1), "train.py", everywhere={"GLOO_SOCKET_IFNAME": "lo", "PACELINE_JOIN_TIMEOUT": "3"})
    for worker in here.end():
        assert worker.code == 1
        said = (
            f"PeerLostError: worker {worker.rank} could not connect to workers of other hosts from the interface lo ("
        )
        assert said in worker.stderr
        assert (
            "; let the hosts reach each other on all ports, and set GLOO_SOCKET_IFNAME on each host to the interface "
            "that the others can reach; this host has lo, eth0\n"
        ) in worker.stderr


# -- who does not come --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("address", "reason"), [("10.99.0.1", "Network is unreachable"), ("first", "")])
def test_an_address_that_leads_nowhere(hosts: Hosts, tmp_path: Path, address: str, reason: str) -> None:
    """Worker 0 itself serves on all its addresses, and hears that nobody came. Why no name is known may differ."""
    (tmp_path / "train.py").write_text(JOIN)
    here = hosts(2)
    places = [{}, {"MASTER_ADDR": address}]
    here.start((1, 1), "train.py", everywhere={"PACELINE_JOIN_TIMEOUT": "2"}, by_host=places)
    first, second = here.end()
    assert (first.code, second.code) == (1, 1)
    assert (
        "PeerLostError: worker 0 waited 2 s for worker 1, which did not join; "
        "see their logs; start every worker, all with the same number of workers\n"
    ) in first.stderr
    assert f"PeerLostError: worker 1 could not reach worker 0 at {address}:29500 within 2 s ({reason}" in second.stderr
    cure = "see the log of worker 0; if it is running, set MASTER_ADDR to its host's address, and open this port"
    assert second.stderr.endswith(f"); {cure}\n")


DYING = """
import os, time, torch
from paceline.comm import peer_status as status
status.EXPLAIN = 1.0  # who was killed says nothing
group, data = team.group, torch.ones(1000, dtype=torch.uint8)
for step in range(1000):
    if step == 5:
        open("there-%d" % team.rank, "w").close()
        while {late} and not os.path.exists("gone"):
            time.sleep(0.01)
    {operation}
    time.sleep(0.01)
"""
SUM = "team.all_reduce(data, name='much')"
FEW = "team.all_reduce(data[:8].clone(), name='few')"
MESSAGE = "[group.send_bytes(data, other) for other in range(3)] if team.rank == 3 else group.receive_bytes(3)"


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.slow), True], ids=["meanwhile", "before"])
@pytest.mark.parametrize("operation", [SUM, FEW, MESSAGE], ids=["sum", "few", "message"])
def test_a_worker_that_dies_on_another_host(hosts: Hosts, tmp_path: Path, operation: str, late: bool) -> None:
    """Meanwhile, or before the others begin what they cannot end: gloo then refuses to start it."""
    (tmp_path / "train.py").write_text(JOIN + DYING.format(operation=operation, late=late))
    here = hosts(3)
    workers = here.start((2, 1, 1), "train.py")
    until(lambda: all((tmp_path / f"there-{worker.rank}").exists() for worker in workers))
    os.kill(workers[3].process.pid, signal.SIGKILL)
    workers[3].process.wait()
    (tmp_path / "gone").touch()
    *rest, killed = here.end()
    assert killed.code == -signal.SIGKILL
    for worker in rest:
        assert worker.code == 1
        assert f"PeerLostError: worker {worker.rank} " in worker.stderr


OCCUPANT = """
import socket, time
silent = socket.socket()
silent.bind(("0.0.0.0", 29500))
silent.listen()
print("here", flush=True)
time.sleep(300)
"""


def test_a_port_that_is_taken(hosts: Hosts, tmp_path: Path) -> None:
    """By something that takes connections and says nothing."""
    (tmp_path / "train.py").write_text(JOIN)
    here = hosts(1)
    command = here.hosts[0].command(sys.executable, "-c", OCCUPANT)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as occupant:
        try:
            assert occupant.stdout is not None
            assert occupant.stdout.readline() == "here\n"
            here.start((2,), "train.py", everywhere={"PACELINE_JOIN_TIMEOUT": "2"})
            first, second = here.end()
        finally:
            occupant.kill()
    assert (first.code, second.code) == (1, 1)
    assert "LaunchError: worker 0 could not open the store at 10.77.0.1:29500 (" in first.stderr
    cure = "if another program uses this port, set MASTER_PORT to a free port for all workers\n"
    assert first.stderr.endswith(f"; {cure}")
    assert (
        "LaunchError: worker 1 could not use the store at 10.77.0.1:29500 "
        f"(the program at this address does not answer as a store); {cure}"
    ) in second.stderr
