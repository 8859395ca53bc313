"""Serves metrics to Prometheus."""

from __future__ import annotations

import hmac
from asyncio import Event
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from tornado.web import RequestHandler

from paceline.base.console import printable
from paceline.base.http_server import know
from paceline.errors import PacelineError
from paceline.observe.metrics import METRICS
from paceline.observe.summary import Newest, Summary

OFTEN = 0.25  # seconds for which figures are not read again


class Figures:
    """All of the table of a run of this name, as the client of Prometheus collects it; read again at most so often."""

    def __init__(self, folder: Path, run: str) -> None:
        self._newest = Newest(folder, OFTEN, lambda summary: [*families(summary, run)])

    def collect(self) -> Iterator[Any]:
        yield from self._newest.get()[1]

    def look(self) -> None:
        """Reads what there is now, whenever it was read before."""
        self._newest.get(anew=True)


def families(summary: Summary, run: str) -> Iterator[Any]:
    """The table's figures of a run, labelled with its name."""
    for metric in METRICS:
        labels = ["run", *(["trainer"] if metric.record else []), *([metric.label] if metric.label else [])]
        kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
        family = kind(metric.name, metric.meaning, labels=labels)
        for (trainer, label), value in metric.values(summary):
            given = [run, *([trainer] if metric.record else []), *([label] if metric.label else [])]
            family.add_metric([printable(name) for name in given], value)
        yield family


class ScrapeHandler(RequestHandler):
    """One request. `scraped` is set by the first one after the run has `ended`."""

    def initialize(self, figures: Figures, key: str, ended: Event, scraped: Event) -> None:
        self._figures, self._key, self._ended, self._scraped = figures, key, ended, scraped

    def set_default_headers(self) -> None:
        self.clear_header("Server")

    def get(self) -> None:
        given = self.request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {self._key}".encode()):
            self.set_status(401)
            self.set_header("WWW-Authenticate", "Bearer")
            self.finish("the key is in the file reading_key of the run folder\n")
            return
        know(self)
        encode, kind = choose_encoder(self.request.headers.get("Accept", ""))
        last = self._ended.is_set() and not self._scraped.is_set()
        try:
            if last:
                self._figures.look()
            text = encode(self._figures)
        except PacelineError as error:  # the journal is damaged, or of a later version
            self.set_status(500)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(f"{error}\n")
            return
        self.set_header("Content-Type", kind)
        self.finish(text)
        if last:
            self._scraped.set()
