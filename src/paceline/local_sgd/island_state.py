"""Islands on one worker: their inner optimizer states, how far they are in the round, and the anchor.

An *island* is a copy of the model that takes inner steps by itself and is merged with the others at the end of a round.
A plan fixes the number of islands; the workers divide them among themselves. A *worker group* is one or more whole
replicas that compute the same islands together.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from paceline.base.batching import NOTHING, Agreed, add_metrics
from paceline.base.mesh import Mesh
from paceline.comm.communicator import Group
from paceline.comm.torch_private import pytree
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import held, in_pieces, local
from paceline.train.replica import Replica


@dataclass
class InnerOptimizerState:
    """The state of an island's inner optimizers and LR schedules after step `at`.

    `expected` is the count that the island divides its gradients by until the count of the step is known. `extra` has
    what streaming DiLoCo keeps: tensors by parameter name, and numbers. The state shares the memory of the live
    optimizers or, if it came from another worker or a checkpoint, is a `tree` by logical names.
    """

    states: list[dict[Any, dict[str, Any]]] = field(default_factory=list)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    expected: float = 0.0
    at: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    tree: Any = None

    @classmethod
    def capture(
        cls, replica: Replica, expected: float, at: int, extra: dict[str, Any] | None = None
    ) -> InnerOptimizerState:
        """Returns the state of the live optimizers, sharing their memory."""
        job = replica.job
        groups = [[{k: v for k, v in g.items() if k != "params"} for g in one.param_groups] for one in job.optimizers]
        states = [dict(one.state) for one in job.optimizers]
        schedulers = [copy.deepcopy(one.state_dict()) for one in job.schedulers]
        return cls(states, groups, schedulers, expected, at, extra or {})

    @classmethod
    def from_tree(cls, tree: Any, at: int) -> InnerOptimizerState:
        """Returns the state in a tree from another worker or a checkpoint, after step `at` unless the tree says one."""
        return cls(at=tree.get("at", at), tree=tree)

    def to_tree(self, replica: Replica) -> Any:
        """Returns this state as a tree by logical names. The live optimizers are unchanged afterwards."""
        if self.tree is not None:
            return self.tree
        before = InnerOptimizerState.capture(replica, 0.0, 0)
        self.load_into(replica)
        state = replica.updater.state()
        before.load_into(replica)
        job, named = replica.job, {name: state[name] for name in ("optimizers", "schedulers")}
        extra = {
            key: in_pieces(value, job.local_cuts, job.shard_index) if isinstance(value, dict) else value
            for key, value in self.extra.items()
        }
        return {**named, "expected": self.expected, "at": self.at, **({"fragments": extra} if extra else {})}

    def load_into(self, replica: Replica) -> None:
        """Loads this state into the live optimizers and schedules."""
        job = replica.job
        if self.tree is not None:
            replica.updater.load(self.tree)
            extra = {key: _local_shards(value, job) for key, value in self.tree.get("fragments", {}).items()}
            vars(self).update(vars(InnerOptimizerState.capture(replica, self.tree["expected"], self.at, extra)))
        for one, state, groups in zip(job.optimizers, self.states, self.groups, strict=True):
            one.state = defaultdict(dict, state)
            for group, values in zip(one.param_groups, groups, strict=True):
                group.update(values)
        for scheduler, values in zip(job.schedulers, self.schedulers, strict=True):
            scheduler.load_state_dict(copy.deepcopy(values))

    def advance_schedules(self, replica: Replica, step: int) -> None:
        """Advances the live LR schedules to `step`, over steps that a late island has missed."""
        for scheduler in replica.job.schedulers * max(0, step - self.at):
            scheduler.step()
        self.at = step

    def materialize(self, replica: Replica) -> None:
        """Turns a tree into tensors on the device. The live optimizers are unchanged afterwards."""
        if self.tree is not None:
            before = InnerOptimizerState.capture(replica, 0.0, 0)
            self.load_into(replica)
            before.load_into(replica)

    def clone(self) -> InnerOptimizerState:
        """Returns a copy that shares no memory."""
        clone = partial(pytree.tree_map_only, torch.Tensor, torch.clone)
        states = [{param: clone(kept) for param, kept in state.items()} for state in self.states]
        groups, schedulers = clone(copy.copy(self.groups)), copy.deepcopy(self.schedulers)
        return InnerOptimizerState(states, groups, schedulers, self.expected, self.at, clone(self.extra), self.tree)

    def drop_residual(self) -> None:
        """Drops the island's pending residual, which is sent or belongs to another island."""
        self.extra.pop("left", None)
        if self.tree is not None:
            self.tree.get("fragments", {}).pop("left", None)


