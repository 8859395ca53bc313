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
SPIN = 2e-4  # seconds of looking without a pause, while there is a core for each worker
YIELD = 2e-3  # then seconds of letting others run in between; after that pauses
PAUSE = 3e-4  # seconds, in a wait that is short
LONG = 3e-3  # seconds at most, in one that is long, as over a slow link: each look takes some of a core
CALM, LEAST = 1e-3, 5e-5  # seconds between two looks, at most and at least, where nobody is in a hurry
LOOK = 0.1  # seconds between two looks for the reason of a long wait
SWITCH = 2e-4  # seconds that another Python thread may keep the interpreter from the one that moves collectives on


@dataclass(frozen=True, slots=True)
class Begun:
    """A condition that a part of a collective waits for when it has begun all that it does."""

    until: Condition

    def __call__(self) -> bool:
        return self.until()


class Final(Begun):
    """The same of a whole operation: what is next in its queue may begin."""


def last(steps: Generator[Condition, None, Any]) -> Generator[Condition, None, Any]:
    """That with which an operation ends."""
    while True:
        try:
            until = next(steps)
        except StopIteration as end:
            return end.value
        yield Final(until.until) if isinstance(until, Begun) else until


def not_last(steps: Steps) -> Steps:
    """What looks like the end of an operation, and is not."""
    for until in steps:
        yield Begun(until.until) if isinstance(until, Final) else until


_REASONS = (RuntimeError, TypeError, ValueError, OSError, MismatchError, PacelineError)
_UNDER_WAY, _CUT_SHORT = RuntimeError(), RuntimeError("the collective was cut short in this process")


class Owner(Protocol):
    """A group, as the engine needs it."""

    broken: Exception | None
    crowded: bool

    def look(self, operation: Operation, waited: float) -> None:
        """Looks for the reason of a wait. Raises it if there is one."""

    def explain(self, operation: Operation, error: Exception) -> Exception:
        """The error that a user should see."""

    def account(self, operation: Operation, waited: float) -> None:
        """Takes note of a finished operation; `waited` are seconds that this worker stood still for it."""


