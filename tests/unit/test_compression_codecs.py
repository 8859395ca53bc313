"""Codecs: sums as numpy makes them, and nothing that is left out is lost, whatever becomes of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import codec_tuning as choice
from paceline.comm import compression
from paceline.comm import link_speed as links
from paceline.comm.buffer_pool import BufferPool
from paceline.comm.compression import BLOCK, Codec
from paceline.comm.gradient_buckets import Bucket
from paceline.comm.progress_engine import Steps

ROUNDING, LOSSY = ["bf16", "fp16", "int8"], ["topk:0.1", "topk:1.0", "sign", "powersgd:1", "powersgd:3"]
quick = settings(max_examples=10, deadline=None)


@dataclass
class Table:
    """Where so many workers, each a thread, lay something down and see what all have."""

    size: int
    meet: threading.Barrier = field(init=False)
    laid: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.meet = threading.Barrier(self.size)

    def all(self, rank: int, value: torch.Tensor) -> list[torch.Tensor]:
        self.laid[rank] = value.clone()
        self.meet.wait(30)
        found = [self.laid[other] for other in range(self.size)]
        self.meet.wait(30)
        return found


@dataclass
class Leaders:
    """As `Gloo`, and as the group that it belongs to: every host has one worker."""

    table: Table
    rank: int
    chunk: int = 1 << 10

    @property
    def size(self) -> int:
        return self.table.size

    @property
    def leaders(self) -> list[int]:
        return list(range(self.size))

    @property
    def is_host_leader(self) -> bool:
        return self.size > 1

    def start_sum(self, flat: torch.Tensor, between: Callable[..., Steps] | None = None) -> None:
        if between is not None and self.size > 1:
            assert list(between(self, flat)) == []

    def _said(self, value: torch.Tensor) -> Iterator[Any]:
        yield from ()
        return self.table.all(self.rank, value)

    def in_turns(self, parts: Iterable[Steps]) -> Steps:
        for part in parts:
            yield from part

    def all_gather(self, flat: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        return torch.stack((yield from self._said(flat)), out=into)

    def all_to_all(self, rows: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        return torch.stack([one[self.rank] for one in (yield from self._said(rows))], out=into)

    def all_reduce(self, flat: torch.Tensor) -> Any:
        flat.copy_(sum((yield from self._said(flat))))

    def broadcast(self, flat: torch.Tensor, root: int) -> Any:
        flat.copy_((yield from self._said(flat))[root])


def bucket_of(shapes: list[tuple[int, ...]], values: np.ndarray) -> Bucket:
    """All parameters of these shapes, one after another, with these gradients."""
    sizes = [torch.Size(shape) for shape in shapes]
    starts = np.cumsum([0, *(size.numel() for size in sizes)]).tolist()[:-1]
    flat = torch.from_numpy(values.copy())
    return Bucket(0, flat, list(range(len(sizes))), flat, sizes, starts)


def in_threads(count: int, work: Callable[[int, Leaders], Any]) -> list[Any]:
    table = Table(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: work(rank, Leaders(table, rank)), range(count)))


def summed(word: str, gradients: list[np.ndarray], shapes: list[tuple[int, ...]] | None = None) -> list[np.ndarray]:
    """What every host has after one step."""

    def work(rank: int, leaders: Leaders) -> np.ndarray:
        codec, bucket = Codec(word), bucket_of(shapes or [gradients[rank].shape], gradients[rank])
        codec.begin(0, 1.0)
        codec.start(bucket, leaders)  # type: ignore[arg-type]
        return bucket.flat.numpy()

    return in_threads(len(gradients), work)


def values(seed: int, size: int, kind: str) -> np.ndarray:
    chance = np.random.default_rng(seed)
    scale = {"denormal": 1e-42, "tiny": 1e-30, "large": 1e30}.get(kind, 1.0)
    found = (chance.standard_normal(size) * 10.0 ** chance.integers(-3, 4, size) * scale).astype(np.float32)
    return np.zeros(size, np.float32) if kind == "zeros" else found


gradients = st.builds(
    lambda seed, hosts, size, kind: [values(seed + host, size, kind) for host in range(hosts)],
    st.integers(0, 10_000),
    st.integers(2, 4),
    st.sampled_from([1, 2, 7, 255, 256, 257, 700]),
    st.sampled_from(["usual", "zeros", "denormal", "tiny", "large"]),
)

# -- the oracle ---------------------------------------------------------------------------------------------------


def rounded(row: np.ndarray, word: str) -> np.ndarray:
    """What is left of a row of numbers after a code."""
    if word == "bf16":
        bits = row.astype(np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    blocks = np.pad(row, (0, -len(row) % BLOCK)).reshape(-1, BLOCK)
    most = np.abs(blocks).max(1, keepdims=True)
    if word == "int8":
        scale = most / np.float32(127)
        scale[scale == 0] = 1
        found = np.clip(np.rint(blocks / scale), -127, 127).astype(np.int8).astype(np.float32) * scale
    elif word == "fp16":
        scale = np.ldexp(np.float32(1), np.frexp(most)[1] - 1)
        found = (blocks / scale).astype(np.float16).astype(np.float32) * scale
    else:
        found = np.where(blocks >= 0, 1, -1).astype(np.float32) * np.abs(blocks).mean(1, keepdims=True)
    return found.reshape(-1)[: len(row)]


def expected(word: str, rows: list[np.ndarray]) -> np.ndarray:
    length = -(-len(rows[0]) // len(rows))
    padded = [np.pad(row, (0, length * len(rows) - len(row))).reshape(len(rows), length) for row in rows]
    stretches = []
    for stretch in range(len(rows)):
        total = rounded(padded[0][stretch], word).copy()
        for other in padded[1:]:
            total += rounded(other[stretch], word)
        stretches.append(rounded(total, word))
    return np.concatenate(stretches)[: len(rows[0])]


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("word", ["bf16", "fp16", "int8", "topk:0.1", "sign", "powersgd:2"])
def test_sums_do_not_depend_on_the_default_dtype(word: str, default: torch.dtype) -> None:
    rows = [values(host, 700, "usual") for host in range(3)]
    found = [summed(word, rows, [(20, 30), (100,)])]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found.append(summed(word, rows, [(20, 30), (100,)]))
    finally:
        torch.set_default_dtype(before)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("word", ROUNDING)
@given(rows=gradients)
@quick
def test_sums_of_rounded_numbers_have_the_bits_of_numpy(word: str, rows: list[np.ndarray]) -> None:
    for found in summed(word, rows):
        np.testing.assert_array_equal(found, expected(word, rows))


@pytest.mark.parametrize("word", ROUNDING)
def test_sums_in_segments_with_memory_used_again_have_the_bits_of_numpy(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "SEGMENT", 2 * BLOCK)
    steps = [[values(seed + host, size, "usual") for host in range(3)] for seed, size in enumerate([4000, 1300, 4001])]

    def work(rank: int, leaders: Leaders) -> list[np.ndarray]:
        codec, sums = Codec(word), []
        for done, rows in enumerate(steps):
            bucket = bucket_of([rows[rank].shape], rows[rank])
            codec.begin(done, 1.0)
            codec.start(bucket, leaders)  # type: ignore[arg-type]
            sums.append(bucket.flat.numpy())
        return sums

    for found in in_threads(3, work):
        for sums, rows in zip(found, steps, strict=True):
            np.testing.assert_array_equal(sums, expected(word, rows))


def test_buffers_are_used_again() -> None:
    pool = BufferPool()
    small, large = pool.take(2, 100), pool.take(5, 100)
    assert small.shape == (2, 100)
    assert small.data_ptr() != large.data_ptr()
    known = {small.data_ptr(), large.data_ptr()}
    pool.give(small, large)
    again = [pool.take(5, 100), pool.take(1, 150)]
    assert {one.data_ptr() for one in again} == known
    assert [one.shape for one in again] == [(5, 100), (1, 150)]


@given(rows=gradients)
@quick
def test_topk_and_signs_are_those_of_numpy(rows: list[np.ndarray]) -> None:
    signs = sum(rounded(row, "sign").astype(np.float64) for row in rows)
    close = {"rtol": 1e-5, "atol": 1e-44 + 1e-5 * float(np.abs(signs).max())}
    np.testing.assert_allclose(summed("sign", rows)[0], signs, **close)
    largest = np.zeros(len(rows[0]))
    for row in rows:
        kept = np.argsort(-np.abs(row), kind="stable")[: -(-len(row) // 4)]
        largest[kept] += row[kept]
    np.testing.assert_allclose(summed("topk:0.25", rows)[0], largest, **close)


@pytest.mark.parametrize("word", ["powersgd:1", "powersgd:3"])
def test_a_low_rank_sum_is_the_projection_of_the_sum(word: str) -> None:
    """Once the basis is warm: of gradients that stay the same, the best approximation, as the SVD has it."""
    chance = np.random.default_rng(1)
    shapes: list[tuple[int, ...]] = [(12, 3, 3), (7,), (2, 2)]
    rows = [chance.standard_normal(12 * 9 + 7 + 4).astype(np.float32) for _ in range(3)]

    def work(rank: int, leaders: Leaders) -> np.ndarray:
        codec, bucket = Codec(word), bucket_of(shapes, rows[rank])
        for step in range(60):
            codec.begin(step, 1.0)
            codec._was.residual.clear()  # no error feedback here
            bucket.flat.copy_(torch.from_numpy(rows[rank]))
            codec.start(bucket, leaders)  # type: ignore[arg-type]
        return bucket.flat.numpy().copy()

    found, rank = in_threads(3, work), int(word[-1])
    assert all(np.array_equal(found[0], other) for other in found)
    whole = np.sum(rows, 0, dtype=np.float64)
    np.testing.assert_allclose(found[0][108:], whole[108:], rtol=1e-5, atol=1e-6)
    left, values, right = np.linalg.svd(whole[:108].reshape(12, 9))
    best = (left[:, :rank] * values[:rank]) @ right[:rank]
    np.testing.assert_allclose(found[0][:108].reshape(12, 9), best, atol=1e-2)


@pytest.mark.parametrize("word", ROUNDING + LOSSY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_gradients_stay_nonfinite_and_are_named(word: str, bad: float) -> None:
    """So the norm is not, and the step is refused; what was left out before is as it was."""
    rows = [values(host, 300, "usual") for host in range(3)]

    def work(rank: int, leaders: Leaders) -> tuple[bool, set[int], bool]:
        codec, shapes = Codec(word), [(10, 20), (100,)]
        for done in (0, 1):  # the second one is refused
            bucket = bucket_of(shapes, rows[rank])
            if done and rank == 1:
                bucket.flat[205] = bad
            codec.begin(done, 1.0)
            before = {index: left.clone() for index, left in codec.feedback.value.residual.items()}
            codec.start(bucket, leaders)  # type: ignore[arg-type]
        kept = codec.feedback.at(1).residual
        same = kept.keys() == before.keys() and all(kept[index].equal(before[index]) for index in kept)
        return bool(bucket.flat.isfinite().all()), set(codec.bad), same

    assert in_threads(3, work) == [(False, set(), True), (False, {1}, True), (False, set(), True)]


# -- what is left out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", LOSSY)
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
@given(
    seed=st.integers(0, 10_000),
    hosts=st.integers(2, 3),
    # Of each step: the count that its gradients are divided by, and how often it is begun before it counts.
    steps=st.lists(st.tuples(st.sampled_from([1.0, 3.0, 24.0, 0.37]), st.integers(0, 2)), min_size=1, max_size=5),
)
@quick
def test_sent_gradients_and_error_feedback_residual_add_up(
    word: str, dtype: Any, seed: int, hosts: int, steps: list[tuple[float, int]]
) -> None:
    """Through changing counts and steps that are begun again, with other numbers. At the end one worker is left, and
    what it has left out goes into its next gradient.
    """
    shapes: list[tuple[int, ...]] = [(9, 8), (5,), (1, 30), (4, 4, 4)]
    size = 72 + 5 + 30 + 64

    def work(rank: int, leaders: Leaders) -> tuple[Any, ...]:
        codec, chance = Codec(word), np.random.default_rng(seed + rank)
        given, sent = np.zeros(size), np.zeros(size)
        for done, (count, again) in enumerate(steps):
            for attempt in range(again + 1):
                mine = chance.standard_normal(size).astype(dtype)
                bucket = bucket_of(shapes, mine)
                codec.begin(done, count / (attempt + 1))
                codec.start(bucket, leaders)  # type: ignore[arg-type]
            given += mine.astype(np.float64) * (count / (again + 1))
            sent += bucket.flat.numpy().astype(np.float64) * (count / (again + 1))
        kept = codec.feedback.at(len(steps))
        alone = bucket_of(shapes, np.zeros(size, dtype))
        codec.begin(len(steps), 2.0)
        codec.start(alone, Leaders(Table(1), 0))  # type: ignore[arg-type]
        assert codec.feedback.at(len(steps) + 1).residual == {}
        return given, sent, kept.residual[0].numpy().astype(np.float64), kept.squares, alone.flat.numpy() * 2.0

    found = in_threads(hosts, work)
    sums = [np.array(one) for one in zip(*(row[:3] for row in found), strict=True)]
    given, sent, left = sums[0].sum(0), sums[1][0], sums[2].sum(0)
    assert all(np.array_equal(sent, other) for other in sums[1]), "hosts have other sums"
    assert np.linalg.norm(sent + left - given) <= 1e-6 * np.linalg.norm(np.abs(sums[0]).sum(0)) * len(steps)
    for rank, (*_, mine, squares, alone) in enumerate(found):
        np.testing.assert_allclose(alone, mine, rtol=1e-6, atol=1e-6)
        for row in found:
            assert row[3][rank] == pytest.approx(float(np.square(mine).sum()), rel=1e-5), "what others know of it"
        assert squares.keys() == set(range(hosts))


@given(seed=st.integers(0, 10_000), words=st.lists(st.sampled_from(["none", "int8", *LOSSY[:1], "sign", "powersgd:4"])))
@quick
def test_residual_survives_a_change_of_codec(seed: int, words: list[str]) -> None:
    """What one has left out the next one owes, or it goes into the sums that are whole."""
    shapes: list[tuple[int, ...]] = [(24, 18), (5,)]
    size, hosts = 24 * 18 + 5, 2

    def work(rank: int, leaders: Leaders) -> tuple[Any, ...]:
        codec, chance = Codec("auto:lossy"), np.random.default_rng(seed + rank)
        codec.names = ["weight", "bias"]
        given, sent = np.zeros(size), np.zeros(size)
        for done, word in enumerate([*words, "none"]):
            mine = chance.standard_normal(size).astype(np.float32)
            bucket, codec.words = bucket_of(shapes, mine), {"weight": word}
            codec.begin(done, 3.0)
            codec.start(bucket, leaders)  # type: ignore[arg-type]
            given, sent = given + mine, sent + bucket.flat.numpy()
        assert codec.feedback.at(len(words) + 1).residual == {}
        return given, sent

    (mine, sent), (other, same) = in_threads(hosts, work)
    assert np.array_equal(sent, same)
    most = 2e-2 * words.count("int8") + 1e-5  # what int8 rounds off is lost, as ever
    assert np.linalg.norm(sent - mine - other) <= most * np.linalg.norm(np.abs(mine) + np.abs(other))


# -- the choice -----------------------------------------------------------------------------------------------------


def test_codec_trial_counts_bytes_of_a_sum() -> None:
    buckets = [bucket_of([(64, 48), (48,)], values(0, 64 * 48 + 48, "usual")) for _ in range(3)]

    def work(rank: int, leaders: Leaders) -> list[float]:
        sent = []
        for word in choice.ROUNDING + choice.LOSSY:
            codec = Codec("auto")
            codec.names, codec.words = ["weight", "bias"], {"weight": word}
            codec.begin(0, 1.0)
            codec.start(buckets[rank], leaders)  # type: ignore[arg-type]
            sent.append(codec.sent)
        return sent

    sent = max(in_threads(3, work))
    tried = choice.trials([buckets[0]], ["weight", "bias"], choice.ROUNDING + choice.LOSSY, 3)["weight"]
    assert [trial.sent for trial in tried.values()] == pytest.approx(sent, rel=0.11)
    assert all(trial.seconds > 0 for word, trial in tried.items() if word != "none")


def test_codec_trial_sample_is_the_beginning_of_a_bucket() -> None:
    bucket = bucket_of([(7,), (10, 4), (3, 2)], np.zeros(53, np.float32))
    for most, shapes in ((60, [(7,), (10, 4), (3, 2)]), (48, [(7,), (10, 4)]), (20, [(7,), (3, 4)]), (5, [(5,)])):
        some = choice.sample(bucket, most)
        assert [tuple(part.shape) for _, part in some.split(some.local_shard)] == shapes
        assert len(some.local_shard) == sum(np.prod(shape) for shape in shapes)


def test_codecs_of_similar_cost_are_compared_in_the_run() -> None:
    tried = {
        word: choice.CodecTrial(seconds, 1e6, 0) for word, seconds in zip(choice.ROUNDING, (2, 1, 4, 0.9), strict=True)
    }
    first = {"weight": "int8", "bias": "bf16"}
    candidates = choice.close({"weight": tried, "bias": tried}, choice.ROUNDING, 1e9, 0.0, first)
    assert [[*one.values()] for one in candidates] == [["int8", "bf16"], ["int8"] * 2, ["bf16"] * 2, ["none"] * 2]
    runoff, steps = (
        choice.LiveComparison(candidates),
        iter([5.0, 1.2, 1.1, 1.3, 5, 1, 1.2, 1.1, 5, 2, 2, 1.9, 1, 1.02, 1.1, 3]),
    )
    for number in range(4):
        assert runoff.present is candidates[number]
        for _ in range(choice.RUNS):
            assert not runoff.ready
            runoff.note(next(steps), 0.1 * number)
        assert runoff.ready
        assert runoff.next_candidate(runoff.seconds, 1e6 * number) is (number < 3)
    assert runoff.took == [(1.1, 0.0), (1.0, 1e6), (1.9, 2e6), (1.02, 3e6)]
    assert runoff.spent == [0.0, 0.1, 0.2, pytest.approx(0.3)]
    assert runoff.best() == 3, "nearly as fast, and changes nothing"
    said = "int8 in 1 buckets and bf16 in 1 buckets 1.1 s a step, int8 1, bf16 1.9, none 1.02 -> none"
    assert runoff.describe() == said


def test_cheapest_codec_is_chosen_and_kept_until_it_is_clearly_dearer() -> None:
    tried = {
        "none": choice.CodecTrial(0.0, 25e6, 3),
        "bf16": choice.CodecTrial(0.02, 12.5e6, 3),
        "int8": choice.CodecTrial(0.1, 6.4e6, 3),
        "powersgd:4": choice.CodecTrial(0.05, 0.4e6, 6),
    }
    said = [{"weight": {word: [*trial] for word, trial in tried.items()}}, {}]
    found = choice.slowest([*said, {"weight": {"int8": [0.15, 6.4e6, 3]}}])

    def chosen(may: tuple[str, ...], mbit: float, before: str = "") -> str:
        return choice.decide(found, may, mbit * 1e6 / 8, 1e-4, {"weight": before} if before else {})["weight"]

    assert [chosen(choice.ROUNDING[:2] + ("int8",), mbit) for mbit in (50, 500, 20_000)] == ["int8", "bf16", "none"]
    assert chosen((*tried,), 50) == "powersgd:4"
    assert chosen(("none", "int8"), 500) == "int8"
    assert chosen(("none", "int8"), 950) == "int8"
    assert chosen(("none", "int8"), 950, "none") == "none"
    assert chosen(("none", "int8"), 500, "none") == "int8"
    assert choice.format_costs(found["weight"], "int8", 94e6 / 8, 0.0) == (
        "none 2.13 s, bf16 1.08, int8 0.695, (powersgd:4 0.084, lossy) -> int8"
    )
    assert [choice.differs(rate, 100.0) for rate in (60.0, 70.0, 140.0, 160.0)] == [True, False, False, True]


@pytest.mark.parametrize(
    ("word", "most"), [("bf16", 0.5), ("fp16", 0.51), ("int8", 0.26), ("sign", 0.055), ("topk:0.01", 0.031)]
)
def test_codec_bytes_compared_with_uncompressed_sums(word: str, most: float) -> None:
    rows = [values(host, 1 << 16, "usual") for host in range(3)]

    def work(rank: int, leaders: Leaders) -> float:
        codec = Codec(word)
        codec.begin(0, 1.0)
        codec.start(bucket_of([(1 << 16,)], rows[rank]), leaders)  # type: ignore[arg-type]
        return codec.sent / codec.full

    assert max(in_threads(3, work)) <= most + 0.002


@given(st.integers(2, 9), st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8))))
def test_link_speed_of_each_host_pair_is_measured_once(hosts: int, known: set[links.HostPair]) -> None:
    """One at a time."""
    some = {(low, high): links.HostLink([low], [high], 1.0, 0.0) for low, high in known if low < high < hosts}
    met = links.rounds(hosts, some)
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in met)
    pairs = [pair for some in met for pair in some]
    assert sorted([*pairs, *some]) == list(combinations(range(hosts), 2))


def test_link_speeds_are_of_the_present_hosts() -> None:
    """The first worker of one has gone, another host all, and one has come."""
    before = [
        links.HostLink([0, 1], [2, 3], 1.0, 0.1),
        links.HostLink([0, 1], [4], 2.0, 0.2),
        links.HostLink([2, 3], [4], 3.0, 0.3),
    ]
    now = [[1], [2, 3], [5]]
    assert links.between(before, now) == {(0, 1): links.HostLink([1], [2, 3], 1.0, 0.1)}
    assert links.rounds(3, links.between(before, now)) == [[(1, 2)], [(0, 2)]]
    said = [[[[0, 2], 5.0, 0.1]], [[[0, 2], 4.0, 0.2], [[1, 2], 7.0, 0.1]]]
    assert links.combined(said, now) == {
        (0, 2): links.HostLink([1], [5], 4.0, 0.2),
        (1, 2): links.HostLink([2, 3], [5], 7.0, 0.1),
    }
