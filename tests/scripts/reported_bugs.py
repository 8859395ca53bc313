"""Silent errors that users of other systems have reported, each as a small training in float64.

A `Report` has the training as it should be, and `mistake`: the same training in one process with the reported error.
The page docs/bugs-of-other-systems.md shows the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case, blocks, cross_entropy, next_token, rows, warm_up
from torch import nn
from torch.utils.data import TensorDataset

import paceline.optim

WIDTH, HEADS, WORDS, LENGTH, LAYERS, MICRO = 16, 4, 12, 8, 4, 3
BATCH, STEPS = 3 * MICRO, 3
COUNT = 4 * MICRO + 2  # rows: the second step ends an epoch with two micro-batches, of three and two rows
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Report:
    """`where` are the reports; `what` went wrong there. `plan` is the plan that is nearest to the report's; plans that
    match `refused` do not take this model.
    """

    where: Sequence[str]
    what: str
    case: Case
    mistake: Case
    plan: str
    refused: str = "$^"


# -- models -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block in which heads share a norm and have a scale each, and two layers have packed weights.

    The mistakes: `halved` gives only half of its gradient to the norm of the heads, `unpacked` reads packed weights in
    another order, `draws_alike` draws the same dropout mask in every forward.
    """

    def __init__(self, drop: float = 0.0, halved: bool = False, unpacked: bool = False, draws_alike: bool = False):
        super().__init__()
        self.before, self.then = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head_norm, self.head_scale = nn.RMSNorm(WIDTH // HEADS), nn.Parameter(torch.ones(HEADS))
        self.drop, self.unpacked, self.draws_alike = drop, unpacked, draws_alike
        if halved:
            self.head_norm.weight.register_hook(lambda grad: grad / 2)

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        if self.draws_alike:
            torch.manual_seed(0)
        return F.dropout(x, self.drop, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(self.head_norm(q), self.head_norm(k), v, is_causal=True)
        attended = attended * self.head_scale[:, None, None]
        x = x + self.dropped(self.out(attended.transpose(1, 2).flatten(2)))
        packed = self.up(self.then(x))
        gate, value = (packed[..., ::2], packed[..., 1::2]) if self.unpacked else packed.chunk(2, -1)
        return x + self.dropped(self.down(F.silu(gate) * value))


class Gpt(nn.Module):
    """A language model of blocks. `padding` is the embedding's padding_idx, and `tied` makes its weight the head's.

    The mistakes: with `silenced` this row of the embedding gets no gradient, with `divided` the gradients of the first
    half of the blocks are divided by this number.
    """

    def __init__(
        self,
        tied: bool = False,
        padding: int | None = None,
        silenced: int | None = None,
        divided: int = 1,
        **block: Any,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.blocks = nn.ModuleList(Block(**block) for _ in range(blocks(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.divided = divided
        if tied:
            self.head.weight = self.words.weight
        if silenced is not None:
            self.words.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor(silenced), 0.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.divided > 1 and number == len(self.blocks) // 2 - 1 and x.requires_grad:
                x.register_hook(lambda grad: grad / self.divided)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Experts(nn.Module):
    """A residual block of three experts, mixed by a softmax. One column sums up how unequal the mixtures are."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, unequal = x[..., :-1], x[..., -1:]
        weights = self.router(hidden).softmax(-1)
        mixed = sum(weights[..., i, None] * expert(hidden).tanh() for i, expert in enumerate(self.experts))
        return torch.cat([hidden + mixed, unequal + weights.square().sum(-1, keepdim=True)], -1)


class Mixture(nn.Module):
    """The last of its outputs is no class: the sum of its blocks' auxiliary terms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(10, WIDTH), nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(self.first(x), (0, 1))
        for block in self.blocks:
            x = block(x)
        return torch.cat([self.head(x[..., :-1]), x[..., -1:]], -1)


class Residual(nn.Module):
    """A residual block. With `lost` its scale, a parameter of one element, gets no gradient."""

    def __init__(self, lost: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), nn.Parameter(torch.ones(1))
        if lost:
            self.scale.register_hook(torch.zeros_like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + made * self.scale


def stack(**options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, WIDTH), *(Residual(**options) for _ in range(blocks(LAYERS))), nn.Linear(WIDTH, 4)
    )


class Twice(nn.Module):
    """Calls one of its layers twice. With `once` the second call gives no gradient."""

    def __init__(self, once: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(10, WIDTH), Residual(), nn.Linear(WIDTH, 4)
        self.once = once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x))
        again = self.middle(x)
        return self.head(x + (again - x).detach() if self.once else again)  # type: ignore[no-any-return]


class Normed(nn.Module):
    """A block with BatchNorm. With `again` its statistics move twice in a forward, as if it was recomputed."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.again = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        if self.again and self.training:
            self.norm(made)
        return x + torch.tanh(self.norm(made))


def normed(**options: Any) -> nn.Module:
    blocks = [Normed(**options) for _ in range(3)]
    return nn.Sequential(nn.Linear(10, WIDTH), *blocks, nn.Linear(WIDTH, 4))


# -- losses -----------------------------------------------------------------------------------------------------------


def summed(losses: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (losses * counted).sum(), counted.sum()


def token_losses(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Of all but the last token of each row."""
    return F.cross_entropy(output[:, :-1].transpose(1, 2), batch[0][:, 1:], reduction="none")


def last_token(output: torch.Tensor, batch: Any, factor: float = 1.0) -> Any:
    """Only the last token of each row counts."""
    counted = F.one_hot(torch.tensor(LENGTH - 2), LENGTH - 1).expand(len(output), -1)
    total, count = summed(token_losses(output, batch), counted)
    return factor * total, count


def mean_of_tokens(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """The mean of a micro-batch: rows of different lengths weigh alike."""
    total, count, _ = next_token(output, batch)
    return total / count  # type: ignore[no-any-return]


def with_z_loss(output: torch.Tensor, batch: Any, wrong: bool = False) -> Any:
    """Adds the squared logarithm of the softmax's denominator. `wrong`: its gradient leaves out the softmax."""
    total, count, _ = next_token(output, batch)
    z = output[:, :-1].logsumexp(-1)
    if wrong:
        z = output[:, :-1].sum(-1) + (z - output[:, :-1].sum(-1)).detach()
    return total + 0.1 * (z.square() * (batch[0][:, 1:] != 0)).sum(), count


def with_balance(output: torch.Tensor, batch: Any, factor: float = 1.0) -> Any:
    """Adds the auxiliary term of the experts, `factor` times."""
    return F.cross_entropy(output[:, :-1], batch[1], reduction="sum") + factor * output[:, -1].sum(), len(output)


def weighted(output: torch.Tensor, batch: Any) -> Any:
    losses = F.cross_entropy(output, batch[1], reduction="none")
    return (losses * batch[2]).sum(), len(output)


def times(factors: Sequence[float], loss: Loss = next_token) -> Loss:
    """Multiplies the losses of one micro-batch after another, for one process."""
    following = cycle(factors)

    def multiplied(output: Any, batch: Any) -> Any:
        total, count, *_ = loss(output, batch)
        return total * next(following), count

    return multiplied


# -- optimizers -------------------------------------------------------------------------------------------------------


def sgd(params: Any) -> torch.optim.Optimizer:
    """Without momentum: a factor at a gradient is seen in the weights."""
    return torch.optim.SGD([param for _, param in params], lr=0.1)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for _, param in params], lr=1e-2, eps=1e-3, weight_decay=0.1)


def stepped_before(params: Any) -> torch.optim.Optimizer:
    """One that has made a step without gradients."""
    params = [*params]
    optimizer = adamw(params)
    for _, param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def two_rates(params: Any, second: float = 0.2) -> torch.optim.Optimizer:
    """Matrices at another learning rate than vectors."""
    params = [*params]
    groups = [[p for _, p in params if p.dim() > 1], [p for _, p in params if p.dim() <= 1]]
    return torch.optim.SGD([{"params": groups[0], "lr": 0.1}, {"params": groups[1], "lr": second}])


def lamb(params: Any) -> torch.optim.Optimizer:
    return paceline.optim.LAMB([param for _, param in params], lr=1e-2)


class Halves(torch.optim.Optimizer):
    """Updates the halves of each matrix as if they were two."""

    def __init__(self, params: Any, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__([param for _, param in params], {"lr": 1e-2})
        self.halves = {p: [nn.Parameter(half.clone()) for half in p.detach().chunk(2)] for p in self._params()}
        self.inner = make([("", half) for halves in self.halves.values() for half in halves])

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param, halves in self.halves.items():
            for half, grad in zip(halves, param.grad.chunk(2), strict=True):
                half.grad = grad.clone()
        self.inner.step()
        for param, halves in self.halves.items():
            param.copy_(torch.cat([*halves]))


# -- the table --------------------------------------------------------------------------------------------------------


def texts() -> TensorDataset:
    """Rows of different lengths, filled up with 0, which no loss counts."""
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(1, WORDS, (COUNT, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (COUNT, 1), generator=generator)
    return TensorDataset(torch.where(torch.arange(LENGTH) < lengths, ids, 0))


def equal_rows(empty: int = 0) -> TensorDataset:
    """Ten rows that are all the same, and `empty` ones that weigh nothing."""
    x = torch.linspace(-1, 1, 10, dtype=torch.float64).expand(10 + empty, -1).clone()
    return TensorDataset(x, torch.ones(len(x), dtype=torch.long), (torch.arange(len(x)) < 10).double())


def language(**changes: Any) -> Case:
    options = {name: changes.pop(name) for name in [*changes] if name not in Case.__dataclass_fields__}
    make = lambda: Gpt(**options).double()
    return replace(Case(make, texts, next_token, sgd, BATCH, STEPS, micro=MICRO), **changes)


def classes(model: Callable[[], nn.Module], **changes: Any) -> Case:
    make = lambda: model().double()
    case = Case(make, lambda: rows(7, COUNT, 10), cross_entropy, sgd, BATCH, STEPS, micro=MICRO)
    return replace(case, **changes)


LM, STACK = language(), classes(stack)
NO_SEQUENCES = "context"
short = classes(stack, loss=weighted, data=equal_rows, global_batch=4, micro=2)
many = replace(LM, micro=1, global_batch=12)
lasts = language(loss=last_token)
narrow = replace(LM, clip_norm=0.3)
tied = language(tied=True, clip_norm=0.3)
scheduled = replace(LM, schedule=warm_up)

REPORTS = {
    "masked tokens in parts of a sequence": Report(
        ["Megatron-LM#7452 (finding 9)", "Megatron-LM#7513", "verl#5983"],
        "with context parallelism each part of a sequence divided its loss by its own number of counted tokens",
        lasts,
        replace(lasts, loss=partial(last_token, factor=0.5)),
        "context=2",
    ),
    "mean of means": Report(
        ["transformers#34191", "transformers#34242", "transformers#37474"],
        "the loss was the mean of the means of micro-batches and GPUs, so short texts weighed more",
        LM,
        replace(LM, loss=mean_of_tokens),
        "data=3",
    ),
    "short end of an epoch": Report(
        ["transformers#38837", "Lightning#19987"],
        "the last, short accumulation of an epoch was divided by the full number of micro-batches",
        short,
        replace(short, data=lambda: equal_rows(2)),
        "data=3",
        refused=NO_SEQUENCES,
    ),
    "auxiliary loss": Report(
        ["verl#6609", "Automodel#3359"],
        "the loss was divided by the number of tokens, but the auxiliary losses of experts were not",
        classes(Mixture, loss=with_balance),
        classes(Mixture, loss=partial(with_balance, factor=BATCH)),
        "pipeline=2",
        refused=rf"{NO_SEQUENCES}|virtual|zbv|tensor",
    ),
    "z-loss": Report(
        ["pytorch#190746"],
        "inside of loss_parallel, a log-softmax that was used for more than the cross-entropy had a wrong gradient",
        replace(LM, loss=with_z_loss),
        replace(LM, loss=partial(with_z_loss, wrong=True)),
        "tensor=2",
    ),
    "undivided loss in stages": Report(
        ["torchtitan#2972"],
        "a pipeline ran its backward on the sum over tokens; only the printed loss was divided",
        LM,
        replace(LM, loss=times([40.0])),
        "pipeline=2",
    ),
    "divided again in each micro-batch": Report(
        ["torchtitan#1733"],
        "gradients that were summed so far were divided again after each micro-batch",
        LM,
        replace(LM, loss=times([1 / 9, 1 / 3, 1.0])),
        "pipeline=2",
    ),
    "divided once in each stage": Report(
        ["DeepSpeed#8152"],
        "each stage divided the gradient that it received by the number of micro-batches",
        LM,
        language(divided=3),
        "pipeline=2",
    ),
    "last micro-batch not reduced": Report(
        ["DeepSpeed#7985"],
        "the last micro-batch of a step was added after the all-reduce, and stayed on its worker",
        LM,
        replace(LM, loss=times([1.0, 1.0, 0.5])),
        "shard=2 zero=1",
    ),
    "one micro-batch survives": Report(
        ["Fast-LLM#550", "DeepSpeed#7967", "DeepSpeed#7981", "Automodel#3530"],
        "the gradients of one micro-batch replaced those of the others",
        LM,
        replace(LM, loss=times([0.0, 0.0, 1.0])),
        "shard=2 zero=2 offload=cpu",
    ),
    "doubled in each micro-batch": Report(
        ["Megatron-LM#6660"],
        "in a data-parallel group of one worker, gradients doubled with each micro-batch",
        many,
        replace(many, loss=times([2.0**n for n in range(11, -1, -1)])),
        "shard=2 zero=3 recompute=blocks",
    ),
    "clipped by the local norm": Report(
        ["pytorch#170862", "RLinf#1558", "Automodel#3816"],
        "each worker clipped by the norm of its own part of the gradients",
        narrow,
        replace(narrow, clip_norm=0.3 * 2**0.5),
        "shard=2 zero=3 recompute=blocks",
    ),
    "copies in the norm": Report(
        ["TransformerEngine#715", "NeMo-RL#3788", "pytorch#88955"],
        "parameters that all workers of a tensor-parallel group hold counted once for each of them in the norm",
        narrow,
        replace(narrow, clip_norm=0.3 / 1.4),
        "tensor=2",
    ),
    "tied weight in the norm": Report(
        ["Megatron-LM#7227"],
        "a weight that the first and the last stage share counted twice in the norm",
        tied,
        replace(tied, clip_norm=0.3 / 2**0.5),
        "pipeline=2",
    ),
    "norm over heads": Report(
        ["Megatron-LM#7452 (finding 11)", "torchtitan#1805"],
        "a norm that the heads share got only the gradient of the heads of its own worker",
        LM,
        language(halved=True),
        "tensor=2",
    ),
    "padding_idx of a divided embedding": Report(
        ["torchtitan#4637"],
        "the padding row of the full table was taken for a row of each part of it, so another word was never trained",
        language(padding=1),
        language(padding=1, silenced=WORDS // 2 + 1),
        "tensor=2",
    ),
    "packed weights": Report(
        ["Megatron-LM#1989", "ROCm/Megatron-LM#63"],
        "a weight that holds several layers was cut without regard to these",
        LM,
        language(unpacked=True),
        "tensor=2",
    ),
    "optimizer on parts of matrices": Report(
        ["DeepSpeed#8437", "DeepSpeed#490"],
        "Muon and LAMB computed the update of a matrix from one worker's part of it",
        language(optimizer=lamb),
        language(optimizer=partial(Halves, make=lamb)),
        "shard=2 zero=3 recompute=blocks",
    ),
    "hidden optimizer step": Report(
        ["Megatron-LM#5974"],
        "a step without gradients created the optimizer's state, so the first real update was computed as the second",
        language(optimizer=adamw),
        language(optimizer=stepped_before),
        "shard=2 zero=1",
    ),
    "schedule of each process": Report(
        ["accelerate#2142", "accelerate#1398", "Lightning#1476"],
        "the learning-rate schedule moved once for each process in each step",
        scheduled,
        replace(scheduled, schedule=lambda step: warm_up(2 * step)),
        "data=3",
    ),
    "one rate for all groups": Report(
        ["DeepSpeed#8171"],
        "all parameter groups got the learning rate of the first group",
        language(optimizer=two_rates),
        language(optimizer=partial(two_rates, second=0.1)),
        "shard=2 zero=1",
    ),
    "equal dropout masks": Report(
        ["pytorch#168058", "veScale#52"],
        "all workers drew the same dropout masks, or masks that depend on the number of workers",
        language(drop=0.2),
        language(drop=0.2, draws_alike=True),
        "data=3",
    ),
    "parameter of one element": Report(
        ["pytorch#144045"],
        "a parameter of shape (1,) in a sharded submodule got no gradient",
        STACK,
        classes(partial(stack, lost=True)),
        "shard=2 zero=3 recompute=blocks",
        refused=NO_SEQUENCES,
    ),
    "module used twice": Report(
        ["DeepSpeed#8224"],
        "with ZeRO-2 a submodule that is called twice in a forward got the gradient of one call",
        classes(Twice),
        classes(partial(Twice, once=True)),
        "shard=2 zero=2 offload=cpu",
        refused=rf"{NO_SEQUENCES}|pipeline|recompute",
    ),
    "worker without rows": Report(
        ["pytorch#42577"],
        "when one of four workers had no more rows, sums were still divided by four",
        LM,
        replace(LM, loss=times([0.75])),
        "data=3",
    ),
    "recomputed BatchNorm": Report(
        ["pytorch#96136", "YOLO-Master#262"],
        "recomputing a block in the backward moved the running statistics of BatchNorm a second time",
        classes(normed),
        classes(partial(normed, again=True)),
        "shard=2 zero=3 recompute=blocks",
        refused=rf"{NO_SEQUENCES}|pipeline|tensor",
    ),
}
REPORTED_MODELS = {name: report.case for name, report in REPORTS.items()}
