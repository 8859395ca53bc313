"""What Prometheus scrapes, served by a process of its own beside the coordinator, from the journal alone. No torch.

    GET /metrics    with the run's reading key as bearer token

It follows the journal and nothing else: whoever ends or floods it costs the run nothing. After the run's end (its
standard input is closed) the last figures stay until they were scraped once, or for 15 seconds.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

from paceline.observe.journal import Reader
from paceline.observe.metrics import METRICS
from paceline.observe.summary import Summary

KEY = "reading_key"  # in the run folder
TARGETS = "metrics.json"  # in the run folder: what Prometheus's file_sd reads
OFTEN = 0.25  # seconds for which figures are not read again
LINGER = 15.0  # seconds after the end
NICE = 10  # the training goes before


def reading_key(folder: Path) -> str:
    """The key for reading a run, mode 0600 in its folder, made if there is none: 32 random bytes in hexadecimal. It is
    not the run's token, and nothing can be changed with it.
    """
    path = folder / KEY
    if not path.exists():
        new = folder / f".{KEY}"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        new.replace(path)
    return path.read_text().strip()


class Figures:
    """All of the table, as the client of Prometheus collects it; read again at most so often."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader, self._read = folder, Reader(folder), -OFTEN
        self._families: list[Any] = []

    def collect(self, anew: bool = False) -> Iterator[Any]:
        if anew or time.monotonic() - self._read >= OFTEN:
            self._families, self._read = [*families(Summary(self._folder, self._reader))], time.monotonic()
        yield from self._families


def families(summary: Summary) -> Iterator[Any]:
    """The table's figures of a run, labelled with the name of its folder."""
    for metric in METRICS:
        labels = ["run", *(["trainer"] if metric.record else []), *([metric.label] if metric.label else [])]
        kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
        family = kind(metric.name, metric.meaning, labels=labels)
        for (trainer, label), value in metric.values(summary):
            given = [summary.folder.name, *([trainer] if metric.record else []), *([label] if metric.label else [])]
            family.add_metric(given, value)
        yield family


class Handler(RequestHandler):
    """One request."""

    def initialize(self, figures: Figures, key: str, state: State) -> None:
        self._figures, self._key, self._state = figures, key, state

    def set_default_headers(self) -> None:
        self.clear_header("Server")

    def get(self) -> None:
        given = self.request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {self._key}".encode()):
            self.set_status(401)
            self.set_header("WWW-Authenticate", "Bearer")
            self.finish(f"the key is in the file {KEY} of the run folder\n")
            return
        encode, kind = choose_encoder(self.request.headers.get("Accept", ""))
        last = self._state.ended and not self._state.scraped.is_set()
        if last:
            self._figures.collect(anew=True)
        self.set_header("Content-Type", kind)
        self.finish(encode(self._figures))
        if last:
            self._state.scraped.set()


class State:
    """Whether the run has `ended`, and its last figures were `scraped`."""

    def __init__(self) -> None:
        self.ended, self.scraped = False, asyncio.Event()


async def serve(listener: socket.socket, folder: Path) -> None:
    """Answers until the run has ended and the last figures were seen."""
    state, loop = State(), asyncio.get_running_loop()
    about = {"figures": Figures(folder), "key": reading_key(folder), "state": state}
    server = HTTPServer(
        Application([("/metrics", Handler, about)], log_function=lambda _: None),
        max_body_size=1 << 10,
        max_header_size=1 << 14,
        max_buffer_size=1 << 15,
        idle_connection_timeout=60.0,
        body_timeout=5.0,
    )
    listener.setblocking(False)
    server.add_socket(listener)
    over = loop.create_future()
    loop.add_reader(0, lambda: None if os.read(0, 1 << 10) or over.done() else over.set_result(None))
    await over
    loop.remove_reader(0)
    state.ended = True
    try:
        await asyncio.wait_for(state.scraped.wait(), LINGER)
        await asyncio.sleep(0.2)  # the answer is on its way
    except TimeoutError:
        pass
    write_targets(folder, [])


def write_targets(folder: Path, targets: list[str]) -> None:
    """Where the figures are, for Prometheus's file_sd; no target once the run has ended."""
    text = json.dumps([{"targets": targets}] if targets else []) + "\n"
    half = folder / f".{TARGETS}"
    half.write_text(text)
    half.replace(folder / TARGETS)


def main(listener: int, folder: str) -> None:
    os.nice(NICE)
    asyncio.run(serve(socket.socket(fileno=listener), Path(folder)))


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    main(int(sys.argv[1]), sys.argv[2])
