"""Describes the grid of global batches to the user: micro-batches, their shares, and workers without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.base.batching import Grid, deal
from paceline.base.text import ranks, trainer_names

LISTED = 16  # workers whose shares are told one by one


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
