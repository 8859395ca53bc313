"""Trains through faults, each of which comes in a complete team. Usage: recovery.py MODEL STEPS WORKERS

The faults are those of PACELINE_CHAOS. Their step is the number of their group: the faults of a group fire in a
complete team, those `forming` or in a `hand-over` in what the first one of the group leads to. `wait` kills the
coordinator. A `hand-over` fault of worker 0 is of whichever worker gives its state to the last one, and a `writing`
fault of whichever writes a checkpoint. The body of the loop waits for workers that come back, until all faults have
fired.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.team.fault_injection import GO, Fault, FaultInjector, parse_faults, read_log

SERVERS = 1_000_000  # the number of the first parameter server
kind, steps, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
faults = parse_faults(os.environ.get("PACELINE_CHAOS", ""))
SAVES = any(fault.moment in ("saving", "writing") for fault in faults)
run_folder = Path(os.environ["PACELINE_RUN_DIR"])
fire = FaultInjector._fire


def may_fire(injector: FaultInjector, fault: Fault, step: int, members: int) -> bool:
    fired = {entry["fault"]: float(entry["at"]) for entry in read_log(run_folder)}
    for other in (one for one in faults if one.step < fault.step):
        survived = time.time() if other.kind == "wait" else injector._formed
        if fired.get(str(other), float("inf")) > survived:
            return False
    begun = any(str(other) in fired for other in faults if other.step == fault.step)
    waits = fault.moment in ("forming", "hand-over")
    is_complete = members == workers and (kind == "rows" or step > first_steps[injector._formed])
    return begun or (not waits and (is_complete or fault.worker >= SERVERS))


first_steps: dict[float, int] = {}  # of each generation; after it all of its newcomers have the state


def reached(injector: FaultInjector, moment: str, step: int, members: int) -> None:
    own = injector._due
    first_steps.setdefault(injector._formed, step)
    if moment == "writing" or (moment == "hand-over" and os.environ["PACELINE_RANK"] != str(workers - 1)):
        own = [fault for fault in due() if fault.worker == 0]
    for fault in own:
        if fault.moment == moment and may_fire(injector, fault, step, members) and is_first(fault):
            own.remove(fault)
            if fault.kind == "wait":
                (run_folder / GO).touch()
                kill_coordinator()
            fire(injector, fault, step)
            return


def is_first(fault: Fault) -> bool:
    """Whether this process is to be hit: of several that write parts of one checkpoint at a time, one is."""
    if fault.moment != "writing":
        return True
    with suppress(FileExistsError):
        (run_folder / f"hit-{fault}").touch(exist_ok=False)
        return True
    return False


def kill_coordinator() -> None:
    """Kills it as soon as there is one: another one may have been killed just before."""
    import psutil

    end = time.monotonic() + 20.0
    while time.monotonic() < end:
        for child in psutil.Process(os.getppid()).children():
            with suppress(psutil.Error):  # one that has just ended
                if "paceline.team.coordinator_server" in child.cmdline():
                    child.send_signal(signal.SIGKILL)
                    return
        time.sleep(0.02)
    raise SystemExit("there is no coordinator")


def due() -> list[Fault]:
    """The faults that have not fired."""
    fired = {entry["fault"] for entry in read_log(run_folder)}
    return [fault for fault in faults if str(fault) not in fired]


def wait_for_team() -> None:
    """Until newcomers can be admitted, if workers are missing that later faults need."""
    end, team = time.monotonic() + 10.0, paceline.join()
    if due():
        while team.size < workers and not team.transactions.newcomers and time.monotonic() < end:
            time.sleep(0.01)


chance = torch.Generator().manual_seed(1)
x = torch.randn(24, 8, generator=chance, dtype=torch.float64)
data = TensorDataset(x, torch.randint(0, 3, (24,), generator=chance))


def model() -> nn.Module:
    if kind == "attention":
        # No bias, or the keys' would do nothing but what Adam makes of rounding.
        blocks = [nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True, bias=False) for _ in range(2)]
        parts = [nn.Linear(8, 32), nn.Unflatten(1, (4, 8)), *blocks, nn.Flatten(), nn.Linear(32, 3)]
    else:
        # No bias before a BatchNorm: its gradient is zero in theory, rounding in practice, and Adam makes much of that.
        parts = [nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)]
    return nn.Sequential(*parts).double()


def right(output: torch.Tensor, batch: Any) -> Any:
    return {"right": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}


def count_rows(output: torch.Tensor, batch: Any) -> Any:
    time.sleep(0.004)
    return output.sum(), len(output)


FaultInjector.reached = reached  # type: ignore[method-assign]
if kind == "rows":
    from counted import BATCH, ROWS, Counter  # imports what only servers need

    optimizer: Any = lambda params: torch.optim.SGD(params, float(BATCH))
    trainer = paceline.Trainer(Counter(), count_rows, optimizer, global_batch=BATCH)
    data = TensorDataset(torch.arange(ROWS))
else:
    trainer = paceline.Trainer(
        model,
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3),
        schedule=lambda step: 1 / (1 + step / 50),
        global_batch=8,
        clip_norm=1.0,
    )
trainer.state["seen"], trainer.state["evaluations"] = 0, []
for report in trainer.steps(data, count=steps):
    trainer.state["seen"] += report.samples
    if kind != "rows" and report.step % 10 == 0:
        trainer.state["evaluations"].append([report.step, trainer.evaluate(data, right)["right"]])
    if report.step == 2 or (report.step % 3 == 0 and SAVES):
        trainer.save()
    wait_for_team()
trainer.export("out.safetensors")
if trainer.main:
    Path("out.json").write_text(json.dumps({name: trainer.state[name] for name in ("seen", "evaluations")}))
