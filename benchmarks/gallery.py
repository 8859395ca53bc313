"""Makes the pictures of docs/gallery.md: small runs, each with something of its own, and their reports as they are;
and the curves of examples that were trained under several plans, overlaid.

Usage: gallery.py [--record FILE] [NAME ...], with a chromium; `make gallery`. Rows of the small runs take their time by
sleeping, a run half a minute; an example takes one or two minutes under each plan. The record has the losses of
examples.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from turns import record

from paceline.base.journal import Event, read_journal

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "gallery"
WIDE, TALL, COLOURS = 1000, 2300, 200  # of a picture
RUNS = {
    "kill-and-join": ("--workers", "3"),
    "slow-worker": ("--workers", "4"),
    "islands": ("--workers", "4", "--plan", "local=4 every=8"),
    "servers": ("--workers", "3", "--plan", "server=2"),
}
ONE, TWO = ("--workers", "1"), ("--workers", "2")
EXAMPLES = {  # by their plans; and the height of the picture
    "experts": ({"1 worker": ONE, "data=2": TWO, "expert=2": (*TWO, "--plan", "expert=2")}, 775),
    "lora": ({"1 worker": ONE, "data=2": TWO, "shard=2 zero=3": (*TWO, "--plan", "shard=2 zero=3")}, 1090),
}
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def train(name: str) -> None:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    import paceline

    slow, chance = name == "slow-worker" and os.environ["PACELINE_RANK"] == "2", torch.Generator().manual_seed(0)
    x = torch.randn(2000, 64, generator=chance)
    data = TensorDataset(x[:1600], x[:1600, :10].argmax(1))
    held_out = TensorDataset(x[1600:], x[1600:, :10].argmax(1))

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        time.sleep(0.004 * len(output) * (2 if slow else 1))
        return F.cross_entropy(output, batch[1])

    def right(output: torch.Tensor, batch: Any) -> dict[str, Any]:
        return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(output))}

    trainer = paceline.Trainer(
        lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
        loss,
        lambda params: torch.optim.SGD(params, lr=0.01 if name == "islands" else 0.05, momentum=0.9),
        global_batch=64,
    )
    for report in trainer.steps(data, count=240):
        if report.step % 40 == 0:
            trainer.evaluate(held_out, right)


def events(folder: Path, kind: str) -> list[Event]:
    there = (folder / "journal.jsonl").exists()
    return [event for event in read_journal(folder) if event["event"] == kind] if there else []


def make(name: str, folder: Path) -> Path:
    """Runs it; the report."""
    script, env = folder / "train.py", {**os.environ, "OMP_NUM_THREADS": "1"}
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport gallery\ngallery.train({name!r})\n"
    )
    start = [sys.executable, "-m", "paceline", "run"]
    processes = [subprocess.Popen([*start, "--run-dir", name, *RUNS[name], "train.py"], cwd=folder, env=env, **QUIET)]
    run = folder / name
    while name == "kill-and-join" and processes[0].poll() is None:
        done = max((event["step"] for event in events(run, "step")), default=0)
        if done > 30 and not events(run, "lost"):
            (pid,) = (event["pid"] for event in events(run, "worker") if event["worker"] == 1)
            os.kill(pid, signal.SIGKILL)
            time.sleep(2)
        if done > 50 and len(processes) == 1:
            join = [*start, "--join", name, "--run-dir", "joins", "train.py"]
            processes.append(subprocess.Popen(join, cwd=folder, env=env, **QUIET))
        time.sleep(0.2)
    codes = [process.wait() for process in processes]
    assert not any(codes), codes
    return run / "report.html"


def overlay(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Runs an example under each of its plans; a page with all curves, and the losses for the record."""
    plans, _ = EXAMPLES[name]
    paceline = [sys.executable, "-m", "paceline"]
    quiet = {"cwd": folder, "check": True, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, **QUIET}
    for plan, options in plans.items():
        command = [*paceline, "run", "--run-dir", plan, *options, str(ROOT / "examples" / f"{name}.py")]
        subprocess.run(command, **quiet)
    subprocess.run([*paceline, "compare", *plans, "--html", "plans.html"], **quiet)
    losses = {plan: [event["loss"] for event in events(folder / plan, "step")] for plan in plans}
    others = [one for plan, one in losses.items() if plan != "1 worker"]
    apart = [abs(a / b - 1) for one in others for a, b in zip(one, losses["1 worker"], strict=True)]
    held_out = {plan: [event["results"] for event in events(folder / plan, "evaluate")] for plan in plans}
    print(f"{name}: losses are at most {max(apart):.1e} apart")
    return folder / "plans.html", {"losses": losses, "largest relative difference": max(apart), "held out": held_out}


def picture(page: Path, out: Path, tall: int = TALL) -> None:
    options = ["--headless", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"]
    size, profile = f"--window-size={WIDE},{tall}", f"--user-data-dir={page.parent / 'browser'}"
    raw = page.parent / "raw.png"
    command = ["chromium", *options, size, profile, f"--screenshot={raw}", page.as_uri()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    Image.open(raw).convert("RGB").quantize(COLOURS).save(out, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*RUNS, *EXAMPLES]))
    parser.add_argument("--record", type=Path, metavar="FILE")
    options = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    results: dict[str, Any] = {}
    for name in options.names or [*RUNS, *EXAMPLES]:
        with tempfile.TemporaryDirectory() as folder:
            if name in RUNS:
                picture(make(name, Path(folder)), OUT / f"{name}.png")
            else:
                page, results[name] = overlay(name, Path(folder))
                picture(page, OUT / f"{name}.png", EXAMPLES[name][1])
        print(f"{OUT / name}.png: {(OUT / f'{name}.png').stat().st_size / 1000:.0f} kB", flush=True)
        if options.record:
            record(options.record, results=results)


if __name__ == "__main__":
    main()
