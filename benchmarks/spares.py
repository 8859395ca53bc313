"""Seconds from the kill of a worker to the first step of the full team, with a spare worker and without one.

Usage: spares.py [--kills N] [--workers N] [--width N] [--record FILE]. Runs with `--spares 1` and runs without spares
take turns. In each, workers are killed (SIGKILL) one after another, each time when the team is full and, with a spare,
the next spare is ready. Each worker writes the time at which a step ended and the size of the team that made it. The
time of a kill ends with the first step that the full team has made. A run without spares starts the lost worker again,
from the warm process of its launcher.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turns import record

from paceline.base.journal import read_journal

KILLS = 5  # in one run
CALM = 10  # steps of the full team before each kill
PATIENCE = 120.0  # seconds for anything that is waited for


def train(out: Path, width: int) -> None:
    import torch

    import paceline

    torch.manual_seed(0)
    rows = torch.randn(512, width), torch.randint(0, 8, (512,))
    trainer = paceline.Trainer(
        torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 8)),
        lambda output, batch: torch.nn.functional.cross_entropy(output, batch[1]),
        lambda params: torch.optim.AdamW(params, lr=1e-4),
        global_batch=64,
    )
    with (out / f"{os.getpid()}.steps").open("w", buffering=1) as file:
        for _ in trainer.steps(torch.utils.data.TensorDataset(*rows), count=1_000_000):
            file.write(f"{time.time()} {paceline.join().size}\n")


def full_steps(out: Path, size: int) -> list[float]:
    """When steps of the full team ended, by the worker that has made the most of them."""
    ends: list[list[float]] = []
    for file in out.glob("*.steps"):
        lines = [line.split() for line in file.read_text().splitlines()]
        ends.append([float(line[0]) for line in lines if len(line) == 2 and int(line[1]) == size])
    return sorted(end for each in ends for end in each)


def wait(process: subprocess.Popen[bytes], console: Path, ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise SystemExit(console.read_text())
        time.sleep(0.005)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(run) if event["event"] == kind] if run.exists() else []


def kills(workers: int, spares: int, count: int, width: int, choice: random.Random) -> list[float]:
    """Starts a run, kills so many of its workers, and returns the seconds of each kill."""
    with tempfile.TemporaryDirectory() as base:
        folder, run, console = Path(base), Path(base) / "run", Path(base) / "console"
        options = ("--workers", str(workers), "--spares", str(spares), "--run-dir", str(run), "--max-restarts", "1000")
        command = [sys.executable, "-m", "paceline", "run", *options, __file__, "--as", base, "--width", str(width)]
        with console.open("wb") as out:
            process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
        took = []
        for _ in range(count):
            since = time.time()

            def is_ready(since: float = since) -> bool:
                ready = [event["workers"] for event in events(run, "spares")] or [[]]
                calm = sum(end > since for end in full_steps(folder, workers)) >= CALM * workers
                return calm and len(ready[-1]) == spares

            wait(process, console, is_ready)
            members: list[int] = [*(events(run, "formed") or [{"workers": range(workers)}])[-1]["workers"]]
            started = {e["worker"]: e["pid"] for e in events(run, "worker") if e["what"] == "started"}
            at, before = time.time(), len(events(run, "lost"))
            os.kill(started[choice.choice(members)], signal.SIGKILL)
            wait(process, console, lambda before=before: len(events(run, "lost")) > before)
            known = events(run, "lost")[-1]["at"]
            wait(process, console, lambda known=known: any(end > known for end in full_steps(folder, workers)))
            took.append(next(end for end in full_steps(folder, workers) if end > known) - at)
        process.send_signal(signal.SIGTERM)
        if process.wait(PATIENCE) != 75:
            raise SystemExit(console.read_text())
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    parser.add_argument("--as", dest="out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        train(options.out, options.width)
        return
    took: dict[str, list[float]] = {"with a spare": [], "without a spare": []}
    choice = random.Random(0)
    while len(took["without a spare"]) < options.kills:
        count = min(KILLS, options.kills - len(took["without a spare"]))
        for spares, name in ((1, "with a spare"), (0, "without a spare")):
            took[name] += kills(options.workers, spares, count, options.width, choice)
    results: dict[str, Any] = {}
    for name, seconds in took.items():
        results[name] = {"seconds": seconds, "median": statistics.median(seconds), "most": max(seconds)}
        print(f"{name}: full team after {statistics.median(seconds):.2f} s in the median, {max(seconds):.2f} s at most")
    if options.record:
        about = {"workers": options.workers, "width": options.width, "cores": len(os.sched_getaffinity(0))}
        record(options.record, **about, results=results)


if __name__ == "__main__":
    main()
