"""Which worker group computes which island, and how islands move to other workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from paceline.base.batching import deal
from paceline.base.text import plural
from paceline.checkpoint.tree import pack, unpack
from paceline.local_sgd.island_state import InnerOptimizerState, IslandProgress, Islands, WorkerGroup


def assign_islands(count: int, held: Sequence[Collection[int]]) -> list[list[int]]:
    """Assigns `count` islands to worker groups, where `held` has the islands whose state each group holds.

    A group keeps the islands that it holds, unless another group would have at least two fewer.
    """
    if not any(held):
        return [[*islands] for islands in deal(count, [1.0] * len(held))]
    assigned: list[list[int]] = [[] for _ in held]
    for island in range(count):
        holders = [number for number, islands in enumerate(held) if island in islands] or range(len(held))
        min((assigned[number] for number in holders), key=len).append(island)
    while len(most := max(assigned, key=len)) > len(least := min(assigned, key=len)) + 1:
        least.append(most.pop())
    return [sorted(islands) for islands in assigned]


def share_micro_batches(islands: Islands, batches: int) -> list[int]:
    """Returns the number of micro-batches, of `batches`, of each unit with the first assignment of islands."""
    mesh, runs = islands.mesh.over(islands.group.size), deal(batches, [1.0] * islands.count)
    groups = mesh.teams(islands.count)
    shares: list[int] = []
    for ranks, group_islands in zip(groups, deal(islands.count, [1.0] * len(groups)), strict=True):
        parts = [deal(len(runs[island]), [1.0] * (len(ranks) // mesh.unit)) for island in group_islands]
        shares += [sum(map(len, unit_parts)) for unit_parts in zip(*parts, strict=True)]
    return shares


def reassign_islands(islands: Islands, restart: bool) -> Iterator[str]:
    """Assigns the islands to the worker groups of a new generation, and moves their state along. Collective.

    With `restart` all islands repeat the round that was interrupted, else only those whose workers have come to
    different steps. Yields messages about lost state.
    """
    group, mesh = islands.group, islands.mesh.over(islands.group.size)
    group.declare("the islands", check=False, kind="islands")
    reports = group.gather_json([[*islands.inner_states], islands.local_islands, _steps_taken(islands)])
    holds = [set.intersection(*({*reports[rank][0]} for rank in ranks)) for ranks in mesh.replicas]  # by replica
    computes = [{*reports[ranks[0]][1]} for ranks in mesh.replicas]  # until now
    ranks_of = mesh.teams(islands.count)
    replicas_of = [[mesh.replica_of(rank) for rank in ranks[:: mesh.replica]] for ranks in ranks_of]
    computed = [{i for n in replicas for i in holds[n] & computes[n]} for replicas in replicas_of]
    copied = [{i for n in replicas for i in holds[n]}.difference(*computed) for replicas in replicas_of]
    assigned = assign_islands(islands.count, [one | other for one, other in zip(computed, copied, strict=True)])
    islands.groups = [WorkerGroup(*both) for both in zip(replicas_of, assigned, strict=True)]
    number = next(number for number, ranks in enumerate(ranks_of) if group.rank in ranks)
    islands.local_islands = assigned[number]
    if any(holds):
        replicas_with = {island: one.replicas for one in islands.groups for island in one.islands}
        for island in range(islands.count):
            if message := _bring_state(islands, island, replicas_with[island], holds):
                yield message
        yield from _bring_progress(islands, replicas_with, [report[2] for report in reports])
    elif _begin_states(islands):  # a fresh state that is lost in the first round is replaced by any other
        copy_sole_states(islands, islands.steps, range(islands.count))
    steps = [dict(reports[rank][2]) for replica in replicas_of[number] for rank in mesh.replicas[replica]]
    usable = {i for i in islands.local_islands if i in islands.late or len({taken.get(i) for taken in steps}) == 1}
    islands.progress = {} if restart else {i: one for i, one in islands.progress.items() if i in usable}


def bring_islands_everywhere(islands: Islands) -> None:
    """Brings every island's state to all workers. Collective."""
    group, size = islands.group, islands.mesh.replica
    replicas = range(len(islands.mesh.over(group.size).replicas))
    group.declare("the state of all islands", check=False, kind="islands")
    holds = group.gather_json([*islands.inner_states])
    for _ in _bring_progress(islands, dict.fromkeys(islands.late, replicas), group.gather_json(_steps_taken(islands))):
        pass  # no progress is lost between two rounds
    for island in range(islands.count) if all(holds) else ():
        has = [island in holds[number * size] for number in replicas]
        for number in replicas if any(has) else ():
            if not has[number]:
                _send_state(islands, islands.steps, island, has.index(True), number)


