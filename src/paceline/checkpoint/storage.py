"""Writes files durably (fsync, rename) in a folder, or at an fsspec URL: where checkpoints are stored.

A storage has named folders that hold named files. A file gets its final name at once, but counts only when a manifest
lists it. So no rename is needed, which object stores do not have. No torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from paceline.base.schema import open_file, read_file
from paceline.errors import UsageError, first_line

Chunks = Iterable[bytes | memoryview]
_BLOCK = 16 << 20  # a write(2) takes at most 2 GiB; a block that fits a cache is hashed and written fastest
_SMALL, _TOGETHER = 1 << 16, 1 << 20  # bytes of a chunk that is copied to others, and of these
# Exceptions of the packages behind fsspec for a store that cannot be reached; they are not subclasses of OSError.
_FAILURES = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("azure.core.exceptions", "AzureError"),
)
# For error texts: the options that choose another storage.
RUN_DIR, CHECKPOINTS = "another --run-dir", "other --checkpoints"
NO_MIRROR = "--save-every with a folder as --checkpoints instead of --mirror"
_URL = re.compile(r"[A-Za-z][\w+.-]*://")


class Storage(Protocol):
    """A storage for checkpoints: a folder or an object store, with one level of folders that hold files.

    Every method raises OSError if the storage cannot be read or written, FileNotFoundError if a file is missing.
    """

    shared: bool  # whether all hosts can open it by the same text, which is then a URL
    another: str  # for error texts: the option that chooses another storage

    def __str__(self) -> str: ...

    def inside(self, folder: str) -> Storage:
        """The storage in a folder of this one, which need not exist yet."""

    def folders(self) -> list[str]:
        """The names of the folders in the storage; none if the storage does not exist."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The bytes of each file in a folder."""

    def read(self, folder: str, file: str) -> bytes:
        """The bytes of a file."""

    def local(self, folder: str, file: str) -> Path:
        """The path of a local file with the same bytes, which exists as long as this object lives."""

    def is_elsewhere(self, folder: str, file: str) -> bool:
        """Whether a file is on other hosts only, so that `read_part` reads what is needed of it."""

    def read_part(self, folder: str, file: str, first: int, end: int) -> bytes:
        """The bytes from `first` to `end` of a file that is elsewhere."""

    def digest(self, folder: str, file: str) -> str:
        """The SHA-256 of a file's bytes."""

    def write(self, folder: str, file: str, chunks: Chunks) -> tuple[int, str]:
        """Writes a new file durably; returns its size in bytes and its SHA-256."""

    def put(self, folder: str, file: str, data: bytes) -> None:
        """Writes a small file durably and atomically; it replaces a file of that name."""

    def remove(self, folder: str, files: Iterable[str] | None = None) -> None:
        """Removes these files of a folder one after another, or with None the whole folder."""

    def tidy(self, folder: str) -> None:
        """Removes a folder if it has no files. Call it only after the last write into the folder."""


def is_url(location: str) -> bool:
    """Whether `location` is a URL (``scheme://...``) and not a path."""
    return _URL.match(location) is not None


def storage_at(location: str | Path, another: str = RUN_DIR) -> Storage:
    """Opens the storage at a URL (``s3://bucket/runs/a``) or in a folder; error texts suggest `another` for a folder.

    Raises UsageError if fsspec cannot open the URL.
    """
    return ObjectStore(str(location)) if is_url(str(location)) else Folder(Path(location), another)


class _OneStorage:
    """The methods of a storage all of whose files can be opened on this host."""

    def local(self, folder: str, file: str) -> Path:
        """The path of a local file with the same bytes."""
        raise NotImplementedError

    def is_elsewhere(self, folder: str, file: str) -> bool:
        """False: this host can open the file."""
        return False

    def read_part(self, folder: str, file: str, first: int, end: int) -> bytes:
        """The bytes from `first` to `end` of a file."""
        with open_file(self.local(folder, file)) as data:
            data.seek(first)
            return bytes(data.read(end - first))

    def digest(self, folder: str, file: str) -> str:
        """The SHA-256 of a file's bytes."""
        return file_digest(self.local(folder, file))


def file_digest(path: Path) -> str:
    """The SHA-256 of a local file."""
    with open_file(path) as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


