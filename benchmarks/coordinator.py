"""CPU seconds that a coordinator's decisions take, where many workers on many hosts are in one run.

Usage: coordinator.py [--hosts N] [--each N] [--rounds N] [--record FILE]. The acts of a run are replayed: all begin, a
worker is killed, comes back, a host is lost, all stop and end. What agents report and are told passes through JSON as
it does in the coordinator's process; HTTP and signatures, of which each agent has its own, are not counted. The aim
for 1,000 workers on 125 hosts: a loss is decided in 50 ms, and all their reports take 200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turns import record

from paceline.team.server import read_said

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from replay import Replay

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
            said = {int(number): read_said(worker) for number, worker in json.loads(body).items()}
            self.coordinator.report(f"agent {host}", said, 1, self.now)

        self._count(hear)

    def ask(self, host: int) -> Any:
        return self._count(lambda: json.dumps(self.coordinator.orders(f"agent {host}")))

    def lost(self, host: int) -> None:
        self._count(lambda: self.coordinator.lost_agent(f"agent {host}", "it is silent"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hosts", type=int, default=125)
    parser.add_argument("--each", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
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
