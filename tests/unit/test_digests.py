"""Digests show every changed bit, and sketches any large change, but not rounding."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import digests
from paceline.comm.digests import checksum, combined, sketch
from paceline.session.consistency import digest
from paceline.train.bit_flips import flip_bit
from paceline.train.share_record import FIGURES, first_difference

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


@settings(max_examples=200)
@given(st.sampled_from(DTYPES), st.integers(1, 40), st.integers(0, 2**32))
def test_any_flipped_bit_changes_the_digest(dtype: torch.dtype, size: int, seed: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed % 97), dtype=torch.float64).to(dtype)
    before, combined_before = checksum(values), digest([values])
    changed = values.clone()
    flipped = flip_bit(changed, random.Random(seed))
    assert checksum(changed) != before
    assert digest([changed]) % (1 << 26) != combined_before % (1 << 26)  # of these, workers send 26 bits
    assert checksum(values) == before
    again = values.clone()
    assert flip_bit(again, random.Random(seed)) == flipped
    assert checksum(again) == checksum(changed)


def test_flipped_bit_beyond_the_first_chunk_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two chunks whose lines and columns are summed, and in a third one that is not full."""
    monkeypatch.setattr(digests, "_LINES", 3)
    monkeypatch.setattr(digests, "_COLUMNS", 5)
    monkeypatch.setattr(digests, "_CHUNK", 15)
    values = torch.randn(40, dtype=torch.float32)
    before = checksum(values)
    assert checksum(-values) != before
    pairs = list(itertools.combinations(range(40), 2))
    for elements in [*((element,) for element in range(40)), *pairs]:
        for bit in (0, 30, 31):
            changed = values.clone()
            for element in elements:
                changed[element : element + 1].view(torch.int32).bitwise_xor_(1 << bit if bit < 31 else -(1 << 31))
            assert checksum(changed) != before, (elements, bit)


def test_transposed_memory_is_flipped_where_it_lies() -> None:
    values = torch.zeros(3, 4, dtype=torch.float64).t()
    flip_bit(values, random.Random(1))
    assert int((values.contiguous().view(torch.int64) != 0).sum()) == 1


def test_order_of_digests_counts() -> None:
    assert combined([1, 2]) != combined([2, 1])
    assert combined([0, 1]) != combined([1, 0])
    assert checksum(torch.empty(0, dtype=torch.float32)) == 0


@given(st.integers(1, 300), st.integers(0, 1000), st.floats(1e-3, 1e3))
def test_sketch_moves_by_the_norm_of_a_change(size: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    change = scale * torch.randn(size, generator=generator, dtype=torch.float64)
    before, after = sketch([values]), sketch([values + change])
    assert before[0] == pytest.approx(float(values.norm()))
    limit = size**0.5 * float(change.norm()) * 1.001
    assert all(abs(b - a) <= limit for a, b in zip(before, after, strict=True))
    assert len(after) == 1 + digests.SIGNS


def content(kind: str, weight: torch.Tensor, loss: float = 1.0) -> dict[str, object]:
    sketches = {"weight": sketch([weight]), FIGURES: [abs(loss), loss, 8.0]}
    return {"kind": kind, "digests": {"the rows": 1, "weight": checksum(weight)}, "sketches": sketches}


def test_workers_of_other_kinds_may_differ_by_rounding_alone() -> None:
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    rounded, flipped, zeros = weight * (1 + 1e-6), weight.clone(), torch.zeros(64, dtype=torch.float32)
    flipped[3:4].view(torch.int32).bitwise_xor_(1 << 30)
    one = content("a", weight)
    assert first_difference(one, content("a", weight), 0.25) == ""
    assert first_difference(one, content("a", rounded), 0.25) == "weight"
    assert first_difference(one, content("b", rounded), 0.25) == ""
    assert first_difference(one, content("b", flipped), 0.25) == "weight"
    assert first_difference(one, content("b", weight, loss=3.0), 0.25) == FIGURES
    assert first_difference(one, content("b", weight, loss=float("nan")), 0.25) == FIGURES
    without = {**content("b", weight), "sketches": {FIGURES: [1.0, 1.0, 8.0]}}  # it has no gradient
    assert first_difference(one, without, 0.25) == first_difference(without, one, 0.25) == "weight"
    nothing = content("a", zeros, float("nan")), content("b", zeros, float("nan"))
    assert first_difference(*nothing, 0.25) == ""
