"""The small training that faults are tried on: under `paceline run`, and the same loop by hand under torchrun.

Usage: small.py paceline|ddp|ddp-prefix FOLDER STEPS LOADERS. Each worker writes when it had done which step. Of a
step's time the larger part is a pause, which stands for an accelerator: what a lost process costs in importing torch is
not taken from the others' cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

GLOBAL_BATCH, ROWS, PAUSE = 96, 4096, 0.03
SAVED = 5.0  # seconds between the checkpoints of the loop by hand


def command(role: str, out: Path, steps: int, options: Sequence[str], loaders: int = 0) -> list[str]:
    """What starts it, with the launcher's options."""
    launcher = ["paceline", "run"] if role == "paceline" else ["torch.distributed.run", "--monitor-interval", "0.1"]
    return [sys.executable, "-m", *launcher, *options, __file__, role, str(out), str(steps), str(loaders)]


def start(role: str, out: Path, steps: int, options: Sequence[str], loaders: int = 0) -> subprocess.Popen[bytes]:
    """Starts it; torchrun says much about a worker that is lost, which is left out."""
    said = None if role == "paceline" else subprocess.DEVNULL
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = command(role, out, steps, options, loaders)
    return subprocess.Popen(started, env=environment, cwd=out, stdout=said, stderr=said)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends it with all its workers."""
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def times(out: Path) -> dict[int, float]:
    """When each step was first done, by Unix time."""
    done: dict[int, float] = {}
    for file in out.glob("*.times"):
        for line in file.read_text().splitlines():
            if len(words := line.split()) == 2:
                done[int(words[0])] = min(float(words[1]), done.get(int(words[0]), float("inf")))
    return dict(sorted(done.items()))


def train(out: Path, steps: int, loaders: int) -> None:
    import torch
    from torch.utils.data import TensorDataset

    import paceline

    chance = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(ROWS, 64, generator=chance), torch.randint(0, 8, (ROWS,), generator=chance))
    trainer = paceline.Trainer(
        lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)),
        lambda output, batch: torch.nn.functional.cross_entropy(output, batch[1]),
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        global_batch=GLOBAL_BATCH,
    )
    with (out / f"{os.getpid()}.times").open("w", buffering=1) as file:
        for report in trainer.steps(data, count=steps, loader={"num_workers": loaders}):
            file.write(f"{report.step} {time.time()}\n")
            time.sleep(PAUSE)
    trainer.export(out / "weights.safetensors")


def train_ddp(out: Path, steps: int, prefix: bool) -> None:
    """As torchrun's documentation has it: everybody begins again from the last checkpoint.

    With `prefix` each attempt has a part of the store to itself, or gloo may find the addresses of the attempt before.
    """
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if prefix:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        attempt = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group("gloo", store=attempt, rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo")
    saved, done = out / "saved.pt", 0
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        done = state["done"]
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    at = time.monotonic()
    (out / f"{rank}.pid").write_text(str(os.getpid()))
    with (out / f"{os.getpid()}.times").open("w", buffering=1) as file:
        for step in range(done + 1, steps + 1):
            rows = torch.randn(GLOBAL_BATCH // size, 64), torch.randint(0, 8, (GLOBAL_BATCH // size,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(ddp(rows[0]), rows[1]).backward()
            optimizer.step()
            file.write(f"{step} {time.time()}\n")
            if rank == 0 and time.monotonic() - at > SAVED:
                at = time.monotonic()
                torch.save({"model": model.state_dict(), "done": step}, out / "saving.pt")
                (out / "saving.pt").rename(saved)
            time.sleep(PAUSE)
    dist.destroy_process_group()


if __name__ == "__main__":
    what, folder, count, workers = sys.argv[1:]
    if what == "paceline":
        train(Path(folder), int(count), int(workers))
    else:
        train_ddp(Path(folder), int(count), prefix=what == "ddp-prefix")
