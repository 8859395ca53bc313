"""Whether plans stay within a worker's memory if `paceline plan` says that they fit, and exceed it if not.

    python benchmarks/planner_memory.py [--fit 20] [--not 10] [--steps 6] [--record FILE]

It must run as root. A situation is a model, a number of workers, and a limit on the memory of each worker. `paceline
plan --memory LIMIT` predicts all plans and tries some of them. Then a plan is run with each worker in a memory
cgroup that has this limit, and with a checkpoint after every second step:

- in `--fit` situations the plan that needs most memory among those predicted to fit: none of its workers may be killed;
- in `--not` situations a plan that is predicted to need `BEYOND` times the limit: it should fail.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from turns import record

GROUPS = Path("/sys/fs/cgroup/memory")  # version 1; of version 2 below
LIMIT = "memory.limit_in_bytes", "memory.max"  # of version 1 and 2
BEYOND = 1.15
KILLED = 137
LIMITS = 1.02, 1.2  # of a worker's memory, relative to what a plan is said to need
# Models by the width of their layers, their number, and the rows of a step; and plans at whose need limits are set.
MODELS = ((1024, 12, 32), (512, 24, 512), (2048, 6, 32), (1024, 20, 256), (256, 16, 4096))
AT = "data=2", "shard=2 zero=3"


def train(width: int, depth: int, rows: int, steps: int) -> None:
    """The script that is planned for. Each worker enters its cgroup first, if there is one."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    import paceline

    group = os.environ.get("PLANNER_MEMORY_GROUP")
    if group is not None:  # libraries are in memory by now: a cgroup counts no pages that others have read before
        enter(Path(f"{group}-{os.environ.get('PACELINE_RANK', '0')}"))
    torch.manual_seed(0)
    x = torch.randn(2 * rows, width, dtype=torch.float32)
    trainer = paceline.Trainer(
        model=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]),
        loss=lambda output, batch: F.mse_loss(output, batch[1]),
        forward=lambda module, batch: module(batch[0]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        global_batch=rows,
    )
    for _ in trainer.steps(TensorDataset(x, x.roll(1, 1)), count=steps):
        pass


def enter(group: Path) -> None:
    """Puts this process into a cgroup, whose limit then leaves out what the process has in memory already."""
    status = Path("/proc/self/status").read_text()
    present = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS:"))
    limit = limit_of(group)
    limit.write_text(str(int(limit.read_text()) - present))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def limit_of(group: Path) -> Path:
    """The file with the limit of a cgroup's memory."""
    return next(group / name for name in LIMIT if (group / name).exists())


@contextmanager
def groups(workers: int, limit: int) -> Iterator[str]:
    """A memory cgroup for each worker, with this limit. Yields their common path."""
    base = (GROUPS if (GROUPS / LIMIT[0]).exists() else GROUPS.parent) / f"paceline-{os.getpid()}"
    paths = [Path(f"{base}-{rank}") for rank in range(workers)]
    try:
        for path in paths:
            path.mkdir()
            limit_of(path).write_text(str(limit))
        yield str(base)
    finally:
        for path in paths:
            if path.exists():
                path.rmdir()


@dataclass(frozen=True)
class Situation:
    """A model, workers, and the memory that each of these may take."""

    model: tuple[int, int, int]
    workers: int

    def script(self, steps: int) -> list[str]:
        """The words that train the model."""
        return [os.path.abspath(__file__), "--", "--train", *map(str, (*self.model, steps))]

    def plan(self, *words: str) -> dict[str, dict[str, Any]]:
        """The plans for all workers, from the answer of `paceline plan`, by their words."""
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "paceline", "plan", "--workers", str(self.workers), "--json", *words]
            env = {**environment(), "XDG_CACHE_HOME": cache}
            done = subprocess.run(
                [*command, *self.script(10_000)], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
            )
        plans = json.loads(done.stdout)["plans"]
        return {one["plan"]: one for one in plans if one["workers"] == self.workers and "server" not in one["plan"]}

    def run(self, plan: str, limit: int, steps: int) -> int:
        """The exit code of a run under a plan, each of whose workers may take `limit` bytes."""
        with tempfile.TemporaryDirectory() as folder, groups(self.workers, limit) as group:
            words = ["run", "--workers", str(self.workers), "--plan", plan, "--run-dir", f"{folder}/run"]
            words += ["--save-every", "2"]
            command = [sys.executable, "-m", "paceline", *words, "--max-restarts", "0", "--quiet", *self.script(steps)]
            done = subprocess.run(
                command, env={**environment(), "PLANNER_MEMORY_GROUP": group}, stderr=subprocess.PIPE, text=True
            )
        return done.returncode


def environment() -> dict[str, str]:
    """Variables of all runs: workers that share no memory with a process from which they were forked."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PACELINE_COLD_START": "1"}


def situations() -> Iterator[tuple[Situation, str, float]]:
    """Situations, each with the plan at whose need the limit is set, and how far beyond."""
    for times in LIMITS:
        for model in MODELS:
            for at in AT:
                yield Situation(model, 2), at, times


def outcome(situation: Situation, one: dict[str, Any], limit: int, steps: int) -> dict[str, Any]:
    """Runs a plan under a limit, and returns what became of it."""
    code = situation.run(one["plan"], limit, steps)
    said = f"{one['plan']} is said to need {need(one) / 1e6:.0f} MB"
    print(f"{situation.model} in {limit / 1e6:.0f} MB: {said}, ended with {code}", flush=True)
    return {"model": situation.model, "limit": limit, "plan": one["plan"], "need": need(one), "code": code}


def need(one: dict[str, Any]) -> float:
    """The bytes that a worker needs under a plan, with those of the copy from which it writes a checkpoint."""
    return float(one["memory"] + one["further"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=int, default=20)
    parser.add_argument("--not", dest="beyond", type=int, default=10)
    parser.add_argument("--try", dest="tries", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--train", type=int, nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(*args.train)
        return
    fit, beyond = list[dict[str, Any]](), list[dict[str, Any]]()
    trials = "--try", str(args.tries), "--steps", "2"

    @cache
    def needs(situation: Situation) -> dict[str, dict[str, Any]]:
        return situation.plan(*trials)

    def run(side: list[dict[str, Any]], situation: Situation, one: dict[str, Any], limit: int) -> None:
        side.append(outcome(situation, one, limit, args.steps))
        if args.record:
            record(args.record, fit=fit, beyond=beyond)

    for situation, at, times in situations():
        if len(fit) >= args.fit:
            break
        limit = int(times * need(needs(situation)[at]) / 0.95)  # which `paceline plan` leaves free
        fitting = [one for one in situation.plan(*trials, "--memory", str(limit)).values() if one["fits"]]
        if fitting:
            run(fit, situation, max(fitting, key=need), limit)
    for situation, at in ((Situation(model, 2), at) for model in MODELS for at in AT):
        if len(beyond) >= args.beyond:
            break
        one = needs(situation)[at]
        run(beyond, situation, one, int(need(one) / BEYOND))
    killed, failed = sum(one["code"] != 0 for one in fit), sum(one["code"] != 0 for one in beyond)
    print(f"of {len(fit)} plans that are said to fit, {killed} failed; of {len(beyond)} that are not, {failed}")


if __name__ == "__main__":
    main()
