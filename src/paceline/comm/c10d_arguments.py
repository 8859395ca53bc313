"""Converts tensors of torch.distributed calls to flat buffers, or refuses them.

Tensors that are only moved travel as integers of the same width, so every dtype is supported. Unsigned integers are
reduced as signed integers of the same width: sums, products and bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.errors import UnsupportedError

Op: Any = dist.ReduceOp.RedOpType
Tensors = Sequence[torch.Tensor]
Back = list[tuple[torch.Tensor, torch.Tensor]]  # what to copy where at the end
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_INTEGER = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, *_SIGNED}
_REAL = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
if hasattr(torch, "bcomplex32"):  # since torch 2.15
    _COMPLEX.add(torch.bcomplex32)
_SPARSE = (_INTEGER | _REAL) - {*_SIGNED}  # of those that torch computes with
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# gloo refuses other dtypes; of bool it makes bytes that are neither true nor false.
_ADDED_BY_GLOO = {torch.int64, torch.int32, torch.int8, torch.uint8, *_REAL}


class Reduction(NamedTuple):
    """A reduction: `of` combines two flat tensors, with `out=`; `gloo` is gloo's name for it, None if gloo has none.

    A mean is a sum here, which the caller divides.
    """

    op: Any
    of: Callable[..., torch.Tensor]
    gloo: Any


def _unsigned(choose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Minimum or maximum of unsigned numbers of 16 bits and more, which torch does not compare.

    Their order is that of signed numbers with the first bit inverted.
    """

    def of(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        first = torch.iinfo(a.dtype).min
        return torch.bitwise_xor(choose(a ^ first, b ^ first), first, out=out)

    return of


_BITS = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}
_SUMS = {Op.SUM: torch.add, Op.AVG: torch.add}
_CHOICES = {Op.MIN: torch.minimum, Op.MAX: torch.maximum}
_COMBINED: dict[Any, Any] = {**_SUMS, Op.PRODUCT: torch.mul, **_CHOICES, **_BITS}


@cache
def _reduction(op: Any, dtype: torch.dtype) -> Reduction | tuple[str, str]:
    """How numbers of this dtype are combined; or why they cannot be, and what to do instead."""
    if op not in _COMBINED:
        return "only NCCL supports this reduction", "multiply before the call, and use ReduceOp.SUM"
    if dtype not in _INTEGER | _REAL | _COMPLEX:
        return "torch cannot compute with this dtype on the CPU", "convert the tensors, for example to float32"
    if op in _BITS and dtype not in _INTEGER:
        return "bitwise reductions need an integer dtype", "view the tensors as integers of the same width"
    if op not in _SUMS and dtype in _COMPLEX:
        return "complex numbers can only be added", "use ReduceOp.SUM or ReduceOp.AVG"
    if op == Op.AVG and dtype in _INTEGER:
        return "the mean of integers may not be an integer", "use ReduceOp.SUM, and divide the result"
    of = _unsigned(_CHOICES[op]) if op in _CHOICES and dtype in _SIGNED else _COMBINED[op]
    # Which of two numbers gloo chooses depends on their order if one is NaN.
    added = dtype.to_real() in _ADDED_BY_GLOO and not (op in _CHOICES and dtype in _REAL)
    return Reduction(op, of, dist.ReduceOp(Op.SUM if op == Op.AVG else op) if added else None)


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """How numbers of this dtype are combined. Raises KeyError if they cannot be."""
    result = _reduction(op, dtype)
    if not isinstance(result, Reduction):
        raise KeyError(f"{op} of {dtype}: {result[0]}")
    return result


