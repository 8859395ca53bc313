"""`paceline tokenize`: writes texts as one stream of tokens into token files.

What is written is a function of the texts, the tokenizer and the options alone: documents follow one another in the
order of the inputs, each with the end token behind it, and shards are cut at a number of tokens. Every shard is written
under another name, flushed and renamed, then ``progress.json`` says where in the texts the next one begins. So whoever
goes on after a kill writes the same bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from paceline.base.console import Coloured, in_one_line, say
from paceline.base.schema import parse, read_file, read_json
from paceline.base.text import clock, number, plural, size_of
from paceline.checkpoint.storage import flush_folder
from paceline.data.text_files import AGAIN, Piece, find_texts, kind_of, pieces_of, texts_in
from paceline.data.tokens import FORMAT, INDEX, read_index
from paceline.errors import DatasetError, FormatError, LaunchError, UsageError, first_line

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
MADE_FROM, PROGRESS, TOKENIZER = "made-from.json", "progress.json", "tokenizer.json"
_STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # which end us in order, and the same command goes on


class _Recipe(NamedTuple):
    """The settings that every tokenizing process needs."""

    tokenizer: Any
    dtype: str
    field: str
    end: int | None


def tokenize(
    inputs: Sequence[str],
    tokenizer: str,
    out: Path,
    workers: int | None = None,
    shard_tokens: int = 100_000_000,
    field: str = "text",
    end: str | None = None,
) -> str:
    """Writes the tokens of `inputs` to the folder `out`, from where an earlier call was ended; returns what to print.

    `inputs`: .txt files (one document each), .jsonl files (one document a line, in `field`), both also compressed
    (.gz, .zst), .parquet files (one document a row, in the column `field`), folders of those, globs.
    `tokenizer`: a ``tokenizer.json``, or a name on Hugging Face's hub. `end`: the token behind each document, by
    default the first of `ENDS` that the vocabulary has; an empty text for none. `workers`: processes, by default one
    for each core; the result does not depend on it.

    Raises UsageError for arguments that cannot work and where `out` was begun otherwise, DatasetError for inputs that
    cannot be read, LaunchError where another process writes to `out` or a process of ours was killed.
    """
    if shard_tokens < 1 or (workers is not None and workers < 1):
        raise UsageError(
            "--workers and --shard-tokens must be at least 1", "use larger numbers, or leave these options out"
        )
    files = find_texts(inputs)
    model, text, name = _tokenizer(tokenizer)
    ids = model.get_vocab()
    if end is None:
        end = next((token for token in ENDS if token in ids), None)
        if end is None:
            cure = 'give it as --end TOKEN; --end "" writes none'
            raise UsageError(f"{name} has no known end-of-document token", cure)
    if end and end not in ids:
        raise UsageError(f"--end {end!r} is not in the vocabulary of {name}", "use a token of its vocabulary")
    vocabulary = max(ids.values()) + 1
    recipe = _Recipe(model, "uint16" if vocabulary <= 1 << 16 else "uint32", field, ids[end] if end else None)
    source = {
        "tokenizer": {"name": name, "sha256": hashlib.sha256(text).hexdigest()},
        "options": {"--end": end, "--field": field, "--shard-tokens": shard_tokens},
        "inputs": {path: list(known) for path, known in files.items()},
    }
    head = {"format": FORMAT, "dtype": recipe.dtype, "vocabulary": vocabulary, "end": recipe.end}
    try:
        with ExitStack() as stack:
            _lock(out, stack)
            index, remark = _begin(out, source, text), " (it was already complete)"
            if index is None:
                made, remark = _make(out, files, recipe, shard_tokens, workers or len(os.sched_getaffinity(0))), ""
                if not made["shards"]:
                    raise DatasetError("the inputs contain no text", "pass files that are not empty")
                index = head | {"tokenizer": source["tokenizer"]} | made
                _write(out / INDEX, index)
            for rest in (PROGRESS, ".lock"):
                (out / rest).unlink(missing_ok=True)
            return _summary(out, index) + remark
    except OSError as error:
        raise DatasetError(f"{out} cannot be written ({first_line(error)})", f"repair that; {AGAIN}") from error


def _summary(out: Path, made: dict[str, Any]) -> str:
    counts = f"{number(made['tokens'])} tokens of {plural(made['documents'], 'document')}"
    return f"{out}: {counts} in {plural(len(made['shards']), 'shard')} of {made['dtype']}"


def _tokenizer(given: str) -> tuple[Any, bytes, str]:
    """Loads a tokenizer; returns it, the bytes of its file, and its name for people."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("the library `tokenizers` is not installed", "pip install 'paceline[text]'") from None
    path = Path(given)
    if path.is_file():
        text, name = path.read_bytes(), path.name
        try:
            known = isinstance(parse(text, name)["model"], dict)
        except (FormatError, KeyError, TypeError, IndexError):
            known = False
        if not known:
            what = f"{in_one_line(given)} is not a tokenizer"
            raise UsageError(what, "pass a tokenizer.json of Hugging Face's tokenizers")
        model = Tokenizer.from_str(text.decode())
    elif path.suffix == ".json" or path.exists():
        what = f"found no tokenizer in {in_one_line(given)}"
        raise UsageError(what, "pass a tokenizer.json, or a name on the hub, for example gpt2")
    else:
        try:
            model = Tokenizer.from_pretrained(given)
        except (OSError, ValueError) as error:
            what = f"the tokenizer {in_one_line(given)} could not be fetched ({first_line(error)})"
            raise UsageError(
                what, "pass a tokenizer.json, or a name on Hugging Face's hub, for example gpt2"
            ) from error
        text, name = model.to_str().encode(), given
    model.no_truncation()  # both may be left from a training of short texts
    model.no_padding()
    return model, text, name