@dataclass
class IslandProgress:
    """How far an island is in a round.

    `inner` is its inner optimizer state. Of the round's batches it has taken its part of the first `at`. `weights` are
    its tensors while it is not in the model; None before its first step. `steps` counts its inner steps since it began,
    and the fields after it are sums over these or values of the last. An island that was too late for a merge began in
    an earlier round, at the weights `origin`.
    """

    inner: InnerOptimizerState
    at: int = 0
    steps: int = 0
    rows: int = 0
    origin: list[torch.Tensor] | None = None
    weights: list[torch.Tensor] | None = None
    loss: float = 0.0
    count: float = 0.0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    unused: set[int] | None = None
    norm: float = 0.0
    lr: float = 0.0
    torn: bool = False  # whether an inner step has changed weights on some workers only

    def to_tree(self, replica: Replica) -> Any:
        """Returns this progress as a tree by logical names."""
        return {
            **vars(self),
            "inner": self.inner.to_tree(replica),
            "unused": None if self.unused is None else sorted(self.unused),
        }

    @classmethod
    def from_tree(cls, tree: Any, at: int) -> IslandProgress:
        """Returns the progress in a tree from another worker, whose inner optimizers are after step `at`."""
        unused = None if tree["unused"] is None else {*tree["unused"]}
        return cls(**tree | {"inner": InnerOptimizerState.from_tree(tree["inner"], at), "unused": unused})

    def add_step(self, agreed: Agreed, norm: float, lr: float, rows: int = 0) -> None:
        """Adds one inner step, whose count may be zero."""
        self.at, self.steps, self.lr, self.rows = self.at + 1, self.steps + 1, lr, self.rows + rows
        self.inner.at += 1
        if agreed.count <= 0:
            return
        self.norm, self.loss, self.count = norm, self.loss + agreed.loss, self.count + agreed.count
        add_metrics(self.metrics, agreed.metrics)
        self.unused = {*agreed.unused} if self.unused is None else self.unused & {*agreed.unused}


class WorkerGroup(NamedTuple):
    """The numbers of the replicas of a worker group, and its islands."""

    replicas: list[int]
    islands: list[int]


