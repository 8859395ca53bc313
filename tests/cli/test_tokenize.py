"""`paceline tokenize`: what the library tokenizers gives for each document, in the same bytes from any number of
processes and after any kill."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DOCS
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from paceline.data import Tokens, text_files
from paceline.data import tokenize as maker
from paceline.data.tokenize import tokenize
from paceline.errors import DatasetError, LaunchError, UsageError

PAGES = [DOCS / f"{name}.md" for name in ("architecture", "servers", "team", "transport")]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A tokenizer of 600 pieces of bytes. Its file asks for truncation, padding and a token in front, as some do."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", END], initial_alphabet=alphabet)
    made.train_from_iterator([page.read_text() for page in PAGES], trainer)
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", made.token_to_id("<s>"))])
    made.enable_truncation(5)
    made.enable_padding(length=9)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def ids(tokenizer: Path, documents: list[str], end: str = END) -> list[int]:
    """The oracle: the library itself, one document after the other."""
    made = Tokenizer.from_file(str(tokenizer))
    made.no_truncation()
    made.no_padding()
    last = [made.token_to_id(end)] if end else []
    return [token for text in documents for token in made.encode(text, add_special_tokens=False).ids + last if text]


def tokens_of(folder: Path) -> list[int]:
    index = json.loads((folder / "tokens.json").read_text())
    return np.concatenate([np.fromfile(folder / shard["file"], index["dtype"]) for shard in index["shards"]]).tolist()


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def texts(tmp_path) -> tuple[Path, list[str]]:
    """A folder of both kinds of files, and its documents in order."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    lines = ["one", "zwei ü\nof two lines", "", "三 🚲", "half \ud83d of a pair", " " * 40]
    told = [json.dumps({"id": number, "text": line}) for number, line in enumerate(lines)]
    (folder / "b.jsonl").write_text("\n\n".join(told[:3]) + "\n" + "\r\n".join(told[3:]))  # the last one has no newline
    first, second = (page.read_text()[:12_000] for page in PAGES[:2])
    (folder / "a.txt").write_text(first)
    (folder / "c.txt").write_text("")
    (folder / "deep" / "d.txt").write_text(second + "\n" * 5)
    (folder / "deep" / "read.me").write_text("not this one")
    lines[4] = "half \ufffd of a pair"
    return folder, [first, *lines, "", second + "\n" * 5]


def test_the_tokens_are_the_librarys(texts, trained, tmp_path):
    folder, documents = texts
    expected = ids(trained, documents)
    said = tokenize([str(folder)], str(trained), tmp_path / "out", workers=2, shard_tokens=1000)
    assert tokens_of(tmp_path / "out") == expected
    index = json.loads((tmp_path / "out" / "tokens.json").read_text())
    count = -(-len(expected) // 1000)
    assert said == f"{tmp_path}/out: {len(expected):,} tokens of 7 documents in {count} shards of uint16"
    assert [shard["tokens"] for shard in index["shards"]] == [1000] * (count - 1) + [len(expected) % 1000]
    assert (index["dtype"], index["vocabulary"], index["end"], index["documents"]) == ("uint16", 600, 1, 7)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == trained.read_bytes()
    assert sorted(set(bytes_of(tmp_path / "out")) - {shard["file"] for shard in index["shards"]}) == [
        "made-from.json",
        "tokenizer.json",
        "tokens.json",
    ]
    data = Tokens(tmp_path / "out", 77)
    data.verify()
    assert data[len(data) - 1].tolist() == expected[77 * (len(data) - 1) :][:78]
    assert (data.vocabulary, data.end) == (600, 1)


@pytest.mark.parametrize("shard_tokens", [1, 7, 600, 10**9])
def test_the_same_bytes_from_any_number_of_processes(texts, trained, tmp_path, monkeypatch, shard_tokens):
    folder, documents = texts
    if shard_tokens < 600:
        documents = documents[1:-1]
        for path in (folder / "a.txt", folder / "deep" / "d.txt"):
            path.unlink()
    monkeypatch.setattr(text_files, "PIECE", 50)  # lines of one file go to several processes
    for workers in (1, 3):
        inputs = [str(folder / "b.jsonl")] if shard_tokens < 600 else [f"{folder}/*.jsonl", str(folder)]
        tokenize(inputs, str(trained), tmp_path / str(workers), workers, shard_tokens)
    assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "3")
    if shard_tokens < 600:
        assert tokens_of(tmp_path / "1") == ids(trained, documents)


