"""A real S3 server on loopback, and a proxy before it that can be made to fail."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


class Proxy(ThreadingHTTPServer):
    """Passes requests on, unless there is a file `trouble` that says what to do with those that write instead: ``500``,
    ``gone``, or seconds to wait before each; ``all gone`` with the others too. `met` counts those.
    """

    daemon_threads = True

    def __init__(self, port: int, trouble: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind, self.trouble, self.met = port, trouble, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        """A client that went away."""


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Expect") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(length)
        trouble = self.server.trouble.read_text() if self.server.trouble.exists() else ""
        if trouble.startswith("all ") or (trouble and self.command not in ("GET", "HEAD")):
            self.server.met += 1
            if trouble.endswith("gone"):
                self.close_connection = True
                self.connection.close()
                return
            if trouble == "500":
                self._answer(500, {}, b"<Error><Code>InternalError</Code><Message>on purpose</Message></Error>")
                return
            time.sleep(float(trouble))
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        headers = {name: value for name, value in self.headers.items() if name != "Expect"}
        behind.request(self.command, self.path, body, headers)
        answer = behind.getresponse()
        self._answer(answer.status, dict(answer.getheaders()), answer.read())

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        length = headers.pop("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
        for name in ("Transfer-Encoding", "Connection", "Content-Length"):
            headers.pop(name, None)
        for name, value in {**headers, "Content-Length": length}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass  # noqa: N815 (the library's names)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def s3_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """With a bucket ``bucket``; every process that is started meanwhile reaches it."""
    log = folder / "s3.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-p", "0"], stdout=out, stderr=subprocess.STDOUT, cwd=folder
        )
    try:
        until = time.monotonic() + 60
        while "Running on http" not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        port = int(log.read_text().rpartition("Running on http://127.0.0.1:")[2].split()[0])
        proxy = Proxy(port, folder / "trouble")
        for name, value in {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}",
            "AWS_MAX_ATTEMPTS": "1",
        }.items():
            monkeypatch.setenv(name, value)
        made = http.client.HTTPConnection("127.0.0.1", port)
        made.request("PUT", "/bucket")
        assert made.getresponse().status == 200
        yield proxy
        proxy.shutdown()
    finally:
        server.kill()
        server.wait()
