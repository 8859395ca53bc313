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
from paceline.errors import DatasetError, UsageError, a, first_line

Span = tuple[str, int, int]  # file, first byte, end
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_COMPRESSED = {b"\x1f\x8b": "gunzip -k", b"\x28\xb5\x2f\xfd": "unzstd", b"BZh": "bunzip2 -k", b"\xfd7zXZ": "unxz -k"}
_MARKS = (
    "ETag",
    "etag",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "mtime",
    "updated",
)  # of a file's change, in fsspec's infos


def find_files(
    files: Paths, options: Mapping[str, Any] | None, cure: str
) -> list[tuple[LocalFiles | RemoteFiles, str]]:
    """Returns the files that paths, URLs and patterns (``a/*.tar``, ``a-{00..12}.tar``) name, each with its store."""
    named, stores = list[tuple[LocalFiles | RemoteFiles, str]](), dict[str, LocalFiles | RemoteFiles]()
    for pattern in _texts(files):
        kind = pattern if "::" in pattern else pattern.partition("://")[0] if "://" in pattern else ""
        if kind not in stores:  # one store for all files of a kind, whose ranges are read in parallel
            stores[kind] = open_files(pattern, options, cure)
        store = stores[kind]
        for one in _expand_braces(pattern):
            named += [(store, path) for path in store.find(one)]
    return named


def patterns_of(files: Paths) -> list[str]:
    """Returns the paths, URLs and patterns, one for each choice of a pattern with braces."""
    return [pattern for text in _texts(files) for pattern in _expand_braces(text)]


def location_of(url: str | os.PathLike[str], cure: str) -> str:
    """Returns a path or a URL as a text. Raises UsageError for a list and any other value; `cure` is the advice."""
    try:
        return os.fspath(url)
    except TypeError:
        raise UsageError(f"url= needs a path or a URL, got {a(type(url).__name__)}", cure) from None


def names_of(files: Paths) -> str:
    """Returns the paths and patterns for an error."""
    return ", ".join(_texts(files)) or "an empty list"


def _texts(files: Paths) -> list[str]:
    return [os.fspath(one) for one in ([files] if isinstance(files, str | os.PathLike) else files)]


