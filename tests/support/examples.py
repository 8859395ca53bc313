"""Property tests with few hypothesis examples in the fast run, and with many in the slow one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def examples(*strategies: SearchStrategy[Any], fast: int, slow: int = 100) -> Callable[[Callable[..., None]], Any]:
    """Like hypothesis' `given`, for a test whose examples are costly: its `slow` variant has as many as others have."""

    def decorate(check: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("count", [fast, pytest.param(slow, marks=pytest.mark.slow)])
        def test(count: int) -> None:
            settings(max_examples=count, deadline=None)(given(*strategies)(check))()

        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        test.__module__ = check.__module__
        return test

    return decorate
