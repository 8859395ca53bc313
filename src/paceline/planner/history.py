"""The planner's memory: what was predicted and what was measured on this machine, one JSON object per line.

Later predictions are corrected by it: a plan that took longer than predicted is predicted to take longer, for the same
model; and so are plans of a kind (those with the same words of layout) for other models.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import median

import msgspec

from paceline.base.schema import read_file
from paceline.plan import Plan
from paceline.planner.candidates import layout_of
from paceline.planner.descriptions import Amount, Count, ModelDescription

HISTORY = "predictions.jsonl"  # in the folder of caches
LAST = 200  # entries that are read, the newest ones
ENOUGH = 3  # entries of a kind of plan from which a correction follows
SHOWN = 12  # predictions whose error is shown


class Prediction(msgspec.Struct, frozen=True):
    """A prediction of a step's seconds, memory and bytes, and what was measured."""

    plan: str
    workers: Count
    uncorrected: Amount  # the prediction without this history
    predicted: Amount
    measured: Amount
    model: str = ""
    parameters: Count = 0  # of the model
    at: Amount = 0.0  # seconds since 1970
    memory: Amount = 0.0  # bytes of a worker's process, as predicted; 0: not known, as for the following
    peak: Amount = 0.0  # the same as measured
    sends: Amount = 0.0  # bytes that worker 0 sends in a step, as predicted
    sent: Amount = 0.0  # the same as measured


class History:
    """The predictions in a file. Lines that are damaged are left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: list[Prediction] = []
        try:
            lines = read_file(path).splitlines()[-LAST:]
        except OSError:
            return
        for line in lines:
            try:
                self._entries.append(msgspec.json.decode(line, type=Prediction))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue

    def correction(self, plan: Plan, model: ModelDescription) -> float:
        """Returns by how much this plan of this model took longer than predicted: the median ratio. If it was never
        measured: that of plans of its kind, or 1 if too few are known.
        """
        known = [one for one in self._entries if one.uncorrected]
        same = str(plan), model.name, model.parameters
        ratios = [one.measured / one.uncorrected for one in known if (one.plan, one.model, one.parameters) == same]
        if not ratios:
            kind = _kind(plan)
            ratios = [one.measured / one.uncorrected for one in known if _kind_of(one.plan) == kind]
            ratios = ratios if len(ratios) >= ENOUGH else []
        return median(ratios) if ratios else 1.0

    def add(self, entry: Prediction) -> None:
        """Adds a prediction. Nothing is written if the file cannot be."""
        self._entries.append(entry)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(msgspec.to_builtins(entry)) + "\n")
        except OSError:  # for example a home that is read-only
            return

    def error(self) -> tuple[int, float] | None:
        """Returns the number of the newest predictions, and their median relative error; None without any."""
        newest = [one for one in self._entries if one.measured][-SHOWN:]
        errors = [abs(one.predicted / one.measured - 1) for one in newest]
        return (len(errors), median(errors)) if errors else None


@cache
def _kind_of(words: str) -> tuple[str, ...]:
    """Returns the kind of a plan of the history, which is asked for with each plan that is predicted."""
    return _kind(Plan.parse(words))


def _kind(plan: Plan) -> tuple[str, ...]:
    """Returns the names of the words of layout that a plan has more than one part of, and the kind of sharding."""
    names = [name for name in layout_of(plan) if name != "data" and getattr(plan, name) != 1]
    return (*sorted(names), f"zero={plan.zero}", f"recompute={plan.recompute}")
