"""Assigns a model's blocks and parameters to pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from torch import nn

from paceline.compute.blocks import blocks_of, called_again
from paceline.errors import UsageError

GAIN = 0.9  # another partition is suggested if its slowest worker takes less than this fraction of the time
NAMED = 'name the list of blocks: Trainer(..., pipeline_blocks="model.layers")'


@dataclass(frozen=True)
class StagePartition:
    """The partition of a model's `blocks` into stages. `blocks` are names, in the order of calls.

    Each stage has the blocks from its entry of `starts` to the next entry. Parameters registered before the first block
    belong to the first stage, those after the last block to the last stage, and those between two blocks to the stage
    of the first of these. The last stage also has each parameter outside of blocks that is a single number: it may be a
    temperature, which the loss reads from the model. `weights` estimate the arithmetic of each block.
    """

    blocks: tuple[str, ...]
    starts: tuple[int, ...]
    weights: tuple[int, ...] = field(default=(), compare=False)

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.starts)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return (*self.starts[1:], len(self.blocks))

    def blocks_of(self, stage: int) -> range:
        """Returns the numbers of a stage's blocks."""
        return range(self.starts[stage], self._ends[stage])

    def describe(self, stage: int) -> str:
        """Describes a stage's blocks: ``layers.0 to 5``."""
        first, *rest = [self.blocks[number] for number in self.blocks_of(stage)] or [""]
        return f"{first} to {rest[-1].rpartition('.')[2]}" if rest else first

    def stage_of_block(self, number: int) -> int:
        """Returns the stage that has the block of this number."""
        return next(stage for stage, end in enumerate(self._ends) if number < end)

    def suggest(self, seconds: Sequence[float], workers: Sequence[int]) -> tuple[str, float, float] | None:
        """Suggests a partition that balances the measured seconds better; None if the gain is too small. `workers` has
        the worker of each stage.

        Returns the value for `pipeline_blocks=`, the seconds of the slowest worker now, and those with the suggestion.
        """
        now = [sum(self.weights[number] for number in self.blocks_of(stage)) for stage in range(self.count)]

        def by_worker(amounts: Sequence[float]) -> list[float]:
            pairs = [*zip(workers, amounts, strict=True)]
            return [sum(amount for of, amount in pairs if of == worker) for worker in range(max(workers) + 1)]

        rates = [taken / max(1, weight) for taken, weight in zip(by_worker(seconds), by_worker(now), strict=True)]
        starts = even(self.weights, self.count, [rates[worker] for worker in workers])
        partition = replace(self, starts=starts)
        then = [sum(self.weights[number] for number in partition.blocks_of(stage)) for stage in range(self.count)]
        slowest_then = max(rate * weight for rate, weight in zip(rates, by_worker(then), strict=True))
        slowest_now = max(by_worker(seconds))
        text = f"{self.blocks[0].rpartition('.')[0]}:{','.join(map(str, starts[1:]))}"
        return (text, slowest_now, slowest_then) if slowest_then < GAIN * slowest_now else None

    def homes(self, model: nn.Module) -> dict[int, tuple[int, ...]]:
        """Returns the stages that have each parameter, by its identity. Several names may mean several stages."""
        stages_of: dict[int, set[int]] = {}
        blocks_passed = 0
        for name, param in model.named_parameters(remove_duplicate=False):
            number = next((n for n, block in enumerate(self.blocks) if name.startswith(f"{block}.")), None)
            if number is not None:
                blocks_passed = max(blocks_passed, number + 1)
                stage = self.stage_of_block(number)
            elif 0 < blocks_passed < len(self.blocks):
                stage = self.stage_of_block(blocks_passed - 1)
            else:
                stage = 0 if blocks_passed == 0 else self.count - 1
            loss_may_use = number is None and param.numel() == 1
            stages_of.setdefault(id(param), set()).update({stage, self.count - 1} if loss_may_use else {stage})
        return {identity: tuple(sorted(stages)) for identity, stages in stages_of.items()}


