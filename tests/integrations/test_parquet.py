"""Rows of Parquet files are those that were written, each once in every order; and what cannot be read is told."""

from __future__ import annotations

import pickle
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from column_tables import COUNT, check_rows, table
from pyarrow import parquet
from torch.utils.data import DataLoader, default_collate

from paceline.data import ParquetRows
from paceline.errors import DatasetError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As Spark leaves it: several files, row groups of unequal size, one without rows, a mark that all is written."""
    made = tmp_path / "rows"
    made.mkdir()
    for number, (first, count) in enumerate([(0, 40), (40, 0), (40, 63)]):
        parquet.write_table(table(first, count), made / f"part-{number:05d}.parquet", row_group_size=17)
    (made / "_SUCCESS").touch()
    (made / ".part-00000.parquet.crc").write_bytes(b"crc")
    return made


def test_parquet_rows_are_those_that_were_written(folder: Path) -> None:
    check_rows(ParquetRows(folder))


def test_parquet_rows_collate_to_tensors(folder: Path) -> None:
    rows = ParquetRows(folder, columns=["x", "number", "ok"])
    batch = default_collate([rows[n] for n in (5, 90)])
    assert batch["x"].equal(torch.tensor([[2.5, 1.25, -5], [45, 22.5, -90]]))
    assert batch["number"].equal(torch.tensor([5, 90], dtype=torch.int32))
    assert batch["ok"].equal(torch.tensor([False, True]))


@pytest.mark.parametrize("seed", [0, 7])
def test_parquet_order_takes_each_row_once_by_row_groups(folder: Path, seed: int) -> None:
    rows = ParquetRows(folder)
    taken = [rows.order(position, COUNT, seed, 2) for position in range(COUNT)]
    assert sorted(taken) == list(range(COUNT))
    assert taken != [rows.order(position, COUNT, seed, 3) for position in range(COUNT)]
    assert taken != [rows.order(position, COUNT, seed + 1, 2) for position in range(COUNT)]
    ends = (17, 34, 40, 57, 74, 91)
    groups = [sum(row >= end for end in ends) for row in taken]
    changes = sum(a != b for a, b in pairwise(groups))
    assert changes == len(ends)
    assert sorted(taken[:17]) != taken[:17]
    with pytest.raises(UsageError) as refused:
        rows.order(0, 50)
    assert (
        str(refused.value)
        == "this order is for 103 rows, but the dataset has 50; pass the ParquetRows object itself to steps()"
    )


def test_parquet_cache_is_bounded(folder: Path) -> None:
    rows = ParquetRows(folder, cache=1)
    assert [int(rows[n]["number"]) for n in (0, 50, 1, 51)] == [0, 50, 1, 51]
    assert len(rows._rows._kept) == 1
    rows = ParquetRows(folder)
    for n in range(COUNT):
        assert rows[n]["number"] == n
    assert len(rows._rows._kept) == 7


def test_parquet_rows_pickle_and_fork(folder: Path) -> None:
    rows = ParquetRows(folder, columns=["number"])
    assert rows[3]["number"] == 3  # its file is open, and stays this process's
    again = pickle.loads(pickle.dumps(rows))
    assert [int(again[n]["number"]) for n in (3, 100)] == [3, 100]
    found = torch.cat([batch["number"] for batch in DataLoader(rows, batch_size=50, num_workers=2)])
    assert found.tolist() == list(range(COUNT))


def test_parquet_errors(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetError) as raised:
        ParquetRows(folder, columns=["y"])
    assert str(raised.value) == f"{folder} has no column y; it has maybe, number, ok, ragged, text, x"
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError) as raised:
        ParquetRows(tmp_path / "empty")
    assert str(raised.value) == (
        f"{tmp_path / 'empty'} contains no Parquet rows; pass the folder that the table was written to"
    )
    (folder / "other").write_text("no table")
    with pytest.raises(DatasetError, match=r"/rows cannot be read \(.*[Pp]arquet.*; check its path and permissions$"):
        ParquetRows(folder)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError) as refused:
        ParquetRows(folder)
    assert str(refused.value) == "Parquet files need pyarrow; pip install 'paceline[parquet]'"
