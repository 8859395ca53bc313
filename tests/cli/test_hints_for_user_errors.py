"""A user's own code that fails on what it was given: what that was is said beside what the code said."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from basics import data, make, net, x
from launching import train_basics
from mistaken import Maps, trained
from torch import nn
from torch.optim import SGD

from paceline.errors import NonFiniteLossError, hint_of

ADAMW = "write optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
LOSS = "write loss=lambda output, batch: torch.nn.functional.cross_entropy(output, batch[1])"
MICRO_BATCH = "[3x10 float64, 3 int64]"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.inner(x * mask)


PAIRS = "params are (name, parameter) pairs: write [(name, p) for name, p in params if p.ndim > 1]"
MAP = "{'x': 3x10 float64, 'label': 3 int64}"
HINTS: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "an attribute of a list": (
        {"loss": lambda o, b: F.cross_entropy(o, b.label)}, data, AttributeError,
        f"batch is {MICRO_BATCH}: write batch[1]",
    ),
    "a list for a tensor": (
        {"loss": lambda o, b: (o - F.one_hot(b)).sum()}, data, TypeError,
        f"batch is {MICRO_BATCH}: write batch[1]",
    ),
    "a key of a list": (
        {"loss": lambda o, b: F.cross_entropy(o, b["label"])}, data, TypeError,
        f"batch is {MICRO_BATCH}: write batch[1]",
    ),
    "an attribute of a mapping": (
        {"forward": lambda m, b: m(b.x)}, Maps(), AttributeError, f"batch is {MAP}: write batch['x']",
    ),
    "a number for a key": (
        {"forward": lambda m, b: m(b["x"]), "loss": lambda o, b: F.cross_entropy(o, b[1])}, Maps(), KeyError,
        f"batch is {MAP}: write batch['x'] or batch['label']",
    ),
    "an attribute of a tensor": (
        {"loss": lambda o, b: F.cross_entropy(o, b.label)}, x, AttributeError, "batch is 3x10 float64: write batch",
    ),
    "a third of two": (
        {"loss": lambda o, b: F.cross_entropy(o, b[2])}, data, IndexError,
        f"batch is {MICRO_BATCH}: write batch[1]",
    ),
    "an output that is a tuple": (
        {"forward": lambda m, b: (m(b[0]), 1)}, data, TypeError,
        "output is (3x2 float64, int): write output[0] or output[1]",
    ),
    "keys that are no arguments": (
        {}, Maps(), TypeError,
        f"batch is {MAP} and goes to model(**batch), Sequential takes input: "
        "write forward=lambda model, batch: model(batch['x'])",
    ),
    "some keys that are arguments": (
        {"model": Two}, Maps(lambda **row: {"label": row["label"], "x": row["x"], "mask": row["x"]}), TypeError,
        "batch is {'label': 3 int64, 'x': 3x10 float64, 'mask': 3x10 float64} and goes to model(**batch), "
        "Two takes x, mask: write forward=lambda model, batch: model(batch['x'], batch['mask'])",
    ),
    "a forward of nothing": (
        {"forward": lambda model, batch: None}, data, TypeError,
        "output is None: the forward returns nothing; end it with a return statement",
    ),
    "a model of two inputs": (
        {"model": Two}, data, TypeError,
        f"batch is {MICRO_BATCH} and goes to model(batch[0]), Two takes x, mask: "
        "write forward=lambda model, batch: model(batch[0], batch[1])",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("case", HINTS)
def test_what_a_batch_is_is_said_where_code_takes_it_for_something_else(case: str) -> None:
    given, dataset, kind, hint = HINTS[case]
    with pytest.raises(kind) as caught:
        list(make(**given).steps(dataset))
    assert hint_of(caught.value) == hint
    assert caught.traceback[-1].path.name != "hints.py"


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("taken", [lambda params: [p for p in params if p.ndim > 1], lambda params: params.values()])
def test_params_that_are_taken_for_tensors(taken: Any) -> None:
    with pytest.raises(AttributeError) as caught:
        trained(optimizer=lambda params: SGD(taken(params), lr=0.1))
    assert hint_of(caught.value) == PAIRS


@pytest.mark.usefixtures("run")
def test_errors_about_something_else_get_no_hint() -> None:
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        raise ValueError("bad row")

    with pytest.raises(ValueError, match="bad row") as caught:
        list(make(loss=loss).steps(data))
    assert hint_of(caught.value) == ""
    words = nn.Sequential(nn.Embedding(2, 2))  # whose numbers go further
    with pytest.raises(IndexError, match="out of range in self") as unknown:
        list(make(model=words, forward=lambda m, b: m(b[1] + 7), loss=lambda o, b: o.sum()).steps(data))
    assert hint_of(unknown.value) == ""
    with pytest.raises(KeyError) as other:
        list(make(forward=lambda m, b: m(b["x"]), loss=lambda o, b: {}["x"]).steps(Maps()))
    assert hint_of(other.value) == ""


def test_a_hint_stands_in_the_failure_block_and_the_exception_stays(tmp_path: Path) -> None:
    done = train_basics(tmp_path, "list(make(loss=lambda o, b: F.cross_entropy(o, b)).steps(data))\n", 2, code=1)
    block = done.stderr[done.stderr.index("worker 0 failed (") :]
    assert "  TypeError: cross_entropy_loss(): argument 'target' (position 2) must be Tensor, not list\n" in block
    assert "  at train.py:2 in <lambda>: list(make(loss=lambda o, b: F.cross_entropy(o, b)).steps(data))\n" in block
    assert f"next: batch is {MICRO_BATCH}: write batch[1]; then run `" in block


class Row(NamedTuple):
    x: torch.Tensor
    label: torch.Tensor


class Below(namedtuple("Below", "x label")):
    __slots__ = ()


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("kind", [Row, Below])
def test_named_tuples_stay_what_they_are(kind: Any) -> None:
    """Cut, merged, moved and evaluated: a batch keeps its names."""
    seen = set()

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        seen.add(type(batch))
        return F.cross_entropy(output, batch.label)

    mine = make(loss=loss)
    list(mine.steps(Maps(kind), epochs=2))
    mine.step(kind(*data[:24]))
    assert mine.evaluate(Maps(kind), lambda o, b: {"label": (b.label.sum(), len(b.x))})["n"] == 96
    assert seen == {kind}
    other = make()
    list(other.steps(data, epochs=2))
    other.step(list(data[:24]))
    for one, two in zip(mine.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("run")
def test_a_loss_that_is_not_a_number_everywhere_names_two_places_and_a_count() -> None:
    with pytest.raises(NonFiniteLossError) as caught:
        list(make(loss=lambda o, b: F.cross_entropy(o, b[1]) * float("nan")).steps(data))
    assert caught.value.what == (
        "the loss of step 1 is not finite (worker 0: micro-batch 0 (rows 0-2 of epoch 0); "
        "worker 0: micro-batch 1 (rows 3-5 of epoch 0) and 6 more): the loss function produces the first nan"
    )
