"""The coordinator process: HTTP server, tokens, silent hosts.

    GET  /status      as JSON, for this host: curl http://127.0.0.1:PORT/status; for others with the reading key
    GET  /challenge   a nonce with which a join must be signed; if the request is signed, so is the answer
    POST /join        an agent joins with its workers, and gets a session
    POST /report      the state of an agent's workers, or that it has not changed; repeated, so that silence is noticed
    POST /fence       a coordinator of a higher epoch has taken over
    POST /stop        a user with the token asks the run to save a checkpoint and stop
    POST /stacks      a user with the token asks for the stacks of all workers, or for the answers so far
    POST /profile     a user with the token asks for a profile of the workers' next steps
    POST /stands      an agent answers a request for stacks, one worker at a time
    GET  /orders      the state that an agent must bring about, as soon as its version differs from the one it knows

Requests that are not signed with the token, that were sent before, or that belong to another session are refused and
logged. The answer to a signed request is signed as well, so that no other program can give it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import os
import re
import secrets
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from typing import Any

from tornado.web import RequestHandler

from paceline.base.http_server import LimitedServer, know
from paceline.base.journal import NAME, Journal, event_of, lines_from_end
from paceline.base.schema import SAME_VERSION, check, read_file, read_json
from paceline.base.text import ranks
from paceline.errors import FormatError, PacelineError
from paceline.plan import Plan
from paceline.team.auth import ANSWER, is_signature, make_token, read_authorization, sign, sign_answer
from paceline.team.coordinator import HELD, LATER, RETURN, Coordinator
from paceline.team.coordinator_client import RefusedError, fence
from paceline.team.host_failures import FORBIDDEN, HostFailures
from paceline.team.membership import Membership
from paceline.team.message_types import REPORT, REQUESTS, STAND
from paceline.team.reading_key import KEY, reading_key
from paceline.team.stack_requests import StackRequests
from paceline.team.worker_slots import WorkerReport, read_report

SILENT, PATIENCE = 1.5, 10.0  # seconds of silence after which an agent counts as lost: at least, at most
GONE = 0.5  # seconds after which an agent counts as lost once its connection broke
BODY = 1 << 18  # bytes of a request
EASY, SLOW = 20, 1.0  # refusals a second above which each is delayed; seconds of the delay
CHALLENGES = 1000
TOKEN = 1024  # bytes of a token at most
UNKNOWN = 410  # HTTP status for a session of a previous coordinator: its agent joins again
FENCE = 1.0  # seconds between two attempts to reach the previous coordinator
LOOK = 0.1  # seconds between two checks for silent agents
LOADED, RARER = 10.0, 0.05  # least seconds, and part of the run so far, between two journal records of loading
STRANGERS = ("fence", "join", "stop", "stacks", "profile")  # requests without a session
_REQUEST = "a request /{}"
_TEAMS = re.compile(rb'"(?:generation|restarted)"')
SIGNED = {*(("POST", what) for what in (*STRANGERS, "report", "stands")), ("GET", "orders")}


class RefusalError(Exception):
    """A request is refused and has no effect. `code` is the HTTP status, `more` are further fields of the reply."""

    def __init__(self, code: int, why: str, **more: Any) -> None:
        super().__init__(why)
        self.code, self.why, self.more = code, why, more


class ReplayError(RefusalError):
    """A signed request was sent before: the sender of the copy gets no signed answer to it."""


@dataclass
class Session:
    """What the coordinator keeps of an agent that has joined."""

    agent: str
    host: str
    numbers: dict[str, int] = field(default_factory=dict)  # number of the last request, by path
    seen: float = 0.0  # when the agent sent its last report
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=40))  # seconds between two reports
    broken: float = math.inf  # when its connection for orders broke
    lost: bool = False
    clock: tuple[float, float] | None = None  # offset and error of its clock, as the journal has them
    began: float = 0.0
    loading_recorded_at: float = -math.inf  # when the journal got its last record of loading
    last_report: tuple[Mapping[str, Any], dict[int, WorkerReport]] | None = None  # and its workers' parts of it

    @property
    def deadline(self) -> float:
        """When the agent counts as lost: later if its reports are usually slow."""
        patience = min(PATIENCE, max(SILENT, 4 * max(self.gaps, default=0.0)))
        return min(self.seen + patience, self.broken + GONE)


class Service:
    """Answers requests with the coordinator's decisions, and passes reports and the time on to it."""

    def __init__(self, coordinator: Coordinator, token: bytes, run: Mapping[str, Any], record: Any) -> None:
        self._coordinator, self._token, self._run, self._record = coordinator, token, run, record
        self._sessions: dict[str, Session] = {}  # by their keys
        self._challenges: deque[str] = deque(maxlen=CHALLENGES)
        self._waiting: set[asyncio.Future[None]] = set()
        self._news = asyncio.Event()
        self._published_version = 0
        self._refused: Counter[str] = Counter()
        self._refusals: deque[float] = deque(maxlen=EASY)
        self._stack_requests = StackRequests(Path(run["folder"]))
        self.key = reading_key(Path(run["folder"]))
        self._profile: dict[str, Any] = {}
        self._troubles: dict[str, set[tuple[float, str, str]]] = {}  # by agent: those of its last report

    # ---- requests

    def challenge(self) -> Any:
        """Answers GET /challenge with a nonce that may be used once."""
        self._challenges.append(secrets.token_hex(16))
        return {"challenge": self._challenges[-1], "epoch": self._coordinator.epoch}

    def status(self) -> Any:
        """Answers GET /status with the run's state."""
        hosts = {session.agent: session.host for session in self._sessions.values() if not session.lost}
        return {"run": self._run["folder"], "agents": hosts, **self._coordinator.status()}

    def answer(self, what: str, session: Session | None, body: bytes) -> Any:
        """Answers a signed request. FormatError: its body has the wrong type; RefusalError."""
        request = read_json(body, REQUESTS[what], _REQUEST.format(what), SAME_VERSION)
        respond = getattr(self, f"_answer_{what}")
        return respond(request) if session is None else respond(session, request)

    def _answer_join(self, request: Mapping[str, Any]) -> Any:
        """Answers POST /join. RefusalError: the agent's script, plan or torch differs from the run's (412)."""
        agent = request["agent"]
        if self._coordinator.moved is not None:
            raise RefusalError(409, "another coordinator has taken over from this one")
        wanted, given = self._run["run"]["same"], request["same"]
        different = [name for name, expected in wanted.items() if given.get(name) not in (expected, None)]
        differs = [[name, wanted[name], given.get(name)] for name in different]
        if differs:
            script = ""
            with suppress(OSError):  # it may be gone
                script = read_file(self._run["run"]["script"]).decode(errors="replace")[:BODY]
            why = f"{agent} has a different {', '.join(different)}"
            raise RefusalError(412, why, differs=differs, script=script)
        machine, earlier = request.get("machine") or request["host"], request.get("failures") or ()
        (host, port), (number, members) = request["standby"], request["generation"]
        if reasons := self._coordinator.refuses(agent, machine, map(tuple, earlier), request["numbers"]):
            self._publish()
            if [host, port] != [*self._run["address"]]:  # else it runs this coordinator, although its workers are out
                raise RefusalError(FORBIDDEN, reasons)
        self._coordinator.recall_generation(number, members)
        numbers, count, spares = request["numbers"], request["count"], min(request["count"], request.get("spares", 0))
        if self._coordinator.defers(numbers, count - spares):
            raise RefusalError(LATER, "the coordinator was restarted, and waits for the hosts of the run")
        numbers = self._coordinator.join(agent, request["logs"], (host, port), numbers, count, spares)
        self._sessions = {key: session for key, session in self._sessions.items() if session.agent != agent}
        key = secrets.token_hex(16)
        self._sessions[key] = Session(agent, request["host"], seen=time.monotonic(), began=time.monotonic())
        self._publish()
        return {"session": key, "numbers": numbers, "epoch": self._coordinator.epoch, "run": self._run["run"]}

    def _answer_fence(self, request: Mapping[str, Any]) -> Any:
        """Answers POST /fence: this coordinator is over, and refers agents to the one at `address`."""
        (host, port), epoch = request["address"], request["epoch"]
        if epoch <= self._coordinator.epoch:
            raise RefusalError(
                409, f"the fence has epoch {epoch}, but this coordinator has epoch {self._coordinator.epoch}"
            )
        if self._coordinator.moved is None:
            self._record("fenced", epoch=epoch, by=f"{host}:{port}")
        self._coordinator.moved = (host, port)
        self._coordinator.version += 1
        self._publish()
        return {}

    def _answer_stop(self, _: Mapping[str, Any]) -> Any:
        """Answers POST /stop: the run saves a checkpoint and stops."""
        if self._coordinator.moved is not None:
            raise RefusalError(409, "another coordinator has taken over from this one")
        self._record("stopping")
        self._coordinator.stop_all()
        self._publish()
        return {"step": self._coordinator.step}

    def _take_figures(self, session: Session, report: Mapping[str, Any], now: float, last: bool) -> None:
        """Journals how long workers waited for rows and what they sent: less often the longer the host takes part, and
        at its end.
        """
        loading = report.get("loaded") or {}
        pause = max(LOADED, RARER * (now - session.began))
        if not loading or (now - session.loading_recorded_at < pause and not last):
            return
        session.loading_recorded_at = now
        traffic = {}
        if report.get("sent"):
            traffic = {"sent": report["sent"], "here": report.get("here", []), "agent": session.agent}
        loaded = {worker: [seconds, int(steps)] for worker, (seconds, steps) in loading.items()}
        busy = {"busy": report["busy"]} if report.get("busy") else {}
        self._record("loaded", host=session.host, workers=loaded, **busy, **traffic)

    def _take_troubles(self, session: Session, troubles: Sequence[tuple[float, str, str]]) -> None:
        """Journals what an agent has noticed of its host, each trouble once."""
        host = self._coordinator.hosts.agents.get(session.agent, session.host)
        known, newest = self._troubles.get(session.agent, set()), [(at, kind, text) for at, kind, text in troubles]
        self._troubles[session.agent] = {*newest}
        for at, kind, text in newest:
            if (at, kind, text) not in known:
                self._record("host", host=host, kind=kind, text=text, since=at)

    def _answer_stacks(self, request: Mapping[str, Any]) -> Any:
        """Answers POST /stacks: asks all agents for stacks, or returns the answers so far."""
        if not request.get("asked"):
            self._stack_requests.ask(session.agent for session in self._sessions.values() if not session.lost)
            self._coordinator.version += 1
            self._publish()
        return self._stack_requests.answer()

    def _answer_profile(self, request: Mapping[str, Any]) -> Any:
        """Answers POST /profile: asks workers to profile their next steps."""
        workers = [*self._coordinator.membership.members]
        steps, which = request["steps"], request["workers"] or workers
        if others := sorted({*which} - {*workers}):
            raise RefusalError(409, f"the run has {ranks(workers)}, but not {ranks(others)}")
        asked = max(self._profile.get("asked", 0) + 1, time.time_ns() // 1_000_000)  # that of no coordinator before
        self._profile = {"asked": asked, "steps": steps, "workers": which}
        self._record("profiling", steps=steps, workers=which)
        self._coordinator.version += 1
        self._publish()
        return {**self._profile, "folder": str(Path(self._run["folder"]).absolute())}

    def _answer_stands(self, session: Session, stand: Mapping[str, Any]) -> Any:
        """Answers POST /stands: keeps the stacks of one worker."""
        if not stand.get("last"):
            check(stand, STAND, _REQUEST.format("stands"), SAME_VERSION)
        self._stack_requests.take(session.agent, stand)
        return {}

    def _answer_report(self, session: Session, report: Mapping[str, Any]) -> Any:
        """Answers POST /report: passes the state of an agent's workers on to the coordinator."""
        received = time.time()
        if report["epoch"] != self._coordinator.epoch:
            epochs = f"the report has epoch {report['epoch']}, but this coordinator has epoch {self._coordinator.epoch}"
            raise RefusalError(409, epochs)
        if not report.get("same"):
            check(report, REPORT, _REQUEST.format("report"), SAME_VERSION)
            workers = {int(number): read_report(worker) for number, worker in report["workers"].items()}
            session.last_report = report, workers
        if session.last_report is None:
            raise RefusalError(409, "the report refers to an earlier one, but this session has sent no report")
        report, workers = {**session.last_report[0], **report}, session.last_report[1]
        now = time.monotonic()
        session.gaps.append(now - session.seen)
        session.seen, session.lost = now, False
        if report.get("leaving"):
            self._coordinator.leaving.add(session.agent)
        self._coordinator.report(session.agent, workers, report["step"], now)
        if len(self._coordinator.membership.entered) >= self._coordinator.min_workers:  # as many as the run begins with
            self._coordinator.min_workers = self._run["run"]["min_workers"]
        if report.get("over") and not self._coordinator.ended:
            self._coordinator.ended = True
            self._coordinator.version += 1
        if report.get("stop"):
            self._coordinator.stop_all()
        if "changes" in report:
            self._coordinator.chooser = session.agent
            self._coordinator.version += report["changes"] != self._coordinator.changes
            self._coordinator.changes = report["changes"]
        if report.get("bye"):
            session.lost = True
            self._coordinator.bye(session.agent)
        self._publish()
        coordinator = self._coordinator
        self._set_clock(session, report.get("clock"), [*workers])
        self._take_figures(session, report, now, bool(report.get("bye")))
        self._take_troubles(session, report.get("troubles") or ())
        return {"version": coordinator.version, "open": coordinator.undecided, "clock": [received, time.time()]}

    def _set_clock(self, session: Session, clock: Any, workers: list[int]) -> None:
        """Journals the clock offset of another host when it has changed, or is known with half the error."""
        if clock is None or session.host == socket.gethostname() or not workers:
            return
        offset, error = clock
        before = session.clock
        if before is None or error < before[1] / 2 or abs(offset - before[0]) > error + before[1]:
            session.clock = offset, error
            self._record("clock", host=session.host, offset=offset, error=error, workers=workers)

    async def orders(self, session: Session, known: int) -> Any:
        """Answers GET /orders as soon as the version is not the `known` one, or after `HELD` seconds."""
        deadline = time.monotonic() + HELD
        session.broken = math.inf
        while known == self._coordinator.version and (left := deadline - time.monotonic()) > 0:
            news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(news)
            try:
                await asyncio.wait_for(news, left)
            except TimeoutError:
                break
            finally:
                self._waiting.discard(news)
        return {
            **self._coordinator.orders(session.agent),
            "stacks": self._stack_requests.asked,
            "profile": self._profile,
        }

    def verify(self, method: str, path: str, header: str, body: bytes) -> tuple[str, int, str]:
        """Returns key, number and signature of a request. RefusalError: it is not signed with the token."""
        given = read_authorization(header)
        if given is None:
            raise RefusalError(401, "the request is not signed")
        key, number, signature = given
        if not is_signature(signature, sign(self._token, method, path, key, number, body)):
            raise RefusalError(401, "the token is wrong")
        return given

    def sign(self, request: str, status: int, body: bytes) -> str:
        """Signs an answer to the request with this signature."""
        return sign_answer(self._token, request, status, body)

    def session(self, path: str, key: str, number: int) -> Session | None:
        """The session of a request; None if it needs none, such as a join. RefusalError: it was sent before."""
        session = self._sessions.get(key)
        if session is None and path.lstrip("/") in STRANGERS:
            if key not in self._challenges:
                raise RefusalError(409, "the request was sent before, or its challenge is too old")
            self._challenges.remove(key)
            return None
        if session is None:
            raise RefusalError(UNKNOWN, "this coordinator does not know the session")
        kind = path.partition("?")[0]
        if number <= session.numbers.get(kind, 0):
            raise ReplayError(409, "the request was sent before")
        session.numbers[kind] = number
        return session

    def broke(self, session: Session) -> None:
        """Takes note that the connection of an agent's request for orders broke."""
        session.broken = min(session.broken, time.monotonic())

    def refuse(self, address: str, what: str) -> float:
        """Counts a refused request for the journal; returns the seconds to let its sender wait."""
        self._refused[f"{what}, from {address}" if address else what] += 1
        now = time.monotonic()
        self._refusals.append(now)
        many = len(self._refusals) == EASY and now - self._refusals[0] < 1.0
        return SLOW if many else 0.0

    # ---- time

    async def watch(self) -> None:
        """Calls the coordinator's `tick`, and reports silent agents to it, for ever."""
        logged = time.monotonic()
        before = time.monotonic()
        while True:
            due = min(self._coordinator.due - time.monotonic(), LOOK)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), max(due, 0.0))
            self._news.clear()
            now = time.monotonic()
            late = now - before - LOOK
            if late > LOOK / 2:  # this process did not run meanwhile, so that time says nothing about the agents
                for session in self._sessions.values():
                    session.seen = min(session.seen + late, now)
            before = now
            self._coordinator.tick(now)
            self._look(now)
            self._publish()
            if self._refused and now - logged > 1.0:
                logged = now
                for what, times in self._refused.items():
                    self._record("refused", what=what, times=times)
                self._refused.clear()

    async def take_over(self) -> None:
        """Fences the previous coordinator, as soon as it can be reached."""
        before, own_address = self._run.get("before"), self._run["address"]
        while before is not None:
            with suppress(OSError, HTTPException, RefusedError, ValueError, FormatError):
                await asyncio.to_thread(fence, tuple(before), self._token, self._coordinator.epoch, own_address)
                return
            await asyncio.sleep(FENCE)

    def _look(self, now: float) -> None:
        for session in self._sessions.values():
            gone = session.broken + GONE < now
            if now > session.deadline and (not session.lost or (gone and session.agent in self._coordinator.awaited)):
                session.lost = True
                why = "disconnected" if gone else f"has been silent for {now - session.seen:.1f} s"
                silence = now - min(session.seen, session.broken)
                self._coordinator.lost_agent(session.agent, f"the agent on {session.host} {why}", silence, ended=gone)

    def _publish(self) -> None:
        if self._coordinator.version != self._published_version:
            self._published_version = self._coordinator.version
            self._news.set()
            for news in self._waiting:
                if not news.done():
                    news.set_result(None)