def divide(model: nn.Module, count: int, workers: int, requested: str | None) -> StagePartition:
    """Divides the blocks of a model into `count` stages.

    `requested` is the path of the list of blocks, and optionally the first blocks of the later stages:
    ``model.layers:5,9``. Without the latter, each stage gets about the same arithmetic, estimated by the number of
    elements of the weights. Raises UsageError if the model cannot be divided into `count` stages.
    """
    path, _, cuts = (requested or "").partition(":")
    blocks = _blocks_at(model, path) if path else _detect_blocks(model)
    if len(blocks) < count:
        where = path or next(iter(blocks)).rpartition(".")[0] or type(model).__name__
        most = len(blocks) * workers // count
        cure = f"use at most pipeline={most}" if most > 1 else "leave pipeline= out"
        virtual = ", or leave virtual= out" if workers <= len(blocks) else ""
        counted = "1 block" if len(blocks) == 1 else f"{len(blocks)} blocks"
        raise UsageError(f"{where} has {counted}, too few for {count} stages", cure + virtual)
    names = tuple(blocks)
    weights = tuple(_weights(model, names))
    if not cuts:
        return StagePartition(names, even(weights, count), weights)
    starts = tuple(int(text) if text.strip().isdecimal() else -1 for text in cuts.split(","))
    if len(starts) != count - 1 or any(not a < b for a, b in pairwise((0, *starts, len(names)))):
        later = "stage 1" if count == 2 else f"stages 1 to {count - 1}"
        what = f"pipeline_blocks={requested!r} does not give the first block of {later}"
        example = ",".join(map(str, even([1] * len(names), count)[1:]))
        raise UsageError(what, f"give increasing block numbers below {len(names)}, for example {path}:{example}")
    return StagePartition(names, (0, *starts), weights)


def _blocks_at(model: nn.Module, path: str) -> dict[str, nn.Module]:
    named = dict(model.named_modules(remove_duplicate=False))
    if path not in named:
        raise UsageError(f"the model has no module {path!r}, which pipeline_blocks= names", "give the path of a module")
    children = {f"{path}.{name}": child for name, child in named[path].named_children()}
    if any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in children.values()):
        raise UsageError(
            f"pipeline_blocks= names {path!r}, which contains lists of blocks", "give the path of one list"
        )
    return {name: child for name, child in children.items() if next(child.parameters(), None) is not None}


def _detect_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks of a model's only list of blocks. Raises UsageError where it has none or several."""
    blocks = blocks_of(model, sharing=True)
    lists: dict[str, dict[str, nn.Module]] = {}
    for name, block in blocks.items():
        lists.setdefault(name.rpartition(".")[0], {})[name] = block
    kind = type(model).__name__
    if not lists and (again := called_again(model)):
        what = f"{kind} calls one module several times instead of a list of blocks ({again})"
        raise UsageError(
            f"{what}, but pipeline= runs each block once",
            "leave pipeline= out, or split the layers inside with tensor=N",
        )
    if len(lists) != 1:
        what = (
            f"{kind} has no list of repeated blocks"
            if not lists
            else f"{kind} has several lists of blocks: {', '.join(lists)}"
        )
        raise UsageError(
            f"{what}; pipeline= splits exactly one list", NAMED if lists else f"{NAMED}, or leave pipeline= out"
        )
    return next(iter(lists.values()))


def _weights(model: nn.Module, names: Sequence[str]) -> list[int]:
    """Estimates the arithmetic of each block, including the code after it up to the next block or the end."""
    weights, last_block, in_blocks = [0] * len(names), -1, set[int]()
    for name, param in model.named_parameters(remove_duplicate=False):
        number = next((n for n, block in enumerate(names) if name.startswith(f"{block}.")), None)
        if number is not None:
            last_block = max(last_block, number)
            in_blocks.add(id(param))
            weights[number] += param.numel()
        elif last_block >= 0 and param.dim() > 1 and id(param) not in in_blocks:
            weights[last_block] += param.numel()
    return weights


def even(weights: Sequence[int], count: int, rates: Sequence[float] | None = None) -> tuple[int, ...]:
    """Returns the first block of each of `count` stages, such that the heaviest stage is as light as possible.

    `weights` are those of the blocks. `rates` are factors for the weight of each stage.
    """
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    impossible: tuple[float, tuple[int, ...]] = (math.inf, ())
    best = [[(0.0, impossible[1]), *[impossible] * len(weights)]]
    for stage in range(count):
        row: list[tuple[float, tuple[int, ...]]] = []
        for end in range(len(weights) + 1):
            cheapest = impossible
            for start in range(stage, end):
                heaviest, starts = best[-1][start]
                seconds = (sums[end] - sums[start]) * (1.0 if rates is None else rates[stage])
                cheapest = min(cheapest, (max(heaviest, seconds), (*starts, start)))
            row.append(cheapest)
        best.append(row)
    return best[count][len(weights)][1]