def _lock(out: Path, stack: ExitStack) -> None:
    """Locks the folder for this process until `stack` closes.

    The lock is not flock's: child processes inherit that, and would hold it after this process is killed.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = stack.enter_context((out / ".lock").open("a"))
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise LaunchError(f"another process writes to {out}", "wait until it ends, or use another --out") from None


def _begin(out: Path, source: dict[str, Any], tokenizer: bytes) -> dict[str, Any] | None:
    """Checks that `out` was begun with the same `source`, or begins it; returns the index if it is complete."""
    if not (out / MADE_FROM).exists():
        if any(not path.name.startswith(".") for path in out.iterdir()):
            raise UsageError(f"{out} contains other files", "use a new folder as --out")
        _write(out / MADE_FROM, source)
    from paceline.base.file_types import MadeFrom  # needs msgspec

    before = read_json(out / MADE_FROM, MadeFrom, str(out / MADE_FROM), "use a new folder as --out")
    differences = [
        f"{name} was {before['options'].get(name)!r} and is {value!r}"
        for name, value in source["options"].items()
        if before["options"].get(name) != value
    ]
    one, other = ("{name} ({sha256:.12})".format(**made_from["tokenizer"]) for made_from in (before, source))
    if before["tokenizer"]["sha256"] != source["tokenizer"]["sha256"]:
        differences.append(f"the tokenizer was {one} and is {other}")
    old, new = before["inputs"], source["inputs"]
    differences += [f"{path} was not there" for path in new if path not in old]
    differences += [f"{path} is missing" for path in old if path not in new]
    differences += [f"{path} has changed" for path in new if path in old and old[path] != new[path]]
    if not differences and list(old) != list(new):
        differences.append("the order of the inputs differs")
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        what = f"{out} was started with other options: {', '.join(differences[:3])}{more}"
        raise UsageError(what, "repeat the earlier options, or choose another --out")
    if not (out / TOKENIZER).exists():  # for those who decode
        with _replacing(out / TOKENIZER) as file:
            file.write(tokenizer)
    return read_index(read_file(out / INDEX), str(out / INDEX)) if (out / INDEX).exists() else None


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file under a temporary name; renames it to `path` once it is complete and flushed."""
    temporary = path.with_name(f".{path.name}.partial")
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    flush_folder(path.parent)


