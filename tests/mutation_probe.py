"""Notes which test reaches the place of a mistake: `mutation_check.py` puts this module into the package of a copy.

It appends two lines of settings: the folder in which each process that runs tests notes the present one, by its number,
and the log.
"""

from __future__ import annotations

import os
from functools import cache

NOTES = LOG = ""


def reached(name: str) -> None:
    """Notes a mistake and the test that runs, once for each test and process."""
    pid = os.getpid()
    test = _noted(pid) or _started_by(pid, os.getppid(), os.environ.get("PYTEST_CURRENT_TEST", ""))
    _log(pid, name, test)


@cache
def _log(pid: int, name: str, test: str) -> None:
    log = os.open(LOG, os.O_WRONLY | os.O_APPEND)
    os.write(log, f"{name}\t{test}\n".encode())
    os.close(log)


def _noted(pid: int) -> str:
    try:
        with open(f"{NOTES}/{pid}") as note:
            return note.read()
    except OSError:
        return ""


@cache
def _started_by(pid: int, parent: int, otherwise: str) -> str:
    """The test whose process is above this one: what is forked from a warm process has the environment of another."""
    while parent > 1:
        if test := _noted(parent):
            return test
        try:
            with open(f"/proc/{parent}/stat") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            break
    return otherwise.rpartition(" ")[0]
