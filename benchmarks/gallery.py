"""Makes the pictures of docs/gallery.md: small runs, each with something of its own, and their reports as they are.

Usage: gallery.py [NAME ...], with a chromium; `make gallery`. Rows take their time by sleeping, a run half a minute.
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

from paceline.base.journal import Event, read_journal

OUT = Path(__file__).parents[1] / "docs" / "gallery"
WIDE, TALL, COLOURS = 1000, 2300, 200  # of a picture
RUNS = {
    "kill-and-join": ("--workers", "3"),
    "slow-worker": ("--workers", "4"),
    "islands": ("--workers", "4", "--plan", "local=4 every=8"),
    "servers": ("--workers", "3", "--plan", "server=2"),
}


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
    start, quiet = (
        [sys.executable, "-m", "paceline", "run"],
        {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL},
    )
    processes = [subprocess.Popen([*start, "--run-dir", name, *RUNS[name], "train.py"], cwd=folder, env=env, **quiet)]
    run = folder / name
    while name == "kill-and-join" and processes[0].poll() is None:
        done = max((event["step"] for event in events(run, "step")), default=0)
        if done > 30 and not events(run, "lost"):
            (pid,) = (event["pid"] for event in events(run, "worker") if event["worker"] == 1)
            os.kill(pid, signal.SIGKILL)
            time.sleep(2)
        if done > 50 and len(processes) == 1:
            join = [*start, "--join", name, "--run-dir", "joins", "train.py"]
            processes.append(subprocess.Popen(join, cwd=folder, env=env, **quiet))
        time.sleep(0.2)
    codes = [process.wait() for process in processes]
    assert not any(codes), codes
    return run / "report.html"


def picture(page: Path, out: Path) -> None:
    options = ["--headless", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"]
    size, profile = f"--window-size={WIDE},{TALL}", f"--user-data-dir={page.parent / 'browser'}"
    raw = page.parent / "raw.png"
    command = ["chromium", *options, size, profile, f"--screenshot={raw}", page.as_uri()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    Image.open(raw).convert("RGB").quantize(COLOURS).save(out, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RUNS))
    names = parser.parse_args().names or [*RUNS]
    OUT.mkdir(exist_ok=True)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            picture(make(name, Path(folder)), OUT / f"{name}.png")
        print(f"{OUT / name}.png: {(OUT / f'{name}.png').stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
