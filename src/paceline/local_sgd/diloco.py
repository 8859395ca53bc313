"""DiLoCo: islands take inner steps by themselves, and one outer step merges them at the end of each round.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023. A round is:

1. All islands begin at the anchor, which is the weights of the last outer step.
2. Each island takes H inner steps with its own part of each global batch and its own inner optimizer.
3. The outer gradient is the anchor less the mean of the islands, weighted by the rows or tokens that each has counted.
4. The outer optimizer, SGD with Nesterov momentum, moves the anchor.

The loop over inner steps is in `round.py`, which calls the methods below in their order.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from paceline.base.mesh import Mesh
from paceline.comm.communicator import Group
from paceline.local_sgd.island_migration import copy_sole_states
from paceline.local_sgd.island_state import Islands
from paceline.local_sgd.merging import OUTER, IslandSums, merge_buffers, outer_optimizer, sum_islands
from paceline.plan import Plan
from paceline.train.replica import Replica


class DiLoCo:
    """Merges the islands of a plan by outer steps, with all parameters at once at the end of a round."""

    streams = False  # whether fragments are merged within a round
    repeats_rounds = False  # whether all islands repeat a round in which a worker was lost
    description = ""  # of how islands are merged, for users

    def __init__(self, replica: Replica, group: Group, mesh: Mesh, plan: Plan) -> None:
        self.islands = Islands(replica, group, mesh, plan.local or 1)
        self.outer = outer_optimizer(plan.outer or OUTER, self.islands.params)
        self.peak_bytes = 0, 0  # of weights in addition to those in the model, and of optimizer states
        self._sums = IslandSums([], [], [])

    def begin_round(self) -> None:
        """Begins a round, or continues one that an earlier generation began: the weights become the anchor."""
        self.islands.begin_round()

    def after_inner_step(self, step: int) -> bool:
        """Does nothing: islands exchange nothing within a round. Returns whether a group breaks the round off."""
        return False

    def after_last_inner_step(self, breaks_off: bool = False) -> bool:
        """Does nothing: groups that break off a round report it when all meet. Returns whether one does so here."""
        return False

    def sum_outer_gradients(self, name: str, steps: int, merged: Collection[int], late: dict[int, list[int]]) -> None:
        """Sums the deltas of the `merged` islands over all worker groups. Collective.

        Also prepares the islands' states after `steps` steps, which take effect with the outer step.
        """
        self.islands.prepare(steps, merged, late, {})
        self._sums = sum_islands(self.islands, name, merged, self.islands.params)
        copy_sole_states(self.islands, steps, merged)
        self.peak_bytes = self.islands.measure(self.outer, [*self._sums.params, *self._sums.buffers])

    @torch.no_grad()
    def outer_step(self, count: float, steps: int) -> None:
        """Moves the weights by the mean of the outer gradients: `count` is that of all merged islands."""
        if count > 0:  # else no island has moved
            for param, total in zip(self.islands.params, self._sums.params, strict=True):
                param.grad = (total / count).to(param.dtype).view_as(param)
            self.outer.step()
        self.outer.zero_grad()
        merge_buffers(self.islands, self._sums, count)
        self._sums = IslandSums([], [], [])
        self.islands.commit(steps)
