"""How the turns of a trainer's loop are made under a plan: the interface `Strategy`, and that of plain steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from paceline.base.batching import deal
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


class LockstepStrategy:
    """Trains in steps of all workers. `make_step` makes one; `get_state` returns what a checkpoint takes, if that is
    more than the state of the context.
    """

    lockstep = True

    def __init__(
        self,
        context: StepContext,
        make_step: Callable[[StepContext, Batches], Step | None],
        get_state: Callable[[StepContext, int | None], dict[str, Any]] | None = None,
    ) -> None:
        self.context, self._get_state = context, get_state
        self.advance: Callable[[Batches], Step | None] = partial(make_step, context)

    def assignment(self) -> Assignment:
        """Returns how the micro-batches of a global batch are assigned to workers at present."""
        return self.context.current_assignment()

    def shares(self, batches: int, weights: Sequence[float]) -> list[int]:
        """Returns how many micro-batches of a global batch each unit gets, by the units' weights."""
        return [len(part) for part in deal(batches, weights)]

    def memory(self) -> dict[str, int]:
        """Returns the largest number of bytes that this worker holds, by category."""
        return self.context.replica.memory()

    def state(self, done: int | None) -> dict[str, Any]:
        """Returns what further steps depend on; `done` as in `Strategy.state`."""
        return self.context.state() if self._get_state is None else self._get_state(self.context, done)

    def load(self, saved: dict[str, Any], newcomer: bool) -> None:
        """Loads what `state` returned, possibly under another plan."""
        self.context.load_state(saved)

    def end_loop(self) -> None:
        """Does nothing: nothing is under way between two steps."""
