"""The run of this process: its beginning, what it does between two steps, and its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from paceline.base.batching import Agreed
from paceline.base.environment import World
from paceline.checkpoint.files import folder_of
from paceline.errors import UsageError
from paceline.parallel.tensor_parallel.script_view import without_script_view
from paceline.session.best_checkpoint import keep_best
from paceline.session.check_request import CheckRequest
from paceline.session.checkpoint_checker import checking
from paceline.session.checkpoint_manager import CheckpointManager
from paceline.session.consistency import ConsistencyChecker
from paceline.session.memory_needs import MemoryNeeds
from paceline.session.notices import Notices
from paceline.session.recorded_results import RecordedResults
from paceline.session.reporter import Reporter
from paceline.session.run_folder import ResumePoint, RunStorage
from paceline.session.run_state import RunState
from paceline.session.script_position import ScriptPosition
from paceline.session.trainer_registry import TrainerRegistry
from paceline.session.training_loop import LoopState
from paceline.team.team import Team, join
from paceline.team.transactions import LeftError


class ServerProcess(Protocol):
    """The interface of a parameter server to the run of its process. `contexts`: the step contexts of its trainers."""

    contexts: list[Any]

    def take(self) -> dict[str, Any]:
        """Waits for a worker's state and returns it."""
        ...

    def serve(self, reached: Callable[[str], None]) -> None:
        """Serves until training ends; `reached` is called at moments at which faults may be injected."""


