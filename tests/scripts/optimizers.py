"""Optimizers whose update of a number depends on others, written for tests. Each trains a small model a little:
`optimizers.py STEPS NAME ...`, one after another, or with "by turns" among the names a step of each in turn.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.optim import LAMB

GLOBAL_BATCH, ROWS = 24, 60  # of four tokens each
x = torch.randn(ROWS, 4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
data = TensorDataset(x, torch.sin(x.sum(2, keepdim=True)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(6, 12), nn.ModuleList([Block(), Block()]), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def model() -> nn.Module:
    return Net().double()


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output - batch[1]).square().mean()


class Own(torch.optim.Optimizer):
    """What the following have in common."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__([param for _, param in params], {"lr": lr, **options})

    def used(self, group: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
        for param in group["params"]:
            if param.grad is not None:
                yield param, param.grad, self.state[param]


class DAdapt(Own):
    """The step size is estimated from all parameters (D-Adaptation, Defazio and Mishchenko, 2023)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0, d=1e-3, numerator=0.0)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            below = 0.0
            for param, grad, state in self.used(group):
                if not state:
                    state |= {"first": param.detach().clone(), "sum": torch.zeros_like(param)}
                group["numerator"] += (grad * (state["first"] - param)).sum().item() * group["d"]
                state["sum"] += group["d"] * grad
                below += state["sum"].abs().sum().item()
            group["d"] = max(group["d"], group["numerator"] / below) if below else group["d"]
            for param, grad, _ in self.used(group):
                param -= group["lr"] * group["d"] * grad


class Prodigy(Own):
    """Adam with an estimated step size (Prodigy, Mishchenko and Defazio, 2023), which a tensor in the group keeps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0, d=torch.tensor(1e-3, dtype=torch.float64), above=0.0, steps=0)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            d, below = float(group["d"]), 0.0
            group["steps"] += 1
            group["above"] *= 0.99
            for param, grad, state in self.used(group):
                if not state:
                    zeros = {name: torch.zeros_like(param) for name in ("mean", "square", "sum")}
                    state |= {"first": param.detach().clone(), **zeros}
                group["above"] += d * d * (grad * (state["first"] - param)).sum().item()
                state["mean"].lerp_(d * grad, 0.1)
                state["square"].lerp_((d * grad).square(), 0.01)
                state["sum"].mul_(0.99).add_(grad, alpha=d * d)
                below += state["sum"].abs().sum().item()
            group["d"].fill_(max(d, group["above"] / below) if below else d)
            for param, _, state in self.used(group):
                param -= float(group["d"]) * state["mean"] / (state["square"].sqrt() + d * 1e-8)


class NormClipped(Own):
    """SGD whose gradients are clipped by their norm over all parameters."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            norm = math.sqrt(sum(grad.square().sum().item() for _, grad, _ in self.used(group)))
            for param, grad, _ in self.used(group):
                param -= group["lr"] * min(1.0, 0.5 / norm) * grad


class Complete(NormClipped):
    """The same, if all its parameters have gradients: it cannot be tried on some of them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.parameters = len(self.param_groups[0]["params"])

    def step(self) -> None:
        if sum(1 for group in self.param_groups for _ in self.used(group)) < self.parameters:
            raise ValueError("the gradients of all parameters are wanted")
        super().step()


class Noting(Own):
    """Keeps what belongs to no parameter under a text in its state: momentum of the norm over all."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            shared = self.state["shared"]
            norm = math.sqrt(sum(grad.square().sum().item() for _, grad, _ in self.used(group)))
            shared["norm"] = 0.9 * shared.get("norm", norm) + 0.1 * norm
            for param, grad, _ in self.used(group):
                param -= group["lr"] * grad / shared["norm"]


class Soap(Own):
    """Adam in the basis of the gradient's covariances, found anew by QR in each third step (Vyas et al., 2024)."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param, grad, state in self.used(group):
                if "steps" not in state:
                    # Directions without gradients would be found by rounding alone.
                    sides = [torch.diag(0.1 * torch.arange(n, dtype=param.dtype)).to(param.device) for n in param.shape]
                    state |= {"steps": 0, "sides": sides, "bases": [torch.empty_like(side) for side in sides]}
                    state |= {"mean": torch.zeros_like(param), "square": torch.zeros_like(param)}
                for dim, side in enumerate(state["sides"]):
                    rows = grad.transpose(0, dim).reshape(len(side), -1)
                    side.lerp_(rows @ rows.T, 0.1)
                state["steps"] += 1
                for side, basis in zip(state["sides"], state["bases"], strict=True):
                    if state["steps"] == 1:
                        basis.copy_(torch.linalg.eigh(side)[1])
                    elif state["steps"] % 3 == 0:
                        basis.copy_(torch.linalg.qr(side @ basis)[0])
                if state["steps"] == 1:
                    continue
                turned = self.turn(grad, state["bases"])
                state["mean"].lerp_(grad, 0.1)
                state["square"].lerp_(turned.square(), 0.05)
                moves = self.turn(state["mean"], state["bases"]) / (state["square"].sqrt() + 1e-8)
                param -= group["lr"] * self.turn(moves, [basis.T for basis in state["bases"]])

    def turn(self, tensor: torch.Tensor, bases: list[torch.Tensor]) -> torch.Tensor:
        for basis in bases:
            tensor = torch.tensordot(tensor, basis, dims=([0], [0]))
        return tensor


