"""Gradient compression between hosts: rounding, top-k and low-rank (PowerSGD) codecs, and their residuals.

Inside of a host sums are whole; the first workers of the hosts exchange codes of these. All decode the same codes in
the same order, so the sum has the same bits on every worker. There are two classes:

- *rounding* (`bf16`, `fp16`, `int8`): each leader gets all hosts' codes of a stretch, adds them up in float32, and all
  get the codes of the sums. Blocks have scales of their own, as in Dettmers et al., "8-bit Optimizers via Block-wise
  Quantization", ICLR 2022; for `fp16` powers of two.
- *lossy* (`topk:R`, `sign`, `powersgd:R`): most is left out. What was not sent is added to what is sent in the next
  step (error feedback): Stich et al., "Sparsified SGD with Memory", NeurIPS 2018; Karimireddy et al., "Error Feedback
  Fixes SignSGD and other Gradient Compression Schemes", ICML 2019; Vogels et al., "PowerSGD", NeurIPS 2019.

What was not sent is kept unscaled, as a sum over rows: steps scale their gradients each in their own way.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from paceline.base.batching import Versions
from paceline.comm.buffer_pool import BufferPool
from paceline.comm.communicator import Group
from paceline.comm.gradient_buckets import Bucket
from paceline.comm.hierarchical import Between, Leaders
from paceline.comm.progress_engine import Steps, last
from paceline.comm.shared_memory import raw_bytes

LOSSY = ("topk", "sign", "powersgd")
CACHED = 1 << 16  # elements that are processed at a time
SEGMENT = 1 << 18  # elements that are encoded in one call
BLOCK = 256  # elements that share a scale
_BITS = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
_SQUARES = 8  # bytes: how much a leader has not sent goes along with what it sends


class Code(Protocol):
    """Encodes rows of float32 as rows of bytes, and back. A row with an element that is not finite never becomes
    finite.
    """

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The bytes of each row."""

    def decode(self, codes: torch.Tensor, length: int) -> torch.Tensor:
        """The float32 rows, of `length` elements each, of these bytes."""

    def width(self, length: int) -> int:
        """The bytes of a row of `length` elements."""


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    rest = -rows.shape[1] % BLOCK
    return (pad(rows, (0, rest)) if rest else rows).view(len(rows), -1, BLOCK)


