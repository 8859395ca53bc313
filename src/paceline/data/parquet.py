"""A dataset of rows in Parquet files."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from operator import index
from typing import Any

from paceline.data.order import sample_index
from paceline.errors import DatasetError, UsageError, first_line

CACHE = 256 << 20


class ParquetRows:
    """All rows of the Parquet files in a folder, in the order of their paths: each a dict from a column to its value.

    Numbers are numpy's scalars, lists of numbers numpy arrays, which torch's collate makes tensors of; all else is as
    Python has it. `url` is a folder or a file, or a URL that pyarrow knows (``s3://``, ``hdfs://``, ``gs://``); files
    whose names begin with ``_`` or ``.`` are no data. `columns`: which to read (default: all). Opening reads the end of
    each file; a row reads its row group, of which as many stay in memory as `cache` bytes hold. May be pickled and
    forked.

    Raises UsageError without pyarrow, DatasetError where there is no such file, column or row.
    """

    def __init__(self, url: str | os.PathLike[str], columns: Sequence[str] | None = None, cache: int = CACHE) -> None:
        try:
            from pyarrow import ArrowException, fs, parquet
        except ModuleNotFoundError as error:
            raise UsageError("Parquet files need pyarrow", "pip install 'paceline[parquet]'") from error
        self.url, self._columns, self._cache = os.fspath(url), columns and list(columns), cache
        location = self.url if re.match(r"[A-Za-z][\w+.-]*://", self.url) else f"file://{os.path.abspath(self.url)}"
        try:
            self._store, root = fs.FileSystem.from_uri(location)
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
        self._starts: list[int] = [0, *accumulate(filter(None, sizes))]
        if not self._groups:
            raise DatasetError(f"{self.url} contains no Parquet rows", "pass the folder that the table was written to")
        self._files: tuple[int, dict[str, Any]] = (0, {})  # (process id, {path: open file})
        self._read: OrderedDict[int, tuple[int, dict[str, Any]]] = OrderedDict()  # {row group: (bytes, its columns)}
        self._shuffled: tuple[Any, list[int], list[int]] = (None, [], [])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": (0, {}), "_read": OrderedDict()}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        row_index = index(row) + (len(self) if row < 0 else 0)
        if not 0 <= row_index < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        group = bisect_right(self._starts, row_index) - 1
        at = row_index - self._starts[group]
        return {name: column[at] for name, column in self._group(group).items()}

    def order(self, position: int, size: int, seed: int = 0, epoch: int = 0) -> int:
        """A sample order for ``steps(order=rows.order)``: shuffles the row groups, and the rows within each group.

        A worker so reads a row group once per epoch; an order over all rows would read it again and again. Raises
        UsageError if `size` is not the number of rows.
        """
        if size != len(self):
            raise UsageError(
                f"this order is for {len(self)} rows, but the dataset has {size}",
                "pass the ParquetRows object itself to steps()",
            )
        if self._shuffled[0] != (seed, epoch):
            groups = [int(sample_index(turn, len(self._groups), seed, epoch)) for turn in range(len(self._groups))]
            sizes = (self._starts[group + 1] - self._starts[group] for group in groups)
            self._shuffled = ((seed, epoch), groups, [0, *accumulate(sizes)])
        _, groups, starts = self._shuffled
        turn = bisect_right(starts, position) - 1
        group, count = groups[turn], starts[turn + 1] - starts[turn]
        return self._starts[group] + int(sample_index(position - starts[turn], count, seed, epoch + group))

    def _group(self, number: int) -> dict[str, Any]:
        if number in self._read:
            self._read.move_to_end(number)
            return self._read[number][1]
        from pyarrow import parquet

        path, group = self._groups[number]
        if self._files[0] != os.getpid():  # a fork shares no open file
            self._files = (os.getpid(), {})
        files = self._files[1]
        if path not in files:
            files[path] = parquet.ParquetFile(path, filesystem=self._store)
        table = files[path].read_row_group(group, columns=self._columns, use_threads=False).combine_chunks()
        self._read[number] = table.nbytes, {name: _values(table[name]) for name in table.column_names}
        while len(self._read) > 1 and sum(size for size, _ in self._read.values()) > self._cache:
            self._read.popitem(last=False)
        return self._read[number][1]


class _Lists:
    """A column whose values are lists of numbers."""

    def __init__(self, array: Any) -> None:
        self._numbers = array.flatten().to_numpy(zero_copy_only=False)
        self._starts = [0, *accumulate(array.value_lengths().to_pylist())]

    def __getitem__(self, row: int) -> Any:
        return self._numbers[self._starts[row] : self._starts[row + 1]].copy()


def _values(column: Any) -> Any:
    """The values of a column, as a sequence."""
    from pyarrow import types

    array = column.chunk(0)
    numbers = (types.is_integer, types.is_floating, types.is_boolean)
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    if not array.null_count and any(is_so(array.type) for is_so in numbers):
        return array.to_numpy(zero_copy_only=False)
    if not array.null_count and any(is_so(array.type) for is_so in lists):
        inner = array.flatten()
        if not inner.null_count and any(is_so(inner.type) for is_so in numbers):
            return _Lists(array)
    return array.to_pylist()
