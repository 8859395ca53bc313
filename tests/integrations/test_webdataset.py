"""Samples of WebDataset shards are those that the webdataset library reads, by number and from any store."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from token_folders import served
from torch.utils.data import DataLoader

from paceline.data import WebDatasetRows, byte_ranges
from paceline.data.row_index import BESIDE
from paceline.errors import DatasetError, UsageError

Files = list[tuple[str, bytes]]
SAMPLES: Files = [
    ("a/1.txt", b"one"),
    ("a/1.CLS", b"1"),
    ("__meta__/info.json", b"{}"),
    ("a/2.cls", b"2"),
    ("README", b"of no sample"),
    ("a/2.seg.png", b"not an image" * 100),
    (f"{'long/' * 40}3.txt", b"three" * 300),
    (f"{'long/' * 40}3.cls", b"3"),
    ("4.txt", b""),
    ("ü.txt", b"x"),
    ("__note__", b"of no sample"),
]
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "paceline" / "indexes"


def write(path: Path, files: Files, form: int = tarfile.GNU_FORMAT) -> None:
    with tarfile.open(path, "w", format=form) as tar:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def by_webdataset(path: Path, images: str | None = None, raw: bool = True) -> list[dict[str, Any]]:
    samples = webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
    samples = samples if raw else samples.decode(images) if images else samples.decode()
    return [
        {name: value for name, value in sample.items() if name not in ("__url__", "__local_path__")}
        for sample in samples
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_samples_are_those_of_webdataset(form: str, tmp_path: Path) -> None:
    files = [(name[-90:] if form == "ustar" else name, data) for name, data in SAMPLES]
    write(tmp_path / "0.tar", files, FORMATS[form])
    expected = by_webdataset(tmp_path / "0.tar")
    assert len(expected) == 5
    rows = WebDatasetRows(tmp_path / "0.tar", decode=False)
    assert rows.__getitems__(range(len(rows))) == expected
    assert [rows[-1], rows[-5]] == [expected[4], expected[0]]


@pytest.mark.parametrize("form", ["v7", "ustar", "gnu", "posix", "posix with times"])
def test_samples_of_gnu_tar_are_those_of_webdataset(form: str, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    for number in range(20):
        (source / f"{number:03}.txt").write_text(f"row {number}")
        (source / f"{number:03}.bin").write_bytes(os.urandom(700 * (number % 3)))
    options = ["--format=posix"] if "times" in form else [f"--format={form}", "--mtime=2020-01-01"]
    subprocess.run(["tar", "-cf", tmp_path / "0.tar", "--sort=name", *options, "-C", source, "."], check=True)
    rows = WebDatasetRows(tmp_path / "0.tar", decode=False)
    assert [rows[number] for number in range(len(rows))] == by_webdataset(tmp_path / "0.tar")
    assert len(rows) == 20


def image(form: str, mode: str) -> bytes:
    channels = {"L": (5, 4), "RGB": (5, 4, 3), "RGBA": (5, 4, 4)}[mode]
    array = np.random.default_rng(0).integers(0, 256, channels, np.uint8)
    Image.fromarray(array).save(data := io.BytesIO(), form)
    return data.getvalue()


def in_file(save: Any, value: Any) -> bytes:
    save(value, file := io.BytesIO()) if save is torch.save else save(file := io.BytesIO(), value)
    return file.getvalue()


DECODED: dict[str, bytes] = {
    "txt": "ä".encode(),
    "cls": b"7",
    "id": b"-3",
    "json": b'{"a": [1, 2]}',
    "meta.json.gz": gzip.compress(b"[1]"),
    "npy": in_file(np.save, np.arange(6.0).reshape(2, 3)),
    "npz": in_file(np.savez, np.arange(3)),
    "pth": in_file(torch.save, {"w": torch.arange(3)}),
    "bin": b"\x00\x01",
    "jpg": image("JPEG", "RGB"),
    "png": image("PNG", "L"),
    "seg.png": image("PNG", "RGBA"),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    return type(one) is type(other) and one == other


FORMS = ["pil", "pill", "pilrgba", "rgb8", "rgb", "l8", "l", "torchrgb8", "torchrgb", "torch", "torchl8", "torchl"]


@pytest.mark.parametrize("images", [*FORMS, None])
def test_values_are_decoded_as_by_webdataset(images: str | None, tmp_path: Path) -> None:
    write(tmp_path / "0.tar", [(f"0.{name}", data) for name, data in DECODED.items()])
    (expected,) = by_webdataset(tmp_path / "0.tar", images, raw=False)
    row = WebDatasetRows(tmp_path / "0.tar", images=images)[0]
    assert same(row, expected)


def test_pickles_are_not_run_and_a_function_gets_bytes(tmp_path: Path) -> None:
    write(tmp_path / "0.tar", [("0.pkl", pickle.dumps(print)), ("0.mp", b"\x93\x01\x02\x03"), ("0.cls", b"5")])
    row = WebDatasetRows(tmp_path / "0.tar")[0]
    assert row == {"__key__": "0", "pkl": pickle.dumps(print), "mp": [1, 2, 3], "cls": 5}
    rows = WebDatasetRows(tmp_path / "0.tar", decode=lambda row: (row["__key__"], row["cls"]))
    assert rows[0] == ("0", b"5")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (made := tmp_path / "shards").mkdir()
    for part in range(3):
        write(made / f"s-{part:02}.tar", [(f"{n:03}.cls", b"%d" % n) for n in range(part * 40, part * 40 + 40)])
    return made


def numbers(rows: Any) -> list[int]:
    return [row["cls"] for row in rows.__getitems__(range(len(rows)))]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What is read of local files."""
    spans: list[tuple[str, int, int]] = []
    ranges = byte_ranges.LocalFiles.ranges
    monkeypatch.setattr(
        byte_ranges.LocalFiles, "ranges", lambda self, wanted: spans.extend(wanted) or ranges(self, wanted)
    )
    return spans


