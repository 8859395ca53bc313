"""Gives optimizers float32 tensors for bfloat16 weights (`precision=bf16:pure`): master copies, or stochastic rounding.

The optimizers hold a float32 tensor for each of this worker's rows of the parameters, on any layout. Master copies
keep what an update changes below the rounding of bfloat16 (Micikevicius et al., "Mixed Precision Training", ICLR
2018). With stochastic rounding there are no copies: a weight is rounded up with the probability that keeps its
expected value (Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.nn import Parameter

from paceline.base.sharding import Block, LocalShard
from paceline.compute.state_dict import marked, marks_of

_AT_ONCE = 1 << 20  # elements whose noise is made at a time


class MasterWeights:
    """Float32 tensors that optimizers hold for bfloat16 `rows`, this worker's shards of the parameters.

    With `shards`, which are the blocks of the full parameters that the rows hold, weights are rounded stochastically,
    and the float32 tensors take memory only during an update. `seed` returns the seed of the rounding's draws. With
    `hosted` the tensors are in host memory.
    """

    def __init__(
        self,
        rows: Mapping[str, Parameter],
        hosted: bool,
        shards: Mapping[str, tuple[LocalShard, tuple[int, ...]]] | None,
        seed: Callable[[], int],
    ) -> None:
        self._rows, self._shards, self._seed = rows, shards, seed
        self.held = {name: marked(_widened(row, hosted), marks_of(row)) for name, row in rows.items()}

    @property
    def masters(self) -> Mapping[str, Parameter]:
        """The master copies by parameter; none with stochastic rounding."""
        return self.held if self._shards is None else {}

    @contextmanager
    def update(self, step: int, factor: float) -> Iterator[None]:
        """Lets optimizers update the float32 tensors in the context, then rounds them into the weights. Gradients are
        multiplied by the `factor` in float32.

        A master copy counts as long as it rounds to the weight: where a script has changed the weight (clipped it, or
        loaded another one), the weight counts.
        """
        for name, row in self._rows.items():
            held = self.held[name]
            if self._shards is None:
                follow(held.detach(), row.detach())
            else:
                held.data = row.detach().to(held.device, held.dtype)
            held.grad = None if row.grad is None else row.grad.to(held.device, held.dtype).mul_(factor)
        yield
        for name, row in self._rows.items():
            held = self.held[name]
            held.grad = None
            if self._shards is None:
                row.detach().copy_(held.detach())
                continue
            shard, shape = self._shards[name]
            round_stochastically(held.detach(), shard, shape, f"{self._seed()}/{step}/{name}")
            row.detach().copy_(held.detach())
            held.data = torch.full((), torch.nan, dtype=held.dtype, device=held.device).expand(held.shape)

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Sets the master copies: to these values where there are any, else to the weights."""
        for name, master in self.masters.items():
            master.detach().copy_(values.get(name, self._rows[name].detach()))


def _widened(row: Parameter, hosted: bool) -> torch.Tensor:
    device, pinned = "cpu" if hosted else row.device, hosted and row.is_cuda
    return torch.empty(row.shape, dtype=torch.float32, device=device, pin_memory=pinned).copy_(row.detach())


def follow(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Copies a bfloat16 weight into its master copy where that does not round to the weight."""
    weight = weight.to(master.device)
    torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype), out=master)


# -- stochastic rounding --------------------------------------------------------------------------------------------


def round_stochastically(values: torch.Tensor, shard: LocalShard, shape: tuple[int, ...], key: str) -> None:
    """Rounds float32 values, this `shard` of a tensor with this full `shape`, to bfloat16 values in place.

    The draw of an element depends on the key and on the element's position in the full tensor, so that it is the same
    under every plan. Values that bfloat16 has stay as they are.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    keys = [int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:])]
    for block in shard.blocks:
        part = block.of(values)
        rows = part.shape[0] if part.dim() else 1
        step = max(1, _AT_ONCE * rows // max(1, part.numel()))
        for first in range(0, rows, step):
            rows_at_once = part[first : first + step] if part.dim() else part
            noise = _noise(_positions(block, shape, first, rows_at_once), *keys)
            # A bfloat16 is the upper half of a float32: noise below it carries over in proportion to what is cut off.
            rows_at_once.copy_(noise.add_(rows_at_once.view(torch.int32)).bitwise_and_(-65536).view(torch.float32))


def _positions(block: Block, shape: tuple[int, ...], first: int, part: torch.Tensor) -> torch.Tensor:
    """Returns the positions (int32, modulo 2^32) in the full tensor of a block's rows from `first` on."""
    positions = torch.zeros((), dtype=torch.int32, device=part.device)
    for dim, (begin, length) in enumerate(zip(block.at, part.shape, strict=True)):
        begin += first if dim == 0 else 0
        along = torch.arange(begin, begin + length, dtype=torch.int64, device=part.device).to(torch.int32)
        positions = positions.unsqueeze(-1) * shape[dim] + along
    return positions


def _noise(positions: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """Returns 16 random bits for each position, as int32: a counter hashed twice, each time with another key."""
    return _mix(_mix(positions.bitwise_xor_(first)).add_(second)).bitwise_and_(0xFFFF)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """The finalizer of MurmurHash3 (Austin Appleby, public domain), in place: each bit of a result depends on all bits
    of the input.
    """
    for shift, factor in ((16, -2048144789), (13, -1028477387), (16, 1)):  # factors as signed numbers
        shifted = (bits >> shift).bitwise_and_((1 << 32 - shift) - 1)  # without copies of the sign
        bits.bitwise_xor_(shifted).mul_(factor)
    return bits
