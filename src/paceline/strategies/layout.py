"""What of a model a worker holds. The plain layout: all of it, and each worker runs it by itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from paceline.comm.buckets import Allocate, Buckets, Landing
from paceline.comm.exact import ExactBuckets
from paceline.comm.group import Group
from paceline.comm.places import ALONE, Places
from paceline.comm.transit import Hop
from paceline.strategies.job import Job


class Layout:
    """Gradients land in buckets of memory from `allocate`, to be summed, or stay where they are.

    `places` share the rows that optimizers hold. A bucket's way to them is `route`, before it is summed over replicas;
    `within` are the workers that together hold the parts of one copy.
    """

    places: Places = ALONE
    route: tuple[Hop, ...] = ()
    within: Group | None = None
    gathers = False  # whether parameters are gathered from others before they are used

    def __init__(self, job: Job, allocate: Allocate | None = None) -> None:
        self.job, self.allocate = job, allocate

    def own(self) -> None:
        """The job's `own` parameters: those that optimizers are to hold here."""
        self.job.own = {name: self.places.cut(param) for name, param in self.job.named.items()}

    def land(self) -> Landing:
        """Where gradients of the parameters land."""
        return Landing(list(self.job.named.values())) if self.allocate is None else self.buckets()

    def buckets(self) -> Buckets:
        kind = ExactBuckets if self.job.exact else Buckets
        return kind(list(self.job.named.values()), places=self.places, own=list(self.job.own.values()))

    def running(self, name: str) -> AbstractContextManager[None]:
        """Around the forwards and backwards of a step of this name."""
        return nullcontext()

    def complete(self) -> None:
        """After an update, and in a new generation: brings what of the weights others have updated. Collective."""

    def rest(self) -> None:
        """What a forward or backward has left, or where it was cut off, is gone."""

    def gathered(self) -> int:
        """Bytes of parameters that are here for a while, at most, beside those that always are."""
        return 0

    def told(self, model: dict[str, Any]) -> dict[str, Any]:
        """A model's state as it is kept: what is here, and which part of the whole that is."""
        return model

    def taken(self, model: Mapping[str, Any]) -> Mapping[str, Any]:
        """A model's state as it is to be loaded here, of what is kept."""
        return model
