"""One optimizer step as an operation of the team: rows, gradients, the agreed vector, the update."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from paceline.agreement import Weights
from paceline.comm.group import Group
from paceline.data.balance import Balance
from paceline.errors import MetricError, NonFiniteLossError, UsageError
from paceline.given import digest_of, refuse_twins
from paceline.mesh import run_of
from paceline.plan import Plan
from paceline.pulse import PULSE
from paceline.run import Run
from paceline.step import Agreed, Grid, VectorLayout, exact_sum
from paceline.strategies.base import Job, Orders, Strategy, Sums
from paceline.strategies.chunks import MicroBatch, cut, rows_of, to_device
from paceline.strategies.merging import Merging
from paceline.strategies.scaling import LossScale
from paceline.strategies.streams import Streams


@dataclass(frozen=True)
class StepReport:
    """One optimizer step of the whole team: the same on every worker, but for `seconds`.

    `step` counts optimizer steps done, from 1. `loss` and `metrics` are means over the global batch of `samples` rows.
    `lr` is the first group's learning rate of this step, `grad_norm` the norm of the mean gradient before clipping.
    """

    step: int
    epoch: int
    loss: float
    metrics: dict[str, float]
    samples: int
    seconds: float
    lr: float
    grad_norm: float


@dataclass
class Rows:
    """One worker's part of a global batch: its micro-batches, and the size of the whole. `full`: that is what a global
    batch has; `fine`: micro-batches were divided among workers.
    """

    micro_batches: list[MicroBatch]
    count: int
    rows: int
    epoch: int = 0
    cure: str = "bring one row more, or choose a micro= that leaves no single row, which changes the mathematics"
    full: bool = False
    fine: bool = False

    @property
    def share(self) -> list[MicroBatch]:
        """Those that count."""
        return [micro_batch for micro_batch in self.micro_batches if not micro_batch.blank]


def bring(
    group: Group, batch: Any, micro: int | None, together: int, spare: MicroBatch | None, name: str, looks: str
) -> Rows:
    """The rows that this worker brings, numbered among everybody's. Where it `looks`, none may come twice. One that has
    fewer micro-batches than others of the `together` workers of a replica runs its first or the `spare` one besides.
    """
    rows = 0 if batch is None else rows_of(batch)
    grid = Grid(max(rows, 1), micro or max(rows, 1))
    cuts = grid.cut(rows)
    group.enter(name, kind="step()")
    brought = group.gather_json([len(cuts), rows, digest_of(batch) if looks and rows else ""])
    refuse_twins([entry[2] for entry in brought], looks)
    rank = group.rank
    offset, first = (sum(entry[place] for entry in brought[:rank]) for place in (0, 1))
    said = [f"rows {part.start}-{part.stop - 1} of this worker's batch" for part in cuts]
    micro_batches = [
        MicroBatch(offset + i, len(part), cut(batch, part), said[i], start=first + part.start)
        for i, part in enumerate(cuts)
    ]
    whole = Rows(micro_batches, sum(entry[0] for entry in brought), sum(entry[1] for entry in brought))
    if whole.rows == 0:
        raise UsageError("no worker brought a row to step()", "bring at least one row")
    spare = micro_batches[0] if micro_batches else spare
    for _ in range(max(brought[other][0] for other in run_of(rank, together)) - len(cuts)):
        if spare is None:
            what = f"worker {rank} brought no row to step(), now or before, and its shard runs what the others run"
            raise UsageError(what, "bring at least one row on every worker, or say zero=1")
        whole.micro_batches.insert(0, dataclasses.replace(spare, blank=True))
    return whole


@dataclass
class Stepper:
    """Makes one trainer's steps. `done` counts them; `expected` is the last global count, which gradients are divided
    by before it is known; `waiting_since` is when the last step ended. `balance` says who computes how much; the memory
    for sums is of the generation `housed`. `weights` are compared with everybody's now and then.
    """

    run: Run
    trainer: int
    job: Job
    top: Strategy
    plan: Plan
    streams: Streams
    merging: Merging
    weights: Weights
    balance: Balance | None = None
    scaling: LossScale | None = None
    done: int = 0
    expected: float = 0.0
    layout: VectorLayout | None = None
    housed: int | None = None
    updated: float = 0.0  # seconds of the last update
    news: dict[str, tuple[str, str]] = field(default_factory=dict)  # observed here, by kind: what, and why
    told: set[str] = field(default_factory=set)  # kinds that people have been told of
    waiting_since: float = field(default_factory=time.perf_counter)

    def step(self, deal: Callable[[], Rows], name: str) -> OneStep:
        """Makes the next one, applied whole or not at all; `deal` gives this worker's rows, in the present team."""
        one = OneStep(self, deal, name)
        with self.run.explains_memory(self.job.device):
            self.run.team.operations.run(one)
        decision = one.learn()
        if decision is not None:
            self.run.decide(self.trainer, *decision)
        self._tell(one.news)
        if self.balance is not None and one.generation == self.run.team.operations.number:
            self._weigh(self.balance, one)
        self.run.agreed(one.agreed)
        self.weights.done, self.weights.due = self.done, one.agreed.look > 0
        self._name_unused(one.agreed.unused)
        self.waiting_since = time.perf_counter()
        PULSE.step()
        return one

    def house(self, name: str) -> None:
        """Before a trainer's first step in a generation: memory comes from its group, the step's vector has as many
        workers as it, and all know the same of everybody's speed. Collective; and not earlier, since newcomers come to
        the places where a script makes its trainers at other times than the others.
        """
        operations, group = self.run.team.operations, self.run.team.group
        if self.housed == operations.number:
            return
        balance = self.balance
        group.enter(name)
        said = group.gather_json([None if balance is None else balance.state(), self.weights.kind])
        if balance is not None:
            balance.reform(operations.members, said[0][0])  # of who is here longest
        self.weights.kinds, self.weights.due = [kind for _, kind in said], True
        self.top.rehouse()
        self.layout, self.housed, self.updated = None, operations.number, 0.0

    def _weigh(self, balance: Balance, one: OneStep) -> None:
        """What a step tells of the workers' speeds. Only in the generation that it was computed in: its members know
        the same, and those of the next one tell each other.
        """
        balance.divide(tested=one.agreed.tested > 0, strict=one.agreed.strict + one.agreed.whole > 0)
        change = balance.learn(one.agreed.seconds) if one.whole.full else None
        if change is not None:
            about = {"trainer": self.trainer, "step": self.done, "workers": balance.members}
            self.run.journal.write("shares", **about, **dataclasses.asdict(change))
        for what, why in balance.news:
            self.run.decide(self.trainer, what, why)
        balance.news.clear()
        for what, why in balance.settled():
            self.run.say(f"{what}: {why}")

    def _tell(self, news: dict[str, tuple[str, str]]) -> None:
        """What somebody has observed, once: a decision and its reason, or what people would not know otherwise."""
        for kind in sorted(news.keys() - self.told):
            self.told.add(kind)
            what, why = news[kind]
            if why:
                self.run.decide(self.trainer, what, why)
            else:
                self.run.journal.write("note", trainer=self.trainer, step=self.done, text=what)
                self.run.say(what, once=True)

    def hear(self, said: list[Any]) -> None:
        """A part of a step that the team made before this newcomer was of it: one tensor of sums, or all the rest."""
        self.house("a step of others")
        if len(said) == 2:
            place, flat = said
            self.top.sums()[place].copy_(flat)
            return
        agreed, norm, expected, records = said
        orders = Orders(step=self.done, expected=expected, micro_batches=0)
        self.top.follow(Sums(records=records), Agreed(**agreed), orders, norm)
        self.done += 1

    def _name_unused(self, unused: tuple[int, ...]) -> None:
        if unused:
            names = list(self.job.named)
            shown = ", ".join(names[number] for number in unused[:5]) + (", ..." if len(unused) > 5 else "")
            self.run.say(
                f"{len(unused)} of {len(names)} parameters got no gradient and were left as they are: {shown}; "
                "freeze them with requires_grad_(False) if that is meant",
                once=True,
            )