class Run:
    """The run of this process; there is one per process. Its parts:

    folder:      where the run lives on disk
    reporter:    the journal, the progress line and the user's loggers
    checkpoints: when checkpoints are made, and who writes what
    resume:      what this worker continues from
    script:      where the script is
    results:     the recorded results of collectives outside of loops
    notices:     signals and other requests to stop
    trainers:    the script's trainers
    state:       the state that checkpoints save and newcomers take over
    """

    _current: Run | None = None

    @classmethod
    def current(cls, make_server: Callable[[World], ServerProcess] | None = None) -> Run:
        """Returns the run of this process and creates it at the first call. `make_server` is called if the process is a
        parameter server.
        """
        if cls._current is None:
            cls._current = Run(join(), make_server)
        return cls._current

    def __init__(self, team: Team, make_server: Callable[[World], ServerProcess] | None = None) -> None:
        self.team, world = team, team.world
        world.tell("join", trainer=True)
        # Set where this process is a parameter server.
        self.serving = make_server(world) if world.serves and make_server else None
        self.servers: Any = None  # the `param_server.client.ServerClient` to which this worker pushes gradients
        self.plan = ""
        self._is_new = world.newcomer
        self.is_closing = False
        main = team.rank == 0 and not world.newcomer and not world.serves
        # An agent holds the lock for its workers.
        self.folder = RunStorage(world, locks=main and world.launcher != "paceline")
        self.reporter = Reporter(team, self.folder.path)
        self.checkpoints = CheckpointManager(
            team, self.reporter, self.folder.storage, world.save_every, world.keep, self.folder.mirror
        )
        self.trainers = TrainerRegistry(team, self.reporter, ConsistencyChecker(team, self.checkpoints.copied))
        self.state = team.transactions.state_owner = RunState(self)
        self.memory = MemoryNeeds(self.trainers.members)
        self.script = ScriptPosition()
        checkpoint = None if world.newcomer else self.checkpoints.find()
        world.tell("found", step=None if checkpoint is None else checkpoint[0])
        self.resume = ResumePoint(checkpoint)
        self.results = RecordedResults(team.transactions, self.script)
        self.results.restore(self.resume.tree)
        self.script.replays = self.resume.continues
        if change := self.resume.compare_script(self.folder.name):
            self.reporter.say(change)  # the run continues with the new script
        self.notices = Notices(
            world, self.reporter, team.transactions.elastic, saves=self.checkpoints.storage is not None
        )
        self.check = CheckRequest(world.check, self.reporter, self.notices, world.local_size)
        self.checkpoints.saves_by_itself = self.check.trial is None  # what a trial would save is thrown away
        team.closing.append(self.close)

    # -- beginning --------------------------------------------------------------------------------------------------

    def begin(self, plan: str, origin: str, seed: int, device: torch.device) -> None:
        """Reports the start of the run, once: with its first trainer."""
        if self.plan:
            return
        self.plan = plan
        world = self.team.world
        location = self.checkpoints.memory if self.checkpoints.from_mirror else world.checkpoints or self.folder.path
        if text := self.resume.describe(location, world.size, plan):
            self.reporter.say(text)
        self.reporter.report_start(plan, origin, seed, device, self.resume.step, str(location))

    def need_team(self) -> None:
        """Makes a newcomer wait until it is admitted. It is called where a script first needs something of the team."""
        if not self._is_new:
            return
        transactions = self.team.transactions
        self._is_new = False  # before admission, which itself reads properties that call this
        if transactions.waiting and self.serving is not None:
            tree, transactions.waiting = self.serving.take(), False
            self.state.take_over(tree, newcomer=True)
        elif transactions.waiting:
            with checking(self.checkpoints.storage, self.team.world):
                transactions.admit()

    def begin_training(self, trainer: int, loop: bool) -> None:
        """Prepares for a loop or a single step: restores what a resumed run brings back, and does what has become due
        since the last step.
        """
        self.need_team()
        if self.serving is not None:
            self.serving.serve(self.team.transactions.reach)
        script, members = self.script, self.trainers.members
        if not script.took_step:
            self.resume.refuse_missing_trainers(len(members))
            if script.replays:
                self.resume.load_streams(self.team.rank)
        for state in self.trainers.states:
            state.end_replay()
        script.complete_left_loops()
        if not script.loops:
            if script.begins_round(trainer, loop):
                self.between_steps()
            if not loop:
                script.round.add(trainer)

    # -- training ---------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, phase: LoopState) -> Iterator[None]:
        """Tracks a loop while the script iterates it. Without an agent, Ctrl-C stops it cleanly."""
        with self.notices.ctrl_c_stops(outermost=not self.script.loops), self.script.inside(phase):
            try:
                yield
            except (GeneratorExit, KeyboardInterrupt):
                self.trainers.agreement.note(self.trainers.step)
                raise

    def wants_save(self, steps: int = 1) -> int:
        """Returns the main worker's wish after this number of further `steps`, as `CheckpointManager.wants` does."""
        if self.checkpoints.storage is None or not self.reporter.main:
            return 0
        return self.checkpoints.wants(self.trainers.step + steps)

    def record_agreed(self, agreed: Agreed) -> None:
        """Records what workers agreed on in a step, for `between_steps` to do."""
        self.checkpoints.collect_due = agreed.written > 0 and agreed.writing == 0
        if agreed.save or agreed.stop or agreed.enter:
            self.notices.record_agreed(agreed)
        if profile := self.team.transactions.commands.profile:
            self.reporter.profiles.between_steps(self.trainers.step, profile)

    def between_steps(self, ends: bool = False) -> None:
        """Does what was agreed on, when the outermost loop asks for its next step: first checkpoints, then a stop, then
        newcomers. If the loop `ends`, newcomers wait for the next loop: they would skip the collectives at the end of
        this one.
        """
        notices, checkpoints, transactions = self.notices, self.checkpoints, self.team.transactions
        due, notices.save_due = notices.save_due, 0
        if checkpoints.collect_due or checkpoints.commit is not None:
            checkpoints.poll()
        if checkpoints.news:
            checkpoints.report()
        for member in self.trainers.members:
            if member.best.due is not None:
                keep_best(self)
                break
        if (notices.stop_due or notices.max_steps is not None) and (
            reason := notices.reason_to_stop(self.trainers.step)
        ):
            self.leave(*reason)
        if checkpoints.asked or due == 1:
            self.save()
        elif due:
            checkpoints.begin(self.state.snapshot(), mirror=True)
        while not ends and (notices.enter_due or transactions.hold):
            notices.enter_due = False
            self.trainers.error_feedback.consolidate(transactions)
            try:
                transactions.enter_next()
            except LeftError:
                self.team.left = True
                notices.end_script()
        transactions.between_steps()

    def save(self, wait: bool = False, must: bool = False) -> bool:
        """Begins a checkpoint of all trainers, if there is a run folder; see `CheckpointManager.save`. Collective."""
        self.trainers.flush()
        step = self.trainers.step
        if self.checkpoints.storage is None:
            if wait:
                self.trainers.agreement.end(step)
            return False
        self.reporter.journal.flush()
        return self.checkpoints.save(self.state.snapshot, step, wait, must)

    # -- the end ----------------------------------------------------------------------------------------------------

    def leave(self, code: int, why: str) -> None:
        """Writes a checkpoint and ends the script. In a notebook or at a prompt only the cell ends."""
        if not code:
            self.trainers.measure()
        self.save(wait=True)
        step, saved, reporter = self.trainers.step, self.checkpoints.committed, self.reporter
        path = f"checkpoints/{folder_of(saved)}" if self.folder.path and saved else None
        if self.script.took_step:
            reporter.close_account()
        reporter.journal.write("stopped", step=step, why=why)
        self.team.world.tell("stopped", step=step, checkpoint=path)
        if reporter.progress is not None:
            then = f"; the same command resumes from {self.folder.path}"
            reporter.say(
                f"stopped at step {step}{then if path else '; nothing was saved, because no run folder was given'}"
            )
        if hasattr(sys, "ps1"):  # the user may type more
            self.notices.withdraw()
            raise KeyboardInterrupt
        self.notices.end_script(code)

    def say_finished(self) -> None:
        """Tells the user that a resumed run is finished, before code after its loops fails for want of reports."""
        step = self.trainers.step
        if not self.script.took_step and step and all(member.complete for member in self.trainers.members):
            cure = "use a larger count= or epochs= to train longer, or another --run-dir"
            self.reporter.say(
                f"this run had already finished at step {step}, so nothing was trained; {cure}", once=True
            )

    def _refuse_unused_loops(self) -> None:
        """Raises UsageError at the end of a script that called steps() and trained nothing."""
        left = [phase.site for one in self.trainers.members for phase in one.unused_loops if not phase.complete]
        if left and not self.script.took_step and self.serving is None:
            what = f"steps() at {left[0]} returned a loop that the script never ran, so nothing was trained"
            raise UsageError(what, "write `for report in trainer.steps(...):`")

    @without_script_view
    def close(self, failed: bool) -> None:
        """Ends the run at the end of the script: writes the last checkpoint, the journal and the report. Raises
        UsageError if nothing was trained.
        """
        journal = self.reporter.journal
        if self.trainers.members and self.team.group.ledger:
            by_bytes = sorted(self.team.group.ledger.items(), key=lambda item: -item[1][1])
            journal.write("collectives", kinds=dict(by_bytes))
        self.trainers.write_figures()
        done, took_step = self.trainers.complete, self.script.took_step
        self.is_closing = True
        if not failed and not self.notices.left and self.trainers.members:
            self._end_training(done)
        self.reporter.close(finished=done and took_step and not failed)
        if not failed and not self.notices.left:
            self._refuse_unused_loops()

    def _end_training(self, done: bool) -> None:
        """Writes the last checkpoint and the end of the journal. Collective."""
        keep_best(self)
        step, took_step = self.trainers.step, self.script.took_step
        if self.checkpoints.asked or self.checkpoints.open or step > self.checkpoints.begun:
            self.save(wait=True, must=True)
        if took_step:
            self.reporter.close_account()
            for text in [one.schedule_warning for one in self.trainers.members]:
                if text:
                    self.reporter.say(text)
        if not done and took_step:
            self.reporter.journal.write("stopped", step=step, why="the script ended before its training loops")
        if done and step:
            self.reporter.journal.write("finished", step=step, already=not took_step)
            if self.reporter.main:
                self.team.world.tell("finished", step=step, already=not took_step)
            self.say_finished()
