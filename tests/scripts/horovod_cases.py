"""Runs Horovod's API on the workers of a run and compares it with numpy, or with one process, in float64.

horovod_cases.py CASE...

Each case raises AssertionError where a result differs, and prints its name on rank 0 where none does.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import paceline.horovod.torch as hvd

torch.set_default_dtype(torch.float64)
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The tensor of a worker, which every worker can make."""
    values = np.random.default_rng(rank + 1).uniform(-4, 4, shape)
    return torch.tensor(values).round(decimals=2).to(dtype)


def everybody(*shape: int, dtype: torch.dtype = torch.float64) -> np.ndarray:
    return np.stack([of_rank(rank, *shape, dtype=dtype).double().numpy() for rank in range(hvd.size())])


def same(one: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-12) -> None:
    assert one.shape == expected.shape, (one.shape, expected.shape)
    np.testing.assert_allclose(one.detach().double().numpy(), expected, rtol=tolerance, atol=tolerance)


def error_of(call: Callable[[], object]) -> str:
    """The kind and text of the error that a call must raise."""
    try:
        call()
    except (hvd.HorovodInternalError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


@case
def factors() -> None:
    """Horovod's rule: on CPUs 16-bit numbers are scaled in float32, integers in float64; sums have the tensor's dtype.

    A sum of three fp16 numbers is rounded twice, so it may be off by an ulp of a partial sum for each addition.
    """
    workers, factor = hvd.size(), 0.1915194503788923
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64):
        values = of_rank(hvd.rank(), 17, 3).mul(25).to(dtype)
        everyone = torch.tensor(everybody(17, 3)).mul(25).to(dtype)
        math = torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64
        before = (everyone.to(math) * factor).to(dtype).double()
        ulp = 0.0 if dtype is torch.int64 else torch.finfo(dtype).eps
        off = ulp * (workers - 1) * before.abs().sum(0)
        result = hvd.allreduce(values, op=hvd.Sum, prescale_factor=factor)
        assert result.dtype is dtype
        assert ((result.double() - before.sum(0)).abs() <= off).all(), dtype
        scaled = (everyone.double().sum(0).to(math) * factor).to(dtype).double()
        result = hvd.allreduce(values, op=hvd.Sum, postscale_factor=factor)
        off = ulp * (workers * everyone.double().abs().sum(0) * factor)
        assert ((result.double() - scaled).abs() <= off).all(), dtype


@case
def reductions() -> None:
    kinds = {hvd.Sum: np.sum, hvd.Average: np.mean, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.int64, 0)):
        for shape in ((), (3,), (4, 5), (0, 2)):
            for op, reduce in kinds.items():
                mine, expected = (
                    of_rank(hvd.rank(), *shape, dtype=dtype),
                    reduce(everybody(*shape, dtype=dtype), axis=0),
                )
                expected = np.trunc(expected) if dtype is torch.int64 else expected
                same(hvd.allreduce(mine, op=op), expected, tolerance)
                same(hvd.allreduce_(mine.clone(), op=op), expected, tolerance)
    mine, all_of_them = of_rank(hvd.rank(), 6), everybody(6)
    same(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), all_of_them.sum(0) * 1.5)
    same(hvd.allreduce(mine, average=False), all_of_them.sum(0))
    same(hvd.allreduce(mine, compression=hvd.Compression.fp16), all_of_them.mean(0), 5e-3)
    view = of_rank(hvd.rank(), 4, 3).t()
    assert hvd.allreduce_(view, op=hvd.Sum) is view
    same(view, everybody(4, 3).sum(0).T)
    for one, shape in zip(hvd.grouped_allreduce([mine, of_rank(hvd.rank(), 2, 2)]), ((6,), (2, 2)), strict=True):
        same(one, everybody(*shape).mean(0))


