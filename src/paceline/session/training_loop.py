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
from paceline.compute.state_dict import local
from paceline.data.loader import Source
from paceline.errors import CheckpointError, DatasetError, PacelineError, UsageError, first_line
from paceline.parallel.tensor_parallel.script_view import by_pieces
from paceline.session.trainer_consistency import Description

if TYPE_CHECKING:
    from paceline.parallel.tensor_parallel.redistribute import Redistributor
    from paceline.session.best_checkpoint import BestCheckpoint

LISTED = 16  # workers whose shares are told one by one


class RegisteredTrainer(Protocol):
    """What a run needs of a trainer."""

    state: State
    best: BestCheckpoint
    described: Description  # of its model, arguments and optimizers, which a newcomer must have alike

    def snapshot(self, done: int | None = None) -> dict[str, Any]: ...
    def flush(self) -> None: ...
    def restore(self, newcomer: bool) -> None: ...
    def follow(self) -> None: ...
    def prepare(self, saved: dict[str, Any]) -> None: ...
    def complete_step(self) -> None: ...
    def needs(self) -> list[tuple[str, tuple[int, ...]]]: ...
    def held(self) -> int: ...
    def measure(self, besides: int) -> list[dict[str, Any]] | None: ...
    def measured(self, reports: list[Any]) -> None: ...
    def look_around(self) -> None: ...
    def dismantle(self) -> list[Any]: ...
    def hear(self, message: list[Any]) -> None: ...
    def mark_copies(self) -> None: ...
    @property
    def viewed(self) -> nn.Module | None: ...
    @property
    def unmoved(self) -> str: ...
    @property
    def steps_done(self) -> int: ...
    @property
    def complete(self) -> bool: ...
    @property
    def untouched(self) -> list[LoopState]: ...
    @property
    def parts(self) -> list[Redistributor | None]: ...  # as in Job


@dataclass(eq=False)
class LoopState:
    """One call of `steps()`: its number in the script, the rows of an epoch, its aim, and the steps done of it.

    A resumed script does not run the bodies that are done again. `inside` says how many loops each trainer began in
    them, by the trainer's number, so that those after them have the same numbers as before.
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
    inside: dict[int, int] = field(default_factory=dict)
    outer: LoopState | None = None  # the loop in whose body this one was made
    site: str = ""  # the user's line, until it is gone through

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> LoopState:
        """What `saved` gave, maybe to a later version, which knows of more."""
        return cls(**{one.name: saved[one.name] for one in dataclasses.fields(cls) if one.name in saved})

    def saved(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("outer", "site")}

    def enter(self, outer: LoopState | None, trainer: int) -> None:
        """This call of `steps()` of a trainer was made in the body of `outer`, and of those around it."""
        self.outer = outer
        while outer is not None:
            outer.inside[trainer] = outer.inside.get(trainer, 0) + 1
            outer = outer.outer

    def same_rows(self, rows: int | None, say: Callable[[str], None]) -> int | None:
        """The rows that the phase began with; more are not used, fewer are an error."""
        if self.rows is None or rows is None or rows == self.rows:
            return rows if self.done == 0 else self.rows
        if rows < self.rows:
            what = f"the dataset had {self.rows} rows when the checkpoint was written and has {rows} now"
            raise DatasetError(what, "bring the missing rows back, or start a new run in another --run-dir")
        say(f"the dataset has grown from {self.rows} to {rows} rows; this run goes on with the first {self.rows}")
        return self.rows

    def aim(self, epochs: int | None, total: int | None, last: bool) -> bool:
        """Takes the script's aim. A complete last phase with a larger aim than before goes on: then returns True."""
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
        """The source, held to the rows and epochs of the phase."""
        rows = None if source.rows is None else self.rows
        return dataclasses.replace(source, rows=rows, first_epoch=self.first_epoch)


