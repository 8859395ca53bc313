"""A worker group's side of merges by quorum: reports its islands, waits for the decision, reports late islands."""

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
    """Agrees with the coordinator how long a merge waits: for `least` of the trainer's `count` islands, or for all."""

    run: Run
    trainer: int
    count: int
    least: int | None
    waits: bool = False  # for a decision of the coordinator; False with one worker group, or without a coordinator
    _last: dict[str, Any] = field(default_factory=dict)  # the late islands that the journal does not have yet
    _times: Counter[int] = field(default_factory=Counter)  # how often each island was late

    def begin_round(self, groups: int) -> None:
        """Begins a round among `groups` worker groups."""
        self.waits = self.least is not None and groups > 1 and self.run.team.transactions.elastic
        if self.least is not None and groups > 1 and not self.waits:
            text = f"quorum={self.least} has no effect without a coordinator: merges wait for all islands"
            self.run.reporter.say(text, once=True)

    @property
    def decided(self) -> list[int] | None:
        """The islands of the merge once they are decided, else None; empty if the round is void."""
        return self.run.team.transactions.merge

    @property
    def stops(self) -> bool:
        """Whether to run no further step of the round."""
        return self.run.notices.stop_signal is not None or self.decided is not None

    def report(self, step: int, made: Sequence[int], ready: Sequence[int], last: bool) -> None:
        """Reports this group's islands that have completed the round that begins at `step` (`made`), or could be merged
        before they have (`ready`). The `last` merge of a loop waits for all islands, so that no work is left over.
        """
        if self.waits:
            self._send(step, made, ready, self.count if last or self.least is None else self.least)

    def report_void(self, step: int) -> None:
        """Reports that the round is void."""
        if self.run.team.transactions.elastic:
            self._send(step, (), (), self.count, void=True)

    def _send(self, step: int, made: Sequence[int], ready: Sequence[int], quorum: int, void: bool = False) -> None:
        transactions = self.run.team.transactions
        report: dict[str, Any] = {"turn": transactions.done, "number": transactions.number, "trainer": self.trainer}
        report |= {"step": step, "made": [*made], "ready": [*ready]}
        report |= {"count": self.count, "quorum": quorum, "void": void}
        transactions.world.tell("round", told=report)

    def wait(self) -> None:
        """Waits, after the round's last step, for the decision which islands are merged, or until all workers stop."""
        if self.waits:
            self.run.team.transactions.await_merge(lambda: self.run.notices.stop_signal is not None)

    def journal_late(self) -> None:
        """Writes the late islands to the journal. A new generation does so again: the worker that wrote may be lost."""
        if self._last and self.run.reporter.main:
            self.run.reporter.journal.write("late", trainer=self.trainer, **self._last)
            self._last = {}

    def report_late(self, step: int, outcome: Mapping[str, Any]) -> None:
        """Tells users which islands were late for the merge after `step`, and which rows no island has taken."""
        self._last = {"step": step, **outcome} if outcome["late"] or outcome["missed"] else {}
        if not self._last:
            return
        self.journal_late()
        missed = {int(island): where for island, where in outcome["missed"].items()}
        for island in sorted({*outcome["late"]} | {*missed}):
            self._times[island] += 1
            if self._times[island] & (self._times[island] - 1):  # at the 1st, 2nd, 4th, 8th, ... time
                continue
            verb = "excludes" if island in outcome["late"] else "includes"
            text = f"the merge after step {step} {verb} island {island}"
            if island in missed:
                text += f", which missed {_describe_rows(missed[island])}: these rows are not used"
            if times := self._times[island] - 1:
                text += f"; the island was late {plural(times, 'time')} before"
            self.run.reporter.say(text)


def report_dropped_rows(run: Run, trainer: int, late: Mapping[Any, Sequence[int]], done: int, when: str) -> None:
    """Reports the steps and rows of late islands that are dropped after `done` steps."""
    for island, (steps, rows) in late.items():
        run.reporter.journal.write("uncounted", trainer=trainer, step=done, island=int(island), rows=rows)
        run.reporter.say(
            f"island {island} was late when {when}: its unmerged work is dropped, {plural(rows, 'row')} of "
            f"{plural(steps, 'step')}, and it continues from the merged weights"
        )


def _describe_rows(where: Sequence[int]) -> str:
    first, last, rows = where
    return f"{plural(rows, 'row')} of step{'s' if last > first else ''} {first}" + f" to {last}" * (last > first)


def island_batches(grid: Grid, rows: int, island: int, count: int) -> tuple[range, int]:
    """Returns an island's micro-batches of a global batch of `rows` rows, and how many rows these have."""
    cuts = grid.cut(rows)
    numbers = deal(len(cuts), [1.0] * count)[island]
    return numbers, sum(len(cuts[number]) for number in numbers)


def missed_rows(grid: Grid, sizes: Sequence[int], first: int, at: Mapping[int, int], count: int) -> Iterator[Any]:
    """Yields (island, [first step, last step, rows]) of what each island has missed of a round; steps count from 1.

    `sizes` are the rows of the round's global batches, `first` is the step before the round, and `at` has the number
    of batches that each island has taken.
    """
    for island, taken in sorted(at.items()):
        rows = sum(island_batches(grid, size, island, count)[1] for size in sizes[taken:])
        if rows:
            yield island, [first + taken + 1, first + len(sizes), rows]
