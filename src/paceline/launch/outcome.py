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
from paceline.base.environment import FUNCTION, host_name
from paceline.base.exit_codes import INTERRUPTED, LEFT_OUT, STOPPED
from paceline.base.journal import Event, Journal
from paceline.base.memory import advice
from paceline.base.tracebacks import named, short
from paceline.errors import UsageError
from paceline.launch.failure import Failure, culprit, failure_block
from paceline.launch.options import CONFIG_FILE, LaunchOptions
from paceline.launch.output import Output
from paceline.launch.workers import Worker
from paceline.observe.report import write_report

NOT_USED = "no Trainer was created and paceline.join() was not called"
INSTEAD = "create a paceline.Trainer, add --raw if the script uses torch.distributed, or run it with plain python"
RAW = "checkpoints are those of the script itself\nstart again with"
VANISHED = "exited with code 0 in the middle of its script, without an error message"


class RunOutcome:
    """Determines and prints how the run ended. Workers that were lost without ending the run do not count."""

    def __init__(
        self, options: LaunchOptions, folder: Path, journal: Journal, output: Output, say: Callable[..., None]
    ) -> None:
        self._options, self._folder, self._journal, self._output, self._say = options, folder, journal, output, say
        self._coloured = sys.stderr.isatty()
        self.first = options.join is None  # whether the workers of this agent started the run, and wrote its journal
        self.took_over = False  # whether this host runs the coordinator instead of the first host
        self._events: ChainMap[str, Any] = ChainMap()  # of all workers, the last of each kind; members win

    def failures(self, workers: Sequence[Worker], stop: int | None, failing: Mapping[int, str]) -> list[Worker]:
        """The workers that failed, including those that only the coordinator knows of (`failing`). The list is empty if
        a stop came before some worker had installed its signal handler: the signal just ended that worker. With --raw
        a signal ends every worker, in whatever way its script does.

        The list has the workers that ended the run, and replaced workers that raised the same exception before.
        """
        if stop is not None and (self._options.raw or any(worker.status == -signal.SIGUSR2 for worker in workers)):
            return []
        fine = (0, STOPPED, None)
        failed = [
            w
            for w in workers
            if (w.killed and "failed" in w.events) or w.status not in fine or w.exited_silently or w.rank in failing
        ]
        final = [w for w in failed if w.is_member or (w.serves and w.rank in failing)]
        exceptions = [exception_of(worker) for worker in final]
        return [w for w in failed if w in final or (exception_of(w) is not None and exception_of(w) in exceptions)]

    def verdict(self, workers: Sequence[Worker], stop: int | None, at_once: bool, left: bool, orders: Event) -> int:
        """Prints how the run ended and returns the exit code, which is 0 only if the run is finished. `left`: the
        workers of this host were asked to leave the run; `orders`: the last orders of the coordinator.
        """
        own_ranks, failing_entries = {worker.rank for worker in workers}, orders.get("failing", ())
        failing = {number: why for number, _, why in failing_entries if number in own_ranks}
        failures = self.failures(workers, stop, failing)
        self._events = ChainMap(*(w.events for w in sorted(workers, key=lambda w: not w.is_member)))
        everyone, workers = workers, [worker for worker in workers if worker.is_member or worker in failures]
        asked = INTERRUPTED if stop == signal.SIGINT else STOPPED
        if at_once:
            self._say(self._how_stopped("stopped at once"), always=True)
            return asked
        if stop is not None and self._options.raw:
            self._journal.write("stopped", why=signal.Signals(stop).name)
            self._say(self._how_stopped("stopped"), always=True)
            return asked
        if stop is not None and failures and all(worker.hung for worker in failures):
            hung = ", ".join(f"worker {worker.rank} {worker.exit_text}" for worker in failures)
            self._say(self._how_stopped(f"stopped; {hung}, and was killed"), always=True)
            return asked
        if failures:
            return self._failed(workers, failures, failing)
        for number, agent, why in (entry for entry in failing_entries if entry[0] not in own_ranks and stop is None):
            self._say(f"worker {number} on {agent} {why}, which ended the run: see that host's console", always=True)
            return 1
        if left:
            self._say(f"left the run, which continues without this host\nrejoin with: {self._command()}", always=True)
            return asked
        if orders.get("excluded") and not (orders.get("finished") or self.first or self.took_over):
            return self.left_out(str(orders["excluded"]))
        well = all(worker.status == 0 for worker in workers) if workers else orders.get("finished", False)
        finished = well and not failing_entries
        if not finished and (stop is not None or any(worker.status == STOPPED for worker in workers)):
            self._say(self._how_stopped("stopped"), always=True)
            return asked
        size = self._size
        if stop is None and size != 1 and not self._options.raw and strangers(everyone):
            what = f"{self._name} ended without using paceline: {NOT_USED}"
            each = f"{size} workers did the same work {size} times"
            work = each if size else "each worker did the same work on its own"
            self._say(f"{what}, so {work}; {INSTEAD}", always=True)
            return 1
        return self._finished(workers) if finished else self._unknown()

    def left_out(self, reasons: str) -> int:
        """Prints that the run goes on without this host because of its failures. Returns the exit code."""
        what = f"{host_name()} is left out of the run after {reasons}"
        self._say(f"{what}\nnext: test this host; `paceline doctor` shows its history", always=True)
        return LEFT_OUT

    @property
    def _size(self) -> int:
        """The number of workers with which the run began; 0 if another agent began it."""
        return max(self._options.workers, self._options.begin, self._options.size) if self.first else 0

    @property
    def _name(self) -> str:
        """The name of the script, module or function that the workers ran."""
        options = self._options
        return (
            "the function" if options.module == FUNCTION else in_one_line(options.module or Path(options.script).name)
        )

    def warn_of_strangers(self, workers: Sequence[Worker]) -> None:
        """Prints a note if workers have run for long and none has joined a team."""
        if self._size != 1 and strangers(workers):
            what = f"note: no worker has used paceline yet: {NOT_USED}"
            self._say(f"{what}; unless {self._name} does this, each worker does the same work on its own", always=True)

    def _finished(self, workers: Sequence[Worker]) -> int:
        name, events = self._name, self._events
        if not (self.first or self.took_over) or not workers:  # other hosts ended the run
            self._say("the run has ended; its report is in the run folder on the host that started the run")
            return 0
        if self._options.raw:
            if "join" not in events and self._size != 1:
                what = f"note: {name} ended without a process group of torch.distributed"
                self._say(f"{what}, so each of the {self._size} workers did its work on its own")
            self._journal.write("finished")
        elif "join" not in events:
            self._say(f"note: {name} ended without using paceline, so Paceline trained and saved nothing")
        elif events["join"].get("trainer") and not events.keys() & {"phase", "finished"}:
            self._say(f"note: {name} created a Trainer but ran no training step")
        if "phase" in events and not events.get("finished", {}).get("already") and not self._options.quiet:
            self._say(self._report())
        if "stopped" in events:
            self._say(self._how_stopped("stopped"), always=True)
        return 0

    def _report(self) -> str:
        """Writes the report into the run folder and returns it. If it cannot be written, the run has still finished."""
        try:
            return write_report(self._folder, colour=self._coloured, short=not self._options.verbose)
        except (UsageError, OSError) as error:
            return f"{self._name} finished, but its report cannot be written: {error}"

    def _how_stopped(self, how: str) -> str:
        if self._options.temporary:
            return f"{how}\nstart again with: {self._command()}"
        if self._options.raw:
            return f"{how}\n{RAW}: {self._command()}"
        stop_event = self._events.get("stopped", {})
        newest = self._newest_checkpoint()
        again = "continue with"
        checkpoint = stop_event.get("checkpoint")
        if checkpoint and (self.first or (self._folder / checkpoint).exists()):
            saved = f" after step {stop_event['step']}; saved {named(self._folder / checkpoint)}"
        elif checkpoint:
            saved = f" after step {stop_event['step']}; saved {checkpoint} on the host that started the run"
        elif newest is not None:
            saved = f"; the last checkpoint is from step {newest}"
        else:
            saved, again = "; no checkpoint was written", "start again with"
        return f"{how}{saved}\n{again}: {self._command()}"

    def _unknown(self) -> int:
        """Prints that this host has no member of the team left and does not know how the run ended. Returns 1."""
        what = "all workers of this host have ended, but the coordinator has not reported that the run is finished"
        cure = "see the console of the host that started the run; if the run ended there, start it again, then run"
        logs = "" if self._options.temporary else f"logs: {named(self._folder / 'logs')}{os.sep}\n"
        text = f"{what}\n{logs}next: {cure} `{self._command()}`"
        self._say(f"\n{text}", always=True)
        self._journal.write("failed", worker=None, host=socket.gethostname(), kind="", cause=what, code=1, text=text)
        return 1

    def _failed(self, workers: Sequence[Worker], failed: Sequence[Worker], failing: Mapping[int, str]) -> int:
        failures = []
        for worker in failed:
            status = worker.status or 1  # it reported a failure but still runs, or exited with 0 silently
            failed_event, grown = worker.events.get("failed", {}), worker.memory.grown()
            why = VANISHED if worker.exited_silently else "" if worker.status or failed_event else failing[worker.rank]
            failure = Failure(
                worker.rank, worker.process.pid, worker.ended, status, failed_event, self._output, grown, why
            )
            if worker.hung is not None:
                failure.hangs(worker.hung)
            needs = worker.events.get("needs")
            if failure.out_of_memory and needs is not None:
                room = worker.memory.room(self._options.workers + self._options.spares)
                what, failure.cure = advice(needs["plans"], needs["besides"], room)
                failure.what += f": {what}"
            failures.append(failure)
        stopped = [worker.rank for worker in workers if worker.killed and worker not in failed]
        cause, host = culprit(failures), socket.gethostname()
        if cause.step is None:  # the worker did not report it
            cause.step = workers[0].events.get("step", {}).get("step")
        logs = None if self._options.temporary else Path(named(self._folder / "logs"))
        text = failure_block(cause, failures, stopped, host, logs, self._then(cause))
        title, _, rest = text.partition("\n")
        red = Coloured(f"\n\x1b[1;31m{printable(title)}\x1b[0m\n{printable(rest)}")
        self._say(red if self._coloured else f"\n{text}", always=True)
        fields = {"worker": cause.rank, "host": host, "step": cause.step, "kind": cause.kind, "cause": cause.what}
        self._journal.write("failed", **fields, code=cause.code, text=text)
        return cause.code

    def _then(self, cause: Failure) -> str:
        """The command that continues the run, and the step from which it continues."""
        if self._options.temporary:
            return f"then run `{self._command()}`"
        if self._options.raw:
            return f"then run `{self._command()}`: it continues from the script's own checkpoints, if it loads any"
        newest = self._newest_checkpoint()
        goes_on = "starts over, as no checkpoint was written" if newest is None else f"continues from step {newest}"
        if cause.kind == "CheckpointError" and "found" not in self._events:  # it found no checkpoint that it can read
            goes_on = "continues from the newest readable checkpoint, and fails again if no checkpoint is readable"
        return f"then run `{self._command()}`: it {goes_on}"

    def _newest_checkpoint(self) -> int | None:
        known = [newest_checkpoint(self._folder)]
        if "saved" in self._events:  # possibly in another folder (--checkpoints)
            known.append(self._events["saved"]["step"])
        return max((step for step in known if step is not None), default=None)

    def _command(self) -> str:
        """The command that continues this run."""
        options, done = self._options, self._newest_checkpoint() or 0
        if options.again is not None:
            return options.again
        join = None if self.took_over else options.join
        if options.config is not None and not join and not options.temporary:
            steps = ["--steps", str(options.max_steps)] if done < (options.max_steps or 0) else []
            return command_line(["paceline", "run", "--config", str(short(self._folder / CONFIG_FILE)), *steps])
        given = {
            "--join": join,
            "--token-file": options.token_file if join else None,
            "--workers": options.workers or None,
            "--spares": options.spares or None,
            "--run-dir": None if join or options.temporary else short(self._folder),
            "--plan": None if join else options.plan if options.chosen is None else options.chosen.asked,
            "--shares": options.shares,
            "--save-every": options.save_every,
            "--keep": options.keep,
            "--checkpoints": options.checkpoints,
            "--mirror": options.mirror,
            "--max-time": options.max_time,
            "--steps": options.max_steps if done < (options.max_steps or 0) else None,
        }
        if options.raw:
            given |= {"--max-restarts": options.max_restarts or None, "--hang-timeout": options.hang_timeout}
        flags = ["--raw"] if options.raw else []
        flags += [part for name, value in given.items() if value is not None for part in (name, str(value))]
        cut = len(options.program) - len(options.arguments)
        separator = ["--"] if options.separated else []
        return command_line(["paceline", "run", *flags, *options.program[:cut], *separator, *options.arguments])


def newest_checkpoint(folder: Path) -> int | None:
    """Returns the step of the newest checkpoint in a run folder; None if it has none."""
    manifests = (folder / "checkpoints").glob("step-" + 12 * "[0-9]" + "/manifest.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in manifests), default=None)


def strangers(workers: Sequence[Worker]) -> bool:
    """Whether scripts run, or have ended well, and no worker has joined a team: they do not use Paceline."""
    run = [worker for worker in workers if worker.status in (0, None) and not worker.killed and not worker.serves]
    return bool(run) and not any("join" in worker.events for worker in workers)


def exception_of(worker: Worker) -> tuple[object, ...] | None:
    """The identity of a worker's failure: the exception's kind, step and text, or the line at which it hung."""
    if worker.hung is not None:
        return ("hung", worker.hung.where)
    failed_event = worker.events.get("failed")
    return (failed_event.get("kind"), failed_event.get("step"), failed_event.get("text")) if failed_event else None
