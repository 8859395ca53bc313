"""Reads ranges of bytes of files: local ones, which are mapped into memory, and those at URLs that fsspec knows."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import numpy as np

from paceline.base.schema import open_file, read_file
from paceline.checkpoint.storage import failures
from paceline.errors import DatasetError, UsageError, first_line

Span = tuple[str, int, int]  # file, first byte, end


def open_files(url: str, options: Mapping[str, Any] | None, cure: str) -> LocalFiles | RemoteFiles:
    """Returns what reads the files at a path or a URL. fsspec gets the `options`; `cure`: see `LocalFiles`."""
    is_url = re.match(r"[A-Za-z][\w+.-]*:(//|:)", url)
    return RemoteFiles(url, dict(options or {}), cure) if is_url else LocalFiles(cure)


@contextmanager
def _reading(where: str, cure: str) -> Iterator[None]:
    """Raises DatasetError for a failed access, with this `cure` if there is no such file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DatasetError(f"{error.filename or where} does not exist", cure) from None
    except failures() as error:
        raise DatasetError(f"{where} cannot be read ({first_line(error)})", "repair that, and start again") from error


def _check_length(data: Any, span: Span) -> Any:
    path, start, stop = span
    if len(data) != stop - start:
        what = f"{path} returned {len(data)} bytes instead of {stop - start}"
        raise DatasetError(what, "copy it to this machine: it has changed, or its server does not support byte ranges")
    return data


class LocalFiles:
    """Files of this machine, memory-mapped when first read. `cure` is the advice for a file that does not exist."""

    MAPS = 128  # each keeps a descriptor, and a process may have no more than 1024

    def __init__(self, cure: str) -> None:
        self._cure, self._map = cure, lru_cache(self.MAPS)(_mapped)

    def __reduce__(self) -> Any:  # maps stay behind
        return LocalFiles, (self._cure,)

    def root(self, url: str) -> str:
        """The path of the files, as the other methods take it."""
        return os.path.abspath(url)  # a process that reads may stand in another folder

    def find(self, pattern: str) -> list[str]:
        """The sorted paths of the files that a path or a glob pattern names."""
        paths = [pattern] if os.path.exists(pattern) or not glob.has_magic(pattern) else sorted(glob.glob(pattern))
        return [os.path.abspath(path) for path in paths]

    def read_all(self, path: str, where: str) -> bytes:
        """The bytes of a file."""
        with _reading(where, self._cure):
            return read_file(path)

    def sizes(self, paths: Sequence[str], where: str) -> list[int]:
        """The bytes of each file."""
        with _reading(where, self._cure):
            return [os.stat(path).st_size for path in paths]

    def version(self, path: str) -> tuple[int, int] | None:
        """The size and the time of the last change of a file."""
        with _reading(path, self._cure):
            known = os.stat(path)
        return known.st_size, known.st_mtime_ns

    def ranges(self, spans: Sequence[Span]) -> list[Any]:
        """The bytes of each span, as uint8 arrays."""
        blocks = []
        for span in spans:
            with _reading(span[0], self._cure):
                mapped = self._map(span[0])
                _refuse_truncated(span[0], len(mapped))
                blocks.append(_check_length(mapped[span[1] : span[2]], span))
        return blocks


def _refuse_truncated(path: str, length: int) -> None:
    """Raises DatasetError if a mapped file has become shorter: reading past its new end would kill the process."""
    with suppress(FileNotFoundError):  # the map of a deleted file stays intact
        size = os.stat(path).st_size
        if size < length:
            what = f"{path} was shortened from {length} to {size} bytes after it was opened"
            raise DatasetError(what, "write or copy the file again, and start again")


def _mapped(path: str) -> Any:
    with open_file(path) as file:
        return np.memmap(file, np.uint8, "r").view(np.ndarray)  # plain: a memmap's slices are slow to make


class RemoteFiles:
    """Files at a URL that fsspec reads. It keeps its connections, so no file is kept open. `cure`: see `LocalFiles`."""

    def __init__(self, url: str, options: dict[str, Any], cure: str) -> None:
        self.url, self.options, self._cure = url, options, cure
        self._pid, self._system, self._root = 0, None, ""

    def __reduce__(self) -> Any:  # connections stay behind
        return RemoteFiles, (self.url, self.options, self._cure)

    def _opened(self) -> Any:
        if self._pid != os.getpid():  # threads and sockets do not survive a fork
            try:
                import fsspec
            except ImportError:
                what = f"{self.url} is read with fsspec, which is not installed"
                raise UsageError(what, "pip install 'paceline[text]', or copy the files to this machine") from None
            try:
                self._system, root = fsspec.core.url_to_fs(self.url, **self.options)
            except (ImportError, ValueError) as error:
                what = f"fsspec cannot read {self.url} ({first_line(error)})"
                raise UsageError(what, "install the named package, or copy the files to this machine") from None
            self._root, self._pid = root.rstrip("/"), os.getpid()
        return self._system

    def root(self, url: str) -> str:
        """The path of the files, as the other methods take it."""
        self._opened()
        return self._root

    def find(self, pattern: str) -> list[str]:
        """The sorted paths of the files that the URL, which may be a glob pattern, names."""
        if not glob.has_magic(pattern):
            return [self.root(pattern)]
        with _reading(pattern, self._cure):
            return sorted(self._opened().glob(self._root))

    def read_all(self, path: str, where: str) -> bytes:
        """The bytes of a file."""
        with _reading(where, self._cure):
            return bytes(self._opened().cat_file(path))

    def sizes(self, paths: Sequence[str], where: str) -> list[int]:
        """The bytes of each file."""
        with _reading(where, self._cure):
            sizes = self._opened().sizes(list(paths))
        if None in sizes:
            what = f"the server does not report the size of {paths[sizes.index(None)]}"
            raise DatasetError(what, "copy the files to this machine")
        return list(sizes)

    def version(self, path: str) -> tuple[int, int] | None:
        """None: each answer would take a request."""
        return None

    def ranges(self, spans: Sequence[Span]) -> list[Any]:
        """The bytes of each span, as uint8 arrays."""
        paths, starts, stops = ([span[part] for span in spans] for part in range(3))
        with _reading(self.url, self._cure):
            blocks = self._opened().cat_ranges(paths, starts, stops, on_error="raise")
        return [np.frombuffer(_check_length(data, span), np.uint8) for data, span in zip(blocks, spans, strict=True)]
