"""Injects faults at a given worker, step and moment."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.schema import read_json
from paceline.errors import PeerLostError, UsageError

KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP, and SIGCONT two seconds later if the worker still exists",
    "raise": "raises an exception",
    "exit": "ends with exit code 0, without a message",
    "leave": "SIGTERM: asks the worker to leave",
    "slow": "sleeps for a second",
    "wait": "waits until the file RUN/chaos-go exists, so that another process can act meanwhile",
    "memory": "allocates memory until the kernel kills the worker; use it only in a memory cgroup",
    "slow-memory": "copies memory for two seconds in another process",
    "slow-disk": "writes to the disk of the run folder for two seconds in another process, and flushes each time",
    "clock": "sets the worker's clock an hour ahead, and back two seconds later",
    "loss": "delays one in three operations between workers by 0.2 s for two seconds, as TCP does if packets are lost",
    "partition": "cuts the worker off from the others, to whom it is still connected",
    "flip-weight": "flips a bit of a weight",
    "flip-activation": "flips a bit of the next output of a layer",
    "flip-gradient": "flips a bit of the gradient of the next output of a layer",
    "flip-bucket": "flips a bit of a gradient that is about to be summed",
    "flip-transit": "flips a bit of a gradient on its way to another worker",
    "flip-gather": "flips a bit of weights on their way to another worker, under zero=1, zero=2 and zero=3",
}
MOMENTS = (
    "loading",
    "outputs",
    "gathered",
    "forward",
    "backward",
    "summed",
    "reduced",
    "applied",
    "saving",
    "writing",
    "forming",
    "hand-over",
)
FLIP = "flip-"  # prefix of the kinds that flip a bit
APART = "apart:"  # prefix of faults that fire one after another
PAUSE = 0.05  # seconds added to a step while a fault waits for earlier ones
ASLEEP = 2.0  # seconds for which a stopped worker stays stopped, and other faults last
LASTING = ("slow-memory", "slow-disk", "clock", "loss")  # kinds that no worker is lost by; they are over by themselves
HOUR = 3600.0  # seconds by which a clock jumps
LOST, RESENT = 1 / 3, 0.2  # part of the operations that lose a packet, and seconds before TCP sends it again
# Programs that slow down the memory or, with a file, the disk of this host.
COPY = f"import time; a = bytearray(1 << 26); end = time.monotonic() + {ASLEEP}\nwhile time.monotonic() < end: b = a[:]"
WRITE = f"""
import os, sys, time
end, descriptor = time.monotonic() + {ASLEEP}, os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o600)
os.unlink(sys.argv[1])
while time.monotonic() < end:
    os.pwrite(descriptor, bytes(1 << 22), 0)
    os.fsync(descriptor)
