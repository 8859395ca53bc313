"""Extracts the exception and the user's line from a traceback."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from paceline.base.console import in_one_line

TRACEBACK = "Traceback (most recent call last):"
_CRASH = "Fatal Python error: "
_INSIDE = "Original "  # torch: the trace of another process in the text of an exception
_CHAIN = ("the direct cause of the following exception:", "another exception occurred:")
FRAME = re.compile(r'^\s*File "(?P<path>.+?)", line (?P<line>\d+)(?:,? in (?P<name>.+))?$')
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_RANK = re.compile(r"^\[rank[0-9]+\]: ?")  # what torch writes before each line once a process group is initialised
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def read_trace(errors: Sequence[str], crash: bool = False) -> tuple[str, str | None]:
    """(exception, the user's innermost frame) of the last traceback in lines of standard error.

    With `crash` it is the stack that faulthandler left. ("", None) where there is none.
    """
    lines = [_RANK.sub("", _ANSI.sub("", line)) for line in errors]
    if crash:
        starts = [at for at, line in enumerate(lines) if line.startswith("Current thread")]
    else:  # a script that cannot be compiled has no stack, only a place
        starts = [at for at, line in enumerate(lines) if line.endswith(TRACEBACK)]
        starts = starts or [at - 1 for at, line in enumerate(lines) if FRAME.match(line)]
    frames: list[tuple[str, str]] = []
    exception = ""
    for at in range(starts[-1] + 1 if starts else len(lines), len(lines)):
        frame = FRAME.match(lines[at])
        if frame:
            path, number = frame["path"], int(frame["line"])
            source = linecache.getline(path, number) if crash else "".join(lines[at + 1 : at + 2])
            source = "" if FRAME.match(source) else source.strip()
            where = f"{named(path)}:{number}" + (f" in {frame['name']}" if frame["name"] else "")
            frames.append((path, f"{where}: {source}" if source else where))
        elif frames and not lines[at].startswith(" "):
            exception = "" if crash else lines[at].removeprefix("paceline.errors.")
            break
    if not crash:
        frames.reverse()  # faulthandler begins with the innermost
    if not frames or not (crash or exception):
        return "", None
    return exception, next((where for path, where in frames if is_users(path)), frames[0][1])


def is_users(path: str) -> bool:
    """Whether a source file is the user's: neither installed, nor of Python's library, nor of Paceline."""
    installed = "/site-packages/" in path or "/dist-packages/" in path
    return not installed and not path.startswith(("<", _LIBRARY, _PACKAGE))


def is_ours(path: str) -> bool:
    """Whether a source file is one of Paceline's."""
    return path.startswith(_PACKAGE)


def short(path: str | Path) -> str:
    """`path` from the current folder where it lies in it."""
    return str(path).removeprefix(os.getcwd() + os.sep)


def named(path: str | Path) -> str:
    """The same for people, in one line whatever the path has in it."""
    return in_one_line(short(path))


def before_the_trace(lines: Sequence[str]) -> list[str]:
    """The lines before the last traceback, or chain of them, or a crash's stack; all, where there is none."""
    before = [line for line in lines if line.strip()]
    while ends := [at for at, line in enumerate(before) if line.endswith(TRACEBACK) or line.startswith(_CRASH)]:
        first, before = before[ends[-1]], before[: ends[-1]]
        if not first.startswith(_INSIDE) and not (before and before[-1].endswith(_CHAIN)):
            break
    return before
