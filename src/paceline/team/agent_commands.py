"""What an agent tells its worker: new generations, pauses and stops."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from paceline.base.environment import World
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.schema import read_message
from paceline.errors import FormatError

At = tuple[str, int, str]  # where a newcomer takes the state: host, port, and the salt of the key that it asks for
Coming = dict[int, At]
EXPECTED = 1.0  # seconds to the order after a peer was lost; then it is said that none came


@dataclass(frozen=True)
class Generation:
    """Number and members (workers by their numbers in the run, in the order of their ranks); the address of the store
    that the first one serves. A `planned` one is entered between two steps, another one at once; `at_once` is the
    number of the newest of those: who is not of it may never be told of it. On `hold` its workers wait for the next one
    when they have made a step. `detection`: the seconds for which a loss was not known.
    """

    number: int
    members: tuple[int, ...]
    store: tuple[str, int]
    at_once: int = 0
    hold: bool = False
    detection: float = 0.0

    @property
    def planned(self) -> bool:
        return self.at_once < self.number

    def world(self, mine: World, worker: int) -> World:
        """The world of a member."""
        rank, size = self.members.index(worker), len(self.members)
        return replace(mine, rank=rank, size=size, store=self.store, job=str(self.number), members=self.members)


class AgentCommands:
    """The newest order, heard by a thread. `heard` is called there with each that ends those before it at once, `comes`
    when newcomers are `coming` (by number, and where each takes the state). Without an agent there are none.
    """

    def __init__(self, fd: int | None, heard: Callable[[Generation], None], comes: Callable[[Coming], None]) -> None:
        self.newest: Generation | None = None
        self.coming: Coming = {}
        self.servers: dict[int, At] = {}  # where parameter servers are
        self.profile: dict[str, Any] = {}  # which steps of whom are to be profiled
        self.merge: dict[str, Any] = {}  # which islands are in the one that was decided last
        self.wait_here = False  # whether to make no further step for the time being
        self._heard, self._comes = heard, comes
        self._wrong: FormatError | None = None  # something came that is no order
        self._news = threading.Condition()
        if fd is not None:
            os.set_inheritable(fd, False)
            threading.Thread(target=self._listen, args=(fd,), name="paceline-orders", daemon=True).start()

    def _listen(self, fd: int) -> None:
        unread = b""
        while data := os.read(fd, 1 << 16):
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                try:
                    self._take(line)
                except FormatError as error:  # whatever comes after it is not heard
                    with self._news:
                        self._wrong = error
                        self._news.notify_all()
                    return

    def _take(self, line: bytes) -> None:
        """An order. FormatError: it is none."""
        from paceline.team.message_types import COMMAND, GENERATION  # needs msgspec

        what = "an order of the agent"
        said = read_message(line, COMMAND, what)
        if "coming" in said:
            self.coming = {int(number): at for number, at in said["coming"].items()}
            self._comes(self.coming)
        elif "servers" in said:
            self.servers = {int(number): at for number, at in said["servers"].items()}
        elif "merge" in said:
            with self._news:
                self.merge = said["merge"] or {}
                self._news.notify_all()
        elif "profile" in said:
            self.profile = said["profile"]
        elif "wait" in said:
            self.wait_here = said["wait"]
        else:
            order = read_message(line, GENERATION, what)
            order = Generation(**{**order, "members": tuple(order["members"])})
            known = self.newest.at_once if self.newest is not None else 0
            with self._news:
                self.newest = order
                self._news.notify_all()
            if order.at_once > known:
                self._heard(order)

    def newer(self, than: int, at_once: bool = False) -> bool:
        """Whether a generation after number `than` was ordered; with `at_once`, one that does not wait for a step, even
        if it has been followed by one that does: nobody enters the generation `than` any more. FormatError: what came
        was no order.
        """
        if self._wrong is not None:
            raise self._wrong
        return self.newest is not None and (self.newest.at_once if at_once else self.newest.number) > than

    def hear(self, until: Callable[[], bool]) -> None:
        """Waits until something is so, which is looked at with every order, and now and then."""
        with self._news, HEARTBEAT.waiting():
            while not until():
                if self._wrong is not None:
                    raise self._wrong
                self._news.wait(0.1)

    def wait(self, than: int, at_once: bool = False, expected: Callable[[], None] | None = None) -> Generation:
        """The newest generation after number `than`, once there is one: as long as the agent lives, which may itself
        wait for the coordinator. `expected` is called if it is not there soon.
        """
        deadline = time.monotonic() + EXPECTED
        with self._news, HEARTBEAT.waiting():
            while not self.newer(than, at_once):
                if expected is not None and time.monotonic() > deadline:
                    expected()
                    expected = None
                self._news.wait(0.1)
            assert self.newest is not None
            return self.newest
