"""Models with layers of experts as transformers has them, trained with an auxiliary loss, for `expert=N`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from cases import Case, blocks, next_token, warm_up
from mixture_models import adamw, words
from torch import nn

WIDTH, WORDS, LENGTH, LAYERS = 12, 23, 8, 3


class Experts(nn.Module):
    """Weights of all experts, and a forward that takes tokens, indices and weights."""

    def __init__(self, count: int, width: int = WIDTH, inner: int = 2 * WIDTH) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, inner, width) * 0.3)
        self.down = nn.Parameter(torch.randn(count, width, inner) * 0.3)

    def forward(self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            rows, slots = (index == number).nonzero(as_tuple=True)
            made = torch.tanh(tokens[rows] @ self.up[number].T) @ self.down[number].T
            output = output.index_add(0, rows, made * weights[rows, slots, None])
        return output


class Mixture(nn.Module):
    """Each token goes to two of the experts, but never to the last `shunned` ones."""

    def __init__(self, count: int, shunned: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, count), Experts(count, width)
        with torch.no_grad():
            self.router.bias[count - shunned :] = -100.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs, and the auxiliary loss: of the mean number and the mean weight of each expert's tokens."""
        flat = x.flatten(0, -2)
        chances = self.router(flat).softmax(-1)
        weights, index = chances.topk(2)
        asked = F.one_hot(index, chances.shape[-1]).sum(1).to(chances.dtype).mean(0)
        made = self.experts(flat, index, weights / weights.sum(-1, keepdim=True))
        return made.view_as(x), (asked * chances.mean(0)).sum()


class Block(nn.Module):
    """Mixes each token with those before it, then asks experts; passes the sum of the auxiliary losses on."""

    def __init__(self, count: int, shunned: int, shared: bool) -> None:
        super().__init__()
        self.before, self.then, self.out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(count, shunned)
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) if shared else None

    def forward(self, x: torch.Tensor, auxiliary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        earlier = self.before(x).cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype).unsqueeze(-1)
        x = x + F.dropout(self.out(earlier), 0.1, self.training)
        normed = self.then(x)
        made, more = self.mixture(normed)
        x = x + made if self.shared is None else x + made + self.shared(normed)
        return x, auxiliary + more


class Model(nn.Module):
    """A language model. In training its output is a pair: the logits and the auxiliary loss."""

    def __init__(self, count: int = 8, shunned: int = 0, shared: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(count, shunned, shared and number > 0) for number in range(blocks(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.words(ids)
        auxiliary = x.new_zeros(())
        for block in self.blocks:
            x, auxiliary = block(x, auxiliary)
        logits = self.head(self.norm(x))
        return (logits, auxiliary) if self.training else logits


def loss(output: Any, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The sum over tokens, and for each token the auxiliary loss of the micro-batch."""
    logits, auxiliary = output
    total, count, metrics = next_token(logits, batch)
    return total + 0.1 * count * auxiliary, count, metrics


def made(frozen: bool, *arguments: Any) -> nn.Module:
    """The model; with `frozen`, its experts are not trained."""
    model = Model(*arguments).double()
    for block in model.blocks:
        block.mixture.experts.requires_grad_(not frozen)
    return model


def expert_model(*arguments: Any, frozen: bool = False) -> Case:
    """Trains 20 steps; every third batch is short, and has a micro-batch of a single row."""
    return Case(lambda: made(frozen, *arguments), lambda: words(31), loss, adamw, 12, 20, 1.0, warm_up, 3)


EXPERT_MODELS = {
    "experts": expert_model(),
    "six experts, two shunned": expert_model(6, 2),
    "shared expert": expert_model(8, 0, True),
    "frozen experts": expert_model(frozen=True),
}
