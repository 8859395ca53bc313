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

GAIN = 0.9  # of the slowest worker's seconds, that another cut must come below to be told of
NAMED = 'say which: Trainer(..., pipeline_blocks="model.layers")'


@dataclass(frozen=True)
class StagePartition:
    """Of `blocks`, by name and in the order in which they are called, each stage has those from its entry of `starts`
    to the next one. What was registered before the first block is the first stage's, what after the last one the last
    one's; what stands between two blocks belongs to the first of these. A single number outside of blocks may be a
    temperature, which the loss takes from the model: the last one has it, too. `weights` are about what blocks compute.
    """

    blocks: tuple[str, ...]
    starts: tuple[int, ...]
    weights: tuple[int, ...] = field(default=(), compare=False)

    @property
    def count(self) -> int:
        return len(self.starts)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return (*self.starts[1:], len(self.blocks))

    def own(self, stage: int) -> range:
        """The numbers of a stage's blocks."""
        return range(self.starts[stage], self._ends[stage])

    def told(self, stage: int) -> str:
        """A stage's blocks, for people: ``layers.0 to 5``."""
        first, *rest = [self.blocks[number] for number in self.own(stage)] or [""]
        return f"{first} to {rest[-1].rpartition('.')[2]}" if rest else first

    def of_block(self, number: int) -> int:
        return next(stage for stage, end in enumerate(self._ends) if number < end)

    def better(self, seconds: Sequence[float], workers: int) -> tuple[str, float, float] | None:
        """Where each stage took its worker so long: a cut as `pipeline_blocks` says it, the seconds of the slowest
        worker now, and with that cut; where it would gain.
        """
        own = [sum(self.weights[number] for number in self.own(stage)) for stage in range(self.count)]
        rates = [sum(seconds[at::workers]) / max(1, sum(own[at::workers])) for at in range(workers)]
        starts = even(self.weights, self.count, [rates[stage % workers] for stage in range(self.count)])
        cut = replace(self, starts=starts)
        then = [sum(self.weights[number] for number in cut.own(stage)) for stage in range(self.count)]
        slowest = max(rate * sum(then[at::workers]) for at, rate in enumerate(rates))
        now = max(sum(seconds[at::workers]) for at in range(workers))
        said = f"{self.blocks[0].rpartition('.')[0]}:{','.join(map(str, starts[1:]))}"
        return (said, now, slowest) if slowest < GAIN * now else None

    def homes(self, model: nn.Module) -> dict[int, tuple[int, ...]]:
        """The stages that have a parameter, by its identity: several, where it has several names."""
        found: dict[int, set[int]] = {}
        passed = 0  # blocks
        for name, param in model.named_parameters(remove_duplicate=False):
            number = next((n for n, block in enumerate(self.blocks) if name.startswith(f"{block}.")), None)
            if number is not None:
                passed = max(passed, number + 1)
                stage = self.of_block(number)
            elif 0 < passed < len(self.blocks):
                stage = self.of_block(passed - 1)
            else:
                stage = 0 if passed == 0 else self.count - 1
            loss_may = number is None and param.numel() == 1
            found.setdefault(id(param), set()).update({stage, self.count - 1} if loss_may else {stage})
        return {known: tuple(sorted(stages)) for known, stages in found.items()}


