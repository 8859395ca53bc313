"""Gradient sinks: whatever takes the gradients of a step, the sums are those of plain autograd in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.base.environment import World
from paceline.base.sharding import ALONE, Block, RowShards
from paceline.comm.communicator import Group
from paceline.comm.exact_sums import LEVELS
from paceline.comm.fsdp_reduce_scatter import FsdpReduceScatter
from paceline.comm.gradient_buckets import Bucket, Buckets
from paceline.comm.gradient_sinks import GradSink, GradsInPlace
from paceline.compute.grad_hooks import weighed
from paceline.compute.state_dict import own_of
from paceline.errors import UsageError

IN_PLACE, BUCKETS, ROWS = "in place", "buckets", "buckets of rows"
REDUCE_SCATTER, LATE = "reduce-scatter", "late reduce-scatter"  # whose sums arrive when they are waited for
BY_BLOCK = REDUCE_SCATTER, LATE
F32, F64 = torch.float32, torch.float64
NEAR = {F32: 1e-5, F64: 1e-12}
BYTES = 1, 150  # of the first bucket and of others, above which the next one begins: some hold several parameters


class Kind(NamedTuple):
    """A sink, and of what gradients and sums. Buckets are of two workers, whose backwards take turns."""

    name: str
    dtype: torch.dtype = F64
    exact: bool = False

    def __str__(self) -> str:
        return f"{self.name}{', exact' if self.exact else ''} in {str(self.dtype).removeprefix('torch.')}"

    @property
    def workers(self) -> int:
        """How many there are."""
        return 2 if self.name in (BUCKETS, ROWS) else 1


ALL_KINDS = [
    *(Kind(IN_PLACE, dtype) for dtype in (F32, F64)),
    *(
        Kind(name, dtype, exact)
        for name in (BUCKETS, ROWS, *BY_BLOCK)
        for dtype in (F32, F64)
        for exact in (False, True)
    ),
]
REDUCING = [kind for kind in ALL_KINDS if kind.name != IN_PLACE]
NAMES = (IN_PLACE, BUCKETS, ROWS, REDUCE_SCATTER, LATE)


def with_each_kind(axis: str, values: Iterable[Any], kinds: Sequence[Kind] = ALL_KINDS) -> pytest.MarkDecorator:
    """All kinds with all values. In the fast run each value has a kind of each name, and over the values their dtypes
    and exactness alternate.
    """
    cells = []
    for number, value in enumerate(values):
        fast = set[Kind]()
        for shift, name in enumerate(NAMES):
            of_name = [kind for kind in kinds if kind.name == name]
            fast |= {of_name[(number + shift) % len(of_name)]} if of_name else set()
        for kind in kinds:
            marks = () if kind in fast else (pytest.mark.slow,)
            cells.append(pytest.param(kind, value, marks=marks, id=f"{kind}-{value}"))
    return pytest.mark.parametrize(("kind", axis), cells)


each_kind = pytest.mark.parametrize("kind", ALL_KINDS, ids=str)
each_reducing_kind = pytest.mark.parametrize("kind", REDUCING, ids=str)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """A matrix, a bias, a number, a transposed matrix, a filter with its channels last, and a short bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 5), (6,), (), (4, 7), (2, 3, 2, 2), (3,)]
    values = [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in shapes]
    values[3], values[4] = values[3].t(), values[4].to(memory_format=torch.channels_last)
    return [nn.Parameter(value) for value in values]


COUNT = len(parameters(F64))
SOME = tuple(range(COUNT))


