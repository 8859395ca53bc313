"""Micro-batches of tables, made column by column, are what torch's default_collate makes of their rows, to the bit."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from paceline.base.batching import Grid
from paceline.data import ArrowRows, LanceRows, ParquetRows
from paceline.data.loader import Assignment, Feed, Source

ROWS, GROUP = 103, 17
TYPES = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TYPES += [pa.float16(), pa.float32(), pa.float64(), pa.bool_()]


def values_of(kind: pa.DataType) -> list[Any]:
    if pa.types.is_boolean(kind):
        return [row % 3 == 0 for row in range(ROWS)]
    if pa.types.is_floating(kind):
        odd = {1: float("nan"), 2: float("-inf"), 3: -0.0}
        return [odd.get(row, row / 3) for row in range(ROWS)]
    return [row * (1 if pa.types.is_unsigned_integer(kind) else -1) for row in range(ROWS)]


def good_table() -> pa.Table:
    columns: dict[str, pa.Array] = {}
    for kind in TYPES:
        values = np.array(values_of(kind), kind.to_pandas_dtype())
        pairs = pa.array(np.stack([values, values[::-1]], 1).reshape(-1), kind)
        columns[f"fixed {kind}"] = pa.FixedSizeListArray.from_arrays(pairs, 2)
        columns[f"list {kind}"] = pa.ListArray.from_arrays(np.arange(0, 2 * ROWS + 1, 2, np.int32), pairs)
        if kind != pa.uint64():  # of which torch makes no tensor
            columns[str(kind)] = pa.array(values, kind)
    columns["empty"] = pa.array([[]] * ROWS, pa.list_(pa.int16()))
    columns["text"] = pa.array([f"row {row}" for row in range(ROWS)])
    columns["image"] = pa.array([bytes(range(row)) for row in range(ROWS)])
    columns["texts"] = pa.array([[str(row), "b"] for row in range(ROWS)])
    columns["nested"] = pa.array([{"a": row, "b": {"c": row / 2, "d": str(row)}} for row in range(ROWS)])
    columns["matrix"] = pa.array([[[row, 1], [2, 3]] for row in range(ROWS)])
    return pa.table(columns)


BAD = {
    "null": pa.array([row if row % 40 else None for row in range(ROWS)], pa.int32()),
    "null in a list": pa.array([[row if row % 40 else None] for row in range(ROWS)], pa.list_(pa.float32())),
    "null list": pa.array([[row] if row % 40 else None for row in range(ROWS)], pa.list_(pa.float32(), 1)),
    "ragged": pa.array([[1] * (row % 3) for row in range(ROWS)], pa.list_(pa.int32())),
    "wider later": pa.array([[1] * (1 + row // 50) for row in range(ROWS)], pa.list_(pa.int32())),
    "uint64": pa.array(range(ROWS), pa.uint64()),
    "date": pa.array([datetime.date(2026, 1, 1)] * ROWS),
    "null text": pa.array([None if row % 9 else "a" for row in range(ROWS)], pa.string()),
    "ragged texts": pa.array([["a"] * (row % 3) for row in range(ROWS)]),
}


def write_parquet(table: pa.Table, folder: Path) -> Any:
    for number, begin in enumerate((0, 4 * GROUP)):
        part = table.slice(begin, (4 if begin == 0 else ROWS) * GROUP)
        parquet.write_table(part, folder / f"{number}.parquet", row_group_size=GROUP)
    return ParquetRows(folder)


def write_arrow(table: pa.Table, folder: Path) -> Any:
    for number, (begin, make) in enumerate(((0, pa.ipc.new_file), (4 * GROUP, pa.ipc.new_stream))):
        with make(folder / f"{number}.arrow", table.schema) as writer:
            writer.write_table(table.slice(begin, (4 if begin == 0 else ROWS) * GROUP), max_chunksize=GROUP)
    return ArrowRows(folder / "*.arrow")


def write_lance(table: pa.Table, folder: Path) -> Any:
    lance = pytest.importorskip("lance")
    lance.write_dataset(table, folder / "rows.lance", max_rows_per_file=40)
    return LanceRows(folder / "rows.lance")


WRITERS = [write_parquet, write_arrow, write_lance]
Write = Callable[[pa.Table, Path], Any]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a table has several blocks of Lance, which are read for micro-batches of 8 rows."""
    monkeypatch.setattr("paceline.data.arrow._BLOCK_ROWS", (GROUP, GROUP))
    monkeypatch.setattr("paceline.data.arrow._DENSE", 8)


