"""Messages that lie, between workers, agents, commands and the coordinator: each is taken or refused in one sentence,
and whoever took it goes on.
"""

from __future__ import annotations

import asyncio
import copy
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tellers
import torch
from hypothesis import strategies as st
from mutations import as_json, garbled, mutated
from rich.console import Console
from test_coordinator_link import RUN, TOKEN
from test_damaged_files import fuzz

from paceline.base.environment import SERVERS
from paceline.base.schema import find_wrong
from paceline.base.text import ranks
from paceline.checkpoint.tree import unpack
from paceline.comm.message_reader import decode_message
from paceline.comm.message_types import MESSAGE_TYPES
from paceline.compute import sparse_grads as sparse
from paceline.errors import CheckpointError, FormatError, LaunchError
from paceline.launch.agent import Agent
from paceline.launch.engines import remote_agent as hosted
from paceline.launch.engines.driver_engine import DriverEngine
from paceline.launch.options import LaunchOptions
from paceline.launch.workers import Worker, Workers
from paceline.observe.profiling import profile_of
from paceline.observe.progress import Progress
from paceline.team.agent_commands import AgentCommands
from paceline.team.coordinator import Coordinator
from paceline.team.coordinator_client import RefusedError, Wire
from paceline.team.coordinator_server import RefusalError, Service
from paceline.team.join_options import TermsError, check_terms
from paceline.team.membership import Membership
from paceline.team.message_types import ANSWERS, ORDERS, STATE
from paceline.team.stack_requests import packed, table
from paceline.team.worker_slots import WorkerReport

MANY = pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])
STORE = ["127.0.0.1", 29500]
LATER = (0.0, 0.5, 4.0, 100.0)  # seconds after a message, when the coordinator looks at what it put off
ROUND = {"turn": 3, "number": 0, "trainer": 0, "step": 6, "made": [0], "ready": [], "count": 2, "quorum": 2}
WORKER: dict[str, Any] = {
    **json.loads(json.dumps(vars(WorkerReport(store=("127.0.0.1", 29500), ready=True, formed=0)))),
    "round": {**ROUND, "void": False},
}
FAILED = {
    **WORKER,
    "failed": ["ValueError", 3, "ValueError: no"],
    "status": 1,
    "why": "ended with exit code 1",
    "cause": ["ValueError: no", "at train.py:3"],
    "tail": ["a line"],
}
STOPPED = {**WORKER, "stopped": True, "since": 2.0, "stands": "worker 1 is stopped"}
SERVER = {**WORKER, "at": ["127.0.0.1", 29501, "salt"], "newcomer": True, "holds": True, "round": None}
NEWCOMER = {**SERVER, "waiting": True, "holds": False}
FIGURES = {"clock": [0.1, 0.002], "loaded": {"0": [0.5, 9.0]}, "sent": {"10.0.0.2": 700}, "here": ["10.0.0.1"]}
REST = {"step": 6, "stop": False, "leaving": False}
REPORTS: list[dict[str, Any]] = [
    {"epoch": 1, **FIGURES, **REST, "workers": workers}
    for workers in (
        {"0": WORKER, "1": WORKER},
        {"0": {**WORKER, "servers": 1}, "1": FAILED, str(SERVERS): SERVER},
        {"0": STOPPED, "1": {**WORKER, "leaves": True, "alone": 0}, "2": {**NEWCOMER, "checked": [3, "", 0.5]}},
    )
]
JOIN = {
    "agent": "a (1234)",
    "host": "a",
    "logs": "run/logs",
    "standby": ["127.0.0.1", 29502],
    "numbers": [],
    "count": 2,
    "same": {"script": "76a4c6", "module": None, "arguments": ["--size", "1"], "torch": "2.13.0"},
    "generation": [0, [0, 1]],
}
STAND = {
    "asked": 1,
    "name": "worker-0",
    "files": packed("stacks", "flight"),
    "worker": 0,
    "host": "a",
    "state": "in all_reduce",
    "place": "train.py:3 in main",
    "at": 1795764323.0,
    "since": 1795764321.0,
    "group": "team",
    "number": 3,
    "newest": {"team": 3},
}
REQUESTS: list[tuple[str, Any]] = [
    ("join", JOIN),
    ("join", {**JOIN, "agent": "b (99)", "host": "b", "generation": [3, [0, 1, 2]]}),
    *(("report", report) for report in REPORTS),
    ("report", {"epoch": 1, **FIGURES, "same": True}),
    ("report", {**REPORTS[0], "bye": True}),
    ("report", {**REPORTS[0], "stop": True, "over": True}),
    ("fence", {"address": ["10.0.0.2", 29400], "epoch": 2}),
    ("stop", {}),
    ("stacks", {}),
    ("stacks", {"asked": 1}),
    ("profile", {"steps": 3, "workers": None}),
    ("profile", {"steps": 3, "workers": [0, 1]}),
    ("stands", STAND),
    ("stands", {"asked": 1, "last": True}),
]


