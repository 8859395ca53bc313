"""The agent's connection to the coordinator."""

from __future__ import annotations

import http.client
import io
import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.base.environment import way_to
from paceline.base.schema import SAME_VERSION, read_json
from paceline.errors import FormatError
from paceline.team.auth import ANSWER as SIGNATURE
from paceline.team.auth import authorization, is_signature, sign_answer
from paceline.team.coordinator import BEAT, HELD
from paceline.team.join_options import check_terms

ANSWER = 1.0  # seconds to wait for an answer that needs no time
AGAIN = 0.05  # seconds between two attempts
MANY, RAREST = 32, 1.0  # with more agents they report more seldom, all together as often; seconds between two at most
AWAY = 3.0  # seconds without an answer, after which people are told
SLOWEST = 10.0  # seconds from the first to the last byte of an answer
LARGEST = 1 << 26  # bytes of an answer
NUMBERS = 10**18  # that a request without a session is one of


class RefusedError(Exception):
    """The coordinator refuses what was sent."""

    def __init__(self, code: int, said: Mapping[str, Any]) -> None:
        super().__init__(said.get("refused", f"status {code}"))
        self.code, self.reply = code, said


class UnsignedError(ConnectionError):
    """An answer that is not signed with the run's token: another program gave it, or the run has another token. Nothing
    of it is believed but, where somebody is to be told why, the HTTP status `code`.
    """

    def __init__(self, address: tuple[str, int], code: int = 0) -> None:
        super().__init__(f"what answers at {address[0]}:{address[1]} does not know this run's token")
        self.code = code


@dataclass(frozen=True)
class _Session:
    """What the coordinator at `address` knows this agent by. `numbers` count what it was asked, by path."""

    address: tuple[str, int]
    key: str
    numbers: dict[str, int] = field(default_factory=lambda: {"/report": 0, "/orders": 0, "/stands": 0})


