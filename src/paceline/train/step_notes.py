"""Notes to the user about steps: news of workers, steps in which no row counts, parameters without a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.compute.job import TrainingJob
from paceline.session.run import Run
from paceline.train.step import Step


class StepNotes:
    """The notes of one trainer, each kind once. `news` is what this worker observed, by kind: what, and why if it is a
    decision. `announced` are the kinds that the user has been told.
    """

    def __init__(self, run: Run, trainer: int, job: TrainingJob) -> None:
        self._run, self._trainer, self._job = run, trainer, job
        self.news: dict[str, tuple[str, str]] = {}
        self.announced: set[str] = set()
        self._empty = 0  # turns in which nothing counted

    def untold(self) -> dict[str, tuple[str, str]]:
        """Returns this worker's news of kinds that were not announced yet."""
        return {kind: entry for kind, entry in self.news.items() if kind not in self.announced}

    def observe(self, step: Step) -> None:
        """Announces what a step shows."""
        if step.news:
            self._announce(step.news, step.done)
        if step.agreed.count <= 0:
            self._note_empty(step)
        elif step.agreed.unused and "unused" not in self.announced:
            self._name_unused(step.agreed.unused, step.done)

    def _announce(self, news: dict[str, tuple[str, str]], done: int) -> None:
        """Announces news of the workers: as a decision with its reason, or as a note to the user."""
        if "keeps" in self.announced | news.keys():  # then it is not known whether the loss is a sum over rows
            news.pop("mixes", None)
        for kind in sorted(news.keys() - self.announced):
            self.announced.add(kind)
            what, why = news[kind]
            if why:
                self._run.reporter.decide(self._trainer, what, why)
            else:
                self.note(what, done)

    def note(self, text: str, done: int) -> None:
        """Writes a note into the journal, and on the console once."""
        self._run.reporter.journal.write("note", trainer=self._trainer, step=done, text=text)
        self._run.reporter.say(text, once=True)

    def _note_empty(self, step: Step) -> None:
        """Notes a step in which no row counts; on the console only the first, tenth, hundredth, ... one."""
        done = step.done
        self._empty += 1
        steps = f"step {done}" if step.steps == 1 else f"steps {done - step.steps + 1}-{done}"
        text = f"the loss of {steps} has a count of 0 over the whole global batch, so no weight was changed"
        if self._empty > 1:
            text += f"; this also happened {self._empty - 1} times before"
        self._run.reporter.journal.write("note", trainer=self._trainer, step=done, text=text)
        if str(self._empty).strip("0") == "1":
            self._run.reporter.say(text)

    def _name_unused(self, unused: tuple[int, ...], done: int) -> None:
        """Names the parameters that got no gradient, once: with a mixture of experts they differ from step to step.
        Parameters that the script froze after the Trainer was made are left out.
        """
        numbers = {*unused}
        names = [n for at, (n, param) in enumerate(self._job.named.items()) if at in numbers and param.requires_grad]
        if not names:
            return
        self.announced.add("unused")
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        self._run.reporter.say(
            f"{len(names)} of {len(self._job.named)} parameters got no gradient in step {done} and were not "
            f"updated: {shown}; that is expected for experts that no row chose; freeze parameters that are never used "
            "with requires_grad_(False) before creating the Trainer (this message is printed once)",
            once=True,
        )


def describe_changing_counters(names: Sequence[str]) -> str:
    """Returns a note to the user about values that a loss or a forward changes each time it is called."""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    change, what = ("changes", "it") if len(names) == 1 else ("change", "them")
    return (
        f"{shown} {change} each time a micro-batch is computed, by the loss or the model: if the loss depends on "
        f"{what}, the result depends on the number of workers; then keep {what} in trainer.state and change {what} in "
        "the body of the loop"
    )
