"""Rows of Arrow files and of Lance datasets are those that were written."""

from __future__ import annotations

import os
import pickle
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from column_tables import COUNT, check_rows, table
from token_folders import served
from torch.utils.data import DataLoader

from paceline.data import ArrowRows, LanceRows
from paceline.data.row_index import BESIDE
from paceline.errors import DatasetError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file, a file without rows, and a stream."""
    made = tmp_path / "rows"
    made.mkdir()
    for number, (first, count, make) in enumerate(
        [(0, 40, pa.ipc.new_file), (40, 0, pa.ipc.new_file), (40, 63, pa.ipc.new_stream)]
    ):
        part = table(first, count)
        with make(made / f"{number}.arrow", part.schema) as writer:
            writer.write_table(part, max_chunksize=17)
    return made


def test_arrow_rows_are_those_that_were_written(folder: Path) -> None:
    check_rows(ArrowRows(folder / "*.arrow"))
    assert sorted(path.name for path in (folder / BESIDE).iterdir()) == [f"{part}.arrow.index" for part in range(3)]
    rows = ArrowRows(folder / "*.arrow", columns=["number"], cache=1)
    assert pickle.loads(pickle.dumps(rows))[99] == {"number": 99}
    assert [int(row["number"]) for row in DataLoader(rows, None, num_workers=1)] == list(range(COUNT))
    assert len(rows._rows._kept) <= 1
    taken = [rows.order(position, COUNT, 3, 1) for position in range(COUNT)]
    assert sorted(taken) == list(range(COUNT)) != taken


def test_arrow_rows_of_hugging_face_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"number": [*range(50)]}).save_to_disk(tmp_path, num_shards=3)
    rows = ArrowRows(tmp_path / "*.arrow")
    assert [int(rows[n]["number"]) for n in range(50)] == list(range(50))


def test_arrow_files_of_a_server(folder: Path, tmp_path: Path) -> None:
    with served(folder) as (url, _):
        rows = ArrowRows(f"{url}/0.arrow", index=tmp_path / "indexes")
        assert [int(rows[n]["number"]) for n in (39, 0)] == [39, 0]
        with pytest.raises(UsageError) as refused:
            ArrowRows(f"{url}/2.arrow", index=tmp_path / "indexes")
    what = f"{url}/2.arrow is an Arrow stream, whose rows can only be read from the first one on"
    assert str(refused.value) == f"{what}; copy it to this machine, or write it with pyarrow.ipc.new_file"


@pytest.mark.parametrize("number", [0, 2])
def test_arrow_file_that_changes_is_refused(number: int, folder: Path) -> None:
    """Also rows that are in memory: they view the mapped file, and a shortened one would end the process."""
    file = folder / f"{number}.arrow"
    rows = ArrowRows(file)
    assert rows[0]["number"] == 20 * number
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(0, 0))
    cure = "start again, and do not write to a file that a training reads"
    for read in (lambda: rows[0], lambda: rows.__getitems__([0, 1]), lambda: rows.batch([0]), lambda: rows[-1]):
        with pytest.raises(DatasetError) as raised:
            read()
        assert str(raised.value) == f"{file} has changed since it was opened; {cure}"
    assert ArrowRows(file)[0]["number"] == 20 * number


def test_damaged_record_batch_is_named(folder: Path) -> None:
    data = (folder / "0.arrow").read_bytes()
    begin = [match.start() for match in re.finditer(b"\xff\xff\xff\xff", data)][2]  # after the schema and a batch
    (folder / "0.arrow").write_bytes(data[:begin] + bytes(64) + data[begin + 64 :])
    with pytest.raises(DatasetError) as raised:
        ArrowRows(folder / "0.arrow")
    what, cure = rf"record batch 1 of {folder}/0\.arrow cannot be read \(.+\)", "write or copy the file again"
    assert re.fullmatch(f"{what}; {cure}", str(raised.value))


def test_column_that_a_later_file_lacks_is_named(folder: Path) -> None:
    part = table(40, 10).drop_columns(["x"])
    with pa.ipc.new_file(folder / "3.arrow", part.schema) as writer:
        writer.write_table(part)
    rows = ArrowRows([folder / "0.arrow", folder / "3.arrow"], columns=["x"])
    assert list(rows[39]) == ["x"]
    with pytest.raises(DatasetError) as raised:
        rows[40]
    assert str(raised.value) == f"{folder}/3.arrow has no column x; it has maybe, number, ok, ragged, text"


def test_arrow_errors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "no.arrow").write_text("no table, but longer than eight bytes")
    (folder / "empty.arrow").touch()
    cure = "pass Arrow files, or a pattern like folder/*.arrow"
    for files, columns, text in (
        (folder / "none.arrow", None, f"{folder}/none.arrow does not exist; {cure}"),
        (folder / "1.arrow", None, f"{folder}/1.arrow has no rows; {cure}"),
        (folder, None, f"{folder} is a folder; {cure}"),
        (folder / "0.arrow", ["y"], f"{folder}/0.arrow has no column y; it has maybe, number, ok, ragged, text, x"),
    ):
        with pytest.raises(DatasetError) as raised:
            ArrowRows(files, columns)
        assert str(raised.value) == text
    for name in ("no", "empty"):
        with pytest.raises(DatasetError, match=rf"/{name}\.arrow is not an Arrow file \(.+\); write or copy it again$"):
            ArrowRows(folder / f"{name}.arrow")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError) as refused:
        ArrowRows(folder / "0.arrow")
    assert str(refused.value) == "Arrow files need pyarrow; pip install 'paceline[parquet]'"


def test_lance_rows_are_those_that_were_written(tmp_path: Path) -> None:
    """Of the version that was opened, whatever is written later."""
    lance = pytest.importorskip("lance")
    lance.write_dataset(table(0, COUNT), tmp_path / "rows.lance", max_rows_per_file=40)
    rows = LanceRows(tmp_path / "rows.lance")
    lance.write_dataset(table(500, 7), tmp_path / "rows.lance", mode="overwrite")
    check_rows(rows)
    check_rows(pickle.loads(pickle.dumps(rows)))
    assert [int(row["number"]) for row in rows.__getitems__([77, 3, 77])] == [77, 3, 77]
    assert LanceRows(tmp_path / "rows.lance", columns=["number"])[6] == {"number": 506}
    with pytest.raises(DatasetError, match=r"rows\.lance has no column y; it has maybe, number, ok, ragged, text, x$"):
        LanceRows(tmp_path / "rows.lance", columns=["y"])
    with pytest.raises(DatasetError, match=r"/none cannot be read \(.+\); check its path and permissions$"):
        LanceRows(tmp_path / "none")


def test_lance_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(UsageError) as refused:
        LanceRows("rows.lance")
    assert str(refused.value) == "Lance datasets need lance; pip install 'paceline[lance]'"
    with pytest.raises(UsageError) as refused:
        LanceRows(["rows.lance"])  # type: ignore[arg-type]
    what = "url= needs a path or a URL, got a list"
    assert str(refused.value) == f"{what}; pass a dataset that lance.write_dataset wrote"
