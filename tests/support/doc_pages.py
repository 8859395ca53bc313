"""Runs the code blocks of a documentation page in order, in a folder, as a reader would.

- A `code-block` with a caption is a file of that name.
- A block of the language `console` has commands behind `$ `, each followed by lines that it prints, in this order and
  perhaps among others (progress lines come at any time). `...` stands for such others, within a line for any text.
- A comment `<!-- not run: REASON -->` before a block says why it is not run.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<head>\{code-block\} \w+|\w+)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A code block: its `language`, the `file` that it is if it has a caption, and the `reason` why it is not run."""

    language: str
    text: str
    file: str | None
    reason: str | None


@dataclass(frozen=True)
class Command:
    """A command of a console block, and the lines that it is to print."""

    line: str
    output: tuple[str, ...]


def blocks_of(page: str) -> Iterator[Block]:
    """The code blocks of a page, without directives such as `toctree`."""
    for match in _BLOCK.finditer(page):
        language, body, file = match["head"].removeprefix("{code-block} "), match["body"], None
        if match["head"].startswith("{"):
            option, _, body = body.partition("\n\n")
            file = option.removeprefix(":caption: ")
        yield Block(language, body, file, match["reason"])


def python_blocks(page: str) -> list[str]:
    """The Python in a page's blocks, in order."""
    return [block.text for block in blocks_of(page) if block.language == "python"]


def commands_of(text: str) -> Iterator[Command]:
    """The commands of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield Command(line, tuple(output.splitlines()))


def missing_line(expected: tuple[str, ...], printed: str) -> str | None:
    """The first of the `expected` lines that is not printed after the ones before it; None if all are."""
    lines = iter(printed.splitlines())
    for wanted in [line for line in expected if line != "..."]:
        pattern = re.escape(wanted).replace(re.escape("..."), ".*")
        if not any(re.fullmatch(pattern, line) for line in lines):
            return wanted
    return None


def run_page(page: Path, folder: Path, environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Runs a page's blocks in a folder. Returns the number of commands that were run, and the reasons of the blocks
    that were not. Raises AssertionError where a command fails or prints something else than the page says.
    """
    count, reasons = 0, []
    for block in blocks_of(page.read_text()):
        if block.reason is not None:
            reasons.append(block.reason)
            continue
        if block.file is not None:
            (folder / block.file).write_text(block.text)
            continue
        assert block.language == "console", (
            f"{page.name} has a block of {block.language} that is neither file nor command"
        )
        for command in commands_of(block.text):
            done = subprocess.run(
                ["bash", "-c", command.line],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=280,
                check=False,
            )
            assert done.returncode == 0, f"{page.name}: {command.line}\n{done.stdout}"
            missing = missing_line(command.output, done.stdout)
            assert missing is None, f"{page.name}: {command.line} does not print {missing!r}\n{done.stdout}"
            count += 1
    return count, reasons
