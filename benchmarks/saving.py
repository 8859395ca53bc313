"""For how long training stands still for a checkpoint: Paceline beside torch.save in the loop and torch's own
distributed checkpoint (DCP) with async_save.

Usage: saving.py [--rounds N] [--record FILE]. A model of 64 M parameters with AdamW (768 MB of state) is trained by one
worker with one thread, so that another core is free, as it is where an accelerator computes. Two checkpoints are taken;
counted is the second one. `blocked` are the seconds for which the call, or the step's update, waits. `lost` is what the
step of it and the 12 after it take beyond the median of the 5 before: what the writing beside them costs is in it.
torch.save and DCP leave the last of the writing to the kernel; Paceline flushes to the disk. Sides take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from turns import record

from paceline.base.journal import read_journal

FIRST, SECOND, BEFORE, AFTER = 4, 18, 5, 12  # steps after which it is saved, and steps around the second


def stepping(trainer: bool, out: Path) -> None:
    """Trains, and writes the seconds of each step."""
    import torch
    import torch.nn.functional as F
    from models import mlp
    from torch.utils.data import TensorDataset

    import paceline

    torch.manual_seed(0)
    rows, labels = torch.randn(32, 4000), torch.randint(0, 10, (32,))
    seconds, count = [], SECOND + AFTER
    if trainer:
        made = paceline.Trainer(
            mlp,
            lambda output, batch: F.cross_entropy(output, batch[1]),
            lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
            32,
            plan="micro=32",
        )
        began = time.perf_counter()
        for report in made.steps(TensorDataset(rows, labels), count=count):
            if report.step in (FIRST, SECOND):
                made.save()
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
    else:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for step in range(1, count + 1):
            began = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(rows), labels).backward()
            optimizer.step()
            if step in (FIRST, SECOND):
                called = time.perf_counter()
                pending = save_plain(out, step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
                blocked = time.perf_counter() - called
            seconds.append(time.perf_counter() - began)
        if pending is not None:
            pending.result()
        (out / "blocked").write_text(json.dumps(blocked))
    (out / "seconds").write_text(json.dumps(seconds))


def save_plain(out: Path, step: int, state: dict[str, Any]) -> Any:
    """What is still to end, if anything is."""
    import torch
    from torch.distributed import checkpoint as dcp

    if out.name == "torch.save":
        torch.save(state, out / f"{step}.pt")
    elif out.name == "DCP async_save":
        return dcp.async_save(state, checkpoint_id=out / str(step))
    return None


def work(out: Path) -> None:
    if out.name == "DCP async_save":
        from torch import distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stepping(out.name == "paceline", out)
    if out.name == "DCP async_save":
        os._exit(0)  # its threads would keep us


SIDES = ("torch.save", "DCP async_save", "paceline")


def one(side: str) -> tuple[float, float]:
    """The seconds that the second checkpoint cost, and those of them that were blocked."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, side)
        out.mkdir()
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PACELINE_SAVE_EVERY": "100000",
            "PACELINE_RUN_DIR": str(out / "run"),
        }
        subprocess.run([sys.executable, __file__, "--work", str(out)], env=env, stderr=subprocess.DEVNULL, check=True)
        seconds = json.loads((out / "seconds").read_text())
        # Paceline's is in the step after the body that asks for it, the others' in the step of the call.
        start = SECOND if side == "paceline" else SECOND - 1
        usual = statistics.median(seconds[start - BEFORE : start])
        lost = sum(seconds[start : start + AFTER]) - AFTER * usual
        if side != "paceline":
            blocked = json.loads((out / "blocked").read_text())
        else:
            saved = [event for event in read_journal(out / "run") if event["event"] == "checkpoint"]
            (blocked,) = [event["seconds"] for event in saved if event["step"] == SECOND]
        return lost, blocked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    lost: dict[str, list[float]] = {side: [] for side in SIDES}
    blocked: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for place in range(len(SIDES)):
            side = SIDES[(place + number) % len(SIDES)]
            cost, stood = one(side)
            lost[side].append(cost)
            blocked[side].append(stood)
        print(f"round {number}: " + ", ".join(f"{side} {blocked[side][-1]:.3f} s" for side in SIDES), flush=True)
    for side in SIDES:
        low, high = min(blocked[side]), max(blocked[side])
        ratios = [ours / theirs for ours, theirs in zip(blocked["paceline"], blocked[side], strict=True)]
        print(
            f"{side}: blocked {statistics.median(blocked[side]):.3f} s [{low:.3f}, {high:.3f}], "
            f"lost {statistics.median(lost[side]):.3f} s; paceline's blocked beside it {statistics.median(ratios):.3f}"
        )
    if options.record:
        record(options.record, parameters=64_056_010, threads=1, blocked=blocked, lost=lost)


if __name__ == "__main__":
    main()