@dataclass(frozen=True)
class Backward:
    """A backward of a micro-batch: a loss of the `used` parameters, of some of them in `two` places."""

    seed: int
    used: Sequence[int] = SOME
    two: Sequence[int] = ()
    weight: float | None = None  # the gradient of the mean loss is seen by hooks, and weighted afterwards
    is_dummy: bool = False

    def loss(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        terms = []
        for number, param in enumerate(params):
            first, second = (torch.randn(param.shape, generator=generator, dtype=F64).to(param) for _ in range(2))
            if number in self.used:
                terms.append((param * first).sin().sum())
            if number in self.two:
                terms.append((param * second).exp().sum())
        return torch.stack(terms).sum()


Step = list[Backward]


def oracle(step: Step, frozen: Sequence[int] = ()) -> list[torch.Tensor | None]:
    """The sums of a step's gradients by plain autograd in float64; None for parameters that get none."""
    params = [nn.Parameter(param.detach().double()) for param in parameters(F64)]
    for number in frozen:
        params[number].requires_grad_(False)
    for backward in step:
        if not backward.is_dummy:
            (backward.loss(params) * (1.0 if backward.weight is None else backward.weight)).backward()
    return [param.grad for param in params]


def assert_near(kind: Kind, grads: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for grad, want in zip(grads, expected, strict=True):
        assert torch.allclose(grad.double(), want, rtol=0, atol=NEAR[kind.dtype] * float(want.abs().max()))


class LateSum:
    """A sum that is under way until it is waited for. What is in its memory before that is no sum."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat, self._sum = flat, flat.clone()
        flat.fill_(math.nan)

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._flat.copy_(self._sum)


class Worker:
    """One worker's parameters, its sink, and the buckets that it has handed on."""

    def __init__(self, kind: Kind, rank: int) -> None:
        self.kind, self.params = kind, parameters(kind.dtype)
        self.shards = RowShards(2, rank) if kind.name == ROWS else ALONE
        self.local_params = [*own_of(dict(enumerate(self.params)), {}, self.shards)[0].values()]
        self.handed: list[tuple[int, torch.Tensor]] = []
        self.sink = self._make_sink()

    def _make_sink(self) -> GradSink:
        if self.kind.name == IN_PLACE:
            return GradsInPlace(self.params)
        if self.kind.name not in BY_BLOCK:
            return Buckets(
                self.params, *BYTES, shards=self.shards, local_params=self.local_params, exact=self.kind.exact
            )
        group, own = Group(World()), Buckets(self.params, *BYTES, exact=self.kind.exact, hooks=False)
        if self.kind.name == LATE:
            group.start_scatter = LateSum
        blocks = [[number] for number in reversed(range(COUNT))]
        sink = FsdpReduceScatter(own, [param.shape for param in self.params], blocks, group)
        sink.rebind(group.allocate)
        return sink

    def begin(self, micro_batches: int) -> None:
        for param in self.params:
            param.grad = None
        if self.sink.begin is not None:
            self.sink.begin(self.take, micro_batches)

    def take(self, bucket: Bucket) -> None:
        self.handed.append((bucket.index, bucket.flat.clone()))

    def used_params(self) -> list[nn.Parameter]:
        """The parameters that a forward uses: gathered ones are made for it, and their hooks with them."""
        if self.kind.name not in BY_BLOCK:
            return self.params
        assert isinstance(self.sink, FsdpReduceScatter)
        gathered = [nn.Parameter(param.detach().clone(), param.requires_grad) for param in self.params]
        for number, param in enumerate(gathered):
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self.sink.land, number))
        return gathered

    def run(self, backward: Backward, last: bool, loss: Callable[..., torch.Tensor] | None = None) -> None:
        total = (loss or backward.loss)(self.used_params())
        if self.sink.begin_backward is not None:
            self.sink.begin_backward(last, backward.is_dummy, backward.weight)
        if backward.weight is None:
            total.backward()
        else:
            with weighed(self.params, backward.weight):
                total.backward()
        if self.sink.end_backward is not None:
            self.sink.end_backward()


