"""Strategy: how the turns of a trainer's loop are made under its plan, as the trainer uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from paceline.data.loader import Assignment
from paceline.train.step import Step
from paceline.train.step_context import Batches, StepContext


class Strategy(Protocol):
    """Makes the turns of a trainer's loop. In `lockstep`, all workers make the same step in a turn."""

    lockstep: bool
    context: StepContext

    @property
    def advance(self) -> Callable[[Batches], Step | None]:
        """The function that makes the next turn, which is applied completely or not at all. It returns None if all
        workers stop in it.
        """

    def assignment(self) -> Assignment:
        """Returns how the micro-batches of a global batch are assigned to workers at present."""

    def shares(self, batches: int, weights: Sequence[float]) -> list[int]:
        """Returns how many micro-batches of a global batch each unit gets, by the units' weights."""

    def memory(self) -> dict[str, int]:
        """Returns the largest number of bytes that this worker holds, by category."""

    def state(self, done: int | None) -> dict[str, Any]:
        """Returns what further turns depend on; for a checkpoint `done` is the number of transactions, None for what is
        equal on all workers.
        """

    def load(self, saved: dict[str, Any], newcomer: bool) -> None:
        """Loads what `state` returned, possibly under another plan. A worker that is no newcomer keeps its own part."""

    def end_loop(self) -> None:
        """Drops what is under way at the end of a loop. Collective."""
