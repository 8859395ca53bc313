"""The checks of `paceline launch` before a run begins: hosts measure themselves and their links, and are compared.

Hosts measure while others still start; the run begins once all have answered, or a few seconds after the first one did.
The measurements are those of `paceline doctor --hosts`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from paceline.base.text import plural
from paceline.launch.engines.preflight_hosts import APART, rounds

LONGEST = 5.0  # seconds from the first host's figures to the beginning of the run, at most
SLOWER = 0.6  # part of the others' median speed below which a host or a link is named
LEAST_FREE = 2.0  # GB of free space below which a host is named


class HostFigure(NamedTuple):
    """A figure that hosts measure: its name, unit, and whether larger values are better."""

    name: str
    unit: str
    larger: bool = True


FIGURES = {
    "memory": HostFigure("memory bandwidth", "GB/s"),
    "products": HostFigure("matrix products", "GFLOP/s"),
    "flush": HostFigure("a flush to disk", "ms", larger=False),
}


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def span(values: Sequence[float], unit: str) -> str:
    """The lowest and the highest of some values."""
    texts = list(dict.fromkeys(map(_digits, (min(values), max(values)))))
    return f"{' to '.join(texts)} {unit}"


def slow_ones(values: Mapping[str, float], about: HostFigure, least: float = 0.0) -> Iterator[tuple[str, str]]:
    """Names whose figure is much worse than the others', each with a text that has both. `least`: differences below
    this are ignored.
    """
    for name, value in values.items():
        others = [other for key, other in values.items() if key != name]
        if not others:
            return
        usual = median(others)
        better, worse = (usual, value) if about.larger else (value, usual)
        if worse < SLOWER * better and abs(usual - value) > least:
            yield name, f"{about.name}: {_digits(value)} {about.unit}; the others {span(others, about.unit)}"


class Preflight:
    """Collects the figures of the `names` of hosts. `ask` sends a host the address of another one, to measure the link
    to it, and `say` prints a line.
    """

    def __init__(self, names: Sequence[str], ask: Callable[[str, Any], None], say: Callable[[str], None]) -> None:
        self._names, self._ask, self._say = list(names), ask, say
        self._began = math.inf
        self._figures: dict[str, Mapping[str, Any]] = {}
        self._clocks: dict[str, float] = {}
        self._rounds: Iterator[list[tuple[int, int]]] | None = None
        self._waits: set[tuple[str, str]] = set()  # links that are being measured
        self._links: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.slow: dict[str, list[str]] = {}  # by host: in what it is slow
        self._over = False

    def take(self, name: str, message: Mapping[str, Any]) -> None:
        """Takes the figures of a host."""
        if not self._figures:
            self._began = time.monotonic()
            self._say(f"checking {plural(len(self._names), 'host')}: memory, processors, disks, clocks and links")
        self._figures[name] = message
        self._clocks[name] = message["clock"] - time.time()

    def take_link(self, name: str, message: Mapping[str, Any]) -> None:
        """Takes a host's measurement of the link that it was asked for."""
        for pair in [pair for pair in self._waits if pair[0] == name]:
            self._waits.discard(pair)
            self._links[pair] = message

    def is_over(self, names: Sequence[str], now: float) -> bool:
        """Whether the run may begin. `names` are the hosts that have answered; they are asked for what is missing."""
        if self._over:
            return True
        self._began = min(self._began, now)  # a host whose disk hangs may send no figures
        if now - self._began > LONGEST:
            self._waits.clear()
            self._rounds = iter(())
        elif self._waits or not self._figures.keys() >= {*names}:
            return False
        if self._rounds is None:
            self._rounds = rounds(len(names)) if len(names) > 1 else iter(())
            self._names = [*names]
        for pairs in self._rounds:
            for one, other in ((self._names[one], self._names[other]) for one, other in pairs):
                self._waits.add((one, other))
                self._ask(one, self._figures[other]["at"])
            return False
        self._over = True
        self._report(now)
        return True

    def _report(self, now: float) -> None:
        """Prints what was measured, and which hosts and links are slow."""
        texts = []
        for key, about in FIGURES.items():
            values = {name: float(one[key]) for name, one in self._figures.items() if one.get(key)}
            if values:
                texts.append(f"{about.name} {span([*values.values()], about.unit)}")
            for name, text in slow_ones(values, about, least=0.0 if about.larger else 20.0):
                self.slow.setdefault(name, []).append(text)
        rates = {
            f"{one} to {other}": 8e-6 * link["rate"] for (one, other), link in self._links.items() if "rate" in link
        }
        if rates:
            texts.append(f"links {span([*rates.values()], 'Mbit/s')}")
        missing = [name for name in self._names if name not in self._figures]
        late = f"; no figures of {', '.join(missing)}" if missing else ""
        seconds = now - self._began
        if not self._figures:
            self._say(f"no host has sent figures in {seconds:.1f} s")
            return
        self._say(f"checked {plural(len(self._figures), 'host')} in {seconds:.1f} s: {', '.join(texts)}{late}")
        for name, reasons in self.slow.items():
            for reason in reasons:
                self._say(f"{name} is slow: {reason}")
        for name, text in slow_ones(rates, HostFigure("speed", "Mbit/s")):
            self._say(f"the link from {name} is slow: {text}")
        for (one, other), link in self._links.items():
            if "refused" in link:
                self._say(f"{one} cannot reach {other} ({link['refused']})")
        for name, figures in self._figures.items():
            if (free := figures.get("free", math.inf)) < LEAST_FREE:
                self._say(f"{name} has only {free:.1f} GB free for the run folder")
            others = [clock for key, clock in self._clocks.items() if key != name]
            ahead = self._clocks[name] - median(others or [0.0])
            if abs(ahead) > APART:
                self._say(f"the clock of {name} is {ahead:+.1f} s off the others'; set it with NTP")
