"""The planner's memory: what was predicted and what was measured on this machine, one JSON object per line.

Later predictions are corrected by it: a plan that took longer than predicted is predicted to take longer, for the same
model; and so are plans that have something in common with it, also for other models.
"""

from __future__ import annotations

import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median

import msgspec

from paceline.base.environment import cache_folder, processor
from paceline.base.schema import read_file
from paceline.errors import PlanError
from paceline.plan import Plan
from paceline.planner.corrections import OF_OTHERS, Corrections, Traits, traits_of
from paceline.planner.descriptions import Amount, Count, ModelDescription

HISTORY = "predictions.jsonl"  # in the folder of caches
LAST = 200  # entries that are read, the newest ones
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
    machine: str = ""  # the kind of machine and its software, as `history_of` names them


def history_of(device: str) -> History:
    """The history of this user's predictions for this kind of machine, with devices of this name, and this torch."""
    kind = device if device != "cpu" else processor()
    return History(cache_folder() / HISTORY, f"{kind}, torch {version('torch')}")


class History:
    """The predictions in a file, for one kind of `machine`. Lines that are damaged are left out."""

    def __init__(self, path: Path, machine: str = "") -> None:
        self._path, self._machine = path, machine
        self._entries: list[Prediction] = []
        self._corrections: Corrections | None = None
        try:
            lines = read_file(path).splitlines()[-LAST:]
        except OSError:
            return
        for line in lines:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                entry = msgspec.json.decode(line, type=Prediction)
                if entry.machine == machine:
                    self._entries.append(entry)

    def correction(self, plan: Plan, model: ModelDescription, workers: int) -> float:
        """Returns by how much this plan of this model took longer than predicted: the median ratio. If it was never
        measured: what follows from plans that have something in common with it.
        """
        known = [one for one in self._entries if one.uncorrected and one.measured]
        same = str(plan), model.name, model.parameters
        ratios = [one.measured / one.uncorrected for one in known if (one.plan, one.model, one.parameters) == same]
        if ratios:
            return median(ratios)
        if self._corrections is None:
            trials = [(_traits_of(one.plan, one.workers), one.measured / one.uncorrected) for one in known]
            self._corrections = Corrections(trials, OF_OTHERS)
        return self._corrections.factor(traits_of(plan, workers))

    def add(self, entry: Prediction) -> None:
        """Adds a prediction. Nothing is written if the file cannot be."""
        entry = msgspec.structs.replace(entry, machine=self._machine)
        self._entries.append(entry)
        self._corrections = None
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


def _traits_of(words: str, workers: int) -> Traits:
    try:
        return traits_of(Plan.parse(words).validate(workers), workers)
    except PlanError:  # of another version
        return frozenset()
