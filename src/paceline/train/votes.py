"""Votes on who computed a share of a step right: what workers computed of the same micro-batches is compared.

No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Vote:
    """What a worker computed of a share in one attempt at a step. `worker` is its number in the run."""

    worker: int
    attempt: int
    value: Any


Same = Callable[[Vote, Vote], bool]


def majority(votes: Sequence[Vote], same: Same) -> Vote | None:
    """Returns the vote on which most workers agree. None if these are not at least two, or as many agree on another
    one. A worker that contradicts itself agrees with both sides.
    """
    support = [{other.worker for other in votes if same(vote, other)} for vote in votes]
    best = max(range(len(votes)), key=lambda number: len(support[number]), default=None)
    if best is None or len(support[best]) < 2:
        return None
    rivals = (number for number in range(len(votes)) if not same(votes[number], votes[best]))
    return votes[best] if all(len(support[number]) < len(support[best]) for number in rivals) else None


def deviating(votes: Iterable[Vote], right: Vote, same: Same) -> list[Vote]:
    """Returns the votes that differ from the right one."""
    return [vote for vote in votes if not same(vote, right)]


def attempts_by_worker(votes: Iterable[Vote]) -> dict[int, list[int]]:
    """Returns the attempts in which each worker cast one of these votes, by its number."""
    attempts: dict[int, set[int]] = {}
    for vote in votes:
        attempts.setdefault(vote.worker, set()).add(vote.attempt)
    return {worker: sorted(attempts[worker]) for worker in sorted(attempts)}


def partners(kinds: Sequence[Hashable], turn: int) -> list[int]:
    """Returns, for each unit, the unit whose share it computes a second time; every share is computed by one unit.

    `kinds` has the kind of each unit's processors. Units of one kind check each other, so that their bits can be
    compared, and with each `turn` another one, so that every pair meets. Those that are alone in their kind take turns
    among themselves, and each is also its own partner at times.
    """
    classes: dict[Hashable, list[int]] = {}
    for unit, kind in enumerate(kinds):
        classes.setdefault(kind, []).append(unit)
    partner = list(range(len(kinds)))
    alone = [units[0] for units in classes.values() if len(units) == 1]
    for units in [alone, *(units for units in classes.values() if len(units) > 1)]:
        shift = turn % len(units) if units is alone and units else 1 + turn % max(1, len(units) - 1)
        for number, unit in enumerate(units):
            partner[unit] = units[(number + shift) % len(units)]
    return partner
