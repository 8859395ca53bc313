"""Shared page through which an agent sees its worker's progress and requests its stacks."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from paceline.base.environment import pulse_descriptor
from paceline.base.flight_recorder import FLIGHT_RECORDER, SIZE, read_flight

NAME = "paceline-pulse"  # of the file in memory
PAGE = 4096  # bytes of the first part, of numbers
BEHIND = PAGE + -(-SIZE // PAGE) * PAGE  # bytes with the ring; behind them the stacks are written
SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None  # libraries take the first and the last ones
MOST = 1 << 20  # bytes of stacks that are read
STEPS = 15  # that are looked at for the usual one
# The page's numbers: the descriptor that stacks are written to, once they are; what has been done, counted in any unit;
# whether a thread waits for other workers; whether the time counts for nothing; steps done; seconds of a usual one;
# those that it waited for rows; the process that the agent started as this worker, once it knows it; and the seconds of
# a usual step in which it did not wait for other workers.
WRITES, BEATS, WAITS, FREE, DONE, USUAL, LOADED, PROCESS, BUSY = range(9)


def is_pulse(descriptor: int | str, pid: int | str = "self") -> bool:
    """Whether an open file of a process is the one that it shares with its agent."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(f"/memfd:{NAME}")
    except OSError:
        return False


class Heartbeat:
    """The worker's side. Without an agent nobody looks at the page."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._waiting: dict[int, int] = {}  # by thread, how deep: each writes to its own entry alone
        self._last: float | None = None
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)  # seconds, and those of them without waiting
        self.all_waited, self._waited_before = 0.0, 0.0  # seconds for other workers: until now, and in earlier steps
        self._leave()

    def _leave(self) -> None:
        self._page = memoryview(bytearray(PAGE)).cast("d")
        FLIGHT_RECORDER.take(bytearray(SIZE))

    def take(self) -> None:
        """From now on the agent sees us, if we are a worker of one."""
        fd = pulse_descriptor()
        if self._fd is not None or fd is None or SIGNAL is None or not is_pulse(fd):
            return
        os.set_inheritable(fd, False)  # what the script starts is none of it
        self._fd = fd
        shared = memoryview(mmap.mmap(fd, BEHIND))
        self._page = shared[:PAGE].cast("d")
        FLIGHT_RECORDER.take(shared[PAGE : PAGE + SIZE])
        # When the interpreter ends it forgets the handler, and what was there before must not end the process.
        with suppress(ValueError):  # in another thread than the main one
            signal.signal(SIGNAL, signal.SIG_IGN)
        faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
        self._page[WRITES] = fd
        os.register_at_fork(after_in_child=self._leave)  # which writes its stacks, and is not seen

    def hand_on(self) -> None:
        """Another program begins in this process, as the same worker."""
        if self._fd is not None:
            os.set_inheritable(self._fd, True)

    @staticmethod
    def process() -> int | None:
        """The number of the process that our agent started as this worker, once it has written it; None where this
        process has not inherited what it is written in.
        """
        fd = pulse_descriptor()
        if fd is None or not is_pulse(fd):
            return None
        while not (pid := int(struct.unpack("d", os.pread(fd, 8, 8 * PROCESS))[0])):
            time.sleep(1e-3)
        return pid

    def beat(self) -> None:
        """Something was done."""
        self._page[BEATS] += 1.0

    def step(self) -> None:
        """An optimizer step has ended."""
        now = time.monotonic()
        if self._last is not None:
            passed = now - self._last
            self._steps.append((passed, max(0.0, passed - (self.all_waited - self._waited_before))))
            middle = (len(self._steps) - 1) // 2  # the median, or the lower one
            self._page[USUAL], self._page[BUSY] = (sorted(each)[middle] for each in zip(*self._steps, strict=True))
        self._last, self._waited_before = now, self.all_waited
        self._page[DONE] += 1.0
        self.beat()

    def loaded(self, seconds: float) -> None:
        """So long the rows of a step were waited for."""
        self._page[LOADED] += seconds

    def waited(self, seconds: float) -> None:
        """So long other workers were waited for."""
        self.all_waited += seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Meanwhile it is for others to do something."""
        self.wait(1)
        try:
            yield
        finally:
            self.wait(-1)

    def wait(self, change: int) -> None:
        """Begins to wait (1), or ends (-1). A thread may do so while it waits already."""
        me = threading.get_ident()
        depth = self._waiting.pop(me, 0) + change
        if depth:
            self._waiting[me] = depth
        self._page[WAITS] = float(bool(self._waiting))
        self.beat()

    @contextmanager
    def free(self) -> Iterator[None]:
        """Meanwhile it may take as long as it likes."""
        self._page[FREE] = 1.0
        try:
            yield
        finally:
            self._page[FREE] = 0.0
            self.beat()


HEARTBEAT = Heartbeat()


class HeartbeatView:
    """The agent's side. `fd` is for the worker."""

    def __init__(self) -> None:
        self.fd = os.memfd_create(NAME)
        os.ftruncate(self.fd, BEHIND)
        self._page = mmap.mmap(self.fd, PAGE)

    def __getitem__(self, field: int) -> float:
        value: float = struct.unpack_from("d", self._page, 8 * field)[0]
        return value

    def belong(self, pid: int) -> None:
        """This process is the worker, and no other one."""
        struct.pack_into("d", self._page, 8 * PROCESS, float(pid))

    def clear(self) -> None:
        """Makes room for stacks: what is written goes on where both have come to."""
        os.ftruncate(self.fd, BEHIND)
        os.lseek(self.fd, BEHIND, os.SEEK_SET)

    @property
    def stacks(self) -> str:
        """What was written since."""
        return os.pread(self.fd, MOST, BEHIND).decode("utf-8", "replace")

    @property
    def flight(self) -> list[dict[str, Any]]:
        """Its last collectives, see `paceline.base.flight_recorder`; also of one that has ended."""
        return read_flight(os.pread(self.fd, SIZE, PAGE))

    def close(self) -> None:
        """Unmaps the shared page, and closes the file."""
        self._page.close()
        os.close(self.fd)
