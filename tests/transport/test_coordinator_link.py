"""An agent's line to the coordinator while that moves, beside servers that answer when the test says so."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from agents import until

from paceline.team.auth import ANSWER, read_authorization, sign_answer
from paceline.team.coordinator_client import CoordinatorClient

TOKEN = b"0" * 64
GIVEN = (
    "plan",
    "shares",
    "save_every",
    "keep",
    "checkpoints",
    "max_steps",
    "tensorboard",
    "log_to",
    "heal",
    "config",
    "verify_steps",
    "mirror",
)
RUN = {
    "script": "train.py",
    "workers": 1,
    "max_restarts": 0,
    "min_workers": 1,
    "begin": 1,
    "store": None,
    "exclude_after": None,
    "trial": None,
    "same": {},
    "given": dict.fromkeys(GIVEN),
    "served": [None, None, "/run"],
}
ORDERS: dict[str, Any] = {
    "epoch": 1,
    "agents": 1,
    "stacks": 0,
    "over": False,
    "finished": False,
    "stop": False,
    "coming": {},
    "servers": {},
    "workers": {},
    "profile": {},
    "standbys": [],
    "failing": [],
    "store": None,
    "lines": [],
    "generation": None,
    "merge": None,
    "moved": None,
}


class Coordinator(ThreadingHTTPServer):
    """Answers whoever has its session, and refuses others. `asked` are the paths; who joins waits for `open`."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.open, self.asked = name, threading.Event(), list[str]()
        self.refuses = 0  # the status of joins that it refuses

    @property
    def at(self) -> tuple[str, int]:
        return "127.0.0.1", self.server_port

    def answer(self, path: str, key: str) -> tuple[int, dict[str, Any]]:
        if path == "/challenge":
            return 200, {"challenge": 32 * "c", "epoch": 1}
        if path == "/join":
            self.open.wait(60)
            if self.refuses:
                return self.refuses, {"refused": "2 failures"}
            return 200, {"session": self.name, "numbers": [0], "epoch": 1, "run": RUN}
        if key != self.name:
            return 409, {"refused": "no such session"}
        if path == "/orders":
            return 200, {**ORDERS, "version": len(self.asked)}
        return 200, {"version": 1, "open": False}


class Handler(BaseHTTPRequestHandler):
    server: Coordinator
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        signed = read_authorization(self.headers.get("Authorization", ""))
        code, said = self.server.answer(path, signed[0] if signed else "")
        data = json.dumps(said).encode()
        assert signed is not None
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.send_header(ANSWER, sign_answer(TOKEN, signed[2], code, data))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(name: str) -> Iterator[Coordinator]:
    with Coordinator(name) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def test_a_coordinator_that_moves_while_an_agent_joins_is_followed() -> None:
    """By both threads: else one reports to the first one, and the other asks the second one, which does not know it."""
    with serving(32 * "1") as first, serving(32 * "2") as second:
        link = CoordinatorClient(first.at, TOKEN, {"numbers": [0]})
        link.start()
        link.put({"workers": {}})
        until(lambda: "/join" in first.asked)
        link.move(second.at)
        first.open.set()
        second.open.set()
        until(lambda: {"/report", "/orders"} <= {*second.asked})
        until(lambda: link.newest and link.home == second.at)
        assert {*first.asked} == {"/challenge", "/join"}
        link.close({"workers": {}})


@pytest.mark.parametrize("code", [403, 412])
def test_an_agent_that_may_not_join_again_asks_once_and_knows_why(code: int) -> None:
    """Its session is of a coordinator that is gone. Other refusals may be over soon."""
    with serving(32 * "1") as server:
        server.open.set()
        link = CoordinatorClient(server.at, TOKEN, {"numbers": [0]})
        link.introduce()
        server.name, server.refuses = 32 * "2", 409
        link.start()
        link.put({"workers": {}})
        until(lambda: server.asked.count("/join") > 3)
        assert link.refused is None
        server.refuses = code
        until(lambda: link.refused is not None)
        asked = server.asked.count("/join")
        assert link.refused is not None
        assert (link.refused.code, str(link.refused)) == (code, "2 failures")
        time.sleep(0.3)
        assert server.asked.count("/join") == asked
        link.close({"workers": {}})


def test_an_agent_with_another_token_says_so_and_waits() -> None:
    with serving(32 * "1") as server:
        server.open.set()
        link = CoordinatorClient(server.at, b"1" * 64, {"numbers": [0]})
        link.start()
        until(lambda: link.trouble != "")
        host, port = server.at
        assert link.trouble == f"the program at {host}:{port} does not know this run's token"
        assert link.refused is None
        link.close({"workers": {}})
