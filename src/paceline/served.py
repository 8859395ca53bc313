"""Steps whose updates are made by parameter servers: what else they need of the run."""

from __future__ import annotations

from typing import Any

import torch

from paceline.checkpoint.tree import pack, unpack
from paceline.errors import UsageError
from paceline.mesh import Mesh
from paceline.rounds import rounds_of
from paceline.step import Grid
from paceline.stepping import Stepper
from paceline.strategies.servers import Served, Servers

LOOK = 0.3  # seconds between two looks at whether somebody was asked to stop


def stepper_of(mesh: Mesh, about: dict[str, Any], grid: Grid | None) -> Stepper:
    """What makes a trainer's turns, as its plan says."""
    run, plan = about["run"], about["plan"]
    if run.serving is not None:
        run.serving.steppers.append(stepper := Stepper(**about, grid=grid))
        return stepper
    if plan.local:
        return rounds_of(mesh, about, grid)
    return ServedStepper(**about, grid=grid) if plan.server else Stepper(**about, grid=grid)


class ServedStepper(Stepper):
    """Makes steps whose updates servers make."""

    replica: Served

    def __post_init__(self) -> None:
        super().__post_init__()
        run, count = self.run, self.plan.server or 0
        if run.servers is None:
            operations = self.operations
            operations.ahead = False
            run.servers = Servers(count, operations.worker, lambda: operations.servers, self._look, self._give)
            run.team.world.tell("servers", count=count)
        elif run.servers.met or run.servers.count != count:
            what = "this Trainer is made after training began, and parameter servers run the script up to there alone"
            cure = "make all trainers before the first loop over steps(), or the first step()"
            if run.servers.count != count:
                what = f"one trainer has server={run.servers.count} and another server={count}"
                cure = "say the same for both"
            raise UsageError(what, cure)
        self.replica.servers, self.replica.number = run.servers, self.trainer

    def _look(self) -> None:
        """Raises where another generation is to be entered first."""
        channel = self.run.team.group.channel
        if channel is not None and channel.broken is not None:
            raise channel.broken

    def _give(self) -> torch.Tensor | None:
        run = self.run
        if run.team.group.rank:
            return None
        return pack(run.hand_over())

    def house(self, name: str) -> None:
        new = self.housed != self.operations.number
        super().house(name)
        if new:
            self.replica.prepare()
            self._meet()
            self.replica.met(self.operations.number)

    def _meet(self) -> None:
        """All wait until the servers have the state, or until one is asked to stop: then nothing was done yet."""
        run, group = self.run, self.run.team.group
        assert run.servers is not None
        while True:
            missing = not run.servers.meet(LOOK)
            told = group.sum(torch.tensor([missing, run.notice is not None and not run.servers.met], dtype=torch.int64))
            if not told[0]:
                return
            if told[1]:
                run.end_here()

    def state(self, done: int | None) -> dict[str, Any]:
        """With what the servers keep, for a checkpoint."""
        found, servers = super().state(done), self.run.servers
        if done is None or servers is None or not servers.met:
            return found
        for text in self.replica.kept():
            parts = unpack(torch.frombuffer(text, dtype=torch.uint8))
            for optimizer, part in zip(found["optimizers"], parts, strict=True):
                optimizer["state"] |= part
        return found
