"""State of training loops: what a resumed script skips, and the registered trainers whose fields checkpoints have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from paceline.compute.job import TrainingJob
from paceline.data.loader import Source
from paceline.errors import CheckpointError, DatasetError, PacelineError, first_line
from paceline.session.trainer_consistency import Description

if TYPE_CHECKING:
    from paceline.parallel.tensor_parallel.redistribute import Redistributor
    from paceline.session.best_checkpoint import BestCheckpoint


class RegisteredTrainer(Protocol):
    """The interface of a trainer that the run uses."""

    best: BestCheckpoint
    described: Description  # of its model, arguments and optimizers, which a newcomer must have alike

    def snapshot(self, done: int | None = None) -> dict[str, Any]:
        """Returns the trainer's state as a tree. For a checkpoint, `done` is the number of transactions."""

    def flush(self) -> None:
        """Writes the steps since the last record to the journal and the progress line."""

    def restore(self, newcomer: bool) -> None:
        """Loads this trainer's part of the run's state tree. A `newcomer` also gets the state of its loops."""

    def continue_journal(self) -> None:
        """Continues the journal after its last step: this worker writes it from now on."""

    def load_base(self, saved: dict[str, Any]) -> None:
        """Loads a state that is some steps old, ahead of the steps that follow it."""

    def complete_step(self) -> None:
        """Finishes a step after its update: gathers the weights that other workers have updated."""

    def needs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns each plan as text, and the bytes that a worker holds under it by category; the trainer's plan is
        first.
        """

    @property
    def job(self) -> TrainingJob | None:
        """What the trainer trains; None for one that has ended."""

    @property
    def held_bytes(self) -> int:
        """Returns the bytes that the trainer holds on this worker."""

    def measure(self, besides: int) -> list[dict[str, Any]] | None:
        """Returns the predicted and the measured memory and traffic of a step; None before the first step. `besides`
        are the bytes of the process that belong to other trainers.
        """

    def record_measurements(self, reports: list[Any]) -> None:
        """Records the measurements of all workers for the report."""

    def update_callable_models(self) -> None:
        """Updates the list of models that this trainer's loss may call."""

    def dismantle(self) -> list[Any]:
        """Frees the trainer's memory. Returns weak references to its model and optimizers."""

    def apply_step(self, message: list[Any]) -> None:
        """Applies a part of a step that the team made before this newcomer joined."""

    def mark_copies(self) -> None:
        """Marks the tensors in `trainer.state` that are copies of sharded weights."""

    @property
    def callable_model(self) -> nn.Module | None:
        """The model, if the losses of other trainers may call it."""

    @property
    def schedule_warning(self) -> str:
        """A sentence about a plateau schedule that never got a value; empty if there is nothing to say."""

    @property
    def done(self) -> int:
        """Optimizer steps done, those before a resume included."""

    @property
    def complete(self) -> bool:
        """Whether all loops of the trainer have reached their end."""

    @property
    def unused_loops(self) -> list[LoopState]:
        """Loops that `steps()` returned and that the script has not iterated."""

    @property
    def parts(self) -> list[Redistributor | None]:  # as in Job
        """The redistributors of sharded weights, as in the trainer's job."""


@dataclass(eq=False)
class LoopState:
    """The state of one loop over `steps()`: its number in the script, the rows of an epoch, its target and the steps
    done.

    A resumed script does not run the loop bodies that were done before. `inside` counts the loops that each trainer, by
    its number, began in these bodies, so that later loops keep their numbers.
    """

    number: int
    rows: int | None
    epochs: int | None
    total: int | None
    done: int = 0
    complete: bool = False
    stopped: bool = False
    first_epoch: int = 0  # epochs go on from loop to loop, or each would see the rows in the same order
    begun: int = 0  # epochs that this phase has begun
    stream: dict[str, Any] | None = None  # the place in an iterable dataset, see `data.row_stream.Position`
    inside: dict[int, int] = field(default_factory=dict)
    outer: LoopState | None = None  # the loop in whose body this one was made
    site: str = ""  # the user's line, until its loop is run

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> LoopState:
        """Rebuilds a loop from what `saved` returned. Fields that this version does not know are ignored."""
        return cls(**{one.name: saved[one.name] for one in dataclasses.fields(cls) if one.name in saved})

    def saved(self) -> dict[str, Any]:
        """Returns the loop's fields for a checkpoint."""
        return {name: value for name, value in vars(self).items() if name not in ("outer", "site")}

    def enter(self, outer: LoopState | None, trainer: int) -> None:
        """Records that the trainer called `steps()` in the body of the loop `outer`, and of the loops around that."""
        self.outer = outer
        while outer is not None:
            outer.inside[trainer] = outer.inside.get(trainer, 0) + 1
            outer = outer.outer

    def same_rows(self, rows: int | None, say: Callable[[str], None]) -> int | None:
        """Returns the rows that the loop began with. Further rows of a dataset that has grown are not used. Raises
        DatasetError if rows are missing.
        """
        if self.rows is None or rows is None or rows == self.rows:
            return rows if self.done == 0 else self.rows
        if rows < self.rows:
            what = f"the dataset had {self.rows} rows when the checkpoint was written and has {rows} now"
            raise DatasetError(what, "restore the missing rows, or start a new run in another --run-dir")
        say(f"the dataset has grown from {self.rows} to {rows} rows; this run continues with the first {self.rows}")
        return self.rows

    def set_target(self, epochs: int | None, total: int | None, last: bool) -> bool:
        """Sets the target that the script asks for. Returns True if a complete last loop continues, because its target
        is larger than before.
        """
        further = total is not None and self.total is not None and total > self.total
        more_epochs = total is None and (epochs or 0) > (self.epochs or 0)
        goes_on = self.complete and last and (further or more_epochs)
        if goes_on:
            self.complete = self.stopped = False
        if not self.complete:
            self.epochs, self.total = epochs, total
            self.complete = total is not None and self.done >= total
        return goes_on

    def source(self, source: Source) -> Source:
        """Returns the source, limited to the loop's rows and starting at its first epoch."""
        rows = None if source.rows is None else self.rows
        return dataclasses.replace(source, rows=rows, first_epoch=self.first_epoch)


class SavedFields(dict[str, Any]):
    """A trainer's fields in a checkpoint. `last` is the field that was read last, for error messages."""

    last = ""

    def __getitem__(self, name: str) -> Any:
        self.last = name
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field, as dict.get does, and remembers its name."""
        self.last = name
        return super().get(name, default)

    @contextmanager
    def naming(self, where: str, trainer: int) -> Iterator[None]:
        """Raises CheckpointError with the name of the field if the code in the context cannot use a value."""
        try:
            yield
        except (TypeError, LookupError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            if isinstance(error, PacelineError | torch.OutOfMemoryError | torch.distributed.DistError):
                raise
            why = f"{type(error).__name__}: {first_line(error)}"
            what = f"trainer {trainer} cannot continue from the field {self.last} of {where} ({why})"
            raise CheckpointError(what, "use another checkpoint, or start a new run in another --run-dir") from error
