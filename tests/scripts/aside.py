"""Models whose blocks, hooks or losses keep something aside of what flows from block to block, and some that only look
so: `aside.py NAME ...` trains each for three steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from paceline.parallel.pipeline import runner as staged

WIDTH = 8
generator = torch.Generator().manual_seed(1)
data = TensorDataset(
    torch.randn(24, 6, WIDTH, generator=generator, dtype=torch.float64),
    torch.randn(24, 6, 3, generator=generator, dtype=torch.float64),
)


some = TensorDataset(*(column[:22] for column in data.tensors))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.kept.clear()
        x = self.first(x)
        for layer in self.layers:
            x = self.between(layer, x)
        return self.end(x)

    def between(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)  # type: ignore[no-any-return]

    def end(self, x: torch.Tensor) -> Any:
        return self.head(x)


class Routed(Net):
    """As a mixture of experts of transformers: forward hooks inside of blocks collect what gates give."""

    def forward(self, x: torch.Tensor) -> Any:
        found: list[torch.Tensor] = []
        hooks = [one.gate.register_forward_hook(lambda _m, _i, made: found.append(made)) for one in self.layers]
        x = super().forward(x)
        for hook in hooks:
            hook.remove()
        return x, torch.stack([(made.softmax(-1) ** 2).mean() for made in found]).mean()

    def between(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)


class Gated(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.gate(x).softmax(-1)[..., :1])


Routed.block = Gated


class Sets(Gated):
    """Whose loss reads what it has set."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.gate(x).square().mean()
        return super().forward(x)


class Attribute(Net):
    block = Sets


class Appends(Net):
    """Blocks append to a list of the model."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            vars(layer)["forward"] = lambda x, one=layer: (
                self.kept.append(one.gate(x).square().mean()) or Block.forward(one, x)
            )


class Hooked(Net):
    """A forward hook on a layer inside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.register_forward_hook(lambda _m, _i, made: self.kept.append(made.square().mean()))


class Collected(Hooked):
    """Whose forward uses what the hooks have collected; another hook reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0
        for layer in self.layers:
            layer.up.register_forward_hook(self.check)

    def check(self, module: nn.Module, given: Any, made: torch.Tensor) -> None:
        self.largest = max(self.largest, made.abs().max().item())

    def end(self, x: torch.Tensor) -> Any:
        return self.head(x), sum(self.kept)


class Altered(Net):
    """A hook that changes an output, and another one that is registered twice and fails on an empty input."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.register_forward_hook(lambda _m, _i, made: 2 * made)
            for _ in range(2):
                layer.up.register_forward_hook(self.keep)
            layer.down.register_forward_hook(self.unpack)

    def keep(self, module: nn.Module, given: Any, made: torch.Tensor) -> None:
        self.kept.append(made.square().mean())

    def unpack(self, module: nn.Module, given: Any, made: torch.Tensor) -> None:
        (_,) = given

    def end(self, x: torch.Tensor) -> Any:
        return self.head(x), sum(self.kept)


class Penalized(Net):
    def end(self, x: torch.Tensor) -> Any:
        return self.head(x), sum(param.square().sum() for param in self.parameters())


class Detached(Net):
    def between(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = layer(x)
        return x.detach() if layer is self.layers[2] else x


class Dropped(Net):
    """Draws, also from a generator of its own, counts, and computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.zeros(())

    def between(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(layer(x), 0.2, self.training)


class Recomputed(Net):
    class Own(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]

    block = Own


class Sums(Net):
    """The head needs a sum that is made before the blocks, and a single row makes one call more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if len(x) == 1:
            x = x + 1
        total = x.square().mean(1, keepdim=True)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + total)  # type: ignore[no-any-return]


class Registers(Net):
    """As output_hidden_states of transformers: the first forward registers hooks and remembers that it has."""

    registered = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.registered:
            self.registered = True
            for layer in self.layers:
                layer.register_forward_hook(lambda _m, _i, made: self.kept.append(made))
        return super().forward(x)  # type: ignore[no-any-return]

    def end(self, x: torch.Tensor) -> Any:
        return self.head(x + torch.stack(self.kept).sum(0))


class Bridged(Net):
    """Layers that stand before the blocks and also run between them, on all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.layers = self._modules.pop("layers")

    def between(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x + self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


class Listed(Net):
    """A list of weights of blocks, of which the end makes a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [layer.up.weight for layer in self.layers]

    def end(self, x: torch.Tensor) -> Any:
        return self.head(x), sum(weight.square().sum() for weight in self.weights)


def mse(output: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(output, batch[1])


def pair(output: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(output[0], batch[1]) + 0.01 * output[1]


def kept(output: Any, batch: Any) -> torch.Tensor:
    return mse(output, batch) + 0.1 * sum(trainer.model.kept)


def seen(output: Any, batch: Any) -> torch.Tensor:
    return mse(output, batch) + 0.1 * sum(layer.seen for layer in trainer.model.layers)


def penalty(output: Any, batch: Any) -> torch.Tensor:
    return mse(output, batch) + 1e-3 * sum(param.square().sum() for param in trainer.model.parameters())


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]] = {
    "plain": (Net, mse),
    "detached": (Detached, mse),
    "dropped": (Dropped, mse),
    "recomputed": (Recomputed, mse),
    "sums": (Sums, mse),
    "registered": (Registers, mse),
    "bridged": (Bridged, mse),
    "routed": (Routed, pair),
    "appends": (Appends, kept),
    "attribute": (Attribute, seen),
    "hooked": (Hooked, kept),
    "collected": (Collected, pair),
    "altered": (Altered, pair),
    "penalty in the loss": (Net, penalty),
    "penalty in the forward": (Penalized, pair),
    "penalty of a list": (Listed, pair),
}


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def main() -> None:
    global trainer
    losses, names = {}, sys.argv[1:]
    if names[0].startswith("room="):
        space, *names = float(names[0].removeprefix("room=")), *names[1:]
        staged.room = lambda device: space
    for name in names:
        make, loss = CASES[name]
        trainer = paceline.Trainer(lambda make=make: make().double(), loss, optimizer, global_batch=8)
        losses[name] = [report.loss for report in trainer.steps(data, count=3)]
        trainer.export(f"{name}.safetensors")
        if name == "sums":
            values = trainer.evaluate(
                some, lambda output, batch: {"loss": (mse(output, batch) * len(output), len(output))}
            )
            losses["evaluated"] = [values["loss"]]
    if trainer.main:
        Path("losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
