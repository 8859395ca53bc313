"""Collectives of trees: numbers, text, arrays, tensors and nestings of them, without pickle."""

from __future__ import annotations

from typing import Any

from paceline.checkpoint.tree import pack, unpack
from paceline.team.team import join


def gather_trees(tree: Any, name: str) -> list[Any]:
    """Returns the trees of all workers in rank order. All workers must call it; `name` is for error messages."""
    return [unpack(part) for part in join().gather(pack(tree), name)]


def from_main(tree: Any) -> Any:
    """Returns the tree of the main worker, on all workers. All workers must call it."""
    return gather_trees(tree if join().rank == 0 else None, "from the main worker")[0]
