"""Datasets of rows in Arrow files, and in Lance datasets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from paceline.data.byte_ranges import LocalFiles, RemoteFiles, find_files, location_of, names_of, refuse_change
from paceline.data.row_groups import CACHE, RowGroups
from paceline.data.row_index import row_begins
from paceline.data.table_rows import Columns, TableRows, columns_of, refuse_missing
from paceline.errors import DatasetError, UsageError, first_line

_BLOCK = 16 << 20  # bytes of rows of a Lance dataset that are read together, if all rows are as large as the first one
_BLOCK_ROWS = (64, 4096)  # the least and the most rows of a block
_DENSE = 32  # rows asked for in a run from which on blocks are read; fewer may be all that is needed of the blocks
_MISSING = "pass Arrow files, or a pattern like folder/*.arrow"
Store = LocalFiles | RemoteFiles


class ArrowRows(TableRows):
    """All rows of Arrow files, in the order of the files: each a dict from a column to its value.

    Values are those of `ParquetRows`. `files`: a path or URL that fsspec knows (``s3://...``, which gets
    `storage_options`), which may be a pattern (``folder/*.arrow``), or a list of these. Files have Arrow's file format
    or, on a disk, its stream format, in which Hugging Face's datasets are stored. `columns`: which to read (default:
    all).

    The first time that a file is opened, its index is made: how many rows each record batch has. This reads a file at a
    URL completely. The index is kept as that of `WebDatasetRows`, also in `index`. A row then reads its record batch,
    of which as many stay in memory as `cache` bytes hold. May be pickled and forked.

    Raises UsageError without pyarrow and for a stream at a URL, DatasetError where there is no such file, column or
    row, for a file that is not an Arrow file, and for a local file that has changed.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        cache: int = CACHE,
        index: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import pyarrow  # noqa: F401
        except ModuleNotFoundError as error:
            raise UsageError("Arrow files need pyarrow", "pip install 'paceline[parquet]'") from error
        self._columns = None if columns is None else list(columns)
        self._files = find_files(files, storage_options, _MISSING)
        self._versions = [store.version(path) for store, path in self._files]
        begins = row_begins(self._files, "arrow", _batch_begins, None if index is None else os.fspath(index))
        self._groups = [
            (file, batch)
            for file, starts in enumerate(begins)
            for batch in range(len(starts) - 1)
            if starts[batch] < starts[batch + 1]
        ]
        sizes = [int(begins[file][batch + 1] - begins[file][batch]) for file, batch in self._groups]
        if not sizes:
            raise DatasetError(f"{names_of(files)} has no rows", _MISSING)
        self._rows = RowGroups(sizes, cache, "ArrowRows")
        self._open: tuple[int, dict[int, Callable[[int], Any]]] = (0, {})  # (process id, {file: what reads a batch})
        names = self._batches(self._groups[0][0])(self._groups[0][1]).schema.names
        refuse_missing(self._columns, names, names_of(files))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": (0, {})}

    def _batches(self, file: int) -> Callable[[int], Any]:
        if self._open[0] != os.getpid():  # a fork shares no open file
            self._open = (os.getpid(), {})
        readers = self._open[1]
        if file not in readers:
            readers[file] = _reader(*self._files[file])[1]
        return readers[file]

    def _columns_of(self, group: int) -> Columns:
        file = self._groups[group][0]
        store, path = self._files[file]
        refuse_change(path, self._versions[file], store.version(path))  # what is in memory views the file, too
        return super()._columns_of(group)

    def _read(self, number: int) -> tuple[int, Columns]:
        import pyarrow

        file, batch = self._groups[number]
        table = pyarrow.Table.from_batches([self._batches(file)(batch)])
        refuse_missing(self._columns, table.column_names, self._files[file][1])
        table = table.select(self._columns) if self._columns is not None else table
        return table.nbytes, columns_of(table)


def _reader(store: Store, path: str) -> tuple[int, Callable[[int], Any]]:
    """Returns how many record batches a file has, and a function that reads one. Raises DatasetError and UsageError."""
    import pyarrow

    try:
        source = (
            pyarrow.memory_map(path) if isinstance(store, LocalFiles) else pyarrow.PythonFile(store.open(path), "r")
        )
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            return reader.num_record_batches, partial(_read_batch, reader.get_batch, path)
        if not isinstance(store, LocalFiles):
            what = f"{path} is an Arrow stream, whose rows can only be read from the first one on"
            raise UsageError(what, "copy it to this machine, or write it with pyarrow.ipc.new_file")
        batches = list(pyarrow.ipc.open_stream(source))  # views of the mapped file
        return len(batches), batches.__getitem__
    except FileNotFoundError:
        raise DatasetError(f"{path} does not exist", _MISSING) from None
    except (OSError, pyarrow.ArrowException) as error:
        raise DatasetError(f"{path} is not an Arrow file ({first_line(error)})", "write or copy it again") from error


def _read_batch(read: Callable[[int], Any], path: str, number: int) -> Any:
    """Returns a record batch of a file. Raises DatasetError if it is damaged."""
    import pyarrow

    try:
        return read(number)
    except (OSError, pyarrow.ArrowException) as error:
        what = f"record batch {number} of {path} cannot be read ({first_line(error)})"
        raise DatasetError(what, "write or copy the file again") from error


def _batch_begins(store: Store, path: str, _: int) -> list[int]:
    """Returns how many rows come before each record batch of a file and, last, how many there are."""
    count, read = _reader(store, path)
    begins = [0]
    for number in range(count):
        begins.append(begins[-1] + read(number).num_rows)
    return begins


class LanceRows(TableRows):
    """All rows of a Lance dataset, in its order: each a dict from a column to its value, as in `ParquetRows`.

    `url` is a path or URL that lance knows, which gets `storage_options`. `columns`: which to read (default: all). The
    rows are those of the version that is the newest when the dataset is opened. The rows of a micro-batch are read with
    one call. Once 32 rows of one or two blocks of neighbouring rows are asked for in a run, as with
    ``order=rows.order``, these blocks are read, of which as many stay in memory as `cache` bytes hold. A block has
    about 16 MB, and 64 to 4096 rows. May be pickled and forked.

    Raises UsageError without lance, DatasetError where there is no such dataset, column or row.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        storage_options: Mapping[str, str] | None = None,
        cache: int = CACHE,
    ) -> None:
        cure = "pass a dataset that lance.write_dataset wrote"
        self._url, self._columns = location_of(url, cure), None if columns is None else list(columns)
        self._options = None if storage_options is None else dict(storage_options)
        self._version: int | None = None
        self._opened: tuple[int, Any] = (0, None)  # (process id, dataset): lance's threads do not survive a fork
        dataset = self._dataset()
        self._version, count = int(dataset.version), int(dataset.count_rows())
        refuse_missing(self._columns, dataset.schema.names, self._url)
        if not count:
            raise DatasetError(f"{self._url} has no rows", cure)
        least, most = _BLOCK_ROWS
        size = max(1, dataset.take([0]).nbytes)  # of all columns, so that the order depends on the dataset alone
        self._block = max(least, min(most, _BLOCK // size))
        blocks = range(0, count, self._block)
        self._rows = RowGroups([min(self._block, count - start) for start in blocks], cache, "LanceRows")
        self._run: tuple[set[int], int] = (set(), 0)  # one or two blocks, and the rows of them asked for in a run

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": (0, None)}

    def _parts(self, rows: Any) -> Iterator[tuple[Columns, Any, Any]]:
        """Yields (columns, numbers there, numbers in `rows`): of blocks, or of all rows together."""
        blocks = list(self._rows.divided(rows))
        if self._reads_blocks({block for block, _, _ in blocks}, len(rows)):
            for block, at, to in blocks:
                yield self._rows.take(block, self._read), at, to
        elif len(rows):
            numbers = np.arange(len(rows))
            yield columns_of(self._table(rows.tolist())), numbers, numbers

    def _located(self, row: int) -> tuple[Columns, int]:
        block, at = self._rows.locate(row)
        if self._reads_blocks({block}, 1):
            return self._rows.take(block, self._read), at
        return columns_of(self._table([block * self._block + at])), 0

    def _reads_blocks(self, blocks: set[int], rows: int) -> bool:
        """Whether these blocks are read for so many of their rows, because of the calls before or because memory has
        them.
        """
        before, count = self._run
        self._run = (blocks, rows + (count if blocks & before else 0)) if len(blocks) <= 2 else (set(), 0)
        return self._run[1] >= _DENSE or all(map(self._rows.keeps, blocks))

    def _read(self, number: int) -> tuple[int, Columns]:
        start = number * self._block
        table = self._table(list(range(start, min(start + self._block, len(self)))))
        return table.nbytes, columns_of(table, by_rows=True)

    def _table(self, rows: list[int]) -> Any:
        return self._dataset().take(rows, columns=self._columns).combine_chunks()

    def _dataset(self) -> Any:
        if self._opened[0] != os.getpid():
            try:
                import lance
            except ModuleNotFoundError as error:
                raise UsageError("Lance datasets need lance", "pip install 'paceline[lance]'") from error
            try:
                dataset = lance.dataset(self._url, version=self._version, storage_options=self._options)
            except (OSError, ValueError) as error:
                what = f"{self._url} cannot be read ({first_line(error)})"
                raise DatasetError(what, "check its path and permissions") from error
            self._opened = os.getpid(), dataset
        return self._opened[1]
