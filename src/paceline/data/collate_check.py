"""Detects a collate function that drops or adds rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.compute.microbatches import MicroBatch, rows_told, tensors_of

USUAL = 4  # micro-batches, and more than half of them, whose tensors begin with their rows


class Collated:
    """Checks that `collate` keeps the number of rows of micro-batches of `micro` rows.

    If the first dimension of its tensors is usually the number of rows, a micro-batch with another first dimension is
    reported. Packed, time-first and graph batches do not have that dimension first, and are not checked.
    """

    def __init__(self, collate: Callable[..., Any], micro: int) -> None:
        self._collate, self._micro = collate, micro
        self._usual = self._others = 0
        self._first_mismatch = ""  # describes the first mismatch

    def look(self, micro_batch: MicroBatch) -> MicroBatch:
        """Checks a micro-batch that has all of its rows; sets its `row_mismatch` to the first mismatch once that is
        certain.
        """
        tensors = [tensor for tensor in tensors_of(micro_batch.batch) if tensor.dim()]
        first, second = {t.shape[0] for t in tensors}, {t.shape[1] for t in tensors if t.dim() > 1}
        if micro_batch.rows == self._micro and len(first) == 1:
            usual = first == {self._micro}
            self._usual += usual
            if not usual and second != {self._micro}:  # else the time dimension comes first
                self._others += 1
                self._first_mismatch = self._first_mismatch or self._describe_mismatch(micro_batch, first.pop())
            micro_batch.row_mismatch = self._first_mismatch if self._usual >= max(USUAL, self._others + 1) else ""
        return micro_batch

    def _describe_mismatch(self, micro_batch: MicroBatch, made: int) -> str:
        collate = inspect.unwrap(getattr(self._collate, "func", self._collate))  # of a partial
        code = getattr(collate, "__code__", None) or getattr(type(collate).__call__, "__code__", None)
        at = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""
        name, rows = getattr(collate, "__name__", type(collate).__name__), micro_batch.rows
        which = rows_told([micro_batch.index], micro_batch.numbers) or micro_batch.source
        what = f"{name}{at} made {made} rows of the {rows} of {which}, but their mean is weighted with {rows}"
        return f"{what}; return (sum, count) from the loss"
