"""Whole copies of parameters that are cut, for optimizers that look at one as a whole: at its norm, as LARS and LAMB,
or at its rows and columns, as Muon and Adafactor. Every worker of the unit makes the same update of the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.pieces import Cut, Held
from paceline.strategies.state import marked, marks_of


class WholeCopies:
    """Copies of `own` parameters of which the `cuts` leave a piece here, at a `place` in a `replica`. Optimizers hold
    the copies, which have numbers in an update alone.
    """

    def __init__(self, own: Mapping[str, Parameter], cuts: Mapping[str, Cut], place: int, replica: Group) -> None:
        self._own, self._cuts, self._place, self._replica = own, cuts, place, replica
        self.copies = {
            name: marked(param.new_zeros(cuts[name].shape), marks_of(param)) if name in cuts else param
            for name, param in own.items()
        }

    def _whole(self, cut: Cut, piece: torch.Tensor) -> torch.Tensor:
        return self._replica.whole(Held(piece, cut, self._place))

    @contextmanager
    def update(self) -> Iterator[None]:
        """What is done meanwhile to the copies, with the gradients of the pieces, is done to these. Collective."""
        self._replica.enter("whole copies for the optimizer", check=False, kind="weights")
        for name, cut in self._cuts.items():
            copy, piece = self.copies[name], self._own[name]
            copy.detach().copy_(self._whole(cut, piece))
            copy.grad = None if piece.grad is None else self._whole(cut, piece.grad)
        yield
        for name, cut in self._cuts.items():
            self._own[name].detach().copy_(cut.at(self._place).of(self.copies[name].detach()))
            self.copies[name].grad = None
