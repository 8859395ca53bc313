"""A small language model, trained with one loss after another: `vocabulary.py WORDS FOLDER [tied] [LOSS ...]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

WIDTH, LENGTH, ROWS, BATCH, STEPS, RATE = 8, 14, 20, 8, 4, 1e-2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self, words: int, tied: bool = False) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(words, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=not tied)
        if tied:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rows(words: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, words, (ROWS, LENGTH), generator=generator))


def shifted(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor, int, int]:
    """Logits and the next words as rows, the number of words, and of classes."""
    ids, classes = batch[0][:, 1:], logits.shape[-1]
    return logits[:, :-1].reshape(-1, classes), ids.reshape(-1), ids.numel(), classes


def weights(classes: int) -> Tensor:
    return torch.linspace(0.5, 2.0, classes, dtype=torch.float64)


def soft(target: Tensor, classes: int) -> Tensor:
    return torch.sin(torch.arange(classes) * 1.0 + target[:, None]).double().softmax(-1)


def plain(logits: Tensor, batch: Any) -> Any:
    x, y, count, _ = shifted(logits, batch)
    hits, among = (x.argmax(-1) == y).sum(), (x.topk(3).indices == y[:, None]).any(-1).sum()
    return F.cross_entropy(x, y, reduction="sum"), count, {"accuracy": (hits, count), "top 3": (among, count)}


def transposed(logits: Tensor, batch: Any) -> Any:
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch[0][:, 1:], label_smoothing=0.1, reduction="sum")
    return loss, batch[0][:, 1:].numel()


def ignoring(logits: Tensor, batch: Any) -> Any:
    x, y, count, classes = shifted(logits, batch)
    y = y.masked_fill(y % 3 == 0, -100)
    return F.cross_entropy(x, y, weights(classes), label_smoothing=0.2, reduction="sum"), count


def mean(logits: Tensor, batch: Any) -> Any:
    x, y, _, classes = shifted(logits, batch)
    return F.cross_entropy(x, y.masked_fill(y == 0, -1), weights(classes), ignore_index=-1)


def with_z_loss(logits: Tensor, batch: Any) -> Any:
    x, y, count, _ = shifted(logits, batch)
    total = x.logsumexp(-1)
    return (total - x.gather(-1, y[:, None]).squeeze(-1) + 1e-2 * total.square()).sum(), count


def in_logarithms(logits: Tensor, batch: Any) -> Any:
    x, y, count, _ = shifted(logits, batch)
    return F.nll_loss(F.log_softmax(x, -1), y, reduction="sum"), count


def distilled(logits: Tensor, batch: Any) -> Any:
    x, y, count, classes = shifted(logits, batch)
    return F.kl_div(x.log_softmax(-1), soft(y, classes), reduction="sum"), count


def of_probabilities(logits: Tensor, batch: Any) -> Any:
    x, y, count, classes = shifted(logits, batch)
    return F.cross_entropy(x, soft(y, classes), weights(classes), reduction="sum", label_smoothing=0.1), count


def masked(logits: Tensor, batch: Any) -> Any:
    """All classes of the last workers have the logit -inf."""
    x, y, count, classes = shifted(logits, batch)
    x = x.masked_fill(torch.arange(classes) >= classes // 4, -torch.inf)
    return F.cross_entropy(x, y % (classes // 4), reduction="sum"), count


def entropy(logits: Tensor, batch: Any) -> Any:
    x, _, count, _ = shifted(logits, batch)
    p = x.softmax(-1)
    spread = x.max(-1).values - x.amin(-1) + x.mean(-1)
    return (p * p.log()).sum() + 0.1 * spread.sum(), count


def of_other_functions(logits: Tensor, batch: Any) -> Any:
    """Two functions without a rule, which get gathered logits."""
    x, _, count, _ = shifted(logits, batch)
    return torch.special.entr(x.softmax(-1)).sum() + x.cummax(-1).values[:, -1].sum(), count


def written(logits: Tensor, batch: Any) -> Any:
    """Writes into the logits, which a shard does not allow."""
    x, y, count, classes = shifted(logits, batch)
    x = x.clone()
    x[:, classes - 1] = -50.0
    return F.cross_entropy(x, y, reduction="sum"), count


MODELS: list[nn.Module] = []  # the one that is trained


def calling_the_model(logits: Tensor, batch: Any) -> Any:
    """Also computes with what the model gives for other rows; a call by a script has full outputs."""
    x, y, count, _ = shifted(logits, batch)
    other, _, _, _ = shifted(MODELS[0](batch[0].flip(1)), batch)
    return F.cross_entropy(x, y, reduction="sum") + other.logsumexp(-1).sum() + 0.1 * other.square().sum(), count


DIVIDED = (plain, transposed, ignoring, mean, with_z_loss, in_logarithms, distilled, of_probabilities, masked, entropy)
LOSSES: dict[str, Callable[[Tensor, Any], Any]] = {
    loss.__name__: loss for loss in (*DIVIDED, of_other_functions, written)
}
CALLING = {"calling_the_model": calling_the_model}


def main() -> None:
    words, folder, tied = int(sys.argv[1]), Path(sys.argv[2]), "tied" in sys.argv
    names = [name for name in sys.argv[3:] if name != "tied"] or [*LOSSES]
    data, figures = rows(words), {}
    for name in names:
        trainer = paceline.Trainer(
            lambda: Model(words, tied),
            loss=(LOSSES | CALLING)[name],
            optimizer=lambda params: torch.optim.AdamW([param for _, param in params], lr=RATE),
            global_batch=BATCH,
        )
        MODELS[:] = [trainer.model]
        reports = [*trainer.steps(data, count=STEPS)]
        figures[name] = [[one.loss, one.grad_norm, *one.metrics.values()] for one in reports]
        found = trainer.evaluate(
            data, lambda output, batch: {"largest": (output.amax(), 1), "size": (output.numel(), 1)}
        )
        figures[name].append([found["largest"], found["size"]])
        trainer.export(folder / f"{name}.safetensors")
    if trainer.main:
        (folder / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
