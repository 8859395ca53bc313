"""Minutes of kills, stops and joins, one every 5 to 15 seconds: what is left of the speed, and whether the bytes are
those of an undisturbed run.

Usage: soak.py [--minutes M] [--seed N] [--record FILE]. Four workers train with `exact`; of a step's time the larger
part is a pause, which stands for an accelerator, so that what a lost process costs in importing torch is not taken from
the others' cores. Beside it torchrun restarts the same loop after the same kills, from a checkpoint every five seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from turns import record

from paceline.observe.journal import effective_steps, read_journal
from paceline.observe.summary import Summary

WORKERS, PAUSE = 4, 0.03
LEAST, MOST = 5.0, 15.0  # seconds between two faults
STAYS = 12.0  # seconds that one who joins stays
SAVED = 5.0  # seconds between torchrun's checkpoints


def model() -> object:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))


def train(out: Path, steps: int) -> None:
    """The script under `paceline run`."""
    import torch
    from torch.utils.data import TensorDataset

    import paceline

    chance = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(4096, 64, generator=chance), torch.randint(0, 8, (4096,), generator=chance))
    trainer = paceline.Trainer(
        model,
        lambda output, batch: torch.nn.functional.cross_entropy(output, batch[1]),
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        global_batch=96,
        plan="exact",
    )
    for _ in trainer.steps(data, count=steps):
        time.sleep(PAUSE)
    trainer.export(out / "weights.safetensors")


def train_ddp(out: Path, steps: int) -> None:
    """The script under torchrun. Every worker says how far it is, by when."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), out / "saved.pt"
    net, done = model(), 0
    if saved.exists():
        state = torch.load(saved)
        net.load_state_dict(state["model"])
        done = state["done"]
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    at = time.monotonic()
    (out / f"{rank}.pid").write_text(str(os.getpid()))
    with (out / "times").open("a", buffering=1) as times:
        for step in range(done + 1, steps + 1):
            rows = torch.randn(24, 64), torch.randint(0, 8, (24,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(ddp(rows[0]), rows[1]).backward()
            optimizer.step()
            if rank == 0:
                times.write(f"{step} {time.time()}\n")
                if time.monotonic() - at > SAVED:
                    at = time.monotonic()
                    torch.save({"model": net.state_dict(), "done": step}, out / "saving.pt")
                    (out / "saving.pt").rename(saved)
            time.sleep(PAUSE)
    dist.destroy_process_group()


def plan_of_faults(seed: int, seconds: float) -> list[tuple[float, str, int]]:
    """(seconds after the first step, what, whose turn): as many as fit."""
    chance, found, at = random.Random(seed), [], 0.0
    while (at := at + chance.uniform(LEAST, MOST)) < seconds - MOST:
        found.append((at, chance.choice(["kill", "kill", "stop", "join"]), chance.randrange(WORKERS)))
    return found


def workers_of(run: Path) -> list[int]:
    """Process ids of the workers that train in a run folder, in no order: from their environments."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", entry, "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"PACELINE_RUN_DIR={run}".encode() in words:
            found.append(int(entry))
    return sorted(found)


def command_of(run: Path, out: Path, steps: int, *options: str) -> list[str]:
    launch = [sys.executable, "-m", "paceline.cli", "run", "--max-restarts", "10000", "--quiet", *options]
    return [*launch, __file__, "--as", "paceline", str(out), str(steps)]


def paceline(folder: Path, steps: int, faults: list[tuple[float, str, int]]) -> dict[str, object]:
    """Trains; the seconds from the first to the last step, the bytes, what happened."""
    run, out = folder / "run", folder
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = ["--workers", str(WORKERS), "--run-dir", str(run)]
    process = subprocess.Popen(command_of(run, out, steps, *first), env=environment, cwd=folder)
    while not any(event["event"] == "step" for event in (read_journal(run) if run.exists() else [])):
        time.sleep(0.05)
    began, guests, did = time.monotonic(), [], []
    for at, what, turn in faults:
        while time.monotonic() - began < at and process.poll() is None:
            time.sleep(0.02)
            for guest in guests:
                if time.monotonic() > guest[1] and guest[0].poll() is None:
                    guest[0].send_signal(signal.SIGTERM)
                    guest[1] = float("inf")
        if process.poll() is not None:
            break
        if what == "join":
            join = ["--workers", "1", "--join", str(run)]
            guest = subprocess.Popen(command_of(run, out, steps, *join), env=environment, cwd=folder)
            guests.append([guest, time.monotonic() + STAYS])
        else:
            pids = workers_of(run)
            os.kill(pids[turn % len(pids)], signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        did.append(what)
    assert process.wait(600) == 0
    for guest, _ in guests:
        guest.wait(60)
    records = effective_steps(read_journal(run))
    assert sum(entry["steps"] for entry in records) == steps, "a step is missing, or there twice"
    assert sum(entry["samples"] for entry in records) == read_samples(steps)
    seconds = records[-1]["at"] - records[0]["at"]
    summary = Summary(run)
    weights = (out / "weights.safetensors").read_bytes()
    return {"seconds": seconds, "weights": weights, "did": did, "goodput": summary.goodput, "account": summary.account}


def read_samples(steps: int) -> int:
    """Rows of so many global batches of 96 out of epochs of 4096."""
    whole, rest = divmod(steps, 43)
    return whole * 4096 + rest * 96


def torchrun(folder: Path, steps: int, faults: list[tuple[float, str, int]], limit: float) -> dict[str, object]:
    options = ["--nproc-per-node", str(WORKERS), "--max-restarts", "10000", "--monitor-interval", "0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, "--as", "ddp", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, str(steps)], env=environment, stdout=-3, stderr=-3, cwd=folder)
    times = folder / "times"
    while not times.exists() or not times.stat().st_size:
        time.sleep(0.05)
    began = time.monotonic()
    for at, what, turn in faults:
        while time.monotonic() - began < at and process.poll() is None:
            time.sleep(0.02)
        if what == "kill" and process.poll() is None:  # it would wait for ever for one that is stopped
            with suppress(ProcessLookupError):
                os.kill(int((folder / f"{turn}.pid").read_text()), signal.SIGKILL)
    try:
        hung = process.wait(limit) != 0
    except subprocess.TimeoutExpired:
        hung = True
        process.kill()
    said = [line.split() for line in times.read_text().splitlines()]
    done, seconds = max(int(step) for step, _ in said), float(said[-1][1]) - float(said[0][1])
    return {"seconds": seconds, "done": done, "made": len(said), "hung": hung}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    parser.add_argument("--as", nargs=3, dest="role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, out, steps = options.role
        (train if role == "paceline" else train_ddp)(Path(out), int(steps))
        return
    with tempfile.TemporaryDirectory() as base:
        folders = [Path(base, name) for name in ("probe", "alone", "soak", "torchrun")]
        for folder in folders:
            folder.mkdir()
        probe = paceline(folders[0], 200, [])
        steps = int(60 * options.minutes * 200 / float(probe["seconds"]))
        faults = plan_of_faults(options.seed, 60 * options.minutes)
        alone = paceline(folders[1], steps, [])
        soak = paceline(folders[2], steps, faults)
        peer = torchrun(folders[3], steps, faults, 60 * options.minutes)
    equal = alone.pop("weights") == soak.pop("weights")
    ratio = alone["seconds"] / soak["seconds"]
    print(f"undisturbed   {steps} steps in {alone['seconds']:.1f} s")
    did = ", ".join(f"{soak['did'].count(what)} {what}s" for what in ("kill", "stop", "join"))
    print(f"soak          {steps} steps in {soak['seconds']:.1f} s, {ratio:.3f} of the speed, after {did}")
    print(f"              bytes {'equal' if equal else 'DIFFERENT'}; goodput {soak['goodput']:.1%}")
    print(
        f"torchrun      {peer['done']} steps in {peer['seconds']:.1f} s, of {peer['made']} made, hung: {peer['hung']}"
    )
    if options.record:
        results = {"steps": steps, "alone": alone, "soak": soak, "torchrun": peer, "ratio": ratio, "equal": equal}
        record(options.record, workers=WORKERS, threads=1, seed=options.seed, results=json.loads(json.dumps(results)))


if __name__ == "__main__":
    main()
