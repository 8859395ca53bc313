"""The page that compares features: each cell has a source that exists, or says that it was not verified."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import DOCS

PAGE = DOCS / "reference" / "features.md"
TOOLS = ["Paceline", "Lightning", "Hugging Face", "DeepSpeed", "torchtitan", "Ray Train", "Composer"]
CELL = re.compile(r"\[([^\]]+)\](?:\[([\w-]+)\]|\(([^)]+)\))")


def tables(text: str) -> list[list[str]]:
    """The rows of the tables of features."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == 9]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    titles = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_each_cell_of_the_feature_table_has_a_source() -> None:
    text = PAGE.read_text()
    sources = dict(re.findall(r"(?m)^\[([\w-]+)\]: (https://\S+)$", text))
    heads = [row for row in tables(text) if row[0] == "Feature"]
    rows = [row for row in tables(text) if row[0] != "Feature"]
    assert len(rows) > 70
    assert all(head[1:] == TOOLS for head in heads)
    assert len({row[0] for row in rows}) == len(rows)
    used = set()
    for name, own, *others in rows:
        linked = CELL.fullmatch(own)
        assert linked is not None, name
        assert linked[3], name
        target, _, anchor = linked[3].partition("#")
        page = (PAGE.parent / target).resolve()
        assert page.exists(), linked[3]
        assert not anchor or anchor in anchors(page), linked[3]
        for tool, cell in zip(TOOLS[1:], others, strict=True):
            if cell != "not verified":
                source = CELL.fullmatch(cell)
                assert source is not None, (name, tool, cell)
                assert source[2] in sources, (name, tool, cell)
                used.add(source[2])
    assert used == sources.keys()


@pytest.mark.parametrize(
    "repository", ["pytorch-lightning", "accelerate", "DeepSpeed", "torchtitan", "ray", "composer"]
)
def test_sources_are_of_one_version(repository: str) -> None:
    """A link to a branch would show other text next year."""
    revisions = re.findall(rf"(?m)^\[[\w-]+\]: https://github\.com/[\w-]+/{repository}/blob/([^/]+)/", PAGE.read_text())
    assert revisions
    assert all(re.fullmatch(r"[0-9a-f]{7,40}|[\w-]*\d+\.\d+\.\d+", revision) for revision in revisions)
