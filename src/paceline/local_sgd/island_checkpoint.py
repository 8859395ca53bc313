"""Islands in checkpoints: each is written by the workers that compute it, and read by any number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.base.sharding import ShardedTensor, ShardingSpec, stacked
from paceline.checkpoint.tree import flatten_pieces, unflatten
from paceline.comm.compression import Codec
from paceline.comm.error_feedback import TransactionRunner
from paceline.comm.torch_private import pytree
from paceline.compute.state_dict import load_optimizer, optimizer_state
from paceline.local_sgd.island_migration import bring_islands_everywhere
from paceline.local_sgd.island_state import Islands


class IslandCheckpoint:
    """Saves and loads the islands of a trainer and their `outer` optimizer.

    A run lists it among the state that differs between workers (`run.error_feedback`). `trainer` is its number.
    """

    codec: Codec | None = None
    differs = True

    def __init__(self, islands: Islands, outer: Optimizer, trainer: int) -> None:
        self.islands, self.outer, self.trainer = islands, outer, trainer
        self._names = {id(param): name for name, param in zip(islands.names, islands.params, strict=True)}
        self._cuts = dict(islands.replica.job.local_cuts)
        # By island: the first rank of the replica that writes it, its skeleton, and its tensors' descriptions.
        self._specs: dict[int, tuple[int, Any, dict[str, Any]]] = {}

    def consolidate(self, team: TransactionRunner) -> None:
        """Brings every island's state to all workers before some of them leave, as a transaction. Collective."""
        for attempt in team.attempts("forming"):
            with attempt:
                bring_islands_everywhere(self.islands)
                attempt.commit(None, self._mark_consolidated)

    def _mark_consolidated(self, _: None) -> None:
        self.islands.consolidated_after = self.islands.steps

    def meet(self, done: int) -> Iterator[str]:
        """Exchanges the tensor shapes of all islands' states before a checkpoint. Collective."""
        islands, group = self.islands, self.islands.group
        group.declare("the states of islands", check=False, kind="islands")
        spec_names = {id(cut): name for name, cut in islands.replica.job.local_cuts.items()}
        is_everywhere = islands.consolidated_after == islands.steps
        specs = {}
        for island, state in islands.inner_states.items():
            is_local = island in islands.local_islands
            if is_everywhere or is_local:
                state.materialize(islands.replica)
            if group.rank % islands.mesh.replica == 0 if is_everywhere else is_local and islands.is_reporter:
                tensors, skeleton = flatten_pieces(state.to_tree(islands.replica), "")
                specs[island] = [skeleton, {name: _describe(tensor, spec_names) for name, tensor in tensors.items()}]
        replies = group.gather_json(specs)
        self._specs = {
            int(island): (rank, *spec)
            for rank, rank_specs in reversed([*enumerate(replies)])
            for island, spec in rank_specs.items()
        }
        yield from ()

    def state(self, done: int | None) -> dict[str, Any]:
        """Returns the state for a checkpoint, after `meet`; with `done` None what all workers have in common."""
        islands, job = self.islands, self.islands.replica.job
        outer = optimizer_state(self.outer, self._names, self._cuts, job.shard_index)
        late = {str(island): steps_and_rows for island, steps_and_rows in islands.late.items()}
        if done is None:
            return {"outer": outer, "late": late}
        each = {str(island): self._stacked_state(island) for island in self._specs}
        return {"rule": "first", "count": islands.count, "outer": outer, "each": each, "late": late}

    def _stacked_state(self, island: int) -> Any:
        """Returns an island's state, with each tensor as a ShardedTensor that only the island's writers have."""
        islands, group = self.islands, self.islands.group
        (first, skeleton, descriptions), size = self._specs[island], islands.mesh.replica
        writers = range(first, first + size)
        rows = [0 if rank in writers else None for rank in range(group.size)]
        tensors: Mapping[str, Any] = {}
        if group.rank in writers:
            tensors = flatten_pieces(islands.inner_states[island].to_tree(islands.replica), "")[0]
        made: dict[str, Any] = {}
        for name, (dtype, shape, param) in descriptions.items():
            spec = ShardingSpec.unsharded(shape, size) if param is None else islands.replica.job.local_cuts[param]
            stack, tensor = stacked(spec, rows), tensors.get(name)
            local_shape = stack.at(group.rank).shape
            if tensor is None:
                tensor = torch.zeros(local_shape, dtype=getattr(torch, dtype))
            tensor = tensor.tensor if isinstance(tensor, ShardedTensor) else tensor
            made[name] = ShardedTensor(tensor.detach().view(local_shape), stack, group.rank)
        return unflatten(skeleton, made)

    def load(self, saved: Mapping[str, Any], steps: int) -> None:
        """Loads a `state` of full tensors after `steps` steps, which is empty if the plan differs."""
        islands, job = self.islands, self.islands.replica.job
        if steps != islands.steps:
            islands.commit(steps)
        if "each" not in saved:  # from a worker of this run
            islands.late = {int(island): steps_and_rows for island, steps_and_rows in (saved.get("late") or {}).items()}
        if "outer" in saved:
            load_optimizer(self.outer, saved["outer"], self._names, self._cuts, job.shard_index)
        each = {island: unstack_first(tree) for island, tree in (saved.get("each") or {}).items()}
        is_resized = saved.get("count", islands.count) != islands.count
        islands.saved_states = resize_saved_states(each, islands.count) if is_resized else each


def describe_changed_islands(saved: Mapping[str, Any], count: int, streams: bool) -> str:
    """Returns a message if the islands continue differently from how they were saved; else an empty text.

    `streams` is whether fragments are merged one by one, so that islands have weights of their own between rounds.
    """
    before = saved.get("count", count)
    if before != count:
        return (
            f"the number of islands changes from {before} to {count}: "
            "each continues with the optimizer state of island 0"
        )
    if not streams and any("weights" in tree.get("fragments", {}) for tree in (saved.get("each") or {}).values()):
        return "islands continue from the last merged weights"
    return ""


def resize_saved_states(each: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Makes the saved states of `count` islands from those of another number of islands.

    Each gets the optimizer state of island 0 and the merged weights; island 0 also gets all pending residuals.
    """
    first = {key: value for key, value in each["0"].items() if key != "fragments"}
    residual: dict[str, torch.Tensor] = {}
    for tree in each.values():
        for name, tensor in tree.get("fragments", {}).get("left", {}).items():
            residual[name] = residual[name] + tensor if name in residual else tensor
    made = dict.fromkeys(map(str, range(count)), first)
    return {**made, "0": {**first, "fragments": {"left": residual}}} if residual else made


def unstack_first(tree: Any) -> Any:
    """Returns an island's saved state without the leading dimension that checkpoints add."""
    return pytree.tree_map_only(torch.Tensor, lambda stack: stack[0], tree)


def _describe(tensor: torch.Tensor | ShardedTensor, names: Mapping[int, str]) -> list[Any]:
    """Describes a tensor of an island: its dtype, full shape, and the parameter whose sharding it has."""
    local_tensor, name = (tensor.tensor, names[id(tensor.cut)]) if isinstance(tensor, ShardedTensor) else (tensor, None)
    return [str(local_tensor.dtype).removeprefix("torch."), [*tensor.shape], name]
