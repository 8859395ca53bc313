"""Merges by quorum: late islands are reported, excluded and named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.base.batching import Grid, deal
from paceline.base.text import plural
from paceline.session.run import Run


@dataclass
class MergeQuorum:
    """Of a `trainer` with `count` islands: a merge waits for `least` of them, or for all."""

    run: Run
    trainer: int
    count: int
    least: int | None
    waits: bool = False  # for a decision, which there is where there are several teams and a coordinator
    _last: dict[str, Any] = field(default_factory=dict)  # what was named last, and not written here
    _times: Counter[int] = field(default_factory=Counter)  # that an island was late

    def begin(self, teams: int) -> None:
        """A round begins, among so many teams."""
        self.waits = self.least is not None and teams > 1 and self.run.team.operations.elastic
        if self.least is not None and teams > 1 and not self.waits:
            what = f"quorum={self.least} has no coordinator here"
            self.run.say(f"{what}, which decides who is late: merges wait for all islands", once=True)

    @property
    def decided(self) -> list[int] | None:
        """The islands that are in the merge, once that is decided: none if the round is void."""
        return self.run.team.operations.merge

    @property
    def stops(self) -> bool:
        """Whether to make no further step of the round."""
        return self.run.notice is not None or self.decided is not None

    def tell(self, step: int, made: Sequence[int], ready: Sequence[int], last: bool) -> None:
        """These islands of this worker's team have made the round that begins at a step, or are ready to be merged
        before they have. The `last` merge of a loop waits for all, so that nothing is left.
        """
        if self.waits:
            self._tell(step, made, ready, self.count if last or self.least is None else self.least)

    def void(self, step: int) -> None:
        """The round comes to nothing."""
        if self.run.team.operations.elastic:
            self._tell(step, (), (), self.count, void=True)

    def _tell(self, step: int, made: Sequence[int], ready: Sequence[int], quorum: int, void: bool = False) -> None:
        operations = self.run.team.operations
        told: dict[str, Any] = {"turn": operations.done, "number": operations.number, "trainer": self.trainer}
        told |= {"step": step, "made": [*made], "ready": [*ready], "count": self.count, "quorum": quorum, "void": void}
        operations.world.tell("round", told=told)

    def wait(self) -> None:
        """This team has made the round: waits until it is decided who is in the merge, or all are to stop."""
        if self.waits:
            self.run.team.operations.await_merge(lambda: self.run.notice is not None)

    def write(self) -> None:
        """For the journal, what was named last; again in a new generation: who wrote it may be lost."""
        if self._last and self.run.main:
            self.run.journal.write("late", trainer=self.trainer, **self._last)
            self._last = {}

    def name(self, step: int, told: Mapping[str, Any]) -> None:
        """After a merge of so many steps: who was late, and which rows were not taken."""
        self._last = {"step": step, **told} if told["late"] or told["missed"] else {}
        if not self._last:
            return
        self.write()
        missed = {int(island): where for island, where in told["missed"].items()}
        for island in sorted({*told["late"]} | {*missed}):
            self._times[island] += 1
            if self._times[island] & (self._times[island] - 1):  # said by and by
                continue
            which = "without" if island in told["late"] else "with"
            text = f"the merge after step {step} is {which} island {island}"
            if island in missed:
                text += f", which came too late for {_rows(missed[island])}: they are not trained on"
            if times := self._times[island] - 1:
                text += f"; so it was {plural(times, 'time')} before"
            self.run.say(text)


def report_dropped_rows(run: Run, trainer: int, late: Mapping[Any, Sequence[int]], done: int, when: str) -> None:
    """Steps and rows that late islands had made, and that come to nothing after so many steps."""
    for island, (steps, rows) in late.items():
        run.journal.write("uncounted", trainer=trainer, step=done, island=int(island), rows=rows)
        run.say(
            f"island {island} was late when {when}: the {plural(rows, 'row')} of the "
            f"{plural(steps, 'step')} that it had begun are not trained on, and it goes on from the merged weights"
        )


def _rows(where: Sequence[int]) -> str:
    first, last, rows = where
    return f"{plural(rows, 'row')} of step{'s' if last > first else ''} {first}" + f" to {last}" * (last > first)


def part(grid: Grid, rows: int, island: int, count: int) -> tuple[range, int]:
    """Which micro-batches of a global batch of so many rows are an island's, and how many rows they have."""
    cuts = grid.cut(rows)
    run = deal(len(cuts), [1.0] * count)[island]
    return run, sum(len(cuts[number]) for number in run)


def missed(grid: Grid, sizes: Sequence[int], first: int, at: Mapping[int, int], count: int) -> Iterator[Any]:
    """Of each island that has not taken its part of all global batches of a round, of these `sizes` and from step
    `first` on: its number; the first and last step (from 1) and the rows of what it has not taken.
    """
    for island, taken in sorted(at.items()):
        rows = sum(part(grid, size, island, count)[1] for size in sizes[taken:])
        if rows:
            yield island, [first + taken + 1, first + len(sizes), rows]
