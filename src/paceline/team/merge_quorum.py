"""Decides which islands take part in a merge.

No torch, no clock, no sockets.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

LEAST = 0.2  # seconds of grace
USUAL, MOST = 0.05, 0.25  # parts of a round's seconds: of grace at least, and at most
ROUNDS = 9  # the last ones, by which the grace goes


@dataclass(frozen=True)
class RoundReport:
    """What a team says of a round, by `turn` (transactions done before it) and `number` of the generation: which of
    `count` islands have `made` it, and which others are `ready` to be merged before they have; how many must have made
    it; `void`: it comes to nothing, and nobody is to go on with it.
    """

    turn: int
    number: int
    trainer: int
    step: int
    made: tuple[int, ...]
    ready: tuple[int, ...]
    count: int
    quorum: int
    void: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> RoundReport | None:
        """What JSON of the type forms.ROUND holds."""
        if given is None:
            return None
        made = {each.name: given[each.name] for each in fields(cls)}
        return cls(**made | {name: tuple(given[name]) for name in ("made", "ready")})


@dataclass
class MergeDecider:
    """`last` is what was decided last, as it is journaled and told."""

    last: dict[str, Any] | None = None
    due: float = math.inf  # when to look again
    _open: tuple[int, int] = (-1, -1)  # turn and generation of the round that is waited for
    _first: float = math.inf  # when its first island had made it
    _full: float = math.inf  # when enough had
    _decided: float = math.nan  # when the round before was
    _spreads: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))  # seconds from the first to enough
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))  # from a merge until enough made it

    def look(self, told: Iterable[RoundReport | None], at_once: int, now: float) -> dict[str, Any] | None:
        """What is decided now, if anything is, of what teams tell. `at_once`: the generation that all are to enter.

        Where a loss has ended the turn before a merge was applied, the same islands are in it again if all of them are
        there still.
        """
        said = [one for one in told if one is not None]
        self.due, last = math.inf, self.last
        key = max(((one.turn, one.number) for one in said), default=(-1, -1))
        if key[1] < at_once or (last is not None and key <= (last["turn"], last["number"])):
            return None
        here = [one for one in said if (one.turn, one.number) == key]
        made = {island for one in here for island in one.made}
        may = made.union(*(one.ready for one in here))
        if key != self._open:
            self._open, self._first, self._full = key, math.inf, math.inf
        if made:
            self._first = min(self._first, now)
        if here and len(made) >= max(one.quorum for one in here):
            self._full = min(self._full, now)
        void, count = any(one.void for one in here), max((one.count for one in here), default=0)
        before = {*last["islands"]} if last is not None and last["turn"] == key[0] else set()
        again = bool(before) and before <= may and not void
        self.due = self._full if len(made) == count else self._full + self._grace()
        if not (void or again) and now < self.due:
            return None
        self.due = math.inf
        merged = set() if void else before if again else may
        if not (void or again):
            self._spreads.append(self._full - self._first)
            self._seconds.extend([self._full - self._decided] if self._decided < now else [])
        self._decided = now
        about = {name: getattr(here[0], name) for name in ("turn", "number", "trainer", "step")}
        late = sorted({*range(count)} - merged)
        self.last = about | {"islands": sorted(merged), "late": late, "void": void}
        return self.last

    def _grace(self) -> float:
        """The usual time from the first island to the one that makes enough, within bounds."""
        if self._full == math.inf:
            return 0.0
        spread = self._full - self._first
        usual = median(self._seconds) if self._seconds else 0.0
        grace = max(median([*self._spreads, spread]), USUAL * usual)
        return max(LEAST, min(grace, MOST * usual) if usual else grace)
