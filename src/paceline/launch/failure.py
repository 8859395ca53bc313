"""The text about a failed run: which worker is the cause, what it reported, and what to do."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.base.journal import HUNG, KILLED_FOR_MEMORY, Event
from paceline.base.stacks import Hung
from paceline.base.text import called, ranks
from paceline.base.tracebacks import read_trace
from paceline.launch.output import Output

WEIGHTS = {
    "CollectiveMismatchError": 1,
    "PeerLostError": 2,
    "ReaderError": 2,
}  # higher is less likely the cause; all others have 0
USAGE = ("PlanError", "UsageError")

WHO = "find out who sent the signal"
STACK = "read the stack in the worker's log; check compiled extensions and their versions first"
SIGNALS: dict[int, tuple[str, str]] = {
    signal.SIGKILL: ("killed by SIGKILL: a user or a job manager killed it", WHO),
    signal.SIGTERM: ("ended by SIGTERM: a user or a job manager asked it to end", WHO),
    signal.SIGINT: ("ended by SIGINT: a user interrupted it", WHO),
    signal.SIGSEGV: ("crashed with SIGSEGV: compiled code accessed invalid memory", STACK),
    signal.SIGABRT: ("aborted with SIGABRT: compiled code called abort()", "read its last lines in the worker's log"),
    signal.SIGBUS: (
        "crashed with SIGBUS: shared memory or a memory-mapped file is too short; is /dev/shm full?",
        "check `df -h /dev/shm`; enlarge it, or use fewer loader workers",
    ),
    signal.SIGFPE: ("crashed with SIGFPE: compiled code divided by zero", STACK),
    signal.SIGILL: ("crashed with SIGILL: compiled code uses instructions that this processor does not support", STACK),
}
OUT_OF_MEMORY = (
    "killed by the kernel's out-of-memory killer (SIGKILL)",
    "reduce the memory that is used: fewer workers on this host, fewer loader workers, or a smaller micro= in the "
    "plan, which changes the mathematics",
)
ASKED = ("EOFError: EOF when reading a line", "bdb.BdbQuit")  # input(), breakpoint()
NO_RANK = "using env:// rendezvous: environment variable"  # torch's error when RANK or MASTER_ADDR is not set
USES_TORCH = (
    "`paceline run` sets RANK and MASTER_ADDR only with --raw: add --raw before the script, or create a "
    "paceline.Trainer, which needs no process group of torch.distributed"
)
TOO_MANY = "close unused files, or raise the limit on open files first, for example with `ulimit -n 4096`"
NO_TERMINAL = "workers have no terminal for input: pass an argument instead, or give this worker one with --debug {}"


class Failure:
    """How one worker failed: what happened, the cure, and the user's frame.

    `when`: monotonic seconds. `status`: as in subprocess, where a signal is negative. `event`: its event "failed", or
    an empty dict. `output`: the output of all workers. `out_of_memory`: whether the kernel's out-of-memory killer has
    killed a process in the worker's cgroup. `why`: the reason, if the worker itself did not report one.
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
        self.kind: str = event.get("kind", "")  # the class of its exception, HUNG or KILLED_FOR_MEMORY, if known
        self.out_of_memory = False
        self.code = 128 - status if status < 0 else 2 if self.kind in USAGE else status  # the run's exit code
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            self.what, self.cure = SIGNALS.get(-status, (f"ended by {name}", WHO))
            self.frame = read_trace(errors, crash=True)[1] if status != -signal.SIGKILL else None
            self.out_of_memory = status == -signal.SIGKILL and out_of_memory
            if self.out_of_memory:
                self.kind = KILLED_FOR_MEMORY
                self.what, self.cure = OUT_OF_MEMORY
            return
        what, self.frame = event.get("what", ""), event.get("at")
        exits = self.kind == "SystemExit"  # SystemExit has no traceback, but scripts exit with 1 after printing one
        if not why and not what and (status == 1 or (event and not exits)):
            what, at = read_trace(errors)
            self.frame = at or self.frame
        if not event and (reported := what.partition(":")[0]) in (*WEIGHTS, *USAGE):  # it has no team, as with --raw
            self.kind = reported
            self.code = 2 if reported in USAGE else self.code
        self.what = why or what or (not exits and self.kind) or f"ended with exit code {status}"
        cure = event.get("hint") or (TOO_MANY if os.strerror(errno.EMFILE) in what else "")
        cure = cure or ("fix the cause" if what else "see the log of the worker")
        self.cure = NO_TERMINAL.format(rank) if what.startswith(ASKED) else USES_TORCH if NO_RANK in what else cure
        if out_of_memory:  # the killed process was a child of the worker, which then raised an exception
            self.cure += " (the kernel's out-of-memory killer killed a process of this worker)"

    @property
    def weight(self) -> int:
        """How unlikely it is that this failure caused the others."""
        return WEIGHTS.get(self.kind, 0)

    def hangs(self, hung: Hung) -> None:
        """Describes a worker that was ended because it made no progress."""
        self.what = f"{hung.why}, {hung.doing}"
        self.cure = f"find out why it {'does not finish' if hung.busy else 'waits'}; all its stacks are in its log"
        self.frame, self.code, self.kind = None, 1, HUNG


def culprit(failures: Sequence[Failure]) -> Failure:
    """The cause of the failure: the first worker that failed by itself; of several equal failures, the lowest rank."""
    first = min(failures, key=lambda failure: (failure.weight, failure.when))
    peers = [other for other in failures if other.weight == first.weight]
    if first.kind != "CollectiveMismatchError":  # each of these errors names its own call site
        peers = [other for other in peers if other.what == first.what]
    return min(peers, key=lambda failure: failure.rank)


def failure_block(
    cause: Failure, failures: Sequence[Failure], stopped: Collection[int], host: str, logs: Path | None, then: str
) -> str:
    """The text that is printed for a failed run. `failures`: all failures, including the cause; `stopped`: workers that
    the agent stopped; `logs`: the folder of the logs, or None if it is removed; `then`: how to continue the run.
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
            lines.append(f"{ranks([other.rank])} also failed: {other.what}{location}")
    followed = [other.rank for other in others if other.weight > cause.weight]
    if followed:
        lines.append(f"{ranks(followed)} ended because of this failure")
    if stopped:
        lines.append(f"Paceline stopped the others: {ranks(stopped)}")
    if logs is not None:
        lines.append(f"logs: {logs}{os.sep}")
    return "\n".join([*lines, f"next: {cause.cure}; {then}"])