def by_hand(rows: Any, table: pa.Table, numbers: Sequence[int]) -> Any:
    """What default_collate makes of rows as pyarrow and numpy have them.

    A column with a null has Python objects; in Parquet and Arrow also the other rows of the group.
    """
    numbers = [number % ROWS for number in numbers]
    dicts: list[dict[str, Any]] = [{} for _ in numbers]
    for name in table.column_names:
        column = table[name].combine_chunks()
        for one, number in zip(dicts, numbers, strict=True):
            group = slice(number // GROUP * GROUP, number // GROUP * GROUP + GROUP)
            read = column.take(numbers) if isinstance(rows, LanceRows) else column[group]
            one[name] = value_of(column[number].as_py(), read)
    return default_collate(dicts)


def value_of(value: Any, read: pa.Array) -> Any:
    """A value as it is if these values are read together."""
    if read.null_count:
        return value
    if read.type in TYPES:
        return np.array(value, read.type.to_pandas_dtype())[()]
    is_list = any(look(read.type) for look in (pa.types.is_list, pa.types.is_fixed_size_list))
    if is_list and not read.flatten().null_count and read.type.value_type in TYPES:
        return np.array(value, read.type.value_type.to_pandas_dtype())
    return value


def bits(value: Any) -> Any:
    """All that can be compared of a batch: types, shapes and bytes."""
    if isinstance(value, torch.Tensor):
        content = value.contiguous().reshape(-1).view(torch.uint8).tolist() if value.numel() else []
        return value.dtype, value.shape, value.is_contiguous(), content
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {name: bits(part) for name, part in value.items()}
    return (type(value), [*map(bits, value)]) if isinstance(value, list | tuple) else value


def outcome(make: Callable[[], Any]) -> Any:
    """What a batch is, or the error that it raises."""
    try:
        return bits(make())
    except (TypeError, RuntimeError, LookupError, ValueError) as error:
        return type(error), str(error)


def one_by_one(rows: Any, numbers: Sequence[Any]) -> Any:
    return default_collate([rows[number] for number in numbers])


def choices() -> Iterator[list[int]]:
    generator = random.Random(0)
    yield from ([0], [16, 17], [102, 0, 102], [*range(41, 50)], [*range(60, 78)], [-1, -103, 5])
    for count in (4, 20):
        yield generator.choices(range(ROWS), k=count)


@pytest.mark.parametrize("write", WRITERS)
def test_batches_of_tables_are_those_of_their_rows(write: Write, tmp_path: Path) -> None:
    table = good_table()
    rows = write(table, tmp_path)
    for numbers in choices():
        expected = bits(by_hand(rows, table, numbers))
        assert bits(rows.batch(numbers)) == expected
        assert bits(default_collate(rows.__getitems__(numbers))) == expected
    for number in (0, 40, -1):
        assert bits(rows[number]) == bits(rows.__getitems__([number])[0])
    batch = rows.batch([3, 4])
    batch["int64"][:] = 0  # a tensor of its own
    batch["fixed float"][:] = 0
    rows[3]["fixed float"][:] = 0
    rows[3]["list int8"][:] = 0
    assert rows[3]["list int8"].tolist() == [-3, -99]
    assert rows[3]["int64"] == -3
    assert rows[3]["fixed float"].tolist() == [np.float32(-0.0), np.float32(99 / 3)]
    for wrong in ([103], [0, -104], [2**70], [1.5], ["a"]):
        assert outcome(partial(rows.batch, wrong)) == outcome(partial(one_by_one, rows, wrong))


@pytest.mark.parametrize("write", WRITERS)
def test_bad_rows_of_tables_are_refused_as_their_rows_are(write: Write, tmp_path: Path) -> None:
    refused = set()
    for name, column in BAD.items():
        (folder := tmp_path / name).mkdir()
        table = pa.table({"number": pa.array(range(ROWS)), name: column})
        rows = write(table, folder)
        for numbers in choices():
            expected = outcome(partial(by_hand, rows, table, numbers))
            assert outcome(partial(rows.batch, numbers)) == expected, (name, numbers)
            for number in numbers[:3]:
                assert bits(rows[number]) == bits(rows.__getitems__([number])[0]), (name, number)
            refused |= {name} if isinstance(expected, tuple) else set()
    assert refused == BAD.keys()


def test_files_with_other_columns_are_refused_as_their_rows_are(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": pa.array([1, 2], pa.int32()), "b": [1.0, 2.0]}), tmp_path / "0.parquet")
    parquet.write_table(pa.table({"a": pa.array([3, 4], pa.int64())}), tmp_path / "1.parquet")
    rows = ParquetRows(tmp_path)
    for numbers in ([0, 1], [2, 0], [0, 2], [3]):
        expected = outcome(partial(one_by_one, rows, numbers))
        assert outcome(partial(rows.batch, numbers)) == expected
    assert outcome(partial(rows.batch, [0, 2])) == (KeyError, "'b'")


def test_rows_of_lance_asked_for_one_by_one_are_read_by_blocks(tmp_path: Path) -> None:
    """As a dataset of the script asks for them in the order of the blocks."""

    class Counted(LanceRows):
        def _table(self, rows: list[int]) -> Any:
            reads.append(len(rows))
            return super()._table(rows)

    reads: list[int] = []
    write_lance(good_table().select(["int64"]), tmp_path)
    rows = Counted(tmp_path / "rows.lance", cache=1)
    order = [rows.order(position, ROWS, 3, 1) for position in range(ROWS)]
    assert [-int(rows[number]["int64"]) for number in order] == order
    assert sorted(reads) == [1] * (6 * 7 + 1) + [GROUP] * 6


GRID = Grid(24, 8)


Collate = Callable[[list[Any]], Any]


def shares(
    rows: Any, by_rows: bool | Collate, weights: Sequence[float], start: int, order: Any, loaders: int = 0
) -> list[Any]:
    """The micro-batches that each worker of a team gets in two epochs from the global batch `start` on."""
    collate = by_rows if callable(by_rows) else (lambda samples: default_collate(samples)) if by_rows else None
    taken = []
    for rank in range(len(weights)):
        source = Source.of(rows, 5, collate, order, {"num_workers": loaders} if loaders else {})
        feed = Feed(source, GRID, (start, 2 * GRID.batches(ROWS), 2), lambda *_, **__: None)
        for epoch, count, share in feed.all(Assignment(rank, tuple(weights), fine=len(weights) > 1)):
            for one in share:
                assert one.take_part() or by_rows
                taken.append((rank, epoch, count, one.index, one.numbers, one.rows, bits(one.batch)))
    return taken


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("weights", "start"), [((1.0,), 0), ((2.0, 1.0), 3), ((1.0, 1.0, 1.0), 6)])
def test_teams_get_the_same_batches(write: Write, weights: Sequence[float], start: int, tmp_path: Path) -> None:
    columns = ["int64", "fixed float", "list bool", "float"]
    rows = write(good_table().select(columns), tmp_path)
    for order in (None, rows.order):
        assert shares(rows, False, weights, start, order) == shares(rows, True, weights, start, order)


@pytest.mark.parametrize("write", WRITERS)
def test_a_collate_function_draws_the_same_numbers_for_rows_of_a_table_as_for_those_of_a_list(
    write: Write, tmp_path: Path
) -> None:
    def noisy(samples: list[Any]) -> Any:
        return default_collate(samples), torch.rand(2), np.random.rand(), random.random()

    rows = write(good_table().select(["int64", "list bool"]), tmp_path)
    drawn = [shares(dataset, noisy, (2.0, 1.0), 6, None) for dataset in (rows, [rows[row] for row in range(ROWS)])]
    assert drawn[0] == drawn[1]


def test_a_loader_process_makes_the_same_batches(tmp_path: Path) -> None:
    rows = write_parquet(good_table(), tmp_path)
    assert shares(rows, False, (1.0,), 7, rows.order, 1) == shares(rows, True, (1.0,), 7, rows.order)


class Counted(ParquetRows):
    reads = 0

    def _read(self, number: int) -> Any:
        self.reads += 1
        return super()._read(number)


def test_a_batch_reads_each_row_group_once(tmp_path: Path) -> None:
    write_parquet(good_table(), tmp_path)
    rows = Counted(tmp_path, ["int64"], cache=1)
    assert rows.batch([0, 40, 1, 41, 2])["int64"].tolist() == [0, -40, -1, -41, -2]
    assert rows.reads == 2
    list(DataLoader(rows, 64, shuffle=True))  # type: ignore[arg-type]
    assert rows.reads <= 2 + 2 * 7


class Doubled(ParquetRows):
    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"int64": 2 * super().__getitem__(row)["int64"]}


def test_a_dataset_with_other_rows_is_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is any table if the script has told default_collate what to do with rows."""
    write_parquet(good_table(), tmp_path)
    rows = Doubled(tmp_path)
    assert [row["int64"] for row in rows.__getitems__([3, 50])] == [-6, -100]
    assert not Source.of(rows, 0, None, None, {}).is_table
    assert shares(rows, False, (1.0,), 9, None) == shares(rows, True, (1.0,), 9, None)
    source = Source.of(ParquetRows(tmp_path), 0, None, None, {})
    assert source.is_table
    monkeypatch.setitem(default_collate_fn_map, dict, lambda rows, collate_fn_map: rows)
    assert not source.is_table


@pytest.mark.parametrize("write", WRITERS)
def test_orders_by_groups_take_tensors(write: Write, tmp_path: Path) -> None:
    order = write(good_table().select(["int64"]), tmp_path).order
    for positions in (torch.arange(ROWS, dtype=torch.int64), torch.tensor([[5], [102]], dtype=torch.int64)):
        taken = order(positions, ROWS, 3, 1)
        one_by_one = [order(position, ROWS, 3, 1) for position in positions.flatten().tolist()]
        assert taken.shape == positions.shape
        assert taken.flatten().tolist() == one_by_one
