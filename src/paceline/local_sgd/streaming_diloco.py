"""Streaming DiLoCo: merges fragments of the model one by one, while islands keep taking inner steps.

Douillard et al., "Streaming DiLoCo with overlapping communication", 2025. Of a round of H inner steps and F fragments:

1. Fragment f = 0, 1, ... is due at the end of step (f + 1) * H // F. `delay` steps before, all islands send what it
   has moved from the anchor: the sum, its outer gradient, travels while islands take inner steps (overlap).
2. The sums may travel as codes of few bits (`QuantizedOuterSync`).
3. When the fragment is due, the outer optimizer moves its anchor, and all islands continue from there: their steps on
   this fragment in the meantime are void.

So nothing is on its way when a round ends, and the round counts as a whole. Between two rounds the model holds what was
merged last; each island has weights of its own in the fragments that were merged earlier. An island's weight in the
mean of a fragment is what it has counted since the fragment was last merged.

The loop over inner steps is in `round.py`, which calls the public methods of `StreamingDiLoCo` in their order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

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
from paceline.local_sgd.island_migration import copy_sole_states
from paceline.local_sgd.island_state import Islands
from paceline.local_sgd.merging import OUTER, IslandSums, add_residual, merge_buffers, outer_optimizer, sum_islands
from paceline.parallel.data_parallel import kinds
from paceline.parallel.pipeline.partition import even
from paceline.plan import Plan
from paceline.train.replica import Replica


def divide_into_fragments(job: TrainingJob, plan: Plan) -> list[slice]:
    """Divides the parameters into the plan's fragments, and returns the slice of each.

    A fragment has complete blocks of the model and parameters outside blocks, in the model's order, so that the largest
    fragment is as small as can be. Raises PlanError if there are more fragments than blocks and such parameters.
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
        what = f"fragments={count}: the model has only {len(units)} blocks and parameters outside blocks"
        raise PlanError(what, f"set fragments={len(units)} or less")
    starts = even([size for _, size, _ in units], count)
    firsts = [sum(params for *_, params in units[:start]) for start in (*starts, len(units))]
    return [slice(first, end) for first, end in pairwise(firsts)]


