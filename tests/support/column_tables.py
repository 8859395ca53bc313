"""A table with columns of several types, which tests write in several formats, and what its rows must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

COUNT = 103


def table(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "number": pa.array(numbers, pa.int32()),
            "x": pa.array([[n / 2, n / 4, -n] for n in numbers], pa.list_(pa.float32())),
            "ragged": pa.array([list(range(n % 3)) for n in numbers], pa.list_(pa.int64())),
            "ok": pa.array([n % 2 == 0 for n in numbers]),
            "text": [f"row {n}" for n in numbers],
            "maybe": pa.array([n if n % 5 else None for n in numbers], pa.int64()),
        }
    )


def check_rows(rows: Any) -> None:
    """Compares rows of a dataset with those of `table(0, COUNT)`."""
    assert len(rows) == COUNT
    for n in (0, 39, 40, COUNT - 1, 16, 17):
        row = rows[n]
        assert (row["number"], row["ok"], row["text"]) == (n, n % 2 == 0, f"row {n}")
        assert row["maybe"] == (n if n % 5 else None)
        np.testing.assert_array_equal(row["x"], np.float32([n / 2, n / 4, -n]))
        np.testing.assert_array_equal(row["ragged"], np.arange(n % 3))
    assert rows[-1]["number"] == COUNT - 1
    with pytest.raises(IndexError, match="row 103 of 103"):
        rows[COUNT]
