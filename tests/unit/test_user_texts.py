"""The golden files of the texts in the source are up to date, and hold all texts that a user may read."""

from __future__ import annotations

import re

from paths import DOCS
from user_texts import GOLDEN, counted, pages, texts_of

SOURCE = '''
"""A module's docstring is no text."""
NAMES = ("one", "two words")

class C:
    """Neither is this."""

    def f(self, count):
        """Nor this."""
        raise UsageError("it failed "
                         f"after {count - 1} steps", "start it again")
'''


def test_the_texts_are_those_of_the_golden_files_and_have_no_phrase_of_a_literal_translation() -> None:
    """After a change of texts: python tests/user_texts.py, and read the difference. `PATTERNS` has the phrases. One
    place looks for ssh's own words.

    One test, because the texts of the package are read once per process.
    """
    assert {str(path.relative_to(GOLDEN)): path.read_text() for path in GOLDEN.rglob("*.txt")} == pages()
    _, places = counted()
    assert [place for place in places if not place.startswith("src/paceline/launch/engines/ssh.py: : [such]")] == []


PHRASES = r"\b(wants|whoever|besides?|so often|what (?:it|they) ha(?:s|ve)|is of no use|told of|tells of)\b"


def test_no_page_has_a_phrase_of_a_literal_translation() -> None:
    paths = [*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CHANGELOG.md"]
    text = {page.name: re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S) for page in paths}
    found = [(name, m[0]) for name, page in text.items() if name != "tree.md" for m in re.finditer(PHRASES, page)]
    assert found == []


def test_all_literals_of_two_words_are_texts_but_docstrings() -> None:
    assert [*texts_of(SOURCE)] == [
        ("", "two words"),
        ("C.f", "it failed after {count - 1} steps"),
        ("C.f", "start it again"),
    ]
