"""Loops within loops, side by side and one after another, of three trainers. Usage: nested.py OUT

KILL_AT=N kills the whole run at the Nth of its moments, which are in every body; STOP_AT=N asks it to stop, as the
agent does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from cases import cross_entropy, mlp, rows
from public import sgd
from safetensors.torch import save_file
from torch import nn

import paceline

KILL_AT, STOP_AT = (int(os.environ.get(name, "0")) for name in ("KILL_AT", "STOP_AT"))
moments = 0


def moment() -> None:
    global moments
    moments += 1
    if moments == KILL_AT and paceline.join().rank == paceline.join().size - 1:
        Path("killed").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    if moments == STOP_AT:
        os.kill(os.getpid(), signal.SIGUSR2)


def trainer(seed: int) -> paceline.Trainer:
    return paceline.Trainer(lambda: nn.Sequential(mlp(), nn.Dropout(0.1)), cross_entropy, sgd, 16, seed=seed)


def note(what: str, report: Any) -> None:
    """In the order in which it happened, in the state of another trainer than the one whose loop runs."""
    two.state["log"] = [*two.state.get("log", []), f"{what} {report.step}"]
    moment()


one, two, three = trainer(1), trainer(2), trainer(3)
x, y = rows(4, 12, 10).tensors
share = slice(
    12 * paceline.join().rank // paceline.join().size, 12 * (paceline.join().rank + 1) // paceline.join().size
)
for outer in one.steps(rows(1, 45, 10), count=4):
    note("outer", outer)
    for inner in two.steps(rows(2, 40, 10), count=2):
        note("inner", inner)
        for innermost in three.steps(rows(3, 40, 10), count=1):
            note("innermost", innermost)
    for inner in two.steps(rows(2, 40, 10), epochs=1):
        note("second inner", inner)
    note("single", three.step((x[share], y[share])))
for report in two.steps(rows(2, 40, 10), count=3):
    note("after", report)
for pair in zip(one.steps(rows(1, 40, 10), count=4), three.steps(rows(3, 40, 10), count=4), strict=False):
    note("pair", pair[0])
    for inner in two.steps(rows(2, 40, 10), count=1):
        note("in the pair", inner)
    note("pair", pair[1])
while one.steps_done < 12:
    note("turn", one.step((x[share], y[share])))
    note("turn", two.step((x[share], y[share])))
for report in three.steps(rows(3, 40, 10), count=2):
    note("last", report)
for report in two.steps(rows(2, 40, 10), count=2):
    note("the very last", report)
if one.main:
    tensors = {f"{n}/{k}": v for n, t in enumerate((one, two, three)) for k, v in t.model.state_dict().items()}
    save_file(tensors, f"{sys.argv[1]}.safetensors")
    Path(f"{sys.argv[1]}.json").write_text(json.dumps({"log": two.state["log"], "moments": moments}))
