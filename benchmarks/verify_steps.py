"""Checks `--verify-steps`: every flipped bit is found and its worker named, no false alarms, and what it costs.

    python benchmarks/verify_steps.py [flips] [alarms] [cost] [--flips 100] [--steps 10000] [--rounds 3] [--record FILE]

Without the name of a part all three are run, each with three workers.

- flips: runs in which every step is verified and one bit flips in each step, on a worker that is drawn at random. For
  each kind of flip, they go on until `--flips` flips have been found. A flip counts as harmless if it was not found and
  the final weights have the same bytes as without flips, for example if a ReLU sets the changed activation to zero. A
  worker that was wrong twice would leave a run; here it stays, so that there can be a hundred flips.
- alarms: `--steps` verified steps without flips, once with equal workers, and once with workers that use different
  instructions (ATEN_CPU_CAPABILITY).
- cost: an MLP of 2.1 million parameters is trained with one verified step of four, for each number of rows of a step
  (`--batches`); the seconds of the verified steps beside those of the others, which are between them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from turns import record

from paceline.base.journal import effective_steps, read_journal
from paceline.team.fault_injection import read_log

WORKERS, KINDS = 3, ("flip-weight", "flip-activation", "flip-gradient", "flip-bucket", "flip-transit")
AT_ONCE, WARM, EVERY = 120, 20, 4
TINY = """
import json, os, sys, time
if "INSTRUCTIONS" in os.environ:
    os.environ["ATEN_CPU_CAPABILITY"] = os.environ["INSTRUCTIONS"].split()[int(os.environ["PACELINE_RANK"])]
import torch, paceline
from torch import nn
from torch.utils.data import TensorDataset
from paceline.train import step_verifier
step_verifier.TWICE = 10**9  # workers that were wrong stay
width, rows, batch = (int(word) for word in sys.argv[3:6])
generator = torch.Generator().manual_seed(0)
x = torch.randn(rows, width, generator=generator)
data = TensorDataset(x, (x.sum(1) > 0).long())
trainer = paceline.Trainer(
    lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2)),
    lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
    lambda params: torch.optim.AdamW(params, lr=1e-3),
    global_batch=batch,
)
ends = [time.perf_counter()]  # of each step
for report in trainer.steps(data, count=int(sys.argv[2])):
    ends.append(time.perf_counter())
trainer.export(sys.argv[1])
if trainer.main:
    with open("ends.json", "w") as file:
        json.dump(ends, file)
"""


def train(folder: Path, steps: int, plan: str, verify: str, sizes: tuple[int, int, int], **env: str) -> list[Any]:
    """Trains in the folder. Returns the events of the run."""
    folder.mkdir()
    (folder / "train.py").write_text(TINY)
    command = [sys.executable, "-m", "paceline", "run", "--workers", str(WORKERS), "--run-dir", "out", "--quiet"]
    command += ["--plan", plan, *(("--verify-steps", verify) if verify else ())]
    command += ["--cold-start"] if "INSTRUCTIONS" in env else []
    words = ["train.py", "out.safetensors", str(steps), *map(str, sizes)]
    subprocess.run([*command, *words], check=True, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **env})
    return read_journal(folder / "out")


def flips(folder: Path, kind: str, wanted: int, chance: random.Random) -> dict[str, int]:
    """Flips bits of a kind until so many were found."""
    sizes, plan, counts = (16, 96, 24), "exact micro=4", Counter[str]()
    train(folder / "calm", AT_ONCE + 2, plan, "1", sizes)
    calm = (folder / "calm" / "out.safetensors").read_bytes()
    while counts["found"] < wanted:
        number, faults = counts["runs"], dict[int, str]()
        for step in range(2, min(AT_ONCE, 2 + wanted - counts["found"])):
            moment = (
                chance.choice(("loading", "forward")) if kind in ("flip-activation", "flip-gradient") else "loading"
            )
            faults[step + 1] = f"{kind}:{chance.randrange(WORKERS)}@{step}.{moment}"
        events = train(folder / str(number), AT_ONCE + 2, plan, "1", sizes, PACELINE_CHAOS=",".join(faults.values()))
        fired = {entry["step"] + 1: entry["worker"] for entry in read_log(folder / str(number) / "out")}
        healed = {event["step"] + 1: event["workers"] for event in effective_steps(events, "healed")}
        named = healed | {event["step"]: event["workers"] for event in effective_steps(events, "corrupted")}
        same = (folder / str(number) / "out.safetensors").read_bytes() == calm
        counts["runs"] += 1
        counts["fired"] += len(fired)
        counts["found"] += len(named)
        counts["right worker"] += sum(named.get(step) == [worker] for step, worker in fired.items())
        counts["harmless" if same else "missed"] += len(fired) - len(named)
        counts["undisturbed bytes"] += same
    return dict(counts)


def alarms(folder: Path, steps: int, instructions: str) -> dict[str, int]:
    """Counts verified steps that were computed again although nothing was wrong."""
    env = {"INSTRUCTIONS": instructions} if instructions else {}
    verified = [
        e["attempts"] for e in train(folder, steps, "micro=4", "1", (16, 960, 24), **env) if e["event"] == "verified"
    ]
    return {"verified steps": len(verified), "false alarms": sum(attempts > 1 for attempts in verified)}


def cost(folder: Path, rounds: int, steps: int, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Compares the seconds of verified steps with those of the other steps of the same runs."""
    verified, usual = list[float](), list[float]()
    for number in range(rounds):
        run = folder / f"{number} {sizes[2]}"
        events = train(run, steps, f"micro={sizes[2] // WORKERS}", str(EVERY), sizes)
        ends = json.loads((run / "ends.json").read_text())
        took = {step: ends[step] - ends[step - 1] for step in range(WARM, len(ends))}
        chosen = {event["step"] for event in events if event["event"] == "verified"}
        verified += [seconds for step, seconds in took.items() if step in chosen]
        usual += [seconds for step, seconds in took.items() if step not in chosen and step - 1 not in chosen]
    more = statistics.median(verified) / statistics.median(usual) - 1
    return {
        "rows of a worker": sizes[2] // WORKERS,
        "steps": {"verified": len(verified), "others": len(usual)},
        "seconds": {"verified": statistics.median(verified), "others": statistics.median(usual)},
        "mean seconds": {"verified": statistics.fmean(verified), "others": statistics.fmean(usual)},
        "percent more time at 1% of the steps": more,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="flips|alarms|cost")
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cost-steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batches", type=int, nargs="+", default=[96, 384])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    parts, chance, measured = args.parts or ["flips", "alarms", "cost"], random.Random(args.seed), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="verify-steps-") as name:
        for kind in KINDS if "flips" in parts else ():
            (folder := Path(name, kind)).mkdir()
            measured[kind] = flips(folder, kind, args.flips, chance)
            print(kind, json.dumps(measured[kind]), flush=True)
        for instructions in ("", "default avx2 avx512") if "alarms" in parts else ():
            what = f"alarms, {instructions or 'equal workers'}"
            measured[what] = alarms(Path(name, what), args.steps, instructions)
            print(what, json.dumps(measured[what]), flush=True)
        (folder := Path(name, "cost")).mkdir()
        for batch in args.batches if "cost" in parts else ():
            what = f"cost, {batch} rows"
            measured[what] = cost(folder, args.rounds, args.cost_steps, (args.width, 960, batch))
            print(what, json.dumps(measured[what]), flush=True)
    if args.record is not None:
        record(args.record, **measured)


if __name__ == "__main__":
    main()
