"""Receives what an agent tells its worker: generations, pauses, newcomers, servers, merges, profiles, damage."""

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

At = tuple[str, int, str]  # the address where a newcomer receives the state: host, port, and the salt of its key
Coming = dict[int, At]
EXPECTED = 1.0  # seconds to wait for a generation after a peer was lost, before the agent learns that none came


@dataclass(frozen=True)
class Generation:
    """A generation of the team.

    `members` are numbers of workers in the run, in the order of their ranks; `store` is the address of the store that
    the first member serves. A `planned` generation is entered between two steps, another one at once; `at_once` is the
    number of the newest one of the second kind; workers that are not in it may never receive it. On `hold`, its
    workers wait for the next generation after a step. `detection`: the seconds for which a loss was not known. One that
    `admits` is followed at once by another one, with newcomers that are ready.
    """

    number: int
    members: tuple[int, ...]
    store: tuple[str, int]
    at_once: int = 0
    hold: bool = False
    detection: float = 0.0
    admits: bool = False

    @property
    def planned(self) -> bool:
        """Whether it replaces a generation without a failure."""
        return self.at_once < self.number

    def world(self, world: World, worker: int) -> World:
        """The world of a member."""
        rank, size = self.members.index(worker), len(self.members)
        return replace(world, rank=rank, size=size, store=self.store, job=str(self.number), members=self.members)


class AgentCommands:
    """Receives the agent's commands in a thread; docs/reference/worker-protocol.md lists them. Without an agent (`fd`
    is None) there are none.

    The thread calls `on_urgent` with each generation that must be entered at once, and `on_newcomers` when newcomers
    are `coming` (by number: the address where each receives the state).
    """

    def __init__(
        self, fd: int | None, on_urgent: Callable[[Generation], None], on_newcomers: Callable[[Coming], None]
    ) -> None:
        self.newest: Generation | None = None
        self.coming: Coming = {}
        self.servers: dict[int, At] = {}  # addresses of parameter servers
        self.profile: dict[str, Any] = {}  # which workers are to profile which steps
        self.merge: dict[str, Any] = {}  # the last decision about a merge of islands
        self.paused_by_agent = False  # whether to make no further step for the time being
        self.damaged = -1  # the step of the newest checkpoint that was found damaged
        self._on_urgent, self._on_newcomers = on_urgent, on_newcomers
        self._wrong: FormatError | None = None  # what is wrong with a message that is no command
        self._news = threading.Condition()
        if fd is not None:
            os.set_inheritable(fd, False)
            threading.Thread(target=self._listen, args=(fd,), name="paceline-commands", daemon=True).start()

    def _listen(self, fd: int) -> None:
        unread = b""
        while data := os.read(fd, 1 << 16):
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                try:
                    self._obey(line)
                except FormatError as error:  # messages after it are not read
                    with self._news:
                        self._wrong = error
                        self._news.notify_all()
                    return

    def _obey(self, line: bytes) -> None:
        """Takes a command. FormatError: the line is none."""
        from paceline.team.message_types import COMMAND, GENERATION  # needs msgspec

        what = "a command from the agent"
        message = read_message(line, COMMAND, what)
        if "coming" in message:
            self.coming = {int(number): at for number, at in message["coming"].items()}
            self._on_newcomers(self.coming)
        elif "servers" in message:
            self.servers = {int(number): at for number, at in message["servers"].items()}
        elif "merge" in message:
            with self._news:
                self.merge = message["merge"] or {}
                self._news.notify_all()
        elif "profile" in message:
            self.profile = message["profile"]
        elif "damaged" in message:
            self.damaged = message["damaged"]
        elif "wait" in message:
            self.paused_by_agent = message["wait"]
        else:
            fields = read_message(line, GENERATION, what)
            generation = Generation(**{**fields, "members": tuple(fields["members"])})
            known = self.newest.at_once if self.newest is not None else 0
            with self._news:
                self.newest = generation
                self._news.notify_all()
            if generation.at_once > known:
                self._on_urgent(generation)

    def has_newer(self, than: int, at_once: bool = False) -> bool:
        """Whether there is a generation after number `than`; with `at_once`, one that must be entered at once, even if
        a planned one has followed it: no worker enters the generation `than` any more. FormatError: a wrong command.
        """
        if self._wrong is not None:
            raise self._wrong
        return self.newest is not None and (self.newest.at_once if at_once else self.newest.number) > than

    def wait_until(self, until: Callable[[], bool]) -> None:
        """Waits until `until()` is true, and calls it with every command, and every 0.1 seconds."""
        with self._news, HEARTBEAT.waiting():
            while not until():
                if self._wrong is not None:
                    raise self._wrong
                self._news.wait(0.1)

    def wait(self, than: int, at_once: bool = False, expected: Callable[[], None] | None = None) -> Generation:
        """Waits for a generation after number `than`, as long as the agent lives, and returns the newest one.

        The agent may itself wait for the coordinator. `expected` is called if there is no generation soon.
        """
        deadline = time.monotonic() + EXPECTED
        with self._news, HEARTBEAT.waiting():
            while not self.has_newer(than, at_once):
                if expected is not None and time.monotonic() > deadline:
                    expected()
                    expected = None
                self._news.wait(0.1)
            assert self.newest is not None
            return self.newest
