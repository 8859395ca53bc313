"""Digests show every changed bit, and sketches any large change, but not rounding."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import digests
from paceline.comm.digests import checksum, combined, sketch
from paceline.compute.forward_backward import Loss
from paceline.compute.job import StepSums
from paceline.compute.microbatches import Chunk, MicroBatch
from paceline.session.consistency import digest
from paceline.train.bit_flips import flip_bit
from paceline.train.share_record import FIGURES, ShareRecord, first_difference

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
    """In two chunks whose lines and columns are summed, in a third one that is not full, and in what fills no line."""
    monkeypatch.setattr(digests, "_LINES", 3)
    monkeypatch.setattr(digests, "_COLUMNS", 5)
    monkeypatch.setattr(digests, "_CHUNK", 15)
    monkeypatch.setattr(digests, "SMALL", 0)
    monkeypatch.setattr(digests, "_factors", digests._factors.__wrapped__)  # those of the usual chunk stay as they are
    values = torch.randn(43, dtype=torch.float32)
    before = checksum(values)
    assert checksum(-values) != before
    pairs = list(itertools.combinations(range(43), 2))
    for elements in [*((element,) for element in range(43)), *pairs]:
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
    digests = {"the rows": 1, "weight": checksum(weight)}
    return {"kind": kind, "digests": digests, "sketches": sketches, "rounding": [0.0, 0.0]}


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
    without = content("b", zeros)  # it has no gradient
    assert first_difference(one, without, 0.25) == first_difference(without, one, 0.25) == "weight"
    nothing = content("a", zeros, float("nan")), content("b", zeros, float("nan"))
    assert first_difference(*nothing, 0.25) == ""


def one_hot(target: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return F.one_hot(target, 4).to(like.dtype)


LOSSES: dict[str, Any] = {
    "softmax": lambda out, target: F.cross_entropy(out, target, reduction="sum"),
    "smoothed": lambda out, target: F.cross_entropy(out, target, label_smoothing=0.1, reduction="sum"),
    "sigmoid": lambda out, target: F.binary_cross_entropy_with_logits(out, one_hot(target, out), reduction="sum"),
    "squares": lambda out, target: F.mse_loss(out, one_hot(target, out), reduction="sum"),
}


def share(kind: str, loss: str, dtype: torch.dtype, inside: bool, made: Any) -> dict[str, Any]:
    """The record of a share of which a worker computes the last layer, with its loss, in this dtype. `made`: inputs,
    weight, bias and targets. The forward returns a mean loss besides the output if it computes the loss `inside`.
    """
    x, weight, bias, target = (tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in made)
    named = {"weight": weight.clone().requires_grad_(), "bias": bias.clone().requires_grad_()}
    job: Any = SimpleNamespace(named=named, dense=[*named.values()], in_rows=[], precision=None)
    record = ShareRecord(job, None, sketched=True)
    output = F.linear(x, named["weight"], named["bias"])
    total, mean = LOSSES[loss](output, target), None
    if inside:
        mean = total / len(x)
        total = mean * len(x)
    chunk = Chunk([MicroBatch(0, len(x), (x, target))], (x, target))
    record.outputs.watch({"loss": mean, "logits": output} if inside else output, Loss(total, len(x), {}, chunk, mean))
    total.mul(1 / 24).backward()  # type: ignore[no-untyped-call]
    record.close([], StepSums(loss=total.item(), count=float(len(x))))
    return {**record.content(kind)}


@settings(max_examples=80)
@given(st.sampled_from([*LOSSES]), st.integers(1, 12), st.floats(0.0, 24.0), st.booleans(), st.integers(0, 10_000))
def test_rounding_is_no_difference_however_sure_the_model_is(
    loss: str, rows: int, sure: float, inside: bool, seed: int
) -> None:
    """A worker that computes in float32 is compared with one in float64, and with one whose gradient has a flipped bit.
    The rows are near the optimum of the loss.
    """
    chance = torch.Generator().manual_seed(seed)
    best = torch.randint(4, (rows,), generator=chance)
    away = 2.0**-sure * torch.randn(rows, 4, generator=chance, dtype=torch.float64)
    right = one_hot(best, away)
    optimum = {
        "softmax": sure * right,
        "smoothed": (0.025 + 0.9 * right).log() + away,
        "sigmoid": sure * (2 * right - 1),
        "squares": right + away,
    }[loss]
    # The layer maps these inputs to the optimum, but for the rounding of inputs and weights that both workers have.
    x, bias = torch.randn(rows, 8, generator=chance, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    weight = torch.eye(4, 8, dtype=torch.float64) + 0.1 * torch.randn(4, 8, generator=chance, dtype=torch.float64)
    x += (optimum - x @ weight.T) @ torch.linalg.pinv(weight).T
    made = (x.float(), weight.float(), bias.float(), best)
    plain, flipped = (share(kind, loss, torch.float32, inside, made) for kind in "ab")
    wide = share("b", loss, torch.float64, inside, made)
    wide["rounding"] = plain["rounding"]  # as if it also computed in float32, but without rounding
    assert first_difference(plain, wide, 0.25) == ""
    change = sketch([torch.tensor([0.01 + plain["sketches"]["weight"][0]], dtype=torch.float64)])
    flipped["sketches"]["weight"] = [a + b for a, b in zip(flipped["sketches"]["weight"], change, strict=True)]
    assert first_difference(plain, flipped, 0.25) == "weight"
