"""Advances pending collectives and waits for them.

A collective is a generator: it yields the condition that it waits for, and goes on when that is true. So whoever has
time may move all of them on, none blocks in compiled code, and any can be given up at any moment.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline.base.flight_recorder import FLIGHT_RECORDER
from paceline.base.heartbeat import HEARTBEAT
from paceline.comm.c10d_arguments import outside_inference
from paceline.comm.shared_memory import Condition, MismatchError
from paceline.errors import PacelineError, UnsupportedError

Steps = Generator[Condition, None, None]
SPIN = 2e-4  # seconds of polling without a pause, while there is a core for each worker
YIELD = 2e-3  # then seconds of polling that yields to other threads; pauses follow
PAUSE = 3e-4  # seconds between two polls in a short wait
LONG = 3e-3  # at most, in a long wait, as over a slow link: each poll takes some of a core
CALM, LEAST = 1e-3, 5e-5  # seconds between two polls, at most and at least, if nobody is hurried
LOOK = 0.1  # seconds between two searches for the reason of a long wait
SWITCH = 2e-4  # seconds for which another Python thread may keep the interpreter from the engine's thread


@dataclass(frozen=True, slots=True)
class Begun:
    """Marks the condition of a part of a collective that has started everything it does."""

    until: Condition

    def __call__(self) -> bool:
        """Returns whether the condition holds."""
        return self.until()


class Final(Begun):
    """Marks the condition of an operation that has started everything it does: the next one in its queue may start."""


def last(steps: Generator[Condition, None, Any]) -> Generator[Condition, None, Any]:
    """Marks the end of these steps as the end of the operation."""
    while True:
        try:
            until = next(steps)
        except StopIteration as end:
            return end.value
        yield Final(until.until) if isinstance(until, Begun) else until


def not_last(steps: Steps) -> Steps:
    """Removes the mark of an operation's end: more steps follow."""
    for until in steps:
        yield Begun(until.until) if isinstance(until, Final) else until


_REASONS = (RuntimeError, TypeError, ValueError, OSError, MismatchError, PacelineError)
_UNDER_WAY, _CUT_SHORT = RuntimeError(), RuntimeError("the collective was interrupted in this process")


class Owner(Protocol):
    """A group, as the engine needs it."""

    broken: Exception | None
    crowded: bool

    def check_stall(self, operation: Operation, waited: float) -> None:
        """Looks for the reason of a wait. Raises it if there is one."""

    def translate_error(self, operation: Operation, error: Exception) -> Exception:
        """The error that a user should see."""

    def add_waited(self, operation: Operation, waited: float) -> None:
        """Takes note of a finished operation; `waited` are the seconds that this worker waited for it."""


