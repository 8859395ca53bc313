"""Waits for file descriptors with poll, which has no limit at 1024."""

from __future__ import annotations

import select
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class HasFileno(Protocol):
    """A socket, a pipe, or what else has a file descriptor."""

    def fileno(self) -> int:
        """Returns the file descriptor."""
        ...


Watched = TypeVar("Watched", bound=int | HasFileno)
_READ = select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL
_WRITE = select.POLLOUT | select.POLLHUP | select.POLLERR | select.POLLNVAL


def wait_for(
    readers: Iterable[Watched], writers: Iterable[Watched] = (), seconds: float | None = None
) -> tuple[list[Watched], list[Watched]]:
    """Those of `readers` that can be read from and of `writers` that can be written to, as soon as there is one, or
    after so many seconds. What has ended or failed can be both: reading it, or writing to it, tells.
    """
    readers, writers = [*readers], [*writers]
    wanted: dict[int, int] = {}
    for watched, events in ((readers, select.POLLIN), (writers, select.POLLOUT)):
        for one in watched:
            wanted[number(one)] = wanted.get(number(one), 0) | events
    poll = select.poll()
    for descriptor, events in wanted.items():
        poll.register(descriptor, events)
    came = dict(poll.poll(None if seconds is None else max(1000.0 * seconds, 0.0)))
    return _those(readers, came, _READ), _those(writers, came, _WRITE)


def can_read(watched: int | HasFileno, seconds: float | None = None) -> bool:
    """Whether there is something to read within so many seconds, or the end."""
    return bool(wait_for([watched], (), seconds)[0])


def number(watched: int | HasFileno) -> int:
    """Its file descriptor."""
    return watched if isinstance(watched, int) else watched.fileno()


def _those(watched: Sequence[Watched], came: dict[int, int], events: int) -> list[Watched]:
    return [one for one in watched if came.get(number(one), 0) & events]
