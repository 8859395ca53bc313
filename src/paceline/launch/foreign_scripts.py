"""Recognises scripts that train by themselves over torch.distributed, and so need `paceline run --raw`.

Without it each worker would train a model of its own, or fail without the variables that torchrun sets.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.base.schema import read_file
from paceline.errors import FormatError, UsageError

_EXPLICIT = {"store", "rank", "init_method"}  # arguments by which a script finds its peers without those variables
# Names that a script imports from these packages, and that spread training over processes if they are called.
_TRAINERS = {
    "accelerate": ("Accelerator", "PartialState"),
    "lightning": ("Trainer", "Fabric", "LightningCLI"),
    "lightning_fabric": ("Fabric",),
    "pytorch_lightning": ("Trainer", "LightningCLI"),
    "transformers": ("Trainer", "Seq2SeqTrainer"),
    "trl": ("SFTTrainer", "DPOTrainer", "GRPOTrainer", "RewardTrainer", "KTOTrainer", "RLOOTrainer"),
}


def refuse_foreign(script: Path, workers: int) -> None:
    """Raises UsageError if a script that will run on `workers` workers needs --raw.

    A script that imports Paceline, or a module beside it that does, is not examined.
    """
    tree = _parse(script)
    if tree is None or any(_imports_paceline(module) for module in _modules(script, tree)):
        return
    what = next(_needs(tree, workers), None)
    if what is None:
        return
    cure = "add --raw before the script to run it unchanged, or create a paceline.Trainer in it"
    raise UsageError(
        f"{script.name} {what} and does not import paceline",
        f"{cure} (if a module that it imports does, import paceline)",
    )


def _parse(path: Path) -> ast.Module | None:
    """The syntax tree of a source file; None if it cannot be read or parsed, which the worker itself reports."""
    with suppress(OSError, SyntaxError, ValueError, FormatError, RecursionError):
        return ast.parse(read_file(path))
    return None


def _imports_paceline(tree: ast.Module) -> bool:
    return any(name.partition(".")[0] == "paceline" for name in _imported(tree))


def _modules(script: Path, tree: ast.Module) -> Iterator[ast.Module]:
    """The script, and the modules beside it from which it and they import."""
    folder, seen, trees = script.parent, {script}, [tree]
    while trees:
        module = trees.pop()
        yield module
        for name in _imported(module):
            path = folder.joinpath(*name.split("."))
            for file in {path.with_suffix(".py"), path / "__init__.py"} - seen:
                seen.add(file)
                if file.is_file() and (imported := _parse(file)) is not None:
                    trees.append(imported)


def _imported(tree: ast.Module) -> Iterator[str]:
    """The modules that a module may import, by name: of ``from a import b`` both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            before = f"{node.module}." if node.module else ""
            yield from (node.module,) if node.module else ()
            yield from (f"{before}{alias.name}" for alias in node.names)


def _needs(tree: ast.Module, workers: int) -> Iterator[str]:
    """What a script does that needs --raw, in words that follow its name; the clearest first."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        given = {keyword.arg for keyword in call.keywords}
        if _dotted(call.func).endswith("init_process_group") and not given & _EXPLICIT and len(call.args) < 2:
            yield "calls torch.distributed.init_process_group()"
    if workers == 1:  # all that follows trains with one process, too
        return
    owners = _owners(tree)
    for call in calls:
        first, _, rest = _dotted(call.func).partition(".")
        full = owners.get(first, first) + (f".{rest}" if rest else "")
        package, _, name = full.partition(".")
        if name.rpartition(".")[2] in _TRAINERS.get(package, ()):
            yield f"uses {name.rpartition('.')[2]} of {package}"


def _owners(tree: ast.Module) -> dict[str, str]:
    """The full name of each name that a script imports."""
    owners: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            owners |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            owners |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return owners


def _dotted(node: ast.expr) -> str:
    """A name with dots, like ``os.environ.get``; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
