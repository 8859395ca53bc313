"""What `paceline plan` predicts and what the plans then take, on this machine.

    python benchmarks/planner.py [--models mlp gpt words] [--workers 2 3 4] [--slow 2 4] [--links 50 200 1000]
        [--try 6] [--steps 20] [--minutes 40] [--auto] [--record FILE]

A situation is a model together with a team of workers. There are three kinds of teams:

- `--workers`: this many workers on this machine;
- `--slow`: this many workers on this machine, and the forwards of one of them take four times as long;
- `--links`: one worker on each of two hosts, with a link of this many Mbit/s between them (network namespaces, so it
  must run as root).

By default there are 24 situations. In each, `paceline plan --try K --json` predicts all plans. It tries the K plans
that are expected to fit and to be the fastest. Plans that come close to the best one are tried a second time.

The output shows the errors of the predicted step seconds and of the predicted peak memory of the process, each plan as
predicted before its own trial. The trial of the script's plan is left out of these, since all predictions are corrected
by it. The output also shows how much slower the first choice is than the best plan tried, and how much slower the best
of the script's plan and the first three is, which is what `--try 3` chooses. Each situation has a history of its own,
so earlier predictions correct nothing.

With `--auto`, a run of 10,000 steps begins with `--plan auto` instead, on this machine only, and the output shows how
long it measured and tried plans before it trained.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
from paceline.base.journal import read_journal

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from fake_ssh import install_ssh
from networks import network

MODELS = ("mlp", "gpt", "words")
SLOWER = 3.0  # times the seconds of a forward that the slow worker is idle after it
SLOW_RANK = "1"
RAW = "plan", "turn", "seconds", "tried", "memory", "peak", "sends"


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
        forward=slowed if os.environ.get("SLOW") and os.environ.get("PACELINE_RANK") == SLOW_RANK else forward,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        global_batch=batch,
    )
    for _ in trainer.steps(data, count=10_000):
        pass


def forward(module: nn.Module, rows: Any) -> torch.Tensor:
    """Calls the model."""
    output: torch.Tensor = module(rows[0])
    return output


def slowed(module: nn.Module, rows: Any) -> torch.Tensor:
    """Calls the model on a worker that takes longer."""
    began = time.perf_counter()
    try:
        return forward(module, rows)
    finally:  # a stage of a pipeline leaves by an exception
        end = time.perf_counter() + SLOWER * (time.perf_counter() - began)
        while time.perf_counter() < end:
            pass


@dataclass(frozen=True)
class Situation:
    """A model on so many workers, one of them slow or not, or on two hosts with a link of `mbit`."""

    model: str
    workers: int
    slow: bool = False
    mbit: int = 0

    def __str__(self) -> str:
        more = ", one slow" if self.slow else f" over {self.mbit} Mbit/s" if self.mbit else ""
        return f"{self.model}, {self.workers} workers{more}"

    def answer(self, tries: int, steps: int) -> dict[str, Any]:
        """The answer of `paceline plan`, as JSON data."""
        with tempfile.TemporaryDirectory() as base:
            env = {**os.environ, "XDG_CACHE_HOME": base, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            words = ["--try", str(tries), "--steps", str(steps), "--json", os.path.abspath(__file__)]
            words += ["--", "--train", self.model]
            if not self.mbit:
                env |= {"SLOW": "1"} if self.slow else {}
                command = [sys.executable, "-m", "paceline", "plan", "--workers", str(self.workers), *words]
                return read(command, env)
            with network(3, Path(base)) as net:
                for host in net.hosts[:2]:
                    host.cap(self.mbit)
                programs = install_ssh(Path(base), dict(zip("ab", net.hosts, strict=False)))
                env["PATH"] = f"{programs}:{env['PATH']}"
                given = [f"--env={name}" for name in ("OMP_NUM_THREADS", "PYTHONPATH") if env.get(name)]
                given += ["--hosts", "a,b", "--allow", "lossy", f"--cwd={base}"]
                return read(net.hosts[2].command(sys.executable, "-m", "paceline", "plan", *given, *words), env)

    def auto(self) -> dict[str, Any]:
        """What `--plan auto` chose at the beginning of a run, and how long it took."""
        with tempfile.TemporaryDirectory() as base:
            env = {**os.environ, "XDG_CACHE_HOME": base, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            env |= {"SLOW": "1"} if self.slow else {}
            words = ["--workers", str(self.workers), "--plan", "auto", "--run-dir", f"{base}/run", "--max-time", "90s"]
            command = [
                sys.executable,
                "-m",
                "paceline",
                "run",
                *words,
                os.path.abspath(__file__),
                "--train",
                self.model,
            ]
            began = time.time()
            subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            events = read_journal(Path(base) / "run")
            (decision,) = (event for event in events if event["event"] == "decision" and "plan" in event)
            start = next(event for event in events if event["event"] == "start")
            return {"plan": decision["plan"], "why": decision["why"], "until_start": round(start["at"] - began, 1)}


def read(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    """What a command prints as JSON."""
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return dict(json.loads(done.stdout))


def figures(answer: dict[str, Any]) -> dict[str, Any]:
    """Errors and regret of one answer."""
    tried = [one for one in answer["plans"] if one["tried"] and one["workers"] > 1]
    others = [one for one in tried if one["plan"] != answer["first"]]
    seconds = [abs(one["seconds"] / one["tried"] - 1) for one in others]
    peaks = [one["memory"] / one["peak"] - 1 for one in others]
    best = min(one["tried"] for one in tried)
    in_turn = sorted((one for one in tried if one["turn"]), key=lambda one: one["turn"])
    first = [one["tried"] for one in tried if one["plan"] == answer["first"]]
    ratios = [a["seconds"] / b["seconds"] / (a["tried"] / b["tried"]) for a in tried for b in tried if a is not b]
    return {
        "plans": len(answer["plans"]),
        "refused": len(answer["refused"]),
        "tried": len(tried),
        "seconds_error": {"median": median(seconds), "worst": max(seconds)} if seconds else None,
        "ratio_error": median(abs(ratio - 1) for ratio in ratios) if ratios else None,
        "memory_error": {"lowest": min(peaks), "highest": max(peaks)} if peaks else None,
        "first_choice": in_turn[0]["tried"] / best - 1,
        "best_of_three": min([*first, *(one["tried"] for one in in_turn[:3])]) / best - 1,
        "raw": [{name: one[name] for name in RAW} for one in tried],
    }


def situations(args: argparse.Namespace) -> Iterator[Situation]:
    """The situations that were asked for."""
    for model in args.models:
        yield from (Situation(model, workers) for workers in args.workers)
        yield from (Situation(model, workers, slow=True) for workers in args.slow)
        yield from (Situation(model, 2, mbit=mbit) for mbit in args.links)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--slow", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--links", type=int, nargs="*", default=[50, 200, 1000])
    parser.add_argument("--try", dest="tries", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--train", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train)
        return
    results: dict[str, Any] = {}
    if args.auto:
        for situation in situations(args):
            if not situation.mbit:
                results[str(situation)] = taken = situation.auto()
                print(f"{situation!s:32} {taken['until_start']} s until the run started: {taken['why']}", flush=True)
                if args.record:
                    record(args.record, results=results)
        return
    began, left_out = time.monotonic(), list[str]()
    print(f"at most {args.tries} plans of each situation are tried; each takes seconds")
    for situation in situations(args):
        if time.monotonic() - began > 60 * args.minutes:
            left_out.append(str(situation))
            continue
        since = time.monotonic()
        taken = figures(situation.answer(args.tries, args.steps))
        results[str(situation)] = {**taken, "minutes": round((time.monotonic() - since) / 60, 2)}
        error, memory = taken["seconds_error"] or {}, taken["memory_error"] or {}
        first, three = taken["first_choice"], taken["best_of_three"]
        shown = [
            f"{situation!s:32} {taken['tried']} of {taken['plans']} plans tried",
            f"seconds {error.get('median', 0):.0%} off (worst {error.get('worst', 0):.0%})",
            f"memory {memory.get('lowest', 0):+.0%} to {memory.get('highest', 0):+.0%}",
            f"first choice {first:.0%} slower than the best, best of three {three:.0%}",
        ]
        print("; ".join(shown), flush=True)
        if args.record:
            record(args.record, results=results, left_out=left_out)
    near = sum(one["best_of_three"] <= 0.05 for one in results.values())
    first = sum(one["first_choice"] <= 0.05 for one in results.values())
    print(f"within 5 % of the best plan tried: best of three {near}, first choice {first} of {len(results)} situations")
    if left_out:
        print(f"left out after {args.minutes:g} minutes: {'; '.join(left_out)}")
    if args.record:
        record(args.record, results=results, left_out=left_out)


if __name__ == "__main__":
    main()
