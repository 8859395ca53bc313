"""Other programs at a coordinator's address: `with Rogue(HOW) as rogue`, or `python rogues.py HOST PORT HOW [TOKEN]`.
A program that is given the run's token signs its answers.

How one answers:

    takes    as a coordinator would: with a session, orders, and whatever might be taken as an option
    refuses  409, with escape sequences for the terminal
    differs  412, with a script that differs
    wrong    401
    text     200, and no JSON
    deep     200, and JSON of 100,000 brackets
    noise    no HTTP
    endless  an answer without an end
    silent   not at all
    drips    one byte after another, each half a second later
    relays   with what the coordinator at `to` answers, and keeps it
    replays  with what it has kept
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any

from paceline.team.auth import sign_answer

ESCAPE = "\x1b]0;owned\x07\x1b[31mowned\x1b[0m"
TAKEN = {
    "module": "http.server",
    "script": "/etc/passwd",
    "arguments": ["--bind", "127.0.0.1"],
    "notify": "touch owned",
    "plan": f"data=1 {ESCAPE}",
    "checkpoints": "owned",
    "token_file": "/etc/passwd",
    "run_dir": "owned",
}
RUN = {"script": ESCAPE, "workers": 1, "max_restarts": 10, "min_workers": 1, "begin": 1, "store": None}
RUN |= {"exclude_after": None, "same": {}, "trial": None}
ORDERS = {"version": 1 << 60, "epoch": 1, "lines": [[1 << 60, ESCAPE, True]], "workers": {}, "over": True, "agents": 1}
ANSWERS: dict[str, Any] = {
    "/challenge": {"challenge": "0" * 32, "epoch": 1},
    "/join": {
        "session": "0" * 32,
        "numbers": [0],
        "epoch": 1,
        "run": {**RUN, "given": TAKEN, "served": [None, None, "owned"]},
    },
    "/orders": {**ORDERS, "generation": None, "coming": {}, "merge": None, "servers": {}, "stacks": None},
    "/report": {"version": 1 << 60, "open": False, "clock": [0, 0]},
    "/stop": {"step": 5},
    "/stacks": {"asked": 1, "waits": [ESCAPE], "workers": {}, "folder": ESCAPE},
    "/profile": {"asked": 1, "workers": [0], "folder": "owned"},
}
DIFFERS = {"refused": ESCAPE, "differs": [["plan", ESCAPE, ""], ["script", "", ""]], "script": ESCAPE}
WHOLE = {
    "refuses": (409, json.dumps({"refused": ESCAPE})),
    "differs": (412, json.dumps(DIFFERS)),
    "wrong": (401, json.dumps({"refused": ESCAPE})),
    "text": (200, ESCAPE),
    "deep": (200, 100_000 * "["),
}


class Rogue:
    """Listens at an address; `asked` are the paths of requests, `to` is where it relays them, `kept` what it heard."""

    def __init__(self, how: str, host: str = "127.0.0.1", port: int = 0, to: int = 0, token: str = "") -> None:
        self.how, self.to, self.token = how, to, token.encode()
        self.asked, self.kept = list[str](), dict[str, tuple[int, str, str]]()
        self.signed = list[str]()  # the headers of requests that prove who asks
        self._listener = socket.create_server((host, port))
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> Rogue:
        threading.Thread(target=self.serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._speak, args=(self._listener.accept()[0],), daemon=True).start()

    def _speak(self, wire: socket.socket) -> None:
        with suppress(OSError, ValueError), wire:
            while request := _read(wire):
                self._answer(wire, *request)

    def _answer(self, wire: socket.socket, method: str, path: str, signed: str, body: bytes) -> None:
        name = path.partition("?")[0]
        self.asked.append(name)
        self.signed.append(signed)
        status, text, signature = 200, json.dumps(ANSWERS.get(name, {})), 64 * "0"
        if self.how == "noise":
            wire.sendall(ESCAPE.encode() + b"\r\n\r\n")
        elif self.how == "endless":
            wire.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                wire.sendall(b"10000\r\n" + (1 << 16) * b" " + b"\r\n")
        elif self.how == "drips":
            for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n" + 10000 * b" ":
                wire.sendall(bytes([byte]))
                time.sleep(0.5)
        elif self.how == "relays":
            there = HTTPConnection("127.0.0.1", self.to, timeout=60)
            there.request(method, path, body or None, {"Authorization": signed})
            answer = there.getresponse()
            status, signature, text = answer.status, answer.headers["Paceline-Signature"], answer.read().decode()
            there.close()
            self.kept[name] = status, text, signature
        elif self.how == "replays":
            status, text, signature = self.kept.get(name, (404, "{}", signature))
        else:
            status, text = WHOLE.get(self.how, (status, text))
        if self.token:
            signature = sign_answer(self.token, signed.rpartition(" ")[2], status, text.encode())
        if self.how not in ("noise", "endless", "silent", "drips"):
            head = f"HTTP/1.1 {status} OK\r\nContent-Length: {len(text)}\r\nPaceline-Signature: {signature}\r\n\r\n"
            wire.sendall((head + text).encode())


def _read(wire: socket.socket) -> tuple[str, str, str, bytes] | None:
    """Method, path, authorization and body of the next request."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (piece := wire.recv(1 << 16)):
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += wire.recv(1 << 16)
    method, path, _ = first.split(" ")
    return method, path, headers.get("authorization", ""), body


if __name__ == "__main__":
    stands = Rogue(sys.argv[3], sys.argv[1], int(sys.argv[2]), token="".join(sys.argv[4:]))
    print(stands.port, flush=True)
    stands.serve()