@case
def gathers() -> None:
    rows = [rank + 2 for rank in range(hvd.size())]
    parts = [of_rank(rank, rows[rank], 3).numpy() for rank in range(hvd.size())]
    same(hvd.allgather(torch.tensor(parts[hvd.rank()])), np.concatenate(parts))
    first, second = hvd.grouped_allgather([torch.tensor(parts[hvd.rank()]), torch.arange(2) + hvd.rank()])
    same(first, np.concatenate(parts))
    same(second, np.concatenate([np.arange(2) + rank for rank in range(hvd.size())]))
    for root in range(hvd.size()):
        same(hvd.broadcast(of_rank(hvd.rank(), 5), root), of_rank(root, 5).numpy())
        tensor = of_rank(hvd.rank(), 4, 2).t()
        hvd.broadcast_(tensor, root)
        same(tensor, of_rank(root, 4, 2).numpy().T)
    value = {"a": [1, (2.5, None)], 3: torch.arange(3), "text": "x" * 2000, "set": {2, "b"}}
    got = hvd.broadcast_object(value if hvd.rank() == 0 else None)
    assert got["a"] == [1, (2.5, None)]
    assert got[3].tolist() == [0, 1, 2]
    assert len(got["text"]) == 2000
    assert got["set"] == {2, "b"}
    assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": rank} for rank in range(hvd.size())]


@case
def exchanges() -> None:
    size, rank = hvd.size(), hvd.rank()
    splits = [[(giver + taker) % 3 for taker in range(size)] for giver in range(size)]
    given = [of_rank(giver, sum(splits[giver]), 2).numpy() for giver in range(size)]
    starts = np.cumsum([[0, *row] for row in splits], axis=1)
    expected = np.concatenate([given[g][starts[g][rank] : starts[g][rank + 1]] for g in range(size)])
    output, received = hvd.alltoall(torch.tensor(given[rank]), torch.tensor(splits[rank], dtype=torch.int32))
    same(output, expected)
    assert received.tolist() == [splits[giver][rank] for giver in range(size)]
    rows = 2 * size + 1  # the first worker gets one more
    begin = 2 * rank + min(rank, 1)
    part = slice(begin, begin + 2 + (rank == 0))
    same(hvd.reducescatter(of_rank(rank, rows, 3)), everybody(rows, 3).mean(0)[part])
    same(hvd.reducescatter(of_rank(rank, rows), op=hvd.Max), everybody(rows).max(0)[part])
    for one in hvd.grouped_reducescatter([of_rank(rank, rows, 3)] * 2, op=hvd.Sum, postscale_factor=0.5):
        same(one, everybody(rows, 3).sum(0)[part] * 0.5)


@case
def gradients() -> None:
    tensor = of_rank(hvd.rank(), 4).requires_grad_()
    hvd.allreduce(tensor, op=hvd.Sum).sum().backward()
    assert tensor.grad is not None
    same(tensor.grad, np.full(4, float(hvd.size())))
    tensor.grad = None
    (hvd.allgather(tensor) * (1.0 + torch.arange(4.0).repeat(hvd.size()))).sum().backward()
    same(tensor.grad, 1.0 + np.arange(4.0))


