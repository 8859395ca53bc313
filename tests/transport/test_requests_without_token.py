"""Whoever reaches the coordinator's port without the token can ask for its status, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest
from agents import until
from clusters import STEPS, worker_of
from clusters import undisturbed as undisturbed
from launching import SCRIPTS
from warm import Process, environment

from paceline.base.journal import effective_steps, read_journal
from paceline.team.auth import authorization, read_token


@dataclass
class Target:
    """A run that is under way, and its coordinator."""

    process: subprocess.Popen[str]
    folder: Path
    port: int

    def ask(self, method: str, path: str, body: bytes = b"", signed: str = "") -> tuple[int, Any]:
        """Status and answer."""
        http = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            http.request(method, path, body, {"Authorization": signed} if signed else {})
            answer = http.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            http.close()

    def challenge(self) -> str:
        return str(self.ask("GET", "/challenge")[1]["challenge"])

    def raw(self, data: bytes) -> bytes:
        """What comes back for these bytes, until the connection is closed. TimeoutError: it never is."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as wire:
            wire.sendall(data)
            got = b""
            try:
                while piece := wire.recv(4096):
                    got += piece
            except ConnectionResetError:
                pass
            return got

    def refused(self) -> str:
        return "\n".join(str(event["what"]) for event in read_journal(self.folder) if event["event"] == "refused")

    def members(self) -> list[int]:
        try:
            return list(self.ask("GET", "/status")[1]["members"])
        except ConnectionResetError:  # one connection too many
            return []


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--run-dir", str(run)]
    process = Process(
        [*command, SCRIPTS / "survivor.py", "out", str(STEPS)],
        environment(WAIT=f"{tmp_path / 'gate'} go 1"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    until(lambda: any(event["event"] == "step" for event in read_journal(run)))
    made = Target(process, run, json.loads((run / "coordinator.json").read_text())["port"])
    yield made
    process.kill()
    process.communicate()


def unharmed(target: Target, undisturbed: Path, losses: int = 0) -> None:
    (target.folder.parent / "gate").write_text("go\n")
    text, _ = target.process.communicate(timeout=120)
    assert target.process.returncode == 0, text
    assert (target.folder.parent / "out.safetensors").read_bytes() == (undisturbed / "out.safetensors").read_bytes()
    events = read_journal(target.folder)
    assert sum(event["steps"] for event in effective_steps(events)) == STEPS
    assert len([event for event in events if event["event"] == "lost"]) == losses


def test_nothing_but_the_status_without_the_token(target: Target, undisturbed: Path) -> None:
    token, other = read_token(target.folder / "token"), 64 * b"0"
    body = json.dumps({"epoch": 1, "workers": {}, "step": 10**6, "stop": True}).encode()
    assert target.ask("GET", "/status")[0] == 200
    assert target.ask("POST", "/report", body) == (401, {"refused": "the request is not signed"})
    assert target.ask("GET", "/orders?version=0") == (401, {"refused": "the request is not signed"})
    assert target.ask("POST", "/join", body) == (401, {"refused": "the request is not signed"})
    assert target.ask("POST", "/stacks", b"{}") == (401, {"refused": "the request is not signed"})
    assert target.ask("POST", "/stands", body) == (401, {"refused": "the request is not signed"})
    assert target.ask("POST", "/report", body, "Bearer " + token.decode()) == (
        401,
        {"refused": "the request is not signed"},
    )
    wrong = authorization(other, "POST", "/fence", target.challenge(), 0, body)
    assert target.ask("POST", "/fence", body, wrong) == (401, {"refused": "the token is wrong"})
    signed = authorization(token, "POST", "/report", "a" * 32, 1, body)
    assert target.ask("POST", "/report", body + b" ", signed) == (401, {"refused": "the token is wrong"})
    assert target.ask("POST", "/orders?version=0", body, signed) == (404, {"refused": "unknown method or path"})
    assert target.ask("GET", "/../token") == (404, {"refused": "unknown method or path"})
    assert target.members() == [0, 1]
    until(lambda: "POST /fence: the token is wrong, from 127.0.0.1" in target.refused())
    assert "POST /report: the request is not signed, from 127.0.0.1" in target.refused()
    unharmed(target, undisturbed)


def test_what_was_sent_before_and_what_is_of_another_time(target: Target, undisturbed: Path) -> None:
    """An eavesdropper has signed messages, but none of them counts again."""
    token = read_token(target.folder / "token")

    def join(challenge: str, **changed: Any) -> tuple[int, Any]:
        greeting = {"agent": "spy", "host": "spy", "logs": "", "standby": ["127.0.0.1", 1], "numbers": [], "count": 0}
        body = json.dumps({**greeting, "generation": [0, []], "same": {}, **changed}).encode()
        return target.ask("POST", "/join", body, authorization(token, "POST", "/join", challenge, 0, body))

    challenge = target.challenge()
    status, said = join(challenge)
    assert status == 200
    assert join(challenge) == (409, {"refused": "the request was sent before, or its challenge is too old"})
    key = said["session"]

    def report(number: int, **changed: Any) -> tuple[int, Any]:
        body = json.dumps({"epoch": 1, "workers": {}, "step": 0, **changed}).encode()
        return target.ask("POST", "/report", body, authorization(token, "POST", "/report", key, number, body))

    assert report(5)[0] == 200
    assert report(5) == (409, {"refused": "the request was sent before"})
    assert report(4) == (409, {"refused": "the request was sent before"})
    assert report(6, epoch=0) == (409, {"refused": "the report has epoch 0, but this coordinator has epoch 1"})
    assert report(7, workers=[1, 2])[0] == 400
    assert report(8, workers={"0": {"life": 0, "status": -9}})[0] == 200, "it is another agent's worker"
    assert report(9, workers={"0": {"life": "nonsense"}})[0] == 400
    assert join(target.challenge(), numbers=[0, 1])[0] == 200, "they have an agent already"
    assert join(target.challenge(), same={"torch": "1.0"})[0] == 412
    body = json.dumps({"epoch": 1, "address": ["127.0.0.1", 1]}).encode()
    signed = authorization(token, "POST", "/fence", target.challenge(), 0, body)
    assert target.ask("POST", "/fence", body, signed) == (
        409,
        {"refused": "the fence has epoch 1, but this coordinator has epoch 1"},
    )
    assert target.members() == [0, 1]
    unharmed(target, undisturbed)


@pytest.mark.slow
def test_what_is_malformed_too_large_or_too_slow(target: Target, undisturbed: Path) -> None:
    garbage = [
        b"\0\1\2\3\r\n\r\n",
        b"GET /status HTTP/9.9\r\n\r\n",
        b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /report HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzzzz\r\n",
        b"GET /status HTTP/1.1\r\nHost: x\r\n"
        + b"".join(b"A%d: %s\r\n" % (n, 2000 * b"x") for n in range(20))
        + b"\r\n",
    ]
    for data in garbage:
        assert b" 200 " not in target.raw(data)[:20], data[:60]
    slow = b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf a body"
    assert b" 200 " not in target.raw(slow)[:20]
    many = [socket.create_connection(("127.0.0.1", target.port)) for _ in range(300)]
    try:
        assert target.process.poll() is None
    finally:
        for wire in many:
            wire.close()
    until(lambda: target.members() == [0, 1])
    told = target.refused()
    assert "Content-Length too long" in told or "too long" in told, told
    until(lambda: "Timeout reading body from" in target.refused())
    unharmed(target, undisturbed)


@pytest.mark.slow
def test_a_flood_hinders_nobody(target: Target, undisturbed: Path) -> None:
    """A worker is killed in the midst of it: the others hear of it, and it comes back."""
    done = threading.Event()
    answers: list[int] = []

    def flood() -> None:
        while not done.is_set():
            try:
                answers.append(target.ask("POST", "/report", 1000 * b"x")[0])
            except (OSError, HTTPException, ValueError):
                answers.append(0)

    threads = [threading.Thread(target=flood) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(answers) > 20)
        status = target.ask("GET", "/status")[1]["workers"]
        assert {worker["state"] for worker in status.values()} == {"member"}
        os.kill(worker_of(target.folder), signal.SIGKILL)
        until(lambda: any(event["event"] == "lost" for event in read_journal(target.folder)))
        until(lambda: len(target.members()) == 2)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert set(answers) <= {0, 401}
    unharmed(target, undisturbed, losses=1)