def coordinator(folder: Path, again: bool) -> Service:
    """One to which an agent has come, with two workers that train; or that was started again, and waits for it."""
    one = Coordinator(3, 1, lambda event, **about: json.dumps(about), Membership((0, 1)))
    one.recovering = time.monotonic() + 3.0 if again else one.recovering
    service = Service(one, TOKEN, {"folder": str(folder), "run": {**RUN, "same": JOIN["same"]}}, one.record)
    service._stack_requests.asked = 1
    service.answer("join", None, as_json({**JOIN, "numbers": [0, 1] if again else []}))
    (session,) = service._sessions.values()
    if not again:
        service.answer("report", session, as_json(REPORTS[0]))
    return service


def say(service: Service, what: str, body: bytes) -> str:
    """Sends it, and has the coordinator do all that it does by itself then; how it was refused."""
    session = next(iter(service._sessions.values())) if what in ("report", "stands") else None
    refused = ""
    try:
        answer = json.loads(json.dumps(service.answer(what, session, body)))
        assert not find_wrong(answer, ANSWERS.get(f"/{what}", dict[str, Any]))
    except (FormatError, RefusalError) as error:
        refused = str(error)
    for later in LATER:
        service._coordinator.tick(time.monotonic() + later)
    service._look(time.monotonic())
    for session in service._sessions.values():
        orders = json.loads(json.dumps(asyncio.run(service.orders(session, 0))))
        assert not find_wrong(orders, ORDERS)
    json.dumps(service.status())
    return refused


@pytest.mark.parametrize("examples", [30, MANY])
def test_a_changed_request_is_taken_or_refused_by_a_coordinator_that_goes_on(examples: int, tmp_path: Path) -> None:
    def act(asked: list[tuple[str, bytes]]) -> None:
        for again in (False, True):
            service = coordinator(tmp_path, again)
            for what, body in asked:
                say(service, what, body)

    for what, whole in REQUESTS:
        assert say(coordinator(tmp_path, False), what, as_json(whole)) == ""
    kinds = [
        st.tuples(st.just(what), mutated(whole).map(as_json) | garbled(as_json(whole)) | st.just(as_json(whole)))
        for what, whole in REQUESTS
    ]
    fuzz(examples, st.lists(st.one_of(kinds), min_size=1, max_size=3), act)


