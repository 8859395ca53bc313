"""The collectives of Horovod's PyTorch API: by name, synchronous or with handles, and with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch

from paceline.integrations.horovod.compression import Compression, Compressor
from paceline.integrations.horovod.context import CONTEXT, ProcessSet, global_process_set, wait
from paceline.integrations.horovod.exceptions import HorovodArgumentError
from paceline.integrations.horovod.negotiation import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    GLOBAL,
    JOIN,
    REDUCESCATTER,
    Request,
)
from paceline.integrations.horovod.runtime import Entry

Tensors = Sequence[torch.Tensor]
Reduced = Any  # a reduction: Average, Sum, Adasum, Min, Max or Product


class ReduceOp(IntEnum):
    """The reductions, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


def _reduction(op: Reduced, average: bool | None) -> ReduceOp:
    """The reduction that the arguments `op` and `average` (deprecated) ask for."""
    if op is not None and average is not None:
        raise HorovodArgumentError("op= and average= were both given", "use op= alone")
    if op is None:
        return Sum if average is False else Average
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(f"hvd.{one.name}" for one in ReduceOp)
        raise HorovodArgumentError(f"op={op!r} is not a reduction", f"use one of {names}") from None


def _set_of(process_set: ProcessSet) -> int:
    if process_set.process_set_id is None:
        raise HorovodArgumentError(f"{process_set} is not initialized", "pass it to hvd.add_process_set() first")
    return process_set.process_set_id


