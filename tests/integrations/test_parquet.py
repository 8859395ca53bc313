"""Rows of Parquet files are those that were written, each once in every order; and what cannot be read is told."""

from __future__ import annotations

import pickle
import re
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


def test_parquet_files_of_lists_and_patterns(folder: Path, tmp_path: Path) -> None:
    first, *others = sorted(folder.glob("*.parquet"))
    for files in (
        folder / "*.parquet",
        str(folder / "part-{00000..00002}.parquet"),
        tmp_path / "r?w[s]",
        [first, f"{folder}/part-0000[12].parquet"],
        [first, *others],
        f"file://{tmp_path}/ro*/part-*.parquet",
        [f"file://{first}", folder / "part-00002.parquet"],
    ):
        check_rows(ParquetRows(files))
    rows = ParquetRows([others[1], first], columns=["number"])
    assert [int(row["number"]) for row in pickle.loads(pickle.dumps(rows)).__getitems__([0, 63])] == [40, 0]
    first.rename(folder / "a[1].parquet")
    for url in (folder, f"file://{folder}"):
        assert len(ParquetRows(f"{url}/a[1].parquet")) == 40


def test_parquet_file_that_changes_is_refused(folder: Path) -> None:
    rows = ParquetRows(folder)
    file = folder / "part-00002.parquet"
    parquet.write_table(table(0, 63), file, row_group_size=20)
    assert rows[0]["number"] == 0
    with pytest.raises(DatasetError) as raised:
        rows[40]
    cure = "start again, and do not write to a file that a training reads"
    assert str(raised.value) == f"{file} has changed since it was opened; {cure}"


def test_column_that_a_later_file_lacks_is_named(folder: Path) -> None:
    parquet.write_table(table(40, 10).drop_columns(["x"]), folder / "part-00003.parquet")
    rows = ParquetRows(folder, columns=["x"])
    assert list(rows[COUNT - 1]) == ["x"]
    with pytest.raises(DatasetError) as raised:
        rows[COUNT]
    assert str(raised.value) == f"{folder}/part-00003.parquet has no column x; it has maybe, number, ok, ragged, text"


def test_damaged_row_group_is_named(folder: Path) -> None:
    file = folder / "part-00000.parquet"
    data = file.read_bytes()
    file.write_bytes(data[:4] + bytes(200) + data[204:])
    with pytest.raises(DatasetError) as raised:
        ParquetRows(folder)[0]
    cure = "check its path and permissions, or write it again"
    assert re.fullmatch(rf"{folder}/part-00000\.parquet cannot be read \(.+\); {cure}", str(raised.value))


def test_parquet_errors(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetError) as raised:
        ParquetRows(folder, columns=["y"])
    assert str(raised.value) == f"{folder} has no column y; it has maybe, number, ok, ragged, text, x"
    (tmp_path / "empty").mkdir()
    cure = "pass the folder that the table was written to, its files, or a pattern like folder/*.parquet"
    for files, text in (
        (tmp_path / "empty", f"{tmp_path}/empty contains no Parquet rows; {cure}"),
        (f"{tmp_path}/*.parquet", f"{tmp_path}/*.parquet contains no Parquet rows; {cure}"),
        ([], f"an empty list contains no Parquet rows; {cure}"),
        ([folder, tmp_path / "none"], f"{tmp_path}/none does not exist; {cure}"),
        (f"file://{tmp_path}/none.parquet", f"file://{tmp_path}/none.parquet does not exist; {cure}"),
    ):
        with pytest.raises(DatasetError) as raised:
            ParquetRows(files)
        assert str(raised.value) == text
    (folder / "other").write_text("no table")
    access = "check its path and permissions, or write it again$"
    with pytest.raises(DatasetError, match=rf"/rows/other cannot be read \(.*[Pp]arquet.*; {access}"):
        ParquetRows(folder)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError) as refused:
        ParquetRows(folder)
    assert str(refused.value) == "Parquet files need pyarrow; pip install 'paceline[parquet]'"
