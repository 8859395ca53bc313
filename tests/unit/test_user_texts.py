"""The golden files of the texts in the source are up to date, and hold all texts that a user may read."""

from __future__ import annotations

from user_texts import GOLDEN, pages, texts_of

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


def test_the_texts_are_those_of_the_golden_files() -> None:
    """After a change of texts: python tests/user_texts.py, and read the difference."""
    assert {str(path.relative_to(GOLDEN)): path.read_text() for path in GOLDEN.rglob("*.txt")} == pages()


def test_all_literals_of_two_words_are_texts_but_docstrings() -> None:
    assert [*texts_of(SOURCE)] == [
        ("", "two words"),
        ("C.f", "it failed after {count - 1} steps"),
        ("C.f", "start it again"),
    ]