def _request(
    kind: str, tensors: Tensors, name: str | None, process_set: ProcessSet, op: ReduceOp | None = None, **more: Any
) -> Request:
    """The request for a collective. HorovodArgumentError: it cannot be carried out on these tensors."""
    if not tensors:
        raise HorovodArgumentError(f"{kind} got no tensors", "pass at least one tensor")
    number = _set_of(process_set)
    full_name = CONTEXT.current.name(number, kind, name)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            what = f"a {tensor.layout} tensor" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            cure = "pass a dense tensor; hvd.sparse_allreduce_async reduces sparse ones"
            raise HorovodArgumentError(f"{full_name} got {what}", cure)
        if tensor.device != tensors[0].device:
            raise HorovodArgumentError(f"the tensors of {full_name} are on several devices", "use one device")
        if op is not None and op is not Average:
            real = tensor.dtype.is_floating_point
            if (tensor.is_complex() and op is not Sum) or (op is Adasum and not real):
                raise HorovodArgumentError(f"{full_name}: op {op.name} does not support {tensor.dtype}", "use hvd.Sum")
    shapes = tuple((str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in tensors)
    return Request(
        number, full_name, kind, shapes, op.name if op is not None else "", device=device_of(tensors), **more
    )


def device_of(tensors: Tensors) -> str:
    """The type of the tensors' device."""
    return tensors[0].device.type


def _apply(function: Any, *args: Any) -> Any:
    """Calls a function with a gradient of its own."""
    return function.apply(*args)


def _one(entry: Entry) -> torch.Tensor:
    return entry.outputs[0]


def _all(entry: Entry) -> tuple[torch.Tensor, ...]:
    return tuple(entry.outputs)


# -- handles -----------------------------------------------------------------------------------------------------------


def poll(handle: int) -> bool:
    """Whether a collective is complete, so that `synchronize` does not wait.

    Args:
        handle: What the asynchronous call returned.
    """
    entry = CONTEXT.handles.get(handle)
    return entry is None or entry[0].done.is_set()


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous collective.

    Args:
        handle: What the asynchronous call returned.

    Returns:
        The result: a tensor, a tuple of tensors for a group, or (tensor, received splits) of `alltoall_async`; None for
        a handle that is not known, or was synchronized before.

    Raises:
        HorovodInternalError: The collective failed.
    """
    if handle not in CONTEXT.handles:
        return None
    entry, result = CONTEXT.handles.pop(handle)
    return result(wait(entry))


# -- allreduce ---------------------------------------------------------------------------------------------------------


def _start_allreduce(
    tensors: Tensors,
    outputs: list[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> Entry:
    request = _request(ALLREDUCE, tensors, name, process_set, op, before=float(factors[0]), after=float(factors[1]))
    members = CONTEXT.current.negotiation.sets.get(request.process_set, ())
    if op is Adasum and len(members) & (len(members) - 1):
        raise HorovodArgumentError(
            f"{request.name}: Adasum needs a power of two as the number of workers, not {len(members)}",
            "use 2, 4, 8, ... workers, or op=hvd.Average",
        )
    return CONTEXT.start(request, tensors, outputs)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduced = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `allreduce` and returns a handle; the input must not change before `synchronize`."""
    outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format)]
    factors = (prescale_factor, postscale_factor)
    entry = _start_allreduce([tensor], outputs, name, _reduction(op, average), factors, process_set)
    return CONTEXT.handle(entry, _one)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduced = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `allreduce_` and returns a handle."""
    factors = (prescale_factor, postscale_factor)
    entry = _start_allreduce([tensor], [tensor], name, _reduction(op, average), factors, process_set)
    return CONTEXT.handle(entry, _one)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Reduced = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `grouped_allreduce` and returns a handle."""
    outputs = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in tensors]
    factors = (prescale_factor, postscale_factor)
    entry = _start_allreduce([*tensors], outputs, name, _reduction(op, average), factors, process_set)
    return CONTEXT.handle(entry, _all)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Reduced = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `grouped_allreduce_` and returns a handle."""
    factors = (prescale_factor, postscale_factor)
    entry = _start_allreduce([*tensors], [*tensors], name, _reduction(op, average), factors, process_set)
    return CONTEXT.handle(entry, _all)


class _Allreduce(torch.autograd.Function):
    """Reduces tensors with the reduction of their gradients as its backward."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[Tensors], Any], *tensors: torch.Tensor) -> Any:
        """Reduces the tensors."""
        ctx.call = call
        return tuple(synchronize(call([one.detach() for one in tensors])))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Reduces the gradients in the same way."""
        return None, *synchronize(ctx.call([grad.contiguous() for grad in grads]))


def _differentiable_allreduce(tensors: Tensors, name: str | None, compression: Any, **how: Any) -> list[torch.Tensor]:
    if (op := how["op"]) in (Min, Max, Product) and any(one.requires_grad for one in tensors):
        raise HorovodArgumentError(f"allreduce with op {op.name} has no gradient", "call it on tensor.detach()")
    packed = [compression.compress(one) for one in tensors]
    names = iter([name])  # the backward has a name of its own
    reduced = _apply(
        _Allreduce,
        lambda group: grouped_allreduce_async(group, name=next(names, None), **how),
        *(one for one, _ in packed),
    )
    return [compression.decompress(one, ctx) for one, (_, ctx) in zip(reduced, packed, strict=True)]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduced = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces a tensor over the workers. Gradients flow through it.

    Args:
        tensor: A tensor with the same shape and dtype on every worker.
        average: Deprecated: True for `Average`, False for `Sum`.
        name: The collective's name; without one, calls are matched in their order.
        compression: `Compression.none` or `Compression.fp16`.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        prescale_factor: A factor before the reduction.
        postscale_factor: A factor after the reduction.
        process_set: The workers that take part.

    Returns:
        The result, in a new tensor.

    Raises:
        HorovodInternalError: The workers disagree about the tensor or the reduction, or a worker was lost.
    """
    factors = (prescale_factor, postscale_factor)
    return grouped_allreduce([tensor], average, name, compression, op, *factors, process_set)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduced = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduces several tensors at once, as `allreduce` does; returns new tensors."""
    how = {"op": _reduction(op, average), "process_set": process_set}
    how |= {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _differentiable_allreduce(tensors, name, compression, **how)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduced = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces a tensor in place, as `allreduce` does but without gradients."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = synchronize(handle)
    return result


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Reduced = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduces several tensors in place at once."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    result: tuple[torch.Tensor, ...] = synchronize(handle)
    return result


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: Reduced, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts adding sparse tensors, whose rows are gathered.

    Args:
        tensor: A sparse COO tensor.
        name: The collective's name.
        op: `Average` or `Sum`.
        process_set: The workers that take part.

    Returns:
        A function that waits, and returns the sparse result.
    """
    if (kind := _reduction(op, None)) not in (Average, Sum):
        raise HorovodArgumentError(f"sparse tensors cannot be reduced with op {kind.name}", "use Average or Sum")
    indices = allgather_async(tensor._indices().transpose(0, 1).contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def result() -> torch.Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices).transpose(0, 1)
        if kind is Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(all_indices, all_values, tensor.size(), check_invariants=True)

    return result


# -- allgather ---------------------------------------------------------------------------------------------------------


def _start_allgather(tensors: Tensors, name: str | None, process_set: ProcessSet) -> Entry:
    return CONTEXT.start(_request(ALLGATHER, tensors, name, process_set), [*tensors], [])


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts `allgather` and returns a handle."""
    return CONTEXT.handle(_start_allgather([tensor], name, process_set), _one)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts `grouped_allgather` and returns a handle."""
    return CONTEXT.handle(_start_allgather(tensors, name, process_set), _all)


