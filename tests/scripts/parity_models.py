"""The models of the parity table, each with its data, loss and optimizer, in float64; by themselves plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutting
import over_batch
import sharing
import staging
import torch
from cases import CASES, CUT, Case, cross_entropy, next_token, rows, warm_up
from torch import nn
from torch.utils.data import TensorDataset


class Branch(nn.Module):
    """Of its two layers a micro-batch may run one alone; the scale has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(10, 10), nn.Linear(10, 10), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, both: int) -> torch.Tensor:
        return x + self.scale * (self.a(x) + self.b(x) if both else self.a(x)).tanh()


class Branches(nn.Module):
    """The first number of a micro-batch chooses the layers that run. One parameter is empty, one has two names, one is
    used by no forward, and several have no dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Branch() for _ in range(4)), nn.Linear(10, 4)
        self.empty, self.heat = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(0.7))
        self.unused, self.tied = nn.Parameter(torch.tensor(3.0)), nn.Module()
        self.tied.heat = self.heat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice, first = int(x[0, 0] * 1000), x
        for number, layer in enumerate(self.layers):
            x = layer(x, (choice >> number) & 1)
        return self.head(x) / self.heat + self.tied.heat * first[:, :4] + self.empty.sum()


def adamw(params: Any) -> torch.optim.Optimizer:
    """The gradient of attention's key bias is zero in theory: with this epsilon its rounding errors stay small."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def sequences(count: int, length: int, width: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(count, length, width, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 4, (count,), generator=generator))


def words(count: int, length: int) -> TensorDataset:
    """Some are 0, which no loss counts."""
    return TensorDataset(torch.randint(0, 9, (count, length), generator=torch.Generator().manual_seed(8)))


def all_outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    return torch.cat([*model(batch[0]).values()], -1).mean(1)


def attention_and_experts() -> nn.Module:
    return cutting.Own(cutting.Fused(), cutting.Experts())


def encoder_decoder() -> nn.Module:
    """Without nested tensors, by which torch evaluates an encoder that has a padding mask."""
    both = cutting.Both()
    both.inner.encoder.use_nested_tensor = False
    return nn.Sequential(both, nn.Flatten(), nn.Linear(6 * cutting.WIDTH, 4))


def over_the_batch(name: str, micro: int) -> Case:
    case = over_batch.CASES[name]
    return Case(
        lambda: case.model().double(), lambda: case.data, case.loss, over_batch.adamw, over_batch.BATCH,
        clip_norm=over_batch.CLIP, micro=micro, forward=case.forward, loss_over="batch",
    )  # fmt: skip


def in_float64(make: Any) -> Any:
    return lambda: make().double()


MODELS = CASES | CUT | {
    "branches": Case(in_float64(Branches), lambda: rows(7, 58, 10), cross_entropy, adamw, 20, clip_norm=1.0, micro=3),
    "shared": Case(in_float64(sharing.Module), lambda: rows(8, 50, sharing.WIDTH), cross_entropy, sgd, 20, micro=4),
    "skips": Case(in_float64(staging.Skips), lambda: words(29, 8), next_token, adamw, 12, 8, 1.0, warm_up, 3),
    "tuples": Case(
        in_float64(staging.Tuples), lambda: sequences(29, 8, 32), cross_entropy, sgd, 12, micro=3, forward=all_outputs
    ),
    "attention, experts": Case(
        in_float64(attention_and_experts), lambda: words(29, 6), next_token, adamw, 12, clip_norm=0.3, micro=3
    ),
    "few heads": Case(
        in_float64(lambda: cutting.Own(cutting.Few(2, True), cutting.Few(2, False, True))),
        lambda: words(29, 6), next_token, adamw, 12, micro=3,
    ),
    "encoder, decoder": Case(
        in_float64(encoder_decoder), lambda: sequences(29, 6, 32), cross_entropy, adamw, 12, micro=3
    ),
    **{f"{name} over the batch": over_the_batch(name, 3) for name in over_batch.CASES},
}  # fmt: skip


def shortened(case: Case) -> Case:
    """Three steps of three micro-batches, of which the second one ends an epoch with fewer rows."""
    micro = case.micro or 3
    count = 4 * micro + 2
    data = lambda: TensorDataset(*(column[:count] for column in case.data().tensors))
    return replace(case, data=data, global_batch=3 * micro, micro=micro, steps=3)
