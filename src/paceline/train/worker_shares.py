"""Which micro-batches this worker computes, by the present team and the measured speed of its workers."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.base.batching import Grid
from paceline.base.mesh import Mesh
from paceline.data.balance import Balance, Change
from paceline.data.loader import Assignment
from paceline.session.run import Run
from paceline.train.step import Step


class WorkerShares:
    """The shares of all workers in a trainer's global batch. The `balance` changes them where it may; None: it may not.

    `assignment` is what follows from them for this worker. It is made anew when the team or a share changes.
    """

    def __init__(self, run: Run, trainer: int, mesh: Mesh, together: int, balance: Balance | None) -> None:
        self.run, self.trainer, self.balance = run, trainer, balance
        self._mesh, self._together = mesh, together
        self.assignment = run.team.get_assignment(mesh, together)

    def equal(self) -> Assignment:
        """Returns the assignment of a team whose workers' speeds are not known: equal shares."""
        return self.run.team.get_assignment(self._mesh, self._together)

    def renew(self) -> None:
        """Makes the assignment anew."""
        self.assignment = assignment = self.equal()
        if self.balance is not None and len(assignment.weights) > 1:
            fine = self.balance.fine
            self.assignment = dataclasses.replace(assignment, weights=self.balance.weights, fine=fine)

    def reform(self, workers: tuple[int, ...], state: Any, step: int) -> None:
        """Takes over the shares of a new team from what its first worker knows."""
        if self.balance is not None and (change := self.balance.reform(workers, state)):
            self._write(self.balance, change, step)
        self.renew()

    def divide(self, tested: bool, strict: bool) -> None:
        """Applies what the workers agreed on: micro-batches may be divided (`tested`), or must not be (`strict`)."""
        if self.balance is not None:
            self.balance.divide(tested, strict)
            self.renew()

    def set_grid(self, grid: Grid) -> None:
        """Sets the grid of global batches."""
        if self.balance is not None:
            self.balance.grid = grid

    def observe(self, step: Step) -> None:
        """Updates the shares from the workers' seconds in a step.

        Only in the generation in which the step was computed: its members know the same, and the members of the next
        one exchange what they know.
        """
        balance, agreed = self.balance, step.agreed
        if balance is None or step.generation != self.run.team.transactions.number:
            return
        if len(agreed.seconds) == 1 and not (agreed.tested or agreed.no_merge or agreed.no_split):
            return
        before = balance.weights, balance.fine
        balance.divide(tested=agreed.tested > 0, strict=agreed.no_merge + agreed.no_split > 0)
        if step.batch.full and (change := balance.learn(agreed.seconds)):
            self._write(balance, change, step.done)
        if balance.news:
            for what, why in balance.news:
                self.run.reporter.decide(self.trainer, what, why)
            balance.news.clear()
        for what, why in balance.settled():
            self.run.reporter.say(f"{what}: {why}")
        if (balance.weights, balance.fine) != before:
            self.renew()

    def _write(self, balance: Balance, change: Change, step: int) -> None:
        about = {"trainer": self.trainer, "step": step, "workers": balance.workers}
        self.run.reporter.journal.write("shares", **about, **dataclasses.asdict(change))
