"""What `paceline plan` predicts and what the plans then take, on this machine.

    python benchmarks/planner.py [--workers 2 4] [--models mlp gpt words] [--try 12] [--record FILE]

For each model and number of workers, `paceline plan --try K --json` predicts all plans from a probe under the
script's own plan, and tries the K that it predicts to be fastest and fit, twice in turn where they are close. Shown
are the errors of the predicted seconds of a step and of the process's peak memory (but for the plan of the probe
itself), and how much slower the first choice, and the best of the first three, are than the best plan tried.
Predictions are not corrected by earlier ones: each run has a history of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT
from torch import nn
from torch.utils.data import TensorDataset
from turns import record

import paceline

MODELS = ("mlp", "gpt", "words")


def train(kind: str) -> None:
    """The script that is planned for: a model that trains for some steps."""
    torch.manual_seed(0)  # workers must make the same data
    if kind == "mlp":
        width = 1024
        model = lambda: nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)])  # noqa: E731
        rows = torch.randn(512, width, dtype=torch.float32)
        data, loss = TensorDataset(rows, rows.roll(1, 1)), lambda output, batch: F.mse_loss(output, batch[1])
        batch = 256
    else:
        vocabulary = 12288 if kind == "words" else 256
        model = lambda: GPT(256, 4, 4, 128, vocabulary)  # noqa: E731
        ids = torch.randint(vocabulary, (256, 129), dtype=torch.int64)
        data = TensorDataset(ids[:, :-1], ids[:, 1:])
        loss = lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[1].flatten())  # noqa: E731
        batch = 16
    trainer = paceline.Trainer(
        model=model,
        loss=loss,
        forward=lambda module, rows: module(rows[0]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        global_batch=batch,
    )
    for _ in trainer.steps(data, count=10_000):
        pass


def plans(kind: str, workers: int, tries: int) -> dict[str, Any]:
    """The answer of `paceline plan`, as JSON data."""
    with tempfile.TemporaryDirectory() as cache:
        words = ["plan", __file__, "--workers", str(workers), "--try", str(tries), "--json", "--", "--train", kind]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *words],
            env={**os.environ, "XDG_CACHE_HOME": cache},
            stdout=subprocess.PIPE,
            check=True,
        )
    return dict(json.loads(done.stdout))


def figures(answer: dict[str, Any], base: str) -> dict[str, Any]:
    """Errors and regret of one answer; `base` is the plan of the probe."""
    tried = [one for one in answer["plans"] if one["tried"] is not None and one["workers"] > 1]
    others = [one for one in tried if one["plan"] != base]
    seconds = [abs(one["seconds"] / one["tried"] - 1) for one in others]
    peaks = [one["memory"] / one["peak"] - 1 for one in others]
    best = min(one["tried"] for one in tried)
    predicted = sorted(tried, key=lambda one: one["seconds"])
    return {
        "plans": len(answer["plans"]),
        "tried": len(tried),
        "seconds_error": {"median": median(seconds), "worst": max(seconds)},
        "memory_error": {"median": median(map(abs, peaks)), "lowest": min(peaks), "highest": max(peaks)},
        "first_choice": predicted[0]["tried"] / best - 1,
        "best_of_three": min(one["tried"] for one in predicted[:3]) / best - 1,
        "raw": [{name: one[name] for name in ("plan", "seconds", "tried", "memory", "peak")} for one in tried],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--try", dest="tries", type=int, default=12)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--train", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train)
        return
    results: dict[str, Any] = {}
    for kind in args.models:
        for workers in args.workers:
            found = figures(plans(kind, workers, args.tries), f"data={workers}")
            results[f"{kind}, {workers} workers"] = found
            error, memory = found["seconds_error"], found["memory_error"]
            print(
                f"{kind:6} {workers} workers: {found['tried']} plans tried; seconds {error['median']:.0%} off"
                f" (worst {error['worst']:.0%}), memory {memory['median']:.0%} ({memory['lowest']:+.0%} to"
                f" {memory['highest']:+.0%}); first choice {found['first_choice']:.0%} slower than the best, best of"
                f" three {found['best_of_three']:.0%}",
                flush=True,
            )
    if args.record:
        record(args.record, results=results)


if __name__ == "__main__":
    main()