class Handler(RequestHandler):
    """Handles one HTTP request: verifies it, has the service answer it, and signs the answer."""

    _session: Session | None = None
    _signature = ""  # of the request, once it is verified

    def initialize(self, service: Service) -> None:
        """Takes the service that answers."""
        self._service = service

    def set_default_headers(self) -> None:
        """Leaves out the header that names the server software."""
        self.clear_header("Server")

    async def _answer(self) -> None:
        request, service = self.request, self._service
        what, body = request.path.lstrip("/"), bytes(request.body)
        address = str(request.remote_ip)
        try:
            if (request.method, what) == ("GET", "status"):
                self._may_read(address)
                reply = service.status()
            elif (request.method, what) == ("GET", "challenge"):
                if "Authorization" in request.headers:
                    self._verify(body)
                reply = service.challenge()
            elif (request.method, what) in SIGNED:
                key, number = self._verify(body)
                self._session = service.session(str(request.uri), key, number)
                know(self)
                if self._session is not None and what == "orders":
                    known = self.get_query_argument("version", "")
                    if not (known.isdecimal() and len(known) <= 18):
                        raise RefusalError(400, "a request /orders needs version=, an integer")
                    reply = await service.orders(self._session, int(known))
                else:
                    reply = service.answer(what, self._session, body)
            else:
                raise RefusalError(404, "unknown method or path")
        except RefusalError as refused:
            if isinstance(refused, ReplayError):
                self._signature = ""
            if refused.code not in (UNKNOWN, LATER):
                await asyncio.sleep(service.refuse(address, f"{request.method} /{what}: {refused.why}"))
            self.set_status(refused.code)
            reply = {"refused": refused.why, **refused.more}
        except PacelineError as error:
            await asyncio.sleep(service.refuse(address, f"{request.method} /{what}: {error.what}"))
            self.set_status(400)
            reply = {"refused": str(error)}
        self.set_header("Content-Type", "application/json")
        answer = (json.dumps(reply) + "\n").encode()
        if self._signature:
            self.set_header(ANSWER, service.sign(self._signature, self.get_status(), answer))
        self.finish(answer)

    def _verify(self, body: bytes) -> tuple[str, int]:
        """Returns key and number of a signed request. RefusalError: it is not signed."""
        request = self.request
        header = request.headers.get("Authorization", "")
        key, number, self._signature = self._service.verify(str(request.method), str(request.uri), header, body)
        return key, number

    def _may_read(self, address: str) -> None:
        """Checks that a request for /status is from this host or has the reading key. RefusalError: neither."""
        stream: Any = self.request.connection.stream  # type: ignore[union-attr]
        if ip_address(address).is_loopback or address == stream.socket.getsockname()[0]:
            return
        given, wanted = self.request.headers.get("Authorization", ""), f"Bearer {self._service.key}"
        if not hmac.compare_digest(given.encode(), wanted.encode()):
            raise RefusalError(
                401, f"a request for /status from another host needs the key in the file {KEY} of the run folder"
            )

    get = post = _answer

    def on_connection_close(self) -> None:
        """Notices that an agent's connection broke while it waited for orders."""
        if self._session is not None and self.request.path == "/orders":
            self._service.broke(self._session)