class _Allgather(torch.autograd.Function):
    """Gathers tensors; its backward averages the gradients of all workers, and returns those of its own rows."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        """Gathers the tensors."""
        ctx.process_set, ctx.rows = process_set, [len(one) if one.dim() else 1 for one in tensors]
        return synchronize(grouped_allgather_async([one.detach() for one in tensors], name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Averages the gradients, as Horovod does."""
        averaged = synchronize(grouped_allreduce_async(grads, op=Average, process_set=ctx.process_set))
        rows = torch.tensor([ctx.rows], dtype=torch.int64)
        before = synchronize(allgather_async(rows, process_set=ctx.process_set))[: ctx.process_set.rank()].sum(0)
        parts = zip(averaged, before.tolist(), ctx.rows, strict=True)
        return None, None, *(grad.narrow(0, first, count) for grad, first, count in parts)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates the tensors of all workers along the first dimension. Gradients flow through it.

    Args:
        tensor: A tensor with the same dtype and shape on every worker, but for the first dimension.
        name: The collective's name.
        process_set: The workers that take part.

    Returns:
        The rows of all workers, in the order of their ranks.
    """
    result: torch.Tensor = _apply(_Allgather, name, process_set, tensor)[0]
    return result


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Gathers several tensors at once, as `allgather` does."""
    result: tuple[torch.Tensor, ...] = _apply(_Allgather, name, process_set, *tensors)
    return result


# -- broadcast ---------------------------------------------------------------------------------------------------------


def _start_broadcast(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    request = _request(BROADCAST, [tensor], name, process_set, root=int(root_rank))
    members = CONTEXT.current.negotiation.sets.get(request.process_set, ())
    if root_rank not in members:
        raise HorovodArgumentError(
            f"{request.name}: root_rank={root_rank} is not among the workers {list(members)}",
            "pass a rank of the process set, as hvd.rank() counts it",
        )
    return CONTEXT.handle(CONTEXT.start(request, [tensor], [output]), _one)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts `broadcast` and returns a handle."""
    output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return _start_broadcast(tensor, output, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts `broadcast_` and returns a handle."""
    return _start_broadcast(tensor, tensor, root_rank, name, process_set)


class _Broadcast(torch.autograd.Function):
    """Broadcasts a tensor; its backward averages the gradients, which only the root returns."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        """Broadcasts the tensor."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor.detach(), root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Averages the gradients, as Horovod does."""
        averaged = synchronize(allreduce_async(grads[0], op=Average, process_set=ctx.process_set))
        is_root = CONTEXT.current.rank == ctx.root_rank
        return averaged if is_root else torch.zeros_like(averaged), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the tensor of one worker on all workers. Gradients flow through it.

    Args:
        tensor: A tensor with the same shape and dtype on every worker.
        root_rank: The worker whose values count.
        name: The collective's name.
        process_set: The workers that take part.
    """
    result: torch.Tensor = _apply(_Broadcast, tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrites a tensor with that of one worker, as `broadcast` does but without gradients."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


# -- alltoall ----------------------------------------------------------------------------------------------------------


def _splits_of(tensor: torch.Tensor, splits: Any, members: int, name: str | None) -> tuple[int, ...]:
    """The rows that go to each member. HorovodArgumentError: they do not fit the tensor."""
    what = f"alltoall {name!r}" if name else "alltoall"
    if not tensor.dim():
        raise HorovodArgumentError(f"{what} got a tensor without dimensions", "pass tensor.reshape(1)")
    if splits is None:
        rows, rest = divmod(len(tensor), members)
        if rest:
            raise HorovodArgumentError(
                f"{what}: {len(tensor)} rows cannot be split equally among {members} workers", "pass splits="
            )
        return (rows,) * members
    if isinstance(splits, torch.Tensor) and splits.dtype not in (torch.int32, torch.int64):
        raise HorovodArgumentError(f"{what}: splits have the dtype {splits.dtype}", "use torch.int32")
    numbers = tuple(int(one) for one in (splits.tolist() if isinstance(splits, torch.Tensor) else splits))
    if len(numbers) != members or min(numbers, default=0) < 0 or sum(numbers) != len(tensor):
        raise HorovodArgumentError(
            f"{what}: splits={list(numbers)} do not divide {len(tensor)} rows among {members} workers",
            "pass one number per worker; their sum must be the number of rows",
        )
    return numbers


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `alltoall` and returns a handle, whose result is always (tensor, received splits)."""
    members = CONTEXT.current.negotiation.sets.get(_set_of(process_set), (0,))
    request = _request(ALLTOALL, [tensor], name, process_set, splits=_splits_of(tensor, splits, len(members), name))
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32)

    def result(entry: Entry) -> tuple[torch.Tensor, torch.Tensor]:
        return entry.outputs[0], torch.tensor(entry.received, dtype=like.dtype, device=like.device)

    return CONTEXT.handle(CONTEXT.start(request, [tensor], []), result)


