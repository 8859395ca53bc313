"""`paceline chaos`: kills workers on purpose and shows that nothing was lost.

It injects faults into a short run, compares it with an undisturbed run, and prints the differences and the cost.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.console import say
from paceline.base.journal import effective_steps, read_journal
from paceline.base.text import duration, plural
from paceline.errors import UsageError
from paceline.launch.check import LIMIT, Case, apart, rehearse
from paceline.launch.fork_server import WarmProcessHolder
from paceline.launch.options import LaunchOptions
from paceline.plan import Plan
from paceline.team.fault_injection import APART, FLIP, LASTING, Fault, parse_faults, read_log

# Faults are drawn from these. A team survives all of them one after another, as long as one worker is left.
KINDS = ("kill", "kill", "kill", "stop", "raise", "exit", "partition", "loss", "slow-memory", "slow-disk", "clock")
SHOWN = {  # what is shown of faults that no worker is lost by
    "loss": "one in three operations was delayed for two seconds, first",
    "slow-memory": "memory was slow for two seconds",
    "slow-disk": "the disk was slow for two seconds",
    "clock": "the clock was an hour ahead for two seconds",
}
MOMENTS = ("loading", "forward", "backward", "reduced")
FIRST = 2  # steps before the first fault


def chaos(options: LaunchOptions, steps: int, losses: int, seed: int, faults: str) -> int:
    """Trains twice, without and with faults, and prints each fault and how far the weights are apart.

    Returns 0 if nothing was lost. UsageError: no worker would be left to continue, or a fault cannot be parsed.
    """
    workers, plan = options.workers, options.plan
    if workers < 2:
        raise UsageError("with one worker, no other worker can continue after a loss", "use --workers 2 or more")
    schedule = parse_faults(faults) if faults else draw(workers, steps, losses, seed)
    if outside := [str(fault) for fault in schedule if fault.worker >= workers]:
        raise UsageError(f"{', '.join(outside)}: the workers are 0 to {workers - 1}", "name one of them")
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as folder, WarmProcessHolder() as warm_holder:
        options = replace(options, max_restarts=2 * len(schedule), warm_holder=warm_holder)
        say(f"{plural(steps, 'step')} without faults ...")
        calm = Case.run(Path(folder, "calm"), options, steps)
        say(f"{plural(steps, 'step')} with {', '.join(map(str, schedule))} ...")
        text = ("" if faults else APART) + ",".join(map(str, schedule))
        wild_folder, request = Path(folder, "wild"), {"steps": steps, "reverse": False}
        code, answer = rehearse(wild_folder, options, request, PACELINE_CHAOS=text)
        wild = Case(wild_folder / "run", **answer) if answer else None
        exact = plan is not None and Plan.parse(plan).exact
        return _verdict(calm, wild, wild_folder / "run", schedule, steps, exact, code)


def draw(workers: int, steps: int, losses: int, seed: int) -> list[Fault]:
    """Draws faults, spread over the steps and the workers. The same seed gives the same faults."""
    chance = random.Random(seed)
    order = chance.sample(range(workers), workers)
    drawn_faults = []
    for number in range(losses):
        at = FIRST + (steps - 2 * FIRST) * number // losses
        drawn_faults.append(Fault(chance.choice(KINDS), order[number % workers], max(at, 0), chance.choice(MOMENTS)))
    return drawn_faults


def _verdict(
    calm: Case, wild: Case | None, folder: Path, schedule: Sequence[Fault], steps: int, exact: bool, code: int
) -> int:
    """Prints the verdict on the run in `folder`, which ended with exit code `code`; `wild` is None if the run left no
    weights. Returns 0 if nothing was lost, and otherwise 1.
    """
    tell, events = partial(say, out=sys.stdout), read_journal(folder)
    fired = {str(entry["fault"]): entry for entry in read_log(folder)}
    tell(f"\n{'fault':24} {'detected after':>14} {'team formed after':>18} {'back after':>11}")
    for fault in schedule:
        tell(_row(fault, fired.get(str(fault)), events))
    # Not the sum of the records in the journal: records that worker 0 had not written yet are lost with it.
    counted = wild.steps if wild is not None else max((e["step"] for e in effective_steps(events)), default=0)
    took = [duration(_seconds(one)) for one in (folder, calm.folder)]
    tell(f"time     {took[0]} for {plural(steps, 'step')}, {took[1]} without faults")
    tell(
        f"steps    {plural(counted, 'step')} counted, each exactly once"
        if counted == steps
        else f"steps    {counted} of {steps} counted"
    )
    limit = 0.0 if exact else LIMIT.get(calm.dtype, 1e-2)
    distance = math.inf if wild is None else apart(calm.weights(), wild.weights())
    if wild is not None:
        more = "" if exact else "; 0 with `exact` in the plan"
        tell(f"weights  {distance:.1e} apart, relative to their norm{more}")
    lost = _lost(code, wild is not None, counted == steps and distance <= limit)
    tell(f"lost     {lost or 'nothing'}")
    return 1 if lost else 0


def _lost(code: int, has_weights: bool, same: bool) -> str:
    """What was lost, in words; empty if nothing was."""
    if not has_weights:
        return f"the run: it ended before its last step, with exit code {code}"
    if not same:
        return "the runs differ: use `paceline check` to find out whether the script is the cause"
    return f"no step, but the run ended with exit code {code}: see above" if code else ""


def _row(fault: Fault, entry: dict[str, Any] | None, events: Sequence[dict[str, Any]]) -> str:
    if entry is None and fault.kind.startswith(FLIP):
        return f"{fault!s:24} did not happen: this worker computed or sent nothing of the kind"
    if entry is None:
        return f"{fault!s:24} did not happen: the run ended before this worker and at least one other had joined"
    if fault.kind.startswith(FLIP):
        seen = next((e for e in events if e["event"] in ("corrupted", "healed") and fault.worker in e["workers"]), None)
        what = f"bit {entry['bit']} of element {entry['element']} of {entry['tensor']}"
        return f"{fault!s:24} {'noticed' if seen else 'not noticed'}: {what}"

    if fault.kind in LASTING:
        return f"{fault!s:24} happened: {' '.join(filter(None, [SHOWN[fault.kind], entry.get('operation')]))}"

    def after(kind: str, is_member: bool | None = None) -> str:
        later = (e for e in events if e["event"] == kind and e["at"] >= entry["at"])
        fits = (e for e in later if is_member is None or (fault.worker in e["workers"]) == is_member)
        first_event = next(fits, None)
        return "-" if first_event is None else duration(first_event["at"] - entry["at"])

    if fault.kind == "partition":  # no worker is lost, and the same team forms again
        return f"{fault!s:24} {'-':>14} {after('formed', True):>18} {'-':>11}"
    return f"{fault!s:24} {after('lost', True):>14} {after('formed', False):>18} {after('formed', True):>11}"


def _seconds(folder: Path) -> float:
    """The seconds from the first step's record to the last one's."""
    at = [event["at"] for event in effective_steps(read_journal(folder))]
    return float(at[-1] - at[0]) if at else 0.0