def test_a_name_and_an_end_of_ones_own(trained, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "not this", "body": "but this"}\n{"body": ""}\n{"body": "and this"}\n')
    for end in ("Ġ", ""):
        out = tmp_path / f"out{end}"
        tokenize([str(tmp_path / "a.jsonl")], str(trained), out, 1, field="body", end=end)
        assert tokens_of(out) == ids(trained, ["but this", "and this"], end)
        expected = Tokenizer.from_file(str(trained)).token_to_id(end) if end else None
        assert Tokens(out, 2).end == expected


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    words = {f"w{number}": number for number in range(70_000)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("w65535 w65536 w69999 w1")
    tokenize([str(tmp_path / "a.txt")], str(tmp_path / "words.json"), tmp_path / "out", 1, end="w7")
    assert tokens_of(tmp_path / "out") == [65535, 65536, 69999, 1, 7]
    assert Tokens(tmp_path / "out", 4)[0].tolist() == [65535, 65536, 69999, 1, 7]
    assert json.loads((tmp_path / "out" / "tokens.json").read_text())["dtype"] == "uint32"


# ---- pieces


PACKED = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data[:5]) + gzip.compress(data[5:]),
    ".zst": lambda data: b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in (data[:5], data[5:])),
}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab\n", max_size=60), min_size=1, max_size=4), st.integers(1, 30), st.sampled_from([*PACKED]))
def test_pieces_are_whole_lines_and_may_be_begun_anywhere(tmp_path_factory, contents, size, packing):
    folder = tmp_path_factory.mktemp("pieces")
    paths = [str(folder / f"{number}.txt{packing}") for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        Path(path).write_bytes(PACKED[packing](content.encode()))
    sizes = [os.path.getsize(path) for path in paths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "PIECE", size)
        pieces = list(text_files.pieces_of(paths, sizes, "", 0, 0))
        for number, content in enumerate(contents):
            own = [piece for piece in pieces if piece.file == number]
            assert b"".join(piece.data for piece in own) == content.encode()
            assert [piece.last for piece in own] == [False] * (len(own) - 1) + [True] * bool(own)
            for piece in own[:-1]:
                assert piece.data.endswith(b"\n")
                assert len(piece.data) >= size
        for place, piece in enumerate(pieces):
            again = list(text_files.pieces_of(paths, sizes, "", piece.file, piece.offset))
            assert [one[:5] for one in again] == [one[:5] for one in pieces[place:]]


def test_rows_of_a_table_in_pieces_may_be_begun_anywhere(tmp_path, monkeypatch):
    texts = ["a" * (number % 7) for number in range(50)]
    parquet.write_table(pyarrow.table({"n": [*range(50)], "text": texts}), tmp_path / "a.parquet", row_group_size=16)
    path, size = str(tmp_path / "a.parquet"), (tmp_path / "a.parquet").stat().st_size
    monkeypatch.setattr(text_files, "PIECE", 10)
    monkeypatch.setattr(text_files, "_ROWS", 5)
    pieces = list(text_files.pieces_of([path], [size], "text", 0, 0))
    assert [text for piece in pieces for text in piece.data] == texts
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len("".join(piece.data)) >= 10 for piece in pieces[:-1])
    for place, piece in enumerate(pieces):
        assert list(text_files.pieces_of([path], [size], "text", 0, piece.offset)) == pieces[place:]


