"""Why a run ended, in one block: which worker, at which line of the user's, and what to do. No torch."""

from __future__ import annotations

import linecache
import os
import re
import signal
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.launch.output import TRACEBACK, ranks

WEIGHTS = {"CollectiveMismatchError": 1, "PeerLostError": 2}  # the higher, the less a cause; others have 0
USAGE = ("PlanError", "UsageError")

WHO = "find out who sent the signal"
STACK = "read the stack in its log; suspect compiled extensions and their versions first"
SIGNALS: dict[int, tuple[str, str]] = {
    signal.SIGKILL: ("killed by SIGKILL: somebody, or a job manager, ended it", WHO),
    signal.SIGTERM: ("ended by SIGTERM: somebody, or a job manager, asked it to end", WHO),
    signal.SIGINT: ("ended by SIGINT: somebody interrupted it", WHO),
    signal.SIGSEGV: ("crashed with SIGSEGV: compiled code touched memory that is not its own", STACK),
    signal.SIGABRT: ("aborted with SIGABRT: compiled code gave up", "read what it says in its log"),
    signal.SIGBUS: (
        "crashed with SIGBUS: shared memory or a mapped file ended early; is /dev/shm full?",
        "see `df -h /dev/shm`; give it more space, or take fewer loader workers",
    ),
    signal.SIGFPE: ("crashed with SIGFPE: compiled code divided by zero", STACK),
    signal.SIGILL: ("crashed with SIGILL: compiled code is for another processor", STACK),
}
OUT_OF_MEMORY = (
    "killed by the kernel's out-of-memory killer (SIGKILL)",
    "give it less to hold: a smaller micro= in the plan, fewer workers on this host, fewer loader workers",
)

_FRAME = re.compile(r'^\s*File "(?P<path>.+?)", line (?P<line>\d+)(?:,? in (?P<name>.+))?$')
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARY = sysconfig.get_path("stdlib") + os.sep


@dataclass(frozen=True)
class Failure:
    """How one worker failed. `kind`: its exception's class where it said so; `when`: monotonic seconds."""

    rank: int
    pid: int
    what: str
    cure: str
    frame: str | None
    kind: str
    status: int
    when: float
    step: int | None
    tail: list[str]

    @property
    def weight(self) -> int:
        return WEIGHTS.get(self.kind, 0)

    @property
    def code(self) -> int:
        """The exit code of the run."""
        return 128 - self.status if self.status < 0 else 2 if self.kind in USAGE else self.status


def describe_failure(
    status: int, told: Mapping[str, Any], errors: Sequence[str], out_of_memory: bool
) -> tuple[str, str, str | None]:
    """(what happened, cure, the user's frame) of a worker that failed.

    `status` as in subprocess, where a signal is negative; `told` its event "failed", or empty; `errors` the
    lines of its standard error; `out_of_memory`: the kernel's killer struck in its cgroup.
    """
    if status < 0:
        what, cure = SIGNALS.get(-status, (f"ended by {_name(-status)}", WHO))
        if status == -signal.SIGKILL:
            return (*(OUT_OF_MEMORY if out_of_memory else (what, cure)), None)
        return what, cure, read_trace(errors, crash=True)[1]
    what, frame = read_trace(errors) if told or status == 1 else ("", None)
    cure = "fix the cause" if what else "see its log"
    if out_of_memory:  # it was a child of the worker, which raised for that
        cure += " (the kernel's out-of-memory killer ended a process here)"
    return what or told.get("kind") or f"ended with exit code {status}", cure, frame


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def read_trace(errors: Sequence[str], crash: bool = False) -> tuple[str, str | None]:
    """(exception, the user's innermost frame) of the last traceback in lines of standard error.

    With `crash` it is the stack that faulthandler left. ("", None) where there is none.
    """
    lines = [_ANSI.sub("", line) for line in errors]
    if crash:
        starts = [at for at, line in enumerate(lines) if line.startswith("Current thread")]
    else:  # a script that cannot be compiled has no stack, only a place
        starts = [at for at, line in enumerate(lines) if line.endswith(TRACEBACK)]
        starts = starts or [at - 1 for at, line in enumerate(lines) if _FRAME.match(line)]
    frames: list[tuple[str, str]] = []
    exception = ""
    for at in range(starts[-1] + 1 if starts else len(lines), len(lines)):
        found = _FRAME.match(lines[at])
        if found:
            path, number = found["path"], int(found["line"])
            source = linecache.getline(path, number) if crash else "".join(lines[at + 1 : at + 2])
            source = "" if _FRAME.match(source) else source.strip()
            where = f"{short(path)}:{number}" + (f" in {found['name']}" if found["name"] else "")
            frames.append((path, f"{where}: {source}" if source else where))
        elif frames and not lines[at].startswith(" "):
            exception = "" if crash else lines[at].removeprefix("paceline.errors.")
            break
    if not crash:
        frames.reverse()  # faulthandler begins with the innermost
    if not frames or not (crash or exception):
        return "", None
    return exception, next((where for path, where in frames if _is_users(path)), frames[0][1])


def _is_users(path: str) -> bool:
    installed = "/site-packages/" in path or "/dist-packages/" in path
    return not installed and not path.startswith(("<", _LIBRARY, _PACKAGE))


def short(path: str | Path) -> str:
    """`path` from the current folder where it lies in it."""
    return str(path).removeprefix(os.getcwd() + os.sep)


def culprit(failures: Sequence[Failure]) -> Failure:
    """The cause: the first that failed by itself; of several that failed alike, the lowest rank."""
    first = min(failures, key=lambda failure: (failure.weight, failure.when))
    peers = [other for other in failures if other.weight == first.weight]
    if first.kind != "CollectiveMismatchError":  # each of those names its own call site
        peers = [other for other in peers if other.what == first.what]
    return min(peers, key=lambda failure: failure.rank)


def failure_block(
    cause: Failure, failures: Sequence[Failure], stopped: Collection[int], host: str, logs: Path, then: str
) -> str:
    """The block. `failures`: all, with the cause; `stopped`: workers that we ended; `then`: how to go on."""
    step = f", after step {cause.step}" if cause.step is not None else ""
    lines = [f"worker {cause.rank} failed (host {host}, pid {cause.pid}{step})", f"  {cause.what}"]
    if cause.frame:
        lines.append(f"  at {cause.frame}")
    if cause.tail:
        lines.append(f"the end of {logs / f'worker-{cause.rank}.log'}:")
        lines += [f"  | {line}".rstrip() for line in cause.tail]
    alike = [other.rank for other in failures if other.what == cause.what and other is not cause]
    if alike:
        lines.append(f"{ranks(alike)} failed in the same way")
    others = [other for other in failures if other.what != cause.what]
    for other in sorted(others, key=lambda failure: failure.when):
        if other.weight <= cause.weight:
            place = f" at {other.frame}" if other.frame else ""
            lines.append(f"worker {other.rank} failed too: {other.what}{place}")
    followed = [other.rank for other in others if other.weight > cause.weight]
    if followed:
        lines.append(f"{ranks(followed)} ended because of it")
    if stopped:
        lines.append(f"the others were stopped by us: {ranks(stopped)}")
    return "\n".join([*lines, f"logs: {logs}{os.sep}", f"next: {cause.cure}; {then}"])