class CoordinatorClient:
    """`newest` are the orders heard last; `fileno` becomes readable with each. `introduction` is what a join says.

    What is reported is a state: only the newest is sent, at once and then, at intervals, that it is the same.
    """

    def __init__(self, address: tuple[str, int], token: bytes, introduction: Mapping[str, Any]) -> None:
        self.address, self._token, self._introduction = address, token, dict(introduction)
        self.newest: dict[str, Any] = {}
        self._taken = 0  # the version of those that the agent has heard of
        self.epoch = 0
        self.run: dict[str, Any] = {}  # what all agents must know of it
        self.others: list[tuple[str, int]] = []  # where a coordinator may be that has taken over
        self.figures: dict[str, Any] = {}  # what the journal is told of now and then
        self._clocks = deque[tuple[float, float]](maxlen=64)  # of the last answers: error, offset
        self.answered = time.monotonic()
        self.home = address  # where the last answer came from
        self.trouble = ""  # what is wrong with the last one, if anything
        self._session: _Session | None = None
        self._moving = threading.Lock()  # of the address, and of the session, which is one's there
        self._report: Mapping[str, Any] = {}
        self._heard: tuple[Mapping[str, Any], dict[str, Any]] = ({}, {})  # a report and its answer
        self._fresh = threading.Condition()
        self._joined = threading.Event()
        self._closed = False
        self._news, self._wake = socket.socketpair()
        self._news.setblocking(False)
        self._wake.setblocking(False)
        self._hearing: Wire | None = None
        self._threads: list[threading.Thread] = []

    # ---- for the agent

    def introduce(self) -> list[int]:
        """Joins; the numbers of this agent's workers.

        RefusedError: this agent's script, plan or torch differs from the run's (412). UnsignedError: its token is wrong
        (401), or what answers is no coordinator of the run. OSError: there is no coordinator.
        """
        with self._wire(self.address) as wire:
            self._join(wire)
        return list(self._introduction["numbers"])

    def start(self) -> None:
        """From now on reports are sent and orders heard."""
        for what in (self._send, self._listen):
            thread = threading.Thread(target=what, name=f"paceline-{what.__name__.strip('_')}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def fileno(self) -> int:
        return self._news.fileno()

    @property
    def token(self) -> bytes:
        return self._token

    def take(self) -> dict[str, Any]:
        """The newest orders."""
        with suppress(BlockingIOError):
            while self._news.recv(4096):
                pass
        newest = self.newest  # a thread brings others
        self._taken = newest.get("version", 0)
        return newest

    def put(self, report: Mapping[str, Any]) -> None:
        """The state that is to be reported."""
        with self._fresh:
            self._report = report
            self._fresh.notify_all()

    def tell(self, path: str, what: Sequence[Mapping[str, Any]]) -> None:
        """Says this, one after another, in a thread of its own; to a coordinator that is not there, nothing."""
        session = self._session

        def send() -> None:
            assert session is not None
            with suppress(OSError, RefusedError, ValueError, FormatError), self._wire(session.address) as wire:
                for said in what:
                    self._ask(wire, session, "POST", path, said)

        if session is not None:
            threading.Thread(target=send, name="paceline-tell", daemon=True).start()

    def settled(self, report: Mapping[str, Any]) -> bool:
        """Whether the coordinator knows of a report, has judged it, and its orders since then were taken."""
        heard, answer = self._heard
        return heard is report and not answer["open"] and self._taken >= answer["version"]

    def move(self, address: tuple[str, int]) -> None:
        """The coordinator is elsewhere from now on."""
        with self._moving:
            self.address = address
            self._drop()
        self._interrupt()

    @property
    def clock(self) -> tuple[float, float] | None:
        """Seconds to be added to this host's clock for the coordinator's, and how wrong that is at most: of the last
        answers, from the one that was the quickest.
        """
        best = min([*self._clocks], default=None)
        return best and (best[1], best[0])

    @property
    def away(self) -> float:
        """Seconds since the coordinator's last answer."""
        return time.monotonic() - self.answered

    def close(self, report: Mapping[str, Any]) -> None:
        """Says a last word, if the coordinator is there."""
        self._closed = True
        with self._fresh:
            self._fresh.notify_all()
        self._interrupt()
        for thread in self._threads:
            thread.join(2 * ANSWER)
        if (session := self._session) is not None:
            with suppress(OSError, RefusedError, ValueError, FormatError), self._wire(session.address) as wire:
                self._ask(wire, session, "POST", "/report", {"epoch": self.epoch, **self.figures, **report})
        self._news.close()
        self._wake.close()

    # ---- the threads

    def _send(self) -> None:
        sent: Mapping[str, Any] = {}
        while not self._closed:
            session = None
            try:
                with self._wire(self.address) as wire:
                    session = self._session or self._join(wire)
                    answered: Mapping[str, Any] = {}
                    while not self._closed and self._session is session and wire.address == session.address:
                        with self._fresh:
                            if self._report is sent:
                                self._fresh.wait(min(BEAT * max(1.0, self.newest.get("agents", 1) / MANY), RAREST))
                            sent = self._report
                        if sent:
                            asked = time.time()
                            told = {"same": True} if sent is answered else sent
                            told = {"epoch": self.epoch, "clock": self.clock, **self.figures, **told}
                            said = self._ask(wire, session, "POST", "/report", told)
                            self._set_clock(asked, said.get("clock"), time.time())
                            self._heard, answered = (sent, said), sent
                            self._tell()
            except RefusedError as refused:
                with self._moving:
                    if refused.code in (409, 410) and self._session is session:  # it was started again
                        self._drop()
            except (OSError, ValueError, FormatError) as error:
                self.trouble = error.what if isinstance(error, FormatError) else ""
                if self.away > AWAY:
                    self._interrupt()  # what it waits for may never come
                if self.away > AWAY and self.others:  # one of these may have taken over
                    known = [self.address, *(other for other in self.others if other != self.address)]
                    self.move(known[1 % len(known)])
                    self.others = [*known[1:], known[0]]
            time.sleep(AGAIN)
            sent = {}

    def _set_clock(self, asked: float, clock: Sequence[float] | None, answered: float) -> None:
        """As NTP does (RFC 5905): from when a request left, came, was answered, and the answer came."""
        if clock is not None:
            came, left = clock
            self._clocks.append(((answered - asked - (left - came)) / 2, (came - asked + left - answered) / 2))

    def _listen(self) -> None:
        known = 0
        while not self._closed:
            self._joined.wait(AGAIN)
            session = self._session
            if session is None:
                continue
            try:
                with self._wire(session.address, HELD + ANSWER) as wire:
                    self._hearing = wire
                    while self._session is session and not self._closed:
                        said = self._ask(wire, session, "GET", f"/orders?version={known}", None)
                        if said["epoch"] < self.epoch:  # of a coordinator that was taken over from
                            break
                        known = said["version"]
                        self.newest = said
                        self._tell()
            except RefusedError:
                known = 0
            except (OSError, ValueError, FormatError) as error:
                self.trouble = error.what if isinstance(error, FormatError) else ""
            time.sleep(AGAIN)

    def _interrupt(self) -> None:
        if self._hearing is not None:
            self._hearing.interrupt()

    def _tell(self) -> None:
        with suppress(OSError):  # closed, or full of news
            self._wake.send(b"!")

    def _drop(self) -> None:
        """The session is over."""
        self._session = None
        self._joined.clear()

    def _wire(self, address: tuple[str, int], patience: float = ANSWER) -> Wire:
        return Wire(address, self._token, patience)

    def _join(self, wire: Wire) -> _Session:
        """Begins a session. ConnectionError: the coordinator was moved meanwhile, by the other thread."""
        generation = self.newest.get("generation") or {"number": 0, "members": []}
        said = {**self._introduction, "generation": [generation["number"], generation["members"]]}
        said = ask_once(wire, "/join", said, self.epoch)
        check_terms(said)
        self._introduction["numbers"] = said["numbers"]
        session = _Session(wire.address, said["session"])
        with self._moving:
            if self.address != wire.address:
                raise ConnectionError("it is elsewhere")
            self._session, self.epoch, self.run = session, said["epoch"], said["run"]
            self._clocks.clear()
            self._joined.set()
        self.answered = time.monotonic()
        return session

    def _ask(self, wire: Wire, session: _Session, method: str, path: str, said: Any) -> Any:
        kind = path.partition("?")[0]
        session.numbers[kind] += 1
        body = b"" if said is None else json.dumps(said).encode()
        answer = wire.ask(method, path, session.key, session.numbers[kind], body)
        self.answered, self.home = time.monotonic(), wire.address
        return answer


def ask_once(wire: Wire, path: str, said: Any, epoch: int) -> Any:
    """A signed request without a session, to a coordinator that is not of an earlier epoch. Its number is a random one,
    so that no answer of before is one to it.
    """
    challenge = ask_challenge(wire)
    if challenge["epoch"] < epoch:
        raise ConnectionError(f"a coordinator of epoch {challenge['epoch']}, which is over")
    return wire.ask("POST", path, challenge["challenge"], secrets.randbelow(NUMBERS), json.dumps(said).encode())


def ask_challenge(wire: Wire) -> Any:
    """What a request without a session must be signed with. UnsignedError: whoever answers has not the run's token."""
    return wire.ask("GET", "/challenge", secrets.token_hex(16), secrets.randbelow(NUMBERS), b"")


def fence(before: tuple[str, int], token: bytes, epoch: int, own: tuple[str, int]) -> None:
    """Tells the coordinator at `before` that one of a higher epoch listens at `own`."""
    with Wire(before, token) as wire:
        ask_once(wire, "/fence", {"epoch": epoch, "address": own}, 0)


class Wire:
    """One connection to whoever has the same token, over which all is signed, in both directions. It is made when first
    used; an answer may take as long as our `patience` to begin.
    """

    def __init__(self, address: tuple[str, int], token: bytes, patience: float = ANSWER) -> None:
        self.address, self._token, self._patience, self._over = address, token, patience, False
        self._http = http.client.HTTPConnection(*address, timeout=ANSWER)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def interrupt(self) -> None:
        """Ends whoever waits for an answer, or is about to. From any thread."""
        self._over = True
        with suppress(OSError, AttributeError):
            self._http.sock.shutdown(socket.SHUT_RDWR)

    def ask(self, method: str, path: str, key: str, number: int, body: bytes) -> Any:
        """The answer, of the type that belongs to the path. FormatError: it is not; RefusedError; UnsignedError and
        OSError as for `fetch`.
        """
        from paceline.team.message_types import ANSWERS, REFUSAL  # needs msgspec

        status, said = self.fetch(method, path, key, number, body)
        name, (host, port) = path.partition("?")[0], self.address
        kind = ANSWERS.get(name, dict[str, Any]) if status == 200 else REFUSAL
        read = read_json(said, kind, f"the answer of {host}:{port} to {name}", SAME_VERSION)
        if status != 200:
            raise RefusedError(status, read)
        return read

    def fetch(self, method: str, path: str, key: str, number: int, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer, once it is known to be signed with the token. UnsignedError: it is not;
        OSError: there is none.
        """
        signed = authorization(self._token, method, path, key, number, body)
        if self._http.sock is None:
            way_to(*self.address)
            self._http.connect()
        self._http.sock.settimeout(self._patience)
        if self._over:
            raise ConnectionError("it was interrupted")
        try:
            self._http.response_class = partial(_Answer, patience=self._patience)  # type: ignore[assignment]
            self._http.request(method, path, body or None, {"Authorization": signed})
            answer = self._http.getresponse()
            given, said = answer.getheader(SIGNATURE, ""), answer.read(LARGEST + 1)
        except OSError:
            raise
        except http.client.IncompleteRead as error:
            raise ConnectionError("the answer broke off") from error
        except (http.client.HTTPException, ValueError) as error:  # it speaks no HTTP, or breaks off
            raise UnsignedError(self.address) from error
        expected = sign_answer(self._token, signed.rpartition(" ")[2], answer.status, said)
        if len(said) > LARGEST or not is_signature(given, expected):
            raise UnsignedError(self.address, answer.status)
        return answer.status, said


class _Answer(http.client.HTTPResponse):
    """An answer that has to begin within our `patience`, and to be there soon after, however it comes."""

    def __init__(self, sock: socket.socket, *given: Any, patience: float, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock, patience))


class _Timed(io.RawIOBase):
    """What comes from a socket."""

    def __init__(self, sock: socket.socket, patience: float) -> None:
        self._sock, self._patience, self._end = sock, patience, time.monotonic() + patience + SLOWEST
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer does not end")
        self._sock.settimeout(min(left, self._patience))
        return self._raw.readinto(room)

    def close(self) -> None:
        self._raw.close()
        super().close()