def test_index_is_made_once_beside_the_shards(folder: Path, asked: list[Any]) -> None:
    assert numbers(WebDatasetRows(folder / "s-{00..02}.tar")) == list(range(120))
    assert sorted(path.name for path in (folder / BESIDE).iterdir()) == [f"s-0{part}.tar.index" for part in range(3)]
    asked.clear()
    rows = WebDatasetRows([folder / "s-01.tar", str(folder / "s-*.tar")])
    assert len(rows) == 160
    assert asked == []
    assert rows[40]["cls"] == 0
    assert [stop - start for _, start, stop in asked] == [1024]
    assert numbers(pickle.loads(pickle.dumps(rows)))[38:42] == [78, 79, 0, 1]
    loaded = DataLoader(rows, batch_size=50, num_workers=2, collate_fn=lambda batch: [row["cls"] for row in batch])
    assert [number for batch in loaded for number in batch] == numbers(rows)


def test_index_of_a_changed_shard_is_made_again(folder: Path) -> None:
    rows = WebDatasetRows(folder / "s-00.tar")
    write(folder / "s-00.tar", [(f"{n:03}.cls", b"%d" % n) for n in range(7, 47)])  # the same size
    os.utime(folder / "s-00.tar", ns=(1, 1))
    with pytest.raises(DatasetError) as raised:
        rows[0]
    cure = "start again, and do not write to a file that a training reads"
    assert str(raised.value) == f"{folder}/s-00.tar has changed since it was opened; {cure}"
    write(folder / "s-00.tar", [(f"{n:03}.cls", b"%d" % n) for n in range(7, 27)])
    assert numbers(WebDatasetRows(folder / "s-00.tar")) == list(range(7, 27))
    index = folder / BESIDE / "s-00.tar.index"
    good = index.read_bytes()
    for damage in (good[:-8], good.replace(b"webdataset", b"json lines"), b"", b"[1]\n", good + b"x"):
        index.write_bytes(damage)
        assert numbers(WebDatasetRows(folder / "s-00.tar")) == list(range(7, 27))
        assert index.read_bytes() == good


def test_index_goes_to_the_cache_or_where_it_is_asked_for(folder: Path, cache: Path, asked: list[Any]) -> None:
    (folder / BESIDE).touch()  # so that no folder can have this name
    for _ in range(2):
        assert numbers(WebDatasetRows(folder / "s-*.tar")) == list(range(120))
    assert len(list(cache.glob("s-*.index"))) == 3
    elsewhere = folder.parent / "indexes"
    assert len(WebDatasetRows(folder / "s-*.tar", index=elsewhere)) == 120
    asked.clear()
    assert len(WebDatasetRows(folder / "s-*.tar", index=elsewhere)) == 120
    assert asked == []
    with pytest.raises(UsageError) as refused:
        WebDatasetRows(folder / "s-00.tar", index=folder / BESIDE)
    what = f"the index cannot be written to {folder / BESIDE} ([Errno 17] File exists: '{folder / BESIDE}')"
    assert str(refused.value) == f"{what}; pass a folder as index= that can be written, or leave index= out"


def test_shards_of_a_server_are_read_by_ranges(folder: Path, cache: Path) -> None:
    with served(folder) as (url, log):
        rows = WebDatasetRows(f"{url}/s-{{00..02}}.tar")
        indexed = sum(size for _, size in log)
        assert indexed < 1.1 * sum(path.stat().st_size for path in folder.glob("*.tar"))
        log.clear()
        again = WebDatasetRows(f"{url}/s-{{00..02}}.tar")
        assert log == []
        assert len(list(cache.glob("*.index"))) == 3
        assert [row["cls"] for row in pickle.loads(pickle.dumps(again)).__getitems__([99, 3, 4])] == [99, 3, 4]
        assert sorted(size for _, size in log) == [1024, 2048]  # neighbours with one request
        assert numbers(rows) == list(range(120))
        assert [size for _, size in log[2:]] == [40 * 1024] * 3


