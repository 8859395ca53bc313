"""State of training loops: what a resumed script skips, and trainer.state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from paceline.base.batching import Grid, deal
from paceline.base.text import ranks, trainer_names
from paceline.checkpoint.tree import flatten, unflatten
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import local
from paceline.data.loader import Source
from paceline.errors import CheckpointError, DatasetError, PacelineError, UsageError, first_line
from paceline.parallel.tensor_parallel.script_view import without_script_view
from paceline.session.trainer_consistency import Description

if TYPE_CHECKING:
    from paceline.parallel.tensor_parallel.redistribute import Redistributor
    from paceline.session.best_checkpoint import BestCheckpoint

LISTED = 16  # workers whose shares are told one by one


class RegisteredTrainer(Protocol):
    """The interface of a trainer that the run uses."""

    best: BestCheckpoint
    described: Description  # of its model, arguments and optimizers, which a newcomer must have alike

    def snapshot(self, done: int | None = None) -> dict[str, Any]:
        """Returns the trainer's part of a checkpoint as a tree; with `done`, as it is after so many transactions."""

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

    def measured(self, reports: list[Any]) -> None:
        """Records the measurements of all workers for the report."""

    def look_around(self) -> None:
        """Updates the list of models that this trainer's loss may call."""

    def dismantle(self) -> list[Any]:
        """Frees the trainer's memory. Returns weak references to its model and optimizers."""

    def apply_step(self, message: list[Any]) -> None:
        """Applies a part of a step that the team made before this newcomer joined."""

    def mark_copies(self) -> None:
        """Marks the tensors in `trainer.state` that are copies of sharded weights."""

    @property
    def viewed(self) -> nn.Module | None:
        """The model, if the losses of other trainers may call it."""

    @property
    def unmoved(self) -> str:
        """A sentence about a plateau schedule that never got a value; empty if there is nothing to say."""

    @property
    def done(self) -> int:
        """Optimizer steps done, those before a resume included."""

    @property
    def complete(self) -> bool:
        """Whether all loops of the trainer have reached their end."""

    @property
    def untouched(self) -> list[LoopState]:
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
    site: str = ""  # the user's line, until it is gone through

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


class State(dict[str, Any]):
    """`trainer.state`: the user's own values. In a resumed run the checkpoint's value wins over the script's first one.

    Numbers, text, tensors and nestings of them are kept as they are; an object with `state_dict()` and
    `load_state_dict()` is filled once: where it is, or else when the script puts it here.
    """

    def __init__(self, fit: Callable[[Any, Callable[[], Any]], Any] = lambda saved, given: saved) -> None:
        """`fit(saved, current)` converts a saved value to the form of the script's own value, which `current()`
        returns: with full tensors or with local shards.
        """
        super().__init__()
        self._fit = fit
        self._waiting: dict[str, Any] = {}
        self._steps = 0
        self._moved: set[str] = set()  # what the code of a step changes by itself: a loss, a forward, a dataset
        self._before: dict[str, Any] = {}
        self._stamps: dict[str, Any] | None = None

    def restore(self, saved: Mapping[str, Any], local_entries: Mapping[str, Any] | None = None) -> None:
        """Takes the `saved` entries. `local_entries` are the same entries in the form in which this worker stores
        tensors.
        """
        self._waiting = dict(saved)
        for key, (kind, value) in (saved if local_entries is None else local_entries).items():
            if kind == "plain":
                super().__setitem__(key, value)
            elif key in self:  # the script of a newcomer put it here before it was given anything
                self[key].load_state_dict(self._fit(saved[key][1], self[key].state_dict))
                del self._waiting[key]

    def begin(self) -> None:
        """Ends the replay: from here on an assignment of the script wins over the checkpoint's value."""
        self._waiting = {key: entry for key, entry in self._waiting.items() if entry[0] == "object"}

    def step_begins(self) -> None:
        """Copies the values that the code of a step itself changes, so that the step can be computed again. Steps 1, 2,
        4, 8, ... find out which values these are.
        """
        self._steps += 1
        self._before = {key: _copy(self[key]) for key in self._moved & self.keys()}
        looks = self._steps & (self._steps - 1) == 0
        self._stamps = {key: _stamp(value) for key, value in self.items()} if looks else None

    def step_computed(self) -> None:
        """Finds the values that the code of the step has changed."""
        if self._stamps is not None:
            self._moved |= {key for key, value in self.items() if _stamp(value) != self._stamps.get(key)}

    def step_again(self) -> None:
        """Restores the values from before the step. Containers and tensors stay the same objects."""
        for key, (kind, saved) in self._before.items():
            live = self.get(key)
            if kind == "object":
                self[key].load_state_dict(_copied(saved))
            elif isinstance(live, torch.Tensor) and live.shape == saved.shape:
                live.detach().copy_(saved)
            elif isinstance(live, list | dict):
                live.clear()
                (live.extend if isinstance(live, list) else live.update)(_copied(saved))
            else:
                super().__setitem__(key, saved)

    @without_script_view
    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._waiting:
            kind, saved = self._waiting.pop(key)
            if kind == "object":
                value.load_state_dict(self._fit(saved, value.state_dict))
            else:
                given = value
                value = self._fit(saved, lambda: given)
        super().__setitem__(key, value)

    def update(self, *others: Any, **values: Any) -> None:  # dict's own would pass by __setitem__
        """Sets several values, as dict.update does."""
        for key, value in dict(*others, **values).items():
            self[key] = value

    def __ior__(self, other: Any) -> State:  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Sets a value unless the key has one; the checkpoint's value wins over `default`."""
        if key not in self or key in self._waiting:
            self[key] = default
        return self[key]

    def saved(self) -> dict[str, Any]:
        """Returns the entries of a checkpoint by key: ("plain", value), or ("object", its state_dict)."""
        kept: dict[str, Any] = {key: value for key, value in self._waiting.items() if key not in self}
        return kept | {key: _entry(value) for key, value in self.items()}