class Folder(_OneStorage):
    """A storage in a local or shared folder, which is created at the first write with access for its owner only."""

    shared = False

    def __init__(self, path: Path, another: str = RUN_DIR) -> None:
        self.path, self.another = path, another

    def __str__(self) -> str:
        return str(self.path)

    def inside(self, folder: str) -> Folder:
        """The storage in a folder of this one, which need not exist yet."""
        return Folder(self.path / folder, self.another)

    def folders(self) -> list[str]:
        """The names of the folders in the storage; none if it does not exist."""
        try:
            return [path.name for path in self.path.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        """The bytes of each file in a folder."""
        return {path.name: path.stat().st_size for path in (self.path / folder).iterdir()}

    def read(self, folder: str, file: str) -> bytes:
        """The bytes of a file."""
        return read_file(self.path / folder / file)

    def local(self, folder: str, file: str) -> Path:
        """The path of the file itself."""
        return self.path / folder / file

    def make(self, folder: str = "") -> Path:
        """Creates a folder of the storage if it is missing; returns its path."""
        path = self.path / folder
        if not path.is_dir():
            for each in (self.path.parent, self.path, path):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            for each in (self.path.parent, self.path):
                flush_folder(each)
        return path

    def write(self, folder: str, file: str, chunks: Chunks) -> tuple[int, str]:
        """Writes a new file durably; returns its size in bytes and its SHA-256."""
        path = self.make(folder)
        written = write_file(path / file, chunks)
        flush_folder(path)
        return written

    def drop_cached(self, folder: str) -> None:
        """Asks the system to read the files of a folder from the disk the next time, and not from its cache."""
        if not hasattr(os, "posix_fadvise"):
            return
        for path in (self.path / folder).iterdir():
            with open_file(path) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def put(self, folder: str, file: str, data: bytes) -> None:
        """Writes a small file durably and atomically; it replaces a file of that name."""
        path = self.make(folder)
        temporary = path / f".{file}.tmp"
        temporary.unlink(missing_ok=True)
        try:
            write_file(temporary, [data])
            os.replace(temporary, path / file)
        finally:
            temporary.unlink(missing_ok=True)
        flush_folder(path)

    def remove(self, folder: str, files: Iterable[str] | None = None) -> None:
        """Removes these files of a folder one after another, or with None the whole folder."""
        path = self.path / folder
        if files is None:
            shutil.rmtree(path)
            return
        for file in files:
            (path / file).unlink(missing_ok=True)

    def tidy(self, folder: str) -> None:
        """Removes a folder if it has no files."""
        if not any((self.path / folder).iterdir()):
            (self.path / folder).rmdir()


class ObjectStore(_OneStorage):
    """A storage at a URL that fsspec opens, such as ``s3://bucket/runs/a``.

    The packages behind fsspec read keys and endpoints from the environment.
    """

    shared, another = True, CHECKPOINTS

    def __init__(self, url: str) -> None:
        import fsspec  # a dependency of torch, so it is installed

        self.url = url.rstrip("/")
        try:
            self._system, self._root = fsspec.core.url_to_fs(
                self.url, use_listings_cache=False, skip_instance_cache=True
            )
        except (ImportError, ValueError) as error:
            what = f"checkpoints cannot be stored at {url} ({first_line(error)})"
            raise UsageError(what, "install the Python package for this kind of URL, or use a folder") from None
        except (
            OSError,
            TypeError,
            AttributeError,
        ) as error:  # unreachable, or the file system needs arguments besides the URL
            what = f"checkpoints cannot be stored at {url} ({getattr(error, 'strerror', None) or first_line(error)})"
            raise UsageError(
                what, "check that this host can reach the URL and that it needs no further settings, or use a folder"
            ) from None
        self._fetched: Path | None = None

    def __str__(self) -> str:
        return self.url

    def inside(self, folder: str) -> ObjectStore:
        """The storage in a folder of this one, which need not exist yet."""
        return ObjectStore(f"{self.url}/{folder}")

    @contextmanager
    def _reached(self) -> Iterator[Any]:
        """Yields the file system; converts the exceptions of the packages behind fsspec to OSError."""
        try:
            yield self._system
        except OSError as error:
            number = errno.ENOENT if isinstance(error, FileNotFoundError) else error.errno or errno.EIO
            raise OSError(number, error.strerror or first_line(error)) from error
        except failures() as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {first_line(error)}") from error

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))

    def _listed(self, path: str) -> list[dict[str, Any]]:
        with self._reached() as system:
            system.invalidate_cache()
            entries: list[dict[str, Any]] = system.ls(path, detail=True)
            return [entry for entry in entries if entry["name"].strip("/") != path.strip("/")]

    def folders(self) -> list[str]:
        """The names of the folders in the storage; none if it does not exist."""
        try:
            listed = self._listed(self._path())
        except FileNotFoundError:
            return []
        return [entry["name"].rstrip("/").rpartition("/")[2] for entry in listed if entry["type"] == "directory"]

    def sizes(self, folder: str) -> dict[str, int]:
        """The bytes of each file in a folder."""
        listed = self._listed(self._path(folder))
        return {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in listed if entry["type"] == "file"}

    def read(self, folder: str, file: str) -> bytes:
        """The bytes of a file."""
        with self._reached() as system:
            return bytes(system.cat_file(self._path(folder, file)))

    def local(self, folder: str, file: str) -> Path:
        """The path of a temporary copy of the file, which is downloaded at the first call."""
        if self._fetched is None:
            self._fetched = Path(tempfile.mkdtemp(prefix="paceline-"))
            weakref.finalize(self, shutil.rmtree, self._fetched, ignore_errors=True)
        path = self._fetched / f"{folder}-{file}"
        if not path.exists():
            partial = path.with_suffix(".partial")
            with self._reached() as system:
                system.get_file(self._path(folder, file), str(partial))
            os.replace(partial, path)
        return path

    def write(self, folder: str, file: str, chunks: Chunks) -> tuple[int, str]:
        """Writes a new file durably; returns its size in bytes and its SHA-256."""
        digest, size = hashlib.sha256(), 0
        with self._reached() as system:
            system.makedirs(self._path(folder), exist_ok=True)  # does nothing in an object store
            with system.open(self._path(folder, file), "wb") as stream:
                for block in blocks(chunks):
                    digest.update(block)
                    stream.write(block)
                    size += len(block)
        return size, digest.hexdigest()

    def put(self, folder: str, file: str, data: bytes) -> None:
        """Writes a small file durably and atomically; it replaces a file of that name."""
        with self._reached() as system:
            system.makedirs(self._path(folder), exist_ok=True)
            system.pipe_file(self._path(folder, file), data)

    def remove(self, folder: str, files: Iterable[str] | None = None) -> None:
        """Removes these files of a folder one after another, or with None the whole folder."""
        with self._reached() as system:
            if files is None:
                system.rm(self._path(folder), recursive=True)
                return
            for file in files:
                system.rm_file(self._path(folder, file))

    def tidy(self, folder: str) -> None:
        """Removes a folder if it has no files."""
        if not self._listed(self._path(folder)):  # an object store has no folders without files
            self.remove(folder)


