"""DiLoCo: islands train independently and are merged every few steps.

Islands are no machines: they are dealt to whatever teams of replicas there are, several to one, or one to several
replicas that train it as one training. What an island's optimizer keeps is its own and goes where the island goes. The
weights of all are the same between two rounds; what a round makes of them becomes the state when it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from paceline.base.batching import NOTHING, deal
from paceline.base.mesh import Mesh
from paceline.base.sharding import ShardedTensor, ShardingSpec, stacked
from paceline.base.text import plural
from paceline.checkpoint.tree import flatten_pieces, pack, unflatten, unpack
from paceline.comm.communicator import Group
from paceline.comm.compression import Codec
from paceline.comm.error_feedback import TransactionRunner, wide
from paceline.comm.torch_private import pytree
from paceline.compute.state_dict import held, load_optimizer, local, optimizer_state
from paceline.local_sgd.island_state import InnerOptimizerState, IslandProgress
from paceline.parallel.data_parallel import in_flats
from paceline.plan import Plan
from paceline.train.replica import Replica

OUTER = "nesterov:0.7:0.9"  # DiLoCo's


def assign_islands(islands: int, held: Sequence[Collection[int]]) -> list[list[int]]:
    """Assigns islands to teams, where `held` has the islands whose state each team holds.

    A team keeps the islands that it holds, unless another team would have at least two fewer.
    """
    if not any(held):
        return [[*islands_of_team] for islands_of_team in deal(islands, [1.0] * len(held))]
    assigned: list[list[int]] = [[] for _ in held]
    for island in range(islands):
        having = [team for team, islands_of_team in enumerate(held) if island in islands_of_team] or range(len(held))
        min((assigned[team] for team in having), key=len).append(island)
    while len(most := max(assigned, key=len)) > len(least := min(assigned, key=len)) + 1:
        least.append(most.pop())
    return [sorted(islands_of_team) for islands_of_team in assigned]


def outer_optimizer(word: str, params: list[torch.nn.Parameter]) -> Optimizer:
    """Makes the torch optimizer of a plan's `outer=`; its gradients are the islands' mean deltas."""
    kind, rate, *momentum = word.split(":")
    return SGD(params, lr=float(rate), momentum=float(momentum[0]) if momentum else 0.0, nesterov=kind == "nesterov")


class DiLoCo:
    """Trains a plan's islands on the teams of replicas, and merges them at the end of each round.

    `team_islands` are the islands of this worker's team; `group` has all workers. `manner` describes to users how
    islands are merged.
    """

    trainer = 0  # its number
    codec: Codec | None = None
    differs = True  # as state of one's own
    manner = ""

    def __init__(self, replica: Replica, group: Group, mesh: Mesh, plan: Plan) -> None:
        self.replica, self.group, self.mesh, self.count = replica, group, mesh, plan.local or 1
        self.team, self.twins = replica.team, group.subgroup("data", mesh=mesh)
        # Of an island: the step of the last checkpoint, that of the trainer in it, what the island kept; or nothing.
        self.recall: Callable[[int], list[Any]] = lambda island: []
        self.team_islands: list[int] = []
        self.teams: list[tuple[list[int], list[int]]] = []  # the replicas and the islands of each
        self.work: dict[int, IslandProgress] = {}  # by island of this team, in the current round
        self.steps = 0  # done
        # What islands keep, by the steps done: what a round makes of it is there before it is known whether it counts,
        # also on a worker that takes the common state over. Of others' islands, too.
        self._kept: dict[int, dict[int, InnerOptimizerState]] = {}
        # By island that was too late for a merge: the steps, and rows in them, that it has made of a later one.
        self.late: dict[int, list[int]] = {}
        self.lost: dict[int, int] = {}  # rows of those that were lost with whoever had them, in this generation
        self._next: tuple[int, Any, Any] = -1, {}, {}  # what `work` and `late` are after so many steps
        self._pooled = -1  # the steps after which everybody had every island's state
        self._saved: Mapping[str, Any] = {}  # by island, from a checkpoint, and not taken yet
        self._specs: dict[int, Any] = {}
        self._live: int | None = None  # whose weights are in the model; None: those of all
        self._start: list[torch.Tensor] = []
        # Bytes when islands were merged: of weights beside those in use, and of all that optimizers keep.
        self.most = 0, 0
        self._sums: list[torch.Tensor] = []
        job = replica.job
        self.rows = replica.updater.rows
        self._at_end: Sequence[torch.nn.Parameter] = self.rows  # what is merged when the round ends
        self._cuts = dict(job.local_cuts)
        self.word = plan.outer or OUTER
        self.outer = outer_optimizer(self.word, self.rows)
        self._names = {id(row): name for name, row in zip(job.local_params, self.rows, strict=True)}

    @property
    def kept(self) -> dict[int, InnerOptimizerState]:
        """The inner optimizer states at the current step, by island."""
        return self._kept.setdefault(self.steps, {})

    @property
    def speaks(self) -> bool:
        """Whether this worker reports for its team."""
        return self.team.rank == 0

    @property
    def first(self) -> bool:
        """Whether this worker's replica is the first of its team, which adds for it."""
        return self.team.rank < self.mesh.replica

    # -- who has which ----------------------------------------------------------------------------------------------

    def rebind(self) -> Iterator[str]:
        """Assigns islands to the teams of a new generation, and moves their state along. Yields messages about lost
        state. Collective.
        """
        group, mesh, kept = self.group, self.mesh.over(self.group.size), self.kept
        group.declare("the islands", check=False, kind="islands")
        reports = group.gather_json([[*kept], self.team_islands, self._under_way])
        has = [set.intersection(*({*reports[rank][0]} for rank in replica)) for replica in mesh.replicas]
        ranks = mesh.teams(self.count)
        teams = [[mesh.replica_of(rank) for rank in team[:: mesh.replica]] for team in ranks]
        had = [{i for n in team for i in has[n] if i in reports[mesh.replicas[n][0]][1]} for team in teams]
        copies = [{i for n in team for i in has[n]}.difference(*had) for team in teams]
        assigned = assign_islands(
            self.count, [held_before | held_copies for held_before, held_copies in zip(had, copies, strict=True)]
        )
        team_number = next(number for number, team in enumerate(ranks) if group.rank in team)
        self.team_islands, self.teams = assigned[team_number], [*zip(teams, assigned, strict=True)]
        if not any(has):
            resumed = bool(self._saved)
            self._begin()
            if resumed:  # else one that is lost in the first round is as any other
                self.guard(self.steps, range(self.count))
        else:
            to = {island: team for team, islands in zip(teams, assigned, strict=True) for island in islands}
            for island in range(self.count):
                if message := self._bring(island, to[island], has):
                    yield message
            yield from self._bring_late(to, [entry[2] for entry in reports])
        steps = [{**dict(reports[rank][2])} for number in teams[team_number] for rank in mesh.replicas[number]]
        alike = {i for i in self.team_islands if i in self.late or len({made.get(i) for made in steps}) == 1}
        self.work = {island: one for island, one in self.work.items() if island in alike}

    def _begin(self) -> None:
        """Begins with the saved states, or with the same fresh state for all islands, which all workers have."""
        each, self._saved = self._saved, {}
        fresh = InnerOptimizerState.capture(self.replica, 0.0, self.steps)
        for island in self.team_islands if each else range(self.count):
            tree = each.get(str(island))
            self.kept[island] = fresh.copied() if tree is None else InnerOptimizerState.of(tree, self.steps)

    def _bring(self, island: int, team: Sequence[int], has: list[set[int]]) -> str:
        """Brings an island's state to those replicas of its `team` that lack it: from a replica that has it, else from
        the last checkpoint, else a copy of another island's. Returns a message if the state was lost.
        """
        group, mesh, message, which = self.group, self.mesh.over(self.group.size), "", island
        if not any(island in held_islands for held_islands in has):
            message = f"island {island} was lost with what its optimizer keeps: it goes on with "
            saved = pack(self.recall(island)) if group.rank == 0 else None
            if saved := unpack(group.broadcast_bytes(saved, 0)):
                step, at, tree = saved
                self.kept.update({island: InnerOptimizerState.of(tree, at)} if island in self.team_islands else {})
                return f"{message}that of the checkpoint of step {step}"
            which = min(i for held_islands in has for i in held_islands)
            message += f"a copy of what that of island {which} does"
        having = [number for number, held_islands in enumerate(has) if which in held_islands]
        for number in team:
            if number in having and which == island:
                continue
            hosts = group.hosts
            near = [other for other in having if hosts[other * mesh.replica] == hosts[number * mesh.replica]]
            source = (near or having)[0]
            self._send(self.kept, which, source, number, into=island)
        if message and island in self.kept:  # what the other one has not sent yet it sends itself
            self.kept[island].forget("left")
        return message

    def _send(
        self, kept: dict[int, InnerOptimizerState], island: int, source: int, target: int, into: int | None = None
    ) -> None:
        """Sends an island's state from replica `source` to `target`, as that of `into` (default: the same island)."""
        into, size = island if into is None else into, self.mesh.replica
        shard_index = self.group.rank % size
        if self.group.rank == source * size + shard_index:
            if source == target:
                kept[into] = kept[island].copied()
                return
            self.group.send_bytes(pack(kept[island].named(self.replica)), target * size + shard_index)
        elif self.group.rank == target * size + shard_index:
            kept[into] = InnerOptimizerState.of(
                unpack(self.group.receive_bytes(source * size + shard_index)), self.steps
            )

    def _bring_late(self, to: Mapping[int, Sequence[int]], under_way: Sequence[Any]) -> Iterator[str]:
        """Brings the progress of late islands to those replicas of their teams that lack it, from a replica all of
        whose workers have it. `under_way` has each worker's [island, steps] pairs. Yields messages about
        lost progress.
        """
        size, shard_index = self.mesh.replica, self.group.rank % self.mesh.replica
        steps, self.lost = [dict(steps_of) for steps_of in under_way], {}
        for island, (made, rows) in [*self.late.items()]:
            each = [{steps_of.get(island, 0) for steps_of in steps[n : n + size]} for n in range(0, len(steps), size)]
            has = [min(counts) if len(counts) == 1 else 0 for counts in each]
            source = has.index(max(has))
            if max(has) < made:
                del self.late[island]
                self.work.pop(island, None)
                self.lost[island] = rows
                yield (
                    f"what island {island} had made since it was late is lost, {plural(rows, 'row')} of "
                    f"{plural(made, 'step')}: it goes on from the merged weights"
                )
                continue
            for number in (n for n in to[island] if has[n] != has[source]):
                if self.group.rank == source * size + shard_index:
                    self.group.send_bytes(pack(self.work[island].named(self.replica)), number * size + shard_index)
                elif self.group.rank == number * size + shard_index:
                    tree = unpack(self.group.receive_bytes(source * size + shard_index))
                    tree |= {"inner": InnerOptimizerState.of(tree["inner"], self.steps), "unused": {*tree["unused"]}}
                    self.work[island] = IslandProgress(**tree)

    def consolidate(self, team: TransactionRunner) -> None:
        """Brings every island's state to all workers before some of them leave, as a transaction. Collective."""
        for attempt in team.attempts("forming"):
            with attempt:
                self._bring_everywhere()
                attempt.commit(None, self._mark_pooled)

    def _mark_pooled(self, _: None) -> None:
        self._pooled = self.steps

    def _bring_everywhere(self) -> None:
        replicas = len(self.mesh.over(self.group.size).replicas)
        self.group.declare("the state of all islands", check=False, kind="islands")
        held_islands = self.group.gather_json([*self.kept])
        everywhere = dict.fromkeys(self.late, range(replicas))
        for _ in self._bring_late(everywhere, self.group.gather_json(self._under_way)):
            pass  # all is there: it is between two rounds
        for island in range(self.count) if all(held_islands) else ():
            has = [island in held_islands[number * self.mesh.replica] for number in range(replicas)]
            for number in range(replicas) if any(has) else ():
                if not has[number]:
                    self._send(self.kept, island, has.index(True), number)

    @property
    def _under_way(self) -> list[list[int]]:
        return [[island, one.steps] for island, one in self.work.items()]

    def pend(self, steps: int, merged: Collection[int], late: dict[int, list[int]]) -> None:
        """Prepares the state after `steps` steps, which takes effect if the round counts.

        The `merged` islands get their new inner states. The `late` ones go on with what they have begun, and keep their
        old states in case that is lost.
        """
        made = {}
        for island in (island for island in self.team_islands if island in merged):
            self.work[island].inner.extra = self._beside(island)
            made[island] = self.work[island].inner
        self._kept[steps] = {i: inner for i, inner in self.kept.items() if i not in merged} | made
        left = {island: one for island, one in self.work.items() if island in late and island in self.team_islands}
        left = {island: replace(one, at=0, origin=one.origin or self._start) for island, one in left.items()}
        self._next = steps, left, late

    def _beside(self, island: int) -> dict[str, Any]:
        """What an island keeps for the next round besides its optimizer state."""
        return {}

    def _counts(self, steps: int) -> None:
        """Makes the round count, also on a worker that takes over another one's state."""
        self.work, self.late = self._next[1:] if self._next[0] == steps else ({}, {})
        self.steps = steps

    def drop(self) -> None:
        """Drops what late islands have begun: they start the next round from the merged weights."""
        self.work, self.late = {}, {}

    def guard(self, steps: int, merged: Collection[int]) -> None:
        """Copies the state of each island that only one replica computes to another replica on the same host, if there
        is one. Collective.
        """
        group, mesh, made = self.group, self.mesh.over(self.group.size), self._kept[steps]
        replicas, size = len(mesh.replicas), mesh.replica
        if replicas == 1:
            return
        group.declare("copies of what islands keep", check=False, kind="islands")
        islands_by_rank, hosts = group.gather_json(self.team_islands), group.hosts
        for number in range(replicas):
            near = [other % replicas for other in range(number + 1, number + replicas)]
            near = [other for other in near if hosts[other * size] == hosts[number * size]]
            for island in (island for island in islands_by_rank[number * size] if island in merged):
                alone = sum(island in islands_by_rank[other * size] for other in range(replicas)) == 1
                if alone and near:
                    self._send(made, island, number, near[0])

    def shares(self, batches: int) -> list[int]:
        """The number of micro-batches, of `batches`, that each unit gets with the first assignment of islands."""
        mesh, runs = self.mesh.over(self.group.size), deal(batches, [1.0] * self.count)
        teams = mesh.teams(self.count)
        shares: list[int] = []
        for team, islands in zip(teams, deal(self.count, [1.0] * len(teams)), strict=True):
            parts = [deal(len(runs[island]), [1.0] * (len(team) // mesh.unit)) for island in islands]
            shares += [sum(map(len, unit_parts)) for unit_parts in zip(*parts, strict=True)]
        return shares

    # -- a round ----------------------------------------------------------------------------------------------------

    def _tensors(self) -> list[torch.Tensor]:
        model = self.replica.job.model
        return [local(tensor) for tensor in (*model.parameters(), *model.buffers())]

    def _integers(self) -> list[torch.Tensor]:
        """The integer buffers, which have no mean."""
        buffers = self.replica.job.model.buffers()
        return [b for b in buffers if not b.is_floating_point() and not b.is_complex()]

    def begin(self) -> None:
        """Begins a round, or continues one that an earlier generation began."""
        with torch.no_grad():
            self._start = [tensor.clone() for tensor in self._tensors()]
        kept = self.kept
        self._kept = {self.steps: kept}
        for island in self.team_islands:
            if island not in self.work:
                kept[island].put(self.replica)
                inner = InnerOptimizerState.capture(
                    self.replica, kept[island].expected, kept[island].at, kept[island].extra
                )
                self.work[island] = IslandProgress(inner.copied())

    def enter(self, island: int) -> IslandProgress:
        """Puts an island's weights and inner optimizer state into the model and its optimizers."""
        one = self.work[island]
        if self._live != island:
            self.rest()
            one.inner.put(self.replica)
            one.inner.keep_up(self.replica, self.steps + one.at)
            if one.weights is not None:
                self._fill(one.weights)
            self._live = island
            self._gathers()
        return one

    def rest(self) -> None:
        """Saves the live island, and restores the model as it was when the round began."""
        if self._live is None:
            return
        island, self._live = self._live, None
        one = self.work[island]
        if one.torn:
            del self.work[island]
            self._fill(self._start)
            return
        one.inner = InnerOptimizerState.capture(self.replica, one.inner.expected, one.inner.at, one.inner.extra)
        with torch.no_grad():
            if one.weights is None:
                one.weights = [tensor.clone() for tensor in self._tensors()]
            else:
                for kept, tensor in zip(one.weights, self._tensors(), strict=True):
                    kept.copy_(tensor)
        self._fill(self._start)

    def _fill(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), values, strict=True):
                tensor.copy_(value)

    def _gathers(self) -> None:
        if self.replica.layout.gathers:
            self.replica.complete()

    def skip(self, one: IslandProgress, rows: int = 0) -> None:
        """Counts a step without rows that count: the schedule moves on, the optimizer does not."""
        lr = float(self.replica.job.optimizers[0].param_groups[0]["lr"])
        for scheduler in self.replica.job.schedulers:
            scheduler.step()
        one.add(NOTHING, 0.0, lr, rows)

    def passed(self, step: int) -> bool:
        """Called after each step of the round; returns whether a team breaks the round off."""
        return False

    def ended(self) -> bool:
        """Called after the last step of the round; returns whether a team breaks the round off."""
        return False

    def break_off(self) -> None:
        """Tells the other teams that this worker breaks the round off."""

    def merge(self, name: str, merged: Collection[int]) -> None:
        """Sums the deltas of the `merged` islands, each weighted by its count. A delta starts at the round's start, or
        for an island that was late before at the weights that it began with. Collective.
        """
        self._moving = [*self._at_end, *(b for b in self.replica.job.model.buffers() if b.is_floating_point())]
        moving = [local(tensor) for tensor in self._moving]
        integers = self._integers()
        start = [tensor.clone() for tensor in moving]
        self._sums = [torch.zeros_like(tensor, dtype=wide(tensor.dtype)) for tensor in moving]
        self._largest = [tensor.clone() for tensor in integers]
        for island in (island for island in self.team_islands if island in merged):
            began = start if (origin := self.work[island].origin) is None else self._moving_of(origin, moving)
            one = self.enter(island)
            for total, before, tensor in zip(self._sums, began, moving, strict=True):
                if self.first:
                    total.add_(before.to(total.dtype) - tensor.to(total.dtype), alpha=one.count)
            for most, tensor in zip(self._largest, integers, strict=True):
                torch.maximum(most, tensor, out=most)
            if self.first:
                self._add_left(island, self._names_of(range(len(self._at_end))), self._sums)
        self.rest()
        self._gathers()
        self.twins.declare(name, check=False, kind="merges")
        in_flats(self._sums, self.twins.sum)
        for tensor in self._largest:
            tensor.copy_(self.twins.largest(tensor.to(torch.int64)))

    def _moving_of(self, values: Sequence[torch.Tensor], moving: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors to merge, with the given values in the model."""
        self.rest()
        self._fill(values)
        self._gathers()
        return [tensor.clone() for tensor in moving]

    def _names_of(self, numbers: Iterable[int]) -> list[str]:
        return [self._names[id(self.rows[number])] for number in numbers]

    def _add_left(self, island: int, names: Sequence[str], totals: Sequence[torch.Tensor]) -> None:
        """Adds an island's pending residuals of the named parameters, uncoded."""
        left = self.kept[island].extra.get("left", {})
        for name, total in zip(names, totals, strict=False):
            if name in left:
                total.add_(left[name].view_as(total).to(total.device))

    def weigh(self) -> None:
        """Measures the memory of islands at its peak: after the merge, before the round counts."""
        ends = [tensor for one in self.work.values() for tensor in one.weights or ()]
        ends += [tensor for one in self.work.values() for tensor in one.origin or ()]
        inner = [one for kept in self._kept.values() for one in kept.values()]
        inner += [one.inner for one in self.work.values()]
        optimizers = [*self.replica.job.optimizers, self.outer]
        trees = [[one.states, one.tree, one.extra] for one in inner], [dict(one.state) for one in optimizers]
        kept = [tensor for tensor in pytree.tree_leaves(trees) if isinstance(tensor, torch.Tensor)]
        self.most = held([*self._start, *ends, *self._sums, *self._merges()]), held(kept)

    def _merges(self) -> list[torch.Tensor]:
        """The tensors that merges within the round have made."""
        return []

    def apply(self, count: float, steps: int) -> None:
        """Makes the round count, after which `steps` steps are done: the outer optimizer moves the weights."""
        buffers = self._sums[len(self._at_end) :]
        with torch.no_grad():
            for row, total in zip(self._at_end, self._sums, strict=False) if count > 0 else ():
                row.grad = (total / count).to(row.dtype).view_as(row)
            if count > 0:  # else no island has moved
                self.outer.step()
            for row in self.rows:
                row.grad = None
            for tensor, total in zip(self._moving[len(self._at_end) :], buffers, strict=True):
                tensor.copy_(tensor - total / (count or 1))
            for tensor, most in zip(self._integers(), self._largest, strict=True):
                tensor.copy_(most)
        self._counts(steps)
        self._start, self._sums = [], []

    # -- state ------------------------------------------------------------------------------------------------------

    def meet(self, done: int) -> Iterator[str]:
        """Exchanges the tensor shapes of all islands' states before a checkpoint. Collective."""
        self.group.declare("what islands keep", check=False, kind="islands")
        names = {id(cut): name for name, cut in self.replica.job.local_cuts.items()}
        specs, everywhere = {}, self._pooled == self.steps
        for island, inner in self.kept.items():
            if everywhere or island in self.team_islands:
                inner.settle(self.replica)
            if (
                self.group.rank % self.mesh.replica == 0
                if everywhere
                else (island in self.team_islands and self.speaks)
            ):
                tensors, skeleton = flatten_pieces(inner.named(self.replica), "")
                specs[island] = [skeleton, {name: _describe_tensor(tensor, names) for name, tensor in tensors.items()}]
        replies = self.group.gather_json(specs)
        self._specs = {
            int(i): (rank, *spec) for rank, rank_specs in [*enumerate(replies)][::-1] for i, spec in rank_specs.items()
        }
        yield from ()

    def state(self, done: int | None) -> dict[str, Any]:
        """The state for a checkpoint, after `meet`; with `done` None only what all workers have in common."""
        job = self.replica.job
        outer = optimizer_state(self.outer, self._names, self._cuts, job.shard_index)
        late = {str(island): steps_and_rows for island, steps_and_rows in self.late.items()}
        if done is None:
            return {"outer": outer, "late": late}
        rank, size, kept = self.group.rank, self.mesh.replica, self.kept
        each = {}
        for island, (first, skeleton, descriptions) in self._specs.items():
            holds = range(first, first + size)
            rows = [0 if other in holds else None for other in range(self.group.size)]
            tensors = flatten_pieces(kept[island].named(self.replica), "")[0] if rank in holds else {}
            made: dict[str, Any] = {}
            for name, (dtype, shape, param) in descriptions.items():
                cut = ShardingSpec.unsharded(shape, size) if param is None else job.local_cuts[param]
                stack, kept_tensor = stacked(cut, rows), tensors.get(name)
                kept_tensor = kept_tensor.tensor if isinstance(kept_tensor, ShardedTensor) else kept_tensor
                like = stack.at(rank).shape
                shard = (
                    torch.zeros(like, dtype=getattr(torch, dtype))
                    if kept_tensor is None
                    else kept_tensor.detach().view(like)
                )
                made[name] = ShardedTensor(shard, stack, rank)
            each[str(island)] = unflatten(skeleton, made)
        return {"rule": "first", "count": self.count, "outer": outer, "each": each, "late": late}

    def load(self, saved: Mapping[str, Any], steps: int) -> str:
        """Loads a `state` of full tensors after `steps` steps, which is empty if it is of another plan. Returns a
        message about changed mathematics, or an empty text.
        """
        if steps != self.steps:
            self._counts(steps)
        if "each" not in saved:  # it is that of a team which goes on
            self.late = {int(island): steps_and_rows for island, steps_and_rows in (saved.get("late") or {}).items()}
        if "outer" in saved:
            job = self.replica.job
            load_optimizer(self.outer, saved["outer"], self._names, self._cuts, job.shard_index)
        each = {island: unstack_first(tree) for island, tree in (saved.get("each") or {}).items()}
        before = saved.get("count", self.count)
        self._saved = each if before == self.count else dealt_anew(each, self.count)
        streams = any("weights" in tree.get("fragments", {}) for tree in each.values())
        if before == self.count and streams and self._at_end:
            return "islands go on from the weights that were merged last"
        if before != self.count:
            return (
                f"{before} islands are {self.count} from here: each goes on with what the optimizer of island 0 keeps"
            )
        return ""


def _describe_tensor(tensor: torch.Tensor | ShardedTensor, names: Mapping[int, str]) -> list[Any]:
    """Describes a tensor of an island: its dtype, full shape, and the parameter whose sharding it has."""
    local_tensor, name = (tensor.tensor, names[id(tensor.cut)]) if isinstance(tensor, ShardedTensor) else (tensor, None)
    return [str(local_tensor.dtype).removeprefix("torch."), [*tensor.shape], name]


def dealt_anew(each: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Makes the saved states of `count` islands from those of another number of islands.

    Each gets the optimizer state of island 0 and the merged weights; island 0 also gets all pending residuals.
    """
    first = {key: kept for key, kept in each["0"].items() if key != "fragments"}
    left: dict[str, torch.Tensor] = {}
    for tree in each.values():
        for name, tensor in tree.get("fragments", {}).get("left", {}).items():
            left[name] = left[name] + tensor if name in left else tensor
    made = dict.fromkeys(map(str, range(count)), first)
    return {**made, "0": {**first, "fragments": {"left": left}}} if left else made


def unstack_first(tree: Any) -> Any:
    """An island's saved state without the leading dimension that checkpoints add."""
    return pytree.tree_map_only(torch.Tensor, lambda stack: stack[0], tree)
