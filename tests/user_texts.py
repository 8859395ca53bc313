"""Collects the texts in the source that users may read: string literals of two words or more, but docstrings.

    python tests/user_texts.py             # write them into tests/golden/source, one file for each module
    python tests/user_texts.py --patterns  # count phrases that plain English does not have, and print where they are

A placeholder of an f-string stands as `{expression}`. `tests/unit/test_user_texts.py` holds the files up to date, so
that a change of a text is seen in one place.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "paceline"
GOLDEN = ROOT / "tests" / "golden" / "source"
# What a literal translation sounds like; `counted` finds these as whole words.
PATTERNS = {
    "is no": r"\b(?:is|are|was|were) no\b",
    "is none": r"\b(?:is|are) none\b",
    "wants": r"\bwants?\b",
    "of which": r"\b(?:of|with|for|in|to|from) which\b",
    "whoever": r"\b(?:who|what|which|how|where|when)ever\b",
    "what it has": r"\bwhat (?:it|they|we|is|was|are|were)\b",
    "so often": r"\bso (?:often|many|much|long)\b",
    "beside": r"\bbesides?\b",
    "such": r"\bsuch\b",
    "told": r"\b(?:told|tells?) (?:of|what)\b",
    "is of": r"\b(?:is|are|was|were) of\b",
}
_ANY_PATTERN = re.compile("|".join(PATTERNS.values()))
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
_WORDS = re.compile(r"[A-Za-z]{2,}\W+[A-Za-z]{2,}")


def text_of(node: ast.AST) -> str | None:
    """The text of a string literal or an f-string; None for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            parts.append(f"{{{ast.unparse(part.value)}}}")
        elif isinstance(part, ast.Constant):
            parts.append(str(part.value))
    return "".join(parts)


def texts_of(source: str) -> list[tuple[str, str]]:
    """(qualified name of the function or class, text) of each text in a module, in the order of the source."""
    found: list[tuple[str, str]] = []

    def collect(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and text_of(child.value) is not None:
                continue  # a docstring, which attributes have, too
            if (text := text_of(child)) is not None:
                if _WORDS.search(text):
                    found.append((name, text))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                collect(child, f"{name}.{child.name}" if name else child.name)
            elif not isinstance(child, ast.Name | ast.expr_context | ast.operator | ast.cmpop):
                collect(child, name)

    collect(ast.parse(source), "")
    return found


@cache
def texts() -> list[tuple[Path, list[tuple[str, str]]]]:
    """(module's file, its texts by the name of the function or class) of all modules."""
    return [(path, texts_of(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


def pages() -> dict[str, str]:
    """{path of the golden file: content} for each module that has texts."""
    content = {}
    for path, found in texts():
        lines, before = [], None
        for name, text in found:
            if name != before:
                lines.append(f"-- {name or '(module)'}")
                before = name
            lines += [f"    {line}".rstrip() for line in text.splitlines()]
        if lines:
            content[str(path.relative_to(PACKAGE).with_suffix(".txt"))] = "\n".join(lines) + "\n"
    return content


def counted() -> tuple[Counter[str], list[str]]:
    """How often each pattern occurs in the texts, and a line for each place."""
    counts, places = Counter[str](), []
    for path, found in texts():
        for name, text in found:
            plain = _PLACEHOLDER.sub("", text)
            for pattern, expression in PATTERNS.items() if _ANY_PATTERN.search(plain) else ():
                if re.search(expression, plain) and "=> {" not in text:  # which is JavaScript
                    counts[pattern] += 1
                    places.append(f"{path.relative_to(ROOT)}: {name}: [{pattern}] {' '.join(text.split())}")
    return counts, places


def main() -> None:
    if "--patterns" in sys.argv[1:]:
        counts, places = counted()
        sys.stdout.write(
            "\n".join([*places, "", *(f"{count:5} {name}" for name, count in counts.most_common())]) + "\n"
        )
        return
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name, text in pages().items():
        (GOLDEN / name).parent.mkdir(parents=True, exist_ok=True)
        (GOLDEN / name).write_text(text)


if __name__ == "__main__":
    main()
