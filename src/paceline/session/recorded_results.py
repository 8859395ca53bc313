"""The results of collectives outside of loops, which a resumed script gets again instead of computing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.comm.torch_private import pytree
from paceline.session.script_position import ScriptPosition
from paceline.team.transactions import Transactions


class RecordedResults:
    """The results of this run's collectives outside of loops, in the order of the script (`values`).

    Checkpoints keep them. A script that replays gets them one after another until its first step; a finished run that
    runs through the end of its script records nothing. `calls` counts the collectives without a result that the team
    has made outside of loops, such as `export()`: checkpoints do not keep it, so a resumed team makes them again.
    """

    def __init__(self, transactions: Transactions, script: ScriptPosition) -> None:
        self._transactions, self._script = transactions, script
        self.values: list[Any] = []
        self.calls = 0
        self._next = 0  # the result that a script which replays gets next
        self._passed = 0  # calls that this worker's script has reached

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Takes the results of a checkpoint's state `tree`."""
        self.values = pytree.tree_map_only(torch.Tensor, torch.clone, list(tree.get("results", ())))

    @property
    def _outside(self) -> bool:
        """Whether the script is outside of all training."""
        return not self._script.loops and not self._script.uses_step

    @property
    def has_next(self) -> bool:
        """Whether the next collective has a recorded result."""
        return self._script.replays and self._outside and self._next < len(self.values)

    def take(self) -> list[Any]:
        """Returns a list with the recorded result of the next collective, or an empty list."""
        if not self.has_next:
            return []
        self._next += 1
        return [self.values[self._next - 1]]

    def record(self, result: Any) -> None:
        """Records the result of a collective for runs that resume."""
        if not self._script.replays and self._outside:
            self.values.append(result)

    def run(
        self,
        settle: Callable[[], Any],
        apply: Callable[[Any], Any] | None = None,
        spends: str = "script",
        take: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Returns the result of a collective, or the recorded one. For the arguments see `Transactions.run`."""
        result = (self.take() or [self._transactions.run(settle, apply, spends, take)])[0]
        self.record(result)
        return result

    def call(self, operation: Callable[[], None]) -> None:
        """Makes a collective without a result, unless the team made it before this worker joined."""
        if self._outside and self._script.replays and self._passed < self.calls:
            self._passed += 1
            return
        operation()
        if self._outside:
            self.calls += 1
            self._passed = self.calls
