"""Formats numbers, durations, sizes and rank lists for people."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from paceline.base.environment import SERVERS
from paceline.errors import UsageError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def number(value: float | None) -> str:
    """`2.314`, `5,321`, `3e-05`; None, which the journal writes for NaN and infinity, is ``not finite``."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return f"{Decimal(value):.3g}"
    if value is None or not math.isfinite(value):
        return "not finite"
    if isinstance(value, int) or (abs(value) < 1e15 and value == round(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e12 else f"{value:.3g}"
    return f"{value:#.4g}" if abs(value) >= 0.1 else f"{value:.3g}"


def rounded(value: float) -> float:
    """`value` rounded to a whole number; infinity as it is."""
    return round(value) if math.isfinite(value) else value


def clock(seconds: float) -> str:
    """Time left: `0:34`, `12:05`, `1:02:03`."""
    rounded_seconds = round(seconds)
    hours, minutes, rest = rounded_seconds // 3600, rounded_seconds // 60 % 60, rounded_seconds % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """Time spent: `34.2 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 0.05 or seconds == 0 else f"{seconds * 1000:.2g} ms"
    rounded_seconds = round(seconds)
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if rounded_seconds >= size:
            count, rest = rounded_seconds // size, rounded_seconds % size // below
            return f"{count} {unit} {rest} {small}" if rest else f"{count} {unit}"
    return f"{rounded_seconds} s"


def parse_size(text: str) -> int:
    """Converts ``500MB`` or ``2.5GB`` to bytes; units are powers of 1000. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?) ?([KMGT]?B?)", text.strip().upper())
    unit = match and (match[2] if match[2] in _UNITS else f"{match[2].removesuffix('B')}B")
    size = int(float(match[1]) * _UNITS.get(unit or "", 1)) if match else 0
    if size < 1:
        raise UsageError(f"{text!r} is not a size in bytes", "write a number and a unit, for example 500MB or 5GB")
    return size


def size_of(count: float) -> str:
    """Bytes in powers of 1000: `812 B`, `1.23 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} PB"


def count_of(count: int) -> str:
    """`812`, `30,522`, `124.4M`, `7.24B`."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return f"{count:,}"


def rate_of(bytes_: float) -> str:
    """Bytes a second as a network's rate: `94 Mbit/s`."""
    bits = 8 * bytes_ / 1e6
    return f"{bits / 1000:.3g} Gbit/s" if bits >= 999.5 else f"{bits:.3g} Mbit/s"


def links_of(event: Mapping[str, Any]) -> str:
    """Describes the slowest measured link between hosts.

    `pairs` of the event has (workers of one host, workers of the other, bytes a second, seconds) of each link.
    """
    one, other, rate, latency = min(event["pairs"], key=lambda pair: pair[2])
    hosts = len({tuple(end) for pair in event["pairs"] for end in pair[:2]})
    description = f"{rate_of(rate)}, {1000 * latency:.1f} ms"
    if hosts > 2:
        description += f" between {ranks(one)} and {ranks(other)}, the slowest of {len(event['pairs'])} pairs"
    return f"{description}, {hosts} hosts" + (f", over {event['over']}" if event.get("over") else "")


def plural(count: float, word: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number(count)} {word}" if count == 1 else f"{number(count)} {word}s"


def total(events: Iterable[Mapping[str, Any]], field: str) -> float:
    """The sum of a field of events of the journal; one that lacks it adds nothing."""
    return sum(event.get(field) or 0.0 for event in events)


def totals(events: Iterable[Mapping[str, Any]], field: str) -> dict[str, float]:
    """The sums of a field that holds seconds by name."""
    sums: dict[str, float] = {}
    for event in events:
        for name, seconds in (event.get(field) or {}).items():
            sums[name] = sums.get(name, 0.0) + (seconds or 0.0)
    return sums


def shares_of(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """Seconds by name as fractions of their sum, largest first, `other` last, without those of zero."""
    total = sum(seconds.values())
    parts = [(name, value / total) for name, value in seconds.items() if value > 0] if total > 0 else []
    return sorted(parts, key=lambda part: (part[0] == "other", -part[1]))


def trainer_names(models: Mapping[Any, str]) -> dict[Any, str]:
    """What the trainers of a run are called, by number: as the classes of their models where these differ."""
    kinds = Counter(models.values())
    return {number: kind if kind and kinds[kind] == 1 else f"trainer {number}" for number, kind in models.items()}


def called(number: int) -> str:
    """`worker-2`, `server-0`: what a process and its log are called."""
    return f"server-{number - SERVERS}" if number >= SERVERS else f"worker-{number}"


def ranks(workers: Iterable[int]) -> str:
    """`worker 2`, `workers 0-3`, `workers 0, 2-3`, `worker 1 and server 0`."""
    numbers = {*workers}
    servers = {number for number in numbers if number >= SERVERS}
    kinds = ("worker", sorted(numbers - servers)), ("server", sorted(number - SERVERS for number in servers))
    return " and ".join(spans(kind, those) for kind, those in kinds if those or (kind == "worker" and not servers))


def spans(kind: str, numbers: Sequence[int]) -> str:
    """`host 2`, `hosts 0, 2-3`, of numbers in order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"{kind}{'s' if len(numbers) > 1 else ''} {text}"


def first_parts(text: str, room: int) -> str:
    """Returns as many whole parts of a list with commas as fit into `room` columns, and "…" for the others."""
    if len(text) <= room:
        return text
    begin, comma, _ = text[: room - 2].rpartition(", ")
    return f"{begin}, …" if comma else text


def first_few(items: Sequence[Any], most: int = 5) -> str:
    """Returns the first few items as text, and the number of the others."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")