@pytest.mark.parametrize("kind", [".gz", ".zst", ".parquet", "categories"])
def test_the_tokens_are_those_of_the_plain_text(texts, trained, tmp_path, monkeypatch, kind):
    """Compressed files give the bytes of the plain ones, and so do the lines of the .jsonl file as rows of a table."""
    folder, _ = texts
    monkeypatch.setattr(text_files, "PIECE", 50)
    monkeypatch.setattr(text_files, "_ROWS", 2)
    inputs = [folder / name for name in ("b.jsonl", *([] if "." not in kind or kind == ".parquet" else ["a.txt"]))]
    tokenize([*map(str, inputs)], str(trained), tmp_path / "plain", 2, 100)
    (packed := tmp_path / "packed").mkdir()
    if kind in PACKED:
        for path in inputs:
            (packed / f"{path.name}{kind}").write_bytes(PACKED[kind](path.read_bytes()))
        (packed / f"a.txt{kind}").rename(packed / f"z{kind}")  # of which another ending need not say that it is text
    else:
        lines = [json.loads(line)["text"] for line in inputs[0].read_text().splitlines() if line]
        column = pyarrow.array([line.replace("\ud83d", "\ufffd") for line in lines])
        column = column.dictionary_encode() if kind == "categories" else column.cast("large_string")
        parquet.write_table(pyarrow.table({"n": [*range(6)], "text": column}), packed / "b.parquet", row_group_size=4)
    tokenize([str(packed)], str(trained), tmp_path / "out", 2, 100)
    plain, out = (bytes_of(tmp_path / name) for name in ("plain", "out"))
    assert plain.keys() == out.keys()
    assert [name for name in plain if plain[name] != out[name]] == ["made-from.json"]


def test_a_long_text_is_cut_at_line_ends(trained, tmp_path, monkeypatch):
    """The pieces' tokens in a row, with one end."""
    text = PAGES[2].read_text()
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(text_files, "PIECE", 1500)
    tokenize([str(tmp_path / "a.txt")], str(trained), tmp_path / "out", 2)
    pieces = [
        piece.data.decode() for piece in text_files.pieces_of([str(tmp_path / "a.txt")], [len(text.encode())], "", 0, 0)
    ]
    assert len(pieces) > 3
    assert tokens_of(tmp_path / "out") == ids(trained, pieces, "") + ids(trained, ["."])[-1:]
    assert json.loads((tmp_path / "out" / "tokens.json").read_text())["documents"] == 1


def test_no_more_text_is_read_than_the_processes_are_busy_with(trained):
    read = 0

    def pieces():
        nonlocal read
        for number in range(1000):
            read += 1
            yield text_files.Piece(number, "a.txt", 0, b"some text", True)

    with ExitStack() as stack:
        recipe = maker._Recipe(Tokenizer.from_file(str(trained)), "uint16", "text", None)
        found = maker._tokenized(pieces(), recipe, 2, stack)
        for taken in range(1, 21):
            piece, _, documents = next(found)
            assert (piece.file, piece.data, documents) == (taken - 1, None, 1)
            assert read <= taken + 5


# ---- killed and begun again


def corpus(folder: Path, files: int, size: int) -> Path:
    """Texts that take a while. Seeded."""
    words = " ".join(page.read_text() for page in PAGES).split(" ")
    draws = random.Random(5)
    folder.mkdir()
    for number in range(files):
        text = " ".join(draws.choices(words, k=size // 6))
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def start(folder: Path, trained: Path, out: str) -> subprocess.Popen[str]:
    # Tests that run in the background inherit that Ctrl-C is ignored.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "paceline", "tokenize", "texts"]
    command += ["--tokenizer", trained, "--out", out, "--workers", "2", "--shard-tokens", "9999"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **streams)


def wait_for_shards(process: subprocess.Popen[str], out: Path, count: int) -> None:
    while len(list(out.glob("[0-9]*.bin"))) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=30)[1]


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(trained, tmp_path):
    """All of it is killed twice, then one of its processes, then it hears Ctrl-C, then SIGTERM; then it goes on."""
    corpus(tmp_path / "texts", 60, 60_000)  # long enough for every signal to come in time
    whole = start(tmp_path, trained, "whole")
    said, errors = whole.communicate(timeout=200)
    assert whole.returncode == 0, errors
    assert errors.splitlines()[-1].endswith(" 0:00 left")  # the progress
    out = tmp_path / "out"
    for shards, victim in ((1, "all"), (2, "all"), (3, "child"), (5, "SIGINT"), (5, "SIGTERM")):
        process = start(tmp_path, trained, "out")
        wait_for_shards(process, out, shards)
        while len(children := psutil.Process(process.pid).children()) < 2:  # all these shards were there before
            time.sleep(0.002)
        if victim == "all":
            process.kill()
        elif victim == "child":
            children[0].kill()
        else:
            os.killpg(process.pid, signal.Signals[victim])  # as a terminal does, and a job manager
        _, errors = process.communicate(timeout=60)
        assert gone(children)
        assert not (out / "tokens.json").exists(), f"{victim}: it was too late, {errors}"
        assert process.returncode == {"all": -signal.SIGKILL, "child": 2, "SIGINT": 130, "SIGTERM": 75}[victim], errors
        last = errors.splitlines()[-1:]
        if victim == "child":
            assert last == [
                "paceline: a tokenizing process was killed, probably because memory ran out; "
                "use fewer --workers; the same command continues"
            ]
        elif victim != "all":
            assert last == [f"paceline: stopped by {victim}; the same command continues"]
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("[0-9]*.bin")}
    process = start(tmp_path, trained, "out")
    assert process.communicate(timeout=200)[0] == said.replace("whole", "out")
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    again = [name for name, when in kept.items() if (out / name).stat().st_mtime_ns != when]
    assert len(again) <= 1  # the one that was renamed and not yet in progress.json, perhaps
    process = start(tmp_path, trained, "out")
    assert process.communicate(timeout=200)[0] == said.replace("whole", "out").replace(
        "\n", " (it was already complete)\n"
    )


