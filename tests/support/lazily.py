"""Frameworks that one file of tests uses: each of the test processes would import them to collect the tests."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Lazily:
    """A module that is imported when one of its names is first used. Skips the file of tests where it is missing."""

    def __init__(self, name: str) -> None:
        if name not in sys.modules and find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks each object of a file whether it is a fixture
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
