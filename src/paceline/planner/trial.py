"""A trial run: some steps of the user's script under one plan, which are measured and thrown away.

`paceline plan` starts a run of the script for each plan that it tries, with a request for a trial. After the last step
each worker ends, and worker 0 writes what was measured. Nothing of a trial is left in the run that follows it.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from paceline.base.heartbeat import HEARTBEAT
from paceline.comm.communicator import Group
from paceline.compute.merge_policy import TRIES
from paceline.planner.descriptions import TrialResult, as_json, usual
from paceline.planner.probe import HOP, hop_seconds
from paceline.session.process_memory import peak_memory
from paceline.train.step import Step
from paceline.train.step_context import StepContext

WARM_UP = 2  # first steps, in which models are compared and buffers allocated
STEADY = 6  # first steps, which are slower than later ones, and left out if there is time


class Trial:
    """Measures the steps of one trainer until `steps` are measured.

    A trial ends earlier when its steps have taken so many `seconds`, or with the script's first loop.
    """

    def __init__(self, context: StepContext, steps: int, seconds: float) -> None:
        self._context, self._steps, self._most = context, steps, seconds
        self._seconds: list[float] = []
        self._parts: dict[str, float] = {}
        self._sent_before: dict[str, float] = {}
        self._ended = time.perf_counter()
        self._passed = 0.0
        self._of_rows: list[float] = []  # seconds of a row, without waiting for others
        self._together = 0  # rows
        self._busy: list[float] = []  # seconds of each step in which this worker did not wait for others
        self._waited = HEARTBEAT.all_waited
        self._total = 0  # steps of the loop
        self._last: Step | None = None

    def observe(self, step: Step) -> None:
        """Adds a step that has been applied. Ends the script after the last one."""
        now = time.perf_counter()
        taken, self._ended = (now - self._ended) / step.steps, now
        self._seconds.append(taken)
        waited, self._waited = HEARTBEAT.all_waited - self._waited, HEARTBEAT.all_waited
        self._busy.append(max(0.0, taken - waited / step.steps))
        if share := step.batch.share:
            self._of_rows.append(max(0.0, step.spent["compute"] - step.waited) / sum(m.rows for m in share))
            self._together = max(self._together, min(step.options.merge, len(share)) * max(m.rows for m in share))
        for part, seconds in step.spent.items():
            self._parts[part] = self._parts.get(part, 0.0) + seconds
        loops = self._context.run.script.loops
        # A loop over one epoch may be one of many.
        self._total = loops[0].total or 0 if len(loops) == 1 and loops[0].epochs != 1 else 0
        # All workers must end after the same step, also those that came after the first one. With parameter servers,
        # they do not know how long others took.
        made, warm_up = -(-step.done // step.steps), self._warm_up(step)
        if made > 1 and not self._context.plan.server:
            self._passed += max(step.agreed.seconds, default=0.0)
        is_late = self._passed > self._most and made > WARM_UP
        self._last = step
        if made >= warm_up + self._steps or is_late:
            self.end()
        if made in (WARM_UP, warm_up):  # what follows resembles the steps of a long run more
            self._sent_before, self._seconds, self._parts = self._sent(), [], {}
            self._busy, self._of_rows = [], []

    def end(self) -> None:
        """Ends the script with what was measured so far."""
        if self._last is not None and self._seconds:
            self._context.run.check.answer(as_json(self._result(self._last)))

    def _warm_up(self, step: Step) -> int:
        """Returns the number of first steps that are not measured: in some, workers find out how many micro-batches
        they should merge.
        """
        plan, context = self._context.plan, self._context
        units = context.run.team.group.size // context.replica.mesh.unit  # some workers may have come later
        share = -(-step.batch.count // units)
        compared = 0 if plan.one_by_one or share < 2 else 2 * TRIES * math.ceil(math.log2(share))
        return max(STEADY, WARM_UP + compared)

    def _link(self, group: Group) -> tuple[float, float, float] | None:
        """Returns the bandwidth and the latency of the slowest link between hosts, and the seconds in which a stage of
        a pipeline is busy with a message; None if there is one host. Collective.
        """
        if not (links := group.links):
            return None
        rate, latency = min(link.rate for link in links), max(link.latency for link in links)
        hosts = group.hosts
        other = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
        hop = hop_seconds(self._context.job.device, group, (0, other))
        return rate, latency, max(0.0, hop - latency - HOP / rate)

    def _row_seconds(self, step: Step) -> dict[str, float]:
        """Returns the seconds of a row by the rows that were computed together, where several numbers were compared."""
        share = step.batch.share
        return {str(size * share[0].rows): s for size, s in self._context.merging.row_seconds.items()} if share else {}

    def _sent(self) -> dict[str, float]:
        return self._context.reporter.traffic.of(self._context.trainer)

    def _result(self, step: Step) -> TrialResult:
        """Returns what was measured. Collective."""
        context, count = self._context, len(self._seconds)
        group = context.run.team.group
        sent = {kind: round((size - self._sent_before.get(kind, 0)) / count) for kind, size in self._sent().items()}
        group.declare("the figures of a trial", kind="figures")
        measured = [peak_memory(context.job.device), usual(self._busy), usual(self._of_rows), self._together]
        link = self._link(group)
        peaks, each_busy, each_row, together = zip(*group.gather_json(measured), strict=True)
        return TrialResult(
            str(replace(context.plan, data=None).validate(group.size)),  # workers may have come since it began
            group.size,
            step.batch.rows,
            tuple(self._seconds),
            {part: seconds / count for part, seconds in self._parts.items()},
            {kind: size for kind, size in sent.items() if size > 0},
            peaks,
            each_busy,
            self._total,
            context.merging.may_merge,
            self._row_seconds(step),
            each_row,
            max(together),
            link,
        )