class Team:
    """The workers of a step. Their buckets are summed as collectives would."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.workers = [Worker(kind, rank) for rank in range(kind.workers)]
        self.unused: set[int] = set()

    def step(self, step: Step) -> None:
        """Runs a step, and once more if a gradient outgrew its grid."""
        if not self._attempt(step):
            for worker in self.workers:
                worker.sink.abandon(again=True)
            assert self._attempt(step)

    def _attempt(self, step: Step) -> bool:
        self.unused, exact = set(SOME), []
        for rank, worker in enumerate(self.workers):
            worker.handed.clear()
            worker.begin(len(step))
            share = step[rank :: len(self.workers)]
            for number, backward in enumerate(share):
                assert not worker.handed  # before the last backward
                worker.run(backward, last=number == len(share) - 1)
            self.unused &= worker.sink.flush()
            exact += [one for one in [worker.sink.grad_buffers.exact] if one is not None]
        self._sum_buckets()
        maxima = torch.stack([sums.maxima for sums in exact]).amax(0) if exact else None
        fits = [sums.resolve(maxima) for sums in exact]
        return all(fits)

    def _sum_buckets(self) -> None:
        for worker in self.workers:
            for bucket in worker.sink.grad_buffers.buckets:
                index, content = worker.handed[bucket.index]
                assert index == bucket.index
                assert torch.equal(content, bucket.flat)  # nothing came after it was handed on
            assert len(worker.handed) == len(worker.sink.grad_buffers.buckets)
        for handed in zip(*(worker.handed for worker in self.workers), strict=True):
            total = torch.stack([content for _, content in handed]).sum(0)
            for worker in self.workers:
                bucket = worker.sink.grad_buffers.buckets[handed[0][0]]
                bucket.local_shard.copy_(total.view(worker.shards.count, -1)[worker.shards.me])

    def grads(self) -> list[torch.Tensor | None]:
        """The gradients that optimizers see, of full parameters."""
        found = [[param.grad for param in worker.sink.grad_buffers.local_params] for worker in self.workers]
        if self.kind.name != ROWS:
            return found[-1]
        shapes = [param.shape for param in self.workers[0].params]
        return [torch.cat(parts).view(shape) for *parts, shape in zip(*found, shapes, strict=True)]

    def check(self, step: Step, frozen: Sequence[int] = ()) -> None:
        """Compares with plain autograd; a parameter without a gradient has zeros where others may have one."""
        expected = oracle(step, frozen)
        assert self.unused == {number for number, grad in enumerate(expected) if grad is None}
        for grad, want in zip(self.grads(), expected, strict=True):
            if want is None:
                assert grad is None if self.kind.name == IN_PLACE else not grad.any()
                continue
            assert_near(self.kind, [grad], [want])


# -- the sums --------------------------------------------------------------------------------------------------------

ONE = [Backward(1), Backward(2)]  # one for each of two workers
SITUATIONS: dict[str, list[Step]] = {
    "one backward each": [ONE],
    "several backwards": [[Backward(seed) for seed in range(6)]],
    "more of one worker": [[Backward(seed) for seed in range(3)]],
    "several steps": [[Backward(seed), Backward(seed + 1)] for seed in range(3)],
    "a parameter that nothing uses": [[Backward(1, (0, 1, 2, 4, 5)), Backward(2, (0, 1, 2, 4, 5))]],
    "one that the step before has used": [ONE, [Backward(3, (0, 2, 3, 4)), Backward(4, (0, 2, 3, 4))]],
    "one that the step before has not used": [[Backward(3, (0, 2)), Backward(4, (0, 2))], ONE],
    "one that one worker uses": [[Backward(1), Backward(2, (1, 3))]],
    "one that only the first backwards use": [[Backward(1), Backward(2), Backward(3, (0, 3)), Backward(4, (0, 3))]],
    "one that only the last backwards use": [[Backward(3, (0, 3)), Backward(4, (0, 3)), Backward(1), Backward(2)]],
    "a tied parameter": [[Backward(1, two=(0, 5)), Backward(2, two=SOME), Backward(3), Backward(4, two=(1,))]],
    "a parameter used in another place": [[Backward(1, (0, 1)), Backward(2, (), two=(0, 4))]],
    "weights": [[Backward(seed, weight=0.25 * (seed + 1)) for seed in range(4)]],
    "weights and an unused parameter": [[Backward(seed, (0, 5), weight=3.0) for seed in range(4)]],
    "larger gradients in a later step": [ONE, [Backward(1, two=SOME, weight=1e4), Backward(2, weight=1e6)]],
}


@with_each_kind("situation", SITUATIONS)
def test_gradient_sums_are_those_of_plain_autograd(kind: Kind, situation: str) -> None:
    team = Team(kind)
    for step in SITUATIONS[situation]:
        team.step(step)
        team.check(step)


@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind.name in BY_BLOCK], ids=str)
@pytest.mark.parametrize("dummy", [Backward(9, is_dummy=True), Backward(9, (1, 2), is_dummy=True)], ids=["all", "some"])
def test_dummy_backward_adds_no_gradients(kind: Kind, dummy: Backward) -> None:
    team = Team(kind)
    for step in ([dummy, Backward(1)], [Backward(1), dummy], [Backward(1, (0,)), dummy, Backward(2, (0, 3))], [dummy]):
        team.step(step)
        team.check(step)


@each_kind
def test_frozen_parameter_has_no_gradient(kind: Kind) -> None:
    team, frozen = Team(kind), (2, 4)
    team.step(ONE)
    for worker in team.workers:
        for number in frozen:
            worker.params[number].requires_grad_(False)
    team.step(ONE)
    team.check(ONE, frozen)


def reentrant(params: Sequence[torch.Tensor], reentrant: bool) -> torch.Tensor:
    """A loss that uses the last parameter in two checkpoints. Of reentrant ones each runs a backward of its own."""
    start = torch.linspace(-1, 1, 3, dtype=params[-1].dtype).requires_grad_()
    between = checkpoint(lambda x: (x * params[-1]).sin(), start, use_reentrant=reentrant)
    end = checkpoint(lambda x: (x * params[-1]).sin(), between, use_reentrant=reentrant)
    return end.sum() + sum((param.square().sum() for param in params[:-1]), start=end.new_zeros(()))


@each_kind
def test_gradient_of_reentrant_checkpoint_is_summed_or_refused(golden: Callable[[str, str], None], kind: Kind) -> None:
    wholes = parameters(F64)
    reentrant(wholes, False).backward()
    for parts in (False, True):
        team = Team(kind)
        worker = team.workers[0]
        for other in team.workers:  # grids of exact sums
            if other.sink.grad_buffers.exact is not None:
                other.sink.grad_buffers.exact.largest = [8.0] * COUNT
        worker.begin(1)
        if parts and kind.name != IN_PLACE:
            with pytest.raises(UsageError) as caught:
                worker.run(Backward(0), last=True, loss=partial(reentrant, reentrant=True))
            golden("gradient of reentrant checkpoint is summed or refused", str(caught.value))
            continue
        worker.run(Backward(0), last=True, loss=partial(reentrant, reentrant=parts))
        assert worker.sink.flush() == set()
        if (exact := worker.sink.grad_buffers.exact) is not None:
            assert exact.resolve(exact.maxima)
        for param, whole in zip(worker.sink.grad_buffers.local_params, wholes, strict=True):
            want = worker.shards.of(whole.grad, worker.shards.me).reshape(param.shape)
            assert torch.allclose(param.grad.double(), want, rtol=0, atol=8 * NEAR[kind.dtype])


# -- handing on ------------------------------------------------------------------------------------------------------


@each_reducing_kind
def test_only_the_last_backward_reduces_buckets_before_the_flush(kind: Kind) -> None:
    worker = Worker(kind, 0)
    worker.begin(3)
    for seed in range(2):
        worker.run(Backward(seed), last=False)
        assert worker.handed == []
    worker.run(Backward(2, (1, 3, 4, 5)), last=True)
    buckets = worker.sink.grad_buffers.buckets
    complete = itertools.takewhile(lambda bucket: {1, 3, 4, 5}.issuperset(bucket.members), buckets)
    # To the parameters that were not used more may come: flush knows. All blocks leave with the backward.
    expected = {REDUCE_SCATTER: buckets, LATE: buckets[:-1]}.get(kind.name, [*complete])
    assert [index for index, _ in worker.handed] == [bucket.index for bucket in expected]
    assert len(expected) > 1
    worker.sink.flush()
    assert [index for index, _ in worker.handed] == [*range(len(buckets))]


# -- steps that are not completed ------------------------------------------------------------------------------------


@with_each_kind("how", ["in the midst", "in the midst, begun again", "at the end", "at the end, begun again"])
def test_abandoned_step_leaves_no_gradients(kind: Kind, how: str) -> None:
    last, again = "end" in how, "again" in how
    team = Team(kind)
    team.step(ONE)
    for worker in team.workers:
        worker.begin(4)
        worker.run(Backward(5), last=False)
        worker.run(Backward(6, (0, 3, 5)), last)
        worker.sink.abandon(again)
    team.step(ONE)
    team.check(ONE)


@with_each_kind("before", ["nothing", "a step", "an abandoned step"])
def test_backward_outside_of_a_step_is_plain_autograd(kind: Kind, before: str) -> None:
    team = Team(kind)
    if before == "a step":
        team.step(ONE)
    for worker in team.workers:
        if before == "an abandoned step":
            worker.begin(1)
            worker.sink.abandon()
        worker.handed.clear()
        params = worker.used_params()
        for param in params:
            param.grad = None
        for backward in ONE:
            backward.loss(params).backward()
        assert worker.handed == []
        if kind.name in BY_BLOCK:  # gathered parameters are freed
            assert all(param.grad is None for param in params)
        else:
            assert_near(kind, [param.grad for param in params], oracle(ONE))


@pytest.mark.parametrize("kind", [kind for kind in REDUCING if kind.exact], ids=str)
def test_exact_grids_of_a_failed_step_are_restored_unless_it_is_repeated(kind: Kind) -> None:
    team = Team(kind)
    exact = team.workers[0].sink.grad_buffers.exact
    assert exact is not None
    team.step(ONE)
    exact.keep()
    kept = list(exact.largest)
    team.step([Backward(1, weight=100.0), Backward(2)])
    wide = list(exact.largest)
    assert wide != kept
    team.workers[0].sink.abandon(again=True)
    assert exact.largest == wide
    team.workers[0].sink.abandon()
    assert exact.largest == kept
    team.step([Backward(1, weight=100.0), Backward(2)])
    exact.keep()
    team.workers[0].sink.abandon()
    assert exact.largest == wide


# -- norms -----------------------------------------------------------------------------------------------------------


def counted_by(worker: Worker) -> list[list[Block]]:
    """Of the matrix this worker counts one row, of the bias nothing, of the others all."""
    shapes = [tuple(param.shape) for param in worker.sink.grad_buffers.local_params]
    every = [[Block((0,) * len(shape), shape, (0,) * len(shape))] for shape in shapes]
    return [[Block((1, 0), (1, 5), (1, 0))], [], *every[2:]]


@with_each_kind("counts", [False, True])
def test_gradient_norm_is_of_all_gradients_or_of_counted_blocks(kind: Kind, counts: bool) -> None:
    team, step = Team(kind), [Backward(1, (0, 1, 2, 3, 5)), Backward(2, (0, 1, 2, 3, 5))]
    team.step(step)
    expected, found = 0.0, torch.zeros(1, dtype=F64)
    for worker in team.workers if kind.name == ROWS else team.workers[-1:]:
        counted = counted_by(worker) if counts else None
        for number, grad in enumerate(oracle(step)):
            if grad is not None:
                rows = worker.shards.of(grad, worker.shards.me).reshape(worker.local_params[number].shape)
                blocks = [rows] if counted is None else [block.of(rows) for block in counted[number]]
                expected += sum(float(block.square().sum()) for block in blocks)
        squares = worker.sink.grad_buffers.squares(len(step), counted)
        assert (squares.dtype, len(squares)) == (F64, COUNT * LEVELS if kind.exact else 1)
        found = found + squares
    assert float(found.sum()) == pytest.approx(expected, rel=NEAR[kind.dtype])


@pytest.mark.parametrize("changed", [False, True])
def test_prefetched_gpu_norm_is_used_unless_gradients_changed(changed: bool) -> None:
    worker = Worker(Kind(IN_PLACE), 0)
    assert isinstance(worker.sink, GradsInPlace)
    worker.sink._is_cuda = True  # the arithmetic is the same on a CPU
    worker.begin(1)
    worker.run(ONE[0], last=True)
    worker.sink.flush()
    expected = sum(float(grad.square().sum()) for grad in oracle(ONE[:1]))
    for grad in worker.sink.sums:
        grad.mul_(2.0)
    found = worker.sink.squares(1, changed=changed)
    assert float(found) == pytest.approx(expected * (4.0 if changed else 1.0), rel=1e-12)


# -- memory ----------------------------------------------------------------------------------------------------------


def bytes_of(worker: Worker) -> int:
    """What gradients of its parameters take: by shard and level, and once more what exact sums are made into."""
    kind, levels = worker.kind, 2 if worker.kind.dtype == F64 else 1
    if kind.name == IN_PLACE:
        return sum(param.nbytes for param in worker.params)
    elements = [param.numel() for param in worker.params]
    if kind.name == ROWS:  # the larger half of the rows
        elements = [math.ceil(len(param) / 2) * param[0].numel() if param.dim() else 1 for param in worker.params]
    lengths = [sum(elements[number] for number in one.members) for one in worker.sink.grad_buffers.buckets]
    if kind.name == ROWS:  # whole cache lines
        lengths = [math.ceil(length / 16) * 16 for length in lengths]
    wires = worker.shards.count * sum(lengths) * (8 * levels if kind.exact else kind.dtype.itemsize)
    stages = wires if kind.name in BY_BLOCK else 0  # one for each block, as all are of other shapes
    return wires + stages + (sum(lengths) * kind.dtype.itemsize if kind.exact else 0)


@each_kind
def test_reported_memory_is_that_of_gradients(kind: Kind) -> None:
    team = Team(kind)
    team.step(ONE)
    for worker in team.workers:
        assert worker.sink.memory() == bytes_of(worker)


@each_reducing_kind
def test_rebound_sink_sums_in_the_given_memory(kind: Kind) -> None:
    team = Team(kind)
    team.step(ONE)
    given: list[list[torch.Tensor]] = [[] for _ in team.workers]

    def allocate(rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        given[rank].append(torch.full((numel,), 7.0, dtype=dtype, device=device))  # what is in it is no gradient
        return given[rank][-1]

    for rank, worker in enumerate(team.workers):
        worker.sink.rebind(partial(allocate, rank))
    step = [Backward(3, (0, 4)), Backward(4, (0, 4))]
    team.step(step)
    team.check(step)
    for worker, tensors in zip(team.workers, given, strict=True):
        released = {tensor.data_ptr() for tensor in worker.sink.release()}
        assert {tensor.data_ptr() for tensor in tensors} <= released
        assert len(tensors) == (COUNT if kind.name in BY_BLOCK else len(worker.handed))


@each_kind
def test_released_sink_leaves_gradients_to_autograd(kind: Kind) -> None:
    team = Team(kind)
    team.step(ONE)
    for worker in team.workers:
        held = [*worker.params, *worker.sink.grad_buffers.local_params]
        worker.sink.release()
        assert all(param.grad is None for param in held)
        if kind.name not in BY_BLOCK:
            assert not any(param._post_accumulate_grad_hooks for param in worker.params)
            for backward in ONE:
                backward.loss(worker.params).backward()
            assert_near(kind, [param.grad for param in worker.params], oracle(ONE))
