"""Counts the lines of eight first tasks, as a new user writes them with each library.

    python benchmarks/first_tasks/count.py [--record FILE]

TASK/with_LIBRARY.py is a complete script. All scripts of a task have the same features,
see docs/first-tasks.md. They read the files that prepare.py makes.

A line counts unless it is blank, a comment or a docstring; an import counts as one. All
scripts are laid out by `ruff format` with the settings of ruff.toml, so no author
chooses the line breaks. A command that must run before the script, which its docstring
names, is a line, too. Statements are counted as well: they do not depend on the layout.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from turns import record  # noqa: E402

LIBRARIES = "paceline", "hf_trainer", "lightning", "accelerate"
# The most lines that the scripts with Paceline may have.
MOST = {
    "image": 46,
    "bert": 37,
    "gpt": 23,
    "lora": 28,
    "gan": 33,
    "detection": 44,
    "a2c": 46,
    "tabular": 34,
}


def scripts(task: str) -> dict[str, Path]:
    """The scripts of a task, by library."""
    files = {library: HERE / task / f"with_{library}.py" for library in LIBRARIES}
    return {library: file for library, file in files.items() if file.exists()}


def docstrings(tree: ast.AST) -> list[ast.Expr]:
    """The statements that are texts alone."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    constants = [one for one in statements if isinstance(one.value, ast.Constant)]
    return [one for one in constants if isinstance(one.value.value, str)]


def commands(tree: ast.Module) -> int:
    """How many commands the docstring names before the one that starts the script."""
    text = (ast.get_docstring(tree) or "").splitlines()
    starts = ("paceline ", "python ", "accelerate ", "torchrun ")
    return max(0, sum(line.startswith(starts) for line in text) - 1)


def count(source: str) -> tuple[int, int]:
    """The lines and the statements of a script."""
    tree = ast.parse(source)
    left_out = docstrings(tree)
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    skipped = {n for one in left_out for n in range(one.lineno, one.end_lineno + 1)}
    skipped |= {n for one in imports for n in range(one.lineno + 1, one.end_lineno + 1)}
    lines = [
        line.strip()
        for number, line in enumerate(source.splitlines(), 1)
        if number not in skipped
    ]
    written = sum(bool(line) and not line.startswith("#") for line in lines)
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
    return written + commands(tree), statements - len(left_out) + commands(tree)


def table() -> dict[str, dict[str, tuple[int, int]]]:
    """Lines and statements, by task and library."""
    return {
        task: {name: count(file.read_text()) for name, file in scripts(task).items()}
        for task in MOST
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="write the counts as JSON")
    options = parser.parse_args()
    counts = table()
    print(f"{'lines (statements)':20}" + "".join(f"{name:>14}" for name in LIBRARIES))
    for task, found in counts.items():
        cells = ["{} ({})".format(*found[n]) if n in found else "" for n in LIBRARIES]
        print(f"{task:20}" + "".join(f"{cell:>14}" for cell in cells))
    if options.record:
        record(options.record, lines=counts)


if __name__ == "__main__":
    main()