def _write(path: Path, value: dict[str, Any]) -> None:
    with _replacing(path) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")


def _make(
    out: Path, files: dict[str, tuple[int, int]], recipe: _Recipe, shard_tokens: int, workers: int
) -> dict[str, Any]:
    """Writes the missing shards; returns the fields of the index that describe all shards."""
    position: dict[str, Any] = {"file": 0, "offset": 0, "skip": 0, "documents": 0}
    shards: list[dict[str, Any]] = []
    if (out / PROGRESS).exists():
        from paceline.base.file_types import TokenProgress  # needs msgspec

        cure = "remove it; then the same command starts from the beginning"
        progress = read_json(out / PROGRESS, TokenProgress, str(out / PROGRESS), cure)
        position, shards = dict(progress["next"]), [dict(shard) for shard in progress["shards"]]
    with ExitStack() as stack:
        sizes = [size for size, _ in files.values()]
        pieces = pieces_of(list(files), sizes, recipe.field, position["file"], position["offset"])
        line = _Line(sizes, sum(shard["tokens"] for shard in shards))
        stream = _TokenStream(_tokenized(pieces, recipe, workers, stack), position, line)
        while stream.more():
            name, count, digest = f"{len(shards):05}.bin", 0, hashlib.sha256()
            with _replacing(out / name) as file:
                while count < shard_tokens and stream.more():
                    part = stream.take(shard_tokens - count)
                    file.write(part)
                    digest.update(part)
                    count += len(part)
            size = count * np.dtype(recipe.dtype).itemsize
            shards.append({"file": name, "tokens": count, "bytes": size, "sha256": digest.hexdigest()})
            _write(out / PROGRESS, {"next": stream.resume_position(), "shards": shards})
        line.show(last=True)
    return {"tokens": sum(shard["tokens"] for shard in shards), "documents": stream.documents, "shards": shards}


class _TokenStream:
    """The tokens of all pieces as one stream, from a position on."""

    def __init__(self, results: Iterator[tuple[Piece, Any, int]], position: dict[str, int], line: _Line) -> None:
        self._results, self._line = results, line
        self.documents, self._inside = position["documents"], 0  # before the present piece, and in it
        self._piece, self._tokens = line.end, np.empty(0)
        self._next()
        self._used = position["skip"]

    def _next(self) -> bool:
        self.documents, self._used = self.documents + self._inside, 0
        result = next(self._results, None)
        self._piece, self._tokens, self._inside = result or (self._line.end, self._tokens[:0], 0)
        return result is not None

    def more(self) -> bool:
        """Whether there are tokens left; waits for the next piece if the current one is used up."""
        while self._used >= len(self._tokens):
            if not self._next():
                return False
        return True

    def take(self, most: int) -> Any:
        """Takes at most `most` tokens, all of one piece."""
        part = self._tokens[self._used : self._used + most]
        self._used += len(part)
        self._line.add(self._piece, len(part))
        return part

    def resume_position(self) -> dict[str, int]:
        """The position from which another stream yields the tokens that follow."""
        piece = self._piece
        return {"file": piece.file, "offset": piece.offset, "skip": self._used, "documents": self.documents}


