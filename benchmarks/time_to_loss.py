"""How long training takes to a fixed loss: parameter servers in step and out of it, beside balanced `data=4`.

    python benchmarks/time_to_loss.py [--law random quarter] [--tick 0.004] [--seeds 3] [--record FILE]

Four workers of which a row takes so many seconds by sleeping; which of them are slow when says a law of stragglers.py:
*random*, a micro-batch in twenty takes eight times as long, and *quarter*, all of the first worker's take four times as
long. An MLP learns a teacher's classes by SGD with momentum, under one learning rate for all. The loss to reach, of
held-out rows, is that of one process after UPDATES updates; who has not reached it after three times as many has not.
The held-out rows are looked at after every WINDOW updates, which is a window out of step. Seconds from the first
micro-batch on, and updates, by seed.
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
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from stragglers import LAWS, WORKERS, tick
from torch import nn
from torch.utils.data import TensorDataset
from turns import record

import paceline

WIDTH, CLASSES, ROWS, BATCH, MICRO = 32, 8, 6400, 64, 4
UPDATES, WINDOW, RATE, MOMENTUM = 160, 16, 0.05, 0.9
PLANS = {
    "data=4": "data=4",
    "K=0": "server=1",
    "K=4": f"server=1 staleness=4 window={WINDOW}",
    "K=inf": f"server=1 staleness=inf window={WINDOW}",
}


def job(seed: int) -> tuple[nn.Module, TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)]
    model, teacher = nn.Sequential(*layers), nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    x = torch.randn(ROWS + 1024, WIDTH)
    with torch.no_grad():
        y = (4 * teacher(x)).argmax(1)
    return model, TensorDataset(x[:ROWS], y[:ROWS]), (x[ROWS:], y[ROWS:])


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE, momentum=MOMENTUM)


def held_out(model: nn.Module, held: tuple[torch.Tensor, torch.Tensor]) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model(held[0]), held[1]))


def goal(seed: int) -> float:
    """What one process comes to."""
    model, rows, held = job(seed)
    trainer = paceline.Trainer(
        model, lambda out, batch: F.cross_entropy(out, batch[1]), optimizer, BATCH, seed=seed, plan=f"micro={MICRO}"
    )
    for _ in trainer.steps(rows, count=UPDATES):
        pass
    return held_out(trainer.model, held)


def script(law: str, seed: int, target: float, seconds: float, out: Path) -> None:
    """A worker."""
    me, began = int(os.environ["PACELINE_RANK"]), [0.0]
    draw = random.Random(f"{seed}/{me}")
    torch.set_num_threads(1)
    model, rows, held = job(seed)

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        began[0] = began[0] or time.perf_counter()
        parts = -(-len(output) // MICRO)  # micro-batches may be computed together
        time.sleep(seconds * len(output) / parts * sum(tick(law, me, draw) for _ in range(parts)))
        return F.cross_entropy(output, batch[1])

    trainer = paceline.Trainer(model, loss, optimizer, BATCH, seed=seed)
    for report in trainer.steps(rows, count=3 * UPDATES):
        if report.every(WINDOW) and (found := held_out(trainer.model, held)) <= target:
            if trainer.main:
                said = {"seconds": time.perf_counter() - began[0], "updates": report.step, "loss": found}
                out.write_text(json.dumps(said))
            trainer.stop()


def measured(law: str, plan: str, seed: int, target: float, seconds: float) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        own = [__file__, "--script", law, str(seed), str(target), str(seconds), str(out)]
        options = ["--workers", str(WORKERS), "--run-dir", f"{folder}/run", "--plan", f"micro={MICRO} {PLANS[plan]}"]
        command = [sys.executable, "-m", "paceline", "run", *options, *own]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return dict(json.loads(out.read_text())) if out.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--law", nargs="*", choices=LAWS, default=[*LAWS])
    parser.add_argument("--tick", type=float, default=0.004, help="seconds of a row")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    parser.add_argument("--script", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.script:
        law, seed, target, seconds, out = options.script
        return script(law, int(seed), float(target), float(seconds), Path(out))
    goals = [goal(seed) for seed in range(options.seeds)]
    results: dict[str, dict[str, list[dict[str, Any] | None]]] = {}
    for law in options.law:
        of_law = results[law] = {plan: [] for plan in PLANS}
        for seed, target in enumerate(goals):
            for plan in PLANS:  # one after another, so that all have the same machine
                of_law[plan].append(found := measured(law, plan, seed, target, options.tick))
                print(f"{law}, seed {seed}, {plan}: {found}", file=sys.stderr, flush=True)
        print(f"{law}: to a held-out loss of {', '.join(f'{target:.3f}' for target in goals)}")
        for plan, each in of_law.items():
            there = [one for one in each if one is not None]
            text = f"  {plan:8} reached by {len(there)} of {len(each)} seeds"
            if there:
                took, updates = (statistics.mean(one[key] for one in there) for key in ("seconds", "updates"))
                by_seed = ", ".join(format(one["seconds"], ".1f") for one in there)
                text += f", in {took:.1f} s ({by_seed}) and {updates:.0f} updates"
            print(text, flush=True)
    if options.record:
        about = {"tick": options.tick, "updates": UPDATES, "window": WINDOW, "rate": RATE, "momentum": MOMENTUM}
        record(options.record, **about, goals=goals, results=results)
    return None


if __name__ == "__main__":
    main()
