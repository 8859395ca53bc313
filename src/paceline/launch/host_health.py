"""Watches a host while workers run: memory errors, disks, the clock, heat, and GPUs. Nothing is read in a worker."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from paceline.base.environment import gpus
from paceline.base.text import size_of
from paceline.launch.host_history import HostEntry

EVERY = 5.0  # seconds between two looks
AGAIN = 60.0  # seconds before the same trouble is reported once more
KEPT = 20  # newest troubles that each report to the coordinator carries
JUMP, APART = 0.5, 1.0  # seconds by which a clock jumps, or differs from the coordinator's, before that is a trouble
LEAST, PART = 1 << 30, 0.02  # free bytes, and part of a file system, below which space is short
# What slows a GPU down: bits of NVML's clocks event reasons.
SLOWDOWNS = {0x8: "a hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "the power brake"}


class ErrorCounter(NamedTuple):
    """A number of errors since the host started. `fatal`: one is enough to distrust the host."""

    kind: str
    what: str
    errors: int
    fatal: bool = False


def _number(path: Path) -> int:
    """The number in a file of the kernel, decimal or hexadecimal; 0 if it has none."""
    with suppress(OSError, ValueError):
        return int(path.read_text().strip(), 0)
    return 0


def counters(root: Path = Path("/")) -> Iterator[ErrorCounter]:
    """The kernel's counters of errors. `root` is the folder that has /sys."""
    for controller in sorted(root.glob("sys/devices/system/edac/mc/mc[0-9]*")):
        name = controller.name
        yield ErrorCounter("memory", f"corrected memory errors of {name}", _number(controller / "ce_count"))
        yield ErrorCounter("memory", f"uncorrected memory errors of {name}", _number(controller / "ue_count"), True)
    throttled = [*root.glob("sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/core_throttle_count")]
    if throttled:
        yield ErrorCounter("processor", "slowdowns of the processor because of heat", sum(map(_number, throttled)))
    for path in sorted(root.glob("sys/block/*/device/ioerr_cnt")):
        yield ErrorCounter("disk", f"I/O errors of {path.parts[-3]}", _number(path))
    for path in sorted(root.glob("sys/fs/ext4/*/errors_count")):
        yield ErrorCounter("disk", f"errors of the file system on {path.parts[-2]}", _number(path), True)


