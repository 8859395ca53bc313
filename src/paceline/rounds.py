"""One round of islands, whole or not at all: each makes its steps by itself, and then all are merged.

A turn of the user's loop is a round. What a lost team has done in it is done again by whoever gets its islands, from
the round's start; what others have done stays. A round that is asked to stop is broken off: nothing of it counts, and
the checkpoint is that of its start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.data.loader import Place
from paceline.errors import UsageError
from paceline.fragments import Fragments
from paceline.islands import OUTER, IslandProgress, Islands
from paceline.mesh import Mesh
from paceline.portions import Portion
from paceline.pulse import PULSE
from paceline.step import Agreed, Grid, add_metrics, deal
from paceline.stepping import Step, Stepper
from paceline.team.operations import Attempt, ReformedError

_SUMMED = ("stop", "save", "enter", "writing", "written", "look", "news", "broken")


def rounds_of(mesh: Mesh, about: dict[str, Any], grid: Grid | None) -> Rounds:
    """For a trainer whose plan says `local`; it is `about` what a Stepper is."""
    run, job, replica, plan = (about[name] for name in ("run", "job", "replica", "plan"))
    count = plan.local
    schedulers = [type(one).__name__ for one in job.schedulers if isinstance(one, ReduceLROnPlateau)]
    batches = 0 if grid is None else len(grid.cut(grid.global_batch))
    wrong, cure = "", ""
    if job.over is not None:
        wrong, cure = 'loss_over="batch" needs the whole global batch at once', "leave one of the two out"
    elif schedulers:
        wrong, cure = f"{schedulers[0]} follows one loss, and each island has its own", "take another schedule"
    elif grid is not None and batches < count:
        wrong = f"its global batch of {grid.global_batch} rows is {batches} micro-batches, and each island needs one"
        micro = max(1, grid.global_batch // count)
        cure = (
            f"say micro={micro}, which changes the mathematics"
            if grid.global_batch >= count
            else f"say local={batches}"
        )
    if wrong:
        raise UsageError(f"local={count}: {wrong}", cure)
    streams = plan.fragments or plan.outer_codec
    islands = (Fragments if streams else Islands)(replica, run.team.group, mesh, plan)
    parts = sorted({len(part) for part in deal(batches, [1.0] * count)}, reverse=True) if grid is not None else []
    each = " or ".join(map(str, parts))
    what = f"{count} islands, merged every {plan.every} steps by {plan.outer or OUTER}{islands.manner}"
    run.say(f"{what}, with {each} of the micro-batches of each global batch")
    run.decide(about["trainer"], what, "the plan says local=: the result is that of so many, whoever computes them")
    return Rounds(**about, grid=grid, every=plan.every, islands=islands)


class _BrokenOffError(Exception):
    """Somebody has been asked to stop in the midst of the round."""

    def __init__(self, agreed: Agreed) -> None:
        super().__init__("a round was broken off")
        self.agreed = agreed


@dataclass
class Rounds(Stepper):
    """Makes one trainer's rounds of `every` steps."""

    every: int = 1
    islands: Islands | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ahead = 0  # of the round, the step that is under way
        self.place = self._place
        if self.islands is not None:
            self.run.own.append(self.islands)

    @property
    def isles(self) -> Islands:
        assert self.islands is not None
        return self.islands

    def _place(self) -> Place:
        """How the next global batch of the round is dealt: to the islands of this worker's team who have not had it."""
        isles, team = self.isles, self.isles.team
        whole = self.run.team.place(isles.mesh)
        units = isles.mesh.over(team.size)
        first = isles.mesh.unit_of(self.run.team.rank) - units.unit_of(team.rank)
        weights, due = whole.weights[first : first + units.units], tuple(self._due())
        return replace(
            whole,
            rank=units.unit_of(team.rank),
            weights=weights,
            together=self.plan.together,
            islands=(isles.count, due),
        )

    def _due(self) -> list[int]:
        return [i for i in self.isles.mine if i not in self.isles.work or self.isles.work[i].steps <= self._ahead]

    def house(self, name: str) -> None:
        if self.housed == self.operations.number:
            return
        super().house(name)
        for told in self.isles.house():
            self.run.say(told)
            self.run.decide(self.trainer, *told.split(": ", 1))

    def turn(self, deal: Callable[..., Any], name: str) -> Step | None:
        """Makes a round; None where it was broken off, since all are to stop."""
        try:
            return self.step(deal, name)
        except _BrokenOffError as end:
            self.run.agreed(end.agreed)
            return None

    def state(self, done: int | None) -> dict[str, Any]:
        state = super().state(done)
        common = {key: state[key] for key in ("model", "owed", "steps", "expected", "scaling")}
        return {**common, "islands": self.isles.state(done)}

    def load(self, saved: dict[str, Any], newcomer: bool) -> None:
        self.replica.load(saved)
        self.done, self.expected = saved["steps"], saved["expected"]
        told = self.isles.load(saved.get("islands") or {}, self.done)
        if newcomer and "optimizers" in saved:
            told = f"training goes on in {self.isles.count} islands, each with what the optimizer keeps"
        if told:
            self.run.say(f"changed mathematics: {told}")

    def memory(self) -> dict[str, int]:
        found, (weights, kept) = super().memory(), self.isles.most
        return found | {"parameters": found["parameters"] + weights, "optimizer": max(found["optimizer"], kept)}

    def shares(self, batches: int, weights: Sequence[float]) -> list[int]:
        return self.isles.shares(batches)

    def _attempt(self, step: Step, deal: Callable[..., Any], name: str) -> Attempt:
        isles = self.isles
        with ExitStack() as undo:
            began = time.perf_counter()
            undo.callback(self._again)
            self._open(step, name)
            isles.begin()
            undo.callback(isles.rest)
            undo.callback(self.replica.abort)
            with self.streams.lent():
                broken = self._run(step, deal)
            isles.rest()
            computed, after = time.perf_counter(), step.number + step.steps
            if not broken:
                isles.pend(after)
            self._meet(step, name, computed - began, broken)
            isles.merge(name)
            isles.guard(after)
            isles.weigh()
            for member in self.run.members:
                member.state.step_computed()
            step.spent["compute"] = computed - began - step.spent["data"]
            count = yield lambda: step.agreed.count
            undo.pop_all()
        reduced = time.perf_counter()
        self.run.saving.copied()
        isles.apply(count, after)
        self.done, self.weights.refused = after, False
        ended = time.perf_counter()
        self.updated = ended - reduced
        step.spent |= {"reduce": reduced - computed, "update": self.updated}
        yield [dict(vars(step.agreed)), step.norm, step.lr, [step.whole.rows, step.whole.epoch], step.steps]
        self.operations.reached("applied")
        self.replica.complete()
        step.spent["update"] += time.perf_counter() - ended

    def _taken(self, step: Step, _: Any, result: Any) -> None:
        super()._taken(step, _, result[:4])
        step.steps = result[4]

    # -- what islands do by themselves ------------------------------------------------------------------------------

    def _run(self, step: Step, deal: Callable[..., Any]) -> bool:
        """All steps of the islands that are here; whether it was broken off."""
        step.whole, step.steps, step.spent = Portion([], 0, 0), 0, {"data": 0.0}
        for ahead in range(self.every):
            self._ahead = ahead
            if self.run.notice is not None:
                return self.isles.break_off()
            due, began = self._due(), time.perf_counter()
            portion = deal(ahead)
            if portion is None:
                break
            self._load(one := Step(self.done + ahead, 0.0), partial(_same, portion))
            step.spent["data"] += time.perf_counter() - began
            step.whole = replace(portion, micro_batches=[], rows=step.whole.rows + portion.rows)
            step.steps += 1
            for island in due:
                if self.operations.interrupted:
                    raise ReformedError("another generation forms", "wait")
                self._step_of(island, replace(one))
            if self.isles.passed(ahead + 1):
                return True
        return self.isles.ended()

    def _step_of(self, island: int, step: Step) -> None:
        """One step of an island, of all replicas that have it."""
        assert self.grid is not None
        whole, progress = step.whole, self.isles.enter(island)
        cuts = self.grid.cut(whole.rows)
        run = deal(len(cuts), [1.0] * self.isles.count)[island]
        rows = sum(len(cuts[number]) for number in run)
        if not rows:
            self.isles.skip(progress)
            return
        step.whole = replace(whole, micro_batches=[m for m in whole.micro_batches if m.index in run], rows=rows)
        step.lr = float(self.job.optimizers[0].param_groups[0]["lr"])
        self.expected = progress.inner.expected
        step.options = self.options(step)
        began = time.perf_counter()
        self._compute(step, lambda: step.whole, f"step {step.number + 1} of island {island}", began)
        seconds = time.perf_counter() - began
        self._refuse(step)
        if step.agreed.count <= 0:
            self.replica.abort(again=True)
            self.isles.skip(progress)
            return
        norm = self._norm(step)
        assert step.sums is not None
        self.run.saving.copied()
        progress.torn = True
        self.replica.update(step.sums, step.agreed, step.options, norm)
        self.replica.complete()
        progress.torn = False
        progress.inner.expected = step.agreed.count
        progress.add(step.agreed, norm, step.lr)
        self._merge(step, step.sums, seconds)
        PULSE.beat()

    # -- what all agree on ------------------------------------------------------------------------------------------

    def _meet(self, step: Step, name: str, seconds: float, broken: bool) -> None:
        """What each team tells of its islands, and each worker of itself; small, and in whole."""
        isles, group, run = self.isles, self.run.team.group, self.run
        speaks = isles.speaks and not broken
        mine = {
            "islands": [[i, *_told(isles.work[i])] for i in isles.mine] if speaks else [],
            "news": self._untold(),
            "stop": run.notice is not None,
            "save": run.wants_save(step.steps),
            "enter": self.operations.newcomers,
            "look": group.rank == 0 and group.size > 1 and self.weights.wish,
            "seconds": seconds,
            "digest": step.digest or 0.0,
            "broken": broken,
            **run.saving.fields,
        }
        group.enter(name, check=False, kind="merges")
        said = group.gather_json(mine)
        sums = {key: sum(bool(one[key]) if key == "news" else one[key] for one in said) for key in _SUMMED}
        islands = sorted((one for some in said for one in some["islands"]), key=lambda one: int(one[0]))
        metrics: dict[str, tuple[float, float]] = {}
        unused: set[int] | None = None
        for _, _, _, found, left, _, _ in islands:
            add_metrics(metrics, found)
            if left is not None:
                unused = {*left} if unused is None else unused & {*left}
        if sums.pop("broken"):
            raise _BrokenOffError(self._agreed(said, sums))
        step.agreed = replace(
            self._agreed(said, sums),
            loss=math.fsum(one[1] for one in islands),
            count=math.fsum(one[2] for one in islands),
            metrics=metrics,
            unused=tuple(sorted(unused or ())),
        )
        step.norm, step.lr = islands[0][5:]
        for one in said:
            step.news = {kind: (what, why) for kind, (what, why) in one["news"].items()} | step.news
        if step.digest is not None:
            self.weights.judge(group, step.agreed.digests)
        self._refuse(step)
        if step.agreed.count <= 0:
            what = f"the losses of steps {step.number + 1} to {step.number + step.steps} count no row or token"
            raise UsageError(what, "return a positive count for at least one row of each round")

    @staticmethod
    def _agreed(said: list[Any], sums: dict[str, int]) -> Agreed:
        return Agreed(
            count=0.0,
            loss=0.0,
            tested=0,
            strict=0,
            metrics={},
            unused=(),
            seconds=tuple(one["seconds"] for one in said),
            digests=tuple(one["digest"] for one in said),
            **sums,
        )


def _same(portion: Portion) -> Portion:
    return portion


def _told(one: IslandProgress) -> list[Any]:
    """Of an island's steps, for everybody."""
    unused = None if one.unused is None else sorted(one.unused)
    return [one.loss, one.count, one.metrics, unused, one.norm, one.lr]