def _entry(value: Any) -> tuple[str, Any]:
    filled = hasattr(value, "state_dict") and not isinstance(value, torch.Tensor)
    return ("object", value.state_dict()) if filled else ("plain", value)


def _copied(tree: Any) -> Any:
    tensors, skeleton = flatten(tree, "", live=True)
    return unflatten(skeleton, {name: tensor.detach().clone() for name, tensor in tensors.items()})


def _copy(value: Any) -> tuple[str, Any]:
    kind, plain = _entry(value)
    return kind, _copied(plain)


def _stamp(value: Any) -> Any:
    """Returns a value that differs after the given value was changed."""
    try:
        tensors, skeleton = flatten(_entry(value)[1], "", live=True)
    except UsageError:  # what cannot be kept is refused by the next checkpoint
        return None
    return skeleton, [
        (name, (local_part := local(tensor)).data_ptr(), local_part._version) for name, tensor in tensors.items()
    ]


def grid_text(grid: Grid, shares: list[int], rows: int | None, total: int | None, whose: str = "workers") -> str:
    """``global batch 256 = 8 micro-batches of 32 rows, 4 on each of 2 workers; one epoch = 391 steps; 782 steps``."""
    count = len(grid.cut(grid.global_batch))
    text = f"global batch {grid.global_batch} = {count} micro-batch{'es' if count > 1 else ''} of {grid.micro} rows"
    if len(shares) > 1:
        each = " to ".join(map(str, sorted({min(shares), max(shares)})))
        even = len(set(shares)) == 1 or len(shares) > LISTED
        one_by_one = f"assigned to the {whose} as " + ", ".join(map(str, shares))
        text += ", " + (f"{each} on each of {len(shares)} {whose}" if even else one_by_one)
    if rows is not None:
        text += f"; one epoch = {grid.batches(rows)} steps"
    return text + (f"; {total} steps in total" if total is not None else "")


def describe_grid(
    grid: Grid, shares: list[int], rows: int | None, total: int | None, unit: int, number: int, models: Sequence[str]
) -> dict[str, Any]:
    """Returns the fields of the journal's `grid` event. `shares` are of units of `unit` workers. `number` is the
    trainer's, and `models` are the class names of all trainers' models.
    """
    kinds = dict(enumerate(models))
    sizes = {"global_batch": grid.global_batch, "micro": grid.micro, "micro_batches": len(grid.cut(grid.global_batch))}
    text = grid_text(grid, shares, rows, total, _whose(unit))
    if len(kinds) > 1:  # steps are counted over all of them
        text = f"{trainer_names(kinds)[number]}: {text.replace(' steps in total', ' steps of its own')}"
    about = {"trainer": number, "model": kinds[number], "rows": rows}
    return {**sizes, **about, "shares": shares, "unit": unit, "text": text}


def resumed_grid(recorded: Grid, now: Grid, micro: int | None, done: int, say: Callable[[str], None]) -> Grid:
    """Returns the grid of a resumed run: the recorded one, unless the script or the plan asks for another. That one is
    named as a change of the mathematics.
    """
    same = now.global_batch == recorded.global_batch
    requested = Grid(now.global_batch, micro or (recorded.micro if same else now.micro))
    if requested != recorded:
        say(
            f"the mathematics changes: global batch {recorded.global_batch} in micro-batches of {recorded.micro} rows "
            f"until step {done}, from now on {requested.global_batch} in micro-batches of {requested.micro}"
        )
    return requested


def _whose(unit: int) -> str:
    return "workers" if unit == 1 else f"units of {unit} workers"


def idle_text(grid: Grid, weights: Sequence[float], unit: int = 1) -> tuple[str, str] | None:
    """Returns a message and its reason if some units get no micro-batch: which workers these are, and which `micro`
    gives each unit one. None if all units have work.
    """
    count, wanted = len(grid.cut(grid.global_batch)), sum(weight > 0 for weight in weights)
    idle = _idle(count, weights)
    if not idle:
        return None
    micro = min(grid.micro, -(-grid.global_batch // wanted))
    while micro and _idle(-(-grid.global_batch // micro), weights):
        micro = micro // 2 if micro > 8 else micro - 1
    advice = f"the plan micro={micro} gives one micro-batch to each of the {wanted} {_whose(unit)}" if micro else ""
    no_advice = f"for {wanted} {_whose(unit)} the global batch needs more than {grid.global_batch} rows"
    stay = "1 micro-batch is" if count == 1 else f"{count} micro-batches are"
    idle = [number * unit + mate for number in idle for mate in range(unit)]
    have = "has" if len(idle) == 1 else "have"
    return (
        f"{ranks(idle)} {have} nothing to do, because the {stay} not divided further",
        f"{advice or no_advice}, which changes the mathematics",
    )


def _idle(micro_batches: int, weights: Sequence[float]) -> list[int]:
    shares = zip(weights, deal(micro_batches, weights), strict=True)
    return [worker for worker, (weight, share) in enumerate(shares) if weight and not share]