class _Log(logging.Handler):
    """Counts tornado's log records of malformed, oversized and slow requests as refusals."""

    def __init__(self, service: Service) -> None:
        super().__init__(logging.INFO)
        self._service = service

    def emit(self, record: logging.LogRecord) -> None:
        """Counts one log record; prints it as well if it has an exception."""
        if record.exc_info:
            logging.lastResort.handle(record)  # type: ignore[union-attr]
        self._service.refuse("", record.getMessage()[:200])


async def serve(listener: socket.socket, service: Service) -> None:
    """Serves requests on a listening socket, for ever."""
    for name in ("tornado.general", "tornado.application"):
        logger = logging.getLogger(name)
        logger.addHandler(_Log(service))
        logger.setLevel(logging.INFO)
        logger.propagate = False
    limits = {"max_body_size": BODY, "max_header_size": 1 << 14, "max_buffer_size": 2 * BODY}
    handlers = [(".*", Handler, {"service": service})]
    server = LimitedServer(handlers, idle_connection_timeout=10.0, body_timeout=5.0, **limits)
    listener.setblocking(False)
    server.add_socket(listener)
    await asyncio.gather(service.watch(), service.take_over())


def last_generation(folder: Path, since: int, first: tuple[int, list[int]]) -> Membership:
    """The membership of the journal's last generation after byte `since`; `first` if the journal has none."""
    lines = (event_of(line) for line in lines_from_end(folder / NAME, since) if b'"generation"' in line)
    events = (event for event in lines if event.get("event") == "generation" and {"number", "workers"} <= event.keys())
    generations = (
        (event["number"], event["workers"], event["at_once" if "at_once" in event else "number"]) for event in events
    )
    (number, members, at_once), *before = [*islice(generations, 2), (first[0], first[1], first[0])][:2]
    return Membership(tuple(members), number, at_once, before=tuple(before[0][1]) if before else ())


