"""What the tests compare with is made once, also where they are spread over several processes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder of this session of tests in which `make` has been called: by whoever needs it first."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, made = base / f"once {name}", base / f"once {name}.made"
    with (base / f"once {name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # whoever began it has failed, and said so
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