@dataclass
class InFlightFragment:
    """The sum of a fragment's outer gradient over the worker groups, on its way.

    `totals` has the sum of each parameter; several of them travel together in one of `flats`. `tally` sums the counts,
    and the groups that break off the round. Of a sum as codes, `omitted` has what the codes of the sum leave out, by
    the island that owns the stretch.
    """

    totals: list[torch.Tensor]
    tally: torch.Tensor
    flats: list[tuple[list[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    works: list[dist.Work | None] = field(default_factory=list)
    omitted: dict[int, torch.Tensor] = field(default_factory=dict)

    def wait(self, group: Group) -> tuple[float, bool]:
        """Waits for the sum. Returns the count, and whether any worker group breaks off the round."""
        for work in self.works:
            group.finish(work)
        for totals, flat in self.flats:
            for total, part in zip(totals, flat.split([total.numel() for total in totals]), strict=True):
                total.copy_(part.view_as(total))
        count, broken = self.tally.tolist()
        return count, broken > 0


class MergedFragment(NamedTuple):
    """The parameters of a fragment after its outer step in this round, and the outer optimizer's state of them."""

    params: list[torch.nn.Parameter]
    state: Mapping[Any, Any]


class StreamingDiLoCo:
    """Merges the islands of a plan with `fragments` or `outer_codec`, fragment by fragment within a round."""

    streams = True  # whether fragments are merged within a round

    def __init__(self, replica: Replica, group: Group, mesh: Mesh, plan: Plan) -> None:
        self.islands = Islands(replica, group, mesh, plan.local or 1)
        self._outer_word = plan.outer or OUTER
        self.outer = outer_optimizer(self._outer_word, self.islands.params)
        self.peak_bytes = 0, 0  # of weights in addition to those in the model, and of optimizer states
        self._fragments, self._delay = divide_into_fragments(replica.job, plan), plan.delay or 0
        count, every = len(self._fragments), plan.every or 1
        self._due_steps = [(number + 1) * every // count for number in range(count)]
        # Whether islands go on after a merge. Then a worker that is lost takes along what others have sent, and all
        # islands repeat the round.
        self.repeats_rounds = count > 1 or self._delay > 0
        code = None if plan.outer_codec is None else coded_sum(plan.outer_codec).code
        self._quantized = None if code is None else QuantizedOuterSync(code, self.islands)
        self.description = f", in {count} fragments" if count > 1 else ""  # of how islands are merged, for users
        self.description += f", with a delay of {plural(self._delay, 'step')}" if self._delay else ""
        self.description += f", sent as {plan.outer_codec}" if plan.outer_codec else ""
        self._anchor: list[torch.Tensor] = []  # of each parameter
        self._merged: list[MergedFragment] = []
        self._in_flight: InFlightFragment | None = None
        self._buffer_sums = IslandSums([], [], [])

    @torch.no_grad()
    def begin_round(self) -> None:
        """Begins a round. Islands continue with their own weights in fragments merged before the last step."""
        islands = self.islands
        beginning = islands.begin_round()
        self._anchor = islands.anchor_of(islands.params)
        self._merged, self._in_flight = [], None
        for island in beginning:
            if weights := islands.progress[island].inner.extra.pop("weights", None):
                islands.enter(island)
                for name, param in zip(islands.names, islands.params, strict=True):
                    local(param).copy_(weights[name])
                islands.replica.complete()
        islands.leave()

    def after_inner_step(self, step: int) -> bool:
        """Starts and completes the merges that are due after inner step `step`. Returns whether a worker group breaks
        the round off.
        """
        number = len(self._merged)
        if number == len(self._fragments):
            return False
        if step == self._due_steps[number] - self._delay:
            self._send_fragment()
        return step == self._due_steps[number] and self._merge_fragment()

    def after_last_inner_step(self, breaks_off: bool = False) -> bool:
        """Merges the fragments that are left, after a shorter round. Returns whether a worker group breaks it off.

        With `breaks_off` this group does: the others learn of it from the sum of the next fragment.
        """
        while len(self._merged) < len(self._fragments):
            if self._in_flight is None:
                self._send_fragment(breaks_off)
            if self._merge_fragment():
                return True
        return False

    def sum_outer_gradients(self, name: str, steps: int, merged: Collection[int], late: dict[int, list[int]]) -> None:
        """Sums what is left to merge at the end of the round: the buffers. Collective.

        Also prepares the islands' states after `steps` steps, which take effect with the outer step.
        """
        islands = self.islands
        extra = {island: self._extra_state(island) for island in islands.local_islands if island in merged}
        islands.prepare(steps, merged, late, extra)
        self._buffer_sums = sum_islands(islands, name, merged)
        copy_sole_states(islands, steps, merged)
        made = [tensor for fragment in self._merged for tensor in (*fragment.params, *_tensors(fragment.state))]
        self.peak_bytes = islands.measure(self.outer, [*self._buffer_sums.buffers, *made, *self._anchor])

    @torch.no_grad()
    def outer_step(self, count: float, steps: int) -> None:
        """Puts the outer steps of all fragments into effect. The round counts from here."""
        for fragment, merged in zip(self._fragments, self._merged, strict=True):
            for param, made in zip(self.islands.params[fragment], merged.params, strict=True):
                local(param).copy_(made.detach().view_as(local(param)))
                self.outer.state[param], param.grad = merged.state[made], None
        merge_buffers(self.islands, self._buffer_sums, count)
        self._anchor, self._merged, self._buffer_sums = [], [], IslandSums([], [], [])
        self.islands.commit(steps)

    # -- a fragment -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _send_fragment(self, breaks_off: bool = False) -> None:
        """Starts the sum of the next fragment's outer gradient over all islands. Collective."""
        islands, number = self.islands, len(self._merged)
        fragment = self._fragments[number]
        names, params, anchor = islands.names[fragment], islands.params[fragment], self._anchor[fragment]
        totals = [torch.zeros_like(before, dtype=wide(before.dtype)) for before in anchor]
        tally = torch.tensor([0.0, breaks_off], dtype=torch.float64)
        deltas: dict[int, list[torch.Tensor]] = {}
        for island in [] if breaks_off else islands.local_islands:
            progress, count = islands.enter(island), self._counts_since_merge(island)[number]
            tally[0] += count * islands.is_first_replica
            deltas[island] = [
                (before.to(total.dtype) - local(param).to(total.dtype)).mul_(count)
                for before, param, total in zip(anchor, params, totals, strict=True)
            ]
            add_residual(islands, island, names, deltas[island])
            if self._quantized is None:  # then nothing is left out
                progress.inner.drop_residual()
        twins = islands.twins
        twins.declare(f"fragment {number + 1} of {len(self._fragments)} after {islands.steps} steps", False, "merges")
        self._in_flight = flight = InFlightFragment(totals, tally, works=[twins.start_sum(tally)])
        if self._quantized is not None:
            self._quantized.start(flight, names, deltas)
        else:
            for island_deltas in deltas.values() if islands.is_first_replica else ():
                for total, delta in zip(totals, island_deltas, strict=True):
                    total += delta
            groups = kinds(totals, 1 << 62)
            flight.flats = [(alike, torch.cat([total.reshape(-1) for total in alike])) for alike in groups]
            flight.works += [twins.start_sum(flat) for _, flat in flight.flats]
        if twins.size > 1:
            ENGINE.in_background()

    @torch.no_grad()
    def _merge_fragment(self) -> bool:
        """Completes the sum of a fragment, takes its outer step, and puts the result into all islands. Collective.

        Returns whether a worker group breaks the round off.
        """
        assert self._in_flight is not None
        islands, number = self.islands, len(self._merged)
        flight, self._in_flight = self._in_flight, None
        count, broken = flight.wait(islands.twins)
        if broken:
            return True
        fragment = self._fragments[number]
        params = islands.params[fragment]
        if self._quantized is not None and count > 0:
            self._quantized.keep_omitted(flight, islands.names[fragment])
        made = [torch.nn.Parameter(before.clone()) for before in self._anchor[fragment]]
        outer = outer_optimizer(self._outer_word, made)
        for param, merged, total in zip(params, made, flight.totals, strict=True):
            state = self.outer.state.get(param, {})
            outer.state[merged] = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in state.items()}
            merged.grad = (total / count).to(merged.dtype) if count > 0 else None  # else no island has moved
        outer.step()
        outer.zero_grad()
        self._merged.append(MergedFragment(made, outer.state))
        for island in islands.local_islands if self.repeats_rounds else ():  # else the round ends here
            progress, counts = islands.enter(island), self._counts_since_merge(island)
            progress.inner.extra["counts"][number] -= counts[number]
            for target, merged in zip(map(local, params), made, strict=True):
                target.copy_(merged.detach().view_as(target))
            islands.replica.complete()
        return False

    def _counts_since_merge(self, island: int) -> list[float]:
        """Returns what an island has counted since the last merge of each fragment."""
        progress = self.islands.progress[island]
        before = progress.inner.extra.get("counts", [])
        if len(before) != len(self._fragments):
            before = progress.inner.extra["counts"] = [0.0] * len(self._fragments)
        return [count + progress.count for count in before]

    @torch.no_grad()
    def _extra_state(self, island: int) -> dict[str, Any]:
        """Returns the state that an island keeps for the next round in addition to its inner optimizer state."""
        islands, extra = self.islands, dict[str, Any]()
        if self.repeats_rounds:
            extra["counts"] = self._counts_since_merge(island)
        if len(self._fragments) > 1:
            islands.enter(island)
            weights = zip(islands.names, islands.params, strict=True)
            extra["weights"] = {name: local(param).clone() for name, param in weights}
            islands.leave()
        if residual := islands.progress[island].inner.extra.get("left"):
            extra["left"] = residual
        return extra


def _tensors(state: Mapping[Any, Any]) -> list[torch.Tensor]:
    return [value for kept in state.values() for value in kept.values() if isinstance(value, torch.Tensor)]


class QuantizedOuterSync:
    """Sums the deltas of all islands as codes of few bits, with error feedback.

    Each island owns a stretch of whole blocks of a fragment. The worker group that computes the island decodes all
    islands' codes of the stretch, adds them up in float64 in the order of the islands, and sends codes of the sums to
    all. What codes leave out is the pending residual of the island that sent them: its own deltas, and the sums of its
    stretch. So the sums have the same bits on every worker, and do not depend on which group computes which island.
    """

    def __init__(self, code: Code, islands: Islands) -> None:
        self._code, self._islands = code, islands
        self._block_bytes = code.encode(torch.zeros(1, BLOCK, dtype=torch.float32)).numel()

    def start(self, flight: InFlightFragment, names: Sequence[str], deltas: Mapping[int, list[torch.Tensor]]) -> None:
        """Starts the sum of the named parameters; `deltas` has the values of local islands. Collective.

        An island without deltas, as in a round that is broken off, sends zeros.
        """
        islands, twins = self._islands, self._islands.twins
        length = sum(total.numel() for total in flight.totals)
        stretches = self._stretches(length)
        codes = {
            island: self._encode_deltas(island, names, deltas.get(island), stretches)
            for island in islands.local_islands
        }
        # By replica: the islands of its group, whose stretches it adds up; and those whose codes it sends, which the
        # first replica of a group does.
        owned = {number: group.islands for group in islands.groups for number in group.replicas}
        sent = {n: group.islands if n == group.replicas[0] else [] for group in islands.groups for n in group.replicas}
        inputs, outputs = [], []
        for number in range(twins.size):
            parts = [codes[i][owner] for i in sent[twins.rank] for owner in owned[number]]
            inputs.append(torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8))
            size = len(sent[number]) * sum(self._code_bytes(stretches[owner]) for owner in islands.local_islands)
            outputs.append(torch.empty(size, dtype=torch.uint8))
        flat = torch.empty(length, dtype=torch.float32)
        flight.flats = [(flight.totals, flat)]

        def exchange(hosts: HierarchicalTransport | None, fingerprint: int) -> Steps:
            if hosts is None:
                outputs[0].copy_(inputs[0])
            else:
                yield from hosts.all_to_all(outputs, inputs, fingerprint)
            sums = self._sum_stretches(flight, stretches, sent, outputs)
            local_sums = torch.cat([sums[i] for i in sent[twins.rank]] or [torch.empty(0, dtype=torch.uint8)])
            longest = max(sum(self._code_bytes(stretches[i]) for i in senders) for senders in sent.values())
            gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(twins.size)]
            padded = torch.nn.functional.pad(local_sums, (0, longest - len(local_sums)))
            if hosts is None:
                gathered[0].copy_(padded)
            else:
                yield from hosts.all_gather(gathered, padded, fingerprint)
            for number, senders in sent.items():
                sizes = [self._code_bytes(stretches[i]) for i in senders]
                for i, sum_codes in zip(senders, gathered[number][: sum(sizes)].split(sizes), strict=True):
                    flat[stretches[i].start : stretches[i].stop] = self._decode(sum_codes, len(stretches[i]))

        if length:
            flight.works.append(twins.start_steps(-(-length // BLOCK) * self._block_bytes, exchange))

    def keep_omitted(self, flight: InFlightFragment, names: Sequence[str]) -> None:
        """Adds what the codes of the sums left out to the residuals of the islands that own the stretches."""
        stretches = self._stretches(sum(total.numel() for total in flight.totals))
        for island, omitted in flight.omitted.items():
            residual = self._islands.progress[island].inner.extra["left"]
            flat = torch.cat([residual[name].view(-1) for name in names])
            flat[stretches[island].start : stretches[island].stop] += omitted
            for name, part in zip(names, flat.split([residual[name].numel() for name in names]), strict=True):
                residual[name] = part.view_as(residual[name]).clone()

    def _encode_deltas(
        self, island: int, names: Sequence[str], deltas: Sequence[torch.Tensor] | None, stretches: Sequence[range]
    ) -> list[torch.Tensor]:
        """Returns the codes of an island's deltas by stretch, and keeps what they leave out as its residual."""
        if deltas is None:
            return [self._encode(torch.zeros(len(stretch), dtype=torch.float32)) for stretch in stretches]
        flat = torch.cat([delta.cpu().view(-1) for delta in deltas])
        codes = [self._encode(flat[stretch.start : stretch.stop]) for stretch in stretches]
        for stretch, sent in zip(stretches, codes, strict=True):
            flat[stretch.start : stretch.stop] -= self._decode(sent, len(stretch))
        parts = flat.split([delta.numel() for delta in deltas])
        residual = {name: part.view_as(delta) for name, part, delta in zip(names, parts, deltas, strict=True)}
        self._islands.progress[island].inner.extra.setdefault("left", {}).update(residual)
        return codes

    def _sum_stretches(
        self, flight: InFlightFragment, stretches: Sequence[range], sent: Mapping[int, list[int]], codes: Sequence[Any]
    ) -> dict[int, torch.Tensor]:
        """Decodes and sums the stretches of local islands, and returns the codes of the sums by island.

        `sent` has the islands whose codes each replica sends, `codes` what this worker has received from it.
        """
        local_islands, received = self._islands.local_islands, dict[tuple[int, int], torch.Tensor]()
        for number, senders in sent.items():
            pairs = [(sender, owner) for sender in senders for owner in local_islands]
            sizes = [self._code_bytes(stretches[owner]) for _, owner in pairs]
            received |= zip(pairs, codes[number].split(sizes), strict=True)
        sums = {}
        for owner in local_islands:
            length = len(stretches[owner])
            total = torch.zeros(length, dtype=torch.float64)
            for sender in range(self._islands.count):
                total += self._decode(received[sender, owner], length)
            sums[owner] = self._encode(total)
            flight.omitted[owner] = total - self._decode(sums[owner], length)
        return sums

    def _stretches(self, length: int) -> list[range]:
        """Returns the range of elements that each island owns, of `length` elements."""
        shares = deal(-(-length // BLOCK), [1.0] * self._islands.count)
        return [range(share.start * BLOCK, min(share.stop * BLOCK, length)) for share in shares]

    def _code_bytes(self, stretch: range) -> int:
        return -(-len(stretch) // BLOCK) * self._block_bytes

    def _encode(self, flat: torch.Tensor) -> torch.Tensor:
        return self._code.encode(flat.float()[None])[0] if len(flat) else torch.empty(0, dtype=torch.uint8)

    def _decode(self, codes: torch.Tensor, length: int) -> torch.Tensor:
        return self._code.decode(codes[None], length)[0] if length else torch.empty(0, dtype=torch.float32)