class Gpus:
    """What NVML knows of the GPUs. Without the package or the driver it knows of none."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._events: Any = None
        if not gpus():
            return
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
            self._nvml = pynvml
            self._events = pynvml.nvmlEventSetCreate()
            for handle in self._handles:
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except pynvml.NVMLError:  # no driver, or events are not supported
            return

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The answer of a function of NVML; None if this GPU or this driver lacks it."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None

    def counters(self) -> Iterator[ErrorCounter]:
        """Memory, link and bus errors since the driver was loaded."""
        for number, handle in enumerate(self._handles):
            for kind, title in enumerate(("corrected", "uncorrected")):
                count = self._ask("nvmlDeviceGetTotalEccErrors", handle, kind, 0)
                if count is not None:
                    yield ErrorCounter("GPU", f"{title} memory errors of GPU {number}", int(count), bool(kind))
            if (count := self._ask("nvmlDeviceGetPcieReplayCounter", handle)) is not None:
                yield ErrorCounter("GPU", f"repeated transfers over the bus of GPU {number}", int(count))
            kinds = product(range(getattr(self._nvml, "NVML_NVLINK_MAX_LINKS", 0)), range(4))
            links = [self._ask("nvmlDeviceGetNvLinkErrorCounter", handle, *kind) for kind in kinds]
            if known := [int(count) for count in links if count is not None]:
                yield ErrorCounter("GPU", f"NVLink errors of GPU {number}", sum(known))

    def states(self) -> Iterator[tuple[str, str]]:
        """By a name: what slows GPUs down now, and errors of the driver (XID) since the last look."""
        for number, handle in enumerate(self._handles):
            reasons = int(self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0)
            causes = dict.fromkeys(text for bit, text in SLOWDOWNS.items() if reasons & bit)
            if causes:
                yield f"clock of GPU {number}", f"GPU {number} is slowed down by {' and '.join(causes)}"
        while self._events is not None and (event := self._ask("nvmlEventSetWait_v2", self._events, 0)) is not None:
            yield f"XID {event.eventData}", f"a GPU had the error XID {event.eventData}"


class HostHealth:
    """Compares what is known of a host with the last look. `folder` is where the run writes. `offset` returns the
    seconds by which the coordinator's clock is ahead of this one, and the largest error of that, if they are known.
    """

    def __init__(
        self, folder: Path, offset: Callable[[], tuple[float, float] | None] = lambda: None, root: Path = Path("/")
    ) -> None:
        self._folder, self._offset, self._root = folder, offset, root
        self._gpus = Gpus()
        self._known = {counter.what: counter.errors for counter in self._counters()}
        self._reported: dict[str, float] = {}  # monotonic seconds, by what was reported
        self._ahead = time.time() - time.monotonic()

    def _counters(self) -> Iterator[ErrorCounter]:
        yield from counters(self._root)
        yield from self._gpus.counters()

    def look(self) -> Iterator[HostEntry]:
        """What is new since the last look. The same trouble is reported at most once a minute."""
        for counter in self._counters():
            more = counter.errors - self._known.setdefault(counter.what, counter.errors)
            if more > 0 and self._is_news(counter.what):
                self._known[counter.what] = counter.errors
                yield HostEntry(time.time(), counter.kind, f"{counter.what}: {more} more")
        for name, text in self._gpus.states():
            if self._is_news(name):
                yield HostEntry(time.time(), "GPU", text)
        yield from self._clock()
        yield from self._space()

    def _is_news(self, what: str) -> bool:
        now = time.monotonic()
        if now - self._reported.get(what, -AGAIN) < AGAIN:
            return False
        self._reported[what] = now
        return True

    def _clock(self) -> Iterator[HostEntry]:
        ahead = time.time() - time.monotonic()
        jump, self._ahead = ahead - self._ahead, ahead
        if abs(jump) > JUMP:
            yield HostEntry(
                time.time(), "clock", f"the clock was set {abs(jump):.1f} s {'ahead' if jump > 0 else 'back'}"
            )
        offset, error = self._offset() or (0.0, 0.0)
        if abs(offset) - error > APART and self._is_news("clock"):
            way = "behind" if offset > 0 else "ahead of"
            yield HostEntry(time.time(), "clock", f"the clock is {abs(offset):.1f} s {way} the coordinator's")

    def _space(self) -> Iterator[HostEntry]:
        try:
            about = os.statvfs(self._folder)
        except OSError as error:
            if self._is_news("folder"):
                yield HostEntry(time.time(), "disk", f"the run folder cannot be read ({error.strerror})")
            return
        free = about.f_bavail * about.f_frsize
        if free < min(LEAST, PART * about.f_blocks * about.f_frsize) and self._is_news("space"):
            yield HostEntry(time.time(), "disk", f"{size_of(free)} are free where the run writes")


class HostWatch:
    """Looks at the host in a thread, because a disk that hangs must not stop the agent. `newest` are the last troubles.

    `health` makes what looks, in that thread.
    """

    def __init__(self, health: Callable[[], HostHealth]) -> None:
        self._health, self._over = health, threading.Event()
        self.newest: deque[HostEntry] = deque(maxlen=KEPT)
        self._new: SimpleQueue[HostEntry] = SimpleQueue()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._run, name="paceline-health", daemon=True).start()

    def _run(self) -> None:
        health = self._health()
        while not self._over.wait(EVERY):
            with suppress(OSError):  # a file of the kernel that is gone
                for trouble in health.look():
                    self.newest.append(trouble)
                    self._new.put(trouble)

    def take(self) -> list[HostEntry]:
        """The troubles since the last call. Their times may go back, with the clock."""
        return [self._new.get() for _ in range(self._new.qsize())]

    def close(self) -> None:
        """Lets the thread end."""
        self._over.set()