def last_restart(folder: Path, since: int) -> dict[str, Any] | None:
    """The last event of the journal, after byte `since`, that says that the first team starts again; None if there is
    none, or a generation has followed it.
    """
    events = (event_of(line) for line in lines_from_end(folder / NAME, since) if _TEAMS.search(line))
    last = next((event for event in events if event.get("event") in ("generation", "restarted")), {})
    return last if last.get("event") == "restarted" and {"number", "workers", "lives"} <= last.keys() else None


def last_merge(folder: Path, since: int) -> dict[str, Any] | None:
    """The last merge of islands that the previous coordinator decided on and journaled; it remains valid."""
    lines = (event_of(line) for line in lines_from_end(folder / NAME, since) if b'"merge"' in line)
    merge = next((event for event in lines if event.get("event") == "merge"), None)
    return merge and {name: value for name, value in merge.items() if name not in ("at", "event")}


def host_events(folder: Path, since: int) -> list[dict[str, Any]]:
    """What the previous coordinator has journaled of failures of hosts, the oldest first."""
    return [event_of(line) for line in lines_from_end(folder / NAME, since) if b'"host"' in line][::-1]


def main(listener: int, given: Mapping[str, Any]) -> None:
    """Runs a coordinator on an inherited listening socket. `given` is the agent's description of the run."""
    folder = Path(given["folder"])
    journal = Journal(folder)
    run = given["run"]
    membership = last_generation(folder, given["since"], given["generation"])
    least = max(run["min_workers"], 0 if given["again"] else run["begin"])
    coordinator = Coordinator(run["max_restarts"], least, journal.write, membership, given["epoch"])
    coordinator.hosts = HostFailures(run.get("exclude_after"))
    coordinator.spares.size = max(run["workers"], run["begin"])
    plan = Plan.parse(run["given"].get("plan") or "")
    coordinator.first = tuple(range(run["workers"]))
    coordinator.mirrors = bool(run["given"].get("mirror"))
    coordinator.reserved = {*given["numbers"]}
    coordinator.group_sizes = plan.mesh(1).group_sizes
    coordinator.version = time.time_ns() // 1_000_000  # higher than all versions of a previous coordinator
    if given["again"]:
        coordinator.merges.last = last_merge(folder, given["since"])
        coordinator.hosts.recall(host_events(folder, given["since"]))
        if restart := last_restart(folder, given["since"]):
            coordinator.recall_restart(restart, time.monotonic(), time.time() - restart.get("at", time.time()))
        coordinator.recovering = time.monotonic() + RETURN
    token = os.read(0, TOKEN) or make_token(folder)  # on standard input, from the agent that started this process
    service = Service(coordinator, token, given, journal.write)
    asyncio.run(serve(socket.socket(fileno=listener), service))


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
