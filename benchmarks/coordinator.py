"""CPU seconds that a coordinator's decisions take, where many workers on many hosts are in one run.

Usage: coordinator.py [--hosts N] [--each N] [--rounds N] [--served] [--record FILE]. The acts of a run are replayed:
all begin, a worker is killed, comes back, a host is lost, all stop and end. What agents report and are told passes
through JSON as in the coordinator's process; HTTP and signatures, of which each agent has its own, are not counted. The
aim for 1,000 workers on 125 hosts: a loss is decided in 50 ms, and all their reports take 200.

With `--served` it is the coordinator's process, asked over HTTP and with signatures: all CPU seconds that it takes
until all have joined (with its start), have begun, know of a loss and have entered the generation after it, and for ten
reports of each agent that nothing is new. The aim for 1,000 workers: a generation in 5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from turns import record

from paceline.base.journal import NAME
from paceline.team.auth import make_token
from paceline.team.coordinator import WorkerReport
from paceline.team.coordinator_client import CoordinatorClient, Wire
from paceline.team.coordinator_server import read_report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from replay import STORE, Replay

ACTS = ["begin", "news", "lose_worker", "news", "enter", "come_back", "lose_host", "news", "enter", "leave", "end"]


class Timed(Replay):
    """Counts what is the coordinator's own: not the making of reports."""

    spent = 0.0

    def _count(self, work: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = work()
        self.spent += time.process_time() - began
        return result

    def tell(self, host: int) -> None:
        body = json.dumps({worker: asdict(said) for worker, said in self.said[host].items()})

        def hear() -> None:
            said = {int(number): read_report(worker) for number, worker in json.loads(body).items()}
            self.coordinator.report(f"agent {host}", said, 1, self.now)

        self._count(hear)

    def ask(self, host: int) -> Any:
        return self._count(lambda: json.dumps(self.coordinator.orders(f"agent {host}")))

    def lost(self, host: int) -> None:
        self._count(lambda: self.coordinator.lost_agent(f"agent {host}", "it is silent"))


# Agents that ask one after another are silent meanwhile.
PATIENT = """
import json, sys
from paceline.team import coordinator_server as server
server.SILENT = server.PATIENCE = 1e9
make = server.LimitedServer
server.LimitedServer = lambda routes, **more: make(routes, **{**more, "idle_connection_timeout": 1e6})
server.main(int(sys.argv[1]), json.loads(sys.argv[2]))
"""


class Served:
    """A coordinator's process, and what `hosts` agents with `each` workers ask it, one after another."""

    def __init__(self, folder: Path, hosts: int, each: int) -> None:
        (folder / "logs").mkdir(parents=True)
        (folder / NAME).touch()
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            address = listener.getsockname()
            rules = {"max_restarts": 3, "min_workers": 1, "script": "train.py", "same": {}}
            given = {"folder": str(folder), "run": rules, "since": 0, "generation": [0, [*range(hosts * each)]]}
            given |= {"epoch": 1, "again": False, "address": address}
            command = [sys.executable, "-c", PATIENT, str(listener.fileno()), json.dumps(given)]
            self.process = subprocess.Popen(command, pass_fds=[listener.fileno()])
            token = make_token(folder)
        self.said = [{host * each + local: WorkerReport(store=STORE) for local in range(each)} for host in range(hosts)]
        self.links, self.wires = list[CoordinatorClient](), [Wire(address, 60.0) for _ in range(hosts)]
        for number, workers in enumerate(self.said):
            about = {"agent": f"agent {number}", "host": f"host-{number}", "logs": "logs", "standby": STORE}
            self.links.append(
                CoordinatorClient(address, token, {**about, "numbers": [*workers], "count": each, "same": {}})
            )

    @property
    def spent(self) -> float:
        """CPU seconds of the coordinator so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def join(self) -> None:
        for link, wire in zip(self.links, self.wires, strict=True):
            link._join(wire)

    def ask(self, host: int, method: str, path: str, said: Any) -> Any:
        link = self.links[host]
        assert link._session is not None
        return link._ask(self.wires[host], link._session, method, path, said)

    def everybody(self, **fields: Any) -> None:
        """All report this of their living workers."""
        for host, workers in enumerate(self.said):
            for worker, said in workers.items():
                workers[worker] = replace(said, **fields) if said.status is None else said
            told = {str(worker): asdict(said) for worker, said in workers.items()}
            self.ask(host, "POST", "/report", {"epoch": 1, "workers": told, "step": 0})

    def lose_worker(self) -> None:
        """And all are told of the generation after it."""
        last = max(self.said[0])
        self.said[0][last] = replace(self.said[0][last], status=-9, why="was killed")
        told = {str(worker): asdict(said) for worker, said in self.said[0].items()}
        self.ask(0, "POST", "/report", {"epoch": 1, "workers": told, "step": 0})
        for host in range(len(self.links)):
            assert self.ask(host, "GET", "/orders?version=0", None)["generation"]["number"] == 1

    def beat(self) -> None:
        """Ten times all say that nothing is new."""
        for _ in range(10):
            for host in range(len(self.links)):
                self.ask(host, "POST", "/report", {"epoch": 1, "same": True})


def serve(hosts: int, each: int) -> dict[str, float]:
    served = Served(Path(tempfile.mkdtemp()) / "run", hosts, each)
    acts = {
        "join": served.join,
        "begin": lambda: served.everybody(ready=True, formed=0),
        "lose_worker": served.lose_worker,
        "enter": lambda: served.everybody(formed=1),
        "ten beats": served.beat,
    }
    seconds = dict[str, float]()
    try:
        for act, do in acts.items():
            before = served.spent
            do()
            seconds[act] = served.spent - before
    finally:
        served.process.kill()
        served.process.wait()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hosts", type=int, default=125)
    parser.add_argument("--each", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
    if asked.served:
        spent = serve(asked.hosts, asked.each)
        print("\n".join(f"{act}: {seconds:.2f} s of the coordinator's CPU" for act, seconds in spent.items()))
        if asked.record is not None:
            record(asked.record, workers=asked.hosts * asked.each, hosts=asked.hosts, served=spent)
        return
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(asked.rounds):
        replay = Timed(asked.hosts, asked.each)
        for act in ACTS:
            replay.spent = 0.0
            getattr(replay, act)()
            seconds[act].append(replay.spent)
    for act, some in seconds.items():
        print(f"{act}: {1000 * statistics.median(some):.1f} ms")
    if asked.record is not None:
        record(asked.record, workers=asked.hosts * asked.each, hosts=asked.hosts, seconds=seconds)


if __name__ == "__main__":
    main()
