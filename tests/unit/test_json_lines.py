"""Rows of JSON lines are what Python's json reads from each line, wherever the files are."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launching import train_basics
from token_folders import served
from torch.utils.data import DataLoader, default_collate

from paceline.data import JsonLines, json_lines
from paceline.errors import DatasetError, UsageError

VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8))
RECORDS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
LINES = st.lists(st.one_of(RECORDS, st.sampled_from(["", "\r", " ", "\t  "])), max_size=30)


@given(LINES, LINES, st.booleans(), st.sampled_from(["\n", "\r\n"]), st.integers(1, 40))
def test_rows_are_the_lines_that_json_reads(
    first: list[Any], second: list[Any], ends: bool, newline: str, block: int
) -> None:
    """Of two files, with empty lines between rows, whichever blocks the files are searched in."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "_BLOCK", block)
        for name, lines in (("a", first), ("b", second)):
            text = newline.join(
                line if isinstance(line, str) else " " * (len(line) == 2) + json.dumps(line) for line in lines
            )
            (Path(folder) / f"{name}.jsonl").write_text(text + newline * ends, encoding="utf-8", newline="")
        expected = [line for line in first + second if isinstance(line, dict)]
        if not expected:
            return
        rows = JsonLines(f"{folder}/*.jsonl")
        assert [rows[number] for number in range(len(rows))] == expected
        assert rows.__getitems__([*range(len(rows))][::-1]) == expected[::-1]
        numbers = [n for lines in (first, second) for n, line in enumerate(lines, 1) if isinstance(line, dict)]
        read = rows._rows.read(range(len(rows)))
        assert [json_lines._line_number(file, number) for file, number, _ in read] == numbers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("a.jsonl", "b.jsonl")):
        lines = [
            {"x": [n / 2, n], "ids": [n, n + 1], "y": n, "text": f"ä{n}"} for n in range(50 * number, 50 * number + 50)
        ]
        (tmp_path / name).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return tmp_path


def test_lists_of_numbers_become_tensors(folder: Path) -> None:
    rows = JsonLines([folder / "b.jsonl", folder / "a.jsonl"], columns=["x", "ids", "y"])
    assert len(rows) == 100
    batch = default_collate(rows.__getitems__([0, 50, -1]))
    assert batch["x"].equal(torch.tensor([[25, 50], [0, 0], [24.5, 49]], dtype=torch.float64))
    assert batch["ids"].equal(torch.tensor([[50, 51], [0, 1], [49, 50]]))
    assert batch["y"].equal(torch.tensor([50, 0, 49]))
    (folder / "c.jsonl").write_text('{"a": [], "b": [1, true], "c": [18446744073709551616], "d": ["x"]}')
    assert JsonLines(folder / "c.jsonl")[0] == {"a": [], "b": [1, True], "c": [2**64], "d": ["x"]}
    with pytest.raises(IndexError, match="row 100 of 100"):
        rows[100]


def test_rows_of_a_server_are_read_by_ranges(folder: Path) -> None:
    local = JsonLines([folder / "a.jsonl", folder / "b.jsonl"], columns=["y", "text"])
    with served(folder) as (url, log):
        rows = JsonLines([f"{url}/a.jsonl", f"{url}/b.jsonl"], columns=["y", "text"])
        log.clear()
        again = pickle.loads(pickle.dumps(rows))
        assert again.__getitems__([3, 70, 4]) == local.__getitems__([3, 70, 4])
        longest = max(map(len, (folder / "a.jsonl").read_bytes().splitlines())) + 1
        assert len(log) == 2  # neighbours are read with one request
        assert all(size <= 2 * longest for _, size in log)


