"""What the loggers that come with Paceline have in common, and what a logger learns about its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FACTS = "paceline."  # how names of the config begin that Paceline itself sets
_ENDS_WELL = {"start": False, "failed": False, "finished": True, "stopped": True}  # by event of the journal


@dataclass(frozen=True)
class LoggedRun:
    """What a logger learns about the run before anything else.

    - `folder`: the run folder; `name`: its name; `script`: the name of the script.
    - `id`: what the logger's `begin` has returned earlier in this run; None at first.
    """

    folder: Path
    name: str
    script: str
    id: str | None


class Tracker:
    """A logger that is fed in a thread of its own, and cannot replace what it has logged.

    `target` is what follows the colon of its name; with `upload` it gets a copy of the best checkpoint, if it `uploads`
    any; `at` is the Unix time of what it is fed next; `has_succeeded` says whether the run has ended well so far;
    `notice` is a line for the user after `begin`. Its methods may raise any exception: if `OSError` is among its
    causes, the same is handed over again later.
    """

    background = appends = takes_facts = uploads = True
    upload = False
    notice = ""
    at = 0.0
    has_succeeded = False

    def __init__(self, target: str | None) -> None:
        self.target = target

    def begin(self, run: LoggedRun) -> str | None:
        """Begins or continues the logger's run; returns what identifies it. Called again after a failure."""
        raise NotImplementedError

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Takes the values of a step."""
        raise NotImplementedError

    def event(self, event: Mapping[str, Any]) -> None:
        """Notes from an event of the journal whether the run has ended well."""
        self.has_succeeded = _ENDS_WELL.get(event["event"], self.has_succeeded)


def split_texts(values: Mapping[str, float | str]) -> tuple[dict[str, float], dict[str, str]]:
    """Divides values into numbers and texts."""
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    return {name: float(value) for name, value in values.items() if not isinstance(value, str)}, texts


def prefix_of(name: str) -> str:
    """``trainer 1/`` of a name that a further trainer has logged, else an empty text."""
    trainer, slash, _ = name.partition("/")
    return trainer + slash if slash and trainer.startswith("trainer ") and trainer[8:].isdecimal() else ""
