"""Indexes of files: where the rows of each file begin. An index is written once, and read by all workers and runs.

The index of a local file lies beside it in a folder ``.paceline-index``, or in the user's cache folder if that cannot
be written; the index of a file at a URL lies in the cache folder. An index counts if it has the size and the time of
the file's last change (at a URL its ETag or time, if the server has one). Otherwise it is written anew, under a
temporary name that is then replaced, by one process of a host while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from paceline.base.environment import cache_folder
from paceline.base.heartbeat import HEARTBEAT
from paceline.base.schema import read_file
from paceline.checkpoint.storage import Storage, failures, is_url, storage_at
from paceline.data.byte_ranges import LocalFiles, RemoteFiles
from paceline.errors import UsageError, first_line

FORMAT = 1
BESIDE = ".paceline-index"
_AT_ONCE = 8  # files at URLs that are read at the same time
Store = LocalFiles | RemoteFiles
Scan = Callable[[Store, str, int], Any]


def row_begins(files: Sequence[tuple[Store, str]], kind: str, scan: Scan, folder: str | None = None) -> list[Any]:
    """Returns where the rows of each file begin and, last, where the last row ends: read-only int64 arrays.

    ``scan(store, path, bytes of the file)`` computes such an array if there is no index. `kind` names what the numbers
    mean. `folder` is a path or a URL for the indexes instead of the usual places; of a URL without a folder
    (``gs://bucket``), the folder ``.paceline-index`` there.

    Raises UsageError if nothing can be written to `folder`.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        stamps = list(pool.map(lambda file: file[0].stamp(file[1]), files))
        indexes = [_Index(path, kind, stamp, folder) for (_, path), stamp in zip(files, stamps, strict=True)]
        known = list(pool.map(_Index.load, indexes))
    missing = [number for number, begins in enumerate(known) if begins is None]
    if not missing:
        return known

    def make(number: int) -> Any:
        (store, path), index = files[number], indexes[number]
        begins = index.load()  # another process may have written it meanwhile
        if begins is None:
            begins = np.asarray(scan(store, path, stamps[number][0]), np.int64)
            index.save(begins)
        HEARTBEAT.beat()
        return _read_only(begins)

    is_remote = any(isinstance(files[number][0], RemoteFiles) for number in missing)
    with _locked(indexes[0].name), ThreadPoolExecutor(_AT_ONCE if is_remote else 1) as pool:
        for number, begins in zip(missing, pool.map(make, missing), strict=True):
            known[number] = begins
    return known


class _Index:
    """The index of a file: the places where it may lie, and what it must say of the file."""

    def __init__(self, path: str, kind: str, stamp: tuple[int, str], folder: str | None) -> None:
        self._about = {"format": FORMAT, "kind": kind, "size": stamp[0], "changed": stamp[1]}
        base = path.rstrip("/").rpartition("/")[2]
        self.name = f"{base}-{hashlib.sha256(path.encode()).hexdigest()[:12]}.index"
        if folder is not None:
            self._places = [(folder, self.name)]
        elif os.path.isabs(path) and os.path.exists(path):
            self._places = [(os.path.join(os.path.dirname(path), BESIDE), f"{base}.index")]
            self._places.append((str(cache_folder() / "indexes"), self.name))
        else:
            self._places = [(str(cache_folder() / "indexes"), self.name)]
        self._must_write = folder is not None
        if not stamp[1]:  # a change would go unnoticed
            self._places, self._must_write = [], False

    def load(self) -> Any:
        """Returns the numbers of the index; None if there is no index that describes the file as it is now."""
        for folder, name in self._places:
            try:
                data = _read(folder, name)
            except failures():
                continue
            head, _, numbers = data.partition(b"\n")
            with suppress(ValueError, KeyError, TypeError):
                about = json.loads(head)
                if len(numbers) == 8 * about.pop("numbers") and about == self._about:
                    return np.frombuffer(numbers, "<i8")
        return None

    def save(self, begins: Any) -> None:
        """Writes the index to the first place that can be written; without one, the next run computes it again."""
        head = json.dumps({**self._about, "numbers": len(begins)}).encode()
        data, error = head + b"\n" + begins.astype("<i8").tobytes(), None
        for folder, name in self._places:
            try:
                _write(folder, name, data)
                return
            except failures() as failed:
                error = failed
        if self._must_write and error is not None:
            what = f"the index cannot be written to {self._places[0][0]} ({first_line(error)})"
            raise UsageError(what, "pass a folder as index= that can be written, or leave index= out") from error


def _read(folder: str, name: str) -> bytes:
    if is_url(folder):
        storage, below = _storage_of(folder)
        return storage.read(below, name)
    return read_file(Path(folder) / name)


def _storage_of(url: str) -> tuple[Storage, str]:
    """Returns the storage at a URL, and the name of the folder in it."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return (storage_at(parent), name) if is_url(parent) else (storage_at(url), BESIDE)  # a bucket has no parent


def _write(folder: str, name: str, data: bytes) -> None:
    """Writes a file atomically: several processes may do so at once."""
    if is_url(folder):
        storage, below = _storage_of(folder)
        storage.put(below, name, data)
        return
    os.makedirs(folder, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)  # others may train on the same files
        os.replace(temporary, os.path.join(folder, name))
    finally:
        Path(temporary).unlink(missing_ok=True)


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Lets one process of this host into the context at a time, if the cache folder can be written."""
    file = None
    with suppress(OSError):
        (folder := cache_folder() / "indexes").mkdir(parents=True, exist_ok=True)
        file = (folder / f".{name}.lock").open("a")
    try:
        while file is not None:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                HEARTBEAT.beat()
                time.sleep(0.1)
            except OSError:  # a file system without locks: then several processes write the same index
                break
        yield
    finally:
        if file is not None:
            file.close()


def _read_only(begins: Any) -> Any:
    """Returns a copy that cannot be written to, so that nobody has to look for changes."""
    return np.frombuffer(begins.tobytes(), np.int64)
