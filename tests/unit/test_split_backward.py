"""The backward of a pipeline stage in two parts gives the gradients, hooks and order of one backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.parallel.pipeline.split_backward import SplitBackward

WIDTH = 6


class Layers(nn.Module):
    """Linear layers, a norm, attention and dropout; a frozen layer; a weight that two operations use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.frozen = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.3, batch_first=True)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.tanh(self.first(x))
        hidden = hidden + self.norm(self.frozen(self.second(hidden))) + skip
        hidden = self.block(hidden[None])[0]
        return self.tied(hidden) * self.second.weight.sum(), 2 * hidden, self.first.bias * 3


class Recomputed(Layers):
    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return checkpoint(super().forward, x, skip, use_reentrant=False)  # type: ignore[no-any-return]


def gradients(make: Callable[[], nn.Module], split: bool) -> tuple[dict[str, torch.Tensor | None], list[str]]:
    """All gradients of a micro-batch, and the names of the weights in the order of their hooks."""
    torch.manual_seed(0)
    model, hooked = make().double(), list[str]()
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for name, param in named.items():
        param.register_post_accumulate_grad_hook(lambda _, name=name: hooked.append(name))
    x, skip = (torch.randn(5, WIDTH, dtype=torch.double, requires_grad=True) for _ in range(2))
    outputs = model(x, skip)
    grads = [torch.randn_like(output) for output in outputs]
    if split:
        parts = SplitBackward(outputs, grads, [x, skip], [*named.values()])
        parts.run_inputs()
        assert not hooked
        assert all(param.grad is None for param in named.values())
        assert x.grad is not None
        parts.run_weights()
    else:
        torch.autograd.backward(outputs, grads)
    return {"x": x.grad, "skip": skip.grad, **{name: param.grad for name, param in named.items()}}, hooked


@pytest.mark.parametrize("make", [Layers, Recomputed])
def test_split_backward_gives_the_gradients_of_one_backward(make: Callable[[], nn.Module]) -> None:
    (one, first), (two, second) = gradients(make, split=False), gradients(make, split=True)
    assert one.keys() == two.keys()
    for name, expected in one.items():
        found = two[name]
        assert (found is None) == (expected is None), name
        if expected is not None and found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    assert sorted(first) == sorted(second)  # each weight's hook is called once
    assert "unused.weight" not in first


def test_first_part_multiplies_no_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a linear layer's two products of the backward, each part makes one."""
    layer, x = nn.Linear(WIDTH, 3, bias=False), torch.randn(5, WIDTH, requires_grad=True)
    shapes = list[tuple[int, ...]]()

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                shapes.append(tuple(made.shape))
            return made

    output = F.gelu(layer(x))
    parts = SplitBackward([output], [torch.ones_like(output)], [x], [layer.weight])
    with Counted():
        parts.run_inputs()
        assert shapes == [(5, WIDTH)]
        parts.run_weights()
    assert shapes == [(5, WIDTH), (3, WIDTH)] or shapes == [(5, WIDTH), (WIDTH, 3)]


def test_stage_without_inputs_has_its_backward_in_the_second_part() -> None:
    layer = nn.Linear(2, 2)
    output = layer(torch.ones(1, 2))
    parts = SplitBackward([output], [torch.ones_like(output)], [], [*layer.parameters()])
    parts.run_inputs()
    assert layer.weight.grad is None
    parts.run_weights()
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))


def test_nothing_is_done_where_no_gradient_arrives() -> None:
    x = torch.ones(1, requires_grad=True)
    parts = SplitBackward([], [], [x], [])
    parts.run_inputs()
    parts.run_weights()
    assert x.grad is None
