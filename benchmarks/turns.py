"""What benchmarks share: teams of workers that take turns, ratios with their interval, and the record of a measurement.

No torch: start_up.py measures what importing it takes.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

WORKERS, WARM_UP = 2, 14
Processes = list["subprocess.Popen[bytes]"]


@dataclass
class Taken:
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by side: a step's in each round, slower worker
    losses: dict[str, list[list[float]]] = field(default_factory=dict)  # by side and rank: of every step

    def apart(self) -> float:
        """The largest relative difference of two sides' losses in a step, the mean over the workers."""
        first, *others = (
            [statistics.fmean(step) for step in zip(*ranks, strict=True)] for ranks in self.losses.values()
        )
        return max(abs(mine - its) / abs(its) for other in others for mine, its in zip(other, first, strict=True))


def take(
    address: str, side: str, rank: int, stepping: Iterator[float], clock: Callable[[], float] = time.perf_counter
) -> None:
    """What a worker does: it takes its steps whenever it is told to."""
    with Client(address) as turns:
        turns.send((side, rank))
        while (count := turns.recv()) is not None:
            began = clock()
            losses = [next(stepping) for _ in range(count)]
            turns.send((clock() - began, losses))
    stepping.close()  # type: ignore[attr-defined]


def launch(
    script: Sequence[str], environment: Mapping[str, str], pins: Sequence[Sequence[int]] = (), workers: int = WORKERS
) -> Processes:
    """A Python process for each worker, with what torch's env:// reads, on the cores of `pins` where there are any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
    common["LOCAL_WORLD_SIZE"] = common["WORLD_SIZE"]
    started = []
    for rank in range(workers):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(subprocess.Popen([sys.executable, *script], env={**common, **own}))
        if pins and pins[rank]:
            os.sched_setaffinity(started[-1].pid, pins[rank])
    return started


def _next(server: socket.socket, processes: Processes) -> Connection:
    """The next worker that comes."""
    while True:
        with suppress(TimeoutError):
            return Connection(server.accept()[0].detach())
        if any(process.poll() is not None for process in processes):
            sys.exit("a worker ended before its first turn")


def give(
    sides: Sequence[str], start: Callable[[str, str], Processes], rounds: int, steps: int, workers: int = WORKERS
) -> Taken:
    """Each round lets each side take `steps` steps, one after the other, in an order that rotates.

    `start` gets a side and the address where its workers `take` their turns. A first round of WARM_UP steps does not
    count.
    """
    taken, teams = Taken({side: [] for side in sides}), {side: dict[int, Connection]() for side in sides}
    processes: Processes = []
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        address = str(Path(folder) / "turns")
        server.bind(address)
        server.listen(workers * len(sides))
        server.settimeout(1)
        try:
            for side in sides:
                processes += start(side, address)
            for _ in range(workers * len(sides)):
                turns = _next(server, processes)
                side, rank = turns.recv()
                teams[side][rank] = turns
            taken.losses = {side: [[] for _ in range(workers)] for side in sides}
            for number in range(-1, rounds):
                for place in range(len(sides)):
                    side = sides[(place + number) % len(sides)]
                    seconds = _turn(teams[side], steps if number >= 0 else WARM_UP, taken.losses[side])
                    if number >= 0:
                        taken.seconds[side].append(seconds / steps)
            for turns in (turns for team in teams.values() for turns in team.values()):
                turns.send(None)
            for process in processes:
                process.wait()
        finally:
            for process in processes:
                process.terminate()
    return taken


def _turn(team: Mapping[int, Connection], steps: int, losses: list[list[float]]) -> float:
    """Seconds of the slower worker."""
    for turns in team.values():
        turns.send(steps)
    seconds: list[float] = []
    for rank, turns in team.items():
        took, found = turns.recv()
        seconds.append(took)
        losses[rank] += found
    return max(seconds)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median from order statistics: no assumption about the distribution."""
    ranked, count = sorted(ratios), len(ratios)
    reach = int(0.98 * count**0.5 + 0.5)
    return ranked[max(0, count // 2 - reach)], ranked[min(count - 1, count // 2 + reach)]


def medians(name: str, seconds: Mapping[str, Sequence[float]]) -> None:
    print(f"{name}: " + ", ".join(f"{side} {1000 * statistics.median(s):.1f} ms" for side, s in seconds.items()))


def compare(seconds: Mapping[str, Sequence[float]], mine: str, other: str) -> dict[str, Any]:
    """{"mine/other": the median of the ratios in each round, with its interval}, which is printed as well."""
    ratios = [a / b for a, b in zip(seconds[mine], seconds[other], strict=True)]
    ratio, (low, high) = statistics.median(ratios), interval(ratios)
    print(f"  {mine}/{other}: {ratio:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    return {f"{mine}/{other}": {"ratio": ratio, "interval": [low, high]}}


def beside(taken: Taken, most: float) -> dict[str, Any]:
    """The seconds of a trainer and of the other sides, compared, and printed as well. Their losses must agree to `most`
    of their size.
    """
    mine, *others = taken.seconds
    found: dict[str, Any] = {"seconds": taken.seconds}
    for other in others:
        found |= compare(taken.seconds, mine, other)
    found["losses apart"] = apart = taken.apart()
    print(f"  losses {apart:.1e} apart at most")
    assert apart <= most, "all sides must give the same training"
    return found


def in_order(position: int, size: int, seed: int, epoch: int) -> int:
    """A sample order that keeps the rows as they are, so that all sides get the same ones."""
    return position


def record(file: Path, **measured: object) -> None:
    """Writes what was measured, after when, how and where."""
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "system": platform.platform()}
    about = {"date": date.today().isoformat(), "command": " ".join(["python", *sys.argv]), "machine": machine}
    file.write_text(json.dumps({**about, "torch": version("torch"), **measured}, indent=1) + "\n")
