"""Models with gradient hooks that change what they see. Usage: hooked.py NAMES: trains these and exports each.

Each scenario is plain PyTorch, so that a test can train the same by hand: `model`, `loss`, `hook`, which is called with
the model before it is given to the Trainer, and `late`, after three steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from basics import cross_entropy, data, make, net
from torch import nn

LIMIT = 0.02
MICRO, GLOBAL_BATCH, STEPS = 3, 20, 8  # the last micro-batch of a global batch has two rows


def clamp(grad: torch.Tensor) -> torch.Tensor:
    return grad.clamp(-LIMIT, LIMIT)


def weighted(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one class count three times."""
    weights = (1 + 2 * batch[1]).double()
    return (weights * F.cross_entropy(output, batch[1], reduction="none")).sum(), weights.sum()


class Within(nn.Module):
    """Clamps the gradient of what is between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        between = self.inner[0](rows)
        if between.requires_grad:
            between.register_hook(lambda grad: grad.clamp(-LIMIT / 4, LIMIT / 4))
        return self.inner[2](self.inner[1](between))


def no_hook(model: nn.Module) -> None:
    pass


def on_parameters(model: nn.Module) -> None:
    for param in model.parameters():
        param.register_hook(clamp)


def on_a_module(model: nn.Module) -> None:
    def halve_what_is_large(module: nn.Module, given: Any, taken: Any) -> Any:
        return tuple(grad * torch.where(grad.abs() > LIMIT / 4, 0.5, 1.0) for grad in given)

    model[2].register_full_backward_hook(halve_what_is_large)


def after_accumulation(model: nn.Module) -> None:
    def clamp_in_place(param: torch.Tensor) -> None:
        param.grad.clamp_(-LIMIT, LIMIT)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(clamp_in_place)


@dataclass
class Scenario:
    model: Callable[[], nn.Module] = net
    loss: Callable[..., Any] = cross_entropy
    hook: Callable[[nn.Module], None] = no_hook
    late: Callable[[nn.Module], None] = no_hook


SCENARIOS = {
    "parameters": Scenario(hook=on_parameters),
    "within": Scenario(Within, weighted),
    "module": Scenario(hook=on_a_module),
    "accumulated": Scenario(hook=after_accumulation, loss=weighted),
    "late": Scenario(late=on_parameters),
}


def built(scenario: Scenario) -> nn.Module:
    torch.manual_seed(0)
    model = scenario.model().double()
    scenario.hook(model)
    return model


if __name__ == "__main__":
    for name in sys.argv[1:]:
        scenario = SCENARIOS[name]
        trainer = make(scenario.loss, built(scenario), global_batch=GLOBAL_BATCH, plan=f"micro={MICRO}")
        for report in trainer.steps(data, count=STEPS):
            if report.step == 3:
                scenario.late(trainer.model)
        trainer.export(f"{name}.safetensors")
