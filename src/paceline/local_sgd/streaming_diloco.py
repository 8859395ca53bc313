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
        shape = job.local_cuts[name].shape if name in job.local_cuts else param.shape
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
    """The sum of one fragment, on its way between the teams.

    `totals` has the sum of each row; several of them travel together in one of `flats`. `tally` sums the counts, and
    the teams that break off. Of a coded sum, `back` has what the codes of the sum left out, by the island that owns
    the stretch.
    """

    totals: list[torch.Tensor]
    tally: torch.Tensor
    flats: list[tuple[list[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    works: list[dist.Work | None] = field(default_factory=list)
    back: dict[int, torch.Tensor] = field(default_factory=dict)

    def land(self, group: Group) -> tuple[float, bool]:
        """Waits for the sum. Returns the count, and whether any team breaks off the round."""
        for work in self.works:
            group.finish(work)
        for totals, flat in self.flats:
            for total, part in zip(totals, flat.split([total.numel() for total in totals]), strict=True):
                total.copy_(part.view_as(total))
        count, broken = self.tally.tolist()
        return count, broken > 0


class StreamingDiLoCo(DiLoCo):
    """The islands of a plan with `fragments` or `outer_codec`: fragments are merged within the round."""

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

    def rebind(self) -> Iterator[str]:
        """Assigns islands to the teams of a new generation; streaming islands repeat the round from its start."""
        yield from super().rebind()
        if self._streams:  # what others had sent is gone: the round is done again from its start
            self.work.clear()

    def begin(self) -> None:
        """Begins a round: islands go on from their own weights in fragments that were merged before the last step."""
        fresh = [island for island in self.team_islands if island not in self.work]
        super().begin()
        positions = {
            _memory(local(param)): position for position, param in enumerate(self.replica.job.model.parameters())
        }
        with torch.no_grad():
            rows = map(local, self.rows)
            self._before = [
                self._start[positions[_memory(row)]] if _memory(row) in positions else row.clone() for row in rows
            ]
            self._merged, self._flight = [], None
            for island in fresh:
                if weights := self.work[island].inner.extra.pop("weights", None):
                    self.enter(island)
                    for number, name in enumerate(self._names_of(range(len(self.rows)))):
                        local(self.rows[number]).copy_(weights[name])
                    self.replica.complete()
        self.rest()

    def passed(self, step: int) -> bool:
        """Starts and completes the merges that are due after this step of the round; True: a team breaks it off."""
        number = len(self._merged)
        if number == len(self.parts):
            return False
        if step == self._ends[number] - self.delay:
            self._launch()
        return step == self._ends[number] and self._land()

    def ended(self) -> bool:
        """Merges the fragments that a shorter round has not reached; True: a team breaks the round off."""
        while len(self._merged) < len(self.parts):
            if self._flight is None:
                self._launch()
            if self._land():
                return True
        return False

    def break_off(self) -> None:
        """Breaks the round off: the other teams learn of it from the next fragment's sum."""
        while len(self._merged) < len(self.parts):
            if self._flight is None:
                self._launch(broken=True)
            if self._land():
                break

    def _counted(self, island: int) -> list[float]:
        """The count of an island since the last merge of each fragment."""
        one = self.work[island]
        before = one.inner.extra.get("counts", [])
        if len(before) != len(self.parts):
            before = one.inner.extra["counts"] = [0.0] * len(self.parts)
        return [count + one.count for count in before]

    @torch.no_grad()
    def _launch(self, broken: bool = False) -> None:
        """Starts the sum of the next fragment. Collective."""
        number = len(self._merged)
        part = self.parts[number]
        before = [self._before[row] for row in part]
        tally = torch.zeros(2, dtype=torch.float64)
        tally[1] = broken
        self._flight = flight = InFlightFragment(
            [torch.zeros_like(row, dtype=wide(row.dtype)) for row in before], tally
        )
        each: dict[int, list[torch.Tensor]] = {}
        for island in [] if broken else self.team_islands:
            self.enter(island)
            count, rows = self._counted(island)[number], [local(self.rows[row]) for row in part]
            tally[0] += count * self.first
            each[island] = [
                (was.to(total.dtype) - row.to(total.dtype)).mul_(count)
                for was, row, total in zip(before, rows, flight.totals, strict=True)
            ]
            self._add_left(island, self._names_of(part), each[island])
            if self._coded is None:  # then nothing is left
                self.work[island].inner.forget("left")
        self.twins.declare(f"fragment {number + 1} of {len(self.parts)} after {self.steps} steps", False, "merges")
        flight.works.append(self.twins.start_sum(tally))
        if self._coded is not None:
            self._coded.start(flight, part, each)
        else:
            for deltas in each.values() if self.first else ():
                for total, delta in zip(flight.totals, deltas, strict=True):
                    total += delta
            groups = kinds(flight.totals, 1 << 62)
            flight.flats = [(alike, torch.cat([total.reshape(-1) for total in alike])) for alike in groups]
            flight.works += [self.twins.start_sum(flat) for _, flat in flight.flats]
        if self.twins.size > 1:
            ENGINE.in_background()

    @torch.no_grad()
    def _land(self) -> bool:
        """Completes the sum of a fragment, and merges it into all islands; True: a team broke off. Collective."""
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
        for island in self.team_islands if self._streams else ():  # else the round ends, and may be ended again
            self.enter(island)
            counts = self._counted(island)
            self.work[island].inner.extra["counts"][number] -= counts[number]
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
        left = self.work[island].inner.extra.get("left")
        return kept | ({"left": left} if left else {})

    def apply(self, count: float, steps: int) -> None:
        """Takes over the weights that the merges of the round have made."""
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
        merged = [tensor for made, state in self._merged for tensor in (*made, *_tensors(state))]
        return [*merged, *self._before]


def _memory(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _tensors(state: Any) -> list[torch.Tensor]:
    return [value for kept in state.values() for value in kept.values() if isinstance(value, torch.Tensor)]


class QuantizedOuterSync:
    """Sums the coded deltas of all islands, with error feedback.

    Each island owns a stretch of whole blocks of a fragment. The team that computes the island decodes all islands'
    codes of the stretch, adds them up in float64 in the order of the islands, and sends codes of the sums to all. What
    these codes leave out is added to the island's residual. So the sums have the same bits on every worker, and do not
    depend on which team computes which island.
    """

    def __init__(self, code: Code | None, islands: StreamingDiLoCo) -> None:
        assert code is not None
        self.code, self.islands = code, islands

    @cached_property
    def _block(self) -> int:
        """The size of one block's codes in bytes."""
        return self.code.encode(torch.zeros(1, BLOCK, dtype=torch.float32)).numel()

    def _stretches(self, length: int) -> list[range]:
        """The range of elements that each island owns, of `length` elements."""
        shares = deal(-(-length // BLOCK), [1.0] * self.islands.count)
        return [range(share.start * BLOCK, min(share.stop * BLOCK, length)) for share in shares]

    def _size(self, stretch: range) -> int:
        return -(-len(stretch) // BLOCK) * self._block

    def _encode(self, flat: torch.Tensor) -> torch.Tensor:
        return self.code.encode(flat.float()[None])[0] if len(flat) else torch.empty(0, dtype=torch.uint8)

    def _decode(self, codes: torch.Tensor, length: int) -> torch.Tensor:
        return self.code.decode(codes[None], length)[0] if length else torch.empty(0, dtype=torch.float32)

    def start(self, flight: InFlightFragment, part: Sequence[int], each: dict[int, list[torch.Tensor]]) -> None:
        """Starts the sum of the rows of fragment `part`; `each` has the deltas of this team's islands. Collective."""
        isles, twins = self.islands, self.islands.twins
        length = sum(total.numel() for total in flight.totals)
        stretches, names = self._stretches(length), isles._names_of(part)
        codes: dict[int, list[torch.Tensor]] = {}
        for island in isles.team_islands:
            deltas = [delta.cpu().view(-1) for delta in each.get(island, ())]
            owed = torch.cat(deltas) if deltas else torch.zeros(length, dtype=torch.float32)
            codes[island] = [self._encode(owed[s.start : s.stop]) for s in stretches]
            if island in each:
                for s, sent in zip(stretches, codes[island], strict=True):
                    owed[s.start : s.stop] -= self._decode(sent, len(s))
                left = owed.split([total.numel() for total in flight.totals])
                shaped = (one.view_as(total) for one, total in zip(left, flight.totals, strict=True))
                isles.work[island].inner.extra.setdefault("left", {}).update(zip(names, shaped, strict=True))
        # By twin: the islands of its team; and these again if it sends for the team, else none.
        has = {number: islands_of_team for team, islands_of_team in isles.teams for number in team}
        speaks = {
            number: islands_of_team if number == team[0] else []
            for team, islands_of_team in isles.teams
            for number in team
        }
        ins, outs = [], []
        for number in range(twins.size):
            to = [codes[i][j] for i in speaks[twins.rank] for j in has[number]]
            ins.append(torch.cat(to) if to else torch.empty(0, dtype=torch.uint8))
            size = len(speaks[number]) * sum(self._size(stretches[j]) for j in isles.team_islands)
            outs.append(torch.empty(size, dtype=torch.uint8))
        flat = torch.empty(length, dtype=torch.float32)
        flight.flats = [(flight.totals, flat)]

        def steps(hosts: HierarchicalTransport | None, fp: int) -> Steps:
            if hosts is None:
                outs[0].copy_(ins[0])
            else:
                yield from hosts.all_to_all(outs, ins, fp)
            sums = self._sums(outs, speaks, stretches, flight)
            codes_of_sums = torch.cat([sums[j] for j in speaks[twins.rank]] or [torch.empty(0, dtype=torch.uint8)])
            longest = max(sum(self._size(stretches[j]) for j in islands_of_team) for islands_of_team in speaks.values())
            everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(twins.size)]
            padded = torch.nn.functional.pad(codes_of_sums, (0, longest - len(codes_of_sums)))
            if hosts is None:
                everyone[0].copy_(padded)
            else:
                yield from hosts.all_gather(everyone, padded, fp)
            for number, islands_of_team in speaks.items():
                sizes = [self._size(stretches[j]) for j in islands_of_team]
                for j, sent in zip(islands_of_team, everyone[number][: sum(sizes)].split(sizes), strict=True):
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
        """Decodes and sums the stretches of this team's islands, and returns the codes of the sums by island."""
        team_islands, got = self.islands.team_islands, dict[tuple[int, int], torch.Tensor]()
        for number, spoken_for in speaks.items():
            pairs = [(i, j) for i in spoken_for for j in team_islands]
            got |= zip(pairs, outs[number].split([self._size(stretches[j]) for _, j in pairs]), strict=True)
        sums = {}
        for j in team_islands:
            total = torch.zeros(len(stretches[j]), dtype=torch.float64)
            for i in range(self.islands.count):
                total += self._decode(got[i, j], len(stretches[j]))
            sums[j] = self._encode(total)
            flight.back[j] = total - self._decode(sums[j], len(stretches[j]))
        return sums

    def keep(self, flight: InFlightFragment, part: Sequence[int]) -> None:
        """Adds what the codes of the sums left out to the residuals of the islands that own the stretches."""
        names, length = self.islands._names_of(part), sum(total.numel() for total in flight.totals)
        stretches = self._stretches(length)
        for island, back in flight.back.items():
            left = self.islands.work[island].inner.extra["left"]
            flat = torch.cat([left[name].view(-1) for name in names])
            flat[stretches[island].start : stretches[island].stop] += back
            for name, residual in zip(names, flat.split([left[name].numel() for name in names]), strict=True):
                left[name] = residual.view_as(left[name]).clone()
