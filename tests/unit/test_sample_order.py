"""The order of the samples: a bijection, the same for ints and tensors, uniform, and fixed for ever."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.data.order import LARGEST, _cipher, _encrypt, sample_index
from paceline.errors import UsageError

SIZES = st.one_of(st.integers(1, 50), st.integers(1, LARGEST), st.integers(LARGEST - 50, LARGEST))


def order_of(size: int, seed: int = 0, epoch: int = 0) -> torch.Tensor:
    return sample_index(torch.arange(size), size, seed, epoch)


def drawn(places: Sequence[int], size: int, draws: int, by: str = "seed") -> torch.Tensor:
    """What the orders of so many seeds (or epochs) have at these places, a row for each. The steps are those of
    `sample_index`, which takes the keys of one of them; here each key is a tensor of all.
    """
    ciphers = [_cipher(size, **{"seed": 0, "epoch": 0, by: key}) for key in range(draws)]
    keys = torch.tensor([cipher.keys for cipher in ciphers]).unbind(1)
    together = ciphers[0]._replace(keys=tuple(pair.T[..., None] for pair in keys))  # type: ignore[arg-type]
    found = _encrypt(torch.tensor(places).expand(draws, -1), together)
    while (outside := found >= size).any():
        found = torch.where(outside, _encrypt(found, together), found)
    for key in (0, 1, draws // 2, draws - 1):
        assert found[key].tolist() == [sample_index(place, size, **{by: key}) for place in places]
    return found


def surprise(counts: torch.Tensor | Sequence[int], expected: torch.Tensor | float, free: int) -> float:
    """How far a chi-square statistic of `free` degrees of freedom lies from its mean, in standard deviations.

    Wilson and Hilferty: its cube root is nearly normal. All inputs here are fixed, so that a test passes or
    fails for ever; the bound of 4 fails one ideal cipher in 16,000.
    """
    chi = float(((torch.as_tensor(counts, dtype=torch.float64) - expected) ** 2 / expected).sum())
    return ((chi / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


def dependence(left: torch.Tensor, right: torch.Tensor, bins: int) -> float:
    """The surprise of a table of pairs of numbers below `bins`, were they independent."""
    table = torch.bincount(left * bins + right, minlength=bins * bins).reshape(bins, bins).double()
    rows, columns = table.sum(1), table.sum(0)
    return surprise(table, torch.outer(rows, columns) / table.sum(), (bins - 1) ** 2)


def test_every_sample_comes_exactly_once() -> None:
    for size in (*range(1, 301), 1023, 1024, 1025, 65_537, 99_999, 199_999, 200_000):
        assert torch.equal(order_of(size, seed=size, epoch=1).sort().values, torch.arange(size)), size


@pytest.mark.parametrize(
    ("size", "start"),
    [
        *((LARGEST, start) for start in (0, 0.37, 1)),
        *((LARGEST - 1, 1), (2**39 + 3, 0.37), (2**32 + 1, 1), (2**31 - 1, 0)),
    ],
)
def test_window_of_a_large_epoch_has_distinct_samples(size: int, start: float) -> None:
    window = 100_000
    order = sample_index(torch.arange(window) + int(start * (size - window)), size, seed=5)
    assert order.unique().numel() == window
    assert 0 <= int(order.min()) <= int(order.max()) < size


@given(SIZES, st.integers(), st.integers(), st.lists(st.floats(0, 1), max_size=20))
@example(LARGEST, 0, 0, [0.0, 1.0])
@example(1, 7, 7, [0.0])
def test_int_and_tensor_positions_agree(size: int, seed: int, epoch: int, where: list[float]) -> None:
    positions = [min(int(part * size), size - 1) for part in where]
    ints = [sample_index(position, size, seed, epoch) for position in positions]
    tensor = sample_index(torch.tensor(positions, dtype=torch.int64), size, seed, epoch)
    assert tensor.tolist() == ints
    assert all(type(value) is int and 0 <= value < size for value in ints)


def test_tensor_of_positions_keeps_its_shape() -> None:
    flat = order_of(24, seed=3)
    shaped = sample_index(torch.arange(24).reshape(2, 3, 4), 24, 3)
    assert shaped.shape == (2, 3, 4)
    assert shaped.dtype == torch.int64
    assert torch.equal(shaped.flatten(), flat)
    assert torch.equal(sample_index(torch.arange(24, dtype=torch.uint8), 24, 3), flat)
    assert sample_index(torch.tensor(5), 24, 3).shape == ()
    assert sample_index(torch.arange(0), 24, 3).shape == (0,)
    assert sample_index(torch.arange(24)[::2], 24, 3).tolist() == flat[::2].tolist()


def test_positions_are_not_changed_in_place() -> None:
    positions = torch.arange(7)
    sample_index(positions, 7)
    assert torch.equal(positions, torch.arange(7))


def test_numpy_integers_and_bools_are_ints() -> None:
    place = sample_index(np.int64(5), 24, np.int64(3), np.int32(1))  # type: ignore[call-overload]
    assert type(place) is int
    assert place == sample_index(5, 24, 3, 1)
    assert sample_index(5, 24, True, False) == sample_index(5, 24, 1, 0)


def test_sample_order_never_changes() -> None:
    """Were one of these to change, a resumed run would see samples twice and others never."""
    assert order_of(10).tolist() == [5, 9, 0, 7, 1, 3, 6, 2, 8, 4]
    assert order_of(10, seed=1).tolist() == [7, 6, 3, 1, 0, 8, 4, 9, 5, 2]
    assert order_of(10, epoch=1).tolist() == [5, 6, 1, 3, 4, 9, 7, 8, 2, 0]
    million = [sample_index(place, 1_000_003, 42, 7) for place in range(5)]
    assert million == [872035, 220174, 652662, 701163, 404481]
    largest = [sample_index(place, LARGEST, -1, 2**70) for place in (0, 1, LARGEST - 1)]
    assert largest == [1066032031257, 483427604270, 249019551525]


@pytest.mark.parametrize("size", [7, 100, 1_000, 2**20 + 7, LARGEST])
def test_sample_at_a_position_is_uniform_over_seeds(size: int) -> None:
    """Over many seeds the sample at a fixed position is uniform."""
    draws, bins = 3_000, min(size, 50)
    for samples in drawn(sorted({0, 1, size // 2, size - 1}), size, draws).T:
        counts = torch.bincount(samples * bins // size, minlength=bins)
        assert abs(surprise(counts, draws / bins, bins - 1)) < 4


@pytest.mark.parametrize(
    ("size", "draws"),
    [
        *((2, 1_000), (3, 2_000), (4, 3_000), (5, 6_000)),
        *(pytest.param(size, 20_000 if size < 6 else 40_000, marks=pytest.mark.slow) for size in range(2, 8)),
    ],
)
def test_every_permutation_is_equally_likely(size: int, draws: int) -> None:
    places, by = range(size), "epoch" if size % 2 else "seed"
    counts = Counter(map(tuple, drawn(places, size, draws, by).tolist()))
    kinds = list(itertools.permutations(places))
    assert abs(surprise([counts[kind] for kind in kinds], draws / len(kinds), len(kinds) - 1)) < 4


@pytest.mark.parametrize("size", [9, pytest.param(16, marks=pytest.mark.slow), 25])
def test_every_pair_and_parity_is_equally_likely(size: int) -> None:
    draws, columns = 6_000, math.isqrt(size)
    orders = drawn(range(size), size, draws)
    for first, second in ((0, 1), (0, columns), (1, size - 1)):
        pairs = torch.bincount(orders[:, first] * size + orders[:, second], minlength=size * size)
        distinct = pairs.reshape(size, size)[~torch.eye(size, dtype=torch.bool)]
        assert abs(surprise(distinct, draws / len(distinct), len(distinct) - 1)) < 4
    inversions = sum((orders[:, place, None] > orders[:, place:]).sum(1) for place in range(size))
    odd = int((inversions % 2).sum())
    assert abs(surprise([odd, draws - odd], draws / 2, 1)) < 4


@pytest.mark.parametrize("size", [1_009, 10_000, 199_999, 2**20, 10**9 + 7, LARGEST])
def test_neighbours_are_independent(size: int) -> None:
    """The differences of samples a few positions apart are uniform modulo the size."""
    order, bins = sample_index(torch.arange(min(size, 200_000)), size, seed=11), 64
    for step in (1, 2, 32, 1_000):
        differences = (order[step:] - order[:-step]) % size
        counts = torch.bincount(differences * bins // size, minlength=bins)
        assert abs(surprise(counts, len(differences) / bins, bins - 1)) < 4


@pytest.mark.parametrize("size", [10_000, 99_999, 2**18])
def test_sample_is_independent_of_its_position(size: int) -> None:
    """Neither by where they lie, nor by their remainders; the cipher's own rows and columns included."""
    position, order = torch.arange(size), order_of(size, seed=2)
    columns = math.isqrt(size)
    for bins in (2, 3, 16, 100):
        assert abs(dependence(position * bins // size, order * bins // size, bins)) < 4
        assert abs(dependence(position % bins, order % bins, bins)) < 4
        assert abs(dependence(position // columns % bins, order // columns % bins, bins)) < 4
        assert abs(dependence(position % columns % bins, order // columns % bins, bins)) < 4


@pytest.mark.parametrize("other", [{"seed": 8}, {"epoch": 1}, {"seed": -7}, {"seed": 8, "epoch": 1}])
def test_orders_of_two_seeds_or_epochs_are_independent(other: dict[str, int]) -> None:
    size = 100_003
    one, two = order_of(size, seed=7), order_of(size, **{"seed": 7, **other})
    for bins in (2, 16, 100):
        assert abs(dependence(one * bins // size, two * bins // size, bins)) < 4
        assert abs(dependence(one % bins, two % bins, bins)) < 4
    # the number of samples that keep their place in both is near Poisson of mean 1
    assert int((one == two).sum()) < 8
    assert abs(float(torch.corrcoef(torch.stack([one, two]).double())[0, 1])) < 4 / math.sqrt(size)


def test_order_of_the_next_size_is_independent() -> None:
    """A dataset that grew by one is dealt anew, not shifted."""
    one, two = order_of(100_003)[:100_000], order_of(100_004)[:100_000]
    assert int((one == two).sum()) < 8
    assert abs(dependence(one * 50 // 100_003, two * 50 // 100_004, 50)) < 4


REFUSED = [(0, 0), (0, LARGEST + 1), (10, 10), (-1, 10), (torch.tensor([3, 12, 11]), 10), (torch.tensor(-2), 10)]
REFUSED += [(torch.tensor([1.0]), 10), (torch.tensor([True]), 10), (1.0, 10), ([1, 2], 10)]  # type: ignore[list-item]


def test_wrong_position_or_size_is_refused(golden: Any) -> None:
    for position, size in REFUSED:
        with pytest.raises(UsageError) as caught:
            sample_index(position, size)
        golden(f"position {position} of {size}", str(caught.value))


def test_int_positions_do_not_import_torch() -> None:
    code = "import sys, paceline; paceline.sample_index(1, 5); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
