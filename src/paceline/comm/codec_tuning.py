"""Measures which compression codec is cheapest for each bucket."""

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
MOST = 1 << 23  # elements that are tried; more take as much longer
SECONDS = 4.0  # for all buckets: the rest are taken for such as the one of those tried that is most like them
KEEP = 0.9  # a new choice has to cost less than this part of the present one
CLEARLY = 1.5  # a link is another one if its rate has changed by so much
CLOSE = 3.0  # what should take at most so many times the least is tried in the run
TRIES, RUNS = 4, 4  # of so many at most, in so many steps each, the first of which does not count
ALIKE = 0.97  # of two the one that changes less is taken, unless the other takes less than this part of its seconds


class CodecTrial(NamedTuple):
    """Of a bucket with one codec: seconds of encoding and decoding, bytes that a leader sends, messages in a row."""

    seconds: float
    sent: float
    turns: float

    def cost(self, rate: float, latency: float) -> float:
        return self.seconds + self.sent / rate + self.turns * latency


Trials = dict[str, dict[str, CodecTrial]]  # by the name of a bucket's first parameter, and by codec


class LoopbackPeers:
    """As `Gloo` of so many leaders, of which the others say what this one says, at once. Counts what would be sent."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self.sent = self.turns = 0.0
        self.chunk = 1 << 62

    def _count(self, sent: float, turns: int) -> Iterator[Any]:
        self.sent, self.turns = self.sent + sent, self.turns + turns
        yield from ()

    def in_turns(self, parts: Iterable[Iterator[Any]]) -> Iterator[Any]:
        for part in parts:
            yield from part

    def all_gather(self, flat: torch.Tensor) -> Any:
        yield from self._count((self.size - 1) * flat.nbytes, self.size - 1)
        return flat.expand(self.size, -1).clone()

    def all_to_all(self, rows: torch.Tensor) -> Any:
        yield from self._count(rows[1:].nbytes, 1)
        return rows.clone()

    def all_reduce(self, flat: torch.Tensor) -> Any:
        yield from self._count(2 * flat.nbytes * (self.size - 1) / self.size, 2 * (self.size - 1))

    def broadcast(self, flat: torch.Tensor, root: int) -> Any:
        yield from self._count(flat.nbytes, 1)


def sample(bucket: Bucket, most: int = MOST) -> Bucket:
    """The first parameters of a bucket and rows of the next one, all of random numbers."""
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
    mine = torch.randn(end, dtype=bucket.mine.dtype)
    return replace(bucket, flat=mine, mine=mine, members=bucket.members[: len(shapes)], shapes=shapes, starts=starts)


def trial(word: str, bucket: Bucket, hosts: int, some: Bucket | None = None) -> CodecTrial:
    """Of a bucket among so many hosts; of `some` of it, if that was made before."""
    some, codec = some or sample(bucket), Codec(word)
    larger = len(bucket.mine) / len(some.mine)
    taken = []
    for done in range(2):  # the first one takes fresh memory, and has nothing left from before
        echo, flat = LoopbackPeers(hosts), some.mine.clone()
        codec.begin(done, 1.0)
        began = time.perf_counter()
        for _ in codec.sums(some)(list(range(hosts)), echo, flat):  # type: ignore[arg-type]
            pass
        taken.append(time.perf_counter() - began)
    return CodecTrial(min(taken) * larger if word != "none" else 0.0, echo.sent * larger, echo.turns + 1)


def differs(rate: float, before: float) -> bool:
    """Clearly."""
    return not before / CLEARLY < rate < before * CLEARLY


def trials(buckets: Sequence[Bucket], names: Sequence[str], words: Sequence[str], hosts: int) -> Trials:
    """Of all buckets, the largest first."""
    found: Trials = {}
    alike: dict[Any, str] = {}
    began = time.perf_counter()
    tried: list[Bucket] = []
    for bucket in sorted(buckets, key=lambda bucket: -len(bucket.mine)):
        if not bucket.mine.is_floating_point() or not len(bucket.mine):
            continue
        name, key = names[bucket.members[0]], (bucket.mine.dtype, *bucket.shapes)
        if key in alike:
            found[name] = found[alike[key]]
        elif tried and time.perf_counter() - began > SECONDS:
            like = min(tried, key=lambda other: abs(len(other.mine) - len(bucket.mine)))
            part, known = len(bucket.mine) / len(like.mine), found[names[like.members[0]]]
            found[name] = {word: CodecTrial(t.seconds * part, t.sent * part, t.turns) for word, t in known.items()}
        else:
            some = sample(bucket)
            found[name] = {word: trial(word, bucket, hosts, some) for word in words}
            alike[key] = name
            tried.append(bucket)
    return found


def slowest(said: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> Trials:
    """What several leaders have tried: all wait for the one that takes longest."""
    found: Trials = {}
    for one in said:
        for name, words in one.items():
            kept = found.setdefault(name, {})
            for word, told in words.items():
                kept[word] = max(kept.get(word, CodecTrial(0.0, 0.0, 0.0)), CodecTrial(*told))
    return found


def decide(found: Trials, may: Sequence[str], rate: float, latency: float, before: Mapping[str, str]) -> dict[str, str]:
    """The cheapest of what each bucket may take, or what it has `before`, if that is not clearly dearer."""
    words = {}
    for name, tried in found.items():
        costs = {word: tried[word].cost(rate, latency) for word in may}
        best, was = min(may, key=lambda word: costs[word]), before.get(name, "")
        words[name] = was if was in costs and costs[best] > KEEP * costs[was] else best
    return words


@dataclass
class LiveComparison:
    """What should cost about as much is tried in the run itself, where encoding and sending compete with computing:
    `candidates`, of which each has the words of all buckets, the one that should be the best first. `took` has the
    seconds of a step with those that were tried, and the link's rate then.
    """

    candidates: list[dict[str, str]]
    took: list[tuple[float, float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # with the present one, on this worker
    spent: list[float] = field(default_factory=list)  # of encoding and decoding, by candidate

    @property
    def present(self) -> dict[str, str]:
        return self.candidates[len(self.took)]

    @property
    def ready(self) -> bool:
        return len(self.steps) >= RUNS

    @property
    def seconds(self) -> float:
        """Of a step with the present one."""
        return min(self.steps[1:] or self.steps or [0.0])

    def note(self, seconds: float, spent: float) -> None:
        """A step has been made with the present one, of which so many seconds went into codes."""
        self.steps.append(seconds)
        self.spent = [*self.spent[: len(self.took)], spent]

    def turn(self, seconds: float, rate: float) -> bool:
        """To the next one, after the present one has taken so long on the slowest worker; False: there is none."""
        self.took.append((seconds, rate))
        self.steps.clear()
        return len(self.took) < len(self.candidates)

    def best(self) -> int:
        """The number of the one that took least."""
        least, changes = min(seconds for seconds, _ in self.took), ROUNDING + LOSSY
        order = sorted(range(len(self.took)), key=lambda n: max(map(changes.index, self.candidates[n].values())))
        return next(n for n in order if ALIKE * self.took[n][0] <= least)

    def told(self) -> str:
        """`none 0.105 s a step, bf16 0.12, int8 0.19 -> none`."""
        said = [f"{_named(one)} {took:.3g}" for one, (took, _) in zip(self.candidates, self.took, strict=True)]
        return f"{', '.join([f'{said[0]} s a step', *said[1:]])} -> {_named(self.candidates[self.best()])}"


def _named(words: Mapping[str, str]) -> str:
    counts = Counter(words.values())
    return next(iter(counts)) if len(counts) == 1 else " and ".join(f"{w} in {n} buckets" for w, n in counts.items())


def close(
    found: Trials, may: Sequence[str], rate: float, latency: float, words: Mapping[str, str]
) -> list[dict[str, str]]:
    """These words, and what else should not take much longer, the same for all buckets, the cheapest first."""

    def cost(words: Mapping[str, str]) -> float:
        return sum(found[name][word].cost(rate, latency) for name, word in words.items())

    others = [dict.fromkeys(words, word) for word in may]
    near = [other for other in sorted(others, key=cost) if other != words and cost(other) <= CLOSE * cost(words)]
    return [dict(words), *near[: TRIES - 1]]


def told(tried: Mapping[str, CodecTrial], word: str, rate: float, latency: float) -> str:
    """`none 2.10 s, bf16 1.05, int8 0.55, (powersgd:4 0.09, lossy) -> int8`."""
    said = {one: f"{one} {trial.cost(rate, latency):.3g}" for one, trial in tried.items()}
    first, *full = (text for one, text in said.items() if one not in LOSSY)
    lossy = [text for one, text in said.items() if one in LOSSY]
    return ", ".join([f"{first} s", *full, *([f"({', '.join(lossy)}, lossy)"] if lossy else [])]) + f" -> {word}"
