"""Writes docs/tree.md: every folder and module with the first line of its docstring, and the budgets of folders.

    python tests/tree_page.py          # write the tree into docs/tree.md
    python tests/tree_page.py --sizes  # print the lines of each folder and root module

The table of budgets and the text around the tree are written by hand and stay.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "paceline"
PAGE = ROOT / "docs" / "tree.md"
_DOCSTRING = re.compile(r'r?"""(.*?)(?:\n|""")')
_TREE = re.compile(r"(?<=```\n).*?(?=```)", re.DOTALL)
_BUDGET = re.compile(r"^\| `(\w+)/?` \| ([\d,]+) \|", re.MULTILINE)  # a row of the table
_WIDTH = 28


def caption(path: Path) -> str:
    """The first line of a module's docstring, without its full stop."""
    docstring = _DOCSTRING.match(path.read_text())
    return docstring[1].removesuffix(".") if docstring else ""


def lines_of_tree(folder: Path, from_the_top: list[str], depth: int = 0) -> Iterator[str]:
    """The lines of a folder's content: modules and folders at the top in the given order, else by name."""
    rank = {name: number for number, name in enumerate(from_the_top)}
    entries = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    for path in sorted(entries, key=lambda path: (rank.get(path.stem, len(rank)) if depth == 0 else 0, path.name)):
        if path.name == "__init__.py":
            continue
        name = "  " * depth + (f"{path.name}/" if path.is_dir() else path.name)
        yield f"{name:{_WIDTH}}  {caption(path / '__init__.py' if path.is_dir() else path)}".rstrip()
        if path.is_dir():
            yield from lines_of_tree(path, from_the_top, depth + 1)


def page(text: str, from_the_top: list[str]) -> str:
    """The page with the tree as the source has it now."""
    tree = "\n".join(lines_of_tree(PACKAGE, from_the_top))
    return _TREE.sub(lambda _: f"{tree}\n", text, count=1)


def budgets() -> dict[str, int]:
    """{folder or root module: the lines it may have}."""
    return {row[1]: int(row[2].replace(",", "")) for row in _BUDGET.finditer(PAGE.read_text())}


def sizes() -> dict[str, int]:
    """{folder or root module: its lines}."""
    counts: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        counts[path.relative_to(PACKAGE).parts[0].removesuffix(".py")] += len(path.read_text().splitlines())
    return dict(counts)


def main() -> None:
    from house_rules import ORDER

    if "--sizes" in sys.argv[1:]:
        for name, lines in sorted(sizes().items()):
            print(f"| `{name}{'/' if (PACKAGE / name).is_dir() else ''}` | {-(-lines // 100) * 100:,} |")
        return
    PAGE.write_text(page(PAGE.read_text(), ORDER))


if __name__ == "__main__":
    main()