def _expand_braces(pattern: str) -> list[str]:
    """Returns the texts that a pattern with braces stands for, as in a shell: ``{00..12}`` and ``{a,b}``."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    bounds = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if bounds is not None:
        first, last, width = int(bounds[1]), int(bounds[2]), len(bounds[1])
        choices = [f"{number:0{width}}" for number in range(first, last + 1)]
    elif "," in match[1]:
        choices = match[1].split(",")
    else:
        return [pattern]
    return [
        text
        for choice in choices
        for text in _expand_braces(pattern[: match.start()] + choice + pattern[match.end() :])
    ]


def refuse_compressed(head: bytes, path: str) -> None:
    """Raises UsageError if the first bytes of a file are those of a compressed one."""
    for magic, command in _COMPRESSED.items():
        if head.startswith(magic):
            what = f"{path} is compressed, so its rows cannot be read one by one"
            raise UsageError(what, f"decompress it first: {command} {os.path.basename(path)}")


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
    """Returns what a server has sent of a file. Raises DatasetError if it has another length."""
    path, start, stop = span
    if len(data) != stop - start:
        what = f"{path} returned {len(data)} bytes instead of {stop - start}"
        if len(data) < stop - start:
            raise DatasetError(what, "upload it again: it is incomplete, or has changed")
        raise DatasetError(what, "copy it to this machine: it has changed, or its server does not support byte ranges")
    return data


def refuse_change(path: str, before: object, now: object) -> None:
    """Raises DatasetError unless a file has the same version as before: what is mapped of a shortened one is lost."""
    if now != before:
        what = f"{path} has changed since it was opened"
        raise DatasetError(what, "start again, and do not write to a file that a training reads")


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

    def files_below(self, folder: str) -> list[str]:
        """The paths of all files in a folder and in the folders of it, in any order; also behind links."""
        with _reading(folder, self._cure):
            os.stat(folder)
        walk = os.walk(folder, followlinks=True)
        return [f"{path}/{name}".replace(os.sep, "/") for path, _, names in walk for name in names]

    def folders_in(self, folder: str) -> set[str]:
        """The names of the folders that lie directly in a folder; also links to folders."""
        _, names, _ = next(os.walk(folder), ("", [], []))
        return set(names)

    def contents(self, paths: Sequence[str]) -> list[bytes]:
        """The bytes of each file."""
        return [self.read_all(path, path) for path in paths]

    def read_all(self, path: str, where: str) -> bytes:
        """The bytes of a file."""
        with _reading(where, self._cure):
            return read_file(path)

    def sizes(self, paths: Sequence[str], where: str) -> list[int]:
        """The bytes of each file."""
        with _reading(where, self._cure):
            return [os.stat(path).st_size for path in paths]

    def version(self, path: str) -> tuple[int, int]:
        """The size and the time of the last change of a file."""
        with _reading(path, self._cure):
            known = os.stat(path)
        return known.st_size, known.st_mtime_ns

    def stamp(self, path: str) -> tuple[int, str]:
        """The size and the time of the last change of a file, as an index keeps them."""
        if os.path.isdir(path):
            raise DatasetError(f"{path} is a folder", self._cure)
        size, changed = self.version(path)
        return size, str(changed)

    def ranges(self, spans: Sequence[Span]) -> list[Any]:
        """The bytes of each span, as uint8 arrays."""
        blocks, checked = [], set[str]()
        for span in spans:
            path, start, stop = span
            with _reading(path, self._cure):
                mapped = self._map(path)
                if path not in checked:  # once for all rows of a micro-batch: it is a system call
                    _refuse_truncated(path, len(mapped))
                    checked.add(path)
                if stop > len(mapped):
                    what = f"{path} is incomplete: it has {len(mapped)} bytes instead of at least {stop}"
                    raise DatasetError(what, "copy or write it again")
                blocks.append(mapped[start:stop])
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
        if not os.fstat(file.fileno()).st_size:  # which cannot be mapped
            return np.empty(0, np.uint8)
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

    def _path_of(self, url: str) -> str:
        """The path of another file of the same store."""
        from fsspec.core import url_to_fs

        return str(url_to_fs(url, **self.options)[1]).rstrip("/")

    def find(self, pattern: str) -> list[str]:
        """The sorted paths of the files that the URL, which may be a glob pattern, names."""
        system = self._opened()
        path = self._root if pattern == self.url else self._path_of(pattern)
        if not glob.has_magic(pattern):
            return [path]
        with _reading(pattern, self._cure):
            return [path] if system.exists(path) else sorted(system.glob(path))

    def open(self, path: str) -> Any:
        """The file, open for reading."""
        with _reading(path, self._cure):
            return self._opened().open(path, "rb")

    def files_below(self, folder: str) -> list[str]:
        """The paths of all files in a folder and in the folders of it, in any order."""
        with _reading(folder, self._cure):
            return list(self._opened().find(folder))

    def folders_in(self, folder: str) -> set[str]:
        """The names of the folders that lie directly in a folder."""
        with _reading(folder, self._cure):
            listed = self._opened().ls(folder, detail=True)
        paths = [one["name"].rstrip("/") for one in listed if one["type"] == "directory"]
        # An object store may list the folder itself.
        return {path.rpartition("/")[2] for path in paths if path.startswith(f"{folder}/")}

    def contents(self, paths: Sequence[str]) -> list[bytes]:
        """The bytes of each file, read in parallel."""
        names = list(dict.fromkeys(paths))
        read = dict(zip(names, self._fetch(names, [None] * len(names), [None] * len(names)), strict=True))
        return [bytes(read[path]) for path in paths]

    def _fetch(self, paths: list[str], starts: list[int | None], stops: list[int | None]) -> list[Any]:
        """The bytes of a range of each file, read in parallel. None is the beginning or the end of a file.

        ``cat`` of fsspec would take names with brackets for patterns.
        """
        with _reading(self.url, self._cure):
            blocks: list[Any] = self._opened().cat_ranges(paths, starts, stops, on_error="raise")
            for block in blocks:
                if isinstance(block, Exception):  # older versions of fsspec return the errors
                    raise block
        return blocks

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

    def stamp(self, path: str) -> tuple[int, str]:
        """The size of a file, and its ETag or the time of its last change; an empty text if the server has neither."""
        with _reading(path, self._cure):
            info = self._opened().info(path)
        if info.get("type") == "directory":
            raise DatasetError(f"{path} is a folder", self._cure)
        if info.get("size") is None:
            raise DatasetError(f"the server does not report the size of {path}", "copy the files to this machine")
        return info["size"], next((str(info[name]) for name in _MARKS if info.get(name) is not None), "")

    def ranges(self, spans: Sequence[Span]) -> list[Any]:
        """The bytes of each span, as uint8 arrays; spans that touch are read with one request."""
        runs = list[list[Any]]()  # [path, begin, end, numbers in `spans`]
        for number in sorted(range(len(spans)), key=lambda number: spans[number]):
            path, begin, end = spans[number]
            if runs and runs[-1][0] == path and begin <= runs[-1][2]:
                runs[-1][2] = max(runs[-1][2], end)
                runs[-1][3].append(number)
            else:
                runs.append([path, begin, end, [number]])
        paths, starts, stops, _ = zip(*runs, strict=True) if runs else ((),) * 4
        blocks = self._fetch(list(paths), list(starts), list(stops))
        taken: list[Any] = [None] * len(spans)
        for (path, start, stop, numbers), data in zip(runs, blocks, strict=True):
            block = np.frombuffer(_check_length(data, (path, start, stop)), np.uint8)
            for number in numbers:
                taken[number] = block[spans[number][1] - start : spans[number][2] - start]
        return taken