class Operation(dist.Work):
    """One collective or message under way: torch's Work.

    `kind` is its line in the ledger, `name` and `site` (file:line) say what it is in errors; `sequence` counts the
    group's collectives, 0 for a message; `outcome` is what its future holds; `turn` its record in the flight recorder.
    One that `overtakes` begins once all before it in its queue begin nothing more: on a long link these take a while to
    end, and leave it empty. Its error is raised by every `wait`.
    """

    def __init__(self, owner: Owner, steps: Steps, kind: str, name: str, site: str, sequence: int) -> None:
        super().__init__()
        self.owner, self.kind, self.name, self.site, self.sequence = owner, kind, name, site, sequence
        self.outcome: Any = []
        self.turn = 0
        self.done = self.overtakes = False
        self.error: Exception | None = None
        self.source: list[int] = []  # the rank that a message came from
        self._steps: Iterator[Condition] = steps
        self._until: Condition | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._untold: list[torch.futures.Future[Any]] = []

    def advance(self) -> bool:
        """Goes on as far as it can without waiting; whether it is done."""
        if self.done:
            return True
        error: Exception | None = _CUT_SHORT  # what stands if something else comes in between, such as Ctrl-C
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
            error = self.owner.explain(self, reason)
        finally:
            if error is not _UNDER_WAY:
                self.end(error)
        return self.done

    @property
    def final(self) -> bool:
        return self.done or isinstance(self._until, Final)

    def end(self, error: Exception | None) -> None:
        """Ends it, if it has not. Holds the engine's lock."""
        if self.done:
            return
        refused = isinstance(error, UnsupportedError)  # by all alike
        if error is not None and self.sequence and not refused and self.owner.broken is None:
            self.owner.broken = error  # its members stand at different places now
        self.error, self._steps, self._until = error, iter(()), None
        self.done = True
        FLIGHT_RECORDER.end(self.turn, error is None)
        if self._untold:
            ENGINE.ended.append(self)

    def tell(self) -> None:
        """Completes the future, in the thread that comes first. What hangs on it runs here."""
        try:
            future = self._untold.pop()
        except IndexError:
            return
        future.set_result(self.outcome)

    def fail(self, error: Exception) -> None:
        """Gives the operation up. Another thread may be moving it on."""
        with ENGINE.lock:
            self.end(error)

    # -- torch's Work -------------------------------------------------------------------------------------------

    def wait(self, timeout: Any = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        ENGINE.finish(self, seconds if seconds > 0 else None)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.done or ENGINE.poke(self)

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def exception(self) -> Any:
        return self.error

    def result(self) -> Any:
        self.wait()
        return self.outcome

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self.source[0] if self.source else -1

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Completed by the engine's own thread. An error comes out of a `then`: one set directly ends DDP's process."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._untold.append(self._future)
            if self.done:
                self.tell()
            else:
                ENGINE.in_background()
        return self._future.then(self._checked)

    def _checked(self, future: torch.futures.Future[Any]) -> Any:
        if self.error is not None:
            raise self.error
        return future.value()


class ProgressEngine:
    """All operations under way in this process, in queues: what shares a queue goes in order, the rest side by side.

    What hangs on an operation's future may itself begin operations and wait for them, as DDP's PowerSGD hook does. So
    futures are completed outside the lock, and a thread that does so counts neither as a waiter nor, once it begins an
    operation, as the engine's.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Operation]] = {}
        self.lock = threading.Lock()  # who moves operations on
        self.turns = 0  # how often something went on: pauses grow from the last time
        self.ended: deque[Operation] = deque()  # whose futures are not complete yet
        self._waiters: set[int] = set()  # threads that move operations on while they wait
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = self._hurried = False

    def submit(self, queue: Hashable, operation: Operation) -> None:
        """Puts an operation at the end of its queue and, if nothing is before it, begins it."""
        with self.lock:
            line = self._queues.setdefault(queue, deque())
            line.append(operation)
            self._advance()
        self._tell()

    def _advance(self) -> None:
        """Moves everything on as far as it goes. Holds the lock."""
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

    def poke(self, operation: Operation | None = None) -> bool:
        """Moves operations on without waiting, unless somebody else does; whether `operation` is done."""
        if self._queues and self.lock.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self.lock.release()
        self._tell()
        return operation is not None and operation.done

    def _tell(self) -> None:
        """Completes the futures of what has ended. Does not hold the lock."""
        if not self.ended:
            return
        me = threading.get_ident()
        waits = me in self._waiters
        if waits:  # somebody else may have to move on what it waits for now
            self._waiters.discard(me)
            self._wanted.set()
        try:
            while self.ended:
                try:
                    operation = self.ended.popleft()
                except IndexError:  # another thread has it
                    break
                operation.tell()
        finally:
            if waits:
                self._waiters.add(me)

    def finish(self, operation: Operation, timeout: float | None = None) -> None:
        """Waits until an operation is done. TimeoutError after `timeout` seconds, which leaves it under way."""
        if operation.done:
            return
        began = time.perf_counter()
        looked, owner = began, operation.owner
        moved, turns = began, self.turns
        me, long = threading.get_ident(), False
        self._waiters.add(me)
        try:
            while not self.poke(operation):
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
                        owner.look(operation, now - began)
                    except _REASONS as error:  # found out, or broken: it ends here
                        operation.fail(error)
                if timeout is not None and now - began > timeout:
                    raise TimeoutError(f"{operation.name} took longer than {timeout:g} s ({operation.site})")
        finally:
            if long:
                HEARTBEAT.wait(-1)
            self._waiters.discard(me)
            if not self._waiters and self._queues:
                self._wanted.set()
        owner.account(operation, time.perf_counter() - began)
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
        """From now on until nothing is under way, operations are moved on without anybody waiting for them. If nobody
        is `hurried`, that takes little of a core that others compute on.
        """
        self._hurried |= hurried
        known = self._thread
        if known is None or known is threading.current_thread():  # one that completes a future may wait for this
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
                    finally:
                        self.lock.release()
                self._tell()
                if self.turns != turns:
                    moved, turns = time.perf_counter(), self.turns
                waited = time.perf_counter() - moved
                if self._hurried:
                    self._pause(waited, True)
                else:
                    time.sleep(max(min(CALM, LEAST + waited / 2), min(LONG, waited / 16)))
            self._hurried &= bool(self._queues)

    def stop(self) -> None:
        """Ends the thread: one that comes back from compiled code into a dying interpreter aborts it."""
        self._ending = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def forget(self, owner: Owner, error: Exception) -> None:
        """Gives up all operations of a group: their waiters see `error`."""
        with self.lock:
            for queue, line in list(self._queues.items()):
                if any(operation.owner is owner for operation in line):
                    for operation in line:
                        operation.end(error)
                    del self._queues[queue]
        self._tell()


ENGINE = ProgressEngine()
_PARENTS: list[dict[str, Any]] = []


def _in_child() -> None:
    """A loader's child starts with an engine of its own. It never ends what it has of its parent's groups and stores,
    also where they are in cycles that wait to be collected: their destructors wait for threads that it has not got.
    """
    gc.freeze()
    _PARENTS.append(dict(vars(ENGINE)))
    ENGINE.__init__()  # type: ignore[misc]


with suppress(AttributeError):
    os.register_at_fork(after_in_child=_in_child)
