"""The sample order: a keyed permutation computed in O(1) per position."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from paceline.errors import UsageError, a

if TYPE_CHECKING:
    from torch import Tensor

_IntOrArray = TypeVar("_IntOrArray", int, Any)

_CURE = "pass an int, or a tensor of integers, for example from torch.arange"
LARGEST = 2**40  # half an index fits 20 bits, so no product below reaches 2**63


class _Cipher(NamedTuple):
    """The cipher of one (size, seed, epoch). It encrypts an index as the pair (a, b), a < `rows` and b < `columns`."""

    size: int
    rows: int
    columns: int
    keys: tuple[tuple[int, int], ...]


def in_order(position: int, size: int, seed: int = 0, epoch: int = 0) -> int:
    """Returns the position itself: the order of the dataset."""
    return position


@overload
def sample_index(position: int, size: int, seed: int = 0, epoch: int = 0) -> int: ...
@overload
def sample_index(position: Tensor, size: int, seed: int = 0, epoch: int = 0) -> Tensor: ...
def sample_index(position: int | Tensor, size: int, seed: int = 0, epoch: int = 0) -> int | Tensor:
    """The index of the sample at `position` (from 0) of `epoch`: a permutation of range(size), in O(1).

    `position` is an int, or an integer tensor of any shape on any device; the result is an int, or an int64
    tensor of that shape on that device, the same numbers either way. `size` is 1 to 2**40. `seed` and `epoch`
    are any ints, and each pair of them orders the samples anew.

    A generalized Feistel cipher with cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains" (CT-RSA 2002); its round functions mix 32 bits as in Wellons, "Prospecting for Hash Functions"
    (2018). It is uniform, not secret. No version of Paceline changes the order: resumed runs depend on it.

    Raises UsageError for a size or a position out of range, and for a position that is not an integer.
    """
    if not 1 <= size <= LARGEST:
        raise UsageError(f"a dataset of {size} samples has no sample order", "use a size from 1 to 2**40")
    # plain ints, because the cache takes 1, 1.0 and True for the same key
    cipher = _cipher(index(size), index(seed), index(epoch))
    if isinstance(position, int):
        return _index(position, cipher)
    import torch  # here, because ints need none

    if isinstance(position, torch.Tensor):
        return _indices(position, cipher)
    try:
        return _index(index(position), cipher)
    except TypeError:
        raise UsageError(f"a position must be an integer, got {a(type(position).__name__)}", _CURE) from None


def indices_of_epochs(positions: Any, size: int, seed: int, epochs: Any) -> Any:
    """Returns what `sample_index` returns for each position in its epoch: all are arrays of int64 of one dimension."""
    import numpy as np  # here, because ints need none

    known, which = np.unique(epochs, return_inverse=True)
    ciphers = [_cipher(size, index(seed), epoch) for epoch in known.tolist()]
    keys: Any = np.array([one.keys for one in ciphers], np.int64).transpose(1, 2, 0)[..., which]  # by round and half
    return _permuted(positions, size, lambda chosen: ciphers[0]._replace(keys=keys[..., chosen]))


def _index(value: int, cipher: _Cipher) -> int:
    if not 0 <= value < cipher.size:
        raise _out_of_range(value, cipher.size)
    value = _encrypt(value, cipher)
    while value >= cipher.size:
        value = _encrypt(value, cipher)
    return value


def _indices(position: Tensor, cipher: _Cipher) -> Tensor:
    import torch

    if position.is_floating_point() or position.is_complex() or position.dtype == torch.bool:
        raise UsageError(f"positions must be integers, got {position.dtype}", _CURE)
    values = position.reshape(-1).to("cpu", torch.int64).numpy()  # whose integers take a third of torch's time
    outside = (values < 0) | (values >= cipher.size)
    if outside.any():
        raise _out_of_range(int(values[outside][0]), cipher.size)
    values = _permuted(values, cipher.size, lambda _: cipher)
    return torch.from_numpy(values).reshape(position.shape).to(position.device)


def _permuted(values: Any, size: int, cipher_of: Callable[[Any], _Cipher]) -> Any:
    """Encrypts numbers until each is below `size`. `cipher_of` returns the cipher of the numbers at some positions."""
    values = _encrypt(values, cipher_of(slice(None)))
    while (outside := values >= size).any():
        values[outside] = _encrypt(values[outside], cipher_of(outside))
    return values


def _out_of_range(position: int, size: int) -> UsageError:
    return UsageError(
        f"position {position} is outside an epoch of {size} samples", f"use a position from 0 to {size - 1}"
    )


@lru_cache(maxsize=64)
def _cipher(size: int, seed: int, epoch: int) -> _Cipher:
    rows = math.isqrt(size - 1) + 1
    rows += rows % 2  # were rows and columns odd, every round and so every permutation would be even
    rounds = 16 if size < 1000 else 8  # even; the smaller the halves, the less a round can mix
    name = f"paceline sample order 1: size {size} seed {seed} epoch {epoch}"
    words = struct.unpack(f"<{2 * rounds}I", hashlib.shake_128(name.encode()).digest(8 * rounds))
    return _Cipher(size, rows, -(-size // rows), tuple(zip(words[::2], words[1::2], strict=True)))


def _encrypt(value: _IntOrArray, cipher: _Cipher) -> _IntOrArray:
    """Applies a permutation of range(rows * columns), which is `size` or slightly more.

    Python ints and int64 arrays go through the very same expressions, and none of them overflows.
    """
    a, b = value // cipher.columns, value % cipher.columns
    modulus, other = cipher.rows, cipher.columns
    for key in cipher.keys:
        a, b = b, (a + (_mix(b, key) * modulus >> 32)) % modulus
        modulus, other = other, modulus
    return a * cipher.columns + b


def _mix(half: _IntOrArray, key: tuple[int, int]) -> _IntOrArray:
    """Hashes `half` to a pseudo-random number below 2**32; the factors are below 2**31, so that int64 is enough."""
    x = half ^ key[0]
    x = (x ^ (x >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ (x >> 15) ^ key[1]) * 0x7FEB352D & 0xFFFFFFFF
    return x ^ (x >> 15)
