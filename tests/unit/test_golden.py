"""Golden files: what is said is compared with the text of its name, and written only where that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden import Golden, read_texts


def test_texts_are_written_and_compared(tmp_path: Path) -> None:
    module = tmp_path / "cli" / "test_words.py"
    writing = Golden(module, update=True)
    writing.compare("second", "two\n\nlines  \n")
    writing.compare("first", "one")
    texts = read_texts(tmp_path / "golden" / "cli" / "words.txt")
    assert list(texts.items()) == [("first", "one"), ("second", "two\n\nlines")]
    comparing = Golden(module, update=False)
    comparing.compare("second", "two\n\nlines")
    with pytest.raises(AssertionError):
        comparing.compare("first", "another")
    with pytest.raises(AssertionError, match="has no text 'third'"):
        comparing.compare("third", "three")
    assert read_texts(writing.file) == texts


def test_one_name_has_one_text(tmp_path: Path) -> None:
    golden = Golden(tmp_path / "cli" / "test_words.py", update=True)
    golden.compare("name", "text")
    golden.compare("name", "text")
    with pytest.raises(AssertionError, match="two texts have the name 'name'"):
        golden.compare("name", "another text")