def failures() -> tuple[type[Exception], ...]:
    """The exception classes of a failed access: OSError, and those of `_FAILURES` whose packages are imported."""
    classes = [getattr(sys.modules[module], name) for module, name in _FAILURES if module in sys.modules]
    return (OSError, *classes)


def flush_folder(path: Path) -> None:
    """Makes the names inside `path` durable."""
    if sys.platform == "win32":  # Windows cannot open folders
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def blocks(chunks: Chunks) -> Iterator[memoryview]:
    """Splits large chunks and joins small ones into blocks of a size that is fast to hash and write."""
    small = bytearray()
    for chunk in chunks:
        view = memoryview(chunk)
        if len(view) <= _SMALL:
            small += view
        if small and (len(small) >= _TOGETHER or len(view) > _SMALL):
            yield memoryview(small)
            small = bytearray()
        if len(view) > _SMALL:
            for start in range(0, len(view), _BLOCK):
                yield view[start : start + _BLOCK]
    if small:
        yield memoryview(small)


def write_file(path: Path, chunks: Chunks, mode: int = 0o600) -> tuple[int, str]:
    """Writes `chunks` to the new file `path` and flushes it; returns bytes and SHA-256. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        for block in blocks(chunks):
            size += len(block)
            digest.update(block)
            while block:
                block = block[os.write(fd, block) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return size, digest.hexdigest()
