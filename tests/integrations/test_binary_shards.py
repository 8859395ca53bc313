"""Rows of MDS folders and of litdata's optimized datasets are those that the libraries were given."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from shards_of_libraries import EVERY, LITDATA_KINDS, MDS_KINDS, ROWS, litdata_row, mds_row, small_row, tokens, unpack
from token_folders import served
from torch.utils.data import DataLoader, default_collate

from paceline.data import LitDataRows, MDSRows
from paceline.errors import DatasetError, UsageError


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("shards"))


def same(one: Any, other: Any) -> bool:
    """Equal values of equal types; images by their pixels."""
    if isinstance(one, Image.Image):
        one, other = ((np.asarray(image), image.mode) for image in (one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def mds_expected(number: int) -> dict[str, Any]:
    row = mds_row(number)
    numbers = {"u8": np.uint8, "f2": np.float16, "f4": np.float32}
    row |= {name: kind(row[name]) for name, kind in numbers.items()}
    return row


def test_values_of_each_mds_encoding(shards: Path) -> None:
    rows = MDSRows(shards / "mds" / "every")
    assert len(rows) == EVERY
    for number, row in enumerate(rows.__getitems__(range(EVERY))):
        expected = mds_expected(number)
        jpegs = [row.pop("jpeg"), *row.pop("jpegs")]
        assert len(jpegs) == 1 + len(expected.pop("jpegs"))
        original = np.asarray(expected.pop("jpeg"), np.int16)
        assert all(abs(np.asarray(image, np.int16) - original).max() <= 3 for image in jpegs)
        assert row.keys() == expected.keys()
        assert [name for name in row if not same(row[name], expected[name])] == []
    some = MDSRows(shards / "mds" / "every", columns=["shaped", "number"])
    batch = default_collate(some.__getitems__([3, -1]))
    assert batch["shaped"].equal(torch.tensor([3, 8], dtype=torch.int16)[:, None, None].expand(2, 2, 3))
    assert batch["number"].equal(torch.tensor([-1, 4]))


def litdata_expected(number: int) -> dict[str, Any]:
    row = litdata_row(number)
    return row | {"jpeg": torch.from_numpy(np.asarray(row["jpeg"]).transpose(2, 0, 1).copy())}


def test_values_of_each_litdata_type(shards: Path) -> None:
    rows = LitDataRows(shards / "litdata" / "every")
    for number, row in enumerate(rows.__getitems__(range(EVERY))):
        expected = litdata_expected(number)
        assert row.keys() == expected.keys()
        assert [name for name in row if not same(row[name], expected[name])] == []
    tuples = LitDataRows(shards / "litdata" / "tuples")
    assert same(tuples[5], (5, [torch.tensor([5.0, 5.0]), {"q": "x"}]))
    assert [*map(LitDataRows(shards / "litdata" / "plain").__getitem__, (0, 3, 8))] == [0, 3, 8]


@pytest.mark.parametrize("size", [10, 64])
def test_tokens_of_litdata_are_blocks_of_each_chunk(size: int, shards: Path) -> None:
    rows = LitDataRows(shards / "litdata" / "tokens", block_size=size)
    dims = [chunk["dim"] for chunk in json.loads((shards / "litdata" / "tokens" / "index.json").read_text())["chunks"]]
    assert len(dims) > 1
    assert max(dims) > 2 * 64
    chunks = torch.cat([tokens(number) for number in range(ROWS)]).split(dims)
    expected = [block for chunk in chunks for block in chunk.split(size) if len(block) == size]
    assert len(rows) == len(expected)
    assert torch.stack(rows.__getitems__(range(len(rows)))).equal(torch.stack(expected))


SMALL: dict[str, Callable[[Path], Any]] = {
    **{f"mds {kind}": lambda shards, kind=kind: MDSRows(shards / "mds" / kind, cache=1) for kind in MDS_KINDS},
    **{
        f"litdata {kind}": lambda shards, kind=kind: LitDataRows(shards / "litdata" / kind, cache=1)
        for kind in LITDATA_KINDS
    },
}


@pytest.mark.parametrize("name", SMALL)
def test_rows_of_compressed_shards(name: str, shards: Path) -> None:
    """A shard at a time is kept in memory, and the order goes through one after another."""
    rows = SMALL[name](shards)
    with_image = name.startswith("litdata") and "arrow" not in name
    expected = [small_row(number, with_image) for number in range(ROWS)]
    assert same(rows.__getitems__(range(ROWS)), expected)
    assert same(rows.__getitems__([49, -50, 7]), [expected[49], expected[0], expected[7]])
    again = pickle.loads(pickle.dumps(rows))
    order = [again.order(position, ROWS, 3, 1) for position in range(ROWS)]
    assert sorted(order) == list(range(ROWS))
    assert order != list(range(ROWS))
    if name in ("mds zstd", "litdata arrow"):
        loaded = DataLoader(again, batch_size=20, sampler=order, num_workers=1, collate_fn=list)
        assert [row["number"] for batch in loaded for row in batch] == order
    with pytest.raises(IndexError, match="row 50 of 50"):
        rows[50]


@pytest.mark.parametrize("name", ["mds none", "mds zstd", "litdata images", "litdata arrow"])
def test_shards_of_a_server(name: str, shards: Path) -> None:
    library, _, kind = name.partition(" ")
    with served(shards) as (url, log):
        dataset = (MDSRows if library == "mds" else LitDataRows)(f"{url}/{library}/{kind}")
        assert [path.rpartition("/")[2] for path, _ in log] == ["index.json"]
        log.clear()
        taken = dataset.__getitems__([40, 3, 4])
        assert [row["number"] for row in taken] == [40, 3, 4]
        read = sum(size for _, size in log)
        size = sum(path.stat().st_size for path in (shards / library / kind).iterdir())
        log.clear()
        assert dataset[3]["number"] == 3
        again = sum(size for _, size in log)
        assert (read < size / 2 and 0 < again < 100) if kind in ("none", "images") else again == 0


def test_shards_that_a_library_has_decompressed_are_read(shards: Path, tmp_path: Path) -> None:
    """Both libraries replace compressed local files by decompressed ones."""
    shutil.copytree(shards / "litdata" / "zstd chunk", tmp_path / "lit")
    rows = LitDataRows(tmp_path / "lit")
    import pyarrow

    for file in (tmp_path / "lit").glob("*.zstd.bin"):
        with pyarrow.CompressedInputStream(str(file), "zstd") as stream:
            file.with_name(file.name.replace(".zstd", "")).write_bytes(stream.read())
        file.unlink()
    assert same(LitDataRows(tmp_path / "lit")[33], small_row(33, True))
    shutil.copytree(shards / "mds" / "gz", tmp_path / "mds")
    rows = MDSRows(tmp_path / "mds")
    assert rows[33] == small_row(33)
    for file in (tmp_path / "mds").glob("*.gz"):
        shutil.copy(shards / "mds" / "none" / file.name.removesuffix(".gz"), tmp_path / "mds")
        file.unlink()
    assert MDSRows(tmp_path / "mds")[33] == small_row(33)


def write_mds(folder: Path, *shards: tuple[dict[str, tuple[str, int | None]], list[bytes]]) -> Path:
    """Writes a folder of shards: each ({column: (encoding, bytes of a value)}, the bytes of its rows)."""
    folder.mkdir()
    listed = []
    for number, (columns, rows) in enumerate(shards):
        ends = np.cumsum([4 * (len(rows) + 2), *map(len, rows)])
        data = np.array([len(rows), *ends], "<u4").tobytes() + b"".join(rows)
        (folder / f"{number}.mds").write_bytes(data)
        encodings, sizes = zip(*columns.values(), strict=True)
        about = {"column_names": [*columns], "column_encodings": encodings, "column_sizes": sizes, "format": "mds"}
        about |= {"raw_data": {"basename": f"{number}.mds", "bytes": len(data)}, "zip_data": None}
        listed.append(about | {"compression": None, "samples": len(rows), "version": 2})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))
    return folder


def number_of(value: int, kind: str) -> bytes:
    return np.array([value], kind).tobytes()


def test_each_mds_shard_has_its_own_encodings(tmp_path: Path) -> None:
    large, small = number_of(2**40, "<i8"), number_of(7, "<i4")
    first = ({"number": ("int", 8)}, [large])
    rows = MDSRows(write_mds(tmp_path / "mds", first, ({"number": ("int32", 4)}, [small]), first))
    assert same([rows[number]["number"] for number in range(3)], [2**40, np.int32(7), 2**40])
    folder = write_mds(tmp_path / "other", first, ({"count": ("int", 8)}, [large]))
    for columns, where, text in (
        (["number"], f"{folder}/1.mds", "has no column number; it has count"),
        (["count"], f"{folder}/0.mds", "has no column count; it has number"),
        (["x"], folder, "has no column x; it has count, number"),
    ):
        with pytest.raises(DatasetError) as raised:
            MDSRows(folder, columns=columns)
        assert str(raised.value) == f"{where} {text}"
    assert [*map(list, MDSRows(folder).__getitems__([0, 1]))] == [["number"], ["count"]]


def test_damaged_mds_rows_are_named(tmp_path: Path) -> None:
    columns: dict[str, tuple[str, int | None]] = {"text": ("str", None), "number": ("int", 8)}
    row = number_of(2, "<u4") + b"ab" + number_of(5, "<i8")
    damaged = [
        row,
        row[:-1],
        b"\1",
        number_of(200, "<u4") + row[4:],
        row + b"x",
        number_of(2, "<u4") + b"\xff" + row[5:],
    ]
    rows = MDSRows(write_mds(tmp_path / "mds", (columns, damaged)))
    assert rows[0] == {"text": "ab", "number": 5}
    for number, what in (
        (1, "a row of {} cannot be decoded (it has 13 bytes, and its values 14)"),
        (2, "a row of {} cannot be decoded (buffer is smaller than requested size)"),
        (3, "a row of {} cannot be decoded (it has 14 bytes, and its values 212)"),
        (4, "a row of {} cannot be decoded (it has 15 bytes, and its values 14)"),
        (5, "the column text of a row of {} cannot be decoded ('utf-8' codec can't decode byte 0xff in position 0: "),
    ):
        with pytest.raises(DatasetError) as raised:
            rows[number]
        assert str(raised.value).startswith(what.format(tmp_path / "mds" / "0.mds"))
        assert str(raised.value).endswith("; copy the shard again, or write it again")


def test_shards_that_are_cut_short_are_refused(shards: Path, tmp_path: Path) -> None:
    mds, lit = tmp_path / "mds", tmp_path / "lit"
    shutil.copytree(shards / "mds" / "none", mds)
    shutil.copytree(shards / "litdata" / "images", lit)
    index = json.loads((mds / "index.json").read_text())["shards"][0]
    chunk = json.loads((lit / "index.json").read_text())["chunks"][0]
    head, file = 4 * (index["samples"] + 2), mds / index["raw_data"]["basename"]
    content = file.read_bytes()
    end = int(np.frombuffer(content, "<u4", 1, 8)[0])
    for path, size, least, read in (
        (file, 0, head, lambda: MDSRows(mds)[0]),
        (file, head - 1, head, lambda: MDSRows(mds)[0]),
        (file, end - 1, end, lambda: MDSRows(mds)[0]),
        (lit / chunk["filename"], 0, chunk["chunk_bytes"], lambda: LitDataRows(lit)[0]),
    ):
        path.write_bytes(content[:size])
        with pytest.raises(DatasetError) as raised:
            read()
        what = f"{path} is incomplete: it has {size} bytes instead of at least {least}"
        assert str(raised.value) == f"{what}; copy or write it again"
    file.write_bytes(content[:4] + content[8:12] + content[4:8] + content[12:])  # the first row ends before it begins
    with pytest.raises(DatasetError) as raised:
        MDSRows(mds)[0]
    what = f"{file} does not have the {index['samples']} rows of its index"
    assert str(raised.value) == f"{what}; copy it again, with its index.json"


@pytest.mark.parametrize("name", ["mds zstd", "litdata arrow", "litdata zstd chunk"])
def test_shards_that_change_are_refused(name: str, shards: Path, tmp_path: Path) -> None:
    """Also what is in memory: it may view the mapped file, and a shortened one would end the process."""
    library, _, kind = name.partition(" ")
    shutil.copytree(shards / library / kind, tmp_path / "rows")
    rows = (MDSRows if library == "mds" else LitDataRows)(tmp_path / "rows")
    assert rows[0]["number"] == 0
    for path in (tmp_path / "rows").iterdir():
        os.utime(path, ns=(0, 0))
    cure = "start again, and do not write to a file that a training reads"
    with pytest.raises(DatasetError, match=rf"/rows/\S+ has changed since it was opened; {cure}$"):
        rows[0]


INDEX_ERRORS = [
    ("mds", lambda index: index["shards"].append(5), "TypeError: 'int' object is not subscriptable"),
    ("mds", lambda index: index["shards"][0].pop("samples"), "KeyError: 'samples'"),
    (
        "mds",
        lambda index: index["shards"][0].update(samples="3"),
        "TypeError: 'str' object cannot be interpreted as an integer",
    ),
    ("litdata", lambda index: index["chunks"].append(5), "TypeError: 'int' object is not subscriptable"),
    (
        "litdata",
        lambda index: index["config"].update(data_format=[5]),
        "AttributeError: 'int' object has no attribute 'partition'",
    ),
    (
        "litdata",
        lambda index: index["chunks"][0].update(chunk_size="3"),
        "TypeError: 'str' object cannot be interpreted as an integer",
    ),
]


@pytest.mark.parametrize(("library", "damage", "why"), INDEX_ERRORS, ids=range(len(INDEX_ERRORS)))
def test_damaged_index_is_refused(
    library: str, damage: Callable[[Any], Any], why: str, shards: Path, tmp_path: Path
) -> None:
    made = json.loads((shards / library / ("none" if library == "mds" else "images") / "index.json").read_text())
    damage(made)
    (tmp_path / "index.json").write_text(json.dumps(made))
    with pytest.raises(DatasetError) as raised:
        (MDSRows if library == "mds" else LitDataRows)(tmp_path)
    name, cure = ("an MDS index", MDS_CURE) if library == "mds" else ("an index of litdata", LIT_CURE)
    assert str(raised.value) == f"{tmp_path}/index.json is not {name} ({why}); {cure}"


@pytest.mark.parametrize("form", ["no_header_numpy:99", "no_header_tensor:-1", "no_header_numpy:", "matrix:3"])
def test_unknown_type_of_litdata_is_named(form: str, shards: Path, tmp_path: Path) -> None:
    made = json.loads((shards / "litdata" / "images" / "index.json").read_text())
    made["config"]["data_format"][0] = form
    (tmp_path / "index.json").write_text(json.dumps(made))
    with pytest.raises(UsageError) as raised:
        LitDataRows(tmp_path)
    assert str(raised.value) == f"{tmp_path} has values of the type {form}; write them with another type"


MDS_CURE = "pass the folder that MDSWriter wrote, with its index.json"
LIT_CURE = "pass the folder that litdata.optimize wrote, with its index.json"


def test_folders_that_cannot_be_read_are_refused(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = []
    mds, lit = shards / "mds", shards / "litdata"
    pickles = ", which can run code; leave it out with columns=, or write it with another encoding"
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "index.json").write_text("[]")
    index = json.loads((mds / "none" / "index.json").read_text())
    (tmp_path / "json").mkdir()
    samples = index["shards"][0]["samples"]
    index["shards"][0]["format"] = "json"
    (tmp_path / "json" / "index.json").write_text(json.dumps(index))
    shutil.copytree(mds / "none", tmp_path / "cut")
    (tmp_path / "cut" / "shard.00000.mds").write_bytes(b"\1\0\0\0" + bytes(500))
    where = f"{tmp_path}/cut/shard.00000.mds"
    cases += [
        (lambda: MDSRows(tmp_path), DatasetError, f"{tmp_path}/index.json does not exist; {MDS_CURE}"),
        (
            lambda: MDSRows(tmp_path / "bad"),
            DatasetError,
            f"{tmp_path}/bad/index.json is not an index of shards; {MDS_CURE}",
        ),
        (
            lambda: MDSRows(lit / "every"),
            DatasetError,
            f"{lit}/every/index.json is not an MDS index of version 2; {MDS_CURE}",
        ),
        (
            lambda: MDSRows(tmp_path / "json"),
            DatasetError,
            f"{tmp_path}/json/index.json has shards of the format json; write them with MDSWriter",
        ),
        (
            lambda: MDSRows(mds / "pickles"),
            UsageError,
            f"the column what of {mds}/pickles has the encoding pkl{pickles}",
        ),
        (
            lambda: MDSRows(mds / "none", columns=["x"]),
            DatasetError,
            f"{mds}/none has no column x; it has number, text",
        ),
        (
            lambda: MDSRows(tmp_path / "cut")[0],
            DatasetError,
            f"{where} does not have the {samples} rows of its index; copy it again, with its index.json",
        ),
        (
            lambda: MDSRows(write_mds(tmp_path / "array", ({"x": ("ndarray:words", None)}, [b""]))),
            UsageError,
            f"the column x of {tmp_path}/array has the encoding ndarray:words"
            "; leave it out with columns=, or write it with another encoding",
        ),
        (lambda: MDSRows([mds]), UsageError, f"url= needs a path or a URL, got a list; {MDS_CURE}"),  # type: ignore[arg-type]
        (
            lambda: LitDataRows(mds / "none"),
            DatasetError,
            f"{mds}/none/index.json is not an index of litdata (KeyError: 'config'); {LIT_CURE}",
        ),
        (
            lambda: LitDataRows(lit / "pickles"),
            UsageError,
            f"{lit}/pickles has values of the type pickle, which can run code; write them with another type",
        ),
        (
            lambda: LitDataRows(lit / "tokens"),
            UsageError,
            f"{lit}/tokens has tokens; pass block_size=, the number of tokens of a row",
        ),
        (
            lambda: LitDataRows(lit / "plain", block_size=4),
            UsageError,
            f"{lit}/plain has no tokens, and block_size= was given; remove block_size=",
        ),
    ]
    for call, error, text in cases:
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value) == text
    assert MDSRows(mds / "pickles", columns=["number"])[1] == {"number": 1}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for rows, what in (
        (MDSRows(mds / "zstd"), f"{mds}/zstd/shard.00000.mds.zstd is decompressed with pyarrow"),
        (LitDataRows(lit / "arrow"), f"{lit}/arrow/chunk-0-0.bin is read with pyarrow"),
    ):
        with pytest.raises(UsageError) as refused:
            rows[0]
        assert str(refused.value) == f"{what}; pip install 'paceline[parquet]'"
    assert MDSRows(mds / "gz")[0] == small_row(0)
