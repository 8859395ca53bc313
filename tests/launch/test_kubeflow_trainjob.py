"""What Kubeflow Trainer is told of a run: by a real run, to a real server with a certificate of its own."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from agents import until
from certificates import self_signed
from journals import step, write_run
from launching import environment
from test_prometheus import LONG
from warm import Process

from paceline.base.environment import trainjob_server
from paceline.base.journal import Journal, effective_steps, read_journal
from paceline.observe.summary import Summary
from paceline.observe.trainjob import status

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/lab/trainjobs/train/status"
TEXT = {"type": "string", "minLength": 1, "maxLength": 64}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
METRIC = {"type": "object", "properties": {"name": TEXT, "value": TEXT}, "required": ["name", "value"]}
METRIC["additionalProperties"] = False
# What `trainerStatus` may hold; its server drops other fields, and refuses one without a time.
STATUS = {
    "type": "object",
    "properties": {
        "progressPercentage": {**COUNT, "maximum": 100},
        "estimatedRemainingSeconds": COUNT,
        "metrics": {"type": "array", "items": METRIC, "maxItems": 256},
        "lastUpdatedTime": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"},
    },
    "required": ["lastUpdatedTime"],
    "additionalProperties": False,
}


def told(summary: Summary) -> tuple[dict[str, Any], dict[str, str]]:
    body = status(summary)
    assert body.keys() == {"trainerStatus"}
    jsonschema.validate(body["trainerStatus"], STATUS)
    return body["trainerStatus"], {one["name"]: one["value"] for one in body["trainerStatus"]["metrics"]}


def test_trainjob_status_of_a_journal(tmp_path: Path) -> None:
    write_run(tmp_path)
    found, metrics = told(Summary(tmp_path))
    assert (found["progressPercentage"], found["estimatedRemainingSeconds"]) == (100, 0)
    assert metrics["step"] == "100"
    assert (metrics["loss"], metrics["error"], metrics["accuracy"]) == ("3", "0.01", "0.5")


@pytest.mark.parametrize(
    ("steps", "done", "expected"),
    [
        (100, 0, (0, None)),
        (300, 100, (33, 10)),
        (300, 299, (99, 0)),
        (None, 100, (None, None)),
        (10**12, 10, (0, 2**31 - 1)),
    ],
)
def test_trainjob_progress_and_remaining_seconds(
    tmp_path: Path, steps: int | None, done: int, expected: tuple[int | None, int | None]
) -> None:
    """Ten steps take half a second."""
    journal = Journal(tmp_path)
    journal.write("start", workers=2)
    journal.write("grid", trainer=0, phase=0, steps=steps, text="")
    if done:
        journal.write("step", **step(done, metrics={"n" * 100: 1.0, "": 2.0, "lost": None}))
    journal.close()
    found, metrics = told(Summary(tmp_path))
    assert (found.get("progressPercentage"), found.get("estimatedRemainingSeconds")) == expected
    if done:
        assert (metrics["n" * 64], metrics["lost"]) == ("1", "nan")


def test_trainjob_progress_of_several_trainers_is_one_count(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write("start", workers=2)
    for trainer in range(2):
        journal.write("grid", trainer=trainer, phase=0, steps=100, text="")
        journal.write("step", **step(40, trainer=trainer))
    journal.close()
    found, metrics = told(Summary(tmp_path))
    assert (found["progressPercentage"], found["estimatedRemainingSeconds"]) == (40, 6)
    assert metrics["step"] == "80"


def test_trainjob_server_variables() -> None:
    assert trainjob_server({}) is None
    name = "KUBEFLOW_TRAINER_SERVER_"
    given = {f"{name}URL": "https://a", f"{name}CA_CERT": "/ca", f"{name}TOKEN": "/token"}
    assert trainjob_server(given) == {"url": "https://a", "certificate": "/ca", "token": "/token"}


class Trainer:
    """Kubeflow Trainer's server: what came with which token. It answers `code`."""

    def __init__(self, folder: Path, code: int) -> None:
        self.came: list[tuple[str, str, str, dict[str, Any]]] = []
        came = self.came
        self_signed(folder, "localhost", "server.key", "ca.crt")

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                came.append((self.path, self.headers["Authorization"], self.headers["Content-Type"], body))
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "server.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        (folder / "tell").write_text("first\n")
        self.variables = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{self._server.server_port}{PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(folder / "ca.crt"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "tell"),
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def training(folder: Path, variables: dict[str, str], body: str = LONG) -> Iterator[Process]:
    (folder / "train.py").write_text("from basics import *\n" + body)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--run-dir", "out", "train.py"]
    pipe = subprocess.PIPE
    process = Process(command, {**environment(), **variables}, cwd=folder, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        process.kill()


def test_trainjob_server_gets_the_status_of_a_run_to_its_end(tmp_path: Path) -> None:
    """With the token as it is in its file by then, before the run's own end: in a pod nothing goes on after it."""
    trainer = Trainer(tmp_path, 200)
    with training(tmp_path, trainer.variables) as process:
        until(lambda: any(body["trainerStatus"]["metrics"][1:] for *_, body in trainer.came), 60)
        (tmp_path / "tell").write_text("second\n")
        (tmp_path / "enough").touch()
        _, said = process.communicate(timeout=60)
        came = [*trainer.came]
    trainer.close()
    assert process.returncode == 0, said
    assert "Kubeflow" not in said
    assert {(path, kind) for path, _, kind, _ in came} == {(PATH, "application/json")}
    assert [came[0][1], came[-1][1]] == ["Bearer first", "Bearer second"]
    for *_, body in came:
        jsonschema.validate(body["trainerStatus"], STATUS)
    last = came[-1][-1]["trainerStatus"]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    record = effective_steps(read_journal(tmp_path / "out"))[-1]
    metrics = {one["name"]: one["value"] for one in last["metrics"]}
    assert (metrics["loss"], metrics["step"]) == (f"{record['loss']:.7g}", str(record["step"]))
    assert (tmp_path / "out" / "logs" / "serving.log").read_text() == ""


BRIEF = LONG.replace("10_000", "60")


@pytest.mark.parametrize(
    "how", ["forbidden", *(pytest.param(h, marks=pytest.mark.slow) for h in ("stranger", "no token", "nobody"))]
)
def test_trainjob_server_that_refuses_is_one_warning(tmp_path: Path, how: str) -> None:
    trainer = Trainer(tmp_path, 403 if how == "forbidden" else 200)
    variables, why = dict(trainer.variables), "403 Forbidden"
    if how == "stranger":  # a server of whom we have no certificate
        variables["KUBEFLOW_TRAINER_SERVER_CA_CERT"] = ""
        why = "[SSL: CERTIFICATE_VERIFY_FAILED]"
    elif how == "no token":
        variables["KUBEFLOW_TRAINER_SERVER_TOKEN"] = str(tmp_path / "none")
        why = f"[Errno 2] No such file or directory: '{tmp_path / 'none'}'"
    elif how == "nobody":
        trainer.close()
        why = "[Errno 111] Connection refused"
    with training(tmp_path, variables, BRIEF) as process:
        _, said = process.communicate(timeout=60)
    if how != "nobody":
        trainer.close()
    assert process.returncode == 0, said
    assert said.count(f"Kubeflow Trainer does not accept progress reports ({why}") == 1
    assert said.count("Kubeflow") == 1
    assert bool(trainer.came) == (how == "forbidden")
    assert Summary(tmp_path / "out").finished
