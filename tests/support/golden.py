"""Texts that a user reads, kept in one file for each module of tests: `golden/FOLDER/MODULE.txt` beside the folders.

A test asks the fixture `golden` to compare a text with the one of that name:

    golden("a missing folder", str(error.value))

`replace` puts fixed words in place of what differs from run to run, before the comparison:

    golden("a missing folder", done.stderr, {str(tmp_path): "FOLDER", re.compile(r"pid \\d+"): "pid PID"})

After a change of texts, `pytest --golden` (without -n) writes the texts of today; read the difference before you commit
it. Texts that no test asks for any more stay: delete the file first to be rid of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

_HEAD = "==== "
_NOTHING: Mapping[str | re.Pattern[str], str] = MappingProxyType({})


class GoldenText(Protocol):
    """The fixture `golden`."""

    def __call__(self, name: str, text: str, replace: Mapping[str | re.Pattern[str], str] = ...) -> None: ...


def read_texts(file: Path) -> dict[str, str]:
    """The texts of a golden file by name; of a file that is not there, none."""
    texts: dict[str, str] = {}
    if not file.exists():
        return texts
    for part in file.read_bytes().decode().split(f"\n{_HEAD}")[1:]:
        name, _, text = part.partition("\n")
        texts[name] = text.removesuffix("\n")
    return texts


def write_texts(file: Path, about: str, texts: Mapping[str, str]) -> None:
    """Writes a golden file, its texts in the order of their names, below a line that says what it holds."""
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"\n{_HEAD}{name}\n{texts[name]}\n" for name in sorted(texts)]
    file.write_bytes((f"{about}\n" + "".join(parts)).encode())


class Golden:
    """The golden file of one module of tests. `update`: texts are written instead of compared."""

    def __init__(self, module: Path, update: bool) -> None:
        self.module, self.update = module, update
        self.file = module.parents[1] / "golden" / module.parent.name / f"{module.stem.removeprefix('test_')}.txt"
        self.texts = read_texts(self.file)
        self.asked: set[str] = set()

    def compare(self, name: str, text: str, replace: Mapping[str | re.Pattern[str], str] = _NOTHING) -> None:
        """Raises AssertionError unless `text` is what the file has under `name`. Of `text` counts neither the empty
        line at an end nor a blank at the end of a line. `replace`: words for strings, and for matches of patterns, each
        of which must be in the text.
        """
        assert name.isprintable(), f"{name!r} is no name"
        for part, word in replace.items():
            pattern = re.compile(re.escape(part)) if isinstance(part, str) else part
            text, count = pattern.subn(lambda _, word=word: word, text)  # type: ignore[misc]
            assert count, f"{pattern.pattern!r} is not in {text!r}"
        assert f"\n{_HEAD}" not in f"\n{text}", "this would read as another text's head"
        text = "\n".join(line.rstrip(" ") for line in text.strip("\n").split("\n"))
        assert name not in self.asked or self.texts[name] == text, (
            f"two texts have the name {name!r}; this one is:\n{text}"
        )
        self.asked.add(name)
        if self.update:
            self.texts[name] = text
            write_texts(self.file, f"What tests/{self.module.parent.name}/{self.module.name} expects.", self.texts)
        assert name in self.texts, f"{self.file} has no text {name!r}; it would be:\n{text}"
        assert text == self.texts[name]