def test_a_row_behind_a_million_others_reads_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1_000_000
    (tmp_path / "rows.jsonl").write_bytes(b"".join(b'{"n": %d}\n' % n for n in range(count)))
    rows = JsonLines(tmp_path / "rows.jsonl")
    assert len(rows) == count
    spans: list[Any] = []
    store = rows._rows.files[0].store
    ranges = store.ranges
    monkeypatch.setattr(store, "ranges", lambda asked: spans.extend(asked) or ranges(asked))
    assert rows[count - 1] == {"n": count - 1}
    assert rows[count // 2] == {"n": count // 2}
    assert [stop - start for _, start, stop in spans] == [len('{"n": 999999}\n')] * 2


def test_json_lines_pickle_and_fork(folder: Path) -> None:
    rows = JsonLines(folder / "*.jsonl", columns=["y"])
    assert pickle.loads(pickle.dumps(rows))[99] == {"y": 99}
    found = torch.cat([batch["y"] for batch in DataLoader(rows, batch_size=30, num_workers=2)])
    assert found.tolist() == list(range(100))


@pytest.mark.slow
def test_a_training_on_json_lines_resumes(folder: Path) -> None:
    """Two workers continue what one began, with the same rows as from tensors."""
    body = (
        "rows = paceline.data.JsonLines('numbers.jsonl')\n"
        "same = lambda batch: (batch['x'], batch['y'])\n"
        "collate = lambda samples: same(torch.utils.data.default_collate(samples))\n"
        "with open('numbers.jsonl') as file: assert len(file.readlines()) == len(rows) == 96\n"
        "t = make()\n"
        "for report in t.steps(rows, epochs=2, collate=collate): print(repr(report.loss))\n"
        "other = make()\n"
        "print([repr(report.loss) for report in other.steps(data, epochs=2)])\n"
    )
    text = "".join(json.dumps({"x": x, "y": y}) + "\n" for x, y in numbers())
    (folder / "numbers.jsonl").write_text(text)
    first = train_basics(folder, body, 1, "--steps", "3").stdout.splitlines()
    second = train_basics(folder, body, 2).stdout.splitlines()
    losses = [float(line) for line in (*first, *second[:-1])]
    assert losses == pytest.approx([float(text) for text in eval(second[-1])], rel=1e-12)


def numbers() -> list[tuple[list[float], int]]:
    from basics import data

    return [(x.tolist(), int(y)) for x, y in data]


JSON = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
BAD = [
    ("{oops}", f"line 3 of {{file}} is not JSON ({JSON}); repair or remove this line"),
    ("[1]", "line 3 of {file} is not a JSON object; repair or remove this line"),
    ("[" * 100_000, "line 3 of {file} is not JSON (it is nested too deeply); repair or remove this line"),
    ('{"y": 1, "z": 2}', "line 3 of {file} has no 'x'; it has 'y', 'z'"),
    ("{}", "line 3 of {file} has no 'x'; it has nothing"),
]


@pytest.mark.parametrize(("line", "text"), BAD, ids=range(len(BAD)))
def test_bad_line_is_named(line: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"x": 1}\n\n' + line + "\n")
    rows = JsonLines(file, columns=["x"])
    assert rows[0] == {"x": 1}
    with pytest.raises(DatasetError) as raised:
        rows[1]
    assert str(raised.value) == text.format(file=file)


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"x": "\xff"}\n')
    with pytest.raises(DatasetError, match=r"^line 1 of .*rows\.jsonl is not JSON \(.*can't decode byte 0xff"):
        JsonLines(tmp_path / "rows.jsonl")[0]


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"x": 1}\n'))
    with pytest.raises(UsageError) as refused:
        JsonLines(packed)
    what = f"{packed} is compressed, so its rows cannot be read one by one"
    assert str(refused.value) == f"{what}; decompress it first: gunzip -k rows.jsonl.gz"
    cure = "pass files of JSON lines, or a pattern like folder/*.jsonl"
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for files, text in (
        (tmp_path / "none.jsonl", f"{tmp_path}/none.jsonl does not exist; {cure}"),
        (tmp_path / "*.json", f"{tmp_path}/*.json has no rows; {cure}"),
        (tmp_path / "empty.jsonl", f"{tmp_path}/empty.jsonl has no rows; {cure}"),
        ([], f"an empty list has no rows; {cure}"),
        (tmp_path, f"{tmp_path} is a folder; {cure}"),
        ([tmp_path / "empty.jsonl", f"file://{tmp_path}"], f"{tmp_path} is a folder; {cure}"),
    ):
        with pytest.raises(DatasetError) as raised:
            JsonLines(files)
        assert str(raised.value) == text


def test_file_whose_name_has_brackets_is_read(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_text('{"x": 1}\n')
    (tmp_path / "a1.jsonl").write_text('{"x": 2}\n')
    for url in (tmp_path, f"file://{tmp_path}"):
        assert JsonLines(f"{url}/a[1].jsonl")[0] == {"x": 1}
        assert JsonLines(f"{url}/a[12].jsonl")[0] == {"x": 2}


def test_index_may_lie_in_a_bucket_without_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.chdir(folder)
    store = fsspec.filesystem("memory")
    try:
        for url in ("memory://bucket", "memory://bucket/"):
            assert len(JsonLines("*.jsonl", index=url)) == 100
            assert [path.rpartition("/")[0] for path in store.find("/bucket")] == ["/bucket/.paceline-index"] * 2
        assert len(JsonLines("*.jsonl", index="memory://bucket/below")) == 100
        assert len(store.find("/bucket/below")) == 2
        scans: list[Any] = []
        monkeypatch.setattr(json_lines, "_line_begins", lambda *file: scans.append(file))
        assert len(JsonLines("*.jsonl", index="memory://bucket")) == 100
        assert scans == []
    finally:
        store.rm("/bucket", recursive=True)
    assert sorted(path.name for path in folder.iterdir()) == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize("text", ["", '{"x": 1}', '{"x": 2}\n'])
def test_file_that_changes_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"x": 1}\n')
    os.utime(file, ns=(0, 0))
    rows = JsonLines(file)
    assert rows[0] == {"x": 1}
    file.write_text(text)
    with pytest.raises(DatasetError) as raised:
        rows[0]
    cure = "start again, and do not write to a file that a training reads"
    assert str(raised.value) == f"{file} has changed since it was opened; {cure}"


def test_numbers_of_a_row_are_arrays_of_their_own(folder: Path) -> None:
    rows = JsonLines(folder / "a.jsonl")
    rows[3]["ids"][:] = 0
    np.testing.assert_array_equal(rows[3]["ids"], [3, 4])
