"""A dataset of rows in Parquet files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from paceline.data.row_groups import CACHE, RowGroups
from paceline.data.table_rows import Columns, TableRows, columns_of
from paceline.errors import DatasetError, UsageError, first_line


class ParquetRows(TableRows):
    """All rows of the Parquet files in a folder, in the order of their paths: each a dict from a column to its value.

    Numbers are numpy's scalars, lists of numbers numpy arrays, and all else is as Python has it. Without ``collate=``,
    the batches of ``steps()`` are those that torch's `default_collate` makes of the rows; they are made by columns.

    `url` is a folder or a file, or a URL that pyarrow knows (``s3://``, ``hdfs://``, ``gs://``); files whose names
    begin with ``_`` or ``.`` are no data. `columns`: which to read (default: all). Opening reads the end of each file;
    a row reads its row group, of which as many stay in memory as `cache` bytes hold. May be pickled and forked.

    Raises UsageError without pyarrow, DatasetError where there is no such file, column or row.
    """

    def __init__(self, url: str | os.PathLike[str], columns: Sequence[str] | None = None, cache: int = CACHE) -> None:
        try:
            from pyarrow import ArrowException, fs, parquet
        except ModuleNotFoundError as error:
            raise UsageError("Parquet files need pyarrow", "pip install 'paceline[parquet]'") from error
        self.url, self._columns = os.fspath(url), columns and list(columns)
        self._store, root = fs.LocalFileSystem(), os.path.abspath(self.url)
        try:
            if re.match(r"[A-Za-z][\w+.-]*://", self.url):
                self._store, root = fs.FileSystem.from_uri(self.url)
            infos = [self._store.get_file_info(root)]
            if infos[0].type == fs.FileType.Directory:
                infos = self._store.get_file_info(fs.FileSelector(root, recursive=True))
            paths = sorted(info.path for info in infos if info.is_file and info.base_name[0] not in "_.")
            ends = [parquet.read_metadata(path, filesystem=self._store) for path in paths]
        except (OSError, ArrowException) as error:
            raise DatasetError(
                f"{self.url} cannot be read ({first_line(error)})", "check its path and permissions"
            ) from error
        names = set(ends[0].schema.to_arrow_schema().names) if ends else set()
        if missing := [name for name in columns or () if ends and name not in names]:
            what = f"{self.url} has no column {missing[0]}"
            raise DatasetError(what, f"it has {', '.join(sorted(names))}")
        cut = [(path, end, group) for path, end in zip(paths, ends, strict=True) for group in range(end.num_row_groups)]
        sizes = [end.row_group(group).num_rows for _, end, group in cut]
        self._groups = [(path, group) for (path, _, group), size in zip(cut, sizes, strict=True) if size]
        self._rows = RowGroups([size for size in sizes if size], cache, "ParquetRows")
        if not self._groups:
            raise DatasetError(f"{self.url} contains no Parquet rows", "pass the folder that the table was written to")
        self._files: tuple[int, dict[str, Any]] = (0, {})  # (process id, {path: open file})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": (0, {})}

    def _read(self, number: int) -> tuple[int, Columns]:
        from pyarrow import parquet

        path, group = self._groups[number]
        if self._files[0] != os.getpid():  # a fork shares no open file
            self._files = (os.getpid(), {})
        files = self._files[1]
        if path not in files:
            files[path] = parquet.ParquetFile(path, filesystem=self._store)
        table = files[path].read_row_group(group, columns=self._columns, use_threads=False).combine_chunks()
        return table.nbytes, columns_of(table)
