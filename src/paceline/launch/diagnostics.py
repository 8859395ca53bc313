"""The agent's side of `paceline stacks`: where its workers stand, and their last collectives."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.base.flight_recorder import flight_lines
from paceline.base.heartbeat import SIGNAL, WAITS, WRITES, HeartbeatView
from paceline.base.stacks import CodeLine, catches, held_up, keep, read_place, read_within
from paceline.base.text import called
from paceline.launch.processes import session_members
from paceline.launch.workers import Worker, Workers
from paceline.team.coordinator_client import CoordinatorClient
from paceline.team.stack_requests import packed

IN = "waiting in "  # a collective
ANSWER = 1.0  # seconds that stacks may take
_LOADS = (f"{os.sep}multiprocessing{os.sep}", f"{os.sep}dataloader.py")  # in the stack of a wait for a loader


def family_of(worker: Worker) -> list[int]:
    """The process ids of a worker and of the processes that it started, with its own first."""
    pid = worker.process.pid
    return [pid, *(other for other in session_members({pid}) if other != pid)]


def take_stacks(asked: Sequence[tuple[HeartbeatView, int]], until: float) -> list[str]:
    """Collects the stacks of processes, which are `asked` with the heartbeat page that each writes to. A text is empty
    if the process cannot write stacks, or has not written them before `until` (monotonic seconds).
    """
    waits: dict[int, tuple[int, int]] = {}  # by index: threads that hold the signal back, looks without more
    for index, (pulse, pid) in enumerate(asked):
        if SIGNAL is not None and catches(pid, SIGNAL, int(pulse[WRITES])):
            pulse.clear()
            waits[index] = held_up(pid, SIGNAL), 0
            with suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)
    requested = [*waits]
    while waits and time.monotonic() < until:
        time.sleep(0.005)
        for index, (before, looks) in [*waits.items()]:
            looks = looks + 1 if held_up(asked[index][1], SIGNAL or 0) <= before else 0
            waits[index] = before, looks
            if looks == 2:  # one look may fall between two of its threads
                del waits[index]
    return [pulse.stacks if index in requested else "" for index, (pulse, _) in enumerate(asked)]


@dataclass(frozen=True)
class Standing:
    """The activity of a worker: the stacks of its processes by process id, the line of the user's code (or the line of
    its loader process `loader`, if it waits for one), and its last collectives.
    """

    worker: Worker
    stacks: dict[int, str]
    code_line: CodeLine | None
    loader: int | None
    flight: list[dict[str, Any]]

    @property
    def text(self) -> str:
        """The stacks of all its processes."""
        parts = (f"process {pid}:\n{text.strip() or 'no stack'}\n" for pid, text in self.stacks.items())
        return "\n".join(parts)

    @property
    def name(self) -> str:
        """The name of the worker's files; each process that was started for a worker has its own."""
        return called(self.worker.rank) + (f".{self.worker.life}" if self.worker.life else "")

    def about(self) -> dict[str, Any]:
        """The first line of the file of collectives: the worker and the process that it describes."""
        number, life, pid = self.worker.rank, self.worker.life, self.worker.process.pid
        return {"worker": number, "life": life, "host": socket.gethostname(), "pid": pid, "at": round(time.time(), 6)}

    @property
    def files(self) -> tuple[str, str]:
        """The texts of the files of stacks and of collectives; each is empty if there are none."""
        return self.text if self.stacks else "", flight_lines(self.about(), self.flight) if self.flight else ""

    def keep(self, folder: Path) -> None:
        """Writes both files into a run folder."""
        keep(folder, self.name, *self.files)

    def says(self) -> dict[str, Any]:
        """The fields of the worker's line in a table: its `state` and the `place` in its code; `since`, `group` and
        `number` of a collective in which it waits; and the `newest` number of each group.
        """
        newest = {record["group"]: record["number"] for record in self.flight if record["number"]}
        waits = next((r for r in self.flight if r["ended"] is None and r["number"]), None)
        waits = waits or next((r for r in self.flight if r["ended"] is None), None)
        state, more = self._state(waits), dict[str, Any]()
        if waits is not None and state.startswith(IN):
            more = {"since": waits["begun"], "group": waits["group"], "number": waits["number"]}
        return {"state": state, "place": str(self.code_line or ""), "newest": newest, **more}

    def _state(self, waits: dict[str, Any] | None) -> str:
        main = self.stacks.get(self.worker.process.pid, "").rpartition("\n\n")[2]
        if self.worker.stopped < math.inf:
            return "stopped (SIGSTOP)"
        if not main:
            return "no stack: it is starting, is ending, or blocks the signal"
        if waits is not None and re.search(r'paceline/comm/progress_engine\.py", line \d+ in finish', main):
            return f"{IN}{waits['name']}" + (f" ({waits['group']})" if waits["group"] != "team" else "")
        if self.loader is not None:
            return f"waiting for its loader process {self.loader}"
        if self.worker.pulse[WAITS]:
            return "waiting for other workers"
        within = read_within(main)
        return f"computing, in {within}" if within else "in user code"


def standing(worker: Worker, text: str, until: float) -> Standing:
    """Describes a worker with these stacks; adds the stacks of its loader processes, if it waits for them."""
    pid = worker.process.pid
    stacks, code_line, loader = {pid: text}, read_place(text), None
    if any(word in text.rpartition("\n\n")[2] for word in _LOADS):
        for child in family_of(worker)[1:]:
            (stacks[child],) = take_stacks([(worker.pulse, child)], until)
            child_line = read_place(stacks[child], child=True)
            if child_line is not None and loader is None:
                code_line, loader = child_line, child
    return Standing(worker, stacks, code_line, loader, worker.pulse.flight)


def look_at(workers: Sequence[Worker]) -> list[Standing]:
    """Describes the activity of these workers. An ended or stopped worker has only its collectives."""
    until = time.monotonic() + ANSWER
    alive = [worker for worker in workers if worker.alive and worker.stopped == math.inf]
    asked = zip(alive, take_stacks([(worker.pulse, worker.process.pid) for worker in alive], until), strict=True)
    standing_of = {id(worker): standing(worker, text, until) for worker, text in asked}
    return [standing_of.get(id(w)) or Standing(w, {}, None, None, w.pulse.flight) for w in workers]


class Recorder:
    """Saves the stacks and collectives of an agent's workers, and answers requests for them at the coordinator."""

    def __init__(self, workers: Workers, folder: Path, link: CoordinatorClient) -> None:
        self._workers, self._folder, self._link = workers, folder, link
        self._kept: set[tuple[int, int]] = set()  # number and life of the ended workers that were recorded
        self._failed, self._asked = False, 0

    def look(self, end: bool = False) -> None:
        """Acts on new failures, ends and requests. `end`: the run has ended, and no process is left."""
        orders, workers = self._link.newest, self._workers.all
        if orders.get("failing") and not self._failed:
            self._failed = True
            for one in look_at([worker for worker in workers if worker.alive and not end]):
                one.keep(self._folder)
        for worker in workers:
            if (end or not worker.alive) and (worker.rank, worker.life) not in self._kept:
                self._kept.add((worker.rank, worker.life))
                Standing(worker, {}, None, None, worker.pulse.flight).keep(self._folder)
        asked = orders.get("stacks", 0)
        if asked != self._asked and not end:
            self._asked = asked
            standings = look_at([worker for worker in workers if worker.alive and not worker.out]) if asked else []
            entries = [
                {"name": one.name, "files": packed(*one.files), **one.about(), **one.says()} for one in standings
            ]
            self._link.tell("/stands", [{"asked": asked, **one} for one in (*entries, {"last": True})])
