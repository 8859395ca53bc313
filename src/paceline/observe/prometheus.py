"""Answers Prometheus scrapes with the metrics of a run; a client needs the reading key of the run."""

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

OFTEN = 0.25  # seconds between two readings of the journal, at least


class Figures:
    """A collector of the Prometheus client: all metrics of a run, read again at most every `OFTEN` seconds."""

    def __init__(self, folder: Path, run: str) -> None:
        self._newest = Newest(folder, OFTEN, lambda summary: [*families(summary, run)])

    def collect(self) -> Iterator[Any]:
        """Yields the metric families."""
        yield from self._newest.get()[1]

    def look(self) -> None:
        """Reads the journal now, even if it was read very recently."""
        self._newest.get(anew=True)


def families(summary: Summary, run: str) -> Iterator[Any]:
    """Yields the metric families of a run, labelled with its name."""
    for metric in METRICS:
        labels = ["run", *(["trainer"] if metric.record else []), *([metric.label] if metric.label else [])]
        kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
        family = kind(metric.name, metric.meaning, labels=labels)
        for (trainer, label), value in metric.values(summary):
            given = [run, *([trainer] if metric.record else []), *([label] if metric.label else [])]
            family.add_metric([printable(name) for name in given], value)
        yield family


class ScrapeHandler(RequestHandler):
    """Answers one scrape; the first one after the run has `ended` sets `scraped`."""

    def initialize(self, figures: Figures, key: str, ended: Event, scraped: Event) -> None:
        """Takes the route's arguments, as Tornado hands them over."""
        self._figures, self._key, self._ended, self._scraped = figures, key, ended, scraped

    def set_default_headers(self) -> None:
        """Leaves out the version of the server."""
        self.clear_header("Server")

    def get(self) -> None:
        """Sends the metrics to a client that has the key."""
        given = self.request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {self._key}".encode()):
            self.set_status(401)
            self.set_header("WWW-Authenticate", "Bearer")
            self.finish("send the key in the file reading_key of the run folder as bearer token\n")
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
