"""Any tree of plain values becomes named tensors and JSON, and comes back bit for bit."""

from __future__ import annotations

import collections
import enum
import json
import math
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from checkpoints import find_checkpoint, write_checkpoint
from hypothesis import HealthCheck, given, settings

from paceline.checkpoint.safetensors_file import DTYPES, size_text
from paceline.checkpoint.tree import flatten, unflatten
from paceline.errors import CheckpointError, UsageError


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        flat = [t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def refusal(kind: type[Exception], call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The text with which `call` refuses."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    return str(caught.value)


def through_json(tree: Any, prefix: str = "") -> Any:
    tensors, skeleton = flatten(tree, prefix)
    return unflatten(json.loads(json.dumps(skeleton, allow_nan=False)), tensors)


RARE = [torch.complex128, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz, torch.float8_e8m0fnu]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([*DTYPES, *RARE]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    data = bytearray(draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize)))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if count else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(["?", "i1", "<i8", ">i4", "<f2", ">f8", "<c16", "<U3", "S2", "<M8[s]"])))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    count = math.prod(shape)
    if dtype.kind == "U":
        array = np.array(draw(st.lists(st.text(max_size=3), min_size=count, max_size=count)), dtype).reshape(shape)
    else:
        data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        array = np.frombuffer(data, np.uint8)
        array = (array & 1 if dtype.kind == "b" else array.copy()).view(dtype).reshape(shape)
    return array[()] if draw(st.booleans()) else np.asfortranarray(array)


KEYS = st.one_of(
    st.text(max_size=4),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.sampled_from(["$int", "a.b", "$"]),
)
LEAVES = st.one_of(
    tensors(),
    arrays(),
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(alphabet=st.characters(exclude_categories=()), max_size=5),
    st.binary(max_size=5),
    st.sampled_from([torch.bfloat16, torch.int64, torch.device("cpu"), torch.device("cuda:1")]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=12,
)


@given(TREES, st.sampled_from(["", "trainer.state"]))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_pack_and_unpack_keep_every_bit_of_a_tree(tree: Any, prefix: str) -> None:
    assert same(through_json(tree, prefix), tree)


@given(TREES)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
def test_a_checkpoint_on_disk_keeps_every_bit_of_a_tree(tree: Any) -> None:
    flat, skeleton = flatten({"tree": tree}, "")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), 1, flat, {"tree": skeleton}, file_bytes=64)
        found = find_checkpoint(Path(folder), pytest.fail)
        assert found is not None
        for mapped in (False, True):
            assert same(unflatten(found.manifest["tree"], found.tensors(mapped))["tree"], tree)


def test_numbers_at_their_limits_keep_their_value() -> None:
    nan = struct.unpack("d", struct.pack("Q", 0xFFF8000000000123))[0]
    tree = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        nan,
        5e-324,
        2**63 - 1,
        2**63,
        -(2**63),
        -(2**63) - 1,
        7**9000,
        True,
        1,
    ]
    assert same(through_json(tree), tree)


def test_keys_keep_their_type() -> None:
    tree = {1: "int", "1": "text", 2.0: "float", True + 1: "two", None: "none", False: "false", "$int": "tag"}
    assert same(through_json(tree), tree)