# Kills itself once before and once after each renaming, which is when the folder changes; run after run.
KILLS_ITSELF = """
import os, signal, sys
from pathlib import Path
from paceline.data.tokenize import tokenize

rename, out, kills = os.replace, Path("out"), Path("kills.txt")

def replace(one, other):
    def moment(name):
        here = f"{name} {other.name} {shards}\\n"
        if here not in kills.read_text():
            kills.open("a").write(here)
            os.kill(os.getpid(), signal.SIGKILL)
    shards = len(list(out.glob("[0-9]*.bin")))
    moment("before")
    rename(one, other)
    shards = len(list(out.glob("[0-9]*.bin")))
    moment("after")

kills.touch()
while True:
    child = os.fork()
    if not child:
        os.replace = replace
        tokenize(["texts"], sys.argv[1], out, 2, 700)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
"""


@pytest.mark.slow
def test_killed_around_each_change_of_the_folder(trained, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, page in enumerate(PAGES[:3]):
        (folder / f"{number}.txt").write_text(page.read_text()[:2000])
    (folder / "3.txt").write_text("")
    documents = [f"document {number}" for number in range(40)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "4.jsonl").write_text(lines)
    (folder / "5.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "6.txt.zst").write_bytes(PACKED[".zst"](PAGES[3].read_bytes()[:5000]))
    parquet.write_table(pyarrow.table({"text": documents * 4}), folder / "7.parquet", row_group_size=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        tokenize(["texts"], str(trained), tmp_path / "whole", 1, 700)
    shards = len(list((tmp_path / "whole").glob("[0-9]*.bin")))
    assert shards > 3
    command = [sys.executable, "-c", KILLS_ITSELF, trained]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    kills = (tmp_path / "kills.txt").read_text().splitlines()
    # Around two files at first, a shard and the progress for each, and the index; and a renamed shard is renamed again.
    assert len(kills) == 2 * (2 + 2 * shards + 1) + shards
    assert kills[-2:] == [f"before tokens.json {shards}", f"after tokens.json {shards}"]
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


# ---- what is refused


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    """A folder to stand in, with a text and a tokenizer."""
    monkeypatch.chdir(tmp_path)
    Path("t.json").write_bytes(trained.read_bytes())
    Path("a.txt").write_text("some text")
    Path("b.txt").write_text("some more")


def make(inputs: str = "a.txt", tokenizer: str = "t.json", **options) -> str:
    return tokenize(inputs.split(), tokenizer, Path("out"), **{"workers": 1, **options})


def refused(kind: type[Exception], **options) -> str:
    with pytest.raises(kind) as caught:
        make(**options)
    return str(caught.value)


def test_a_folder_that_was_begun_otherwise_is_refused_with_the_difference(here):
    make("a.txt b.txt")
    text = Path("t.json").read_text()
    cure = "; repeat the earlier options, or choose another --out"
    begun = "out was started with other options: "
    assert refused(UsageError) == f"{begun}b.txt is missing{cure}"
    assert refused(UsageError, inputs="b.txt a.txt") == f"{begun}the order of the inputs differs{cure}"
    Path("c.txt").write_text("new")
    assert refused(UsageError, inputs="a.txt b.txt c.txt") == f"{begun}c.txt was not there{cure}"
    options = {"end": "<s>", "field": "body", "shard_tokens": 9}
    assert refused(UsageError, **options) == (
        f"{begun}--end was '{END}' and is '<s>', --field was 'text' and is 'body', "
        f"--shard-tokens was 100000000 and is 9, and 1 more{cure}"
    )
    Path("t.json").write_text(text + "\n")
    one, other = (hashlib.sha256(some.encode()).hexdigest()[:12] for some in (text, text + "\n"))
    told = refused(UsageError, inputs="a.txt b.txt")
    assert told == f"{begun}the tokenizer was t.json ({one}) and is t.json ({other}){cure}"
    Path("t.json").write_text(text)
    Path("b.txt").write_text("another text")
    assert refused(UsageError, inputs="a.txt b.txt") == f"{begun}b.txt has changed{cure}"


def test_a_folder_with_something_else_is_refused(here):
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("")
    assert refused(UsageError) == "out contains other files; use a new folder as --out"


def test_two_at_once_are_refused(here):
    script = "import fcntl, os, time\nos.mkdir('out')\nf = open('out/.lock', 'a')\nfcntl.lockf(f, fcntl.LOCK_EX)\n"
    command = [sys.executable, "-c", script + "print('locked', flush=True)\ntime.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        assert refused(LaunchError) == "another process writes to out; wait until it ends, or use another --out"
        other.kill()
    assert make().startswith("out: ")


FIELDS = "set --field to one of: "
BAD = [
    (b'{"text": "a"}\n[1]\n', "the line at byte 14 of bad.jsonl is not a JSON object; repair or remove this line"),
    (b'\n{"text": "a"\n', "the line at byte 1 of bad.jsonl is not a JSON object; repair or remove this line"),
    (b"[" * 10**5, "the line at byte 0 of bad.jsonl is not a JSON object; repair or remove this line"),
    (b'{"a": 1, "b": ""}', f"the line at byte 0 of bad.jsonl has no text in 'text'; {FIELDS}a, b"),
    (b'{"text": null}', f"the line at byte 0 of bad.jsonl has no text in 'text'; {FIELDS}text"),
    (b'{"text": "a"}\n"\xff"\n', "bad.jsonl is not UTF-8 at byte 15; convert it, for example with iconv"),
]


@pytest.mark.parametrize(("content", "text"), BAD)
def test_what_is_wrong_in_a_file_is_told_with_its_place(here, content, text):
    Path("bad.jsonl").write_bytes(content)
    assert refused(DatasetError, inputs="bad.jsonl") == text


def table(column: str, values: list[object]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"id": [*range(len(values))], column: values}), sink)
    return sink.getvalue().to_pybytes()


def test_damaged_files_are_named(here):
    packed, packed_again = gzip.compress(b"some text"), PACKED[".zst"](b"some text")
    for name, content, why in (
        ("a.txt.gz", packed[:-3], "cannot be decompressed (Compressed file ended before the end-of-stream marker was"),
        ("a.txt.gz", b"some text", "cannot be decompressed (Not a gzipped file (b'so'))"),
        ("a.jsonl.gz", packed[:10] + b"\xff" * 20, "cannot be decompressed (Error -3 while decompressing data: "),
        ("a.txt.zst", packed_again[:-1], "cannot be decompressed (Truncated compressed stream)"),
        ("a.txt.zst", b"some text", "cannot be decompressed (ZSTD decompress failed: "),
        ("a.parquet", table("text", ["a"])[:-3], "cannot be read as Parquet ("),
    ):
        Path(name).write_bytes(content)
        text = refused(DatasetError, inputs=name)
        assert text.startswith(f"{name} {why}")
        assert text.endswith("); copy or write it again, and use a new folder as --out")
        shutil.rmtree("out")


def test_tables_without_the_text_are_refused(here):
    for content, options, text in (
        (table("body", ["a"]), {}, "a.parquet has no column 'text'; set --field to one of: body"),
        (
            table("text", [1]),
            {},
            "the column 'text' of a.parquet has values of the type int64; write a column of strings",
        ),
        (
            table("body", ["a"]),
            {"field": "id"},
            "the column 'id' of a.parquet has values of the type int64; set --field to one of: body",
        ),
        (
            table("text", ["a", "b", None]),
            {},
            "row 2 of a.parquet has no text in 'text'; leave this row out, or give it an empty text",
        ),
    ):
        Path("a.parquet").write_bytes(content)
        assert refused(DatasetError, inputs="a.parquet", **options) == text
        shutil.rmtree("out")


def test_pyarrow_is_asked_for(here, monkeypatch):
    Path("a.txt.zst").write_bytes(PACKED[".zst"](b"some text"))
    Path("a.parquet").write_bytes(table("text", ["a"]))
    Path("a.txt.gz").write_bytes(gzip.compress(b"some text"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name, verb in (("a.txt.zst", "decompressed"), ("a.parquet", "read")):
        text = f"{name} is {verb} with pyarrow; pip install 'paceline[parquet]'"
        assert refused(UsageError, inputs=name) == text
        shutil.rmtree("out")
    assert make("a.txt.gz").startswith("out: ")


def test_what_cannot_work_is_refused(here, monkeypatch):
    assert refused(UsageError, inputs="x*.txt") == (
        "found no text in x*.txt; pass .txt, .jsonl or .parquet files, folders of them, or globs"
    )
    for name in ("a.pdf", "a.tar.gz", "a.parquet.zst"):
        Path(name).touch()
        assert refused(UsageError, inputs=name) == (
            f"{name} has an unknown ending; convert it, or rename it if it is plain text"
        )
    assert refused(UsageError, tokenizer="no.json") == (
        "found no tokenizer in no.json; pass a tokenizer.json, or a name on the hub, for example gpt2"
    )
    Path("wrong.json").write_text('{"vocab": {}}')
    assert refused(UsageError, tokenizer="wrong.json") == (
        "wrong.json is not a tokenizer; pass a tokenizer.json of Hugging Face's tokenizers"
    )
    assert refused(UsageError, end="<end>") == (
        "--end '<end>' is not in the vocabulary of t.json; use a token of its vocabulary"
    )
    made = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    made.save("words.json")
    assert refused(UsageError, tokenizer="words.json") == (
        'words.json has no known end-of-document token; give it as --end TOKEN; --end "" writes none'
    )
    assert refused(UsageError, workers=0) == (
        "--workers and --shard-tokens must be at least 1; use larger numbers, or leave these options out"
    )
    Path("empty.txt").touch()
    assert refused(DatasetError, inputs="empty.txt") == ("the inputs contain no text; pass files that are not empty")
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # the import fails as if it were not installed
    assert refused(UsageError) == "the library `tokenizers` is not installed; pip install 'paceline[text]'"


def test_a_name_that_cannot_be_fetched(here):
    """The hub's client, told to stay offline."""
    script = "from paceline.cli.main import main\nraise SystemExit(main())"
    command = [sys.executable, "-c", script, "tokenize", "a.txt", "--tokenizer", "no-such-name", "--out", "out"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(Path.cwd())}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: the tokenizer no-such-name could not be fetched (")
    assert done.stderr.endswith("); pass a tokenizer.json, or a name on Hugging Face's hub, for example gpt2\n")


def test_files_that_change_meanwhile(here, monkeypatch):
    """What is appended is left alone, what is cut off is missed."""
    monkeypatch.setattr(text_files, "PIECE", 4)
    Path("a.txt").write_text("one\ntwo\nthree\n")
    pieces = text_files.pieces_of(["a.txt"], [14], "", 0, 0)
    assert next(pieces).data == b"one\ntwo\n"
    with Path("a.txt").open("a") as file:
        file.write("four\n")
    assert [(piece.data, piece.last) for piece in pieces] == [(b"three\n", True)]
    pieces = text_files.pieces_of(["a.txt"], [19], "", 0, 8)
    os.truncate("a.txt", 8)
    with pytest.raises(DatasetError) as caught:
        list(pieces)
    assert str(caught.value) == "a.txt is shorter than before; restore it; the same command continues"