class SavedFields(dict[str, Any]):
    """What was saved of a trainer; it knows which field was read `last`."""

    last = ""

    def __getitem__(self, name: str) -> Any:
        self.last = name
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.last = name
        return super().get(name, default)

    @contextmanager
    def naming(self, where: str, trainer: int) -> Iterator[None]:
        """Raises CheckpointError, with the field, where something in here cannot be used."""
        try:
            yield
        except (TypeError, LookupError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            if isinstance(error, PacelineError | torch.OutOfMemoryError | torch.distributed.DistError):
                raise
            why = f"{type(error).__name__}: {first_line(error)}"
            what = f"trainer {trainer} cannot go on with the field {self.last} of {where} ({why})"
            raise CheckpointError(what, "take another checkpoint, or start anew in another --run-dir") from error


class State(dict[str, Any]):
    """`trainer.state`: the user's own values. In a resumed run the checkpoint's value wins over the script's first one.

    Numbers, text, tensors and nestings of them are kept as they are; an object with `state_dict()` and
    `load_state_dict()` is filled once: where it is, or else when the script puts it here.
    """

    def __init__(self, fit: Callable[[Any, Callable[[], Any]], Any] = lambda saved, given: saved) -> None:
        """`fit` makes of a saved value one that has its tensors whole or in pieces as the script's own value has them,
        which a function gives.
        """
        super().__init__()
        self._fit = fit
        self._waiting: dict[str, Any] = {}
        self._steps = 0
        self._moved: set[str] = set()  # what the code of a step changes by itself: a loss, a forward, a dataset
        self._before: dict[str, Any] = {}
        self._stamps: dict[str, Any] | None = None

    def restore(self, saved: Mapping[str, Any], local_entries: Mapping[str, Any] | None = None) -> None:
        """Takes what was `saved`, of which `here` has the tensors as this worker usually has them."""
        self._waiting = dict(saved)
        for key, (kind, value) in (saved if local_entries is None else local_entries).items():
            if kind == "plain":
                super().__setitem__(key, value)
            elif key in self:  # the script of a newcomer put it here before it was given anything
                self[key].load_state_dict(self._fit(saved[key][1], self[key].state_dict))
                del self._waiting[key]

    def begin(self) -> None:
        """Training goes on: from here on an assignment is one, not the script's first."""
        self._waiting = {key: entry for key, entry in self._waiting.items() if entry[0] == "object"}

    def step_begins(self) -> None:
        """What its own code changes, and not the body, is brought back should it be computed again. Looked for in steps
        1, 2, 4, 8, ...; from then on a copy is kept.
        """
        self._steps += 1
        self._before = {key: _copy(self[key]) for key in self._moved & self.keys()}
        looks = self._steps & (self._steps - 1) == 0
        self._stamps = {key: _stamp(value) for key, value in self.items()} if looks else None

    def step_computed(self) -> None:
        if self._stamps is not None:
            self._moved |= {key for key, value in self.items() if _stamp(value) != self._stamps.get(key)}

    def step_again(self) -> None:
        """All is as it was before the step. Containers and tensors stay the same objects."""
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

    @by_pieces
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
        for key, value in dict(*others, **values).items():
            self[key] = value

    def __ior__(self, other: Any) -> State:  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self or key in self._waiting:
            self[key] = default
        return self[key]

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds: ("plain", value), or ("object", its state_dict), by key."""
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
    """Differs where a value was changed."""
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
        one_by_one = f"dealt to the {whose} as " + ", ".join(map(str, shares))
        text += ", " + (f"{each} on each of {len(shares)} {whose}" if even else one_by_one)
    if rows is not None:
        text += f"; one epoch = {grid.batches(rows)} steps"
    return text + (f"; {total} steps in all" if total is not None else "")


def describe_grid(
    grid: Grid, shares: list[int], rows: int | None, total: int | None, unit: int, number: int, models: Sequence[str]
) -> dict[str, Any]:
    """What the journal keeps of it. Shares are of units of so many workers. Of several trainers, who train `models` of
    these classes, it is that of this number.
    """
    kinds = dict(enumerate(models))
    sizes = {"global_batch": grid.global_batch, "micro": grid.micro, "micro_batches": len(grid.cut(grid.global_batch))}
    text = grid_text(grid, shares, rows, total, _whose(unit))
    if len(kinds) > 1:  # steps are counted over all of them
        text = f"{trainer_names(kinds)[number]}: {text.replace(' steps in all', ' steps of its own')}"
    about = {"trainer": number, "model": kinds[number], "rows": rows}
    return {**sizes, **about, "shares": shares, "unit": unit, "text": text}


def resumed_grid(recorded: Grid, now: Grid, micro: int | None, done: int, say: Callable[[str], None]) -> Grid:
    """The recorded grid wins, unless the script or the plan says another: then that, named as what it is."""
    same = now.global_batch == recorded.global_batch
    requested = Grid(now.global_batch, micro or (recorded.micro if same else now.micro))
    if requested != recorded:
        say(
            f"changed mathematics: global batch {recorded.global_batch} in micro-batches of {recorded.micro} rows "
            f"until step {done}, from here {requested.global_batch} in micro-batches of {requested.micro}"
        )
    return requested


def _whose(unit: int) -> str:
    return "workers" if unit == 1 else f"units of {unit} workers"


def idle_text(grid: Grid, weights: Sequence[float], unit: int = 1) -> tuple[str, str] | None:
    """For people, where units that are to have a share get none: whose they are, and which `micro` would serve."""
    count, wanted = len(grid.cut(grid.global_batch)), sum(weight > 0 for weight in weights)
    idle = _idle(count, weights)
    if not idle:
        return None
    micro = min(grid.micro, -(-grid.global_batch // wanted))
    while micro and _idle(-(-grid.global_batch // micro), weights):
        micro = micro // 2 if micro > 8 else micro - 1
    advice = f"the plan micro={micro} has one for each of the {wanted} {_whose(unit)}" if micro else ""
    no_advice = f"for {wanted} {_whose(unit)} the global batch would need more rows than {grid.global_batch}"
    stay = "1 micro-batch stays" if count == 1 else f"{count} micro-batches stay"
    idle = [number * unit + mate for number in idle for mate in range(unit)]
    have = "has" if len(idle) == 1 else "have"
    return (
        f"{ranks(idle)} {have} nothing to do while the {stay} whole",
        f"{advice or no_advice}, which changes the mathematics",
    )


def _idle(micro_batches: int, weights: Sequence[float]) -> list[int]:
    shares = zip(weights, deal(micro_batches, weights), strict=True)
    return [worker for worker, (weight, share) in enumerate(shares) if weight and not share]
