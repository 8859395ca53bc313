"""What workers that are not in step deliver where some are slow, beside an event simulation of the same law.

    python benchmarks/stragglers.py [--tick 0.05] [--tickets 1000] [--law L ..] [--staleness K ..] [--record FILE]

Four workers, whose ticks take so many seconds by sleeping, and one parameter server. *random*: a tick in twenty takes
eight times as long. *quarter*: the first worker's ticks all take four times as long. A ticket is one tick. With
`staleness=0`, in step, a global batch has a row for each worker, and a step of four rows is four ticks. Speeds are in
ticks of one usual worker; the simulation is of the same tickets, dealt by the same rule
(`paceline.param_server.ssp_clock`), without any cost but ticks: with the draws that the workers had, each its own, and
in the mean over 200 others. The window is all tickets, so what the slowest still has at its end counts.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset
from turns import record

import paceline
from paceline.param_server.ssp_clock import SspScheduler

WORKERS, DRAWS, MEASURED = 4, 200, "measured"
LAWS = {"random": (0.05, 8.0, 1.0), "quarter": (0.0, 1.0, 4.0)}  # chance, times as long; the first worker's factor
BOUNDS = {"random": ("0", "1", "4", "16", "inf"), "quarter": ("0", "inf")}


def tick(law: str, worker: int, draw: random.Random) -> float:
    """How long a tick of a worker takes, in usual ones."""
    chance, times, first = LAWS[law]
    return (first if worker == 0 else 1.0) * (times if draw.random() < chance else 1.0)


def simulated(law: str, bound: float, tickets: int, seed: str) -> float:
    """Ticks in the time of a usual one, where nothing costs time but ticks."""
    draws = [random.Random(f"{seed}/{worker}") for worker in range(WORKERS)]
    dealt = SspScheduler(bound, end=tickets)
    now, under_way, idle = 0.0, list[tuple[float, int, int]](), set(range(WORKERS))
    for worker in range(WORKERS):
        dealt.join(worker)
    while True:
        for worker in sorted(idle):
            if (ticket := dealt.deal(worker)) is not None:
                idle.discard(worker)
                heapq.heappush(under_way, (now + tick(law, worker, draws[worker]), worker, ticket))
        if dealt.ended:
            return tickets / now
        now, worker, ticket = heapq.heappop(under_way)
        dealt.push(worker, ticket)
        idle.add(worker)


def script(law: str, seconds: float, tickets: int, out: Path) -> None:
    """A worker: the time from its first tick to the end of the loop's last turn."""
    me, began = int(os.environ["PACELINE_RANK"]), [0.0]
    draw = random.Random(f"{MEASURED}/{me}")
    in_step = "staleness" not in os.environ["PLAN"]

    def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
        began[0] = began[0] or time.perf_counter()
        time.sleep(seconds * tick(law, me, draw))
        return output.mean()

    rows = WORKERS if in_step else 1
    trainer = paceline.Trainer(nn.Linear(8, 8), loss, lambda params: torch.optim.SGD(params, lr=0.0), global_batch=rows)
    for _ in trainer.steps(TensorDataset(torch.zeros(tickets, 8)), epochs=1):
        took = time.perf_counter() - began[0]
    if trainer.main:
        out.write_text(json.dumps(tickets * seconds / took))


def measured(law: str, bound: str, seconds: float, tickets: int) -> float:
    plan = "micro=1 server=1" + (f" staleness={bound} window={tickets}" if bound != "0" else "")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        own = [__file__, "--script", law, "--tick", str(seconds), "--tickets", str(tickets), "--out", str(out)]
        options = ["--workers", str(WORKERS), "--shares", ",".join("1" * WORKERS), "--run-dir", f"{folder}/run"]
        options = options if bound == "0" else [*options[:2], *options[4:]]
        command = [sys.executable, "-m", "paceline", "run", *options, "--plan", plan, *own]
        env = {**os.environ, "PLAN": plan, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return float(json.loads(out.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tick", type=float, default=0.05)
    parser.add_argument("--tickets", type=int, default=1000)
    parser.add_argument("--law", nargs="*", choices=[*BOUNDS], default=[*BOUNDS])
    parser.add_argument("--staleness", nargs="*", help="of those of a law (default: all)")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--script", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.script:
        return script(options.script, options.tick, options.tickets, options.out)
    found: dict[str, dict[str, object]] = {}
    for law in options.law:
        for bound in options.staleness or BOUNDS[law]:
            limit = math.inf if bound == "inf" else float(bound)
            others = statistics.mean(simulated(law, limit, options.tickets, str(seed)) for seed in range(DRAWS))
            same, mine = (
                simulated(law, limit, options.tickets, MEASURED),
                measured(law, bound, options.tick, options.tickets),
            )
            found.setdefault(law, {})[bound] = {"simulated": same, "mean of simulations": others, "measured": mine}
            print(f"{law:8} staleness={bound:4} {mine:.2f} of {same:.2f}: {mine / same:.3f}", flush=True)
    if options.record:
        record(options.record, tick=options.tick, tickets=options.tickets, results=found)
    return None


if __name__ == "__main__":
    main()
