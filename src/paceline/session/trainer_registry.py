"""The trainers of a script, and what a run keeps for each of them."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch

from paceline.comm.error_feedback import AllErrorFeedback
from paceline.session.closed_trainers import EndedTrainer
from paceline.session.consistency import ConsistencyChecker
from paceline.session.reporter import Reporter
from paceline.session.trainer_state import TrainerState
from paceline.session.training_loop import RegisteredTrainer
from paceline.team.team import Team


class TrainerRegistry:
    """All trainers that the script has made, by number.

    The script alone holds the trainers that it uses: `members` has weak proxies of them. A trainer that has ended puts
    an object with its parts in its place, and once it has ended on all workers, its `EndedTrainer` record replaces
    that.
    """

    def __init__(self, team: Team, reporter: Reporter, agreement: ConsistencyChecker) -> None:
        self._team, self._reporter = team, reporter
        self.agreement = agreement
        self.error_feedback = AllErrorFeedback()
        self.members: list[RegisteredTrainer] = []
        self.states: list[TrainerState] = []  # their `trainer.state`
        self.classes: list[str] = []  # of their models
        self.ended: set[int] = set()  # trainers that wait to be released
        self.models: list[torch.nn.Module] = []  # that a loss may call

    @property
    def step(self) -> int:
        """Optimizer steps of all trainers."""
        steps = 0
        for member in self.members:
            steps += member.done
        return steps

    @property
    def complete(self) -> bool:
        """Whether there are trainers, and all their loops have reached their ends."""
        return bool(self.members) and all(member.complete for member in self.members)

    def enlist(self, member: RegisteredTrainer, model: torch.nn.Module, state: TrainerState) -> None:
        """Registers a new trainer, its model and its `trainer.state`."""
        self.members.append(cast(RegisteredTrainer, weakref.proxy(member)))
        self.states.append(state)
        self.classes.append(_class_name(model))
        self.models.append(model)

    def replace(self, number: int, member: RegisteredTrainer) -> None:
        """Replaces a trainer that has ended on this worker by `member`, to which it gave its parts."""
        self.members[number] = member
        self.ended.add(number)

    def forget(self, number: int, ended: EndedTrainer | None = None) -> None:
        """Stops comparing and summing a trainer that has ended on all workers, or in the checkpoint. `ended` takes its
        place.
        """
        journal = self._reporter.journal
        for one in [one for one in self.agreement.comparisons if one.trainer == number]:
            self.agreement.release(one, journal)
        for figures in self.error_feedback.release(number):
            journal.write("codec", **figures)
        if ended is not None:
            self.members[number], self.states[number] = ended, ended.state
            self.ended.discard(number)

    def update_models(self) -> None:
        """Updates the list of models that a loss may call to those of the present trainers."""
        self.models[:] = [model for member in self.members if (model := member.callable_model) is not None]
        for member in self.members:
            member.update_callable_models()

    def flush(self) -> None:
        """Writes the steps since the last record of each trainer to the journal and the progress line."""
        for member in self.members:
            member.flush()

    def measure(self) -> None:
        """Records the predicted and the measured memory and traffic of all trainers for the report. Collective."""
        group, members = self._team.group, self.members
        held = [member.held_bytes for member in members]
        measurements = {
            str(n): measurement for n, one in enumerate(members) if (measurement := one.measure(sum(held) - held[n]))
        }

        def gather() -> Any:
            group.declare("what workers held and sent", kind="figures")
            return group.gather_json(measurements)

        reports = [measurements] if group.size == 1 else self._team.transactions.run(gather)
        for number in measurements:
            if all(number in one for one in reports):
                members[int(number)].record_measurements([one[number] for one in reports])

    def write_figures(self) -> None:
        """Journals at the end of the run what comparing weights and compressing gradients took and saved."""
        journal = self._reporter.journal
        self.agreement.write(journal)
        if rate := self.error_feedback.rate:
            journal.write("links", rate=rate)
        for figures in self.error_feedback.figures():
            journal.write("codec", **figures)


def _class_name(model: torch.nn.Module) -> str:
    """Returns the name of a model's class in the script, from which fully_shard may have derived another class."""
    kinds = (kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.distributed.fsdp"))
    return next(kinds).__name__