class StableAdamW(Own):
    """AdamW whose step is clipped by the root mean square of each tensor's (Wortsman et al., 2023)."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param, grad, state in self.used(group):
                if not state:
                    state |= {"mean": torch.zeros_like(param), "square": torch.zeros_like(param)}
                state["mean"].lerp_(grad, 0.1)
                state["square"].lerp_(grad.square(), 0.01)
                clip = max(1.0, (grad.square() / state["square"].clamp(min=1e-16)).mean().sqrt().item())
                param -= group["lr"] / clip * state["mean"] / (state["square"].sqrt() + 1e-8)


class Stacked(Own):
    """Each element by itself, from its last three gradients: they are kept in a tensor of another shape."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param, grad, state in self.used(group):
                last = state.get("last", torch.zeros((0, *param.shape), dtype=param.dtype, device=param.device))
                state["last"] = torch.cat([last[-2:], grad[None]])
                param -= group["lr"] * state["last"].mean(0)


def hooked(params: Any) -> torch.optim.Optimizer:
    """An optimizer of torch's with a hook that clips by the norm over all parameters."""
    made = torch.optim.SGD([param for _, param in params], lr=0.1)
    made.register_step_pre_hook(lambda *_: clip([param for _, param in params]))
    return made


def clip(params: list[torch.Tensor]) -> None:
    torch.nn.utils.clip_grad_norm_(params, 0.5)


def both(params: Any) -> list[torch.optim.Optimizer]:
    """Several, one for matrices as wholes."""
    named = dict(params)
    matrices = [named.pop(name) for name in [*named] if named[name].dim() == 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(named.values(), lr=0.01)]


def in_groups(params: Any) -> torch.optim.Optimizer:
    """Each parameter in a group of its own, with a rate of its own."""
    groups = [{"params": [param], "lr": 0.1 / (1 + place)} for place, (_, param) in enumerate(params)]
    made = torch.optim.SGD(groups, momentum=0.9)
    made.register_step_pre_hook(lambda *_: clip([param for group in made.param_groups for param in group["params"]]))
    return made


class Blocked(Own):
    """Of tensors of some sizes it keeps a scale for each block of 16 elements, as 8-bit optimizers do of large ones."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param, grad, state in self.used(group):
                if param.numel() in (96, 192):
                    state["scales"] = grad.reshape(-1, 16).abs().amax(1)
                param -= group["lr"] * grad


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "DAdapt": DAdapt,
    "Prodigy": Prodigy,
    "NormClipped": lambda params: NormClipped(params, lr=0.1),
    "Complete": Complete,
    "Noting": Noting,
    "Soap": Soap,
    "StableAdamW": StableAdamW,
    "Stacked": Stacked,
    "Adafactor": lambda params: torch.optim.Adafactor([param for _, param in params], lr=0.01),
    "hooked": hooked,
    "both": both,
    "LAMB": lambda params: LAMB([param for _, param in params], lr=0.02),
    "in_groups": in_groups,
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
}
ODD = {"Blocked": Blocked}


def in_plain_torch(name: str, steps: int) -> dict[str, torch.Tensor]:
    """The weights that one process comes to without Paceline."""
    torch.manual_seed(paceline.stream_seed(0, 0, -1))
    net = model()
    made = OPTIMIZERS[name]([*net.named_parameters()])
    optimizers = made if isinstance(made, list) else [made]
    epochs = [[paceline.sample_index(p, ROWS, 0, epoch) for p in range(ROWS)] for epoch in range(steps)]
    batches = [some[at : at + GLOBAL_BATCH] for some in epochs for at in range(0, ROWS, GLOBAL_BATCH)]
    for rows in batches[:steps]:
        net.zero_grad()
        loss(net(data.tensors[0][rows]), (None, data.tensors[1][rows])).backward()
        for one in optimizers:
            one.step()
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}


if __name__ == "__main__":
    made, names = {**OPTIMIZERS, **ODD}, [name for name in sys.argv[2:] if name != "by turns"]
    trainers = {name: paceline.Trainer(model, loss, made[name], global_batch=GLOBAL_BATCH) for name in names}
    loops = (trainer.steps(data, count=int(sys.argv[1])) for trainer in trainers.values())
    for _ in zip_longest(*loops) if "by turns" in sys.argv else chain.from_iterable(loops):
        pass
    for name, trainer in trainers.items():
        trainer.export(f"{name}.safetensors")
