"""The outcome of a run: its exit code and last lines."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.base.console import Coloured, command_line, in_one_line, printable
from paceline.base.journal import Event, Journal
from paceline.base.memory import advice
from paceline.base.tracebacks import named, short
from paceline.errors import UsageError
from paceline.launch.failure import Failure, culprit, failure_block
from paceline.launch.options import LaunchOptions
from paceline.launch.output import Output
from paceline.launch.workers import Worker
from paceline.observe.report import write_report
from paceline.team.coordinator import STOPPED

INTERRUPTED = 130
FUNCTION = "paceline.launch.function"  # the module that calls a function
NOT_USED = "no Trainer was made and paceline.join() was not called"
INSTEAD = "make a paceline.Trainer, or run it with plain python"
VANISHED = "ended with exit code 0 in the midst of its script, without a word"


class RunOutcome:
    """Says how the run ended. Workers that were lost on the way and were survived do not count."""

    def __init__(
        self, options: LaunchOptions, folder: Path, journal: Journal, output: Output, say: Callable[..., None]
    ) -> None:
        self._options, self._folder, self._journal, self._output, self._say = options, folder, journal, output, say
        self._coloured = sys.stderr.isatty()
        self.first = options.join is None  # this agent's workers began the run, and wrote its journal
        self._events: ChainMap[str, Any] = ChainMap()  # of all workers, the last of each kind, members first

    def failures(self, workers: Sequence[Worker], stop: int | None, failing: Mapping[int, str]) -> list[Worker]:
        """Those that failed, also where only the coordinator says so (`failing`). None where a stop came before some
        worker could hear it: it just ended.

        With one that ended the run come those that had raised the same before, and were survived.
        """
        if any(stop is not None and worker.status == -signal.SIGUSR2 for worker in workers):
            return []
        fine = (0, STOPPED, None)
        failed = [
            w
            for w in workers
            if (w.killed and "failed" in w.events) or w.status not in fine or w.vanished or w.rank in failing
        ]
        final = [w for w in failed if w.counts or (w.serves and w.rank in failing)]
        said = [exception_of(worker) for worker in final]
        return [w for w in failed if w in final or (exception_of(w) is not None and exception_of(w) in said)]

    def verdict(self, workers: Sequence[Worker], stop: int | None, at_once: bool, left: bool, orders: Event) -> int:
        """Says how the run ended; the exit code, which is 0 only where it is finished. `left`: these workers were to
        leave the others; `orders`: the coordinator's last.
        """
        mine, told = {worker.rank for worker in workers}, orders.get("failing", ())
        failing = {number: why for number, _, why in told if number in mine}
        failures = self.failures(workers, stop, failing)
        self._events = ChainMap(*(w.events for w in sorted(workers, key=lambda w: not w.counts)))
        everyone, workers = workers, [worker for worker in workers if worker.counts or worker in failures]
        asked = INTERRUPTED if stop == signal.SIGINT else STOPPED
        if at_once:
            self._say(self._how_stopped("stopped at once"), always=True)
            return asked
        if stop is not None and failures and all(worker.hung for worker in failures):
            hung = ", ".join(f"worker {worker.rank} {worker.how}" for worker in failures)
            self._say(self._how_stopped(f"stopped; {hung}, and was ended"), always=True)
            return asked
        if failures:
            return self._failed(workers, failures, failing)
        for number, agent, why in (entry for entry in told if entry[0] not in mine and stop is None):
            self._say(f"worker {number} of {agent} {why}, which ended the run: see there", always=True)
            return 1
        if left:
            self._say(f"left the run, which goes on\ncome back with: {self._command()}", always=True)
            return asked
        well = all(worker.status == 0 for worker in workers) if workers else orders.get("finished", False)
        finished = well and not told
        if not finished and (stop is not None or any(worker.status == STOPPED for worker in workers)):
            self._say(self._how_stopped("stopped"), always=True)
            return asked
        size = self._size
        if stop is None and size != 1 and strangers(everyone):
            what = f"{self._name} ended without using paceline: {NOT_USED}"
            each = f"{size} workers did the same work {size} times"
            work = each if size else "each worker did the same work by itself"
            self._say(f"{what}, so {work}; {INSTEAD}", always=True)
            return 1
        return self._finished(workers) if finished else self._unknown()

    @property
    def _size(self) -> int:
        """How many workers the run began with, as far as this agent knows; 0 where others began it."""
        return max(self._options.workers, self._options.begin) if self.first else 0

    @property
    def _name(self) -> str:
        """What the workers ran."""
        options = self._options
        return (
            "the function" if options.module == FUNCTION else in_one_line(options.module or Path(options.script).name)
        )

    def warn_of_strangers(self, workers: Sequence[Worker]) -> None:
        """For people: that workers have run for long, and none has joined a team."""
        if self._size != 1 and strangers(workers):
            what = f"note: no worker has used paceline yet: {NOT_USED}"
            self._say(f"{what}; if {self._name} never does, each worker does the same work by itself", always=True)

    def _finished(self, workers: Sequence[Worker]) -> int:
        name, events = self._name, self._events
        if not self.first or not workers:  # others ended it
            self._say("the run has ended; its report is in the folder of its first worker")
            return 0
        if "join" not in events:
            self._say(f"note: {name} ended without using paceline, which trained and saved nothing")
        elif events["join"].get("trainer") and not events.keys() & {"phase", "finished"}:
            self._say(f"note: {name} made a Trainer and never asked it for steps")
        if "phase" in events and not events.get("finished", {}).get("already") and not self._options.quiet:
            self._say(self._report())
        if "stopped" in events:
            self._say(self._how_stopped("stopped"), always=True)
        return 0

    def _report(self) -> str:
        """The report, also written into the run folder; how the run ended does not depend on whether that is there."""
        try:
            return write_report(self._folder, colour=self._coloured, short=not self._options.verbose)
        except (UsageError, OSError) as error:
            return f"{self._name} finished; its report cannot be written: {error}"

    def _how_stopped(self, how: str) -> str:
        if self._options.temporary:
            return f"{how}\nstart again with: {self._command()}"
        told = self._events.get("stopped", {})
        newest = self._newest_checkpoint()
        again = "continue with"
        if told.get("checkpoint") and (self.first or (self._folder / told["checkpoint"]).exists()):
            saved = f" after step {told['step']}; saved {named(self._folder / told['checkpoint'])}"
        elif told.get("checkpoint"):
            saved = f" after step {told['step']}; saved {told['checkpoint']} in the folder of the run's first worker"
        elif newest is not None:
            saved = f"; the last checkpoint is of step {newest}"
        else:
            saved, again = "; no checkpoint was written", "start again with"
        return f"{how}{saved}\n{again}: {self._command()}"

    def _unknown(self) -> int:
        """No worker is left here that was of the team, and nobody says that it came to its end."""
        what = "no worker is left here, and there is no word that the run is finished"
        cure = "see the console where it began; if it ended there, start it again, then run"
        logs = "" if self._options.temporary else f"logs: {named(self._folder / 'logs')}{os.sep}\n"
        text = f"{what}\n{logs}next: {cure} `{self._command()}`"
        self._say(f"\n{text}", always=True)
        self._journal.write("failed", worker=None, host=socket.gethostname(), cause=what, code=1, text=text)
        return 1

    def _failed(self, workers: Sequence[Worker], failed: Sequence[Worker], failing: Mapping[int, str]) -> int:
        failures = []
        for worker in failed:
            status = worker.status or 1  # it said so and did not end, or ended without saying anything
            told, grown = worker.events.get("failed", {}), worker.memory.grown()
            why = VANISHED if worker.vanished else "" if worker.status or told else failing[worker.rank]
            failure = Failure(worker.rank, worker.process.pid, worker.ended, status, told, self._output, grown, why)
            if worker.hung is not None:
                failure.hangs(worker.hung)
            needs = worker.events.get("needs")
            if failure.out_of_memory and needs is not None:
                room = worker.memory.room(self._options.workers)
                what, failure.cure = advice(needs["plans"], needs["besides"], room)
                failure.what += f": {what}"
            failures.append(failure)
        stopped = [worker.rank for worker in workers if worker.killed and worker not in failed]
        cause, host = culprit(failures), socket.gethostname()
        if cause.step is None:  # it did not say
            cause.step = workers[0].events.get("step", {}).get("step")
        logs = None if self._options.temporary else Path(named(self._folder / "logs"))
        text = failure_block(cause, failures, stopped, host, logs, self._then(cause))
        title, _, rest = text.partition("\n")
        red = Coloured(f"\n\x1b[1;31m{printable(title)}\x1b[0m\n{printable(rest)}")
        self._say(red if self._coloured else f"\n{text}", always=True)
        told = {"worker": cause.rank, "host": host, "step": cause.step, "cause": cause.what, "code": cause.code}
        self._journal.write("failed", **told, text=text)
        return cause.code

    def _then(self, cause: Failure) -> str:
        """The command that goes on, and what it will do."""
        if self._options.temporary:
            return f"then run `{self._command()}`"
        newest = self._newest_checkpoint()
        goes_on = "starts anew: no checkpoint was written" if newest is None else f"continues from step {newest}"
        if cause.kind == "CheckpointError" and "found" not in self._events:  # it looked for one, in vain
            goes_on = "continues from the newest checkpoint that can be read, and fails like this as long as none can"
        return f"then run `{self._command()}`: it {goes_on}"

    def _newest_checkpoint(self) -> int | None:
        found = (self._folder / "checkpoints").glob("step-" + 12 * "[0-9]" + "/manifest.json")
        known = [int(path.parent.name.removeprefix("step-")) for path in found]
        if "saved" in self._events:  # perhaps elsewhere
            known.append(self._events["saved"]["step"])
        return max(known, default=None)

    def _command(self) -> str:
        """The command that goes on with this run."""
        options, done = self._options, self._newest_checkpoint() or 0
        if options.again is not None:
            return options.again
        given = {
            "--join": options.join,
            "--token-file": options.token_file,
            "--workers": options.workers,
            "--run-dir": None if options.join else short(self._folder),
            "--plan": options.plan,
            "--shares": options.shares,
            "--save-every": options.save_every,
            "--keep": options.keep,
            "--checkpoints": options.checkpoints,
            "--mirror": options.mirror,
            "--steps": options.max_steps if done < (options.max_steps or 0) else None,
        }
        flags = [part for name, value in given.items() if value is not None for part in (name, str(value))]
        return command_line(["paceline", "run", *flags, *options.program])


def strangers(workers: Sequence[Worker]) -> bool:
    """Whether workers came to the end of their script, or run it still, and none of all has joined a team."""
    run = [worker for worker in workers if worker.status in (0, None) and not worker.killed and not worker.serves]
    return bool(run) and not any("join" in worker.events for worker in workers)


def exception_of(worker: Worker) -> tuple[object, ...] | None:
    """What tells exceptions apart: kind, step and text; or lines at which workers hung."""
    if worker.hung is not None:
        return ("hung", worker.hung.where)
    told = worker.events.get("failed")
    return (told.get("kind"), told.get("step"), told.get("text")) if told else None
