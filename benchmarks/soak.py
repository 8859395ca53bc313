"""Minutes of kills, stops and joins, one every 5 to 15 seconds: what is left of the speed, and whether the bytes are
those of an undisturbed run.

Usage: soak.py [--minutes M] [--seed N] [--record FILE]. Four workers train with `exact`. Beside it torchrun restarts
the same loop after the same kills, from a checkpoint every five seconds.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import small
from turns import record

from paceline.base.journal import effective_steps, read_journal
from paceline.observe.summary import Summary

WORKERS = 4
LEAST, MOST = 5.0, 15.0  # seconds between two faults
STAYS = 12.0  # seconds that one who joins stays
Faults = list[tuple[float, str, int]]


def plan_of_faults(seed: int, seconds: float) -> Faults:
    """(seconds after the first step, what, whose turn): as many as fit."""
    chance, found, at = random.Random(seed), [], 0.0
    while (at := at + chance.uniform(LEAST, MOST)) < seconds - MOST:
        found.append((at, chance.choice(["kill", "kill", "stop", "join"]), chance.randrange(WORKERS)))
    return found


def workers_of(run: Path) -> list[psutil.Process]:
    """The processes that train in a run folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("PACELINE_RUN_DIR") == str(run) and small.__file__ in process.cmdline():
                found.append(process)
    return found


def until_first_step(out: Path) -> float:
    while not small.times(out):
        time.sleep(0.05)
    return time.monotonic()


def paceline(out: Path, steps: int, faults: Faults) -> dict[str, Any]:
    """Trains; the seconds from the first to the last step, the bytes, what happened."""
    run, did = out / "run", Counter[str]()
    common = ["--max-restarts", "10000", "--quiet", "--plan", "exact"]
    process = small.start("paceline", out, steps, [*common, "--workers", str(WORKERS), "--run-dir", str(run)])
    began, guests = until_first_step(out), []
    for at, what, turn in faults:
        while time.monotonic() - began < at and process.poll() is None:
            time.sleep(0.02)
            for guest in guests:
                if time.monotonic() > guest[1]:
                    guest[0].send_signal(signal.SIGTERM)
                    guest[1] = float("inf")
        if process.poll() is not None:
            break
        did[what] += 1
        if what == "join":
            guest = small.start("paceline", out, steps, [*common, "--workers", "1", "--join", str(run)])
            guests.append([guest, time.monotonic() + STAYS])
        else:
            workers = workers_of(run)
            workers[turn % len(workers)].send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    if process.wait() != 0 or any(guest.wait() not in (0, 75) for guest, _ in guests):
        raise SystemExit(f"the run in {run} failed")
    records = effective_steps(read_journal(run))
    numbers = [entry["step"] for entry in records]
    assert numbers == sorted(set(numbers))
    assert sum(entry["steps"] for entry in records) == steps
    assert sum(entry["samples"] for entry in records) == samples(steps), "a sample is missing, or counted twice"
    done, summary = small.times(out), Summary(run)
    account = {"goodput": summary.goodput, "account": summary.account}
    return {"seconds": done[steps] - done[1], "did": dict(did), **account}


def samples(steps: int) -> int:
    """Rows of so many global batches."""
    epochs, rest = divmod(steps, -(-small.ROWS // small.GLOBAL_BATCH))
    return epochs * small.ROWS + rest * small.GLOBAL_BATCH


def torchrun(out: Path, steps: int, faults: Faults, limit: float) -> dict[str, Any]:
    """The kills only: it would wait for ever for one that is stopped, and can take nobody in."""
    options = ["--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", "10000"]
    process, kills = small.start("ddp-prefix", out, steps, options), 0
    began = until_first_step(out)
    for at, what, turn in faults:
        while time.monotonic() - began < at and process.poll() is None:
            time.sleep(0.02)
        if what == "kill" and process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(int((out / f"{turn}.pid").read_text()), signal.SIGKILL)
                kills += 1
    while time.monotonic() - began < limit and process.poll() is None:
        time.sleep(0.1)
    if process.poll() is None:
        small.end(process)
    done = small.times(out)
    return {"seconds": max(done.values()) - done[1], "done": max(done), "kills": kills}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, metavar="FILE", help="writes the raw figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        folders = [Path(base, name) for name in ("probe", "alone", "soak", "torchrun")]
        for folder in folders:
            folder.mkdir()
        probe = paceline(folders[0], 200, [])
        steps = int(60 * options.minutes * 200 / probe["seconds"])
        faults = plan_of_faults(options.seed, 60 * options.minutes)
        alone = paceline(folders[1], steps, [])
        print(f"undisturbed   {steps} steps in {alone['seconds']:.1f} s", flush=True)
        soak = paceline(folders[2], steps, faults)
        ratio = alone["seconds"] / soak["seconds"]
        weights = [(folder / "weights.safetensors").read_bytes() for folder in folders[1:3]]
        equal = weights[0] == weights[1]
        did = ", ".join(f"{count} {what}s" for what, count in soak["did"].items())
        print(f"soak          {steps} steps in {soak['seconds']:.1f} s, {ratio:.3f} of the speed, after {did}")
        print(f"              bytes {'equal' if equal else 'DIFFERENT'}; goodput {soak['goodput']:.1%}", flush=True)
        peer = torchrun(folders[3], steps, faults, 60 * options.minutes)
        speed = (peer["done"] / peer["seconds"]) / (steps / alone["seconds"])
        print(f"torchrun      {peer['done']} steps in {peer['seconds']:.1f} s, {speed:.3f} of ours undisturbed")
    if options.record:
        results = {"steps": steps, "alone": alone, "soak": soak, "torchrun": peer, "ratio": ratio, "equal": equal}
        record(options.record, workers=WORKERS, threads=1, seed=options.seed, pause=small.PAUSE, results=results)


if __name__ == "__main__":
    main()
