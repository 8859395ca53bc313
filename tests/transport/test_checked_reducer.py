"""The checked reduction gives the sums of the usual one bit for bit, and names the worker whose part changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import paceline

# One step of a reducer: gradients drawn from `seed`, and a small tensor behind them. `after` runs before the wait.
REDUCE = """
def reduced(reducer, number, seed, vector, after=lambda: None):
    group.declare(f"step {number}", check=False, kind="gradients")
    reducer.begin(f"step {number}")
    for p in params:
        p.grad = None
    buckets.begin(reducer.send)
    generator = torch.Generator().manual_seed(seed)
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
    return [bucket.local_shard.clone() for bucket in buckets.buckets], vector
"""
SCRIPT = """
import sys
import torch
import paceline
from paceline.base.mesh import Mesh
from paceline.base.sharding import RowShards
from paceline.comm.bucket_reducer import BucketReducer, ReduceStep
from paceline.comm.checked_collectives import FIGURES, TransferChecks
from paceline.comm.checked_reducer import CheckedReducer
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


REDUCE
def summed(reducer, number, after=lambda: None):
    sums, vector = reduced(reducer, number, rank, small.clone(), after)
    return [*sums, vector]


usual = summed(BucketReducer(group, route), 0)
looked, checks = [], TransferChecks(list("abcd"))
checked = CheckedReducer(group, route, lambda bucket: looked.append(bucket.index), checks)
sums = summed(checked, 1)
checked.confirm()
assert checks.faults == [], checks.faults
assert looked == [0, 1, 2, 3]
assert all(torch.equal(a, b) for a, b in zip(usual, sums)), [rank, usual, sums]
assert checked.squares() is None


def flip(flat):
    flat.view(torch.uint8)[0] ^= 4


def everyones(faults):
    return {tuple(fault) for one in group.gather_json(faults) for fault in one}


# Buckets begin with the last parameter.
for number, (where, index) in enumerate([("bucket", 0), ("transit", 2), ("bucket", 1)], start=2):
    def tamper(bucket):
        if (where, bucket.index, rank) == ("bucket", index, 1):
            flip(bucket.flat)

    def tamper_transit(kind, tensors, part):
        if (where, kind, tensors, rank) == ("transit", "contribution", "dcba"[index], 1):
            flip(part)

    checks.begin()
    checked.tamper, checks.tamper = tamper, tamper_transit
    summed(checked, number)
    assert everyones(checks.faults) == {("contribution", 1, "dcba"[index])}, checks.faults
checked.tamper = checks.tamper = None

bucket = buckets.buckets[1]
checks.begin()
summed(checked, 9, after=lambda: flip(bucket.local_shard) if rank == 2 else None)
checked.confirm()
assert everyones(checks.faults) == {("memory", 2, "c")}, checks.faults
checks.begin()

def tamper_sum(kind, tensors, part):  # what worker 2 has added up changes on its way
    if (kind, tensors, rank) == ("sum", FIGURES, 2):
        flip(part)
checks.tamper = tamper_sum
summed(checked, 10)
checks.tamper = None
assert everyones(checks.faults) == {("sum", 2, FIGURES)}, checks.faults
print("checked")
"""


@pytest.mark.parametrize(
    ("workers", "shard"),
    [(3, 1), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(6, 2, marks=pytest.mark.slow)],
)
def test_checked_sums_are_the_usual_ones_and_changed_bits_are_assigned(
    workers: int, shard: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("REDUCE", REDUCE))
    words = ("run", "--workers", str(workers), "--max-restarts", "0", "train.py", str(shard))
    assert paceline(*words, cwd=tmp_path).stdout.split() == ["checked"]


# Two hosts with two workers each. A wrong attempt comes before each step.
CODED = """
import os
import torch
import paceline
from paceline.comm import hierarchical
from paceline.comm.bucket_reducer import BucketReducer, ReduceStep
from paceline.comm.checked_collectives import TransferChecks
from paceline.comm.checked_reducer import CheckedReducer
from paceline.comm.compression import Codec
from paceline.comm.gradient_buckets import Buckets
from torch.nn import Parameter

hierarchical.host_key = lambda: f"host {int(os.environ['PACELINE_RANK']) // 2}"
team = paceline.join()
group, rank = team.group, team.rank
assert group.leaders == [0, 2], group.leaders
names, tensors = list("abc"), {"a", "b", "c"}
params = [Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in
          [((70, 30), torch.float32), ((5,), torch.float32), ((300,), torch.float64)]]
group.declare("memory")
buckets = Buckets(params, 1, 1, group.allocate)


REDUCE
def summed(reducer, done):
    reducer.codec.begin(done, 8.0)
    sums, vector = reduced(reducer, done, 4 * done + rank, torch.full((3,), float(rank), dtype=torch.float64))
    assert vector.tolist() == [6.0, 6.0, 6.0]
    return sums


def tampers(kind, worker):
    done = []

    def tamper(at, tensors, part):
        if (at, rank) == (kind, worker) and tensors in names and not done:
            done.append(part.view(torch.uint8)[-1].bitwise_xor_(4))
    return tamper


faults = [("code", 2), ("contribution", 1), ("sum", 0), ("code", 0), ("contribution", 3), ("sum", 2)]
for word in WORDS:
    usual, coded, checks = Codec(word), Codec(word), TransferChecks(names)
    usual.names = coded.names = names
    reducer = BucketReducer(group, [ReduceStep("sum", group)], usual)
    checked = CheckedReducer(group, [ReduceStep("sum", group)], lambda bucket: None, checks, coded)
    for done in range(3):
        expected = summed(reducer, done)
        for kind, worker in faults[2 * done : 2 * done + 2]:
            checks.begin()
            checks.tamper = tampers(kind, worker)
            summed(checked, done)
            seen = {tuple(fault) for one in group.gather_json(checks.faults) for fault in one}
            assert {fault[:2] for fault in seen} == {(kind, worker)}, (word, kind, worker, seen)
        checks.begin()
        checks.tamper = None
        sums = summed(checked, done)
        checked.confirm()
        assert checks.faults == [], (word, checks.faults)
        assert all(map(torch.equal, expected, sums)), (word, done)
    plain, kept = usual.feedback.at(3), coded.feedback.at(3)
    assert plain.residual.keys() == kept.residual.keys() and plain.squares == kept.squares, word
    assert all(torch.equal(left, kept.residual[index]) for index, left in plain.residual.items()), word
    assert bool(kept.residual) == (coded.lossy and rank in (0, 2)), word
print("checked")
"""


@pytest.mark.parametrize(
    "words",
    [["int8", "topk:0.1", "powersgd:2"], pytest.param(["bf16", "fp16", "sign", "topk:1.0"], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_codes_on_their_way_are_checked_and_error_feedback_is_the_usual_one(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CODED.replace("REDUCE", REDUCE).replace("WORDS", repr(words)))
    run = ("run", "--workers", "4", "--max-restarts", "0", "train.py")
    assert paceline(*run, cwd=tmp_path).stdout.split() == ["checked"]