@pytest.mark.parametrize(
    ("what", "body", "why"),
    [
        ("report", as_json({**REPORTS[0], "step": "7"}), "step: expected int, got str"),
        ("report", as_json({**REPORTS[0], "step": 1e400}), "step: expected int, got float"),
        ("report", as_json({**REPORTS[0], "workers": {"0": {"life": 2**70}}}), 'workers["0"].life: expected int <= '),
        ("report", as_json({"epoch": 1}), "object missing required field step"),
        ("join", as_json({**JOIN, "count": 10**9}), "count: expected int <= 65536"),
        ("join", b"[" * 3000, "it is nested too deeply"),
        ("fence", b'{"epoch": 2, "epoch": 3}', 'the name "epoch" occurs twice'),
        ("profile", b'{"steps": "\xff"}', "byte 11 is not UTF-8"),
        ("stop", b"[]", "expected object, got array"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(what: str, body: bytes, why: str, tmp_path: Path) -> None:
    said = say(coordinator(tmp_path, False), what, body)
    assert said.startswith(f"a request /{what} is damaged: {why}")
    assert said.endswith("; use the same version of Paceline on all hosts")


# -- answers -----------------------------------------------------------------------------------------------------------

ORDERED: dict[str, Any] = {
    "epoch": 1,
    "version": 7,
    "generation": {"number": 1, "members": [0, 1], "store": STORE, "at_once": 1, "detection": 0.0, "hold": False},
    "workers": {"0": {"life": 0, "newcomer": False, "out": False}, "1": {"life": 1, "newcomer": True, "out": False}},
    "store": None,
    "failing": [[1, "a (1234)", "raised ValueError"]],
    "over": False,
    "finished": False,
    "agents": 1,
    "standbys": [STORE],
    "moved": STORE,
    "stop": False,
    "coming": {"2": ["127.0.0.1", 29501, "salt"]},
    "merge": {"turn": 3, "number": 0, "trainer": 0, "step": 6, "islands": [0], "late": [1], "void": False},
    "servers": {"0": ["127.0.0.1", 29501, "salt"]},
    "lines": [[6, "worker 1 is lost", True]],
    "stacks": 1,
    "damaged": 12,
    "profile": {"asked": 1, "steps": 3, "workers": [0]},
}
STANDING = {name: STAND[name] for name in ("host", "state", "place", "at", "since", "group", "number", "newest")}
ANSWERED: dict[str, Any] = {
    "/challenge": {"challenge": 32 * "c", "epoch": 1},
    "/join": {"session": 32 * "1", "numbers": [0], "epoch": 1, "run": RUN},
    "/report": {"version": 1, "open": False, "clock": [1.0, 1.1]},
    "/orders": ORDERED,
    "/stop": {"step": 5},
    "/stacks": {"asked": 1, "waits": ["a"], "folder": "run/stacks", "workers": {"0": STANDING, "1": STANDING}},
    "/profile": {"asked": 1, "steps": 3, "workers": [0, 1], "folder": "run"},
}


def use(path: str, said: Any) -> None:
    """What agents and commands make of an answer that they took."""
    if path == "/join":
        check_terms(said)
    elif path == "/orders":
        follow(said)
    elif path == "/stacks":
        table(said["workers"])
    elif path == "/profile":
        ranks(said["workers"])
        [profile_of(Path(said["folder"]), said["asked"], worker) for worker in said["workers"]]


def follow(orders: dict[str, Any], tell: Callable[[Any], Any] = json.dumps) -> Agent:
    """An agent with a worker that takes these orders."""
    agent = Agent.__new__(Agent)
    worker = SimpleNamespace(rank=0, alive=True, life=0, tell=tell, serves=False, events={})
    worker.process = SimpleNamespace(signal=lambda _: None)
    again: Callable[..., None] = lambda *_: None
    workers = SimpleNamespace(all=[worker], newest={0: worker}, lose=again, preparing=False)
    vars(workers).update(start_team=again, start_newcomer=again)
    link = SimpleNamespace(take=lambda: orders, move=again, newest=orders)
    output = SimpleNamespace(failing=again, show_lines_of=again)
    vars(agent).update(
        _lines=0, _wanted_lives={}, _sent_generation=(0, 0), _coming={}, _merge=None, _servers={}, _profile={}
    )
    vars(agent).update(
        _failing={}, _failing_since={}, _stop=None, _over=False, _standby_address=("127.0.0.1", 1), _declined={}
    )
    vars(agent).update(
        _coordinator=None, _is_held_back=False, _damaged=-1, _link=link, _workers=workers, _output=output
    )
    vars(agent).update(say=lambda *_: None, _try_start=again, _stopping=0.0, _at_once=False, _ending_first=[])
    agent._take_orders()
    return agent


@pytest.mark.parametrize("examples", [30, MANY])
def test_a_changed_answer_is_taken_or_refused(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(answer: tuple[str, int, bytes]) -> None:
        path, status, body = answer
        monkeypatch.setattr(Wire, "fetch", lambda *_: (status, body))
        with suppress(RefusedError if status != 200 else FormatError, FormatError, TermsError):
            use(path, Wire(("127.0.0.1", 1), TOKEN).ask("POST", path, "", 0, b""))

    for path, whole in ANSWERED.items():
        use(path, copy.deepcopy(whole))
    kinds = [
        st.tuples(st.just(path), st.just(200), mutated(whole).map(as_json) | garbled(as_json(whole)))
        for path, whole in ANSWERED.items()
    ]
    refusal = {"refused": "no", "differs": [["plan", "data=2", None]], "script": "import"}
    refused = st.tuples(st.just("/join"), st.just(412), mutated(refusal).map(as_json) | garbled(as_json(refusal)))
    fuzz(examples, st.one_of([*kinds, refused]), act)


# -- what workers tell their agents ------------------------------------------------------------------------------------

EVENTS: list[dict[str, Any]] = [
    {"event": "join", "trainer": True},
    {"event": "ready", "replica": 2},
    {"event": "waiting", "at": ["127.0.0.1", 29501, "salt"]},
    {"event": "serving", "at": ["127.0.0.1", 29501, "salt"]},
    {"event": "servers", "count": 2, "copies": 1},
    {"event": "formed", "number": 1, "seconds": 0.5},
    {"event": "alone", "number": 1},
    {"event": "checked", "step": 12, "damage": "model-1.safetensors: SHA-256 differs", "seconds": 0.5},
    {"event": "round", "told": {**ROUND, "void": False}},
    {"event": "failed", "step": 3, "kind": "ValueError", "text": "no", "what": "ValueError: no", "at": "a.py:3"},
    {"event": "phase", "trainer": 0, "done": [0], "steps": 100, "epochs": 3, "model": "Net", "text": "a grid"},
    {"event": "step", "trainer": 0, "step": 3, "loss": 0.5, "seconds": 1.0, "samples": 64, "steps": 1, "epoch": 0},
    {"event": "step", "trainer": 0, "step": 4, "loss": float("nan"), "seconds": 1.0, "metrics": {"a": 0.5}},
    {"event": "evaluate", "trainer": 0, "results": {"accuracy": 0.5, "n": 10}},
    {"event": "loaders", "pids": [77]},
    {"event": "needs", "plans": [["data=2", [1, 2]]], "besides": 7},
    {"event": "saved", "step": 3},
    {"event": "line", "text": "a line"},
]


@pytest.mark.parametrize("examples", [30, MANY])
def test_a_changed_word_of_a_worker_is_taken_or_passed_over(examples: int) -> None:
    def tell(lines: list[bytes]) -> Worker:
        output = SimpleNamespace(errors=lambda _: "", tail=lambda *_: "")
        memory = SimpleNamespace(grown=lambda: False)
        given: Any = {"memory": memory, "output": output, "process": None, "commands": None, "pulse": None}
        worker = Worker(rank=0, life=0, store=("127.0.0.1", 1), **given)
        with Progress(Console(file=io.StringIO()), kind="rich", every=0.0) as progress:

            def told(_: Worker, event: dict[str, Any]) -> None:
                if event["event"] in ("phase", "step", "evaluate"):
                    getattr(progress, event["event"])(event)
                    progress._show() if progress._pending else None

            agent: Any = SimpleNamespace(_starts_cold=str, _on_event=told)
            Workers._events(agent, worker, b"\n".join([*lines, b""]))
        assert not find_wrong(json.loads(json.dumps(worker.report())), STATE), (
            "the coordinator must take what agents say"
        )
        return worker

    found = tell([as_json(event) for event in EVENTS]).events
    assert found.keys() == {event["event"] for event in EVENTS}
    kinds = [mutated(event).map(as_json) | garbled(as_json(event)) for event in EVENTS]
    fuzz(examples, st.lists(st.one_of(kinds), min_size=1, max_size=4), tell)


# -- what workers, parameter servers and hosts tell each other ---------------------------------------------------------


@pytest.mark.parametrize("examples", [30, MANY])
def test_what_workers_and_servers_tell_each_other_is_taken_or_refused(examples: int) -> None:
    def act(said: tuple[str, bytes]) -> None:
        with suppress(FormatError):
            tellers.hear(*said)

    seeds = [*tellers.told()]
    assert {about for about, _ in seeds} == MESSAGE_TYPES.keys() - {"dealing", "tree", "part"}
    for about, data in seeds:
        # All that is written is read, and stays as it is.
        assert json.dumps(decode_message(data, about, "worker 1"), sort_keys=True) == json.dumps(
            json.loads(data), sort_keys=True
        )
        tellers.hear(about, data)
    values = [(about, json.loads(data), data) for about, data in seeds]
    kinds = [st.tuples(st.just(a), mutated(value).map(as_json) | garbled(data)) for a, value, data in values]
    fuzz(examples, st.one_of(kinds), act)


@pytest.mark.parametrize("examples", [30, MANY])
def test_packed_tensors_are_taken_or_refused(examples: int) -> None:
    """Of which a text says what they are: trees, and rows of tables."""

    def act(said: tuple[bytes, bool]) -> None:
        data, tree = said
        with suppress(FormatError, CheckpointError):
            if tree:
                unpack(torch.frombuffer(bytearray(data or b"."), dtype=torch.uint8))
            else:
                sparse.unpack(bytearray(data), tellers.PARAMS, "worker 1")

    def changed(data: bytes, tree: bool) -> st.SearchStrategy[bytes]:
        """With another head, and else as it is."""
        begin = 8 if tree else 0
        end = begin + int.from_bytes(data[:8], "little") if tree else data.index(b"\n")

        def put(head: bytes) -> bytes:
            head += b" " * (-len(head) % 8)
            return (len(head).to_bytes(8, "little") if tree else b"") + head + data[end:]

        return mutated(json.loads(data[begin:end])).map(as_json).map(put) | garbled(data)

    seeds = [(data, True) for data in tellers.trees()] + [(bytes(data), False) for data in tellers.rows()]
    kinds = [st.tuples(changed(*seed), st.just(seed[1])) for seed in seeds]
    fuzz(examples, st.one_of(kinds), act)


@pytest.mark.parametrize(
    ("about", "body", "why"),
    [
        ("servers", b'{"0": ["a", 70000, "salt"]}', '["0"][1]: expected int <= 65535'),
        ("servers", b'{"first": ["a", 1, "salt"]}', "expected str of another form"),
        ("step", b'{"count": 1.0, "loss": 1.0, "unused": []}', "object missing required field expected"),
        ("wish", b'{"updates": -1, "stop": false}', "updates: expected int >= 0"),
        ("ticket", b'{"ticket": true, "dealing": 1, "update": 1}', "ticket: expected int, got bool"),
        ("push", b"[" * 3000, "it is nested too deeply"),
        ("update", b"[0, 8, [7, 1, 2]]", "worker 7 has not pushed to server 0"),
        (
            "standing",
            b'{"applied": 1, "window": [3, 8], "log": [], "has": []}',
            "it reports 1 update, but the window",
        ),
        ("workers", b"[]", "expected array of length >= 1"),
    ],
)
def test_what_is_wrong_with_what_a_worker_or_a_server_tells_is_said(about: str, body: bytes, why: str) -> None:
    with pytest.raises(FormatError) as error:
        tellers.hear(about, body)
    assert f" about its {about} is damaged: {why}" in str(error.value)
    assert error.value.cure == "use the same version of Paceline on all hosts"


# -- what launchers, drivers, hosts, agents, etcd and kubectl say ------------------------------------------------------


def take_job(line: bytes) -> None:
    if job := hosted.read_job(line):
        LaunchOptions(**{"script": "a.py", **job["options"]}, workers=job["workers"] or 1, token=job["token"].encode())


def take_driver(line: bytes) -> None:
    driven = DriverEngine.__new__(DriverEngine)
    driven.title, driven._driver_output = "ray", cast(Any, [line, as_json({"door": "a", "placed": ["b"]})])
    driven._placed()


def take_order(line: bytes) -> None:
    done: Callable[..., None] = lambda *_: None
    AgentCommands(None, done, done)._obey(line)


def take_etcd(path: str, own: bytes | None) -> Callable[[bytes], None]:
    def take(data: bytes) -> None:
        with suppress(OSError, ValueError):
            tellers.answered_by_etcd({**tellers.etcd(own), path: data})

    return take


def orders_of_agents() -> list[bytes]:
    """What an agent tells its worker of the coordinator's orders."""
    told: list[bytes] = []
    agent = follow(ORDERED, lambda order: told.append(as_json(order)))
    agent._hold_back(True)
    return told


READ_LINES: list[tuple[Callable[[bytes], Any], Callable[[], list[bytes]]]] = [
    (tellers.heard_by_launcher, tellers.said_by_hosts),
    (take_job, lambda: [tellers.heard_by_launcher(b'{"says": "ready"}')]),
    (hosted.read_order, lambda: [tellers.ordered()]),
    (take_driver, tellers.said_by_drivers),
    (tellers.heard_by_doctor, tellers.checked),
    (take_order, orders_of_agents),
    (tellers.listed, lambda: [tellers.PODS]),
    *(
        (take_etcd(path, own), lambda path=path, own=own: [tellers.etcd(own)[path]])  # type: ignore[misc]
        for own in (None, b'["10.0.0.2", 29400]')
        for path in tellers.etcd()
    ),
]


@pytest.mark.parametrize("examples", [30, MANY])
def test_a_changed_line_of_a_launcher_a_host_or_an_engine_is_taken_or_refused(examples: int) -> None:
    def act(said: tuple[Callable[[bytes], Any], bytes]) -> None:
        take, line = said
        with suppress(FormatError, LaunchError):
            take(line)

    kinds = []
    for take, write in READ_LINES:
        for line in write():
            with suppress(LaunchError):  # a driver says what is wrong
                take(line)
            kinds.append(st.tuples(st.just(take), mutated(json.loads(line)).map(as_json) | garbled(line)))
    fuzz(examples, st.one_of(kinds), act)


@pytest.mark.parametrize(
    ("take", "line", "why"),
    [
        (take_job, b'{"options": {}}', "the job of the launcher is damaged: object missing required field "),
        (
            tellers.heard_by_launcher,
            b'{"says": "listens"}',
            "the message of a is damaged: object missing required field ",
        ),
        (take_order, b'{"wait": 1}', "a command from the agent is damaged: wait: expected bool, got int"),
        (
            take_driver,
            b"Traceback",
            "the message of the ray driver is damaged: Expecting value: line 1 column 1 (char 0)",
        ),
        (tellers.listed, b"{}", "the output of kubectl get is damaged: object missing required field items"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(take: Callable[[bytes], Any], line: bytes, why: str) -> None:
    with pytest.raises(FormatError) as error:
        take(line)
    assert str(error.value).startswith(why)


def test_options_of_another_version_are_refused_on_a_host() -> None:
    job = json.loads(tellers.heard_by_launcher(b'{"says": "ready"}'))
    with pytest.raises(FormatError) as error:
        take_job(as_json({**job, "options": {**job["options"], "warp": 9}}))
    assert str(error.value) == (
        "the launcher sent an option unknown to this host, warp; use the same version of Paceline on all hosts"
    )


def test_a_worker_ends_with_what_was_no_order() -> None:
    orders = AgentCommands(None, lambda _: None, lambda _: None)
    reads, writes = os.pipe()
    os.write(writes, b'{"wait": true}\n{"number": 1}\n')
    os.close(writes)
    orders._listen(reads)
    os.close(reads)
    assert orders.paused_by_agent
    for ask in (lambda: orders.has_newer(0), lambda: orders.wait(0), lambda: orders.wait_until(lambda: False)):
        with pytest.raises(FormatError) as error:
            ask()
        assert "a command from the agent is damaged: object missing required field " in str(error.value)


def test_what_checks_types_is_not_imported_before_there_is_something_to_check() -> None:
    code = "import sys, paceline.cli.main\ntry: paceline.cli.main.main()\nfinally: assert 'msgspec' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("is_ours", [True, False])
def test_host_that_is_left_out_joins_again_only_where_it_runs_the_coordinator(is_ours: bool, tmp_path: Path) -> None:
    """Without it the run would end; its workers stay out."""
    one = Coordinator(3, 1, lambda event, **about: json.dumps(about), Membership((2, 3), 4, 4))
    one.hosts.excluded[JOIN["host"]] = "2 failures"
    one.recovering = time.monotonic() + 3.0
    run = {**RUN, "same": JOIN["same"]}
    address = JOIN["standby"] if is_ours else ["127.0.0.1", 1]
    service = Service(one, TOKEN, {"folder": str(tmp_path), "run": run, "address": address}, one.record)
    again = as_json({**JOIN, "numbers": [0, 1]})
    if not is_ours:
        with pytest.raises(RefusalError, match="2 failures"):
            service.answer("join", None, again)
        return
    assert service.answer("join", None, again)["numbers"] == [0, 1]
    assert [slot.wanted["out"] for slot in one.slots.values()] == [True, True]


def test_time_in_which_the_coordinator_does_not_run_is_no_silence_of_an_agent(tmp_path: Path) -> None:
    """On an overloaded machine it runs a little now and then, with shorter pauses than an agent may be silent."""
    service = coordinator(tmp_path, again=False)
    (session,) = service._sessions.values()

    async def let_it_run(pauses: Iterable[float]) -> None:
        for pause in pauses:
            await asyncio.sleep(0.01)
            time.sleep(pause)
            if session.lost:
                break

    async def play() -> None:
        watching = asyncio.ensure_future(service.watch())
        await let_it_run([0.6] * 5)
        assert not session.lost
        await let_it_run(repeat(0.0))
        watching.cancel()

    asyncio.run(play())
    assert session.lost
