"""`paceline chaos`: a rehearsal. Workers are lost on purpose; then it shows what was lost with them, and the cost."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.console import say
from paceline.errors import UsageError
from paceline.launch.check import LIMIT, Case, apart
from paceline.launch.options import LaunchOptions
from paceline.launch.warm import Kept
from paceline.observe.figures import duration, plural
from paceline.observe.journal import effective_steps, read_journal
from paceline.plan import Plan
from paceline.team.chaos import Fault, parse_faults, read_log

KINDS = ("kill", "kill", "kill", "stop", "raise", "exit")  # one of them is drawn
MOMENTS = ("loading", "forward", "backward", "reduced")
FIRST = 2  # steps before the first loss


def chaos(options: LaunchOptions, steps: int, losses: int, seed: int, faults: str) -> int:
    """Trains twice, undisturbed and with losses, and prints each loss and how far the weights are apart.

    Returns 0 if nothing was lost. UsageError: nobody would be left to go on, or a fault cannot be read.
    """
    workers, plan = options.workers, options.plan
    if workers < 2:
        raise UsageError("a lone worker has nobody to go on without it", "give --workers 2 or more")
    schedule = parse_faults(faults) if faults else draw(workers, steps, losses, seed)
    if outside := [str(fault) for fault in schedule if fault.worker >= workers]:
        raise UsageError(f"there is no such worker: {', '.join(outside)}", f"name workers 0 to {workers - 1}")
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as folder, Kept() as kept:
        options = replace(options, max_restarts=2 * len(schedule), kept=kept)
        say(f"{plural(steps, 'step')} undisturbed ...")
        calm = Case.run(Path(folder, "calm"), options, steps)
        say(f"{plural(steps, 'step')} with {', '.join(map(str, schedule))} ...")
        wild = Case.run(Path(folder, "wild"), options, steps, PACELINE_CHAOS=",".join(map(str, schedule)))
        return _verdict(calm, wild, schedule, steps, exact=plan is not None and Plan.parse(plan).exact)


def draw(workers: int, steps: int, losses: int, seed: int) -> list[Fault]:
    """Losses spread over the steps, of one worker after another; the same for the same seed."""
    chance = random.Random(seed)
    order = chance.sample(range(workers), workers)
    found = []
    for number in range(losses):
        at = FIRST + (steps - 2 * FIRST) * number // losses
        found.append(Fault(chance.choice(KINDS), order[number % workers], max(at, 0), chance.choice(MOMENTS)))
    return found


def _verdict(calm: Case, wild: Case, schedule: Sequence[Fault], steps: int, exact: bool) -> int:
    tell, events = partial(say, out=sys.stdout), read_journal(wild.folder)
    fired = {str(entry["fault"]): entry for entry in read_log(wild.folder)}
    tell(f"\n{'loss':24} {'noticed after':>14} {'team formed after':>18} {'back after':>11}")
    for fault in schedule:
        tell(_row(fault, fired.get(str(fault)), events))
    counted = sum(event["steps"] for event in effective_steps(events))
    distance = apart(calm.weights(), wild.weights())
    same = counted == steps and distance <= (0.0 if exact else LIMIT.get(calm.dtype, 1e-2))
    tell(f"time     {duration(_seconds(wild))} for {plural(steps, 'step')}, undisturbed {duration(_seconds(calm))}")
    tell(
        f"steps    {plural(counted, 'step')} counted, each once" if counted == steps else f"steps    {counted} counted"
    )
    tell(f"weights  {distance:.1e} apart, relative to their norm" + ("" if exact else "; with `exact` it would be 0"))
    tell(
        "lost     nothing"
        if same
        else "lost     NOT nothing: run `paceline check` to see whether the script is to blame"
    )
    return 0 if same else 1


def _row(fault: Fault, entry: dict[str, Any] | None, events: Sequence[dict[str, Any]]) -> str:
    if entry is None:
        return f"{fault!s:24} did not happen: the worker was not there any more"

    def after(kind: str, there: bool | None = None) -> str:
        later = (e for e in events if e["event"] == kind and e["at"] >= entry["at"])
        fits = (e for e in later if there is None or (fault.worker in e["workers"]) == there)
        found = next(fits, None)
        return "-" if found is None else duration(found["at"] - entry["at"])

    return f"{fault!s:24} {after('lost', True):>14} {after('formed', False):>18} {after('formed', True):>11}"


def _seconds(case: Case) -> float:
    """From the first step's record to the last one's."""
    at = [event["at"] for event in effective_steps(read_journal(case.folder))]
    return float(at[-1] - at[0])
