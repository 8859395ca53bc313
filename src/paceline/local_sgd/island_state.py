"""The state of an island: inner optimizer and progress within a round."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from paceline.base.batching import Agreed, add_metrics
from paceline.comm.torch_private import pytree
from paceline.compute.job import TrainingJob
from paceline.compute.state_dict import in_pieces
from paceline.train.replica import Replica


@dataclass
class InnerOptimizerState:
    """What the optimizers and schedules of an island keep, which stand `at` a step, the count that its gradients are
    divided by before it is known, and what fragments keep `extra`: rows by the names of parameters, and numbers. It is
    that of the live ones or, where it came from elsewhere, a tree by logical names.
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
        cls, replica: Replica, expected: float, at: int, beside: dict[str, Any] | None = None
    ) -> InnerOptimizerState:
        """The state of the live optimizers, which shares their memory."""
        job = replica.job
        groups = [[{k: v for k, v in g.items() if k != "params"} for g in one.param_groups] for one in job.optimizers]
        states = [dict(one.state) for one in job.optimizers]
        schedulers = [copy.deepcopy(one.state_dict()) for one in job.schedulers]
        return cls(states, groups, schedulers, expected, at, beside or {})

    @classmethod
    def of(cls, tree: Any, at: int) -> InnerOptimizerState:
        """The state in a tree from another worker or a checkpoint, at step `at` unless the tree has one."""
        return cls(at=tree.get("at", at), tree=tree)

    def put(self, replica: Replica) -> None:
        """Puts this state into the live optimizers and schedules."""
        job = replica.job
        if self.tree is not None:
            replica.updater.load(self.tree)
            beside = {key: _local_shards(kept, job) for key, kept in self.tree.get("fragments", {}).items()}
            vars(self).update(vars(InnerOptimizerState.capture(replica, self.tree["expected"], self.at, beside)))
        for one, state, groups in zip(job.optimizers, self.states, self.groups, strict=True):
            one.state = defaultdict(dict, state)
            for group, values in zip(one.param_groups, groups, strict=True):
                group.update(values)
        for scheduler, values in zip(job.schedulers, self.schedulers, strict=True):
            scheduler.load_state_dict(copy.deepcopy(values))

    def keep_up(self, replica: Replica, step: int) -> None:
        """The schedules go on to a step, past those that the island was too late for. It must be live."""
        for scheduler in replica.job.schedulers * max(0, step - self.at):
            scheduler.step()
        self.at = step

    def named(self, replica: Replica) -> Any:
        """This state as a tree by logical names."""
        if self.tree is not None:
            return self.tree
        before = InnerOptimizerState.capture(replica, 0.0, 0)
        self.put(replica)
        state = replica.updater.state()
        before.put(replica)
        job, named = replica.job, {name: state[name] for name in ("optimizers", "schedulers")}
        beside = {
            key: in_pieces(kept, job.local_cuts, job.shard_index) if isinstance(kept, dict) else kept
            for key, kept in self.extra.items()
        }
        return {**named, "expected": self.expected, "at": self.at, **({"fragments": beside} if beside else {})}

    def settle(self, replica: Replica) -> None:
        """Turns a tree into tensors on the device; the live optimizers are unchanged afterwards."""
        if self.tree is not None:
            before = InnerOptimizerState.capture(replica, 0.0, 0)
            self.put(replica)
            before.put(replica)

    def copied(self) -> InnerOptimizerState:
        """A copy that shares no memory."""
        clone = partial(pytree.tree_map_only, torch.Tensor, torch.clone)
        states = [{param: clone(kept) for param, kept in state.items()} for state in self.states]
        groups, schedulers = clone(copy.copy(self.groups)), copy.deepcopy(self.schedulers)
        return InnerOptimizerState(states, groups, schedulers, self.expected, self.at, clone(self.extra), self.tree)

    def forget(self, key: str) -> None:
        """Removes a key from `extra`."""
        self.extra.pop(key, None)
        if self.tree is not None:
            self.tree.get("fragments", {}).pop(key, None)


@dataclass
class IslandProgress:
    """How far an island has come in a round: it has taken its part of so many of its batches (`at`), its weights (None:
    they are the live ones, or those of the round's start), what its optimizers keep, and what its `steps` add up to.
    Those of one that was too late for a merge began in an earlier round, at weights of its own (`origin`).
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
    torn: bool = False  # an update has begun, and is not everywhere yet

    def named(self, replica: Replica) -> Any:
        """This progress as a tree by logical names."""
        return {**vars(self), "inner": self.inner.named(replica), "unused": sorted(self.unused or ())}

    def add(self, agreed: Agreed, norm: float, lr: float, rows: int = 0) -> None:
        """Adds one step, whose count may be zero."""
        self.at, self.steps, self.lr, self.rows = self.at + 1, self.steps + 1, lr, self.rows + rows
        self.inner.at += 1
        if agreed.count <= 0:
            return
        self.norm, self.loss, self.count = norm, self.loss + agreed.loss, self.count + agreed.count
        add_metrics(self.metrics, agreed.metrics)
        self.unused = {*agreed.unused} if self.unused is None else self.unused & {*agreed.unused}


def _local_shards(kept: Any, job: TrainingJob) -> Any:
    """Returns this worker's shards of tensors by parameter name, which may be whole; other values are unchanged."""
    if not isinstance(kept, Mapping):
        return kept
    cuts = {name: cut for name, cut in job.local_cuts.items() if name in kept and tuple(kept[name].shape) == cut.shape}
    return {name: cuts[name].at(job.shard_index).of(t).clone() if name in cuts else t for name, t in kept.items()}
