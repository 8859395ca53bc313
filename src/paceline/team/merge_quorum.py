"""Decides, in the coordinator, which islands a merge takes and which are late and left out.

No torch, no clock, no sockets.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

LEAST = 0.2  # least seconds of grace
USUAL, MOST = 0.05, 0.25  # least and most grace, as parts of a round's seconds
ROUNDS = 9  # number of recent rounds that the grace is computed from


@dataclass(frozen=True)
class RoundReport:
    """A team's report of a round of islands.

    `turn` (transactions done before the round) and `number` of the generation identify it. Of `count` islands, some
    have `made` the round, and others are `ready` to be merged before they have; `quorum` islands must have made it.
    `void`: the round has failed, and no group may continue it.
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
        """Makes a report from JSON of the type message_types.ROUND."""
        if given is None:
            return None
        made = {each.name: given[each.name] for each in fields(cls)}
        return cls(**made | {name: tuple(given[name]) for name in ("made", "ready")})


@dataclass
class MergeDecider:
    """Decides which islands take part in a merge. `last` is the last decision, as the journal and the agents get it."""

    last: dict[str, Any] | None = None
    due: float = math.inf  # when to look again
    _open: tuple[int, int] = (-1, -1)  # turn and generation of the undecided round
    _first: float = math.inf  # when its first island had made it
    _full: float = math.inf  # when a quorum had made it
    _decided: float = math.nan  # when the previous round was decided
    _delays: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))  # seconds from the first to the quorum
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))  # from a merge to the next quorum

    def decide(self, reports: Iterable[RoundReport | None], at_once: int, now: float) -> dict[str, Any] | None:
        """Takes the teams' reports; returns the decision if one is due now. `at_once`: the generation all must enter.

        If a loss ended the turn before a merge was applied, the same islands take part again if all still exist.
        """
        known = [report for report in reports if report is not None]
        self.due, last = math.inf, self.last
        key = max(((report.turn, report.number) for report in known), default=(-1, -1))
        if key[1] < at_once or (last is not None and key <= (last["turn"], last["number"])):
            return None
        current = [one for one in known if (one.turn, one.number) == key]
        made = {island for one in current for island in one.made}
        may = made.union(*(one.ready for one in current))
        if key != self._open:
            self._open, self._first, self._full = key, math.inf, math.inf
        if made:
            self._first = min(self._first, now)
        if current and len(made) >= max(one.quorum for one in current):
            self._full = min(self._full, now)
        void, count = any(one.void for one in current), max((one.count for one in current), default=0)
        before = {*last["islands"]} if last is not None and last["turn"] == key[0] else set()
        again = bool(before) and before <= may and not void
        self.due = self._full if len(made) == count else self._full + self._grace()
        if not (void or again) and now < self.due:
            return None
        self.due = math.inf
        merged = set() if void else before if again else may
        if not (void or again):
            self._delays.append(self._full - self._first)
            self._seconds.extend([self._full - self._decided] if self._decided < now else [])
        self._decided = now
        about = {name: getattr(current[0], name) for name in ("turn", "number", "trainer", "step")}
        late = sorted({*range(count)} - merged)
        self.last = about | {"islands": sorted(merged), "late": late, "void": void}
        return self.last

    def _grace(self) -> float:
        """The usual time from the first island to the quorum, within bounds."""
        if self._full == math.inf:
            return 0.0
        delay = self._full - self._first
        usual = median(self._seconds) if self._seconds else 0.0
        grace = max(median([*self._delays, delay]), USUAL * usual)
        return max(LEAST, min(grace, MOST * usual) if usual else grace)