def test_large_files_are_left_out_when_a_shard_is_indexed(tmp_path: Path, asked: list[Any]) -> None:
    write(tmp_path / "0.tar", [(f"{n}.bin", bytes(9 << 20)) for n in range(3)])
    assert len(WebDatasetRows(tmp_path / "0.tar", decode=False)) == 3
    assert sum(stop - start for _, start, stop in asked) <= 4 * (4 << 20)


def test_a_row_behind_a_million_others_reads_its_own_bytes(tmp_path: Path, asked: list[Any]) -> None:
    (shard := tmp_path / "0.tar").touch()
    os.truncate(shard, 1_000_001 * 1024)
    with shard.open("r+b") as file:
        for n in (0, 1, 1_000_000):
            info = tarfile.TarInfo(f"{n}.cls")
            info.size = 1
            file.seek(n * 1024)
            file.write(info.tobuf(tarfile.USTAR_FORMAT) + b"%d" % (n % 7))
    (tmp_path / BESIDE).mkdir()
    known = shard.stat()
    about = {"format": 1, "kind": "webdataset", "size": known.st_size, "changed": str(known.st_mtime_ns)}
    begins = np.arange(1_000_002, dtype="<i8") * 1024
    head = json.dumps({**about, "numbers": len(begins)}).encode()
    (tmp_path / BESIDE / "0.tar.index").write_bytes(head + b"\n" + begins.tobytes())
    rows = WebDatasetRows(shard)
    assert len(rows) == 1_000_001
    assert [rows[n]["cls"] for n in (1_000_000, 1, 0)] == [1_000_000 % 7, 1, 0]
    assert [stop - start for _, start, stop in asked] == [1024] * 3


COPY = "copy or write it again"
MISSING = "pass tar files, or a pattern like folder/*.tar or folder/shard-{000..146}.tar"
WRITE_AGAIN = "give them different extensions, and write the shard again"


def test_shards_that_cannot_be_read_are_refused(folder: Path, tmp_path: Path) -> None:
    data = (folder / "s-00.tar").read_bytes()
    (tmp_path / "no.tar").write_bytes(b"no tar file" * 100)
    (tmp_path / "cut.tar").write_bytes(data[: 512 * 10])
    (tmp_path / "bad.tar").write_bytes(data[:1600] + b"?" + data[1601:])
    (tmp_path / "empty.tar").write_bytes(bytes(10240))
    write(tmp_path / "twice.tar", [("1.txt", b""), ("1.TXT", b"")])
    for name, text in (
        ("no.tar", f"{tmp_path}/no.tar is not a complete tar file (invalid header); {COPY}"),
        ("cut.tar", f"{tmp_path}/cut.tar is not a complete tar file (unexpected end of data); {COPY}"),
        ("bad.tar", f"{tmp_path}/bad.tar is not a complete tar file (bad checksum); {COPY}"),
        ("empty.tar", f"{tmp_path}/empty.tar has no samples; {MISSING}"),
        ("none.tar", f"{tmp_path}/none.tar does not exist; {MISSING}"),
        ("", f"{tmp_path} is a folder; {MISSING}"),
        ("twice.tar", f"the sample 1 of {tmp_path}/twice.tar has two files of the type txt; {WRITE_AGAIN}"),
    ):
        with pytest.raises(DatasetError) as raised:
            WebDatasetRows(tmp_path / name)
        assert str(raised.value) == text
    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(data))
    with pytest.raises(UsageError) as refused:
        WebDatasetRows(tmp_path / "0.tar.gz")
    what = f"{tmp_path}/0.tar.gz is compressed, so its rows cannot be read one by one"
    assert str(refused.value) == f"{what}; decompress it first: gunzip -k 0.tar.gz"


def test_values_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    values = {"a/0.cls": b"x", "1.json": b"{", "2.png": b"x", "3.pth": pickle.dumps(print), "4.npz": b"PK\3\4"}
    write(tmp_path / "0.tar", [*values.items()])
    rows = WebDatasetRows(tmp_path / "0.tar")
    named = [("a/0", "cls"), ("1", "json"), ("2", "png"), ("3", "pth"), ("4", "npz")]
    for number, (key, kind) in enumerate(named):
        with pytest.raises(DatasetError, match=f"^{kind} of the sample {key} of {tmp_path}/0.tar cannot be decoded "):
            rows[number]
    with pytest.raises(UsageError) as refused:
        WebDatasetRows(tmp_path / "0.tar", images="bgr")
    known = '"pil", "rgb8", "torchrgb8", "torchrgb", the same with l or rgba, or None'
    assert str(refused.value) == f"images='bgr' is not a form of images; use {known}"
    with pytest.raises(IndexError, match="row 5 of 5"):
        rows[5]
