"""What a parameter server has of a trainer: its part of the parameters, in the same objects as a worker."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from paceline.comm.frames import Key
from paceline.plan import Plan
from paceline.step import NOTHING
from paceline.strategies.job import Options
from paceline.strategies.replica import Replica
from paceline.strategies.servers import own_numbers, spread
from paceline.strategies.state import optimizer_state


class Steps(Protocol):
    """What makes a trainer's steps, where servers do not."""

    replica: Replica
    plan: Plan
    done: int


@dataclass
class Client:
    """A worker: what it pushes lands in `buffers`, by trainer and parameter. It has `asked` for squares, by trainer:
    of which contribution, as which rank of how many.
    """

    buffers: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    asked: dict[int, tuple[Key, int, int]] = field(default_factory=dict)


class Holding:
    """What this server has of a trainer: the parameters of these numbers, after `applied` steps. `ready` is the
    contribution whose sums are their gradients, `squares` what it, or else the last step, told.
    """

    def __init__(self, stepper: Steps, servers: int, server: int) -> None:
        self.stepper, self.replica = stepper, stepper.replica
        replica = self.replica
        self.params = [*replica.job.named.values()]
        self.numbers = [*own_numbers(spread([param.nbytes for param in self.params], servers), server)]
        self.squares = 0.0
        self.ready: Key | None = None

    @property
    def applied(self) -> int:
        return self.stepper.done

    def add(self, key: Key, pushed: list[dict[int, torch.Tensor]]) -> None:
        """Sums what workers have pushed, in the order of their ranks."""
        first, *others = ([one[number] for number in self.numbers] for one in pushed)
        for more in others:
            torch._foreach_add_(first, more)
        for number, grad in zip(self.numbers, first, strict=True):
            self.params[number].grad = grad.view(self.params[number].shape)
        self.ready, self.squares = key, float(self.replica.home.squares(0).sum())

    def apply(self, step: int, told: dict[str, Any]) -> None:
        """The step, once."""
        agreed = replace(NOTHING, count=told["count"], loss=told["loss"], unused=tuple(told["unused"]))
        self.replica.updater.apply(agreed, Options(step, told["expected"], 0), told["norm"])
        self.stepper.done, self.ready = step + 1, None

    def kept(self) -> list[dict[str, Any]]:
        """Of each optimizer, by name."""
        updater = self.replica.updater
        return [optimizer_state(one, updater.names, {}, 0)["state"] for one in self.replica.job.optimizers]
