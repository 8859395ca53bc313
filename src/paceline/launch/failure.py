"""The text about a failed run: which worker is the cause, what it reported, and what to do."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.base.journal import Event
from paceline.base.stacks import Hung
from paceline.base.text import called, ranks
from paceline.base.tracebacks import read_trace
from paceline.launch.output import Output

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
    "give it less to hold: fewer workers on this host, fewer loader workers, or a smaller micro= in the plan, which "
    "changes the mathematics",
)
ASKED = ("EOFError: EOF when reading a line", "bdb.BdbQuit")  # input(), breakpoint()
NO_RANK = "using env:// rendezvous: environment variable"  # torch says where nobody has set RANK, or MASTER_ADDR
USES_TORCH = (
    "workers of `paceline run` have no RANK and no MASTER_ADDR: make a paceline.Trainer, which needs no group of "
    "torch.distributed, or start the script with torchrun"
)
TOO_MANY = "close files that are not used any more, or raise the limit on open files before, as by `ulimit -n 4096`"
NO_TERMINAL = "workers have no terminal to ask at: give an argument instead, or this worker the terminal: --debug {}"


class Failure:
    """How one worker failed: what happened, the cure, and the user's frame.

    `when`: monotonic seconds. `status`: as in subprocess, where a signal is negative. `event`: its event "failed", or
    empty. `output`: what workers wrote. `out_of_memory`: the kernel's killer struck in its cgroup. `why`: the reason,
    if others than the worker know it.
    """

    def __init__(
        self,
        rank: int,
        pid: int,
        when: float,
        status: int,
        event: Event,
        output: Output,
        out_of_memory: bool,
        why: str = "",
    ) -> None:
        self.rank, self.pid, self.when, self.step = rank, pid, when, event.get("step")
        self.tail, errors = output.tail(rank), output.errors(rank)
        self.kind: str = event.get("kind", "")  # its exception's class, where it said so
        self.weight = WEIGHTS.get(self.kind, 0)
        self.out_of_memory = False
        self.code = 128 - status if status < 0 else 2 if self.kind in USAGE else status  # the run's exit code
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            self.what, self.cure = SIGNALS.get(-status, (f"ended by {name}", WHO))
            self.frame = read_trace(errors, crash=True)[1] if status != -signal.SIGKILL else None
            self.out_of_memory = status == -signal.SIGKILL and out_of_memory
            if self.out_of_memory:
                self.what, self.cure = OUT_OF_MEMORY
            return
        what, self.frame = event.get("what", ""), event.get("at")
        exits = self.kind == "SystemExit"  # which leaves no traceback; with 1 people leave after they printed one
        if not why and not what and (status == 1 or (event and not exits)):
            what, at = read_trace(errors)
            self.frame = at or self.frame
        self.what = why or what or (not exits and self.kind) or f"ended with exit code {status}"
        cure = event.get("hint") or (TOO_MANY if os.strerror(errno.EMFILE) in what else "")
        cure = cure or ("fix the cause" if what else "see its log")
        self.cure = NO_TERMINAL.format(rank) if what.startswith(ASKED) else USES_TORCH if NO_RANK in what else cure
        if out_of_memory:  # it was a child of the worker, which raised for that
            self.cure += " (the kernel's out-of-memory killer ended a process here)"

    def hangs(self, hung: Hung) -> None:
        """Describes a worker that was ended because it made no progress."""
        self.what = f"{hung.why}, {hung.doing}"
        self.cure = f"see {'why it does not end' if hung.busy else 'what it waits for'}; all its stacks are in its log"
        self.frame, self.code = None, 1


def culprit(failures: Sequence[Failure]) -> Failure:
    """The cause: the first that failed by itself; of several that failed alike, the lowest rank."""
    first = min(failures, key=lambda failure: (failure.weight, failure.when))
    peers = [other for other in failures if other.weight == first.weight]
    if first.kind != "CollectiveMismatchError":  # each of those names its own call site
        peers = [other for other in peers if other.what == first.what]
    return min(peers, key=lambda failure: failure.rank)


def failure_block(
    cause: Failure, failures: Sequence[Failure], stopped: Collection[int], host: str, logs: Path | None, then: str
) -> str:
    """The block. `failures`: all, with the cause; `stopped`: workers that we ended; `logs`: their folder, unless it is
    removed; `then`: how to go on.
    """
    step = f", after step {cause.step}" if cause.step is not None else ""
    lines = [f"{ranks([cause.rank])} failed (host {host}, pid {cause.pid}{step})", f"  {cause.what}"]
    if cause.frame:
        lines.append(f"  at {cause.frame}")
    if cause.tail:
        lines.append(f"the end of {(logs or Path()) / f'{called(cause.rank)}.log'}:")
        lines += [f"  | {line}".rstrip() for line in cause.tail]
    alike = [other.rank for other in failures if other.what == cause.what and other is not cause]
    if alike:
        lines.append(f"{ranks(alike)} failed in the same way")
    others = [other for other in failures if other.what != cause.what]
    for other in sorted(others, key=lambda failure: failure.when):
        if other.weight <= cause.weight:
            location = f" at {other.frame}" if other.frame else ""
            lines.append(f"{ranks([other.rank])} failed too: {other.what}{location}")
    followed = [other.rank for other in others if other.weight > cause.weight]
    if followed:
        lines.append(f"{ranks(followed)} ended because of it")
    if stopped:
        lines.append(f"the others were stopped by us: {ranks(stopped)}")
    if logs is not None:
        lines.append(f"logs: {logs}{os.sep}")
    return "\n".join([*lines, f"next: {cause.cure}; {then}"])
