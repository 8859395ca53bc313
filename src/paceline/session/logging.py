"""Values, texts and settings that the script logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Never

from torch.optim.lr_scheduler import LRScheduler

from paceline.base.mesh import Mesh
from paceline.base.text import ranks
from paceline.comm.communicator import Group
from paceline.compute.job import TrainingJob
from paceline.errors import UsageError, a
from paceline.plan import Plan
from paceline.session.best_checkpoint import BestCheckpoint
from paceline.session.consistency import WeightsComparison
from paceline.session.early_stop import EarlyStop
from paceline.session.reported_values import PlateauFollower, ValueFollower, agree
from paceline.session.reporter import Reporter
from paceline.session.run import Run


def _medium(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    from paceline.observe.media import medium  # few scripts log such

    return medium(name, value)


def _healed(run: Run, trainer: int, workers: list[int], names: list[str], when: str) -> None:
    """Journals which workers were healed, and tells the user."""
    shown, more = ", ".join(names[:3]), f" and {len(names) - 3} more" if len(names) > 3 else ""
    step = run.trainers.members[trainer].done
    run.reporter.journal.write("healed", trainer=trainer, step=step, workers=workers, tensors=names)
    run.reporter.say(
        f"healed: {ranks(workers)} had different values of {shown}{more}, {when}, and received those of the majority"
    )


class TrainerLogging:
    """The part of the Trainer that logs values."""

    _run: Run
    _reporter: Reporter
    _group: Group
    _number: int
    best: BestCheckpoint
    stopping: EarlyStop
    plateau: PlateauFollower
    _stopped: bool
    followed: list[ValueFollower]  # values by name, the best among them
    plan: Plan
    done: Any  # a property there

    def _follow_values(self, schedule: Any, schedulers: Sequence[LRScheduler]) -> None:
        """Makes what follows the values that the script reports."""
        self.best, self.stopping = BestCheckpoint(), EarlyStop(self._reporter.say)
        self.plateau = PlateauFollower(schedule, schedulers, self._reporter.say)
        self.followed = [self.best, self.stopping, *([self.plateau] if self.plateau.name else [])]

    def _offer(self, values: dict[str, Any]) -> dict[str, Any]:
        for one in self.followed:
            one.offer(values, self._run.trainers.step)
        self._stopped, self.stopping.is_due = self._stopped or self.stopping.is_due, False
        return values

    def _make_comparison(self, job: TrainingJob, mesh: Mesh) -> WeightsComparison:
        """Returns the comparison of this trainer's weights, which heals differences with --heal."""
        apart = next((word for word in ("local", "server") if getattr(self.plan, word)), "")
        world = self._run.team.world
        heals = world.heal or bool(world.verify_steps)
        if world.heal and apart:
            self._reporter.say(
                f"--heal does nothing under {apart}=, where workers do not hold equal weights", once=True
            )
        heal = partial(_healed, self._run, self._number) if heals and not apart else None
        comparison = WeightsComparison(job, mesh, not apart, heal)
        comparison.trainer = self._number
        return comparison

    def keep_best(self, name: str, mode: str = "max", k: int = 1) -> None:
        """Keeps the checkpoints with the best values of a metric, in addition to the newest ones.

        All workers call it before the loop. `load_best`, `paceline.load` and ``paceline export RUN --best`` use the
        best of them. A checkpoint is taken when the loop asks for its next step, and training waits until it is
        written.

        Args:
            name: A value of `evaluate` or `log`.
            mode: ``"max"`` or ``"min"``. NaN is never the best value.
            k: How many checkpoints are kept.

        Raises:
            UsageError: An argument is wrong, or a value is followed already.
        """
        self.best.follow(name, mode, k)
        if self._run.checkpoints.storage is None:
            self._reporter.say(
                f"no checkpoint of the best {name} is kept, because the run has no run folder", once=True
            )

    def early_stop(self, name: str, patience: int, mode: str = "min", min_delta: float = 0.0) -> None:
        """Stops the training once a value has not improved for some reports.

        All workers call it before the loop. Training ends when the loop asks for its next step, and the run then counts
        as finished. A resumed run goes on counting.

        Args:
            name: A value of `evaluate` or `log`. To follow the training loss, log it:
                ``trainer.log(loss=report.loss)``.
            patience: After how many reports without an improvement.
            mode: ``"min"`` or ``"max"``. NaN is no improvement.
            min_delta: The least improvement that counts.

        Raises:
            UsageError: An argument is wrong, or another value is followed already.

        Example:
            >>> trainer.early_stop("loss", patience=3)
            >>> for report in trainer.steps(data, epochs=100):
            ...     if report.epoch_end:
            ...         trainer.evaluate(held_out, loss_of)
        """
        self.stopping.follow(name, patience, mode, min_delta)

    def log(self, *unnamed: Never, **values: Any) -> None:
        """Records values of your own at the current step.

        A value is a number, a text, a `paceline.Histogram` or a `paceline.Image`. They appear in the journal, the
        report, the live page and the loggers. If `keep_best`, `early_stop` or `paceline.plateau` follows one of the
        names, all workers must call it.

        Raises:
            UsageError: A value has no name.

        Example:
            >>> trainer.log(temperature=0.7, note="second phase")
        """
        followed = self.followed
        if unnamed:
            raise UsageError("log() needs values by name", f"write trainer.log(**{unnamed[0]!r:.60})")
        if media := {name: one for name, value in values.items() if (one := _medium(name, value)) is not None}:
            values = {name: value for name, value in values.items() if name not in media}
            self._keep(media)
        if values or not media:
            self._reporter.journal.write("log", trainer=self._number, step=self.done, values=values)
        reported, whose = dict[str, float](), ""
        for one in followed:
            value = one.find_value(values, "log()", self._reporter.say)
            if value is not None and one.seen != (
                self._run.trainers.step,
                value,
            ):  # evaluate() has not just reported it
                reported[one.name], whose = value, whose or one.whose
        if reported:
            self._report(partial(agree, self._group, reported, whose), self._offer)

    def _report(self, settle: Callable[[], Any], apply: Callable[[Any], Any], spends: str = "script") -> dict[str, Any]:
        """Returns values that all workers compute together, and updates what follows them; in a resumed run the
        recorded values.
        """
        self._run.need_team()
        recorded = self._run.results.has_next
        values = dict(self._run.results.run(settle, apply, spends, self._take_over))
        for one in self.followed if recorded else ():
            one.replay(values, self._run.trainers.step)
        return values

    def _take_over(self, values: dict[str, Any]) -> dict[str, Any]:
        """Takes values that other workers have computed, after this worker took over their state."""
        for one in self.followed:
            (one.replay if one is not self.best else one.offer)(values, self._run.trainers.step)
        return values

    def _keep(self, media: dict[str, Any]) -> None:
        reporter, folder = self._reporter, self._run.folder.path
        for name, one in media.items() if reporter.main and folder is not None else ():
            try:
                event_fields = one.event(folder, name, self.done)
            except OSError as error:
                reporter.say(f"{name} is not saved: {folder} cannot be written ({error.strerror})", once=True)
            else:
                reporter.journal.write("media", trainer=self._number, step=self.done, name=name, **event_fields)

    def log_to(self, logger: Any, upload: bool = False) -> None:
        """Logs to experiment trackers: everything that is known of each step, the configuration, pictures, checkpoints.

        All workers must call it, and one of them logs. A logger that fails neither stops nor delays the training. A
        resumed run continues the same run of the logger. See docs/howto/loggers.md.

        Args:
            logger: Names, as ``"wandb:team/digits,csv"``: ``wandb``, ``mlflow``, ``trackio``, ``comet``, ``csv``,
                ``tensorboard`` or ``otlp``, each with a target after a colon if need be; or an object with a method
                ``write(step, values)``.
            upload: Whether the best checkpoint of `keep_best` is copied to the tracker, which otherwise gets its path.

        Raises:
            UsageError: There is no logger of the name, its package is missing, or an object has no method `write`.

        Example:
            >>> trainer.log_to("mlflow:http://tracking:5000", upload=True)
        """
        self._reporter.loggers.add(logger, upload)

    def config(self, *unnamed: Any, **values: Any) -> None:
        """Keeps what the run is made with, as ``trainer.config(lr=3e-4, width=512, **vars(arguments))``: numbers, texts
        and bools, shown in the report and by `paceline compare`, and handed to loggers. Called by all workers, before
        the loop. Raises UsageError.
        """
        if unnamed:
            raise UsageError("config() needs values by name", f"write trainer.config(**{unnamed[0]!r:.60})")
        for name, value in values.items():
            if value is not None and not isinstance(value, (bool, int, float, str)):
                what = f"config() cannot store {name}, which is {a(type(value).__name__)}"
                raise UsageError(what, "pass numbers, texts and bools, for example str() of it")
        self._reporter.journal.write("config", trainer=self._number, values=values)
