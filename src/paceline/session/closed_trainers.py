"""Releases trainers that the script has closed or dropped.

A run keeps weak references to its trainers. When one ends, its parts (model, optimizers, gradients in shared memory) go
to a Trainer object of the run's own, which stands in for it in checkpoints and hand-overs. Python collects garbage at
different moments on different workers, so nothing is decided when it does: all workers call `release` at the same
places of the script (`trainer.close()`, the next Trainer, the next checkpoint), and it releases what has ended on all.

The code that a resumed run passes over runs again up to the place where training goes on, and may use the weights of a
trainer that has ended, as in ``distances.append(distance(model))`` after its loop. So the last weights and the
`trainer.state` are written once, beside the checkpoints (``checkpoints/trainer-0``, in the same format). Checkpoints
then hold a line about the trainer instead of its tensors: how far it came, and the step at which it was `closed`. The
trainer that a resumed script makes again takes these weights, and passes over its loops. The optimizer's state is gone:
such a trainer can be evaluated and exported, not trained.

Parameter servers keep their part of the state until the run ends, and so do checkpoints under ``server=``.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.checkpoint.files import last_weights
from paceline.comm.shared_memory import give_back
from paceline.errors import UsageError
from paceline.parallel.tensor_parallel.redistribute import Redistributor
from paceline.session.best_checkpoint import BestCheckpoint
from paceline.session.checkpoint_manager import StateSnapshot
from paceline.session.trainer_consistency import Description
from paceline.session.trainer_state import TrainerState
from paceline.session.training_loop import LoopState, RegisteredTrainer

if TYPE_CHECKING:
    from paceline.session.run import Run

_TENSORS = ("model", "state")
_KEPT = (*_TENSORS, "whole", "steps", "expected", "grid", "phases", "stopped", "best", "said")


@dataclass
class EndedTrainer:
    """What a run keeps of a trainer that all workers have released: its line in checkpoints, and the values that the
    run still reports. The line holds the tensors only if they could not be written to a file. `callable_model` is the
    model, if the script still holds it, because the losses of other trainers may call it.
    """

    line: dict[str, Any]
    best: BestCheckpoint
    done: int
    complete: bool
    described: Description  # of its model, arguments and optimizers, which a newcomer must have alike
    schedule_warning: str  # what the user is told at the end of the run about its schedule, if anything
    unused_loops: list[LoopState]  # that were made and not run
    callable_model: nn.Module | None = None
    state: TrainerState = field(default_factory=TrainerState)
    parts: list[Redistributor | None] = field(default_factory=list)

    @classmethod
    def of(
        cls, member: RegisteredTrainer, line: dict[str, Any], callable_model: nn.Module | None = None
    ) -> EndedTrainer:
        """Returns the record of a `member` that ends with this `line` in checkpoints."""
        about = member.described, member.schedule_warning, member.unused_loops
        return cls(line, member.best, member.done, member.complete, *about, callable_model)

    def snapshot(self, done: int | None = None) -> dict[str, Any]:
        """Returns the line for a checkpoint."""
        return {**self.line, "viewed": self.callable_model is not None}

    def needs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns nothing: an ended trainer needs no memory."""
        return []

    @property
    def job(self) -> None:
        """Returns None: an ended trainer trains nothing."""

    @property
    def held_bytes(self) -> int:
        """Returns 0: an ended trainer holds no memory."""
        return 0

    def measure(self, besides: int) -> list[dict[str, Any]] | None:
        """Returns None: an ended trainer measures nothing."""
        return None

    def dismantle(self) -> list[Any]:
        """Returns nothing: the memory was freed when the trainer ended."""
        return []

    # Nothing of it changes any more.
    def record_measurements(self, reports: list[Any]) -> None:
        """Does nothing: the state of an ended trainer is final."""

    def flush(self) -> None:
        """Does nothing: the state of an ended trainer is final."""

    def update_callable_models(self) -> None:
        """Does nothing: the state of an ended trainer is final."""

    def restore(self, newcomer: bool) -> None:
        """Does nothing: the state of an ended trainer is final."""

    def continue_journal(self) -> None:
        """Does nothing: the state of an ended trainer is final."""

    def load_base(self, saved: dict[str, Any]) -> None:
        """Does nothing: the state of an ended trainer is final."""

    def complete_step(self) -> None:
        """Does nothing: the state of an ended trainer is final."""

    def apply_step(self, message: list[Any]) -> None:
        """Does nothing: the state of an ended trainer is final."""

    def mark_copies(self) -> None:
        """Does nothing: the state of an ended trainer is final."""


