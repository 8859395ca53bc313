"""Iterable datasets continue from a position exactly as if they had not been interrupted, or say that they cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from paceline.data import Stream
from paceline.data.loader import Source
from paceline.data.row_stream import Position, RowStream, continues_exactly
from paceline.errors import UsageError

datasets = pytest.importorskip("datasets")


class Counting(IterableDataset[Any]):
    """With a state, and with random numbers if asked for."""

    def __init__(self, draws: bool = False) -> None:
        self.at, self.draws, self.epoch = 0, draws, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for row in range(self.at, 103):
            self.at = row + 1
            yield row, self.epoch, float(torch.rand(())) if self.draws else 0.0
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def base() -> Any:
    return datasets.Dataset.from_dict({"n": [*range(103)]}).to_iterable_dataset(num_shards=4)


EXACT: dict[str, Callable[[], Any]] = {
    "own": Counting,
    "stream": lambda: Stream(Counting),
    "shards": base,
    "map": lambda: base().map(lambda row: {"m": row["n"] * 2}),
    "batched map": lambda: base().map(lambda rows: {"m": [n * 2 for n in rows["n"]]}, batched=True, batch_size=10),
    "filter": lambda: base().filter(lambda row: row["n"] % 3),
    "torch": lambda: base().with_format("torch"),
    "skip and take": lambda: base().skip(5).take(50),
    "interleave": lambda: datasets.interleave_datasets(
        [base(), base().map(lambda row: {"n": row["n"] + 1000})], probabilities=[0.3, 0.7], seed=3
    ),
    "repeat": lambda: base().repeat(2),
}
INEXACT: dict[str, Callable[[], Any]] = {
    "draws": lambda: Counting(draws=True),
    "list": lambda: list(range(103)),
    "shuffle buffer": lambda: base().shuffle(seed=1, buffer_size=20).map(lambda row: row),
    "batched tables": lambda: base().with_format("torch").map(lambda rows: rows, batched=True, batch_size=10),
}


def stream(dataset: Any, start: Position | None = None) -> RowStream:
    return RowStream(Source(dataset, None, 3), range(3), 12, iter, lambda: False, start)


def read(rows: RowStream, step: int = 0) -> Iterator[tuple[str, Position]]:
    while rows.reach(step):
        yield str((rows.epoch, rows.rows)), rows.position
        step += 1


SLOW = ("torch", "interleave", "repeat", "skip and take", "shards")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in EXACT]
)
def test_rows_after_a_position_are_those_of_an_undisturbed_pass(name: str) -> None:
    """Of the same object, and of another one; the object then begins anew."""
    dataset = EXACT[name]()
    batches, positions = zip(*read(stream(dataset)), strict=True)
    assert len(batches) > 12
    ends = [number for number, position in enumerate(positions) if position.state is None]
    assert len(ends) <= 3  # an epoch's last batch, if it is smaller
    for at in {0, 5, len(batches) // 2, len(batches) - 2} - {*ends}:
        saved = Position.of(positions[at].saved(), positions[at].step)
        for again in (dataset, EXACT[name]()):
            assert [batch for batch, _ in read(stream(again, saved), at + 1)] == list(batches[at + 1 :])
    assert [batch for batch, _ in read(stream(dataset))] == list(batches)


@pytest.mark.parametrize("name", INEXACT)
def test_state_that_is_not_exact_is_not_used(name: str) -> None:
    positions = [position for _, position in read(stream(INEXACT[name]()))]
    assert {position.state for position in positions} == {None}
    assert continues_exactly(INEXACT[name]()) == (name == "draws")


def test_position_after_the_steps_that_count_is_not_used() -> None:
    saved = Position(5, 0, 60, {"at": 60}).saved()
    assert Position.of(saved, 5) == Position(5, 0, 60, {"at": 60})
    assert Position.of(saved, 4) is None
    assert Position.of(None, 4) is None
    assert Position.of({**saved, "state": None}, 9) is None


def test_parquet_files_that_are_streamed_continue(tmp_path: Path) -> None:
    for part in range(3):
        datasets.Dataset.from_dict({"n": [*range(part * 40, part * 40 + 40)]}).to_parquet(tmp_path / f"{part}.parquet")
    files = sorted(map(str, tmp_path.glob("*.parquet")))
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=tmp_path)
    batches, positions = zip(*read(stream(rows)), strict=True)
    assert [batch for batch, _ in read(stream(rows, positions[4]), 5)] == list(batches[5:])


def test_what_is_not_iterable_is_refused() -> None:
    with pytest.raises(UsageError) as refused:
        Stream(5)  # type: ignore[arg-type]
    what = "Stream needs an iterable or a function that returns one, got an int"
    assert str(refused.value) == f"{what}; pass an object with __iter__"
    assert not hasattr(Stream([1]), "set_epoch")
    assert list(Stream([1, 2])) == list(Stream(lambda: [1, 2])) == [1, 2]