class _Alltoall(torch.autograd.Function):
    """Exchanges rows; its backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        """Exchanges the rows."""
        output, ctx.received = synchronize(alltoall_async(tensor.detach(), splits, name, process_set))
        ctx.process_set = process_set
        ctx.mark_non_differentiable(ctx.received)
        return output, ctx.received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Sends each gradient to the worker that its row came from."""
        handle = alltoall_async(grads[0].contiguous(), ctx.received, process_set=ctx.process_set)
        return synchronize(handle)[0], None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of a tensor to each worker. Gradients flow through it.

    Args:
        tensor: A tensor with the same dtype and shape on every worker, but for the first dimension.
        splits: How many rows go to each worker: integers, in the order of the ranks. By default, equally many.
        name: The collective's name.
        process_set: The workers that take part.

    Returns:
        The rows from all workers, in the order of their ranks; if `splits` was given, also how many each worker sent.
    """
    output, received = _apply(_Alltoall, tensor, splits, name, process_set)
    return output if splits is None else (output, received)


# -- reducescatter -----------------------------------------------------------------------------------------------------


def _start_reducescatter(
    tensors: Tensors, name: str | None, op: Reduced, process_set: ProcessSet, factors: tuple[float, float]
) -> Entry:
    kind = _reduction(op, None)
    if kind is Adasum:
        raise HorovodArgumentError("reducescatter does not support op Adasum", "use hvd.Average or hvd.Sum")
    if any(not one.dim() for one in tensors):
        raise HorovodArgumentError("reducescatter got a tensor without dimensions", "pass tensor.reshape(1)")
    before, after = map(float, factors)
    request = _request(REDUCESCATTER, tensors, name, process_set, kind, before=before, after=after)
    return CONTEXT.start(request, [*tensors], [])


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Reduced = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts `reducescatter` and returns a handle."""
    factors = (prescale_factor, postscale_factor)
    return CONTEXT.handle(_start_reducescatter([tensor], name, op, process_set, factors), _one)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Reduced = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts `grouped_reducescatter` and returns a handle."""
    factors = (prescale_factor, postscale_factor)
    return CONTEXT.handle(_start_reducescatter(tensors, name, op, process_set, factors), _all)


class _Reducescatter(torch.autograd.Function):
    """Reduces and scatters tensors; its backward gathers the gradients."""

    @staticmethod
    def forward(ctx: Any, name: str | None, how: dict[str, Any], *tensors: torch.Tensor) -> Any:
        """Reduces the tensors."""
        ctx.how = how
        return synchronize(grouped_reducescatter_async([one.detach() for one in tensors], name, **how))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Gathers the gradients; those of a sum count once for each worker, as in Horovod."""
        how = ctx.how
        factor = how["prescale_factor"] * how["postscale_factor"]
        factor *= how["process_set"].size() if how["op"] is Sum else 1
        gathered = grouped_allgather_async([grad * factor for grad in grads], process_set=how["process_set"])
        return None, None, *synchronize(gathered)


def _differentiable_reducescatter(
    tensors: Tensors, name: str | None, compression: Any, how: dict[str, Any]
) -> list[torch.Tensor]:
    how["op"] = op = _reduction(how["op"], None)
    if op in (Min, Max, Product) and any(one.requires_grad for one in tensors):
        raise HorovodArgumentError(f"reducescatter with op {op.name} has no gradient", "call it on tensor.detach()")
    packed = [compression.compress(one) for one in tensors]
    reduced = _apply(_Reducescatter, name, how, *(one for one, _ in packed))
    return [compression.decompress(one, ctx) for one, (_, ctx) in zip(reduced, packed, strict=True)]


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduced = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces a tensor over the workers; each gets some rows of the result. Gradients flow through it.

    Args:
        tensor: A tensor with the same shape and dtype on every worker.
        name: The collective's name.
        compression: `Compression.none` or `Compression.fp16`.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`.
        process_set: The workers that take part.
        prescale_factor: A factor before the reduction.
        postscale_factor: A factor after the reduction.

    Returns:
        This worker's rows. If they cannot be divided equally, the first workers get one row more.
    """
    how = {"op": op, "process_set": process_set}
    how |= {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _differentiable_reducescatter([tensor], name, compression, how)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Reduced = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduces and scatters several tensors at once, as `reducescatter` does."""
    how = {"op": op, "process_set": process_set}
    how |= {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _differentiable_reducescatter(tensors, name, compression, how)


# -- without tensors ---------------------------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all workers of a process set have called it."""
    number = _set_of(process_set)
    wait(CONTEXT.start(Request(number, CONTEXT.current.name(number, BARRIER, None), BARRIER), (), []))


def join(device: int = -1) -> int:
    """Declares that this worker has no more data, and waits until all workers have called it.

    Until then this worker contributes zeros to each allreduce of the others.

    Args:
        device: Has no effect: the zeros are made where the others' tensors are.

    Returns:
        The rank that called it last.
    """
    return wait(CONTEXT.start(Request(GLOBAL, JOIN, JOIN), (), [])).number
