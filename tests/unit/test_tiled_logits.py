"""Tiled logits: functions of each token without the full logits, and full logits for every other function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vocabulary import Model, plain, rows

import paceline
from paceline.compute.tiled_logits import Tiles, tiled_linear
from paceline.errors import UsageError

ROWS, LENGTH, WIDTH, WORDS = 3, 5, 7, 7  # as many words as numbers in a token: shapes alone do not tell them apart
LABELS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % WORDS

TILED: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice, flattened": lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten()),
    "classes in the middle": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS, reduction="sum"),
    "a soft cap": lambda x: F.cross_entropy(
        3.0 * torch.tanh(x.to(torch.float64) / 3.0).view(-1, WORDS), LABELS.flatten()
    ),
    "chosen tokens": lambda x: F.cross_entropy(x[LABELS > 2], LABELS[LABELS > 2]),
    "one row of each part": lambda x: sum(part[0].logsumexp(-1).sum() for part in x.split(2)),  # type: ignore[misc]
    "several losses": lambda x: x.log_softmax(-1).gather(-1, LABELS[..., None]).sum() + x.mean(-1).square().sum(),
    "a loss of no token": lambda x: F.cross_entropy(x[0, :0], LABELS[0, :0], reduction="sum"),
}
FULL: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "some classes": ("getitem", lambda x: x[..., :3].square().sum()),
    "a write": ("mul", lambda x: x.mul_(2.0).logsumexp(-1).sum()),
    "classes among tokens": ("reshape", lambda x: x.transpose(1, 2).reshape(ROWS, -1).sin().sum()),
    "a tensor beside": ("mul", lambda x: (x * torch.linspace(0, 1, WORDS, dtype=x.dtype)).logsumexp(-1).sum()),
    "an autograd function": ("sin", lambda x: _Reversed.apply(x).sin().sum()),  # type: ignore[no-untyped-call]
}


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def gradients(loss: Callable[[Tensor], Tensor], tiles: Tiles | None) -> list[Tensor]:
    """The loss and the gradients of hidden values, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, LENGTH, WIDTH), (WORDS, WIDTH), (WORDS,))
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    total = loss(F.linear(*inputs) if tiles is None else tiled_linear(*inputs, tiles))  # type: ignore[arg-type]
    return [total.detach(), *torch.autograd.grad(total, inputs)]


def check(loss: Callable[[Tensor], Tensor], full_for: set[str]) -> None:
    tiles = Tiles(4)
    for found, expected in zip(gradients(loss, tiles), gradients(loss, None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert tiles.full_for == full_for


@pytest.mark.parametrize("name", TILED)
def test_functions_of_tokens_need_no_full_logits(name: str) -> None:
    check(TILED[name], set())


@pytest.mark.parametrize("name", FULL)
def test_other_functions_get_full_logits(name: str) -> None:
    function, loss = FULL[name]
    check(loss, {function})


def test_logits_under_autocast_have_its_dtype() -> None:
    def loss(x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16
        return F.cross_entropy(x.flatten(0, 1).float(), LABELS.flatten())

    hidden, weight = (
        torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float32),
        torch.randn(WORDS, WIDTH, dtype=torch.float32),
    )
    found = []
    for tiles in (Tiles(1), None):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16):
            total = loss(F.linear(*inputs) if tiles is None else tiled_linear(*inputs, None, tiles))
        found.append([total, *torch.autograd.grad(total, inputs)])
    for tiled, full in zip(*found, strict=True):
        torch.testing.assert_close(tiled, full, rtol=2e-2, atol=2e-3)
        assert tiled.dtype == torch.float32


def train(model: Callable[[], nn.Module], loss: Any = plain, count: int = 1, **options: Any) -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([param for _, param in params], lr=0.1)

    trainer = paceline.Trainer(model, loss, optimizer, global_batch=8, plan="tiles=4", **options)
    assert len([*trainer.steps(rows(23), count=count)]) == count


def test_model_without_a_head_is_refused() -> None:
    with pytest.raises(UsageError) as refused:
        train(lambda: nn.Sequential(nn.Embedding(23, 4), nn.Linear(4, 4), nn.Linear(4, 4)))
    assert str(refused.value) == (
        "Sequential has no nn.Linear after its blocks whose logits tiles= could divide; compute the logits by an "
        "nn.Linear (it may share its weight), or leave tiles= out"
    )


def test_loss_over_the_global_batch_is_refused() -> None:
    with pytest.raises(UsageError, match=r'loss_over="batch" needs full logits, which tiles= avoids; leave'):
        train(lambda: Model(23), loss_over="batch")


def test_logits_of_an_earlier_micro_batch_are_refused() -> None:
    kept: list[Tensor] = []

    def loss(logits: Tensor, batch: Any) -> Any:
        assert not kept or kept[-1].sum() != 0.0
        kept.append(logits.detach())
        return plain(logits, batch)

    with pytest.raises(UsageError) as refused:
        train(lambda: Model(23), loss, count=2)
    assert str(refused.value).startswith(
        "the script uses logits of an earlier micro-batch, which have no values under tiles=; copy the values that "
        "are used later: logits[...].cpu(), or leave tiles= out"
    )


def test_loss_that_depends_on_tiles_is_named() -> None:
    """A loss that changes the head's weight between the forward and the use of the logits."""

    def loss(logits: Tensor, batch: Any) -> Any:
        weight = MODELS[0].head.weight
        weight.data = weight.data * 2.0  # unseen by autograd
        result = plain(logits, batch)
        weight.data = weight.data / 2.0
        return result

    MODELS = [Model(23)]
    with pytest.raises(UsageError, match=r"when tiles= divides the logits of Model; leave tiles= out"):
        train(lambda: MODELS[0], loss)
