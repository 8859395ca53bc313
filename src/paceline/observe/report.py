"""Builds the report of a run for the terminal and as a page."""

from __future__ import annotations

import os
from pathlib import Path

from rich.table import Table
from rich.text import Text

from paceline.base.console import Coloured, in_one_line
from paceline.base.terminal import TextPage
from paceline.base.text import first_parts
from paceline.observe.page import render
from paceline.observe.summary import Summary, brief, facts

NAME = "report.html"


def write_report(folder: Path, width: int = 80, colour: bool = False, short: bool = False) -> str:
    """Writes RUN/report.html atomically; returns the results as a table of at most `width` columns.

    `colour` adds terminal colours. `short` keeps only the few rows that show how a good run went; a run writes this
    report itself at its end. Raises UsageError if `folder` is not a run folder.
    """
    summary = Summary(folder)
    summary.live = not short and _is_locked(folder)
    half = folder / f".{NAME}.{os.getpid()}"
    try:
        with open(
            os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
            "w",
            encoding="utf-8",
            errors="backslashreplace",
        ) as file:
            file.write(render(summary))
        half.replace(folder / NAME)
    finally:
        half.unlink(missing_ok=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    tables = facts(summary)
    losses = [row for row in tables["What happened"] if row[0] in ("lost", "recovered")]
    rows, page = brief(summary) if short else [*tables["Results"], *tables["Costs"]], in_one_line(folder / NAME)
    room = width - 2 - max((len(in_one_line(name)) for name, _ in [*rows, *losses, ("report", "")]), default=0)
    for name, text in rows:
        shown_text = first_parts(in_one_line(text), room) if short else in_one_line(text)
        table.add_row(in_one_line(name), Text(shown_text, no_wrap=short, overflow="ellipsis" if short else "fold"))
    for name, text in [*losses, ("report", NAME if short else page)]:
        table.add_row(name, Text(in_one_line(text)))
    shown = TextPage(width, colour)
    style = "bold green" if summary.finished else "bold" if summary.running else "bold red"
    title = f"{summary.name or 'the run'} {in_one_line(summary.ending)}"
    shown.print(Text(title, style=style))
    shown.print(table)
    return Coloured(shown.text.removesuffix(NAME) + page) if short else shown.text  # in one line, however long


def _is_locked(folder: Path) -> bool:
    """Whether another process of this host holds the lock of a run folder, which a run does until it ends.

    The lock is not touched: taking it, if only for a moment, could keep a run from starting. False if this is unknown.
    """
    try:
        about, locks = os.stat(folder / "lock"), Path("/proc/locks").read_text()
    except OSError:
        return False
    name = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    lines = [words for words in map(str.split, locks.splitlines()) if "FLOCK" in words and name in words]
    return bool(lines) and not any(str(os.getpid()) in words for words in lines)
