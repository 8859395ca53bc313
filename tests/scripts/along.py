"""Groups along the axes of a mesh through three generations, one worker of them. Usage: along.py WORKER PORT

Two replicas of two; the second is lost and comes back as other workers, which have made no subgroup yet.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from paceline.base.environment import World
from paceline.base.mesh import Mesh
from paceline.comm.communicator import Group

worker, port = int(sys.argv[1]), int(sys.argv[2])
GENERATIONS = ((0, 1, 2, 3), (0, 1), (0, 1, 4, 5))


def world(number: int) -> World:
    members = GENERATIONS[number]
    where = {"store": ("127.0.0.1", port), "job": str(number), "join_timeout": 120, "members": members}
    return World(rank=members.index(worker), size=len(members), **where)


def total(group: Group) -> list[object]:
    """Who is of it, by their names and by a sum over them, in memory that they share."""
    if group.size == 1:
        return [list(group.names), 2**worker]
    group.declare("a sum", check=True)
    shared = group.allocate(1, torch.float64, torch.device("cpu"))
    shared.fill_(2.0**worker)
    return [list(group.names), int(group.sum(shared))]


first = 0 if worker in GENERATIONS[0] else 2
group = Group(world(0) if first == 0 else World(rank=worker, newcomer=True))
group.mesh = Mesh(tensor=2).over(group.size)
tensor, found, lent = group.subgroup("tensor"), {}, set()
for number, members in enumerate(GENERATIONS):
    if worker not in members or number < first:
        continue
    if number:
        group.form(world(number), lambda: False)
    assert group.subgroup("tensor") is tensor
    assert group.subgroup("data", "tensor") is group.subgroup("data", "shard", "pipeline", "context", "tensor") is group
    assert (group.mesh, tensor.rank, tensor.size) == (Mesh(data=len(members) // 2, tensor=2), worker % 2, 2)
    found[number] = {axes: total(group.subgroup(*axes.split())) for axes in ("data", "tensor", "shard", "data tensor")}
    if number != 1:
        with tensor.declared_torch_group("what torch sums", "other") as torchs:
            lent.add(id(torchs))
            mine = torch.tensor([2.0**worker])
            dist.all_reduce(mine)
            found[number]["lent"] = int(mine)
if worker not in GENERATIONS[-1]:  # lost, but not before the others have what they summed with it
    sys.stdin.read()
    os._exit(0)
group.declare("the end")
print(json.dumps(found))
assert len(lent) == 1, "torch's default group became another one"
group.close(failed=False)
