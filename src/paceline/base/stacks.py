"""Collects the stacks of a process and tells whether it is computing."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.base.heartbeat import is_pulse
from paceline.base.journal import replace_file
from paceline.base.tracebacks import FRAME, is_ours, is_users, named

FOLDER = "stacks"  # in the run folder
WIDEST = 200  # characters of a line that are shown
_FORKED = f"multiprocessing{os.sep}process.py"  # what is above it in a child's stack is its parent's


@dataclass(frozen=True)
class CodeLine:
    """A line of the user's: ``train.py:12 in loss``, and what stands there."""

    line: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.line}: {self.source}" if self.source else self.line


@dataclass(frozen=True)
class Hung:
    """What a worker that has made no progress for so many `seconds` is doing.

    `busy` says whether it computes, `code_line` where it stands. `loader` is set where this describes a loader process
    of the worker instead.
    """

    seconds: float
    busy: bool
    code_line: CodeLine | None
    loader: int | None = None

    @property
    def where(self) -> str:
        """The place in the user's code, for use in a sentence."""
        return self.code_line.line if self.code_line is not None else "an unknown line"

    @property
    def why(self) -> str:
        """The cause, as the failure block and the journal name it."""
        return f"hung at {self.where} for {self.seconds:.0f} s"

    @property
    def state(self) -> str:
        """Whether it computes or waits, and in which process."""
        who = "" if self.loader is None else f" in its loader process {self.loader}"
        return f"{'busy' if self.busy else 'waiting'}{who}"

    @property
    def doing(self) -> str:
        """The state, and the text of the line at which it stands."""
        return f"{self.state}: {self.code_line.source}" if self.code_line is not None else self.state


def read_place(text: str, child: bool = False) -> CodeLine | None:
    """Returns the line at which the main thread stands, from all stacks of a process.

    That is the user's innermost line, or else the innermost line. Returns None if the process has no stack, or is a
    `child` that runs no code of the user's.
    """
    frames = _frames(text)
    if child:
        fork = next((at for at, frame in enumerate(frames) if frame["path"].endswith(_FORKED)), 0)
        frames = [frame for frame in frames[:fork] if is_users(frame["path"])]
    if not frames:
        return None
    innermost = next((frame for frame in frames if is_users(frame["path"])), frames[0])
    path, number = innermost["path"], int(innermost["line"])
    return CodeLine(f"{named(path)}:{number} in {innermost['name']}", linecache.getline(path, number).strip()[:WIDEST])


def read_within(text: str) -> str:
    """In which function of Paceline's the main thread is, where the user's innermost line called it, or there is none;
    else empty: it is in the user's code, or in what that calls itself.
    """
    frames = _frames(text)
    users = next((at for at, frame in enumerate(frames) if is_users(frame["path"])), len(frames))
    if users == 0 or not is_ours(frames[users - 1]["path"]):
        return ""
    innermost = next(frame for frame in frames if is_ours(frame["path"]))
    return f"{innermost['name']} ({os.path.basename(innermost['path'])})"


def _frames(text: str) -> list[re.Match[str]]:
    """Returns the frames of the main thread, innermost first, from all stacks of a process."""
    threads = [part for part in text.split("\n\n") if "\n  File " in part]
    return [frame for line in threads[-1].splitlines() if (frame := FRAME.match(line))] if threads else []


def catches(pid: int, number: int, writes: int) -> bool:
    """Whether a process has said that it writes its stacks upon this signal: the kernel knows of a handler, and the
    file that it writes to is still the one that it shares with its agent.
    """
    return bool(_mask(_status(pid), "SigCgt") >> (number - 1) & 1) and is_pulse(writes, pid)


def is_traced(pid: int) -> bool:
    """Whether a debugger holds a process."""
    return _status(pid).get("TracerPid", "0") != "0"


def held_up(pid: int, number: int) -> int:
    """In how many places of a process a signal waits or is held back, as it is while its handler runs."""
    with suppress(OSError):
        tasks = [_status(f"{pid}/task/{task}") for task in os.listdir(f"/proc/{pid}/task")]
        return sum(_mask(task, name) >> (number - 1) & 1 for task in tasks for name in ("SigPnd", "ShdPnd", "SigBlk"))
    return 0


def computed(pids: Iterable[int]) -> dict[int, float]:
    """Seconds that each process has computed so far, or stood in line for a core, with all its threads."""
    seconds = {}
    for pid in pids:
        with suppress(OSError):
            seconds[pid] = sum(_computed(task) for task in Path(f"/proc/{pid}/task").iterdir())
    return seconds


def _computed(task: Path) -> float:
    with suppress(OSError):  # not every kernel counts the time in line
        return sum(map(int, (task / "schedstat").read_text().split()[:2])) / 1e9
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status(process: int | str) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _mask(status: dict[str, str], name: str) -> int:
    return int(status.get(name, "0"), 16)


def keep(folder: Path, name: str, stacks: str, flight: str) -> None:
    """Writes where a worker's process stood, and its last collectives; where there is nothing of one kind, an earlier
    file stays. A full disk ends nothing.
    """
    with suppress(OSError):
        (folder / FOLDER).mkdir(mode=0o700, exist_ok=True)
        for ending, text in (("txt", stacks), ("jsonl", flight)):
            if text:
                replace_file(folder / FOLDER / f"{name}.{ending}", text)
