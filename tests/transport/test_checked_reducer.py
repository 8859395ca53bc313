"""The checked reduction gives the sums of the usual one bit for bit, and names the worker whose part changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import paceline

SCRIPT = """
import sys
import torch
import paceline
from paceline.base.mesh import Mesh
from paceline.base.sharding import RowShards
from paceline.comm.bucket_reducer import BucketReducer, ReduceStep
from paceline.comm.checked_reducer import FIGURES, CheckedReducer
from paceline.comm.gradient_buckets import Buckets
from torch.nn import Parameter

team, shard = paceline.join(), int(sys.argv[1])
group, rank, size = team.group, team.rank, team.size
mesh = Mesh(shard=shard).over(size)
outer, inner = group.subgroup("data", mesh=mesh), group.subgroup("shard", mesh=mesh)
params = [Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in
          [((7, 3), torch.float32), ((5,), torch.float32), ((40, 9), torch.float64), ((), torch.float64)]]
route = [ReduceStep("scatter", inner)] if shard > 1 else []
route.append(ReduceStep("sum", outer))
group.declare("memory")
shards = RowShards(shard, inner.rank)
local_params = [Parameter(shards.of(p.detach(), inner.rank)) for p in params] if shard > 1 else None
buckets = Buckets(params, 1, 1, outer.allocate, shards, local_params)
small = torch.randn(50, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)


def summed(reducer, number, after=lambda: None):
    vector = small.clone()
    group.declare(f"step {number}", check=False, kind="gradients")
    reducer.begin(f"step {number}")
    for p in params:
        p.grad = None
    buckets.begin(reducer.send)
    generator = torch.Generator().manual_seed(rank)
    for p in params:
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        buckets.begin_backward(last=True)
        (p * grad).sum().backward()
    buckets.end_backward()
    buckets.flush()
    reducer.hand_on()
    work = reducer.start_last(vector)
    after()
    reducer.finish()
    group.finish(work)
    return [bucket.local_shard.clone() for bucket in buckets.buckets] + [vector]


usual = summed(BucketReducer(group, route), 0)
looked = []
checked = CheckedReducer(group, route, lambda bucket: looked.append(bucket.index))
sums = summed(checked, 1)
checked.confirm()
assert checked.faults == [], checked.faults
assert looked == [0, 1, 2, 3]
assert all(torch.equal(a, b) for a, b in zip(usual, sums)), [rank, usual, sums]
assert checked.squares() is None


def flip(flat):
    flat.view(torch.uint8)[0] ^= 4


def tampered(where, index):
    def tamper(at, bucket, part):
        if (at, bucket.index) == (where, index) and rank == 1 and part.numel():
            flip(part)
    return tamper


def everyones(faults):
    return {tuple(fault) for one in group.gather_json(faults) for fault in one}


for number, (where, index) in enumerate([("bucket", 0), ("transit", 2), ("bucket", 1)], start=2):
    checked.tamper = tampered(where, index)
    summed(checked, number)
    faults = everyones(checked.faults)
    assert faults == {("contribution", 1, index)}, faults
checked.tamper = None

bucket = buckets.buckets[1]
summed(checked, 9, after=lambda: flip(bucket.local_shard) if rank == 2 else None)
checked.confirm()
assert everyones(checked.faults) == {("memory", 2, 1)}, checked.faults

plain = type(outer).gather
def gather(self, tensor):  # what worker 2 has added up changes on its way
    if rank == 2 and self is group and len(tensor) == len(small.tensor_split(size)[2]):
        flip(tensor)
    return plain(self, tensor)
type(outer).gather = gather
summed(checked, 10)
type(outer).gather = plain
assert everyones(checked.faults) == {("sum", 2, FIGURES)}, checked.faults
print("checked")
"""


@pytest.mark.parametrize(
    ("workers", "shard"),
    [(3, 1), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(6, 2, marks=pytest.mark.slow)],
)
def test_checked_sums_are_the_usual_ones_and_changed_bits_are_assigned(
    workers: int, shard: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("run", "--workers", str(workers), "--max-restarts", "0", "train.py", str(shard))
    assert paceline(*words, cwd=tmp_path).stdout.split() == ["checked"]
