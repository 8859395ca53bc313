"""Golden files: what is said is compared with the text of its name, and written only where that is asked for."""

from __future__ import annotations

import re
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


def test_parts_that_differ_from_run_to_run_are_replaced(tmp_path: Path) -> None:
    golden = Golden(tmp_path / "cli" / "test_words.py", update=True)
    golden.compare("name", r"pid 12 and pid 345 in /tmp/x\1", {"/tmp/x": r"FOLDER\2", re.compile(r"pid \d+"): "PID"})
    assert golden.texts == {"name": r"PID and PID in FOLDER\2\1"}
    with pytest.raises(AssertionError, match="is not in"):
        golden.compare("other", "text", {"/tmp/x": "FOLDER"})


def test_control_characters_and_line_ends_of_others_are_kept(tmp_path: Path) -> None:
    module = tmp_path / "cli" / "test_words.py"
    Golden(module, update=True).compare("name", "a\rb\x85c\u2028d\x1c\r\ne")
    Golden(module, update=False).compare("name", "a\rb\x85c\u2028d\x1c\r\ne")


def test_each_golden_file_belongs_to_a_module_of_tests() -> None:
    tests = Path(__file__).parents[1]
    for file in (tests / "golden").glob("*/*.txt"):
        if file.parent.name == "source":  # of the package, see user_texts.py
            continue
        assert (tests / file.parent.name / f"test_{file.stem}.py").exists(), file