@case
def orders() -> None:
    """Names come in another order on each worker, from two threads, and repeated names cost a number."""
    names = [f"layer{number}" for number in range(40)]
    for _ in range(3):
        order = np.random.default_rng(hvd.rank()).permutation(len(names))
        results: dict[int, torch.Tensor] = {}

        def submit(numbers: np.ndarray, results: dict[int, torch.Tensor] = results) -> None:
            handles = {n: hvd.allreduce_async(of_rank(hvd.rank(), n + 1), name=names[n], op=hvd.Sum) for n in numbers}
            for number, handle in handles.items():
                results[int(number)] = hvd.synchronize(handle)

        threads = [threading.Thread(target=submit, args=(half,)) for half in np.array_split(order, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, result in results.items():
            same(result, everybody(number + 1).sum(0))
        assert len(results) == len(names)


@case
def disagreements() -> None:
    """Workers that disagree get an error that names both, and go on."""
    rank = hvd.rank()
    for call, words in (
        (lambda: hvd.allreduce(torch.ones(2 + rank), name="a"), "shape: worker 0 has ['2'], worker 1 has ['3']"),
        (lambda: hvd.allreduce(torch.ones(2, dtype=(torch.float32, torch.int32)[rank % 2]), name="b"), "dtype"),
        (lambda: hvd.allreduce(torch.ones(2), name="c", op=(hvd.Sum, hvd.Max)[rank % 2]), "reduction"),
        (lambda: hvd.broadcast(torch.ones(2), rank % 2, name="d"), "root rank: worker 0 has 0, worker 1 has 1"),
        (lambda: hvd.allgather(torch.ones(2, 2 + rank), name="e"), "shape: worker 0 has ['anyx2']"),
    ):
        error = error_of(call)
        assert words in error, error
    handle = hvd.allreduce_async(torch.ones(1), name="twice") if rank == 0 else None
    if handle is not None:
        error = error_of(lambda: hvd.allreduce_async(torch.ones(1), name="twice"))
        assert "submitted a second time" in error, error
    hvd.barrier()
    handle = hvd.allreduce_async(torch.ones(1), name="twice") if handle is None else handle
    same(hvd.synchronize(handle), np.ones(1))
    for value in (object(), {"x": [len]}):
        error = error_of(partial(hvd.allgather_object, value))
        assert "not unpickle" in error, error


@case
def process_sets() -> None:
    even = hvd.add_process_set(range(0, hvd.size(), 2))
    last = hvd.add_process_set([hvd.size() - 1])
    assert even.included() == (hvd.rank() % 2 == 0)
    assert last.size() == 1
    if even.included():
        same(hvd.allreduce(of_rank(hvd.rank(), 3), process_set=even), everybody(3)[::2].mean(0))
        assert even.rank() == hvd.rank() // 2
    else:
        error = error_of(lambda: hvd.allreduce(torch.ones(1), process_set=even))
        assert "call it on members" in error, error
    assert hvd.remove_process_set(even)
    assert hvd.remove_process_set(last)
    assert not hvd.remove_process_set(hvd.global_process_set)
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init(process_sets=[hvd.ProcessSet([0])])


@case
def joins() -> None:
    for step in range(hvd.rank() + 1):  # worker r has r + 1 batches
        left = [rank for rank in range(hvd.size()) if rank >= step]
        total = everybody(3)[left].sum(0)
        same(hvd.allreduce(of_rank(hvd.rank(), 3), op=hvd.Sum), total)
    assert hvd.join() == hvd.size() - 1
    same(hvd.allreduce(torch.ones(2)), np.ones(2))  # names without a text begin anew after a join


@case
def adasum() -> None:
    """Against the recursion of the paper, in numpy."""

    def combine(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        dot = one @ other
        return (1 - dot / (2 * one @ one)) * one + (1 - dot / (2 * other @ other)) * other

    vectors = list(everybody(7))
    while len(vectors) > 1:
        vectors = [combine(one, other) for one, other in zip(vectors[::2], vectors[1::2], strict=True)]
    same(hvd.allreduce(of_rank(hvd.rank(), 7), op=hvd.Adasum), vectors[0])
    orthogonal = torch.eye(hvd.size())[hvd.rank()]
    same(hvd.allreduce(orthogonal, op=hvd.Adasum), np.ones(hvd.size()))  # the sum
    same(hvd.allreduce(torch.ones(3), op=hvd.Adasum), np.ones(3))  # the mean
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), op=hvd.Adasum)
    model(of_rank(hvd.rank(), 3)).sum().backward()
    optimizer.step()
    updates = [-0.5 * one for one in everybody(3)]
    while len(updates) > 1:
        updates = [combine(one, other) for one, other in zip(updates[::2], updates[1::2], strict=True)]
    same(model.weight, 1 + updates[0][None])


class Net(torch.nn.Module):
    """An embedding, whose gradient may be sparse, and two layers."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 5, sparse=sparse)
        self.first, self.second = torch.nn.Linear(5, 6), torch.nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(self.embedding(tokens))))
        return result


def train(net: Net, optimizer: torch.optim.Optimizer, batches: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        for tokens, labels in batch:
            (F.cross_entropy(net(tokens), labels) / len(batch)).backward()
        optimizer.step()


@case
def training() -> None:
    """`DistributedOptimizer` against one process that has all rows, for each option."""
    generator = torch.Generator().manual_seed(0)
    size, rank, steps, passes = hvd.size(), hvd.rank(), 4, 2
    tokens = torch.randint(9, (steps, passes, size, 4), generator=generator)
    labels = torch.randint(3, (steps, passes, size, 4), generator=generator)
    torch.manual_seed(3)
    start = Net().state_dict()
    lists = [["first.weight", "second.weight"], ["first.bias"]]
    for options in (
        {},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"groups": lists},
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum},
        {"sparse": True},
        {"sparse": True, "sparse_as_dense": True},
        {"named_parameters": None},
    ):
        given = dict(options)
        nets = [Net(bool(given.get("sparse"))) for _ in range(2)]
        given.pop("sparse", None)
        nets[1].load_state_dict(start)
        nets[0].load_state_dict(start if rank == 0 else Net().state_dict())
        hvd.broadcast_parameters(nets[0].state_dict(), root_rank=0)
        named = dict(nets[0].named_parameters())
        if given.get("groups") is lists:
            given["groups"] = [[named[name] for name in group] for group in lists]
        makes = [lambda net: torch.optim.SGD(net.parameters(), lr=0.1)] * 2
        inner = makes[0](nets[0])
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1)  # made before: it must not undo the wrapping
        given = {"named_parameters": nets[0].named_parameters(), "backward_passes_per_step": passes, **given}
        optimizer = hvd.DistributedOptimizer(inner, **given)
        assert isinstance(optimizer, torch.optim.SGD)
        assert schedule.optimizer is inner
        train(
            nets[0],
            optimizer,
            [[(t[rank], y[rank]) for t, y in zip(*step, strict=True)] for step in zip(tokens, labels, strict=True)],
        )
        alone = makes[1](nets[1])
        if options.get("op") == hvd.Sum:
            alone.param_groups[0]["lr"] *= size
        train(
            nets[1],
            alone,
            [
                [(t.flatten(), y.flatten()) for t, y in zip(*step, strict=True)]
                for step in zip(tokens, labels, strict=True)
            ],
        )
        tolerance = 2e-3 if "compression" in options else 1e-12
        for name, parameter in nets[0].named_parameters():
            same(parameter, nets[1].get_parameter(name).detach().numpy(), tolerance)


@case
def optimizer_states() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * (hvd.rank() + 1), betas=(0.5 + hvd.rank() / 9, 0.9))
    if hvd.rank() == 0:  # the others have no state yet
        net(torch.arange(9)).square().sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.9)
    moments = torch.cat([optimizer.state[one]["exp_avg"].flatten() for one in net.parameters()])
    assert float(moments.abs().sum()) > 0
    for other in hvd.allgather(moments[None]):
        same(other, moments.numpy(), 0)


@case
def batch_norms() -> None:
    rows = [3 + rank for rank in range(hvd.size())]
    batches = [of_rank(rank, rows[rank], 4, 2) for rank in range(hvd.size())]
    full = torch.cat(batches).requires_grad_()
    expected, synced = torch.nn.BatchNorm1d(4), hvd.SyncBatchNorm(4)
    mine = batches[hvd.rank()].clone().requires_grad_()
    for _ in range(2):
        (expected(full).square() * torch.arange(2.0)).sum().backward()
        (synced(mine).square() * torch.arange(2.0)).sum().backward()
    begin = sum(rows[: hvd.rank()])
    assert full.grad is not None
    assert mine.grad is not None
    assert synced.running_var is not None
    same(mine.grad, full.grad[begin : begin + rows[hvd.rank()]].numpy(), 1e-9)
    same(synced.running_mean, expected.running_mean.numpy())
    same(synced.running_var, expected.running_var.numpy())
    same(hvd.allreduce(synced.weight.grad, op=hvd.Sum), expected.weight.grad.numpy(), 1e-9)
    same(synced.eval()(mine), expected.eval()(full)[begin : begin + rows[hvd.rank()]].detach().numpy())


@case
def timelines() -> None:
    hvd.start_timeline("timeline.json", mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="traced")
    hvd.barrier()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        events = json.loads(Path("timeline.json").read_text())
        row = next(one["pid"] for one in events if one.get("args", {}).get("name") == "allreduce.traced")
        names = [event["name"] for event in events if event["pid"] == row and event["ph"] == "B"]
        assert names == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"], names


@case
def places() -> None:
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()


@case
def waits() -> None:
    """Worker 1 does not submit a name until the others were warned; then it shuts down."""
    if hvd.rank() == 1:
        threading.Event().wait(1.5)
        same(hvd.allreduce(torch.ones(1), name="late"), np.ones(1))
        hvd.shutdown()
        return
    same(hvd.allreduce(torch.ones(1), name="late"), np.ones(1))
    error = error_of(lambda: hvd.allreduce(torch.ones(1), name="never"))
    assert "worker 1 called hvd.shutdown() or ended" in error, error


if __name__ == "__main__":
    hvd.init()
    for name in sys.argv[1:]:
        CASES[name]()
        if not hvd.is_initialized() or hvd.rank() == 0:
            print(f"passed {name}", flush=True)