def _tokenized(
    pieces: Iterator[Piece], recipe: _Recipe, workers: int, stack: ExitStack
) -> Iterator[tuple[Piece, Any, int]]:
    """Tokenizes the pieces in parallel; yields, in order, each piece without its text, its tokens, and the number of
    documents that end in it.
    """
    # Forking shares the tokenizer at no cost. It is safe: this process has no other threads yet, and the executor forks
    # all processes before it starts its own.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # a pool half begun could not be shut down
    try:
        pool = ProcessPoolExecutor(workers, get_context("fork"), _start, (os.getpid(), recipe))
        stack.callback(pool.shutdown, cancel_futures=True)
        pool.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    ahead = deque[Any]()
    try:
        more = True
        while more or ahead:
            while more and len(ahead) < 3 * workers:  # bounds the text in memory
                piece = next(pieces, None)
                more = piece is not None
                if piece is not None:
                    ahead.append((piece._replace(data=None), pool.submit(_encode, piece)))
            if ahead:
                piece, future = ahead.popleft()
                tokens, documents, problem = future.result()
                if problem:
                    raise DatasetError(*problem)
                yield piece, tokens, documents
    except BrokenProcessPool:
        what = "a tokenizing process was killed, probably because memory ran out"
        raise LaunchError(what, f"use fewer --workers; {AGAIN}") from None


_recipe: _Recipe  # set in each tokenizing process


def _start(parent: int, recipe: _Recipe) -> None:
    global _recipe
    _recipe = recipe
    for stop in (signal.SIGINT, signal.SIGHUP):  # of the terminal: the parent hears them as well
        signal.signal(stop, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # of the executor, among others
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody would tell us of our parent's end
    if os.getppid() != parent:
        os._exit(1)


def _encode(piece: Piece) -> tuple[Any, int, tuple[str, str] | None]:
    """A piece's tokens, the number of documents that end in it, and its error (what, cure), if there is one."""
    ids: list[int] = []
    documents, whole_file = 0, kind_of(piece.path)[0] == ".txt"
    try:
        for text in texts_in(piece, _recipe.field):
            # One at a time, because the library would give several to threads of its own. Special tokens that it adds
            # itself (a start, a separator) belong to the model it was made for, not into a stream.
            (encoding,) = _recipe.tokenizer.encode_batch_fast([text], add_special_tokens=False)
            token_ids = encoding.ids
            ids += token_ids
            begun = bool(token_ids) or (whole_file and piece.offset > 0)
            if begun and (piece.last or not whole_file):
                documents += 1
                ids += [] if _recipe.end is None else [_recipe.end]
    except DatasetError as error:
        return None, 0, (error.what, error.cure)
    return np.array(ids, np.dtype(_recipe.dtype).newbyteorder("<")), documents, None


class _Line:
    """The progress line on standard error: repainted on a terminal, else printed every ten seconds and at the end."""

    def __init__(self, sizes: list[int], tokens: int) -> None:
        self._before = np.cumsum([0, *sizes])  # bytes before each file
        self.end = Piece(len(sizes), "", 0, None, True)
        self._done, self._first = 0, -1
        self._tokens, self._began, self._shown = tokens, time.monotonic(), 0.0
        self._live = sys.stderr.isatty()

    def add(self, piece: Piece, tokens: int) -> None:
        """Counts tokens that were written, and shows the line if it is due."""
        self._done = int(self._before[piece.file]) + piece.read
        self._first = self._done if self._first < 0 else self._first
        self._tokens += tokens
        if time.monotonic() - self._shown >= (0.1 if self._live else 10):
            self.show()

    def show(self, last: bool = False) -> None:
        """Writes the line; the `last` one says that all is done."""
        self._shown, total = time.monotonic(), int(self._before[-1])
        self._done = total if last else self._done
        speed = (self._done - max(self._first, 0)) / max(self._shown - self._began, 1e-3)
        text = f"{size_of(self._done)} of {size_of(total)}  {number(self._tokens)} tokens"
        text += f"  {size_of(speed)}/s  {clock((total - self._done) / speed)} left" if speed else ""
        with suppress(OSError):  # whoever read it is gone
            say(Coloured(f"\r\033[K{text}") if self._live else text, end="" if self._live and not last else "\n")
