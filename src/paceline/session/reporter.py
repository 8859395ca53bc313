"""Tells the user and the journal what the run does."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from paceline.base.console import say
from paceline.base.environment import doubt_threads
from paceline.base.journal import Journal, plain
from paceline.base.logger_names import LoggerName, parse_loggers
from paceline.base.script_config import config, flat
from paceline.base.terminal import Terminal
from paceline.base.time_accounting import process_began
from paceline.comm.torch_private import untested
from paceline.observe.loggers import Loggers
from paceline.observe.model_text import block_table, model_line
from paceline.observe.profiling import Profiles
from paceline.observe.progress import Progress
from paceline.observe.report import write_report
from paceline.observe.step_totals import BytesSent
from paceline.session.script_info import VERSIONS, code, module_name, packages, script_text
from paceline.session.validation import refused_exports
from paceline.team.team import Team


class Reporter:
    """Writes the journal, the progress line and the user's loggers; only on the main worker, except for profiles."""

    def __init__(self, team: Team, folder: Path | None) -> None:
        world = team.world
        self._team, self.folder, self._serves = team, folder, world.serves
        self.traffic = BytesSent(team.group.ledger)
        self.profiles = Profiles(folder, world.rank)
        names = [LoggerName("tensorboard")] if world.tensorboard else []
        self.loggers = Loggers(folder, names + (parse_loggers(world.log_to) if world.log_to else []), self.say)
        self._writes_journal = self.main
        self.journal = Journal(folder if self.main else None, self.loggers)
        self.progress = Progress(kind=world.progress) if self.main and world.events_fd is None else None
        self._lines: set[str] = set()  # that were printed

    @property
    def main(self) -> bool:
        """Whether this worker prints and writes for the team."""
        return self._team.group.rank == 0 and not self._team.transactions.waiting and not self._serves

    def take_over_journal(self) -> bool:
        """Continues the journal if this worker has become the main one, since those before it are gone. Returns whether
        it has.
        """
        if not self.main or self._writes_journal:
            return False
        self._writes_journal, self.journal = True, Journal(self.folder, self.loggers)
        return True

    def say(self, text: str, once: bool = False) -> None:
        """Prints a line for the user, on the main worker; with `once` not a second time."""
        if not self.main or (once and text in self._lines):
            return
        self._lines.add(text)
        if self.progress is not None:
            self.progress.line(text)
        self._team.world.tell("line", text=text)

    def decide(self, trainer: int, what: str, why: str) -> None:
        """Journals a trainer's decision and its reason, for `paceline explain`."""
        self.journal.write("decision", trainer=trainer, what=what, why=why)

    def tell_decisions(self, trainer: int, decisions: Iterable[tuple[str, str]]) -> None:
        """Journals decisions with their reasons, and prints them."""
        for what, why in decisions:
            self.decide(trainer, what, why)
            self.say(what)

    def describe_model(self, trainer: int, fields: dict[str, Any]) -> None:
        """Journals the size of a trainer's model, and prints it in a line; with --verbose also its blocks."""
        self.journal.write("model", trainer=trainer, **fields)
        self.say(f"model: {model_line(fields)}", once=True)
        if self.main:
            self._team.world.tell("detail", text=block_table(fields))

    def show(self, event: str, **fields: Any) -> None:
        """Writes an event to the journal and shows it in the progress line."""
        if not self.main:
            return
        if event == "step":
            self.journal.steps(**fields)
        else:
            self.journal.write(event, **fields)
        if self.progress is not None:
            getattr(self.progress, "phase" if event == "grid" else event)(fields)
        event_fields = plain(fields) if event == "evaluate" else fields  # what of its results is no number, too
        self._team.world.tell("phase" if event == "grid" else event, **event_fields)

    def report_start(
        self, plan: str, origin: str, seed: int, device: torch.device, resumed: int | None, location: str
    ) -> None:
        """Writes the journal's `start` event, and tells the user what is unusual about this start. `resumed` is the
        step of the state that it goes on from, which was at `location`.
        """
        world = self._team.world
        if origin != "default":
            self.say(f"plan: {plan} (from {origin})")
        for doubt in doubt_threads(torch.get_num_threads()) if world.launcher != "paceline" else ():
            self.say(doubt)
        for text in refused_exports(script_text()) if self.main else ():
            self.say(text)
        if newer := untested(torch.__version__):
            self.say(newer)
        self.journal.write(
            "start",
            workers=world.size,
            hosts=1 + (world.size - 1) // max(1, world.local_size),
            plan=plan,
            plan_origin=origin,
            script=sys.argv[0],
            module=module_name(),
            argv=sys.argv,
            script_sha256=hashlib.sha256(script_text().encode()).hexdigest(),
            versions=VERSIONS,
            seed=seed,
            threads=torch.get_num_threads(),
            device=str(device),
            resumed_from=resumed,
            **({} if resumed is None else {"resumed_in": location}),
            began=process_began(),
        )
        if self.main and self.folder is not None:
            self.journal.write("environment", packages=packages(), **code(self.folder))
        if values := flat(config()):  # for the report, `paceline compare` and loggers
            self.journal.write("config", trainer=0, values=values)

    def close_account(self) -> None:
        """Journals what the team spent its time on."""
        self.journal.write("account", seconds=self._team.transactions.account.take())

    def close(self, finished: bool) -> None:
        """Closes the progress line and the journal, and prints the report of a run that has `finished`."""
        if self.progress is not None:
            self.progress.close()
            if finished and self.folder is not None:
                self.journal.close()
                console = Terminal(stderr=True)
                say(write_report(self.folder, console.width, console.is_terminal, short=True))
        self.journal.close()
