"""Converts tensors of torch.distributed calls to flat buffers, or refuses them.

What only moves is carried as whole numbers of its width, so that any dtype can. Unsigned numbers are combined as signed
ones of their width: sums, products and bits are the same.
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
_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, *_SIGNED}
_REAL = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
if hasattr(torch, "bcomplex32"):  # since torch 2.15
    _COMPLEX.add(torch.bcomplex32)
_SPARSE = (_WHOLE | _REAL) - {*_SIGNED}  # of those that torch computes with
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# The others it refuses; of bool it makes bytes that are neither true nor false.
_ADDED_BY_GLOO = {torch.int64, torch.int32, torch.int8, torch.uint8, *_REAL}


class Reduction(NamedTuple):
    """`of` combines two flat tensors, with `out=`; `gloo` is what gloo is asked for to the same end, None if it cannot.
    A mean is a sum here, which the caller divides.
    """

    op: Any
    of: Callable[..., torch.Tensor]
    gloo: Any


def _unsigned(choose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Torch does not compare unsigned numbers of 16 bits and more: their order is that of signed ones with the first
    bit turned over.
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
    """How numbers are combined; or why they are not, and what to do then."""
    if op not in _COMBINED:
        return "only NCCL multiplies on the way", "multiply before, and use ReduceOp.SUM"
    if dtype not in _WHOLE | _REAL | _COMPLEX:
        return "torch does not compute with these on the CPU", "convert them, such as to float32"
    if op in _BITS and dtype not in _WHOLE:
        return "only whole numbers are combined by bits", "view them as whole numbers of their width"
    if op not in _SUMS and dtype in _COMPLEX:
        return "complex numbers can only be added", "use ReduceOp.SUM or ReduceOp.AVG"
    if op == Op.AVG and dtype in _WHOLE:
        return "whole numbers have no mean among them", "use ReduceOp.SUM, and divide as you need it"
    of = _unsigned(_CHOICES[op]) if op in _CHOICES and dtype in _SIGNED else _COMBINED[op]
    # Which of two numbers gloo chooses depends on their order if one is NaN.
    added = dtype.to_real() in _ADDED_BY_GLOO and not (op in _CHOICES and dtype in _REAL)
    return Reduction(op, of, dist.ReduceOp(Op.SUM if op == Op.AVG else op) if added else None)


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """How numbers are combined that can be. KeyError: they cannot."""
    found = _reduction(op, dtype)
    if not isinstance(found, Reduction):
        raise KeyError(f"{op} of {dtype}: {found[0]}")
    return found


class Asked(NamedTuple):
    """A collective as it is asked for, with a reduction or none: what each of its refusals says."""

    kind: str
    dtype: torch.dtype
    op: Any = None

    def refuse(self, why: str, cure: str) -> UnsupportedError:
        reduction = f" with ReduceOp.{self.op.name}" if self.op is not None else ""
        return UnsupportedError(f"{self.kind} of {_text(self.dtype)}{reduction}: {why}", cure)

    # -- sizes --------------------------------------------------------------------------------------------------

    def one_each(self, tensors: Tensors, size: int) -> None:
        if len(tensors) != size:
            raise self.refuse(f"the list has {len(tensors)} tensors for {size} workers", "give one for each worker")

    def fits(self, own: int, place: int) -> None:
        """What a worker keeps for itself is as long as the place where it goes."""
        if own != place:
            raise self.refuse(f"a worker's own part has {own} elements, and its place {place}", "make them equal")

    def rows(self, whole: torch.Tensor, part: torch.Tensor, size: int) -> list[torch.Tensor]:
        """A flat tensor in stretches as long as the flat `part`, one for each worker."""
        if len(whole) != size * len(part):
            why = f"one tensor has {len(whole)} elements and the other {len(part)}, for {size} workers"
            raise self.refuse(why, f"give {size * len(part)} and {len(part)}")
        return list(whole.view(size, len(part)).unbind(0))

    def split(self, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
        """The elements of each worker's rows of a tensor: of `splits`, or of equal ones."""
        if not tensor.dim():
            raise self.refuse("a tensor without dimensions has no rows", "give tensor.reshape(1)")
        rows = len(tensor)
        splits = splits or [rows // size] * size
        if len(splits) != size or sum(splits) != rows or min(splits) < 0:
            why = f"{rows} rows are not {' + '.join(map(str, splits))}"
            raise self.refuse(why, f"give splits for {size} workers that add up to the rows")
        width = tensor.numel() // rows if rows else 0
        return [width * split for split in splits]


def asked(kind: str, tensors: Tensors, op: Any = None, into: Tensors = ()) -> Asked:
    """A collective of `tensors`, those that it writes `into` among them: dense ones of one dtype on the CPU, or it is
    refused.
    """
    if not tensors:
        raise UnsupportedError(f"{kind} of no tensors", "give at least one")
    what = Asked(kind, tensors[0].dtype, op)
    for tensor in tensors:
        if tensor.dtype != what.dtype:
            raise what.refuse(f"another of its tensors is of {_text(tensor.dtype)}", "give tensors of one dtype")
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
            raise what.refuse(*_elsewhere(tensor))
        if tensor.is_conj() or tensor.is_neg():
            raise what.refuse("a tensor is a conjugated view", "give tensor.resolve_conj().resolve_neg()")
    for tensor in into:
        if not tensor.is_contiguous() and _overlaps(tensor):
            raise what.refuse("elements of a tensor that it writes share memory", "give tensor.contiguous()")
    return what


def _elsewhere(tensor: torch.Tensor) -> tuple[str, str]:
    """Why a tensor's elements do not lie in this process's memory as they are; and what to do."""
    if tensor.is_quantized:
        return "their scale would stay behind", "send tensor.int_repr(), and the scale beside it"
    if tensor.layout is not torch.strided:
        return f"a tensor's layout is {_text(tensor.layout)}", "give tensor.to_dense()"
    return f"a tensor is on the device {tensor.device}", "give it on the CPU"


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(step == 0 and count > 1 for count, step in zip(tensor.shape, tensor.stride(), strict=True))


def reducing(kind: str, tensors: Tensors, op: Any, into: Tensors) -> tuple[Asked, Reduction]:
    """The same, with a reduction that can be computed."""
    what = asked(kind, tensors, op, into)
    found = _reduction(op, what.dtype)
    if not isinstance(found, Reduction):
        raise what.refuse(*found)
    return what, found


def asked_sparse(kind: str, tensor: torch.Tensor, op: Any) -> Asked:
    """The same for a sum of sparse tensors."""
    made = Asked(kind, tensor.dtype, op)
    if op != Op.SUM or tensor.dtype not in _SPARSE or tensor.is_inference():
        raise made.refuse("sparse tensors like this cannot be combined", "give tensor.to_dense(), or a sum of float32")
    return made


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
    """The same memory in a tensor that any thread may write, whether or not it is in inference mode. Outside of it."""
    if not tensor.is_inference():
        return tensor.detach()
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), *place)


def outside_inference() -> AbstractContextManager[Any]:
    """Tensors that are made in inference mode cannot be written outside of it, where a collective may be moved on."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def flat(tensor: torch.Tensor) -> tuple[torch.Tensor, Back]:
    """A flat contiguous tensor of the same elements, and what to copy back at the end unless it is the same memory."""
    if tensor.is_contiguous():
        return tensor.view(-1), []
    dense = tensor.contiguous()
    return dense.view(-1), [(tensor, dense)]


def write(back: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in back:
        target.copy_(source)


def _text(what: torch.dtype | torch.layout) -> str:
    return str(what).removeprefix("torch.")