class Operation(dist.Work):
    """One collective or message under way: torch's Work.

    `kind` is its line in the ledger. `name` and `site` (file:line) describe it in errors. `sequence` counts the group's
    collectives; it is 0 for a message. `outcome` is its future's value, `turn` its record in the flight recorder. An
    operation that `overtakes` starts once all before it in its queue have started everything: on a long link these take
    a while to end, and leave it empty. Every `wait` raises the operation's error.
    """

    def __init__(self, owner: Owner, steps: Steps, kind: str, name: str, site: str, sequence: int) -> None:
        super().__init__()
        self.owner, self.kind, self.name, self.site, self.sequence = owner, kind, name, site, sequence
        self.outcome: Any = []
        self.turn = 0
        self.done = self.overtakes = False
        self.hurries = True  # whether the engine's thread is to advance it without pauses
        self.error: Exception | None = None
        self.source: list[int] = []  # the rank that a message came from
        self._steps: Iterator[Condition] = steps
        self._until: Condition | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._pending_futures: list[torch.futures.Future[Any]] = []

    def advance(self) -> bool:
        """Goes on as far as it can without waiting; returns whether it is done."""
        if self.done:
            return True
        error: Exception | None = _CUT_SHORT  # the error if an exception such as KeyboardInterrupt interrupts it
        try:
            if self.owner.broken is not None:
                raise self.owner.broken
            while self._until is None or self._until():
                self._until = next(self._steps)
                ENGINE.turns += 1
            error = _UNDER_WAY
        except StopIteration:
            error = None
        except _REASONS as reason:
            error = self.owner.translate_error(self, reason)
        finally:
            if error is not _UNDER_WAY:
                self.end(error)
        return self.done

    @property
    def final(self) -> bool:
        """Whether it has started everything it does."""
        return self.done or isinstance(self._until, Final)

    def end(self, error: Exception | None) -> None:
        """Ends the operation, unless it has ended. The caller holds the engine's lock."""
        if self.done:
            return
        refused = isinstance(error, UnsupportedError)  # by all workers
        if error is not None and self.sequence and not refused and self.owner.broken is None:
            self.owner.broken = error  # its workers are at different collectives now
        self.error, self._steps, self._until = error, iter(()), None
        self.done = True
        FLIGHT_RECORDER.end(self.turn, error is None)
        if self._pending_futures:
            ENGINE.ended.append(self)

    def complete_future(self) -> None:
        """Completes a future, in the thread that comes first. That thread also runs the future's callbacks."""
        try:
            future = self._pending_futures.pop()
        except IndexError:
            return
        future.set_result(self.outcome)

    def fail(self, error: Exception) -> None:
        """Gives the operation up. Another thread may be advancing it."""
        with ENGINE.lock:
            self.end(error)

    # -- torch's Work -------------------------------------------------------------------------------------------

    def wait(self, timeout: Any = None) -> bool:
        """Waits until it is done. Raises its error, or TimeoutError after `timeout`."""
        seconds = timeout.total_seconds() if timeout else 0.0
        ENGINE.finish(self, seconds if seconds > 0 else None)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self.done or ENGINE.progress(self)

    def is_success(self) -> bool:
        """Whether it is done without an error."""
        return self.is_completed() and self.error is None

    def exception(self) -> Any:
        """Its error, if it has one."""
        return self.error

    def result(self) -> Any:
        """Waits, and returns the value of its future."""
        self.wait()
        return self.outcome

    def synchronize(self) -> None:
        """Waits until it is done."""
        self.wait()

    def source_rank(self) -> int:
        """The rank that a message came from; -1 if unknown."""
        return self.source[0] if self.source else -1

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that the engine's own thread completes. A callback raises the error: setting it directly would end
        DDP's process.
        """
        if self._future is None:
            self._future = torch.futures.Future()
            self._pending_futures.append(self._future)
            if self.done:
                self.complete_future()
            else:
                ENGINE.in_background()
        return self._future.then(self._checked)

    def _checked(self, future: torch.futures.Future[Any]) -> Any:
        if self.error is not None:
            raise self.error
        return future.value()


class ProgressEngine:
    """All operations under way in this process, in queues: a queue's operations go in order, queues side by side.

    A future's callback may itself start operations and wait for them, as DDP's PowerSGD hook does. So futures are
    completed outside the lock. A thread that completes one counts neither as a waiter nor, once it starts an operation,
    as the engine's thread.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Operation]] = {}
        self.lock = threading.Lock()  # held by the thread that advances operations
        self.turns = 0  # steps made in all: pauses grow from the last one
        self.ended: deque[Operation] = deque()  # operations whose futures are not complete yet
        self._waiters: set[int] = set()  # threads that advance operations while they wait
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = self._hurried = False

    def enqueue(self, queue: Hashable, operation: Operation) -> None:
        """Puts an operation at the end of its queue and, if the queue was empty, starts it."""
        with self.lock:
            line = self._queues.setdefault(queue, deque())
            line.append(operation)
            self._advance()
        self._complete_futures()

    def _advance(self) -> None:
        """Advances all operations as far as possible. The caller holds the lock."""
        with outside_inference():
            for queue, line in list(self._queues.items()):
                number = 0
                while number < len(line) and (not number or line[number].overtakes):
                    if line[number].advance() and not number:
                        line.popleft()
                    elif line[number].final:
                        number += 1
                    else:
                        break
                if not line:
                    del self._queues[queue]

    def progress(self, operation: Operation | None = None) -> bool:
        """Advances operations without waiting, unless another thread does; returns whether `operation` is done."""
        if self._queues and self.lock.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self.lock.release()
        self._complete_futures()
        return operation is not None and operation.done

    def _complete_futures(self) -> None:
        """Completes the futures of operations that have ended. The caller does not hold the lock."""
        if not self.ended:
            return
        me = threading.get_ident()
        waits = me in self._waiters
        if waits:  # another thread may have to advance what this one waits for
            self._waiters.discard(me)
            self._wanted.set()
        try:
            while self.ended:
                try:
                    operation = self.ended.popleft()
                except IndexError:  # another thread has it
                    break
                operation.complete_future()
        finally:
            if waits:
                self._waiters.add(me)

    def finish(self, operation: Operation, timeout: float | None = None) -> None:
        """Waits until an operation is done. Raises TimeoutError after `timeout` seconds; the operation goes on."""
        if operation.done:
            return
        began = time.perf_counter()
        looked, owner = began, operation.owner
        moved, turns = began, self.turns
        me, long = threading.get_ident(), False
        self._waiters.add(me)
        try:
            while not self.progress(operation):
                now = time.perf_counter()
                if self.turns != turns:
                    moved, turns = now, self.turns
                self._pause(now - moved, owner.crowded)
                if now - looked > LOOK:
                    looked = now
                    if not long:
                        long = True
                        HEARTBEAT.wait(1)
                    try:
                        owner.check_stall(operation, now - began)
                    except _REASONS as error:  # the reason of the wait: the operation ends
                        operation.fail(error)
                if timeout is not None and now - began > timeout:
                    raise TimeoutError(f"{operation.name} took longer than {timeout:g} s ({operation.site})")
        finally:
            if long:
                HEARTBEAT.wait(-1)
            self._waiters.discard(me)
            if not self._waiters and self._queues:
                self._wanted.set()
        waited = time.perf_counter() - began
        owner.add_waited(operation, waited)
        HEARTBEAT.waited(waited)
        HEARTBEAT.beat()

    @staticmethod
    def _pause(waited: float, crowded: bool) -> None:
        if waited < SPIN and not crowded:
            return
        if waited < YIELD:
            os.sched_yield()
        else:
            time.sleep(max(min(PAUSE, waited / 50), min(LONG, waited / 100)))

    # -- the background -----------------------------------------------------------------------------------------

    def in_background(self, hurried: bool = True) -> None:
        """Advances operations in a thread from now on, until nothing is under way.

        If nobody is `hurried`, that takes little of a core that others compute on.
        """
        self._hurried |= hurried
        known = self._thread
        if (
            known is None or known is threading.current_thread()
        ):  # a thread that completes a future may wait for the operation
            if known is None:
                atexit.register(self.stop)
            self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
            self._thread.start()
            # It competes with the script's own Python for the interpreter.
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH))
        self._wanted.set()

    def _run(self) -> None:
        me = threading.current_thread()  # until another one takes over
        while self._thread is me and not self._ending:
            self._wanted.wait()
            self._wanted.clear()
            moved, turns = time.perf_counter(), self.turns
            while self._queues and not self._waiters and not self._ending and self._thread is me:
                if self.lock.acquire(timeout=PAUSE):
                    try:
                        self._advance()
                        if not any(operation.hurries for line in self._queues.values() for operation in line):
                            self._hurried = False
                    finally:
                        self.lock.release()
                self._complete_futures()
                if self.turns != turns:
                    moved, turns = time.perf_counter(), self.turns
                waited = time.perf_counter() - moved
                if self._hurried:
                    self._pause(waited, True)
                else:
                    time.sleep(max(min(CALM, LEAST + waited / 2), min(LONG, waited / 16)))
            self._hurried &= bool(self._queues)

    def stop(self) -> None:
        """Ends the thread: one that returns from compiled code into a dying interpreter aborts it."""
        self._ending = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def forget(self, owner: Owner, error: Exception) -> None:
        """Ends all operations of a group; callers that wait for them get `error`."""
        with self.lock:
            for queue, line in list(self._queues.items()):
                if any(operation.owner is owner for operation in line):
                    for operation in line:
                        operation.end(error)
                    del self._queues[queue]
        self._complete_futures()


ENGINE = ProgressEngine()
_PARENTS: list[dict[str, Any]] = []


def _in_child() -> None:
    """Gives a forked child, such as a loader's, an engine of its own.

    The child never destroys what it inherited of its parent's groups and stores, even in cycles that wait to be
    collected: their destructors wait for threads that it does not have.
    """
    gc.freeze()
    _PARENTS.append(dict(vars(ENGINE)))
    ENGINE.__init__()  # type: ignore[misc]


with suppress(AttributeError):
    os.register_at_fork(after_in_child=_in_child)