def _parts(*all_: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields blocks of all tensors together, so few that intermediate results stay in a core's cache."""
    for rows in zip(*all_, strict=True):
        yield from zip(*(row.split(CACHED // BLOCK) for row in rows), strict=True)


def _packed(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.contiguous().flatten(1).view(torch.uint8) for part in parts], 1)


def _unpacked(codes: torch.Tensor, bytes_: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The first bytes of each row as numbers of `dtype`, and the rest."""
    return codes[:, :bytes_].contiguous().view(dtype), codes[:, bytes_:].contiguous()


class Bf16:
    """Rounds to bfloat16."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The bytes of each row."""
        return _packed(rows.bfloat16())

    def decode(self, codes: torch.Tensor, length: int) -> torch.Tensor:
        """The float32 rows of these bytes."""
        return codes.view(torch.bfloat16).float()

    def width(self, length: int) -> int:
        """The bytes of a row of `length` elements."""
        return 2 * length


@dataclass(frozen=True)
class Scaled:
    """Rounds blocks to a small dtype, each divided by a scale of its own."""

    dtype: torch.dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The scales and the rounded numbers of each row."""
        blocks = _blocks(rows)
        scales = torch.empty(*blocks.shape[:2], 1, dtype=torch.float32)
        codes = torch.empty(blocks.shape, dtype=self.dtype)
        for part, scale, code in _parts(blocks, scales, codes):
            torch.amax(part.abs(), -1, keepdim=True, out=scale)
            if self.dtype == torch.int8:
                scale.div_(127).masked_fill_(scale == 0, 1.0)
                code.copy_(part.div(scale).round_().clamp_(-127, 127))
            else:
                scale.copy_(torch.ldexp(torch.ones_like(scale), scale.frexp().exponent - 1))
                code.copy_(part.div(scale))
        return _packed(scales, codes)

    def decode(self, codes: torch.Tensor, length: int) -> torch.Tensor:
        """The float32 rows, of `length` elements each, of these bytes."""
        scales, rest = _unpacked(codes, -(-length // BLOCK) * 4, torch.float32)
        numbers = rest.view(self.dtype).view(len(codes), -1, BLOCK)
        made = torch.empty(numbers.shape, dtype=torch.float32)
        for part, scale, code in _parts(made, scales[..., None], numbers):
            torch.mul(part.copy_(code), scale, out=part)
        return made.flatten(1)[:, :length]

    def width(self, length: int) -> int:
        """The bytes of a row of `length` elements."""
        return -(-length // BLOCK) * (4 + BLOCK * self.dtype.itemsize)


class Nibbles:
    """Rounds blocks to numbers from -7 to 7, two in a byte, each block divided by a scale of its own."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The scales and the packed numbers of each row."""
        blocks = _blocks(rows)
        scales = torch.empty(*blocks.shape[:2], 1, dtype=torch.float32)
        pairs = torch.empty(*blocks.shape[:2], BLOCK // 2, dtype=torch.uint8)
        for part, scale, pair in _parts(blocks, scales, pairs):
            torch.amax(part.abs(), -1, keepdim=True, out=scale)
            scale.div_(7).masked_fill_(scale == 0, 1.0)
            codes = part.div(scale).round_().clamp_(-7, 7).add_(8).to(torch.uint8)
            torch.bitwise_or(codes[:, ::2], codes[:, 1::2] << 4, out=pair)
        return _packed(scales, pairs)

    def decode(self, codes: torch.Tensor, length: int) -> torch.Tensor:
        """The float32 rows, of `length` elements each, of these bytes."""
        scales, rest = _unpacked(codes, -(-length // BLOCK) * 4, torch.float32)
        pairs = rest.view(*scales.shape, BLOCK // 2)
        made = torch.empty(*scales.shape, BLOCK, dtype=torch.float32)
        for part, scale, pair in _parts(made, scales[..., None], pairs):
            part[:, ::2], part[:, 1::2] = pair & 15, pair >> 4
            part.sub_(8).mul_(scale)
        return made.flatten(1)[:, :length]

    def width(self, length: int) -> int:
        """The bytes of a row of `length` elements."""
        return -(-length // BLOCK) * (4 + BLOCK // 2)


class Sign:
    """Keeps one bit per element, times the mean magnitude of its block."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The scales and the packed signs of each row."""
        blocks = _blocks(rows)
        scales = torch.empty(*blocks.shape[:2], 1, dtype=torch.float32)
        bits = torch.empty(*blocks.shape[:2], BLOCK // 8, dtype=torch.uint8)
        for part, scale, bit in _parts(blocks, scales, bits):
            torch.mean(part.abs(), -1, keepdim=True, out=scale)
            torch.sum((part >= 0).view(len(part), -1, 8) * _BITS, -1, dtype=torch.uint8, out=bit)
        return _packed(scales, bits)

    def decode(self, codes: torch.Tensor, length: int) -> torch.Tensor:
        """The float32 rows, of `length` elements each, of these bytes."""
        scales, rest = _unpacked(codes, -(-length // BLOCK) * 4, torch.float32)
        bits = rest.view(*scales.shape, BLOCK // 8)
        made = torch.empty(*scales.shape, BLOCK, dtype=torch.float32)
        for part, scale, bit in _parts(made, scales[..., None], bits):
            part.copy_(((bit[..., None] & _BITS) != 0).view(part.shape)).mul_(2).sub_(1).mul_(scale)
        return made.flatten(1)[:, :length]

    def width(self, length: int) -> int:
        """The bytes of a row of `length` elements."""
        return -(-length // BLOCK) * (4 + BLOCK // 8)


@dataclass(frozen=True)
class TopK:
    """Keeps the largest magnitudes, a `part` of all elements and one at least, each with its index."""

    part: float

    def _count(self, length: int) -> int:
        return max(1, math.ceil(self.part * length))

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The indices and the values of each row."""
        places = rows.abs().topk(self._count(rows.shape[1]), sorted=False).indices
        return _packed(places.int(), rows.gather(1, places))

    def decode(self, codes: torch.Tensor, length: int) -> torch.Tensor:
        """The float32 rows, of `length` elements each, with zeros for what was left out."""
        places, values = _unpacked(codes, 4 * self._count(length), torch.int32)
        made = torch.zeros(len(codes), length, dtype=torch.float32)
        return made.scatter_(1, places.long(), values.view(torch.float32))

    def width(self, length: int) -> int:
        """The bytes of a row of `length` elements."""
        return 8 * self._count(length)


@dataclass
class Feedback:
    """What a worker keeps for the next step.

    `residual` is the residual of each bucket, by index and unscaled; `basis` the basis that each matrix begins with, by
    its parameter's number; `squares` the squared norm of each leader's residual, by the leader's name.
    """

    residual: dict[int, torch.Tensor] = field(default_factory=dict)
    basis: dict[int, torch.Tensor] = field(default_factory=dict)
    squares: dict[int, float] = field(default_factory=dict)


class CodedSum(NamedTuple):
    """How a bucket is summed: its codec as a plan word, and either its code or the rank of its factors."""

    word: str
    code: Code | None
    rank: int

    @property
    def lossy(self) -> bool:
        """Whether the codec leaves a residual."""
        return self.word.partition(":")[0] in LOSSY


def coded_sum(word: str) -> CodedSum:
    """The way to sum buckets that a plan's codec word names."""
    name, _, number = word.partition(":")
    codes: dict[str, Callable[[], Code]] = {"bf16": Bf16, "fp16": partial(Scaled, torch.float16)}
    codes |= {"int8": partial(Scaled, torch.int8), "int4": Nibbles, "sign": Sign, "topk": lambda: TopK(float(number))}
    return CodedSum(word, codes[name]() if name in codes else None, int(number) if name == "powersgd" else 0)


def pack_codes(code: Code, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Encodes all elements of some tensors as one row."""
    nothing = torch.empty(0, dtype=torch.float32)
    flat = torch.cat([nothing, *(_real(tensor).reshape(-1).float() for tensor in tensors)])
    return code.encode(flat[None])[0] if len(flat) else torch.empty(0, dtype=torch.uint8)


def add_codes(code: Code, codes: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Decodes what `pack_codes` has made of tensors like these, and adds it to them."""
    sizes = [_real(tensor).numel() for tensor in tensors]
    flat = code.decode(codes[None], sum(sizes))[0] if len(codes) else torch.empty(0, dtype=torch.float32)
    for tensor, part in zip(map(_real, tensors), flat.split(sizes), strict=True):
        tensor.add_(part.view(tensor.shape).to(tensor))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Codec:
    """Sums buckets among workers, between hosts with the codec that the plan's `word` names.

    With `auto`, `words` has the codec of each bucket, by the name of its first parameter; `names` are all parameters'
    names. `sent` counts the bytes that this worker sent to other hosts, `full` those that it would have sent without a
    codec, and `spent` the seconds of encoding and decoding. `bad` has the numbers of parameters whose gradients were
    not finite on this worker.
    """

    def __init__(self, word: str) -> None:
        self.word, self.auto = word, word.partition(":")[0] == "auto"
        self.lossy = word == "auto:lossy" or coded_sum(word).lossy
        self.words: dict[str, str] = {}
        self.names: Sequence[str] = ()
        self.feedback = Versions(Feedback())
        self.sent = self.full = self.spent = 0.0
        self.bad: set[int] = set()
        self._was, self._next, self._scale = Feedback(), Feedback(), 1.0
        self._buffers = BufferPool()

    @property
    def kind(self) -> str:
        """What it does, for people: its class or, with `auto`, the codecs in use."""
        if self.auto:
            counts = Counter(self.words.values())
            return ", ".join(f"{word} in {count} of {len(self.words)} buckets" for word, count in counts.items())
        return "lossy" if self.lossy else "rounding"

    def word_of(self, bucket: Bucket) -> str:
        """The codec of a bucket, as a plan word."""
        return self.words.get(self.names[bucket.members[0]], "none") if self.auto else self.word

    def begin(self, done: int, expected: float) -> None:
        """Begins a step after `done` transactions, whose gradients are sums over `expected`."""
        self._was, self._next, self._scale = self.feedback.at(done), Feedback(), expected
        self.feedback.pend(done, self._next)
        self.bad.clear()
        self.spent = 0.0

    def fits(self, bucket: Bucket) -> bool:
        """Whether it sums this bucket. Others are summed as they are."""
        return bucket.local_shard.is_floating_point() and len(bucket.local_shard) > 0

    def start(self, bucket: Bucket, among: Group) -> dist.Work | None:
        """Starts summing a bucket, as `Group.start_sum` does."""
        if not self.fits(bucket):
            return among.start_sum(bucket.local_shard)
        self.prepare(bucket, among)
        return among.start_sum(bucket.local_shard, self.between(bucket, among))

    def prepare(self, bucket: Bucket, among: Group) -> None:
        """Prepares this worker's gradients for a sum. A worker that does not lead its host any more adds its residual
        to them.
        """
        flat = bucket.local_shard
        if not math.isfinite(float(flat.sum())) and not bool(flat.isfinite().all()):  # the sum takes a tenth of it
            self.bad |= {number for number, part in bucket.split(flat) if not bool(part.isfinite().all())}
        # Also the residual of a lossy codec that a rounding one, or none, has replaced.
        if bucket.index in self._was.residual and not (among.is_host_leader and coded_sum(self.word_of(bucket)).lossy):
            flat += (self._was.residual[bucket.index] / self._scale).to(flat.device)

    def between(self, bucket: Bucket, among: Group) -> Between:
        """The function that sums a bucket over the leaders of `among`, and counts its time."""
        return partial(self._timed, self.sums(bucket), among.leaders)

    def sums(self, bucket: Bucket) -> Callable[[list[int], Leaders, torch.Tensor], Steps]:
        """The function that sums a bucket over leaders."""
        how = coded_sum(self.word_of(bucket))
        if how.lossy:
            return partial(self._low_rank if how.rank else self._picked, how, bucket)
        return partial(self._uncompressed if how.code is None else self._rounded, how)

    def _timed(self, sums: Callable[..., Steps], names: list[int], leaders: Leaders, flat: torch.Tensor) -> Steps:
        steps = sums(names, leaders, flat)
        while True:
            began = time.perf_counter()
            try:
                until = next(steps)
            except StopIteration:
                return
            finally:
                self.spent += time.perf_counter() - began
            yield until

    def _uncompressed(self, how: CodedSum, names: list[int], leaders: Leaders, flat: torch.Tensor) -> Steps:
        yield from last(leaders.all_reduce(flat))
        self._count(leaders, flat, 2 * flat.nbytes * (leaders.size - 1) / leaders.size)

    def _count(self, leaders: Leaders, flat: torch.Tensor, sent: float) -> None:
        self.sent += sent
        self.full += 2 * flat.nbytes * (leaders.size - 1) / leaders.size

    # -- rounding ---------------------------------------------------------------------------------------------------

    def _rounded(self, how: CodedSum, names: list[int], leaders: Leaders, flat: torch.Tensor) -> Steps:
        """Sums one row of the bucket on each leader.

        Rows go in stretches of full blocks: while one stretch travels, others are encoded and decoded.
        """
        code = how.code
        assert code is not None
        rows = flat.split(max(1, -(-len(flat) // leaders.size)))
        step = max(1, leaders.chunk // code.width(BLOCK)) * BLOCK
        starts = range(0, len(rows[0]), step)
        yield from leaders.in_turns(
            self._stretch(code, leaders, [row[at : at + step] for row in rows]) for at in starts
        )
        self._count(leaders, flat, 0.0)

    def _stretch(self, code: Code, leaders: Leaders, rows: Sequence[torch.Tensor]) -> Steps:
        """Sums a stretch of each row; the last rows may have less of it, or nothing."""
        length = len(rows[0])
        rows = [*rows, *[rows[0][:0]] * (leaders.size - len(rows))]
        segments = _segments(code, length)
        codes, received = (self._buffers.take(leaders.size, code.width(length)) for _ in range(2))
        for row, target in zip(rows, codes, strict=True):
            for elements, bytes_ in segments:
                part = row[elements.start : elements.stop]
                target[bytes_] = code.encode(_float_row(part, len(elements)))[0]
        yield from leaders.all_to_all(codes, received)
        total = received[0]  # codes of the sums of this leader's stretch
        for elements, bytes_ in segments:
            total[bytes_] = code.encode(_sum(code, received[:, bytes_], len(elements))[None])[0]
        yield from last(leaders.all_gather(total, codes))
        for row, source in zip(rows, codes, strict=True):
            for elements, bytes_ in segments:
                part = row[elements.start : elements.stop]
                part.copy_(code.decode(source[None, bytes_], len(elements))[0, : len(part)])
        self.sent += 2 * codes[1:].nbytes
        self._buffers.give(codes, received)

    # -- lossy ------------------------------------------------------------------------------------------------------

    def _owed(self, bucket: Bucket, flat: torch.Tensor) -> torch.Tensor:
        """What this leader should send: the sum of its host, and its residual."""
        total = flat.to(torch.promote_types(flat.dtype, torch.float32), copy=True)
        before = self._was.residual.get(bucket.index)
        return total if before is None else total.addcdiv_(before, torch.tensor(self._scale, dtype=before.dtype))

    def _keep(self, bucket: Bucket, left: torch.Tensor) -> torch.Tensor:
        """Keeps the residual; returns its squared norm.

        It is called before the last message of a step: a step whose last message was not sent counts nowhere.
        """
        self._next.residual[bucket.index] = left.mul_(self._scale)
        return torch.dot(left, left).double()[None]

    def _hear(self, names: list[int], squares: torch.Tensor) -> None:
        for name, more in zip(names, squares.tolist(), strict=True):
            self._next.squares[name] = self._next.squares.get(name, 0.0) + more

    def _picked(self, how: CodedSum, bucket: Bucket, names: list[int], leaders: Leaders, flat: torch.Tensor) -> Steps:
        code = how.code
        assert code is not None
        owed = self._owed(bucket, flat)
        codes = code.encode(owed.float()[None])
        squares = self._keep(bucket, owed.sub_(code.decode(codes, len(flat))[0]))
        everyone = yield from last(leaders.all_gather(torch.cat([codes[0], raw_bytes(squares)])))
        codes, everyones_squares = everyone[:, :-_SQUARES], everyone[:, -_SQUARES:].contiguous()
        self._hear(names, everyones_squares.view(torch.float64).view(-1))
        flat.copy_(_sum(code, codes, len(flat)))
        self._count(leaders, flat, everyone[1:].nbytes)

    def _low_rank(self, how: CodedSum, bucket: Bucket, names: list[int], leaders: Leaders, flat: torch.Tensor) -> Steps:
        """Sends matrices as products of two thin ones; vectors, and matrices that this would not shrink, go as they
        are.

        It makes one step of the power iteration, from the basis of the step before. All use the first leader's bits of
        the left factors, and add up their products element by element: a matrix product has other bits with another
        number of threads.
        """
        owed = self._owed(bucket, flat)
        parts, rank = list(bucket.split(owed)), how.rank
        thin = [(n, part.reshape(len(part), -1)) for n, part in parts if _pays(part, rank)]
        plain = [part.reshape(-1) for _, part in parts if not _pays(part, rank)]
        lefts = [matrix.float() @ self._basis(n, matrix, rank) for n, matrix in thin]
        first = torch.cat([part.reshape(-1) for part in (*lefts, *(part.float() for part in plain))])
        for part in plain:
            part.sub_(part.float())
        factors = first[: sum(left.numel() for left in lefts)]
        yield from leaders.all_reduce(first)
        lefts = list(_views(factors, [left.shape for left in lefts]))
        if leaders.rank == 0:
            for left in lefts:
                left.copy_(torch.linalg.qr(left).Q)
        yield from leaders.broadcast(factors, 0)
        rights = [(left.T @ matrix.float()).T for (_, matrix), left in zip(thin, lefts, strict=True)]
        for (_, matrix), left, right in zip(thin, lefts, rights, strict=True):
            _add_product(matrix, left, right, -1.0)
        squares_by_leader = torch.zeros(leaders.size, dtype=torch.float32)
        squares_by_leader[leaders.rank] = self._keep(bucket, owed)
        second = torch.cat([*(right.reshape(-1) for right in rights), squares_by_leader])
        yield from last(leaders.all_reduce(second))
        self._hear(names, second[-leaders.size :])
        total = torch.zeros_like(owed)
        targets = dict(bucket.split(total))
        for (n, matrix), left, right in zip(thin, lefts, _views(second, [r.shape for r in rights]), strict=True):
            self._next.basis[n] = right.clone()
            _add_product(targets[n].view(matrix.shape), left, right, 1.0)
        dense_parts = _views(first[len(factors) :], [part.shape for _, part in parts if not _pays(part, rank)])
        for (n, _), part in zip((each for each in parts if not _pays(each[1], rank)), dense_parts, strict=True):
            targets[n].copy_(part)
        flat.copy_(total)
        share = (leaders.size - 1) / leaders.size
        self._count(leaders, flat, share * (2 * first.nbytes + factors.nbytes + 2 * second.nbytes))

    def _basis(self, number: int, matrix: torch.Tensor, rank: int) -> torch.Tensor:
        """The basis of the step before; at first a random one, the same on all leaders."""
        if number in self._was.basis:
            return self._was.basis[number]
        chance = torch.Generator().manual_seed(number)
        return torch.randn(matrix.shape[1], rank, generator=chance, dtype=torch.float32)


def _sum(code: Code, codes: torch.Tensor, length: int) -> torch.Tensor:
    """Decodes and adds the rows in their order, one at a time."""
    total = code.decode(codes[:1], length)[0]
    for row in codes[1:]:
        total += code.decode(row[None], length)[0]
    return total


def _segments(code: Code, length: int) -> list[tuple[range, slice]]:
    """The elements of a row that are encoded at a time, and the bytes of their codes."""
    ends = [*range(0, length, SEGMENT), length]
    return [(range(start, end), slice(code.width(start), code.width(end))) for start, end in pairwise(ends)]


def _float_row(part: torch.Tensor, length: int) -> torch.Tensor:
    """A row of float32 that begins with these numbers; zeros follow."""
    row = part.to("cpu", torch.float32)[None]
    return row if len(part) == length else pad(row, (0, length - len(part)))


def _pays(part: torch.Tensor, rank: int) -> bool:
    rows = len(part) if part.dim() > 1 else 1
    return rank * (rows + part.numel() // max(1, rows)) < part.numel() and rows > 1


def _views(flat: torch.Tensor, shapes: list[torch.Size]) -> Iterator[torch.Tensor]:
    start = 0
    for shape in shapes:
        yield flat[start : start + shape.numel()].view(shape)
        start += shape.numel()


def _add_product(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, sign: float) -> None:
    """Adds left @ right.T, element by element in a fixed order."""
    left, right = left.to(matrix.dtype) * sign, right.T.to(matrix.dtype).contiguous()
    rows_at_once = max(1, CACHED // matrix.shape[1])
    products = torch.empty(rows_at_once, matrix.shape[1], dtype=matrix.dtype)
    for rows, factors in zip(matrix.split(rows_at_once), left.split(rows_at_once), strict=True):
        for column, along in enumerate(right):
            rows += torch.mul(factors[:, column, None], along, out=products[: len(rows)])
