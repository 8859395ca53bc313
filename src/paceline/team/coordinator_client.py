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

ANSWER = 1.0  # seconds to wait for an answer that the coordinator gives at once
AGAIN = 0.05  # seconds between two attempts
MANY, RAREST = 32, 1.0  # agents from which on each reports less often; most seconds between two reports of an agent
AWAY = 3.0  # seconds without an answer after which the coordinator counts as away
SLOWEST = 10.0  # seconds from the first to the last byte of an answer
LARGEST = 1 << 26  # bytes of an answer
FINAL = (400, 403, 412)  # HTTP statuses of the refusals of a join that stay: bad, of a host left out, of another script
NUMBERS = 10**18  # the number of a request without a session is below


class RefusedError(Exception):
    """The coordinator has refused a request. `code` is the HTTP status, `reply` the body of its answer."""

    def __init__(self, code: int, reply: Mapping[str, Any]) -> None:
        super().__init__(reply.get("refused", f"HTTP status {code}"))
        self.code, self.reply = code, reply


class UnsignedError(ConnectionError):
    """An answer is not signed with the run's token: it comes from another program, or from a run with another token.

    Only its HTTP status `code` is used, to tell the user what is wrong.
    """

    def __init__(self, address: tuple[str, int], code: int = 0) -> None:
        super().__init__(f"the program at {address[0]}:{address[1]} does not know this run's token")
        self.code = code


@dataclass(frozen=True)
class _Session:
    """A session with the coordinator at `address`, under this `key`. `numbers` count the requests by path."""

    address: tuple[str, int]
    key: str
    numbers: dict[str, int] = field(default_factory=lambda: {"/report": 0, "/orders": 0, "/stands": 0})


