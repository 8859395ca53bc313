"""What unequal workers deliver together, beside what each of them delivers alone.

Usage: unequal.py [--rounds N] [--record FILE]. As root: each worker is in a cgroup with a quota of a core (period
10 ms). A small GPT is trained by single workers with 100, 50 and 25 % of a core, by the three together, by the first
two, and by these two with DistributedDataParallel, which deals equal parts. In one more run the third worker's quota is
doubled on the way. Since cores share caches, memory and perhaps more, workers are also measured apart at the same time.
Speeds are those after the first 20 steps (alone: 4), or after 20 steps with the other quota; rounds are interleaved.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from turns import record

from paceline.base.journal import read_journal

CPU, PERIOD = Path("/sys/fs/cgroup/cpu"), 10_000  # microseconds
GLOBAL_BATCH, STEPS, SETTLED = 128, 50, 20
APARTS = {"100, 50 and 25 %": [1.0, 0.5, 0.25], "100 and 50 %": [1.0, 0.5], "100, 50 and 50 %": [1.0, 0.5, 0.5]}
ALONE, WARM = 12, 4  # steps of a worker alone, and those of them that are not counted


def limit(group: Path, share: float) -> None:
    """A quota of so much of a core, by cgroups of version 1 or 2."""
    if (group / "cpu.cfs_period_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD)))
    else:
        (group / "cpu.max").write_text(f"{round(share * PERIOD)} {PERIOD}")


@contextmanager
def groups(shares: Sequence[float]) -> Iterator[list[Path]]:
    base = CPU if (CPU / "cpu.cfs_period_us").exists() else CPU.parent
    made: list[Path] = []
    try:
        for share in shares:
            made.append(Path(tempfile.mkdtemp(prefix="unequal-", dir=base)))
            limit(made[-1], share)
        yield made
    finally:
        time.sleep(0.2)
        for group in made:
            group.rmdir()


def speed(times: Sequence[float], first: int) -> float:
    """Rows a second from a step on."""
    return GLOBAL_BATCH * (len(times) - first) / (times[-1] - times[first - 1])


def run(
    role: str, shares: Sequence[float], then: float | None = None, steps: int = STEPS
) -> tuple[list[float], list[list[float]]]:
    """When each step was done, and the shares that the team came to. After so many steps the last worker's quota may
    become another one, for as many again.
    """
    with tempfile.TemporaryDirectory() as folder, groups(shares) as made:
        out, workers = Path(folder), str(len(shares))
        launcher = {
            "paceline": ["paceline", "run", "--quiet", "--workers", workers, "--run-dir", str(out / "run")],
            "ddp": ["torch.distributed.run", "--standalone", "--nproc-per-node", workers],
        }[role]
        count = steps if then is None else 2 * steps
        command = [sys.executable, "-m", *launcher, __file__, "--role", role, str(out), str(count), *map(str, made)]
        process = subprocess.Popen(
            command, cwd=out, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
        )
        while then is not None and process.poll() is None:
            if (out / "times").exists() and len((out / "times").read_text().splitlines()) >= steps:
                limit(made[-1], then)
                break
            time.sleep(0.02)
        if process.wait() != 0:
            raise SystemExit(f"{role} with {shares} failed")
        times = [float(line) for line in (out / "times").read_text().splitlines()]
        events = read_journal(out / "run") if role == "paceline" else []
        return times, [[event["step"], *event["parts"]] for event in events if event["event"] == "shares"]


def apart(shares: Sequence[float]) -> float:
    """Rows a second of as many runs of one worker each, at the same time: what they have of the machine together."""
    steps = [round(ALONE * share / min(shares)) for share in shares]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda share, count: run("paceline", [share], steps=count)[0], shares, steps)
        return sum(speed(times, WARM) for times in found)


def train(role: str, out: Path, steps: int, made: Sequence[str]) -> None:
    rank = int(os.environ.get("PACELINE_RANK") or os.environ["RANK"])
    import torch  # before the quota
    from models import GPT
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    import paceline

    Path(made[rank], "cgroup.procs").write_text(str(os.getpid()))
    ids = torch.randint(0, 256, (4096, 65), generator=torch.Generator().manual_seed(0))
    file = (out / "times").open("w", buffering=1) if rank == 0 else None

    def done() -> None:
        if file is not None:
            file.write(f"{time.time()}\n")

    def build() -> torch.nn.Module:
        return GPT(width=128, layers=4, heads=4, length=64)

    def loss(output: torch.Tensor, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    if role == "paceline":
        data = TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        trainer = paceline.Trainer(build, loss, lambda params: torch.optim.AdamW(params, lr=1e-3), GLOBAL_BATCH)
        for _ in trainer.steps(data, count=steps):
            done()
        return
    torch.distributed.init_process_group("gloo")
    size = torch.distributed.get_world_size()
    ddp = torch.nn.parallel.DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for step in range(steps):
        first = (step * GLOBAL_BATCH + rank * GLOBAL_BATCH // size) % 4096
        rows = ids[first : first + GLOBAL_BATCH // size]
        optimizer.zero_grad()
        loss(ddp(rows[:, :-1]), [rows, rows[:, 1:]]).backward()
        optimizer.step()
        done()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, out, steps, *made = options.role
        train(role, Path(out), int(steps), made)
        return
    sides = {
        "alone, 100 %": ("paceline", [1.0]),
        "alone, 50 %": ("paceline", [0.5]),
        "alone, 25 %": ("paceline", [0.25]),
        "together, 100, 50 and 25 %": ("paceline", [1.0, 0.5, 0.25]),
        "together, 100 and 50 %": ("paceline", [1.0, 0.5]),
        "DDP, 100 and 50 %": ("ddp", [1.0, 0.5]),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    changes: dict[str, list[list[list[float]]]] = {name: [] for name in sides}
    speeds["25 % become 50 %"], changes["25 % become 50 %"] = [], []
    aparts = {f"apart, {name}": shares for name, shares in APARTS.items()}
    speeds |= {name: [] for name in aparts}
    for number in range(options.rounds):
        for name, (role, shares) in sides.items():
            alone = len(shares) == 1
            times, changed = run(role, shares, steps=ALONE if alone else STEPS)
            speeds[name].append(speed(times, WARM if alone else SETTLED))
            changes[name].append(changed)
        times, changed = run("paceline", [1.0, 0.5, 0.25], then=0.5)
        speeds["25 % become 50 %"].append(speed(times, STEPS + SETTLED))
        changes["25 % become 50 %"].append(changed)
        for name, shares in aparts.items():
            speeds[name].append(apart(shares))
        print(f"round {number}: " + ", ".join(f"{name} {found[-1]:.1f}" for name, found in speeds.items()), flush=True)

    def part(name: str, *shares: str) -> None:
        alone = [sum(row) for row in zip(*(speeds[f"alone, {share} %"] for share in shares), strict=True)]
        same_time = speeds[f"apart, {', '.join(shares[:-1])} and {shares[-1]} %"]
        for what, sums in (
            ("what each delivers alone", alone),
            ("what they deliver apart at the same time", same_time),
        ):
            ratios = sorted(mine / other for mine, other in zip(speeds[name], sums, strict=True))
            print(f"{name}: {statistics.median(ratios):.3f} of {what} [{ratios[0]:.3f}, {ratios[-1]:.3f}]")

    part("together, 100, 50 and 25 %", "100", "50", "25")
    part("together, 100 and 50 %", "100", "50")
    part("DDP, 100 and 50 %", "100", "50")
    part("25 % become 50 %", "100", "50", "50")
    if options.record:
        record(
            options.record, global_batch=GLOBAL_BATCH, threads=1, period_us=PERIOD, rows_a_second=speeds, shares=changes
        )


if __name__ == "__main__":
    main()