def line_of(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the line about an ending trainer, with its model and `trainer.state`, from its full `snapshot`."""
    phases = [{**phase, "complete": True} for phase in snapshot["phases"]]  # its loops are not run again
    return {
        **{name: snapshot[name] for name in _KEPT if name in snapshot},
        "phases": phases,
        "closed": None,
        "viewed": False,
    }


def release(run: Run) -> None:
    """Releases the trainers that have ended on all workers. Collective."""
    operations = run.team.transactions
    stays = run.servers is not None or run.serving is not None  # see above
    if not run.trainers.classes or stays or operations.waiting or (run.script.replays):
        return
    numbers = _common(run, sorted(run.trainers.ended))
    if not numbers:
        return
    weak: dict[int, list[Any]] = {}
    for number in numbers:
        weak[number] = _release(run, number)
    for number, member in enumerate(run.trainers.members):
        if isinstance(member, EndedTrainer) and member.callable_model is not None:
            weak[number], member.callable_model = [weakref.ref(member.callable_model)], None
    run.trainers.update_models()
    if any(reference() is not None for references in weak.values() for reference in references):
        gc.collect()  # a scheduler and its optimizer, or a user's own objects, hold each other
    for number in _common(run, sorted(number for number, (model, *_) in weak.items() if model() is not None)):
        member = run.trainers.members[number]
        assert isinstance(member, EndedTrainer)
        member.callable_model = weak[number][0]()
    run.trainers.update_models()
    give_back()


def _common(run: Run, numbers: list[int]) -> list[int]:
    """Returns the numbers that all workers have. Collective."""

    def gather() -> list[int]:
        run.team.group.declare("which trainers have ended", kind="figures")
        return sorted(set.intersection(*map(set, run.team.group.gather_json(numbers))))

    return numbers if run.team.group.size == 1 else list(run.team.transactions.run(gather))


def _release(run: Run, number: int) -> list[Any]:
    """Writes the last weights of a trainer and frees its memory. Returns weak references to model and optimizers."""
    member: Any = run.trainers.members[number]
    member.flush()
    run.checkpoints.copied()  # of a checkpoint that is being written
    line = _written(run, number, line_of(member.snapshot()), member.model)
    run.trainers.forget(number, EndedTrainer.of(member, line))
    return list(member.dismantle())


def _written(run: Run, number: int, line: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Writes the tensors of a line to a file and returns the line without them. Collective."""
    saving = run.checkpoints
    if saving.storage is None:  # nobody resumes, or joins
        return {name: value for name, value in line.items() if name not in _TENSORS}
    tree: dict[str, Any] = {"trainers": [{}] * number + [{name: line[name] for name in _TENSORS}], "results": []}
    subject = StateSnapshot(run.trainers.step, lambda: tree, model.parameters, run.state.about)
    trouble = saving.write_aside(subject, last_weights(saving.storage, number))
    run.checkpoints.report()
    if trouble is not None:
        return {**line, "model": {name: _copied(value) for name, value in line["model"].items()}}
    return {name: value for name, value in line.items() if name not in _TENSORS} | {"closed": run.trainers.step}


def _copied(value: Any) -> Any:
    """Returns a copy of a tensor that the script may change."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def refuse_calls(model: nn.Module) -> None:
    """Makes calls of a sharded model raise UsageError after its trainer has ended."""

    def refuse(*_: Any) -> None:
        what = f"this {type(model).__name__} is sharded among workers, and its trainer was closed"
        raise UsageError(what, "call it before trainer.close(), or load an exported file into a new model")

    model.register_forward_pre_hook(refuse, prepend=True)