def divide(model: nn.Module, count: int, workers: int, said: str | None) -> StagePartition:
    """The blocks of a model in so many stages, which are `said` by the path of their list, and maybe the first blocks
    of the later stages: ``model.layers:5,9``. Else so that each stage has about the same arithmetic, that of a matrix
    counted by its elements. Raises UsageError.
    """
    path, _, cuts = (said or "").partition(":")
    blocks = _listed(model, path) if path else _found(model)
    if len(blocks) < count:
        where = path or next(iter(blocks)).rpartition(".")[0] or type(model).__name__
        most = len(blocks) * workers // count
        cure = f"say pipeline={most} at most" if most > 1 else "leave pipeline= out"
        virtual = ", or leave virtual out" if workers <= len(blocks) else ""
        raise UsageError(f"{len(blocks)} blocks of {where} do not make {count} stages", cure + virtual)
    names = tuple(blocks)
    weights = tuple(_weights(model, names))
    if not cuts:
        return StagePartition(names, even(weights, count), weights)
    starts = tuple(int(text) if text.strip().isdecimal() else -1 for text in cuts.split(","))
    if len(starts) != count - 1 or any(not a < b for a, b in pairwise((0, *starts, len(names)))):
        what = f"pipeline_blocks={said!r} does not say the first blocks of {count - 1} later stages"
        example = ",".join(map(str, even([1] * len(names), count)[1:]))
        raise UsageError(what, f"write numbers that grow and are less than {len(names)}, as {path}:{example}")
    return StagePartition(names, (0, *starts), weights)


def _listed(model: nn.Module, path: str) -> dict[str, nn.Module]:
    named = dict(model.named_modules(remove_duplicate=False))
    if path not in named:
        raise UsageError(f"pipeline_blocks= names {path!r}, and the model has no such module", "write its path")
    children = {f"{path}.{name}": child for name, child in named[path].named_children()}
    if any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in children.values()):
        raise UsageError(f"pipeline_blocks= names {path!r}, which has lists of blocks", "write the path of one of them")
    return {name: child for name, child in children.items() if next(child.parameters(), None) is not None}


def _found(model: nn.Module) -> dict[str, nn.Module]:
    """The one list of blocks that a model has."""
    blocks = blocks_of(model, sharing=True)
    lists: dict[str, dict[str, nn.Module]] = {}
    for name, block in blocks.items():
        lists.setdefault(name.rpartition(".")[0], {})[name] = block
    kind = type(model).__name__
    if not lists and (again := called_again(model)):
        what = f"the blocks of {kind} are one module that is called several times ({again})"
        raise UsageError(
            f"{what}, and pipeline= passes each once", "leave pipeline= out; tensor=N cuts such a module inside"
        )
    if len(lists) != 1:
        what = f"no part of {kind} repeats" if not lists else f"{kind} has several lists of blocks: {', '.join(lists)}"
        raise UsageError(f"{what}, and pipeline= cuts one", NAMED if lists else f"{NAMED}, or leave pipeline= out")
    return next(iter(lists.values()))


def _weights(model: nn.Module, names: Sequence[str]) -> list[int]:
    """About the arithmetic of each block; what is between it and the next one, or after the last one, belongs to it."""
    found, last, inside = [0] * len(names), -1, set[int]()
    for name, param in model.named_parameters(remove_duplicate=False):
        number = next((n for n, block in enumerate(names) if name.startswith(f"{block}.")), None)
        if number is not None:
            last = max(last, number)
            inside.add(id(param))
            found[number] += param.numel()
        elif last >= 0 and param.dim() > 1 and id(param) not in inside:
            found[last] += param.numel()
    return found


def even(weights: Sequence[int], count: int, rates: Sequence[float] | None = None) -> tuple[int, ...]:
    """Where stages begin, so that the heaviest one is as light as can be, and those before it have as many blocks.
    With `rates`, what a stage's weight is to be multiplied by.
    """
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    nowhere: tuple[float, tuple[int, ...]] = (math.inf, ())
    best = [[(0.0, nowhere[1]), *[nowhere] * len(weights)]]
    for stage in range(count):
        row: list[tuple[float, tuple[int, ...]]] = []
        for end in range(len(weights) + 1):
            found = nowhere
            for start in range(stage, end):
                heaviest, starts = best[-1][start]
                seconds = (sums[end] - sums[start]) * (1.0 if rates is None else rates[stage])
                found = min(found, (max(heaviest, seconds), (*starts, start)))
            row.append(found)
        best.append(row)
    return best[count][len(weights)][1]
