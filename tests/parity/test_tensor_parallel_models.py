"""`tensor=` takes models as they are, dropout included: each gives what one worker gives. And how code meets parts,
function by function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agents import journal
from cutting import MODELS
from hypothesis import given as drawn
from hypothesis import strategies as st
from launching import train_models
from once import once
from oracle import apart
from safetensors.torch import load_file

from paceline.parallel.tensor_parallel.op_rules import OP_RULES
from paceline.parallel.tensor_parallel.placement import Placement, fold_names, infer_placements
from paceline.parallel.tensor_parallel.redistribute import Redistributor, ShardPlacement
from paceline.parallel.tensor_parallel.sharded_mode import (
    ShardedTensorMode,
    full_shape_of,
    placement_of,
    reshape_placement,
    set_placement,
)

TEAMS = {"tensor=2": 2, "tensor=4": 4, "data=2 tensor=2": 4, "shard=2 zero=1 tensor=2": 4}
TEAMS |= {"shard=2 zero=2 tensor=2": 4, "shard=2 zero=3 tensor=2": 4}


@pytest.mark.slow
@pytest.mark.parametrize("plan", TEAMS)
def test_tensor_parallel_with_models_as_they_are(
    plan: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    names = tuple(MODELS)
    alone = lambda folder: train_models(folder, "cutting.py", 1, "", names)
    one = once(tmp_path_factory, "models of one worker, to be cut", alone)
    train_models(tmp_path, "cutting.py", TEAMS[plan], f"micro=4 {plan}", names)
    found = {name: apart(*(load_file(at / f"{name}.safetensors") for at in (tmp_path, one))) for name in names}
    assert {name: distance for name, distance in found.items() if distance > 1e-12} == {}
    events = [str(event["what"]) for event in journal(tmp_path / "out", "decision")]
    assert sum(" split over " in event for event in events) == len(names)


# ---- which layers are found

TABLES = {
    "gpt2": "transformer.h.*.attn.c_attn column:3, transformer.h.*.attn.c_proj row, transformer.h.*.mlp.c_fc column, "
    "transformer.h.*.mlp.c_proj row, transformer.wte vocabulary, lm_head logits",
    "fused": "blocks.*.attention.qkv column:3, blocks.*.attention.out row, blocks.*.gated.up column:2, "
    "blocks.*.gated.down row, blocks.*.plain.0 column, blocks.*.plain.2 row, words vocabulary, head logits",
    "interleaved": "blocks.*.attention.qkv column, blocks.*.attention.out row, blocks.*.gated.up column:2, "
    "blocks.*.gated.down row, blocks.*.plain.0 column, blocks.*.plain.2 row, words vocabulary, head logits",
    "halves": "plain.0 column, plain.2 row",
}


@pytest.mark.parametrize("name", TABLES)
def test_tensor_parallel_finds_the_layers_to_cut(name: str) -> None:
    found = {f"{form} {how}" for form, how in fold_names(infer_placements(MODELS[name][0](), 2)).items()}
    assert found == {*TABLES[name].split(", ")}


def test_tensor_parallel_repeats_few_key_value_heads() -> None:
    found = infer_placements(MODELS["few"][0](), 4)
    kept = {name: str(how) for name, how in found.items() if "into" in name}
    assert kept == {
        "blocks.1.attention.into.0": "column",
        "blocks.1.attention.into.1": "column of 2",
        "blocks.1.attention.into.2": "column of 2",
    }
    assert str(infer_placements(MODELS["few"][0](), 2)["blocks.0.attention.into.0"]) == "column:32+16+16"


@pytest.mark.parametrize(
    "text", ["column", "column:3", "column:64+16+16", "column of 2", "row:3", "heads", "vocabulary"]
)
def test_placement_parses_its_own_text(text: str) -> None:
    assert str(Placement.parse(text)) == text


@pytest.mark.parametrize("text", ["", "columns", "column:", "column:0", "gathered:3", "column of", "heads of 2"])
def test_placement_parses_no_other_text(text: str) -> None:
    assert Placement.parse(text) is None


# ---- how code meets parts

SIZE = 4
Function = Callable[..., Any]


class Adding(Redistributor):
    """Of one of four workers, alone: what is to be added up is given back, and nothing may be gathered."""

    def __init__(self, rank: int) -> None:
        unit: Any = SimpleNamespace(rank=rank, size=SIZE)
        super().__init__(unit)
        self.adds = False

    def share(self, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.adds = True
        return x

    def join(self, x: torch.Tensor, part: ShardPlacement) -> torch.Tensor:
        raise AssertionError("it is gathered")


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.size(0), x.shape[1], 8, x.size(-1) // 8).transpose(1, 2)


def attention(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    q, k, v = map(heads, x.chunk(3, dim=-1))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


L = ShardPlacement(2, (64,), SIZE)  # along the last of three dimensions
T = ShardPlacement(2, (64, 64, 64), SIZE)
H = ShardPlacement(1, (8,), SIZE)
FEW = ShardPlacement(1, (2,), 2)
# What is a part of which shape; and what all have.
FUNCTIONS: dict[str, tuple[list[tuple[tuple[int, ...], ShardPlacement | None]], Function]] = {
    "elements": ([((2, 3, 64), L)], lambda x: F.gelu(2 * x - 1) ** 2 / (x.abs() + 1)),
    "with what all have": (
        [((2, 3, 64), L), ((64,), None), ((3, 1), None)],
        lambda x, b, c: torch.where(x > 0, x + b, c),
    ),
    "in place": ([((2, 3, 64), L), ((64,), None)], lambda x, b: x.clone().mul_(b).add_(1).clamp_(-1)),
    "heads": ([((2, 3, 64), L)], heads),
    "and back": ([((2, 8, 3, 5), H)], lambda x: x.transpose(1, 2).reshape(2, 3, 40)),
    "rows of heads": (
        [((2, 8, 3, 5), H)],
        lambda x: torch.bmm(x.reshape(16, 3, 5), x.reshape(16, 3, 5).mT).view(2, 8, 3, 3),
    ),
    "three in one": ([((2, 3, 192), T)], lambda x: x.view(2, 3, 3, 8, 8).unbind(2)[1].permute(0, 2, 1, 3)),
    "slices of three": ([((2, 3, 192), T)], lambda x: x[..., :64] * x[:, :, 64:128] + x[..., 128:]),
    "joined again": ([((2, 3, 192), T)], lambda x: torch.cat(x.split([64, 128], -1), -1).flip(1)),
    "rotated": ([((2, 8, 3, 6), H)], lambda x: torch.cat((-x[..., 3:], x[..., :3]), dim=-1)),
    "stacked": ([((2, 8, 3), H), ((2, 8, 3), None)], lambda x, y: torch.stack((x, y), dim=1).squeeze(0)),
    "attention": ([((2, 3, 192), T)], attention),
    "attention with a mask of heads": ([((2, 3, 192), T), ((8, 3, 3), None)], attention),
    "attention of few": (
        [((2, 8, 3, 4), H), ((2, 2, 3, 4), FEW)],
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True),
    ),
    "few, repeated": ([((2, 8, 3, 4), H), ((2, 2, 3, 4), FEW)], lambda q, k: q @ k.repeat_interleave(4, 1).mT),
    "few, expanded": (
        [((2, 8, 3, 4), H), ((2, 2, 3, 4), FEW)],
        lambda q, k: q * k[:, :, None].expand(2, 2, 4, 3, 4).reshape(2, 8, 3, 4),
    ),
    "softmax": ([((2, 8, 3, 5), H)], lambda x: x.softmax(-1).masked_fill(x.isnan(), 0) + x.logsumexp(-1, keepdim=True)),
    "norm": ([((2, 8, 3, 5), H), ((5,), None)], lambda x, w: F.layer_norm(x, (5,), w) + F.rms_norm(x, (5,), w)),
    "mean": ([((2, 8, 3, 5), H)], lambda x: x.pow(2).mean((0, 3)) + x.amax(0).sum(-1)),
    "product": ([((2, 8, 3, 5), H), ((5, 7), None)], lambda x, w: x @ w),
    "sum of products": ([((2, 3, 64), L), ((7, 64), None), ((7,), None)], lambda x, w, b: F.linear(x, w, None)),
    "rows by columns": (
        [((3, 64), ShardPlacement(1, (64,), SIZE)), ((64, 5), None)],
        lambda x, w: torch.addmm(w[0] * 0, x, w),
    ),
    "einsum": ([((2, 8, 3, 5), H), ((2, 3, 8, 5), None)], lambda q, k: torch.einsum("bhid,bjhd->bhij", q, k)),
    "einsum over heads": ([((2, 8, 3, 5), H), ((8, 5, 6), None)], lambda x, w: torch.einsum("bhid,hdo->bio", x, w)),
    "shapes": ([((2, 3, 64), L)], lambda x: x * x.numel() + len(x.size()) + x.new_ones(x.shape[-1])),
    "like it": ([((2, 3, 64), L)], lambda x: torch.zeros_like(x) + x.detach().to(torch.float32).type_as(x)),
    "dropped": ([((2, 8, 3, 5), H)], lambda x: F.dropout(x, 0.3)),
    "dropped, in another order": (
        [((2, 3, 8, 5), ShardPlacement(2, (8,), SIZE))],
        lambda x: F.dropout(x.transpose(1, 2), 0.3),
    ),
    "noise": ([((2, 8, 3, 5), H)], lambda x: x.clone().normal_() * x + torch.rand(x.shape)),
    "attention with dropout": (
        [((2, 3, 192), T)],
        lambda x: F.scaled_dot_product_attention(*map(heads, x.chunk(3, -1)), dropout_p=0.3),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_op_rule_of_sharded_tensors_gives_the_shard(name: str) -> None:
    shapes, function = FUNCTIONS[name]
    torch.manual_seed(1)
    given = [torch.randn(shape, dtype=torch.float64) for shape, _ in shapes]
    torch.manual_seed(2)
    expected = function(*given)
    summed = torch.zeros_like(expected)
    for rank in range(SIZE):
        moves = Adding(rank)
        some = [
            x.clone() if part is None else set_placement(moves.narrow(x, part).clone(), part)
            for x, (_, part) in zip(given, shapes, strict=True)
        ]
        torch.manual_seed(2)
        with ShardedTensorMode(moves, OP_RULES, lambda: "here"):
            found = function(*some)
        part = placement_of(found)
        if moves.adds:
            summed += found.detach()
            continue
        assert part is not None, "it is whole"
        assert full_shape_of(found) == expected.shape
        torch.testing.assert_close(torch.Tensor.detach(found), moves.narrow(expected, part), rtol=1e-12, atol=1e-12)
    if moves.adds:
        torch.testing.assert_close(summed, expected, rtol=1e-12, atol=1e-12)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], ShardPlacement, tuple[int, ...]]:
    """A shape, a part of it, and another shape of as many elements."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    sections = draw(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=3))
    shape[dim] = sum(sections)
    rest, other = math.prod(shape), list[int]()
    while rest > 1 and len(other) < 4:
        other.append(draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= other[-1]
    return tuple(shape), ShardPlacement(dim, tuple(sections), 2), (*other, rest)


@drawn(reshapes())
def test_reshape_of_a_shard_is_the_shard_of_the_reshaped(
    case: tuple[tuple[int, ...], ShardPlacement, tuple[int, ...]],
) -> None:
    shape, part, other = case
    found = reshape_placement(shape, part, other)
    if found is None:
        return
    whole = torch.arange(math.prod(shape)).view(shape)
    for rank in range(2):
        unit: Any = SimpleNamespace(rank=rank, size=2)
        moves = Redistributor(unit)
        mine = moves.narrow(whole, part).reshape(moves.shape(other, found))
        assert torch.equal(mine, moves.narrow(whole.view(other), found))
