"""Streaming DiLoCo: merges fragments of the model while islands keep training.

Of a round of H steps and F fragments, the sum of fragment f = 0, 1, ... begins `delay` steps before the end of step
(f + 1) * H // F, and travels while islands go on. Then the outer optimizer moves the fragment's weights, and all
islands go on from these: what they made of them meanwhile is void. So nothing is under way when a round ends, and what
it has made counts as a whole. Between two rounds the model holds what was merged last; what an island has come to in
other fragments since their merges is its own.

An island's part in a fragment's mean weighs as much as what it has counted since the fragment's last merge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.batching import deal
from paceline.base.mesh import Mesh
from paceline.base.text import plural
from paceline.comm.communicator import Group
from paceline.comm.compression import BLOCK, Code, coded_sum
from paceline.comm.error_feedback import wide
from paceline.comm.hierarchical import HierarchicalTransport
from paceline.comm.progress_engine import ENGINE, Steps
from paceline.compute.blocks import blocks_of
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import local
from paceline.errors import PlanError
from paceline.local_sgd.diloco import DiLoCo, outer_optimizer
from paceline.parallel.data_parallel import kinds
from paceline.parallel.pipeline.partition import even
from paceline.plan import Plan
from paceline.train.replica import Replica


def divided(job: TrainingJob, plan: Plan) -> list[range]:
    """The numbers of the parameters of each fragment: whole blocks of the model and parameters beside them, in its
    order, so that the largest is as small as can be. Raises PlanError where there are fewer of these.
    """
    count, blocks, units = plan.fragments or 1, list(blocks_of(job.model)), list[tuple[str, int, int]]()
    for name, param in job.named.items():
        shape = job.own_cuts[name].shape if name in job.own_cuts else param.shape
        size = math.prod(shape) * param.element_size()
        unit = next((block for block in blocks if name.startswith(f"{block}.")), name)
        if units and units[-1][0] == unit:
            units[-1] = unit, units[-1][1] + size, units[-1][2] + 1
        else:
            units.append((unit, size, 1))
    if len(units) < count:
        what = f"fragments={count}: the model has {len(units)} blocks and parameters beside them"
        raise PlanError(what, f"say fragments={len(units)} or less")
    starts = even([size for _, size, _ in units], count)
    firsts = [sum(params for *_, params in units[:start]) for start in (*starts, len(units))]
    return [range(first, end) for first, end in pairwise(firsts)]


@dataclass
class InFlightFragment:
    """A fragment's sum under way: `totals` of each row, which come in `flats` of some together; `said`, the sum of
    counts and of those who break off; and of a coded sum, by island, the part of the sum that its stretch left out.
    """

    totals: list[torch.Tensor]
    said: torch.Tensor
    flats: list[tuple[list[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    works: list[dist.Work | None] = field(default_factory=list)
    back: dict[int, torch.Tensor] = field(default_factory=dict)

    def land(self, group: Group) -> tuple[float, bool]:
        """Waits for it: the count, and whether somebody breaks off."""
        for work in self.works:
            group.finish(work)
        for some, flat in self.flats:
            for total, part in zip(some, flat.split([total.numel() for total in some]), strict=True):
                total.copy_(part.view_as(total))
        count, broken = self.said.tolist()
        return count, broken > 0


class StreamingDiLoCo(DiLoCo):
    """Islands whose plan says `fragments` or `outer_codec`."""

    def __init__(self, replica: Replica, group: Group, mesh: Mesh, plan: Plan) -> None:
        super().__init__(replica, group, mesh, plan)
        self.parts, self.delay = divided(replica.job, plan), plan.delay or 0
        count, every = len(self.parts), plan.every or 1
        self._ends = [(number + 1) * every // count for number in range(count)]
        self._streams = count > 1 or self.delay > 0
        self.manner = f", in {count} fragments" if count > 1 else ""
        self.manner += f", whose sums travel for {plural(self.delay, 'step')}" if self.delay else ""
        self._coded = None if plan.outer_codec is None else QuantizedOuterSync(coded_sum(plan.outer_codec).code, self)
        self.manner += f", as {plan.outer_codec}" if plan.outer_codec else ""
        self._at_end = []
        self._before: list[torch.Tensor] = []  # rows as they were when the round began
        # Of each fragment: rows, and the optimizer's state.
        self._merged: list[tuple[list[torch.nn.Parameter], Any]] = []
        self._flight: InFlightFragment | None = None

    # -- a round ----------------------------------------------------------------------------------------------------

    def house(self) -> Iterator[str]:
        yield from super().house()
        if self._streams:  # what others had sent is gone: the round is done again from its start
            self.work.clear()

    def begin(self) -> None:
        fresh = [island for island in self.mine if island not in self.work]
        super().begin()
        here = {_memory(local(param)): place for place, param in enumerate(self.replica.job.model.parameters())}
        with torch.no_grad():
            rows = map(local, self.rows)
            self._before = [self._start[here[_memory(row)]] if _memory(row) in here else row.clone() for row in rows]
            self._merged, self._flight = [], None
            for island in fresh:
                if weights := self.work[island].inner.beside.pop("weights", None):
                    self.enter(island)
                    for number, name in enumerate(self._names_of(range(len(self.rows)))):
                        local(self.rows[number]).copy_(weights[name])
                    self.replica.complete()
        self.rest()

    def passed(self, step: int) -> bool:
        number = len(self._merged)
        if number == len(self.parts):
            return False
        if step == self._ends[number] - self.delay:
            self._launch()
        return step == self._ends[number] and self._land()

    def ended(self) -> bool:
        """A shorter round merges here what it has not come to."""
        while len(self._merged) < len(self.parts):
            if self._flight is None:
                self._launch()
            if self._land():
                return True
        return False

    def break_off(self) -> None:
        """Others learn of it by the next fragment."""
        while len(self._merged) < len(self.parts):
            if self._flight is None:
                self._launch(broken=True)
            if self._land():
                break

    def _counted(self, island: int) -> list[float]:
        """By fragment, what an island has counted since its merge."""
        one = self.work[island]
        before = one.inner.beside.get("counts", [])
        if len(before) != len(self.parts):
            before = one.inner.beside["counts"] = [0.0] * len(self.parts)
        return [count + one.count for count in before]

    @torch.no_grad()
    def _launch(self, broken: bool = False) -> None:
        """The sum of the next fragment begins. Collective."""
        number = len(self._merged)
        part = self.parts[number]
        before = [self._before[row] for row in part]
        said = torch.zeros(2, dtype=torch.float64)
        said[1] = broken
        self._flight = flight = InFlightFragment([torch.zeros_like(row, dtype=wide(row.dtype)) for row in before], said)
        each: dict[int, list[torch.Tensor]] = {}
        for island in [] if broken else self.mine:
            self.enter(island)
            count, rows = self._counted(island)[number], [local(self.rows[row]) for row in part]
            said[0] += count * self.first
            each[island] = [
                (was.to(total.dtype) - row.to(total.dtype)).mul_(count)
                for was, row, total in zip(before, rows, flight.totals, strict=True)
            ]
            self._add_left(island, self._names_of(part), each[island])
            if self._coded is None:  # then nothing is left
                self.work[island].inner.forget("left")
        self.twins.enter(f"fragment {number + 1} of {len(self.parts)} after {self.steps} steps", False, "merges")
        flight.works.append(self.twins.start_sum(said))
        if self._coded is not None:
            self._coded.start(flight, part, each)
        else:
            for deltas in each.values() if self.first else ():
                for total, delta in zip(flight.totals, deltas, strict=True):
                    total += delta
            some = kinds(flight.totals, 1 << 62)
            flight.flats = [(alike, torch.cat([total.reshape(-1) for total in alike])) for alike in some]
            flight.works += [self.twins.start_sum(flat) for _, flat in flight.flats]
        if self.twins.size > 1:
            ENGINE.in_background()

    @torch.no_grad()
    def _land(self) -> bool:
        """The sum of a fragment has arrived: its weights are merged, and those of all islands. Collective."""
        assert self._flight is not None
        number, flight, self._flight = len(self._merged), self._flight, None
        count, broken = flight.land(self.twins)
        if broken:
            return True
        part = self.parts[number]
        if self._coded is not None and count > 0:
            self._coded.keep(flight, part)
        made = [torch.nn.Parameter(self._before[row].clone()) for row in part]
        merges = outer_optimizer(self.word, made)
        for row, one, total in zip(part, made, flight.totals, strict=True):
            kept = self.outer.state.get(self.rows[row], {})
            merges.state[one] = {key: t.clone() if isinstance(t, torch.Tensor) else t for key, t in kept.items()}
            one.grad = (total / count).to(one.dtype) if count > 0 else None  # where nothing counted, none has moved
        merges.step()
        for one in made:
            one.grad = None
        self._merged.append((made, merges.state))
        for island in self.mine if self._streams else ():  # else the round ends, and may be ended again
            self.enter(island)
            counts = self._counted(island)
            self.work[island].inner.beside["counts"][number] -= counts[number]
            for row, one in zip(part, made, strict=True):
                local(self.rows[row]).copy_(one.detach().view_as(local(self.rows[row])))
            self.replica.complete()
        return False

    @torch.no_grad()
    def _beside(self, island: int) -> dict[str, Any]:
        kept: dict[str, Any] = {"counts": self._counted(island)} if self._streams else {}
        if len(self.parts) > 1:
            self.enter(island)
            names = self._names_of(range(len(self.rows)))
            kept["weights"] = {name: local(row).clone() for name, row in zip(names, self.rows, strict=True)}
            self.rest()
        left = self.work[island].inner.beside.get("left")
        return kept | ({"left": left} if left else {})

    def apply(self, count: float, steps: int) -> None:
        merged, self._merged = self._merged, []
        with torch.no_grad():
            for part, (made, state) in zip(self.parts, merged, strict=True):
                for number, one in zip(part, made, strict=True):
                    row = self.rows[number]
                    local(row).copy_(one.detach().view_as(local(row)))
                    self.outer.state[row], row.grad = state[one], None
        super().apply(count, steps)
        self._before = []

    def _merges(self) -> list[torch.Tensor]:
        found = [tensor for made, state in self._merged for tensor in (*made, *_tensors(state))]
        return [*found, *self._before]


def _memory(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _tensors(state: Any) -> list[torch.Tensor]:
    return [value for kept in state.values() for value in kept.values() if isinstance(value, torch.Tensor)]


class QuantizedOuterSync:
    """How far `islands` have come, as codes: each island's with what its codes left out before. An island has a stretch
    of whole blocks of a fragment; whoever computes it decodes everybody's codes of that, adds them up in float64 in the
    order of the islands, and sends codes of the sums to all. What these leave out it adds to what its island's did. So
    the sums have the same bits on every worker, and do not depend on who computes which island.
    """

    def __init__(self, code: Code | None, islands: StreamingDiLoCo) -> None:
        assert code is not None
        self.code, self.islands = code, islands

    @cached_property
    def _block(self) -> int:
        """Bytes of a block's codes."""
        return self.code.encode(torch.zeros(1, BLOCK, dtype=torch.float32)).numel()

    def _stretches(self, length: int) -> list[range]:
        """Of so many elements those of each island."""
        shares = deal(-(-length // BLOCK), [1.0] * self.islands.count)
        return [range(share.start * BLOCK, min(share.stop * BLOCK, length)) for share in shares]

    def _size(self, stretch: range) -> int:
        return -(-len(stretch) // BLOCK) * self._block

    def _encode(self, flat: torch.Tensor) -> torch.Tensor:
        return self.code.encode(flat.float()[None])[0] if len(flat) else torch.empty(0, dtype=torch.uint8)

    def _decode(self, codes: torch.Tensor, length: int) -> torch.Tensor:
        return self.code.decode(codes[None], length)[0] if length else torch.empty(0, dtype=torch.float32)

    def start(self, flight: InFlightFragment, part: Sequence[int], each: dict[int, list[torch.Tensor]]) -> None:
        """Starts summing what `each` island here sends of the rows of a `part`. Collective."""
        isles, twins = self.islands, self.islands.twins
        length = sum(total.numel() for total in flight.totals)
        stretches, names = self._stretches(length), isles._names_of(part)
        codes: dict[int, list[torch.Tensor]] = {}
        for island in isles.mine:
            deltas = [delta.cpu().view(-1) for delta in each.get(island, ())]
            owed = torch.cat(deltas) if deltas else torch.zeros(length, dtype=torch.float32)
            codes[island] = [self._encode(owed[s.start : s.stop]) for s in stretches]
            if island in each:
                for s, sent in zip(stretches, codes[island], strict=True):
                    owed[s.start : s.stop] -= self._decode(sent, len(s))
                left = owed.split([total.numel() for total in flight.totals])
                shaped = (one.view_as(total) for one, total in zip(left, flight.totals, strict=True))
                isles.work[island].inner.beside.setdefault("left", {}).update(zip(names, shaped, strict=True))
        # By twin: its islands, and those that it speaks for.
        has = {number: some for team, some in isles.teams for number in team}
        speaks = {number: some if number == team[0] else [] for team, some in isles.teams for number in team}
        ins, outs = [], []
        for number in range(twins.size):
            to = [codes[i][j] for i in speaks[twins.rank] for j in has[number]]
            ins.append(torch.cat(to) if to else torch.empty(0, dtype=torch.uint8))
            size = len(speaks[number]) * sum(self._size(stretches[j]) for j in isles.mine)
            outs.append(torch.empty(size, dtype=torch.uint8))
        flat = torch.empty(length, dtype=torch.float32)
        flight.flats = [(flight.totals, flat)]

        def steps(hosts: HierarchicalTransport | None, fp: int) -> Steps:
            if hosts is None:
                outs[0].copy_(ins[0])
            else:
                yield from hosts.all_to_all(outs, ins, fp)
            sums = self._sums(outs, speaks, stretches, flight)
            mine = torch.cat([sums[j] for j in speaks[twins.rank]] or [torch.empty(0, dtype=torch.uint8)])
            longest = max(sum(self._size(stretches[j]) for j in some) for some in speaks.values())
            everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(twins.size)]
            padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
            if hosts is None:
                everyone[0].copy_(padded)
            else:
                yield from hosts.all_gather(everyone, padded, fp)
            for number, some in speaks.items():
                sizes = [self._size(stretches[j]) for j in some]
                for j, sent in zip(some, everyone[number][: sum(sizes)].split(sizes), strict=True):
                    flat[stretches[j].start : stretches[j].stop] = self._decode(sent, len(stretches[j]))

        if length:
            flight.works.append(twins.start_steps(-(-length // BLOCK) * self._block, steps))

    def _sums(
        self,
        outs: Sequence[torch.Tensor],
        speaks: dict[int, list[int]],
        stretches: Sequence[range],
        flight: InFlightFragment,
    ) -> dict[int, torch.Tensor]:
        """Codes of the sums of the own stretches, from everybody's codes of them."""
        mine, got = self.islands.mine, dict[tuple[int, int], torch.Tensor]()
        for number, some in speaks.items():
            pairs = [(i, j) for i in some for j in mine]
            got |= zip(pairs, outs[number].split([self._size(stretches[j]) for _, j in pairs]), strict=True)
        sums = {}
        for j in mine:
            total = torch.zeros(len(stretches[j]), dtype=torch.float64)
            for i in range(self.islands.count):
                total += self._decode(got[i, j], len(stretches[j]))
            sums[j] = self._encode(total)
            flight.back[j] = total - self._decode(sums[j], len(stretches[j]))
        return sums

    def keep(self, flight: InFlightFragment, part: Sequence[int]) -> None:
        """What the codes of sums left out is sent by the islands whose stretches they are."""
        names, length = self.islands._names_of(part), sum(total.numel() for total in flight.totals)
        stretches = self._stretches(length)
        for island, back in flight.back.items():
            left = self.islands.work[island].inner.beside["left"]
            flat = torch.cat([left[name].view(-1) for name in names])
            flat[stretches[island].start : stretches[island].stop] += back
            for name, some in zip(names, flat.split([left[name].numel() for name in names]), strict=True):
                left[name] = some.view_as(left[name]).clone()