class Islands:
    """The islands of a plan and what this worker holds of them.

    Between two rounds all islands have the same weights, which are in the model. Within a round the model holds the
    anchor, which is a copy of these weights, or the weights of the island that was entered last. Each island has its
    own inner optimizer state, which moves with the island to other workers.

    `group` has all workers, `twins` the workers with the same shard index in all replicas.
    """

    def __init__(self, replica: Replica, group: Group, mesh: Mesh, count: int) -> None:
        self.replica, self.group, self.mesh, self.count = replica, group, mesh, count
        self.twins = group.subgroup("data", mesh=mesh)
        # What optimizers move, and its names: the parameters, or with zero= this worker's rows of them.
        self.params = replica.updater.rows
        self.names = [name for name, _ in zip(replica.job.local_params, self.params, strict=True)]
        self.groups: list[WorkerGroup] = []
        self.local_islands: list[int] = []  # those of this worker's group
        self.steps = 0  # done
        # Inner optimizer states by island, by the number of steps done. A round prepares those after it before it is
        # known whether it counts. States of other groups' islands may be among them.
        self.inner_states_after: dict[int, dict[int, InnerOptimizerState]] = {}
        self.progress: dict[int, IslandProgress] = {}  # of local islands in the current round
        # By island that was too late for the last merge: [its inner steps, the rows in them].
        self.late: dict[int, list[int]] = {}
        self.lost_rows: dict[int, int] = {}  # rows of late islands whose progress was lost with their workers
        self._prepared: tuple[int, dict[int, IslandProgress], dict[int, list[int]]] = -1, {}, {}
        self.anchor: list[torch.Tensor] = []
        self._entered: int | None = None  # the island in the model; None: the anchor
        self.consolidated_after = -1  # the steps after which every worker held every island's state
        self.saved_states: Mapping[str, Any] = {}  # by island, from a checkpoint, until islands are assigned
        # Returns an island in the last checkpoint: [its step, the trainer's steps, the state], or [].
        self.read_saved_island: Callable[[int], list[Any]] = lambda island: []

    @property
    def inner_states(self) -> dict[int, InnerOptimizerState]:
        """The inner optimizer states at the current step, by island."""
        return self.inner_states_after.setdefault(self.steps, {})

    @property
    def is_reporter(self) -> bool:
        """Whether this worker reports for its worker group."""
        return self.replica.team.rank == 0

    @property
    def is_first_replica(self) -> bool:
        """Whether this worker's replica is the first of its group, which adds the group's islands to sums."""
        return self.replica.team.rank < self.mesh.replica

    # -- a round ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_round(self) -> list[int]:
        """Copies the weights as the anchor. Returns the islands that begin the round: the others continue it."""
        self.anchor = [tensor.clone() for tensor in self._model_tensors()]
        states = self.inner_states
        self.inner_states_after = {self.steps: states}
        beginning = [island for island in self.local_islands if island not in self.progress]
        for island in beginning:
            state = states[island]
            state.load_into(self.replica)
            live = InnerOptimizerState.capture(self.replica, state.expected, state.at, state.extra)
            self.progress[island] = IslandProgress(live.clone())
        return beginning

    def enter(self, island: int) -> IslandProgress:
        """Puts an island's weights and inner optimizer state into the model and the live optimizers."""
        progress = self.progress[island]
        if self._entered != island:
            self.leave()
            progress.inner.load_into(self.replica)
            progress.inner.advance_schedules(self.replica, self.steps + progress.at)
            if progress.weights is not None:
                self._fill_model(progress.weights)
            self._entered = island
            self.complete()
        return progress

    @torch.no_grad()
    def leave(self) -> None:
        """Saves the island that is in the model, and puts the anchor back."""
        if self._entered is None:
            return
        island, self._entered = self._entered, None
        progress = self.progress[island]
        if progress.torn:
            del self.progress[island]
            self._fill_model(self.anchor)
            return
        inner = progress.inner
        progress.inner = InnerOptimizerState.capture(self.replica, inner.expected, inner.at, inner.extra)
        if progress.weights is None:
            progress.weights = [tensor.clone() for tensor in self._model_tensors()]
        else:
            for weight, tensor in zip(progress.weights, self._model_tensors(), strict=True):
                weight.copy_(tensor)
        self._fill_model(self.anchor)

    def skip_step(self, island: int, rows: int = 0) -> None:
        """Counts a step of the entered island in which nothing counts: only the LR schedules advance."""
        lr = float(self.replica.job.optimizers[0].param_groups[0]["lr"])
        for scheduler in self.replica.job.schedulers:
            scheduler.step()
        self.progress[island].add_step(NOTHING, 0.0, lr, rows)

    @torch.no_grad()
    def anchor_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the values at the anchor of model tensors or `params`."""
        self.leave()
        at_anchor = {_memory(tensor): kept for tensor, kept in zip(self._model_tensors(), self.anchor, strict=True)}
        return [
            at_anchor[_memory(tensor)] if _memory(tensor) in at_anchor else tensor.clone()
            for tensor in map(local, tensors)
        ]

    @torch.no_grad()
    def origin_of(self, island: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Returns the values of model tensors or `params` at which a late island began; None if it is not late."""
        if (origin := self.progress[island].origin) is None:
            return None
        self.leave()
        self._fill_model(origin)
        self.complete()
        return [local(tensor).clone() for tensor in tensors]

    def complete(self) -> None:
        """Gathers the parameters from the shards that were changed, if the layout stores them in shards. Collective."""
        if self.replica.layout.gathers:
            self.replica.complete()

    def _model_tensors(self) -> list[torch.Tensor]:
        model = self.replica.job.model
        return [local(tensor) for tensor in (*model.parameters(), *model.buffers())]

    @torch.no_grad()
    def _fill_model(self, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(self._model_tensors(), values, strict=True):
            tensor.copy_(value)

    # -- the end of a round -----------------------------------------------------------------------------------------

    def prepare(
        self, steps: int, merged: Collection[int], late: dict[int, list[int]], extra: Mapping[int, dict[str, Any]]
    ) -> None:
        """Prepares the state after `steps` steps, which `commit` puts into effect if the round counts.

        The `merged` islands get the inner optimizer states that they have reached, with what else they keep in `extra`.
        The `late` ones continue in the next round; their old states stay in case their progress is lost.
        """
        reached = {}
        for island in (island for island in self.local_islands if island in merged):
            self.progress[island].inner.extra = extra.get(island, {})
            reached[island] = self.progress[island].inner
        unmerged = {island: state for island, state in self.inner_states.items() if island not in merged}
        self.inner_states_after[steps] = unmerged | reached
        continuing = {island: one for island, one in self.progress.items() if island in late}
        continuing = {
            island: replace(one, at=0, origin=one.origin or self.anchor)
            for island, one in continuing.items()
            if island in self.local_islands
        }
        self._prepared = steps, continuing, late

    def commit(self, steps: int) -> None:
        """Puts the state after `steps` steps into effect, also on a worker that received the weights from another."""
        self.progress, self.late = self._prepared[1:] if self._prepared[0] == steps else ({}, {})
        self.steps, self.anchor = steps, []

    def drop_late(self) -> None:
        """Drops the progress of late islands: they begin the next round with the merged weights."""
        self.progress, self.late = {}, {}

    def measure(self, outer: Optimizer, merge_tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Returns the bytes of islands at their peak, which is at the end of a merge.

        They are the bytes of weights outside the model, `merge_tensors` among them, and of optimizer states.
        """
        of_islands = [*(one.weights or () for one in self.progress.values())]
        of_islands += [one.origin or () for one in self.progress.values()]
        weights = [*self.anchor, *(tensor for tensors in of_islands for tensor in tensors), *merge_tensors]
        inner = [state for states in self.inner_states_after.values() for state in states.values()]
        inner += [one.inner for one in self.progress.values()]
        optimizers = [*self.replica.job.optimizers, outer]
        trees = [[one.states, one.tree, one.extra] for one in inner], [dict(one.state) for one in optimizers]
        return held(weights), held(leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, torch.Tensor))


def _memory(tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _local_shards(value: Any, job: TrainingJob) -> Any:
    """Returns this worker's shards of tensors by parameter name, which may be full; other values are unchanged."""
    if not isinstance(value, Mapping):
        return value
    cuts = {n: cut for n, cut in job.local_cuts.items() if n in value and tuple(value[n].shape) == cut.shape}
    return {name: cuts[name].at(job.shard_index).of(t).clone() if name in cuts else t for name, t in value.items()}