class CollectiveRequest(NamedTuple):
    """A collective that torch asks for, with or without a reduction: what each refusal names."""

    kind: str
    dtype: torch.dtype
    op: Any = None

    def refuse(self, why: str, cure: str) -> UnsupportedError:
        """The error that says `why` the collective cannot be done, and what to do."""
        reduction = f" with ReduceOp.{self.op.name}" if self.op is not None else ""
        return UnsupportedError(f"{self.kind} of {_text(self.dtype)}{reduction}: {why}", cure)

    # -- sizes --------------------------------------------------------------------------------------------------

    def one_each(self, tensors: Tensors, size: int) -> None:
        """Checks that a list has one tensor for each worker."""
        if len(tensors) != size:
            raise self.refuse(
                f"the list has {len(tensors)} tensors for {size} workers", "pass one tensor for each worker"
            )

    def fits(self, part_size: int, slot_size: int) -> None:
        """Checks that the part that a worker keeps is as long as the slot that it goes to."""
        if part_size != slot_size:
            raise self.refuse(
                f"a worker's own part has {part_size} elements, but its output has {slot_size}", "use equal sizes"
            )

    def rows(self, full: torch.Tensor, part: torch.Tensor, size: int) -> list[torch.Tensor]:
        """Splits a flat tensor into parts as long as `part`, one for each worker."""
        if len(full) != size * len(part):
            why = f"one tensor has {len(full)} elements and the other {len(part)}, for {size} workers"
            raise self.refuse(why, f"pass {size * len(part)} and {len(part)} elements")
        return list(full.view(size, len(part)).unbind(0))

    def split(self, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
        """The number of elements that each worker's rows of a tensor have: those of `splits`, or equal ones."""
        if not tensor.dim():
            raise self.refuse("a tensor without dimensions has no rows", "pass tensor.reshape(1)")
        rows = len(tensor)
        splits = splits or [rows // size] * size
        if len(splits) != size or sum(splits) != rows or min(splits) < 0:
            why = f"the splits {' + '.join(map(str, splits))} do not add up to {rows} rows for {size} workers"
            raise self.refuse(why, "pass one split per worker; their sum must be the number of rows")
        width = tensor.numel() // rows if rows else 0
        return [width * split for split in splits]


def check_request(kind: str, tensors: Tensors, op: Any = None, into: Tensors = ()) -> CollectiveRequest:
    """Checks the tensors of a collective, those that it writes `into` among them.

    They have to be dense ones of one dtype on the CPU; otherwise raises UnsupportedError.
    """
    if not tensors:
        raise UnsupportedError(f"{kind} got no tensors", "pass at least one tensor")
    request = CollectiveRequest(kind, tensors[0].dtype, op)
    for tensor in tensors:
        if tensor.dtype != request.dtype:
            raise request.refuse(f"another tensor has the dtype {_text(tensor.dtype)}", "pass tensors of one dtype")
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
            raise request.refuse(*_elsewhere(tensor))
        if tensor.is_conj() or tensor.is_neg():
            raise request.refuse("a tensor is a conjugated view", "pass tensor.resolve_conj().resolve_neg()")
    for tensor in into:
        if not tensor.is_contiguous() and _overlaps(tensor):
            raise request.refuse("elements of an output tensor share memory", "pass tensor.contiguous()")
    return request


def _elsewhere(tensor: torch.Tensor) -> tuple[str, str]:
    """Why a tensor's elements cannot be sent as they lie in memory, and what to do."""
    if tensor.is_quantized:
        return "the scale of a quantized tensor would not be sent", "send tensor.int_repr() and the scale separately"
    if tensor.layout is not torch.strided:
        return f"a tensor's layout is {_text(tensor.layout)}", "pass tensor.to_dense()"
    return f"a tensor is on the device {tensor.device}", "pass a tensor on the CPU"


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(step == 0 and count > 1 for count, step in zip(tensor.shape, tensor.stride(), strict=True))


def check_reduction(kind: str, tensors: Tensors, op: Any, into: Tensors) -> tuple[CollectiveRequest, Reduction]:
    """Checks the tensors of a collective that reduces, and its reduction."""
    request = check_request(kind, tensors, op, into)
    result = _reduction(op, request.dtype)
    if not isinstance(result, Reduction):
        raise request.refuse(*result)
    return request, result


def check_sparse(kind: str, tensor: torch.Tensor, op: Any) -> CollectiveRequest:
    """Checks the tensor of a sum of sparse tensors."""
    request = CollectiveRequest(kind, tensor.dtype, op)
    if op != Op.SUM or tensor.dtype not in _SPARSE or tensor.is_inference():
        raise request.refuse(
            "this reduction of sparse tensors is not supported", "pass tensor.to_dense(), or use a sum of float32"
        )
    return request


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers that can be copied."""
    return plain(tensor).view(_CARRIERS[tensor.itemsize])


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers that can be combined."""
    memory, signed = plain(tensor), _SIGNED.get(tensor.dtype)
    if signed is not None:
        return memory.view(signed)
    return torch.view_as_real(memory) if memory.is_complex() else memory


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a tensor that any thread may write, even outside of inference mode; call it there."""
    if not tensor.is_inference():
        return tensor.detach()
    geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), *geometry)


def outside_inference() -> AbstractContextManager[Any]:
    """A context outside of inference mode.

    Tensors that are made in inference mode cannot be written outside of it, where a collective may go on.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def flat(tensor: torch.Tensor) -> tuple[torch.Tensor, Back]:
    """A flat contiguous tensor of the same elements, and what to copy back at the end unless it is the same memory."""
    if tensor.is_contiguous():
        return tensor.view(-1), []
    dense = tensor.contiguous()
    return dense.view(-1), [(tensor, dense)]


def write(back: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies each source to its target."""
    for target, source in back:
        target.copy_(source)


def _text(what: torch.dtype | torch.layout) -> str:
    return str(what).removeprefix("torch.")
