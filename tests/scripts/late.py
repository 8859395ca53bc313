"""Trains in islands, of which one is late, and writes weights, figures and what each worker saw: late.py FOLDER PLAN

LATE=WORKER:STEPS:FROM:UNTIL: in each round that begins from step FROM on and before UNTIL that worker, when it has made
so many steps of it, waits in its loss until it has heard who is merged. END=WORKER:STEP:STEPS: that
worker is killed, once, when it has made so many steps of the round that begins at step STEP. BAD=WORKER:STEP: there its
loss is not finite. AFTER=WORKER:STEP: that worker is killed, once, when the merge of that round has been decided, for
which the one that is late waits, too. HOLD=WORKER:STEP: it waits there until
it is told to stop. SLEEP=WORKER:MILLISECONDS: so long it takes for each call of its loss.
JOIN=STEP: all wait there until a newcomer is about to be admitted. COMES=STEPS: trains for so many steps,
slowly until a newcomer is about to be admitted, and in the second half very slowly.
STOP=STEP: there training is stopped. ROWS=iter: the dataset is an iterable.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from islands import CASES, DATA, STEPS, trainer_of
from islands import loss as usual
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import IterableDataset

import paceline
from paceline.session.run import Run

FOLDER = Path(sys.argv[1])
WORKER = int(os.environ.get("PACELINE_RANK", "0"))
MADE = Counter[int]()  # inner steps here, by the step that the round began at
TRAINERS: list[paceline.Trainer] = []
ROWS = {float(x[0]): number for number, (x, _, _) in enumerate(DATA)}
seen: dict[int, set[int]] = {}


def _given(name: str) -> list[int]:
    """Numbers of a variable that begins with this worker's; none where it does not."""
    worker, *numbers = map(int, os.environ.get(name, "-1").split(":"))
    return numbers if worker == WORKER else []


AFTER = [int(number) for number in os.environ.get("AFTER", "").split(":") if number]


def _ends_after() -> None:
    wait_for(lambda: journaled("merge", step=AFTER[1]))
    _end()


def _end() -> None:
    if not (FOLDER / "killed").exists():
        (FOLDER / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def journaled(event: str, **fields: Any) -> bool:
    """Whether the journal has such an event."""
    lines = (FOLDER / os.environ.get("RUN", "run") / "journal.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if f'"{event}"' in line and line.endswith("}")]
    return any(one["event"] == event and fields.items() <= one.items() for one in events)


def loss(output: torch.Tensor, batch: Any) -> Any:
    begun = TRAINERS[0].steps_done
    if not torch.is_grad_enabled():
        return usual(output, batch)
    seen.setdefault(begun, set()).update(ROWS[float(x[0])] for x in batch[0])
    (FOLDER / f"seen-{WORKER}-{os.getpid()}.json").write_text(json.dumps({k: sorted(v) for k, v in seen.items()}))
    if (late := _given("LATE")) and MADE[begun] == late[0] and late[1] <= begun < late[2]:
        team = Run.current().team.transactions
        wait_for(lambda: team.merge is not None or team.interrupted)
        wait_for(lambda: not AFTER or begun < AFTER[1] or (FOLDER / "killed").exists())
    if _given("HOLD") == [begun] and MADE[begun] == 1 and not (FOLDER / "held").exists():
        (FOLDER / "holds").touch()
        wait_for(lambda: Run.current().notices.stop_signal is not None)
        (FOLDER / "held").touch()
    time.sleep(sum(_given("SLEEP")) / 1000)
    if _given("END") == [begun, MADE[begun]]:
        _end()
    total, count, more = usual(output, batch)
    return total * math.nan if _given("BAD") == [begun] else total, count, more


def _made(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if isinstance(optimizer, torch.optim.AdamW):
        MADE[TRAINERS[0].steps_done] += 1


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (DATA[number] for number in range(len(DATA)))


def main() -> None:
    digests = {}
    register_optimizer_step_post_hook(_made)
    if AFTER[:1] == [WORKER]:
        threading.Thread(target=_ends_after, daemon=True).start()
    trainer = trainer_of(CASES["adamw"], loss, sys.argv[2])
    TRAINERS.append(trainer)
    trainer.state["best"], trainer.state["figures"] = math.inf, []
    comes = int(os.environ.get("COMES", "0"))
    for report in trainer.steps(Stream() if os.environ.get("ROWS") == "iter" else DATA, count=comes or STEPS):
        if comes and not journaled("generation", planned=True):  # a newcomer gets the state between two steps
            time.sleep(0.2 if report.step < comes // 2 else 3.0)
        found = hashlib.sha256()
        whole = "zero=3" not in sys.argv[2] and "tensor" not in sys.argv[2]
        for value in trainer.model.state_dict().values() if whole else ():
            found.update(value.numpy().tobytes())
        digests[report.step] = found.hexdigest()
        (FOLDER / f"digests-{WORKER}-{os.getpid()}.json").write_text(json.dumps(digests))
        trainer.state["figures"].append(
            {key: getattr(report, key) for key in ("step", "loss", "samples", "turn", "lr")}
        )
        if report.loss < trainer.state["best"]:
            trainer.state["best"] = report.loss
            trainer.save()
        if os.environ.get("STOP") == str(report.step):
            trainer.stop()
        if os.environ.get("JOIN") == str(report.step):
            wait_for(lambda: journaled("generation", planned=True))
    trainer.export(FOLDER / "weights.safetensors")
    if trainer.main:
        (FOLDER / "told.json").write_text(json.dumps(trainer.state["figures"]))


if __name__ == "__main__":
    main()
