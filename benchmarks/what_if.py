"""What `paceline doctor` says a step would take if something were otherwise, beside the run that is made then.

Usage: what_if.py [--case C ...] [--row S] [--steps N] [--record FILE]; those of a link want root. Rows take their time
by sleeping, so that more workers than cores can be looked at. Seconds are medians over steps, from the journal of each
run. A case is within its aim if what was said is within 15 % of the run that was made.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turns import record

from paceline.observe.summary import Summary
from paceline.observe.usual_step import UsualStep, usual_step

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from networks import join_over, network

ROWS, AIM = 48, 0.15


@dataclass(frozen=True)
class Made:
    """A run: how many workers, how many times as long a row takes worker 3, and what worker 1 takes to load one, in
    the usual times of a row; over which link, in Mbit/s, where there are two hosts; with which options.
    """

    workers: int = 4
    slow: float = 1.0
    loads: float = 0.0
    mbit: int = 0
    options: tuple[str, ...] = ()


EVEN = ("--shares", "1,1,1,1")
# What doctor calls it, the run that it is asked of, and the run that is made then.
CASES = {
    "worker removed": ("without worker 3", Made(slow=3), Made(3)),
    "worker removed, equal shares": ("without worker 3", Made(slow=3, options=EVEN), Made(3)),
    "loader fixed": ("with instant data loading", Made(loads=1.5), Made()),
    "loader fixed, equal shares": ("with instant data loading", Made(loads=1.5, options=EVEN), Made()),
    "link doubled": ("with a link twice as fast", Made(mbit=100), Made(mbit=200)),
    "two more workers": ("with two more workers", Made(), Made(6)),
    "rows dealt by speed": ("with rows assigned by speed", Made(slow=3, options=EVEN), Made(slow=3)),
}


def train(slow: float, loads: float, row: float, steps: int, wide: bool) -> None:
    import torch
    from torch import nn

    import paceline

    rank, width = int(os.environ["PACELINE_RANK"]), 1024 if wide else 64

    class Rows:
        def __len__(self) -> int:
            return 1 << 16

        def __getitem__(self, number: int) -> torch.Tensor:
            time.sleep(row * loads if rank == 1 else 0)
            return torch.full((width,), number / (1 << 16))

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        time.sleep(row * len(output) * (slow if rank == 3 else 1))
        return output.square().mean()

    trainer = paceline.Trainer(
        lambda: nn.Linear(width, width),  # 4 MB where it is to be sent
        loss,
        lambda params: torch.optim.SGD(params, lr=1e-3),
        global_batch=ROWS,
    )
    for _ in trainer.steps(Rows(), count=steps, loader={"num_workers": 0}):
        pass


def make(made: Made, row: float, steps: int) -> UsualStep:
    script = ["--script", *map(str, (made.slow, made.loads, made.mbit))]
    own = [__file__, *script, "--row", str(row), "--steps", str(steps)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(workers: int, folder: Path, *options: str, inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "paceline", "run", "--workers", str(workers), "--run-dir", str(folder)]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([*inside, *command, *options, *made.options, *own], env=env, **quiet)

    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "run"
        if made.mbit:
            with network(2, Path(base)) as net:
                for host in net.hosts:
                    host.cap(made.mbit)
                processes = join_over(
                    net, Path(base), made.workers, lambda host, *more: run(2, *more, inside=host.command())
                )
                codes = [process.wait() for process in processes]
        else:
            codes = [run(made.workers, folder).wait()]
        found = usual_step(Summary(folder))
    assert found is not None, "it made no step"
    assert not any(codes), codes
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", choices=CASES, default=[*CASES])
    parser.add_argument("--row", type=float, default=0.03, metavar="S", help="seconds of a row")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--script", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.script:
        slow, loads, mbit = map(float, options.script)
        return train(slow, loads, options.row, options.steps, mbit > 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts go with it
    known, results = dict[Made, UsualStep](), dict[str, dict[str, float]]()
    for case in options.case:
        name, before, then = CASES[case]
        for one in (before, then):
            if one not in known:
                known[one] = make(one, options.row, options.steps)
        was, said, found = known[before].step_seconds, known[before].what_if()[name], known[then].step_seconds
        results[case] = {"before": was, "said": said, "made": found, "ratio": said / found}
        told = f"{1000 * was:.0f} ms, {name} {1000 * said:.0f} said, {1000 * found:.0f} made"
        mark = "within" if abs(said / found - 1) <= AIM else "BEYOND"
        print(f"{mark}  {case}: {told}: {said / found:.3f}   ({known[before]}; {known[then]})", flush=True)
    if options.record:
        record(options.record, row=options.row, steps=options.steps, results=results)
    return None


if __name__ == "__main__":
    main()
