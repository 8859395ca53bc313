"""Logs to CSV files."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import UsageError
from paceline.observe.trackers.tracker import LoggedRun, Tracker

FOLDER = "csv"  # in the run folder


class CSVTables(Tracker):
    """Writes ``metrics.csv``, with a row for each step and a column for each value, and ``config.csv``.

    `target` is the folder, by default ``csv`` in the run folder. If that folder has tables of another run, the new
    ones get a number: ``metrics-2.csv``. A resumed run replaces the rows after its checkpoint.
    """

    appends = uploads = False
    _table: Path | None = None
    _file: TextIO | None = None

    def begin(self, run: LoggedRun) -> str | None:
        """Opens the table, and reads which columns it has. Its path identifies it."""
        folder = (Path(self.target) if self.target else run.folder / FOLDER).absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._table is None:
            known = run.id is not None and Path(run.id).parent == folder
            self._table = Path(str(run.id)) if known else self._new_table(folder)
        self._columns, self._row, self._start = ["step"], dict[str, Any](), 0
        self._config_path = _config_of(self._table)
        with self._config_path.open("a+", newline="") as file:
            file.seek(0)
            self._config = {row[0]: row[1] for row in csv.reader(file) if len(row) == 2}
        os.chmod(self._config_path, 0o600)
        self._rewrite()
        return str(self._table)

    def config(self, values: Mapping[str, Any]) -> None:
        """Writes names and values, one in a row."""
        self._config |= {name: str(value) for name, value in values.items()}
        with self._config_path.open("w", newline="") as file:
            csv.writer(file).writerows(self._config.items())

    def rewind(self, step: int) -> None:
        """Removes the rows of this step and later ones."""
        self.flush()
        self._rewrite(before=step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds values to the row of a step."""
        if self._row.get("step") != step:
            self.flush()
            assert self._file is not None
            self._start = self._file.tell()
            self._row = {"step": step}
        self._row |= values

    def media(self, step: int, name: str, event: Mapping[str, Any]) -> None:
        """Adds the path of a picture, or mean and deviation of a histogram."""
        if event["kind"] == "histogram":
            self.write(step, {f"{name} mean": event["mean"], f"{name} deviation": event["deviation"]})
        else:
            self.write(step, {name: event["file"]})

    def artifact(self, step: int, name: str, path: str, value: float) -> None:
        """Adds the best value and the path of its checkpoint."""
        self.write(step, {f"best/{name}": value, f"best/{name} checkpoint": path})

    def flush(self) -> None:
        """Writes the last row again, which may have more values now."""
        row = self._row
        if not row:
            return
        assert self._file is not None
        self._file.seek(self._start)
        self._file.truncate()
        if more := [name for name in row if name not in self._columns]:
            self._rewrite(more)
            self._start, self._row = self._file.tell(), row
        csv.DictWriter(self._file, self._columns).writerow(row)
        self._file.flush()

    def close(self) -> None:
        """Closes the table."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _new_table(self, folder: Path) -> Path:
        """The path of a new run's table. In a folder that the user has chosen, the logger overwrites no file."""
        number, table = 1, folder / "metrics.csv"
        while self.target and not _create(table):
            number, table = number + 1, folder / f"metrics-{number + 1}.csv"
            self.notice = f"the logger csv writes to {table}, because the folder has tables of another run"
        return table

    def _rewrite(self, more: Sequence[str] = (), before: int | None = None) -> None:
        """Writes the table again, with `more` columns and the rows `before` a step, and opens it at its end. Half a
        line that a crash left is dropped.
        """
        self.close()
        path = self._table
        assert path is not None
        path.touch(0o600)
        half = path.with_name(f".{path.name}")
        new = open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", newline="")  # noqa: SIM115
        with path.open(newline="") as old, new:
            reader = csv.DictReader(old)
            if reader.fieldnames and "step" not in reader.fieldnames:
                raise UsageError(f"{path} has no column 'step'", "move it away, and resume the run")
            self._columns, self._row = [*(reader.fieldnames or ["step"]), *more], {}
            writer = csv.DictWriter(new, self._columns)
            writer.writeheader()
            for row in reader:
                if None not in row and None not in row.values() and not _is_from(before, row["step"]):
                    writer.writerow(row)
        half.replace(path)
        self._file = path.open("r+", newline="")
        self._file.seek(0, os.SEEK_END)


def _config_of(table: Path) -> Path:
    return table.with_name(table.name.replace("metrics", "config"))


def _create(table: Path) -> bool:
    """Creates the file of a table, and returns whether there was none, nor one of its config."""
    with suppress(FileExistsError):
        if not _config_of(table).exists():
            table.touch(0o600, exist_ok=False)
            return True
    return False


def _is_from(first: int | None, step: str) -> bool:
    """Whether a row has this step or a later one. Rows that the user has added without a number are kept."""
    return first is not None and step.isdecimal() and int(step) >= first
