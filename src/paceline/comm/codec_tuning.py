"""Measures compression codecs, and decides which one each bucket uses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from paceline.comm.compression import Codec
from paceline.comm.gradient_buckets import Bucket

ROUNDING, LOSSY = ("none", "bf16", "fp16", "int8"), ("powersgd:4", "topk:0.01", "sign")
MOST = 1 << 21  # elements that are tried, which takes some ten times their memory; more take as much longer
SECONDS = 4.0  # for all buckets: the costs of the rest are estimated from the measured bucket most like them
KEEP = 0.9  # a new choice has to cost less than this fraction of the present one
CLEARLY = 1.5  # a link counts as changed once its rate has changed by this factor
CLOSE = 3.0  # codecs whose estimate is at most this many times the least are tried in the run
TRIES, RUNS = 4, 4  # candidates at most, and steps of each; the first step does not count
ALIKE = 0.97  # the candidate that changes less wins, unless another takes less than this fraction of its seconds


class CodecTrial(NamedTuple):
    """The measured cost of one codec for one bucket: seconds of encoding and decoding, bytes that a leader sends, and
    messages in a row.
    """

    seconds: float
    sent: float
    turns: float

    def cost(self, rate: float, latency: float) -> float:
        """Seconds that a sum takes over a link of `rate` bytes a second with `latency` seconds."""
        return self.seconds + self.sent / rate + self.turns * latency


Trials = dict[str, dict[str, CodecTrial]]  # by the name of a bucket's first parameter, and by codec


class LoopbackPeers:
    """Stands for a `Gloo` of `size` leaders whose peers send the same as this one. Counts bytes and messages."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self.sent = self.turns = 0.0
        self.chunk = 1 << 62

    def _count(self, sent: float, turns: int) -> Iterator[Any]:
        self.sent, self.turns = self.sent + sent, self.turns + turns
        yield from ()

    def in_turns(self, parts: Iterable[Iterator[Any]]) -> Iterator[Any]:
        """As `Gloo.in_turns`, one part after another."""
        for part in parts:
            yield from part

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        """As `Gloo.all_gather`: one copy of `flat` per leader."""
        yield from self._count((self.size - 1) * flat.nbytes, self.size - 1)
        copies = flat.expand(self.size, -1)
        return copies.clone() if into is None else into.copy_(copies)

    def all_to_all(self, rows: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        """As `Gloo.all_to_all`: the rows themselves."""
        yield from self._count(rows[1:].nbytes, 1)
        return rows.clone() if into is None else into.copy_(rows)

    def all_reduce(self, flat: torch.Tensor) -> Any:
        """As `Gloo.all_reduce`, but `flat` stays as it is."""
        yield from self._count(2 * flat.nbytes * (self.size - 1) / self.size, 2 * (self.size - 1))

    def broadcast(self, flat: torch.Tensor, root: int) -> Any:
        """As `Gloo.broadcast`: `flat` stays as it is."""
        yield from self._count(flat.nbytes, 1)


def sample(bucket: Bucket, most: int = MOST) -> Bucket:
    """A bucket of random numbers with the first parameters of this one and rows of the next, `most` elements in all."""
    shapes, starts, end = list[torch.Size](), list[int](), 0
    for shape, start in zip(bucket.shapes, bucket.starts, strict=True):
        row = max(1, shape[1:].numel())
        rows = min(shape[0], max(1, (most - start) // row)) if len(shape) else 1
        if start and start + rows * row > most:
            break
        shapes.append(torch.Size([rows, *shape[1:]]) if len(shape) else shape)
        starts.append(start)
        end = start + rows * row
        if rows * row < shape.numel():
            break
    values = torch.randn(end, dtype=bucket.local_shard.dtype)
    return replace(
        bucket, flat=values, local_shard=values, members=bucket.members[: len(shapes)], shapes=shapes, starts=starts
    )


def trial(word: str, bucket: Bucket, hosts: int, part: Bucket | None = None) -> CodecTrial:
    """Measures a codec for a bucket among this number of hosts, on the sample `part` if there is one."""
    part, codec = part or sample(bucket), Codec(word)
    larger = len(bucket.local_shard) / len(part.local_shard)
    durations = []
    for done in range(2):  # the first run allocates memory, and has no residual yet
        peers, flat = LoopbackPeers(hosts), part.local_shard.clone()
        codec.begin(done, 1.0)
        began = time.perf_counter()
        for _ in codec.sums(part)(list(range(hosts)), peers, flat):  # type: ignore[arg-type]
            pass
        durations.append(time.perf_counter() - began)
    return CodecTrial(min(durations) * larger if word != "none" else 0.0, peers.sent * larger, peers.turns + 1)


def coding_seconds(word: str, elements: int, hosts: int = 2) -> float:
    """Measures the seconds per element in which a leader encodes and decodes gradients, with so many `elements`."""
    flat = torch.randn(elements, dtype=torch.float32)
    return trial(word, Bucket(0, flat, [0], flat, [flat.shape], [0]), hosts).seconds / elements


def differs(rate: float, before: float) -> bool:
    """Whether two rates of a link differ by more than the factor CLEARLY."""
    return not before / CLEARLY < rate < before * CLEARLY


def trials(buckets: Sequence[Bucket], names: Sequence[str], words: Sequence[str], hosts: int) -> Trials:
    """Measures codecs for all buckets, the largest first; once time is up, estimates from the bucket most alike."""
    measured: Trials = {}
    name_of_layout: dict[Any, str] = {}
    began = time.perf_counter()
    tried: list[Bucket] = []
    for bucket in sorted(buckets, key=lambda bucket: -len(bucket.local_shard)):
        if not bucket.local_shard.is_floating_point() or not len(bucket.local_shard):
            continue
        name, key = names[bucket.members[0]], (bucket.local_shard.dtype, *bucket.shapes)
        if key in name_of_layout:
            measured[name] = measured[name_of_layout[key]]
        elif tried and time.perf_counter() - began > SECONDS:
            like = min(tried, key=lambda other: abs(len(other.local_shard) - len(bucket.local_shard)))
            ratio, costs = len(bucket.local_shard) / len(like.local_shard), measured[names[like.members[0]]]
            measured[name] = {word: CodecTrial(t.seconds * ratio, t.sent * ratio, t.turns) for word, t in costs.items()}
        else:
            part = sample(bucket)
            measured[name] = {word: trial(word, bucket, hosts, part) for word in words}
            name_of_layout[key] = name
            tried.append(bucket)
    return measured


def slowest(reports: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> Trials:
    """Merges the measurements of several leaders: all wait for the slowest one."""
    merged: Trials = {}
    for report in reports:
        for name, words in report.items():
            kept = merged.setdefault(name, {})
            for word, costs in words.items():
                kept[word] = max(kept.get(word, CodecTrial(0.0, 0.0, 0.0)), CodecTrial(*costs))
    return merged


def decide(
    measured: Trials, allowed: Sequence[str], rate: float, latency: float, before: Mapping[str, str]
) -> dict[str, str]:
    """The cheapest allowed codec of each bucket, or the one it had `before`, if that costs hardly more."""
    words = {}
    for name, tried in measured.items():
        costs = {word: tried[word].cost(rate, latency) for word in allowed}
        best, previous = min(allowed, key=lambda word: costs[word]), before.get(name, "")
        words[name] = previous if previous in costs and costs[best] > KEEP * costs[previous] else best
    return words


@dataclass
class LiveComparison:
    """Compares codecs in training itself, where encoding and sending compete with computing.

    Each of the `candidates` gives the codec of every bucket; the one that should be best comes first. `took` has, for
    each candidate tried so far, the seconds of a step and the link's rate then.
    """

    candidates: list[dict[str, str]]
    took: list[tuple[float, float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # seconds of each step with the present candidate, on this worker
    spent: list[float] = field(default_factory=list)  # seconds of encoding and decoding in a step, by candidate

    @property
    def present(self) -> dict[str, str]:
        """The candidate that is being tried."""
        return self.candidates[len(self.took)]

    @property
    def ready(self) -> bool:
        """Whether the present candidate has been tried for enough steps."""
        return len(self.steps) >= RUNS

    @property
    def seconds(self) -> float:
        """Seconds of the fastest step with the present candidate; the first step does not count."""
        return min(self.steps[1:] or self.steps or [0.0])

    def note(self, seconds: float, spent: float) -> None:
        """Takes note of a step with the present candidate and of the seconds spent on encoding in it."""
        self.steps.append(seconds)
        self.spent = [*self.spent[: len(self.took)], spent]

    def next_candidate(self, seconds: float, rate: float) -> bool:
        """Records the present candidate's time on the slowest worker; returns whether another one follows."""
        self.took.append((seconds, rate))
        self.steps.clear()
        return len(self.took) < len(self.candidates)

    def best(self) -> int:
        """The index of the candidate to keep: of those about as fast as the fastest, the one that changes least."""
        least, changes = min(seconds for seconds, _ in self.took), ROUNDING + LOSSY
        order = sorted(range(len(self.took)), key=lambda n: max(map(changes.index, self.candidates[n].values())))
        return next(n for n in order if ALIKE * self.took[n][0] <= least)

    def describe(self) -> str:
        """The result as text: `none 0.105 s a step, bf16 0.12, int8 0.19 -> none`."""
        texts = [f"{_named(one)} {took:.3g}" for one, (took, _) in zip(self.candidates, self.took, strict=True)]
        return f"{', '.join([f'{texts[0]} s a step', *texts[1:]])} -> {_named(self.candidates[self.best()])}"


def _named(words: Mapping[str, str]) -> str:
    counts = Counter(words.values())
    return next(iter(counts)) if len(counts) == 1 else " and ".join(f"{w} in {n} buckets" for w, n in counts.items())


def close(
    measured: Trials, allowed: Sequence[str], rate: float, latency: float, words: Mapping[str, str]
) -> list[dict[str, str]]:
    """The candidates to compare in the run: `words` first, then single codecs that should take not much longer."""

    def cost(words: Mapping[str, str]) -> float:
        return sum(measured[name][word].cost(rate, latency) for name, word in words.items())

    others = [dict.fromkeys(words, word) for word in allowed]
    near = [other for other in sorted(others, key=cost) if other != words and cost(other) <= CLOSE * cost(words)]
    return [dict(words), *near[: TRIES - 1]]


def format_costs(tried: Mapping[str, CodecTrial], word: str, rate: float, latency: float) -> str:
    """The costs of all codecs as text: `none 2.10 s, bf16 1.05, int8 0.55, (powersgd:4 0.09, lossy) -> int8`."""
    texts = {one: f"{one} {trial.cost(rate, latency):.3g}" for one, trial in tried.items()}
    first, *full = (text for one, text in texts.items() if one not in LOSSY)
    lossy = [text for one, text in texts.items() if one in LOSSY]
    return ", ".join([f"{first} s", *full, *([f"({', '.join(lossy)}, lossy)"] if lossy else [])]) + f" -> {word}"
