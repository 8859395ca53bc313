"""A dataset of rows in Parquet files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from paceline.data.byte_ranges import Paths, names_of, patterns_of, refuse_change
from paceline.data.row_groups import CACHE, RowGroups
from paceline.data.table_rows import Columns, TableRows, columns_of, refuse_missing
from paceline.errors import DatasetError, UsageError, first_line

_MISSING = "pass the folder that the table was written to, its files, or a pattern like folder/*.parquet"


class _ParquetFile(NamedTuple):
    """A file, with pyarrow's file system that reads it. `version`: its size and the time of its last change."""

    store: Any
    path: str
    version: tuple[int, int | None]


class ParquetRows(TableRows):
    """All rows of Parquet files, in the order of their paths: each a dict from a column to its value.

    Numbers are numpy's scalars, lists of numbers numpy arrays, and all else is as Python has it. Without ``collate=``,
    the batches of ``steps()`` are those that torch's `default_collate` makes of the rows; they are made by columns.

    `url` is a folder or a file, or a URL that pyarrow knows (``s3://``, ``hdfs://``, ``gs://``), which may be a pattern
    (``folder/*.parquet``, ``part-{000..146}.parquet``), or a list of these, whose files come in the order of the list;
    files whose names begin with ``_`` or ``.`` are ignored. `columns`: which to read (default: all). Opening reads the
    end of each file. Reading a row reads its complete row group; up to `cache` bytes of row groups stay in memory. May
    be pickled and forked.

    Raises UsageError without pyarrow. Raises DatasetError if a file, a column or a row does not exist, if a file cannot
    be read, or if it has changed since it was found.
    """

    def __init__(self, url: Paths, columns: Sequence[str] | None = None, cache: int = CACHE) -> None:
        try:
            from pyarrow import parquet
        except ModuleNotFoundError as error:
            raise UsageError("Parquet files need pyarrow", "pip install 'paceline[parquet]'") from error
        self.url, self._columns = names_of(url), columns and list(columns)
        self._files = [file for pattern in patterns_of(url) for file in _find(pattern)]
        ends = list[Any]()
        for file in self._files:
            with _reading(file.path):
                ends.append(parquet.read_metadata(file.path, filesystem=file.store))
        if ends:
            refuse_missing(columns, ends[0].schema.to_arrow_schema().names, self.url)
        groups = [
            (file, group, end.row_group(group).num_rows)
            for file, end in enumerate(ends)
            for group in range(end.num_row_groups)
        ]
        self._groups = [(file, group) for file, group, rows in groups if rows]
        self._rows = RowGroups([rows for _, _, rows in groups if rows], cache, "ParquetRows")
        if not self._groups:
            raise DatasetError(f"{self.url} contains no Parquet rows", _MISSING)
        self._open: tuple[int, dict[int, Any]] = (0, {})  # (process id, {number of a file: the open file})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": (0, {})}

    def _read(self, number: int) -> tuple[int, Columns]:
        file, group = self._groups[number]
        if self._open[0] != os.getpid():  # a fork shares no open file
            self._open = (os.getpid(), {})
        files = self._open[1]
        with _reading(self._files[file].path):
            if file not in files:
                files[file] = self._opened(self._files[file])
            table = files[file].read_row_group(group, columns=self._columns, use_threads=False).combine_chunks()
        return table.nbytes, columns_of(table)

    def _opened(self, file: _ParquetFile) -> Any:
        from pyarrow import parquet

        refuse_change(file.path, file.version, _version(file.store.get_file_info(file.path)))
        opened = parquet.ParquetFile(file.path, filesystem=file.store)
        refuse_missing(self._columns, opened.schema_arrow.names, file.path)
        return opened


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Raises DatasetError for a file that cannot be read."""
    from pyarrow import ArrowException

    try:
        yield
    except (OSError, ArrowException) as error:
        what = f"{path} cannot be read ({first_line(error)})"
        raise DatasetError(what, "check its path and permissions, or write it again") from error


def _version(info: Any) -> tuple[int, int | None]:
    return info.size, info.mtime_ns


def _find(url: str) -> list[_ParquetFile]:
    """Returns the files that a path, a URL or a pattern names, folders with all files in them. Raises DatasetError."""
    from pyarrow import fs

    files = list[_ParquetFile]()
    with _reading(url):
        store, paths = _expand(url)
        for path in paths:
            infos = [store.get_file_info(path)]
            if infos[0].type == fs.FileType.NotFound:
                raise DatasetError(f"{url} does not exist", _MISSING)
            if infos[0].type == fs.FileType.Directory:
                infos = store.get_file_info(fs.FileSelector(path, recursive=True))
            infos = sorted((info for info in infos if info.is_file), key=lambda info: info.path)
            files += [_ParquetFile(store, info.path, _version(info)) for info in infos if info.base_name[0] not in "_."]
    return files


def _expand(url: str) -> tuple[Any, list[str]]:
    """Returns pyarrow's file system for a path, a URL or a pattern, and the sorted paths there that it names."""
    from pyarrow import fs

    is_url = re.match(r"[A-Za-z][\w+.-]*://", url)
    path, mark, options = url.partition("?") if is_url else (os.path.abspath(url), "", "")
    magic = None if not is_url and os.path.exists(path) else re.search(r"[*?\[]", path)
    base = path if magic is None else path[: magic.start()].rpartition("/")[0]
    store, root = fs.FileSystem.from_uri(base + mark + options) if is_url else (fs.LocalFileSystem(), base or "/")
    paths, parts = [root], [] if magic is None else path[len(base) + 1 :].rstrip("/").split("/")
    for number, part in enumerate(parts, 1):
        infos = [info for path in paths for info in store.get_file_info(fs.FileSelector(path, allow_not_found=True))]
        infos = [info for info in infos if info.type == fs.FileType.Directory or number == len(parts)]
        paths = sorted(info.path for info in infos if info.base_name == part or fnmatchcase(info.base_name, part))
    return store, paths
