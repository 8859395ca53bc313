"""Eight causes of trouble, injected into runs of four workers: is what `paceline doctor RUN` says first the right cause
and worker? And clean runs in which much takes long: does it stay silent?

Usage: causes.py [--cause C ...] [--seeds N] [--together N] [--record FILE]; `clean` is a cause of its own, whose seeds
are its runs (20 unless said); the slow link wants root. A row takes its time by sleeping, so that four workers fit on
two cores. Each seed draws the worker that is hit, the step from which on, sizes, and in which of several ways. A run
that is caused takes 10 to 25 s, a clean one 90 s or more: its verdict is asked for every five seconds, and each but
"no problem found" is a false alarm, as is each word of a hang.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from turns import record

from paceline.base.journal import read_journal
from paceline.observe.doctor import verdict
from paceline.observe.summary import Summary
from paceline.observe.usual_step import usual_step

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from networks import Host, Network, join_over, network

WORKERS, TIMES, MBIT = 4, 1.5, 100
LONG, LOOKS, SETTLED = 92.0, 5.0, 30.0  # seconds of a clean run, between two looks, and until somebody joins it
STEPS = 80
# What doctor's first line must say, {} being the worker that is hit.
CAUSES = {
    "slow CPU": r"worker {} is slow\b",
    "slow link": r"the link between .*slows training down",
    "slow loader": r"data loading slows training down: worker {}( on \S+)?$",
    "hung worker": r"the script hung \(worker {}\)",
    "mismatched collective": r"workers called different collectives \(worker {}\)",
    "skipped collective": r"a worker skipped a collective \(worker {}\)",
    "diverged parameter": r"the workers' weights differ \(worker {}\)",
    "NaN": r"a loss or gradient is NaN or infinite \(worker {}\)",
}
ENDS = [*CAUSES][3:]  # these end the run
CLEAN = ("plain", "first step", "evaluates", "main_first", "save", "loader", "shares", "join")
RUNS = 20


@dataclass(frozen=True)
class Drawn:
    """Of a cause and a seed: the worker, the step before which it begins, rows a worker and seconds a row, the width of
    the model, and in which way it is done.
    """

    hit: int
    at: int
    rows: int
    row: float
    width: int
    way: int

    @staticmethod
    def of(cause: str, seed: int) -> Drawn:
        chance = random.Random(f"{cause}/{seed}")
        hit, at, rows, width = chance.randrange(WORKERS), chance.randrange(8, 24), chance.choice([6, 8, 12]), 64
        step = 0.4 if cause == "clean" else 0.2
        if cause == "slow link":
            width = chance.choice([640, 800, 1024])
        return Drawn(hit, at, rows, step * chance.uniform(0.8, 1.2) / rows, width, seed)


# ---- the script


def train(cause: str, seed: int) -> None:
    import torch
    import torch.nn.functional as F
    from torch import nn

    import paceline
    from paceline.checkpoint import storage

    drawn, rank, began = Drawn.of(cause, seed), int(os.environ["PACELINE_RANK"]), time.monotonic()
    hit, kind = rank == drawn.hit, CLEAN[seed % len(CLEAN)] if cause == "clean" else cause
    team, state = paceline.join(), {"paused": False}

    def once(after: float = 0.0) -> bool:
        """Whether it is the time for what happens once in a process: after so many seconds."""
        due = time.monotonic() - began > after and not state["paused"]
        state["paused"] |= due
        return due

    class Rows:
        def __len__(self) -> int:
            return 1 << 16

        def __getitem__(self, row: int) -> Any:
            if kind == "slow loader":
                time.sleep(drawn.row * (TIMES if hit and time.monotonic() - began > drawn.at / 5 else 1))
            elif kind == "loader" and hit and once(SETTLED):
                time.sleep(20)
            x = torch.randn(drawn.width, generator=torch.Generator().manual_seed(row))
            if kind == "NaN" and hit and drawn.way % 3 == 0 and trainer.steps_done >= drawn.at:
                x[3] = float("nan")
            return x, row % 4

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        done = trainer.steps_done
        slow = TIMES if kind == "slow CPU" and hit and done >= drawn.at else 1
        time.sleep(drawn.row * len(output) * (0.25 if kind == "slow loader" else slow))  # loading is what counts there
        if kind == "first step" and done == 0 and (hit or drawn.way % 2) and once():
            time.sleep(45)
        if kind == "hung worker" and hit and drawn.way % 3 == 0 and done == drawn.at:
            time.sleep(600)
        if kind == "hung worker" and hit and drawn.way % 3 == 1 and done == drawn.at:
            while True:
                pass
        found = F.cross_entropy(output, batch[1])
        if kind == "NaN" and hit and drawn.way % 3 and done == drawn.at:
            found = found * float("nan") if drawn.way % 3 == 1 else found + (output * 0).sum().sqrt()
        return found

    def metric(output: torch.Tensor, batch: Any) -> dict[str, Any]:
        time.sleep(40 * WORKERS / 96 * len(output) if kind == "evaluates" else 0)
        return {"right": ((output.argmax(1) == batch[1]).sum(), len(output))}

    if kind == "main_first":
        with team.main_first():
            time.sleep(40 if team.rank == 0 else 0)
    if kind == "save":
        write = storage.Folder.write

        def slowly(*given: Any) -> Any:
            time.sleep(40 if once() else 0)
            return write(*given)

        storage.Folder.write = slowly  # type: ignore[method-assign]
    torch.manual_seed(seed)
    layers = (nn.Linear(drawn.width, drawn.width), nn.ReLU(), nn.Linear(drawn.width, 4))
    trainer = paceline.Trainer(
        lambda: nn.Sequential(*layers),
        loss,
        lambda params: torch.optim.AdamW(params, lr=1e-3),
        global_batch=drawn.rows * WORKERS,
    )

    def evaluate() -> None:
        trainer.evaluate([Rows()[row] for row in range(96)], metric)

    loader = {"num_workers": drawn.way % 2} if kind in ("slow loader", "loader") else {"num_workers": 0}
    steps = 40 if kind == "slow link" else STEPS
    for report in trainer.steps(Rows(), count=10**6 if cause == "clean" else steps, loader=loader):
        once_here = report.step == drawn.at
        if kind == "hung worker" and hit and drawn.way % 3 == 2 and once_here:
            threading.Event().wait()
        if kind == "diverged parameter" and hit and once_here:
            _flip(trainer.model, drawn)
        if kind.endswith("collective") and _together(trainer, team, drawn, kind * (hit and once_here), evaluate):
            break
        if kind == "evaluates" and report.step == drawn.at:
            evaluate()
        if kind == "save" and report.step == drawn.at:
            trainer.save()
        if cause == "clean" and team.any(time.monotonic() - began > LONG, name="over"):
            trainer.stop()


def _flip(model: Any, drawn: Drawn) -> None:
    """The lowest bit of a weight, or one of another mantissa bit."""
    import torch

    with torch.no_grad():
        weight = model[0].weight.view(-1)
        weight.view(torch.int32)[drawn.at] ^= 1 << (3 * drawn.way)


def _together(trainer: Any, team: Any, drawn: Drawn, wrong: str, evaluate: Callable[[], Any]) -> bool:
    """What the workers do together between two steps. Who leaves one out may have to leave the loop: True."""
    import torch

    one = torch.ones(1)
    calls: list[Callable[[], Any]] = [lambda: team.all_reduce(one, name="score"), lambda: team.any(False, name="over")]
    if trainer.steps_done % 5 == 0 or trainer.steps_done == drawn.at:
        calls.append(evaluate)
    others = (
        lambda: team.all_reduce(one, name="scores"),
        lambda: team.broadcast(one, name="score"),
        lambda: team.all_reduce(torch.ones(2), name="score"),
        trainer.save,
        lambda: team.all_reduce(one.double(), name="score"),
    )
    if wrong == "mismatched collective":
        calls[0] = others[drawn.way]
    elif wrong and drawn.way < 4:
        del calls[drawn.way % len(calls)]
    elif wrong:
        return True
    for call in calls:
        call()
    return False


# ---- runs


def command(cause: str, seed: int, workers: int, run: Path, *options: str) -> list[str]:
    own = [__file__, "--script", cause, "--seeds", str(seed)]
    return [sys.executable, "-m", "paceline", "run", "--workers", str(workers), "--run-dir", str(run), *options, *own]


def variables(cause: str) -> dict[str, str]:
    quick = {"PACELINE_STANDSTILL": "2"} if cause == "hung worker" else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", **quick}


def over_a_link(net: Network, seed: int, base: Path) -> list[subprocess.Popen[bytes]]:
    """Two workers on each of two hosts; by seed both ends are slow, or one."""
    for number, host in enumerate(net.hosts):
        if seed % 3 in (0, number + 1):
            host.cap(MBIT)
    quiet: dict[str, Any] = {"env": variables("slow link"), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    def start(host: Host, run: Path, *options: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(host.command(*command("slow link", seed, 2, run, *options)), **quiet)

    return join_over(net, base, WORKERS, start)


def caused(cause: str, seed: int) -> dict[str, Any]:
    """What is said of a run with this cause, and whether it is right."""
    drawn, began = Drawn.of(cause, seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if cause == "slow link":
            with network(2, Path(folder)) as net:
                for process in over_a_link(net, seed, Path(folder)):
                    process.wait()
        else:
            options = ["--max-restarts", "0"] * (cause in ENDS) + ["--hang-timeout", "5"] * (cause == "hung worker")
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run(command(cause, seed, WORKERS, run, *options), env=variables(cause), **quiet)  # type: ignore[call-overload]
        doctor = [sys.executable, "-m", "paceline", "doctor", str(run)]
        told = subprocess.run(doctor, capture_output=True, text=True).stdout
        lines = told.replace(f"{folder}/", "").replace(f"{Path(__file__).parent}/", "").splitlines() or ["nothing"]
        seconds = time.monotonic() - began
        right = bool(re.search(CAUSES[cause].format(drawn.hit), lines[0]))
        at = Summary(run).steps_done
    hit = "both" if cause == "slow link" else drawn.hit
    return {"hit": hit, "at": drawn.at, "right": right, "said": lines, "steps": at, "seconds": round(seconds, 1)}


def clean(seed: int) -> dict[str, Any]:
    """What is said of a run in which nothing is wrong, whenever somebody asks; silence is right."""
    kind, began, alarms = CLEAN[seed % len(CLEAN)], time.monotonic(), dict[str, float]()
    quiet: dict[str, Any] = {"env": variables("clean"), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as folder:
        run, joins = Path(folder) / "run", kind == "join"
        shares = ["--shares", "3,1,2,2"] * (kind == "shares")
        processes = [subprocess.Popen(command("clean", seed, WORKERS - joins, run, *shares), **quiet)]
        while any(process.poll() is None for process in processes):
            if joins and time.monotonic() - began > SETTLED and len(processes) == 1:
                here = command("clean", seed, 1, Path(folder) / "joins", "--join", str(run))
                processes.append(subprocess.Popen(here, **quiet))
            time.sleep(LOOKS)
            if (run / "journal.jsonl").exists():
                summary = Summary(run)
                found = verdict(summary, usual_step(summary))
                if found.kind:
                    alarms.setdefault(found.what, round(time.monotonic() - began, 1))
        events, codes = read_journal(run), [process.returncode for process in processes]
        alarms |= {f"hang of worker {e['worker']}": e["seconds"] for e in events if e["event"] == "hang"}
        at, workers = Summary(run).steps_done, len(Summary(run).up or Summary(run).hosts)
    seconds, right = round(time.monotonic() - began, 1), not alarms and not any(codes) and workers == WORKERS
    return {"kind": kind, "right": right, "alarms": alarms, "codes": codes, "steps": at, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cause", nargs="*", choices=[*CAUSES, "clean"], default=[*CAUSES, "clean"])
    parser.add_argument("--seeds", type=int, help="5, and 20 clean runs, unless said")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="runs beside each other")
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--script", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.script:
        return train(options.script, options.seeds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts go with it
    counts = {cause: options.seeds or (RUNS if cause == "clean" else 5) for cause in options.cause}
    todo = list(chain.from_iterable(zip(repeat(cause), range(count), strict=False) for cause, count in counts.items()))
    results: dict[str, list[dict[str, Any]]] = {cause: [] for cause in counts}
    with ThreadPoolExecutor(options.together) as pool:
        made = pool.map(lambda one: clean(one[1]) if one[0] == "clean" else caused(*one), todo)
        for (cause, seed), found in zip(todo, made, strict=True):
            results[cause].append(found)
            said = found["alarms"] or "silent" if cause == "clean" else found["said"][0]
            told = f"{found['kind']}, " if cause == "clean" else f"worker {found['hit']}, "
            mark = "right" if found["right"] else "WRONG"
            print(f"{mark}  {cause} {seed} ({told}{found['steps']} steps, {found['seconds']} s): {said}", flush=True)
    print()
    for cause, found in results.items():
        print(f"{cause:22} {sum(one['right'] for one in found):3} of {len(found)} right")
    if options.record:
        record(options.record, workers=WORKERS, together=options.together, results=results)
    return None


if __name__ == "__main__":
    main()