def copy_sole_states(islands: Islands, steps: int, merged: Collection[int]) -> None:
    """Copies the state after `steps` steps of each `merged` island that only one replica computes. Collective.

    The copy goes to the next replica on the same host, if there is one.
    """
    group, mesh = islands.group, islands.mesh.over(islands.group.size)
    count, size = len(mesh.replicas), mesh.replica
    if count == 1:
        return
    group.declare("copies of island states", check=False, kind="islands")
    computes, hosts = group.gather_json(islands.local_islands)[::size], group.hosts
    for number in range(count):
        others = [other % count for other in range(number + 1, number + count)]
        near = [other for other in others if hosts[other * size] == hosts[number * size]]
        for island in (island for island in computes[number] if island in merged):
            if near and sum(island in one for one in computes) == 1:
                _send_state(islands, steps, island, number, near[0])


def _begin_states(islands: Islands) -> bool:
    """Begins with the states from a checkpoint, or with one fresh state for all islands. Returns whether any were
    saved.
    """
    saved, islands.saved_states = islands.saved_states, {}
    fresh = InnerOptimizerState.capture(islands.replica, 0.0, islands.steps)
    for island in islands.local_islands if saved else range(islands.count):
        tree = saved.get(str(island))
        state = fresh.clone() if tree is None else InnerOptimizerState.from_tree(tree, islands.steps)
        islands.inner_states[island] = state
    return bool(saved)


def _bring_state(islands: Islands, island: int, replicas: Sequence[int], holds: list[set[int]]) -> str:
    """Brings an island's state to those of its `replicas` that lack it. `holds` has the islands by replica.

    The state comes from a replica that holds it, else from the last checkpoint, else it is a copy of another island's.
    Returns a message if it was lost.
    """
    group, size, message, origin = islands.group, islands.mesh.replica, "", island
    if not any(island in held for held in holds):
        message = f"the optimizer state of island {island} was lost: it continues with "
        saved = pack(islands.read_saved_island(island)) if group.rank == 0 else None
        if saved := unpack(group.broadcast_bytes(saved, 0)):
            step, at, tree = saved
            if island in islands.local_islands:
                islands.inner_states[island] = InnerOptimizerState.from_tree(tree, at)
            return f"{message}the state from the checkpoint of step {step}"
        origin = min(i for held in holds for i in held)
        message += f"a copy of the state of island {origin}"
    holders = [number for number, held in enumerate(holds) if origin in held]
    for number in replicas:
        if number in holders and origin == island:
            continue
        near = [other for other in holders if group.hosts[other * size] == group.hosts[number * size]]
        _send_state(islands, islands.steps, origin, (near or holders)[0], number, into=island)
    if message and island in islands.inner_states:  # the other island sends its residual itself
        islands.inner_states[island].drop_residual()
    return message


def _send_state(islands: Islands, steps: int, island: int, source: int, target: int, into: int | None = None) -> None:
    """Sends an island's state after `steps` steps from replica `source` to `target`, as that of island `into`."""
    states, into = islands.inner_states_after[steps], island if into is None else into
    size, rank = islands.mesh.replica, islands.group.rank
    sender, receiver = (number * size + rank % size for number in (source, target))
    if rank == sender == receiver:
        states[into] = states[island].clone()
    elif rank == sender:
        islands.group.send_bytes(pack(states[island].to_tree(islands.replica)), receiver)
    elif rank == receiver:
        states[into] = InnerOptimizerState.from_tree(unpack(islands.group.receive_bytes(sender)), islands.steps)


def _bring_progress(
    islands: Islands, replicas_with: Mapping[int, Sequence[int]], steps_taken: Sequence[Any]
) -> Iterator[str]:
    """Brings the progress of late islands to those replicas of their groups that lack it.

    It comes from a replica all of whose workers have it. `steps_taken` is gathered from all workers. Yields messages
    about lost progress.
    """
    group, size = islands.group, islands.mesh.replica
    shard_index = group.rank % size
    steps, islands.lost_rows = [dict(taken) for taken in steps_taken], {}
    for island, (made, rows) in [*islands.late.items()]:
        each = [{taken.get(island, 0) for taken in steps[first : first + size]} for first in range(0, len(steps), size)]
        has = [min(counts) if len(counts) == 1 else 0 for counts in each]
        source = has.index(max(has))
        if max(has) < made:
            del islands.late[island]
            islands.progress.pop(island, None)
            islands.lost_rows[island] = rows
            yield (
                f"the unmerged work of island {island} was lost, {plural(rows, 'row')} of {plural(made, 'step')}: "
                "it continues from the merged weights"
            )
            continue
        for number in (number for number in replicas_with[island] if has[number] != has[source]):
            sender, receiver = source * size + shard_index, number * size + shard_index
            if group.rank == sender:
                group.send_bytes(pack(islands.progress[island].to_tree(islands.replica)), receiver)
            elif group.rank == receiver:
                islands.progress[island] = IslandProgress.from_tree(unpack(group.receive_bytes(sender)), islands.steps)


def _steps_taken(islands: Islands) -> list[list[int]]:
    """The inner steps of each local island in its progress, as [island, steps] pairs."""
    return [[island, one.steps] for island, one in islands.progress.items()]