def test_collections_come_back_in_their_plain_form() -> None:
    tree = {
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, {"x": [1]}),
        "counter": collections.Counter("aab"),
        "deque": collections.deque([1, 2], maxlen=2),
        "size": torch.Size([2, 3]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    wanted = {
        "ordered": {"b": 1, "a": 2},
        "default": {"x": [1]},
        "counter": {"a": 2, "b": 1},
        "deque": [1, 2],
        "size": (2, 3),
        "parameter": torch.ones(2),
    }
    assert same(through_json(tree), wanted)


def test_tensor_names_are_the_users_own_and_unique() -> None:
    a, b, c, d, e = (torch.full((1,), float(value)) for value in range(5))
    tree = {
        "trainers": [{"model": {"fc.weight": a, "fc": {"weight": b}}}],
        "__metadata__": c,
        "": d,
        "\ud800": e,
    }
    flat, _ = flatten(tree, "")
    assert list(flat) == [
        "trainers.0.model.fc.weight",
        "trainers.0.model.fc.weight~2",
        "__metadata__~2",
        "tensor",
        "?",
    ]
    assert same(through_json(tree), tree)
    assert list(flatten({"x": [a]}, "trainer0.state")[0]) == ["trainer0.state.x.0"]
    assert list(flatten(a, "alone")[0]) == ["alone"]


def test_tied_tensors_are_kept_once_and_come_back_tied() -> None:
    square, empty = torch.arange(4.0).reshape(2, 2), torch.empty(0, 2)
    weight = torch.nn.Parameter(square)
    tree = {"a": weight, "b": weight, "data": weight.data, "view": square[:], "e": empty, "f": empty}
    flat, skeleton = flatten(tree, "m")
    assert list(flat) == ["m.a", "m.e"]
    back = unflatten(skeleton, flat)
    assert back["a"] is back["b"] is back["data"] is back["view"]
    assert back["e"] is back["f"]
    twice = torch.ones(2, dtype=torch.complex128)
    assert list(flatten([twice, twice], "")[0]) == ["0"]


def test_different_views_of_shared_memory_are_kept_apart() -> None:
    square = torch.arange(4.0).reshape(2, 2)
    phase = torch.tensor([1 + 2j, 3 - 4j])
    tree = [square, square.t(), square[0], square.view(torch.int32), phase, phase.conj(), phase.conj().imag]
    assert len(flatten(tree, "")[0]) == len(tree)
    assert same(through_json(tree), tree)
    assert same(through_json(torch.ones(1).expand(3, 2)), torch.ones(3, 2))


class Colour(enum.IntEnum):
    RED = 1


GENERAL = "store numbers, text, tensors, or an object with state_dict()"
DENSE = "store a dense tensor with values, for example from to_dense()"


@pytest.mark.parametrize(
    ("tree", "what", "cure"),
    [
        ({"ema": {"fn": same}}, "trainer.state['ema']['fn'] is a function", GENERAL),
        ([1, {2}], "trainer.state[1] is a set", GENERAL),
        ({"of": Colour.RED}, "trainer.state['of'] is a Colour", GENERAL),
        ({"x": iter("")}, "trainer.state['x'] is a str_ascii_iterator", GENERAL),
        (range(3), "trainer.state is a range", GENERAL),
        ((np.array([None]),), "trainer.state[0] is a numpy ndarray with dtype object", GENERAL),
        ({"x": torch.ones(2).to_sparse()}, "trainer.state['x'] is a sparse or quantized tensor", DENSE),
        ({"x": torch.empty(2, device="meta")}, "trainer.state['x'] is a meta tensor", DENSE),
    ],
)
def test_values_that_a_checkpoint_cannot_hold_are_named(tree: Any, what: str, cure: str) -> None:
    message = f"{what}, which cannot be stored in a checkpoint; {cure}"
    assert refusal(UsageError, flatten, tree, "trainer.state") == message


def test_keys_that_a_checkpoint_cannot_hold_are_named() -> None:
    assert refusal(UsageError, flatten, {"x": {(1, 2): 3}}, "") == (
        "x has a key of type tuple: (1, 2); use text, numbers, bool or None as keys of dicts in a checkpoint"
    )


def test_a_tree_that_contains_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert refusal(UsageError, flatten, {"ring": ring}, "") == (
        "ring[0][0][0]... is nested deeper than 100 levels; "
        "store a flatter structure; if it contains itself, remove that reference"
    )


def test_a_tree_that_does_not_fit_its_tensors_is_an_error() -> None:
    with pytest.raises(
        CheckpointError, match=re.escape("the checkpoint contains a value in the unknown format '$set'; read it with")
    ):
        unflatten({"$set": [1]}, {})
    with pytest.raises(CheckpointError, match=re.escape("the tensor 'a' is missing from the checkpoint; use another")):
        unflatten({"$tensor": "a"}, {})


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (1_200_000_000, "1.2 GB"),
        (10**16, "10000.0 TB"),
    ],
)
def test_size_text(count: int, text: str) -> None:
    assert size_text(count) == text
