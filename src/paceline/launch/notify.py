"""Runs the `--notify` command at failures, hangs and the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from paceline.base.exit_codes import INTERRUPTED, STOPPED
from paceline.base.journal import Journal, plain
from paceline.errors import UsageError
from paceline.observe.summary import Summary

PATIENCE = 60.0  # seconds that the command may take
POLITE = (0, STOPPED, INTERRUPTED)  # exit codes of runs that did not fail


class Notifier(AbstractContextManager["Notifier"]):
    """Starts the `command`, if given, in a shell of its own for each event, with a JSON object on its standard input.
    Only the end of `paceline run` waits for it. `say` prints a line if the command fails.
    """

    def __init__(self, command: str | None, script: str, say: Callable[[str], None]) -> None:
        self.command, self._script, self._say = command, script, say
        self._threads: list[threading.Thread] = []
        self.failed = False  # whether the command was started for a failure

    def journal(self, folder: Path) -> Journal:
        """The journal of a run; events that are written to it start the command."""
        return _NotifyingJournal(folder, self) if self.command is not None else Journal(folder)

    def start(self, event: str, folder: Path, **about: Any) -> None:
        """Starts the command for an event, in a thread. `about`: further fields of its JSON object."""
        message = {"event": event, "at": time.time(), "run": str(folder.absolute()), "script": self._script, **about}
        text = json.dumps(plain(message)).encode() + b"\n"
        self._threads.append(thread := threading.Thread(target=self._run, args=(event, text), daemon=True))
        thread.start()

    def end(self, folder: Path, code: int) -> None:
        """Starts the command for the end of the run with this exit code, unless it was started for the failure."""
        if self.command is None or self.failed:
            return
        event = "end" if code in POLITE else "failure"
        try:
            summary = Summary(folder)
            step, what = summary.steps_done, summary.ending
        except (UsageError, OSError):  # the folder is missing
            step, what = None, f"ended with exit code {code}"
        self.start(event, folder, step=step, worker=None, what=what, code=code)

    def _run(self, event: str, text: bytes) -> None:
        assert self.command is not None
        quiet = subprocess.DEVNULL
        with subprocess.Popen(
            self.command, shell=True, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        ) as process:
            try:
                process.communicate(text, PATIENCE)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                self._say(f"the --notify command for the {event} took longer than {PATIENCE:g} s and was killed")
                return
        if process.returncode:
            how = f"exit code {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
            self._say(f"the --notify command for the {event} failed ({how})")

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(PATIENCE + 1)


class _NotifyingJournal(Journal):
    """A journal that starts the notify command at failures and hangs."""

    def __init__(self, folder: Path, notifier: Notifier) -> None:
        super().__init__(folder)
        self._folder, self._notifier = folder, notifier

    def write(self, event: str, /, **fields: Any) -> None:
        """Writes an event; a failure or a hang starts the command."""
        super().write(event, **fields)
        if event not in ("failed", "hang"):
            return
        step = fields.get("step")
        about = {"step": self.last_step(0) if step is None else step, "worker": fields.get("worker")}
        if event == "failed":
            self._notifier.failed = True
            self._notifier.start("failure", self._folder, **about, what=fields["cause"], code=fields["code"])
        else:
            where = f"at {fields['line'] or 'an unknown line'}"
            what = f"no progress for {fields['seconds']:.0f} s, {'busy' if fields['busy'] else 'waiting'} {where}"
            self._notifier.start("hang", self._folder, **about, what=what, code=None)