class OneStep:
    """A step under way. Once it is done, `agreed`, `norm` (of the mean gradient), `lr` (the first group's learning rate
    in it), `whole` (the rows) and `spent` (seconds by part) tell of it.
    """

    agreed: Agreed
    norm: float
    whole: Rows
    spends = "steps"

    def __init__(self, stepper: Stepper, deal: Callable[[], Rows], name: str) -> None:
        self._of, self._deal, self._name = stepper, deal, name
        self.generation = -1  # that it was computed in last
        self._begun = False  # gradients have been touched
        self._sums: Sums | None = None
        self.news: dict[str, tuple[str, str]] = {}  # of all workers
        self.number = stepper.done
        self.lr = float(stepper.job.optimizers[0].param_groups[0]["lr"])
        self.spent: dict[str, float] = {}

    def compute(self) -> None:
        of = self._of
        group, began = of.run.team.group, time.perf_counter()
        self.generation = of.run.team.operations.number
        of.house(self._name)
        of.run.team.operations.reached("loading")
        for member in of.run.members:
            member.state.step_begins()
        whole = self._load()
        self._looks, of.weights.refused = group.size > 1 and of.weights.looks(self.number), True
        self._digest = of.weights.told() if self._looks else 0.0
        loaded = time.perf_counter()
        self._scale = 1.0 if of.scaling is None else of.scaling.scale
        self._orders = Orders(
            step=self.number,
            expected=(of.expected or float(whole.rows)) / self._scale,
            micro_batches=whole.count,
            rows=whole.rows,
            merge=of.merging.size,
            test=of.merging.undecided and not of.plan.one_by_one,
            collect=group.size > 1 or of.plan.exact,
            probe=of.plan.together == 1 and whole.count > 1,
            reverse=of.run.reverse,
            hooked="hooks" in of.told,
            cure=whole.cure,
            reached=of.run.team.operations.reached,
        )
        if of.run.team.operations.ahead.giving and not (of.plan.exact or of.scaling):  # sums in their last form only
            self._orders.summed = self._summed
        with of.streams.lent():
            group.enter(self._name, check=False, kind="gradients")
            while True:
                self._begun, self._ahead = True, 0
                sums = of.top.gradients(whole.micro_batches, self._orders)
                computed = time.perf_counter()
                self.agreed = self._agree(sums, whole, of.updated + computed - began)
                alone = self.agreed.strict + self.agreed.whole > 0 or not math.isfinite(self.agreed.loss)
                divided = whole.fine and alone
                if not (sums.redo or divided or self.agreed.failed or self._overflows()):
                    break
                self._again()
                of.top.abort(again=True)
                if self.agreed.failed:  # names of metrics may not be known yet
                    self._orders.merge, of.layout = 1, None
                if divided and of.balance is not None:  # it draws, say, or fails: everybody takes whole ones
                    of.balance.divide(tested=False, strict=True)
                    whole = self._load()
            if self.agreed.news:
                for told in group.gather_json(self._untold()):
                    self.news = {**told, **self.news}
            if self._looks:
                of.weights.judge(group, self.agreed.digests, undo=partial(of.top.abort, again=True))
            self._refuse(sums, self.agreed)
        for member in of.run.members:
            member.state.step_computed()
        self._sums = sums
        self._per_row = (computed - loaded) / max(1, sum(m.rows for m in whole.share))
        self.spent = {"data": loaded - began, "compute": computed - loaded}
        self._computed = computed

    def _load(self) -> Rows:
        """This worker's micro-batches, on its device."""
        whole = self.whole = self._deal()
        self._indivisible = [m.source for m in whole.micro_batches if not m.take_part()]
        for micro_batch in whole.micro_batches:
            micro_batch.batch = to_device(micro_batch.batch, self._of.job.device)
        return whole

    def _untold(self) -> dict[str, tuple[str, str]]:
        return {kind: said for kind, said in self._of.news.items() if kind not in self._of.told}

    def _summed(self, flat: torch.Tensor) -> None:
        """The next tensor of sums is there, while the backward goes on."""
        self._of.run.team.operations.ahead.put(self._of.trainer, self._ahead, flat)
        self._ahead += 1

    def _overflows(self) -> bool:
        """Whether the gradients are too large for the loss scale; then the step is computed again with half of it."""
        self._squares: float | None = None
        if self._of.scaling is None or not math.isfinite(self.agreed.loss):
            return False
        self._squares = exact_sum(self._of.top.squares(self._orders).tolist())
        if math.isfinite(self._squares) or self._scale <= 1:
            return False
        self._scale /= 2
        self._orders.expected *= 2
        return True

    def settle(self) -> Any:
        """The norm of the mean gradient."""
        self._of.run.team.operations.reached("reduced")
        squares = self._squares
        if squares is None:
            squares = exact_sum(self._of.top.squares(self._orders).tolist())
        norm = math.sqrt(squares) * self._orders.expected / self.agreed.count
        if not math.isfinite(norm):
            raise NonFiniteLossError(
                f"the gradient of step {self.number + 1} is not finite, though its loss is "
                f"({self.agreed.loss / self.agreed.count:.6g})",
                "the step was not applied; look for a square root, a division or a logarithm at 0",
            )
        return norm

    def apply(self, settled: Any) -> Any:
        of, reduced = self._of, time.perf_counter()
        assert self._sums is not None
        self.norm = settled
        if of.run.team.operations.ahead.giving:
            self._send_ahead()
            of.run.team.operations.ahead.copied()
        of.run.saving.copied()
        of.top.update(self._sums, self.agreed, self._orders, self.norm)
        of.done, of.weights.refused = self.number + 1, False
        of.expected = self.agreed.count
        if of.scaling is not None and (why := of.scaling.took(self._scale)):
            of.run.decide(of.trainer, f"loss scale {of.scaling.scale:g} from step {of.done + 1}", why)
        ended = time.perf_counter()
        of.updated = ended - reduced
        self.spent |= {"reduce": reduced - self._computed, "update": of.updated}
        self._rest(ended)
        return [dataclasses.asdict(self.agreed), self.norm, self.lr, [self.whole.rows, self.whole.epoch]]

    def applied(self) -> None:
        self._of.run.team.operations.reached("applied")
        began = time.perf_counter()
        self._of.top.gather_weights()
        self.spent["update"] += time.perf_counter() - began

    def _send_ahead(self) -> None:
        """To newcomers, what it takes to apply this step."""
        assert self._sums is not None
        put, trainer = self._of.run.team.operations.ahead.put, self._of.trainer
        for place, flat in enumerate(self._of.top.sums()):
            if place >= self._ahead:
                put(trainer, place, flat)
        put(trainer, dataclasses.asdict(self.agreed), self.norm, self._orders.expected, self._sums.records)

    def void(self) -> None:
        self._again()
        if self._begun:
            self._begun = False
            self._of.top.abort()

    def _again(self) -> None:
        for member in self._of.run.members:
            member.state.step_again()

    def taken(self, result: Any) -> Any:
        """This worker's own part was lost; the step was not."""
        self._of.weights.refused = False
        agreed, self.norm, self.lr, (rows, epoch) = result
        self.agreed = Agreed(**agreed)
        self.whole = Rows([], 0, rows, epoch)
        self._sums, self.spent = None, {}
        self._rest(time.perf_counter())
        return result

    def _rest(self, ended: float) -> None:
        """The seconds since the last step's end that are none of the other parts."""
        self.spent["other"] = max(0.0, ended - self._of.waiting_since - sum(self.spent.values()))

    def learn(self) -> tuple[str, str] | None:
        """What merging learns of the step."""
        if self._sums is None:
            return None
        return self._of.merging.learn(self._sums, self.agreed, self._per_row, len(self.whole.share))

    # -- the vector ---------------------------------------------------------------------------------------------

    def _agree(self, sums: Sums, whole: Rows, seconds: float) -> Agreed:
        """Sums of all workers; on the first step they first agree on the names of the metrics."""
        of, group, run = self._of, self._of.run.team.group, self._of.run
        of.news |= sums.news
        if of.layout is None:
            of.layout = self._first_layout(sums, whole)
        layout = of.layout
        if whole.share and not sums.failed and tuple(sorted(sums.metrics)) != layout.metrics:
            raise MetricError(
                f"the loss returned metrics {sorted(sums.metrics)}, before that {list(layout.metrics)}",
                "return the same names every time, with count 0 where there is nothing to count",
            )
        fields = {
            "count": sums.count,
            "loss": sums.loss,
            "tested": sums.tested,
            "strict": sums.strict,
            "whole": sums.whole or bool(self._indivisible),
            "failed": sums.failed,
            "news": bool(self._untold()),
            "stop": run.notice is not None,
            "save": run.wants_save(),
            "enter": run.team.operations.newcomers,
            "look": group.rank == 0 and group.size > 1 and of.weights.wish,
            **run.saving.fields,
        }
        packed = layout.pack(group.rank, seconds, sums.metrics, sums.unused, fields, self._digest)
        rows = layout.rows(sums.parts, whole.count) if of.plan.exact else []
        with PULSE.waiting():  # also where NCCL does
            vector = of.top.agree(torch.tensor(packed + rows, dtype=torch.float64), sums).tolist()
        agreed = layout.unpack(vector[: len(packed)])
        return layout.exactly(agreed, vector[len(packed) :]) if rows else agreed

    def _first_layout(self, sums: Sums, whole: Rows) -> VectorLayout:
        group = self._of.run.team.group
        names = group.gather_json(sorted(sums.metrics) if whole.share and not sums.failed else None)
        known = [(rank, name) for rank, name in enumerate(names) if name is not None]
        for rank, other in known:
            if other != known[0][1]:
                raise MetricError(
                    f"the loss returned metrics {known[0][1]} on worker {known[0][0]} and {other} on worker {rank}",
                    "return the same names everywhere, with count 0 where there is nothing to count",
                )
        return VectorLayout(tuple(known[0][1]) if known else (), group.size, len(self._of.job.named))

    def _refuse(self, sums: Sums, agreed: Agreed) -> None:
        """Refuses a step that cannot be applied: its loss is not finite, or there is nothing to take the mean over."""
        if not math.isfinite(agreed.loss):
            where = self._of.run.team.group.gather_json(sums.bad)
            names = self._of.run.team.group.names
            bad = [f"worker {names[rank]}: {rows}" for rank, some in enumerate(where) for rows in some]
            named = "; ".join(bad[:2]) + (f" and {len(bad) - 2} more" if len(bad) > 2 else "")
            raise NonFiniteLossError(
                f"the loss of step {self.number + 1} is not finite ({named})",
                "the step was not applied; look at these rows, lower the learning rate or set clip_norm=",
            )
        if agreed.count <= 0:
            raise UsageError(
                f"the loss of step {self.number + 1} counts {agreed.count:g} rows or tokens in the whole global batch",
                "return a positive count for at least one row of each global batch",
            )
