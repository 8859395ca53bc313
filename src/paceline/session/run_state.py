"""The state of the run, as newcomers take it over and checkpoints save it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.backends.cpu import get_cpu_capability

from paceline.base.text import duration, ranks, size_of
from paceline.session.best_checkpoint import best_now
from paceline.session.checkpoint_manager import StateSnapshot
from paceline.session.closed_trainers import release
from paceline.session.script_info import VERSIONS, script_name, script_text
from paceline.session.trainer_consistency import OF_MODEL, refuse_difference
from paceline.session.user_streams import user_streams
from paceline.session.validation import refuse_other_instructions
from paceline.team.agent_commands import Generation

if TYPE_CHECKING:
    from paceline.session.run import Run


class RunState:
    """The state of a run: implements `StateOwner` for the team, and makes the snapshots of checkpoints."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def step(self) -> int:
        """Optimizer steps of all trainers."""
        return self._run.trainers.step

    # -- for other workers ----------------------------------------------------------------------------------------

    def hand_over(self, done: int | None = None) -> Any:
        """Returns the whole state of the run as a tree, for a worker that joins."""
        run, checkpoints = self._run, self._run.checkpoints
        members, tree = run.trainers.members, run.resume.tree
        trainers = [member.snapshot(done) for member in members]
        if len({*run.team.group.hosts}) > 1 and checkpoints.storage is not None and not checkpoints.storage.shared:
            # A newcomer on another host may not see the folder.
            trainers = [checkpoints.last_of(number, saved) for number, saved in enumerate(trainers)]
        described = [member.described for member in members]
        if run.team.world.newcomer:  # trainers whose state it was given, and that its script has not made yet
            trainers += tree.get("trainers", ())[len(trainers) :]
            described += tree.get("described", ())[len(described) :]
        return {
            "trainers": trainers,
            "results": run.results.values,
            "calls": run.results.calls,
            "described": described,
            "streams": user_streams(),
            "saved": [checkpoints.begun, checkpoints.open],
            "capability": get_cpu_capability(),
        }

    def take_over(self, tree: Any, newcomer: bool) -> None:
        """Takes the state that another worker handed over. A worker that is no newcomer keeps its position in the
        script. Raises WorkersDifferError.
        """
        run, checkpoints = self._run, self._run.checkpoints
        checkpoints.copied()
        self.refuse_differences(tree)
        run.resume.tree, (checkpoints.begun, checkpoints.open) = tree, tree["saved"]
        if newcomer and "exact" in run.plan.split():
            worker = run.team.transactions.worker
            refuse_other_instructions(worker, get_cpu_capability(), "the others", tree["capability"])
        if newcomer:
            trainers = [checkpoints.last_of(number, saved) for number, saved in enumerate(tree["trainers"])]
            run.resume.tree, run.resume.streams = {**tree, "trainers": trainers}, [tree["streams"]]
            run.script.replays = True
            run.results.values, run.results.calls = list(tree["results"]), tree["calls"]
        for member in run.trainers.members:
            member.restore(newcomer)

    def refuse_differences(self, tree: Any) -> None:
        """Raises WorkersDifferError if a model of this worker differs from the team's. Other settings of the script are
        not compared: a newcomer continues with the team's.
        """
        whose = "the other workers", ranks([self._run.team.transactions.worker])
        for member, described in zip(self._run.trainers.members, tree.get("described", ()), strict=False):
            refuse_difference(described, member.described, whose, OF_MODEL)

    def knows(self, trainer: int) -> bool:
        """Whether the team made this trainer before this newcomer joined, which then makes it without the others."""
        return self._run.team.world.newcomer and trainer < len(self._run.resume.tree.get("trainers", ()))

    def load_base(self, tree: Any) -> None:
        """Loads a state that is some steps old, ahead of the steps that follow it."""
        self.refuse_differences(tree)
        for member, saved in zip(self._run.trainers.members, tree["trainers"], strict=False):
            member.load_base(saved)

    def apply_step(self, message: list[Any]) -> None:
        """Passes a part of a step to the trainer that it belongs to."""
        trainer, *what = message
        if trainer < len(self._run.trainers.members):
            self._run.trainers.members[trainer].apply_step(what)

    def complete(self) -> None:
        """Finishes a step after its update, for all trainers. Collective in a replica."""
        for member in self._run.trainers.members:
            member.complete_step()

    def step_bytes(self) -> int:
        """Returns the bytes of the gradient sums of a step."""
        return sum(p.nbytes for model in self._run.trainers.models for p in model.parameters() if p.requires_grad)

    def on_state_sent(self, worker: int, size: int, full_size: int, seconds: float | None) -> None:
        """Journals that a worker is about to receive `size` bytes of state, of `full_size` in all, and tells the user
        if that takes more than a second.
        """
        self._run.reporter.journal.write("gives", worker=worker, bytes=size, whole=full_size)
        if seconds is not None and seconds > 1.0:
            what = f"sending {size_of(size)} of state to worker {worker}"
            self._run.reporter.say(f"training pauses for about {duration(seconds)}: {what}")

    def formed(self, generation: Generation, seconds: float) -> None:
        """Journals a new generation. The worker that becomes the main one continues the journal."""
        run = self._run
        if run.reporter.take_over_journal():
            for member in run.trainers.members:
                member.continue_journal()
        run.checkpoints.losses += not generation.planned
        run.reporter.journal.write(
            "formed", number=generation.number, workers=list(generation.members), step=self.step, seconds=seconds
        )

    # -- for checkpoints --------------------------------------------------------------------------------------------

    def snapshot(self) -> StateSnapshot:
        """Releases the trainers that have ended, and returns what a checkpoint saves. Collective."""
        run, feedback = self._run, self._run.trainers.error_feedback
        if not run.is_closing:  # else a script that has left main() could not be continued
            release(run)
        pool = partial(feedback.consolidate, run.team.transactions) if feedback.differ else None
        params = lambda: (param for model in run.trainers.models for param in model.parameters())  # noqa: E731
        return StateSnapshot(self.step, self._tree, params, self.about, self._compare, pool)

    def _tree(self) -> Any:
        done = self._run.team.transactions.done
        trainers = [member.snapshot(done) for member in self._run.trainers.members]
        return {"trainers": trainers, "results": self._run.results.values}

    def _compare(self) -> None:
        self._run.trainers.agreement.meet()
        for text in self._run.trainers.error_feedback.meet(self._run.team.transactions.done):
            self._run.reporter.say(text)

    def about(self) -> dict[str, Any]:
        """Returns what the manifest of a checkpoint says about the run."""
        return {
            "plan": self._run.plan,
            "script": script_text(),
            "script_name": script_name(),
            "workers": self._run.team.size,
            "generation": self._run.team.transactions.number,
            "best": best_now(self._run),
            "versions": VERSIONS,
        }