"""
LOG, GO = "chaos.jsonl", "chaos-go"
_FORM = re.compile(r"(?P<kind>[a-z-]+):(?P<worker>[0-9]{1,9})@(?P<step>[0-9]{1,12})\.(?P<moment>[a-z-]+)")


@dataclass(frozen=True)
class Fault:
    """A fault of a worker, when it reaches a moment for the first time after `step` steps are done.

    The moments, in the order of `MOMENTS`: before the worker's rows are loaded; when it has the outputs of its rows for
    a loss over the full global batch; when it has the outputs of all workers; after its first forward; when its first
    bucket is complete; when the sums of its own gradients have arrived; when all sums have arrived and nothing has
    changed; when its weights have been updated; when a checkpoint begins; when a thread begins to write the checkpoint;
    in a new generation, before the members exchange their progress; and while a state is handed over. A flipped bit
    is written to the log when it flips, with tensor, element and bit; a repetition flips the same one.
    """

    kind: str
    worker: int
    step: int
    moment: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.worker}@{self.step}.{self.moment}"


def parse_faults(text: str) -> list[Fault]:
    """Reads a list such as ``kill:3@12.forward,stop:1@20.reduced``: kill worker 3 in the forward after step 12, ..."""
    faults = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        parsed = _FORM.fullmatch(part)
        if not parsed or parsed["kind"] not in KINDS or parsed["moment"] not in MOMENTS:
            what = f"{part!r} is not a fault"
            kinds, moments = ", ".join(KINDS), ", ".join(MOMENTS)
            raise UsageError(what, f"write KIND:WORKER@STEP.MOMENT; KIND is one of {kinds}, MOMENT is one of {moments}")
        faults.append(Fault(parsed["kind"], int(parsed["worker"]), int(parsed["step"]), parsed["moment"]))
    return faults


class FaultInjector:
    """Injects the faults of one worker. A fault is written to the run folder before it fires, and fires once per run.

    The text of the faults may begin with `APART`: then they fire one after another, each only when the team has formed
    again after the one before, and still has several members. Until all have fired, each step takes a little longer, so
    that steps are left for them.
    """

    def __init__(self, text: str, worker: int, folder: Path) -> None:
        self._folder, self._apart = folder, text.startswith(APART)
        faults = parse_faults(text.removeprefix(APART))
        self._all = [str(fault) for fault in faults]
        fired = [entry["fault"] for entry in read_log(folder)]
        self._due = [fault for fault in faults if fault.worker == worker and str(fault) not in fired]
        self._now = time.time  # which a fault may replace
        self._formed = self._now()  # when the present team was
        # Flips a bit of the model's memory, of a kind and by a chance; then it calls the function with what it flipped.
        self.flip: Callable[[str, random.Random, Callable[..., None]], None] | None = None

    def formed(self) -> None:
        """Records that the team has formed again."""
        self._formed = self._now()

    def reached(self, moment: str, step: int, members: int) -> None:
        """Fires the fault that is due at a moment, after `step` steps, in a team of `members` workers."""
        for fault in self._due:
            if step < fault.step:
                continue
            if self._apart and not self._may_fire(fault, members):
                if moment == "loading":
                    time.sleep(PAUSE)
            elif fault.moment == moment:
                self._due.remove(fault)
                self._fire(fault, step)
                return

    def _may_fire(self, fault: Fault, members: int) -> bool:
        fired = read_log(self._folder)
        before = self._all[: self._all.index(str(fault))]
        ended = self._now() - ASLEEP  # faults that are over by themselves, and began before this time, are over

        def is_over(entry: dict[str, Any]) -> bool:
            return float(entry["at"]) < (ended if entry["fault"].startswith(LASTING) else self._formed)

        return members > 1 and {entry["fault"] for entry in fired if is_over(entry)} >= {*before}

    def _log(self, fault: Fault, step: int, **more: Any) -> None:
        entry = {"at": self._now(), "fault": str(fault), "reached": step, **asdict(fault), **more}
        log = os.open(self._folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(log, json.dumps(entry).encode() + b"\n")
        os.close(log)

    def _fire(self, fault: Fault, step: int) -> None:
        if fault.kind.startswith(FLIP):
            if self.flip is not None:
                self.flip(fault.kind, random.Random(str(fault)), partial(self._log, fault, step))
            return
        if fault.kind == "loss":
            self._lose_packets(fault, step)
            return
        self._log(fault, step)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                us = os.pidfd_open(os.getpid())  # this number may be another's by then
                call = f"signal.pidfd_send_signal({us}, signal.SIGCONT)"
                wake = (
                    f"import contextlib, signal, time; time.sleep({ASLEEP})\nwith contextlib.suppress(OSError): {call}"
                )
                subprocess.Popen([sys.executable, "-c", wake], start_new_session=True, pass_fds=[us])
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise RuntimeError(f"chaos: {fault}")
            case "exit":
                os._exit(0)
            case "leave":
                os.kill(os.getpid(), signal.SIGTERM)
            case "slow":
                time.sleep(1.0)
            case "wait":
                while not (self._folder / GO).exists():
                    time.sleep(0.01)
            case "slow-memory":
                subprocess.Popen([sys.executable, "-c", COPY], start_new_session=True)
            case "slow-disk":
                file = self._folder / f"chaos-{os.getpid()}"
                subprocess.Popen([sys.executable, "-c", WRITE, str(file)], start_new_session=True)
            case "clock":
                self._jump()
            case "partition":
                from paceline.comm.transport import interrupt  # needs torch

                interrupt(PeerLostError(f"chaos: {fault}", "wait until the team has formed again"))
            case "memory":
                taken = []
                while True:
                    taken.append(bytearray(os.urandom(1 << 20) * 16))

    def _jump(self) -> None:
        """Sets the clock of this process an hour ahead, and back."""
        usual = self._now
        vars(time)["time"] = lambda: usual() + HOUR
        timer = threading.Timer(ASLEEP, lambda: vars(time).update(time=usual))
        timer.daemon = True
        timer.start()

    def _lose_packets(self, fault: Fault, step: int) -> None:
        """Delays some of the next operations between workers. The fault is written to the log with the first one."""
        from paceline.comm.transport import delay_operations  # needs torch

        chance, end, logged = random.Random(str(fault)), time.monotonic() + ASLEEP, list[str]()

        def delay(operation: str) -> bool:
            if chance.random() < LOST:
                if not logged:
                    self._log(fault, step, operation=operation)
                logged.append(operation)
                time.sleep(RESENT)
            return time.monotonic() < end or not logged

        delay_operations(delay)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The faults that have fired in a run, in order."""
    from paceline.base.file_types import Fired  # needs msgspec

    log = folder / LOG
    return [dict(read_json(line, Fired, str(log))) for line in log.read_bytes().splitlines()] if log.exists() else []