class CoordinatorClient:
    """Sends an agent's reports to the coordinator and receives its orders, in two threads.

    `newest` are the last orders; `fileno` becomes readable whenever new ones arrive. `introduction` is the message of a
    join. A report is a state: only the newest one is sent, at once, and after that at intervals that it is the same.
    """

    def __init__(self, address: tuple[str, int], token: bytes, introduction: Mapping[str, Any]) -> None:
        self.address, self._token, self._introduction = address, token, dict(introduction)
        self.newest: dict[str, Any] = {}
        self._taken = 0  # the version of the orders that the agent has taken
        self.epoch = 0
        self.run: dict[str, Any] = {}  # the coordinator's description of the run
        self.others: list[tuple[str, int]] = []  # addresses at which another coordinator may have taken over
        self.figures: dict[str, Any] = {}  # fields of a report that the journal gets now and then
        self._clocks = deque[tuple[float, float]](maxlen=64)  # of the last answers: error, offset
        self.answered = time.monotonic()
        self.home = address  # the address that the last answer came from
        self.trouble = ""  # what is wrong with the last answer, if anything
        self.refused: RefusedError | None = None  # a coordinator has refused for good that this agent joins again
        self._session: _Session | None = None
        self._moving = threading.Lock()  # held to change the address, and the session that belongs to it
        self._report: Mapping[str, Any] = {}
        self._answered_report: tuple[Mapping[str, Any], dict[str, Any]] = ({}, {})  # a report and its answer
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
        """Joins the run; returns the numbers of this agent's workers.

        RefusedError: this agent's script, plan or torch differs from the run's (412). UnsignedError: its token is wrong
        (401), or another program answers. OSError: there is no coordinator.
        """
        with self._wire(self.address) as wire:
            self._join(wire)
        return list(self._introduction["numbers"])

    def start(self) -> None:
        """Starts the threads that send reports and receive orders."""
        for what in (self._send, self._listen):
            thread = threading.Thread(target=what, name=f"paceline-{what.__name__.strip('_')}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def fileno(self) -> int:
        """The file descriptor that becomes readable when new orders arrive."""
        return self._news.fileno()

    @property
    def token(self) -> bytes:
        """The secret of the run, by which its members know each other."""
        return self._token

    def take(self) -> dict[str, Any]:
        """Returns the newest orders."""
        with suppress(BlockingIOError):
            while self._news.recv(4096):
                pass
        newest = self.newest  # a thread replaces them
        self._taken = newest.get("version", 0)
        return newest

    def put(self, report: Mapping[str, Any]) -> None:
        """Sets the state that is to be reported."""
        with self._fresh:
            self._report = report
            self._fresh.notify_all()

    def tell(self, path: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Sends these messages in turn, in a thread of its own; does nothing if there is no coordinator."""
        session = self._session

        def send() -> None:
            assert session is not None
            with suppress(OSError, RefusedError, ValueError, FormatError), self._wire(session.address) as wire:
                for message in messages:
                    self._ask(wire, session, "POST", path, message)

        if session is not None:
            threading.Thread(target=send, name="paceline-tell", daemon=True).start()

    def settled(self, report: Mapping[str, Any]) -> bool:
        """Whether the coordinator has a report and has decided about it, and the agent has taken its orders since."""
        answered_report, answer = self._answered_report
        return answered_report is report and not answer["open"] and self._taken >= answer["version"]

    def move(self, address: tuple[str, int]) -> None:
        """Connects to a coordinator at another address from now on."""
        with self._moving:
            self.address = address
            self._drop()
        self._interrupt()

    @property
    def clock(self) -> tuple[float, float] | None:
        """Seconds to add to this host's clock for the coordinator's, and the largest error of that: from the quickest
        of the last answers.
        """
        best = min([*self._clocks], default=None)
        return best and (best[1], best[0])

    @property
    def away(self) -> float:
        """Seconds since the coordinator's last answer."""
        return time.monotonic() - self.answered

    def close(self, report: Mapping[str, Any]) -> None:
        """Stops the threads, and sends a last report if there is a coordinator."""
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
                    last_answered: Mapping[str, Any] = {}
                    while not self._closed and self._session is session and wire.address == session.address:
                        with self._fresh:
                            if self._report is sent:
                                self._fresh.wait(min(BEAT * max(1.0, self.newest.get("agents", 1) / MANY), RAREST))
                            sent = self._report
                        if sent:
                            sent_at = time.time()
                            message = {"same": True} if sent is last_answered else sent
                            message = {"epoch": self.epoch, "clock": self.clock, **self.figures, **message}
                            reply = self._ask(wire, session, "POST", "/report", message)
                            self._set_clock(sent_at, reply.get("clock"), time.time())
                            self._answered_report, last_answered = (sent, reply), sent
                            self._tell()
            except RefusedError as refused:
                with self._moving:
                    if refused.code in (409, 410) and self._session is session:  # the coordinator was started again
                        self._drop()
                if session is None and refused.code in FINAL:
                    self.refused = refused
                    self._tell()
                    return
            except (OSError, ValueError, FormatError) as error:
                self._set_trouble(error)
                if self.away > AWAY:
                    self._interrupt()  # the answer with orders may never come
                if self.away > AWAY and self.others:  # a coordinator at one of these may have taken over
                    known = [self.address, *(other for other in self.others if other != self.address)]
                    self.move(known[1 % len(known)])
                    self.others = [*known[1:], known[0]]
            time.sleep(AGAIN)
            sent = {}

    def _set_clock(self, asked: float, clock: Sequence[float] | None, answered: float) -> None:
        """Measures the clock offset as NTP does (RFC 5905): from the times at which a request left and arrived, and its
        answer left and arrived.
        """
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
                        orders = self._ask(wire, session, "GET", f"/orders?version={known}", None)
                        if orders["epoch"] < self.epoch:  # from a coordinator that another one has taken over from
                            break
                        known = orders["version"]
                        self.newest = orders
                        self._tell()
            except RefusedError:
                known = 0
            except (OSError, ValueError, FormatError) as error:
                self._set_trouble(error)
            time.sleep(AGAIN)

    def _set_trouble(self, error: OSError | ValueError | FormatError) -> None:
        """Keeps what is wrong with an answer. Who does not know the token may answer anything, and ends nothing."""
        self.trouble = error.what if isinstance(error, FormatError) else ""
        if isinstance(error, UnsignedError):
            self.trouble = str(error)

    def _interrupt(self) -> None:
        if self._hearing is not None:
            self._hearing.interrupt()

    def _tell(self) -> None:
        with suppress(OSError):  # closed, or full of news
            self._wake.send(b"!")

    def _drop(self) -> None:
        """Ends the session."""
        self._session = None
        self._joined.clear()

    def _wire(self, address: tuple[str, int], patience: float = ANSWER) -> Wire:
        return Wire(address, self._token, patience)

    def _join(self, wire: Wire) -> _Session:
        """Begins a session. ConnectionError: the other thread has meanwhile moved to another coordinator."""
        generation = self.newest.get("generation") or {"number": 0, "members": []}
        introduction = {**self._introduction, "generation": [generation["number"], generation["members"]]}
        terms = ask_once(wire, "/join", introduction, self.epoch)
        check_terms(terms)
        self._introduction["numbers"] = terms["numbers"]
        session = _Session(wire.address, terms["session"])
        with self._moving:
            if self.address != wire.address:
                raise ConnectionError("the coordinator has moved to another address")
            self._session, self.epoch, self.run = session, terms["epoch"], terms["run"]
            self._clocks.clear()
            self._answered_report = {}, {}  # by a coordinator that may be gone
            self._joined.set()
        self.answered = time.monotonic()
        return session

    def _ask(self, wire: Wire, session: _Session, method: str, path: str, message: Any) -> Any:
        kind = path.partition("?")[0]
        session.numbers[kind] += 1
        body = b"" if message is None else json.dumps(message).encode()
        answer = wire.ask(method, path, session.key, session.numbers[kind], body)
        self.answered, self.home = time.monotonic(), wire.address
        return answer


def ask_once(wire: Wire, path: str, message: Any, epoch: int) -> Any:
    """Sends a signed request without a session, to a coordinator that is not of an earlier epoch.

    The request has a random number, so that no earlier answer fits it.
    """
    challenge = ask_challenge(wire)
    if challenge["epoch"] < epoch:
        raise ConnectionError(
            f"the coordinator has epoch {challenge['epoch']}, but one of epoch {epoch} has taken over"
        )
    return wire.ask("POST", path, challenge["challenge"], secrets.randbelow(NUMBERS), json.dumps(message).encode())


def ask_challenge(wire: Wire) -> Any:
    """Asks for the nonce of a request without a session. UnsignedError: the answer is not signed with the token."""
    return wire.ask("GET", "/challenge", secrets.token_hex(16), secrets.randbelow(NUMBERS), b"")


def fence(before: tuple[str, int], token: bytes, epoch: int, address: tuple[str, int]) -> None:
    """Tells the coordinator at `before` that one of a higher epoch listens at `address`."""
    with Wire(before, token) as wire:
        ask_once(wire, "/fence", {"epoch": epoch, "address": address}, 0)


class Wire:
    """A connection to a process with the same token; requests and answers are signed.

    It connects when first used. An answer may take `patience` seconds to begin.
    """

    def __init__(self, address: tuple[str, int], token: bytes, patience: float = ANSWER) -> None:
        self.address, self._token, self._patience, self._over = address, token, patience, False
        self._http = http.client.HTTPConnection(*address, timeout=ANSWER)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def interrupt(self) -> None:
        """Makes a thread that waits for an answer, or is about to, fail. From any thread."""
        self._over = True
        with suppress(OSError, AttributeError):
            self._http.sock.shutdown(socket.SHUT_RDWR)

    def ask(self, method: str, path: str, key: str, number: int, body: bytes) -> Any:
        """Sends a request; returns the answer. FormatError: the answer does not have the path's type. RefusedError: the
        coordinator refused the request. UnsignedError, OSError: as for `fetch`.
        """
        from paceline.team.message_types import ANSWERS, REFUSAL  # needs msgspec

        status, data = self.fetch(method, path, key, number, body)
        name, (host, port) = path.partition("?")[0], self.address
        kind = ANSWERS.get(name, dict[str, Any]) if status == 200 else REFUSAL
        read = read_json(data, kind, f"the answer from {host}:{port} to {name}", SAME_VERSION)
        if status != 200:
            raise RefusedError(status, read)
        return read

    def fetch(self, method: str, path: str, key: str, number: int, body: bytes) -> tuple[int, bytes]:
        """Sends a request; returns status and body of the answer. UnsignedError: the answer is not signed with the
        token. OSError: there is no answer.
        """
        signed = authorization(self._token, method, path, key, number, body)
        if self._http.sock is None:
            way_to(*self.address)
            self._http.connect()
        self._http.sock.settimeout(self._patience)
        if self._over:
            raise ConnectionError("the request was interrupted")
        try:
            self._http.response_class = partial(_Answer, patience=self._patience)  # type: ignore[assignment]
            self._http.request(method, path, body or None, {"Authorization": signed})
            answer = self._http.getresponse()
            signature, data = answer.getheader(SIGNATURE, ""), answer.read(LARGEST + 1)
        except OSError:
            raise
        except http.client.IncompleteRead as error:
            raise ConnectionError("the answer is incomplete") from error
        except (http.client.HTTPException, ValueError) as error:  # the answer is not HTTP, or breaks off
            raise UnsignedError(self.address) from error
        expected = sign_answer(self._token, signed.rpartition(" ")[2], answer.status, data)
        if len(data) > LARGEST or not is_signature(signature, expected):
            raise UnsignedError(self.address, answer.status)
        return answer.status, data


class _Answer(http.client.HTTPResponse):
    """An HTTP answer that must begin within `patience` seconds and end soon after, even if it comes byte by byte."""

    def __init__(self, sock: socket.socket, *given: Any, patience: float, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock, patience))


class _Timed(io.RawIOBase):
    """Reads from a socket until a deadline."""

    def __init__(self, sock: socket.socket, patience: float) -> None:
        self._sock, self._patience, self._end = sock, patience, time.monotonic() + patience + SLOWEST
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        """True: `io` asks for it."""
        return True

    def readinto(self, room: Any) -> int | None:
        """Reads into a buffer. TimeoutError: the deadline is over."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer takes too long")
        self._sock.settimeout(min(left, self._patience))
        return self._raw.readinto(room)

    def close(self) -> None:
        """Closes the file; the socket remains open."""
        self._raw.close()
        super().close()
