"""Who has which rows of a tensor that is cut along its first dimension, as torch.chunk and fully_shard cut it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

_LINE = 16  # elements: stretches of different places share no line of a cache


@dataclass(frozen=True)
class Places:
    """`count` workers that share the rows of each tensor, of whom this one is `me`. With one, all rows are its own."""

    count: int = 1
    me: int = 0

    def rows(self, length: int, place: int) -> range:
        """Of so many rows those of one place, maybe none."""
        step = -(-length // self.count)
        return range(min(place * step, length), min((place + 1) * step, length))

    def size(self, shape: Sequence[int], place: int) -> int:
        """The elements of a place. A tensor without dimensions is a row of one."""
        length, *rest = [*shape, 1] if shape else (1, 1)
        return len(self.rows(length, place)) * math.prod(rest)

    def width(self, shape: Sequence[int]) -> int:
        """The elements of the place that has most."""
        return self.size(shape, 0)

    def aligned(self, elements: int) -> int:
        return elements if self.count == 1 else -(-elements // _LINE) * _LINE

    def of(self, whole: torch.Tensor, place: int) -> torch.Tensor:
        """The rows of a place, in the memory of the whole. A tensor without dimensions has one."""
        whole = whole if whole.dim() else whole.view(1)
        rows = self.rows(len(whole), place)
        return whole[rows.start : rows.stop]

    def cut(self, param: Parameter) -> Parameter:
        """The own rows of a parameter, which is itself where all are."""
        return param if self.count == 1 else marked(self.of(param.detach(), self.me), marks_of(param))


ALONE = Places()


def marks_of(param: Parameter) -> dict[str, Any]:
    """The attributes that a script gave a parameter: optimizers' groups are made by such."""
    bare = vars(Parameter(param.detach(), requires_grad=False))  # some kinds of tensors have attributes themselves
    return {name: value for name, value in vars(param).items() if name not in bare}


def marked(tensor: torch.Tensor, marks: Mapping[str, Any]) -> Parameter:
    param = Parameter(tensor)
    vars(param).update(marks)
    return param


@dataclass(frozen=True)
class Rows:
    """The `tensor` that a place has of one with that `shape`, whose rows are cut."""

    tensor: torch.Tensor
    places: Places
    shape: tuple[int, ...]

    def take(self, rows: range | None) -> torch.Tensor:
        """Some of them, numbered as in the whole; all of a tensor without dimensions."""
        if rows is None:
            return self.tensor.view(self.shape)
        start = self.places.rows(self.shape[0], self.places.me).start if self.shape else 0
        return self.tensor[rows.start - start : rows.stop - start]
