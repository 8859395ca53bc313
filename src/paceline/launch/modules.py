"""Finds the file of `paceline run -m MODULE` without importing its package."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from paceline.base.console import shown
from paceline.errors import UsageError


def find_module(name: str) -> str:
    """Finds the file that ``python -m name`` would run in this folder. UsageError: there is none."""
    first, *rest = name.split(".")
    candidates = _candidates(_find(first), rest) if all((first, *rest)) else iter(())
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        cure = "use a name that `python -m` accepts, for example package.train; to run a file, leave -m out"
        raise UsageError(f"the module {shown(name)} does not exist or cannot be run", cure)
    return os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)


def _find(name: str) -> ModuleSpec | None:
    """Finds a top-level module; the working directory comes first, as it does in the workers."""
    path = sys.path if sys.flags.safe_path else [os.getcwd(), *sys.path[1:]]
    specs = (finder.find_spec(name, path, None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _candidates(spec: ModuleSpec | None, rest: list[str]) -> Iterator[Path]:
    """Paths of the file in the order in which Python looks: a package, a module, a package without __init__.py."""
    if spec is None:
        return
    if spec.submodule_search_locations is None:
        if not rest and spec.origin:
            yield Path(spec.origin)
        return
    for folder in (Path(location, *rest) for location in spec.submodule_search_locations):
        package = folder / "__main__.py"
        module = [folder.with_name(f"{folder.name}.py")] if rest else []
        yield from [package, *module] if (folder / "__init__.py").exists() else [*module, package]
